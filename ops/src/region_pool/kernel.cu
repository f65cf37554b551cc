// A map (N, H, W, C), cut by a grid of `across` regions from left to right and `down` from top to bottom, each of h × w
// tokens. A thread has a pack of channels; `packs` of them make a token.

// Tokens whose loads are on their way together.
constexpr int TOGETHER = 4;

// y (N, P, C) = the mean over the tokens of each region of x, whose channels lie side by side.
template <typename T>
__global__ void region_pool_forward(const T* x, Layout map, T* y, i64 regions, int down, int across, int h, int w,
                                    int channels, int packs) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    i64 i = thread_number(), region = i / packs;
    int c = i % packs * N;
    if (region >= regions) return;
    i64 image = map.strides[2], row = map.strides[3], token = map.strides[4];
    int column = region % across, line = region / across % down;
    x += region / across / down * image + i64(line) * h * row + i64(column) * w * token + c;
    W sums[N] = {};
    for (int a = 0; a < h; a++) {
        W line[N] = {}; // by itself: rounding errors grow with the length of a chain of additions
        for (int b = 0; b < w; b += TOGETHER) {
            Pack<T> in[TOGETHER];
#pragma unroll
            for (int k = 0; k < TOGETHER; k++)
                if (b + k < w) in[k] = load_pack(x + a * row + (b + k) * token, channels - c);
#pragma unroll
            for (int k = 0; k < TOGETHER; k++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (b + k < w) line[j] += widen(in[k].at[j]);
        }
#pragma unroll
        for (int j = 0; j < N; j++) sums[j] += line[j];
    }
    W weight = W(1) / (i64(h) * w);
    Pack<T> out;
#pragma unroll
    for (int j = 0; j < N; j++) out.at[j] = narrow<T>(sums[j] * weight);
    store_pack(y + region * channels + c, out, channels - c);
}

// dx = dy / (r_h·r_w), the dy of each token's own region. One block per line of tokens, W·C elements; lines of tokens,
// and lines of regions, are numbered across all images.
template <typename T>
__global__ void region_pool_backward(const T* dy, T* dx, int accumulate, int across, int h, int w, int channels,
                                     int packs, int packs_of_line) {
    typedef wide<T> W;
    constexpr int N = Pack<T>::size;
    i64 line = blockIdx.x;
    W weight = W(1) / (i64(h) * w);
    dx += line * across * w * channels, dy += line / h * across * channels;
    for (int i = threadIdx.x; i < packs_of_line; i += blockDim.x) {
        int token = i / packs, c = i % packs * N;
        Pack<T> upstream = load_pack(dy + i64(token / w) * channels + c, channels - c);
        W values[N];
#pragma unroll
        for (int j = 0; j < N; j++) values[j] = widen(upstream.at[j]) * weight;
        put_pack(dx + i64(token) * channels + c, values, channels - c, accumulate);
    }
}
