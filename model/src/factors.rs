//! What products take of a model's parameters.

use crate::error::Result;
use crate::state::StatisticsId;
use autograd::{Layout, ParamId, Parameters, Tape, Var};
use std::collections::HashMap;
use std::sync::Arc;
use tensor::Tensor;

/// The parameters as products take them: rounded to the type in which they multiply. Cloning shares them.
pub struct Factors {
    rounded: Parameters,
    prepared: Arc<Prepared>,
}

/// What was made of parameters that will not change: see [`BiFormer::prepared`](crate::BiFormer::prepared).
#[derive(Default)]
pub(crate) struct Prepared {
    /// In place of these parameters.
    pub tensors: HashMap<ParamId, Tensor>,
    /// The normalisations that the convolutions before them contain.
    pub folded: Vec<StatisticsId>,
}

impl Clone for Factors {
    fn clone(&self) -> Self {
        Self { rounded: self.rounded.share(), prepared: Arc::clone(&self.prepared) }
    }
}

impl Factors {
    /// The parameters, rounded already.
    pub fn new(rounded: Parameters) -> Self {
        Self { rounded, prepared: Arc::default() }
    }

    /// The same parameters, some of which others take the place of.
    pub(crate) fn with(self, prepared: Prepared) -> Self {
        Self { prepared: Arc::new(prepared), ..self }
    }

    /// How they are laid out.
    pub(crate) fn layout(&self) -> &Arc<Layout> {
        self.rounded.layout()
    }

    /// Whether something else takes the place of some.
    pub(crate) fn are_prepared(&self) -> bool {
        !self.prepared.tensors.is_empty()
    }

    /// One of them.
    pub(crate) fn get(&self, id: ParamId) -> Tensor {
        self.rounded.get(id)
    }

    /// One of them, on a tape: a constant, where something else takes its place.
    pub(crate) fn on<'t>(&self, tape: &'t Tape, id: ParamId) -> Var<'t> {
        match self.prepared.tensors.get(&id) {
            Some(tensor) => tape.constant(tensor.clone()),
            None => tape.parameter(&self.rounded, id),
        }
    }

    /// The same in another shape.
    pub(crate) fn on_as<'t, const N: usize>(
        &self,
        tape: &'t Tape,
        id: ParamId,
        extents: [usize; N],
    ) -> Result<Var<'t>> {
        match self.prepared.tensors.get(&id) {
            Some(tensor) if *tensor.shape() == extents => Ok(tape.constant(tensor.clone())),
            Some(tensor) => Ok(tape.constant(tensor.reshape(extents)?)),
            None => Ok(tape.parameter_as(&self.rounded, id, extents)?),
        }
    }

    /// Whether a convolution contains the normalisation that follows it.
    pub(crate) fn contain(&self, norm: StatisticsId) -> bool {
        self.prepared.folded.contains(&norm)
    }
}
