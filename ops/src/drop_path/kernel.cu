// y[n] (+)= residual[n] + scale·x[n] for the samples n (of `size` elements each) where the upper 24 bits of the stream's
// word first + n are the threshold or more, else residual[n], which is 0 if there is none. Each sample has the same number
// of blocks, one sample after another.
template <typename T>
__global__ void drop_path(const T* x, const T* residual, const u64* key, u64 seed, u64 stream, u32 threshold, wide<T> scale,
                          i64 first, T* y, int accumulate, i64 size, u32 blocks) {
    constexpr int N = Pack<T>::size;
    i64 sample = blockIdx.x / blocks;
    i64 i = (i64(blockIdx.x % blocks) * blockDim.x + threadIdx.x) * N;
    if (i >= size) return;
    bool kept = Philox(key, seed, stream).word(first + sample) >> 8 >= threshold;
    if (!kept && !residual && accumulate) return;
    wide<T> values[N] = {};
    if (residual) {
        Pack<T> in = load_pack(residual + sample * size + i, size - i);
#pragma unroll
        for (int j = 0; j < N; j++) values[j] = widen(in.at[j]);
    }
    if (kept) {
        Pack<T> in = load_pack(x + sample * size + i, size - i);
#pragma unroll
        for (int j = 0; j < N; j++) values[j] += scale * widen(in.at[j]);
    }
    put_pack(y + sample * size + i, values, size - i, accumulate);
}
