// Loads, stores, asynchronous copies, tickets; and whether they may.

#include "ptx.h"

namespace standin::ptx {

namespace {

char* place_at(Warp& warp, const Instruction& i, unsigned lane, size_t bytes, const uint64_t* base, bool write) {
    uint64_t address = (base ? base[lane] : 0) + i.offset;
    Access access = write                       ? Access::WRITE
                    : i.path == Path::FRESH    ? Access::READ_FRESH
                    : i.path == Path::CONSTANT ? Access::READ_CONSTANT
                                               : Access::READ;
    return warp.place(i.space, address, bytes, lane, access);
}

// Elements of T in registers of Held, which may be wider.
template <typename T, typename Held>
void load(Warp& warp, const Instruction& i) {
    const uint64_t* base = i.space == Space::PARAMETER ? nullptr : row<uint64_t>(warp, i, i.count);
    each(warp, [&](unsigned l) {
        const char* from = place_at(warp, i, l, sizeof(T) * i.count, base, false);
        for (int element = 0; element < i.count; element++) {
            T value;
            memcpy(&value, from + sizeof(T) * element, sizeof(T));
            row<Held>(warp, i, element)[l] = value;
        }
    });
}

template <typename T, typename Held>
void store(Warp& warp, const Instruction& i) {
    const uint64_t* base = row<uint64_t>(warp, i, 0);
    each(warp, [&](unsigned l) {
        char* to = place_at(warp, i, l, sizeof(T) * i.count, base, true);
        for (int element = 0; element < i.count; element++) {
            T value = row<Held>(warp, i, 1 + element)[l];
            memcpy(to + sizeof(T) * element, &value, sizeof(T));
        }
    });
}

// 16 bytes, of which as many are read as the last operand says.
void begin_copy(Warp& warp, const Instruction& i) {
    const uint32_t *to = row<uint32_t>(warp, i, 0), *count = row<uint32_t>(warp, i, 3);
    const uint64_t* from = row<uint64_t>(warp, i, 1);
    each(warp, [&](unsigned l) {
        bool whole = row<uint32_t>(warp, i, 2)[l] == 16 && (count[l] == 16 || count[l] == 0);
        if (!whole) warp.fail("copies neither 16 bytes nor none", l);
        memset(warp.place(Space::SHARED, to[l], 16, l, Access::BEGIN_WRITE), 0xff, 16);
        warp.copies[l].push_back({to[l], from[l], count[l]});
    });
}

void await_copies(Warp& warp, const Instruction&) {
    each(warp, [&](unsigned l) {
        for (const Copy& copy : warp.copies[l]) {
            char* to = warp.place(Space::SHARED, copy.to, 16, l, Access::WRITE);
            memset(to, 0, 16);
            // They go past the first-level cache.
            if (copy.bytes) memcpy(to, warp.place(Space::GLOBAL, copy.from, copy.bytes, l, Access::READ_FRESH), copy.bytes);
        }
        warp.copies[l].clear();
    });
}

// What was there, and one more, or after the last one nothing. A block that draws a ticket has written before what whoever
// draws the last one is to read, which takes a fence.
void take_ticket(Warp& warp, const Instruction& i) {
    const uint64_t* address = row<uint64_t>(warp, i, 1);
    uint32_t *before = row<uint32_t>(warp, i, 0), *last = row<uint32_t>(warp, i, 2);
    each(warp, [&](unsigned l) {
        if (!(warp.fenced >> l & 1)) warp.fail("takes a ticket without a fence after the last barrier", l);
        auto counter = reinterpret_cast<uint32_t*>(warp.untraced(Space::GLOBAL, address[l], 4, l));
        before[l] = *counter;
        *counter = *counter >= last[l] ? 0 : *counter + 1;
    });
    warp.ticketed |= warp.active;
}

} // namespace

template <typename T, typename Held>
static Step one_of(bool loads) {
    return loads ? load<T, Held> : store<T, Held>;
}

Step load_or_store(bool loads, const std::string& type, uint32_t held) {
    // Of unsigned numbers, bits and floats alike only the width counts.
    bool is_signed = type[1] == 's';
    switch (atoi(type.c_str() + 2) * 10 + held) {
    case 82: return is_signed ? nullptr : one_of<uint8_t, uint16_t>(loads);
    case 164: return is_signed ? nullptr : one_of<uint16_t, uint32_t>(loads);
    case 162: return one_of<uint16_t, uint16_t>(loads);
    case 324: return one_of<uint32_t, uint32_t>(loads);
    case 328: return is_signed ? one_of<int32_t, uint64_t>(loads) : one_of<uint32_t, uint64_t>(loads);
    case 648: return one_of<uint64_t, uint64_t>(loads);
    default: return nullptr;
    }
}

std::map<std::string, Known> memory_instructions() {
    return {
        {"cp.async.cg.shared.global", {begin_copy, {4, 8, 4, 4}}},
        {"cp.async.wait_all", {await_copies, {}}},
        {"atom.global.inc.u32", {take_ticket, {4, 8, 4}}},
        {"prefetch.global.L2", {[](Warp&, const Instruction&) {}, {8}}},
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
    bool shared = space == Space::SHARED, reads = access != Access::WRITE && access != Access::BEGIN_WRITE;
    if (!shared && space != Space::GLOBAL) return found;
    uint32_t era = shared ? block->serial : block->launch, thread = block->number * THREADS + number * LANES + lane;
    Moment now = {era, thread, block->barriers, meetings};
    const Piece& piece = block->global.piece;
    Traces& traces = shared ? block->shared_traces : *piece.traces;
    Trace* trace = &traces[(address - (shared ? SHARED : piece.address)) / GRAIN];
    for (size_t grain = 0; grain < grains_of(bytes); grain++, trace++) {
        bool known = trace->era == era && trace->written;
        if (shared && reads && !known) fail("reads shared memory that nobody has written", lane);
        Trace before = *trace;
        if (const char* wrong = trace->access(now, access, block->acquired)) {
            uint32_t other = before.written ? before.writer : before.reader;
            std::string who = std::to_string(other % THREADS) + " of block " + std::to_string(other / THREADS);
            fail(std::string(wrong) + ": thread " + who, lane);
        }
    }
    return found;
}

} // namespace standin::ptx
