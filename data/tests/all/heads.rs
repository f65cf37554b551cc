//! Files whose heads say more than their pixels are: what that takes is bounded.

use std::fs;

use crate::support::*;
use data::load_image;
use image::{DynamicImage, GrayImage, ImageFormat};

/// A PNG with a colour profile of about so many bytes, all of them 0.
fn with_profile(bytes: u32) -> Vec<u8> {
    let mut packed = std::io::Cursor::new(Vec::new());
    DynamicImage::new_luma8(bytes / 1000, 1000).write_to(&mut packed, ImageFormat::Png).unwrap();
    let packed = packed.into_inner();
    // The pixels of a PNG are packed as a profile is.
    let mut profile = b"name\0\0".to_vec();
    let mut at = 8;
    while at < packed.len() {
        let length = u32::from_be_bytes(packed[at..at + 4].try_into().unwrap()) as usize;
        if &packed[at + 4..at + 8] == b"IDAT" {
            profile.extend_from_slice(&packed[at + 8..at + 8 + length]);
        }
        at += 12 + length;
    }
    let plain = textured(5, 4, ImageFormat::Png);
    [&plain[..33], &png_chunk(b"iCCP", &profile), &plain[33..]].concat()
}

#[test]
fn a_png_is_read_whatever_its_profile_says() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("profile.png");
    fs::write(&path, textured(5, 4, ImageFormat::Png)).unwrap();
    let plain = load_image(&path).unwrap();
    for bytes in [4_000_000, 40_000_000] {
        fs::write(&path, with_profile(bytes)).unwrap();
        assert_eq!(load_image(&path).unwrap(), plain, "{bytes}");
    }
}

/// A TIFF with one strip.
struct Strip<'b> {
    sides: [u32; 2],
    bits: u32,
    samples: u32,
    /// 1 for none, 7 for JPEG.
    compression: u32,
    /// 1 for grey, 2 for RGB.
    photometric: u32,
    /// What a fourth colour is: 1 for alpha by which the others are multiplied, 2 for one by which they are not.
    extra: Option<u32>,
    bytes: &'b [u8],
}

impl Strip<'_> {
    fn file(&self) -> Vec<u8> {
        let (count, length) = (9 + u32::from(self.extra.is_some()), self.bytes.len() as u32);
        let bits = 8 + 2 + 12 * count + 4;
        let (width, height) = (self.sides[1], self.sides[0]);
        let tags = [
            [256, 4, 1, width],
            [257, 4, 1, height],
            [258, 3, 1, self.bits],
            [259, 3, 1, self.compression],
            [262, 3, 1, self.photometric],
            [273, 4, 1, bits],
            [277, 3, 1, self.samples],
            [278, 4, 1, height],
            [279, 4, 1, length],
        ];
        let mut file = [b"II*\0\x08\0\0\0", &(count as u16).to_le_bytes()[..]].concat();
        for [name, kind, count, value] in tags.into_iter().chain(self.extra.map(|kind| [338, 3, 1, kind])) {
            file.extend([name as u16, kind as u16].map(u16::to_le_bytes).as_flattened());
            file.extend([count, value].map(u32::to_le_bytes).as_flattened());
        }
        file.extend([0; 4]);
        file.extend(self.bytes);
        file
    }
}

/// Of a picture half of which shines through, half of its light is stored.
#[test]
fn colours_that_a_tiff_stores_multiplied_by_alpha_are_divided_by_it() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("alpha.tif");
    let stored = [100, 20, 0, 128, 10, 200, 30, 255];
    let load = |extra, bits, bytes: &[u8]| {
        let strip =
            Strip { sides: [1, 2], bits, samples: 4, compression: 1, photometric: 2, extra: Some(extra), bytes };
        fs::write(&path, strip.file()).unwrap();
        [0, 1].map(|column| load_image(&path).unwrap().pixel(0, column).unwrap())
    };
    assert_eq!(load(2, 8, &stored), [[100, 20, 0], [10, 200, 30]]);
    assert_eq!(load(1, 8, &stored), [[199, 40, 0], [10, 200, 30]]);
    let deep: Vec<u8> = stored.iter().flat_map(|&byte: &u8| [byte, byte]).collect();
    assert_eq!(load(1, 16, &deep), [[199, 40, 0], [10, 200, 30]]);
}

/// The JPEG in a TIFF has a size of its own, which the decoder believes.
#[test]
fn a_jpeg_in_a_tiff_is_refused_where_it_is_larger_than_any_picture() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("jpeg.tif");
    let mut jpeg = std::io::Cursor::new(Vec::new());
    GrayImage::from_fn(16, 8, |x, y| image::Luma([(x * 9 + y) as u8])).write_to(&mut jpeg, ImageFormat::Jpeg).unwrap();
    let jpeg = jpeg.into_inner();
    fs::write(&path, &jpeg).unwrap();
    let plain = load_image(&path).unwrap();
    let load = |bytes: &[u8]| {
        let (compression, photometric) = (7, 1);
        let strip = Strip { sides: [8, 16], bits: 8, samples: 1, compression, photometric, extra: None, bytes };
        fs::write(&path, strip.file()).unwrap();
        load_image(&path)
    };
    assert_eq!(load(&jpeg).unwrap(), plain);
    let frame = jpeg.windows(2).position(|two| two == [0xFF, 0xC0]).unwrap();
    let (mut large, mut hidden) = (jpeg.clone(), jpeg.clone());
    large[frame + 5..frame + 9].fill(0xFF);
    hidden.insert(frame, 0);
    for (bytes, cause) in [(large, "save it without compression"), (hidden, "its JPEG data are damaged")] {
        let said = load(&bytes).unwrap_err().to_string();
        assert!(said.ends_with(cause), "{said}");
    }
}
