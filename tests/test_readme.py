"""What the README tells people to type works: Python, commands, and the files it names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)


def test_python():
    """One after the other, as a reader would paste them."""
    code = "".join(text for language, text in BLOCKS if language == "python")
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.slow
def test_commands(corpus, tmp_path):
    """Each command, on a small corpus and for one epoch; the two scripts have their own tests."""
    pytest.importorskip("fairseq")
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart/binarised").symlink_to(corpus)
    for name in ("talk_fairseq", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = [
        command
        for language, text in BLOCKS
        if language == "bash"
        for command in text.replace("\\\n", " ").strip().splitlines()
        if command and not command.startswith(("scripts/", "source .venv"))
    ]
    # The quick start's model is drawn before the plugin's is trained; here there is only this one.
    commands.sort(key=lambda command: "plot_" in command)
    for command in commands:
        if command.startswith("fairseq-train"):
            command += " --max-epoch 1 --log-format none"
        if command.startswith("fairseq-generate"):
            command += " --max-len-b 5"
        command = command.replace("--last-epochs 10", "--last-epochs 1")
        command = command.replace("quickstart/averaged.pt", "averaged.pt")
        command = command.replace("--sentencepiece quickstart/corpus/sentencepiece.model", "")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(
            command, shell=True, check=True, cwd=tmp_path, env={**os.environ, "PATH": path}
        )
    assert len(commands) == 4
    assert (tmp_path / "windows.encoder.png").exists()


def test_no_number_is_left_to_fill_in():
    assert not re.search(r"^[A-Z]+-[A-Z]+$", TEXT, re.M)


def test_files_and_scripts_exist():
    for name in re.findall(r"\]\((?!http)([^)]+)\)", TEXT) + re.findall(r"scripts/\w+\.sh", TEXT):
        assert (ROOT / name).exists(), name
