// Depthwise convolutions of 5x5 in bf16 on tensor cores, and gradients of the weights of 3x3 and 5x5, of maps whose
// pixels consist of whole packs of channels.
//
// Each channel has its own taps; but a product with a diagonal matrix multiplies each row by a number of its own. So a
// row of y, eight pixels of eight channels, is Σ Wₜ·Xₜ over the taps t: Wₜ (8, 8) is the diagonal matrix of their
// weights, and Xₜ holds the pixels that they see. An instruction has room for two rows of y and two of x, that is, for
// four of these products. It does 7/8 of its work in vain, and still as much of use as eight multiply-adds of a warp, on
// operands as they lie in shared memory. Likewise the gradients of the weights of two taps are diagonals of [dYₛ
// dYₜ]ᵀ·X.
//
// A block takes a tile of the channels and of the columns, and moves down the rows of all images, which it sees below
// each other, with P rows of zeros before each of them. Rows pass through shared memory in groups: some arrive while
// others are used. A warp handles eight of the channels.
#pragma once
#include "instructions.cuh"
#include "sums.cuh"

constexpr int SIDE = 16;  // columns of a tile, at most
constexpr int OCTETS = 4; // of its channels, one for each warp
constexpr int CHANNELS = 8 * OCTETS;
constexpr int GROUP = 4; // rows of y in a step, and rows that arrive together
constexpr int RING = 4;  // groups in shared memory: those in use, and others on their way
// Elements from a pixel to the next in shared memory, so that packs of eight neighbours lie in different banks; for
// copies see `copied_row`.
constexpr int PITCH = CHANNELS + 8;

template <int K>
struct Kernel {
    static constexpr int P = K / 2, TAPS = K * K, COLUMNS = SIDE + K - 1;
    static constexpr int SEEN = (GROUP + K - 1 + GROUP - 1) / GROUP; // groups of x that a step sees
    static constexpr int PAIRS = (K + 1) / 2;                        // of the rows that two rows see
    // Groups that may still be on their way when a step begins; x is asked for three steps ahead.
    static constexpr int AHEAD = 3 - SEEN;
};

// A ring of groups in shared memory, whose rows have COLUMNS.
template <int COLUMNS>
struct Ring {
    static constexpr int ROW = COLUMNS * PITCH, SIZE = RING * GROUP * ROW;
    bf16* data;

    __device__ __forceinline__ bf16* group(int i) const { return data + i % RING * GROUP * ROW; }
};

// The rows of a piece, in groups: each is a row of all images below each other, or none, −1, between two images. They are
// looked up in shared memory, where group i is written in step i − 4, and may be read from the barrier of step i − 3 to that
// of step i + 4.
struct Schedule {
    static constexpr int GROUPS = 8, ROWS = GROUPS * GROUP, SIZE = ROWS + 2 * GROUP;
    int* rows; // of the groups; then which row of which image is the next one of each of the planning threads
    int begin, height, period, all; // the first row; of an image, and with the gap that follows; of all images

    // Writes group i, by its threads, whose numbers begin with `first`. The next barrier makes it visible.
    __device__ __forceinline__ void plan(int i, int first) const {
        int k = threadIdx.x - first, at = begin + i * GROUP + k;
        if (u32(k) >= GROUP) return;
        int image = at / period;
        write(i, k, at >= 0 ? image : -1, at - image * period);
    }
    // The same of the groups after group i, one after the other and by the first threads, which need no division then.
    __device__ __forceinline__ void begin_after(int i) const {
        int at = begin + (i + 1) * GROUP + threadIdx.x, image = at / period;
        if (threadIdx.x < GROUP) next_row() = at - image * period, next_image() = image;
    }
    __device__ __forceinline__ void plan_next(int i) const {
        if (threadIdx.x >= GROUP) return;
        int row = next_row(), image = next_image();
        write(i, threadIdx.x, image, row);
        for (row += GROUP; row >= period; row -= period) image++;
        next_row() = row, next_image() = image;
    }
    // Row k from the beginning of group i on.
    __device__ __forceinline__ int at(int i, int k) const { return rows[u32(i * GROUP + k) % ROWS]; }

private:
    __device__ __forceinline__ int& next_row() const { return rows[ROWS + threadIdx.x]; }
    __device__ __forceinline__ int& next_image() const { return rows[ROWS + GROUP + threadIdx.x]; }
    __device__ __forceinline__ void write(int i, int k, int image, int row) const {
        int source = image * height + row;
        rows[(i + GROUPS) % GROUPS * GROUP + k] = image >= 0 && row < height && source < all ? source : -1;
    }
};

// This thread's column of a map: a pack of each row.
template <typename T>
struct Column {
    T* first;
    int skip; // elements to the next row

    __device__ __forceinline__ T* row(int source) const { return first + i64(source) * skip; }
};

// A tile of the columns and channels, and where this thread's packs lie: a column of all rows that it sees, or one of
// every STEP-th row of the tile itself.
struct Tile {
    int left, columns, first, channels;

    __device__ __forceinline__ Tile(int wide, int width, int all_channels)
        : left(blockIdx.y * wide), columns(min(wide, width - left)), first(blockIdx.x * CHANNELS),
          channels(min(CHANNELS, all_channels - first)) {}
    static __device__ __forceinline__ int pack() { return threadIdx.x % OCTETS * 8; }
    static __device__ __forceinline__ int column() { return copied_row(threadIdx.x / OCTETS); }
    static __device__ __forceinline__ int own_column() { return column() % SIDE; }
    static __device__ __forceinline__ int own_row() { return threadIdx.x / OCTETS / SIDE; }
    static constexpr int STEP = 32 / SIDE;

    __device__ __forceinline__ int octets() const { return (columns + 7) / 8; }
    __device__ __forceinline__ bool is_own() const { return own_column() < columns && pack() < channels; }

    // The thread's column of a map, in what is seen or in the tile itself.
    template <int P, typename T>
    __device__ __forceinline__ Column<T> seen(T* map, i64 stride, int width) const {
        return {map + (left - P + column()) * stride + first + pack(), int(width * stride)};
    }
    template <typename T>
    __device__ __forceinline__ Column<T> own(T* map, i64 stride, int width) const {
        return {map + (left + own_column()) * stride + first + pack(), int(width * stride)};
    }
    static __device__ __forceinline__ int own_place() { return (own_row() * SIDE + own_column()) * PITCH + pack(); }
};

// Starts to copy group i of what is seen from so many octets of a tile's columns; those that do not exist are zeros.
template <int K>
__device__ __forceinline__ void ask_seen(const Tile& tile, int octets, Column<const bf16> column, int width,
                                         const Schedule& schedule, int i, bf16* group) {
    if (Tile::column() >= 8 * octets + K - 1) return;
    bool exists = u32(tile.left - K / 2 + Tile::column()) < u32(width) && Tile::pack() < tile.channels;
    bf16* to = group + Tile::column() * PITCH + Tile::pack();
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
        int row = schedule.at(i, k);
        copy_async(to + k * Kernel<K>::COLUMNS * PITCH, column.row(row), exists && row >= 0);
    }
}

// The same of group i of the tile itself, whose rows come P after those of what is seen.
template <int P>
__device__ __forceinline__ void ask_own(const Tile& tile, Column<const bf16> column, const Schedule& schedule, int i,
                                        bf16* group) {
#pragma unroll
    for (int k = 0; k < GROUP; k += Tile::STEP) {
        int row = schedule.at(i, P + Tile::own_row() + k);
        copy_async(group + Tile::own_place() + k * SIDE * PITCH, column.row(row), tile.is_own() && row >= 0);
    }
}

// Eight pixels of each row that a step sees, through column b of the kernel: as right operands, each two rows are one.
// `from` are the addresses of this lane's row of the matrices that it sees through column 0, in each group.
template <int K, bool TRANSPOSED>
__device__ __forceinline__ void look(const bf16* const (&from)[Kernel<K>::SEEN], int b,
                                     u32 (&seen)[2 * Kernel<K>::SEEN][2]) {
#pragma unroll
    for (int i = 0; i < Kernel<K>::SEEN; i++) {
        u32 four[4];
        if (TRANSPOSED) load_transposed(four, from[i], b * PITCH);
        else load_matrices(four, from[i], b * PITCH);
#pragma unroll
        for (int row = 0; row < GROUP; row++) seen[2 * i + row / 2][row % 2] = four[row];
    }
}

// Whether a lane holds elements of a diagonal, and which of a pair: channel lane / 4, in columns 2p and 2p + 1.
__device__ __forceinline__ bool on_diagonal() { return lane() / 8 == lane() % 4; }
__device__ __forceinline__ int of_pair() { return lane() / 4 % 2; }

// The left operands for two rows of y and pair j of the rows that they see, through column b: [W₂ⱼ W₂ⱼ₊₁; W₂ⱼ₋₁ W₂ⱼ].
// `own` points to the taps of this lane's channel, which are `turned` by 180° or not. Each matrix occurs twice, and an
// operand needs four registers in a row. So that the compiler does not keep a matrix once and copy it for each product,
// they differ in the signs of their zeros.
template <int K>
__device__ __forceinline__ void load_weights(const float* own, bool exists, int turned, u32 (&to)[K][Kernel<K>::PAIRS][4]) {
    constexpr int TAPS = Kernel<K>::TAPS, LAST = Kernel<K>::PAIRS - 1;
    constexpr u32 SIGNS = 0x80008000u;
    bool on = exists && on_diagonal();
    float weights[TAPS];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) weights[tap] = on ? own[turned ? TAPS - 1 - tap : tap] : 0;
    u32 signs = on ? 0 : SIGNS;
    auto matrix = [&](int row, int b) { return u32(narrow<bf16>(weights[row * K + b]).bits) << 16 * of_pair(); };
#pragma unroll
    for (int b = 0; b < K; b++)
#pragma unroll
        for (int j = 0; j <= LAST; j++) {
            u32(&four)[4] = to[b][j];
            four[0] = matrix(2 * j, b);
            four[1] = j > 0 ? matrix(2 * j - 1, b) | signs : four[0] & SIGNS;
            four[2] = j < LAST ? matrix(2 * j + 1, b) : four[0] & SIGNS;
            four[3] = four[0] | signs;
        }
}

// A step's sums += its rows in shared memory: at(i) points to this lane's two channels of a pixel of row i. Each instruction is
// for all rows before the next one is: a single row would wait for each of them.
template <int ROWS, typename At>
__device__ __forceinline__ void add_rows(float (&sums)[ROWS / 2][4], At at) {
    u32 rows[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) rows[i] = *reinterpret_cast<const u32*>(at(i));
#pragma unroll
    for (int i = 0; i < ROWS; i++) rows[i] = transpose(rows[i]); // two pixels of a channel, as in the sums
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float* own = sums[i / 2] + i % 2 * 2;
        own[0] += low_half(rows[i]), own[1] += high_half(rows[i]);
    }
}

// A step's rows of N octets of columns, and a warp's channels. `seen` points to the first pixel seen of each group. A sum is a
// chain of products, each of which waits for the one before; two octets have four such chains.
template <int K, int N>
__device__ __forceinline__ void convolve(const bf16* const (&seen)[Kernel<K>::SEEN],
                                         const u32 (&weights)[K][Kernel<K>::PAIRS][4], float bias, int residual,
                                         int accumulate, bf16* results) {
    constexpr int P = Kernel<K>::P, ROW = Kernel<K>::COLUMNS * PITCH, PAIR = GROUP / 2;
    constexpr int ROWS = N * GROUP; // those of an octet after those of another
    float sums[ROWS / 2][4] = {};
    const bf16* from[Kernel<K>::SEEN];
#pragma unroll
    for (int i = 0; i < Kernel<K>::SEEN; i++) from[i] = seen[i] + lane() / 8 * ROW + lane() % 8 * PITCH;
#pragma unroll
    for (int b = 0; b < K; b++) {
        u32 right[N][2 * Kernel<K>::SEEN][2];
#pragma unroll
        for (int n = 0; n < N; n++) look<K, false>(from, n * 8 + b, right[n]);
#pragma unroll
        for (int j = 0; j < Kernel<K>::PAIRS; j++)
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) multiply_add(sums[i], weights[b][j], right[i / PAIR][i % PAIR + j]);
    }
    int place = lane() / 4 * PITCH + lane() % 4 * 2;
    auto octet = [&](int i) { return i / GROUP * 8 * PITCH + place; };
    auto result = [&](int i) { return results + i % GROUP * SIDE * PITCH + octet(i); };
    if (residual)
        add_rows<ROWS>(sums, [&](int i) {
            return seen[(i % GROUP + P) / GROUP] + (i % GROUP + P) % GROUP * ROW + P * PITCH + octet(i);
        });
    if (accumulate) add_rows<ROWS>(sums, result);
    u32 rows[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const float* own = sums[i / 2] + i % 2 * 2;
        rows[i] = transpose(pack_bf16(own[0] + bias, own[1] + bias));
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) *reinterpret_cast<u32*>(result(i)) = rows[i];
}

// As `dwconv_forward`, with weights rounded to bf16. Blocks: tiles of the channels, of the columns, `wide` and N octets at most,
// and pieces of the `all` rows of the images.
template <int K, int N>
__global__ void __launch_bounds__(32 * OCTETS, 4)
    dwconv_on_tensor_cores(const bf16* __restrict__ x, i64 x_stride, const float* weight, int residual, int turned,
                           const float* bias, bf16* __restrict__ y, int accumulate, i64 y_stride, int all, int groups,
                           int height, int width, int channels, int wide) {
    constexpr int P = Kernel<K>::P, COLUMNS = Kernel<K>::COLUMNS, SEEN = Kernel<K>::SEEN;
    Tile tile(wide, width, channels);
    int begin = i64(groups) * blockIdx.z / gridDim.z, steps = i64(groups) * (blockIdx.z + 1) / gridDim.z - begin;

    DYNAMIC_SHARED(bf16, shared);
    Ring<COLUMNS> seen = {shared};
    Ring<SIDE> results = {shared + seen.SIZE};
    __shared__ int scheduled[Schedule::SIZE];
    Schedule schedule = {scheduled, begin * GROUP - P, height, height + P, all};
    Column<const bf16> input = tile.seen<P>(x, x_stride, width), old = tile.own<const bf16>(y, y_stride, width);
    Column<bf16> output = tile.own(y, y_stride, width);
    auto ask_for = [&](int seen_group, int old_group) {
        if (seen_group < steps + SEEN - 1) ask_seen<K>(tile, N, input, width, schedule, seen_group, seen.group(seen_group));
        if (accumulate && old_group >= 0 && old_group < steps)
            ask_own<P>(tile, old, schedule, old_group, results.group(old_group));
    };
#pragma unroll
    for (int i = 0; i < 4; i++) schedule.plan(i, i * GROUP);
    schedule.begin_after(3);
    __syncthreads();
    ask_for(0, 0);
    ask_for(1, -1);
    group_copies();
    ask_for(2, 1);
    group_copies();

    int octet = warp() * 8, channel = octet + lane() / 4; // of this tile
    bool used = channel < tile.channels;
    u32 weights[K][Kernel<K>::PAIRS][4];
    load_weights<K>(weight + i64(tile.first + channel) * Kernel<K>::TAPS, used, turned, weights);
    float own_bias = bias && used ? bias[tile.first + channel] : 0;
#pragma unroll 1
    for (int step = 0; step <= steps; step++) {
        wait_for_groups_but<Kernel<K>::AHEAD>();
        __syncthreads(); // for this step's groups, for the results of the step before, and the end of its use of others
        if (step < steps) ask_for(step + 3, step + 2);
        group_copies();
        schedule.plan_next(step + 4);
        if (step > 0 && tile.is_own()) {
#pragma unroll
            for (int k = 0; k < GROUP; k += Tile::STEP) {
                int row = schedule.at(step - 1, P + Tile::own_row() + k);
                const bf16* from = results.group(step - 1) + Tile::own_place() + k * SIDE * PITCH;
                const Pack<bf16> pack = *reinterpret_cast<const Pack<bf16>*>(from);
                if (row >= 0) *reinterpret_cast<Pack<bf16>*>(output.row(row)) = pack;
            }
        }
        __syncwarp();
        if (step == steps || octet >= tile.channels) continue;
        const bf16* from[SEEN];
#pragma unroll
        for (int i = 0; i < SEEN; i++) from[i] = seen.group(step + i) + octet;
        convolve<K, N>(from, weights, own_bias, residual, accumulate, results.group(step) + octet);
    }
}

// As `dwconv_backward_weight`. A left operand is [dYᵣ dYᵣ₊₁; dYᵣ₋₁ dYᵣ]ᵀ: with rows r + 2j and r + 2j + 1 of x it gives
// the gradients of rows 2j and 2j + 1 of the weight, the latter for rows r − 1 and r of dy. So a piece has, for these,
// the last row of the piece before instead of its own.
template <int K>
__global__ void __launch_bounds__(32 * OCTETS, 4)
    dwconv_backward_weight_on_tensor_cores(const bf16* __restrict__ dy, i64 dy_stride, const bf16* __restrict__ x,
                                           i64 x_stride, float* partial, float* dweights, int add_weights,
                                           float* dbiases, int add_biases, int all, int groups, int height, int width,
                                           int channels, int wide) {
    constexpr int P = Kernel<K>::P, COLUMNS = Kernel<K>::COLUMNS, SEEN = Kernel<K>::SEEN, TAPS = Kernel<K>::TAPS;
    const u32 ones[2] = {0x3f803f80u, 0x3f803f80u}; // in bf16
    Tile tile(wide, width, channels);
    int begin = i64(groups) * blockIdx.z / gridDim.z, steps = i64(groups) * (blockIdx.z + 1) / gridDim.z - begin;
    int octet = warp() * 8;

    DYNAMIC_SHARED(bf16, shared);
    Ring<COLUMNS> seen = {shared};
    Ring<SIDE> upstream = {shared + seen.SIZE};
    __shared__ int scheduled[Schedule::SIZE];
    Schedule schedule = {scheduled, begin * GROUP - P, height, height + P, all};
    Column<const bf16> input = tile.seen<P>(x, x_stride, width), output = tile.own(dy, dy_stride, width);
    auto ask_for = [&](int seen_group, int own_group) {
        if (seen_group < steps + SEEN - 1)
            ask_seen<K>(tile, tile.octets(), input, width, schedule, seen_group, seen.group(seen_group));
        if (own_group < steps) ask_own<P>(tile, output, schedule, own_group, upstream.group(own_group + RING));
    };
#pragma unroll
    for (int i = -1; i < 4; i++) schedule.plan(i, (i + 1) * GROUP);
    schedule.begin_after(3);
    __syncthreads();
    ask_for(0, -1);
    ask_for(1, 0);
    group_copies();
    ask_for(2, 1);
    group_copies();

    float sums[K][Kernel<K>::PAIRS][4] = {}, totals[4] = {};
    // The lane's row of the matrices of left operands: r, r − 1, r + 1 and r.
    int apart = lane() / 8 % 2 ? int(lane()) / 16 - 1 : int(lane()) / 16, own = lane() % 8 * PITCH + octet;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        wait_for_groups_but<Kernel<K>::AHEAD>();
        __syncthreads();
        ask_for(step + 3, step + 2);
        group_copies();
        schedule.plan_next(step + 4);
        __syncwarp();
        const bf16* left_from[2] = {upstream.group(step + RING) + apart * SIDE * PITCH + own, nullptr};
        left_from[1] = left_from[0] + 2 * SIDE * PITCH;
        if (apart < 0) left_from[0] = upstream.group(step - 1 + RING) + (GROUP - 1) * SIDE * PITCH + own;
        const bf16* from[SEEN];
#pragma unroll
        for (int i = 0; i < SEEN; i++) from[i] = seen.group(step + i) + lane() / 8 * COLUMNS * PITCH + own;
        for (int c = 0; c < tile.octets(); c++) {
            u32 left[2][4];
#pragma unroll
            for (int t = 0; t < 2; t++) {
                load_transposed(left[t], left_from[t]);
                multiply_add(totals, left[t], ones);
                left_from[t] += 8 * PITCH;
            }
            u32 right[2][2 * SEEN][2]; // as in `convolve`
            look<K, true>(from, 0, right[0]);
#pragma unroll
            for (int b = 0; b < K; b++) {
                if (b + 1 < K) look<K, true>(from, b + 1, right[(b + 1) % 2]);
#pragma unroll
                for (int t = 0; t < 2; t++)
#pragma unroll
                    for (int j = 0; j < Kernel<K>::PAIRS; j++) multiply_add(sums[b][j], left[t], right[b % 2][t + j]);
            }
#pragma unroll
            for (int i = 0; i < SEEN; i++) from[i] += 8 * PITCH;
        }
    }
    wait_for_copies();

    constexpr int ALL = (TAPS + 1) * CHANNELS; // a tile's sums of each tap, and of dy
    int piece = blockIdx.z * gridDim.y + blockIdx.y, pieces = gridDim.y * gridDim.z;
    partial = piece_of(partial, i64(blockIdx.x) * pieces, ALL);
    float* to = piece_of(partial, piece, ALL) + octet + lane() / 4;
    if (on_diagonal()) {
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) {
            const float(&pair)[4] = sums[tap % K][tap / K / 2];
            to[tap * CHANNELS] = of_pair() ? pair[tap / K % 2 * 2 + 1] : pair[tap / K % 2 * 2];
        }
        to[TAPS * CHANNELS] = totals[0];
    }
    finish_sums(partial, ALL, piece, pieces, blockIdx.x, [&](int i, float sum) {
        int tap = i / CHANNELS, channel = tile.first + i % CHANNELS;
        if (channel >= channels) return;
        if (tap < TAPS) put_wanted(dweights, i64(channel) * TAPS + tap, sum, add_weights);
        else put_wanted(dbiases, channel, sum, add_biases);
    });
}
