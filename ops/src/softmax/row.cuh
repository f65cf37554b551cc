// The reductions over a row x (C) that a warp needs to compute its softmax.
#pragma once

// max(x), in every lane.
template <typename T>
__device__ __forceinline__ wide<T> row_max(const T* x, int channels) {
    constexpr int N = Pack<T>::size;
    wide<T> largest = -INFINITY;
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> in = load_pack(x + c, channels - c);
#pragma unroll
        for (int j = 0; j < N; j++)
            if (c + j < channels) largest = max(largest, widen(in.at[j]));
    }
    return warp_max(largest);
}

// Σ exp(x − shift), in every lane.
template <typename T>
__device__ __forceinline__ wide<T> row_sum_of_exp(const T* x, wide<T> shift, int channels) {
    constexpr int N = Pack<T>::size;
    wide<T> sum = 0;
    for (int c = lane() * N; c < channels; c += 32 * N) {
        Pack<T> in = load_pack(x + c, channels - c);
#pragma unroll
        for (int j = 0; j < N; j++)
            if (c + j < channels) sum += exp(widen(in.at[j]) - shift);
    }
    return warp_sum(sum);
}
