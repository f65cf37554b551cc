//! The learning rate as a function of the step, and of nothing else: there is no state to save, and a
//! resumed run reads the same numbers.

use crate::error::{Result, ensure};
use std::f64::consts::PI;

/// How the learning rate changes over a run; all rates are absolute.
#[derive(Clone, Debug, PartialEq)]
pub enum Schedule {
    /// Linear warm-up, then half a cosine, both per step. With w = `warmup_steps` and n = `total_steps`,
    ///
    /// ```text
    /// s < w:      start + (peak − start)·s/w
    /// w ≤ s < n:  min + ½·(peak − min)·(1 + cos(π·(s − w)/(n − w)))
    /// s ≥ n:      min
    /// ```
    ///
    /// which is continuous and reaches `peak` at step w exactly. Source: Loshchilov and Hutter, "SGDR",
    /// ICLR 2017, without restarts.
    Cosine {
        /// The highest rate.
        peak: f64,
        /// The rate of step 0, where there is warm-up.
        start: f64,
        /// The rate from the end on.
        min: f64,
        /// Steps of warm-up; 0 for none.
        warmup_steps: u64,
        /// Steps of the whole run, warm-up included.
        total_steps: u64,
    },
    /// The published models' rule, which is that of timm's cosine scheduler as its trainer called it: one
    /// rate per epoch e. The trainer advanced the scheduler *after* an epoch, with that epoch's number,
    /// so epochs 0 and 1 both run at t = 0. With t = max(e − 1, 0), w = `warmup_epochs`, n = `epochs`,
    ///
    /// ```text
    /// t < w:      start + (peak − start)·t/w
    /// w ≤ t < n:  min + ½·(peak − min)·(1 + cos(π·t/n))
    /// t ≥ n:      min
    /// ```
    ///
    /// The cosine counts from epoch 0 and not from the end of the warm-up (timm's `warmup_prefix` is
    /// off), so `peak` is never quite reached.
    Timm {
        /// The rate that the warm-up aims at.
        peak: f64,
        /// The rate of epochs 0 and 1, where there is warm-up.
        start: f64,
        /// The lowest rate of the cosine.
        min: f64,
        /// Epochs of warm-up; 0 for none.
        warmup_epochs: u64,
        /// Epochs of the whole run, warm-up included.
        epochs: u64,
        /// Optimiser steps in an epoch.
        steps_per_epoch: u64,
    },
}

impl Schedule {
    /// The learning rate of step `step`, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        match *self {
            Schedule::Cosine { peak, start, min, warmup_steps, total_steps } => {
                if step < warmup_steps {
                    return start + (peak - start) * (step as f64 / warmup_steps as f64);
                }
                half_cosine(peak, min, step - warmup_steps, total_steps.saturating_sub(warmup_steps))
            }
            Schedule::Timm { peak, start, min, warmup_epochs, epochs, steps_per_epoch } => {
                let t = (step / steps_per_epoch.max(1)).saturating_sub(1);
                if t < warmup_epochs {
                    return start + (peak - start) * (t as f64 / warmup_epochs as f64);
                }
                half_cosine(peak, min, t, epochs)
            }
        }
    }

    /// [`Error::Setting`](crate::Error::Setting) for rates that are negative, not finite or above `peak`,
    /// for a run of no steps, and for a warm-up longer than the run.
    pub fn check(&self) -> Result<()> {
        let (peak, start, min, (warmup_name, most, warmup), (total_name, total)) = match *self {
            Schedule::Cosine { peak, start, min, warmup_steps, total_steps } => {
                let warmup = ("warmup_steps", "at most total_steps", warmup_steps);
                (peak, start, min, warmup, ("total_steps", total_steps))
            }
            Schedule::Timm { peak, start, min, warmup_epochs, epochs, steps_per_epoch } => {
                ensure("steps_per_epoch", steps_per_epoch as f64, "at least 1", steps_per_epoch > 0)?;
                (peak, start, min, ("warmup_epochs", "at most epochs", warmup_epochs), ("epochs", epochs))
            }
        };
        ensure("peak", peak, "finite and at least 0", peak >= 0.0 && peak.is_finite())?;
        ensure("start", start, "between 0 and peak", (0.0..=peak).contains(&start))?;
        ensure("min", min, "between 0 and peak", (0.0..=peak).contains(&min))?;
        ensure(total_name, total as f64, "at least 1", total > 0)?;
        ensure(warmup_name, warmup as f64, most, warmup <= total)
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
        Schedule::Timm { peak: 1e-3, start: 1e-6, min: 1e-5, warmup_epochs: 5, epochs: 300, steps_per_epoch }
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
        let schedule = Schedule::Cosine { peak: 1.0, start: 0.2, min: 0.1, warmup_steps: 4, total_steps: 12 };
        let expected = [(0, 0.2), (1, 0.4), (3, 0.8), (4, 1.0), (8, 0.55), (12, 0.1), (1_000, 0.1)];
        for (step, lr) in expected {
            assert_relative_eq!(schedule.lr(step), lr, max_relative = 1e-14);
        }
        let all_warmup = Schedule::Cosine { peak: 1.0, start: 0.2, min: 0.1, warmup_steps: 2, total_steps: 2 };
        all_warmup.check().unwrap();
        assert_eq!([0, 2, 3].map(|step| all_warmup.lr(step)), [0.2, 0.1, 0.1]);
        assert_relative_eq!(all_warmup.lr(1), 0.6, max_relative = 1e-14);
    }

    /// Some valid schedule of each kind with the same numbers: (cosine, timm, warm-up, total).
    fn schedules() -> impl Strategy<Value = (Schedule, Schedule, u64, u64)> {
        (1e-6..1.0f64, 0.0..=1.0f64, 0.0..=1.0f64, 1..2000u64, 0.0..=1.0f64).prop_map(
            |(peak, low, end, total, part)| {
                let (start, min, warmup) = (peak * low, peak * end, (total as f64 * part) as u64);
                let cosine = Schedule::Cosine { peak, start, min, warmup_steps: warmup, total_steps: total };
                let timm =
                    Schedule::Timm { peak, start, min, warmup_epochs: warmup, epochs: total, steps_per_epoch: 3 };
                (cosine, timm, warmup, total)
            },
        )
    }

    proptest! {
        #[test]
        fn rises_to_the_peak_then_falls_to_the_minimum((schedule, _, warmup, total) in schedules()) {
            let Schedule::Cosine { peak, start, min, .. } = schedule else { unreachable!() };
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
        fn timm_is_constant_within_an_epoch_and_repeats_the_first((_, schedule, warmup, total) in schedules()) {
            let Schedule::Timm { peak, start, min, .. } = schedule else { unreachable!() };
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
    fn senseless_settings_are_refused_and_never_panic() {
        let cosine = |peak, start, min, warmup_steps, total_steps| Schedule::Cosine {
            peak,
            start,
            min,
            warmup_steps,
            total_steps,
        };
        let wrong = [
            (cosine(-1.0, 0.0, 0.0, 1, 2), "peak"),
            (cosine(f64::NAN, 0.0, 0.0, 1, 2), "peak"),
            (cosine(f64::INFINITY, 0.0, 0.0, 1, 2), "peak"),
            (cosine(1.0, 2.0, 0.0, 1, 2), "start"),
            (cosine(1.0, 0.0, f64::INFINITY, 1, 2), "min"),
            (cosine(1.0, 0.0, 0.0, 0, 0), "total_steps"),
            (cosine(1.0, 0.0, 0.0, 3, 2), "warmup_steps"),
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
