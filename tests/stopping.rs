//! However often a run is stopped or killed, it goes on to the same bits.

mod common;

use biformer::config::RunConfig;
use biformer::trainer::{Outcome, Trainer};
use common::program::{Ran, assert_same_run, biformer, command, contents, place, text};
use common::samples;
use common::undisturbed::{STEPS, Undisturbed};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::sleep;

fn shared() -> &'static Undisturbed {
    static SHARED: LazyLock<Undisturbed> = LazyLock::new(|| Undisturbed::new("stopping"));
    &SHARED
}

/// Stopped after every single step of an epoch, between its last step and the test, and then left alone.
#[test]
fn a_run_that_is_stopped_at_every_step_goes_on_to_the_bit() {
    let shared = shared();
    let run = shared.run("steps");
    let changes = samples::changes(&shared.config, &shared.data, &run, &[("threads", 2)]);
    let mut trainer = Trainer::new(RunConfig::changed(&changes).unwrap()).unwrap();
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
    assert_same_run("stopped at every step", &shared.whole(), &run);
}

/// By a program with a button to pause, for instance, which is pressed twice.
#[test]
fn requests_to_stop_that_are_withdrawn_lose_nothing() {
    let shared = shared();
    let run = shared.run("withdrawn");
    let mut trainer = samples::trainer(&shared.config, &shared.data, &run);
    let (stop, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (button, done) = (Arc::clone(&stop), Arc::clone(&over));
    std::thread::spawn(move || {
        while !done.load(Ordering::Relaxed) {
            button.fetch_not(Ordering::Relaxed);
            std::thread::yield_now();
        }
    });
    let ended = (0..10_000).map(|_| trainer.run(&stop).unwrap()).find(|&outcome| outcome == Outcome::Finished);
    over.store(true, Ordering::Relaxed);
    assert!(ended.is_some(), "the run does not get on");
    assert_same_run("paused and not", &shared.whole(), &run);
}

/// A batch in parts is not given up because of a request that was there before it began.
#[test]
fn one_step_is_all_parts_of_a_batch() {
    let shared = shared();
    let run = shared.run("parts");
    let changes = samples::changes(&shared.config, &shared.data, &run, &[("micro_batches", 2)]);
    let mut trainer = Trainer::from_changes(&changes).unwrap();
    assert_eq!(trainer.run(&AtomicBool::new(true)).unwrap(), Outcome::Interrupted);
    assert_eq!(place(&run), Some((0, 1)));
}

#[test]
fn a_run_that_is_killed_again_and_again_never_breaks() {
    let shared = shared();
    let run = shared.run("killed");
    let (mut kills, mut took) = (0, shared.took());
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
    assert_same_run("killed", &shared.whole(), &run);
    let left: Vec<String> = contents(&run).into_keys().filter(|name| name.ends_with("tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// What stops a run, where there are signals.
#[cfg(unix)]
mod signals {
    use super::*;
    use common::program::signal;
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

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
        is_stopped_by("USR1");
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
            if place(&run) == Some((3, 0)) {
                // Even then it says so if it was asked before its end.
                let asked = String::from_utf8_lossy(&ended.stderr).contains("Stopping");
                assert_eq!(ended.status.signal().is_some(), asked, "{ended:?}");
                continue;
            }
            // Not by an exit with status 130: after that a shell's loop would go on.
            let numbers =
                [("INT", libc::SIGINT), ("TERM", libc::SIGTERM), ("HUP", libc::SIGHUP), ("USR1", libc::SIGUSR1)];
            let by = numbers.into_iter().find(|&(_, number)| ended.status.signal() == Some(number));
            assert_eq!(by.map(|(name, _)| name), Some(name_of_signal), "{ended:?}");
            let ended = Ran::from(ended);
            assert!(ended.out.contains("biformer train --resume --out"), "{ended:?}");
            let resumed = biformer(&shared.train(&name, &["--resume"])).ok();
            assert!(resumed.out.contains("Test accuracy"), "{resumed:?}");
            assert_same_run(name_of_signal, &shared.whole(), &run);
            return;
        }
        panic!("every run was over before it could be stopped");
    }

    /// It is drawing its pictures, for example.
    #[test]
    fn a_run_that_is_stopped_when_it_is_done_says_so_as_well() {
        let shared = shared();
        biformer(&shared.train("done", &["--epochs", "1"])).ok();
        let mut pause = Duration::from_millis(40);
        for _ in 0..60 {
            let child = command(&["train", "--resume", "--out", text(&shared.run("done"))]).spawn().unwrap();
            sleep(pause);
            signal(&child, "INT");
            let ended = child.wait_with_output().unwrap();
            let (by, ended) = (ended.status.signal(), Ran::from(ended));
            if ended.err.contains("Stopping") {
                assert!(by == Some(libc::SIGINT) && ended.out.contains("this run is done"), "{ended:?}");
                return;
            }
            // Before the run expects a signal, that ends it at once; and the run may be quicker than this test.
            pause = pause.mul_f64(if by.is_some() { 1.3 } else { 0.8 });
        }
        panic!("every run was over before it could be stopped, or not yet begun");
    }

    /// As by Ctrl-C in a terminal, where what has started the program hands it on; and as by somebody in a hurry,
    /// later.
    #[test]
    fn ctrl_c_twice_at_once_saves_and_once_more_later_ends() {
        let shared = shared();
        // Of one in a hurry, a step takes longer than the test waits.
        let slow = ["--image-size", "512", "--batch-size", "8", "--threads", "1"];
        for (name, pause, more) in [("twice", 0, &["--epochs", "100"][..]), ("hurry", 800, &slow)] {
            let mut child = command(&shared.train(name, more)).spawn().unwrap();
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
