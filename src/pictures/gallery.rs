//! A page of pictures: a row for each image, and a column for each attention over it.

use super::canvas::{Canvas, SCALE, fitted, shortened, text_width};
use super::{BLUE, GREY, HEADING, INK, PAPER, SMALL, TEXT};
use anyhow::{Context, Result};
use image::RgbImage;
use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;
use std::path::Path;

/// The most attentions that are shown.
pub const COLUMNS: usize = 4;
/// The most images that are shown: more would make a page that no viewer opens.
pub const ROWS: usize = 32;
/// The side of an image on the page.
pub(super) const SIDE: u32 = 192;
pub(super) const GAP: u32 = 16;
/// The gap below an image that has a name there: nearer to its own image than to the next.
pub(super) const NAMED_GAP: u32 = 30;
pub(super) const MARGIN: u32 = 28;
/// What lies above the images: title, legend, and the columns' heads.
pub(super) const HEAD: u32 = 158;

/// A page, and the images on it.
pub(super) struct Gallery {
    canvas: Canvas,
    /// From one row to the next.
    stride: u32,
}

impl Gallery {
    /// A page with the images in its first column, and below them their names, if they have any. `columns` are the
    /// names and captions of the columns after it.
    pub fn new(
        title: &str,
        subtitle: &str,
        columns: &[[String; 2]],
        images: &[RgbImage],
        names: &[String],
    ) -> Result<Self> {
        let (across, down) = (columns.len() as u32 + 1, images.len() as u32);
        let width = left_of(across as usize) - GAP + MARGIN;
        let gap = if names.is_empty() { GAP } else { NAMED_GAP };
        let stride = SIDE + gap;
        let mut canvas = Canvas::new(width, HEAD + stride * down - gap + MARGIN)?;
        let left = f64::from(MARGIN);
        canvas.text(title, (left, 42.0), HPos::Left, HEADING, INK)?;
        canvas.text(subtitle, (left, 66.0), HPos::Left, SMALL, GREY)?;
        let heads = [["image".to_owned(), String::new()]];
        for (index, [name, caption]) in heads.iter().chain(columns).enumerate() {
            let (left, baseline) = (f64::from(left_of(index)), f64::from(HEAD) - 27.0);
            canvas.text(&shortened(name, TEXT, f64::from(SIDE))?, (left, baseline), HPos::Left, TEXT, INK)?;
            canvas.text(caption, (left, baseline + 17.0), HPos::Left, SMALL, GREY)?;
        }
        let mut page = Self { canvas, stride };
        for (row, image) in images.iter().enumerate() {
            page.place(row, 0, image);
        }
        for (row, name) in names.iter().enumerate() {
            let baseline = f64::from(page.top_of(row) + SIDE) + 14.0;
            page.canvas.text(&shortened(name, SMALL, f64::from(SIDE))?, (left, baseline), HPos::Left, SMALL, GREY)?;
        }
        Ok(page)
    }

    /// Draws a legend of the colours on a line below the subtitle. Blue is shown as an outline, as it is on the page.
    pub fn legend(&mut self, entries: &[(&str, Vec<RGBColor>)]) -> Result<()> {
        const SWATCH: f64 = 12.0;
        let (mut x, baseline) = (f64::from(MARGIN), 90.0);
        let top = baseline - SWATCH + 1.0;
        for (label, colours) in entries {
            for &colour in colours {
                self.canvas.rectangle((x, top), (SWATCH, SWATCH), colour)?;
                if colour == BLUE {
                    self.canvas.rectangle((x + 2.0, top + 2.0), (SWATCH - 4.0, SWATCH - 4.0), PAPER)?;
                }
                x += SWATCH;
            }
            self.canvas.text(label, (x + 7.0, baseline), HPos::Left, SMALL, GREY)?;
            x += text_width(label, SMALL)? + 24.0;
        }
        Ok(())
    }

    fn top_of(&self, row: usize) -> u32 {
        HEAD + self.stride * row as u32
    }

    /// Puts a picture into the middle of its square.
    pub fn place(&mut self, row: usize, column: usize, picture: &RgbImage) {
        let top = self.top_of(row);
        let middle =
            |corner: u32, extent: u32| f64::from(corner) + f64::from(SIDE * SCALE - extent) / f64::from(2 * SCALE);
        let corner = (middle(left_of(column), picture.width()), middle(top, picture.height()));
        self.canvas.picture(picture, corner);
    }

    /// Writes the page as a PNG file.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.canvas.save(path)
    }
}

fn left_of(column: usize) -> u32 {
    MARGIN + (SIDE + GAP) * column as u32
}

/// An image scaled to its size on the page.
pub(super) fn on_page(image: &data::Image) -> Result<RgbImage> {
    let (width, height) = (u32::try_from(image.width())?, u32::try_from(image.height())?);
    let rgb =
        RgbImage::from_raw(width, height, image.pixels().to_vec()).context("an image without all of its pixels")?;
    Ok(fitted(&rgb, SIDE))
}

/// At most `most` elements: the first, the last, and others evenly spaced between them.
pub(super) fn evenly<T>(all: &[T], most: usize) -> impl Iterator<Item = &T> {
    let count = all.len().min(most);
    let gaps = count.max(2) - 1;
    (0..count).map(move |index| &all[(index * (all.len() - 1) + gaps / 2) / gaps])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attentions_are_chosen_evenly() {
        let chosen = |count: usize| evenly(&(0..count).collect::<Vec<_>>(), 4).copied().collect::<Vec<_>>();
        assert_eq!(chosen(0), [0; 0]);
        assert_eq!(chosen(1), [0]);
        assert_eq!(chosen(3), [0, 1, 2]);
        assert_eq!(chosen(5), [0, 1, 3, 4]);
        assert_eq!(chosen(12), [0, 4, 7, 11]);
    }
}
