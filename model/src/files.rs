//! Tensor files: safetensors in and out, and PyTorch's own are read, too.

use crate::elements::{from_bytes, put_all, stored};
use crate::error::{Error, Result};
use crate::pth;
use crate::reading::{ensure_free, first_bytes, io, open_regular};
use crate::safely::write_with;
use crc32fast::Hasher;
use safetensors::tensor::SafeTensors;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use tensor::{Device, Tensor};

/// Metadata entry with the CRC-32, in hexadecimal, of everything else in the file: of the header without this entry (as
/// JSON with sorted keys and no blanks), then of the tensors' bytes. Without it, silently corrupted weights would be
/// trained on.
const CHECKSUM: &str = "crc32";

/// Named tensors and a few strings beside them: the contents of a safetensors file.
#[derive(Clone, Default)]
pub struct TensorFile {
    /// The tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// The file's metadata, without the checksum, which is computed when the file is written.
    pub metadata: HashMap<String, String>,
}

impl fmt::Debug for TensorFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorFile").field("tensors", &self.tensors.len()).finish_non_exhaustive()
    }
}

impl TensorFile {
    /// Reads a file: safetensors, or one that PyTorch's `torch.save` wrote, which has no metadata and of which no code
    /// is executed. Tensors may be f64, f32, bf16 or f16 (widened to f32), or integers of 8 to 64 bits whose values
    /// fit into u32 (read as index tensors).
    ///
    /// Of a PyTorch dictionary that contains others, as training programs save them, the tensors of the entry `model`
    /// are read, or else of `state_dict`, `model_state_dict` or `module`, or else its own, or else those of the only
    /// entry that has any.
    ///
    /// Errors: [`Error::Io`]; [`Error::Foreign`] for another kind of file, and [`Error::OldArchive`]; [`Error::Format`]
    /// for one that is damaged; [`Error::Unfit`] for tensors of other types, or other integers.
    pub fn read(path: &Path) -> Result<Self> {
        // Opened once: at any moment another file may be renamed to this path, as a run's next checkpoint is.
        let mut file = open_regular(path)?;
        let shown = path.display().to_string();
        // Another kind of file may be larger than the memory.
        let beginning = first_bytes(&mut file, 9).map_err(|cause| io(path, cause))?;
        if beginning.starts_with(pth::MAGIC) {
            return pth::read(file, path);
        }
        ensure_safetensors(&beginning, &shown)?;
        let length = ensure_room(&mut file, path, &shown)?;
        Self::parse(&first_bytes(&mut file, length).map_err(|cause| io(path, cause))?, &shown)
    }

    /// The same in buffers of its own: what a model goes on to change stays here as it was.
    pub fn duplicate(&self) -> Result<Self> {
        let copies = self.tensors.iter().map(|(name, tensor)| Ok((name.clone(), tensor.duplicate()?)));
        Ok(Self { tensors: copies.collect::<tensor::Result<_>>()?, metadata: self.metadata.clone() })
    }

    /// The metadata of a safetensors file; nothing else is read, so the checksum is not verified. Errors:
    /// [`Error::Io`], [`Error::Foreign`], [`Error::Format`].
    pub fn read_metadata(path: &Path) -> Result<HashMap<String, String>> {
        let shown = path.display().to_string();
        let format = |reason: String| Error::Format { path: shown.clone(), reason };
        let (_, mut header) = read_header(&mut open_regular(path)?, path, &shown)?;
        let metadata = header.remove(METADATA).unwrap_or_else(|| json!({}));
        let mut metadata: HashMap<String, String> =
            serde_json::from_value(metadata).map_err(|error| format(error.to_string()))?;
        metadata.remove(CHECKSUM);
        Ok(metadata)
    }

    /// The contents of a safetensors file's bytes, verified against their checksum if they have one; `path` names it in
    /// errors, which are those of [`TensorFile::read`].
    pub fn parse(bytes: &[u8], path: &str) -> Result<Self> {
        let format = |reason: String| Error::Format { path: path.to_owned(), reason };
        ensure_safetensors(bytes, path)?;
        let (length, header) = SafeTensors::read_metadata(bytes).map_err(|error| format(error.to_string()))?;
        let views = SafeTensors::deserialize(bytes).map_err(|error| format(error.to_string()))?;
        let mut metadata = header.metadata().clone().unwrap_or_default();
        if let Some(stated) = metadata.remove(CHECKSUM) {
            let (header, data) = bytes[8..].split_at(length);
            let found = checksum(header, data).map_err(|error| format(error.to_string()))?;
            if found != stated {
                return Err(format(format!(
                    "its contents have the checksum {found}, and it says {stated}; without {CHECKSUM} in its metadata it is \
                     taken as it is"
                )));
            }
        }
        // In the order of their names, so that of several that are unfit it is always the same that is named.
        let views: BTreeMap<&str, _> = views.iter().collect();
        let mut tensors = BTreeMap::new();
        for (name, view) in views {
            let tensor = from_bytes(view.dtype(), view.data(), view.shape().to_vec());
            let unfit = |reason| Error::Unfit { path: path.to_owned(), reason: format!("tensor {name}: {reason}") };
            let tensor = tensor.map_err(unfit)?;
            tensors.insert(name.to_owned(), tensor);
        }
        Ok(Self { tensors, metadata })
    }

    /// The bytes of a file with these contents. Errors: [`Error::Unfit`] for a tensor of the name that files have for
    /// their metadata, and those of a GPU.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![];
        self.encoded()?.put(&mut bytes).map_err(|cause| io(Path::new("memory"), cause))?;
        Ok(bytes)
    }

    /// Writes a file, as [`write_safely`](crate::write_safely) does. The tensors are not copied for that. Errors: those
    /// of [`to_bytes`](Self::to_bytes), and [`Error::Io`].
    pub fn write(&self, path: &Path) -> Result<()> {
        let encoded = self.encoded()?;
        write_with(path, |file| {
            let mut buffered = BufWriter::new(file);
            encoded.put(&mut buffered)?;
            buffered.flush()
        })
    }

    fn encoded(&self) -> Result<Encoded> {
        let here =
            |(name, tensor): (&String, &Tensor)| Ok((name.clone(), tensor.to_device(&Device::Cpu)?.contiguous()?));
        let mut tensors = self.tensors.iter().map(here).collect::<Result<Vec<_>>>()?;
        // Large elements first, so that each lies at a multiple of its size; and those of one size by name.
        tensors.sort_by_key(|(_, tensor)| Reverse(stored(tensor.dtype()).1));
        if tensors.iter().any(|(name, _)| name == METADATA) {
            let reason = format!("no tensor can be named {METADATA}, as the file's metadata are");
            return Err(Error::Unfit { path: "a tensor file".into(), reason });
        }
        let mut header = serde_json::Map::new();
        let mut start = 0;
        for (name, tensor) in &tensors {
            let (dtype, size) = stored(tensor.dtype());
            let end = start + size * tensor.count();
            let shape: &[usize] = tensor.shape();
            header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] }));
            start = end;
        }
        let mut metadata = self.metadata.clone();
        metadata.remove(CHECKSUM);
        if !metadata.is_empty() {
            header.insert(METADATA.into(), json!(metadata));
        }
        let mut summed = Hasher::new();
        summed.update(&in_order(header.clone().into()));
        put_all(&tensors, &mut Summing(&mut summed)).map_err(|cause| io(Path::new("memory"), cause))?;
        metadata.insert(CHECKSUM.into(), written(summed));
        header.insert(METADATA.into(), json!(metadata));
        let mut header = in_order(header.into());
        header.resize(header.len().next_multiple_of(8), b' ');
        Ok(Encoded { header, tensors })
    }
}

/// What a file is to hold: its header, and the tensors in its order, contiguous in the machine's memory.
struct Encoded {
    header: Vec<u8>,
    tensors: Vec<(String, Tensor)>,
}

impl Encoded {
    fn put(&self, out: &mut impl Write) -> std::io::Result<()> {
        out.write_all(&(self.header.len() as u64).to_le_bytes())?;
        out.write_all(&self.header)?;
        put_all(&self.tensors, out)
    }
}

/// Where a header has the file's metadata.
const METADATA: &str = "__metadata__";

/// A header's bytes. Keys are sorted so that equal contents give equal bytes; hash maps iterate in random order.
fn in_order(mut header: Value) -> Vec<u8> {
    header.sort_all_objects();
    header.to_string().into_bytes()
}

/// The [`CHECKSUM`] that a file with this header and these tensors' bytes should say.
fn checksum(header: &[u8], data: &[u8]) -> serde_json::Result<String> {
    let mut header: serde_json::Map<String, Value> = serde_json::from_slice(header)?;
    if let Some(Value::Object(metadata)) = header.get_mut(METADATA) {
        metadata.remove(CHECKSUM);
        if metadata.is_empty() {
            header.remove(METADATA);
        }
    }
    let mut summed = Hasher::new();
    summed.update(&in_order(header.into()));
    summed.update(data);
    Ok(written(summed))
}

fn written(sum: Hasher) -> String {
    format!("{:08x}", sum.finalize())
}

/// A writer that adds what is written to it to a checksum.
struct Summing<'h>(&'h mut Hasher);

impl Write for Summing<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Tells a safetensors file from others by its first nine bytes.
fn ensure_safetensors(bytes: &[u8], path: &str) -> Result<()> {
    match bytes.get(8) {
        None | Some(b'{') => Ok(()),
        Some(_) if bytes.starts_with(pth::OLD_MAGIC) => Err(Error::OldArchive { path: path.to_owned() }),
        Some(_) => Err(Error::Foreign { path: path.to_owned() }),
    }
}

/// The longest header that the safetensors library reads.
const MAX_HEADER: u64 = 100_000_000;

/// A safetensors file's header, and where it ends.
fn read_header(file: &mut File, path: &Path, shown: &str) -> Result<(u64, serde_json::Map<String, Value>)> {
    const LENGTH: usize = size_of::<u64>();
    let mut read = |most| first_bytes(file, most).map_err(|cause| io(path, cause));
    let beginning = read(LENGTH as u64 + 1)?;
    ensure_safetensors(&beginning, shown)?;
    let format = |reason: String| Error::Format { path: shown.to_owned(), reason };
    let cut = || format("it ends before its header".into());
    let length = beginning.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).ok_or_else(cut)?;
    if length > MAX_HEADER {
        return Err(format(format!("its header is said to have {length} bytes")));
    }
    let end = length + LENGTH as u64;
    let header = read(end)?;
    if (header.len() as u64) < end {
        return Err(cut());
    }
    let header = serde_json::from_slice(&header[LENGTH..]).map_err(|error| format(error.to_string()))?;
    Ok((end, header))
}

/// The length of a safetensors file, which is what its header says. Refuses one that takes more memory, with its tensors,
/// than there is, if that is known: other models' files are easily named by mistake, and some are very large.
fn ensure_room(file: &mut File, path: &Path, shown: &str) -> Result<u64> {
    let (header_end, header) = read_header(file, path, shown)?;
    let length = file.metadata().map_err(|cause| io(path, cause))?.len();
    let (mut end, mut needed) = (0, length);
    for tensor in header.iter().filter(|(name, _)| *name != METADATA).map(|(_, tensor)| tensor) {
        let [from, to] = [0, 1].map(|i| tensor["data_offsets"][i].as_u64().unwrap_or(0));
        let bytes = to.saturating_sub(from);
        let held = match tensor["dtype"].as_str() {
            Some("U8" | "I8") => bytes.saturating_mul(4),
            Some("F16" | "I16" | "U16") => bytes.saturating_mul(2),
            Some("I64" | "U64") => bytes / 2,
            _ => bytes,
        };
        (end, needed) = (end.max(to), needed.saturating_add(held));
    }
    if header_end.saturating_add(end) != length {
        let reason =
            format!("it has {length} bytes, and its tensors should end after {}", header_end.saturating_add(end));
        return Err(Error::Format { path: shown.to_owned(), reason });
    }
    ensure_free(path, needed)?;
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tensor::DType;
    use tensor::memory::free_bytes;

    #[test]
    fn what_is_printed_of_a_file_does_not_grow_with_it() {
        let tensors = (0..1000).map(|number| (number.to_string(), Tensor::zeros([100], DType::F32)));
        let file = TensorFile { tensors: tensors.collect(), ..TensorFile::default() };
        assert_eq!(format!("{file:?}"), "TensorFile { tensors: 1000, .. }");
    }

    #[test]
    fn a_tensor_with_the_name_of_the_metadata_is_refused() {
        let tensors = ["weight", METADATA].map(|name| (name.to_owned(), Tensor::full([2], 0.5f32)));
        let written = TensorFile { tensors: tensors.into(), metadata: HashMap::new() }.to_bytes();
        assert!(written.unwrap_err().to_string().contains(METADATA));
    }

    /// What is not to be read is known from the header alone: the rest of these files is a hole.
    #[test]
    fn a_file_that_is_longer_than_it_says_or_than_the_memory_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let refused = |header: &str, length: u64| {
            let header = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
            fs::write(&path, &header).unwrap();
            File::options().write(true).open(&path).unwrap().set_len(header.len() as u64 + length).unwrap();
            TensorFile::read(&path).unwrap_err().to_string()
        };
        let of = |dtype: &str, count: u64, bytes: u64| {
            format!("{{\"a\":{{\"dtype\":\"{dtype}\",\"shape\":[{count}],\"data_offsets\":[0,{bytes}]}}}}")
        };
        for length in [0, 7, 9, 1 << 40] {
            let error = refused(&of("F32", 2, 8), length);
            assert!(error.contains("its tensors should end after"), "{length}: {error}");
        }
        for said in [u64::MAX, 1 << 40] {
            fs::write(&path, [&said.to_le_bytes()[..], b"{}"].concat()).unwrap();
            File::options().write(true).open(&path).unwrap().set_len(8 + (1 << 40)).unwrap();
            let error = TensorFile::read(&path).unwrap_err().to_string();
            assert!(error.contains("its header is said to have"), "{error}");
        }
        if free_bytes().is_some() {
            for (dtype, size) in [("F32", 4), ("F16", 2), ("U8", 1), ("F64", 8)] {
                let error = refused(&of(dtype, 1 << 40, size << 40), size << 40);
                assert!(error.contains("MiB of memory") && error.contains("are free"), "{dtype}: {error}");
            }
        }
    }

    /// As a run's next checkpoint takes the place of the last one.
    #[cfg(unix)] // elsewhere a file that is being read may keep its place
    #[test]
    fn a_file_is_whole_whenever_another_takes_its_place() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let folder = tempfile::tempdir().unwrap();
        let (path, done) = (folder.path().join("file"), AtomicBool::new(false));
        let foreign = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/pth/kinds.pth");
        let of_foreign = TensorFile::read(Path::new(foreign)).unwrap().tensors.len();
        let of = |count: usize| TensorFile {
            tensors: [("a".repeat(count), Tensor::full([count], 0.5f32))].into(),
            ..TensorFile::default()
        };
        of(1).write(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for count in 2..200 {
                    // PyTorch's own files, too.
                    let pth = folder.path().join("pth");
                    fs::copy(foreign, &pth).and_then(|_| fs::rename(&pth, &path)).unwrap();
                    of(count).write(&path).unwrap();
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                let read = TensorFile::read(&path).unwrap();
                let whole = |(name, tensor): (&String, &Tensor)| tensor.count() == name.len();
                let ours = read.tensors.keys().any(|name| name.starts_with('a'));
                assert!(if ours { read.tensors.iter().all(whole) } else { read.tensors.len() == of_foreign });
            }
        });
    }

    #[test]
    fn equal_contents_are_equal_bytes() -> Result<()> {
        let file = || {
            let mut file = TensorFile::default();
            file.tensors.insert("weight".into(), Tensor::full([2, 3], 0.5f32));
            file.tensors.insert("Zero".into(), Tensor::scalar(0u32));
            for key in ["format", "config", "progress", "data", "é \" \n"] {
                file.metadata.insert(key.into(), format!("{key} of a run"));
            }
            file
        };
        let bytes = file().to_bytes()?;
        for _ in 0..20 {
            assert!(file().to_bytes()? == bytes);
        }
        let read = TensorFile::parse(&bytes, "bytes")?;
        assert_eq!(read.metadata, file().metadata);
        // Reading the metadata alone needs nothing of what follows them, and succeeds only if they are complete.
        let (folder, header) = (tempfile::tempdir().unwrap(), bytes.len() - 6 * 4 - 8);
        let path = folder.path().join("file");
        for length in [0, 5, 8, 9, header / 2, header - 1, header, bytes.len()] {
            fs::write(&path, &bytes[..length]).unwrap();
            let metadata = TensorFile::read_metadata(&path);
            assert_eq!(metadata.ok(), (length >= header).then(|| file().metadata), "{length} of {}", bytes.len());
        }
        assert_eq!(read.tensors["weight"].to_vec::<f32>()?, [0.5; 6]);
        Ok(())
    }

    #[test]
    fn a_file_with_a_bit_flipped_is_refused() -> Result<()> {
        for metadata in [HashMap::new(), HashMap::from([("data".to_owned(), "cat, dog".to_owned())])] {
            let tensors = [("weight", Tensor::full([2, 3], 0.5f32)), ("steps", Tensor::scalar(7u32))];
            let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into();
            let mut bytes = TensorFile { tensors, metadata }.to_bytes()?;
            let parse = |bytes: &[u8]| TensorFile::parse(bytes, "bytes");
            parse(&bytes)?;
            let name = bytes.windows(CHECKSUM.len()).position(|window| window == CHECKSUM.as_bytes()).unwrap();
            for bit in 0..8 * bytes.len() {
                // A flip in the key's name leaves a file without a checksum, which is otherwise undamaged.
                if (name..name + CHECKSUM.len()).contains(&(bit / 8)) {
                    continue;
                }
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert!(parse(&bytes).is_err(), "bit {bit}: {}", String::from_utf8_lossy(&bytes));
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
        Ok(())
    }
}
