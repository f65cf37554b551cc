//! The mean token of each region.
//!
//! **Forward.** The map x (N, H, W, C) is cut by a grid of G_h × G_w regions, each of r_h × r_w tokens with
//! r_h = H/G_h and r_w = W/G_w. y (N, G_h·G_w, C) holds per region p = g·G_w + h the mean over its tokens,
//! y\[n, p, c\] = 1/(r_h·r_w) · Σ x\[n, g·r_h + a, h·r_w + b, c\] over a < r_h, b < r_w.
//!
//! **Backward.** Each token has the weight 1/(r_h·r_w) in the mean of its own region and in no other, so
//! dx\[n, i, j, c\] = dy\[n, region of (i, j), c\] / (r_h·r_w). Nothing is saved.
//!
//! x may be a view whose channels lie side by side (the queries inside a qkv map); f32 or f64, and bf16 on a GPU.
//! Errors: [`tensor::Error::Shape`] if x does not have four axes or the map is empty, [`tensor::Error::Argument`] when
//! the grid does not divide the map, [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source: Zhu et al.,
//! "BiFormer", CVPR 2023, equation 3: what bi-level routing compares regions by.

pub mod cases;
pub(crate) mod cpu;
mod cuda;
pub(crate) mod geometry;
pub mod reference;

use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use cpu::Tokens;
use geometry::Geometry;
use tensor::cuda::Module;
use tensor::{Device, Shape, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "mean over each region of a grid, (N, H, W, C) -> (N, P, C)";

/// The mean token of each of `grid` = (G_h, G_w) regions of x (N, H, W, C): (N, G_h·G_w, C), regions in
/// row-major order.
/// Operands and errors: those of the [module](mod@crate::region_pool).
pub fn region_pool<'t>(x: &Var<'t>, grid: [usize; 2]) -> Result<Var<'t>> {
    let geometry = Geometry::new("region_pool", x.value(), grid)?;
    pooled("region_pool", x, geometry, [geometry.images, geometry.regions.count(), geometry.channels])
}

/// The mean token of each region of x, (N, P, C), under a shape of as many elements.
pub(crate) fn pooled<'t>(
    op: &'static str,
    x: &Var<'t>,
    geometry: Geometry,
    shape: impl Into<Shape>,
) -> Result<Var<'t>> {
    let device = x.value().device();
    let mut y = Tensor::empty_on(&device, shape, x.dtype())?;
    match device {
        Device::Cpu => match_float!(x.dtype(), op, T => {
            cpu::forward::<T>(Tokens::new(op, x.value())?, geometry, y.as_mut_slice(op)?);
        }),
        Device::Cuda(_) => cuda::forward(op, x.value(), geometry, &mut y)?,
    }
    x.tape().record(op, &[x], y, || Pooled { op, geometry })
}

struct Pooled {
    op: &'static str,
    geometry: Geometry,
}

impl Rule for Pooled {
    rule_fields!(self.op);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        give!(grads, 0, dy, self.op, out => {
            Cpu<T>: cpu::backward(dy.as_slice(self.op)?, self.geometry, out),
            Cuda: cuda::backward(&dy, self.geometry, out)?,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::uniform;
    use autograd::Tape;
    use tensor::Error;

    #[test]
    fn an_empty_map_has_no_means() {
        let tape = Tape::inference();
        let error = region_pool(&tape.constant(uniform([1, 0, 4, 2], 1)), [1, 1]).unwrap_err().to_string();
        assert!(error.contains("(1, 0, 4, 2)"), "{error}");
    }

    #[test]
    fn channels_that_lie_apart_are_refused() {
        let tape = Tape::inference();
        let planes = uniform([2, 3, 4, 4], 1).permute(&[0, 2, 3, 1]).unwrap();
        let error = region_pool(&tape.constant(planes), [2, 2]).expect_err("not contiguous");
        assert!(matches!(error, autograd::Error::Tensor(Error::NotContiguous { .. })), "{error}");
    }
}
