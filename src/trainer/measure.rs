//! The methods of [`Measure`], by which a run's configuration says that epochs are compared.

use super::metrics::EpochMetrics;
use crate::config::Measure;

impl Measure {
    /// This accuracy of an epoch, 0 to 1. None if it was not measured, in a run of an earlier version.
    pub fn of(self, epoch: &EpochMetrics) -> Option<f64> {
        match self {
            Self::Accuracy => Some(epoch.test_accuracy),
            Self::MacroAccuracy => epoch.test_macro_accuracy,
        }
    }

    /// The same in percent, as it is printed.
    pub fn percent(self, epoch: &EpochMetrics) -> String {
        self.of(epoch).map_or_else(|| "unknown".into(), |accuracy| format!("{:.1}%", 100.0 * accuracy))
    }

    /// What is added to a printed accuracy, if it is not what one would take it for.
    pub fn remark(self) -> &'static str {
        match self {
            Self::Accuracy => "",
            Self::MacroAccuracy => " (mean of the classes)",
        }
    }

    /// Whether one epoch is better than another: its accuracy is higher, or as high and its loss is smaller. Any
    /// accuracy is higher than none.
    pub fn prefers(self, one: &EpochMetrics, other: &EpochMetrics) -> bool {
        let (one_of, other_of) = (self.of(one), self.of(other));
        one_of > other_of || one_of == other_of && one.test_loss < other.test_loss
    }

    /// The last and the best of some epochs; of equally good ones, the first.
    pub fn last_and_best(self, epochs: &[EpochMetrics]) -> Option<[EpochMetrics; 2]> {
        let best = epochs.iter().copied().reduce(|best, next| if self.prefers(&next, &best) { next } else { best });
        epochs.last().copied().zip(best).map(<[EpochMetrics; 2]>::from)
    }

    /// If an epoch before the last one was the best, a phrase that says which, as it is printed.
    pub fn surpassed(self, [last, best]: [&EpochMetrics; 2]) -> Option<String> {
        let lower = if self.of(best) == self.of(last) { " and a lower loss" } else { "" };
        (best.epoch < last.epoch).then(|| format!("best after epoch {}, {}{lower}", best.epoch, self.percent(best)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The best of epochs with these losses, and accuracies of all images and of the classes.
    fn best(by: Measure, epochs: [(f64, [f64; 2]); 2]) -> usize {
        let metrics = |(epoch, (test_loss, [test_accuracy, of_classes])): (usize, (f64, [f64; 2]))| EpochMetrics {
            epoch,
            test_loss,
            test_accuracy,
            test_macro_accuracy: Some(of_classes),
            ..EpochMetrics::default()
        };
        let epochs: Vec<EpochMetrics> = (1..).zip(epochs).map(metrics).collect();
        by.last_and_best(&epochs).map_or(0, |[_, best]| best.epoch)
    }

    #[test]
    fn the_best_has_most_right_then_the_lower_loss_then_came_first() {
        let by = Measure::Accuracy;
        assert_eq!(best(by, [(1.0, [0.5, 0.1]), (1.2, [0.5, 0.9])]), 1);
        assert_eq!(best(by, [(1.2, [0.5, 0.9]), (1.0, [0.5, 0.1])]), 2);
        assert_eq!(best(by, [(1.0, [0.5, 0.1]), (1.0, [0.5, 0.9])]), 1);
        assert_eq!(best(by, [(1.0, [0.5, 0.9]), (9.0, [0.51, 0.1])]), 2);
    }

    #[test]
    fn or_most_of_the_mean_class() {
        assert_eq!(best(Measure::MacroAccuracy, [(1.0, [0.9, 0.4]), (9.0, [0.5, 0.41])]), 2);
        assert_eq!(best(Measure::MacroAccuracy, [(1.0, [0.5, 0.4]), (9.0, [0.9, 0.4])]), 1);
        let older = EpochMetrics { test_accuracy: 0.9, ..EpochMetrics::default() };
        let newer = EpochMetrics { test_loss: 1.0, test_macro_accuracy: Some(0.0), ..older };
        assert!(Measure::MacroAccuracy.prefers(&newer, &older) && !Measure::MacroAccuracy.prefers(&older, &newer));
    }
}
