"""Patches that let fairseq 0.12.3 run with today's Python, torch and numpy.

fairseq has had no release since 2022. Importing this package patches what a user of its commands
meets; ``--user-dir`` imports it before any checkpoint or data set is read. Each patch says what
breaks without it; docs/development.md lists them.
"""

import sys

from talk_fairseq.checkpoint_files import evaluate
from talk_fairseq.compat import (  # noqa: F401
    amp,
    checkpoints,
    cpu,
    data,
    decoding,
    models,
    text,
    training,
    updates,
)

# Last, for all modules of fairseq that are imported by now. Without it: loading a model runs what
# its options say, since fairseq calls ``eval`` on some, as on ``--encoder-layers`` of fconv.
for name, module in list(sys.modules.items()):
    if name.startswith("fairseq."):
        vars(module).setdefault("eval", evaluate)
