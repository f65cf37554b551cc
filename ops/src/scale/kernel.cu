// y (+)= factor·x
template <typename T>
__global__ void scale_values(const T* x, wide<T> factor, T* y, int accumulate, i64 count) {
    i64 i = thread_number() * Pack<T>::size;
    if (i >= count) return;
    Pack<T> in = load_pack(x + i, count - i);
    wide<T> values[Pack<T>::size];
#pragma unroll
    for (int j = 0; j < Pack<T>::size; j++) values[j] = factor * widen(in.at[j]);
    put_pack(y + i, values, count - i, accumulate);
}
