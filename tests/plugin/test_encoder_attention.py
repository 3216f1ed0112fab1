"""EncoderAttention: fairseq's attention to the encoder, shared by the hypotheses of a sentence."""

import pytest
import torch

from conftest import SMALL

pytest.importorskip("fairseq")

from building import from_flags, task
from fairseq.models import build_model
from fairseq.modules import MultiheadAttention

from talk_fairseq.models import encoder_attention
from talk_fairseq.models.encoder_attention import EncoderAttention, SharingDecoder, with_tokens


@pytest.fixture(autouse=True)
def seed():
    """Once more after `model` has been made, which is in one test alone."""
    torch.manual_seed(0)


def attentions(dropout=0.0):
    """Ours and fairseq's, with the same weights."""
    arguments = dict(kdim=12, vdim=12, dropout=dropout, encoder_decoder_attention=True)
    ours, theirs = EncoderAttention(8, 2, **arguments), MultiheadAttention(8, 2, **arguments)
    theirs.load_state_dict(ours.state_dict())
    return ours.eval(), theirs.eval()


def encoded(S, N):
    mask = torch.arange(S) >= torch.randint(1, S + 1, (N, 1))
    mask[0] = False
    return torch.randn(S, N, 12), mask


@pytest.mark.parametrize("weights", ["none", "mean", "heads"])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("k", [1, 4])
def test_equals_fairseqs_with_repeated_sentences(k, T, weights):
    ours, theirs = attentions()
    memory, mask = encoded(7, 3)
    query = torch.randn(T, 3 * k, 8)
    flags = {"need_weights": weights != "none", "need_head_weights": weights == "heads"}
    rows = torch.arange(3).repeat_interleave(k)
    repeated, repeated_mask = memory[:, rows], mask[rows]
    expected, expected_weights = theirs(
        query, repeated, repeated, repeated_mask, None, static_kv=True, **flags
    )
    out, got_weights = ours(query, memory, memory, mask, {}, static_kv=True, **flags)
    assert torch.allclose(out, expected, rtol=0, atol=1e-6)
    if weights == "none":
        assert got_weights is None
    else:
        assert torch.allclose(got_weights, expected_weights, rtol=0, atol=1e-6)


def test_dropout_in_training():
    ours, theirs = attentions(dropout=0.5)
    names = [one.dropout_module.module_name for one in (ours, theirs)]
    assert names == ["MultiheadAttention"] * 2  # for --retain-dropout-modules
    memory, mask = encoded(50, 2)
    query = torch.randn(1, 2, 8)
    first, second = (ours.train()(query, memory, memory, mask, {})[0] for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (ours.eval()(query, memory, memory, mask, {})[0] for _ in range(2))
    assert torch.equal(first, second)


def test_weights_are_those_before_dropout():
    ours, _ = attentions(dropout=0.5)
    memory, mask = encoded(50, 2)
    _, weights = ours.train()(torch.randn(1, 2, 8), memory, memory, mask)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 1), rtol=0, atol=1e-6)


def test_weights_of_halves_are_in_float32():
    ours, theirs = (one.half() for one in attentions())
    memory, mask = encoded(7, 3)
    query, memory = torch.randn(2, 3, 8).half(), memory.half()
    _, weights = ours(query, memory, memory, mask)
    _, expected = theirs(query, memory, memory, mask, static_kv=True)
    assert weights.dtype == expected.dtype == torch.float32
    assert torch.allclose(weights.sum(-1), torch.ones(3, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("k", [None, 1, 4])
def test_copies_of_tokens(k):
    """Keys are outputs, values the outputs plus embeddings; k rows per sentence, or a full pass."""
    arguments = dict(kdim=8, vdim=8, encoder_decoder_attention=True)
    ours, theirs = (
        EncoderAttention(8, 2, copies=True, **arguments),
        MultiheadAttention(8, 2, **arguments),
    )
    theirs.load_state_dict(ours.state_dict())
    x, tokens = torch.randn(7, 3, 8), torch.randn(7, 3, 8)
    mask = torch.arange(7) >= torch.tensor([[7], [4], [5]])
    found = with_tokens({"encoder_out": [x], "rows": "kept"}, tokens, follows=False)
    (memory,) = found["encoder_out"]
    assert memory.shape == (7, 3, 16) and found["rows"] == "kept"
    rows = torch.arange(3).repeat_interleave(k or 1)
    query = torch.randn(2, len(rows), 8)
    out, _ = ours(query, memory, memory, mask, None if k is None else {})
    expected, _ = theirs(query, x[:, rows], (x + tokens)[:, rows], mask[rows])
    assert torch.allclose(out, expected, rtol=0, atol=1e-6)


def test_copies_begin_as_half_of_what_is_attended_to():
    ours = EncoderAttention(8, 2, kdim=8, vdim=8, encoder_decoder_attention=True, copies=True)
    torch.nn.init.zeros_(ours.v_proj.bias)
    x, tokens = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    (memory,) = with_tokens({"encoder_out": [x]}, tokens, follows=False)["encoder_out"]
    out, _ = ours(torch.randn(5, 3, 8), memory, memory)
    assert torch.allclose(out, ((x + tokens) / 2).expand(5, 3, 8), rtol=0, atol=1e-6)


@pytest.mark.parametrize("padding", ["left", "right", None])
def test_keys_of_what_came_before(padding):
    """Keys are outputs plus embeddings of the token before, of which padding is none."""
    arguments = dict(kdim=8, vdim=8, encoder_decoder_attention=True)
    ours = EncoderAttention(8, 2, copies=True, follows=True, **arguments)
    theirs = MultiheadAttention(8, 2, **arguments)
    theirs.load_state_dict(ours.state_dict())
    x, tokens = torch.randn(7, 3, 8), torch.randn(7, 3, 8)
    _, mask = encoded(7, 3)
    mask = {"left": mask.flip(1), "right": mask, None: torch.zeros_like(mask)}[padding]
    keys = x.clone()
    for n in range(3):
        for before, s in zip(range(6), range(1, 7)):
            keys[s, n] += tokens[before, n] * (not mask[n, before])
    encoder_out = {"encoder_out": [x], **({"encoder_padding_mask": [mask]} if padding else {})}
    (memory,) = with_tokens(encoder_out, tokens, follows=True)["encoder_out"]
    query = torch.randn(2, 3, 8)
    out, _ = ours(query, memory, memory, mask if padding else None)
    expected, _ = theirs(query, keys, x + tokens, mask)
    assert torch.allclose(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 4])
def test_following_begins_with_what_comes_after_the_same_token(heads):
    ours = EncoderAttention(
        64, heads, encoder_decoder_attention=True, copies=True, aligns=True, follows=True
    )
    tokens = torch.randn(9, 1, 64)
    encoder_out = {"encoder_out": [torch.zeros_like(tokens)]}
    (memory,) = with_tokens(encoder_out, tokens, follows=True)["encoder_out"]
    _, weights = ours(tokens[:-1], memory, memory, need_head_weights=True)
    found = weights[:, 0].argmax(-1) == torch.arange(1, 9)
    assert found[: (heads + 1) // 2].all() and not found[(heads + 1) // 2 :].all(-1).any()


def test_following_begins_with_one_orthogonal_projection():
    ours = EncoderAttention(8, 4, encoder_decoder_attention=True, copies=True, follows=True)
    q, k = ours.q_proj.weight, ours.k_proj.weight
    assert torch.allclose(q @ q.T, torch.eye(8), rtol=0, atol=1e-6)
    assert torch.equal(k[:4], q[:4]) and not torch.equal(k[4:], q[4:])


def test_following_needs_the_tokens():
    with pytest.raises(ValueError, match="copy_attention: expected True with follow_attention"):
        build_model(from_flags("--arch", "talkconv", "--follow-attention"), task(100))


def aligned(R=4):
    ours = EncoderAttention(2 * R, 2, kdim=12, vdim=12, encoder_decoder_attention=True, aligns=True)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    return ours.double().eval()


def align(ours, query, memory, mask):
    """By loops, of query (T, N, C), memory (S, N, 12) and mask (N, S); returns (T, N, C)."""
    (T, N, C), H = query.shape, ours.num_heads
    R, rows = C // H, []
    for n in range(N):
        source = memory[:, n][~mask[n]]  # its positions are counted without padding
        heads = []
        for h in range(H):
            part = slice(h * R, (h + 1) * R)
            q, keys = ours.q_proj(query[:, n])[:, part], ours.k_proj(source)[:, part]
            q, keys = (
                (x - x.mean(-1, keepdim=True))
                / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
                for x in (q, keys)
            )
            scores = ours.sharpness[h] * q @ keys.T / R**0.5
            for i in range(T):
                for j in range(len(source)):
                    scores[i, j] -= ours.slopes[h].squeeze() * abs(i - j)
            heads.append(scores.softmax(-1) @ ours.v_proj(source)[:, part])
        rows.append(ours.out_proj(torch.cat(heads, -1)))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("padding", ["left", "right", None])
def test_alignment(padding):
    ours = aligned()
    memory, mask = encoded(7, 3)
    query, memory = torch.randn(5, 3, 8).double(), memory.double()
    mask = {"left": mask.flip(1), "right": mask, None: torch.zeros_like(mask)}[padding]
    with torch.no_grad():
        out, _ = ours(query, memory, memory, mask if padding else None)
        assert torch.allclose(out, align(ours, query, memory, mask), rtol=0, atol=1e-12)


def test_a_mask_of_bytes():
    ours = aligned()
    memory, mask = encoded(7, 3)
    query, memory = torch.randn(5, 3, 8).double(), memory.double()
    outs = [ours(query, memory, memory, one)[0] for one in (mask, mask.byte())]
    assert torch.equal(*outs)


def test_alignment_begins_without_slopes():
    ours = EncoderAttention(8, 2, encoder_decoder_attention=True, aligns=True)
    assert (ours.slopes == 0).all() and (ours.sharpness == 1).all()


def test_gradients_of_alignment():
    ours = aligned()
    memory, mask = encoded(7, 3)
    query, memory, dout = torch.randn(5, 3, 8).double(), memory.double(), torch.randn(5, 3, 8)
    outs = ours(query, memory, memory, mask)[0], align(ours, query, memory, mask)
    got, expected = (
        torch.autograd.grad((out * dout).sum(), [ours.slopes, ours.sharpness]) for out in outs
    )
    for a, b in zip(got, expected):
        assert a.abs().min() > 1e-3 and torch.allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_alignment_far_from_the_source_in_halves(dtype):
    """Scores there are differences of large numbers, which halves would not tell apart."""
    ours = aligned().to(dtype)
    torch.nn.init.constant_(ours.slopes, 0.15)
    memory, mask = encoded(40, 2)
    query, memory = torch.randn(500, 2, 8, dtype=dtype), memory.to(dtype)
    with torch.no_grad():
        _, weights = ours(query, memory, memory, mask)
        _, expected = ours.double()(query.double(), memory.double(), memory.double(), mask)
    assert (weights - expected)[:, -1].abs().sum(-1).max() < 8 * torch.finfo(dtype).eps


def reorder(attention, state, order):
    """As a decoder of one layer does, which has nothing but this attention."""
    layer, decoder = torch.nn.Module(), SharingDecoder()
    layer.encoder_attn, decoder.layers = attention, torch.nn.ModuleList([layer])
    decoder.reorder_incremental_state_scripting(state, order)


@pytest.mark.parametrize("first", [1, 2])
def test_alignment_step_by_step(first):
    """Two rows per sentence, which then change places or end."""
    ours, state = aligned(), {}
    memory, mask = encoded(90, 3)  # longer than the target: behind it, shifts change nothing
    memory, mask = memory.double(), mask.flip(1)
    query, rows = torch.randn(70, 6, 8).double(), torch.arange(3).repeat_interleave(2)
    with torch.no_grad():
        expected, _ = ours(query, memory[:, rows], memory[:, rows], mask[rows])
        out, _ = ours(query[:first], memory, memory, mask, state)
        assert torch.allclose(out, expected[:first], rtol=0, atol=1e-12)
        order = torch.tensor([4, 4, 1, 0])
        reorder(ours, state, order)
        steps = query[first:, order].split([1] * 30 + [4] + [1] * (36 - first))
        out = torch.cat([ours(step, memory, memory, mask, state)[0] for step in steps])
        assert torch.allclose(out, expected[first:, order], rtol=0, atol=1e-12)


def test_copies_need_one_width():
    flags = "--arch talkconv --copy-attention --encoder-embed-dim 32 --decoder-embed-dim 64"
    with pytest.raises(ValueError, match="encoder_embed_dim: expected 64, .*, got 32"):
        build_model(from_flags(*flags.split()), task(100, 100))


ORDERS = {  # of 3 sentences with 2 rows each
    "within sentences": ([1, 0, 2, 2, 4, 5], True),
    "a sentence ends": ([3, 2, 5, 5], False),
    "sentences change places": ([4, 5, 0, 1, 2, 3], False),
    "rows mixed": ([5, 0, 3, 3, 1, 2], False),
    "an odd number of rows": ([0, 1, 4], False),
    "more rows": ([0, 0, 1, 1, 2, 2, 3, 3], False),
}


@pytest.mark.parametrize("orders", [*([name] for name in ORDERS), list(ORDERS)], ids=str)
def test_reorder(orders):
    ours, theirs = attentions()
    memory, mask = encoded(7, 3)
    rows = torch.arange(3).repeat_interleave(2)
    state = {}
    ours(torch.randn(1, 6, 8), memory, memory, mask, state)
    for name in orders:
        order, shared = ORDERS[name]
        order = torch.tensor(order) % len(rows)
        keys = ours._get_input_buffer(state)["keys"]
        reorder(ours, state, order)
        rows = rows[order]
        if shared and len(orders) == 1:
            assert ours._get_input_buffer(state)["keys"] is keys
        query = torch.randn(1, len(rows), 8)
        out, _ = ours(query, memory, memory, mask, state)
        repeated = memory[:, rows]
        expected, _ = theirs(query, repeated, repeated, mask[rows])
        assert torch.allclose(out, expected, rtol=0, atol=1e-6)


@pytest.fixture(
    scope="module",
    params=[
        "talkconv",
        "talkconv_plus",
        "talkconv_plus --no-follow-attention --no-align-attention",
    ],
)
def model(request):
    torch.manual_seed(0)
    flags = ["--arch", *request.param.split(), *SMALL[2:]]
    built = build_model(from_flags(*flags), task(100)).eval()
    for layer in built.decoder.layers:
        if layer.encoder_attn.aligns:
            torch.nn.init.normal_(layer.encoder_attn.slopes)
    return built


def encode(model, lengths):
    tokens = torch.full((len(lengths), max(lengths)), model.encoder.padding_idx)
    for row, length in zip(tokens, lengths):
        row[:length] = torch.randint(4, 99, (length,))
    return model.encoder(tokens, torch.tensor(lengths))


@torch.no_grad()
def test_keys_follow_where_the_model_says_so(model):
    cfg, out = model.cfg, encode(model, [9, 4])
    tokens = out["encoder_embedding"][0].transpose(0, 1)
    parts = out["encoder_out"][0].split(tokens.shape[2], dim=2)
    assert len(parts) == 1 + cfg.copy_attention
    if cfg.copy_attention:
        key, value = (part[1:, 0] for part in parts)
        before = tokens[:-1, 0] * cfg.follow_attention
        assert torch.allclose(key, value - tokens[1:, 0] + before, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_search_equals_full_passes(model):
    """Rows repeated, reordered, dropped: as if each row had had its own encoder output."""
    encoder_out = encode(model, [9, 4, 11])
    full = encoder_out
    first = torch.arange(3).repeat_interleave(3)
    order, target = first, torch.randint(4, 99, (9, 1))
    state = {}
    for step in range(25):
        encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
        if step:
            model.decoder.reorder_incremental_state_scripting(state, order)
            target = target[order]
        logits, _ = model.decoder(target, encoder_out=encoder_out, incremental_state=state)
        expected, _ = model.decoder(target, encoder_out=encoder_out)
        assert torch.allclose(logits[:, -1], expected[:, -1], rtol=0, atol=1e-5)
        first = first[order] if step else first
        repeated = {
            **full,
            "encoder_out": [full["encoder_out"][0][:, first]],
            "encoder_padding_mask": [full["encoder_padding_mask"][0][first]],
        }
        again, _ = model.decoder(target, encoder_out=repeated)
        assert torch.allclose(expected, again, rtol=0, atol=1e-5)
        target = torch.cat([target, torch.randint(4, 99, (len(target), 1))], dim=1)
        if step == 7:
            order = torch.tensor([2, 0, 0, 8, 7, 7])  # the second sentence is done
        elif step == 15:
            order = torch.tensor([5, 0, 1, 4])  # no search of fairseq does this
        else:
            order = (torch.arange(len(target)) // 3 * 3 + torch.randint(3, (len(target),))).clamp(
                max=len(target) - 1
            )


def test_weights_only_where_somebody_reads_them(model):
    """A generator says so; whoever scores references with several models reads them in any case."""
    encoder_out, target = encode(model, [5, 3]), torch.randint(4, 99, (2, 6))
    for need_attn in (False, True):
        for layer in model.decoder.layers:
            layer.make_generation_fast_(need_attn=need_attn)
            layer.encoder_attn.make_generation_fast_(need_attn=need_attn)
        assert model.decoder(target, encoder_out=encoder_out)[1]["attn"][0].shape == (2, 6, 5)
        step = model.decoder(target, encoder_out=encoder_out, incremental_state={})
        assert (step[1]["attn"][0] is not None) == need_attn


@torch.no_grad()
def test_without_an_output_of_the_encoder(model):
    target, empty = torch.randint(4, 99, (2, 3)), {"encoder_out": [], "encoder_padding_mask": []}
    assert torch.equal(model.decoder(target, encoder_out=empty)[0], model.decoder(target)[0])


@torch.no_grad()
def test_distances_are_made_once_for_all_layers(model, monkeypatch):
    made, make = [], encoder_attention._distances
    monkeypatch.setattr(encoder_attention, "_distances", lambda *a: made.append(a) or make(*a))
    encoder_out, target = encode(model, [9, 4]), torch.randint(4, 99, (2, 3))
    model.decoder(target, encoder_out=encoder_out)
    assert len(made) == model.cfg.align_attention
    state = {}
    for n in (1, 2, 3):
        model.decoder(target[:, :n], encoder_out=encoder_out, incremental_state=state)
    assert len(made) == 2 * model.cfg.align_attention


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[9, 4], [9, 9]])
def test_steps_fill_no_padding_where_there_is_none(model, lengths):
    state, encoder_out = {}, encode(model, lengths)
    encoder_out["encoder_padding_mask"] = [torch.arange(9) >= torch.tensor(lengths)[:, None]]
    model.decoder(torch.randint(4, 99, (2, 1)), encoder_out=encoder_out, incremental_state=state)
    masks = [found["padding"] for found in model.decoder._attention_states(state)]
    assert len(masks) == 2 and all((mask is None) == (lengths == [9, 9]) for mask in masks)


def test_layers_whose_activations_are_computed_again():
    """They get what they share of the source as they do otherwise."""
    gradients = []
    for flags in [], ["--checkpoint-activations"]:
        torch.manual_seed(0)
        given = from_flags("--arch", "talkconv_plus", *SMALL[2:], "--dropout", "0", *flags)
        model = build_model(given, task(100)).train()
        encoder_out, target = encode(model, [9, 4]), torch.randint(4, 99, (2, 6))
        model.decoder(target, encoder_out=encoder_out)[0].square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert model.decoder.layers[-1].encoder_attn.slopes.grad.all()
    assert all(map(torch.equal, *gradients))


@torch.no_grad()
def test_later_steps_copy_no_encoder_output(model):
    order, state = torch.tensor([2, 0, 1]), {}
    encoder_out = model.encoder.reorder_encoder_out(encode(model, [9, 4, 11]), order)
    assert model.decoder.shared_encoder_out(encoder_out, state, 1) is not encoder_out
    model.decoder(torch.randint(4, 99, (3, 1)), encoder_out=encoder_out, incremental_state=state)
    assert model.decoder.shared_encoder_out(encoder_out, state, 1) is encoder_out


@torch.no_grad()
def test_a_decoder_reorders_all_units_at_once(model):
    """On a GPU each launch costs a step time: one for their states and one for the sentences."""
    order, state = torch.tensor([1, 0, 2, 2]), {}
    encoder_out = model.encoder.reorder_encoder_out(encode(model, [9, 4]), order // 2)
    model.decoder(torch.randint(4, 99, (4, 1)), encoder_out=encoder_out, incremental_state=state)
    assert len(model.decoder.layers) > 1
    with torch.profiler.profile() as profiler:
        model.decoder.reorder_incremental_state_scripting(state, order)
    assert [event.name for event in profiler.events()].count("aten::index_select") == 2


def test_units_of_ones_own_are_reordered_as_they_say(model):
    """Also where they call what they override, or do not reorder at all."""
    first, *others = model.decoder.layers
    seen, state, order = [], {}, torch.tensor([1, 0])
    class_ = type(first.self_attn)

    class Own(class_):
        def reorder_incremental_state(self, incremental_state, new_order):
            seen.append(new_order)
            super().reorder_incremental_state(incremental_state, new_order)

    model.decoder(torch.randint(4, 99, (2, 1)), encode(model, [9, 4]), incremental_state=state)
    first.self_attn.__class__, others[0].conv = Own, torch.nn.Conv1d(1, 1, 1)
    try:
        model.decoder.reorder_incremental_state_scripting(state, order)
    finally:
        first.self_attn.__class__ = class_
        del others[0].conv
    assert seen == [order]
    for layer in model.decoder.layers:
        for one in layer.self_attn._get_input_buffer(state).values():
            assert one.origin[0].tolist() == [1, 0]


def test_layers_without_a_unit_keep_no_state(model):
    model.decoder.layers.append(torch.nn.Identity())  # as a BaseLayer of fairseq has none
    try:
        model.decoder.reorder_incremental_state_scripting({}, torch.tensor([0]))
    finally:
        del model.decoder.layers[-1]


@torch.no_grad()
def test_two_decoders_may_share_an_incremental_state(model):
    other = build_model(from_flags(*SMALL), task(100)).eval()
    target, order, state = torch.randint(4, 99, (3, 5)), torch.tensor([2, 0, 1]), {}
    encoder_outs = [
        one.encoder.reorder_encoder_out(encode(one, [9, 4, 11]), order) for one in (model, other)
    ]
    for step in range(1, 6):
        for one, encoder_out in zip((model, other), encoder_outs):
            prefix = target[:, :step]
            logits, _ = one.decoder(prefix, encoder_out=encoder_out, incremental_state=state)
            expected, _ = one.decoder(prefix, encoder_out=encoder_out)
            assert torch.allclose(logits[:, -1], expected[:, -1], rtol=0, atol=1e-5)
