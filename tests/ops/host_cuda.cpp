// A kernel file as a host library: see host_cuda.h. Built by test_kernels_on_host.py.
#include "host_cuda.h"
#define talk_shared host_shared
#include KERNEL_FILE

extern "C" int launch(void (*kernel)(PROBLEM), const PROBLEM* problem, unsigned int x,
                      unsigned int y, unsigned int z, unsigned int threads, size_t shared,
                      unsigned int seed) {
    return host_launch(kernel, *problem, Dim3{x, y, z}, threads, shared, seed);
}
extern "C" size_t problem_bytes() { return sizeof(PROBLEM); }
