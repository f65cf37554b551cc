// What every kernel begins with: types, conversions, reductions, and the few instructions that C++ has no words for.
//
// The same kernel source is compiled twice: by NVRTC for a GPU, and by the system's C++ compiler for the emulated
// device (`emulated/device.h`), where every CUDA thread is a fiber. All that differs between the two is here, except
// for tensor cores and asynchronous copies (`instructions.cuh`) and a fence and a load (`sums.cuh`); the kernels
// themselves are plain CUDA C++. No header of the CUDA toolkit is needed.
//
// A template parameter T is float, double or bf16, the type of the activations. Sums, statistics, and the parameters that
// are not matrices are `wide<T>`: double for double, float for the other two.
#pragma once

#ifdef EMULATED
#include "device.h"
#else
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) unsigned char name##_bytes[]; \
    type* name = reinterpret_cast<type*>(name##_bytes)
#endif

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

// bfloat16: the upper half of a float.
struct bf16 {
    unsigned short bits;
};

template <typename T>
struct Wide {
    typedef T type;
};
template <>
struct Wide<bf16> {
    typedef float type;
};
template <typename T>
using wide = typename Wide<T>::type;

__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

// Rounds to the nearest value of T, ties to even.
template <typename T>
__device__ __forceinline__ T narrow(wide<T> x) {
    return x;
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float x) {
    bf16 rounded;
#ifdef EMULATED
    rounded.bits = emulated::round_to_bf16(x);
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(x));
#endif
    return rounded;
}

// a·b, rounded: the compiler may not contract it into a fused multiply-add.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// 1/√spread; NaN if that is infinite, as where squares have overflowed: zeros would pass for results.
template <typename W>
__device__ __forceinline__ W reciprocal_root(W spread) {
    return rsqrt(spread) + spread * 0;
}

// A gradient's first contribution is stored, and later ones are added.
template <typename T>
__device__ __forceinline__ void put(T* to, wide<T> value, int accumulate) {
    *to = narrow<T>(accumulate ? widen(*to) + value : value);
}

// The same of a gradient that perhaps nobody wants: then `to` is null.
template <typename T>
__device__ __forceinline__ void put_wanted(T* to, i64 i, wide<T> value, int accumulate) {
    if (to) put(to + i, value, accumulate);
}

// The number of this thread in a one-dimensional grid.
__device__ __forceinline__ i64 thread_number() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }
__device__ __forceinline__ u32 warp() { return threadIdx.x / 32; }

// The number of this warp along the first axis of the grid: its row, where each row has a warp.
__device__ __forceinline__ i64 warp_number() { return i64(blockIdx.x) * (blockDim.x / 32) + warp(); }

// The sum of a warp's values, in every lane of it; the same order on every device.
template <typename W>
__device__ __forceinline__ W warp_sum(W value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

template <typename W>
__device__ __forceinline__ W warp_max(W value) {
    for (int step = 16; step > 0; step /= 2) {
        W other = __shfl_xor_sync(~0u, value, step);
        value = other > value ? other : value;
    }
    return value;
}

// The sum of a block's values, in every thread of it. `partial` has room for a value per warp.
template <typename W>
__device__ __forceinline__ W block_sum(W value, W* partial) {
    value = warp_sum(value);
    __syncthreads();
    if (lane() == 0) partial[warp()] = value;
    __syncthreads();
    W sum = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) sum += partial[i];
    return sum;
}

// Elements that one instruction loads or stores: 16 bytes by default.
template <typename T, int N = 16 / sizeof(T)>
struct __align__(N * sizeof(T)) Pack {
    static constexpr int size = N;
    T at[N];
};

// Loads a pack from `from` on, or the elements that are left, padded with zeros. Both branches produce whole words: if
// they produced halves, the compiler would split the words within the branch, and wait there for each load before the
// next one.
template <typename T, int N = Pack<T>::size>
__device__ __forceinline__ Pack<T, N> load_pack(const T* from, i64 left) {
    union Loaded {
        Pack<T, N> pack;
        struct __align__(sizeof(Pack<T, N>)) {
            u32 at[sizeof(Pack<T, N>) / sizeof(u32)];
        } words;
    } loaded;
    if (left >= N && reinterpret_cast<u64>(from) % sizeof(loaded) == 0) {
        loaded.words = reinterpret_cast<const Loaded*>(from)->words;
    } else {
        Loaded each;
#pragma unroll
        for (int i = 0; i < N; i++) each.pack.at[i] = i < left ? from[i] : narrow<T>(0);
        loaded.words = each.words;
    }
    return loaded.pack;
}

// Writes as many elements of a pack as are left.
template <typename T, int N>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, N>& pack, i64 left) {
    if (left >= N && reinterpret_cast<u64>(to) % sizeof(pack) == 0) {
        *reinterpret_cast<Pack<T, N>*>(to) = pack;
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i < left) to[i] = pack.at[i];
}

// As `put`, a pack at a time.
template <typename T>
__device__ __forceinline__ void put_pack(T* to, const wide<T> (&values)[Pack<T>::size], i64 left, int accumulate) {
    Pack<T> old, pack;
    if (accumulate) old = load_pack(to, left);
#pragma unroll
    for (int i = 0; i < Pack<T>::size; i++) pack.at[i] = narrow<T>(accumulate ? widen(old.at[i]) + values[i] : values[i]);
    store_pack(to, pack, left);
}

// Any view of up to six axes: extents and strides in elements, outermost axis first.
struct Layout {
    i64 extents[6], strides[6];

    // The offset of element i in order. The loop ends at the first axis within which the rest of i fits.
    __device__ __forceinline__ i64 place(i64 i) const {
        i64 offset = 0;
#pragma unroll
        for (int axis = 5; axis > 0; axis--) {
            if (i < extents[axis]) return offset + i * strides[axis];
            i64 outer = i / extents[axis];
            offset += (i - outer * extents[axis]) * strides[axis];
            i = outer;
        }
        return offset + i * strides[0];
    }
};

// A stream of random numbers, the same as in `rng.rs`: Philox4x32-10, a function of seed, stream and position alone.
struct Philox {
    u64 seed, stream;

    // Recorded work reads the key of each replay from memory.
    __device__ __forceinline__ Philox(const u64* key, u64 seed, u64 stream)
        : seed(key ? key[0] : seed), stream(key ? key[1] : stream) {}

    struct Words {
        u32 at[4];
    };

    // The four random words at a position.
    __device__ __forceinline__ Words block(u64 position) const {
        Words c = {{u32(position), u32(position >> 32), u32(stream), u32(stream >> 32)}};
        u32 key[2] = {u32(seed), u32(seed >> 32)};
#pragma unroll
        for (int round = 0; round < 10; round++) {
            u32 p0 = 0xD2511F53u * c.at[0], p0_high = __umulhi(0xD2511F53u, c.at[0]);
            u32 p1 = 0xCD9E8D57u * c.at[2], p1_high = __umulhi(0xCD9E8D57u, c.at[2]);
            c = {{p1_high ^ c.at[1] ^ key[0], p1, p0_high ^ c.at[3] ^ key[1], p0}};
            key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
        }
        return c;
    }

    // The index-th word of the stream.
    __device__ __forceinline__ u32 word(u64 index) const { return block(index / 4).at[index % 4]; }
};
