// y[n] (+)= residual[n] + scale·x[n] for the samples n (of `size` elements each) where the upper 24 bits of the stream's
// word first + n are the threshold or more, else residual[n], which is 0 if there is none. Each sample has the same number
// of blocks, one sample after another.
#include "words.cuh"

template <typename T>
__global__ void drop_path(const T* x, const T* residual, const u64* key, u64 seed, u64 stream, u32 threshold, wide<T> scale,
                          i64 first, T* y, int accumulate, i64 size, u32 blocks) {
    constexpr int N = Pack<T>::size;
    i64 sample = blockIdx.x / blocks;
    i64 i = (i64(blockIdx.x % blocks) * blockDim.x + threadIdx.x) * N, left = size - i;
    if (left <= 0) return;
    i64 at = sample * size + i;
    // Requested before the word is computed, which takes as long.
    Pack<T> own = load_pack(residual ? residual + at : x, residual ? left : 0);
    bool kept = Philox(key, seed, stream).word(first + sample) >> 8 >= threshold;
    if (!kept && !residual && accumulate) return;
    Pack<T> in = load_pack(x + at, kept ? left : 0), old = load_pack(y + at, accumulate ? left : 0);
    wide<T> values[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        values[j] = widen(own.at[j]);
        if (kept) values[j] += scale * widen(in.at[j]);
        if (accumulate) values[j] = widen(old.at[j]) + values[j];
    }
    Pack<u32> words = words_of<T>(values);
    if (left >= N && reinterpret_cast<u64>(y + at) % sizeof(words) == 0) {
        store_at_once(y + at, words.at);
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++)
        if (j < left) y[at + j] = narrow<T>(values[j]);
}
