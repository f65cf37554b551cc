//! How well images were classified: while training, and in a test.

use super::learner::{advice, loss};
use crate::inference::Inference;
use crate::staging::{Numbered, numbered, tensors};
use anyhow::{Context, Result, bail};
use autograd::Tape;
use data::Loader;
use model::{BiFormer, Features, Mode};
use serde::{Deserialize, Serialize};
use std::sync::atomic::AtomicBool;
use tensor::{DType, Device, Tensor};

/// How well a number of images were classified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The sum of the images' losses.
    pub loss: f64,
    /// How many were right.
    pub right: u64,
    /// How many had their class among the five likeliest.
    pub right_in_five: u64,
    /// How many there were.
    pub images: u64,
}

impl Score {
    /// Takes another score in.
    pub fn add(&mut self, other: Score) {
        self.loss += other.loss;
        self.right += other.right;
        self.right_in_five += other.right_in_five;
        self.images += other.images;
    }

    /// The mean loss.
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.images.max(1) as f64
    }

    /// The share that was right.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.images.max(1) as f64
    }

    /// The share whose class was among the five likeliest.
    pub fn top5(&self) -> f64 {
        self.right_in_five as f64 / self.images.max(1) as f64
    }
}

/// What a model took an image for.
#[derive(Clone, Copy, Debug)]
pub struct Verdict {
    /// The image's number in the data set.
    pub sample: usize,
    /// Its class.
    pub label: u32,
    /// The class that the model finds likeliest, of equal ones the lowest.
    pub predicted: u32,
    /// The probability that it gives this class.
    pub probability: f64,
    /// How well it did.
    pub score: Score,
}

/// What a model made of a number of images: all together, and those of each class.
#[derive(Clone, Debug)]
pub struct Tested {
    /// All of them, added up in their order.
    pub all: Score,
    /// By their class.
    pub of_classes: Vec<Score>,
}

impl Tested {
    /// No images, of so many classes.
    pub fn new(classes: usize) -> Self {
        Self { all: Score::default(), of_classes: vec![Score::default(); classes] }
    }

    /// Takes an image in.
    pub fn add(&mut self, verdict: &Verdict) {
        self.all.add(verdict.score);
        self.of_classes[verdict.label as usize].add(verdict.score);
    }

    /// The mean of the classes' accuracies, of those that have images.
    pub fn macro_accuracy(&self) -> f64 {
        let there = self.of_classes.iter().filter(|score| score.images > 0);
        there.clone().map(Score::accuracy).sum::<f64>() / there.count().max(1) as f64
    }
}

/// How well a model does on all images of a loader, which is to be one for evaluation
/// ([`LoaderConfig::eval`](data::LoaderConfig::eval)). Errors: those of [`test()`].
pub fn tested(model: &BiFormer, loader: &Loader) -> Result<Tested> {
    let mut tested = Tested::new(loader.dataset().classes().len());
    test(model, loader, &AtomicBool::new(false), "test", |_, verdicts, _| {
        verdicts.iter().for_each(|verdict| tested.add(verdict));
        Ok(())
    })?;
    Ok(tested)
}

/// Tests a model on all images of a loader, or until `stop` is set: `each` gets every batch with the model's verdicts
/// on those of its images [that count](data::Batch::counted), and its logits (N, K) on all of them. Returns whether all
/// batches have been tested. Errors: a model without a head; a loader that varies images; those of the loader, and of
/// `each`; a loss that is not finite, whose message begins with `way_out`.
pub fn test(
    model: &BiFormer,
    loader: &Loader,
    stop: &AtomicBool,
    way_out: &str,
    mut each: impl FnMut(&Numbered, Vec<Verdict>, &Tensor) -> Result<()>,
) -> Result<bool> {
    if model.config().features != Features::Logits {
        return Err(model::Error::Headless { features: model.config().features.name() }.into());
    }
    if loader.transform().augmentation().is_some() {
        bail!("these batches are varied, as for training: a test needs those of LoaderConfig::eval");
    }
    let (all, mut tested) = (loader.batches_per_epoch(), 0);
    let mut inference = Inference::new(model, all);
    let mut batches = numbered(loader.epoch_until(0, 0, stop));
    while let Some(batch) = batches.next() {
        let batch = batch?;
        let (verdicts, logits) = evaluate(&mut inference, &batch, way_out, || batches.peek()?.as_ref().ok())?;
        each(&batch, verdicts, logits)?;
        loader.recycle(batch.into_batch());
        tested += 1;
    }
    Ok(tested == all)
}

/// A model's verdicts on those images of a batch that count, and its logits. `next` returns the batch that is evaluated
/// after this one, and is called as by [`Inference::pass`].
fn evaluate<'b, 'i>(
    inference: &'i mut Inference<'_>,
    batch: &Numbered,
    way_out: &str,
    next: impl FnOnce() -> Option<&'b Numbered>,
) -> Result<(Vec<Verdict>, &'i Tensor)> {
    inference.stage(batch)?;
    let model = inference.model();
    let logits = inference.pass(next)?.first().context("a model that gives nothing")?;
    let images = batch.labels.iter().zip(&batch.samples);
    let judged = for_rows(logits, images, |row, (&label, &sample)| {
        let (predicted, probability, score) = verdict(row, label)?;
        Ok(Verdict { sample, label, predicted, probability, score })
    })?;
    let counted = judged.into_iter().zip(batch.counted());
    let counted: Vec<Verdict> = counted.filter_map(|(verdict, counts)| counts.then_some(verdict)).collect();
    match counted.iter().find(|verdict| !verdict.score.loss.is_finite()) {
        None => Ok((counted, logits)),
        Some(Verdict { score, .. }) => {
            let first = first_to_go_wrong(model, &tensors(batch, 0, 1)?, Mode::Evaluate, 0.0);
            bail!("{way_out}: the loss is {}; {first}", score.loss)
        }
    }
}

/// The score of a micro-batch's training pass in this step, from its loss and logits, on whichever device they are. For
/// mixed images, `labels` are the classes of the larger parts. Errors: a loss that is not finite.
pub(super) fn judge(
    model: &BiFormer,
    step: u64,
    given: &[Tensor; 2],
    labels: &[u32],
    mode: Mode,
    label_smoothing: f64,
    [loss, logits]: [&Tensor; 2],
) -> Result<Score> {
    let mean = f64::from(loss.item::<f32>()?);
    if !mean.is_finite() {
        let first = first_to_go_wrong(model, given, mode, label_smoothing);
        bail!("{}: the loss is {mean}; {first}", advice(step));
    }
    let mut total = Score::default();
    let scores = for_rows(logits, labels, |row, &label| score(row, label))?;
    scores.into_iter().for_each(|score| total.add(score));
    Ok(Score { loss: mean * total.images as f64, ..total })
}

/// Repeats a pass whose loss was not finite, this time checking every value, to name the first operation that went
/// wrong.
fn first_to_go_wrong(model: &BiFormer, [images, targets]: &[Tensor; 2], mode: Mode, label_smoothing: f64) -> String {
    let tape = Tape::checking_finite();
    let pass = model.forward(&tape, images, mode).map_err(anyhow::Error::from).and_then(|output| {
        let targets = targets.to_device(&output.logits()?.value().device())?;
        loss(output.logits()?, &targets, label_smoothing)?;
        Ok(())
    });
    match pass {
        Err(error) => format!("the first operation to go wrong: {error:#}"),
        Ok(()) => "no operation of the forward pass shows why".to_owned(),
    }
}

/// The class of a row's largest logit, of equal ones the lowest; its share of the softmax; and the row's score, with
/// the plain cross-entropy.
fn verdict(row: &[f32], label: u32) -> Result<(u32, f64, Score)> {
    let score = score(row, label)?;
    let higher = |best: (u32, f32), (class, &x): (u32, &f32)| if x > best.1 { (class, x) } else { best };
    let (class, largest) = (0u32..).zip(row).fold((0, f32::NEG_INFINITY), higher);
    let total: f64 = exponentials(row, largest).sum();
    let loss = libm::log(total) - f64::from(row[label as usize] - largest);
    Ok((class, 1.0 / total, Score { loss, ..score }))
}

/// The score of a row of logits, without its loss.
#[expect(clippy::neg_cmp_op_on_partial_ord, reason = "!(x < own) also holds for NaN, which is to come first")]
fn score(row: &[f32], label: u32) -> Result<Score> {
    let classes = row.len();
    let own = row.get(label as usize).copied().with_context(|| format!("label {label} of {classes} classes"))?;
    // Of equal ones, the lower class; and NaN comes before all, so a row of NaN is not right. Sums of comparisons, as a
    // GPU waits for this after each step: a branch for each logit takes ten times as long.
    let (lower, others) = row.split_at(label as usize);
    let before = lower.iter().map(|&x| u32::from(!(x < own))).sum::<u32>()
        + others.iter().map(|&x| u32::from(!(x <= own))).sum::<u32>();
    Ok(Score { loss: 0.0, right: u64::from(before == 0), right_in_five: u64::from(before < 5), images: 1 })
}

/// The softmax of each row of logits (N, K), one after the other. Errors: logits of another shape.
pub fn probabilities(logits: &Tensor) -> Result<Vec<f64>> {
    let rows = for_rows(logits, std::iter::repeat(()), |row, ()| {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f64 = exponentials(row, largest).sum();
        Ok(exponentials(row, largest).map(|exponential| exponential / total).collect::<Vec<_>>())
    })?;
    Ok(rows.concat())
}

/// exp(x - largest) of each logit of a row: divided by their sum, these are the probabilities.
fn exponentials(row: &[f32], largest: f32) -> impl Iterator<Item = f64> {
    row.iter().map(move |&x| libm::exp(f64::from(x - largest)))
}

/// Applies `of` to each row of logits (N, K), together with the image that it belongs to.
fn for_rows<I, T>(
    logits: &Tensor,
    images: impl IntoIterator<Item = I>,
    of: impl Fn(&[f32], I) -> Result<T>,
) -> Result<Vec<T>> {
    let [_, classes] = logits.dims("score", "logits (N, K)")?;
    let logits = logits.to_device(&Device::Cpu)?.cast(DType::F32)?;
    let logits = logits.as_slice::<f32>("score")?;
    logits.chunks(classes.max(1)).zip(images).map(|(row, image)| of(row, image)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use data::{Augmentation, LoaderConfig, Split, Transform};
    use model::preset;
    use std::sync::Arc;

    #[test]
    fn logits_of_unvaried_images_are_tested() -> Result<()> {
        let small = ["depth=1,1,1", "embed_dim=24,48,96"];
        let images = data::open("embedded", Split::Test)?;
        let plain = Transform::eval(32, images.statistics())?;
        let varied = Transform::train(32, images.statistics(), &Augmentation::default())?;
        for (features, transform, said) in
            [("pooled", &plain, "gives no logits"), ("dense", &plain, "gives no logits"), ("logits", &varied, "varied")]
        {
            let of = format!("features={features}");
            let config = preset("nano")?.config().with_overrides(small.into_iter().chain([of.as_str()]))?;
            let loader = Loader::new(Arc::clone(&images), LoaderConfig::eval(10, transform.clone()))?;
            let refused = tested(&BiFormer::new(&config, 0, DType::F32)?, &loader).unwrap_err().to_string();
            assert!(refused.contains(said), "{refused}");
        }
        Ok(())
    }

    #[test]
    fn a_row_is_right_where_its_label_is_first() -> Result<()> {
        let row = [0.5, 2.0, 2.0, -1.0, 0.0, 0.1, 0.2];
        let scores: Vec<Score> = (0..7).map(|label| score(&row, label)).collect::<Result<_>>()?;
        let right: Vec<u64> = scores.iter().map(|score| score.right).collect();
        assert_eq!(right, [0, 1, 0, 0, 0, 0, 0], "of equal ones, the lower class");
        let in_five: Vec<u64> = scores.iter().map(|score| score.right_in_five).collect();
        assert_eq!(in_five, [1, 1, 1, 0, 0, 1, 1]);
        let (class, probability, Score { loss, .. }) = verdict(&row, 3)?;
        let total: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        assert!((loss - (total.ln() + 1.0)).abs() < 1e-7, "{loss}");
        assert_eq!(class, 1, "the one that is right");
        assert!((probability - f64::exp(2.0) / total).abs() < 1e-7, "{probability}");
        Ok(())
    }

    #[test]
    fn nothing_is_right_about_nan() -> Result<()> {
        for (row, label) in [([f32::NAN; 7], 0), ([0.0, 0.0, f32::NAN, 0.0, 0.0, 0.0, 0.0], 2)] {
            let (_, _, score) = verdict(&row, label)?;
            assert_eq!([score.right, score.right_in_five, score.images], [0, 0, 1]);
            assert!(!score.mean_loss().is_finite());
        }
        Ok(())
    }
}
