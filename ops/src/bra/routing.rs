//! Region-to-region routing: which regions does each region attend to?

use super::Bra;
use crate::bra::geometry::Geometry;
use crate::top_k;
use rayon::prelude::*;
use tensor::cpu::gemm::{Mat, gemm_on_this_thread};
use tensor::cpu::parallel::{Out, items_per_task};
use tensor::{DType, Error, Float, Result, Tensor, match_float};

/// Where each region looks.
#[derive(Clone, Debug)]
pub struct Routing {
    /// (N, P, k): the regions that region p attends to, best first; ties to the lower index.
    pub routes: Tensor,
    /// (N, P, k): their scores, s·q̂ₚ·k̂ᵣ.
    pub logits: Tensor,
}

/// Routes the regions of qkv (N, H, W, 2D + C): the k largest of s·q̂ₚ·k̂ᵣ for each region p, where q̂ and k̂
/// are the means of the regions' queries and keys. Nothing of it is recorded on a tape: routing is detached.
pub fn route(qkv: &Tensor, attributes: &Bra) -> Result<Routing> {
    let g = attributes.geometry(qkv)?;
    let valid = attributes.valid.unwrap_or(g.map);
    let [rh, rw] = g.region_size();
    let starts_inside =
        |axis: usize, size: usize| (g.grid[axis] - 1) * size < valid[axis] && valid[axis] <= g.map[axis];
    if g.tokens() > 0 && !(starts_inside(0, rh) && starts_inside(1, rw)) {
        let message = format!("the valid part {valid:?} of a map {:?} leaves a region of {:?} empty", g.map, g.grid);
        return Err(Error::argument("bra", message));
    }
    let shape = [g.images, g.regions(), g.topk];
    let (mut routes, mut logits) = (Tensor::empty(shape, DType::Index), Tensor::empty(shape, qkv.dtype()));
    match_float!(qkv.dtype(), "bra", T => kernel::<T>(
        g,
        valid,
        attributes.scale as T,
        qkv.as_slice("bra")?,
        routes.as_mut_slice("bra")?,
        logits.as_mut_slice("bra")?,
    ));
    Ok(Routing { routes, logits })
}

/// Regions whose affinities are computed together.
const ROWS: usize = 64;

fn kernel<T: Float>(g: Geometry, valid: [usize; 2], scale: T, qkv: &[T], routes: &mut [u32], logits: &mut [T]) {
    let regions = g.regions();
    let per_image = regions * g.topk;
    let image_len = g.tokens() * g.row();
    routes.par_chunks_mut(per_image).zip(logits.par_chunks_mut(per_image)).enumerate().for_each(
        |(image, (routes, logits))| {
            let qkv = &qkv[image * image_len..][..image_len];
            let means = means(g, valid, qkv);
            let (queries, keys) = means.split_at(regions * g.qk_dim);
            let keys = Mat::new(keys, regions, g.qk_dim).t();
            // The affinities of a block of rows at a time: P² numbers are never held.
            let block = || vec![T::zero(); ROWS.min(regions) * regions];
            let chosen = routes.par_chunks_mut(ROWS * g.topk).zip(logits.par_chunks_mut(ROWS * g.topk));
            let blocks = queries.par_chunks(ROWS * g.qk_dim).zip(chosen);
            blocks.for_each_init(block, |affinity, (queries, (routes, logits))| {
                let rows = queries.len() / g.qk_dim;
                let affinity = &mut affinity[..rows * regions];
                gemm_on_this_thread(Mat::new(queries, rows, g.qk_dim), keys, Out::store(affinity));
                let chosen = routes.chunks_mut(g.topk).zip(logits.chunks_mut(g.topk));
                for (row, (routes, logits)) in affinity.chunks_exact_mut(regions).zip(chosen) {
                    row.iter_mut().for_each(|x| *x *= scale);
                    top_k::cpu::select(row, logits, routes);
                }
            });
        },
    );
}

/// The means of one image's queries and then of its keys over each region's valid tokens: 2·(P, D).
fn means<T: Float>(g: Geometry, valid: [usize; 2], qkv: &[T]) -> Vec<T> {
    let mut means = vec![T::zero(); 2 * g.regions() * g.qk_dim];
    let [rh, rw] = g.region_size();
    let (queries, keys) = means.split_at_mut(g.regions() * g.qk_dim);
    let across = g.grid[1] * g.qk_dim;
    let rows = queries.par_chunks_mut(across).zip(keys.par_chunks_mut(across)).enumerate();
    let per_task = items_per_task(rh * g.map[1] * 2 * g.qk_dim);
    rows.with_min_len(per_task).for_each(|(row, (queries, keys))| {
        let lines = row * rh..((row + 1) * rh).min(valid[0]);
        for line in lines.clone() {
            for col in 0..valid[1] {
                let token = &qkv[(line * g.map[1] + col) * g.row()..][..2 * g.qk_dim];
                let (query, key) = token.split_at(g.qk_dim);
                for (sums, values) in [(&mut *queries, query), (&mut *keys, key)] {
                    let sum = &mut sums[col / rw * g.qk_dim..][..g.qk_dim];
                    sum.iter_mut().zip(values).for_each(|(sum, &x)| *sum += x);
                }
            }
        }
        for sums in [queries, keys] {
            for (col, mean) in sums.chunks_exact_mut(g.qk_dim).enumerate() {
                let tokens = lines.len() * (((col + 1) * rw).min(valid[1]) - col * rw);
                let inverse = T::one() / T::of(tokens as f64);
                mean.iter_mut().for_each(|x| *x *= inverse);
            }
        }
    });
    means
}
