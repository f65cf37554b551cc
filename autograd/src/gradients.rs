//! Gradients of parameters, in one flat buffer laid out like theirs, and of inputs.

use crate::accumulated::{FlatSpan, OfParameters};
use crate::params::{Entry, Layout, ParamId, Parameters};
use crate::tape::TapeId;
use crate::{Error, Result, Var};
use std::collections::HashMap;
use std::sync::Arc;
use tensor::{Device, Element, Tensor};

/// What backward passes leave behind: the gradients of parameters, flat and laid out like them, and
/// those of the last walked tape's inputs.
#[derive(Debug, Default)]
pub struct Gradients {
    pub(crate) flat: Option<FlatGradients>,
    pub(crate) inputs: HashMap<usize, Tensor>,
    /// The tape whose inputs these are.
    pub(crate) tape: Option<TapeId>,
    /// Whether they are used up: an optimiser has made its step.
    pub(crate) ended: bool,
}

/// The gradients of all parameters.
#[derive(Debug)]
pub(crate) struct FlatGradients {
    pub layout: Arc<Layout>,
    pub values: Tensor,
    /// Which parameters already have a gradient in this step: further ones are accumulated, not stored.
    pub written: Vec<bool>,
    /// The number of their parameters' owner, once a backward pass has met one in this step.
    pub owner: Option<u64>,
}

impl Gradients {
    /// Buffers for the gradients of these parameters, on their device. [`tensor::Error::OutOfMemory`] if a GPU does not
    /// have enough memory.
    pub fn new(parameters: &Parameters) -> Result<Self> {
        let layout = Arc::clone(parameters.layout());
        let values = Tensor::zeros_on(&parameters.flat().device(), [layout.len()], layout.dtype())?;
        let written = vec![false; layout.entries.len()];
        Ok(Self { flat: Some(FlatGradients { layout, values, written, owner: None }), ..Self::default() })
    }

    /// How the parameters' gradients are laid out, if there are any.
    pub fn layout(&self) -> Option<&Arc<Layout>> {
        self.flat.as_ref().map(|flat| &flat.layout)
    }

    /// Begins a new step: the next backward pass stores its gradients instead of adding them. An optimiser's step
    /// [ends](Self::end_step) one, after which this is not needed; until then, gradients of several micro-batches add
    /// up, and those of a tape's inputs over several passes from its values.
    pub fn begin_step(&mut self) {
        self.ended = false;
        if let Some(flat) = &mut self.flat {
            flat.written.fill(false);
            flat.owner = None;
        }
        self.inputs.clear();
    }

    /// Ends the step, as an optimiser does: these gradients can still be read, but no other step can be made along
    /// them, and the next backward pass begins a new one.
    pub fn end_step(&mut self) {
        self.ended = true;
    }

    /// The gradient of an input, if one reached it in this step; `None` for an input of any tape but the last one
    /// walked.
    pub fn of(&self, input: &Var<'_>) -> Option<&Tensor> {
        let own = self.tape? == input.tape().id();
        if own { self.inputs.get(&input.node()?) } else { None }
    }

    /// The gradient of a parameter, if one reached it in this step.
    pub fn parameter(&self, id: ParamId) -> Option<Tensor> {
        let flat = self.flat.as_ref()?;
        let gradient = flat.layout.view(&flat.values, id);
        flat.written[id.index()].then_some(gradient)
    }

    /// All parameters' gradients, (layout length), zeros where they are frozen. A parameter that no gradient reached in
    /// this step still holds the gradient of an earlier step; call [`Gradients::require_all`] first to rule that out.
    pub fn flat(&self) -> Option<&Tensor> {
        self.flat.as_ref().map(|flat| &flat.values)
    }

    /// All parameters' gradients, (layout length), to be changed between the backward pass and the optimiser: by noise,
    /// by the gradients of another thread's pass. What lies between parameters must stay zero, and so must the
    /// gradients of frozen ones, or the optimiser would move them. None if there are no parameters. Errors:
    /// [`tensor::Error::Shared`] while views of them live; [`tensor::Error::DType`]; [`tensor::Error::Device`] on a
    /// GPU.
    pub fn flat_mut<T: Element>(&mut self) -> Result<Option<&mut [T]>> {
        Ok(self.flat.as_mut().map(|flat| flat.values.as_mut_slice("gradients")).transpose()?)
    }

    /// [`Error::TwoModels`] if these are gradients of other parameters than these, even of ones with the same layout.
    pub fn ensure_of(&self, parameters: &Parameters) -> Result<()> {
        match self.flat.as_ref().and_then(|flat| flat.owner) {
            Some(number) if number != parameters.owner().number => Err(Error::TwoModels),
            _ => Ok(()),
        }
    }

    /// [`Error::Unreached`] when the loss does not depend on some parameter that is not frozen; [`Error::NoBackward`]
    /// when no parameter has a gradient of this step: most likely there was no backward pass.
    pub fn require_all(&self) -> Result<()> {
        if self.ended {
            return Err(Error::NoBackward);
        }
        let Some(flat) = &self.flat else { return Ok(()) };
        let entries = flat.layout.entries.iter().zip(&flat.written);
        let unreached = entries.filter(|&(entry, &written)| !written && !entry.frozen);
        let names: Vec<String> = unreached.map(|(entry, _)| entry.name.clone()).collect();
        if names.is_empty() {
            Ok(())
        } else if flat.written.contains(&true) {
            Err(Error::Unreached { names })
        } else {
            Err(Error::NoBackward)
        }
    }
}

impl FlatGradients {
    /// The flat buffer, cut into the parameters' bytes.
    pub fn split(&mut self) -> Result<OfParameters<'_>> {
        let size = self.layout.dtype().size();
        let mut rest = match self.values.device() {
            Device::Cpu => FlatSpan::Cpu(self.values.as_mut_bytes("gradients")?),
            Device::Cuda(_) => FlatSpan::Cuda(self.values.as_span("gradients")?),
        };
        let mut taken = 0;
        let mut spans = Vec::with_capacity(self.layout.entries.len());
        for Entry { span, .. } in &self.layout.entries {
            let (before, after) = rest.split_at((span.end - taken) * size);
            spans.push(Some(before.split_at((span.start - taken) * size).1));
            rest = after;
            taken = span.end;
        }
        Ok(OfParameters::Flat { spans, written: &mut self.written })
    }
}
