"""Every patch of talk_fairseq/compat: what fairseq does without it, and with it.

A probe, in the files beside this one, states what should hold. It must pass here, where the patches
are in force, and must fail with the error it names in a process of its own that has only fairseq:
the day one passes there, its patch can go.
"""

import json
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

import numpy as np
import probes_checkpoints  # noqa: F401
import probes_data
import probes_decoding  # noqa: F401
import probes_models  # noqa: F401
import probes_training  # noqa: F401
from fairseq.data import iterators
from probing import (
    PROBES,
    WITHOUT_ERROR,
    quiet_environment,
)

if __name__ != "__main__":
    import talk_fairseq  # noqa: F401


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """What each probe ends with in a process without the patches."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-W", "ignore", __file__, str(folder)]
    subprocess.run(command, check=True, capture_output=True, env=quiet_environment())
    return json.loads((folder / "outcomes.json").read_text())


def run_alone(folder):
    outcomes = {}
    for name, (probe, _) in PROBES.items():
        (folder / name).mkdir()
        try:
            probe(folder / name)
            outcomes[name] = "it works"
        except Exception as error:
            outcomes[name] = "".join(traceback.format_exception_only(error))
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


@pytest.mark.parametrize("name", PROBES)
def test_it_breaks_without_the_patch(name, alone):
    if name in WITHOUT_ERROR:
        pytest.skip(f"nothing to patch with NumPy {np.__version__}")
    assert re.search(PROBES[name][1], alone[name]), alone[name]


@pytest.mark.parametrize("name", PROBES)
def test_it_works_with_the_patch(name, tmp_path):
    PROBES[name][0](tmp_path)


# --- What patches leave as it was ---


def test_the_data_set_is_told_the_epoch_that_a_run_resumes_in(monkeypatch):
    pairs, task = probes_data.lines_of_words()
    told = []
    monkeypatch.setattr(pairs, "set_epoch", told.append)
    probes_data.iterator_over(pairs, task, epoch=3)
    assert told[-1] == 3


def test_a_remainder_that_is_skipped_does_not_count():
    groups = iterators.GroupedIterator(iterators.CountingIterator(range(9)), 4, True)
    assert len(list(groups)) == 2 and len(groups) == 2


if __name__ == "__main__":
    run_alone(Path(sys.argv[1]))
