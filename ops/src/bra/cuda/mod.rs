//! CUDA kernels of [`bra`](mod@super).
//!
//! | file | what it holds |
//! |---|---|
//! | `routing.cuh` | region means, the choice of regions, the inverted list |
//! | `attention.cuh` | attention, forward and backward, for any type |
//! | `geometry.cuh` | where tokens, heads and regions lie |

use super::geometry::Geometry;
use std::sync::Arc;
use tensor::cuda::{Gpu, Launch, Module, Out};
use tensor::{DType, Device, Error, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "bra",
    source: include_str!("kernel.cu"),
    headers: &[
        ("geometry.cuh", include_str!("geometry.cuh")),
        ("routing.cuh", include_str!("routing.cuh")),
        ("attention.cuh", include_str!("attention.cuh")),
    ],
    kernels: &[
        "region_means<T>",
        "choose_regions<T>",
        "invert_routes",
        "attend<T>",
        "attend_backward_queries<T>",
        "attend_backward_keys<T>",
    ],
};

/// Tokens of a tile, as in `attention.cuh`.
const QUERIES: usize = 16;
const KEYS: usize = 32;

/// The geometry as kernels take it.
fn with_geometry(launch: Launch<'_>, g: Geometry) -> Result<Launch<'_>> {
    let Geometry { map: [height, width], grid: [rows, cols], heads, qk_dim, v_dim, topk, .. } = g;
    launch.extents([height, width, rows, cols, heads, qk_dim, v_dim, topk])
}

/// Blocks for tiles of `size` tokens of each region, head and image.
fn tiles(g: Geometry, size: usize) -> usize {
    g.images * g.heads * g.regions() * g.region_tokens().div_ceil(size)
}

/// routes (N, P, k) and logits (N, P, k) of qkv (N, H, W, 2D + C).
pub fn route(
    gpu: &Arc<Gpu>,
    g: Geometry,
    valid: [usize; 2],
    scale: f64,
    qkv: &Tensor,
    [routes, logits]: [&mut Tensor; 2],
) -> Result<()> {
    let (dtype, device) = (qkv.dtype(), qkv.device());
    let regions = g.regions();
    let mut means = Tensor::empty_on(&device, [g.images, regions, 2 * g.qk_dim], dtype.wide())?;
    let launch = KERNELS.launch(gpu, "region_means<T>", dtype)?.grid([regions, g.images, 1]).input(qkv)?;
    let launch = with_geometry(launch.output(&mut means)?.extents(valid)?, g)?;
    // SAFETY: qkv is a map of this geometry, and there is a place for each region's means.
    unsafe { launch.run()? };
    // A warp keeps the affinities of its region in shared memory.
    let row = regions * dtype.wide().size();
    let most = gpu.driver().properties().shared_memory;
    let warps = (most / 2 / row).clamp(1, 8);
    if row > most {
        return Err(Error::argument("bra", format!("{regions} regions are more than a GPU routes; use fewer")));
    }
    let launch = KERNELS.launch(gpu, "choose_regions<T>", dtype)?.threads(32 * warps).shared(warps * row);
    let launch = launch.blocks((g.images * regions).div_ceil(warps)).input(&means)?.number(scale, dtype);
    let launch = launch.output(routes)?.output(logits)?;
    // SAFETY: there are means for each region of each image, and room for k choices.
    unsafe { launch.extents([g.images, regions, g.qk_dim, g.topk])?.run() }
}

/// out (N, H, W, C) and lse (N, heads, H·W) of qkv (N, H, W, 2D + C).
pub fn forward(
    gpu: &Arc<Gpu>,
    g: Geometry,
    qkv: &Tensor,
    routes: &Tensor,
    scale: f64,
    out: &mut Tensor,
    lse: &mut Tensor,
) -> Result<()> {
    let [d, dv] = g.head_dims();
    let elements = QUERIES * d + KEYS * (d + 1) + KEYS * dv + QUERIES * KEYS + QUERIES * dv + 3 * QUERIES;
    let launch = KERNELS.launch(gpu, "attend<T>", qkv.dtype())?.threads(128).blocks(tiles(g, QUERIES));
    let launch = launch.shared(elements * qkv.dtype().wide().size()).input(qkv)?.input(routes)?;
    let launch = launch.number(scale, qkv.dtype()).output(out)?.output(lse)?;
    // SAFETY: the tensors are those of this geometry, and routes are regions of the map.
    unsafe { with_geometry(launch, g)?.run() }
}

/// dqkv (N, H, W, 2D + C) from dout (N, H, W, C).
pub fn backward(
    gpu: &Arc<Gpu>,
    g: Geometry,
    qkv: &Tensor,
    routes: &Tensor,
    scale: f64,
    lse: &Tensor,
    dout: &Tensor,
    dqkv: &Out<'_>,
) -> Result<()> {
    let (dtype, device) = (qkv.dtype(), qkv.device());
    dqkv.expect("bra", dtype)?;
    let ([d, dv], size) = (g.head_dims(), dtype.wide().size());
    let mut delta = Tensor::empty_on(&device, lse.shape().clone(), lse.dtype())?;
    let elements = QUERIES * (2 * d + dv) + KEYS * (d + dv + 2) + QUERIES * KEYS + 2 * QUERIES;
    let launch = KERNELS.launch(gpu, "attend_backward_queries<T>", dtype)?.threads(128).blocks(tiles(g, QUERIES));
    let launch =
        launch.shared(elements * size).input(qkv)?.input(routes)?.number(scale, dtype).input(lse)?.input(dout)?;
    // SAFETY: as in `forward`; dqkv is like qkv.
    unsafe { with_geometry(launch.out(Some(dqkv)).output(&mut delta)?, g)?.run()? };

    let (starts, entries) = invert(gpu, &device, g, routes)?;
    let elements = KEYS * (d + dv + 2) + KEYS * (d + dv) + QUERIES * (d + dv) + 2 * QUERIES * KEYS;
    let launch = KERNELS.launch(gpu, "attend_backward_keys<T>", dtype)?.threads(128).blocks(tiles(g, KEYS));
    let launch = launch.shared(elements * size).input(qkv)?.input(&starts)?.input(&entries)?.number(scale, dtype);
    let launch = launch.input(lse)?.input(&delta)?.input(dout)?.out(Some(dqkv));
    // SAFETY: as above; the lists are those of the routes.
    unsafe { with_geometry(launch, g)?.run() }
}

/// For each region the regions routed to it: starts (N, P + 1) and entries (N, P·k).
fn invert(gpu: &Arc<Gpu>, device: &Device, g: Geometry, routes: &Tensor) -> Result<(Tensor, Tensor)> {
    let mut starts = Tensor::empty_on(device, [g.images, g.regions() + 1], DType::Index)?;
    let mut entries = Tensor::empty_on(device, [g.images, g.regions() * g.topk], DType::Index)?;
    let launch = KERNELS.launch(gpu, "invert_routes", DType::F32)?.blocks(g.images).input(routes)?;
    let launch = launch.output(&mut starts)?.output(&mut entries)?;
    // SAFETY: each image has a list of P starts and an end, and P·k entries.
    unsafe { launch.extents([g.regions(), g.topk])?.run()? };
    Ok((starts, entries))
}
