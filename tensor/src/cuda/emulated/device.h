// CUDA on a CPU, for kernels of this project: what `prelude.cuh` builds on when a kernel is compiled by the system's C++
// compiler. It is for finding mistakes, not for speed.
//
// A block's threads are fibers on one thread of the host. They switch only where they wait for each other: at a barrier
// of the block, or at an exchange within a warp. In between each runs without interruption, so a missing barrier would
// go unnoticed if they always ran in the same order; therefore their order is drawn anew from a seed in every round,
// and asynchronous copies move nothing before they are waited for. The order of blocks varies, too. A deadlock is
// reported as an error.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulated::block.dynamic_shared)

struct Index3 {
    unsigned x, y, z;
};

static Index3 threadIdx, blockIdx, blockDim, gridDim;

struct Layout; // of prelude.cuh

namespace emulated {

struct Copy {
    void* to;
    const void* from;
    unsigned bytes, group;
};

struct Fiber {
    void* stack_pointer;
    Index3 index;
    bool done;
    std::vector<Copy> copies; // begun, and not waited for
    unsigned groups; // of copies, that are complete
};

// A rendezvous of the threads of a block or a warp: how many there are, how many have arrived, and how many rendezvous
// have been held.
struct Meeting {
    unsigned size, arrived, held;
};

struct Warp {
    Meeting meeting;
    uint64_t given[32][2];
    uint64_t taken[32];
    uint32_t fragments[32][6];
    const void* rows[32];
    float sums[32][4];
};

struct Block {
    std::vector<Fiber> fibers;
    std::unique_ptr<char[]> stacks; // kept from kernel to kernel
    unsigned room; // for stacks of so many fibers
    std::vector<Warp> warps;
    Meeting meeting;
    unsigned current;
    void* scheduler;
    unsigned char* dynamic_shared;
    uint64_t random;
    uint64_t events; // meetings held and threads finished: without any the block is stuck
    const char* error;
    void (*body)(void**);
    void** arguments;
};

static Block block;

inline uint64_t draw() { // splitmix64
    uint64_t z = block.random += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

// Switches from one fiber to another. Local to the library, because the symbol is not declared global; it has this name
// on every system.
extern "C" void emulated_switch(void** from, void* to) __asm__("emulated_switch");

#if defined(__x86_64__) && !defined(_WIN32)
asm(R"(
.text
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
constexpr int SAVED_WORDS = 6;
#elif defined(__aarch64__) && !defined(_WIN32)
asm(R"(
.text
emulated_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "the emulated device knows how to switch fibers on x86-64 and aarch64, and not on Windows"
#endif

inline void to_scheduler() { emulated_switch(&block.fibers[block.current].stack_pointer, block.scheduler); }

// Waits until all members of a meeting have come; the last one runs `work` for all.
template <typename Work>
inline void meet(Meeting& meeting, Work work) {
    unsigned held = meeting.held;
    if (++meeting.arrived == meeting.size) {
        work();
        meeting.arrived = 0;
        meeting.held++;
        block.events++;
        to_scheduler(); // so that the last one to come is not always the first to go on
    } else {
        while (meeting.held == held) to_scheduler();
    }
}

inline Warp& own_warp() { return block.warps[block.current / 32]; }
inline unsigned own_lane() { return block.current % 32; }

// Every lane of the warp gives a value and takes that of the lane `source(lane)`.
template <typename T, typename Source>
inline T exchange(T value, Source source) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    Warp& warp = own_warp();
    unsigned lane = own_lane();
    memcpy(&warp.given[lane][0], &value, sizeof(T));
    meet(warp.meeting, [&] {
        for (int i = 0; i < 32; i++) warp.taken[i] = warp.given[source(i)][0];
    });
    T result;
    memcpy(&result, &warp.taken[lane], sizeof(T));
    return result;
}

inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline unsigned short round_to_bf16(float value) {
    uint32_t bits = to_bits(value);
    if (value != value) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

constexpr size_t STACK = 128 << 10;

inline void begin_fiber() {
    block.body(block.arguments);
    Fiber& fiber = block.fibers[block.current];
    if (!fiber.copies.empty()) block.error = "a thread ended with asynchronous copies that it did not wait for";
    fiber.done = true;
    block.events++;
    for (;;) to_scheduler();
}

struct Launch {
    unsigned grid[3], threads[3], shared_bytes;
    uint64_t seed;
    void** arguments;
};

inline void prepare_fiber(Fiber& fiber, char* stack) {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack, STACK); // what the fiber before left there
#endif
    uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + STACK) & ~uintptr_t(63);
    void** words = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
    *--words = nullptr; // where begin_fiber would return to
    *--words = reinterpret_cast<void*>(begin_fiber);
    for (int i = 0; i < SAVED_WORDS; i++) *--words = nullptr;
#else
    words -= 20;
    memset(words, 0, 160);
    words[11] = reinterpret_cast<void*>(begin_fiber); // the link register
#endif
    fiber.stack_pointer = words;
    fiber.done = false;
    fiber.copies.clear();
    fiber.groups = 0;
}

inline void run_block() {
    unsigned threads = block.fibers.size();
    block.meeting = {threads, 0, 0};
    for (unsigned w = 0; w < block.warps.size(); w++) block.warps[w].meeting = {32, 0, 0};
    for (unsigned t = 0; t < threads; t++) {
        prepare_fiber(block.fibers[t], block.stacks.get() + STACK * t);
        block.fibers[t].index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
    }
    std::vector<unsigned> order(threads);
    for (unsigned t = 0; t < threads; t++) order[t] = t;
    for (unsigned left = threads; left > 0 && !block.error;) {
        for (unsigned t = threads - 1; t > 0; t--) std::swap(order[t], order[draw() % (t + 1)]);
        uint64_t events = block.events;
        for (unsigned t : order) {
            Fiber& fiber = block.fibers[t];
            if (fiber.done) continue;
            block.current = t;
            threadIdx = fiber.index;
            emulated_switch(&block.scheduler, fiber.stack_pointer);
            if (fiber.done) {
                left--;
                block.meeting.size--; // a barrier waits for the threads that are left
                if (block.meeting.size > 0 && block.meeting.arrived == block.meeting.size) {
                    block.meeting.arrived = 0;
                    block.meeting.held++;
                }
            }
        }
        if (left > 0 && block.events == events)
            block.error = "threads wait at a barrier or for a warp's lanes that never come";
    }
}

template <typename T>
struct Letter;
template <typename T>
struct Letter<T*> {
    static constexpr char value = 'p';
};
template <>
struct Letter<Layout> {
    static constexpr char value = 'v';
};
template <>
struct Letter<int> {
    static constexpr char value = 'i';
};
template <>
struct Letter<unsigned> {
    static constexpr char value = 'i';
};
template <>
struct Letter<long long> {
    static constexpr char value = 'l';
};
template <>
struct Letter<unsigned long long> {
    static constexpr char value = 'l';
};
template <>
struct Letter<float> {
    static constexpr char value = 'f';
};
template <>
struct Letter<double> {
    static constexpr char value = 'd';
};

template <typename Kernel>
struct Entry;

template <typename... P>
struct Entry<void (*)(P...)> {
    // A letter per parameter, to be compared with the arguments of a launch.
    static const char* signature() {
        static const char letters[] = {Letter<P>::value..., 0};
        return letters;
    }

    template <void (*kernel)(P...), size_t... I>
    static void call(void** arguments, std::index_sequence<I...>) {
        kernel(*static_cast<P*>(arguments[I])...);
    }

    template <void (*kernel)(P...)>
    static void body(void** arguments) {
        call<kernel>(arguments, std::index_sequence_for<P...>());
    }

    // Runs the grid. Returns null, or an error message.
    template <void (*kernel)(P...)>
    static const char* launch(const Launch& launch) {
        gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
        blockDim = {launch.threads[0], launch.threads[1], launch.threads[2]};
        unsigned threads = blockDim.x * blockDim.y * blockDim.z;
        if (threads == 0 || threads % 32 || threads > 1024) return "a block of this many threads cannot be launched";
        if (block.room < threads) {
            block.stacks.reset(new (std::nothrow) char[STACK * threads]);
            block.room = block.stacks ? threads : 0;
            if (!block.stacks) return "there is no memory for the threads' stacks";
        }
        std::vector<unsigned char> shared(launch.shared_bytes + 64);
        uintptr_t start = (reinterpret_cast<uintptr_t>(shared.data()) + 63) & ~uintptr_t(63);
        block.dynamic_shared = reinterpret_cast<unsigned char*>(start);
        block.fibers.resize(threads);
        block.warps.resize(threads / 32);
        block.random = launch.seed;
        block.error = nullptr;
        block.body = body<kernel>;
        block.arguments = launch.arguments;
        uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
        // A stride that is coprime to the number of blocks visits every block once.
        uint64_t stride = blocks > 1 ? draw() % blocks | 1 : 1;
        while (std::gcd(blocks, stride) != 1) stride++;
        for (uint64_t i = 0, b = blocks ? draw() % blocks : 0; i < blocks && !block.error; i++, b = (b + stride) % blocks) {
            memset(block.dynamic_shared, 0xff, launch.shared_bytes);
            blockIdx = {unsigned(b % gridDim.x), unsigned(b / gridDim.x % gridDim.y), unsigned(b / gridDim.x / gridDim.y)};
            run_block();
        }
        return block.error;
    }
};

} // namespace emulated

#include "instructions.h"

// The two functions that the library exports for a kernel.
#define EMULATED_ENTRY(number, ...)                                                                          \
    extern "C" __attribute__((visibility("default"))) const char* signature_##number() {                     \
        return emulated::Entry<decltype(&__VA_ARGS__)>::signature();                                         \
    }                                                                                                        \
    extern "C" __attribute__((visibility("default"))) const char* launch_##number(                           \
        const emulated::Launch* launch) {                                                                    \
        return emulated::Entry<decltype(&__VA_ARGS__)>::template launch<&__VA_ARGS__>(*launch);              \
    }

// What CUDA C++ has built in.

inline void __syncthreads() { emulated::meet(emulated::block.meeting, [] {}); }
inline void __syncwarp(unsigned = ~0u) { emulated::meet(emulated::own_warp().meeting, [] {}); }
inline void __threadfence() {} // a block runs to its end before the next one begins

template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulated::exchange(value, [mask](int lane) { return lane ^ mask; });
}
template <typename T>
inline T __shfl_sync(unsigned, T value, int source) {
    // Each lane names its own source, so the sources are exchanged first.
    emulated::Warp& warp = emulated::own_warp();
    unsigned lane = emulated::own_lane();
    memcpy(&warp.given[lane][0], &value, sizeof(T));
    warp.given[lane][1] = source & 31;
    emulated::meet(warp.meeting, [&] {
        for (int i = 0; i < 32; i++) warp.taken[i] = warp.given[warp.given[i][1]][0];
    });
    T result;
    memcpy(&result, &warp.taken[lane], sizeof(T));
    return result;
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    emulated::Warp& warp = emulated::own_warp();
    unsigned lane = emulated::own_lane();
    warp.given[lane][0] = predicate != 0;
    emulated::meet(warp.meeting, [&] {
        uint64_t bits = 0;
        for (int i = 0; i < 32; i++) bits |= warp.given[i][0] << i;
        for (int i = 0; i < 32; i++) warp.taken[i] = bits;
    });
    return static_cast<unsigned>(warp.taken[lane]);
}

inline float __uint_as_float(unsigned bits) { return emulated::from_bits(bits); }
inline unsigned __float_as_uint(float value) { return emulated::to_bits(value); }
inline float __int_as_float(int bits) { return emulated::from_bits(static_cast<uint32_t>(bits)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t(a) * b >> 32); }
inline unsigned atomicInc(unsigned* counter, unsigned last) {
    unsigned old = *counter;
    *counter = old >= last ? 0 : old + 1;
    return old;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }

using std::erf;
using std::exp;
using std::fma;
using std::log;
using std::max;
using std::min;
using std::pow;
using std::sqrt;
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float rsqrt(float x) { return 1.0f / sqrt(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
