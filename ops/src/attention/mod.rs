//! Full multi-head self-attention over all tokens of a map.
//!
//! **Forward.** From qkv (N, H, W, 3C), for each image, head and query q: o = Σⱼ softmaxⱼ(s·q·kⱼ) vⱼ over all
//! tokens j. Heads are consecutive groups of channels; out (N, H, W, C).
//!
//! **Backward.** With A = softmax(s·q·kᵀ) and dO the gradient of o: dV = Aᵀ·dO, dA = dO·vᵀ, dS = A∘(dA − Σⱼ A∘dA), dQ =
//! s·dS·k, dK = s·dSᵀ·q. Saved: qkv and the log-sum-exp of each query's scores; A is recomputed.
//!
//! It is bi-level routing attention with the whole map as the one region, routed to itself, and runs its
//! kernels ([`bra`](mod@crate::bra), which also says how large scores may be). Operands must be contiguous; f32 or f64, and bf16 on a GPU. Errors:
//! [`tensor::Error::Argument`], [`tensor::Error::Shape`], [`tensor::Error::DType`],
//! [`tensor::Error::NotContiguous`]. Source: Vaswani
//! et al., "Attention is all you need", 2017; here stage 4 of BiFormer, with s = (C/heads)^(−1/2).

pub mod cases;
pub mod reference;

use crate::Regions;
use crate::bra::geometry::{Geometry, ensure_scale};
use crate::bra::{cpu, cuda};
use crate::give::give;
use autograd::{InputGrads, MultiplyAdds, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{DType, Device, Error, Shape, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "multi-head self-attention over all tokens";

/// Multi-head self-attention of qkv (N, H, W, 3C) with scores scaled by `scale`: (N, H, W, C).
pub fn attention<'t>(qkv: &Var<'t>, heads: usize, scale: f64) -> Result<Var<'t>> {
    let [images, height, width, channels] = qkv.value().dims("attention", "qkv (N, H, W, 3C)")?;
    if !channels.is_multiple_of(3) {
        return Err(Error::shape("attention", "qkv (N, H, W, 3C)", qkv.shape()).into());
    }
    let (qk_dim, v_dim) = (channels / 3, channels / 3);
    let regions = Regions::cut("attention", [height, width], [1, 1])?;
    let g = Geometry { images, regions, heads, qk_dim, v_dim, topk: 1 };
    let g = g.check("attention")?;
    ensure_scale("attention", scale)?;
    let device = qkv.value().device();
    let mut out = Tensor::empty_on(&device, [images, height, width, v_dim], qkv.dtype())?;
    let mut lse = Tensor::empty_on(&device, [images, heads, g.tokens()], qkv.dtype().of_sums())?;
    let routes = to_itself(g, &device)?;
    match device {
        Device::Cpu => match_float!(qkv.dtype(), "attention", T => {
            let qkv = qkv.value().as_slice::<T>("attention")?;
            let (out, lse) = (out.as_mut_slice("attention")?, lse.as_mut_slice("attention")?);
            cpu::forward::<T>(g, qkv, routes.as_slice("attention")?, scale as T, out, lse);
        }),
        Device::Cuda(_) => _ = cuda::forward(g, [qkv.value(), &routes], scale, [&mut out, &mut lse], false)?,
    }
    let rule = || Attention { qkv: qkv.value().clone(), lse, geometry: g, scale };
    qkv.tape().record("attention", &[qkv], out, rule)
}

/// The routes of the one region of each image, (N, 1, 1).
fn to_itself(g: Geometry, device: &Device) -> tensor::Result<Tensor> {
    Tensor::zeros_on(device, [g.images, 1, 1], DType::Index)
}

struct Attention {
    qkv: Tensor,
    lse: Tensor,
    geometry: Geometry,
    scale: f64,
}

impl Rule for Attention {
    rule_fields!("attention", qkv, lse);

    fn backward(self: Box<Self>, dout: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let Self { qkv, lse, geometry, scale } = *self;
        let routes = to_itself(geometry, &dout.device())?;
        give!(grads, 0, dout, "attention", out => {
            Cpu<T>: {
                let (qkv, lse) = (qkv.as_slice("attention")?, lse.as_slice("attention")?);
                let (routes, dout) = (routes.as_slice("attention")?, dout.as_slice("attention")?);
                cpu::backward::<T>(geometry, qkv, routes, scale as T, lse, dout, out);
            },
            Cuda: {
                let given = cuda::Given { qkv: &qkv, routes: &routes, scale, lse: &lse, attended: None, dout: &dout };
                cuda::backward(geometry, &given, &out)?;
            },
        });
        Ok(())
    }

    fn multiply_adds(&self, _out: &Shape) -> MultiplyAdds {
        let value = self.geometry.multiply_adds();
        MultiplyAdds { value, gradients: [2 * value, 0] }
    }
}
