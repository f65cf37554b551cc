// Where tokens, heads and regions lie in a (N, H, W, 2D + C) map of queries, keys and values: geometry.rs in CUDA.

#pragma once

// A divisor that the host knows: a GPU has no instruction for integer division, and the code that C++ generates takes a
// dozen instructions. With `magic` = ⌈2³¹⁺ˢ / by⌉ and s = ⌈log₂ by⌉, quotients of non-negative ints are exact.
struct Divisor {
    int by;
    u32 magic;
    int shift;

    __device__ __forceinline__ Divisor(int by, u32 magic) : by(by), magic(magic), shift(32 - __clz(by - 1)) {}
    __device__ __forceinline__ operator int() const { return by; }
};
__device__ __forceinline__ int operator/(int x, const Divisor& d) { return __umulhi(2 * u32(x), d.magic) >> d.shift; }
__device__ __forceinline__ int operator%(int x, const Divisor& d) { return x - x / d * d.by; }

struct Geometry {
    int rows;
    Divisor cols; // regions along H and W
    int region_height;
    Divisor region_width, region_tokens;
    int heads, head_dim, value_dim; // channels of a head's queries and keys, and of its values
    int topk;

    __device__ __forceinline__ int regions() const { return rows * cols; }
    __device__ __forceinline__ int width() const { return cols * region_width; }
    __device__ __forceinline__ i64 tokens() const { return i64(regions()) * region_tokens; }
    __device__ __forceinline__ int keys() const { return topk * region_tokens; }
    __device__ __forceinline__ int qk_dim() const { return heads * head_dim; } // D
    __device__ __forceinline__ int v_dim() const { return heads * value_dim; } // C
    __device__ __forceinline__ int row() const { return 2 * qk_dim() + v_dim(); }

    // The row and the column of a region's upper left corner, and the pixel of one of its tokens: that of its corner, and how
    // many pixels after it the token lies.
    __device__ __forceinline__ int top(int region) const { return region / cols * region_height; }
    __device__ __forceinline__ int left(int region) const { return region % cols * region_width; }
    __device__ __forceinline__ int corner(int region) const { return top(region) * width() + left(region); }
    __device__ __forceinline__ int after_corner(int token) const {
        return token / region_width * width() + token % region_width;
    }
    __device__ __forceinline__ int pixel(int region, int token) const { return corner(region) + after_corner(token); }
    // The pixel of a token, counted region after region.
    __device__ __forceinline__ int pixel_of(int token) const { return pixel(token / region_tokens, token % region_tokens); }
};

// The kernel parameters that describe a Geometry, and the Geometry that is built from them.
#define GEOMETRY                                                                                                \
    int rows, int cols, int region_height, int region_width, int heads, int head_dim, int value_dim, int topk, \
        u32 cols_magic, u32 width_magic, u32 tokens_magic
#define THE_GEOMETRY                                                                           \
    Geometry {                                                                                 \
        rows, {cols, cols_magic}, region_height, {region_width, width_magic},                  \
            {region_height * region_width, tokens_magic}, heads, head_dim, value_dim, topk      \
    }
