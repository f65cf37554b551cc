//! Tensor files: safetensors in and out, and PyTorch's own are read, too.

use crate::elements::{put_all, stored};
use crate::error::{Error, Result};
use crate::header::{CHECKSUM, Header, METADATA, Summing, damaged, in_order, written};
use crate::pth;
use crate::reading::{ensure_free, io, open_regular};
use crate::safely::write_with;
use crc32fast::Hasher;
use serde_json::json;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::{BufWriter, Cursor, Read, Seek, Write};
use std::path::Path;
use tensor::{Device, Tensor};

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
    /// entry that has any. Tensors with names of over 1,024 bytes are left out.
    ///
    /// Errors: [`Error::Io`]; [`Error::Foreign`] for another kind of file, and [`Error::OldArchive`]; [`Error::Format`]
    /// for one that is damaged; [`Error::Unfit`] for tensors of other types, or other integers.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_wanted(path, |_, _| true)
    }

    /// The same, without those tensors of a safetensors file that are not wanted, by its metadata and their names:
    /// their bytes are verified, too, but take no memory. Of PyTorch's own files all are read. Errors: those of
    /// [`read`](Self::read).
    pub fn read_wanted(path: &Path, wants: impl Fn(&HashMap<String, String>, &str) -> bool) -> Result<Self> {
        // Opened once: at any moment another file may be renamed to this path, as a run's next checkpoint is.
        let mut file = open_regular(path)?;
        let shown = path.display().to_string();
        let mut beginning = [0; pth::MAGIC.len()];
        if file.read_exact(&mut beginning).is_ok() && beginning == *pth::MAGIC {
            return pth::read(file, path);
        }
        let length = file.metadata().map_err(|cause| io(path, cause))?.len();
        // Other models' files are easily named by mistake, and some are very large.
        Self::take_in(&mut file, length, &shown, wants, |needed| ensure_free(path, needed))
    }

    /// The same in buffers of its own: what a model goes on to change stays here as it was.
    pub fn duplicate(&self) -> Result<Self> {
        let copies = self.tensors.iter().map(|(name, tensor)| Ok((name.clone(), tensor.duplicate()?)));
        Ok(Self { tensors: copies.collect::<tensor::Result<_>>()?, metadata: self.metadata.clone() })
    }

    /// The metadata of a safetensors file; nothing else is read, so the checksum is not verified. Errors:
    /// [`Error::Io`], [`Error::Foreign`], [`Error::Format`].
    pub fn read_metadata(path: &Path) -> Result<HashMap<String, String>> {
        let mut file = open_regular(path)?;
        let length = file.metadata().map_err(|cause| io(path, cause))?.len();
        Header::read(&mut file, length, &path.display().to_string())?.metadata()
    }

    /// The contents of a safetensors file's bytes, verified against their checksum if they have one; `path` names it in
    /// errors, which are those of [`TensorFile::read`].
    pub fn parse(bytes: &[u8], path: &str) -> Result<Self> {
        Self::take_in(&mut Cursor::new(bytes), bytes.len() as u64, path, |_, _| true, |_| Ok(()))
    }

    /// Reads a safetensors file of `length` bytes. `ensure_room` is asked how much memory its tensors may take.
    fn take_in(
        source: &mut (impl Read + Seek),
        length: u64,
        path: &str,
        wants: impl Fn(&HashMap<String, String>, &str) -> bool,
        ensure_room: impl FnOnce(u64) -> Result<()>,
    ) -> Result<Self> {
        let header = Header::read(source, length, path)?;
        let metadata = header.metadata()?;
        let wants = |name: &str| wants(&metadata, name);
        let [end, needed] = header.extent(wants);
        if end != length {
            return Err(damaged(path, format!("it has {length} bytes, and its tensors should end after {end}")));
        }
        ensure_room(needed)?;
        let tensors = header.tensors(source, wants)?;
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
        let mut summed = Summing { of: std::io::sink(), sum: Hasher::new() };
        summed.sum.update(&in_order(header.clone().into()));
        put_all(&tensors, &mut summed).map_err(|cause| io(Path::new("memory"), cause))?;
        metadata.insert(CHECKSUM.into(), written(summed.sum));
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
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
                assert!(error.contains("B of memory") && error.contains("are free"), "{dtype}: {error}");
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
            let without_weight = |bytes: &[u8]| {
                let (mut source, length) = (Cursor::new(bytes), bytes.len() as u64);
                TensorFile::take_in(&mut source, length, "bytes", |_, name| name != "weight", |_| Ok(()))
            };
            assert_eq!(parse(&bytes)?.tensors.len(), 2);
            assert!(without_weight(&bytes)?.tensors.keys().eq(["steps"]));
            let name = bytes.windows(CHECKSUM.len()).position(|window| window == CHECKSUM.as_bytes()).unwrap();
            for bit in 0..8 * bytes.len() {
                // A flip in the key's name leaves a file without a checksum, which is otherwise undamaged.
                if (name..name + CHECKSUM.len()).contains(&(bit / 8)) {
                    continue;
                }
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert!(parse(&bytes).is_err(), "bit {bit}: {}", String::from_utf8_lossy(&bytes));
                assert!(without_weight(&bytes).is_err(), "bit {bit}, even of what is not wanted");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
        Ok(())
    }
}
