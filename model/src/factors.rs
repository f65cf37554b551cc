//! The operands that linear layers and convolutions take from a model's parameters.

use crate::error::Result;
use crate::state::{RunningStatistics, StatisticsId};
use autograd::{ParamId, Parameters, Tape, Var};
use std::collections::HashMap;
use std::sync::Arc;
use tensor::{DType, Tensor};

/// The parameters as operands of linear layers and convolutions: rounded to the type in which those multiply. Cloning
/// shares them.
#[derive(Debug)]
pub struct Factors {
    rounded: Parameters,
    /// What they were made of. Holding it keeps the parameters from being written, so that these cannot be out of date.
    source: (Parameters, Vec<RunningStatistics>),
    prepared: Arc<Prepared>,
}

/// What was made of parameters that will not change: see [`BiFormer::prepared`](crate::BiFormer::prepared).
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    /// Tensors that are used in place of these parameters.
    pub tensors: HashMap<ParamId, Tensor>,
    /// The BatchNorms that have been folded into the convolutions before them.
    pub folded: Vec<StatisticsId>,
    /// The weights of those convolutions, if GELU follows, which they then apply as well.
    pub before_gelu: Vec<ParamId>,
}

impl Clone for Factors {
    fn clone(&self) -> Self {
        let (parameters, running) = &self.source;
        let source = (parameters.share(), running.clone());
        Self { rounded: self.rounded.share(), source, prepared: Arc::clone(&self.prepared) }
    }
}

impl Factors {
    /// These parameters, rounded to a type: their own, or bf16. Errors: those of [`Parameters::cast`].
    pub fn new(parameters: &Parameters, dtype: DType) -> Result<Self> {
        Ok(Self { rounded: parameters.cast(dtype)?, ..Self::unrounded(parameters) })
    }

    /// These parameters as they are.
    pub(crate) fn unrounded(parameters: &Parameters) -> Self {
        let source = (parameters.share(), vec![]);
        Self { rounded: parameters.share(), source, prepared: Arc::default() }
    }

    /// The same parameters, some of them replaced by tensors that were prepared of them and of these statistics.
    pub(crate) fn with(mut self, prepared: Prepared, running: &[RunningStatistics]) -> Self {
        self.source.1 = running.to_vec();
        Self { prepared: Arc::new(prepared), ..self }
    }

    /// Whether they were made of these parameters, with the same ones frozen, and where statistics have been folded
    /// into them, of these. Once a model has been moved, its earlier ones are no longer its own.
    pub(crate) fn are_of(&self, parameters: &Parameters, running: &[RunningStatistics]) -> bool {
        let (source, folded) = &self.source;
        let same = |(one, other): (&RunningStatistics, &RunningStatistics)| {
            one.mean.is_same_view(&other.mean) && one.variance.is_same_view(&other.variance)
        };
        self.rounded.is_same_model(parameters)
            && self.rounded.layout() == parameters.layout()
            && source.flat().is_same_view(parameters.flat())
            && folded.iter().zip(running).all(same)
    }

    /// Whether prepared tensors replace some of them.
    pub(crate) fn are_prepared(&self) -> bool {
        !self.prepared.tensors.is_empty()
    }

    /// A parameter itself, even if a prepared tensor replaces it.
    pub(crate) fn get(&self, id: ParamId) -> Tensor {
        self.rounded.get(id)
    }

    /// A parameter on a tape, where it may be a constant or, if it has been replaced, the prepared tensor, which is
    /// one.
    pub(crate) fn on<'t>(&self, tape: &'t Tape, id: ParamId, constant: bool) -> Var<'t> {
        match self.prepared.tensors.get(&id) {
            Some(tensor) => tape.constant(tensor.clone()),
            None if constant => tape.constant(self.get(id)),
            None => tape.parameter(&self.rounded, id),
        }
    }

    /// The same as a matrix, which a prepared tensor is already.
    pub(crate) fn on_as<'t>(
        &self,
        tape: &'t Tape,
        id: ParamId,
        extents: [usize; 2],
        constant: bool,
    ) -> Result<Var<'t>> {
        match self.prepared.tensors.get(&id) {
            Some(tensor) => Ok(tape.constant(tensor.clone())),
            None if constant => Ok(tape.constant(self.get(id).reshape(extents)?)),
            None => Ok(tape.parameter_as(&self.rounded, id, extents)?),
        }
    }

    /// Whether a BatchNorm has been folded into the convolution before it.
    pub(crate) fn is_folded(&self, norm: StatisticsId) -> bool {
        self.prepared.folded.contains(&norm)
    }

    /// Whether a convolution with this weight applies the GELU that follows.
    pub(crate) fn applies_gelu(&self, weight: ParamId) -> bool {
        self.prepared.before_gelu.contains(&weight)
    }
}
