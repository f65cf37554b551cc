//! Rematerialisation, which trades time for memory: what a tape does not keep, and how the backward pass recomputes it.
//!
//! Two kinds of tapes keep less than [`Tape::new`], each by one rule:
//!
//! - [`Tape::recomputing_cheap`]: a value that its operation [can give again](Rule::recompute) quickly is not kept by
//!   the operations that read it. Before one of them runs backward the value is computed once more.
//! - [`Tape::recomputing_segments`]: of a [segment](Tape::segment) only the inputs are kept. Backward runs the
//!   segment once more, on a tape of its own, and walks that.
//!
//! Either way the same kernels run on the same numbers, and gradients are added up in the same order: they have the
//! same bits as if everything had been kept, but for two kinds of a segment's inputs
//! ([`Tape::recomputing_segments`]).

use crate::tape::{Node, Origin, TapeKind};
use crate::{Error, InputGrads, Profile, Result, Rule, Tape, Var};
use smallvec::SmallVec;
use std::sync::Arc;
use tensor::{Device, Tensor};

/// A saved tensor that was taken out of a rule because the operation that produced it can recompute it.
pub(crate) struct Forgotten {
    /// Which of the tensors that the rule saves.
    pub saved: usize,
    /// The node whose value it is.
    pub node: usize,
}

/// Takes out of a new rule the values of `inputs` that can be computed again.
pub(crate) fn forget(rule: &mut impl Rule, inputs: &[&Var<'_>], nodes: &[Node]) -> SmallVec<[Forgotten; 1]> {
    // An operation that is to recompute its value must still have all that it saved.
    let can_recompute = |node: usize| {
        let node = &nodes[node];
        node.forgotten.is_empty() && matches!(&node.origin, Origin::Operation(rule) if rule.recompute().is_some())
    };
    let mut forgotten = SmallVec::new();
    for (saved, tensor) in rule.saved_mut().into_iter().enumerate() {
        let source = inputs.iter().find(|input| input.value().is_same_view(tensor)).and_then(|input| input.node());
        if let Some(node) = source.filter(|&node| can_recompute(node)) {
            *tensor = Tensor::empty([0], tensor.dtype());
            forgotten.push(Forgotten { saved, node });
        }
    }
    forgotten
}

/// Recomputes what [`forget`] took out of a rule, and puts it back before the rule runs.
pub(crate) fn recall(rule: &mut dyn Rule, forgotten: &[Forgotten], nodes: &[Node]) -> Result<()> {
    for &Forgotten { saved, node } in forgotten {
        // The walk has not come to the node yet: it lies before the rule's own.
        let Origin::Operation(source) = &nodes[node].origin else {
            // A backward pass from another value has already consumed it.
            return Err(Error::Walked { op: nodes[node].name() });
        };
        let Some(recompute) = source.recompute() else {
            return Err(Error::Recompute { reason: format!("{} does not give its value again", source.name()) });
        };
        let (value, shape) = (recompute()?, &nodes[node].shape);
        let place = rule.saved_mut().swap_remove(saved);
        if (value.shape(), value.dtype()) != (shape, place.dtype()) {
            let given = format!("{} {}", value.dtype(), value.shape());
            let reason = format!("{} gave {given} instead of {} {shape}", source.name(), place.dtype());
            return Err(Error::Recompute { reason });
        }
        *place = value;
    }
    Ok(())
}

impl Tape {
    /// Runs `work`, a part of a computation, as a single node of the tape (gradient checkpointing), if this is a tape
    /// that [recomputes segments](Tape::recomputing_segments): then only `inputs` are kept, and the backward pass runs
    /// `work` a second time, which must do exactly the same again. On any other tape `work` simply runs.
    ///
    /// `work` gets the tape to compute on and the inputs on that tape, which it owns and may drop; it must put
    /// parameters on that tape itself. What it returns besides its value is returned from the first run and dropped in
    /// the second. (A value that depends on none of the inputs and parameters that `work` uses, as after
    /// [`detach`](Var::detach), is recorded nevertheless: a backward pass from it finds no gradient, and is no error.)
    ///
    /// Errors: those of `work`, from the backward pass as this crate's; and in the backward pass [`Error::Recompute`]
    /// if the second run's value has another shape, and [`Error::BareParameter`] if it is a parameter and not the
    /// result of an operation. An error type that does not convert to this crate's, such as `anyhow::Error`, cannot be
    /// that of `work`; `?` on what the segment returns converts to it.
    pub fn segment<'t, const N: usize, T, E: From<Error> + Into<Error>>(
        &'t self,
        inputs: [Var<'t>; N],
        work: impl for<'s> Fn(&'s Tape, [Var<'s>; N]) -> std::result::Result<(Var<'s>, T), E> + Send + 'static,
    ) -> std::result::Result<(Var<'t>, T), E> {
        if self.kind() != TapeKind::RecomputeSegments {
            return work(self, inputs);
        }
        let kept = inputs.each_ref().map(|input| input.value().clone());
        let profile = self.shared_profile();
        let tape = Tape::inference().profiled(profile.clone());
        let (value, rest) = {
            let (output, rest) = work(&tape, kept.clone().map(|input| tape.constant(input)))?;
            (output.into_value(), rest)
        };
        // As without segments, what depends on nothing that needs a gradient is not recorded.
        if !tape.uses_parameters.get() && inputs.iter().all(|input| input.node().is_none()) {
            return Ok((self.constant(value), rest));
        }
        let work: Box<Work<N>> = Box::new(move |tape, inputs| Ok(work(tape, inputs).map_err(E::into)?.0));
        Ok((self.append(&inputs.each_ref(), value, Segment { inputs: kept, work, profile })?, rest))
    }
}

type Work<const N: usize> = dyn for<'s> Fn(&'s Tape, [Var<'s>; N]) -> Result<Var<'s>> + Send;

struct Segment<const N: usize> {
    inputs: [Tensor; N],
    work: Box<Work<N>>,
    profile: Option<Arc<Profile>>,
}

impl<const N: usize> Rule for Segment<N> {
    fn name(&self) -> &'static str {
        "segment"
    }

    fn is_frame(&self) -> bool {
        true
    }

    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        self.inputs.iter().map(|input| ("input", input)).collect()
    }

    fn saved_mut(&mut self) -> Vec<&mut Tensor> {
        self.inputs.iter_mut().collect()
    }

    fn backward(self: Box<Self>, upstream: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let Segment { inputs, work, profile } = *self;
        if let Device::Cuda(gpu) = upstream.device() {
            // What is aside would keep memory while the second run takes more.
            gpu.join()?;
        }
        let tape = Tape::new().profiled(profile);
        let mut wanted = (0..N).map(|index| grads.wanted(index));
        let place = |input| if wanted.next() == Some(true) { tape.input(input) } else { tape.constant(input) };
        let inputs = inputs.map(place);
        // Keep only the node numbers: dropping the values here frees whatever no rule saved, before the walk begins.
        let nodes = inputs.each_ref().map(Var::node);
        let output = work(&tape, inputs)?;
        if output.shape() != upstream.shape() {
            let reason = format!("its shape is {} in the second run, but was {}", output.shape(), upstream.shape());
            return Err(Error::Recompute { reason });
        }
        upstream.ensure_dtype("segment", output.gradient_dtype())?;
        let last = output.node();
        drop(output);
        grads.walk(&tape, &nodes, last, upstream)
    }
}
