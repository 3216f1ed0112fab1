"""The encoder-decoder as fairseq builds it: archs, flags, YAML, layers to keep, the model."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from conftest import SMALL

pytest.importorskip("fairseq")

from building import build, from_flags, from_yaml, task, units
from fairseq import checkpoint_utils
from fairseq.models import build_model
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import LayerDropModuleList, checkpoint_activations

from talk_fairseq.models.config import TaLKConvConfig, nested_config, window_list
from talk_fairseq.models.talkconv import TaLKConvModel
from talk_fairseq.modules import TaLKConvUnit

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
    C, heads = ours.encoder.layers[0].embed_dim, ours.decoder.layers[0].encoder_attn.num_heads
    assert added == {
        f"{side}.layers.{n}.self_attn.short.weight: ({taps}, {C})"
        for side, layers, taps in (("encoder", 7, 7), ("decoder", 6, 8))
        for n in range(layers)
    } | {
        f"decoder.layers.{n}.encoder_attn.{name}"
        for name in (f"sharpness: ({heads}, 1)", f"slopes: ({heads}, 1, 1, 1)")
        for n in range(6)
    }
    assert not any(unit.short for side in ("encoder", "decoder") for unit in units(theirs, side))
    activations = torch.nn.functional.relu, torch.nn.functional.silu
    for model, activation in zip((ours, theirs), activations):
        layers = (*model.encoder.layers, *model.decoder.layers)
        assert all(layer.activation_fn is activation for layer in layers)


@pytest.mark.parametrize("arch", ["talkconv", *ARCHS])
def test_archs_of_the_paper_have_nothing_beyond_it(arch):
    cfg = from_flags("--arch", arch)
    for name in ("spread_offsets", "slow_offsets", "spread_windows", "root_normalize"):
        assert cfg[name] is False
    for name in ("copy_attention", "align_attention", "follow_attention"):
        assert cfg[name] is False
    assert cfg.encoder_short_kernel == cfg.decoder_short_kernel == 0


def test_aligning_takes_targets_that_begin_on_the_left():
    """As generators give them, whose steps count from the first token."""
    for options in "cfg", "args":  # the second of tasks without a dataclass
        padded = SimpleNamespace(**vars(task()), **{options: SimpleNamespace(left_pad_target=True)})
        assert build_model(from_flags("--arch", "talkconv_plus", "--no-align-attention"), padded)
        with pytest.raises(ValueError, match="left_pad_target: expected False with align_attent"):
            build_model(from_flags("--arch", "talkconv_plus"), padded)


def test_a_variant_has_the_options_of_its_base():
    """Also where it is registered without a dataclass of its own."""

    class Variant(TaLKConvModel):
        pass

    setattr(Variant, "__dataclass", None)  # as register_model does then
    parser = argparse.ArgumentParser()
    Variant.add_args(parser)
    given = parser.parse_args(["--encoder-max-left", "1,2", "--no-decoder-glu"])
    assert given.encoder_max_left == "1,2" and given.decoder_glu is False


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


@pytest.mark.parametrize("windows", ["3x10000", [True], True, None, "", "3,"])
def test_bad_window_lists(windows):
    with pytest.raises(ValueError, match="windows: expected windows such as"):
        window_list("windows", windows, 1)


def test_no_window_to_the_right():
    cfg = from_yaml("_name: talkconv\nencoder_layers: 1\nencoder_max_left: 3\nencoder_max_right: 0")
    (unit,) = units(build(cfg), "encoder")
    assert (unit.conv.max_left, unit.conv.max_right) == (3, 0)


def test_sides_of_other_sizes():
    flags = (
        "--arch talkconv --encoder-embed-dim 32 --decoder-embed-dim 64 --encoder-conv-dim 48 "
        "--decoder-conv-dim 96 --encoder-layers 1 --decoder-layers 1 --encoder-max-left 3 "
        "--decoder-max-left 3"
    )
    model = build(from_flags(*flags.split()), 20, 20)
    attention = model.decoder.layers[0].encoder_attn
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (64, 32)
    assert units(model, "encoder")[0].conv.channels == 48
    assert units(model, "decoder")[0].conv.channels == 96


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--encoder-max-left 3,7", "encoder_max_left: expected 7 windows, one per layer, got 2"),
        ("--encoder-max-right 3x9", "encoder_max_right: expected 7 windows, one per layer, got 9"),
        ("--decoder-max-left 3,a", "decoder_max_left: expected windows such as '3,7,31x2'"),
        ("--decoder-max-left 3x0,3x6", "decoder_max_left: expected windows such as '3,7,31x2'"),
        ("--input-dropout 2", "input_dropout: expected 0 <= p < 1, got 2"),
        ("--decoder-max-left=-1x6", "decoder_max_left: expected a whole number from 0"),
        ("--encoder-talk-heads 7", "heads: expected a divisor of channels = 512, got 7"),
        ("--encoder-talk-heads 0", "heads: expected a whole number from 1"),
        ("--decoder-conv-dim 0", "conv_channels: expected a whole number from 1"),
        ("--decoder-max-left 2147483648x6", "decoder_max_left: expected a whole number from 0"),
        ("--offset-dropout 1.5", "offset_dropout: expected 0 <= p < 1, got 1.5"),
        ("--cross-self-attention", "cross_self_attention: expected False"),
        ("--decoder-output-dim 16 --share-all-embeddings", "decoder_output_dim: expected 512 with"),
        ("--adaptive-softmax-cutoff 9,5", "adaptive_softmax_cutoff: expected rising cutoffs"),
        ("--adaptive-softmax-cutoff 5,999", "adaptive_softmax_cutoff: expected rising cutoffs"),
        ("--adaptive-softmax-cutoff 5 --share-all-embeddings", "share_all_embeddings: expected F"),
        ("--adaptive-softmax-cutoff 5 --tie-adaptive-weights", "tie_adaptive_weights: expected F"),
        ("--encoder-xformers-att-config {}", "encoder_xformers_att_config: expected None, got"),
        ("--decoder-xformers-att-config x", "decoder_xformers_att_config: expected None, got 'x'"),
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


def test_a_pruned_model_is_not_pruned_to_other_layers():
    """Its layers have other numbers than the windows, which parameters do not tell."""
    pruned = build_model(from_flags(*FLAGS, "--encoder-layers-to-keep", "0,2"), task())
    model = build_model(from_flags(*FLAGS, "--encoder-layers-to-keep", "1"), task())
    message = "encoder_layers_to_keep: expected a checkpoint with 3 layers, or with the 1 that are"
    with pytest.raises(ValueError, match=message):
        model.load_state_dict(pruned.state_dict())


@pytest.mark.parametrize("layers", ["3", "-1", "0,a", "1,1"])
def test_layers_that_are_not_there_are_not_kept(layers):
    message = "encoder_layers_to_keep: expected different numbers from 0 to 2, as in 0,2, got "
    with pytest.raises(ValueError, match=message):
        build(from_flags(*FLAGS, f"--encoder-layers-to-keep={layers}"))


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


def test_slow_offsets_by_flags():
    flags = ["--arch", "talkconv", *SMALL, "--slow-offsets"]
    model = build_model(from_flags(*flags), task(99))
    assert not any(unit.conv.offsets.weight.any() for unit in units(model, "encoder"))
    assert not any(unit.conv.offsets.weight.any() for unit in units(model, "decoder"))


def test_spread_windows_and_their_roots_by_flags():
    flags = ["--arch", "talkconv", *SMALL, "--spread-windows", "--root-normalize"]
    model = build_model(from_flags(*flags), task(99))
    for side in ("encoder", "decoder"):
        for unit in units(model, side):
            assert unit.conv.root_normalize and unit.conv.windows is not None


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


def test_layers_are_dropped():
    flags = "--encoder-layerdrop 0.25 --decoder-layerdrop 0.5"
    model = build(from_flags(*SMALL, *flags.split()), 50)
    for side, share in ((model.encoder, 0.25), (model.decoder, 0.5)):
        assert type(side.layers) is LayerDropModuleList and side.layers.p == share


@pytest.mark.parametrize(
    "flag, offloads", [("--checkpoint-activations", False), ("--offload-activations", True)]
)
def test_activations_are_computed_again(flag, offloads):
    model = build(from_flags(*SMALL, flag), 50)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        assert layer.forward.func is checkpoint_activations._checkpointed_forward
        assert layer.forward.args[1] is offloads
    model.make_generation_fast_()
    assert not any(hasattr(layer.forward, "func") for layer in model.decoder.layers)


def test_noise_of_quantisation_reaches_units_and_attention():
    flags = "--quant-noise-pq 0.1 --quant-noise-pq-block-size 4"
    model = build(from_flags(*SMALL, *flags.split()), 50)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        linears = [layer.self_attn.linear1, layer.self_attn.linear2]
        if attention := getattr(layer, "encoder_attn", None):
            linears += [getattr(attention, f"{name}_proj") for name in ("q", "k", "v", "out")]
        assert all(linear._forward_pre_hooks for linear in linears)


def test_without_attention_to_the_encoder():
    flags = from_flags(*SMALL, "--no-cross-attention", "--copy-attention")
    model = build_model(flags, task(50)).eval()
    assert all(layer.encoder_attn is None for layer in model.decoder.layers)
    source, state = torch.randint(4, 50, (2, 9)), {}
    out = model.encoder(source, torch.tensor([9, 9]))["encoder_out"][0]
    assert out.shape[-1] == model.cfg.encoder.embed_dim  # without embeddings that nobody reads
    expected, _ = model(source, torch.tensor([9, 9]), source)
    for step in range(9):
        logits, _ = model.decoder(source[:, : step + 1], incremental_state=state)
        model.decoder.reorder_incremental_state_scripting(state, torch.tensor([0, 1]))
        assert torch.allclose(logits[:, -1], expected[:, step], rtol=0, atol=1e-5)


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
