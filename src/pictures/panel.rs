//! A plot over the epochs: its curves, each named where it ends, on a frame with axes.

use super::canvas::{Canvas, Point, middle};
use super::{AXIS, GREY, GRID, HEADING, INK, PAPER, SMALL, TEXT};
use crate::trainer::metrics::EpochMetrics;
use anyhow::Result;
use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;

/// The page that it is drawn on, and how far from its left edge a plot begins, in which its numbers stand.
pub const WIDTH: u32 = 1200;
pub const HEIGHT: u32 = 450;
pub const LEFT: f64 = 68.0;

/// Up to this many epochs each gets a dot; more would run together.
const DOTTED: usize = 40;
/// The largest magnitude that a curve shows. A diverging run can take on any value, including NaN.
pub const LARGEST: f64 = 1e9;
/// How far apart the names of curves are.
const APART: f64 = 19.0;

/// How shares in percent are written.
pub fn percent(value: f64) -> String {
    format!("{value:.1} %")
}

pub struct Curve<'a> {
    name: &'a str,
    colour: RGBColor,
    /// Epoch and value.
    points: Vec<Point>,
}

impl<'a> Curve<'a> {
    /// A value of each epoch.
    pub fn new(name: &'a str, colour: RGBColor, epochs: &[EpochMetrics], value: impl Fn(&EpochMetrics) -> f64) -> Self {
        Self { name, colour, points: epochs.iter().map(|metrics| (metrics.epoch as f64, value(metrics))).collect() }
    }
}

pub struct Panel<'a> {
    pub title: &'static str,
    pub caption: String,
    /// What the values cannot leave.
    pub bounds: (f64, f64),
    pub curves: Vec<Curve<'a>>,
    pub written: fn(f64) -> String,
}

impl Panel<'_> {
    /// Draws it between these places, left and right. The names of the curves are to the right of it.
    pub fn draw(&self, canvas: &mut Canvas, (left, right): (f64, f64), epochs: f64) -> Result<()> {
        let values = self.curves.iter().flat_map(|curve| &curve.points).map(|point| point.1);
        let (low, high) = values
            .filter(|&value| drawable(value))
            .fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        let frame = Frame {
            left,
            right,
            top: 84.0,
            bottom: f64::from(HEIGHT) - 62.0,
            epochs: Scale { low: 0.0, high: epochs, step: round_step(epochs / 6.0).max(1.0) },
            values: Scale::around(low, high, self.bounds),
        };

        canvas.text(self.title, (frame.left, 36.0), HPos::Left, HEADING, INK)?;
        canvas.text(&self.caption, (frame.left, 59.0), HPos::Left, TEXT, GREY)?;
        frame.draw(canvas)?;
        for curve in &self.curves {
            curve.draw(canvas, &frame)?;
        }
        self.draw_names(canvas, &frame)
    }

    /// Names each curve at the height of its end.
    fn draw_names(&self, canvas: &mut Canvas, frame: &Frame) -> Result<()> {
        let mut names = vec![];
        for Curve { name, colour, points } in &self.curves {
            let end = points.iter().rev().find(|point| drawable(point.1));
            if let (Some(&end), Some(last)) = (end, points.last()) {
                let value = if drawable(last.1) { (self.written)(last.1) } else { "diverged".to_owned() };
                names.push((frame.at(end).1, format!("{name} {value}"), *colour));
            }
        }
        names.sort_by(|a, b| a.0.total_cmp(&b.0));
        let heights = kept_apart(names.iter().map(|name| name.0), (frame.top, frame.bottom));
        for (y, (_, name, colour)) in heights.into_iter().zip(names) {
            canvas.text(&name, (frame.right + 11.0, middle(y, TEXT)), HPos::Left, TEXT, colour)?;
        }
        Ok(())
    }
}

/// Heights within bounds, as near to those that are wanted (from top to bottom) as lines of text can be that do not
/// overlap: where they would, they stand one below the other, around the mean of the heights that they want.
fn kept_apart(wanted: impl Iterator<Item = f64>, (top, bottom): (f64, f64)) -> Vec<f64> {
    // The middles of such groups, and how many lines each has.
    let mut groups: Vec<(f64, f64)> = vec![];
    for height in wanted {
        let (mut middle, mut lines) = (height, 1.0);
        while let Some(&(above, others)) = groups.last()
            && middle - above < APART * (lines + others) / 2.0
        {
            groups.pop();
            middle = (above * others + middle * lines) / (others + lines);
            lines += others;
            let half = APART * (lines - 1.0) / 2.0;
            middle = middle.min(bottom - half).max(top + half);
        }
        groups.push((middle, lines));
    }
    let lines_of = |(middle, lines): (f64, f64)| {
        (0..lines as usize).map(move |line| middle + APART * (line as f64 - (lines - 1.0) / 2.0))
    };
    groups.into_iter().flat_map(lines_of).collect()
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
    use super::*;

    #[test]
    fn names_do_not_overlap_and_stay_inside() {
        let kept = |wanted: &[f64]| kept_apart(wanted.iter().copied(), (84.0, 388.0));
        assert!(kept(&[]).is_empty());
        assert_eq!(kept(&[100.0, 200.0]), [100.0, 200.0]);
        assert_eq!(kept(&[100.0, 103.0]), [92.0, 111.0]);
        assert_eq!(kept(&[84.0, 84.0]), [84.0, 103.0]);
        assert_eq!(kept(&[388.0, 388.0]), [369.0, 388.0]);
        // The third line pushes the two above it, which have moved already.
        assert_eq!(kept(&[200.0, 202.0, 204.0, 300.0]), [183.0, 202.0, 221.0, 300.0]);
        let all = kept(&[380.0, 385.0, 386.0, 387.0, 388.0, 388.0, 388.0]);
        assert!(all.windows(2).all(|pair| (pair[1] - pair[0] - APART).abs() < 1e-9) && all[6] <= 388.0, "{all:?}");
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
