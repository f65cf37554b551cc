//! The definition of [`dwconv`](super::dwconv).

use autograd::exact::{Array, Scalar};

/// y[n, i, j, c] = b\[c\] + Σ x[n, i + a − K/2, j + b − K/2, c] w[c, 0, a, b] over the taps (a, b) on the image.
pub fn dwconv<S: Scalar>(x: &Array<S>, weight: &Array<S>, bias: Option<&Array<S>>) -> Array<S> {
    let [_, height, width, _] = x.dims();
    let [_, _, kernel, _] = weight.dims();
    Array::from_fn(&x.shape, |position| {
        let &[n, i, j, c] = position else { unreachable!("x has four axes") };
        let mut y = bias.map_or(S::of(0.0), |bias| bias.at(&[c]));
        for (a, b) in (0..kernel).flat_map(|a| (0..kernel).map(move |b| (a, b))) {
            // Wraps to a large number left of and above the image.
            let (row, column) = ((i + a).wrapping_sub(kernel / 2), (j + b).wrapping_sub(kernel / 2));
            if row < height && column < width {
                y += x.at(&[n, row, column, c]) * weight.at(&[c, 0, a, b]);
            }
        }
        y
    })
}
