// Products in which a warp owns rows, sixteen a tile, and iterates over the others in steps of sixteen, which are columns:
// the building blocks of masked.cuh and single.cuh. S = Q·Kᵀ comes out laid out as the left operand of P·V. A lane has
// rows lane / 4 and lane / 4 + 8 of a tile, its two `halves`, and of each group of eight columns, two a step, columns 2p
// and 2p + 1 (p = lane % 4).

#pragma once
#include "tiles.cuh"

constexpr int STEP = 16;

__device__ __forceinline__ int own_row(int tile, int half) { return tile * 16 + half * 8 + lane() / 4; }

// Rows first, first + 1, ... of a map as left operands.
template <int D, int TILES>
struct Own {
    u32 at[TILES][PARTS<D>][4];

    __device__ __forceinline__ Own(Rows<D> map, int first) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int part = 0; part < PARTS<D>; part++)
                load_matrices(at[tile][part], map.row(first + tile * 16 + lane() % 16).at(part * 16 + lane() / 16 * 8));
    }
};

// Row `from + i` of a map, where `from` is a multiple of the swizzle's period, so that only the data move on with it.
template <int D>
__device__ __forceinline__ Row moved(Rows<D> map, int from, int i) {
    const Row row = map.row(i);
    return {row.data + from * PADDED<D>, row.turn};
}

// products (tiles of 16 rows, two groups of 8 columns) = own·othersᵀ, for the others from `from` on.
template <int D, int TILES>
__device__ __forceinline__ void multiply_step(float (&products)[TILES][2][4], const Own<D, TILES>& own, Rows<D> others, int from) {
    const Row row = moved(others, from, lane() / 16 * 8 + lane() % 8);
#pragma unroll
    for (int part = 0; part < PARTS<D>; part++) {
        u32 right[4];
        load_matrices(right, row.at(part * 16 + lane() / 8 % 2 * 8));
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            float(&to)[4] = products[i / 2][i % 2];
            const u32 own_right[2] = {right[i % 2 * 2], right[i % 2 * 2 + 1]};
            if (part == 0) multiply(to, own.at[i / 2][0], own_right);
            else multiply_add(to, own.at[i / 2][part], own_right);
        }
    }
}

// Weights (tiles of 16 rows, two groups of 8 columns) as left operands.
template <int TILES>
__device__ __forceinline__ void pack(u32 (&left)[TILES][4], const float (&weights)[TILES][2][4]) {
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) {
        const float* pair = weights[i / 4][i / 2 % 2] + i % 2 * 2;
        left[i / 4][i % 4] = pack_bf16(pair[0], pair[1]);
    }
}

// sums (tiles of 16 rows, groups of 8 channels) += weights·others, for their channels from `channel` on.
template <int D, int TILES, int GROUPS>
__device__ __forceinline__ void add_step(float (&sums)[TILES][GROUPS][4], const u32 (&weights)[TILES][4], Rows<D> others,
                                         int from, int channel = 0) {
    const Row row = moved(others, from, lane() % 16);
#pragma unroll
    for (int part = 0; part < GROUPS / 2; part++) {
        u32 right[4];
        load_transposed(right, row.at(channel + part * 16 + lane() / 16 * 8));
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            multiply_add(sums[tile][2 * part], weights[tile], {right[0], right[1]});
            multiply_add(sums[tile][2 * part + 1], weights[tile], {right[2], right[3]});
        }
    }
}

// Rounds a tile's groups of 8 columns, times a factor for each half, and stores them into a map in shared memory: rows from
// `first` on, columns from `column` on.
template <int D, int GROUPS>
__device__ __forceinline__ void keep(Rows<D> map, int first, const float (&sums)[GROUPS][4], const float (&factors)[2],
                                     int column = 0) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const Row row = map.row(first + own_row(0, half));
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const float* pair = sums[group] + half * 2;
            *reinterpret_cast<u32*>(row.at(column + group * 8 + lane() % 4 * 2)) =
                pack_bf16(pair[0] * factors[half], pair[1] * factors[half]);
        }
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

// Sixteen rows of a map as a left factor, straight from memory; zeros where there is no row.
template <int D, typename Pixel>
__device__ __forceinline__ void load_rows(u32 (&to)[PARTS<D>][4], const bf16* map, int stride, int count, Pixel pixel) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = half * 8 + lane() / 4;
        const bf16* from = map + i64(pixel(max(min(row, count - 1), 0))) * stride + lane() % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * PARTS<D>; i++)
            to[i / 2][i % 2 * 2 + half] = row < count && i < D / 8 ? *reinterpret_cast<const u32*>(from + 8 * i) : 0;
    }
}

// Writes sixteen rows, stored or added: the first `groups` of their groups of eight channels. Of two groups, a lane gets
// four channels of one in exchange for its neighbour's two of the other, so that memory gets whole sectors of 32 bytes.
template <int GROUPS, typename Pixel>
__device__ __forceinline__ void store_rows(const float (&rows)[GROUPS][4], int groups, bf16* map, int stride, int count,
                                           int accumulate, Pixel pixel) {
    const int odd = lane() % 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = half * 8 + lane() / 4;
        bf16* to = map + i64(pixel(max(min(row, count - 1), 0))) * stride + odd * 8 + lane() % 4 / 2 * 4;
#pragma unroll
        for (int i = 0; i < GROUPS; i += 2) {
            __syncwarp(); // reconverges the lanes that stored with those that did not
            const u32 first = pack_bf16(rows[i][half * 2], rows[i][half * 2 + 1]);
            const u32 second = pack_bf16(rows[i + 1][half * 2], rows[i + 1][half * 2 + 1]);
            const u32 other = __shfl_xor_sync(~0u, odd ? first : second, 1);
            Pack<u32, 2> own = {{odd ? other : first, odd ? second : other}};
            if (row >= count || i + odd >= groups) continue;
            Pack<u32, 2>* there = reinterpret_cast<Pack<u32, 2>*>(to + 8 * i);
            if (accumulate) {
                const Pack<u32, 2> old = *there;
                own = {{add_pairs(old.at[0], own.at[0]), add_pairs(old.at[1], own.at[1])}};
            }
            *there = own;
        }
    }
}
