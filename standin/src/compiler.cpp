// NVRTC, whose machine code is a native library of this machine: kernels are compiled by the system's C++ compiler, as
// for the emulated device.

#include "device.h"
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <unistd.h>

using standin::setting;

namespace {

// Of nvrtcResult.
enum Result : int {
    SUCCESS = 0,
    INVALID_PROGRAM = 4,
    INVALID_OPTION = 5,
    COMPILATION = 6,
    NAMED_TOO_LATE = 8,
    NOT_COMPILED = 9,
    NO_NAME = 10,
};

struct Program {
    std::string source, log, code;
    std::vector<std::pair<std::string, std::string>> headers;
    std::vector<std::string> names, lowered;
    bool compiled = false;
};

std::string contents(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
}

void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

} // namespace

// No real NVRTC has this minor version, so kernels of this one in the cache are not mistaken for those of another.
EXPORTED Result nvrtcVersion(int* major, int* minor) {
    *major = setting("STANDIN_NVRTC", 13);
    *minor = 90;
    return SUCCESS;
}

static const int GENERATIONS[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

EXPORTED Result nvrtcGetNumSupportedArchs(int* count) {
    *count = sizeof GENERATIONS / sizeof *GENERATIONS;
    return SUCCESS;
}

EXPORTED Result nvrtcGetSupportedArchs(int* numbers) {
    memcpy(numbers, GENERATIONS, sizeof GENERATIONS);
    return SUCCESS;
}

EXPORTED const char* nvrtcGetErrorString(Result result) {
    return result == SUCCESS ? "NVRTC_SUCCESS" : result == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}

EXPORTED Result nvrtcCreateProgram(Program** program, const char* source, const char*, int headers,
                                   const char* const* texts, const char* const* names) {
    *program = new Program;
    (*program)->source = source;
    for (int i = 0; i < headers; i++) (*program)->headers.emplace_back(names[i], texts[i]);
    return SUCCESS;
}

EXPORTED Result nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

EXPORTED Result nvrtcAddNameExpression(Program* program, const char* name) {
    if (program->compiled) return NAMED_TOO_LATE;
    program->names.emplace_back(name);
    return SUCCESS;
}

EXPORTED Result nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    for (int i = 0; i < count; i++) {
        std::string option = options[i];
        bool known = option.rfind("--gpu-architecture=sm_", 0) == 0 || option == "--std=c++17" || option == "--ptxas-options=-v";
        if (!known) return INVALID_OPTION;
    }
    char folder[] = "/tmp/standin-XXXXXX";
    if (!mkdtemp(folder)) return COMPILATION;
    std::string inside = std::string(folder) + "/", source = program->source;
    for (auto& [name, text] : program->headers) write(inside + name, text);
    for (auto& name : program->names) {
        // The real compiler's names are mangled, and longer.
        program->lowered.push_back(std::to_string(program->lowered.size()));
        source += "\nEMULATED_ENTRY(" + program->lowered.back() + ", " + name + ")";
    }
    write(inside + "kernel.cpp", source + "\n");
    const char* compiler = getenv("CXX");
    std::string command = std::string(compiler ? compiler : "c++") +
        " -std=c++17 -O1 -DEMULATED -fPIC -shared -fno-strict-aliasing -ffp-contract=off -fvisibility=hidden -w -I" + folder +
        " -I'" EMULATED_HEADERS "' " + inside + "kernel.cpp -o " + inside + "kernel.so 2> " + inside + "log";
    int status = system(command.c_str());
    program->log = contents(inside + "log");
    program->code = contents(inside + "kernel.so");
    program->compiled = status == 0;
    (void)!system((std::string("rm -r ") + folder).c_str());
    return status == 0 ? SUCCESS : COMPILATION;
}

EXPORTED Result nvrtcGetProgramLogSize(Program* program, size_t* size) {
    *size = program->log.size() + 1;
    return SUCCESS;
}

EXPORTED Result nvrtcGetProgramLog(Program* program, char* log) {
    strcpy(log, program->log.c_str());
    return SUCCESS;
}

EXPORTED Result nvrtcGetLoweredName(Program* program, const char* name, const char** lowered) {
    if (!program->compiled) return NOT_COMPILED;
    for (size_t i = 0; i < program->lowered.size(); i++)
        if (program->names[i] == name) return *lowered = program->lowered[i].c_str(), SUCCESS;
    return NO_NAME;
}

EXPORTED Result nvrtcGetCUBINSize(Program* program, size_t* size) {
    *size = program->code.size();
    return program->compiled ? SUCCESS : INVALID_PROGRAM;
}

EXPORTED Result nvrtcGetCUBIN(Program* program, char* code) {
    memcpy(code, program->code.data(), program->code.size());
    return program->compiled ? SUCCESS : INVALID_PROGRAM;
}
