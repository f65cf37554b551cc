//! CPU kernel of [`scale`](super::scale), forward and backward.

use rayon::prelude::*;
use tensor::Float;
use tensor::cpu::parallel::{GRAIN, Out};

pub fn scale<T: Float>(x: &[T], factor: T, Out { data, accumulate }: Out<'_, T>) {
    data.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).for_each(|(data, x)| {
        for (y, &x) in data.iter_mut().zip(x) {
            *y = if accumulate { *y + factor * x } else { factor * x };
        }
    });
}
