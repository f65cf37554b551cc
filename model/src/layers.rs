//! Layers: parameters under their state_dict names, and the operation that uses them.

use crate::error::Result;
use crate::factors::{Factors, Prepared};
use crate::pass::{Mode, Pass};
use crate::state::{Builder, Init, RunningStatistics, StatisticsId};
use autograd::{ParamId, Parameters, Var};
use ops::dwconv::SIZES;
use tensor::{DType, Device, Tensor};

/// A linear layer, x (..., I) to (..., O).
#[derive(Clone, Debug)]
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
    /// (O, I), also where the weight is stored as a 1x1 convolution's, (O, I, 1, 1).
    extents: [usize; 2],
}

impl Linear {
    /// Adds `{name}.weight` (O, I) and, with `bias`, `{name}.bias` (O). Weights start normally distributed (deviation
    /// 0.02), biases at zero. Panics if a name is taken.
    pub fn new(builder: &mut Builder, name: &str, inputs: usize, outputs: usize, bias: bool) -> Self {
        let weight = builder.parameter(format!("{name}.weight"), [outputs, inputs], Init::Normal);
        let bias = bias.then(|| builder.parameter(format!("{name}.bias"), [outputs], Init::Constant(0.0)));
        Self { weight, bias, extents: [outputs, inputs] }
    }

    /// The same function stored, and initialised, as a 1x1 convolution: the weight as (O, I, 1, 1).
    pub fn convolution(builder: &mut Builder, name: &str, inputs: usize, outputs: usize, bias: bool) -> Self {
        let init = Init::Uniform { fan_in: inputs };
        let weight = builder.parameter(format!("{name}.weight"), [outputs, inputs, 1, 1], init);
        let bias = bias.then(|| builder.parameter(format!("{name}.bias"), [outputs], init));
        Self { weight, bias, extents: [outputs, inputs] }
    }

    /// x·Wᵀ + b. Errors: those of [`ops::linear()`].
    pub fn forward<'t>(&self, pass: &Pass<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        self.plus(pass, x, None)
    }

    /// The same plus a residual (..., O), if there is one. Errors: those of [`ops::linear()`].
    pub fn plus<'t>(&self, pass: &Pass<'t>, x: &Var<'t>, residual: Option<&Var<'t>>) -> Result<Var<'t>> {
        let (weight, bias) = self.parameters(pass)?;
        Ok(ops::linear_residual(x, &weight, bias.as_ref(), residual)?)
    }

    /// Weight (O, I) and bias (O) on the tape, for fused operations that include this layer. Errors: those of
    /// [`Tape::parameter_as`](autograd::Tape::parameter_as).
    pub fn parameters<'t>(&self, pass: &Pass<'t>) -> Result<(Var<'t>, Option<Var<'t>>)> {
        Ok((pass.factor_as(self.weight, self.extents)?, self.bias.map(|bias| pass.factor(bias))))
    }

    /// Prepares the weight for many passes.
    pub(crate) fn prepare(&self, factors: &Factors, prepared: &mut Prepared) -> Result<()> {
        let weight = factors.get(self.weight).reshape(self.extents)?;
        prepared.tensors.insert(self.weight, ops::linear::prepared(weight)?);
        Ok(())
    }
}

/// A convolution with a bias, (N, H, W, I) to (N, H', W', O).
#[derive(Clone, Debug)]
pub struct Conv {
    weight: ParamId,
    bias: ParamId,
    attributes: ops::Conv2d,
}

impl Conv {
    /// Adds `{name}.weight` (O, I, K, K), for a square kernel, and `{name}.bias` (O). Panics if a name is taken.
    pub fn new(
        builder: &mut Builder,
        name: &str,
        [inputs, outputs]: [usize; 2],
        kernel: usize,
        attributes: ops::Conv2d,
    ) -> Self {
        let init = Init::Uniform { fan_in: inputs * kernel * kernel };
        let weight = builder.parameter(format!("{name}.weight"), [outputs, inputs, kernel, kernel], init);
        let bias = builder.parameter(format!("{name}.bias"), [outputs], init);
        Self { weight, bias, attributes }
    }

    /// The convolution of a map. Errors: those of [`ops::conv2d()`].
    pub fn forward<'t>(&self, pass: &Pass<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        let conv2d = if pass.applies_gelu(self.weight) { ops::conv2d_gelu } else { ops::conv2d };
        Ok(conv2d(x, &pass.factor(self.weight), Some(&pass.factor(self.bias)), self.attributes)?)
    }

    /// Prepares the weight for many passes.
    pub(crate) fn prepare(&self, factors: &Factors, prepared: &mut Prepared) -> Result<()> {
        prepared.tensors.insert(self.weight, ops::conv2d::prepared(factors.get(self.weight))?);
        Ok(())
    }

    /// The same, with the BatchNorm that follows folded in, and its GELU if it has one: s·(W·x + b) + t = (s·W)·x +
    /// (s·b + t), with s and t its scale and shift. The bias keeps the type of the parameters, as the normalisation's
    /// result would.
    pub(crate) fn prepare_with(
        &self,
        norm: &BatchNorm,
        (parameters, running): (&Parameters, &[RunningStatistics]),
        factors: DType,
        prepared: &mut Prepared,
    ) -> Result<()> {
        let (weight, bias) = (parameters.get(self.weight), parameters.get(self.bias));
        let (scale, shift) = norm.scale_and_shift(parameters, norm.running.of(running)?)?;
        let per_output = weight.count() / scale.len().max(1);
        let folded = |tensor: &Tensor, dtype, fold: &dyn Fn(usize, f64) -> f64| -> Result<Tensor> {
            // All in tensors, as their memory is what forecasts count.
            let wide = tensor.to_device(&Device::Cpu)?.cast(DType::F64)?;
            let mut folded = Tensor::empty(wide.shape().clone(), DType::F64);
            let values = wide.as_slice("prepare")?.iter().enumerate().map(|(i, &value)| fold(i, value));
            folded.as_mut_slice("prepare")?.iter_mut().zip(values).for_each(|(to, value)| *to = value);
            Ok(folded.cast(dtype)?.to_device(&tensor.device())?)
        };
        let scaled = folded(&weight, factors, &|i, weight| scale[i / per_output] * weight)?;
        prepared.tensors.insert(self.weight, ops::conv2d::prepared(scaled)?);
        let shifted = folded(&bias, bias.dtype(), &|i, bias| scale[i] * bias + shift[i])?;
        prepared.tensors.insert(self.bias, shifted);
        prepared.folded.push(norm.running);
        if norm.gelu {
            prepared.before_gelu.push(self.weight);
        }
        Ok(())
    }
}

/// A depthwise convolution of stride 1 that keeps the map's shape, (N, H, W, C).
#[derive(Clone, Debug)]
pub struct DepthwiseConv {
    weight: ParamId,
    bias: ParamId,
}

impl DepthwiseConv {
    /// Adds `{name}.weight` (C, 1, K, K), for a square kernel, and `{name}.bias` (C). Panics if a name is taken, and
    /// unless K is 3, 5 or 7.
    pub fn new(builder: &mut Builder, name: &str, channels: usize, kernel: usize) -> Self {
        assert!(SIZES.contains(&kernel), "a depthwise kernel of {kernel}x{kernel}, expected one of {SIZES:?}");
        let init = Init::Uniform { fan_in: kernel * kernel };
        let weight = builder.parameter(format!("{name}.weight"), [channels, 1, kernel, kernel], init);
        let bias = builder.parameter(format!("{name}.bias"), [channels], init);
        Self { weight, bias }
    }

    /// Weight and bias on the tape, for attention that adds this convolution as it writes its result.
    pub fn parameters<'t>(&self, pass: &Pass<'t>) -> [Var<'t>; 2] {
        [pass.parameter(self.weight), pass.parameter(self.bias)]
    }

    /// The convolution of a map. Errors: those of [`ops::dwconv()`].
    pub fn forward<'t>(&self, pass: &Pass<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        let [weight, bias] = self.parameters(pass);
        Ok(ops::dwconv(x, &weight, Some(&bias))?)
    }

    /// The map plus its convolution, with the same errors.
    pub fn residual<'t>(&self, pass: &Pass<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        let [weight, bias] = self.parameters(pass);
        Ok(ops::dwconv_residual(x, &weight, Some(&bias))?)
    }
}

/// Layer normalisation over channels, (..., C) to (..., C).
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: ParamId,
    bias: ParamId,
}

impl LayerNorm {
    /// ε
    pub const EPSILON: f64 = 1e-6;

    /// Adds `{name}.weight` and `{name}.bias`, both (C). Starts as the plain normalisation. Panics if a name is taken.
    pub fn new(builder: &mut Builder, name: &str, channels: usize) -> Self {
        let weight = builder.parameter(format!("{name}.weight"), [channels], Init::Constant(1.0));
        let bias = builder.parameter(format!("{name}.bias"), [channels], Init::Constant(0.0));
        Self { weight, bias }
    }

    /// γ and β on the tape, for fused operations that include the normalisation.
    pub fn parameters<'t>(&self, pass: &Pass<'t>) -> [Var<'t>; 2] {
        [pass.parameter(self.weight), pass.parameter(self.bias)]
    }

    /// The normalised tokens. Errors: those of [`ops::layer_norm()`].
    pub fn forward<'t>(&self, pass: &Pass<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        let [weight, bias] = self.parameters(pass);
        Ok(ops::layer_norm(x, &weight, &bias, Self::EPSILON)?)
    }
}

/// Batch normalisation over all but the channels, and GELU if it follows, (..., C) to (..., C).
#[derive(Clone, Debug)]
pub struct BatchNorm {
    weight: ParamId,
    bias: ParamId,
    running: StatisticsId,
    gelu: bool,
}

impl BatchNorm {
    const EPSILON: f64 = 1e-5;

    /// Adds `{name}.weight` and `{name}.bias`, both (C), and running statistics under the same name. Starts as the
    /// plain normalisation. Panics if a name is taken.
    pub fn new(builder: &mut Builder, name: &str, channels: usize) -> Self {
        let weight = builder.parameter(format!("{name}.weight"), [channels], Init::Constant(1.0));
        let bias = builder.parameter(format!("{name}.bias"), [channels], Init::Constant(0.0));
        Self { weight, bias, running: builder.statistics(name.to_owned(), channels), gelu: false }
    }

    /// The same with GELU after it.
    pub fn with_gelu(self) -> Self {
        Self { gelu: true, ..self }
    }

    /// The normalised map: by the batch's statistics in training, which go into the pass's trace; by the
    /// running ones otherwise, and where this layer is frozen. Errors: those of [`Pass::running`] and of
    /// [`ops::batch_norm`].
    pub fn forward<'t>(&self, pass: &Pass<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        let (weight, bias) = (pass.parameter(self.weight), pass.parameter(self.bias));
        let attributes = ops::BatchNorm { epsilon: Self::EPSILON, gelu: self.gelu };
        match pass.mode() {
            Mode::Train { .. } if !pass.is_frozen(self.weight) => {
                let (y, batch) = ops::batch_norm_train(x, &weight, &bias, attributes)?;
                pass.record_statistics(self.running, batch);
                Ok(y)
            }
            Mode::Evaluate if pass.is_folded(self.running) => Ok(x.clone()),
            _ => {
                let running = pass.running(self.running)?;
                Ok(ops::batch_norm_eval(x, &weight, &bias, &running.mean, &running.variance, attributes)?)
            }
        }
    }

    /// What it does to a channel by its running statistics: the scale γ/√(σ² + ε), and the shift β − μ·scale.
    fn scale_and_shift(&self, parameters: &Parameters, running: &RunningStatistics) -> Result<(Vec<f64>, Vec<f64>)> {
        let wide = |tensor: Tensor| tensor.cast(DType::F64)?.to_vec::<f64>();
        let (weight, bias) = (wide(parameters.get(self.weight))?, wide(parameters.get(self.bias))?);
        let (mean, variance) = (wide(running.mean.clone())?, wide(running.variance.clone())?);
        // NaN where a variance is infinite, as without folding.
        let of = |(weight, variance): (&f64, f64)| weight / (variance + Self::EPSILON).sqrt() + variance * 0.0;
        let scale: Vec<f64> = weight.iter().zip(variance).map(of).collect();
        let shift = bias.iter().zip(mean).zip(&scale).map(|((bias, mean), scale)| bias - mean * scale).collect();
        Ok((scale, shift))
    }
}
