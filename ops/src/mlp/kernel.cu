// The MLP of a block in bf16 on tensor cores, for maps of C channels: 64 or 96. Between its two products the hidden
// channels stay in registers; on wider maps the products are no longer bound by memory, and cuBLASLt does them better.
//
// A warp takes 16 rows and a block 128; all of them iterate over the hidden channels in chunks, whose weights are
// copied to shared memory while those of the previous chunk are used. The order along the inner axis of a product does
// not matter, as long as both operands have the same. So a lane reads and writes 8 neighbouring channels of a row, 16
// bytes, at a time: with g = lane / 4 and p = lane % 4, channels 8p to 8p + 7 of each 32, of rows g and g + 8. Two of
// these four pairs are its part of one product, and the other two its part of the next (`part` below): what tensor
// cores call column 2p + e of tile `half` is the channel 8p + 4·part + 2·half + e.
#include "instructions.cuh"
#include "normal.cuh"

constexpr int ROWS = 128;    // of a block, 16 to a warp
constexpr int THREADS = 2 * ROWS;
constexpr int CHUNK = 64;    // hidden channels in shared memory
constexpr int GROUP = 32;    // channels that a row's four lanes read at once
constexpr int PAIRS = 4;     // pairs of channels of a lane among them

union Eight {
    Pack<bf16> pack;
    u32 pairs[PAIRS];
};

__device__ __forceinline__ void load(u32 (&pairs)[PAIRS], const bf16* from) {
    Eight eight;
    eight.pack = *reinterpret_cast<const Pack<bf16>*>(from);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) pairs[i] = eight.pairs[i];
}

// The parameters of a lane's channels.
__device__ __forceinline__ void load(float (&values)[2 * PAIRS], const float* from) {
    constexpr int N = Pack<float>::size;
#pragma unroll
    for (int part = 0; part < 2 * PAIRS; part += N) {
        const Pack<float> pack = load_pack(from + part, N);
#pragma unroll
        for (int i = 0; i < N; i++) values[part + i] = pack.at[i];
    }
}

// D += A·B over the 32 channels of a group: `a` are those of rows g and g + 8, `b` those of column g of B.
__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[2][PAIRS], const u32 (&b)[PAIRS]) {
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const u32 left[4] = {a[0][2 * part], a[1][2 * part], a[0][2 * part + 1], a[1][2 * part + 1]};
        const u32 right[2] = {b[2 * part], b[2 * part + 1]};
        multiply_add(d, left, right);
    }
}

// Which of 32 channels is column g of the tile that gives pair `pair`.
__device__ __forceinline__ int channel_of_column(int pair) {
    const int g = lane() / 4;
    return g / 2 * 8 + pair * 2 + g % 2;
}

// The weights of a chunk in shared memory. Rows are padded to half a line of banks more than a whole number of lines,
// so that the two rows that eight lanes read lie in different banks.
template <int C>
struct Chunk {
    static constexpr int FIRST = C % 64 == 0 ? C + 32 : C, SECOND = CHUNK + 32;
    bf16 first[CHUNK][FIRST]; // hidden, channels
    bf16 second[C][SECOND];   // channels, hidden
    static constexpr int UNROLLED = C == 64 ? 2 : 1; // of the loops over copies, as far as there are registers

    // Starts copying the weights of the hidden channels from `begin` on; zeros past the last.
    __device__ __forceinline__ void fetch(const bf16* w1, const bf16* w2, int begin, int hidden) {
        static_assert(CHUNK * (C / 8) % THREADS == 0, "each thread copies as much");
#pragma unroll UNROLLED
        for (int turn = 0; turn < CHUNK * (C / 8) / THREADS; turn++) {
            const int i = turn * THREADS + threadIdx.x, row = i / (C / 8), column = i % (C / 8) * 8;
            const bool exists = begin + row < hidden;
            copy_async(&first[row][column], w1 + i64(exists ? begin + row : 0) * C + column, exists);
        }
#pragma unroll UNROLLED
        for (int turn = 0; turn < C * (CHUNK / 8) / THREADS; turn++) {
            const int i = turn * THREADS + threadIdx.x, row = i / (CHUNK / 8), column = i % (CHUNK / 8) * 8;
            const bool exists = begin + column < hidden;
            copy_async(&second[row][column], w2 + i64(row) * hidden + (exists ? begin + column : 0), exists);
        }
    }
};

// y (R, C) = W₂·gelu(W₁·n + b₁) + b₂, plus x if there is a residual, with n the normalised rows of x, scaled by gamma
// and shifted by beta. What a backward pass needs is written if the pointers to it are not null: the rows' moments (R), and
// the hidden channels before GELU (R, H). H is a whole number of packs.
template <int C>
__global__ void __launch_bounds__(THREADS, 2)
    mlp_forward(const bf16* x, const float* gamma, const float* beta, float epsilon, const bf16* w1, const bf16* b1,
                const bf16* w2, const bf16* b2, int residual, bf16* y, float* mean, float* rstd, bf16* pre_gelu,
                i64 rows, int hidden) {
    constexpr int GROUPS = C / GROUP;
    DYNAMIC_SHARED(Chunk<C>, chunks);
    chunks[0].fetch(w1, w2, 0, hidden);
    const int own = lane() % 4 * 8; // the lane's first channel of each group
    const i64 first = i64(blockIdx.x) * ROWS + warp() * 16 + lane() / 4;
    u32 n[GROUPS][2][PAIRS];
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const i64 row = first + 8 * side;
        float sum = 0, squares = 0;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            if (row < rows)
                load(n[group][side], x + row * C + group * GROUP + own);
            else
                for (int i = 0; i < PAIRS; i++) n[group][side][i] = 0;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) sum += low_half(n[group][side][i]) + high_half(n[group][side][i]);
        }
        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const float centre = sum / C;
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const float low = low_half(n[group][side][i]) - centre, high = high_half(n[group][side][i]) - centre;
                squares += low * low + high * high;
            }
        for (int step = 1; step < 4; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
        const float scale = reciprocal_root(squares / C + epsilon);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const int channel = group * GROUP + own;
            float scales[2 * PAIRS], shifts[2 * PAIRS];
            load(scales, gamma + channel);
            load(shifts, beta + channel);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                u32& pair = n[group][side][i];
                const float low = (low_half(pair) - centre) * scale, high = (high_half(pair) - centre) * scale;
                pair = pack_bf16(low * scales[2 * i] + shifts[2 * i], high * scales[2 * i + 1] + shifts[2 * i + 1]);
            }
        }
        if (mean && row < rows && own == 0) mean[row] = centre, rstd[row] = scale;
    }

    float out[GROUPS][PAIRS][4] = {};
    Pack<bf16> coming = load_pack(b1 + own, hidden - own); // of the next group of hidden channels
    for (int begin = 0, stage = 0; begin < hidden; begin += CHUNK, stage ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (begin + CHUNK < hidden) chunks[stage ^ 1].fetch(w1, w2, begin + CHUNK, hidden);
        const Chunk<C>& chunk = chunks[stage];
#pragma unroll 1
        for (int at = 0; at < CHUNK; at += GROUP) {
            const int channel = begin + at + own;
            const Pack<bf16> bias = coming;
            coming = load_pack(b1 + channel + GROUP, hidden - channel - GROUP);
            __syncwarp(); // reconverges: the load differs past the last channel
            u32 linear[2][PAIRS], active[2][PAIRS];
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                const float low = widen(bias.at[2 * pair]), high = widen(bias.at[2 * pair + 1]);
                float sums[4] = {low, high, low, high};
                const bf16* row = &chunk.first[at + channel_of_column(pair)][own];
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    u32 weights[PAIRS];
                    load(weights, row + group * GROUP);
                    multiply_add(sums, n[group], weights);
                }
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    const float low = sums[2 * side], high = sums[2 * side + 1];
                    const u32 pre = pack_bf16(low, high);
                    const float a = low_half(pre), b = high_half(pre); // rounded, as the backward pass has them
                    linear[side][pair] = pre;
                    active[side][pair] = pack_bf16(gelu_of<bf16>(a), gelu_of<bf16>(b));
                }
            }
            if (pre_gelu && channel < hidden)
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    const i64 row = first + 8 * side;
                    if (row >= rows) break;
                    store_at_once(pre_gelu + row * hidden + channel, linear[side]);
                }
            __syncwarp(); // reconverges the lanes that stored with those that did not
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int pair = 0; pair < PAIRS; pair++) {
                    u32 weights[PAIRS];
                    load(weights, &chunk.second[group * GROUP + channel_of_column(pair)][at + own]);
                    multiply_add(out[group][pair], active, weights);
                }
        }
    }

#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int channel = group * GROUP + own;
        const Pack<bf16> bias = load_pack(b2 + channel, 8);
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const i64 row = first + 8 * side;
            if (row >= rows) break;
            u32 sums[PAIRS] = {};
            if (residual) load(sums, x + row * C + channel);
#pragma unroll
            for (int i = 0; i < PAIRS; i++)
                sums[i] = pack_bf16(low_half(sums[i]) + out[group][i][2 * side] + widen(bias.at[2 * i]),
                                    high_half(sums[i]) + out[group][i][2 * side + 1] + widen(bias.at[2 * i + 1]));
            store_at_once(y + row * C + channel, sums);
        }
    }
}
