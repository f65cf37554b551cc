//! Every command's way through the real program, on a small model and small data.

use crate::common::program::{Ran, biformer, command, copy_folder, fresh, json, json_lines, text, unread};
use crate::common::samples::{self, Trained, of_three_epochs};
use biformer::commands::Cli;
use biformer::data::load_image;
use clap::CommandFactory;
use serde_json::Value;
use std::fs;
use std::path::Path;
use tensor::cpu::isa::Isa;

pub fn metrics(run: &Path) -> Vec<Value> {
    json_lines(&run.join("metrics.jsonl"))
}

#[test]
fn train_leaves_a_complete_run_folder() {
    let Trained { run, said, .. } = of_three_epochs();
    let metrics = metrics(run);
    assert_eq!(metrics.len(), 3);
    assert!(metrics[2]["train_loss"].as_f64() < metrics[0]["train_loss"].as_f64(), "it learns: {metrics:?}");
    for picture in ["curves.png", "routing.png"] {
        assert!(load_image(run.join(picture)).unwrap().width() > 100, "{picture}");
    }
    let config: toml::Table = fs::read_to_string(run.join("config.toml")).unwrap().parse().unwrap();
    assert_eq!(config["batch_size"].as_integer(), Some(16), "as asked");
    assert_eq!(config["clip_norm"].as_float(), Some(5.0), "as by default");
    let files: Vec<String> = crate::common::program::contents(run).into_keys().collect();
    let expected = [
        ".lock",
        "best.safetensors",
        "checkpoint.safetensors",
        "config.toml",
        "curves.png",
        "metrics.jsonl",
        "routing.png",
        "timings.jsonl",
    ];
    assert_eq!(files, expected);
    let last = 100.0 * metrics[2]["test_accuracy"].as_f64().unwrap();
    assert!(said.out.contains(&format!("Test accuracy {last:.1}% after ")) && said.out.contains(text(run)), "{said:?}");
    assert!(said.out.contains("Training losses are with label smoothing of 0.1, test losses without.\n"), "{said:?}");
    assert!(
        said.out.contains(" M parameters, 160 training images of 10 classes, 32 test images.\nTraining"),
        "{said:?}"
    );
    // Without a terminal: a line for each epoch, and no bar.
    let lines: Vec<&str> = said.out.lines().filter(|line| line.starts_with("epoch")).collect();
    assert_eq!(lines.len(), 3, "{said:?}");
    for (line, metrics) in lines.into_iter().zip(&metrics) {
        let of = |key: &str| metrics[key].as_f64().unwrap();
        let expected = format!(
            "epoch {:>3}/3  train loss {:.3} {:>5.1}%   test loss {:.3}  accuracy {:>4.1}%   ",
            of("epoch"),
            of("train_loss"),
            100.0 * of("train_accuracy"),
            of("test_loss"),
            100.0 * of("test_accuracy")
        );
        assert!(line.starts_with(&expected), "{line}, expected {expected}");
    }
    let timings = json_lines(&run.join("timings.jsonl"));
    assert_eq!(timings.len(), 3);
    for (epoch, timing) in (1..).zip(&timings) {
        let of = |key: &str| timing[key].as_f64().unwrap();
        // An epoch's seconds include its test, its speed does not.
        let trained = of("images_per_second") * of("seconds");
        assert!(timing["epoch"] == epoch && trained >= samples::TRAIN as f64, "{timing}");
        assert!((0.0..=1.0).contains(&of("waited")), "{timing}");
    }
    assert_eq!(said.err, "");
}

#[test]
fn the_command_line_wins_over_the_file() {
    let folder = fresh("cli-precedence");
    let (config, run) = (samples::config(&folder, "seed = 5"), folder.join("run"));
    // Also where they call a field by different names.
    let published = fs::read_to_string(&config).unwrap().replace("drop_path = ", "drop_path_rate = ");
    fs::write(&config, published).unwrap();
    let Trained { data, .. } = of_three_epochs();
    let files = ["train", "--config", text(&config), "--data", text(data), "--out", text(&run)];
    let fields = [
        "--epochs",
        "1",
        "--lr",
        "2e-3",
        "--set",
        "drop_path=0.25",
        "architecture.layer_scale=0.5",
        "label_smoothing=0",
        "optimizer.weight_decay=0.125",
    ];
    biformer(&[&files[..], &fields].concat()).ok();
    let stored: toml::Table = fs::read_to_string(run.join("config.toml")).unwrap().parse().unwrap();
    assert_eq!(stored["epochs"].as_integer(), Some(1));
    assert_eq!(stored["schedule"]["peak"].as_float(), Some(2e-3));
    assert_eq!(stored["seed"].as_integer(), Some(5));
    assert_eq!(stored["label_smoothing"].as_float(), Some(0.0));
    assert_eq!(stored["optimizer"]["weight_decay"].as_float(), Some(0.125));
    assert_eq!(
        ["drop_path", "layer_scale"].map(|field| stored["architecture"][field].as_float()),
        [Some(0.25), Some(0.5)]
    );
    assert_eq!(stored["schedule"]["min"].as_float(), Some(1e-5));
    assert_eq!(metrics(&run).len(), 1);
}

#[test]
fn a_run_that_is_mostly_warm_up_says_so() {
    let data = samples::image_folder(&fresh("cli-warm-up-data"));
    let said = |warm_up: &str| {
        let asked = ["--batch-size", "5", "--epochs", "1", "--set", warm_up];
        samples::train(&fresh("cli-warm-up"), "image_size = 32", &data, &asked).ok().err
    };
    let note = "note: the learning rate rises during 1 of 1 epoch; to have it fall for longer: --set ";
    let shorter = "schedule.warmup_epochs=0.125";
    assert_eq!(said("schedule.warmup_epochs=1"), format!("{note}{shorter}\n"));
    assert_eq!(said(shorter), "");
}

#[test]
fn a_setting_that_does_nothing_is_noted() {
    let data = samples::image_folder(&fresh("cli-idle-data"));
    let said = |fields: &[&str]| {
        let asked = ["--batch-size", "5", "--epochs", "1", "--set", "schedule.warmup_epochs=0.1"];
        samples::train(&fresh("cli-idle"), "image_size = 32", &data, &[&asked[..], fields].concat()).ok().err
    };
    // The small model's configuration has an `ema.decay`, and enables it.
    let fields = ["augmentation.mix=0.5", "augmentation.erase_fill=noise"];
    let notes = "note: ema.decay does nothing here: it needs ema.enabled=true\n\
        note: augmentation.erase_fill does nothing here: it needs augmentation.erase, such as 0.25\n\
        note: augmentation.mix does nothing here: it needs augmentation.mixup or cutmix, such as 1\n";
    assert_eq!(said(&[&fields[..], &["ema.enabled=false"]].concat()), notes);
    assert_eq!(said(&[&fields[..], &["augmentation.cutmix=1", "augmentation.erase=0.25"]].concat()), "");
}

#[test]
fn an_image_folder_works_like_cifar() {
    let folder = fresh("cli-folder");
    let (data, run) = (samples::image_folder(&folder.join("data")), folder.join("run"));
    let config = samples::config(&folder, "image_size = 32");
    let shared = ["--data", text(&data)];
    let out = ["--out", text(&run), "--batch-size", "5", "--epochs", "2"];
    let train = [&["train", "--config", text(&config)][..], &shared, &out].concat();
    // What a user should notice of it: where its images lie, that some are missing, and some cannot be read.
    let moved = data.join("train/dark/more");
    fs::create_dir(&moved).unwrap();
    (0..3).for_each(|n| fs::rename(data.join(format!("train/dark/{n}.png")), moved.join(format!("{n}.png"))).unwrap());
    (0..5).for_each(|n| fs::remove_file(data.join(format!("train/light/{n}.png"))).unwrap());
    (0..2).for_each(|n| fs::remove_file(data.join(format!("val/light/{n}.png"))).unwrap());
    for other in ["train/light/0.heic", "train/dark/1.gif", "val/dark/notes.txt"] {
        fs::write(data.join(other), "").unwrap();
    }
    copy_folder(&data.join("val"), &data.join("test"));
    let said = biformer(&train).ok();
    let lines = [
        "M parameters, 15 training images of 2 classes, 6 validation images (val/).",
        "The classes are uneven: from 5 training images (light) to 10 (dark). To see them equally often: --set augmentation.balance=1.\n",
        "So are those of the validation images. To choose the best epoch by the mean of the classes' accuracies: --set best_by=macro_accuracy.\n",
        "of them; to see more of photographs: --image-size 64",
        "label smoothing of 0.1, validation losses without.\n",
        "%   val loss ",
        "The images in test/ had no part in this: biformer eval --checkpoint ",
    ];
    lines.iter().for_each(|line| assert!(said.out.contains(line), "{line}: {said:?}"));
    let notes = "note: skipped 2 files in train/ that are no images by their names: 1 .gif, 1 .heic\n\
                 note: skipped 1 file in val/ that is no image by its name: 1 .txt\n";
    assert!(said.err.contains(notes), "{said:?}");
    // What cannot be had any more is not offered.
    // And the model's default number of classes, which the data overruled, may be asked for again.
    let classes = ["--set", "num_classes=10"];
    let longer = ["train", "--resume", "--epochs", "3", "--out", text(&run)];
    let said = biformer(&[&longer[..], &classes].concat()).ok().out;
    assert!(said.contains("(light) to 10 (dark).\n"), "{said}");
    let report = json(&biformer(&["eval", "--checkpoint", text(&run), "--json"]).ok().out);
    assert_eq!(report["images"], 6);
    assert_eq!(report["classes"][1]["name"], "light");
    assert!(load_image(run.join("routing.png")).is_ok());
}

/// What is off by default: soft routing, layer scale, the published schedule, micro-batches.
#[test]
fn everything_that_is_off_can_be_trained() {
    let folder = fresh("cli-options");
    let (config, run) = (samples::config(&folder, "micro_batches = 2"), folder.join("run"));
    let with = fs::read_to_string(&config).unwrap().replace("[schedule]", "[schedule]\nrule = \"timm\"");
    let with = with.replace("warmup_epochs = 0.5", "warmup_epochs = 1.0\nstart = 2e-5\nmin = 1e-5");
    fs::write(&config, with + "soft_routing = true\nlayer_scale = 0.1\n").unwrap();
    let Trained { data, .. } = of_three_epochs();
    biformer(&["train", "--config", text(&config), "--data", text(data), "--out", text(&run)]).ok();
    let metrics = metrics(&run);
    let of = |key: &str| metrics.iter().map(|line| line[key].as_f64().unwrap()).collect::<Vec<f64>>();
    // Constant within an epoch, of which the first two have the same; the last is at a third of the cosine.
    let expected = [2e-5, 2e-5, 0.75 * 0.004 + 0.25 * 1e-5];
    for (rate, expected) in of("learning_rate").into_iter().zip(expected) {
        assert!((rate - expected).abs() < 1e-9, "{rate}, expected {expected}");
    }
    assert!(of("train_loss")[2] < of("train_loss")[0], "it learns: {metrics:?}");
    let report = json(&biformer(&["eval", "--checkpoint", text(&run), "--json"]).ok().out);
    assert_eq!(report["top1"], metrics[2]["test_accuracy"]);
    assert_eq!(report["macro_top1"], metrics[2]["test_macro_accuracy"]);
    let stored = biformer::model::TensorFile::read(&run.join("checkpoint.safetensors")).unwrap();
    let gamma = stored.tensors["stages.0.0.gamma1"].to_vec::<f32>().unwrap();
    assert!(gamma.iter().any(|&factor| (factor - 0.1).abs() > 1e-6), "{gamma:?}");
}

#[test]
fn cifar_100_works_like_cifar_10() {
    let folder = fresh("cli-cifar100");
    let (data, run) = (samples::cifar100(&folder.join("data")), folder.join("run"));
    let config = samples::config(&folder, "");
    let train = ["train", "--config", text(&config), "--data", text(&data), "--out", text(&run), "--epochs", "1"];
    biformer(&train).ok();
    let report = json(&biformer(&["eval", "--checkpoint", text(&run), "--json"]).ok().out);
    assert_eq!(report["images"], samples::TEST);
    let classes = report["classes"].as_array().unwrap();
    assert_eq!((classes.len(), classes[42]["name"].as_str()), (100, Some("class 42")));
}

#[test]
fn gradcheck_reports_and_writes_json() {
    let folder = fresh("cli-gradcheck");
    let [report, alone] = ["report.json", "alone.json"].map(|name| folder.join(name));
    let said = biformer(&["gradcheck", "--op", "scale", "--report", text(&report)]).ok().out;
    assert!(said.contains("scale") && said.contains("0 failures") && said.contains("100%"), "{said}");
    // Whoever reads no further has the report, too.
    unread(command(&["gradcheck", "--op", "scale", "--report", text(&alone)])).ok();
    let report = fs::read_to_string(report).unwrap();
    assert_eq!(report, fs::read_to_string(alone).unwrap());
    let report = json(&report);
    assert_eq!(report[0]["op"], "scale");
    assert_eq!(report[0]["passed"], true);
    assert_eq!(report[0]["kill_rate"], 1.0);
    assert!(report[0]["dual_error"].as_f64().unwrap() < 1e-10);
    assert!(report[0]["single_error"].as_f64().unwrap() < 1e-4);
}

#[test]
fn gradcheck_takes_whole_models() {
    let report = fresh("cli-gradcheck-model").join("report.json");
    let check = |set: &[&str], more: &[&str]| {
        biformer(&[&["gradcheck", "--model", "nano", "--set"], set, &["--image-size", "32"], more].concat())
    };
    let small = ["depth=1,1,1", "embed_dim=24,24,24", "num_classes=3"];
    // Twice, as a report may take the place of an earlier one.
    for _ in 0..2 {
        let said = check(&small, &["--report", text(&report)]).ok().out;
        assert!(said.contains("stages.2") && said.contains("elements compared") && !said.contains("FAILED"), "{said}");
    }
    let parts = json(&fs::read_to_string(&report).unwrap());
    for part in parts.as_array().unwrap() {
        assert!(part["passed"] == true && part["difference_error"].as_f64() < Some(1e-9), "{part}");
    }
    let checked: u64 = parts.as_array().unwrap().iter().map(|part| part["checked"].as_u64().unwrap()).sum();
    assert!(checked > 100, "{checked}");
    check(&["features=dense"], &[]).refused(&["features = \"dense\"", "logits", "leave it out"]);
    let ignored = [check(&small, &["--op", "linear"]), check(&small, &["--device", "emulated"])];
    assert!(
        ignored.iter().all(|said| said.status == Some(2) && said.err.contains("cannot be used with")),
        "{ignored:?}"
    );
    let of_none = biformer(&["gradcheck", "--set", "depth=1"]);
    assert!(of_none.status == Some(2) && of_none.err.contains("--model <NAME>"), "{of_none:?}");
    biformer(&["gradcheck", "--model", "nano", "--image-size", "33"]).refused(&["image of 33x33 does not fit"]);
}

#[test]
fn info_knows_the_published_sizes() {
    // Those of the others are the library's: see the tests of `model`.
    let info = json(&biformer(&["info", "--model", "tiny", "--image-size", "224", "--json"]).ok().out);
    assert_eq!(info["parameters"], 13_142_760);
    assert!((2.1e9..2.3e9).contains(&info["macs"].as_f64().unwrap()), "{}", info["macs"]);
    assert!(info["activation_bytes_per_image"].as_u64() > Some(0));
    let wide = json(&biformer(&["info", "--model", "tiny", "--image-size", "448x224", "--json"]).ok().out);
    assert_eq!((&wide["image_size"], &wide["parts"][1]["map"]), (&[448, 224].into(), &[112, 56, 64].into()));
    let said = biformer(&["info"]).ok().out;
    assert!(
        said.contains("nano, images of 32x32") && said.contains("in all") && said.contains("activations"),
        "{said}"
    );
    assert!(said.contains("Training in batches of 64 takes about") && said.contains("Inference in"), "{said}");
    let dense = biformer(&["info", "--set", "features=dense", "--json"]).ok().out;
    assert!(json(&dense)["training_bytes"].is_null() && json(&dense)["inference_bytes"].is_u64(), "{dense}");
    let kept = |recompute: &str| {
        let info = json(&biformer(&["info", "--recompute", recompute, "--json"]).ok().out);
        info["activation_bytes_per_image"].as_u64().unwrap()
    };
    let single = ["info", "--json", "--batch-size", "1", "--image-size", "16", "--set", "depth=1,1", "embed_dim=16,32"];
    let fields = ["topks=1,-2", "n_win=1", "head_dim=8", "full_attention_heads=4", "stem_strides=4,4"];
    let said = biformer(&[&single[..], &fields].concat()).ok();
    assert!(said.err.contains("note: this model cannot be trained: "), "{said:?}");
    assert!(json(&said.out)["training_bytes"].is_null() && json(&said.out)["inference_bytes"].is_u64(), "{said:?}");
    assert!(kept("none") > kept("cheap") && kept("cheap") > kept("block"));
    assert_eq!(kept("auto"), kept("cheap"), "as a CPU trains");
    biformer(&["info", "--batch-size", "0"]).refused(&["--batch-size 0", "1 to"]);
    biformer(&["info", "--model", "stl_nchw", "--image-size", "64", "--set", "n_win=2", "topks=1,2,3,-1"]).ok();
}

/// That of the default model, as for a run that is started so.
#[test]
fn a_run_is_resumed_where_one_would_be_started() {
    let here = fresh("cli-resume-here");
    let resumed = |more: &[&str]| {
        let mut resume = command(&[&["train", "--resume"], more].concat());
        Ran::from(resume.current_dir(&here).output().unwrap())
    };
    resumed(&[]).refused(&["runs/nano", "no checkpoint.safetensors to resume from"]);
    resumed(&["--model", "micro"]).refused(&["runs/micro", "no checkpoint.safetensors to resume from"]);
    resumed(&["--weights", "w.safetensors"]).refused(&["name it with --out"]);
    // No command means to start that one.
    fs::create_dir_all(here.join("runs/nano")).unwrap();
    fs::write(here.join("runs/nano/curves.png"), "somebody's").unwrap();
    Ran::from(command(&[]).current_dir(&here).output().unwrap()).refused(&["run folder runs/nano", "curves.png"]);
}

#[test]
fn a_word_without_an_option_gets_a_tip() {
    for (arguments, tip) in [
        (&["train", "pictures"][..], "--data pictures"),
        (&["train", "--resume", "runs/a b"], "--resume --out 'runs/a b'"),
        (&["train", "--resume", "auto"], "--resume=auto"),
        (&["eval", "runs/nano"], "--checkpoint runs/nano"),
    ] {
        let said = biformer(arguments);
        assert_eq!(said.status, Some(2), "{said:?}");
        assert!(said.err.contains(&format!("tip: perhaps it is meant as: {tip}\n")), "{}", said.err);
    }
    assert!(!biformer(&["train", "--epoch", "3"]).err.contains("perhaps"));
    for (arguments, meant) in [
        (&["--epochs", "3", "--out", "a b"][..], "train --epochs 3 --out 'a b'"),
        (&["--checkpoint", "runs/nano", "eval", "--json"], "eval --checkpoint runs/nano --json"),
    ] {
        let said = biformer(arguments);
        let tip = format!("tip: options come after the command: biformer {meant}\n");
        assert!(said.status == Some(2) && said.err.contains(&tip), "{said:?}");
    }
    let folder = fresh("cli-hyphen");
    fs::write(folder.join("-a b.png"), "").unwrap();
    let predict = ["predict", "--checkpoint", "x", "-a b.png"];
    let said = command(&predict).current_dir(&folder).output().unwrap();
    let err = String::from_utf8(said.stderr).unwrap();
    assert!(err.contains("tip: a file of this name is './-a b.png'"), "{err}");
}

#[test]
#[cfg(unix)]
fn an_argument_that_is_no_text_is_named() {
    use std::os::unix::ffi::OsStrExt;
    let said = command(&["check", "--data"]).arg(std::ffi::OsStr::from_bytes(b"a\xffz")).output().unwrap();
    let err = String::from_utf8_lossy(&said.stderr);
    assert!(said.status.code() == Some(2) && err.contains("tip: it is 'a\u{fffd}z'"), "{err}");
}

#[test]
fn help_tells_every_option() {
    let all = biformer(&["--help"]).ok().out;
    for command in Cli::command().get_subcommands() {
        let name = command.get_name();
        assert!(all.contains(&format!("  {name} ")) && command.get_about().is_some(), "{name}: {all}");
        let help = biformer(&[name, "--help"]).ok().out;
        for option in command.get_arguments() {
            let told = option.get_help().or(option.get_long_help()).is_some_and(|help| !help.to_string().is_empty());
            let names =
                option.get_long().map_or_else(|| option.get_id().as_str().to_uppercase(), |long| format!("--{long}"));
            assert!(told, "{name} --help does not say what {names} is for");
            assert!(option.is_positional() || help.contains(&names), "{name} --help says nothing of {names}");
        }
    }
    let of_train = biformer(&["train", "--help"]).ok().out;
    for preset in biformer::model::PRESETS {
        assert!(of_train.contains(preset.name), "{}", preset.name);
    }
    assert!(!all.contains("--epochs"), "it is an overview: {all}");
}

/// `biformer info | head -1`, and a disk that is full for what is printed.
#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_no_panic() {
    let ended = unread(command(&["info"]));
    assert!(ended.status == Some(0) && ended.err.is_empty(), "{ended:?}");
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let ended = Ran::from(command(&["info"]).stdout(full).spawn().unwrap().wait_with_output().unwrap());
    ended.refused(&["standard output", "No space left"]);
    // Pictures are drawn before that is noticed.
    let (folder, full) = (fresh("cli-full-output"), fs::File::options().write(true).open("/dev/full").unwrap());
    let (config, run) = (samples::config(&folder, ""), folder.join("run"));
    let train = ["train", "--config", text(&config), "--data", text(&of_three_epochs().data), "--out", text(&run)];
    let mut train = command(&[&train[..], &["--epochs", "1"]].concat());
    Ran::from(train.stdout(full).spawn().unwrap().wait_with_output().unwrap()).refused(&["No space left"]);
    assert!(run.join("routing.png").exists());
}

/// What nobody asked for follows a low peak down.
#[test]
fn a_low_learning_rate_needs_no_other() {
    let folder = fresh("cli-low-rate");
    let (config, run) = (samples::config(&folder, ""), folder.join("run"));
    let train = ["train", "--config", text(&config), "--data", text(&of_three_epochs().data), "--out", text(&run)];
    biformer(&[&train[..], &["--epochs", "1", "--lr", "5e-6"]].concat()).ok();
    let stored: toml::Table = fs::read_to_string(run.join("config.toml")).unwrap().parse().unwrap();
    let rates = ["peak", "start", "min"].map(|rate| stored["schedule"][rate].as_float());
    assert_eq!(rates, [Some(5e-6); 3]);
}

#[test]
fn a_lesser_instruction_set_can_be_asked_for() {
    let devices = |isa: &str| Ran::from(command(&["devices"]).env("BIFORMER_ISA", isa).output().unwrap());
    let least = Isa::Portable.name();
    let listed = devices(least).ok();
    assert!(listed.out.lines().next().unwrap().ends_with(&format!(", {least}")), "{}", listed.out);
    devices("mmx").refused(&["BIFORMER_ISA: expected one of", "avx2, avx512", "got \"mmx\""]);
    assert_eq!(devices("").ok().out, biformer(&["devices"]).ok().out, "as good as not set");
}

#[test]
fn the_number_of_threads_is_that_of_the_option_or_else_of_the_variable() {
    let said = |variable: &str, option: &[&str]| {
        let mut check = command(&[&["check", "--data", "embedded"], option].concat());
        Ran::from(check.env("RAYON_NUM_THREADS", variable).output().unwrap()).ok().err
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (many, most) = ((8 * cores + 1).to_string(), 8 * cores);
    let noted = |count: &str| {
        let s = if cores == 1 { "" } else { "s" };
        format!("note: {most} threads instead of {count}, which would be slower on {cores} core{s}\n")
    };
    assert_eq!(said(&many, &[]), noted(&many));
    assert_eq!(said(&many, &["--threads", "1"]), "");
    // The option takes no more than 1024.
    if most < 1024 {
        assert_eq!(said("1", &["--threads", "1024"]), noted("1024"));
    }
    assert_eq!(said("1", &[]), "");
    assert_eq!(said("many", &[]), "note: RAYON_NUM_THREADS=many is no number of threads, and is ignored\n");
}
