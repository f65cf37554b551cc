//! The definition of [`matmul`](super::matmul).

use autograd::exact::{Array, Scalar};

/// y[.., m, n] = Σₖ a[.., m, k] b[.., k, n].
pub fn matmul<S: Scalar>(a: &Array<S>, b: &Array<S>) -> Array<S> {
    let rank = a.shape.len();
    let (rows, inner, cols) = (a.shape[rank - 2], a.shape[rank - 1], b.shape[rank - 1]);
    let mut shape = a.shape.clone();
    shape[rank - 1] = cols;
    let mut y = Array::zeros(&shape);
    for (place, y) in y.data.iter_mut().enumerate() {
        let (matrix, row, col) = (place / (rows * cols), place / cols % rows, place % cols);
        let term = |k| a.data[(matrix * rows + row) * inner + k] * b.data[(matrix * inner + k) * cols + col];
        *y = (0..inner).map(term).sum();
    }
    y
}
