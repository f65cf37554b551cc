//! Matrix products of the emulated device: accumulated in the type of sums, and rounded once, when they are written.

use super::failure;
use crate::cpu::gemm::{Mat, gemm_on_this_thread};
use crate::cpu::parallel::Out;
use crate::cuda::{Operand, Product};
use crate::{DType, Element, Float, Result};
use half::bf16;
use num_traits::AsPrimitive;

/// The products of a batch, one after the other.
///
/// # Safety
/// As [`Driver::multiply`](crate::cuda::Driver::multiply)'s.
pub unsafe fn multiply(product: &Product) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        match (product.inputs, product.output) {
            (DType::F32, DType::F32) => multiply_as::<f32, f32, f32>(product),
            (DType::F64, DType::F64) => multiply_as::<f64, f64, f64>(product),
            (DType::Bf16, DType::F32) => multiply_as::<bf16, f32, f32>(product),
            (DType::Bf16, DType::Bf16) => multiply_as::<bf16, f32, bf16>(product),
            (inputs, output) => {
                return Err(failure(format!("cannot multiply {inputs} matrices to an {output} result")));
            }
        }
    }
    Ok(())
}

/// Factors of `T`, sums of `W`, results of `C`.
unsafe fn multiply_as<T, W, C>(product: &Product)
where
    T: Element + AsPrimitive<W>,
    W: Float,
    C: Element + AsPrimitive<f64>,
    f64: AsPrimitive<C>,
{
    let Product { extents: [m, n, k], batch, a, b, c, plus, row, .. } = *product;
    let read = |operand: Operand, index: usize, count: usize| -> Vec<W> {
        let start = operand.address as *const T;
        // SAFETY: the operand lies there, by the caller's promise.
        (0..count).map(|i| unsafe { *start.add(index * operand.stride + i) }.as_()).collect()
    };
    let at = |address: u64, place: usize| -> f64 {
        let place = (address as *const C).wrapping_add(place);
        // SAFETY: as above: a row of n elements, and a matrix like C.
        if address == 0 { 0.0 } else { unsafe { *place }.as_() }
    };
    for index in 0..batch {
        let (left, right) = (read(a, index, m * k), read(b, index, k * n));
        let mut result = vec![W::zero(); m * n];
        let left = lie(&left, m, k, a.transposed);
        gemm_on_this_thread(left, lie(&right, k, n, b.transposed), Out::store(&mut result));
        for (i, &value) in result.iter().enumerate() {
            let place = index * c.stride + i;
            let value = value.as_f64() + at(plus, place) + at(row, i % n);
            // SAFETY: C lies there, by the caller's promise.
            unsafe { (c.address as *mut C).add(place).write(value.as_()) };
        }
    }
}

/// A matrix that lies in `data` as it is, or as its transpose.
fn lie<W: Float>(data: &[W], rows: usize, cols: usize, transposed: bool) -> Mat<'_, W> {
    if transposed { Mat::new(data, cols, rows).t() } else { Mat::new(data, rows, cols) }
}
