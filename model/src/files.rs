//! Tensor files: safetensors in and out, and PyTorch's own are read, too.

use crate::error::{Error, Result};
use crate::pth;
use crate::safely::write_with;
use crc32fast::Hasher;
use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::Path;
use tensor::{DType, Device, Element, Tensor, bf16};

/// Metadata entry with the CRC-32, in hexadecimal, of everything else in the file: of the header without this entry (as
/// JSON with sorted keys and no blanks), then of the tensors' bytes. Without it, silently corrupted weights would be
/// trained on.
const CHECKSUM: &str = "crc32";

/// Named tensors and a few strings beside them: the contents of a safetensors file.
#[derive(Clone, Debug, Default)]
pub struct TensorFile {
    /// The tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// The file's metadata, without the checksum, which is computed when the file is written.
    pub metadata: HashMap<String, String>,
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
        let read = |most| read_regular(path, most).map_err(|cause| io(path, cause));
        let shown = path.display().to_string();
        // Another kind of file may be larger than the memory.
        let beginning = read(9)?;
        if beginning.starts_with(pth::MAGIC) {
            return pth::read(path);
        }
        ensure_safetensors(&beginning, &shown)?;
        Self::parse(&read(u64::MAX)?, &shown)
    }

    /// The same in buffers of its own: what a model goes on to change stays here as it was.
    pub fn duplicate(&self) -> Result<Self> {
        let copies = self.tensors.iter().map(|(name, tensor)| Ok((name.clone(), tensor.duplicate()?)));
        Ok(Self { tensors: copies.collect::<tensor::Result<_>>()?, metadata: self.metadata.clone() })
    }

    /// The metadata of a safetensors file; nothing else is read, so the checksum is not verified. Errors:
    /// [`Error::Io`], [`Error::Foreign`], [`Error::Format`].
    pub fn read_metadata(path: &Path) -> Result<HashMap<String, String>> {
        const LENGTH: usize = size_of::<u64>();
        let read = |most| read_regular(path, most).map_err(|cause| io(path, cause));
        let beginning = read(LENGTH as u64 + 1)?;
        let shown = path.display().to_string();
        ensure_safetensors(&beginning, &shown)?;
        let format = |reason: String| Error::Format { path: shown.clone(), reason };
        let cut = || format("it ends before its header".into());
        let length = beginning.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).ok_or_else(cut)?;
        let end = length.saturating_add(LENGTH as u64);
        let header = read(end)?;
        if (header.len() as u64) < end {
            return Err(cut());
        }
        let mut header: serde_json::Map<String, Value> =
            serde_json::from_slice(&header[LENGTH..]).map_err(|error| format(error.to_string()))?;
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

    /// The bytes of a file with these contents.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![];
        self.encoded()?.put(&mut bytes).map_err(|cause| io(Path::new("memory"), cause))?;
        Ok(bytes)
    }

    /// Writes a file, as [`write_safely`](crate::write_safely) does. The tensors are not copied for that.
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

/// Writes tensors one after the other.
fn put_all(tensors: &[(String, Tensor)], out: &mut impl Write) -> std::io::Result<()> {
    tensors.iter().try_for_each(|(_, tensor)| match tensor.dtype() {
        DType::F32 => put(out, tensor, f32::to_le_bytes),
        DType::F64 => put(out, tensor, f64::to_le_bytes),
        DType::Bf16 => put(out, tensor, bf16::to_le_bytes),
        DType::Index => put(out, tensor, |index: u32| i64::from(index).to_le_bytes()),
    })
}

/// Writes a tensor's elements, a few at a time.
fn put<T: Element, const N: usize>(
    out: &mut impl Write,
    tensor: &Tensor,
    bytes: impl Fn(T) -> [u8; N],
) -> std::io::Result<()> {
    let elements = tensor.as_slice::<T>("file").map_err(std::io::Error::other)?;
    let mut buffer = Vec::with_capacity(4096);
    for few in elements.chunks(4096) {
        buffer.clear();
        buffer.extend(few.iter().map(|&element| bytes(element)));
        out.write_all(buffer.as_flattened())?;
    }
    Ok(())
}

/// What elements of a type are stored as, and in how many bytes: indices as I64, the type that PyTorch reads them as.
fn stored(dtype: DType) -> (&'static str, usize) {
    match dtype {
        DType::F32 => ("F32", 4),
        DType::F64 => ("F64", 8),
        DType::Bf16 => ("BF16", 2),
        DType::Index => ("I64", 8),
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

/// The first bytes of a regular file, at most so many. A device or a pipe might never end.
fn read_regular(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let length = match fs::metadata(path)? {
        file if file.is_file() => file.len().min(most),
        _ => return Err(std::io::Error::other(NOT_REGULAR)),
    };
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(length).unwrap_or(usize::MAX))?;
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub(crate) const NOT_REGULAR: &str = "it is there, but not as a regular file; name another path";

pub(crate) fn io(path: &Path, cause: std::io::Error) -> Error {
    Error::Io { path: path.display().to_string(), cause }
}

/// A tensor from bytes, which must be as many as its elements take.
pub(crate) fn from_bytes(dtype: Dtype, bytes: &[u8], shape: Vec<usize>) -> std::result::Result<Tensor, String> {
    // A tensor can be empty and yet have an impossible shape: an extent of 0 hides the others from the reader's own
    // overflow checks.
    if shape.iter().try_fold(1, |count: usize, &extent| count.checked_mul(extent.max(1))).is_none() {
        return Err(format!("has the impossible shape {shape:?}"));
    }
    let make = |result: tensor::Result<Tensor>| result.map_err(|error| error.to_string());
    match dtype {
        Dtype::F32 => make(Tensor::from_slice(&numbers(bytes, f32::from_le_bytes), shape)),
        Dtype::F64 => make(Tensor::from_slice(&numbers(bytes, f64::from_le_bytes), shape)),
        Dtype::BF16 => make(Tensor::from_slice(&numbers(bytes, bf16::from_le_bytes), shape)),
        Dtype::F16 => make(Tensor::from_slice(&numbers(bytes, |b| half::f16::from_le_bytes(b).to_f32()), shape)),
        Dtype::I64 => index(numbers(bytes, i64::from_le_bytes), shape),
        Dtype::I32 => index(numbers(bytes, i32::from_le_bytes), shape),
        Dtype::U32 => index(numbers(bytes, u32::from_le_bytes), shape),
        Dtype::I16 => index(numbers(bytes, i16::from_le_bytes), shape),
        Dtype::U16 => index(numbers(bytes, u16::from_le_bytes), shape),
        Dtype::I8 => index(numbers(bytes, i8::from_le_bytes), shape),
        Dtype::U8 => index(numbers(bytes, u8::from_le_bytes), shape),
        other => Err(format!(
            "has elements of type {other:?}; expected floats (F32, F64, BF16, F16) or integers (of 8 to 64 bits)"
        )),
    }
}

fn numbers<T, const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&bytes| read(bytes)).collect()
}

fn index<T: TryInto<u32>>(values: Vec<T>, shape: Vec<usize>) -> std::result::Result<Tensor, String> {
    let values: Vec<u32> = values
        .into_iter()
        .map(|value| value.try_into().map_err(|_| "holds an integer that is negative or too large".to_owned()))
        .collect::<std::result::Result<_, String>>()?;
    Tensor::from_slice(&values, shape).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_any_size_are_read() {
        let read =
            |dtype, bytes: &[u8]| from_bytes(dtype, bytes, vec![2]).map(|tensor| tensor.to_vec::<u32>().unwrap());
        for (dtype, bytes) in [
            (Dtype::U8, &[1, 200][..]),
            (Dtype::I16, &[1, 0, 200, 0]),
            (Dtype::U16, &[1, 0, 200, 0]),
            (Dtype::I32, &[1, 0, 0, 0, 200, 0, 0, 0]),
        ] {
            assert_eq!(read(dtype, bytes).unwrap(), [1, 200], "{dtype:?}");
        }
        assert_eq!(read(Dtype::I8, &[1, 100]).unwrap(), [1, 100]);
        assert!(read(Dtype::I8, &[1, 200]).unwrap_err().contains("negative"));
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
