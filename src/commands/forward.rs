//! `biformer forward`.

use super::Status;
use super::options::{Threads, ensure_model, model_names};
use super::output::{FORWARD, GRADIENT, Kind, ensure_output, sign};
use super::set::{assignment, changed};
use crate::config::{DEFAULT_MODEL, Recompute, RunConfig};
use crate::device::{Compute, DEVICE_HELP, DeviceName, Precision};
use crate::memory::{ensure_room_to_infer, ensure_room_to_train, image_bytes};
use crate::trainer::stored::Stored;
use crate::trainer::trained::{config_of, name_or_default};
use anyhow::{Context, Result, bail};
use autograd::{Gradients, Tape};
use clap::{Args, ValueEnum};
use model::{BiFormer, Features, Mode, ModelConfig, Output, TensorFile};
use std::path::{Path, PathBuf};
use tensor::{DType, Device, Tensor};

#[derive(Debug, Args)]
pub struct Arguments {
    #[arg(long, value_name = "NAME", help = model_help())]
    model: Option<String>,
    /// Changes a field of the model, for instance --set depth=2,2,2 auto_pad=true.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = assignment)]
    set: Vec<String>,
    /// A run folder, the checkpoint in it, or what `export` wrote; or another state_dict, in a safetensors or .pth
    /// file.
    #[arg(long, value_name = "DIR|FILE", visible_alias = "weights")]
    checkpoint: PathBuf,
    /// A file with the tensor `input`, (N, 3, H, W): images that have been normalised. For --gradients also with
    /// `labels` (N), their classes.
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// The file to write `logits` (N, classes) to; with --set features=pooled, `pooled` (N, C), the input of the head;
    /// with features=dense, the stages' maps `out0`, `out1`, ... (N, C, H, W).
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Also writes which regions each region was routed to: `NAME.routes` (N, P, k) for each routed attention, best
    /// first.
    #[arg(long)]
    routes: bool,
    /// Runs the pass in training mode, in which batch normalisation uses the batch's own statistics, but without
    /// stochastic depth. Also writes `loss`, the mean cross-entropy against the labels, and its gradients, `NAME.grad`
    /// for each weight: to be compared with those of another implementation.
    #[arg(long)]
    gradients: bool,
    /// The precision to compute in.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    #[arg(long, value_name = "NAME", default_value_t, help = DEVICE_HELP)]
    device: DeviceName,
    #[command(flatten)]
    threads: Threads,
}

fn model_help() -> String {
    format!(
        "The model that a state_dict is of: {}; by default the one whose tensors it has, or else nano. A run's weights know theirs",
        model_names()
    )
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Dtype {
    F32,
    F64,
    /// Weights in f32; linear layers and convolutions multiply in bf16, and on a GPU maps are bf16.
    Bf16,
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| {
        ensure_output("--output", arguments.output.as_path(), Kind::Tensors)?;
        compute(arguments)?;
        Ok(Status::Done)
    })
}

fn compute(arguments: &Arguments) -> Result<()> {
    let (dtype, precision) = match arguments.dtype {
        Dtype::F32 => (DType::F32, Precision::F32),
        Dtype::F64 => (DType::F64, Precision::F32),
        Dtype::Bf16 => (DType::F32, Precision::Bf16),
    };
    let device = Compute { device: arguments.device, precision }.open()?;
    let (mut model, config) = model(arguments, dtype)?;
    let given = TensorFile::read(&arguments.input)?;
    let input = images_of(&given, &arguments.input, dtype)?;
    let labels =
        arguments.gradients.then(|| labels_of(&given, &arguments.input, input.shape()[0], &config)).transpose()?;
    ensure_room(arguments, &config, &input)?;
    model.place(&device, if precision == Precision::Bf16 { DType::Bf16 } else { dtype })?;
    let images = input.permute(&[0, 2, 3, 1])?;
    let mut results = match labels {
        None => {
            let tape = Tape::inference();
            let output = model.forward(&tape, &images, Mode::Evaluate)?;
            results(&output, &config, arguments.routes)?
        }
        Some(labels) => {
            let tape = Tape::new();
            let output = model.forward(&tape, &images, Mode::Train { seed: 0, step: 0 })?;
            let mut results = results(&output, &config, arguments.routes)?;
            results.tensors.extend(gradients(&model, &tape, &output, &labels.to_device(&device)?)?);
            results
        }
    };
    for (name, tensor) in &mut results.tensors {
        *tensor = tensor.to_device(&Device::Cpu)?;
        if tensor.dtype() == DType::Index {
            continue;
        }
        *tensor = tensor.cast(dtype)?;
        if tensor.find(|x| !x.is_finite())?.is_some() {
            let weights = arguments.checkpoint.display();
            bail!(
                "{weights}: {name} holds numbers that are not finite: the weights are damaged or diverged (take those of another run), or the input or \
                 --dtype is out of their range"
            );
        }
    }
    sign(&mut results, FORWARD);
    results.write(&arguments.output)?;
    let output = arguments.output.display();
    // There are hundreds of gradients, each of its weight's shape.
    let (gradients, others): (Vec<_>, Vec<_>) = results.tensors.iter().partition(|(name, _)| name.ends_with(GRADIENT));
    for (name, tensor) in others {
        // The type as it is stored in the file.
        let dtype = if tensor.dtype() == DType::Index { "i64".to_owned() } else { tensor.dtype().to_string() };
        say!("{output}: {name} {dtype} {}", tensor.shape());
    }
    if !gradients.is_empty() {
        say!("{output}: NAME{GRADIENT} for each of {} weights", gradients.len());
    }
    Ok(())
}

/// The model with its weights, and its configuration.
fn model(arguments: &Arguments, dtype: DType) -> Result<(BiFormer, ModelConfig)> {
    let weights = arguments.checkpoint.display().to_string();
    let stored = Stored::read(&arguments.checkpoint)?;
    stored.note_better(&arguments.checkpoint, "--checkpoint");
    let known = stored.described().map(|(config, _)| config.clone());
    let file = stored.into_weights()?;
    let config = match (known, &arguments.model) {
        (Some(known), asked) => {
            ensure_model(asked.as_deref(), &known, &weights)?;
            known.architecture
        }
        (None, Some(name)) => config_of(&file, name)?.architecture,
        (None, None) => config_of(&file, name_or_default(&file)?)?.architecture,
    };
    let mut config = changed(&config, &arguments.set)?;
    if arguments.gradients {
        config.drop_path = 0.0;
        if config.features != Features::Logits {
            bail!("--gradients: only logits have a loss; leave --set features out");
        }
    }
    let mut model = BiFormer::blank(&config, dtype)?;
    let lacking = model.load(&file, &weights)?;
    if !lacking.is_empty() {
        say!("{weights}: lacks {}, which keep a new model's initial values", lacking.join(", "));
    }
    Ok((model, config))
}

/// Refuses a pass over images (N, 3, H, W) that the machine has no room for.
fn ensure_room(arguments: &Arguments, config: &ModelConfig, input: &Tensor) -> Result<()> {
    let [images, _, height, width] = input.dims("forward", "input (N, 3, H, W)")?;
    let (size, dtype, choice) = ([height, width], input.dtype(), "fewer or smaller images");
    let mut run = RunConfig::for_model(DEFAULT_MODEL)?;
    (run.architecture, run.batch_size, run.device) = (config.clone(), images, arguments.device);
    if !arguments.gradients {
        return ensure_room_to_infer(&run, size, image_bytes(&run, size), dtype, choice);
    }
    run.recompute = Recompute::None;
    // The forecast for training is made in f32; an image in f64 takes as much as two in f32.
    run.batch_size *= dtype.size().div_ceil(DType::F32.size());
    ensure_room_to_train(&run, size, image_bytes(&run, size), choice)
}

/// The results of a pass and, if asked for, its routes, under their names in a file.
fn results(output: &Output<'_>, config: &ModelConfig, routes: bool) -> Result<TensorFile> {
    let mut results = TensorFile::default();
    for (index, value) in output.values.iter().enumerate() {
        let value = value.value().clone();
        match config.features {
            Features::Logits => results.tensors.insert("logits".into(), value),
            Features::Pooled => results.tensors.insert("pooled".into(), value),
            Features::Dense => results.tensors.insert(format!("out{index}"), value.permute(&[0, 3, 1, 2])?),
        };
    }
    if routes {
        let routes = output.trace.routes.iter();
        results.tensors.extend(routes.map(|routes| (format!("{}.routes", routes.name), routes.indices.clone())));
    }
    Ok(results)
}

/// The loss of logits against labels (N), and its gradients, by the names that they have in a file.
fn gradients<'t>(
    model: &BiFormer,
    tape: &'t Tape,
    output: &Output<'t>,
    labels: &Tensor,
) -> Result<Vec<(String, Tensor)>> {
    let loss = ops::cross_entropy(output.logits()?, labels, 0.0)?;
    let mut gradients = Gradients::new(&model.parameters)?;
    tape.backward(&loss, &mut gradients)?;
    gradients.require_all()?;
    let layout = model.parameters.layout();
    let named = layout.ids().map(|id| {
        let gradient = gradients.parameter(id).with_context(|| format!("no gradient of {}", layout.name(id)))?;
        Ok((format!("{}{GRADIENT}", layout.name(id)), gradient.contiguous()?))
    });
    named.chain([Ok(("loss".into(), loss.value().clone()))]).collect()
}

/// The labels (N) that a file has for its N images, each of which is a class of the model.
fn labels_of(file: &TensorFile, path: &Path, images: usize, config: &ModelConfig) -> Result<Tensor> {
    let shown = path.display();
    let labels = file.tensors.get("labels");
    let labels =
        labels.with_context(|| format!("{shown}: --gradients needs a tensor named \"labels\", (N), beside input"))?;
    if labels.dtype() != DType::Index {
        bail!("{shown}: labels are {}, expected integers", labels.dtype());
    }
    if labels.shape()[..] != [images] {
        bail!("{shown}: labels are {}, expected ({images}), one for each image", labels.shape());
    }
    let classes = config.num_classes;
    match labels.to_vec::<u32>()?.into_iter().find(|&label| label as usize >= classes) {
        Some(label) => bail!("{shown}: label {label}, where the model has {classes} classes, from 0"),
        None => Ok(labels.clone()),
    }
}

/// Images (N, 3, H, W) of a file, as a model takes them.
fn images_of(file: &TensorFile, path: &Path, dtype: DType) -> Result<Tensor> {
    let shown = path.display();
    let input = file.tensors.get("input").with_context(|| {
        let names: Vec<&str> = file.tensors.keys().take(5).map(String::as_str).collect();
        let there = if names.is_empty() { "none".into() } else { names.join(", ") };
        format!("{shown}: expected a tensor named \"input\", (N, 3, H, W); there is {there}")
    })?;
    let [_, channels, _, _] = input.dims("forward", "input (N, 3, H, W)").with_context(|| format!("{shown}"))?;
    if channels != 3 || input.count() == 0 {
        bail!("{shown}: input is {}, expected (N, 3, H, W), none of them 0", input.shape());
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
