//! The GPU's side of [`linear`](super::linear): matrix products by cuBLASLt, and the bias; and a kernel for the
//! gradients of weight and bias where they are bound by memory.

use super::tall::{self, Tall};
use autograd::Slot;
use tensor::cuda::elements::{add_pieces, sum_rows};
use tensor::cuda::{Gemm, Matrix, Module, Out};
use tensor::{Result, Tensor};

pub static KERNELS: Module = Module {
    name: "linear",
    source: include_str!("kernel.cu"),
    headers: &[tall::HEADER],
    kernels: &["linear_backward_weight"],
};

/// The most multiply-adds for each element that is read with which our kernel is used: tensor cores do about 150 while
/// memory delivers one, so with fewer it matters that every element is read just once.
const INTENSITY: usize = 96;

/// [`Error::DType`](tensor::Error::DType) unless a weight and a bias go with x: they are in its type, or that of its
/// sums.
pub fn ensure_dtypes(op: &'static str, x: &Tensor, parameters: [Option<&Tensor>; 2]) -> Result<()> {
    let wrong = |parameter: &&Tensor| ![x.dtype(), x.dtype().of_sums()].contains(&parameter.dtype());
    parameters.into_iter().flatten().find(wrong).map_or(Ok(()), |wrong| wrong.ensure_dtype(op, x.dtype()))
}

/// y (R, O) = x (R, I) · weight (O, I)ᵀ + bias (O) + residual (R, O).
pub fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    let [rows, outputs, inputs] = extents(weight, [y.count(), x.count()])?;
    ensure_dtypes("linear", x, [Some(weight), bias])?;
    let weight = weight.cast(x.dtype())?;
    let product = Gemm::new("linear", Matrix::plain(x), Matrix::transposed(&weight), [rows, outputs, inputs]);
    product.row(bias).plus(residual).into(y.as_out("linear", false)?)
}

/// dx (R, I) from dy (R, O).
pub fn backward_input(dy: &Tensor, weight: &Tensor, dx: Out<'_>) -> Result<()> {
    let [rows, outputs, inputs] = extents(weight, [dy.count(), dx.count()])?;
    let weight = weight.cast(dy.dtype())?;
    Gemm::new("linear", Matrix::plain(dy), Matrix::plain(&weight), [rows, inputs, outputs]).into(dx)
}

/// dweight (O, I) and dbias (O), if they are wanted, from dy (R, O) and x (R, I); `extents` are R, O and I.
pub fn backward_weight(
    [dy, x]: [&Tensor; 2],
    extents: [usize; 3],
    [dweight, dbias]: [Option<Out<'_>>; 2],
) -> Result<()> {
    let [rows, outputs, inputs] = extents;
    let Some(dweight) = dweight else {
        return dbias.map_or(Ok(()), |dbias| sum_rows(dy, [1, rows, outputs], dbias));
    };
    if let Some(tall) = Tall::of(extents, INTENSITY, &dweight, dbias.as_ref())
        && tall::in_packs(dy, rows * outputs)?
        && tall::in_packs(x, rows * inputs)?
    {
        return multiply(&tall, [dy, x], dweight, dbias);
    }
    Gemm::new("linear", Matrix::transposed(dy), Matrix::plain(x), [outputs, inputs, rows]).into(dweight)?;
    dbias.map_or(Ok(()), |dbias| sum_rows(dy, [1, rows, outputs], dbias))
}

/// The gradients of a weight (O, I) and a bias (O) [aside](Slot::write_aside), from dy (R, O) and x (R, I).
pub fn write_aside(slots: [&mut Slot<'_>; 2], weight: &Tensor, [dy, x]: [&Tensor; 2]) -> autograd::Result<()> {
    let extents = extents(weight, [dy.count(), x.count()])?;
    // SAFETY: it reads these tensors alone, and writes to the places that it is given.
    unsafe { Slot::write_aside(slots, &[dy, x], |outs| Ok(backward_weight([dy, x], extents, outs)?)) }
}

/// The same by our kernels. The maps are [in packs](tall::in_packs).
pub(super) fn multiply(tall: &Tall, [dy, x]: [&Tensor; 2], dweight: Out<'_>, dbias: Option<Out<'_>>) -> Result<()> {
    let mut partial = tall.partial(dy, dbias.is_some())?;
    let launch = KERNELS.launch_on(dy, "linear_backward_weight")?.input(dy)?.input(x)?;
    let launch = launch.output(&mut partial)?.int(dbias.is_some().into());
    // SAFETY: the maps have the extents that `tall` describes.
    unsafe { tall.describe(launch)?.run()? };
    add_pieces(&partial, [Some(dweight), dbias])
}

/// R, O and I: of a weight (O, I), and from how many elements y (R, O) and x (R, I) have, as one of the two may have no
/// columns.
fn extents(weight: &Tensor, [of_y, of_x]: [usize; 2]) -> Result<[usize; 3]> {
    let [outputs, inputs] = weight.dims("linear", "a weight (O, I)")?;
    let rows = of_x.checked_div(inputs).or(of_y.checked_div(outputs)).unwrap_or(0);
    Ok([rows, outputs, inputs])
}
