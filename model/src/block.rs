//! A block: positional convolution, attention and MLP, each with a residual connection.

use crate::attention::Attention;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::layers::{DepthwiseConv, LayerNorm, Linear};
use crate::mlp::Mlp;
use crate::pass::Pass;
use crate::state::{Builder, Init};
use autograd::{ParamId, Var};

/// x ← x + dwconv(x); x ← x + γ₁·attention(norm(x)); x ← x + γ₂·mlp(norm(x)), on maps (N, H, W, C).
#[derive(Debug)]
pub struct Block {
    position: Option<DepthwiseConv>,
    norm1: LayerNorm,
    attention: Attention,
    /// With the normalisation before it, `norm2`: a GPU computes both as one.
    mlp: Mlp,
    gamma: Option<[ParamId; 2]>,
    drop_path: f64,
    parameters: Vec<ParamId>,
}

impl Block {
    /// A block of a stage, under `name` in the state_dict. Panics as [`Attention::new`] does, and unless `drop_path` is
    /// in [0, 1).
    pub fn new(builder: &mut Builder, name: &str, config: &ModelConfig, stage: usize, drop_path: f64) -> Self {
        config.assert_stage(stage);
        assert!((0.0..1.0).contains(&drop_path), "drop_path is {drop_path}, expected a number in [0, 1)");
        let dim = config.embed_dim[stage];
        let gamma = |builder: &mut Builder, index: usize| {
            builder.parameter(format!("{name}.gamma{index}"), [dim], Init::Constant(config.layer_scale))
        };
        let before = builder.ids.len();
        let mut block = Self {
            position: (config.pos_kernel > 0)
                .then(|| DepthwiseConv::new(builder, &format!("{name}.pos_embed"), dim, config.pos_kernel)),
            norm1: LayerNorm::new(builder, &format!("{name}.norm1"), dim),
            attention: Attention::new(builder, &format!("{name}.attn"), config, stage),
            mlp: Mlp::new(builder, name, config, stage),
            gamma: (config.layer_scale > 0.0).then(|| [gamma(builder, 1), gamma(builder, 2)]),
            drop_path,
            parameters: vec![],
        };
        block.parameters = builder.ids[before..].to_vec();
        block
    }

    /// Its linear layers.
    pub(crate) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.attention.linears().into_iter().chain(self.mlp.linears())
    }

    /// The block's map (N, H, W, C) of a map x (N, H, W, C). The input and the normalised tokens are dropped as soon as
    /// they have been used, so that inference on large images needs less memory. Errors: those of
    /// [`Attention::forward`] and of the operations.
    pub fn forward<'t>(&self, pass: &Pass<'t>, mut x: Var<'t>) -> Result<Var<'t>> {
        if let Some(position) = &self.position {
            x = position.residual(pass, &x)?;
        }
        x = self.residual(pass, &x, 0, |x, residual| {
            self.attention.forward(pass, self.norm1.forward(pass, x)?, residual.then_some(x))
        })?;
        self.residual(pass, &x, 1, |x, residual| self.mlp.forward(pass, x, residual))
    }

    /// x + γ·branch(x), where in training samples may skip the branch at random, unless all of the block is frozen.
    /// With neither γ nor skipping, the branch is asked to add x itself.
    fn residual<'t>(
        &self,
        pass: &Pass<'t>,
        x: &Var<'t>,
        index: usize,
        branch: impl Fn(&Var<'t>, bool) -> Result<Var<'t>>,
    ) -> Result<Var<'t>> {
        let stream = if self.drop_path == 0.0 {
            None
        } else if self.parameters.iter().all(|&id| pass.is_frozen(id)) {
            // What is frozen must not decide which images skip other blocks' branches.
            pass.skip_stream();
            None
        } else {
            pass.stream()
        };
        if self.gamma.is_none() && stream.is_none() {
            return branch(x, true);
        }
        let branch = |x: &_| match &self.gamma {
            Some(gamma) => Ok(ops::mul(&branch(x, false)?, &pass.parameter(gamma[index]))?),
            None => branch(x, false),
        };
        match stream {
            Some(stream) => ops::drop_path_residual(x, self.drop_path, stream, pass.first_image(), branch),
            None => Ok(ops::add(x, &branch(x)?)?),
        }
    }
}
