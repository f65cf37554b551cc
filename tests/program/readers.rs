//! Files cut off anywhere or with another header, and configurations of anything: errors, but never a panic.

use crate::common::program::{biformer, fresh, text};
use crate::common::samples;
use biformer::config::{Changes, RunConfig};
use biformer::model::TensorFile;
use biformer::trainer::stored::Stored;
use proptest::prelude::*;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The bytes of a small checkpoint, and of what was exported from it, each with the length of its header.
fn files() -> &'static [(Vec<u8>, usize); 2] {
    static BYTES: OnceLock<[(Vec<u8>, usize); 2]> = OnceLock::new();
    BYTES.get_or_init(|| {
        let folder = fresh("readers");
        let data = samples::cifar10(&folder.join("data"));
        let (config, run) = (samples::config(&folder, ""), folder.join("run"));
        let files = ["--config", text(&config), "--data", text(&data), "--out", text(&run)];
        biformer(&[&["train", "--epochs", "1"][..], &files].concat()).ok();
        let [checkpoint, exported] = ["checkpoint.safetensors", "exported.safetensors"].map(|name| run.join(name));
        biformer(&["export", "--checkpoint", text(&run), "--output", text(&exported)]).ok();
        [checkpoint, exported].map(|path| {
            let bytes = fs::read(path).unwrap();
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
            (bytes, header)
        })
    })
}

/// The key of a file's checksum in its metadata.
const CHECKSUM: &[u8] = b"crc32";

/// The bytes but for spaces and line breaks, which a header may have anywhere between its parts.
fn without_spaces(bytes: &[u8]) -> impl Iterator<Item = &u8> {
    bytes.iter().filter(|byte| !byte.is_ascii_whitespace())
}

/// Reads bytes as the program reads a file of weights: into a model.
fn read(bytes: &[u8], name: &str) -> bool {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("readers-{name}.safetensors"));
    fs::write(&path, bytes).unwrap();
    Stored::read(&path).and_then(Stored::into_weights).is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_checkpoint_cut_anywhere(share in 0.0..1.0f64, in_header in any::<bool>()) {
        let [(bytes, header), _] = files();
        let end = if in_header { *header } else { bytes.len() };
        prop_assert!(TensorFile::parse(&bytes[..(share * end as f64) as usize], "cut").is_err());
    }

    #[test]
    fn files_with_bytes_of_the_header_changed(changes in prop::collection::vec((0.0..1.0f64, any::<u8>()), 1..4)) {
        for (bytes, header) in files() {
            let mut changed = bytes.clone();
            for (place, byte) in &changes {
                changed[(place * *header as f64) as usize] ^= byte;
            }
            let accepted = read(&changed, "changed");
            // What a file without a checksum says is looked at. Some changes leave a checkpoint: the digits of a
            // learning rate, a name's letter.
            if let Some(place) = changed.windows(CHECKSUM.len()).position(|part| part == CHECKSUM) {
                prop_assert!(!accepted || without_spaces(&changed).eq(without_spaces(bytes)), "its checksum is another");
                changed[place] = b'x';
                read(&changed, "unchecked");
            }
        }
    }

    #[test]
    fn a_header_that_says_anything(dims in prop::collection::vec(any::<usize>(), 0..5), from in 0usize..32, to in 0usize..32) {
        let header = format!("{{\"x\":{{\"dtype\":\"F32\",\"shape\":{dims:?},\"data_offsets\":[{from},{to}]}}}}");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.resize(bytes.len() + 16, 0);
        if let Ok(file) = TensorFile::parse(&bytes, "made up") {
            prop_assert_eq!(dims.iter().product::<usize>() * 4, to - from);
            prop_assert_eq!(&file.tensors["x"].shape()[..], &dims[..]);
            prop_assert!(to <= 16);
        }
    }

    #[test]
    fn a_configuration_of_anything(text in toml_text()) {
        let _ = RunConfig::parse(&text);
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("readers-config.toml");
        fs::write(&path, &text).unwrap();
        if let Ok(changes) = Changes::gather(Some(&path), toml::Table::new()) {
            let fresh = RunConfig::changed(&changes);
            // What is accepted is accepted again when it is read back.
            if let Ok(config) = fresh {
                prop_assert_eq!(RunConfig::parse(&config.to_toml().unwrap()).unwrap(), config.clone());
                prop_assert!(config.resumed(&changes).is_ok());
            }
        }
    }
}

/// Mostly lines with keys that exist, and values of which many are wrong.
fn toml_text() -> impl Strategy<Value = String> {
    let base = toml::Table::try_from(RunConfig::for_model("nano").unwrap()).unwrap();
    let mut keys = vec![];
    for (key, value) in &base {
        match value {
            toml::Value::Table(inner) => keys.extend(inner.keys().map(|field| format!("{key}.{field}"))),
            _ => keys.push(key.clone()),
        }
    }
    keys.extend(["architecture".into(), "archtecture.x".into(), "schedule".into(), "".into()]);
    let value = prop_oneof![
        any::<i64>().prop_map(|x| x.to_string()),
        (0i64..40).prop_map(|x| x.to_string()),
        any::<f64>().prop_map(|x| format!("{x:?}")),
        (0.0..1.0f64).prop_map(|x| x.to_string()),
        any::<bool>().prop_map(|x| x.to_string()),
        prop::collection::vec(-3i64..20, 0..5).prop_map(|x| format!("{x:?}")),
        prop::sample::select(vec![
            "\"nano\"",
            "\"tiny\"",
            "\"\"",
            "{}",
            "[[]]",
            "\"cosine\"",
            "nan",
            "-inf",
            "'x",
            "7 #"
        ])
        .prop_map(str::to_owned),
        any::<String>().prop_map(|x| format!("{x:?}")),
    ];
    let line = (prop::sample::select(keys), value).prop_map(|(key, value)| format!("{key} = {value}"));
    let lines = prop::collection::vec(line, 0..4).prop_map(|lines| lines.join("\n"));
    prop_oneof![9 => lines, 1 => any::<String>()]
}

#[test]
fn an_empty_tensor_of_impossible_shape() {
    let header = "{\"x\":{\"dtype\":\"F32\",\"shape\":[0,1099511627776,1099511627776],\"data_offsets\":[0,0]}}";
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    let error = TensorFile::parse(&bytes, "made up").unwrap_err().to_string();
    assert!(error.contains("made up") && error.contains("impossible shape"), "{error}");
}

#[test]
fn a_header_longer_than_the_file_takes_no_memory() {
    let mut bytes = u64::MAX.to_le_bytes().to_vec();
    bytes.extend([b'{'; 40]);
    assert!(TensorFile::parse(&bytes, "made up").is_err());
    bytes[..8].copy_from_slice(&(90_000_000u64).to_le_bytes());
    assert!(TensorFile::parse(&bytes, "made up").is_err());
}

#[test]
#[cfg(unix)]
fn files_are_written_whole_through_links_and_never_over_devices() {
    use biformer::tensor::Tensor;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
    let folder = fresh("readers-write");
    let mut file = TensorFile::default();
    file.tensors.insert("x".into(), Tensor::full([3], 1f32));
    let (target, link) = (folder.join("target"), folder.join("link"));
    file.write(&target).unwrap();
    fs::set_permissions(&target, fs::Permissions::from_mode(0o640)).unwrap();
    // Who may not give it away keeps it.
    let _ = chown(&target, Some(1234), Some(1234));
    let owner = fs::metadata(&target).unwrap().uid();
    symlink(&target, &link).unwrap();
    file.tensors.insert("x".into(), Tensor::full([4], 2f32));
    file.write(&link).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(*TensorFile::read(&target).unwrap().tensors["x"].shape(), [4]);
    assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o640);
    assert_eq!(fs::metadata(&target).unwrap().uid(), owner);
    fs::remove_file(&target).unwrap();
    file.write(&link).unwrap();
    assert_eq!(*TensorFile::read(&target).unwrap().tensors["x"].shape(), [4], "through a link to nothing");
    fs::remove_file(&link).unwrap();
    symlink("link", &link).unwrap();
    assert!(file.write(&link).is_err(), "a link to itself leads nowhere");
    fs::remove_file(&link).unwrap();
    symlink("target", &link).unwrap();
    assert!(file.write(&folder).unwrap_err().to_string().contains("regular file"));
    assert_eq!(crate::common::program::contents(&folder).len(), 2);
}

#[test]
fn a_file_may_have_the_longest_name_that_there_is() {
    let folder = fresh("readers-longest");
    let path = folder.join("n".repeat(255));
    TensorFile::default().write(&path).unwrap();
    assert!(TensorFile::read(&path).unwrap().tensors.is_empty());
    assert_eq!(crate::common::program::contents(&folder).len(), 1);
}
