//! What an evaluation reports: the counts that it adds up, and how they are printed.

use crate::printing::{column, plural, print_lines, printable};
use crate::trainer::score::{Score, Tested, Verdict};
use anyhow::Result;
use data::{Dataset, Split};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The most classes for which the confusion matrix is reported: with more, it would be mostly zeros, and larger than
/// the rest of the report.
const MAX_CONFUSED: usize = 2000;

/// The most classes whose probabilities are written for each image.
pub(super) const MAX_PROBABILITIES: usize = 100;

/// The most classes without images that are listed: of a thousand classes there may be images of two.
const MAX_ABSENT: usize = 20;

/// How many of the most frequent mistakes are shown.
const MAX_MISTAKES: usize = 5;

/// The report, as `--json` prints it.
#[derive(Serialize)]
pub(super) struct Report {
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

/// Prints a report, as JSON or as a table.
pub(super) fn print(report: &Report, json: bool) -> Result<()> {
    if json {
        return print_lines(format_args!("{}", serde_json::to_string_pretty(report)?));
    }
    let mut there: Vec<&Class> = report.classes.iter().filter(|class| class.images > 0).collect();
    if report.classes.len() - there.len() <= MAX_ABSENT {
        there = report.classes.iter().collect();
    }
    let (heading, names) = column("class", there.iter().map(|class| class.name.as_str()).chain(["all"]));
    say!("{}:", of_images(report.split, &report.data));
    say!("{heading}  {:>7}  {:>6}  {:>6}  {:>9}", "images", "top-1", "top-5", "precision");
    for (name, Class { images, top1, top5, precision, .. }) in names.iter().zip(&there) {
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
    if report.skipped > 0 {
        let (skipped, is) = (report.skipped, if report.skipped == 1 { "is" } else { "are" });
        say!("{skipped} image{} could not be read, and {is} not counted.", plural(skipped));
    }
    let absent = report.classes.len() - there.len();
    if absent > 0 {
        say!("There are no images of {absent} other classes that the model knows.");
    }
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
    for Prediction { image, path, class, predicted, probability, .. } in surest {
        let image = path.as_ref().map_or_else(|| format!("image {image}"), printable);
        let [class, predicted] = [class, predicted].map(printable);
        say!("{:>6.1}%  {image}: {class} taken for {predicted}", 100.0 * probability);
    }
    Ok(())
}

/// Which images these are.
pub(super) fn of_images(split: Split, source: &str) -> String {
    match (split, printable(source)) {
        (Split::All, data) => format!("All images of {data}"),
        (Split::Train, data) => format!("The training images of {data}"),
        (Split::Val, data) => format!("The validation images of {data}"),
        (Split::Test, data) => format!("The test images of {data}"),
    }
}

/// Counts of what the images were classified as.
pub(super) struct Tally {
    /// Added up in the images' order, as in training: the same loss to the bit.
    tested: Tested,
    /// For each pair of a label and a predicted class, how many images it has.
    taken: BTreeMap<[u32; 2], u64>,
}

impl Tally {
    pub(super) fn new(classes: usize) -> Self {
        Self { tested: Tested::new(classes), taken: BTreeMap::new() }
    }

    pub(super) fn count(&mut self, verdict: &Verdict) {
        self.tested.add(verdict);
        *self.taken.entry([verdict.label, verdict.predicted]).or_default() += 1;
    }

    /// The report of the tally, given the names of the classes.
    pub(super) fn report(
        self,
        source: &str,
        split: Split,
        classes: Vec<String>,
        skipped: usize,
        surest_mistakes: Option<Vec<Prediction>>,
    ) -> Result<Report> {
        let (all, macro_top1) = (self.tested.all, self.tested.macro_accuracy());
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
            classes: classes.into_iter().zip(self.tested.of_classes).zip(taken_for).map(class).collect(),
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
    pub(super) fn confusion(&self) -> Vec<Vec<u64>> {
        let classes = self.tested.of_classes.len();
        let mut rows = vec![vec![0; classes]; classes];
        self.taken.iter().for_each(|(&[label, predicted], &count)| rows[label as usize][predicted as usize] = count);
        rows
    }
}

/// What an image was taken for: a line of `--predictions`.
#[derive(Serialize)]
pub(super) struct Prediction {
    image: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    class: String,
    predicted: String,
    probability: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    probabilities: Option<Vec<f64>>,
}

impl Prediction {
    pub(super) fn new(verdict: &Verdict, probabilities: Option<Vec<f64>>, dataset: &dyn Dataset) -> Self {
        let (&Verdict { sample, label, predicted, probability, .. }, classes) = (verdict, dataset.classes());
        Self {
            image: sample,
            path: dataset.path(sample).map(|path| path.to_string_lossy().into_owned()),
            class: classes[label as usize].clone(),
            predicted: classes[predicted as usize].clone(),
            probability,
            probabilities,
        }
    }
}
