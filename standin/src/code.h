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
    // Runs a launch to its end, or throws a fault. `number` says which of all launches it is.
    virtual void run(Device& device, const Grid& grid, const std::vector<void*>& arguments, uint64_t number) = 0;
};

struct Code {
    virtual ~Code() {}
    // Null where there is none of this name.
    virtual Kernel* kernel(const std::string& name) = 0;
};

// A library, as the compiler that is played makes them; null where it is none.
std::unique_ptr<Code> load_native(const void* image);
// PTX, up to a zero. Throws a fault where it has what is not understood.
std::unique_ptr<Code> load_ptx(const char* text);

} // namespace standin
