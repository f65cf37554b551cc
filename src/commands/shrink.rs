//! `biformer shrink`.

use super::Status;
use super::options::{Threads, pictures_in, whole};
use crate::folder_lock::{LOCK, Locked};
use crate::paths::{folders_of, resolved};
use crate::printing::{bar, plural, printable, tell};
use anyhow::{Context, Result, bail};
use clap::Args;
use data::shrunk;
use indicatif::ProgressBar;
use model::{ensure_writable, remove_leftovers, write_safely};
use rayon::iter::Either;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug, Args)]
pub struct Arguments {
    /// A folder with pictures, also in folders below it.
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Where the smaller ones go, under the same names and subfolders (BMP, TIFF and PNM are written as PNG under their
    /// old names). Files already there are kept, even if made with another --side, so the command can be stopped and
    /// called again.
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// The shorter side of the smaller pictures, in pixels; pictures that have no more are copied. Evaluation needs 8/7
    /// of a model's --image-size; a larger side keeps small random crops of a picture sharp in training.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = whole(1..=4096u16))]
    side: u16,
    #[command(flatten)]
    threads: Threads,
}

/// What became of a picture.
enum Outcome {
    /// It was written: how many bytes it had, and has.
    Written([u64; 2]),
    /// It was there already.
    There,
    /// It could not be read, which has been reported; or it was skipped because another one could not be written.
    Left,
}

/// Writes a smaller picture for each one of a folder, and names those that cannot be read.
pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| {
        let (from, output) = folders(arguments)?;
        let shown = arguments.output.display();
        let named = || format!("--output {shown}");
        let pictures = unwritten(arguments, &output)?;
        let originals = originals(arguments, &pictures, from, &output)?;
        fs::create_dir_all(&output).with_context(named)?;
        let Some(_locked) = Locked::new(&output).with_context(named)? else {
            bail!(
                "--output {shown}: pictures are being written there already; wait for the end, or name another folder"
            );
        };
        let beside = |picture: &PathBuf| Some(output.join(picture.strip_prefix(&arguments.data).ok()?.parent()?));
        pictures.iter().filter_map(beside).collect::<BTreeSet<_>>().iter().for_each(|folder| remove_leftovers(folder));
        ensure_writable(&output.join(LOCK)).with_context(named)?;
        let bar = bar(pictures.len());
        bar.set_message("pictures");
        let (folders, full) = ([arguments.data.as_path(), &output], AtomicBool::new(false));
        let outcomes = pictures.par_iter().map(|picture| {
            if full.load(Ordering::Relaxed) {
                return Ok(Outcome::Left);
            }
            let outcome = shrink_one(picture, folders, &originals, arguments.side.into(), &bar);
            full.fetch_or(outcome.is_err(), Ordering::Relaxed);
            bar.inc(1);
            outcome
        });
        let outcomes: Vec<Result<Outcome>> = outcomes.collect();
        bar.finish_and_clear();
        let (mut written, mut there, mut bytes) = (0, 0, [0; 2]);
        for outcome in outcomes {
            match outcome? {
                Outcome::Written([before, now]) => {
                    written += 1;
                    bytes = [bytes[0] + before, bytes[1] + now];
                }
                Outcome::There => there += 1,
                Outcome::Left => {}
            }
        }
        let unread = pictures.len() - written - there;
        print_counts(&arguments.output, [written, there, unread], bytes)?;
        Ok(if unread == 0 { Status::Done } else { Status::InputsSkipped })
    })
}

/// Prints how many pictures were written, were there and could not be read, and how many bytes became how many.
fn print_counts(output: &Path, [written, there, unread]: [usize; 3], bytes: [u64; 2]) -> Result<()> {
    let ([before, now], shown) = (bytes.map(|bytes| bytes as f64 / 1e6), printable(output.display()));
    say!("{shown}: {written} picture{} written, {before:.1} MB reduced to {now:.1} MB", plural(written));
    match there {
        0 => {}
        1 => say!("1 was there already, made with this --side or another"),
        _ => say!("{there} were there already, made with this --side or another"),
    }
    if unread > 0 {
        say!("{unread} picture{} could not be read", plural(unread));
    }
    Ok(())
}

/// The folders of the original and of the smaller pictures, with symbolic links resolved. Errors: one of them is not a
/// folder, or one lies in the other.
fn folders(arguments: &Arguments) -> Result<(PathBuf, PathBuf)> {
    let (data, shown) = (arguments.data.display(), arguments.output.display());
    let from = dunce::canonicalize(&arguments.data);
    let from = from.with_context(|| format!("--data {data}: expected a folder with pictures"))?;
    if !from.is_dir() {
        bail!("--data {data}: expected a folder with pictures");
    }
    let output = resolved(&arguments.output).with_context(|| format!("--output {shown}"))?;
    if output.starts_with(&from) {
        bail!("--output {shown}: it lies in --data, whose pictures stay as they are; name another folder");
    }
    if from.starts_with(&output) {
        bail!(
            "--output {shown}: --data lies in it, so its pictures would count as written already; name another folder"
        );
    }
    if output.exists() && !output.is_dir() {
        bail!("--output {shown}: it is there, and no folder; name another");
    }
    Ok((from, output))
}

/// The pictures in --data. Through a symbolic link, some that were written before may be among them, which are left
/// out with a note. Errors: there are none; others in the output, which would be taken for such.
fn unwritten(arguments: &Arguments, output: &Path) -> Result<Vec<PathBuf>> {
    let (data, shown) = (&arguments.data, arguments.output.display());
    let pictures = pictures_in(data)?.into_par_iter().map(|picture| (dunce::canonicalize(&picture).ok(), picture));
    let (inside, pictures): (Vec<_>, Vec<_>) = pictures.partition_map(|(real, picture)| {
        match real.and_then(|real| real.strip_prefix(output).map(Path::to_owned).ok()) {
            Some(name) => Either::Left((name, picture)),
            None => Either::Right(picture),
        }
    });
    let is_written = |name: &PathBuf| pictures.binary_search(&data.join(name)).is_ok();
    if let Some((_, original)) = inside.iter().find(|(name, _)| !is_written(name)) {
        bail!(
            "--output {shown}: {} of --data lies in it; name another folder, or delete it if it is an earlier result",
            original.display()
        );
    }
    if !inside.is_empty() {
        let (count, s) = (inside.len(), plural(inside.len()));
        tell!(io::stderr(), "note: skipped {count} picture{s} in {shown}, to which a link in {} leads", data.display());
    }
    Ok(pictures)
}

/// The folders of the original pictures, with symbolic links resolved. Errors: the output lies in one, or one in the
/// output.
fn originals(arguments: &Arguments, pictures: &[PathBuf], from: PathBuf, output: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut originals = folders_of(&arguments.data, pictures.iter().map(PathBuf::as_path));
    let shown = arguments.output.display();
    if let Some(folder) = originals.iter().find(|folder| output.starts_with(folder) || folder.starts_with(output)) {
        let in_it = if output.starts_with(folder) { "it lies in" } else { "in it lies" };
        bail!("--output {shown}: {in_it} {}, a folder of --data; name another folder", folder.display());
    }
    originals.insert(from);
    Ok(originals)
}

/// Writes one smaller picture, to the path in `output` that it has in `data`. Errors: it cannot be written, or would be
/// among the `originals`.
fn shrink_one(
    picture: &Path,
    [data, output]: [&Path; 2],
    originals: &BTreeSet<PathBuf>,
    side: usize,
    bar: &ProgressBar,
) -> Result<Outcome> {
    let to = output.join(picture.strip_prefix(data)?);
    let named = || to.display().to_string();
    if fs::metadata(&to).is_ok_and(|there| there.is_file() && there.len() > 0) {
        return Ok(Outcome::There);
    }
    let bytes = match shrunk(picture, side) {
        Ok(bytes) => bytes,
        Err(error) => {
            bar.suspend(|| tell!(io::stderr(), "{error}"));
            return Ok(Outcome::Left);
        }
    };
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).with_context(named)?;
        let real = dunce::canonicalize(folder).with_context(named)?;
        if real.ancestors().any(|above| originals.contains(above)) {
            bail!("{}: a symbolic link leads from there into --data; name another --output", folder.display());
        }
    }
    if to.is_symlink() {
        // It leads nowhere, or to an empty file, perhaps in --data.
        fs::remove_file(&to).with_context(named)?;
    }
    write_safely(&to, &bytes)?;
    Ok(Outcome::Written([fs::metadata(picture).map_or(0, |file| file.len()), bytes.len() as u64]))
}
