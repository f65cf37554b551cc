//! What nobody should feed the program, and what it says to that: one line that names the thing and the way out,
//! exit status 2, and nothing on disk harmed.

mod common;

use biformer::model::TensorFile;
use biformer::tensor::Tensor;
use common::program::{Ran, biformer, command, contents, fresh, text};
use common::samples;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

struct Shared {
    data: PathBuf,
    config: PathBuf,
    /// A finished run of one epoch.
    run: PathBuf,
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let folder = fresh("bad-input");
        let data = samples::cifar10(&folder.join("data"));
        let (config, run) = (samples::config(&folder, ""), folder.join("run"));
        let files = ["--config", text(&config), "--data", text(&data), "--out", text(&run)];
        biformer(&[&["train", "--epochs", "1"][..], &files].concat()).ok();
        Shared { data, config, run }
    })
}

/// Trains the small model with some fields changed and some more arguments.
fn train(folder: &Path, fields: &str, data: &Path, more: &[&str]) -> Ran {
    let config = samples::config(folder, fields);
    let run = folder.join("run");
    let shared = ["train", "--config", text(&config), "--data", text(data), "--out", text(&run)];
    biformer(&[&shared[..], more].concat())
}

/// A copy of the finished run, whose checkpoint a test may damage.
fn copied_run(name: &str) -> PathBuf {
    let folder = fresh(name);
    for (file, bytes) in contents(&shared().run) {
        fs::write(folder.join(file), bytes).unwrap();
    }
    folder
}

#[test]
fn data_that_is_missing_or_damaged() {
    let folder = fresh("bad-data");
    train(&folder, "", Path::new("/nowhere"), &[]).refused(&["/nowhere is missing", "embedded"]);
    train(&folder, "", &fresh("bad-data-empty"), &[]).refused(&["bad-data-empty is missing", "data_batch_1.bin"]);
    type Damage = fn(&Path);
    let cases: [(&str, Damage, &[&str]); 5] = [
        ("data_batch_3.bin", |file| fs::remove_file(file).unwrap(), &["data_batch_3.bin is missing"]),
        (
            "data_batch_2.bin",
            |file| fs::File::options().write(true).open(file).unwrap().set_len(5000).unwrap(),
            &["data_batch_2.bin is incomplete", "a multiple of 3073 bytes", "got 5000", "download it again"],
        ),
        (
            "test_batch.bin",
            |file| {
                let mut bytes = fs::read(file).unwrap();
                bytes[4 * 3073] = 11;
                fs::write(file, bytes).unwrap();
            },
            &["test_batch.bin, record 4: label 11 is outside the 10 classes (0 to 9)", "damaged"],
        ),
        (
            "batches.meta.txt",
            |file| fs::write(file, "one\ntwo\n").unwrap(),
            &["batches.meta.txt is incomplete", "10 class names", "got 2"],
        ),
        ("test_batch.bin", |file| fs::write(file, "").unwrap(), &["test_batch.bin is incomplete", "got 0"]),
    ];
    for (file, damage, parts) in cases {
        let data = samples::cifar10(&fresh("bad-data-set"));
        damage(&data.join("cifar-10-batches-bin").join(file));
        train(&folder, "", &data, &[]).refused(parts);
        // Nor can what has been trained be measured, or trained on.
        if file == "test_batch.bin" {
            biformer(&["eval", "--checkpoint", text(&shared().run), "--data", text(&data)]).refused(parts);
        }
    }
    assert!(!folder.join("run").exists(), "no run folder for a run that cannot begin");
}

#[test]
fn images_that_cannot_be_decoded() {
    let folder = fresh("bad-images");
    let data = samples::image_folder(&folder.join("data"));
    fs::write(data.join("train/dark/3.png"), "no picture").unwrap();
    fs::write(data.join("val/light/1.png"), [0x89, b'P', b'N', b'G']).unwrap();
    let fields = |bad: usize| format!("image_size = 32\nmax_bad_images = {bad}");
    train(&folder, &fields(0), &data, &["--batch-size", "5"]).refused(&[
        "dark/3.png",
        "max_bad_images is 0",
        "raise it",
    ]);
    fs::remove_dir_all(folder.join("run")).unwrap();
    let said = train(&folder, &fields(1), &data, &["--batch-size", "5", "--epochs", "1"]).ok();
    assert!(said.err.contains("dark/3.png") && said.err.contains("light/1.png"), "it names them: {said:?}");
    let run = folder.join("run");
    let eval = biformer(&["eval", "--checkpoint", text(&run), "--json"]).ok();
    assert!(eval.out.contains("\"images\": 7") && eval.err.contains("light/1.png"), "{eval:?}");
    fs::write(data.join("val/dark/0.png"), "").unwrap();
    biformer(&["eval", "--checkpoint", text(&run)]).refused(&["dark/0.png", "max_bad_images is 1"]);
    let bad = data.join("train/dark/3.png");
    biformer(&["predict", "--checkpoint", text(&run), text(&bad)]).refused(&["dark/3.png", "PNG or JPEG"]);
    biformer(&["predict", "--checkpoint", text(&run), "/nowhere.png"]).refused(&["/nowhere.png is missing"]);
    fs::remove_dir_all(data.join("val/light")).unwrap();
    train(&folder, &fields(1), &data, &["--resume", "--batch-size", "5"]).refused(&["different classes", "\"light\""]);
}

#[test]
fn another_number_of_classes() {
    let folder = fresh("bad-classes");
    let arguments = ["--set", "num_classes=4"];
    biformer(&[&["bench", "--batch-size", "1", "--steps", "1"][..], &arguments].concat()).ok();
    let config = folder.join("c.toml");
    fs::write(&config, "[architecture]\nnum_classes = 7").unwrap();
    let shared = shared();
    let run = folder.join("run");
    biformer(&["train", "--config", text(&config), "--data", text(&shared.data), "--out", text(&run)]).refused(&[
        "architecture.num_classes = 7",
        "has 10 classes",
        "leave it out",
    ]);
    let other = samples::image_folder(&folder.join("data"));
    biformer(&["eval", "--checkpoint", text(&shared.run), "--data", text(&other)])
        .refused(&["other classes", "2 of them, not 10"]);
}

#[test]
fn names_that_do_not_exist() {
    let folder = fresh("bad-names");
    let data = &shared().data;
    biformer(&["train", "--model", "nanno"]).refused(&["no model named \"nanno\"", "did you mean \"nano\"", "tiny"]);
    biformer(&["info", "--model", "smal"]).refused(&["did you mean \"small\""]);
    biformer(&["gradcheck", "--op", "liner"]).refused(&["did you mean \"linear\"", "softmax"]);
    biformer(&["info", "--set", "topk=1"]).refused(&["no field \"topk\"", "did you mean \"topks\"", "head_dim"]);
    train(&folder, "epoch = 4", data, &[]).refused(&["config-asked.toml", "\"epoch\"", "did you mean \"epochs\""]);
    train(&folder, "optimizer.beta = 1", data, &[]).refused(&["\"optimizer.beta\"", "\"betas\""]);
    biformer(&["train", "--config", "/dev/zero"]).refused(&["/dev/zero", "TOML"]);
    biformer(&["train", "--config", "/nowhere.toml"]).refused(&["configuration /nowhere.toml", "No such file"]);
    assert!(!folder.join("run").exists());
}

#[test]
fn values_that_make_no_sense() {
    let folder = fresh("bad-values");
    let data = &shared().data;
    let cases: [(&str, &[&str]); 14] = [
        ("seed = \"one\"", &["config-asked.toml", "seed", "expected"]),
        ("threads = 4000", &["threads = 4000", "1024", "0 for one per core"]),
        ("image_size = 34", &["a 34x34 image does not fit", "a side of 32 or 40 fits", "auto_pad = true"]),
        ("image_size = 0", &["0x0 image does not fit"]),
        ("micro_batches = 3", &["micro_batches = 3 does not divide batch_size = 16"]),
        ("label_smoothing = 1.0", &["label_smoothing = 1", "less than 1"]),
        ("clip_norm = nan", &["clip_norm = NaN", "0 for no clipping"]),
        ("seed = -1", &["seed", "-1"]),
        ("seed = ", &["config-asked.toml: line 1"]),
        ("optimizer = 3", &["optimizer: expected a table, got 3"]),
        ("optimizer.betas = [0.9, 1.0]", &["optimizer: betas[1] is 1", "[0, 1)"]),
        ("augmentation.flip = 2.0", &["augmentation", "flip", "probability"]),
        ("augmentation.crop = \"round\"", &["augmentation.crop", "padded"]),
        ("model = 3", &["model: expected a text in quotes, got 3"]),
    ];
    for (fields, parts) in cases {
        train(&folder, fields, data, &[]).refused(parts);
    }
    let flags: [(&[&str], &[&str]); 5] = [
        (&["--epochs", "0"], &["epochs = 0, expected 1 to"]),
        (&["--lr=-1"], &["schedule.peak = -1", "above 0"]),
        (&["--lr", "inf"], &["schedule.peak = inf"]),
        (&["--batch-size", "0"], &["batch_size = 0"]),
        (&["--batch-size", "161"], &["batch_size", "161", "160"]),
    ];
    for (flags, parts) in flags {
        train(&folder, "", data, flags).refused(parts);
    }
    assert!(!folder.join("run").exists());
}

#[test]
fn models_that_cannot_be() {
    let cases: [(&[&str], &[&str]); 14] = [
        (&["topks=17,8,-2"], &["topks: 17 in stage 1", "4x4 = 16 regions", "from 1 to that number"]),
        (&["topks=0,8,-2"], &["topks: 0 in stage 1"]),
        (&["topks=1,2"], &["topks: 2 values for the 3 stages"]),
        (&["n_win=three"], &["--set n_win=three", "a list with a number for each stage"]),
        (&["n_win"], &["--set n_win: expected key=value"]),
        (&["n_win=3"], &["32x32 image does not fit", "stage 1", "n_win = 3", "a side of 24 or 48", "auto_pad = true"]),
        (&["auto_pad=maybe"], &["--set auto_pad=maybe", "boolean"]),
        (&["depth=2"], &["embed_dim: 3 values for the 1 stages"]),
        (&["depth=2,0,2"], &["depth", "got [2, 0, 2]"]),
        (&["embed_dim=9999996,96,192"], &["embed_dim: 9999996 channels"]),
        (&["num_classes=99999999999"], &["num_classes", "1048576"]),
        (&["lce_kernel=4"], &["lce_kernel: 4", "odd"]),
        (&["head_dim=7"], &["head_dim: 7 does not divide the 48 channels"]),
        (
            &["embed_dim=65536,65536,65536", "head_dim=64", "full_attention_heads=8"],
            &["embed_dim", "parameters", "memory"],
        ),
    ];
    for (set, parts) in cases {
        biformer(&[&["info", "--set"][..], set].concat()).refused(parts);
    }
    for size in ["0", "1000000000", "18446744073709551615"] {
        biformer(&["info", "--image-size", size]).refused(&["image does not fit"]);
    }
    biformer(&["info", "--model", "tiny", "--image-size", "200"]).refused(&["a side of 112 or 224 fits"]);
    biformer(&["bench", "--batch-size", "1000000"]).refused(&["--batch-size 1000000", "GB"]);
    biformer(&["bench", "--steps", "0"]).refused(&["--steps 0"]);
    biformer(&["bench", "--threads", "99999"]).refused(&["--threads 99999", "1024"]);
}

#[test]
fn weights_of_another_model() {
    let folder = fresh("bad-weights");
    let [weights, input, output] =
        ["weights", "input", "output"].map(|name| folder.join(format!("{name}.safetensors")));
    let set = ["--set", "depth=1,1,1", "embed_dim=24,48,96"];
    let config = biformer::model::preset("nano").unwrap().config().with_overrides(set[1..].iter().copied()).unwrap();
    let model = biformer::model::BiFormer::new(&config, 0, biformer::tensor::DType::F32).unwrap();
    let right = model.state_dict().unwrap();
    let mut images = TensorFile::default();
    images.tensors.insert("input".into(), Tensor::full([1, 3, 32, 32], 0.5f32));
    images.write(&input).unwrap();
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
        "stages.2.0.norm2.bias is of type",
    ]);
    let mut wrong = right.clone();
    wrong.tensors.insert("head.weight".into(), Tensor::full([7, 96], 1f32));
    wrong.tensors.insert("head.bias".into(), Tensor::full([7], 1f32));
    wrong.write(&weights).unwrap();
    forward().refused(&["head has 7 classes, the model 10", "--set num_classes=7"]);

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
    forward().refused(&["a 33x32 image does not fit", "a side of 32 or 48"]);
    say(&[("input", Tensor::full([1, 3, 32, 32], f32::NAN))]);
    forward().ok();
    say(&[("input", Tensor::full([1, 3, 32, 32], 0f32))]);
    assert!(output.exists());
    let files = ["--weights", text(&weights), "--input", text(&input), "--output", "/nowhere/y.safetensors"];
    biformer(&[&["forward"][..], &files, &set].concat()).refused(&["/nowhere/y.safetensors"]);
    let files = ["--weights", "/dev/zero", "--input", text(&input), "--output", "/dev/null"];
    biformer(&[&["forward"][..], &files, &set].concat()).refused(&["/dev/zero", "regular file"]);
    let files = ["--weights", text(&weights), "--input", text(&input), "--output", "/dev/null"];
    biformer(&[&["forward"][..], &files, &set].concat()).refused(&["/dev/null", "regular file"]);
}

#[test]
fn checkpoints_that_are_none() {
    let whole = fs::read(shared().run.join("checkpoint.safetensors")).unwrap();
    let run = copied_run("bad-checkpoint");
    let file = run.join("checkpoint.safetensors");
    let refused = |parts: &[&str]| {
        let before = contents(&run);
        let data = text(&shared().data);
        let config = text(&shared().config);
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
    fs::write(&file, "PK\u{3}\u{4} archive/data.pkl, as PyTorch writes them").unwrap();
    refused(&["checkpoint.safetensors: not a safetensors file"]);
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
    change(&|file| _ = file.metadata.insert("progress".into(), "{\"epoch\": -1}".into()));
    refused(&["its progress"]);
    change(&|file| _ = file.metadata.insert("data".into(), "{\"classes\": []}".into()));
    refused(&["its data"]);
    change(&|file| {
        file.tensors.remove("norm.weight");
        file.tensors.insert("norm.wait".into(), Tensor::full([32], 1f32));
    });
    refused(&["norm.weight (32) is missing", "norm.wait (32) is not part"]);
    change(&|file| {
        file.tensors.insert("head.weight".into(), Tensor::full([3, 32], 1f32));
        file.tensors.insert("head.bias".into(), Tensor::full([3], 1f32));
    });
    refused(&["its head has 3 classes, its configuration 10"]);
    fs::remove_file(&file).unwrap();
    biformer(&["eval", "--checkpoint", text(&run)]).refused(&["there is no checkpoint", "run folder"]);
    biformer(&["train", "--resume", "--out", text(&run)]).refused(&["there is no checkpoint.safetensors", "--out"]);

    for tensor in ["optimizer.m", "average.parameters"] {
        change(&|file| _ = file.tensors.insert(tensor.into(), Tensor::full([5], 1f32)));
        biformer(&["train", "--resume", "--epochs", "4", "--out", text(&run)])
            .refused(&["checkpoint.safetensors", "laid out"]);
        change(&|file| _ = file.tensors.remove(tensor));
        biformer(&["train", "--resume", "--epochs", "4", "--out", text(&run)]).refused(&["there is no tensor", tensor]);
    }
}

#[test]
fn a_resumed_run_stays_what_it_was() {
    let Shared { data, config, .. } = shared();
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
        "--out",
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
    assert_ne!(data, &moved);
}

#[test]
fn run_folders_that_cannot_be() {
    let folder = fresh("bad-folder");
    let file = folder.join("a-file");
    fs::write(&file, "precious").unwrap();
    let Shared { data, config, .. } = shared();
    for out in [file.clone(), file.join("below"), "/proc/self/run".into()] {
        let arguments = ["train", "--config", text(config), "--data", text(data), "--out", text(&out)];
        biformer(&arguments).refused(&["run folder", text(&out), "choose another with --out"]);
    }
    assert_eq!(fs::read(&file).unwrap(), b"precious");
}

/// A limit on the size of files stands for a disk that fills up: the small ones fit, the checkpoint does not.
#[cfg(unix)]
#[test]
fn a_disk_that_fills_up_harms_no_checkpoint() {
    let run = copied_run("full-disk");
    let before = contents(&run);
    let script = "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\"";
    let limited = |arguments: &[&str]| {
        let program = command(&[]).get_program().to_owned();
        let output = std::process::Command::new("bash").args(["-c", script]).arg(program).args(arguments).output();
        Ran::from(output.unwrap())
    };
    let config = text(&shared().config);
    limited(&["train", "--resume", "--config", config, "--out", text(&run), "--epochs", "2"]).refused(&[
        "saving failed, the checkpoint before it is unharmed",
        "make room",
        "--resume --out",
        "checkpoint.safetensors",
    ]);
    let after = contents(&run);
    assert!(before["checkpoint.safetensors"] == after["checkpoint.safetensors"], "the checkpoint before");
    assert!(after.keys().eq(before.keys()), "and nothing half-written: {:?}", after.keys());
    // With room again, it goes on.
    biformer(&["train", "--resume", "--out", text(&run), "--epochs", "2"]).ok();
    let new = fresh("full-disk-new").join("run");
    let data = text(&shared().data);
    limited(&["train", "--config", config, "--data", data, "--out", text(&new)]).refused(&["saving failed; make room"]);
}

#[test]
fn a_loss_that_is_not_finite() {
    let folder = fresh("diverged");
    let data = &shared().data;
    let fields = "clip_norm = 0.0\ncheckpoint_every = 1";
    let said = train(&folder, fields, data, &["--lr", "1e30"]);
    let parts = ["step ", "epoch 1, batch", "learning rate", "training diverged", "a lower --lr"];
    let (status, err) = (said.status, said.err.clone());
    said.refused(&parts);
    assert!(
        status == Some(2) && (err.contains("operation to go wrong") || err.contains("norm of the gradients")),
        "{err}"
    );
    // What was saved before can still be used.
    biformer(&["eval", "--checkpoint", text(&folder.join("run"))]).ok();
}
