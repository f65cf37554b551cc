// One sweep over all parameters: the gradients' norm, AdamW, the moving average.
#include "sums.cuh"

// What changes from step to step, in memory: the constants of `StepConstants` in adamw.rs in their order, then the
// largest gradient norm that is not clipped, and the norm that was computed; then the constants of each group, in the
// order of `GroupConstants`.
enum Control { SCALE, RATE_M, BETA_V, RATE_V, ROOT, EPS, MAX_NORM, NORM, GROUPS };
enum GroupControl { KEEP, STEP, GROUP_CONTROLS };

// Parameters begin on cache lines, and are of one group each: byte l of `groups` is the group of the elements of line l.
template <typename T>
__device__ __forceinline__ const T* group_of(const u32* groups, i64 i, const T* controls) {
    i64 line = i / (64 / sizeof(T));
    u32 group = groups[line / 4] >> (line % 4 * 8) & 255;
    return controls + GROUPS + group * GROUP_CONTROLS;
}

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
__global__ void adamw(T* p, const T* g, T* m, T* v, const u32* groups, i64 count, const T* controls, T* average,
                      const T* rate) {
    i64 i = thread_number();
    if (i >= count || !(controls[NORM] < INFINITY)) return;
    T gradient = g[i] * controls[SCALE];
    T mean = fma(controls[RATE_M], gradient - m[i], m[i]);
    T square = fma(controls[BETA_V], v[i], controls[RATE_V] * gradient * gradient);
    T deviation = fma(sqrt(square), controls[ROOT], controls[EPS]);
    const T* group = group_of(groups, i, controls);
    T parameter = fma(group[STEP], mean / deviation, p[i] * group[KEEP]);
    p[i] = parameter;
    m[i] = mean;
    v[i] = square;
    if (average) average[i] = fma(*rate, parameter - average[i], average[i]);
}
