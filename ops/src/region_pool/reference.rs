//! The definition of [`region_pool`](super::region_pool).

use autograd::exact::{Array, Scalar};

/// y[n, i·G_w + j, c] = the mean of x[n, ., ., c] over region (i, j).
pub fn region_pool<S: Scalar>(x: &Array<S>, [down, across]: [usize; 2]) -> Array<S> {
    let [images, height, width, channels] = x.dims();
    let (h, w) = (height / down, width / across);
    Array::from_fn(&[images, down * across, channels], |position| {
        let &[n, region, c] = position else { unreachable!("three axes") };
        let (top, left) = (region / across * h, region % across * w);
        let tokens = (0..h * w).map(|t| x.at(&[n, top + t / w, left + t % w, c]));
        tokens.sum::<S>() / S::of((h * w) as f64)
    })
}
