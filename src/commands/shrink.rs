//! `biformer shrink`.

use super::{Status, Threads, pictures_in};
use crate::printing::tell;
use crate::trainer::display::{bar, plural};
use anyhow::{Context, Result, bail};
use clap::Args;
use data::shrunk;
use model::write_safely;
use rayon::prelude::*;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct Arguments {
    /// A folder with PNG, JPEG or WebP pictures, also in folders below it.
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Where the smaller ones go, under the same names in the same folders. What is there is left as it is, so that the command
    /// can be stopped and called again.
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// The shorter side of the smaller pictures, in pixels; pictures that have no more are copied. 8/7 of a model's --image-size
    /// is what a test needs, and more keeps small random parts of a picture sharp in training.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..=4096))]
    side: u16,
    #[command(flatten)]
    threads: Threads,
}

/// What became of a picture.
enum Outcome {
    Written { before: u64, now: u64 },
    There,
}

/// Writes a smaller picture for each one of a folder, and names those that cannot be read.
pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| {
        let Arguments { data, output, .. } = arguments;
        let from = fs::canonicalize(data).with_context(|| format!("--data {}", data.display()))?;
        if place(output).with_context(|| format!("--output {}", output.display()))?.starts_with(from) {
            bail!(
                "--output {}: it lies in --data, whose pictures stay as they are; name another folder",
                output.display()
            );
        }
        let pictures = pictures_in(data)?;
        let bar = bar(pictures.len());
        bar.set_message("pictures");
        let shrink = |picture: &PathBuf| {
            let outcome = shrink(picture, data, output, arguments.side.into());
            bar.inc(1);
            outcome
        };
        let outcomes: Vec<Result<Outcome>> = pictures.par_iter().map(shrink).collect();
        bar.finish_and_clear();
        let (mut written, mut there, mut bytes) = (0, 0, [0; 2]);
        for outcome in &outcomes {
            match outcome {
                Ok(Outcome::Written { before, now }) => {
                    written += 1;
                    bytes = [bytes[0] + before, bytes[1] + now];
                }
                Ok(Outcome::There) => there += 1,
                Err(error) => tell!(io::stderr(), "{error:#}"),
            }
        }
        let [before, now] = bytes.map(|bytes| bytes as f64 / 1e6);
        say!("{}: {written} picture{} written, {before:.1} MB made {now:.1} MB", output.display(), plural(written));
        match there {
            0 => {}
            1 => say!("1 was there already"),
            _ => say!("{there} were there already"),
        }
        match outcomes.len() - written - there {
            0 => Ok(Status::Done),
            failed => {
                say!("{failed} picture{} could not be read or written", plural(failed));
                Ok(Status::Refused)
            }
        }
    })
}

/// Where a folder lies, or will, without symbolic links.
fn place(folder: &Path) -> io::Result<PathBuf> {
    let folder = std::path::absolute(folder)?;
    let there = folder.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(&folder);
    Ok(fs::canonicalize(there)?.join(folder.strip_prefix(there).unwrap_or(Path::new(""))))
}

/// Writes one smaller picture, to where it lies in `data` but in `output`.
fn shrink(picture: &Path, data: &Path, output: &Path, side: usize) -> Result<Outcome> {
    let to = output.join(picture.strip_prefix(data)?);
    if to.try_exists().with_context(|| to.display().to_string())? {
        return Ok(Outcome::There);
    }
    let bytes = shrunk(picture, side)?;
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    write_safely(&to, &bytes)?;
    Ok(Outcome::Written { before: fs::metadata(picture).map_or(0, |file| file.len()), now: bytes.len() as u64 })
}
