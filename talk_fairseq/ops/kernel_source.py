"""The CUDA kernel files as text, and what Python reads in it: constants and structs' layouts."""

import ctypes
import functools
import pathlib
import re


def source_path(name):
    """Find a file of ``kernels/``: inside the package (a wheel), or beside it in a checkout."""
    package = pathlib.Path(__file__).resolve().parents[1]
    folders = (package / "kernels", package.parent / "kernels")
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{name}: neither in {folders[0]} nor in {folders[1]}")


@functools.cache
def source(name):
    """Return the text of a kernel file, with the files that it includes in their places."""
    text = source_path(name).read_text()
    return re.sub(r'^#include "([\w.]+)"$', lambda line: source(line[1]), text, flags=re.M)


def compile_options(dtype):
    """Return the options that compile the kernels of one dtype, such as ``"float16"``."""
    return ("-std=c++17", "-DTALK_ONLY", f"-DTALK_{dtype}")


def constants(name):
    """Return the numbers of the lines ``constexpr int NAME = 8;`` of a kernel file, by name."""
    lines = re.findall(r"^constexpr int (\w+) = (\d+);", source(name), re.M)
    return {constant: int(value) for constant, value in lines}


class Layout:
    """Describe how a struct of a kernel file lies in memory: its members in their order.

    Attributes:
        struct: the struct as a class of ctypes.
        pointers: names of the members that point to a tensor; they come first.
        numbers: names of the others.
    """

    _TYPES = {"*": ctypes.c_void_p, "double": ctypes.c_double, "int": ctypes.c_int}

    def __init__(self, name, struct_name):
        body = re.search(rf"^struct {struct_name} {{\n(.*?)^}};", source(name), re.M | re.S)[1]
        fields, self.pointers, self.numbers = [], [], []
        for line in re.sub(r"//.*", "", body).split(";")[:-1]:
            kind, members = re.fullmatch(r"\s*(?:const )?(\w+\*?) ([\w, ]+)", line).groups()
            names = members.split(", ")
            pointer = kind.endswith("*")
            fields += ((member, self._TYPES["*" if pointer else kind]) for member in names)
            (self.pointers if pointer else self.numbers).extend(names)
        self.struct = type(struct_name, (ctypes.Structure,), {"_fields_": fields})
        self.size = ctypes.sizeof(self.struct)
