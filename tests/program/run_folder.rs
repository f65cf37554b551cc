//! What becomes of a run's folder while the run is on its way, or between two parts of it: it is moved, another run
//! asks for it, its files are edited.

use crate::common::program::{biformer, contents, epochs, fresh, place, text};
use crate::common::samples::{self, copied_run};
use biformer::trainer::metrics::EpochMetrics;
use std::fs;
use std::sync::atomic::AtomicBool;

/// Whoever moves a run's folder away may begin another run in its place.
#[cfg(unix)]
#[test]
fn a_run_whose_folder_was_moved_writes_to_no_other() {
    let folder = fresh("moved-folder");
    let (data, config) = (samples::cifar10(&folder.join("data")), samples::config(&folder, ""));
    let (data, config) = (&data, &config);
    let (run, elsewhere) = (folder.join("run"), folder.join("elsewhere"));
    let mut trainer = samples::trainer(config, data, &run);
    fs::rename(&run, &elsewhere).unwrap();
    let other = ["train", "--config", text(config), "--data", text(data), "--out", text(&run), "--seed", "2"];
    biformer(&other).ok();
    let before = contents(&run);
    let error = trainer.run(&AtomicBool::new(false)).unwrap_err().to_string();
    assert!(error.contains("moved or removed") && error.contains("--resume --out FOLDER"), "{error}");
    assert!(before == contents(&run), "nothing is harmed");
    drop(trainer);
    biformer(&["train", "--resume", "--out", text(&elsewhere)]).ok();
}

/// Without the lock that it holds, another process could lock the folder, too.
#[cfg(unix)]
#[test]
fn a_run_whose_lock_was_removed_writes_no_more() {
    let folder = fresh("no-lock");
    let (data, config) = (samples::cifar10(&folder.join("data")), samples::config(&folder, ""));
    let run = folder.join("run");
    let mut trainer = samples::trainer(&config, &data, &run);
    fs::remove_file(run.join(".lock")).unwrap();
    biformer(&["train", "--resume", "--out", text(&run)]).ok();
    let before = contents(&run);
    let error = trainer.run(&AtomicBool::new(false)).unwrap_err().to_string();
    assert!(error.contains("the lock in it"), "{error}");
    assert!(before == contents(&run), "nothing is harmed");
}

#[test]
fn a_run_folder_has_one_run_at_a_time() {
    let run = copied_run("one-run");
    let resume = |more: &[&str]| biformer(&[&["train", "--resume", "--out", text(&run)], more].concat());
    let lock = fs::File::create(run.join(".lock")).unwrap();
    lock.lock().unwrap();
    let before = contents(&run);
    resume(&["--epochs", "2"]).refused(&["one-run: a run is on its way in it"]);
    let train = || biformer(&["train", "--out", text(&run)]);
    train().refused(&["one-run: a run is on its way in it"]);
    assert!(before == contents(&run), "nothing is harmed");
    for file in before.keys().filter(|file| *file != ".lock") {
        fs::remove_file(run.join(file)).unwrap();
    }
    train().refused(&["one-run: a run is on its way in it"]);
    // Not by closing it: what another test is just starting may have it open, too.
    lock.unlock().unwrap();
    for (file, bytes) in before {
        fs::write(run.join(file), bytes).unwrap();
    }
    resume(&["--epochs", "2"]).ok();
}

#[test]
fn logs_that_were_edited_keep_no_run_from_going_on() {
    let run = copied_run("edited-logs");
    let resume = |more: &[&str]| biformer(&[&["train", "--resume", "--out", text(&run)], more].concat());
    // The metrics are the checkpoint's, whatever has become of their file.
    let metrics = || {
        let lines = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<EpochMetrics>>()
    };
    let before = metrics();
    fs::write(run.join("metrics.jsonl"), b"\xff\n{half").unwrap();
    resume(&["--epochs", "2"]).ok();
    let after = metrics();
    assert_eq!((after.len(), after[0]), (2, before[0]));
    assert_eq!(after, epochs(&run.join("checkpoint.safetensors")));
    fs::remove_file(run.join("metrics.jsonl")).unwrap();
    resume(&["--epochs", "2"]).ok();
    assert_eq!(metrics(), after);
    // Timings of later epochs are written again, wherever they stand; what else is in their file stays.
    let timings = fs::read_to_string(run.join("timings.jsonl")).unwrap();
    let later = timings.lines().next().unwrap().replace("\"epoch\":1", "\"epoch\":3");
    let strange = b"\n\xff\n{half";
    fs::write(run.join("timings.jsonl"), [format!("{later}\n{timings}").as_bytes(), strange].concat()).unwrap();
    fs::write(run.join("config.toml"), b"\n\xff").unwrap();
    let said = resume(&["--epochs", "3"]).ok().err;
    assert!(said.contains("config.toml differs from"), "{said}");
    let after = fs::read(run.join("timings.jsonl")).unwrap();
    let kept = [timings.as_bytes(), strange, b"\n{\"epoch\":3,"].concat();
    assert!(after.starts_with(&kept) && !after.starts_with(later.as_bytes()), "{}", after.escape_ascii());
    // Longer than any that a run writes.
    for name in ["timings.jsonl", "config.toml"] {
        fs::File::options().write(true).open(run.join(name)).unwrap().set_len((256 << 20) + 1).unwrap();
    }
    let said = resume(&["--epochs", "4"]).ok().err;
    assert!(said.contains("timings.jsonl cannot be read, and is now "), "{said}");
    assert!(said.contains("config.toml cannot be read, and is rewritten"), "{said}");
    assert!(run.join("timings.unread").exists());
    assert_eq!(fs::read_to_string(run.join("timings.jsonl")).unwrap().lines().count(), 1);
}

/// Metrics that cannot be written cost nothing else.
#[test]
fn a_checkpoint_is_written_even_if_the_metrics_cannot_be() {
    let folder = fresh("no-metrics");
    let (data, config, run) =
        (samples::cifar10(&folder.join("data")), samples::config(&folder, ""), folder.join("run"));
    let mut trainer = samples::trainer(&config, &data, &run);
    let in_the_way = run.join("metrics.jsonl");
    fs::create_dir(&in_the_way).unwrap();
    let error = format!("{:#}", trainer.run(&AtomicBool::new(false)).unwrap_err());
    assert!(error.contains("metrics.jsonl"), "{error}");
    drop(trainer);
    fs::remove_dir(&in_the_way).unwrap();
    assert_eq!(place(&run), Some((1, 0)));
    biformer(&["train", "--resume", "--out", text(&run)]).ok();
    assert!(fs::read_to_string(&in_the_way).unwrap().starts_with("{\"epoch\":1,"));
}

#[test]
fn a_file_is_no_run_folder() {
    let file = fresh("file-as-run-folder").join("a-file");
    fs::write(&file, "precious").unwrap();
    for out in [&file, &file.join("below")] {
        let train = ["train", "--out", text(out)];
        for resume in [&[][..], &["--resume=auto"]] {
            biformer(&[&train[..], resume].concat()).refused(&["run folder", text(out), "a-file is no folder"]);
        }
    }
}
