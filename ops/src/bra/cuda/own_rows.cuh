// Products in which a warp owns rows, sixteen a tile, and iterates over the others in steps of sixteen, which are columns:
// the building blocks of all attention on tensor cores. S = s·Q·Kᵀ comes out laid out as the left operand of A·V. A
// lane has rows lane / 4 and lane / 4 + 8 of a tile, its two `halves`, and of each group of eight columns, two a step,
// columns 2p and 2p + 1 (p = lane % 4).

#pragma once
#include "geometry.cuh"
#include "instructions.cuh"

constexpr int TILE = 64; // tokens of a tile, and of the steps in which products take them
constexpr int STEP = 16, STEPS = TILE / STEP;
// Products take 16 channels at a time, so a head with D channels takes PARTS of them. Channels past its last are zero.
template <int D>
constexpr int PARTS = (D + 15) / 16;
template <int D>
constexpr int PADDED = PARTS<D> * 16;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Which of a tile's rows one of the halves is.
__device__ __forceinline__ int own_row(int half) { return half * 8 + lane() / 4; }

// Rows of PADDED<D> channels and eight more, so that the same channels of eight rows lie in different banks. That takes more
// memory than the swizzled `Rows` of gathered_tiles.cuh, but a lane's addresses differ by constants. A map may be part of
// the rows, its channels those from FIRST on.
template <int D, int FIRST = 0>
struct PaddedRows {
    static constexpr int STRIDE = PADDED<D> + 8;
    bf16* data;
};

// Where channel `part + channel` of row `from + i` of a map lies: `from` and `part` are constants, or the same in all lanes.
struct Place {
    bf16* at;
    int after; // in elements
};
template <int D, int FIRST>
__device__ __forceinline__ Place place(PaddedRows<D, FIRST> map, int from, int i, int part, int channel) {
    return {map.data + i * map.STRIDE + channel, from * map.STRIDE + FIRST + part};
}

// The map from row `first` on.
template <int D, int FIRST>
__device__ __forceinline__ PaddedRows<D, FIRST> from_row(PaddedRows<D, FIRST> map, int first) {
    return {map.data + first * map.STRIDE};
}

// Eight channels of a row, from `channel` on.
template <int D, int FIRST>
__device__ __forceinline__ bf16* piece(PaddedRows<D, FIRST> map, int row, int channel) {
    return map.data + row * map.STRIDE + FIRST + channel;
}

// The rows whose addresses a lane supplies to matrix loads of rows `from` to `from` + 15 and sixteen channels: for left
// operands as stored, and for right ones transposed.
template <typename Map>
__device__ __forceinline__ Place left_rows(Map map, int from, int part) {
    return place(map, from, lane() % 16, part, lane() / 16 * 8);
}
// For right operands as stored, and for left ones transposed.
template <typename Map>
__device__ __forceinline__ Place right_rows(Map map, int from, int part) {
    return place(map, from, lane() / 16 * 8 + lane() % 8, part, lane() / 8 % 2 * 8);
}

// Sixteen rows of a map, from `first` on, as left operands.
template <int D>
struct Own {
    u32 at[PARTS<D>][4];

    template <typename Map>
    __device__ __forceinline__ Own(Map map, int first) {
#pragma unroll
        for (int part = 0; part < PARTS<D>; part++) {
            const Place own = left_rows(from_row(map, first), 0, part * 16);
            load_matrices(at[part], own.at, own.after);
        }
    }
};

// products (16 rows, two groups of 8 columns) = own·othersᵀ, of the part-th sixteen channels: the first replaces what was
// there, and the next are added.
__device__ __forceinline__ void multiply_part(float (&products)[2][4], const u32 (&own)[4], const u32 (&others)[4], int part) {
#pragma unroll
    for (int group = 0; group < 2; group++) {
        const u32 right[2] = {others[group * 2], others[group * 2 + 1]};
        if (part == 0) multiply(products[group], own, right);
        else multiply_add(products[group], own, right);
    }
}

// The same of all channels, for the others from `from` on.
template <int D, typename Map>
__device__ __forceinline__ void multiply_step(float (&products)[2][4], const Own<D>& own, Map others, int from) {
#pragma unroll
    for (int part = 0; part < PARTS<D>; part++) {
        u32 right[4];
        const Place other = right_rows(others, from, part * 16);
        load_matrices(right, other.at, other.after);
        multiply_part(products, own.at[part], right, part);
    }
}

// Masks the scores of columns from `count` on, which are not keys, in steps of sixteen columns each.
template <int N>
__device__ __forceinline__ void hide_columns(int count, float (&scores)[N][2][4]) {
#pragma unroll
    for (int i = 0; i < 8 * N; i++)
        if (i / 4 * 8 + int(lane()) % 4 * 2 + i % 2 >= count) scores[i / 8][i / 4 % 2][i % 4] = -INFINITY;
}

// Weights (16 rows, two groups of 8 columns) as a left operand.
__device__ __forceinline__ void pack(u32 (&left)[4], const float (&weights)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) left[i] = pack_bf16(weights[i / 2][i % 2 * 2], weights[i / 2][i % 2 * 2 + 1]);
}

// sums (16 rows, groups of 8 channels) += weights·others.
template <int GROUPS, typename Map>
__device__ __forceinline__ void add_step(float (&sums)[GROUPS][4], const u32 (&weights)[4], Map others, int from) {
#pragma unroll
    for (int part = 0; part < GROUPS / 2; part++) {
        u32 right[4];
        const Place other = left_rows(others, from, part * 16);
        load_transposed(right, other.at, other.after);
        multiply_add(sums[2 * part], weights, {right[0], right[1]});
        multiply_add(sums[2 * part + 1], weights, {right[2], right[3]});
    }
}

// Rounds a tile's groups of 8 columns, times a factor for each half, and stores them into a map in shared memory: rows from
// `first` on, columns from `column` on.
template <int GROUPS, typename Map>
__device__ __forceinline__ void keep(Map map, int first, const float (&sums)[GROUPS][4], const float (&factors)[2],
                                     int column = 0) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const float* pair = sums[group] + half * 2;
            const Place to = place(from_row(map, first), half * 8, lane() / 4, column + group * 8, lane() % 4 * 2);
            *reinterpret_cast<u32*>(to.at + to.after) = pack_bf16(pair[0] * factors[half], pair[1] * factors[half]);
        }
}

// The sum, or the largest, of a row: over the lanes that hold its columns.
__device__ __forceinline__ float row_sum(float x) {
    for (int step = 1; step < 4; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
__device__ __forceinline__ float row_max(float x) {
    for (int step = 1; step < 4; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// Where a lane's two rows lie.
struct PixelsOfRows {
    int of_half[2];
};

// The same of sixteen rows of which `count` exist; past the last one, even if that came before these sixteen, where it lies.
template <typename Pixel>
__device__ __forceinline__ PixelsOfRows find_rows(int count, Pixel pixel) {
    return {{pixel(min(own_row(0), count - 1)), pixel(min(own_row(1), count - 1))}};
}

// Sixteen rows of a map as a left factor, straight from memory: with what `find_rows` put in the place of rows that do not
// exist, of which nothing is stored.
template <int D>
__device__ __forceinline__ void load_rows(u32 (&to)[PARTS<D>][4], const bf16* map, int stride, const PixelsOfRows& pixels) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bf16* from = map + i64(pixels.of_half[half]) * stride + lane() % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * PARTS<D>; i++)
            to[i / 2][i % 2 * 2 + half] = i < D / 8 ? *reinterpret_cast<const u32*>(from + 8 * i) : 0;
    }
}

// Writes pairs of channels, stored or added.
template <int N>
__device__ __forceinline__ void put_pairs(bf16* to, Pack<u32, N> own, int accumulate) {
    if (accumulate) {
        const Pack<u32, N> old = *reinterpret_cast<const Pack<u32, N>*>(to);
#pragma unroll
        for (int i = 0; i < N; i++) own.at[i] = add_pairs(old.at[i], own.at[i]);
    }
    store_at_once(to, own.at);
}

// Writes sixteen rows, stored or added: the first `groups` of their groups of eight channels. Of two groups, a lane gets
// four channels of one in exchange for its neighbour's two of the other, so that memory gets whole sectors of 32 bytes.
template <int GROUPS>
__device__ __forceinline__ void store_rows(const float (&rows)[GROUPS][4], int groups, bf16* map, int stride, int count,
                                           int accumulate, const PixelsOfRows& pixels) {
    const int odd = lane() % 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bf16* to = map + i64(pixels.of_half[half]) * stride + odd * 8 + lane() % 4 / 2 * 4;
#pragma unroll
        for (int i = 0; i < GROUPS; i += 2) {
            __syncwarp(); // reconverges the lanes that stored with those that did not
            const u32 first = pack_bf16(rows[i][half * 2], rows[i][half * 2 + 1]);
            const u32 second = pack_bf16(rows[i + 1][half * 2], rows[i + 1][half * 2 + 1]);
            const u32 other = __shfl_xor_sync(~0u, odd ? first : second, 1);
            const Pack<u32, 2> own = {{odd ? other : first, odd ? second : other}};
            if (own_row(half) < count && i + odd < groups) put_pairs(to + 8 * i, own, accumulate);
        }
    }
    __syncwarp(); // and these from whatever the warp does together next
}
