// The forward pass.
//
// A block stages its tile of rows and the halo that windows reach, and holds prefix sums of them,
// in the type that is computed in. They start anew in every unit of UNIT rows: so they stay small,
// and their error depends neither on T nor on how short a window is. With units of 4 rows:
//
//     row              0    1    2    3  |  4    5    6    7  |  8    9  ...
//     prefix sum       0   x0  x0-1 x0-2 |  0   x4  x4-5 x4-6 |  0   x8           before the row
//     unit                    0          |         1          |      2
//
// A window takes four of them, two at each end, for the row there that may be cut, and what the
// units from that of its first end to that before its last add up to. Tiles follow from the
// windows, and additions come in the order of rows, so that padding changes no bit (but the last
// one of float64 where windows are large). A value of x that is not finite can spread to later
// windows of its unit, as over any prefix sum.
//
// talk_forward takes the sums of units from a table, for windows of some 100 rows on either side.
// For those beyond, prefix sums stand in global memory (talk_forward_sums, talk_forward_bases,
// talk_forward_gather): an element moves 16 bytes through memory in float32, where a tile moves 8,
// whatever the window. Blocks that held thousands of rows of few channels took twice as long on an
// H100.

// Prefix sums within units of UNIT rows: row r of what is staged lies in unit r / UNIT, and
// local[r + r / UNIT] is the sum of the rows of its unit before it. So a unit takes UNIT + 1 rows,
// the last of which is its total. Staged row r is time step origin + r; at the start of a sequence
// row 0 stands for time step -1, which is 0.
constexpr int SEGMENTS = UNIT / ROWS;

// Rows of packs in shared memory: those of the lanes stand side by side.
template <typename V, int N> struct SharedPrefix {
    Pack<V, N>* first;

    static __device__ SharedPrefix take(Shared& shared, int rows) {
        return {*shared.take_rows<Pack<V, N>, LANES>(rows)};
    }
    static __device__ int place(int row) { return row * LANES; }
    __device__ Pack<V, N> at(int place) const { return first[place]; }
    __device__ Pack<V, N> operator[](int row) const { return first[place(row)]; }
    __device__ void put(int row, const Pack<V, N>& whole) const { first[place(row)] = whole; }
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
template <typename F, typename X, int N, typename Prefix>
__device__ inline void scan_segment(Pack<X, N> (&rows)[ROWS], const Prefix& local, int segment,
                                    F weight, unsigned int zero) {
    const int place = threadIdx.x / LANES % SEGMENTS, row = segment * ROWS + segment / SEGMENTS;
    Pack<F, N> total = {}, earlier = {}, sum = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) add(total, rows[i], weight);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int before = SEGMENTS - 1; before > 0; --before) {
            const F other = __shfl_up_sync(0xffffffffu, total.v[n], before * LANES);
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
// its ends, from that of row lo - 1 to that before row hi + 1's. A Table or Bases give their sum.
//
// A table of the sums of up to spans - 1 units from each unit on, for windows of a few units. A
// window is kept as the places in shared memory of all that it takes.
template <typename F, int N> struct Table {
    using Prefix = SharedPrefix<F, N>;
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

// What all the units before each unit add up to, in double, for windows of any length; all of it in
// global memory.
template <typename F, int N> struct Bases {
    struct Window {
        int lo, hi;
        F left, right;
    };
    GlobalPrefix<double, N> sums;

    __device__ Window window(int lo, int hi, F left, F right) const {
        return {lo + lo / UNIT, hi + hi / UNIT, left, right};
    }
    __device__ Pack<F, N> sum(const GlobalPrefix<F, N>& local, const Window& w) const {
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
template <typename X, typename F, int N>
__device__ Pack<F, N> far_window(const Problem& p, int t, int head, const X* column,
                                 long long stride, const SharedPrefix<F, N>& local, int origin,
                                 int staged) {
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
template <typename X, int N> __device__ void forward(const Problem& p) {
    using F = typename Types<X>::Compute;
    const int segment = threadIdx.x / LANES, segments = blockDim.x / LANES, head = blockIdx.x;
    const int c = (blockIdx.y * LANES + threadIdx.x % LANES) * N;
    const int t0 = tile_start(p), tile = min(p.tile, p.T - t0);
    const int origin = max(t0 - p.before, -1), staged = p.units * UNIT;
    const long long stride = static_cast<long long>(p.B) * p.C;
    const long long at = static_cast<long long>(head) * p.R + (c < p.R ? c : 0);
    const X* column = static_cast<const X*>(p.x) + at;

    Shared shared = shared_memory();
    const auto local = SharedPrefix<F, N>::take(shared, p.units * (UNIT + 1));
    const auto units = Table<F, N>::take(shared, p.units, p.spans);
    auto* windows = shared.take<typename Table<F, N>::Window>(p.tile);
    int* any_far = shared.take<int>(1);
    if (threadIdx.x == 0) *any_far = 0;

    const F weight = weight_of_rows<X>(p);
    bool far = false;
    // A segment and a window for each thread. The last tile leaves out what lies beyond the
    // sequence, a warp at a time.
    const int own = threadIdx.x, row = segment * ROWS, warp_row = row - own % 32 / LANES * ROWS;
    const bool loads = warp_row < staged && origin + warp_row <= p.T;
    Pack<X, N> rows[ROWS];
    if (loads) load_segment(rows, column, stride, origin + row, p.T);
    const Offsets<X> offsets = offsets_of<X>(p, t0 + min(own, tile - 1), head);
    if (own < tile) {
        const Window<F> w = window_of<X, F>(p, t0 + own, offsets);
        const int lo = w.lo - 1 - origin, hi = w.hi + 1 - origin;
        windows[own] = units.window(lo, hi, w.left, w.right, lo >= 0 && hi < staged);
        far = windows[own].far();
    }
    if (loads) scan_segment<F>(rows, local, segment, weight, p.T >> 31);
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
            store(out + i * stride,
                  far_window<X>(p, t0 + i, head, column, stride, local, origin, staged), scale);
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
    scan_segment<F>(rows, local, segment, weight_of_rows<X>(p), p.T >> 31);
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
    const Bases<F, N> units{{p.bases + at, stride}};
    auto* windows = shared_memory().take<typename Bases<F, N>::Window>(p.tile);
    for (int i = threadIdx.x; i < tile; i += blockDim.x) {
        const Window<F> w = window_of<X, F>(p, t0 + i, head);
        windows[i] = units.window(w.lo, w.hi + 2, w.left, w.right);
    }
    __syncthreads();
    if (c >= p.R) return;
    for (int i = segment; i < tile; i += segments)
        store(static_cast<X*>(p.out) + at + (t0 + i) * stride, units.sum(local, windows[i]),
              scale_of_weighted<X>(p));
}
