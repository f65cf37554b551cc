//! Files that the program is to read and cannot: weights, checkpoints, run folders. What it says is one line with the
//! way out, and nothing on disk is harmed.

use crate::common::program::{biformer, contents, fresh, json, text};
use crate::common::samples::{self, Trained, copied_run, of_one_epoch};
use biformer::model::TensorFile;
use biformer::tensor::Tensor;
use biformer::trainer::folder::RunFolder;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

#[test]
fn weights_of_another_model() {
    let folder = fresh("bad-weights");
    let [weights, input, output] =
        ["weights", "input", "output"].map(|name| folder.join(format!("{name}.safetensors")));
    let set = ["--set", "depth=1,1,1", "embed_dim=24,48,96"];
    let config = biformer::model::preset("nano").unwrap().config().with_overrides(set[1..].iter().copied()).unwrap();
    let model = biformer::model::BiFormer::new(&config, 0, biformer::tensor::DType::F32).unwrap();
    let right = model.state_dict().unwrap();
    samples::grey(&input);
    let files = ["--weights", text(&weights), "--input", text(&input), "--output", text(&output)];
    let forward = || biformer(&[&["forward"][..], &files, &set].concat());

    let mut wrong = right.clone();
    wrong.tensors.remove("norm.bias");
    wrong.tensors.remove("stages.0.0.norm1.weight");
    wrong.tensors.insert("stages.9.0.norm1.weight".into(), Tensor::full([2], 1f32));
    wrong.tensors.insert("stages.1.0.norm2.bias".into(), Tensor::full([47], 1f32));
    wrong.tensors.insert("stages.2.0.norm2.bias".into(), Tensor::full([96], 1u32));
    wrong.write(&weights).unwrap();
    forward().refused(&[
        "weights.safetensors: these weights do not fit",
        "norm.bias (96) is missing",
        "stages.0.0.norm1.weight (24) is missing",
        "stages.9.0.norm1.weight (2) is not part of the model",
        "stages.1.0.norm2.bias is (47), should be (48)",
        "stages.2.0.norm2.bias is of integers, should be of floats",
    ]);
    wrong.tensors = wrong.tensors.into_iter().map(|(name, tensor)| (format!("{name}.x"), tensor)).collect();
    wrong.write(&weights).unwrap();
    // Both sides are named, however many differ.
    let bias = "downsample_layers.0.0.bias";
    let [missing, surplus] = [format!("{bias} (12) is missing"), format!("{bias}.x (12) is not part of the model")];
    forward().refused(&[&missing, " more are missing", &surplus, " more are not part of it", "--model", "--set"]);
    // Nor however long their names are.
    let long = |(name, tensor)| (format!("{name}.{}", "x".repeat(1 << 20)), tensor);
    wrong.tensors = right.tensors.clone().into_iter().take(5).map(long).collect();
    wrong.write(&weights).unwrap();
    forward().refused(&[&missing, "weights do not fit", "--model", "--set"]);
    let mut wrong = right.clone();
    wrong.tensors.insert("head.weight".into(), Tensor::full([7, 96], 1f32));
    wrong.tensors.insert("head.bias".into(), Tensor::full([7], 1f32));
    wrong.write(&weights).unwrap();
    forward().ok();
    let other = biformer(&[&["forward"][..], &files, &set, &["num_classes=3"]].concat());
    other.refused(&["head.weight is (7, 96), should be (3, 96)", "--set"]);
    wrong.tensors.retain(|name, _| !name.starts_with("head."));
    wrong.write(&weights).unwrap();
    forward().refused(&["head.bias (10) is missing", "head.weight (10, 96) is missing"]);
    fs::remove_file(&output).unwrap();
    fs::write(&weights, "epochs = 3\nmodel = \"nano\"\n").unwrap();
    forward().refused(&["weights.safetensors: neither a safetensors file nor a PyTorch file"]);

    right.write(&weights).unwrap();
    let say = |tensors: &[(&str, Tensor)]| {
        let tensors = tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
        TensorFile { tensors, ..TensorFile::default() }.write(&input).unwrap();
    };
    say(&[("images", Tensor::full([1, 3, 32, 32], 0f32))]);
    forward().refused(&["input.safetensors", "a tensor named \"input\"", "there is images"]);
    for shape in [vec![1, 32, 32, 3], vec![3, 32, 32], vec![0, 3, 32, 32]] {
        say(&[("input", Tensor::full(shape, 0f32))]);
        forward().refused(&["input.safetensors", "(N, 3, H, W)"]);
    }
    say(&[("input", Tensor::full([1, 3, 32, 32], 0u32))]);
    forward().refused(&["holds integers"]);
    say(&[("input", Tensor::full([1, 3, 33, 32], 0f32))]);
    forward().refused(&["an image of 33x32 does not fit", "a side of 32 or 48"]);
    for number in [f32::NAN, f32::INFINITY] {
        say(&[("input", Tensor::full([1, 3, 32, 32], number))]);
        forward().refused(&["input.safetensors: input holds numbers that are not finite"]);
    }
    say(&[("input", Tensor::full([1, 3, 32, 32], 0.5f32))]);
    assert!(!output.exists());
    forward().ok();
    forward().ok(); // results may take the place of others
    wrong = right.clone();
    wrong.tensors.insert("norm.bias".into(), Tensor::full([96], f32::MAX));
    wrong.tensors.insert("head.weight".into(), Tensor::full([10, 96], 1f32));
    wrong.write(&weights).unwrap();
    forward().refused(&["weights.safetensors: logits holds numbers that are not finite", "another run"]);
    right.write(&weights).unwrap();
    let checkpoint = copied_run("bad-output").join("checkpoint.safetensors");
    for precious in [&weights, &input, &checkpoint] {
        let before = fs::read(precious).unwrap();
        let files = ["--weights", text(&weights), "--input", text(&input), "--output", text(precious)];
        biformer(&[&["forward"][..], &files, &set].concat()).refused(&[text(precious), "name another file"]);
        assert!(before == fs::read(precious).unwrap());
    }
    let files = ["--weights", text(&weights), "--input", text(&input), "--output", "/nowhere/y.safetensors"];
    biformer(&[&["forward"][..], &files, &set].concat()).refused(&["/nowhere/y.safetensors"]);
    if cfg!(unix) {
        let output = folder.join("y.safetensors");
        let files = ["--weights", "/dev/zero", "--input", text(&input), "--output", text(&output)];
        biformer(&[&["forward"][..], &files, &set].concat()).refused(&["/dev/zero", "regular file"]);
        let files = ["--weights", text(&weights), "--input", text(&input), "--output", "/dev/null"];
        biformer(&[&["forward"][..], &files, &set].concat()).refused(&["/dev/null", "regular file"]);
    }
}

#[test]
fn checkpoints_that_are_none() {
    let whole = fs::read(of_one_epoch().run.join("checkpoint.safetensors")).unwrap();
    let run = copied_run("bad-checkpoint");
    let file = run.join("checkpoint.safetensors");
    let refused = |parts: &[&str]| {
        let before = contents(&run);
        let data = text(&of_one_epoch().data);
        let config = text(&of_one_epoch().config);
        let resume = ["train", "--resume", "--config", config, "--data", data, "--out", text(&run)];
        for arguments in [&["eval", "--checkpoint", text(&run)][..], &resume] {
            biformer(arguments).refused(parts);
        }
        assert!(before == contents(&run), "nothing is harmed");
    };
    for length in [0, 7, 200, whole.len() / 2, whole.len() - 1] {
        fs::write(&file, &whole[..length]).unwrap();
        refused(&["checkpoint.safetensors", "damaged", "another copy"]);
    }
    let best = run.join("best.safetensors");
    fs::write(&best, &whole).unwrap();
    biformer(&["train", "--resume", "--out", text(&run)]).refused(&[
        "another copy",
        "put best.safetensors in its place",
        "goes on after epoch 1",
    ]);
    // Not if it cannot even be read: it may be intact.
    let folder = RunFolder::open(&run).unwrap();
    let said = |error: std::io::Error| folder.or_best(error.into()).to_string();
    assert!(said(ErrorKind::UnexpectedEof.into()).contains("put best.safetensors in its place"));
    assert_eq!(said(ErrorKind::PermissionDenied.into()), "permission denied");
    drop(folder);
    fs::remove_file(best).unwrap();
    fs::write(&file, "PK\u{3}\u{4} archive/data.pkl, as PyTorch writes them").unwrap();
    refused(&["checkpoint.safetensors: not a file of tensors, or a damaged one", "another copy"]);
    fs::write(&file, &whole).unwrap();
    let stored = TensorFile::read(&file).unwrap();
    let change = |change: &dyn Fn(&mut TensorFile)| {
        let mut changed = stored.clone();
        change(&mut changed);
        changed.write(&file).unwrap();
    };
    change(&|file| file.metadata.clear());
    refused(&["not a checkpoint", "\"format\"", "biformer train"]);
    change(&|file| _ = file.metadata.insert("format".into(), "biformer-checkpoint-99".into()));
    refused(&["format \"biformer-checkpoint-99\"", "this program reads"]);
    change(&|file| file.metadata.get_mut("config").unwrap().insert_str(0, "colour = 3\n"));
    refused(&["stored configuration", "colour"]);
    change(&|file| {
        let config = file.metadata["config"].replace("embed_dim = [16, 32]", "embed_dim = [8000, 8000]");
        file.metadata.insert("config".into(), config);
    });
    refused(&["numbers, and its configuration is of a model of"]);
    change(&|file| _ = file.metadata.insert("progress".into(), "{\"batch\": -1}".into()));
    refused(&["its progress"]);
    let change_progress = |old: &str, new: &str| {
        change(&|file| {
            let progress = file.metadata["progress"].replace(old, new);
            assert_ne!(progress, file.metadata.insert("progress".into(), progress.clone()).unwrap());
        });
    };
    for (old, new, problem) in [
        ("\"epoch\":1,", "\"epoch\":3,", "its progress: epoch 3 stands where epoch 1 should"),
        ("\"test_accuracy\":", "\"test_accuracy\":7", "its progress: an accuracy is 70."),
        ("\"right\":0,", "\"right\":1,", "its progress: more of an epoch's first 0 images are right than there are"),
        ("\"images\":0", "\"images\":999", "999 images of the epoch are done, more than 0 batches have"),
    ] {
        change_progress(old, new);
        refused(&[problem]);
    }
    change_progress("\"optimizer_steps\":", "\"optimizer_steps\":99");
    let resume = ["train", "--resume", "--epochs", "4", "--data", text(&of_one_epoch().data), "--out", text(&run)];
    biformer(&resume).refused(&["checkpoint.safetensors", "has taken 99", "steps in", "another copy"]);
    change(&|file| {
        let mut progress = json(&file.metadata["progress"]);
        progress["epochs"] = serde_json::Value::Array(vec![]);
        for field in ["batch", "optimizer_steps", "average_updates"] {
            progress[field] = 999.into();
        }
        file.metadata.insert("progress".into(), progress.to_string());
    });
    biformer(&resume).refused(&["checkpoint.safetensors", "in batch 999 of", "another copy"]);
    change(&|file| _ = file.metadata.insert("data".into(), "{\"classes\": []}".into()));
    refused(&["its data"]);
    change(&|file| {
        let data = file.metadata["data"].replace("\"std\":[", "\"std\":[-");
        file.metadata.insert("data".into(), data);
    });
    refused(&["checkpoint.safetensors", "its data", "std [-", "above 0"]);
    change(&|file| {
        file.tensors.remove("norm.weight");
        file.tensors.insert("norm.wait".into(), Tensor::full([32], 1f32));
    });
    refused(&["norm.weight (32) is missing", "norm.wait (32) is not part"]);
    change(&|file| {
        file.tensors.insert("head.weight".into(), Tensor::full([3, 32], 1f32));
        file.tensors.insert("head.bias".into(), Tensor::full([3], 1f32));
    });
    refused(&["head.weight is (3, 32), should be (10, 32)"]);
    change(&|file| _ = file.metadata.insert("format".into(), "biformer-weights-2".into()));
    biformer(&["train", "--resume", "--out", text(&run)]).refused(&["weights alone", "no run can go on", "--weights"]);
    biformer(&["train", "--resume", "--out", text(&file)]).refused(&["it is a file", "--out", "--weights"]);
    fs::remove_file(&file).unwrap();
    fs::copy(of_one_epoch().run.join("best.safetensors"), run.join("best.safetensors")).unwrap();
    let best = "put best.safetensors in its place, which is whole: the run goes on after epoch 1";
    biformer(&["eval", "--checkpoint", text(&run)]).refused(&["there is no checkpoint, but", "best.safetensors"]);
    let whole = fs::read(run.join("best.safetensors")).unwrap();
    fs::write(run.join("best.safetensors"), &whole[..1000]).unwrap();
    biformer(&["eval", "--checkpoint", text(&run)]).refused(&["nor can that of the best epoch be read", "damaged"]);
    fs::write(run.join("best.safetensors"), &whole).unwrap();
    biformer(&["train", "--resume", "--out", text(&run)]).refused(&["there is no checkpoint.safetensors", best]);
    biformer(&["train", "--data", text(&of_one_epoch().data), "--out", text(&run)]).refused(&[
        "has lost its",
        best,
        "--out",
    ]);
    fs::remove_file(run.join("best.safetensors")).unwrap();
    biformer(&["eval", "--checkpoint", text(&run)]).refused(&["there is no checkpoint", "run folder"]);
    biformer(&["train", "--resume", "--out", text(&run)]).refused(&["there is no checkpoint.safetensors", "--out"]);

    let resume = ["train", "--resume", "--epochs", "4", "--data", text(&of_one_epoch().data), "--out", text(&run)];
    // All that could be read and does not fit: that of the best epoch may.
    let best = run.join("best.safetensors");
    fs::write(&best, &whole).unwrap();
    change(&|file| _ = file.tensors.remove("optimizer.m"));
    biformer(&resume).refused(&["there is no tensor optimizer.m", "put best.safetensors in its place"]);
    change_progress("\"optimizer_steps\":", "\"optimizer_steps\":99");
    biformer(&resume).refused(&["another copy of it; or put best.safetensors in its place"]);
    fs::remove_file(best).unwrap();
    for (tensor, number) in [("optimizer.m", f32::NAN), ("optimizer.v", -1.0), ("optimizer.v", f32::INFINITY)] {
        let shape = stored.tensors[tensor].shape().clone();
        change(&|file| _ = file.tensors.insert(tensor.into(), Tensor::full(shape.clone(), number)));
        biformer(&resume).refused(&["checkpoint.safetensors", "moments hold", "no step can go on"]);
    }
    for tensor in ["optimizer.m", "average.parameters", "average.statistics"] {
        change(&|file| _ = file.tensors.insert(tensor.into(), Tensor::full([5], 1f32)));
        biformer(&["train", "--resume", "--epochs", "4", "--out", text(&run)])
            .refused(&["checkpoint.safetensors", "laid out"]);
        change(&|file| _ = file.tensors.remove(tensor));
        biformer(&["train", "--resume", "--epochs", "4", "--out", text(&run)]).refused(&["there is no tensor", tensor]);
    }
}

#[test]
fn a_resumed_run_stays_what_it_was() {
    let Trained { config, .. } = of_one_epoch();
    let run = copied_run("bad-resume");
    let before = contents(&run);
    let resume = |more: &[&str]| biformer(&[&["train", "--resume", "--out", text(&run)], more].concat());
    resume(&["--lr", "0.1"]).refused(&["schedule.peak = 0.1", "began with 0.004", "leave it out"]);
    resume(&["--batch-size", "8"]).refused(&["batch_size = 8", "began with 16", "epochs"]);
    resume(&["--model", "tiny"]).refused(&["model = \"tiny\""]);
    resume(&["--epochs", "0"]).refused(&["epochs = 0"]);
    biformer(&["train", "--config", text(config), "--out", text(&run)]).refused(&[
        "bad-resume: holds a run already",
        "--resume",
        "bad-resume-2",
    ]);
    let other = samples::image_folder(&fresh("bad-resume-data"));
    resume(&["--epochs", "2", "--data", text(&other)]).refused(&["other classes"]);
    let fewer = samples::cifar10(&fresh("bad-resume-fewer"));
    let file = fewer.join("cifar-10-batches-bin/data_batch_5.bin");
    fs::File::options().write(true).open(file).unwrap().set_len(3073).unwrap();
    resume(&["--epochs", "2", "--data", text(&fewer)]).refused(&["129 training images", "began with 160"]);
    assert!(before == contents(&run), "nothing is harmed");
    // What it has already may be said again; and data may move.
    let moved = samples::cifar10(&fresh("bad-resume-moved"));
    let same = ["--lr", "0.004", "--batch-size", "16", "--data", text(&moved), "--epochs", "2"];
    resume(&same).ok();
    let stored: toml::Table = fs::read_to_string(run.join("config.toml")).unwrap().parse().unwrap();
    assert_eq!(stored["data"].as_str(), Some(text(&moved)));
}

#[test]
fn run_folders_that_cannot_be() {
    let folder = fresh("bad-folder");
    let file = folder.join("a-file");
    fs::write(&file, "precious").unwrap();
    let Trained { data, config, .. } = of_one_epoch();
    let nowhere: &[&str] = if cfg!(target_os = "linux") { &["/proc/self/run"] } else { &[] };
    for out in [file.clone(), file.join("below")].into_iter().chain(nowhere.iter().map(PathBuf::from)) {
        // Whatever else may be wrong: opening the data can take its time.
        let arguments = ["train", "--config", text(config), "--data", "/nowhere", "--out", text(&out)];
        biformer(&arguments).refused(&["run folder", text(&out), "choose another with --out"]);
    }
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    #[cfg(unix)]
    {
        let link = folder.join("link");
        std::os::unix::fs::symlink("/nowhere", &link).unwrap();
        for out in [link.clone(), link.join("below")] {
            let arguments = ["train", "--config", text(config), "--data", text(data), "--out", text(&out)];
            biformer(&arguments).refused(&["is a link to what is missing", "choose another with --out"]);
        }
        // What a run writes must not go anywhere else, whoever has put links into its folder.
        let elsewhere = folder.join("elsewhere");
        for (name, target) in [("metrics.jsonl", &elsewhere), (".lock", &file)] {
            let out = fresh("bad-folder-linked");
            std::os::unix::fs::symlink(target, out.join(name)).unwrap();
            let arguments = ["train", "--config", text(config), "--data", text(data), "--out", text(&out)];
            biformer(&arguments).refused(&["bad-folder-linked", name, "is a link"]);
        }
        assert!(fs::read(&file).unwrap() == b"precious" && !elsewhere.exists());
    }
    // Somebody else's files of the names that a run writes.
    for name in ["best.safetensors", "config.toml", "metrics.jsonl", "timings.jsonl", "curves.png", "routing.png"] {
        let out = fresh("bad-folder-taken");
        fs::write(out.join(name), "precious").unwrap();
        let arguments = ["train", "--config", text(config), "--data", text(data), "--out", text(&out)];
        biformer(&arguments).refused(&["bad-folder-taken", name, "choose another with --out"]);
        assert_eq!(fs::read(out.join(name)).unwrap(), b"precious");
        assert_eq!(contents(&out).len(), 1, "nothing beside it");
    }
}
