// Data as rows of channels, x (R, C). A block has a piece of the rows and `across` packs of neighbouring channels. Each of
// its threads keeps to one pack, whose parameters it holds, and takes every `step`-th row of the piece.

constexpr int THREADS = 256;
// Rows that a thread asks for before it looks at the first, so that the memory has enough to do.
constexpr int BATCH = 4;

template <typename T>
struct Part {
    i64 first, row, end; // the piece's first row, this thread's, and the end of the piece
    int step, channel, left; // the thread's first channel, and how many there are from it on

    __device__ __forceinline__ Part(i64 rows, int channels, int across) {
        i64 piece = blockIdx.y, pieces = gridDim.y;
        int place = threadIdx.x / across;
        step = THREADS / across;
        channel = (blockIdx.x * across + threadIdx.x % across) * Pack<T>::size;
        left = channels - channel;
        first = rows * piece / pieces;
        end = rows * (piece + 1) / pieces;
        row = place < step ? first + place : end; // no rows for threads that are too many
    }

    // This thread's channels of a batch of rows of x; zeros for rows behind the end.
    __device__ __forceinline__ void load(const T* x, i64 row, int channels, Pack<T> (&batch)[BATCH]) const {
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            i64 at = row + b * step;
            batch[b] = load_pack(x + at * channels + channel, at < end ? left : 0);
        }
    }

    // The thread's channels of a parameter (C).
    __device__ __forceinline__ void hold(const wide<T>* parameter, wide<T> (&values)[Pack<T>::size]) const {
#pragma unroll
        for (int j = 0; j < Pack<T>::size; j++) values[j] = j < left ? parameter[channel + j] : wide<T>(0);
    }
};

template <typename W>
struct Sums {
    int channel; // below zero where the thread has none
    W a, b;
};

// Adds two values per channel up over the rows of a block, in order. Each channel's sums come to one thread.
template <typename T>
__device__ __forceinline__ Sums<wide<T>> add_up(const wide<T> (&a)[Pack<T>::size], const wide<T> (&b)[Pack<T>::size],
                                                int channels, int across) {
    constexpr int N = Pack<T>::size;
    __shared__ wide<T> values[2][THREADS * N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        values[0][threadIdx.x * N + j] = a[j];
        values[1][threadIdx.x * N + j] = b[j];
    }
    __syncthreads();
    int width = across * N, channel = blockIdx.x * width + threadIdx.x;
    Sums<wide<T>> sums = {-1, 0, 0};
    if (threadIdx.x >= width || channel >= channels) return sums;
    sums.channel = channel;
    for (int place = threadIdx.x; place < THREADS / across * width; place += width) {
        sums.a += values[0][place];
        sums.b += values[1][place];
    }
    return sums;
}

// Per piece of the rows its mean, and the squares about it, (pieces, 2, C), in one pass. What is summed are deviations d
// from the mean s of the piece's first batch: the mean is s + Σd/n, the squares are Σd² − (Σd)²/n, and neither loses
// digits to a mean far from zero.
template <typename T>
__global__ void batch_norm_statistics(const T* x, wide<T>* partial, i64 rows, int channels, int across) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    Part<T> part(rows, channels, across);
    __shared__ W near[THREADS];
    W shift[N] = {}, deviations[N] = {}, squares[N] = {};
    Pack<T> sample[BATCH];
    part.load(x, part.row, channels, sample);
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
        for (int j = 0; j < N; j++) shift[j] += widen(sample[b].at[j]); // zero behind the end
    }
    near[threadIdx.x] = add_up<T>(shift, shift, channels, across).a / min(part.end - part.first, i64(BATCH * part.step));
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) shift[j] = near[threadIdx.x % across * N + j];
    for (i64 row = part.row; row < part.end; row += BATCH * part.step) {
        Pack<T> in[BATCH];
        part.load(x, row, channels, in);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (row + b * part.step >= part.end) break;
#pragma unroll
            for (int j = 0; j < N; j++) {
                W deviation = widen(in[b].at[j]) - shift[j];
                deviations[j] += deviation;
                squares[j] += deviation * deviation;
            }
        }
    }
    Sums<W> sums = add_up<T>(deviations, squares, channels, across);
    if (sums.channel < 0) return;
    W mean = sums.a / (part.end - part.first);
    partial += i64(blockIdx.y) * 2 * channels + sums.channel;
    partial[0] = near[threadIdx.x] + mean;
    partial[channels] = sums.b - sums.a * mean;
}

// Each channel's mean, unbiased variance and 1/√(biased variance + ε) from those of the pieces, a warp to a channel: the
// squares about the mean are those about the pieces' means, and for each piece n times its mean's own squared deviation.
template <typename T>
__global__ void batch_norm_moments(const wide<T>* partial, int pieces, wide<T> epsilon, wide<T>* means, wide<T>* variances,
                                   wide<T>* rstds, i64 rows, int channels) {
    typedef wide<T> W;
    int channel = blockIdx.x * (blockDim.x / 32) + warp();
    if (channel >= channels) return;
    auto count = [&](i64 piece) { return W(rows * (piece + 1) / pieces - rows * piece / pieces); };
    auto mean_of = [&](i64 piece) { return partial[piece * 2 * channels + channel]; };
    W shift = mean_of(0), sum = 0, squares = 0;
    for (int piece = lane(); piece < pieces; piece += 32) sum += count(piece) * (mean_of(piece) - shift);
    W offset = warp_sum(sum) / rows;
    for (int piece = lane(); piece < pieces; piece += 32) {
        W deviation = mean_of(piece) - shift - offset;
        squares += partial[(i64(piece) * 2 + 1) * channels + channel] + count(piece) * deviation * deviation;
    }
    squares = warp_sum(squares);
    if (squares < 0) squares = 0; // a constant channel, rounded
    if (lane() == 0) {
        means[channel] = shift + offset;
        variances[channel] = squares / (rows - 1);
        rstds[channel] = W(1) / sqrt(squares / rows + epsilon);
    }
}

// 1/√(variance + ε)
template <typename T>
__global__ void batch_norm_rstd(const wide<T>* variances, wide<T> epsilon, wide<T>* rstds, i64 channels) {
    i64 channel = first_element();
    if (channel < channels) rstds[channel] = wide<T>(1) / sqrt(variances[channel] + epsilon);
}

// y = (x − μ)·γr + β
template <typename T>
__global__ void batch_norm_forward(const T* x, const wide<T>* weights, const wide<T>* biases, const wide<T>* means,
                                   const wide<T>* rstds, T* y, i64 rows, int channels, int across) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    Part<T> part(rows, channels, across);
    W weight[N], bias[N], mean[N], rstd[N];
    part.hold(weights, weight), part.hold(biases, bias), part.hold(means, mean), part.hold(rstds, rstd);
    for (i64 row = part.row; row < part.end; row += BATCH * part.step) {
        Pack<T> in[BATCH];
        part.load(x, row, channels, in);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            i64 at = row + b * part.step;
            if (at >= part.end) break;
            Pack<T> out;
#pragma unroll
            for (int j = 0; j < N; j++) {
                out.at[j] = narrow<T>((widen(in[b].at[j]) - mean[j]) * (weight[j] * rstd[j]) + bias[j]);
            }
            store_pack(y + at * channels + part.channel, out, part.left);
        }
    }
}

// Per piece of the rows Σ dy·x̂ and Σ dy, (pieces, 2, C).
template <typename T>
__global__ void batch_norm_sums(const T* dy, const T* x, const wide<T>* means, const wide<T>* rstds, wide<T>* partial,
                                i64 rows, int channels, int across) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    Part<T> part(rows, channels, across);
    W mean[N], with_x[N] = {}, alone[N] = {};
    part.hold(means, mean);
    for (i64 row = part.row; row < part.end; row += BATCH * part.step) {
        Pack<T> upstream[BATCH], in[BATCH];
        part.load(dy, row, channels, upstream);
        part.load(x, row, channels, in);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                W g = widen(upstream[b].at[j]); // zero behind the end
                with_x[j] += g * (widen(in[b].at[j]) - mean[j]);
                alone[j] += g;
            }
        }
    }
    Sums<W> sums = add_up<T>(with_x, alone, channels, across);
    if (sums.channel < 0) return;
    partial += i64(blockIdx.y) * 2 * channels + sums.channel;
    partial[0] = sums.a * rstds[sums.channel];
    partial[channels] = sums.b;
}

// dx = γr·(dy − dβ/R − x̂·dγ/R), with dγ and dβ (2, C) in `sums`; where the statistics came from outside it is null, and
// dx = γr·dy.
template <typename T>
__global__ void batch_norm_backward(const T* dy, const T* x, const wide<T>* weights, const wide<T>* means,
                                    const wide<T>* rstds, const wide<T>* sums, T* dx, int accumulate, i64 rows,
                                    int channels, int across) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    Part<T> part(rows, channels, across);
    // What is left of the parameters: γr, dβ/R, and r·dγ/R, which is what a deviation from the mean costs.
    W scale[N], mean[N], rstd[N], by_mean[N] = {}, by_deviation[N] = {};
    part.hold(weights, scale), part.hold(means, mean), part.hold(rstds, rstd);
    if (sums) part.hold(sums, by_deviation), part.hold(sums + channels, by_mean);
#pragma unroll
    for (int j = 0; j < N; j++) {
        scale[j] *= rstd[j];
        by_mean[j] /= rows;
        by_deviation[j] *= rstd[j] / rows;
    }
    for (i64 row = part.row; row < part.end; row += BATCH * part.step) {
        Pack<T> upstream[BATCH], in[BATCH];
        part.load(dy, row, channels, upstream);
        if (sums) part.load(x, row, channels, in);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            i64 at = row + b * part.step;
            if (at >= part.end) break;
            W values[N];
#pragma unroll
            for (int j = 0; j < N; j++) {
                W through = sums ? by_mean[j] + (widen(in[b].at[j]) - mean[j]) * by_deviation[j] : W(0);
                values[j] = scale[j] * (widen(upstream[b].at[j]) - through);
            }
            put_pack(dx + at * channels + part.channel, values, part.left, accumulate);
        }
    }
}
