//! The reverse walk over the tape.

use crate::accumulated::{Accumulated, State, Target};
use crate::gradients::FlatGradients;
use crate::tape::{Node, Origin};
use crate::{Error, Gradients, InputGrads, Profile, Result, Rule, Tape, Var, recompute};
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use tensor::{Device, Tensor};

impl Tape {
    /// Differentiates a scalar: walks the tape once in reverse and leaves the gradients of its parameters and inputs in
    /// `gradients`, added to those of earlier passes since an optimiser made its last step or [a step
    /// began](Gradients::begin_step). What each operation saved is freed as the walk passes it.
    ///
    /// After an error, or a panic of a rule, `gradients` holds none: the step has to begin anew.
    ///
    /// Errors: [`tensor::Error::Shape`] unless the loss has one element; [`Error::ForeignVar`] if it is of another
    /// tape, [`Error::NotRecorded`] if nothing that was recorded leads to it, [`Error::BareParameter`] if it is a
    /// parameter itself; [`Error::Walked`] the second time; [`Error::ForeignGradients`], [`Error::TwoModels`];
    /// [`tensor::Error::Shared`] while a view of the gradients lives; [`Error::MissingGradient`], [`Error::Recompute`]
    /// and other failures of rules.
    pub fn backward(&self, loss: &Var<'_>, gradients: &mut Gradients) -> Result<()> {
        let one = || {
            if loss.value().count() != 1 {
                return Err(tensor::Error::shape("backward", "a loss of one element", loss.shape()));
            }
            Tensor::full_on(&loss.value().device(), loss.shape().clone(), 1.0, loss.gradient_dtype())
        };
        let one = one().inspect_err(|_| gradients.begin_step())?;
        self.backward_from(loss, one, gradients)
    }

    /// As [`Tape::backward`], but from any value, given the upstream gradient, which must have the value's shape and
    /// [its gradient's type](Tape::input), and be on its device ([`tensor::Error::Shape`], [`tensor::Error::DType`],
    /// [`tensor::Error::Device`]). A view with gaps is copied; otherwise the gradient of an output that is an input
    /// shares its memory.
    pub fn backward_from(&self, output: &Var<'_>, upstream: Tensor, gradients: &mut Gradients) -> Result<()> {
        // What a failed pass leaves behind is incomplete, and must not pass for gradients, also if a rule has panicked.
        let walked = catch_unwind(AssertUnwindSafe(|| self.walk_from(output, upstream, gradients)));
        if !matches!(walked, Ok(Ok(()))) {
            gradients.begin_step();
        }
        walked.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn walk_from(&self, output: &Var<'_>, upstream: Tensor, gradients: &mut Gradients) -> Result<()> {
        if gradients.ended {
            gradients.begin_step();
        }
        if !std::ptr::eq(output.tape(), self) {
            return Err(Error::ForeignVar { op: "backward" });
        }
        let last = output.node().ok_or(Error::NotRecorded)?;
        if upstream.shape() != output.shape() {
            let expected = format!("an upstream gradient like the value, {}", output.shape());
            return Err(tensor::Error::shape("backward", expected, upstream.shape()).into());
        }
        upstream.ensure_dtype("backward", output.gradient_dtype())?;
        let (expected, actual) = (output.value().device(), upstream.device());
        if actual != expected {
            return Err(tensor::Error::device("backward", &expected, &actual).into());
        }
        let Gradients { flat, inputs, tape, .. } = gradients;
        let of_parameters = flat.as_ref().map(|flat| flat.values.device());
        if tape.replace(self.id()) != Some(self.id()) {
            inputs.clear();
        }
        let (layout, owner) = flat.as_ref().map(|flat| (Arc::clone(&flat.layout), flat.owner)).unzip();
        let parameters = flat.as_mut().map(FlatGradients::split).transpose()?.unwrap_or_default();
        let mut accumulated = Accumulated { of_nodes: vec![], parameters, layout, owner: owner.flatten() };
        accumulated.of_nodes.resize_with(last + 1, State::default);
        // What earlier passes over this tape have left is added to.
        for (node, earlier) in inputs.extract_if(|&node, _| node <= last) {
            accumulated.of_nodes[node] = State::Filled(earlier);
        }
        // So is the upstream gradient, where the output is itself an input.
        let own = Target { node: last, parameter: None, shape: upstream.shape().clone(), dtype: upstream.dtype() };
        InputGrads::new("backward", upstream.device(), smallvec![Some(own)], &mut accumulated).give(0, upstream)?;
        match of_parameters {
            None | Some(Device::Cpu) => walk(&mut self.nodes_mut(), self.profile(), last, &mut accumulated, inputs)?,
            Some(Device::Cuda(gpu)) => {
                // They may be written aside.
                let _joining = gpu.joining();
                let walked = walk(&mut self.nodes_mut(), self.profile(), last, &mut accumulated, inputs);
                walked.and(gpu.join().map_err(Error::from))?;
            }
        }
        let owner = accumulated.owner;
        flat.iter_mut().for_each(|flat| flat.owner = owner);
        Ok(())
    }
}

/// Walks a tape's nodes in reverse, from node `last` down to the first. Gradients of the tape's inputs go to `inputs`.
pub(crate) fn walk(
    nodes: &mut [Node],
    profile: Option<&Profile>,
    last: usize,
    accumulated: &mut Accumulated<'_>,
    inputs: &mut HashMap<usize, Tensor>,
) -> Result<()> {
    for index in (0..=last).rev() {
        let State::Filled(upstream) = std::mem::take(&mut accumulated.of_nodes[index]) else { continue };
        match &nodes[index].origin {
            Origin::Input => {
                inputs.insert(index, upstream);
                continue;
            }
            // Only if the loss itself, or a segment's result, is a parameter: all other gradients of parameters go to
            // the flat buffer.
            Origin::Parameter(..) => return Err(Error::BareParameter),
            Origin::Operation(_) => {}
            Origin::Consumed(op) => return Err(Error::Walked { op }),
        }
        let targets: SmallVec<[Option<Target>; 4]> =
            nodes[index].inputs.iter().map(|input| input.map(|node| target(node, &nodes[node]))).collect();
        for target in targets.iter().flatten() {
            if let Origin::Parameter(_, owner) = &nodes[target.node].origin {
                accumulated.ensure_of(owner)?;
            }
        }
        let name = nodes[index].name();
        let origin = std::mem::replace(&mut nodes[index].origin, Origin::Consumed(name));
        if let Origin::Operation(mut rule) = origin {
            recompute::recall(rule.as_mut(), &nodes[index].forgotten, nodes)?;
            let work = profile.map(|profile| (profile, work(rule.as_ref(), &upstream, &targets)));
            let device = upstream.device();
            let mut grads = InputGrads::new(name, device.clone(), targets, accumulated);
            rule.backward(upstream, &mut grads)?;
            grads.finish()?;
            if let Some((profile, (multiply_adds, bytes))) = work {
                profile.backward(&device, name, multiply_adds, bytes);
            }
        }
    }
    Ok(())
}

/// Where a rule's gradient of an input goes, from the number of the input's node and the node itself.
fn target(number: usize, node: &Node) -> Target {
    let parameter = match node.origin {
        Origin::Parameter(id, _) => Some(id.index()),
        _ => None,
    };
    Target { node: number, parameter, shape: node.shape.clone(), dtype: node.dtype }
}

/// The work that a backward rule is about to do: the multiply-adds of the wanted gradients, and the bytes of all
/// tensors read (the upstream gradient and what the operation saved) or written. Zero for a [frame](Rule::is_frame),
/// whose parts are profiled one by one.
fn work(rule: &dyn Rule, upstream: &Tensor, targets: &[Option<Target>]) -> (u64, usize) {
    if rule.is_frame() {
        return (0, 0);
    }
    let costs = rule.multiply_adds(upstream.shape()).gradients;
    let multiply_adds = targets.iter().zip(costs).filter_map(|(target, cost)| target.as_ref().map(|_| cost)).sum();
    let saved: usize = rule.saved().iter().map(|(_, tensor)| tensor.bytes()).sum();
    let gradients: usize = targets.iter().flatten().map(|target| target.shape.count() * target.dtype.size()).sum();
    (multiply_adds, upstream.bytes() + saved + gradients)
}
