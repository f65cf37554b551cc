//! Weights alone: out of a run for other programs, and from other programs to be measured and used.

use crate::common::program::{Ran, biformer, command, contents, copy_folder, fresh, make_first_best, text};
use crate::common::samples::{self, Trained, of_one_epoch};
use biformer::config::Changes;
use biformer::data::Statistics;
use biformer::model::{BiFormer, TensorFile};
use biformer::tensor::{DType, Tensor};
use biformer::trainer::Trainer;
use biformer::trainer::stored::Stored;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A run on an image folder, whose images are normalised as the published models take them; and its data.
pub fn shared() -> &'static [PathBuf; 2] {
    static SHARED: OnceLock<[PathBuf; 2]> = OnceLock::new();
    SHARED.get_or_init(|| {
        let folder = fresh("weights");
        let data = samples::image_folder(&folder.join("data"));
        samples::train(&folder, "image_size = 32", &data, &["--batch-size", "5", "--epochs", "1"]).ok();
        [folder.join("run"), data]
    })
}

pub fn export(run: &Path, to: &Path) -> Ran {
    biformer(&["export", "--checkpoint", text(run), "--output", text(to)])
}

/// The model of the small runs, as options.
pub fn model() -> Vec<String> {
    let fields = samples::CONFIG.split("[architecture]\n").nth(1).unwrap().replace([' ', '[', ']'], "");
    ["--model", "nano", "--set"].into_iter().chain(fields.lines()).map(str::to_owned).collect()
}

#[test]
fn exported_weights_are_the_ones_that_are_evaluated() {
    let [run, _] = shared();
    let folder = fresh("weights-export");
    let file = folder.join("w.safetensors");
    let Ran { out: said, err, .. } = export(run, &file).ok();
    assert!(err.contains("the published code has four stages"), "{err}");
    let (mut written, averaged) = (TensorFile::read(&file).unwrap(), samples::weights(run));
    written.metadata.clear();
    assert!(said.contains(&format!("{} tensors", averaged.tensors.len())), "{said}");
    assert_eq!(written.to_bytes().unwrap(), averaged.to_bytes().unwrap(), "the averaged ones, and nothing beside them");
    let trained = TensorFile::read(&run.join("checkpoint.safetensors")).unwrap();
    let head = |file: &TensorFile| file.tensors["head.weight"].to_vec::<f32>().unwrap();
    assert_ne!(head(&written), head(&trained));
    let raw = folder.join("raw.safetensors");
    biformer(&["export", "--unaveraged", "--checkpoint", text(run), "--output", text(&raw)]).ok();
    let raw = TensorFile::read(&raw).unwrap();
    assert_eq!(raw.tensors.len(), written.tensors.len());
    for (name, tensor) in &raw.tensors {
        assert_eq!(format!("{tensor:?}"), format!("{:?}", trained.tensors[name]), "{name}");
    }
    assert_eq!(head(&raw), head(&trained));
    let once = ["export", "--unaveraged", "--output", text(&file), "--checkpoint"];
    samples::weights(run).write(&folder.join("alone.safetensors")).unwrap();
    biformer(&[&once[..], &[text(&folder.join("alone.safetensors"))]].concat())
        .refused(&["--unaveraged: there is one set"]);
    export(run, &file).ok();
    export(run, &run.join("checkpoint.safetensors")).refused(&["--output", "no earlier result"]);
    // Nor weights that came from elsewhere.
    let published = folder.join("published.safetensors");
    written.write(&published).unwrap();
    export(run, &published).refused(&["--output", "no earlier result"]);
}

#[test]
fn a_state_dict_is_measured_and_used_like_a_run() {
    let [run, data] = shared();
    let folder = fresh("weights-alone");
    let file = folder.join("w.safetensors");
    samples::weights(run).write(&file).unwrap();
    let model = model();
    let with = |command: &[&str], more: &[&str]| {
        let all = [command, &["--checkpoint", text(&file)], &Vec::from_iter(model.iter().map(String::as_str)), more];
        biformer(&all.concat())
    };
    let of_run = biformer(&["eval", "--json", "--checkpoint", text(run)]).ok().out;
    assert_eq!(with(&["eval", "--json"], &["--data", text(data)]).ok().out, of_run);
    let picture = data.join("val/dark/1.png");
    let classes = |out: &str| out.replace("dark", "class 0").replace("light", "class 1");
    let of_run = biformer(&["predict", "--checkpoint", text(run), text(&picture)]).ok().out;
    let Ran { out: used, err, .. } = with(&["predict", text(&picture)], &[]).ok();
    assert!(err.contains("how images were normalised"), "{err}");
    let lines = |out: &str| out.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(lines(&used), lines(&classes(&of_run)));
    biformer(&["eval", "--checkpoint", text(&file)]).refused(&["w.safetensors", "name with --model", "tiny", "--set"]);
    biformer(&["eval", "--checkpoint", text(run), "--model", "tiny"]).refused(&["--model", "knows its model"]);
    with(&["eval"], &[]).refused(&["data embedded", "the 10 classes airplane, automobile"]);
    // What they are trained further on is normalised as in a test of them, whatever data it is.
    let cifar = &of_one_epoch().data;
    let (config, tuned) = (samples::config(&folder, "image_size = 32"), folder.join("tuned"));
    let tune = ["train", "--config", text(&config), "--weights", text(&file), "--data", text(cifar), "--epochs", "1"];
    let said = biformer(&[&tune[..], &["--out", text(&tuned)]].concat()).ok();
    assert!(said.err.contains("how images were normalised"), "{said:?}");
    assert_eq!(Stored::read(&tuned).unwrap().described().unwrap().1.statistics, Statistics::IMAGENET);
}

#[test]
fn a_state_dict_of_a_named_model_needs_no_name() {
    let [_, data] = shared();
    let folder = fresh("weights-recognised");
    let (file, picture) = (folder.join("w.safetensors"), data.join("val/dark/1.png"));
    let config = biformer::model::preset("micro").unwrap().config();
    BiFormer::new(&config, 0, DType::F32).unwrap().state_dict().unwrap().write(&file).unwrap();
    let predict = ["predict", "--checkpoint", text(&file), text(&picture)];
    let named = biformer(&[&predict[..], &["--model", "micro"]].concat()).ok().out;
    let as_imagenet = ["--set", "preprocessing.mean=0.485,0.456,0.406", "preprocessing.std=0.229,0.224,0.225"];
    let told = biformer(&[&predict[..], &as_imagenet].concat()).ok();
    assert_eq!([biformer(&predict).ok().out, told.out], [named.clone(), named]);
    assert!(!told.err.contains("normalised"), "{}", told.err);
    // What is foretold of memory is measured, and may differ in the last digit.
    let layers = |more: &[&str]| {
        let said = biformer(&[&["info"], more].concat()).ok().out;
        said.lines().take_while(|line| !line.starts_with("A training step")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(layers(&["--checkpoint", text(&file)]), layers(&["--model", "micro"]));
    let [input, output] = ["x", "y"].map(|name| folder.join(format!("{name}.safetensors")));
    samples::grey(&input);
    biformer(&["forward", "--weights", text(&file), "--input", text(&input), "--output", text(&output)]).ok();
    let run = folder.join("run");
    let train = ["train", "--weights", text(&file), "--data", text(data), "--out", text(&run), "--epochs", "1"];
    biformer(&[&train[..], &["--batch-size", "5"]].concat()).ok();
    assert!(fs::read_to_string(run.join("config.toml")).unwrap().contains("model = \"micro\""));
}

#[test]
fn an_export_knows_its_model_and_its_classes() {
    let Trained { run, data, .. } = of_one_epoch();
    let folder = fresh("weights-described");
    let [file, again, input] = ["w", "again", "input"].map(|name| folder.join(format!("{name}.safetensors")));
    export(run, &file).ok();
    export(&file, &again).ok();
    assert!(fs::read(&file).unwrap() == fs::read(&again).unwrap(), "an export of an export is the same");
    let picture = folder.join("picture.png");
    samples::picture(&picture, 40, 40, [200, 30, 90]);
    samples::grey(&input);
    let output = folder.join("output.safetensors");
    let same = |arguments: &dyn Fn(&str) -> Vec<String>| {
        let of = |weights: &Path| {
            let arguments = arguments(text(weights));
            let said = biformer(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).ok().out;
            (said, fs::read(&output).unwrap_or_default())
        };
        assert!(of(&file) == of(run), "{:?}", arguments("WEIGHTS"));
    };
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
    same(&|weights| words(&["eval", "--json", "--checkpoint", weights]));
    same(&|weights| words(&["eval", "--checkpoint", weights, "--data", text(data), "--set", "n_win=4"]));
    same(&|weights| words(&["predict", "--checkpoint", weights, text(&picture)]));
    same(&|weights| words(&["forward", "--weights", weights, "--input", text(&input), "--output", text(&output)]));
    same(&|weights| words(&["eval", "--json", "--checkpoint", weights, "--model", "nano"]));
    biformer(&["eval", "--checkpoint", text(&file), "--model", "tiny"]).refused(&["--model", "knows its model, nano"]);
}

#[test]
fn an_export_that_says_what_cannot_be() {
    let folder = fresh("weights-damaged");
    let [file, damaged] = ["w", "damaged"].map(|name| folder.join(format!("{name}.safetensors")));
    export(&of_one_epoch().run, &file).ok();
    let whole = TensorFile::read(&file).unwrap();
    let refused = |change: &dyn Fn(&mut TensorFile), parts: &[&str]| {
        let mut file = whole.clone();
        change(&mut file);
        file.write(&damaged).unwrap();
        biformer(&["eval", "--checkpoint", text(&damaged)]).refused(parts);
        let out = folder.join("run");
        biformer(&["train", "--weights", text(&damaged), "--out", text(&out)]).refused(parts);
        assert!(!out.exists());
    };
    for key in ["config", "data"] {
        let missing = format!("it says no \"{key}\"");
        refused(&|file| _ = file.metadata.remove(key), &["damaged.safetensors", &missing, "biformer export"]);
    }
    refused(&|file| _ = file.metadata.insert("config".into(), "model = 3".into()), &["stored configuration"]);
    refused(&|file| _ = file.metadata.insert("data".into(), "[".into()), &["damaged.safetensors", "its data"]);
    refused(
        &|file| _ = file.metadata.insert("format".into(), "biformer-weights-99".into()),
        &["format \"biformer-weights-99\"", "this program reads"],
    );
    let replaced = |key: &'static str, from: &'static str, to: &'static str| {
        move |file: &mut TensorFile| {
            let text = file.metadata[key].replace(from, to);
            assert!(file.metadata.insert(key.into(), text.clone()) != Some(text), "{from}");
        }
    };
    refused(&replaced("data", "\"nine\"", "\"nine\",\"ten\""), &["names 11 classes for a model of 10"]);
    refused(&replaced("data", "\"std\":[", "\"std\":[-"), &["its data", "above 0"]);
    refused(&replaced("config", "[16, 32]", "[8000, 8000]"), &["its configuration is of a model of"]);
    refused(&|file| _ = file.tensors.remove("norm.weight"), &["norm.weight (32) is missing"]);
}

#[test]
fn what_wraps_a_model_in_pytorch_is_taken_off_its_names() {
    let [run, data] = shared();
    let file = fresh("weights-wrapped").join("w.safetensors");
    let model = model();
    let weights = samples::weights(run);
    let eval = |name: &dyn Fn(&str) -> String| {
        let tensors = weights.tensors.iter().map(|(inner, tensor)| (name(inner), tensor.clone())).collect();
        TensorFile { tensors, ..TensorFile::default() }.write(&file).unwrap();
        let arguments = ["eval", "--json", "--checkpoint", text(&file), "--data", text(data)];
        biformer(&[&arguments[..], &Vec::from_iter(model.iter().map(String::as_str))].concat())
    };
    let plain = eval(&str::to_owned).ok().out;
    for wrapper in ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", "backbone."] {
        assert_eq!(eval(&|name| format!("{wrapper}{name}")).ok().out, plain, "{wrapper}");
    }
    // As PyTorch's AveragedModel.
    let tensors = weights.tensors.iter().map(|(name, tensor)| (format!("module.{name}"), tensor.clone()));
    let tensors = tensors.chain([("n_averaged".to_owned(), Tensor::scalar(7u32))]).collect();
    let averaged = TensorFile { tensors, ..TensorFile::default() }.unwrapped();
    assert!(averaged.tensors.keys().eq(weights.tensors.keys()), "{averaged:?}");
    // One that is not before all names, or is not known, is seen in the error.
    eval(&|name| if name == "head.bias" { name.into() } else { format!("module.{name}") }).refused(&[
        "is missing",
        "module.downsample_layers",
        "is not part of the model",
    ]);
    eval(&|name| format!("encoder.{name}")).refused(&["is missing", "encoder.downsample_layers", "more are not part"]);
    // Of a segmenter only the backbone is this model's.
    let tensors = weights.tensors.iter().map(|(name, tensor)| match name.strip_prefix("head.") {
        Some(rest) => (format!("decode_head.{rest}"), tensor.clone()),
        None => (format!("backbone.{name}"), tensor.clone()),
    });
    let segmenter = TensorFile { tensors: tensors.collect(), ..TensorFile::default() };
    let mut backbone = weights.clone();
    backbone.tensors.retain(|name, _| !name.starts_with("head."));
    assert!(
        segmenter.unwrapped().to_bytes().unwrap()
            == TensorFile { tensors: backbone.tensors, ..TensorFile::default() }.to_bytes().unwrap()
    );
}

#[test]
fn data_that_have_moved_are_asked_for() {
    let [_, data] = shared();
    let folder = fresh("weights-moved");
    let from = |place: &Path, arguments: &[&str]| {
        let mut command = command(arguments);
        Ran::from(command.current_dir(place).output().unwrap())
    };
    let here = |arguments: &[&str]| from(&folder, arguments);
    let moved = folder.join("pics");
    copy_folder(data, &moved);
    let config = samples::config(&folder, "image_size = 32");
    let train = ["train", "--config", text(&config), "--data", "pics", "--out", "run", "--batch-size", "5"];
    here(&[&train[..], &["--epochs", "1"]].concat()).ok();
    // A run knows its data from whichever folder it is asked for, also after it was gone on with from another.
    let (elsewhere, run) = (fresh("weights-moved-elsewhere"), folder.join("run"));
    from(&elsewhere, &["eval", "--checkpoint", text(&run)]).ok();
    let there = folder.join("../weights-moved/pics");
    from(&elsewhere, &["train", "--resume", "--out", text(&run), "--data", text(&there)]).ok();
    from(&elsewhere, &["train", "--resume", "--out", text(&run), "--data", "../weights-moved/pics", "--epochs", "2"])
        .ok();
    here(&["eval", "--checkpoint", "run"]).ok();
    fs::rename(&moved, folder.join("moved")).unwrap();
    let (eval, resume) = (["eval", "--checkpoint", "run"], ["train", "--resume", "--out", "run", "--epochs", "3"]);
    for arguments in [&eval[..], &resume] {
        here(arguments).refused(&["weights-moved/pics (as the run had it; --data says where it is now)", "is missing"]);
        here(&[arguments, &["--data", "moved"]].concat()).ok();
    }
    let said = here(&["eval", "--checkpoint", "run", "--data", "nowhere"]);
    assert!(!said.err.contains("--data says"), "{said:?}");
    said.refused(&["data nowhere is missing"]);
}

#[test]
fn a_model_is_measured_on_other_sizes_and_with_other_routes() {
    let [run, data] = shared();
    // Without training images, as ImageNet's validation images often come.
    let alone = fresh("weights-val");
    copy_folder(&data.join("val"), &alone.join("val"));
    let eval = |more: &[&str]| {
        let arguments = ["eval", "--json", "--checkpoint", text(run), "--data", text(&alone)];
        biformer(&[&arguments[..], more].concat())
    };
    let as_it_was = eval(&[]).ok().out;
    assert_eq!(as_it_was, biformer(&["eval", "--json", "--checkpoint", text(run)]).ok().out);
    assert_ne!(eval(&["--image-size", "64"]).ok().out, as_it_was);
    assert_ne!(eval(&["--set", "topks=4,-2"]).ok().out, as_it_was);
    assert_ne!(eval(&["--set", "n_win=4"]).ok().out, as_it_was);
    let before = contents(run);
    eval(&["--set", "mlp_ratio=2"]).refused(&["mlp.0.weight"]);
    eval(&["--image-size", "34"]).refused(&["image of 34x34 does not fit"]);
    assert!(before == contents(run));
    fs::remove_dir_all(alone.join("val")).unwrap();
    eval(&[]).refused(&["is no data set"]);
}

#[test]
fn weights_that_may_not_be_meant_are_noted() {
    let (folder, Trained { data, config, .. }) = (fresh("weights-noted"), of_one_epoch());
    let run = folder.join("run");
    drop(samples::trainer(config, data, &run));
    let said = |of: &Path| biformer(&["eval", "--checkpoint", text(of)]).ok().err;
    assert!(said(&run).contains("has not taken a step yet"), "{}", said(&run));
    biformer(&["train", "--resume", "--out", text(&run)]).ok();
    let notes = said(&run);
    assert!(!notes.contains("step") && !notes.contains("not done"), "{notes}");
    // A better epoch, whether or not there was one.
    make_first_best(&run);
    assert!(said(&run).contains("(100.0%): --checkpoint"), "{}", said(&run));
    let tuned = folder.join("tuned");
    let tune = ["train", "--weights", text(&run), "--data", text(data), "--out", text(&tuned), "--epochs", "1"];
    let err = biformer(&tune).ok().err;
    assert!(err.contains("(100.0%): --weights"), "{err}");
    let longer = Changes::gather(None, [("epochs".to_owned(), 9.into())].into_iter().collect()).unwrap();
    drop(Trainer::resume(&run, &longer).unwrap());
    assert!(said(&run).contains("the run is not done: so far, 3 of 9 epochs"), "{}", said(&run));
}
