"""scripts/test_matrix.sh, on a checkout whose environments are made in no time."""

import configparser
import json
import re
import subprocess
import sys

import pytest

from conftest import ROOT, load_script

matrix = load_script("matrix")

SETUP_CFG = "[options]\ninstall_requires =\n    torch>=1.0\n    numpy>=1.1\n"
SETUP_SH = f"""#!/bin/sh
cd "$(dirname "$0")/.."
[ "$PYTHON" = "{sys.executable}" ] || exit 1
if grep '^torch==1.0$' constraints.txt; then
    echo "ERROR: No matching distribution found for torch==1.0" >&2
    exit 1
fi
mkdir -p .venv/bin
printf '#!/bin/sh\\nexec "%s" "$@"\\n' "{sys.executable}" >.venv/bin/python
chmod +x .venv/bin/python
"""
TEST_NUMPY = """
import pytest

def test_numpy():
    assert "numpy==1.1\\n" not in open("constraints.txt").read()

def test_once_more():
    with open({runs!r}, "a") as runs:
        runs.write("run\\n")

def test_with_a_gpu():
    pytest.skip()
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with torch from 1.0 to 2.0, not to be had in 1.0, and NumPy, failing in 1.1."""
    root = tmp_path / "checkout"
    for name, text in {
        "setup.cfg": SETUP_CFG,
        "constraints.txt": "torch==2.0\ntorchaudio==2.0\nnumpy==2.1\nnvidia-thing==1\n",
        "scripts/setup.sh": SETUP_SH,
        "tests/test_numpy.py": TEST_NUMPY.format(runs=str(tmp_path / "runs")),
        ".gitignore": ".matrix/\nignored\n",
        "ignored": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "scripts/setup.sh").chmod(0o755)
    for command in ("init -q", "add .", "-c user.name=x -c user.email=x commit -qm x"):
        subprocess.run(["git", "-C", root, *command.split()], check=True)
    monkeypatch.setattr(matrix, "ROOT", root)
    monkeypatch.setattr(matrix, "find_python", {"3.11": sys.executable}.get)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts faster
    return root


def run(*arguments, tests=("tests",)):
    return matrix.main([*arguments, "--", *tests])


def results(checkout):
    written = json.loads((checkout / ".matrix/matrix.json").read_text())
    return {result["name"]: result for result in written["combinations"].values()}


def test_what_is_supported():
    """The bounds of setup.cfg and the versions of constraints.txt, in each Python."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options"]["python_requires"] == ">=3.11,<3.13"
    combinations = matrix.combinations()
    if len(combinations) < 8:
        pytest.skip("constraints.txt has a lowest version: this is an environment of the matrix")
    assert len({combination["name"] for combination in combinations}) == 8
    assert {combination["python"] for combination in combinations} == {"3.11", "3.12"}
    for package, title in (("torch", "PyTorch"), ("numpy", "NumPy")):
        low, high = {combination[package] for combination in combinations}
        assert {low, high} == {matrix.lowest(package), matrix.pinned(package)}
        told = f"{title} {matrix.lowest(package)} and {matrix.pinned(package)}"
        assert told in " ".join((ROOT / "docs/development.md").read_text().split())
    assert matrix.constraints(combinations[3]) == (ROOT / "constraints.txt").read_text()


def test_each_says_how_it_ended(checkout, capsys):
    assert run() == 1
    printed = capsys.readouterr().out
    table = printed[printed.index("\n\n") :]
    for name, row in (
        ("python3.11-torch1.0-numpy1.1", r"not made +torch 1.0: not to be had"),
        ("python3.11-torch2.0-numpy1.1", r"failed +1 +1 +1 +[\d.]+  \S+::test_numpy"),
        ("python3.11-torch2.0-numpy2.1", r"passed +2 +0 +1 +[\d.]+"),
        ("python3.12-torch2.0-numpy2.1", r"not made +no Python 3.12 here"),
    ):
        assert re.search(rf"^{re.escape(name)} +{row}$", table, re.M), table
    assert "combinations passed of tried: 1 of 2; not made: 6" in table

    written = results(checkout)
    assert len(written) == 8
    bad, good = (written[f"python3.11-torch2.0-numpy{version}"] for version in ("1.1", "2.1"))
    assert (bad["passed"], bad["failed"], bad["skipped"]) == (1, 1, 1)
    assert (good["result"], good["failures"], good["tests"]) == ("passed", [], ["tests"])
    assert len(good["commit"]) == 40 and not good["uncommitted_changes"]
    assert "passed" not in written["python3.12-torch2.0-numpy2.1"]
    assert "1 failed, 1 passed, 1 skipped" in (checkout / ".matrix" / bad["log"]).read_text()
    assert not (checkout / ".matrix" / good["name"] / "ignored").exists()


def test_what_has_passed_is_not_run_again(checkout, tmp_path, capsys):
    def runs():
        return (tmp_path / "runs").read_text().count("run")

    only = ("--only", "torch2.0-numpy2.1")
    assert run(*only) == 0 and runs() == 1
    for number in (2, 3):  # the one that fails runs again
        assert run("--only", "3.11-torch2.0") == 1 and runs() == number
        assert "python3.11-torch2.0-numpy2.1: has passed" in capsys.readouterr().out
    assert run(*only, "--restart") == 0 and runs() == 4
    assert run(*only, tests=("tests", "-k", "more")) == 0 and runs() == 5
    (checkout / "more.txt").write_text("a change")
    assert run(*only, "--remove") == 0 and runs() == 6
    result = results(checkout)["python3.11-torch2.0-numpy2.1"]
    assert result["uncommitted_changes"]
    assert not (checkout / ".matrix" / result["name"]).exists()


def test_a_snapshot_is_without_environments(checkout, tmp_path):
    for name in ("out/python/setup.cfg", "tests/more.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    matrix.take_snapshot(tmp_path / "snapshot", checkout / "out")
    found = {path.name for path in (tmp_path / "snapshot").rglob("*") if path.is_file()}
    files = {".gitignore", "setup.cfg", "constraints.txt", "setup.sh", "test_numpy.py", "more.py"}
    assert found == files and not (tmp_path / "snapshot/out").exists()


def test_none_has_passed(checkout, capsys):
    assert run("--only", "python3.12") == 1
    assert "combinations passed of tried: 0 of 0; not made: 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "code, minutes, reason",
    [
        ("import os; os._exit(7)", 1, "pytest ended with status 7"),
        ("import time; time.sleep(60)", 0.02, "tests took more than 0.02 minutes"),
        ("", 1, "no test passed; pytest ended with status 5"),
        ("import no_such", 1, r"\S*::tests.test_numpy"),
    ],
)
def test_tests_that_do_not_end_well(checkout, code, minutes, reason):
    (checkout / "tests/test_numpy.py").write_text(code)
    assert run("--only", "torch2.0-numpy2.1", "--minutes", str(minutes)) == 1
    result = results(checkout)["python3.11-torch2.0-numpy2.1"]
    assert result["result"] == "failed" and re.fullmatch(reason, result["reason"]), result


def test_an_environment_that_breaks_is_a_failure(checkout):
    error = "ERROR: Cannot install a and b because they conflict."
    (checkout / "scripts/setup.sh").write_text(f"#!/bin/sh\necho '{error}'\nexit 1\n")
    assert run("--only", "3.11") == 1
    for result in results(checkout).values():
        assert (result["result"], result["reason"]) == ("failed", f"scripts/setup.sh: {error}")


def test_constraints_of_the_lowest_torch(checkout):
    low, *_, high = matrix.combinations()
    assert matrix.constraints(low) == "torch==1.0\ntorchaudio==1.0\nnumpy==1.1\n"
    assert matrix.constraints(high) == (checkout / "constraints.txt").read_text()


def test_pythons_on_the_path_and_under_pyenv(tmp_path, monkeypatch):
    def python(path, says):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{says}\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert matrix.find_python("3.11") is None
    on_path = python(tmp_path / "bin/python3.11", "echo 3.11")
    python(tmp_path / "bin/python3.12", "echo 'pyenv: python3.12: command not found'; exit 127")
    assert matrix.find_python("3.11") == on_path and matrix.find_python("3.12") is None
    under_pyenv = python(tmp_path / "pyenv/versions/3.12.1/bin/python3.12", "echo 3.12")
    assert matrix.find_python("3.12") == under_pyenv


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "3.10"], "--only: expected a part of python3.11-torch"),
        (["--minutes", "0"], "--minutes: expected more than 0, got 0"),
    ],
)
def test_options_that_cannot_be(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        matrix.main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_file_of_something_else_is_kept(checkout):
    path = checkout / ".matrix/matrix.json"
    path.parent.mkdir()
    path.write_text("[]")
    with pytest.raises(SystemExit, match="matrix.json: expected what this script wrote"):
        run()
    assert path.read_text() == "[]"
