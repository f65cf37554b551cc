//! AMX: eight registers that are tiles of 16 rows of 64 bytes, and an instruction that multiplies two of them.
//!
//! The instructions are written as assembly, for the compiler does not offer them yet; it also never uses their
//! registers.

use super::WIDTH;
use super::layout::{LINE, TILE, pack_tiles};
use super::multiply::Engine;
use crate::cpu::block::{Left, Rows};
use crate::cpu::isa::Arch;
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::marker::PhantomData;
use std::ops::Range;

/// Requests permission from the system to use the tiles, for all threads of this program. Returns whether they can be
/// used. In the tests of this crate, tiles that the processor lacks are emulated.
pub fn enable() -> bool {
    if has_tiles() { ask_system() } else { is_emulated() }
}

#[cfg(all(test, target_os = "linux"))]
use super::emulated::install as is_emulated;

#[cfg(not(all(test, target_os = "linux")))]
fn is_emulated() -> bool {
    false
}

fn has_tiles() -> bool {
    const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    #[allow(unused_unsafe)] // a safe function in newer releases of Rust than the oldest that will do
    // SAFETY: every x86-64 processor has this instruction.
    let features = unsafe { if __cpuid(0).eax < 7 { 0 } else { __cpuid_count(7, 0).edx } };
    features & BF16_AND_TILES == BF16_AND_TILES
}

#[cfg(target_os = "linux")]
fn ask_system() -> bool {
    const ARCH_PRCTL: usize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILES: usize = 18;
    let refused: usize;
    // SAFETY: a system call that reads and writes none of the program's memory. The registers that it clobbers are
    // declared.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => refused,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILES,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    refused == 0
}

#[cfg(not(target_os = "linux"))]
fn ask_system() -> bool {
    false
}

/// The tile configuration, which `ldtilecfg` reads.
#[repr(C, align(64))]
struct Setup {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

static SETUP: Setup = {
    let mut setup = Setup { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
    let mut tile = 0;
    while tile < 8 {
        setup.bytes_per_row[tile] = 4 * LINE as u16;
        setup.rows[tile] = TILE as u8;
        tile += 1;
    }
    setup
};

/// The tiles, set up on a thread, which therefore keeps it.
pub struct TileUnit(PhantomData<*const ()>);

impl Drop for TileUnit {
    fn drop(&mut self) {
        // SAFETY: that the value exists proves that the machine has tiles. Without the release the system would go on
        // saving the tiles at every context switch.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// C (tiles 0 to 3) = A (4 and 5) · B (6 and 7), for one or two tiles of rows and of columns. Operands that a variant
/// does not use appear in an assembly comment, because `asm!` requires every operand to be used.
macro_rules! kernel {
    (
        load: [$($load:literal),*], zero: [$($zero:literal),*], step: [$($step:literal),*], store: [$($store:literal),*],
        $a:expr, $b:expr, $steps:expr, $c:expr, $begin:expr
    ) => {{
        let (begin, begin_apart) = $begin;
        let ((c, c_apart), steps) = ($c, $steps);
        asm!(
            "test {begin}, {begin}",
            "jz 2f",
            $($load,)*
            "jmp 3f",
            "2:",
            $($zero,)*
            "3:",
            "test {steps}, {steps}",
            "jz 5f",
            "4:",
            $($step,)*
            "add {a0}, 1024",
            "add {a1}, 1024",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 4b",
            "5:",
            $($store,)*
            begin = in(reg) begin,
            lower = in(reg) begin.wrapping_byte_add(TILE * begin_apart),
            begin_apart = in(reg) begin_apart,
            a0 = inout(reg) $a => _,
            a1 = inout(reg) $a.wrapping_add(steps * TILE * LINE) => _,
            b = inout(reg) $b => _,
            steps = inout(reg) steps => _,
            line = in(reg) 4 * LINE,
            row = in(reg) 4 * WIDTH,
            c0 = in(reg) c,
            c1 = in(reg) c.wrapping_byte_add(TILE * c_apart),
            c_apart = in(reg) c_apart,
            options(nostack),
        )
    }};
}

impl Engine for TileUnit {
    type Lines = ();

    #[inline(always)]
    unsafe fn begin() -> Self {
        // SAFETY: the caller vouches for the instruction; the setup is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SETUP, options(nostack, readonly)) };
        Self(PhantomData)
    }

    #[inline(always)]
    unsafe fn pack<A: Arch>(a: Left<'_, f32, impl Rows>, rows: Range<usize>, part: Range<usize>, to: &mut [f32]) {
        // SAFETY: guaranteed by the caller.
        unsafe { pack_tiles::<A>(a, rows, part, to) }
    }

    #[inline(always)]
    unsafe fn multiply(
        &self,
        (a, ()): (*const f32, ()),
        b: *const f32,
        steps: usize,
        (c, apart): (*mut f32, usize),
        begin: Option<(*const f32, usize)>,
        tiles: [usize; 2],
    ) {
        let c = (c, 4 * apart);
        let begin = begin.map_or((std::ptr::null(), 0), |(begin, apart)| (begin, 4 * apart));
        // SAFETY: the tiles are set up, as `self` proves; the memory is the caller's word.
        unsafe {
            match tiles {
                [2, 2] => kernel!(
                    load: [
                        "tileloadd tmm0, [{begin} + {begin_apart}]",
                        "tileloadd tmm1, [{begin} + {begin_apart} + 64]",
                        "tileloadd tmm2, [{lower} + {begin_apart}]",
                        "tileloadd tmm3, [{lower} + {begin_apart} + 64]"
                    ],
                    zero: ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"],
                    step: [
                        "tileloadd tmm4, [{a0} + {line}]",
                        "tileloadd tmm6, [{b} + {row}]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tileloadd tmm7, [{b} + {row} + 64]",
                        "tdpbf16ps tmm1, tmm4, tmm7",
                        "tileloadd tmm5, [{a1} + {line}]",
                        "tdpbf16ps tmm2, tmm5, tmm6",
                        "tdpbf16ps tmm3, tmm5, tmm7"
                    ],
                    store: [
                        "tilestored [{c0} + {c_apart}], tmm0",
                        "tilestored [{c0} + {c_apart} + 64], tmm1",
                        "tilestored [{c1} + {c_apart}], tmm2",
                        "tilestored [{c1} + {c_apart} + 64], tmm3"
                    ],
                    a, b, steps, c, begin
                ),
                [1, 2] => kernel!(
                    load: [
                        "tileloadd tmm0, [{begin} + {begin_apart}]",
                        "tileloadd tmm1, [{begin} + {begin_apart} + 64]",
                        "/* {lower} {c1} */"
                    ],
                    zero: ["tilezero tmm0", "tilezero tmm1"],
                    step: [
                        "tileloadd tmm4, [{a0} + {line}]",
                        "tileloadd tmm6, [{b} + {row}]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tileloadd tmm7, [{b} + {row} + 64]",
                        "tdpbf16ps tmm1, tmm4, tmm7"
                    ],
                    store: ["tilestored [{c0} + {c_apart}], tmm0", "tilestored [{c0} + {c_apart} + 64], tmm1"],
                    a, b, steps, c, begin
                ),
                [2, 1] => kernel!(
                    load: [
                        "tileloadd tmm0, [{begin} + {begin_apart}]",
                        "tileloadd tmm2, [{lower} + {begin_apart}]"
                    ],
                    zero: ["tilezero tmm0", "tilezero tmm2"],
                    step: [
                        "tileloadd tmm4, [{a0} + {line}]",
                        "tileloadd tmm6, [{b} + {row}]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tileloadd tmm5, [{a1} + {line}]",
                        "tdpbf16ps tmm2, tmm5, tmm6"
                    ],
                    store: ["tilestored [{c0} + {c_apart}], tmm0", "tilestored [{c1} + {c_apart}], tmm2"],
                    a, b, steps, c, begin
                ),
                _ => kernel!(
                    load: ["tileloadd tmm0, [{begin} + {begin_apart}]", "/* {lower} {c1} */"],
                    zero: ["tilezero tmm0"],
                    step: [
                        "tileloadd tmm4, [{a0} + {line}]",
                        "tileloadd tmm6, [{b} + {row}]",
                        "tdpbf16ps tmm0, tmm4, tmm6"
                    ],
                    store: ["tilestored [{c0} + {c_apart}], tmm0"],
                    a, b, steps, c, begin
                ),
            }
        }
    }
}
