//! The definition of [`region_merge`](super::region_merge).

use autograd::exact::{Array, Scalar};

/// y[n, j·r_h + a, i·r_w + b] = x[n, j·S_w + i, a·r_w + b]
pub fn region_merge<S: Scalar>(x: &Array<S>, [down, across]: [usize; 2], [rows, columns]: [usize; 2]) -> Array<S> {
    let [n, _, _, c] = x.dims();
    Array::from_fn(&[n, down * rows, across * columns, c], |y| {
        let (j, a) = (y[1] / rows, y[1] % rows);
        let (i, b) = (y[2] / columns, y[2] % columns);
        x.at(&[y[0], j * across + i, a * columns + b, y[3]])
    })
}
