// Attention in bf16 on tensor cores where each query attends to one region (k = 1), of at most a tile of keys: backward, in
// one kernel. The block that owns a region's keys then sees all keys of the queries that are routed to it, so besides dK
// and dV it computes their dQ: S is computed once, and everything is read once. (tensor_cores.cuh computes S for queries,
// and again for keys.)

#pragma once
#include "own_rows.cuh"

constexpr int SINGLE_THREADS = 256; // two warps for each of the tile's 16 queries, or keys

// dqkv, all of it, as `attend_backward_masked`. A block has the keys of a region and a head of an image, and iterates over
// the regions that are routed to it, whose queries are copied while it works on those before. A warp has 16 of the
// queries and half of the keys: P and dS are shared in memory, because dK and dV are sums over queries.
template <int D>
__global__ void __launch_bounds__(SINGLE_THREADS, D > 32 ? 2 : 3)
    attend_backward_single(const bf16* qkv, const u32* starts, const u32* entries, float scale, const float* lse,
                           const bf16* dout, bf16* dqkv, int accumulate, GEOMETRY) {
    constexpr int OF_WARP = TILE / STEP / 2; // steps: half of the keys
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.z, head = blockIdx.y;
    const int region = blockIdx.x, row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim(), tokens = g.region_tokens;
    qkv += image * g.tokens() * row + head * D, dqkv += image * g.tokens() * row + head * D;
    dout += image * g.tokens() * v_dim + head * D;
    lse += (image * heads + head) * g.tokens();
    starts += image * (g.regions() + 1) + region;
    const u32* routed = entries + image * g.regions() + starts[0];
    const int arriving = starts[1] - starts[0];
    DYNAMIC_SHARED(bf16, shared);
    const Rows<TILE> weights = {shared}, slopes = {shared + TILE * TILE}; // P and dS: (queries, keys)
    bf16* const maps = shared + 2 * TILE * TILE;                         // three pairs, the second and third in turn
    __shared__ float parts_of_delta[2][TILE];
    const int first = warp() % 4 * 16, side = warp() / 4; // the warp's rows, and which half of the columns
    auto query = [&](int i, int token) { return g.pixel(routed[i], token); };
    auto pair_of = [&](int i) {
        return Pair<D, false>(g, maps + (1 + i % 2) * 2 * TILE * PADDED<D>, qkv, row, dout, v_dim);
    };
    float coming[2]; // log₂ of the denominators, of the queries that are being copied
    auto ask_for_queries = [&](int i) {
        pair_of(i).ask_for(TILE, tokens, [&](int token) { return query(i, token); });
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = first + own_row(0, half);
            const float own = lse[query(i, min(token, tokens - 1))] * LOG2_E;
            coming[half] = token < tokens ? own : INFINITY;
        }
    };
    Pair<D, false> held(g, maps, qkv + qk_dim, row, qkv + 2 * qk_dim, row);
    if (arriving) {
        held.ask_for(TILE, tokens, [&](int token) { return g.pixel(region, token); });
        ask_for_queries(0);
    }
    float sums[1][2 * PARTS<D>][4] = {}; // of 16 keys: dV if side is 0, dK if it is 1
    for (int i = 0; i < arriving; i++) {
        held.wait(); // also until no warp reads what is about to be overwritten
        const Pair<D, false> own = pair_of(i);
        const float denominators[2] = {coming[0], coming[1]};
        if (i + 1 < arriving) ask_for_queries(i + 1);
        float p[OF_WARP][1][2][4], ds[OF_WARP][1][2][4], delta[2] = {};
        {
            const Own<D, 1> queries(own.first, first), upstream(own.second, first);
#pragma unroll
            for (int step = 0; step < OF_WARP; step++) {
                const int from = (side * OF_WARP + step) * STEP;
                multiply_step(p[step], queries, held.first, from);
                multiply_step(ds[step], upstream, held.second, from);
            }
        }
#pragma unroll
        for (int j = 0; j < 8 * OF_WARP; j++) {
            const int step = j / 8, group = j / 4 % 2, half = j / 2 % 2;
            const int key = (side * OF_WARP + step) * STEP + group * 8 + lane() % 4 * 2 + j % 2;
            float& weight = p[step][0][group][j % 4];
            weight = exp2_fast(weight * (scale * LOG2_E) - denominators[half]);
            if (key >= tokens) weight = 0;
            delta[half] += weight * ds[step][0][group][j % 4];
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            delta[half] = row_sum(delta[half]);
            if (lane() % 4 == 0) parts_of_delta[side][first + own_row(0, half)] = delta[half];
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = first + own_row(0, half);
            delta[half] = parts_of_delta[0][token] + parts_of_delta[1][token];
        }
#pragma unroll
        for (int step = 0; step < OF_WARP; step++) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float& slope = ds[step][0][j / 4][j % 4];
                slope = p[step][0][j / 4][j % 4] * (slope - delta[j / 2 % 2]);
            }
            const int from = (side * OF_WARP + step) * STEP;
            keep(weights, first, p[step][0], {1, 1}, from);
            keep(slopes, first, ds[step][0], {1, 1}, from);
        }
        __syncthreads();
        float gradients[1][PARTS<D>][4] = {}; // dQ of 16 queries: half of its channels
#pragma unroll
        for (int from = 0; from < TILE; from += STEP) {
            u32 left[1][4];
            const Row of_queries = moved(side == 0 ? weights : slopes, from, lane() / 16 * 8 + lane() % 8);
            load_transposed(left[0], of_queries.at(first + lane() / 8 % 2 * 8));
            add_step(sums, left, side == 0 ? own.second : own.first, from);
            load_matrices(left[0], moved(slopes, first, lane() % 16).at(from + lane() / 16 * 8));
            add_step(gradients, left, held.first, from, side * PARTS<D> * 8);
        }
#pragma unroll
        for (int j = 0; j < 4 * PARTS<D>; j++) gradients[0][j / 4][j % 4] *= scale;
        store_rows(gradients[0], D / 8 - side * PARTS<D>, dqkv + side * PARTS<D> * 8, row, tokens - first, accumulate,
                   [&](int token) { return query(i, first + token); });
    }
#pragma unroll
    for (int j = 0; j < 8 * PARTS<D>; j++) sums[0][j / 4][j % 4] *= side == 0 ? 1 : scale;
    store_rows(sums[0], D / 8, dqkv + (2 - side) * qk_dim, row, tokens - first, accumulate,
               [&](int token) { return g.pixel(region, first + token); });
}
