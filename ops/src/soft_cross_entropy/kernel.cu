#include "record.cuh"

// The targets of a record as they are.
template <typename W>
struct Soft {
    const W* t;

    __device__ __forceinline__ W operator()(int k) const { return t[k]; }
};

template <typename T>
__global__ void soft_cross_entropy_forward(const T* x, const wide<T>* t, wide<T>* p, wide<T>* losses, i64 records,
                                           int classes) {
    i64 n = own_record();
    if (n >= records) return;
    Soft<wide<T>> target = {t + n * classes};
    lose(x + n * classes, target, p + n * classes, losses + n, records, classes);
}

template <typename T>
__global__ void soft_cross_entropy_backward(const wide<T>* dy, const wide<T>* p, const wide<T>* t, T* dx, int accumulate,
                                            i64 records, int classes) {
    i64 n = own_record();
    if (n >= records) return;
    Soft<wide<T>> target = {t + n * classes};
    blame(p + n * classes, target, *dy / records, dx + n * classes, accumulate, classes);
}
