"""scripts/test.sh --fairseq-tests, with a source tree of four tests."""

import shutil
import subprocess
import sys

import pytest

import fairseq_suite

pytest.importorskip("fairseq")

TESTS = """
import sys, unittest
import fairseq, tests.utils

class TestPatches(unittest.TestCase):
    def test_plugin_is_loaded(self):
        assert "talk_fairseq" in sys.modules and "fairseq_cli.train" in sys.modules
        assert "site-packages" in fairseq.__path__[0] and tests.utils.of_the_tree

    def test_known(self):
        assert False

    def test_known_no_more(self):
        pass

    def test_other(self):
        assert OTHER
"""
TABLE = """# a comment
tests/test_small.py
tests/test_small.py::TestPatches::test_known | its reason
tests/test_small.py::TestPatches::test_known_no_more | another reason
"""


@pytest.fixture
def tree(tmp_path):
    """A source tree, with a fairseq that cannot be imported."""
    for name, text in {
        "fairseq/__init__.py": "raise ImportError",
        "tests/__init__.py": "",
        "tests/utils.py": "of_the_tree = True",
        "plugin/fairseq_suite.txt": TABLE,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(fairseq_suite.__file__, tmp_path / "plugin")
    return tmp_path


def run(tree):
    return subprocess.run(
        [sys.executable, tree / "plugin/fairseq_suite.py", tree, "-n", "1"],
        capture_output=True,
        text=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("other, status", [(True, 0), (False, 1)])
def test_known_failures_and_others(tree, other, status):
    (tree / "tests/test_small.py").write_text(TESTS.replace("OTHER", str(other)))
    done = run(tree)
    assert done.returncode == status, done.stdout + done.stderr
    name = "tests/test_small.py::TestPatches::test_"
    assert f"XFAIL {name}known - its reason" in done.stdout
    assert f"XPASS {name}known_no_more - another reason" in done.stdout
    assert (f"FAILED {name}other" in done.stdout) == (not other)
    counts = "2 passed, " if other else "1 failed, 1 passed, "
    assert f"{counts}1 xfailed, 1 xpassed" in done.stdout


def test_a_folder_without_tests_of_fairseq(tree):
    (tree / "tests/utils.py").unlink()
    done = run(tree)
    assert done.returncode == 1
    assert f"expected a source tree of fairseq with its tests, got {tree}" in done.stderr


def test_each_known_failure_is_among_what_is_run():
    run, known = fairseq_suite.read_table(fairseq_suite.TABLE)
    assert len(run) > 20 and len(set(run)) == len(run)
    for name, reason in known.items():
        assert any(f"{name}::".startswith(f"{chosen}::") for chosen in run), name
        assert reason, name
