//! The definitions of [`cross_entropy`](super::cross_entropy) and [`soft_cross_entropy`](super::soft_cross_entropy).

use autograd::exact::{Array, Scalar};

/// The mean over the rows of −Σₖ tₖ·ln softmax(x)ₖ, t = (1 − s)·[k = label] + s/K. Labels come as numbers.
pub fn cross_entropy<S: Scalar>(logits: &Array<S>, labels: &Array<S>, smoothing: f64) -> Array<S> {
    let targets = Array::from_fn(&logits.shape, |position| {
        let &[n, k] = position else { unreachable!("two axes") };
        let hit = if labels.data[n].value() == k as f64 { 1.0 - smoothing } else { 0.0 };
        S::of(hit + smoothing / logits.shape[1] as f64)
    });
    soft_cross_entropy(logits, &targets)
}

/// The mean over the rows of −Σₖ tₖ·ln softmax(x)ₖ.
pub fn soft_cross_entropy<S: Scalar>(logits: &Array<S>, targets: &Array<S>) -> Array<S> {
    let [rows, classes] = logits.dims();
    let mut total = S::of(0.0);
    for (x, t) in logits.data.chunks(classes).zip(targets.data.chunks(classes)) {
        let max = S::of(x.iter().map(|x| x.value()).fold(f64::NEG_INFINITY, f64::max));
        let log_sum = x.iter().map(|&x| (x - max).exp()).sum::<S>().ln() + max;
        total += x.iter().zip(t).map(|(&x, &t)| t * (log_sum - x)).sum::<S>();
    }
    Array { shape: vec![], data: vec![total / S::of(rows as f64)] }
}
