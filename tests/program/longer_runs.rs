//! Runs that are made longer, and their best epochs.

use crate::common::program::{Ran, biformer, command, contents, place, text};
use crate::common::undisturbed::Undisturbed;
use biformer::config::Changes;
use biformer::model::TensorFile;
use biformer::trainer::Trainer;
use biformer::trainer::checkpoint::Checkpoint;
use biformer::trainer::logs::metrics_in;
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
fn a_finished_run_says_so_and_can_be_made_longer() {
    let shared = shared();
    let name = "longer";
    biformer(&shared.train(name, &["--epochs", "2"])).ok();
    let before = contents(&shared.run(name));
    let said = biformer(&shared.train(name, &["--resume", "--epochs", "2"])).ok().out;
    assert!(said.contains("this run is done, after 2 epochs") && said.contains("--epochs N"), "{said}");
    assert_eq!(before, contents(&shared.run(name)), "nothing changes");
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
