// Rows of up to 32·PACKS whole packs. As many lanes share a row as it has packs, up to a warp, so a warp may have
// several rows at once. A lane always handles the same PACKS packs of channels, whose parameters stay in its registers,
// and iterates over its block's rows. Rows that do not fit this scheme are left to `any.cuh`.
#include "any.cuh"
#include "words.cuh"

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
    int column;                  // of this lane's first pack
    i64 row, place;              // its next row, and where that pack lies in it
    int rows;                    // how many there are from that row on in the block

    // `share` of all rows to a block, `sharing` lanes to a row: a power of two.
    __device__ __forceinline__ Part(i64 all, int share, int channels, int sharing)
        : channels(channels), lanes(PACKS > 1 ? 32 : sharing), groups(THREADS >> (31 - __clz(lanes))),
          column(int(threadIdx.x & (lanes - 1)) * N) {
        const int group = threadIdx.x >> (31 - __clz(lanes));
        row = i64(blockIdx.x) * share + group;
        place = row * channels + column;
        rows = min(all - row, i64(share) - group);
    }

    __device__ __forceinline__ int channel(int pack) const { return column + pack * lanes * N; }
    // Of the next rows, one per group each, the b-th: whether there is one, and a pack of this lane's.
    __device__ __forceinline__ bool has(int b) const { return b * groups < rows; }
    __device__ __forceinline__ bool has(int b, int pack) const { return has(b) && channel(pack) < channels; }
    // That pack in x (R, C).
    __device__ __forceinline__ const Pack<u32>* at(const T* x, int b, int pack) const {
        return reinterpret_cast<const Pack<u32>*>(x + place + (b * groups * channels + pack * lanes * N));
    }
    __device__ __forceinline__ Pack<u32>* at(T* x, int b, int pack) const {
        return const_cast<Pack<u32>*>(at(const_cast<const T*>(x), b, pack));
    }
    __device__ __forceinline__ void advance(int count) {
        row += count * groups, place += count * groups * channels, rows -= count * groups;
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

    // This lane's packs of the b-th of the next rows of x; zeros if there is none.
    __device__ __forceinline__ void load(const T* x, int b, Pack<u32> (&packs)[PACKS]) const {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            packs[p] = {};
            if (has(b, p)) packs[p] = *at(x, b, p);
        }
    }

    // The same of several rows.
    template <int B>
    __device__ __forceinline__ void load(const T* x, Pack<u32> (&packs)[B][PACKS]) const {
#pragma unroll
        for (int b = 0; b < B; b++) load(x, b, packs[b]);
    }

    // Prefetches what `load` would load, which takes no registers.
    template <int B>
    __device__ __forceinline__ void expect(const T* x) const {
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int p = 0; p < PACKS; p++)
                if (has(b, p)) prefetch(at(x, b, p));
    }

    // A number per row.
    template <int B>
    __device__ __forceinline__ void load(const W* numbers, W (&values)[B]) const {
#pragma unroll
        for (int b = 0; b < B; b++) values[b] = has(b) ? numbers[row + b * groups] : W(0);
    }

    // A value of the first lane of this lane's row.
    __device__ __forceinline__ W of_first_lane(W value) const { return __shfl_sync(~0u, value, lane() & -lanes); }

    // Adds values up over the lanes of each row, all of them in each step, as a step waits for the one before.
    template <int B>
    __device__ __forceinline__ void add_up(W (&values)[B]) const {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            if (step >= lanes) continue;
#pragma unroll
            for (int b = 0; b < B; b++) values[b] += __shfl_xor_sync(~0u, values[b], step);
        }
    }

    // y = γ·x̂ + β in the next rows.
    template <int B>
    __device__ __forceinline__ void normalise(const Pack<u32> (&in)[B][PACKS], const W (&mean)[B], const W (&rstd)[B],
                                              const W (&weight)[PACKS][N], const W (&bias)[PACKS][N], T* y) const {
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                W out[N];
#pragma unroll
                for (int j = 0; j < N; j++)
                    out[j] = (element<T>(in[b][p], j) - mean[b]) * rstd[b] * weight[p][j] + bias[p][j];
                if (has(b, p)) store_at_once(at(y, b, p), words_of<T>(out).at);
            }
    }

    // to[c] = the sum of the block's values for channel c, in order.
    __device__ __forceinline__ void sum_groups(const W (&values)[PACKS][N], W* to) const {
        // The rows begin in different banks, so that neighbouring channels are read at once.
        __shared__ W shared[PACKS * N][THREADS + 32 / N];
        __syncthreads();
#pragma unroll
        for (int p = 0; p < PACKS; p++)
#pragma unroll
            for (int j = 0; j < N; j++) shared[p * N + j][threadIdx.x] = values[p][j];
        __syncthreads();
        for (int c = threadIdx.x; c < channels; c += THREADS) {
            const int pack = c / N, lane = pack & (lanes - 1);
            const W* own = shared[(pack - lane) / lanes * N + c % N] + lane;
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
    for (int turn = 0; turn < share; turn += B * part.groups, part.advance(B)) {
        Pack<u32> in[B][PACKS];
        W mean[B] = {}, rstd[B] = {};
        part.load(x, in);
        // A mean is a distance from the row's first element, so that in a row of equal ones it is exact; of equal bf16
        // numbers the sum in f32 is exact by itself, and so is its quotient. The element is asked for twice, as registers
        // do not suffice to keep those of all rows.
        auto first = [&](int b) {
            if constexpr (sizeof(T) < sizeof(W)) return W(0);
            return part.of_first_lane(element<T>(in[b][0], 0));
        };
#pragma unroll
        for (int b = 0; b < B; b++) {
            const W origin = first(b);
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (part.channel(p) >= channels) continue;
#pragma unroll
                for (int j = 0; j < N; j++) mean[b] += element<T>(in[b][p], j) - origin;
            }
        }
        part.add_up(mean);
#pragma unroll
        for (int b = 0; b < B; b++) {
            mean[b] = first(b) + (sizeof(T) < sizeof(W) ? mean[b] / channels : mean[b] * inverse);
#pragma unroll
            for (int p = 0; p < PACKS; p++)
#pragma unroll
                for (int j = 0; j < N; j++) {
                    W deviation = part.channel(p) < channels ? element<T>(in[b][p], j) - mean[b] : W(0);
                    rstd[b] += deviation * deviation;
                }
        }
        part.add_up(rstd);
#pragma unroll
        for (int b = 0; b < B; b++) {
            rstd[b] = reciprocal_root(rstd[b] * inverse + epsilon);
            if (part.column == 0 && part.has(b)) {
                means[part.row + b * part.groups] = mean[b];
                rstds[part.row + b * part.groups] = rstd[b];
            }
        }
        part.normalise(in, mean, rstd, weight, bias, y);
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
    for (int turn = 0; turn < share; turn += B * part.groups, part.advance(B)) {
        Pack<u32> in[B][PACKS];
        W mean[B], rstd[B];
        part.load(x, in), part.load(means, mean), part.load(rstds, rstd);
        part.normalise(in, mean, rstd, weight, bias, y);
    }
}

// dx = r·(g − mean(g) − x̂·mean(g·x̂)), g = γ·dy, and each block's sums of dy·x̂ and dy, in partial (blocks, 2, C); the
// pointers to results may be null.
template <typename T, int PACKS>
__global__ void __launch_bounds__(THREADS, RESIDENT<PACKS>)
    layer_norm_backward(const T* dy, const T* x, const wide<T>* weights, const wide<T>* means, const wide<T>* rstds,
                        T* dx, int accumulate, wide<T>* partial, i64 rows, int share, int channels, int sharing) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size, B = (AHEAD / 2 + PACKS - 1) / PACKS; // there are two operands to ask for
    Part<T, PACKS> part(rows, share, channels, sharing);
    W weight[PACKS][N], dweight[PACKS][N] = {}, dbias[PACKS][N] = {}, inverse = W(1) / channels;
    part.hold(weights, weight);
    for (int turn = 0; turn < share; turn += B * part.groups, part.advance(B)) {
        Pack<u32> upstream[B][PACKS], in[B][PACKS];
        W mean[B], rstd[B], sums[2 * B] = {}; // of g and g·x̂
        part.load(dy, upstream), part.load(x, in);
        if (accumulate) part.template expect<B>(dx);
        part.load(means, mean), part.load(rstds, rstd);
        // Elements are made floats again where they are used again: registers do not suffice for those of several rows.
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int p = 0; p < PACKS; p++)
#pragma unroll
                for (int j = 0; j < N; j++) {
                    W arriving = element<T>(upstream[b][p], j), normal = (element<T>(in[b][p], j) - mean[b]) * rstd[b];
                    dweight[p][j] += arriving * normal;
                    dbias[p][j] += arriving;
                    sums[2 * b] += arriving * weight[p][j];
                    sums[2 * b + 1] += arriving * weight[p][j] * normal;
                }
        if (!dx) continue;
        part.add_up(sums);
#pragma unroll
        for (int b = 0; b < B; b++) {
            Pack<u32> old[PACKS] = {};
            if (accumulate) part.load(dx, b, old);
            W mean_g = sums[2 * b] * inverse, mean_gx = sums[2 * b + 1] * inverse;
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                W sum[N];
#pragma unroll
                for (int j = 0; j < N; j++) {
                    W g = element<T>(upstream[b][p], j) * weight[p][j];
                    W normal = (element<T>(in[b][p], j) - mean[b]) * rstd[b];
                    sum[j] = element<T>(old[p], j) + rstd[b] * (g - mean_g - normal * mean_gx);
                }
                if (part.has(b, p)) store_at_once(part.at(dx, b, p), words_of<T>(sum).at);
            }
        }
    }
    if (!partial) return;
    W* sums = partial + i64(blockIdx.x) * 2 * channels;
    part.sum_groups(dweight, sums), part.sum_groups(dbias, sums + channels);
}
