//! The GPU's side of [`region_partition`](super::region_partition) and [`region_merge`](mod@crate::region_merge),
//! forward and backward.

use tensor::cuda::{Out, elements};
use tensor::{Result, Tensor};

/// out (B, Q, P, L) = x (B, P, Q, L): the two middle axes change places, lines of L elements stay whole.
/// `extents` are P, Q and L.
pub fn swap(x: &Tensor, [p, q, line]: [usize; 3], out: Out<'_>) -> Result<()> {
    let blocks = x.count().checked_div(p * q * line).unwrap_or(0);
    elements::put(out, &x.reshape([blocks, p, q, line])?.permute(&[0, 2, 1, 3])?)
}
