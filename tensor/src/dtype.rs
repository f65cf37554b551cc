//! Element types: what a tensor can hold, and what a kernel can compute with.

use crate::{Error, Result};
use half::bf16;
use std::fmt;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32: training and inference.
    F32,
    /// IEEE 754 binary64: gradient checks and conformance.
    F64,
    /// bfloat16: for the factors of matrix products. For anything else on the CPU, cast it to f32.
    Bf16,
    /// u32: class labels, routed regions, any position.
    Index,
}

impl DType {
    /// The type of sums and statistics over elements of this type, and of parameters that are not matrices: f32 for
    /// bf16, otherwise the type itself.
    pub fn of_sums(self) -> DType {
        if self == DType::Bf16 { DType::F32 } else { self }
    }

    /// A number rounded to the type that sums over elements of this type have ([`DType::of_sums`]).
    pub fn rounded_sum(self, x: f64) -> f64 {
        if self == DType::F64 { x } else { f64::from(x as f32) }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::Bf16 => "bf16",
            DType::Index => "index (u32)",
        }
    }

    /// [`Error::DType`] unless it is the type that an operation needs.
    pub fn ensure_dtype(self, op: &'static str, dtype: DType) -> Result<()> {
        if self == dtype { Ok(()) } else { Err(Error::DType { op, expected: dtype.name(), actual: self }) }
    }

    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::Index => 4,
            DType::Bf16 => 2,
        }
    }

    /// Elements in 16 bytes: in a `Pack`, which a thread on a GPU loads or stores at once.
    pub fn per_pack(self) -> usize {
        16 / self.size()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A Rust type that can be an element of a tensor. Every bit pattern of it must be a valid value,
/// which [`bytemuck::Pod`] states: recycled buffers are handed out with old contents.
///
/// The trait is sealed: unsafe vector code selects instructions by [`Element::DTYPE`], which must match the type.
pub trait Element: sealed::Sealed + bytemuck::Pod + Default + PartialEq + fmt::Debug + Send + Sync {
    /// The corresponding [`DType`].
    const DTYPE: DType;
}

mod sealed {
    /// Closes [`Element`](super::Element).
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::bf16 {}
    impl Sealed for u32 {}
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for f64 {
    const DTYPE: DType = DType::F64;
}
impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Element for u32 {
    const DTYPE: DType = DType::Index;
}

/// A type that kernels compute with: f32, or f64 to check the very same kernel in double precision.
pub trait Float:
    Element + num_traits::Float + num_traits::NumAssign + std::iter::Sum + crate::cpu::math::Transcendental + fmt::Display
{
    /// Rounds a constant to this type.
    fn of(value: f64) -> Self;
    /// Widens to f64, exactly.
    fn as_f64(self) -> f64;
}

macro_rules! impl_float {
    ($type:ty) => {
        impl Float for $type {
            #[inline(always)]
            fn of(value: f64) -> Self {
                value as $type
            }
            #[inline(always)]
            fn as_f64(self) -> f64 {
                f64::from(self)
            }
        }
    };
}

impl_float!(f32);
impl_float!(f64);

/// Runs an expression with a type name bound to the Rust type of a floating-point [`DType`]:
/// `match_float!(x.dtype(), "gelu", T => kernel::<T>(...))`. Any other type is [`Error::DType`](crate::Error::DType).
#[macro_export]
macro_rules! match_float {
    ($dtype:expr, $op:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::F64 => {
                type $T = f64;
                $body
            }
            other => return Err($crate::Error::DType { op: $op, expected: "f32 or f64", actual: other }.into()),
        }
    };
}

/// As `match_float!`, for the types of matrix factors, [`Factor`](crate::cpu::factor::Factor): f32, f64, or bf16.
#[macro_export]
macro_rules! match_factor {
    ($dtype:expr, $op:expr, $F:ident => $body:expr) => {
        match $dtype {
            $crate::DType::Bf16 => {
                type $F = $crate::bf16;
                $body
            }
            dtype => $crate::match_float!(dtype, $op, $F => $body),
        }
    };
}
