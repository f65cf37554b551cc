//! A run whose folder is moved while it trains.
#![cfg(unix)]

mod common;

use biformer::config::Changes;
use biformer::trainer::Trainer;
use common::program::{biformer, contents, fresh, text};
use common::samples;
use std::fs;
use std::sync::atomic::AtomicBool;

/// Whoever moves a run's folder away may begin another run in its place.
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
