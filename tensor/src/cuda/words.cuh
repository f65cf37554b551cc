// Packs as words. Of a pack of halves that is loaded or stored under a condition, the compiler would move one half at a
// time, and wait for each load before the next one (see also `load_pack`); so such packs are moved as words, and only
// what computes knows their elements.
#pragma once
#include "instructions.cuh"

// Element j of a pack of T.
template <typename T>
__device__ __forceinline__ wide<T> element(const Pack<u32>& words, int j) {
    return reinterpret_cast<const T*>(words.at)[j];
}
template <>
__device__ __forceinline__ float element<bf16>(const Pack<u32>& words, int j) {
    return j % 2 ? high_half(words.at[j / 2]) : low_half(words.at[j / 2]);
}

// A pack of T with these elements.
template <typename T>
__device__ __forceinline__ Pack<u32> words_of(const wide<T> (&values)[Pack<T>::size]) {
    union {
        T at[Pack<T>::size];
        Pack<u32> words;
    } pack;
#pragma unroll
    for (int j = 0; j < Pack<T>::size; j++) pack.at[j] = values[j];
    return pack.words;
}
template <>
__device__ __forceinline__ Pack<u32> words_of<bf16>(const float (&values)[8]) {
    Pack<u32> words;
#pragma unroll
    for (int i = 0; i < 4; i++) words.at[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
    return words;
}
