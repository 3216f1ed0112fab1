"""The language model as fairseq builds it: archs, options, what is refused, training."""

import argparse
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import fields

import pytest
import torch

from conftest import SMALL_LM

pytest.importorskip("fairseq")

from building_lm import (
    ADAPTIVE,
    CHARACTERS,
    SHARED,
    TIED,
    build,
    from_flags,
    from_yaml,
    loss_of,
    task,
    tiny,
    windows,
)
from fairseq.dataclass.configs import EMAConfig
from fairseq.models import build_model
from fairseq.models.ema import EMA
from fairseq.modules import checkpoint_activations
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from talk_fairseq.models.config import cutoff_list
from talk_fairseq.models.talkconv import nested_config
from talk_fairseq.models.talkconv_lm import (
    TaLKConvLanguageModel,
    TaLKConvLanguageModelConfig,
    filter_list,
)
from talk_fairseq.modules import TaLKConvUnit

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


def test_wide_units_with_long_windows():
    wide, plus = (build(from_flags("--arch", f"talkconv_plus{w}_lm"), 100) for w in ("_wide", ""))
    assert windows(wide) == [3, 15, 63, 127, 127, 127]
    sizes = [sum(p.numel() for p in model.parameters()) for model in (wide, plus)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
    for layer in wide.decoder.layers:
        conv = layer.self_attn.conv
        assert (conv.channels, conv.heads, layer.fc1.out_features) == (1536, 32, 512)
        assert conv.root_normalize and conv.windows is not None
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
    "adaptive_input_cutoff": "5,9",
    "adaptive_softmax_cutoff": "6,8",
    "character_filters": "[(1, 8), (2, 4)]",
}


OF_THE_TASK = {"add_bos_token", "tokens_per_sample", "max_target_positions", "tpu"}
REFUSED = {"decoder_xformers_att_config"}


def other_values(arch):
    """A value of each option that is the default of neither the model nor `arch`."""
    default = nested_config(from_flags("--arch", arch), TaLKConvLanguageModelConfig)
    values = {}
    for option in fields(TaLKConvLanguageModelConfig):
        if option.name in OF_THE_TASK | REFUSED | {"_name"}:
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


def test_a_longest_text_beyond_the_samples():
    cfg = from_flags("--arch", "talkconv_lm", "--max-target-positions", "99")
    assert build(cfg).max_positions() == 99


def test_options_of_the_task_where_the_model_names_none():
    task = {"tokens_per_sample": 48, "max_target_positions": None, "add_bos_token": False}
    root = {"task": task, "common": {"tpu": False}, "model": {"_name": "talkconv_lm_big"}}
    assert build(OmegaConf.create(root).model).max_positions() == 48


def test_embeddings_by_flags():
    flags = f"--arch talkconv_lm {ADAPTIVE} --adaptive-input-factor 2 --adaptive-softmax-factor 8"
    decoder = build(from_flags(*flags.split())).decoder
    assert [band[0].weight.shape[1] for band in decoder.embed_tokens.embeddings] == [512, 256, 128]
    assert [tail[0].out_features for tail in decoder.adaptive_softmax.tail] == [64, 8]
    flags = f"{CHARACTERS} --character-embedding-dim 6 --char-embedder-highway-layers 3"
    embed_tokens = build(from_flags("--arch", "talkconv_lm", *flags.split())).decoder.embed_tokens
    assert embed_tokens.char_embeddings.embedding_dim == 6
    assert len(embed_tokens.highway.layers) == 3


@pytest.mark.parametrize("flags", ["", ADAPTIVE])
def test_padding_has_no_embedding(flags):
    assert tiny(flags).decoder.embed_tokens.padding_idx == task().source_dictionary.pad()


def test_fewer_words_to_predict_than_to_read():
    flags = "--arch talkconv_lm --adaptive-softmax-cutoff".split()
    assert build(from_flags(*flags, "45"), 60, 50).decoder.adaptive_softmax.cutoff == [45, 50]
    with pytest.raises(ValueError, match="adaptive_softmax_cutoff: .* at most the 50 words"):
        build(from_flags(*flags, "55"), 60, 50)
    decoder = build(from_flags("--arch", "talkconv_lm"), 60, 50).decoder
    assert decoder.output_projection.out_features == 50


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


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--decoder-max-left 3,7", "decoder_max_left: expected 6 windows, one per layer, got 2"),
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
        (
            "--scale-heads --decoder-conv-dim 60 --decoder-talk-heads 6",
            "scale_heads: expected heads that divide 512, got 6",
        ),
        ("--adaptive-softmax-cutoff 9 --decoder-output-dim 2", r"got 2 // 4 \*\* 1"),
        ("--adaptive-softmax-cutoff 9 --adaptive-softmax-factor 600", r"got 512 // 600 \*\* 1"),
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
    with pytest.raises(ValueError, match=r"last of 2 bands, got 4 // 0 \*\* 1"):
        cutoff_list("cutoff", "10", 4, 0.0, 60)


def test_characters_of_words_are_where_the_model_is():
    embedder = tiny("--character-embeddings --character-filters [(1,4)]").decoder.embed_tokens
    assert "word_to_char" in dict(embedder.named_buffers())
    assert "word_to_char" not in embedder.state_dict()  # fairseq's checkpoints have none


@pytest.mark.parametrize("filters", ["[(1,)]", "3", "[]", "[(0, 4)]", "open('x')", "[(1, 2.5)]"])
def test_bad_character_filters(filters):
    with pytest.raises(ValueError, match="character_filters: expected pairs of a width and"):
        filter_list(filters)


# --- Training ---


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


@pytest.mark.parametrize(
    "flag, offloads", [("--checkpoint-activations", False), ("--offload-activations", True)]
)
def test_activations_are_computed_again(flag, offloads):
    for layer in tiny(flag).decoder.layers:
        assert layer.forward.func is checkpoint_activations._checkpointed_forward
        assert layer.forward.args[1] is offloads


def test_noise_of_quantisation_reaches_the_embeddings():
    flags = f"{ADAPTIVE} --quant-noise-pq 0.1 --quant-noise-pq-block-size 2"
    for band in tiny(flags).decoder.embed_tokens.embeddings:
        assert band[1]._forward_pre_hooks


def test_a_moving_average_of_its_parameters():
    """``--store-ema`` takes all that a checkpoint holds to be floating-point numbers."""
    model = tiny("--spread-windows")
    average = EMA(model, EMAConfig(store_ema=True, ema_decay=0.5))
    start = model.decoder.layers[0].fc1.weight.detach().clone()
    with torch.no_grad():
        model.decoder.layers[0].fc1.weight.zero_()
    average.step(model, 1)
    assert torch.allclose(average.model.decoder.layers[0].fc1.weight, start / 2)
    windows = model.decoder.layers[1].self_attn.conv.windows
    assert torch.equal(average.model.decoder.layers[1].self_attn.conv.windows, windows)


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
    from building_lm import loss_of, tiny

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
    """What the process needs at its peak beside what it has anyway, whoever allocates it."""
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
