// Attention in bf16 on tensor cores where each query attends to one region (k = 1), of at most a tile of keys: backward, in
// one kernel. The block that owns a region's keys then sees all keys of the queries that are routed to it, so besides dK
// and dV it computes their dQ: S is computed once, and everything is read once. (tensor_cores.cuh computes S for queries,
// and again for keys.)

#pragma once
#include "own_rows.cuh"

constexpr int SINGLE_THREADS = 128; // a warp for each 16 tokens of a tile; four blocks a multiprocessor with 32 channels

// dqkv, all of it, as `attend_backward_masked`. A block has the keys of a region and a head of an image, and iterates over
// the regions that are routed to it, whose queries are copied while it works on those before. First a warp owns 16 of the
// queries; then 16 of the keys, for which P and dS are exchanged through shared memory.
template <int D>
__global__ void __launch_bounds__(SINGLE_THREADS, D > 32 ? 2 : 4)
    attend_backward_single(const bf16* qkv, const u32* starts, const u32* entries, float scale, const float* lse,
                           const bf16* dout, bf16* dqkv, int accumulate, GEOMETRY) {
    constexpr int OF_SQUARE = TILE * PaddedRows<TILE>::STRIDE, OF_MAP = TILE * PaddedRows<D>::STRIDE;
    const Geometry g = THE_GEOMETRY;
    const int region = blockIdx.x, head = blockIdx.y, image = blockIdx.z;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim(), tokens = g.region_tokens;
    const int all = g.tokens(); // of an image; its elements are counted with an int
    starts += image * (g.regions() + 1) + region;
    const u32* routed = entries + image * g.regions() + starts[0];
    const int arriving = starts[1] - starts[0];
    qkv += i64(image) * (all * row) + head * D, dqkv += i64(image) * (all * row) + head * D;
    dout += i64(image) * (all * v_dim) + head * D;
    lse += i64(image) * (all * heads) + head * all;
    DYNAMIC_SHARED(bf16, shared);
    const PaddedRows<TILE> weights = {shared}, slopes = {shared + OF_SQUARE}; // P and dS: (queries, keys)
    const PaddedRows<D> keys = {slopes.data + OF_SQUARE}, values = {keys.data + OF_MAP};
    auto maps = [&](int i) { return PaddedRows<D>{values.data + (1 + i) * OF_MAP}; }; // two of queries and dO, in turn

    // A lane copies every fourth piece of its two rows.
    const int first = warp() * 16, piece = lane() % 4 * 8, tokens_left = tokens - first;
    const PixelsOfRows after_corner = find_rows(tokens_left, [&](int token) { return g.after_corner(first + token); });
    auto pixels_in = [&](int region) {
        const int corner = g.corner(region);
        return PixelsOfRows{{corner + after_corner.of_half[0], corner + after_corner.of_half[1]}};
    };
    // Where a piece of a row lies in a padded map.
    auto spot = [&](int half, int channel) { return (first + own_row(0, half)) * PaddedRows<D>::STRIDE + channel; };
    auto ask_for = [&](PaddedRows<D> to, const bf16* map, int stride, const PixelsOfRows& pixels) {
#pragma unroll
        for (int i = 0; i < PARTS<D>; i++) {
            const int half = i % 2, channel = i / 2 * 32 + piece;
            copy_async(to.data + spot(half, channel), map + (pixels.of_half[half] * stride + channel),
                       own_row(0, half) < tokens_left && channel < D);
        }
    };
    PixelsOfRows coming;
    float logarithms[2]; // lse of these rows
    auto ask_for_queries = [&](int i) {
        coming = pixels_in(routed[i]);
        ask_for(maps(i % 2 * 2), qkv, row, coming);
        ask_for(maps(i % 2 * 2 + 1), dout, v_dim, coming);
#pragma unroll
        for (int half = 0; half < 2; half++) logarithms[half] = lse[coming.of_half[half]];
    };
    if (arriving) {
        const PixelsOfRows pixels = pixels_in(region);
        ask_for(keys, qkv + qk_dim, row, pixels);
        ask_for(values, qkv + 2 * qk_dim, row, pixels);
        ask_for_queries(0);
    }
    float dkeys[1][2 * PARTS<D>][4] = {}, dvalues[1][2 * PARTS<D>][4] = {};
    for (int i = 0; i < arriving; i++) {
        const PaddedRows<D> queries = maps(i % 2 * 2), upstream = maps(i % 2 * 2 + 1);
        const PixelsOfRows pixels = coming;
        float denominators[2], delta[2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++)
            denominators[half] = own_row(0, half) < tokens_left ? logarithms[half] * LOG2_E : INFINITY;
        wait_for_copies();
        __syncthreads(); // nor does any warp read what is overwritten next
        if (i + 1 < arriving) ask_for_queries(i + 1);

        float p[STEPS][1][2][4], ds[STEPS][1][2][4];
        const Own<D, 1> own_queries(queries, first), own_upstream(upstream, first);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            multiply_step(p[step], own_queries, keys, step * STEP);
            multiply_step(ds[step], own_upstream, values, step * STEP);
        }
        if (tokens < TILE) {
#pragma unroll
            for (int j = 0; j < 8 * STEPS; j++)
                if (j / 4 * 8 + int(lane()) % 4 * 2 + j % 2 >= tokens) p[j / 8][0][j / 4 % 2][j % 4] = -INFINITY;
        }
#pragma unroll
        for (int j = 0; j < 8 * STEPS; j++) {
            float& weight = p[j / 8][0][j / 4 % 2][j % 4];
            weight = exp2_fast(weight * (scale * LOG2_E) - denominators[j / 2 % 2]);
            delta[j / 2 % 2] += weight * ds[j / 8][0][j / 4 % 2][j % 4];
        }
#pragma unroll
        for (int half = 0; half < 2; half++) delta[half] = row_sum(delta[half]) * scale;
        u32 left[STEPS][1][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float& slope = ds[step][0][j / 4][j % 4];
                slope = p[step][0][j / 4][j % 4] * (slope * scale - delta[j / 2 % 2]);
            }
            keep(weights, first, p[step][0], {1, 1}, step * STEP);
            keep(slopes, first, ds[step][0], {1, 1}, step * STEP);
            pack(left[step], ds[step]);
        }
        float dqueries[1][2 * PARTS<D>][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) add_step(dqueries, left[step], keys, step * STEP);
        store_rows(dqueries[0], D / 8, dqkv, row, tokens_left, accumulate, pixels);
        __syncthreads();
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 left[1][4];
            const PaddedRows<TILE> own_weights = {weights.data + first}, own_slopes = {slopes.data + first};
            const Place weight = right_rows(own_weights, step * STEP, 0), slope = right_rows(own_slopes, step * STEP, 0);
            load_transposed(left[0], weight.at, weight.after);
            add_step(dvalues, left, upstream, step * STEP);
            load_transposed(left[0], slope.at, slope.after);
            add_step(dkeys, left, queries, step * STEP);
        }
    }
    // Through shared memory, where nobody reads keys and values any more, so that a lane stores pieces of its rows.
    keep(keys, first, dkeys[0], {1, 1});
    keep(values, first, dvalues[0], {1, 1});
    __syncwarp();
    const PixelsOfRows pixels = pixels_in(region);
#pragma unroll
    for (int i = 0; i < PARTS<D>; i++) {
        const int half = i % 2, channel = i / 2 * 32 + piece;
        if (own_row(0, half) >= tokens_left || channel >= D) continue;
        bf16* const to = dqkv + (pixels.of_half[half] * row + qk_dim + channel);
        put_pairs(to, *reinterpret_cast<const Pack<u32>*>(keys.data + spot(half, channel)), accumulate);
        put_pairs(to + qk_dim, *reinterpret_cast<const Pack<u32>*>(values.data + spot(half, channel)), accumulate);
    }
}
