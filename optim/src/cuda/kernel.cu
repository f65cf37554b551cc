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

// What changes from step to step, in memory: the constants of `Factors` in adamw.rs in their order, then the longest
// gradient that is left as it is, and where `clip` puts the norm.
enum Control { SCALE, KEEP, RATE_M, BETA_V, RATE_V, ROOT, EPS, STEP, LONGEST, NORM };

// The norm from its pieces' sums of squares; a longer gradient than the longest is scaled down to it. One thread.
template <typename T>
__global__ void clip(const double* partial, int pieces, T* controls) {
    if (threadIdx.x != 0) return;
    double sum = 0;
    for (int piece = 0; piece < pieces; piece++) sum += partial[piece];
    double norm = sqrt(sum), longest = controls[LONGEST];
    controls[NORM] = T(norm);
    controls[SCALE] = norm > longest ? T(longest / norm) : T(1);
}

// A step, unless the gradient is not finite: then it would destroy the parameters.
template <typename T>
__global__ void adamw(T* p, const T* g, T* m, T* v, const u32* decays, i64 count, const T* controls) {
    i64 i = first_element();
    if (i >= count || !(controls[NORM] < INFINITY)) return;
    T gradient = g[i] * controls[SCALE];
    T mean = fma(controls[RATE_M], gradient - m[i], m[i]);
    T square = fma(controls[BETA_V], v[i], controls[RATE_V] * gradient * gradient);
    T deviation = fma(sqrt(square), controls[ROOT], controls[EPS]);
    T kept = p[i] * (decay_at<T>(decays, i) ? controls[KEEP] : T(1));
    p[i] = fma(controls[STEP], mean / deviation, kept);
    m[i] = mean;
    v[i] = square;
}
