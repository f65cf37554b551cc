// Where tokens, heads and regions lie in a (N, H, W, 2D + C) map of queries, keys and values: geometry.rs in CUDA.

#pragma once

struct Geometry {
    int height, width; // H and W
    int rows, cols;    // regions along them
    int heads;
    int qk_dim, v_dim; // D and C, over all heads
    int topk;

    __device__ __forceinline__ int regions() const { return rows * cols; }
    __device__ __forceinline__ i64 tokens() const { return i64(height) * width; }
    __device__ __forceinline__ int region_height() const { return height / rows; }
    __device__ __forceinline__ int region_width() const { return width / cols; }
    __device__ __forceinline__ int region_tokens() const { return region_height() * region_width(); }
    __device__ __forceinline__ int keys() const { return topk * region_tokens(); }
    __device__ __forceinline__ int row() const { return 2 * qk_dim + v_dim; }
    __device__ __forceinline__ int head_dim() const { return qk_dim / heads; }
    __device__ __forceinline__ int value_dim() const { return v_dim / heads; }

    // The pixel of a region's token.
    __device__ __forceinline__ int pixel(int region, int token) const {
        int down = region / cols * region_height() + token / region_width();
        int across = region % cols * region_width() + token % region_width();
        return down * width + across;
    }
};

// The parameters of a kernel that make a Geometry, and the Geometry.
#define GEOMETRY int height, int width, int rows, int cols, int heads, int qk_dim, int v_dim, int topk
#define THE_GEOMETRY                                         \
    Geometry {                                               \
        height, width, rows, cols, heads, qk_dim, v_dim, topk \
    }
