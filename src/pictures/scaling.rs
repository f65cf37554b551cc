//! How time grows with the size of a map.

use super::canvas::{Canvas, Point, middle};
use super::{AXIS, BLUE, GREY, GRID, HEADING, INK, SMALL, TEXT, VERMILION};
use anyhow::Result;
use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;
use std::path::Path;

const WIDTH: u32 = 760;
const HEIGHT: u32 = 500;

/// A measured curve.
#[derive(Debug)]
pub struct Growth {
    /// What was measured.
    pub name: &'static str,
    /// Tokens and seconds, all of them positive.
    pub points: Vec<(f64, f64)>,
    /// The exponent e of seconds ~ tokens^e, if it is known.
    pub exponent: Option<f64>,
}

/// Draws two curves over logarithmic axes as a PNG of 760x500 pixels, with their exponents in the legend.
///
/// Errors: where the file cannot be written.
pub fn draw(curves: [Growth; 2], caption: &str, path: &Path) -> Result<()> {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let frame =
        Frame { tokens: decades(points().map(|point| point.0)), seconds: decades(points().map(|point| point.1)) };
    let mut canvas = Canvas::new(WIDTH, HEIGHT)?;
    canvas.text("Time of forward and backward", (Frame::LEFT, 36.0), HPos::Left, HEADING, INK)?;
    canvas.text(caption, (Frame::LEFT, 59.0), HPos::Left, TEXT, GREY)?;
    frame.draw(&mut canvas)?;
    for (index, (curve, colour)) in curves.iter().zip([BLUE, VERMILION]).enumerate() {
        curve.draw(&mut canvas, &frame, colour)?;
        let baseline = Frame::TOP + 24.0 + 22.0 * index as f64;
        let exponent = curve.exponent.map_or(String::new(), |exponent| format!(": tokens^{exponent:.2}"));
        canvas.line(&[(Frame::LEFT + 14.0, baseline - 5.0), (Frame::LEFT + 38.0, baseline - 5.0)], colour, 2.0)?;
        canvas.text(&format!("{}{exponent}", curve.name), (Frame::LEFT + 46.0, baseline), HPos::Left, TEXT, colour)?;
    }
    canvas.save(path)
}

impl Growth {
    fn draw(&self, canvas: &mut Canvas, frame: &Frame, colour: RGBColor) -> Result<()> {
        let places: Vec<Point> = self.points.iter().map(|&point| frame.at(point)).collect();
        canvas.line(&places, colour, 2.0)?;
        places.iter().try_for_each(|&place| canvas.dot(place, 4.0, colour))
    }
}

/// What the axes span, as powers of ten.
struct Frame {
    tokens: [i32; 2],
    seconds: [i32; 2],
}

impl Frame {
    const LEFT: f64 = 84.0;
    const RIGHT: f64 = WIDTH as f64 - 56.0;
    const TOP: f64 = 80.0;
    const BOTTOM: f64 = HEIGHT as f64 - 62.0;

    fn at(&self, (tokens, seconds): Point) -> Point {
        let share = |value: f64, [low, high]: [i32; 2]| (value.log10() - f64::from(low)) / f64::from(high - low);
        let x = Self::LEFT + share(tokens, self.tokens) * (Self::RIGHT - Self::LEFT);
        (x, Self::BOTTOM - share(seconds, self.seconds) * (Self::BOTTOM - Self::TOP))
    }

    fn draw(&self, canvas: &mut Canvas) -> Result<()> {
        for power in self.seconds[0]..=self.seconds[1] {
            let (_, y) = self.at((1.0, 10f64.powi(power)));
            canvas.line(&[(Self::LEFT, y), (Self::RIGHT, y)], GRID, 1.0)?;
            canvas.text(&seconds(power), (Self::LEFT - 10.0, middle(y, SMALL)), HPos::Right, SMALL, GREY)?;
        }
        for power in self.tokens[0]..=self.tokens[1] {
            let (x, _) = self.at((10f64.powi(power), 1.0));
            canvas.line(&[(x, Self::TOP), (x, Self::BOTTOM + 4.0)], GRID, 1.0)?;
            canvas.text(&thousands(power), (x, Self::BOTTOM + 21.0), HPos::Center, SMALL, GREY)?;
        }
        canvas.line(&[(Self::LEFT, Self::BOTTOM), (Self::RIGHT, Self::BOTTOM)], AXIS, 1.0)?;
        let centre = (Self::LEFT + Self::RIGHT) / 2.0;
        canvas.text("tokens of the map", (centre, Self::BOTTOM + 45.0), HPos::Center, SMALL, GREY)
    }
}

/// The powers of ten below and above all values.
fn decades(values: impl Iterator<Item = f64>) -> [i32; 2] {
    let logs = values.map(f64::log10).filter(|log| log.is_finite());
    let (low, high) = logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
    let low = if low <= high { low.floor() as i32 } else { 0 };
    [low, (high.ceil() as i32).max(low + 1)]
}

/// A power of ten seconds, in words.
fn seconds(power: i32) -> String {
    match power {
        ..0 => format!("{} ms", 10f64.powi(power + 3)),
        _ => format!("{} s", 10f64.powi(power)),
    }
}

/// A power of ten with thousands separators.
fn thousands(power: i32) -> String {
    match power {
        ..3 => format!("{}", 10f64.powi(power)),
        3..6 => format!("{},000", 10f64.powi(power - 3)),
        _ => format!("{},000,000", 10f64.powi(power - 6)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{rgb, saved};
    use super::*;
    use image::Rgb;

    #[test]
    fn both_curves_are_inside_the_page() -> Result<()> {
        let growth = |e: f64, count: i32| Growth {
            name: "something that grows",
            points: (0..count).map(|i| 784.0 * 4f64.powi(i)).map(|x| (x, 1e-7 * x.powf(e))).collect(),
            exponent: (count > 1).then_some(e),
        };
        for count in [0, 1, 5] {
            let page = saved(|path| draw([growth(1.3, count), growth(2.0, count)], "64 channels", path))?;
            assert_eq!(page.dimensions(), (WIDTH, HEIGHT));
            for colour in [BLUE, VERMILION] {
                let drawn = page.pixels().filter(|&&pixel| pixel == rgb(colour)).count();
                assert!(drawn > 40 + 20 * count as usize, "{drawn} pixels");
            }
            let inside = |x: u32, y: u32| (8..WIDTH - 8).contains(&x) && (8..HEIGHT - 8).contains(&y);
            assert!(page.enumerate_pixels().all(|(x, y, pixel)| inside(x, y) || *pixel == Rgb([255; 3])));
        }
        Ok(())
    }

    #[test]
    fn powers_of_ten_are_written_out() {
        assert_eq!([-5, -4, -3, -1, 0, 1].map(seconds), ["0.01 ms", "0.1 ms", "1 ms", "100 ms", "1 s", "10 s"]);
        assert_eq!([2, 3, 5, 6].map(thousands), ["100", "1,000", "100,000", "1,000,000"]);
    }
}
