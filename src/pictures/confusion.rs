//! The confusion matrix as a picture: what the images of each class were classified as.

use super::canvas::{Canvas, shortened, text_width};
use super::{BLUE, GREY, GRID, HEADING, INK, PAPER, SMALL, TEXT, VERMILION};
use anyhow::Result;
use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;
use std::path::Path;

/// The most classes that are drawn: with more, the cells on a page that fits a screen would be too small to read.
pub const MAX_CLASSES: usize = 100;

const MARGIN: f64 = 28.0;
/// What lies above the cells: title, subtitle and the columns' numbers.
const HEAD: f64 = 116.0;
/// The side of the whole matrix, if that makes cells of a legible size.
const SIDE: f64 = 640.0;
const CELL: (f64, f64) = (8.0, 44.0);
/// The largest width of a class's name.
const NAME: f64 = 192.0;
/// The spacing that lines of text, and numbers side by side, need.
const LINE: f64 = 14.0;
const NUMBER: f64 = 26.0;

/// Draws the confusion matrix as a PNG. `counts[i][j]` is the number of images of class i that were classified as class
/// j. The larger their share of class i, the stronger the cell's colour: blue for right, red for wrong. Columns are
/// labelled with the classes' numbers, rows with their names as well, as far as the font has letters for them.
///
/// Errors: a file that cannot be written.
pub fn draw(classes: &[String], counts: &[Vec<u64>], subtitle: &str, path: &Path) -> Result<()> {
    let cell = (SIDE / classes.len().max(1) as f64).clamp(CELL.0, CELL.1).floor();
    let labels =
        classes.iter().enumerate().map(|(class, name)| shortened(&format!("{} {name}", class + 1), TEXT, NAME));
    let labels = labels.collect::<Result<Vec<_>>>()?;
    let widest =
        labels.iter().map(|label| text_width(label, TEXT)).try_fold(0.0, |a, b| Ok::<_, anyhow::Error>(b?.max(a)))?;
    let (left, extent) = (MARGIN + widest + 10.0, cell * classes.len() as f64);
    let right = (left + extent).max(MARGIN + text_width(subtitle, SMALL)?);
    let mut canvas = Canvas::new((right + MARGIN).ceil() as u32, (HEAD + extent + MARGIN).ceil() as u32)?;
    canvas.text("What images were taken for", (MARGIN, 42.0), HPos::Left, HEADING, INK)?;
    canvas.text(subtitle, (MARGIN, 66.0), HPos::Left, SMALL, GREY)?;
    canvas.rectangle((left, HEAD), (extent, extent), GRID)?;

    let line = |class: usize| HEAD + cell * class as f64;
    for (class, label) in labels.iter().enumerate().step_by((LINE / cell).ceil() as usize) {
        let baseline = line(class) + cell / 2.0 + 0.35 * TEXT;
        canvas.text(label, (left - 10.0, baseline), HPos::Right, TEXT, INK)?;
    }
    for class in (0..classes.len()).step_by((NUMBER / cell).ceil() as usize) {
        let middle = left + cell * (class as f64 + 0.5);
        canvas.text(&(class + 1).to_string(), (middle, HEAD - 9.0), HPos::Center, SMALL, GREY)?;
    }
    // The grid colour remains visible as lines between the cells.
    let inner = cell - 1.0;
    for (class, row) in counts.iter().enumerate() {
        let images = row.iter().sum::<u64>().max(1);
        for (taken, &count) in row.iter().enumerate() {
            let share = count as f64 / images as f64;
            let corner = (left + cell * taken as f64, line(class));
            canvas.rectangle(corner, (inner, inner), colour(share, class == taken))?;
            let shown = count.to_string();
            if count > 0 && text_width(&shown, SMALL)? < inner {
                let ink = if share.sqrt() > 0.6 { PAPER } else { INK };
                let place = (corner.0 + inner / 2.0, corner.1 + inner / 2.0 + 0.35 * SMALL);
                canvas.text(&shown, place, HPos::Center, SMALL, ink)?;
            }
        }
    }
    canvas.save(path)
}

/// The colour for a share of a class's images. The square root keeps small shares visible.
fn colour(share: f64, is_right: bool) -> RGBColor {
    let full = if is_right { BLUE } else { VERMILION };
    let mixed = |paper: u8, full: u8| {
        let (paper, full) = (f64::from(paper), f64::from(full));
        (paper + (full - paper) * share.sqrt()).round() as u8
    };
    RGBColor(mixed(PAPER.0, full.0), mixed(PAPER.1, full.1), mixed(PAPER.2, full.2))
}

#[cfg(test)]
mod tests {
    use super::super::{rgb, saved};
    use super::*;
    use image::{Rgb, RgbImage};

    fn drawn(classes: &[String], counts: &[Vec<u64>]) -> Result<RgbImage> {
        saved(|path| draw(classes, counts, "of a test", path))
    }

    #[test]
    fn a_cell_has_the_colour_of_its_share() -> Result<()> {
        let classes = ["cat", "dög"].map(str::to_owned);
        let page = drawn(&classes, &[vec![9, 3], vec![0, 0]])?;
        let left = MARGIN + text_width("2 d?g", TEXT)?.max(text_width("1 cat", TEXT)?) + 10.0;
        // Near the corner, where no number is.
        let at = |row: u32, column: u32| page[(left as u32 + 44 * column + 4, HEAD as u32 + 44 * row + 4)];
        let of = |share: f64, is_right: bool| rgb(colour(share, is_right));
        assert_eq!([at(0, 0), at(0, 1)], [of(0.75, true), of(0.25, false)]);
        assert_eq!([at(1, 0), at(1, 1)], [Rgb([255; 3]); 2], "a class without images");
        Ok(())
    }

    #[test]
    fn pages_of_any_number_of_classes() -> Result<()> {
        for count in [0, 1, 45, MAX_CLASSES] {
            let classes: Vec<String> = (0..count).map(|class| format!("{class} {}", "long ".repeat(20))).collect();
            let counts = vec![vec![123_456_789; count]; count];
            let (width, height) = drawn(&classes, &counts)?.dimensions();
            assert!(width.max(height) < 1100, "{count}: {width}x{height}");
        }
        Ok(())
    }
}
