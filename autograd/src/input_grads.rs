//! Where a backward rule puts its gradients.

use crate::accumulated::{Accumulated, FlatSpan, Place, State, Target};
use crate::backward::walk;
use crate::{Error, Result, Tape};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use tensor::cpu::parallel::Out;
use tensor::{DType, Device, Float, Tensor, cuda, match_float};

/// The gradients of one operation's inputs, as its backward rule sees them.
///
/// The first contribution to a gradient is stored and later ones are added, without clearing anything
/// first: [`InputGrads::open`] hands out the memory and says which of the two it is.
pub struct InputGrads<'s, 'a> {
    op: &'static str,
    device: Device,
    targets: SmallVec<[Option<Target>; 4]>,
    accumulated: &'s mut Accumulated<'a>,
    /// Further contributions to a node that is several of the operation's inputs at once, added when the rule is done.
    pending: Vec<(usize, Tensor)>,
    given: SmallVec<[bool; 4]>,
}

impl fmt::Debug for InputGrads<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InputGrads").field("op", &self.op).field("given", &self.given).finish_non_exhaustive()
    }
}

/// A gradient that is being written. Close it with [`InputGrads::close`].
#[must_use = "a slot that is not closed is a missing gradient"]
pub struct Slot<'a> {
    input: usize,
    dtype: DType,
    memory: SlotMemory<'a>,
    accumulate: bool,
    /// Whether somebody has asked where to write.
    taken: bool,
}

impl fmt::Debug for Slot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot")
            .field("input", &self.input)
            .field("dtype", &self.dtype)
            .field("accumulate", &self.accumulate)
            .finish_non_exhaustive()
    }
}

enum SlotMemory<'a> {
    /// Nobody wants this gradient.
    Unwanted,
    /// A parameter's span of the flat buffer.
    Flat(FlatSpan<'a>),
    /// A buffer of its own.
    Pooled(Tensor),
    /// A buffer for the second gradient of a node that is open already, or for one of another type, to be added later.
    Second(Tensor),
}

impl Slot<'_> {
    /// Whether anybody wants this gradient.
    pub fn is_wanted(&self) -> bool {
        !matches!(self.memory, SlotMemory::Unwanted)
    }

    /// Where a CPU kernel writes, or none when the gradient is not wanted. Errors: [`tensor::Error::DType`] if the
    /// gradient is not of this type, [`tensor::Error::Device`] if it is on a GPU.
    pub fn out<T: Float>(&mut self) -> Result<Option<Out<'_, T>>> {
        self.taken = true;
        let data = match &mut self.memory {
            SlotMemory::Unwanted => return Ok(None),
            SlotMemory::Flat(FlatSpan::Cpu(bytes)) => {
                self.dtype.ensure_dtype("backward", T::DTYPE)?;
                bytemuck::cast_slice_mut(bytes)
            }
            SlotMemory::Flat(FlatSpan::Cuda(_)) => return Err(elsewhere("cpu", "cuda")),
            SlotMemory::Pooled(tensor) | SlotMemory::Second(tensor) => tensor.as_mut_slice::<T>("backward")?,
        };
        Ok(Some(Out { data, accumulate: self.accumulate }))
    }

    /// Where a GPU kernel writes, or none when the gradient is not wanted. Errors: [`tensor::Error::Device`] if the
    /// gradient is not on a GPU, [`tensor::Error::Gpu`].
    pub fn out_on_gpu(&mut self) -> Result<Option<cuda::Out<'_>>> {
        if let SlotMemory::Flat(FlatSpan::Cuda(span)) = &self.memory
            && self.accumulate
        {
            // What is there already may still be being written aside.
            span.gpu().join()?;
        }
        self.place()
    }

    fn place(&mut self) -> Result<Option<cuda::Out<'_>>> {
        self.taken = true;
        match &mut self.memory {
            SlotMemory::Unwanted => Ok(None),
            SlotMemory::Flat(FlatSpan::Cuda(span)) => Ok(Some(span.out(self.dtype, self.accumulate))),
            SlotMemory::Flat(FlatSpan::Cpu(_)) => Err(elsewhere("cuda", "cpu")),
            SlotMemory::Pooled(tensor) | SlotMemory::Second(tensor) => {
                Ok(Some(tensor.as_out("backward", self.accumulate)?))
            }
        }
    }

    /// Lets a GPU write gradients [aside](cuda::Gpu::aside), if they are parameters': nobody reads those before the
    /// backward pass is over. Other gradients are written at once. `write` is given their places. Errors: those of
    /// `write`, and [`tensor::Error::Gpu`].
    ///
    /// # Safety
    /// All tensors that `write` reads, and that somebody else could drop or change meanwhile, must be in `reads`; and
    /// it may write to these places alone, and to tensors that it makes and drops itself.
    #[allow(unsafe_code)]
    pub unsafe fn write_aside<const N: usize>(
        mut slots: [&mut Slot<'_>; N],
        reads: &[&Tensor],
        write: impl FnOnce([Option<cuda::Out<'_>>; N]) -> Result<()>,
    ) -> Result<()> {
        let of_parameters = slots.iter().all(|slot| matches!(slot.memory, SlotMemory::Unwanted | SlotMemory::Flat(_)));
        let mut outs = [const { None }; N];
        for (out, slot) in outs.iter_mut().zip(&mut slots) {
            *out = if of_parameters { slot.place()? } else { slot.out_on_gpu()? };
        }
        let Some(gpu) = outs.iter().flatten().map(|out| Arc::clone(out.gpu())).next() else { return Ok(()) };
        if !of_parameters {
            return write(outs);
        }
        // SAFETY: the caller's promise; and the places are in the parameters' gradients, which the walk borrows until
        // it has joined what is aside.
        unsafe { gpu.aside(reads, || write(outs)) }
    }
}

impl<'s, 'a> InputGrads<'s, 'a> {
    pub(crate) fn new(
        op: &'static str,
        device: Device,
        targets: SmallVec<[Option<Target>; 4]>,
        accumulated: &'s mut Accumulated<'a>,
    ) -> InputGrads<'s, 'a> {
        let given = SmallVec::from_elem(false, targets.len());
        InputGrads { op, device, targets, accumulated, pending: vec![], given }
    }

    /// Whether the gradient of this input is needed.
    pub fn wanted(&self, input: usize) -> bool {
        self.targets.get(input).is_some_and(Option::is_some)
    }

    /// Takes the memory for an input's gradient, in the input's shape, contiguous. Where the operation was recorded
    /// with fewer inputs, such as without a bias, or `input` is `None`, it is as if the gradient were not wanted.
    /// Errors: those of [`Tensor::empty_on`] and [`Tensor::duplicate`].
    pub fn open(&mut self, input: impl Into<Option<usize>>) -> Result<Slot<'a>> {
        let input = input.into().unwrap_or(usize::MAX);
        let slot = |dtype, memory, accumulate| Slot { input, dtype, memory, accumulate, taken: false };
        let Some(Some(target)) = self.targets.get(input) else {
            return Ok(slot(DType::F32, SlotMemory::Unwanted, false));
        };
        let dtype = target.dtype;
        let fresh = || Tensor::empty_on(&self.device, target.shape.clone(), dtype);
        Ok(match self.accumulated.place(target) {
            Place::Flat { span, written } => match span.take() {
                Some(span) => slot(dtype, SlotMemory::Flat(span), *written),
                None => slot(dtype, SlotMemory::Second(fresh()?), false),
            },
            Place::Own(state) => match std::mem::replace(state, State::Open) {
                State::Empty => slot(dtype, SlotMemory::Pooled(fresh()?), false),
                State::Filled(partial) => slot(dtype, SlotMemory::Pooled(own(partial)?), true),
                State::Open => slot(dtype, SlotMemory::Second(fresh()?), false),
            },
        })
    }

    /// As [`open`](Self::open), for a kernel that writes a gradient of this type: on a GPU that of a parameter which
    /// was rounded to bf16 comes in bf16, and is [given](Self::give) when the rule is done.
    pub fn open_in(&mut self, input: usize, dtype: DType) -> Result<Slot<'a>> {
        match self.targets.get(input) {
            Some(Some(target)) if self.device != Device::Cpu && target.is_rounded_in(dtype) => {
                let memory = SlotMemory::Second(Tensor::empty_on(&self.device, target.shape.clone(), dtype)?);
                Ok(Slot { input, dtype, memory, accumulate: false, taken: false })
            }
            _ => self.open(input),
        }
    }

    /// Gives the memory back, written. If nobody has asked for it by [`Slot::out`] or [`Slot::out_on_gpu`], nobody can
    /// have written to it, and it is as if the slot had not been opened.
    pub fn close(&mut self, slot: Slot<'a>) {
        let Some(Some(target)) = self.targets.get(slot.input) else { return };
        self.given[slot.input] |= slot.taken;
        let holds_gradient = slot.taken || slot.accumulate;
        match (slot.memory, self.accumulated.place(target)) {
            (SlotMemory::Flat(memory), Place::Flat { span, written }) => {
                (*span, *written) = (Some(memory), holds_gradient);
            }
            (SlotMemory::Pooled(tensor), Place::Own(state)) => {
                *state = if holds_gradient { State::Filled(tensor) } else { State::Empty };
            }
            (SlotMemory::Second(tensor), _) if slot.taken => self.pending.push((slot.input, tensor)),
            _ => {}
        }
    }

    /// Leaves an input without a gradient, as it has no influence on the result: it would have none on one long tape
    /// either.
    pub(crate) fn leave(&mut self, input: usize) {
        self.given[input] = true;
    }

    /// Gives a gradient that exists already: it is moved in if it is the first, and added otherwise; a view with gaps
    /// is copied. Errors: [`tensor::Error::Shape`] and [`tensor::Error::DType`] unless it has the input's shape and
    /// type; those of [`open`](Self::open) and of a GPU.
    pub fn give(&mut self, input: usize, gradient: Tensor) -> Result<()> {
        let Some(Some(target)) = self.targets.get(input) else { return Ok(()) };
        if *gradient.shape() != target.shape {
            let expected = format!("a gradient of shape {}", target.shape);
            return Err(tensor::Error::shape(self.op, expected, gradient.shape()).into());
        }
        let gradient = match gradient.device() != Device::Cpu && target.is_rounded_in(gradient.dtype()) {
            true => gradient.cast(target.dtype)?,
            false => gradient,
        };
        gradient.ensure_dtype(self.op, target.dtype)?;
        if let Place::Own(state) = self.accumulated.place(target)
            && matches!(state, State::Empty)
        {
            self.given[input] = true;
            *state = State::Filled(gradient.contiguous()?);
            return Ok(());
        }
        let mut slot = self.open(input)?;
        match gradient.device() {
            Device::Cpu => match_float!(gradient.dtype(), self.op, T => {
                if let Some(mut out) = slot.out::<T>()? {
                    out.put(gradient.contiguous()?.as_slice::<T>(self.op)?);
                }
            }),
            Device::Cuda(_) => {
                if let Some(out) = slot.out_on_gpu()? {
                    cuda::elements::put(out, &gradient)?;
                }
            }
        }
        self.close(slot);
        Ok(())
    }

    /// Lets the backward walk of another tape, from node `last` down, supply the gradients: that tape's node
    /// `inputs[i]` stands for the operation's input i. Gradients accumulated so far go in and come out again, but for
    /// parameters', so that the additions happen in the same order as on one long tape.
    pub(crate) fn walk(
        &mut self,
        tape: &Tape,
        inputs: &[Option<usize>],
        last: Option<usize>,
        upstream: Tensor,
    ) -> Result<()> {
        // An input that the walk does not reach has no influence on the result, and would have no gradient on one long
        // tape either.
        self.given.fill(true);
        let Some(last) = last else { return Ok(()) };
        if let Some(input) = inputs.iter().position(|&input| input == Some(last)) {
            return self.give(input, upstream);
        }
        let mut of_nodes: Vec<State> = (0..=last).map(|_| State::Empty).collect();
        for (input, target) in inputs.iter().zip(&self.targets) {
            if let (&Some(input), Some(target)) = (input, target)
                && target.parameter.is_none()
            {
                of_nodes[input] = std::mem::take(&mut self.accumulated.of_nodes[target.node]);
            }
        }
        of_nodes[last] = State::Filled(upstream);
        let outside = std::mem::replace(&mut self.accumulated.of_nodes, of_nodes);
        let mut gradients = HashMap::new();
        let walked = walk(&mut tape.nodes_mut(), tape.profile(), last, self.accumulated, &mut gradients);
        self.accumulated.of_nodes = outside;
        walked?;
        for (input, node) in inputs.iter().enumerate() {
            if let Some(gradient) = node.and_then(|node| gradients.remove(&node)) {
                self.give(input, gradient)?;
            }
        }
        Ok(())
    }

    /// Memory for an input's gradient, in the input's shape and type, to be [given](Self::give) later; `None` if it is
    /// not wanted.
    pub(crate) fn room(&self, input: usize) -> Option<Tensor> {
        let target = self.targets.get(input)?.as_ref()?;
        Some(Tensor::empty(target.shape.clone(), target.dtype))
    }

    /// What the pass has accumulated so far, for a rule that walks tapes of its own.
    pub(crate) fn accumulated(&mut self) -> &mut Accumulated<'a> {
        self.accumulated
    }

    /// After the rule: adds second gradients, and makes sure that no wanted one is missing.
    pub(crate) fn finish(mut self) -> Result<()> {
        for (input, gradient) in std::mem::take(&mut self.pending) {
            self.give(input, gradient)?;
        }
        for (input, target) in self.targets.iter().enumerate() {
            let Some(target) = target else { continue };
            let open = match self.accumulated.place(target) {
                Place::Flat { span, .. } => span.is_none(),
                Place::Own(state) => matches!(state, State::Open),
            };
            if open || !self.given[input] {
                return Err(Error::MissingGradient { op: self.op, input });
            }
        }
        Ok(())
    }
}

/// The tensor in a buffer of its own: a copy if its buffer is shared.
fn own(tensor: Tensor) -> Result<Tensor> {
    if tensor.is_unique() && tensor.is_contiguous() {
        return Ok(tensor);
    }
    if let Device::Cuda(gpu) = tensor.device() {
        // Perhaps only work aside shares it.
        gpu.join_readers(&tensor)?;
        return if tensor.is_unique() && tensor.is_contiguous() { Ok(tensor) } else { Ok(tensor.duplicate()?) };
    }
    // A copy that is made by all threads.
    match_float!(tensor.dtype(), "backward", T => {
        let mut copy = Tensor::empty(tensor.shape().clone(), tensor.dtype());
        Out::store(copy.as_mut_slice::<T>("backward")?).put(tensor.contiguous()?.as_slice::<T>("backward")?);
        Ok(copy)
    })
}

fn elsewhere(expected: &str, actual: &str) -> Error {
    tensor::Error::Device { op: "backward", expected: expected.into(), actual: actual.into() }.into()
}
