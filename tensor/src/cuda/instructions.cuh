// Instructions that C++ has no words for: tensor cores, the loads that feed them, asynchronous copies.
//
// A warp holds a matrix in fragments. With g = lane / 4 and p = lane % 4, an 8x8 matrix of bf16 takes one register per
// lane, which holds row g, columns 2p and 2p + 1. A product takes A (16x16) as four such registers: the quadrants top
// left, bottom left, top right, bottom right. It takes B (16x8) as two registers, which hold the transposes of its
// upper and lower half (column g, rows 2p and 2p + 1). It gives D (16x8) as four floats: row g, columns 2p and 2p + 1,
// then row g + 8, the same columns.
#pragma once

// Two floats as bf16, the first in the lower half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
#ifdef EMULATED
    return u32(emulated::round_to_bf16(low)) | u32(emulated::round_to_bf16(high)) << 16;
#else
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#endif
}

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
    return pack_bf16(low_half(a) + low_half(b), high_half(a) + high_half(b));
}

// D += A·B
__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef EMULATED
    emulated::multiply_add(d, a, b);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// D = A·B
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef EMULATED
    d[0] = d[1] = d[2] = d[3] = 0;
    emulated::multiply_add(d, a, b);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %10, %10, %10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
#endif
}

// Four 8x8 matrices from shared memory: lane l names row l % 8 of matrix l / 8, 16 bytes, aligned. A constant number of
// elements that the row lies `after` the given address is part of the instruction, if it is not added to that before.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const bf16* row, int after = 0) {
#ifdef EMULATED
    emulated::load_matrices(to, row + after, false);
#else
    u32 address = __cvta_generic_to_shared(row) + after * sizeof(bf16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
#endif
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(u32 (&to)[4], const bf16* row, int after = 0) {
#ifdef EMULATED
    emulated::load_matrices(to, row + after, true);
#else
    u32 address = __cvta_generic_to_shared(row) + after * sizeof(bf16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
#endif
}

// An 8x8 matrix, transposed in the warp's registers.
__device__ __forceinline__ u32 transpose(u32 matrix) {
#ifdef EMULATED
    return emulated::transpose(matrix);
#else
    u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
#endif
}

// Where four lanes share a row of 64 bytes: the row of the i-th four. Two fours access shared memory at a time, and rows an
// odd number of 16 bytes apart have banks in common if they are neighbours, but none if they are four rows apart.
__device__ __forceinline__ int copied_row(int i) { return (i & ~7) | (i & 1) << 2 | (i >> 1 & 3); }

// Starts an asynchronous copy of 16 bytes from global to shared memory, or of zeros unless `exists`.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool exists) {
#ifdef EMULATED
    emulated::copy_async(shared, global, exists);
#else
    u32 address = __cvta_generic_to_shared(shared);
    int bytes = exists ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
#endif
}

// The same by way of the L1 cache, for what this block will soon copy again.
__device__ __forceinline__ void copy_async_cached(void* shared, const void* global, bool exists) {
#ifdef EMULATED
    emulated::copy_async(shared, global, exists);
#else
    u32 address = __cvta_generic_to_shared(shared);
    int bytes = exists ? 16 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
#endif
}

// Stores 16 or 8 bytes with one instruction. (The compiler would store a value that was assembled from halves in two
// halves, and one that is added to under a condition word by word.)
__device__ __forceinline__ void store_at_once(void* global, const u32 (&words)[4]) {
#ifdef EMULATED
    emulated::store_at_once(global, words);
#else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
#endif
}

__device__ __forceinline__ void store_at_once(void* global, const u32 (&words)[2]) {
#ifdef EMULATED
    emulated::store_at_once(global, words);
#else
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(global), "r"(words[0]), "r"(words[1]) : "memory");
#endif
}

// Prefetches the cache line at an address into L2, without waiting.
__device__ __forceinline__ void prefetch(const void* global) {
#ifdef EMULATED
    (void)global;
#else
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#endif
}

// Waits for all copies that this thread has started. Copies by other threads are visible only after a barrier.
__device__ __forceinline__ void wait_for_copies() {
#ifdef EMULATED
    emulated::wait_for_copies();
#else
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Makes a group of the copies that this thread has started since its last group. There may be none.
__device__ __forceinline__ void group_copies() {
#ifdef EMULATED
    emulated::group_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// As `wait_for_copies`, for all of this thread's groups but the last N.
template <int N>
__device__ __forceinline__ void wait_for_groups_but() {
#ifdef EMULATED
    emulated::wait_for_groups_but(N);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// 2ˣ, to 2 ulp; 0 for −∞.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// log₂ x, to 2⁻²² or 2 ulp.
__device__ __forceinline__ float log2_fast(float x) {
#ifdef EMULATED
    return log2f(x);
#else
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// 1/x, to 1 ulp; 0 for infinity.
__device__ __forceinline__ float reciprocal_fast(float x) {
#ifdef EMULATED
    return 1 / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
