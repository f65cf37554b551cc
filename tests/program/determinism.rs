//! The same seed gives the same bits: twice, with any number of threads, and whatever is computed again.

use crate::common::program::{assert_same_run, biformer, text};
use crate::common::undisturbed::Undisturbed;
use std::path::Path;
use std::sync::LazyLock;

fn shared() -> &'static Undisturbed {
    static SHARED: LazyLock<Undisturbed> = LazyLock::new(|| Undisturbed::new("determinism"));
    &SHARED
}

#[test]
fn the_same_seed_gives_the_same_bits_with_any_number_of_threads() {
    let shared = shared();
    for threads in ["1", "2", "3"] {
        let name = format!("threads-{threads}");
        biformer(&shared.train(&name, &["--threads", threads])).ok();
        assert_same_run(&name, &shared.whole(), &shared.run(&name));
    }
    biformer(&shared.train("other-seed", &["--seed", "2"])).ok();
    let metrics = |run: &Path| std::fs::read(run.join("metrics.jsonl")).unwrap();
    assert_ne!(metrics(&shared.whole()), metrics(&shared.run("other-seed")), "the seed decides");
}

/// A few images at a time, whose gradients add up in an order that no thread decides.
#[test]
fn a_batch_in_many_pieces_gives_the_same_bits_with_any_number_of_threads() {
    let shared = shared();
    let more = ["train", "--model", "nano", "--set", "depth=1,1,1", "--batch-size", "80", "--epochs", "1"];
    let [one, two, three] = ["1", "2", "3"].map(|threads| {
        let out = shared.run(&format!("pieces-{threads}"));
        let files = ["--data", text(&shared.data), "--out", text(&out), "--threads", threads];
        biformer(&[&more[..], &files].concat()).ok();
        out
    });
    assert_same_run("2 threads", &one, &two);
    assert_same_run("3 threads", &one, &three);
}

#[test]
fn bf16_gives_the_same_bits_with_any_number_of_threads() {
    let shared = shared();
    for (name, threads) in [("bf16-1", "1"), ("bf16-3", "3")] {
        biformer(&shared.train(name, &["--precision", "bf16", "--threads", threads])).ok();
    }
    assert_same_run("bf16", &shared.run("bf16-1"), &shared.run("bf16-3"));
    let metrics = |run: &Path| std::fs::read(run.join("metrics.jsonl")).unwrap();
    assert_ne!(metrics(&shared.whole()), metrics(&shared.run("bf16-1")), "products are rounded");
}

#[test]
fn what_is_computed_again_changes_nothing() {
    let shared = shared();
    // On a CPU it is "cheap" unless something else is asked for.
    biformer(&shared.train("kept", &["--recompute", "none"])).ok();
    assert_same_run("kept", &shared.whole(), &shared.run("kept"));
    // Another choice is fine for the rest of a run.
    biformer(&shared.train("block", &["--recompute", "block", "--epochs", "1"])).ok();
    biformer(&shared.train("block", &["--resume", "--recompute", "none"])).ok();
    let gone_on = shared.run("block");
    biformer(&shared.train("plain", &["--epochs", "1"])).ok();
    biformer(&shared.train("plain", &["--resume"])).ok();
    assert_same_run("block", &shared.run("plain"), &gone_on);
}
