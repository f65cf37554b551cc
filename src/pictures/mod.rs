//! The pictures that the program draws.
//!
//! | file | what it holds |
//! |---|---|
//! | `curves.rs` | `curves.png`: loss and accuracy over the epochs |
//! | `comparison.rs` | the accuracies of several runs over their epochs |
//! | `panel.rs` | a plot of either: its curves, with names and axes |
//! | `routes.rs` | `routing.png`: where a region of an image looks |
//! | `attention.rs` | what a point of an image attends to |
//! | `confusion.rs` | what the images of each class were taken for |
//! | `scaling.rs` | how the time of attention grows with the map |
//! | `gallery.rs` | a page of pictures: images, and attentions over them |
//! | `overlay.rs` | routed regions, and attention's weights, drawn over an image's pixels |
//! | `canvas.rs` | what all draw on: lines, text, and PNG |
//! | `DejaVuSans-subset.ttf` | the letters; its licence lies beside it |
//!
//! They share one style: a white page, muted grey for axes and captions, strong colours for the data. The colours are
//! those of Okabe and Ito, which people with any kind of colour vision tell apart.

pub mod attention;
mod canvas;
pub mod comparison;
pub mod confusion;
pub mod curves;
mod gallery;
mod overlay;
mod panel;
pub mod routes;
pub mod scaling;

pub use canvas::is_own;
pub use gallery::{COLUMNS, ROWS};

use image::Rgb;
use plotters::style::RGBColor;

const PAPER: RGBColor = RGBColor(255, 255, 255);
/// Headings.
const INK: RGBColor = RGBColor(32, 36, 40);
/// Captions and the numbers of an axis.
const GREY: RGBColor = RGBColor(104, 110, 118);
/// An axis.
const AXIS: RGBColor = RGBColor(168, 174, 180);
/// The lines of a grid.
const GRID: RGBColor = RGBColor(229, 232, 235);
const BLUE: RGBColor = RGBColor(0, 114, 178);
const VERMILION: RGBColor = RGBColor(213, 94, 0);
const GREEN: RGBColor = RGBColor(0, 158, 115);
const ORANGE: RGBColor = RGBColor(230, 159, 0);
const PURPLE: RGBColor = RGBColor(204, 121, 167);
const SKY: RGBColor = RGBColor(86, 180, 233);

/// The heights of text, in pixels.
const HEADING: f64 = 19.0;
const TEXT: f64 = 15.0;
const SMALL: f64 = 14.0;

/// A colour as an image has it.
const fn rgb(RGBColor(red, green, blue): RGBColor) -> Rgb<u8> {
    Rgb([red, green, blue])
}

/// The picture that `draw` saves at the path that it is given.
#[cfg(test)]
fn saved(draw: impl FnOnce(&std::path::Path) -> anyhow::Result<()>) -> anyhow::Result<image::RgbImage> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("picture.png");
    draw(&path)?;
    Ok(image::open(&path)?.into_rgb8())
}
