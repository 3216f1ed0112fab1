"""scripts/test_matrix.sh: which versions are tested together, as tox reads them in setup.cfg."""

import configparser
import re
import subprocess
import sys

import pytest

from conftest import ROOT


def tox(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tox", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def combinations():
    """``{name: {package: version}}`` of each combination."""
    config = configparser.ConfigParser()
    config.read_string(tox("config", "-k", "deps"))
    return {
        section.removeprefix("testenv:"): dict(re.findall(r"(\w+)==(\S+)", config[section]["deps"]))
        for section in config.sections()
        if section.startswith("testenv:py")
    }


def bounds(package):
    """The lower bound of `package` in setup.cfg, and its version in constraints.txt."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    requirements = config["options"]["install_requires"]
    lowest = re.search(rf"^{package}>=([\d.]+)", requirements, re.M)[1]
    return lowest, re.search(rf"^{package}==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]


def test_every_combination_of_supported_versions(combinations):
    assert len(combinations) == 13
    page = " ".join((ROOT / "docs/development.md").read_text().split())
    for package, title in (("torch", "PyTorch"), ("numpy", "NumPy")):
        lowest, pinned = bounds(package)
        tested = {versions[package] for versions in combinations.values()}
        assert pinned in tested
        assert any(version.removesuffix(".0") == lowest for version in tested)
        assert f"{title} {lowest} and {pinned}" in page
    for python in ("11", "12", "13"):
        pairs = {
            (versions["torch"], versions["numpy"])
            for name, versions in combinations.items()
            if name.startswith(f"py3{python}-")
        }
        assert len(pairs) == 4 and len(set(dict(pairs))) == len({numpy for _, numpy in pairs}) == 2


def test_torchaudio_is_the_one_of_its_torch(combinations):
    for versions in combinations.values():
        if versions["torch"] == bounds("torch")[1]:
            assert (
                f"torchaudio=={versions['torchaudio']}\n" in (ROOT / "constraints.txt").read_text()
            )
        else:
            assert versions["torchaudio"] == versions["torch"]


def test_what_is_tested_exists():
    commands = tox("config", "-e", "py311-torch26-numpy126", "-k", "commands")
    paths = re.findall(r"tests/\S+", commands)
    assert len(paths) >= 5 and all((ROOT / path).exists() for path in paths)
    for name, has_fairseq in (("py313-torch26-numpy21", True), ("py314-torch213-numpy24", False)):
        assert ("fairseq" in tox("config", "-e", name, "-k", "commands_pre")) == has_fairseq
