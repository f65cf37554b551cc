#include "device.h"
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>

namespace standin {

thread_local Device* entered = nullptr;

Device* device_of(int ordinal) {
    static auto* all = new std::map<int, Device>; // lives as long as the process: nobody says when the last call comes
    return &(*all)[ordinal];
}

std::recursive_mutex& mutex() {
    static auto* one = new std::recursive_mutex;
    return *one;
}

constexpr size_t PAGE = 4096;
constexpr size_t ALIGNMENT = 256; // what the manual promises, and no more

uint64_t Memory::allocate(size_t bytes) {
    if (bytes > left()) return 0;
    size_t room = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    size_t pages = (room + PAGE - 1) / PAGE * PAGE;
    void* base = mmap(nullptr, pages + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return 0;
    // Large ones, which are opened and closed as often as small ones, in large pages, of which there are few.
    madvise(base, pages, MADV_HUGEPAGE);
    memset(base, 0xff, pages);
    // The last page stays inaccessible, so that accesses beyond the end are caught.
    mprotect(base, pages + PAGE, PROT_NONE);
    uint64_t address = reinterpret_cast<uint64_t>(base) + pages - room;
    blocks[address] = {bytes, pages, static_cast<char*>(base), {}};
    taken += bytes;
    return address;
}

bool Memory::free(uint64_t address) {
    auto block = blocks.find(address);
    if (block == blocks.end()) return false;
    taken -= block->second.bytes;
    // Its addresses are never reused; its physical memory is returned to the system.
    madvise(block->second.base, block->second.mapped, MADV_DONTNEED);
    mprotect(block->second.base, block->second.mapped, PROT_NONE);
    blocks.erase(block);
    return true;
}

bool Memory::reserve(size_t bytes) {
    if (bytes > left()) return false;
    taken += bytes;
    return true;
}

bool Memory::holds(uint64_t address, size_t bytes) const {
    auto next = blocks.upper_bound(address);
    if (next == blocks.begin()) return false;
    auto& [start, block] = *--next;
    return bytes <= block.bytes && address - start <= block.bytes - bytes;
}

Piece Memory::piece(uint64_t address) {
    auto next = blocks.upper_bound(address);
    if (next == blocks.begin()) return {};
    auto& [start, block] = *--next;
    if (address - start >= block.bytes) return {};
    block.traces.resize(ptx::grains_of(block.bytes));
    return {start, block.bytes, &block.traces};
}

size_t Memory::left() const { return most > taken ? most - taken : 0; }

void Memory::open(bool to_device) {
    for (auto& [_, block] : blocks) mprotect(block.base, block.mapped, to_device ? PROT_READ | PROT_WRITE : PROT_NONE);
}

Stream* Device::new_stream() {
    streams.push_back(std::make_unique<Stream>());
    static thread_local unsigned made; // per thread, whatever streams other threads create
    streams.back()->eager = setting("STANDIN_EAGER", 0) == made++ % 3 + 1;
    return streams.back().get();
}

bool Device::knows(const Stream* stream) const {
    return std::any_of(streams.begin(), streams.end(), [&](auto& known) { return known.get() == stream; });
}

void Device::end(Stream* stream) {
    streams.erase(std::find_if(streams.begin(), streams.end(), [&](auto& known) { return known.get() == stream; }));
}

Status Device::ask(Stream* stream, Request request) {
    if (!knows(stream)) return INVALID_HANDLE;
    if (stream->capture) {
        stream->capture->parts[stream].requests.push_back(std::move(request));
    } else {
        stream->waiting.push_back(std::move(request));
    }
    return SUCCESS;
}

Status Device::launch(Stream* stream, const Graph& graph) {
    streams.erase(std::remove_if(streams.begin(), streams.end(),
                                 [](auto& known) { return known->passing && known->waiting.empty(); }),
                  streams.end());
    // Each launch has moments of its own.
    std::map<Moment*, std::shared_ptr<Moment>> moments;
    auto fresh = [&](std::shared_ptr<Moment>& moment) {
        if (!moment) return;
        auto& own = moments[moment.get()];
        if (!own) own = std::make_shared<Moment>();
        moment = own;
    };
    for (auto& [eager, requests] : graph) {
        if (&requests != &graph.front().second) {
            streams.push_back(std::make_unique<Stream>());
            stream = streams.back().get();
            stream->eager = eager;
            stream->passing = true;
        }
        for (Request request : requests) {
            fresh(request.reaches);
            fresh(request.awaits);
            if (Status status = ask(stream, std::move(request))) return status;
        }
    }
    return SUCCESS;
}

// Executes the first request of a stream, unless that awaits a moment that has not been reached.
bool Device::step(Stream* stream) {
    if (stream->waiting.empty() || broken) return false;
    Request& first = stream->waiting.front();
    if (first.awaits && !first.awaits->reached) return false;
    Request request = std::move(first);
    stream->waiting.pop_front();
    if (request.reaches) request.reaches->reached = true;
    if (request.work) {
        try {
            request.work();
        } catch (const Fault& fault) {
            if (!fault.words.empty()) fprintf(stderr, "the stand-in GPU: %s\n", fault.words.c_str());
            broken = true;
        }
    }
    return true;
}

bool Device::step_any(const Stream* but) {
    for (auto& stream : streams)
        if (stream.get() != but && step(stream.get())) return true;
    return false;
}

Status Device::finish(Stream* stream) {
    if (stream->waiting.empty()) return state();
    memory.open(true);
    while (!stream->waiting.empty() && !broken) {
        if (!step(stream) && !step_any(stream)) {
            fprintf(stderr, "the stand-in GPU: deadlock: streams wait for each other\n");
            broken = true;
        }
    }
    memory.open(false);
    return state();
}

void Device::hurry() {
    bool opened = false;
    for (auto& stream : streams) {
        if (!stream->eager || stream->waiting.empty()) continue;
        if (!opened) memory.open(opened = true);
        while (step(stream.get())) {}
    }
    if (opened) memory.open(false);
}

} // namespace standin
