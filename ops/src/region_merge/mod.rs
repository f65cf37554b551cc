//! A map put together from a grid of regions: the inverse of
//! [`region_partition`](mod@crate::region_partition), where the order of regions and tokens is explained.
//!
//! **Forward.** y[n, i·r_h + a, j·r_w + b] = x[n, i·G_w + j, a·r_w + b], with x (N, G_h·G_w, r_h·r_w, C) and
//! y (N, G_h·r_h, G_w·r_w, C).
//!
//! **Backward.** Each element goes to one element, so dx is dy cut into regions again. Nothing is saved
//! but extents.
//!
//! x must be contiguous; f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::Shape`] when x does not have the
//! grid's number of regions or a region's number of tokens, [`tensor::Error::Argument`] if the number of regions or
//! tokens overflows, [`tensor::Error::NotContiguous`], [`tensor::Error::DType`].

pub mod cases;
pub mod reference;

use crate::region_partition::swapped;
use crate::regions::Regions;
use autograd::{Result, Var};
use tensor::cuda::Module;
use tensor::{Error, Shape};

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "a map put together from a grid of regions";

/// Puts x (N, G_h·G_w, r_h·r_w, C) together, for a grid of G_h by G_w regions of r_h by r_w tokens:
/// (N, G_h·r_h, G_w·r_w, C).
/// Operands and errors: those of the [module](mod@crate::region_merge).
pub fn region_merge<'t>(x: &Var<'t>, grid: [usize; 2], region: [usize; 2]) -> Result<Var<'t>> {
    let [images, regions, tokens, channels] = x.value().dims("region_merge", "x (N, regions, tokens, C)")?;
    let merged = Regions::new("region_merge", grid, region)?;
    let ([down, across], [rows, columns]) = (grid, region);
    if [regions, tokens] != [merged.count(), merged.tokens()] {
        let (regions, tokens) = (merged.count(), merged.tokens());
        let expected = format!("x (N, {regions}, {tokens}, C) for {down}x{across} regions of {rows}x{columns} tokens");
        return Err(Error::shape("region_merge", expected, x.shape()).into());
    }
    let [height, width] = merged.map();
    let shape = Shape::from([images, height, width, channels]).countable("region_merge")?;
    swapped("region_merge", x, shape, [across, rows, columns * channels])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::uniform;
    use crate::region_partition;
    use autograd::Tape;

    #[test]
    fn undoes_a_partition() -> Result<()> {
        let tape = Tape::new();
        let x = tape.input(uniform([2, 6, 15, 3], 1));
        let regions = region_partition(&x, [3, 5])?;
        let merged = region_merge(&regions, [3, 5], [2, 3])?;
        assert_eq!(merged.shape(), x.shape());
        assert_eq!(merged.value().to_vec::<f64>()?, x.value().to_vec::<f64>()?);
        assert_eq!(
            region_merge(&regions, [3, 5], [2, 2]).unwrap_err().to_string(),
            "region_merge: expected x (N, 15, 4, C) for 3x5 regions of 2x2 tokens, got shape (2, 15, 6, 3)"
        );
        Ok(())
    }

    #[test]
    fn regions_that_cannot_be_counted_are_refused() {
        const HALF: usize = usize::MAX / 2 + 1;
        let tape = Tape::new();
        // Their number would wrap to that of x.
        let error = region_merge(&tape.input(uniform([1, 0, 1, 2], 1)), [HALF, 2], [1, 1]).unwrap_err();
        assert!(matches!(error, autograd::Error::Tensor(Error::Argument { op: "region_merge", .. })), "{error}");
    }
}
