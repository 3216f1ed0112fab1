"""The language model as a fairseq user meets it: archs, options, training, scores, text."""

import argparse
import math
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from conftest import PLUGIN, SMALL_LM, fairseq

pytest.importorskip("fairseq")

import fairseq_cli.eval_lm
import fairseq_cli.generate
import fairseq_cli.interactive
import fairseq_cli.train
from fairseq import checkpoint_utils, options, tasks
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.dataclass import initialize
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from talk_fairseq.models.talkconv import nested_config
from talk_fairseq.models.talkconv_lm import (
    TaLKConvLanguageModel,
    TaLKConvLanguageModelConfig,
    cutoff_list,
    filter_list,
)
from talk_fairseq.modules import TaLKConvUnit


def task(words=60, output_words=None):
    """What a model and a criterion read of their task."""
    dictionaries = []
    for size in (words, output_words or words):
        dictionary = Dictionary()
        for index in range(size - len(dictionary)):
            dictionary.add_symbol(f"w{index}")
        dictionaries.append(dictionary)
    return SimpleNamespace(source_dictionary=dictionaries[0], target_dictionary=dictionaries[1])


def from_flags(*flags):
    parser = options.get_training_parser()
    args = ["data", "--task", "language_modeling", "--tokens-per-sample", "48", *flags]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, args)).model


def from_yaml(model):
    """`model` (text or a dictionary) as fairseq-hydra-train reads it, beside a task."""
    if isinstance(model, str):
        model = OmegaConf.create(textwrap.dedent(model))
    root = {"task": {"_name": "language_modeling", "tokens_per_sample": 48}, "model": model}
    root = OmegaConf.create({**root, "common": {"tpu": False}})
    initialize.add_defaults(root)
    return root.model


def build(cfg, *words):
    with torch.device("meta"):
        return build_model(cfg, task(*words))


def windows(model):
    return [layer.self_attn.conv.max_left for layer in model.decoder.layers]


# --- Archs ---

ARCHS = {
    "talkconv_lm": dict(
        left=[3, 7, 15, 31, 31, 31], sizes=(512, 2048, 8), dropouts=(0.1, 0.0, 0.1, 0.0),
        million=18.39, words=1000, final_norm=True,
    ),
    "talkconv_lm_big": dict(
        left=[3, 7, 15] + [31] * 9, sizes=(1024, 4096, 16), dropouts=(0.1, 0.0, 0.1, 0.0),
        million=140.81, words=1000, final_norm=True,
    ),
    "talkconv_lm_wiki103": dict(
        left=[3, 5, 7, 15, 31] + [63] * 12, sizes=(1024, 4096, 16), dropouts=(0.3, 0.1, 0.2, 0.1),
        million=241.97, words=267744, final_norm=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", ["flags", "yaml"])
@pytest.mark.parametrize("arch", ARCHS)
def test_archs(arch, source):
    want = ARCHS[arch]
    cfg = from_flags("--arch", arch) if source == "flags" else from_yaml({"_name": arch})
    model = build(cfg, want["words"])
    assert windows(model) == want["left"]
    assert (model.decoder.layer_norm is not None) == want["final_norm"]
    for layer in model.decoder.layers:
        unit = layer.self_attn
        assert (layer.embed_dim, layer.fc1.out_features, unit.conv.heads) == want["sizes"]
        assert unit.glu and unit.conv.normalize and unit.conv.max_right == 0
        assert layer.normalize_before and layer.activation_fn is torch.nn.functional.silu
        assert layer.encoder_attn is None
        dropout, activation, offset, input_ = want["dropouts"]
        assert layer.dropout_module.p == dropout
        assert layer.activation_dropout_module.p == activation
        assert unit.conv.offset_dropout == offset and unit.input_dropout == input_
    million = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert round(million, 2) == want["million"]
    assert model.max_positions() == 48


def test_what_goes_beyond_the_paper():
    ours, theirs = (build(from_flags("--arch", f"talkconv{p}_lm"), 100) for p in ("_plus", ""))
    added = {f"{name}: {tuple(p.shape)}" for name, p in ours.named_parameters()}
    added -= {f"{name}: {tuple(p.shape)}" for name, p in theirs.named_parameters()}
    assert added == {f"decoder.layers.{n}.self_attn.short.weight: (8, 512)" for n in range(6)}
    assert windows(ours) == windows(theirs)
    for layer in ours.decoder.layers:
        assert layer.activation_fn is torch.nn.functional.relu


def test_wiki103_ties_what_can_be_tied():
    decoder = build(from_flags("--arch", "talkconv_lm_wiki103"), 70000).decoder
    softmax, bands = decoder.adaptive_softmax, decoder.embed_tokens.embeddings
    assert softmax.cutoff == decoder.embed_tokens.cutoff == [20000, 60000, 70000]
    assert softmax.head.word_proj.weight is bands[0][0].weight
    for tail, band in zip(softmax.tail, bands[1:], strict=True):
        assert tail[2].weight is band[0].weight and tail[0].weight is band[1].weight
    assert [band[0].weight.shape[1] for band in bands] == [1024, 256, 64]
    assert softmax.dropout_module.p == 0.2


# --- Every option is a flag and a key ---

OTHERS = {  # a value of each option that is neither a number nor a switch
    "activation_fn": "gelu",
    "decoder_max_left": "1,2x2",
    "decoder_layers_to_keep": "0,2",
    "decoder_xformers_att_config": "other",
    "adaptive_input_cutoff": "5,9",
    "adaptive_softmax_cutoff": "6,8",
    "character_filters": "[(1, 8), (2, 4)]",
}
OF_THE_TASK = {"add_bos_token", "tokens_per_sample", "max_target_positions", "tpu"}


def other_values(arch):
    """A value of each option that is the default of neither the model nor `arch`."""
    default = nested_config(from_flags("--arch", arch), TaLKConvLanguageModelConfig)
    values = {}
    for option in fields(TaLKConvLanguageModelConfig):
        if option.name in OF_THE_TASK or option.name == "_name":
            continue
        value = getattr(default, option.name)
        if option.name not in OTHERS:
            kind = getattr(option.type, "__args__", [option.type])[0]
            value = not value if kind is bool else kind(value or 0) + kind(3)
        values[option.name] = OTHERS.get(option.name, value)
        assert values[option.name] != getattr(default, option.name)
    return values


@pytest.mark.parametrize("source", ["flags", "yaml"])
@pytest.mark.parametrize("arch", ["talkconv_lm", "talkconv_lm_wiki103"])
def test_every_option(arch, source):
    values = other_values(arch)
    assert len(values) > 50
    if source == "flags":
        flags = ["--arch", arch, "--max-target-positions", "40"]
        for name, value in values.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}".replace("--no-no-", "--"))
            else:
                flags.append(f"--{flag}={value}")
        cfg = from_flags(*flags)
    else:
        cfg = from_yaml({"_name": arch, **values, "max_target_positions": 40})
    got = nested_config(cfg, TaLKConvLanguageModelConfig)
    assert {name: getattr(got, name) for name in values} == values
    assert (got.tokens_per_sample, got.max_target_positions) == (48, 40)
    assert (got.add_bos_token, got.tpu) == (False, False)


def test_lists_in_yaml():
    cfg = """
        _name: talkconv_lm
        decoder_layers: 2
        decoder_max_left: [3, 9]
        adaptive_input: true
        adaptive_input_cutoff: [20, 40]
        adaptive_softmax_cutoff: [30]
    """
    model = build(from_yaml(cfg))
    assert windows(model) == [3, 9]
    assert model.decoder.embed_tokens.cutoff == [20, 40, 60]
    assert model.decoder.adaptive_softmax.cutoff == [30, 60]
    cfg = {"_name": "talkconv_lm", "character_embeddings": True, "character_filters": [[1, 8]]}
    assert build(from_yaml(cfg)).decoder.embed_tokens.convolutions[0].out_channels == 8


def test_an_arch_is_overridden_both_ways():
    flags = (
        "--arch talkconv_lm_wiki103 --no-adaptive-input --no-tie-adaptive-weights "
        "--no-tie-adaptive-proj --decoder-final-norm --no-decoder-normalize-before "
        "--adaptive-softmax-cutoff= --decoder-layers 1 --decoder-max-left 5 --no-decoder-glu"
    )
    decoder = build(from_flags(*flags.split())).decoder
    assert isinstance(decoder.embed_tokens, torch.nn.Embedding)
    assert decoder.adaptive_softmax is None and not decoder.layers[0].normalize_before
    assert not decoder.layers[0].self_attn.glu


def test_dimensions_of_input_and_output_follow_the_embedding():
    decoder = build(from_flags("--arch", "talkconv_lm", "--decoder-embed-dim", "64")).decoder
    assert decoder.embed_tokens.weight.shape == decoder.output_projection.weight.shape == (60, 64)
    assert decoder.project_in_dim is None and decoder.project_out_dim is None
    flags = "--arch talkconv_lm --decoder-input-dim 16 --decoder-output-dim 24"
    decoder = build(from_flags(*flags.split())).decoder
    assert decoder.embed_tokens.weight.shape == (60, 16)
    assert decoder.output_projection.weight.shape == (60, 24)


@pytest.mark.parametrize("source", ["flags", "yaml"])
def test_layers_to_keep(source):
    """Pruned at load: the layers that are kept have the weights and windows that they had."""
    given = {"decoder_layers": 3, "decoder_max_left": "3,5,9", "decoder_embed_dim": 32}

    def config(**more):
        values = {**given, **more}
        if source == "yaml":
            return from_yaml({"_name": "talkconv_lm", **values})
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        return from_flags("--arch", "talkconv_lm", *flags)

    full = build_model(config(), task())
    cfg = config(decoder_layers_to_keep="0,2")
    pruned = build_model(cfg, task())
    pruned.load_state_dict(full.state_dict(), strict=True, model_cfg=cfg)
    assert windows(pruned) == [3, 9]
    for kept, layer in ((0, 0), (1, 2)):
        got, want = pruned.decoder.layers[kept], full.decoder.layers[layer]
        assert torch.equal(got.self_attn.linear1.weight, want.self_attn.linear1.weight)


@pytest.mark.parametrize("arch", ["talkconv_lm", "talkconv_lm_big"])
def test_from_a_namespace(arch):
    args = argparse.Namespace(
        arch=arch, decoder_layers=2, decoder_max_left="1,2", tokens_per_sample=30,
        max_target_positions=None, add_bos_token=False, tpu=False, other=1,
    )  # fmt: skip
    model = build(args)
    assert windows(model) == [1, 2] and model.max_positions() == 30


class OwnUnit(TaLKConvUnit):
    """One's own variant of the unit."""


def test_a_variant_of_the_unit_is_an_attribute_of_the_model():
    class Own(TaLKConvLanguageModel):
        unit = OwnUnit

    flags = [*SMALL_LM[SMALL_LM.index("--arch") :]]
    own = Own.build_model(from_flags(*flags), task())
    assert [type(layer.self_attn) for layer in own.decoder.layers] == [OwnUnit, OwnUnit]


# --- What does not fit is refused ---

ADAPTIVE = "--adaptive-input --adaptive-input-cutoff 20,40 --adaptive-softmax-cutoff 20,40"
TIED = f"{ADAPTIVE} --tie-adaptive-weights --tie-adaptive-proj"
CHARACTERS = "--character-embeddings --character-filters [(1,8),(2,4)]"
SHARED = "--share-decoder-input-output-embed"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--decoder-max-left 3,7", "decoder_max_left: expected 6 windows, one a layer, got 2"),
        ("--offset-dropout 1", "offset_dropout: expected 0 <= p < 1, got 1"),
        ("--adaptive-input", "adaptive_input_cutoff: expected cutoffs with adaptive_input, got"),
        ("--tie-adaptive-weights", "adaptive_input: expected True with tie_adaptive_weights"),
        (f"{ADAPTIVE} --tie-adaptive-proj", "tie_adaptive_weights: expected True with tie_adaptiv"),
        (f"{TIED} --adaptive-softmax-cutoff 20", r"adaptive_softmax_cutoff: expected \[20, 40\]"),
        (f"{TIED} --adaptive-softmax-factor 2", "adaptive_softmax_factor: expected 4.0 with tie"),
        (f"{TIED} --decoder-input-dim 64", "decoder_input_dim: expected 512 with tie_adaptive"),
        (f"{TIED} --decoder-output-dim 64", "decoder_output_dim: expected 512 with tie_adaptive"),
        (f"{ADAPTIVE} {CHARACTERS}", "character_embeddings: expected False with adaptive_input"),
        (f"{ADAPTIVE} {SHARED}", "adaptive_input: expected False with share_decoder_input_output"),
        (f"{CHARACTERS} {SHARED}", "character_embeddings: expected False with share_decoder_inp"),
        (f"{SHARED} --adaptive-softmax-cutoff 9", "adaptive_softmax_cutoff: expected None with s"),
        (f"{SHARED} --decoder-input-dim 64", "decoder_output_dim: expected 64 with share_decoder"),
        ("--adaptive-softmax-cutoff 61", "adaptive_softmax_cutoff: expected rising cutoffs"),
        ("--character-embeddings --character-filters 3", "character_filters: expected pairs of"),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        build(from_flags("--arch", "talkconv_lm", *flags.split()))


@pytest.mark.parametrize("flags", [SHARED, TIED])
def test_weights_are_not_shared_between_two_dictionaries(flags):
    with pytest.raises(ValueError, match="output_dictionary_size: .*, got 50 of 60"):
        build(from_flags("--arch", "talkconv_lm", *flags.split()), 60, 50)


@pytest.mark.parametrize("arch", ["talkconv_lm", "talkconv_lm_big"])
def test_unknown_yaml_keys_are_refused(arch):
    with pytest.raises(Exception, match="decoder_max_lefft"):
        build(from_yaml({"_name": arch, "decoder_max_lefft": 3}))


@pytest.mark.parametrize("cutoff", ["20,", "20,60", [20, 60], (20, 60)])
def test_cutoffs(cutoff):
    expected = [20] if cutoff == "20," else [20, 60]
    assert cutoff_list("cutoff", cutoff, 512, 4, 60) == expected


@pytest.mark.parametrize(
    "cutoff", ["0,5", "9,5", "5,5", "5,99", "5.5", "a", "__import__('os')", [True], [], 7, ","]
)
def test_bad_cutoffs(cutoff):
    with pytest.raises(ValueError, match="cutoff: expected rising cutoffs such as '200,600'"):
        cutoff_list("cutoff", cutoff, 512, 4, 60)


def test_bands_have_at_least_one_dimension():
    assert cutoff_list("cutoff", "10,60", 4, 4.0, 60) == [10, 60]
    with pytest.raises(ValueError, match=r"last of 3 bands, got 4 // 4 \*\* 2"):
        cutoff_list("cutoff", "10,20", 4, 4.0, 60)


@pytest.mark.parametrize("filters", ["[(1,)]", "3", "[]", "[(0, 4)]", "open('x')", "[(1, 2.5)]"])
def test_bad_character_filters(filters):
    with pytest.raises(ValueError, match="character_filters: expected pairs of a width and"):
        filter_list(filters)


# --- Training ---

TINY = (
    "--decoder-layers 2 --decoder-max-left 3,9 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 "
    "--decoder-attention-heads 4"
)


def tiny(flags="", seed=0):
    torch.manual_seed(seed)
    return build_model(from_flags("--arch", "talkconv_lm", *TINY.split(), *flags.split()), task())


def loss_of(model, tokens):
    """The mean loss of `tokens` (B, T) by fairseq's criterion for the model's softmax."""
    adaptive = model.decoder.adaptive_softmax is not None
    criterion = (AdaptiveLoss if adaptive else CrossEntropyCriterion)(task(), False)
    inputs = torch.cat([torch.full_like(tokens[:, :1], 2), tokens[:, :-1]], dim=1)
    lengths = torch.full((len(tokens),), tokens.shape[1])
    net_input = {"src_tokens": inputs, "src_lengths": lengths}
    sample = {"net_input": net_input, "target": tokens, "ntokens": tokens.numel()}
    return criterion(model, sample)[0] / tokens.numel()


@pytest.mark.parametrize(
    "flags",
    [
        SHARED,
        ADAPTIVE,
        f"{ADAPTIVE} --tie-adaptive-weights --adaptive-softmax-dropout 0.1",
        TIED,
        CHARACTERS,
        f"{CHARACTERS} --adaptive-softmax-cutoff 30",
        "--decoder-input-dim 16 --decoder-output-dim 24 --layernorm-embedding",
        "--decoder-learned-pos --no-decoder-normalize-before",
        "--no-token-positional-embeddings --no-scale-embedding",
        "--checkpoint-activations",
        "--offload-activations",
        "--decoder-layerdrop 0.3",
        "--quant-noise-pq 0.1 --quant-noise-pq-block-size 4",
        f"{TIED} --quant-noise-pq 0.1 --quant-noise-pq-block-size 2",
        "--scale-fc --scale-attn --scale-heads --scale-resids",
        "--no-decoder-glu --no-talk-normalize --decoder-talk-heads 8",
        "--dropout 0.2 --attention-dropout 0.1 --relu-dropout 0.1 --input-dropout 0.1",
    ],
)
def test_it_learns(flags):
    model = tiny(flags).train()
    tokens = torch.randint(4, 60, (2, 30), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = loss_of(model, tokens).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
    assert before > 3 and loss.item() < 0.6 * before


def test_it_is_causal():
    model = tiny(TIED).eval()
    tokens = torch.randint(4, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 25:] = 5
    features, again = model(tokens)[0], model(changed)[0]
    assert torch.equal(again[:, :25], features[:, :25])
    assert not torch.allclose(again[:, 25:], features[:, 25:], atol=1e-3)


@pytest.mark.parametrize("flags", ["", TIED, CHARACTERS, "--decoder-learned-pos"])
def test_incremental_decoding_equals_a_full_pass(flags):
    model = tiny(flags).eval()
    tokens = torch.randint(4, 60, (3, 45), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.get_normalized_probs(model(tokens), log_probs=True)
        state = {}
        for step in range(45):
            out = model.decoder(tokens[:, : step + 1], incremental_state=state)
            got = model.get_normalized_probs(out, log_probs=True)
            assert torch.allclose(got[:, -1], expected[:, step], rtol=0, atol=1e-5)


# --- Memory ---


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("flags", [SHARED, TIED])
def test_no_tensor_of_length_times_length(flags):
    T, model = 1024, tiny(f"{flags} --decoder-max-left 3,2000").train()
    tokens = torch.randint(4, 60, (1, T))
    with LargestTensor() as largest:
        loss_of(model, tokens).backward()
    assert T * 64 <= largest.elements < T * T / 4


MEMORY = r"""
    import re, torch
    from test_talkconv_lm import loss_of, tiny

    def step(length):
        loss_of(model, torch.randint(4, 60, (1, length))).backward()

    def kilobytes(what):
        return int(re.search(what + r":\s+(\d+) kB", open("/proc/self/status").read())[1])

    model = tiny("--decoder-max-left 3,2000 --max-target-positions 16384").train()
    step(16)  # compiles, and fills what stays
    for length in (4096, 16384):
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
        before = kilobytes("VmRSS")
        step(length)
        print("peak", kilobytes("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_training_step_is_linear_in_its_length():
    """What the process needs at its peak beside what it has anyhow, whoever allocates it."""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(MEMORY)],
        # Freed memory goes back to the system at once.
        env={**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536",
             "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    short, long = (int(peak) for peak in re.findall(r"peak (\d+)", done.stdout))
    assert short > 10_000 and long / short == pytest.approx(4, rel=0.1)


# --- Through the commands, in this process where they allow it ---


def command(parser, *flags):
    """The configuration of a command of fairseq, given its parser and what follows its name."""
    flags = [*map(str, flags), "--user-dir", str(PLUGIN)]
    args = options.parse_args_and_arch(parser, flags)
    return convert_namespace_to_omegaconf(args)


def evaluate(data, path, *flags, caplog):
    """(tokens, loss in bits) that fairseq-eval-lm reports."""
    cfg = command(
        options.get_eval_lm_parser(), data, "--path", path,
        "--num-workers", 0, *flags,
    )  # fmt: skip
    caplog.clear()
    with caplog.at_level("INFO"):
        results = fairseq_cli.eval_lm.main(cfg)
    tokens = re.search(r"Evaluated ([\d,]+) tokens", caplog.text)[1]
    return int(tokens.replace(",", "")), float(results["loss"])


@pytest.fixture(scope="module")
def model(trained_lm):
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(trained_lm)])
    return models[0].eval()


@pytest.fixture(scope="module")
def test_tokens(lm_corpus):
    """The test set as one sequence."""
    cfg = OmegaConf.create({"_name": "language_modeling", "data": str(lm_corpus)})
    cfg.update(tokens_per_sample=100000, dataset_impl=None, seed=1, use_plasma_view=False)
    cfg.update(plasma_path="", data_buffer_size=0, batch_size=None, batch_size_valid=None)
    lm = tasks.setup_task(cfg)
    lm.load_dataset("test")
    return lm.dataset("test")[0]["target"]


def bits(model, tokens, block, context):
    """The mean surprise of `tokens` in blocks, each after at most `context` tokens before it."""
    inputs, total = torch.cat([tokens.new_tensor([2]), tokens[:-1]]), 0.0
    for start in range(0, len(tokens), block):
        first, end = max(start - context, 0), start + block
        with torch.no_grad():
            out = model(inputs[None, first:end])
            log_probs = model.get_normalized_probs(out, log_probs=True)[0, start - first :]
        total -= log_probs.gather(1, tokens[start:end, None]).sum().item()
    return total / len(tokens) / math.log(2)


def test_evaluation_scores_every_token(lm_corpus, trained_lm, model, test_tokens, caplog):
    """With and without --context-window; --max-tokens 200 makes many batches."""
    flags = ["--tokens-per-sample", 64, "--max-tokens", 200]
    tokens, loss = evaluate(lm_corpus, trained_lm, *flags, caplog=caplog)
    assert tokens == len(test_tokens)
    assert loss == pytest.approx(bits(model, test_tokens, 64, 0), abs=1e-4)

    flags += ["--context-window", 16]
    tokens, with_context = evaluate(lm_corpus, trained_lm, *flags, caplog=caplog)
    assert tokens == len(test_tokens)
    assert with_context == pytest.approx(bits(model, test_tokens, 48, 16), abs=1e-4)
    assert with_context != pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("mode", ["none", "eos", "complete"])
def test_sample_break_modes(lm_corpus, trained_lm, test_tokens, tmp_path, mode, caplog):
    flags = [*SMALL_LM, "--tokens-per-sample", 128, "--sample-break-mode", mode]
    cfg = command(
        options.get_training_parser(), lm_corpus, *flags, "--optimizer", "adam",
        "--lr", 0.01, "--max-tokens", 1000, "--max-update", 2, "--save-dir", tmp_path,
        "--num-workers", 0,
    )  # fmt: skip
    fairseq_cli.train.main(cfg)
    path = tmp_path / "checkpoint_last.pt"
    flags = ["--tokens-per-sample", 128, "--sample-break-mode", mode]
    tokens, loss = evaluate(lm_corpus, path, *flags, caplog=caplog)
    assert tokens == len(test_tokens) and 4 < loss < 12


def test_evaluation_without_the_length_of_training_is_refused(lm_corpus, trained_lm):
    """No perplexity of a part of the text, which could be quoted."""
    printed = fairseq("eval-lm", lm_corpus, "--path", trained_lm, check=False)
    assert "expected blocks of at most 64 tokens to score" in printed.strip().splitlines()[-1]
    assert "Perplexity" not in printed


def hypotheses(printed):
    return dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", printed, re.M))


@pytest.mark.parametrize("flags", ["--beam 3", "--sampling --sampling-topk 5 --beam 1"])
def test_generation_keeps_the_prefix(lm_corpus, trained_lm, tmp_path, flags):
    cfg = command(
        options.get_generation_parser(), lm_corpus, "--path", trained_lm,
        "--task", "language_modeling", "--tokens-per-sample", 128, "--sample-break-mode", "eos",
        "--max-target-positions", 128, "--prefix-size", 3, "--max-len-b", 12, "--min-len", 6,
        "--num-workers", 0, "--batch-size", 16, *flags.split(),
        "--model-overrides", "{'max_target_positions': 128}",
    )  # fmt: skip
    with open(tmp_path / "printed", "w+") as file:
        fairseq_cli.generate._main(cfg, file)
        file.seek(0)
        printed = file.read()
    targets = dict(re.findall(r"^T-(\d+)\t(.*)$", printed, re.M))
    found = hypotheses(printed)
    assert len(found) == 43
    for sentence, text in found.items():
        assert text.split()[:3] == targets[sentence].replace("<<unk>>", "<unk>").split()[:3]
        assert len(text.split()) >= 6


PROMPTS = ["And the LORD said unto", "God", "the king of"]


def continuations(lm_corpus, path, tmp_path, capsys, prompts, *flags):
    """What fairseq-interactive makes of `prompts`, in their order."""
    (tmp_path / "prompts").write_text("".join(prompt + "\n" for prompt in prompts))
    cfg = command(
        options.get_interactive_generation_parser(), lm_corpus, "--path",
        path, "--task", "language_modeling", "--input", tmp_path / "prompts", "--max-len-b", 12,
        "--buffer-size", len(prompts), "--batch-size", len(prompts), *flags,
    )  # fmt: skip
    fairseq_cli.interactive.main(cfg)
    return [text for _, text in sorted(hypotheses(capsys.readouterr().out).items())]


@pytest.mark.parametrize("flags", [["--beam", 3], ["--sampling", "--beam", 1, "--seed", 3]])
def test_prompts_are_continued(lm_corpus, trained_lm, tmp_path, capsys, flags):
    texts = continuations(lm_corpus, trained_lm, tmp_path, capsys, PROMPTS, *flags)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        known = text.split()[: len(prompt.split())]
        assert all(word in (wanted, "<unk>") for word, wanted in zip(known, prompt.split()))
        assert len(text.split()) > len(prompt.split())
    if "--sampling" not in flags:
        for prompt, text in zip(PROMPTS, texts):  # in a batch as alone
            assert continuations(lm_corpus, trained_lm, tmp_path, capsys, [prompt], *flags) == [
                text
            ]


def test_a_prompt_may_repeat_what_may_not_be_generated(lm_corpus, trained_lm, tmp_path, capsys):
    flags = ["--no-repeat-ngram-size", 2, "--beam", 3]
    prompt = "and the and the and"
    (found,) = continuations(lm_corpus, trained_lm, tmp_path, capsys, [prompt], *flags)
    words = found.split()
    assert found.startswith(prompt) and len(words) > 5
    pairs = list(zip(words[4:], words[5:]))  # from the last word of the prompt on
    assert len(set(pairs)) == len(pairs) and ("and", "the") not in pairs


def test_beam_1_takes_the_most_likely_word(lm_corpus, trained_lm, model, tmp_path, capsys):
    words = Dictionary.load(str(lm_corpus / "dict.txt"))
    texts = continuations(lm_corpus, trained_lm, tmp_path, capsys, PROMPTS, "--beam", 1)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        tokens = torch.tensor([2] + [words.index(word) for word in prompt.split()])
        while len(tokens) <= len(text.split()):
            with torch.no_grad():
                logits = model(tokens[None])[0][0, -1]
            logits[words.pad()] = -math.inf
            tokens = torch.cat([tokens, logits.argmax()[None]])
        assert words.string(tokens[1:]) == text


@pytest.mark.slow
def test_hydra_train_from_yaml(lm_corpus, test_tokens, tmp_path, caplog):
    """An arch, some of its options overridden; the options of the task reach the model."""
    (tmp_path / "small.yaml").write_text(
        textwrap.dedent(f"""
        common: {{user_dir: {PLUGIN}, log_format: simple}}
        checkpoint: {{save_dir: {tmp_path}/checkpoints}}
        task: {{_name: language_modeling, data: {lm_corpus}, tokens_per_sample: 48}}
        criterion: {{_name: adaptive_loss}}
        dataset: {{max_tokens: 1000}}
        optimization: {{max_update: 2, lr: [0.001]}}
        optimizer: {{_name: adam}}
        lr_scheduler: {{_name: fixed}}
        model:
          _name: talkconv_lm_wiki103
          decoder_embed_dim: 32
          decoder_ffn_embed_dim: 16
          adaptive_input_cutoff: [100, 300]
          adaptive_softmax_cutoff: "100,300"
        """)
    )
    fairseq("hydra-train", "--config-dir", tmp_path, "--config-name", "small", cwd=tmp_path)
    path = tmp_path / "checkpoints/checkpoint_last.pt"
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert windows(model) == [3, 5, 7, 15, 31] + [63] * 12 and model.max_positions() == 48
    tokens, _ = evaluate(lm_corpus, path, "--tokens-per-sample", 48, caplog=caplog)
    assert tokens == len(test_tokens)


@pytest.mark.long
def test_wiki103_needs_no_flags_but_the_arch(lm_corpus, tmp_path):
    """At its own size, on a dictionary that reaches its cutoffs; one update of a few tokens."""
    words = (lm_corpus / "dict.txt").read_text()
    (tmp_path / "dict.txt").write_text(words + "".join(f"x{n} 1\n" for n in range(60001)))
    for path in lm_corpus.glob("*.*"):
        if path.name != "dict.txt":
            (tmp_path / path.name).symlink_to(path)
    fairseq(
        "train", tmp_path, "--task", "language_modeling", "--arch", "talkconv_lm_wiki103",
        "--criterion", "adaptive_loss", "--tokens-per-sample", 16, "--batch-size", 2,
        "--optimizer", "nag", "--max-update", 1, "--no-save", "--disable-validation",
    )  # fmt: skip
