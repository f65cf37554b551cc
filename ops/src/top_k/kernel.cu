// An element of a row: its value, and its place, which is below zero where there is none.
template <typename W>
struct Element {
    W value;
    int place;

    // Whether it comes before another: the larger one does, and of equal ones that at the lower place. A NaN is smaller
    // than every number.
    __device__ __forceinline__ bool before(const Element& other) const {
        if (place < 0 || other.place < 0) return other.place < place;
        if (value > other.value || (other.value != other.value && value == value)) return true;
        if (other.value > value || (value != value && other.value == other.value)) return false;
        return place < other.place;
    }
};

// The first k elements, in this order, of each row of x (R, T), and their places, (R, k). Each round finds the first of
// the elements that come after the one found last.
template <typename T>
__global__ void top_k_forward(const T* x, T* y, u32* indices, i64 rows, int extent, int k) {
    typedef Element<wide<T>> Candidate;
    i64 row = warp_number();
    if (row >= rows) return;
    x += row * extent, y += row * k, indices += row * k;
    Candidate last = {0, -1};
    for (int round = 0; round < k; round++) {
        Candidate best = {0, -1};
        for (int place = lane(); place < extent; place += 32) {
            Candidate candidate = {widen(x[place]), place};
            if ((round == 0 || last.before(candidate)) && candidate.before(best)) best = candidate;
        }
        for (int step = 16; step > 0; step /= 2) {
            Candidate other = {__shfl_xor_sync(~0u, best.value, step), __shfl_xor_sync(~0u, best.place, step)};
            if (other.before(best)) best = other;
        }
        if (lane() == 0) {
            y[round] = x[best.place];
            indices[round] = best.place;
        }
        last = best;
    }
}

// dx (R, T) is dy (R, k) where an element was chosen, and 0 elsewhere.
template <typename T>
__global__ void top_k_backward(const T* dy, const u32* indices, T* dx, int accumulate, i64 rows, int extent, int k) {
    i64 row = warp_number();
    if (row >= rows) return;
    dy += row * k, indices += row * k, dx += row * extent;
    for (int place = lane(); place < extent; place += 32) {
        wide<T> gradient = 0;
        for (int i = 0; i < k; i++)
            if (indices[i] == u32(place)) gradient = widen(dy[i]);
        put(dx + place, gradient, accumulate);
    }
}
