//! Loss and accuracy over the epochs.

use super::canvas::{Canvas, Point, middle};
use super::{AXIS, BLUE, GREY, GRID, HEADING, INK, PAPER, SMALL, TEXT, VERMILION};
use crate::trainer::metrics::EpochMetrics;
use anyhow::Result;
use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;
use std::path::Path;

const WIDTH: u32 = 1200;
const HEIGHT: u32 = 450;

/// Up to this many epochs each gets a dot; more would run together.
const DOTTED: usize = 40;
/// The largest magnitude that a curve shows. A diverging run can take on any value, including NaN.
const LARGEST: f64 = 1e9;

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
    let curve = |name, colour, value: fn(&EpochMetrics) -> f64| Curve {
        name,
        colour,
        points: metrics.iter().map(|metrics| (metrics.epoch as f64, value(metrics))).collect(),
    };
    // In full it would run off the page.
    let name = if told.tested_on == "validation" { "val" } else { told.tested_on };
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
        curves: [
            curve("train", BLUE, |metrics| metrics.train_loss),
            curve(name, VERMILION, |metrics| metrics.test_loss),
        ],
        written: |loss| if loss < 1e4 { format!("{loss:.3}") } else { format!("{loss:.2e}") },
    };
    let accuracy = Panel {
        title: "Accuracy (%)",
        caption: format!("{} accuracy {} after {counted}{mixed}", told.tested_on, percent(100.0 * last.test_accuracy)),
        bounds: (0.0, 100.0),
        curves: [
            curve("train", BLUE, |metrics| 100.0 * metrics.train_accuracy),
            curve(name, VERMILION, |metrics| 100.0 * metrics.test_accuracy),
        ],
        written: percent,
    };

    let mut canvas = Canvas::new(WIDTH, HEIGHT)?;
    let half = f64::from(WIDTH) / 2.0;
    loss.draw(&mut canvas, 0.0, epochs)?;
    accuracy.draw(&mut canvas, half, epochs)?;
    canvas.save(path)
}

fn percent(value: f64) -> String {
    format!("{value:.1} %")
}

struct Curve<'a> {
    name: &'a str,
    colour: RGBColor,
    /// Epoch and value.
    points: Vec<Point>,
}

struct Panel<'a> {
    title: &'static str,
    caption: String,
    /// What the values cannot leave.
    bounds: (f64, f64),
    curves: [Curve<'a>; 2],
    written: fn(f64) -> String,
}

impl Panel<'_> {
    /// Draws the half of the page that begins at `left`.
    fn draw(&self, canvas: &mut Canvas, left: f64, epochs: f64) -> Result<()> {
        let values = self.curves.iter().flat_map(|curve| &curve.points).map(|point| point.1);
        let (low, high) = values
            .filter(|&value| drawable(value))
            .fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        let frame = Frame {
            left: left + 68.0,
            right: left + 488.0,
            top: 84.0,
            bottom: 388.0,
            epochs: Scale { low: 0.0, high: epochs, step: round_step(epochs / 6.0).max(1.0) },
            values: Scale::around(low, high, self.bounds),
        };

        canvas.text(self.title, (frame.left, 36.0), HPos::Left, HEADING, INK)?;
        canvas.text(&self.caption, (frame.left, 59.0), HPos::Left, TEXT, GREY)?;
        frame.draw(canvas)?;
        for curve in &self.curves {
            curve.draw(canvas, &frame)?;
        }
        self.draw_labels(canvas, &frame)
    }

    /// Names each curve where it ends, the labels apart from each other even where the curves meet.
    fn draw_labels(&self, canvas: &mut Canvas, frame: &Frame) -> Result<()> {
        const APART: f64 = 19.0;
        let mut labels = vec![];
        for Curve { name, colour, points } in &self.curves {
            let end = points.iter().rev().find(|point| drawable(point.1));
            if let (Some(&end), Some(last)) = (end, points.last()) {
                let value = if drawable(last.1) { (self.written)(last.1) } else { "diverged".to_owned() };
                labels.push((frame.at(end).1, format!("{name} {value}"), *colour));
            }
        }
        labels.sort_by(|a, b| a.0.total_cmp(&b.0));
        if let [(upper, ..), (lower, ..)] = labels.as_mut_slice() {
            let missing = (APART - (*lower - *upper)).max(0.0);
            *upper = (*upper - missing / 2.0).clamp(frame.top, frame.bottom - APART);
            *lower = (*lower + missing / 2.0).min(frame.bottom).max(*upper + APART);
        }
        for (y, label, colour) in labels {
            canvas.text(&label, (frame.right + 11.0, middle(y, TEXT)), HPos::Left, TEXT, colour)?;
        }
        Ok(())
    }
}

impl Curve<'_> {
    fn draw(&self, canvas: &mut Canvas, frame: &Frame) -> Result<()> {
        for run in self.points.split(|point| !drawable(point.1)) {
            let places: Vec<Point> = run.iter().map(|&point| frame.at(point)).collect();
            if places.len() > 1 {
                canvas.line(&places, self.colour, 2.0)?;
            }
            // A single point between two gaps has no line, so it needs a dot to be visible.
            let dotted = self.points.iter().filter(|point| drawable(point.1)).count() <= DOTTED || places.len() == 1;
            for &place in places.iter().filter(|_| dotted) {
                canvas.dot(place, 3.0, self.colour)?;
            }
        }
        let Some(&end) = self.points.last().filter(|point| drawable(point.1)) else { return Ok(()) };
        canvas.dot(frame.at(end), 6.0, PAPER)?;
        canvas.dot(frame.at(end), 4.5, self.colour)
    }
}

/// The plotting area: its place on the page and the scales of its axes.
struct Frame {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    epochs: Scale,
    values: Scale,
}

impl Frame {
    fn at(&self, (epoch, value): Point) -> Point {
        let x = self.left + self.epochs.share(epoch) * (self.right - self.left);
        let y = self.bottom - self.values.share(value) * (self.bottom - self.top);
        (x, y)
    }

    fn draw(&self, canvas: &mut Canvas) -> Result<()> {
        for (value, label) in self.values.ticks() {
            let (_, y) = self.at((0.0, value));
            canvas.line(&[(self.left, y), (self.right, y)], GRID, 1.0)?;
            canvas.text(&label, (self.left - 10.0, middle(y, SMALL)), HPos::Right, SMALL, GREY)?;
        }
        let under = self.bottom + 21.0;
        for (epoch, label) in self.epochs.ticks() {
            let (x, _) = self.at((epoch, self.values.low));
            canvas.line(&[(x, self.top), (x, self.bottom)], GRID, 1.0)?;
            canvas.line(&[(x, self.bottom), (x, self.bottom + 4.0)], AXIS, 1.0)?;
            canvas.text(&label, (x, under), HPos::Center, SMALL, GREY)?;
        }
        canvas.line(&[(self.left, self.bottom), (self.right, self.bottom)], AXIS, 1.0)?;
        canvas.text("epoch", ((self.left + self.right) / 2.0, self.bottom + 44.0), HPos::Center, SMALL, GREY)
    }
}

/// The range of an axis, and the distance of its ticks.
struct Scale {
    low: f64,
    high: f64,
    step: f64,
}

impl Scale {
    /// A scale of whole steps around some values, within bounds.
    fn around(low: f64, high: f64, bounds: (f64, f64)) -> Self {
        // Nearly equal values need some room, too.
        let least = (high.abs() / 10.0).max(0.01);
        let step = round_step((high - low).max(least) / 5.0);
        let (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        let (low, high) = if low < high { (low, high) } else { (low - step, high + step) };
        Self { low: low.max(bounds.0), high: high.min(bounds.1), step }
    }

    /// A value's position on the axis: 0 at the low end, 1 at the high end.
    fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    /// Its ticks, each with its label.
    fn ticks(&self) -> Vec<(f64, String)> {
        let decimals = (-self.step.log10()).ceil().max(0.0) as usize;
        let first = (self.low / self.step).round();
        let count = ((self.high - self.low) / self.step + 1e-6).floor() as usize;
        let tick = |index: usize| (first + index as f64) * self.step;
        let label = |value: f64| if value.abs() < 1e6 { format!("{value:.decimals$}") } else { format!("{value:e}") };
        (0..=count).map(tick).map(|value| (value, label(value))).collect()
    }
}

/// The smallest number of the form 1, 2 or 5 times a power of ten that is not below `at_least`.
fn round_step(at_least: f64) -> f64 {
    let power = 10f64.powf(at_least.log10().floor());
    // Rounding errors must not turn a step of 2 into one of 5.
    let enough = |factor: &f64| factor * power >= at_least * (1.0 - 1e-9);
    [1.0, 2.0, 5.0].into_iter().find(enough).unwrap_or(10.0) * power
}

fn drawable(value: f64) -> bool {
    value.is_finite() && value.abs() <= LARGEST
}

#[cfg(test)]
mod tests {
    use super::super::{rgb, saved};
    use super::*;
    use image::{Rgb, RgbImage};

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

    #[test]
    fn scales_have_few_round_ticks() {
        let labels = |scale: Scale| scale.ticks().into_iter().map(|tick| tick.1).collect::<Vec<_>>();
        let accuracy = |low, high| labels(Scale::around(low, high, (0.0, 100.0)));
        assert_eq!(accuracy(31.0, 78.0), ["30", "40", "50", "60", "70", "80"]);
        assert_eq!(accuracy(100.0, 100.0), ["98", "100"]);
        assert_eq!(accuracy(0.0, 0.0), ["0.000", "0.002"]);
        let loss = |low, high| labels(Scale::around(low, high, (0.0, LARGEST)));
        assert_eq!(loss(0.81, 1.97), ["0.5", "1.0", "1.5", "2.0"]);
        assert_eq!(loss(2.31, 2.31), ["2.30", "2.35"]);
        for exponent in -12..9 {
            let high = 1.7 * 10f64.powi(exponent);
            assert!((2..=8).contains(&loss(high / 3.0, high).len()), "1.7e{exponent}");
        }
    }
}
