//! CPU kernels of [`matmul`](super::matmul): the library's matrix product, pair by pair.

use rayon::prelude::*;
use tensor::cpu::gemm::{Mat, gemm, gemm_by_rows};
use tensor::cpu::parallel::{Out, items_per_task};
use tensor::{Float, Result, Scratch, Tensor};

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

    /// How many there are.
    fn count(self) -> usize {
        self.leading.0.iter().product()
    }

    /// One of them, counted in row-major order. The same one each time if there are no leading axes.
    fn at(self, index: usize) -> Mat<'a, T> {
        Mat::strided(self.from(index), self.extents, self.strides)
    }

    /// The memory from its first element on.
    fn from(self, mut index: usize) -> &'a [T] {
        let mut start = 0;
        for (&extent, &stride) in self.leading.0.iter().zip(self.leading.1).rev() {
            start += index % extent * stride;
            index /= extent;
        }
        // Empty matrices may lie past the end.
        self.data.get(start..).unwrap_or(&[])
    }

    /// All of them stacked vertically as one matrix, if all their rows are equally spaced.
    fn stacked(self) -> Option<Mat<'a, T>> {
        let mut rows = self.extents.0;
        for (&extent, &stride) in self.leading.0.iter().zip(self.leading.1).rev() {
            if extent > 1 && stride != rows * self.strides.0 {
                return None;
            }
            rows *= extent;
        }
        Some(Mat::strided(self.data, (rows, self.extents.1), self.strides))
    }

    /// The same, from a copy if they are not.
    fn stacked_or_copied<'r>(self, room: &'r mut Option<Scratch<T>>) -> Mat<'r, T>
    where
        'a: 'r,
    {
        if let Some(stacked) = self.stacked() {
            return stacked;
        }
        let ((rows, cols), (down, across)) = (self.extents, self.strides);
        let copy: &mut [T] = room.insert(Scratch::new(self.count() * rows * cols));
        copy.par_chunks_mut((rows * cols).max(1)).enumerate().for_each(|(i, copy)| {
            let from = self.from(i);
            for (row, copy) in copy.chunks_exact_mut(cols).enumerate() {
                copy.iter_mut().enumerate().for_each(|(col, copy)| *copy = from[row * down + col * across]);
            }
        });
        Mat::new(copy, self.count() * rows, cols)
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
        if b.leading.0.is_empty() { sum_of_products(a.t(), dy, db) } else { products(a.t(), dy, db) }
    }
}

/// out[i] = a[i]·b[i], or a[i]·b when b is a single matrix.
fn products<T: Float>(a: Matrices<'_, T>, b: Matrices<'_, T>, out: Out<'_, T>) {
    let shared = b.leading.0.is_empty();
    if let (true, Some(a)) = (shared, a.stacked()) {
        return gemm_by_rows(a, b.at(0), out);
    }
    let ((rows, inner), cols) = (a.extents, b.extents.1);
    let size = rows * cols;
    if size == 0 {
        return;
    }
    let per_task = items_per_task(size * inner);
    let accumulate = out.accumulate;
    out.data.par_chunks_mut(per_task * size).enumerate().for_each(|(task, products)| {
        for (i, data) in products.chunks_exact_mut(size).enumerate() {
            let i = task * per_task + i;
            // A product stays on this thread unless it is large, as a few large ones would not keep all threads busy.
            // With a shared b, each row has the same bits as if all rows were computed as one product.
            let (multiply, out) = (if shared { gemm_by_rows } else { gemm }, Out { data, accumulate });
            multiply(a.at(i), b.at(i), out);
        }
    });
}

/// out = Σᵢ a[i]·b[i].
fn sum_of_products<T: Float>(a: Matrices<'_, T>, b: Matrices<'_, T>, out: Out<'_, T>) {
    // Side by side, the a[i] form one long product with the stacked b[i]. Separate products would be summed in another
    // order, so that a view would give other bits than its copy.
    let [mut room_of_a, mut room_of_b] = [None, None];
    gemm(a.t().stacked_or_copied(&mut room_of_a).t(), b.stacked_or_copied(&mut room_of_b), out);
}
