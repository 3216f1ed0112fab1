"""The CPU backend's kernels, which Numba compiles. Imported at the first call, as Numba is.

The operator's kernels walk along time with a ring of float64 rows, just long enough for the longest
window in the call. So their work does not depend on the windows, and their sums need no restarts.
"""

import contextlib
import functools
import warnings

import numpy as np
from numba import njit

# The gradient of a short convolution's weights is summed in float32 over this many rows, and these
# sums are added in float64.
_SHORT_SUM_ROWS = 64


def _jit(function):
    """Compile at the first call, and keep the result on disk where there is a place to write.

    A full disk or a damaged file costs the time to compile, and a warning.

    Sums over a head's channels may be vectorised; NaN and infinity keep their meaning.
    """
    options = dict(nogil=True, fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
    try:
        kernel = njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to write
        return njit(**options)(function)
    if cache := getattr(kernel, "_cache", None):  # without NUMBA_DISABLE_JIT
        cache.load_overload = _unless_it_fails(cache, cache.load_overload)
        cache.save_overload = _unless_it_fails(cache, cache.save_overload)
    return kernel


def _unless_it_fails(cache, method):
    """Return a method of a function's `cache`: where it fails, it warns and empties the cache."""

    @functools.wraps(method)
    def call(*args):
        try:
            return method(*args)
        except Exception as error:
            where = f"{cache.cache_path} (NUMBA_CACHE_DIR names another folder)"
            warnings.warn(f"Numba's cache is not used: {error!r} in {where}", stacklevel=2)
            with contextlib.suppress(OSError):
                cache.flush()

    return call


@_jit
def forward(
    x, u_left, u_right, reach_left, reach_right, scale, out, chunk, group, ring, first, tasks, step
):
    """out[t] = (P(t + 1 + u_r) - P(t - u_l)) * scale, with P[k] = x[begin] + ... + x[k - 1].

    P[begin] is 0, and an earlier P[k] minus the sum of what lies between: what is rounded does
    not depend on `reach_left`, which other sentences may have lengthened.

    At time t the ring holds the rows P[t - reach_left] to P[t + 1 + reach_right].
    """
    T, B, C = x.shape
    H = u_left.shape[2]
    R = C // H
    groups = -(-H // group)
    mask = ring.shape[0] - 1
    for task in range(first, tasks, step):
        begin = task // (B * groups) * chunk
        end = min(begin + chunk, T)
        b = task // groups % B
        h0 = task % groups * group
        h1 = min(h0 + group, H)
        ring[begin & mask, :] = 0.0
        for k in range(begin - 1, max(begin - reach_left, 0) - 1, -1):
            before, after, row = ring[k & mask], ring[(k + 1) & mask], x[k, b, h0 * R : h1 * R]
            for c in range(row.size):
                before[c] = after[c] - row[c]
        k = begin
        for t in range(begin, end):
            while k < min(t + 1 + reach_right, T):
                before, after, row = ring[k & mask], ring[(k + 1) & mask], x[k, b, h0 * R : h1 * R]
                for c in range(row.size):
                    after[c] = before[c] + row[c]
                k += 1
            for h in range(h0, h1):
                lo = (h - h0) * R
                n, f_left = _split(u_left[t, b, h], t)
                left = t - n
                right, f_right = t + 1, 0.0
                if u_right.size > 0:
                    n, f_right = _split(u_right[t, b, h], T - 1 - t)
                    right = t + 1 + n
                p0 = ring[left & mask, lo : lo + R]
                p1 = ring[(left - (f_left != 0.0)) & mask, lo : lo + R]
                q0 = ring[right & mask, lo : lo + R]
                q1 = ring[(right + (f_right != 0.0)) & mask, lo : lo + R]
                row = out[t, b, h * R : (h + 1) * R]
                for r in range(R):
                    whole = q0[r] - p0[r]
                    ends = f_right * (q1[r] - q0[r]) + f_left * (p0[r] - p1[r])
                    row[r] = (whole + ends) * scale


@_jit
def backward(
    x, u_left, u_right, reach_left, reach_right, scale, dout, max_left, max_right, dx, d_left,
    d_right, chunk, group, ring, first, tasks, step,
):  # fmt: skip
    """dx is the running sum of D, to which each window adds its two ends; `ring` holds rows of D.

    A window of weight 1 on rows i to k - 1, f on row i - 1 and g on row k is, as differences,
    D[i - 1] += f, D[i] += 1 - f, D[k] -= 1 - g, D[k + 1] -= g (times dout). Once time t is
    done, D is complete up to row t - reach_left.
    """
    T, B, C = x.shape
    H = u_left.shape[2]
    R = C // H
    groups = -(-H // group)
    mask = ring.shape[0] - 1
    for task in range(first, tasks, step):
        begin = task // (B * groups) * chunk
        end = min(begin + chunk, T)
        b = task // groups % B
        h0 = task % groups * group
        h1 = min(h0 + group, H)
        ring[:, :] = 0.0
        total = np.zeros((h1 - h0) * R)
        near = np.empty((mask + 1, (h1 - h0) * R), x.dtype)
        k = max(begin - reach_left - 1, 0)  # the next row of x to bring near
        j = begin  # the next row of dx to write
        for t in range(max(begin - reach_right - 1, 0), min(end + reach_left, T)):
            # Windows end at scattered rows of x: fetch rows in order, as memory likes it.
            while k < min(min(t, end - 1) + 2 + reach_right, T):
                copy, row = near[k & mask], x[k, b, h0 * R : h1 * R]
                for c in range(row.size):
                    copy[c] = row[c]
                k += 1
            for h in range(h0, h1):
                lo = (h - h0) * R
                g = dout[t, b, h * R : (h + 1) * R]

                n, f_left = _split(u_left[t, b, h], t)
                left = t - n
                if begin <= t < end:
                    d_left[t, b, h] = f_left * 0.0  # NaN where it is one
                    if f_left > 0:
                        cut = near[(left - 1) & mask, lo : lo + R]
                        d_left[t, b, h] = _dot(g, cut) * max_left * scale

                right, f_right = t + 1, 0.0
                if u_right.size > 0:
                    n, f_right = _split(u_right[t, b, h], T - 1 - t)
                    right = t + 1 + n
                    if begin <= t < end:
                        d_right[t, b, h] = f_right * 0.0
                        if f_right > 0:
                            cut = near[right & mask, lo : lo + R]
                            d_right[t, b, h] = _dot(g, cut) * max_right * scale

                if right < begin:  # it ends, with a part of row `right`, before this chunk
                    continue
                # Rows before this chunk are summed into its first row; rows after it are not ours.
                _add(ring, max(left, begin), end, lo, g, 1.0 - f_left)
                if f_left != 0.0:
                    _add(ring, max(left - 1, begin), end, lo, g, f_left)
                _add(ring, max(right, begin), end, lo, g, f_right - 1.0)
                if f_right != 0.0:
                    _add(ring, max(right + 1, begin), end, lo, g, -f_right)
            while j < end and (j <= t - reach_left or t == min(end + reach_left, T) - 1):
                done, row = ring[j & mask], dx[j, b, h0 * R : h1 * R]
                for c in range(row.size):
                    total[c] += done[c]
                    row[c] = total[c] * scale
                    done[c] = 0.0
                j += 1


@_jit
def _prefix(k, row, total):
    """Return P at slot `k`, which holds `row`: 0 for -1, and of the turn before for a lower `k`."""
    return row if k >= 0 else 0.0 if k == -1 else row - total


@_jit
def update(x, offset, sums, origin, steps, max_left, out, first, last):
    """Sequences `first` to `last` - 1: each step adds a row to the ring, and reads its window.

    The equation is that of `talk_conv_update_reference`.
    """
    S, B, H = offset.shape
    R = x.shape[2] // H
    L = sums.shape[0]
    scale = 1.0 / (max_left + 1)
    for b in range(first, last):
        for s in range(S):
            t = steps + s
            slot = t % L
            for h in range(H):
                lo, hi = h * R, (h + 1) * R
                row = x[s, b, lo:hi]
                now = sums[slot, b, lo:hi]
                if slot == 0:
                    for r in range(R):
                        now[r] = row[r]
                else:
                    last_row = sums[slot - 1, _column(origin, slot - 1, b), lo:hi]
                    for r in range(R):
                        now[r] = last_row[r] + row[r]

                u = np.float64(offset[s, b, h])
                n, f = _split(u * max_left if u >= 0.0 else np.nan, t)
                target = out[s, b, lo:hi]
                if n > L - 3:
                    target[:] = np.nan
                    continue
                # Slots from the ring's start; negative ones count from its end, in NumPy too.
                k = slot - n - 1
                k_cut = k - 1 if f != 0.0 else k
                total = sums[L - 1, _column(origin, L - 1, b), lo:hi]
                before = sums[k, _column(origin, k, b), lo:hi]
                cut = sums[k_cut, _column(origin, k_cut, b), lo:hi]
                for r in range(R):
                    prefix = _prefix(k, before[r], total[r])
                    end = prefix - _prefix(k_cut, cut[r], total[r])
                    target[r] = (now[r] - prefix + f * end) * scale
            if origin.size:
                origin[slot, b] = b


@_jit
def short_forward(x, weight, out, left, lo, hi):
    T, B, _ = x.shape
    K = weight.shape[0]
    for b in range(B):
        for t in range(T):
            target = out[t, b, lo:hi]
            first = max(left - t, 0)
            for k in range(first, min(K, T - t + left)):
                row, taps = x[t - left + k, b, lo:hi], weight[k, lo:hi]
                if k == first:
                    for c in range(hi - lo):
                        target[c] = taps[c] * row[c]
                else:
                    for c in range(hi - lo):
                        target[c] += taps[c] * row[c]


@_jit
def short_backward(x, weight, dout, dx, d_weight, left, lo, hi):
    T, B, _ = x.shape
    K = weight.shape[0]
    total = np.zeros((K, hi - lo))
    sums = np.zeros((K, hi - lo), x.dtype)
    for b in range(B):
        for t in range(T):
            row, target = x[t, b, lo:hi], dx[t, b, lo:hi]
            target[:] = 0.0
            # Tap k reads row t for out[t + left - k].
            for k in range(max(t + left - T + 1, 0), min(K, t + left + 1)):
                g, taps, sum_k = dout[t + left - k, b, lo:hi], weight[k, lo:hi], sums[k]
                for c in range(hi - lo):
                    target[c] += taps[c] * g[c]
                    sum_k[c] += row[c] * g[c]
            if t % _SHORT_SUM_ROWS == _SHORT_SUM_ROWS - 1 or t == T - 1:
                for k in range(K):
                    for c in range(hi - lo):
                        total[k, c] += sums[k, c]
                        sums[k, c] = 0.0
    d_weight[:, lo:hi] = total


@_jit
def short_update(x, weight, rows, origin, steps, out, first, last):
    """Sequences `first` to `last` - 1: each step adds a row to the ring, and sums over its taps."""
    S, _, C = x.shape
    K = weight.shape[0]
    for b in range(first, last):
        for s in range(S):
            t = steps + s
            rows[t % K, b] = x[s, b]
            target = out[s, b]
            begin = max(K - 1 - t, 0)
            for k in range(begin, K):
                slot = (t + 1 + k) % K  # of step t - (K - 1) + k
                row, taps = rows[slot, _column(origin, slot, b) if k < K - 1 else b], weight[k]
                if k == begin:
                    for c in range(C):
                        target[c] = taps[c] * row[c]
                else:
                    for c in range(C):
                        target[c] += taps[c] * row[c]
            if origin.size:
                origin[t % K, b] = b


@_jit
def _split(u, rows):
    """Split a reach of `u` tokens into whole rows, at most `rows`, and a fraction of the next row.

    A negative or NaN reach gives no whole row and a fraction of NaN.
    """
    if u >= rows:
        return rows, 0.0
    if u >= 0:
        n = int(u)
        return n, u - n
    return 0, np.nan


@_jit
def _column(origin, slot, b):
    return origin[slot, b] if origin.size else b


@_jit
def _dot(a, b):
    total = 0.0
    for r in range(a.shape[0]):
        total += np.float64(a[r]) * b[r]
    return total


@_jit
def _add(ring, row, end, lo, values, weight):
    """Add weight * values to ring[row], where the row lies before `end`."""
    if row < end:
        target = ring[row & (ring.shape[0] - 1), lo : lo + values.shape[0]]
        for r in range(values.shape[0]):
            target[r] += weight * values[r]
