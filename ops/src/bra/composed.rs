//! Bi-level routing attention spelled out in small operations: algorithm 1 of the paper, line by line.
//!
//! This is the form to learn from, and the one that [`bra`](super::bra) is tested against. Like the published code, it
//! gathers k copies of the keys and values, and so takes k times the memory.

use super::{Bra, Routed};
use crate::{add, contiguous, dwconv, gather, matmul, mul, permute, region_merge, region_partition, region_pool};
use crate::{reshape, scale, slice, softmax, top_k};
use autograd::{Result, Var};
use tensor::Error;

/// Whether the choice of regions is learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteKind {
    /// Keys and values of the routed regions, unweighted; no gradient flows through the choice. As published.
    Hard,
    /// Keys and values of the routed regions times the softmax of their affinities, through which the gradient
    /// reaches the means of queries and keys.
    Soft,
}

/// As [`bra`](super::bra), from small operations, and with a choice of routing. `attributes.valid` is not supported
/// ([`tensor::Error::Argument`]).
pub fn bra_composed<'t>(
    qkv: &Var<'t>,
    lepe: Option<[&Var<'t>; 2]>,
    attributes: &Bra,
    kind: RouteKind,
) -> Result<Routed<'t>> {
    let g = attributes.geometry(qkv.value())?;
    if attributes.valid.is_some() {
        return Err(Error::argument("bra_composed", "`valid` is not supported here; set it to None").into());
    }
    let (n, p, t, k, heads) = (g.images, g.regions.count(), g.regions.tokens(), g.topk, g.heads);
    let grid = g.regions.grid();
    let part = |start: usize, end: usize| contiguous(&slice(qkv, 3, start..end)?);
    let (q, key, v) = (part(0, g.qk_dim)?, part(g.qk_dim, 2 * g.qk_dim)?, part(2 * g.qk_dim, g.row())?);

    // Which regions does each region attend to? Mean queries against mean keys, (N, P, P).
    let (q_mean, k_mean) = (region_pool(&q, grid)?, region_pool(&key, grid)?);
    let (q_mean, k_mean) = match kind {
        // The indices alone are used, and have no gradient: this keeps the routing off the tape.
        RouteKind::Hard => (q_mean.detach(), k_mean.detach()),
        RouteKind::Soft => (q_mean, k_mean),
    };
    let affinities = matmul(&scale(&q_mean, attributes.scale)?, &permute(&k_mean, &[0, 2, 1])?)?;
    let (chosen, routes) = top_k(&affinities, k)?;

    // Gather the keys and values of those regions, (N, P, k, T, ·).
    let [q, key, v_regions] = [
        region_partition(&q, grid)?,
        gather(&region_partition(&key, grid)?, 1, &routes)?,
        gather(&region_partition(&v, grid)?, 1, &routes)?,
    ];
    let (key, v_regions) = match kind {
        RouteKind::Hard => (key, v_regions),
        RouteKind::Soft => {
            let weights = reshape(&softmax(&chosen)?, [n, p, k, 1, 1])?;
            (mul(&key, &weights)?, mul(&v_regions, &weights)?)
        }
    };

    // Token-to-token attention, with the heads on an axis of their own: (N, P, heads, ·, ·).
    let split = |x: &Var<'t>, tokens: usize, dim: usize| {
        permute(&reshape(x, [n, p, tokens, heads, dim / heads])?, &[0, 1, 3, 2, 4])
    };
    let (q, key, values) = (split(&q, t, g.qk_dim)?, split(&key, k * t, g.qk_dim)?, split(&v_regions, k * t, g.v_dim)?);
    let scores = matmul(&scale(&contiguous(&q)?, attributes.scale)?, &permute(&key, &[0, 1, 2, 4, 3])?)?;
    let mixed = matmul(&softmax(&scores)?, &values)?;
    let merged = contiguous(&permute(&mixed, &[0, 1, 3, 2, 4])?)?;
    let mut out = region_merge(&reshape(&merged, [n, p, t, g.v_dim])?, grid, g.regions.size())?;

    // Local context from the values' neighbours.
    if let Some([weight, bias]) = lepe {
        out = add(&out, &dwconv(&v, weight, Some(bias))?)?;
    }
    Ok(Routed { out, routes })
}
