// Sums over the blocks of a launch, finished within the launch. Each block writes its partial sums to memory and takes
// a ticket; the block with the last ticket adds up all partial sums, in a fixed order, so that it does not matter which
// block it is. Very many blocks are reduced in two levels, first within groups and then across them: a single block
// would read for longer than another launch takes to start.
#pragma once

// Counters of tickets, as in `sums.rs`.
constexpr int COUNTERS = 2048;
// How many tickets have been taken. All are zero between two launches of a loaded module: they run one after the other, as
// each stream loads its own, and each resets its counters.
__device__ u32 counters[COUNTERS];

// Orders what this thread does in memory before it, as all threads of the GPU see it, before what it does after. (CUDA's
// own fence also puts all fences of all threads into one order, which takes longer.)
__device__ __forceinline__ void fence() {
#ifdef EMULATED
    __threadfence();
#else
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// Whether this block is the last of `blocks` to arrive here. If so, it sees what the others wrote before, except
// through the L1 cache: the first barrier orders a block's writes before thread 0's fence, which orders them before its
// ticket; in the last block, a fence and a barrier order the ticket before its reads.
__device__ __forceinline__ bool last_block(int counter, u32 blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        fence();
        last = blocks == 1 || atomicInc(counters + counter, blocks - 1) == blocks - 1; // the last one leaves a zero
        fence();
    }
    __syncthreads();
    return last;
}

// Loads a pack that another block wrote, from the L2 cache, which all blocks share.
template <typename W>
__device__ __forceinline__ Pack<W> load_fresh(const W* from) {
    Pack<W> pack;
#ifdef EMULATED
    pack = *reinterpret_cast<const Pack<W>*>(from);
#else
    u32* words = reinterpret_cast<u32*>(&pack);
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
#endif
    return pack;
}

// The address of a block's piece in partial (pieces, count), whose rows are padded to whole packs. They are read as
// packs, so a block writes all of its piece, with zeros as padding: otherwise a checker would rightly report reads of
// uninitialised memory.
template <typename W>
__device__ __forceinline__ W* piece_of(W* partial, i64 piece, int count) {
    constexpr int M = Pack<W>::size;
    return partial + piece * ((count + M - 1) / M * M);
}

// Pieces that a thread asks for at once.
constexpr int TOGETHER = 8;

// Once every block has written its piece of partial (pieces, count), calls put(i, sum) for each sum over the pieces.
// Blocks with another `strip` belong to other sums, with other memory. So that few sums occupy all threads as well,
// `sharers` lanes of a warp take turns at the pieces of a pack, whose other lanes have `width` neighbouring packs.
template <typename W, typename Put>
__device__ __forceinline__ void finish_sums(W* partial, int count, int piece, int pieces, int strip, Put put) {
    constexpr int M = Pack<W>::size;
    int packs = (count + M - 1) / M, sharers = 1;
    while (sharers < 32 && 2 * sharers * packs <= int(blockDim.x)) sharers *= 2;
    int width = 32 / sharers, turn = lane() / width;
    int size = 2 * TOGETHER * sharers; // of a group: at least the number of groups
    while (size * size < pieces) size *= 2;
    int counter = strip * ((pieces + size - 1) / size + 1);
    for (int step = 1;; step *= size) { // a sum is left every `step` pieces
        int groups = (pieces + step * size - 1) / (step * size), group = piece / (step * size);
        int first = group * step * size, members = min((pieces - first + step - 1) / step, size);
        if (!last_block(counter + group, members)) return;
        W* left = piece_of(partial, first, count);
        for (int base = warp() * width; base < packs; base += blockDim.x / sharers) {
            int pack = base + lane() % width, i = pack * M;
            Pack<W> sums = {};
            // Several loads are issued before the first is waited for, also for the last few pieces.
            for (int member = turn; member < members; member += TOGETHER * sharers) {
                Pack<W> asked[TOGETHER] = {};
#pragma unroll
                for (int k = 0; k < TOGETHER; k++) {
                    int next = member + k * sharers;
                    if (next < members && pack < packs) asked[k] = load_fresh(piece_of(left, next * step, count) + i);
                }
#pragma unroll
                for (int k = 0; k < TOGETHER; k++)
#pragma unroll
                    for (int j = 0; j < M; j++) sums.at[j] += asked[k].at[j];
            }
            for (int apart = width; apart < 32; apart *= 2)
#pragma unroll
                for (int j = 0; j < M; j++) sums.at[j] += __shfl_xor_sync(~0u, sums.at[j], apart);
            if (turn > 0 || pack >= packs) continue;
            if (groups > 1) {
                store_pack(left + i, sums, M);
                continue;
            }
#pragma unroll
            for (int j = 0; j < M; j++)
                if (i + j < count) put(i + j, sums.at[j]);
        }
        if (groups == 1) return;
        counter += groups;
    }
}
