"""Read untrusted files without running their code, and write files whole.

Checkpoints are pickles, and their options are text that fairseq evaluates; both may come from
anywhere. The package compat puts these functions in place of fairseq's.
"""

import argparse
import ast
import contextlib
import errno
import math
import os
import re
import threading

import fairseq.distributed.utils
import numpy as np
import torch


class PlainDtype:
    """The type of numpy's numbers in a checkpoint.

    In place of ``np.dtype``, which takes fields, objects and sizes as a file states them, and with
    which numpy would follow pointers out of the file.
    """

    def __init__(self, code, *_):
        if code not in {"?", "b1"} and not re.fullmatch(r"[iufc]\d\d?", code):
            raise ValueError(f"expected a type of numbers, got {code!r}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state):
        self.dtype = self.dtype.newbyteorder(state[1])


class PlainArray:
    """An array of numbers in a checkpoint, until `read_checkpoint` makes it one of numpy's."""

    def __init__(self, *_):
        self.array = np.empty(0)

    def __setstate__(self, state):
        _, shape, dtype, fortran, data = state
        flat = np.frombuffer(data, dtype.dtype).copy()
        self.array = flat.reshape(shape, order="F" if fortran else "C")


def _number(dtype, data):
    return np.frombuffer(data, dtype.dtype, count=1)[0]


def allow_checkpoint_types():
    """Allow the types that fairseq's checkpoints hold, all of which hold data and run no code.

    fairseq 0.9 saved its meters, whose module is gone: they are read as Namespaces of their values.
    Without it: torch >= 2.6 refuses every checkpoint of fairseq, with ``UnpicklingError:
    Unsupported global: argparse.Namespace`` (the model's options) or ``_TensorPlaceholder``
    (optimizer states saved after being broadcast).
    """
    types = [argparse.Namespace, fairseq.distributed.utils._TensorPlaceholder]
    for meter in ("AverageMeter", "TimeMeter", "StopwatchMeter"):
        types.append((argparse.Namespace, f"fairseq.meters.{meter}"))
    torch.serialization.add_safe_globals(types)


# numpy's types, such as those of the metrics of ``--eval-bleu``, are allowed in `read_checkpoint`
# alone: elsewhere torch.load would return a PlainArray. Its list of types is the whole process's.
_NUMPY = [(PlainArray, "numpy.ndarray"), (PlainDtype, "numpy.dtype")]
for _core in ("core", "_core"):  # a pickle names the module of the numpy that wrote it
    _NUMPY.append((_number, f"numpy.{_core}.multiarray.scalar"))
    _NUMPY.append((PlainArray, f"numpy.{_core}.multiarray._reconstruct"))
_READING = threading.Lock()


def _plain(value, done):
    """Return `value` as it was saved, with arrays as numpy's.

    Raises ValueError for tensors with more elements than they have bytes for (an expanded one has
    one for all), and for any but plain tensors of real numbers.
    """
    if not isinstance(value, (torch.Tensor, PlainArray, dict, list, tuple, argparse.Namespace)):
        return value
    # A part may be in many places: each is walked once, or a small file would take forever.
    if id(value) in done:
        return done[id(value)][1]
    made = value
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        plain = plain and value.layout == torch.strided and value.device.type != "meta"
        if not plain or value.is_quantized or value.is_complex():
            raise ValueError(f"a tensor of {value.dtype}, {value.layout} on {value.device}")
        held = value.untyped_storage().nbytes()
        if value.numel() * value.element_size() > held:
            raise ValueError(f"a tensor of {tuple(value.shape)} in {held:,} bytes")
    elif isinstance(value, PlainArray):
        made = value.array
    elif isinstance(value, dict):
        for key in value:
            value[key] = _plain(value[key], done)
    elif isinstance(value, list):
        value[:] = [_plain(part, done) for part in value]
    elif type(value) is tuple:
        made = tuple(_plain(part, done) for part in value)
    elif isinstance(value, argparse.Namespace):
        _plain(vars(value), done)
    done[id(value)] = value, made  # kept, or its id could become another's
    return made


def one_line(text, longest=100):
    """Return the beginning of untrusted ``text`` as one line of printable characters."""
    line = " ".join(text.split())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= longest else line[: longest - 2] + " …"


def read_checkpoint(file, map_location="cpu", mmap=False):
    """Read the checkpoint ``file`` (a path or an open file) without running code from it.

    With ``mmap``, tensors of a path are read from the file only when they are used, if it has the
    format of PyTorch 1.6 and later.

    Returns the saved dictionary. Raises ValueError that names the file if it is truncated, is no
    checkpoint of fairseq, or holds types that are not on the list of safe ones; OSError if it
    cannot be opened.
    """
    if isinstance(file, (str, os.PathLike)):
        with open(file, "rb") as opened:
            return read_checkpoint(opened, map_location, mmap)
    path = getattr(file, "name", file)
    try:
        mmap = mmap and file.read(4) == b"PK\x03\x04"
        file.seek(0)
        with _READING, torch.serialization.safe_globals(_NUMPY):
            state = torch.load(path if mmap else file, map_location, weights_only=True, mmap=mmap)
        state = _plain(state, {})
    except MemoryError:
        raise
    except Exception as error:  # a truncated file has raised ten kinds of them
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # of the disk; torch seeks before the beginning of a damaged archive
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        got = f"the unsafe type {unsafe[1]}" if unsafe else "a truncated or foreign file"
        # torch begins with advice that does not help here.
        cause = re.sub(r"(?s).*WeightsUnpickler error:\s*", "", str(error)).partition("\n")[0]
        cause = f"{type(error).__name__}: {cause}"
        raise _refused(path, f"{one_line(got)} ({one_line(cause)})") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        got = f"the keys {list(state)[:5]}" if isinstance(state, dict) else type(state).__name__
        raise _refused(path, one_line(got))
    for name, value in state["model"].items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise _refused(path, one_line(f"{type(value).__name__} for {name!r}"))
    return state


def _refused(path, got):
    return ValueError(f"expected a checkpoint of fairseq in {path}, got {got}")


@contextlib.contextmanager
def naming(path):
    """Turn errors inside the block into one line that names the checkpoint ``path``.

    A ValueError stays one, other errors become a RuntimeError. OSError, MemoryError and errors that
    name the checkpoint pass unchanged.
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if str(path) in str(error) and "\n" not in str(error):
            raise
        reason = one_line(f"{type(error).__name__}: {error}", 500)
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(f"{path} cannot be loaded: {reason}") from error


@contextlib.contextmanager
def whole_file(path):
    """Open a binary file that is ``<path>.tmp`` until the block ends, and then ``path``.

    It is on the disk before it gets its name: whenever the process is killed or the machine stops,
    ``path`` holds all of the old content or all of the new. An exception removes it.
    """
    unfinished = f"{path}.tmp"
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(unfinished)
        raise
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # of some file systems
            raise
    finally:
        os.close(folder)


EXPRESSION = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Load, ast.UnaryOp)
EXPRESSION += (ast.UAdd, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv)


def _size(node):
    """Return how many numbers, characters and the like an expression's value has at most."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return max(1, len(node.value))
    children = ast.iter_child_nodes(node)
    parts = max(1, sum(_size(child) for child in children if isinstance(child, ast.expr)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = (getattr(side, "value", None) for side in (node.left, node.right))
        times = [abs(side) for side in sides if isinstance(side, (int, float))]
        parts *= max(1, *times) if times else math.inf
    return parts


def evaluate(expression):
    """Return the value of an option like ``"[(512, 3)] * 20"``: plain values, sums and products.

    Raises ValueError for anything else and for what gets very large, else what Python raises.
    """
    if not isinstance(expression, str):
        raise TypeError(f"expected text, got {type(expression).__name__}")
    text = expression.strip()
    refused = ValueError(
        f"expected plain values, sums and products with numbers, got {text[:100]!r}"
    )
    try:
        tree = ast.parse(text, mode="eval")
        known = all(isinstance(node, EXPRESSION) for node in ast.walk(tree))
        size = _size(tree)
    except (SyntaxError, RecursionError, MemoryError):
        raise refused from None
    if not known or size > 10_000_000:
        raise refused
    return eval(compile(tree, "<option>", "eval"), {"__builtins__": {}})
