// y[i] (+)= scale·x[i] where the upper 24 bits of the stream's i-th word are the threshold or more, else 0.
template <typename T>
__global__ void dropout(const T* x, const u64* key, u64 seed, u64 stream, u32 threshold, wide<T> scale, T* y, int accumulate, i64 count) {
    constexpr int N = Pack<T>::size;
    i64 i = thread_number() * N;
    if (i >= count) return;
    Philox rng(key, seed, stream);
    Pack<T> in = load_pack(x + i, count - i);
    Philox::Words words;
    wide<T> values[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j % 4 == 0) words = rng.block((i + j) / 4);
        // A selection, not a factor of 0, which would turn infinities and NaN into NaN.
        values[j] = words.at[(i + j) & 3] >> 8 >= threshold ? scale * widen(in.at[j]) : wide<T>(0);
    }
    put_pack(y + i, values, count - i, accumulate);
}
