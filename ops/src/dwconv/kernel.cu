// Depthwise convolutions of maps (N, H, W, C) that may lie inside wider tensors: `stride` elements from a pixel to the
// next. P = (K − 1)/2, and pixels outside the image are zeros.
//
// A thread handles a few neighbouring channels of a few neighbouring rows, and moves along the rows. What it needs at
// every column, including the weights, stays in registers, so that a step is little more than its multiply-adds: a
// loaded element is multiplied by K taps for each of the rows. Consecutive threads of a block take the `tile` pieces of
// the channels, then the next rows, which read mostly the same pixels.
#include "sums.cuh"

// Threads per block, forward and backward.
constexpr int THREADS = 128, THREADS_BACKWARD = 256;
// The maximum number of threads that share the channels of one pixel.
constexpr int TILE = 32;

// Rows per thread: the more there are, the fewer are loaded twice, but registers are limited.
template <int K>
constexpr int ROWS = K == 3 ? 4 : K == 5 ? 2 : 1;

// A large kernel has no registers to spare: the unroll factor of the loop over columns, and whether the backward kernel
// holds the taps in registers beside their gradients.
template <int K>
constexpr int UNROLLED = K < 7 ? K : 1;
template <int K>
constexpr bool HELD = K < 7;

// How many columns are loaded ahead of use: registers suffice for only a few warps, and a few warps that load early
// keep the memory as busy as many that do not.
template <typename T, int K>
constexpr int AHEAD = K < 7 && sizeof(T) == 2 ? 3 : 1;

// Neighbouring channels, which one instruction loads or stores.
template <typename T, int V>
struct alignas(V * sizeof(T)) Channels {
    T values[V];

    __device__ __forceinline__ wide<T> at(int v) const { return widen(values[v]); }
    __device__ __forceinline__ void set(int v, wide<T> value) { values[v] = narrow<T>(value); }
};

// Two of 16 bits stay together in one register; each is set once, among zeros.
template <>
struct Channels<bf16, 2> {
    u32 bits;

    __device__ __forceinline__ float at(int v) const { return __uint_as_float(v ? bits & 0xffff0000 : bits << 16); }
    __device__ __forceinline__ void set(int v, float value) { bits |= u32(narrow<bf16>(value).bits) << 16 * v; }
};

// A thread's channels of R rows of an image, column by column, each loaded D columns before it is used. What lies
// outside the image is zero. Only the load depends on where a column lies: with a branch around more than that, values
// that move on by a column would have to be copied between registers instead of just being renamed.
template <typename T, int V, int R, int D>
struct Rows {
    const T* next;
    i64 stride, row_stride;
    int position, count;
    bool exists[R];
    Channels<T, V> coming[D][R];

    // `count` columns from `first` on, after `lead` that are zero, from row `row` on. `image` points to the channels in the
    // image's first pixel.
    __device__ __forceinline__ Rows(const T* image, i64 stride, int row, int first, int count, int lead, int height,
                                    int width)
        : next(image + (i64(row) * width + first - lead) * stride), stride(stride), row_stride(width * stride),
          position(-lead), count(count) {
#pragma unroll
        for (int r = 0; r < R; r++) exists[r] = row + r >= 0 && row + r < height;
#pragma unroll
        for (int d = 0; d < D; d++) ask(coming[d]);
    }

    __device__ __forceinline__ void ask(Channels<T, V> (&to)[R]) {
        bool within = u32(position++) < u32(count);
        const T* at = next;
#pragma unroll
        for (int r = 0; r < R; r++, at += row_stride) {
            to[r] = {};
            if (within && exists[r]) to[r] = *reinterpret_cast<const Channels<T, V>*>(at);
        }
        next += stride;
    }

    // The next column.
    __device__ __forceinline__ void take(wide<T> (&column)[R][V]) {
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
            for (int v = 0; v < V; v++) column[r][v] = coming[0][r].at(v);
#pragma unroll
            for (int d = 0; d + 1 < D; d++) coming[d][r] = coming[d + 1][r];
        }
        ask(coming[D - 1]);
    }
};

// Where a thread's sums go, column by column: in place of what is there, or added to it. Arguments are those of `Rows`.
template <typename T, int V, int R, int D>
struct Results {
    T* next;
    Rows<T, V, R, D> old;

    __device__ __forceinline__ Results(T* image, int accumulate, i64 stride, int row, int first, int count, int lead,
                                       int height, int width)
        : next(image + (i64(row) * width + first) * stride),
          old(image, stride, row, first, accumulate ? count : 0, lead, height, width) {}

    // Writes the sums of the next column, which are those at [.][0], if they are complete (`whole`).
    template <int K>
    __device__ __forceinline__ void put(const wide<T> (&sums)[R][K][V], bool whole) {
        wide<T> before[R][V];
        old.take(before);
        if (!whole) return;
        T* at = next;
#pragma unroll
        for (int r = 0; r < R; r++, at += old.row_stride) {
            Channels<T, V> out = {};
#pragma unroll
            for (int v = 0; v < V; v++) out.set(v, before[r][v] + sums[r][0][v]);
            if (old.exists[r]) *reinterpret_cast<Channels<T, V>*>(at) = out;
        }
        next += old.stride;
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

// `count` rows of a weight (C, 1, K, K) of a tile, from `first` on, with one added to their centres for a residual;
// after them come arbitrary values, for threads without a channel. A thread issues all its loads before it waits for
// any.
template <int TAPS, int MOST, int THREADS, typename W>
__device__ __forceinline__ void stage(const W* weight, int first, int count, int residual, W (&staged)[MOST * TAPS]) {
    constexpr int TURNS = (MOST * TAPS + THREADS - 1) / THREADS;
    W own[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        int i = turn * THREADS + threadIdx.x;
        own[turn] = i < count * TAPS ? weight[i64(first) * TAPS + i] : W(0);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        int i = turn * THREADS + threadIdx.x;
        if (i < MOST * TAPS) staged[i] = own[turn] + (residual && i % TAPS == TAPS / 2 ? W(1) : W(0));
    }
    __syncthreads();
}

// y (+)= x ∗ weight + bias: y[i, j] = Σ x[i + a − P, j + b − P]·w[a, b]. A thread handles `length` columns of a row.
// Blocks are ordered by image, then segment of the columns, tile of the channels, and rows. In bf16 a 3x3 kernel is
// limited to as many registers as let four blocks share a multiprocessor.
template <typename T, int K, bool PAIRS>
__global__ void __launch_bounds__(THREADS, K == 3 && sizeof(T) == 2 ? 4 : 1)
    dwconv_forward(const T* __restrict__ x, i64 x_stride, const wide<T>* weight, int residual, const wide<T>* bias,
                   T* __restrict__ y, int accumulate, i64 y_stride, int height, int width, int channels, int tile,
                   int tiles, int length, int segments) {
    typedef wide<T> W;
    constexpr int P = K / 2, TAPS = K * K, R = ROWS<K>, V = PAIRS ? 2 : 1, D = AHEAD<T, K>;
    u32 pieces = ((height + R - 1) / R * tile + THREADS - 1) / THREADS, block = blockIdx.x / pieces;
    int first = block % tiles * tile * V, begin = block / tiles % segments * length, end = min(begin + length, width);
    i64 image = block / tiles / segments;

    int item = blockIdx.x % pieces * THREADS + threadIdx.x;
    int place = item % tile * V, channel = first + place, row = item / tile * R;
    bool exists = row < height && channel < channels;
    int column = max(begin - P, 0), behind = min(end + P, width);
    x += image * height * width * x_stride + channel;
    y += image * height * width * y_stride + channel;
    // Their first loads overlap with those of the weights.
    Rows<T, V, R + K - 1, D> rows(x, x_stride, row - P, column, exists ? behind - column : 0, 0, height, width);
    Results<T, V, R, D> results(y, accumulate && exists, y_stride, row, begin, end - begin, begin + P - column, height, width);

    __shared__ W staged[TILE * V * TAPS];
    stage<TAPS, TILE * V, THREADS>(weight, first, min(tile * V, channels - first), residual, staged);
    if (!exists) return;
    W taps[TAPS][V];
#pragma unroll
    for (int t = 0; t < TAPS; t++)
#pragma unroll
        for (int v = 0; v < V; v++) taps[t][v] = staged[(place + v) * TAPS + t];
    W start[R][V];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int v = 0; v < V; v++) start[r][v] = bias ? bias[channel + v] : W(0);
    W sums[R][K][V]; // those of y[row + r, column − P + s] at [r][s]
#pragma unroll
    for (int s = 0; s < K; s++) move_on(sums, start);

    // Columns are counted down: NVRTC 13.0 compiles a loop that counts up to the last column into one of whole unrolled
    // iterations only (in PTX for 8.0 to 9.0), which writes past the row if the number of columns is not a multiple of
    // the unroll factor.
#pragma unroll UNROLLED<K> // so that sums are renamed, not copied between registers
    for (int left = end + P - column; left > 0; left--, column++) {
        W in[R + K - 1][V];
        rows.take(in);
        if (column < width) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int a = 0; a < K; a++)
#pragma unroll
                    for (int s = 0; s < K; s++)
#pragma unroll
                        for (int v = 0; v < V; v++) sums[r][s][v] += in[r + a][v] * taps[a * K + K - 1 - s][v];
        }
        results.put(sums, column - P >= begin);
        move_on(sums, start);
    }
}

// to[channel·step + i] = the sum of values[i][channel] over the lines of a block, in order, for the channels of a tile;
// zeros for those that are not there.
template <int COUNT, int V, typename W>
__device__ __forceinline__ void sum_lines(const W (&values)[COUNT][V], W* shared, u32 tile, W* to, int step) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int v = 0; v < V; v++) shared[(i * V + v) * THREADS_BACKWARD + threadIdx.x] = values[i][v];
    __syncthreads();
#pragma unroll 1
    for (u32 item = threadIdx.x; item < COUNT * V * tile; item += THREADS_BACKWARD) {
        u32 place = item % tile, i = item / tile / V, v = item / tile % V, channel = place * V + v;
        W sum = 0;
#pragma unroll 4
        for (u32 line = 0; line < THREADS_BACKWARD / tile; line++) sum += shared[(i * V + v) * THREADS_BACKWARD + line * tile + place];
        to[i64(channel) * step + i] = sum;
    }
}

// dx (+)= dy ∗ weight rotated by 180°: dx[i, j] = Σ dy[i − a + P, j − b + P]·w[a, b]. The same elements of dy times
// x[i, j], summed over all pixels, give the gradient of w[a, b], and dy itself that of the bias; both are reduced
// through `partial` (tiles, pieces, channels of a tile·(K² + 1)), which may be null. A piece is a range of all images'
// strips of R rows, which lines of `tile` threads take in turn: one strip each, or parts of strips if fewer are left
// than there are lines. Blocks are ordered by piece, then tile of the channels.
template <typename T, int K, bool PAIRS>
__global__ void __launch_bounds__(THREADS_BACKWARD, 1)
    dwconv_backward(const T* __restrict__ dy, i64 dy_stride, const T* __restrict__ x, i64 x_stride, const wide<T>* weight,
                    int residual, T* __restrict__ dx, int accumulate, i64 dx_stride, wide<T>* partial, wide<T>* dweights,
                    int add_weights, wide<T>* dbiases, int add_biases, i64 strips, int height, int width, int channels,
                    int tile, int tiles) {
    typedef wide<T> W;
    constexpr int P = K / 2, TAPS = K * K, R = ROWS<K>, V = PAIRS ? 2 : 1, D = AHEAD<T, K>;
    int own_tile = blockIdx.x % tiles, piece = blockIdx.x / tiles, pieces = gridDim.x / tiles;
    int first = own_tile * tile * V, count = min(tile * V, channels - first);
    int place = threadIdx.x % tile * V, line = threadIdx.x / tile, lines = THREADS_BACKWARD / tile;
    int strips_of_image = (height + R - 1) / R;
    i64 turn = strips * piece / pieces, last = strips * (piece + 1) / pieces;
    if (line >= lines || place >= count) last = 0; // surplus threads get no strips

    __shared__ W staged[TILE * V * TAPS];
    stage<TAPS, TILE * V, THREADS_BACKWARD>(weight, first, count, residual, staged);
    W held[HELD<K> ? TAPS : 1][V], dtaps[K][K][V] = {}, totals[1][V] = {};
#pragma unroll
    for (int t = 0; HELD<K> && t < TAPS; t++)
#pragma unroll
        for (int v = 0; v < V; v++) held[t][v] = staged[(place + v) * TAPS + t];
    auto tap = [&](int t, int v) { return HELD<K> ? held[HELD<K> ? t : 0][v] : staged[(place + v) * TAPS + t]; };

    dy += first + place, x += first + place, dx += first + place;
    for (; turn < last; turn += lines) {
        int here = min(last - turn, i64(lines)), parts = lines / here, part = line / here;
        if (part >= parts) break;
        i64 strip = turn + line % here, pixel = strip / strips_of_image * height * width;
        int row = strip % strips_of_image * R, begin = width * part / parts, end = width * (part + 1) / parts;
        // dx needs P more columns of dy on either side.
        int before = min(begin, P), seen = min(end + P, width) - (begin - before);
        Rows<T, V, R + K - 1, D> upstream(dy + pixel * dy_stride, dy_stride, row - P, begin - before, seen, P - before, height,
                                          width);
        Rows<T, V, R, D> rows(x + pixel * x_stride, x_stride, row, begin, end - begin, 0, height, width);
        Results<T, V, R, D> results(dx + pixel * dx_stride, accumulate, dx_stride, row, begin, end - begin, 2 * P, height,
                                    width);
        // x[row + r, column − P + s] at [r][s], and the sums of dx there.
        W window[R][K][V] = {}, sums[R][K][V] = {}, none[R][V] = {};
#pragma unroll UNROLLED<K> // so that elements are renamed, not copied between registers
        for (int column = begin - P; column < end + P; column++) {
            W arriving[R][V], in[R + K - 1][V];
            rows.take(arriving), upstream.take(in);
            move_on(window, arriving);
            if (column >= 0 && column < width) {
#pragma unroll
                for (int r = 0; r < R; r++)
#pragma unroll
                    for (int v = 0; v < V; v++) {
                        if (column >= begin && column < end) totals[0][v] += in[r + P][v];
#pragma unroll
                        for (int a = 0; a < K; a++)
#pragma unroll
                            for (int b = 0; b < K; b++) {
                                sums[r][b][v] += in[r + K - 1 - a][v] * tap(a * K + b, v);
                                dtaps[a][b][v] += in[r + K - 1 - a][v] * window[r][b][v];
                            }
                    }
            }
            results.put(sums, column >= begin + P);
            move_on(sums, none);
        }
    }

    if (!partial) return;
    __shared__ W shared[K * V * THREADS_BACKWARD];
    int behind = tile * V * TAPS, all = behind + tile * V; // where a tile's biases begin and end
    partial = piece_of(partial, i64(own_tile) * pieces, all);
    W* own = piece_of(partial, piece, all);
#pragma unroll
    for (int a = 0; a < K; a++) sum_lines(dtaps[a], shared, tile, own + a * K, TAPS);
    sum_lines(totals, shared, tile, own + behind, 1);
    finish_sums(partial, all, piece, pieces, own_tile, [&](int i, W sum) {
        if (i < count * TAPS) put_wanted(dweights, i64(first) * TAPS + i, sum, add_weights);
        else if (i >= behind && i < behind + count) put_wanted(dbiases, first + i - behind, sum, add_biases);
    });
}
