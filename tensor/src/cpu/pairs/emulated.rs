//! AMX, emulated, so that the tests of this crate multiply tiles on any machine with AVX-512's conversion to bf16. On a
//! processor without tiles their instructions raise a signal, whose handler does what Intel's manual says they do.
//!
//! It knows the forms of the instructions that `amx.rs` has. What a processor would do, too, but no code here should
//! ask for, ends the tests: to set up tiles twice on a thread, or to read one that nothing was put in.

use crate::cpu::isa::Arch;
use crate::simd;
use libc::{REG_RIP, SA_NODEFER, SA_SIGINFO, SIG_DFL, SIGILL, c_int, c_void, siginfo_t, ucontext_t};
use std::cell::RefCell;
use std::sync::Once;

/// A row has sixteen pairs of bf16, or sixteen f32s.
type Row = [[u8; 4]; 16];
type Tile = [Row; 16];

/// The tiles of a thread.
struct Tiles {
    ready: bool,
    /// None has anything in it at first.
    tiles: [Option<Tile>; 8],
}

thread_local! {
    static TILES: RefCell<Tiles> = const { RefCell::new(Tiles { ready: false, tiles: [None; 8] }) };
}

/// Emulates AMX from now on. Always true.
pub fn install() -> bool {
    static ONCE: Once = Once::new();
    // SAFETY: the action is valid; the handler changes only the registers of the thread that raised the signal.
    ONCE.call_once(|| unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_unknown_instruction as *const () as usize;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;
        assert_eq!(libc::sigaction(SIGILL, &raw const action, std::ptr::null_mut()), 0);
    });
    true
}

/// A panic in here ends the program.
unsafe extern "C" fn on_unknown_instruction(_: c_int, _: *mut siginfo_t, context: *mut c_void) {
    /// The registers by their numbers in an instruction.
    const NUMBERED: [c_int; 16] = [
        libc::REG_RAX,
        libc::REG_RCX,
        libc::REG_RDX,
        libc::REG_RBX,
        libc::REG_RSP,
        libc::REG_RBP,
        libc::REG_RSI,
        libc::REG_RDI,
        libc::REG_R8,
        libc::REG_R9,
        libc::REG_R10,
        libc::REG_R11,
        libc::REG_R12,
        libc::REG_R13,
        libc::REG_R14,
        libc::REG_R15,
    ];
    // SAFETY: the system passes the context of the thread.
    let registers = unsafe { &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs };
    let at = registers[REG_RIP as usize] as *const u8;
    // SAFETY: the thread was about to execute what is there.
    if unsafe { *at } != THREE_BYTE_PREFIX {
        // Not for us: executed again, it ends the program as it would have without this handler.
        // SAFETY: the default action is valid.
        unsafe { libc::signal(SIGILL, SIG_DFL) };
        return;
    }
    // SAFETY: as above.
    let (instruction, len) =
        unsafe { Instruction::at(at, NUMBERED.map(|register| registers[register as usize] as usize)) };
    // SAFETY: the instruction's memory is that of the assembly, which vouches for it.
    TILES.with_borrow_mut(|tiles| unsafe { tiles.execute(instruction) });
    registers[REG_RIP as usize] += len as i64;
}

/// What an instruction of AMX begins with.
const THREE_BYTE_PREFIX: u8 = 0xc4;

/// An instruction of AMX.
#[derive(Clone, Copy, Debug)]
enum Instruction {
    /// `ldtilecfg`, from this address.
    SetUp(*const u8),
    /// `tilerelease`
    Release,
    /// `tilezero`
    Zero(usize),
    /// `tileloadd`: a tile, from rows at this address, so far apart.
    Load(usize, *const u8, usize),
    /// `tilestored`, the same to rows.
    Store(usize, *mut u8, usize),
    /// `tdpbf16ps`: C += A·B.
    Multiply { c: usize, a: usize, b: usize },
}

impl Instruction {
    /// The instruction at an address, given the values of the sixteen registers, and its length in bytes.
    ///
    /// # Safety
    /// There must be one.
    unsafe fn at(code: *const u8, registers: [usize; 16]) -> (Self, usize) {
        // SAFETY: guaranteed by the caller, here and below.
        let byte = |place: usize| unsafe { *code.add(place) };
        let (extensions, opcode, operands) = ([byte(1), byte(2)], byte(3), byte(4));
        let (prefix, mode) = (extensions[1] & 3, operands >> 6);
        assert!(extensions[0] & 31 == 2 && extensions[1] & 0b1000_0100 == 0, "an instruction of AMX: {extensions:x?}");
        // The highest bit of each register's number is stored inverted.
        let extended = |low: u8, bit: u32| usize::from(low & 7) | usize::from(!extensions[0] >> bit & 1) << 3;
        let (first, last) = (extended(operands >> 3, 7), extended(operands, 5));
        let (mut len, mut place, mut apart) = (5, 0, 0);
        if mode != 3 {
            let mut base = last;
            if operands & 7 == 4 {
                let sum = byte(len);
                let index = extended(sum >> 3, 6);
                base = extended(sum, 5);
                apart = if index == 4 { 0 } else { registers[index] << (sum >> 6) };
                len += 1;
            }
            assert!(mode != 0 || base & 7 != 5, "an address without a register");
            let displacement = match mode {
                0 => 0,
                1 => isize::from(byte(len) as i8),
                _ => i32::from_le_bytes([0, 1, 2, 3].map(|place| byte(len + place))) as isize,
            };
            len += [0, 1, 4][usize::from(mode)];
            place = registers[base].wrapping_add_signed(displacement);
        }
        let instruction = match (opcode, prefix, mode) {
            (0x49, 0, 3) => Self::Release,
            (0x49, 0, _) => Self::SetUp(place as *const u8),
            (0x49, 3, 3) => Self::Zero(first),
            (0x4b, 3, 0..3) => Self::Load(first, place as *const u8, apart),
            (0x4b, 2, 0..3) => Self::Store(first, place as *mut u8, apart),
            (0x5c, 2, 3) => Self::Multiply { c: first, a: last, b: usize::from(!extensions[1] >> 3 & 15) },
            other => panic!("an instruction of AMX that is not emulated: {other:x?}"),
        };
        (instruction, len)
    }
}

impl Tiles {
    /// # Safety
    /// The instruction's memory must be there, and nobody else may use what it writes.
    unsafe fn execute(&mut self, instruction: Instruction) {
        assert!(self.ready != matches!(instruction, Instruction::SetUp(_)), "{instruction:x?}, ready: {}", self.ready);
        match instruction {
            Instruction::SetUp(from) => {
                // SAFETY: guaranteed by the caller, here and below.
                let setup = unsafe { std::slice::from_raw_parts(from, 64) };
                let mut all = [0; 64];
                all[0] = 1;
                all[16..32].copy_from_slice(&[64, 0].repeat(8));
                all[48..56].fill(16);
                assert_eq!(setup, all, "eight tiles of 16 rows of 64 bytes");
                self.ready = true;
            }
            Instruction::Release => *self = Self { ready: false, tiles: [None; 8] },
            Instruction::Zero(tile) => self.tiles[tile] = Some(Tile::default()),
            Instruction::Load(tile, from, apart) => {
                // SAFETY: as above.
                let row = |row: usize| unsafe { from.wrapping_add(row * apart).cast::<Row>().read_unaligned() };
                self.tiles[tile] = Some(std::array::from_fn(row));
            }
            Instruction::Store(tile, to, apart) => {
                for (place, row) in self.filled(tile).iter().enumerate() {
                    // SAFETY: as above.
                    unsafe { to.wrapping_add(place * apart).cast::<Row>().write_unaligned(*row) };
                }
            }
            Instruction::Multiply { c, a, b } => {
                assert!(c != a && c != b && a != b, "three tiles");
                let (mut sum, a, b) = (*self.filled(c), self.filled(a), self.filled(b));
                simd!(A => multiply::<A>(&mut sum, a, b));
                self.tiles[c] = Some(sum);
            }
        }
    }

    /// A tile that something was put in.
    fn filled(&self, tile: usize) -> &Tile {
        self.tiles[tile].as_ref().expect("something in the tile")
    }
}

/// C += A·B, where a row of A has pairs that are neighbours along the inner axis, and each row of B such a pair for
/// every column: the products of either half of the pairs are summed by themselves, row after row of B.
#[inline(always)]
fn multiply<A: Arch>(c: &mut Tile, a: &Tile, b: &Tile) {
    for (c, a) in c.iter_mut().zip(a) {
        let mut sums = [[0.0f32; 16]; 2];
        for (a, b) in a.iter().zip(b) {
            for (half, sums) in sums.iter_mut().enumerate() {
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum = flushed(A::mul_add(factor(*a, half), factor(*b, half), *sum));
                }
            }
        }
        for (place, c) in c.iter_mut().enumerate() {
            let added = flushed(sums[0][place] + sums[1][place]);
            *c = flushed(flushed(f32::from_le_bytes(*c)) + added).to_le_bytes();
        }
    }
}

/// One of a pair of bf16.
#[inline(always)]
fn factor(pair: [u8; 4], half: usize) -> f32 {
    flushed(f32::from_le_bytes([0, 0, pair[2 * half], pair[2 * half + 1]]))
}

/// Tiles take denormals for zero, and leave none.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}
