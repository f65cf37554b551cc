//! CPU kernels of [`conv2d`](super::conv2d): matrix products that read patches where they lie.
//!
//! Each row of the kernel reads a contiguous run of elements of the image. So no matrix of patches is needed: the rows
//! of the image that a block of output pixels reads are copied into a *band*, with their zero padding, and the product
//! is told where each patch starts in it and where its runs lie from there.
//!
//! The gradient of x is computed the same way. Pixels of x whose coordinates have the same remainders modulo the stride
//! meet the same taps, so it consists of stride² convolutions of dy, and each element is written once.

mod band;
mod forward;
mod input;
mod weight;

pub use forward::{forward, pack};
pub use input::backward_input;
pub use weight::backward_weight;

use rayon::prelude::*;
use tensor::{Element, Scratch};

/// Pixels of the output per block, about.
const PIXELS: usize = 256;

/// How many whole rows each block has if a map of `rows` rows, those of all images, is cut into blocks of about
/// `pixels` pixels. The number of blocks is a multiple of two or of four, as far as whole rows allow, so that two or
/// four threads get equal shares.
fn rows_per_block([rows, width]: [usize; 2], pixels: usize) -> usize {
    let blocks = (rows * width).div_ceil(pixels).max(1);
    rows.div_ceil(blocks.next_multiple_of(if blocks > 2 { 4 } else { 2 })).max(1)
}

/// The weight (O, I, KH, KW) as (O, KH·KW, I), so that the inputs of a tap are neighbours.
fn reorder<F: Element>(weight: &[F], [inputs, taps]: [usize; 2]) -> Scratch<F> {
    let (mut reordered, patch) = (Scratch::new(weight.len()), (inputs * taps).max(1));
    reordered.par_chunks_mut(patch).zip(weight.par_chunks(patch)).for_each(|(to, weight)| {
        for (tap, to) in to.chunks_exact_mut(inputs).enumerate() {
            to.iter_mut().zip(weight[tap..].iter().step_by(taps)).for_each(|(to, &weight)| *to = weight);
        }
    });
    reordered
}
