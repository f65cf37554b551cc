//! Cross-entropy with class labels, or with soft targets, for mixed images and token labels: shares of the classes.
//! Fused with the softmax.
//!
//! **Forward.** Logits x (N, K), one label l\[n\] < K per row, smoothing s. The target distribution of row n is t = (1
//! − s)·[k = l] + s/K, and the loss is the mean over the rows of −Σₖ tₖ·ln pₖ with p = softmax(x). As ln pₖ = (xₖ − m)
//! − ln Σ exp(x − m) with m = max(x), the loss of a row is Σt·ln Σ exp(x − m) − Σ t·(x − m). The logarithm of a
//! probability that has underflowed is never taken. Instead of labels there may be shares t (N, K): Σt is 1 for
//! distributions, but nothing here relies on it.
//!
//! **Backward.** ∂/∂xₖ ln Σ exp(x) = pₖ, hence dxₖ = dy·(pₖ·Σt − tₖ)/N. Saved: p and the targets. The logits would do
//! as well, but p takes the same memory, allows the logits to be freed, and leaves the backward pass a single sweep
//! without exponentials.
//!
//! Targets get no gradient: labels are an index tensor (N), shares of the type of x. All must be contiguous, x f32 or
//! f64, and on a GPU also bf16, for which shares, p and the loss are f32; the loss has the shape (). Errors:
//! [`tensor::Error::Shape`] if the shapes do not fit, or if there are no rows or no classes,
//! [`tensor::Error::Argument`] for a label that is not a valid class (the message names the row) or s outside [0, 1],
//! [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Labels on a GPU cannot be checked without synchronising
//! with it: there an invalid label makes the loss and its row's gradient NaN. Source: `torch.nn.CrossEntropyLoss`,
//! timm's `SoftTargetCrossEntropy`; label smoothing by Szegedy et al., "Rethinking the Inception architecture", 2016.

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{DType, Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "mean of -Σ t·ln softmax(x) for class labels, smoothed, or for shares";

/// The mean cross-entropy of logits (N, K) against the classes `labels` (N, index), smoothed by
/// `smoothing` in [0, 1]: a scalar.
/// Operands and errors: those of the [module](mod@crate::cross_entropy).
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
    labels.ensure_dtype("cross_entropy", DType::Index)?;
    if let Device::Cpu = logits.value().device() {
        all_are_classes(labels.as_slice("cross_entropy")?, classes)?;
    }
    recorded("cross_entropy", logits, labels, smoothing)
}

/// The mean cross-entropy of logits (N, K) against the shares `targets` (N, K): a scalar.
/// Operands and errors: those of the [module](mod@crate::cross_entropy).
pub fn soft_cross_entropy<'t>(logits: &Var<'t>, targets: &Tensor) -> Result<Var<'t>> {
    extents_of("soft_cross_entropy", logits.value())?;
    if targets.shape() != logits.shape() {
        let expected = format!("targets like the logits, {}", logits.shape());
        return Err(Error::shape("soft_cross_entropy", expected, targets.shape()).into());
    }
    targets.ensure_dtype("soft_cross_entropy", logits.dtype().of_sums())?;
    recorded("soft_cross_entropy", logits, targets, 0.0)
}

/// The mean cross-entropy against targets of either kind, which their type tells apart.
fn recorded<'t>(op: &'static str, logits: &Var<'t>, targets: &Tensor, smoothing: f64) -> Result<Var<'t>> {
    let device = logits.value().device();
    let mut p = Tensor::empty_on(&device, logits.shape().clone(), logits.dtype().of_sums())?;
    let loss = match device {
        Device::Cpu => match_float!(logits.dtype(), op, T => {
            Tensor::scalar(cpu::forward::<T>(op, logits.value(), targets, smoothing, &mut p)?)
        }),
        Device::Cuda(_) => {
            let mut loss = Tensor::empty_on(&device, [], p.dtype())?;
            cuda::forward(op, logits.value(), targets, smoothing, &mut p, &mut loss)?;
            loss
        }
    };
    let rule = || CrossEntropy { p, targets: targets.clone(), smoothing };
    logits.tape().record("cross_entropy", &[logits], loss, rule)
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
fn extents_of(op: &'static str, logits: &Tensor) -> tensor::Result<[usize; 2]> {
    let extents = logits.dims(op, "logits (N, K)")?;
    if extents.contains(&0) {
        return Err(Error::shape(op, "logits (N, K) with at least one row and one class", logits.shape()));
    }
    Ok(extents)
}

struct CrossEntropy {
    p: Tensor,
    targets: Tensor,
    smoothing: f64,
}

impl Rule for CrossEntropy {
    rule_fields!("cross_entropy", p, targets);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let Self { p, targets, smoothing } = *self;
        give!(grads, 0, dy, "cross_entropy", out => {
            Cpu<T>: cpu::backward(dy.item::<T>()?, &p, &targets, smoothing, out)?,
            Cuda: cuda::backward(&dy, &p, &targets, smoothing, out)?,
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
    fn targets_that_do_not_fit_are_refused() {
        let tape = Tape::inference();
        let refused = |logits: [usize; 2], targets: &Tensor| {
            soft_cross_entropy(&tape.constant(uniform(logits, 1)), targets).expect_err("does not fit").to_string()
        };
        assert!(refused([2, 3], &uniform([3, 2], 1)).contains("targets like the logits, (2, 3)"));
        assert!(refused([0, 3], &uniform([0, 3], 1)).contains("(0, 3)"));
        assert!(refused([2, 3], &Tensor::full([2, 3], 0.5f32)).contains("expected f64"));
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
