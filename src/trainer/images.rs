//! What a run learns from, and what it is tested on.

use super::data_facts::DataFacts;
use crate::config::RunConfig;
use crate::paths::{error_of, folders_of, resolved};
use crate::printing::tell;
use anyhow::{Context, Result, bail};
use data::{Dataset, Loader, LoaderConfig, Split, Transform};
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The smallest default batch: with fewer images, batch statistics and gradients would be too noisy.
const MIN_BATCH: usize = 4;

/// Images to learn from and images to be tested on, of the same classes.
pub struct Images {
    train: Arc<dyn Dataset>,
    test: Arc<dyn Dataset>,
    /// Which split the test images are, if both sets are splits of one data set.
    test_split: Option<Split>,
}

impl fmt::Debug for Images {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Images")
            .field("train", &(self.train.name(), self.train.len()))
            .field("test", &(self.test.name(), self.test.len()))
            .finish_non_exhaustive()
    }
}

impl Images {
    /// A pair of data sets. Errors: one is empty or has no name; their classes differ, in a name or in their order.
    pub fn new(train: Arc<dyn Dataset>, test: Arc<dyn Dataset>) -> Result<Self> {
        for (what, set) in [("training", &train), ("test", &test)] {
            if set.is_empty() {
                bail!("there are no {what} images in {}", set.name());
            }
            if set.name().is_empty() {
                bail!("the data set of the {what} images has no name");
            }
        }
        if train.classes() != test.classes() {
            bail!("training and test images have different classes");
        }
        Ok(Self { train, test, test_split: None })
    }

    /// Opens the images of `embedded` or of a data set's folder. In errors, `whose` is appended to the source's name.
    pub(super) fn open(source: &str, whose: &str) -> Result<Self> {
        let open = |split| data::open(source, split).map_err(|error| error_of("data", source, whose, error));
        let evaluated = Split::evaluated(source);
        let images = Self::new(open(Split::Train)?, open(evaluated)?).with_context(|| format!("data {source}"))?;
        Ok(Self { test_split: Some(evaluated), ..images })
    }

    /// Refuses a new run folder that lies among the data's class folders or images: the run's own pictures would be
    /// taken for images of the data.
    pub(super) fn ensure_apart(&self, config: &RunConfig) -> Result<()> {
        let first_in = |folder: &Path, path: &Path| Some(path.strip_prefix(folder).ok()?.iter().next()?.to_owned());
        let (data, out) = (Path::new(&config.data), &config.out);
        let Some(images_in) = self.train.path(0).and_then(|image| first_in(data, image)) else { return Ok(()) };
        let (root, place) = (resolved(data)?, resolved(out)?);
        let beside = Path::new("runs").join(out.file_name().unwrap_or_default());
        if place == root {
            bail!(
                "run folder {}: it is that of the data; choose another with --out, {} for example",
                out.display(),
                beside.display()
            );
        }
        let is_among = place.strip_prefix(&root).is_ok_and(|inside| {
            let first = inside.iter().next().unwrap_or_default();
            let is_split = [Split::Train, Split::Val, Split::Test].iter().any(|split| split.name() == first);
            let is_class = self.train.classes().iter().any(|class| **class == *first) || inside.iter().count() == 1;
            is_split || (is_class && images_in != Split::Train.name())
        });
        // Through a symbolic link, a class may be anywhere.
        let images = [&self.train, &self.test].into_iter().flat_map(|set| (0..set.len()).filter_map(|i| set.path(i)));
        let folders = folders_of(data, images);
        if is_among || place.ancestors().any(|folder| folders.contains(folder)) {
            bail!(
                "run folder {}: its pictures would be taken for some of the images of {}; choose another with --out, {} for \
                 example",
                out.display(),
                config.data,
                beside.display()
            );
        }
        Ok(())
    }

    /// The training images.
    pub(super) fn train(&self) -> &dyn Dataset {
        self.train.as_ref()
    }

    /// The test images.
    pub(super) fn test(&self) -> &dyn Dataset {
        self.test.as_ref()
    }

    /// Which split of a data set the test images are, if they are one.
    pub(super) fn test_split(&self) -> Option<Split> {
        self.test_split
    }

    /// Replaces a model's default number of classes with that of the data; any other number that differs is an error,
    /// and so is a single class.
    pub(super) fn settle_classes(&self, config: &mut RunConfig) -> Result<()> {
        let names = self.train.classes();
        let classes = names.len();
        if let [only] = names {
            bail!(
                "data {}: all training images are of one class, {only}: it takes two classes to tell apart",
                config.data
            );
        }
        let (asked, default) =
            (config.architecture.num_classes, RunConfig::for_model(&config.model)?.architecture.num_classes);
        if asked != classes && asked != default {
            bail!(
                "architecture.num_classes = {asked}, but data {} has {classes} classes; leave it out, or take --set \
                 num_classes={classes}",
                config.data
            );
        }
        config.architecture.num_classes = classes;
        Ok(())
    }

    /// Reduces a default batch size if there are few images, so that an epoch has enough steps to learn something, and
    /// prints a note.
    pub(super) fn settle_batch(&self, config: &mut RunConfig) {
        let (images, parts) = (self.train.len(), config.micro_batches);
        let quarter = (images / 4).max(MIN_BATCH).min(images) / parts * parts;
        // Images that are mixed need others beside them.
        let least = if config.augmentation.mixes() { 2 * parts } else { 1 };
        if (least..config.batch_size).contains(&quarter) {
            tell!(
                io::stderr(),
                "note: batches of {quarter}, as there are {images} training images; --batch-size takes another number"
            );
            config.batch_size = quarter;
        }
    }

    /// The loaders of the training and the test batches.
    pub(super) fn loaders(self, config: &RunConfig, facts: &DataFacts) -> Result<(Loader, Loader)> {
        let Self { train, test, .. } = self;
        let (size, statistics) = (config.image_size, facts.statistics);
        let varied = Transform::train(size, statistics, &config.augmentation)?;
        let mut training = LoaderConfig::train(config.batch_size, config.seed, varied);
        // Not more images at once than in training, or a test would take more memory.
        let at_once = config.at_once();
        let mut testing = LoaderConfig::eval(at_once, config.test_transform(statistics)?);
        training.parts = config.micro_batches;
        training.smoothing = config.label_smoothing;
        training.max_bad_images = config.max_bad_images;
        testing.max_bad_images = config.max_bad_images;
        let (images, asked, parts) = (train.len(), config.batch_size, config.micro_batches);
        if images < asked {
            // Only several images can be mixed.
            let least = if config.augmentation.mixes() { 2 * parts } else { parts };
            bail!(
                "batch_size = {asked}: data {} has {images} training images, too few for a full batch; use {}--batch-size {} or \
                 less",
                config.data,
                if images < least && parts > 1 { "micro_batches = 1 and " } else { "" },
                (if images < least { images } else { images / parts * parts }).max(1),
            );
        }
        let source = || format!("data {}", config.data);
        Ok((Loader::new(train, training).with_context(source)?, Loader::new(test, testing).with_context(source)?))
    }
}
