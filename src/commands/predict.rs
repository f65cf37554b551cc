//! `biformer predict`.

use super::output::{Kind, expect_output};
use super::{Status, Threads, Trained, pictures_in};
use crate::config::read_text;
use crate::device::Compute;
use crate::memory::{expect_room_to_infer, image_bytes};
use crate::pictures::{ROWS, looks};
use crate::printing::{print_error, printable, tell};
use crate::trainer::trained::TrainedModel;
use anyhow::{Context, Result, bail};
use autograd::Tape;
use clap::Args;
use data::{Transform, load_image};
use model::{BiFormer, Factors, Mode, Pass};
use rayon::prelude::*;
use serde::Serialize;
use std::borrow::Cow;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use tensor::{DType, Tensor};

/// Pixels that the model sees in one pass: enough to keep all cores busy, and few enough to take little memory.
const AT_ONCE: usize = 1 << 20;
/// Also of small pictures, or the first results would be long in coming.
const MOST_AT_ONCE: usize = 64;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    trained: Trained,
    /// Pictures (PNG, JPEG, WebP, BMP, TIFF, PNM) of any size, of which the model sees the middle as in a test (of 7/8 of the shorter side,
    /// unless the run says otherwise), or folders, with those below them.
    #[arg(value_name = "IMAGE|DIR", required = true)]
    images: Vec<PathBuf>,
    /// A text file with the classes' names, one in each line and in their order, to be printed in place of those that the
    /// model knows. A state_dict alone knows none; if it is of 1,000 classes, they are taken to be ImageNet's.
    #[arg(long, value_name = "FILE")]
    classes: Option<PathBuf>,
    /// A PNG to draw what the model attends to in the first 32 pictures, from one point of each: the weights of four attentions,
    /// from the first to the last.
    #[arg(long, value_name = "FILE")]
    attention: Option<PathBuf>,
    /// The point, as parts of the width and height of what the model sees of a picture; 0.5,0.5 is the middle.
    #[arg(long, value_name = "X,Y", requires = "attention", default_value = "0.5,0.5", value_parser = point)]
    at: [f64; 2],
    /// Prints a JSON list: for each picture its path, and the probability of every class, likeliest first; or the error
    /// that kept it from being read.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    compute: Compute,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Serialize)]
struct Prediction<'a> {
    path: Cow<'a, str>,
    #[serde(flatten)]
    outcome: Outcome<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome<'a> {
    Classes(Vec<Class<'a>>),
    Error(String),
}

#[derive(Serialize)]
struct Class<'a> {
    name: &'a str,
    probability: f64,
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| {
        let pictures = pictures(&arguments.images)?;
        arguments.attention.as_deref().map_or(Ok(()), |file| expect_output("--attention", file, Kind::Picture))?;
        let TrainedModel { mut model, mut config, mut data, named } = arguments.trained.load()?;
        if let Some(file) = &arguments.classes {
            data.classes = names(file, data.classes.len()).with_context(|| format!("--classes {}", file.display()))?;
        } else if !named && data.classes.len() == 1000 {
            tell!(
                io::stderr(),
                "note: the weights name no classes; 1,000 are taken to be ImageNet's (--classes names others)"
            );
        }
        let size = config.image_size;
        let most = (AT_ONCE / (size * size)).clamp(1, MOST_AT_ONCE);
        (config.batch_size, config.device) = (most.min(pictures.len()), arguments.compute.device);
        expect_room_to_infer(&config, [size; 2], image_bytes(&config, [size; 2]), DType::F32)?;
        arguments.compute.place(&mut model)?;
        let factors = model.prepared()?;
        let transform = config.test_transform(data.statistics)?;
        let (mut status, mut predictions, mut seen, mut readable) = (Status::Done, vec![], vec![], 0);
        for paths in pictures.chunks(most) {
            let load = |path: &PathBuf| load_image(path).map(|image| transform.pixels(&image));
            let loaded: Vec<data::Result<Vec<f32>>> = paths.par_iter().map(load).collect();
            let pixels: Vec<f32> = loaded.iter().flatten().flatten().copied().collect();
            if arguments.attention.is_some() {
                let named = paths.iter().zip(&loaded).filter_map(|(path, pixels)| Some((path, pixels.as_ref().ok()?)));
                let named = named.map(|(path, pixels)| (path.file_name().unwrap_or_default(), pixels.clone()));
                seen.extend(named.take(ROWS - seen.len()));
            }
            let count = loaded.iter().flatten().count();
            readable += count;
            let images = Tensor::from_slice(&pixels, [count, size, size, 3])?;
            let probabilities = classify(&model, factors.clone(), &images)?;
            let mut probabilities = probabilities.chunks(data.classes.len());
            for (path, loaded) in paths.iter().zip(loaded) {
                let named = |outcome| Prediction { path: path.to_string_lossy(), outcome };
                if let Err(error) = loaded {
                    // The others are none the worse for it.
                    predictions.push(named(Outcome::Error(error.to_string())));
                    print_error(&error.into());
                    status = Status::Refused;
                    continue;
                }
                let classes = data.classes.iter().zip(probabilities.next().unwrap_or_default());
                let mut classes: Vec<Class> = classes.map(|(name, &probability)| Class { name, probability }).collect();
                classes.sort_by(|a, b| b.probability.total_cmp(&a.probability));
                if arguments.json {
                    predictions.push(named(Outcome::Classes(classes)));
                    continue;
                }
                say!("{}", printable(path.display()));
                for Class { name, probability } in classes.iter().take(5) {
                    say!("  {:>5.1}%  {}", 100.0 * probability, printable(name));
                }
            }
        }
        if arguments.json {
            say!("{}", serde_json::to_string_pretty(&predictions)?);
        }
        if let Some(file) = &arguments.attention {
            if readable > seen.len() {
                let (file, shown) = (file.display(), seen.len());
                tell!(io::stderr(), "note: {file} shows the first {shown} of the {readable} pictures");
            }
            draw_attention(&model, factors, &transform, &seen, arguments.at, file)?;
        }
        Ok(status)
    })
}

/// Draws what a point of each image attends to, given what the model saw of them, and their names.
fn draw_attention(
    model: &BiFormer,
    factors: Factors,
    transform: &Transform,
    seen: &[(&OsStr, Vec<f32>)],
    [x, y]: [f64; 2],
    file: &Path,
) -> Result<()> {
    if seen.is_empty() {
        return Ok(());
    }
    let (size, point) = (transform.size(), [y, x]);
    let pixels: Vec<f32> = seen.iter().flat_map(|(_, pixels)| pixels).copied().collect();
    let images = Tensor::from_slice(&pixels, [seen.len(), size, size, 3])?;
    let tape = Tape::inference();
    let pass = Pass::new(&tape, Mode::Evaluate, &model.parameters, &model.statistics).with_factors(factors);
    let pass = pass.look_from(point);
    model.run(&pass, &images)?;
    let shown = seen.iter().map(|(name, pixels)| Ok((printable(name.display()), transform.picture(pixels)?)));
    let shown = shown.collect::<data::Result<Vec<_>>>()?;
    looks::draw(&shown, &pass.into_trace(), point, file).with_context(|| file.display().to_string())
}

/// A point, X,Y, inside a picture.
fn point(text: &str) -> Result<[f64; 2], String> {
    let part = |part: &str| part.trim().parse().ok().filter(|part| (0.0..=1.0).contains(part));
    let parts = text.split_once(',').and_then(|(x, y)| Some([part(x)?, part(y)?]));
    parts.ok_or_else(|| "expected two numbers from 0 to 1, such as 0.25,0.5".to_owned())
}

/// The names of so many classes in a file.
fn names(file: &Path, count: usize) -> Result<Vec<String>> {
    let text = read_text(file, "a name in each line")?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let names: Vec<String> = text.trim_end().lines().map(|line| line.trim().to_owned()).collect();
    if names.len() != count {
        bail!("{} lines for {count} classes; expected a name in each line", names.len());
    }
    match names.iter().position(String::is_empty) {
        Some(empty) => bail!("line {} is empty; expected a name in each line", empty + 1),
        None => Ok(names),
    }
}

/// The pictures that are named, and those below the folders that are.
fn pictures(named: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut pictures = vec![];
    for path in named {
        match path.is_dir() {
            false => pictures.push(path.clone()),
            true => pictures.extend(pictures_in(path)?),
        }
    }
    Ok(pictures)
}

/// The probabilities of each image's classes, one image after the other.
fn classify(model: &BiFormer, factors: Factors, images: &Tensor) -> Result<Vec<f64>> {
    if images.count() == 0 {
        return Ok(vec![]);
    }
    let tape = Tape::inference();
    let output = model.forward_with(factors, &tape, images, Mode::Evaluate)?;
    let logits = output.logits().value();
    if logits.find(|x| !x.is_finite())?.is_some() {
        bail!("the model's logits are not finite: its weights are of no use, take those of another run");
    }
    Ok(ops::softmax(output.logits())?.value().cast(DType::F64)?.to_vec::<f64>()?)
}
