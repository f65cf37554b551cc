//! `biformer bench`: training and inference, timed as a whole.

use super::profile::Report;
use super::{Arguments, Workload, ensure_sensible, noise};
use crate::commands::Status;
use crate::commands::options::ImageSize;
use crate::config::RunConfig;
use crate::device::DeviceName;
use crate::inference::Inference;
use crate::memory::{ensure_room_to_infer, ensure_room_to_train, image_bytes};
use crate::printing::plural;
use crate::staging::Numbered;
use crate::trainer::learner::Learner;
use anyhow::{Result, bail};
use autograd::Profile;
use data::Batch;
use model::{BiFormer, Features};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;
use tensor::cpu::isa::Isa;
use tensor::memory::peak_resident_bytes;
use tensor::{DType, Device, Tensor};

const WARM_UP: usize = 2;

/// What was measured.
struct Measured {
    /// The seconds of each step, in ascending order.
    times: Vec<f64>,
    /// The last step's loss, or the root of the mean square of what the last pass gave.
    outcome: f64,
    /// The peak resident set size, if the system reports it.
    peak: Option<u64>,
    /// The GPU memory that was held, if there is a GPU.
    on_gpu: Option<u64>,
    /// Where the time went, if that was asked for.
    report: Option<Report>,
    threads: usize,
}

/// Measures it, and prints what was measured.
pub fn run(arguments: &Arguments, size: ImageSize) -> Result<Status> {
    let measured = arguments.threads.run(|| measure(arguments, size))?;
    if arguments.json {
        say!("{}", measured.object(arguments, size)?);
    } else {
        say!("{}", measured.line(arguments, size));
        if let Some(report) = measured.report {
            say!("\n{report}");
        }
    }
    Ok(Status::Done)
}

fn measure(arguments: &Arguments, size: ImageSize) -> Result<Measured> {
    let profile = arguments.profile.then(Arc::<Profile>::default);
    let (mut times, device, outcome) = time(arguments, size, profile.as_ref())?;
    times.sort_by(f64::total_cmp);
    // Before the ceilings are measured, which takes memory of its own.
    let peak = peak_resident_bytes();
    let on_gpu = match &device {
        Device::Cpu => None,
        Device::Cuda(gpu) => Some(gpu.stats().held as u64),
    };
    // The emulated device has no ceilings worth comparing with.
    let maps = arguments.compute.maps();
    let gpu = matches!(arguments.compute.device, DeviceName::Cuda(_)).then_some((&device, maps));
    let report = profile.as_ref().map(|profile| Report::new(profile, arguments.steps, gpu)).transpose()?;
    Ok(Measured { times, outcome, peak, on_gpu, report, threads: rayon::current_num_threads() })
}

impl Measured {
    /// The median step, in seconds.
    fn median(&self) -> f64 {
        let count = self.times.len();
        (self.times[(count - 1) / 2] + self.times[count / 2]) / 2.0
    }

    fn line(&self, arguments: &Arguments, size: ImageSize) -> String {
        let median = self.median();
        format!(
            "{} {size}, batch {}, {:?}: {:.1} images/s, median step {:.1} ms, {} thread{}, {}{}{}, {} {:.9}",
            arguments.model.model,
            arguments.batch_size,
            arguments.mode,
            arguments.batch_size as f64 / median,
            1e3 * median,
            self.threads,
            plural(self.threads),
            Isa::current().name(),
            self.peak.map_or_else(String::new, |bytes| format!(", peak memory {:.0} MB", bytes as f64 / 1e6)),
            self.on_gpu.map_or_else(String::new, |bytes| format!(", of the GPU {:.0} MB", bytes as f64 / 1e6)),
            match arguments.mode {
                Workload::Train => "loss",
                Workload::Infer => "output (root mean square)",
            },
            self.outcome
        )
    }

    fn object(&self, arguments: &Arguments, size: ImageSize) -> Result<Value> {
        let (median, outcome) = (self.median(), self.outcome);
        let mut object = json!({
            "model": arguments.model.model,
            "image_size": size.0,
            "batch_size": arguments.batch_size,
            "mode": format!("{:?}", arguments.mode).to_lowercase(),
            "set": arguments.model.set,
            "device": arguments.compute.device.to_string(),
            "precision": arguments.compute.precision.to_string(),
            "recompute": arguments.recompute,
            "images_per_second": arguments.batch_size as f64 / median,
            "median_step_ms": 1e3 * median,
            "min_step_ms": 1e3 * self.times[0],
            "peak_rss_bytes": self.peak,
            "gpu_bytes": self.on_gpu,
            "loss": (arguments.mode == Workload::Train).then_some(outcome),
            "output_rms": (arguments.mode == Workload::Infer).then_some(outcome),
            "threads": self.threads,
            "isa": Isa::current().name(),
        });
        if let Some(report) = &self.report {
            object["profile"] = serde_json::to_value(report)?;
        }
        Ok(object)
    }
}

/// The seconds of each step, the device, and the outcome (see [`Measured`]).
fn time(arguments: &Arguments, size: ImageSize, profile: Option<&Arc<Profile>>) -> Result<(Vec<f64>, Device, f64)> {
    let [height, width] = size.0;
    let mut config = RunConfig::for_model(&arguments.model.model)?;
    config.architecture = arguments.model.config()?;
    config.architecture.check_image(height, width)?;
    (config.batch_size, config.recompute) = (arguments.batch_size, arguments.recompute.unwrap_or_default());
    let shape = [arguments.batch_size, height, width, 3];
    ensure_sensible(shape, "images alone")?;
    (config.device, config.precision) = (arguments.compute.device, arguments.compute.precision);
    if arguments.mode == Workload::Train && config.architecture.features != Features::Logits {
        bail!("--set features: only logits have a loss to be trained by; time other features with --mode infer");
    }
    let images = image_bytes(&config, size.0);
    match arguments.mode {
        Workload::Train => {
            let block = config.recompute.advice(", or --recompute block");
            let choice = format!("a smaller --batch-size, or --image-size{block}");
            ensure_room_to_train(&config, size.0, images, &choice)?;
        }
        Workload::Infer => {
            ensure_room_to_infer(&config, size.0, images, DType::F32, "a smaller --batch-size, or --image-size")?;
        }
    }
    let images = noise(shape.iter().product(), 0);
    let classes = config.architecture.num_classes;
    let labels = (0..arguments.batch_size).map(|i| (i % classes) as u32).collect();
    let batch = Numbered::from(Batch { images, shape, labels, ..Batch::default() });
    match arguments.mode {
        Workload::Train => {
            let mut learner = Learner::new(&config)?;
            learner.profile = profile.cloned();
            let device = learner.device().clone();
            let mut outcome = f64::NAN;
            let times = steps(arguments.steps, profile, &device, |step| {
                // The same batch is the next one as well, so that, as in a run, a batch is uploaded to a GPU during
                // each step.
                outcome = learner.train(&batch, step as u64, 1e-3, || Some(&batch))?.mean_loss();
                Ok(())
            })?;
            Ok((times, device, outcome))
        }
        Workload::Infer => {
            let mut model = BiFormer::new(&config.architecture, 0, DType::F32)?;
            let device = arguments.compute.place(&mut model)?;
            // As if there were unlimited passes, so that a pass may be recorded, as in long-running inference.
            let mut inference = Inference::new(&model, usize::MAX).profiled(profile.cloned());
            inference.stage(&batch)?;
            let mut given = vec![];
            let times = steps(arguments.steps, profile, &device, |_| {
                given.clear(); // first, so that its memory can be had again
                given.extend_from_slice(inference.pass(|| None)?);
                Ok(device.synchronize()?)
            })?;
            Ok((times, device, root_mean_square(&given)?))
        }
    }
}

/// The root mean square of all elements of these tensors.
fn root_mean_square(tensors: &[Tensor]) -> Result<f64> {
    let (mut squares, mut count) = (0.0, 0);
    for tensor in tensors {
        let tensor = tensor.to_device(&Device::Cpu)?.cast(DType::F32)?.contiguous()?;
        squares += tensor.as_slice::<f32>("bench")?.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
        count += tensor.count();
    }
    Ok((squares / count as f64).sqrt())
}

/// The seconds that each step takes, the first few left out. Those that count are what a profile is of, and what a
/// profiler of the GPU records if it waits for them.
fn steps(
    count: usize,
    profile: Option<&Arc<Profile>>,
    device: &Device,
    mut work: impl FnMut(usize) -> Result<()>,
) -> Result<Vec<f64>> {
    let tell = |records| match device {
        Device::Cuda(gpu) if profile.is_some() => gpu.tell_profiler(records),
        _ => Ok(()),
    };
    let mut times = vec![];
    for step in 0..WARM_UP + count {
        if let Some(profile) = profile.filter(|_| step == WARM_UP) {
            tell(true)?;
            profile.restart();
        }
        let started = Instant::now();
        work(step)?;
        profile.iter().for_each(|profile| profile.lap("other"));
        if step >= WARM_UP {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    tell(false)?;
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_that_of_the_middle() {
        for (times, median) in [(vec![3.0], 3.0), (vec![1.0, 2.0], 1.5), (vec![1.0, 2.0, 9.0], 2.0)] {
            let measured = Measured { times, outcome: 0.0, peak: None, on_gpu: None, report: None, threads: 1 };
            assert_eq!(measured.median(), median);
        }
    }

    #[test]
    fn the_root_mean_square_is_of_all_elements() -> Result<()> {
        let tensors = [Tensor::from_slice(&[3.0, -4.0], [2])?, Tensor::from_slice(&[0.0, 0.0], [1, 2])?];
        assert_eq!(root_mean_square(&tensors)?, 2.5);
        Ok(())
    }
}
