// PTX from text to instructions.

#include "ptx.h"
#include "reader.h"

namespace standin::ptx {

namespace {

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// The bytes of a type, by its name: ".f32", ".b8", ".pred".
size_t size_of(const std::string& type) {
    static const std::map<std::string, size_t> all = {
        {".pred", 1}, {".b8", 1},  {".u8", 1},  {".s8", 1},  {".b16", 2}, {".u16", 2}, {".s16", 2}, {".b32", 4},
        {".u32", 4},  {".s32", 4}, {".f32", 4}, {".b64", 8}, {".u64", 8}, {".s64", 8}, {".f64", 8},
    };
    auto found = all.find(type);
    if (found == all.end()) throw Fault{"PTX: no type is called " + type};
    return found->second;
}

struct Declared {
    size_t bytes = 0, align = 1;
    bool dynamic = false;
};

// Reads a variable after its state space: `.align 4 .b8 name[16]`, `.u32 name`, or `.u64 .ptr .align 1 name`, where the
// alignment is that of the memory pointed to.
std::string read_variable(Reader& reader, Declared& variable) {
    if (reader.skip(".align")) variable.align = reader.number();
    variable.bytes = size_of(reader.take());
    if (reader.skip(".ptr")) reader.expect(".align"), reader.number();
    std::string name = reader.take();
    if (reader.skip("[")) {
        variable.dynamic = reader.token == "]";
        if (!variable.dynamic) variable.bytes *= reader.number();
        reader.expect("]");
    }
    return name;
}

class KernelReader {
public:
    KernelReader(Module& module, PtxKernel& kernel, Reader& reader, std::map<std::string, Declared> shared)
        : module(module), kernel(kernel), reader(reader), shared(std::move(shared)) {}

    void read() {
        read_parameters();
        while (!reader.skip("{")) {
            if (reader.skip(".maxntid")) {
                kernel.most_threads = reader.number();
                while (reader.skip(",")) kernel.most_threads *= reader.number();
            } else if (reader.skip(".minnctapersm")) {
                reader.number();
            } else {
                reader.fail("a kernel with the unknown directive " + reader.token);
            }
        }
        for (int depth = 1; depth > 0;) {
            if (reader.skip("{")) depth++;
            else if (reader.skip("}")) depth--;
            else if (reader.token[0] == '.') read_directive();
            else if (reader.token[0] == '$') read_label();
            else read_instruction();
        }
        finish();
    }

private:
    Module& module;
    PtxKernel& kernel;
    Reader& reader;
    std::map<std::string, Declared> shared;
    std::map<std::string, size_t> parameters, local;
    std::map<std::string, uint32_t> widths; // of registers, by the name that they are declared with
    std::map<std::string, uint32_t> registers; // their rows
    std::map<std::pair<uint32_t, uint64_t>, uint32_t> constants;
    std::map<std::string, uint32_t> labels;
    std::map<std::string, uint64_t> placed; // variables in shared memory that the kernel uses
    std::vector<std::pair<uint32_t, std::string>> branches; // to be filled in, by instruction
    std::vector<std::pair<uint32_t, uint32_t>> dynamic; // to be filled in: rows and widths
    size_t parameter_bytes = 0;
    uint32_t last_width = 0; // of the value that was read last

    void read_parameters() {
        reader.expect("(");
        while (!reader.skip(")")) {
            reader.expect(".param");
            Declared variable;
            std::string name = read_variable(reader, variable);
            size_t align = variable.align > 1 ? variable.align : variable.bytes;
            parameters[name] = parameter_bytes = round_up(parameter_bytes, align);
            kernel.offsets.push_back(parameter_bytes);
            kernel.parameters.push_back(variable.bytes);
            parameter_bytes += variable.bytes;
            reader.skip(",");
        }
    }

    void read_directive() {
        if (reader.skip(".reg")) {
            size_t width = size_of(reader.take());
            do {
                std::string name = reader.take();
                bool before = !widths.emplace(name, width).second;
                if (reader.skip("<")) {
                    if (before) reader.fail(name + " is declared twice");
                    reader.number();
                    reader.expect(">");
                } else { // an earlier block may have had a register of this name
                    widths[name] = width;
                    registers.erase(name);
                }
            } while (reader.skip(","));
            reader.expect(";");
        } else if (reader.skip(".local")) {
            Declared variable;
            std::string name = read_variable(reader, variable);
            local[name] = kernel.local_bytes = round_up(kernel.local_bytes, variable.align);
            kernel.local_bytes += variable.bytes;
            reader.expect(";");
        } else if (reader.skip(".shared")) {
            Declared variable;
            std::string name = read_variable(reader, variable);
            shared[name] = variable;
            reader.expect(";");
        } else if (reader.token == ".pragma") {
            reader.pass();
        } else {
            reader.fail("no directive is called " + reader.token);
        }
    }

    void read_label() {
        labels[reader.take()] = kernel.code.size();
        reader.expect(":");
    }

    uint32_t new_row(size_t width) {
        uint32_t row = kernel.row_bytes;
        // Rows are aligned to 64 bytes, for vector loads.
        kernel.row_bytes += round_up(LANES * width, 64);
        return row;
    }

    uint32_t register_width(const std::string& name) const {
        auto declared = widths.find(name);
        if (declared == widths.end()) declared = widths.find(name.substr(0, name.find_first_of("0123456789")));
        if (declared == widths.end()) reader.fail("no register is called " + name);
        return declared->second;
    }

    uint32_t register_row(const std::string& name, uint32_t width) {
        last_width = register_width(name);
        if (width && width != last_width) reader.fail(name + " has another width than the instruction");
        auto [found, made] = registers.try_emplace(name, 0);
        if (made) found->second = new_row(last_width);
        return found->second;
    }

    uint32_t constant_row(uint64_t bits, uint32_t width) {
        auto [found, made] = constants.try_emplace({width, bits}, 0);
        if (made) {
            found->second = new_row(width);
            kernel.constants.push_back({found->second, width, bits});
        }
        return found->second;
    }

    // The row of the address that a name stands for. Dynamic shared memory, which follows all variables, gets its
    // address in `finish`.
    uint32_t address_row(const std::string& name, uint32_t width) {
        last_width = width = width ? width : 8;
        if (width != 8 && !(width == 4 && shared.count(name))) reader.fail("the address of " + name + " is of 64 bits");
        auto in_shared = shared.find(name);
        if (in_shared != shared.end() && in_shared->second.dynamic) {
            dynamic.emplace_back(new_row(width), width);
            return dynamic.back().first;
        }
        if (in_shared != shared.end()) {
            auto [place, made] = placed.try_emplace(name, 0);
            if (made) {
                // No two variables share a grain, the unit for which traces are kept.
                size_t align = std::max<size_t>(in_shared->second.align, 4);
                place->second = round_up(kernel.shared_bytes, align);
                kernel.shared_bytes = place->second + in_shared->second.bytes;
            }
            return constant_row(SHARED + place->second, width);
        }
        if (local.count(name)) return constant_row(LOCAL + local[name], 8);
        auto in_global = module.variables.find(name);
        if (in_global == module.variables.end()) reader.fail("nothing is called " + name);
        return constant_row(reinterpret_cast<uint64_t>(in_global->second.memory.data()), 8);
    }

    // The row of a value: a register, a number, or the address of a variable. A width of 0 accepts any width.
    uint32_t value_row(uint32_t width) {
        bool negative = reader.skip("-");
        std::string word = reader.take();
        if (negative && !isdigit(word[0])) reader.fail("-" + word);
        if (word[0] == '%' && word.find('.') != std::string::npos) {
            if (width != 4) reader.fail(word + " has another width than the instruction");
            last_width = width;
            auto [found, made] = kernel.special.try_emplace(word, 0);
            if (made) found->second = new_row(4);
            return found->second;
        }
        if (word[0] == '%' || widths.count(word)) return register_row(word, width);
        if (!isdigit(word[0])) return address_row(word, width);
        last_width = width;
        char* end;
        // 0f3F800000 and 0d3FF0000000000000 are the bits of floats.
        bool bits = word.size() > 2 && word[0] == '0' && (word[1] == 'f' || word[1] == 'd');
        uint64_t value = bits ? strtoull(word.c_str() + 2, &end, 16) : strtoull(word.c_str(), &end, 0);
        if (negative) value = -value;
        bool fits = bits ? word.size() - 2 == size_t(width) * 2 && (word[1] == 'd') == (width == 8)
                         : width == 8 || value >> (width * 8) == 0 || int64_t(value) >> (width * 8 - 1) == -1;
        if (*end || !width || !fits) reader.fail(word + " is not a valid number here");
        return constant_row(value, width);
    }

    int64_t read_offset() {
        if (!reader.skip("+")) return 0;
        bool negative = reader.skip("-");
        int64_t offset = reader.number();
        return negative ? -offset : offset;
    }

    // Reads an address, `[%rd1+8]`: its base is a row; parameters have no base.
    void read_address(Instruction& instruction, int& count, uint32_t width, bool access) {
        auto parameter = parameters.find(reader.token);
        if (parameter != parameters.end()) {
            reader.take();
            instruction.offset = parameter->second;
        } else {
            instruction.rows[count++] = value_row(width);
        }
        if (!access && reader.token == "+") reader.fail("only loads and stores add to an address here");
        instruction.offset += read_offset();
        reader.expect("]");
    }

    void read_instruction() {
        Instruction instruction;
        instruction.line = reader.line;
        if (reader.skip("@")) {
            instruction.unless = reader.skip("!");
            instruction.guarded = true;
            instruction.guard = register_row(reader.take(), 1);
        }
        std::string name = reader.take();
        if (name == "bra" || name == "bra.uni") {
            instruction.flow = Flow::BRANCH;
            branches.emplace_back(kernel.code.size(), reader.take());
            reader.expect(";");
            kernel.code.push_back(instruction);
            return;
        }
        if (instruction.guarded) reader.fail("only branches depend on a predicate here, not " + name);
        std::vector<uint32_t> widths;
        bool load = name.rfind("ld.", 0) == 0, access = load || name.rfind("st.", 0) == 0;
        std::string type; // of what is loaded or stored
        uint32_t held = 0; // the width of its registers
        if (access) {
            type = read_access(instruction, name);
            instruction.results = load ? instruction.count : 0;
            widths.assign(instruction.count, 0);
            if (instruction.space != Space::PARAMETER) widths.insert(load ? widths.end() : widths.begin(), 0);
        } else {
            if (name == "mov.b32" || name == "mov.b64")
                name += reader.token == "{" ? ".apart" : second_operand() == "{" ? ".together" : "";
            // Of a wider register only the lower half is used.
            if (name == "cvt.s64.s32" && register_width(second_operand()) == 8) name += ".wide";
            const Known* found = known(name);
            if (!found) reader.fail("no instruction is known by the name of " + name);
            instruction.step = found->step;
            instruction.flow = found->flow;
            instruction.results = found->results;
            widths = found->widths;
        }
        int count = 0;
        while (!reader.skip(";")) {
            if (reader.skip(",") || reader.skip("{") || reader.skip("}") || reader.skip("|")) continue;
            if (count == 14) reader.fail("too many operands");
            uint32_t wanted = size_t(count) < widths.size() ? widths[count] : 0;
            if (reader.skip("[")) {
                read_address(instruction, count, wanted, access);
                instruction.short_base = access && last_width == 4 && instruction.space == Space::SHARED;
                if (access && !instruction.short_base && last_width != 8 && instruction.space != Space::PARAMETER)
                    reader.fail(name + " with an address of other than 64 bits");
            } else {
                instruction.rows[count++] = value_row(wanted);
                if (held && access && last_width != held) reader.fail("registers of several widths in a vector");
                held = last_width;
            }
        }
        if (size_t(count) != widths.size()) reader.fail(name + " with another number of operands");
        if (access && !(instruction.step = load_or_store(load, type, held))) reader.fail(name + " with such registers");
        kernel.code.push_back(instruction);
    }

    // The first token of the second operand. The reader is at the first operand.
    std::string second_operand() const {
        Reader ahead = reader;
        ahead.take();
        ahead.expect(",");
        return ahead.token;
    }

    // Parses the name of a load or store, `ld.global.nc.v4.f32`. Returns the type of the elements.
    std::string read_access(Instruction& instruction, const std::string& name) {
        instruction.count = 1;
        std::string type;
        for (size_t start = 2, end; start < name.size(); start = end) {
            end = std::min(name.find('.', start + 1), name.size());
            std::string part = name.substr(start, end - start);
            if (part == ".param") instruction.space = Space::PARAMETER;
            else if (part == ".shared") instruction.space = Space::SHARED;
            else if (part == ".global") instruction.space = Space::GLOBAL;
            else if (part == ".local") instruction.space = Space::LOCAL;
            else if (part == ".cg") instruction.path = Path::FRESH;
            else if (part == ".nc") instruction.path = Path::CONSTANT;
            else if (part == ".v2" || part == ".v4" || part == ".v8") instruction.count = part[2] - '0';
            else if (end == name.size()) type = part;
            else reader.fail(name + ", of which " + part + " is not known");
        }
        size_of(type);
        return type;
    }

    void finish() {
        for (auto& [number, label] : branches) {
            auto found = labels.find(label);
            if (found == labels.end()) reader.fail("no label is called " + label);
            kernel.code[number].target = found->second;
        }
        kernel.shared_bytes = round_up(kernel.shared_bytes, 16);
        for (auto& [row, width] : dynamic) kernel.constants.push_back({row, width, uint64_t(SHARED + kernel.shared_bytes)});
        // A kernel may end where its text does.
        Instruction end;
        end.flow = Flow::END;
        kernel.code.push_back(end);
        fuse(kernel.code);
    }
};

} // namespace

Module::Module(const char* text) {
    std::map<std::string, Declared> shared;
    Reader reader(text);
    while (!reader.token.empty()) {
        std::string word = reader.take();
        if (word == ".version" || word == ".target" || word == ".address_size") {
            reader.take();
        } else if (word == ".global" || word == ".shared") {
            Declared variable;
            std::string name = read_variable(reader, variable);
            // A variable with an initialiser is a constant that the compiler has already inlined where it is used.
            if (word == ".shared") shared[name] = variable;
            else if (reader.token != "=")
                variables[name] = {std::vector<char>(variable.bytes), Traces(grains_of(variable.bytes))};
            reader.pass();
        } else if (word == ".entry") {
            std::string name = reader.take();
            PtxKernel& kernel = kernels[name];
            kernel.name = name;
            kernel.module = this;
            KernelReader(*this, kernel, reader, shared).read();
        } else if (word != ".extern" && word != ".weak" && word != ".visible") {
            reader.fail("no directive is called " + word);
        }
    }
}

Kernel* Module::kernel(const std::string& name) {
    auto found = kernels.find(name);
    return found == kernels.end() ? nullptr : &found->second;
}

} // namespace standin::ptx

std::unique_ptr<standin::Code> standin::load_ptx(const char* text) { return std::make_unique<ptx::Module>(text); }
