//! The run folder: what a run leaves behind.

use super::best::{BEST, whole_best};
use super::checkpoint::{Checkpoint, FILE_NAME, Progress};
use super::logs::{METRICS, TIMINGS};
use crate::config::RunConfig;
use crate::folder_lock::{LOCK, Locked};
use crate::paths::{ensure_expanded, ensure_regular, quoted};
use crate::pictures;
use crate::pictures::curves::Told;
use crate::printing::tell;
use anyhow::{Context, Error, Result, anyhow, bail};
use data::{Batch, Transform};
use model::{Trace, ensure_writable, remove_leftovers, write_safely};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.toml";
const CURVES: &str = "curves.png";
const ROUTING: &str = "routing.png";
/// The files that a run writes, in the order in which they are listed when it ends.
pub(crate) const FILES: [&str; 7] = [CONFIG, METRICS, TIMINGS, FILE_NAME, BEST, CURVES, ROUTING];
/// How many test images the picture of routed regions shows.
pub const PICTURED: usize = 6;

/// A run folder, locked so that no other process uses it in the meantime.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    locked: Locked,
}

impl RunFolder {
    /// Creates the folder. Refuses one that already holds a run, or anything else that a run would overwrite.
    pub fn create(config: &RunConfig) -> Result<Self> {
        let path = &config.out;
        fs::create_dir_all(path).with_context(|| cannot_be_made(path))?;
        let folder = Self { path: path.clone(), locked: lock(path)? };
        // Checked only under the lock: another run may have started and ended in the meantime.
        ensure_unused(path)?;
        remove_leftovers(path);
        Ok(folder)
    }

    /// The folder of a run that is to be resumed. Errors: there is no run in it, or another program uses it.
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_file() {
            bail!(
                "run folder {}: it is a file, from which no run goes on; name its folder with --out, or start a new run \
                 from the weights in it with --weights",
                path.display()
            );
        }
        ensure_expanded(path)?;
        if !holds_run(path)? {
            let shown = path.display();
            return Err(match whole_best(path) {
                Some(best) => anyhow!("run folder {shown}: there is no {FILE_NAME} to resume from; {best}"),
                None => anyhow!(
                    "run folder {shown}: there is no {FILE_NAME} to resume from; name the right folder with --out, or leave \
                     --resume out to start a run"
                ),
            });
        }
        Ok(Self { path: path.to_owned(), locked: lock(path)? })
    }

    /// Writes the configuration.
    pub(super) fn write_config(&self, config: &RunConfig) -> Result<()> {
        self.write(CONFIG, config.to_toml()?.as_bytes())
    }

    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.ensure_own()?;
        write_safely(&self.path.join(name), bytes).map_err(|error| self.unsaved(error.into()))
    }

    /// Refuses to write to the folder once it has been moved: at its path there may now be another run's.
    pub(super) fn ensure_own(&self) -> Result<()> {
        let path = self.path.display();
        if !self.locked.is_at(&self.path) {
            bail!(
                "run folder {path}: it, or the lock in it, has been moved or removed since the run began, and nothing is \
                 written to what is there now; go on where it is with --resume --out FOLDER"
            );
        }
        Ok(())
    }

    /// Writes the checkpoint. Errors: it cannot be written; the folder belongs to another run by now.
    pub fn save(&self, checkpoint: Checkpoint) -> Result<()> {
        self.ensure_own()?;
        checkpoint.write(&self.checkpoint()).map_err(|error| self.unsaved(error))
    }

    /// Prints a note if config.toml has been edited, since that has no effect: a run resumes with the configuration in
    /// its checkpoint. So it does if the file cannot be read.
    pub(super) fn note_edits(&self, config: &RunConfig) -> Result<()> {
        let is_own = |bytes: &[u8]| {
            let text = str::from_utf8(bytes).ok();
            bytes.is_empty() || text.is_some_and(|text| RunConfig::parse(text).is_ok_and(|written| written == *config))
        };
        let path = self.path.join(CONFIG);
        let problem = match read(&path)? {
            Some(bytes) if is_own(&bytes) => return Ok(()),
            Some(_) => "differs from the checkpoint's configuration",
            None => "cannot be read,",
        };
        tell!(
            io::stderr(),
            "note: {} {problem} and is rewritten: options and --config change what can change in a run that has begun; for \
             anything else, start another from its weights (--weights)",
            path.display()
        );
        Ok(())
    }

    /// Adds advice to the error of something that could not be saved.
    pub(super) fn unsaved(&self, error: Error) -> Error {
        let mend = match kind(&error) {
            _ if is_full(&error) => "make room",
            Some(io::ErrorKind::FileTooLarge) => "allow larger files (ulimit -f)",
            _ => "mend this",
        };
        let said = match self.checkpoint().exists() {
            true => format!(
                "saving failed, the checkpoint before it is unharmed; {mend} and go on with --resume --out {}",
                self.argument()
            ),
            false => format!("saving failed; {mend}, or choose another folder with --out"),
        };
        error.context(said)
    }

    /// Its path as an argument of a command that a shell is given.
    pub fn argument(&self) -> String {
        quoted(self.path.display())
    }

    /// The path of a file in it as such an argument.
    pub fn argument_of(&self, file: &str) -> String {
        quoted(self.path.join(file).display())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the checkpoint lies.
    pub fn checkpoint(&self) -> PathBuf {
        self.path.join(FILE_NAME)
    }

    /// Goes back to the state at this place of the run: the logs are without later epochs, which a run that is resumed
    /// from an earlier checkpoint writes again. Half-written files of killed processes are removed.
    pub(super) fn rewind(&self, progress: &Progress) -> Result<()> {
        self.rewind_logs(progress)?;
        remove_leftovers(&self.path);
        Ok(())
    }

    /// The names of a run's files that are there.
    pub fn files(&self) -> Vec<&'static str> {
        FILES.into_iter().filter(|name| self.path.join(name).exists()).collect()
    }

    /// Draws the training curves.
    pub(super) fn draw_curves(&self, progress: &Progress, told: Told<'_>) -> Result<()> {
        self.ensure_own()?;
        pictures::curves::draw(&progress.epochs, told, &self.path.join(CURVES))
    }

    /// Draws where the regions of a batch's images look, over what the model saw of them.
    pub(super) fn draw_routes(&self, batch: &Batch, trace: &Trace, transform: &Transform) -> Result<()> {
        self.ensure_own()?;
        let counted = batch.counted();
        let slots = (0..counted.len()).filter(|&slot| counted[slot]);
        let shown = slots.map(|slot| Ok((slot, transform.picture(batch.image(slot))?))).collect::<Result<Vec<_>>>()?;
        pictures::routes::draw(&shown, trace, &self.path.join(ROUTING))
    }
}

/// The content of a log or a configuration: empty where there is none, `None` where it cannot be read, or is longer
/// than anything that a run writes there. Errors: it is no regular file.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    const MAX: u64 = 256 << 20;
    ensure_regular(path)?;
    Ok(match fs::metadata(path) {
        Ok(metadata) if metadata.len() <= MAX => fs::read(path).ok(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(vec![]),
        _ => None,
    })
}

/// Whether a folder holds a run, which can be resumed. Errors: it is none, or lies in none; those of looking there.
pub fn holds_run(path: &Path) -> Result<bool> {
    ensure_no_file(path)?;
    path.join(FILE_NAME).try_exists().with_context(|| format!("run folder {}", path.display()))
}

/// Whether a folder holds a run that ended before its first step, for example because of an unreadable image: nothing
/// is lost if it is overwritten.
fn holds_untrained(path: &Path) -> bool {
    let untrained = |progress: Progress| progress == Progress::default();
    !path.join(BEST).exists()
        && read(&path.join(METRICS)).is_ok_and(|bytes| bytes.is_some_and(|bytes| bytes.is_empty()))
        && Checkpoint::read_progress(&path.join(FILE_NAME)).is_ok_and(untrained)
}

/// Refuses a path that is, or leads through, something else than a folder.
fn ensure_no_file(path: &Path) -> Result<()> {
    match path.ancestors().find(|there| there.exists() && !there.is_dir()) {
        None => Ok(()),
        Some(file) => {
            bail!("run folder {}: {} is no folder; choose another with --out", path.display(), file.display())
        }
    }
}

/// Refuses a folder that cannot be created, or that already holds a run, perhaps one in progress, or anything else that
/// a run would overwrite.
pub fn ensure_free(path: &Path) -> Result<()> {
    ensure_expanded(path)?;
    ensure_no_file(path)?;
    // The last ancestor of a relative path is empty, which stands for the working folder.
    let there = path.ancestors().find(|folder| folder.as_os_str().is_empty() || folder.exists()).unwrap_or(path);
    ensure_writable(&there.join(LOCK)).with_context(|| cannot_be_made(path))?;
    if holds_run(path)? && path.join(LOCK).exists() {
        // If that run is still in progress, this error says so: it could not be resumed.
        lock(path)?;
    }
    ensure_unused(path)
}

/// Refuses a folder that holds a run, or anything else that a run would write over.
fn ensure_unused(path: &Path) -> Result<()> {
    let shown = path.display();
    if holds_untrained(path) {
        return Ok(());
    }
    if holds_run(path)? {
        let free = free_beside(path).map_or_else(String::new, |free| format!(" {}", quoted(free.display())));
        bail!("run folder {shown}: holds a run already; go on with --resume, or choose another with --out{free}");
    }
    match FILES.iter().find(|name| path.join(name).exists()) {
        None => Ok(()),
        Some(name) => match whole_best(path) {
            Some(best) => {
                bail!("run folder {shown}: it has lost its {FILE_NAME}; {best}; or choose another with --out")
            }
            None => {
                bail!(
                    "run folder {shown}: there is a {name}, and no checkpoint; choose another with --out, or remove it"
                )
            }
        },
    }
}

/// A name for another run, that nothing has: `runs/nano-2`.
fn free_beside(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    (2..100).map(|number| path.with_file_name(format!("{name}-{number}"))).find(|free| !free.exists())
}

fn cannot_be_made(path: &Path) -> String {
    let shown = path.display();
    match path.ancestors().find(|folder| folder.is_symlink() && !folder.exists()) {
        Some(link) => {
            let link = link.display();
            format!("run folder {shown}: {link} is a link to what is missing; mend it, or choose another with --out")
        }
        None => format!("run folder {shown}: cannot be made; choose another with --out"),
    }
}

/// Locks a run folder.
fn lock(path: &Path) -> Result<Locked> {
    let shown = path.display();
    if let Some(name) = FILES.iter().chain([&LOCK]).find(|name| path.join(name).is_symlink()) {
        bail!(
            "run folder {shown}: {name} in it is a link, and what a run writes there would go elsewhere; put the file itself in \
             its place"
        );
    }
    Locked::new(path).with_context(|| format!("run folder {shown}"))?.with_context(|| {
        format!("run folder {shown}: a run is on its way in it; wait for its end, or choose another with --out")
    })
}

/// Whether there was no room on a disk, or none left of a user's share.
pub(super) fn is_full(error: &Error) -> bool {
    matches!(kind(error), Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}

/// Which error of the system is the cause, if one is.
pub(super) fn kind(error: &Error) -> Option<io::ErrorKind> {
    error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(model::Error::Io { cause, .. }) => Some(cause.kind()),
        _ => cause.downcast_ref::<io::Error>().map(io::Error::kind),
    })
}
