//! How the accuracies of several runs grow over their epochs.

use super::canvas::{Canvas, end_of};
use super::panel::{Curve, HEIGHT, LEFT, Panel, WIDTH, percent};
use super::{BLUE, GREEN, INK, ORANGE, PURPLE, SKY, TEXT, VERMILION};
use crate::config::Measure;
use crate::trainer::metrics::EpochMetrics;
use anyhow::Result;
use plotters::style::RGBColor;
use std::path::Path;

/// Where the plot ends; the names of the runs follow.
const RIGHT: f64 = 780.0;
/// How wide a run's name can be beside its accuracy.
const NAME: f64 = 320.0;

/// A curve's colours, by its place. More curves than that would be hard to tell apart.
const COLOURS: [RGBColor; 7] = [BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, INK];

/// How many runs a picture shows at most.
pub const MOST: usize = COLOURS.len();

/// Draws the accuracy on test images, by this measure, of the first [`MOST`] of these runs, each by its name and its
/// epochs, as a PNG of 1200x450 pixels. `tested_on` is what the images are called, if all runs call them so. Errors:
/// where the file cannot be written.
pub fn draw(runs: &[(&str, &[EpochMetrics])], by: Measure, tested_on: Option<&str>, path: &Path) -> Result<()> {
    let shown = &runs[..runs.len().min(MOST)];
    // Runs that were begun together often differ at the end of their names.
    let names = shown.iter().map(|(name, _)| end_of(name, TEXT, NAME)).collect::<Result<Vec<_>>>()?;
    let images = tested_on.map_or_else(|| "each run's own images".to_owned(), |name| format!("{name} images"));
    let curves = names.iter().zip(COLOURS).zip(shown).map(|((name, colour), (_, epochs))| {
        Curve::new(name, colour, epochs, |metrics| 100.0 * by.of(metrics).unwrap_or(f64::NAN))
    });
    let accuracy = Panel {
        title: "Accuracy (%)",
        caption: match runs.len() - shown.len() {
            0 => format!("on {images}{}", by.remark()),
            _ => format!("on {images}{}, of the best {MOST} of {} runs", by.remark(), runs.len()),
        },
        bounds: (0.0, 100.0),
        curves: curves.collect(),
        written: percent,
    };
    let epochs = shown.iter().map(|(_, epochs)| epochs.len()).max().unwrap_or(0).max(1) as f64;
    let mut canvas = Canvas::new(WIDTH, HEIGHT)?;
    accuracy.draw(&mut canvas, (LEFT, RIGHT), epochs)?;
    canvas.save(path)
}

#[cfg(test)]
mod tests {
    use super::super::{rgb, saved};
    use super::*;
    use image::Rgb;

    #[test]
    fn each_of_up_to_seven_runs_has_its_curve_and_its_name() -> Result<()> {
        let epoch = |epoch: usize, accuracy: f64| EpochMetrics {
            epoch,
            learning_rate: 1e-3,
            train_loss: 1.0,
            train_accuracy: 0.5,
            test_loss: 1.0,
            test_accuracy: accuracy,
            test_top5: 1.0,
            test_macro_accuracy: None,
        };
        for count in [0, 1, 2, 7, 40] {
            let runs: Vec<Vec<EpochMetrics>> = (0..count)
                .map(|run| (1..=5).map(|at| epoch(at, 0.6 - 0.05 * run as f64 / (1 + at) as f64)).collect())
                .collect();
            let names: Vec<String> = (0..count).map(|run| format!("{}-{run}", "a long name ".repeat(5))).collect();
            let named: Vec<_> = names.iter().zip(&runs).map(|(name, epochs)| (name.as_str(), &epochs[..])).collect();
            let page = saved(|path| draw(&named, Measure::Accuracy, Some("test"), path))?;
            assert_eq!(page.dimensions(), (WIDTH, HEIGHT));
            for (place, colour) in COLOURS.into_iter().enumerate().filter(|(_, colour)| *colour != INK) {
                let coloured = |inside: fn(f64) -> bool| {
                    let of_colour = |x: u32, pixel: Rgb<u8>| inside(f64::from(x)) && pixel == rgb(colour);
                    page.enumerate_pixels().filter(|&(x, _, &pixel)| of_colour(x, pixel)).count()
                };
                let (curve, named) = (coloured(|x| x < RIGHT - 5.0), coloured(|x| x > RIGHT + 10.0));
                assert!((curve > 30 && named > 30) == (place < count), "{place} of {count}: {curve}, {named}");
            }
            let inside = |x: u32, y: u32| (8..WIDTH - 8).contains(&x) && (8..HEIGHT - 8).contains(&y);
            assert!(page.enumerate_pixels().all(|(x, y, pixel)| inside(x, y) || *pixel == Rgb([255; 3])));
        }
        Ok(())
    }
}
