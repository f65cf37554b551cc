//! The optimiser's sweeps on a GPU.

use crate::adamw::Factors;
use std::sync::Arc;
use tensor::cuda::{Gpu, Module};
use tensor::{DType, Device, Result, Tensor};

/// The kernels.
pub static KERNELS: Module = Module {
    name: "optim",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["sum_squares<T>", "adamw<float>", "adamw<double>", "follow<float>", "follow<double>"],
};

/// Elements that make a piece of the norm's sum, and the most pieces.
const PIECE: usize = 1 << 14;
const MOST_PIECES: usize = 1024;

/// The name of a kernel that has no form for bf16: parameters are f32 or f64.
fn for_parameters(dtype: DType, [single, double]: [&'static str; 2]) -> &'static str {
    if dtype == DType::F64 { double } else { single }
}

/// √Σ x², summed in f64 in an order that depends on the number of elements alone.
pub fn norm(gpu: &Arc<Gpu>, x: &Tensor) -> Result<f64> {
    let pieces = x.count().div_ceil(PIECE).clamp(1, MOST_PIECES);
    let mut partial = Tensor::empty_on(&x.device(), [pieces], DType::F64)?;
    let launch = KERNELS.launch(gpu, "sum_squares<T>", x.dtype())?.blocks(pieces);
    // SAFETY: there is a place for each piece's sum.
    unsafe { launch.input(x)?.output(&mut partial)?.count(x.count()).run()? };
    Ok(partial.to_vec::<f64>()?.into_iter().sum::<f64>().sqrt())
}

/// One step of AdamW: parameters, gradients and both moments, flat; and a bit for each cache line of them, whether it
/// decays.
pub(crate) fn adamw(
    gpu: &Arc<Gpu>,
    f: &Factors<f64>,
    [p, m, v]: [&mut Tensor; 3],
    gradients: &Tensor,
    decays: &Tensor,
) -> Result<()> {
    let (count, dtype) = (p.count(), p.dtype());
    let kernel = for_parameters(dtype, ["adamw<float>", "adamw<double>"]);
    let launch = KERNELS.launch(gpu, kernel, dtype)?.over(count);
    let launch = launch.output(p)?.input(gradients)?.output(m)?.output(v)?.input(decays)?.count(count);
    let numbers = [f.scale, f.keep, f.rate_m, f.beta_v, f.rate_v, f.root, f.eps, f.step];
    // SAFETY: all four are of one layout, whose lines have a bit each.
    unsafe { numbers.into_iter().fold(launch, |launch, number| launch.number(number, dtype)).run() }
}

/// e ← e + rate·(p − e)
pub fn follow(gpu: &Arc<Gpu>, e: &mut Tensor, p: &Tensor, rate: f64) -> Result<()> {
    let (count, dtype) = (p.count(), p.dtype());
    let kernel = for_parameters(dtype, ["follow<float>", "follow<double>"]);
    let launch = KERNELS.launch(gpu, kernel, dtype)?.over(count);
    // SAFETY: both are of one layout.
    unsafe { launch.output(e)?.input(p)?.number(rate, dtype).count(count).run() }
}

/// A bit for each cache line of a flat buffer, from runs of elements (their end, and whether they decay).
pub fn line_bits(
    device: &Device,
    len: usize,
    dtype: DType,
    runs: impl Iterator<Item = (usize, bool)>,
) -> Result<Tensor> {
    let per_line = tensor::ALIGNMENT / dtype.size();
    let lines = len.div_ceil(per_line);
    let mut words = vec![0u32; lines.div_ceil(32).max(1)];
    let mut line = 0;
    for (end, decays) in runs {
        for line in line..end.div_ceil(per_line) {
            words[line / 32] |= u32::from(decays) << (line % 32);
        }
        line = end.div_ceil(per_line);
    }
    Tensor::from_slice(&words, [words.len()])?.to_device(device)
}
