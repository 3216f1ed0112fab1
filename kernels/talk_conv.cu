// The CUDA kernels of the TaLK operator, forward, backward and step by step, for every dtype.
//
// One time step, one head: a window with two ends, each of which may cut a token.
// Sizes T (time), B (batch), C (channels), H (heads), R = C / H; x is (T, B, C) and the offsets
// are (T, B, H), both contiguous, so a row of one sentence lies B * C elements after the last.
// With max_left = 4, max_right = 2 (K = 7), t = 5, offset_left = 0.6 and offset_right = 0.25:
//
//     u_l = 0.6 * 4 = 2.4 tokens: 2 whole rows and 0.4 of the next     (n_l = 2, f_l = 0.4)
//     u_r = 0.25 * 2 = 0.5 tokens: no whole row and 0.5 of the next    (n_r = 0, f_r = 0.5)
//
//     row       0     1     2     3     4     5     6     7     8
//     weight    0     0    0.4    1     1     1    0.5    0     0      / 7
//                          ^^^    ^           ^    ^^^
//                        lo - 1   lo   ...   hi   hi + 1
//
//     out[5] = (0.4 x[2] + x[3] + x[4] + x[5] + 0.5 x[6]) / 7
//     d_offset_left[5] = 4 / 7 * dout[5] . x[2]      d_offset_right[5] = 2 / 7 * dout[5] . x[6]
//
// An end that reaches past the sequence stops at its first or last row and has no fraction.
// u is formed in double from an offset of at most 53 bits, and t is only ever added to whole
// rows: an error in u - floor(u) does not grow with t. A negative or NaN offset becomes the
// window "lo = t + 1 (or hi = t - 1) with a fraction of NaN": row t is then NaN in every formula
// below, with no case of its own.
//
// A block works on one head of one sentence: on a slab of its channels in the forward pass, on all
// of them in the backward pass. `lanes` threads lie across the channels of a row, N neighbouring
// channels to a thread, and segments of ROWS rows lie along time:
//
//                  lane 0         lane 1      ...
//     segment 0    thread 0       thread 1    ...    rows 0 ... ROWS - 1 of what the block holds
//     segment 1    thread lanes   ...                rows ROWS ... 2 ROWS - 1
//     ...          channels       channels
//                  0 ... N - 1    N ... 2 N - 1

#include "types.cuh"
#include "windows.cuh"
#include "forward.cuh"
#include "backward.cuh"
#include "ring.cuh"
#include "decoding.cuh"

// For one storage type X: kernels that move N channels at a time, or FEW in talk_forward and
// talk_update (`wide`: that number divides R, and rows are aligned), kernels for any R (`narrow`),
// and kernels that do not depend on that number. A backward pass has two more: `slim`, wide with few
// lanes, for heads of at most 4 N channels, and `small`, in blocks of 128 threads, for sequences of
// a few rows.
#define TALK_WIDTH(type, X, N, FEW)                                                                \
    TALK_KERNEL(talk_forward, type, Problem, MAX_THREADS, sizeof(X) == 8 ? 1 : 2,                  \
                (forward<X, FEW>(p)))                                                              \
    TALK_KERNEL(talk_forward_sums, type, Problem, 256, 1, (forward_sums<X, N>(p)))                 \
    TALK_KERNEL(talk_forward_gather, type, Problem, 256, 1, (forward_gather<X, N>(p)))             \
    TALK_KERNEL(talk_update, type, Problem, 128, 1, (update<X, FEW>(p)))
#define TALK_BACKWARD(type, X, N, LANES, ROWS, THREADS, blocks)                                    \
    TALK_KERNEL(talk_backward, type, Problem, THREADS, blocks,                                     \
                (backward<Pass::TILE, X, N, LANES, ROWS, THREADS>(p)))                             \
    TALK_KERNEL(talk_backward_totals, type, Problem, THREADS, blocks,                              \
                (backward<Pass::TOTALS, X, N, LANES, ROWS, THREADS>(p)))                           \
    TALK_KERNEL(talk_backward_walk, type, Problem, THREADS, blocks,                                \
                (backward<Pass::WALK, X, N, LANES, ROWS, THREADS>(p)))
#define TALK_TYPE(type, X, N, FEW, LANES, ROWS)                                                    \
    TALK_WIDTH(type##_wide, X, N, FEW)                                                             \
    TALK_WIDTH(type##_narrow, X, 1, 1)                                                             \
    TALK_BACKWARD(type##_wide, X, N, LANES, ROWS, BACKWARD_THREADS, sizeof(X) == 8 ? 1 : 2)        \
    TALK_KERNEL(talk_backward_small, type##_wide, Problem, 128, sizeof(X) == 8 ? 4 : 6,            \
                (backward<Pass::TILE, X, N, LANES, ROWS, 128>(p)))                                 \
    TALK_BACKWARD(type##_slim, X, N, 4, 4, 256, 2)                                                 \
    TALK_BACKWARD(type##_narrow, X, 1, 32, 8, BACKWARD_THREADS, 2)                                 \
    TALK_KERNEL(talk_forward_bases, type, Problem, MAX_THREADS, 1, (forward_bases<X>(p)))          \
    TALK_KERNEL(talk_reach, type, Problem, SPAN, 1, (reach<X>(p)))                                 \
    TALK_KERNEL(talk_count_ends, type, Problem, 128, 1, (sort_all_ends<X, Step::COUNT>(p)))        \
    TALK_KERNEL(talk_start_ends, type, Problem, MAX_THREADS, 1, (start_ends(p)))                   \
    TALK_KERNEL(talk_place_ends, type, Problem, 128, 1, (sort_all_ends<X, Step::PLACE>(p)))        \
    TALK_KERNEL(talk_rank_ends, type, Problem, 128, 1, (sort_all_ends<X, Step::RANK>(p)))          \
    TALK_KERNEL(talk_scan_chunks, type, Problem, 128, 1, (scan_chunks(p)))

// Python compiles one type at a time (-DTALK_ONLY -DTALK_<type>); without, all of them are.
#if !defined(TALK_ONLY) || defined(TALK_float64)
TALK_TYPE(float64, double, 2, 2, 32, 8)
#endif
#if !defined(TALK_ONLY) || defined(TALK_float32)
TALK_TYPE(float32, float, 4, 4, 16, 8)
#endif
#if !defined(TALK_ONLY) || defined(TALK_float16)
TALK_TYPE(float16, float16, 8, 4, 8, 4)
#endif
#if !defined(TALK_ONLY) || defined(TALK_bfloat16)
TALK_TYPE(bfloat16, bfloat16, 8, 4, 8, 4)
#endif
