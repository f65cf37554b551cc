// Convolutions in bf16 on tensor cores without a matrix of patches in memory (implicit GEMM), and their dx, which is the
// same: rows of patches are gathered from a map straight into shared memory, multiplied with the reordered weight, and
// the result is stored. For the convolution the map is x and the result y; for dx they are dy and dx.
//
// Pixels of dx form classes, by the remainders of their row and column modulo the stride: only on these it depends
// through which taps a pixel was read. A block takes some pixels of a class, and after these their neighbours in the
// other classes, each time a product with the weights of those taps: so nothing is multiplied with zeros that only fill
// up a patch. The pixels of y are a single class.
#include "instructions.cuh"
#include "normal.cuh"

constexpr int THREADS = 256;
constexpr int DEPTH = 32;                // elements of the inner axis in a step
constexpr int CHUNKS = DEPTH / 8;        // a thread copies 8 elements, 16 bytes, at a time
constexpr int STRIDE = THREADS / CHUNKS; // from a row that a thread copies to its next one
constexpr int STAGES = 3;                // steps in shared memory: one in use, the others on their way
constexpr int REACH = 15;                // the most pixels of the map that a pixel sees along an axis, in all classes

// The taps of a class along an axis: tap first + t·step, 0 ≤ t < count, reads pixel offset + t of those that a pixel of
// the result sees.
struct Taps {
    int count, offset, first, step;
};

// An axis of a convolution with stride s and padding p, or of its dx. Pixel q·step + k of the result is number q of
// class k. All pixels of this number see pixels origin + q·pace + t of the map, 0 ≤ t < REACH.
struct Axis {
    int step, pace, origin, classes;
    int count, lacking;     // pixels of the first class; those from class `lacking` on lack the last of them
    int taps, longer;       // taps of a class; those with a remainder below `longer` have one more
    int nearest, remainder; // of p, divided by the step

    __device__ __forceinline__ Axis(int result, int kernel, bool transposed, int stride, int padding)
        : step(transposed ? stride : 1), pace(transposed ? 1 : stride), classes(min(step, result)),
          taps(kernel / step), longer(kernel - taps * step), nearest(padding / step), remainder(padding - nearest * step) {
        count = (result + step - 1) / step;
        lacking = step - (count * step - result);
        origin = transposed ? nearest + 1 - taps - (longer > 0) : -padding;
    }

    // For dx: tap r + u·s read pixel q·s + k for pixel (k + p)/s + q − u of y, with r the remainder of the division. So
    // the last tap did so for the first of these pixels.
    __device__ __forceinline__ Taps of_class(int k, bool transposed) const {
        if (!transposed) return {taps, 0, 0, 1};
        const bool next = k + remainder >= step;
        const int r = k + remainder - (next ? step : 0), own = taps + (r < longer);
        return {own, nearest + next + 1 - own - origin, r + (own - 1) * step, -step};
    }
};

// A row of the product: a pixel of the first class. `source` is where the first pixel of the map lies that it sees; the
// bits of `seen` say which of those from there on exist: REACH rows, then REACH columns. The bits of `last` are set if
// it is the last of its column or of its row, which other classes may lack, and if it is none at all.
struct Pixel {
    int source, target;
    u32 seen, last;
};
constexpr u32 LAST_ROW = 1, LAST_COLUMN = 2, NONE = 4;

// Which of the pixels from `first` on lie in a map.
__device__ __forceinline__ u32 those_within(int extent, int first) {
    const int begin = min(max(-first, 0), REACH), end = min(max(extent - first, 0), REACH);
    return (1u << end) - (1u << begin);
}

// A tap of a class: where what a pixel sees through it lies in the map, counted from its `source`, and where its weights
// lie in their row; and the bits of `seen` that must be set.
struct __align__(16) Tap {
    int map, weight;
    u32 bits, nothing; // so that one load takes it all
};
constexpr u32 NEVER = 1u << 31;

// What a block has in shared memory, for a product with N columns.
template <int N>
struct Tiles {
    // Each of the warps takes 32 rows and COLUMNS columns.
    static constexpr int COLUMNS = N < 64 ? N : 64, ROWS = THREADS / (N / COLUMNS);
    struct Stage {
        bf16 patches[ROWS * DEPTH], weights[N * DEPTH];
    };
    Stage stages[STAGES];
    Pixel pixels[ROWS];
    Tap taps[REACH * REACH];
    Axis axes[2]; // here, as they would occupy registers and are needed once per class
    __align__(16) float bias[N];
};

// Where a chunk of a row lies in an operand. A line of banks holds two rows; chunks are exchanged so that those at one
// place of eight consecutive rows lie in different banks.
__device__ __forceinline__ int place(int row, int chunk) { return row * DEPTH + (chunk ^ row / 2 % CHUNKS) * 8; }

// Which of 32 channels has a row of `weights`: so that those of which a lane has sums, columns 2p and 2p + 1 of four
// products 16x8, are the eight from 8p on.
__device__ __forceinline__ int channel_of(int row) { return row % 8 / 2 * 8 + row / 8 % 4 * 2 + row % 2; }

// What a thread copies in each step: a chunk of some rows of both operands.
template <int N, bool PACKS>
struct Loader {
    static constexpr int OWN = Tiles<N>::ROWS / STRIDE, OWN_WEIGHTS = (N + STRIDE - 1) / STRIDE;
    typedef typename Tiles<N>::Stage Stage;
    const bf16 *map, *weight;
    const Tap* taps;
    int channels, count;                    // count: of the taps
    int sources[OWN], weights[OWN_WEIGHTS]; // the first element of each row
    u32 seen[OWN];
    int to;             // the place of the chunk of the first row
    int channel, first; // of the next step: the chunk's first channel, and the tap

    // Begins a class that has this many taps.
    __device__ __forceinline__ void start(int taps) {
        count = taps;
        channel = threadIdx.x % CHUNKS * 8, first = 0;
    }

    __device__ __forceinline__ int steps() const {
        return PACKS ? count * ((channels + DEPTH - 1) / DEPTH) : (count * channels + DEPTH - 1) / DEPTH;
    }

    // Starts copying the chunks of the next step.
    __device__ __forceinline__ void fetch(Stage& stage) {
        if (PACKS)
            fetch_packs(stage);
        else
            fetch_elements(stage);
    }

private:
    // Of a map with a multiple of 8 channels, chunks are contiguous. The order along the inner axis does not matter, as
    // long as both operands have the same. It is: slices of as many channels as a step has, the last filled up with
    // zeros, and in each the taps. So neighbouring taps, which read mostly the same pixels, follow each other closely
    // enough to find them in the L1 cache.
    __device__ __forceinline__ void fetch_packs(Stage& stage) {
        const Tap tap = taps[first];
        const bool exist = channel < channels;
        const u32 bits = exist ? tap.bits : NEVER;
        fetch_weights(stage, tap.weight + channel, exist);
#pragma unroll
        for (int i = 0; i < OWN; i++)
            copy_async_cached(stage.patches + to + i * STRIDE * DEPTH, map + (sources[i] + tap.map + channel),
                              (seen[i] & bits) == bits);
        if (++first == count) first = 0, channel += DEPTH;
    }

    // Of another map, chunks are put together from single elements, tap after tap. Only forward, where the taps follow
    // each other in a row of the weight.
    __device__ __forceinline__ void fetch_elements(Stage& stage) {
        int tap = channel / channels, own = channel - tap * channels;
        fetch_weights(stage, channel, tap < count);
        Pack<bf16> packs[OWN] = {};
#pragma unroll
        for (int k = 0; k < Pack<bf16>::size; k++) {
            const Tap now = taps[min(tap, count - 1)];
            const u32 bits = tap < count ? now.bits : NEVER;
#pragma unroll
            for (int i = 0; i < OWN; i++)
                if ((seen[i] & bits) == bits) packs[i].at[k] = map[sources[i] + now.map + own];
            if (++own == channels) own = 0, tap++;
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) *reinterpret_cast<Pack<bf16>*>(stage.patches + to + i * STRIDE * DEPTH) = packs[i];
        channel += DEPTH;
        __syncwarp(); // reconverges the lanes, which load matrices together
    }

    __device__ __forceinline__ void fetch_weights(Stage& stage, int at, bool exist) const {
#pragma unroll
        for (int i = 0; i < OWN_WEIGHTS; i++)
            if (N >= STRIDE || threadIdx.x / CHUNKS < N)
                copy_async(stage.weights + to + i * STRIDE * DEPTH, weight + (weights[i] + at), exist);
    }
};

// result (images, .., outputs) (+)= the convolution of the map (images, .., channels), or with `transposed` its dx, plus
// a row if there is one; with `gelu`, GELU of that. The weight is (outputs, taps, channels), its rows padded to `patch`.
// PACKS: the map has a multiple of 8 channels. Neighbouring blocks take the parts of N outputs of the same pixels.
template <int N, bool PACKS>
__global__ void __launch_bounds__(THREADS, N == 32 && PACKS ? 3 : 2)
    conv2d_on_tensor_cores(const bf16* map, const bf16* weight, const bf16* bias, bf16* result, int accumulate, int gelu,
                           int transposed, int images, int height, int width, int channels, int result_height,
                           int result_width, int outputs, int kernel_down, int kernel_across, int patch, int stride,
                           int padding) {
    typedef Tiles<N> Tiles;
    constexpr int ROWS = Tiles::ROWS, COLUMNS = Tiles::COLUMNS;
    DYNAMIC_SHARED(Tiles, tiles);
    if (!PACKS) transposed = false;
    const int parts = (outputs + N - 1) / N, first_output = blockIdx.x % parts * N;
    if (threadIdx.x < ROWS) {
        const Axis down(result_height, kernel_down, transposed, stride, padding);
        const Axis across(result_width, kernel_across, transposed, stride, padding);
        if (threadIdx.x == 0) tiles->axes[0] = down, tiles->axes[1] = across;
        const int number = blockIdx.x / parts * ROWS + threadIdx.x;
        const int line = number / across.count, j = number - line * across.count;
        const int image = line / down.count, i = line - image * down.count;
        const int row = i * down.pace + down.origin, column = j * across.pace + across.origin;
        Pixel pixel = {0, 0, 0, NONE};
        if (image < images) {
            pixel.source = ((image * height + row) * width + column) * channels;
            pixel.target = (image * result_height + i * down.step) * result_width + j * across.step;
            pixel.seen = those_within(height, row) | those_within(width, column) << REACH;
            pixel.last = (i == down.count - 1 ? LAST_ROW : 0) | (j == across.count - 1 ? LAST_COLUMN : 0);
        }
        tiles->pixels[threadIdx.x] = pixel;
    }
    if (threadIdx.x < N) {
        const int output = first_output + threadIdx.x;
        tiles->bias[threadIdx.x] = bias && output < outputs ? widen(bias[output]) : 0;
    }
    __syncthreads();
    Loader<N, PACKS> loader;
    const int own_chunk_row = threadIdx.x / CHUNKS;
    loader.map = map, loader.weight = weight;
    loader.taps = tiles->taps, loader.channels = channels;
    loader.to = place(own_chunk_row, threadIdx.x % CHUNKS);
#pragma unroll
    for (int i = 0; i < loader.OWN; i++) {
        const Pixel& pixel = tiles->pixels[own_chunk_row + i * STRIDE];
        loader.sources[i] = pixel.source, loader.seen[i] = pixel.seen;
    }
#pragma unroll
    for (int i = 0; i < loader.OWN_WEIGHTS; i++) {
        const int row = own_chunk_row + i * STRIDE, output = first_output + row / 32 * 32 + channel_of(row);
        loader.weights[i] = output < outputs ? output * patch : 0; // columns past the last are not stored
    }

    // The warp's rows and columns of the product, and the places of those that this lane names when it loads matrices.
    // Exchanging chunks leaves rows 8 apart alone, and pairs of chunks whole.
    const int own_row = warp() % (ROWS / 32) * 32, own_column = warp() / (ROWS / 32) * COLUMNS;
    const int left = place(own_row + lane() % 16, lane() / 16);
    const int right = place(own_column + lane() / 16 * 8 + lane() % 8, lane() / 8 % 2);
    const Axis &down = tiles->axes[0], &across = tiles->axes[1];
    for (int first_row = 0; first_row < down.classes; first_row++)
        for (int first_column = 0; first_column < across.classes; first_column++) {
            const Taps rows = down.of_class(first_row, transposed), columns = across.of_class(first_column, transposed);
            loader.start(rows.count * columns.count);
            if (int(threadIdx.x) < loader.count) {
                const int a = threadIdx.x / columns.count, b = threadIdx.x - a * columns.count;
                const int row = rows.offset + a, column = columns.offset + b;
                const int tap = (rows.first + a * rows.step) * kernel_across + columns.first + b * columns.step;
                tiles->taps[threadIdx.x] = {(row * width + column) * channels, tap * channels,
                                            1u << row | 1u << (REACH + column), 0};
            }
            __syncthreads();
            const int steps = loader.steps();
#pragma unroll 1
            for (int step = 0; step < STAGES - 1; step++) {
                if (step < steps) loader.fetch(tiles->stages[step]);
                group_copies();
            }
            float sums[2][COLUMNS / 8][4] = {};
            for (int step = 0, stage = 0; step < steps; step++) {
                wait_for_groups_but<STAGES - 2>();
                __syncthreads();
                if (step + STAGES - 1 < steps) loader.fetch(tiles->stages[stage == 0 ? STAGES - 1 : stage - 1]);
                group_copies();
                const typename Tiles::Stage& now = tiles->stages[stage];
#pragma unroll
                for (int pair = 0; pair < CHUNKS / 2; pair++) {
                    u32 a[2][4];
#pragma unroll
                    for (int m = 0; m < 2; m++) load_matrices(a[m], now.patches + (left ^ pair * 16) + m * 16 * DEPTH);
#pragma unroll
                    for (int n = 0; n < COLUMNS / 8; n += 2) {
                        u32 b[4];
                        load_matrices(b, now.weights + (right ^ pair * 16) + n * 8 * DEPTH);
                        const u32 even[2] = {b[0], b[1]}, odd[2] = {b[2], b[3]};
#pragma unroll
                        for (int m = 0; m < 2; m++) multiply_add(sums[m][n], a[m], even), multiply_add(sums[m][n + 1], a[m], odd);
                    }
                }
                stage = stage == STAGES - 1 ? 0 : stage + 1;
            }
            __syncthreads(); // before the next class overwrites what others may still read

            // A lane has eight neighbouring outputs of each 32, of four rows.
            const u32 lacking = (first_row >= down.lacking ? LAST_ROW : 0) |
                                (first_column >= across.lacking ? LAST_COLUMN : 0) | NONE;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const Pixel& pixel = tiles->pixels[own_row + i * 8 + lane() / 4];
                if (pixel.last & lacking) continue;
                bf16* to = result + i64(pixel.target + first_row * result_width + first_column) * outputs;
#pragma unroll
                for (int group = 0; group < COLUMNS / 32; group++) {
                    const int output = first_output + own_column + group * 32 + lane() % 4 * 8;
                    if (output >= outputs) break;
                    float values[8];
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        values[j] = sums[i / 2][group * 4 + j / 2][i % 2 * 2 + j % 2] + tiles->bias[output - first_output + j];
                    if (accumulate) {
                        const Pack<bf16> old = *reinterpret_cast<const Pack<bf16>*>(to + output);
#pragma unroll
                        for (int j = 0; j < 8; j++) values[j] += widen(old.at[j]);
                    }
                    if (gelu) {
#pragma unroll
                        for (int j = 0; j < 8; j++) values[j] = gelu_of<bf16>(values[j]);
                    }
                    u32 words[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) words[j] = pack_bf16(values[2 * j], values[2 * j + 1]);
                    store_at_once(to + output, words);
                }
            }
            __syncwarp(); // reconverges the lanes that stored with those that did not
        }
}
