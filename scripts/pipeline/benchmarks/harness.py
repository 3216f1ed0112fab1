"""What a benchmark leaves out, with its reason, rather than stop for."""

import contextlib

import torch


class Unavailable(Exception):
    """Why a peer or a model cannot run."""


@contextlib.contextmanager
def failures_as_unavailable():
    """Out of memory, and what a device or a dtype does not support, in one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise Unavailable("out of memory") from None
    except RuntimeError as error:
        raise Unavailable(str(error).partition("\n")[0][:100]) from None
