// Who accessed memory last, grain by grain, and whether it was in order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace standin::ptx {

// BEGIN_WRITE: an asynchronous copy has begun, which ends who knows when.
enum class Access : uint8_t { READ, WRITE, READ_FRESH, READ_CONSTANT, BEGIN_WRITE };

// When and by whom: threads of a launch are numbered, 1024 for a block.
struct Moment {
    uint32_t era; // the launch, or for shared memory the block: what was before is forgotten
    uint32_t thread;
    uint16_t barriers, meetings; // of the block and of the warp, that were before
};

constexpr uint32_t THREADS = 1024;

// Whose reads a trace has: a thread's, or those of several of a warp, of a block, of a grid.
enum class Spread : uint8_t { NOBODY, THREAD, WARP, BLOCK, GRID };

struct Trace {
    uint32_t era = 0;
    uint32_t writer, reader;
    uint16_t write_barriers, write_meetings, read_barriers, read_meetings;
    bool written, copying, constant;
    Spread readers;

    // Takes an access into the trace; or says what is wrong with it, and takes it nevertheless. `acquired`: this block
    // comes after those whose tickets were taken before.
    const char* access(const Moment& now, Access access, bool acquired) {
        if (era != now.era) {
            era = now.era;
            written = copying = constant = false;
            readers = Spread::NOBODY;
        }
        bool writes = access == Access::WRITE || access == Access::BEGIN_WRITE;
        const char* wrong = nullptr;
        if (written && !after_write(now, acquired))
            wrong = writes ? "writes what another writes" : "reads what another writes";
        if (written && copying && (!writes || writer != now.thread)) wrong = "has what a copy is on its way to";
        if (written && !writes && writer / THREADS != now.thread / THREADS && access != Access::READ_FRESH)
            wrong = "reads what another block wrote, through the first-level cache";
        if (written && access == Access::READ_CONSTANT) wrong = "reads as constant what is written";
        if (writes && constant) wrong = "writes what is read as constant";
        if (writes && !after_reads(now, acquired)) wrong = "writes what another reads";
        if (writes) {
            written = true;
            copying = access == Access::BEGIN_WRITE;
            writer = now.thread;
            write_barriers = now.barriers, write_meetings = now.meetings;
        } else {
            constant |= access == Access::READ_CONSTANT;
            take_read(now);
        }
        return wrong;
    }

private:
    static bool same_block(uint32_t a, uint32_t b) { return a / THREADS == b / THREADS; }
    static bool same_warp(uint32_t a, uint32_t b) { return a / 32 == b / 32; }

    bool after_write(const Moment& now, bool acquired) const {
        if (writer == now.thread) return true;
        if (!same_block(writer, now.thread)) return acquired;
        return write_barriers < now.barriers || (same_warp(writer, now.thread) && write_meetings < now.meetings);
    }

    bool after_reads(const Moment& now, bool acquired) const {
        if (readers == Spread::NOBODY || (readers == Spread::THREAD && reader == now.thread)) return true;
        if (readers == Spread::GRID || !same_block(reader, now.thread)) return acquired;
        if (read_barriers < now.barriers) return true;
        return readers <= Spread::WARP && same_warp(reader, now.thread) && read_meetings < now.meetings;
    }

    // Of reads only those count on which there is no other that comes after them.
    void take_read(const Moment& now) {
        Spread wide = Spread::THREAD;
        if (readers != Spread::NOBODY && !(readers == Spread::THREAD && reader == now.thread)) {
            if (readers == Spread::GRID || !same_block(reader, now.thread)) wide = Spread::GRID;
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
