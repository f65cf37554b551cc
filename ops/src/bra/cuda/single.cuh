// Attention in bf16 on tensor cores where each query attends to one region (k = 1), of at most a tile of keys. Then its
// weights are known as soon as its scores are; and backward, the block that owns a region's keys sees all keys of the
// queries that are routed to it, so besides dK and dV it computes their dQ: S is computed once, and everything is read
// once. (gathered.cuh goes through tiles of keys with a running maximum, and backward computes S for queries, and again
// for keys.)
//
// A block has a region of a head and an image, and a warp sixteen of its tokens, as rows.

#pragma once
#include "own_rows.cuh"

constexpr int SINGLE_THREADS = 128; // a warp for each 16 tokens of a tile

// A warp's tokens of a region, whichever it is. A lane copies and stores pieces of its two rows: eight channels, every
// fourth piece.
template <int D>
struct OwnTokens {
    const Geometry& g;
    int first, count; // the first token, and how many there are from it on
    PixelsOfRows after_corner;

    __device__ __forceinline__ OwnTokens(const Geometry& g) : g(g), first(warp() * 16), count(g.region_tokens - first) {
        // Past the region's last token that one again, even if no token is this warp's: lse is read without a branch.
        const int last = g.region_tokens - 1;
#pragma unroll
        for (int half = 0; half < 2; half++)
            after_corner.of_half[half] = g.after_corner(min(first + own_row(half), last));
    }

    __device__ __forceinline__ PixelsOfRows in(int region) const {
        const int corner = g.corner(region);
        return {{corner + after_corner.of_half[0], corner + after_corner.of_half[1]}};
    }

    // Calls visit(half, channel, where it is in a padded map, whether there is such a token and channel).
    template <typename Visit>
    __device__ __forceinline__ void for_each_piece(Visit visit) const {
#pragma unroll
        for (int i = 0; i < PARTS<D>; i++) {
            const int half = i % 2, channel = i / 2 * 32 + lane() % 4 * 8, spot = (first + own_row(half)) * PaddedRows<D>::STRIDE;
            visit(half, channel, spot + channel, own_row(half) < count && channel < D);
        }
    }

    // Starts the copies of these tokens, and of zeros where there are none.
    __device__ __forceinline__ void ask_for(PaddedRows<D> to, const bf16* map, int stride, const PixelsOfRows& pixels) const {
        for_each_piece([&](int half, int channel, int spot, bool exists) {
            copy_async(to.data + spot, map + (pixels.of_half[half] * stride + channel), exists);
        });
    }

    // Rounds these tokens' rows, times a factor for each half, and writes them by way of `shared`, where only this warp's
    // lanes have read these rows, or nobody reads any more.
    __device__ __forceinline__ void put(const float (&rows)[2 * PARTS<D>][4], const float (&factors)[2], PaddedRows<D> shared,
                                        bf16* map, int stride, const PixelsOfRows& pixels, int accumulate) const {
        __syncwarp();
        keep(shared, first, rows, factors);
        __syncwarp();
        for_each_piece([&](int half, int channel, int spot, bool exists) {
            const Pack<u32> own = *reinterpret_cast<const Pack<u32>*>(shared.data + spot);
            if (exists) put_pairs(map + (pixels.of_half[half] * stride + channel), own, accumulate);
        });
    }
};

// out (N, H, W, C) and lse (N, heads, H·W), as `attend` of attention.cuh.
template <int D>
__global__ void __launch_bounds__(SINGLE_THREADS, D > 32 ? 3 : 6)
    attend_single(const bf16* qkv, const u32* routes, float scale, bf16* out, float* lse, GEOMETRY) {
    constexpr int OF_MAP = TILE * PaddedRows<D>::STRIDE;
    const Geometry g = THE_GEOMETRY;
    const int region = blockIdx.x, head = blockIdx.y, image = blockIdx.z;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim(), tokens = g.region_tokens;
    const int all = g.tokens(); // of an image; its elements are counted with an int
    const int route = routes[image * g.regions() + region];
    qkv += i64(image) * (all * row) + head * D;
    out += i64(image) * (all * v_dim) + head * D;
    lse += i64(image) * (all * heads) + head * all;
    DYNAMIC_SHARED(bf16, shared);
    const PaddedRows<D> queries = {shared}, keys = {shared + OF_MAP}, values = {shared + 2 * OF_MAP};
    const OwnTokens<D> own(g);
    const PixelsOfRows pixels = own.in(region), others = own.in(route);
    own.ask_for(queries, qkv, row, pixels);
    own.ask_for(keys, qkv + qk_dim, row, others);
    own.ask_for(values, qkv + 2 * qk_dim, row, others);
    wait_for_copies();
    __syncthreads();

    float weights[STEPS][2][4], largest[2] = {-INFINITY, -INFINITY}, totals[2] = {}, inverse[2];
    const Own<D> own_queries(queries, own.first);
#pragma unroll
    for (int step = 0; step < STEPS; step++) multiply_step(weights[step], own_queries, keys, step * STEP);
    if (tokens < TILE) hide_columns(tokens, weights);
#pragma unroll
    for (int i = 0; i < 8 * STEPS; i++) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], weights[i / 8][i / 4 % 2][i % 4]);
#pragma unroll
    for (int half = 0; half < 2; half++) largest[half] = row_max(largest[half]) * (scale * LOG2_E); // the scale is positive
#pragma unroll
    for (int i = 0; i < 8 * STEPS; i++) {
        float& weight = weights[i / 8][i / 4 % 2][i % 4];
        weight = exp2_fast(weight * (scale * LOG2_E) - largest[i / 2 % 2]);
        totals[i / 2 % 2] += weight;
    }
    float outputs[2 * PARTS<D>][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 left[4];
        pack(left, weights[step]);
        add_step(outputs, left, values, step * STEP);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float total = row_sum(totals[half]);
        inverse[half] = reciprocal_fast(total);
        if (lane() % 4 == 0 && own_row(half) < own.count)
            lse[pixels.of_half[half]] = (largest[half] + log2_fast(total)) * LN_2;
    }
    own.put(outputs, inverse, queries, out, v_dim, pixels, 0);
}

// dqkv, all of it, as `attend_backward_masked`. A block iterates over the regions that are routed to its keys; their queries
// are copied while it works on those before. First a warp owns 16 of the queries; then 16 of the keys, for which A and
// dS are exchanged through shared memory.
template <int D>
__global__ void __launch_bounds__(SINGLE_THREADS, D > 32 ? 2 : 4)
    attend_backward_single(const bf16* qkv, const u32* starts, const u32* entries, float scale, const float* lse,
                           const bf16* dout, bf16* dqkv, int accumulate, GEOMETRY) {
    constexpr int OF_SQUARE = TILE * PaddedRows<TILE>::STRIDE, OF_MAP = TILE * PaddedRows<D>::STRIDE;
    const Geometry g = THE_GEOMETRY;
    const int region = blockIdx.x, head = blockIdx.y, image = blockIdx.z;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim(), tokens = g.region_tokens;
    const int all = g.tokens(); // as above
    starts += image * (g.regions() + 1) + region;
    const u32* routed = entries + image * g.regions() + starts[0];
    const int arriving = starts[1] - starts[0];
    qkv += i64(image) * (all * row) + head * D, dqkv += i64(image) * (all * row) + head * D;
    dout += i64(image) * (all * v_dim) + head * D;
    lse += i64(image) * (all * heads) + head * all;
    DYNAMIC_SHARED(bf16, shared);
    const PaddedRows<TILE> weights = {shared}, slopes = {shared + OF_SQUARE}; // A and dS: (queries, keys)
    const PaddedRows<D> keys = {slopes.data + OF_SQUARE}, values = {keys.data + OF_MAP};
    auto maps = [&](int i) { return PaddedRows<D>{values.data + (1 + i) * OF_MAP}; }; // two of queries and dO, in turn
    const OwnTokens<D> own(g);
    PixelsOfRows coming;
    float logarithms[2]; // lse of these rows
    auto ask_for_queries = [&](int i) {
        coming = own.in(routed[i]);
        own.ask_for(maps(i % 2 * 2), qkv, row, coming);
        own.ask_for(maps(i % 2 * 2 + 1), dout, v_dim, coming);
#pragma unroll
        for (int half = 0; half < 2; half++) logarithms[half] = lse[coming.of_half[half]];
    };
    if (arriving) {
        const PixelsOfRows pixels = own.in(region);
        own.ask_for(keys, qkv + qk_dim, row, pixels);
        own.ask_for(values, qkv + 2 * qk_dim, row, pixels);
        ask_for_queries(0);
    }
    float dkeys[2 * PARTS<D>][4] = {}, dvalues[2 * PARTS<D>][4] = {};
    for (int i = 0; i < arriving; i++) {
        const PaddedRows<D> queries = maps(i % 2 * 2), upstream = maps(i % 2 * 2 + 1);
        const PixelsOfRows pixels = coming;
        float denominators[2], delta[2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++)
            denominators[half] = own_row(half) < own.count ? logarithms[half] * LOG2_E : INFINITY;
        wait_for_copies();
        __syncthreads(); // nor does any warp read what is overwritten next
        if (i + 1 < arriving) ask_for_queries(i + 1);

        float a[STEPS][2][4], ds[STEPS][2][4];
        const Own<D> own_queries(queries, own.first), own_upstream(upstream, own.first);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            multiply_step(a[step], own_queries, keys, step * STEP);
            multiply_step(ds[step], own_upstream, values, step * STEP);
        }
        if (tokens < TILE) hide_columns(tokens, a);
#pragma unroll
        for (int j = 0; j < 8 * STEPS; j++) {
            float& weight = a[j / 8][j / 4 % 2][j % 4];
            weight = exp2_fast(weight * (scale * LOG2_E) - denominators[j / 2 % 2]);
            delta[j / 2 % 2] += weight * ds[j / 8][j / 4 % 2][j % 4];
        }
#pragma unroll
        for (int half = 0; half < 2; half++) delta[half] = row_sum(delta[half]) * scale;
        u32 left[STEPS][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float& slope = ds[step][j / 4][j % 4];
                slope = a[step][j / 4][j % 4] * (slope * scale - delta[j / 2 % 2]);
            }
            keep(weights, own.first, a[step], {1, 1}, step * STEP);
            keep(slopes, own.first, ds[step], {1, 1}, step * STEP);
            pack(left[step], ds[step]);
        }
        float dqueries[2 * PARTS<D>][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) add_step(dqueries, left[step], keys, step * STEP);
        store_rows(dqueries, D / 8, dqkv, row, own.count, accumulate, pixels);
        __syncthreads();
        const PaddedRows<TILE> own_weights = {weights.data + own.first}, own_slopes = {slopes.data + own.first};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 left[4];
            const Place weight = right_rows(own_weights, step * STEP, 0), slope = right_rows(own_slopes, step * STEP, 0);
            load_transposed(left, weight.at, weight.after);
            add_step(dvalues, left, upstream, step * STEP);
            load_transposed(left, slope.at, slope.after);
            add_step(dkeys, left, queries, step * STEP);
        }
    }
    // Nobody reads keys and values any more.
    const PixelsOfRows pixels = own.in(region);
    own.put(dkeys, {1, 1}, keys, dqkv + qk_dim, row, pixels, accumulate);
    own.put(dvalues, {1, 1}, values, dqkv + 2 * qk_dim, row, pixels, accumulate);
}
