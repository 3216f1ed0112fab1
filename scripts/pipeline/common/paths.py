"""Where the folders of the project and of its programs are."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
PLUGIN = ROOT / "talk_fairseq"
PROGRAMS = Path(sys.executable).parent  # `python` and fairseq's commands by their names
