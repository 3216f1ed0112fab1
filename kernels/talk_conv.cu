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
// Backward: dx is the transpose. Reading rows upwards, dout[t] enters a running sum after row
// lo - 1 and leaves it at row hi + 1, and counts by its fractions at these two rows. So the ends of
// the windows are sorted by row, once for a head and not for a channel, and each thread walks a few
// rows of N channels, whose results stay in registers:
//
//     row                    2           3           4           5           6           7
//     ends             left of 5                                         right of 5
//     running sum before     0        dout[5]     dout[5]     dout[5]     dout[5]        0
//     an end adds here   + 0.4 dout[5]                                - 0.5 dout[5]
//     and from here on   +     dout[5]                                -     dout[5]
//     dx * K             0.4 dout[5]  dout[5]     dout[5]     dout[5]  0.5 dout[5]       0
//
// A walk starts from 0, in the type that is computed in; then the sum before each segment is found,
// in double, and added. The sort is a counting sort on integers, ordered by t and side within a
// row, and the tiles follow from the windows alone: the same bits at every run and in any batch.
// The dots of dout with the rows that are cut, summed over the lanes, are the offsets' gradients.
//
// Moderate windows (talk_backward): a block stages dout for its tile and the halo, and sorts the
// ends in shared memory. Windows that are open before its first row are shared out among the
// segments. Those of time steps that are not staged (offsets above 1.25) are found through
// talk_reach and added after the walk. Large windows: the ends of the whole sequence are sorted
// (talk_count_ends, talk_start_ends, talk_place_ends, talk_rank_ends), and talk_backward's code
// runs twice: for how much the running sum changes over each chunk (talk_backward_totals), and
// after the scan over chunks (talk_scan_chunks) for the rows (talk_backward_walk).
//
// The file includes nothing: NVRTC compiles it without the toolkit's headers.
#include "types.cuh"

constexpr int LANES = 8;          // threads across the channels of a row, in the forward pass
constexpr int LONG_LANES = 2;     // likewise where windows are large
constexpr int ROWS = 8;           // rows of a segment
constexpr int UNIT = 32;          // rows over which a prefix sum runs before it starts anew
constexpr int MAX_THREADS = 512;
constexpr int LONG_THREADS = 320;  // likewise where windows are large

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
    double* totals;            // (chunks, B, C): sums of chunks, then of all the chunks before
    double* clipped;           // (chunks, B, C): windows that start at row 0; backward
    int* reach;                // (T / REACH, B, H, 2): the rows that larger windows than a halo
                               // touch; backward
    int* starts;               // (B, H, buckets): where the ends at each row start; 0 at first
    int* slots;                // (2, B, H, 2 T): scratch of the sort
    void* entries;             // (B, H, 2 T): ends ordered by row
    int* origin;               // (ring, B): where a slot of a sequence is, or null; decoding
    double scale;              // 1 / (max_left + max_right + 1)
    int T, B, C, H, R;
    int max_left, max_right;
    int before, after;         // rows of halo on either side of a tile
    int tile;                  // rows of a tile or chunk
    int units, spans;          // units of a tile, or of all; entries of the table for each
    int staged;                // rows of a tile with its halo, a multiple of 4; backward
    int buckets;               // rows of whole chunks, and 1; large windows, backward
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
#pragma unroll 2
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

template <typename F, int N, int lanes>
using SharedBases = Bases<F, N, SharedPrefix<double, N, lanes>>;

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
template <typename X, int N, int lanes, template <typename, int, int> typename UnitSums>
__device__ void forward(const Problem& p) {
    using F = typename Types<X>::Compute;
    using Units = UnitSums<F, N, lanes>;
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
        if (own < tile) {
            const Window<F> w = window_of<X, F>(p, t0 + own, offsets);
            const int lo = w.lo - 1 - origin, hi = w.hi + 1 - origin;
            windows[own] = units.window(lo, hi, w.left, w.right, lo >= 0 && hi < staged);
            far |= windows[own].far();
        }
        if (loads) scan_segment<F, lanes>(rows, local, row / ROWS, weight, p.T >> 31);
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
template <typename X> __device__ void forward_bases(const Problem& p) {
    using F = typename Types<X>::Compute;
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

constexpr int REACH = 32;  // time steps that share an entry of `reach`

// One end of a window, at the row it cuts or could cut (lo - 1 or hi + 1): what dout[t] adds to dx
// at this row, and to the running sum of the rows after it.
template <typename F> struct alignas(sizeof(F) == 4 ? 16 : 8) End {
    int t;
    F part, whole;
};

template <typename F> __device__ inline int row_of_end(const Window<F>& w, int right) {
    return right ? w.hi + 1 : w.lo - 1;
}

template <typename X, typename F>
__device__ inline End<F> end_of(const Window<F>& w, int right, int t) {
    const F unit = Types<X>::unit;
    return right ? End<F>{t, unit * (w.right - 1), -unit} : End<F>{t, unit * w.left, unit};
}

// The rows that a window's two ends cut, for the gradients of its offsets.
using Cuts = Pack<int, 2>;
constexpr int NO_CUT = -1, NAN_CUT = -2;

template <typename F> __device__ inline Cuts cuts_of(const Window<F>& w) {
    const auto cut = [](F fraction, int row) {
        return fraction != fraction ? NAN_CUT : fraction != 0 ? row : NO_CUT;
    };
    return Cuts{{cut(w.left, w.lo - 1), cut(w.right, w.hi + 1)}};
}

// The sum over the threads of the block before this one, and over all of them: 512 at most.
__device__ inline int sum_before(int value, int* warps, int& total) {
    const int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int inclusive = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (thread >= step) inclusive += other;
    }
    if (thread == 31) warps[warp] = inclusive;
    __syncthreads();
    total = thread % 16 < blockDim.x / 32 ? warps[thread % 16] : 0;
    int before = thread % 16 < warp ? total : 0;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, step);
        before += __shfl_xor_sync(0xffffffffu, before, step);
    }
    return before + inclusive - value;
}

// What a block knows of the windows of the time steps that it stages, in shared memory.
template <typename F> struct Tile {
    int t0, rows;       // the tile, of which row 0 is time step t0
    int first, staged;  // time steps
    int* starts;        // starts[r] ... starts[r + 1]: the ends at row r, by time step, left first
    End<F>* ends;       // t counts from `first`
    int* opens;         // the windows that are open before row 0
    int* open_windows;  // how many
    Cuts* cuts;         // of the tile's own windows
    int* unordered;     // scratch
    int* warps;
};

// Sorts the ends of the windows: counts them by row, places them in any order, and then ranks those
// of a row. A thread holds one window; `buckets` is at most the number of threads and 1.
template <typename X, typename F>
__device__ void sort_ends(const Problem& p, int head, const Tile<F>& tile, int buckets) {
    const int i = threadIdx.x, own = tile.first + i - tile.t0;
    int row[2] = {-1, -1}, slot[2], open = 0;
    End<F> ends[2];
    for (int bucket = i; bucket < buckets; bucket += blockDim.x) tile.starts[bucket] = 0;
    __syncthreads();
    if (i < tile.staged) {
        const Window<F> w = window_of<X, F>(p, tile.first + i, head);
        if (own >= 0 && own < tile.rows) tile.cuts[own] = cuts_of(w);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            row[e] = row_of_end(w, e) - tile.t0;
            ends[e] = end_of<X>(w, e, i);
            if (row[e] >= tile.rows) row[e] = -1;
            if (row[e] >= 0) slot[e] = atomicAdd(tile.starts + row[e], 1);
        }
        open = w.lo - 1 < tile.t0 && w.hi + 1 >= tile.t0;
    }
    __syncthreads();
    int total;  // of ends, and 65,536 times that of open windows
    const int count = (i < buckets ? tile.starts[i] : 0) + (open << 16);
    const int before = sum_before(count, tile.warps, total);
    if (i < buckets) tile.starts[i] = before & 0xffff;
    if (open) tile.opens[before >> 16] = i;
    if (i == 0) tile.starts[buckets - 1] = total & 0xffff, *tile.open_windows = total >> 16;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 2; ++e)
        if (row[e] >= 0) tile.unordered[tile.starts[row[e]] + slot[e]] = 2 * i + e;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        if (row[e] < 0) continue;
        int rank = tile.starts[row[e]];
        const int end = tile.starts[row[e] + 1];
#pragma unroll 1
        for (int k = rank; k < end; ++k) rank += tile.unordered[k] < 2 * i + e;
        tile.ends[rank] = ends[e];
    }
}

// Row t of a column of channels; `stride` is in bytes: one instruction to an address.
template <typename X>
__device__ inline const X* row_at(const X* column, unsigned int stride, int t) {
    const unsigned long long bytes = static_cast<unsigned long long>(stride) * unsigned(t);
    return reinterpret_cast<const X*>(reinterpret_cast<const char*>(column) + bytes);
}

// dout[t] of a thread's channels, in global memory.
template <typename X, int N> struct GlobalRows {
    const X* column;
    unsigned int stride;
    __device__ Pack<X, N> operator()(int t) const {
        return load<X, N>(row_at(column, stride, t));
    }
};

// Walks the rows of a segment: `rows` become what its ends make of dx there, as if the running sum
// were 0 before. Returns that sum after them.
template <int UNROLL, typename F, int N, int ROWS_, typename Rows>
__device__ inline Pack<F, N> walk(Pack<F, N> (&rows)[ROWS_], const int* starts, const End<F>* ends,
                                  const Rows& dout) {
    Pack<F, N> sum = {};
    int k = starts[0];
#pragma unroll
    for (int r = 0; r < ROWS_; ++r) {
        rows[r] = sum;
        const int end = starts[r + 1];
#pragma unroll UNROLL
        for (; k < end; ++k) {
            const End<F> e = ends[k];
            const Pack<F, N> d = widened<F>(dout(e.t));
            add(rows[r], d, e.part);
            add(sum, d, e.whole);
        }
    }
    return sum;
}

// The same sum without the rows.
template <int ROWS_, int N, typename F, typename Rows>
__device__ inline Pack<F, N> change(const int* starts, const End<F>* ends, const Rows& dout) {
    Pack<F, N> sum = {};
    const int end = starts[ROWS_];
#pragma unroll 4
    for (int k = starts[0]; k < end; ++k) add(sum, dout(ends[k].t), ends[k].whole);
    return sum;
}

// Sums over lanes: value i of VALUES is in the end with lane i * LANES / VALUES, as its first one,
// or (where there are fewer lanes) one of its first ones. Each exchange halves what is left.
template <int LANES, typename F, int VALUES>
__device__ inline void sum_over_lanes(F (&values)[VALUES]) {
    int count = VALUES;
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        if (count == 1) {
            values[0] += __shfl_xor_sync(0xffffffffu, values[0], step);
            continue;
        }
        count /= 2;
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int i = 0; i < VALUES / 2; ++i) {
            if (i >= count) continue;
            const F other = upper ? values[i] : values[i + count];
            values[i] = upper ? values[i + count] : values[i];
            values[i] += __shfl_xor_sync(0xffffffffu, other, step);
        }
    }
}

// Dots of dout with the rows of x that the windows of time steps `begin` ... cut, left and right by
// turns; their loads are under way together.
template <typename F, int VALUES, typename X, typename Rows>
__device__ inline void add_dots(F (&values)[VALUES], const Cuts* cuts, const X* x,
                                unsigned int stride, int begin, int end, const Rows& dout) {
    decltype(dout(0)) rows[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int cut = cuts[min(begin + i / 2, end - 1)].v[i % 2];
        rows[i] = *reinterpret_cast<const decltype(dout(0))*>(row_at(x, stride, max(cut, 0)));
    }
#pragma unroll
    for (int i = 0; i < VALUES; i += 2) {
        const auto d = widened<F>(dout(min(begin + i / 2, end - 1)));
        const auto left = widened<F>(rows[i]), right = widened<F>(rows[i + 1]);
        for (int n = 0; n < sizeof(d.v) / sizeof(F); ++n) {
            values[i] += d.v[n] * left.v[n];
            values[i + 1] += d.v[n] * right.v[n];
        }
    }
}

// The gradient of an offset from dout[t] . x[cut].
template <typename X, typename F>
__device__ F gradient_of_offset(const Problem& p, int head, F dot, int t, int cut, int max_rows) {
    if (cut == NAN_CUT) return static_cast<F>(nan(""));
    if (cut == NO_CUT) return 0;
    const F value = dot * static_cast<F>(p.scale * max_rows);
    if (Types<X>::unit == 1 || value - value == 0) return value;
    // Not finite. Products of bfloat16 numbers may be too large for a float, and their sum not.
    const long long stride = static_cast<long long>(p.B) * p.C, channels = head * 1LL * p.R;
    const X* d = static_cast<const X*>(p.dout) + channels + t * stride;
    const X* x = static_cast<const X*>(p.x) + channels + cut * stride;
    double exact = 0;
#pragma unroll 1
    for (int c = 0; c < p.R; ++c) exact += static_cast<double>(widen(d[c])) * widen(x[c]);
    return static_cast<F>(exact * p.scale * max_rows);
}

// Moderate windows, where there is more than one tile: of every REACH time steps, which rows the
// windows touch that are larger than a halo (offsets above 1.25). Nearly always there are none.
// A block takes 32 heads, and each of its warps a part of the time steps.
template <typename X> __device__ void reach(const Problem& p) {
    using F = typename Types<X>::Compute;
    constexpr int WARPS = 4, PART = REACH / WARPS;
    const int heads = p.B * p.H, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int head = blockIdx.z * 32 + lane, t0 = blockIdx.x * REACH + warp * PART;
    Offsets<X> offsets[PART];
#pragma unroll
    for (int i = 0; i < PART; ++i)
        offsets[i] = offsets_of<X>(p, min(t0 + i, p.T - 1), min(head, heads - 1));
    Pack<int, 2>* parts = shared_memory().take<Pack<int, 2>>(32 * WARPS);
    Pack<int, 2> rows = {{p.T, -1}};
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        const int t = min(t0 + i, p.T - 1);
        const double left = offsets[i].left, right = offsets[i].right;
        if (left * p.max_left < p.after && right * p.max_right < p.before) continue;
        const Window<F> w = window_of<X, F>(p, t, offsets[i]);
        if (w.lo - 1 >= t - p.after && w.hi + 1 <= t + p.before) continue;
        rows.v[0] = min(rows.v[0], w.lo - 1), rows.v[1] = max(rows.v[1], w.hi + 1);
    }
    parts[threadIdx.x] = rows;
    __syncthreads();
    if (warp > 0 || head >= heads) return;
#pragma unroll
    for (int k = 1; k < WARPS; ++k) {
        const Pack<int, 2> other = parts[lane + 32 * k];
        rows.v[0] = min(rows.v[0], other.v[0]), rows.v[1] = max(rows.v[1], other.v[1]);
    }
    const long long at = static_cast<long long>(blockIdx.x) * heads + head;
    reinterpret_cast<Pack<int, 2>*>(p.reach)[at] = rows;
}

// Are there such windows at a tile's rows, in some time steps of which not all are staged?
template <typename F>
__device__ inline bool reaches(const Problem& p, int head, const Tile<F>& tile, int t) {
    if (t >= tile.first && min(t + REACH, p.T) <= tile.first + tile.staged) return false;
    const Pack<int, 2> rows = reinterpret_cast<const Pack<int, 2>*>(
        p.reach)[static_cast<long long>(t / REACH) * (p.B * p.H) + head];
    return rows.v[0] < tile.t0 + tile.rows && rows.v[1] >= tile.t0;
}

// Adds what the time steps that are not staged contribute to rows `from` ... of a tile: to `all` of
// them, or one by one. Slow and rare. All threads of a block call it, with scratch for windows.
template <typename X, typename F, int N, int ROWS_>
__device__ void add_far(const Problem& p, int head, const Tile<F>& tile, Window<F>* windows,
                        const GlobalRows<X, N>& dout, bool active, int from,
                        Pack<F, N> (&rows)[ROWS_], Pack<F, N>& base, Pack<double, N>& all) {
    __syncthreads();
    all = widened<double>(base);
    const F unit = Types<X>::unit;
    from += tile.t0;
#pragma unroll 1
    for (int t = 0; t < p.T; t += REACH) {
        if (!reaches(p, head, tile, t)) continue;
        __syncthreads();
        const int own = t + threadIdx.x;
        if (threadIdx.x < REACH) {
            Window<F> w = {p.T + 1, p.T, 0, 0};
            if (own < p.T && (own < tile.first || own >= tile.first + tile.staged))
                w = window_of<X, F>(p, own, head);
            windows[threadIdx.x] = w;
        }
        __syncthreads();
        Pack<F, N> sum = {};
#pragma unroll 1
        for (int k = 0; k < REACH; ++k) {
            const Window<F> w = windows[k];
            if (!active || w.lo - 1 >= from + ROWS_ || w.hi + 1 < from) continue;
            const Pack<F, N> d = widened<F>(dout(t + k));
            if (w.lo <= from && w.hi >= from + ROWS_ - 1) {
                add(sum, d, unit);
                continue;
            }
#pragma unroll
            for (int r = 0; r < ROWS_; ++r) {
                const int row = from + r;
                const F part = row == w.lo - 1 ? w.left : row == w.hi + 1 ? w.right : 0;
                add(rows[r], d, unit * (row >= w.lo && row <= w.hi ? 1 : part));
            }
        }
        add(all, sum);
    }
    base = widened<F>(all);
}

// TILE: moderate windows, all in one. TOTALS and WALK: large windows, before and after the scan
// over chunks.
enum class Pass { TILE, TOTALS, WALK };

// Loads `count` rows of dout into shared memory, from time step `first` on: several are under way
// together.
template <int LANES, int SEGMENTS, typename X, int N>
__device__ inline void stage(Pack<X, N>* staged, const GlobalRows<X, N>& dout, int first,
                             int count) {
    constexpr int BATCH = 4;
#pragma unroll 1
    for (int begin = threadIdx.x / LANES; begin < count; begin += BATCH * SEGMENTS) {
        Pack<X, N> batch[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
            batch[k] = dout(first + min(begin + k * SEGMENTS, count - 1));
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
            if (begin + k * SEGMENTS < count) staged[(begin + k * SEGMENTS) * LANES] = batch[k];
    }
}

// From how much the running sum changes over each segment to its value before each, in double, a
// thread to a channel. It starts with the windows that are open before the tile, or with what the
// scan over chunks found; TOTALS hands over to that scan.
template <Pass pass, int N, int LANES, int SEGMENTS, typename F>
__device__ inline void scan_segments(const Problem& p, int head, int c, Pack<F, N>* changes,
                                     const Pack<F, N>* opens) {
    constexpr int CHANNELS = LANES * N;
    for (int i = threadIdx.x; i < min(CHANNELS, p.R - c); i += blockDim.x) {
        const long long at = blockIdx.z * (static_cast<long long>(p.B) * p.C)
                           + static_cast<long long>(head) * p.R + c + i;
        F* change = reinterpret_cast<F*>(changes) + i;
        const F* open = reinterpret_cast<const F*>(opens) + i;
        double sum = 0;
#pragma unroll 4
        for (int s = 0; s < SEGMENTS; ++s) sum += open[s * CHANNELS];
        if constexpr (pass == Pass::TOTALS) p.clipped[at] = sum, sum = 0;
        if constexpr (pass == Pass::WALK) sum = p.totals[at];
#pragma unroll 4
        for (int s = 0; s < SEGMENTS; ++s) {
            const F own = change[s * CHANNELS];
            change[s * CHANNELS] = static_cast<F>(sum);
            sum += own;
        }
        if constexpr (pass == Pass::TOTALS) p.totals[at] = sum;
    }
}

// Large windows, step 1: the ends of whole sequences are sorted, a thread to a time step and head;
// and between the first two kernels a block to a head. Windows from row 0 on have no left end.
enum class Step { COUNT, PLACE, RANK };

__device__ inline int* starts_of(const Problem& p, int head) {
    return p.starts + static_cast<long long>(head) * p.buckets;
}
template <typename F> __device__ inline End<F>* ends_of(const Problem& p, int head) {
    return static_cast<End<F>*>(p.entries) + head * (2LL * p.T);
}

template <typename X, Step step> __device__ void sort_all_ends(const Problem& p) {
    using F = typename Types<X>::Compute;
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int heads = p.B * p.H, head = at % heads;
    if (at / heads >= p.T) return;
    const int t = at / heads;
    const Window<F> w = window_of<X, F>(p, t, head);
    int* starts = starts_of(p, head);
    int* slots = p.slots + 2 * at;
    int* unordered = p.slots + (heads + head) * (2LL * p.T);
    for (int right = 0; right < 2; ++right) {
        const int row = row_of_end(w, right), key = 2 * t + right;
        if (row < 0 || row >= p.T) continue;
        if (step == Step::COUNT) slots[right] = atomicAdd(starts + row, 1);
        if (step == Step::PLACE) unordered[starts[row] + slots[right]] = key;
        if (step == Step::RANK) {
            int rank = starts[row];
            const int end = starts[row + 1];
            for (int k = rank; k < end; ++k) rank += unordered[k] < key;
            ends_of<F>(p, head)[rank] = end_of<X>(w, right, t);
        }
    }
}

__device__ inline void start_ends(const Problem& p) {
    constexpr int ITEMS = 8;
    int* warps = shared_memory().take<int>(32);
    int* starts = starts_of(p, blockIdx.x);
    int sum = 0, total;
    for (int begin = 0; begin < p.buckets; begin += ITEMS * blockDim.x) {
        const int first = begin + ITEMS * threadIdx.x;
        int own[ITEMS], count = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            count += own[i] = first + i < p.buckets ? starts[first + i] : 0;
        int start = sum + sum_before(count, warps, total);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (first + i < p.buckets) starts[first + i] = start;
            start += own[i];
        }
        sum += total;
        __syncthreads();
    }
}

template <Pass pass, typename X, int N, int LANES, int ROWS_, int THREADS>
__device__ void backward(const Problem& p) {
    using F = typename Types<X>::Compute;
    constexpr int SEGMENTS = THREADS / LANES;
    constexpr int UNROLL = pass == Pass::WALK && N < 8 ? 2 : 1;  // loads from global memory
    const int lane = threadIdx.x % LANES, segment = threadIdx.x / LANES;
    const int head = blockIdx.x;
    const unsigned int stride = p.B * p.C * static_cast<unsigned int>(sizeof(X));
    Shared shared = shared_memory();
    Tile<F> tile;
    tile.t0 = tile_start(p), tile.rows = min(p.tile, p.T - tile.t0);

    Pack<F, N>* changes = shared.take<Pack<F, N>>(2 * THREADS);
    Pack<F, N>* open_sums = changes + THREADS;
    F* dots = shared.take<F>(2 * SEGMENTS * ROWS_);
    tile.cuts = shared.take<Cuts>(SEGMENTS * ROWS_);
    Pack<X, N>* staged = nullptr;
    Window<F>* far_windows = nullptr;
    int* far = nullptr;
    if constexpr (pass == Pass::TILE) {
        tile.first = max(tile.t0 - p.before, 0);
        tile.staged = min(tile.t0 + tile.rows + p.after, p.T) - tile.first;
        tile.starts = shared.take<int>(SEGMENTS * ROWS_ + 1);
        tile.warps = shared.take<int>(32);
        far = shared.take<int>(2);
        tile.open_windows = far + 1;
        far_windows = shared.take<Window<F>>(REACH);
        staged = shared.take<Pack<X, N>>(p.staged * LANES);
        tile.ends = shared.take<End<F>>(2 * p.staged);
        tile.unordered = reinterpret_cast<int*>(changes);  // which are written later
        tile.opens = shared.take<int>(p.staged);
        if (threadIdx.x == 0) *far = 0;
    } else {
        tile.starts = starts_of(p, head) + tile.t0;
        tile.ends = ends_of<F>(p, head);
        for (int i = threadIdx.x; i < tile.rows; i += blockDim.x) {
            const Window<F> w = window_of<X, F>(p, tile.t0 + i, head);
            // TOTALS asks for the windows that no end opens, and WALK for the gradients.
            tile.cuts[i] = pass == Pass::WALK ? cuts_of(w) : Cuts{{w.lo <= 0, 0}};
        }
    }

    // dout of this lane's channels of the head, from channel c on.
    const auto global = [&](int c) {
        const long long at = static_cast<long long>(head) * p.R + (c < p.R ? c : 0);
        return GlobalRows<X, N>{static_cast<const X*>(p.dout) + at, stride};
    };
    if constexpr (pass == Pass::TILE) {
        stage<LANES, SEGMENTS>(staged + lane, global(lane * N), tile.first, tile.staged);
        sort_ends<X>(p, head, tile, SEGMENTS * ROWS_ + 1);
        if (p.reach)
#pragma unroll 1
            for (int t = threadIdx.x * REACH; t < p.T; t += THREADS * REACH)
                if (reaches(p, head, tile, t)) *far = 1;
    }
    __syncthreads();

#pragma unroll 1
    for (int first_c = 0; first_c < p.R; first_c += LANES * N) {
        const int c = first_c + lane * N;
        int from = segment * ROWS_;
        // There is one turn, mostly: what follows from `from` is not to be kept from turn to turn.
        asm volatile("" : "+r"(from));
        const bool active = c < p.R;
        const long long at = static_cast<long long>(head) * p.R + c;
        if (pass == Pass::TILE && first_c > 0) {
            stage<LANES, SEGMENTS>(staged + lane, global(c), tile.first, tile.staged);
            __syncthreads();
        }
        const Pack<X, N>* column = staged + lane;
        const auto dout = [=](int t) {
            if constexpr (pass == Pass::TILE) return column[t * LANES];
            else return global(c)(t);
        };
        const int own = pass == Pass::TILE ? tile.t0 - tile.first : tile.t0;  // t of row 0

        Pack<F, N> open = {}, rows[ROWS_];
        if constexpr (pass == Pass::TILE)
#pragma unroll 1
            for (int k = segment; k < *tile.open_windows; k += SEGMENTS)
                add(open, dout(tile.opens[k]));
        if constexpr (pass == Pass::TOTALS)
#pragma unroll 1
            for (int i = from; i < min(from + ROWS_, tile.rows); ++i)
                if (tile.cuts[i].v[0]) add(open, dout(own + i));
        open_sums[threadIdx.x] = open;
        if constexpr (pass == Pass::TOTALS)
            changes[threadIdx.x] = change<ROWS_, N>(tile.starts + from, tile.ends, dout);
        else
            changes[threadIdx.x] = walk<UNROLL>(rows, tile.starts + from, tile.ends, dout);
        __syncthreads();
        scan_segments<pass, N, LANES, SEGMENTS>(p, head, first_c, changes, open_sums);
        __syncthreads();
        if constexpr (pass == Pass::TOTALS) continue;
        Pack<F, N> base = changes[threadIdx.x];
        if constexpr (pass == Pass::TILE)
            if (*far) add_far(p, head, tile, far_windows, global(c), active, from, rows, base,
                              reinterpret_cast<Pack<double, N>*>(changes)[threadIdx.x]);
        const long long step = static_cast<long long>(p.B) * p.C;
        X* dx = static_cast<X*>(p.out) + at + (tile.t0 + from) * step;
        const F scale = scale_of_sums<X>(p);
#pragma unroll
        for (int r = 0; r < ROWS_; ++r)
#pragma unroll
            for (int n = 0; n < N; ++n) rows[r].v[n] += base.v[n];
        if (active && from + ROWS_ <= tile.rows) {
#pragma unroll
            for (int r = 0; r < ROWS_; ++r, dx += step) store(dx, rows[r], scale);
        } else if (active) {  // the last tile's last rows
#pragma unroll
            for (int r = 0; r < ROWS_; ++r, dx += step)
                if (from + r < tile.rows) store(dx, rows[r], scale);
        }

        constexpr int BATCH = 4, KEPT = 2 * BATCH < LANES ? 1 : 2 * BATCH / LANES;
#pragma unroll 1
        for (int begin = from; begin < from + ROWS_; begin += BATCH) {
            F values[2 * BATCH] = {};
            if (active && begin < tile.rows)
                add_dots(values, tile.cuts, static_cast<const X*>(p.x) + at, stride, begin,
                         tile.rows, [&](int i) { return dout(own + i); });
            sum_over_lanes<LANES>(values);
            if (lane * 2 * BATCH % LANES) continue;
#pragma unroll
            for (int k = 0; k < KEPT; ++k) {
                F& dot = dots[2 * begin + lane * 2 * BATCH / LANES + k];
                dot = first_c == 0 ? values[k] : dot + values[k];
            }
        }
        __syncthreads();
    }
    if constexpr (pass == Pass::TOTALS) return;

#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * tile.rows; i += THREADS) {
        const int right = i % 2, t = tile.t0 + i / 2, cut = tile.cuts[i / 2].v[right];
        if (void* gradients = right ? p.d_offset_right : p.d_offset_left)
            store_offset<X>(p, gradients, static_cast<long long>(t) * (p.B * p.H) + head,
                            gradient_of_offset<X>(p, head, dots[i], t, cut,
                                                  right ? p.max_right : p.max_left));
    }
}

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

// For one storage type X: kernels that move N channels at a time (`wide`: N divides R, and rows
// are aligned), kernels for any R (`narrow`), and those that need not tell the two apart.
#define TALK_WIDTH(type, X, N, UPDATE_N)                                                           \
    TALK_KERNEL(talk_forward, type, Problem, MAX_THREADS, sizeof(X) == 8 ? 1 : 2,                  \
                (forward<X, N, LANES, Table>(p)))                                                  \
    TALK_KERNEL(talk_forward_long, type, Problem, LONG_THREADS, sizeof(X) == 2 ? 1 : 2,            \
                (forward<X, N, LONG_LANES, SharedBases>(p)))                                       \
    TALK_KERNEL(talk_forward_sums, type, Problem, 256, 1, (forward_sums<X, N>(p)))                 \
    TALK_KERNEL(talk_forward_gather, type, Problem, 256, 1, (forward_gather<X, N>(p)))             \
    TALK_KERNEL(talk_update, type, Problem, 128, 1, (update<X, UPDATE_N>(p)))
#define TALK_BACKWARD(type, X, N, LANES, ROWS, THREADS, blocks)                                    \
    TALK_KERNEL(talk_backward, type, Problem, THREADS, blocks,                                     \
                (backward<Pass::TILE, X, N, LANES, ROWS, THREADS>(p)))                             \
    TALK_KERNEL(talk_backward_totals, type, Problem, THREADS, blocks,                              \
                (backward<Pass::TOTALS, X, N, LANES, ROWS, THREADS>(p)))                           \
    TALK_KERNEL(talk_backward_walk, type, Problem, THREADS, blocks,                                \
                (backward<Pass::WALK, X, N, LANES, ROWS, THREADS>(p)))
#define TALK_TYPE(type, X, N, UPDATE_N, LANES, ROWS)                                               \
    TALK_WIDTH(type##_wide, X, N, UPDATE_N)                                                        \
    TALK_WIDTH(type##_narrow, X, 1, 1)                                                             \
    TALK_BACKWARD(type##_wide, X, N, LANES, ROWS, 448, sizeof(X) == 8 ? 1 : 2)                     \
    TALK_KERNEL(talk_backward_short, type##_wide, Problem, 128, sizeof(X) == 8 ? 4 : 7,            \
                (backward<Pass::TILE, X, N, LANES, ROWS, 128>(p)))                                 \
    TALK_BACKWARD(type##_slim, X, N, 4, 4, 256, 2)                                                 \
    TALK_BACKWARD(type##_narrow, X, 1, 32, 8, 448, 2)                                              \
    TALK_KERNEL(talk_forward_bases, type, Problem, MAX_THREADS, 1, (forward_bases<X>(p)))          \
    TALK_KERNEL(talk_reach, type, Problem, 128, 1, (reach<X>(p)))                                  \
    TALK_KERNEL(talk_count_ends, type, Problem, 128, 1, (sort_all_ends<X, Step::COUNT>(p)))        \
    TALK_KERNEL(talk_start_ends, type, Problem, MAX_THREADS, 1, (start_ends(p)))                   \
    TALK_KERNEL(talk_place_ends, type, Problem, 128, 1, (sort_all_ends<X, Step::PLACE>(p)))        \
    TALK_KERNEL(talk_rank_ends, type, Problem, 128, 1, (sort_all_ends<X, Step::RANK>(p)))          \
    TALK_KERNEL(talk_scan_chunks, type, Problem, 128, 1, (scan_chunks(p)))

// The host compiles one type at a time (-DTALK_ONLY -DTALK_<type>); without, all of them are.
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
