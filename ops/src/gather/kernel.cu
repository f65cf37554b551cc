// A thread has a pack of a row; `packs` of them make a row of D elements.

// y (N, Q, D) = the rows of x (N, R, D) that the indices (N, Q) name. An index out of range gives a row of NaN.
template <typename T>
__global__ void gather_forward(const T* x, const u32* indices, T* y, i64 positions, i64 picks, i64 rows, i64 width,
                               i64 packs) {
    i64 i = thread_number(), position = i / packs, d = i % packs * Pack<T>::size;
    if (position >= positions) return;
    u32 row = indices[position];
    Pack<T> pack;
    if (row < rows) {
        pack = load_pack(x + (position / picks * rows + row) * width + d, width - d);
    } else {
#pragma unroll
        for (int j = 0; j < Pack<T>::size; j++) pack.at[j] = narrow<T>(NAN);
    }
    store_pack(y + position * width + d, pack, width - d);
}

// dx (N, R, D) = for each row the sum of the rows of dy (N, Q, D) that were picked from it, in order.
template <typename T>
__global__ void gather_backward(const T* dy, const u32* indices, T* dx, int accumulate, i64 all_rows, i64 picks, i64 rows,
                                i64 width, i64 packs) {
    i64 i = thread_number(), row = i / packs, d = i % packs * Pack<T>::size;
    if (row >= all_rows) return;
    i64 image = row / rows;
    i64 own = row % rows;
    wide<T> sums[Pack<T>::size] = {};
    for (i64 position = image * picks; position < (image + 1) * picks; position++) {
        if (i64(indices[position]) != own) continue;
        Pack<T> upstream = load_pack(dy + position * width + d, width - d);
#pragma unroll
        for (int j = 0; j < Pack<T>::size; j++) sums[j] += widen(upstream.at[j]);
    }
    put_pack(dx + row * width + d, sums, width - d, accumulate);
}
