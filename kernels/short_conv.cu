// The CUDA kernels of the short convolution that may stand before the TaLK operator, forward,
// backward and step by step, for every dtype:
//
//     out[t] = weight[0] x[t - left] + ... + weight[taps - 1] x[t - left + taps - 1]
//
// Rows that do not exist are left out. x is (T, B, C) and weight is (taps, C), both contiguous. A
// thread walks a run of rows of one sentence, of N channels: what it reads again is in the cache.

#include "types.cuh"
#include "ring.cuh"

constexpr int TAPS = 8;  // whose gradients are summed at a time: as many as registers hold

// Everything a launch needs, passed by value; Python reads the list of its members here.
struct ShortProblem {
    const void* x;       // (T, B, C)
    const void* dout;    // (T, B, C)
    const void* weight;  // (taps, C)
    void* out;           // (T, B, C): out, or dx in the backward pass
    void* d_weight;      // (taps, C)
    double* sums;        // (runs, taps, C): what each run adds to d_weight
    void* ring;          // (taps, columns, C) of a decoder, in what x is computed in
    int* origin;         // (taps, B): the column of a slot of each sequence; null for its own
    int T, B, C;
    int taps, left;      // left: the taps that read earlier rows
    int rows;            // of a run
    int steps, columns;  // of a decoder: the steps before these
};

struct Run {
    int c, from, to, index;  // rows from ... to - 1
    long long at;            // of channel c in a row

    template <int N> static __device__ Run of_thread(const ShortProblem& p) {
        const int packs = p.C / N;
        const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
        const int index = static_cast<int>(thread / packs), from = index / p.B * p.rows;
        const int c = static_cast<int>(thread % packs) * N;
        return Run{c, from, min(from + p.rows, p.T), index,
                   static_cast<long long>(index % p.B) * p.C + c};
    }
};

template <typename F, typename X, int N>
__device__ inline void multiply_add(Pack<F, N>& sum, const Pack<F, N>& a, const Pack<X, N>& b) {
#pragma unroll
    for (int n = 0; n < N; ++n) sum.v[n] += a.v[n] * wide(b, n);
}

template <typename X, int N> __device__ void short_forward(const ShortProblem& p) {
    using F = typename Types<X>::Compute;
    const Run run = Run::of_thread<N>(p);
    const long long stride = static_cast<long long>(p.B) * p.C;
    const X* x = static_cast<const X*>(p.x) + run.at;
    const X* weight = static_cast<const X*>(p.weight) + run.c;
    for (int t = run.from; t < run.to; ++t) {
        Pack<F, N> sum = {};
        const int end = min(p.taps, p.T - t + p.left);
        for (int k = max(p.left - t, 0); k < end; ++k) {
            const Pack<X, N> tap = load<X, N>(weight + static_cast<long long>(k) * p.C);
            multiply_add(sum, widened<F>(tap), load<X, N>(x + (t - p.left + k) * stride));
        }
        store(static_cast<X*>(p.out) + run.at + t * stride, sum, static_cast<F>(1));
    }
}

// dx[t] = sum of weight[k] dout[t + left - k], and what the run adds to d_weight, TAPS taps a time.
template <typename X, int N> __device__ void short_backward(const ShortProblem& p) {
    using F = typename Types<X>::Compute;
    const Run run = Run::of_thread<N>(p);
    const long long stride = static_cast<long long>(p.B) * p.C;
    const X* x = static_cast<const X*>(p.x) + run.at;
    const X* dout = static_cast<const X*>(p.dout) + run.at;
    const X* weight = static_cast<const X*>(p.weight) + run.c;
    if (run.from >= run.to) return;
    for (int first = 0; first < p.taps; first += TAPS) {
        Pack<F, N> sums[TAPS] = {};
        for (int t = run.from; t < run.to; ++t) {
            const Pack<F, N> row = widened<F>(load<X, N>(x + t * stride));
            Pack<F, N> dx = {};
            const auto add_tap = [&](int k, Pack<F, N>& sum) {
                const int from = t + p.left - k;
                if (k >= p.taps || from < 0 || from >= p.T) return;
                const Pack<X, N> g = load<X, N>(dout + from * stride);
                const Pack<X, N> tap = load<X, N>(weight + static_cast<long long>(k) * p.C);
                multiply_add(sum, row, g);
                multiply_add(dx, widened<F>(tap), g);
            };
#pragma unroll
            for (int i = 0; i < TAPS; ++i) add_tap(first + i, sums[i]);
            if (first == 0) {
                Pack<F, N> unused = {};
                for (int k = TAPS; k < p.taps; ++k) add_tap(k, unused);
                store(static_cast<X*>(p.out) + run.at + t * stride, dx, static_cast<F>(1));
            }
        }
#pragma unroll
        for (int i = 0; i < TAPS; ++i)
            if (first + i < p.taps)
                for (int n = 0; n < N; ++n)
                    p.sums[(static_cast<long long>(run.index) * p.taps + first + i) * p.C
                             + run.c + n] = sums[i].v[n];
    }
}

// The next T outputs of a causal sequence, after p.steps others, whose last `taps` rows stand in a
// ring. A thread takes N channels.
template <typename X, int N> __device__ void short_update(const ShortProblem& p) {
    using F = typename Types<X>::Compute;
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int packs = p.C / N, b = at / packs, c = at % packs * N;
    if (b >= p.B) return;
    const X* weight = static_cast<const X*>(p.weight) + c;
    const Ring<F, N> ring{p.ring, p.origin, p.columns, p.B, p.C, b, c};
    for (int s = 0; s < p.T; ++s) {
        const int t = p.steps + s;
        const long long step = (static_cast<long long>(s) * p.B + b) * p.C + c;
        Pack<F, N> sum = {};
        for (int k = max(p.taps - 1 - t, 0); k < p.taps - 1; ++k) {
            const int slot = (t + 1 + k) % p.taps;  // of step t - (taps - 1) + k
            multiply_add(sum, ring.at(slot),
                         load<X, N>(weight + static_cast<long long>(k) * p.C));
        }
        const Pack<F, N> row = widened<F>(load<X, N>(static_cast<const X*>(p.x) + step));
        multiply_add(sum, row, load<X, N>(weight + static_cast<long long>(p.taps - 1) * p.C));
        ring.put(t % p.taps, row);
        store(static_cast<X*>(p.out) + step, sum, static_cast<F>(1));
    }
}

// d_weight: a thread adds up one number of it over all runs, in their order.
template <typename X> __device__ void short_weights(const ShortProblem& p) {
    const long long numbers = static_cast<long long>(p.taps) * p.C;
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= numbers) return;
    const int runs = (p.T + p.rows - 1) / p.rows * p.B;
    double sum = 0;
#pragma unroll 16
    for (int run = 0; run < runs; ++run) sum += p.sums[run * numbers + at];
    narrow(static_cast<typename Types<X>::Compute>(sum), static_cast<X*>(p.d_weight)[at]);
}

// For one storage type X: kernels that move N channels at a time (`wide`: N divides C, and rows
// are aligned), and kernels for any C (`narrow`).
#define SHORT_WIDTH(type, X, N)                                                                   \
    TALK_KERNEL(talk_short_forward, type, ShortProblem, 128, 1, (short_forward<X, N>(p)))         \
    TALK_KERNEL(talk_short_backward, type, ShortProblem, 128, 1, (short_backward<X, N>(p)))       \
    TALK_KERNEL(talk_short_update, type, ShortProblem, 128, 1, (short_update<X, N>(p)))
#define SHORT_TYPE(type, X, N)                                                                    \
    SHORT_WIDTH(type##_wide, X, N)                                                                \
    SHORT_WIDTH(type##_narrow, X, 1)                                                              \
    TALK_KERNEL(talk_short_weights, type, ShortProblem, 128, 1, (short_weights<X>(p)))

#if !defined(TALK_ONLY) || defined(TALK_float64)
SHORT_TYPE(float64, double, 2)
#endif
#if !defined(TALK_ONLY) || defined(TALK_float32)
SHORT_TYPE(float32, float, 4)
#endif
#if !defined(TALK_ONLY) || defined(TALK_float16)
SHORT_TYPE(float16, float16, 4)
#endif
#if !defined(TALK_ONLY) || defined(TALK_bfloat16)
SHORT_TYPE(bfloat16, bfloat16, 4)
#endif
