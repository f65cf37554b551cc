// PTX as NVRTC writes it, run on a CPU: what a GPU would be given, not what the same source becomes elsewhere. So the
// instructions are seen that only a GPU has (tensor cores, matrices from shared memory, asynchronous copies,
// approximations), with the operands that the source gives them, and what the compiler has made of all the rest.
//
// A warp's 32 lanes execute an instruction together, as those do whose turn it is: of lanes that went apart the ones that
// are furthest behind go first, so that they meet again as soon as they can. What the manual leaves open is taken for the
// worst: approximations in f32 err as much as they may, tensor cores cut sums off, warps and blocks come in any order,
// copies come when they are waited for.
//
// Found out, with the line of the PTX, are: memory beyond its end or not aligned; shared memory that is read before it is
// written; accesses without an order between them, by threads of a warp, of a block or of different blocks (`traces.h`);
// lanes that wait for others that do not come; and instructions that are not known here.
#pragma once
#include "../code.h"
#include <algorithm>
#include <cstring>

namespace standin::ptx {

constexpr unsigned LANES = 32;
// A bit for each lane.
typedef uint32_t Lanes;
constexpr Lanes ALL = ~0u;

// Where windows of memory begin: not at 0, so that what is no address is found out.
constexpr uint64_t SHARED = 1024, LOCAL = 1024;

struct Warp;
struct Instruction;
// What an instruction does for the lanes that are active.
typedef void (*Step)(Warp&, const Instruction&);

enum class Flow : uint8_t { ON, BRANCH, END, BARRIER, TOGETHER };
enum class Space : uint8_t { PARAMETER, SHARED, GLOBAL, LOCAL };
// How a load goes about caches: as usual, past the first level, or by the way for what no one writes meanwhile.
enum class Path : uint8_t { USUAL, FRESH, CONSTANT };

struct Instruction {
    Step step = nullptr;
    Flow flow = Flow::ON;
    Space space = Space::PARAMETER;
    Path path = Path::USUAL;
    uint8_t count = 0; // of operands, or of a vector's elements
    bool unless = false, guarded = false;
    bool short_base = false; // whether an address is 32 bits, as those in shared memory can be
    uint32_t guard = 0; // the row of its predicate
    uint32_t target = 0; // of a branch
    uint32_t line = 0;
    int64_t offset = 0; // from an address
    // Its operands, in their order, vectors one by one: each is a row of values, one for each lane, of registers or of
    // constants, and this is how many bytes it lies behind a warp's first.
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

    // Reads it.
    explicit Module(const char* text);
    Kernel* kernel(const std::string& name) override;
};

// What is known of an instruction by its name: what it does, how wide its operands are, and how lanes go on from it.
struct Known {
    Step step;
    std::vector<uint32_t> widths;
    Flow flow = Flow::ON;
};
// Null where it is not known, or is a load or a store.
const Known* known(const std::string& name);
// Those that copy, and take tickets.
std::map<std::string, Known> memory_instructions();
// Of elements of a type, `.f32`, in registers of some width; null where they do not go together here.
Step load_or_store(bool loads, const std::string& type, uint32_t held);

// An asynchronous copy on its way.
struct Copy {
    uint64_t to, from;
    unsigned bytes; // 0: zeros come
};

// Global memory: the piece of it that was looked at last.
struct Global {
    Device* device = nullptr;
    Module* module = nullptr;
    Piece piece = {};

    // Whether an address is in the piece, or in another, which is looked at from now on.
    bool find(uint64_t address);
};

struct Block;

struct Warp {
    Block* block;
    unsigned number;
    std::vector<char> registers, local;
    char* rows; // the registers, aligned
    // Of its lanes: those that have not ended; whose turn it is; that wait for others; that have fenced off what they wrote;
    // and that have taken a ticket.
    Lanes alive, active, waiting, fenced, ticketed;
    uint64_t left; // instructions, after which it is taken not to end
    uint32_t at[LANES]; // which instruction each lane is at
    uint32_t now; // that of the active ones
    uint16_t meetings; // of its lanes, where what they wrote becomes seen by each other
    bool at_barrier;
    std::vector<Copy> copies[LANES];

    void begin(Block& of, unsigned its_number, const unsigned threads[3]);
    // Goes on until its lanes have ended or wait for the block.
    void run();
    // The place in the host's memory of so many bytes of a lane's, if the lane may have them now.
    char* place(Space space, uint64_t address, size_t bytes, unsigned lane, Access access);
    // The same, whatever others do.
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
