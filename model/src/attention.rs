//! How a block attends: to routed regions, or to all tokens, with local context or without.

use crate::config::{Attend, Family, ModelConfig};
use crate::error::{Error, Result};
use crate::layers::{DepthwiseConv, Linear};
use crate::pass::Pass;
use crate::regions;
use crate::state::Builder;
use crate::trace::Routes;
use autograd::Var;
use ops::{Bra, RouteKind};
use tensor::{DType, Tensor};

/// The attention of a block, from normalised tokens (N, H, W, C) to (N, H, W, C).
#[derive(Debug)]
pub struct Attention {
    qkv: Linear,
    core: Core,
    out: Linear,
}

/// What happens between the projections.
#[derive(Debug)]
enum Core {
    Routed(RoutedAttention),
    Full(FullAttention),
}

/// Bi-level routing attention. The projection and the padding of the published variants differ in order.
#[derive(Debug)]
struct RoutedAttention {
    name: String,
    family: Family,
    dim: usize,
    n_win: usize,
    topk: usize,
    heads: usize,
    soft: bool,
    auto_pad: bool,
    lepe: Option<DepthwiseConv>,
}

/// Attention of every token to every other.
#[derive(Debug)]
struct FullAttention {
    name: String,
    dim: usize,
    heads: usize,
    context: Option<Context>,
}

/// The local context of full attention.
#[derive(Debug)]
enum Context {
    /// Of the normalised tokens themselves: what the published linear-layer models do, and were trained with.
    Input(DepthwiseConv),
    /// Of the values.
    Values(DepthwiseConv),
}

impl Attention {
    /// The attention of a stage's blocks, under `name` in the state_dict. Panics unless the configuration has such a
    /// stage, and that stage is valid ([`ModelConfig::check`]).
    pub fn new(builder: &mut Builder, name: &str, config: &ModelConfig, stage: usize) -> Self {
        config.assert_stage(stage);
        let dim = config.embed_dim[stage];
        let nchw = config.family == Family::BiformerStlNchw;
        let project = if nchw { Linear::convolution } else { Linear::new };
        let lepe = |builder: &mut Builder| {
            (config.lce_kernel > 0)
                .then(|| DepthwiseConv::new(builder, &format!("{name}.lepe"), dim, config.lce_kernel))
        };
        let (core, [qkv, out], biased) = match config.attend(stage) {
            Attend::Routed(topk) => {
                let routed = RoutedAttention {
                    name: name.to_owned(),
                    family: config.family,
                    dim,
                    n_win: config.n_win.at(stage),
                    topk,
                    heads: dim / config.head_dim,
                    soft: config.soft_routing,
                    auto_pad: config.auto_pad,
                    lepe: lepe(builder),
                };
                let names = if nchw { ["qkv_linear", "output_linear"] } else { ["qkv.qkv", "wo"] };
                (Core::Routed(routed), names, true)
            }
            attend => {
                let lepe = if attend == Attend::Full { None } else { lepe(builder) };
                let context = lepe.map(if nchw { Context::Values } else { Context::Input });
                let heads = config.full_attention_heads;
                let full = FullAttention { name: name.to_owned(), dim, heads, context };
                (Core::Full(full), ["qkv", "proj"], false)
            }
        };
        Self {
            core,
            qkv: project(builder, &format!("{name}.{qkv}"), dim, 3 * dim, biased),
            out: project(builder, &format!("{name}.{out}"), dim, dim, true),
        }
    }

    /// Its linear layers.
    pub(crate) fn linears(&self) -> [&Linear; 2] {
        [&self.qkv, &self.out]
    }

    /// Attends within x (N, H, W, C), and adds a residual (N, H, W, C), if there is one. Errors: [`Error::Config`]
    /// where routed attention cannot cut the map into regions, and those of the operations.
    pub fn forward<'t>(&self, pass: &Pass<'t>, x: Var<'t>, residual: Option<&Var<'t>>) -> Result<Var<'t>> {
        let mixed = match &self.core {
            Core::Routed(routed) => routed.forward(pass, &self.qkv, x)?,
            Core::Full(full) => full.forward(pass, &self.qkv, x)?,
        };
        self.out.plus(pass, &mixed, residual)
    }
}

impl FullAttention {
    fn forward<'t>(&self, pass: &Pass<'t>, qkv: &Linear, x: Var<'t>) -> Result<Var<'t>> {
        let qkv = qkv.forward(pass, &x)?;
        let scale = libm::pow((self.dim / self.heads) as f64, -0.5);
        let mixed = ops::attention(&qkv, self.heads, scale)?;
        let [_, height, width, _] = x.value().dims("attention", "(N, H, W, C)")?;
        pass.record_attention_weights(&self.name, [height, width], |token| {
            let whole = Bra { heads: self.heads, qk_dim: self.dim, topk: 1, grid: [1, 1], scale, valid: None };
            let routes = Tensor::zeros([x.shape()[0], 1, 1], DType::Index);
            ops::bra_weights(qkv.value(), &routes, RouteKind::Hard, &whole, token)
        })?;
        Ok(match &self.context {
            None => mixed,
            Some(Context::Input(lepe)) => ops::add(&mixed, &lepe.forward(pass, &x)?)?,
            Some(Context::Values(lepe)) => {
                let values = ops::contiguous(&ops::slice(&qkv, 3, 2 * self.dim..3 * self.dim)?)?;
                ops::add(&mixed, &lepe.forward(pass, &values)?)?
            }
        })
    }
}

impl RoutedAttention {
    fn forward<'t>(&self, pass: &Pass<'t>, qkv: &Linear, x: Var<'t>) -> Result<Var<'t>> {
        let [_, height, width, _] = x.value().dims("attention", "(N, H, W, C)")?;
        let (map, n_win) = ([height, width], self.n_win);
        let unfit = |why, advice| {
            let message = format!("a map of {height}x{width} tokens {why} {n_win}x{n_win} regions; {advice}");
            Error::Config { field: "n_win", message }
        };
        let Some(regions) = regions::padded(map, n_win, self.family) else {
            return Err(unfit("is too small for", "use larger images or a smaller n_win"));
        };
        let (grid, padded) = (regions.grid(), regions.map());
        let pad_after_projection = self.family == Family::BiformerStlNchw;
        if padded != map && !(self.auto_pad || pad_after_projection) {
            return Err(unfit("does not divide into", "set auto_pad = true"));
        }
        let qkv = if pad_after_projection {
            pad(qkv.forward(pass, &x)?, map, padded)?
        } else {
            qkv.forward(pass, &pad(x, map, padded)?)?
        };
        let attributes = Bra {
            heads: self.heads,
            qk_dim: self.dim,
            topk: self.topk,
            grid,
            scale: libm::pow(self.dim as f64, -0.5),
            valid: pad_after_projection.then_some(map),
        };
        let lepe = self.lepe.as_ref().map(|lepe| lepe.parameters(pass));
        let lepe = lepe.as_ref().map(|[weight, bias]| [weight, bias]);
        let (routed, kind) = match self.soft {
            true => (ops::bra_composed(&qkv, lepe, &attributes, RouteKind::Soft)?, RouteKind::Soft),
            false => (ops::bra(&qkv, lepe, &attributes)?, RouteKind::Hard),
        };
        pass.record_attention_weights(&self.name, map, |token| {
            ops::bra_weights(qkv.value(), &routed.routes, kind, &attributes, token)
        })?;
        pass.record_routes(Routes { name: self.name.clone(), indices: routed.routes, regions, map });
        crop(routed.out, padded, map)
    }
}

/// Zeros at the bottom and right, from one map size to another.
fn pad<'t>(x: Var<'t>, from: [usize; 2], to: [usize; 2]) -> Result<Var<'t>> {
    if from == to {
        return Ok(x);
    }
    Ok(ops::pad(&x, [to[0] - from[0], to[1] - from[1]])?)
}

/// The upper left part of a map.
fn crop<'t>(x: Var<'t>, from: [usize; 2], to: [usize; 2]) -> Result<Var<'t>> {
    if from == to {
        return Ok(x);
    }
    Ok(ops::contiguous(&ops::slice(&ops::slice(&x, 1, 0..to[0])?, 2, 0..to[1])?)?)
}
