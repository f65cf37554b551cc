//! Rounds to bf16: to nearest, ties to even. NaN stays NaN, and f32 denormals become zero, as in the processors'
//! own conversions.

use crate::cpu::isa::Isa;
use crate::cpu::parallel::GRAIN;
use crate::{bf16, simd};
use rayon::prelude::*;

/// Rounds values, with other threads' help. Panics when the lengths differ.
pub fn round_all(values: &[f32], to: &mut [bf16]) {
    assert_eq!(values.len(), to.len(), "values that are rounded");
    values.par_chunks(GRAIN).zip(to.par_chunks_mut(GRAIN)).for_each(|(values, to)| round(values, to));
}

/// Rounds values. Panics when the lengths differ.
pub fn round(values: &[f32], to: &mut [bf16]) {
    assert_eq!(values.len(), to.len(), "values that are rounded");
    match Isa::current() {
        // SAFETY: the machine has the instruction set, and with it the conversion.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 | Isa::Amx => unsafe { converted(values, to) },
        isa => simd!(isa, _A => to.iter_mut().zip(values).for_each(|(to, &value)| *to = nearest(value))),
    }
}

/// One value.
#[inline(always)]
pub fn nearest(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let (zero, quiet) = (bits >> 16 & 0x8000, bits >> 16 | 0x40);
    let normal = if bits & 0x7F80_0000 == 0 { zero } else { rounded };
    bf16::from_bits(if value.is_nan() { quiet } else { normal } as u16)
}

/// One value in f64. It becomes an f32 first, but rounded to odd: what that drops leaves a 1 in the last place, so that
/// the second rounding does not take it for a tie.
pub fn nearest_of_f64(value: f64) -> bf16 {
    let near = value as f32;
    if f64::from(near) == value || value.is_nan() {
        return nearest(near);
    }
    let toward_zero = near.to_bits() - u32::from(f64::from(near).abs() > value.abs());
    nearest(f32::from_bits(toward_zero | 1))
}

/// By the processor's own conversion.
///
/// # Safety
/// The machine must have it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn converted(values: &[f32], to: &mut [bf16]) {
    use std::arch::x86_64::{__m512bh, __m512i, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_storeu_si512};
    const LANES: usize = 16;
    let (whole, rest) = values.as_chunks::<{ 2 * LANES }>();
    let (whole_to, rest_to) = to.as_chunks_mut::<{ 2 * LANES }>();
    for (values, to) in whole.iter().zip(whole_to) {
        // SAFETY: as many elements as are loaded and stored.
        unsafe {
            let (first, second) = (_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(LANES)));
            let rounded = _mm512_cvtne2ps_pbh(second, first);
            _mm512_storeu_si512(to.as_mut_ptr().cast(), std::mem::transmute::<__m512bh, __m512i>(rounded));
        }
    }
    rest_to.iter_mut().zip(rest).for_each(|(to, &value)| *to = nearest(value));
}
