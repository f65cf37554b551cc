// The gathered form's tokens of a head in shared memory: rows of channels, tiles of rows, and how blocks and warps divide
// them.

#pragma once
#include "own_rows.cuh"

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

// The rows of a tile's tokens in shared memory whose addresses a lane supplies to matrix loads, of which a step has sixteen.
// They are computed when needed, as keeping them would take too many registers.
template <bool RESIDENT>
struct TileRows {
    OfTile<int> places; // used if all tokens are resident; otherwise the tile's rows lie in order

    template <int D>
    __device__ __forceinline__ Row row(Rows<D> rows, int step, int offset) const {
        if (RESIDENT) return rows.row(places.at(step * 16, offset));
        return rows.row(step * 16 + offset);
    }
    // As `left_rows` and `right_rows` of own_rows.cuh.
    template <int D>
    __device__ __forceinline__ Row left(Rows<D> rows, int step) const {
        return row(rows, step, lane() % 16);
    }
    template <int D>
    __device__ __forceinline__ Row right(Rows<D> rows, int step) const {
        return row(rows, step, lane() / 16 * 8 + lane() % 8);
    }
};

// The tokens that a warp owns at a time.
constexpr int OWN_ROWS = 16;

// The maximum number of threads of a block: many if all tokens are resident, as shared memory then leaves room for only a
// few blocks; otherwise as many as share one tile.
template <bool RESIDENT>
constexpr int THREADS = RESIDENT ? 256 : TILE / OWN_ROWS * 32;

// The number of blocks per multiprocessor for which registers must suffice: as many as possible without spilling.
template <int D, bool RESIDENT>
constexpr int BLOCKS = D > 32 ? 1 : RESIDENT ? 2 : 3;

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

    // Fetches `here` of the tokens of regions `region(0)`, `region(1)`, ..., from number `from` on, at most a tile, for
    // `visit(rows of the tile, tokens in it, what was loaded for it)`, where `load(tokens in it, number of its first)` runs
    // while the tile is being copied.
    template <typename Region, typename Load, typename Visit>
    __device__ __forceinline__ void with_tile(const Geometry& g, int from, int here, Region region, Load load, Visit visit) {
        const Divisor tokens = g.region_tokens;
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

    // The same for all of their `count` tokens, tile by tile.
    template <typename Region, typename Load, typename Visit>
    __device__ __forceinline__ void for_each_tile(const Geometry& g, int count, Region region, Load load, Visit visit) {
        for (int from = 0; from < count; from += TILE) with_tile(g, from, min(TILE, count - from), region, load, visit);
    }
};

// Distributes chunks of sixteen tokens of a block's regions among its warps: `work(region, first token)`. If tiles are
// fetched as they are needed, all warps iterate over them together, even one that has no tokens left.
template <bool RESIDENT, typename Work>
__device__ __forceinline__ void for_each_chunk(const Geometry& g, Work work) {
    const int warps = blockDim.x / 32, chunks = (g.region_tokens + OWN_ROWS - 1) / OWN_ROWS;
    if (RESIDENT) {
        for (int i = warp(); i < g.regions() * chunks; i += warps) {
            const int region = chunks == 1 ? i : i / chunks; // a division takes as long as a product of matrices
            work(region, (i - region * chunks) * OWN_ROWS);
        }
    } else {
        for (int first = 0; first < g.region_tokens; first += warps * OWN_ROWS)
            work(blockIdx.x, first + int(warp()) * OWN_ROWS);
    }
}

// What a chunk takes besides its queries, in regions of these: its keys are fetched, and their gradients stored.
constexpr int PER_CHUNK = 2;

// The same for work that grows with the regions whose queries attend to a chunk, those from starts[region] to
// starts[region + 1]. If each warp takes its chunks by itself, these are neighbours, in shares of equal work: regions are
// attended to by very different numbers of others.
template <bool RESIDENT, typename Work>
__device__ __forceinline__ void for_each_chunk_by_work(const Geometry& g, const u32* starts, Work work) {
    if (!RESIDENT) return for_each_chunk<false>(g, work);
    const int warps = blockDim.x / 32, chunks = (g.region_tokens + OWN_ROWS - 1) / OWN_ROWS, count = g.regions() * chunks;
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
        work(region, (i - region * chunks) * OWN_ROWS);
    }
}
