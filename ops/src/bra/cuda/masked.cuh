// Attention in bf16 on tensor cores for maps so small that a block holds a whole head of them: products of all queries
// with all keys, where keys that are not routed get a weight of zero. With regions of a few tokens that is about as fast
// forward as in `tensor_cores.cuh`, which looks up where the keys of each region lie and leaves half of its products
// empty; backward it took a quarter less time even when P was computed three times. (Zero times NaN is NaN: one among a
// head's values reaches all of its queries.) A warp owns rows: 16 queries, backward keys, a tile.

#pragma once
#include "own_rows.cuh"
#include "words.cuh"

constexpr int MASKED_THREADS = 256; // for 256 tokens: a warp owns two tiles of them

// Regions of a head's map that are routed to each other. They have 2ˢ tokens, two to sixteen, so that a lane's two
// neighbouring columns lie in the same one.
struct Routing {
    u64* bits;  // of each region: the regions that it is routed to
    int shift;

    __device__ __forceinline__ void collect(const Geometry& g, const u32* routes) const {
        for (int region = threadIdx.x; region < g.regions(); region += blockDim.x) {
            u64 own = 0;
            for (int i = 0; i < g.topk; i++) own |= u64(1) << routes[region * g.topk + i];
            bits[region] = own;
        }
    }

    // words[region][p]: bit j says whether a row of this region is routed to its columns 2p and 2p + 1 of the j-th group
    // of eight; or (`reached`), whether those are routed to it.
    __device__ __forceinline__ void spread(const Geometry& g, u32* words, bool reached) const {
        for (int i = threadIdx.x; i < 4 * g.regions(); i += blockDim.x) {
            u32 word = 0;
            for (int column = i % 4 * 2, group = 0; column < g.tokens(); column += 8, group++) {
                const int region = i / 4, other = column >> shift;
                word |= u32((reached ? bits[other] >> region : bits[region] >> other) & 1) << group;
            }
            words[i] = word;
        }
    }

    // The word of a row; no column is routed to rows past the last.
    __device__ __forceinline__ u32 word(const Geometry& g, const u32* words, int row) const {
        return row < g.tokens() ? words[(row >> shift) * 4 + lane() % 4] : 0;
    }
};

// Starts the copies of N maps of a head's channels to shared memory: all tokens, region after region, and zeros up to
// `rows`.
template <int D, int N>
__device__ __forceinline__ void ask_for(const Geometry& g, const Rows<D> (&to)[N], int rows, const bf16* const (&from)[N],
                                     const int (&strides)[N]) {
    constexpr int CHUNKS = PADDED<D> / 8;
    for (int i = threadIdx.x; i < rows * CHUNKS; i += blockDim.x) {
        const int token = i / CHUNKS, channel = i % CHUNKS * 8;
        const bool exists = token < g.tokens() && channel < D;
        const int pixel = exists ? g.pixel_of(token) : 0;
#pragma unroll
        for (int map = 0; map < N; map++)
            copy_async(to[map].row(token).at(channel), from[map] + i64(pixel) * strides[map] + channel, exists);
    }
}

// Writes, or adds, the tokens of N maps in shared memory to theirs in global memory.
template <int D, int N>
__device__ __forceinline__ void put(const Geometry& g, const Rows<D> (&from)[N], int tokens, bf16* const (&to)[N], int stride,
                                    int accumulate) {
    constexpr int CHUNKS = PADDED<D> / 8;
    for (int i = threadIdx.x; i < tokens * CHUNKS; i += blockDim.x) {
        const int token = i / CHUNKS, channel = i % CHUNKS * 8;
        if (channel >= D) continue;
        const i64 place = i64(g.pixel_of(token)) * stride + channel;
#pragma unroll
        for (int map = 0; map < N; map++) {
            const Pack<u32> own = *reinterpret_cast<const Pack<u32>*>(from[map].row(token).at(channel));
            put_pairs(to[map] + place, own, accumulate);
        }
    }
}

// out (N, H, W, C) and lse (N, heads, H·W), as `attend` of attention.cuh; unless it is null, `kept` gets what out gets, to
// which others will add. S is computed twice, first to find each row's
// largest score: a warp then keeps only the scores of a step, and its few registers leave room for many warps. Of each map
// `held` rows are in shared memory, a multiple of 32.
template <int D>
__global__ void __launch_bounds__(MASKED_THREADS, 4)
    attend_masked(const bf16* qkv, const u32* routes, float scale, bf16* out, bf16* kept, float* lse, int held, int shift,
                  GEOMETRY) {
    await_previous_kernel();
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.y, head = blockIdx.x;
    const int row = g.row(), v_dim = g.v_dim(), tokens = g.tokens();
    qkv += image * tokens * row + head * D;
    out += image * tokens * v_dim + head * D;
    if (kept) kept += image * tokens * v_dim + head * D;
    lse += (image * heads + head) * tokens;
    DYNAMIC_SHARED(bf16, shared);
    const Rows<D> queries = {shared}, keys = {shared + held * PADDED<D>}, values = {keys.data + held * PADDED<D>};
    const Routing routing = {reinterpret_cast<u64*>(values.data + held * PADDED<D>), shift};
    u32* words = reinterpret_cast<u32*>(routing.bits + g.regions());
    float* logarithms = reinterpret_cast<float*>(words + 4 * g.regions()); // lse
    ask_for<D, 3>(g, {queries, keys, values}, held, {qkv, qkv + g.qk_dim(), qkv + 2 * g.qk_dim()}, {row, row, row});
    routing.collect(g, routes + image * g.regions() * topk);
    __syncthreads();
    routing.spread(g, words, false);
    wait_for_copies();
    __syncthreads();
    for (int first = warp() * 16; first < tokens; first += blockDim.x / 2) {
        const Own<D> own(queries, first);
        u32 routed[2], left[2];
#pragma unroll
        for (int half = 0; half < 2; half++) left[half] = routed[half] = routing.word(g, words, first + own_row(half));
        float largest[2] = {-INFINITY, -INFINITY}, totals[2] = {}, sums[2 * PARTS<D>][4] = {};
        for (int from = 0; from < tokens; from += STEP) {
            float scores[2][4];
            multiply_step(scores, own, keys, from);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float& so_far = largest[i / 2 % 2];
                so_far = left[i / 2 % 2] >> i / 4 & 1 ? fmaxf(so_far, scores[i / 4][i % 4]) : so_far;
            }
            left[0] >>= 2, left[1] >>= 2;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half] = row_max(largest[half]) * (scale * LOG2_E); // the scale is positive
            left[half] = routed[half];
        }
        for (int from = 0; from < tokens; from += STEP) {
            float weights[2][4];
            multiply_step(weights, own, keys, from);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int half = i / 2 % 2;
                float& weight = weights[i / 4][i % 4];
                weight = exp2_fast(weight * (scale * LOG2_E) - largest[half]);
                weight = left[half] >> i / 4 & 1 ? weight : 0;
                totals[half] += weight;
            }
            left[0] >>= 2, left[1] >>= 2;
            u32 packed[4];
            pack(packed, weights);
            add_step(sums, packed, values, from);
        }
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float total = row_sum(totals[half]);
            inverse[half] = reciprocal_fast(total);
            if (lane() % 4 == 0) logarithms[first + own_row(half)] = (largest[half] + log2_fast(total)) * LN_2;
        }
        __syncwarp(); // only now has every lane read these queries; nobody else does
        keep(queries, first, sums, inverse);
    }
    __syncthreads();
    put<D, 1>(g, {queries}, tokens, {out}, v_dim, 0);
    if (kept) put<D, 1>(g, {queries}, tokens, {kept}, v_dim, 0);
    for (int token = threadIdx.x; token < tokens; token += blockDim.x) lse[g.pixel_of(token)] = logarithms[token];
}

// Of two neighbouring queries: log₂ of the denominators of their weights, and the sums of P∘dP.
struct __align__(16) TwoQueries {
    float denominators[2], deltas[2];
};

// dqkv, all of it, with P computed once: keys own rows. With dP = dO·Vᵀ, delta = the sum of P∘dP over a query's keys,
// which is that of dO∘O over its channels, and dS = P∘(dP − delta): dV = Pᵀ·dO, dK = s·dSᵀ·Q, dQ = s·dS·K. The last one is
// a sum over keys, whose warps share dSᵀ through shared memory, `chunk` queries at a time: after each chunk queries own
// rows.
template <int D>
__global__ void __launch_bounds__(2 * MASKED_THREADS, 1)
    attend_backward_masked(const bf16* qkv, const u32* routes, float scale, const bf16* out, const float* lse,
                           const bf16* dout, bf16* dqkv, int accumulate, int held, int chunk, int shift, GEOMETRY) {
    await_previous_kernel();
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.y, head = blockIdx.x;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim(), tokens = g.tokens(), of_map = held * PADDED<D>;
    qkv += image * tokens * row + head * D, dqkv += image * tokens * row + head * D;
    out += image * tokens * v_dim + head * D, dout += image * tokens * v_dim + head * D;
    lse += (image * heads + head) * tokens;
    DYNAMIC_SHARED(bf16, shared);
    const Rows<D> queries = {shared}, keys = {shared + of_map}, values = {shared + 2 * of_map};
    const Rows<D> upstream = {shared + 3 * of_map};
    // dSᵀ (keys, queries of a chunk). Rows are an odd number of packs apart, so that eight of them lie in different banks.
    bf16* slopes = shared + 4 * of_map;
    const int apart = chunk + 8;
    TwoQueries* of_queries = reinterpret_cast<TwoQueries*>(slopes + held * apart);
    const Routing routing = {reinterpret_cast<u64*>(of_queries + held / 2), shift};
    u32* reached = reinterpret_cast<u32*>(routing.bits + g.regions());
    ask_for<D, 4>(g, {queries, keys, values, upstream}, held, {qkv, qkv + qk_dim, qkv + 2 * qk_dim, dout},
                  {row, row, row, v_dim});
    routing.collect(g, routes + image * g.regions() * topk);
    for (int i = threadIdx.x; i < 4 * held; i += blockDim.x) {
        const int token = i / 4, channel = i % 4 * 8, pixel = token < tokens ? g.pixel_of(token) : 0;
        const int at = pixel * v_dim + (channel < D ? channel : 0);
        const Pack<u32> own = *reinterpret_cast<const Pack<u32>*>(out + at);
        const Pack<u32> up = *reinterpret_cast<const Pack<u32>*>(dout + at);
        float delta = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) delta += element<bf16>(own, j) * element<bf16>(up, j);
        delta = row_sum(channel < D ? delta : 0);
        if (channel > 0) continue;
        of_queries[token / 2].denominators[token % 2] = token < tokens ? lse[pixel] * LOG2_E : INFINITY;
        of_queries[token / 2].deltas[token % 2] = token < tokens ? delta : 0;
    }
    __syncthreads();
    routing.spread(g, reached, true);
    wait_for_copies();
    __syncthreads();

    const int first = warp() * 16;
    const Own<D> own_keys(keys, first), own_values(values, first);
    float dkeys[2 * PARTS<D>][4] = {}, dvalues[2 * PARTS<D>][4] = {};
    u32 left[2];
#pragma unroll
    for (int half = 0; half < 2; half++) left[half] = routing.word(g, reached, first + own_row(half));
    for (int begin = 0; begin < tokens; begin += chunk) {
        const int end = min(begin + chunk, tokens);
        for (int from = begin; from < end && first < tokens; from += STEP) {
            float weights[2][4], slope[2][4];
            multiply_step(weights, own_keys, queries, from);
            multiply_step(slope, own_values, upstream, from);
#pragma unroll
            for (int group = 0; group < 2; group++) {
                const TwoQueries two = of_queries[(from + group * 8) / 2 + lane() % 4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& weight = weights[group][i];
                    weight = exp2_fast(weight * (scale * LOG2_E) - two.denominators[i % 2]);
                    weight = left[i / 2] >> group & 1 ? weight : 0;
                    slope[group][i] = weight * (slope[group][i] - two.deltas[i % 2]);
                }
            }
            left[0] >>= 2, left[1] >>= 2;
            u32 packed[4];
            pack(packed, weights);
            add_step(dvalues, packed, upstream, from);
            pack(packed, slope);
            add_step(dkeys, packed, queries, from);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = from - begin + i / 2 * 8 + lane() % 4 * 2;
                *reinterpret_cast<u32*>(slopes + (first + own_row(i % 2)) * apart + column) = packed[i];
            }
        }
        __syncthreads();
        // A warp takes 16 channels of 16 queries, over which their gradients are written.
        for (int i = warp(); i < (end - begin + 15) / 16 * PARTS<D>; i += blockDim.x / 32) {
            const int query = i / PARTS<D> * 16, channel = i % PARTS<D> * 16;
            float dqueries[2][4] = {};
            for (int key = 0; key < tokens; key += STEP) {
                u32 weights[4];
                load_transposed(weights, slopes + (key + lane() / 16 * 8 + lane() % 8) * apart + query + lane() / 8 % 2 * 8);
                add_step(dqueries, weights, keys, key, channel);
            }
            keep(queries, begin + query, dqueries, {scale, scale}, channel);
        }
        __syncthreads();
    }
    keep(keys, first, dkeys, {scale, scale});
    keep(values, first, dvalues, {1, 1});
    __syncthreads();
    put<D, 3>(g, {queries, keys, values}, tokens, {dqkv, dqkv + qk_dim, dqkv + 2 * qk_dim}, row, accumulate);
}
