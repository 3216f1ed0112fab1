"""What the main kernels cost, counted in their machine code for sm_90; needs no GPU.

The problem is the benchmark's: T=10,000, B=10, C=1024, H=16, windows of 31+31, and offsets between
0 and 1, in whole tiles. An instruction counts for each thread that its warp holds, as it takes its
turn for all of them; elements are those of out or dx.
"""

import math
from typing import NamedTuple

import pytest
import torch
from machine_code import (
    KINDS,
    Kernel,
    Loop,
    blocks_a_multiprocessor,
    instructions_a_thread,
    kernels,
    kind_of,
    nvdisasm,
    nvrtc,
    nvrtc_version,
)

from talk_fairseq.ops.cuda_plan import NAMES, plan_backward, plan_forward


class Bound(NamedTuple):
    """What a kernel may cost at most."""

    instructions: float  # an element, as its warps issue them
    registers: int
    shared: int  # bytes of a block
    spills: int = 0  # bytes stored and loaded for want of registers


BOUNDS = {  # some 3% above what it costs
    "talk_forward_float32_wide": Bound(29.2, 64, 51_248),
    "talk_forward_float16_wide": Bound(25.7, 64, 108_592),
    "talk_forward_bfloat16_wide": Bound(27.2, 64, 108_592),
    "talk_backward_float32_wide": Bound(49.7, 72, 107_680),
    "talk_backward_float16_wide": Bound(53.2, 72, 83_360),
    "talk_backward_bfloat16_wide": Bound(54.8, 72, 83_360),
}
LANES = {  # threads across the channels of a row
    "talk_forward_float32_wide": 8,
    "talk_forward_float16_wide": 8,
    "talk_forward_bfloat16_wide": 8,
    "talk_backward_float32_wide": 16,
    "talk_backward_float16_wide": 8,
    "talk_backward_bfloat16_wide": 8,
}
NVRTC = (12, 9)  # another one makes other code, with other loops
T, B, C, H = SIZES = 10_000, 10, 1024, 16
SHARED_MEMORY = 227 * 1024  # bytes that a block may have on sm_90


# The loops of each kernel in the order of its code, and how often they turn; `s` are its Sizes. One
# that the code no longer has, or has more than once, shows in the error's list: edit these tables.


def forward_loops(s):
    units, spans = s.sizes["units"], s.sizes["spans"]
    return [
        Loop("units of the table", "STS", units / s.segments),
        Loop("four entries of a unit", "STS", spans / 4),
        Loop("outputs", "STG", s.tile / s.segments),
        Loop("far windows", "STG", 0),
        Loop("rows of a far window", "LDG", 0),
        Loop("units of a far window", "LDS", 0),
    ]


def backward_loops(s):
    rows = 8 if s.dtype == "float32" else 4  # of a segment
    open_windows = 31  # at the first row of a tile
    rank = (1 + s.most(2, 32)) * math.ceil(s.staged / 32) / (s.threads / 32)
    return [
        Loop("rows of dout", "LDG", s.staged / s.segments / 4),
        Loop("starts = 0", "STS", rows * s.segments / s.threads),
        *[Loop("ends at the row of an end", "LDS", rank)] * 2,
        Loop("reach of 32 time steps", "LDG", T / 32 / s.threads),
        Loop("channels", "STG", 1),
        Loop("rows of dout for more channels", "LDG", 0),
        Loop("open windows", "LDS", open_windows / s.segments),
        *[Loop("ends of a row", "LDS", s.most(2, 32 // s.lanes))] * rows,
        Loop("the scan of segments", "STS", 64 / s.threads),
        Loop("4 segments", "STS", s.segments / 4),
        Loop("far windows", "LDG", 0),
        Loop("one far window", "LDG", 0),
        *[Loop("dots of 4 time steps", "SHFL", rows / 4)] * (rows > 4),
        Loop("gradients of offsets", "STG", 2 * s.tile / s.threads),
        *[Loop("a gradient that is not finite", "LDG", 0)] * (s.dtype == "bfloat16"),
    ]


class Sizes:
    """A launch of the benchmark, by what a block works on."""

    def __init__(self, direction, dtype, one_thread):
        """`one_thread`: loops over ends turn as often as for a thread alone, without its warp."""
        plan = {"forward": plan_forward, "backward": plan_backward}[direction](
            dtype, True, SHARED_MEMORY, *SIZES, 31, 31
        )
        self.kernel, blocks, self.threads, self.shared = plan.launches[-1]
        self.dtype = NAMES[dtype]
        assert self.kernel == f"talk_{direction}_{self.dtype}_wide"
        self.sizes, self.tile = plan.sizes, plan.sizes["tile"]
        self.elements = self.tile * math.ceil(T / self.tile) * B * C / math.prod(blocks)
        self.staged = plan.sizes.get("staged")
        self.lanes = LANES[self.kernel]
        self.segments, self.one_thread = self.threads // self.lanes, one_thread

    def most(self, mean, together):
        """The ends that a loop over about a Poisson number of them turns over, with that mean: a
        warp turns as often as that of its rows, so many together, which has most of them."""
        together = 1 if self.one_thread else together
        expected, below, chance = 0, 0, math.exp(-mean)
        for number in range(8 * mean + 16):
            expected += 1 - below**together  # the chance of so many or more
            below += chance
            chance *= mean / (number + 1)
        return expected - 1


@pytest.fixture(scope="module")
def tools():
    """NVRTC and the disassembler are there."""
    library = nvrtc()
    if library is None or nvdisasm() is None:
        pytest.skip("no NVRTC or nvdisasm: pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvdisasm")
    if nvrtc_version(library) != NVRTC:  # of another torch, for CUDA
        pytest.skip(f"NVRTC: expected version {NVRTC}, got {nvrtc_version(library)}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_instructions_registers_and_memory(tools, direction, dtype, figure):
    loops = {"forward": forward_loops, "backward": backward_loops}[direction]
    counts = []
    for one_thread in (True, False):
        s = Sizes(direction, dtype, one_thread)
        kernel = kernels("talk_conv.cu", s.dtype)[s.kernel]
        a_thread = instructions_a_thread(kernel, loops(s))
        counts.append({kind: n * s.threads / s.elements for kind, n in a_thread.items()})
    alone, instructions = (sum(count.values()) for count in counts)
    kinds = ", ".join(f"{counts[1].get(kind, 0):.1f} {kind}" for kind in KINDS)
    shared = kernel.shared + s.shared
    figure(
        f"{s.kernel}, sm_90: {instructions:.1f} instructions an element ({alone:.1f} by one thread "
        f"alone): {kinds}; {kernel.registers} registers, {kernel.spills} bytes of spills, "
        f"{shared:,} bytes of shared memory, {s.threads} threads, "
        f"{blocks_a_multiprocessor(kernel, s.threads, shared)} blocks a multiprocessor"
    )
    cost = Bound(instructions, kernel.registers, shared, kernel.spills)
    over = [
        f"{name}: expected at most {bound}, got {got:.4g}"
        for name, got, bound in zip(Bound._fields, cost, BOUNDS[s.kernel])
        if got > bound
    ]
    assert not over, f"{s.kernel}: {'; '.join(over)}"


@pytest.mark.parametrize("file", ["talk_conv.cu", "short_conv.cu"])
def test_no_kernel_keeps_variables_in_memory(tools, file):
    bounds = {name: bound.spills for name, bound in BOUNDS.items()}
    spills = {
        kernel.name: kernel.spills
        for dtype in ("float64", "float32", "float16", "bfloat16")
        for kernel in kernels(file, dtype).values()
        if kernel.spills > bounds.get(kernel.name, 0)
    }
    assert not spills, f"bytes of spills: expected none, got {spills}"


# ------------------------------------------------------------------------ how it is counted


def code(text):
    """A kernel out of lines such as ``@P0 BRA 0x20``."""
    lines = []
    for line in text.strip().splitlines():
        opcode, _, operands = line.strip().removeprefix("@P0 ").partition(" ")
        lines.append(("@P0" in line, opcode, operands))
    return Kernel("example", 64, 0, 0, lines)


LOOP = """
    IADD3
    FADD
    @P0 BRA 0x60
    LDG.E
    FMUL
    @P0 BRA 0x30
    STG.E
    @P0 BRA 0x10
    EXIT
"""


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([Loop("outer", "STG", 5), Loop("inner", "LDG", 3)], 2 + 5 * (4 + 3 * 3)),
        ([Loop("outer", "STG", 5), Loop("inner", "LDG", 0)], 2 + 5 * 4),
    ],
)
def test_loops_turn(rows, expected):
    assert instructions_a_thread(code(LOOP), rows).total() == expected


@pytest.mark.parametrize(
    ("short", "long", "rare", "expected"),
    [
        ("LDS", "FADD", "", 8),  # the longer way
        ("LDG", "LDG", "", 7),  # both load: the longer is for an edge
        ("LDG", "FADD", "", 8),
        ("FADD", "LDG", "LDG", 7),
        ("FADD", "CALL", "", 7),
        ("LDS", "FADD", "STG", None),  # there is no other way
    ],
)
def test_the_main_way(short, long, rare, expected):
    kernel = code(f"""
        FADD
        @P0 BRA 0x40
        {short}
        BRA 0x70
        {long}
        FADD
        FADD
        STG
        @P0 BRA 0x0
        EXIT
    """)
    table = [Loop("all", "STG", 1, rare)]
    if expected is None:
        with pytest.raises(ValueError, match="block 0: expected a way"):
            instructions_a_thread(kernel, table)
    else:
        assert instructions_a_thread(kernel, table).total() == expected


@pytest.mark.parametrize("rows", [[], [Loop("one", "STG", 1), Loop("two", "SHFL", 1)]], ids=len)
def test_loops_that_the_table_does_not_know(rows):
    with pytest.raises(
        ValueError, match=r"(?s)example: expected the loops .* 3 instructions, 1 LDG"
    ):
        instructions_a_thread(code(LOOP), rows)


def test_kinds():
    opcodes = [
        "HADD2.F32",
        "HADD2",
        "IMAD.MOV.U32",
        "MOV",
        "LDG.E.128",
        "LD.E",
        "F2FP.BF16.F32.PACK_AB",
    ]
    kinds = [
        "conversion",
        "float32",
        "integer",
        "other",
        "global loads",
        "generic memory",
        "conversion",
    ]
    assert list(map(kind_of, opcodes)) == kinds


def test_blocks_a_multiprocessor():
    kernel = Kernel("example", 64, 0, 0, [])
    for threads, shared, blocks in (
        (320, 48 * 1024, 3),
        (320, 0, 3),
        (128, 0, 8),
        (64, 64 * 1024, 3),
    ):
        assert blocks_a_multiprocessor(kernel, threads, shared) == blocks
