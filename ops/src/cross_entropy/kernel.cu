// A warp to a row. Of the targets of a row, `target(k)` is tₖ for class k.
#include "row.cuh"

// The row's part of the mean loss, (Σt·ln Σ exp(x − m) − Σ t·(x − m))/N with m = max(x); p (K) takes softmax(x).
template <typename T, typename Target>
__device__ __forceinline__ void row_loss(const T* x, const Target& target, wide<T>* p, wide<T>* loss, i64 rows,
                                         int classes) {
    typedef wide<T> W;
    W shift = row_max(x, classes), sum = row_sum_of_exp(x, shift, classes), mass = 0, mean = 0;
    for (int k = lane(); k < classes; k += 32) {
        W t = target(k), above = widen(x[k]) - shift;
        mass += t;
        if (t != 0) mean += t * above; // a class without weight does not count, not even as 0·∞
        p[k] = exp(above) / sum;
    }
    mass = warp_sum(mass), mean = warp_sum(mean);
    if (lane() == 0) *loss = (mass * log(sum) - mean) / rows;
}

// dx (K) = factor·(p·Σt − t)
template <typename T, typename Target>
__device__ __forceinline__ void row_gradient(const wide<T>* p, const Target& target, wide<T> factor, T* dx,
                                             int accumulate, int classes) {
    wide<T> mass = 0;
    for (int k = lane(); k < classes; k += 32) mass += target(k);
    mass = warp_sum(mass);
    for (int k = lane(); k < classes; k += 32) put(dx + k, factor * (p[k] * mass - target(k)), accumulate);
}

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
