// The cross-entropy of a row by a warp, for any targets: a `target` gives tₖ for class k.
#pragma once
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
