// Rows of up to 32·PACKS whole packs. As many lanes share a row as it has packs, up to a warp, so a warp may have
// several rows at once. A lane always handles the same PACKS packs of channels, whose parameters stay in its registers,
// and iterates over its block's rows. Rows that do not fit this scheme are left to `any.cuh`.
#include "any.cuh"
#include "instructions.cuh"

constexpr int THREADS = 256;
// Packs that a lane loads before it uses the first, so that enough loads are in flight.
constexpr int AHEAD = 4;
// Blocks that a multiprocessor has registers for.
template <int PACKS>
constexpr int RESIDENT = PACKS == 4 ? 1 : 4 - PACKS;

// The rows of a block, and this lane's channels in them.
template <typename T, int PACKS>
struct Part {
    typedef wide<T> W;
    static constexpr int N = Pack<T>::size;
    int channels, lanes, groups; // groups of lanes in a block; each has a row at a time
    i64 first;
    int rows;

    // `share` of all rows to a block, `sharing` lanes to a row.
    __device__ __forceinline__ Part(i64 all, int share, int channels, int sharing)
        : channels(channels), lanes(PACKS > 1 ? 32 : sharing), groups(THREADS / lanes), first(i64(blockIdx.x) * share),
          rows(max(min(all - first, i64(share)), i64(0))) {}

    __device__ __forceinline__ int own_lane() const { return threadIdx.x & (lanes - 1); }
    __device__ __forceinline__ int channel(int pack) const { return (own_lane() + pack * lanes) * N; }
    __device__ __forceinline__ bool has(int pack) const { return channel(pack) < channels; }
    // This lane's b-th row of the turn that begins at row `turn` of the block.
    __device__ __forceinline__ int row(int turn, int b) const { return turn + b * groups + threadIdx.x / lanes; }
    // Where its pack lies in x (R, C).
    __device__ __forceinline__ i64 place(int turn, int b, int pack) const {
        return first * channels + (row(turn, b) * channels + channel(pack));
    }

    // This lane's channels of a parameter (C); zeros where it has none.
    __device__ __forceinline__ void hold(const W* parameter, W (&values)[PACKS][N]) const {
        constexpr int M = Pack<W>::size;
#pragma unroll
        for (int p = 0; p < PACKS; p++)
#pragma unroll
            for (int j = 0; j < N; j += M) {
                Pack<W> pack = load_pack(parameter + channel(p) + j, channels - channel(p) - j);
#pragma unroll
                for (int i = 0; i < M; i++) values[p][j + i] = pack.at[i];
            }
    }

    // This lane's packs of a turn's rows of x; zeros where there are none.
    template <int B>
    __device__ __forceinline__ void load(const T* x, int turn, Pack<T> (&packs)[B][PACKS]) const {
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                packs[b][p] = {};
                if (row(turn, b) < rows && has(p)) packs[b][p] = *reinterpret_cast<const Pack<T>*>(x + place(turn, b, p));
            }
    }

    // Prefetches what `load` would load, which takes no registers.
    template <int B>
    __device__ __forceinline__ void expect(const T* x, int turn) const {
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int p = 0; p < PACKS; p++)
                if (row(turn, b) < rows && has(p)) prefetch(x + place(turn, b, p));
    }

    // A number per row of a turn.
    template <int B>
    __device__ __forceinline__ void load(const W* numbers, int turn, W (&values)[B]) const {
#pragma unroll
        for (int b = 0; b < B; b++) values[b] = row(turn, b) < rows ? numbers[first + row(turn, b)] : W(0);
    }

    // Adds values up over the lanes of each row.
    template <int B>
    __device__ __forceinline__ void add_up(W (&values)[B]) const {
        for (int step = lanes / 2; step > 0; step /= 2)
#pragma unroll
            for (int b = 0; b < B; b++) values[b] += __shfl_xor_sync(~0u, values[b], step);
    }

    // y = γ·x̂ + β in a turn's rows.
    template <int B>
    __device__ __forceinline__ void normalise(const Pack<T> (&in)[B][PACKS], const W (&mean)[B], const W (&rstd)[B],
                                              const W (&weight)[PACKS][N], const W (&bias)[PACKS][N], T* y, int turn) const {
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                Pack<T> out;
#pragma unroll
                for (int j = 0; j < N; j++)
                    out.at[j] = narrow<T>((widen(in[b][p].at[j]) - mean[b]) * rstd[b] * weight[p][j] + bias[p][j]);
                if (row(turn, b) < rows && has(p)) *reinterpret_cast<Pack<T>*>(y + place(turn, b, p)) = out;
            }
    }

    // to[c] = the sum of the block's values for channel c, in order.
    __device__ __forceinline__ void sum_groups(const W (&values)[PACKS][N], W* to) const {
        __shared__ W shared[PACKS * N][THREADS];
        __syncthreads();
#pragma unroll
        for (int p = 0; p < PACKS; p++)
#pragma unroll
            for (int j = 0; j < N; j++) shared[p * N + j][threadIdx.x] = values[p][j];
        __syncthreads();
        for (int c = threadIdx.x; c < channels; c += THREADS) {
            const W* own = shared[c / N / lanes * N + c % N] + c / N % lanes;
            W sum = 0;
            for (int group = 0; group < groups; group++) sum += own[group * lanes];
            to[c] = sum;
        }
    }
};

template <typename T, int PACKS>
__global__ void __launch_bounds__(THREADS, RESIDENT<PACKS>)
    layer_norm_forward(const T* x, const wide<T>* weights, const wide<T>* biases, wide<T> epsilon, T* y, wide<T>* means,
                       wide<T>* rstds, i64 rows, int share, int channels, int sharing) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size, B = AHEAD / PACKS;
    Part<T, PACKS> part(rows, share, channels, sharing);
    W weight[PACKS][N], bias[PACKS][N], inverse = W(1) / channels;
    part.hold(weights, weight), part.hold(biases, bias);
    for (int turn = 0; turn < part.rows; turn += B * part.groups) {
        Pack<T> in[B][PACKS];
        W mean[B] = {}, rstd[B] = {};
        part.load(x, turn, in);
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int p = 0; p < PACKS; p++)
#pragma unroll
                for (int j = 0; j < N; j++) mean[b] += widen(in[b][p].at[j]);
        part.add_up(mean);
#pragma unroll
        for (int b = 0; b < B; b++) {
            mean[b] = rounded_product(mean[b], inverse);
#pragma unroll
            for (int p = 0; p < PACKS; p++)
#pragma unroll
                for (int j = 0; j < N; j++) {
                    W deviation = part.has(p) ? widen(in[b][p].at[j]) - mean[b] : W(0);
                    rstd[b] += deviation * deviation;
                }
        }
        part.add_up(rstd);
#pragma unroll
        for (int b = 0; b < B; b++) {
            rstd[b] = rsqrt(rstd[b] * inverse + epsilon);
            if (part.own_lane() == 0 && part.row(turn, b) < part.rows) {
                means[part.first + part.row(turn, b)] = mean[b];
                rstds[part.first + part.row(turn, b)] = rstd[b];
            }
        }
        part.normalise(in, mean, rstd, weight, bias, y, turn);
    }
}

// Recomputes y from the rows' moments.
template <typename T, int PACKS>
__global__ void __launch_bounds__(THREADS, RESIDENT<PACKS>)
    layer_norm_recompute(const T* x, const wide<T>* weights, const wide<T>* biases, const wide<T>* means,
                     const wide<T>* rstds, T* y, i64 rows, int share, int channels, int sharing) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size, B = AHEAD / PACKS;
    Part<T, PACKS> part(rows, share, channels, sharing);
    W weight[PACKS][N], bias[PACKS][N];
    part.hold(weights, weight), part.hold(biases, bias);
    for (int turn = 0; turn < part.rows; turn += B * part.groups) {
        Pack<T> in[B][PACKS];
        W mean[B], rstd[B];
        part.load(x, turn, in), part.load(means, turn, mean), part.load(rstds, turn, rstd);
        part.normalise(in, mean, rstd, weight, bias, y, turn);
    }
}

// dx = r·(g − mean(g) − x̂·mean(g·x̂)), g = γ·dy, and Σ dy·x̂ and Σ dy, reduced through `partial` (blocks, 2, C); the
// pointers to results may be null.
template <typename T, int PACKS>
__global__ void __launch_bounds__(THREADS, RESIDENT<PACKS>)
    layer_norm_backward(const T* dy, const T* x, const wide<T>* weights, const wide<T>* means, const wide<T>* rstds, T* dx,
                        int accumulate, wide<T>* partial, wide<T>* dweights, int add_weights, wide<T>* dbiases,
                        int add_biases, i64 rows, int share, int channels, int sharing) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size, B = (AHEAD / 2 + PACKS - 1) / PACKS; // there are two operands to ask for
    Part<T, PACKS> part(rows, share, channels, sharing);
    W weight[PACKS][N], dweight[PACKS][N] = {}, dbias[PACKS][N] = {}, inverse = W(1) / channels;
    part.hold(weights, weight);
    for (int turn = 0; turn < part.rows; turn += B * part.groups) {
        Pack<T> upstream[B][PACKS], in[B][PACKS];
        W mean[B], rstd[B], mean_g[B] = {}, mean_gx[B] = {};
        if (accumulate) part.template expect<B>(dx, turn);
        part.load(dy, turn, upstream), part.load(x, turn, in);
        part.load(means, turn, mean), part.load(rstds, turn, rstd);
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int p = 0; p < PACKS; p++)
#pragma unroll
                for (int j = 0; j < N; j++) {
                    W arriving = widen(upstream[b][p].at[j]), normal = (widen(in[b][p].at[j]) - mean[b]) * rstd[b];
                    dweight[p][j] += arriving * normal;
                    dbias[p][j] += arriving;
                    mean_g[b] += arriving * weight[p][j];
                    mean_gx[b] += arriving * weight[p][j] * normal;
                }
        if (!dx) continue;
        part.add_up(mean_g), part.add_up(mean_gx);
#pragma unroll
        for (int b = 0; b < B; b++) {
            mean_g[b] *= inverse, mean_gx[b] *= inverse;
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (part.row(turn, b) >= part.rows || !part.has(p)) break;
                Pack<T>* to = reinterpret_cast<Pack<T>*>(dx + part.place(turn, b, p));
                Pack<T> sum = {};
                if (accumulate) sum = *to;
#pragma unroll
                for (int j = 0; j < N; j++) {
                    W g = widen(upstream[b][p].at[j]) * weight[p][j], normal = (widen(in[b][p].at[j]) - mean[b]) * rstd[b];
                    sum.at[j] = narrow<T>(widen(sum.at[j]) + rstd[b] * (g - mean_g[b] - normal * mean_gx[b]));
                }
                *to = sum;
            }
        }
    }
    if (!partial) return;
    W* sums = piece_of(partial, blockIdx.x, 2 * channels);
    part.sum_groups(dweight, sums), part.sum_groups(dbias, sums + channels);
    finish_sums(partial, 2 * channels, blockIdx.x, gridDim.x, 0, [&](int i, W sum) {
        if (i < channels) put_wanted(dweights, i, sum, add_weights);
        else put_wanted(dbiases, i - channels, sum, add_biases);
    });
}
