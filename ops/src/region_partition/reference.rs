//! The definition of [`region_partition`](super::region_partition).

use autograd::exact::{Array, Scalar};

/// y[n, i·G_w + j, a·r_w + b] = x[n, i·r_h + a, j·r_w + b]
pub fn region_partition<S: Scalar>(x: &Array<S>, [down, across]: [usize; 2]) -> Array<S> {
    let [n, height, width, c] = x.dims();
    let [rows, columns] = [height / down, width / across];
    Array::from_fn(&[n, down * across, rows * columns, c], |y| {
        let (i, j) = (y[1] / across, y[1] % across);
        let (a, b) = (y[2] / columns, y[2] % columns);
        x.at(&[y[0], i * rows + a, j * columns + b, y[3]])
    })
}
