// The kernel file as a host library: see host_cuda.h. Built by test_kernels_on_host.py.
#include "host_cuda.h"
#define talk_shared host_shared
#include KERNEL_FILE

static_assert(sizeof(Entry<float>) == 8 && sizeof(Entry<double>) == 16);

extern "C" int launch(void (*kernel)(Problem), const Problem* problem, unsigned int blocks,
                      unsigned int threads, size_t shared, unsigned int seed) {
    return host_launch(kernel, *problem, blocks, threads, shared, seed);
}
extern "C" size_t problem_bytes() { return sizeof(Problem); }
