//! What nobody should feed the program, and what it says to that: one line that names the thing and the way out,
//! exit status 2, and nothing on disk harmed.

use crate::common::program::{biformer, fresh, json, place, text, with_slashes};
use crate::common::samples::{self, of_one_epoch, train};
use biformer::model::TensorFile;
use biformer::tensor::Tensor;
use std::fs;
use std::path::Path;

#[test]
fn data_that_is_missing_or_damaged() {
    let folder = fresh("bad-data");
    let said = train(&folder, "", Path::new("/nowhere"), &[]);
    assert!(said.out.starts_with("Training nano on /nowhere "), "before anything that takes its time: {said:?}");
    said.refused(&["/nowhere is missing", "embedded"]);
    train(&folder, "", &fresh("bad-data-empty"), &[])
        .refused(&["bad-data-empty is no data set. It has no folders.", "CIFAR-10"]);
    type Damage = fn(&Path);
    let cases: [(&str, Damage, &[&str]); 5] = [
        ("data_batch_3.bin", |file| fs::remove_file(file).unwrap(), &["data_batch_3.bin is missing"]),
        (
            "data_batch_2.bin",
            |file| fs::File::options().write(true).open(file).unwrap().set_len(5000).unwrap(),
            &["data_batch_2.bin holds 5000 bytes instead of a multiple of 3073 bytes", "download it again"],
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
            &["batches.meta.txt holds 2 instead of 10 class names"],
        ),
        ("test_batch.bin", |file| fs::write(file, "").unwrap(), &["test_batch.bin holds 0 bytes instead"]),
    ];
    for (file, damage, parts) in cases {
        let data = samples::cifar10(&fresh("bad-data-set"));
        damage(&data.join("cifar-10-batches-bin").join(file));
        train(&folder, "", &data, &[]).refused(parts);
        // Nor can what has been trained be measured, or trained on.
        if file == "test_batch.bin" {
            biformer(&["eval", "--checkpoint", text(&of_one_epoch().run), "--data", text(&data)]).refused(parts);
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
    // What was learned before it was met is kept.
    let go_on = "what was done is saved: mend this without taking images away, and go on with --resume --out ";
    let parts = [
        "error: too many images cannot be read (max_bad_images is 0)",
        "dark/3.png",
        "raise that number with --set max_bad_images=N",
        go_on,
    ];
    train(&folder, &fields(0), &data, &["--batch-size", "5"]).refused(&parts);
    let steps = place(&folder.join("run"));
    assert!(steps >= Some((0, 1)), "{steps:?}");
    let good = fs::read(data.join("train/dark/4.png")).unwrap();
    let bad = fs::read(data.join("train/dark/3.png")).unwrap();
    fs::write(data.join("train/dark/3.png"), good).unwrap();
    train(&folder, &fields(0), &data, &["--resume", "--batch-size", "5"]).refused(&["light/1.png", go_on]);
    assert_eq!(place(&folder.join("run")), Some((0, 4)), "all steps of the epoch");
    fs::write(data.join("train/dark/3.png"), bad).unwrap();
    fs::remove_dir_all(folder.join("run")).unwrap();
    let said = train(&folder, &fields(1), &data, &["--batch-size", "5", "--epochs", "1"]).ok();
    let err = with_slashes(&said.err);
    assert!(err.contains("dark/3.png") && err.contains("light/1.png"), "it names them: {said:?}");
    let run = folder.join("run");
    let eval = biformer(&["eval", "--checkpoint", text(&run), "--json"]).ok();
    assert!(eval.out.contains("\"images\": 7") && with_slashes(&eval.err).contains("light/1.png"), "{eval:?}");
    fs::write(data.join("val/dark/0.png"), "").unwrap();
    biformer(&["eval", "--checkpoint", text(&run)]).refused(&["dark/0.png", "max_bad_images is 1", "--max-bad-images"]);
    biformer(&["eval", "--checkpoint", text(&run), "--max-bad-images", "2"]).ok();
    let bad = data.join("train/dark/3.png");
    biformer(&["predict", "--checkpoint", text(&run), text(&bad)]).refused(&["dark/3.png", "it is no PNG, JPEG, WebP"]);
    for (contents, told) in [("", "it is empty"), ("GIF89a\u{1}\0\u{1}\0\0\0\0;", "it is no PNG, JPEG, WebP")] {
        fs::write(&bad, contents).unwrap();
        biformer(&["predict", "--checkpoint", text(&run), text(&bad)]).refused(&["dark/3.png", told]);
    }
    biformer(&["predict", "--checkpoint", text(&run), "/nowhere.png"]).refused(&["/nowhere.png is missing"]);
    // Among others each is named, and the others are classified.
    let good = data.join("val/dark/1.png");
    let among = ["predict", "--checkpoint", text(&run), "/nowhere.png", text(&good), text(&bad), text(&good)];
    let said = biformer(&among);
    assert_eq!(said.status, Some(2), "{said:?}");
    assert_eq!(said.out.lines().filter(|line| *line == text(&good)).count(), 2, "{said:?}");
    let errors: Vec<&str> = said.err.lines().collect();
    assert_eq!(errors.len(), 2, "{said:?}");
    assert!(errors[0].contains("/nowhere.png is missing") && errors[1].contains("dark/3.png"), "{said:?}");
    fs::rename(data.join("val/light"), data.join("val/other")).unwrap();
    let refused = ["val has classes that", "has not: other; ", "add images of them there"];
    train(&folder, &fields(1), &data, &["--resume", "--batch-size", "5"]).refused(&refused);
}

#[test]
fn another_number_of_classes() {
    let folder = fresh("bad-classes");
    let arguments = ["--set", "num_classes=4"];
    biformer(&[&["bench", "--batch-size", "1", "--steps", "1"][..], &arguments].concat()).ok();
    let config = folder.join("c.toml");
    fs::write(&config, "[architecture]\nnum_classes = 7").unwrap();
    let shared = of_one_epoch();
    let run = folder.join("run");
    biformer(&["train", "--config", text(&config), "--data", text(&shared.data), "--out", text(&run)]).refused(&[
        "architecture.num_classes = 7",
        "has 10 classes",
        "leave it out",
    ]);
    let other = samples::image_folder(&folder.join("data"));
    biformer(&["eval", "--checkpoint", text(&shared.run), "--data", text(&other)])
        .refused(&["the 2 classes dark, light are none of the 10", "zero, one"]);
}

#[test]
fn names_that_do_not_exist() {
    let folder = fresh("bad-names");
    let data = &of_one_epoch().data;
    biformer(&["train", "--model", "nanno"]).refused(&["no model named \"nanno\"", "did you mean \"nano\"", "tiny"]);
    biformer(&["info", "--model", "smal"]).refused(&["did you mean \"small\""]);
    biformer(&["gradcheck", "--op", "liner"]).refused(&["did you mean \"linear\"", "softmax"]);
    biformer(&["train", "--resume", "--weights", "runs/other"]).refused(&["--resume", "name it with --out"]);
    for (entry, meant) in [
        ("optimizer.epz=1", "did you mean \"optimizer.eps\""),
        ("mixup=0.1", "did you mean \"augmentation.mixup\""),
        ("lr=0.1", "did you mean \"schedule.peak\""),
        ("label_smothing=0.1", "did you mean \"label_smoothing\""),
        ("n_wim=4", "did you mean \"n_win\""),
        ("ema=true", "a section with ema.decay, ema.enabled, ema.warmup"),
    ] {
        biformer(&["train", "--set", entry]).refused(&[meant, "config.toml"]);
    }
    biformer(&["train", "--set", "epochs=many"]).refused(&["\"many\"", "`epochs`"]);
    biformer(&["info", "--set", "topk=1"]).refused(&["no field \"topk\"", "did you mean \"topks\"", "head_dim"]);
    train(&folder, "epoch = 4", data, &[]).refused(&["config-asked.toml", "\"epoch\"", "did you mean \"epochs\""]);
    let both = folder.join("both.toml");
    fs::write(&both, "[architecture]\nn_win = 4\nn_wins = 2").unwrap();
    biformer(&["train", "--config", text(&both)]).refused(&["both.toml: architecture.n_win is given twice"]);
    train(&folder, "optimizer.beta = 1", data, &[]).refused(&["\"optimizer.beta\"", "\"betas\""]);
    if cfg!(unix) {
        biformer(&["train", "--config", "/dev/zero"]).refused(&["/dev/zero", "TOML"]);
    }
    biformer(&["train", "--config", "/nowhere.toml"]).refused(&["configuration /nowhere.toml", "os error"]);
    assert!(!folder.join("run").exists());
}

#[test]
fn models_that_cannot_be() {
    let cases: [(&[&str], &[&str]); 23] = [
        (&["n_win=65"], &["n_win: 65 in stage 1, expected 1 to 64"]),
        (&["topks=17,8,-2"], &["topks: 17 in stage 1", "4x4 = 16 regions", "from 1 to that number"]),
        (&["topks=0,8,-2"], &["topks: 0 in stage 1"]),
        (&["topks=1,2"], &["topks: 2 values for the 3 stages"]),
        (&["n_win=three"], &["--set n_win=three", "a list with one for each stage (for n_win whole numbers from 1)"]),
        (
            &["n_win=3"],
            &["image of 32x32 does not fit", "stage 1", "n_win = 3", "a side of 24 or 48", "auto_pad = true"],
        ),
        (&["auto_pad=maybe"], &["--set auto_pad=maybe", "true or false"]),
        (&["depth=2"], &["embed_dim: 3 values for the 1 stages"]),
        (&["depth=2,0,2"], &["depth", "got [2, 0, 2]"]),
        (&["embed_dim=9999996,96,192"], &["embed_dim: 9999996 channels"]),
        (&["num_classes=99999999999"], &["num_classes", "1048576"]),
        (&["lce_kernel=4"], &["lce_kernel: 4", "0 for none"]),
        (&["lce_kernel=0"], &["lce_kernel"]),
        (&["stem_strides=0,4"], &["stem_strides"]),
        (&["stem_strides=5,4"], &["stem_strides"]),
        (&["mlp_ratio=65"], &["mlp_ratio: 65 in stage 1, expected more than 0, and at most 64"]),
        (&["mlp_ratio=0.001"], &["mlp_ratio: 0.001 of 48 channels in stage 1 leaves none"]),
        (&["n_win=4,4"], &["n_win: 2 values, expected one, or one for each of 3 stages"]),
        (&["embed_dim=47,96,192"], &["embed_dim: 47 in stage 1, expected an even number"]),
        (&["full_attention_heads=0"], &["full_attention_heads: 0 heads"]),
        (&["head_dim=7"], &["head_dim: 7 does not divide the 48 channels"]),
        (&["head_dim=[[24]]"], &["head_dim=[[24]]", "expected"]),
        (
            &["embed_dim=65536,65536,65536", "head_dim=64", "full_attention_heads=8"],
            &["embed_dim", "parameters", "memory"],
        ),
    ];
    for (set, parts) in cases {
        biformer(&[&["info", "--set"][..], set].concat()).refused(parts);
    }
    for size in ["0", "1000000000", "18446744073709551615"] {
        biformer(&["info", "--image-size", size]).refused(&["does not fit"]);
    }
    let nchw = ["info", "--model", "stl_nchw"];
    biformer(&[&nchw[..], &["--set", "soft_routing=true"]].concat()).refused(&["soft_routing", "biformer_stl_nchw"]);
    biformer(&[&nchw[..], &["--image-size", "64"]].concat())
        .refused(&["a side of 64 is 4 in stage 3, too little for n_win = 7 regions", "a side of 128 fits"]);
    let late = ["info", "--set", "stem_strides=4,4", "--image-size", "1"];
    biformer(&["info", "--model", "stl", "--image-size", "3"]).refused(&["nothing is left of a side of 3 in stage 1"]);
    biformer(&late).refused(&["a side of 1 is 1 in stage 1, which n_win = 4 does not divide"]);
    biformer(&["info", "--model", "tiny", "--image-size", "200"]).refused(&["a side of 112 or 224 fits"]);
    biformer(&["info", "--model", "tiny", "--image-size", "384"])
        .refused(&["a side of 224 or 448 fits, or set n_win = 6 or 8, or set auto_pad = true"]);
    biformer(&["info", "--model", "tiny", "--image-size", "384", "--set", "n_win=8"]).ok();
    biformer(&["info", "--model", "tiny", "--image-size", "32"]).refused(&["a side of 112 fits"]);
    let windows = ["info", "--model", "tiny", "--set", "n_win=8,7,5,7"];
    biformer(&windows).refused(&["a side of 1120 fits"]);
    biformer(&["info", "--model", "micro", "--image-size", "7"]).refused(&["a side of 16 fits"]);
    biformer(&["bench", "--batch-size", "1000000"]).refused(&["--batch-size 1000000", "GB"]);
    biformer(&["bench", "--op", "bra", "--largest", "100000"]).refused(&["--largest 100000", "56 to 896"]);
    biformer(&["bench", "--model", "tiny", "--image-size", "600x500"])
        .refused(&["image of 600x500", "auto_pad = true"]);
    let swept = ["bench", "--op", "bra", "--plot", "/nowhere/curves.png"];
    biformer(&swept).refused(&["/nowhere/curves.png", "there is no folder /nowhere"]);
    let checked = biformer(&["gradcheck", "--report", "/nowhere/report.json"]);
    assert_eq!(checked.out, "", "before the work");
    checked.refused(&["/nowhere/report.json", "there is no folder /nowhere"]);
    biformer(&["info", "--set", "layer_scale=1e308"]).refused(&["layer_scale", "not in 0..=1000"]);
    biformer(&["bench", "--steps", "0"]).refused(&["--steps 0"]);
    biformer(&["bench", "--threads", "99999"]).refused(&["--threads 99999", "1024"]);
}

/// Names that would recolour a terminal, or say something else than they are.
#[cfg(unix)]
#[test]
fn names_that_would_act_on_a_terminal() {
    let folder = fresh("bad-escapes");
    let data = samples::image_folder(&folder.join("data"));
    let (escape, shown) = ("\x1b[31mrot\x1b[0m\n", "\\u001b[31mrot\\u001b[0m");
    for split in ["train", "val"] {
        fs::rename(data.join(split).join("dark"), data.join(split).join(escape)).unwrap();
    }
    let config = samples::config(&folder, "image_size = 32");
    let run = folder.join(format!("run{escape}"));
    let out = ["--out", text(&run), "--batch-size", "5", "--epochs", "1"];
    let said = biformer(&[&["train", "--config", text(&config), "--data", text(&data)][..], &out].concat()).ok();
    let picture = data.join("val").join(escape).join("0.png");
    let nowhere = format!("/nowhere{escape}");
    let mut stored = TensorFile::read(&run.join("checkpoint.safetensors")).unwrap();
    stored.tensors.insert(escape.into(), Tensor::full([1], 1f32));
    let other = folder.join("other.safetensors");
    stored.write(&other).unwrap();
    let runs: [&[&str]; 6] = [
        &["eval", "--checkpoint", text(&run)],
        &["predict", "--checkpoint", text(&run), text(&picture), &nowhere],
        &["eval", "--checkpoint", text(&other)],
        &["eval", "--checkpoint", text(&run), "--data", &nowhere],
        &["train", "--resume", "--out", &nowhere],
        &["train", "--model", escape],
    ];
    for said in runs.into_iter().map(biformer).chain([said]) {
        let all = said.out + &said.err;
        assert!(all.contains(shown) && !all.contains('\x1b'), "{all:?}");
    }
    let report = json(&biformer(&["eval", "--checkpoint", text(&run), "--json"]).ok().out);
    assert!(report["classes"].as_array().unwrap().iter().any(|class| class["name"] == escape), "{report}");
}

/// They would be four hundred times as slow as one for each core.
#[test]
fn many_more_threads_than_cores() {
    let run = text(&of_one_epoch().run);
    let said = biformer(&["eval", "--checkpoint", run, "--threads", "1024"]).ok();
    let most = 8 * std::thread::available_parallelism().map_or(1, usize::from);
    let note = if most < 1024 { format!("note: {most} threads instead of 1024") } else { String::new() };
    assert!(said.err.starts_with(&note) && said.err.lines().count() <= 1, "{said:?}");
    assert_eq!(said.out, biformer(&["eval", "--checkpoint", run]).ok().out);
}

/// With little address space the work is refused in a line, or done with what there is.
#[cfg(target_os = "linux")]
#[test]
fn little_memory_ends_no_run_by_force() {
    use crate::common::program::{Ran, command};
    use std::os::unix::process::CommandExt;
    let within = |megabytes: u64, arguments: &[&str]| {
        let mut program = command(arguments);
        let limit = libc::rlimit { rlim_cur: megabytes << 20, rlim_max: megabytes << 20 };
        // SAFETY: `setrlimit` may be called there, and only reads what it is given.
        unsafe { program.pre_exec(move || Ok(_ = libc::setrlimit(libc::RLIMIT_AS, &limit))) };
        Ran::from(program.output().unwrap())
    };
    let (mut refused, mut done) = (0, 0);
    for megabytes in [60, 80, 100, 150, 200, 400, 600, 800, 1000, 4000] {
        let ran = within(megabytes, &["bench", "--batch-size", "128", "--steps", "1", "--threads", "2"]);
        match ran.status {
            Some(0) => done += 1,
            _ => {
                ran.refused(&["memory", "smaller", "batch"]); // foreseen, or met on the way: the words differ
                refused += 1;
            }
        }
    }
    assert!(refused > 0 && done > 0, "{refused} refused, {done} done");
    // Of large batches made ahead one is trained on in small parts: it is the images that take the room.
    let folder = fresh("little-memory");
    let (config, run) = (samples::config(&folder, "micro_batches = 80\nimage_size = 512"), folder.join("run"));
    let train = ["train", "--config", text(&config), "--data", text(&of_one_epoch().data), "--out", text(&run)];
    within(500, &[&train[..], &["--batch-size", "160", "--threads", "2"]].concat()).refused(&[
        "memory",
        "are free",
        "a smaller batch_size",
    ]);
    assert!(!run.exists());
    // A picture that has no room is listed, but the file may be good.
    let pictures = folder.join("pictures");
    for (name, side) in [("a/large.png", 7000), ("a/1.png", 8), ("b/1.png", 8), ("b/2.png", 8)] {
        fs::create_dir_all(pictures.join(name).parent().unwrap()).unwrap();
        samples::picture(&pictures.join(name), side, side, [7, 8, 9]);
    }
    // Nor has one whose decoder needs more than the pixels: a WebP of 38 bytes, 13,000 pixels wide and high, and the
    // head of a TIFF.
    const BLANK: [u8; 38] =
        *b"RIFF\x1e\0\0\0WEBPVP8L\x11\0\0\0\x2f\xc7\xf2\xb1\x0c\x07\x50\x8f\x6a\x15\xb9\xff\x81\x88\xe8\x7f\0\0";
    fs::write(pictures.join("b/blank.webp"), BLANK).unwrap();
    // Its height is said 8,388,608 times.
    const HEAD: &[u8] = b"II*\0\x08\0\0\0\x03\0\0\x01\x03\0\x01\0\0\0\x11\0\0\0\
        \x01\x01\x03\0\0\0\x80\0\x08\0\0\0\x02\x01\x03\0\x01\0\0\0\x08\0\0\0\0\0\0\0";
    fs::write(pictures.join("b/head.tif"), HEAD).unwrap();
    for (megabytes, name, problem) in [
        (120, "large.png", "7000x7000 pixels take 147 MB of memory"),
        (120, "blank.webp", "13000x13000 pixels take 1.4 GB of memory"),
        (900, "blank.webp", "13000x13000 pixels take 1.4 GB of memory"),
        (120, "head.tif", "its head may take 402 MB of memory"),
    ] {
        let checked = within(megabytes, &["check", "--data", text(&pictures), "--threads", "2"]);
        assert_eq!(checked.status, Some(1), "{checked:?}");
        let said = checked.err.lines().find(|line| line.contains(&format!("{name}: {problem}, which are not free")));
        // Not "cannot decode", which another picture could make up for in a run.
        assert!(said.is_some_and(|line| line.contains("cannot read ")), "{checked:?}");
        assert!(!checked.err.contains("max_bad_images="), "{checked:?}");
    }
}
