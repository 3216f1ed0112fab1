"""GROUP.KEY=VALUE: training reads it with Hydra, its record and evaluation with YAML."""

import pytest
from omegaconf import OmegaConf

pytest.importorskip("fairseq")

from pipeline.common.command import BadInput
from pipeline.recipes import config


@pytest.mark.parametrize("text", ["no", "010", "~", "{a:1}", "1:30", ""])
def test_values_that_hydra_reads_otherwise_than_yaml(text):
    with pytest.raises(BadInput, match="^model.x: expected a value that YAML and Hydra read alike"):
        config.with_overrides(OmegaConf.create(), [f"model.x={text}"])


@pytest.mark.parametrize(
    "text, value",
    [
        ("5e-4", 5e-4), ("1_000", 1000), ("null", None), ("True", True), ("[1,2]", [1, 2]),
        ("'0,2'", "0,2"), ('"5"', "5"), ("a/b c", "a/b c"), ("${common.seed}", 7),
        ("{1: 2}", {1: 2}),
    ],
)  # fmt: skip
def test_values_that_both_read_alike(text, value):
    overrides = [f"model.x={text}", "common.seed=3", "++common.seed=7"]
    read = config.with_overrides(OmegaConf.create(), overrides)
    assert read.model.x == value and read.common.seed == 7
