//! `biformer forward`.

use super::Status;
use super::options::{Threads, model_names};
use super::output::{FORWARD, Kind, expect_output, sign};
use super::set::{as_set, assignment, expect_each_once};
use crate::config::{DEFAULT_MODEL, RunConfig};
use crate::device::{Compute, DeviceName, Precision};
use crate::memory::{expect_room_to_infer, image_bytes};
use crate::trainer::checkpoint::Stored;
use crate::trainer::trained::architecture;
use anyhow::{Context, Result, bail};
use autograd::Tape;
use clap::{Args, ValueEnum};
use model::{BiFormer, Features, Mode, TensorFile, recognised};
use std::path::{Path, PathBuf};
use tensor::{DType, Device, Tensor};

#[derive(Debug, Args)]
pub struct Arguments {
    #[arg(long, value_name = "NAME", help = model_help())]
    model: Option<String>,
    /// Changes a field of the model, for instance --set n_win=8 topks=1,4,16,-2 auto_pad=true.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = assignment)]
    set: Vec<String>,
    /// Weights: a run folder, the checkpoint in it, or a safetensors or .pth file under the published code's state_dict names.
    #[arg(long, value_name = "FILE|DIR")]
    weights: PathBuf,
    /// A file with the tensor `input`, (N, 3, H, W): images that have been normalised.
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Where `logits` (N, classes) go; with --set features=pooled, `pooled` (N, C), what the head makes them of; with
    /// features=dense, the stages' maps `out0`, `out1`, ... (N, C, H, W).
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Also writes where the regions looked: `NAME.routes` (N, P, k) for each routed attention, best first.
    #[arg(long)]
    routes: bool,
    /// The precision to compute in.
    #[arg(long, value_enum, default_value_t = Element::F32)]
    dtype: Element,
    /// Where to compute: cpu, cuda (or cuda:1, ...), or emulated (the CPU in the role of a GPU, for tests).
    #[arg(long, value_name = "NAME", default_value_t)]
    device: DeviceName,
    #[command(flatten)]
    threads: Threads,
}

fn model_help() -> String {
    format!(
        "The model: {}. By default that of the run that the weights are of, if they say it, or the one whose tensors they have, \
         or else nano",
        model_names()
    )
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Element {
    F32,
    F64,
    /// Weights in f32; layers and convolutions multiply in bf16, and on a GPU maps are bf16.
    Bf16,
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| compute(arguments))?;
    Ok(Status::Done)
}

fn compute(arguments: &Arguments) -> Result<()> {
    let (dtype, precision) = match arguments.dtype {
        Element::F32 => (DType::F32, Precision::F32),
        Element::F64 => (DType::F64, Precision::F32),
        Element::Bf16 => (DType::F32, Precision::Bf16),
    };
    let device = Compute { device: arguments.device, precision }.open()?;
    let weights = arguments.weights.display().to_string();
    let stored = Stored::read(&arguments.weights).with_context(|| format!("weights {weights}"))?;
    let known = stored.described().map(|(config, _)| config.architecture.clone());
    let file = stored.into_weights()?;
    let config = match (&arguments.model, known) {
        (None, Some(known)) => known,
        (Some(name), _) => architecture(&file, name)?,
        (None, None) => architecture(&file, recognised(&file)?.map_or(DEFAULT_MODEL, |preset| preset.name))?,
    };
    expect_each_once(&arguments.set)?;
    let config = config.with_overrides(arguments.set.iter().map(String::as_str)).map_err(as_set)?;
    let mut model = BiFormer::blank(&config, dtype)?;
    let lacking = model.load(&file, &weights)?;
    if !lacking.is_empty() {
        say!("{weights}: lacks {}, which are as a new model has them", lacking.join(", "));
    }
    let input = read_input(&arguments.input, dtype)?;
    let [images, _, height, width] = input.dims("forward", "input (N, 3, H, W)")?;
    expect_output("--output", &arguments.output, Kind::Tensors)?;
    let mut run = RunConfig::for_model("nano")?;
    (run.architecture, run.batch_size, run.device) = (config.clone(), images, arguments.device);
    let images = image_bytes(&run, [height, width]);
    expect_room_to_infer(&run, [height, width], images, dtype, "fewer or smaller images")?;
    model.place(&device, if precision == Precision::Bf16 { DType::Bf16 } else { dtype })?;
    let images = input.permute(&[0, 2, 3, 1])?.contiguous()?;
    let tape = Tape::inference();
    let output = model.forward(&tape, &images, Mode::Evaluate)?;
    let mut results = TensorFile::default();
    for (index, value) in output.values.iter().enumerate() {
        let value = value.value().cast(dtype)?.to_device(&Device::Cpu)?;
        if value.find(|x| !x.is_finite())?.is_some() {
            bail!("{weights}: the results are not finite: these weights are of no use, take those of another run");
        }
        match config.features {
            Features::Logits => results.tensors.insert("logits".into(), value),
            Features::Pooled => results.tensors.insert("pooled".into(), value),
            Features::Dense => results.tensors.insert(format!("out{index}"), value.permute(&[0, 3, 1, 2])?),
        };
    }
    if arguments.routes {
        let routes = output.trace.routes.iter();
        let routes = routes.map(|(name, routes)| Ok((format!("{name}.routes"), routes.to_device(&Device::Cpu)?)));
        results.tensors.extend(routes.collect::<Result<Vec<_>>>()?);
    }
    sign(&mut results, FORWARD);
    results.write(&arguments.output)?;
    for (name, tensor) in &results.tensors {
        // As the file has it.
        let dtype = if tensor.dtype() == DType::Index { "i64".to_owned() } else { tensor.dtype().to_string() };
        say!("{}: {name} {dtype} {}", arguments.output.display(), tensor.shape());
    }
    Ok(())
}

/// Images (N, 3, H, W) of a file, as a model takes them.
fn read_input(path: &Path, dtype: DType) -> Result<Tensor> {
    let shown = path.display();
    let file = TensorFile::read(path)?;
    let input = file.tensors.get("input").with_context(|| {
        let names: Vec<&str> = file.tensors.keys().take(5).map(String::as_str).collect();
        let there = if names.is_empty() { "none".into() } else { names.join(", ") };
        format!("{shown}: expected a tensor named \"input\", (N, 3, H, W); there is {there}")
    })?;
    let [_, channels, _, _] = input.dims("forward", "input (N, 3, H, W)").with_context(|| format!("{shown}"))?;
    if channels != 3 || input.count() == 0 {
        bail!("{shown}: input is {}, expected (N, 3, H, W)", input.shape());
    }
    if input.dtype() == DType::Index {
        bail!("{shown}: input holds integers, expected normalised floats");
    }
    let input = input.cast(dtype)?;
    if input.find(|x| !x.is_finite())?.is_some() {
        bail!("{shown}: input holds numbers that are not finite in {dtype}, expected normalised floats");
    }
    Ok(input)
}
