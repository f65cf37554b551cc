// Gradients of weight and bias of a convolution whose map has so few channels (the three colours of an image) that a patch
// has at most 32 elements, in bf16 on tensor cores: dyᵀ·patches, without patches in memory. Packs of 16 bytes hold parts
// of several pixels, so patches cannot be copied pack by pack. Instead, a block goes down the rows of dy, copies the whole
// rows of x that these have seen to shared memory, as they lie in x, and picks the elements of patches from there.
#pragma once
#include "instructions.cuh"

namespace few_channels {

// As in `few_channels.rs`.
constexpr int PATCH = 32, STAGES = 3, MOST_THREADS = 256;
} // namespace few_channels

// partial (pieces, O·32 + O) = the sums of dyᵀ·patches of each piece of the rows, then, if `biased`, those of dy. A warp
// takes 16 pixels of a row at a time. A stage has a row of dy (out_width, O), each pixel a pack apart, then the `down` rows
// of x that it has seen: `row_size` elements from `lead` on of each line, between zeros for the padding.
template <int OUTPUTS>
__global__ void __launch_bounds__(few_channels::MOST_THREADS, OUTPUTS > 32 ? 2 : 3)
    conv2d_backward_weight_of_few_channels(const bf16* dy, const bf16* x, float* partial, int biased, i64 rows, int height,
                                           int row_size, int inputs, int down, int across, int out_height, int out_width,
                                           int stride, int padding, int lead, int line) {
    constexpr int PATCH = few_channels::PATCH, STAGES = few_channels::STAGES;
    constexpr int N = Pack<bf16>::size, PACKS = OUTPUTS / N, PIXEL = OUTPUTS + N, TILES = OUTPUTS / 16;
    DYNAMIC_SHARED(bf16, shared);
    const int held = (out_width + 15) / 16 * 16, stage_size = held * PIXEL + down * line;
    // What no copy overwrites stays zero: padding, and pixels past a row's last.
    for (int i = threadIdx.x * N; i < STAGES * stage_size; i += blockDim.x * N)
        *reinterpret_cast<Pack<u32>*>(shared + i) = {};

    const i64 piece = blockIdx.x, begin = rows * piece / gridDim.x;
    const int count = int(rows * (piece + 1) / gridDim.x - begin);
    i64 image = begin / out_height;
    int i = int(begin - image * out_height);
    dy += begin * (out_width * OUTPUTS);
    // Starts copying the next row, the i-th of an image.
    auto copy = [&](bf16* to) {
        for (int pack = threadIdx.x; pack < out_width * PACKS; pack += blockDim.x)
            copy_async(to + pack / PACKS * PIXEL + pack % PACKS * N, dy + pack * N, true);
        to += held * PIXEL + lead;
        for (int a = 0; a < down; a++, to += line) {
            const int row = i * stride + a - padding;
            const bf16* from = x + (image * height + row) * row_size;
            for (int j = threadIdx.x * N; j < row_size; j += blockDim.x * N)
                copy_async(to + j, from + j, u32(row) < u32(height));
        }
        dy += out_width * OUTPUTS;
        if (++i == out_height) i = 0, image++;
    };

    // A lane's elements of patches, one of each eight, counted from the first that output pixel 0 sees. Past the last one
    // that one again: nobody wants what comes of it.
    int elements[PATCH / 8];
#pragma unroll
    for (int j = 0; j < PATCH / 8; j++) {
        const int run = across * inputs, element = min(j * 8 + int(lane()) / 4, down * run - 1), a = element / run;
        elements[j] = a * line + element - a * run + lead - padding * inputs;
    }
    const u32 one = lane() / 4 == 0 ? 0x3f803f80 : 0, ones[2] = {one, one}; // a matrix whose first column is ones
    float sums[TILES][PATCH / 8][4] = {}, bias[TILES][4] = {};
#pragma unroll 1
    for (int stage = 1 - STAGES; stage < count; stage++) {
        wait_for_groups_but<STAGES - 2>();
        __syncthreads(); // for this stage's copies, and for the stage before, whose place is free now
        if (const int next = stage + STAGES - 1; next < count) copy(shared + u32(next) % STAGES * stage_size);
        group_copies();
        __syncwarp(); // reconverges: lanes copy different numbers of packs
        if (stage < 0) continue;
        const bf16* const pixels = shared + u32(stage) % STAGES * stage_size;
        const bf16* const lines = pixels + held * PIXEL;
        for (int first = warp() * 16; first < out_width; first += blockDim.x / 2) {
            u32 right[PATCH / 8][2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Past the row's last pixel that one: it is multiplied by zeros.
                const int pixel = first + half * 8 + lane() % 4 * 2, last = out_width - 1, pace = stride * inputs;
                const bf16 *even = lines + min(pixel, last) * pace, *odd = lines + min(pixel + 1, last) * pace;
#pragma unroll
                for (int j = 0; j < PATCH / 8; j++)
                    right[j][half] = u32(even[elements[j]].bits) | u32(odd[elements[j]].bits) << 16;
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
    for (int i = threadIdx.x; i < of_piece; i += blockDim.x) partial[piece * of_piece + i] = totals[i];
}
