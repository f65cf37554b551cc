// The gradients of a weight (O, I) and a bias (O), dyᵀ·x and the sum of dy's rows, in one pass over maps that have many
// more rows than channels, so that memory is the limit.
//
// A block takes a piece of the rows and a tile of the weight, tall x wide. It streams its columns of both maps through
// shared memory, in stages of ROWS rows, most of which are on their way at any time. Rows are the products' inner axis,
// so both operands are transposed as they are loaded from there. What a block has summed it writes as partial sums. There
// are too many of them for the last block to add up, so that is another launch.
#include "instructions.cuh"
#include "rows.cuh"

// As in `cuda.rs`.
constexpr int ROWS = 48, STAGES = 4;
constexpr int DOWN = 64, ACROSS = 32; // a warp's part of the tile

// partial (pieces, O·I + O) = the products of the pieces, then, if `biased`, their sums of dy. blockIdx.x numbers the
// tiles, blockIdx.y the pieces. O and I are whole packs.
__global__ void __launch_bounds__(512, 1)
    linear_backward_weight(const bf16* dy, const bf16* x, float* partial, int biased, i64 rows, int outputs, int inputs,
                           int tall, int wide) {
    constexpr int N = Pack<bf16>::size;
    DYNAMIC_SHARED(bf16, shared);
    // One pack more than the columns is an odd number of packs: so the eight rows that a load of a matrix reads lie in
    // different banks.
    const int columns = tall + wide, stride = columns + N;
    const int strips = (inputs + wide - 1) / wide;
    const int first_output = int(blockIdx.x) / strips * tall, first_input = int(blockIdx.x) % strips * wide;
    const i64 piece = blockIdx.y, begin = rows * piece / gridDim.y;
    const int count = int(rows * (piece + 1) / gridDim.y - begin), stages = (count + ROWS - 1) / ROWS;

    // A thread copies the same columns of every `step`-th row, of dy or of x. Surplus threads get no rows.
    const int step = blockDim.x * N / columns, place = threadIdx.x * N / columns;
    const int own = threadIdx.x * N % columns, first_row = place < step ? place : ROWS;
    const bool of_dy = own < tall;
    const int width = of_dy ? outputs : inputs, column = of_dy ? first_output + own : first_input + own - tall;
    const bool inside = column < width;
    const bf16* map = of_dy ? dy : x;
    auto fetch = [&](int stage) {
        bf16* to = shared + (stage % STAGES * ROWS + first_row) * stride + own;
        const bf16* from = map + (begin + stage * ROWS + first_row) * width + column;
        const int end = inside ? count - stage * ROWS : 0; // zeros from here on
        for (int row = stage < stages ? first_row : ROWS; row < ROWS; row += step) {
            copy_async(to, row < end ? from : map, row < end);
            to += step * stride, from += step * width;
        }
        group_copies();
    };

    // Neighbouring warps differ in their outputs: so those that also sum up dy belong to different schedulers.
    const int warps_down = tall / DOWN, output = warp() % warps_down * DOWN, input = warp() / warps_down * ACROSS;
    const bool sums_dy = biased && first_input + input == 0;
    const int g = lane() / 4, p = lane() % 4;
    const bf16* left = shared + (lane() / 16 * 8 + lane() % 8) * stride + output + lane() / 8 % 2 * 8;
    const bf16* right = shared + lane() % 16 * stride + tall + input + lane() / 16 * 8;
    float sums[DOWN / 16][ACROSS / 8][4] = {}, bias[4] = {};
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; stage++) fetch(stage);
    for (int stage = 0; stage < stages; stage++) {
        wait_for_groups_but<STAGES - 2>();
        __syncthreads(); // for this stage's copies, and for the stage before, whose place is free now
        fetch(stage + STAGES - 1);
        const int offset = stage % STAGES * ROWS * stride;
#pragma unroll
        for (int row = 0; row < ROWS; row += 16) {
            u32 a[2][4], b[ACROSS / 16][4];
            load_transposed(a[0], left + offset + row * stride);
#pragma unroll
            for (int j = 0; j < ACROSS / 16; j++) load_transposed(b[j], right + offset + row * stride + j * 16);
#pragma unroll
            for (int i = 0; i < DOWN / 16; i++) {
                if (i + 1 < DOWN / 16) load_transposed(a[(i + 1) % 2], left + offset + row * stride + (i + 1) * 16);
#pragma unroll
                for (int j = 0; j < ACROSS / 8; j++) {
                    const u32 half[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                    multiply_add(sums[i][j], a[i % 2], half);
                }
                if (sums_dy) { // a product with ones in column i: so all sums share an accumulator
                    const u32 pair = g == i ? 0x3f803f80 : 0, ones[2] = {pair, pair};
                    multiply_add(bias, a[i % 2], ones);
                }
            }
        }
    }

    const int weights = outputs * inputs;
    partial += piece * (weights + (biased ? outputs : 0));
#pragma unroll
    for (int i = 0; i < DOWN / 16; i++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int o = first_output + output + i * 16 + side * 8 + g;
            if (o >= outputs) continue;
#pragma unroll
            for (int j = 0; j < ACROSS / 8; j++) {
                const int at = first_input + input + j * 8 + p * 2;
                const Pack<float, 2> pair = {{sums[i][j][2 * side], sums[i][j][2 * side + 1]}};
                if (at < inputs) store_pack(partial + o * inputs + at, pair, 2);
            }
            if (sums_dy && p == i / 2) partial[weights + o] = bias[2 * side + i % 2];
        }
}

// dweight (O, I) and dbias (O), if there is one: the sums of partial (pieces, O·I + O) over the pieces.
template <typename T>
__global__ void linear_add_pieces(const float* partial, T* dweight, int accumulate, T* dbias, int accumulate_bias,
                                  int weights, i64 pieces, int columns, int across) {
    constexpr int N = Pack<float>::size;
    Tile<float> tile(pieces, columns, across, blockIdx.x);
    float sums[N] = {};
    for (i64 piece = tile.row; piece < tile.end; piece += BATCH * tile.step) {
        Pack<float> batch[BATCH];
        tile.load(partial, piece, columns, batch);
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int j = 0; j < N; j++) sums[j] += batch[b].at[j]; // zeros beyond the end
    }
    const float sum = tile.add_up(sums, across);
    if (tile.own < 0) return;
    if (tile.own < weights) put(dweight + tile.own, sum, accumulate);
    else put(dbias + (tile.own - weights), sum, accumulate_bias);
}
