// What tensors need of a device: copies of views, conversions, sums.
#include "rows.cuh"

// to[i] = from[i], or += if `accumulate`, for the elements of two views in order. Without accumulation it only moves
// bits, so T may be any type of the right size.
template <typename T>
__global__ void put_view(const T* from, Layout source, T* to, Layout target, int accumulate, i64 count) {
    i64 i = thread_number();
    if (i >= count) return;
    T value = from[source.place(i)];
    to += target.place(i);
    *to = accumulate ? narrow<T>(widen(*to) + widen(value)) : value;
}

// As `put_view`, where both views consist of whole packs.
template <typename T>
__global__ void put_packs(const T* from, Layout source, T* to, Layout target, int accumulate, i64 count) {
    constexpr int N = Pack<T>::size;
    i64 i = thread_number() * N;
    if (i >= count) return;
    Pack<T> pack = load_pack(from + source.place(i), N);
    to += target.place(i);
    if (accumulate) {
        Pack<T> old = load_pack(to, N);
#pragma unroll
        for (int j = 0; j < N; j++) pack.at[j] = narrow<T>(widen(old.at[j]) + widen(pack.at[j]));
    }
    store_pack(to, pack, N);
}

// What is to be narrowed to `To`. A double on its way to bf16 is first rounded to odd, so that the second rounding sees
// what the first one drops (as on the CPU, `rounding.rs`).
template <typename To, typename W>
__device__ __forceinline__ wide<To> to_be_narrowed(W x) {
    return wide<To>(x);
}
template <>
__device__ __forceinline__ float to_be_narrowed<bf16, double>(double x) {
    const float near = float(x);
    if (double(near) == x || x != x) return near;
    return __uint_as_float((__float_as_uint(near) - (fabs(double(near)) > fabs(x))) | 1);
}

// A thread converts a pack of the narrower type, and so loads or stores two or four of the wider one: with fewer bytes on
// their way for each thread, starting threads takes longer than moving what they move.
template <typename From, typename To>
__global__ void convert(const From* from, To* to, i64 count) {
    constexpr int N = 16 / (sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
    i64 i = thread_number() * N;
    if (i >= count) return;
    Pack<From, N> in = load_pack<From, N>(from + i, count - i);
    Pack<To, N> out;
#pragma unroll
    for (int j = 0; j < N; j++) out.at[j] = narrow<To>(to_be_narrowed<To>(widen(in.at[j])));
    store_pack(to + i, out, count - i);
}

// y (R, C) += row (C)
template <typename T>
__global__ void add_row(T* y, const wide<T>* row, i64 rows, int columns, int across) {
    constexpr int N = Pack<T>::size;
    Tile<T> tile(rows, columns, across, blockIdx.x);
    wide<T> held[N];
    tile.hold(row, held);
    for (i64 first = tile.row; first < tile.end; first += BATCH * tile.step) {
        Pack<T> batch[BATCH];
        tile.load(y, first, columns, batch);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            i64 at = first + b * tile.step;
            if (at >= tile.end) break;
#pragma unroll
            for (int j = 0; j < N; j++) batch[b].at[j] = narrow<T>(widen(batch[b].at[j]) + held[j]);
            store_pack(y + at * columns + tile.column, batch[b], tile.left);
        }
    }
}

// out (outer, columns) = the sum of x (outer, rows, columns) over the rows, in a fixed order.
template <typename T, typename Out>
__global__ void sum_rows(const T* x, wide<T>* partial, Out* out, int accumulate, int strips, i64 rows, int columns,
                         int across) {
    constexpr int N = Pack<T>::size;
    i64 outer = blockIdx.x / strips;
    Tile<T> tile(rows, columns, across, blockIdx.x % strips);
    wide<T> sums[N] = {};
    for (i64 row = tile.row; row < tile.end; row += BATCH * tile.step) {
        Pack<T> batch[BATCH];
        tile.load(x + outer * rows * columns, row, columns, batch);
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int j = 0; j < N; j++) sums[j] += widen(batch[b].at[j]); // zeros beyond the end
    }
    wide<T> sum[1] = {tile.add_up(sums, across)};
    tile.finish(partial, sum, columns, across, [&](int, int column, wide<T> sum) {
        put(out + outer * columns + column, wide<Out>(sum), accumulate);
    });
}

// The sums of x (pieces, columns) over the pieces, in a fixed order: those of the columns before `split` go to `first`, and
// the others to `last`; either may be null.
template <typename T, typename Out>
__global__ void add_pieces(const T* x, Out* first, int add_first, Out* last, int add_last, int split, i64 pieces,
                           int columns, int across) {
    constexpr int N = Pack<T>::size;
    Tile<T> tile(pieces, columns, across, blockIdx.x);
    T sums[N] = {};
    for (i64 piece = tile.row; piece < tile.end; piece += BATCH * tile.step) {
        Pack<T> batch[BATCH];
        tile.load(x, piece, columns, batch);
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int j = 0; j < N; j++) sums[j] += batch[b].at[j]; // zeros beyond the end
    }
    const wide<Out> sum = tile.add_up(sums, across);
    if (tile.own < 0) return;
    if (tile.own < split) put_wanted(first, tile.own, sum, add_first);
    else put_wanted(last, tile.own - split, sum, add_last);
}

// y ← y + rate·(x − y)
template <typename T>
__global__ void move_towards(T* y, const T* x, const T* rate, i64 count) {
    i64 i = thread_number();
    if (i < count) y[i] = fma(*rate, x[i] - y[i], y[i]);
}

template <typename T>
__global__ void fill_with(T* to, wide<T> value, i64 count) {
    i64 i = thread_number();
    if (i < count) to[i] = narrow<T>(value);
}
