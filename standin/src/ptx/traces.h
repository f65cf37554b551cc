// Who accessed memory last, grain by grain, and whether it was in order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace standin::ptx {

// FRESH is past the first-level cache, CONSTANT by the way for what nobody writes. An asynchronous copy begins to write,
// and has written. A ticket is read and written in one.
enum class Access : uint8_t { READ, READ_FRESH, READ_CONSTANT, WRITE, BEGIN_WRITE, END_WRITE, TICKET };
inline bool is_read(Access access) { return access <= Access::READ_CONSTANT; }

// When and by whom: threads of a launch are numbered, 1024 for a block.
struct Moment {
    uint32_t era; // the launch, or for shared memory the block: what was before is forgotten
    uint32_t thread;
    uint16_t barriers, meetings; // of the block and of the warp, that were before
};

constexpr uint32_t THREADS = 1024;

// A thread's step into, or out of, the order that tickets make among blocks, and after how many barriers of its block. With
// the thread go those that a barrier has brought together with it.
struct Crossing {
    int32_t barriers = -1; // none
    uint32_t thread = 0;
};

// The order among the blocks of a launch.
struct Order {
    const std::vector<Crossing>* out; // when each block took its last ticket
    Crossing in; // when this one saw what the others had written before theirs

    // Whether a thread of this block comes after what a thread of another one did.
    bool after(const Moment& now, uint32_t other, uint16_t barriers) const {
        const Crossing& left = (*out)[other / THREADS];
        bool was_before = left.barriers > barriers || (left.barriers >= 0 && left.thread == other);
        return was_before && is_in(now);
    }
    bool is_in(const Moment& now) const {
        return in.barriers >= 0 && (now.barriers > in.barriers || now.thread == in.thread);
    }
};

// Whose reads a trace has: a thread's, or those of several of a warp, of a block, of a grid.
enum class Spread : uint8_t { NOBODY, THREAD, WARP, BLOCK, GRID };

struct Trace {
    uint32_t era = 0;
    uint32_t writer, reader;
    uint16_t write_barriers, write_meetings, read_barriers, read_meetings;
    bool written, copying, constant, counts;
    Spread readers;

    // Takes an access into the trace; or says what is wrong with it, and takes it nevertheless.
    const char* access(const Moment& now, Access access, const Order& order) {
        if (era != now.era) {
            era = now.era;
            written = copying = constant = counts = false;
            readers = Spread::NOBODY;
        }
        const char* wrong = find_wrong(now, access, order);
        if (access == Access::TICKET) {
            counts = true;
        } else if (is_read(access)) {
            constant |= access == Access::READ_CONSTANT;
            take_read(now, order);
        } else {
            written = true;
            copying = access == Access::BEGIN_WRITE;
            writer = now.thread;
            write_barriers = now.barriers, write_meetings = now.meetings;
        }
        return wrong;
    }

private:
    static bool same_block(uint32_t a, uint32_t b) { return a / THREADS == b / THREADS; }
    static bool same_warp(uint32_t a, uint32_t b) { return a / 32 == b / 32; }

    const char* find_wrong(const Moment& now, Access access, const Order& order) const {
        if (access == Access::TICKET)
            return written || readers != Spread::NOBODY ? "takes a ticket where there are other numbers" : nullptr;
        if (counts) return "has what tickets are taken from";
        if (written && copying && access != Access::END_WRITE) return "has what a copy is on its way to";
        bool reads = is_read(access);
        if (written && !after_write(now, order)) return reads ? "reads what another writes" : "writes what another writes";
        if (written && reads && !same_block(writer, now.thread) && access != Access::READ_FRESH)
            return "reads what another block wrote, through the first-level cache";
        if (written && access == Access::READ_CONSTANT) return "reads as constant what is written";
        if (!reads && constant) return "writes what is read as constant";
        if (!reads && !after_reads(now, order)) return "writes what another reads";
        return nullptr;
    }

    bool after_write(const Moment& now, const Order& order) const {
        if (writer == now.thread) return true;
        if (!same_block(writer, now.thread)) return order.after(now, writer, write_barriers);
        return write_barriers < now.barriers || (same_warp(writer, now.thread) && write_meetings < now.meetings);
    }

    bool after_reads(const Moment& now, const Order& order) const {
        if (readers == Spread::NOBODY || (readers == Spread::THREAD && reader == now.thread)) return true;
        if (readers == Spread::GRID) return order.is_in(now); // whose reads they were is not known any more
        if (!same_block(reader, now.thread)) return order.after(now, reader, read_barriers);
        if (read_barriers < now.barriers) return true;
        return readers <= Spread::WARP && same_warp(reader, now.thread) && read_meetings < now.meetings;
    }

    // Of reads only those count on which there is no other that comes after them.
    void take_read(const Moment& now, const Order& order) {
        Spread wide = Spread::THREAD;
        if (readers != Spread::NOBODY && !(readers == Spread::THREAD && reader == now.thread)) {
            bool elsewhere = !same_block(reader, now.thread);
            if (readers == Spread::GRID || elsewhere) wide = elsewhere && order.is_in(now) ? Spread::THREAD : Spread::GRID;
            else if (read_barriers < now.barriers) wide = Spread::THREAD;
            else if (readers == Spread::BLOCK || !same_warp(reader, now.thread)) wide = Spread::BLOCK;
            else wide = read_meetings < now.meetings ? Spread::THREAD : Spread::WARP;
        }
        readers = wide;
        reader = now.thread;
        read_barriers = now.barriers, read_meetings = now.meetings;
    }
};

// One for each of as many bytes as the smallest element of a map has.
constexpr size_t GRAIN = 2;
constexpr size_t grains_of(size_t bytes) { return (bytes + GRAIN - 1) / GRAIN; }
typedef std::vector<Trace> Traces;

} // namespace standin::ptx
