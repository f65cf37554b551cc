//! Zeros before and after a tensor along one axis.
//!
//! **Forward.** y has `before` + extent + `after` positions along the axis: zeros, x, zeros. A map
//! (N, H, W, C) is padded at the bottom with `pad(x, 1, 0, n)` and at the right with `pad(x, 2, 0, n)`.
//!
//! **Backward.** The zeros are constants, so dx is the range of dy where x lies. Nothing is saved but that
//! place.
//!
//! x must be contiguous, f32 or f64. Errors: [`tensor::Error::Axis`], [`tensor::Error::NotContiguous`],
//! [`tensor::Error::DType`].

pub mod cases;
pub mod reference;

use crate::slab::{Slab, expect_axis};
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cpu::parallel::Out;
use tensor::{Tensor, match_float};

pub(crate) const SUMMARY: &str = "zeros before and after, along an axis";

/// x with `before` positions of zeros before it and `after` behind it, along `axis`.
pub fn pad<'t>(x: &Var<'t>, axis: usize, before: usize, after: usize) -> Result<Var<'t>> {
    expect_axis("pad", x.shape(), axis)?;
    let end = before + x.shape()[axis];
    let mut y = Tensor::empty(x.shape().with(axis, end + after), x.dtype());
    let place = Slab::new(y.shape(), axis, before..end);
    match_float!(x.dtype(), "pad", T => {
        place.insert::<T>(x.value().as_slice("pad")?, Out::store(y.as_mut_slice("pad")?));
    });
    x.tape().record("pad", &[x], y, || Pad { place })
}

struct Pad {
    /// Where x lies in y.
    place: Slab,
}

impl Rule for Pad {
    rule_fields!("pad");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let mut dx = grads.open(0)?;
        match_float!(dy.dtype(), "pad", T => {
            if let Some(out) = dx.out::<T>()? {
                self.place.extract(dy.as_slice("pad")?, out);
            }
        });
        grads.close(dx);
        Ok(())
    }
}
