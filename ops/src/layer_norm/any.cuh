// Rows of any length and alignment: one warp per row of x, which it reads from memory once, and then again from the
// cache.
#pragma once

// γ·x̂ + β
template <typename T>
__device__ __forceinline__ void normalise(const T* x, const wide<T>* weight, const wide<T>* bias, wide<T> mean, wide<T> rstd,
                                          T* y, int channels) {
    constexpr int N = Pack<T>::size;
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> in = load_pack(x + c, channels - c), out;
#pragma unroll
        for (int j = 0; j < N; j++) {
            int channel = min(c + j, channels - 1);
            out.at[j] = narrow<T>((widen(in.at[j]) - mean) * rstd * weight[channel] + bias[channel]);
        }
        store_pack(y + c, out, channels - c);
    }
}

template <typename T>
__global__ void layer_norm_forward_any(const T* x, const wide<T>* weight, const wide<T>* bias, wide<T> epsilon, T* y,
                                   wide<T>* means, wide<T>* rstds, i64 rows, int channels) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    i64 row = warp_number();
    if (row >= rows) return;
    x += row * channels;
    // The mean is a distance from the row's first element, so that in a row of equal ones it is exact.
    W first = widen(x[0]), sum = 0;
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> in = load_pack(x + c, channels - c);
#pragma unroll
        for (int j = 0; j < N; j++) sum += c + j < channels ? widen(in.at[j]) - first : W(0);
    }
    W mean = first + warp_sum(sum) / channels, squares = 0;
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> in = load_pack(x + c, channels - c);
#pragma unroll
        for (int j = 0; j < N; j++) {
            W deviation = c + j < channels ? widen(in.at[j]) - mean : W(0);
            squares += deviation * deviation;
        }
    }
    W rstd = reciprocal_root(warp_sum(squares) / channels + epsilon);
    if (lane() == 0) {
        means[row] = mean;
        rstds[row] = rstd;
    }
    normalise(x, weight, bias, mean, rstd, y + row * channels, channels);
}

template <typename T>
__global__ void layer_norm_recompute_any(const T* x, const wide<T>* weight, const wide<T>* bias, const wide<T>* means,
                                 const wide<T>* rstds, T* y, i64 rows, int channels) {
    i64 row = warp_number();
    if (row >= rows) return;
    normalise(x + row * channels, weight, bias, means[row], rstds[row], y + row * channels, channels);
}

// dx = r·(g − mean(g) − x̂·mean(g·x̂)), g = γ·dy. Of a single channel g is its own mean, and dx must be exactly 0: were
// the product fused into the subtraction of its rounded mean, its rounding error would remain, times r.
template <typename T>
__global__ void layer_norm_backward_any(const T* dy, const T* x, const wide<T>* weight, const wide<T>* means,
                                    const wide<T>* rstds, T* dx, int accumulate, i64 rows, int channels) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    i64 row = warp_number();
    if (row >= rows) return;
    dy += row * channels, x += row * channels, dx += row * channels;
    W mean = means[row], rstd = rstds[row], sum_g = 0, sum_gx = 0;
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> upstream = load_pack(dy + c, channels - c), in = load_pack(x + c, channels - c);
#pragma unroll
        for (int j = 0; j < N; j++) {
            W g = rounded_product(widen(upstream.at[j]), weight[min(c + j, channels - 1)]); // zero past the end
            sum_g += g;
            sum_gx += g * (widen(in.at[j]) - mean);
        }
    }
    W mean_g = warp_sum(sum_g) / channels, mean_gx = warp_sum(sum_gx) * rstd / channels;
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> upstream = load_pack(dy + c, channels - c), in = load_pack(x + c, channels - c);
        W values[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            W g = rounded_product(widen(upstream.at[j]), weight[min(c + j, channels - 1)]);
            values[j] = rstd * (g - mean_g - (widen(in.at[j]) - mean) * rstd * mean_gx);
        }
        put_pack(dx + c, values, channels - c, accumulate);
    }
}

// Σ dy·x̂ and Σ dy over each piece of the rows, partial (pieces, 2, C): a block takes 32 columns, and 8 rows at a time.
template <typename T>
__global__ void layer_norm_parameters_any(const T* dy, const T* x, const wide<T>* means, const wide<T>* rstds,
                                      wide<T>* partial, i64 rows, int channels) {
    typedef wide<T> W;
    __shared__ W sums[2][8][32];
    int first = blockIdx.x * 32, channel = first + lane();
    i64 pieces = gridDim.y, piece = blockIdx.y;
    i64 end = rows * (piece + 1) / pieces;
    W dweight = 0, dbias = 0;
    if (channel < channels) {
        for (i64 row = rows * piece / pieces + warp(); row < end; row += 8) {
            W upstream = widen(dy[row * channels + channel]);
            dweight += upstream * (widen(x[row * channels + channel]) - means[row]) * rstds[row];
            dbias += upstream;
        }
    }
    sums[0][warp()][lane()] = dweight;
    sums[1][warp()][lane()] = dbias;
    __syncthreads();
    if (warp() >= 2 || channel >= channels) return;
    W sum = 0;
    for (int i = 0; i < 8; i++) sum += sums[warp()][i][lane()];
    partial[(2 * piece + warp()) * channels + channel] = sum;
}
