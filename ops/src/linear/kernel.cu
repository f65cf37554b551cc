// The gradients of a weight (O, I) and a bias (O) from tall maps dy (R, O) and x (R, I).
#include "tall.cuh"

// The partial sums of the pieces: see `tall::multiply`.
__global__ void __launch_bounds__(tall::MOST_THREADS, 1)
    linear_backward_weight(const bf16* dy, const bf16* x, float* partial, int biased, i64 rows, int outputs, int inputs,
                           int tall, int wide) {
    auto column = [&](int c, i64 row, int step) { return tall::Rows(x, inputs, c, row, step); };
    tall::multiply(dy, column, partial, biased, rows, outputs, inputs, tall, wide);
}
