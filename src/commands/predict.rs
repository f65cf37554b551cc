//! `biformer predict`.

use super::Status;
use super::options::{Threads, Trained, class_names, pictures_in, whole};
use super::output::{Kind, ensure_output};
use crate::device::Compute;
use crate::memory::{ensure_room_to_infer, image_bytes};
use crate::pictures::{COLUMNS, ROWS, attention};
use crate::printing::{is_closed, print, print_error, print_lines, printable, tell};
use crate::trainer::score::probabilities;
use crate::trainer::trained::{TrainedModel, note_unsaid};
use anyhow::{Context, Error, Result, bail};
use autograd::Tape;
use clap::Args;
use data::{Transform, load_image};
use model::{BiFormer, Factors, Mode, Trace};
use rayon::prelude::*;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use tensor::{DType, Tensor};

/// Pixels that the model sees in one pass: enough to keep all cores busy, and few enough to take little memory.
const AT_ONCE: usize = 1 << 20;
/// The most pictures in one pass, however small: with more, the first results would be slow to appear.
const MAX_AT_ONCE: usize = 64;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    trained: Trained,
    /// Pictures (PNG, JPEG, WebP, BMP, TIFF, PNM) of any size, or folders, searched with their subfolders. The model
    /// sees the central square of each, as in a test: 7/8 of the shorter side, or all of a tiny picture, unless the run
    /// says otherwise.
    #[arg(value_name = "IMAGE|DIR", required = true)]
    images: Vec<PathBuf>,
    /// A text file with the classes' names, one in each line and in their order, to be printed in place of those that
    /// the model knows. A state_dict alone knows none; if it is of 1,000 classes, they are taken to be ImageNet's.
    #[arg(long, value_name = "FILE")]
    classes: Option<PathBuf>,
    /// A PNG file to which is drawn what one point of each of the first 32 pictures attends to: the weights of four of
    /// the model's attentions, from the first to the last.
    #[arg(long, value_name = "FILE")]
    attention: Option<PathBuf>,
    /// The point, as parts of the width and height of what the model sees of a picture; 0.5,0.5 is the middle.
    #[arg(long, value_name = "X,Y", requires = "attention", default_value = "0.5,0.5", value_parser = point)]
    at: [f64; 2],
    /// The blocks whose attentions are drawn, at most four, in the model's order: such as stages.0.1,stages.2.3,
    /// counted from 0.
    #[arg(long, value_name = "BLOCKS", requires = "attention", value_delimiter = ',')]
    blocks: Vec<String>,
    /// How many of a picture's likeliest classes are printed: by default 5, with --json all. With 1 there is one line
    /// for each picture.
    #[arg(long, value_name = "N", value_parser = whole(1..=1000_u16))]
    top: Option<u16>,
    /// Prints a JSON list: for each picture its path, and the probability of every class (or of --top of them),
    /// likeliest first; or the error that kept it from being read.
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
        let Opened { pictures, without, model, classes, size, at_once, transform } = open(arguments)?;
        let factors = model.prepared()?;
        ensure_blocks(&arguments.blocks, &model)?;
        let of_file = |file| AttentionMaps::new(file, arguments.at, &arguments.blocks);
        let mut maps = arguments.attention.as_deref().map(of_file);
        let mut listed = Listed::new(arguments);
        for (folder, error) in without {
            let outcome = listed.skip(&error);
            listed.print(&Prediction { path: folder.to_string_lossy(), outcome })?;
        }
        let mut classified = || -> Result<()> {
            for paths in pictures.chunks(at_once) {
                // If the output is no longer read, there may still be something to draw.
                if is_closed() && maps.as_ref().is_none_or(AttentionMaps::is_full) {
                    break;
                }
                let load = |path: &PathBuf| load_image(path).map(|image| transform.pixels(&image));
                let loaded: Vec<data::Result<Vec<f32>>> = paths.par_iter().map(load).collect();
                let point = maps.as_ref().filter(|maps| !maps.is_full()).map(|maps| maps.point);
                let (probabilities, trace) = classify(&model, factors.clone(), &loaded, size, point)?;
                if let Some(maps) = &mut maps {
                    maps.take(paths.iter().zip(&loaded), trace, &transform)?;
                }
                let mut probabilities = probabilities.chunks(classes.len());
                for (path, loaded) in paths.iter().zip(loaded) {
                    let outcome = match loaded {
                        Ok(_) => Outcome::Classes(by_probability(
                            &classes,
                            probabilities.next().unwrap_or_default(),
                            listed.top,
                        )),
                        // The other pictures are not affected.
                        Err(error) => listed.skip(&error.into()),
                    };
                    listed.print(&Prediction { path: path.to_string_lossy(), outcome })?;
                }
            }
            maps.take().map_or(Ok(()), AttentionMaps::draw)
        };
        let done = classified();
        // A list of JSON is whole, whatever has failed.
        let status = listed.status;
        let ended = listed.end();
        done.and(ended).map(|()| status)
    })
}

/// A trained model, and the pictures that it is to classify.
struct Opened {
    pictures: Vec<PathBuf>,
    /// Folders that have none, or cannot be read.
    without: Vec<(PathBuf, Error)>,
    model: BiFormer,
    /// The names of the model's classes.
    classes: Vec<String>,
    /// The side of what the model sees of a picture.
    size: usize,
    /// How many it sees in one pass.
    at_once: usize,
    transform: Transform,
}

fn open(arguments: &Arguments) -> Result<Opened> {
    let (pictures, mut without) = pictures(&arguments.images);
    if pictures.is_empty() {
        let last = without.pop().context("no pictures")?;
        without.iter().for_each(|(_, error)| print_error(error));
        return Err(last.1);
    }
    if let Some(file) = &arguments.attention {
        ensure_output("--attention", file.as_path(), Kind::Picture)?;
    }
    let TrainedModel { mut model, mut config, mut data, named } = arguments.trained.load()?;
    if let Some(file) = &arguments.classes {
        data.classes = class_names(file, data.classes.len())?;
    } else if !named && data.classes.len() == 1000 {
        tell!(
            io::stderr(),
            "note: the weights name no classes; 1,000 are taken to be ImageNet's (--classes names others)"
        );
    }
    if !named {
        note_unsaid(&config, data.classes.len() == 1000);
    }
    let size = config.image_size;
    let at_once = (AT_ONCE / (size * size)).clamp(1, MAX_AT_ONCE);
    (config.batch_size, config.device) = (at_once.min(pictures.len()), arguments.compute.device);
    let images = image_bytes(&config, [size; 2]);
    ensure_room_to_infer(&config, [size; 2], images, DType::F32, "a smaller --image-size")?;
    arguments.compute.place(&mut model)?;
    let transform = config.test_transform(data.statistics)?;
    Ok(Opened { pictures, without, model, classes: data.classes, size, at_once, transform })
}

/// The likeliest classes of a picture, in order.
fn by_probability<'a>(classes: &'a [String], probabilities: &[f64], top: usize) -> Vec<Class<'a>> {
    let classes = classes.iter().zip(probabilities);
    let mut classes: Vec<Class> = classes.map(|(name, &probability)| Class { name, probability }).collect();
    classes.sort_by(|a, b| b.probability.total_cmp(&a.probability));
    classes.truncate(top);
    classes
}

/// Prints pictures as soon as they are classified: their likeliest classes, or the entries of a JSON list.
struct Listed {
    json: bool,
    /// How many classes are printed for each picture.
    top: usize,
    /// Whether the list has begun.
    any: bool,
    /// Whether a picture had to be skipped.
    status: Status,
}

impl Listed {
    fn new(arguments: &Arguments) -> Self {
        let default = if arguments.json { usize::MAX } else { 5 };
        let (json, top) = (arguments.json, arguments.top.map_or(default, usize::from));
        Self { json, top, any: false, status: Status::Done }
    }

    /// Reports a picture that is skipped.
    fn skip(&mut self, error: &Error) -> Outcome<'static> {
        print_error(error);
        self.status = Status::InputsSkipped;
        Outcome::Error(error.to_string())
    }

    fn print(&mut self, prediction: &Prediction<'_>) -> Result<()> {
        if self.json {
            let entry = serde_json::to_string_pretty(prediction)?.replace('\n', "\n  ");
            let begin = if self.any { "," } else { "[" };
            self.any = true;
            // The line is left open: the next call knows whether a comma or the closing bracket follows.
            return print(format_args!("{begin}\n  {entry}"));
        }
        let Outcome::Classes(classes) = &prediction.outcome else { return Ok(()) };
        let path = printable(&prediction.path);
        let line =
            |Class { name, probability }: &Class<'_>| format!("{:>5.1}%  {}", 100.0 * probability, printable(name));
        match &classes[..] {
            [class] if self.top == 1 => say!("{}  {path}", line(class)),
            classes => {
                say!("{path}");
                for class in classes {
                    say!("  {}", line(class));
                }
            }
        }
        Ok(())
    }

    fn end(self) -> Result<()> {
        if self.any { print_lines(format_args!("\n]")) } else { Ok(()) }
    }
}

/// What a point of each of the first pictures attends to.
struct AttentionMaps<'a> {
    file: &'a Path,
    point: [f64; 2],
    /// The blocks whose attentions are drawn; if none is named, some of all.
    blocks: &'a [String],
    /// The pictures' files, and what the model saw of them.
    seen: Vec<(PathBuf, data::Image)>,
    /// The traces of the passes over these pictures.
    traces: Vec<Trace>,
    /// How many readable pictures there are in all, whether drawn or not.
    readable: usize,
}

impl<'a> AttentionMaps<'a> {
    fn new(file: &'a Path, [x, y]: [f64; 2], blocks: &'a [String]) -> Self {
        Self { file, point: [y, x], blocks, seen: vec![], traces: vec![], readable: 0 }
    }

    /// Whether a page has no room for more.
    fn is_full(&self) -> bool {
        self.seen.len() >= ROWS
    }

    /// Takes some pictures in, with the trace of their pass, as long as the page is not full.
    fn take<'p>(
        &mut self,
        pictures: impl Iterator<Item = (&'p PathBuf, &'p data::Result<Vec<f32>>)>,
        trace: Trace,
        transform: &Transform,
    ) -> Result<()> {
        let (full, before) = (self.is_full(), self.readable);
        for (path, pixels) in pictures.filter_map(|(path, loaded)| Some((path, loaded.as_ref().ok()?))) {
            self.readable += 1;
            if !full {
                self.seen.push((path.clone(), transform.picture(pixels)?));
            }
        }
        if !full && self.readable > before {
            self.traces.push(trace);
        }
        Ok(())
    }

    /// Draws them, if there are any.
    fn draw(self) -> Result<()> {
        let (file, shown) = (self.file.display(), self.seen.len().min(ROWS));
        if self.readable > shown {
            tell!(io::stderr(), "note: {file} shows the first {shown} of the {} pictures", self.readable);
        }
        if shown == 0 {
            return Ok(());
        }
        let (files, images): (Vec<PathBuf>, Vec<data::Image>) = self.seen.into_iter().unzip();
        let images: Vec<_> = short_names(&files).into_iter().zip(images).collect();
        let mut trace = Trace::joined(self.traces)?;
        let is_of = |name: &str| self.blocks.iter().any(|block| name.strip_suffix(".attn") == Some(block));
        trace.attention_weights.retain(|(name, _)| self.blocks.is_empty() || is_of(name));
        attention::draw(&images, &trace, self.point, self.file)
    }
}

/// Errors: blocks that the model does not have, or more than there is room for.
fn ensure_blocks(blocks: &[String], model: &BiFormer) -> Result<()> {
    let layout = model.parameters.layout();
    let known: Vec<&str> = layout.ids().filter_map(|id| layout.name(id).strip_suffix(".norm1.weight")).collect();
    if let Some(block) = blocks.iter().find(|block| !known.contains(&block.as_str())) {
        bail!("--blocks {block}: the model has none of this name, but {}", known.join(", "));
    }
    let count = blocks.iter().collect::<HashSet<_>>().len();
    if count > COLUMNS {
        bail!("--blocks: {count} of them, and a page has room for {COLUMNS}; name fewer");
    }
    Ok(())
}

/// What files are called on a page: by their names or, if that does not tell them apart, with the folders that they are
/// in.
fn short_names(files: &[PathBuf]) -> Vec<String> {
    let name = |file: &Path| printable(file.file_name().unwrap_or_default().display());
    let names: Vec<String> = files.iter().map(|file| name(file)).collect();
    if names.iter().collect::<HashSet<_>>().len() == names.len() {
        return names;
    }
    let in_folder = |file: &PathBuf| match file.parent().map(name).filter(|folder| !folder.is_empty()) {
        Some(folder) => format!("{folder}/{}", name(file)),
        None => name(file),
    };
    files.iter().map(in_folder).collect()
}

/// A point, X,Y, inside a picture.
fn point(text: &str) -> Result<[f64; 2], String> {
    let part = |part: &str| part.trim().parse().ok().filter(|part| (0.0..=1.0).contains(part));
    let parts = text.split_once(',').and_then(|(x, y)| Some([part(x)?, part(y)?]));
    parts.ok_or_else(|| "expected two numbers from 0 to 1, such as 0.25,0.5".to_owned())
}

/// The pictures that are named, and those below the folders that are named; and the folders that have none or cannot be
/// read.
fn pictures(named: &[PathBuf]) -> (Vec<PathBuf>, Vec<(PathBuf, Error)>) {
    let (mut pictures, mut without) = (vec![], vec![]);
    for path in named {
        match path.is_dir().then(|| pictures_in(path)) {
            None => pictures.push(path.clone()),
            Some(Ok(below)) => pictures.extend(below),
            Some(Err(error)) => without.push((path.clone(), error)),
        }
    }
    (pictures, without)
}

/// The class probabilities of the images that were loaded, one image after the other; and the trace of the pass, with
/// what `point` attends to if one is given.
fn classify(
    model: &BiFormer,
    factors: Factors,
    loaded: &[data::Result<Vec<f32>>],
    size: usize,
    point: Option<[f64; 2]>,
) -> Result<(Vec<f64>, Trace)> {
    let pixels: Vec<f32> = loaded.iter().flatten().flatten().copied().collect();
    if pixels.is_empty() {
        return Ok((vec![], Trace::default()));
    }
    let images = Tensor::from_slice(&pixels, [loaded.iter().flatten().count(), size, size, 3])?;
    let tape = Tape::inference();
    let pass = model.pass_with(factors, &tape, Mode::Evaluate);
    let pass = match point {
        Some(point) => pass.attention_from(point),
        None => pass,
    };
    let logits = model.run(&pass, &images)?.swap_remove(0);
    if logits.value().find(|x| !x.is_finite())?.is_some() {
        bail!("the model's logits are not finite: its weights are of no use, take those of another run");
    }
    Ok((probabilities(logits.value())?, pass.into_trace()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_repeat_come_with_their_folders() {
        let of = |files: &[&str]| short_names(&files.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(of(&["a/1.png", "b/2.png"]), ["1.png", "2.png"]);
        assert_eq!(of(&["data/cat/1.png", "data/dog/1.png", "1.png"]), ["cat/1.png", "dog/1.png", "1.png"]);
    }
}
