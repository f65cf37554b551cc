//! Instruction sets, detected at run time: nobody has to set RUSTFLAGS.
//!
//! A kernel is an ordinary generic function `fn kernel<T: Float, A: Arch>(...)` marked
//! `#[inline(always)]`. [`simd!`](crate::simd) compiles it once per instruction set, inside a function
//! with those target features, where the compiler vectorises its loops; and calls the best one that
//! this machine has. `A` says what plain Rust leaves open: whether a fused multiply-add is one
//! instruction or a slow library call, and how many registers there are.

#[cfg(target_arch = "x86_64")]
use super::pairs::amx;
use super::registers::{Each, Vector};
use crate::{Error, Float, Result, lock};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard};

/// An instruction-set family that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the compiler's target guarantees (SSE2 on x86-64, NEON on aarch64).
    Portable = 0,
    /// x86-64 with AVX2 and FMA.
    Avx2 = 1,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512 = 2,
    /// The same with products of pairs of bf16, where they are taken to be faster than those of f32 (AMD from Zen 4
    /// on).
    Avx512Bf16 = 3,
    /// With AVX-512, those products, and tiles of bf16 (Intel from Sapphire Rapids on).
    Amx = 4,
}

/// Environment variable that names the best instruction set to use, so that a machine can be made to run the code of an
/// older one.
const VARIABLE: &str = "BIFORMER_ISA";

impl Isa {
    /// All of them, from the least to the best.
    pub const ALL: [Isa; 5] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];
    /// Those that [`simd!`](crate::simd) compiles kernels for; the others add products of bf16.
    pub const SIMD: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    /// The best that this machine has, or a lesser one that the variable `BIFORMER_ISA` names.
    pub fn detected() -> Isa {
        static DETECTED: LazyLock<Isa> = LazyLock::new(|| {
            let most = Isa::asked().ok().flatten().unwrap_or(Isa::Amx);
            detect(most).min(most)
        });
        *DETECTED
    }

    /// The instruction set that the variable `BIFORMER_ISA` names, if it is set. Errors: [`Error::Argument`] for an
    /// unknown name, which everything else ignores.
    pub fn asked() -> Result<Option<Isa>> {
        let Some(name) = std::env::var_os(VARIABLE).filter(|name| !name.is_empty()) else { return Ok(None) };
        let found = Isa::ALL.into_iter().find(|isa| name == isa.name() || name == "portable" && *isa == Isa::Portable);
        let names = || Isa::ALL.map(Isa::name).join(", ");
        found.map(Some).ok_or_else(|| Error::argument(VARIABLE, format!("expected one of {}, got {name:?}", names())))
    }

    /// The one in use: the detected one, or a lesser one that [`limits`] asked for.
    pub fn current() -> Isa {
        let limit = Self::ALL.get(usize::from(LIMIT.load(Ordering::Relaxed))).copied();
        Isa::detected().min(limit.unwrap_or(Isa::Amx))
    }

    /// The name as it is printed: `avx512+amx`, `avx512+bf16`, `avx512`, `avx2`, `neon` or `portable`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Amx => "avx512+amx",
            Isa::Avx512Bf16 => "avx512+bf16",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable if cfg!(target_arch = "aarch64") => "neon",
            Isa::Portable => "portable",
        }
    }
}

static LIMIT: AtomicU8 = AtomicU8::new(u8::MAX);
static LIMITING: Mutex<()> = Mutex::new(());

/// While it lives, no instruction set better than [`Limited::isa`] is used anywhere in the program: see [`limits`] and
/// [`unlimited`].
pub struct Limited {
    isa: Isa,
    _turn: MutexGuard<'static, ()>,
}

impl Limited {
    /// The best that is used.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

/// Limits the program to each of these instruction sets in turn, for as long as the yielded item lives, so that tests
/// reach every code path on one machine. Those that the machine lacks are skipped, and named on standard error. Waits
/// while another limit is in force.
pub fn limits(isas: &[Isa]) -> impl Iterator<Item = Limited> {
    isas.iter().filter_map(|&isa| {
        if isa > Isa::detected() {
            eprintln!("skipped: this machine has no {}", isa.name());
            return None;
        }
        let turn = lock(&LIMITING);
        LIMIT.store(isa as u8, Ordering::Relaxed);
        Some(Limited { isa, _turn: turn })
    })
}

/// Prevents limits for as long as the item lives: for a test that compares bits while other tests of the process may
/// [limit](limits) the instruction set. Waits while a limit is in force.
pub fn unlimited() -> Limited {
    Limited { isa: Isa::detected(), _turn: lock(&LIMITING) }
}

impl Drop for Limited {
    fn drop(&mut self) {
        LIMIT.store(u8::MAX, Ordering::Relaxed);
    }
}

/// The best instruction set of this machine. AMX tiles need permission from the system, which is not requested if
/// `most` is below AMX.
#[cfg(target_arch = "x86_64")]
fn detect(most: Isa) -> Isa {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let bf16 = is_x86_feature_detected!("avx512bf16");
    match (avx512 && avx2, avx2) {
        (true, _) if bf16 && most >= Isa::Amx && amx::enable() => Isa::Amx,
        (true, _) if bf16 && (most < Isa::Amx || !is_intel()) => Isa::Avx512Bf16,
        (true, _) => Isa::Avx512,
        (_, true) => Isa::Avx2,
        _ => Isa::Portable,
    }
}

/// Whether the processor is Intel's, whose products of pairs are slower than those of f32.
#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    #[allow(unused_unsafe)] // a safe function in newer releases of Rust than the oldest that will do
    // SAFETY: every x86-64 processor has this instruction.
    let vendor = unsafe { std::arch::x86_64::__cpuid(0) };
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == *b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn detect(_most: Isa) -> Isa {
    Isa::Portable
}

/// What a kernel asks of the instruction set that it is being compiled for. The trait is sealed: unsafe code relies on
/// [`run`](Self::run) to refuse a machine that lacks the instruction set.
pub trait Arch: sealed::Sealed + Copy {
    /// The widest register, of elements `T`.
    type Vector<T: Float>: Vector<T>;
    /// Whether there are 32 registers rather than 16. NEON's 32 count as 16, because they are used in pairs.
    const MANY_REGISTERS: bool;
    /// Runs `f`, which is `#[inline(always)]`, compiled for this instruction set, in a separate function, so that the
    /// surrounding code takes no registers from the kernel. Panics on a machine without it.
    fn run<R>(f: impl FnOnce() -> R) -> R;
    /// a·b + c, rounded once where that is one instruction and twice where it is not.
    fn mul_add<T: Float>(a: T, b: T, c: T) -> T;
}

pub(super) mod sealed {
    /// Closes [`Arch`](super::Arch).
    pub trait Sealed {}
}

/// Nothing that the compiler's target does not guarantee, and no fused multiply-add.
#[derive(Clone, Copy)]
pub struct Plain;

impl sealed::Sealed for Plain {}

impl Arch for Plain {
    type Vector<T: Float> = Each<T, Plain, 4>;
    const MANY_REGISTERS: bool = false;
    #[inline(always)]
    fn run<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    fn mul_add<T: Float>(a: T, b: T, c: T) -> T {
        a * b + c
    }
}

/// [`Arch`] of the compiler's own target.
#[cfg(target_arch = "aarch64")]
pub type Portable = super::registers::Neon;
/// [`Arch`] of the compiler's own target.
#[cfg(not(target_arch = "aarch64"))]
pub type Portable = Plain;

/// Calls a kernel compiled for the best instruction set of this machine. The kernel must be `#[inline(always)]` and
/// generic over an [`Arch`](crate::cpu::isa::Arch), which is written as `A` in the call: `simd!(A => kernel::<T, A>(x,
/// y))`. `simd!(isa, A => ..)` chooses the instruction set, which this machine must have.
#[macro_export]
macro_rules! simd {
    ($A:ident => $call:expr) => {
        $crate::simd!($crate::cpu::isa::Isa::current(), $A => $call)
    };
    ($isa:expr, $A:ident => $call:expr) => {{
        #[allow(unused_imports)] // some machines have one instruction set
        use $crate::cpu::isa::{Arch, Isa, Portable};
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => $crate::simd!(@run $A = $crate::cpu::registers::Avx512, $call),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => $crate::simd!(@run $A = $crate::cpu::registers::Avx2, $call),
            _ => $crate::simd!(@run $A = Portable, $call),
        }
    }};
    (@run $A:ident = $arch:ty, $call:expr) => {{
        type $A = $arch;
        $A::run(
            #[inline(always)]
            || $call,
        )
    }};
}
