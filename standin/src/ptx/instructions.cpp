// The semantics of instructions, by the manual of PTX, except for loads and stores.

#include "ptx.h"
#include <cfenv>
#include <cmath>
#include <limits>

namespace standin::ptx {

namespace {

typedef uint8_t pred;
typedef int16_t s16;
typedef uint16_t u16;
typedef int32_t s32;
typedef uint32_t u32;
typedef int64_t s64;
typedef uint64_t u64;
typedef float f32;
typedef double f64;

template <typename To, typename From>
To bits_of(From value) {
    static_assert(sizeof(To) == sizeof(From), "bits are as many as they are");
    To bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The value furthest from the exact one, above or below it, that the manual allows: at most `most` ulps away.
f32 err(f64 exact, u32 from, int most) {
    f32 value = exact;
    if (!std::isfinite(value) || value == 0) return value;
    u32 drawn = (from * 0x9E3779B9u ^ from >> 15) * 0x85EBCA6Bu >> 16;
    f32 towards = drawn & 1 ? INFINITY : -INFINITY, next = std::nextafter(value, towards);
    f64 step = std::fabs(f64(next) - value);
    for (; std::fabs(next - exact) <= most * step; next = std::nextafter(next, towards)) value = next;
    return value;
}

f32 flush(f32 x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
f32 ex2(f32 x) {
    x = flush(x);
    f64 exact = std::exp2(f64(x));
    // It is exact for integers: NVIDIA's erf relies on that.
    return flush(x == std::floor(x) ? f32(exact) : err(exact, bits_of<u32>(x), 2));
}
f32 lg2(f32 x) {
    x = flush(x);
    f64 exact = std::log2(f64(x));
    // Near 1, where the result is small, the error is 2^-22 by itself.
    if (x > 0.5f && x < 2) return exact + (bits_of<u32>(x) & 1 ? 0x1p-22f : -0x1p-22f);
    return err(exact, bits_of<u32>(x), 2);
}
f32 rcp(f32 x) { return flush(err(1 / f64(flush(x)), bits_of<u32>(x), 1)); }
f32 rsqrt(f32 x) { return err(1 / std::sqrt(f64(x)), bits_of<u32>(x), 2); }
// For f64 only the upper half of the bits is read, and written; denormals are zero.
f64 upper_half(f64 x) {
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0, x) : bits_of<f64>(bits_of<u64>(x) & 0xffffffff00000000);
}
f64 rcp_half(f64 x) { return upper_half(1 / upper_half(x)); }

// Rounded down; the values are volatile, so that the compiler does not evaluate this at compile time or move it.
f32 fma_down(f32 a, f32 b, f32 c) {
    volatile f32 x = a, y = b, z = c;
    std::fesetround(FE_DOWNWARD);
    volatile f32 sum = std::fma(x, y, z);
    std::fesetround(FE_TONEAREST);
    return sum;
}

// Towards zero, and to the nearest number that there is; NaN is 0.
s32 whole(f64 value) {
    if (value != value) return 0;
    return std::min(std::max(std::trunc(value), -2147483648.0), 2147483647.0);
}

u16 bf16(f32 value) {
    if (value != value) return 0x7fff;
    u32 bits = bits_of<u32>(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// For floats: if one is NaN, the other one; negative zero is lower than positive zero.
template <typename T>
T lower(T a, T b) {
    if (a != a || b != b) return a != a ? b : a;
    return a < b || (a == b && std::signbit(T(a))) ? a : b;
}
template <typename T>
T higher(T a, T b) {
    if (a != a || b != b) return a != a ? b : a;
    return a < b || (a == b && std::signbit(T(a))) ? b : a;
}

template <typename T>
T shift_left(T a, u32 by) {
    return by < sizeof(T) * 8 ? a << by : 0;
}
template <typename T>
T shift_right(T a, u32 by) {
    u32 most = sizeof(T) * 8 - 1;
    if (by > most) return std::is_signed<T>::value ? a >> most : 0;
    return a >> by;
}

// The result of an integer division by zero is unspecified; it only must not trap on the host.
template <typename T>
T quotient(T a, T b) {
    if (b == 0) return ~T(0);
    if (std::is_signed<T>::value && b == T(-1)) return T(u64(0) - u64(a));
    return a / b;
}
template <typename T>
T remainder(T a, T b) {
    if (b == 0) return a;
    return std::is_signed<T>::value && b == T(-1) ? 0 : a % b;
}

// b with `count` bits, from bit `at` on, replaced by the lowest `count` bits of a.
template <typename T>
T insert(T a, T b, u32 at, u32 count) {
    constexpr u32 WIDTH = sizeof(T) * 8;
    at &= 255, count &= 255;
    if (at >= WIDTH || count == 0) return b;
    T ones = count >= WIDTH ? ~T(0) : (T(1) << count) - 1;
    return (a & ones) << at | (b & ~(ones << at));
}
template <typename T>
void insert_lanes(Warp& warp, const Instruction& i) {
    T *to = row<T>(warp, i, 0), *a = row<T>(warp, i, 1), *b = row<T>(warp, i, 2);
    u32 *at = row<u32>(warp, i, 3), *count = row<u32>(warp, i, 4);
    each(warp, [=](unsigned l) { to[l] = insert(a[l], b[l], at[l], count[l]); });
}

// Only member masks of all lanes are supported.
void expect_all(Warp& warp, const Instruction& i, int operand) {
    each(warp, [&](unsigned l) {
        if (row<u32>(warp, i, operand)[l] != ALL) warp.fail("has a partial member mask, which is not supported here", l);
    });
}

// Shuffles values among lanes: each lane takes the value of lane `source`.
template <typename Source>
void shuffle(Warp& warp, const Instruction& i, Source source) {
    expect_all(warp, i, 5);
    u32 *to = row<u32>(warp, i, 0), *b = row<u32>(warp, i, 3), *c = row<u32>(warp, i, 4), given[LANES];
    pred* inside = row<pred>(warp, i, 1);
    memcpy(given, row<u32>(warp, i, 2), sizeof given);
    each(warp, [&](unsigned l) {
        u32 clamp = c[l] & 31, segment = c[l] >> 8 & 31;
        u32 highest = (l & segment) | (clamp & ~segment);
        u32 from = source(l, b[l] & 31, segment);
        inside[l] = from <= highest;
        to[l] = given[inside[l] ? from : l];
    });
}

void shuffle_butterfly(Warp& warp, const Instruction& i) {
    shuffle(warp, i, [](u32 l, u32 b, u32) { return l ^ b; });
}

void shuffle_index(Warp& warp, const Instruction& i) {
    shuffle(warp, i, [](u32 l, u32 b, u32 segment) { return (l & segment) | (b & ~segment); });
}

void vote(Warp& warp, const Instruction& i) {
    expect_all(warp, i, 2);
    u32 bits = 0;
    pred* voice = row<pred>(warp, i, 1);
    each(warp, [&](unsigned l) { bits |= u32(voice[l] != 0) << l; });
    u32* to = row<u32>(warp, i, 0);
    each(warp, [&](unsigned l) { to[l] = bits; });
}

// The lanes of a warp have synchronised, and see what the others wrote.
void meet(Warp& warp, const Instruction& i) {
    expect_all(warp, i, 0);
    warp.meetings++;
}

void reach_barrier(Warp& warp, const Instruction& i) {
    if (row<u32>(warp, i, 0)[0] != 0) warp.fail("uses a barrier other than 0, which is not supported here", 0);
}

void fence(Warp& warp, const Instruction&) {
    warp.fenced |= warp.active;
    Lanes arrived = warp.ticketed & warp.active;
    if (!arrived) return;
    warp.block->order.in = {warp.block->barriers, warp.thread(__builtin_ctz(arrived))};
}

f32 half_of(u32 pair, unsigned half) { return bits_of<f32>(half ? pair & 0xffff0000 : pair << 16); }

// A (16x16) by B (16x8), of bf16: with g = lane / 4 and p = lane % 4, the registers of A hold row g, columns 2p and 2p + 1;
// row g + 8, the same; row g, columns + 8; row g + 8, columns + 8. Those of B: column g, rows 2p and 2p + 1; rows + 8.
// Those of C and D: row g, columns 2p and 2p + 1; row g + 8, the same.
void multiply(Warp& warp, const Instruction& i) {
    f32 a[16][16], b[16][8];
    for (unsigned l = 0; l < LANES; l++) {
        unsigned g = l / 4, p = l % 4;
        for (unsigned half = 0; half < 2; half++) {
            unsigned column = 2 * p + half;
            for (unsigned part = 0; part < 4; part++)
                a[g + part % 2 * 8][column + part / 2 * 8] = half_of(row<u32>(warp, i, 4 + part)[l], half);
            for (unsigned part = 0; part < 2; part++)
                b[column + part * 8][g] = half_of(row<u32>(warp, i, 8 + part)[l], half);
        }
    }
    // Sums are computed exactly, and truncated to f32.
    f32 sums[16][8];
    for (unsigned r = 0; r < 16; r++)
        for (unsigned column = 0; column < 8; column++) {
            f64 sum = row<f32>(warp, i, 10 + r / 8 * 2 + column % 2)[r % 8 * 4 + column / 2];
            for (unsigned k = 0; k < 16; k++) sum += f64(a[r][k]) * b[k][column];
            f32 rounded = sum;
            sums[r][column] = std::fabs(rounded) > std::fabs(sum) ? std::nextafter(rounded, 0.0f) : rounded;
        }
    for (unsigned part = 0; part < 4; part++) {
        f32* d = row<f32>(warp, i, part);
        for (unsigned l = 0; l < LANES; l++) d[l] = sums[l / 4 + part / 2 * 8][l % 4 * 2 + part % 2];
    }
}

// An 8x8 matrix is a register: row g, columns 2p and 2p + 1.
void transpose(Warp& warp, const Instruction& i) {
    u32 given[LANES], *to = row<u32>(warp, i, 0);
    memcpy(given, row<u32>(warp, i, 1), sizeof given);
    auto element = [&](unsigned r, unsigned c) { return given[r * 4 + c / 2] >> c % 2 * 16 & 0xffff; };
    for (unsigned l = 0; l < LANES; l++) to[l] = element(l % 4 * 2, l / 4) | element(l % 4 * 2 + 1, l / 4) << 16;
}

// Loads four 8x8 matrices; eight lanes each hold the addresses of the rows of one.
template <bool transposed>
void load_matrices(Warp& warp, const Instruction& i) {
    u32* addresses = row<u32>(warp, i, 4);
    u16 elements[LANES][8];
    for (unsigned l = 0; l < LANES; l++)
        memcpy(elements[l], warp.place(Space::SHARED, addresses[l], 16, l, Access::READ), 16);
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        u32* to = row<u32>(warp, i, matrix);
        auto element = [&](unsigned r, unsigned c) { return u32(elements[matrix * 8 + r][c]); };
        for (unsigned l = 0; l < LANES; l++) {
            unsigned g = l / 4, c = l % 4 * 2;
            to[l] = transposed ? element(c, g) | element(c + 1, g) << 16 : element(g, c) | element(g, c + 1) << 16;
        }
    }
}

#define ONE(NAME, D, A, VALUE)                                                                                       \
    {NAME, {[](Warp& warp, const Instruction& i) {                                                                   \
                D* d = row<D>(warp, i, 0);                                                                           \
                const A* as = row<A>(warp, i, 1);                                                                    \
                each(warp, [=](unsigned l) { A a = as[l]; d[l] = VALUE; });                                          \
            }, {sizeof(D), sizeof(A)}}}
#define TWO(NAME, D, A, B, VALUE)                                                                                    \
    {NAME, {[](Warp& warp, const Instruction& i) {                                                                   \
                D* d = row<D>(warp, i, 0);                                                                           \
                const A* as = row<A>(warp, i, 1);                                                                    \
                const B* bs = row<B>(warp, i, 2);                                                                    \
                each(warp, [=](unsigned l) { A a = as[l]; B b = bs[l]; d[l] = VALUE; });                             \
            }, {sizeof(D), sizeof(A), sizeof(B)}}}
#define THREE(NAME, D, A, B, C, VALUE)                                                                               \
    {NAME, {[](Warp& warp, const Instruction& i) {                                                                   \
                D* d = row<D>(warp, i, 0);                                                                           \
                const A* as = row<A>(warp, i, 1);                                                                    \
                const B* bs = row<B>(warp, i, 2);                                                                    \
                const C* cs = row<C>(warp, i, 3);                                                                    \
                each(warp, [=](unsigned l) { A a = as[l]; B b = bs[l]; C c = cs[l]; d[l] = VALUE; });                \
            }, {sizeof(D), sizeof(A), sizeof(B), sizeof(C)}}}
// Unsigned arithmetic wraps around, which that of C++'s signed numbers may not.
#define INTEGERS(T, U)                                                                                               \
    TWO("add." #T, T, U, U, a + b), TWO("sub." #T, T, U, U, a - b), TWO("mul.lo." #T, T, U, U, 1u * a * b),               \
    TWO("div." #T, T, T, T, quotient(a, b)), TWO("rem." #T, T, T, T, remainder(a, b)),                               \
    TWO("min." #T, T, T, T, a < b ? a : b), TWO("max." #T, T, T, T, a < b ? b : a),                                  \
    TWO("shr." #T, T, T, u32, shift_right(a, b)), THREE("mad.lo." #T, T, U, U, U, 1u * a * b + c),                        \
    ONE("neg." #T, T, U, U(0) - a), MOVES(T)
#define BITS(T, U)                                                                                                   \
    TWO("and." #T, U, U, U, a & b), TWO("or." #T, U, U, U, a | b), TWO("xor." #T, U, U, U, a ^ b),                   \
    ONE("not." #T, U, U, ~a), TWO("setp.eq." #T, pred, U, U, a == b), TWO("setp.ne." #T, pred, U, U, a != b),   \
    TWO("shl." #T, U, U, u32, shift_left(a, b)),                                           \
    TWO("shr." #T, U, U, u32, shift_right(a, b)), ONE("mov." #T, U, U, a), THREE("selp." #T, U, U, U, pred, c ? a : b)
#define FLOATS(T)                                                                                                    \
    TWO("add." #T, T, T, T, a + b), TWO("add.rn." #T, T, T, T, a + b), TWO("sub." #T, T, T, T, a - b),               \
    TWO("mul." #T, T, T, T, a * b), TWO("mul.rn." #T, T, T, T, a * b), TWO("div.rn." #T, T, T, T, a / b),            \
    THREE("fma.rn." #T, T, T, T, T, std::fma(a, b, c)), THREE("fused.add." #T, T, T, T, T, std::fma(a, b, c)),       \
    THREE("fused.sub." #T, T, T, T, T, std::fma(a, b, -c)),                                                          \
    THREE("fused.from." #T, T, T, T, T, std::fma(-a, b, c)), TWO("min." #T, T, T, T, lower(a, b)),                   \
    TWO("max." #T, T, T, T, higher(a, b)), ONE("neg." #T, T, T, -a), ONE("abs." #T, T, T, std::fabs(a)),             \
    ONE("sqrt.rn." #T, T, T, std::sqrt(a)), ONE("rcp.rn." #T, T, T, 1 / a), COMPARISONS(T), MOVES(T),                \
    TWO("setp.equ." #T, pred, T, T, !(a < b || a > b)), TWO("setp.neu." #T, pred, T, T, a != b),                     \
    TWO("setp.ltu." #T, pred, T, T, !(a >= b)), TWO("setp.leu." #T, pred, T, T, !(a > b)),                           \
    TWO("setp.gtu." #T, pred, T, T, !(a <= b)), TWO("setp.geu." #T, pred, T, T, !(a < b)),                           \
    TWO("setp.num." #T, pred, T, T, a == a && b == b), TWO("setp.nan." #T, pred, T, T, a != a || b != b)
// Ordered comparisons: with a NaN none is true, not even `ne`.
#define COMPARISONS(T)                                                                                               \
    TWO("setp.lt." #T, pred, T, T, a < b), TWO("setp.le." #T, pred, T, T, a <= b), TWO("setp.gt." #T, pred, T, T, a > b), \
    TWO("setp.ge." #T, pred, T, T, a >= b), TWO("setp.eq." #T, pred, T, T, a == b),                                  \
    TWO("setp.ne." #T, pred, T, T, a < b || a > b)
#define MOVES(T) ONE("mov." #T, T, T, a), THREE("selp." #T, T, T, T, pred, c ? a : b)

std::map<std::string, Known> make_table() {
    std::map<std::string, Known> table = {
        INTEGERS(s16, u16), INTEGERS(u16, u16), INTEGERS(s32, u32), INTEGERS(u32, u32), INTEGERS(s64, u64),
        INTEGERS(u64, u64), BITS(b16, u16), BITS(b32, u32), BITS(b64, u64), FLOATS(f32), FLOATS(f64), COMPARISONS(s16),
        COMPARISONS(u16),
        COMPARISONS(s32), COMPARISONS(u32), COMPARISONS(s64), COMPARISONS(u64),
        TWO("mul.wide.s32", s64, s32, s32, s64(a) * b), TWO("mul.wide.u32", u64, u32, u32, u64(a) * b),
        TWO("mul.wide.u16", u32, u16, u16, u32(a) * b), TWO("mul.hi.u16", u16, u16, u16, u32(a) * b >> 16),
        TWO("mul.hi.s32", s32, s32, s32, s64(a) * b >> 32), TWO("mul.hi.u32", u32, u32, u32, u64(a) * b >> 32),
        ONE("clz.b32", u32, u32, a ? __builtin_clz(a) : 32), ONE("popc.b32", u32, u32, __builtin_popcount(a)),
        // A funnel shift: the upper half of (b, a) shifted left.
        THREE("shf.l.wrap.b32", u32, u32, u32, u32, u32((u64(b) << 32 | a) << (c & 31) >> 32)),
        {"bfi.b32", {insert_lanes<u32>, {4, 4, 4, 4, 4}}},
        {"bfi.b64", {insert_lanes<u64>, {8, 8, 8, 4, 4}}},
        ONE("mov.pred", pred, pred, a), ONE("not.pred", pred, pred, !a), TWO("and.pred", pred, pred, pred, a && b),
        TWO("or.pred", pred, pred, pred, a || b), TWO("xor.pred", pred, pred, pred, !a != !b),
        // The first of the parts is the lower one.
        TWO("mov.b32.together", u32, u16, u16, a | u32(b) << 16), TWO("mov.b64.together", u64, u32, u32, a | u64(b) << 32),
        {"mov.b32.apart",
         {[](Warp& warp, const Instruction& i) {
              u16 *low = row<u16>(warp, i, 0), *high = row<u16>(warp, i, 1);
              u32* from = row<u32>(warp, i, 2);
              each(warp, [=](unsigned l) { low[l] = from[l], high[l] = from[l] >> 16; });
          },
          {2, 2, 4}, Flow::ON, 2}},
        {"mov.b64.apart",
         {[](Warp& warp, const Instruction& i) {
              u32 *low = row<u32>(warp, i, 0), *high = row<u32>(warp, i, 1);
              u64* from = row<u64>(warp, i, 2);
              each(warp, [=](unsigned l) { low[l] = from[l], high[l] = from[l] >> 32; });
          },
          {4, 4, 8}, Flow::ON, 2}},
        // The sign is that of the first.
        TWO("copysign.f32", f32, f32, f32, std::copysign(b, a)), TWO("copysign.f64", f64, f64, f64, std::copysign(b, a)),
        // Generic addresses of global memory are those of global memory.
        ONE("cvta.to.global.u64", u64, u64, a),
        ONE("cvt.s64.s32", s64, s32, a), ONE("cvt.s64.s32.wide", s64, u64, s32(a)), ONE("cvt.u64.u32", u64, u32, a),
        ONE("cvt.u32.u64", u32, u64, a),
        ONE("cvt.u32.u16", u32, u16, a), ONE("cvt.u16.u32", u16, u32, a), ONE("cvt.u64.u16", u64, u16, a),
        ONE("cvt.u16.u64", u16, u64, a),
        ONE("cvt.rn.f32.s32", f32, s32, a), ONE("cvt.rn.f32.u32", f32, u32, a), ONE("cvt.rn.f32.s64", f32, s64, a),
        ONE("cvt.rn.f32.u64", f32, u64, a), ONE("cvt.rn.f64.u64", f64, u64, a), ONE("cvt.rn.f64.s32", f64, s32, a),
        ONE("cvt.rn.f64.s64", f64, s64, a), ONE("cvt.rn.f32.f64", f32, f64, a),
        ONE("cvt.f64.f32", f64, f32, a), ONE("cvt.sat.f32.f32", f32, f32, a > 0 ? std::min(a, 1.0f) : 0.0f),
        ONE("cvt.rzi.s32.f32", s32, f32, whole(a)), ONE("cvt.rzi.s32.f64", s32, f64, whole(a)),
        ONE("cvt.rni.f32.f32", f32, f32, std::nearbyint(a)), ONE("cvt.rn.bf16.f32", u16, f32, bf16(a)),
        // Here the first is the upper one.
        TWO("cvt.rn.bf16x2.f32", u32, f32, f32, u32(bf16(a)) << 16 | bf16(b)),
        ONE("ex2.approx.ftz.f32", f32, f32, ex2(a)), ONE("lg2.approx.ftz.f32", f32, f32, lg2(a)),
        ONE("rcp.approx.ftz.f32", f32, f32, rcp(a)), ONE("rcp.approx.ftz.f64", f64, f64, rcp_half(a)),
        ONE("rsqrt.approx.f32", f32, f32, rsqrt(a)), ONE("rsqrt.approx.f64", f64, f64, 1 / std::sqrt(a)),
        THREE("fma.rm.f32", f32, f32, f32, f32, fma_down(a, b, c)),
        {"shfl.sync.bfly.b32", {shuffle_butterfly, {4, 1, 4, 4, 4, 4}, Flow::TOGETHER, 2}},
        {"shfl.sync.idx.b32", {shuffle_index, {4, 1, 4, 4, 4, 4}, Flow::TOGETHER, 2}},
        {"vote.sync.ballot.b32", {vote, {4, 1, 4}, Flow::TOGETHER}},
        {"bar.warp.sync", {meet, {4}, Flow::TOGETHER, 0}},
        {"bar.sync", {reach_barrier, {4}, Flow::BARRIER, 0}},
        {"fence.acq_rel.gpu", {fence, {}, Flow::ON, 0}},
        {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", {multiply, std::vector<uint32_t>(14, 4), Flow::TOGETHER, 4}},
        {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", {load_matrices<false>, {4, 4, 4, 4, 4}, Flow::TOGETHER, 4}},
        {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", {load_matrices<true>, {4, 4, 4, 4, 4}, Flow::TOGETHER, 4}},
        {"movmatrix.sync.aligned.m8n8.trans.b16", {transpose, {4, 4}, Flow::TOGETHER}},
        {"ret", {nullptr, {}, Flow::END, 0}},
    };
    for (auto& [name, known] : memory_instructions()) table.emplace(name, known);
    return table;
}

} // namespace

const Known* known(const std::string& name) {
    static const auto* table = new std::map<std::string, Known>(make_table());
    auto found = table->find(name);
    return found == table->end() ? nullptr : &found->second;
}

} // namespace standin::ptx
