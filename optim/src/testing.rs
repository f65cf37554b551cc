//! What the tests share: parameters of given shapes, and gradients that come off a tape.

use autograd::{Gradients, InputGrads, Parameters, ParametersBuilder, Result, Rule, Tape, rule_fields};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

/// `count` numbers in [-1, 1).
pub fn draw(count: usize, stream: u64) -> Vec<f64> {
    let mut sequence = Philox::new(5, stream).sequence();
    (0..count).map(|_| sequence.uniform_in(-1.0, 1.0)).collect()
}

/// Parameters of these names and shapes, drawn by [`draw`] with their position as the stream.
pub fn parameters(dtype: DType, shapes: &[(&str, &[usize])]) -> Parameters {
    let mut builder = ParametersBuilder::default();
    for (stream, &(name, shape)) in shapes.iter().enumerate() {
        builder.add(name, shape, draw(shape.iter().product(), stream as u64));
    }
    builder.build(dtype).unwrap()
}

/// One parameter after another, widened to f64.
pub fn values(parameters: &Parameters) -> Vec<Vec<f64>> {
    let wide = |id| parameters.get(id).cast(DType::F64).unwrap().to_vec().unwrap();
    parameters.layout().ids().map(wide).collect()
}

/// Begins a step in which the gradient of each parameter that is not frozen is the given one.
pub fn give(parameters: &Parameters, gradients: &mut Gradients, values: &[Vec<f64>]) {
    gradients.begin_step();
    let layout = parameters.layout();
    for (id, values) in layout.ids().zip(values).filter(|&(id, _)| !layout.is_frozen(id)) {
        let tape = Tape::new();
        let parameter = tape.parameter(parameters, id);
        let same = tape.record("same", &[&parameter], parameter.value().clone(), || Same).unwrap();
        let upstream = Tensor::from_slice(values, parameter.shape().clone()).unwrap().cast(parameter.dtype()).unwrap();
        tape.backward_from(&same, upstream, gradients).unwrap();
    }
}

/// y = x, so that dx = dy.
struct Same;

impl Rule for Same {
    rule_fields!("same");

    fn backward(self: Box<Self>, upstream: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        grads.give(0, upstream)
    }
}
