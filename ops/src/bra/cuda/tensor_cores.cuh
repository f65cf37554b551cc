// Attention in bf16 on tensor cores, for heads whose queries, keys and values have D channels: 24, 32, 64 or 96.
//
// Keys are the rows of each product and queries its columns, in groups of eight, so that regions of 4, 16 or 64 queries
// waste as little of a product as possible. A warp takes one or two groups (GROUPS) and iterates over their keys in
// tiles of 64. With S = K·Qᵀ a query's scores lie in one column, spread over eight lanes; P = exp(S), whose 8x8
// fragments are transposed in registers, is the right operand of Oᵀ = Vᵀ·P.
//
// Keys and values are staged in shared memory. If all those of one head of an image fit (RESIDENT), a block handles
// that head (blockIdx.y) of that image (blockIdx.z), and its warps share the regions: what is routed to k times is read
// from global memory once. Otherwise a block handles a single region (blockIdx.x) of them, and fetches its tiles one
// after another.

#pragma once
#include "own_rows.cuh"

// The state of one warp's queries while it iterates over their keys.
template <int D, int GROUPS>
struct Attending {
    u32 queries[GROUPS][PARTS<D>][2];
    float outputs[GROUPS][PARTS<D>][4];
    // For columns 2p and 2p + 1, with p = lane % 4: the largest score so far, as an exponent of two, and the sum of the
    // weights relative to it.
    float most[GROUPS][2], sum[GROUPS][2];

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
#pragma unroll
            for (int part = 0; part < PARTS<D>; part++)
#pragma unroll
                for (int i = 0; i < 4; i++) outputs[group][part][i] = 0;
#pragma unroll
            for (int column = 0; column < 2; column++) most[group][column] = -INFINITY, sum[group][column] = 0;
        }
    }

    // Processes a tile of which the first `count` rows are keys. The scale is positive, so the largest product gives
    // the largest score.
    template <bool RESIDENT>
    __device__ __forceinline__ void attend(Rows<D> keys, Rows<D> values, const TileRows<RESIDENT>& at, int count,
                                           float scale) {
        float scores[STEPS][GROUPS][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++) step_product(scores[step], keys, at, step, queries);
        if (count < TILE) hide_behind(count, scores);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
#pragma unroll
            for (int column = 0; column < 2; column++) {
                float largest = -INFINITY;
#pragma unroll
                for (int step = 0; step < STEPS; step++)
#pragma unroll
                    for (int half = 0; half < 2; half++) largest = fmaxf(largest, scores[step][group][half * 2 + column]);
                float now = fmaxf(most[group][column], column_max(largest) * scale), total = 0;
#pragma unroll
                for (int step = 0; step < STEPS; step++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float& weight = scores[step][group][half * 2 + column];
                        weight = exp2_fast(weight * scale - now);
                        total += weight;
                    }
                float shrink = exp2_fast(most[group][column] - now);
                sum[group][column] = sum[group][column] * shrink + column_sum(total);
                most[group][column] = now;
#pragma unroll
                for (int part = 0; part < PARTS<D>; part++) {
                    outputs[group][part][column] *= shrink;
                    outputs[group][part][2 + column] *= shrink;
                }
            }
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) add_weighted(outputs, values, at, step, scores[step]);
    }

    template <typename Pixel>
    __device__ __forceinline__ void finish(bf16* out, int stride, float* lse, int count, Pixel pixel) {
        const OwnColumn<GROUPS> own;
        if (own.query < count) lse[pixel(own.query)] = (own.of(most) + log2_fast(own.of(sum))) * LN_2;
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int column = 0; column < 2; column++) {
                float inverse = reciprocal_fast(sum[group][column]);
#pragma unroll
                for (int part = 0; part < PARTS<D>; part++) {
                    outputs[group][part][column] *= inverse;
                    outputs[group][part][2 + column] *= inverse;
                }
            }
        store_columns<D>(outputs, out, stride, count, 0, pixel);
    }
};

// out (N, H, W, C) and lse (N, heads, H·W), as `attend` of attention.cuh.
template <int D, int GROUPS, bool RESIDENT>
__global__ void __launch_bounds__(THREADS<RESIDENT, GROUPS * 8>, BLOCKS<D, RESIDENT, GROUPS * 8>)
    attend_on_tensor_cores(const bf16* qkv, const u32* routes, float scale, bf16* out, float* lse, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.z, head = blockIdx.y;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim();
    qkv += image * g.tokens() * row + head * D;
    out += image * g.tokens() * v_dim + head * D;
    lse += (image * heads + head) * g.tokens();
    routes += image * g.regions() * topk;
    DYNAMIC_SHARED(bf16, shared);
    Pair<D, RESIDENT> held(g, shared, qkv + qk_dim, row, qkv + 2 * qk_dim, row);
    for_each_chunk<RESIDENT>(g, GROUPS * 8, [&](int region, int first) {
        const int count = g.region_tokens - first;
        auto query = [&](int i) { return g.pixel(region, first + i); };
        auto routed = [&](int i) { return int(routes[region * topk + i]); };
        Attending<D, GROUPS> attending;
        load_columns<D>(attending.queries, qkv, row, count, query);
        attending.begin();
        held.for_each_tile(g, g.keys(), routed, Nothing(), [&](const TileRows<RESIDENT>& rows, int keys, Nothing) {
            attending.attend(held.first, held.second, rows, keys, scale * LOG2_E);
        });
        attending.finish(out, v_dim, lse, count, query);
    });
}

// The queries' part of dqkv, and delta, as `attend_backward_queries` of attention.cuh: dS = P∘(dP − delta), dQ =
// s·dSᵀ·k. If the keys fit in one tile, its scores serve both passes. P and dP of a single group of queries already
// take all the registers that a warp can have.
template <int D, bool RESIDENT>
__global__ void __launch_bounds__(THREADS<RESIDENT, 8>, D > 32 ? 1 : 2)
    attend_backward_queries_on_tensor_cores(const bf16* qkv, const u32* routes, float scale, const float* lse,
                                            const bf16* dout, bf16* dqkv, int accumulate, float* delta, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.z, head = blockIdx.y;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim();
    qkv += image * g.tokens() * row + head * D, dqkv += image * g.tokens() * row + head * D;
    dout += image * g.tokens() * v_dim + head * D;
    lse += (image * heads + head) * g.tokens(), delta += (image * heads + head) * g.tokens();
    routes += image * g.regions() * topk;
    DYNAMIC_SHARED(bf16, shared);
    Pair<D, RESIDENT> held(g, shared, qkv + qk_dim, row, qkv + 2 * qk_dim, row);
    for_each_chunk<RESIDENT>(g, 8, [&](int region, int first) {
        const int count = g.region_tokens - first;
        auto query = [&](int i) { return g.pixel(region, first + i); };
        auto routed = [&](int i) { return int(routes[region * topk + i]); };
        u32 queries[1][PARTS<D>][2], upstream[1][PARTS<D>][2];
        load_columns<D>(queries, qkv, row, count, query);
        load_columns<D>(upstream, dout, v_dim, count, query);
        float gradients[1][PARTS<D>][4], denominators[2], deltas[1][2];
#pragma unroll
        for (int part = 0; part < PARTS<D>; part++)
#pragma unroll
            for (int i = 0; i < 4; i++) gradients[0][part][i] = 0;
#pragma unroll
        for (int column = 0; column < 2; column++) {
            int i = lane() % 4 * 2 + column;
            // Past the region's last query, use the last one again, even in a chunk that lies past the region, and
            // perhaps past the map.
            denominators[column] = lse[query(min(i, count - 1))] * LOG2_E;
            deltas[0][column] = 0;
        }
        const bool one_tile = g.keys() <= TILE;
        for (int pass = one_tile ? 1 : 0; pass < 2; pass++) {
            held.for_each_tile(g, g.keys(), routed, Nothing(), [&](const TileRows<RESIDENT>& rows, int keys, Nothing) {
                float scores[STEPS][1][4], slopes[STEPS][1][4];
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    step_product(scores[step], held.first, rows, step, queries);
                    step_product(slopes[step], held.second, rows, step, upstream);
                }
                if (keys < TILE) hide_behind(keys, scores);
#pragma unroll
                for (int column = 0; column < 2; column++) {
                    float sum = 0;
#pragma unroll
                    for (int step = 0; step < STEPS; step++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            float& score = scores[step][0][half * 2 + column];
                            score = exp2_fast(score * (scale * LOG2_E) - denominators[column]);
                            sum += score * slopes[step][0][half * 2 + column];
                        }
                    if (pass == 0 || one_tile) deltas[0][column] += column_sum(sum);
#pragma unroll
                    for (int step = 0; step < STEPS; step++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            int i = half * 2 + column;
                            scores[step][0][i] *= slopes[step][0][i] - deltas[0][column];
                        }
                }
                if (pass == 0) return;
#pragma unroll
                for (int step = 0; step < STEPS; step++) add_weighted(gradients, held.first, rows, step, scores[step]);
            });
        }
#pragma unroll
        for (int part = 0; part < PARTS<D>; part++)
#pragma unroll
            for (int i = 0; i < 4; i++) gradients[0][part][i] *= scale;
        const OwnColumn<1> own;
        if (own.query < count) delta[query(own.query)] = own.of(deltas);
        store_columns<D>(gradients, dqkv, row, count, accumulate, query);
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
// iterates over the queries of all regions that are routed to them: dV = P·dO and dK = s·dS·q, where P and dS (16 keys,
// 16 queries) come out of the preceding products already laid out as left operands.
template <int D, bool RESIDENT>
__global__ void __launch_bounds__(THREADS<RESIDENT, 16>, BLOCKS<D, RESIDENT, 16>)
    attend_backward_keys_on_tensor_cores(const bf16* qkv, const u32* starts, const u32* entries, float scale,
                                         const float* lse, const float* delta, const bf16* dout, bf16* dqkv,
                                         int accumulate, GEOMETRY) {
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
    for_each_chunk_by_work<RESIDENT>(g, starts, 16, [&](int region, int first) {
        const int count = tokens - first;
        const u32* routed = entries + starts[region];
        const int arriving = int(starts[region + 1] - starts[region]) * tokens;
        auto key = [&](int i) { return g.pixel(region, first + i); };
        auto chooser = [&](int i) { return int(routed[i]); };
        u32 keys[PARTS<D>][4], values[PARTS<D>][4];
        const PixelsOfRows pixels = find_rows(count, key);
        load_rows<D>(keys, qkv + qk_dim, row, count, pixels);
        load_rows<D>(values, qkv + 2 * qk_dim, row, count, pixels);
        float dkeys[2 * PARTS<D>][4], dvalues[2 * PARTS<D>][4];
#pragma unroll
        for (int part = 0; part < 2 * PARTS<D>; part++)
#pragma unroll
            for (int i = 0; i < 4; i++) dkeys[part][i] = dvalues[part][i] = 0;
        auto load = [&](int here, int from) { return QueriesOfTile(g, chooser, here, from, lse, delta); };
        held.for_each_tile(g, arriving, chooser, load, [&](const TileRows<RESIDENT>& rows, int here, const QueriesOfTile& queries) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                if (step * 16 >= here) break;
                float scores[2][4] = {}, slopes[2][4] = {}; // (16 keys, 8 queries) twice
                const Row query_rows = rows.transposed(held.first, step);
                const Row upstream_rows = rows.transposed(held.second, step);
#pragma unroll
                for (int part = 0; part < PARTS<D>; part++) {
                    u32 right[4];
                    int channel = part * 16 + lane() / 8 % 2 * 8;
                    load_matrices(right, query_rows.at(channel));
                    multiply_add(scores[0], keys[part], {right[0], right[1]});
                    multiply_add(scores[1], keys[part], {right[2], right[3]});
                    load_matrices(right, upstream_rows.at(channel));
                    multiply_add(slopes[0], values[part], {right[0], right[1]});
                    multiply_add(slopes[1], values[part], {right[2], right[3]});
                }
                u32 p[4], ds[4];
#pragma unroll
                for (int group = 0; group < 2; group++) {
#pragma unroll
                    for (int column = 0; column < 2; column++) {
                        const int base = step * 16 + group * 8, offset = lane() % 4 * 2 + column;
                        const float denominator = queries.denominators.at(base, offset), own = queries.deltas.at(base, offset);
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            float& score = scores[group][half * 2 + column];
                            float& slope = slopes[group][half * 2 + column];
                            score = exp2_fast(score * (scale * LOG2_E) - denominator);
                            slope = score * (slope - own);
                        }
                    }
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        p[group * 2 + half] = pack_bf16(scores[group][half * 2], scores[group][half * 2 + 1]);
                        ds[group * 2 + half] = pack_bf16(slopes[group][half * 2], slopes[group][half * 2 + 1]);
                    }
                }
                const Row queries_in_order = rows.plain(held.first, step);
                const Row upstream_in_order = rows.plain(held.second, step);
#pragma unroll
                for (int part = 0; part < PARTS<D>; part++) {
                    u32 right[4];
                    int channel = part * 16 + lane() / 16 * 8;
                    load_transposed(right, upstream_in_order.at(channel));
                    multiply_add(dvalues[part * 2], p, {right[0], right[1]});
                    multiply_add(dvalues[part * 2 + 1], p, {right[2], right[3]});
                    load_transposed(right, queries_in_order.at(channel));
                    multiply_add(dkeys[part * 2], ds, {right[0], right[1]});
                    multiply_add(dkeys[part * 2 + 1], ds, {right[2], right[3]});
                }
            }
        });
#pragma unroll
        for (int part = 0; part < 2 * PARTS<D>; part++)
#pragma unroll
            for (int i = 0; i < 4; i++) dkeys[part][i] *= scale;
        store_rows(dkeys, D / 8, dqkv + qk_dim, row, count, accumulate, pixels);
        store_rows(dvalues, D / 8, dqkv + 2 * qk_dim, row, count, accumulate, pixels);
    });
}

// The same for regions of up to eight tokens, which would leave half of the rows or more without a key. Here keys are the
// columns, as queries are in the kernels before, and the rows are the queries: dV = dOᵀ·P and dK = s·qᵀ·dS.
template <int D>
__global__ void __launch_bounds__(THREADS<true, 8>, BLOCKS<D, true, 8>)
    attend_backward_few_keys_on_tensor_cores(const bf16* qkv, const u32* starts, const u32* entries, float scale,
                                             const float* lse, const float* delta, const bf16* dout, bf16* dqkv,
                                             int accumulate, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.z, head = blockIdx.y;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim();
    const Divisor tokens = g.region_tokens;
    qkv += image * g.tokens() * row + head * D, dqkv += image * g.tokens() * row + head * D;
    dout += image * g.tokens() * v_dim + head * D;
    lse += (image * heads + head) * g.tokens(), delta += (image * heads + head) * g.tokens();
    starts += image * (g.regions() + 1), entries += image * g.regions() * topk;
    DYNAMIC_SHARED(bf16, shared);
    Pair<D, true> held(g, shared, qkv, row, dout, v_dim);
    for_each_chunk_by_work<true>(g, starts, 8, [&](int region, int first) {
        const int count = tokens - first;
        const u32* routed = entries + starts[region];
        const int arriving = int(starts[region + 1] - starts[region]) * tokens;
        auto key = [&](int i) { return g.pixel(region, first + i); };
        auto chooser = [&](int i) { return int(routed[i]); };
        u32 keys[1][PARTS<D>][2], values[1][PARTS<D>][2];
        load_columns<D>(keys, qkv + qk_dim, row, count, key);
        load_columns<D>(values, qkv + 2 * qk_dim, row, count, key);
        float dkeys[1][PARTS<D>][4] = {}, dvalues[1][PARTS<D>][4] = {};
        auto load = [&](int here, int from) { return QueriesOfTile(g, chooser, here, from, lse, delta); };
        held.for_each_tile(g, arriving, chooser, load, [&](const TileRows<true>& rows, int here, const QueriesOfTile& queries) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                if (step * 16 >= here) break;
                float scores[1][4], slopes[1][4];
                step_product(scores, held.first, rows, step, keys);
                step_product(slopes, held.second, rows, step, values);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int base = step * 16 + half * 8, offset = lane() / 4;
                    const float denominator = queries.denominators.at(base, offset), own = queries.deltas.at(base, offset);
#pragma unroll
                    for (int i = half * 2; i < half * 2 + 2; i++) {
                        scores[0][i] = exp2_fast(scores[0][i] * (scale * LOG2_E) - denominator);
                        slopes[0][i] = scores[0][i] * (slopes[0][i] - own);
                    }
                }
                add_weighted(dvalues, held.second, rows, step, scores);
                add_weighted(dkeys, held.first, rows, step, slopes);
            }
        });
#pragma unroll
        for (int part = 0; part < PARTS<D>; part++)
#pragma unroll
            for (int i = 0; i < 4; i++) dkeys[0][part][i] *= scale;
        store_columns<D>(dkeys, dqkv + qk_dim, row, count, accumulate, key);
        store_columns<D>(dvalues, dqkv + 2 * qk_dim, row, count, accumulate, key);
    });
}
