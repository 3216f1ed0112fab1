"""torch.jit.trace of whole models."""

import pytest
import torch

pytest.importorskip("fairseq")

import building
import building_lm
from fairseq.models import build_model

from conftest import SMALL, SMALL_LM


class Scores(torch.nn.Module):
    """A model of fairseq without the dictionary that it returns beside the scores."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *arguments):
        return self.model(*arguments)[0]


def translation(tokens, *flags):
    """A small model and its arguments: source, lengths and target."""
    cfg = building.from_flags(*SMALL, *flags)
    lengths = tokens.ne(1).sum(1)  # 1 is padding
    return build_model(cfg, building.task()), (tokens, lengths, tokens.flip(1)[:, :5])


def language_model(tokens, *flags):
    """A small model and its argument."""
    cfg = building_lm.from_flags(*SMALL_LM, *flags)
    return build_model(cfg, building_lm.task()), (tokens,)


@torch.no_grad()
@pytest.mark.parametrize("build", [translation, language_model])
@pytest.mark.parametrize("flags", [(), ("--decoder-short-kernel", "3")], ids=str)
def test_a_traced_model_gives_the_same_bits(build, flags):
    tokens = torch.randint(5, 20, (3, 9))
    tokens[0, :4] = 1
    model, arguments = build(tokens, *flags)
    scores = Scores(model).eval()
    traced = torch.jit.trace(scores, arguments)
    assert torch.equal(traced(*arguments), scores(*arguments))
    other = tuple(argument.roll(1, 0) for argument in arguments)
    assert torch.equal(traced(*other), scores(*other))
