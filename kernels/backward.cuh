// The backward pass: dx is the transpose of the forward pass. Reading rows upwards, dout[t] enters
// a running sum after row lo - 1 and leaves it at row hi + 1, and counts by its fractions at these
// two rows. So the ends of the windows are sorted by row, once for a head and not for a channel,
// and each thread walks a few rows of N channels, whose results stay in registers:
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
// row, and the tiles follow from the windows alone: the same bits at every run and, for windows
// that a tile can hold, behind any padding. The dots of dout with the rows that are cut, summed
// over the lanes, are the offsets' gradients.
//
// Moderate windows (talk_backward): a block stages dout for its tile and the halo, and sorts the
// ends in shared memory. Windows that are open before its first row are shared out among the
// segments. Those of time steps that are not staged (offsets above 1.25) are found through
// talk_reach, of which each block reads 8 bytes for 1,024 time steps, and added after the walk.
//
// Large windows: the ends of the whole sequence are sorted (talk_count_ends, talk_start_ends,
// talk_place_ends, talk_rank_ends), and talk_backward's code runs twice: for how much the running
// sum changes over each chunk (talk_backward_totals), and after the scan over chunks
// (talk_scan_chunks) for the rows (talk_backward_walk).

constexpr int REACH = 32;   // time steps that share an entry of `reach`
constexpr int SPAN = 1024;  // time steps that share one of its further entries
constexpr int DOTS = 4;     // time steps whose gradients of offsets are computed together
constexpr int BACKWARD_THREADS = 384;

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
__device__ inline End<F> end_of(const Problem& p, const Window<F>& w, int right, int t) {
    const F weight = weight_of_rows<X>(p);
    return right ? End<F>{t, weight * (w.right - 1), -weight} : End<F>{t, weight * w.left, weight};
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

// The sum over the block's threads before this one, and over all of its (at most 512) threads.
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
// of a row. A thread holds one window; `rows`, at most the number of threads, is what a block has
// room for.
template <typename X, typename F>
__device__ void sort_ends(const Problem& p, const Offsets<X>& offsets, const Tile<F>& tile,
                          int rows) {
    const int i = threadIdx.x, own = tile.first + i - tile.t0;
    int row[2] = {-1, -1}, slot[2], open = 0;
    End<F> ends[2];
    for (int r = i; r < rows; r += blockDim.x)
        tile.starts[r] = 0, tile.cuts[r] = Cuts{{NO_CUT, NO_CUT}};
    __syncthreads();
    if (i < tile.staged) {
        const Window<F> w = window_of<X, F>(p, tile.first + i, offsets);
        if (own >= 0 && own < tile.rows) tile.cuts[own] = cuts_of(w);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            row[e] = row_of_end(w, e) - tile.t0;
            ends[e] = end_of<X>(p, w, e, i);
            if (row[e] >= tile.rows) row[e] = -1;
            if (row[e] >= 0) slot[e] = atomicAdd(tile.starts + row[e], 1);
        }
        open = w.lo - 1 < tile.t0 && w.hi + 1 >= tile.t0;
    }
    __syncthreads();
    int total;  // of ends, and 65,536 times that of open windows
    const int count = (i < rows ? tile.starts[i] : 0) + (open << 16);
    const int before = sum_before(count, tile.warps, total);
    if (i < rows) tile.starts[i] = before & 0xffff;
    if (open) tile.opens[before >> 16] = i;
    if (i == 0) tile.starts[rows] = total & 0xffff, *tile.open_windows = total >> 16;
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

// Row t of a column of channels; `stride` is in bytes: one instruction to an address, unless the
// compiler widens the stride outside of a loop.
template <typename X>
__device__ inline X* row_at(X* column, unsigned int stride, int t) {
    TALK_OPAQUE(stride);
    const unsigned long long bytes = static_cast<unsigned long long>(stride) * unsigned(t);
    return reinterpret_cast<X*>(const_cast<char*>(reinterpret_cast<const char*>(column)) + bytes);
}

// Rows of a thread's channels, in global memory.
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
        // One copy, not one for a row that has ends and one for a row that has none.
#pragma unroll
        for (int n = 0; n < N; ++n) TALK_OPAQUE(rows[r].v[n]);
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

// Dots of dout(0), dout(1) ... with the rows of x that `cuts` says, left and right by turns; their
// loads are under way together.
template <typename F, int VALUES, typename X, int N, typename Rows>
__device__ inline void add_dots(F (&values)[VALUES], const Cuts* cuts, const GlobalRows<X, N>& x,
                                const Rows& dout) {
    Pack<X, N> rows[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) rows[i] = x(max(cuts[i / 2].v[i % 2], 0));
#pragma unroll
    for (int i = 0; i < VALUES; i += 2) {
        const Pack<F, N> d = widened<F>(dout(i / 2));
        const Pack<F, N> left = widened<F>(rows[i]), right = widened<F>(rows[i + 1]);
#pragma unroll
        for (int n = 0; n < N; ++n) {
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

// Moderate windows, where there is more than one tile: of every REACH time steps, and of every
// SPAN, which rows the windows touch that are larger than a halo (offsets above 1.25). Nearly
// always there are none. A block takes a span of 32 heads, and each of its warps REACH time steps.
template <typename X> __device__ void reach(const Problem& p) {
    using F = typename Types<X>::Compute;
    constexpr int BATCH = 8;  // loads that are under way together
    const int heads = p.B * p.H, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int head = blockIdx.x * 32 + lane, t0 = blockIdx.z * SPAN + warp * REACH;
    Pack<int, 2>* parts = shared_memory().take<Pack<int, 2>>(SPAN);
    Pack<int, 2>* entries = reinterpret_cast<Pack<int, 2>*>(p.reach) + head;
    Pack<int, 2> rows = {{p.T, -1}};
#pragma unroll 1
    for (int first = t0; first < min(t0 + REACH, p.T); first += BATCH) {
        Offsets<X> offsets[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            offsets[i] = offsets_of<X>(p, min(first + i, p.T - 1), min(head, heads - 1));
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int t = min(first + i, p.T - 1);
            const double left = offsets[i].left, right = offsets[i].right;
            if (left * p.max_left < p.after && right * p.max_right < p.before) continue;
            const Window<F> w = window_of<X, F>(p, t, offsets[i]);
            if (w.lo - 1 >= t - p.after && w.hi + 1 <= t + p.before) continue;
            rows.v[0] = min(rows.v[0], w.lo - 1), rows.v[1] = max(rows.v[1], w.hi + 1);
        }
    }
    parts[threadIdx.x] = rows;
    if (t0 < p.T && head < heads) entries[static_cast<long long>(t0 / REACH) * heads] = rows;
    __syncthreads();
    if (warp > 0 || head >= heads) return;
#pragma unroll 8
    for (int k = 1; k < SPAN / REACH; ++k) {
        const Pack<int, 2> other = parts[lane + 32 * k];
        rows.v[0] = min(rows.v[0], other.v[0]), rows.v[1] = max(rows.v[1], other.v[1]);
    }
    entries[static_cast<long long>((p.T - 1) / REACH + 1 + blockIdx.z) * heads] = rows;
}

// Whether an entry of `reach` lists windows that touch a tile's rows.
template <typename F>
__device__ inline bool touches(const Problem& p, int head, const Tile<F>& tile, int entry) {
    const Pack<int, 2> rows = reinterpret_cast<const Pack<int, 2>*>(
        p.reach)[static_cast<long long>(entry) * (p.B * p.H) + head];
    return rows.v[0] < tile.t0 + tile.rows && rows.v[1] >= tile.t0;
}
// The same for the span of time step t.
template <typename F>
__device__ inline bool span_touches(const Problem& p, int head, const Tile<F>& tile, int t) {
    return touches(p, head, tile, (p.T - 1) / REACH + 1 + t / SPAN);
}
// The same for the REACH time steps from t on; false if all of them are staged.
template <typename F>
__device__ inline bool reaches(const Problem& p, int head, const Tile<F>& tile, int t) {
    if (t >= tile.first && min(t + REACH, p.T) <= tile.first + tile.staged) return false;
    return touches(p, head, tile, t / REACH);
}

// Adds what the time steps that are not staged contribute to rows `from` ... of a tile: to `all` of
// them, or one by one. Slow and rare. All threads of a block call it, with scratch for windows.
template <typename X, typename F, int N, int ROWS_>
__device__ void add_far(const Problem& p, int head, const Tile<F>& tile, Window<F>* windows,
                        const GlobalRows<X, N>& dout, bool active, int from,
                        Pack<F, N> (&rows)[ROWS_], Pack<F, N>& base, Pack<double, N>& all) {
    __syncthreads();
    all = widened<double>(base);
    const F weight = weight_of_rows<X>(p);
    from += tile.t0;
#pragma unroll 1
    for (int t = 0; t < p.T; t += REACH) {
        if (t % SPAN == 0 && !span_touches(p, head, tile, t)) {
            t += SPAN - REACH;
            continue;
        }
        if (!reaches(p, head, tile, t)) continue;
        __syncthreads();
        const int own = t + threadIdx.x;
        if (threadIdx.x < REACH) {
            Window<F> w = {0x7fffffff, -2, 0, 0};  // which no segment has rows of
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
                add(sum, d, weight);
                continue;
            }
#pragma unroll
            for (int r = 0; r < ROWS_; ++r) {
                const int row = from + r;
                const F part = row == w.lo - 1 ? w.left : row == w.hi + 1 ? w.right : 0;
                add(rows[r], d, weight * (row >= w.lo && row <= w.hi ? 1 : part));
            }
        }
        add(all, sum);
    }
    base = widened<F>(all);
}

// TILE: moderate windows, all in one. TOTALS and WALK: large windows, before and after the scan
// over chunks.
enum class Pass { TILE, TOTALS, WALK };

// Copies `count` rows of dout into shared memory, from time step `first` on; see copy_later.
template <int LANES, int SEGMENTS, typename X, int N>
__device__ inline void stage(Row<Pack<X, N>, LANES>* staged, const GlobalRows<X, N>& dout,
                             int first, int count) {
#pragma unroll 4
    for (int row = threadIdx.x / LANES; row < count; row += SEGMENTS)
        copy_later<X, N>(&staged[row][0], row_at(dout.column, dout.stride, first + row));
}

// Prefetches the block's rows of x, the channels of the first turn: the gradients of the offsets
// take some of them in the end.
template <int THREADS, int CHANNELS, typename X, int N>
__device__ inline void prefetch_rows(const GlobalRows<X, N>& x, int R, int first, int count) {
    constexpr int LINE = 128 / sizeof(X), LINES = CHANNELS / LINE < 1 ? 1 : CHANNELS / LINE;
    for (int i = threadIdx.x; i < count * LINES; i += THREADS)
        if (i % LINES * LINE < R)
            prefetch(row_at(x.column, x.stride, first + i / LINES) + i % LINES * LINE);
}

// From how much the running sum changes over each segment to its value before each, in double. A
// thread takes a channel and N neighbouring segments; what these add up to goes through `sums`. It
// starts with the windows that are open before the tile, or with what the scan over chunks found;
// TOTALS hands over to that scan. All threads of a block call it.
template <Pass pass, int N, int LANES, int SEGMENTS, int OPENS, typename F>
__device__ inline void scan_segments(const Problem& p, int head, int c, Pack<F, N>* changes,
                                     const Pack<F, N>* opens, double* sums) {
    static_assert(SEGMENTS % N == 0, "each thread takes N segments");
    constexpr int CHANNELS = LANES * N, GROUPS = SEGMENTS / N;
    const int i = threadIdx.x % CHANNELS, group = threadIdx.x / CHANNELS;
    const long long at = blockIdx.z * (static_cast<long long>(p.B) * p.C)
                       + static_cast<long long>(head) * p.R + c + i;
    F* change = reinterpret_cast<F*>(changes) + group * (N * CHANNELS) + i;
    const F* open = reinterpret_cast<const F*>(opens) + i;
    F own[N];
    double sum = 0;
#pragma unroll
    for (int s = 0; s < N; ++s) sum += own[s] = change[s * CHANNELS];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (c + i >= p.R || (pass == Pass::TOTALS && group > 0)) return;
    sum = 0;
    if constexpr (pass == Pass::WALK)
        sum = p.totals[at];
    else
#pragma unroll 4
        for (int s = 0; s < OPENS; ++s) sum += open[s * CHANNELS];
    if constexpr (pass == Pass::TOTALS) p.clipped[at] = sum, sum = 0;
#pragma unroll 1
    for (int k = 0; k < (pass == Pass::TOTALS ? GROUPS : group); ++k) sum += sums[k * CHANNELS + i];
    if constexpr (pass == Pass::TOTALS) {
        p.totals[at] = sum;
    } else {
#pragma unroll
        for (int s = 0; s < N; ++s) {
            change[s * CHANNELS] = static_cast<F>(sum);
            sum += own[s];
        }
    }
}

// Large windows, step 1: the ends of whole sequences are sorted, one thread per time step and
// head; and between the first two kernels one block per head. Windows from row 0 on have no left
// end.
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
            ends_of<F>(p, head)[rank] = end_of<X>(p, w, right, t);
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
    // Segments that share out the open windows: as many in every kernel, for the same bits.
    constexpr int OPENS = pass == Pass::TILE ? 4 : SEGMENTS;
    constexpr int UNROLL = pass == Pass::WALK && N < 8 ? 2 : 1;  // loads from global memory
    const int lane = threadIdx.x % LANES, segment = threadIdx.x / LANES;
    const int head = blockIdx.x;
    const unsigned int stride = p.B * p.C * static_cast<unsigned int>(sizeof(X));
    Shared shared = shared_memory();
    Tile<F> tile;
    tile.t0 = tile_start(p), tile.rows = min(p.tile, p.T - tile.t0);

    Pack<F, N>* changes = shared.take<Pack<F, N>>(2 * THREADS);
    Pack<F, N>* open_sums = changes + THREADS;
    double* sums = shared.take<double>(THREADS);
    F* dots = shared.take<F>(2 * SEGMENTS * ROWS_);
    tile.cuts = shared.take<Cuts>(SEGMENTS * ROWS_);
    Row<Pack<X, N>, LANES>* staged = nullptr;
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
        staged = shared.take_rows<Pack<X, N>, LANES>(p.staged);
        tile.ends = shared.take<End<F>>(2 * p.staged);
        tile.unordered = reinterpret_cast<int*>(changes);  // which are written later
        tile.opens = shared.take<int>(p.staged);
        if (threadIdx.x == 0) *far = 0;
    } else {
        tile.starts = starts_of(p, head) + tile.t0;
        tile.ends = ends_of<F>(p, head);
        for (int i = threadIdx.x; i < SEGMENTS * ROWS_; i += blockDim.x) {
            const Window<F> w = window_of<X, F>(p, min(tile.t0 + i, p.T - 1), head);
            // TOTALS asks for the windows that no end opens, and WALK for the gradients.
            tile.cuts[i] = pass == Pass::WALK ? cuts_of(w) : Cuts{{w.lo <= 0, 0}};
        }
    }

    // Channels c ... of the head in dout or x; the first ones in place of those that do not exist.
    const auto rows_of = [&](const void* tensor, int c) {
        const long long at = static_cast<long long>(head) * p.R + (c < p.R ? c : 0);
        return GlobalRows<X, N>{static_cast<const X*>(tensor) + at, stride};
    };
    if constexpr (pass == Pass::TILE) {
        // What is loaded first is on its way while the ends are sorted.
        const int own = min(tile.first + static_cast<int>(threadIdx.x), p.T - 1);
        const Offsets<X> offsets = offsets_of<X>(p, own, head);
        bool touched = false;
        if (p.reach)
#pragma unroll 1
            for (int t = threadIdx.x * SPAN; t < p.T; t += THREADS * SPAN)
                touched |= span_touches(p, head, tile, t);
        stage<LANES, SEGMENTS>(staged, rows_of(p.dout, lane * N), tile.first, tile.staged);
        prefetch_rows<THREADS, LANES * N>(rows_of(p.x, 0), p.R, tile.t0, tile.rows);
        sort_ends<X>(p, offsets, tile, SEGMENTS * ROWS_);
        if (touched) *far = 1;
        finish_copies();
    }
    __syncthreads();

#pragma unroll 1
    for (int first_c = 0; first_c < p.R; first_c += LANES * N) {
        const int c = first_c + lane * N;
        int from = segment * ROWS_;
        // Mostly there is one turn: without this, the compiler would keep in registers what it
        // computes from `from`, for turns that never come.
        TALK_OPAQUE(from);
        const bool active = c < p.R;
        if (pass == Pass::TILE && first_c > 0) {
            stage<LANES, SEGMENTS>(staged, rows_of(p.dout, c), tile.first, tile.staged);
            finish_copies();
            __syncthreads();
        }
        const auto dout = [=](int t) {
            if constexpr (pass == Pass::TILE) return staged[t][0];
            else return rows_of(p.dout, c)(t);
        };
        const int own = pass == Pass::TILE ? tile.t0 - tile.first : tile.t0;  // t of row 0

        Pack<F, N> open = {}, rows[ROWS_];
        if constexpr (pass == Pass::TILE) {
            const int windows = segment < OPENS ? *tile.open_windows : 0;
#pragma unroll 1
            for (int k = segment; k < windows; k += OPENS)
                add(open, dout(tile.opens[k]), weight_of_rows<X>(p));
        }
        if constexpr (pass == Pass::TOTALS)
#pragma unroll 1
            for (int i = from; i < min(from + ROWS_, tile.rows); ++i)
                if (tile.cuts[i].v[0]) add(open, dout(own + i), weight_of_rows<X>(p));
        open_sums[threadIdx.x] = open;
        if constexpr (pass == Pass::TOTALS)
            changes[threadIdx.x] = change<ROWS_, N>(tile.starts + from, tile.ends, dout);
        else
            changes[threadIdx.x] = walk<UNROLL>(rows, tile.starts + from, tile.ends, dout);
        __syncthreads();
        scan_segments<pass, N, LANES, SEGMENTS, OPENS>(p, head, first_c, changes, open_sums, sums);
        __syncthreads();
        if constexpr (pass == Pass::TOTALS) continue;
        Pack<F, N> base = changes[threadIdx.x];
        if constexpr (pass == Pass::TILE)
            if (*far) add_far(p, head, tile, far_windows, rows_of(p.dout, c), active, from, rows,
                              base, reinterpret_cast<Pack<double, N>*>(changes)[threadIdx.x]);
        X* dx = row_at(static_cast<X*>(p.out) + static_cast<long long>(head) * p.R + c, stride,
                       tile.t0 + from);
        const F scale = scale_of_weighted<X>(p);
#pragma unroll
        for (int r = 0; r < ROWS_; ++r)
#pragma unroll
            for (int n = 0; n < N; ++n) rows[r].v[n] += base.v[n];
        if (active && from + ROWS_ <= tile.rows) {
#pragma unroll
            for (int r = 0; r < ROWS_; ++r) store(row_at(dx, stride, r), rows[r], scale);
        } else if (active) {  // the last tile's last rows
#pragma unroll
            for (int r = 0; r < ROWS_; ++r)
                if (from + r < tile.rows) store(row_at(dx, stride, r), rows[r], scale);
        }

        // A warp whose rows all lie beyond the tile's leaves this out. In other warps, segments
        // beyond the tile's rows repeat its last ones, for results that nobody reads: all lanes of
        // a warp must take part in the sums over lanes.
        constexpr int WARP_ROWS = 32 / LANES * ROWS_;
        constexpr int KEPT = 2 * DOTS < LANES ? 1 : 2 * DOTS / LANES;
        if ((from & -WARP_ROWS) < tile.rows) {
#pragma unroll 1
            for (int begin = from; begin < from + ROWS_; begin += DOTS) {
                const int row = min(begin, (tile.rows - 1) / DOTS * DOTS);
                F values[2 * DOTS] = {};
                add_dots(values, tile.cuts + row, rows_of(p.x, c), [&](int i) {
                    return dout(pass == Pass::TILE ? own + row + i : min(own + row + i, p.T - 1));
                });
#pragma unroll
                for (int i = 0; i < 2 * DOTS; ++i) values[i] = active ? values[i] : 0;
                sum_over_lanes<LANES>(values);
                if (lane * 2 * DOTS % LANES) continue;
#pragma unroll
                for (int k = 0; k < KEPT; ++k) {
                    F& dot = dots[2 * begin + lane * 2 * DOTS / LANES + k];
                    dot = first_c == 0 ? values[k] : dot + values[k];
                }
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

// Large windows, between TOTALS and WALK: from the change over each chunk to the running sum before
// it, which starts with the windows that start at row 0.
__device__ inline void scan_chunks(const Problem& p) {
    const long long stride = static_cast<long long>(p.B) * p.C;
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int chunks = (p.T + p.tile - 1) / p.tile;
    if (at >= stride) return;
    double sum = 0;
#pragma unroll 16
    for (int chunk = 0; chunk < chunks; ++chunk) sum += p.clipped[chunk * stride + at];
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
