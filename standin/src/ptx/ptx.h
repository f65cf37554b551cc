// PTX as NVRTC writes it, interpreted on a CPU: the code that a GPU would get, not what another compiler makes of the
// same source. So instructions that only a GPU has (tensor cores, matrix loads from shared memory, asynchronous copies,
// approximations) are executed with their actual operands, and so is the compiler's code for everything else.
//
// A warp's active lanes execute an instruction together. After a divergent branch the lanes that are furthest behind in
// the code go first, so that all reconverge as soon as possible. Where the manual leaves a choice, the worst case is
// taken: approximations in f32 have the largest allowed error, tensor cores truncate sums, warps and blocks run in
// random order, copies are done only when they are waited for.
//
// Reported, with the line of the PTX, are: accesses out of bounds or not aligned; reads of uninitialised shared memory;
// data races, between threads of a warp, of a block or of different blocks (`traces.h`); lanes that wait for lanes that
// never arrive; and instructions that are not supported here.
#pragma once
#include "../code.h"
#include <algorithm>
#include <cstring>

namespace standin::ptx {

constexpr unsigned LANES = 32;
// A bit for each lane.
typedef uint32_t Lanes;
constexpr Lanes ALL = ~0u;

// Where the address windows of shared and local memory begin: not at 0, so that null pointers are caught.
constexpr uint64_t SHARED = 1024, LOCAL = 1024;

struct Warp;
struct Instruction;
// What an instruction does for the lanes that are active.
typedef void (*Step)(Warp&, const Instruction&);

enum class Flow : uint8_t { ON, BRANCH, END, BARRIER, TOGETHER };
enum class Space : uint8_t { PARAMETER, SHARED, GLOBAL, LOCAL };
// How a load uses caches: as usual, bypassing L1, or through the read-only cache, for memory that nothing writes during
// the launch.
enum class Path : uint8_t { USUAL, FRESH, CONSTANT };

struct Instruction {
    Step step = nullptr;
    Flow flow = Flow::ON;
    Space space = Space::PARAMETER;
    Path path = Path::USUAL;
    uint8_t count = 0; // of operands, or of a vector's elements
    uint8_t results = 0; // how many of its operands, the first, it writes
    bool unless = false, guarded = false;
    bool short_base = false; // whether an address is 32 bits, as those in shared memory can be
    uint32_t guard = 0; // the row of its predicate
    uint32_t target = 0; // of a branch
    uint32_t line = 0;
    int64_t offset = 0; // from an address
    // The operands in order, with vectors element by element. Each is a row of values, one per lane, of a register or a
    // constant; this is its byte offset from the warp's first row.
    uint32_t rows[14] = {};
};

struct Constant {
    uint32_t row, width;
    uint64_t bits;
};

struct Module;

struct PtxKernel : Kernel {
    Module* module;
    std::vector<Instruction> code;
    std::vector<size_t> offsets; // of parameters
    std::vector<Constant> constants;
    std::map<std::string, uint32_t> special; // the rows of %tid.x and the like
    size_t row_bytes = 0, local_bytes = 0;

    void run(Device& device, const Grid& grid, const std::vector<void*>& arguments, uint64_t number) override;
};

// A variable in global memory. It is zero at first.
struct Variable {
    std::vector<char> memory;
    Traces traces;
};

struct Module : Code {
    std::map<std::string, PtxKernel> kernels;
    std::map<std::string, Variable> variables;

    // Parses the text.
    explicit Module(const char* text);
    Kernel* kernel(const std::string& name) override;
};

// What the name of an instruction determines: what it does, the widths of its operands, and its control flow.
struct Known {
    Step step;
    std::vector<uint32_t> widths;
    Flow flow = Flow::ON;
    uint8_t results = 1; // how many of them, the first, it writes
};
// Null if the instruction is not supported, or is a load or a store.
const Known* known(const std::string& name);
// Fuses products with sums, as NVIDIA's assembler may.
void fuse(std::vector<Instruction>& code);
// The instructions for asynchronous copies, tickets and prefetches.
std::map<std::string, Known> memory_instructions();
// The load or store for elements of a type, such as `.f32`, in registers of this width; null if that combination is not
// supported.
Step load_or_store(bool loads, const std::string& type, uint32_t held);

// An asynchronous copy on its way.
struct Copy {
    uint64_t to, from;
    unsigned bytes; // 0: zeros are written
    uint32_t group;
};

// Global memory, with the allocation that was accessed last.
struct Global {
    Device* device = nullptr;
    Module* module = nullptr;
    Piece piece = {};

    // Whether an address is in allocated memory; `piece` is then the allocation that contains it.
    bool find(uint64_t address);
};

struct Block;

struct Warp {
    Block* block;
    unsigned number;
    std::vector<char> registers, local;
    char* rows; // the registers, aligned
    // The lanes that have not ended; that are executing; that wait for others; that have executed a fence after their
    // last write to global memory; and that have taken a ticket.
    Lanes alive, active, waiting, fenced, ticketed;
    uint64_t left; // the instructions left before the warp is considered to be in an infinite loop
    uint32_t at[LANES]; // which instruction each lane is at
    uint32_t now; // that of the active ones
    uint16_t meetings; // synchronisations of its lanes, which make their writes visible to each other
    bool at_barrier;
    std::vector<Copy> copies[LANES];
    uint32_t groups[LANES]; // of copies, that are complete

    void begin(Block& of, unsigned its_number, const unsigned threads[3]);
    // Runs until all lanes have ended, or the warp waits at a barrier of the block.
    void run();
    // The host address of a lane's access to this many bytes. Fails if the lane may not access them now.
    char* place(Space space, uint64_t address, size_t bytes, unsigned lane, Access access);
    // The same, without the check for races.
    char* untraced(Space space, uint64_t address, size_t bytes, unsigned lane);
    // A lane's number among the threads of the launch.
    uint32_t thread(unsigned lane) const;
    [[noreturn]] void fail(const std::string& what, unsigned lane) const;

private:
    uint32_t choose();
    void go_to(Lanes lanes, uint32_t place);
    bool gathered(bool had_to);
};

struct Block {
    PtxKernel* kernel;
    const char* parameters;
    size_t parameter_bytes;
    Global global;
    std::vector<char> shared;
    Traces shared_traces;
    std::vector<Warp> warps;
    unsigned grid[3], index[3];
    uint64_t number; // among the blocks of its launch
    uint32_t serial; // among all blocks that there have been
    uint32_t launch;
    uint16_t barriers; // that it has passed
    std::vector<Crossing> tickets; // of all blocks of the launch
    Order order;

    void run(const unsigned threads[3], uint64_t& random);
};

template <typename T>
T* row(Warp& warp, const Instruction& instruction, int operand) {
    return reinterpret_cast<T*>(warp.rows + instruction.rows[operand]);
}

// Does something for each active lane.
template <typename Body>
inline void each(const Warp& warp, Body body) {
    if (warp.active == ALL) {
        for (unsigned l = 0; l < LANES; l++) body(l);
    } else {
        for (unsigned l = 0; l < LANES; l++)
            if (warp.active >> l & 1) body(l);
    }
}

} // namespace standin::ptx
