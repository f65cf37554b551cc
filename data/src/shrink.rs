//! Pictures made smaller, once and for all: a model sees few of a photograph's pixels, and decoding the others takes
//! longer than training on them.

use std::path::Path;

use image::codecs::{jpeg::JpegEncoder, png::PngEncoder, webp::WebPEncoder};
use image::{ExtendedColorType, ImageEncoder, ImageFormat};

use crate::picture::{MAX_FILE, decode_image, read_file};
use crate::resample::{Filter, Window, resize};
use crate::{Error, Result};

/// Hardly a trace of the compression is left at this quality, of up to 100.
const JPEG_QUALITY: u8 = 95;
/// The longest side of a picture that is made smaller.
const LONGEST: usize = 1 << 20;

/// A picture file with the shorter side resized to `side` pixels, bicubically, and the longer one in proportion: an
/// upright RGB picture, as JPEG where it is named `.jpg`, `.jpeg`, `.jpe` or `.jfif`, without loss as WebP where it is
/// named `.webp`, and else as PNG (formats are detected from the content, so a file named `.tif` may be a PNG). If the
/// shorter side has no more pixels than that, the file is returned as it is.
///
/// Errors: those of [`load_image`](crate::load_image), [`Error::Unsupported`] also where a picture that is to be
/// smaller has a side of more than a million pixels, or will have more than its format can, and [`Error::Setting`]
/// where `side` is 0.
pub fn shrunk(path: &Path, side: usize) -> Result<Vec<u8>> {
    if side == 0 {
        return Err(Error::setting("side", "0 is no size"));
    }
    let bytes = read_file(path, MAX_FILE, "an image file")?;
    let image = decode_image(&bytes, path)?;
    let (height, width) = (image.height(), image.width());
    let shorter = height.min(width);
    if shorter <= side {
        return Ok(bytes);
    }
    // The weights of each pixel of a side are held, which of a strip two pixels high are more than the strip.
    if height.max(width) > LONGEST {
        let what = format!("it has {width}x{height} pixels; no side of more than {LONGEST} is made smaller: cut it up");
        return Err(Error::Unsupported { path: path.to_owned(), what });
    }
    let scaled = |length: usize| (length as f64 * side as f64 / shorter as f64).round() as usize;
    let (rows, columns) = (scaled(height), scaled(width));
    let format = match path.extension() {
        Some(extension) if extension.eq_ignore_ascii_case("jpe") => ImageFormat::Jpeg,
        _ => ImageFormat::from_path(path).unwrap_or(ImageFormat::Png),
    };
    let most = match format {
        ImageFormat::Jpeg => 65535,
        ImageFormat::WebP => 16383,
        _ => usize::MAX,
    };
    if rows.max(columns) > most {
        let what =
            format!("at that size it has {columns}x{rows} pixels, more than {format:?} files can have; name it .png");
        return Err(Error::Unsupported { path: path.to_owned(), what });
    }
    let pixels = resize(&image, Window::whole([height, width]), [rows, columns], Filter::Bicubic);
    let mut smaller = vec![];
    let (columns, rows, colours) = (columns as u32, rows as u32, ExtendedColorType::Rgb8);
    match format {
        ImageFormat::Jpeg => {
            JpegEncoder::new_with_quality(&mut smaller, JPEG_QUALITY).write_image(&pixels, columns, rows, colours)
        }
        ImageFormat::WebP => WebPEncoder::new_lossless(&mut smaller).write_image(&pixels, columns, rows, colours),
        _ => PngEncoder::new(&mut smaller).write_image(&pixels, columns, rows, colours),
    }
    .map_err(|cause| Error::Unsupported { path: path.to_owned(), what: format!("it cannot be written: {cause}") })?;
    Ok(smaller)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load_image;
    use std::fs;

    /// The height and width of a picture of so many rows and columns once it is shrunk.
    fn size(name: &str, [rows, columns]: [u32; 2], side: usize) -> [usize; 2] {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join(name);
        let picture = image::RgbImage::from_pixel(columns, rows, image::Rgb([9, 90, 200]));
        picture.save_with_format(&path, ImageFormat::Png).unwrap();
        fs::write(&path, shrunk(&path, side).unwrap()).unwrap();
        let image = load_image(&path).unwrap();
        [image.height(), image.width()]
    }

    #[test]
    fn the_longer_side_is_rounded_to_the_nearest_pixel() {
        assert_eq!(size("a.png", [5, 8], 3), [3, 5]); // of 4.8
        assert_eq!(size("a.png", [7, 5], 3), [4, 3]); // of 4.2
        assert_eq!(size("a.jpg", [2, 60_000], 1), [1, 30_000]);
        assert_eq!(size("a.webp", [30_000, 2], 1), [15_000, 1]);
    }

    #[test]
    fn a_side_of_over_a_million_pixels_is_refused_where_it_would_be_made_smaller() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a.png");
        image::RgbImage::new(2, LONGEST as u32 + 1).save(&path).unwrap();
        let said = shrunk(&path, 1).unwrap_err().to_string();
        assert!(said.contains("2x1048577 pixels; no side of more than 1048576 is made smaller"), "{said}");
        assert!(shrunk(&path, 2).is_ok());
        assert_eq!(size("a.png", [2, LONGEST as u32], 1), [1, LONGEST / 2]);
    }

    #[test]
    fn a_picture_that_is_small_enough_stays_as_it_is_and_0_is_no_size() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a.jpg");
        let picture = image::RgbImage::from_fn(30, 20, |x, y| image::Rgb([(x * 7) as u8, (y * 5) as u8, 99]));
        picture.save(&path).unwrap();
        let bytes = fs::read(&path).unwrap();
        for side in [20, 21, usize::MAX] {
            assert!(shrunk(&path, side).unwrap() == bytes, "{side}");
        }
        assert!(shrunk(&path, 19).unwrap() != bytes);
        assert!(matches!(shrunk(&path, 0), Err(Error::Setting { name: "side", .. })));
    }
}
