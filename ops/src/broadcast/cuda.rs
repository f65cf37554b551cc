//! The same on a GPU, with the kernels of the operation that calls it.

use super::{last_repeated, summed};
use tensor::cuda::elements::sum_rows;
use tensor::cuda::{Module, Out, elements};
use tensor::{DType, Result, Shape, Tensor};

/// out[i] = f(a[i], b[i]) over the common shape, by one of the module's two kernels: `<name>_values(const T* a, Layout,
/// const T* b, Layout, T* out, i64 count)` for any views, and `<name>_packs(const T* a, const T* b, T* out, i64 count)`
/// with a thread to a pack. Beside a map in bf16, b may be a parameter in f32, which is rounded.
pub fn zip(module: &'static Module, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let shape = a.shape().broadcast(b.shape(), module.name)?;
    let (dtype, count) = (a.dtype(), shape.count());
    let b = if (dtype, b.dtype()) == (DType::Bf16, DType::F32) { &b.cast(dtype)? } else { b };
    b.ensure_dtype(module.name, dtype)?;
    let mut out = Tensor::empty_on(&a.device(), shape.clone(), dtype)?;
    let kernel = |end: &str| module.launch_on(a, &format!("{}_{end}<T>", module.name));
    let launch = if a.shape() == b.shape() && a.is_contiguous() && b.is_contiguous() {
        kernel("packs")?.over_packs(count, dtype).input(a)?.input(b)?
    } else {
        let (a, b) = (a.broadcast_to(shape.clone())?, b.broadcast_to(shape)?);
        kernel("values")?.over(count).elements(&a)?.elements(&b)?
    };
    // SAFETY: a and b are views of `count` elements, as many as the result has, of one type.
    unsafe { launch.output(&mut out)?.count(count).run()? };
    Ok(out)
}

/// Sums `gradient` over the axes along which an operand of shape `to` was broadcast, in a fixed order: first over the
/// last run of neighbouring broadcast axes, then over the remaining ones.
pub fn reduce(op: &'static str, gradient: &Tensor, to: &Shape, out: Out<'_>) -> Result<()> {
    let whole = gradient.shape();
    let Some((axes, others)) = last_repeated(whole, to) else { return elements::put(out, gradient) };
    let (first, last) = (*axes.start(), *axes.end());
    let product = |extents: &[usize]| extents.iter().product();
    let extents = [product(&whole[..first]), product(&whole[first..=last]), product(&whole[last + 1..])];
    if !others {
        return sum_rows(gradient, extents, out);
    }
    let mut sums = Tensor::empty_on(&gradient.device(), summed(whole, &axes), gradient.dtype().of_sums())?;
    sum_rows(gradient, extents, sums.as_out(op, false)?)?;
    reduce(op, &sums, to, out)
}
