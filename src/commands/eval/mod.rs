//! `biformer eval`.

mod report;

use super::Status;
use super::options::{Threads, Trained, class_names, ensure_count};
use super::output::{Kind, ensure_output};
use crate::data_notes::warn_of;
use crate::device::Compute;
use crate::memory::ensure_room_to_infer;
use crate::paths::{error_of, is_same_source, resolved};
use crate::pictures::confusion;
use crate::printing::{bar, tell};
use crate::trainer::class_names::assumed;
use crate::trainer::data_facts::{DataFacts, OF_THE_RUN};
use crate::trainer::score;
use crate::trainer::trained::{TrainedModel, note_unsaid};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use data::{Loader, LoaderConfig, Split, class_among, fingerprint};
use model::{BiFormer, write_safely};
use report::{MAX_PROBABILITIES, Prediction, Report, Tally, of_images, print};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use tensor::DType;

/// The advice for weights whose results are not finite.
const WAY_OUT: &str = "these weights are of no use, take those of another run";

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    trained: Trained,
    /// The data set; by default the one that the model was trained on, or `embedded` for a state_dict alone. It may
    /// have some of the model's classes only.
    #[arg(long, value_name = "embedded|DIR")]
    data: Option<String>,
    /// A text file with the names of the model's classes, one in each line and in their order, to be used in place of
    /// those that it knows. The classes of the data are found among them by name. A state_dict alone knows none: 1,000
    /// are taken to be ImageNet's if the data have any of those; otherwise they are taken to be those of the data, in
    /// the order of their names, if there are as many.
    #[arg(long, value_name = "FILE")]
    classes: Option<PathBuf>,
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
    /// class; the likeliest one; the probability of that; and, of a model of up to 100 classes, the probabilities of
    /// all, in the model's order.
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

pub fn run(arguments: &Arguments) -> Result<Status> {
    let measured = arguments.threads.run(|| measure(arguments));
    let (report, written) = measured.map_err(|error| match error.downcast_ref() {
        Some(data::Error::TooManyBadImages { .. }) => anyhow!("{error:#}, with --max-bad-images"),
        _ => error,
    })?;
    // A report that took long to compute is printed even if a file could not be written.
    print(&report, arguments.json)?;
    written.map(|()| Status::Done)
}

/// The split of a source to evaluate a model on. `known` is what is known of the model's data; `own` says whether the
/// source is the model's own data.
fn split_for(known: &DataFacts, source: &str, own: bool) -> Result<Split> {
    match data::undivided(source).map_err(|error| error_of("data", source, "", error))? {
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
        && resolved(predictions).is_ok_and(|one| resolved(confusion).is_ok_and(|other| one == other))
    {
        bail!("--predictions and --confusion are both {}; name two files", confusion.display());
    }
    ensure_output("--predictions", arguments.predictions.as_deref(), Kind::Predictions)?;
    ensure_output("--confusion", arguments.confusion.as_deref(), Kind::Picture)
}

/// Errors: two of these classes with one name, by which one of the data's is found among them.
fn ensure_told_apart(classes: &[String], of_data: &[String]) -> Result<()> {
    for first in of_data.iter().filter_map(|name| class_among(name, classes)) {
        let name = &classes[first];
        if let Some(more) = classes[first + 1..].iter().position(|other| other == name) {
            let [first, second] = [first + 1, first + more + 2];
            bail!(
                "lines {first} and {second} are both \"{name}\"; expected a name of its own for each class of the data"
            );
        }
    }
    Ok(())
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
    let own = is_same_source(&source, &config.data);
    let split = arguments.split.map_or_else(|| split_for(&known, &source, own), Ok)?;
    let dataset = data::open(&source, split).map_err(|error| {
        let is_single = |error: &data::Error| matches!(error, data::Error::SingleImage { .. });
        let single = match &error {
            data::Error::Classes(faults) => faults.iter().all(is_single),
            other => is_single(other),
        };
        let way_out = if single { MEASURE_ALL } else { "" };
        // A folder that lacks this split has not been moved.
        let whose = if matches!(error, data::Error::Lacking { .. }) { "" } else { whose };
        anyhow!("{}{way_out}", error_of("data", &source, whose, error))
    })?;
    dataset.notes().iter().for_each(|note| tell!(io::stderr(), "note: {note}"));
    if own {
        if let Some(note) = known.differ(&source, split, dataset.as_ref()) {
            tell!(io::stderr(), "note: {note}");
        }
    } else if arguments.split.is_none()
        && dataset.is_held_out()
        && known.test_fingerprint != Some(fingerprint(dataset.as_ref()))
    {
        tell!(io::stderr(), "note: if the model has learned from none of these data, take them all: --split all");
    }
    if let Some(file) = &arguments.classes {
        known.classes = class_names(file, classes)?;
        ensure_told_apart(&known.classes, dataset.classes())
            .with_context(|| format!("--classes {}", file.display()))?;
    } else if !named {
        let assumed = assumed(classes, dataset.classes());
        if let Some(assumption) = assumed.assumption {
            tell!(io::stderr(), "note: {assumption} (--classes FILE gives their names)");
        }
        known.classes = assumed.names;
    }
    let dataset = data::among(dataset, &known.classes).map_err(|error| {
        let way_out = match arguments.classes {
            None => "; if the model's classes have other names, give them with --classes FILE",
            Some(_) => "",
        };
        anyhow!("data {source}: {error}{way_out}")
    })?;
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
    let bar = bar(loader.batches_per_epoch());
    let way_out = format!("{}: {WAY_OUT}", arguments.trained.checkpoint.display());
    score::test(&model, &loader, &AtomicBool::new(false), &way_out, |batch, verdicts, logits| {
        let few = arguments.predictions.is_some() && classes.len() <= MAX_PROBABILITIES;
        let all = if few { score::probabilities(logits)? } else { vec![] };
        let mut rows = all.chunks(classes.len()).zip(batch.counted()).filter_map(|(row, counts)| counts.then_some(row));
        for verdict in &verdicts {
            tally.count(verdict);
            if arguments.predictions.is_some() {
                let prediction = Prediction::new(verdict, rows.next().map(<[_]>::to_vec), loader.dataset().as_ref());
                serde_json::to_writer(&mut predictions, &prediction)?;
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
        Ok(())
    })?;
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
    let surest = || wrong.iter().map(|verdict| Prediction::new(verdict, None, loader.dataset().as_ref())).collect();
    let surest_mistakes = (arguments.mistakes > 0).then(surest);
    Ok((tally.report(&source, split, classes, skipped, surest_mistakes)?, written))
}
