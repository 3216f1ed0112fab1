"""Files of strangers and of runs that are killed: read without running code, written whole.

Checkpoints are pickles, and options are text that fairseq evaluates; both may come from anywhere.
The package compat puts these functions in the place of fairseq's.
"""

import argparse
import ast
import contextlib
import errno
import functools
import io
import math
import os
import pickle
import pickletools
import re
import zipfile

import fairseq.distributed.utils
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# --- Reading checkpoints ---


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


class PlainArray(np.ndarray):
    """An array of numbers in a checkpoint, until `_Contents` makes it one of numpy's."""

    def __new__(cls):
        return super().__new__(cls, 0)

    def __setstate__(self, state):
        version, shape, dtype, fortran, data = state
        if type(shape) is not tuple or not all(type(size) is int for size in shape):
            raise ValueError("expected numbers as the shape of an array")
        if math.prod(shape) * dtype.dtype.itemsize != len(data):
            raise ValueError(f"expected an array of {shape}, got {len(data)} bytes")
        super().__setstate__((version, shape, dtype.dtype, fortran, data))


def _number(dtype, data):
    return np.frombuffer(data, dtype.dtype, count=1)[0]


def _empty_array(*_):
    return PlainArray()


def allow_checkpoint_types():
    """Allow the types that fairseq's checkpoints hold, all of which hold data and run no code.

    numpy's are read through `PlainDtype` and `PlainArray`. fairseq 0.9 saved its meters, whose
    module is gone: they are read as Namespaces of their values. Without it: torch >= 2.6 reads
    files with ``weights_only=True`` and refuses every checkpoint of fairseq, with
    ``UnpicklingError: Unsupported global: argparse.Namespace`` (the model's options), numpy's
    scalars (the metrics of ``--eval-bleu``) or ``_TensorPlaceholder`` (optimizer states saved after
    being broadcast).
    """
    names = [entry[1] for entry in torch.serialization.get_safe_globals() if type(entry) is tuple]
    if "fairseq.meters.TimeMeter" in names:  # by this module, imported under another name
        return
    # A pickle names the module of the numpy that wrote it.
    numbers = [
        (function, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name, function in (("scalar", _number), ("_reconstruct", _empty_array))
    ]
    meters = [
        (argparse.Namespace, f"fairseq.meters.{name}")
        for name in ("AverageMeter", "TimeMeter", "StopwatchMeter")
    ]
    torch.serialization.add_safe_globals(
        [
            argparse.Namespace,
            fairseq.distributed.utils._TensorPlaceholder,
            (PlainArray, "numpy.ndarray"),
            (PlainDtype, "numpy.dtype"),
            *numbers,
            *meters,
        ]
    )


LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # opens files of torch < 1.6
MOST_VALUES = 1_000_000  # in a checkpoint, so that one that repeats itself ends
MOST_TUPLES = 90_000  # of some 22,000 tensors; 150,000 in one another overflow the stack as a key
DEEPEST = 100
SPARE = 1 << 20  # what calls may be given beyond what the file has
CALL = 10  # what a call counts at least; what it makes takes up to 100 times as many bytes
# Only these use what another call has made. Others go through it, and a tensor may be expanded.
TAKES_RESULTS = r"torch\._utils\._rebuild_(tensor|tensor_v2|parameter)|numpy\..*"


class _StandIn:
    """In place of what a call in a pickle makes; a subclass each is in place of what is called."""

    def __new__(cls, *arguments):
        cls.rehearsal.give(cls.name, arguments, bool(re.fullmatch(TAKES_RESULTS, cls.name)))
        return super().__new__(cls)

    def __setstate__(self, state):
        if not isinstance(state, tuple if self.name.startswith("numpy.") else dict):
            raise ValueError(f"GLOBAL {self.name} has a {type(state).__name__} as its state")
        self.rehearsal.give(self.name, state, True)

    def __setitem__(self, key, value):
        pass


class _Rehearsal(pickle._Unpickler):  # the one in C makes room for any number of a memo
    """Reads a pickle without calling anything, to see what its calls would be given.

    torch checks what is called, but not with what: a few bytes are enough to give a long text once
    more, to be copied, or a tensor without end, to be gone through. Raises ValueError for calls
    that are given more than `most` characters and values in all, or what is not for them.
    """

    def __init__(self, file, most):
        super().__init__(file, encoding="utf-8")
        self.left, self.stand_ins = most, {}

    def find_class(self, module, name):
        if name == "bytearray":  # takes a length without bytes
            raise ValueError("Unsupported global: GLOBAL bytearray")
        self.left -= CALL
        called = {"name": f"{module}.{name}", "rehearsal": self}
        return self.stand_ins.setdefault(called["name"], type(name, (_StandIn,), called))

    def persistent_load(self, identity):
        key = identity[2]
        if not isinstance(key, str) or not key.isdecimal():  # another key, another copy
            raise ValueError("expected digits as the key of a tensor")
        return self.find_class("torch", "Storage")()

    def give(self, name, arguments, results):
        """Count what `name` is given, with `results` of other calls among it or not."""
        self.left -= CALL
        values = [arguments]
        while values:
            value = values.pop()
            if isinstance(value, (str, bytes, list, tuple, dict)):
                self.left -= len(value)
            if self.left < 0:
                raise ValueError("its calls are given more than it holds")
            if isinstance(value, (list, tuple)):
                values += value
            elif isinstance(value, dict):
                values += [*value, *value.values()]
            elif isinstance(value, _StandIn) and not results:
                raise ValueError(f"GLOBAL {name} is given what another call makes")


def _check_directory(archive, file, size):
    """The name of the pickle in a zip archive, which torch reads as ``data.pkl``.

    Raises ValueError where torch may find other records in the archive than Python does.
    Python takes the directory from before the records that end the archive, torch from where they
    say; Python knows other names of a record, and cuts names off; torch ignores case.
    """
    file.seek(max(0, size - 98))
    end = file.read().rjust(98)
    where = int.from_bytes(end[92:96], "little")
    alone = end[76:80] == b"PK\5\6" and end[96:] == bytes(2)
    if end[56:60] == b"PK\6\7":  # with the longer records of large archives, as torch writes it
        where = int.from_bytes(end[48:56], "little")
        alone &= end[:4] == b"PK\6\6" and end[64:72] == (size - 98).to_bytes(8, "little")
    if not alone or where != archive.start_dir:
        raise ValueError("it has no directory at its end, or several")
    for record in archive.infolist():
        if len(record.extra) > 4 + int.from_bytes(record.extra[2:4], "little"):
            raise ValueError(f"{record.filename} in it has two extra fields")
        if record.filename != record.orig_filename:
            raise ValueError(f"{record.filename} in it has two names")
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{record.filename} in it is compressed")
    names = [record.filename.lower() for record in archive.infolist()]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)} is in it twice")
    pickles = [name for name in archive.namelist() if name.lower().endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"expected one data.pkl in it, got {len(pickles)}")
    return pickles[0]


class _NoFurther:
    """Reads an open file of `size` bytes, and makes no room for more than it has left."""

    def __init__(self, file, size):
        self.file, self.size = file, size
        self.tell, self.seek, self.readline = file.tell, file.seek, file.readline

    def read(self, count):
        return self.file.read(min(count, self.size - self.tell()))


def _check_container(file, size):
    """Check what an open file of `size` bytes declares, before torch trusts it.

    A zip archive holds nothing but what it has bytes for, undamaged (torch itself checks no sums);
    no pickle makes more than `MOST_TUPLES`, or calls that are given more than the file has.
    Returns whether it is a zip archive, and the bytes of tensors it has room for; raises whatever
    is wrong.
    """
    file.seek(0)
    opening = file.read(len(LEGACY))
    zipped = opening.startswith(b"PK\x03\x04")
    room = size
    if opening == LEGACY:
        file.seek(0)
        pickles = [_NoFurther(file, size)] * 5  # one after the other
    elif not zipped:
        raise ValueError(f"it begins with {opening[:4]!r}")
    else:
        archive = zipfile.ZipFile(file)
        name_of_pickle = _check_directory(archive, file, size)
        records = archive.infolist()
        for name in archive.namelist():
            if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name):
                raise ValueError(f"{name} in it leads out of the archive")
        declared = sum(record.file_size for record in records)
        if declared > size:
            raise ValueError(f"it declares {declared:,} bytes and has {size:,}")
        room = sum(record.file_size for record in records if "/data/" in record.filename)
        damaged = archive.testzip()
        if damaged:
            raise ValueError(f"{damaged} in it is damaged")
        pickles = [io.BytesIO(archive.read(name_of_pickle))]
    tuples = 0
    for data in pickles:
        start = data.tell()
        for operation, _, _ in pickletools.genops(data):
            tuples += operation.name.startswith("TUPLE")
            if tuples > MOST_TUPLES:
                raise ValueError(f"over {MOST_TUPLES:,} tuples")
        data.seek(start)
        _Rehearsal(data, size + SPARE).load()
    file.seek(0)
    return zipped, room


class _Contents:
    """What a checkpoint holds, counted while it is gone through."""

    def __init__(self):
        self.values, self.storages = 0, {}

    def plain(self, value, depth=0):
        """`value` as it was saved, with arrays as numpy's.

        Raises ValueError for tensors with more elements than they have bytes for (an expanded one
        has one for all), for any but plain tensors of real numbers, and for what is nested too
        deep or repeats itself.
        """
        self.values += 1
        if self.values > MOST_VALUES or depth > DEEPEST:
            raise ValueError(f"over {MOST_VALUES:,} values, or over {DEEPEST} in one another")
        inside = functools.partial(self.plain, depth=depth + 1)
        if isinstance(value, torch.Tensor):
            plain = type(value) in (torch.Tensor, torch.nn.Parameter)
            plain = plain and value.layout == torch.strided and value.device.type != "meta"
            if not plain or value.is_quantized or value.is_complex():
                raise ValueError(f"a tensor of {value.dtype}, {value.layout} on {value.device}")
            storage = value.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()
            if value.numel() * value.element_size() > storage.nbytes():
                raise ValueError(f"a tensor of {tuple(value.shape)} in {storage.nbytes():,} bytes")
        elif isinstance(value, np.ndarray):
            return np.array(value, subok=False)
        elif isinstance(value, dict):
            for key in value:
                if not isinstance(key, (str, int, float, type(None))):
                    raise ValueError(f"a {type(key).__name__} as a key")
                value[key] = inside(value[key])
        elif isinstance(value, list):
            value[:] = map(inside, value)
        elif type(value) is tuple:
            return tuple(map(inside, value))
        elif isinstance(value, argparse.Namespace):
            inside(vars(value))
        return value


def one_line(text, longest=100):
    """The beginning of ``text``, which a file may have made, fit to be printed."""
    line = " ".join(text.split())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= longest else line[: longest - 2] + " …"


def read_checkpoint(file, map_location="cpu", mmap=False):
    """Read the checkpoint ``file`` (a path or an open file) without running code from it.

    With ``mmap``, tensors of a path are read from the file where they are used, if it is not
    older than PyTorch 1.6.

    Returns the saved dictionary. Raises ValueError that names the file if it is truncated or
    damaged, declares more than it holds, is no checkpoint of fairseq, or holds types that are not
    on the list of safe ones; OSError if it cannot be opened.
    """
    if isinstance(file, (str, os.PathLike)):
        with open(file, "rb") as opened:
            return read_checkpoint(opened, map_location, mmap)
    path = getattr(file, "name", file)
    try:
        size = file.seek(0, os.SEEK_END)
        zipped, room = _check_container(file, size)
        mmap = mmap and zipped
        state = torch.load(
            path if mmap else file, map_location=map_location, weights_only=True, mmap=mmap
        )
        contents = _Contents()
        state = contents.plain(state)
        if sum(contents.storages.values()) > room:
            raise ValueError(f"its tensors take more than the {room:,} bytes there are for them")
    except MemoryError:
        raise
    except Exception as error:  # a truncated file has raised ten kinds of them
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # of the disk; torch seeks before the beginning of a damaged archive
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        got = f"the unsafe type {one_line(unsafe[1])}" if unsafe else "a truncated or foreign file"
        cause = type(error).__name__ + ": " + str(error).partition("\n")[0]
        raise ValueError(
            f"expected a checkpoint of fairseq in {path}, got {got} ({one_line(cause)})"
        ) from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        held = f"the keys {list(state)[:5]}" if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"expected a checkpoint of fairseq in {path}, got {one_line(held, 200)}")
    for name, value in state["model"].items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            got = one_line(f"{type(value).__name__} for {name!r}")
            raise ValueError(f"expected tensors as the model of {path}, got {got}")
    return state


@contextlib.contextmanager
def naming(path):
    """What fails inside becomes an error of one line that names the checkpoint ``path``.

    A ValueError stays one, all else becomes a RuntimeError. Left alone are OSError, MemoryError,
    and errors that name it themselves.
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


LEAST_ROOM = 1 << 32  # bytes: tables of positions, for one, are made and not in the file
TENSOR = 1 << 14  # bytes that a tensor counts at least, with the modules around it


class Building(TorchDispatchMode):
    """Inside, tensors may be made as the model of the checkpoint ``path`` may need them.

    Options state sizes without having bytes for them, and a model is built before it is compared
    with its parameters. All that is made counts, kept or not: 16 times the size of the file is for
    halves that become float32, shared parameters and what initialisation makes in passing.

    Raises ValueError beyond that.
    """

    def __init__(self, path):
        super().__init__()
        self.room = max(LEAST_ROOM, 16 * os.path.getsize(path)) if os.path.isfile(path) else None
        self.made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        fresh = all(value.alias_info is None for value in function._schema.returns)
        if self.room and fresh:
            for value in made if isinstance(made, (list, tuple)) else (made,):
                if isinstance(value, torch.Tensor):
                    self.made += max(TENSOR, value.numel() * value.element_size())
            if self.made > self.room:
                raise ValueError(f"its options make a model of over {self.room:,} bytes")
        return made


# --- Writing files ---


@contextlib.contextmanager
def whole_file(path):
    """A binary file that becomes ``path`` when the block ends, and is ``<path>.tmp`` until then.

    It is on the disk before it gets its name: whenever the process is killed or the machine stops,
    ``path`` is what it was or all of what is to be. After an exception it is removed.
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
    finally:
        os.close(folder)


# --- Options that are Python literals ---

EXPRESSION = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Load, ast.UnaryOp)
EXPRESSION += (ast.UAdd, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv)


def evaluate(expression):
    """The value of an option such as ``"[(512, 3)] * 20"``: plain values, sums and products.

    Raises ValueError for anything else and for what gets very large, TypeError for no text.
    """
    if not isinstance(expression, str):
        raise TypeError(f"expected text, got {type(expression).__name__}")
    refused = ValueError(
        f"expected plain values, sums and products with numbers, got {expression[:100]!r}"
    )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        nodes = list(ast.walk(tree))
    except (SyntaxError, RecursionError, MemoryError):
        raise refused from None
    largest = 1
    for node in nodes:
        if not isinstance(node, EXPRESSION):
            raise refused
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            times = [side.value for side in (node.left, node.right) if _is_number(side)]
            largest *= max(map(abs, times), default=math.inf)
    if largest > 10_000_000:
        raise refused
    return eval(compile(tree, "<option>", "eval"), {"__builtins__": {}})


def _is_number(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
