// Depthwise convolutions of maps (N, H, W, C) that may lie inside wider tensors: `stride` elements from a pixel to the
// next. P = (K − 1)/2, and pixels outside the image are zeros.
//
// A block handles a tile of the channels in a band of an image's rows, and moves along the rows. The pixels pass
// through shared memory, some columns at a time: while one chunk is used, the next one arrives. There they lie where
// constants tell, so that nearly all that remains of a step is its multiply-adds. LANES threads handle a strip of R rows
// of the band, and each of them V channels; what it needs at every column stays in registers, and a loaded element is
// multiplied by K taps for each of the rows.
//
// In bf16, where pixels consist of whole packs, tensor cores compute most of this instead: `tensor_cores.cuh`.
#include "instructions.cuh"
#include "sums.cuh"
#include "tensor_cores.cuh"

// The maximum number of warps of a block, and so of strips of a band, if each has a warp: in 14 rows, the loads of rows
// of a neighbouring band are few, and the images of most models are multiples of 7 rows high.
constexpr int WARPS = 7, THREADS = 32 * WARPS;
template <int LANES>
constexpr int STRIPS = THREADS / LANES;

// Rows per strip: the more there are, the fewer are loaded twice, but registers are limited.
template <int K>
constexpr int ROWS = K < 7 ? 2 : 1;

// Columns per chunk: a multiple of the unroll factor of the loop over them. A large kernel has no registers to spare
// for unrolling. Nothing can be computed before the first chunk has arrived, so those of many channels are short.
template <typename T, int K, int V>
constexpr int COLUMNS = (K == 3 ? 6 : K) * (sizeof(T) * V == 2 ? 2 : 1);
template <int K>
constexpr int UNROLLED = K < 7 ? K : 1;

// Blocks per multiprocessor, which limit the registers. The more blocks, the better they hide each other's waiting, but
// taps and sums of a 5x5 kernel, or of several channels, leave room for two.
template <typename T, int K, int V>
constexpr int RESIDENT = sizeof(T) > 2 || K == 7 ? 1 : K == 5 || V > 1 ? 2 : 4;

// Neighbouring channels, which one instruction loads or stores.
template <typename T, int V>
struct alignas(V * sizeof(T)) Channels {
    T values[V];

    __device__ __forceinline__ wide<T> at(int v) const { return widen(values[v]); }
    __device__ __forceinline__ void set(const wide<T> (&to)[V]) {
#pragma unroll
        for (int v = 0; v < V; v++) values[v] = narrow<T>(to[v]);
    }
};

// Of 16 bits two stay together in one register.
template <>
struct alignas(8) Channels<bf16, 4> {
    u32 words[2];

    __device__ __forceinline__ float at(int v) const { return v % 2 ? high_half(words[v / 2]) : low_half(words[v / 2]); }
    __device__ __forceinline__ void set(const float (&to)[4]) {
        words[0] = pack_bf16(to[0], to[1]), words[1] = pack_bf16(to[2], to[3]);
    }
};

// A band of a map, from row `top` on, in which there are `span` of the chunk's ROWS rows. `map` points to the tile's
// first channel in the image's first pixel, and `channels` is how many there are from it on.
template <typename T, int V, int LANES, int ROWS, int COLUMNS>
struct Band {
    static constexpr int TILE = LANES * V, SIZE = COLUMNS * ROWS * TILE;

    const T* map;
    i64 stride;
    int top, span, height, width, channels;

    // Starts to copy the columns from `column` on to `to` (COLUMNS, ROWS, TILE); what lies outside the image is zero.
    // Where a thread has several channels, they are copied in packs.
    __device__ __forceinline__ void ask_for(int column, T* to) const {
        constexpr int UNIT = V > 1 ? Pack<T>::size : 1, UNITS = TILE / UNIT;
        for (int item = threadIdx.x; item < span * UNITS; item += blockDim.x) {
            int row = top + item / UNITS, channel = item % UNITS * UNIT;
            bool exists = row >= 0 && row < height && channel < channels;
            const T* from = map + (i64(row) * width + column) * stride + channel;
            T* at = to + item / UNITS * TILE + channel;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++, from += stride, at += ROWS * TILE) {
                bool within = exists && u32(column + c) < u32(width);
                if constexpr (V > 1) copy_async(at, from, within);
                else *at = within ? *from : T{};
            }
        }
    }

    // This thread's channels of R rows of a column, from `row` on.
    template <int R>
    static __device__ __forceinline__ void take(const T* chunk, int column, int row, wide<T> (&taken)[R][V]) {
        const Channels<T, V>* at = reinterpret_cast<const Channels<T, V>*>(chunk) + (column * ROWS + row) * LANES;
#pragma unroll
        for (int r = 0; r < R; r++) {
            Channels<T, V> channels = at[r * LANES + threadIdx.x % LANES];
#pragma unroll
            for (int v = 0; v < V; v++) taken[r][v] = channels.at(v);
        }
    }
};

// Where a thread's sums go, column by column: in place of what is there, or added to it. That is loaded a column ahead.
template <typename T, int V, int R>
struct Results {
    T* next;
    i64 stride, row_stride;
    bool accumulate, exists[R];
    Channels<T, V> old[R];

    // From row `row` on. `image` points to the thread's channels in the image's first pixel, if they exist.
    __device__ __forceinline__ void start(T* image, i64 stride, int row, int height, int width, bool exists,
                                          bool accumulate) {
        next = image + i64(row) * width * stride;
        this->stride = stride, row_stride = width * stride, this->accumulate = accumulate;
#pragma unroll
        for (int r = 0; r < R; r++) this->exists[r] = exists && row + r < height;
        ask(true);
    }

    __device__ __forceinline__ void ask(bool more) {
        if (!accumulate) return;
        const T* at = next;
#pragma unroll
        for (int r = 0; r < R; r++, at += row_stride) {
            old[r] = {};
            if (exists[r] && more) old[r] = *reinterpret_cast<const Channels<T, V>*>(at);
        }
    }

    // Writes the sums of the next column, which are those at [.][0]. There may be `more` columns.
    template <int K>
    __device__ __forceinline__ void put(wide<T> (&sums)[R][K][V], bool more) {
        T* at = next;
        if (accumulate) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int v = 0; v < V; v++) sums[r][0][v] += old[r].at(v);
        }
#pragma unroll
        for (int r = 0; r < R; r++, at += row_stride) {
            Channels<T, V> out;
            out.set(sums[r][0]);
            if (exists[r]) *reinterpret_cast<Channels<T, V>*>(at) = out;
        }
        next += stride;
        ask(more);
    }
};

// Moves on by one column: to[.][s] takes the value of to[.][s + 1], the last one that of `last`.
template <int R, int K, int V, typename W>
__device__ __forceinline__ void move_on(W (&to)[R][K][V], const W (&last)[R][V]) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int s = 0; s < K; s++)
#pragma unroll
            for (int v = 0; v < V; v++) to[r][s][v] = s + 1 < K ? to[r][s + 1][v] : last[r][v];
}

// The taps of `count` channels of a weight (C, 1, K, K), from channel `first` on, `turned` by 180° or not, with one
// added to their centres for a residual; what comes after them is for threads without a channel, whose input
// is zero. A thread issues several loads before it waits for any.
template <int TAPS, int MOST, typename W>
__device__ __forceinline__ void stage(const W* weight, int first, int count, int residual, int turned,
                                      W (&staged)[MOST * TAPS]) {
    constexpr int TURNS = (MOST * TAPS + THREADS - 1) / THREADS;
    for (int begin = threadIdx.x; begin < MOST * TAPS; begin += TURNS * blockDim.x) {
        W own[TURNS];
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            int i = begin + turn * blockDim.x;
            own[turn] = i < count * TAPS ? weight[i64(first) * TAPS + i] : W(0);
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            int i = begin + turn * blockDim.x, tap = i % TAPS;
            if (i >= MOST * TAPS) continue;
            int place = turned ? i - tap + TAPS - 1 - tap : i;
            staged[place] = own[turn] + (residual && tap == TAPS / 2 ? W(1) : W(0));
        }
    }
    __syncthreads();
}

// Calls use(band, column, chunk) for the chunks of C columns of bands, in order, each with the first of its columns.
// While one is used, the next one arrives: ask_for(band, column, to) starts its copies. Those of the first one have
// been started, to `chunks`, which has room for two of `size` elements.
template <int C, typename T, typename Ask, typename Use>
__device__ __forceinline__ void walk(int band, int last, int columns, T* chunks, int size, Ask ask_for, Use use) {
    int turn = 0;
    for (; band < last; band++) {
        for (int column = 0; column < columns; column += C, turn ^= 1) {
            wait_for_copies();
            __syncthreads(); // also ends the use of the chunk before, whose place the next one takes
            T* next = chunks + (turn ^ 1) * size;
            bool more = column + C < columns;
            if (more || band + 1 < last) ask_for(more ? band : band + 1, more ? column + C : 0, next);
            use(band, column, chunks + turn * size);
        }
    }
}

// y (+)= x ∗ weight + bias: y[i, j] = Σ x[i + a − P, j + b − P]·w[a, b]; or dx from dy, with the weight turned: dx[i,
// j] = Σ dy[i − a + P, j − b + P]·w[a, b]. A piece is a range of all images' bands. Blocks are ordered by piece, then
// tile of the channels.
template <typename T, int K, int V, int LANES>
__global__ void __launch_bounds__(THREADS, (RESIDENT<T, K, V>))
    dwconv_forward(const T* __restrict__ x, i64 x_stride, const wide<T>* weight, int residual, int turned,
                   const wide<T>* bias, T* __restrict__ y, int accumulate, i64 y_stride, int all_bands, int height,
                   int width, int channels, int tiles, int bands) {
    typedef wide<T> W;
    constexpr int P = K / 2, TAPS = K * K, R = ROWS<K>, C = COLUMNS<T, K, V>;
    typedef Band<T, V, LANES, STRIPS<LANES> * R + K - 1, C> Input;
    int strips = blockDim.x / LANES, row = threadIdx.x / LANES * R, first = blockIdx.x % tiles * Input::TILE;
    int piece = blockIdx.x / tiles, pieces = gridDim.x / tiles, place = threadIdx.x % LANES * V, channel = first + place;
    int band = i64(all_bands) * piece / pieces, last = i64(all_bands) * (piece + 1) / pieces;
    bool exists = channel < channels;

    DYNAMIC_SHARED(T, chunks);
    auto ask_for = [&](int band, int column, T* to) {
        i64 pixel = i64(band / bands) * height * width;
        int top = band % bands * strips * R - P, rows = strips * R + K - 1;
        Input input = {x + pixel * x_stride + first, x_stride, top, rows, height, width, channels - first};
        input.ask_for(column, to);
    };
    ask_for(band, 0, chunks);
    __shared__ W staged[Input::TILE * TAPS];
    stage<TAPS, Input::TILE>(weight, first, min(Input::TILE, channels - first), residual, turned, staged);
    W taps[TAPS][V];
#pragma unroll
    for (int t = 0; t < TAPS; t++)
#pragma unroll
        for (int v = 0; v < V; v++) taps[t][v] = staged[(place + v) * TAPS + t];
    W start[R][V];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int v = 0; v < V; v++) start[r][v] = bias && exists ? bias[channel + v] : W(0);
    W sums[R][K][V]; // those of y[row + r, column − P + s] at [r][s]
    Results<T, V, R> results;
    walk<C>(band, last, width + P, chunks, Input::SIZE, ask_for, [&](int band, int begin, const T* chunk) {
        if (begin == 0) {
            T* image = y + i64(band / bands) * height * width * y_stride + channel;
            results.start(image, y_stride, band % bands * strips * R + row, height, width, exists, accumulate);
#pragma unroll
            for (int s = 0; s < K; s++) move_on(sums, start);
        }
#pragma unroll UNROLLED<K> // so that sums are renamed, not copied between registers
        for (int c = 0; c < C; c++) {
            int column = begin + c;
            if (column < width) {
                W in[R + K - 1][V];
                Input::take(chunk, c, row, in);
#pragma unroll
                for (int r = 0; r < R; r++)
#pragma unroll
                    for (int a = 0; a < K; a++)
#pragma unroll
                        for (int s = 0; s < K; s++)
#pragma unroll
                            for (int v = 0; v < V; v++) sums[r][s][v] += in[r + a][v] * taps[a * K + K - 1 - s][v];
            }
            if (u32(column - P) < u32(width)) results.put(sums, column - P + 1 < width);
            move_on(sums, start);
        }
    });
}

// to[i][channel] = the sum of values[i][channel] over the warps of a block, in order, for the channels of a tile.
template <int COUNT, int V, typename W>
__device__ __forceinline__ void sum_warps(const W (&values)[COUNT][V], W* shared, W* to) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int v = 0; v < V; v++) shared[(i * blockDim.x + threadIdx.x) * V + v] = values[i][v];
    __syncthreads();
#pragma unroll 1
    for (u32 item = threadIdx.x; item < COUNT * V * 32; item += blockDim.x) {
        u32 i = item / (V * 32), channel = item % (V * 32);
        W sum = 0;
        for (u32 warp = 0; warp < blockDim.x / 32; warp++) sum += shared[i * blockDim.x * V + warp * V * 32 + channel];
        to[item] = sum;
    }
}

// dw[a, b] (+)= Σ dy[i, j]·x[i + a − P, j + b − P] over all pixels, and dbias (+)= Σ dy, reduced through `partial`
// (tiles, pieces, K² + 1, channels of a tile). A piece is a range of all images' bands. Blocks are ordered by piece,
// then tile of the channels.
template <typename T, int K, int V>
__global__ void __launch_bounds__(THREADS, (sizeof(T) == 2 && K < 7 ? 2 : 1))
    dwconv_backward_weight(const T* __restrict__ dy, i64 dy_stride, const T* __restrict__ x, i64 x_stride,
                           wide<T>* partial, wide<T>* dweights, int add_weights, wide<T>* dbiases, int add_biases,
                           int all_bands, int height, int width, int channels, int tiles, int bands) {
    typedef wide<T> W;
    constexpr int P = K / 2, TAPS = K * K, R = ROWS<K>, C = COLUMNS<T, K, V>;
    typedef Band<T, V, 32, STRIPS<32> * R + K - 1, C> Input;
    typedef Band<T, V, 32, STRIPS<32> * R, C> Upstream;
    int strips = blockDim.x / 32, row = warp() * R;
    int tile = blockIdx.x % tiles, piece = blockIdx.x / tiles, pieces = gridDim.x / tiles;
    int first = tile * Input::TILE, count = min(Input::TILE, channels - first);
    int band = i64(all_bands) * piece / pieces, last = i64(all_bands) * (piece + 1) / pieces;

    // A chunk of dy comes with the columns of x that lie P to the left.
    DYNAMIC_SHARED(T, chunks);
    constexpr int SIZE = Input::SIZE + Upstream::SIZE;
    auto ask_for = [&](int band, int column, T* to) {
        i64 pixel = i64(band / bands) * height * width;
        int top = band % bands * strips * R;
        Input input = {x + pixel * x_stride + first, x_stride, top - P, strips * R + K - 1, height, width, count};
        Upstream upstream = {dy + pixel * dy_stride + first, dy_stride, top, strips * R, height, width, count};
        input.ask_for(column - P, to);
        upstream.ask_for(column, to + Input::SIZE);
    };
    if (band < last) ask_for(band, 0, chunks);
    W dtaps[K][K][V] = {}, totals[1][V] = {};
    W window[R][K][V]; // dy[row + r, column − 2·P + s] at [r][s]
    walk<C>(band, last, width + P, chunks, SIZE, ask_for, [&](int, int begin, const T* chunk) {
        if (begin == 0) {
#pragma unroll
            for (int s = 0; s < K; s++) move_on<R, K, V, W>(window, {});
        }
#pragma unroll UNROLLED<K> // so that elements are renamed, not copied between registers
        for (int c = 0; c < C; c++) {
            int column = begin + c;
            W arriving[R][V];
            Upstream::take(chunk + Input::SIZE, c, row, arriving);
            move_on(window, arriving);
            if (column < P || column >= width + P) continue;
            W in[R + K - 1][V];
            Input::take(chunk, c, row, in);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int v = 0; v < V; v++) {
                    totals[0][v] += window[r][K - 1 - P][v];
#pragma unroll
                    for (int a = 0; a < K; a++)
#pragma unroll
                        for (int b = 0; b < K; b++) dtaps[a][b][v] += in[r + a][v] * window[r][K - 1 - b][v];
                }
        }
    });

    constexpr int ALL = (TAPS + 1) * Input::TILE; // a tile's sums of each tap, and of dy
    W* shared = reinterpret_cast<W*>(chunks);
    partial = piece_of(partial, i64(tile) * pieces, ALL);
    W* own = piece_of(partial, piece, ALL);
#pragma unroll
    for (int a = 0; a < K; a++) sum_warps(dtaps[a], shared, own + a * K * Input::TILE);
    sum_warps(totals, shared, own + TAPS * Input::TILE);
    finish_sums(partial, ALL, piece, pieces, tile, [&](int i, W sum) {
        int tap = i / Input::TILE, channel = first + i % Input::TILE;
        if (channel >= channels) return;
        if (tap < TAPS) put_wanted(dweights, i64(channel) * TAPS + tap, sum, add_weights);
        else put_wanted(dbiases, channel, sum, add_biases);
    });
}
