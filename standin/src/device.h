// A stand-in for a GPU, as adversarial as the manuals allow: the requests of a stream are executed as late as possible,
// or, for streams that are set to be eager, as early as possible; host memory is read when a copy executes, not when it
// is requested; device memory is inaccessible between requests, is filled with NaN at first, ends at a page boundary,
// and becomes inaccessible when it is freed.
#pragma once
#include "ptx/traces.h"
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
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
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
};

// A fault on the device, with a description if there is more to say than the driver's error code does.
struct Fault {
    std::string words;
};

// A point in a stream for which other streams may wait.
struct Moment {
    bool reached = false;
};

// A request to a stream: to do work, to reach a moment, or to await one.
struct Request {
    std::function<void()> work;
    std::shared_ptr<Moment> reaches, awaits;
};

// What is captured of a stream's requests, and how many of them the capture's first stream has been made to wait for.
struct Part {
    std::vector<Request> requests;
    size_t joined = 0;
};

// Of the stream on which it began, and of those that wait for what it has captured.
struct Capture {
    struct Stream* first;
    std::map<struct Stream*, Part> parts;
    bool broken = false, over = false;
};

struct Stream {
    std::deque<Request> waiting;
    std::shared_ptr<Capture> capture;
    bool eager = false, passing = false; // one that passes belongs to a graph's launch, and ends with it
};

// A graph: the requests of the stream on which it is launched, then those of others, each with whether it is eager.
typedef std::vector<std::pair<bool, std::vector<Request>>> Graph;

struct Event {
    std::shared_ptr<Moment> moment;
    // Where it was captured, if it was: behind so many requests of this stream.
    std::shared_ptr<Capture> capture;
    Stream* on = nullptr;
    size_t position = 0;
};

// The number in an environment variable, or the default.
inline long setting(const char* variable, long usual) {
    const char* text = getenv(variable);
    return text && *text ? atol(text) : usual;
}

// One allocation, with the traces of accesses by PTX kernels.
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
    // Reserves memory that has no address, for code and recordings, if there is enough.
    bool reserve(size_t bytes);
    void release(size_t bytes) { taken -= bytes; }
    bool holds(uint64_t address, size_t bytes) const;
    // The allocation that contains this address; one of zero bytes if there is none.
    Piece piece(uint64_t address);
    size_t left() const;
    size_t size() const { return most; }
    // Makes the memory accessible, for the device, or inaccessible.
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
    // Requests what a graph consists of.
    Status launch(Stream* stream, const Graph& graph);

    // Asks a stream for something, or records it where the stream is being captured.
    Status ask(Stream* stream, Request request);
    Status ask(Stream* stream, std::function<void()> work) { return ask(stream, Request{std::move(work), {}, {}}); }
    // Executes all requests of a stream, and of other streams the requests for which it waits.
    Status finish(Stream* stream);
    // Executes the requests of eager streams that can run now.
    void hurry();
    // The status after a fault, which is permanent.
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
// The device whose context is current on this thread.
extern thread_local Device* entered;
inline Device& device() { return *entered; }

// Runs the body of an API call: one at a time, with a current context, on a device without a fault.
template <typename Body>
Status call(Body body) {
    std::lock_guard<std::recursive_mutex> one(mutex());
    if (!entered) return INVALID_CONTEXT;
    device().hurry();
    if (Status state = device().state()) return state;
    return body();
}

} // namespace standin
