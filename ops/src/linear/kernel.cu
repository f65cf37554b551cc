// y (R, O) += bias (O), which is as long as a row.
template <typename T>
__global__ void add_bias(T* y, const wide<T>* bias, i64 count, int outputs) {
    constexpr int N = Pack<T>::size;
    i64 i = first_element() * N;
    if (i >= count) return;
    Pack<T> pack = load_pack(y + i, count - i);
    int column = i % outputs;
#pragma unroll
    for (int j = 0; j < N; j++) {
        pack.at[j] = narrow<T>(widen(pack.at[j]) + bias[column]);
        column = column + 1 == outputs ? 0 : column + 1;
    }
    store_pack(y + i, pack, count - i);
}
