//! The definition of [`region_merge`](super::region_merge).

use autograd::exact::{Array, Scalar};

/// y[n, i·r_h + a, j·r_w + b] = x[n, i·G_w + j, a·r_w + b]
pub fn region_merge<S: Scalar>(x: &Array<S>, [down, across]: [usize; 2], [rows, columns]: [usize; 2]) -> Array<S> {
    let [n, _, _, c] = x.dims();
    Array::from_fn(&[n, down * rows, across * columns, c], |y| {
        let (i, a) = (y[1] / rows, y[1] % rows);
        let (j, b) = (y[2] / columns, y[2] % columns);
        x.at(&[y[0], i * across + j, a * columns + b, y[3]])
    })
}
