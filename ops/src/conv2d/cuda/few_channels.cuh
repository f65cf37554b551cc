// Convolutions in bf16 on tensor cores of maps that have so few channels (the three colours of an image) that a patch has 25
// to 31 elements, and is padded to 32; and gradients of their weight and bias, without patches in memory. Packs of 16 bytes
// hold parts of several pixels, so patches cannot be copied pack by pack. Instead, a block goes down the rows of y, copies the
// whole rows of x that these see to shared memory, as they lie in x, and picks the elements of patches from there.
#pragma once
#include "instructions.cuh"
#include "normal.cuh"

namespace few_channels {
// As in `few_channels.rs`.
constexpr int PATCH = 32, STAGES = 3, MOST_THREADS = 256;
constexpr int N = Pack<bf16>::size;

// The `down` rows of x that a row of y sees, in shared memory: `row_size` elements from `lead` on of each line, between zeros
// for the padding.
struct Lines {
    const bf16* x;
    int height, row_size, inputs, down, across, out_height, stride, padding, lead, line;

    __device__ __forceinline__ int size() const { return down * line; }
    __device__ __forceinline__ int patch() const { return down * across * inputs; }
    // From what one output pixel sees to what the next one does.
    __device__ __forceinline__ int pace() const { return stride * inputs; }
    // Where an element of a patch lies for output pixel 0.
    __device__ __forceinline__ int place(int element) const {
        const int run = across * inputs, a = element / run;
        return a * line + element - a * run + lead - padding * inputs;
    }
};

// A block's rows of y, of all images: `count` from `row` on, and which one of which image is the next to be copied.
struct Rows {
    i64 row, image;
    int count, i;

    __device__ __forceinline__ Rows(i64 rows, int out_height)
        : row(rows * blockIdx.x / gridDim.x), count(int(rows * (blockIdx.x + 1) / gridDim.x - row)) {
        image = row / out_height, i = int(row - image * out_height);
    }
    // Starts copying what the next row sees.
    __device__ __forceinline__ void copy_lines(const Lines& lines, bf16* to) {
        to += lines.lead;
        for (int a = 0; a < lines.down; a++, to += lines.line) {
            const int row = i * lines.stride + a - lines.padding;
            const bf16* from = lines.x + (image * lines.height + row) * lines.row_size;
            for (int j = threadIdx.x * N; j < lines.row_size; j += blockDim.x * N)
                copy_async(to + j, from + j, u32(row) < u32(lines.height));
        }
        if (++i == lines.out_height) i = 0, image++;
    }
};

// What no copy overwrites stays zero: padding, and pixels past a row's last.
__device__ __forceinline__ void clear(bf16* shared, int count) {
    for (int i = threadIdx.x * N; i < count; i += blockDim.x * N) *reinterpret_cast<Pack<u32>*>(shared + i) = {};
}

__device__ __forceinline__ u32 pair(bf16 low, bf16 high) { return u32(low.bits) | u32(high.bits) << 16; }

} // namespace few_channels

// y (rows, out_width, O) = patches·weightᵀ + bias (O), if there is one, or with `gelu` GELU of that; the weight is (O, 32). A
// warp takes 16 pixels of a row at a time, as rows of the product. Columns are numbered so that a lane has neighbouring ones.
template <int OUTPUTS>
__global__ void __launch_bounds__(few_channels::MOST_THREADS, OUTPUTS > 32 ? 2 : 3)
    conv2d_of_few_channels(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int gelu, i64 rows, int height,
                           int row_size, int inputs, int down, int across, int out_height, int out_width, int stride,
                           int padding, int lead, int line) {
    using namespace few_channels;
    constexpr int STAGES = few_channels::STAGES, DEPTH = PATCH / 16;
    // A lane has OWN neighbouring outputs of each GROUP.
    constexpr int GROUP = OUTPUTS % 32 == 0 ? 32 : 16, GROUPS = OUTPUTS / GROUP, TILES = GROUP / 8, OWN = GROUP / 4;
    DYNAMIC_SHARED(bf16, shared);
    const Lines lines{x, height, row_size, inputs, down, across, out_height, stride, padding, lead, line};
    const int stage_size = lines.size(), g = lane() / 4, p = lane() % 4;
    clear(shared, STAGES * stage_size);
    u32 right[GROUPS][TILES][DEPTH][2];
    float biases[GROUPS][OWN];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const bf16* row = weight + (group * GROUP + g / 2 * OWN + tile * 2 + g % 2) * PATCH + p * 2;
#pragma unroll
            for (int i = 0; i < 2 * DEPTH; i++) right[group][tile][i / 2][i % 2] = *reinterpret_cast<const u32*>(row + i * 8);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) biases[group][i] = bias ? widen(bias[group * GROUP + p * OWN + i]) : 0;
    }
    // A lane's pairs of elements of patches, one of each eight, and which of them there are.
    int places[PATCH / 8][2];
    u32 exist[PATCH / 8];
#pragma unroll
    for (int j = 0; j < PATCH / 8; j++) {
        exist[j] = 0;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int element = j * 8 + p * 2 + k;
            exist[j] |= element < lines.patch() ? 0xffffu << 16 * k : 0;
            places[j][k] = lines.place(min(element, lines.patch() - 1));
        }
    }
    Rows own(rows, out_height);
    y += own.row * (out_width * OUTPUTS) + p * OWN;
#pragma unroll 1
    for (int stage = 1 - STAGES; stage < own.count; stage++) {
        wait_for_groups_but<STAGES - 2>();
        __syncthreads(); // for this stage's copies, and for the stage before, whose place is free now
        if (const int next = stage + STAGES - 1; next < own.count)
            own.copy_lines(lines, shared + u32(next) % STAGES * stage_size);
        group_copies();
        __syncwarp(); // reconverges: lanes copy different numbers of packs
        if (stage < 0) continue;
        const bf16* const seen = shared + u32(stage) % STAGES * stage_size;
        for (int first = warp() * 16; first < out_width; first += blockDim.x / 2) {
            u32 left[DEPTH][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bf16* from = seen + min(first + half * 8 + g, out_width - 1) * lines.pace();
#pragma unroll
                for (int j = 0; j < PATCH / 8; j++)
                    left[j / 2][j % 2 * 2 + half] = pair(from[places[j][0]], from[places[j][1]]) & exist[j];
            }
            float sums[GROUPS][TILES][4] = {};
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                    for (int i = 0; i < DEPTH; i++) multiply_add(sums[group][tile], left[i], right[group][tile][i]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int pixel = first + half * 8 + g;
                if (pixel >= out_width) continue;
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    u32 words[OWN / 2];
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        float values[2];
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            values[k] = sums[group][tile][half * 2 + k] + biases[group][tile * 2 + k];
                            if (gelu) values[k] = gelu_of<bf16>(values[k]);
                        }
                        words[tile] = pack_bf16(values[0], values[1]);
                    }
                    store_at_once(y + pixel * OUTPUTS + group * GROUP, words);
                }
            }
            __syncwarp(); // reconverges the lanes that stored with those that did not
        }
        y += out_width * OUTPUTS;
    }
}

// partial (pieces, O·32 + O) = the sums of dyᵀ·patches of each piece of the rows, then, if `biased`, those of dy. A warp
// takes 16 pixels of a row at a time. A stage has a row of dy (out_width, O), whose pixels are a pack apart, then the lines
// that it has seen.
template <int OUTPUTS>
__global__ void __launch_bounds__(few_channels::MOST_THREADS, OUTPUTS > 32 ? 2 : 3)
    conv2d_backward_weight_of_few_channels(const bf16* dy, const bf16* x, float* partial, int biased, i64 rows, int height,
                                           int row_size, int inputs, int down, int across, int out_height, int out_width,
                                           int stride, int padding, int lead, int line) {
    using namespace few_channels;
    constexpr int STAGES = few_channels::STAGES, PACKS = OUTPUTS / N, PIXEL = OUTPUTS + N, TILES = OUTPUTS / 16;
    DYNAMIC_SHARED(bf16, shared);
    const Lines lines{x, height, row_size, inputs, down, across, out_height, stride, padding, lead, line};
    const int of_pixels = (out_width + 15) / 16 * 16 * PIXEL, stage_size = of_pixels + lines.size();
    clear(shared, STAGES * stage_size);
    Rows own(rows, out_height);
    dy += own.row * (out_width * OUTPUTS);
    // Starts copying the next row.
    auto copy = [&](bf16* to) {
        for (int pack = threadIdx.x; pack < out_width * PACKS; pack += blockDim.x)
            copy_async(to + pack / PACKS * PIXEL + pack % PACKS * N, dy + pack * N, true);
        dy += out_width * OUTPUTS;
        own.copy_lines(lines, to + of_pixels);
    };
    // A lane's elements of patches, one of each eight. Past the last one that one again: nobody wants what comes of it.
    int places[PATCH / 8];
#pragma unroll
    for (int j = 0; j < PATCH / 8; j++) places[j] = lines.place(min(j * 8 + int(lane()) / 4, lines.patch() - 1));
    const u32 one = lane() / 4 == 0 ? 0x3f803f80 : 0, ones[2] = {one, one}; // a matrix whose first column is ones
    float sums[TILES][PATCH / 8][4] = {}, bias[TILES][4] = {};
#pragma unroll 1
    for (int stage = 1 - STAGES; stage < own.count; stage++) {
        wait_for_groups_but<STAGES - 2>();
        __syncthreads(); // for this stage's copies, and for the stage before, whose place is free now
        if (const int next = stage + STAGES - 1; next < own.count) copy(shared + u32(next) % STAGES * stage_size);
        group_copies();
        __syncwarp(); // reconverges: lanes copy different numbers of packs
        if (stage < 0) continue;
        const bf16* const pixels = shared + u32(stage) % STAGES * stage_size;
        const bf16* const seen = pixels + of_pixels;
        for (int first = warp() * 16; first < out_width; first += blockDim.x / 2) {
            u32 right[PATCH / 8][2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Past the row's last pixel that one: it is multiplied by zeros.
                const int pixel = first + half * 8 + lane() % 4 * 2, last = out_width - 1;
                const bf16 *even = seen + min(pixel, last) * lines.pace(), *odd = seen + min(pixel + 1, last) * lines.pace();
#pragma unroll
                for (int j = 0; j < PATCH / 8; j++) right[j][half] = pair(even[places[j]], odd[places[j]]);
            }
            const bf16* const left = pixels + (first + lane() / 16 * 8 + lane() % 8) * PIXEL + lane() / 8 % 2 * 8;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                u32 a[4];
                load_transposed(a, left, i * 16);
#pragma unroll
                for (int j = 0; j < PATCH / 8; j++) multiply_add(sums[i][j], a, right[j]);
                multiply_add(bias[i], a, ones);
            }
        }
    }

    // The warps' sums, in the order of the warps. All copies are done: the last ones were waited for.
    float* const totals = reinterpret_cast<float*>(shared);
    const int g = lane() / 4, p = lane() % 4;
    for (int turn = 0; turn < int(blockDim.x / 32); turn++) {
        __syncthreads();
        if (warp() != turn) continue;
        auto add = [&](int place, float sum) { totals[place] = turn == 0 ? sum : totals[place] + sum; };
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const int output = i * 16 + side * 8 + g;
#pragma unroll
                for (int j = 0; j < PATCH / 8; j++)
#pragma unroll
                    for (int k = 0; k < 2; k++) add(output * PATCH + j * 8 + p * 2 + k, sums[i][j][side * 2 + k]);
                if (p == 0) add(OUTPUTS * PATCH + output, bias[i][side * 2]);
            }
    }
    __syncthreads();
    const int of_piece = OUTPUTS * PATCH + (biased ? OUTPUTS : 0);
    for (int i = threadIdx.x; i < of_piece; i += blockDim.x) partial[i64(blockIdx.x) * of_piece + i] = totals[i];
}
