"""scripts/setup.sh: what it refuses, and that a second call does nothing."""

import configparser
import importlib
import re
import shutil
import subprocess
import sys
import time

import pytest
from packaging.requirements import Requirement

from conftest import ROOT


def setup(*arguments, root=ROOT, **options):
    return subprocess.run(
        [root / "scripts/setup.sh", *arguments], capture_output=True, text=True, **options
    )


@pytest.fixture
def copy(tmp_path):
    """A checkout without .venv."""
    (tmp_path / "scripts").mkdir()
    files = "setup.sh fairseq.txt ../setup.cfg ../pyproject.toml ../constraints.txt"
    for name in files.split():
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    return tmp_path


def test_unknown_extra():
    done = setup("cuda11")
    assert (
        done.returncode == 2 and "usage: scripts/setup.sh [operator] [cuda12|cuda13]" in done.stderr
    )


def test_another_version_of_python(copy):
    python = copy / "python3.9"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    python.chmod(0o755)
    for path, version in ((python, "Python 3.9.1"), ("/no/such/python", "none")):
        done = setup(root=copy, env={"PATH": "/usr/bin:/bin", "PYTHON": str(path)})
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert f"expected Python 3.11 to 3.13, found {path}: {version};" in done.stderr
        assert not (copy / ".venv").exists()


def make_python(path, version, body=""):
    """A Python of this version that does nothing else than what `body` says, in shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\ncase "$*" in\n*version_info*) echo {version} ;;\n{body}\nesac\n')
    path.chmod(0o755)
    return path


# `python -m venv` and `pip` of a Python, which note what they are called with.
INSTALLS = """*"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*"-m pip"*) echo "$*" >>pip; cat >>pip.input ;;
*torch.version.cuda*) echo no ;;"""


def make_environment(root, version, stamp="fairseq,test\n"):
    make_python(root / ".venv/bin/python", version, INSTALLS)
    if stamp is not None:
        (root / ".venv/installed").write_text(stamp)


def run(copy, *arguments, **environment):
    env = {"PATH": "/usr/bin:/bin", "PYENV_ROOT": str(copy / "pyenv"), **environment}
    return setup(*arguments, root=copy, env=env, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "version, stamp, message",
    [
        ("3.11", None, "expected a .venv that scripts/setup.sh made, got another;"),
        ("3.12", "fairseq,test\n", "expected .venv to have Python 3.11, got 3.12;"),
        ("3.9", "fairseq,test\n", "expected .venv to have Python 3.11, got 3.9;"),
    ],
)
def test_another_environment_stays(copy, version, stamp, message):
    make_environment(copy, version, stamp)
    (copy / ".venv/mine").write_text("kept")
    python = make_python(copy / "a folder/python3.11", "3.11", INSTALLS)
    done = run(copy, PYTHON=str(python))
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr and "remove it (rm -rf .venv)" in done.stderr
    assert (copy / ".venv/mine").read_text() == "kept" and not (copy / "pip").exists()


def test_an_interrupted_set_up_is_made_again(copy):
    """The stamp stands there before pip begins, so that what this script began is known as its."""
    failing = INSTALLS.replace('echo "$*" >>pip;', "exit 1;")
    python = make_python(copy / "python3.12", "3.12", failing)
    assert run(copy, PYTHON=str(python)).returncode == 1
    assert (copy / ".venv/installed").read_text().startswith("unfinished")
    make_python(copy / ".venv/bin/python", "3.12", INSTALLS)
    assert run(copy, PYTHON=str(python)).returncode == 0
    assert (copy / ".venv/installed").read_text().startswith("fairseq,test\n")


def test_an_environment_that_was_made_by_halves_is_made_again(copy):
    """As without python3-venv: there is a Python, and no pip."""
    halves = '*"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python; exit 1 ;;\n*) exit 1 ;;'
    done = run(copy, PYTHON=str(make_python(copy / "python3.12", "3.12", halves)))
    assert done.returncode == 1 and "apt install python3-venv" in done.stderr
    done = run(copy, PYTHON=str(make_python(copy / "python3.12", "3.12", INSTALLS)))
    assert done.returncode == 0, done.stderr


def test_an_environment_whose_python_is_gone_is_made_again(copy):
    python = make_python(copy / "python3.12", "3.12", INSTALLS)
    assert run(copy, PYTHON=str(python)).returncode == 0
    (copy / ".venv/bin/python").unlink()
    (copy / ".venv/bin/python").symlink_to(copy / "gone")
    done = run(copy, PYTHON=str(python))
    assert done.returncode == 0 and (copy / ".venv/bin/python").exists(), done.stderr


def test_an_environment_that_was_moved_is_made_again(copy, tmp_path_factory):
    """Its programs name the folder that it was made in."""
    python = make_python(tmp_path_factory.mktemp("bin") / "python3.12", "3.12", INSTALLS)
    assert run(copy, PYTHON=str(python)).returncode == 0
    (copy / ".venv/bin/program").write_text(f"#!{copy}/.venv/bin/python")
    moved = copy.rename(copy.with_name("moved to here"))
    assert run(moved, PYTHON=str(python)).returncode == 0
    assert not (moved / ".venv/bin/program").exists()
    (moved / ".venv/bin/program").touch()
    assert run(moved, PYTHON=str(python)).stderr == "" and (moved / ".venv/bin/program").exists()


@pytest.mark.parametrize("finished", [True, False])
def test_the_environment_of_another_folder_stays(copy, tmp_path_factory, finished):
    python = make_python(tmp_path_factory.mktemp("bin") / "python3.12", "3.12", INSTALLS)
    if not finished:
        make_python(python, "3.12", INSTALLS.replace('echo "$*" >>pip;', "exit 1;"))
    assert (run(copy, PYTHON=str(python)).returncode == 0) == finished
    (other := tmp_path_factory.mktemp("other")).rmdir()
    shutil.copytree(copy, other, ignore=lambda *_: [".venv", "pip", "pip.input"])
    (other / ".venv").symlink_to(copy / ".venv")
    done = run(other, PYTHON=str(python))
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "expected the .venv of this folder, got a link to another" in done.stderr
    assert (copy / ".venv/bin/python").exists() and not (other / "pip").exists()


def test_two_at_once(copy):
    """The second waits, and finds the work of the first done."""
    slow = INSTALLS.replace('echo "$*" >>pip;', 'echo "$*" >>pip; sleep 0.3;')
    python = make_python(copy / "python3.12", "3.12", slow)
    command = [copy / "scripts/setup.sh"]
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    first = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
    while not (copy / "pip").exists():
        time.sleep(0.01)
    second = run(copy, PYTHON=str(python))
    assert first.wait() == second.returncode == 0 and second.stderr == ""
    assert (copy / "pip").read_text().count(" check\n") == 1


def test_cdpath_leads_nowhere_else(copy):
    python = make_python(copy / "python3.12", "3.12", INSTALLS)
    (copy / "other/scripts").mkdir(parents=True)
    done = subprocess.run(
        ["scripts/setup.sh"], capture_output=True, text=True, cwd=copy,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python), "CDPATH": str(copy / "other")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (copy / ".venv").exists() and not (copy / "other/.venv").exists()


@pytest.mark.parametrize(
    "version, machine, compiles",
    [
        ("3.11", "x86_64", False),
        ("3.12", "x86_64", False),
        ("3.13", "x86_64", True),
        ("3.11", "aarch64", True),
    ],
)
def test_says_first_what_a_python_gets(copy, version, machine, compiles):
    python = make_python(copy / f"bin/python{version}", version, INSTALLS)
    (copy / "bin/uname").write_text(f"#!/bin/sh\necho Linux {machine}\n")
    (copy / "bin/c++").write_text("#!/bin/sh\n")
    for name in ("uname", "c++"):
        (copy / "bin" / name).chmod(0o755)
    done = run(copy, PATH=f"{copy / 'bin'}:/usr/bin:/bin", PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    first, *progress = done.stderr.splitlines()
    assert f"Python {version}: the operator and the plugin for fairseq" in first
    assert ("compile fairseq" in first) == compiles
    assert [line.split(":")[1] for line in progress[:-1]] == [" pip install"] * 3 + [" pip check"]
    calls = (copy / "pip").read_text().splitlines()
    assert "--no-build-isolation --require-hashes" in calls[1]
    assert not any("--quiet" in call for call in calls)


def test_a_compiler_where_fairseq_is_compiled(copy):
    python = make_python(copy / "python3.13", "3.13", INSTALLS)
    for name in ("bash", "sh", "cat", "cksum", "dirname", "uname", "env"):
        (copy / "bin").mkdir(exist_ok=True)
        (copy / "bin" / name).symlink_to(shutil.which(name))
    done = run(copy, PATH=str(copy / "bin"), PYTHON=str(python))
    assert done.returncode == 1 and not (copy / ".venv").exists(), done.stderr
    assert (
        "expected a C++ compiler, which builds fairseq for Python 3.13, found none" in done.stderr
    )


def test_newer_pythons_get_the_operator(copy):
    python = make_python(copy / "python3.14", "3.14", INSTALLS)
    done = run(copy, PYTHON=str(python))
    assert done.returncode == 1 and "scripts/setup.sh operator" in done.stderr
    assert not (copy / ".venv").exists()
    for _ in range(2):
        done = run(copy, "operator", PYTHON=str(python))
        assert done.returncode == 0, done.stderr
        calls = (copy / "pip").read_text()
        assert "[test]" in calls and "fairseq" not in calls and "fairseq" not in done.stderr
    assert done.stderr == ""
    done = run(copy, PYTHON=str(python))  # what the quick start asks for is not there
    assert done.returncode == 1 and "expected Python 3.11 to 3.13" in done.stderr


def test_pythons_on_the_path_and_under_pyenv(copy):
    shim = make_python(copy / "bin/python3.13", "3.13")
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    make_python(copy / "pyenv/versions/3.13.0/bin/python3.13", "3.13", INSTALLS)
    done = run(copy, PATH=f"{copy / 'bin'}:/usr/bin:/bin", PYTHON="python3.13")
    assert done.returncode == 0 and "Python 3.13: " in done.stderr, done.stderr


def test_cupy_where_there_is_a_gpu(copy):
    """A played python says that PyTorch of CUDA 13 sees a GPU, and notes what pip is to install."""
    version = "{}.{}".format(*sys.version_info)
    make_environment(copy, version)
    make_python(
        copy / ".venv/bin/python",
        version,
        '*is_available*) echo cuda13 ;;\n*"-m pip"*) echo "$*" >>pip ;;\n'
        "*torch.version.cuda*) echo 13 ;;",
    )
    (copy / "nvidia-smi").write_text("#!/bin/sh\n")
    (copy / "nvidia-smi").chmod(0o755)
    for path, extras in (("/usr/bin:/bin", "[fairseq,test]"), (copy, "[fairseq,test,cuda13]")):
        env = {"PATH": f"{path}:/usr/bin:/bin", "PYTHON": sys.executable}
        done = setup(root=copy, env=env)
        assert done.returncode == 0, done.stderr
        assert extras in (copy / "pip").read_text().splitlines()[-2]  # the last is the check
    calls = (copy / "pip").read_text()
    assert setup(root=copy, env=env).stderr == "" and (copy / "pip").read_text() == calls


def test_a_cupy_that_cannot_be_installed_stops_nothing(copy):
    """As on a node with a GPU and without a network."""
    failing = INSTALLS.replace("no ;;", "13 ;;").replace(
        '"-m pip"*)', '"-m pip"*cuda13*) exit 1 ;;\n*"-m pip"*)'
    )
    python = make_python(copy / "python3.12", "3.12", f"*is_available*) echo cuda13 ;;\n{failing}")
    (copy / "nvidia-smi").write_text("#!/bin/sh\n")
    (copy / "nvidia-smi").chmod(0o755)
    for _ in range(2):
        done = run(copy, PATH=f"{copy}:/usr/bin:/bin", PYTHON=str(python))
        assert done.returncode == 0 and "could not install CuPy for cuda13" in done.stderr
        assert (copy / ".venv/installed").read_text().startswith("fairseq,test\n")


@pytest.mark.skipif(
    not (ROOT / ".venv/installed").exists() or not sys.prefix.startswith(str(ROOT)),
    reason="not in the .venv that setup.sh makes",
)
def test_a_second_call_does_nothing():
    before = (ROOT / ".venv/installed").stat().st_mtime_ns
    done = setup(timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (ROOT / ".venv/installed").stat().st_mtime_ns == before


def test_fairseq_is_the_one_of_setup_cfg():
    """The file with the hashes names what the extra names, with the same markers."""
    joined = (ROOT / "scripts/fairseq.txt").read_text().replace("\\\n", "")
    with_hashes = re.findall(r"^(\S*fairseq\S*==.*?) +--hash", joined, re.M)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extra = config["options.extras_require"]["fairseq"].splitlines()
    assert [" ".join(line.split()) for line in with_hashes] == [
        line for line in extra if re.match(r"\S*fairseq", line)
    ]
    for python, distribution in (("3.12", "ve-fairseq"), ("3.13", "fairseq-fixed")):
        machine = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": python}
        requirements = map(Requirement, filter(None, extra))
        chosen = [
            item.name for item in requirements if item.marker and item.marker.evaluate(machine)
        ]
        assert chosen == [distribution]


def test_fairseq_can_be_imported_where_it_was_installed():
    """Most other tests are skipped without it."""
    installed = ROOT / ".venv/installed"
    stamp = installed.read_text() if installed.exists() else ""
    if sys.prefix == str(ROOT / ".venv") and stamp.startswith("fairseq"):
        importlib.import_module("fairseq")
