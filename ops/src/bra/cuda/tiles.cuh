// Tiles of tokens in shared memory, and their products on tensor cores: the building blocks of tensor_cores.cuh,
// masked.cuh and single.cuh.

#pragma once
#include "geometry.cuh"
#include "instructions.cuh"

constexpr int TILE = 64;          // keys of a tile
constexpr int STEPS = TILE / 16;  // products of 16 keys in it
// Products take 16 channels at a time, so a head with D channels takes PARTS of them. Channels past its last are zero.
template <int D>
constexpr int PARTS = (D + 15) / 16;
template <int D>
constexpr int PADDED = PARTS<D> * 16;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// A row of channels in shared memory, and Rows of PADDED<D> channels. Chunks of 8 channels are swizzled: permuted from
// row to row, with a period of eight rows, so that the chunks of the same channels in eight rows lie in different
// banks.
struct Row {
    bf16* data;
    int turn;

    __device__ __forceinline__ bf16* at(int channel) const { return data + ((channel / 8 ^ turn) * 8 + channel % 8); }
};
template <int D>
struct Rows {
    bf16* data;

    __device__ __forceinline__ Row row(int i) const { return {data + i * PADDED<D>, D == 64 ? i & 7 : i >> 1 & 3}; }
};

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

// Queries (or their upstream gradients) as right operands: groups of eight columns, PADDED<D> rows. A lane holds
// elements of column lane / 4, loaded directly from global memory; zeros where there is no query.
template <int D, int GROUPS, typename Pixel>
__device__ __forceinline__ void load_columns(u32 (&to)[GROUPS][PARTS<D>][2], const bf16* map, int stride, int count,
                                             Pixel pixel) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        int query = group * 8 + lane() / 4;
        const bf16* from = map + i64(pixel(max(min(query, count - 1), 0))) * stride + lane() % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * PARTS<D>; i++)
            to[group][i / 2][i % 2] = query < count && i < D / 8 ? *reinterpret_cast<const u32*>(from + 8 * i) : 0;
    }
}

// One value per token of a tile. Each lane looks up two of them, and gets the rest from other lanes by shuffles.
template <typename T>
struct OfTile {
    T own[TILE / 32];

    template <typename LookUp>
    __device__ __forceinline__ OfTile(LookUp look_up) {
#pragma unroll
        for (int i = 0; i < TILE / 32; i++) own[i] = look_up(i * 32 + int(lane()));
    }

    // Values computed from another value of each token.
    template <typename Known, typename LookUp>
    __device__ __forceinline__ OfTile(const OfTile<Known>& known, LookUp look_up) {
#pragma unroll
        for (int i = 0; i < TILE / 32; i++) own[i] = look_up(known.own[i], i * 32 + int(lane()));
    }

    // The value of token base + offset, which must lie in the same half of the tile for all lanes.
    __device__ __forceinline__ T at(int base, int offset) const {
        return __shfl_sync(~0u, own[base / 32], base % 32 + offset);
    }
};

// The rows of a tile's tokens in shared memory whose addresses a lane supplies to matrix loads: for left operands as
// stored (a product of 16 keys and 16 channels takes rows lane % 16), or transposed. They are computed when needed, as
// keeping them would take too many registers.
template <bool RESIDENT>
struct TileRows {
    OfTile<int> places; // used if all tokens are resident; otherwise the tile's rows lie in order

    template <int D>
    __device__ __forceinline__ Row row(Rows<D> rows, int step, int offset) const {
        if (RESIDENT) return rows.row(places.at(step * 16, offset));
        return rows.row(step * 16 + offset);
    }
    template <int D>
    __device__ __forceinline__ Row plain(Rows<D> rows, int step) const {
        return row(rows, step, lane() % 16);
    }
    template <int D>
    __device__ __forceinline__ Row transposed(Rows<D> rows, int step) const {
        return row(rows, step, lane() / 16 * 8 + lane() % 8);
    }
};

// scores (16 keys of a step, 8 queries a group) = rows·columns, D channels.
template <int D, int GROUPS, bool RESIDENT>
__device__ __forceinline__ void step_product(float (&scores)[GROUPS][4], Rows<D> rows, const TileRows<RESIDENT>& at,
                                             int step, const u32 (&columns)[GROUPS][PARTS<D>][2]) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[group][i] = 0;
    const Row row = at.plain(rows, step);
#pragma unroll
    for (int part = 0; part < PARTS<D>; part++) {
        u32 left[4];
        load_matrices(left, row.at(part * 16 + lane() / 16 * 8));
#pragma unroll
        for (int group = 0; group < GROUPS; group++) multiply_add(scores[group], left, columns[group][part]);
    }
}

// sums (D channels, 8 queries a group) += rowsᵀ·weights, with weights (16 keys of a step, 8 queries a group).
template <int D, int GROUPS, bool RESIDENT>
__device__ __forceinline__ void add_weighted(float (&sums)[GROUPS][PARTS<D>][4], Rows<D> rows, const TileRows<RESIDENT>& at,
                                             int step, const float (&weights)[GROUPS][4]) {
    u32 right[GROUPS][2];
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            right[group][half] = transpose(pack_bf16(weights[group][half * 2], weights[group][half * 2 + 1]));
    const Row row = at.transposed(rows, step);
#pragma unroll
    for (int part = 0; part < PARTS<D>; part++) {
        u32 left[4];
        load_transposed(left, row.at(part * 16 + lane() / 8 % 2 * 8));
#pragma unroll
        for (int group = 0; group < GROUPS; group++) multiply_add(sums[group][part], left, right[group]);
    }
}

// Masks the scores of a tile's rows from `count` on, which are not keys.
template <int GROUPS>
__device__ __forceinline__ void hide_behind(int count, float (&scores)[STEPS][GROUPS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (step * 16 + i / 2 * 8 + int(lane() / 4) >= count) scores[step][group][i] = -INFINITY;
}

// Writes (D channels, 8 queries a group) into the queries' pixels, stored or added: transposed, so that a lane has two
// neighbouring channels of query lane / 4.
template <int D, int GROUPS, typename Pixel>
__device__ __forceinline__ void store_columns(const float (&columns)[GROUPS][PARTS<D>][4], bf16* map, int stride, int count,
                                              int accumulate, Pixel pixel) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        int query = group * 8 + lane() / 4;
        bf16* to = map + i64(pixel(max(min(query, count - 1), 0))) * stride + lane() % 4 * 2;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            const float* pair = columns[group][i / 2] + i % 2 * 2;
            __syncwarp(); // reconverges the lanes that stored with those that did not
            u32 packed = transpose(pack_bf16(pair[0], pair[1]));
            if (query >= count) continue;
            if (accumulate) {
                u32 old = *reinterpret_cast<u32*>(to + 8 * i);
                packed = add_pairs(old, packed);
            }
            *reinterpret_cast<u32*>(to + 8 * i) = packed;
        }
    }
    __syncwarp();
}

// The sum, or the largest, of a column: over the lanes that hold its rows.
__device__ __forceinline__ float column_sum(float x) {
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
__device__ __forceinline__ float column_max(float x) {
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// Eight lanes hold the values of columns 2p and 2p + 1 of each group. Each of these queries is handled by one of them.
template <int GROUPS>
struct OwnColumn {
    int place, query; // a query past every count stands for none

    __device__ __forceinline__ OwnColumn() : place(lane() / 4) {
        query = place < 2 * GROUPS ? place / 2 * 8 + int(lane() % 4) * 2 + place % 2 : 0x7fffffff;
    }

    __device__ __forceinline__ float of(const float (&columns)[GROUPS][2]) const {
        float own = 0;
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; i++) own = i == place ? columns[i / 2][i % 2] : own;
        return own;
    }
};

// The maximum number of threads of a block whose warps take SIZE tokens at a time: many if all tokens are resident, as
// shared memory then leaves room for only a few blocks; otherwise as many as share one tile.
template <bool RESIDENT, int SIZE>
constexpr int THREADS = RESIDENT ? 256 : TILE / SIZE * 32;

// The number of blocks per multiprocessor for which registers must suffice: as many as possible without spilling. Warps
// that take eight tokens at a time, from regions that small, stall most and need the fewest registers.
template <int D, bool RESIDENT, int SIZE>
constexpr int BLOCKS = D > 32 ? 1 : THREADS<RESIDENT, SIZE> == 128 || RESIDENT && SIZE == 8 ? 3 : 2;

// For tiles that need nothing loaded besides their rows.
struct Nothing {
    __device__ __forceinline__ Nothing operator()(int, int) const { return {}; }
};

// Two maps of a head's channels, and where parts of both lie in shared memory: all tokens, region after region, or those
// of a tile.
template <int D, bool RESIDENT>
struct Pair {
    Rows<D> first, second;
    const bf16 *first_map, *second_map;
    int first_stride, second_stride;

    // Starts the copies of `count` tokens, and of zeros into the rows after them up to `rows`. `pixel(i)` is where the
    // i-th token lies.
    template <typename Pixel>
    __device__ __forceinline__ void ask_for(int rows, int count, Pixel pixel) {
        constexpr int CHUNKS = PADDED<D> / 8;
        for (int i = threadIdx.x; i < rows * CHUNKS; i += blockDim.x) {
            const int row = i / CHUNKS, channel = i % CHUNKS * 8;
            const bool exists = row < count && channel < D;
            const int at = exists ? pixel(row) : 0;
            copy_async(first.row(row).at(channel), first_map + i64(at) * first_stride + channel, exists);
            copy_async(second.row(row).at(channel), second_map + i64(at) * second_stride + channel, exists);
        }
    }

    // Waits until the copies of all the block's threads have arrived.
    __device__ __forceinline__ void wait() {
        wait_for_copies();
        __syncthreads();
    }

    __device__ __forceinline__ Pair(const Geometry& g, bf16* shared, const bf16* first_map, int first_stride,
                                    const bf16* second_map, int second_stride)
        : first_map(first_map), second_map(second_map), first_stride(first_stride), second_stride(second_stride) {
        const int held = RESIDENT ? int(g.tokens()) : TILE;
        first.data = shared, second.data = shared + held * PADDED<D>;
        if (RESIDENT) {
            ask_for(held, held, [&](int i) { return g.pixel_of(i); });
            wait();
        }
    }

    // Iterates over the `count` tokens of regions `region(0)`, `region(1)`, ..., tile by tile: `visit(rows of the tile,
    // tokens in it, what was loaded for it)`, where `load(tokens in it, number of its first)` runs while the tile is
    // being copied.
    template <typename Region, typename Load, typename Visit>
    __device__ __forceinline__ void for_each_tile(const Geometry& g, int count, Region region, Load load, Visit visit) {
        const Divisor tokens = g.region_tokens;
        for (int from = 0; from < count; from += TILE) {
            const int here = min(TILE, count - from);
            if (!RESIDENT) {
                __syncthreads();
                ask_for(TILE, here, [&](int i) { return g.pixel(region((from + i) / tokens), (from + i) % tokens); });
            }
            const auto loaded = load(here, from);
            if (!RESIDENT) wait();
            const TileRows<RESIDENT> rows = {[&](int i) {
                int token = from + min(i, here - 1);
                return RESIDENT ? region(token / tokens) * tokens + token % tokens : i;
            }};
            visit(rows, here, loaded);
        }
    }
};

// Distributes chunks of `size` tokens of a block's regions among its warps: `work(region, first token)`. If tiles are
// fetched as they are needed, all warps iterate over them together, even one that has no tokens left.
template <bool RESIDENT, typename Work>
__device__ __forceinline__ void for_each_chunk(const Geometry& g, int size, Work work) {
    const int warps = blockDim.x / 32, chunks = (g.region_tokens + size - 1) / size;
    if (RESIDENT) {
        for (int i = warp(); i < g.regions() * chunks; i += warps) {
            const int region = chunks == 1 ? i : i / chunks; // a division takes as long as a product of matrices
            work(region, (i - region * chunks) * size);
        }
    } else {
        for (int first = 0; first < g.region_tokens; first += warps * size)
            work(blockIdx.x, first + int(warp()) * size);
    }
}

// What a chunk takes besides its queries, in regions of these: its keys are fetched, and their gradients stored.
constexpr int PER_CHUNK = 2;

// The same for work that grows with the regions whose queries attend to a chunk, those from starts[region] to
// starts[region + 1]. If each warp takes its chunks by itself, these are neighbours, in shares of equal work: regions are
// attended to by very different numbers of others.
template <bool RESIDENT, typename Work>
__device__ __forceinline__ void for_each_chunk_by_work(const Geometry& g, const u32* starts, int size, Work work) {
    if (!RESIDENT) return for_each_chunk<false>(g, size, work);
    const int warps = blockDim.x / 32, chunks = (g.region_tokens + size - 1) / size, count = g.regions() * chunks;
    auto region_of = [&](int i) { return chunks == 1 ? i : i / chunks; };
    auto work_before = [&](int i) {
        const int region = region_of(i), chunk = i - region * chunks, first = starts[region];
        return first * chunks + (chunk > 0 ? (int(starts[region + 1]) - first) * chunk : 0) + i * PER_CHUNK;
    };
    const int all = work_before(count);
    // The number of chunks before the share of a warp.
    auto begin = [&](int share) {
        int before = 0;
        for (int from = 0; from < count; from += 32) {
            const int i = min(from + int(lane()), count);
            before += __popc(__ballot_sync(~0u, work_before(i) * warps < share * all));
        }
        return before;
    };
    const int end = begin(warp() + 1);
    for (int i = begin(warp()); i < end; i++) {
        const int region = region_of(i);
        work(region, (i - region * chunks) * size);
    }
}
