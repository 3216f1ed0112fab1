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
// rows: an error in u - floor(u) would not depend on t. A negative or NaN offset becomes the
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
//
// Forward, moderate windows (talk_forward): a block stages its tile of rows and the halo the
// windows reach, scans it along time, and takes differences at the ends. The scan starts anew in
// every tile, so its error does not grow with T. Differences of prefix sums lose digits where a
// window is short and its rows are small; so float32 is scanned in double, and in the dtypes that
// are scanned in their own precision windows of up to SHORT rows are added up directly. (A value
// of x that is not finite can spread over its tile, as over any prefix sum.)
// Forward, large windows: the same with prefix sums in global memory, restarted in every chunk
// (talk_forward_sums, talk_scan_chunks, talk_forward_gather); its time is free of the windows.
//
// Backward: dx is the transpose. Reading rows upwards, dout[t] enters a running sum at row lo and
// leaves it after row hi, and counts by its fractions at lo - 1 and hi + 1. So the ends are sorted
// by row (a counting sort on integers, ordered by t within a row: the same bits at every run and
// no floating-point atomics), once for a head and not for a channel, and each thread walks rows:
//
//     row              2           3           4           5           6           7
//     left ends     0.4 of 5    5 enters
//     right ends                                                    5 leaves,
//                                                                   0.5 of 5
//     running sum      0        dout[5]     dout[5]     dout[5]        0           0
//     dx * K      0.4 dout[5]   dout[5]     dout[5]     dout[5]   0.5 dout[5]      0
//
// Moderate windows: one kernel sorts the ends of its tile and halo in shared memory
// (talk_backward); ends further away than the halo (offsets above 1.25) are found through
// talk_reach and added row by row. Large windows: the ends of the whole sequence are sorted, a
// thread to an end (talk_count_ends, talk_start_ends, talk_place_ends, talk_rank_ends),
// talk_changes and talk_scan_chunks give the running sum at each chunk, talk_backward_walk walks.
//
// The file includes nothing: NVRTC compiles it without the toolkit's headers.
#include "types.cuh"

constexpr int LANES = 8;          // threads across the channels of a row, in the forward pass
constexpr int LONG_LANES = 2;     // likewise where windows are large
constexpr int ROWS = 8;           // rows of a segment
constexpr int UNIT = 32;          // rows over which a prefix sum runs before it starts anew
constexpr int MAX_THREADS = 512;
constexpr int BACKWARD_THREADS = 448;

// Everything a launch needs, passed by value; cuda_backend.py holds the same list.
struct Problem {
    const void* x;             // (T, B, C)
    const void* dout;          // (T, B, C)
    const void* offset_left;   // (T, B, H), in x's type or float32
    const void* offset_right;  // (T, B, H), or null in the causal form
    void* out;                 // (T, B, C): out, or dx in the backward pass
    void* d_offset_left;       // (T, B, H)
    void* d_offset_right;      // (T, B, H), or null
    void* sums;                // (units, UNIT + 1, B, C): prefix sums within units; forward
    double* bases;             // (units, B, C): what the units before a unit add up to; forward
    double* totals;            // (chunks, B, C): sums of chunks, then of all the chunks before;
    double* clipped;           // (chunks, B, C): windows that start at row 0; backward
    int* reach;                // (tiles, B, H, 2): how far before and after what a tile stages
                               // there are time steps that touch it; 0 at first; backward
    int* starts;               // (B, H, 2 T + 2): where each bucket of ends starts; 0 at first
    int* slots;                // (B, H, 2, 2 T): scratch of the sort
    void* entries;             // (B, H, 2 T): ends ordered by row
    int* origin;               // (ring, B): where a slot of a sequence is, or null; decoding
    double scale;              // 1 / (max_left + max_right + 1)
    int T, B, C, H, R;
    int max_left, max_right;
    int before, after;         // rows of halo on either side of a tile
    int tile;                  // rows of a tile or chunk
    int units, spans;          // units of a tile, or of all; entries of the table for each
    int lanes;                 // threads across the channels of a row, a power of two; backward
    int float32_offsets;       // beside a half x
    int ring, columns, steps;  // decoding: `sums` is (ring, columns, C), after so many time steps
};

// -------------------------------------------------------------------------------------- windows

// What one of a sum of rows is worth in out or dx.
template <typename X>
__device__ inline typename Types<X>::Compute scale_of_sums(const Problem& p) {
    return static_cast<typename Types<X>::Compute>(p.scale) / Types<X>::unit;
}

// Rows times this are summed in the forward pass, and sums times scale_of_weighted are the output:
// the scale at once, but for bfloat16, whose sums might overflow.
template <typename X>
__device__ inline typename Types<X>::Compute weight_of_rows(const Problem& p) {
    return Types<X>::unit == 1 ? static_cast<typename Types<X>::Compute>(p.scale) : Types<X>::unit;
}
template <typename X>
__device__ inline typename Types<X>::Compute scale_of_weighted(const Problem& p) {
    return Types<X>::unit == 1 ? 1 : scale_of_sums<X>(p);
}

template <typename F> struct Window {
    int lo, hi;     // whole rows lo ... hi
    F left, right;  // the fractions of rows lo - 1 and hi + 1; not 0 only where the row exists
};

// Offsets are in x's type or, beside halves, in float32: once per time step and head, so a branch.
template <typename X>
__device__ inline typename Types<X>::Compute load_offset(const Problem& p, const void* offsets,
                                                         long long at) {
    if (sizeof(X) == 2 && p.float32_offsets) return static_cast<const float*>(offsets)[at];
    return widen(static_cast<const X*>(offsets)[at]);
}

template <typename X, typename F>
__device__ inline void store_offset(const Problem& p, void* offsets, long long at, F value) {
    if (sizeof(X) == 2 && p.float32_offsets)
        static_cast<float*>(offsets)[at] = static_cast<float>(value);
    else
        narrow(value, static_cast<X*>(offsets)[at]);
}

// An offset as whole rows and the fraction of the next, of the `rows` there are on its side.
template <typename F>
__device__ inline void split(double offset, int max_rows, int rows, int& whole, F& fraction) {
    const double u = max_rows == 0 ? 0.0 : offset * max_rows;
    whole = rows;
    fraction = 0;
    if (!(offset >= 0)) {
        whole = -1;
        fraction = static_cast<F>(nan(""));
    } else if (u < rows) {
        whole = static_cast<int>(u);
        fraction = static_cast<F>(u - whole);
    }
}

template <typename X> struct Offsets { typename Types<X>::Compute left, right; };

template <typename X>
__device__ inline Offsets<X> offsets_of(const Problem& p, int t, int head) {
    const long long at = static_cast<long long>(t) * (p.B * p.H) + head;
    Offsets<X> offsets = {};
    offsets.left = load_offset<X>(p, p.offset_left, at);
    if (p.offset_right) offsets.right = load_offset<X>(p, p.offset_right, at);
    return offsets;
}

template <typename X, typename F>
__device__ inline Window<F> window_of(const Problem& p, int t, const Offsets<X>& offsets) {
    int left, right = 0;
    Window<F> window;
    window.right = 0;
    split(offsets.left, p.max_left, t, left, window.left);
    if (p.offset_right) split(offsets.right, p.max_right, p.T - 1 - t, right, window.right);
    window.lo = t - left;
    window.hi = t + right;
    return window;
}

template <typename X, typename F>
__device__ inline Window<F> window_of(const Problem& p, int t, int head) {
    return window_of<X, F>(p, t, offsets_of<X>(p, t, head));
}

// ------------------------------------------------------------------------------- blocks, memory

// A block works on head blockIdx.x of the B * H heads of all sentences, on slab blockIdx.y of its
// channels, and on tile blockIdx.z of time. Heads run fastest and time slowest, so that the blocks
// that run together are neighbours in memory and find each other's halo in the cache.

__device__ inline int tile_start(const Problem& p) { return static_cast<int>(blockIdx.z) * p.tile; }

// Hands out the block's shared memory piece by piece.
struct Shared {
    unsigned char* next;
    template <typename V> __device__ V* take(int count) {
        V* piece = reinterpret_cast<V*>(next);
        next += (sizeof(V) * count + 15) / 16 * 16;
        return piece;
    }
};

__device__ inline Shared shared_memory() {
    extern __shared__ __align__(16) unsigned char talk_shared[];
    return Shared{talk_shared};
}

// What the earlier segments of these channels add up to. Every thread of the block calls it.
// The order of the additions depends on the position alone, not on how many segments there are.
template <typename S, int N>
__device__ Pack<S, N> sum_of_earlier_segments(Pack<S, N> total, int lanes, Pack<S, N>* warps) {
    const int lane = threadIdx.x % lanes, thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    Pack<S, N> earlier = {};
#pragma unroll 1
    for (int step = lanes; step < 32; step *= 2) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const S other = __shfl_up_sync(0xffffffffu, total.v[n], step);
            if (thread >= step) total.v[n] += other;
        }
    }
    if (lanes < 32) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const S other = __shfl_up_sync(0xffffffffu, total.v[n], lanes);
            if (thread >= lanes) earlier.v[n] = other;
        }
    }
    if (thread >= 32 - lanes) warps[warp * lanes + lane] = total;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < warp; ++w) add(earlier, warps[w * lanes + lane]);
    return earlier;
}

// -------------------------------------------------------------------------------------- forward

// Prefix sums within units of UNIT rows: row r of what is staged lies in unit r / UNIT, and
// local[r + r / UNIT] is the sum of the rows of its unit before it. So a unit takes UNIT + 1 rows,
// the last of which is its total. Staged row r is time step origin + r; at the start of a sequence
// row 0 stands for time step -1, which is 0.
constexpr int SEGMENTS = UNIT / ROWS;

// Rows of packs in shared memory: those of the lanes stand side by side, in parts of 16 bytes.
template <typename V, int N, int lanes> struct SharedPrefix {
    static constexpr int PARTS = sizeof(V) * N <= 16 ? 1 : sizeof(V) * N / 16, PART = N / PARTS;
    Pack<V, PART>* first;

    static __device__ SharedPrefix take(Shared& shared, int rows) {
        int lane = threadIdx.x % lanes * static_cast<int>(sizeof(Pack<V, PART>));
        TALK_OPAQUE(lane);
        unsigned char* start = shared.take<unsigned char>(rows * lanes * PARTS * sizeof(Pack<V, PART>));
        return {reinterpret_cast<Pack<V, PART>*>(start + lane)};
    }
    static __device__ int place(int row) { return row * PARTS * lanes; }
    __device__ Pack<V, N> at(int place) const {
        Pack<V, N> whole;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const Pack<V, PART> piece = first[place + part * lanes];
#pragma unroll
            for (int n = 0; n < PART; ++n) whole.v[part * PART + n] = piece.v[n];
        }
        return whole;
    }
    __device__ Pack<V, N> operator[](int row) const { return at(place(row)); }
    __device__ void put(int row, const Pack<V, N>& whole) const {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            Pack<V, PART> piece;
#pragma unroll
            for (int n = 0; n < PART; ++n) piece.v[n] = whole.v[part * PART + n];
            first[place(row) + part * lanes] = piece;
        }
    }
};

// The same in global memory.
template <typename V, int N> struct GlobalPrefix {
    V* column;
    long long stride;

    __device__ Pack<V, N> operator[](int row) const { return load<V, N>(column + row * stride); }
    __device__ void put(int row, const Pack<V, N>& whole) const {
        *reinterpret_cast<Pack<V, N>*>(column + row * stride) = whole;
    }
};

// A segment of rows from time step t on. No branch stands between its loads, so that all of them
// are under way together, and with what is loaded next. In place of a row that does not exist a
// neighbour is loaded; row -1 is 0.
template <typename X, int N>
__device__ inline void load_segment(Pack<X, N> (&rows)[ROWS], const X* column, long long stride,
                                    int t, int T) {
    const X* row = column + max(min(t, T - 1), 0) * stride;
    if (t >= 0 && t + ROWS <= T) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i, row += stride) rows[i] = load<X, N>(row);
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            rows[i] = load<X, N>(row);
            if (t + i >= 0 && t + i + 1 < T) row += stride;
        }
        if (t < 0) rows[0] = {};
    }
}

// Writes the prefix sums of a segment, times `weight`. The threads of a warp hold whole units and
// call it together. Additions within a segment, and of whole segments, come in their order: so rows
// of zeros, which may be padding, change no bit. `zero` is 0, which the compiler does not know.
template <typename F, int lanes, typename X, int N, typename Prefix>
__device__ inline void scan_segment(Pack<X, N> (&rows)[ROWS], const Prefix& local, int segment,
                                    F weight, unsigned int zero) {
    const int place = threadIdx.x / lanes % SEGMENTS, row = segment * ROWS + segment / SEGMENTS;
    Pack<F, N> total = {}, earlier = {}, sum = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) add(total, rows[i], weight);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int before = SEGMENTS - 1; before > 0; --before) {
            const F other = __shfl_up_sync(0xffffffffu, total.v[n], before * lanes);
            if (place >= before) earlier.v[n] += other;
        }
#pragma unroll
    for (int i = 0; i <= ROWS; ++i) {
        if (i < ROWS || place == SEGMENTS - 1) {
            Pack<F, N> both;
#pragma unroll
            for (int n = 0; n < N; ++n) both.v[n] = earlier.v[n] + sum.v[n];
            local.put(row + i, both);
        }
        if (i < ROWS) {
            forget(rows[i], zero);
            add(sum, rows[i], weight);
        }
    }
}

// The window of a time step in rows of prefix sums, of which it takes four, and the units between
// its ends, from that of row lo - 1 to that before row hi + 1's. There are two ways to those units.
//
// A table of the sums of up to spans - 1 units from each unit on, for windows of a few units. A
// window is kept as the places in shared memory of all that it takes.
template <typename F, int N, int lanes> struct Table {
    using Prefix = SharedPrefix<F, N, lanes>;
    struct Window {
        unsigned short lo, hi, next, units;
        F left, right;
        __device__ bool far() const { return left < 0; }
    };
    Prefix sums;
    int spans;

    static __device__ Table take(Shared& shared, int units, int spans) {
        return {Prefix::take(shared, units * spans), spans};
    }
    __device__ void fill(const Prefix& local, int units, int segment, int segments) const {
#pragma unroll 1
        for (int unit = segment; unit < units; unit += segments) {
            Pack<F, N> sum = {};
#pragma unroll 4
            for (int span = 0; span < spans; ++span) {
                sums.put(unit * spans + span, sum);
                if (unit + span < units) add(sum, local[(unit + span) * (UNIT + 1) + UNIT]);
            }
        }
    }
    __device__ Window window(int lo, int hi, F left, F right, bool staged) const {
        const int unit = lo / UNIT, span = hi / UNIT - unit;
        if (!staged || span >= spans) return {0, 0, 0, 0, -1, 0};
        const int q0 = Prefix::place(hi + unit + span);
        // 0 times a row after the window would be NaN if that is not finite.
        const int q1 = q0 + (right != 0 ? Prefix::place(1) : 0);
        return {static_cast<unsigned short>(Prefix::place(lo + unit)),
                static_cast<unsigned short>(q0), static_cast<unsigned short>(q1),
                static_cast<unsigned short>(Prefix::place(unit * spans + span)), left, right};
    }
    __device__ Pack<F, N> sum(const Prefix& local, const Window& w) const {
        const Pack<F, N> p0 = local.at(w.lo), p1 = local.at(w.lo + Prefix::place(1));
        const Pack<F, N> q0 = local.at(w.hi), q1 = local.at(w.next);
        Pack<F, N> sum = sums.at(w.units);
        const F minus_left = -w.left, left_minus_1 = w.left - 1;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            // In this order rows of zeros, which may be padding, change no bit.
            sum.v[n] += q0.v[n];
            sum.v[n] += w.right * (q1.v[n] - q0.v[n]);
            sum.v[n] += left_minus_1 * p1.v[n];
            sum.v[n] += minus_left * p0.v[n];
        }
        return sum;
    }
};

// What all the units before each unit add up to, in double, for windows of any length.
template <typename F, int N, typename Sums> struct Bases {
    struct Window {
        int lo, hi;
        F left, right;
        __device__ bool far() const { return left < 0; }
    };
    Sums sums;

    static __device__ Bases take(Shared& shared, int units, int) {
        return {Sums::take(shared, units)};
    }
    template <typename Prefix>
    __device__ void fill(const Prefix& local, int units, int segment, int segments) const {
        for (int unit = segment; unit < units; unit += segments) {
            Pack<double, N> sum = {};
#pragma unroll 4
            for (int k = 0; k < unit; ++k) add(sum, local[k * (UNIT + 1) + UNIT]);
            sums.put(unit, sum);
        }
    }
    __device__ Window window(int lo, int hi, F left, F right, bool staged) const {
        if (!staged) return {0, 0, -1, 0};
        return {lo + lo / UNIT, hi + hi / UNIT, left, right};
    }
    template <typename Prefix>
    __device__ Pack<F, N> sum(const Prefix& local, const Window& w) const {
        const Pack<double, N> from = sums[w.lo / (UNIT + 1)], to = sums[w.hi / (UNIT + 1)];
        const Pack<F, N> p0 = local[w.lo], p1 = local[w.lo + 1];
        const Pack<F, N> q0 = local[w.hi], q1 = local[w.right != 0 ? w.hi + 1 : w.hi];
        Pack<F, N> sum;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            sum.v[n] = static_cast<F>(to.v[n] - from.v[n] + q0.v[n] - p1.v[n]);
            sum.v[n] += w.right * (q1.v[n] - q0.v[n]);
            sum.v[n] += w.left * (p1.v[n] - p0.v[n]);
        }
        return sum;
    }
};

// A window that reaches beyond what is staged: those rows one by one. Slow and rare.
template <typename X, typename F, int N, typename Prefix>
__device__ Pack<F, N> far_window(const Problem& p, int t, int head, const X* column,
                                 long long stride, const Prefix& local, int origin, int staged) {
    const Window<F> w = window_of<X, F>(p, t, head);
    const int lo = max(w.lo - origin, 0), hi = min(w.hi + 1 - origin, staged - 1);
    const F weight = weight_of_rows<X>(p), left = w.left * weight, right = w.right * weight;
    using Sum = typename Types<X>::Sum;
    Pack<Sum, N> sum = {};
#pragma unroll 1
    for (int row = w.lo; row <= w.hi; ++row) {
        if (row == origin + lo) row = origin + hi;
        if (row <= w.hi) add(sum, load<X, N>(column + row * stride), static_cast<Sum>(weight));
    }
#pragma unroll 1
    for (int unit = lo / UNIT; unit < hi / UNIT; ++unit)
        add(sum, local[unit * (UNIT + 1) + UNIT]);
    const Pack<F, N> before = local[lo + lo / UNIT], until = local[hi + hi / UNIT];
    Pack<F, N> result;
    for (int n = 0; n < N; ++n) result.v[n] = static_cast<F>(sum.v[n] + until.v[n] - before.v[n]);
    if (left != 0) add(result, load<X, N>(column + (w.lo - 1) * stride), left);
    if (right != 0) add(result, load<X, N>(column + (w.hi + 1) * stride), right);
    return result;
}

// Windows that shared memory holds.
template <typename X, int N, int lanes, typename Units> __device__ void forward(const Problem& p) {
    using F = typename Types<X>::Compute;
    const int segment = threadIdx.x / lanes, segments = blockDim.x / lanes, head = blockIdx.x;
    const int c = (blockIdx.y * lanes + threadIdx.x % lanes) * N;
    const int t0 = tile_start(p), tile = min(p.tile, p.T - t0);
    const int origin = max(t0 - p.before, -1), staged = p.units * UNIT;
    const long long stride = static_cast<long long>(p.B) * p.C;
    const long long at = static_cast<long long>(head) * p.R + (c < p.R ? c : 0);
    const X* column = static_cast<const X*>(p.x) + at;

    Shared shared = shared_memory();
    using Prefix = SharedPrefix<F, N, lanes>;
    const Prefix local = Prefix::take(shared, p.units * (UNIT + 1));
    const Units units = Units::take(shared, p.units, p.spans);
    auto* windows = shared.take<typename Units::Window>(p.tile);
    int* any_far = shared.take<int>(1);
    if (threadIdx.x == 0) *any_far = 0;

    const F weight = weight_of_rows<X>(p);
    bool far = false;
    // A segment and a window for each thread; large windows take several turns.
    for (int turn = 0; turn == 0 || turn < max(tile, staged / ROWS * lanes); turn += blockDim.x) {
        // The last tile leaves out what lies beyond the sequence, a warp at a time.
        const int own = turn + threadIdx.x, row = own / lanes * ROWS;
        const int warp_row = row - threadIdx.x % 32 / lanes * ROWS;
        const bool loads = warp_row < staged && origin + warp_row <= p.T;
        Pack<X, N> rows[ROWS];
        if (loads) load_segment(rows, column, stride, origin + row, p.T);
        const Offsets<X> offsets = offsets_of<X>(p, t0 + min(own, tile - 1), head);
        if (loads) scan_segment<F, lanes>(rows, local, row / ROWS, weight, p.T >> 31);
        if (own < tile) {
            const Window<F> w = window_of<X, F>(p, t0 + own, offsets);
            const int lo = w.lo - 1 - origin, hi = w.hi + 1 - origin;
            windows[own] = units.window(lo, hi, w.left, w.right, lo >= 0 && hi < staged);
            far |= windows[own].far();
        }
        if (lanes == LANES) break;
    }
    __syncthreads();
    units.fill(local, p.units, segment, segments);
    if (far) *any_far = 1;
    __syncthreads();

    if (c >= p.R) return;
    const F scale = scale_of_weighted<X>(p);
    X* out = static_cast<X*>(p.out) + at + (t0 + segment) * stride;
#pragma unroll 1
    for (int i = segment; i < tile; i += segments, out += segments * stride)
        store(out, units.sum(local, windows[i]), scale);
    if (*any_far == 0) return;
    out = static_cast<X*>(p.out) + at + t0 * stride;
#pragma unroll 1
    for (int i = segment; i < tile; i += segments)
        if (windows[i].far())
            store(out + i * stride, far_window<X, F, N>(p, t0 + i, head, column, stride, local,
                                                        origin, staged), scale);
}

// Windows beyond shared memory, step 1: the prefix sums of each unit.
template <typename X, int N> __device__ void forward_sums(const Problem& p) {
    using F = typename Types<X>::Compute;
    const int segment = blockIdx.z * (blockDim.x / LANES) + threadIdx.x / LANES;
    const int c = (blockIdx.y * LANES + threadIdx.x % LANES) * N;
    const long long stride = static_cast<long long>(p.B) * p.C;
    const long long at = static_cast<long long>(blockIdx.x) * p.R + (c < p.R ? c : 0);
    if (segment / SEGMENTS >= p.units) return;
    Pack<X, N> rows[ROWS];
    load_segment(rows, static_cast<const X*>(p.x) + at, stride, segment * ROWS - 1, p.T);
    // Lanes beyond the channels of the head write what the first of them writes too.
    const GlobalPrefix<F, N> local{static_cast<F*>(p.sums) + at, stride};
    scan_segment<F, LANES>(rows, local, segment, weight_of_rows<X>(p), p.T >> 31);
}

// Step 2: what the units before each unit add up to. A block takes 32 channels of B * C, and each
// of its warps GROUP units at a turn; the order of additions does not depend on T.
template <typename F> __device__ void forward_bases(const Problem& p) {
    constexpr int GROUP = 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const long long stride = static_cast<long long>(p.B) * p.C, at = blockIdx.x * 32LL + lane;
    const F* totals = static_cast<const F*>(p.sums) + UNIT * stride + at;
    double* sums = shared_memory().take<double>(blockDim.x);
    double all = 0;
    for (int turn = 0; turn < p.units; turn += warps * GROUP) {
        const int from = turn + warp * GROUP;
        F units[GROUP];
        double sum = 0;
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const bool exists = from + i < p.units && at < stride;
            units[i] = exists ? totals[(from + i) * (UNIT + 1) * stride] : 0;
        }
#pragma unroll
        for (int i = 0; i < GROUP; ++i) sum += units[i];
        sums[threadIdx.x] = sum;
        __syncthreads();
        for (int w = 0; w < warps; ++w) {
            if (w == warp) sum = all;
            all += sums[w * 32 + lane];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            if (from + i < p.units && at < stride) p.bases[(from + i) * stride + at] = sum;
            sum += units[i];
        }
    }
}

// Step 3: the windows.
template <typename X, int N> __device__ void forward_gather(const Problem& p) {
    using F = typename Types<X>::Compute;
    const int segment = threadIdx.x / LANES, segments = blockDim.x / LANES, head = blockIdx.x;
    const int c = (blockIdx.y * LANES + threadIdx.x % LANES) * N;
    const int t0 = tile_start(p), tile = min(p.tile, p.T - t0);
    const long long stride = static_cast<long long>(p.B) * p.C;
    const long long at = static_cast<long long>(head) * p.R + c;
    const GlobalPrefix<F, N> local{static_cast<F*>(p.sums) + at, stride};
    const Bases<F, N, GlobalPrefix<double, N>> units{{p.bases + at, stride}};
    auto* windows = shared_memory().take<typename decltype(units)::Window>(p.tile);
    for (int i = threadIdx.x; i < tile; i += blockDim.x) {
        const Window<F> w = window_of<X, F>(p, t0 + i, head);
        windows[i] = units.window(w.lo, w.hi + 2, w.left, w.right, true);
    }
    __syncthreads();
    if (c >= p.R) return;
    for (int i = segment; i < tile; i += segments)
        store(static_cast<X*>(p.out) + at + (t0 + i) * stride, units.sum(local, windows[i]),
              scale_of_weighted<X>(p));
}

// ------------------------------------------------------------------------------------- backward

// Large windows, step 2: from the total of each chunk to the total of all the chunks before it.
// In the backward pass the running sum starts with the windows that start at row 0.
__device__ inline void scan_chunks(const Problem& p) {
    const long long stride = static_cast<long long>(p.B) * p.C;
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int chunks = (p.T + p.tile - 1) / p.tile;
    if (at >= stride) return;
    double sum = 0;
    if (p.clipped) {
#pragma unroll 16
        for (int chunk = 0; chunk < chunks; ++chunk) sum += p.clipped[chunk * stride + at];
    }
    constexpr int BATCH = 16;  // loads that are under way together: there are few threads
    for (int first = 0; first < chunks; first += BATCH) {
        double totals[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i < chunks) totals[i] = p.totals[(first + i) * stride + at];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i < chunks) {
                p.totals[(first + i) * stride + at] = sum;
                sum += totals[i];
            }
    }
}

template <typename F> struct Entry {
    int t;
    F fraction;
};

// The ends of windows, sorted by the row where they act, for `rows` rows from `row0`:
//
//     buckets 0 ... rows              left ends: dout[t] enters the running sum at row lo
//     buckets rows + 1 ... 2 * rows   right ends: it leaves the sum at row hi + 1
//
// Within a bucket they are ordered by t. `starts` has 2 * rows + 2 numbers.
template <typename F> struct Ends {
    int row0, rows;
    bool drop_first_row;  // leave out windows that start at row0 or before it
    int* starts;
    Entry<F>* entries;

    // The bucket of one side of a window, or -1 if that end does not matter here. A window that
    // starts before the rows enters at the first of them, and one that ends after never leaves.
    __device__ int bucket(const Window<F>& w, bool right) const {
        if (w.hi + 1 < row0 || w.lo > row0 + rows) return -1;
        if (right) return w.hi + 1 < row0 + rows ? rows + 1 + w.hi + 1 - row0 : -1;
        return drop_first_row && w.lo <= row0 ? -1 : max(w.lo - row0, 0);
    }
};

// Counts to starts: each number becomes the sum of those before it. By all threads of a block, with
// scratch for a number of each warp.
template <int ITEMS> __device__ void counts_to_starts(int* counts, int size, int* warps) {
    const int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = 0;
    for (int begin = 0; begin < size; begin += ITEMS * blockDim.x) {
        const int first = begin + ITEMS * threadIdx.x;
        int own[ITEMS], total = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            own[i] = first + i < size ? counts[first + i] : 0;
            total += own[i];
        }
        int inclusive = total;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, inclusive, step);
            if (thread >= step) inclusive += other;
        }
        if (thread == 31) warps[warp] = inclusive;
        __syncthreads();
        int start = sum + inclusive - total;
        for (int w = 0; w < blockDim.x / 32; ++w) {
            if (w < warp) start += warps[w];
            sum += warps[w];
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (first + i < size) counts[first + i] = start;
            start += own[i];
        }
        __syncthreads();
    }
}

// A stable counting sort of the ends of `count` time steps: those of the left, then those of the
// right. Each step is taken for all ends before the next, and counts_to_starts after the first.
// `w` is the window of end i; `slots` is scratch for 4 * count numbers, and `starts` is 0 at first.
enum class Step { COUNT, PLACE, RANK };

template <Step step, typename F>
__device__ void sort_end(const Ends<F>& ends, const Window<F>& w, int i, int count, int* slots) {
    const bool right = i >= count;
    const int bucket = ends.bucket(w, right);
    int* starts = ends.starts;
    int* unordered = slots + 2 * count;
    if (bucket < 0) return;
    if (step == Step::COUNT) slots[i] = atomicAdd(&starts[bucket], 1);
    if (step == Step::PLACE) unordered[starts[bucket] + slots[i]] = i;
    if (step == Step::RANK) {
        int rank = starts[bucket];
        for (int k = starts[bucket]; k < starts[bucket + 1]; ++k) rank += unordered[k] < i;
        ends.entries[rank] = Entry<F>{right ? i - count : i, right ? w.right : w.left};
    }
}

template <Step step, typename F>
__device__ void sort_step(const Ends<F>& ends, const Window<F>* windows, int count, int* slots) {
    for (int i = threadIdx.x; i < 2 * count; i += blockDim.x)
        sort_end<step>(ends, windows[i < count ? i : i - count], i, count, slots);
}

// All of it by one block, with a barrier still to come at its end.
template <typename F>
__device__ void sort_ends(const Ends<F>& ends, const Window<F>* windows, int count, int* slots,
                          int* warps) {
    const int size = 2 * ends.rows + 2;
    for (int i = threadIdx.x; i < size; i += blockDim.x) ends.starts[i] = 0;
    __syncthreads();
    sort_step<Step::COUNT>(ends, windows, count, slots);
    __syncthreads();
    counts_to_starts<2>(ends.starts, size, warps);
    sort_step<Step::PLACE>(ends, windows, count, slots);
    __syncthreads();
    sort_step<Step::RANK>(ends, windows, count, slots);
}

// dout[t] of a thread's channels, from shared or from global memory.
template <typename X, int N> struct SharedRows {
    static constexpr float unit = Types<X>::unit;
    const Pack<X, N>* rows;
    int lanes;
    __device__ Pack<X, N> operator()(int t) const { return rows[t * lanes]; }
};
template <typename X, int N> struct GlobalRows {
    static constexpr float unit = Types<X>::unit;
    const X* column;
    long long stride;
    __device__ Pack<X, N> operator()(int t) const { return load<X, N>(column + t * stride); }
};

// How much the running sum changes over rows from ... to - 1.
template <typename S, int N, typename F, typename Rows>
__device__ Pack<double, N> change(const Ends<F>& ends, const Rows& dout, int from, int to) {
    Pack<S, N> enters = {}, leaves = {};
    const int* left = ends.starts;
    const int* right = ends.starts + ends.rows + 1;
#pragma unroll 2
    for (int k = left[from]; k < left[to]; ++k) add(enters, dout(ends.entries[k].t));
#pragma unroll 2
    for (int k = right[from]; k < right[to]; ++k) add(leaves, dout(ends.entries[k].t));
    for (int n = 0; n < N; ++n) enters.v[n] -= leaves.v[n];
    return widened<double>(enters);
}

// Walks rows from ... to - 1 with the running sum before them, and hands over each row of dx * K.
template <typename S, int N, typename F, typename Rows, typename Far, typename Store>
__device__ void walk(const Ends<F>& ends, const Rows& dout, int from, int to, Pack<double, N> sum,
                     const Far& far, const Store& store_row) {
    const int* left = ends.starts;
    const int* right = ends.starts + ends.rows + 1;
    Pack<S, N> enters = {};  // net of what leaves at the same row
#pragma unroll 1
    for (int k = left[from]; k < left[from + 1]; ++k) add(enters, dout(ends.entries[k].t));
    for (int row = from; row < to; ++row) {
        Pack<F, N> part = {};
#pragma unroll 1  // an end or two: unrolling would only cost registers
        for (int k = right[row]; k < right[row + 1]; ++k) {
            const Entry<F> entry = ends.entries[k];
            const F fraction = entry.fraction * Rows::unit;
            const Pack<F, N> d = widened<F>(dout(entry.t));
            for (int n = 0; n < N; ++n)
                enters.v[n] -= Rows::unit * d.v[n], part.v[n] += fraction * d.v[n];
        }
        add(sum, enters);
        enters = {};
#pragma unroll 1
        for (int k = left[row + 1]; k < left[row + 2]; ++k) {
            const Entry<F> entry = ends.entries[k];
            const F fraction = entry.fraction * Rows::unit;
            const Pack<F, N> d = widened<F>(dout(entry.t));
            for (int n = 0; n < N; ++n)
                enters.v[n] += Rows::unit * d.v[n], part.v[n] += fraction * d.v[n];
        }
        Pack<double, N> whole = sum;
        far(row, whole);
        for (int n = 0; n < N; ++n) part.v[n] += static_cast<F>(whole.v[n]);
        store_row(row, part);
    }
}

// dots[2 i] and dots[2 i + 1] gain dout[t] . x[the row that an end of t cuts], t = t0 + i: these
// channels' part of the gradients of the offsets. The lanes of a row add up theirs by shuffles.
template <typename X, typename F, int N, typename Rows>
__device__ void add_dots(F* dots, const Window<F>* windows, const Rows& dout, int t0, int tile,
                         const X* column, long long stride, bool active, int lanes) {
    // Windows whose rows load together: as many as the registers allow.
    constexpr int BATCH = sizeof(X) == 2 ? 3 : sizeof(X) == 4 ? 2 : 1;
    const int segment = threadIdx.x / lanes, segments = blockDim.x / lanes;
#pragma unroll 1
    for (int begin = segment; begin - segment < tile; begin += BATCH * segments) {
        Pack<X, N> rows_lo[BATCH], rows_hi[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int i = begin + k * segments;
            if (i >= tile || !active) continue;
            const Window<F> w = windows[i];
            // Nearly every end cuts a row: loading one in vain is cheaper than a branch.
            rows_lo[k] = load<X, N>(column + (w.left != 0 ? w.lo - 1 : w.lo) * stride);
            rows_hi[k] = load<X, N>(column + (w.right != 0 ? w.hi + 1 : w.hi) * stride);
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int i = begin + k * segments;
            F left = 0, right = 0;
            if (i < tile && active) {
                const Window<F> w = windows[i];
                const Pack<F, N> d = widened<F>(dout(t0 + i));
                const Pack<F, N> row_lo = widened<F>(rows_lo[k]), row_hi = widened<F>(rows_hi[k]);
                for (int n = 0; n < N; ++n)
                    left += d.v[n] * row_lo.v[n], right += d.v[n] * row_hi.v[n];
                left = w.left != 0 ? left : 0, right = w.right != 0 ? right : 0;
            }
            for (int step = lanes / 2; step > 0; step /= 2) {
                left += __shfl_xor_sync(0xffffffffu, left, step);
                right += __shfl_xor_sync(0xffffffffu, right, step);
            }
            if (i < tile && threadIdx.x % lanes == 0) dots[2 * i] += left, dots[2 * i + 1] += right;
        }
    }
}

// The gradients of the offsets of a tile from the dots of all channels of the head.
template <typename X, typename F>
__device__ void store_offset_gradients(const Problem& p, int head, const F* dots,
                                       const Window<F>* windows, int t0, int tile) {
    const long long stride = static_cast<long long>(p.B) * p.C;
    const long long channels = static_cast<long long>(head) * p.R;
    const auto gradient = [&](F dot, F fraction, int t, int row, int max_rows) {
        if (fraction != fraction) return fraction;
        const F value = dot * static_cast<F>(p.scale * max_rows);
        if (Types<X>::unit == 1 || value - value == 0) return value;
        // Not finite. Products of bfloat16 numbers may be too large for a float, and their sum not.
        const X* d = static_cast<const X*>(p.dout) + channels + t * stride;
        const X* x = static_cast<const X*>(p.x) + channels + row * stride;
        double exact = 0;
#pragma unroll 1
        for (int c = 0; c < p.R; ++c) exact += static_cast<double>(widen(d[c])) * widen(x[c]);
        return static_cast<F>(exact * p.scale * max_rows);
    };
    for (int i = threadIdx.x; i < tile; i += blockDim.x) {
        const long long at = static_cast<long long>(t0 + i) * p.B * p.H + head;
        const Window<F> w = windows[i];
        store_offset<X>(p, p.d_offset_left, at,
                        gradient(dots[2 * i], w.left, t0 + i, w.lo - 1, p.max_left));
        if (p.d_offset_right)
            store_offset<X>(p, p.d_offset_right, at,
                            gradient(dots[2 * i + 1], w.right, t0 + i, w.hi + 1, p.max_right));
    }
}

// Moderate windows, before talk_backward where there is more than one tile: a thread tells the tiles
// that a window touches, and that do not stage its time step, how far away that is.
template <typename X> __device__ void reach(const Problem& p) {
    using F = typename Types<X>::Compute;
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int heads = p.B * p.H, head = at % heads;
    if (at / heads >= p.T) return;
    const int t = at / heads;
    const Window<F> w = window_of<X, F>(p, t, head);
    const int lo = w.lo - (w.left != 0), hi = w.hi + (w.right != 0);
    for (int tile = lo / p.tile; tile <= hi / p.tile; ++tile) {
        const int t0 = tile * p.tile, first = max(t0 - p.before, 0);
        const int last = min(min(t0 + p.tile, p.T) + p.after, p.T);
        int* both = p.reach + (static_cast<long long>(tile) * heads + head) * 2;
        if (t < first) atomicMax(&both[0], first - t);
        if (t >= last) atomicMax(&both[1], t + 1 - last);
    }
}

// What time steps that are not staged add to a row: those with offsets far above 1. Slow and rare.
template <typename X, int N> struct FarRows {
    const Problem& p;
    int head;
    const X* dout;
    bool active;
    int t0, from, first, last, to;  // time steps from ... first - 1 and last ... to - 1

    template <typename P> __device__ void operator()(int row, P& whole) const {
        if (!active) return;
#pragma unroll 1
        for (int t = from; t < to; ++t) {
            if (t == first) t = last;
            if (t < to) add_step(t, t0 + row, whole);
        }
    }
    __device__ void add_step(int t, int row, Pack<double, N>& whole) const {
        const Window<double> w = window_of<X, double>(p, t, head);
        double weight = row >= w.lo && row <= w.hi;
        if (row == w.lo - 1) weight += w.left;
        if (row == w.hi + 1) weight += w.right;
        if (weight == 0) return;
        weight *= Types<X>::unit;
        const Pack<X, N> d = load<X, N>(dout + t * (static_cast<long long>(p.B) * p.C));
        for (int n = 0; n < N; ++n) whole.v[n] += weight * wide(d, n);
    }
};

template <typename X, int N> __device__ void backward(const Problem& p) {
    using F = typename Types<X>::Compute;
    using S = typename Types<X>::Sum;
    const int lanes = p.lanes, lane = threadIdx.x % lanes;
    const int segment = threadIdx.x / lanes, segments = blockDim.x / lanes;
    const int head = blockIdx.x;
    const int t0 = tile_start(p), tile = min(p.tile, p.T - t0);
    const int first = max(t0 - p.before, 0), staged = min(t0 + tile + p.after, p.T) - first;
    const int capacity = min(p.before + p.tile + p.after, p.T);
    const long long stride = static_cast<long long>(p.B) * p.C;
    const long long channels = static_cast<long long>(head) * p.R;

    Shared shared = shared_memory();
    Pack<X, N>* rows = shared.take<Pack<X, N>>(capacity * lanes);  // dout, for all lanes
    Pack<double, N>* warps = shared.take<Pack<double, N>>(blockDim.x / 32 * lanes);
    Window<F>* windows = shared.take<Window<F>>(capacity);
    Entry<F>* entries = shared.take<Entry<F>>(2 * capacity);
    F* dots = shared.take<F>(2 * p.tile);
    int* starts = shared.take<int>(2 * p.tile + 2);
    int* slots = shared.take<int>(4 * capacity);
    int* sort_warps = shared.take<int>(blockDim.x / 32);
    const Ends<F> ends{t0, tile, false, starts, entries};
    constexpr int BATCH = 4;  // rows that a thread loads together
    const int* far = p.reach;
    if (far) far += (static_cast<long long>(blockIdx.z) * p.B * p.H + head) * 2;

    for (int i = threadIdx.x; i < staged; i += blockDim.x)
        windows[i] = window_of<X, F>(p, first + i, head);
    for (int i = threadIdx.x; i < 2 * tile; i += blockDim.x) dots[i] = 0;
    for (int c = lane * N; c - lane * N < p.R; c += lanes * N) {
        const bool active = c < p.R;
        const X* dout = static_cast<const X*>(p.dout) + channels + c;
        const X* inside = active ? dout : dout - c;
#pragma unroll 1
        for (int begin = segment; begin < staged; begin += BATCH * segments) {
            Pack<X, N> batch[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int i = min(begin + k * segments, staged - 1);
                batch[k] = load<X, N>(inside + (first + i) * stride);
            }
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int i = begin + k * segments;
                if (i < staged) rows[i * lanes + lane] = active ? batch[k] : Pack<X, N>{};
            }
        }
        if (c == lane * N)  // once for all the channels of the head
            sort_ends(ends, windows, staged, slots, sort_warps);
        __syncthreads();

        const SharedRows<X, N> staged_rows{rows + lane, lanes};
        const int from = min(segment * ROWS, tile), to = min(from + ROWS, tile);
        const Pack<double, N> sum = sum_of_earlier_segments(
            change<S, N>(ends, staged_rows, from, to), lanes, warps);
        const FarRows<X, N> far_rows{p, head, dout, active, t0, first - (far ? far[0] : 0),
                                     first, first + staged, first + staged + (far ? far[1] : 0)};
        X* dx = static_cast<X*>(p.out) + channels + c;
        const auto store_row = [=](int row, const Pack<F, N>& value) {
            if (active) store(dx + (t0 + row) * stride, value, scale_of_sums<X>(p));
        };
        walk<S, N>(ends, staged_rows, from, to, sum, far_rows, store_row);
        add_dots<X, F, N>(dots, windows + t0 - first, staged_rows, t0 - first, tile,
                          static_cast<const X*>(p.x) + channels + c, stride, active, lanes);
        __syncthreads();
    }
    store_offset_gradients<X>(p, head, dots, windows + t0 - first, t0, tile);
}

// Large windows, step 1: the ends of whole sequences, sorted, a thread to an end; and between the
// first two kernels a block for each head of each sentence. Windows that start at row 0 are left
// out: talk_changes adds them up.
template <typename F> __device__ Ends<F> ends_of_head(const Problem& p, long long head) {
    return Ends<F>{0, p.T, true, p.starts + head * (2LL * p.T + 2),
                   static_cast<Entry<F>*>(p.entries) + head * (2LL * p.T)};
}

template <typename X, Step step> __device__ void sort_all_ends(const Problem& p) {
    using F = typename Types<X>::Compute;
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long head = at / (2LL * p.T);
    if (head >= static_cast<long long>(p.B) * p.H) return;
    const int i = at % (2LL * p.T), t = i < p.T ? i : i - p.T;
    const Window<F> w = window_of<X, F>(p, t, head);
    sort_end<step>(ends_of_head<F>(p, head), w, i, p.T, p.slots + head * (4LL * p.T));
}

__device__ inline void start_ends(const Problem& p) {
    int* warps = shared_memory().take<int>(blockDim.x / 32);
    counts_to_starts<8>(p.starts + blockIdx.x * (2LL * p.T + 2), 2 * p.T + 2, warps);
}

// Large windows, step 2: by how much the running sum changes over each chunk of rows, and the sum
// of dout over those time steps of the chunk whose windows start at row 0.
template <typename X, int N> __device__ void changes(const Problem& p) {
    using F = typename Types<X>::Compute;
    using S = typename Types<X>::Sum;
    const int lanes = p.lanes, lane = threadIdx.x % lanes, segment = threadIdx.x / lanes;
    const int head = blockIdx.x;
    const int from = min(tile_start(p) + segment * ROWS, p.T), to = min(from + ROWS, p.T);
    const long long stride = static_cast<long long>(p.B) * p.C;
    const Ends<F> ends = ends_of_head<F>(p, head);
    Shared shared = shared_memory();
    Pack<double, N>* warps = shared.take<Pack<double, N>>(blockDim.x / 32 * lanes);

    for (int c = lane * N; c - lane * N < p.R; c += lanes * N) {
        const long long at = static_cast<long long>(head) * p.R + c;
        const GlobalRows<X, N> dout{static_cast<const X*>(p.dout) + at, stride};
        Pack<double, N> total = {}, clipped = {};
        if (c < p.R) {
            total = change<S, N>(ends, dout, from, to);
            for (int t = from; t < to; ++t)
                if (window_of<X, F>(p, t, head).lo <= 0) add(clipped, dout(t));
        }
        add(total, sum_of_earlier_segments(total, lanes, warps));
        __syncthreads();
        add(clipped, sum_of_earlier_segments(clipped, lanes, warps));
        __syncthreads();
        if (c < p.R && segment == blockDim.x / lanes - 1)
            for (int n = 0; n < N; ++n) {
                p.totals[blockIdx.z * stride + at + n] = total.v[n];
                p.clipped[blockIdx.z * stride + at + n] = clipped.v[n];
            }
    }
}

// Large windows, step 4 (step 3 is talk_scan_chunks): the rows of a chunk.
struct NoFarRows {
    template <typename P> __device__ void operator()(int, P&) const {}
};

template <typename X, int N> __device__ void backward_walk(const Problem& p) {
    using F = typename Types<X>::Compute;
    using S = typename Types<X>::Sum;
    const int lanes = p.lanes, lane = threadIdx.x % lanes, segment = threadIdx.x / lanes;
    const int head = blockIdx.x;
    const int t0 = tile_start(p), tile = min(p.tile, p.T - t0);
    const int from = min(t0 + segment * ROWS, t0 + tile), to = min(from + ROWS, t0 + tile);
    const long long stride = static_cast<long long>(p.B) * p.C;
    const Ends<F> ends = ends_of_head<F>(p, head);
    Shared shared = shared_memory();
    Pack<double, N>* warps = shared.take<Pack<double, N>>(blockDim.x / 32 * lanes);
    Window<F>* windows = shared.take<Window<F>>(p.tile);
    F* dots = shared.take<F>(2 * p.tile);
    for (int i = threadIdx.x; i < tile; i += blockDim.x)
        windows[i] = window_of<X, F>(p, t0 + i, head);
    for (int i = threadIdx.x; i < 2 * tile; i += blockDim.x) dots[i] = 0;

    for (int c = lane * N; c - lane * N < p.R; c += lanes * N) {
        const bool active = c < p.R;
        const long long at = static_cast<long long>(head) * p.R + c;
        const GlobalRows<X, N> dout{static_cast<const X*>(p.dout) + at, stride};
        Pack<double, N> sum = {};
        if (active) sum = change<S, N>(ends, dout, from, to);
        sum = sum_of_earlier_segments(sum, lanes, warps);
        if (active) {
            for (int n = 0; n < N; ++n) sum.v[n] += p.totals[blockIdx.z * stride + at + n];
            X* dx = static_cast<X*>(p.out) + at;
            walk<S, N>(ends, dout, from, to, sum, NoFarRows{}, [=](int t, const Pack<F, N>& value) {
                store(dx + t * stride, value, scale_of_sums<X>(p));
            });
        }
        add_dots<X, F, N>(dots, windows, dout, t0, tile, static_cast<const X*>(p.x) + at, stride,
                          active, lanes);
        __syncthreads();
    }
    store_offset_gradients<X>(p, head, dots, windows, t0, tile);
}

// ------------------------------------------------------------------------------------- decoding

// The next T outputs of a causal sequence, after p.steps others. A thread takes N channels. Running
// sums over time, P(t), stand in a ring whose every turn starts them anew; seen from time t, P(k)
// of the turn before is minus the sum of what lies between:
//
//     out[t] = (P(t) - P(t - n - 1) + f * (P(t - n - 1) - P(t - n - 2))) / (max_left + 1)
//
// Sequences may share slots of the past (p.origin), so that a beam search copies no rows. A step
// writes a slot that no window can reach any more, whoever shares it; several steps at a time are
// only taken where nothing is shared.
template <typename F, int N> struct Ring {
    const Problem& p;
    int b, c;

    __device__ F* row(int slot, int column) const {
        return static_cast<F*>(p.sums)
            + (static_cast<long long>(slot) * p.columns + column) * p.C + c;
    }
    __device__ Pack<F, N> at(int slot) const {
        const int column = p.origin ? p.origin[static_cast<long long>(slot) * p.B + b] : b;
        return load<F, N>(row(slot, column));
    }
    // P of the time at slot k of this turn, or (k < 0) of the turn before.
    __device__ Pack<F, N> sum(int k) const {
        Pack<F, N> sum = {};
        if (k >= 0) return at(k);
        if (k == -1) return sum;
        sum = at(k + p.ring);
        const Pack<F, N> total = at(p.ring - 1);
        for (int n = 0; n < N; ++n) sum.v[n] -= total.v[n];
        return sum;
    }
};

template <typename X, int N> __device__ void update(const Problem& p) {
    using F = typename Types<X>::Compute;
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int packs = p.C / N, b = at / packs, c = at % packs * N;
    if (b >= p.B) return;
    for (int s = 0; s < p.T; ++s) {
        const int t = p.steps + s, slot = t % p.ring;
        const long long step = static_cast<long long>(s) * p.B + b;
        const Ring<F, N> ring{p, b, c};
        Pack<F, N> now = slot == 0 ? Pack<F, N>{} : ring.at(slot - 1);
        const Pack<X, N> row = load<X, N>(static_cast<const X*>(p.x) + step * p.C + c);
        for (int n = 0; n < N; ++n) now.v[n] += wide(row, n);
        *reinterpret_cast<Pack<F, N>*>(ring.row(slot, b)) = now;
        if (p.origin && c == 0) p.origin[static_cast<long long>(slot) * p.B + b] = b;

        int whole;
        F fraction;
        split(load_offset<X>(p, p.offset_left, step * p.H + c / p.R), p.max_left, t, whole,
              fraction);
        if (whole > p.ring - 3) fraction = static_cast<F>(nan(""));
        Pack<F, N> out = now;
        if (fraction != fraction) {
            for (int n = 0; n < N; ++n) out.v[n] = fraction;
        } else {
            const Pack<F, N> before = ring.sum(slot - whole - 1);
            for (int n = 0; n < N; ++n) out.v[n] -= before.v[n];
            if (fraction != 0) {
                const Pack<F, N> cut = ring.sum(slot - whole - 2);
                for (int n = 0; n < N; ++n) out.v[n] += fraction * (before.v[n] - cut.v[n]);
            }
        }
        store(static_cast<X*>(p.out) + step * p.C + c, out, static_cast<F>(p.scale));
    }
}

// --------------------------------------------------------------------------------- entry points

// Two blocks of so many threads share the 65,536 registers of a multiprocessor: 64 registers to a
// thread of the forward kernel (in float64 it takes more), 72 to one of the backward kernel.

// For one storage type X: kernels that move N channels at a time (`wide`: N divides R, and rows
// are aligned), kernels for any R (`narrow`), and those that need not tell the two apart.
#define TALK_WIDTH(type, X, N, BN)                                                \
    TALK_KERNEL(talk_forward, type, Problem, MAX_THREADS, 2, (forward<X, N, LANES, Table<typename Types<X>::Compute, N, LANES>>(p)))       \
    TALK_KERNEL(talk_forward_long, type, Problem, MAX_THREADS, sizeof(X) == 2 ? 1 : 2, (forward<X, N, LONG_LANES, Bases<typename Types<X>::Compute, N, SharedPrefix<double, N, LONG_LANES>>>(p)))     \
    TALK_KERNEL(talk_forward_sums, type, Problem, 256, 1, (forward_sums<X, N>(p)))                 \
    TALK_KERNEL(talk_forward_gather, type, Problem, 256, 1, (forward_gather<X, N>(p)))             \
    TALK_KERNEL(talk_backward, type, Problem, BACKWARD_THREADS, 2, (backward<X, BN>(p)))           \
    TALK_KERNEL(talk_changes, type, Problem, BACKWARD_THREADS, 1, (changes<X, BN>(p)))             \
    TALK_KERNEL(talk_update, type, Problem, 128, 1, (update<X, BN>(p)))                            \
    TALK_KERNEL(talk_backward_walk, type, Problem, BACKWARD_THREADS, 1, (backward_walk<X, BN>(p)))
#define TALK_TYPE(type, X, N, BN)                                                 \
    TALK_WIDTH(type##_wide, X, N, BN)                                             \
    TALK_WIDTH(type##_narrow, X, 1, 1)                                                            \
    TALK_KERNEL(talk_forward_bases, type, Problem, MAX_THREADS, 1,                                 \
                (forward_bases<typename Types<X>::Compute>(p)))                                   \
    TALK_KERNEL(talk_reach, type, Problem, 128, 1, (reach<X>(p)))                                          \
    TALK_KERNEL(talk_count_ends, type, Problem, 128, 1, (sort_all_ends<X, Step::COUNT>(p)))                \
    TALK_KERNEL(talk_start_ends, type, Problem, MAX_THREADS, 1, (start_ends(p)))                           \
    TALK_KERNEL(talk_place_ends, type, Problem, 128, 1, (sort_all_ends<X, Step::PLACE>(p)))                \
    TALK_KERNEL(talk_rank_ends, type, Problem, 128, 1, (sort_all_ends<X, Step::RANK>(p)))                  \
    TALK_KERNEL(talk_scan_chunks, type, Problem, 128, 1, (scan_chunks(p)))

// The host compiles one type at a time (-DTALK_ONLY -DTALK_<type>); without, all of them are.
#if !defined(TALK_ONLY) || defined(TALK_float64)
TALK_TYPE(float64, double, 2, 2)
#endif
#if !defined(TALK_ONLY) || defined(TALK_float32)
TALK_TYPE(float32, float, 4, 4)
#endif
#if !defined(TALK_ONLY) || defined(TALK_float16)
TALK_TYPE(float16, float16, 8, 4)
#endif
#if !defined(TALK_ONLY) || defined(TALK_bfloat16)
TALK_TYPE(bfloat16, bfloat16, 8, 4)
#endif
