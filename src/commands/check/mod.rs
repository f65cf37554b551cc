//! `biformer check`.

mod repeated;

use super::Status;
use super::options::Threads;
use crate::data_notes::{distinct_notes, images_per_class, lost_classes};
use crate::paths::error_of;
use crate::printing::{bar, column, plural, tell};
use anyhow::{Result, bail};
use clap::Args;
use data::{Dataset, Split};
use rayon::prelude::*;
use std::io;
use std::path::Path;
use std::sync::Arc;

#[derive(Debug, Args)]
pub struct Arguments {
    /// A folder of images, or `embedded`, as `train` takes them.
    #[arg(long, value_name = "embedded|DIR")]
    data: String,
    #[command(flatten)]
    threads: Threads,
}

/// Reads all images of a data set as training would, and names those that cannot be read, and some that are there
/// twice.
pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| {
        let splits = splits(&arguments.data)?;
        print_classes(&splits)?;
        let notes = distinct_notes(splits.iter().map(|(_, dataset)| dataset.as_ref()));
        notes.iter().for_each(|note| tell!(io::stderr(), "note: {note}"));
        let read: Vec<Vec<data::Result<u64>>> =
            splits.iter().map(|(split, dataset)| read(dataset.as_ref(), *split)).collect();
        if let [only] = splits[0].1.classes() {
            tell!(io::stderr(), "note: all images are of one class, {only}: training takes two or more");
        }
        let (mut bad, mut bad_in_training, mut lost) = (0, vec![], false);
        for ((split, dataset), read) in splits.iter().zip(&read) {
            let (unread, lost_here) = (name_unreadable(read), note_lost_classes(dataset.as_ref(), *split, read));
            bad += unread;
            // A test beside a validation plays no part in training.
            if [Split::Train, Split::evaluated(&arguments.data)].contains(split) {
                let errors = read.iter().filter_map(|read| read.as_ref().err());
                bad_in_training.push(errors.filter(|error| error.is_of_image()).count());
                lost |= lost_here;
            }
        }
        repeated::notes(&splits, &read).iter().for_each(|note| tell!(io::stderr(), "note: {note}"));
        let all: usize = splits.iter().map(|(_, dataset)| dataset.len()).sum();
        say!("{bad} of {all} image{} cannot be read.", plural(all));
        let (most, in_all) = (bad_in_training.iter().copied().max().unwrap_or(0), bad_in_training.iter().sum());
        if most > 0 && !lost {
            let counted = if most < in_all { " (in training and in the test, each)" } else { "" };
            tell!(io::stderr(), "note: training skips them with --set max_bad_images={most}{counted}");
        }
        Ok(if bad == 0 { Status::Done } else { Status::CheckFailed })
    })
}

/// The training images, if there are any; the images that training evaluates on; and the test split, if there is one
/// beside a validation split.
fn splits(source: &str) -> Result<Vec<(Split, Arc<dyn Dataset>)>> {
    let (there, evaluated) = (|split: Split| Path::new(source).join(split.name()).is_dir(), Split::evaluated(source));
    let mut splits = vec![evaluated];
    if there(Split::Train) || !there(evaluated) {
        splits.insert(0, Split::Train);
    }
    if evaluated == Split::Val && there(Split::Test) {
        splits.push(Split::Test);
    }
    let open = |split| {
        let dataset = data::open(source, split).map_err(|error| error_of("data", source, "", error))?;
        Ok((split, dataset))
    };
    let splits: Vec<(Split, Arc<dyn Dataset>)> = splits.into_iter().map(open).collect::<Result<_>>()?;
    // Without training images, nothing else compares the classes of the splits.
    if splits.windows(2).any(|pair| pair[0].1.classes() != pair[1].1.classes()) {
        bail!("data {source}: {}/ and {}/ have different classes", splits[0].0.name(), splits[1].0.name());
    }
    Ok(splits)
}

/// How many images each class has in each split.
fn print_classes(splits: &[(Split, Arc<dyn Dataset>)]) -> Result<()> {
    let (heading, names) = column("class", splits[0].1.classes().iter().map(String::as_str).chain(["all"]));
    let counts: Vec<Vec<usize>> = splits
        .iter()
        .map(|(_, dataset)| [images_per_class(dataset.as_ref(), 0..dataset.len()), vec![dataset.len()]].concat())
        .collect();
    let line = |name: &str, cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("  {cell:>7}")).collect();
        format!("{name}{cells}")
    };
    say!("{}", line(&heading, splits.iter().map(|(split, _)| split.name().to_owned()).collect()));
    for (row, name) in names.iter().enumerate() {
        say!("{}", line(name, counts.iter().map(|counts| counts[row].to_string()).collect()));
    }
    Ok(())
}

/// Reads all images of a split: the checksum of each one's pixels, or what keeps it from being read.
fn read(dataset: &dyn Dataset, split: Split) -> Vec<data::Result<u64>> {
    let bar = bar(dataset.len());
    bar.set_message(format!("images in {}", split.name()));
    let read = |image| {
        let read = dataset.get(image);
        bar.inc(1);
        read.map(|sample| repeated::checksum(&sample.image))
    };
    let read = (0..dataset.len()).into_par_iter().map(read).collect();
    bar.finish_and_clear();
    read
}

/// Names the images that cannot be read; gives their number.
fn name_unreadable(read: &[data::Result<u64>]) -> usize {
    let errors: Vec<&data::Error> = read.iter().filter_map(|read| read.as_ref().err()).collect();
    errors.iter().for_each(|error| tell!(io::stderr(), "{error}"));
    errors.len()
}

/// Names the classes of which no image can be read; says whether there are any.
fn note_lost_classes(dataset: &dyn Dataset, split: Split, read: &[data::Result<u64>]) -> bool {
    let lost = lost_classes(dataset, (0..read.len()).filter(|&image| read[image].is_err()));
    lost.iter().for_each(|class| tell!(io::stderr(), "note: of {class} in {} no image can be read", split.name()));
    !lost.is_empty()
}
