//! The linear layer: a matrix product over the last axis, and a bias.
//!
//! **Forward.** y = x·Wᵀ + b + e, with x (..., I), W (O, I), b (O) or none, e (..., O) or none, y (..., O). The
//! residual e is added to the layer's result: on a GPU as the product writes y, on the CPU right after it, while y is
//! still in the cache.
//!
//! **Backward.** From dy (..., O): in row n, each y[n, o] = Σᵢ x[n, i] W[o, i] + b\[o\] + e[n, o], hence
//! dx = dy·W, dW = dyᵀ·x, db = Σₙ dy\[n\], de = dy. Saved: x and W, the factors of the two products; not y.
//!
//! Operands must be contiguous, and all in f32 or all in f64; or on the CPU x and e in f32 with W and b in bf16; or on
//! a GPU x and e in bf16 with W and b in f32 or bf16. In the latter two cases all factors are rounded to bf16, and
//! products are accumulated in f32. Errors: [`tensor::Error::Shape`] when the last extents differ,
//! [`tensor::Error::NotContiguous`], [`tensor::Error::DType`], [`tensor::Error::Argument`] if the size of y overflows.
//! Source: `torch.nn.Linear`, whose weight layout this is.

pub mod cases;
mod cpu;
pub(crate) mod cuda;
pub mod reference;
pub(crate) mod tall;

use autograd::{InputGrads, MultiplyAdds, Result, Rule, Var, rule_fields};
use tensor::cpu::packed::{Packed, Right};
use tensor::cuda::Module;
use tensor::{Device, Error, Shape, Tensor, match_factor};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "x·Wᵀ + b over the last axis";

/// x (..., I) times W (O, I) transposed, plus b (O) if there is one: (..., O).
/// Operands and errors: those of the [module](mod@crate::linear).
pub fn linear<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>) -> Result<Var<'t>> {
    linear_residual(x, weight, bias, None)
}

/// The same plus a residual (..., O), if there is one.
/// Operands and errors: those of the [module](mod@crate::linear).
pub fn linear_residual<'t>(
    x: &Var<'t>,
    weight: &Var<'t>,
    bias: Option<&Var<'t>>,
    residual: Option<&Var<'t>>,
) -> Result<Var<'t>> {
    let [outputs, inputs] = weight.value().dims("linear", "a weight (O, I)")?;
    if x.shape().last() != Some(&inputs) {
        return Err(Error::shape(
            "linear",
            format!("x (..., {inputs}), as the weight is {}", weight.shape()),
            x.shape(),
        )
        .into());
    }
    if let Some(bias) = bias.filter(|bias| *bias.shape() != [outputs]) {
        return Err(Error::shape("linear", format!("a bias of ({outputs})"), bias.shape()).into());
    }
    let shape = x.shape().with(x.shape().len() - 1, outputs).countable("linear")?;
    if let Some(residual) = residual.filter(|residual| *residual.shape() != shape) {
        return Err(Error::shape("linear", format!("a residual {shape}"), residual.shape()).into());
    }
    let device = x.value().device();
    let mut y = Tensor::empty_on(&device, shape, x.dtype())?;
    let (bias_value, residual_value) = (bias.map(Var::value), residual.map(Var::value));
    match &device {
        Device::Cpu => match_factor!(weight.dtype(), "linear", F => {
            let packed = weight.value().carried::<Packed<F>>().map(Right::Packed);
            let of_weight = weight.value().as_slice("linear")?;
            cpu::forward::<F>(
                x.value().as_slice("linear")?,
                packed.unwrap_or_else(|| cpu::transposed(of_weight, [outputs, inputs])),
                bias_value.map(|bias| bias.as_slice("linear")).transpose()?,
                residual_value.map(|residual| residual.as_slice("linear")).transpose()?,
                [outputs, inputs],
                y.as_mut_slice("linear")?,
            );
        }),
        Device::Cuda(_) => cuda::forward(x.value(), weight.value(), bias_value, residual_value, &mut y)?,
    }
    let inputs: Vec<&Var<'t>> = [Some(x), Some(weight), bias, residual].into_iter().flatten().collect();
    let [bias, residual] = [bias.map(|_| 2), residual.map(|_| inputs.len() - 1)];
    x.tape().record("linear", &inputs, y, || Linear {
        x: x.value().clone(),
        weight: weight.value().clone(),
        bias,
        residual,
    })
}

/// Prepares a weight (O, I) for repeated use: on the CPU the returned tensor carries its packed form. Errors:
/// [`tensor::Error::Shape`], [`tensor::Error::NotContiguous`], [`tensor::Error::DType`].
pub fn prepared(weight: Tensor) -> tensor::Result<Tensor> {
    let extents = weight.dims("linear", "a weight (O, I)")?;
    match weight.device() {
        Device::Cpu => match_factor!(weight.dtype(), "linear", F => {
            let packed = cpu::pack::<F>(weight.as_slice("linear")?, extents);
            Ok(weight.carrying(packed))
        }),
        Device::Cuda(_) => Ok(weight),
    }
}

struct Linear {
    x: Tensor,
    weight: Tensor,
    /// The positions of bias and residual among the inputs, if there are any.
    bias: Option<usize>,
    residual: Option<usize>,
}

impl Rule for Linear {
    rule_fields!("linear", x, weight);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let extents = self.weight.dims("linear", "a weight (O, I)")?;
        if let Some(residual) = self.residual {
            grads.give(residual, dy.clone())?;
        }
        let (mut dx, mut dw) = (grads.open(0)?, grads.open(1)?);
        let mut db = grads.open(self.bias)?;
        match dy.device() {
            Device::Cpu => match_factor!(self.weight.dtype(), "linear", F => cpu::backward::<F>(
                dy.as_slice("linear")?,
                self.x.as_slice("linear")?,
                self.weight.as_slice("linear")?,
                extents,
                [dx.out()?, dw.out()?, db.out()?],
            )),
            Device::Cuda(_) => {
                cuda::write_aside([&mut dw, &mut db], &self.weight, [&dy, &self.x])?;
                if let Some(dx) = dx.out_on_gpu()? {
                    cuda::backward_input(&dy, &self.weight, dx)?;
                }
            }
        }
        [dx, dw, db].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }

    fn multiply_adds(&self, y: &Shape) -> MultiplyAdds {
        MultiplyAdds::product(y.count() * self.x.shape().last().unwrap_or(&0))
    }
}
