// cuBLASLt's products, as its manual describes them: D = alpha op(A) op(B) + beta C, column-major, for each matrix of a
// batch, with the epilogue that adds a bias to the rows. It relies on nothing but what it was told: a plan
// is valid only for the descriptions that it was made from, and for addresses that have the alignment that was
// promised.

#include "device.h"
#include <chrono>
#include <cstring>
#include <set>
#include <thread>

using namespace standin;

namespace {

// Of cublasStatus_t.
enum Result : int { DONE = 0, WRONG = 7, FAILED = 13, UNSUPPORTED = 15 };
// Of STANDIN_EPILOGUES.
enum { NEVER, ALWAYS, PROMISED, SLOW, FAILING };
enum Type : int { F32 = 0, F64 = 1, BF16 = 14 };
enum Compute : int { IN_F32 = 68, IN_F64 = 70, IN_TF32 = 77 };
enum Epilogue : int { NOTHING = 1, BIAS = 4 };

struct Layout {
    Type type;
    uint64_t rows, columns;
    int64_t ld, offset = 0;
    int batch = 1;
};

struct Product {
    Compute compute;
    Type scale;
    int transposed[2] = {0, 0}, epilogue = NOTHING;
    uint64_t bias = 0;
};

struct Preference {
    size_t workspace = 0;
    unsigned reductions = 7, alignment[4] = {256, 256, 256, 256}; // of A, B, C and D
};

// The eight words of a plan: what it was made for.
struct Plan {
    uint64_t described, workspace;
    unsigned alignment[4];
    uint64_t row_alignment; // of the bias: the alignment of the address that it was made with
    uint64_t rank;          // among those for this product, from 0
    uint64_t split;         // whether the inner axis is cut into parts that are added up
    uint64_t unused;
};
static_assert(sizeof(Plan) == 64, "eight words");

struct Choice {
    Plan plan;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

// How many plans there are for a product.
constexpr int PLANS = 3;

// Split-K is used for an inner axis of at least LONG, if a reduction scheme is allowed; and then elements that do not
// fill a block are left out, as is reported of some of cuBLASLt's kernels.
constexpr int64_t LONG = 1024, BLOCK = 128;

// The parts of a split inner axis, whose results it adds up in its workspace.
constexpr size_t PARTS = 4;

// How much device memory the kernels for a product take, which are loaded at its first use.
constexpr size_t CODE = 1 << 18;

size_t size_of(Type type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

template <typename T>
T loaded(uint64_t address) {
    T value;
    memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
    return value;
}

template <typename T>
void stored(uint64_t address, T value) {
    memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
}

double get(Type type, uint64_t start, int64_t index) {
    uint64_t address = start + index * size_of(type);
    if (type == F64) return loaded<double>(address);
    if (type == F32) return loaded<float>(address);
    uint32_t bits = uint32_t(loaded<uint16_t>(address)) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

void put(Type type, uint64_t start, int64_t index, double value) {
    uint64_t address = start + index * size_of(type);
    float single = value;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    if (type == F64) return stored(address, value);
    if (type == F32) return stored(address, single);
    stored<uint16_t>(address, single != single ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounded to TF32, whose mantissa has 10 bits after the leading one.
double to_tf32(double value) {
    float single = value;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    if (single - single == 0) bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&single, &bits, 4);
    return single;
}

// The largest power of two up to 256 that divides an address.
uint64_t alignment_of(uint64_t address) { return (address | 256) & -(address | 256); }

// Whether the layouts fit together, and the types are a combination of the manual's table.
bool fits(const Product& product, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    auto op = [&](const Layout& matrix, int which) {
        auto [rows, columns] = std::pair(matrix.rows, matrix.columns);
        return product.transposed[which] ? std::pair(columns, rows) : std::pair(rows, columns);
    };
    auto [m, k] = op(a, 0);
    auto [k_of_b, n] = op(b, 1);
    bool shapes = k == k_of_b && c.rows == m && c.columns == n && d.rows == m && d.columns == n && m && n && k;
    for (const Layout* one : {&a, &b, &c, &d}) {
        shapes = shapes && one->ld >= int64_t(one->rows) && one->batch == d.batch && one->batch >= 1;
        // Matrices of a batch may be read twice, but not written over each other.
        shapes = shapes && (one->batch == 1 || one != &d || one->offset >= one->ld * int64_t(one->columns));
    }
    bool types = a.type == b.type && c.type == d.type;
    switch (product.compute) {
    case IN_F64: return shapes && types && a.type == F64 && d.type == F64 && product.scale == F64;
    case IN_F32: return shapes && types && product.scale == F32 && a.type != F64 && (d.type == F32 || d.type == a.type);
    case IN_TF32: return shapes && types && product.scale == F32 && a.type == F32 && d.type == F32;
    }
    return false;
}

uint64_t described(const Product& product, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    uint64_t hash = 14695981039346656037u;
    auto add = [&](uint64_t word) { hash = (hash ^ word) * 1099511628211u; };
    for (int word : {int(product.compute), int(product.scale), product.transposed[0], product.transposed[1], product.epilogue})
        add(word);
    for (const Layout* one : {&a, &b, &c, &d})
        for (int64_t word : {int64_t(one->type), int64_t(one->rows), int64_t(one->columns), one->ld, one->offset, int64_t(one->batch)})
            add(word);
    return hash;
}

// A number that an attribute is set to, if it has the size of one.
template <typename T>
Result set(T& attribute, const void* value, size_t bytes) {
    if (bytes != sizeof(T)) return WRONG;
    memcpy(&attribute, value, bytes);
    return DONE;
}

struct Operands {
    Layout a, b, c, d;
    uint64_t at[4];
    bool split, inexact;
};

// The product of one matrix of the batch.
void multiply(const Product& product, double alpha, double beta, const Operands& of, int number) {
    auto& [a, b, c, d, at, split, inexact] = of;
    auto start = [&](const Layout& layout, int which) { return at[which] + number * layout.offset * size_of(layout.type); };
    uint64_t from_a = start(a, 0), from_b = start(b, 1), plus = start(c, 2), to = start(d, 3);
    int64_t m = d.rows, n = d.columns, k = product.transposed[0] ? a.rows : a.columns;
    bool tf32 = product.compute == IN_TF32;
    auto whole = [tf32](Type type, uint64_t from, int64_t outer, int64_t inner, int64_t step, int64_t inner_step) {
        std::vector<double> all(outer * inner);
        for (int64_t i = 0; i < outer; i++)
            for (int64_t l = 0; l < inner; l++) {
                double value = get(type, from, i * step + l * inner_step);
                all[i * inner + l] = tf32 ? to_tf32(value) : value;
            }
        return all;
    };
    // Rows of op(A), and columns of op(B).
    std::vector<double> rows = product.transposed[0] ? whole(a.type, from_a, m, k, a.ld, 1) : whole(a.type, from_a, m, k, 1, a.ld);
    std::vector<double> columns = product.transposed[1] ? whole(b.type, from_b, n, k, 1, b.ld) : whole(b.type, from_b, n, k, b.ld, 1);
    int64_t end = split && k >= LONG ? k - k % BLOCK : k;
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < m; i++) {
            double chains[8] = {};
            const double *row = &rows[i * k], *column = &columns[j * k];
            int64_t l = 0;
            for (; l + 8 <= end; l += 8)
                for (int e = 0; e < 8; e++) chains[e] += row[l + e] * column[l + e];
            for (; l < end; l++) chains[0] += row[l] * column[l];
            double sum = 0;
            for (double chain : chains) sum += chain;
            sum *= inexact ? alpha * (1 + 0x1p-12) : alpha;
            if (beta != 0) sum += beta * get(c.type, plus, i + j * c.ld);
            if (product.epilogue == BIAS) sum += get(d.type, product.bias, i);
            put(d.type, to, i + j * d.ld, sum);
        }
    }
}

} // namespace

EXPORTED size_t cublasLtGetVersion() { return setting("STANDIN_CUBLAS", 130000); }

// For the device whose context was current when it was created, and no other.
struct Handle {
    Device* on;
    std::set<uint64_t> loaded; // for which products there are kernels on it
};

EXPORTED Result cublasLtCreate(Handle** handle) {
    *handle = new Handle{entered, {}};
    return entered ? DONE : WRONG;
}

EXPORTED Result cublasLtDestroy(Handle* handle) {
    delete handle;
    return DONE;
}

EXPORTED Result cublasLtMatmulDescCreate(Product** product, Compute compute, Type scale) {
    *product = new Product{compute, scale};
    return DONE;
}

EXPORTED Result cublasLtMatmulDescDestroy(Product* product) {
    delete product;
    return DONE;
}

EXPORTED Result cublasLtMatmulDescSetAttribute(Product* product, int attribute, const void* value, size_t bytes) {
    switch (attribute) {
    case 3: return set(product->transposed[0], value, bytes);
    case 4: return set(product->transposed[1], value, bytes);
    case 7: return set(product->epilogue, value, bytes);
    case 8: return set(product->bias, value, bytes);
    default: return WRONG;
    }
}

EXPORTED Result cublasLtMatrixLayoutCreate(Layout** layout, Type type, uint64_t rows, uint64_t columns, int64_t ld) {
    *layout = new Layout{type, rows, columns, ld};
    return DONE;
}

EXPORTED Result cublasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return DONE;
}

EXPORTED Result cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t bytes) {
    switch (attribute) {
    case 5: return set(layout->batch, value, bytes);
    case 6: return set(layout->offset, value, bytes);
    default: return WRONG;
    }
}

EXPORTED Result cublasLtMatmulPreferenceCreate(Preference** preference) {
    *preference = new Preference;
    return DONE;
}

EXPORTED Result cublasLtMatmulPreferenceDestroy(Preference* preference) {
    delete preference;
    return DONE;
}

EXPORTED Result cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t bytes) {
    switch (attribute) {
    case 1: return set(preference->workspace, value, bytes);
    case 3: return set(preference->reductions, value, bytes);
    case 5: case 6: case 7: case 8: return set(preference->alignment[attribute - 5], value, bytes);
    default: return WRONG;
    }
}

EXPORTED Result cublasLtMatmulAlgoGetHeuristic(Handle*, const Product* product, const Layout* a, const Layout* b, const Layout* c,
                                               const Layout* d, const Preference* preference, int asked, Choice* choices,
                                               int* found) {
    *found = 0;
    if (!fits(*product, *a, *b, *c, *d) || asked < 1) return WRONG;
    bool ends = product->epilogue != NOTHING;
    long epilogues = setting("STANDIN_EPILOGUES", ALWAYS);
    // An epilogue for a batch is never requested here.
    if (ends && (product->epilogue != BIAS || !product->bias || d->batch > 1 || epilogues == NEVER)) return UNSUPPORTED;
    if (setting("STANDIN_REDUCTIONS", 1) == 0 && preference->reductions != 0) return UNSUPPORTED;
    Choice choice = {};
    choice.plan.described = described(*product, *a, *b, *c, *d);
    choice.plan.workspace = preference->workspace;
    memcpy(choice.plan.alignment, preference->alignment, sizeof preference->alignment);
    choice.plan.row_alignment = alignment_of(product->bias);
    choice.plan.split = preference->reductions != 0;
    uint64_t inner = product->transposed[0] ? a->rows : a->columns;
    if (choice.plan.split && inner >= LONG) choice.workspace = PARTS * d->rows * d->columns * d->batch * sizeof(float);
    if (choice.workspace > preference->workspace) return UNSUPPORTED;
    choice.waves = ends && epilogues == SLOW ? 0.5 : 1;
    for (; *found < asked && *found < PLANS; ++*found) {
        choice.plan.rank = *found;
        choices[*found] = choice;
    }
    return DONE;
}

EXPORTED Result cublasLtMatmul(Handle* handle, const Product* product, const void* alpha, uint64_t a, const Layout* a_layout, uint64_t b,
                               const Layout* b_layout, const void* beta, uint64_t c, const Layout* c_layout, uint64_t d,
                               const Layout* d_layout, const Plan* plan, uint64_t workspace, size_t bytes, Stream* stream) {
    long epilogues = product->epilogue == NOTHING ? ALWAYS : setting("STANDIN_EPILOGUES", ALWAYS);
    if (epilogues == PROMISED) return UNSUPPORTED;
    if (epilogues == FAILING) return FAILED;
    if (long(plan->rank) < setting("STANDIN_REFUSED", 0)) return UNSUPPORTED;
    Status status = call([&] {
        if (handle->on != &device()) return INVALID_CONTEXT;
        auto among = [plan](const char* ranks) { return (setting(ranks, 0) >> plan->rank & 1) != 0; };
        if (!handle->loaded.count(plan->described) && !device().memory.reserve(CODE)) return OUT_OF_MEMORY;
        handle->loaded.insert(plan->described);
        if (plan->described != described(*product, *a_layout, *b_layout, *c_layout, *d_layout)) return INVALID_VALUE;
        Memory& memory = device().memory;
        if (bytes < plan->workspace || !memory.holds(workspace, bytes)) return INVALID_VALUE;
        auto number = [&](const void* scalar) {
            auto address = reinterpret_cast<uint64_t>(scalar);
            return product->scale == F64 ? loaded<double>(address) : loaded<float>(address);
        };
        double by = number(alpha), plus = number(beta);
        // Real kernels differ if something is added.
        bool inexact = among("STANDIN_INEXACT") || (plus != 0 && among("STANDIN_INEXACT_SUMS"));
        Operands operands = {*a_layout, *b_layout, *c_layout, *d_layout, {a, b, c, d}, plan->split != 0, inexact};
        int which = 0;
        for (const Layout* one : {a_layout, b_layout, c_layout, d_layout}) {
            uint64_t address = operands.at[which];
            int64_t elements = (one->batch - 1) * one->offset + (one->columns - 1) * one->ld + one->rows;
            if (address % plan->alignment[which] || (one->batch > 1 && one->offset * size_of(one->type) % plan->alignment[which]))
                return INVALID_VALUE;
            if (!(which == 2 && plus == 0) && !memory.holds(address, elements * size_of(one->type))) return INVALID_VALUE;
            which++;
        }
        bool ends = product->epilogue == BIAS;
        if (ends && !memory.holds(product->bias, d_layout->rows * size_of(d_layout->type))) return INVALID_VALUE;
        // The address of a bias is not checked before the kernel runs.
        bool misaligned = ends && product->bias % plan->row_alignment, slow = among("STANDIN_SLOW");
        return device().ask(stream, [=, product = *product] {
            if (misaligned) throw Fault{"a bias is less aligned than its plan expects"};
            if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(100));
            // Partial sums may be written anywhere in the workspace.
            for (uint64_t place = 0; place < bytes; place += 1 << 20) stored<uint64_t>(workspace + place, ~0ull);
            for (int i = 0; i < operands.d.batch; i++) multiply(product, by, plus, operands, i);
        });
    });
    switch (status) {
    case SUCCESS: return DONE;
    case INVALID_VALUE: return WRONG;
    default: return FAILED;
    }
}
