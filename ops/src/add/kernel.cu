// y = a + b, with broadcasting.
template <typename T>
__global__ void add_values(const T* a, Layout a_layout, const T* b, Layout b_layout, T* y, i64 count) {
    i64 i = thread_number();
    if (i < count) y[i] = narrow<T>(widen(a[a_layout.place(i)]) + widen(b[b_layout.place(i)]));
}

// The same where all three are contiguous and of one shape.
template <typename T>
__global__ void add_packs(const T* a, const T* b, T* y, i64 count) {
    constexpr int N = Pack<T>::size;
    i64 i = thread_number() * N;
    if (i >= count) return;
    Pack<T> left = load_pack(a + i, count - i), right = load_pack(b + i, count - i), out;
#pragma unroll
    for (int j = 0; j < N; j++) out.at[j] = narrow<T>(widen(left.at[j]) + widen(right.at[j]));
    store_pack(y + i, out, count - i);
}
