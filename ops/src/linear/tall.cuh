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
constexpr int MOST_SUMS = DOWN / 16; // of how many times 16 outputs a warp sums up dy: fewer if the tile is wider
// Copies between two branches: each branch before a copy costs as much as a copy. Steps are at most ROWS / BATCH rows.
constexpr int BATCH = 3;

// A thread's place in a map (R, C): its pack of the current row. Its rows follow each other `step` apart.
struct Rows {
    const bf16* at;
    int skip; // elements to its next row

    __device__ __forceinline__ Rows(const bf16* map, int width, int column, i64 row, int step)
        : at(map + row * width + column), skip(step * width) {}
    __device__ __forceinline__ void next() { at += skip; }
    __device__ __forceinline__ bool exists() const { return true; } // if not, the pack is zeros
    __device__ __forceinline__ void copy(bf16* to, bool exists) const { copy_async(to, at, exists); }
};

// What a thread copies of `columns` of a stage: a pack of every `step`-th row. Steps divide the rows, so after the last
// of these a thread's next row is the first of its next stage. Threads that are too many for that have no rows.
struct Share {
    int step, row, column;

    // `others` is the tile's other extent: the block's threads are enough for an eighth as many rows.
    __device__ __forceinline__ Share(int columns, int others) : step(others >= 128 ? 16 : others >= 64 ? 8 : 4) {
        const int packs = columns / Pack<bf16>::size;
        row = threadIdx.x / packs, column = (threadIdx.x - row * packs) * Pack<bf16>::size;
        if (row >= step) row = ROWS;
    }

    // Starts copying a stage, of whose rows the map has `count`; the others become zeros. If it is WHOLE, no row is
    // checked.
    template <bool WHOLE, typename Map>
    __device__ __forceinline__ void copy(Map& map, bf16* shared, int to, int stride, int count) const {
#pragma unroll 1
        for (int first = row; first < ROWS; first += BATCH * step, to += BATCH * step * stride)
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const bool exists = map.exists() && (WHOLE || first + i * step < count);
                map.copy(shared + to + i * step * stride, exists);
                map.next();
            }
    }
};

// The products of a stage's rows: sums += leftᵀ·right.
__device__ __forceinline__ void add_products(const bf16* left, const bf16* right, int stride,
                                             float (&sums)[DOWN / 16][ACROSS / 8][4]) {
#pragma unroll
    for (int row = 0; row < ROWS; row += 16) {
        u32 a[2][4], b[ACROSS / 16][4];
        load_transposed(a[0], left);
#pragma unroll
        for (int j = 0; j < ACROSS / 16; j++) load_transposed(b[j], right, j * 16);
#pragma unroll
        for (int i = 0; i < DOWN / 16; i++) {
            if (i + 1 < DOWN / 16) load_transposed(a[(i + 1) % 2], left, (i + 1) * 16);
#pragma unroll
            for (int j = 0; j < ACROSS / 8; j++) {
                const u32 half[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                multiply_add(sums[i][j], a[i % 2], half);
            }
        }
        left += 16 * stride, right += 16 * stride;
    }
}

// The sums of 16 of its columns: column i of `bias` += leftᵀ·1. So up to eight times 16 columns share an accumulator.
__device__ __forceinline__ void add_rows(const bf16* left, int stride, u32 i, float (&bias)[4]) {
    const u32 pair = lane() / 4 == i ? 0x3f803f80 : 0, ones[2] = {pair, pair};
#pragma unroll
    for (int row = 0; row < ROWS; row += 16) {
        u32 a[4];
        load_transposed(a, left + row * stride);
        multiply_add(bias, a, ones);
    }
}

// partial (pieces, O·I + O) = the products of the pieces, then, if `biased`, their sums of dy. blockIdx.x numbers the
// tiles, blockIdx.y the pieces. O and I are whole packs. column_of(c, row, step) gives column c of x from a row on, as
// `Rows` or the like.
template <typename Column>
__device__ __forceinline__ void multiply(const bf16* dy, Column column_of, float* partial, int biased, i64 rows,
                                         int outputs, int inputs, int tall, int wide) {
    constexpr int N = Pack<bf16>::size;
    DYNAMIC_SHARED(bf16, shared);
    // One pack more than the columns is an odd number of packs: so the eight rows that a load of a matrix reads lie in
    // different banks.
    const int stride = tall + wide + N;
    const int strips = (inputs + wide - 1) / wide;
    const int first_output = int(blockIdx.x) / strips * tall, first_input = int(blockIdx.x) % strips * wide;
    const i64 piece = blockIdx.y, begin = rows * piece / gridDim.y;
    const int count = int(rows * (piece + 1) / gridDim.y - begin);

    // Columns past the last are copies of it: what comes of them is not stored.
    const Share left_share(tall, wide), right_share(wide, tall);
    Rows left_map(dy, outputs, min(first_output + left_share.column, outputs - N), begin + left_share.row,
                  left_share.step);
    auto right_map = column_of(min(first_input + right_share.column, inputs - N), begin + right_share.row,
                               right_share.step);
    const int left_to = left_share.row * stride + left_share.column;
    const int right_to = right_share.row * stride + tall + right_share.column;

    const int warps_down = tall / DOWN, output = warp() % warps_down * DOWN, input = warp() / warps_down * ACROSS;
    // If the block has the first inputs, its warps share the sums of dy: 16 outputs of every `apart` are this one's.
    const int sums_end = biased && first_input == 0 ? tall : 0, apart = blockDim.x / 32 * 16, first_sum = warp() * 16;
    const int left = (lane() / 16 * 8 + lane() % 8) * stride + lane() / 8 % 2 * 8;
    const int right = lane() % 16 * stride + tall + input + lane() / 16 * 8;
    float sums[DOWN / 16][ACROSS / 8][4] = {}, bias[4] = {};
#pragma unroll 1
    for (int stage = 1 - STAGES; stage * ROWS < count; stage++) {
        wait_for_groups_but<STAGES - 2>();
        __syncthreads(); // for this stage's copies, and for the stage before, whose place is free now
        const int next = stage + STAGES - 1, more = count - next * ROWS;
        if (const int place = u32(next) % STAGES * ROWS * stride; more >= ROWS) {
            left_share.copy<true>(left_map, shared, left_to + place, stride, ROWS);
            right_share.copy<true>(right_map, shared, right_to + place, stride, ROWS);
        } else if (more > 0) {
            left_share.copy<false>(left_map, shared, left_to + place, stride, more);
            right_share.copy<false>(right_map, shared, right_to + place, stride, more);
        }
        group_copies();
        __syncwarp(); // reconverges: lanes copy different numbers of rows
        if (stage < 0) continue;
        const bf16* from = shared + u32(stage) % STAGES * ROWS * stride;
#pragma unroll 1
        for (int i = 0, sum = first_sum; sum < sums_end; i++, sum += apart)
            add_rows(from + left + sum, stride, i, bias);
        add_products(from + left + output, from + right, stride, sums);
    }

    const int weights = outputs * inputs, g = lane() / 4, p = lane() % 4;
    partial += piece * (weights + (biased ? outputs : 0));
#pragma unroll
    for (int i = 0; i < DOWN / 16; i++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int o = first_output + output + i * 16 + side * 8 + g;
            if (o >= outputs) continue;
            float* const to = partial + o * inputs + first_input + input + p * 2;
#pragma unroll
            for (int j = 0; j < ACROSS / 8; j++) // whole packs: so pairs are aligned, and all of eight columns exist
                if (first_input + input + j * 8 < inputs)
                    *reinterpret_cast<Pack<float, 2>*>(to + j * 8) = {{sums[i][j][2 * side], sums[i][j][2 * side + 1]}};
        }
#pragma unroll
    for (int i = 0; i < MOST_SUMS; i++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int own = first_sum + i * apart + side * 8 + g, o = first_output + own;
            if (p == i / 2 && own < sums_end && o < outputs) partial[weights + o] = bias[2 * side + i % 2];
        }
}

} // namespace tall
