//! Files cut off or changed anywhere: an error that names the file, or a picture, but never a panic.

use std::fs;
use std::path::Path;

use crate::support::*;
use data::{Error, Split, load_image, open, size_of_image};
use image::{DynamicImage, GrayAlphaImage, GrayImage, ImageBuffer, ImageFormat, Rgb, RgbaImage};
use proptest::prelude::*;

/// Lengths from 0 to `full`: any of them, but mostly near the ends of the records.
fn length(record: usize, full: usize) -> impl Strategy<Value = usize> {
    let near = (0..=full / record, -2i64..=2).prop_map(move |(records, by)| (records * record) as i64 + by);
    prop_oneof![0..=full, near.prop_map(move |length| length.clamp(0, full as i64) as usize)]
}

/// WebP pictures of 20x12 as Pillow writes them (`fixtures/webp.py`): with losses; the same with transparency, and to
/// be turned by its EXIF data.
const LOSSY: &[u8] = include_bytes!("../fixtures/lossy.webp");
const TURNED: &[u8] = include_bytes!("../fixtures/turned.webp");
/// And one of two frames.
const ANIMATED: &[u8] = include_bytes!("../fixtures/animated.webp");

/// Pictures of all formats.
fn picture() -> impl Strategy<Value = Vec<u8>> {
    let textured = |format| Just(textured(50, 40, format));
    prop_oneof![
        textured(ImageFormat::Png),
        textured(ImageFormat::Jpeg),
        textured(ImageFormat::WebP),
        textured(ImageFormat::Bmp),
        textured(ImageFormat::Tiff),
        textured(ImageFormat::Pnm),
        Just(LOSSY.to_vec()),
        Just(TURNED.to_vec()),
    ]
}

fn cut(path: &Path, length: usize) {
    fs::File::options().write(true).open(path).unwrap().set_len(length as u64).unwrap();
}

/// Cuts `file` to `length` and opens the set: it must give just the whole records, or name the file.
fn check(root: &Path, file: &Path, split: Split, record: usize, length: usize) -> Result<(), TestCaseError> {
    cut(file, length);
    match open(root.to_str().unwrap(), split) {
        Ok(_) => prop_assert!(length > 0 && length.is_multiple_of(record)),
        Err(Error::Truncated { path, got, .. }) => {
            prop_assert!(length == 0 || !length.is_multiple_of(record));
            prop_assert_eq!((path.as_path(), got), (file, format!("{length} bytes")));
        }
        Err(other) => prop_assert!(false, "{}", other),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cifar10_cut_anywhere(batch in 1..=5, length in length(3073, 3 * 3073)) {
        let root = tempfile::tempdir().unwrap();
        let file = write_cifar10(root.path(), 3).join(format!("data_batch_{batch}.bin"));
        check(root.path(), &file, Split::Train, 3073, length)?;
    }

    #[test]
    fn cifar100_cut_anywhere(length in length(3074, 3 * 3074)) {
        let root = tempfile::tempdir().unwrap();
        let file = write_cifar100(root.path(), 3).join("test.bin");
        check(root.path(), &file, Split::Test, 3074, length)?;
    }

    #[test]
    fn class_names_cut_anywhere(length in 0usize..40) {
        let root = tempfile::tempdir().unwrap();
        let file = write_cifar10(root.path(), 1).join("batches.meta.txt");
        cut(&file, length);
        let error = open(root.path().to_str().unwrap(), Split::Test).err();
        let named = matches!(&error, Some(Error::Truncated { path, .. }) if *path == file);
        prop_assert!(named, "{:?}", error);
    }

    #[test]
    fn class_names_that_are_not_apart(one in 0usize..10, other in 0usize..9) {
        let root = tempfile::tempdir().unwrap();
        let file = write_cifar10(root.path(), 1).join("batches.meta.txt");
        let names = fs::read_to_string(&file).unwrap();
        let mut names: Vec<&str> = names.lines().collect();
        names[one] = names[(one + 1 + other) % 10];
        fs::write(&file, names.join("\n")).unwrap();
        let error = open(root.path().to_str().unwrap(), Split::Test).err().map(|error| error.to_string());
        prop_assert!(error.as_ref().is_some_and(|error| error.contains("names two classes")), "{:?}", error);
    }

    #[test]
    fn pictures_cut_anywhere(part in 0.0..1.0, bytes in picture()) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("picture");
        fs::write(&path, &bytes).unwrap();
        prop_assert!(load_image(&path).is_ok());
        // The last bytes of a PNG say no more than that it ends.
        let rest = if bytes.starts_with(b"\x89PNG") { 12 } else { 0 };
        cut(&path, ((bytes.len() - rest) as f64 * part) as usize);
        let Some(error) = load_image(&path).err() else { return Err(TestCaseError::fail("it was decoded")) };
        let named = matches!(&error, Error::Undecodable { path: named, .. } if *named == path);
        prop_assert!(named && !error.to_string().contains("whole buffer"), "{:?}", error);
    }

    #[test]
    fn pictures_changed_anywhere(changes in proptest::collection::vec((0.0..1.0, any::<u8>()), 1..8), bytes in picture()) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("picture");
        let mut bytes = bytes;
        for (part, value) in changes {
            let at = (bytes.len() as f64 * part) as usize;
            bytes[at] = value;
        }
        fs::write(&path, &bytes).unwrap();
        if let Err(error) = load_image(&path) {
            let told = matches!(error, Error::Undecodable { .. });
            prop_assert!(told, "{}", error);
        }
    }
}

/// A header that promises 4 billion pixels must not be believed, nor one of as many as it can say; nor one of half a
/// billion bits, which would be three times as many bytes as RGB.
#[test]
fn a_picture_too_large_is_refused_before_the_memory_is_taken() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("bomb.png");
    let rgb = [8, 2];
    let bits = [1, 0];
    for (side, kind) in [(65_536u32, rgb), (i32::MAX as u32, rgb), (22_000, bits)] {
        let mut bytes = textured(4, 4, ImageFormat::Png);
        bytes[16..24].copy_from_slice([side.to_be_bytes(); 2].as_flattened());
        bytes[24..26].copy_from_slice(&kind);
        let checksum = crc32fast::hash(&bytes[12..29]);
        bytes[29..33].copy_from_slice(&checksum.to_be_bytes());
        fs::write(&path, bytes).unwrap();
        let error = load_image(&path).unwrap_err();
        assert!(matches!(&error, Error::Undecodable { path: named, .. } if *named == path), "{error}");
        let said = error.to_string().to_lowercase();
        assert!(said.contains("limit") || said.contains("more than"), "for its size, not as damaged: {said}");
    }
}

/// A file larger than any that is read, though it takes no room on the disk.
#[test]
fn a_file_too_large_is_refused_before_it_is_read() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("huge.png");
    fs::write(&path, textured(4, 4, ImageFormat::Png)).unwrap();
    cut(&path, (256 << 20) + 100);
    let error = load_image(&path).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { path: named, .. } if *named == path), "{error}");
    assert!(error.to_string().contains("268435556 bytes, more than the 268435456"), "{error}");
}

/// Before a marker of a JPEG any number of bytes 0xFF may stand.
#[test]
fn a_jpeg_with_padded_markers_is_read_and_noticed_where_it_breaks_off() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("padded.jpg");
    let plain = textured(50, 40, ImageFormat::Jpeg);
    let padded = [&plain[..2], &[0xFF; 3], &plain[2..]].concat();
    fs::write(&path, &plain).unwrap();
    let expected = load_image(&path).unwrap();
    fs::write(&path, &padded).unwrap();
    assert_eq!(load_image(&path).unwrap(), expected);
    fs::write(&path, &padded[..padded.len() - 2]).unwrap();
    assert!(matches!(load_image(&path), Err(Error::Undecodable { .. })));
}

#[test]
fn the_end_of_a_thumbnail_is_not_that_of_its_jpeg() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("thumbnail.jpg");
    let plain = textured(50, 40, ImageFormat::Jpeg);
    let whole = [&plain[..2], b"\xFF\xE1\x00\x0Athumb\0\xFF\xD9", &plain[2..]].concat();
    fs::write(&path, &whole).unwrap();
    assert_eq!((load_image(&path).unwrap().height(), load_image(&path).unwrap().width()), (40, 50));
    // In the scan, behind the thumbnail, in it, and in the header of its segment.
    for length in [whole.len() - 2, whole.len() / 2, 14, 10, 6, 5, 4, 2] {
        fs::write(&path, &whole[..length]).unwrap();
        let said = load_image(&path).unwrap_err().to_string();
        assert!(said.ends_with("the JPEG data end before their end marker"), "{length} bytes: {said}");
    }
}

#[test]
fn other_formats_too_large_are_refused_before_the_memory_is_taken() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("bomb");
    let mut bitmap = textured(4, 4, ImageFormat::Bmp);
    bitmap[18..26].copy_from_slice([60_000u32.to_le_bytes(); 2].as_flattened());
    for bytes in [bitmap, b"P6 60000 60000 255 few".to_vec(), b"P4 4000000000 4000000000 few".to_vec()] {
        fs::write(&path, bytes).unwrap();
        let said = load_image(&path).unwrap_err().to_string();
        assert!(said.contains("take more than"), "for its size, not as damaged: {said}");
    }
}

/// Like that of a PNG: its largest extents, 16,383, are together more than a picture may have.
#[test]
fn a_webp_too_large_is_refused_before_the_memory_is_taken() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("bomb.webp");
    let mut bytes = textured(4, 4, ImageFormat::WebP);
    // After RIFF, its length, WEBP, VP8L, that length, and a signature: 14 bits of width - 1, and 14 of height - 1.
    assert_eq!((&bytes[8..16], bytes[20]), (&b"WEBPVP8L"[..], 0x2F));
    bytes[21..25].copy_from_slice(&(0x3FFE_u32 | 0x3FFE << 14).to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let said = load_image(&path).unwrap_err().to_string();
    assert!(said.contains("16383x16383 pixels take more than"), "{said}");
}

#[test]
fn other_formats_show_the_picture_that_a_png_is() {
    let root = tempfile::tempdir().unwrap();
    let load = |name: &str, format| {
        fs::write(root.path().join(name), textured(33, 20, format)).unwrap();
        load_image(root.path().join(name)).unwrap()
    };
    for format in [ImageFormat::WebP, ImageFormat::Bmp, ImageFormat::Tiff, ImageFormat::Pnm] {
        assert_eq!(load("a", format), load("a.png", ImageFormat::Png), "{format:?}");
    }
    let load = |bytes: &[u8]| {
        fs::write(root.path().join("b.webp"), bytes).unwrap();
        load_image(root.path().join("b.webp"))
    };
    let (lossy, turned) = (load(LOSSY).unwrap(), load(TURNED).unwrap());
    assert_eq!((lossy.height(), lossy.width()), (12, 20));
    assert_eq!((turned.height(), turned.width()), (20, 12));
    // Of orientation 6, as below.
    let (a, b) = (lossy.pixel(2, 15).unwrap(), turned.pixel(15, 9).unwrap());
    assert!(a.iter().zip(b).all(|(&a, b)| a.abs_diff(b) < 40), "{a:?} {b:?}");
    assert!(load(ANIMATED).unwrap_err().to_string().ends_with("it is an animation"));
}

#[test]
fn colours_of_32_bits_and_big_tiffs_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("a.tiff");
    for picture in [DynamicImage::new_rgb32f(3, 2), DynamicImage::new_rgba32f(3, 2)] {
        picture.save(&path).unwrap();
        let said = load_image(&path).unwrap_err().to_string();
        assert!(said.ends_with("its colours have 32 bits each: save it with 8 or 16"), "{said}");
    }
    for first in [b"II\x2b\0\x08\0\0\0", b"MM\0\x2b\0\x08\0\0"] {
        fs::write(&path, first).unwrap();
        let said = load_image(&path).unwrap_err().to_string();
        assert!(said.ends_with("it is a BigTIFF: save it as a TIFF"), "{said}");
    }
}

/// Grey, deeper and transparent pixels as red, green and blue; what hides a colour is ignored.
#[test]
fn pixels_of_other_kinds_have_the_colours_of_rgb() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("pixels.png");
    let load = |picture: DynamicImage| {
        picture.save(&path).unwrap();
        [0, 1].map(|column| load_image(&path).unwrap().pixel(0, column).unwrap())
    };
    let hidden = RgbaImage::from_raw(2, 1, vec![10, 200, 30, 0, 90, 5, 250, 128]).unwrap();
    assert_eq!(load(hidden.into()), [[10, 200, 30], [90, 5, 250]]);
    let grey = GrayImage::from_raw(2, 1, vec![7, 250]).unwrap();
    assert_eq!(load(grey.into()), [[7; 3], [250; 3]]);
    let hidden_grey = GrayAlphaImage::from_raw(2, 1, vec![7, 0, 250, 128]).unwrap();
    assert_eq!(load(hidden_grey.into()), [[7; 3], [250; 3]]);
    // 257 steps of sixteen bits are one of eight.
    let deep = ImageBuffer::<Rgb<u16>, _>::from_raw(2, 1, [0, 1, 255, 128, 10, 99].map(|x| x * 257).to_vec()).unwrap();
    assert_eq!(load(deep.into()), [[0, 1, 255], [128, 10, 99]]);
}

/// A chunk that says that it is larger than the file is not believed: its memory would be asked for.
#[test]
fn a_chunk_that_does_not_fit_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("chunk.webp");
    let exif = TURNED.windows(4).position(|four| four == b"EXIF").unwrap();
    let mut bytes = TURNED.to_vec();
    bytes[exif + 4..exif + 8].copy_from_slice(&0xFFFF_FFF0_u32.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let said = load_image(&path).unwrap_err().to_string();
    assert!(said.ends_with("the file ends before the length that it gives"), "{said}");
}

/// EXIF data as a JPEG has them, of orientation 6.
const BY_A_QUARTER: &[u8] = b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0";

/// In a PNG or WebP, EXIF data should begin with the byte order, but may begin as in a JPEG.
#[test]
fn a_png_or_webp_is_turned_upright_whatever_its_exif_data_begin_with() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("picture");
    let lying = textured(48, 24, ImageFormat::Png);
    for exif in [BY_A_QUARTER, &BY_A_QUARTER[6..]] {
        fs::write(&path, [&lying[..33], &png_chunk(b"eXIf", exif), &lying[33..]].concat()).unwrap();
        let image = load_image(&path).unwrap();
        assert_eq!((image.height(), image.width()), (48, 24));
        let at = TURNED.windows(4).position(|four| four == b"EXIF").unwrap();
        let chunk = [b"EXIF", &(exif.len() as u32).to_le_bytes()[..], exif].concat();
        let mut webp = [&TURNED[..at], &chunk].concat();
        webp[4..8].copy_from_slice(&(at as u32 + chunk.len() as u32 - 8).to_le_bytes());
        fs::write(&path, webp).unwrap();
        let image = load_image(&path).unwrap();
        assert_eq!((image.height(), image.width()), (20, 12));
    }
}

/// A phone held upright stores a lying picture and says so in its EXIF data.
#[test]
fn a_picture_is_turned_upright() {
    let jpeg = textured(48, 24, ImageFormat::Jpeg);
    let mut turned = vec![0xFF, 0xD8, 0xFF, 0xE1, 0, BY_A_QUARTER.len() as u8 + 2];
    turned.extend_from_slice(BY_A_QUARTER);
    turned.extend_from_slice(&jpeg[2..]);
    let root = tempfile::tempdir().unwrap();
    let load = |name: &str, bytes: &[u8]| {
        fs::write(root.path().join(name), bytes).unwrap();
        load_image(root.path().join(name)).unwrap()
    };
    let (lying, upright) = (load("lying.jpg", &jpeg), load("upright.jpg", &turned));
    assert_eq!((upright.height(), upright.width()), (48, 24));
    // Orientation 6: the stored picture is turned clockwise by a quarter, so its first row is the last column.
    assert_eq!(upright.pixel(7, 23), lying.pixel(0, 7));
}

#[test]
fn the_size_of_a_picture_is_in_its_first_bytes() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("picture");
    for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Bmp, ImageFormat::Tiff] {
        fs::write(&path, textured(50, 40, format)).unwrap();
        let image = load_image(&path).unwrap();
        assert_eq!(size_of_image(&path), Some([image.height(), image.width()]), "{format:?}");
    }
    fs::write(&path, "no picture").unwrap();
    assert_eq!([size_of_image(&path), size_of_image(root.path()), size_of_image(&path.join("gone"))], [None; 3]);
}
