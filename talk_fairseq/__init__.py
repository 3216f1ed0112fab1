"""Time-aware Large Kernel (TaLK) Convolutions: an operator for PyTorch and models for fairseq.

    from talk_fairseq import talk_conv, talk_conv_reference, TaLKConv

As a plugin: ``fairseq-train --user-dir talk_fairseq --arch talkconv …``. Where fairseq is
installed, importing this package patches what no longer works in it (compat), and registers the
models, task, criterion and optimizer. The operator needs no fairseq, and CuPy only on a GPU.
"""

import importlib.util
import logging
import os
import sys
import warnings

from talk_fairseq.modules import TaLKConv, TaLKConvUnit
from talk_fairseq.ops.reference import talk_conv_reference
from talk_fairseq.ops.state import TaLKConvState
from talk_fairseq.ops.talk_conv import talk_conv, talk_conv_update

__all__ = [
    "TaLKConv",
    "TaLKConvState",
    "TaLKConvUnit",
    "talk_conv",
    "talk_conv_reference",
    "talk_conv_update",
]
__version__ = "0.1.0"


def _register_with_fairseq():
    # Some modules of fairseq set up logging when they are imported; that is up to the program.
    root, chatty = logging.getLogger(), logging.getLogger("fairseq.tasks.text_to_speech")
    handlers, level = root.handlers[:], root.level
    chatty.setLevel(logging.WARNING)
    if "fairseq_cli" in sys.modules:
        # Importing fairseq sets DEBUG, after which its commands' own setting has no effect. Worker
        # processes may be quieter already, and stay so.
        level = max(level, logging.getLevelName(os.environ.get("LOGLEVEL", "INFO").upper()))
    if "fairseq" in sys.modules and (numba := logging.getLogger("numba")).level == logging.NOTSET:
        numba.setLevel(logging.WARNING)  # thousands of lines for each kernel where root has DEBUG
    try:
        import fairseq  # noqa: F401
    except Exception as error:  # whatever a broken installation raises; the operator works on
        message = f"fairseq is installed but cannot be imported, so its plugin is off: {error!r}"
        warnings.warn(message, stacklevel=3)
    else:
        from talk_fairseq import compat  # noqa: F401
        from talk_fairseq.criterions import simcut  # noqa: F401
        from talk_fairseq.models import talkconv, talkconv_lm  # noqa: F401
        from talk_fairseq.optim import fused_adam  # noqa: F401
        from talk_fairseq.tasks import talk_summarization  # noqa: F401
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


_spec = importlib.util.find_spec("fairseq")
if _spec is not None and _spec.origin is not None:  # not a folder that only has this name
    _register_with_fairseq()
