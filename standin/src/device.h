// A GPU that nobody has, as unkind as the manuals allow: what is asked of a stream is done as late as can be, or, of those
// streams that are said to be eager, before all else; host memory is read when a copy happens, not when it is asked for;
// device memory is nobody's between requests, begins with NaN, ends where a page does, and is gone once it is freed.
#pragma once
#include "ptx/traces.h"
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace standin {

// Of CUresult, by the names of its manual.
enum Status : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_ISOLATION = 905,
};

// What went wrong on the device, if there is more to say than the driver does.
struct Fault {
    std::string words;
};

// Something that happens in a stream, for which others may wait.
struct Moment {
    bool reached = false;
};

// What a stream is asked for: work, or to reach a moment, or to await one.
struct Request {
    std::function<void()> work;
    std::shared_ptr<Moment> reaches, awaits;
};

typedef std::vector<Request> Graph;

struct Stream {
    std::deque<Request> waiting;
    std::optional<Graph> capture;
    bool capture_broken = false, eager = false;
};

struct Event {
    std::shared_ptr<Moment> moment;
    bool captured = false;
};

// What a variable says, or what is usual.
inline long setting(const char* variable, long usual) {
    const char* text = getenv(variable);
    return text && *text ? atol(text) : usual;
}

// What was allocated as one, and who has accessed it, if PTX has.
struct Piece {
    uint64_t address;
    size_t bytes;
    ptx::Traces* traces;
};

class Memory {
public:
    // 0 where there is not enough.
    uint64_t allocate(size_t bytes);
    bool free(uint64_t address);
    // Takes so much away that nobody sees, if there is as much: code, recordings.
    bool reserve(size_t bytes);
    void release(size_t bytes) { taken -= bytes; }
    bool holds(uint64_t address, size_t bytes) const;
    // That with this address in it; one of no bytes where there is none.
    Piece piece(uint64_t address);
    size_t left() const;
    size_t size() const { return most; }
    // Lets the device at its memory, or nobody.
    void open(bool to_device);

private:
    struct Block {
        size_t bytes, mapped;
        char* base;
        ptx::Traces traces;
    };
    std::map<uint64_t, Block> blocks;
    size_t taken = 0, most = setting("STANDIN_MEMORY", 8l << 30);
};

class Device {
public:
    Memory memory;

    Stream* new_stream();
    bool knows(const Stream* stream) const;
    void end(Stream* stream);

    // Asks a stream for something, or records it where the stream is being captured.
    Status ask(Stream* stream, Request request);
    Status ask(Stream* stream, std::function<void()> work) { return ask(stream, Request{std::move(work), {}, {}}); }
    // Does all that a stream was asked for, and of the others what that waits for.
    Status finish(Stream* stream);
    // Does what eager streams can do by now.
    void hurry();
    // What is wrong for good, after a fault.
    Status state() const { return broken ? LAUNCH_FAILED : SUCCESS; }

private:
    bool step(Stream* stream);
    bool step_any(const Stream* but);
    std::vector<std::unique_ptr<Stream>> streams;
    bool broken = false;
};

std::recursive_mutex& mutex();

// The device of this number, which is its context, too.
Device* device_of(int ordinal);
// That whose context this thread has entered.
extern thread_local Device* entered;
inline Device& device() { return *entered; }

// Runs a call of an API: one at a time, inside the context, on a device that works.
template <typename Body>
Status call(Body body) {
    std::lock_guard<std::recursive_mutex> one(mutex());
    if (!entered) return INVALID_CONTEXT;
    device().hurry();
    if (Status state = device().state()) return state;
    return body();
}

} // namespace standin
