"""The CUDA kernel files as text, and their constants and layouts of structs, for Python."""

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


def struct_of(name, struct_name):
    """Return a struct of a kernel file as a class of ctypes."""
    kinds = {"*": ctypes.c_void_p, "double": ctypes.c_double, "int": ctypes.c_int}
    body = re.search(rf"^struct {struct_name} {{\n(.*?)^}};", source(name), re.M | re.S)[1]
    fields = []
    for line in re.sub(r"//.*", "", body).split(";")[:-1]:
        kind, members = re.fullmatch(r"\s*(?:const )?(\w+\*?) ([\w, ]+)", line).groups()
        kind = kinds["*" if kind.endswith("*") else kind]
        fields += ((member, kind) for member in members.split(", "))
    return type(struct_name, (ctypes.Structure,), {"_fields_": fields})
