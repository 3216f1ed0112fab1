// What a decoder keeps of its last steps: a ring of rows (slots, columns, C), of which a thread
// reads and writes N channels from c on of sequence b.
//
// Sequences may share rows of the past, so that a beam search copies none: `origin` has the column
// of a slot of each sequence. The row that a step overwrites is read neither in this step nor in a
// later one, whoever shares it; several steps at a time are only taken where nothing is shared.

template <typename F, int N> struct Ring {
    void* rows;
    int* origin;  // (slots, B); null where each sequence has its own columns
    int columns, B, C, b, c;

    __device__ F* row(int slot, int column) const {
        return static_cast<F*>(rows) + (static_cast<long long>(slot) * columns + column) * C + c;
    }
    __device__ Pack<F, N> at(int slot) const {
        return load<F, N>(row(slot, origin ? origin[static_cast<long long>(slot) * B + b] : b));
    }
    __device__ void put(int slot, const Pack<F, N>& now) const {
        *reinterpret_cast<Pack<F, N>*>(row(slot, b)) = now;
        if (origin && c == 0) origin[static_cast<long long>(slot) * B + b] = b;
    }
};
