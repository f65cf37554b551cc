//! `biformer eval`.

use super::Status;
use super::options::{Threads, Trained, ensure_count};
use super::output::{Kind, ensure_output};
use crate::data_notes::warn_of;
use crate::device::Compute;
use crate::inference::Inference;
use crate::memory::ensure_room_to_infer;
use crate::paths::resolved;
use crate::pictures::confusion;
use crate::printing::{bar, column, printable, tell};
use crate::staging::numbered;
use crate::trainer::score::{Score, Verdict, evaluate};
use crate::trainer::trained::{DataFacts, OF_THE_RUN, TrainedModel, note_unsaid};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use data::{Dataset, Loader, LoaderConfig, Split, fingerprint};
use model::{BiFormer, write_safely};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use tensor::DType;

/// The advice for weights whose results are not finite.
const WAY_OUT: &str = "these weights are of no use, take those of another run";

/// The most classes for which the confusion matrix is reported: with more, it would be mostly zeros, and larger than
/// the rest of the report.
const MAX_CONFUSED: usize = 2000;

/// How many of the most frequent mistakes are shown.
const MAX_MISTAKES: usize = 5;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    trained: Trained,
    /// The data set; by default the one that the model was trained on, or `embedded` for a state_dict alone. It may
    /// have some of the model's classes only.
    #[arg(long, value_name = "embedded|DIR")]
    data: Option<String>,
    /// Which of its images: train, val, test or all. By default those that training evaluates on: val where a folder
    /// has it, else test. The training images are evaluated like the others, without augmentation. For a folder with
    /// neither, the images held out of it; or all images, if --data names CLASS/ folders and the model's own test
    /// images were not held out.
    #[arg(long, value_name = "NAME")]
    split: Option<Split>,
    /// Images per pass.
    #[arg(long, value_name = "N", default_value_t = 128)]
    batch_size: usize,
    /// How many undecodable images may be skipped before evaluation stops; by default as many as in the run.
    #[arg(long, value_name = "N")]
    max_bad_images: Option<usize>,
    /// Prints one JSON object. For up to 2000 classes it has the confusion matrix, `confusion`: row i, column j counts
    /// the images of class i that were classified as class j.
    #[arg(long)]
    json: bool,
    /// Also writes a line of JSON for each image that could be decoded: its number and its path, if it is a file; its
    /// class; the likeliest one; and the probability of that.
    #[arg(long, value_name = "FILE")]
    predictions: Option<PathBuf>,
    /// Also lists this many misclassified images, those of which the model was most confident.
    #[arg(long, value_name = "N", default_value_t = 0)]
    mistakes: usize,
    /// A PNG file to which the confusion matrix of up to 100 classes is drawn: how many images of each class were
    /// classified as which.
    #[arg(long, value_name = "FILE")]
    confusion: Option<PathBuf>,
    #[command(flatten)]
    compute: Compute,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Serialize)]
struct Report {
    #[serde(skip)]
    data: String,
    split: Split,
    images: u64,
    /// How many could not be read, and were skipped.
    skipped: usize,
    top1: f64,
    top5: f64,
    /// The mean of the classes' `top1`, of those that have images.
    macro_top1: f64,
    loss: f64,
    classes: Vec<Class>,
    /// The pairs of classes of which the first was most often taken for the second, and how often.
    #[serde(skip)]
    mistakes: Vec<([usize; 2], u64)>,
    /// Misclassified images, most confident first, if they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    surest_mistakes: Option<Vec<Prediction>>,
    /// The confusion matrix: a row for each class, printed on one line.
    #[serde(skip_serializing_if = "Option::is_none")]
    confusion: Option<Vec<Box<RawValue>>>,
}

#[derive(Serialize)]
struct Class {
    name: String,
    images: u64,
    /// The share of its images that were classified as it (the recall). None if there are no images.
    top1: Option<f64>,
    top5: Option<f64>,
    /// The share of the images classified as this class that belong to it. None if there are none.
    precision: Option<f64>,
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    let measured = arguments.threads.run(|| measure(arguments));
    let (report, written) = measured.map_err(|error| match error.downcast_ref() {
        Some(data::Error::TooManyBadImages { .. }) => anyhow!("{error:#}, with --max-bad-images"),
        _ => error,
    })?;
    match arguments.json {
        true => say!("{}", serde_json::to_string_pretty(&report)?),
        false => print(&report)?,
    }
    // A report that took long to compute is printed even if a file could not be written.
    written.map(|()| Status::Done)
}

fn print(report: &Report) -> Result<()> {
    let (heading, names) = column("class", report.classes.iter().map(|class| class.name.as_str()).chain(["all"]));
    say!("{}:", of_images(report.split, &report.data));
    say!("{heading}  {:>7}  {:>6}  {:>6}  {:>9}", "images", "top-1", "top-5", "precision");
    for (name, Class { images, top1, top5, precision, .. }) in names.iter().zip(&report.classes) {
        let [top1, top5, precision] = [top1, top5, precision]
            .map(|share| share.map_or_else(|| "-".to_owned(), |share| format!("{:.1}%", 100.0 * share)));
        say!("{name}  {images:>7}  {top1:>6}  {top5:>6}  {precision:>9}");
    }
    let Report { images, top1, top5, macro_top1, loss, .. } = report;
    say!(
        "{}  {images:>7}  {:>5.1}%  {:>5.1}%  {:9}  loss {loss:.4}, mean top-1 of the classes {:.1}%",
        names[names.len() - 1],
        100.0 * top1,
        100.0 * top5,
        "",
        100.0 * macro_top1
    );
    if !report.mistakes.is_empty() {
        say!("The most frequent mistakes:");
    }
    for &([label, predicted], count) in &report.mistakes {
        let of = report.classes[label].images;
        let [label, predicted] = [label, predicted].map(|class| printable(&report.classes[class].name));
        say!("{count:>7} of {of} {label} taken for {predicted}");
    }
    let surest = report.surest_mistakes.as_deref().unwrap_or_default();
    if !surest.is_empty() {
        say!("The surest mistakes:");
    }
    for Prediction { image, path, class, predicted, probability } in surest {
        let image = path.as_ref().map_or_else(|| format!("image {image}"), printable);
        let [class, predicted] = [class, predicted].map(printable);
        say!("{:>6.1}%  {image}: {class} taken for {predicted}", 100.0 * probability);
    }
    Ok(())
}

/// Which images these are.
fn of_images(split: Split, source: &str) -> String {
    match (split, printable(source)) {
        (Split::All, data) => format!("All images of {data}"),
        (Split::Val, data) => format!("The validation images of {data}"),
        (split, data) => format!("The {} images of {data}", split.name()),
    }
}

/// Counts of what the images were classified as.
struct Tally {
    /// Added up in the images' order, as in training: the same loss to the bit.
    all: Score,
    per_class: Vec<Score>,
    /// For each pair of a label and a predicted class, how many images it has.
    taken: BTreeMap<[u32; 2], u64>,
}

impl Tally {
    fn new(classes: usize) -> Self {
        Self { all: Score::default(), per_class: vec![Score::default(); classes], taken: BTreeMap::new() }
    }

    fn count(&mut self, verdict: &Verdict) {
        self.all.add(verdict.score);
        self.per_class[verdict.label as usize].add(verdict.score);
        *self.taken.entry([verdict.label, verdict.predicted]).or_default() += 1;
    }

    /// The mean of the classes' accuracies, of those that have images.
    fn macro_top1(&self) -> f64 {
        let there = self.per_class.iter().filter(|score| score.images > 0);
        there.clone().map(Score::accuracy).sum::<f64>() / there.count().max(1) as f64
    }

    /// The report of the tally, given the names of the classes.
    fn report(
        self,
        source: &str,
        split: Split,
        classes: Vec<String>,
        skipped: usize,
        surest_mistakes: Option<Vec<Prediction>>,
    ) -> Result<Report> {
        let (all, macro_top1) = (self.all, self.macro_top1());
        // A row in one line, if they are not too many.
        let rows = (classes.len() <= MAX_CONFUSED).then(|| self.confusion());
        let confusion =
            rows.map(|rows| rows.iter().map(to_raw_value).collect::<serde_json::Result<_>>()).transpose()?;
        let mut taken_for = vec![0; classes.len()];
        self.taken.iter().for_each(|([_, predicted], count)| taken_for[*predicted as usize] += count);
        let class = |((name, score), taken): ((String, Score), u64)| Class {
            name,
            images: score.images,
            precision: (taken > 0).then(|| score.right as f64 / taken as f64),
            top1: (score.images > 0).then(|| score.accuracy()),
            top5: (score.images > 0).then(|| score.top5()),
        };
        Ok(Report {
            data: source.to_owned(),
            split,
            images: all.images,
            skipped,
            top1: all.accuracy(),
            top5: all.top5(),
            macro_top1,
            loss: all.mean_loss(),
            mistakes: self.mistakes(),
            surest_mistakes,
            confusion,
            classes: classes.into_iter().zip(self.per_class).zip(taken_for).map(class).collect(),
        })
    }

    /// The most frequent mistakes; of equally frequent ones, those of lower classes first.
    fn mistakes(&self) -> Vec<([usize; 2], u64)> {
        let wrong = self.taken.iter().filter(|([label, predicted], _)| label != predicted);
        let mut wrong: Vec<_> = wrong.map(|(pair, &count)| (pair.map(|class| class as usize), count)).collect();
        wrong.sort_by_key(|&(_, count)| Reverse(count));
        wrong.truncate(MAX_MISTAKES);
        wrong
    }

    /// The confusion matrix: a row for each class, with the number of its images that were classified as each class.
    fn confusion(&self) -> Vec<Vec<u64>> {
        let classes = self.per_class.len();
        let mut rows = vec![vec![0; classes]; classes];
        self.taken.iter().for_each(|(&[label, predicted], &count)| rows[label as usize][predicted as usize] = count);
        rows
    }
}

/// What an image was taken for: a line of `--predictions`.
#[derive(Serialize)]
struct Prediction {
    image: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    class: String,
    predicted: String,
    probability: f64,
}

impl Prediction {
    fn new(verdict: &Verdict, dataset: &dyn Dataset) -> Self {
        let (&Verdict { sample, label, predicted, probability, .. }, classes) = (verdict, dataset.classes());
        Self {
            image: sample,
            path: dataset.path(sample).map(|path| path.to_string_lossy().into_owned()),
            class: classes[label as usize].clone(),
            predicted: classes[predicted as usize].clone(),
            probability,
        }
    }
}

/// The split of a source to evaluate a model on. `known` is what is known of the model's data; `own` says whether the
/// source is the model's own data.
fn split_for(known: &DataFacts, source: &str, own: bool) -> Result<Split> {
    match data::undivided(source).with_context(|| format!("data {source}"))? {
        None => Ok(Split::evaluated(source)),
        Some(_) if known.held_out => Ok(Split::Test),
        Some(folder) if !own && folder == Path::new(source) => Ok(Split::All),
        Some(_) => bail!(
            "data {source}: it has neither val/ nor test/, and the model may have learned from what is there; bring back what it \
             was tested on, name other images with --data, or take these with --split all"
        ),
    }
}

/// Errors: options that are invalid, or that cannot be combined.
fn ensure_options(arguments: &Arguments) -> Result<()> {
    ensure_count("--batch-size", arguments.batch_size)?;
    if let (Some(predictions), Some(confusion)) = (&arguments.predictions, &arguments.confusion)
        && resolved(predictions)? == resolved(confusion)?
    {
        bail!("--predictions and --confusion are both {}; name two files", confusion.display());
    }
    arguments.predictions.as_deref().map_or(Ok(()), |path| ensure_output("--predictions", path, Kind::Predictions))?;
    arguments.confusion.as_deref().map_or(Ok(()), |path| ensure_output("--confusion", path, Kind::Picture))
}

/// A trained model, and the images that it is measured on.
struct Opened {
    model: BiFormer,
    /// The classes that it knows.
    classes: Vec<String>,
    /// Where the images are from, and which of its images they are.
    source: String,
    split: Split,
    loader: Loader,
}

/// What can be done where there are too few images to hold some out.
const MEASURE_ALL: &str = "; to measure all images there are: --split all";

fn open(arguments: &Arguments) -> Result<Opened> {
    let TrainedModel { mut model, mut config, data: mut known, named } = arguments.trained.load()?;
    let classes = known.classes.len();
    if arguments.confusion.is_some() && classes > confusion::MAX_CLASSES {
        bail!("--confusion: of {classes} classes a picture would show little; --json has the counts");
    }
    let (source, whose) = arguments.data.as_ref().map_or((&config.data, OF_THE_RUN), |given| (given, ""));
    let source = source.clone();
    let split = arguments.split.map_or_else(|| split_for(&known, &source, arguments.data.is_none()), Ok)?;
    let is_single = |error: &data::Error| matches!(error, data::Error::SingleImage { .. });
    let dataset = data::open(&source, split)
        .map_err(|error| match &error {
            data::Error::Classes(faults) if faults.iter().all(is_single) => anyhow!("{error}{MEASURE_ALL}"),
            _ if is_single(&error) => anyhow!("{error}{MEASURE_ALL}"),
            _ => error.into(),
        })
        .with_context(|| format!("data {source}{whose}"))?;
    dataset.notes().iter().for_each(|note| tell!(io::stderr(), "note: {note}"));
    if arguments.data.is_some()
        && arguments.split.is_none()
        && dataset.is_held_out()
        && known.test_fingerprint != Some(fingerprint(dataset.as_ref()))
    {
        tell!(io::stderr(), "note: if the model has learned from none of these data, take them all: --split all");
    }
    if arguments.data.is_none()
        && let Some(note) = known.differ(&source, split, dataset.as_ref())
    {
        tell!(io::stderr(), "note: {note}");
    }
    if !named && known.classes.len() == dataset.classes().len() {
        // ImageNet's classes, on which the published models were trained, are ordered by folder name, too.
        known.classes = dataset.classes().to_vec();
    }
    let dataset = data::among(dataset, &known.classes).with_context(|| format!("data {source}"))?;
    if !named {
        // For weights with ImageNet's number of classes it goes without saying.
        note_unsaid(&config, classes == 1000);
    }
    (config.batch_size, config.device) = (arguments.batch_size.min(dataset.len()).max(1), arguments.compute.device);
    // Normalised as the model's training images were, whichever images are evaluated.
    let transform = config.test_transform(known.statistics)?;
    let mut settings = LoaderConfig::eval(config.batch_size, transform);
    settings.max_bad_images = arguments.max_bad_images.unwrap_or(config.max_bad_images);
    let loader = Loader::new(dataset, settings)?;
    let choice = "a smaller --batch-size, or --image-size";
    ensure_room_to_infer(&config, [config.image_size; 2], loader.most_bytes(), DType::F32, choice)?;
    arguments.compute.place(&mut model)?;
    Ok(Opened { model, classes: known.classes, source, split, loader })
}

/// The report, and whether the files that accompany it could be written.
fn measure(arguments: &Arguments) -> Result<(Report, Result<()>)> {
    ensure_options(arguments)?;
    let Opened { model, classes, source, split, loader } = open(arguments)?;
    let (mut tally, mut skipped, mut predictions, mut wrong) = (Tally::new(classes.len()), 0, vec![], vec![]);
    let mut inference = Inference::new(&model, loader.batches_per_epoch());
    let bar = bar(loader.batches_per_epoch());
    let mut batches = numbered(loader.epoch(0, 0));
    while let Some(batch) = batches.next() {
        let batch = batch?;
        let verdicts = evaluate(&mut inference, &batch, WAY_OUT, || batches.peek()?.as_ref().ok())
            .with_context(|| arguments.trained.checkpoint.display().to_string())?;
        for verdict in &verdicts {
            tally.count(verdict);
            if arguments.predictions.is_some() {
                serde_json::to_writer(&mut predictions, &Prediction::new(verdict, loader.dataset().as_ref()))?;
                predictions.push(b'\n');
            }
            if arguments.mistakes > 0 && verdict.label != verdict.predicted {
                wrong.push(*verdict);
            }
        }
        bar.suspend(|| batch.skipped.iter().for_each(warn_of));
        skipped += batch.skipped.len();
        bar.inc(1);
        bar.set_message(format!("{} of {} batches", bar.position(), loader.batches_per_epoch()));
        loader.recycle(batch.into_batch());
    }
    bar.finish_and_clear();
    let write = || {
        if let Some(path) = &arguments.predictions {
            write_safely(path, &predictions)?;
        }
        if let Some(path) = &arguments.confusion {
            let subtitle = format!("{}; rows: classes, columns: what they were taken for", of_images(split, &source));
            confusion::draw(&classes, &tally.confusion(), &subtitle, path)?;
        }
        Ok(())
    };
    let written = write();
    wrong.sort_by(|a, b| b.probability.total_cmp(&a.probability));
    wrong.truncate(arguments.mistakes);
    let surest = || wrong.iter().map(|verdict| Prediction::new(verdict, loader.dataset().as_ref())).collect();
    let surest_mistakes = (arguments.mistakes > 0).then(surest);
    Ok((tally.report(&source, split, classes, skipped, surest_mistakes)?, written))
}
