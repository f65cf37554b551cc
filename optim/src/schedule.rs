//! The learning rate as a function of the step, and of nothing else: there is no state to save, and a
//! resumed run reads the same numbers.

use crate::error::{Result, ensure};
use std::f64::consts::PI;

/// How the learning rate changes over a run: a linear warm-up, then half a cosine; all rates are absolute.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// The rate that the warm-up rises to, the highest.
    pub peak: f64,
    /// The rate at 0, where there is warm-up.
    pub start: f64,
    /// The rate from the end on.
    pub min: f64,
    /// The length of the warm-up, in the rule's unit; 0 for none.
    pub warmup: u64,
    /// That of the whole run, warm-up included.
    pub total: u64,
    /// What the rate is a function of.
    pub rule: ScheduleRule,
}

/// The formula of a [`Schedule`], and its unit of time. With w = `warmup` and n = `total`,
///
/// ```text
/// t < w:      start + (peak − start)·t/w
/// w ≤ t < n:  min + ½·(peak − min)·(1 + cos(π·c))
/// t ≥ n:      min
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleRule {
    /// One rate per step: t, w and n are in steps, and c = (t − w)/(n − w). This is continuous and reaches `peak` at
    /// step w exactly. Source: Loshchilov and Hutter, "SGDR", ICLR 2017, without restarts.
    Cosine,
    /// The published models' rule, which is that of timm's cosine scheduler as its trainer called it: one rate per
    /// epoch; t, w and n are in epochs. The trainer advanced the scheduler *after* an epoch, with that epoch's number,
    /// so epochs 0 and 1 both run at t = 0, and epoch e at t = max(e − 1, 0). c = t/n: the cosine counts from epoch 0
    /// and not from the end of the warm-up (timm's `warmup_prefix` is off), so `peak` is never quite reached.
    Timm {
        /// Optimiser steps in an epoch.
        steps_per_epoch: u64,
    },
}

impl Schedule {
    /// The learning rate of step `step`, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        let Self { peak, start, min, warmup, total, rule } = *self;
        let t = match rule {
            ScheduleRule::Cosine => step,
            ScheduleRule::Timm { steps_per_epoch } => (step / steps_per_epoch.max(1)).saturating_sub(1),
        };
        if t < warmup {
            return start + (peak - start) * (t as f64 / warmup as f64);
        }
        match rule {
            ScheduleRule::Cosine => half_cosine(peak, min, t - warmup, total.saturating_sub(warmup)),
            ScheduleRule::Timm { .. } => half_cosine(peak, min, t, total),
        }
    }

    /// [`Error::Setting`](crate::Error::Setting) for rates that are negative, not finite or above `peak`,
    /// for a run or an epoch of no steps, and for a warm-up longer than the run.
    pub fn check(&self) -> Result<()> {
        let Self { peak, start, min, warmup, total, rule } = *self;
        ensure("peak", peak, "finite and at least 0", peak >= 0.0 && peak.is_finite())?;
        ensure("start", start, "between 0 and peak", (0.0..=peak).contains(&start))?;
        ensure("min", min, "between 0 and peak", (0.0..=peak).contains(&min))?;
        ensure("total", total as f64, "at least 1", total > 0)?;
        ensure("warmup", warmup as f64, "at most total", warmup <= total)?;
        match rule {
            ScheduleRule::Cosine => Ok(()),
            ScheduleRule::Timm { steps_per_epoch: steps } => {
                ensure("steps_per_epoch", steps as f64, "at least 1", steps > 0)
            }
        }
    }
}

/// From `peak` at 0 down to `min` at `end`, and `min` ever after.
fn half_cosine(peak: f64, min: f64, at: u64, end: u64) -> f64 {
    if at >= end {
        return min;
    }
    // As a weighted mean, which is the peak itself at 0; min + (peak − min)·weight may round.
    let weight = 0.5 * (1.0 + libm::cos(PI * (at as f64 / end as f64)));
    weight * peak + (1.0 - weight) * min
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use approx::assert_relative_eq;
    use proptest::prelude::*;

    /// The published ImageNet recipe at a batch of 1024.
    fn published(steps_per_epoch: u64) -> Schedule {
        let rule = ScheduleRule::Timm { steps_per_epoch };
        Schedule { peak: 1e-3, start: 1e-6, min: 1e-5, warmup: 5, total: 300, rule }
    }

    /// The rates that the published trainer was observed to use.
    #[test]
    fn the_published_sequence() {
        let observed = [
            (0, 1e-6, 1e-9),
            (1, 1e-6, 1e-9),
            (2, 2.008e-4, 1e-9),
            (3, 4.006e-4, 1e-9),
            (4, 6.004e-4, 1e-9),
            (5, 8.002e-4, 1e-9),
            (6, 9.9932e-4, 1e-5),
            (50, 9.36251e-4, 1e-5),
            (100, 7.56976e-4, 1e-5),
            (150, 5.10184e-4, 1e-5),
            (200, 2.62003e-4, 1e-5),
            (250, 7.89327e-5, 1e-5),
            (299, 1.01086e-5, 1e-5),
        ];
        const STEPS: u64 = 1251;
        let schedule = published(STEPS);
        schedule.check().unwrap();
        for (epoch, lr, tolerance) in observed {
            for step in [epoch * STEPS, epoch * STEPS + STEPS - 1] {
                assert_relative_eq!(schedule.lr(step), lr, max_relative = tolerance);
            }
        }
        assert_eq!(schedule.lr(301 * STEPS), 1e-5);
        let single = published(1);
        single.check().unwrap();
        assert!((0..302).all(|epoch| single.lr(epoch) == schedule.lr(epoch * STEPS)), "of epochs of one step");
    }

    #[test]
    fn a_cosine_by_hand() {
        let rule = ScheduleRule::Cosine;
        let schedule = Schedule { peak: 1.0, start: 0.2, min: 0.1, warmup: 4, total: 12, rule };
        let expected = [(0, 0.2), (1, 0.4), (3, 0.8), (4, 1.0), (8, 0.55), (12, 0.1), (1_000, 0.1)];
        for (step, lr) in expected {
            assert_relative_eq!(schedule.lr(step), lr, max_relative = 1e-14);
        }
        let all_warmup = Schedule { warmup: 2, total: 2, ..schedule };
        all_warmup.check().unwrap();
        assert_eq!([0, 2, 3].map(|step| all_warmup.lr(step)), [0.2, 0.1, 0.1]);
        assert_relative_eq!(all_warmup.lr(1), 0.6, max_relative = 1e-14);
    }

    /// Some valid schedule with this rule.
    fn schedules(rule: ScheduleRule) -> impl Strategy<Value = Schedule> {
        (1e-6..1.0f64, 0.0..=1.0f64, 0.0..=1.0f64, 1..2000u64, 0.0..=1.0f64).prop_map(
            move |(peak, low, end, total, part)| {
                let (start, min, warmup) = (peak * low, peak * end, (total as f64 * part) as u64);
                Schedule { peak, start, min, warmup, total, rule }
            },
        )
    }

    proptest! {
        #[test]
        fn rises_to_the_peak_then_falls_to_the_minimum(schedule in schedules(ScheduleRule::Cosine)) {
            let Schedule { peak, start, min, warmup, total, .. } = schedule;
            prop_assert!(schedule.check().is_ok());
            for step in 0..total {
                let (now, next) = (schedule.lr(step), schedule.lr(step + 1));
                let rounding = 1e-12 * peak;
                if step < warmup && warmup < total {
                    prop_assert!(now <= next + rounding);
                } else if step >= warmup {
                    prop_assert!(next <= now + rounding);
                }
                prop_assert!((start.min(min) - rounding..=peak + rounding).contains(&now));
            }
            prop_assert_eq!(schedule.lr(total), min);
            prop_assert_eq!(schedule.lr(u64::MAX), min);
            if warmup > 0 {
                prop_assert_eq!(schedule.lr(0), start);
            }
            if warmup < total {
                // No jump: the last step of the warm-up is one of its increments below the peak.
                prop_assert_eq!(schedule.lr(warmup), peak);
                if warmup > 0 {
                    let increment = (peak - start) / warmup as f64;
                    prop_assert!((peak - schedule.lr(warmup - 1) - increment).abs() <= 1e-12 * peak);
                }
            }
        }

        #[test]
        fn timm_is_constant_within_an_epoch_and_repeats_the_first(
            schedule in schedules(ScheduleRule::Timm { steps_per_epoch: 3 })
        ) {
            let Schedule { peak, start, min, warmup, total, .. } = schedule;
            prop_assert!(schedule.check().is_ok());
            for epoch in 0..total + 3 {
                let lr = schedule.lr(3 * epoch);
                prop_assert_eq!(lr, schedule.lr(3 * epoch + 2));
                prop_assert!((start.min(min) * (1.0 - 1e-12)..=peak * (1.0 + 1e-12)).contains(&lr));
            }
            prop_assert_eq!(schedule.lr(0), if warmup > 0 { start } else { peak });
            prop_assert_eq!(schedule.lr(0), schedule.lr(5));
            prop_assert_eq!(schedule.lr(3 * (total + 1)), min);
        }
    }

    #[test]
    fn a_rate_of_zero_makes_sense() {
        let still = Schedule { peak: 0.0, start: 0.0, min: 0.0, ..published(1) };
        still.check().unwrap();
        assert_eq!(still.lr(7), 0.0);
    }

    #[test]
    fn senseless_settings_are_refused_and_never_panic() {
        let rule = ScheduleRule::Cosine;
        let cosine = |peak, start, min, warmup, total| Schedule { peak, start, min, warmup, total, rule };
        let wrong = [
            (cosine(-1.0, 0.0, 0.0, 1, 2), "peak"),
            (cosine(f64::NAN, 0.0, 0.0, 1, 2), "peak"),
            (cosine(f64::INFINITY, 0.0, 0.0, 1, 2), "peak"),
            (cosine(1.0, 2.0, 0.0, 1, 2), "start"),
            (cosine(1.0, 0.0, f64::INFINITY, 1, 2), "min"),
            (cosine(1.0, 0.0, 0.0, 0, 0), "total"),
            (cosine(1.0, 0.0, 0.0, 3, 2), "warmup"),
            (published(0), "steps_per_epoch"),
        ];
        for (schedule, name) in wrong {
            assert!(matches!(schedule.check(), Err(Error::Setting { what, .. }) if what == name));
            for step in [0, 1, 2, 3, u64::MAX] {
                schedule.lr(step);
            }
        }
    }
}
