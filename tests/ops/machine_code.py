"""What a kernel costs, read from the machine code that NVRTC makes of it; needs no GPU.

`instructions_a_thread` counts what one thread issues on its main way through a kernel. The code is
cut into blocks, which run from start to end, and its loops are found; a table says how often each
of them turns. What a turn costs, or the kernel outside of its loops, is the *longest* way through
its blocks, with these exceptions for what is rare:

- a loop that the table gives no turns is never entered;
- blocks with an opcode that the table names as `rare` in a loop are not on its way;
- blocks with a call are not either: a division calls for numbers far from 1, or of 64 bits;
- of two ways that load from global memory equally often, or that both store to it, the shorter is
  taken: the other one is for the edge of a tensor.

An instruction that is predicated off takes its place all the same, and counts.
"""

import ctypes
import functools
import importlib.util
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from typing import NamedTuple

from talk_fairseq.ops.kernel_source import compile_options, source

KINDS = {  # kind: opcodes, or how they begin; the first that fits
    "conversion": "F2F F2FP F2I I2F I2FP FRND HADD2.F32",
    "float64": "DADD DMUL DFMA DSETP DMNMX",
    "float32": "FADD FMUL FFMA FSETP FSEL FMNMX MUFU HADD2 HMUL2 HFMA2 HSETP2",
    "shared memory": "LDS STS ATOMS",
    "global loads": "LDG LDGSTS",
    "global stores": "STG ATOMG REDG RED",
    "generic memory": "LD ST ATOM",  # where the compiler cannot tell which it is: slower
    "local memory": "LDL STL",
    "shuffle": "SHFL",
    "control": "BRA BSSY BSYNC EXIT BAR WARPSYNC NOP BREAK YIELD CALL RET",
    "other": "LDC ULDC S2R S2UR CS2R MOV UMOV R2UR P2R R2P PLOP3 UPLOP3 VOTE VOTEU",
    "integer": "",
}

# --------------------------------------------------------------------------------- from the tools


def _wheel_files(packages, pattern):
    """Files of NVIDIA's wheels, which are folders without code of Python."""
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations if spec else ():
            yield from sorted(map(str, pathlib.Path(folder).glob(pattern)))


def nvrtc():
    """NVRTC from its wheel or from the system, or None."""
    names = _wheel_files(("nvidia.cuda_nvrtc", "nvidia.cu13"), "lib/libnvrtc.so.*")
    for name in [*names, "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def nvrtc_version(library):
    """Such as (12, 9)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert not library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def nvdisasm():
    """The disassembler's path, from its wheel or from the system, or None."""
    return next(_wheel_files(("nvidia.cu13",), "bin/nvdisasm"), shutil.which("nvdisasm"))


def compile_kernels(library, file, dtype, architecture):
    """``(cubin, log)`` of a kernel file for one dtype, as CuPy compiles it: no header in reach."""
    options = [option.encode() for option in compile_options(dtype)]
    options += [b"-arch=sm_%d" % architecture, b"-ftz=true"]  # which CuPy always adds
    options += [b"--ptxas-options=-v"]  # for the log
    program = ctypes.c_void_p()
    assert not library.nvrtcCreateProgram(
        ctypes.byref(program), source(file).encode(), file.encode(), 0, None, None
    )

    def read(name):
        size = ctypes.c_size_t()
        assert not getattr(library, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        assert not getattr(library, f"nvrtcGet{name}")(program, content)
        return content.raw

    failed = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    log = read("ProgramLog").rstrip(b"\0").decode()
    assert not failed, log
    cubin = read("CUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin, log


class Kernel(NamedTuple):
    """A kernel in machine code."""

    name: str
    registers: int
    spills: int  # bytes stored and loaded for want of registers
    shared: int  # bytes, beside those of the launch
    code: list  # of (is it predicated?, opcode, operands)


@functools.cache
def kernels(file, dtype, architecture=90):
    """{name: Kernel} of a kernel file."""
    cubin, log = compile_kernels(nvrtc(), file, dtype, architecture)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as stored:
        stored.write(cubin)
        stored.flush()
        done = subprocess.run([nvdisasm(), "-json", stored.name], capture_output=True, check=True)
    code = {
        function["function-name"]: [
            ("predicate" in line, line["opcode"], line.get("operands", ""))
            for line in function["sass-instructions"]
        ]
        for function in json.loads(done.stdout)[1]
    }
    found = {}
    for text in log.split("Compiling entry function '")[1:]:
        name = text.split("'")[0]
        registers = int(re.search(r"Used (\d+) registers", text)[1])
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", text)))
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", text)))
        found[name] = Kernel(name, registers, spills, shared, code[name])
    return found


def blocks_a_multiprocessor(kernel, threads, shared):
    """How many blocks with so many bytes of shared memory there run at a time on sm_90."""
    warps = -(-threads // 32)
    registers_a_warp = -(-kernel.registers * 32 // 256) * 256
    return min(
        65536 // registers_a_warp // 4 * 4 // warps,  # a quarter of the warps to a scheduler
        228 * 1024 // (kernel.shared + shared + 1024),
        2048 // threads,
    )


# ------------------------------------------------------------------------------ the way through


MEMORY = r"(LD|ST|ATOM|RED|SHFL)(?!C)"  # opcodes by which a reader knows a loop


class Loop(NamedTuple):
    """A row of the table of a kernel's loops, which stand there in the order of the code."""

    what: str
    holds: str  # an opcode without what follows its dot, to be sure that it is this loop
    turns: float  # each time that it is entered
    rare: str = ""  # an opcode that its main way does not hold


def _holds(opcodes, name):
    return any(opcode == name or opcode.startswith(name + ".") for opcode in opcodes)


def kind_of(opcode):
    """What an instruction does: a key of KINDS."""
    for kind, names in KINDS.items():
        if not names or any(_holds([opcode], name) for name in names.split()):
            return kind


def _blocks(code):
    """``({start: opcodes}, {start: starts of the blocks that may come next})``; -1 is the end."""
    jumps = {}  # index of an instruction: (target, may it go on behind it?)
    for i, (predicated, opcode, operands) in enumerate(code):
        name, *flags = opcode.split(".")
        assert name not in ("BRX", "JMX"), f"expected jumps to fixed addresses, got {opcode}"
        if name == "BRA" and "DIV" not in flags:  # BRA.DIV: only where the lanes of a warp part
            *conditions, target = operands.split(",")
            jumps[i] = int(target, 16) // 16, predicated or bool(conditions)
        elif name == "EXIT":
            jumps[i] = -1, predicated
    starts = sorted({0, *(i + 1 for i in jumps), *(to for to, _ in jumps.values() if to >= 0)})
    opcodes, following = {}, {}
    for start, end in zip(starts, [*starts[1:], len(code)]):
        target, goes_on = jumps.get(end - 1, (end, False))
        opcodes[start] = [opcode for _, opcode, _ in code[start:end]]
        following[start] = {target, end} if goes_on else {target}
    return opcodes, following


def _order(following, start):
    """What can be reached from `start`, each before what follows it, but for steps back."""
    seen, order = set(), []

    def visit(node):
        seen.add(node)
        for after in sorted(following.get(node, ()), reverse=True):
            if after not in seen:
                visit(after)
        order.append(node)

    visit(start)
    return order[::-1]


def _loops(following):
    """{first block: all the blocks} of each loop."""
    order = _order(following, 0)
    before = {node: [n for n in order if node in following.get(n, ())] for node in order}
    dominators = {node: set(order) for node in order} | {0: {0}}
    for _ in order:  # at most so often until nothing changes
        for node in order[1:]:
            dominators[node] = {node} | set.intersection(*(dominators[n] for n in before[node]))
    loops = {}
    for tail in order:
        for header in following.get(tail, set()) & dominators[tail]:
            body = loops.setdefault(header, {header})
            waiting = [tail]
            while waiting:
                if (node := waiting.pop()) not in body:
                    body.add(node)
                    waiting += before[node]
    return dict(sorted(loops.items()))


def _way(costs, following, closed, start, ends):
    """What the main way costs from `start` to one of `ends`, neither back nor through `closed`."""

    def cost(nodes):
        return sum((costs[node] for node in nodes), Counter())

    def main(a, b):
        x, y = cost(set(a) - set(b)), cost(set(b) - set(a))
        longer, shorter = (a, b) if x.total() >= y.total() else (b, a)
        loads = x["global loads"] == y["global loads"] > 0
        return shorter if loads or x["global stores"] and y["global stores"] else longer

    ways = {start: (start,)}
    for node in _order(following, start):
        for after in following[node] - closed if node in ways and node not in ends else ():
            way = (*ways[node], after)
            ways[after] = main(ways[after], way) if after in ways else way
    found = [ways[end] for end in ends if end in ways]
    if not found:
        raise ValueError(f"block {start}: expected a way to {ends}, got none but through {closed}")
    return cost(functools.reduce(main, found))


def instructions_a_thread(kernel, table):
    """Counter by kind of the instructions that a thread issues in `kernel`.

    Raises:
        ValueError: its loops are not those of `table`; the message shows them.
    """
    opcodes, following = _blocks(kernel.code)
    loops = _loops(following)
    inside = {start: [op for node in body for op in opcodes[node]] for start, body in loops.items()}
    if len(loops) != len(table) or not all(
        _holds(inside[start], loop.holds) for start, loop in zip(loops, table)
    ):
        raise ValueError(f"{kernel.name}: {_difference(loops, inside, table)}")

    costs = {node: Counter(map(kind_of, ops)) for node, ops in opcodes.items()} | {-1: Counter()}
    closed = {node for node, ops in opcodes.items() if _holds(ops, "CALL")}
    following[-1] = set()
    for start, loop in sorted(zip(loops, table), key=lambda row: len(loops[row[0]])):
        # Those inside of others come first; each becomes a block of all its turns.
        body = loops[start] & following.keys()
        closed |= {node for node in body if _holds(opcodes[node], loop.rare)}
        tails = {node for node in body if start in following[node]} - closed
        within = {node: (following[node] & body) - {start} for node in body}
        turn = _way(costs, within, closed, start, tails)
        costs[start] = Counter({kind: loop.turns * count for kind, count in turn.items()})
        opcodes[start] = []
        exits = set.union(*(following[node] for node in body)) - body
        following = {node: after for node, after in following.items() if node not in body}
        following[start] = exits
        if loop.turns == 0:
            closed.add(start)
    return _way(costs, following, closed, 0, [-1])


def _difference(loops, inside, table):
    """The loops of the code beside those of the table."""
    found = []
    for start in loops:
        indent = "    " * sum(start in other for other in loops.values())
        memory = Counter(op.split(".")[0] for op in inside[start] if re.match(MEMORY, op))
        held = ", ".join(f"{count} {opcode}" for opcode, count in memory.items())
        found.append(f"{indent}at {start:#x}0: {len(inside[start])} instructions, {held}")
    rows = [f"{loop.what}, holds {loop.holds}" for loop in table]
    lines = [f"  {a:50} {b}" for a, b in itertools.zip_longest(rows, found, fillvalue="-")]
    return "\n".join(["expected the loops on the left, got those on the right:", *lines])
