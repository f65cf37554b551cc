#include "normal.cuh"
#include "rows.cuh"

// For each piece of the rows, its mean and its sum of squared deviations from that mean, (pieces, 2, C), in one pass.
// The sums are over deviations d from s, the mean of the piece's first batch: the mean is s + Σd/n, the sum of squares
// is Σd² − (Σd)²/n, and neither loses precision when the mean is far from zero.
template <typename T>
__global__ void batch_norm_statistics(const T* x, wide<T>* partial, i64 rows, int channels, int across) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    Tile<T> tile(rows, channels, across, blockIdx.x);
    __shared__ W near[THREADS];
    W shift[N] = {}, deviations[N] = {}, squares[N] = {};
    Pack<T> sample[BATCH];
    tile.load(x, tile.row, channels, sample);
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
        for (int j = 0; j < N; j++) shift[j] += widen(sample[b].at[j]); // zero behind the end
    }
    near[threadIdx.x] = tile.add_up(shift, across) / min(tile.end - tile.first, i64(BATCH * tile.step));
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) shift[j] = near[threadIdx.x % across * N + j];
    for (i64 row = tile.row; row < tile.end; row += BATCH * tile.step) {
        Pack<T> in[BATCH];
        tile.load(x, row, channels, in);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (row + b * tile.step >= tile.end) break;
#pragma unroll
            for (int j = 0; j < N; j++) {
                W deviation = widen(in[b].at[j]) - shift[j];
                deviations[j] += deviation;
                squares[j] += deviation * deviation;
            }
        }
    }
    W deviation = tile.add_up(deviations, across), square = tile.add_up(squares, across);
    if (tile.own < 0) return;
    W mean = deviation / (tile.end - tile.first);
    partial += i64(blockIdx.y) * 2 * channels + tile.own;
    partial[0] = near[threadIdx.x] + mean;
    partial[channels] = square - deviation * mean;
}

// Each channel's mean, unbiased variance and 1/√(biased variance + ε), combined from the pieces' moments, one warp per
// channel: the sum of squared deviations is that within the pieces, plus for each piece n times the squared deviation
// of its mean from the overall mean.
template <typename T>
__global__ void batch_norm_moments(const wide<T>* partial, int pieces, wide<T> epsilon, wide<T>* means, wide<T>* variances,
                                   wide<T>* rstds, i64 rows, int channels) {
    typedef wide<T> W;
    int channel = warp_number();
    if (channel >= channels) return;
    // The pieces begin at ⌊rows·piece/pieces⌋, as in `Tile`; without the divisions of 64 bits, which take a GPU long.
    const i64 least = rows / pieces;
    const u32 rest = rows - least * pieces;
    auto count = [&](u32 piece) { return W(least + (rest * (piece + 1) / pieces - rest * piece / pieces)); };
    auto mean_of = [&](i64 piece) { return partial[piece * 2 * channels + channel]; };
    W shift = mean_of(0), sum = 0, squares = 0;
    for (int piece = lane(); piece < pieces; piece += 32) sum += count(piece) * (mean_of(piece) - shift);
    W offset = warp_sum(sum) / rows;
    for (int piece = lane(); piece < pieces; piece += 32) {
        W deviation = mean_of(piece) - shift - offset;
        squares += partial[(i64(piece) * 2 + 1) * channels + channel] + count(piece) * deviation * deviation;
    }
    squares = warp_sum(squares);
    if (squares < 0) squares = 0; // only by rounding, in a constant channel
    if (lane() == 0) {
        means[channel] = shift + offset;
        variances[channel] = squares / (rows - 1);
        rstds[channel] = reciprocal_root(squares / rows + epsilon);
    }
}

// 1/√(variance + ε)
template <typename T>
__global__ void batch_norm_rstd(const wide<T>* variances, wide<T> epsilon, wide<T>* rstds, i64 channels) {
    i64 channel = thread_number();
    if (channel < channels) rstds[channel] = reciprocal_root(variances[channel] + epsilon);
}

// y = (x − μ)·γr + β, and GELU of that if it follows.
template <typename T, bool GELU>
__global__ void batch_norm_forward(const T* x, const wide<T>* weights, const wide<T>* biases, const wide<T>* means,
                                   const wide<T>* rstds, T* y, i64 rows, int channels, int across) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    Tile<T> tile(rows, channels, across, blockIdx.x);
    W weight[N], bias[N], mean[N], rstd[N];
    tile.hold(weights, weight), tile.hold(biases, bias), tile.hold(means, mean), tile.hold(rstds, rstd);
    for (i64 row = tile.row; row < tile.end; row += BATCH * tile.step) {
        Pack<T> in[BATCH];
        tile.load(x, row, channels, in);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            i64 at = row + b * tile.step;
            if (at >= tile.end) break;
            Pack<T> out;
#pragma unroll
            for (int j = 0; j < N; j++) {
                W value = (widen(in[b].at[j]) - mean[j]) * (weight[j] * rstd[j]) + bias[j];
                out.at[j] = narrow<T>(GELU ? gelu_of<T>(value) : value);
            }
            store_pack(y + at * channels + tile.column, out, tile.left);
        }
    }
}

// The gradient of a normalised value, from that of GELU of it if that follows.
template <typename T, bool GELU>
__device__ __forceinline__ wide<T> before_gelu(wide<T> dy, wide<T> value) {
    return GELU ? dy * gelu_slope(Normal<T>(value), value) : dy;
}

// Σ dn·x̂ and Σ dn, where dn is dy, or the gradient before GELU if that follows: written to `sums` (2, C), and to the
// parameters' gradients if those are wanted.
template <typename T, bool GELU>
__global__ void batch_norm_sums(const T* dy, const T* x, const wide<T>* weights, const wide<T>* biases,
                                const wide<T>* means, const wide<T>* rstds, wide<T>* partial, wide<T>* sums,
                                wide<T>* dweights, int add_weights, wide<T>* dbiases, int add_biases, i64 rows,
                                int channels, int across) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    Tile<T> tile(rows, channels, across, blockIdx.x);
    W scale[N] = {}, bias[N] = {}, mean[N], with_x[N] = {}, alone[N] = {};
    tile.hold(means, mean);
    if (GELU) {
        W rstd[N];
        tile.hold(weights, scale), tile.hold(rstds, rstd), tile.hold(biases, bias);
#pragma unroll
        for (int j = 0; j < N; j++) scale[j] *= rstd[j];
    }
    for (i64 row = tile.row; row < tile.end; row += BATCH * tile.step) {
        Pack<T> upstream[BATCH], in[BATCH];
        tile.load(dy, row, channels, upstream);
        tile.load(x, row, channels, in);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                W deviation = widen(in[b].at[j]) - mean[j];
                // dy is zero behind the end.
                W g = before_gelu<T, GELU>(widen(upstream[b].at[j]), deviation * scale[j] + bias[j]);
                with_x[j] += g * deviation;
                alone[j] += g;
            }
        }
    }
    W own[2] = {tile.add_up(with_x, across), tile.add_up(alone, across)};
    tile.finish(partial, own, channels, across, [&](int which, int channel, W sum) {
        if (which == 0) sum *= rstds[channel];
        sums[which * channels + channel] = sum;
        if (which == 0) put_wanted(dweights, channel, sum, add_weights);
        else put_wanted(dbiases, channel, sum, add_biases);
    });
}

// dx = γr·(dn − dβ/R − x̂·dγ/R), with dn as above, and dγ and dβ (2, C) in `sums`; in evaluation, where the statistics
// are given, `sums` is null and dx = γr·dn.
template <typename T, bool GELU>
__global__ void batch_norm_backward(const T* dy, const T* x, const wide<T>* weights, const wide<T>* biases,
                                    const wide<T>* means, const wide<T>* rstds, const wide<T>* sums, T* dx,
                                    int accumulate, i64 rows, int channels, int across) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    Tile<T> tile(rows, channels, across, blockIdx.x);
    // Per-channel coefficients: γr, dβ/R, and r·dγ/R, the factor on x − μ.
    W scale[N], bias[N] = {}, mean[N], rstd[N], by_mean[N] = {}, by_deviation[N] = {};
    tile.hold(weights, scale), tile.hold(means, mean), tile.hold(rstds, rstd);
    if (GELU) tile.hold(biases, bias);
    if (sums) tile.hold(sums, by_deviation), tile.hold(sums + channels, by_mean);
#pragma unroll
    for (int j = 0; j < N; j++) {
        scale[j] *= rstd[j];
        by_mean[j] /= rows;
        by_deviation[j] *= rstd[j] / rows;
    }
    const bool reads_x = GELU || sums;
    for (i64 row = tile.row; row < tile.end; row += BATCH * tile.step) {
        Pack<T> upstream[BATCH], in[BATCH];
        tile.load(dy, row, channels, upstream);
        if (reads_x) tile.load(x, row, channels, in);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            i64 at = row + b * tile.step;
            if (at >= tile.end) break;
            W values[N];
#pragma unroll
            for (int j = 0; j < N; j++) {
                W deviation = reads_x ? widen(in[b].at[j]) - mean[j] : W(0);
                W g = before_gelu<T, GELU>(widen(upstream[b].at[j]), deviation * scale[j] + bias[j]);
                W through = reads_x ? by_mean[j] + deviation * by_deviation[j] : W(0);
                values[j] = scale[j] * (g - through);
            }
            put_pack(dx + at * channels + tile.column, values, tile.left, accumulate);
        }
    }
}
