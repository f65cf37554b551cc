//! Clipping by the global norm of the gradients.
//!
//! With the norm n = √Σ g² over all parameters and a bound b, the clipped gradient is g·min(1, b/n): the
//! direction stays, the length is at most b. The factor is applied in AdamW's sweep
//! ([`AdamW::step_clipped`](crate::AdamW::step_clipped)), so that clipping reads the gradients once and
//! writes nothing. Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
//! networks", 2013. `torch.nn.utils.clip_grad_norm_` divides by n + 1e-6 instead of n; here a clipped
//! gradient has the norm b itself.

use crate::cuda;
use crate::error::{Error, Result};
use autograd::Gradients;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{Out, sum_in_pieces};
use tensor::{DType, Device, Float, match_float, simd};

/// The Euclidean norm of all parameters' gradients together. Squares and sums are f64 for f32 gradients
/// too, so that none of them overflows; the order of the sum depends on the number of elements only.
///
/// A gradient that is not finite makes the norm NaN or infinite. Errors: [`Error::NoParameters`];
/// [`autograd::Error::Unreached`] when some parameter got no gradient in this step (its old one would count),
/// [`autograd::Error::NoBackward`] when none did, or when an optimiser has ended the step.
pub fn gradient_norm(gradients: &Gradients) -> Result<f64> {
    gradients.require_all()?;
    let flat = gradients.flat().ok_or(Error::NoParameters)?;
    if flat.device() != Device::Cpu {
        return Ok(cuda::norm(flat)?);
    }
    let mut total = [0.0];
    match_float!(flat.dtype(), "gradient_norm", T => {
        let g = flat.as_slice::<T>("gradient_norm")?;
        sum_in_pieces(g.len(), 1, 1, Out::store(&mut total), |range, sum| {
            let g = &g[range];
            sum[0] = simd!(A => sum_squares::<T, A>(g));
        });
    });
    Ok(total[0].sqrt())
}

/// The factor min(1, max_norm / norm) that brings gradients of this norm down to `max_norm`. An infinite `max_norm`
/// clips nothing.
pub(crate) fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    if norm > max_norm { max_norm / norm } else { 1.0 }
}

/// Whether the squares of gradients of this norm, scaled by this factor, are finite in their type: AdamW adds them up,
/// and an infinite sum would stay so.
pub(crate) fn has_finite_squares(norm: f64, scale: f64, dtype: DType) -> bool {
    let clipped = dtype.rounded_sum(norm * scale);
    dtype.rounded_sum(norm).is_finite() && dtype.rounded_sum(clipped * clipped).is_finite()
}

/// Σ x², in sixteen interleaved partial sums: an order that vector registers can follow.
#[inline(always)]
fn sum_squares<T: Float, A: Arch>(x: &[T]) -> f64 {
    let mut sums = [0.0; 16];
    let (blocks, tail) = x.as_chunks::<16>();
    for block in blocks {
        for (sum, x) in sums.iter_mut().zip(block) {
            *sum = A::mul_add(x.as_f64(), x.as_f64(), *sum);
        }
    }
    for (sum, x) in sums.iter_mut().zip(tail) {
        *sum = A::mul_add(x.as_f64(), x.as_f64(), *sum);
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{draw, give, parameters};
    use approx::assert_relative_eq;
    use tensor::cpu::parallel::thread_pool;

    #[test]
    fn three_and_four_make_five() {
        let parameters = parameters(DType::F32, &[("a", &[2]), ("b", &[1, 1])]);
        let mut gradients = Gradients::new(&parameters).unwrap();
        let none = autograd::Error::NoBackward;
        assert_eq!(gradient_norm(&gradients), Err(Error::Autograd(none.clone())));
        give(&parameters, &mut gradients, &[vec![0.0, 3.0], vec![-4.0]]);
        assert_eq!(gradient_norm(&gradients).unwrap(), 5.0);
        gradients.begin_step();
        assert_eq!(gradient_norm(&gradients), Err(Error::Autograd(none)), "those are old");
    }

    #[test]
    fn the_norm_is_that_of_a_plain_sum_with_any_number_of_threads() {
        for dtype in [DType::F32, DType::F64] {
            let parameters = parameters(dtype, &[("a", &[613, 301]), ("b", &[9])]);
            let mut gradients = Gradients::new(&parameters).unwrap();
            let values = [draw(613 * 301, 1), draw(9, 2)];
            give(&parameters, &mut gradients, &values);
            let norms =
                [1, 2].map(|threads| thread_pool(threads).unwrap().install(|| gradient_norm(&gradients).unwrap()));
            assert_eq!(norms[0].to_bits(), norms[1].to_bits());
            let plain = values.iter().flatten().map(|g| g * g).sum::<f64>().sqrt();
            assert_relative_eq!(norms[0], plain, max_relative = 1e-7);
        }
    }

    #[test]
    fn squares_beyond_f32_do_not_overflow() {
        let parameters = parameters(DType::F32, &[("a", &[2])]);
        let mut gradients = Gradients::new(&parameters).unwrap();
        give(&parameters, &mut gradients, &[vec![3e30, 4e30]]);
        assert_relative_eq!(gradient_norm(&gradients).unwrap(), 5e30, max_relative = 1e-6);
    }

    #[test]
    fn factors() {
        assert_eq!(clip_factor(10.0, 5.0), 0.5);
        assert_eq!(clip_factor(4.9, 5.0), 1.0);
        assert_eq!(clip_factor(0.0, 5.0), 1.0);
        assert_eq!(clip_factor(1e300, f64::INFINITY), 1.0);
    }

    #[test]
    fn what_is_not_finite_shows_in_the_norm() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let parameters = parameters(DType::F32, &[("a", &[50])]);
            let mut gradients = Gradients::new(&parameters).unwrap();
            let mut values = vec![1.0; 50];
            values[37] = value;
            give(&parameters, &mut gradients, &[values]);
            assert!(!gradient_norm(&gradients).unwrap().is_finite(), "{value}");
        }
        assert_eq!(gradient_norm(&Gradients::default()), Err(Error::NoParameters));
    }
}
