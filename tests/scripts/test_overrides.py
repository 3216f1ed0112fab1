"""GROUP.KEY=VALUE: its record and evaluation read it as training does, with Hydra."""

import pytest
from omegaconf import OmegaConf

pytest.importorskip("fairseq")

from pipeline.common.command import BadInput
from pipeline.recipes import config


@pytest.mark.parametrize(
    "text, value",
    [
        ("5e-4", 5e-4), ("1_000", 1000), ("null", None), ("True", True), ("[1,2]", [1, 2]),
        ("'0,2'", "0,2"), ('"5"', "5"), ("a/b c", "a/b c"), ("${common.seed}", 7),
        ("{1: 2}", {1: 2}), ("no", "no"), ("010", "010"), ("~", "~"), ("{a:1}", {"a": 1}),
        ("1:30", "1:30"), ("", ""), ("[x]/y", "[x]/y"),
    ],
)  # fmt: skip
def test_values(text, value):
    overrides = [f"model.x={text}", "common.seed=3", "++common.seed=7"]
    read = config.with_overrides(OmegaConf.create(), overrides)
    assert read.model.x == value and read.common.seed == 7


@pytest.mark.parametrize("override", ["model.x=${nope", "model.list.7=5"])
def test_what_cannot_be_set(override):
    with pytest.raises(BadInput, match="^overrides: "):
        config.with_overrides(OmegaConf.create({"model": {"list": [1]}}), [override])
