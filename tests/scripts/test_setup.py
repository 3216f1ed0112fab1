"""scripts/setup.sh: what it refuses, and that a second call does nothing."""

import shutil
import subprocess
import sys

import pytest

from conftest import ROOT


def setup(*arguments, root=ROOT, **options):
    return subprocess.run(
        [root / "scripts/setup.sh", *arguments], capture_output=True, text=True, **options
    )


@pytest.fixture
def copy(tmp_path):
    """A checkout without .venv."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "setup.cfg", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_unknown_extra():
    done = setup("cuda11")
    assert done.returncode == 2 and "usage: scripts/setup.sh [cuda12|cuda13]" in done.stderr


def test_another_version_of_python(copy):
    python = copy / "python3.9"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    python.chmod(0o755)
    for path, version in ((python, "Python 3.9.1"), ("/no/such/python", "none")):
        done = setup(root=copy, env={"PATH": "/usr/bin:/bin", "PYTHON": str(path)})
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert f"expected Python 3.11 or 3.12, found {path}: {version};" in done.stderr
        assert not (copy / ".venv").exists()


def test_cupy_where_there_is_a_gpu(copy):
    """A played python says that PyTorch of CUDA 13 sees a GPU, and notes what pip is to install."""
    python = copy / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n*is_available*) echo cuda13 ;;\n*"-m pip"*) echo "$*" >>pip ;;\n'
        "*torch.version.cuda*) echo 13 ;;\nesac\n"
    )
    (copy / "nvidia-smi").write_text("#!/bin/sh\n")
    for command in (python, copy / "nvidia-smi"):
        command.chmod(0o755)
    for path, extras in (("/usr/bin:/bin", "[fairseq,test]"), (copy, "[fairseq,test,cuda13]")):
        env = {"PATH": f"{path}:/usr/bin:/bin", "PYTHON": sys.executable}
        done = setup(root=copy, env=env)
        assert done.returncode == 0, done.stderr
        assert extras in (copy / "pip").read_text().splitlines()[-2]  # the last is the check
    calls = (copy / "pip").read_text()
    assert setup(root=copy, env=env).stderr == "" and (copy / "pip").read_text() == calls


@pytest.mark.skipif(
    not (ROOT / ".venv/installed").exists() or not sys.prefix.startswith(str(ROOT)),
    reason="not in the .venv that setup.sh makes",
)
def test_a_second_call_does_nothing():
    before = (ROOT / ".venv/installed").stat().st_mtime_ns
    done = setup(timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (ROOT / ".venv/installed").stat().st_mtime_ns == before
