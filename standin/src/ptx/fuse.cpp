// Products and sums that NVIDIA's assembler fuses. PTX marks what may not be fused (`mul.rn`, `add.rn`); any other product
// the assembler may leave unrounded where a sum takes it. It need not; here it always is, within a stretch of code without
// branches, as code has to be right either way, and the emulated device fuses nothing.

#include "ptx.h"

namespace standin::ptx {

namespace {

struct Product {
    uint32_t a, b; // the rows of its factors
};

// For numbers of a type, `.f32`.
struct Fusion {
    Step multiply, add, subtract, add_fused, subtract_fused, subtract_from;

    explicit Fusion(const std::string& type) {
        auto step = [&](const char* name) { return known(name + type)->step; };
        multiply = step("mul"), add = step("add"), subtract = step("sub");
        add_fused = step("fused.add"), subtract_fused = step("fused.sub"), subtract_from = step("fused.from");
    }

    // Fuses a sum with the product that one of its terms is, if one is.
    void apply(Instruction& i, const std::map<uint32_t, Product>& products) const {
        if (i.step != add && i.step != subtract) return;
        for (int term = 1; term < 3; term++) {
            auto found = products.find(i.rows[term]);
            if (found == products.end()) continue;
            uint32_t other = i.rows[3 - term];
            i.step = i.step == add ? add_fused : term == 1 ? subtract_fused : subtract_from;
            i.rows[1] = found->second.a, i.rows[2] = found->second.b, i.rows[3] = other;
            return;
        }
    }
};

} // namespace

void fuse(std::vector<Instruction>& code) {
    static const Fusion fusions[] = {Fusion(".f32"), Fusion(".f64")};
    std::vector<bool> arrived_at(code.size() + 1);
    for (const Instruction& i : code)
        if (i.flow == Flow::BRANCH) arrived_at[i.target] = true;
    std::map<uint32_t, Product> products; // those that were computed from what their factors' registers still hold
    for (size_t at = 0; at < code.size(); at++) {
        Instruction& i = code[at];
        if (arrived_at[at] || i.flow == Flow::BRANCH) products.clear();
        for (const Fusion& fusion : fusions) fusion.apply(i, products);
        for (unsigned result = 0; result < i.results; result++) {
            uint32_t row = i.rows[result];
            for (auto product = products.begin(); product != products.end();) {
                bool stale = product->first == row || product->second.a == row || product->second.b == row;
                product = stale ? products.erase(product) : std::next(product);
            }
        }
        for (const Fusion& fusion : fusions)
            if (i.step == fusion.multiply && i.rows[0] != i.rows[1] && i.rows[0] != i.rows[2])
                products[i.rows[0]] = {i.rows[1], i.rows[2]};
    }
}

} // namespace standin::ptx
