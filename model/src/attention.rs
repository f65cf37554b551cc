//! The three ways in which a block attends.

use crate::config::{Attend, Family, ModelConfig};
use crate::error::{Error, Result};
use crate::layers::{DepthwiseConv, Linear};
use crate::pass::Pass;
use crate::regions::Regions;
use crate::state::Builder;
use autograd::Var;
use ops::Bra;

/// The attention of a block, from normalised tokens (N, H, W, C) to (N, H, W, C).
pub struct Attention {
    kind: Kind,
    qkv: Linear,
    lepe: Option<DepthwiseConv>,
    out: Linear,
    dim: usize,
}

enum Kind {
    /// Bi-level routing attention. The projection and the padding of the published variants differ in order.
    Routed { name: String, family: Family, n_win: usize, topk: usize, heads: usize, soft: bool, auto_pad: bool },
    /// Full attention; where the local context comes from, if there is one.
    Full { heads: usize, context: Context },
}

#[derive(PartialEq)]
enum Context {
    None,
    /// The normalised tokens themselves: what the published linear-layer models do, and were trained with.
    Input,
    /// The values.
    Values,
}

impl Attention {
    /// The attention of a stage's blocks, under `name` in the state_dict.
    pub fn new(builder: &mut Builder, name: &str, config: &ModelConfig, stage: usize) -> Self {
        let dim = config.embed_dim[stage];
        let nchw = config.family == Family::BiformerStlNchw;
        let project = if nchw { Linear::convolution } else { Linear::new };
        let lepe = |builder: &mut Builder| {
            (config.lce_kernel > 0)
                .then(|| DepthwiseConv::new(builder, &format!("{name}.lepe"), dim, config.lce_kernel))
        };
        match config.attend(stage) {
            Attend::Routed(topk) => {
                let (qkv, out) = if nchw { ("qkv_linear", "output_linear") } else { ("qkv.qkv", "wo") };
                let kind = Kind::Routed {
                    name: name.to_owned(),
                    family: config.family,
                    n_win: config.n_win.at(stage),
                    topk,
                    heads: dim / config.head_dim,
                    soft: config.soft_routing,
                    auto_pad: config.auto_pad,
                };
                Self {
                    kind,
                    lepe: lepe(builder),
                    qkv: project(builder, &format!("{name}.{qkv}"), dim, 3 * dim, true),
                    out: project(builder, &format!("{name}.{out}"), dim, dim, true),
                    dim,
                }
            }
            attend => {
                let context = match attend {
                    Attend::Full => Context::None,
                    _ if nchw => Context::Values,
                    _ => Context::Input,
                };
                let lepe = if context == Context::None { None } else { lepe(builder) };
                Self {
                    kind: Kind::Full { heads: config.full_attention_heads, context },
                    lepe,
                    qkv: project(builder, &format!("{name}.qkv"), dim, 3 * dim, false),
                    out: project(builder, &format!("{name}.proj"), dim, dim, true),
                    dim,
                }
            }
        }
    }

    /// Its linear layers.
    pub(crate) fn linears(&self) -> [&Linear; 2] {
        [&self.qkv, &self.out]
    }

    /// Attends, and adds a residual (N, H, W, C), if there is one.
    pub fn forward<'t>(&self, pass: &Pass<'t, '_>, x: &Var<'t>, residual: Option<&Var<'t>>) -> Result<Var<'t>> {
        let mixed = match &self.kind {
            Kind::Routed { .. } => self.routed(pass, x)?,
            Kind::Full { heads, context } => {
                let qkv = self.qkv.forward(pass, x)?;
                let scale = ((self.dim / heads) as f64).powf(-0.5);
                let mixed = ops::attention(&qkv, *heads, scale)?;
                match (&self.lepe, context) {
                    (Some(lepe), Context::Input) => ops::add(&mixed, &lepe.forward(pass, x)?)?,
                    (Some(lepe), Context::Values) => {
                        let values = ops::contiguous(&ops::slice(&qkv, 3, 2 * self.dim..3 * self.dim)?)?;
                        ops::add(&mixed, &lepe.forward(pass, &values)?)?
                    }
                    _ => mixed,
                }
            }
        };
        self.out.plus(pass, &mixed, residual)
    }

    fn routed<'t>(&self, pass: &Pass<'t, '_>, x: &Var<'t>) -> Result<Var<'t>> {
        let Kind::Routed { name, family, n_win, topk, heads, soft, auto_pad } = &self.kind else {
            return Ok(x.clone());
        };
        let [_, height, width, _] = x.value().dims("attention", "(N, H, W, C)")?;
        let map = [height, width];
        let Some(regions) = Regions::of(map, *n_win, *family) else {
            let reason = format!("a map of {height}x{width} tokens cannot be cut into {n_win}x{n_win} regions");
            return Err(Error::ImageSize {
                height,
                width,
                reason,
                advice: "use larger images or a smaller n_win".into(),
            });
        };
        let (grid, padded) = (regions.grid, regions.padded());
        let pad_after_projection = *family == Family::BiformerStlNchw;
        if padded != map && !(*auto_pad || pad_after_projection) {
            let reason = format!("{name} meets a map of {height}x{width} tokens, not a multiple of n_win {n_win}");
            return Err(Error::ImageSize { height, width, reason, advice: "set auto_pad = true".into() });
        }
        let qkv = if pad_after_projection {
            pad(&self.qkv.forward(pass, x)?, map, padded)?
        } else {
            self.qkv.forward(pass, &pad(x, map, padded)?)?
        };
        let attributes = Bra {
            heads: *heads,
            qk_dim: self.dim,
            topk: *topk,
            grid,
            scale: (self.dim as f64).powf(-0.5),
            valid: pad_after_projection.then_some(map),
        };
        let lepe = self.lepe.as_ref().map(|lepe| lepe.parameters(pass));
        let lepe = lepe.as_ref().map(|[weight, bias]| [weight, bias]);
        let routed = if *soft {
            ops::bra_composed(&qkv, lepe, &attributes, ops::RouteKind::Soft)?
        } else {
            ops::bra(&qkv, lepe, &attributes)?
        };
        pass.record_routes(name, routed.routes);
        crop(&routed.out, padded, map)
    }
}

/// Zeros at the bottom and right, from one map size to another.
fn pad<'t>(x: &Var<'t>, from: [usize; 2], to: [usize; 2]) -> Result<Var<'t>> {
    if from == to {
        return Ok(x.clone());
    }
    Ok(ops::pad(x, [to[0] - from[0], to[1] - from[1]])?)
}

/// The upper left part of a map.
fn crop<'t>(x: &Var<'t>, from: [usize; 2], to: [usize; 2]) -> Result<Var<'t>> {
    if from == to {
        return Ok(x.clone());
    }
    Ok(ops::contiguous(&ops::slice(&ops::slice(x, 1, 0..to[0])?, 2, 0..to[1])?)?)
}
