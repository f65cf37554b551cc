//! CPU kernels of [`matmul`](super::matmul): the library's matrix product, pair by pair.

use rayon::prelude::*;
use tensor::cpu::gemm::{Mat, gemm};
use tensor::cpu::parallel::{Out, items_per_task};
use tensor::{Float, Result, Tensor};

/// The matrices in the last two axes of a tensor, wherever its strides put them.
#[derive(Clone, Copy)]
pub struct Matrices<'a, T> {
    data: &'a [T],
    /// Extents and strides of the leading axes, which count the matrices.
    leading: (&'a [usize], &'a [usize]),
    /// Rows and columns of each.
    extents: (usize, usize),
    strides: (usize, usize),
}

impl<'a, T: Float> Matrices<'a, T> {
    /// The matrices of a tensor with two axes or more.
    pub fn new(tensor: &'a Tensor) -> Result<Self> {
        let (shape, strides) = (&tensor.shape()[..], tensor.strides());
        let split = tensor.rank() - 2;
        Ok(Self {
            data: tensor.as_strided_slice("matmul")?,
            leading: (&shape[..split], &strides[..split]),
            extents: (shape[split], shape[split + 1]),
            strides: (strides[split], strides[split + 1]),
        })
    }

    fn t(self) -> Self {
        let swap = |(row, col)| (col, row);
        Self { extents: swap(self.extents), strides: swap(self.strides), ..self }
    }

    /// One of them, counted in row-major order.
    fn at(self, mut index: usize) -> Mat<'a, T> {
        let mut start = 0;
        for (&extent, &stride) in self.leading.0.iter().zip(self.leading.1).rev() {
            start += index % extent * stride;
            index /= extent;
        }
        // Empty matrices may lie past the end.
        Mat::strided(self.data.get(start..).unwrap_or(&[]), self.extents, self.strides)
    }
}

pub fn forward<T: Float>(a: Matrices<'_, T>, b: Matrices<'_, T>, y: &mut [T]) {
    products(a, b, Out::store(y));
}

pub fn backward<T: Float>(
    dy: Matrices<'_, T>,
    a: Matrices<'_, T>,
    b: Matrices<'_, T>,
    [da, db]: [Option<Out<'_, T>>; 2],
) {
    if let Some(da) = da {
        products(dy, b.t(), da);
    }
    if let Some(db) = db {
        products(a.t(), dy, db);
    }
}

/// out[i] = a[i]·b[i].
fn products<T: Float>(a: Matrices<'_, T>, b: Matrices<'_, T>, out: Out<'_, T>) {
    let ((rows, inner), cols) = (a.extents, b.extents.1);
    let size = rows * cols;
    if out.data.is_empty() {
        return;
    }
    let per_task = items_per_task(size * inner);
    let accumulate = out.accumulate;
    out.data.par_chunks_mut(per_task * size).enumerate().for_each(|(task, products)| {
        for (i, data) in products.chunks_exact_mut(size).enumerate() {
            let i = task * per_task + i;
            // A product stays on this thread unless it is large, as a few large ones would not keep all threads busy.
            gemm(a.at(i), b.at(i), Out { data, accumulate });
        }
    });
}
