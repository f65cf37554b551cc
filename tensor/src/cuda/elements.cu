// What tensors need of a device: copies of views, conversions, sums.
#include "rows.cuh"

// to[i] (+)= from[i] for the elements of two views in order. Without the sum it only moves bits, so T is any type of the
// right size.
template <typename T>
__global__ void put_view(const T* from, Layout source, T* to, Layout target, int accumulate, i64 count) {
    i64 i = first_element();
    if (i >= count) return;
    T value = from[source.place(i)];
    to += target.place(i);
    *to = accumulate ? narrow<T>(widen(*to) + widen(value)) : value;
}

// As `put_view`, where both views consist of whole packs.
template <typename T>
__global__ void put_packs(const T* from, Layout source, T* to, Layout target, int accumulate, i64 count) {
    constexpr int N = Pack<T>::size;
    i64 i = first_element() * N;
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

template <typename From, typename To>
__global__ void convert(const From* from, To* to, i64 count) {
    constexpr int N = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
    i64 i = first_element() * N;
    if (i >= count) return;
    Pack<From, N> in = load_pack<From, N>(from + i, count - i);
    Pack<To, N> out;
#pragma unroll
    for (int j = 0; j < N; j++) out.at[j] = narrow<To>(wide<To>(widen(in.at[j])));
    store_pack(to + i, out, count - i);
}

// y (R, C) += row (C)
template <typename T>
__global__ void add_row(T* y, const wide<T>* row, i64 rows, int columns, int across) {
    constexpr int N = Pack<T>::size;
    Part<T> part(rows, columns, across, blockIdx.x);
    wide<T> held[N];
    part.hold(row, held);
    for (i64 first = part.row; first < part.end; first += BATCH * part.step) {
        Pack<T> batch[BATCH];
        part.load(y, first, columns, batch);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            i64 at = first + b * part.step;
            if (at >= part.end) break;
#pragma unroll
            for (int j = 0; j < N; j++) batch[b].at[j] = narrow<T>(widen(batch[b].at[j]) + held[j]);
            store_pack(y + at * columns + part.column, batch[b], part.left);
        }
    }
}

// partial[piece][outer][column] = the sum of x (outer, rows, columns) over the piece's rows, in a fixed order.
template <typename T>
__global__ void sum_rows(const T* x, wide<T>* partial, int strips, i64 rows, int columns, int across) {
    constexpr int N = Pack<T>::size;
    i64 outer = blockIdx.x / strips, outers = gridDim.x / strips;
    Part<T> part(rows, columns, across, blockIdx.x % strips);
    wide<T> sums[N] = {};
    for (i64 row = part.row; row < part.end; row += BATCH * part.step) {
        Pack<T> batch[BATCH];
        part.load(x + outer * rows * columns, row, columns, batch);
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int j = 0; j < N; j++) sums[j] += widen(batch[b].at[j]); // zeros behind the end
    }
    wide<T> sum = part.add_up(sums, across);
    if (part.own >= 0) partial[(blockIdx.y * outers + outer) * columns + part.own] = sum;
}

// Sums that a block finishes, one to a warp in the end, and pieces that it adds up side by side.
constexpr int SUMS = 8, PIECES = 32;

// The sum of partial (pieces, count) over the pieces, in a fixed order: the first `split` sums are stored in or added to
// `first`, the others `second`. Either may be null.
template <typename T>
__global__ void finish_sums(const wide<T>* partial, int pieces, i64 count, i64 split, T* first, int accumulate_first,
                            T* second, int accumulate_second) {
    __shared__ wide<T> sums[PIECES][SUMS + 1]; // so that a warp finds its column in different banks
    i64 begin = i64(blockIdx.x) * SUMS, i = begin + threadIdx.x % SUMS;
    wide<T> sum = 0;
    if (i < count) {
#pragma unroll 8
        for (int piece = threadIdx.x / SUMS; piece < pieces; piece += PIECES) sum += partial[piece * count + i];
    }
    sums[threadIdx.x / SUMS][threadIdx.x % SUMS] = sum;
    __syncthreads();
    sum = warp_sum(sums[lane()][warp()]);
    i = begin + warp();
    if (lane() > 0 || i >= count) return;
    if (i < split && first) put(first + i, sum, accumulate_first);
    if (i >= split && second) put(second + i - split, sum, accumulate_second);
}

// y ← y + rate·(x − y)
template <typename T>
__global__ void move_towards(T* y, const T* x, const T* rate, i64 count) {
    i64 i = first_element();
    if (i < count) y[i] = fma(*rate, x[i] - y[i], y[i]);
}

template <typename T>
__global__ void fill_with(T* to, wide<T> value, i64 count) {
    i64 i = first_element();
    if (i < count) to[i] = narrow<T>(value);
}
