//! A page to draw on, and its way into a PNG file.

use super::{PAPER, rgb};
use ab_glyph::{Font, FontRef, GlyphId};
use anyhow::{Context, Result, anyhow};
use image::RgbImage;
use image::imageops::{self, FilterType};
use plotters::backend::BitMapBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, IntoFont, RGBColor, TextStyle, register_font};
use png::{BitDepth, ColorType, Encoder};
use std::path::Path;
use std::sync::OnceLock;
use unicode_normalization::UnicodeNormalization;

/// Everything is drawn this many times larger and then averaged down, which smooths every edge.
pub(super) const SCALE: u32 = 3;

const FONT: &str = "pictures";

/// The PNG text chunk, keyword and text, that marks a picture as drawn by this program.
const PRODUCER: (&str, &str) = ("Software", "biformer");

/// Latin, Greek and Cyrillic letters, digits and signs, unhinted. Each glyph has an invisible point at its origin:
/// plotters places the left edge of a glyph's outline at the pen position, so without that point the space before each
/// letter (its left side bearing) would be lost.
static FONT_FILE: &[u8] = include_bytes!("DejaVuSans-subset.ttf");

/// A point of the page, in pixels from its top left corner.
pub(super) type Point = (f64, f64);

/// The baseline of digits whose middle is at y.
pub(super) fn middle(y: f64, height: f64) -> f64 {
    y + 0.31 * height
}

/// A white page. Lengths are in pixels of the finished picture.
pub(super) struct Canvas {
    pixels: RgbImage,
}

impl Canvas {
    /// An empty page.
    pub fn new(width: u32, height: u32) -> Result<Self> {
        ensure_font()?;
        Ok(Self { pixels: RgbImage::from_pixel(width * SCALE, height * SCALE, rgb(PAPER)) })
    }

    /// A line through points, with round joints.
    pub fn line(&mut self, points: &[Point], colour: RGBColor, width: f64) -> Result<()> {
        let points: Vec<_> = points.iter().copied().map(enlarged).collect();
        let area = self.area();
        // Segment by segment: plotters fills the outline of a whole polyline, which leaves holes where the line turns
        // back within its own width.
        for piece in points.windows(2) {
            area.draw(&PathElement::new(piece, colour.stroke_width(large(width) as u32)))?;
        }
        for &joint in points.iter().skip(1).take(points.len().saturating_sub(2)) {
            area.draw(&Circle::new(joint, large(width / 2.0), colour.filled()))?;
        }
        Ok(())
    }

    /// A filled circle.
    pub fn dot(&mut self, centre: Point, radius: f64, colour: RGBColor) -> Result<()> {
        Ok(self.area().draw(&Circle::new(enlarged(centre), large(radius), colour.filled()))?)
    }

    /// A filled rectangle.
    pub fn rectangle(&mut self, corner: Point, size: Point, colour: RGBColor) -> Result<()> {
        let corners = [enlarged(corner), enlarged((corner.0 + size.0, corner.1 + size.1))];
        Ok(self.area().draw(&Rectangle::new(corners, colour.filled()))?)
    }

    /// A line of text of the given height. `align` says whether its baseline starts at, is centred on or ends at the
    /// point. Characters that the font lacks become question marks.
    pub fn text(&mut self, text: &str, (x, baseline): Point, align: HPos, height: f64, colour: RGBColor) -> Result<()> {
        let style = style(height).color(&colour).pos(Pos::new(align, VPos::Top));
        // With this font, plotters sets the baseline half a text's height below the top.
        let top = baseline - height / 2.0;
        Ok(self.area().draw(&Text::new(drawable(text)?, enlarged((x, top)), style))?)
    }

    /// A picture whose pixels are [`SCALE`] times finer than those of the page.
    pub fn picture(&mut self, picture: &RgbImage, corner: Point) {
        let (x, y) = enlarged(corner);
        imageops::replace(&mut self.pixels, picture, x.into(), y.into());
    }

    /// Writes the page as a PNG file with this program's mark.
    pub fn save(&self, path: &Path) -> Result<()> {
        let [width, height] = [self.pixels.width(), self.pixels.height()].map(|side| side / SCALE);
        let page = imageops::thumbnail(&self.pixels, width, height);
        let mut bytes = vec![];
        let mut encode = || {
            let mut encoder = Encoder::new(&mut bytes, width, height);
            encoder.set_color(ColorType::Rgb);
            encoder.set_depth(BitDepth::Eight);
            encoder.add_text_chunk(PRODUCER.0.into(), PRODUCER.1.into())?;
            encoder.write_header()?.write_image_data(&page)
        };
        encode().context("the picture cannot be encoded as PNG")?;
        Ok(model::write_safely(path, &bytes)?)
    }

    fn area(&mut self) -> DrawingArea<BitMapBackend<'_>, Shift> {
        let size = self.pixels.dimensions();
        BitMapBackend::with_buffer(&mut self.pixels, size).into_drawing_area()
    }
}

/// Whether a file that begins with these bytes is a picture drawn by this program.
pub fn is_own(beginning: &[u8]) -> bool {
    let (keyword, text) = PRODUCER;
    let chunk = [b"tEXt", keyword.as_bytes(), b"\0", text.as_bytes()].concat();
    beginning.starts_with(b"\x89PNG") && beginning.windows(chunk.len()).any(|bytes| bytes == chunk)
}

/// Makes the font known, once.
fn ensure_font() -> Result<()> {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    let registered = *REGISTERED.get_or_init(|| register_font(FONT, FontStyle::Normal, FONT_FILE).is_ok());
    registered.then_some(()).ok_or_else(|| anyhow!("the built-in font cannot be read"))
}

/// A text as it can be drawn: accented letters are composed into one character each (NFC), and characters that the font
/// lacks become question marks.
fn drawable(text: &str) -> Result<String> {
    let font = FontRef::try_from_slice(FONT_FILE).context("the built-in font")?;
    let is_known = |letter: char| font.glyph_id(letter) != GlyphId::default();
    Ok(text.nfc().map(|letter| if is_known(letter) { letter } else { '?' }).collect())
}

/// The width of a line of text of some height.
pub(super) fn text_width(text: &str, height: f64) -> Result<f64> {
    ensure_font()?;
    let (width, _) = style(height).font.box_size(&drawable(text)?).map_err(|error| anyhow!("{error}"))?;
    Ok(f64::from(width) / f64::from(SCALE))
}

/// A line of text of the given height, shortened with an ellipsis if it is wider than `width`.
pub(super) fn shortened(text: &str, height: f64, width: f64) -> Result<String> {
    let mut text = text.to_owned();
    let fits = |text: &str| Ok::<_, anyhow::Error>(text_width(text, height)? <= width);
    if fits(&text)? {
        return Ok(text);
    }
    while !text.is_empty() && !fits(&format!("{text}…"))? {
        text.pop();
    }
    Ok(text + "…")
}

/// The same, shortened at its front.
pub(super) fn end_of(text: &str, height: f64, width: f64) -> Result<String> {
    let turned = |text: &str| text.chars().rev().collect::<String>();
    let composed: String = text.nfc().collect();
    Ok(turned(&shortened(&turned(&composed), height, width)?))
}

/// An image scaled to the largest size that fits into a square of the page, at the page's finer resolution. The pixels
/// of a small image stay visible as squares; larger images are interpolated.
pub(super) fn fitted(image: &RgbImage, side: u32) -> RgbImage {
    let (width, height) = image.dimensions();
    let longer = width.max(height);
    let few = longer <= side / 2;
    let side = side * SCALE;
    if few {
        let times = side / longer;
        return imageops::resize(image, width * times, height * times, FilterType::Nearest);
    }
    let share = |extent: u32| ((u64::from(extent) * u64::from(side) / u64::from(longer)) as u32).max(1);
    imageops::resize(image, share(width), share(height), FilterType::Triangle)
}

fn style(height: f64) -> TextStyle<'static> {
    (FONT, height * f64::from(SCALE)).into_font().into()
}

fn large(length: f64) -> i32 {
    (length * f64::from(SCALE)).round() as i32
}

fn enlarged((x, y): Point) -> (i32, i32) {
    (large(x), large(y))
}

#[cfg(test)]
mod tests {
    use super::super::{INK, saved};
    use super::*;
    use image::Rgb;

    #[test]
    fn what_is_drawn_is_where_it_should_be() -> Result<()> {
        let mut canvas = Canvas::new(80, 60)?;
        canvas.line(&[(10.0, 10.0), (40.0, 10.0), (10.0, 10.0)], INK, 2.0)?;
        canvas.dot((60.0, 30.0), 5.0, INK)?;
        canvas.rectangle((10.0, 40.0), (20.0, 10.0), INK)?;
        let page = saved(|path| canvas.save(path))?;
        assert_eq!(page.dimensions(), (80, 60));
        let (ink, paper) = (rgb(INK), Rgb([255; 3]));
        for inside in [(25, 10), (60, 30), (10, 40), (29, 49), (20, 45)] {
            assert_eq!(page[inside], ink, "{inside:?}");
        }
        for outside in [(25, 7), (25, 13), (52, 30), (68, 30), (8, 45), (32, 45), (20, 38), (20, 52)] {
            assert_eq!(page[outside], paper, "{outside:?}");
        }
        Ok(())
    }

    #[test]
    fn text_stands_on_its_baseline_and_as_wide_as_it_says() -> Result<()> {
        let mut canvas = Canvas::new(200, 60)?;
        canvas.text("HAMBURG", (20.0, 40.0), HPos::Left, 20.0, INK)?;
        let dark = canvas.pixels.enumerate_pixels().filter(|(.., pixel)| pixel.0[0] < 128);
        let (mut left, mut right, mut low) = (u32::MAX, 0, 0);
        for (x, y, _) in dark {
            (left, right, low) = (left.min(x), right.max(x), low.max(y));
        }
        assert!((40 * SCALE).abs_diff(low) <= SCALE, "the baseline is at {low}");
        // H keeps its distance from the pen, which plotters by itself would lose.
        assert!(left > 20 * SCALE, "it begins at {left}");
        let end = (20.0 + text_width("HAMBURG", 20.0)?) * f64::from(SCALE);
        assert!((end - f64::from(right)).abs() <= f64::from(2 * SCALE), "it ends at {right}, not {end}");
        Ok(())
    }

    /// Some letters of each alphabet; an accent that is a separate combining character, as macOS writes it; characters
    /// that the font lacks.
    #[test]
    fn letters_that_the_font_has_are_drawn() -> Result<()> {
        for (text, drawn) in [
            ("Größe Ærø Łódź İstanbul Tiếng Việt", "Größe Ærø Łódź İstanbul Tiếng Việt"),
            ("Ζάκυνθος Україна ґрунт", "Ζάκυνθος Україна ґрунт"),
            ("A\u{308}pfel", "Äpfel"),
            ("漢字 🐱 \u{7}", "?? ? ?"),
        ] {
            assert_eq!(drawable(text)?, drawn);
        }
        Ok(())
    }

    #[test]
    fn a_long_name_is_shortened() -> Result<()> {
        assert_eq!(shortened("stages.2.17.attn", 15.0, 192.0)?, "stages.2.17.attn");
        let short = shortened(&"attention.".repeat(9), 15.0, 192.0)?;
        assert!(short.starts_with("attention.att") && short.ends_with('…') && text_width(&short, 15.0)? <= 192.0);
        let short = end_of(&format!("{}A\u{308}7", "attention.".repeat(9)), 15.0, 192.0)?;
        assert!(short.starts_with('…') && short.ends_with("ion.Ä7") && text_width(&short, 15.0)? <= 192.0, "{short}");
        Ok(())
    }

    #[test]
    fn images_of_any_shape_fit_into_their_square() {
        let full = 192 * SCALE;
        for (width, height, expected) in [
            (32, 32, (full, full)),
            (28, 28, (560, 560)),
            (1, 1, (full, full)),
            (224, 224, (full, full)),
            (640, 480, (full, full * 3 / 4)),
            (3000, 1, (full, 1)),
        ] {
            assert_eq!(fitted(&RgbImage::new(width, height), 192).dimensions(), expected, "{width}x{height}");
        }
    }
}
