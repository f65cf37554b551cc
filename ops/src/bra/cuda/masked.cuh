// Attention in bf16 on tensor cores for maps so small that a block holds a whole head of them: products of all queries
// with all keys, where keys that are not routed get a weight of zero. With regions of a few tokens that is about as
// fast forward as gathering, which looks up where the keys of each region lie and leaves products half empty, and
// faster backward, where A is computed once for all gradients. (Zero times NaN is NaN: one among a head's values
// reaches all of its queries.) A warp owns rows, queries or, backward, keys: two tiles of 16.

#pragma once
#include "own_rows.cuh"
#include "words.cuh"

// Two tiles have as many tokens as a warp has lanes: a block has a thread a token.
constexpr int OWN_TILES = 2, OWN_TOKENS = 16 * OWN_TILES;
constexpr int MASKED_THREADS = 256;

// The rows of a map in shared memory, whole tiles.
__device__ __forceinline__ int rows_of(const Geometry& g) { return (int(g.tokens()) + 15) / 16 * 16; }

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

    // reached[region][p]: bit j says whether columns 2p and 2p + 1 of the j-th group of eight are routed to this region.
    __device__ __forceinline__ void spread(const Geometry& g, u32* reached) const {
        for (int i = threadIdx.x; i < 4 * g.regions(); i += blockDim.x) {
            u32 word = 0;
            for (int column = i % 4 * 2, group = 0; column < g.tokens(); column += 8, group++)
                word |= u32(bits[column >> shift] >> i / 4 & 1) << group;
            reached[i] = word;
        }
    }

    // The word of a row; no column is routed to rows past the last.
    __device__ __forceinline__ u32 word(const Geometry& g, const u32* words, int row) const {
        return row < g.tokens() ? words[(row >> shift) * 4 + lane() % 4] : 0;
    }
};

// The pixel of a warp's lane-th token from `first` on; past the last token, its pixel.
__device__ __forceinline__ int pixel_of_lane(const Geometry& g, int first) {
    return g.pixel_of(min(first + int(lane()), int(g.tokens()) - 1));
}

// A lane's pieces of a warp's rows, from `first` on, are eight channels of one of every eight rows. The pixel of the i-th,
// if there is such a row:
struct LookedUp {
    const Geometry& g;
    __device__ __forceinline__ int of(int, int token) const { return token < int(g.tokens()) ? g.pixel_of(token) : 0; }
};
// The same with fewer instructions and more registers: lanes look up one each, and get the others by shuffles.
template <int ROWS>
struct Exchanged {
    int pixels[ROWS / 8];
    __device__ __forceinline__ Exchanged(const Geometry& g, int first) {
        const int own = pixel_of_lane(g, first);
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) pixels[i] = __shfl_sync(~0u, own, i * 8 + copied_row(lane() / 4));
    }
    __device__ __forceinline__ int of(int i, int) const { return pixels[i]; }
};

// Calls visit(i, token, channel, pixel, whether there is such a token and channel) for the i-th of these pieces.
template <int D, int ROWS, typename Pixel, typename Visit>
__device__ __forceinline__ void for_each_piece(const Geometry& g, int first, const Pixel& pixel, Visit visit) {
    static_assert(PADDED<D> == 32, "four lanes share a row");
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
        if (first + i / 2 * 16 >= rows_of(g)) break; // a tile that there is not
        const int token = first + i * 8 + copied_row(lane() / 4), channel = lane() % 4 * 8;
        visit(i, token, channel, pixel.of(i, token), token < int(g.tokens()) && channel < D);
    }
}

// Writes, or adds, rows of N maps in shared memory, which this warp's lanes have written, to theirs in global memory.
template <int D, int ROWS, int N, typename Map, typename Pixel>
__device__ __forceinline__ void put(const Geometry& g, int first, const Pixel& pixel, const Map (&from)[N],
                                    bf16* const (&to)[N], int stride, int accumulate) {
    __syncwarp();
    for_each_piece<D, ROWS>(g, first, pixel, [&](int, int token, int channel, int pixel, bool exists) {
        Pack<u32> own[N];
#pragma unroll
        for (int map = 0; map < N; map++) own[map] = *reinterpret_cast<const Pack<u32>*>(piece(from[map], token, channel));
        if (!exists) return;
#pragma unroll
        for (int map = 0; map < N; map++) put_pairs(to[map] + (pixel * stride + channel), own[map], accumulate);
    });
    __syncwarp();
}

// Maps lie in pairs, side by side: a lane's addresses then differ by constants, which take neither registers nor sums.
typedef PaddedRows<64> Left;
typedef PaddedRows<64, 32> Right;
constexpr int PAIR = Left::STRIDE;

constexpr u32 FIRST_GROUP = 1u << 31;

// words[region][p]: the j-th bit from the top says whether a row of this region is routed to its columns 2p and 2p + 1 of the
// j-th group of eight. Regions have 2ˢ tokens, s = shift.
__device__ __forceinline__ void list_groups(const Geometry& g, const u32* routes, int shift, u32* words) {
    const u32 groups = shift > 3 ? FIRST_GROUP | FIRST_GROUP >> 1 : FIRST_GROUP; // sixteen tokens are two groups
    for (int i = threadIdx.x; i < 4 * g.regions(); i += blockDim.x) {
        const u32 *own = routes + i / 4 * g.topk, column = i % 4 * 2;
        u32 word = 0;
#pragma unroll 16 // as many loads are on their way at once
        for (int k = 0; k < g.topk; k++) {
            const u32 begin = own[k] << shift;
            word |= column - begin % 8 < 1u << shift ? groups >> begin / 8 : 0;
        }
        words[i] = word;
    }
}

// Softmax is the same whatever is subtracted from a row's scores, if floats hold their exponentials, and with this number (of
// powers of two) they hold those of usual scores, so that nobody has to find the largest first. A row's scores are usual if
// the weights add up to between LEAST_TOTAL and 1: no weight is above 1 then, as none is with the largest subtracted, and
// those that vanish are too small to matter.
constexpr float USUAL_SHIFT = 32, LEAST_TOTAL = 1.0f / (1ll << 56);

// A number in the eight elements after a row's last channel.
template <int D>
__device__ __forceinline__ float* after_row(PaddedRows<D> map, int row) {
    return reinterpret_cast<float*>(piece(map, row, PADDED<D>));
}

// For a warp's sixteen queries: the largest scores of a lane's two of them. `left` are the words of their regions.
template <int D>
__device__ __forceinline__ void find_largest(float (&largest)[2], const Own<D>& own, Left keys, int tokens, u32 (&left)[2]) {
    largest[0] = largest[1] = -INFINITY;
    for (int from = 0; from < tokens; from += STEP) {
        float scores[2][4];
        multiply_step(scores, own, keys, from);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float& so_far = largest[i / 2 % 2];
            so_far = left[i / 2 % 2] & FIRST_GROUP >> i / 4 ? fmaxf(so_far, scores[i / 4][i % 4]) : so_far;
        }
        left[0] <<= 2, left[1] <<= 2;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) largest[half] = row_max(largest[half]);
}

// Of the same queries: the totals of weights 2^(factor·(score − largest) − shift), and the sums of values so weighted. (The
// difference comes first: of huge scores, a product with a factor would be off by many powers of two.)
template <int D>
__device__ __forceinline__ void weigh(float (&totals)[2], float (&sums)[2 * PARTS<D>][4], const Own<D>& own, Left keys,
                                      Right values, int tokens, u32 (&left)[2], float factor, const float (&largest)[2],
                                      float shift) {
    totals[0] = totals[1] = 0;
#pragma unroll
    for (int i = 0; i < 8 * PARTS<D>; i++) sums[i / 4][i % 4] = 0;
    for (int from = 0; from < tokens; from += STEP) {
        float weights[2][4];
        multiply_step(weights, own, keys, from);
        u32 packed[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int half = i % 2;
            float* pair = weights[i / 2] + half * 2;
#pragma unroll
            for (int j = 0; j < 2; j++) pair[j] = exp2_fast((pair[j] - largest[half]) * factor - shift);
            // Chosen without a branch, after which the lanes might multiply apart.
            const bool attends = left[half] & FIRST_GROUP >> i / 2;
            packed[i] = attends ? pack_bf16(pair[0], pair[1]) : 0;
            totals[half] += attends ? pair[0] + pair[1] : 0;
        }
        left[0] <<= 2, left[1] <<= 2;
        add_step(sums, packed, values, from);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) totals[half] = row_sum(totals[half]);
}

// out (N, H, W, C) and lse (N, heads, H·W), as `attend` of attention.cuh; unless it is null, `kept` gets what out gets, to
// which others will add. A warp keeps only the scores of a step, and its few registers leave room for many warps.
template <int D>
__global__ void __launch_bounds__(MASKED_THREADS, 4)
    attend_masked(const bf16* qkv, const u32* routes, float scale, bf16* out, bf16* kept, float* lse, int shift, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.y, head = blockIdx.x;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim(), tokens = g.tokens(), held = rows_of(g);
    qkv += image * tokens * row + head * D;
    out += image * tokens * v_dim + head * D;
    if (kept) kept += image * tokens * v_dim + head * D;
    lse += (image * heads + head) * tokens;
    DYNAMIC_SHARED(bf16, shared);
    const Left keys = {shared};
    const Right values = {shared};
    const PaddedRows<D> queries = {shared + held * PAIR};
    u32* words = reinterpret_cast<u32*>(queries.data + held * queries.STRIDE);
    const int own_tokens = warp() * OWN_TOKENS;
    const float factor = scale * LOG2_E;
    const Exchanged<OWN_TOKENS> pixels(g, own_tokens);
    for_each_piece<D, OWN_TOKENS>(g, own_tokens, pixels, [&](int, int token, int channel, int pixel, bool exists) {
        const bf16* from = qkv + (pixel * row + channel);
        copy_async(piece(queries, token, channel), from, exists);
        copy_async(piece(keys, token, channel), from + qk_dim, exists);
        copy_async(piece(values, token, channel), from + 2 * qk_dim, exists);
    });
    list_groups(g, routes + image * g.regions() * topk, shift, words);
    wait_for_copies();
    __syncthreads();
    for (int first = own_tokens; first < min(own_tokens + OWN_TOKENS, tokens); first += 16) {
        const Own<D> own(queries, first);
        auto look_up = [&](u32 (&of_rows)[2]) { // rows past the last get its word, and zeros for scores
#pragma unroll
            for (int half = 0; half < 2; half++)
                of_rows[half] = words[(min(first + own_row(half), tokens - 1) >> shift) * 4 + lane() % 4];
        };
        u32 left[2];
        float subtracted = USUAL_SHIFT, largest[2] = {}, totals[2], sums[2 * PARTS<D>][4];
        look_up(left);
        weigh(totals, sums, own, keys, values, tokens, left, factor, largest, subtracted);
        bool usual = true;
#pragma unroll
        for (int half = 0; half < 2; half++) usual = usual && totals[half] >= LEAST_TOTAL && totals[half] <= 1;
        if (__ballot_sync(~0u, usual) != ~0u) {
            look_up(left);
            find_largest(largest, own, keys, tokens, left); // which is that of the weights, as the scale is positive
            look_up(left);
            subtracted = 0;
            weigh(totals, sums, own, keys, values, tokens, left, factor, largest, subtracted);
        }
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            inverse[half] = reciprocal_fast(totals[half]);
            const float logarithm = largest[half] * factor + subtracted + log2_fast(totals[half]);
            if (lane() % 4 == 0) *after_row(queries, first + own_row(half)) = logarithm * LN_2;
        }
        __syncwarp();
        // Only now has every lane read these queries; nobody else does.
        keep(queries, first, sums, inverse);
    }
    __syncwarp();
    const Exchanged<OWN_TOKENS> places(g, own_tokens); // again, as registers were scarce in between
    if (own_tokens + int(lane()) < tokens)
        lse[pixel_of_lane(g, own_tokens)] = *after_row(queries, own_tokens + int(lane()));
    if (kept) put<D, OWN_TOKENS, 2, PaddedRows<D>>(g, own_tokens, places, {queries, queries}, {out, kept}, v_dim, 0);
    else put<D, OWN_TOKENS, 1, PaddedRows<D>>(g, own_tokens, places, {queries}, {out}, v_dim, 0);
}

// As `multiply_step`, for a warp's two tiles, the second so many rows after the first. They are loaded each time: there are
// not registers for all.
template <int D, typename Map>
__device__ __forceinline__ void multiply_tiles(float (&products)[OWN_TILES][2][4], Map own, int second, Map others) {
#pragma unroll
    for (int part = 0; part < PARTS<D>; part++) {
        u32 left[OWN_TILES][4], right[4];
        const Place other = right_rows(others, 0, part * 16);
        load_matrices(right, other.at, other.after);
#pragma unroll
        for (int tile = 0; tile < OWN_TILES; tile++) {
            const Place at = left_rows(from_row(own, tile * second), 0, part * 16);
            load_matrices(left[tile], at.at, at.after);
        }
#pragma unroll
        for (int tile = 0; tile < OWN_TILES; tile++) multiply_part(products[tile], left[tile], right, part);
    }
}

// As `add_step`, for both tiles.
template <int GROUPS, typename Map>
__device__ __forceinline__ void add_tiles(float (&sums)[OWN_TILES][GROUPS][4], const u32 (&weights)[OWN_TILES][4], Map others) {
#pragma unroll
    for (int part = 0; part < GROUPS / 2; part++) {
        u32 right[4];
        const Place other = left_rows(others, 0, part * 16);
        load_transposed(right, other.at, other.after);
#pragma unroll
        for (int tile = 0; tile < OWN_TILES; tile++) {
            multiply_add(sums[tile][2 * part], weights[tile], {right[0], right[1]});
            multiply_add(sums[tile][2 * part + 1], weights[tile], {right[2], right[3]});
        }
    }
}

// Of two neighbouring queries: log₂ of the denominators of their weights, and the sums of A∘dA.
struct __align__(16) TwoQueries {
    float denominators[2], deltas[2];
};

// dqkv, all of it, with A computed once: keys own rows. With dA = dO·Vᵀ, delta = the sum of A∘dA over a query's keys,
// which is that of dO∘O over its channels, and dS = A∘(dA − delta): dV = Aᵀ·dO, dK = s·dSᵀ·Q, dQ = s·dS·K. The last one
// is a sum over keys, whose warps share dSᵀ through shared memory, `chunk` queries at a time: after each chunk queries
// own rows. Of two blocks per multiprocessor, one computes while the other loads or stores.
template <int D>
__global__ void __launch_bounds__(MASKED_THREADS, 2)
    attend_backward_masked(const bf16* qkv, const u32* routes, float scale, const bf16* out, const float* lse,
                           const bf16* dout, bf16* dqkv, int accumulate, int chunk, int shift, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.y, head = blockIdx.x;
    const int row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim(), tokens = g.tokens();
    const int held = rows_of(g), of_pair = held * PAIR, apart = chunk + 8;
    qkv += image * tokens * row + head * D, dqkv += image * tokens * row + head * D;
    out += image * tokens * v_dim + head * D, dout += image * tokens * v_dim + head * D;
    lse += (image * heads + head) * tokens;
    DYNAMIC_SHARED(bf16, shared);
    const Left queries = {shared}, keys = {shared + of_pair};
    const Right upstream = {queries.data}, values = {keys.data};
    // dSᵀ (keys, queries of a chunk). Rows are an odd number of packs apart, so that eight of them lie in different banks.
    bf16* slopes = shared + 2 * of_pair;
    TwoQueries* of_queries = reinterpret_cast<TwoQueries*>(slopes + held * apart);
    const Routing routing = {reinterpret_cast<u64*>(of_queries + blockDim.x / 2), shift};
    u32* reached = reinterpret_cast<u32*>(routing.bits + g.regions());
    const int first = warp() * OWN_TOKENS;
    Pack<u32> results[OWN_TOKENS / 8] = {}, gradients[OWN_TOKENS / 8] = {};
    int own_pixel = 0; // a lane has a token, too: of its four pieces, one in turn with the lanes that share the rows
    for_each_piece<D, OWN_TOKENS>(g, first, LookedUp{g}, [&](int i, int token, int channel, int pixel, bool exists) {
        const bf16* from = qkv + i64(pixel) * row + channel;
        const int at = pixel * v_dim + (exists ? channel : 0);
        copy_async(piece(queries, token, channel), from, exists);
        copy_async(piece(keys, token, channel), from + qk_dim, exists);
        copy_async(piece(values, token, channel), from + 2 * qk_dim, exists);
        copy_async(piece(upstream, token, channel), dout + at, exists);
        results[i] = *reinterpret_cast<const Pack<u32>*>(out + at);
        gradients[i] = *reinterpret_cast<const Pack<u32>*>(dout + at);
        if (i == lane() % 4) own_pixel = pixel;
    });
    const int own_token = first + lane() % 4 * 8 + copied_row(lane() / 4);
    const float logarithm = lse[own_pixel];
    routing.collect(g, routes + image * g.regions() * topk);
    __syncwarp(); // the last regions' lanes with the others
    float own_delta = 0;
#pragma unroll
    for (int i = 0; i < OWN_TOKENS / 8; i++) { // all of these loads are on their way before the first is awaited
        float delta = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) delta += element<bf16>(results[i], j) * element<bf16>(gradients[i], j);
        delta = row_sum(lane() % 4 * 8 < D ? delta : 0);
        if (i == lane() % 4) own_delta = delta;
    }
    of_queries[own_token / 2].denominators[own_token % 2] = own_token < tokens ? logarithm * LOG2_E : INFINITY;
    of_queries[own_token / 2].deltas[own_token % 2] = own_token < tokens ? own_delta : 0;
    __syncthreads();
    routing.spread(g, reached);
    wait_for_copies();
    __syncthreads();

    // A warp without a second tile does its first one twice, with the same results.
    const int second = first + 16 < tokens ? 16 : 0;
    float dkeys[OWN_TILES][2 * PARTS<D>][4] = {}, dvalues[OWN_TILES][2 * PARTS<D>][4] = {};
    u32 left[OWN_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * OWN_TILES; i++)
        left[i / 2][i % 2] = routing.word(g, reached, first + i / 2 * second + own_row(i % 2));
    const TwoQueries* of_lane = of_queries + lane() % 4;
    bf16* own_slopes = slopes + (first + lane() / 4) * apart + lane() % 4 * 2;
    for (int begin = 0; begin < tokens; begin += chunk) {
        const int end = min(begin + chunk, tokens);
        for (int from = begin; from < end; from += STEP) {
            float weights[OWN_TILES][2][4], slope[OWN_TILES][2][4];
            multiply_tiles<D>(weights, from_row(keys, first), second, from_row(queries, from));
            multiply_tiles<D>(slope, from_row(values, first), second, from_row(upstream, from));
#pragma unroll
            for (int group = 0; group < 2; group++) {
                const TwoQueries two = of_lane[(from >> 1) + group * 4];
#pragma unroll
                for (int i = 0; i < 4 * OWN_TILES; i++) {
                    const int tile = i / 4, half = i / 2 % 2;
                    float &weight = weights[tile][group][i % 4], &change = slope[tile][group][i % 4];
                    weight = exp2_fast(weight * (scale * LOG2_E) - two.denominators[i % 2]);
                    weight = left[tile][half] & 1 << group ? weight : 0;
                    change = weight * (change - two.deltas[i % 2]);
                }
            }
            bf16* to = own_slopes + from - begin;
            u32 packed[OWN_TILES][4], packed_slope[OWN_TILES][4];
#pragma unroll
            for (int tile = 0; tile < OWN_TILES; tile++) {
                left[tile][0] >>= 2, left[tile][1] >>= 2;
                pack(packed[tile], weights[tile]);
                pack(packed_slope[tile], slope[tile]);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    *reinterpret_cast<u32*>(to + (tile * second + i % 2 * 8) * apart + i / 2 * 8) = packed_slope[tile][i];
            }
            add_tiles(dvalues, packed, from_row(upstream, from));
            add_tiles(dkeys, packed_slope, from_row(queries, from));
        }
        __syncthreads();
        for (int query = begin + int(warp()) * 16; query < end; query += blockDim.x / 2) {
            float dqueries[2 * PARTS<D>][4] = {};
#pragma unroll 2
            for (int key = 0; key < tokens; key += STEP) {
                u32 weights[4];
                const int own_key = key + lane() / 16 * 8 + lane() % 8;
                load_transposed(weights, slopes + own_key * apart + query - begin + lane() / 8 % 2 * 8);
                add_step(dqueries, weights, keys, key);
            }
            keep(queries, query, dqueries, {scale, scale}); // nobody reads these any more
            put<D, 16, 1, Left>(g, query, LookedUp{g}, {queries}, {dqkv}, row, accumulate);
        }
        if (end < tokens) __syncthreads();
    }
    // The last products with these maps came before the last barrier.
#pragma unroll
    for (int tile = 0; tile < OWN_TILES; tile++) {
        keep(upstream, first + tile * second, dkeys[tile], {scale, scale});
        keep(values, first + tile * second, dvalues[tile], {1, 1});
    }
    put<D, OWN_TOKENS, 2, Right>(g, first, LookedUp{g}, {upstream, values}, {dqkv + qk_dim, dqkv + 2 * qk_dim}, row, accumulate);
}
