//! Cases: named inputs on which an operation is checked, compared and timed.

use autograd::Var;
use autograd::exact::{Array, Dual, Scalar};
use autograd::gradcheck::Function;
use std::fmt;
use std::ops::RangeInclusive;
use tensor::rng::Philox;
use tensor::{DType, Shape, Tensor};

/// One operation with its attributes fixed: the production function and the reference side by side.
pub trait Definition: Send + Sync + 'static {
    /// The production function.
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> autograd::Result<Var<'t>>;
    /// The reference, over any scalar. Index inputs come as numbers.
    fn reference<S: Scalar>(&self, inputs: &[Array<S>]) -> Array<S>;
    /// Whether an input is a parameter, whose type may differ from that of maps: see [`Case::inputs_in`].
    fn is_parameter(&self, _input: usize) -> bool {
        false
    }
}

/// Object-safe form of [`Definition`], with the generic scalar replaced by the types in use, so that cases of all
/// operations fit in one list.
trait AnyDefinition: Send + Sync {
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> autograd::Result<Var<'t>>;
    fn reference(&self, inputs: &[Array<f64>]) -> Array<f64>;
    fn dual_reference(&self, inputs: &[Array<Dual>]) -> Array<Dual>;
    fn is_parameter(&self, input: usize) -> bool;
}

impl<D: Definition> AnyDefinition for D {
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> autograd::Result<Var<'t>> {
        Definition::apply(self, inputs)
    }
    fn reference(&self, inputs: &[Array<f64>]) -> Array<f64> {
        Definition::reference(self, inputs)
    }
    fn dual_reference(&self, inputs: &[Array<Dual>]) -> Array<Dual> {
        Definition::reference(self, inputs)
    }
    fn is_parameter(&self, input: usize) -> bool {
        Definition::is_parameter(self, input)
    }
}

/// A named set of inputs for an operation.
pub struct Case {
    /// What is special about it.
    pub name: String,
    /// The inputs: f64, or index tensors.
    pub inputs: Vec<Tensor>,
    definition: Box<dyn AnyDefinition>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case").field("name", &self.name).field("inputs", &self.inputs).finish_non_exhaustive()
    }
}

impl Case {
    /// A case of a definition.
    pub fn new(name: impl Into<String>, inputs: Vec<Tensor>, definition: impl Definition) -> Self {
        Case { name: name.into(), inputs, definition: Box::new(definition) }
    }

    /// The inputs as reference arrays.
    pub(crate) fn arrays(&self) -> Vec<Array<f64>> {
        self.inputs.iter().map(array).collect()
    }

    /// The reference's value on these inputs.
    pub(crate) fn reference(&self, inputs: &[Array<f64>]) -> Array<f64> {
        self.definition.reference(inputs)
    }

    /// The reference on dual numbers.
    pub(crate) fn dual_reference(&self, inputs: &[Array<Dual>]) -> Array<Dual> {
        self.definition.dual_reference(inputs)
    }

    /// The inputs cast to another floating-point type; parameters are cast to the type in which that one is
    /// accumulated.
    pub fn inputs_as(&self, dtype: DType) -> tensor::Result<Vec<Tensor>> {
        self.inputs_in(dtype, dtype.of_sums())
    }

    /// The inputs cast to the type `maps`, except for parameters, which are cast to the type `parameters`, and indices,
    /// which stay as they are.
    pub fn inputs_in(&self, maps: DType, parameters: DType) -> tensor::Result<Vec<Tensor>> {
        let cast = |(place, input): (usize, &Tensor)| match input.dtype() {
            DType::Index => Ok(input.clone()),
            _ if self.definition.is_parameter(place) => input.cast(parameters),
            _ => input.cast(maps),
        };
        self.inputs.iter().enumerate().map(cast).collect()
    }
}

impl Function for Case {
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> autograd::Result<Var<'t>> {
        self.definition.apply(inputs)
    }
}

/// A tensor as a reference array; indices become numbers.
pub fn array(tensor: &Tensor) -> Array<f64> {
    let data = match tensor.dtype() {
        DType::Index => tensor.to_vec::<u32>().map(|v| v.into_iter().map(f64::from).collect()),
        _ => tensor.cast(DType::F64).and_then(|wide| wide.to_vec::<f64>()),
    };
    Array { shape: tensor.shape().to_vec(), data: data.expect("invariant: every type was matched") }
}

/// Numbers drawn uniformly from [-1, 1): the usual input. `stream` tells the inputs of a case apart.
pub fn uniform(shape: impl Into<Shape>, stream: u64) -> Tensor {
    from_fn(shape, |i| 2.0 * f64::from(Philox::new(0xB1F0, stream).uniform(i as u64)) - 1.0)
}

/// A tensor from a function of the element's place.
pub fn from_fn(shape: impl Into<Shape>, f: impl Fn(usize) -> f64) -> Tensor {
    let shape = shape.into();
    let values: Vec<f64> = (0..shape.count()).map(f).collect();
    Tensor::from_slice(&values, shape).expect("invariant: as many values as elements")
}

/// Distinct numbers in random order, any two of them at least 1/8 apart: for operations that compare (top-k), so that a
/// small perturbation does not change the order.
pub fn separated(shape: impl Into<Shape>, stream: u64) -> Tensor {
    let shape = shape.into();
    let order = Philox::new(0xB1F1, stream).sequence().permutation(shape.count());
    from_fn(shape, |i| order[i] as f64 / 8.0 - 1.0)
}

/// Index tensor with numbers below `bound`, which is 1 or more.
pub fn indices(shape: impl Into<Shape>, bound: usize, stream: u64) -> Tensor {
    let shape = shape.into();
    let mut sequence = Philox::new(0xB1F2, stream).sequence();
    let values: Vec<u32> = (0..shape.count()).map(|_| sequence.below(bound) as u32).collect();
    Tensor::from_slice(&values, shape).expect("invariant: as many values as elements")
}

/// Numbers that a property test draws; an operation turns them into extents and attributes of a case.
#[derive(Clone, Debug)]
pub struct Draw {
    /// Any numbers. Smaller ones make smaller cases, so that shrinking works.
    pub numbers: [u8; 8],
}

impl Draw {
    /// The `index`-th number, below 8, folded into a range, which is not empty.
    pub fn within(&self, index: usize, range: RangeInclusive<usize>) -> usize {
        let (low, high) = (*range.start(), *range.end());
        low + usize::from(self.numbers[index]) % (high - low + 1)
    }
}
