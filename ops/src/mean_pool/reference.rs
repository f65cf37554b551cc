//! The definition of [`mean_pool`](super::mean_pool).

use autograd::exact::{Array, Scalar};

/// y[n, c] = the mean of x[n, ., ., c].
pub fn mean_pool<S: Scalar>(x: &Array<S>) -> Array<S> {
    let [images, height, width, channels] = x.dims();
    let tokens = height * width;
    let mut y = Array::zeros(&[images, channels]);
    for (place, y) in y.data.iter_mut().enumerate() {
        let (n, c) = (place / channels, place % channels);
        *y = (0..tokens).map(|t| x.data[(n * tokens + t) * channels + c]).sum::<S>() / S::of(tokens as f64);
    }
    y
}
