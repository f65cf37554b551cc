// Matrices x (R, C). A block processes a piece of the rows and `across` packs of neighbouring columns. Each of its
// threads processes one pack, whose parameters it keeps in registers, in every `step`-th row of the piece. `rows.rs`
// chooses these numbers.
#pragma once
#include "sums.cuh"

constexpr int THREADS = 256;
// Rows that a thread loads before it uses the first, to have enough loads in flight.
constexpr int BATCH = 4;

template <typename T>
struct Tile {
    typedef wide<T> W;
    static constexpr int N = Pack<T>::size;
    i64 first, row, end; // the piece's first row, this thread's, and the end of the piece
    int step, begin; // the block's first column
    int column, left; // the thread's, and how many there are from it on
    int own; // the column whose sum this thread gets; negative if none

    // `strip` says which of all packs of columns are the block's, and blockIdx.y which piece of the rows.
    __device__ __forceinline__ Tile(i64 rows, int columns, int across, int strip) {
        i64 piece = blockIdx.y, pieces = gridDim.y;
        int place = threadIdx.x / across;
        begin = strip * across * N;
        step = THREADS / across;
        column = begin + threadIdx.x % across * N;
        left = columns - column;
        own = begin + int(threadIdx.x);
        if (own >= min(columns, begin + across * N)) own = -1;
        first = rows * piece / pieces;
        end = rows * (piece + 1) / pieces;
        row = place < step ? first + place : end; // surplus threads get no rows
    }

    // This thread's columns of a batch of rows of x; zeros for rows beyond the end.
    __device__ __forceinline__ void load(const T* x, i64 row, int columns, Pack<T> (&batch)[BATCH]) const {
        i64 apart = i64(step) * columns;
        x += row * columns + column;
#pragma unroll
        for (int b = 0; b < BATCH; b++, x += apart) batch[b] = load_pack(x, row + b * step < end ? left : 0);
    }

    // Loads this thread's columns of a parameter (C).
    __device__ __forceinline__ void hold(const W* parameter, W (&values)[N]) const {
        constexpr int M = Pack<W>::size;
#pragma unroll
        for (int j = 0; j < N; j += M) {
            Pack<W> pack = load_pack(parameter + column + j, left - j);
#pragma unroll
            for (int i = 0; i < M; i++) values[j + i] = pack.at[i];
        }
    }

    // The sum of the block's values for column `own`, in order of the rows. A warp reads all N values of 32 / N threads
    // at once: the padding puts them into different banks.
    __device__ __forceinline__ W add_up(const W (&values)[N], int across) const {
        __shared__ W shared[N][THREADS + 32 / N];
        __syncthreads(); // the sums before this one are done
#pragma unroll
        for (int j = 0; j < N; j++) shared[j][threadIdx.x] = values[j];
        __syncthreads();
        W sum = 0;
        if (own < 0) return sum;
        const W* column = shared[threadIdx.x % N] + threadIdx.x / N;
#pragma unroll 8
        for (int place = 0; place < step; place++) sum += column[place * across];
        return sum;
    }

    // Finishes V sums of each column over all blocks with the same blockIdx.x: `sums` are this block's partial sums of
    // column `own`, `partial` is workspace. Calls put(v, column, sum) for each.
    template <int V, typename Put>
    __device__ __forceinline__ void finish(W* partial, const W (&sums)[V], int columns, int across, Put put) const {
        int width = across * N;
        partial = piece_of(partial, i64(blockIdx.x) * gridDim.y, V * width);
        W* piece = piece_of(partial, blockIdx.y, V * width);
#pragma unroll
        for (int v = 0; v < V; v++)
            if (int(threadIdx.x) < width) piece[v * width + threadIdx.x] = sums[v];
        finish_sums(partial, V * width, blockIdx.y, gridDim.y, blockIdx.x, [&](int i, W sum) {
            if (begin + i % width < columns) put(i / width, begin + i % width, sum);
        });
    }
};
