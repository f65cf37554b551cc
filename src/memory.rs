//! How much memory training and inference take: measured on a few images, and foretold for many. And what is said where
//! it is not there.
//!
//! Nearly all of it lies in the buffer pool, and the pool is asked. What a batch takes grows by the same amount for
//! each image, from the second on, so two small batches tell what a large one needs.

use crate::config::RunConfig;
use crate::device::DeviceName;
use crate::trainer::step::Learner;
use anyhow::{Result, bail};
use autograd::Tape;
use data::Batch;
use model::cost::{activation_bytes, parts};
use model::{BiFormer, Family, Mode, ModelConfig};
use std::any::Any;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use tensor::{DType, Device, OUT_OF_MEMORY, Tensor, pool_stats, trim_pool};

/// About how many pixels may be computed for a forecast, and how many multiply-adds of a forward pass: a second of work
/// for the largest of the published models.
const PIXELS: usize = 6 * 224 * 224;
const MACS: u64 = 30_000_000_000;
/// What the program takes besides the pool and its images, about: code, threads, what the allocator keeps. (Not
/// measured: once something has been freed, the system cannot tell how much of it is still counted.)
const PROGRAM: u64 = 12_000_000;

/// Height and width.
pub type Size = [usize; 2];

/// The resident bytes at the peak of training steps as configured, on images of a size, without the data set and the
/// batches that are made ahead. It runs a few steps, on up to the pixels
/// of six images of 224x224; the free blocks of the pool are given back to the system. Errors: those of a training step.
pub fn training(config: &RunConfig, size: Size) -> Result<u64> {
    let at_once = config.batch_size.div_ceil(config.micro_batches);
    let sample = Sample::of(config, size)?;
    let classes = config.architecture.num_classes;
    let model = sample.forecast(at_once, |images| {
        let config = RunConfig { micro_batches: 1, architecture: sample.model.clone(), ..config.clone() };
        let labels = (0..images).map(|image| (image % classes) as u32).collect();
        let shape = sample.images(images);
        let pixels = vec![0.5; shape.iter().product()];
        let batch = Batch { images: pixels, shape, labels, ..Batch::default() };
        Learner::blank(&config)?.train(&config, &batch.into(), 0, 1e-3, || None).map(|_| ())
    })?;
    Ok(PROGRAM + model + image_bytes(config, size))
}

/// The resident bytes at the peak of inference on `batch_size` images of a size at once, computed in f32 or f64.
pub fn inference(config: &RunConfig, size: Size, dtype: DType) -> Result<u64> {
    let sample = Sample::of(config, size)?;
    let model = sample.forecast(config.batch_size, |images| {
        let model = BiFormer::blank(&sample.model, dtype)?;
        let images = Tensor::full(sample.images(images), 0.5f32);
        // As `Inference` does it, whose weights take room a second time.
        model.forward_with(model.prepared()?, &Tape::inference(), &images, Mode::Evaluate)?;
        Ok(())
    })?;
    Ok(PROGRAM + model + image_bytes(config, size))
}

/// The bytes that a training step's forward pass keeps for its backward pass, for an image of a size.
pub fn activations(config: &RunConfig, size: Size) -> Result<usize> {
    let Sample { model, size: [height, width], each, .. } = Sample::of(config, size)?;
    let tape = config.recompute.tape(&Device::Cpu);
    Ok(each * activation_bytes(&BiFormer::blank(&model, DType::F32)?, &tape, height, width)?)
}

/// Refuses training that would not fit into the machine's memory, where the system tells how much is free, and says what
/// to do instead. The images lie beside the pool, in so many bytes: more than a batch, where batches are made ahead.
pub fn expect_room_to_train(config: &RunConfig, size: Size, images: u64) -> Result<()> {
    let at_once = config.batch_size.div_ceil(config.micro_batches);
    let words = ["training", "a smaller batch_size, in a run more micro_batches, or recompute = \"block\""];
    // Weights, their gradients, and two moments.
    let weights = 4 * DType::F32.size();
    let all = || Ok(training(config, size)? + images.saturating_sub(image_bytes(config, size)));
    expect_room(config, size, [at_once, weights], images, all, words)
}

/// The same for [`inference`].
pub fn expect_room_to_infer(config: &RunConfig, size: Size, images: u64, dtype: DType) -> Result<()> {
    // Weights, as they are and as they are prepared.
    let weights = 2 * dtype.size();
    let words = ["inference", "a smaller batch_size, or smaller images"];
    let all = || Ok(inference(config, size, dtype)? + images.saturating_sub(image_bytes(config, size)));
    expect_room(config, size, [config.batch_size, weights], images, all, words)
}

/// Refuses a forecast of a model that is too large to be measured.
pub fn expect_room_to_foretell(config: &RunConfig) -> Result<()> {
    let needed = 4.0 * DType::F32.size() as f64 * config.architecture.rough_size();
    free_bytes().map_or(Ok(()), |free| expect_fit(["forecast", "a smaller model"], needed as u64, free))
}

/// With so many images at once, and so many bytes for each weight, and for all images. Nothing is foretold that is so small
/// that foretelling it would take as much, nor where weights and images alone do not fit.
fn expect_room(
    config: &RunConfig,
    size: Size,
    [at_once, weight]: [usize; 2],
    images: u64,
    forecast: impl Fn() -> Result<u64>,
    words: [&str; 2],
) -> Result<()> {
    // What the machine's memory holds then is little; a GPU says itself when it has no room.
    if config.device != DeviceName::Cpu {
        return Ok(());
    }
    let Some(free) = free_bytes() else { return Ok(()) };
    expect_fit(words, images.saturating_add((weight as f64 * config.architecture.rough_size()) as u64), free)?;
    let sample = Sample::of(config, size)?;
    if at_once * sample.each <= sample.most {
        return Ok(());
    }
    expect_fit(words, forecast()?, free)
}

fn expect_fit([work, choice]: [&str; 2], needed: u64, free: u64) -> Result<()> {
    if needed <= free {
        return Ok(());
    }
    let [needed, free] = [needed, free].map(|bytes| bytes as f64 / 1e9);
    bail!("this {work} takes about {needed:.1} GB of memory and {free:.1} GB are free: choose {choice}")
}

/// Does some work, and where it ends because the system has no memory left, which nobody could foretell, makes that an
/// error. Other panics go on.
pub fn or_out_of_memory<R>(work: impl FnOnce() -> Result<R>) -> Result<R> {
    let as_ever = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        // Several threads may find that there is none: it is said once, below.
        if !lack(info.payload()) {
            as_ever(info);
        }
    }));
    // Nothing that the work was about is used afterwards.
    match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(panic) if lack(panic.as_ref()) => {
            let said = panic.downcast_ref::<String>().map_or(OUT_OF_MEMORY, String::as_str);
            bail!("{said}; a smaller batch_size, or in training recompute \"block\", needs less")
        }
        Err(panic) => panic::resume_unwind(panic),
    }
}

/// Whether a panic says that there was no memory.
fn lack(panic: &(dyn Any + Send)) -> bool {
    panic.downcast_ref::<String>().is_some_and(|said| said.starts_with(OUT_OF_MEMORY))
}

/// What is measured for a forecast.
struct Sample {
    /// The model, which may have to pad.
    model: ModelConfig,
    /// The images' size: that of the real ones, or where they are huge half as high and wide, a quarter, ...
    size: Size,
    /// How many of them have the pixels of a real one, and so take about its memory.
    each: usize,
    /// The largest batch of them that is measured.
    most: usize,
}

impl Sample {
    fn of(config: &RunConfig, mut size: Size) -> Result<Self> {
        let most = |model: &ModelConfig, [height, width]: Size| -> Result<usize> {
            let parts = parts(&BiFormer::blank(model, DType::F32)?, height, width)?;
            let macs = parts.iter().map(|part| part.macs.total()).sum::<u64>().max(1);
            Ok((PIXELS / (height * width).max(1)).min((MACS / macs) as usize))
        };
        let (mut model, mut each) = (config.architecture.clone(), 1);
        let mut count = most(&model, size)?;
        while count == 0 {
            model.auto_pad |= model.family != Family::BiformerStlNchw;
            let half = size.map(|side| side / 2);
            if model.check_image(half[0], half[1]).is_err() {
                break;
            }
            (size, each) = (half, 4 * each);
            count = most(&model, size)?;
        }
        Ok(Self { model, size, each, most: count.max(3) })
    }

    /// The shape of a batch of them.
    fn images(&self, count: usize) -> [usize; 4] {
        [count, self.size[0], self.size[1], 3]
    }

    /// The bytes of the pool at the peak of `work` on so many real images.
    fn forecast(&self, images: usize, work: impl Fn(usize) -> Result<()>) -> Result<u64> {
        let measured = |images: usize| {
            trim_pool();
            let before = pool_stats().resident;
            work(images)?;
            let taken = pool_stats().resident - before;
            trim_pool();
            Ok::<_, anyhow::Error>(taken as u64)
        };
        let (images, large) = (images * self.each, self.most);
        if images <= large {
            return measured(images);
        }
        // Not fewer than a batch has groups of pieces, which have gradients of their own; nor one alone, of which batch
        // normalisation has nothing to normalise by where its last map is a single token.
        let small = large * 2 / 3;
        let (less, more) = (measured(small)?, measured(large)?);
        Ok(more + more.saturating_sub(less) * (images - large) as u64 / (large - small) as u64)
    }
}

/// The images of a batch as they come from the data set, in f32.
pub fn image_bytes(config: &RunConfig, [height, width]: Size) -> u64 {
    (config.batch_size * height * width * 3 * 4) as u64
}

/// The largest resident memory of this process so far, where the system tells (Linux).
pub fn peak_resident_bytes() -> Option<u64> {
    status_bytes("/proc/self/status", "VmHWM:")
}

/// The memory that this process may still take: what the machine has left, or its container, if that is less. (Linux)
fn free_bytes() -> Option<u64> {
    let machine = status_bytes("/proc/meminfo", "MemAvailable:")?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let left = groups.lines().filter_map(left_in_groups).chain(free_addresses());
    Some(left.fold(machine, u64::min))
}

/// What the least is that is left to the group of processes that a line of /proc/self/cgroup names, and to those that it
/// is part of. A container finds its own where all others would be.
fn left_in_groups(line: &str) -> Option<u64> {
    let (_, line) = line.split_once(':')?;
    let (root, version, name) = match line.split_once(':')? {
        ("", name) => ("/sys/fs/cgroup", Version::Two, name),
        (controllers, name) if controllers.split(',').any(|it| it == "memory") => {
            ("/sys/fs/cgroup/memory", Version::One, name)
        }
        _ => return None,
    };
    let groups = Path::new(name.trim_start_matches('/')).ancestors();
    groups.filter_map(|group| left_in(&Path::new(root).join(group), version)).min()
}

/// Of Linux's control groups.
#[derive(Clone, Copy)]
enum Version {
    One,
    Two,
}

/// What is left of the address space, if that is limited (`ulimit -v`).
fn free_addresses() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let limit: u64 = entry(&limits, "Max address space")?.parse().ok()?;
    Some(limit.saturating_sub(status_bytes("/proc/self/status", "VmSize:")?))
}

/// What is left of the memory of a group of processes, if that is limited. What caches files can be had as well.
fn left_in(group: &Path, version: Version) -> Option<u64> {
    let (files, cached) = match version {
        Version::One => (["memory.limit_in_bytes", "memory.usage_in_bytes"], "total_inactive_file"),
        Version::Two => (["memory.max", "memory.current"], "inactive_file"),
    };
    let read = |file: &str| std::fs::read_to_string(group.join(file)).ok();
    let [limit, used] = files.map(|file| read(file)?.trim().parse::<u64>().ok());
    let stat = read("memory.stat")?;
    let cached = stat.lines().find_map(|line| line.strip_prefix(cached)?.strip_prefix(' ')?.parse().ok());
    Some(limit?.saturating_sub(used?.saturating_sub(cached.unwrap_or(0))))
}

/// An entry of one of Linux's tables of sizes in kB.
fn status_bytes(path: &str, key: &str) -> Option<u64> {
    let kilobytes: u64 = entry(&std::fs::read_to_string(path).ok()?, key)?.parse().ok()?;
    Some(1024 * kilobytes)
}

/// The first word behind a line's name, in a table.
fn entry<'t>(table: &'t str, key: &str) -> Option<&'t str> {
    table.lines().find_map(|line| line.strip_prefix(key))?.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_the_ways_out() {
        assert!(expect_fit(["training", "less"], 1_000_000, 1_000_000).is_ok());
        let error = expect_fit(["training", "a smaller batch_size"], 3_260_000_000, 2_000_000_000).unwrap_err();
        let said = "this training takes about 3.3 GB of memory and 2.0 GB are free: choose a smaller batch_size";
        assert_eq!(error.to_string(), said);
    }

    #[test]
    fn a_group_of_processes_has_what_its_limit_leaves() {
        let group = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| std::fs::write(group.path().join(file), text).unwrap();
        let left_in = |group: &Path| super::left_in(group, Version::Two);
        assert_eq!(left_in(group.path()), None);
        write("memory.max", "max\n");
        write("memory.current", "3000\n");
        write("memory.stat", "anon 2000\ninactive_file 700\nactive_file 300\n");
        assert_eq!(left_in(group.path()), None, "no limit");
        write("memory.max", "10000\n");
        assert_eq!(left_in(group.path()), Some(7700));
        write("memory.max", "1000\n");
        assert_eq!(left_in(group.path()), Some(0));
        write("memory.limit_in_bytes", "5000\n");
        write("memory.usage_in_bytes", "3000\n");
        write("memory.stat", "inactive_file 9\ntotal_inactive_file 500\n");
        assert_eq!(super::left_in(group.path(), Version::One), Some(2500));
    }
}
