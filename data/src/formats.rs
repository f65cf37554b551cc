//! What the bytes of an image file tell before a decoder has them: whether they are all there, and how much memory
//! decoding takes beside the pixels.

use std::iter;
use std::ops::RangeInclusive;

use image::ImageFormat;

use crate::tiff;

/// The most parts before the pixels: segments of a JPEG, or texts and profiles of a PNG. Decoders keep each by itself,
/// which for small ones takes several times the memory of what is in them. A file of the largest size has fewer that
/// are full.
const MOST_PARTS: usize = 10_000;
pub(crate) const TOO_MANY_PARTS: &str = "its metadata are in more parts than are read: save it without them";

/// Why a file need not be decoded, if it need not.
pub(crate) fn refusal(bytes: &[u8]) -> Option<&'static str> {
    if bytes.is_empty() {
        return Some("it is empty");
    }
    if bytes.starts_with(&[0xFF, 0xD8]) && !jpeg_is_whole(bytes) {
        return Some("the JPEG data end before their end marker");
    }
    if has_too_many_parts(bytes) {
        return Some(TOO_MANY_PARTS);
    }
    if bytes.starts_with(b"RIFF") {
        if !riff_is_whole(bytes) {
            return Some("the file ends before the length that it gives");
        }
        if is_animated(bytes) {
            return Some("it is an animation");
        }
    }
    if bytes.starts_with(b"\x89PNG")
        && png_chunks(bytes).any(|(name, length)| name == b"PLTE" && !(length.is_multiple_of(3) && length <= 3 * 256))
    {
        return Some("its palette is damaged");
    }
    let is_big_tiff = bytes.starts_with(b"II\x2B\0") || bytes.starts_with(b"MM\0\x2B");
    is_big_tiff.then_some("it is a BigTIFF: save it as a TIFF")
}

/// How much memory a decoder may ask for to read a file's head, in bytes, if its limit is `allowed`. (That of JPEG
/// keeps its copy of the file while it decodes; by then it is no longer among what is free.)
pub(crate) fn memory_of_head(format: Option<ImageFormat>, bytes: &[u8], allowed: u64) -> u64 {
    match format {
        // The whole file, which it copies.
        Some(ImageFormat::Jpeg) => bytes.len() as u64,
        // A vector that grows takes up to twice what is in it.
        Some(ImageFormat::Png) if metadata_of_png(bytes) > 0 => 2 * allowed,
        Some(ImageFormat::Tiff) => tiff::memory_of_directory(bytes),
        _ => 0,
    }
}

/// The limit to give to a decoder, in bytes, if no row may take more than `most`. A PNG's colour profile is packed, and
/// may be a thousand times as large as the file; beyond the limit, the decoder does without it.
pub(crate) fn allowed(format: Option<ImageFormat>, bytes: &[u8], most: u64) -> u64 {
    const PROFILE: u64 = 16 << 20;
    match (format, bytes.get(16..20)) {
        (Some(ImageFormat::Png), Some(&[a, b, c, d])) => {
            // Up to four colours of 16 bits. Other chunks are held as they are, in a vector that grows, and as decoded.
            let row = 8 * u64::from(u32::from_be_bytes([a, b, c, d]));
            PROFILE + 3 * metadata_of_png(bytes) + row.min(most)
        }
        _ => most,
    }
}

/// Whether a JPEG or PNG has more parts before its pixels than are read.
pub(crate) fn has_too_many_parts(bytes: &[u8]) -> bool {
    let mut parts = 0;
    if bytes.starts_with(b"\x89PNG") {
        parts = kept_chunks(bytes).take(MOST_PARTS + 1).count();
    } else if bytes.starts_with(&[0xFF, 0xD8]) {
        segments(bytes, |marker, _| parts += usize::from(marker != PADDING));
    }
    parts > MOST_PARTS
}

/// The lengths of those of a PNG's chunks before the pixels that its decoder keeps.
fn kept_chunks(bytes: &[u8]) -> impl Iterator<Item = u64> {
    const KEPT: [&[u8]; 5] = [b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"eXIf"];
    png_chunks(bytes).filter(|(name, _)| KEPT.contains(name)).map(|(_, length)| length)
}

/// Their bytes.
fn metadata_of_png(bytes: &[u8]) -> u64 {
    kept_chunks(bytes).fold(0, u64::saturating_add)
}

/// The names and lengths of a PNG's chunks before its pixels, no longer than the file.
fn png_chunks(bytes: &[u8]) -> impl Iterator<Item = (&[u8], u64)> {
    let mut at = 8;
    iter::from_fn(move || {
        let rest = bytes.get(at..)?;
        let &[a, b, c, d, ref name @ ..] = rest.get(..8)? else { return None };
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        at = at.saturating_add(length).saturating_add(12);
        (name != b"IDAT").then_some((name, length.min(rest.len()) as u64))
    })
}

/// How much memory a decoder takes at most, in bytes, beside the `decoded` bytes that it fills, of so many pixels.
pub(crate) fn memory_beside(format: Option<ImageFormat>, bytes: &[u8], [width, height]: [u64; 2], decoded: u64) -> u64 {
    let pixels = width.saturating_mul(height);
    match format {
        // Rows before filters are undone: of six the first are dropped, the vector grows, and there is one more.
        Some(ImageFormat::Png) => (2 * height.min(6) + 1) * decoded.div_ceil(height),
        // Coefficients of 16 bits, until the last scan has been read.
        Some(ImageFormat::Jpeg) => 2 * pixels * u64::from(components_in_several_scans(bytes).unwrap_or(0)),
        Some(ImageFormat::WebP) => memory_of_webp(bytes, pixels),
        // All of it, before it is copied: of CMYK four colours, which become three.
        Some(ImageFormat::Tiff) => decoded + decoded / 3,
        _ => 0,
    }
}

/// Shows a WebP file's chunks, as a WebP file is a RIFF file: their names and what they hold. Says whether the file is
/// complete: it states its length, and so does each chunk.
fn chunks<'b>(bytes: &'b [u8], mut see: impl FnMut(&[u8], &'b [u8])) -> bool {
    let length = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize);
    let Some(end) = length(4).map(|length| 8 + length).filter(|&end| end <= bytes.len()) else { return false };
    let mut at = 12;
    while at + 8 <= end {
        match length(at + 4) {
            Some(length) if at + 8 + length <= end => {
                see(&bytes[at..at + 4], &bytes[at + 8..at + 8 + length]);
                at += 8 + length.next_multiple_of(2);
            }
            _ => return false,
        }
    }
    true
}

/// A decoder that trusts a chunk's stated length would allocate that much memory.
fn riff_is_whole(bytes: &[u8]) -> bool {
    chunks(bytes, |_, _| {})
}

/// Whether a WebP file has more than one picture.
fn is_animated(bytes: &[u8]) -> bool {
    const ANIMATION: u8 = 1 << 1;
    bytes.get(12..16) == Some(b"VP8X") && bytes.get(20).is_some_and(|flags| flags & ANIMATION != 0)
}

/// What is held of a WebP picture of so many pixels while it is decoded. A frame may be larger than the file's head
/// says, which the decoder notices only when it has taken the memory.
fn memory_of_webp(bytes: &[u8], pixels: u64) -> u64 {
    let (mut largest, mut each) = (pixels, 0);
    chunks(bytes, |name, chunk| {
        // A byte and a half of luminance and colours; four of a picture without losses; with transparency, both, its
        // own byte, and half a byte of tables.
        each = each.max(match name {
            b"ALPH" => 7,
            b"VP8L" => 5,
            _ => 2,
        });
        let sides = match (name, chunk) {
            // Three bytes about the frame, three that begin every one, then width and height, in 14 bits each.
            (b"VP8 ", &[_, _, _, _, _, _, w0, w1, h0, h1, ..]) => {
                [[w0, w1], [h0, h1]].map(|side| u32::from(u16::from_le_bytes(side)) & 0x3FFF)
            }
            // A byte that begins every one, then 14 bits of width - 1, and 14 of height - 1.
            (b"VP8L", &[_, a, b, c, d, ..]) => {
                let bits = u32::from_le_bytes([a, b, c, d]);
                [bits, bits >> 14].map(|side| (side & 0x3FFF) + 1)
            }
            _ => return,
        };
        largest = largest.max(sides.map(u64::from).iter().product());
    });
    each * largest
}

const FRAMES: RangeInclusive<u8> = 0xC0..=0xC2;
const START_OF_SCAN: u8 = 0xDA;
/// Fills what is before a marker.
const PADDING: u8 = 0xFF;

/// Shows a JPEG's segments before its first scan: their markers, and the bytes from there on. Returns where they end,
/// with the scan or where no marker is; nothing if the file ends within a segment's head. Segments are skipped whole,
/// for a thumbnail in them has markers of its own.
pub(crate) fn segments<'b>(bytes: &'b [u8], mut see: impl FnMut(u8, &'b [u8])) -> Option<usize> {
    let mut at = 2;
    while let Some(&[0xFF, marker]) = bytes.get(at..at + 2) {
        if marker == START_OF_SCAN {
            break;
        }
        see(marker, &bytes[at..]);
        // The other markers here carry their length.
        at += match (marker, bytes.get(at + 2..at + 4)) {
            (PADDING, _) => 1,
            (_, Some(&[high, low])) => 2 + usize::from(u16::from_be_bytes([high, low])),
            _ => return None,
        };
    }
    Some(at)
}

/// Whether an end marker follows the first scan. The decoder forgives a JPEG that breaks off, and paints the rest
/// grey; a training set should not.
fn jpeg_is_whole(bytes: &[u8]) -> bool {
    const END_OF_IMAGE: [u8; 2] = [0xFF, 0xD9];
    match segments(bytes, |_, _| {}) {
        // Within a scan an 0xFF byte is followed by 0 or a restart marker, so this pair cannot be data.
        // Searched for from the end, where it usually is.
        Some(scan) if bytes.get(scan..scan + 2) == Some(&[0xFF, START_OF_SCAN]) => {
            bytes[scan..].windows(2).rev().any(|pair| pair == END_OF_IMAGE)
        }
        // No marker where one belongs: whether that can be decoded is for the decoder to say.
        Some(at) => at < bytes.len(),
        None => false,
    }
}

/// The width, the height and the number of components of each frame that a JPEG names before its first scan.
pub(crate) fn frames(bytes: &[u8]) -> Vec<[u64; 3]> {
    let mut frames = vec![];
    segments(bytes, |marker, segment| {
        // After the marker: the length, a precision, two sides of two bytes.
        if let (true, Some(&[h0, h1, w0, w1, components])) = (FRAMES.contains(&marker), segment.get(5..10)) {
            let [height, width] = [[h0, h1], [w0, w1]].map(u16::from_be_bytes);
            frames.push([width, height, components.into()].map(u64::from));
        }
    });
    frames
}

/// How many components a JPEG has, if several scans tell what they are: they refine one another, or the first one lacks
/// some.
pub(crate) fn components_in_several_scans(bytes: &[u8]) -> Option<u8> {
    let mut frame = None;
    // After a frame's marker: the length, a precision, two sides of two bytes. After a scan's: the length.
    let scan = segments(bytes, |marker, segment| {
        if FRAMES.contains(&marker) {
            frame = segment.get(9).map(|&components| (marker, components));
        }
    })?;
    let ((marker, components), in_first) = (frame?, bytes.get(scan + 4).copied());
    (marker == *FRAMES.end() || in_first < Some(components)).then_some(components)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_palette_is_of_whole_colours() {
        for (length, is_refused) in [(3, false), (4, true), (768, false), (771, true)] {
            let chunk = [&[0, 0, (length >> 8) as u8, length as u8][..], b"PLTE", &vec![0; length + 4]].concat();
            let png = [&b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"[..], &[0; 17], &chunk, b"\0\0\0\0IDAT"].concat();
            assert_eq!(refusal(&png), is_refused.then_some("its palette is damaged"), "{length}");
        }
    }

    /// As many as there may be, and one more.
    #[test]
    fn there_may_be_so_many_parts() {
        let png = |texts| {
            let chunks = [&b"\0\0\0\x02tEXtk\0"[..], &[0; 4]].concat().repeat(texts);
            [&b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"[..], &[0; 17], &chunks, b"\0\0\0\0IDAT"].concat()
        };
        // Padding is no part.
        let jpeg =
            |profiles| [&[0xFF, 0xD8][..], &[0xFF, 0xFF, 0xE2, 0, 3, 7].repeat(profiles), &[0xFF, 0xDA]].concat();
        for of in [&png as &dyn Fn(usize) -> Vec<u8>, &jpeg] {
            assert_eq!([MOST_PARTS, MOST_PARTS + 1].map(|parts| has_too_many_parts(&of(parts))), [false, true]);
        }
        assert_eq!(refusal(&png(MOST_PARTS + 1)), Some(TOO_MANY_PARTS));
    }

    #[test]
    fn what_decoders_need_beside_the_pixels_is_foretold() {
        let need = |format, bytes: &[u8]| memory_beside(Some(format), bytes, [50, 2], 300);
        // A comment, a frame of four components, and a scan of so many of them.
        let jpeg = |frame, in_scan| {
            let begins = [0xFF, 0xD8, 0xFF, 0xFE, 0, 3, 7, 0xFF, frame, 0, 20, 8, 0, 9, 0, 9, 4];
            [&begins[..], &[0; 12], &[0xFF, START_OF_SCAN, 0, 14, in_scan]].concat()
        };
        let needs = [(0xC0, 4), (0xC0, 1), (0xC2, 4)].map(|(frame, scan)| need(ImageFormat::Jpeg, &jpeg(frame, scan)));
        assert_eq!(needs, [0, 800, 800]);
        // The canvas is of 100 pixels, and within it lies a frame of 64 by 3, or of 4 by 3.
        let riff = |chunk: &[u8]| [b"RIFF", &(4 + chunk.len() as u32).to_le_bytes()[..], b"WEBP", chunk].concat();
        let frame = |width| riff(&[&b"VP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a"[..], &[width, 0, 3, 0x40]].concat());
        assert_eq!([64, 4].map(|width| need(ImageFormat::WebP, &frame(width))), [384, 200]);
        let lossless = riff(&[&b"VP8L\x06\0\0\0\x2f"[..], &(63u32 | 2 << 14).to_le_bytes(), &[0]].concat());
        assert_eq!(need(ImageFormat::WebP, &lossless), 960);
        let transparent = riff(&[&b"ALPH\x02\0\0\0\0\0"[..], &frame(64)[12..]].concat());
        assert_eq!(need(ImageFormat::WebP, &transparent), 1344);
        assert_eq!(need(ImageFormat::Tiff, &[]), 400);
        // Of few rows, and of many.
        let rows = |height| memory_beside(Some(ImageFormat::Png), &[], [50, height], 150 * height);
        assert_eq!([2, 1000].map(rows), [5 * 150, 13 * 150]);
        assert_eq!(memory_of_head(Some(ImageFormat::Jpeg), &jpeg(0xC0, 4), 1000), 34);
        // One tag, of two values.
        let tiff = b"II*\0\x08\0\0\0\x01\0\x11\x01\x04\0\x02\0\0\0\0\0\0\0";
        assert_eq!(memory_of_head(Some(ImageFormat::Tiff), tiff, 1000), 96);
    }

    #[test]
    fn what_a_png_says_beside_its_pixels_is_counted_and_no_more_than_the_file_has() {
        let head = [&b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"[..], &[0, 0, 1, 0], &[0; 13]].concat();
        let chunk = |name: &[u8], length: u32| [&length.to_be_bytes()[..], name, &[0; 14]].concat();
        let png = |chunks: &[Vec<u8>]| [&head, chunks.concat().as_slice()].concat();
        let pixels = chunk(b"IDAT", 10);
        let behind = png(&[chunk(b"gAMA", 10), pixels.clone(), chunk(b"tEXt", 10)]);
        let before = png(&[chunk(b"iCCP", 10), chunk(b"tEXt", 10), pixels]);
        let forged = png(&[chunk(b"iTXt", u32::MAX)]);
        assert_eq!([&behind, &before, &forged].map(|bytes| metadata_of_png(bytes)), [0, 20, 22]);
        let format = Some(ImageFormat::Png);
        let limits = [&behind, &before].map(|bytes| allowed(format, bytes, 1 << 30) - (16 << 20));
        assert_eq!(limits, [2048, 2048 + 60]);
        assert_eq!([&behind, &before].map(|bytes| memory_of_head(format, bytes, 500)), [0, 1000]);
    }
}
