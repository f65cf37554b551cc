// Routing: the regions' means, which regions each one matches best, and for the backward pass who chose whom.

#include "geometry.cuh"
#include "sums.cuh"

// The block's region of means (N, P, 2D): of its queries and keys over its valid tokens. A thread is a pack of channels, and
// where there are threads enough, several share out the tokens.
template <typename T>
__device__ __forceinline__ void find_means(const T* qkv, wide<T>* means, int valid_height, int valid_width,
                                           const Geometry& g) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    __shared__ W sums[256 * N];
    const int region = blockIdx.x, channels = 2 * g.qk_dim();
    const i64 image = blockIdx.y;
    const int down = min(g.region_height, valid_height - g.top(region));
    const int across = min(int(g.region_width), valid_width - g.left(region));
    qkv += image * g.tokens() * g.row();
    means += (image * g.regions() + region) * channels;
    const int packs = min((channels + N - 1) / N, 256), shares = 256 / packs;
    const int share = int(threadIdx.x) / packs, pack = int(threadIdx.x) % packs;
    for (int first = 0; first < channels; first += packs * N) {
        const int channel = first + pack * N;
        W sum[N];
#pragma unroll
        for (int j = 0; j < N; j++) sum[j] = 0;
        const int end = share < shares && channel < channels ? int(g.region_tokens) : 0;
        for (int token = share; token < end; token += shares) {
            if (token / g.region_width >= down || token % g.region_width >= across) continue;
            Pack<T> loaded = load_pack(qkv + i64(g.pixel(region, token)) * g.row() + channel, channels - channel);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += widen(loaded.at[j]);
        }
#pragma unroll
        for (int j = 0; j < N; j++) sums[threadIdx.x * N + j] = sum[j];
        __syncthreads();
        for (int c = threadIdx.x; c < packs * N && first + c < channels; c += 256) {
            W total = 0;
            for (int i = 0; i < shares; i++) total += sums[i * packs * N + c];
            means[first + c] = total / (across * down);
        }
        __syncthreads();
    }
}

constexpr int OWN = 4;      // regions of a warp that chooses
constexpr int OTHERS = 64;  // regions to choose from in shared memory: two to a lane
constexpr int CHUNK = 8;    // packs of their channels there

// Of the image of blockIdx.y, and of the regions from `first` on that a block's warps have, rows of routes and logits
// (N, P, k): the k largest of s·q̂·k̂ for each region, ties to the lower index. A warp keeps the P affinities of its regions in
// shared memory. FRESH means were written by other blocks of this launch; their channels are whole packs.
template <bool FRESH, typename T>
__device__ __forceinline__ void choose(const wide<T>* means, wide<T> scale, u32* routes, T* logits, int regions,
                                       int qk_dim, int topk, int first) {
    typedef wide<T> W;
    constexpr int N = Pack<W>::size;
    __shared__ Pack<W> queries[8 * OWN][CHUNK], keys[OTHERS][CHUNK + 1]; // one more, for lanes that read a column
    DYNAMIC_SHARED(W, affinities);
    const int own = blockDim.x / 32 * OWN;
    W* affinity = affinities + warp() * OWN * regions;
    means += i64(blockIdx.y) * regions * 2 * qk_dim;
    for (int other = 0; other < regions; other += OTHERS) {
        W sums[OWN][2] = {};
        for (int channel = 0; channel < qk_dim; channel += CHUNK * N) {
            // Behind the last region comes the last again, and behind the last channel zeros.
            auto load = [&](int region, int pack, int part) {
                const W* from = means + (i64(min(region, regions - 1)) * 2 + part) * qk_dim + channel + pack * N;
                const int left = qk_dim - channel - pack * N;
                return FRESH && left > 0 ? load_fresh(from) : load_pack(from, FRESH ? 0 : left);
            };
            __syncthreads();
            for (int i = threadIdx.x; i < own * CHUNK; i += blockDim.x)
                queries[i / CHUNK][i % CHUNK] = load(first + i / CHUNK, i % CHUNK, 0);
            for (int i = threadIdx.x; i < OTHERS * CHUNK; i += blockDim.x)
                keys[i / CHUNK][i % CHUNK] = load(other + i / CHUNK, i % CHUNK, 1);
            __syncthreads();
#pragma unroll
            for (int pack = 0; pack < CHUNK; pack++) {
                const Pack<W> key[2] = {keys[lane()][pack], keys[lane() + 32][pack]};
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    const Pack<W> query = queries[warp() * OWN + i][pack];
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        sums[i][0] += query.at[j] * key[0].at[j];
                        sums[i][1] += query.at[j] * key[1].at[j];
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int r = other + half * 32 + lane();
                if (r < regions) affinity[i * regions + r] = sums[i][half] * scale;
            }
    }
    __syncwarp();
    // A region's rank is how many come before it: sums without branches, that wait for nothing. NaN comes last.
    for (int i = 0; i < OWN; i++, affinity += regions) {
        int row = first + warp() * OWN + i;
        if (row >= regions) break;
        i64 to = (i64(blockIdx.y) * regions + row) * topk;
        for (int r = lane(); r < regions; r += 32) {
            const W mine = affinity[r];
            int rank = 0;
            for (int s = 0; s < regions; s++) rank += (affinity[s] > mine) | ((affinity[s] == mine) & (s < r));
            if (mine != mine)
                for (int s = 0; s < regions; s++) rank += affinity[s] == affinity[s] || s < r;
            if (rank < topk) routes[to + rank] = r, logits[to + rank] = narrow<T>(mine);
        }
    }
}

// means (N, P, 2D). A block is a region.
template <typename T>
__global__ void region_means(const T* qkv, wide<T>* means, int valid_height, int valid_width, GEOMETRY) {
    find_means(qkv, means, valid_height, valid_width, THE_GEOMETRY);
}

// routes and logits (N, P, k) from means. A block has as many regions as its warps.
template <typename T>
__global__ void choose_regions(const wide<T>* means, wide<T> scale, u32* routes, T* logits, int regions, int qk_dim,
                               int topk) {
    choose<false>(means, scale, routes, logits, regions, qk_dim, topk, blockIdx.x * (blockDim.x / 32 * OWN));
}

// Both at once, for few regions: a block is a region, and the last one of an image chooses for all of them.
template <typename T>
__global__ void route(const T* qkv, wide<T>* means, int valid_height, int valid_width, wide<T> scale, u32* routes,
                      T* logits, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    find_means(qkv, means, valid_height, valid_width, g);
    if (!last_block(blockIdx.y, g.regions())) return;
    for (int first = 0; first < g.regions(); first += blockDim.x / 32 * OWN)
        choose<true>(means, scale, routes, logits, g.regions(), g.qk_dim(), topk, first);
}

// For each region the regions that are routed to it, in order: those of region r are entries[starts[r]..starts[r + 1]],
// of starts (N, P + 1) and entries (N, P·k). A warp is a region, or the end.
__global__ void invert_routes(const u32* __restrict__ routes, u32* __restrict__ starts, u32* __restrict__ entries,
                              int regions, int topk, u32 topk_magic) {
    const Divisor chosen(topk, topk_magic);
    const u32 region = blockIdx.x * (blockDim.x / 32) + warp();
    if (region > regions) return;
    const i64 image = blockIdx.y;
    const int routed = regions * topk;
    routes += image * routed, entries += image * routed, starts += image * (regions + 1);
    u32 place = 0;
    for (int i = lane(); i < routed; i += 32) place += routes[i] < region;
    place = warp_sum(place);
    if (lane() == 0) starts[region] = place;
    for (int first = 0; first < routed; first += 32) {
        const int i = first + lane();
        const bool here = i < routed && routes[i] == region;
        const u32 found = __ballot_sync(~0u, here);
        if (here) entries[place + __popc(found & ((1u << lane()) - 1))] = i / chosen;
        place += __popc(found);
    }
}
