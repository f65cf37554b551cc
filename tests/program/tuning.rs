//! Runs that start from the weights of others: what is taken over, and what is not.

use crate::cli::metrics;
use crate::common::program::{Ran, biformer, command, copy_folder, fresh, text};
use crate::common::samples::{self, Trained, of_one_epoch, of_three_epochs};
use crate::weights::{export, model, shared};
use biformer::config::RunConfig;
use biformer::model::{BiFormer, ModelConfig, TensorFile, preset};
use biformer::tensor::DType;
use biformer::trainer::learner::Learner;
use biformer::trainer::stored::Stored;
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn a_run_can_start_from_the_weights_of_another() {
    let Trained { data, run, .. } = of_three_epochs();
    let folder = fresh("cli-weights");
    let start = |data: &Path, fields: &str, name: &str, weights: &[&str]| {
        let (config, out) = (samples::config(&folder, fields), folder.join(name));
        let shared = ["train", "--config", text(&config), "--data", text(data), "--out", text(&out), "--epochs", "1"];
        (biformer(&[&shared[..], weights].concat()).ok(), metrics(&out)[0]["train_loss"].as_f64().unwrap())
    };
    let (_, scratch) = start(data, "", "scratch", &[]);
    let (said, tuned) = start(data, "", "tuned", &["--weights", text(run)]);
    assert!(tuned < scratch, "{tuned} after training, {scratch} before");
    assert!(!said.out.contains("a fresh one"), "{said:?}");
    // Another number of classes: everything but the head is taken over.
    let two = samples::image_folder(&folder.join("two"));
    let fields = format!("weights = {:?}\nimage_size = 32", text(run));
    let (said, _) = start(&two, &fields, "two-classes", &[]);
    assert!(said.out.contains("is for 10 classes: this model gets a fresh one"), "{said:?}");
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
    for gentle in [
        &["--lr", "1e-4"][..],
        &["--set", "freeze=stages"],
        &["--set", "backbone_lr=0.1"],
        &["--set", "layer_decay=0.1"],
    ] {
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
        learner.notes.concat()
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
    assert!(learner.notes[0].ends_with("this model has 1 of its 2 classes from there"));
    assert_eq!(learner.model().state_dict().unwrap().tensors["head.bias"].to_vec::<f32>().unwrap()[1], 9.0);
    let mut backbone = weights.clone();
    backbone.tensors.retain(|name, _| !name.starts_with("head."));
    backbone.write(&file).unwrap();
    let gone = tuned(&["cats", "dogs"], &[None, None]);
    assert_eq!(gone, format!("There is no head in {path}: this model gets a fresh one"));
    // Nor in a dense backbone, whose last norm is another.
    let mut dense = backbone.clone();
    dense.tensors.retain(|name, _| !name.starts_with("norm."));
    dense.tensors.insert("extra_norms.0.weight".into(), backbone.tensors["norm.weight"].clone());
    dense.write(&file).unwrap();
    let learner = Learner::from_weights(&config, Stored::read(&file).unwrap(), &classes(["cats", "dogs"])).unwrap();
    assert_eq!(learner.notes, [format!("There is no head in {path}: this model gets a fresh one")]);
    backbone.write(&file).unwrap();
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

/// For a model that differs from that of the weights in a part.
#[test]
fn weights_that_fit_in_parts_are_taken_over_where_they_do() {
    let [run, data] = shared();
    let folder = fresh("weights-in-parts");
    let weights = samples::weights(run);
    let train = |more: &[&str]| {
        let out = folder.join("run");
        _ = fs::remove_dir_all(&out);
        let asked = ["train", "--weights", text(run), "--data", text(data), "--out", text(&out), "--epochs", "1"];
        (biformer(&[&asked[..], &["--lr", "1e-9", "--set"], more].concat()), out)
    };
    train(&["lce_kernel=3"]).0.refused(&[
        "lepe.weight is (16, 1, 5, 5), should be (16, 1, 3, 3)",
        "than what fits: --set strict_weights=false",
    ]);
    let (said, out) = train(&["lce_kernel=3", "layer_scale=0.1", "strict_weights=false"]);
    let said = said.ok().out;
    let first = " 45 of 51 parameters are taken over; 6 start random, stages.0.0.attn.lepe.weight among them.";
    assert!(said.contains(first), "{said}");
    let begun = TensorFile::read(&out.join("checkpoint.safetensors")).unwrap();
    let close = |name: &str| {
        let of = |file: &TensorFile| file.tensors[name].to_vec::<f32>().unwrap();
        of(&begun).iter().zip(of(&weights)).all(|(a, b)| (a - b).abs() < 1e-4)
    };
    for name in ["stages.0.0.attn.qkv.qkv.weight", "stages.1.0.mlp.0.weight", "norm.bias", "head.weight"] {
        assert!(close(name), "{name}");
    }
    // What is frozen must be known.
    train(&["lce_kernel=3", "strict_weights=false", "freeze=stages"])
        .0
        .refused(&["freeze: stages.0.0.attn.lepe.weight starts random", "leave its part out of freeze"]);
    // A wider model shares nothing with it, not even the head's bias, which would be of no use without the rest.
    let wider = ["embed_dim=24,48", "full_attention_heads=4", "strict_weights=false"];
    train(&wider).0.refused(&["none of them fits"]);
    let deeper = train(&["depth=2,1", "strict_weights=false"]).0.ok().out;
    assert!(deeper.contains(" 47 of 63 parameters are taken over; 16 start random, stages.0.1.attn."), "{deeper}");
    assert!(!deeper.contains("not used"), "{deeper}");
    let otherwise = train(&["topks=-1,-2", "full_attention_heads=2", "strict_weights=false"]).0.ok().out;
    assert!(
        otherwise.contains(" 41 of 44 parameters are taken over; 3 start random, stages.0.0.attn.proj."),
        "{otherwise}"
    );
    assert!(
        otherwise.contains(" 6 tensors of another shape or name are not used, stages.0.0.attn.lepe."),
        "{otherwise}"
    );
}
