// Decoding step by step.

// The next T outputs of a causal sequence, after p.steps others. A thread takes N channels. Running
// sums over time, P(t), are in a ring and restart at each turn of it. Seen from time t, P(k) of the
// turn before is minus the sum of the rows between:
//
//     out[t] = (P(t) - P(t - n - 1) + f * (P(t - n - 1) - P(t - n - 2))) / (max_left + 1)
//
// A step writes a slot that no window can reach any more.

// P of the time at slot k of this turn of a ring of L slots, or (k < 0) of the turn before.
template <typename F, int N>
__device__ Pack<F, N> sum_until(const Ring<F, N>& ring, int L, int k) {
    Pack<F, N> sum = {};
    if (k >= 0) return ring.at(k);
    if (k == -1) return sum;
    sum = ring.at(k + L);
    const Pack<F, N> total = ring.at(L - 1);
    for (int n = 0; n < N; ++n) sum.v[n] -= total.v[n];
    return sum;
}

template <typename X, int N> __device__ void update(const Problem& p) {
    using F = typename Types<X>::Sum;
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int packs = p.C / N, b = at / packs, c = at % packs * N;
    if (b >= p.B) return;
    const Ring<F, N> ring{p.sums, p.origin, p.columns, p.B, p.C, b, c};
    for (int s = 0; s < p.T; ++s) {
        const int t = p.steps + s, slot = t % p.ring;
        const long long step = static_cast<long long>(s) * p.B + b;
        Pack<F, N> now = slot == 0 ? Pack<F, N>{} : ring.at(slot - 1);
        const Pack<X, N> row = load<X, N>(static_cast<const X*>(p.x) + step * p.C + c);
        for (int n = 0; n < N; ++n) now.v[n] += wide(row, n);
        ring.put(slot, now);

        int whole;
        F fraction;
        split(load_offset<X>(p, p.offset_left, step * p.H + c / p.R), p.max_left, t, whole,
              fraction);
        if (whole > p.ring - 3) fraction = static_cast<F>(nan(""));
        Pack<F, N> out = now;
        if (fraction != fraction) {
            for (int n = 0; n < N; ++n) out.v[n] = fraction;
        } else {
            const Pack<F, N> before = sum_until(ring, p.ring, slot - whole - 1);
            for (int n = 0; n < N; ++n) out.v[n] -= before.v[n];
            if (fraction != 0) {
                const Pack<F, N> cut = sum_until(ring, p.ring, slot - whole - 2);
                for (int n = 0; n < N; ++n) out.v[n] += fraction * (before.v[n] - cut.v[n]);
            }
        }
        store(static_cast<X*>(p.out) + step * p.C + c, out, static_cast<F>(p.scale));
    }
}
