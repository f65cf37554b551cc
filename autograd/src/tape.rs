//! The tape: a list of what was computed, in order.

use crate::params::{Owner, ParamId, Parameters};
use crate::recompute::{self, Forgotten};
use crate::{Error, Profile, Result, Rule};
use smallvec::SmallVec;
use std::cell::{Cell, Ref, RefCell};
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tensor::{DType, Device, Shape, Tensor};

/// A Wengert list: one [`Node`] per recorded operation. Operations append to it while they compute, and
/// [`Tape::backward`] walks it once in reverse, freeing as it goes.
#[derive(Default)]
pub struct Tape {
    id: TapeId,
    nodes: RefCell<Vec<Node>>,
    /// Whether a trainable parameter was used on this tape, or on those of pieces of a batch.
    pub(crate) uses_parameters: Cell<bool>,
    kind: TapeKind,
    profile: Option<Arc<Profile>>,
}

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tape")
            .field("nodes", &self.nodes.try_borrow().ok().map(|nodes| nodes.len()))
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// Tells a tape from all others, also from those that are gone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TapeId(u64);

impl Default for TapeId {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a tape records, and what it keeps of that.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum TapeKind {
    #[default]
    Record,
    RecomputeCheap,
    RecomputeSegments,
    Inference,
    CheckFinite,
}

/// One entry of the tape.
pub struct Node {
    pub(crate) origin: Origin,
    /// The node of each input; none where no gradient is needed.
    pub(crate) inputs: SmallVec<[Option<usize>; 4]>,
    /// What its rule does not keep, to be computed again.
    pub(crate) forgotten: SmallVec<[Forgotten; 1]>,
    pub(crate) shape: Shape,
    /// The type of its gradient. For a parameter it is the layout's type, even where the value itself was cast to bf16;
    /// otherwise see [`gradient_of`].
    pub(crate) dtype: DType,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("name", &self.name())
            .field("inputs", &self.inputs)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

pub(crate) enum Origin {
    /// A tensor whose gradient the caller asked for.
    Input,
    /// A trainable parameter.
    Parameter(ParamId, Owner),
    /// The result of an operation.
    Operation(Box<dyn Rule>),
    /// An operation whose backward rule has run and whose memory is free again.
    Consumed(&'static str),
}

impl Node {
    /// The operation's name, or `input`, or `parameter`.
    pub fn name(&self) -> &'static str {
        match &self.origin {
            Origin::Input => "input",
            Origin::Parameter(..) => "parameter",
            Origin::Operation(rule) => rule.name(),
            Origin::Consumed(name) => name,
        }
    }

    /// The shape of its value.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The nodes of its inputs; none where no gradient is needed.
    pub fn inputs(&self) -> &[Option<usize>] {
        &self.inputs
    }

    /// What it keeps for the backward pass: name and tensor, which is empty where the value is computed again.
    pub fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        match &self.origin {
            Origin::Operation(rule) => rule.saved(),
            _ => vec![],
        }
    }
}

impl Tape {
    /// A tape that records.
    pub fn new() -> Self {
        Self::default()
    }

    /// A tape that records, but does not keep values that are cheap to recompute: those of GELU, also after a
    /// batch normalisation that it is fused with, and of layer normalisation. The gradients have the same bits.
    pub fn recomputing_cheap() -> Self {
        Self::of_kind(TapeKind::RecomputeCheap)
    }

    /// A tape for gradient checkpointing: it records, but keeps only the inputs of each [segment](Tape::segment), which
    /// it runs a second time in the backward pass. The gradients have the same bits, unless a value is passed to a
    /// segment twice, or a parameter is passed to it instead of being put on its tape: the gradients of such inputs are
    /// accumulated by themselves first.
    pub fn recomputing_segments() -> Self {
        Self::of_kind(TapeKind::RecomputeSegments)
    }

    /// A tape that records nothing: for inference. Values are freed as soon as they are no longer used.
    pub fn inference() -> Self {
        Self::of_kind(TapeKind::Inference)
    }

    /// A tape that records, and refuses the first value that is not finite with
    /// [`Error::NotFinite`]: slower, for finding out where a loss went wrong.
    pub fn checking_finite() -> Self {
        Self::of_kind(TapeKind::CheckFinite)
    }

    /// The same tape, watched: the profile measures each operation and each backward rule.
    pub fn profiled(self, profile: Option<Arc<Profile>>) -> Self {
        Self { profile, ..self }
    }

    /// A value that needs no gradient, such as images. (Labels, targets and indices are given to operations as plain
    /// tensors.)
    pub fn constant(&self, value: Tensor) -> Var<'_> {
        Var { tape: self, value, node: None }
    }

    /// A floating-point value whose gradient is wanted. On the CPU, where bf16 is used only for the factors of matrix
    /// products, the gradient of a bf16 value is f32.
    pub fn input(&self, value: Tensor) -> Var<'_> {
        let (_, dtype) = gradient_of(&value);
        self.leaf(Origin::Input, value, dtype)
    }

    /// A trainable parameter. Its gradient goes to the [`Gradients`](crate::Gradients) of the backward pass, in the
    /// layout's type, even if `parameters` are [rounded](Parameters::cast). A [frozen](Parameters::freeze) one is a
    /// constant.
    pub fn parameter(&self, parameters: &Parameters, id: ParamId) -> Var<'_> {
        self.leaf_of(parameters, id, parameters.get(id))
    }

    /// A trainable parameter in another shape of as many elements. Errors: those of [`Tensor::reshape`].
    pub fn parameter_as(&self, parameters: &Parameters, id: ParamId, shape: impl Into<Shape>) -> Result<Var<'_>> {
        Ok(self.leaf_of(parameters, id, parameters.get(id).reshape(shape)?))
    }

    fn leaf_of(&self, parameters: &Parameters, id: ParamId, value: Tensor) -> Var<'_> {
        let owner = parameters.owner();
        if owner.layout.is_frozen(id) {
            return self.constant(value);
        }
        self.uses_parameters.set(true);
        self.leaf(Origin::Parameter(id, owner.clone()), value, owner.layout.dtype())
    }

    fn leaf(&self, origin: Origin, value: Tensor, dtype: DType) -> Var<'_> {
        let push = || self.push(origin, &[], SmallVec::new(), (value.shape().clone(), dtype));
        let node = (self.kind != TapeKind::Inference).then(push);
        Var { tape: self, value, node }
    }

    /// Appends a node, with the shape and the type of its gradient.
    fn push(
        &self,
        origin: Origin,
        inputs: &[&Var<'_>],
        forgotten: SmallVec<[Forgotten; 1]>,
        (shape, dtype): (Shape, DType),
    ) -> usize {
        let inputs = inputs.iter().map(|input| input.node).collect();
        let mut nodes = self.nodes.borrow_mut();
        nodes.push(Node { origin, inputs, forgotten, shape, dtype });
        nodes.len() - 1
    }

    /// Appends an operation: its inputs, its value, and the rule that will turn the gradient of its value into those of
    /// its inputs. The rule (with all that it saves) is only made when some input needs a gradient, or a profile counts
    /// the work. There is no way to append an operation without a rule, and so no silent detach.
    ///
    /// Errors: [`Error::ForeignVar`]; on a tape that [checks](Self::checking_finite), [`Error::NotFinite`].
    ///
    /// Panics if the rule, where it is made, has another name than `name`: a mistake in the operation's code.
    pub fn record<'t, R: Rule>(
        &'t self,
        name: &'static str,
        inputs: &[&Var<'t>],
        value: Tensor,
        rule: impl FnOnce() -> R,
    ) -> Result<Var<'t>> {
        self.ensure_own(name, inputs)?;
        if self.kind == TapeKind::CheckFinite && value.find(|x| !x.is_finite())?.is_some() {
            return Err(Error::NotFinite { op: name, node: self.nodes.borrow().len() });
        }
        let needed = inputs.iter().any(|input| input.node.is_some());
        // A profile asks the rule for the operation's arithmetic, even if no gradient is needed.
        let rule = (needed || self.profile.is_some()).then(rule);
        if let Some(rule) = &rule {
            assert_eq!(rule.name(), name, "an operation and its rule have one name");
        }
        if let (Some(profile), Some(rule)) = (&self.profile, &rule) {
            profile.forward(rule, inputs.iter().map(|input| input.value()), &value);
        }
        let node = rule.filter(|_| needed).map(|mut rule| {
            let forgotten = match self.kind {
                TapeKind::RecomputeCheap => recompute::forget(&mut rule, inputs, &self.nodes()),
                _ => SmallVec::new(),
            };
            self.push(Origin::Operation(Box::new(rule)), inputs, forgotten, gradient_of(&value))
        });
        Ok(Var { tape: self, value, node })
    }

    /// Appends a node whether or not its inputs need gradients: a segment may have parameters of its own.
    pub(crate) fn append<'t>(&'t self, inputs: &[&Var<'t>], value: Tensor, rule: impl Rule) -> Result<Var<'t>> {
        self.ensure_own(rule.name(), inputs)?;
        let node = Some(self.push(Origin::Operation(Box::new(rule)), inputs, SmallVec::new(), gradient_of(&value)));
        Ok(Var { tape: self, value, node })
    }

    pub(crate) fn ensure_own(&self, op: &'static str, inputs: &[&Var<'_>]) -> Result<()> {
        let own = inputs.iter().all(|input| std::ptr::eq(input.tape, self));
        if own { Ok(()) } else { Err(Error::ForeignVar { op }) }
    }

    /// Whether it records nothing.
    pub fn is_inference(&self) -> bool {
        self.kind == TapeKind::Inference
    }

    pub(crate) fn id(&self) -> TapeId {
        self.id
    }

    pub(crate) fn kind(&self) -> TapeKind {
        self.kind
    }

    pub(crate) fn profile(&self) -> Option<&Profile> {
        self.profile.as_deref()
    }

    pub(crate) fn shared_profile(&self) -> Option<Arc<Profile>> {
        self.profile.clone()
    }

    pub(crate) fn of_kind(kind: TapeKind) -> Self {
        Self { kind, ..Self::default() }
    }

    pub(crate) fn into_nodes(self) -> Vec<Node> {
        self.nodes.into_inner()
    }

    /// The nodes, in the order in which they were recorded. While they are borrowed, recording an operation, or walking
    /// the tape, panics.
    pub fn nodes(&self) -> Ref<'_, [Node]> {
        Ref::map(self.nodes.borrow(), Vec::as_slice)
    }

    /// The bytes that the recorded operations keep for the backward pass: of each buffer once, however many
    /// keep it. The parameters' buffer is among them.
    pub fn saved_bytes(&self) -> usize {
        let nodes = self.nodes.borrow();
        let buffers: HashSet<(usize, usize)> =
            nodes.iter().flat_map(Node::saved).map(|(_, tensor)| tensor.buffer_id()).collect();
        buffers.iter().map(|(_, len)| len).sum()
    }

    pub(crate) fn nodes_mut(&self) -> std::cell::RefMut<'_, Vec<Node>> {
        self.nodes.borrow_mut()
    }

    /// Lets `change` rewrite the saved tensors of one node, if it is there. Mutation tests of the gradient check use it
    /// to make backward rules that are deliberately wrong. Panics if a tensor of theirs is on a GPU, where a kernel
    /// relies on what its rule has saved.
    #[doc(hidden)]
    pub fn tamper(&self, node: usize, change: impl FnOnce(Vec<&mut Tensor>)) {
        if let Some(Node { origin: Origin::Operation(rule), .. }) = self.nodes.borrow_mut().get_mut(node) {
            change(rule.saved_mut());
            assert!(rule.saved().iter().all(|(_, saved)| saved.device() == Device::Cpu), "tampering is for the CPU");
        }
    }
}

/// The shape and the type of a value's gradient.
fn gradient_of(value: &Tensor) -> (Shape, DType) {
    let dtype = if value.device() == Device::Cpu { value.dtype().of_sums() } else { value.dtype() };
    (value.shape().clone(), dtype)
}

/// A table of the nodes: what was computed from what, and what is kept for the backward pass.
impl fmt::Display for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>5}  {:<18} {:<16} {:<22} keeps", "node", "operation", "from", "shape")?;
        for (index, node) in self.nodes.borrow().iter().enumerate() {
            let from: Vec<String> = node.inputs.iter().map(|i| i.map_or("-".into(), |i| i.to_string())).collect();
            let again = |place: usize| node.forgotten.iter().find(|forgotten| forgotten.saved == place);
            let keeps = |(place, (name, tensor)): (usize, &(&str, &Tensor))| match again(place) {
                Some(forgotten) => format!("{name} recomputed by node {}", forgotten.node),
                None => format!("{name} {}", tensor.shape()),
            };
            let saved: Vec<String> = node.saved().iter().enumerate().map(keeps).collect();
            let (name, shape) = (node.name(), node.shape.to_string());
            writeln!(f, "{index:>5}  {name:<18} {:<16} {shape:<22} {}", from.join(" "), saved.join(", "))?;
        }
        write!(f, "{} bytes kept", self.saved_bytes())
    }
}

/// A value on a tape: a tensor, and the node that it came from if a gradient can flow back.
#[derive(Clone)]
pub struct Var<'t> {
    tape: &'t Tape,
    value: Tensor,
    node: Option<usize>,
}

impl<'t> Var<'t> {
    /// The tape it belongs to.
    pub fn tape(&self) -> &'t Tape {
        self.tape
    }

    /// The value.
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// The value, letting go of the rest.
    pub fn into_value(self) -> Tensor {
        self.value
    }

    /// The extents.
    pub fn shape(&self) -> &Shape {
        self.value.shape()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// The type of its gradient: see [`Tape::input`].
    pub(crate) fn gradient_dtype(&self) -> DType {
        self.node.map_or(self.dtype(), |node| self.tape.nodes()[node].dtype)
    }

    /// Its node on the tape, or none if no gradient can flow back through it.
    pub fn node(&self) -> Option<usize> {
        self.node
    }

    /// The same value, through which no gradient flows.
    pub fn detach(&self) -> Var<'t> {
        Var { tape: self.tape, value: self.value.clone(), node: None }
    }
}

impl fmt::Debug for Var<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Var {:?} {:?}", self.node, self.value)
    }
}
