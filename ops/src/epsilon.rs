//! The ε that normalisations add to a variance, and what they divide by.

use tensor::{DType, Error, Float, Result};

/// Checks that ε, rounded to the type that a normalisation of `dtype` computes in, keeps a variance above 0. Errors:
/// [`Error::Argument`].
pub(crate) fn ensure_epsilon(op: &'static str, epsilon: f64, dtype: DType) -> Result<()> {
    let rounded = dtype.rounded_sum(epsilon);
    match rounded > 0.0 && rounded.is_finite() {
        true => Ok(()),
        false => Err(Error::argument(op, format!("epsilon is {epsilon:?}, but must be above 0, such as 1e-6"))),
    }
}

/// 1/√spread, of a variance and ε; NaN if that is infinite, as where squares have overflowed: zeros would pass for
/// results.
#[inline(always)]
pub(crate) fn reciprocal_root<T: Float>(spread: T) -> T {
    T::one() / spread.sqrt() + spread * T::zero()
}
