"""SimCut: its loss by hand, where its gradients go, and what it leaves alone."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq")
from building import dictionary
from fairseq.criterions import build_criterion
from fairseq.models import build_model
from omegaconf import OmegaConf
from probing import one_process_of_a_group
from torch import nn

import talk_fairseq  # noqa: F401
from talk_fairseq.criterions import simcut

WORDS = dictionary(24)
ZERO = len(WORDS) - 1  # a word that no sentence has, whose embedding is zero here
SIZES = {
    f"{side}_{size}": value
    for side in ("encoder", "decoder")
    for size, value in (("embed_dim", 8), ("ffn_embed_dim", 8), ("attention_heads", 2))
} | {"encoder_layers": 1, "decoder_layers": 1}
ARCHS = {
    "talkconv": {"encoder_max_left": "2", "decoder_max_left": "2", "offset_dropout": 0.0},
    "transformer": {},
    "lightconv": {
        "encoder_kernel_size_list": [3], "decoder_kernel_size_list": [3],
        "weight_dropout": 0.0, "input_dropout": 0.0,
    },
    "fconv": {
        "encoder_embed_dim": 8, "decoder_embed_dim": 8, "decoder_out_embed_dim": 8,
        "encoder_layers": "[(8, 3)]", "decoder_layers": "[(8, 3)]",
    },
}  # fmt: skip


def model_of(arch, shared=False, **options):
    """A small model in training, without dropout; `shared` is one table of embeddings."""
    torch.manual_seed(1)
    sizes = {} if arch == "fconv" else SIZES | {"attention_dropout": 0.0}
    shared = {"share_all_embeddings": True} if shared else {}
    cfg = {"_name": arch, "dropout": 0.0, **sizes, **ARCHS[arch], **shared, **options}
    task = SimpleNamespace(
        source_dictionary=WORDS, target_dictionary=WORDS,
        cfg=SimpleNamespace(max_source_positions=64, max_target_positions=64),
    )  # fmt: skip
    return build_model(OmegaConf.create(cfg), task).train()


def criterion_of(name="label_smoothed_cross_entropy_with_simcut", **options):
    cfg = OmegaConf.create({"_name": name, "label_smoothing": 0.1, "sentence_avg": False} | options)
    return build_criterion(cfg, SimpleNamespace(target_dictionary=WORDS))


def batch():
    """Two pairs of sentences, one of them shorter."""
    torch.manual_seed(2)
    source, target = torch.randint(4, ZERO, (2, 5)), torch.randint(4, ZERO, (2, 6))
    source[0, -1] = target[0, -1] = WORDS.eos()
    source[1, 3:] = torch.tensor([WORDS.eos(), WORDS.pad()])
    target[1, 3:] = torch.tensor([WORDS.eos(), WORDS.pad(), WORDS.pad()])
    shifted = target.roll(1, dims=1)
    shifted[:, 0] = WORDS.eos()
    shifted[1, 4:] = WORDS.pad()
    net_input = {
        "src_tokens": source, "src_lengths": torch.tensor([5, 4]), "prev_output_tokens": shifted,
    }  # fmt: skip
    return {"net_input": net_input, "target": target, "ntokens": 10}


def by_hand(sample, whole, cut, alpha):
    """The loss of the criterion's docstring, token after token, from the logits of both passes."""
    total, smoothing = 0, 0.1
    for row, words in enumerate(sample["target"].tolist()):
        for place, word in enumerate(words):
            if word != WORDS.pad():
                p, q = (each[row, place].log_softmax(-1) for each in (whole, cut))
                other = smoothing / (len(WORDS) - 1)
                total -= (1 - smoothing) * p[word] + other * (p.sum() - p[word])
                total += alpha * (p.exp() * (p - q)).sum()
    return total


def gradients(loss, model):
    """Of all parameters but the embeddings of words."""
    tables = {id(getattr(model, side).embed_tokens.weight) for side in ("encoder", "decoder")}
    parameters = [each for each in model.parameters() if id(each) not in tables]
    return torch.autograd.grad(loss, parameters, allow_unused=True)


@pytest.mark.parametrize("arch, shared", [*((arch, False) for arch in ARCHS), ("talkconv", True)])
def test_loss_and_gradients_by_hand(monkeypatch, arch, shared):
    """Embeddings are cut where it is drawn; gradients flow through both passes."""
    model, sample = model_of(arch, shared), batch()
    with torch.no_grad():
        for side in (model.encoder, model.decoder):
            side.embed_tokens.weight[ZERO] = 0
    drawn = [torch.rand(2, length) < 0.4 for length in (5, 6)]
    numbers = iter([(~cut).float() for cut in drawn])  # what is below the cutoff is cut
    monkeypatch.setattr(simcut.torch, "rand", lambda *_, **__: next(numbers))
    loss, size, log = criterion_of(simcut_alpha=3.0, simcut_cutoff=0.4)(model, sample)
    assert next(numbers, None) is None and size == 10 and log["loss"] == loss

    words = dict(sample["net_input"])
    for key, cut in zip(("src_tokens", "prev_output_tokens"), drawn):
        words[key] = words[key].masked_fill(cut & words[key].ne(WORDS.pad()), ZERO)
    expected = by_hand(sample, model(**sample["net_input"])[0], model(**words)[0], alpha=3.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(gradients(loss, model), gradients(expected, model), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{"simcut_alpha": 0.0}, {"simcut_cutoff": 0.0}])
def test_without_weight_or_cuts_it_is_label_smoothing(options):
    model, sample = model_of("talkconv"), batch()
    plain, _, _ = criterion_of("label_smoothed_cross_entropy")(model, sample)
    loss, _, _ = criterion_of(**options)(model, sample)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)


def test_validation_is_label_smoothing():
    model, sample = model_of("talkconv").eval(), batch()
    plain, _, _ = criterion_of("label_smoothed_cross_entropy")(model, sample)
    loss, _, _ = criterion_of(simcut_cutoff=0.9)(model, sample)
    assert loss == plain


def test_losses_of_single_tokens_sum_to_the_whole():
    model, sample = model_of("talkconv"), batch()
    losses = []
    for reduce in (True, False):
        torch.manual_seed(3)
        losses.append(criterion_of(simcut_cutoff=0.4)(model, sample, reduce=reduce)[0])
    assert losses[1].shape == (12, 1)
    assert losses[1].sum().item() == pytest.approx(losses[0].item(), rel=1e-5)


def test_each_token_is_cut_once_and_only_in_there():
    """A table that both sides share is not cut twice as often."""
    table = nn.Embedding(3, 4)
    side = SimpleNamespace(embed_tokens=table)
    tokens = torch.ones(100, 100, dtype=torch.long)
    torch.manual_seed(4)
    with (
        pytest.raises(KeyError),
        simcut.embeddings_cut(SimpleNamespace(encoder=side, decoder=side), 0.3),
    ):
        gone = table(tokens).eq(0)
        raise KeyError
    assert gone.all(-1).eq(gone.any(-1)).all()
    assert gone.float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert not table(tokens).eq(0).any()


def test_defaults_and_the_options_of_label_smoothing():
    criterion = criterion_of()
    assert (criterion.simcut_alpha, criterion.simcut_cutoff) == (3.0, 0.05)
    criterion = criterion_of(sentence_avg=True, ignore_prefix_size=1, report_accuracy=True)
    assert criterion.sentence_avg and criterion.report_accuracy
    assert criterion.ignore_prefix_size == 1 and criterion.eps == 0.1


def test_bad_options_and_models():
    with pytest.raises(ValueError, match="simcut_alpha: expected at least 0, got nan"):
        criterion_of(simcut_alpha=float("nan"))
    with pytest.raises(ValueError, match="simcut_cutoff: expected from 0 to below 1, got -0.1"):
        criterion_of(simcut_cutoff=-0.1)
    with pytest.raises(ValueError, match="simcut_alpha: expected at least 0, got -1"):
        criterion_of(simcut_alpha=-1.0)
    with pytest.raises(ValueError, match="simcut_cutoff: expected from 0 to below 1, got 1.0"):
        criterion_of(simcut_cutoff=1.0)
    with pytest.raises(ValueError, match="expected embed_tokens in encoder and decoder"):
        with simcut.embeddings_cut(SimpleNamespace(encoder=nn.Linear(1, 1)), 0.1):
            pass


@pytest.mark.parametrize("backend", ["pytorch_ddp", "legacy_ddp"])
def test_layers_that_are_computed_again_in_several_processes(backend, tmp_path):
    """torch's own wrapper allows one pass of them alone before the gradients."""
    message = "--ddp-backend: expected legacy_ddp for SimCut with --checkpoint-activations"
    refused = pytest.raises(ValueError, match=message)
    with one_process_of_a_group(tmp_path) as distributed:
        model = distributed(model_of("talkconv", checkpoint_activations=True), backend).train()
        with refused if backend == "pytorch_ddp" else contextlib.nullcontext():
            criterion_of()(model, batch())[0].backward()
