//! Depthwise convolution: one K×K kernel per channel, stride 1, zero padding.
//!
//! **Forward.** y[n, i, j, c] = b\[c\] + Σ_{u,v} x[n, i + u − P, j + v − P, c] · w[c, 0, u, v], with K odd and
//! P = (K − 1)/2, so that y has the shape of x (N, H, W, C); w is (C, 1, K, K), b (C) or none. Terms outside
//! the image are zero.
//!
//! **Backward.** x[n, i', j', c] meets w[c, 0, u, v] in y[n, i' − u + P, j' − v + P, c], hence dx[n, i', j', c] =
//! Σ_{u,v} dy[n, i' − u + P, j' − v + P, c] · w[c, 0, u, v]: the same correlation, of dy with the kernel rotated by
//! 180° (u → K − 1 − u, v likewise). dw[c, 0, u, v] = Σ_{n,i,j} dy[n, i, j, c] · x[n, i + u − P, j + v − P, c] and
//! db\[c\] = Σ_{n,i,j} dy[n, i, j, c]. Saved: x and w.
//!
//! **Residual.** [`dwconv_residual`] is x + dwconv(x), the position encoding as BiFormer uses it: equivalent to adding
//! one to the kernel's centre (a = b = P), in y and in dx; all else is as above.
//!
//! K is 3, 5 or 7: the kernels are compiled for each. Operands must be contiguous; f32 or f64, and on a GPU also x in
//! bf16 with w and b in f32. Errors: [`tensor::Error::Shape`], [`tensor::Error::NotContiguous`],
//! [`tensor::Error::DType`]. Source: `torch.nn.Conv2d` with `groups = C, padding = K // 2`, whose weight layout this
//! is. In BiFormer: the position encoding (K = 3) and the local context enhancement of the values (K = 5).

pub mod cases;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod geometry;
pub mod reference;

use autograd::{InputGrads, MultiplyAdds, Result, Rule, Slot, Var, rule_fields};
use cpu::{Kernel, Map, MapMut};
use geometry::Geometry;
use tensor::cpu::parallel::Out;
use tensor::cuda::Module;
use tensor::{Device, Error, Shape, Tensor, match_float};

/// The supported kernel extents K.
pub const SIZES: [usize; 3] = [3, 5, 7];
pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "each channel convolved with its own K×K kernel";

/// x (N, H, W, C) convolved channel by channel with `weight` (C, 1, K, K), K = 3, 5 or 7, plus `bias` (C) if there
/// is one: (N, H, W, C).
/// Operands and errors: those of the [module](mod@crate::dwconv).
pub fn dwconv<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>) -> Result<Var<'t>> {
    convolve(x, weight, bias, false)
}

/// x + [`dwconv`]`(x, weight, bias)` in one pass: a residual around a convolution is equivalent to adding one to the
/// kernel's centre, forward and backward.
/// Operands and errors: those of the [module](mod@crate::dwconv).
pub fn dwconv_residual<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>) -> Result<Var<'t>> {
    convolve(x, weight, bias, true)
}

fn convolve<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>, residual: bool) -> Result<Var<'t>> {
    let map = x.value().dims("dwconv", "x (N, H, W, C)")?;
    let geometry = geometry("dwconv", map, weight.value(), bias.map(Var::value))?;
    let channels = geometry.channels;
    let mut y = x.value().empty_like()?;
    match x.value().device() {
        Device::Cpu => match_float!(x.dtype(), "dwconv", T => cpu::forward::<T>(
            geometry,
            Map { data: x.value().as_slice("dwconv")?, stride: channels },
            Kernel { weight: weight.value().as_slice("dwconv")?, residual },
            bias.map(|bias| bias.value().as_slice("dwconv")).transpose()?,
            MapMut { out: Out::store(y.as_mut_slice("dwconv")?), stride: channels },
        )),
        Device::Cuda(_) => {
            let x = cuda::Map::new(x.value(), 0, channels)?;
            let kernel = cuda::Kernel { weight: weight.value(), residual };
            let y = cuda::MapMut { out: y.as_out("dwconv", false)?, stride: channels };
            cuda::forward(geometry, &x, kernel, bias.map(Var::value), y)?;
        }
    }
    let rule = || Dwconv { x: x.value().clone(), weight: weight.value().clone(), residual };
    let inputs: Vec<_> = [Some(x), Some(weight), bias].into_iter().flatten().collect();
    x.tape().record("dwconv", &inputs, y, rule)
}

/// The extents of a convolution of a map (N, H, W, C), if weight and bias fit it.
pub(crate) fn geometry(
    op: &'static str,
    [images, height, width, channels]: [usize; 4],
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> tensor::Result<Geometry> {
    let [filters, group, kernel, across] = weight.dims(op, "a weight (C, 1, K, K)")?;
    if [filters, group, kernel] != [channels, 1, across] || !SIZES.contains(&kernel) {
        let expected = format!("a weight ({channels}, 1, K, K) with K one of {SIZES:?}");
        return Err(Error::shape(op, expected, weight.shape()));
    }
    if let Some(bias) = bias.filter(|bias| *bias.shape() != [channels]) {
        return Err(Error::shape(op, format!("a bias of ({channels})"), bias.shape()));
    }
    Ok(Geometry { images, height, width, channels, kernel })
}

struct Dwconv {
    x: Tensor,
    weight: Tensor,
    residual: bool,
}

impl Rule for Dwconv {
    rule_fields!("dwconv", x, weight);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let map = self.x.dims("dwconv", "x (N, H, W, C)")?;
        let geometry = geometry("dwconv", map, &self.weight, None)?;
        let stride = geometry.channels;
        let (mut dx, mut dweight, mut dbias) = (grads.open_in(0, dy.dtype())?, grads.open(1)?, grads.open(2)?);
        match dy.device() {
            Device::Cpu => match_float!(dy.dtype(), "dwconv", T => {
                let dy = Map::<T> { data: dy.as_slice("dwconv")?, stride };
                if let Some(out) = dx.out()? {
                    let kernel = Kernel { weight: self.weight.as_slice("dwconv")?, residual: self.residual };
                    cpu::backward_input(geometry, dy, kernel, MapMut { out, stride });
                }
                let x = Map { data: self.x.as_slice("dwconv")?, stride };
                cpu::backward_weight(geometry, dy, x, dweight.out()?, dbias.out()?);
            }),
            Device::Cuda(_) => {
                let [dy_map, x_map] = [cuda::Map::new(&dy, 0, stride)?, cuda::Map::new(&self.x, 0, stride)?];
                // SAFETY: it reads these tensors alone, and writes to the places that it is given.
                unsafe {
                    Slot::write_aside([&mut dweight, &mut dbias], &[&dy, &self.x], |outs| {
                        Ok(cuda::backward_weight(geometry, &dy_map, &x_map, outs)?)
                    })?;
                }
                if let Some(out) = dx.out_on_gpu()? {
                    let kernel = cuda::Kernel { weight: &self.weight, residual: self.residual };
                    cuda::backward_input(geometry, &dy_map, kernel, cuda::MapMut { out, stride })?;
                }
            }
        }
        [dx, dweight, dbias].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }

    /// Counts all positions of the kernel, including those that read padding.
    fn multiply_adds(&self, y: &Shape) -> MultiplyAdds {
        MultiplyAdds::product(y.count() * self.weight.shape()[1..].iter().product::<usize>())
    }
}

#[cfg(test)]
mod tests;
