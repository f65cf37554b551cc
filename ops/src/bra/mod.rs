//! Bi-level routing attention (BRA): each region of the map attends, token by token, to the k regions that
//! match it best, and to nothing else.
//!
//! **Forward.** From a map of queries, keys and values qkv (N, H, W, 2D + C), cut into P = G_h·G_w regions:
//! 1. *Routing.* q̂, k̂ (P, D) are the means of each region's queries and keys; region p is routed to the k
//!    regions r with the largest s·q̂ₚ·k̂ᵣ (ties to the lower index). All heads share the routes.
//! 2. *Attention.* For each head and each query q in region p: o = Σⱼ softmaxⱼ(s·q·kⱼ) vⱼ, where j runs over
//!    all tokens of the k regions of p. The scale s is D^(−1/2) in the published model, not the head's.
//! 3. *Local context (LCE, "lepe").* out = o + dwconv(v): a depthwise convolution of the values, written
//!    where the attention wrote. Optional.
//!
//! **Backward.** Routing is a choice among regions and has no gradient: routes are chosen off the tape, as published.
//! For the rest, with A = softmax(S), S = s·q·kᵀ and dO the gradient of o: dV = Aᵀ·dO, dA = dO·vᵀ, dS = A∘(dA − Σⱼ
//! A∘dA), dQ = s·dS·k, dK = s·dSᵀ·q; a key collects dK and dV from every region that was routed to it. dV also receives
//! the convolution's input gradient. Saved: qkv, the routes, the convolution's weight, and per query and head the
//! log-sum-exp of the scores, from which A is recomputed; on a GPU sometimes o as well.
//!
//! [`bra`] is what training runs: it never gathers k copies of the keys and values, but lays them out once per head, or
//! once per share of a large head (`cpu/`); on a GPU it reads them in place. [`composed`] spells out the same function
//! in small operations: it is the form to learn from, and the one that `bra` is tested against.
//!
//! Operands must be contiguous; f32 or f64, and on a GPU also qkv in bf16 with the convolution's parameters in f32. In
//! f32, large scores s·q·kⱼ cost gradients precision, as they are rounded themselves. Their rounded log-sum-exp would
//! cost more: a CPU divides what dS has of A by its rows' sums, so that gradients are as exact as those of [`composed`]
//! (within 7·10⁻⁶ of the largest at scores of 400, 4·10⁻⁴ at 26,000). A GPU does not divide, and above 9,000 loses up
//! to 0.5 %. Beyond 10⁹ rounding errors alone can overflow the exponential. An affinity that is NaN counts as the
//! lowest, as in [`top_k`](mod@crate::top_k): a region with a NaN among its keys is chosen only by regions that have
//! fewer than k others to choose from. Infinite keys make infinite affinities, of which the positive are the highest.
//! Errors: [`tensor::Error::Argument`] when heads, grid or k do not fit, and for a map without tokens,
//! [`tensor::Error::Shape`], [`tensor::Error::DType`], [`tensor::Error::NotContiguous`]. Source: Zhu et al., "BiFormer:
//! vision transformer with bi-level routing attention", CVPR 2023, algorithm 1.

pub mod cases;
pub mod composed;
mod cpu;
mod cuda;
pub(crate) mod geometry;
pub mod reference;
mod routing;
mod weights;

use crate::Regions;
use crate::dwconv;
use crate::dwconv::cpu::{Kernel, Map, MapMut};
use autograd::{InputGrads, MultiplyAdds, Result, Rule, Slot, Var};
use geometry::{Geometry, ensure_scale};
use tensor::cpu::parallel::Out;
use tensor::cuda::Module;
use tensor::{Device, Error, Shape, Tensor, match_float};

pub use composed::{RouteKind, bra_composed};
pub use routing::{Routing, route};
pub use weights::bra_weights;

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "bi-level routing attention with local context, fused";

/// The attributes of a bi-level routing attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bra {
    /// Attention heads; they divide D and C.
    pub heads: usize,
    /// D, the channels of the queries, and of the keys.
    pub qk_dim: usize,
    /// k, how many regions each region attends to.
    pub topk: usize,
    /// Regions along H and W; they divide H and W.
    pub grid: [usize; 2],
    /// s, the factor on the scores.
    pub scale: f64,
    /// The height and width of the part of the map, from its upper left corner, over which the regions' means are
    /// taken; `None` for the whole map. For maps that were padded with zeros after the projection.
    pub valid: Option<[usize; 2]>,
}

impl Bra {
    pub(crate) fn geometry(&self, qkv: &Tensor) -> tensor::Result<Geometry> {
        let [images, height, width, channels] = qkv.dims("bra", "qkv (N, H, W, 2D + C)")?;
        let Bra { heads, qk_dim, topk, grid, scale, .. } = *self;
        ensure_scale("bra", scale)?;
        let Some(v_dim) = qk_dim.checked_mul(2).and_then(|both| channels.checked_sub(both)) else {
            let expected = format!("qkv with {qk_dim} channels of queries, {qk_dim} of keys, and the rest for values");
            return Err(Error::shape("bra", expected, qkv.shape()));
        };
        let regions = Regions::cut("bra", [height, width], grid)?;
        let g = Geometry { images, regions, heads, qk_dim, v_dim, topk }.check("bra")?;
        if g.tokens() == 0 {
            return Err(Error::argument("bra", "a map without tokens has no regions to choose from"));
        }
        Ok(g)
    }
}

/// The result of an attention, and the routes that it took.
#[derive(Debug)]
pub struct Routed<'t> {
    /// (N, H, W, C)
    pub out: Var<'t>,
    /// (N, P, k): for each region the regions that it attended to, best first.
    pub routes: Tensor,
}

/// Bi-level routing attention of qkv (N, H, W, 2D + C), plus a depthwise convolution of the values if
/// `lepe` gives its weight (C, 1, K, K), with K = 3, 5 or 7, and bias (C).
/// Operands and errors: those of the [module](mod@crate::bra).
pub fn bra<'t>(qkv: &Var<'t>, lepe: Option<[&Var<'t>; 2]>, attributes: &Bra) -> Result<Routed<'t>> {
    let g = attributes.geometry(qkv.value())?;
    let routes = route(qkv.value(), attributes)?.routes;
    let extents = [g.images, g.regions.count(), g.regions.count(), g.qk_dim];
    let routing = extents.into_iter().fold(1, |product: u64, extent| product.saturating_mul(extent as u64));
    let out = attend("bra", g, qkv, lepe, &routes, attributes.scale, routing)?;
    Ok(Routed { out, routes })
}

/// The same for routes (N, P, k) that are already chosen, which took `routing` multiply-adds.
pub(crate) fn attend<'t>(
    op: &'static str,
    g: Geometry,
    qkv: &Var<'t>,
    lepe: Option<[&Var<'t>; 2]>,
    routes: &Tensor,
    scale: f64,
    routing: u64,
) -> Result<Var<'t>> {
    let map = g.shape(g.v_dim);
    let context = lepe.map(|[weight, bias]| dwconv::geometry(op, map, weight.value(), Some(bias.value())));
    let context = context.transpose()?;
    let device = qkv.value().device();
    let mut out = Tensor::empty_on(&device, map, qkv.dtype())?;
    let mut lse = Tensor::empty_on(&device, [g.images, g.heads, g.tokens()], qkv.dtype().of_sums())?;
    let inputs: Vec<&Var<'t>> = [qkv].into_iter().chain(lepe.into_iter().flatten()).collect();
    let mut attended = None;
    match device {
        Device::Cpu => match_float!(qkv.dtype(), op, T => {
            let qkv = qkv.value().as_slice::<T>(op)?;
            let out = out.as_mut_slice::<T>(op)?;
            cpu::forward(g, qkv, routes.as_slice(op)?, scale as T, out, lse.as_mut_slice(op)?);
            if let (Some(context), Some([weight, bias])) = (context, lepe) {
                let bias = bias.value().as_slice(op)?;
                let out = MapMut { out: Out { data: out, accumulate: true }, stride: g.v_dim };
                let kernel = Kernel { weight: weight.value().as_slice(op)?, residual: false };
                dwconv::cpu::forward(context, values(g, qkv), kernel, Some(bias), out);
            }
        }),
        Device::Cuda(_) => {
            let wanted = inputs.iter().any(|input| input.node().is_some());
            attended = cuda::forward(g, [qkv.value(), routes], scale, [&mut out, &mut lse], wanted)?;
            if let (Some(context), Some([weight, bias])) = (context, lepe) {
                cuda::add_context(g, context, qkv.value(), [weight.value(), bias.value()], &mut out)?;
            }
        }
    }
    let rule = || BraRule {
        op,
        qkv: qkv.value().clone(),
        routes: routes.clone(),
        lse,
        attended,
        lepe: lepe.as_ref().map(|[weight, _]| weight.value().clone()),
        geometry: g,
        scale,
        routing,
    };
    qkv.tape().record(op, &inputs, out, rule)
}

/// A view of the values within qkv.
fn values<T>(g: Geometry, qkv: &[T]) -> Map<'_, T> {
    Map { data: &qkv[(2 * g.qk_dim).min(qkv.len())..], stride: g.row() }
}

struct BraRule {
    op: &'static str,
    qkv: Tensor,
    routes: Tensor,
    lse: Tensor,
    /// out before the local context was added, if a GPU's kernels need it.
    attended: Option<Tensor>,
    /// The weight of the local context's convolution.
    lepe: Option<Tensor>,
    geometry: Geometry,
    scale: f64,
    /// The multiply-adds that choosing the routes took.
    routing: u64,
}

impl Rule for BraRule {
    fn name(&self) -> &'static str {
        self.op
    }

    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let always = [("qkv", &self.qkv), ("routes", &self.routes), ("lse", &self.lse)];
        let sometimes = [("attended", &self.attended), ("lepe", &self.lepe)];
        let sometimes = sometimes.into_iter().filter_map(|(name, tensor)| Some((name, tensor.as_ref()?)));
        always.into_iter().chain(sometimes).collect()
    }

    fn saved_mut(&mut self) -> Vec<&mut Tensor> {
        let always = [&mut self.qkv, &mut self.routes, &mut self.lse];
        always.into_iter().chain(self.attended.as_mut()).chain(self.lepe.as_mut()).collect()
    }

    fn backward(self: Box<Self>, dout: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let BraRule { op, qkv, routes, lse, attended, lepe, geometry: g, scale, .. } = *self;
        let (mut dqkv, mut dweight, mut dbias) = (grads.open_in(0, dout.dtype())?, grads.open(1)?, grads.open(2)?);
        match dout.device() {
            Device::Cuda(_) => {
                let attended = attended.as_ref();
                let given = cuda::Given { qkv: &qkv, routes: &routes, scale, lse: &lse, attended, dout: &dout };
                if let Some(out) = dqkv.out_on_gpu()? {
                    cuda::backward(g, &given, &out)?;
                }
                if let Some(weight) = &lepe {
                    let context = dwconv::geometry(op, g.shape(g.v_dim), weight, None)?;
                    // SAFETY: it reads these tensors alone, and writes to the places that it is given.
                    unsafe {
                        Slot::write_aside([&mut dweight, &mut dbias], &[&qkv, &dout], |outs| {
                            Ok(cuda::backward_context_weight(g, context, &given, outs)?)
                        })?;
                    }
                    if let Some(out) = dqkv.out_on_gpu()? {
                        cuda::add_context_backward(g, context, &given, weight, out)?;
                    }
                }
            }
            Device::Cpu => match_float!(dout.dtype(), op, T => {
                let (qkv, dout) = (qkv.as_slice::<T>(op)?, dout.as_slice::<T>(op)?);
                if let Some(out) = dqkv.out()? {
                    cpu::backward(g, qkv, routes.as_slice(op)?, scale as T, lse.as_slice(op)?, dout, out);
                }
                if let Some(weight) = &lepe {
                    let context = dwconv::geometry(op, g.shape(g.v_dim), weight, None)?;
                    let upstream = Map { data: dout, stride: g.v_dim };
                    if let Some(out) = dqkv.out::<T>()? {
                        // The attention has written the values' gradient; the convolution adds to it.
                        let start = (2 * g.qk_dim).min(out.data.len());
                        let out = Out { data: &mut out.data[start..], accumulate: true };
                        let kernel = Kernel { weight: weight.as_slice(op)?, residual: false };
                        dwconv::cpu::backward_input(context, upstream, kernel, MapMut { out, stride: g.row() });
                    }
                    dwconv::cpu::backward_weight(context, upstream, values(g, qkv), dweight.out()?, dbias.out()?);
                }
            }),
        }
        [dqkv, dweight, dbias].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }

    /// Counts routing, attention and local context.
    fn multiply_adds(&self, out: &Shape) -> MultiplyAdds {
        let g = self.geometry;
        let taps = self.lepe.as_ref().map_or(0, |weight| weight.shape()[1..].iter().product());
        let (attention, context) = (g.multiply_adds(), (out.count() * taps) as u64);
        MultiplyAdds { value: self.routing + attention + context, gradients: [2 * attention + context, context] }
    }
}
