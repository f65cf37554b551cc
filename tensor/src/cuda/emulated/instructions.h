// What instructions.cuh asks for, on a CPU: included by device.h.
#pragma once

namespace emulated {

inline float widen_half(uint32_t pair, int half) { return from_bits(half ? pair & 0xffff0000u : pair << 16); }

inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    Warp& warp = own_warp();
    unsigned lane = own_lane();
    memcpy(warp.fragments[lane], a, 16);
    memcpy(warp.fragments[lane] + 4, b, 8);
    meet(warp.meeting, [&] {
        float left[16][16], right[16][8];
        for (int l = 0; l < 32; l++)
            for (int half = 0; half < 2; half++) {
                const uint32_t* held = warp.fragments[l];
                int g = l / 4, column = l % 4 * 2 + half;
                left[g][column] = widen_half(held[0], half), left[g + 8][column] = widen_half(held[1], half);
                left[g][column + 8] = widen_half(held[2], half), left[g + 8][column + 8] = widen_half(held[3], half);
                right[column][g] = widen_half(held[4], half), right[column + 8][g] = widen_half(held[5], half);
            }
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
                float sum = 0;
                for (int k = 0; k < 16; k++) sum += left[row][k] * right[k][column];
                warp.sums[l][i] = sum;
            }
    });
    for (int i = 0; i < 4; i++) d[i] += warp.sums[lane][i];
}

inline void load_matrices(uint32_t (&to)[4], const void* row, bool transposed) {
    Warp& warp = own_warp();
    unsigned lane = own_lane();
    if (reinterpret_cast<uintptr_t>(row) % 16) block.error = "a row of a matrix in shared memory is not aligned to 16 bytes";
    warp.rows[lane] = row;
    meet(warp.meeting, [&] {
        for (int l = 0; l < 32; l++)
            for (int matrix = 0; matrix < 4; matrix++) {
                auto element = [&](int r, int c) -> uint32_t {
                    return static_cast<const unsigned short*>(warp.rows[matrix * 8 + r])[c];
                };
                int g = l / 4, column = l % 4 * 2;
                warp.fragments[l][matrix] = transposed ? element(column, g) | element(column + 1, g) << 16
                                                       : element(g, column) | element(g, column + 1) << 16;
            }
    });
    memcpy(to, warp.fragments[lane], 16);
}

inline uint32_t transpose(uint32_t matrix) {
    Warp& warp = own_warp();
    unsigned lane = own_lane();
    warp.given[lane][0] = matrix;
    meet(warp.meeting, [&] {
        for (unsigned l = 0; l < 32; l++) {
            // Row g, columns 2p and 2p + 1 of the result are column g, rows 2p and 2p + 1.
            unsigned g = l / 4, row = l % 4 * 2;
            auto half = [&](unsigned r) { return warp.given[r * 4 + g / 2][0] >> (g % 2 * 16) & 0xffff; };
            warp.taken[l] = half(row) | half(row + 1) << 16;
        }
    });
    return static_cast<uint32_t>(warp.taken[lane]);
}

template <size_t N>
void store_at_once(void* to, const uint32_t (&words)[N]) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(words)) block.error = "a store is not aligned to its size";
    else memcpy(to, words, sizeof(words));
}

inline void copy_async(void* to, const void* from, bool exists) {
    if (reinterpret_cast<uintptr_t>(to) % 16 || (exists && reinterpret_cast<uintptr_t>(from) % 16))
        block.error = "an asynchronous copy is not aligned to 16 bytes";
    Fiber& fiber = block.fibers[block.current];
    fiber.copies.push_back({to, exists ? from : nullptr, 16, fiber.groups});
}

inline void group_copies() { block.fibers[block.current].groups++; }

// Does the copies of the first `groups` groups.
inline void end_copies(unsigned groups) {
    std::vector<Copy>& copies = block.fibers[block.current].copies;
    size_t ended = 0;
    for (; ended < copies.size() && copies[ended].group < groups; ended++) {
        Copy& copy = copies[ended];
        if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
        else memset(copy.to, 0, copy.bytes);
    }
    copies.erase(copies.begin(), copies.begin() + ended);
}

inline void wait_for_copies() { end_copies(~0u); }

inline void wait_for_groups_but(unsigned last) {
    unsigned groups = block.fibers[block.current].groups;
    if (groups > last) end_copies(groups - last);
}

} // namespace emulated
