// Runs a CUDA kernel file on the host, one block at a time, to test it where there is no GPU.
//
// Each thread of a block is a fiber with its own stack. A fiber runs until it reaches a barrier
// or a warp shuffle, then another one runs, in an order shuffled anew from a seed: a result that
// depends on the order of threads between two barriers shows as a difference between seeds, and a
// barrier that is missing as a wrong result.
// Shared memory starts as NaN in every block, and bytes past what was asked for are watched.
//
// A test tool, not a backend. It knows what the files of kernels/ use and no more.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

using std::max;
using std::min;

struct Dim3 { unsigned int x = 1, y = 1, z = 1; };
inline Dim3 threadIdx, blockIdx, blockDim, gridDim;

constexpr size_t SHARED_BYTES = 256 * 1024, GUARD_BYTES = 4096;
extern "C" { unsigned char host_shared[SHARED_BYTES + GUARD_BYTES] __align__(64); }

// ---------------------------------------------------------------------------------------- fibers

namespace host {

enum State { READY, AT_BARRIER, AT_SHUFFLE, DONE };

struct Copy { void* to; const void* from; size_t bytes; };

struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    std::vector<char> stack;
    State state = READY;
    bool started = false;
    int shuffles = 0;
    double slot[2];  // what a shuffle shows to the warp; two, as one thread may be one ahead
    std::vector<Copy> copies;  // to shared memory, made as late as the kernel allows
};

inline std::vector<Fiber*> fibers;  // kept and used again for all blocks
inline Fiber* current = nullptr;
inline jmp_buf scheduler;
inline void (*entry)() = nullptr;

// Gives the processor back to the scheduler until `state` is lifted.
inline void wait(State state) {
    current->state = state;
    if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

inline void fiber_main() {
    for (;;) {  // a finished fiber waits here for its next block
        entry();
        wait(DONE);
    }
}

inline void run(unsigned int index) {
    current = fibers[index];
    threadIdx.x = index;
    if (_setjmp(scheduler)) return;
    if (current->started) _longjmp(current->resume, 1);
    current->started = true;
    setcontext(&current->context);
}

// Runs one block; false if its threads wait for one another for ever.
inline bool run_block(unsigned int threads, std::mt19937& random) {
    while (fibers.size() < threads) {
        Fiber* fiber = new Fiber;
        fiber->stack.resize(64 * 1024);
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack.data();
        fiber->context.uc_stack.ss_size = fiber->stack.size();
        fiber->context.uc_link = nullptr;
        makecontext(&fiber->context, fiber_main, 0);
        fibers.push_back(fiber);
    }
    std::vector<unsigned int> order(threads);
    for (unsigned int i = 0; i < threads; ++i) {
        order[i] = i;
        fibers[i]->state = READY;
        fibers[i]->shuffles = 0;
        fibers[i]->copies.clear();
    }
    for (;;) {
        std::shuffle(order.begin(), order.end(), random);
        // Half of the warps rest in each round, so that others get ahead by more than a barrier.
        const unsigned int resting = random();
        unsigned int done = 0, barrier = 0, ready = 0;
        for (unsigned int i : order) {
            if (fibers[i]->state != READY) continue;
            if (resting >> i / 32 & 1) ++ready;
            else run(i);
        }
        for (unsigned int warp = 0; warp < threads; warp += 32) {
            const unsigned int end = std::min(warp + 32, threads);
            unsigned int shuffle = 0;
            for (unsigned int i = warp; i < end; ++i) {
                done += fibers[i]->state == DONE;
                barrier += fibers[i]->state == AT_BARRIER;
                shuffle += fibers[i]->state == AT_SHUFFLE;
            }
            if (shuffle == end - warp)
                for (unsigned int i = warp; i < end; ++i, ++ready) fibers[i]->state = READY;
        }
        if (done == threads) return true;
        if (barrier == threads)
            for (unsigned int i = 0; i < threads; ++i, ++ready) fibers[i]->state = READY;
        if (ready == 0) return false;
    }
}

template <typename V> V shuffle(V value, unsigned int source) {
    const int parity = current->shuffles++ & 1;
    const unsigned int index = threadIdx.x;
    std::memcpy(&current->slot[parity], &value, sizeof(V));
    wait(AT_SHUFFLE);
    std::memcpy(&value, &fibers[index / 32 * 32 + source]->slot[parity], sizeof(V));
    return value;
}

}  // namespace host

// ------------------------------------------------------------------------------- CUDA's functions

inline void __syncthreads() { host::wait(host::AT_BARRIER); }

template <typename V> V __shfl_up_sync(unsigned int, V value, unsigned int delta) {
    const unsigned int thread = threadIdx.x % 32;
    return host::shuffle(value, thread >= delta ? thread - delta : thread);
}
template <typename V> V __shfl_xor_sync(unsigned int, V value, int mask) {
    return host::shuffle(value, threadIdx.x % 32 ^ mask);
}

inline int atomicAdd(int* at, int value) { return std::exchange(*at, *at + value); }

template <typename To, typename From> To host_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To bits;
    std::memcpy(&bits, &value, sizeof(To));
    return bits;
}
#define TALK_OPAQUE(number)
#define TALK_COPIES_LATER true
template <int bytes> void talk_copy_later(void* shared, const void* from) {
    host::current->copies.push_back({shared, from, bytes});
}
inline void finish_copies() {
    for (const host::Copy& copy : host::current->copies) memcpy(copy.to, copy.from, copy.bytes);
    host::current->copies.clear();
}
inline void prefetch(const void*) {}
#define TALK_FLOAT_BITS host_bits<unsigned int, float>
#define TALK_BITS_FLOAT host_bits<float, unsigned int>
#define TALK_HALF_TO_FLOAT(bits) static_cast<float>(host_bits<_Float16, unsigned short>(bits))
#define TALK_FLOAT_TO_HALF(value) \
    host_bits<unsigned short, _Float16>(static_cast<_Float16>(value))

// ---------------------------------------------------------------------------------------- launch

// 0, or 1 if threads wait for one another for ever, or 2 if a block wrote past its shared memory.
template <typename Arguments>
int host_launch(void (*kernel)(Arguments), const Arguments& arguments, Dim3 blocks,
                unsigned int threads, size_t shared, unsigned int seed) {
    static void (*running)(Arguments);
    static const Arguments* given;
    running = kernel, given = &arguments;
    host::entry = [] { running(*given); };
    std::mt19937 random(seed);
    blockDim.x = threads, gridDim = blocks;
    if (shared > SHARED_BYTES || threads > 1024) return 2;
    std::vector<unsigned int> order(blocks.x * blocks.y * blocks.z);
    for (unsigned int i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (unsigned int block : order) {
        blockIdx = Dim3{block % blocks.x, block / blocks.x % blocks.y, block / blocks.x / blocks.y};
        std::memset(host_shared, 0xff, shared + GUARD_BYTES);  // NaN, whatever the type
        if (!host::run_block(threads, random)) return 1;
        for (size_t i = 0; i < GUARD_BYTES; ++i)
            if (host_shared[shared + i] != 0xff) return 2;
    }
    return 0;
}
