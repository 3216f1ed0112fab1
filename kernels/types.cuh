// The types of elements, and packs of neighbouring channels: what every kernel file shares.
//
// talk_fairseq/ops/kernel_source.py puts the text of a file where another includes it: NVRTC
// compiles without any header, and CuPy's cache on disk knows a source by its text alone.

#ifndef TALK_HALF_TO_FLOAT
__device__ inline float talk_half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ inline unsigned short talk_float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// Hides from the compiler how a value came about, so that it computes nothing from it in advance.
__device__ inline void talk_opaque(int& number) { asm volatile("" : "+r"(number)); }
__device__ inline void talk_opaque(unsigned int& number) { asm volatile("" : "+r"(number)); }
__device__ inline void talk_opaque(float& number) { asm volatile("" : "+f"(number)); }
__device__ inline void talk_opaque(double& number) { asm volatile("" : "+d"(number)); }
// Asynchronous copies from global to shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <int bytes> __device__ inline void talk_copy_later(void* shared, const void* from) {
    const unsigned int to = static_cast<unsigned int>(__cvta_generic_to_shared(shared));
    if constexpr (bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(bytes)
                     : "memory");
}
__device__ inline void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#define TALK_COPIES_LATER true
#else
template <int bytes> __device__ inline void talk_copy_later(void*, const void*) {}
__device__ inline void finish_copies() {}
#define TALK_COPIES_LATER false
#endif
// Prefetches a line of global memory into the L2 cache.
__device__ inline void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
#define TALK_HALF_TO_FLOAT talk_half_to_float
#define TALK_FLOAT_TO_HALF talk_float_to_half
#define TALK_FLOAT_BITS __float_as_uint
#define TALK_BITS_FLOAT __uint_as_float
#define TALK_OPAQUE talk_opaque
#endif

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

// For each storage type: the type that it is computed in, the type that many of its rows are added
// up in, and what stands for 1 in such sums. bfloat16 reaches as far as float32, which would
// overflow: sums hold 2^-16 of it, with room for 65,536 of its largest rows. Its least number,
// 2^-133, becomes 2^-149, float32's least (where small floats are flushed to 0, sums below 2^-110
// are).
template <typename Compute_, typename Sum_, int bits = 0> struct TypesOf {
    using Compute = Compute_;
    using Sum = Sum_;
    static constexpr float unit = 1.0f / (1 << bits);
};
template <typename X> struct Types;
template <> struct Types<double> : TypesOf<double, double> {};
template <> struct Types<float> : TypesOf<float, double> {};
template <> struct Types<float16> : TypesOf<float, float> {};
template <> struct Types<bfloat16> : TypesOf<float, float, 16> {};

__device__ inline double widen(double value) { return value; }
__device__ inline float widen(float value) { return value; }
__device__ inline float widen(float16 value) { return TALK_HALF_TO_FLOAT(value.bits); }
__device__ inline float widen(bfloat16 value) {
    return TALK_BITS_FLOAT(static_cast<unsigned int>(value.bits) << 16);
}

__device__ inline void narrow(double value, double& stored) { stored = value; }
__device__ inline void narrow(float value, float& stored) { stored = value; }
__device__ inline void narrow(float value, float16& stored) {
    stored.bits = TALK_FLOAT_TO_HALF(value);
}
__device__ inline void narrow(float value, bfloat16& stored) {
    // To nearest, ties to even. A NaN must not be rounded: its carry could make an infinity.
    const unsigned int bits = TALK_FLOAT_BITS(value);
    const unsigned int rounded = bits + 0x7fff + (bits >> 16 & 1);
    stored.bits = static_cast<unsigned short>((value == value ? rounded : bits | 0x400000) >> 16);
}

// N neighbouring channels: one vector load or store, as long as they fill at most 16 bytes. Halves
// stay in pairs, since a register that holds one of them takes as much room as two.
template <typename V, int N, bool pairs = sizeof(V) == 2 && N % 2 == 0> struct Pack {
    alignas(sizeof(V) * N < 16 ? sizeof(V) * N : 16) V v[N];
};
template <typename V, int N> struct Pack<V, N, true> {
    alignas(2 * N < 16 ? 2 * N : 16) unsigned int pair[N / 2];
};

// Channel n in the type that it is computed in.
template <typename V, int N>
__device__ inline typename Types<V>::Compute wide(const Pack<V, N>& pack, int n) {
    if constexpr (sizeof(V) == 2 && N % 2 == 0)
        return widen(V{static_cast<unsigned short>(pack.pair[n / 2] >> n % 2 * 16)});
    else
        return widen(pack.v[n]);
}

// Two neighbours at once, for which newer GPUs have an instruction.
template <typename V> __device__ inline unsigned int narrow_pair(float first, float second) {
    V pair[2];
    narrow(first, pair[0]);
    narrow(second, pair[1]);
    return pair[0].bits | static_cast<unsigned int>(pair[1].bits) << 16;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <> __device__ inline unsigned int narrow_pair<float16>(float first, float second) {
    unsigned int pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
template <> __device__ inline unsigned int narrow_pair<bfloat16>(float first, float second) {
    unsigned int pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
#endif

template <typename V, int N> __device__ inline Pack<V, N> load(const V* from) {
    return *reinterpret_cast<const Pack<V, N>*>(from);
}

// Copies a pack from global to shared memory, where the GPU can without waiting and without a
// register. The pack is there for the thread after `finish_copies`, and for others after a barrier.
template <typename V, int N>
__device__ inline void copy_later(Pack<V, N>* shared, const V* from) {
    constexpr int BYTES = sizeof(Pack<V, N>);
    if constexpr (TALK_COPIES_LATER && BYTES >= 4)
        talk_copy_later<BYTES>(shared, from);
    else
        *shared = load<V, N>(from);
}

template <typename S, typename V, int N>
__device__ inline void add(Pack<S, N>& sum, const Pack<V, N>& value, S weight = Types<V>::unit) {
#pragma unroll
    for (int n = 0; n < N; ++n) sum.v[n] += weight * wide(value, n);
}

// Halves that are converted twice: the compiler would keep what they became, in twice the
// registers, if it knew that `zero` is 0.
template <typename X, int N>
__device__ inline void forget(Pack<X, N>& halves, unsigned int zero) {
    if constexpr (sizeof(X) == 2 && N % 2 == 0)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) halves.pair[i] ^= zero;
}

template <typename F, typename X, int N>
__device__ inline Pack<F, N> widened(const Pack<X, N>& value) {
    Pack<F, N> result;
#pragma unroll
    for (int n = 0; n < N; ++n) result.v[n] = wide(value, n);
    return result;
}

template <typename X, typename F, int N>
__device__ inline void store(X* to, const Pack<F, N>& value, F scale) {
    Pack<X, N> stored;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if constexpr (sizeof(X) != 2 || N % 2 != 0)
            narrow(value.v[n] * scale, stored.v[n]);
        else if (n % 2 == 0)
            stored.pair[n / 2] = narrow_pair<X>(value.v[n] * scale, value.v[n + 1] * scale);
    }
    *reinterpret_cast<Pack<X, N>*>(to) = stored;
}

// A kernel of at most `threads` threads a block, of which `blocks` blocks are meant to share the
// 65,536 registers of a multiprocessor.
#define TALK_KERNEL(name, type, Problem, threads, blocks, call)                                    \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name##_##type(const Problem p) { \
        call;                                                                                      \
    }
