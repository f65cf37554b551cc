//! Convolution of images, channels last.
//!
//! **Forward.** y[n, i, j, o] = bias\[o\] + Σ_{a,b,c} x[n, i·s + a − p, j·s + b − p, c] · w[o, c, a, b], with x
//! (N, H, W, I), w (O, I, KH, KW), b (O) or none, stride s, p rows and columns of zeros around the image, and y
//! (N, (H + 2p − KH)/s + 1, (W + 2p − KW)/s + 1, O), rounded down. As a matrix product: let the row of
//! `patches` for output pixel (n, i, j) be the KH·KW·I inputs that it sees; then y = patches·W, with W
//! (KH·KW·I, O) the weight with its axes reordered.
//!
//! **Backward.** From y = patches·W + b, as for a linear layer: dW = patchesᵀ·dy, db = Σ dy over the pixels, and
//! dpatches = dy·Wᵀ, each element of which is added to the element of dx that the patch had copied. Saved: x and w. On
//! the CPU the patches, KH·KW/s² times as large as x, are not materialised: the products read them from bands, copies
//! of some rows of x, and dx is computed as a convolution of dy. On a GPU they are materialised (im2col) for some
//! images at a time, but not in bf16 with up to 192 outputs: there products on tensor cores gather them from x, or from
//! dy, as they go.
//!
//! Operands must be contiguous, and all in f32 or all in f64; or on the CPU x in f32 with w in bf16 and b in either; or
//! on a GPU x in bf16 with w and b in f32 or bf16. In the latter two cases all factors are rounded to bf16, and
//! products are accumulated in f32. Errors: [`tensor::Error::Shape`], [`tensor::Error::Argument`] for a stride of zero,
//! [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source: `torch.nn.Conv2d`, whose weight layout this is.

pub mod cases;
mod cpu;
mod cuda;
mod geometry;
pub mod reference;

use crate::gelu::gelu_of;
use autograd::{InputGrads, MultiplyAdds, Result, Rule, Slot, Var, rule_fields};
use geometry::Geometry;
use std::borrow::Cow;
use tensor::cpu::factor::Factor;
use tensor::cpu::packed::Packed;
use tensor::cpu::parallel::sum_rows;
use tensor::cuda::Module;
use tensor::{Device, Element, Error, Shape, Tensor, match_factor};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "images convolved with a dense kernel";

/// How a kernel moves over an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2d {
    /// Pixels from one position of the kernel to the next, in both directions; at least 1.
    pub stride: usize,
    /// Rows and columns of zeros on each side of the image.
    pub padding: usize,
}

/// x (N, H, W, I) convolved with `weight` (O, I, KH, KW), plus `bias` (O) if there is one: (N, HO, WO, O).
/// Operands and errors: those of the [module](mod@crate::conv2d).
pub fn conv2d<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>, window: Conv2d) -> Result<Var<'t>> {
    convolve(x, weight, bias, window, false)
}

/// GELU of the convolution. In inference, which needs no value before GELU, a GPU applies it as it stores the result,
/// before that is rounded to bf16. So within a [segment](autograd::Tape::segment), which is computed once as in
/// inference and then again, use [`conv2d`] and [`gelu`](crate::gelu()) instead.
/// Operands and errors: those of the [module](mod@crate::conv2d).
pub fn conv2d_gelu<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>, window: Conv2d) -> Result<Var<'t>> {
    if x.tape().is_inference() && x.value().device() != Device::Cpu {
        return convolve(x, weight, bias, window, true);
    }
    gelu_of(conv2d(x, weight, bias, window)?)
}

/// The convolution, or on a GPU GELU of it.
fn convolve<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>, window: Conv2d, gelu: bool) -> Result<Var<'t>> {
    let geometry = geometry(x.value(), weight.value(), window)?;
    let Geometry { images, output: [height, width], outputs, .. } = geometry;
    if let Some(bias) = bias.filter(|bias| *bias.shape() != [outputs]) {
        return Err(Error::shape("conv2d", format!("a bias of ({outputs})"), bias.shape()).into());
    }
    let device = x.value().device();
    let mut y = Tensor::empty_on(&device, [images, height, width, outputs], x.dtype())?;
    match device {
        Device::Cpu => match_factor!(weight.dtype(), "conv2d", F => {
            let mut packed = None;
            let packed = match weight.value().carried() {
                Some(packed) => packed,
                None => &*packed.insert(pack::<F>(weight.value())?),
            };
            let bias = bias.map(|bias| in_sums::<F>(bias.value())).transpose()?;
            let (x, y) = (x.value().as_slice("conv2d")?, y.as_mut_slice("conv2d")?);
            cpu::forward::<F>(geometry, x, packed, bias.as_deref(), y);
        }),
        Device::Cuda(_) => cuda::forward(&geometry, x.value(), weight.value(), bias.map(Var::value), gelu, &mut y)?,
    }
    let rule = || Convolution { x: x.value().clone(), weight: weight.value().clone(), geometry };
    let inputs: Vec<_> = [Some(x), Some(weight), bias].into_iter().flatten().collect();
    x.tape().record("conv2d", &inputs, y, rule)
}

/// Prepares a weight (O, I, KH, KW) for repeated use: on the CPU the returned tensor carries its packed form. Errors:
/// [`tensor::Error::Shape`], [`tensor::Error::NotContiguous`], [`tensor::Error::DType`].
pub fn prepared(weight: Tensor) -> tensor::Result<Tensor> {
    match weight.device() {
        Device::Cpu => match_factor!(weight.dtype(), "conv2d", F => {
            let packed = pack::<F>(&weight)?;
            Ok(weight.carrying(packed))
        }),
        Device::Cuda(_) => Ok(weight),
    }
}

fn pack<F: Factor>(weight: &Tensor) -> tensor::Result<Packed<F>> {
    Ok(cpu::pack::<F>(weight.as_slice("conv2d")?, weight.dims("conv2d", "a weight (O, I, KH, KW)")?))
}

/// A bias in the type that products are summed in.
fn in_sums<F: Factor>(bias: &Tensor) -> tensor::Result<Cow<'_, [F::Sum]>> {
    if bias.dtype() == F::Sum::DTYPE {
        return Ok(Cow::Borrowed(bias.as_slice("conv2d")?));
    }
    Ok(Cow::Owned(bias.as_slice::<F>("conv2d")?.iter().map(|bias| bias.widen()).collect()))
}

fn geometry(x: &Tensor, weight: &Tensor, Conv2d { stride, padding }: Conv2d) -> tensor::Result<Geometry> {
    let [images, height, width, inputs] = x.dims("conv2d", "x (N, H, W, I)")?;
    let [outputs, weight_inputs, down, across] = weight.dims("conv2d", "a weight (O, I, KH, KW)")?;
    if weight_inputs != inputs || down == 0 || across == 0 {
        let expected = format!("a weight (O, {inputs}, KH, KW) with KH and KW of at least 1, as x is {}", x.shape());
        return Err(Error::shape("conv2d", expected, weight.shape()));
    }
    if stride == 0 {
        return Err(Error::argument("conv2d", "a stride of 0; it must be at least 1"));
    }
    let positions = |extent: usize, kernel: usize| {
        let padded = padding.checked_mul(2)?.checked_add(extent)?;
        Some(padded.checked_sub(kernel)? / stride + 1)
    };
    // The kernels copy rows of the padded image, so that must be countable too.
    let padded = |extent: usize| extent.saturating_add(padding.saturating_mul(2));
    let can_be = |rows: usize, columns: usize| {
        let shapes = [[images, rows, columns, outputs], [images, padded(height), padded(width), inputs]];
        shapes.into_iter().all(|shape| Shape::from(shape).countable("conv2d").is_ok())
    };
    let output = positions(height, down).zip(positions(width, across));
    let Some((rows, columns)) = output.filter(|&(rows, columns)| can_be(rows, columns)) else {
        let expected = format!("an image that a {down}x{across} kernel fits into with padding {padding}");
        return Err(Error::shape("conv2d", expected, x.shape()));
    };
    Ok(Geometry {
        images,
        input: [height, width],
        inputs,
        kernel: [down, across],
        output: [rows, columns],
        outputs,
        stride,
        padding,
    })
}

struct Convolution {
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
}

impl Rule for Convolution {
    rule_fields!("conv2d", x, weight);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let (mut dx, mut dweight, mut dbias) = (grads.open_in(0, dy.dtype())?, grads.open(1)?, grads.open(2)?);
        let Convolution { x, weight, geometry } = *self;
        match dy.device() {
            Device::Cpu => match_factor!(weight.dtype(), "conv2d", F => {
                let dy = dy.as_slice("conv2d")?;
                if let Some(dx) = dx.out()? {
                    cpu::backward_input::<F>(geometry, dy, weight.as_slice("conv2d")?, dx);
                }
                if let Some(dweight) = dweight.out()? {
                    cpu::backward_weight::<F>(geometry, dy, x.as_slice("conv2d")?, dweight);
                }
                if let Some(dbias) = dbias.out()? {
                    sum_rows(dy, dbias);
                }
            }),
            Device::Cuda(_) => {
                // SAFETY: it reads these tensors alone, and writes to the places that it is given.
                unsafe {
                    Slot::write_aside([&mut dweight, &mut dbias], &[&dy, &x], |outs| {
                        Ok(cuda::backward_weight(&geometry, &dy, &x, outs)?)
                    })?;
                }
                if let Some(dx) = dx.out_on_gpu()? {
                    cuda::backward_input(&geometry, &dy, &weight, dx)?;
                }
            }
        }
        [dx, dweight, dbias].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }

    /// Counts all positions of the kernel, including those that read padding.
    fn multiply_adds(&self, y: &Shape) -> MultiplyAdds {
        MultiplyAdds::product(y.count() * self.weight.shape()[1..].iter().product::<usize>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use autograd::Tape;
    use tensor::DType;

    #[test]
    fn what_does_not_fit_is_refused() {
        let refused = |x: [usize; 4], weight: [usize; 4], stride, padding| {
            let tape = Tape::inference();
            let [x, weight] = [x, weight].map(|shape| tape.constant(Tensor::zeros(shape, DType::F32)));
            match conv2d(&x, &weight, None, Conv2d { stride, padding }) {
                Err(autograd::Error::Tensor(error)) => error,
                other => panic!("{other:?}"),
            }
        };
        let argument = refused([1, 4, 4, 3], [2, 3, 3, 3], 0, 1);
        assert!(matches!(argument, Error::Argument { op: "conv2d", .. }), "{argument}");
        for (x, weight, stride, padding) in [
            ([1, 4, 4, 3], [2, 2, 3, 3], 1, 1),
            ([1, 4, 4, 3], [2, 3, 0, 3], 1, 1),
            ([1, 4, 2, 3], [2, 3, 3, 3], 1, 0),
            ([1, 4, 4, 3], [2, 3, 3, 3], 1, usize::MAX),
            ([1, 4, 4, 3], [2, 3, 3, 3], 1, usize::MAX / 4),
            ([1, 4, 4, 3], [2, 3, 3, 3], usize::MAX / 4, usize::MAX / 4),
            ([0, 4, 4, 3], [2, 3, 3, 3], 1, 1 << 32),
            ([1, 4, 4, 3], [0, 3, 3, 3], 1, 1 << 32),
        ] {
            let error = refused(x, weight, stride, padding);
            assert!(matches!(error, Error::Shape { op: "conv2d", .. }), "{error}");
        }
    }
}
