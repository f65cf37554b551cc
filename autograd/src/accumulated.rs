//! What a backward pass has accumulated so far, and where a gradient goes.

use crate::params::Owner;
use crate::tape::Origin;
use crate::{Error, Layout, Result};
use std::sync::Arc;
use tensor::{DType, Shape, Tensor, cuda};

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
