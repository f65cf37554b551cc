// Attention in bf16 on tensor cores for maps so small that a block holds a whole head of them: products of all queries
// with all keys, where those that are not routed get a weight of zero. With regions of a few tokens that takes half of
// the instructions of `tensor_cores.cuh`, which looks up where the keys of each region lie and leaves rows of its
// products empty, and the loads of one step need not wait for the one before.
//
// A warp owns rows: 16 queries (or, for their keys' gradients, keys), or twice as many, so that what it loads of the
// others serves more products. It iterates over the others in steps of 16, which are columns: S = Q·Kᵀ comes out laid
// out as the left operand of P·V.

#pragma once
#include "tiles.cuh"

constexpr int MASKED_THREADS = 224; // the most registers that two blocks of a multiprocessor leave a thread
constexpr int STEP = 16;

// The regions that a row is routed to (or that are routed to it), from the lane's next columns on. Regions have 2ˢ tokens,
// two to sixteen, and a lane's two neighbouring columns lie in the same region.
struct Routed {
    u64 left;

    __device__ __forceinline__ bool has(int group, int shift) const { return left >> (group * 8 >> shift) & 1; }
    __device__ __forceinline__ void advance(int shift) { left >>= STEP >> shift; }
};

// N maps of a head's channels in shared memory, all of their tokens region after region, and zeros up to `rows`.
template <int D, int N>
struct Held {
    Rows<D> maps[N];
    int rows;
    bf16* end; // of the shared memory that they take

    __device__ __forceinline__ Held(const Geometry& g, bf16* shared, const bf16* const (&from)[N], const int (&strides)[N])
        : rows((int(g.tokens()) + 2 * STEP - 1) / (2 * STEP) * (2 * STEP)), end(shared + N * rows * PADDED<D>) {
        constexpr int CHUNKS = PADDED<D> / 8;
#pragma unroll
        for (int map = 0; map < N; map++) maps[map].data = shared + map * rows * PADDED<D>;
        for (int i = threadIdx.x; i < rows * CHUNKS; i += blockDim.x) {
            const int token = i / CHUNKS, channel = i % CHUNKS * 8;
            const bool exists = token < g.tokens() && channel < D;
            const i64 pixel = exists ? g.pixel(token / g.region_tokens, token % g.region_tokens) : 0;
#pragma unroll
            for (int map = 0; map < N; map++)
                copy_async(maps[map].row(token).at(channel), from[map] + pixel * strides[map] + channel, exists);
        }
    }
};

// to[p] = the regions that region p is routed to, or (`reached`) those that are routed to it, as bits.
__device__ __forceinline__ void collect_routes(const Geometry& g, const u32* routes, u64* to) {
    for (int region = threadIdx.x; region < g.regions(); region += blockDim.x) {
        u64 bits = 0;
        for (int i = 0; i < g.topk; i++) bits |= u64(1) << routes[region * g.topk + i];
        to[region] = bits;
    }
}
__device__ __forceinline__ void collect_reached(const Geometry& g, const u64* routed, u64* to) {
    for (int region = threadIdx.x; region < g.regions(); region += blockDim.x) {
        u64 bits = 0;
        for (int i = 0; i < g.regions(); i++) bits |= (routed[i] >> region & 1) << i;
        to[region] = bits;
    }
}

// Rows first, first + 1, ... of a map as left operands, 16 a tile.
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

// products (16 rows a tile, 16 columns in two groups) = own·othersᵀ, for the others from `first` on.
template <int D, int TILES>
__device__ __forceinline__ void multiply(float (&products)[TILES][2][4], const Own<D, TILES>& own, Rows<D> others, int first) {
    const Row row = others.row(first + lane() / 16 * 8 + lane() % 8);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 8; i++) products[tile][i / 4][i % 4] = 0;
#pragma unroll
    for (int part = 0; part < PARTS<D>; part++) {
        u32 right[4];
        load_matrices(right, row.at(part * 16 + lane() / 8 % 2 * 8));
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            multiply_add(products[tile][0], own.at[tile][part], {right[0], right[1]});
            multiply_add(products[tile][1], own.at[tile][part], {right[2], right[3]});
        }
    }
}

// sums (16 rows a tile, D channels) += weights·others.
template <int D, int TILES>
__device__ __forceinline__ void add_products(float (&sums)[TILES][2 * PARTS<D>][4], const float (&weights)[TILES][2][4],
                                             Rows<D> others, int first) {
    u32 left[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            left[tile][i] = pack_bf16(weights[tile][i / 2][i % 2 * 2], weights[tile][i / 2][i % 2 * 2 + 1]);
    const Row row = others.row(first + lane() % 16);
#pragma unroll
    for (int part = 0; part < PARTS<D>; part++) {
        u32 right[4];
        load_transposed(right, row.at(part * 16 + lane() / 16 * 8));
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            multiply_add(sums[tile][2 * part], left[tile], {right[0], right[1]});
            multiply_add(sums[tile][2 * part + 1], left[tile], {right[2], right[3]});
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

// A lane has rows lane / 4 and lane / 4 + 8 of a tile, its two `halves`.
__device__ __forceinline__ int own_row(int tile, int half) { return tile * 16 + half * 8 + lane() / 4; }

// What the rows from `first` on are routed to.
template <int TILES>
__device__ __forceinline__ void begin(Routed (&routed)[TILES][2], const Geometry& g, const u64* routes, int first, int shift) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        const int region = (first + own_row(i / 2, i % 2)) >> shift;
        routed[i / 2][i % 2].left = region < g.regions() ? routes[region] >> (lane() % 4 * 2 >> shift) : 0;
    }
}

// out (N, H, W, C) and lse (N, heads, H·W), as `attend` of attention.cuh.
template <int D>
__global__ void __launch_bounds__(MASKED_THREADS, D > 32 ? 2 : 3)
    attend_masked(const bf16* qkv, const u32* routes, float scale, bf16* out, float* lse, int shift, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.y, head = blockIdx.x;
    const int row = g.row(), v_dim = g.v_dim(), tokens = g.tokens();
    qkv += image * tokens * row + head * D;
    out += image * tokens * v_dim + head * D;
    lse += (image * heads + head) * tokens;
    DYNAMIC_SHARED(bf16, shared);
    const Held<D, 3> held(g, shared, {qkv, qkv + g.qk_dim(), qkv + 2 * g.qk_dim()}, {row, row, row});
    u64* bits = reinterpret_cast<u64*>(held.end);
    collect_routes(g, routes + image * g.regions() * topk, bits);
    wait_for_copies();
    __syncthreads();
    for (int first = warp() * 16; first < tokens; first += blockDim.x / 2) {
        const Own<D, 1> queries(held.maps[0], first);
        float outputs[1][2 * PARTS<D>][4] = {};
        // Of each row: the largest score so far, as an exponent of two, and the lane's part of the sum of weights
        // relative to it.
        float most[2] = {-INFINITY, -INFINITY}, sum[2] = {};
        Routed routed[1][2];
        begin(routed, g, bits, first, shift);
        for (int from = 0; from < tokens; from += TILE) {
            float scores[STEPS][1][2][4];
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                // Rows past the last are not routed to.
                if (from + step * STEP < tokens) multiply(scores[step], queries, held.maps[1], from + step * STEP);
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int group = 0; group < 2; group++)
                        if (!routed[0][half].has(group, shift))
                            scores[step][0][group][half * 2] = scores[step][0][group][half * 2 + 1] = -INFINITY;
                    routed[0][half].advance(shift);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float largest = -INFINITY;
#pragma unroll
                for (int i = 0; i < 4 * STEPS; i++)
                    largest = fmaxf(largest, scores[i / 4][0][i / 2 % 2][half * 2 + i % 2]);
                // The scale is positive. Without a key so far, weights are relative to any number, and zero.
                const float now = fmaxf(most[half], row_max(largest) * scale * LOG2_E), base = now == -INFINITY ? 0 : now;
                const float shrink = exp2_fast(most[half] - base);
                most[half] = now, sum[half] *= shrink;
#pragma unroll
                for (int i = 0; i < 4 * STEPS; i++) {
                    float& weight = scores[i / 4][0][i / 2 % 2][half * 2 + i % 2];
                    weight = exp2_fast(weight * (scale * LOG2_E) - base);
                    sum[half] += weight;
                }
#pragma unroll
                for (int i = 0; i < 4 * PARTS<D>; i++) outputs[0][i / 2][half * 2 + i % 2] *= shrink;
            }
#pragma unroll
            for (int step = 0; step < STEPS; step++)
                if (from + step * STEP < tokens) add_products(outputs, scores[step], held.maps[2], from + step * STEP);
        }
        auto pixel = [&](int i) { return g.pixel((first + i) / g.region_tokens, (first + i) % g.region_tokens); };
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float total = row_sum(sum[half]), inverse = reciprocal_fast(total);
            const int own = own_row(0, half);
            if (lane() % 4 == 0 && first + own < tokens) lse[pixel(own)] = (most[half] + log2_fast(total)) * LN_2;
#pragma unroll
            for (int i = 0; i < 4 * PARTS<D>; i++) outputs[0][i / 2][half * 2 + i % 2] *= inverse;
        }
        store_rows<D>(outputs[0], out, v_dim, tokens - first, 0, pixel);
    }
}

// dqkv of all three, in two parts: queries own rows first, then keys do, which recompute P. With dP = dO·Vᵀ, delta = the
// sum of P∘dP over a row, and dS = P∘(dP − delta): dQ = s·dS·K, dK = s·dSᵀ·Q, dV = Pᵀ·dO.
template <int D>
__global__ void __launch_bounds__(MASKED_THREADS, D > 32 ? 1 : 2)
    attend_backward_masked(const bf16* qkv, const u32* routes, float scale, const float* lse, const bf16* dout, bf16* dqkv,
                           int accumulate, int shift, GEOMETRY) {
    constexpr int TILES = D > 32 ? 1 : 2; // what registers allow
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.y, head = blockIdx.x;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim(), tokens = g.tokens();
    qkv += image * tokens * row + head * D, dqkv += image * tokens * row + head * D;
    dout += image * tokens * v_dim + head * D;
    lse += (image * heads + head) * tokens;
    DYNAMIC_SHARED(bf16, shared);
    const Held<D, 4> held(g, shared, {qkv, qkv + qk_dim, qkv + 2 * qk_dim, dout}, {row, row, row, v_dim});
    const Rows<D> queries = held.maps[0], keys = held.maps[1], values = held.maps[2], upstream = held.maps[3];
    u64* routed = reinterpret_cast<u64*>(held.end);
    u64* reached = routed + g.regions();
    // Of each query: log₂ of its weights' denominator, and delta.
    float* denominators = reinterpret_cast<float*>(reached + g.regions());
    float* deltas = denominators + held.rows;
    collect_routes(g, routes + image * g.regions() * topk, routed);
    auto pixel_of = [&](int token) { return g.pixel(token / g.region_tokens, token % g.region_tokens); };
    for (int i = threadIdx.x; i < held.rows; i += blockDim.x)
        denominators[i] = i < tokens ? lse[pixel_of(i)] * LOG2_E : INFINITY;
    wait_for_copies();
    __syncthreads();
    collect_reached(g, routed, reached);

    for (int first = warp() * 16 * TILES; first < tokens; first += blockDim.x / 2 * TILES) {
        const Own<D, TILES> own_queries(queries, first), own_upstream(upstream, first);
        float gradients[TILES][2 * PARTS<D>][4] = {}, delta[TILES][2] = {};
        for (int pass = 0; pass < 2; pass++) {
            Routed own_routes[TILES][2];
            begin(own_routes, g, routed, first, shift);
            for (int from = 0; from < tokens; from += STEP) {
                float scores[TILES][2][4], slopes[TILES][2][4];
                multiply(scores, own_queries, keys, from);
                multiply(slopes, own_upstream, values, from);
#pragma unroll
                for (int i = 0; i < 2 * TILES; i++) {
                    const int tile = i / 2, half = i % 2;
                    const float denominator = denominators[first + own_row(tile, half)];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float& score = scores[tile][j / 2][half * 2 + j % 2];
                        const float slope = slopes[tile][j / 2][half * 2 + j % 2];
                        const bool is_key = own_routes[tile][half].has(j / 2, shift);
                        score = is_key ? exp2_fast(score * (scale * LOG2_E) - denominator) : 0;
                        if (pass == 0) delta[tile][half] += score * slope;
                        else score *= slope - delta[tile][half];
                    }
                    own_routes[tile][half].advance(shift);
                }
                if (pass == 1) add_products(gradients, scores, keys, from);
            }
            if (pass == 0)
#pragma unroll
                for (int i = 0; i < 2 * TILES; i++) delta[i / 2][i % 2] = row_sum(delta[i / 2][i % 2]);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int begin = first + tile * 16;
            if (lane() % 4 == 0)
                for (int half = 0; half < 2; half++) deltas[first + own_row(tile, half)] = delta[tile][half];
#pragma unroll
            for (int i = 0; i < 8 * PARTS<D>; i++) gradients[tile][i / 4][i % 4] *= scale;
            store_rows<D>(gradients[tile], dqkv, row, tokens - begin, accumulate, [&](int i) { return pixel_of(begin + i); });
        }
    }
    __syncthreads();

    for (int first = warp() * 16; first < tokens; first += blockDim.x / 2) {
        const Own<D, 1> own_keys(keys, first), own_values(values, first);
        float dkeys[1][2 * PARTS<D>][4] = {}, dvalues[1][2 * PARTS<D>][4] = {};
        Routed own_routes[1][2];
        begin(own_routes, g, reached, first, shift);
        for (int from = 0; from < tokens; from += STEP) {
            float scores[1][2][4], slopes[1][2][4];
            multiply(scores, own_keys, queries, from);
            multiply(slopes, own_values, upstream, from);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int query = from + j / 2 * 8 + lane() % 4 * 2 + j % 2;
                const float denominator = denominators[query], delta = deltas[query];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float& score = scores[0][j / 2][half * 2 + j % 2];
                    float& slope = slopes[0][j / 2][half * 2 + j % 2];
                    const bool is_query = own_routes[0][half].has(j / 2, shift);
                    score = is_query ? exp2_fast(score * (scale * LOG2_E) - denominator) : 0;
                    slope = score * (slope - delta);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) own_routes[0][half].advance(shift);
            add_products(dvalues, scores, upstream, from);
            add_products(dkeys, slopes, queries, from);
        }
#pragma unroll
        for (int i = 0; i < 8 * PARTS<D>; i++) dkeys[0][i / 4][i % 4] *= scale;
        auto pixel = [&](int i) { return pixel_of(first + i); };
        store_rows<D>(dkeys[0], dqkv + qk_dim, row, tokens - first, accumulate, pixel);
        store_rows<D>(dvalues[0], dqkv + 2 * qk_dim, row, tokens - first, accumulate, pixel);
    }
}
