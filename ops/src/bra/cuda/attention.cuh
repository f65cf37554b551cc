// Attention of each region's queries to the keys of its routed regions, which are read in place: for any type and any
// head size, without tensor cores.
//
// A block takes a tile of a region's queries and iterates over their keys tile by tile (online softmax, with a running
// maximum); in the last kernel it takes a tile of keys and iterates over queries. A is not stored: the backward pass
// recomputes it from the log-sum-exp. Every gradient has a single owner, which accumulates it in a fixed order.

#include "geometry.cuh"

constexpr int QUERIES = 16; // of a tile
constexpr int KEYS = 32;    // of a tile: one to a lane

// A tile of tokens in shared memory: rows of `dim` channels, `stride` apart; zeros where there is no token.
// `pixel(i)` is where the i-th token lies.
template <typename T, typename Pixel>
__device__ __forceinline__ void load_tile(wide<T>* tile, int stride, int size, const T* map, int row, int dim, int count,
                                          Pixel pixel) {
    for (int i = threadIdx.x; i < size * dim; i += blockDim.x) {
        int token = i / dim, channel = i % dim;
        tile[token * stride + channel] = token < count ? widen(map[i64(pixel(token)) * row + channel]) : wide<T>(0);
    }
}

// The product of two rows.
template <typename W>
__device__ __forceinline__ W dot(const W* a, const W* b, int dim) {
    W sum = 0;
    for (int i = 0; i < dim; i++) sum += a[i] * b[i];
    return sum;
}

// What a block works on: blockIdx.x counts regions and tiles of `size` tokens, the tiles fastest; y and z are head and
// image.
struct Work {
    i64 image;
    int head, region, first, count;

    __device__ __forceinline__ Work(const Geometry& g, int size) {
        u32 tiles = (g.region_tokens + size - 1) / size;
        image = blockIdx.z, head = blockIdx.y, region = blockIdx.x / tiles, first = blockIdx.x % tiles * size;
        count = min(size, g.region_tokens - first);
    }
};

// out (N, H, W, C), and lse (N, heads, H·W): the log-sum-exp of each query's scores.
template <typename T>
__global__ void attend(const T* qkv, const u32* routes, wide<T> scale, T* out, wide<T>* lse, GEOMETRY) {
    typedef wide<T> W;
    const Geometry g = THE_GEOMETRY;
    const Work work(g, QUERIES);
    const int d = head_dim, dv = value_dim, row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim();
    const Divisor tokens = g.region_tokens;
    DYNAMIC_SHARED(W, q);             // (QUERIES, d)
    W* k = q + QUERIES * d;           // (KEYS, d + 1): lanes read a column
    W* v = k + KEYS * (d + 1);        // (KEYS, dv)
    W* weights = v + KEYS * dv;       // (QUERIES, KEYS)
    W* o = weights + QUERIES * KEYS;  // (QUERIES, dv)
    W* most = o + QUERIES * dv;       // per query: the largest score so far
    W* sum = most + QUERIES;          // the sum of exp(score − largest)
    W* shrink = sum + QUERIES;        // exp(old largest − new largest), the factor on earlier sums
    qkv += work.image * g.tokens() * row;
    routes += (work.image * g.regions() + work.region) * topk;
    auto query = [&](int i) { return g.pixel(work.region, work.first + i); };
    load_tile(q, d, QUERIES, qkv + work.head * d, row, d, work.count, query);
    for (int i = threadIdx.x; i < QUERIES * dv; i += blockDim.x) o[i] = 0;
    if (threadIdx.x < QUERIES) most[threadIdx.x] = -INFINITY, sum[threadIdx.x] = 0;

    for (int first = 0; first < g.keys(); first += KEYS) {
        int count = min(KEYS, g.keys() - first);
        auto key = [&](int i) { return g.pixel(routes[(first + i) / tokens], (first + i) % tokens); };
        load_tile(k, d + 1, KEYS, qkv + qk_dim + work.head * d, row, d, count, key);
        load_tile(v, dv, KEYS, qkv + 2 * qk_dim + work.head * dv, row, dv, count, key);
        __syncthreads();
        for (int i = warp(); i < QUERIES; i += blockDim.x / 32) {
            W score = lane() < count ? scale * dot(q + i * d, k + lane() * (d + 1), d) : W(-INFINITY);
            W before = most[i], now = warp_max(score);
            now = before > now ? before : now;
            W weight = exp(score - now), total = warp_sum(weight);
            weights[i * KEYS + lane()] = weight;
            __syncwarp();
            if (lane() == 0) {
                shrink[i] = exp(before - now);
                sum[i] = sum[i] * shrink[i] + total;
                most[i] = now;
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < QUERIES * dv; i += blockDim.x) {
            W value = o[i] * shrink[i / dv];
            for (int j = 0; j < KEYS; j++) value += weights[i / dv * KEYS + j] * v[j * dv + i % dv];
            o[i] = value;
        }
        __syncthreads();
    }

    out += work.image * g.tokens() * v_dim + work.head * dv;
    for (int i = threadIdx.x; i < work.count * dv; i += blockDim.x)
        out[i64(query(i / dv)) * v_dim + i % dv] = narrow<T>(o[i] / sum[i / dv]);
    lse += (work.image * heads + work.head) * g.tokens();
    if (threadIdx.x < work.count) lse[query(threadIdx.x)] = most[threadIdx.x] + log(sum[threadIdx.x]);
}

// The queries' part of dqkv, and delta, shaped like lse: Σⱼ Aⱼ·dAⱼ of each query. With dA = dO·vᵀ, dS = A∘(dA − delta)
// and dQ = s·dS·k; the first pass over the keys finds delta, the second dQ.
template <typename T>
__global__ void attend_backward_queries(const T* qkv, const u32* routes, wide<T> scale, const wide<T>* lse, const T* dout,
                                        T* dqkv, int accumulate, wide<T>* delta, GEOMETRY) {
    typedef wide<T> W;
    const Geometry g = THE_GEOMETRY;
    const Work work(g, QUERIES);
    const int d = head_dim, dv = value_dim, row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim();
    const Divisor tokens = g.region_tokens;
    DYNAMIC_SHARED(W, q);          // (QUERIES, d)
    W* dq = q + QUERIES * d;       // (QUERIES, d)
    W* upstream = dq + QUERIES * d; // (QUERIES, dv)
    W* k = upstream + QUERIES * dv; // (KEYS, d + 1)
    W* v = k + KEYS * (d + 1);     // (KEYS, dv + 1)
    W* ds = v + KEYS * (dv + 1);   // (QUERIES, KEYS)
    W* deltas = ds + QUERIES * KEYS;
    W* denominator = deltas + QUERIES;
    qkv += work.image * g.tokens() * row, dqkv += work.image * g.tokens() * row;
    routes += (work.image * g.regions() + work.region) * topk;
    dout += work.image * g.tokens() * v_dim + work.head * dv;
    lse += (work.image * heads + work.head) * g.tokens(), delta += (work.image * heads + work.head) * g.tokens();
    auto query = [&](int i) { return g.pixel(work.region, work.first + i); };
    load_tile(q, d, QUERIES, qkv + work.head * d, row, d, work.count, query);
    load_tile(upstream, dv, QUERIES, dout, v_dim, dv, work.count, query);
    for (int i = threadIdx.x; i < QUERIES * d; i += blockDim.x) dq[i] = 0;
    if (threadIdx.x < QUERIES) {
        deltas[threadIdx.x] = 0;
        denominator[threadIdx.x] = threadIdx.x < work.count ? lse[query(threadIdx.x)] : W(0);
    }

    for (int pass = 0; pass < 2; pass++) {
        for (int first = 0; first < g.keys(); first += KEYS) {
            int count = min(KEYS, g.keys() - first);
            auto key = [&](int i) { return g.pixel(routes[(first + i) / tokens], (first + i) % tokens); };
            load_tile(k, d + 1, KEYS, qkv + qk_dim + work.head * d, row, d, count, key);
            load_tile(v, dv + 1, KEYS, qkv + 2 * qk_dim + work.head * dv, row, dv, count, key);
            __syncthreads();
            for (int i = warp(); i < QUERIES; i += blockDim.x / 32) {
                W score = scale * dot(q + i * d, k + lane() * (d + 1), d);
                W weight = lane() < count ? exp(score - denominator[i]) : W(0);
                W da = dot(upstream + i * dv, v + lane() * (dv + 1), dv);
                if (pass == 0) {
                    W part = warp_sum(weight * da);
                    if (lane() == 0) deltas[i] += part;
                } else {
                    ds[i * KEYS + lane()] = scale * weight * (da - deltas[i]);
                }
            }
            __syncthreads();
            if (pass == 0) continue;
            for (int i = threadIdx.x; i < QUERIES * d; i += blockDim.x) {
                W value = dq[i];
                for (int j = 0; j < KEYS; j++) value += ds[i / d * KEYS + j] * k[j * (d + 1) + i % d];
                dq[i] = value;
            }
            __syncthreads();
        }
    }

    for (int i = threadIdx.x; i < work.count * d; i += blockDim.x)
        put(dqkv + i64(query(i / d)) * row + work.head * d + i % d, dq[i], accumulate);
    if (threadIdx.x < work.count) delta[query(threadIdx.x)] = deltas[threadIdx.x];
}

// The keys' and values' parts of dqkv: a tile of a region's keys collects dV = Aᵀ·dO and dK = s·dSᵀ·q from the regions
// that are routed to it, in their order. A region that nobody chose gets zeros.
template <typename T>
__global__ void attend_backward_keys(const T* qkv, const u32* starts, const u32* entries, wide<T> scale,
                                     const wide<T>* lse, const wide<T>* delta, const T* dout, T* dqkv, int accumulate,
                                     GEOMETRY) {
    typedef wide<T> W;
    const Geometry g = THE_GEOMETRY;
    const Work work(g, KEYS);
    const int d = head_dim, dv = value_dim, row = g.row(), qk_dim = g.qk_dim(), v_dim = g.v_dim();
    const Divisor tokens = g.region_tokens;
    DYNAMIC_SHARED(W, k);                 // (KEYS, d + 1)
    W* v = k + KEYS * (d + 1);            // (KEYS, dv + 1)
    W* dk = v + KEYS * (dv + 1);          // (KEYS, d)
    W* dval = dk + KEYS * d;              // (KEYS, dv)
    W* q = dval + KEYS * dv;              // (QUERIES, d)
    W* upstream = q + QUERIES * d;        // (QUERIES, dv)
    W* weights = upstream + QUERIES * dv; // (QUERIES, KEYS)
    W* ds = weights + QUERIES * KEYS;     // (QUERIES, KEYS)
    qkv += work.image * g.tokens() * row, dqkv += work.image * g.tokens() * row;
    starts += work.image * (g.regions() + 1) + work.region, entries += work.image * g.regions() * topk;
    dout += work.image * g.tokens() * v_dim + work.head * dv;
    lse += (work.image * heads + work.head) * g.tokens(), delta += (work.image * heads + work.head) * g.tokens();
    auto key = [&](int i) { return g.pixel(work.region, work.first + i); };
    load_tile(k, d + 1, KEYS, qkv + qk_dim + work.head * d, row, d, work.count, key);
    load_tile(v, dv + 1, KEYS, qkv + 2 * qk_dim + work.head * dv, row, dv, work.count, key);
    for (int i = threadIdx.x; i < KEYS * (d + dv); i += blockDim.x) dk[i] = 0;

    for (u32 entry = starts[0]; entry < starts[1]; entry++) {
        int region = entries[entry];
        for (int first = 0; first < tokens; first += QUERIES) {
            int count = min(QUERIES, tokens - first);
            auto query = [&](int i) { return g.pixel(region, first + i); };
            load_tile(q, d, QUERIES, qkv + work.head * d, row, d, count, query);
            load_tile(upstream, dv, QUERIES, dout, v_dim, dv, count, query);
            __syncthreads();
            for (int i = warp(); i < QUERIES; i += blockDim.x / 32) {
                W score = scale * dot(q + i * d, k + lane() * (d + 1), d);
                W weight = i < count ? exp(score - lse[query(i)]) : W(0);
                W da = dot(upstream + i * dv, v + lane() * (dv + 1), dv);
                weights[i * KEYS + lane()] = weight;
                ds[i * KEYS + lane()] = i < count ? scale * weight * (da - delta[query(i)]) : W(0);
            }
            __syncthreads();
            for (int i = threadIdx.x; i < KEYS * d; i += blockDim.x) {
                W value = dk[i];
                for (int j = 0; j < QUERIES; j++) value += ds[j * KEYS + i / d] * q[j * d + i % d];
                dk[i] = value;
            }
            for (int i = threadIdx.x; i < KEYS * dv; i += blockDim.x) {
                W value = dval[i];
                for (int j = 0; j < QUERIES; j++) value += weights[j * KEYS + i / dv] * upstream[j * dv + i % dv];
                dval[i] = value;
            }
            __syncthreads();
        }
    }

    __syncthreads(); // needed if no region chose this one: the loop did not run
    T* to = dqkv + qk_dim + work.head * d;
    for (int i = threadIdx.x; i < work.count * d; i += blockDim.x) put(to + i64(key(i / d)) * row + i % d, dk[i], accumulate);
    to = dqkv + 2 * qk_dim + work.head * dv;
    for (int i = threadIdx.x; i < work.count * dv; i += blockDim.x)
        put(to + i64(key(i / dv)) * row + i % dv, dval[i], accumulate);
}
