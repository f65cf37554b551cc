//! After its first step, training asks the system for no more tensor memory: the pool has all that it needs, and
//! hardly touches more of it. And no memory is cleared only to be overwritten.
//!
//! One test: the pool is the whole process's.

use biformer::config::RunConfig;
use biformer::data::{Loader, LoaderConfig, Split, Transform, open};
use biformer::device::Precision;
use biformer::tensor::cpu::parallel::thread_pool;
use biformer::tensor::{PoolStats, pool_stats, trim_pool};
use biformer::trainer::learner::Learner;

const BATCH: usize = 16;
const STEPS: usize = 12;

#[test]
fn a_training_step_takes_its_memory_from_the_pool() {
    in_precision(Precision::F32);
    in_precision(Precision::Bf16);
}

fn in_precision(precision: Precision) {
    let mut config = RunConfig::for_model("nano").unwrap();
    config.precision = precision;
    config.batch_size = BATCH;
    config.ema.enabled = true;
    let train = open("embedded", Split::Train).unwrap();
    let transform = Transform::train(config.image_size, train.statistics(), &config.augmentation).unwrap();
    let loader = Loader::new(train, LoaderConfig::train(config.batch_size, config.seed, transform)).unwrap();
    let steps = |threads: usize| -> Vec<PoolStats> {
        trim_pool(); // what another number of threads left behind
        let mut learner = Learner::new(&config).unwrap();
        let steps = || {
            let batches = loader.epoch(0, 0).take(STEPS).enumerate();
            let trained = batches.map(|(step, batch)| {
                learner.train(&batch.unwrap().into(), step as u64, 1e-3, || None).unwrap();
                pool_stats()
            });
            trained.collect()
        };
        thread_pool(threads).unwrap().install(steps)
    };
    let allocations = |steps: &[PoolStats]| steps.iter().map(|stats| stats.system_allocations).collect::<Vec<_>>();

    let before = pool_stats().system_allocations;
    let alone = steps(1);
    let asked = allocations(&alone);
    assert!(asked[0] > before, "the first step takes what it needs: {before}, {asked:?}");
    assert_eq!(asked[1..], [asked[0]; STEPS - 1], "system allocations after each step of one thread");
    assert_little_more(&alone);

    // The one thing that is cleared, because zeros are its content: each full attention (two in nano) routes each
    // image's only region to itself.
    let routes = 2 * BATCH * size_of::<u32>();
    let cleared: Vec<usize> = alone.windows(2).map(|pair| pair[1].cleared - pair[0].cleared).collect();
    assert_eq!(cleared, [routes; STEPS - 1], "bytes cleared in each step");

    // More threads work on more pieces at once; but again all of it in the first step, whichever thread gets which
    // task.
    let both = steps(2);
    let asked = allocations(&both);
    assert_eq!(asked[1..], [asked[0]; STEPS - 1], "system allocations after each step of two threads");
    assert_little_more(&both);
}

/// Buffers come and go in another order in each step, and fit together now better, now worse.
fn assert_little_more(steps: &[PoolStats]) {
    let took: Vec<_> = steps.iter().map(|stats| stats.resident as f64 / 1e6).collect();
    assert!(took[0] > 10.0 && took[STEPS - 1] < 1.06 * took[0], "MB that were in use up to each step: {took:.1?}");
}
