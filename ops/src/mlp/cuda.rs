//! CUDA kernel of [`mlp`](super::mlp). Its gradients are computed by the kernels of its parts.

use super::{Mlp, MlpLayers};
use crate::{gelu, layer_norm, linear};
use autograd::{InputGrads, MultiplyAdds, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{DType, Shape, Tensor};

pub static KERNELS: Module = Module {
    name: "mlp",
    source: include_str!("kernel.cu"),
    headers: &[gelu::cuda::NORMAL],
    kernels: &["mlp_forward<64|96>"],
};

/// Rows and threads of a block, as in the kernel.
const ROWS: usize = 128;
const THREADS: usize = 256;

/// A call of the kernel: its operands in their order.
pub struct FusedMlp<'v, 't> {
    inputs: [&'v Var<'t>; 7],
}

impl<'v, 't> FusedMlp<'v, 't> {
    /// `None` if there is no kernel for these operands, or if they are invalid, which the parts will report.
    pub fn of(x: &'v Var<'t>, layers: MlpLayers<'v, 't>) -> Option<Self> {
        let gpu = x.value().gpu("mlp").ok()?;
        let MlpLayers { norm: [gamma, beta], first: (w1, b1), second: (w2, b2) } = layers;
        let (&[hidden, channels], b1, b2) = (&w1.shape()[..], b1?, b2?) else { return None };
        let shapes: [(&Var<'_>, &[usize]); 5] =
            [(gamma, &[channels]), (beta, &[channels]), (b1, &[hidden]), (w2, &[channels, hidden]), (b2, &[channels])];
        let fit =
            x.shape().last() == Some(&channels) && shapes.iter().all(|(operand, shape)| operand.shape()[..] == **shape);
        let known = x.dtype() == DType::Bf16 && [64, 96].contains(&channels) && hidden.is_multiple_of(8);
        let wide = [gamma, beta].iter().all(|parameter| parameter.dtype() == DType::F32);
        let roundable = [w1, b1, w2, b2].iter().all(|parameter| parameter.dtype().of_sums() == DType::F32);
        // The kernel reads packs; operands still to be rounded to bf16 will be copied to aligned memory.
        let in_packs = |operand: &Var<'_>| match operand.value().address("mlp", gpu) {
            Ok(address) => operand.dtype() != DType::Bf16 || address.is_multiple_of(16),
            Err(_) => false,
        };
        let packs = x.value().is_contiguous() && [x, w1, w2].into_iter().all(in_packs);
        let usable = fit && known && wide && roundable && packs && x.value().count() * hidden > 0;
        usable.then_some(Self { inputs: [x, gamma, beta, w1, b1, w2, b2] })
    }

    /// The MLP, on the tape.
    pub fn run(self, attributes: Mlp) -> Result<Var<'t>> {
        let inputs = self.inputs;
        let [x, gamma, beta, w1, b1, w2, b2] = inputs;
        let (device, shape) = (x.value().device(), x.shape().clone());
        let (hidden, channels) = (w1.shape()[0], w1.shape()[1]);
        let rows = shape.count() / channels;
        let round = |operand: &Var<'_>| operand.value().cast(DType::Bf16);
        let (w1, b1, w2, b2) = (round(w1)?, round(b1)?, round(w2)?, round(b2)?);
        let mut y = Tensor::empty_on(&device, shape.clone(), DType::Bf16)?;
        // What only the gradients need.
        let wanted = inputs.iter().any(|input| input.node().is_some());
        let kept =
            |shape: Shape, dtype| Tensor::empty_on(&device, if wanted { shape } else { Shape::from([0]) }, dtype);
        let wide = shape.with(shape.len() - 1, hidden);
        let [mut mean, mut rstd] = [kept([rows].into(), DType::F32)?, kept([rows].into(), DType::F32)?];
        let mut pre_gelu = kept(wide, DType::Bf16)?;
        let launch = KERNELS.launch_on(x.value(), &format!("mlp_forward<{channels}>"))?;
        let launch = launch.threads(THREADS).blocks(rows.div_ceil(ROWS)).shared(shared(channels));
        let launch = launch.input(x.value())?.input(gamma.value())?.input(beta.value())?;
        let launch = launch.number(attributes.epsilon, DType::Bf16).input(&w1)?.input(&b1)?.input(&w2)?.input(&b2)?;
        let mut launch = launch.int(attributes.residual.into()).output(&mut y)?;
        for kept in [&mut mean, &mut rstd, &mut pre_gelu] {
            launch = launch.optional_output(wanted.then_some(kept))?;
        }
        // SAFETY: `of` has seen to the shapes, and what is kept has a place for each row.
        unsafe { launch.count(rows).extents([hidden])?.run()? };
        x.tape().record("mlp", &inputs, y, || {
            let [x, gamma, beta] = [x, gamma, beta].map(|operand| operand.value().clone());
            MlpRule { x, mean, rstd, pre_gelu, gamma, beta, w1, w2, residual: attributes.residual }
        })
    }
}

/// What the kernel saves for the backward pass of a whole MLP. The normalised map is computed again: that is one pass
/// more over a map of C channels, and a step keeps one less for each such block.
struct MlpRule {
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    /// The hidden map before GELU. After it, it is computed again: maps three times as wide as x are what a step has
    /// most of in memory, and GELU's backward pass reads this one anyway.
    pre_gelu: Tensor,
    gamma: Tensor,
    beta: Tensor,
    w1: Tensor,
    w2: Tensor,
    residual: bool,
}

impl Rule for MlpRule {
    rule_fields!("mlp", x, mean, rstd, pre_gelu, gamma, beta, w1, w2);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let MlpRule { x, mean, rstd, pre_gelu, gamma, beta, w1, w2, residual } = *self;
        let mut open = |input: usize| grads.open(input);
        let [mut dgamma, mut dbeta, mut dw1, mut db1, mut dw2, mut db2] =
            [open(1)?, open(2)?, open(3)?, open(4)?, open(5)?, open(6)?];
        let mut dpost_gelu = pre_gelu.empty_like()?;
        linear::cuda::backward_input(&dy, &w2, dpost_gelu.as_out("mlp", false)?)?;
        let [mut dpre_gelu, mut post_gelu] = [pre_gelu.empty_like()?, pre_gelu.empty_like()?];
        gelu::cuda::backward(&dpost_gelu, &pre_gelu, dpre_gelu.as_out("mlp", false)?, Some(&mut post_gelu))?;
        drop([dpost_gelu, pre_gelu]);
        linear::cuda::write_aside([&mut dw2, &mut db2], &w2, [&dy, &post_gelu])?;
        drop(post_gelu);
        let [mut normed, mut dnormed] = [x.empty_like()?, x.empty_like()?];
        layer_norm::cuda::recompute(&x, [&gamma, &beta], [&mean, &rstd], &mut normed)?;
        linear::cuda::write_aside([&mut dw1, &mut db1], &w1, [&dpre_gelu, &normed])?;
        linear::cuda::backward_input(&dpre_gelu, &w1, dnormed.as_out("mlp", false)?)?;
        drop([dpre_gelu, normed]);
        // Not earlier: later gradients are accumulated in place into one that is given whole, and dy was still needed
        // above.
        if residual {
            grads.give(0, dy)?;
        }
        let mut dx = grads.open_in(0, x.dtype())?;
        let parameters = [&mut dgamma, &mut dbeta];
        layer_norm::cuda::backward(&dnormed, &x, &gamma, [&mean, &rstd], dx.out_on_gpu()?, parameters)?;
        [dx, dgamma, dbeta, dw1, db1, dw2, db2].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }

    fn multiply_adds(&self, y: &Shape) -> MultiplyAdds {
        MultiplyAdds::product(2 * y.count() * self.w1.shape()[0])
    }
}

/// Bytes of the two chunks of weights that `mlp_forward` has in shared memory.
fn shared(channels: usize) -> usize {
    let (chunk, pad) = (64, 32);
    let first = if channels.is_multiple_of(64) { channels + pad } else { channels };
    2 * (chunk * first + channels * (chunk + pad)) * DType::Bf16.size()
}
