//! `biformer check`.

use super::{Status, Threads};
use crate::printing::{print_lines, printable, tell, unless_closed};
use crate::trainer::display::{bar, distinct_notes, plural};
use anyhow::{Context, Result, bail};
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

/// Reads all images of a data set as training would, and names those that cannot be read.
pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| {
        let splits = splits(&arguments.data)?;
        // What is found is the status as well, and that does not depend on who listens: `biformer check .. | head`.
        unless_closed(print_classes(&splits))?;
        let notes = distinct_notes(splits.iter().map(|(_, dataset)| dataset.as_ref()));
        notes.iter().for_each(|note| tell!(io::stderr(), "note: {note}"));
        let (mut bad, mut most) = (0, 0);
        for (split, dataset) in &splits {
            let errors = unreadable(dataset.as_ref(), *split);
            errors.iter().for_each(|error| tell!(io::stderr(), "{error}"));
            bad += errors.len();
            most = most.max(errors.len());
        }
        let all: usize = splits.iter().map(|(_, dataset)| dataset.len()).sum();
        unless_closed(print_lines(format_args!("{bad} of {all} image{} cannot be read.", plural(all))))?;
        if bad > 0 {
            tell!(io::stderr(), "note: training passes over them with --set max_bad_images={most}");
        }
        Ok(if bad == 0 { Status::Done } else { Status::FellShort })
    })
}

/// Those to learn from, if there are any, those to evaluate on, and the test images that there may be beside these.
fn splits(source: &str) -> Result<Vec<(Split, Arc<dyn Dataset>)>> {
    let (there, evaluated) = (|split: Split| Path::new(source).join(split.name()).is_dir(), Split::evaluated(source));
    let mut splits = vec![evaluated];
    if there(Split::Train) || !there(evaluated) {
        splits.insert(0, Split::Train);
    }
    if evaluated == Split::Val && there(Split::Test) {
        splits.push(Split::Test);
    }
    let open = |split| Ok((split, data::open(source, split).with_context(|| format!("data {source}"))?));
    let splits: Vec<(Split, Arc<dyn Dataset>)> = splits.into_iter().map(open).collect::<Result<_>>()?;
    // Without images to learn from, nothing else compares them.
    if splits.windows(2).any(|pair| pair[0].1.classes() != pair[1].1.classes()) {
        bail!("data {source}: {}/ and {}/ have different classes", splits[0].0.name(), splits[1].0.name());
    }
    Ok(splits)
}

/// How many images each class has in each split.
fn print_classes(splits: &[(Split, Arc<dyn Dataset>)]) -> Result<()> {
    let classes = splits[0].1.classes();
    let counts = |dataset: &dyn Dataset| {
        let mut counts = vec![0; classes.len()];
        dataset.labels().unwrap_or_default().iter().for_each(|&label| counts[label as usize] += 1);
        counts
    };
    let counts: Vec<Vec<usize>> = splits.iter().map(|(_, dataset)| counts(dataset.as_ref())).collect();
    let names: Vec<String> = classes.iter().map(printable).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max("class".len());
    let line = |name: &str, cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("  {cell:>7}")).collect();
        format!("{name:width$}{cells}")
    };
    say!("{}", line("class", splits.iter().map(|(split, _)| split.name().to_owned()).collect()));
    for (class, name) in names.iter().enumerate() {
        say!("{}", line(name, counts.iter().map(|counts| counts[class].to_string()).collect()));
    }
    say!("{}", line("all", splits.iter().map(|(_, dataset)| dataset.len().to_string()).collect()));
    Ok(())
}

/// What keeps images from being read, in the order of the images.
fn unreadable(dataset: &dyn Dataset, split: Split) -> Vec<data::Error> {
    let bar = bar(dataset.len());
    bar.set_message(format!("images in {}", split.name()));
    let read = |image| {
        let read = dataset.get(image);
        bar.inc(1);
        read.err()
    };
    let errors = (0..dataset.len()).into_par_iter().filter_map(read).collect();
    bar.finish_and_clear();
    errors
}
