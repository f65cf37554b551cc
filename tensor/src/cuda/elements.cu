// What tensors need of a device: copies of views, conversions, sums.

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
    for (i64 i = first_element(); i < count; i += all_threads()) to[i] = narrow<To>(wide<To>(widen(from[i])));
}

// y (R, C) += row (C)
template <typename T>
__global__ void add_row(T* y, const wide<T>* row, i64 count, int columns) {
    constexpr int N = Pack<T>::size;
    i64 i = first_element() * N;
    if (i >= count) return;
    Pack<T> pack = load_pack(y + i, count - i);
    int column = i % columns;
#pragma unroll
    for (int j = 0; j < N; j++) {
        pack.at[j] = narrow<T>(widen(pack.at[j]) + row[column]);
        column = column + 1 == columns ? 0 : column + 1;
    }
    store_pack(y + i, pack, count - i);
}

// Columns and rows of a block that adds rows up.
constexpr int COLUMNS = 32, ROWS = 8;

// partial[piece][outer][column] = the sum of x (outer, rows, columns) over the piece's rows, in a fixed order.
template <typename T>
__global__ void sum_rows(const T* x, wide<T>* partial, i64 rows, int columns, int pieces) {
    __shared__ wide<T> sums[ROWS][COLUMNS];
    u32 strips = (columns + COLUMNS - 1) / COLUMNS;
    int column = blockIdx.x % strips * COLUMNS + threadIdx.x % COLUMNS, row = threadIdx.x / COLUMNS;
    i64 piece = blockIdx.y, outer = blockIdx.x / strips, outers = gridDim.x / strips;
    i64 begin = rows * piece / pieces, end = rows * (piece + 1) / pieces;
    wide<T> sum = 0;
    if (column < columns) {
        for (i64 r = begin + row; r < end; r += ROWS) sum += widen(x[(outer * rows + r) * columns + column]);
    }
    sums[row][threadIdx.x % COLUMNS] = sum;
    __syncthreads();
    if (row == 0 && column < columns) {
        for (int r = 1; r < ROWS; r++) sum += sums[r][threadIdx.x];
        partial[(piece * outers + outer) * columns + column] = sum;
    }
}

// to[i] (+)= the sum of partial[piece][i] over the pieces, in a fixed order; partial sums lie `stride` elements apart.
template <typename T>
__global__ void finish_sums(const wide<T>* partial, int pieces, i64 stride, T* to, int accumulate, i64 count) {
    __shared__ wide<T> sums[ROWS][COLUMNS];
    int column = threadIdx.x % COLUMNS, row = threadIdx.x / COLUMNS;
    i64 i = i64(blockIdx.x) * COLUMNS + column;
    wide<T> sum = 0;
    if (i < count) {
        for (int piece = row; piece < pieces; piece += ROWS) sum += partial[piece * stride + i];
    }
    sums[row][column] = sum;
    __syncthreads();
    if (row == 0 && i < count) {
        for (int r = 1; r < ROWS; r++) sum += sums[r][column];
        put(to + i, sum, accumulate);
    }
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
