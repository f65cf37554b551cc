// Kernels that the system's C++ compiler has made, with the headers of the emulated device: see `compiler.cpp`.

#include "code.h"
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

namespace standin {

namespace {

// As `emulated/device.h` declares it.
struct Launch {
    unsigned grid[3], threads[3], shared_bytes;
    uint64_t seed;
    void** arguments;
};

// The size of a parameter, by the letter that `emulated/device.h` gives its type.
size_t size_of(char letter) {
    switch (letter) {
    case 'i':
    case 'f': return 4;
    case 'v': return 12 * 8;
    default: return 8;
    }
}

struct NativeKernel : Kernel {
    std::string signature;
    const char* (*launch)(const Launch*);

    void run(Device& device, const Grid& grid, const std::vector<void*>& arguments, uint64_t number) override {
        auto places = arguments;
        for (size_t i = 0; i < arguments.size(); i++) {
            uint64_t address = 0;
            if (signature[i] == 'p') memcpy(&address, arguments[i], 8);
            if (address && !device.memory.holds(address, 0)) throw Fault{"a kernel is given an unallocated address"};
        }
        Launch asked = {{}, {}, grid.shared_bytes, number, places.data()};
        memcpy(asked.grid, grid.blocks, sizeof grid.blocks);
        memcpy(asked.threads, grid.threads, sizeof grid.threads);
        if (const char* error = launch(&asked)) throw Fault{name + ": " + error};
    }
};

struct Library : Code {
    void* handle;
    std::map<std::string, NativeKernel> kernels;

    explicit Library(void* handle) : handle(handle) {}
    ~Library() override { dlclose(handle); }

    Kernel* kernel(const std::string& name) override {
        // Kernels are found by their lowered names: see `nvrtcGetLoweredName`.
        void* launch = dlsym(handle, ("launch_" + name).c_str());
        void* signature = dlsym(handle, ("signature_" + name).c_str());
        if (!launch || !signature) return nullptr;
        NativeKernel& kernel = kernels[name];
        kernel.name = name;
        kernel.signature = reinterpret_cast<const char* (*)()>(signature)();
        kernel.launch = reinterpret_cast<decltype(kernel.launch)>(launch);
        kernel.parameters.clear();
        for (char letter : kernel.signature) kernel.parameters.push_back(size_of(letter));
        return &kernel;
    }
};

// The image in memory is that of the file, which ends with the section header table.
size_t length_of(const void* image) {
    Elf64_Ehdr head;
    memcpy(&head, image, sizeof head);
    return memcmp(head.e_ident, ELFMAG, SELFMAG) ? 0 : head.e_shoff + size_t(head.e_shnum) * head.e_shentsize;
}

} // namespace

std::unique_ptr<Code> load_native(const void* image) {
    size_t length = length_of(image);
    if (length == 0) return nullptr;
    int file = memfd_create("kernels", 0); // stays open: for a path that it knows, the loader returns the old library
    if (file < 0 || write(file, image, length) != ssize_t(length)) return nullptr;
    void* handle = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    return handle ? std::make_unique<Library>(handle) : nullptr;
}

} // namespace standin
