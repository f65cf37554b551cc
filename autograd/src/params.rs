//! Parameters in one flat buffer, so that clipping, AdamW and the moving average are each one sweep over memory.

use crate::Result;
use rayon::prelude::*;
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tensor::{ALIGNMENT, DType, Device, Element, Shape, Tensor, match_float};

/// Identifies a parameter of a [`Parameters`]. It is also valid for another `Parameters` with a parameter of the same
/// name in the same place; anywhere else the call panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId {
    place: u32,
    /// A hash of its name, by which another model's is recognised.
    name: u32,
}

impl ParamId {
    fn new(place: usize, name: &str) -> Self {
        // FNV-1a.
        let name = name.bytes().fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        // No machine has room for more of them.
        Self { place: place as u32, name }
    }

    pub(crate) fn index(self) -> usize {
        self.place as usize
    }
}

/// Where each parameter lies in the flat buffer. Parameters start on cache lines; the gaps hold zeros.
#[derive(Clone, PartialEq, Eq)]
pub struct Layout {
    pub(crate) entries: Vec<Entry>,
    len: usize,
    dtype: DType,
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    id: ParamId,
    pub name: String,
    shape: Shape,
    pub span: Range<usize>,
    pub frozen: bool,
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layout")
            .field("parameters", &self.entries.len())
            .field("numbers", &self.count())
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

impl Layout {
    /// All parameters, in the order in which they were added.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = ParamId> + use<> {
        self.entries.iter().map(|entry| entry.id).collect::<Vec<_>>().into_iter()
    }

    /// The name of a parameter, as in a state_dict.
    pub fn name(&self, id: ParamId) -> &str {
        &self.entry(id).name
    }

    /// The shape of a parameter.
    pub fn shape(&self, id: ParamId) -> &Shape {
        &self.entry(id).shape
    }

    /// The elements of the flat buffer that are this parameter's.
    pub fn span(&self, id: ParamId) -> Range<usize> {
        self.entry(id).span.clone()
    }

    /// The parameter with this name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.entries.iter().find(|entry| entry.name == name).map(|entry| entry.id)
    }

    /// Whether a parameter is [frozen](Parameters::freeze).
    pub fn is_frozen(&self, id: ParamId) -> bool {
        self.entry(id).frozen
    }

    /// The length of the flat buffer, gaps included.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// How many numbers there are, frozen ones among them: the length without the gaps.
    pub fn count(&self) -> usize {
        self.entries.iter().map(|entry| entry.span.len()).sum()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Panics if another parameter is in its place.
    fn entry(&self, id: ParamId) -> &Entry {
        match self.entries.get(id.index()) {
            Some(entry) if entry.id == id => entry,
            Some(Entry { name, .. }) => panic!("a parameter of another model, in whose place this one has {name}"),
            None => {
                panic!("a parameter of another model, number {} where this one has {}", id.place, self.entries.len())
            }
        }
    }

    pub(crate) fn view(&self, flat: &Tensor, id: ParamId) -> Tensor {
        flat.slice(0, self.span(id))
            .and_then(|part| part.reshape(self.shape(id).clone()))
            .expect("invariant: a span has the size of its shape")
    }
}

/// Which model a parameter belongs to: the layout, and a number that tells models of the same layout apart.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub layout: Arc<Layout>,
    pub number: u64,
}

impl Owner {
    fn new(layout: Arc<Layout>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { layout, number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }
}

/// Collects parameters while a model is being built.
#[derive(Default)]
pub struct ParametersBuilder {
    /// With their initial values, which are generated only when they are written to the flat buffer.
    entries: Vec<(Entry, Box<dyn Iterator<Item = f64> + Send>)>,
    names: HashSet<String>,
}

impl fmt::Debug for ParametersBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParametersBuilder").field("parameters", &self.entries.len()).finish_non_exhaustive()
    }
}

impl ParametersBuilder {
    /// Adds a parameter with its initial values, last axis fastest, which are generated when the parameters are laid
    /// out. Panics if the name is already taken; [`Self::build`] panics if the number of values does not match the
    /// shape. Both are mistakes in a model's code.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        shape: impl Into<Shape>,
        values: impl IntoIterator<Item = f64, IntoIter: Send + 'static>,
    ) -> ParamId {
        let (name, shape) = (name.into(), shape.into());
        assert!(self.names.insert(name.clone()), "two parameters named {name}");
        let id = ParamId::new(self.entries.len(), &name);
        let entry = Entry { id, name, shape, span: 0..0, frozen: false };
        self.entries.push((entry, Box::new(values.into_iter())));
        id
    }

    /// Lays all parameters out in one buffer of type `dtype` (f32 or f64), several at a time. Errors:
    /// [`tensor::Error::DType`]; [`tensor::Error::Argument`] if no buffer could hold them. Panics if a parameter has
    /// too few or too many values.
    pub fn build(self, dtype: DType) -> Result<Parameters> {
        let per_line = ALIGNMENT / dtype.size();
        let (mut entries, values): (Vec<_>, Vec<_>) = self.entries.into_iter().unzip();
        let mut len = 0;
        for Entry { shape, span, .. } in &mut entries {
            *span = len..len + shape.clone().countable("parameters")?.count();
            // All of them together are countable, too, so no sum overflows.
            len = Shape::from([span.end.next_multiple_of(per_line)]).countable("parameters")?.count();
        }
        let mut flat = Tensor::zeros([len], dtype);
        match_float!(dtype, "parameters", T => {
            let mut rest = flat.as_mut_slice::<T>("parameters")?;
            // Each begins where a line does, and has all lines up to the next one's.
            let places = entries.iter().map(|Entry { span, .. }| {
                let (place, others) = std::mem::take(&mut rest).split_at_mut(span.len().next_multiple_of(per_line));
                rest = others;
                &mut place[..span.len()]
            });
            let places: Vec<&mut [T]> = places.collect();
            entries.par_iter().zip(places).zip(values).for_each(|((Entry { name, shape, .. }, place), mut values)| {
                for to in place {
                    *to = values.next().unwrap_or_else(|| panic!("too few values of parameter {name} {shape}")) as T;
                }
                assert!(values.next().is_none(), "too many values of parameter {name} {shape}");
            });
        });
        Ok(Parameters { owner: Owner::new(Arc::new(Layout { entries, len, dtype })), values: flat })
    }
}

/// All parameters of a model, frozen ones included, in one flat buffer.
#[derive(Debug)]
pub struct Parameters {
    owner: Owner,
    values: Tensor,
}

impl Parameters {
    /// Where each parameter lies.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.owner.layout
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// One parameter, as a view of the flat buffer. While it lives the buffer cannot be written.
    pub fn get(&self, id: ParamId) -> Tensor {
        self.layout().view(&self.values, id)
    }

    /// The flat buffer, (layout length).
    pub fn flat(&self) -> &Tensor {
        &self.values
    }

    /// The flat buffer, to be written. [`tensor::Error::Shared`] while views of it live: drop the tape first.
    pub fn flat_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        Ok(self.values.as_mut_slice("parameters")?)
    }

    /// The flat buffer on any device, to be written by a kernel. A tensor put in its place must have its length and
    /// type, or later uses panic.
    pub fn flat_tensor_mut(&mut self) -> &mut Tensor {
        &mut self.values
    }

    /// Overwrites one parameter with a tensor in the machine's memory. Errors: [`tensor::Error::Shape`] unless it has
    /// the parameter's shape, and those of [`Tensor::overwrite`].
    pub fn set(&mut self, id: ParamId, value: &Tensor) -> Result<()> {
        let shape = self.layout().shape(id);
        if value.shape() != shape {
            return Err(tensor::Error::shape("parameter", shape.to_string(), value.shape()).into());
        }
        let span = self.layout().span(id);
        Ok(self.values.overwrite(span.start, value)?)
    }

    /// Freezes the parameters whose names satisfy the predicate, and thaws all others. A frozen parameter is a constant
    /// on every tape: no gradient is computed for it, nor for values that depend only on frozen parameters and other
    /// constants, and no optimiser moves it. Gradients, optimisers and averages that were created before no longer
    /// match the layout: create new ones.
    pub fn freeze(&mut self, is_frozen: impl Fn(&str) -> bool) {
        let mut layout = Layout::clone(self.layout());
        layout.entries.iter_mut().for_each(|entry| entry.frozen = is_frozen(&entry.name));
        self.owner.layout = Arc::new(layout);
    }

    /// Whether both are the same model's, come from it by [sharing](Self::share), [casting](Self::cast) or moving. A
    /// [duplicate](Self::duplicate) counts as another model's.
    pub fn is_same_model(&self, other: &Parameters) -> bool {
        self.owner.number == other.owner.number
    }

    /// The same values in the same buffer. While both live neither can be written.
    pub fn share(&self) -> Parameters {
        Parameters { owner: self.owner.clone(), values: self.values.clone() }
    }

    /// The same values in another buffer (for a moving average, or a second model). Errors: those of
    /// [`Tensor::duplicate`].
    pub fn duplicate(&self) -> Result<Parameters> {
        Ok(Parameters { owner: Owner::new(Arc::clone(self.layout())), values: self.values.duplicate()? })
    }

    /// The same values in another floating-point type: bf16 weights, for instance, for layers whose activations stay in
    /// the layout's type, or on a GPU are bf16, too. (Gradients stay in the layout's type.) After a cast between f32
    /// and f64 a forward pass works, but a backward pass fails with [`tensor::Error::DType`].
    pub fn cast(&self, dtype: DType) -> Result<Parameters> {
        Ok(Parameters { owner: self.owner.clone(), values: self.values.cast(dtype)? })
    }

    /// The same values on a device. Errors: those of [`Tensor::to_device`].
    pub fn to_device(&self, device: &Device) -> Result<Parameters> {
        Ok(Parameters { owner: self.owner.clone(), values: self.values.to_device(device)? })
    }
}
