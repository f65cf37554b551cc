//! Loss and accuracy over the epochs.

use super::canvas::Canvas;
use super::panel::{Curve, HEIGHT, LARGEST, LEFT, Panel, WIDTH, percent};
use super::{BLUE, VERMILION};
use crate::trainer::data_facts::in_short;
use crate::trainer::metrics::EpochMetrics;
use anyhow::Result;
use std::path::Path;

/// Where the left one of both plots ends.
const RIGHT: f64 = 488.0;

/// What must be known of a run to read its curves.
#[derive(Clone, Copy, Debug)]
pub struct Told<'a> {
    /// What the images are called that it is tested on.
    pub tested_on: &'a str,
    /// Whether its training has label smoothing.
    pub smooths: bool,
    /// Whether it mixes training images.
    pub mixes: bool,
}

/// Draws the loss and the accuracy on training and test images over the epochs, as a PNG of 1200x450 pixels.
///
/// A value that is not finite, or beyond any scale (1e9), leaves a gap. No metrics, no file: then it does nothing.
///
/// Errors: where the file cannot be written.
pub fn draw(metrics: &[EpochMetrics], told: Told<'_>, path: &Path) -> Result<()> {
    let Some(last) = metrics.last() else { return Ok(()) };
    let curve = |name, colour, value: fn(&EpochMetrics) -> f64| Curve::new(name, colour, metrics, value);
    // In full it would run off the page.
    let name = in_short(told.tested_on);
    let of_training = match (told.smooths, told.mixes) {
        (false, false) => "",
        (true, false) => "; training includes label smoothing",
        (false, true) => "; training is on mixed images",
        (true, true) => "; training is smoothed, and on mixed images",
    };
    let mixed = if told.mixes { "; training is on mixed images" } else { "" };
    let epochs = metrics.iter().map(|metrics| metrics.epoch).max().unwrap_or(0).max(1) as f64;
    let counted = if last.epoch == 1 { "1 epoch".to_owned() } else { format!("{} epochs", last.epoch) };

    let loss = Panel {
        title: "Loss",
        caption: format!("mean cross-entropy{of_training}"),
        bounds: (0.0, LARGEST),
        curves: vec![
            curve("train", BLUE, |metrics| metrics.train_loss),
            curve(name, VERMILION, |metrics| metrics.test_loss),
        ],
        written: |loss| if loss < 1e4 { format!("{loss:.3}") } else { format!("{loss:.2e}") },
    };
    let accuracy = Panel {
        title: "Accuracy (%)",
        caption: format!("{} accuracy {} after {counted}{mixed}", told.tested_on, percent(100.0 * last.test_accuracy)),
        bounds: (0.0, 100.0),
        curves: vec![
            curve("train", BLUE, |metrics| 100.0 * metrics.train_accuracy),
            curve(name, VERMILION, |metrics| 100.0 * metrics.test_accuracy),
        ],
        written: percent,
    };

    let mut canvas = Canvas::new(WIDTH, HEIGHT)?;
    let half = f64::from(WIDTH) / 2.0;
    loss.draw(&mut canvas, (LEFT, RIGHT), epochs)?;
    accuracy.draw(&mut canvas, (half + LEFT, half + RIGHT), epochs)?;
    canvas.save(path)
}

#[cfg(test)]
mod tests {
    use super::super::{rgb, saved};
    use super::*;
    use image::{Rgb, RgbImage};
    use plotters::style::RGBColor;

    fn epochs(count: usize, metrics: impl Fn(usize) -> (f64, f64)) -> Vec<EpochMetrics> {
        let epoch = |epoch| {
            let (loss, accuracy) = metrics(epoch);
            EpochMetrics {
                epoch,
                learning_rate: 1e-3,
                train_loss: loss,
                train_accuracy: accuracy,
                test_loss: loss + 0.4,
                test_accuracy: 0.7 * accuracy,
                test_top5: 1.0,
                test_macro_accuracy: None,
            }
        };
        (1..=count).map(epoch).collect()
    }

    const TOLD: Told<'_> = Told { tested_on: "validation", smooths: true, mixes: true };

    fn drawn(metrics: &[EpochMetrics]) -> Result<RgbImage> {
        saved(|path| draw(metrics, TOLD, path))
    }

    fn count(page: &RgbImage, colour: RGBColor, left: u32, right: u32) -> usize {
        page.enumerate_pixels().filter(|&(x, _, &pixel)| (left..right).contains(&x) && pixel == rgb(colour)).count()
    }

    /// How far down the pixels of a colour are, on average.
    fn height(page: &RgbImage, colour: RGBColor, left: u32, right: u32) -> f64 {
        let inside =
            page.enumerate_pixels().filter(|&(x, _, &pixel)| (left..right).contains(&x) && pixel == rgb(colour));
        inside.map(|(_, y, _)| f64::from(y)).sum::<f64>() / count(page, colour, left, right) as f64
    }

    #[test]
    fn runs_of_any_length_have_both_curves_in_both_panels() -> Result<()> {
        for length in [1, 2, 12, 1000] {
            let page = drawn(&epochs(length, |epoch| (2.0 / epoch as f64, 1.0 - 0.9 / epoch as f64)))?;
            assert_eq!(page.dimensions(), (WIDTH, HEIGHT));
            for (left, right) in [(0, WIDTH / 2), (WIDTH / 2, WIDTH)] {
                assert!(count(&page, BLUE, left, right) > 30, "train over {length} epochs");
                assert!(count(&page, VERMILION, left, right) > 30, "test over {length} epochs");
            }
            // The test's loss is higher, and its accuracy lower.
            let [loss, accuracy] = [(0, WIDTH / 2), (WIDTH / 2, WIDTH)]
                .map(|(left, right)| [BLUE, VERMILION].map(|colour| height(&page, colour, left, right)));
            assert!(loss[1] < loss[0] && accuracy[1] > accuracy[0], "{loss:?} and {accuracy:?} over {length} epochs");
            // Nothing is cut off: the margins are empty.
            let inside = |x: u32, y: u32| (8..WIDTH - 8).contains(&x) && (8..HEIGHT - 8).contains(&y);
            assert!(page.enumerate_pixels().all(|(x, y, pixel)| inside(x, y) || *pixel == Rgb([255; 3])));
        }
        Ok(())
    }

    #[test]
    fn no_epochs_leave_no_file() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("curves.png");
        draw(&[], TOLD, &path)?;
        assert!(!path.exists());
        Ok(())
    }

    #[test]
    fn a_run_that_diverges_is_drawn_nevertheless() -> Result<()> {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, 1e9, -1e9, 0.0, 1e-300] {
            for from in [1, 5, 6] {
                drawn(&epochs(6, |epoch| if epoch < from { (1.0, 0.5) } else { (value, value) }))?;
            }
        }
        Ok(())
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error() {
        assert!(draw(&epochs(1, |_| (1.0, 0.5)), TOLD, Path::new("/no/such/folder/curves.png")).is_err());
    }
}
