//! What becomes of a run's folder while the run is on its way, or between two parts of it: it is moved, another run asks
//! for it, its files are edited.

use crate::common::program::{biformer, contents, fresh, place, text};
use crate::common::samples::{self, Trained};
use biformer::config::Changes;
use biformer::trainer::Trainer;
use biformer::trainer::checkpoint::Checkpoint;
use biformer::trainer::folder::RunFolder;
use biformer::trainer::logs::metrics_in;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

/// A copy of a finished run.
fn copied_run(name: &str) -> PathBuf {
    static TRAINED: OnceLock<Trained> = OnceLock::new();
    let folder = fresh(name);
    for (file, bytes) in contents(&TRAINED.get_or_init(|| samples::trained("run-folder")).run) {
        fs::write(folder.join(file), bytes).unwrap();
    }
    folder
}

/// Whoever moves a run's folder away may begin another run in its place.
#[cfg(unix)]
#[test]
fn a_run_whose_folder_was_moved_writes_to_no_other() {
    let folder = fresh("moved-folder");
    let (data, config) = (samples::cifar10(&folder.join("data")), samples::config(&folder, ""));
    let (data, config) = (&data, &config);
    let (run, elsewhere) = (folder.join("run"), folder.join("elsewhere"));
    let flags = [("data", text(data)), ("out", text(&run))].map(|(key, value)| (key.to_owned(), value.into()));
    let changes = Changes::gather(Some(config), flags.into_iter().collect()).unwrap();
    let mut trainer = Trainer::from_changes(&changes).unwrap();
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
    let flags = [("data", text(&data)), ("out", text(&run))].map(|(key, value)| (key.to_owned(), value.into()));
    let mut trainer =
        Trainer::from_changes(&Changes::gather(Some(&config), flags.into_iter().collect()).unwrap()).unwrap();
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
}

#[test]
fn logs_that_were_edited_keep_no_run_from_going_on() {
    let run = copied_run("edited-logs");
    let resume = |more: &[&str]| biformer(&[&["train", "--resume", "--out", text(&run)], more].concat());
    // Later epochs' lines are written again, wherever they stand.
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let later = metrics.replace("\"epoch\":1", "\"epoch\":2");
    fs::write(run.join("metrics.jsonl"), format!("{later}{metrics}")).unwrap();
    resume(&["--epochs", "2"]).ok();
    let kept = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert!(kept.starts_with(&metrics) && kept.lines().count() == 2 && !kept.contains(&later), "{kept}");
    // What else is in the files stays, and keeps no run from going on.
    let strange = [kept.as_bytes(), b"\xff\n{half"].concat();
    fs::write(run.join("metrics.jsonl"), &strange).unwrap();
    for name in ["timings.jsonl", "config.toml"] {
        fs::write(run.join(name), b"\n\xff").unwrap();
    }
    let said = resume(&["--epochs", "3"]).ok().err;
    for said_of in [
        "metrics.jsonl line 3 is not an epoch's, and ignored, and so is 1 other\n",
        "timings.jsonl line 2 is not",
        "config.toml differs from",
    ] {
        assert!(said.contains(said_of), "{said_of}: {said}");
    }
    let after = fs::read(run.join("metrics.jsonl")).unwrap();
    assert!(after.starts_with(&[&strange[..], b"\n{\"epoch\":3,"].concat()), "{}", after.escape_ascii());
    assert_eq!(metrics_in(&run).unwrap().iter().map(|line| line.epoch).collect::<Vec<_>>(), [1, 2, 3]);
    // A missing line of an epoch is put in its place among them.
    fs::write(run.join("metrics.jsonl"), format!("{metrics}# mine\n")).unwrap();
    let said = resume(&["--epochs", "3"]).ok().err;
    assert!(said.contains("metrics.jsonl line 2 is not an epoch's, and ignored\n"), "{said}");
    let after = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert!(after.starts_with(&format!("{metrics}# mine\n{{\"epoch\":")) && after.contains("\"epoch\":3,"), "{after}");
}

/// A run whose metrics are removed while it is on its way still knows which epoch was the best.
#[test]
fn the_best_epoch_is_known_without_its_line() {
    let run = copied_run("best-line");
    let facts = Checkpoint::read(&run.join("checkpoint.safetensors")).unwrap().described.data;
    let folder = RunFolder::open(&run).unwrap();
    let before = folder.last_and_best(&facts).unwrap();
    assert_eq!(before.map(|both| both.map(|epoch| epoch.epoch)), Some([1, 1]));
    fs::remove_file(run.join("metrics.jsonl")).unwrap();
    assert_eq!(folder.last_and_best(&facts).unwrap(), before);
}

/// Metrics that cannot be written cost nothing else.
#[test]
fn a_checkpoint_is_written_even_if_the_metrics_cannot_be() {
    let folder = fresh("no-metrics");
    let (data, config, run) =
        (samples::cifar10(&folder.join("data")), samples::config(&folder, ""), folder.join("run"));
    let flags = [("data", text(&data)), ("out", text(&run))].map(|(key, value)| (key.to_owned(), value.into()));
    let mut trainer =
        Trainer::from_changes(&Changes::gather(Some(&config), flags.into_iter().collect()).unwrap()).unwrap();
    let in_the_way = run.join("metrics.jsonl");
    fs::create_dir(&in_the_way).unwrap();
    let error = format!("{:#}", trainer.run(&AtomicBool::new(false)).unwrap_err());
    assert!(error.contains("metrics.jsonl"), "{error}");
    drop(trainer);
    fs::remove_dir(&in_the_way).unwrap();
    assert_eq!(place(&run), Some((1, 0)));
    biformer(&["train", "--resume", "--out", text(&run)]).ok();
    assert_eq!(metrics_in(&run).unwrap()[0].epoch, 1);
}
