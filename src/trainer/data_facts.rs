//! What is known of the data that a model was trained on.

use super::images::Images;
use anyhow::{Result, bail};
use data::{Dataset, Split, Statistics, fingerprint};
use serde::{Deserialize, Serialize};

/// What errors add to the name of a data source that comes from the run and not from the command line.
pub const OF_THE_RUN: &str = " (as the run had it; --data says where it is now)";
/// The same where they may not have been a folder.
pub const OF_AN_OWN_RUN: &str = " (as the run had it; --data says where it is now, or a program that has the images goes on with Trainer::resume_on)";

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
    /// What earlier versions wrote, whose runs could go on with other test images.
    #[serde(default, skip_serializing)]
    comparable_after: usize,
}

/// What images are called that training is [tested on](DataFacts::tested_on), in a word that fits a line.
pub fn in_short(tested_on: &str) -> &str {
    if tested_on == "validation" { "val" } else { tested_on }
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

    /// Refuses to go on with other images than a run began with, by their classes, number, labels and names: it would
    /// learn from others, or its accuracies would not compare with each other. What is not known of the run's may be
    /// anything.
    pub(super) fn ensure_same(&self, source: &str, images: &Images) -> Result<()> {
        fn changed<T: PartialEq + Copy>(before: Option<T>, now: Option<T>) -> Option<[T; 2]> {
            before.zip(now).filter(|(before, now)| before != now).map(<[T; 2]>::from)
        }
        self.ensure_classes(source, images.train().classes())?;
        let now = Self::of(images);
        if now.held_out && !self.held_out {
            bail!("data {source}: it has neither val/ nor test/; bring back what the run was tested on");
        }
        let tested_on = self.tested_on();
        let others = if let Some([before, now]) = changed(Some(self.train_images), Some(now.train_images)) {
            format!("{now} training images, the run began with {before}")
        } else if changed(self.train_fingerprint.as_ref(), now.train_fingerprint.as_ref()).is_some() {
            "other training images, by their names or classes".to_owned()
        } else if let Some([before, now]) = changed(self.test_split, now.test_split) {
            format!(
                "it would be tested on the images in {}/, the run began with those in {}/",
                now.name(),
                before.name()
            )
        } else if let Some([before, now]) = changed(self.test_images, now.test_images) {
            format!("{now} {tested_on} images, the run began with {before}")
        } else if changed(self.test_fingerprint.as_ref(), now.test_fingerprint.as_ref()).is_some() {
            format!("other {tested_on} images, by their names or classes")
        } else {
            return Ok(());
        };
        bail!(
            "data {source}: {others}; go on with those that the run began with (--data), or anew from what it has learned \
             (--weights RUN --data DATA --out NEW)"
        );
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
             what it has learned (--weights RUN --data DATA --out NEW)"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_earlier_versions_wrote_is_read_and_not_written() -> Result<()> {
        let facts = DataFacts::unknown(vec!["dark".into(), "light".into()], Statistics::IMAGENET);
        let mut written = serde_json::to_value(&facts)?;
        assert!(written.as_object().is_some_and(|fields| !fields.contains_key("comparable_after")));
        written["comparable_after"] = 0.into();
        assert_eq!(serde_json::from_value::<DataFacts>(written)?, facts);
        Ok(())
    }
}
