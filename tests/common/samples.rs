//! Small data sets, and the configuration of a small model.

use super::program::{Ran, biformer, copy_folder, fresh, text};
use biformer::config::Changes;
use biformer::model::{BiFormer, ModelConfig, TensorFile, preset};
use biformer::tensor::{DType, Tensor};
use biformer::trainer::Trainer;
use biformer::trainer::stored::Stored;
use image::ExtendedColorType::Rgb8;
use image::ImageEncoder;
use image::codecs::{jpeg::JpegEncoder, png::PngEncoder};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Training images of [`cifar10`].
pub const TRAIN: usize = 5 * RECORDS;
/// Test images of [`cifar10`].
pub const TEST: usize = RECORDS;
const RECORDS: usize = 32;

/// Writes a data set in the binary layout of CIFAR-10: five files of training images and one of test images, ten
/// classes that differ in colour, with some noise. Gives its folder.
pub fn cifar10(folder: &Path) -> PathBuf {
    cifar10_of(folder, RECORDS)
}

/// The same with so many images in each file.
pub fn cifar10_of(folder: &Path, records: usize) -> PathBuf {
    let data = folder.join("cifar-10-batches-bin");
    fs::create_dir_all(&data).unwrap();
    let files = (1..=5).map(|file| format!("data_batch_{file}.bin")).chain(["test_batch.bin".to_owned()]);
    for (number, name) in files.enumerate() {
        let bytes: Vec<u8> = (0..records).flat_map(|record| image(number * records + record)).collect();
        fs::write(data.join(name), bytes).unwrap();
    }
    fs::write(data.join("batches.meta.txt"), "zero\none\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\n").unwrap();
    folder.to_owned()
}

/// Writes a data set in the binary layout of CIFAR-100, with as many images as [`cifar10`]. Gives its folder.
pub fn cifar100(folder: &Path) -> PathBuf {
    let data = folder.join("cifar-100-binary");
    fs::create_dir_all(&data).unwrap();
    for (name, first, count) in [("train.bin", 0, TRAIN), ("test.bin", TRAIN, TEST)] {
        // The coarse label comes first, then the fine one.
        let record = |index: usize| [vec![0, (index * 7 % 100) as u8], image(index)[1..].to_vec()].concat();
        fs::write(data.join(name), (first..first + count).flat_map(record).collect::<Vec<u8>>()).unwrap();
    }
    let names: String = (0..100).map(|class| format!("class {class}\n")).collect();
    fs::write(data.join("fine_label_names.txt"), names).unwrap();
    folder.to_owned()
}

/// A record: its label, and three planes of 32x32.
fn image(index: usize) -> Vec<u8> {
    let class = index * 7 % 10;
    let mut record = vec![class as u8];
    for plane in 0..3 {
        let level = (class * (plane + 3) * 31) % 200;
        record.extend((0..1024).map(|pixel| (level + (pixel * 13 + index * 29) % 40) as u8));
    }
    record
}

/// Writes an image folder of two classes, with two images more in training than in validation; images are wider
/// than high. Gives its folder.
pub fn image_folder(folder: &Path) -> PathBuf {
    for (split, count, blue) in [("train", 10, 90), ("val", 4, 95)] {
        for (class, red) in [("dark", 20), ("light", 220)] {
            let inside = folder.join(split).join(class);
            fs::create_dir_all(&inside).unwrap();
            for number in 0..count {
                picture(&inside.join(format!("{number}.png")), 48, 40, [red, number * 9, blue]);
            }
        }
    }
    folder.to_owned()
}

/// A picture with a bright right half, a PNG or a JPEG, as its name tells.
pub fn picture(path: &Path, width: u32, height: u32, colour: [u8; 3]) {
    let bright = colour.map(|byte| byte.saturating_add(30));
    let row = (0..width).flat_map(|x| if 2 * x > width { bright } else { colour });
    write_picture(path, [width, height], &row.collect::<Vec<u8>>().repeat(height as usize));
}

/// Writes red, green and blue bytes. By its `save` the crate `image` would have the encoders of all formats compiled
/// into each test program.
pub fn write_picture(path: &Path, [width, height]: [u32; 2], pixels: &[u8]) {
    let (mut bytes, extension) = (vec![], path.extension().unwrap().to_ascii_lowercase());
    let outcome = match extension.to_str() {
        Some("png") => PngEncoder::new(&mut bytes).write_image(pixels, width, height, Rgb8),
        Some("jpg" | "jpeg") => JpegEncoder::new(&mut bytes).write_image(pixels, width, height, Rgb8),
        _ => panic!("{} is to be neither a PNG nor a JPEG", path.display()),
    };
    outcome.unwrap();
    fs::write(path, bytes).unwrap();
}

/// The small model and a short schedule, as a file's text.
pub const CONFIG: &str = "\
epochs = 3
batch_size = 16
[schedule]
peak = 0.004
warmup_epochs = 0.5
[ema]
enabled = true
decay = 0.9
[architecture]
depth = [1, 1]
embed_dim = [16, 32]
topks = [2, -2]
n_win = 2
head_dim = 8
full_attention_heads = 4
stem_strides = [2, 2]
drop_path = 0.1
";

/// Writes [`CONFIG`], with other fields before it.
pub fn config(folder: &Path, fields: &str) -> PathBuf {
    let path = folder.join("config-asked.toml");
    fs::write(&path, format!("{fields}\n{CONFIG}")).unwrap();
    path
}

/// A finished run, and what it was made from.
pub struct Trained {
    /// The data set.
    pub data: PathBuf,
    /// The configuration's file.
    pub config: PathBuf,
    /// The run folder.
    pub run: PathBuf,
    /// What the program said meanwhile.
    pub said: Ran,
}

/// The weights in a run folder, averaged if it kept an average, as a state_dict alone.
pub fn weights(run: &Path) -> TensorFile {
    Stored::read(run).and_then(Stored::into_weights).unwrap()
}

/// Fields of a small model.
pub const SMALL: [&str; 2] = ["depth=1,1,1", "embed_dim=24,48,96"];

/// The state_dict of that model with a thousand classes, of which it takes everything for this one.
pub fn of_a_thousand(class: usize) -> TensorFile {
    let config = preset("nano").unwrap().config().with_overrides(SMALL).unwrap();
    let model = BiFormer::new(&ModelConfig { num_classes: 1000, ..config }, 0, DType::F32).unwrap();
    let mut weights = model.state_dict().unwrap();
    let mut bias = vec![0f32; 1000];
    bias[class] = 9.0;
    weights.tensors.insert("head.bias".into(), Tensor::from_slice(&bias, [1000]).unwrap());
    weights
}

/// A run of one epoch that many tests look at, and none changes.
pub fn of_one_epoch() -> &'static Trained {
    static RUN: OnceLock<Trained> = OnceLock::new();
    RUN.get_or_init(|| trained("one-epoch", 1))
}

/// The same, of three.
pub fn of_three_epochs() -> &'static Trained {
    static RUN: OnceLock<Trained> = OnceLock::new();
    RUN.get_or_init(|| trained("three-epochs", 3))
}

/// A copy of a run of one epoch, in a folder of this name.
pub fn copied_run(name: &str) -> PathBuf {
    let folder = fresh(name);
    copy_folder(&of_one_epoch().run, &folder);
    folder
}

/// Trains the small model on [`cifar10`], in a folder of this name.
pub fn trained(name: &str, epochs: usize) -> Trained {
    let folder = fresh(name);
    let (data, config, run) = (cifar10(&folder.join("data")), config(&folder, ""), folder.join("run"));
    let said = train(&folder, "", &data, &["--epochs", &epochs.to_string()]).ok();
    Trained { data, config, run, said }
}

/// Trains the small model, with some fields changed and some more arguments, into the folder's `run`.
pub fn train(folder: &Path, fields: &str, data: &Path, more: &[&str]) -> Ran {
    let config = config(folder, fields);
    let run = folder.join("run");
    let shared = ["train", "--config", text(&config), "--data", text(data), "--out", text(&run)];
    biformer(&[&shared[..], more].concat())
}

/// A run of this configuration on these data, and some more settings of it.
pub fn changes(config: &Path, data: &Path, run: &Path, more: &[(&str, i64)]) -> Changes {
    let paths = [("data", text(data)), ("out", text(run))].map(|(key, value)| (key, toml::Value::from(value)));
    let settings = paths.into_iter().chain(more.iter().map(|&(key, value)| (key, value.into())));
    Changes::gather(Some(config), settings.map(|(key, value)| (key.to_owned(), value)).collect()).unwrap()
}

/// Begins a run, which has not taken a step.
pub fn trainer(config: &Path, data: &Path, run: &Path) -> Trainer {
    Trainer::from_changes(&changes(config, data, run, &[])).unwrap()
}

/// Writes a grey image of 32x32 as the input of `biformer forward`.
pub fn grey(path: &Path) {
    let mut file = TensorFile::default();
    file.tensors.insert("input".into(), Tensor::full([1, 3, 32, 32], 0.5f32));
    file.write(path).unwrap();
}
