//! Region-to-region routing: which regions does each region attend to?

use super::{Bra, cuda};
use crate::bra::geometry::Geometry;
use crate::region_pool::cpu::mean_of_tokens;
use crate::top_k;
use rayon::prelude::*;
use tensor::cpu::gemm::{Mat, gemm_on_this_thread};
use tensor::cpu::parallel::{Out, items_per_task};
use tensor::{DType, Device, Error, Float, Result, Scratch, Tensor, match_float, simd};

/// What a map's regions are routed to, and why: the choice itself, before any attention.
#[derive(Clone, Debug)]
pub struct Routing {
    /// (N, P, k): the regions that region p attends to, best first; ties to the lower index.
    pub routes: Tensor,
    /// (N, P, k): the affinities of region p to them, s·q̂ₚ·k̂ᵣ.
    pub affinities: Tensor,
}

/// Routes the regions of qkv (N, H, W, 2D + C): the k largest of s·q̂ₚ·k̂ᵣ for each region p, where q̂ and k̂ are the
/// means of the regions' queries and keys. Nothing of it is recorded on a tape: routing is detached. Errors: those of
/// [`bra`](mod@crate::bra).
pub fn route(qkv: &Tensor, attributes: &Bra) -> Result<Routing> {
    let g = attributes.geometry(qkv)?;
    let (map, grid, size) = (g.regions.map(), g.regions.grid(), g.regions.size());
    let valid = attributes.valid.unwrap_or(map);
    let reaches_all = |axis: usize| (grid[axis] - 1) * size[axis] < valid[axis] && valid[axis] <= map[axis];
    if !(reaches_all(0) && reaches_all(1)) {
        let message = format!("the valid part {valid:?} must be in the map {map:?} and reach all {grid:?} regions");
        return Err(Error::argument("bra", message));
    }
    let shape = [g.images, g.regions.count(), g.topk];
    let device = qkv.device();
    let mut routes = Tensor::empty_on(&device, shape, DType::Index)?;
    let mut affinities = Tensor::empty_on(&device, shape, qkv.dtype())?;
    match &device {
        Device::Cpu => match_float!(qkv.dtype(), "bra", T => kernel::<T>(
            g,
            valid,
            attributes.scale as T,
            qkv.as_slice("bra")?,
            routes.as_mut_slice("bra")?,
            affinities.as_mut_slice("bra")?,
        )),
        Device::Cuda(_) => cuda::route(g, valid, attributes.scale, qkv, [&mut routes, &mut affinities])?,
    }
    Ok(Routing { routes, affinities })
}

/// Regions whose affinities are computed together.
const ROWS: usize = 64;

fn kernel<T: Float>(g: Geometry, valid: [usize; 2], scale: T, qkv: &[T], routes: &mut [u32], affinities: &mut [T]) {
    let regions = g.regions.count();
    let per_image = regions * g.topk;
    let image_len = g.tokens() * g.row();
    routes.par_chunks_mut(per_image).zip(affinities.par_chunks_mut(per_image)).enumerate().for_each(
        |(image, (routes, affinities))| {
            let qkv = &qkv[image * image_len..][..image_len];
            // A row of means holds a region's mean query, then its mean key.
            let row = 2 * g.qk_dim;
            let mut means = Scratch::<T>::new(regions * row);
            let ([_, columns], [height, _], [_, width]) = (g.regions.grid(), g.regions.size(), g.regions.map());
            let lines = means.par_chunks_mut((columns * row).max(1)).enumerate();
            let lines = lines.with_min_len(items_per_task(height * width * row));
            lines.for_each(|(line, means)| simd!(_A => region_means::<T>(g, valid, qkv, line, means)));
            let (means, keys) = (&*means, Mat::strided(&means[g.qk_dim..], (g.qk_dim, regions), (1, row)));
            // One block of rows at a time, so that the P² affinities are never held all at once.
            let chosen = routes.par_chunks_mut(ROWS * g.topk).zip(affinities.par_chunks_mut(ROWS * g.topk));
            let blocks = means.par_chunks((ROWS * row).max(1)).zip(chosen);
            blocks.for_each(|(queries, (routes, affinities))| {
                let rows = queries.len() / row;
                let mut of_all = Scratch::<T>::new(rows * regions);
                let queries = Mat::strided(queries, (rows, g.qk_dim), (row, 1));
                gemm_on_this_thread(queries, keys, Out::store(&mut of_all));
                of_all.iter_mut().for_each(|x| *x *= scale);
                let chosen = routes.chunks_mut(g.topk).zip(affinities.chunks_mut(g.topk));
                for (row, (routes, affinities)) in of_all.chunks_exact(regions).zip(chosen) {
                    top_k::cpu::select(row, affinities, routes);
                }
            });
        },
    );
}

/// The means of one image's queries and keys over the valid tokens of each region in a line of the grid, (G_w, 2D).
#[inline(always)]
fn region_means<T: Float>(g: Geometry, valid: [usize; 2], qkv: &[T], line: usize, means: &mut [T]) {
    let ([rh, rw], [_, map_width], width) = (g.regions.size(), g.regions.map(), 2 * g.qk_dim);
    let (top, bottom) = (line * rh, ((line + 1) * rh).min(valid[0]));
    for (place, mean) in means.chunks_exact_mut(width).enumerate() {
        let (left, right) = (place * rw, ((place + 1) * rw).min(valid[1]));
        let (first, strides) = ((top * map_width + left) * g.row(), [map_width * g.row(), g.row()]);
        mean_of_tokens(&qkv[first..], [bottom - top, right - left], strides, g.regions.rows_of_chain(), mean);
    }
}
