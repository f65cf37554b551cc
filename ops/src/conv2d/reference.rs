//! The definition of [`conv2d`](super::conv2d).

use super::Conv2d;
use autograd::exact::{Array, Scalar};

/// y[n, i, j, o] = b\[o\] + Σ x[n, i·s + a − p, j·s + b − p, c] w[o, c, a, b] over the taps on the image.
pub fn conv2d<S: Scalar>(
    x: &Array<S>,
    weight: &Array<S>,
    bias: Option<&Array<S>>,
    Conv2d { stride, padding }: Conv2d,
) -> Array<S> {
    let [images, height, width, inputs] = x.dims();
    let [outputs, _, down, across] = weight.dims();
    let extent = |extent: usize, kernel: usize| (extent + 2 * padding - kernel) / stride + 1;
    Array::from_fn(&[images, extent(height, down), extent(width, across), outputs], |position| {
        let &[n, i, j, o] = position else { unreachable!("y has four axes") };
        let mut y = bias.map_or(S::of(0.0), |bias| bias.at(&[o]));
        for (a, b) in (0..down).flat_map(|a| (0..across).map(move |b| (a, b))) {
            // Wraps to a large number left of and above the image.
            let (row, column) = ((i * stride + a).wrapping_sub(padding), (j * stride + b).wrapping_sub(padding));
            if row < height && column < width {
                y += (0..inputs).map(|c| x.at(&[n, row, column, c]) * weight.at(&[o, c, a, b])).sum();
            }
        }
        y
    })
}
