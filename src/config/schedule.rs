//! How the learning rate of a run changes.

use anyhow::{Result, bail};
use optim::Schedule;
use serde::{Deserialize, Serialize};

/// The learning rate over a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleConfig {
    /// Whether the rate changes with each step, or once per epoch as in the training of the published models.
    pub rule: ScheduleKind,
    /// The highest learning rate, above 0.
    pub peak: f64,
    /// The learning rate at the start of the warm-up, from 0 to `peak`; a default above `peak` is lowered to it.
    pub start: f64,
    /// The learning rate at the end, from 0 to `peak`; a default above `peak` is lowered to it.
    pub min: f64,
    /// Epochs of linear rise from `start` to `peak`, 0 to `epochs`; the default is shortened to an eighth of a short
    /// run. A whole number if the rule is `"timm"`, which reaches `peak` only approximately.
    pub warmup_epochs: f64,
}

/// See [`ScheduleConfig::rule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Linear warm-up, then cosine decay, changing with each step.
    Cosine,
    /// timm's cosine schedule, constant within an epoch, as in the training of the published models.
    Timm,
}

impl ScheduleConfig {
    /// The schedule of a run with this many epochs. Errors: those of [`optim::Schedule::check`].
    pub fn over(&self, epochs: usize, steps_per_epoch: usize) -> Result<Schedule> {
        let Self { rule, peak, start, min, warmup_epochs } = *self;
        let (epochs, steps_per_epoch) = (epochs as u64, steps_per_epoch as u64);
        let (unit, rule) = match rule {
            ScheduleKind::Cosine => (steps_per_epoch, optim::ScheduleRule::Cosine),
            ScheduleKind::Timm => (1, optim::ScheduleRule::Timm { steps_per_epoch }),
        };
        let warmup = (warmup_epochs * unit as f64).round() as u64;
        let schedule = Schedule { peak, start, min, warmup, total: epochs * unit, rule };
        schedule.check()?;
        Ok(schedule)
    }

    /// The longest warm-up that leaves a run of this many epochs most of its time: an eighth.
    pub fn shorter_warm_up(&self, epochs: usize) -> f64 {
        let eighth = epochs as f64 / 8.0;
        match self.rule {
            ScheduleKind::Cosine => eighth,
            ScheduleKind::Timm => eighth.floor(),
        }
    }

    /// Errors: a field that is invalid for a run of this many epochs.
    pub(super) fn check(&self, epochs: usize) -> Result<()> {
        let Self { rule, peak, start, min, warmup_epochs } = *self;
        // Weights are in f32.
        if !(f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX)).contains(&peak) {
            bail!("schedule.peak = {peak:?}, expected a learning rate above 0, also in f32, for instance 0.001");
        }
        for (name, rate) in [("start", start), ("min", min)] {
            if !(0.0..=peak).contains(&rate) {
                bail!(
                    "schedule.{name} = {rate:?}, expected from 0 to schedule.peak = {peak:?}: --set schedule.{name}=N"
                );
            }
        }
        if !(0.0..=epochs as f64).contains(&warmup_epochs) {
            bail!(
                "schedule.warmup_epochs = {warmup_epochs}, expected from 0 to epochs = {epochs}: --set \
                 schedule.warmup_epochs=N"
            );
        }
        if rule == ScheduleKind::Timm && warmup_epochs.fract() != 0.0 {
            bail!("schedule.warmup_epochs = {warmup_epochs}, expected whole epochs where schedule.rule = \"timm\"");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Changes, RunConfig};
    use toml::Table;

    #[test]
    fn a_schedule_has_the_rates_and_steps_that_are_asked_for() {
        let rule = ScheduleKind::Cosine;
        let asked = ScheduleConfig { rule, peak: 1e-2, start: 1e-4, min: 1e-3, warmup_epochs: 0.25 };
        let rule = optim::ScheduleRule::Cosine;
        let schedule = Schedule { peak: 1e-2, start: 1e-4, min: 1e-3, warmup: 3, total: 40, rule };
        assert_eq!(asked.over(4, 10).unwrap(), schedule);
    }

    #[test]
    fn the_default_warm_up_of_a_short_run_is_short() {
        let warm_up = |asked: &str| {
            let asked: Table = asked.parse().unwrap();
            RunConfig::changed(&Changes::gather(None, asked)?).map(|run| run.schedule.warmup_epochs)
        };
        let timm = "schedule.rule = 'timm'\nepochs";
        assert_eq!(warm_up("").unwrap(), 3.0);
        assert_eq!([12, 1, 300].map(|n| warm_up(&format!("epochs = {n}")).unwrap()), [1.5, 0.125, 3.0]);
        assert_eq!([12, 4, 300].map(|n| warm_up(&format!("{timm} = {n}")).unwrap()), [1.0, 0.0, 3.0]);
        assert_eq!(warm_up("epochs = 4\nschedule.warmup_epochs = 2").unwrap(), 2.0);
        assert!(warm_up("epochs = 4\nschedule.warmup_epochs = 5").is_err());
    }
}
