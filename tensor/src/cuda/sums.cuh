// Sums over the blocks of a launch, which the launch finishes itself. Each block leaves in memory what it has added up, and
// takes a ticket; the block with the last ticket adds up what all have left, in the order of the blocks, so it does not
// matter which one it is. Of many blocks a group at a time is added up so, and then the groups: a block alone would read
// for longer than another launch takes to begin.
#pragma once

// Counters of tickets, as in `sums.rs`.
constexpr int COUNTERS = 2048;
// Tickets that were taken. All are zero between two launches: these come one after the other, and leave zeros.
__device__ u32 counters[COUNTERS];

// Whether this block is the last of so many to come here. If so it sees what they wrote before, except through the
// first-level cache: the first barrier hands a block's writes to thread 0, whose fence puts them before its ticket; on the
// other side it is the same the other way round.
__device__ __forceinline__ bool last_block(int counter, u32 blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = blocks == 1 || atomicInc(counters + counter, blocks - 1) == blocks - 1; // the last one leaves a zero
        __threadfence();
    }
    __syncthreads();
    return last;
}

// A pack that another block wrote, from the second-level cache, which all blocks share.
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

// Where the piece of a block lies in partial (pieces, count), whose rows are whole packs. They are read as packs: so a
// block writes all of its piece, zeros where nothing belongs, or reports of reading what nobody wrote would be true.
template <typename W>
__device__ __forceinline__ W* piece_of(W* partial, i64 piece, int count) {
    constexpr int M = Pack<W>::size;
    return partial + piece * ((count + M - 1) / M * M);
}

// Pieces that a thread asks for at once.
constexpr int TOGETHER = 8;

// Once every block has written its piece of partial (pieces, count), put(i, sum) for each sum over the pieces. Blocks with
// another `strip` have another sum, and other memory.
template <typename W, typename Put>
__device__ __forceinline__ void finish_sums(W* partial, int count, int piece, int pieces, int strip, Put put) {
    constexpr int M = Pack<W>::size;
    int size = 16; // of a group: as many as there are groups, about
    while (size * size < pieces) size *= 2;
    int counter = strip * ((pieces + size - 1) / size + 1);
    for (int step = 1;; step *= size) { // a sum is left every `step` pieces
        int groups = (pieces + step * size - 1) / (step * size), group = piece / (step * size);
        int first = group * step * size, members = min((pieces - first + step - 1) / step, size);
        if (!last_block(counter + group, members)) return;
        W* left = piece_of(partial, first, count);
        for (int i = threadIdx.x * M; i < count; i += blockDim.x * M) {
            Pack<W> sums = {};
            // Several are asked for before the first is waited for, also of the last few.
            for (int member = 0; member < members; member += TOGETHER) {
                Pack<W> asked[TOGETHER] = {};
#pragma unroll
                for (int k = 0; k < TOGETHER; k++)
                    if (member + k < members) asked[k] = load_fresh(piece_of(left, (member + k) * step, count) + i);
#pragma unroll
                for (int k = 0; k < TOGETHER; k++)
#pragma unroll
                    for (int j = 0; j < M; j++) sums.at[j] += asked[k].at[j];
            }
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
