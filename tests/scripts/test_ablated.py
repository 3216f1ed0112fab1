"""DynamicConv's ablation: the units that fairseq lacks, and a small model of each row."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from conftest import fairseq

pytest.importorskip("fairseq")
from building import dictionary
from fairseq import models
from fairseq.modules import LightweightConv1dTBC, MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from test_configs import composed
from test_evaluate import run, verses  # noqa: F401  a fixture

from pipeline.recipes import config, train

LAST = "wmt16_en_de/ablation_12_averaged"
config.import_models(config.read_config(LAST)[1])  # as fairseq does, under the name of the folder

import ablated  # noqa: E402

NAMES = [name for name in config.rows() if name.startswith("wmt16_en_de/ablation_")]
SMALL = [
    f"++model.{side}_{size}"
    for side in ("encoder", "decoder")
    for size in ("embed_dim=32", "ffn_embed_dim=64", "attention_heads=4")
]

# --- The units ---

T, B, C, H = 9, 3, 8, 2
PADDING = torch.zeros(B, T, dtype=torch.bool)
PADDING[1, :3] = PADDING[2, 5:] = True  # on the left, and on the right


def averaged(causal):
    return ablated.AveragedAttention(C, 16, causal)


def limited(causal):
    """With windows of 7 tokens."""
    layer = SimpleNamespace(self_attn=MultiheadAttention(C, H, self_attention=True))
    ablated.limit(layer, 1, causal)
    return layer.self_attn


def convolution(causal, groups):
    """Of 5 tokens."""
    return ablated.Convolution(LightweightConv1dTBC(C, 5, 4 if causal else 2), groups)


UNITS = {
    "averaged": averaged,
    "limited": limited,
    "dense": lambda causal: convolution(causal, 1),
    "depthwise": lambda causal: convolution(causal, C),
}


def made(name, causal):
    """A unit of float64 (but for fairseq's softmax) in generation, with large parameters."""
    unit = UNITS[name](causal).double().eval()
    for parameter in unit.parameters():
        torch.nn.init.normal_(parameter, std=C**-0.5)
    return unit


def call(unit, x, padding=None, state=None):
    if isinstance(unit, ablated.Convolution):  # LightConv's layers zero the padding before it
        x = x if padding is None else x.masked_fill(padding.t().unsqueeze(-1), 0)
        return unit(x, incremental_state=state)
    return unit(query=x, key=x, value=x, key_padding_mask=padding, incremental_state=state)[0]


@pytest.fixture
def x():
    return torch.randn(T, B, C, dtype=torch.float64)


def visible(t, b, left, right):
    """The tokens of a sentence that are no padding, from t - left to t + right."""
    window = range(max(t - left, 0), min(t + right, T - 1) + 1)
    return [s for s in window if not PADDING[b, s]]


def by_loops(name, unit, x, causal, t, b):
    """The output at a token, as the papers define it."""
    if name == "averaged":
        rows = [x[s, b] for s in visible(t, b, T, 0 if causal else T)]
        g = unit.fc2(unit.fc1(sum(rows) / len(rows)).clamp(min=0))
        gates = torch.sigmoid(unit.gates(torch.cat([x[t, b], g])))
        return gates[:C] * x[t, b] + gates[C:] * g
    if name == "limited":
        seen, heads = visible(t, b, *((6, 0) if causal else (3, 3))), []
        for h in range(H):
            part = slice(h * C // H, (h + 1) * C // H)
            q = unit.q_proj(x[t, b])[part] * (C // H) ** -0.5
            scores = torch.stack([q @ unit.k_proj(x[s, b])[part] for s in seen])
            weights = scores.exp() / scores.exp().sum()
            heads.append(sum(w * unit.v_proj(x[s, b])[part] for w, s in zip(weights, seen)))
        return unit.out_proj(torch.cat(heads))
    left = 4 if causal else 2
    out = torch.zeros(C, dtype=x.dtype)
    for s in visible(t, b, left, 4 - left):
        weight = unit.weight[:, :, s - t + left]
        out = out + (weight @ x[s, b] if name == "dense" else weight[:, 0] * x[s, b])
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", UNITS)
def test_units_are_their_definitions(name, causal, x):
    unit = made(name, causal)
    out = call(unit, x, PADDING)
    assert out.isfinite().all()
    for b in range(B):
        for t in visible(0, b, 0, T):
            assert_close(out[t, b], by_loops(name, unit, x, causal, t, b), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", UNITS)
def test_a_search_goes_step_by_step_and_changes_rows(name, x):
    """Where the first tokens of a sentence are padding, too; the state does not grow."""
    unit, order, state = made(name, True), torch.tensor([1, 2, 1]), {}
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, :2] = True
    steps = [call(unit, x[t : t + 1], padding[:, t : t + 1], state) for t in range(5)]
    full = call(unit, x, padding)
    assert_close(torch.cat(steps)[2:], full[2:5], rtol=1e-5, atol=1e-5)
    unit.reorder_incremental_state(state, order)
    steps = [call(unit, x[t : t + 1, order], None, state) for t in range(5, T)]
    assert_close(torch.cat(steps), full[5:, order], rtol=1e-5, atol=1e-5)
    if name == "averaged":
        assert [value["sums"].shape for value in state.values()] == [(B, C + 1)]


def test_half_precision_keeps_its_sums_in_float32():
    unit = averaged(causal=True).bfloat16()
    state = {}
    x = torch.ones(1, B, C, dtype=torch.bfloat16)
    for _ in range(300):  # bfloat16 cannot count beyond 256
        out = call(unit, x, state=state)
    [kept] = state.values()
    assert out.dtype == torch.bfloat16 and kept["sums"].eq(300).all()


# --- The rows ---


@pytest.fixture(scope="module")
def words():
    return dictionary(44)


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_trains_and_generates(name, words):
    cfg = composed(name, *SMALL)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, cfg=cfg.task)
    model = models.build_model(cfg.model, task)
    source, target = torch.randint(4, 40, (2, 3, 12))  # fewer tokens than kernels have taps
    source[1, :7] = words.pad()  # longer than the windows of the first layers
    lengths = torch.tensor([12, 5, 12])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(source, lengths, target)[0]
        F.cross_entropy(logits.flatten(0, 1), target.roll(-1, 1).flatten()).backward()
        optimizer.step()
    for key, parameter in model.named_parameters():
        if not key.endswith("conv_bias"):  # which fairseq's DynamicConv has and does not use
            assert parameter.isfinite().all() and not torch.equal(parameter, before[key]), key

    model.eval()
    with torch.no_grad():
        encoded = model.encoder(source, lengths)
        alone = model.encoder(source[1:2, 7:], lengths[1:2])["encoder_out"][0]
        assert_close(encoded["encoder_out"][0][7:, 1:2], alone, rtol=1e-5, atol=1e-5)
        full, state = model.decoder(target, encoded)[0], {}
        steps = [model.decoder(target[:, : t + 1], encoded, state)[0] for t in range(12)]
        assert_close(torch.cat(steps, 1), full, rtol=1e-5, atol=1e-5)
        changed = target.clone()
        changed[:, 5:] = 5
        assert_close(model.decoder(changed, encoded)[0][:, :5], full[:, :5], rtol=1e-5, atol=1e-5)

    search = SequenceGenerator([model], words, beam_size=3, min_len=31, max_len_b=33)
    found = search.generate([model], {"net_input": {"src_tokens": source, "src_lengths": lengths}})
    for row, hypotheses in enumerate(found):
        best = hypotheses[0]["tokens"]
        fed = torch.cat([best.new_tensor([words.eos()]), best[:-1]])[None]
        logits = model(source[row : row + 1], lengths[row : row + 1], fed)[0]
        scores = logits.log_softmax(-1)[0, range(len(best)), best]
        assert_close(hypotheses[0]["positional_scores"], scores, rtol=1e-4, atol=1e-4)


def test_a_user_directory_that_is_not_there_is_named():
    given = config.with_overrides(config.read_config(LAST)[1], ["common.user_dir=gone"])
    with pytest.raises(config.BadInput, match="common.user_dir: expected a folder .*, got .*gone"):
        config.import_models(given)


@pytest.mark.slow
def test_a_row_is_trained_and_scored_from_any_folder(verses, tmp_path, monkeypatch, capfd):  # noqa: F811
    """With the models of its user directory, which its YAML names from the project's root."""
    monkeypatch.chdir(tmp_path)
    small = [word.removeprefix("++") for word in SMALL]
    small += ["task.source_lang=es", "task.target_lang=en", "optimization.update_freq=[1]"]
    small += ["optimization.max_update=2", "checkpoint.keep_last_epochs=1"]
    small += ["dataset.num_workers=0"]
    args = [LAST, *small, "--cpu", "--data", verses, "--save-dir", tmp_path / "run"]
    command = train.plan(train.parse(list(map(str, args))))[0]
    fairseq("hydra-train", *command[1:], cwd=tmp_path)
    status, result, line = run(
        capfd, LAST, tmp_path / "run/checkpoint_last.pt", *small, "--data", verses,
        "--split", "valid", "generation.beam=2", "generation.max_len_a=0", "generation.max_len_b=3",
    )  # fmt: skip
    assert status == 0, line
    assert result["lines"] == 50 and "tokenised_bleu" in result["scores"]
