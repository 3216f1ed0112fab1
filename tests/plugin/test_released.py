"""Checkpoints of the published implementation: loaded by fairseq, unchanged, to the same outputs.

published.py states what they hold and what they compute.
"""

import argparse
import functools
import gzip
import math
import re
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch

import published
from conftest import ROOT, fairseq, write_dictionaries

pytest.importorskip("fairseq")

import sentencepiece
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, indexed_dataset

from pipeline.recipes import average
from talk_fairseq.models.released import our_options, rename_parameters, upgrade
from talk_fairseq.models.talkconv import TaLKConvModel
from talk_fairseq.models.talkconv_lm import TaLKConvLanguageModel

WORDS = 97


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the dictionaries of both tasks, of WORDS words."""
    folder = tmp_path_factory.mktemp("released")
    write_dictionaries(folder, WORDS)
    return folder


def save(path, state):
    torch.save(state, path)
    return str(path)


def load(path, data, **overrides):
    """The model, by fairseq's own loader, in evaluation mode."""
    overrides = {"data": str(data), **overrides}
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], overrides)
    return models[0].eval()


@pytest.fixture(scope="module")
def loaded(folder, tmp_path_factory):
    """A function to the options, parameters and model of a checkpoint, which is loaded once."""

    @functools.cache
    def loaded(name):
        args = published.PUBLISHED[name]()
        state = published.checkpoint(args, WORDS)
        path = tmp_path_factory.mktemp("loaded") / "released.pt"
        return args, state["model"], load(save(path, state), folder)

    return loaded


def tokens(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, WORDS, shape, generator=generator)


def sources(lengths, left):
    """Sentences in a batch, padded on either side."""
    batch = torch.full((len(lengths), max(lengths)), published.PAD)
    for row, length in zip(batch, lengths):
        row[slice(-length, None) if left else slice(length)] = tokens(length, seed=length)
    return batch


def differences(model, args, parameters):
    """The largest differences of log probabilities, with the source padded right and left."""
    target = tokens(3, 21)
    for left in (False, True):
        source = sources([17, 5, 11], left) if args.task == "translation" else None
        given = [target] if source is None else [source, source.ne(published.PAD).sum(1), target]
        sample = {"target": None}
        got = model.get_normalized_probs(model(*given), log_probs=True, sample=sample).double()
        want = published.log_probabilities(args, parameters, target, source)
        assert want.std() > 0.5
        yield ((got - want).abs() / want.abs().clamp(min=10) * 10).max().item()


# --- The model ---


@pytest.mark.parametrize("name", published.PUBLISHED)
def test_outputs(name, loaded):
    args, parameters, model = loaded(name)
    assert max(differences(model, args, parameters)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("size", [512, pytest.param(1024, marks=pytest.mark.long)])
def test_outputs_at_the_published_sizes(size, folder, tmp_path):
    iwslt = size == 512
    changes = {"share_all_embeddings": not iwslt, "share_decoder_input_output_embed": not iwslt}
    for side in ("encoder", "decoder"):
        changes |= {f"{side}_embed_dim": size, f"{side}_conv_dim": size, f"{side}_glu": not iwslt}
        changes |= {f"{side}_ffn_embed_dim": 1024 if iwslt else 4096}
        changes |= {f"{side}_attention_heads": 4 if iwslt else 16}
        changes |= {f"{side}_layers": 7 if side == "encoder" else 6}
        changes |= {f"decoder_{way}_dim": size for way in ("input", "output")}
    if not iwslt:
        changes["encoder_kernel_size_list"] = [3, 7, 15, 31, 31, 31, 31]
        changes["decoder_kernel_size_list"] = [3, 7, 15, 31, 31, 31]
    arch = "talkconv_iwslt_de_en" if iwslt else "talkconv_wmt_en_de_big"
    args = published.translation_args(arch, **changes)
    state = published.checkpoint(args, WORDS, last_optimizer_state=None)
    model = load(save(tmp_path / "released.pt", state), folder)
    assert max(differences(model, args, state["model"])) < 1e-5


def test_a_conv_dim_of_its_own(folder, tmp_path):
    args = published.translation_args(
        "talkconv_wmt_en_de_big", encoder_conv_dim=16, decoder_conv_dim=48
    )
    state = published.checkpoint(args, WORDS)
    model = load(save(tmp_path / "released.pt", state), folder)
    assert max(differences(model, args, state["model"])) < 1e-5


def test_dictionaries_that_differ(tmp_path):
    for language, words in (("es", WORDS), ("en", WORDS + 11)):
        lines = "".join(f"w{index} 1\n" for index in range(words - 4))
        (tmp_path / f"dict.{language}.txt").write_text(lines)
    args = published.PUBLISHED["iwslt"]()
    state = published.checkpoint(args, WORDS, WORDS + 11)
    model = load(save(tmp_path / "released.pt", state), tmp_path)
    assert model.decoder.output_projection.weight.shape == (WORDS + 11, 32)
    assert max(differences(model, args, state["model"])) < 1e-5


@pytest.mark.parametrize("name", published.PUBLISHED)
def test_loaded_and_saved_again_it_has_our_names(name, loaded):
    _, _, model = loaded(name)
    ours = model.state_dict()
    old = re.compile(r"layers\.\d+\.(linear|conv|layer_norms)|embed_out|_float_tensor")
    assert not [
        key
        for key in ours
        if old.search(key.replace("head._float", "").replace("embed_tokens._float", ""))
    ]
    assert ours["decoder.version"] == 3
    # and such a state dict passes through unchanged
    again = dict(ours)
    rename_parameters(again)
    assert again.keys() == ours.keys()


def test_in_half_precision(folder, tmp_path):
    """As --fp16 saved them."""
    args = published.PUBLISHED["wmt"]()
    state = published.checkpoint(args, WORDS)
    halves = {key: p.half() if p.is_floating_point() else p for key, p in state["model"].items()}
    model = load(save(tmp_path / "released.pt", {**state, "model": halves}), folder)
    assert model.encoder.layers[0].fc1.weight.dtype == torch.float32
    assert max(differences(model, args, halves)) < 1e-5


# --- Options ---


def options(name="wmt", remove=(), **changes):
    """Our options of a published checkpoint whose options are changed."""
    args = published.PUBLISHED[name]()
    parameters = published.parameters(args, WORDS, WORDS)
    given = {**vars(args), **changes}
    for option in remove:
        del given[option]
    return our_options(argparse.Namespace(**given), parameters)


def test_dropouts_have_our_names():
    ours = options(weight_dropout=0.25, relu_dropout=0.15, activation_dropout=0.9)
    assert ours.offset_dropout == 0.25 and ours.activation_dropout == 0.15
    assert ours.activation_fn == "swish"
    old = r"weight_dropout|relu_dropout|\w+_kernel_size_list"
    assert not [option for option in vars(ours) if re.fullmatch(old, option)]


@pytest.mark.parametrize("sizes", [[9, 8, 7, 6, 5, 4], "[9, 8, 7, 6, 5]", "9,8,7,6"])
def test_kernel_sizes_beyond_the_layers_are_not_used(sizes):
    assert options(encoder_kernel_size_list=sizes).encoder_max_left == [9, 8, 7, 6]


def test_too_few_kernel_sizes_are_named(folder, tmp_path):
    args = published.PUBLISHED["iwslt"]()
    path = save(tmp_path / "released.pt", published.checkpoint(args, WORDS))
    with pytest.raises(
        ValueError, match="encoder_max_left: expected 4 windows, one per layer, got 2"
    ):
        load(path, folder, encoder_kernel_size_list=[1, 2])


def test_overrides_by_either_name(folder, tmp_path):
    """As --model-overrides gives them."""
    state = published.checkpoint(published.PUBLISHED["iwslt"](), WORDS)
    path = save(tmp_path / "released.pt", state)
    model = load(path, folder, weight_dropout=0.5, decoder_max_left="2,4,8")
    unit = model.decoder.layers[2].self_attn
    assert unit.conv.max_left == 8 and unit.conv.offset_dropout == 0.5
    assert model.encoder.layers[3].self_attn.conv.max_left == 15


@pytest.mark.parametrize("arch", ["talkconv", "talkconv_lm"])
def test_entries_that_lack_have_the_published_defaults(arch):
    name = {"talkconv": "pre-norm", "talkconv_lm": "language model"}[arch]
    lacking = ("weight_dropout", "input_dropout", "decoder_kernel_size_list", "decoder_glu")
    ours = options(name, remove=lacking)
    assert (ours.offset_dropout, ours.input_dropout) == (0.0, 0.1)
    assert getattr(ours, "decoder_glu", True)
    if arch == "talkconv":
        assert ours.decoder_max_left == "1,3,7,15x3"


def test_the_final_norm_is_that_of_the_model():
    assert not options("pre-norm").no_decoder_final_norm
    ours = options("language model", decoder_normalize_before=False, no_decoder_final_norm=False)
    assert ours.no_decoder_final_norm and ours.decoder_normalize_before


def test_six_decoder_heads_that_cannot_be(folder, tmp_path):
    """The published CNN-DM archs ask for them by default: the offsets tell how many there were."""
    args = published.PUBLISHED["cnndm"]()
    state = published.checkpoint(args, WORDS)
    asked = argparse.Namespace(**{**vars(args), "decoder_attention_heads": 6})
    model = load(save(tmp_path / "released.pt", {**state, "args": asked}), folder)
    assert model.decoder.layers[0].self_attn.conv.heads == 4
    assert max(differences(model, args, state["model"])) < 1e-5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"encoder_kernel_size_list": "3;7"}, "encoder_kernel_size_list: expected sizes such as"),
        ({"decoder_kernel_size_list": 3}, "decoder_kernel_size_list: expected sizes such as"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        options(**change)


@pytest.mark.parametrize("args", [None, argparse.Namespace(arch="transformer")])
def test_published_parameters_need_published_options(args):
    state = published.checkpoint(published.PUBLISHED["iwslt"](), WORDS)
    with pytest.raises(ValueError, match="args: expected the options of a talkconv arch"):
        upgrade({**state, "args": args})


def test_what_is_given_is_not_changed():
    state = published.checkpoint(published.PUBLISHED["iwslt"](), WORDS)
    names, keys = set(vars(state["args"])), list(state["model"])
    upgrade(state)
    assert set(vars(state["args"])) == names and list(state["model"]) == keys
    assert state["optimizer_history"][-1]["optimizer_name"] == "FairseqAdam"


# --- What else a checkpoint may hold, or lack ---


class Foreign:
    """Any type that nobody knows."""


def test_anything_but_plain_values_is_refused_and_named(folder, tmp_path):
    state = published.checkpoint(published.PUBLISHED["iwslt"](), WORDS)
    state["extra_state"]["train_meters"] = Foreign()
    path = save(tmp_path / "released.pt", state)
    with pytest.raises(ValueError, match=rf"in {path}, got the unsafe type test_released.Foreign"):
        load(path, folder)


@pytest.mark.parametrize(
    "remove, add, message",
    [
        ("encoder.layers.1.linear1.bias", {}, "encoder.layers.1.self_attn.linear1.bias"),
        (None, {"decoder.layers.0.gate.weight": torch.zeros(2)}, "decoder.layers.0.gate.weight"),
        (
            "decoder.layers.0.conv.offsets.weight",
            {"decoder.layers.0.conv.offsets.weight": torch.zeros(9, 32)},
            r"size mismatch for decoder.layers.0.self_attn.conv.offsets.weight",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_named(remove, add, message, folder, tmp_path):
    state = published.checkpoint(published.PUBLISHED["iwslt"](), WORDS)
    state["model"].pop(remove, None)
    state["model"].update(add)
    with pytest.raises(RuntimeError, match=message):
        load(save(tmp_path / "released.pt", state), folder)


# --- fairseq's commands ---


@pytest.fixture(scope="module")
def released(corpus, tmp_path_factory):
    """A checkpoint for the dictionary of the corpus, and its options and parameters."""
    words = len(Dictionary.load(str(corpus / "dict.en.txt")))
    args = published.PUBLISHED["wmt"]()
    state = published.checkpoint(args, words)
    path = save(tmp_path_factory.mktemp("released") / "released.pt", state)
    return path, args, state["model"]


def test_generate(corpus, released):
    """The scores that fairseq-generate prints are those of the published model."""
    path, args, parameters = released
    printed = fairseq("generate", corpus, "--path", path, "--beam", 2, "--max-len-b", 8)
    words = Dictionary.load(str(corpus / "dict.en.txt"))
    lines = {
        key: dict(re.findall(rf"^{key}-(\d+)\t(.*)$", printed, re.M)) for key in ("S", "H", "P")
    }
    assert len(lines["H"]) == 43
    for sentence in ("0", "7", "42"):
        source, target = (
            words.encode_line(text, add_if_not_exist=False).long()[None]
            for text in (lines["S"][sentence], lines["H"][sentence].partition("\t")[2])
        )
        before = torch.cat([target[:, -1:], target[:, :-1]], dim=1)  # it begins with </s>
        want = published.log_probabilities(args, parameters, before, source)
        want = want.gather(2, target[..., None]).flatten() / math.log(2)
        got = torch.tensor([float(score) for score in lines["P"][sentence].split()])
        assert torch.allclose(got.double(), want, rtol=0, atol=2e-4)  # printed to four digits


def test_eval_lm(corpus, tmp_path):
    """The loss that fairseq-eval-lm prints is that of the published model."""
    shutil.copy(corpus / "dict.en.txt", tmp_path / "dict.txt")
    for ending in ("bin", "idx"):
        shutil.copy(corpus / f"test.es-en.en.{ending}", tmp_path / f"test.{ending}")
    words = Dictionary.load(str(tmp_path / "dict.txt"))
    args = published.PUBLISHED["adaptive language model"]()
    state = published.checkpoint(args, len(words))
    path = save(tmp_path / "released.pt", state)
    printed = fairseq(
        "eval-lm", tmp_path, "--path", path, "--tokens-per-sample", args.tokens_per_sample
    )

    text = torch.cat(list(indexed_dataset.make_dataset(str(tmp_path / "test"), "mmap"))).long()
    before = torch.cat([torch.tensor([words.eos()]), text[:-1]])
    loss = 0.0
    for start in range(0, len(text), args.tokens_per_sample):
        block = slice(start, start + args.tokens_per_sample)
        log_p = published.log_probabilities(args, state["model"], before[block][None])[0]
        loss -= log_p.gather(1, text[block][:, None]).sum().item()
    expected = loss / len(text) / math.log(2)
    assert float(re.search(r"Loss \(base 2\): (\S+?),", printed)[1]) == pytest.approx(
        expected, abs=2e-4
    )


FLAGS = (
    "--arch talkconv_wmt_en_de_big --encoder-layers 4 --decoder-layers 3 --encoder-max-left "
    "3,7,15,31 --decoder-max-left 3,7,15 --encoder-embed-dim 32 --decoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 48 --decoder-ffn-embed-dim 48 --encoder-attention-heads 8 "
    "--decoder-attention-heads 8 --share-all-embeddings --max-tokens 2000 --optimizer adam "
    "--criterion label_smoothed_cross_entropy --max-update 1 --lr 0"
).split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--finetune-from-model"],
        ["--reset-optimizer", "--reset-dataloader", "--reset-meters", "--restore-file"],
    ],
)
def test_fine_tuning(flags, corpus, released, tmp_path):
    """It goes on from the published parameters, and what it saves has our names."""
    path, args, parameters = released
    fairseq("train", corpus, *FLAGS, "--save-dir", tmp_path, *flags, path)
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["model"]
    expected = dict(parameters)
    rename_parameters(expected)
    for side in ("encoder", "decoder"):
        del expected[f"{side}.embed_positions._float_tensor"]
    expected["decoder.output_projection.weight"] = expected["decoder.embed_tokens.weight"]
    assert saved.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(saved[key], value) or key.endswith("version"), key


@pytest.mark.slow
def test_the_optimizer_of_another_order_is_refused(corpus, released, tmp_path):
    printed = fairseq(
        "train", corpus, *FLAGS, "--save-dir", tmp_path, "--restore-file", released[0], check=False
    )
    assert "please reset the optimizer (--reset-optimizer)" in printed.splitlines()[-1]
    assert not list(tmp_path.glob("*.pt"))


def test_averages(folder, tmp_path):
    """scripts/average_checkpoints.py averages them, and the average loads."""
    args = published.PUBLISHED["iwslt"]()
    states = [published.checkpoint(args, WORDS, seed=seed) for seed in (0, 1)]
    paths = [save(tmp_path / f"checkpoint{n}.pt", state) for n, state in enumerate(states)]
    average.main(["--output", str(tmp_path / "averaged.pt"), "--inputs", *paths])
    mean = {
        key: (states[0]["model"][key] + states[1]["model"][key]) / 2 for key in states[0]["model"]
    }
    assert max(differences(load(tmp_path / "averaged.pt", folder), args, mean)) < 1e-5


# --- fairseq's and torch's hub ---


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    """A SentencePiece model with its dictionaries, and a checkpoint of each task for them."""
    folder = tmp_path_factory.mktemp("hub")
    with gzip.open(ROOT / "data/bible-es-en/train.en.gz", "rt") as text:
        (folder / "text").write_text("".join(islice(text, 300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "bpe"), vocab_size=300,
        model_type="bpe", minloglevel=2,
    )  # fmt: skip
    pieces = (folder / "bpe.vocab").read_text().splitlines()[3:]  # after <unk>, <s> and </s>
    for name in ("dict.es.txt", "dict.en.txt", "dict.txt"):
        (folder / name).write_text("".join(f"{line.split()[0]} 1\n" for line in pieces))
    words = len(pieces) + 4
    save(folder / "translation.pt", published.checkpoint(published.PUBLISHED["wmt"](), words))
    model = published.checkpoint(published.PUBLISHED["language model"](), words)
    save(folder / "language_model.pt", model)
    return folder


VERSE = "In the beginning God created the heaven and the earth."


def from_hub(model, folder, checkpoint_file):
    return model(
        str(folder),
        checkpoint_file=checkpoint_file,
        data_name_or_path=str(folder),
        bpe="sentencepiece",
        sentencepiece_model=str(folder / "bpe.model"),
    )


def greedy(args, parameters, prefix, source, steps):
    """The words that the published model finds likeliest, one after the other."""
    words = prefix
    for _ in range(steps):
        log_p = published.log_probabilities(args, parameters, words, source)[0, -1]
        log_p[[published.PAD, 2]] = -math.inf  # neither padding nor the end, before its time
        words = torch.cat([words, log_p.argmax().reshape(1, 1)], dim=1)
    return words[0, prefix.shape[1] :]


def test_translate_from_pretrained(hub_folder):
    hub = from_hub(TaLKConvModel.from_pretrained, hub_folder, "translation.pt")
    args = published.PUBLISHED["wmt"]()
    parameters = torch.load(hub_folder / "translation.pt", weights_only=True)["model"]
    source, start = hub.encode(VERSE)[None], torch.tensor([[2]])
    assert source.shape[1] > 12 and hub.decode(source[0]) == VERSE
    expected = hub.decode(greedy(args, parameters, start, source, 9))
    (translation,) = hub.translate([VERSE], beam=1, max_len_a=0, max_len_b=9, min_len=9)
    assert translation == expected and len(translation) > 9


def test_torch_hub(hub_folder):
    expected = from_hub(TaLKConvModel.from_pretrained, hub_folder, "translation.pt")

    def from_torch(*arguments, **options):
        return torch.hub.load(str(ROOT), "talkconv", *arguments, source="local", **options)

    hub = from_hub(from_torch, hub_folder, "translation.pt")
    assert hub.translate([VERSE], max_len_b=9) == expected.translate([VERSE], max_len_b=9)


def test_our_own_checkpoints_from_pretrained(corpus, trained):
    hub = TaLKConvModel.from_pretrained(
        str(trained.parent), checkpoint_file=trained.name, data_name_or_path=Path(corpus)
    )
    assert len(hub.translate(["En el principio", "Y dijo Dios"], max_len_b=9)) == 2
    # Each call may ask for alignments, which the command line has to before it loads a model.
    hub.translate(["En el principio"], max_len_b=9, print_alignment="hard")
    source = hub.encode("En el principio")
    (best, *_), *_ = hub.generate(source[None], max_len_b=9)
    assert best["attention"].shape == (len(source), len(best["tokens"]))


@pytest.mark.parametrize("door", ["from_pretrained", "torch.hub"])
def test_language_model_from_the_hub(door, hub_folder):
    def from_torch(*arguments, **options):
        return torch.hub.load(str(ROOT), "talkconv_lm", *arguments, source="local", **options)

    load = TaLKConvLanguageModel.from_pretrained if door == "from_pretrained" else from_torch
    hub = from_hub(load, hub_folder, "language_model.pt")
    args = published.PUBLISHED["language model"]()
    parameters = torch.load(hub_folder / "language_model.pt", weights_only=True)["model"]
    words = hub.encode(VERSE)
    before = torch.cat([words[-1:], words[:-1]])
    log_p = published.log_probabilities(args, parameters, before[None])[0]
    (score,) = hub.score([VERSE])  # of the words, not of the end
    want = log_p[:-1].gather(1, words[:-1, None])[:, 0].float()
    assert torch.allclose(score["positional_scores"], want, rtol=0, atol=1e-5)

    length = len(words) - 1 + 8
    (sampled,) = hub.sample([VERSE], beam=1, max_len_b=length, min_len=length)
    continuation = greedy(args, parameters, before[None], None, 8)
    assert sampled.startswith(VERSE)
    assert sampled == hub.decode(torch.cat([words[:-1], continuation]))
