//! Backward rules, and where they put their gradients.

use crate::backward::walk;
use crate::params::Owner;
use crate::tape::Origin;
use crate::{Error, Layout, MultiplyAdds, Result, Tape};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Arc;
use tensor::cpu::parallel::Out;
use tensor::{DType, Device, Error as TensorError, Float, Shape, Tensor, cuda, match_float};

/// Computes the value of an operation once more: see [`Rule::recompute`].
pub type Recompute<'a> = Box<dyn FnOnce() -> Result<Tensor> + 'a>;

/// The backward rule of one recorded operation: a plain struct of what the operation saved.
pub trait Rule: Send + 'static {
    /// The operation's name.
    fn name(&self) -> &'static str;

    /// What it saved, by name.
    fn saved(&self) -> Vec<(&'static str, &Tensor)>;

    /// Mutable access to [`saved`](Self::saved), in the same order, without the trailing tensors that only
    /// [`recompute`](Self::recompute) reads. A recomputing tape takes values out and puts them back, and
    /// [`Tape::tamper`](crate::Tape::tamper) spoils them.
    fn saved_mut(&mut self) -> Vec<&mut Tensor>;

    /// How to recompute the operation's value, bit for bit, from what the rule holds; `None` if that is impossible, or
    /// slow. See [`Tape::recomputing_cheap`](crate::Tape::recomputing_cheap).
    fn recompute(&self) -> Option<Recompute<'_>> {
        None
    }

    /// Turns the gradient of the operation's value into those of its inputs. `upstream` has the value's
    /// shape and is contiguous; the rule may reuse its buffer when it is unique.
    fn backward(self: Box<Self>, upstream: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()>;

    /// Whether it stands for other operations, each of which a profile lists by itself.
    fn is_frame(&self) -> bool {
        false
    }

    /// The multiply-adds of an operation whose time goes into them, for a value of this shape. For profiles.
    fn multiply_adds(&self, _value: &Shape) -> MultiplyAdds {
        MultiplyAdds::default()
    }
}

/// Writes the three bookkeeping methods of a [`Rule`]: its name, and its saved tensors by field.
///
/// `rule_fields!("linear", x, weight);` inside an `impl Rule for`. After a semicolon come those that only
/// [`Rule::recompute`] reads. The name may be a field: `rule_fields!(self.op, x);`.
#[macro_export]
macro_rules! rule_fields {
    (self.$name:ident $($rest:tt)*) => {
        fn name(&self) -> &'static str {
            self.$name
        }
        $crate::rule_fields!(@saved $($rest)*);
    };
    (@saved $(, $field:ident)* $(; $($for_value:ident),+)? $(,)?) => {
        fn saved(&self) -> Vec<(&'static str, &$crate::tensor::Tensor)> {
            vec![$((stringify!($field), &self.$field),)* $($((stringify!($for_value), &self.$for_value)),+)?]
        }
        fn saved_mut(&mut self) -> Vec<&mut $crate::tensor::Tensor> {
            vec![$(&mut self.$field),*]
        }
    };
    ($name:expr $(, $($rest:tt)*)?) => {
        fn name(&self) -> &'static str {
            $name
        }
        $crate::rule_fields!(@saved $(, $($rest)*)?);
    };
}

/// What a backward pass has accumulated so far.
pub(crate) struct Accumulated<'a> {
    /// Per node: its gradient so far.
    pub interior: Vec<State>,
    /// How the parameters are laid out.
    pub layout: Option<Arc<Layout>>,
    /// The number of their owner, once a first parameter has been met.
    pub owner: Option<u64>,
    /// Per parameter: its span of the flat buffer, unless a rule holds it.
    pub spans: Vec<Option<FlatSpan<'a>>>,
    /// Per parameter: whether that span holds a gradient of this step.
    pub written: &'a mut [bool],
}

impl Accumulated<'_> {
    /// Checks that the flat buffer has a span for this target, if it is a parameter: in the same layout, of its size.
    pub fn ensure_span(&mut self, target: &Target, origin: &Origin) -> Result<()> {
        let Origin::Parameter(id, owner) = origin else { return Ok(()) };
        let bytes = target.shape.count() * target.dtype.size();
        let span = self.spans.get(id.index()).and_then(Option::as_ref);
        if span.is_none_or(|span| span.bytes() != bytes) {
            return Err(self.foreign());
        }
        self.ensure_of(owner)
    }

    /// Checks that the gradients have this owner's layout, and that no parameter of another model has been met.
    pub fn ensure_of(&mut self, owner: &Owner) -> Result<()> {
        match &mut self.layout {
            Some(own) if Arc::ptr_eq(own, &owner.layout) => {}
            // The next parameter will have the same `Arc`, so that the layouts need not be compared name by name again.
            Some(own) if *own == owner.layout => *own = Arc::clone(&owner.layout),
            _ => return Err(self.foreign()),
        }
        match *self.owner.get_or_insert(owner.number) == owner.number {
            true => Ok(()),
            false => Err(Error::TwoModels),
        }
    }

    fn foreign(&self) -> Error {
        Error::ForeignGradients { parameters: self.spans.len() }
    }
}

/// Where a parameter's gradient lies: its span of the flat buffer of gradients.
pub(crate) enum FlatSpan<'a> {
    Cpu(&'a mut [u8]),
    Cuda(cuda::Span<'a>),
}

impl FlatSpan<'_> {
    /// Two spans: up to a byte, and from there on.
    pub fn split_at(self, bytes: usize) -> (Self, Self) {
        match self {
            FlatSpan::Cpu(all) => {
                let (before, after) = all.split_at_mut(bytes);
                (FlatSpan::Cpu(before), FlatSpan::Cpu(after))
            }
            FlatSpan::Cuda(all) => {
                let (before, after) = all.split_at(bytes);
                (FlatSpan::Cuda(before), FlatSpan::Cuda(after))
            }
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            FlatSpan::Cpu(bytes) => bytes.len(),
            FlatSpan::Cuda(span) => span.len(),
        }
    }
}

#[derive(Default)]
pub(crate) enum State {
    #[default]
    Empty,
    Filled(Tensor),
    /// A rule is writing it.
    Open,
}

/// What a rule must know of each input.
pub(crate) struct Target {
    pub node: usize,
    pub parameter: Option<usize>,
    pub shape: Shape,
    pub dtype: DType,
}

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

/// A gradient that is being written. Close it with [`InputGrads::close`].
pub struct Slot<'a> {
    input: usize,
    dtype: DType,
    memory: SlotMemory<'a>,
    accumulate: bool,
}

enum SlotMemory<'a> {
    /// Nobody wants this gradient.
    Unwanted,
    /// A parameter's span of the flat buffer.
    Flat(FlatSpan<'a>),
    /// An interior node's buffer.
    Pooled(Tensor),
    /// A buffer for the second gradient of a node that is open already.
    Second(Tensor),
}

impl Slot<'_> {
    /// Where a CPU kernel writes, or none when the gradient is not wanted.
    pub fn out<T: Float>(&mut self) -> Result<Option<Out<'_, T>>> {
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

    /// Where a GPU kernel writes, or none when the gradient is not wanted.
    pub fn out_on_gpu(&mut self) -> Result<Option<cuda::Out<'_>>> {
        match &mut self.memory {
            SlotMemory::Unwanted => Ok(None),
            SlotMemory::Flat(FlatSpan::Cuda(span)) => Ok(Some(span.out(self.dtype, self.accumulate))),
            SlotMemory::Flat(FlatSpan::Cpu(_)) => Err(elsewhere("cuda", "cpu")),
            SlotMemory::Pooled(tensor) | SlotMemory::Second(tensor) => {
                Ok(Some(tensor.as_out("backward", self.accumulate)?))
            }
        }
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

    /// Takes the memory for an input's gradient, in the input's shape, contiguous.
    pub fn open(&mut self, input: usize) -> Result<Slot<'a>> {
        let Some(Some(target)) = self.targets.get(input) else {
            return Ok(Slot { input, dtype: DType::F32, memory: SlotMemory::Unwanted, accumulate: false });
        };
        self.given[input] = true;
        let dtype = target.dtype;
        let fresh = || Tensor::empty_on(&self.device, target.shape.clone(), dtype);
        if let Some(parameter) = target.parameter {
            return Ok(match self.accumulated.spans[parameter].take() {
                Some(span) => {
                    let accumulate = std::mem::replace(&mut self.accumulated.written[parameter], true);
                    Slot { input, dtype, memory: SlotMemory::Flat(span), accumulate }
                }
                None => Slot { input, dtype, memory: SlotMemory::Second(fresh()?), accumulate: false },
            });
        }
        Ok(match std::mem::replace(&mut self.accumulated.interior[target.node], State::Open) {
            State::Empty => Slot { input, dtype, memory: SlotMemory::Pooled(fresh()?), accumulate: false },
            State::Filled(partial) => {
                let memory = SlotMemory::Pooled(own(partial)?);
                Slot { input, dtype, memory, accumulate: true }
            }
            State::Open => Slot { input, dtype, memory: SlotMemory::Second(fresh()?), accumulate: false },
        })
    }

    /// Gives the memory back, written.
    pub fn close(&mut self, slot: Slot<'a>) {
        let Some(Some(target)) = self.targets.get(slot.input) else { return };
        match slot.memory {
            SlotMemory::Unwanted => {}
            SlotMemory::Flat(span) => {
                if let Some(parameter) = target.parameter {
                    self.accumulated.spans[parameter] = Some(span);
                }
            }
            SlotMemory::Pooled(tensor) => self.accumulated.interior[target.node] = State::Filled(tensor),
            SlotMemory::Second(tensor) => self.pending.push((slot.input, tensor)),
        }
    }

    /// Gives a gradient that exists already: it is moved in if it is the first, and added otherwise.
    /// It must have the input's shape and type; a view is copied.
    pub fn give(&mut self, input: usize, gradient: Tensor) -> Result<()> {
        let Some(Some(target)) = self.targets.get(input) else { return Ok(()) };
        if *gradient.shape() != target.shape {
            let expected = format!("a gradient of shape {}", target.shape);
            return Err(tensor::Error::shape(self.op, expected, gradient.shape()).into());
        }
        gradient.ensure_dtype(self.op, target.dtype)?;
        if target.parameter.is_none() && matches!(self.accumulated.interior[target.node], State::Empty) {
            self.given[input] = true;
            self.accumulated.interior[target.node] = State::Filled(gradient.contiguous()?);
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
    /// `inputs[i]` stands for the operation's input i. Gradients accumulated so far go in and come out again, so that
    /// the additions happen in the same order as on one long tape.
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
        let mut interior: Vec<State> = (0..=last).map(|_| State::Empty).collect();
        for (input, target) in inputs.iter().zip(&self.targets) {
            if let (&Some(input), Some(target)) = (input, target)
                && target.parameter.is_none()
            {
                interior[input] = std::mem::take(&mut self.accumulated.interior[target.node]);
            }
        }
        interior[last] = State::Filled(upstream);
        let outside = std::mem::replace(&mut self.accumulated.interior, interior);
        let mut gradients = HashMap::new();
        let walked = walk(&mut tape.nodes_mut(), tape.profile(), last, self.accumulated, &mut gradients);
        self.accumulated.interior = outside;
        walked?;
        for (input, node) in inputs.iter().enumerate() {
            if let Some(gradient) = node.and_then(|node| gradients.remove(&node)) {
                self.give(input, gradient)?;
            }
        }
        Ok(())
    }

    /// The spans of the flat buffer of gradients, and which of them hold a gradient of this step. Errors:
    /// [`Error::ForeignGradients`] and [`Error::TwoModels`] unless they belong to this owner.
    pub(crate) fn parameters(&mut self, owner: &Owner) -> Result<(&mut [Option<FlatSpan<'a>>], &mut [bool])> {
        self.accumulated.ensure_of(owner)?;
        Ok((&mut self.accumulated.spans, self.accumulated.written))
    }

    /// After the rule: adds second gradients, and makes sure that no wanted one is missing.
    pub(crate) fn finish(mut self) -> Result<()> {
        for (input, gradient) in std::mem::take(&mut self.pending) {
            self.give(input, gradient)?;
        }
        for (input, target) in self.targets.iter().enumerate() {
            let Some(target) = target else { continue };
            let open = match target.parameter {
                Some(parameter) => self.accumulated.spans[parameter].is_none(),
                None => matches!(self.accumulated.interior[target.node], State::Open),
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
    if tensor.device() != Device::Cpu {
        return Ok(tensor.duplicate()?);
    }
    // A copy that is made by all threads.
    match_float!(tensor.dtype(), "backward", T => {
        let mut copy = Tensor::empty(tensor.shape().clone(), tensor.dtype());
        Out::store(copy.as_mut_slice::<T>("backward")?).put(tensor.contiguous()?.as_slice::<T>("backward")?);
        Ok(copy)
    })
}

fn elsewhere(expected: &str, actual: &str) -> Error {
    TensorError::Device { op: "backward", expected: expected.into(), actual: actual.into() }.into()
}
