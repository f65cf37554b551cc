// Depthwise convolutions of maps (N, H, W, C) that may lie inside wider tensors: `stride` elements from a pixel to the
// next. P = (K − 1)/2, and pixels outside the image are zeros.
//
// A thread has a few neighbouring channels of a few neighbouring rows, and walks along the rows. What it needs at every
// column stays in registers, the weights among it, so that a step is little more than its multiply-adds: an element that
// is loaded meets K taps in each of the rows. Side by side the threads of a block have `tile` pieces of the channels, and
// then the next rows, which see much of the same pixels.

constexpr int THREADS = 128;
// The most threads with channels of one pixel.
constexpr int TILE = 32;

// Rows of a thread: the more, the fewer are loaded twice, as far as there are registers.
template <int K>
constexpr int ROWS = K == 3 ? 4 : K == 5 ? 2 : 1;

// Columns after which the loop over them begins anew: a large kernel has no registers to spare.
template <int K>
constexpr int UNROLLED = K < 7 ? K : 1;

// Channels of a thread.
template <typename T, bool PAIRS>
constexpr int CHANNELS = PAIRS && sizeof(wide<T>) == 4 ? 2 : 1;

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

// A thread's channels of R rows of an image, column by column.
template <typename T, int V, int R>
struct Rows {
    const T* next;
    i64 stride, row_stride;
    bool exists[R];

    // From column `column` of row `row` on; `image` points to the channels in the image's first pixel.
    __device__ __forceinline__ Rows(const T* image, i64 stride, int row, int column, int height, int width)
        : next(image + (i64(row) * width + column) * stride), stride(stride), row_stride(width * stride) {
#pragma unroll
        for (int r = 0; r < R; r++) exists[r] = row + r >= 0 && row + r < height;
    }

    // The next column. Rows outside the image stay as they were.
    __device__ __forceinline__ void load(Channels<T, V> (&to)[R]) {
#pragma unroll
        for (int r = 0; r < R; r++)
            if (exists[r]) to[r] = *reinterpret_cast<const Channels<T, V>*>(next + r * row_stride);
        next += stride;
    }
};

// y (+)= x ∗ weight + bias, with weight (C, 1, K, K), turned by half a turn if so asked, and its centre greater by one for
// a residual: y[i, j] = Σ x[i + a − P, j + b − P]·w[a, b]. Of a row a thread has `length` columns. Blocks in order of
// image, segment of the columns, tile of the channels, and rows.
template <typename T, int K, bool PAIRS>
__global__ void __launch_bounds__(THREADS)
    dwconv_correlate(const T* __restrict__ x, i64 x_stride, const wide<T>* weight, int turned, int residual,
                     const wide<T>* bias, T* __restrict__ y, int accumulate, i64 y_stride, int height, int width,
                     int channels, int tile, int tiles, int length, int segments) {
    typedef wide<T> W;
    constexpr int P = K / 2, TAPS = K * K, R = ROWS<K>, V = CHANNELS<T, PAIRS>;
    u32 pieces = ((height + R - 1) / R * tile + THREADS - 1) / THREADS, block = blockIdx.x / pieces;
    int first = block % tiles * tile * V, begin = block / tiles % segments * length, end = min(begin + length, width);
    i64 image = block / tiles / segments;

    __shared__ W staged[TILE * V * TAPS];
    int count = min(tile * V, channels - first) * TAPS;
    for (int i = threadIdx.x; i < count; i += THREADS) staged[i] = weight[i64(first) * TAPS + i];
    __syncthreads();
    int item = blockIdx.x % pieces * THREADS + threadIdx.x;
    int place = item % tile * V, channel = first + place, row = item / tile * R;
    if (row >= height || channel >= channels) return;

    W taps[TAPS][V];
#pragma unroll
    for (int t = 0; t < TAPS; t++) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            taps[t][v] = staged[(place + v) * TAPS + (turned ? TAPS - 1 - t : t)];
            if (residual && t == TAPS / 2) taps[t][v] += W(1);
        }
    }
    W start[V];
#pragma unroll
    for (int v = 0; v < V; v++) start[v] = bias ? bias[channel + v] : W(0);
    W sums[R][K][V]; // those of y[row + r, column − P + s] at [r][s]
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int s = 0; s < K; s++)
#pragma unroll
            for (int v = 0; v < V; v++) sums[r][s][v] = start[v];

    int column = max(begin - P, 0);
    x += image * height * width * x_stride + channel;
    y += ((image * height + row) * width + begin) * y_stride + channel;
    Rows<T, V, R + K - 1> rows(x, x_stride, row - P, column, height, width);
    Channels<T, V> next[R + K - 1] = {};
    rows.load(next);
#pragma unroll UNROLLED<K> // so that sums change their names, not their registers
    for (; column < end + P; column++) {
        if (column < width) {
            W in[R + K - 1][V];
#pragma unroll
            for (int i = 0; i < R + K - 1; i++)
#pragma unroll
                for (int v = 0; v < V; v++) in[i][v] = next[i].at(v);
            if (column + 1 < width) rows.load(next);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int a = 0; a < K; a++)
#pragma unroll
                    for (int s = 0; s < K; s++)
#pragma unroll
                        for (int v = 0; v < V; v++) sums[r][s][v] += in[r + a][v] * taps[a * K + K - 1 - s][v];
        }
        if (column - P >= begin) {
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (row + r >= height) break;
                Channels<T, V>* to = reinterpret_cast<Channels<T, V>*>(y + i64(r) * width * y_stride);
                Channels<T, V> out = {};
#pragma unroll
                for (int v = 0; v < V; v++) out.set(v, accumulate ? to->at(v) + sums[r][0][v] : sums[r][0][v]);
                *to = out;
            }
            y += y_stride;
        }
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int s = 0; s < K; s++)
#pragma unroll
                for (int v = 0; v < V; v++) sums[r][s][v] = s + 1 < K ? sums[r][s + 1][v] : start[v];
    }
}

// to[channel·step + i] = the sum of values[i][channel] over the lines of a block, in order, for `count` channels.
template <int COUNT, int V, typename W>
__device__ __forceinline__ void sum_lines(const W (&values)[COUNT][V], W* shared, u32 tile, u32 count, W* to, int step) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int v = 0; v < V; v++) shared[(i * V + v) * THREADS + threadIdx.x] = values[i][v];
    __syncthreads();
#pragma unroll 1
    for (u32 item = threadIdx.x; item < COUNT * V * tile; item += THREADS) {
        u32 place = item % tile, i = item / tile / V, v = item / tile % V, channel = place * V + v;
        W sum = 0;
#pragma unroll 4
        for (u32 line = 0; line < THREADS / tile; line++) sum += shared[(i * V + v) * THREADS + line * tile + place];
        if (channel < count) to[i64(channel) * step + i] = sum;
    }
}

// partial[piece] = Σ dy[i, j]·x[i + a − P, j + b − P] (C, K, K) and behind it Σ dy (C), over a piece of all images' strips
// of R rows. A block has lines of `tile` threads, which take turns with the piece's strips. Blocks in order of piece, and
// tile of the channels.
template <typename T, int K, bool PAIRS>
__global__ void __launch_bounds__(THREADS)
    dwconv_weight(const T* dy, i64 dy_stride, const T* x, i64 x_stride, wide<T>* partial, i64 strips, i64 piece_strips,
                  int height, int width, int channels, int tile, int tiles) {
    typedef wide<T> W;
    constexpr int P = K / 2, R = ROWS<K>, V = CHANNELS<T, PAIRS>;
    int first = blockIdx.x % tiles * tile * V, channel = first + threadIdx.x % tile * V;
    i64 piece = blockIdx.x / tiles, end = min((piece + 1) * piece_strips, strips);
    int line = threadIdx.x / tile, lines = THREADS / tile, strips_of_image = (height + R - 1) / R;
    W sums[K][K][V] = {}, totals[1][V] = {};
    bool takes_part = line < lines && channel < channels;
    for (i64 strip = piece * piece_strips + line; takes_part && strip < end; strip += lines) {
        i64 image = strip / strips_of_image, pixel = image * height * width;
        int row = strip % strips_of_image * R;
        Rows<T, V, R> upstream(dy + pixel * dy_stride + channel, dy_stride, row, 0, height, width);
        Rows<T, V, R + K - 1> rows(x + pixel * x_stride + channel, x_stride, row - P, 0, height, width);
        W window[R][K][V] = {}; // dy[row + r, column − P + s] at [r][s]
        Channels<T, V> arriving[R] = {}, next[R + K - 1] = {};
        upstream.load(arriving);
        rows.load(next);
#pragma unroll UNROLLED<K> // so that the window's elements change their names, not their registers
        for (int column = -P; column < width; column++) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int v = 0; v < V; v++) {
#pragma unroll
                    for (int s = 0; s < K - 1; s++) window[r][s][v] = window[r][s + 1][v];
                    totals[0][v] += window[r][K - 1][v] = arriving[r].at(v);
                }
#pragma unroll
            for (int r = 0; r < R; r++) arriving[r] = {};
            if (column + P + 1 < width) upstream.load(arriving);
            if (column < 0) continue;
            W in[R + K - 1][V];
#pragma unroll
            for (int i = 0; i < R + K - 1; i++)
#pragma unroll
                for (int v = 0; v < V; v++) in[i][v] = next[i].at(v);
            if (column + 1 < width) rows.load(next);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int a = 0; a < K; a++)
#pragma unroll
                    for (int s = 0; s < K; s++)
#pragma unroll
                        for (int v = 0; v < V; v++) sums[a][K - 1 - s][v] += in[r + a][v] * window[r][s][v];
        }
    }

    __shared__ W shared[K * V * THREADS];
    int count = min(tile * V, channels - first);
    partial += piece * channels * (K * K + 1);
#pragma unroll
    for (int a = 0; a < K; a++) sum_lines(sums[a], shared, tile, count, partial + i64(first) * K * K + a * K, K * K);
    sum_lines(totals, shared, tile, count, partial + i64(channels) * K * K + first, 1);
}
