//! Fields and options with values that make no sense: each is refused in a sentence.

use crate::common::program::{biformer, copy_folder, fresh, text};
use crate::common::samples::{self, Trained, train};
use biformer::config::{Changes, RunConfig};
use std::fs;
use std::path::Path;

/// Who has a dozen photographs should not have to know what a batch is.
#[test]
fn a_default_batch_gives_way_to_few_images_and_no_other() {
    let folder = fresh("few-images");
    let data = samples::image_folder(&folder.join("data"));
    let train = |name: &str, more: &[&str]| {
        let out = folder.join(name);
        let files = ["train", "--model", "micro", "--epochs", "1", "--data", text(&data), "--out", text(&out)];
        let ran = biformer(&[&files[..], more].concat());
        (ran, fs::read_to_string(out.join("config.toml")).unwrap_or_default())
    };
    let (ran, config) = train("usual", &[]);
    let said = ran.ok().err;
    assert!(
        said.contains("note: batches of 5, as there are 20 training images") && config.contains("batch_size = 5\n")
    );
    // A batch has at least 4 images, or all where there are fewer.
    for (images, size) in [(12, 4), (6, 4), (2, 2)] {
        let few = folder.join(format!("few-{images}"));
        copy_folder(&data, &few);
        let numbers = images / 2..10;
        numbers
            .flat_map(|number| ["dark", "light"].map(|class| few.join(format!("train/{class}/{number}.png"))))
            .for_each(|picture| fs::remove_file(picture).unwrap());
        let out = text(&few).to_owned() + "-run";
        let said =
            biformer(&["train", "--model", "micro", "--epochs", "1", "--data", text(&few), "--out", &out]).ok().err;
        assert!(said.contains(&format!("note: batches of {size}, as there are {images} training images")), "{said}");
    }
    let (_, config) = train("in-parts", &["--set", "micro_batches=2"]);
    assert!(config.contains("batch_size = 4\n"), "a multiple of the parts: {config}");
    // What the smaller batch makes of the model is looked at again.
    let single = ["--image-size", "16", "--set", "micro_batches=4", "stem_strides=4,4", "n_win=1", "topks=1,1,1,-2"];
    let said = train("single", &single).0;
    assert!(said.status == Some(2) && said.err.contains("error: one image at a time"), "{said:?}");
    assert!(!folder.join("single").exists());
    train("asked", &["--batch-size", "64"]).0.refused(&["batch_size = 64", "use --batch-size 20 or less"]);
}

#[test]
fn values_that_make_no_sense() {
    let folder = fresh("bad-values");
    let trained = samples::of_one_epoch();
    let data = &trained.data;
    let nowhere = samples::config(&folder, "out = \"\"");
    biformer(&["train", "--config", text(&nowhere), "--data", text(data)])
        .refused(&["config-asked.toml", "out is empty, expected a folder"]);
    let cases: [(&str, &[&str]); 30] = [
        ("seed = \"one\"", &["config-asked.toml", "seed", "expected"]),
        ("threads = 4000", &["threads = 4000", "1024", "0 for one per core"]),
        ("image_size = 34", &["an image of 34x34 does not fit", "a side of 32 or 40 fits", "auto_pad = true"]),
        ("image_size = 0", &["image of 0x0 does not fit"]),
        ("image_size = 8192", &["setting `image_size`: 8192 is not in 1..=4096"]),
        ("micro_batches = 3", &["micro_batches = 3 does not divide batch_size = 16"]),
        ("label_smoothing = 1.0", &["label_smoothing = 1", "less than 1"]),
        ("clip_norm = nan", &["clip_norm = NaN", "0 for no clipping"]),
        ("backbone_lr = 0.0", &["backbone_lr = 0", "a share above 0", "freeze"]),
        ("backbone_lr = 1.5", &["backbone_lr = 1.5", "up to 1"]),
        ("backbone_lr = nan", &["backbone_lr = NaN"]),
        ("layer_decay = 0.0", &["layer_decay = 0", "a share above 0"]),
        ("seed = -1", &["seed", "-1"]),
        ("seed = ", &["config-asked.toml: line 1"]),
        (r#"data = "C:\Users\me""#, &["line 1", "write paths with /, or between single quotes"]),
        ("optimizer = 3", &["optimizer: expected a table, got 3"]),
        ("optimizer.eps = 1e300", &["optimizer: eps is 1e300", "finite and positive, also in f32"]),
        ("optimizer.weight_decay = 1e-310", &["optimizer.weight_decay = 1e-310", "computes as 0"]),
        (r#""optimizer.eps" = 1.0"#, &["no configuration key \"optimizer.eps\"", "write it without quotes"]),
        ("clip_norm = 1e-44", &["clip_norm = 1e-44", "computes as 0", "or 0 where that is allowed"]),
        ("backbone_lr = 1e-37", &["the first layer's learning rate is ", "computes as 0", "freeze"]),
        ("optimizer.betas = [0.9, 1.0]", &["optimizer: betas[1] is 1.0", "[0, 1)"]),
        ("augmentation.flip = 2.0", &["augmentation", "flip", "probability"]),
        ("augmentation.erase = nan", &["augmentation", "erase", "NaN is not a probability"]),
        ("augmentation.mixup = inf", &["augmentation", "mixup", "inf is neither 0, for none, nor in 0.01..=100"]),
        ("augmentation.rand_augment = 99", &["augmentation", "rand_augment", "99 is not in 0..=16"]),
        ("augmentation.balance = 1.5", &["augmentation", "balance", "1.5 is not in 0..=1"]),
        ("augmentation.repeats = 0", &["augmentation", "repeats", "0 is not in 1..=1000"]),
        ("augmentation.crop = \"round\"", &["augmentation.crop", "padded"]),
        ("model = 3", &["model: expected a text in quotes, got 3"]),
    ];
    for (fields, parts) in cases {
        train(&folder, fields, data, &[]).refused(parts);
    }
    let flags: [(&[&str], &[&str]); 15] = [
        (
            &["--batch-size", "1", "--image-size", "16", "--set", "stem_strides=4,4", "n_win=1", "topks=1,-2"],
            &["a single token", "two images or more"],
        ),
        (&["--epochs", "0"], &["epochs = 0, expected 1 to"]),
        (&["--set", "features=dense"], &["architecture.features: only \"logits\" can be trained"]),
        (&["--epochs", "1", "--set", "schedule.warmup_epochs=30"], &["expected from 0 to epochs = 1"]),
        (&["--set", "schedule.rule=timm"], &["schedule.warmup_epochs = 0.5", "whole epochs"]),
        (&["--epochs", "4", "--set", "epochs=3"], &["--set epochs: --epochs gives it as well"]),
        (&["--lr", "1e-3", "--set", "schedule.peak=2e-3"], &["--set schedule.peak: --lr gives it as well"]),
        (&["--set", "epochs=3", "depth=2", "epochs =4"], &["--set epochs: it is given twice"]),
        (&["--lr", "-1"], &["schedule.peak = -1", "above 0"]),
        (&["--lr", "inf"], &["schedule.peak = inf"]),
        (&["--lr", "1e-42"], &["schedule.peak = 1e-42", "above 0, also in f32"]),
        (&["--lr", "1e39"], &["schedule.peak = 1e39", "above 0"]),
        (&["--batch-size", "0"], &["batch_size = 0"]),
        (&["--batch-size", "161"], &["batch_size = 161", "160 training images", "--batch-size 160 or less"]),
        (
            &["--batch-size", "200", "--set", "micro_batches=100", "augmentation.mixup=1"],
            &["use micro_batches = 1 and --batch-size 160 or less"],
        ),
    ];
    for (flags, parts) in flags {
        train(&folder, "", data, flags).refused(parts);
    }
    assert!(!folder.join("run").exists());
    let config = samples::config(&folder, "");
    let asked = fs::read_to_string(&config).unwrap().replace("[schedule]", "[schedule]\nstart = 1e-5");
    fs::write(&config, asked).unwrap();
    let parts = ["schedule.start = 1e-5", "schedule.peak = 1e-30", "--set schedule.start=N"];
    biformer(&["train", "--config", text(&config), "--lr", "1e-30"]).refused(&parts);
    let run = text(&trained.run);
    biformer(&["train", "--resume", "--out", run, "--lr", "1e-30"]).refused(&["schedule.peak = 1e-30"]);
    // A run whose learning rate was to rise for longer than it is now to last.
    let mut config = RunConfig::for_model("nano").unwrap();
    config.schedule.warmup_epochs = 5.0;
    let epochs = |epochs: i64| {
        let changes = Changes::gather(None, [("epochs".to_owned(), epochs.into())].into_iter().collect()).unwrap();
        config.resumed(&changes).map(|changed| changed.epochs)
    };
    assert_eq!(epochs(5).unwrap(), 5);
    assert_eq!(
        epochs(4).unwrap_err().to_string(),
        "epochs = 4: this run's learning rate rises for 5; ask for no fewer"
    );
    biformer(&["eval", "--checkpoint", run, "--batch-size", "0"]).refused(&["--batch-size 0: expected 1 to"]);
    for (flag, value) in
        [("seed", "18446744073709551615"), ("seed", "x"), ("epochs", "1844674407370955161"), ("epochs", "-1")]
    {
        let said = biformer(&["train", &format!("--{flag}"), value]);
        assert_eq!(said.status, Some(2));
        let expected = format!("'{value}' for '--{flag} <N>': expected a whole number from 0 to ");
        assert!(said.err.contains(&expected), "{}", said.err);
    }
    // Not taken for a change.
    let said = biformer(&["predict", "--checkpoint", run, "--set", "n_win=2", "a.png"]);
    assert_eq!(said.status, Some(2));
    assert!(said.err.contains("'a.png' for '--set") && said.err.contains("put it before --set"), "{}", said.err);
}

/// What is said of a value is for those who write configurations, and a name that is looked for in the wrong place is
/// shown to the right one.
#[test]
fn words_and_names() {
    for (arguments, expected) in [
        ("train --set epochs=-1", "got `-1`, expected a whole number (0 or more) in `epochs`"),
        ("train --set seed=9223372036854775808", "whole numbers go up to 9223372036854775807"),
        ("train --set label_smoothing=much", "got \"much\", expected a number in `label_smoothing`"),
        ("train --set ema.enabled=1", "got `1`, expected true or false in `ema.enabled`"),
        ("train --set optimizer.betas=0.9", "got a list of length 1, expected a list of length 2 in `optimizer.betas`"),
        ("train --set schedule.rule=round", "there is no `round`, expected `cosine` or `timm` in `schedule.rule`"),
        ("info --set depth=1,x", "--set depth=1,x: got \"x\", expected a whole number (0 or more)"),
        ("info --set clip_norm=3", "--set clip_norm: a field of training runs, not of a model; train alone takes it"),
        ("info --set image_size=64", "--image-size is an option of eval, predict, gradcheck, info, bench"),
        ("info --set preprocessing.eval_crop=1", "train, eval and predict take it"),
        ("info --set eval_crop=1", "train, eval and predict take it, as preprocessing.eval_crop=.."),
        ("info --set lr=1", "train alone takes it, as schedule.peak=.."),
        ("bench --precision tf32", "--precision tf32 needs a GPU"),
        ("bench --steps few", "expected a whole number from 0 to 4294967295"),
        ("shrink --data a --output b --side 0", "expected a whole number from 1 to 4096"),
        ("train --lr high", "expected a number"),
        ("train --set n_win=2 n_wins=1", "--set n_win: it is given twice"),
        ("train --set n_win=2 architecture.n_win=1", "--set n_win: it is given twice"),
        ("info --set depth=1 depth=2", "--set depth: it is given twice"),
        ("info --set architecture.depth=1,x", "--set depth=1,x: got \"x\", expected a whole number (0 or more)"),
        ("train --set architecture.seed=1", "--set seed: a field of training runs, not of a model"),
        ("train --set schedule.lr=1", "did you mean \"schedule.peak\"?"),
    ] {
        let said = biformer(&arguments.split(' ').collect::<Vec<_>>());
        assert_eq!(said.status, Some(2), "{arguments}: {said:?}");
        assert!(said.err.contains(expected), "{arguments}: {said:?}");
    }
    let folder = fresh("bad-values-names");
    for (file, meant) in [
        ("lr = 0.1", "schedule.peak"),
        ("peak = 0.1", "schedule.peak"),
        ("[schedule]\nlr = 0.1", "schedule.peak"),
        ("[ema]\nbetas = [0, 0]", "optimizer.betas"),
        ("depth = [2]", "architecture.depth"),
        ("epoch = 2", "epochs"),
    ] {
        let path = folder.join("config.toml");
        fs::write(&path, file).unwrap();
        biformer(&["train", "--config", text(&path)]).refused(&[&format!("did you mean \"{meant}\"?")]);
    }
}

/// As of files that somebody else has named, by `*`.
#[test]
fn what_a_terminal_would_obey_is_not_printed() {
    let escape = "--x\x1b]0;taken over\x07.png";
    for arguments in [&["predict", "--checkpoint", "run", escape][..], &[escape], &["bench", "--steps", &escape[2..]]] {
        let said = biformer(arguments);
        assert!(said.status == Some(2) && said.err.contains("\\u001b]0;taken over\\u0007"), "{said:?}");
        assert!(!said.err.contains(['\x1b', '\x07']), "{said:?}");
    }
    // Nor is a name two lines of a result.
    let output = fresh("bad-newline").join("a\nb.safetensors");
    if cfg!(unix) {
        let run = text(&samples::of_one_epoch().run);
        let said = biformer(&["export", "--checkpoint", run, "--output", text(&output)]).ok();
        assert!(said.out.contains("a\\u000ab.safetensors: ") && said.out.lines().count() == 1, "{said:?}");
    }
}

/// What would be understood, and do something else than it says.
#[test]
fn configurations_that_would_be_misunderstood() {
    let folder = fresh("bad-misunderstood");
    let Trained { run, data, .. } = samples::of_one_epoch();
    let out = folder.join("run");
    let train = |more: &[&str]| biformer(&[&["train", "--data", text(data), "--out", text(&out)], more].concat());
    let of_run = run.join("config.toml");
    train(&["--config", text(&of_run), "--model", "tiny"]).refused(&[
        "--model tiny",
        "describes nano",
        "[architecture]",
    ]);
    let no_table = folder.join("ema.toml");
    fs::write(&no_table, "ema = true\n").unwrap();
    train(&["--config", text(&no_table), "--set", "ema.decay=0.9"]).refused(&["ema: expected a table, got true"]);
    fs::write(&no_table, "epochs = 1\nseed =\n").unwrap();
    train(&["--config", text(&no_table)]).refused(&["line 2 (seed =)"]);
    fs::write(&no_table, "[architecture]\nnum_classes = 10\nnonsense = 1\n").unwrap();
    train(&["--config", text(&no_table), "--model", "tiny"]).refused(&["architecture.nonsense"]);
    for alone in ["batch_size=1", "micro_batches=64"] {
        train(&["--set", "augmentation.mixup=0.8", alone])
            .refused(&["augmentation.mixup or cutmix", "two images or more"]);
    }
    train(&["--set", "num_classes=18446744073709551615"]).refused(&["num_classes=18446744073709551615: too large"]);
    assert!(!out.exists());
    let home = format!("~/{}", std::process::id());
    biformer(&["train", "--data", text(data), "--out", &home]).refused(&["only a shell knows what ~ is"]);
    assert!(!Path::new("~").exists());
}
