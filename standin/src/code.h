// Kernels, as the driver has them once they are loaded: machine code of this machine's, or PTX.
#pragma once
#include "device.h"

namespace standin {

struct Grid {
    unsigned blocks[3], threads[3], shared_bytes;
};

struct Kernel {
    std::string name;
    std::vector<size_t> parameters; // the bytes of each
    int shared_bytes = 0; // that it declares
    unsigned most_threads = 1024;

    virtual ~Kernel() {}
    // Runs a launch to its end, or throws a fault. `number` counts all launches.
    virtual void run(Device& device, const Grid& grid, const std::vector<void*>& arguments, uint64_t number) = 0;
};

struct Code {
    virtual ~Code() {}
    // Null where there is none of this name.
    virtual Kernel* kernel(const std::string& name) = 0;
};

// Loads a library of the stand-in compiler; null if the image is not one.
std::unique_ptr<Code> load_native(const void* image);
// Loads zero-terminated PTX. Throws a fault if something in it is not supported.
std::unique_ptr<Code> load_ptx(const char* text);

} // namespace standin
