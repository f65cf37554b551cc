//! Cross-entropy with class labels, fused with the softmax.
//!
//! **Forward.** Logits x (N, K), one label l\[n\] < K per row, smoothing s. The target distribution of row n is t
//! = (1 − s)·[k = l] + s/K, and the loss is the mean over the rows of −Σₖ tₖ·ln pₖ with p = softmax(x). As ln pₖ =
//! (xₖ − m) − ln Σ exp(x − m) with m = max(x), and Σ t = 1, the loss of a row is ln Σ exp(x − m) − Σ t·(x − m). The
//! logarithm of a probability that has underflowed is never taken.
//!
//! **Backward.** ∂/∂xₖ ln Σ exp(x) = pₖ, hence dxₖ = dy·(pₖ − tₖ)/N. Saved: p and the labels. The logits would do as
//! well, but p takes the same memory, allows the logits to be freed, and leaves the backward pass a single sweep
//! without exponentials.
//!
//! The labels are an index tensor (N) and get no gradient; x must be contiguous, f32 or f64, and on a GPU also bf16,
//! for which p and the loss are f32; the loss has the shape (). Errors: [`tensor::Error::Shape`] if the shapes do not
//! fit, or if there are no rows or no classes, [`tensor::Error::Argument`] for a label that is not a valid class
//! (the message names the row) or s outside [0, 1], [`tensor::Error::NotContiguous`], [`tensor::Error::DType`].
//! Labels on a GPU cannot be checked without synchronising with it: there an invalid label makes the loss and its
//! row's gradient NaN. Source: `torch.nn.CrossEntropyLoss`; label smoothing by Szegedy et al., "Rethinking the
//! Inception architecture", 2016.

pub mod cases;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub mod reference;

use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use cpu::Labels;
use tensor::cuda::Module;
use tensor::{Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "mean of -Σ t·ln softmax(x) for class labels, smoothed";

/// The mean cross-entropy of logits (N, K) against the classes `labels` (N, index), smoothed by
/// `smoothing` in [0, 1]: a scalar.
pub fn cross_entropy<'t>(logits: &Var<'t>, labels: &Tensor, smoothing: f64) -> Result<Var<'t>> {
    let [rows, classes] = extents_of("cross_entropy", logits.value())?;
    if *labels.shape() != [rows] {
        let expected = format!("labels ({rows}), as the logits are {}", logits.shape());
        return Err(Error::shape("cross_entropy", expected, labels.shape()).into());
    }
    if !(0.0..=1.0).contains(&smoothing) {
        let message = format!("the label smoothing is {smoothing}, but must be from 0 to 1");
        return Err(Error::argument("cross_entropy", message).into());
    }
    let device = logits.value().device();
    let mut p = Tensor::empty_on(&device, logits.shape().clone(), logits.dtype().of_sums())?;
    let loss = match device {
        Device::Cpu => {
            let labels = labels.as_slice::<u32>("cross_entropy")?;
            all_are_classes(labels, classes)?;
            match_float!(logits.dtype(), "cross_entropy", T => Tensor::scalar(cpu::forward::<T>(
                logits.value().as_slice("cross_entropy")?,
                &Labels { labels, smoothing: smoothing as T, classes },
                p.as_mut_slice("cross_entropy")?,
            )))
        }
        Device::Cuda(_) => {
            let mut loss = Tensor::empty_on(&device, [], p.dtype())?;
            cuda::forward(logits.value(), labels, smoothing, &mut p, &mut loss)?;
            loss
        }
    };
    logits.tape().record("cross_entropy", &[logits], loss, || CrossEntropy { p, labels: labels.clone(), smoothing })
}

fn all_are_classes(labels: &[u32], classes: usize) -> tensor::Result<()> {
    match labels.iter().enumerate().find(|&(_, &label)| label as usize >= classes) {
        Some((row, label)) => Err(Error::argument(
            "cross_entropy",
            format!("row {row} has the label {label}, must be below {classes}, the number of classes"),
        )),
        None => Ok(()),
    }
}

/// The extents of logits (N, K), which must have at least one row and one class.
pub(crate) fn extents_of(op: &'static str, logits: &Tensor) -> tensor::Result<[usize; 2]> {
    let extents = logits.dims(op, "logits (N, K)")?;
    if extents.contains(&0) {
        return Err(Error::shape(op, "logits (N, K) with at least one row and one class", logits.shape()));
    }
    Ok(extents)
}

struct CrossEntropy {
    p: Tensor,
    labels: Tensor,
    smoothing: f64,
}

impl Rule for CrossEntropy {
    rule_fields!("cross_entropy", p, labels);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let [_, classes] = extents_of("cross_entropy", &self.p)?;
        give!(grads, 0, dy, "cross_entropy", out => {
            Cpu<T>: {
                let labels = self.labels.as_slice("cross_entropy")?;
                let labels = Labels { labels, smoothing: self.smoothing as T, classes };
                cpu::backward(dy.item()?, self.p.as_slice("cross_entropy")?, &labels, out);
            },
            Cuda: cuda::backward(&dy, &self.p, &self.labels, self.smoothing, out)?,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::uniform;
    use autograd::Tape;

    fn refused(shape: [usize; 2], labels: &[u32], smoothing: f64) -> String {
        let tape = Tape::inference();
        let labels = Tensor::from_slice(labels, [labels.len()]).unwrap();
        let loss = cross_entropy(&tape.constant(uniform(shape, 1)), &labels, smoothing);
        loss.expect_err("nothing to compute").to_string()
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let message = refused([3, 5], &[4, 5, 0], 0.0);
        assert!(message.contains("row 1 has the label 5, must be below 5"), "{message}");
        assert!(refused([0, 5], &[], 0.0).contains("(0, 5)"));
        assert!(refused([2, 0], &[0, 0], 0.0).contains("(2, 0)"));
        assert!(refused([2, 3], &[0], 0.0).contains("labels (2)"));
        for smoothing in [-0.1, 1.1, f64::NAN] {
            assert!(refused([1, 3], &[0], smoothing).contains("from 0 to 1"));
        }
    }

    #[test]
    fn an_impossible_class_costs_nothing_unless_it_is_the_label() {
        let tape = Tape::new();
        let logits = tape.input(Tensor::from_slice(&[0.0f32, f32::NEG_INFINITY, 0.0], [1, 3]).unwrap());
        let loss = |label: u32, smoothing: f64| {
            let labels = Tensor::from_slice(&[label], [1]).unwrap();
            cross_entropy(&logits, &labels, smoothing).unwrap().value().item::<f32>().unwrap()
        };
        assert_eq!(loss(0, 0.0), std::f32::consts::LN_2);
        assert_eq!(loss(1, 0.0), f32::INFINITY);
        // Smoothed, it is part of the target, whatever the label.
        assert_eq!([loss(0, 0.1), loss(1, 0.1), loss(1, 1.0)], [f32::INFINITY; 3]);
    }
}
