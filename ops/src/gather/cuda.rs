//! CUDA kernels of [`gather`](super::gather): whole rows, a pack to a thread.

use tensor::cuda::{Module, Out};
use tensor::{DType, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "gather",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["gather_forward<T>", "gather_backward<T>"],
};

/// y (N, Q, D) from x (N, R, D) and indices (N, Q); `extents` are N, R and D.
pub fn forward(x: &Tensor, indices: &Tensor, [images, rows, width]: [usize; 3], y: &mut Tensor) -> Result<()> {
    indices.ensure_dtype("gather", DType::Index)?;
    let (positions, packs) = (indices.count(), width.div_ceil(x.dtype().per_pack()));
    let launch = KERNELS.launch_on(x, "gather_forward<T>")?.over(positions * packs);
    let launch = launch.input(x)?.input(indices)?.output(y)?;
    let launch = launch.count(positions).count(positions / images.max(1)).count(rows).count(width).count(packs);
    // SAFETY: x is (images, rows, width), y (positions, width), and the kernel reads no row that is not there.
    unsafe { launch.run() }
}

/// dx (N, R, D) from dy (N, Q, D): every row of dx adds up the rows of dy that were picked from it.
pub fn backward(dy: &Tensor, indices: &Tensor, [images, rows, width]: [usize; 3], dx: Out<'_>) -> Result<()> {
    dx.ensure_dtype("gather", dy.dtype())?;
    let (all_rows, picks) = (images * rows, indices.count() / images.max(1));
    let packs = width.div_ceil(dy.dtype().per_pack());
    let launch = KERNELS.launch_on(dy, "gather_backward<T>")?.over(all_rows * packs);
    let launch = launch.input(dy)?.input(indices)?.out(Some(&dx))?;
    // SAFETY: dx is (images, rows, width), dy (images, picks, width), and there is an index for each row of dy.
    unsafe { launch.count(all_rows).count(picks).count(rows).count(width).count(packs).run() }
}
