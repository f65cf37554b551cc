#include "loss.cuh"

// The targets of a row as they are.
template <typename W>
struct Soft {
    const W* t;

    __device__ __forceinline__ W operator()(int k) const { return t[k]; }
};

template <typename T>
__global__ void soft_cross_entropy_forward(const T* x, const wide<T>* t, wide<T>* p, wide<T>* losses, i64 rows,
                                           int classes) {
    i64 n = warp_number();
    if (n >= rows) return;
    Soft<wide<T>> target = {t + n * classes};
    row_loss(x + n * classes, target, p + n * classes, losses + n, rows, classes);
}

template <typename T>
__global__ void soft_cross_entropy_backward(const wide<T>* dy, const wide<T>* p, const wide<T>* t, T* dx, int accumulate,
                                            i64 rows, int classes) {
    i64 n = warp_number();
    if (n >= rows) return;
    Soft<wide<T>> target = {t + n * classes};
    row_gradient(p + n * classes, target, *dy / rows, dx + n * classes, accumulate, classes);
}
