//! The definition of [`matmul`](super::matmul).

use autograd::exact::{Array, Scalar};

/// y[.., m, n] = Σₖ a[.., m, k] b[.., k, n], or b[k, n] when b has no leading axes.
pub fn matmul<S: Scalar>(a: &Array<S>, b: &Array<S>) -> Array<S> {
    let (a_rank, b_rank) = (a.shape.len(), b.shape.len());
    let (rows, inner, cols) = (a.shape[a_rank - 2], a.shape[a_rank - 1], b.shape[b_rank - 1]);
    let mut shape = a.shape.clone();
    shape[a_rank - 1] = cols;
    let mut y = Array::zeros(&shape);
    for (place, y) in y.data.iter_mut().enumerate() {
        let (matrix, row, col) = (place / (rows * cols), place / cols % rows, place % cols);
        let b_matrix = if b_rank == 2 { 0 } else { matrix };
        let term = |k| a.data[(matrix * rows + row) * inner + k] * b.data[(b_matrix * inner + k) * cols + col];
        *y = (0..inner).map(term).sum();
    }
    y
}
