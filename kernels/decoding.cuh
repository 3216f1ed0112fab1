// Decoding step by step.

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
    using F = typename Types<X>::Sum;
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
