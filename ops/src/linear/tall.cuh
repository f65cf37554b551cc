// Products dyᵀ·x of maps dy (R, O) and x (R, I) that have many more rows than columns, so that memory is the limit, and
// the sum of dy's rows, in one pass over both: gradients of weights and biases.
//
// A block takes a piece of the rows and a tile of the weight, tall x wide. It streams its columns of both maps through
// shared memory, in stages of ROWS rows, most of which are on their way at any time. Rows are the products' inner axis,
// so both operands are transposed as they are loaded from there. What a block has summed it writes as partial sums.
// There are too many of them for the last block to add up, so that is another launch.
#pragma once
#include "instructions.cuh"

namespace tall {

// As in `tall.rs`.
constexpr int ROWS = 48, STAGES = 4;
constexpr int DOWN = 64, ACROSS = 32; // a warp's part of the tile
constexpr int MOST_THREADS = 512;

// A thread's column of a map (R, C): where its pack of each row is, and whether there is one (if not, it is zeros).
struct Rows {
    const bf16* from;
    int width;
    const bf16* at; // the pack of the current row

    __device__ __forceinline__ Rows(const bf16* map, int width, int column) : from(map + column), width(width) {}
    __device__ __forceinline__ void go_to(i64 row) { at = from + row * width; }
    __device__ __forceinline__ void skip(int rows) { at += rows * width; }
    __device__ __forceinline__ bool exists() const { return true; }
};

// Starts copying every `step`-th row of a stage from `row` on, or zeros from row `end` on. Row 0 of the stage is row
// `first` of the map.
template <typename Map>
__device__ __forceinline__ void copy_rows(Map& map, i64 first, bf16* to, int row, int step, int end, int stride) {
    for (map.go_to(first + row); row < ROWS; row += step) {
        const bool exists = row < end && map.exists();
        copy_async(to, exists ? map.at : map.from, exists);
        to += step * stride;
        map.skip(step);
    }
}

// partial (pieces, O·I + O) = the products of the pieces, then, if `biased`, their sums of dy. blockIdx.x numbers the
// tiles, blockIdx.y the pieces. O and I are whole packs. column_of(c) gives column c of x, as `Rows` or the like.
template <typename Column>
__device__ __forceinline__ void multiply(const bf16* dy, Column column_of, float* partial, int biased, i64 rows,
                                              int outputs, int inputs, int tall, int wide) {
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
    const int column = of_dy ? first_output + own : first_input + own - tall;
    const bool inside = column < (of_dy ? outputs : inputs);
    Rows left_map(dy, outputs, inside && of_dy ? column : 0);
    auto right_map = column_of(inside && !of_dy ? column : 0);
    auto fetch = [&](int stage) {
        bf16* to = shared + (stage % STAGES * ROWS + first_row) * stride + own;
        const int end = inside ? count - stage * ROWS : 0;
        const i64 first = begin + stage * ROWS;
        if (stage < stages && of_dy) copy_rows(left_map, first, to, first_row, step, end, stride);
        if (stage < stages && !of_dy) copy_rows(right_map, first, to, first_row, step, end, stride);
        group_copies();
        __syncwarp(); // reconverges: lanes copy from two maps, in different numbers of rows
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

} // namespace tall
