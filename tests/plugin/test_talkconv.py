"""The encoder-decoder as a fairseq user meets it: archs, flags, YAML, training, generation."""

import argparse
import io
import re
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from conftest import PLUGIN, ROOT, SMALL, fairseq

pytest.importorskip("fairseq")

import fairseq_cli.generate
import fairseq_cli.interactive
from fairseq import checkpoint_utils, options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.models import build_model
from fairseq.models.transformer import TransformerConfig
from fairseq.search import (
    DiverseBeamSearch,
    DiverseSiblingsSearch,
    LexicallyConstrainedBeamSearch,
    Sampling,
)
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.token_generation_constraints import pack_constraints
from omegaconf import OmegaConf

from talk_fairseq.models.talkconv import TaLKConvConfig, TaLKConvModel, nested_config, window_list
from talk_fairseq.modules import TaLKConvUnit


def dictionary(size):
    words = Dictionary()
    for index in range(size - len(words)):
        words.add_symbol(f"w{index}")
    return words


def task(source_words=20, target_words=None):
    """What a model reads of its task; one joint dictionary unless `target_words` is given."""
    source = dictionary(source_words)
    target = dictionary(target_words) if target_words else source
    return SimpleNamespace(source_dictionary=source, target_dictionary=target)


def from_flags(*flags):
    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(
        options.parse_args_and_arch(parser, ["data", *flags])
    ).model


def from_yaml(text):
    return OmegaConf.create(textwrap.dedent(text))


def build(cfg, *words):
    with torch.device("meta"):
        return build_model(cfg, task(*words))


def units(model, side):
    return [layer.self_attn for layer in getattr(model, side).layers]


# --- The paper's archs ---

# The arch's windows, sizes and dropouts; then its parameters in millions, for which vocabularies.
ARCHS = {
    "talkconv_iwslt_de_en": dict(
        left=[1, 3, 7, 15, 15, 15, 15], decoder=[1, 3, 7, 15, 15, 15],
        sizes=(512, 1024, 4), glu=False, dropouts=(0.3, 0.1, 0.1, 0.0), million=38.2,
        words=(8848, 6632), flags=[],
    ),
    "talkconv_wmt_en_de_big": dict(
        left=[3, 7, 15, 31, 31, 31, 31], decoder=[3, 7, 15, 31, 31, 31],
        sizes=(1024, 4096, 16), glu=True, dropouts=(0.3, 0.1, 0.1, 0.1), million=209.19,
        words=(32768,), flags=["--share-all-embeddings"],
    ),
    "talkconv_wmt_en_de_big_1_decoder_layer": dict(
        left=[3, 7, 15, 31, 31, 31, 31], decoder=[31],
        sizes=(1024, 4096, 16), glu=True, dropouts=(0.3, 0.1, 0.1, 0.1), million=130.37,
        words=(32768,), flags=["--share-all-embeddings"],
    ),
    "talkconv_wmt_en_de_big_3_decoder_layers": dict(
        left=[3, 7, 15, 31, 31, 31, 31], decoder=[7, 15, 31],
        sizes=(1024, 4096, 16), glu=True, dropouts=(0.3, 0.1, 0.1, 0.1), million=161.90,
        words=(32768,), flags=["--share-all-embeddings"],
    ),
    "talkconv_wmt_en_fr_big": dict(
        left=[3, 7, 15, 31, 31, 31, 31], decoder=[3, 7, 15, 31, 31, 31],
        sizes=(1024, 4096, 16), glu=True, dropouts=(0.1, 0.1, 0.1, 0.1), million=None,
        words=(40000,), flags=["--share-all-embeddings"],
    ),
    "talkconv_cnndm_std": dict(
        left=[3, 7, 15, 31, 31, 31, 31], decoder=[3, 7, 15, 31, 31, 31],
        sizes=(512, 2048, 8), glu=True, dropouts=(0.3, 0.1, 0.1, 0.1), million=59.32,
        words=(30000,), flags=["--share-all-embeddings"],
    ),
    "talkconv_cnndm_deep": dict(
        left=[3, 7, 15] + [31] * 7, decoder=[3, 7] + [31] * 8,
        sizes=(512, 2048, 8), glu=True, dropouts=(0.3, 0.1, 0.1, 0.1), million=83.79,
        words=(30000,), flags=["--share-all-embeddings"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", ["flags", "yaml"])
@pytest.mark.parametrize("arch", ARCHS)
def test_archs(arch, source):
    want = ARCHS[arch]
    if source == "flags":
        cfg = from_flags("--arch", arch, *want["flags"])
    else:
        shared = "share_all_embeddings: true" if want["flags"] else ""
        cfg = from_yaml(f"_name: {arch}\n{shared}")
    model = build(cfg, *want["words"])
    assert [unit.conv.max_left for unit in units(model, "encoder")] == want["left"]
    assert [unit.conv.max_right for unit in units(model, "encoder")] == want["left"]
    assert [unit.conv.max_left for unit in units(model, "decoder")] == want["decoder"]
    assert not any(unit.conv.max_right for unit in units(model, "decoder"))
    for layer in (*model.encoder.layers, *model.decoder.layers):
        unit = layer.self_attn
        assert (layer.embed_dim, layer.fc1.out_features, unit.conv.heads) == want["sizes"]
        assert unit.glu == want["glu"] and unit.conv.normalize
        assert not layer.normalize_before and layer.activation_fn is torch.nn.functional.silu
        dropout, attention, offset, input_ = want["dropouts"]
        assert layer.dropout_module.p == dropout
        assert unit.conv.offset_dropout == offset and unit.input_dropout == input_
    assert all(layer.encoder_attn.dropout_module.p == attention for layer in model.decoder.layers)
    if want["million"]:
        million = sum(p.numel() for p in model.parameters()) / 1e6
        assert million == pytest.approx(want["million"], rel=0.01)


@pytest.mark.parametrize(
    "plus, paper",
    [
        ("talkconv_plus", "talkconv"),
        ("talkconv_plus_iwslt_de_en", "talkconv_iwslt_de_en"),
        ("talkconv_plus_wmt_en_de_big", "talkconv_wmt_en_de_big"),
    ],
)
def test_archs_beyond_the_paper_only_add_to_the_papers(plus, paper):
    ours, theirs = (build(from_flags("--arch", arch), 100, 100) for arch in (plus, paper))
    added = {f"{name}: {tuple(p.shape)}" for name, p in ours.named_parameters()}
    added -= {f"{name}: {tuple(p.shape)}" for name, p in theirs.named_parameters()}
    C = ours.encoder.layers[0].embed_dim
    assert added == {
        f"{side}.layers.{n}.self_attn.short.weight: ({taps}, {C})"
        for side, layers, taps in (("encoder", 7, 7), ("decoder", 6, 8))
        for n in range(layers)
    }
    assert not any(unit.short for side in ("encoder", "decoder") for unit in units(theirs, side))
    activations = torch.nn.functional.relu, torch.nn.functional.silu
    for model, activation in zip((ours, theirs), activations):
        layers = (*model.encoder.layers, *model.decoder.layers)
        assert all(layer.activation_fn is activation for layer in layers)


def test_iwslt_with_glu_has_the_papers_42_million():
    cfg = from_flags("--arch", "talkconv_iwslt_de_en", "--encoder-glu", "--decoder-glu")
    million = sum(p.numel() for p in build(cfg, 8848, 6632).parameters()) / 1e6
    assert million == pytest.approx(41.6, rel=0.01)


# --- Every hyperparameter of the paper is a flag and a key ---

FLAGS = (
    "--arch talkconv --encoder-layers 3 --decoder-layers 2 --encoder-embed-dim 24 "
    "--decoder-embed-dim 24 --encoder-attention-heads 3 --decoder-attention-heads 2 "
    "--encoder-talk-heads 24 --decoder-talk-heads 4 --encoder-max-left 1,9x2 "
    "--encoder-max-right 2,4,8 --decoder-max-left 3,5 --no-encoder-glu --no-talk-normalize "
    "--offset-dropout 0.25 --input-dropout 0.15 --activation-fn relu --encoder-normalize-before"
).split()
YAML = """
    _name: talkconv
    encoder_layers: 3
    decoder_layers: 2
    encoder_embed_dim: 24
    decoder_embed_dim: 24
    encoder_attention_heads: 3
    decoder_attention_heads: 2
    encoder_talk_heads: 24
    decoder_talk_heads: 4
    encoder_max_left: "1,9x2"
    encoder_max_right: [2, 4, 8]
    decoder_max_left: [3, 5]
    encoder_glu: false
    talk_normalize: false
    offset_dropout: 0.25
    input_dropout: 0.15
    activation_fn: relu
    encoder_normalize_before: true
"""


@pytest.mark.parametrize("source", ["flags", "yaml"])
def test_every_hyperparameter(source):
    model = build(from_flags(*FLAGS) if source == "flags" else from_yaml(YAML))
    encoder, decoder = units(model, "encoder"), units(model, "decoder")
    assert [(u.conv.max_left, u.conv.max_right) for u in encoder] == [(1, 2), (9, 4), (9, 8)]
    assert [(u.conv.max_left, u.conv.max_right) for u in decoder] == [(3, 0), (5, 0)]
    assert {u.conv.heads for u in encoder} == {24} and {u.conv.heads for u in decoder} == {4}
    assert model.decoder.layers[0].encoder_attn.num_heads == 2
    assert not any(u.glu for u in encoder) and all(u.glu for u in decoder)
    for unit in encoder + decoder:
        assert not unit.conv.normalize
        assert (unit.conv.offset_dropout, unit.input_dropout) == (0.25, 0.15)
    assert model.encoder.layers[0].activation_fn is torch.nn.functional.relu
    assert model.encoder.layers[0].normalize_before and model.encoder.layer_norm is not None
    assert not model.decoder.layers[0].normalize_before


def test_configs_do_not_share_their_parts():
    first = nested_config(from_yaml("encoder_layers: 7"), TaLKConvConfig)
    first.encoder.layers = 99
    assert nested_config(from_yaml("dropout: 0.5"), TaLKConvConfig).encoder.layers == 7
    assert TransformerConfig().encoder.layers == 6


@pytest.mark.parametrize(
    "text, layers, expected",
    [("3", 1, [3]), ("3,7,31x2", 4, [3, 7, 31, 31]), ([1, 2], 2, [1, 2]), (5, 1, [5])],
)
def test_window_list(text, layers, expected):
    assert window_list("windows", text, layers) == expected


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--encoder-max-left 3,7", "encoder_max_left: expected 7 windows, one a layer, got 2"),
        ("--encoder-max-right 3x9", "encoder_max_right: expected 7 windows, one a layer, got 9"),
        ("--decoder-max-left 3,a", "decoder_max_left: expected windows such as '3,7,31x2'"),
        ("--decoder-max-left 3x0,3x6", "decoder_max_left: expected windows such as '3,7,31x2'"),
        ("--input-dropout 2", "input_dropout: expected 0 <= p < 1, got 2"),
        ("--decoder-max-left=-1x6", "decoder_max_left: expected windows of at least 0"),
        ("--encoder-talk-heads 7", "heads: expected a divisor of channels = 512, got 7"),
        ("--offset-dropout 1.5", "offset_dropout: expected 0 <= p < 1, got 1.5"),
        ("--cross-self-attention", "cross_self_attention: expected False"),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        build(from_flags("--arch", "talkconv", *flags.split()))


@pytest.mark.parametrize(
    "text, message",
    [
        ("_name: talkconv_cnndm_std\nencoder_max_lefft: 3", "model.encoder_max_lefft"),
        ("_name: talkconv\nencoder_max_lefft: 3", "encoder_max_lefft"),
        ("_name: talkconv\nencoder_layers: many", "encoder_layers"),
        ("_name: talkconv\nencoder_layers: 1\nencoder_max_left: [3.7]", "encoder_max_left"),
        ("_name: talkconv_cnndm_std\nencoder_layers: many", "encoder_layers"),
    ],
)
def test_bad_yaml(text, message):
    with pytest.raises(Exception, match=message):
        build(from_yaml(text))


@pytest.mark.parametrize("source", ["flags", "yaml"])
def test_layers_to_keep(source):
    """Pruned at load: the layers that are kept have the weights and windows that they had."""
    full = build_model(from_flags(*FLAGS), task())
    if source == "flags":
        cfg = from_flags(*FLAGS, "--encoder-layers-to-keep", "0,2", "--decoder-layers-to-keep", "1")
    else:
        cfg = from_yaml(YAML + "    encoder_layers_to_keep: 0,2\n    decoder_layers_to_keep: '1'\n")
    pruned = build_model(cfg, task())
    pruned.load_state_dict(full.state_dict(), strict=True, model_cfg=cfg)
    windows = [(unit.conv.max_left, unit.conv.max_right) for unit in units(pruned, "encoder")]
    assert windows == [(1, 2), (9, 8)]
    assert [unit.conv.max_left for unit in units(pruned, "decoder")] == [5]
    for kept, layer in ((0, 0), (1, 2)):
        got, want = (
            units(m, "encoder")[i].linear1.weight for m, i in ((pruned, kept), (full, layer))
        )
        assert torch.equal(got, want)


def test_only_one_side_is_pruned():
    full = build_model(from_flags(*FLAGS), task())
    pruned = build_model(from_flags(*FLAGS, "--encoder-layers-to-keep", "2"), task())
    pruned.load_state_dict(full.state_dict(), strict=True)
    assert torch.equal(pruned.encoder.layers[0].fc1.weight, full.encoder.layers[2].fc1.weight)
    assert torch.equal(pruned.decoder.layers[1].fc1.weight, full.decoder.layers[1].fc1.weight)


@pytest.mark.slow
def test_a_pruned_model_trains_on_and_is_loaded(corpus, trained, tmp_path):
    """From a checkpoint of more layers, then from its own; with the options that it saved."""
    flags = ["--encoder-layers-to-keep", 1, "--decoder-layers-to-keep", 0]
    resumed = ["--restore-file", trained, "--reset-optimizer", "--reset-dataloader"]
    for updates, more in ((1, [*resumed, "--reset-meters"]), (2, [])):
        printed = fairseq(
            "train", corpus, *SMALL, *flags, *more, "--optimizer", "adam", "--lr", 0,
            "--max-tokens", 2000, "--max-update", 24 + updates, "--save-dir", tmp_path,
            "--no-epoch-checkpoints", "--disable-validation",
        )  # fmt: skip
        assert "Loaded checkpoint" in printed
    path = tmp_path / "checkpoint_last.pt"
    (full,), (pruned,) = (
        checkpoint_utils.load_model_ensemble([str(file)])[0] for file in (trained, path)
    )
    assert [unit.conv.max_left for unit in units(pruned, "encoder")] == [9]
    for side, kept in (("encoder", 1), ("decoder", 0)):
        assert len(units(pruned, side)) == 1
        expected = units(full, side)[kept].linear1.weight
        assert torch.equal(units(pruned, side)[0].linear1.weight, expected)


@pytest.mark.parametrize("layers", ["3", "-1", "0,a"])
def test_layers_that_are_not_there_are_not_kept(layers):
    message = "encoder_layers_to_keep: expected numbers from 0 to 2, such as 0,2, got "
    with pytest.raises(ValueError, match=message):
        build(from_flags(*FLAGS, f"--encoder-layers-to-keep={layers}"))


def test_the_multilingual_task_says_which_models_it_takes():
    multilingual = MultilingualTranslationTask.build_model
    message = "--arch: expected a model of several language pairs, .* got talkconv_iwslt_de_en"
    with pytest.raises(ValueError, match=message):
        multilingual(None, from_flags("--arch", "talkconv_iwslt_de_en"))


@pytest.mark.parametrize("arch", ["talkconv", "talkconv_iwslt_de_en"])
def test_from_a_namespace(arch):
    args = argparse.Namespace(
        arch=arch, encoder_layers=2, encoder_max_left="1,2", dropout=0.5, other=1
    )
    model = build(args)
    assert [unit.conv.max_left for unit in units(model, "encoder")] == [1, 2]
    assert model.encoder.dropout_module.p == 0.5


class OwnUnit(TaLKConvUnit):
    """One's own variant of the unit."""


def test_a_variant_of_the_unit_is_an_attribute_of_the_model():
    class Own(TaLKConvModel):
        unit = OwnUnit

    cfg = from_flags("--arch", "talkconv", *SMALL)
    own = Own.build_model(cfg, task())
    every = units(own, "encoder") + units(own, "decoder")
    assert len(every) == 4 and all(type(unit) is OwnUnit for unit in every)
    assert type(units(build_model(cfg, task()), "encoder")[0]) is TaLKConvUnit


# --- The model ---


@pytest.fixture(scope="module")
def transformer(corpus, tmp_path_factory):
    """The checkpoint of a small Transformer after a few updates."""
    folder = tmp_path_factory.mktemp("transformer")
    sizes = SMALL[SMALL.index("--encoder-embed-dim") :]
    fairseq(
        "train", corpus, "--arch", "transformer", "--encoder-layers", 1, "--decoder-layers", 1,
        *sizes, "--optimizer", "adam", "--lr", 0.01, "--max-tokens", 2000, "--max-update", 6,
        "--save-dir", folder, "--no-epoch-checkpoints", "--log-format", "none",
    )  # fmt: skip
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def model(trained):
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(trained)])
    return models[0].eval()


def test_no_future_mask(model):
    assert model.decoder.buffered_future_mask(torch.zeros(9, 1, 4)) is None


def test_decoder_is_causal(model):
    source, target = torch.randint(4, 99, (2, 11)), torch.randint(4, 99, (2, 30))
    lengths = torch.tensor([11, 11])
    logits, _ = model(source, lengths, target)
    changed = target.clone()
    changed[:, 17:] = 5
    assert torch.allclose(model(source, lengths, changed)[0][:, :17], logits[:, :17], atol=1e-6)
    assert not torch.allclose(model(source, lengths, changed)[0][:, 17:], logits[:, 17:], atol=1e-3)


def test_a_short_convolution_and_spread_offsets_by_flags():
    flags = ["--arch", "talkconv", *SMALL, "--encoder-short-kernel", "5", "--spread-offsets"]
    model = build_model(from_flags(*flags), task(99))
    for unit in units(model, "encoder"):
        assert unit.short.weight.shape[0] == 5 and unit.short.right == 2
        assert unit.conv.offsets.bias.unique().numel() > 1
    assert not any(unit.short for unit in units(model, "decoder"))


def test_incremental_decoding_equals_a_full_pass(model):
    source, target = torch.randint(4, 99, (3, 11)), torch.randint(4, 99, (3, 40))
    encoder_out = model.encoder(source, torch.tensor([11] * 3))
    expected, _ = model.decoder(target, encoder_out=encoder_out)
    state = {}
    for step in range(40):
        logits, _ = model.decoder(
            target[:, : step + 1], encoder_out=encoder_out, incremental_state=state
        )
        assert torch.allclose(logits[:, -1], expected[:, step], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        "--checkpoint-activations",
        "--encoder-layerdrop 0.5",
        "--quant-noise-pq 0.1 --quant-noise-pq-block-size 4",
    ],
)
def test_what_fairseq_gives_still_works(flags):
    model = build_model(from_flags(*SMALL, *flags.split()), task(50)).train()
    source = torch.randint(4, 50, (2, 9))
    logits, _ = model(source, torch.tensor([9, 9]), source)
    logits.sum().backward()
    assert model.encoder.embed_tokens.weight.grad.abs().sum() > 0


# --- Through the command line ---


def hypotheses(printed):
    """{sentence: (score, text)} of what fairseq-generate printed."""
    lines = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", printed, re.M)
    return {int(sentence): (float(score), text) for sentence, score, text in lines}


def generate(corpus, path, *flags):
    """What fairseq-generate prints, without the seconds that a process of its own takes."""
    flags = [corpus, "--path", path, "--max-len-b", 15, "--user-dir", PLUGIN, *flags]
    parser = options.get_generation_parser()
    args = options.parse_args_and_arch(parser, list(map(str, flags)))
    printed = io.StringIO()
    fairseq_cli.generate._main(convert_namespace_to_omegaconf(args), printed)
    return printed.getvalue()


def test_batch_and_padding_change_nothing(corpus, trained):
    """Alone, in a batch, and with padding on either side: the same hypotheses and scores."""
    alone = hypotheses(generate(corpus, trained, "--batch-size", 1, "--beam", 3))
    assert len(alone) == 43
    for flags in (["--batch-size", 43], ["--batch-size", 7, "--left-pad-source"]):
        batched = hypotheses(generate(corpus, trained, "--beam", 3, *flags))
        assert batched.keys() == alone.keys()
        for sentence, (score, text) in batched.items():
            assert text == alone[sentence][1]
            # printed to four digits; the scores themselves are compared below
            assert score == pytest.approx(alone[sentence][0], abs=1.1e-4)


def test_scores_to_1e_5_whatever_the_padding(model):
    generator = torch.Generator().manual_seed(0)
    pad, lengths = model.encoder.padding_idx, [3, 8, 15]
    sentences = [torch.randint(4, 99, (n,), generator=generator) for n in lengths]
    target = torch.randint(4, 99, (3, 12), generator=generator)

    def log_probs(source, lengths, target):
        return model.get_normalized_probs(model(source, lengths, target), log_probs=True)

    for left in (False, True):
        batch = torch.full((3, 20), pad)
        for row, sentence in zip(batch, sentences):
            row[slice(-len(sentence), None) if left else slice(len(sentence))] = sentence
        together = log_probs(batch, torch.tensor(lengths), target)
        for index, sentence in enumerate(sentences):
            alone = log_probs(
                sentence[None], torch.tensor([len(sentence)]), target[index : index + 1]
            )
            assert torch.allclose(together[index], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        "--beam 4 --nbest 2",
        "--sampling --sampling-topk 5 --beam 2 --nbest 2",
        "--prefix-size 3 --beam 2",
        "--diverse-beam-groups 2 --beam 4",
        "--print-alignment hard --beam 2",
        "--print-alignment soft --beam 2",
        "--print-alignment hard --score-reference",
        "--no-repeat-ngram-size 2 --match-source-len --unkpen 3 --beam 3",
        "--retain-dropout --beam 2",
        "--fp16 --beam 2",
    ],
)
def test_generation_modes(corpus, trained, flags):
    printed = generate(corpus, trained, *flags.split())
    found = hypotheses(printed)
    assert len(found) == 43
    if "alignment" in flags:
        sources = dict(re.findall(r"^S-(\d+)\t(.*)$", printed, re.M))
        alignments = dict(re.findall(r"^A-(\d+)\t(.*)$", printed, re.M))
        assert len(alignments) == 43
        for sentence, alignment in alignments.items():
            words, length = alignment.split(), len(found[int(sentence)][1].split())
            if "hard" in flags:  # source-target, for each word but the last, <eos>
                places = [tuple(map(int, word.split("-"))) for word in words]
                assert [target for _, target in places] == list(range(length))
                assert max(source for source, _ in places) < len(sources[sentence].split())
            else:
                weights = torch.tensor([list(map(float, word.split(","))) for word in words])
                assert weights.shape == (length + 1, len(sources[sentence].split()) + 1)
                assert torch.allclose(weights.sum(dim=1), torch.ones(length + 1), atol=1e-4)
    if "prefix" in flags:
        targets = dict(re.findall(r"^T-(\d+)\t(.*)$", printed, re.M))
        for sentence, (_, text) in found.items():
            target = targets[str(sentence)].replace("<<unk>>", "<unk>")
            assert text.split()[:3] == target.split()[:3]


def test_constraints_are_in_the_translations(corpus, trained, tmp_path, capsys):
    (tmp_path / "source").write_text("en el principio\tlight\tthe earth\ny la tierra\n")
    flags = [corpus, "--path", trained, "--max-len-b", 15, "--user-dir", PLUGIN]
    flags += ["--constraints", "--beam", 5, "--input", tmp_path / "source", "--buffer-size", 2]
    flags += ["--batch-size", 2, "--source-lang", "es", "--target-lang", "en"]
    parser = options.get_interactive_generation_parser()
    args = options.parse_args_and_arch(parser, list(map(str, flags)))
    fairseq_cli.interactive.main(convert_namespace_to_omegaconf(args))
    found = hypotheses(capsys.readouterr().out)
    assert re.search(r"\blight\b.*\bthe earth\b", found[0][1]) and len(found) == 2


def test_fusion_with_a_language_model(corpus, trained, trained_lm, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    shutil.copy(corpus / "dict.en.txt", data / "dict.txt")  # as the task language_modeling wants
    flags = ["--beam", 3, "--lm-path", trained_lm, "--lm-weight"]
    alone, fused = (hypotheses(generate(data, trained, *flags, weight)) for weight in (0, 0.5))
    assert alone == hypotheses(generate(corpus, trained, "--beam", 3))
    assert len(fused) == 43 and fused != alone


# Each search of fairseq's generator, on sentences that end early and late.
SEARCHES = {
    "greedy": dict(beam_size=1),
    "beam": dict(beam_size=4),
    "sampling": dict(beam_size=3, search_strategy=lambda words: Sampling(words, 5)),
    "diverse": dict(
        beam_size=4,
        search_strategy=lambda words: DiverseBeamSearch(words, 2, diversity_strength=0.5),
    ),
    "siblings": dict(
        beam_size=4, search_strategy=lambda words: DiverseSiblingsSearch(words, diversity_rate=0.5)
    ),
    "constraints": dict(
        beam_size=5,
        search_strategy=lambda words: LexicallyConstrainedBeamSearch(words, "unordered"),
        constraints=[[5, 6], [8], [9], [10], [11]],
    ),
    "prefix": dict(
        beam_size=3, prefix_tokens=[[5, 6, 7], [8, 1, 1], [9, 10, 1], [5, 5, 5], [6, 7, 8]]
    ),
    "ngrams": dict(beam_size=3, no_repeat_ngram_size=2, unk_penalty=2.0, temperature=1.5),
    "ngrams in a prefix": dict(
        beam_size=3, no_repeat_ngram_size=1, prefix_tokens=[[5, 5, 5]] * 4 + [[6, 7, 1]]
    ),
    "source length": dict(beam_size=3, match_source_len=True),
}


@pytest.fixture(scope="module")
def ensemble():
    """A TaLK and an attention model whose random weights end sentences after a few words."""
    torch.manual_seed(0)
    attention = "--arch transformer --encoder-normalize-before --decoder-normalize-before".split()
    sizes = SMALL[SMALL.index("--encoder-embed-dim") :]
    models = [
        build_model(from_flags(*flags), task(30)).eval()
        for flags in ([*SMALL, *attention[2:]], [*attention, *sizes, "--decoder-layers", "1"])
    ]
    for model in models:
        tied = model.decoder.output_projection
        model.decoder.output_projection = torch.nn.Linear(tied.in_features, tied.out_features)
        model.decoder.output_projection.weight.data = tied.weight.data * 4
        model.decoder.output_projection.bias.data = 8.0 * (torch.arange(30) == 2)
    return models


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("members", [[0], [0, 1]], ids=["alone", "with a Transformer"])
def test_a_search_step_by_step_equals_full_passes(ensemble, members, name):
    models, words = [ensemble[member] for member in members], dictionary(30)
    tokens = torch.full((5, 11), words.pad())
    generator = torch.Generator().manual_seed(1)
    lengths = [9, 4, 11, 2, 6]
    for row, length in zip(tokens, lengths):
        row[:length] = torch.randint(4, 30, (length,), generator=generator)
        row[length - 1] = words.eos()
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor(lengths)}}

    def search(*, search_strategy=None, constraints=None, prefix_tokens=None, **kwargs):
        strategy = search_strategy and search_strategy(words)
        generator = SequenceGenerator(
            models, words, max_len_b=20, search_strategy=strategy, **kwargs
        )
        generator.model.has_incremental = step_by_step
        if constraints:
            constraints = pack_constraints([[torch.tensor(some)] for some in constraints])
        prefix_tokens = prefix_tokens and torch.tensor(prefix_tokens)
        torch.manual_seed(1)
        found = generator.generate(
            models, sample, constraints=constraints, prefix_tokens=prefix_tokens
        )
        return [hypothesis for best in found for hypothesis in best]

    step_by_step = True
    got = search(**SEARCHES[name])
    step_by_step = False
    expected = search(**SEARCHES[name])
    ended = [len(hypothesis["tokens"]) <= 12 for hypothesis in got]
    assert any(ended) or name == "greedy"
    for ours, full in zip(got, expected, strict=True):
        assert torch.equal(ours["tokens"], full["tokens"])
        scores = ours["positional_scores"], full["positional_scores"]
        assert torch.allclose(*scores, rtol=0, atol=2e-5)


@pytest.mark.parametrize("flags", ["--beam 2", "--score-reference", "--print-alignment hard"])
def test_ensemble_with_a_transformer(corpus, trained, transformer, flags):
    """In either order: fairseq adds up the attention weights of the second to the first's."""
    first, second = (
        hypotheses(generate(corpus, f"{one}:{other}", *flags.split()))
        for one, other in ((trained, transformer), (transformer, trained))
    )
    assert len(first) == 43
    for sentence, (score, text) in first.items():
        assert second[sentence][1] == text
        assert second[sentence][0] == pytest.approx(score, abs=1e-4)


def test_ensemble_of_a_model_with_itself_is_the_model(corpus, trained):
    single = hypotheses(generate(corpus, trained, "--beam", 2))
    assert len(single) == 43
    assert hypotheses(generate(corpus, f"{trained}:{trained}", "--beam", 2)) == single


@pytest.mark.slow
def test_hydra_train_from_yaml(corpus, tmp_path):
    (tmp_path / "small.yaml").write_text(
        textwrap.dedent(f"""
        common: {{user_dir: {PLUGIN}, log_format: simple}}
        checkpoint: {{save_dir: {tmp_path}/checkpoints}}
        task: {{_name: translation, data: {corpus}}}
        criterion: {{_name: cross_entropy}}
        dataset: {{max_tokens: 2000}}
        optimization: {{max_update: 2, lr: [0.001]}}
        optimizer: {{_name: adam}}
        lr_scheduler: {{_name: fixed}}
        model:
          _name: talkconv_iwslt_de_en
          encoder_layers: 2
          decoder_layers: 1
          encoder_embed_dim: 32
          decoder_embed_dim: 32
          encoder_max_left: [3, 9]
          encoder_max_right: [0, 5]
          decoder_max_left: 3
          share_all_embeddings: true
        """)
    )
    fairseq("hydra-train", "--config-dir", tmp_path, "--config-name", "small", cwd=tmp_path)
    path = tmp_path / "checkpoints/checkpoint_last.pt"
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    layer = model.decoder.layers[0]  # what the YAML leaves is of the arch
    assert layer.fc1.out_features == 1024 and not layer.self_attn.glu
    assert len(hypotheses(generate(corpus, path))) == 43


def test_ensemble_of_two_models_scores_between_them(corpus, trained, tmp_path):
    """The ensemble's score of a hypothesis is that of the averaged probabilities."""
    fairseq(
        "train", corpus, *SMALL, "--optimizer", "adam", "--lr", 0.01, "--max-tokens", 2000,
        "--max-update", 12, "--save-dir", tmp_path, "--no-epoch-checkpoints", "--seed", 7,
        "--log-format", "none",
    )  # fmt: skip
    other = tmp_path / "checkpoint_last.pt"
    flags = ["--score-reference", "--beam", 1]
    first, second, both = (
        hypotheses(generate(corpus, path, *flags))
        for path in (trained, other, f"{trained}:{other}")
    )
    assert len(both) == 43 and first != second
    for sentence, (score, _) in both.items():
        scores = first[sentence][0], second[sentence][0]
        assert min(scores) - 1e-3 <= score <= max(scores) + 1  # a mean of probabilities, in bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, message",
    [
        (["--user-dir", "/no/such/plugin"], "/no/such/plugin"),
        (["--max-source-positions", 3], "exceeds|maximum|max_positions|Size of sample"),
        (["--encoder-ffn-embed-dim", 48], "please ensure that the architectures match"),
    ],
)
def test_bad_input_stops_training_with_a_clear_error(corpus, trained, tmp_path, change, message):
    """A plugin that is not there, sentences over the maximum, a checkpoint of another model."""
    printed = fairseq(
        "train", corpus, *SMALL, "--optimizer", "adam", "--max-tokens", 2000, "--max-update", 1,
        "--restore-file", trained, "--save-dir", tmp_path / "new", *change, check=False,
        plugin=change[1] if change[0] == "--user-dir" else PLUGIN,
    )  # fmt: skip
    assert re.search(message, printed.strip().splitlines()[-1]), printed[-2000:]
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.slow
def test_bad_windows_stop_before_training(corpus, tmp_path):
    """With the message alone: `printed` has no traceback."""
    printed = fairseq(
        "train", corpus, *SMALL, "--decoder-max-left", "3", "--optimizer", "adam", "--max-tokens",
        2000, "--save-dir", tmp_path / "checkpoints", check=False,
    )  # fmt: skip
    assert "decoder_max_left: expected 2 windows, one a layer, got 1" in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.rglob("*.pt"))


def run_as_a_command(cfg, task_of_command):
    """Build the model of `cfg` as a command of fairseq does."""

    def main(cfg):
        task_of_command.build_model(cfg.model)

    distributed = SimpleNamespace(distributed_init_method=None, tpu=True)  # one process
    cfg = SimpleNamespace(model=cfg, distributed_training=distributed, common=SimpleNamespace())
    cfg.common.tpu = False
    distributed_utils.call_main(cfg, main)


@pytest.mark.parametrize(
    "flags", ["--offset-dropout 1.5", "--encoder-talk-heads 7", "--encoder-max-left 3"]
)
def test_commands_end_in_the_message_alone(flags, monkeypatch):
    """As fairseq-hydra-train and Python do not: hydra has its own way, callers their handlers."""
    monkeypatch.delitem(sys.modules, "fairseq_cli.hydra_train", raising=False)
    translation = TranslationTask(TranslationConfig(), dictionary(20), dictionary(20))
    cfg = from_flags("--arch", "talkconv", *flags.split())
    with pytest.raises(SystemExit, match=r"^ValueError: \w+: expected .*, got "):
        run_as_a_command(cfg, translation)
    monkeypatch.setitem(sys.modules, "fairseq_cli.hydra_train", None)
    with pytest.raises(ValueError, match=r"^\w+: expected .*, got "):
        run_as_a_command(cfg, translation)


def test_errors_of_others_keep_their_traceback(monkeypatch):
    """Such as those of one's own unit."""
    monkeypatch.delitem(sys.modules, "fairseq_cli.hydra_train", raising=False)

    class Broken:
        def build_model(self, cfg):
            raise ValueError("not enough values to unpack")

    with pytest.raises(ValueError, match="^not enough values to unpack$"):
        run_as_a_command(None, Broken())


@pytest.mark.parametrize("data", ["absent", "../empty", "empty"])
def test_a_folder_without_dictionaries_is_named(trained, tmp_path, monkeypatch, data):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    shutil.copy(trained, tmp_path / "model/model.pt")
    monkeypatch.chdir(tmp_path)
    message = r"data_name_or_path: expected a folder with dictionaries \(dict\*.txt\), got "
    with pytest.raises(ValueError, match=message):
        TaLKConvModel.from_pretrained("model", data_name_or_path=data)


# --- Ways to install it ---


@pytest.mark.slow
def test_from_a_wheel(corpus, trained, tmp_path):
    """The wheel carries the kernels and works as a plugin, in front of the editable install."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", ROOT, source], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    env = {"PYTHONPATH": str(site)}
    where = subprocess.run(
        [sys.executable, "-c", "import talk_fairseq; print(talk_fairseq.__path__[0])"],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout.strip().splitlines()[-1]  # fmt: skip
    assert where == str(site / "talk_fairseq")
    assert (site / "talk_fairseq/kernels/talk_conv.cu").stat().st_size > 0
    printed = fairseq(
        "generate", corpus, "--path", trained, "--max-len-b", 5, plugin=where, env=env, cwd=tmp_path
    )
    assert len(hypotheses(printed)) == 43


@pytest.mark.slow
def test_from_an_editable_install_and_in_spawned_processes(tmp_path):
    """setup.sh installs the checkout as editable; a spawned process imports the plugin anew."""
    program = """
        import argparse, multiprocessing

        def work(user_dir):
            from fairseq import utils
            utils.import_user_module(argparse.Namespace(user_dir=user_dir))
            from fairseq.models import ARCH_MODEL_REGISTRY
            assert "talkconv_iwslt_de_en" in ARCH_MODEL_REGISTRY

        if __name__ == "__main__":
            import talk_fairseq
            (path,) = talk_fairseq.__path__
            work(path)
            process = multiprocessing.get_context("spawn").Process(target=work, args=(path,))
            process.start()
            process.join()
            assert process.exitcode == 0
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True)
