//! What the first directory of a TIFF file tells before its decoder reads it: how much memory that takes, and how
//! colours are meant.

use image::DynamicImage;

use crate::formats::{TOO_MANY_PARTS, components_in_several_scans, frames, has_too_many_parts, segments};
use crate::picture::CUT_OFF;

/// The tags whose values the decoder reads.
const READ: [u16; 24] = [
    256, 257, 258, 259, 262, 266, 273, 274, 277, 278, 279, 284, 317, 320, 322, 323, 324, 325, 338, 339, 347, 529, 530,
    532,
];
const COMPRESSION: u16 = 259;
const EXTRA_SAMPLES: u16 = 338;
const JPEG_TABLES: u16 = 347;
/// Where strips, or tiles, begin, and how many bytes they have.
const CHUNKS: [[u16; 2]; 2] = [[273, 279], [324, 325]];

/// The values of a tag: where they lie, how many bytes each has, and how many there are.
#[derive(Clone, Copy)]
struct Values {
    at: usize,
    size: usize,
    count: usize,
}

/// A number of so many bytes.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<usize> {
    let number = bytes.get(at..at.checked_add(size)?)?;
    let append = |sum, byte: &u8| sum << 8 | usize::from(*byte);
    Some(if bytes.starts_with(b"MM") { number.iter().fold(0, append) } else { number.iter().rev().fold(0, append) })
}

/// The tags of the first directory, and their values. They end where the file does; those of unknown kinds are passed
/// over, as by the decoder.
fn tags(bytes: &[u8]) -> impl Iterator<Item = (u16, Values)> {
    let directory = number(bytes, 4, 4).unwrap_or(usize::MAX);
    let count = number(bytes, directory, 2).unwrap_or(0);
    let tags = (0..count).map_while(move |place| {
        let at = directory + 2 + 12 * place;
        let [tag, kind] = [at, at + 2].map(|at| number(bytes, at, 2));
        let size = match kind? {
            1 | 2 | 6 | 7 => 1,
            3 | 8 => 2,
            4 | 9 | 11 | 13 => 4,
            5 | 10 | 12 | 16 | 17 | 18 => 8,
            _ => 0,
        };
        let count = number(bytes, at + 4, 4)?;
        // Those of no more than four bytes lie where others say where they lie.
        let is_here = count.saturating_mul(size) <= 4;
        Some((tag? as u16, Values { at: if is_here { at + 8 } else { number(bytes, at + 8, 4)? }, size, count }))
    });
    tags.filter(|(_, values)| values.size > 0)
}

/// The values of a tag, of which the last of the same name counts, as for the decoder.
fn values(bytes: &[u8], name: u16) -> Option<Values> {
    tags(bytes).filter(|&(tag, _)| tag == name).last().map(|(_, values)| values)
}

/// The first values of a tag as numbers, as many as lie in the file.
fn numbers(bytes: &[u8], name: u16) -> impl Iterator<Item = usize> {
    let Values { at, size, count } = values(bytes, name).unwrap_or(Values { at: 0, size: 1, count: 0 });
    (0..count).map_while(move |place| number(bytes, place.checked_mul(size)?.checked_add(at)?, size))
}

/// How much memory the decoder may ask for to read the directory: 32 bytes for each value of a tag that it reads, up to
/// a limit, and of two tags it keeps 8.
pub(crate) fn memory_of_directory(bytes: &[u8]) -> u64 {
    const LIMIT: u64 = 256 << 20;
    let read = tags(bytes).filter(|(tag, _)| READ.contains(tag));
    let most = read.map(|(_, values)| 32 * values.count as u64).max().unwrap_or(0).min(LIMIT);
    most + most / 2
}

/// How much memory the decoder takes for a strip or tile that is a JPEG, which may be larger than the picture is.
///
/// Errors: together they decode to more than `most` bytes, as many strips may be one and the same large JPEG, which
/// would take hours; one is damaged, or not all there.
pub(crate) fn memory_of_jpegs(bytes: &[u8], most: u64) -> Result<u64, &'static str> {
    const JPEG: usize = 7;
    if numbers(bytes, COMPRESSION).next() != Some(JPEG) {
        return Ok(0);
    }
    if values(bytes, JPEG_TABLES).is_some_and(|tables| !are_tables(bytes, tables)) {
        return Err("its JPEG tables are damaged");
    }
    let (mut largest, mut all) = (0, 0_u64);
    for (begin, length) in CHUNKS.iter().flat_map(|tags| numbers(bytes, tags[0]).zip(numbers(bytes, tags[1]))) {
        let jpeg = begin.checked_add(length).and_then(|end| bytes.get(begin..end)).ok_or(CUT_OFF)?;
        let has_scan = segments(jpeg, |_, _| {}).is_some_and(|scan| jpeg.get(scan..scan + 2) == Some(&[0xFF, 0xDA]));
        let (true, &[[width, height, colours]]) = (has_scan, &frames(jpeg)[..]) else {
            return Err("its JPEG data are damaged");
        };
        if has_too_many_parts(jpeg) {
            return Err(TOO_MANY_PARTS);
        }
        all = all.saturating_add(width * height * colours);
        if all > most {
            return Err("its JPEG data have more pixels than are read: save it without compression");
        }
        let coefficients = 2 * u64::from(components_in_several_scans(jpeg).unwrap_or(0));
        largest = largest.max(width * height * (colours + coefficients) + length as u64);
    }
    Ok(largest)
}

/// Whether these bytes are segments without a frame or a scan. The decoder puts them before each JPEG, without the last
/// two bytes, a marker of the end.
fn are_tables(bytes: &[u8], Values { at, count, .. }: Values) -> bool {
    let tables = at.checked_add(count).and_then(|end| bytes.get(at..end.saturating_sub(2)));
    tables.is_some_and(|tables| segments(tables, |_, _| {}) == Some(tables.len()) && frames(tables).is_empty())
}

/// Whether colours are stored as they look before black: multiplied by their alpha.
pub(crate) fn is_premultiplied(bytes: &[u8]) -> bool {
    const ASSOCIATED: usize = 1;
    numbers(bytes, EXTRA_SAMPLES).next() == Some(ASSOCIATED)
}

/// Divides colours by their alpha.
pub(crate) fn divide_by_alpha(picture: &mut DynamicImage) {
    match picture {
        DynamicImage::ImageRgba8(pixels) => pixels.pixels_mut().for_each(|pixel| {
            pixel.0 = divided(pixel.0.map(u32::from), 255).map(|value| value as u8);
        }),
        DynamicImage::ImageRgba16(pixels) => pixels.pixels_mut().for_each(|pixel| {
            pixel.0 = divided(pixel.0.map(u32::from), 65535).map(|value| value as u16);
        }),
        _ => {}
    }
}

/// A pixel whose colours are divided by its alpha, rounded to the nearest; where that is 0, nobody knows the colours.
fn divided([red, green, blue, alpha]: [u32; 4], white: u32) -> [u32; 4] {
    let divided = |colour: u32| (colour * white + alpha / 2).checked_div(alpha).unwrap_or(colour).min(white);
    [divided(red), divided(green), divided(blue), alpha]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file whose directory has these tags: a name, a kind, a count, and a value or where they lie.
    fn file(tags: &[[u32; 4]]) -> Vec<u8> {
        let mut bytes = [b"II*\0\x08\0\0\0", &(tags.len() as u16).to_le_bytes()[..]].concat();
        for &[name, kind, count, value] in tags {
            bytes.extend([name as u16, kind as u16].map(u16::to_le_bytes).as_flattened());
            bytes.extend([count, value].map(u32::to_le_bytes).as_flattened());
        }
        bytes
    }

    #[test]
    fn values_are_counted_up_to_what_the_decoder_believes() {
        let needs = [[1, 2], [1000, 2], [1, u32::MAX]].map(|counts| {
            let tags = [[273, 4, counts[0], 0], [279, 4, counts[1], 0], [37724, 1, 1 << 25, 0]];
            memory_of_directory(&file(&tags))
        });
        assert_eq!(needs, [96, 48_000, 384 << 20]);
        for bytes in [&b"II*\0"[..], b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff"] {
            assert_eq!(memory_of_directory(bytes), 0);
        }
    }

    #[test]
    fn numbers_are_read_where_they_lie_in_either_order_of_bytes() {
        let found = |bytes: &[u8], name| numbers(bytes, name).collect::<Vec<_>>();
        // Two within the directory, and two at the beginning of the file.
        let bytes =
            file(&[[EXTRA_SAMPLES.into(), 3, 2, 1 | 2 << 16], [7, 4, 2, 0], [8, 3, 1, 1], [8, 3, 1, 5], [8, 99, 1, 6]]);
        assert_eq!(found(&bytes, EXTRA_SAMPLES), [1, 2]);
        assert_eq!(found(&bytes, 7), [0x002A_4949, 8]);
        assert_eq!((found(&bytes, 8), found(&bytes, 6)), (vec![5], vec![]), "the last of a known kind, and none");
        let big = b"MM\0*\0\0\0\x08\0\x01\x01\x52\0\x03\0\0\0\x01\0\x01\0\0";
        assert!(is_premultiplied(big) && !is_premultiplied(&bytes[..18]));
        // Where the values would lie behind the end of the file.
        assert_eq!(found(&file(&[[7, 4, 2, u32::MAX]]), 7), [0; 0]);
    }

    #[test]
    fn a_jpeg_takes_what_its_own_head_says() {
        // A frame of 300 by 2 pixels of three colours, and a scan of so many of them.
        let jpeg = |frame, in_scan| {
            let begins = [0xFF, 0xD8, 0xFF, frame, 0, 17, 8, 0, 2, 1, 44, 3];
            [&begins[..], &[0; 9], &[0xFF, 0xDA, 0, 12, in_scan]].concat()
        };
        let tables = [0xFF, 0xD8, 0xFF, 0xDB, 0, 3, 7, 0xFF, 0xD9];
        let needs = |jpeg: &[u8], tables: &[u8], most| {
            let (begin, length) = (10 + 4 * 12, jpeg.len() as u32);
            let tags = [[259, 3, 1, 7], [273, 4, 1, begin], [279, 4, 1, length]];
            let at_tables = [347, 7, tables.len() as u32, begin + length];
            memory_of_jpegs(&[&file(&[&tags[..], &[at_tables]].concat()), jpeg, tables].concat(), most)
        };
        assert_eq!(needs(&jpeg(0xC0, 3), &tables, 1800), Ok(1800 + 26));
        assert_eq!(needs(&jpeg(0xC2, 3), &tables, 1800), Ok(3 * 1800 + 26));
        assert!(needs(&jpeg(0xC0, 3), &tables, 1799).is_err_and(|cause| cause.contains("more pixels")));
        for (tables, cut) in [(&tables[..], 1), (&jpeg(0xC0, 3), 0), (&tables[..7], 0)] {
            let jpeg = jpeg(0xC0, 3);
            assert!(needs(&jpeg[..jpeg.len() - 5 * cut], tables, 1800).is_err_and(|cause| cause.contains("damaged")));
        }
        // Two strips that are the same JPEG: where both lie, and how long they are.
        let (jpeg, begin) = (jpeg(0xC0, 3), 10 + 3 * 12 + 16);
        let tags = file(&[[259, 3, 1, 7], [273, 4, 2, begin - 16], [279, 4, 2, begin - 8]]);
        let places = [begin, begin, jpeg.len() as u32, jpeg.len() as u32].map(u32::to_le_bytes);
        let shared = [&tags, places.as_flattened(), &jpeg].concat();
        assert_eq!(memory_of_jpegs(&shared, 2 * 1800), Ok(1800 + 26));
        assert!(memory_of_jpegs(&shared, 2 * 1800 - 1).is_err_and(|cause| cause.contains("more pixels")));
        assert_eq!(memory_of_jpegs(&file(&[[259, 3, 1, 7], [273, 4, 1, 99], [279, 4, 1, 9]]), 1), Err(CUT_OFF));
        assert_eq!(memory_of_jpegs(&file(&[[259, 3, 1, 5], [273, 4, 1, 99], [279, 4, 1, 9]]), 1), Ok(0));
    }

    #[test]
    fn colours_are_divided_by_alpha_to_the_nearest() {
        assert_eq!(divided([100, 5, 250, 200], 255), [128, 6, 255, 200]);
        assert_eq!(divided([7, 0, 9, 0], 255), [7, 0, 9, 0]);
        assert_eq!(divided([65535, 1, 0, 65535], 65535), [65535, 1, 0, 65535]);
    }
}
