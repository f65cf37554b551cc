//! The header of a safetensors file: what follows it, and where.

use crate::elements::{Fault, read_from};
use crate::error::{Error, Result};
use crate::pth;
use crate::reading::{ensure_free, io};
use crc32fast::Hasher;
use safetensors::tensor::Metadata;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use tensor::Tensor;

/// Where a header has the file's metadata.
pub const METADATA: &str = "__metadata__";

/// Metadata entry with the CRC-32, in hexadecimal, of everything else in the file: of the header without this entry (as
/// JSON with sorted keys and no blanks), then of the tensors' bytes. Without it, silently corrupted weights would be
/// trained on.
pub const CHECKSUM: &str = "crc32";

/// The longest header that the safetensors library reads.
const MAX_HEADER: u64 = 100_000_000;

/// A header that was read.
pub struct Header<'p> {
    /// What names the file in errors.
    path: &'p str,
    /// Where it ends, and the tensors' bytes begin.
    end: u64,
    entries: Map<String, Value>,
}

impl<'p> Header<'p> {
    /// Reads it from the beginning of a file of `length` bytes, and nothing behind it. `path` names the file in errors:
    /// [`Error::Io`], [`Error::Foreign`], [`Error::OldArchive`], [`Error::Format`].
    pub fn read(source: &mut (impl Read + Seek), length: u64, path: &'p str) -> Result<Self> {
        const LENGTH: u64 = size_of::<u64>() as u64;
        let cut = || damaged(path, "it ends before its header");
        let mut read = |from, most: u64| {
            let mut bytes = vec![];
            source.seek(SeekFrom::Start(from)).and_then(|_| source.take(most).read_to_end(&mut bytes)).map(|_| bytes)
        };
        let failed = |cause| io(Path::new(path), cause);
        let beginning = read(0, LENGTH + 1).map_err(failed)?;
        ensure_safetensors(&beginning, path)?;
        let said = beginning.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).ok_or_else(cut)?;
        if said > MAX_HEADER {
            return Err(damaged(path, format!("its header is said to have {said} bytes")));
        }
        if LENGTH + said > length {
            return Err(cut());
        }
        // As values of JSON it takes some fifty times as much.
        ensure_free(Path::new(path), 64 * said)?;
        let entries = read(LENGTH, said).map_err(failed)?;
        let entries = serde_json::from_slice(&entries).map_err(|error| damaged(path, error))?;
        Ok(Self { path, end: LENGTH + said, entries })
    }

    /// The file's metadata, without the checksum. Errors: [`Error::Format`].
    pub fn metadata(&self) -> Result<HashMap<String, String>> {
        let metadata = self.entries.get(METADATA).cloned().unwrap_or_else(|| json!({}));
        let mut metadata: HashMap<String, String> =
            serde_json::from_value(metadata).map_err(|error| damaged(self.path, error))?;
        metadata.remove(CHECKSUM);
        Ok(metadata)
    }

    /// Where a file with this header should end, and how much memory those of its tensors take that are wanted. Says
    /// nothing of whether they are possible.
    pub fn extent(&self, wants: impl Fn(&str) -> bool) -> [u64; 2] {
        let (mut end, mut needed) = (0, 0u64);
        for (name, tensor) in self.entries.iter().filter(|(name, _)| *name != METADATA) {
            let [from, to] = [0, 1].map(|i| tensor["data_offsets"][i].as_u64().unwrap_or(0));
            let bytes = to.saturating_sub(from);
            let held = match tensor["dtype"].as_str() {
                Some("U8" | "I8") => bytes.saturating_mul(4),
                Some("F16" | "I16" | "U16") => bytes.saturating_mul(2),
                Some("I64" | "U64") => bytes / 2,
                _ => bytes,
            };
            (end, needed) = (end.max(to), needed.saturating_add(if wants(name) { held } else { 0 }));
        }
        [self.end.saturating_add(end), needed]
    }

    /// Reads all bytes behind it, for the checksum, and keeps the tensors that are wanted. Errors: [`Error::Io`];
    /// [`Error::Format`]; [`Error::Unfit`] for a tensor that cannot be read.
    pub fn tensors(
        self,
        source: &mut (impl Read + Seek),
        wants: impl Fn(&str) -> bool,
    ) -> Result<BTreeMap<String, Tensor>> {
        let path = self.path;
        let stated = self.entries.get(METADATA).and_then(|metadata| metadata[CHECKSUM].as_str()).map(str::to_owned);
        let mut sum = Hasher::new();
        if stated.is_some() {
            sum.update(&in_order(without_checksum(self.entries.clone()).into()));
        }
        let places: Metadata = serde_json::from_value(self.entries.into()).map_err(|error| damaged(path, error))?;
        let failed = |cause| io(Path::new(path), cause);
        source.seek(SeekFrom::Start(self.end)).map_err(failed)?;
        let mut source = Summing { of: source, sum };
        // Of several that are unfit it is always the same that is named, whatever their order in the file.
        let (mut tensors, mut unfit) = (BTreeMap::new(), BTreeMap::new());
        for name in places.offset_keys() {
            let Some(info) = places.info(&name) else { continue };
            let (from, to) = info.data_offsets;
            let mut bytes = (&mut source).take((to - from) as u64);
            if wants(&name) {
                match read_from(&mut bytes, info.dtype, &info.shape) {
                    Ok(tensor) => _ = tensors.insert(name, tensor),
                    Err(Fault::Unfit(reason)) => _ = unfit.insert(name, reason),
                    Err(Fault::Io(cause)) => return Err(failed(cause)),
                }
            }
            std::io::copy(&mut bytes, &mut std::io::sink()).map_err(failed)?;
        }
        if let Some(stated) = stated {
            let found = written(source.sum);
            if found != stated {
                let reason = format!(
                    "its contents have the checksum {found}, and it says {stated}; without {CHECKSUM} in its metadata it is \
                     taken as it is"
                );
                return Err(damaged(path, reason));
            }
        }
        match unfit.pop_first() {
            Some((name, reason)) => {
                Err(Error::Unfit { path: path.to_owned(), reason: format!("tensor {name}: {reason}") })
            }
            None => Ok(tensors),
        }
    }
}

/// The error for a file that is none of tensors, or a damaged one.
pub fn damaged(path: &str, reason: impl Display) -> Error {
    Error::Format { path: path.to_owned(), reason: reason.to_string() }
}

/// A header's entries as the checksum counts them.
fn without_checksum(mut entries: Map<String, Value>) -> Map<String, Value> {
    if let Some(Value::Object(metadata)) = entries.get_mut(METADATA) {
        metadata.remove(CHECKSUM);
        if metadata.is_empty() {
            entries.remove(METADATA);
        }
    }
    entries
}

/// A header's bytes. Keys are sorted so that equal contents give equal bytes; hash maps iterate in random order.
pub fn in_order(mut header: Value) -> Vec<u8> {
    header.sort_all_objects();
    header.to_string().into_bytes()
}

/// A checksum as files have it.
pub fn written(sum: Hasher) -> String {
    format!("{:08x}", sum.finalize())
}

/// A source or target that adds what is read from it, or written to it, to a checksum.
pub struct Summing<S> {
    pub of: S,
    pub sum: Hasher,
}

impl<S: Read> Read for Summing<S> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let read = self.of.read(bytes)?;
        self.sum.update(&bytes[..read]);
        Ok(read)
    }
}

impl<S: Write> Write for Summing<S> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.of.write(bytes)?;
        self.sum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.of.flush()
    }
}

/// Tells a safetensors file from others by its first nine bytes.
fn ensure_safetensors(bytes: &[u8], path: &str) -> Result<()> {
    match bytes.get(8) {
        None | Some(b'{') => Ok(()),
        Some(_) if pth::is_of_earlier_version(bytes) => Err(Error::OldArchive { path: path.to_owned() }),
        Some(_) => Err(Error::Foreign { path: path.to_owned() }),
    }
}
