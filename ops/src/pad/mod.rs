//! Zero padding at the bottom and the right of a map.
//!
//! **Forward.** y[n, h, w] = x[n, h, w] for h < H and w < W, otherwise 0, with x (N, H, W, C) and
//! y (N, H + bottom, W + right, C).
//!
//! **Backward.** The zeros are constants, so dx is the upper left part of dy. Nothing is saved but extents.
//!
//! x must be contiguous; f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::Shape`],
//! [`tensor::Error::NotContiguous`], [`tensor::Error::DType`], [`tensor::Error::Argument`] if the size of y overflows.

pub mod cases;
mod cpu;
mod cuda;
mod geometry;
pub mod reference;

use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use geometry::Geometry;
use tensor::cuda::Module;
use tensor::{Device, Shape, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "zero padding at the bottom and the right of a map";

/// x (N, H, W, C) with zeros below it and to its right: (N, H + bottom, W + right, C).
/// Operands and errors: those of the [module](mod@crate::pad).
pub fn pad<'t>(x: &Var<'t>, [bottom, right]: [usize; 2]) -> Result<Var<'t>> {
    let [images, height, width, channels] = x.value().dims("pad", "x (N, H, W, C)")?;
    // Saturates, so that an overflow is refused below.
    let padded = [height.saturating_add(bottom), width.saturating_add(right)];
    let shape = Shape::from([images, padded[0], padded[1], channels]).countable("pad")?;
    let geometry =
        Geometry { rows: height, padded_rows: padded[0], row: width * channels, padded_row: padded[1] * channels };
    let device = x.value().device();
    let mut y = Tensor::empty_on(&device, shape, x.dtype())?;
    match device {
        Device::Cpu => match_float!(x.dtype(), "pad", T => {
            cpu::forward::<T>(x.value().as_slice("pad")?, geometry, y.as_mut_slice("pad")?);
        }),
        Device::Cuda(_) => cuda::forward(x.value(), geometry, &mut y)?,
    }
    x.tape().record("pad", &[x], y, || Pad { geometry })
}

struct Pad {
    geometry: Geometry,
}

impl Rule for Pad {
    rule_fields!("pad");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        give!(grads, 0, dy, "pad", out => {
            Cpu<T>: cpu::backward(dy.as_slice("pad")?, self.geometry, out),
            Cuda: cuda::backward(&dy, self.geometry, out)?,
        });
        Ok(())
    }
}
