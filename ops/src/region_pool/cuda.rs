//! CUDA kernels of [`region_pool`](super::region_pool), and of [`mean_pool`](crate::mean_pool), whose map is a single
//! region.

use super::geometry::{Geometry, token_strides};
use tensor::cuda::{Module, Out};
use tensor::{Result, Tensor};

pub static KERNELS: Module = Module {
    name: "region_pool",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["region_pool_forward<T>", "region_pool_backward<T>"],
};

/// y (N, P, C) from x (N, H, W, C).
pub fn forward(op: &'static str, x: &Tensor, g: Geometry, y: &mut Tensor) -> Result<()> {
    token_strides(op, x)?;
    let (images, [down, across], [h, w], channels) = (g.images, g.regions.grid(), g.regions.size(), g.channels);
    let (count, packs) = (images * down * across, channels.div_ceil(x.dtype().per_pack()));
    // Small blocks: the mean of a last map is too few threads to fill a GPU with large ones.
    let launch = KERNELS.launch_on(x, "region_pool_forward<T>")?.threads(64).over(count * packs);
    let launch = launch.view(x)?.output(y)?.count(count).extents([down, across, h, w, channels, packs])?;
    // SAFETY: x is (images, down·h, across·w, channels) with channels side by side, y (count, channels).
    unsafe { launch.run() }
}

/// dx (N, H, W, C) from dy (N, P, C).
pub fn backward(dy: &Tensor, g: Geometry, dx: Out<'_>) -> Result<()> {
    let (images, [down, across], [h, w], channels) = (g.images, g.regions.grid(), g.regions.size(), g.channels);
    dx.ensure_dtype("region_pool", dy.dtype())?;
    let packs = channels.div_ceil(dy.dtype().per_pack());
    let launch = KERNELS.launch_on(dy, "region_pool_backward<T>")?.blocks(images * down * h);
    let launch = launch.input(dy)?.out(Some(&dx))?.extents([across, h, w, channels, packs, across * w * packs])?;
    // SAFETY: dy is (images, down·across, channels), dx (images, down·h, across·w, channels).
    unsafe { launch.run() }
}
