//! Runs that are made longer, and their best epochs.

use crate::common::program::{
    Ran, biformer, change_epochs, command, contents, epochs, json, make_first_best, place, text,
};
use crate::common::undisturbed::Undisturbed;
use biformer::config::{Changes, Measure};
use biformer::model::TensorFile;
use biformer::trainer::Trainer;
use biformer::trainer::checkpoint::Checkpoint;
use biformer::trainer::metrics::EpochMetrics;
use std::sync::LazyLock;
use tensor::cpu::isa::Isa;

fn shared() -> &'static Undisturbed {
    static SHARED: LazyLock<Undisturbed> = LazyLock::new(|| Undisturbed::new("longer"));
    &SHARED
}

/// Also where the run was killed before it was kept, and is only asked whether it is done.
#[test]
fn the_best_epoch_is_kept() {
    let shared = shared();
    let run = shared.run("best");
    biformer(&shared.train("best", &[])).ok();
    let epochs = epochs(&run.join("checkpoint.safetensors"));
    let most = epochs.iter().map(|epoch| epoch.test_accuracy).fold(0.0, f64::max);
    let equals = epochs.iter().filter(|epoch| epoch.test_accuracy == most);
    let best = equals.min_by(|a, b| a.test_loss.total_cmp(&b.test_loss)).unwrap();
    let path = run.join("best.safetensors");
    assert_eq!(Checkpoint::read(&path).unwrap().progress.epoch(), best.epoch);
    let evaluated = biformer(&["eval", "--json", "--checkpoint", text(&path)]).ok().out;
    let report = json(&evaluated);
    assert_eq!(report["top1"].as_f64(), Some(best.test_accuracy));

    // Where it is gone, the best of the others is kept, and it is said that they are not the best.
    std::fs::remove_file(&path).unwrap();
    change_epochs(&run, |epochs| epochs[0].test_accuracy = 1.0);
    let said = biformer(&["train", "--resume", "--out", text(&run), "--epochs", "4"]).ok();
    let lost = "best.safetensors is not that of epoch 1, the best so far; it will be the best of the others";
    let of_others = |of: usize| {
        let best =
            "It was best after epoch 1, 100.0%, whose weights were not kept; those in best.safetensors are of epoch";
        format!("{best} {of}.")
    };
    let kept = Checkpoint::read(&path).unwrap().progress.epoch();
    assert!(said.err.contains(lost) && said.out.contains(&of_others(kept)) && kept > 1, "{kept} {said:?}");
    change_epochs(&run, |epochs| epochs[kept - 1].test_accuracy = 0.9);
    let said = biformer(&["train", "--resume", "--out", text(&run), "--epochs", "5"]).ok();
    assert!(said.err.contains(lost) && said.out.contains(&of_others(kept)), "only what is better is kept: {said:?}");

    // One epoch is the best of one.
    let first = shared.run("best-of-one");
    biformer(&shared.train("best-of-one", &["--epochs", "1"])).ok();
    let kept = std::fs::read(first.join("best.safetensors")).unwrap();
    assert!(kept == std::fs::read(first.join("checkpoint.safetensors")).unwrap());
    std::fs::remove_file(first.join("best.safetensors")).unwrap();
    biformer(&["train", "--resume", "--out", text(&first)]).ok();
    assert!(kept == std::fs::read(first.join("best.safetensors")).unwrap());

    // An earlier checkpoint would have the best one written over, which may be all that is left of its epoch.
    std::fs::copy(run.join("checkpoint.safetensors"), first.join("best.safetensors")).unwrap();
    let before = contents(&first);
    let resume = ["train", "--resume", "--out", text(&first), "--epochs", "2"];
    biformer(&resume).refused(&["best.safetensors: it is of epoch 5", "move it elsewhere"]);
    assert!(before == contents(&first), "nothing is harmed");
    std::fs::remove_file(first.join("best.safetensors")).unwrap();
    biformer(&resume).ok();

    // Where it is there, and better than the last, it is said what it is good for.
    make_first_best(&run);
    let said = biformer(&["train", "--resume", "--out", text(&run), "--epochs", "6"]).ok().out;
    let kept = "It was best after epoch 1, 100.0%: those weights are in best.safetensors, which eval, predict and export\n\
                take as well: --checkpoint ";
    assert!(said.contains(kept), "{said}");
}

/// Also from the middle of a run on: its epochs are then compared anew.
#[test]
fn the_best_epoch_may_be_that_of_the_mean_class() {
    let shared = shared();
    let run = shared.run("best-by-class");
    let by_class = ["--set", "best_by=macro_accuracy"];
    let said = biformer(&shared.train("best-by-class", &[&["--epochs", "2"][..], &by_class].concat())).ok().out;
    let best = run.join("best.safetensors");
    let of_class = |epoch: &EpochMetrics| format!("{:.1}%", 100.0 * epoch.test_macro_accuracy.unwrap());
    let [first, last] = <[EpochMetrics; 2]>::try_from(epochs(&run.join("checkpoint.safetensors"))).unwrap();
    assert!(said.contains(&format!("%  macro {:>5}   ", of_class(&first))), "{said}");
    assert!(said.contains(&format!("Test accuracy {} (mean of the classes) after ", of_class(&last))), "{said}");

    change_epochs(&run, |epochs| {
        (epochs[0].test_accuracy, epochs[0].test_macro_accuracy) = (1.0, Some(0.0));
        (epochs[1].test_accuracy, epochs[1].test_macro_accuracy) = (0.0, Some(1.0));
    });
    std::fs::remove_file(&best).unwrap();
    let resume = |more: &[&str]| biformer(&[&["train", "--resume", "--out", text(&run)], more].concat()).ok();
    assert!(!resume(&[]).err.contains("best.safetensors") && epochs(&best).len() == 2);
    let lost = "best.safetensors is not that of epoch 1, the best so far";
    let said = resume(&["--set", "best_by=accuracy"]);
    assert!(said.err.contains(lost) && epochs(&best).len() == 2, "{said:?}");
    let said = biformer(&["info", "--checkpoint", text(&run)]).ok().out;
    assert!(said.contains("Test accuracy 0.0% after epoch 2; best after epoch 1, 100.0%."), "{said}");
    resume(&by_class);

    // What was the best by another measure is not written over by resuming, once or twice: its weights may be nowhere
    // else.
    let mut first = Checkpoint::read(&run.join("checkpoint.safetensors")).unwrap();
    first.progress.epochs.truncate(1);
    first.described.config.best_by = Measure::Accuracy;
    first.write(&best).unwrap();
    for _ in 0..2 {
        let said = resume(&[]);
        let lost = "best.safetensors is not that of epoch 2, the best so far";
        assert!(said.err.contains(lost) && epochs(&best).len() == 1, "{said:?}");
    }
    let said = biformer(&["info", "--checkpoint", text(&run)]).ok().out;
    assert!(said.contains("Test accuracy 100.0% (mean of the classes) after epoch 2.\n"), "{said}");
}

#[test]
fn a_finished_run_says_so_and_can_be_made_longer() {
    let shared = shared();
    let name = "longer";
    biformer(&shared.train(name, &["--epochs", "2"])).ok();
    let before = contents(&shared.run(name));
    let said = biformer(&shared.train(name, &["--resume", "--epochs", "2"])).ok().out;
    assert!(said.contains("this run is done, after 2 epochs") && said.contains("--epochs N"), "{said}");
    assert_eq!(before, contents(&shared.run(name)), "nothing changes");
    // Pictures that a killed run did not get as far as drawing.
    for picture in ["curves.png", "routing.png"] {
        std::fs::remove_file(shared.run(name).join(picture)).unwrap();
    }
    biformer(&shared.train(name, &["--resume", "--epochs", "2"])).ok();
    assert_eq!(before, contents(&shared.run(name)), "drawn again");
    let checkpoint = shared.run(name).join("checkpoint.safetensors");
    let mut further = TensorFile::read(&checkpoint).unwrap();
    let config = further.metadata["config"].replace("epochs = 2\n", "epochs = 1\n");
    assert!(further.metadata.insert("config".into(), config.clone()) != Some(config));
    let copy = shared.run("longer-further");
    std::fs::create_dir_all(&copy).unwrap();
    further.write(&copy.join("checkpoint.safetensors")).unwrap();
    biformer(&["train", "--resume", "--out", text(&copy)]).refused(&["it is in epoch 3 of a run of 1"]);
    // The file asks for 3, and that holds from the moment on in which the run is taken up.
    let changes = Changes::gather(Some(&shared.config), toml::Table::new()).unwrap();
    drop(Trainer::resume(&shared.run(name), &changes).unwrap());
    assert_eq!(place(&shared.run(name)), Some((2, 0)));
    let out = shared.run(name);
    biformer(&["train", "--resume", "--out", text(&out)]).ok();
    assert_eq!(place(&out), Some((3, 0)));
    // The last of 30 steps is the 24th after a warm-up of 5, along the cosine of a run of three epochs.
    let cosine = (std::f64::consts::PI * 24.0 / 25.0).cos();
    let expected = 1e-5 + 0.5 * (4e-3 - 1e-5) * (1.0 + cosine);
    approx::assert_relative_eq!(epochs(&checkpoint)[2].learning_rate, expected, max_relative = 1e-12);
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
