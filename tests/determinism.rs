//! The same seed gives the same bits: twice, with any number of threads, and however often a run is stopped.

mod common;

use biformer::config::Changes;
use biformer::model::TensorFile;
use biformer::trainer::checkpoint::Checkpoint;
use biformer::trainer::folder::metrics_in;
use biformer::trainer::metrics::EpochMetrics;
use biformer::trainer::{Outcome, Trainer};
use common::program::{Ran, assert_same_run, biformer, command, contents, fresh, place, text};
use common::samples;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tensor::cpu::isa::Isa;

/// Steps of an epoch of the small data in batches of 16.
const STEPS: u64 = samples::TRAIN as u64 / 16;

struct Shared {
    folder: PathBuf,
    data: PathBuf,
    config: PathBuf,
    /// A run that nothing disturbed.
    whole: PathBuf,
    /// How long that took.
    took: Duration,
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let folder = fresh("determinism");
        let data = samples::cifar10(&folder.join("data"));
        let config = samples::config(
            &folder,
            "checkpoint_every = 1\nlabel_smoothing = 0.0\naugmentation = { mixup = 0.8, cutmix = 1.0, repeats = 2 }",
        );
        let whole = folder.join("whole");
        let mut shared = Shared { folder, data, config, whole, took: Duration::ZERO };
        let started = Instant::now();
        biformer(&shared.train("whole", &["--threads", "1"])).ok();
        shared.took = started.elapsed();
        shared
    })
}

impl Shared {
    fn train<'a>(&'a self, run: &str, more: &[&'a str]) -> Vec<&'a str> {
        let out: &'a str = Box::leak(text(&self.folder.join(run)).to_owned().into_boxed_str());
        let arguments = ["train", "--config", text(&self.config), "--data", text(&self.data), "--out", out];
        [&arguments, more].concat()
    }

    fn run(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

#[test]
fn the_same_seed_gives_the_same_bits_with_any_number_of_threads() {
    let shared = shared();
    for threads in ["1", "2", "3"] {
        let name = format!("threads-{threads}");
        biformer(&shared.train(&name, &["--threads", threads])).ok();
        assert_same_run(&name, &shared.whole, &shared.run(&name));
    }
    biformer(&shared.train("other-seed", &["--seed", "2"])).ok();
    let metrics = |run: &Path| std::fs::read(run.join("metrics.jsonl")).unwrap();
    assert_ne!(metrics(&shared.whole), metrics(&shared.run("other-seed")), "the seed decides");
}

#[test]
fn bf16_gives_the_same_bits_with_any_number_of_threads() {
    let shared = shared();
    for (name, threads) in [("bf16-1", "1"), ("bf16-3", "3")] {
        biformer(&shared.train(name, &["--precision", "bf16", "--threads", threads])).ok();
    }
    assert_same_run("bf16", &shared.run("bf16-1"), &shared.run("bf16-3"));
    let metrics = |run: &Path| std::fs::read(run.join("metrics.jsonl")).unwrap();
    assert_ne!(metrics(&shared.whole), metrics(&shared.run("bf16-1")), "products are rounded");
}

#[test]
fn what_is_computed_again_changes_nothing() {
    let shared = shared();
    biformer(&shared.train("cheap", &["--recompute", "cheap"])).ok();
    assert_same_run("cheap", &shared.whole, &shared.run("cheap"));
    // Another choice is fine for the rest of a run.
    biformer(&shared.train("block", &["--recompute", "block", "--epochs", "1"])).ok();
    biformer(&shared.train("block", &["--resume", "--recompute", "none"])).ok();
    let gone_on = shared.run("block");
    biformer(&shared.train("plain", &["--epochs", "1"])).ok();
    biformer(&shared.train("plain", &["--resume"])).ok();
    assert_same_run("block", &shared.run("plain"), &gone_on);
}

/// Stopped after every single step of an epoch, between its last step and the test, and then left alone.
#[test]
fn a_run_that_is_stopped_at_every_step_goes_on_to_the_bit() {
    let shared = shared();
    let run = shared.run("steps");
    let flags = [("data", text(&shared.data).into()), ("out", text(&run).into()), ("threads", toml::Value::Integer(2))];
    let flags = flags.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let changes = Changes::gather(Some(&shared.config), flags).unwrap();
    let mut trainer = Trainer::new(biformer::config::RunConfig::changed(&changes).unwrap()).unwrap();
    for step in 1..=STEPS + 1 {
        let outcome = trainer.run(&AtomicBool::new(true)).unwrap();
        assert_eq!(outcome, Outcome::Interrupted);
        // With no step left of the epoch, and its test not to be begun, nothing moves.
        assert_eq!(place(&run), Some((0, step.min(STEPS))));
        drop(trainer);
        trainer = Trainer::resume(&run, &changes).unwrap();
    }
    let outcome = trainer.run(&AtomicBool::new(false)).unwrap();
    assert_eq!(outcome, Outcome::Finished);
    assert_same_run("stopped at every step", &shared.whole, &run);
}

/// A batch in parts is not given up because of a request that was there before it began.
#[test]
fn one_step_is_all_parts_of_a_batch() {
    let shared = shared();
    let run = shared.run("parts");
    let flags = [("data", text(&shared.data).into()), ("out", text(&run).into()), ("micro_batches", 2.into())];
    let flags = flags.into_iter().map(|(key, value): (_, toml::Value)| (key.to_owned(), value)).collect();
    let changes = Changes::gather(Some(&shared.config), flags).unwrap();
    let mut trainer = Trainer::from_changes(&changes).unwrap();
    assert_eq!(trainer.run(&AtomicBool::new(true)).unwrap(), Outcome::Interrupted);
    assert_eq!(place(&run), Some((0, 1)));
}

/// Also where the run was killed before it was kept, and is only asked whether it is done.
#[test]
fn the_best_epoch_is_kept() {
    let shared = shared();
    let run = shared.run("best");
    biformer(&shared.train("best", &[])).ok();
    let epochs: Vec<EpochMetrics> = std::fs::read_to_string(run.join("metrics.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let most = epochs.iter().map(|epoch| epoch.test_accuracy).fold(0.0, f64::max);
    let equals = epochs.iter().filter(|epoch| epoch.test_accuracy == most);
    let best = equals.min_by(|a, b| a.test_loss.total_cmp(&b.test_loss)).unwrap();
    let path = run.join("best.safetensors");
    assert_eq!(Checkpoint::read(&path).unwrap().progress.epoch, best.epoch);
    let evaluated = biformer(&["eval", "--json", "--checkpoint", text(&path)]).ok().out;
    let report: serde_json::Value = serde_json::from_str(&evaluated).unwrap();
    assert_eq!(report["top1"].as_f64(), Some(best.test_accuracy));

    // Lines that are lost are found again in the checkpoints, as far as they have them.
    let forgetful = shared.run("best-forgotten");
    std::fs::create_dir_all(&forgetful).unwrap();
    for file in ["checkpoint.safetensors", "best.safetensors"] {
        std::fs::copy(run.join(file), forgetful.join(file)).unwrap();
    }
    let resume = |epochs| biformer(&["train", "--resume", "--out", text(&forgetful), "--epochs", epochs]).ok();
    resume("3");
    let known = epochs.iter().filter(|epoch| [best.epoch, 3].contains(&epoch.epoch)).copied();
    assert_eq!(metrics_in(&forgetful).unwrap(), known.collect::<Vec<_>>());
    // Whether later epochs are better than one without metrics, as checkpoints were once written, cannot be said.
    let mut older = TensorFile::read(&path).unwrap();
    let mut progress: serde_json::Value = serde_json::from_str(&older.metadata["progress"]).unwrap();
    progress.as_object_mut().unwrap().remove("last").unwrap();
    progress["epoch"] = 1.into();
    older.metadata.insert("progress".into(), progress.to_string());
    older.write(&forgetful.join("best.safetensors")).unwrap();
    std::fs::remove_file(forgetful.join("metrics.jsonl")).unwrap();
    let kept = std::fs::read(forgetful.join("best.safetensors")).unwrap();
    let resumed = resume("5");
    for said in ["metrics.jsonl has no line of epochs 1, 2", "metrics.jsonl has no line to compare with"] {
        assert!(resumed.err.contains(said), "{said}: {}", resumed.err);
    }
    assert!(resumed.out.contains("checkpoint.safetensors, best.safetensors, curves.png, routing.png\n"), "{resumed:?}");
    assert!(kept == std::fs::read(forgetful.join("best.safetensors")).unwrap());

    // Where it is gone, and would have been better than all that comes, it is spoken of once.
    std::fs::remove_file(&path).unwrap();
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let first = serde_json::to_string(&EpochMetrics { test_accuracy: 1.0, ..epochs[0] }).unwrap();
    let rest = metrics.split_once('\n').unwrap().1;
    std::fs::write(run.join("metrics.jsonl"), format!("{first}\n{rest}")).unwrap();
    let said = biformer(&["train", "--resume", "--out", text(&run), "--epochs", "4"]).ok();
    let lost = "best.safetensors is not there, or not that of epoch 1, the best so far";
    assert!(said.err.contains(lost) && !said.out.contains("best.safetensors") && !path.exists(), "{said:?}");

    // One epoch is the best of one.
    let first = shared.run("best-of-one");
    biformer(&shared.train("best-of-one", &["--epochs", "1"])).ok();
    let kept = std::fs::read(first.join("best.safetensors")).unwrap();
    assert!(kept == std::fs::read(first.join("checkpoint.safetensors")).unwrap());
    std::fs::remove_file(first.join("best.safetensors")).unwrap();
    biformer(&["train", "--resume", "--out", text(&first)]).ok();
    assert!(kept == std::fs::read(first.join("best.safetensors")).unwrap());

    // Where the last epoch's line is gone, the last that is left may be the best; the checkpoint is not that epoch's.
    let cut = shared.run("best-cut");
    std::fs::create_dir_all(&cut).unwrap();
    std::fs::copy(run.join("checkpoint.safetensors"), cut.join("checkpoint.safetensors")).unwrap();
    for file in ["best.safetensors", "metrics.jsonl"] {
        std::fs::copy(first.join(file), cut.join(file)).unwrap();
    }
    biformer(&["train", "--resume", "--out", text(&cut)]).ok();
    assert!(kept == std::fs::read(cut.join("best.safetensors")).unwrap());

    // An earlier checkpoint would have the best one written over, which may be all that is left of its epoch.
    std::fs::copy(run.join("checkpoint.safetensors"), first.join("best.safetensors")).unwrap();
    let before = contents(&first);
    let resume = ["train", "--resume", "--out", text(&first), "--epochs", "2"];
    biformer(&resume).refused(&["best.safetensors: it is of epoch 4", "move it elsewhere"]);
    assert!(before == contents(&first), "nothing is harmed");
    std::fs::remove_file(first.join("best.safetensors")).unwrap();
    biformer(&resume).ok();
}

#[test]
fn a_run_that_is_killed_again_and_again_never_breaks() {
    let shared = shared();
    let run = shared.run("killed");
    let (mut kills, mut took) = (0, shared.took);
    for attempt in 0..60 {
        let before = place(&run);
        let resume: &[&str] = if before.is_some() { &["--resume"] } else { &[] };
        let mut child = command(&shared.train("killed", resume)).spawn().unwrap();
        // Somewhere between its start and its end: while it reads, trains, saves, tests.
        sleep(took * (3 + attempt * 37 % 45) / 100);
        if child.try_wait().unwrap().is_none() {
            child.kill().unwrap();
            kills += 1;
        }
        let ended = Ran::from(child.wait_with_output().unwrap());
        // What is killed on Windows ends with 1, and says nothing.
        let killed =
            if cfg!(windows) { ended.status == Some(1) && ended.err.is_empty() } else { ended.status.is_none() };
        assert!(killed || ended.status == Some(0), "a broken folder: {ended:?}");
        let after = place(&run);
        if after > Some((1, 4)) {
            break;
        }
        // Other tests may keep the machine busier than it was then.
        if after == before {
            took = took * 5 / 4;
        }
    }
    assert!(kills > 0, "every run was over before it could be killed");
    assert!(place(&run) > Some((1, 4)), "no run came further before it was killed");
    biformer(&shared.train("killed", &["--resume"])).ok();
    assert_same_run("killed", &shared.whole, &run);
    let left: Vec<String> = common::program::contents(&run).into_keys().filter(|name| name.ends_with("tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_finished_run_says_so_and_can_be_made_longer() {
    let shared = shared();
    let name = "longer";
    biformer(&shared.train(name, &["--epochs", "2"])).ok();
    let before = common::program::contents(&shared.run(name));
    let said = biformer(&shared.train(name, &["--resume", "--epochs", "2"])).ok().out;
    assert!(said.contains("this run is done, after 2 epochs") && said.contains("--epochs N"), "{said}");
    assert_eq!(before, common::program::contents(&shared.run(name)), "nothing changes");
    // The file asks for 3, and that holds from the moment on in which the run is taken up.
    let changes = Changes::gather(Some(&shared.config), toml::Table::new()).unwrap();
    drop(Trainer::resume(&shared.run(name), &changes).unwrap());
    assert_eq!(place(&shared.run(name)), Some((2, 0)));
    let out = shared.run(name);
    biformer(&["train", "--resume", "--out", text(&out)]).ok();
    assert_eq!(place(&out), Some((3, 0)));
    biformer(&shared.train(name, &["--resume", "--epochs", "2"])).refused(&["epochs = 2", "come further, with 3 done"]);
}

/// One command for a job that is interrupted and queued again.
#[test]
fn a_run_is_started_or_resumed() {
    let shared = shared();
    let auto = |epochs| biformer(&shared.train("auto", &["--resume=auto", "--epochs", epochs])).ok().out;
    assert!(auto("1").contains("epoch   1/1"));
    let resumed = auto("2");
    assert!(resumed.contains("Going on in epoch 2") && !resumed.contains("epoch   1/"), "{resumed}");
    assert!(auto("2").contains("this run is done"));
    biformer(&shared.train("auto", &["--resume=always", "--epochs", "2"])).ok();
    biformer(&shared.train("auto-none", &["--resume"])).refused(&["there is no checkpoint.safetensors"]);
}

/// The instructions are part of the bits, and another machine's may be others.
#[test]
fn a_run_that_other_instructions_go_on_with_says_so() {
    let shared = shared();
    let train = |isa: &str, more: &[&str]| {
        let ran = command(&shared.train("elsewhere", more)).env("BIFORMER_ISA", isa).output().unwrap();
        Ran::from(ran).ok().other_notes()
    };
    assert_eq!(train("portable", &["--epochs", "1"]), "");
    assert_eq!(train("portable", &["--resume", "--epochs", "2"]), "");
    let (portable, best) = (Isa::Portable.name(), Isa::detected().min(Isa::Avx512).name());
    let said = train("", &["--resume", "--epochs", "3"]);
    if best != portable {
        assert!(
            said.contains(&format!(
                "note: cpu ({portable}), in f32, has computed this run, and cpu ({best}), in f32, goes on"
            )),
            "{said}"
        );
    }
    assert_eq!(train("", &["--resume", "--epochs", "4"]), "", "it is said once");
    let said = train("", &["--resume", "--epochs", "5", "--precision", "bf16"]);
    assert!(said.contains("in f32, has computed this run") && said.contains("in bf16, goes on"), "{said}");
}

/// What stops a run, where there are signals.
#[cfg(unix)]
mod signals {
    use super::*;
    use common::program::signal;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, Stdio};

    /// Waits until a run's checkpoint is past a place; gives false if the run ended before.
    fn wait_until(child: &mut Child, run: &Path, reached: impl Fn(Option<(u64, u64)>) -> bool) -> bool {
        let started = Instant::now();
        while !reached(place(run)) {
            if child.try_wait().unwrap().is_some() {
                return false;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "the run does not get on");
            sleep(Duration::from_millis(1));
        }
        true
    }

    #[test]
    fn ctrl_c_saves_and_says_how_to_go_on() {
        is_stopped_by("INT");
    }

    /// As schedulers stop a program, and as one ends whose terminal was closed.
    #[test]
    fn other_requests_to_stop_are_like_ctrl_c() {
        is_stopped_by("TERM");
        is_stopped_by("HUP");
    }

    /// As by Ctrl-C on `biformer train | tee log`.
    #[test]
    fn a_run_that_is_stopped_says_so_to_its_parent_when_nobody_reads_its_output() {
        let shared = shared();
        let run = shared.run("unread");
        let mut child = command(&shared.train("unread", &["--epochs", "100"])).spawn().unwrap();
        drop(child.stdout.take());
        assert!(wait_until(&mut child, &run, |place| place >= Some((0, 2))));
        signal(&child, "INT");
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGINT));
    }

    fn is_stopped_by(name_of_signal: &str) {
        let shared = shared();
        // The run may be quicker than this test; then it must be tried again.
        for attempt in 0..5 {
            let name = format!("stopped-{name_of_signal}-{attempt}");
            let run = shared.run(&name);
            let mut child = command(&shared.train(&name, &[])).spawn().unwrap();
            if !wait_until(&mut child, &run, |place| place >= Some((0, 2))) {
                continue;
            }
            signal(&child, name_of_signal);
            let ended = child.wait_with_output().unwrap();
            if ended.status.success() {
                continue;
            }
            // Not by an exit with status 130: after that a shell's loop would go on.
            let numbers = [("INT", libc::SIGINT), ("TERM", libc::SIGTERM), ("HUP", libc::SIGHUP)];
            let by = numbers.into_iter().find(|&(_, number)| ended.status.signal() == Some(number));
            assert_eq!(by.map(|(name, _)| name), Some(name_of_signal), "{ended:?}");
            let ended = Ran::from(ended);
            assert!(ended.out.contains("biformer train --resume --out"), "{ended:?}");
            assert!(place(&run) < Some((3, 0)), "it stopped before the end");
            let resumed = biformer(&shared.train(&name, &["--resume"])).ok();
            assert!(resumed.out.contains("Test accuracy"), "{resumed:?}");
            assert_same_run(name_of_signal, &shared.whole, &run);
            return;
        }
        panic!("every run was over before it could be stopped");
    }

    /// As by Ctrl-C in a terminal, where what has started the program hands it on; and as by somebody in a hurry,
    /// later.
    #[test]
    fn ctrl_c_twice_at_once_saves_and_once_more_later_ends() {
        let shared = shared();
        // A step takes longer than the test waits.
        let slow = ["--image-size", "512", "--batch-size", "8", "--threads", "1"];
        let train = |name| command(&shared.train(name, &slow)).spawn().unwrap();
        for (name, pause) in [("twice", 0), ("hurry", 800)] {
            let mut child = train(name);
            assert!(wait_until(&mut child, &shared.run(name), |place| place.is_some()));
            // Until it trains.
            sleep(Duration::from_millis(500));
            signal(&child, "INT");
            sleep(Duration::from_millis(pause));
            signal(&child, "INT");
            let ended = child.wait_with_output().unwrap();
            assert_eq!(ended.status.signal(), Some(libc::SIGINT), "{ended:?}");
            assert_eq!(Ran::from(ended).out.contains("Stopped; the checkpoint is saved"), pause == 0, "{name}");
        }
    }

    /// As `nohup` starts it.
    #[test]
    fn a_signal_that_is_to_be_ignored_is_ignored() {
        let shared = shared();
        // The run may be quicker than this test; then it must be tried again.
        for attempt in 0..5 {
            let name = format!("nohup-{attempt}");
            let run = shared.run(&name);
            let program = command(&shared.train(&name, &["--epochs", "2"]));
            let mut script = Command::new("sh");
            script.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(program.get_program()).args(program.get_args());
            let mut child = script.stdout(Stdio::null()).spawn().unwrap();
            let mut in_time = wait_until(&mut child, &run, |place| place >= Some((0, 2)));
            if in_time {
                signal(&child, "HUP");
                in_time = place(&run) < Some((2, 0));
                assert_eq!(child.wait().unwrap().code(), Some(0));
            }
            assert_eq!(place(&run), Some((2, 0)));
            if in_time {
                return;
            }
        }
        panic!("every run was over before the signal came");
    }
}
