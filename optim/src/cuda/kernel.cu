// One sweep over all parameters: the gradients' norm, AdamW, the moving average.
#include "sums.cuh"

// Parameters begin on cache lines, and weight decay applies to whole parameters: bit l of `decays` says whether it does
// to the elements of line l.
template <typename T>
__device__ __forceinline__ bool is_decayed(const u32* decays, i64 i) {
    i64 line = i / (64 / sizeof(T));
    return decays[line / 32] >> (line % 32) & 1;
}

// What changes from step to step, in memory: the constants of `StepConstants` in adamw.rs in their order, then the
// largest gradient norm that is not clipped, and the norm that was computed.
enum Control { SCALE, KEEP, RATE_M, BETA_V, RATE_V, ROOT, EPS, STEP, MAX_NORM, NORM };

// The norm √Σ x², accumulated in double, written to `norm` or to the controls, either of which may be null; in the
// controls, SCALE is set so that a gradient with a norm above MAX_NORM is scaled down to it. Each block sums one piece
// of the elements into `partial`.
template <typename T>
__global__ void gradient_norm(const T* x, double* partial, double* norm, T* controls, i64 count) {
    __shared__ double sums[8];
    i64 begin = count * blockIdx.x / gridDim.x, end = count * (blockIdx.x + 1) / gridDim.x;
    double sum = 0;
    for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) sum += double(x[i]) * double(x[i]);
    sum = block_sum(sum, sums);
    if (threadIdx.x < Pack<double>::size) piece_of(partial, blockIdx.x, 1)[threadIdx.x] = threadIdx.x == 0 ? sum : 0;
    finish_sums(partial, 1, blockIdx.x, gridDim.x, 0, [&](int, double sum) {
        double found = sqrt(sum);
        if (norm) *norm = found;
        if (!controls) return;
        controls[NORM] = T(found);
        controls[SCALE] = found > controls[MAX_NORM] ? T(controls[MAX_NORM] / found) : T(1);
    });
}

// A step, unless the gradient is not finite: then it would destroy the parameters. If there is a moving average, it
// follows the new parameters at its rate.
template <typename T>
__global__ void adamw(T* p, const T* g, T* m, T* v, const u32* decays, i64 count, const T* controls, T* average,
                      const T* rate) {
    i64 i = thread_number();
    if (i >= count || !(controls[NORM] < INFINITY)) return;
    T gradient = g[i] * controls[SCALE];
    T mean = fma(controls[RATE_M], gradient - m[i], m[i]);
    T square = fma(controls[BETA_V], v[i], controls[RATE_V] * gradient * gradient);
    T deviation = fma(sqrt(square), controls[ROOT], controls[EPS]);
    T kept = p[i] * (is_decayed<T>(decays, i) ? controls[KEEP] : T(1));
    T parameter = fma(controls[STEP], mean / deviation, kept);
    p[i] = parameter;
    m[i] = mean;
    v[i] = square;
    if (average) average[i] = fma(*rate, parameter - average[i], average[i]);
}
