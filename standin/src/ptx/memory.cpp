// Loads, stores, asynchronous copies and tickets, and the checks whether they are allowed.

#include "ptx.h"

namespace standin::ptx {

namespace {

// The host address of a lane's access. `base` is the operand with the base address; parameters have none.
char* place_at(Warp& warp, const Instruction& i, unsigned lane, size_t bytes, int base, bool write) {
    uint64_t address = i.offset;
    if (i.space != Space::PARAMETER)
        address += i.short_base ? row<uint32_t>(warp, i, base)[lane] : row<uint64_t>(warp, i, base)[lane];
    Access access = write                       ? Access::WRITE
                    : i.path == Path::FRESH    ? Access::READ_FRESH
                    : i.path == Path::CONSTANT ? Access::READ_CONSTANT
                                               : Access::READ;
    return warp.place(i.space, address, bytes, lane, access);
}

// Elements of T in registers of Held, which may be wider.
template <typename T, typename Held>
void load(Warp& warp, const Instruction& i) {
    each(warp, [&](unsigned l) {
        const char* from = place_at(warp, i, l, sizeof(T) * i.count, i.count, false);
        for (int element = 0; element < i.count; element++) {
            T value;
            memcpy(&value, from + sizeof(T) * element, sizeof(T));
            row<Held>(warp, i, element)[l] = value;
        }
    });
}

template <typename T, typename Held>
void store(Warp& warp, const Instruction& i) {
    each(warp, [&](unsigned l) {
        char* to = place_at(warp, i, l, sizeof(T) * i.count, 0, true);
        for (int element = 0; element < i.count; element++) {
            T value = row<Held>(warp, i, 1 + element)[l];
            memcpy(to + sizeof(T) * element, &value, sizeof(T));
        }
    });
}

// Starts a copy of 16 bytes, of which as many are read as the last operand says (the rest is zero), at any time between
// start and end; READ_FRESH bypasses the L1 cache.
template <Access access>
void begin_copy(Warp& warp, const Instruction& i) {
    const uint32_t *to = row<uint32_t>(warp, i, 0), *count = row<uint32_t>(warp, i, 3);
    const uint64_t* from = row<uint64_t>(warp, i, 1);
    each(warp, [&](unsigned l) {
        bool whole = row<uint32_t>(warp, i, 2)[l] == 16 && (count[l] == 16 || count[l] == 0);
        if (!whole) warp.fail("copies neither 16 bytes nor none", l);
        memset(warp.place(Space::SHARED, to[l], 16, l, Access::BEGIN_WRITE), 0xff, 16);
        if (count[l]) warp.place(Space::GLOBAL, from[l], count[l], l, access);
        warp.copies[l].push_back({to[l], from[l], count[l], warp.groups[l]});
    });
}

// Does a lane's copies of its first `groups` groups.
void end_copies(Warp& warp, unsigned l, uint32_t groups) {
    std::vector<Copy>& copies = warp.copies[l];
    auto copy = copies.begin();
    for (; copy != copies.end() && copy->group < groups; copy++) {
        char* to = warp.place(Space::SHARED, copy->to, 16, l, Access::END_WRITE);
        memset(to, 0, 16);
        if (copy->bytes) memcpy(to, warp.place(Space::GLOBAL, copy->from, copy->bytes, l, Access::READ_FRESH), copy->bytes);
    }
    copies.erase(copies.begin(), copy);
}

void await_copies(Warp& warp, const Instruction&) {
    each(warp, [&](unsigned l) { end_copies(warp, l, ~uint32_t(0)); });
}

void group_copies(Warp& warp, const Instruction&) {
    each(warp, [&](unsigned l) { warp.groups[l]++; });
}

// All groups of copies but the last few, as many as the operand says.
void await_groups(Warp& warp, const Instruction& i) {
    const uint32_t* last = row<uint32_t>(warp, i, 0);
    each(warp, [&](unsigned l) {
        if (warp.groups[l] > last[l]) end_copies(warp, l, warp.groups[l] - last[l]);
    });
}

// Returns the counter and increments it, or resets it to zero after the last ticket. Threads that take later tickets
// see what this thread, and those that a barrier has synchronised with it, wrote before the fence.
void take_ticket(Warp& warp, const Instruction& i) {
    const uint64_t* address = row<uint64_t>(warp, i, 1);
    uint32_t *before = row<uint32_t>(warp, i, 0), *last = row<uint32_t>(warp, i, 2);
    each(warp, [&](unsigned l) {
        if (!(warp.fenced >> l & 1)) warp.fail("takes a ticket without a fence after what was written before", l);
        auto counter = reinterpret_cast<uint32_t*>(warp.place(Space::GLOBAL, address[l], 4, l, Access::TICKET));
        uint32_t taken = *counter;
        *counter = taken >= last[l] ? 0 : taken + 1;
        before[l] = taken;
        warp.block->tickets[warp.block->number] = {warp.block->barriers, warp.thread(l)};
    });
    warp.ticketed |= warp.active;
}

} // namespace

template <typename T, typename Held>
static Step one_of(bool loads) {
    return loads ? load<T, Held> : store<T, Held>;
}

template <typename T>
static Step held_in(bool loads, uint32_t held) {
    if (held < sizeof(T)) return nullptr;
    switch (held) {
    case 2: return one_of<T, uint16_t>(loads);
    case 4: return one_of<T, uint32_t>(loads);
    case 8: return one_of<T, uint64_t>(loads);
    default: return nullptr;
    }
}

Step load_or_store(bool loads, const std::string& type, uint32_t held) {
    // Signed types are sign-extended to wider registers. Otherwise only the width matters.
    if (type == ".s8") return held_in<int8_t>(loads, held);
    if (type == ".s16") return held_in<int16_t>(loads, held);
    if (type == ".s32") return held_in<int32_t>(loads, held);
    switch (type.size() > 2 ? atoi(type.c_str() + 2) : 0) {
    case 8: return held_in<uint8_t>(loads, held);
    case 16: return held_in<uint16_t>(loads, held);
    case 32: return held_in<uint32_t>(loads, held);
    case 64: return held_in<uint64_t>(loads, held);
    default: return nullptr;
    }
}

std::map<std::string, Known> memory_instructions() {
    return {
        {"cp.async.cg.shared.global", {begin_copy<Access::READ_FRESH>, {4, 8, 4, 4}, Flow::ON, 0}},
        {"cp.async.ca.shared.global", {begin_copy<Access::READ>, {4, 8, 4, 4}, Flow::ON, 0}},
        {"cp.async.wait_all", {await_copies, {}, Flow::ON, 0}},
        {"cp.async.commit_group", {group_copies, {}, Flow::ON, 0}},
        {"cp.async.wait_group", {await_groups, {4}, Flow::ON, 0}},
        {"atom.global.inc.u32", {take_ticket, {4, 8, 4}}},
        {"prefetch.global.L2", {[](Warp&, const Instruction&) {}, {8}, Flow::ON, 0}},
    };
}

char* Warp::untraced(Space space, uint64_t address, size_t bytes, unsigned lane) {
    if (address % bytes) fail("is not aligned to " + std::to_string(bytes) + " bytes", lane);
    uint64_t first = 0, end = 0;
    char* memory = nullptr;
    switch (space) {
    case Space::PARAMETER:
        memory = const_cast<char*>(block->parameters), end = block->parameter_bytes;
        break;
    case Space::SHARED:
        memory = block->shared.data(), first = SHARED, end = SHARED + block->shared.size();
        break;
    case Space::LOCAL:
        memory = local.data() + lane * block->kernel->local_bytes, first = LOCAL, end = LOCAL + block->kernel->local_bytes;
        break;
    case Space::GLOBAL:
        if (!block->global.find(address)) fail("is at global memory that is nobody's", lane);
        first = block->global.piece.address, end = first + block->global.piece.bytes;
        memory = reinterpret_cast<char*>(first);
    }
    if (address < first || address > end || bytes > end - address) fail("is beyond the end of memory", lane);
    return memory + (address - first);
}

char* Warp::place(Space space, uint64_t address, size_t bytes, unsigned lane, Access access) {
    char* found = untraced(space, address, bytes, lane);
    bool shared = space == Space::SHARED;
    if (!shared && space != Space::GLOBAL) return found;
    uint32_t era = shared ? block->serial : block->launch;
    Moment now = {era, thread(lane), block->barriers, meetings};
    const Piece& piece = block->global.piece;
    Traces& traces = shared ? block->shared_traces : *piece.traces;
    Trace* trace = &traces[(address - (shared ? SHARED : piece.address)) / GRAIN];
    for (size_t grain = 0; grain < grains_of(bytes); grain++, trace++) {
        bool known = trace->era == era && trace->written;
        if (shared && is_read(access) && !known) fail("reads shared memory that nobody has written", lane);
        Trace before = *trace;
        if (const char* wrong = trace->access(now, access, block->order)) {
            uint32_t other = before.written ? before.writer : before.reader;
            std::string who = std::to_string(other % THREADS) + " of block " + std::to_string(other / THREADS);
            fail(std::string(wrong) + ": thread " + who, lane);
        }
    }
    if (access == Access::WRITE && !shared) fenced &= ~(Lanes(1) << lane);
    return found;
}

} // namespace standin::ptx
