"""What the causal operator and the short convolution remember between the steps of a decoder."""

import numbers

import torch
from torch.compiler import is_compiling

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of the operators


def compute_dtype(dtype):
    """Return the dtype that an `x` of `dtype` is computed in: float32 for 16 bits, else its own."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def sums_dtype(dtype, device):
    """Return the dtype of sums: float32 for 16 bits and devices without float64, else float64."""
    return torch.float32 if dtype.itemsize == 2 or device.type == "mps" else torch.float64


def whole_number(name, number, least=0):
    """Return `number` as an int. Raises ValueError unless it is whole, and `least` to 2^31 - 1."""
    if not isinstance(number, numbers.Real) or not least <= number < 2**31 or int(number) != number:
        raise ValueError(
            f"{name}: expected a whole number from {least} to 2^31 - 1, got {number!r}"
        )
    return int(number)


class _Ring:
    """A row of each sequence for each of the last L steps, overwritten in place.

    Rows are copied by `settle` alone: when several steps come at once after a beam search, before
    a step in plain PyTorch, or when there are more sequences than columns.

    Attributes:
        rows: (L, columns, C); at least as many columns as there are sequences, B.
        origin: (L, B) int32, the column of `rows` that holds a slot of each sequence, or None for
            its own. A beam search moves these numbers instead of rows.
        steps: the number of steps so far; from 2 L on, a smaller number with the same slot.
    """

    __slots__ = ("rows", "origin", "steps", "B")

    def __init__(self, rows):
        self.rows, self.origin, self.steps, self.B = rows, None, 0, rows.shape[1]

    def check(self, x, dtype):
        """Raise ValueError unless `x` (S, B, C) continues these sequences, with rows of `dtype`.

        RuntimeError in the capture of a CUDA graph: each replay would repeat the captured step.
        """
        _, B, C = x.shape
        rows, width = self.rows, self.rows.shape[2]
        if (self.B, width) != (B, C):
            raise ValueError(f"state: expected B, C = {B}, {C} to match x, got {self.B}, {width}")
        if rows.device != x.device:
            raise ValueError(f"state: expected device {x.device} to match x, got {rows.device}")
        if rows.dtype is not dtype:
            raise ValueError(f"state: expected rows in {dtype} for {x.dtype}, got {rows.dtype}")
        # torch.compile cannot trace the last question.
        if rows.is_cuda and not is_compiling() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("state: expected no capture of a CUDA graph, which has fixed steps")

    def reorder(self, new_order):
        """Make sequence i what sequence ``new_order[i]`` was.

        `new_order` is a tensor of integers, of any length: sequences may be dropped or repeated. A
        number that names no sequence fails as in `torch.index_select`.
        """
        reorder_rings([self], new_order)

    def settle(self):
        """Copy every row to its own column, where `reorder` has left it in another."""
        if self.origin is not None:
            columns = self.origin.long().unsqueeze(-1).expand(-1, -1, self.rows.shape[2])
            self.rows = self.rows.gather(1, columns)
            self.origin = None

    def advance(self, S):
        """Count S more steps."""
        L = self.rows.shape[0]
        self.steps += S
        if self.steps >= 2 * L:
            self.steps = L + self.steps % L


class TaLKConvState(_Ring):
    """Hold what a causal TaLK convolution remembers of a batch of sequences while it decodes.

    A ring of L = `reach` + 3 rows of running sums, which start anew whenever the ring does: no sum
    grows with the sequence, and a window is the difference of two or three of them. It is
    overwritten in place, step by step::

        step      8   9  10  11  12  13        L = 6, at step 13: the ring holds steps 8 to 13
        slot      2   3   4   5 | 0   1        (slot = step % L)
        sum of  6-8 6-9 6-10 6-11 12 12-13
        window over steps 10 to 13 = (12-13) + (6-11) - (6-9)

    Args:
        B, C: the numbers of sequences and of channels.
        reach: the longest window to come, ``ceil(max_left * largest offset)`` tokens; ValueError
            unless it is a whole number >= 0.
        dtype, device: those of x (default: float32 on the CPU); see `sums_dtype`.
    """

    __slots__ = ()

    def __init__(self, B, C, reach, dtype=torch.float32, device="cpu"):
        rows = whole_number("reach", reach) + 3
        wide = sums_dtype(dtype, torch.device(device))
        super().__init__(torch.empty(rows, B, C, dtype=wide, device=device))


class ShortConvState(_Ring):
    """Hold the last K inputs of a causal short convolution of K taps.

    Rows are 0 until their steps are taken. The other arguments are those of TaLKConvState.
    """

    __slots__ = ()

    def __init__(self, B, C, K, dtype=torch.float32, device="cpu"):
        K = whole_number("K", K, least=1)
        super().__init__(torch.zeros(K, B, C, dtype=compute_dtype(dtype), device=device))


def reorder_rings(states, new_order):
    """Reorder all these states of the same sequences, each as ``state.reorder(new_order)`` does.

    On a GPU a launch takes longer than this work, so the states on a device share two launches.
    """
    for device in dict.fromkeys(state.rows.device for state in states):
        here = [state for state in states if state.rows.device == device]
        order = torch.as_tensor(new_order, device=device)
        steps = [len(state.rows) for state in here]
        origins = [state.origin for state in here]
        if any(origin is None for origin in origins):
            own = torch.arange(here[0].B, dtype=torch.int32, device=device)
            origins = [own.expand(L, -1) if o is None else o for o, L in zip(origins, steps)]
        origins = origins[0] if len(origins) == 1 else torch.cat(origins)
        for state, origin in zip(here, origins.index_select(1, order).split(steps)):
            state.origin, state.B = origin, len(order)
            if state.B > state.rows.shape[1]:
                state.settle()
