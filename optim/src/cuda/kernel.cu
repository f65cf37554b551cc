// One sweep over all parameters: the gradients' norm, AdamW, the moving average.

// Adds up x² in double over a piece of the elements to a block, partial (pieces).
template <typename T>
__global__ void sum_squares(const T* x, double* partial, i64 count) {
    __shared__ double sums[8];
    i64 begin = count * blockIdx.x / gridDim.x, end = count * (blockIdx.x + 1) / gridDim.x;
    double sum = 0;
    for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) sum += double(widen(x[i])) * double(widen(x[i]));
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Parameters begin on cache lines, and weight decay applies to whole parameters: bit l of `decays` says whether it does
// to the elements of line l.
template <typename T>
__device__ __forceinline__ bool decay_at(const u32* decays, i64 i) {
    i64 line = i / (64 / sizeof(T));
    return decays[line / 32] >> (line % 32) & 1;
}

// The constants of a step: see `Factors` in adamw.rs.
template <typename T>
__global__ void adamw(T* p, const T* g, T* m, T* v, const u32* decays, i64 count, T scale, T keep, T rate_m, T beta_v,
                      T rate_v, T root, T eps, T step) {
    i64 i = first_element();
    if (i >= count) return;
    T gradient = g[i] * scale;
    T mean = fma(rate_m, gradient - m[i], m[i]);
    T square = fma(beta_v, v[i], rate_v * gradient * gradient);
    T deviation = fma(sqrt(square), root, eps);
    T kept = p[i] * (decay_at<T>(decays, i) ? keep : T(1));
    p[i] = fma(step, mean / deviation, kept);
    m[i] = mean;
    v[i] = square;
}

// e ← e + rate·(p − e)
template <typename T>
__global__ void follow(T* e, const T* p, T rate, i64 count) {
    i64 i = first_element();
    if (i < count) e[i] = fma(rate, p[i] - e[i], e[i]);
}
