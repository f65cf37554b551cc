// Warps, blocks and launches.

#include "ptx.h"
#include <fstream>
#include <set>

namespace standin::ptx {

static uint64_t draw(uint64_t& random) { // splitmix64
    uint64_t z = random += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

uint32_t Warp::thread(unsigned lane) const { return block->number * THREADS + number * LANES + lane; }

void Warp::fail(const std::string& what, unsigned lane) const {
    auto text = [](unsigned number) { return std::to_string(number); };
    const unsigned* index = block->index;
    std::string place = text(index[0]) + ", " + text(index[1]) + ", " + text(index[2]);
    throw Fault{block->kernel->name + ", line " + text(block->kernel->code[now].line) + " of its PTX: thread " +
                text(number * LANES + lane) + " of block (" + place + ") " + what};
}

// Makes the lanes that are furthest behind active. Returns the position of the next lanes that are ready.
uint32_t Warp::choose() {
    constexpr uint32_t NOWHERE = ~0u;
    Lanes ready = alive & ~waiting;
    if (!ready) { // all wait for each other
        ready = waiting;
        waiting = 0;
    }
    uint32_t others = NOWHERE;
    now = NOWHERE;
    for (unsigned l = 0; l < LANES; l++)
        if (ready >> l & 1) now = std::min(now, at[l]);
    active = 0;
    for (unsigned l = 0; l < LANES; l++) {
        if (!(ready >> l & 1)) continue;
        if (at[l] == now) active |= Lanes(1) << l;
        else others = std::min(others, at[l]);
    }
    return others;
}

void Warp::go_to(Lanes lanes, uint32_t place) {
    for (unsigned l = 0; l < LANES; l++)
        if (lanes >> l & 1) at[l] = place;
}

// Whether all live lanes have arrived at an instruction. If not, the active ones wait for the others; if the others
// wait elsewhere, that is a fault.
bool Warp::gathered(bool had_to) {
    if (active == alive) return true;
    if (had_to) fail("waits for lanes of its warp that wait at another place", __builtin_ctz(active));
    waiting |= active;
    go_to(active, now);
    return false;
}

void Warp::run() {
    while (alive) {
        bool all_waited = !(alive & ~waiting);
        uint32_t others = choose();
        // The active lanes continue as long as they are behind all others.
        for (bool together = true; together && now < others;) {
            const Instruction& i = block->kernel->code[now];
            if (!left--) fail("does not come to an end", __builtin_ctz(active));
            switch (i.flow) {
            case Flow::ON:
                i.step(*this, i);
                now++;
                break;
            case Flow::BRANCH: {
                Lanes taken = active;
                if (i.guarded) {
                    const uint8_t* guard = reinterpret_cast<uint8_t*>(rows + i.guard);
                    for (unsigned l = 0; l < LANES; l++)
                        if ((guard[l] != 0) == i.unless) taken &= ~(Lanes(1) << l);
                }
                if (taken && taken != active) {
                    go_to(taken, i.target);
                    go_to(active & ~taken, now + 1);
                    together = false;
                } else {
                    now = taken ? i.target : now + 1;
                }
                break;
            }
            case Flow::END:
                for (unsigned l = 0; l < LANES; l++)
                    if (active >> l & 1 && !copies[l].empty()) fail("ends before its copies have come", l);
                alive &= ~active;
                together = false;
                break;
            case Flow::TOGETHER:
                together = gathered(all_waited);
                // Member masks always name all lanes: either the whole warp has arrived, or some lanes have ended.
                if (together && active != ALL) fail("waits for lanes of its warp that have ended", __builtin_ctz(active));
                if (together) i.step(*this, i), now++;
                break;
            case Flow::BARRIER:
                together = gathered(all_waited);
                if (!together) break;
                i.step(*this, i);
                fenced = 0;
                go_to(active, now + 1);
                at_barrier = true;
                return;
            }
            all_waited = false;
            if (together && now >= others) {
                go_to(active, now);
                together = false;
            }
        }
    }
}

void Warp::begin(Block& of, unsigned its_number, const unsigned threads[3]) {
    block = &of;
    number = its_number;
    registers.resize(of.kernel->row_bytes + 64);
    memset(registers.data(), 0xff, registers.size());
    rows = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(registers.data()) + 63) & ~uintptr_t(63));
    for (const Constant& constant : of.kernel->constants)
        for (unsigned l = 0; l < LANES; l++)
            memcpy(rows + constant.row + l * constant.width, &constant.bits, constant.width);
    for (auto& [name, row] : of.kernel->special) {
        int axis = name.back() - 'x';
        for (unsigned l = 0; l < LANES; l++) {
            unsigned thread = number * LANES + l;
            unsigned index[3] = {thread % threads[0], thread / threads[0] % threads[1], thread / (threads[0] * threads[1])};
            unsigned value = name.rfind("%tid.", 0) == 0      ? index[axis]
                             : name.rfind("%ntid.", 0) == 0   ? threads[axis]
                             : name.rfind("%ctaid.", 0) == 0  ? of.index[axis]
                             : name.rfind("%nctaid.", 0) == 0 ? of.grid[axis]
                                                              : throw Fault{"PTX: no register is called " + name};
            memcpy(rows + row + l * 4, &value, 4);
        }
    }
    local.assign(of.kernel->local_bytes * LANES, char(0xff));
    alive = ALL;
    active = waiting = fenced = ticketed = 0;
    go_to(ALL, 0);
    meetings = 0;
    at_barrier = false;
    left = uint64_t(1) << 32;
    for (auto& lane : copies) lane.clear();
    std::fill(groups, groups + LANES, 0);
}

void Block::run(const unsigned threads[3], uint64_t& random) {
    barriers = 0;
    order = {&tickets, {}};
    memset(shared.data(), 0xff, shared.size());
    for (unsigned w = 0; w < warps.size(); w++) warps[w].begin(*this, w, threads);
    for (;;) {
        std::vector<Warp*> ready;
        bool some_wait = false;
        for (Warp& warp : warps) {
            if (!warp.alive) continue;
            if (warp.at_barrier) some_wait = true;
            else ready.push_back(&warp);
        }
        if (!ready.empty()) {
            ready[draw(random) % ready.size()]->run();
        } else if (some_wait) { // for those that have ended nobody waits
            barriers++;
            for (Warp& warp : warps) warp.at_barrier = false;
        } else {
            return;
        }
    }
}

bool Global::find(uint64_t address) {
    auto within = [&](const Piece& piece) { return address - piece.address < piece.bytes; };
    if (within(piece)) return true;
    piece = device->memory.piece(address);
    if (within(piece)) return true;
    for (auto& [_, variable] : module->variables) {
        piece = {reinterpret_cast<uint64_t>(variable.memory.data()), variable.memory.size(), &variable.traces};
        if (within(piece)) return true;
    }
    return false;
}

// Appends a kernel's name to the file that STANDIN_LAUNCHED names, if it is set.
static void note(const std::string& name) {
    static auto* known = new std::set<std::string>;
    static const char* file = getenv("STANDIN_LAUNCHED");
    if (file && *file && known->insert(name).second) std::ofstream(file, std::ios::app) << name + "\n" << std::flush;
}

void PtxKernel::run(Device& device, const Grid& grid, const std::vector<void*>& arguments, uint64_t launch) {
    static uint32_t blocks_run = 0;
    note(name);
    std::vector<char> given(parameters.empty() ? 0 : offsets.back() + parameters.back());
    for (size_t i = 0; i < arguments.size(); i++) memcpy(given.data() + offsets[i], arguments[i], parameters[i]);
    unsigned threads = grid.threads[0] * grid.threads[1] * grid.threads[2];
    if (threads % LANES) throw Fault{name + ": a block whose last warp is not whole"};
    Block block;
    block.kernel = this;
    block.launch = launch;
    block.parameters = given.data();
    block.parameter_bytes = given.size();
    block.global = {&device, module, {}};
    block.shared.resize(shared_bytes + grid.shared_bytes);
    block.shared_traces.resize(grains_of(block.shared.size()));
    block.warps.resize(threads / LANES);
    block.tickets.resize(uint64_t(grid.blocks[0]) * grid.blocks[1] * grid.blocks[2]);
    std::copy(grid.blocks, grid.blocks + 3, block.grid);
    uint64_t random = launch, count = block.tickets.size();
    std::vector<uint64_t> order(count);
    for (uint64_t b = 0; b < count; b++) order[b] = b;
    for (uint64_t b = count - 1; b > 0; b--) std::swap(order[b], order[draw(random) % (b + 1)]);
    for (uint64_t b : order) {
        block.number = b;
        block.serial = ++blocks_run;
        block.index[0] = b % grid.blocks[0];
        block.index[1] = b / grid.blocks[0] % grid.blocks[1];
        block.index[2] = b / grid.blocks[0] / grid.blocks[1];
        block.run(grid.threads, random);
    }
}

} // namespace standin::ptx
