// Matrices of patches: row (n, i, j) of `patches` (N·HO·WO, P) holds what output pixel (i, j) sees of image n of
// x (N, H, W, I), with zeros for the padding p around the image. P is KH·KW·I, and as many more that are zero as it takes
// for each row to begin where a pack does: products read no others fast.

// patches[n, i, j][a, b, c] = x[n, i·s + a − p, j·s + b − p, c]: a block has a row of output pixels. Of a row of x a row of
// the kernel sees a run of neighbouring elements.
template <typename T>
__global__ void conv2d_patches(const T* x, T* patches, int height, int width, int inputs, int down, int across,
                               int out_height, u32 out_count, u32 patch, int stride, int padding) {
    constexpr int N = Pack<T>::size;
    i64 image = blockIdx.x / out_height, row = i64(blockIdx.x % out_height) * stride - padding;
    i64 row_size = i64(width) * inputs;
    u32 run = across * inputs;
    x += image * height * row_size;
    patches += i64(blockIdx.x) * out_count;
    // Where element `place` of the row's patches is copied from; null for a zero.
    auto source = [&](u32 place) -> const T* {
        u32 element = place % patch, a = element / run;
        i64 offset = (i64(place / patch) * stride - padding) * inputs + element % run;
        bool inside = a < down && row + a >= 0 && row + a < height && offset >= 0 && offset < row_size;
        return inside ? x + (row + a) * row_size + offset : nullptr;
    };
    for (u32 place = threadIdx.x * N; place < out_count; place += blockDim.x * N) {
        Pack<T> pack = {};
        if (inputs % N == 0) { // then they lie together
            if (const T* from = source(place)) pack = load_pack(from, N);
        } else {
#pragma unroll
            for (int k = 0; k < N; k++) {
                if (place + k >= out_count) break;
                if (const T* from = source(place + k)) pack.at[k] = *from;
            }
        }
        store_pack(patches + place, pack, out_count - place);
    }
}

// dx[n, i, j] (+)= the sum of dpatches over all places that x[n, i, j] was copied to, tap by tap: tap (a, b) of the output
// pixel ((i + p − a)/s, (j + p − b)/s), where there is one. A block has a row of x.
template <typename T>
__global__ void conv2d_gather(const T* dpatches, T* dx, int accumulate, int height, int width, int inputs, int down,
                              int across, int out_height, int out_width, i64 patch, int stride, int padding) {
    constexpr int N = Pack<T>::size;
    int packs = (inputs + N - 1) / N;
    i64 image = blockIdx.x / height, row = i64(blockIdx.x % height) + padding;
    dpatches += image * out_height * out_width * patch;
    dx += i64(blockIdx.x) * width * inputs;
    for (i64 item = threadIdx.x; item < i64(width) * packs; item += blockDim.x) {
        i64 column = item / packs + padding;
        int c = item % packs * N;
        wide<T> sums[N] = {};
        for (i64 a = row % stride, i = row / stride; a < down && i >= 0; a += stride, i--) {
            if (i >= out_height) continue;
            for (i64 b = column % stride, j = column / stride; b < across && j >= 0; b += stride, j--) {
                if (j >= out_width) continue;
                const T* from = dpatches + (i * out_width + j) * patch + (a * across + b) * inputs + c;
                Pack<T> pack = load_pack(from, inputs - c);
#pragma unroll
                for (int k = 0; k < N; k++) sums[k] += widen(pack.at[k]);
            }
        }
        put_pack(dx + item / packs * inputs + c, sums, inputs - c, accumulate);
    }
}
