// Attention in bf16 on tensor cores that gathers what a region is routed to: for any map, and for heads whose queries, keys
// and values have D channels, 24, 32, 64 or 96.
//
// A warp owns sixteen queries, as rows, and iterates over their keys in tiles of 64; backward, it then owns sixteen keys,
// and iterates over the queries that are routed to them. (In regions of fewer tokens the last one is repeated, in vain;
// where they are that small, masked.cuh is mostly used instead.)
//
// Keys and values are staged in shared memory. If all those of one head of an image fit (RESIDENT), a block handles
// that head (blockIdx.y) of that image (blockIdx.z), and its warps share the regions: what is routed to k times is read
// from global memory once. Otherwise a block handles a single region (blockIdx.x) of them, and fetches its tiles one
// after another.

#pragma once
#include "gathered_tiles.cuh"

// products (16 own rows, two groups of 8 columns) = own·rowsᵀ, for the rows of a step.
template <int D, bool RESIDENT>
__device__ __forceinline__ void multiply_step(float (&products)[2][4], const u32 (&own)[PARTS<D>][4], Rows<D> rows,
                                              const TileRows<RESIDENT>& at, int step) {
    const Row row = at.right(rows, step);
#pragma unroll
    for (int part = 0; part < PARTS<D>; part++) {
        u32 right[4];
        load_matrices(right, row.at(part * 16 + lane() / 8 % 2 * 8));
        multiply_part(products, own[part], right, part);
    }
}

// sums (16 own rows, D channels) += weights·rows, for the rows of a step.
template <int D, bool RESIDENT>
__device__ __forceinline__ void add_step(float (&sums)[2 * PARTS<D>][4], const u32 (&weights)[4], Rows<D> rows,
                                         const TileRows<RESIDENT>& at, int step) {
    const Row row = at.left(rows, step);
#pragma unroll
    for (int part = 0; part < PARTS<D>; part++) {
        u32 right[4];
        load_transposed(right, row.at(part * 16 + lane() / 16 * 8));
        multiply_add(sums[2 * part], weights, {right[0], right[1]});
        multiply_add(sums[2 * part + 1], weights, {right[2], right[3]});
    }
}

// The state of one warp's queries while it iterates over their keys.
template <int D>
struct Attending {
    u32 queries[PARTS<D>][4];
    float outputs[2 * PARTS<D>][4] = {};
    // Of each half: the largest score so far, as an exponent of two, and the sum of this lane's weights relative to it.
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {};

    // Processes a tile of which the first `count` rows are keys. The scale is positive, so the largest product gives
    // the largest score.
    template <bool RESIDENT>
    __device__ __forceinline__ void attend(Rows<D> keys, Rows<D> values, const TileRows<RESIDENT>& at, int count,
                                           float scale) {
        float weights[STEPS][2][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++) multiply_step(weights[step], queries, keys, at, step);
        if (count < TILE) hide_columns(count, weights);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = -INFINITY;
#pragma unroll
            for (int i = 0; i < 4 * STEPS; i++)
                largest = fmaxf(largest, weights[i / 4][i / 2 % 2][half * 2 + i % 2]);
            const float now = fmaxf(most[half], row_max(largest) * scale), shrink = exp2_fast(most[half] - now);
            most[half] = now, sum[half] *= shrink;
#pragma unroll
            for (int i = 0; i < 4 * STEPS; i++) {
                float& weight = weights[i / 4][i / 2 % 2][half * 2 + i % 2];
                weight = exp2_fast(weight * scale - now);
                sum[half] += weight;
            }
#pragma unroll
            for (int i = 0; i < 4 * PARTS<D>; i++) outputs[i / 2][half * 2 + i % 2] *= shrink;
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 left[4];
            pack(left, weights[step]);
            add_step(outputs, left, values, at, step);
        }
    }

    __device__ __forceinline__ void finish(bf16* out, int stride, float* lse, int count, const PixelsOfRows& pixels) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float total = row_sum(sum[half]), inverse = reciprocal_fast(total);
            if (lane() % 4 == 0 && own_row(half) < count)
                lse[pixels.of_half[half]] = (most[half] + log2_fast(total)) * LN_2;
#pragma unroll
            for (int i = 0; i < 4 * PARTS<D>; i++) outputs[i / 2][half * 2 + i % 2] *= inverse;
        }
        store_rows(outputs, D / 8, out, stride, count, 0, pixels);
    }
};

// out (N, H, W, C) and lse (N, heads, H·W), as `attend` of attention.cuh.
template <int D, bool RESIDENT>
__global__ void __launch_bounds__(THREADS<RESIDENT>, BLOCKS<D, RESIDENT>)
    attend_gathered(const bf16* qkv, const u32* routes, float scale, bf16* out, float* lse, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.z, head = blockIdx.y;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim();
    qkv += image * g.tokens() * row + head * D;
    out += image * g.tokens() * v_dim + head * D;
    lse += (image * heads + head) * g.tokens();
    routes += image * g.regions() * topk;
    DYNAMIC_SHARED(bf16, shared);
    Pair<D, RESIDENT> held(g, shared, qkv + qk_dim, row, qkv + 2 * qk_dim, row);
    for_each_chunk<RESIDENT>(g, [&](int region, int first) {
        const int count = g.region_tokens - first;
        auto routed = [&](int i) { return int(routes[region * topk + i]); };
        const PixelsOfRows pixels = find_rows(count, [&](int i) { return g.pixel(region, first + i); });
        Attending<D> attending;
        load_rows<D>(attending.queries, qkv, row, pixels);
        held.for_each_tile(g, g.keys(), routed, Nothing(), [&](const TileRows<RESIDENT>& rows, int keys, Nothing) {
            attending.attend(held.first, held.second, rows, keys, scale * LOG2_E);
        });
        attending.finish(out, v_dim, lse, count, pixels);
    });
}

// The queries' part of dqkv, and delta, as `attend_backward_queries` of attention.cuh: dS = A∘(dA − delta), dQ =
// s·dS·K. Delta, the sum of A∘dA over all keys, comes first. If these fit in one tile, A and dA stay in registers;
// otherwise they are computed twice.
template <int D, bool RESIDENT>
__global__ void __launch_bounds__(THREADS<RESIDENT>, BLOCKS<D, RESIDENT>)
    attend_backward_queries_gathered(const bf16* qkv, const u32* routes, float scale, const float* lse, const bf16* dout,
                                     bf16* dqkv, int accumulate, float* delta, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.z, head = blockIdx.y;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim();
    qkv += image * g.tokens() * row + head * D, dqkv += image * g.tokens() * row + head * D;
    dout += image * g.tokens() * v_dim + head * D;
    lse += (image * heads + head) * g.tokens(), delta += (image * heads + head) * g.tokens();
    routes += image * g.regions() * topk;
    DYNAMIC_SHARED(bf16, shared);
    Pair<D, RESIDENT> held(g, shared, qkv + qk_dim, row, qkv + 2 * qk_dim, row);
    for_each_chunk<RESIDENT>(g, [&](int region, int first) {
        const int count = g.region_tokens - first;
        auto routed = [&](int i) { return int(routes[region * topk + i]); };
        const PixelsOfRows pixels = find_rows(count, [&](int i) { return g.pixel(region, first + i); });
        u32 queries[PARTS<D>][4], upstream[PARTS<D>][4];
        load_rows<D>(queries, qkv, row, pixels);
        load_rows<D>(upstream, dout, v_dim, pixels);
        float gradients[2 * PARTS<D>][4] = {}, denominators[2], deltas[2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) denominators[half] = lse[pixels.of_half[half]] * LOG2_E;
        // Of products with a step's keys and values: A, whose A∘dA is added to `sums`.
        auto weigh = [&](float (&products)[2][4], const float (&slopes)[2][4], float (&sums)[2]) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float& weight = products[i / 4][i % 4];
                weight = exp2_fast(weight * (scale * LOG2_E) - denominators[i / 2 % 2]);
                sums[i / 2 % 2] += weight * slopes[i / 4][i % 4];
            }
        };
        auto add = [&](const TileRows<RESIDENT>& rows, int step, float (&weights)[2][4], const float (&slopes)[2][4]) {
            u32 left[4];
#pragma unroll
            for (int i = 0; i < 8; i++) weights[i / 4][i % 4] *= slopes[i / 4][i % 4] - deltas[i / 2 % 2];
            pack(left, weights);
            add_step(gradients, left, held.first, rows, step);
        };
        if (g.keys() <= TILE) {
            held.with_tile(g, 0, g.keys(), routed, Nothing(), [&](const TileRows<RESIDENT>& rows, int keys, Nothing) {
                float weights[STEPS][2][4], slopes[STEPS][2][4];
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    multiply_step(weights[step], queries, held.first, rows, step);
                    multiply_step(slopes[step], upstream, held.second, rows, step);
                }
                if (keys < TILE) hide_columns(keys, weights);
#pragma unroll
                for (int step = 0; step < STEPS; step++) weigh(weights[step], slopes[step], deltas);
#pragma unroll
                for (int half = 0; half < 2; half++) deltas[half] = row_sum(deltas[half]);
#pragma unroll
                for (int step = 0; step < STEPS; step++) add(rows, step, weights[step], slopes[step]);
            });
        } else {
            float weights[1][2][4], slopes[2][4], unused[2] = {};
            auto multiply = [&](const TileRows<RESIDENT>& rows, int step, int keys) {
                multiply_step(weights[0], queries, held.first, rows, step);
                multiply_step(slopes, upstream, held.second, rows, step);
                if (keys < TILE) hide_columns(keys - step * 16, weights);
            };
            held.for_each_tile(g, g.keys(), routed, Nothing(), [&](const TileRows<RESIDENT>& rows, int keys, Nothing) {
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    multiply(rows, step, keys);
                    weigh(weights[0], slopes, deltas);
                }
            });
#pragma unroll
            for (int half = 0; half < 2; half++) deltas[half] = row_sum(deltas[half]);
            held.for_each_tile(g, g.keys(), routed, Nothing(), [&](const TileRows<RESIDENT>& rows, int keys, Nothing) {
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    multiply(rows, step, keys);
                    weigh(weights[0], slopes, unused);
                    add(rows, step, weights[0], slopes);
                }
            });
        }
#pragma unroll
        for (int i = 0; i < 8 * PARTS<D>; i++) gradients[i / 4][i % 4] *= scale;
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (lane() % 4 == 0 && own_row(half) < count) delta[pixels.of_half[half]] = deltas[half];
        store_rows(gradients, D / 8, dqkv, row, count, accumulate, pixels);
    });
}

// What the backward pass needs to know about the queries of a tile: `here` queries, from number `from` on, among those
// of the regions `chooser(0)`, `chooser(1)`, ... Past the last query the last one is repeated, because a branch would
// make each load wait for the one before; an infinite denominator gives these repeats no weight.
struct QueriesOfTile {
    OfTile<float> denominators, deltas;

    template <typename Chooser>
    __device__ __forceinline__ QueriesOfTile(const Geometry& g, Chooser chooser, int here, int from, const float* lse,
                                             const float* delta)
        : QueriesOfTile(here, lse, delta, OfTile<int>([&](int i) {
              const int token = from + min(i, here - 1), place = token / g.region_tokens;
              return g.pixel(chooser(place), token - place * g.region_tokens);
          })) {}

    __device__ __forceinline__ QueriesOfTile(int here, const float* lse, const float* delta, const OfTile<int>& pixels)
        : denominators(pixels, [&](int pixel, int i) {
              const float own = lse[pixel] * LOG2_E;
              return i < here ? own : INFINITY;
          }),
          deltas(pixels, [&](int pixel, int) { return delta[pixel]; }) {}
};

// The keys' and values' parts of dqkv, as `attend_backward_keys` of attention.cuh. A warp owns sixteen keys, and
// iterates over the queries of all regions that are routed to them: dV = A·dO and dK = s·dS·q, where A and dS (16 keys,
// 16 queries) come out of the preceding products already laid out as left operands.
template <int D, bool RESIDENT>
__global__ void __launch_bounds__(THREADS<RESIDENT>, BLOCKS<D, RESIDENT>)
    attend_backward_keys_gathered(const bf16* qkv, const u32* starts, const u32* entries, float scale, const float* lse,
                                  const float* delta, const bf16* dout, bf16* dqkv, int accumulate, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.z, head = blockIdx.y;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim();
    const Divisor tokens = g.region_tokens;
    qkv += image * g.tokens() * row + head * D, dqkv += image * g.tokens() * row + head * D;
    dout += image * g.tokens() * v_dim + head * D;
    lse += (image * heads + head) * g.tokens(), delta += (image * heads + head) * g.tokens();
    starts += image * (g.regions() + 1), entries += image * g.regions() * topk;
    DYNAMIC_SHARED(bf16, shared);
    Pair<D, RESIDENT> held(g, shared, qkv, row, dout, v_dim);
    for_each_chunk_by_work<RESIDENT>(g, starts, [&](int region, int first) {
        const int count = tokens - first;
        const u32* routed = entries + starts[region];
        const int arriving = int(starts[region + 1] - starts[region]) * tokens;
        auto chooser = [&](int i) { return int(routed[i]); };
        const PixelsOfRows pixels = find_rows(count, [&](int i) { return g.pixel(region, first + i); });
        u32 keys[PARTS<D>][4], values[PARTS<D>][4];
        load_rows<D>(keys, qkv + qk_dim, row, pixels);
        load_rows<D>(values, qkv + 2 * qk_dim, row, pixels);
        float dkeys[2 * PARTS<D>][4] = {}, dvalues[2 * PARTS<D>][4] = {};
        auto load = [&](int here, int from) { return QueriesOfTile(g, chooser, here, from, lse, delta); };
        held.for_each_tile(g, arriving, chooser, load, [&](const TileRows<RESIDENT>& rows, int here, const QueriesOfTile& queries) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                if (step * 16 >= here) break;
                float weights[2][4], slopes[2][4];
                multiply_step(weights, keys, held.first, rows, step);
                multiply_step(slopes, values, held.second, rows, step);
#pragma unroll
                for (int group = 0; group < 2; group++)
#pragma unroll
                    for (int column = 0; column < 2; column++) {
                        const int base = step * 16 + group * 8, offset = lane() % 4 * 2 + column;
                        const float denominator = queries.denominators.at(base, offset), own = queries.deltas.at(base, offset);
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            float &weight = weights[group][half * 2 + column], &slope = slopes[group][half * 2 + column];
                            weight = exp2_fast(weight * (scale * LOG2_E) - denominator);
                            slope = weight * (slope - own);
                        }
                    }
                u32 left[4];
                pack(left, weights);
                add_step(dvalues, left, held.second, rows, step);
                pack(left, slopes);
                add_step(dkeys, left, held.first, rows, step);
            }
        });
#pragma unroll
        for (int i = 0; i < 8 * PARTS<D>; i++) dkeys[i / 4][i % 4] *= scale;
        store_rows(dkeys, D / 8, dqkv + qk_dim, row, count, accumulate, pixels);
        store_rows(dvalues, D / 8, dqkv + 2 * qk_dim, row, count, accumulate, pixels);
    });
}
