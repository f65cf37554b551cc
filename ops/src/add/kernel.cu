// y = a + b, with broadcasting.
template <typename T>
__global__ void add_values(const T* a, Layout a_layout, const T* b, Layout b_layout, T* y, i64 count) {
    i64 i = first_element();
    if (i < count) y[i] = narrow<T>(widen(a[a_layout.place(i)]) + widen(b[b_layout.place(i)]));
}
