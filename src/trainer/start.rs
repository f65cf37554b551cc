//! A new run.

use super::checkpoint::Progress;
use super::data_facts::DataFacts;
use super::display::announce;
use super::folder::{RunFolder, ensure_free};
use super::learner::Learner;
use super::stored::Stored;
use super::trained::{name_or_default, note_unsaid};
use super::{Images, Trainer, ensure_room};
use crate::config::{Changes, RunConfig};
use crate::paths::{absolute, rooted};
use crate::threads::pool;
use anyhow::Result;
use data::Statistics;
use rayon::ThreadPool;
use std::sync::Arc;

impl Trainer {
    /// A new run: makes its folder, which must not hold a run already. From then on there is always a checkpoint in it,
    /// so that it can be resumed whenever it ends. Weights that it starts from must be of the configuration's model:
    /// see [`Trainer::from_changes`]. Errors: an invalid configuration; data that cannot be opened or do not fit it; a
    /// folder that holds something else; too little memory.
    pub fn new(config: RunConfig) -> Result<Self> {
        let weights = Stored::to_start_from(&config.weights)?;
        Self::start_in_pool(config, weights, None, false)
    }

    /// A new run on the caller's own images, recorded under the name of the training data set. They cannot be opened
    /// again by that name: such a run is resumed with [`resume_on`](Self::resume_on), and `biformer eval` needs
    /// `--data`. Weights that it starts from must be of the configuration's model, as in [`new`](Self::new). Errors:
    /// those of `new`, except that these images are open.
    ///
    /// ```no_run
    /// use biformer::config::RunConfig;
    /// use biformer::data::{self, InMemory, Statistics};
    /// use biformer::trainer::{Images, Trainer};
    /// use std::sync::{Arc, atomic::AtomicBool};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// let half_grey = Statistics { mean: [0.5; 3], std: [0.25; 3] };
    /// let images = |count: usize| {
    ///     let (classes, labels) = (vec!["dark".into(), "light".into()], (0..count as u32).map(|i| i % 2).collect());
    ///     let pixels = (0..count).flat_map(|i| [[50, 200][i % 2]; 32 * 32 * 3]).collect(); // (N, 32, 32, 3)
    ///     data::Result::Ok(Arc::new(InMemory::new("greys", classes, half_grey, 32, pixels, labels)?))
    /// };
    /// let config = RunConfig::for_model("nano")?;
    /// let mut trainer = Trainer::on(Images::new(images(1000)?, images(100)?)?, config)?;
    /// trainer.run(&AtomicBool::new(false))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn on(images: Images, mut config: RunConfig) -> Result<Self> {
        config.data = images.train().name().to_owned();
        let weights = Stored::to_start_from(&config.weights)?;
        Self::start_in_pool(config, weights, Some(images), false)
    }

    /// A new run as requested: see [`RunConfig::changed`] and, for a run that starts from weights with a description of
    /// their own run, [`RunConfig::tuning`]. Errors: those of both, and of [`new`](Self::new).
    pub fn from_changes(changes: &Changes) -> Result<Self> {
        let weights = Stored::to_start_from(changes.weights()?)?;
        let config = match &weights {
            None => RunConfig::changed(changes)?,
            Some(Stored::Described(theirs, _)) => theirs.config.tuning(changes)?,
            Some(Stored::Alone(file)) => RunConfig::changed_for(name_or_default(file)?, changes)?,
        };
        Self::start_in_pool(config, weights, None, !changes.has("batch_size"))
    }

    /// Opens the data set if `images` is none. `any_batch`: the batch size is only a default and may be lowered to fit
    /// the data.
    fn start_in_pool(
        config: RunConfig,
        weights: Option<Stored>,
        images: Option<Images>,
        any_batch: bool,
    ) -> Result<Self> {
        config.check()?;
        let pool = Arc::new(pool(config.threads)?);
        Arc::clone(&pool).install(|| Self::start(pool, config, weights, images, any_batch))
    }

    fn start(
        pool: Arc<ThreadPool>,
        mut config: RunConfig,
        weights: Option<Stored>,
        images: Option<Images>,
        any_batch: bool,
    ) -> Result<Self> {
        ensure_free(&config.out)?;
        config.weights = absolute("weights", &config.weights)?;
        announce(&config);
        let images = match images {
            Some(images) => images,
            None => {
                config.data = rooted(&config.data)?;
                Images::open(&config.data, "")?
            }
        };
        images.ensure_apart(&config)?;
        images.settle_classes(&mut config)?;
        if any_batch {
            images.settle_batch(&mut config);
            config.check()?;
        }
        config.ensure_mixable()?;
        let mut facts = DataFacts::of(&images);
        facts.statistics = config.statistics(match &weights {
            None => facts.statistics,
            Some(Stored::Described(theirs, _)) => theirs.data.statistics,
            Some(Stored::Alone(_)) => {
                note_unsaid(&config, facts.statistics == Statistics::IMAGENET);
                Statistics::IMAGENET
            }
        })?;
        let (train, test) = images.loaders(&config, &facts)?;
        let block = config.recompute.advice(", or recompute = \"block\"");
        ensure_room(&config, &train, &test, &format!("a smaller batch_size, or more micro_batches{block}"))?;
        let learner = match weights {
            None => Learner::new(&config)?,
            Some(weights) => Learner::from_weights(&config, weights, &facts.classes)?,
        };
        let folder = RunFolder::create(&config)?;
        let trainer = Self { pool, folder, learner, progress: Progress::default(), facts, train, test };
        // The checkpoint comes first: a folder with a checkpoint can be resumed, whereas one with only other files
        // would block a new run.
        trainer.save()?;
        trainer.folder.write_config(trainer.learner.config())?;
        Ok(trainer)
    }
}
