// One sweep over all parameters: the gradients' norm, AdamW, the moving average.
#include "sums.cuh"

// What changes from step to step, in memory: the constants of `StepConstants` in adamw.rs in their order, then the
// largest gradient norm that is not clipped, and the norm that was computed; then the constants of each group, in the
// order of `GroupConstants`.
enum Control { SCALE, RATE_M, BETA_V, RATE_V, ROOT, EPS, MAX_NORM, NORM, GROUPS };
enum GroupControl { KEEP, STEP, GROUP_CONTROLS };

// Packs of gradients that a thread asks for at once.
constexpr int BATCH = 4;

// Parameters begin on cache lines, and are of one group each: byte l of `groups` is the group of the elements of line l.
template <typename T>
__device__ __forceinline__ const T* group_of(const u32* groups, i64 i, const T* controls) {
    i64 line = i / (64 / sizeof(T));
    u32 group = groups[line / 4] >> (line % 4 * 8) & 255;
    return controls + GROUPS + group * GROUP_CONTROLS;
}

// The norm √Σ x², accumulated in double, written to `norm` or to the controls, either of which may be null; in the
// controls, SCALE is set so that a gradient with a norm above MAX_NORM is scaled down to it, and the norm is infinite if
// its square would be, once it is scaled. Each block sums one piece of the elements into `partial`.
template <typename T>
__global__ void gradient_norm(const T* x, double* partial, double* norm, T* controls, i64 count) {
    constexpr int N = Pack<T>::size;
    __shared__ double sums[8];
    i64 packs = (count + N - 1) / N, end = packs * (blockIdx.x + 1) / gridDim.x;
    double sum = 0;
    for (i64 first = packs * blockIdx.x / gridDim.x + threadIdx.x; first < end; first += BATCH * blockDim.x) {
        Pack<T> batch[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            i64 pack = first + b * blockDim.x;
            batch[b] = load_pack(x + pack * N, pack < end ? count - pack * N : 0);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int j = 0; j < N; j++) sum = fma(double(batch[b].at[j]), double(batch[b].at[j]), sum);
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x < Pack<double>::size) piece_of(partial, blockIdx.x, 1)[threadIdx.x] = threadIdx.x == 0 ? sum : 0;
    finish_sums(partial, 1, blockIdx.x, gridDim.x, 0, [&](int, double sum) {
        double found = sqrt(sum);
        if (norm) *norm = found;
        if (!controls) return;
        double scale = found > controls[MAX_NORM] ? controls[MAX_NORM] / found : 1;
        T clipped = T(found * scale);
        controls[NORM] = T(clipped * clipped < INFINITY ? found : found + INFINITY); // a NaN stays one
        controls[SCALE] = T(scale);
    });
}

// A step, unless the norm is not finite: then it would destroy the parameters. If there is a moving average, it
// follows the new parameters at its rate.
template <typename T>
__global__ void adamw(T* p, const T* g, T* m, T* v, const u32* groups, i64 count, const T* controls, T* average,
                      const T* rate) {
    constexpr int N = Pack<T>::size; // they lie within a cache line, and so are of one group
    i64 i = thread_number() * N, left = count - i;
    if (left <= 0 || !(controls[NORM] < INFINITY)) return;
    Pack<T> gradients = load_pack(g + i, left);
    Pack<T> parameters = load_pack(p + i, left), means = load_pack(m + i, left), squares = load_pack(v + i, left);
    const T* group = group_of(groups, i, controls);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const T gradient = gradients.at[j] * controls[SCALE];
        T &mean = means.at[j], &square = squares.at[j];
        mean = fma(controls[RATE_M], gradient - mean, mean);
        square = fma(controls[BETA_V], square, controls[RATE_V] * gradient * gradient);
        T deviation = fma(sqrt(square), controls[ROOT], controls[EPS]);
        parameters.at[j] = fma(group[STEP], mean / deviation, parameters.at[j] * group[KEEP]);
    }
    store_pack(p + i, parameters, left);
    store_pack(m + i, means, left);
    store_pack(v + i, squares, left);
    if (!average) return;
    Pack<T> averages = load_pack(average + i, left);
#pragma unroll
    for (int j = 0; j < N; j++) averages.at[j] = fma(*rate, parameters.at[j] - averages.at[j], averages.at[j]);
    store_pack(average + i, averages, left);
}
