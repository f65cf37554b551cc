//! The second half of a block.

use crate::config::{Family, ModelConfig};
use crate::error::Result;
use crate::layers::{LayerNorm, Linear};
use crate::pass::Pass;
use crate::state::Builder;
use autograd::Var;
use ops::MlpLayers;

/// Two linear layers with GELU between them, after a normalisation; (N, H, W, C) to (N, H, W, C).
#[derive(Debug)]
pub struct Mlp {
    norm: LayerNorm,
    layers: [Linear; 2],
}

impl Mlp {
    /// The MLP of a block in a stage; `name` is the block's name in the state_dict. Panics unless the configuration has
    /// such a stage, and that stage is valid ([`ModelConfig::check`]).
    pub fn new(builder: &mut Builder, name: &str, config: &ModelConfig, stage: usize) -> Self {
        config.assert_stage(stage);
        let (dim, hidden) = (config.embed_dim[stage], config.hidden(stage));
        // In the published code, the indices of one family's MLP layers count an identity module, which the others
        // leave out.
        let second = if config.family == Family::Biformer { 3 } else { 2 };
        let project = if config.family == Family::BiformerStlNchw { Linear::convolution } else { Linear::new };
        let norm = LayerNorm::new(builder, &format!("{name}.norm2"), dim);
        let first = project(builder, &format!("{name}.mlp.0"), dim, hidden, true);
        Self { norm, layers: [first, project(builder, &format!("{name}.mlp.{second}"), hidden, dim, true)] }
    }

    /// Its linear layers.
    pub(crate) fn linears(&self) -> [&Linear; 2] {
        [&self.layers[0], &self.layers[1]]
    }

    /// The MLP of a map (N, H, W, C), plus the map itself if `residual` is set. Errors: those of [`ops::mlp()`].
    pub fn forward<'t>(&self, pass: &Pass<'t>, x: &Var<'t>, residual: bool) -> Result<Var<'t>> {
        let norm = self.norm.parameters(pass);
        let [(w1, b1), (w2, b2)] = [self.layers[0].parameters(pass)?, self.layers[1].parameters(pass)?];
        let layers = MlpLayers { norm: [&norm[0], &norm[1]], first: (&w1, b1.as_ref()), second: (&w2, b2.as_ref()) };
        Ok(ops::mlp(x, layers, ops::Mlp { epsilon: LayerNorm::EPSILON, residual })?)
    }
}
