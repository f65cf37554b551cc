//! A map cut into a grid of regions.
//!
//! **Forward.** x (N, H, W, C) is cut into G_h by G_w regions of r_h = H/G_h by r_w = W/G_w tokens. Regions
//! are numbered row by row, p = i·G_w + j, and so are the tokens of a region, t = a·r_w + b:
//! y[n, p, t] = x[n, i·r_h + a, j·r_w + b], of shape (N, G_h·G_w, r_h·r_w, C).
//!
//! A line of r_w tokens stays together. In units of such lines x is (N·G_h, r_h, G_w) and y is
//! (N·G_h, G_w, r_h): the two last axes change places, and that is all.
//!
//! **Backward.** Each element goes to one element, so dx is dy with the two axes swapped back, which is
//! [`region_merge`](mod@crate::region_merge). Nothing is saved but extents.
//!
//! x must be contiguous; f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::Argument`] for a grid without regions,
//! and for one that does not divide the map ([`Regions::cut`] names the next size that fits), [`tensor::Error::Shape`]
//! if x does not have four axes, [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source: Zhu et al.,
//! "BiFormer", 2023, section 3.2.

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use crate::give::give;
use crate::regions::Regions;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cpu::parallel::Out;
use tensor::cuda::Module;
use tensor::{Device, Shape, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "a map cut into a grid of regions";

/// Cuts x (N, H, W, C) into a grid of G_h by G_w regions: (N, G_h·G_w, r_h·r_w, C).
/// Operands and errors: those of the [module](mod@crate::region_partition).
pub fn region_partition<'t>(x: &Var<'t>, grid: [usize; 2]) -> Result<Var<'t>> {
    let [images, height, width, channels] = x.value().dims("region_partition", "x (N, H, W, C)")?;
    let regions = Regions::cut("region_partition", [height, width], grid)?;
    let shape = Shape::from([images, regions.count(), regions.tokens(), channels]).countable("region_partition")?;
    let ([_, across], [rows, columns]) = (grid, regions.size());
    swapped("region_partition", x, shape, [rows, across, columns * channels])
}

/// x in units of lines, (B, P, Q) of L elements, with the last two axes swapped to (B, Q, P), in the shape `shape`;
/// `extents` are P, Q and L.
pub(crate) fn swapped<'t>(op: &'static str, x: &Var<'t>, shape: Shape, extents: [usize; 3]) -> Result<Var<'t>> {
    let device = x.value().device();
    let mut y = Tensor::empty_on(&device, shape, x.dtype())?;
    match device {
        Device::Cpu => match_float!(x.dtype(), op, T => {
            cpu::swap::<T>(x.value().as_slice(op)?, extents, Out::store(y.as_mut_slice(op)?));
        }),
        Device::Cuda(_) => cuda::swap(x.value(), extents, y.as_out(op, false)?)?,
    }
    let [p, q, line] = extents;
    x.tape().record(op, &[x], y, || Swapped { op, back: [q, p, line] })
}

struct Swapped {
    op: &'static str,
    /// The extents of dy in lines, Q and P, and the elements of a line.
    back: [usize; 3],
}

impl Rule for Swapped {
    rule_fields!(self.op);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        give!(grads, 0, dy, self.op, out => {
            Cpu<T>: cpu::swap(dy.as_slice(self.op)?, self.back, out),
            Cuda: cuda::swap(&dy, self.back, out)?,
        });
        Ok(())
    }
}
