// One warp per row, which is read from memory once, and then again from the cache.
#include "row.cuh"

// y = exp(x − max(x)) / Σ exp(x − max(x))
template <typename T>
__global__ void softmax_forward(const T* x, T* y, i64 rows, int channels) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    i64 row = warp_number();
    if (row >= rows) return;
    x += row * channels, y += row * channels;
    W shift = row_max(x, channels), inverse = W(1) / row_sum_of_exp(x, shift, channels);
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> in = load_pack(x + c, channels - c), out;
#pragma unroll
        for (int j = 0; j < N; j++) out.at[j] = narrow<T>(exp(widen(in.at[j]) - shift) * inverse);
        store_pack(y + c, out, channels - c);
    }
}

// dx = y·(dy − Σ dy·y). As Σ y = 1, any constant may be subtracted from dy first. If it is the dy of the largest y,
// which may be 1 − 1e-3 rounded to 1, the sum contains only the terms of the others, and the difference does not suffer
// from that rounding.
template <typename T>
__global__ void softmax_backward(const T* dy, const T* y, T* dx, int accumulate, i64 rows, int channels) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    i64 row = warp_number();
    if (row >= rows) return;
    dy += row * channels, y += row * channels, dx += row * channels;
    W largest = 0, offset = 0, sum = 0;
    auto consider = [&](W value, W upstream) {
        if (value > largest || (value == largest && upstream > offset)) largest = value, offset = upstream;
    };
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> upstream = load_pack(dy + c, channels - c), value = load_pack(y + c, channels - c);
#pragma unroll
        for (int j = 0; j < N; j++) consider(widen(value.at[j]), widen(upstream.at[j])); // zeros past the end
    }
    for (int step = 16; step > 0; step /= 2) {
        W value = __shfl_xor_sync(~0u, largest, step), upstream = __shfl_xor_sync(~0u, offset, step);
        consider(value, upstream);
    }
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> upstream = load_pack(dy + c, channels - c), value = load_pack(y + c, channels - c);
#pragma unroll
        for (int j = 0; j < N; j++) sum += (widen(upstream.at[j]) - offset) * widen(value.at[j]);
    }
    W delta = warp_sum(sum);
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> upstream = load_pack(dy + c, channels - c), value = load_pack(y + c, channels - c);
        W values[N];
#pragma unroll
        for (int j = 0; j < N; j++) values[j] = widen(value.at[j]) * (widen(upstream.at[j]) - offset - delta);
        put_pack(dx + c, values, channels - c, accumulate);
    }
}
