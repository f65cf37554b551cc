// Routing: the regions' means, which regions each one matches best, and for the backward pass who chose whom.

#include "geometry.cuh"

// How many of a region's rows and columns of tokens are valid.
struct Valid {
    int down, across;

    __device__ __forceinline__ Valid(const Geometry& g, int region, int height, int width)
        : down(min(g.region_height, height - g.top(region))), across(min(int(g.region_width), width - g.left(region))) {}

    __device__ __forceinline__ bool has(const Geometry& g, int token) const {
        return token / g.region_width < down && token % g.region_width < across;
    }
};

// means (N, P, 2D) of each region's queries and keys over its valid tokens. One block per region and one thread per
// pack of channels; if there are enough threads, several share the tokens of a pack.
template <typename T>
__global__ void region_means(const T* qkv, wide<T>* means, int valid_height, int valid_width, GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    __shared__ W sums[256 * N];
    const int region = blockIdx.x, channels = 2 * g.qk_dim();
    const i64 image = blockIdx.y;
    const Valid valid(g, region, valid_height, valid_width);
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
            if (!valid.has(g, token)) continue;
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
            means[first + c] = total / (valid.across * valid.down);
        }
        __syncthreads();
    }
}

// The same for a whole image per block, for pixels of whole packs. A thread sums one pack of channels over a region,
// and loads BATCH tokens at once.
template <typename T>
__device__ __forceinline__ void means_of_image(const T* qkv, wide<T>* means, int valid_height, int valid_width,
                                               const Geometry& g) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size, M = Pack<W>::size, BATCH = 8;
    const int channels = 2 * g.qk_dim(), packs = channels / N;
    for (int item = threadIdx.x; item < g.regions() * packs; item += blockDim.x) {
        const int region = item / packs, channel = (item - region * packs) * N;
        const Valid valid(g, region, valid_height, valid_width);
        W sum[N] = {};
        for (int first = 0; first < g.region_tokens; first += BATCH) {
            Pack<T> batch[BATCH] = {};
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                const T* from = qkv + i64(g.pixel(region, first + b)) * g.row() + channel;
                if (valid.has(g, first + b)) batch[b] = *reinterpret_cast<const Pack<T>*>(from);
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++)
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] += widen(batch[b].at[j]);
        }
        const W count = valid.across * valid.down;
#pragma unroll
        for (int j = 0; j < N; j += M) {
            Pack<W> mean;
#pragma unroll
            for (int i = 0; i < M; i++) mean.at[i] = sum[j + i] / count;
            store_pack(means + region * channels + channel + j, mean, M);
        }
    }
}

constexpr int OWN = 4;      // regions per warp when choosing
constexpr int OTHERS = 64;  // candidate regions in shared memory: two per lane
constexpr int CHUNK = 8;    // packs of channels of each, in shared memory

// Routes and logits (N, P, k) of one image, for the regions from `first` on that a block of at most WARPS warps
// handles: the k largest of s·q̂·k̂ for each region, ties to the lower index. A warp keeps the P affinities of each of
// its regions in shared memory.
template <int WARPS, typename T>
__device__ __forceinline__ void choose(const wide<T>* means, wide<T> scale, u32* routes, T* logits, int regions,
                                       int qk_dim, int topk, i64 image, int first) {
    typedef wide<T> W;
    constexpr int N = Pack<W>::size;
    __shared__ Pack<W> queries[WARPS * OWN][CHUNK], keys[OTHERS][CHUNK + 1]; // one more, for lanes that read a column
    DYNAMIC_SHARED(W, affinities);
    const int own = blockDim.x / 32 * OWN;
    W* affinity = affinities + warp() * OWN * regions;
    means += image * regions * 2 * qk_dim;
    for (int other = 0; other < regions; other += OTHERS) {
        W sums[OWN][2] = {};
        for (int channel = 0; channel < qk_dim; channel += CHUNK * N) {
            // Past the last region, the last one is repeated; past the last channel, there are zeros.
            auto load = [&](int region, int pack, int part) {
                const W* from = means + (i64(min(region, regions - 1)) * 2 + part) * qk_dim + channel + pack * N;
                return load_pack(from, qk_dim - channel - pack * N);
            };
            __syncthreads();
            for (int i = threadIdx.x; i < own * CHUNK; i += blockDim.x)
                queries[i / CHUNK][i % CHUNK] = load(first + i / CHUNK, i % CHUNK, 0);
            for (int i = threadIdx.x; i < OTHERS * CHUNK; i += blockDim.x)
                keys[i / CHUNK][i % CHUNK] = load(other + i / CHUNK, i % CHUNK, 1);
            __syncthreads();
            if (first + warp() * OWN >= regions) continue; // a warp without regions
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
    // A region's rank is the number of regions that come before it, summed without branches or long dependency chains.
    // NaN comes last.
    for (int i = 0; i < OWN; i++, affinity += regions) {
        int row = first + warp() * OWN + i;
        if (row >= regions) break;
        i64 to = (image * regions + row) * topk;
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

// routes and logits (N, P, k) from means. A block handles OWN regions per warp.
template <typename T>
__global__ void choose_regions(const wide<T>* means, wide<T> scale, u32* routes, T* logits, int regions, int qk_dim,
                               int topk) {
    choose<8>(means, scale, routes, logits, regions, qk_dim, topk, blockIdx.y, blockIdx.x * (blockDim.x / 32 * OWN));
}

// Means and routes in one kernel: one block per image, which has at most OWN regions per warp. 25 warps share the packs
// of 7x7 regions with 64, 128 or 256 channels evenly.
constexpr int ROUTING_WARPS = 25;
template <typename T>
__global__ void __launch_bounds__(32 * ROUTING_WARPS, 1)
    route(const T* qkv, wide<T>* means, int valid_height, int valid_width, wide<T> scale, u32* routes, T* logits,
          GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    const i64 image = blockIdx.x;
    const int regions = g.regions(), qk_dim = g.qk_dim();
    means_of_image(qkv + image * g.tokens() * g.row(), means + image * regions * 2 * qk_dim, valid_height, valid_width, g);
    __syncthreads();
    choose<ROUTING_WARPS>(means, scale, routes, logits, regions, qk_dim, topk, image, 0);
}

// For each region the regions that are routed to it, in order: those of region r are entries[starts[r]..starts[r + 1]],
// of starts (N, P + 1) and entries (N, P·k). One warp per region, and one for the end of the last list.
__global__ void invert_routes(const u32* __restrict__ routes, u32* __restrict__ starts, u32* __restrict__ entries,
                              int regions, int topk, u32 topk_magic) {
    const Divisor chosen(topk, topk_magic);
    const u32 region = warp_number();
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
