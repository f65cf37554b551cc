//! PyTorch's own files, `.pth` or `.pt`, as `torch.save` has written them since version 1.6: a ZIP archive with a
//! pickle, `data.pkl`, that describes what was saved, and the elements of each storage, `data/0`, `data/1`, ..., as
//! they lie in memory (PyTorch's `docs/source/notes/serialization.rst` describes it). Nothing in it is run.
//!
//! | file | what it holds |
//! |---|---|
//! | `archive.rs` | the archive |
//! | `pickle.rs`, `op.rs` | what a pickle is made of; its opcodes |
//! | `view.rs` | tensors: parts of storages |

mod archive;
mod op;
mod pickle;
mod view;

use crate::error::Error;
use crate::files::TensorFile;
use crate::reading::{ensure_free, io};
use archive::Archive;
use pickle::{Id, Values};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::path::Path;
use view::{Made, View, made};

/// What the files begin with.
pub const MAGIC: &[u8; 4] = b"PK\x03\x04";

/// Whether a file begins as those of earlier versions do: with a pickle of a large number, of protocol 2 or 3, or of 4
/// or 5, where the length of the pickle, 13 bytes, comes first.
pub fn is_of_earlier_version(bytes: &[u8]) -> bool {
    match bytes {
        [0x80, 2 | 3, rest @ ..] => rest.starts_with(b"\x8a\x0al\xfc\x9cF\xf9"),
        [0x80, 4 | 5, rest @ ..] => rest.starts_with(b"\x95\x0d\0\0\0\0\0"),
        _ => false,
    }
}

/// The keys under which programs that save more than weights store these, that of the published models first.
const PLACES: [&str; 4] = ["model", "state_dict", "model_state_dict", "module"];
/// The longest pickle that is read: any model's is shorter, and one of a hundred thousand tensors is longer. Reading
/// one takes up to eighty times its length in memory.
const MAX_PICKLE: u64 = 8 << 20;
/// How many times the length of the file its tensors may take in all: they may share storage, but a short file must not
/// fill the memory or take hours to read.
const MAX_SHARING: u64 = 8;

/// What is wrong with a file.
#[derive(Debug)]
enum Problem {
    /// PyTorch did not write it so.
    Damaged(String),
    /// PyTorch may have written it, but it cannot be used here; with advice.
    Unfit(String),
}

impl Problem {
    /// A problem with one tensor.
    fn of(self, tensor: &str) -> Self {
        let named = |what: String| format!("tensor {tensor}: {what}");
        match self {
            Self::Damaged(what) => Self::Damaged(named(what)),
            Self::Unfit(what) => Self::Unfit(named(what)),
        }
    }
}

impl From<String> for Problem {
    fn from(damage: String) -> Self {
        Self::Damaged(damage)
    }
}

type Result<T> = std::result::Result<T, Problem>;

/// The tensors of a file that is open; `path` names it in errors. If the dictionary that was saved contains others, as
/// those of training programs do: those of its entry `model`, or else `state_dict`, `model_state_dict` or `module`; or
/// its own; or those of the only one that has any.
pub fn read(file: File, path: &Path) -> crate::error::Result<TensorFile> {
    let length = file.metadata().map_err(|cause| io(path, cause))?.len();
    // What its tensors take is not known before the pickle has been read; most are not compressed, and read one by one.
    ensure_free(path, length)?;
    let shown = path.display().to_string();
    parse(file, length).map_err(|problem| match problem {
        Problem::Damaged(reason) => Error::Format { path: shown, reason },
        Problem::Unfit(reason) => Error::Unfit { path: shown, reason },
    })
}

fn parse(file: File, length: u64) -> Result<TensorFile> {
    let mut archive = Archive::open(file, length.saturating_mul(MAX_SHARING))?;
    let pickle = archive.entry("data.pkl", MAX_PICKLE)?;
    assemble(&Values::read(&pickle)?, archive.left(), |key| archive.entry(&format!("data/{key}"), u64::MAX))
}

/// The tensors that a pickle describes, of `most` bytes at most, from their storages' bytes by key.
fn assemble(values: &Values, most: u64, mut bytes: impl FnMut(&str) -> Result<Vec<u8>>) -> Result<TensorFile> {
    let mut views = BTreeMap::new();
    for &(name, value) in values.entries(state_dict(values)?) {
        let Some(name) = values.text(name) else { continue };
        match made(values, value) {
            Some(Made::View(arguments)) => {
                // Of equal names the last counts, as in Python.
                views.insert(name, View::of(values, arguments).map_err(|problem| problem.of(name))?);
            }
            Some(Made::Other(how)) => {
                let what = format!("it is of a kind that is not read ({how}); save dense tensors of f32");
                return Err(Problem::Unfit(what).of(name));
            }
            None => {}
        }
    }
    if views.values().map(View::bytes).fold(0, u64::saturating_add) > most {
        let what = "its tensors are larger than the file, as expand() makes them; save contiguous() copies";
        return Err(Problem::Unfit(what.to_owned()));
    }
    // So that each storage is read once, and only one is in memory at a time.
    let mut views: Vec<_> = views.into_iter().collect();
    views.sort_by_key(|(_, view)| view.key);
    let mut tensors = BTreeMap::new();
    for views in views.chunk_by(|(_, a), (_, b)| a.key == b.key) {
        let storage = bytes(views[0].1.key)?;
        for (name, view) in views {
            let tensor = view.tensor(&storage).map_err(|problem| problem.of(name))?;
            tensors.insert((*name).to_owned(), tensor);
        }
    }
    Ok(TensorFile { tensors, ..TensorFile::default() })
}

/// The dictionary of tensors that was saved, or that lies in what was saved.
fn state_dict(values: &Values) -> Result<Id> {
    let top = values.top();
    // Each dictionary is looked at once, however often it lies there.
    let mut known = HashMap::new();
    let mut has_tensors = |dict: Id| {
        let is_tensor = |&(name, value): &(Id, Id)| values.text(name).is_some() && made(values, value).is_some();
        *known.entry(dict).or_insert_with(|| values.entries(dict).iter().any(is_tensor))
    };
    let within = || values.entries(top).iter().filter_map(|&(name, dict)| Some((values.text(name)?, dict)));
    // Before its own tensors, as training programs keep single numbers beside the weights.
    for place in PLACES {
        if let Some((_, dict)) = within().find(|&(name, dict)| name == place && has_tensors(dict)) {
            return Ok(dict);
        }
    }
    if has_tensors(top) {
        return Ok(top);
    }
    let mut seen = HashSet::new();
    let mut others = within().filter(|&(_, dict)| seen.insert(dict) && has_tensors(dict));
    match [others.next(), others.next()] {
        [Some((_, dict)), None] => Ok(dict),
        [Some((one, _)), Some((other, _))] => {
            Err(Problem::Unfit(format!("it has tensors in {one} and in {other}; save one of them alone")))
        }
        [None, _] => {
            Err(Problem::Unfit("it has no tensors by name; save the model's state_dict(), not the model".to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/pth");

    fn pickle(name: &str) -> Vec<u8> {
        let mut archive = Archive::open(File::open(format!("{FIXTURES}/{name}")).unwrap(), u64::MAX).unwrap();
        archive.entry("data.pkl", MAX_PICKLE).unwrap()
    }

    /// Checksums keep most damage from the pickle; who writes one on purpose gets them right.
    fn assembled(pickle: &[u8]) -> Result<TensorFile> {
        assemble(&Values::read(pickle)?, 1 << 20, |_| Ok(vec![1; 4096]))
    }

    /// The error of an archive with these entries.
    fn refused(entries: &[(&str, &[u8])]) -> String {
        use std::io::Write;
        let file = tempfile::tempfile().unwrap();
        let mut archive = zip::ZipWriter::new(&file);
        let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        for (name, bytes) in entries {
            archive.start_file(*name, stored).unwrap();
            archive.write_all(bytes).unwrap();
        }
        archive.finish().unwrap();
        read(file, Path::new("it.pth")).unwrap_err().to_string()
    }

    #[test]
    fn what_a_big_endian_machine_wrote_is_refused() {
        let refused = refused(&[("it/data.pkl", &pickle("training.pth")), ("it/byteorder", b"big")]);
        assert!(refused.contains("a big-endian machine wrote it"), "{refused}");
    }

    /// They are no damage.
    #[test]
    fn what_is_long_or_compressed_is_to_be_saved_otherwise() {
        let long = vec![b'N'; MAX_PICKLE as usize + 1];
        let refused = refused(&[("it/data.pkl", &long)]);
        assert!(refused.contains("save the weights alone") && !refused.contains("damaged"), "{refused}");

        // The method of each entry's head, and of its line in the directory, is said to be another.
        let mut bytes = std::fs::read(format!("{FIXTURES}/training.pth")).unwrap();
        for (mark, at) in [(b"PK\x03\x04", 8), (b"PK\x01\x02", 10)] {
            let found: Vec<usize> = (0..bytes.len() - 4).filter(|&start| bytes[start..].starts_with(mark)).collect();
            found.into_iter().for_each(|start| bytes[start + at] = 8);
        }
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        let refused = read(file, Path::new("it.pth")).unwrap_err().to_string();
        assert!(refused.contains("it is compressed"), "{refused}");
    }

    /// As Python pickles 0x1950a86a20f9469cfc6c in protocols 2 to 5.
    #[test]
    fn files_of_earlier_versions_are_known_by_their_beginning() {
        let number = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";
        for protocol in 2..=5 {
            let frame: &[u8] = if protocol < 4 { b"" } else { b"\x95\x0d\0\0\0\0\0\0\0" };
            let whole = [&[0x80, protocol], frame, number].concat();
            assert!(is_of_earlier_version(&whole[..9]), "{protocol}");
        }
        assert!(!is_of_earlier_version(b"\x80\x01\x8a\x0al\xfc\x9cF\xf9") && !is_of_earlier_version(b"\x80"));
    }

    #[test]
    fn of_equal_names_the_last_counts_as_in_python() {
        let tensor = |key: u8, class: &str| {
            let name = b"X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n";
            let rest = [b"X\x01\0\0\0", &[key][..], b"X\x03\0\0\0cpuK\x01tQK\0(K\x01t(K\x01ttR"].concat();
            [&name[..], format!("{class}\n").as_bytes(), &rest].concat()
        };
        // By their storages' keys the other would come last.
        let both = [tensor(b'9', "ByteStorage"), tensor(b'0', "ShortStorage")].concat();
        let file = assembled(&[b"\x80\x02}(", &both[..], b"u."].concat()).unwrap();
        assert_eq!(file.tensors["w"].to_vec::<u32>().unwrap(), [257]);
    }

    /// The first entry's folder, as PyTorch has it; and a way out for one that somebody has packed again.
    #[test]
    fn archives_are_read_as_pytorch_reads_them() {
        use std::io::Write;
        let read = |entries: &[(&str, &str)]| {
            let file = tempfile::tempfile().unwrap();
            let mut archive = zip::ZipWriter::new(&file);
            let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
            for (name, from) in entries {
                archive.start_file(*name, stored).unwrap();
                archive.write_all(&pickle(from)).unwrap();
            }
            archive.finish().unwrap();
            super::read(file, Path::new("it.pth")).map(|file| file.tensors.len()).unwrap_err().to_string()
        };
        // Of a module, and of tensors whose storages are not there.
        let [first, second] = ["module.pth", "expanded.pth"];
        assert!(read(&[("a/sub/data.pkl", first), ("a/data.pkl", second)]).contains("expand()"));
        assert!(read(&[("a/data.pkl", first), ("a/sub/data.pkl", second)]).contains("state_dict()"));
        assert!(read(&[("data.pkl", second)]).contains("none that torch.save wrote"));
    }

    #[test]
    fn short_integers_are_index_tensors() {
        for (storage, element) in [("ByteStorage", 1), ("CharStorage", 1), ("ShortStorage", 257)] {
            let tensor = format!("ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n{storage}\n");
            let rest = b"X\x01\0\0\x000X\x03\0\0\0cpuK\x02tQK\0(K\x02t(K\x01ttRs.";
            let file = assembled(&[b"\x80\x02}X\x01\0\0\0w", tensor.as_bytes(), rest].concat()).unwrap();
            assert_eq!(file.tensors["w"].to_vec::<u32>().unwrap(), [element; 2], "{storage}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 5000, failure_persistence: None, ..ProptestConfig::default() })]

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
    fn what_lies_in_many_places_is_looked_at_once() {
        // A dictionary of many numbers, itself as often in another; and as many classes with one long name.
        const OFTEN: usize = 300_000;
        let times = |what: &[u8]| what.repeat(OFTEN);
        let dict = |name: &[u8]| {
            [
                &b"\x80\x02X"[..],
                &[name.len() as u8, 0, 0, 0],
                name,
                b"q\0}q\x01(",
                &times(b"h\0K\x01"),
                b"u}(",
                &times(b"h\0h\x01"),
                b"u.",
            ]
            .concat()
        };
        // Also where it is looked for by its name.
        for name in [&b"w"[..], b"model"] {
            assert!(format!("{:?}", assembled(&dict(name)).unwrap_err()).contains("no tensors by name"));
        }
        let long =
            |length: u32| [&b"\x80\x04X"[..], &length.to_le_bytes(), &vec![b'm'; length as usize], b"\x94"].concat();
        let names = [&long(1 << 10)[..], b"(", &times(b"h\0h\0\x93"), b"t."].concat();
        assert!(format!("{:?}", assembled(&names).unwrap_err()).contains("no tensors by name"));
        // A tensor under a name that is too long to be one.
        let tensor = [
            &b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"[..],
            b"X\x01\0\0\x000X\x03\0\0\0cpuK\x01tQK\0(K\x01t(K\x01ttR\x94",
        ]
        .concat();
        let of_name = |length: u32| [&long(length)[..], &tensor, b"}(", &b"h\0h\x01".repeat(1 << 17), b"u."].concat();
        assert_eq!(assembled(&of_name(1 << 10)).unwrap().tensors.len(), 1);
        assert!(format!("{:?}", assembled(&of_name(1 << 22)).unwrap_err()).contains("no tensors by name"));
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
        let told = |shape: &[u8], strides: &[u8]| format!("{:?}", view(shape, strides).unwrap_err());
        assert!(told(b"\x8a\x06\0\0\0\0\0\x01", b"K\0").contains("larger than the file"));
        assert!(told(b"\x8a\x06\0\0\0\0\0\x01\x8a\x06\0\0\0\0\0\x01", b"K\0K\0").contains("makes no sense"));
        assert!(told(b"J\xff\xff\xff\xff", b"K\0").contains("makes no sense"));
        assert!(told(b"K\x01K\x01", b"K\0").contains("makes no sense"));
        assert!(told(b"M\x01\x04", b"K\x01").contains("beyond its storage"));
        assert!(told(b"K\x02", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f").contains("beyond its storage"));
    }
}
