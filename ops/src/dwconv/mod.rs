//! Depthwise convolution: one K×K kernel per channel, stride 1, zeros around the image.
//!
//! **Forward.** y[n, i, j, c] = b[c] + Σ_{a,b} x[n, i + a − P, j + b − P, c] · w[c, 0, a, b], with K odd and
//! P = (K − 1)/2, so that y has the shape of x (N, H, W, C); w is (C, 1, K, K), b (C) or none. Terms outside
//! the image are zero.
//!
//! **Backward.** x[n, i', j', c] meets w[c, 0, a, b] in y[n, i' − a + P, j' − b + P, c], hence
//! dx[n, i', j', c] = Σ_{a,b} dy[n, i' − a + P, j' − b + P, c] · w[c, 0, a, b]: the same correlation, of dy
//! with the kernel turned by half a turn (a → K − 1 − a). dw[c, 0, a, b] = Σ_{n,i,j} dy[n, i, j, c] ·
//! x[n, i + a − P, j + b − P, c] and db[c] = Σ_{n,i,j} dy[n, i, j, c]. Saved: x and w.
//!
//! Operands must be contiguous, f32 or f64. Errors: [`tensor::Error::Shape`],
//! [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source: `torch.nn.Conv2d` with
//! `groups = C, padding = K // 2`, whose weight layout this is. In BiFormer: the position encoding (K = 3)
//! and the local context enhancement of the values (K = 5).

pub mod cases;
pub(crate) mod cpu;
pub mod reference;
mod registers;

use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use cpu::{Extents, KERNELS, Map, MapMut};
use tensor::cpu::parallel::Out;
use tensor::{Error, Tensor, match_float};

pub(crate) const SUMMARY: &str = "each channel convolved with its own K×K kernel";

/// x (N, H, W, C) convolved channel by channel with `weight` (C, 1, K, K), K = 1, 3, 5 or 7, plus `bias` (C) if there
/// is one: (N, H, W, C).
pub fn dwconv<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>) -> Result<Var<'t>> {
    let extents = extents(x.value(), weight.value())?;
    let channels = extents.channels;
    if let Some(bias) = bias.filter(|bias| *bias.shape() != [channels]) {
        return Err(Error::shape("dwconv", format!("a bias of ({channels})"), bias.shape()).into());
    }
    let mut y = Tensor::empty(x.shape().clone(), x.dtype());
    match_float!(x.dtype(), "dwconv", T => cpu::forward::<T>(
        extents,
        Map { data: x.value().as_slice("dwconv")?, stride: channels },
        weight.value().as_slice("dwconv")?,
        bias.map(|bias| bias.value().as_slice("dwconv")).transpose()?,
        MapMut { out: Out::store(y.as_mut_slice("dwconv")?), stride: channels },
    ));
    let rule = || Dwconv { x: x.value().clone(), weight: weight.value().clone() };
    match bias {
        Some(bias) => x.tape().record("dwconv", &[x, weight, bias], y, rule),
        None => x.tape().record("dwconv", &[x, weight], y, rule),
    }
}

fn extents(x: &Tensor, weight: &Tensor) -> tensor::Result<Extents> {
    let [images, height, width, channels] = x.dims("dwconv", "x (N, H, W, C)")?;
    let [filters, group, kernel, across] = weight.dims("dwconv", "a weight (C, 1, K, K)")?;
    if [filters, group, kernel] != [channels, 1, across] || !KERNELS.contains(&kernel) {
        let expected = format!("a weight ({channels}, 1, K, K) with K one of {KERNELS:?}, as x is {}", x.shape());
        return Err(Error::shape("dwconv", expected, weight.shape()));
    }
    Ok(Extents { images, height, width, channels, kernel })
}

struct Dwconv {
    x: Tensor,
    weight: Tensor,
}

impl Rule for Dwconv {
    rule_fields!("dwconv", x, weight);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let extents = extents(&self.x, &self.weight)?;
        let stride = extents.channels;
        let (mut dx, mut dweight, mut dbias) = (grads.open(0)?, grads.open(1)?, grads.open(2)?);
        match_float!(dy.dtype(), "dwconv", T => {
            let dy = Map::<T> { data: dy.as_slice("dwconv")?, stride };
            if let Some(out) = dx.out()? {
                cpu::backward_input(extents, dy, self.weight.as_slice("dwconv")?, MapMut { out, stride });
            }
            if let Some(out) = dweight.out()? {
                cpu::backward_weight(extents, dy, Map { data: self.x.as_slice("dwconv")?, stride }, out);
            }
            if let Some(out) = dbias.out()? {
                cpu::backward_bias(extents, dy, out);
            }
        });
        [dx, dweight, dbias].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }
}
