//! What is known of the data that a model was trained on.

use super::images::Images;
use crate::printing::tell;
use anyhow::{Result, bail};
use data::{Dataset, Split, Statistics, fingerprint};
use serde::{Deserialize, Serialize};
use std::io;

/// What errors add to the name of a data source that comes from the run and not from the command line.
pub const OF_THE_RUN: &str = " (as the run had it; --data says where it is now)";

/// What a run must remember of its data: so that its model can be used where the data are not available, and so that
/// changes in the data are noticed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFacts {
    /// The classes' names.
    pub classes: Vec<String>,
    /// What images are normalised by.
    pub statistics: Statistics,
    /// The number of training images.
    pub train_images: usize,
    /// The number of images that training is tested on.
    pub test_images: Option<usize>,
    /// The training images' [`fingerprint`].
    pub train_fingerprint: Option<String>,
    /// The test images' fingerprint.
    pub test_fingerprint: Option<String>,
    /// Which split of the data set the test images were.
    pub test_split: Option<Split>,
    /// Whether the test images were held out of the training images, because the data have no test split.
    pub held_out: bool,
    /// The last epoch that was tested on other images: accuracies up to it do not compare with later ones. 0 if there is
    /// none.
    pub comparable_after: usize,
}

impl DataFacts {
    /// Those of a run's images.
    pub fn of(images: &Images) -> Self {
        let (train, test) = (images.train(), images.test());
        let [train_fingerprint, test_fingerprint] = [train, test].map(|dataset| Some(fingerprint(dataset)));
        Self {
            train_images: train.len(),
            test_images: Some(test.len()),
            train_fingerprint,
            test_fingerprint,
            test_split: images.test_split(),
            held_out: test.is_held_out(),
            ..Self::unknown(train.classes().to_vec(), train.statistics())
        }
    }

    /// Those of weights of which only the classes are known, and how images were normalised.
    pub fn unknown(classes: Vec<String>, statistics: Statistics) -> Self {
        Self {
            classes,
            statistics,
            train_images: 0,
            test_images: None,
            train_fingerprint: None,
            test_fingerprint: None,
            test_split: None,
            held_out: false,
            comparable_after: 0,
        }
    }

    /// What the images are called that training is tested on.
    pub fn tested_on(&self) -> &'static str {
        if self.test_split == Some(Split::Val) { "validation" } else { "test" }
    }

    /// Lets a run continue on these images after so many epochs. The training images must be the same as before, by their
    /// classes, number, labels and names. If the test images are others, prints a note; from now on they are the run's.
    pub fn take_up(&mut self, source: &str, images: &Images, epochs: usize) -> Result<()> {
        self.ensure_classes(source, images.train().classes())?;
        let (count, before) = (images.train().len(), self.train_images);
        if count != before && images.test().is_held_out() && !self.held_out {
            bail!("data {source}: it has neither val/ nor test/; bring back what the run was tested on");
        }
        let [trained_on, tested_on] = [images.train(), images.test()].map(fingerprint);
        let others = match self.train_fingerprint.replace(trained_on.clone()) {
            _ if count != before => Some(format!("{count} training images, the run began with {before}")),
            Some(known) if known != trained_on => Some("other training images, by their names or classes".to_owned()),
            _ => None,
        };
        if let Some(others) = others {
            bail!(
                "data {source}: {others}; go on with those that the run began with (--data), or anew from what it has learned \
                 (--weights RUN --out NEW)"
            );
        }
        self.held_out = images.test().is_held_out();
        let now = images.test().len();
        let were = self.test_images.replace(now).unwrap_or(now);
        let known = self.test_fingerprint.replace(tested_on.clone());
        let part = self.test_split.and_then(|before| Some((before, images.test_split()?)));
        self.test_split = images.test_split();
        let others = if part.is_some_and(|(before, now)| before != now) {
            Some("the test images are those of another folder".to_owned())
        } else if were != now {
            Some(format!("there are {now} test images, and were {were}"))
        } else if known.is_some_and(|known| known != tested_on) {
            Some("the test images are others".to_owned())
        } else {
            None
        };
        if let Some(others) = others {
            self.comparable_after = epochs;
            tell!(io::stderr(), "note: {others}: accuracies do not compare with those before");
        }
        Ok(())
    }

    /// A note for the user if these images, a split of the run's own data, are not those that the run used.
    pub fn differ(&self, source: &str, split: Split, images: &dyn Dataset) -> Option<String> {
        let evaluated = if self.held_out { Split::Test } else { Split::evaluated(source) };
        let (known, how) = match split {
            Split::Train => (&self.train_fingerprint, "trained"),
            split if split == evaluated => (&self.test_fingerprint, "tested"),
            _ => return None,
        };
        // Another split may have the same file names.
        let of_another_part = split == evaluated && self.test_split.is_some_and(|part| part != split);
        let others = of_another_part || known.as_ref().is_some_and(|known| *known != fingerprint(images));
        others.then(|| {
            format!("these are not the images that the run was {how} on, by their folder, number, names or classes")
        })
    }

    /// Checks that other data have the same classes.
    fn ensure_classes(&self, source: &str, theirs: &[String]) -> Result<()> {
        let ours = &self.classes;
        let what = match theirs.iter().zip(ours).find(|(theirs, ours)| theirs != ours) {
            _ if theirs.len() != ours.len() => format!("{} of them, not {}", theirs.len(), ours.len()),
            Some((theirs, ours)) => format!("\"{theirs}\" where \"{ours}\" should be"),
            None => return Ok(()),
        };
        bail!(
            "data {source}: other classes than the model was trained on ({what}); name data with those classes, or begin anew from \
             what it has learned (--weights RUN --out NEW)"
        );
    }
}
