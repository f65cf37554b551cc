//! After its first step, training asks the system for no more tensor memory: the pool has all that it needs.

use biformer::config::RunConfig;
use biformer::data::{Loader, LoaderConfig, Split, Transform, open};
use biformer::tensor::cpu::parallel::thread_pool;
use biformer::tensor::pool_stats;
use biformer::trainer::step::Learner;

#[test]
fn a_training_step_takes_its_memory_from_the_pool() {
    let mut config = RunConfig::for_model("nano").unwrap();
    config.batch_size = 16;
    config.ema.enabled = true;
    let train = open("embedded", Split::Train).unwrap();
    let transform = Transform::train(config.image_size, train.statistics(), &config.augmentation).unwrap();
    let loader = Loader::new(train, LoaderConfig::train(config.batch_size, config.seed, transform)).unwrap();
    let allocations = |threads: usize| -> Vec<usize> {
        let mut learner = Learner::new(&config).unwrap();
        let steps = || {
            let batches = loader.epoch(0, 0).take(5).enumerate();
            let trained = batches.map(|(step, batch)| {
                learner.train(&config, &batch.unwrap(), step as u64, 1e-3).unwrap();
                pool_stats().system_allocations
            });
            trained.collect()
        };
        thread_pool(threads).unwrap().install(steps)
    };
    let alone = allocations(1);
    assert!(alone[0] > 50, "the first step takes what it needs: {alone:?}");
    assert_eq!(alone[1..], [alone[0]; 4], "system allocations after each step of one thread");
    // How many scratch buffers are in use at once depends on which thread gets which task, and may rise by a few
    // until the pool has seen the worst; it may not rise with every step.
    let together = allocations(2);
    assert!(together[4] - together[0] < 10, "system allocations after each step of two threads: {together:?}");
}
