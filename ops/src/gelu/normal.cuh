// GELU and its slope, by the normal distribution, for every kernel that computes them.
#pragma once
#include "instructions.cuh"

// Φ(x) and φ(x), the distribution function and the density of the standard normal distribution.
template <typename T>
struct Normal {
    wide<T> distribution, density;

    __device__ __forceinline__ explicit Normal(wide<T> x)
        : distribution(wide<T>(0.5) * (1 + erf(x * wide<T>(0.70710678118654752440)))),
          density(wide<T>(0.39894228040143267794) * exp(wide<T>(-0.5) * x * x)) {}
};

// In bf16 both share an exponential: Φ(−a) = t·Q(t)·exp(−a²/2) for a ≥ 0, with t = 1/(1 + 0.31a) and a polynomial Q
// whose relative error is at most 4.7e-6. Including intermediate rounding, the relative errors of Φ and φ stay below
// 1e-5 for |x| ≤ 12, 1/400 of the error of rounding to bf16.
template <>
struct Normal<bf16> {
    float distribution, density;

    __device__ __forceinline__ explicit Normal(float x) {
        float power = exp2_fast(x * x * -0.72134752f), t = reciprocal_fast(1 + 0.31f * fabsf(x));
        float q = 0.12386070f + t * (0.12044133f + t * (0.13342955f + t * (0.015745189f + t * (0.18044990f - t * 0.07392898f))));
        float tail = t * q * power;
        distribution = x < 0 ? tail : 1 - tail;
        density = 0.39894228f * power;
    }
};

// x·Φ(x)
template <typename T>
__device__ __forceinline__ wide<T> gelu_of(wide<T> x) {
    return x * Normal<T>(x).distribution;
}

// Its slope Φ(x) + x·φ(x)
template <typename T>
__device__ __forceinline__ wide<T> gelu_slope(Normal<T> normal, wide<T> x) {
    return normal.distribution + x * normal.density;
}
