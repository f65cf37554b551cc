//! What a backward pass has accumulated so far, and where a gradient goes.

use crate::params::Owner;
use crate::{Error, Layout, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use tensor::{DType, Shape, Tensor, cuda};

/// What a backward pass has accumulated so far.
pub(crate) struct Accumulated<'a> {
    /// Per node: its gradient so far.
    pub of_nodes: Vec<State>,
    pub parameters: OfParameters<'a>,
    /// How the parameters are laid out.
    pub layout: Option<Arc<Layout>>,
    /// The number of their owner, once a first parameter has been met.
    pub owner: Option<u64>,
}

/// The gradients of parameters so far.
pub(crate) enum OfParameters<'a> {
    /// In the flat buffer.
    Flat {
        /// Per parameter: its span, unless a rule holds it.
        spans: Vec<Option<FlatSpan<'a>>>,
        /// Per parameter: whether that span holds a gradient of this step.
        written: &'a mut [bool],
    },
    /// By parameter, each in a tensor of its own that is made when a rule first writes it.
    Own(BTreeMap<usize, State>),
}

impl Default for OfParameters<'_> {
    fn default() -> Self {
        Self::Own(BTreeMap::new())
    }
}

/// Where the gradient for a [`Target`] is.
pub(crate) enum Place<'p, 'a> {
    /// As of [`OfParameters::Flat`].
    Flat { span: &'p mut Option<FlatSpan<'a>>, written: &'p mut bool },
    /// In a tensor of its own.
    Own(&'p mut State),
}

impl<'a> Accumulated<'a> {
    /// For the walk of another tape, whose parameters are the same model's.
    pub fn with(&self, parameters: OfParameters<'a>) -> Self {
        Self { of_nodes: vec![], parameters, layout: self.layout.clone(), owner: self.owner }
    }

    /// A parameter must be [of this model](Self::ensure_of).
    pub fn place(&mut self, target: &Target) -> Place<'_, 'a> {
        match (target.parameter, &mut self.parameters) {
            (None, _) => Place::Own(&mut self.of_nodes[target.node]),
            (Some(parameter), OfParameters::Own(states)) => Place::Own(states.entry(parameter).or_default()),
            (Some(parameter), OfParameters::Flat { spans, written }) => {
                Place::Flat { span: &mut spans[parameter], written: &mut written[parameter] }
            }
        }
    }

    /// Checks that the gradients have this owner's layout, and that no parameter of another model has been met.
    pub fn ensure_of(&mut self, owner: &Owner) -> Result<()> {
        match &mut self.layout {
            // The next parameter will have the same `Arc`, so that the layouts need not be compared name by name again.
            Some(own) if *own == owner.layout => own.clone_from(&owner.layout),
            other => {
                let parameters = other.as_ref().map_or(0, |layout| layout.ids().len());
                return Err(Error::ForeignGradients { parameters });
            }
        }
        self.ensure_model(owner.number)
    }

    /// Checks that no parameter of another model has been met.
    pub fn ensure_model(&mut self, number: u64) -> Result<()> {
        match *self.owner.get_or_insert(number) == number {
            true => Ok(()),
            false => Err(Error::TwoModels),
        }
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

impl Target {
    /// Whether it is a parameter that was rounded, so that a gradient of this type must be widened.
    pub fn is_rounded_in(&self, dtype: DType) -> bool {
        self.parameter.is_some() && dtype != self.dtype && dtype.of_sums() == self.dtype
    }
}
