//! Files whose heads say more than their pixels are: what that takes is bounded.

use std::fs;

use crate::support::*;
use data::load_image;
use image::{DynamicImage, ImageFormat};

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
fn a_png_is_read_without_its_profile_however_large_that_is() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("profile.png");
    fs::write(&path, textured(5, 4, ImageFormat::Png)).unwrap();
    let plain = load_image(&path).unwrap();
    for bytes in [4_000_000, 40_000_000] {
        fs::write(&path, with_profile(bytes)).unwrap();
        assert_eq!(load_image(&path).unwrap(), plain, "{bytes}");
    }
}
