//! Where a point of an image looks, for pictures: what is recorded of an attention's [weights](ops::bra_weights).

use crate::error::Result;
use tensor::Tensor;

/// The token of a map (H, W) that a point of the image lies in, given as parts of the image's height and width.
pub(crate) fn token_at(point: [f64; 2], map: [usize; 2]) -> [usize; 2] {
    std::array::from_fn(|axis| ((point[axis] * map[axis] as f64) as usize).min(map[axis].saturating_sub(1)))
}

/// The mean over the heads of weights (N, heads, H', W'), of the upper left part (H, W), which is not padding: (N, H,
/// W) in f32.
pub(crate) fn mean(weights: &Tensor, [height, width]: [usize; 2]) -> Result<Tensor> {
    let [images, heads, rows, columns] = weights.dims("attention_weights", "weights (N, heads, H, W)")?;
    let weights = weights.to_vec::<f64>()?;
    let mean = |index: usize| {
        let (image, row, column) = (index / (height * width), index / width % height, index % width);
        let weight = |head| weights[((image * heads + head) * rows + row) * columns + column];
        let mean = (0..heads).map(weight).sum::<f64>() / heads as f64;
        match mean as f32 {
            // A double too small for f32 is a weight nevertheless.
            0.0 if mean > 0.0 => f32::MIN_POSITIVE,
            mean => mean,
        }
    };
    let means: Vec<f32> = (0..images * height * width).map(mean).collect();
    Ok(Tensor::from_slice(&means, [images, height, width])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_lies_in_a_token_of_any_map() {
        assert_eq!(token_at([0.5, 0.5], [4, 7]), [2, 3]);
        assert_eq!(token_at([0.0, 1.0], [4, 7]), [0, 6]);
        assert_eq!(token_at([0.999, 0.999], [1, 1]), [0, 0]);
    }
}
