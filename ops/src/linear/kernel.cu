// The gradients of a weight (O, I) and a bias (O) from tall maps dy (R, O) and x (R, I).
#include "rows.cuh"
#include "tall.cuh"

// The partial sums of the pieces: see `tall::multiply`.
__global__ void __launch_bounds__(tall::MOST_THREADS, 1)
    linear_backward_weight(const bf16* dy, const bf16* x, float* partial, int biased, i64 rows, int outputs, int inputs,
                           int tall, int wide) {
    auto column = [&](int c, i64 row, int step) { return tall::Rows(x, inputs, c, row, step); };
    tall::multiply(dy, column, partial, biased, rows, outputs, inputs, tall, wide);
}

// dweight (O, I) and dbias (O), if there is one: the sums of partial (pieces, O·I + O) over the pieces.
template <typename T>
__global__ void linear_add_pieces(const float* partial, T* dweight, int accumulate, T* dbias, int accumulate_bias,
                                  int weights, i64 pieces, int columns, int across) {
    constexpr int N = Pack<float>::size;
    Tile<float> tile(pieces, columns, across, blockIdx.x);
    float sums[N] = {};
    for (i64 piece = tile.row; piece < tile.end; piece += BATCH * tile.step) {
        Pack<float> batch[BATCH];
        tile.load(partial, piece, columns, batch);
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int j = 0; j < N; j++) sums[j] += batch[b].at[j]; // zeros beyond the end
    }
    const float sum = tile.add_up(sums, across);
    if (tile.own < 0) return;
    if (tile.own < weights) put(dweight + tile.own, sum, accumulate);
    else put(dbias + (tile.own - weights), sum, accumulate_bias);
}
