//! PyTorch's own files, `.pth` or `.pt`, as `torch.save` has written them since version 1.6: a ZIP archive with a pickle,
//! `data.pkl`, that describes what was saved, and the elements of each storage, `data/0`, `data/1`, ..., as they lie in memory
//! (the layout is described in PyTorch's `docs/source/notes/serialization.rst`). Nothing in it is run.

mod pickle;

use crate::error::Error;
use crate::files::{TensorFile, from_bytes};
use pickle::{Id, Value, Values};
use safetensors::tensor::Dtype;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use tensor::Tensor;
use zip::ZipArchive;

/// What the files begin with.
pub const MAGIC: &[u8] = b"PK\x03\x04";
/// What those of earlier versions begin with: a pickle of a large number, of which this is the first half.
pub const OLD_MAGIC: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9";

/// Where programs that save more than weights put these, first that of the published models.
const PLACES: [&str; 4] = ["model", "state_dict", "model_state_dict", "module"];
/// A pickle of names and shapes is far shorter, and a value takes ten times the memory of its opcode.
const LONGEST_PICKLE: u64 = 16 << 20;
/// Tensors may share memory, but not so that a short file fills the computer's, or is read for hours.
const MOST_SHARING: u64 = 8;
const MOST_AXES: usize = 8;

/// Errors say what is wrong with the file.
type Result<T> = std::result::Result<T, String>;

/// The tensors of a file: those of the dictionary that was saved; or, where other dictionaries lie in it, as in what training
/// programs keep, those of its entry `model`, `state_dict`, `model_state_dict` or `module`, or of the only one that has tensors.
pub fn read(path: &Path) -> crate::error::Result<TensorFile> {
    let shown = path.display().to_string();
    let io = |cause| Error::Io { path: shown.clone(), cause };
    let file = File::open(path).map_err(io)?;
    let length = file.metadata().map_err(io)?.len();
    parse(file, length).map_err(|reason| Error::Format { path: shown, reason })
}

fn parse(file: File, length: u64) -> Result<TensorFile> {
    let mut archive = Archive::open(file, length.saturating_mul(MOST_SHARING))?;
    let pickle = archive.entry("data.pkl", LONGEST_PICKLE)?;
    assemble(&Values::read(&pickle)?, archive.left, |key| archive.entry(&format!("data/{key}"), u64::MAX))
}

/// The tensors that a pickle describes, of `most` bytes at most, from their storages' bytes by key.
fn assemble(values: &Values, most: u64, mut bytes: impl FnMut(&str) -> Result<Vec<u8>>) -> Result<TensorFile> {
    let mut views = vec![];
    for (name, tensor) in state_dict(values)? {
        views.push((name, View::of(values, tensor).map_err(|reason| format!("tensor {name}: {reason}"))?));
    }
    if views.iter().map(|(_, view)| view.bytes()).fold(0, u64::saturating_add) > most {
        return Err("its tensors are larger than the file".to_owned());
    }
    // So that each storage is read once, and no two are kept.
    views.sort_by_key(|(_, view)| view.key);
    let mut tensors = BTreeMap::new();
    for views in views.chunk_by(|(_, a), (_, b)| a.key == b.key) {
        let storage = bytes(views[0].1.key)?;
        for (name, view) in views {
            let tensor = view.tensor(&storage).map_err(|reason| format!("tensor {name}: {reason}"))?;
            tensors.insert((*name).to_owned(), tensor);
        }
    }
    Ok(TensorFile { tensors, ..TensorFile::default() })
}

/// An open archive, whose entries lie in a folder.
struct Archive {
    archive: ZipArchive<BufReader<File>>,
    folder: String,
    /// So many bytes may still be read.
    left: u64,
}

impl Archive {
    fn open(file: File, left: u64) -> Result<Self> {
        let archive = ZipArchive::new(BufReader::new(file)).map_err(|error| error.to_string())?;
        let folder = archive.file_names().filter_map(std::result::Result::ok).find_map(|name| {
            let folder = name.strip_suffix("data.pkl")?;
            (folder.is_empty() || folder.ends_with('/')).then(|| folder.to_owned())
        });
        let folder = folder.ok_or("an archive, but not one that torch.save wrote")?;
        let mut archive = Self { archive, folder, left };
        match archive.entry("byteorder", 100) {
            Ok(order) if order != b"little" => Err("a big-endian machine wrote it".to_owned()),
            _ => Ok(archive),
        }
    }

    fn entry(&mut self, name: &str, most: u64) -> Result<Vec<u8>> {
        let name = format!("{}{name}", self.folder);
        let told = |error: &dyn std::fmt::Display| format!("{name}: {error}");
        let mut entry = self.archive.by_name(&name).map_err(|error| told(&error))?;
        let size = entry.size();
        if size > most.min(self.left) {
            return Err(told(&"too long"));
        }
        self.left -= size;
        let mut bytes = vec![];
        bytes.try_reserve_exact(size as usize).map_err(|error| told(&error))?;
        // The checksum is compared when no more comes.
        entry.by_ref().take(size + 1).read_to_end(&mut bytes).map_err(|error| told(&error))?;
        Ok(bytes)
    }
}

/// The tensors by name.
type Named<'v> = Vec<(&'v str, Id)>;

/// The dictionary of tensors that was saved, or that lies in what was saved.
fn state_dict(values: &Values) -> Result<Named<'_>> {
    let own = tensors(values, values.top());
    if !own.is_empty() {
        return Ok(own);
    }
    let within = values.entries(values.top()).iter().filter_map(|&(name, dict)| Some((text(values, name)?, dict)));
    let mut within: Vec<_> = within.map(|(name, dict)| (name, tensors(values, dict))).collect();
    within.retain(|(_, tensors)| !tensors.is_empty());
    let place = PLACES.iter().find_map(|place| within.iter().position(|(name, _)| name == place));
    match (place, within.len()) {
        (Some(place), _) => Ok(within.swap_remove(place).1),
        (None, 1) => Ok(within.remove(0).1),
        (None, 0) => Err("it has no tensors by name: save the model's state_dict()".to_owned()),
        (None, _) => {
            let names: Vec<&str> = within.iter().map(|&(name, _)| name).collect();
            Err(format!("it has tensors in {}: save one of them alone", names.join(" and ")))
        }
    }
}

/// The tensors in a dictionary.
fn tensors(values: &Values, dict: Id) -> Named<'_> {
    let named = values.entries(dict).iter().filter_map(|&(name, value)| Some((text(values, name)?, value)));
    named.filter_map(|(name, value)| Some((name, rebuilt(values, value)?))).collect()
}

fn text(values: &Values, id: Id) -> Option<&str> {
    if let Value::Text(text) = values.get(id) { Some(text) } else { None }
}

/// The arguments of the call that makes a tensor, if a value is one, or a parameter around it.
fn rebuilt(values: &Values, id: Id) -> Option<Id> {
    let call = |id: Id| match values.get(id) {
        Value::Call { function, arguments, .. } => match values.get(*function) {
            Value::Global(name) => Some((name.strip_prefix("torch._utils._rebuild_")?, *arguments)),
            _ => None,
        },
        _ => None,
    };
    match call(id)? {
        ("parameter" | "parameter_with_state", arguments) => match values.get(arguments) {
            Value::Sequence(items) => call(*items.first()?),
            _ => None,
        },
        made => Some(made),
    }
    .filter(|(what, _)| matches!(*what, "tensor" | "tensor_v2"))
    .map(|(_, arguments)| arguments)
}

/// A tensor: a part of a storage.
struct View<'v> {
    /// What the storage is called.
    key: &'v str,
    dtype: Dtype,
    /// The bytes of an element.
    size: usize,
    /// The first element's place in the storage.
    offset: usize,
    shape: Vec<usize>,
    /// From one element to the next along each axis.
    strides: Vec<usize>,
}

impl<'v> View<'v> {
    /// The view that a call describes: of a storage, from an element on, of a shape, with strides.
    fn of(values: &'v Values, arguments: Id) -> Result<Self> {
        let impossible = || "its description makes no sense".to_owned();
        let number = |id: Id| match values.get(id) {
            Value::Int(number) => usize::try_from(*number).map_err(|_| impossible()),
            _ => Err(impossible()),
        };
        let items = |id: Id| match values.get(id) {
            Value::Sequence(items) => Ok(items.as_slice()),
            _ => Err(impossible()),
        };
        let extents = |id: Id| match items(id)? {
            axes if axes.len() <= MOST_AXES => axes.iter().map(|&axis| number(axis)).collect(),
            _ => Err(impossible()),
        };
        let [storage, offset, shape, strides, ..] = *items(arguments)? else { return Err(impossible()) };
        let Value::Persistent(storage) = *values.get(storage) else { return Err(impossible()) };
        // ("storage", class, key, device, number of elements)
        let [_, class, key, ..] = *items(storage)? else { return Err(impossible()) };
        let (Value::Global(class), Some(key)) = (values.get(class), text(values, key)) else {
            return Err(impossible());
        };
        let (offset, shape, strides): (_, Vec<usize>, Vec<usize>) =
            (number(offset)?, extents(shape)?, extents(strides)?);
        let (dtype, size) = match class.as_str() {
            "torch.FloatStorage" => (Dtype::F32, 4),
            "torch.DoubleStorage" => (Dtype::F64, 8),
            "torch.BFloat16Storage" => (Dtype::BF16, 2),
            "torch.HalfStorage" => (Dtype::F16, 2),
            "torch.LongStorage" => (Dtype::I64, 8),
            "torch.IntStorage" => (Dtype::I32, 4),
            other => return Err(format!("has elements of type {other}, which no model uses")),
        };
        let count = shape.iter().try_fold(1, |count: usize, &extent| count.checked_mul(extent.max(1)));
        if shape.len() != strides.len() || count.and_then(|count| count.checked_mul(size)).is_none() {
            return Err(impossible());
        }
        Ok(Self { key, dtype, size, offset, shape, strides })
    }

    fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.size) as u64
    }

    fn tensor(&self, storage: &[u8]) -> Result<Tensor> {
        let mut bytes = Vec::with_capacity(self.bytes() as usize);
        if bytes.capacity() > 0 {
            self.gather(storage, 0, self.offset, &mut bytes).ok_or("it reaches beyond its storage")?;
        }
        from_bytes(self.dtype, &bytes, self.shape.clone())
    }

    /// Puts the elements of the axes from `axis` on behind `bytes`, in order.
    fn gather(&self, storage: &[u8], axis: usize, at: usize, bytes: &mut Vec<u8>) -> Option<()> {
        if let Some(length) = self.run(axis) {
            let end = at.checked_add(length)?.checked_mul(self.size)?;
            bytes.extend(storage.get(at * self.size..end)?);
            return Some(());
        }
        (0..self.shape[axis]).try_for_each(|index| {
            let at = at.checked_add(index.checked_mul(self.strides[axis])?)?;
            self.gather(storage, axis + 1, at, bytes)
        })
    }

    /// The number of elements of the axes from `axis` on, where they lie one behind the other.
    fn run(&self, axis: usize) -> Option<usize> {
        let axes = self.shape[axis..].iter().zip(&self.strides[axis..]).rev();
        axes.into_iter()
            .try_fold(1, |length, (&extent, &stride)| (extent == 1 || stride == length).then_some(length * extent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/pth");

    fn pickle(name: &str) -> Vec<u8> {
        let mut archive = Archive::open(File::open(format!("{FIXTURES}/{name}")).unwrap(), u64::MAX).unwrap();
        archive.entry("data.pkl", LONGEST_PICKLE).unwrap()
    }

    /// Checksums keep most damage from the pickle; who writes one on purpose gets them right.
    fn assembled(pickle: &[u8]) -> Result<TensorFile> {
        assemble(&Values::read(pickle)?, 1 << 20, |_| Ok(vec![1; 4096]))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5000))]

        #[test]
        fn no_pickle_harms(
            name in prop_oneof![Just("training.pth"), Just("kinds.pth"), Just("module.pth")],
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let mut pickle = pickle(name);
            for (at, byte) in changes {
                let at = at.index(pickle.len());
                pickle[at] = byte;
            }
            let _ = assembled(&pickle);
        }

        #[test]
        fn nor_does_one_of_opcodes_alone(opcodes in prop::collection::vec(
            prop::sample::select(&b"(0123NK)]}tldaesuqhrjcQRb.\x80\x81\x85\x86\x87\x88\x8a\x8c\x8f\x90\x91\x92\x93\x94X\x01\x02"[..]),
            0..60,
        )) {
            let _ = assembled(&opcodes);
        }
    }

    #[test]
    fn a_short_file_fills_no_memory() {
        // A tensor of 2^40 elements that are all the first one, as expand() makes it.
        let view = |shape: &[u8], strides: &[u8]| {
            let parts: [&[u8]; 8] = [
                b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n(",
                b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQK\0",
                b"(",
                shape,
                b"t(",
                strides,
                b"t",
                b"tRs.",
            ];
            assembled(&parts.concat())
        };
        assert_eq!(view(b"K\x02", b"K\x01").unwrap().tensors["w"].shape().to_vec(), [2]);
        let told = |shape: &[u8], strides: &[u8]| view(shape, strides).unwrap_err();
        assert_eq!(told(b"\x8a\x06\0\0\0\0\0\x01", b"K\0"), "its tensors are larger than the file");
        assert!(told(b"\x8a\x06\0\0\0\0\0\x01\x8a\x06\0\0\0\0\0\x01", b"K\0K\0").contains("makes no sense"));
        assert!(told(b"J\xff\xff\xff\xff", b"K\0").contains("makes no sense"));
        assert!(told(b"K\x01K\x01", b"K\0").contains("makes no sense"));
        assert!(told(b"M\x01\x04", b"K\x01").contains("beyond its storage"));
        assert!(told(b"K\x02", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f").contains("beyond its storage"));
    }
}
