// Which threads accessed memory last, grain by grain, to detect data races.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace standin::ptx {

// FRESH bypasses the L1 cache, CONSTANT uses the read-only cache. An asynchronous copy begins to write, and later ends.
// A ticket is an atomic read and write.
enum class Access : uint8_t { READ, READ_FRESH, READ_CONSTANT, WRITE, BEGIN_WRITE, END_WRITE, TICKET };
inline bool is_read(Access access) { return access <= Access::READ_CONSTANT; }

// When an access happens, and by which thread: the threads of a launch are numbered, with 1024 numbers per block.
struct Moment {
    uint32_t era; // the launch, or for shared memory the block: earlier accesses are forgotten
    uint32_t thread;
    uint16_t barriers, meetings; // how many the block and the warp have passed before
};

constexpr uint32_t THREADS = 1024;

// The point at which a thread enters, or leaves, the order that tickets create among blocks, and after how many
// barriers of its block. It covers the threads that a barrier has synchronised with it, too.
struct Crossing {
    int32_t barriers = -1; // none
    uint32_t thread = 0;
};

// The order among the blocks of a launch.
struct Order {
    const std::vector<Crossing>* out; // when each block took its last ticket
    Crossing in; // when this block came to see what the others had written before their tickets

    // Whether an access of this block is ordered after an access by a thread of another block.
    bool after(const Moment& now, uint32_t other, uint16_t barriers) const {
        const Crossing& left = (*out)[other / THREADS];
        bool was_before = left.barriers > barriers || (left.barriers >= 0 && left.thread == other);
        return was_before && is_in(now);
    }
    bool is_in(const Moment& now) const {
        return in.barriers >= 0 && (now.barriers > in.barriers || now.thread == in.thread);
    }
};

// Which threads a trace's reads are from: one thread, or several of a warp, of a block, or of the grid.
enum class Spread : uint8_t { NOBODY, THREAD, WARP, BLOCK, GRID };

struct Trace {
    uint32_t era = 0;
    uint32_t writer, reader;
    uint16_t write_barriers, write_meetings, read_barriers, read_meetings;
    bool written, copying, constant, counts;
    Spread readers;

    // Adds an access to the trace. Returns what is wrong with it, or null; it is added in either case.
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
            return written || readers != Spread::NOBODY ? "takes a ticket from a word with other uses" : nullptr;
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
        if (readers == Spread::GRID) return order.is_in(now); // which threads read is not known any more
        if (!same_block(reader, now.thread)) return order.after(now, reader, read_barriers);
        if (read_barriers < now.barriers) return true;
        return readers <= Spread::WARP && same_warp(reader, now.thread) && read_meetings < now.meetings;
    }

    // Only reads that are not followed, in order, by another read are kept.
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

// The bytes per trace: the size of the smallest element, bf16.
constexpr size_t GRAIN = 2;
constexpr size_t grains_of(size_t bytes) { return (bytes + GRAIN - 1) / GRAIN; }
typedef std::vector<Trace> Traces;

} // namespace standin::ptx
