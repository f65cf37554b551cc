// Matrices of patches (im2col): row (n, i, j) of `patches` (N·HO·WO, P) holds what output pixel (i, j) sees of image n
// of x (N, H, W, I), with zeros for the padding p around the image. P is KH·KW·I, padded with zeros so that every row
// is aligned to packs: matrix products read other rows slowly. In bf16 most convolutions need none: tensor_cores.cuh, and
// for gradients of weights tall.cuh.
#include "few_channels.cuh"
#include "tall.cuh"
#include "tensor_cores.cuh"

// patches[n, i, j][a, b, c] = x[n, i·s + a − p, j·s + b − p, c]: one block per row of output pixels. Each row of the
// kernel reads a run of neighbouring elements of a row of x. A pack belongs to one pixel: its start is found by
// divisions, and its other elements by counting on from there.
template <typename T>
__global__ void conv2d_patches(const T* x, T* patches, int height, int width, int inputs, int down, int across,
                               int out_height, u32 out_count, u32 patch, int stride, int padding) {
    constexpr int N = Pack<T>::size;
    i64 image = blockIdx.x / out_height, row_size = i64(width) * inputs;
    int row = int(blockIdx.x % out_height) * stride - padding, run = across * inputs;
    x += image * height * row_size;
    patches += i64(blockIdx.x) * out_count;
    for (u32 place = threadIdx.x * N; place < out_count; place += blockDim.x * N) {
        u32 element = place % patch;
        int a = element / run, at = element % run;
        i64 first = (i64(place / patch) * stride - padding) * inputs; // start of the runs in a row of x
        int begin = max(-first, i64(0)), end = min(row_size - first, i64(run)); // the part of a run in the image
        const T* from = x + (row + a) * row_size + first;
        Pack<T> pack = {};
        auto inside = [&] { return a < down && row + a >= 0 && row + a < height && at >= begin && at < end; };
        if (inputs % N == 0) { // then a pack is contiguous in x
            if (inside()) pack = load_pack(from + at, N);
        } else {
#pragma unroll
            for (int k = 0; k < N; k++) {
                if (inside()) pack.at[k] = from[at];
                if (++at < run) continue;
                at = 0, a++, from += row_size;
            }
        }
        store_pack(patches + place, pack, N);
    }
}

// dx[n, i, j] (+)= the sum of dpatches over all places that x[n, i, j] was copied to, tap by tap: tap (a, b) of the output
// pixel ((i + p − a)/s, (j + p − b)/s), where there is one. A block has a row of x.
template <typename T>
__global__ void conv2d_gather(const T* dpatches, T* dx, int accumulate, int height, int width, int inputs, int down,
                              int across, int out_height, int out_width, i64 patch, int stride, int padding) {
    constexpr int N = Pack<T>::size;
    int packs = (inputs + N - 1) / N, row = int(blockIdx.x % height) + padding;
    i64 image = blockIdx.x / height;
    dpatches += image * out_height * out_width * patch;
    dx += i64(blockIdx.x) * width * inputs;
    for (int item = threadIdx.x; item < width * packs; item += blockDim.x) {
        int pixel = item / packs, c = (item - pixel * packs) * N, column = pixel + padding;
        int last = column / stride, nearest = column % stride; // the last output pixel that sees it, and by which tap
        wide<T> sums[N] = {};
        for (int a = row % stride, i = row / stride; a < down && i >= 0; a += stride, i--) {
            if (i >= out_height) continue;
            for (int b = nearest, j = last; b < across && j >= 0; b += stride, j--) {
                if (j >= out_width) continue;
                const T* from = dpatches + i64(i * out_width + j) * patch + (a * across + b) * inputs + c;
                Pack<T> pack = load_pack(from, inputs - c);
#pragma unroll
                for (int k = 0; k < N; k++) sums[k] += widen(pack.at[k]);
            }
        }
        put_pack(dx + i64(pixel) * inputs + c, sums, inputs - c, accumulate);
    }
}

// A thread's place in the matrix of patches, as `tall::Rows`: eight channels that a tap sees, which lie together in x.
// It moves on by additions alone.
struct Patches {
    int height, width, inputs, out_height, out_width, stride; // as above
    int step;           // from one output pixel to the next
    const bf16* at;     // these channels of the pixel of x, which may be in the padding
    int i, row, column; // the output pixel's row, and the pixel of x
    int end;            // `column` of the output pixel past the end of a row
    u32 limit;          // the columns of x in `row`: none if that is in the padding

    // The tap is `a` and `b` from the first pixel that output pixel (0, 0) would see without padding.
    __device__ __forceinline__ void start(const bf16* x, int a, int b, i64 pixel) {
        const int line = int(pixel) / out_width, image = line / out_height;
        i = line - image * out_height, row = i * stride + a;
        column = (int(pixel) - line * out_width) * stride + b, end = out_width * stride + b;
        at = x + ((i64(image) * height + row) * width + column) * inputs;
        limit = u32(row) < u32(height) ? width : 0;
    }
    __device__ __forceinline__ void next() {
        column += step * stride, at += step * stride * inputs;
        if (column < end) return;
        do {
            column -= out_width * stride, row += stride, at += stride * (width - out_width) * inputs;
            if (++i == out_height)
                i = 0, row -= out_height * stride, at += i64(height - out_height * stride) * width * inputs;
        } while (column >= end);
        limit = u32(row) < u32(height) ? width : 0;
    }
    __device__ __forceinline__ bool exists() const { return u32(column) < limit; }
    // By way of the L1 cache: another thread soon copies the same for another tap.
    __device__ __forceinline__ void copy(bf16* to, bool exists) const { copy_async_cached(to, at, exists); }
};

// The partial sums of dyᵀ·patches, with patches as above, whose packs are copied from x itself: see `tall::multiply`.
__global__ void __launch_bounds__(tall::MOST_THREADS, 1)
    conv2d_backward_weight(const bf16* dy, const bf16* x, float* partial, int biased, i64 rows, int outputs, int patch,
                           int tall, int wide, int height, int width, int inputs, int across, int out_height, int out_width,
                           int stride, int padding) {
    auto column = [&](int c, i64 row, int step) {
        Patches patches{height, width, inputs, out_height, out_width, stride, step};
        const int tap = c / inputs, a = tap / across, b = tap % across;
        patches.start(x + c % inputs, a - padding, b - padding, row);
        return patches;
    };
    tall::multiply(dy, column, partial, biased, rows, outputs, patch, tall, wide);
}
