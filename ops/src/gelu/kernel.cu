#include "normal.cuh"

// y = x·Φ(x)
template <typename T>
__global__ void gelu_forward(const T* x, T* y, i64 count) {
    i64 i = thread_number() * Pack<T>::size;
    if (i >= count) return;
    Pack<T> in = load_pack(x + i, count - i), out;
#pragma unroll
    for (int j = 0; j < Pack<T>::size; j++) {
        out.at[j] = narrow<T>(gelu_of<T>(widen(in.at[j])));
    }
    store_pack(y + i, out, count - i);
}

// dx = dy·(Φ(x) + x·φ(x)). If y is not null, it gets gelu(x) again, for a caller that did not keep it.
template <typename T>
__global__ void gelu_backward(const T* dy, const T* x, T* dx, int accumulate, T* y, i64 count) {
    typedef wide<T> W;
    i64 i = thread_number() * Pack<T>::size;
    if (i >= count) return;
    Pack<T> at = load_pack(x + i, count - i), upstream = load_pack(dy + i, count - i), again;
    W slopes[Pack<T>::size];
#pragma unroll
    for (int j = 0; j < Pack<T>::size; j++) {
        W value = widen(at.at[j]);
        Normal<T> normal(value);
        slopes[j] = widen(upstream.at[j]) * gelu_slope(normal, value);
        again.at[j] = narrow<T>(value * normal.distribution);
    }
    if (y) store_pack(y + i, again, count - i);
    put_pack(dx + i, slopes, count - i, accumulate);
}
