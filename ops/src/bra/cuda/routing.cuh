// Routing: the regions' means, which regions each one matches best, and for the backward pass who chose whom.

#include "geometry.cuh"

// means (N, P, 2D) of each region's queries and keys over its valid tokens. A block is a region, a lane a pack of
// channels, and each of the warps takes its share of the tokens.
template <typename T>
__global__ void region_means(const T* qkv, wide<T>* means, int valid_height, int valid_width, GEOMETRY) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    const Geometry g = THE_GEOMETRY;
    __shared__ W sums[8][32 * N];
    int region = blockIdx.x, channels = 2 * qk_dim;
    i64 image = blockIdx.y;
    int top = region / cols * g.region_height(), left = region % cols * g.region_width();
    int across = min(left + g.region_width(), valid_width) - left, down = min(top + g.region_height(), valid_height) - top;
    qkv += image * g.tokens() * g.row();
    means += (image * g.regions() + region) * channels;
    for (int first = 0; first < channels; first += 32 * N) {
        int channel = first + lane() * N;
        W sum[N];
#pragma unroll
        for (int j = 0; j < N; j++) sum[j] = 0;
        if (channel < channels) {
            for (int token = warp(); token < across * down; token += 8) {
                i64 pixel = i64(top + token / across) * width + left + token % across;
                Pack<T> pack = load_pack(qkv + pixel * g.row() + channel, channels - channel);
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] += widen(pack.at[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < N; j++) sums[warp()][lane() * N + j] = sum[j];
        __syncthreads();
        for (int c = threadIdx.x; c < 32 * N && first + c < channels; c += blockDim.x) {
            W total = 0;
            for (int i = 0; i < 8; i++) total += sums[i][c];
            means[first + c] = total / (across * down);
        }
        __syncthreads();
    }
}

// routes and logits (N, P, k): the k largest of s·q̂·k̂ for each region, ties to the lower index. A warp is a region, and
// keeps its P affinities in shared memory.
template <typename T>
__global__ void choose_regions(const wide<T>* means, wide<T> scale, u32* routes, T* logits, int images, int regions,
                               int qk_dim, int topk) {
    typedef wide<T> W;
    DYNAMIC_SHARED(W, shared);
    i64 row = i64(blockIdx.x) * (blockDim.x / 32) + warp(); // of all images' regions
    if (row >= i64(images) * regions) return;
    W* affinity = shared + warp() * regions;
    const W* query = means + row * 2 * qk_dim;
    const W* keys = means + row / regions * regions * 2 * qk_dim + qk_dim;
    for (int r = 0; r < regions; r++) {
        W sum = 0;
        for (int c = lane(); c < qk_dim; c += 32) sum += query[c] * keys[i64(r) * 2 * qk_dim + c];
        sum = warp_sum(sum);
        if (lane() == 0) affinity[r] = sum * scale;
    }
    __syncwarp();
    // What was chosen becomes NaN, which nothing is less than; so does what was NaN before, and comes last.
    for (int i = 0; i < topk; i++) {
        W best = -INFINITY;
        int at = regions;
        for (int r = lane(); r < regions; r += 32) {
            if (affinity[r] > best || (at == regions && affinity[r] == best)) best = affinity[r], at = r;
        }
        for (int step = 16; step > 0; step /= 2) {
            W other = __shfl_xor_sync(~0u, best, step);
            int other_at = __shfl_xor_sync(~0u, at, step);
            if (other > best || (other == best && other_at < at)) best = other, at = other_at;
        }
        if (at == regions) at = i; // only NaN is left: any region will do
        if (lane() == 0) {
            routes[row * topk + i] = at;
            logits[row * topk + i] = narrow<T>(affinity[at]);
            affinity[at] = NAN;
        }
        __syncwarp();
    }
}

// For each region the regions that are routed to it, in order: those of region r are entries[starts[r]..starts[r + 1]],
// of starts (N, P + 1) and entries (N, P·k). A block is an image.
__global__ void invert_routes(const u32* routes, u32* starts, u32* entries, int regions, int topk) {
    i64 image = blockIdx.x;
    int routed = regions * topk;
    routes += image * routed, entries += image * routed, starts += image * (regions + 1);
    for (int r = threadIdx.x; r < regions; r += blockDim.x) {
        u32 count = 0;
        for (int i = 0; i < routed; i++) count += routes[i] == r;
        starts[r + 1] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 sum = starts[0] = 0;
        for (int r = 1; r <= regions; r++) starts[r] = sum += starts[r];
    }
    __syncthreads();
    for (int r = threadIdx.x; r < regions; r += blockDim.x) {
        u32 place = starts[r];
        for (int i = 0; i < routed; i++)
            if (routes[i] == r) entries[place++] = i / topk;
    }
}
