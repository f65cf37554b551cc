//! What tests of the tape share: an operation, parameters, and a pass over both.
#![allow(dead_code)] // each test binary uses its own part

use autograd::{
    Gradients, InputGrads, MultiplyAdds, ParamId, Parameters, ParametersBuilder, Recompute, Result, Rule, Tape, Var,
    rule_fields,
};
use tensor::{DType, Shape, Tensor};

/// a·b, element by element; the simplest operation with two inputs.
pub fn times<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    let product = multiply(a.value(), b.value())?;
    a.tape().record("times", &[a, b], product, || Times { a: a.value().clone(), b: b.value().clone() })
}

fn multiply(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (x, y) = (a.to_vec::<f64>()?, b.to_vec::<f64>()?);
    let product: Vec<f64> = x.iter().zip(&y).map(|(x, y)| x * y).collect();
    Ok(Tensor::from_slice(&product, a.shape())?)
}

struct Times {
    a: Tensor,
    b: Tensor,
}

impl Rule for Times {
    rule_fields!("times", a, b);

    fn recompute(&self) -> Option<Recompute<'_>> {
        Some(Box::new(|| multiply(&self.a, &self.b)))
    }

    fn backward(self: Box<Self>, upstream: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        // Both open at once, as a fused kernel has them.
        let (mut da, mut db) = (grads.open(0)?, grads.open(1)?);
        let upstream = upstream.as_slice::<f64>("times")?;
        for (slot, other) in [(&mut da, &self.b), (&mut db, &self.a)] {
            let other = other.to_vec::<f64>()?;
            if let Some(mut out) = slot.out::<f64>()? {
                out.put(&upstream.iter().zip(&other).map(|(u, o)| u * o).collect::<Vec<_>>());
            }
        }
        grads.close(da);
        grads.close(db);
        Ok(())
    }

    fn multiply_adds(&self, value: &Shape) -> MultiplyAdds {
        MultiplyAdds::product(value.count())
    }
}

pub fn vector(values: &[f64]) -> Tensor {
    Tensor::from_slice(values, [values.len()]).unwrap()
}

/// Parameters p (2) and q (3).
pub fn parameters() -> (Parameters, ParamId, ParamId) {
    let mut builder = ParametersBuilder::default();
    let p = builder.add("p", [2], vec![2.0, 3.0]);
    let q = builder.add("q", [3], vec![1.0; 3]);
    (builder.build(DType::F64).unwrap(), p, q)
}

/// One pass over x·p, from a gradient of ones.
pub fn pass(parameters: &Parameters, p: ParamId, x: &[f64], gradients: &mut Gradients) {
    let tape = Tape::new();
    let y = times(&tape.constant(vector(x)), &tape.parameter(parameters, p)).unwrap();
    tape.backward_from(&y, vector(&vec![1.0; x.len()]), gradients).unwrap();
}

pub fn of(gradients: &Gradients, id: ParamId) -> Vec<f64> {
    gradients.parameter(id).unwrap().to_vec().unwrap()
}
