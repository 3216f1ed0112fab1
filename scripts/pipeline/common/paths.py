"""Where the project's folders are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
PLUGIN = ROOT / "talk_fairseq"
