//! Resuming a run from the checkpoint in its folder.

use super::checkpoint::Checkpoint;
use super::data_facts::{OF_AN_OWN_RUN, OF_THE_RUN};
use super::display::announce;
use super::failure::failed_gpu;
use super::folder::RunFolder;
use super::images::Images;
use super::learner::Learner;
use super::trained::Described;
use super::{Trainer, ensure_room};
use crate::config::{Changes, RunConfig};
use crate::paths::{quoted, rooted};
use crate::printing::tell;
use crate::threads::pool;
use anyhow::{Result, anyhow, bail};
use rayon::ThreadPool;
use std::io;
use std::path::Path;
use std::sync::Arc;
use tensor::trim_pool;

impl Trainer {
    /// Resumes the run in a folder from its checkpoint, with its own configuration except for the requested changes:
    /// see [`RunConfig::resumed`]. Errors: there is no run, or its checkpoint is damaged; a change that it does not
    /// allow; data that are not those that it began with.
    pub fn resume(folder: &Path, changes: &Changes) -> Result<Self> {
        Self::resume_in_pool(folder, changes, None)
    }

    /// As [`resume`](Self::resume), on images of one's own, which must be those that the run began [`on`](Self::on):
    /// their classes, number, labels and names are compared, and not their pixels. Errors: those of
    /// [`resume`](Self::resume).
    pub fn resume_on(images: Images, folder: &Path, changes: &Changes) -> Result<Self> {
        Self::resume_in_pool(folder, changes, Some(images))
    }

    fn resume_in_pool(folder: &Path, changes: &Changes, images: Option<Images>) -> Result<Self> {
        let folder = RunFolder::open(folder)?;
        let mut checkpoint = Checkpoint::read(&folder.checkpoint()).map_err(|error| folder.or_best(error))?;
        // Its tensors are read again when all else is known to be right, so that a run needs no more memory to go on
        // than it did to begin.
        checkpoint.described.file.tensors.clear();
        trim_pool();
        let mut config = checkpoint.described.config.resumed(changes)?;
        // The folder may have been moved since the run began.
        folder.path().clone_into(&mut config.out);
        if config.data != checkpoint.described.config.data {
            config.data = rooted(&config.data)?;
        }
        let pool = Arc::new(pool(config.threads)?);
        Arc::clone(&pool).install(|| Self::resume_here(pool, folder, &checkpoint, config, images))
    }

    fn resume_here(
        pool: Arc<ThreadPool>,
        folder: RunFolder,
        checkpoint: &Checkpoint,
        config: RunConfig,
        images: Option<Images>,
    ) -> Result<Self> {
        let Described { config: then, data: facts, .. } = &checkpoint.described;
        let (facts, progress) = (facts.clone(), checkpoint.progress.clone());
        let (asked, done) = (config.epochs, progress.epoch());
        if asked < done || (asked == done && progress.batch > 0) {
            bail!("epochs = {asked}: this run has come further, with {done} done; ask for more, or start another run");
        }
        if done < asked {
            announce(&config);
        }
        let whose = match facts.test_split {
            _ if config.data != then.data => "",
            Some(_) => OF_THE_RUN,
            None => OF_AN_OWN_RUN,
        };
        let images = images.map_or_else(|| Images::open(&config.data, whose), Ok)?;
        facts.ensure_same(&config.data, &images)?;
        let (train, test) = images.loaders(&config, &facts)?;
        let path = checkpoint.path();
        let (batch, steps) = (progress.batch, train.batches_per_epoch());
        if batch > steps {
            let said = format!("it is in batch {batch} of {steps}; take another copy of it");
            return Err(folder.or_best(anyhow!("{}: {said}", path.display())));
        }
        let (batches, taken) = (done.saturating_mul(steps).saturating_add(batch), progress.optimizer_steps);
        let averaged = if config.ema.enabled { progress.average_updates } else { taken };
        if [taken, averaged] != [batches as u64; 2] {
            let said =
                format!("it has taken {taken} steps in {batches} batches, of which {averaged} moved the average");
            return Err(folder.or_best(anyhow!("{}: {said}; take another copy of it", path.display())));
        }
        let recompute = config.recompute.advice("--recompute block, or ");
        ensure_room(&config, &train, &test, &format!("{recompute}a machine with more"))?;
        // So that the checkpoint is not blamed for a device.
        config.compute().open()?;
        let again = Checkpoint::read(path).map_err(|error| folder.or_best(error))?;
        if again.progress != progress || again.described.config != *then {
            bail!("{}: another program has replaced it; try again", path.display());
        }
        let learner = Learner::resume(again, &config)
            .map_err(|error| if failed_gpu(&error) { error } else { folder.or_best(error) })?;
        folder.ensure_no_later_best(done)?;
        folder.note_edits(then)?;
        folder.rewind(&progress)?;
        let trainer = Self { pool, folder, learner, progress, facts, train, test };
        if trainer.learner.config() != then {
            // The changes hold from now on, even if the run ends before its first step.
            trainer.save()?;
        }
        trainer.folder.write_config(trainer.learner.config())?;
        let by = trainer.config().best_by;
        if trainer.progress.batch == 0 {
            trainer.folder.keep_best_of_before(&trainer.progress, by)?;
        }
        trainer.folder.note_lost(&trainer.progress, by);
        trainer.note_resumed(checkpoint)?;
        Ok(trainer)
    }

    /// Prints notes about how the rest of a run will differ from what a checkpoint has of it.
    fn note_resumed(&self, checkpoint: &Checkpoint) -> Result<()> {
        let (then, now) = (&checkpoint.described.config, self.learner.config());
        if self.finished() {
            return Ok(());
        }
        let by = |computed_by: &str, config: &RunConfig| format!("{computed_by}, in {},", config.precision);
        if let Some(before) = checkpoint.computed_by() {
            let [before, now] = [by(before, then), by(&self.learner.computed_by(), now)];
            if before != now {
                tell!(
                    io::stderr(),
                    "note: {before} has computed this run, and {now} goes on: its results may not be bit-identical to those of either alone"
                );
            }
        }
        let (steps, epoch, batch) = (self.train.batches_per_epoch(), self.progress.epoch(), self.progress.batch);
        if (epoch, batch) == (then.epochs, 0) {
            let step = (epoch * steps) as u64;
            let [last, next] = [then.schedule(steps)?.lr(step.saturating_sub(1)), now.schedule(steps)?.lr(step)];
            if next > 2.0 * last {
                let [weights, data] = [self.folder.argument(), quoted(&now.data)];
                let anew = format!(
                    "; for a few epochs at a low one: --weights {weights} --data {data} --lr {last:.1e} --out NEW"
                );
                tell!(
                    io::stderr(),
                    "note: as in a run of {} epochs, the learning rate goes on at {next:.1e}, from {last:.1e}{}",
                    now.epochs,
                    if last > 0.0 { &anew } else { "" }
                );
            }
        }
        Ok(())
    }
}
