#include "loss.cuh"

// t = (1 − s)·[k = label] + s/K; NaN if the label is not a valid class.
template <typename W>
struct Smoothed {
    u32 label;
    W hit, everywhere;

    __device__ __forceinline__ Smoothed(u32 label, W smoothing, int classes)
        : label(label), hit(W(1) - smoothing), everywhere(label < u32(classes) ? smoothing / classes : W(NAN)) {}

    __device__ __forceinline__ W operator()(int k) const { return everywhere + (u32(k) == label ? hit : W(0)); }
};

template <typename T>
__global__ void cross_entropy_forward(const T* x, const u32* labels, wide<T> smoothing, wide<T>* p, wide<T>* losses,
                                      i64 rows, int classes) {
    i64 n = warp_number();
    if (n >= rows) return;
    Smoothed<wide<T>> target(labels[n], smoothing, classes);
    row_loss(x + n * classes, target, p + n * classes, losses + n, rows, classes);
}

template <typename T>
__global__ void cross_entropy_backward(const wide<T>* dy, const wide<T>* p, const u32* labels, wide<T> smoothing, T* dx,
                                       int accumulate, i64 rows, int classes) {
    i64 n = warp_number();
    if (n >= rows) return;
    Smoothed<wide<T>> target(labels[n], smoothing, classes);
    row_gradient(p + n * classes, target, *dy / rows, dx + n * classes, accumulate, classes);
}
