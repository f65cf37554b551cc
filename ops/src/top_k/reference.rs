//! The definition of [`top_k`](super::top_k), for inputs without NaN.

use autograd::exact::{Array, Scalar};

/// The k largest elements of each row, by taking the first largest of those that are left, k times.
pub fn top_k<S: Scalar>(x: &Array<S>, k: usize) -> Array<S> {
    let extent = x.shape[x.shape.len() - 1];
    let mut y = Array { shape: x.shape.clone(), data: vec![] };
    y.shape[x.shape.len() - 1] = k;
    for row in x.data.chunks(extent.max(1)) {
        let mut left = row.to_vec();
        for _ in 0..k {
            let larger =
                |best: usize, place: usize| if left[place].value() > left[best].value() { place } else { best };
            y.data.push(left.remove((0..left.len()).fold(0, larger)));
        }
    }
    y
}
