// Windows of time steps, what a launch is given, and shared memory: see talk_conv.cu.

constexpr int LANES = 8;  // threads across the channels of a row, in the forward pass
constexpr int ROWS = 8;   // rows of a segment
constexpr int UNIT = 32;  // rows over which a prefix sum runs before it starts anew
constexpr int MAX_THREADS = 512;

// Everything a launch needs, passed by value; Python reads the list of its members here.
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
    int* reach;                // (T / REACH, B, H, 2), and then (T / SPAN, B, H, 2): the rows that
                               // larger windows than a halo touch; both rounded up; backward
    int* starts;               // (B, H, buckets): where the ends at each row start; 0 at first
    int* slots;                // (T, B, H, 2), then (B, H, 2 T): scratch of the sort
    void* entries;             // (B, H, 2 T): ends ordered by row
    int* origin;               // (ring, B): where a slot of a sequence is, or null; decoding
    double scale;              // 1 / (max_left + max_right + 1)
    int T, B, C, H, R;
    int max_left, max_right;
    int before, after;         // rows of halo on either side of a tile
    int tile;                  // rows of a tile or chunk
    int units, spans;          // units of a tile, or of all; entries of the table for each
    int staged;                // rows of a tile with its halo; backward
    int buckets;               // rows of whole chunks, and 1; large windows, backward
    int float32_offsets;       // beside a half x
    int ring, columns, steps;  // decoding: `sums` is (ring, columns, C), after `steps` steps
};

// -------------------------------------------------------------------------------------- windows

// Both passes sum rows times this weight, and multiply the sums by scale_of_weighted. The weight is
// the scale itself, except for bfloat16, whose sums might overflow.
template <typename X>
__device__ inline typename Types<X>::Compute weight_of_rows(const Problem& p) {
    return Types<X>::unit == 1 ? static_cast<typename Types<X>::Compute>(p.scale) : Types<X>::unit;
}
template <typename X>
__device__ inline typename Types<X>::Compute scale_of_weighted(const Problem& p) {
    using F = typename Types<X>::Compute;
    return Types<X>::unit == 1 ? 1 : static_cast<F>(p.scale) / Types<X>::unit;
}

template <typename F> struct Window {
    int lo, hi;     // whole rows lo ... hi
    F left, right;  // the fractions of rows lo - 1 and hi + 1; 0 where there is no such row
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

template <typename V, int lanes> using Row = V[lanes];

// Hands out the block's shared memory piece by piece.
struct Shared {
    unsigned char* next;
    template <typename V> __device__ V* take(int count) {
        V* piece = reinterpret_cast<V*>(next);
        next += (sizeof(V) * count + 15) / 16 * 16;
        return piece;
    }
    // Rows of a V for each lane, seen from this thread's lane, whose own is [row][0].
    template <typename V, int lanes> __device__ Row<V, lanes>* take_rows(int count) {
        // Opaque, or the compiler would add the lane anew to every place.
        int lane = threadIdx.x % lanes * static_cast<int>(sizeof(V));
        TALK_OPAQUE(lane);
        auto* start = reinterpret_cast<unsigned char*>(take<Row<V, lanes>>(count));
        return reinterpret_cast<Row<V, lanes>*>(start + lane);
    }
};

__device__ inline Shared shared_memory() {
    extern __shared__ __align__(16) unsigned char talk_shared[];
    return Shared{talk_shared};
}
