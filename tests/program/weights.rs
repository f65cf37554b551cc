//! Weights alone: out of a run for other programs, and from other programs to be measured and used.

use crate::common::program::{Ran, biformer, command, contents, copy_folder, fresh, make_first_best, text};
use crate::common::samples::{self, Trained, of_one_epoch};
use biformer::config::{Changes, RunConfig};
use biformer::data::Statistics;
use biformer::model::{BiFormer, ModelConfig, TensorFile, preset};
use biformer::tensor::DType;
use biformer::trainer::Trainer;
use biformer::trainer::learner::Learner;
use biformer::trainer::stored::Stored;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A run on an image folder, whose images are normalised as the published models take them; and its data.
fn shared() -> &'static [PathBuf; 2] {
    static SHARED: OnceLock<[PathBuf; 2]> = OnceLock::new();
    SHARED.get_or_init(|| {
        let folder = fresh("weights");
        let data = samples::image_folder(&folder.join("data"));
        samples::train(&folder, "image_size = 32", &data, &["--batch-size", "5", "--epochs", "1"]).ok();
        [folder.join("run"), data]
    })
}

fn export(run: &Path, to: &Path) -> Ran {
    biformer(&["export", "--checkpoint", text(run), "--output", text(to)])
}

/// The model of the small runs, as options.
fn model() -> Vec<String> {
    let fields = samples::CONFIG.split("[architecture]\n").nth(1).unwrap().replace([' ', '[', ']'], "");
    ["--model", "nano", "--set"].into_iter().chain(fields.lines()).map(str::to_owned).collect()
}

#[test]
fn exported_weights_are_the_ones_that_are_evaluated() {
    let [run, _] = shared();
    let folder = fresh("weights-export");
    let file = folder.join("w.safetensors");
    let said = export(run, &file).ok().out;
    let (mut written, averaged) = (TensorFile::read(&file).unwrap(), samples::weights(run));
    written.metadata.clear();
    assert!(said.contains(&format!("{} tensors", averaged.tensors.len())), "{said}");
    assert_eq!(written.to_bytes().unwrap(), averaged.to_bytes().unwrap(), "the averaged ones, and nothing beside them");
    let trained = TensorFile::read(&run.join("checkpoint.safetensors")).unwrap();
    let head = |file: &TensorFile| file.tensors["head.weight"].to_vec::<f32>().unwrap();
    assert_ne!(head(&written), head(&trained));
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

/// Fine-tunes for an epoch, with nothing said of the model.
fn tune(name: &str, weights: &Path, data: &Path, more: &[&str]) -> (PathBuf, Ran) {
    let out = fresh(name).join("run");
    let shared = ["train", "--weights", text(weights), "--data", text(data), "--out", text(&out)];
    let short = ["--epochs", "1", "--batch-size", "5"];
    let ran = biformer(&[&shared[..], &short, more].concat());
    (out, ran)
}

#[test]
fn a_run_has_the_model_of_its_weights() {
    let [two, data] = shared();
    let file = fresh("weights-tuned").join("w.safetensors");
    let run = &of_one_epoch().run;
    export(run, &file).ok();
    let config = |run: &Path| RunConfig::parse(&fs::read_to_string(run.join("config.toml")).unwrap()).unwrap();
    let theirs = config(run);
    for weights in [run, &file] {
        let (tuned, said) = tune("weights-tuned-run", weights, data, &["--set", "drop_path=0.2"]);
        let said = said.ok();
        assert!(said.err.contains("with a learning rate of 0.001 the weights forget"), "{said:?}");
        assert!(said.out.contains("is for 10 classes: this model gets a fresh one"), "{said:?}");
        let ours = config(&tuned);
        assert_eq!((&ours.model, ours.image_size, ours.epochs), (&theirs.model, theirs.image_size, 1));
        let expected = theirs.architecture.with_overrides(["num_classes=2", "drop_path=0.2"]).unwrap();
        assert_eq!(ours.architecture, expected);
    }
    let sized = |asked: &[&str]| config(&tune("weights-tuned-sized", two, data, asked).0).image_size;
    assert_eq!((sized(&[]), sized(&["--image-size", "48", "--set", "auto_pad=true"])), (32, 48));
    // Which is not what the model is meant for, but what the weights are used to.
    let larger = tune("weights-tuned-larger", two, data, &["--image-size", "48", "--set", "auto_pad=true"]).0;
    assert_eq!(config(&tune("weights-tuned-of-larger", &larger, data, &[]).0).image_size, 48);
    for gentle in [&["--lr", "1e-4"][..], &["--set", "freeze=stages"], &["--set", "backbone_lr=0.1"]] {
        let said = tune("weights-tuned-gently", two, data, gentle).1.ok().err;
        assert!(!said.contains("the weights forget"), "{said}");
    }
    // Named again it is the same, and another is another.
    let (again, said) = tune("weights-tuned-again", &larger, data, &["--model", "nano"]);
    said.ok();
    assert_eq!(config(&again).architecture, config(&larger).architecture);
    assert_eq!(config(&again).image_size, 48);
    let micro = tune("weights-tuned-other", run, data, &["--model", "micro"]).1;
    micro.refused(&["they are of nano, not of micro; leave --model out"]);
    tune("weights-tuned-other", run, data, &["--set", "depth=1,2"]).1.refused(&["model of its weights", "stages.1.1"]);
}

#[test]
fn a_run_knows_its_weights_wherever_it_goes_on() {
    let [run, data] = shared();
    let folder = fresh("weights-from-here");
    copy_folder(run, &folder.join("first"));
    let second = folder.join("second");
    let train = |from: &Path, asked: &[&str]| {
        let shared = ["train", "--data", text(data), "--out", text(&second), "--epochs"];
        Ran::from(command(&[&shared[..], asked].concat()).current_dir(from).output().unwrap())
    };
    train(&folder, &["1", "--batch-size", "5", "--weights", "first"]).ok();
    let written = fs::read_to_string(second.join("config.toml")).unwrap();
    let weights = RunConfig::parse(&written).unwrap().weights;
    assert_eq!(fs::canonicalize(&weights).unwrap(), fs::canonicalize(folder.join("first")).unwrap());
    assert!(Path::new(&weights).is_absolute(), "{weights}");
    // The same folder by other names, and another folder.
    train(&second, &["2", "--resume", "--weights", "../first"]).ok();
    train(&folder, &["3", "--resume", "--weights", "./first/"]).ok();
    train(&second, &["3", "--resume", "--weights", "first"]).ok(); // as on another machine
    train(&folder, &["4", "--resume", "--weights", "second"]).refused(&["weights = ", "cannot be had"]);
}

#[test]
fn a_head_is_taken_over_for_its_own_classes_alone() {
    let [run, data] = shared();
    let folder = fresh("weights-heads");
    let file = folder.join("w.safetensors");
    let weights = samples::weights(run);
    let path = text(&file).to_owned();
    let config = RunConfig::parse(&fs::read_to_string(run.join("config.toml")).unwrap()).unwrap();
    let config = RunConfig { weights: path.clone(), ..config };
    let same = |a: &TensorFile, b: &TensorFile, name: &str| {
        a.tensors[name].to_vec::<f32>().unwrap() == b.tensors[name].to_vec::<f32>().unwrap()
    };
    // Where each row of the head comes from: a row of the weights', or none.
    let tuned = |classes: &[&str], from: &[Option<usize>]| {
        let mut config = config.clone();
        config.architecture.num_classes = classes.len();
        let random = BiFormer::new(&config.architecture, config.seed, DType::F32).unwrap().state_dict().unwrap();
        let (stored, named) = (Stored::read(&file).unwrap(), classes.iter().map(|&class| class.to_owned()));
        let learner = Learner::from_weights(&config, stored, &named.collect::<Vec<_>>()).unwrap();
        let tuned = learner.model().state_dict().unwrap();
        assert!(same(&tuned, &weights, "norm.weight") && !same(&tuned, &random, "norm.weight"));
        for name in ["head.weight", "head.bias"] {
            let row = |file: &TensorFile, row: usize| {
                file.tensors[name].slice(0, row..row + 1).unwrap().to_vec::<f32>().unwrap()
            };
            for (class, from) in from.iter().enumerate() {
                let expected = from.map_or_else(|| row(&random, class), |from| row(&weights, from));
                assert_eq!(row(&tuned, class), expected, "{name} of {} in {classes:?}", classes[class]);
            }
        }
        learner.head_note.unwrap_or_default()
    };
    export(run, &file).ok();
    assert_eq!(tuned(&["dark", "light"], &[Some(0), Some(1)]), "");
    let other = tuned(&["dark", "loud"], &[Some(0), None]);
    assert!(other.contains("not for these classes") && other.contains("\"light\", not \"loud\""), "{other}");
    assert!(other.ends_with(": this model has 1 of its 2 classes from there"), "{other}");
    assert!(tuned(&["light", "dark"], &[Some(1), Some(0)]).contains("in this order"));
    let more = tuned(&["dark", "grey", "light"], &[Some(0), None, Some(1)]);
    assert!(more.contains("is for 2 classes: this model has 2 of its 3 classes from there"), "{more}");
    assert!(tuned(&["bright", "loud"], &[None, None]).ends_with(": this model gets a fresh one"));
    // Those of a state_dict have no names.
    weights.write(&file).unwrap();
    let by_order = tuned(&["cats", "dogs"], &[Some(0), Some(1)]);
    assert!(by_order.ends_with("taken to be those of the data, in the order of their names"), "{by_order}");
    // Unless they are a thousand: then some may be ImageNet's, by the names of their folders.
    samples::of_a_thousand(0).write(&file).unwrap();
    let stored = Stored::read(&file).unwrap();
    let classes = |names: [&str; 2]| names.map(str::to_owned);
    let small = preset("nano").unwrap().config().with_overrides(samples::SMALL).unwrap();
    let small = RunConfig { architecture: ModelConfig { num_classes: 2, ..small }, ..config.clone() };
    let learner = Learner::from_weights(&small, stored, &classes(["mine", "n01440764"])).unwrap();
    assert!(learner.head_note.as_ref().unwrap().ends_with("this model has 1 of its 2 classes from there"));
    assert_eq!(learner.model().state_dict().unwrap().tensors["head.bias"].to_vec::<f32>().unwrap()[1], 9.0);
    let mut backbone = weights.clone();
    backbone.tensors.retain(|name, _| !name.starts_with("head."));
    backbone.write(&file).unwrap();
    let gone = tuned(&["cats", "dogs"], &[None, None]);
    assert_eq!(gone, format!("There is no head in {path}: this model gets a fresh one"));
    let asked: Vec<String> = model();
    let asked: Vec<&str> = asked.iter().map(String::as_str).chain(["--image-size", "32"]).collect();
    let said = tune("weights-heads-run", &file, data, &asked[..]).1.ok().out;
    assert!(said.contains(&format!("There is no head in {path}: this model gets a fresh one")), "{said}");
    // Whoever measures or classifies needs one.
    let arguments = [&["eval", "--checkpoint", &path, "--data", text(data)][..], &asked].concat();
    biformer(&arguments).refused(&["head.weight (10, 32) is missing"]);
    let mut known = BiFormer::blank(&preset("nano").unwrap().config(), DType::F32).unwrap().state_dict().unwrap();
    known.tensors.retain(|name, _| !name.starts_with("head."));
    known.write(&file).unwrap();
    biformer(&["eval", "--checkpoint", &path]).refused(&["there is no head in it", "train --weights"]);
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
