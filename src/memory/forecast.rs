//! How much memory training and inference take: measured on a few images, and foretold for many.
//!
//! Nearly all of it is in the buffer pool, whose statistics are read.

use crate::config::RunConfig;
use crate::trainer::learner::Learner;
use anyhow::{Error, Result};
use autograd::Tape;
use data::Batch;
use model::cost::{activation_bytes, macs};
use model::{BiFormer, Family, Mode, ModelConfig};
use std::cell::Cell;
use tensor::{DType, Device, Tensor, pool_stats, settle_pool, trim_pool};

/// The compute budget of a forecast: about how many pixels and how many multiply-adds of forward passes it may process.
/// (Models for which that is less than a few images take longer: on two cores of a Xeon `biformer info` takes three
/// seconds for `tiny`, and some fourteen for `base`, the largest of the published models. Half of that goes into
/// steps on ten images, and half into the pages of memory that these touch for the first time.)
struct Effort {
    pixels: usize,
    macs: u64,
    /// The most multiply-adds of one image. Where smaller images are no less work, since maps are padded to n_win
    /// regions a side, even an image of one pixel can be work for minutes.
    each: u64,
}

/// An image may be that of `base` at 224x224.
const TRAINING: Effort = Effort { pixels: 6 * 224 * 224, macs: 30_000_000_000, each: 10_000_000_000 };
/// A larger budget than for training, because there is no backward pass, which takes twice the time of the forward pass
/// and most of the memory. An image may be that of `tiny` at 896x896: four times what a quarter of it takes is up to a
/// tenth too much, and depends on the threads' timing.
const INFERENCE: Effort = Effort { pixels: 3 * TRAINING.pixels, macs: 2 * TRAINING.macs, each: 4 * TRAINING.each };

/// The fewest images measured for a training forecast, which also measures two thirds of them. Two thirds of 6 is 4,
/// the number of piece groups, each with gradient buffers of its own: with fewer images, one image more would also add
/// a group's buffers, and the slope would be wrong.
const MIN_TO_TRAIN: usize = 6;

/// How many passes of inference are measured.
const PASSES: usize = 4;
/// Roughly what the program takes besides the pool and its images: 10 MB of code, and the rest for threads, memory that
/// the allocator retains, and the unused part of the huge pages that the pool began last. (Not measured: once memory
/// has been freed, the system cannot tell how much of it still counts as resident.)
const PROGRAM: u64 = 15_000_000;

/// Height and width.
pub type Size = [usize; 2];

/// The peak resident bytes of training as configured, on images of this size, without the data set and without
/// prefetched batches. It runs a few steps, on up to the pixels of six images of 224x224; the free blocks of the pool
/// are given back to the system. None if that would take minutes, or too much memory itself. Errors: those of a
/// training step.
pub fn training(config: &RunConfig, size: Size) -> Result<Option<u64>> {
    let at_once = config.at_once();
    let Some(sample) = Sample::to_train(config, size)? else { return Ok(None) };
    let classes = config.architecture.num_classes;
    let with_test = Cell::new(0);
    let step = sample.forecast(at_once * sample.each, |images| {
        let config = RunConfig { micro_batches: 1, architecture: sample.model.clone(), ..config.clone() };
        let labels = (0..images).map(|image| (image % classes) as u32).collect();
        let shape = sample.images(images);
        let pixels = vec![0.5; shape.iter().product()];
        let batch = Batch { images: pixels, shape, labels, ..Batch::default() };
        let meter = Meter::start();
        let mut learner = Learner::blank(&config)?;
        learner.train(&batch.into(), 0, 1e-3, || None)?;
        let step = meter.most();
        // Where weights are most of it, the test after an epoch takes more: it prepares them for inference.
        learner.with_average(|model| Ok(model.prepared().map(drop)?))?;
        with_test.set(meter.most());
        Ok(step)
    })?;
    Ok(Some(PROGRAM + step.max(with_test.get()) + image_bytes(config, size)))
}

/// The peak resident bytes of inference on `batch_size` images of this size, computed in f32 or f64. It runs a few
/// passes on as many images as the model processes at once; on smaller images if that is too much work to measure, or
/// on fewer. None as of [`training`]. Errors: those of a pass.
pub fn inference(config: &RunConfig, size: Size, dtype: DType) -> Result<Option<u64>> {
    let Some((sample, at_once)) = Sample::to_infer(config, size)? else { return Ok(None) };
    let meter = Meter::start();
    let model = BiFormer::blank(&sample.model, dtype)?;
    // As in `Inference`, where the prepared weights take memory a second time.
    let factors = model.prepared()?;
    let weights = meter.most();
    let measured = at_once.min(sample.most);
    let images = Tensor::full(sample.images(measured), 0.5f32);
    let mut results = 0;
    // Which pieces of a batch are in memory at the same time is a matter of thread timing, so a single pass shows a
    // lower peak than many passes reach.
    for _ in 0..PASSES {
        settle_pool();
        let tape = Tape::inference();
        let pass = model.pass_with(factors.clone(), &tape, Mode::Evaluate).grouped_as(size);
        let values = model.run(&pass, &images)?;
        results = values.iter().map(|value| value.value().bytes()).sum::<usize>() as u64;
    }
    // What a thread retains for its kernels does not depend on the size of the images.
    let kept = pool_stats().kept as u64;
    let work = meter.most().saturating_sub(weights).saturating_sub(kept);
    let [work, results] = [work, results].map(|bytes| bytes * (sample.each * at_once) as u64 / measured as u64);
    // The images of the batch that wait for their turn, and the results of those that are done.
    let all = image_bytes(config, size);
    let others = (config.batch_size - at_once) as u64;
    let waiting = others * (all / config.batch_size as u64 + results / at_once as u64);
    Ok(Some(PROGRAM + weights + kept + work + waiting + all))
}

/// The bytes that a training step's forward pass keeps for its backward pass, for an image of a size. None as of
/// [`training`].
pub fn activations(config: &RunConfig, size: Size) -> Result<Option<usize>> {
    let Some(Sample { model, size: [height, width], each, .. }) = Sample::to_train(config, size)? else {
        return Ok(None);
    };
    let tape = config.recompute.tape(&Device::Cpu);
    Ok(Some(each * activation_bytes(&BiFormer::blank(&model, DType::F32)?, &tape, height, width)?))
}

/// What is measured for a forecast.
pub(super) struct Sample {
    /// The model, with `auto_pad` set if smaller images need it.
    model: ModelConfig,
    /// The size of the measured images: that of the real ones or, if those are too large to measure, half of their
    /// height and width, a quarter, ...; half of the longer side alone, if the other cannot be halved.
    size: Size,
    /// How many measured images have as many pixels as a real one, and so take about as much memory.
    each: usize,
    /// The largest batch of them that is measured.
    most: usize,
}

impl Sample {
    /// A sample of images of the real size or, if the budget does not allow at least `least` of those, of smaller ones,
    /// as far as these are less work in proportion. None if the smallest of them is too much work, too, or tells
    /// nothing of larger ones.
    fn of(config: &RunConfig, mut size: Size, effort: Effort, least: usize) -> Result<Option<Self>> {
        // A step in which no image skips a branch needs the most: it computes as if some could, but hardly any does.
        let drop_path = config.architecture.drop_path.min(1e-9);
        let (mut model, mut each) = (ModelConfig { drop_path, ..config.architecture.clone() }, 1);
        let macs_of = |model: &ModelConfig, [height, width]: Size| Ok::<_, Error>(macs(model, height, width)?.total());
        let real = macs_of(&model, size)?;
        loop {
            let [height, width] = size;
            let macs = macs_of(&model, size)?;
            let most = (effort.pixels / (height * width).max(1)).min((effort.macs / macs.max(1)) as usize);
            if most < least || macs > effort.each {
                // The scores of soft routing grow as the square of the pixels, so smaller images do not show how many
                // there are.
                if model.soft_routing {
                    return Ok(None);
                }
                model.auto_pad |= model.family != Family::BiformerStlNchw;
                let longer = if height > width { [height / 2, width] } else { [height, width / 2] };
                let smaller = [([height / 2, width / 2], 4), (longer, 2)];
                let fits = |&([height, width], _): &(Size, usize)| model.check_image(height, width).is_ok();
                if let Some((part, parts)) = smaller.into_iter().find(fits) {
                    // Maps that are padded to n_win regions a side do not get smaller, nor does the memory that they
                    // take.
                    let of_all = macs_of(&model, part)?.saturating_mul((parts * each) as u64);
                    if of_all as f64 <= 1.25 * real as f64 {
                        (size, each) = (part, parts * each);
                        continue;
                    }
                }
            }
            return Ok((macs <= effort.each).then(|| Self { model, size, each, most: most.max(3) }));
        }
    }

    /// The sample for a forecast of training on a batch: with enough images to show how much memory one more image
    /// takes.
    pub fn to_train(config: &RunConfig, size: Size) -> Result<Option<Self>> {
        let sample = Self::of(config, size, TRAINING, 1)?;
        Ok(sample.map(|sample| Self { most: sample.most.max(MIN_TO_TRAIN), ..sample }))
    }

    /// The sample for a forecast of inference, and how many images the model processes at once.
    pub fn to_infer(config: &RunConfig, size: Size) -> Result<Option<(Self, usize)>> {
        let most = BiFormer::blank(&config.architecture, DType::F32)?.images_at_once(size);
        let at_once = most.map_or(config.batch_size, |most| most.min(config.batch_size));
        Ok(Self::of(config, size, INFERENCE, at_once)?.map(|sample| (sample, at_once)))
    }

    /// Whether work on this many images takes no more than the measurement for its forecast would.
    pub fn contains(&self, images: usize) -> bool {
        images * self.each <= self.most
    }

    /// The shape of a batch of them.
    fn images(&self, count: usize) -> [usize; 4] {
        [count, self.size[0], self.size[1], 3]
    }

    /// The peak bytes of the pool for work on this many of the sample's images, extrapolated from `measured`, which
    /// measures a few. Once there is one image for each thread, each further image takes the same amount, so two small
    /// batches determine what a large one needs.
    fn forecast(&self, images: usize, measured: impl Fn(usize) -> Result<u64>) -> Result<u64> {
        let large = self.most;
        if images <= large {
            return measured(images);
        }
        let small = large * 2 / 3;
        let (less, more) = (measured(small)?, measured(large)?);
        Ok(more + more.saturating_sub(less) * (images - large) as u64 / (large - small) as u64)
    }
}

/// Measures how much of the pool some work takes. The pool's free blocks are returned to the system before and after.
struct Meter {
    before: usize,
}

impl Meter {
    fn start() -> Self {
        trim_pool();
        Self { before: pool_stats().resident }
    }

    /// The peak number of bytes so far; too low, down to 0, if another thread has trimmed the pool in the meantime.
    fn most(&self) -> u64 {
        pool_stats().resident.saturating_sub(self.before) as u64
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        trim_pool();
    }
}

/// The images of a batch as they come from the data set, in f32.
pub fn image_bytes(config: &RunConfig, [height, width]: Size) -> u64 {
    (config.batch_size * height * width * 3 * 4) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padded_images_do_not_stand_for_larger_ones() -> Result<()> {
        let run = RunConfig::for_model("nano")?;
        let architecture = run.architecture.with_overrides(["n_win=64", "auto_pad=true"])?;
        let run = RunConfig { architecture, batch_size: 64, ..run };
        let Some((sample, at_once)) = Sample::to_infer(&run, [32, 32])? else { panic!("a few images") };
        assert_eq!((sample.size, sample.each), ([32, 32], 1));
        assert!(sample.most < at_once, "{} of {at_once}", sample.most);
        Ok(())
    }

    #[test]
    fn a_sample_is_little_work_or_there_is_none() -> Result<()> {
        let sampled = |fields: &[&str], size| -> Result<Option<(Size, usize)>> {
            let run = RunConfig::for_model("nano")?;
            let architecture = run.architecture.with_overrides(fields.iter().copied())?;
            let sample = Sample::to_train(&RunConfig { architecture, ..run }, size)?;
            Ok(sample.map(|sample| (sample.size, sample.each)))
        };
        assert_eq!(sampled(&[], [32, 32])?, Some(([32, 32], 1)));
        assert_eq!(sampled(&[], [4096, 2048])?, Some(([256, 128], 256)));
        assert_eq!(sampled(&["soft_routing=true"], [32, 32])?, Some(([32, 32], 1)));
        assert_eq!(sampled(&["soft_routing=true"], [4096, 2048])?, None);
        // A side of one pixel cannot be halved.
        let padded = ["n_win=32", "auto_pad=true", "topks=1,4,16"];
        let Some(([height, 1], each)) = sampled(&padded, [8192, 1])? else { panic!("a sample as wide") };
        assert!(height < 8192 && each * height == 8192, "{height}, {each}");
        let all = ["n_win=64", "auto_pad=true", "topks=4096,4096,4096"];
        for size in [[8192, 1], [2048, 2048], [1, 1]] {
            assert!(sampled(&all, size)?.is_none(), "{size:?}");
        }
        Ok(())
    }
}
