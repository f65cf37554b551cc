//! A picture of bytes, and how one is decoded from a file.

use std::fs;
use std::hash::{Hash, Hasher};
use std::io::{self, Cursor, ErrorKind, Read};
use std::panic;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use image::{
    ColorType, DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits, RgbImage,
    metadata::Orientation,
};

use tensor::memory::{amount, free_bytes, reserve};

use crate::formats;
use crate::room::{Room, Taken};
use crate::{Error, Result, tiff};

/// The longest file that is read as an image, in bytes.
pub(crate) const MAX_FILE: u64 = 256 << 20;
/// The most memory that one decoded image may take, in bytes.
const MAX_DECODED: u64 = 512 << 20;
static ROOM: Room = Room::new(Duration::from_millis(100));

/// An RGB picture of bytes, (H, W, 3), at least 1x1.
///
/// It is a view of shared bytes: cloning it, or taking it out of a set that lies in memory, copies no pixel.
#[derive(Clone)]
pub struct Image {
    height: usize,
    width: usize,
    bytes: Arc<Vec<u8>>,
    start: usize,
}

impl Image {
    /// The picture with these pixels, (height, width, 3), row after row.
    ///
    /// Errors: [`Error::Setting`] where a side is 0 or the number of bytes is not `height * width * 3`.
    pub fn new(height: usize, width: usize, pixels: Vec<u8>) -> Result<Self> {
        let fits = height.checked_mul(width).and_then(|area| area.checked_mul(3)) == Some(pixels.len());
        if pixels.is_empty() || !fits {
            let problem = format!("{} bytes are no RGB picture of {height}x{width} pixels", pixels.len());
            return Err(Error::setting("image", problem));
        }
        Ok(Self { height, width, bytes: Arc::new(pixels), start: 0 })
    }

    /// A square picture that begins at byte `start` of a larger store. The caller has checked that it lies inside.
    pub(crate) fn square_within(bytes: Arc<Vec<u8>>, start: usize, side: usize) -> Self {
        debug_assert!(side > 0 && start + side * side * 3 <= bytes.len());
        Self { height: side, width: side, bytes, start }
    }

    /// The number of rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// The number of pixels in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The bytes, (H, W, 3), row after row.
    pub fn pixels(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.height * self.width * 3]
    }

    /// The red, green and blue of one pixel, or nothing outside the picture.
    pub fn pixel(&self, row: usize, column: usize) -> Option<[u8; 3]> {
        if row >= self.height || column >= self.width {
            return None;
        }
        let at = (row * self.width + column) * 3;
        let pixels = self.pixels();
        Some([pixels[at], pixels[at + 1], pixels[at + 2]])
    }
}

impl PartialEq for Image {
    fn eq(&self, other: &Self) -> bool {
        (self.height, self.width) == (other.height, other.width) && self.pixels() == other.pixels()
    }
}

impl Eq for Image {}

impl Hash for Image {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.height, self.width).hash(state);
        self.pixels().hash(state);
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({}x{} RGB)", self.height, self.width)
    }
}

/// Decodes a PNG, JPEG, WebP, BMP, TIFF or PNM file of any size and colour type to RGB, turned upright as its EXIF data
/// say.
///
/// The format is detected from the content, not from the name. Transparency is dropped; colours that a TIFF stores
/// multiplied by it are divided by it. Of a TIFF with several images, the first is decoded. A file over 256 MiB, or one
/// that would decode to more than 512 MiB, is refused before the memory is taken.
///
/// Errors: [`Error::Missing`], [`Error::Io`] (also where there is too little memory, of kind
/// [`OutOfMemory`](ErrorKind::OutOfMemory)), [`Error::Unsupported`] (not a regular file), or [`Error::Undecodable`]
/// (also for a JPEG or WebP that ends early, and for an animation), each with the path.
pub fn load_image(path: impl AsRef<Path>) -> Result<Image> {
    let path = path.as_ref();
    decode_image(&read_file(path, MAX_FILE, "an image file")?, path)
}

/// The height and width of an image file as it is stored, before it is turned upright, read from its first bytes; none
/// if they do not say, or if that takes much memory.
pub fn size_of_image(path: &Path) -> Option<[usize; 2]> {
    // A decoder may copy the file, and a vector that grows takes twice that.
    const MOST: u64 = 2 * MAX_FILE;
    let is_read = |file: &fs::Metadata| file.is_file() && file.len() <= MAX_FILE && is_granted(MOST);
    let reader = fs::metadata(path).ok().filter(is_read).and_then(|_| ImageReader::open(path).ok())?;
    // As for decoding: a panic over an unforeseen file must not end a run.
    let size = panic::catch_unwind(|| {
        let mut reader = reader.with_guessed_format().ok()?;
        let mut limits = Limits::default();
        limits.max_alloc = Some(MOST / 4);
        reader.limits(limits);
        reader.into_dimensions().ok()
    });
    size.ok().flatten().map(|(width, height)| [height as usize, width as usize])
}

/// Reads a regular file of at most `limit` bytes. A pipe or a device would block or never end, so it is refused. So
/// might a file of /proc, which says that it has no bytes: nothing is read of one that does.
pub(crate) fn read_file(path: &Path, limit: u64, looked_for: &str) -> Result<Vec<u8>> {
    let metadata = fs::metadata(path).map_err(|cause| match cause.kind() {
        ErrorKind::NotFound => Error::Missing {
            path: path.to_owned(),
            looked_for: looked_for.to_owned(),
            help: match path.is_symlink() {
                true => "It is a link to nowhere".to_owned(),
                false => "Check the path and its spelling".to_owned(),
            },
        },
        _ => Error::Io { path: path.to_owned(), cause },
    })?;
    let unsupported = |what: String| Error::Unsupported { path: path.to_owned(), what };
    if !metadata.is_file() {
        return Err(unsupported(format!("it is not a regular file; expected {looked_for}")));
    }
    let too_long = |bytes: u64| unsupported(format!("it has {bytes} bytes, more than the {limit} that are read"));
    if metadata.len() > limit {
        return Err(too_long(metadata.len()));
    }
    let mut bytes = vec![];
    if metadata.len() == 0 {
        return Ok(bytes);
    }
    // Too little memory is an error of this file, not the end of the program.
    let room = reserve(&mut bytes, metadata.len() as usize);
    room.map_err(io::Error::from).map_err(Error::io(path))?;
    let file = fs::File::open(path).map_err(Error::io(path))?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(Error::io(path))?;
    // It may have grown meanwhile.
    if bytes.len() as u64 > limit { Err(too_long(bytes.len() as u64)) } else { Ok(bytes) }
}

/// Decodes the bytes of an image file, such as one that was sent, as [`load_image`] does; `path` only names them in
/// errors. Errors: [`Error::Undecodable`]; [`Error::Io`] where there is too little memory.
pub fn decode_image(bytes: &[u8], path: &Path) -> Result<Image> {
    // The decoders are third-party code: a panic over an unforeseen file must not end a run.
    let rgb = panic::catch_unwind(|| pixels(bytes))
        .unwrap_or_else(|_| Err(Refusal::Undecodable("the decoder broke down over it".to_owned())));
    let undecodable = |cause: String| Error::Undecodable { path: path.to_owned(), cause };
    let rgb = rgb.map_err(|refusal| match refusal {
        Refusal::Undecodable(cause) => undecodable(cause),
        Refusal::NoRoom(cause) => Error::io(path)(io::Error::new(ErrorKind::OutOfMemory, cause)),
    })?;
    let (width, height) = rgb.dimensions();
    Image::new(height as usize, width as usize, rgb.into_raw()).map_err(|cause| undecodable(cause.to_string()))
}

/// Why a file is not decoded.
enum Refusal {
    /// It cannot be.
    Undecodable(String),
    /// There is too little memory at present.
    NoRoom(String),
}

impl From<String> for Refusal {
    fn from(cause: String) -> Self {
        Self::Undecodable(cause)
    }
}

fn too_large(takes: &str) -> String {
    format!("{takes} more than {} MiB, the most that is read: shrink it with another program", MAX_DECODED >> 20)
}

/// The pixels of an image file.
fn pixels(bytes: &[u8]) -> std::result::Result<RgbImage, Refusal> {
    let failed = |cause: ImageError| match cause {
        _ if ends_early(&cause) => CUT_OFF.to_owned(),
        ImageError::Limits(_) => too_large("it takes"),
        _ => cause.to_string(),
    };
    if let Some(refusal) = formats::refusal(bytes) {
        return Err(refusal.to_owned().into());
    }
    let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format().map_err(|cause| cause.to_string())?;
    let format = reader.format();
    if !format.is_some_and(|format| format.reading_enabled()) {
        return Err("it is no PNG, JPEG, WebP, BMP, TIFF or PNM".to_owned().into());
    }
    let not_free = |what: &str, bytes: u64| {
        let needed = amount(bytes);
        Refusal::NoRoom(format!("{what} {needed} of memory, which are not free: make room, or the image smaller"))
    };
    let allowed = formats::allowed(format, bytes, MAX_DECODED);
    let head = formats::memory_of_head(format, bytes, allowed);
    let of_head = if format == Some(ImageFormat::Jpeg) { "a copy of the file takes" } else { "its head may take" };
    let Some(room) = room_for(head) else { return Err(not_free(of_head, head)) };
    let mut limits = Limits::default();
    limits.max_alloc = Some(allowed);
    reader.limits(limits);

    let mut decoder = reader.into_decoder().map_err(failed)?;
    // One that kept it while it waits for more could wait for one that does so, too.
    drop(room);
    if matches!(decoder.color_type(), ColorType::Rgb32F | ColorType::Rgba32F) {
        // Decoders take integers of 32 bits for floats, and nobody says which float is white.
        return Err("its colours have 32 bits each: save it with 8 or 16".to_owned().into());
    }
    let (width, height) = decoder.dimensions();
    // Its size as RGB counts, too: there, a pixel of one byte, or of one bit, takes three bytes.
    let (decoded, rgb) = (decoder.total_bytes(), (3 * u64::from(width)).saturating_mul(height.into()));
    if decoded.max(rgb) > MAX_DECODED {
        return Err(too_large(&format!("{width}x{height} pixels take")).into());
    }
    let is_tiff = format == Some(ImageFormat::Tiff);
    let jpegs = if is_tiff { tiff::memory_of_jpegs(bytes, MAX_DECODED).map_err(str::to_owned)? } else { 0 };
    let orientation = orientation(&mut decoder);
    // Beside it is what the decoder needs, and, when that is gone, a second picture while it is turned or made bytes of
    // RGB.
    let beside = jpegs + formats::memory_beside(format, bytes, [width, height].map(u64::from), decoded);
    let converted = if decoder.color_type() == ColorType::Rgb8 { 0 } else { rgb };
    let turned = if orientation == Orientation::NoTransforms { 0 } else { decoded };
    let most = decoded + beside.max(converted).max(turned);
    let Some(_room) = room_for(most) else {
        return Err(not_free(&format!("{width}x{height} pixels take"), most));
    };
    let mut decoded = DynamicImage::from_decoder(decoder).map_err(failed)?;
    if is_tiff && tiff::is_premultiplied(bytes) {
        tiff::divide_by_alpha(&mut decoded);
    }
    decoded.apply_orientation(orientation);
    Ok(decoded.into_rgb8())
}

/// How a picture is to be turned. Some programs (Pillow up to version 9.2) begin the EXIF data of a PNG or WebP as
/// those of a JPEG begin, which is more than the decoder takes.
fn orientation(decoder: &mut impl ImageDecoder) -> Orientation {
    let exif = decoder.exif_metadata().ok().flatten();
    let tiff = exif.as_ref().and_then(|exif| exif.strip_prefix(b"Exif\0\0"));
    let begun = tiff.and_then(Orientation::from_exif_chunk);
    begun.or_else(|| decoder.orientation().ok()).unwrap_or(Orientation::NoTransforms)
}

/// Why a file cannot be decoded that its format's decoder reads to the end and beyond.
pub(crate) const CUT_OFF: &str = "the file ends too early";

/// Whether a decoder failed because there was nothing left to read.
fn ends_early(cause: &ImageError) -> bool {
    let first: &(dyn std::error::Error + 'static) = if let ImageError::IoError(cause) = cause { cause } else { cause };
    std::iter::successors(Some(first), |cause| cause.source())
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|cause| cause.kind() == ErrorKind::UnexpectedEof)
}

/// Room for a picture, once others have returned theirs.
fn room_for(bytes: u64) -> Option<Taken<'static>> {
    ROOM.take(bytes, || is_granted(bytes), free_bytes)
}

/// Whether the system grants this many bytes (which may be more than there are): if not, decoders would end the
/// program. Small amounts are taken to be granted.
fn is_granted(bytes: u64) -> bool {
    const FEW: u64 = 1 << 20;
    bytes <= FEW || usize::try_from(bytes).is_ok_and(|bytes| reserve(&mut Vec::<u8>::new(), bytes).is_ok())
}
