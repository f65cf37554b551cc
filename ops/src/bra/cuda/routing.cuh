// Routing: the regions' means, which regions each one matches best, and for the backward pass who chose whom.

#include "geometry.cuh"
#include "words.cuh"

// The most tokens that are added up in one chain, whose rounding errors grow with its length.
constexpr int CHAIN = 256;

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
        for (int begin = share; begin < end; begin += CHAIN * shares) {
            W part[N] = {};
            for (int token = begin; token < min(end, begin + CHAIN * shares); token += shares) {
                if (!valid.has(g, token)) continue;
                Pack<T> loaded = load_pack(qkv + i64(g.pixel(region, token)) * g.row() + channel, channels - channel);
#pragma unroll
                for (int j = 0; j < N; j++) part[j] += widen(loaded.at[j]);
            }
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += part[j];
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

// The same for a whole image per block, for pixels of whole packs, to packs (2D / their size, `column`) of means: those
// of all regions lie side by side. A thread sums one of `packs` packs of channels over a region's valid tokens, and
// loads BATCH of them at once.
template <typename T>
__device__ __forceinline__ void means_of_image(const T* qkv, Pack<wide<T>>* means, int column, const Divisor& packs,
                                               int valid_height, int valid_width, const Geometry& g) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size, M = Pack<W>::size, BATCH = 4;
    for (int item = threadIdx.x; item < g.regions() * packs; item += blockDim.x) {
        const int region = item / packs, channel = item % packs * N;
        const Valid valid(g, region, valid_height, valid_width);
        const int count = valid.across * valid.down;
        const W inverse = W(1) / count;
        const T* from = qkv + i64(g.pixel(region, 0)) * g.row() + channel;
        int across = 0;
        W sum[N] = {};
        for (int begin = 0; begin < count; begin += CHAIN) {
            W part[N] = {};
            for (int first = begin; first < min(count, begin + CHAIN); first += BATCH) {
                Pack<u32> batch[BATCH] = {};
#pragma unroll
                for (int b = 0; b < BATCH; b++) {
                    if (first + b < count) batch[b] = *reinterpret_cast<const Pack<u32>*>(from);
                    const bool ends = ++across == valid.across;
                    from += ends ? i64(g.width() - valid.across + 1) * g.row() : i64(g.row());
                    across = ends ? 0 : across;
                }
#pragma unroll
                for (int b = 0; b < BATCH; b++)
#pragma unroll
                    for (int j = 0; j < N; j++) part[j] += element<T>(batch[b], j);
            }
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += part[j];
        }
#pragma unroll
        for (int j = 0; j < N; j += M) {
            Pack<W> mean;
#pragma unroll
            for (int i = 0; i < M; i++) mean.at[i] = sum[j + i] * inverse;
            means[(channel + j) / M * column + region] = mean;
        }
    }
}

// The number of elements, filled up to whole packs.
template <typename W>
__device__ __forceinline__ int in_packs(int count) {
    return (count + Pack<W>::size - 1) / Pack<W>::size * Pack<W>::size;
}

constexpr int RANKED = 2; // candidates that a lane ranks at once: `first`, and 32 further on

// The ranks of a lane's candidates: how many affinities come before each. They are summed without branches or long
// dependency chains, as floats, because a comparison gives 0 or 1 as a float in one instruction. Unless TIES, they are
// wrong for NaN and for ties. The affinities are filled up to whole packs with −∞, which comes before none. What is no
// candidate ranks last.
template <bool TIES, typename W>
__device__ __forceinline__ void rank(const W* affinities, int regions, int first, W (&mine)[RANKED], int (&ranks)[RANKED]) {
    constexpr int N = Pack<W>::size;
    float before[RANKED] = {};
#pragma unroll
    for (int i = 0; i < RANKED; i++) mine[i] = affinities[min(first + 32 * i, regions - 1)];
#pragma unroll 2
    for (int other = 0; other < regions; other += N) {
        const Pack<W> pack = *reinterpret_cast<const Pack<W>*>(affinities + other);
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int i = 0; i < RANKED; i++) {
                const bool ties = TIES && (pack.at[j] == mine[i]) & (other + j < first + 32 * i);
                before[i] += (pack.at[j] > mine[i]) | ties ? 1.0f : 0.0f;
            }
    }
#pragma unroll
    for (int i = 0; i < RANKED; i++) {
        const int own = first + 32 * i;
        ranks[i] = own < regions ? int(before[i]) : regions;
        if (TIES && own < regions && mine[i] != mine[i])
            for (int r = 0; r < regions; r++) ranks[i] += affinities[r] == affinities[r] || r < own;
    }
}

// A warp writes the k largest of a region's affinities, ties to the lower index and NaN last: which regions, and their
// affinities. Most often all affinities differ, which the sum of k − rank over the ranks below k tells: it is least if
// there is one of each.
template <typename T>
__device__ __forceinline__ void keep_largest(const wide<T>* affinities, int regions, int topk, u32* routes, T* chosen) {
    wide<T> mine[RANKED];
    int ranks[RANKED];
    auto write = [&](int first) {
#pragma unroll
        for (int i = 0; i < RANKED; i++)
            if (ranks[i] < topk) routes[ranks[i]] = first + 32 * i, chosen[ranks[i]] = narrow<T>(mine[i]);
    };
    if (regions <= 32 * RANKED) {
        rank<false>(affinities, regions, lane(), mine, ranks);
        int sum = 0;
#pragma unroll
        for (int i = 0; i < RANKED; i++) sum += max(topk - ranks[i], 0);
        if (warp_sum(sum) == topk * (topk + 1) / 2) return write(lane());
    }
#pragma unroll 1
    for (int first = lane(); first < regions; first += 32 * RANKED) {
        rank<true>(affinities, regions, first, mine, ranks);
        write(first);
    }
}

// Adds a query's products with two keys.
template <typename W, int N>
__device__ __forceinline__ void add_products(const Pack<W, N>& query, const Pack<W, N> (&keys)[2], W (&sums)[2]) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) sums[half] += query.at[j] * keys[half].at[j];
}

constexpr int OWN = 4;      // regions per warp when choosing
constexpr int OTHERS = 64;  // candidate regions in shared memory: two per lane
constexpr int CHUNK = 8;    // packs of channels of each, in shared memory

// routes and the affinities of those that are chosen, both (N, P, k), from means: the k largest of s·q̂·k̂ for each
// region. A block of at most WARPS warps handles OWN regions per warp, which keeps the P affinities of each in shared
// memory.
template <typename T>
__global__ void choose_regions(const wide<T>* means, wide<T> scale, u32* routes, T* chosen, int regions, int qk_dim,
                               int topk) {
    typedef wide<T> W;
    constexpr int N = Pack<W>::size, WARPS = 8;
    __shared__ Pack<W> queries[WARPS * OWN][CHUNK], keys[OTHERS][CHUNK + 1]; // one more, for lanes that read a column
    DYNAMIC_SHARED(W, affinities);
    const int own = blockDim.x / 32 * OWN, first = blockIdx.x * own, stride = in_packs<W>(regions);
    const i64 image = blockIdx.y;
    W* affinity = affinities + warp() * OWN * stride;
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
                for (int i = 0; i < OWN; i++) add_products(queries[warp() * OWN + i][pack], key, sums[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int r = other + half * 32 + lane();
                if (r < stride) affinity[i * stride + r] = r < regions ? sums[i][half] * scale : -W(INFINITY);
            }
    }
    __syncwarp();
    for (int i = 0; i < OWN; i++) {
        const int region = first + warp() * OWN + i;
        if (region >= regions) break;
        const i64 to = (image * regions + region) * topk;
        keep_largest(affinity + i * stride, regions, topk, routes + to, chosen + to);
    }
}

// Means and routes in one kernel: one block per image, which keeps the means in shared memory. For the affinities a
// warp takes ROWS regions, with up to 64 others, and one of SHARES parts of the channels: 28 warps divide 7x7 regions
// evenly.
constexpr int ROUTING_WARPS = 28, ROWS = 7, SHARES = 4;
template <typename T>
__global__ void __launch_bounds__(32 * ROUTING_WARPS, 1)
    route(const T* qkv, int valid_height, int valid_width, wide<T> scale, u32* routes, T* chosen, u32 loaded_magic,
          GEOMETRY) {
    const Geometry g = THE_GEOMETRY;
    typedef wide<T> W;
    constexpr int N = Pack<W>::size;
    DYNAMIC_SHARED(W, affinities); // (SHARES, P, P), and the means
    const int regions = g.regions(), packs = g.qk_dim() / N;
    const int stride = in_packs<W>(regions), of_share = regions * stride;
    // Whole tiles of ROWS, so that a warp reads its regions' packs without regard to where they end, and an odd number
    // of packs, so that those of several channels lie in different banks.
    const int column = (regions + ROWS - 1) / ROWS * ROWS | 1;
    Pack<W>* means = reinterpret_cast<Pack<W>*>(affinities + SHARES * of_share);
    const i64 image = blockIdx.x;
    const Divisor loaded(2 * g.qk_dim() / Pack<T>::size, loaded_magic);
    means_of_image(qkv + image * g.tokens() * g.row(), means, column, loaded, valid_height, valid_width, g);
    for (int pack = threadIdx.x; pack < packs; pack += blockDim.x)
        for (int none = regions; none < column; none++) means[pack * column + none] = {};
    __syncthreads();
    for (int task = warp(); task < (regions + ROWS - 1) / ROWS * SHARES; task += ROUTING_WARPS) {
        const int share = task % SHARES, first = task / SHARES * ROWS;
        const int begin = packs * share / SHARES, end = packs * (share + 1) / SHARES;
        const Pack<W>*queries = means + begin * column + first, *keys = means + (packs + begin) * column;
        const int own[2] = {min(int(lane()), regions - 1), min(int(lane()) + 32, regions - 1)};
        W sums[ROWS][2] = {};
#pragma unroll 1 // otherwise registers do not suffice
        for (int pack = begin; pack < end; pack++, queries += column, keys += column) {
            const Pack<W> key[2] = {keys[own[0]], keys[own[1]]};
#pragma unroll
            for (int i = 0; i < ROWS; i++) add_products(queries[i], key, sums[i]);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = first + i, other = half * 32 + lane();
                if (row < regions && other < regions) affinities[share * of_share + row * stride + other] = sums[i][half];
            }
    }
    __syncthreads();
    for (int region = warp(); region < regions; region += ROUTING_WARPS) {
        W* affinity = affinities + region * stride;
#pragma unroll 2
        for (int r = lane(); r < stride; r += 32) {
            W sum = 0;
            if (r < regions)
#pragma unroll
                for (int share = 0; share < SHARES; share++) sum += affinity[share * of_share + r];
            affinity[r] = r < regions ? sum * scale : -W(INFINITY);
        }
        __syncwarp();
        const i64 to = (image * regions + region) * topk;
        keep_largest(affinity, regions, topk, routes + to, chosen + to);
    }
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
