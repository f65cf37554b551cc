// The functions of the driver that are called, as its manual describes them.

#include "code.h"
#include <algorithm>
#include <chrono>
#include <cstring>
#include <sys/mman.h>
#include <thread>

using namespace standin;

namespace {

bool initialized = false;

std::map<void*, size_t> locked; // page-locked host memory, with its length
std::map<Event*, std::unique_ptr<Event>> events;
std::map<const void*, Graph> graphs; // captured graphs, and executable ones

// A loaded module, and the stream on which its kernels run. On several they might run at once, which kernels that count in
// their module's memory how many of their blocks are done do not survive: so that is refused.
struct Module {
    std::unique_ptr<Code> code;
    Stream* stream = nullptr;
};
std::map<void*, Module> modules;

struct Function {
    Device* on;
    Module* module;
    Kernel* kernel;
    int dynamic_shared; // that it may have
};

// The shared memory that a block may have: as on a GPU of compute capability 9.0.
int max_shared() { return int(setting("STANDIN_SHARED", 227 << 10)); }

// What the driver takes of the device's memory for a module, or a recording.
constexpr size_t OWN = 1 << 20;

template <typename Body>
Status before_any_context(Body body) {
    std::lock_guard<std::recursive_mutex> one(mutex());
    return initialized ? body() : NOT_INITIALIZED;
}

// Requests a copy on the device, or from or to the host. Device memory is checked at the request and at the execution,
// because it may have been freed in between.
Status ask_copy(Stream* stream, void* to, const void* from, size_t bytes, std::initializer_list<uint64_t> on_device) {
    std::vector<uint64_t> places(on_device);
    for (uint64_t place : places)
        if (!device().memory.holds(place, bytes)) return INVALID_VALUE;
    return device().ask(stream, [=] {
        for (uint64_t place : places)
            if (!device().memory.holds(place, bytes)) throw Fault{"a copy of memory that has been freed in between"};
        auto first = std::min<const void*>(to, from), second = std::max<const void*>(to, from);
        if (static_cast<const char*>(first) + bytes > second) throw Fault{"a copy between ranges that overlap"};
        memcpy(to, from, bytes);
    });
}

void* host(uint64_t address) { return reinterpret_cast<void*>(address); }

} // namespace

EXPORTED Status cuInit(unsigned flags) {
    std::lock_guard<std::recursive_mutex> one(mutex());
    if (flags) return INVALID_VALUE;
    if (setting("STANDIN_DEVICES", 1) == 0) return NO_DEVICE;
    initialized = true;
    return SUCCESS;
}

EXPORTED Status cuDriverGetVersion(int* version) {
    *version = setting("STANDIN_DRIVER", 13000);
    return SUCCESS;
}

// NVRTC asks a driver, if there is one, for undocumented functions, and works without them.
EXPORTED Status cuGetExportTable(const void** table, const void*) {
    *table = nullptr;
    return NOT_FOUND;
}

EXPORTED Status cuGetErrorString(int error, const char** words) {
    static const std::map<int, const char*> all = {
        {SUCCESS, "no error"},
        {INVALID_VALUE, "invalid argument"},
        {OUT_OF_MEMORY, "out of memory"},
        {NOT_INITIALIZED, "initialization error"},
        {NO_DEVICE, "no CUDA-capable device is detected"},
        {INVALID_DEVICE, "invalid device ordinal"},
        {INVALID_IMAGE, "device kernel image is invalid"},
        {INVALID_CONTEXT, "invalid device context"},
        {INVALID_HANDLE, "invalid resource handle"},
        {NOT_FOUND, "named symbol not found"},
        {NOT_READY, "device not ready"},
        {LAUNCH_FAILED, "unspecified launch failure"},
        {CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"},
        {CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"},
        {CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"},
    };
    auto found = all.find(error);
    *words = found == all.end() ? nullptr : found->second;
    return *words ? SUCCESS : INVALID_VALUE;
}

// Devices.

EXPORTED Status cuDeviceGetCount(int* count) {
    return before_any_context([&] { return *count = setting("STANDIN_DEVICES", 1), SUCCESS; });
}

EXPORTED Status cuDeviceGet(int* device, int ordinal) {
    return before_any_context([&] {
        if (ordinal < 0 || ordinal >= setting("STANDIN_DEVICES", 1)) return INVALID_DEVICE;
        *device = ordinal;
        return SUCCESS;
    });
}

EXPORTED Status cuDeviceGetName(char* name, int length, int) {
    return before_any_context([&] {
        strncpy(name, "stand-in GPU", length - 1);
        name[length - 1] = 0;
        return SUCCESS;
    });
}

EXPORTED Status cuDeviceTotalMem_v2(size_t* bytes, int ordinal) {
    return before_any_context([&] { return *bytes = device_of(ordinal)->memory.size(), SUCCESS; });
}

EXPORTED Status cuDeviceGetAttribute(int* value, int attribute, int) {
    return before_any_context([&] {
        long capability = setting("STANDIN_CAPABILITY", 90);
        switch (attribute) {
        case 16: *value = setting("STANDIN_MULTIPROCESSORS", 132); return SUCCESS;
        case 75: *value = capability / 10; return SUCCESS;
        case 76: *value = capability % 10; return SUCCESS;
        case 97: *value = max_shared(); return SUCCESS; // the opt-in maximum
        default: return INVALID_VALUE;
        }
    });
}

EXPORTED Status cuDevicePrimaryCtxRetain(Device** context, int ordinal) {
    return before_any_context([&] {
        if (ordinal < 0 || ordinal >= setting("STANDIN_DEVICES", 1)) return INVALID_VALUE;
        return *context = device_of(ordinal), SUCCESS;
    });
}

EXPORTED Status cuCtxSetCurrent(Device* context) {
    return before_any_context([&] {
        for (int ordinal = 0; context && context != device_of(ordinal); ordinal++)
            if (ordinal + 1 == setting("STANDIN_DEVICES", 1)) return INVALID_CONTEXT;
        entered = context;
        return SUCCESS;
    });
}

// Memory.

EXPORTED Status cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    return call([&] {
        if (bytes == 0) return INVALID_VALUE;
        *address = device().memory.allocate(bytes);
        return *address ? SUCCESS : OUT_OF_MEMORY;
    });
}

EXPORTED Status cuMemFree_v2(uint64_t address) {
    // The manual does not say that it waits for the device, so it does not.
    return call([&] { return device().memory.free(address) ? SUCCESS : INVALID_VALUE; });
}

EXPORTED Status cuMemGetInfo_v2(size_t* left, size_t* all) {
    return call([&] {
        *left = device().memory.left();
        *all = device().memory.size();
        return SUCCESS;
    });
}

EXPORTED Status cuMemHostAlloc(void** start, size_t bytes, unsigned) {
    return call([&] {
        void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED) return OUT_OF_MEMORY;
        locked[*start = pages] = bytes;
        return SUCCESS;
    });
}

EXPORTED Status cuMemFreeHost(void* start) {
    return call([&] {
        auto found = locked.find(start);
        if (found == locked.end()) return INVALID_VALUE;
        // Its addresses are not reused: a late access crashes the program.
        madvise(start, found->second, MADV_DONTNEED);
        mprotect(start, found->second, PROT_NONE);
        locked.erase(found);
        return SUCCESS;
    });
}

EXPORTED Status cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
    return call([&] { return ask_copy(stream, host(to), from, bytes, {to}); });
}

EXPORTED Status cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
    return call([&] { return ask_copy(stream, to, host(from), bytes, {from}); });
}

EXPORTED Status cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
    return call([&] { return ask_copy(stream, host(to), host(from), bytes, {to, from}); });
}

EXPORTED Status cuMemsetD8Async(uint64_t to, unsigned char byte, size_t bytes, Stream* stream) {
    return call([&] {
        if (!device().memory.holds(to, bytes)) return INVALID_VALUE;
        return device().ask(stream, [=] {
            if (!device().memory.holds(to, bytes)) throw Fault{"a fill of memory that was freed after the request"};
            memset(host(to), byte, bytes);
        });
    });
}

// Streams and events.

EXPORTED Status cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return call([&] { return *least = 0, *greatest = -5, SUCCESS; });
}

// What is executed first depends on STANDIN_EAGER alone.
EXPORTED Status cuStreamCreateWithPriority(Stream** stream, unsigned, int) {
    return call([&] { return *stream = device().new_stream(), SUCCESS; });
}

EXPORTED Status cuStreamDestroy_v2(Stream* stream) {
    return call([&] {
        if (!device().knows(stream)) return INVALID_HANDLE;
        if (Status status = device().finish(stream)) return status;
        device().end(stream);
        return SUCCESS;
    });
}

EXPORTED Status cuStreamSynchronize(Stream* stream) {
    return call([&] {
        if (!device().knows(stream)) return INVALID_HANDLE;
        if (stream->capture) return stream->capture->broken = true, CAPTURE_UNSUPPORTED;
        return device().finish(stream);
    });
}

EXPORTED Status cuStreamQuery(Stream* stream) {
    return call([&] {
        if (!device().knows(stream)) return INVALID_HANDLE;
        if (stream->capture) return stream->capture->broken = true, CAPTURE_UNSUPPORTED;
        return stream->waiting.empty() ? SUCCESS : NOT_READY;
    });
}

EXPORTED Status cuProfilerStart() {
    return call([] { return SUCCESS; });
}

EXPORTED Status cuProfilerStop() {
    return call([] { return SUCCESS; });
}

EXPORTED Status cuStreamIsCapturing(Stream* stream, int* status) {
    return call([&] {
        if (!device().knows(stream)) return INVALID_HANDLE;
        *status = !stream->capture ? 0 : stream->capture->broken ? 2 : 1;
        return SUCCESS;
    });
}

EXPORTED Status cuEventCreate(Event** event, unsigned) {
    return call([&] {
        auto made = std::make_unique<Event>();
        *event = made.get();
        events[made.get()] = std::move(made);
        return SUCCESS;
    });
}

EXPORTED Status cuEventDestroy_v2(Event* event) {
    return call([&] { return events.erase(event) ? SUCCESS : INVALID_HANDLE; });
}

EXPORTED Status cuEventRecord(Event* event, Stream* stream) {
    return call([&] {
        if (!events.count(event) || !device().knows(stream)) return INVALID_HANDLE;
        event->moment = std::make_shared<Moment>();
        Status asked = device().ask(stream, Request{{}, event->moment, {}});
        event->capture = stream->capture;
        event->on = stream;
        event->position = stream->capture ? stream->capture->parts[stream].requests.size() : 0;
        return asked;
    });
}

EXPORTED Status cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    return call([&] {
        if (!events.count(event) || !device().knows(stream)) return INVALID_HANDLE;
        if (!event->moment) return SUCCESS; // an event that was never recorded is not waited for
        // Captured work may not wait for work that is not captured, nor for another capture.
        if (event->capture && event->capture->over) return INVALID_VALUE;
        if (stream->capture && !event->capture) return CAPTURE_ISOLATION;
        if (stream->capture && stream->capture != event->capture) return CAPTURE_MERGE;
        if (event->capture) {
            stream->capture = event->capture; // it joins the capture, if it was not part of it
            Part& part = event->capture->parts[event->on];
            if (stream == event->capture->first) part.joined = std::max(part.joined, event->position);
        }
        return device().ask(stream, Request{{}, {}, event->moment});
    });
}

// Kernels.

EXPORTED Status cuModuleLoadData(void** module, const void* image) {
    return call([&] {
        std::unique_ptr<Code> code = load_native(image);
        try {
            if (!code) code = load_ptx(static_cast<const char*>(image));
        } catch (const Fault& fault) {
            fprintf(stderr, "the stand-in GPU: %s\n", fault.words.c_str());
            return INVALID_IMAGE;
        }
        if (!device().memory.reserve(OWN)) return OUT_OF_MEMORY;
        *module = code.get();
        modules[*module].code = std::move(code);
        return SUCCESS;
    });
}

EXPORTED Status cuModuleUnload(void* module) {
    return call([&] {
        if (!modules.erase(module)) return INVALID_HANDLE;
        device().memory.release(OWN);
        return SUCCESS;
    });
}

EXPORTED Status cuModuleGetFunction(Function** function, void* module, const char* name) {
    return call([&] {
        auto found = modules.find(module);
        Kernel* kernel = found == modules.end() ? nullptr : found->second.code->kernel(name);
        if (!kernel) return NOT_FOUND;
        // Never freed, like the module. By default a block may have 48 KiB of shared memory in total.
        *function = new Function{&device(), &found->second, kernel, (48 << 10) - kernel->shared_bytes};
        return SUCCESS;
    });
}

EXPORTED Status cuFuncGetAttribute(int* value, int attribute, Function* function) {
    return call([&] {
        if (attribute != 1) return INVALID_VALUE; // the static shared memory
        *value = function->kernel->shared_bytes;
        return SUCCESS;
    });
}

EXPORTED Status cuFuncSetAttribute(Function* function, int attribute, int value) {
    return call([&] {
        int most = max_shared() - function->kernel->shared_bytes;
        if (attribute != 8 || value < 0 || value > most) return INVALID_VALUE;
        function->dynamic_shared = value;
        return SUCCESS;
    });
}

EXPORTED Status cuLaunchKernel(Function* function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                               unsigned threads_y, unsigned threads_z, unsigned shared, Stream* stream, void** values,
                               void** extra) {
    return call([&] {
        if (function->on != &device()) return INVALID_HANDLE;
        Stream*& own = function->module->stream;
        if (!own) own = stream;
        if (own != stream) {
            fprintf(stderr, "the stand-in GPU: kernels of one loaded module on two streams may run at once\n");
            return INVALID_HANDLE;
        }
        Kernel* kernel = function->kernel;
        bool grid = x && y && z && x <= 0x7fffffff && y <= 65535 && z <= 65535;
        uint64_t threads = uint64_t(threads_x) * threads_y * threads_z;
        bool block = threads_x && threads_y && threads_z && threads <= kernel->most_threads;
        if (!grid || !block || extra || int(shared) > function->dynamic_shared) return INVALID_VALUE;
        std::vector<std::vector<char>> arguments;
        for (size_t i = 0; i < kernel->parameters.size(); i++) {
            auto value = static_cast<const char*>(values[i]);
            arguments.emplace_back(value, value + kernel->parameters[i]);
        }
        return device().ask(stream, [=]() mutable {
            static uint64_t number = 0;
            static const uint64_t faulty = setting("STANDIN_FAULT", 0);
            if (++number == faulty) throw Fault{}; // as STANDIN_FAULT demands
            std::vector<void*> places;
            for (auto& argument : arguments) places.push_back(argument.data());
            Grid asked = {{x, y, z}, {threads_x, threads_y, threads_z}, shared};
            kernel->run(*function->on, asked, places, number);
        });
    });
}

// Graphs.

EXPORTED Status cuStreamBeginCapture_v2(Stream* stream, int mode) {
    return call([&] {
        if (!device().knows(stream)) return INVALID_HANDLE;
        if (stream->capture || mode < 0 || mode > 2) return INVALID_VALUE;
        stream->capture = std::make_shared<Capture>(Capture{stream, {}});
        return SUCCESS;
    });
}

EXPORTED Status cuStreamEndCapture(Stream* stream, const void** graph) {
    // A GPU takes its time, too, and until then whatever is asked belongs to the recording.
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    return call([&] {
        if (!device().knows(stream)) return INVALID_HANDLE;
        if (!stream->capture) return INVALID_VALUE;
        std::shared_ptr<Capture> capture = stream->capture;
        if (stream != capture->first) return CAPTURE_UNMATCHED;
        capture->over = true;
        *graph = nullptr;
        Graph captured = {{stream->eager, std::move(capture->parts[stream].requests)}};
        bool joined = true;
        stream->capture.reset();
        for (auto& [other, part] : capture->parts) {
            if (other == stream) continue;
            other->capture.reset();
            joined &= part.joined == part.requests.size();
            captured.emplace_back(other->eager, std::move(part.requests));
        }
        if (capture->broken) return CAPTURE_INVALIDATED;
        if (!joined) return CAPTURE_UNJOINED;
        *graph = new char;
        graphs[*graph] = std::move(captured);
        return SUCCESS;
    });
}

EXPORTED Status cuGraphInstantiateWithFlags(const void** executable, const void* graph, unsigned long long flags) {
    return call([&] {
        auto found = graphs.find(graph);
        // Only nodes' priorities can be asked for, and are ignored, as those of streams are.
        if (found == graphs.end() || flags & ~8ull) return INVALID_VALUE;
        if (!device().memory.reserve(OWN)) return OUT_OF_MEMORY;
        *executable = new char;
        graphs[*executable] = found->second;
        return SUCCESS;
    });
}

static Status forget(const void* graph, size_t held) {
    return call([&] {
        if (!graphs.erase(graph)) return INVALID_VALUE;
        delete static_cast<const char*>(graph);
        device().memory.release(held);
        return SUCCESS;
    });
}

EXPORTED Status cuGraphDestroy(const void* graph) { return forget(graph, 0); }

EXPORTED Status cuGraphExecDestroy(const void* executable) { return forget(executable, OWN); }

EXPORTED Status cuGraphLaunch(const void* executable, Stream* stream) {
    return call([&] {
        auto found = graphs.find(executable);
        if (found == graphs.end() || !device().knows(stream) || stream->capture) return INVALID_VALUE;
        return device().launch(stream, found->second);
    });
}
