//! Which samples an epoch shows, and in which order: a function of (seed, epoch).

use std::collections::BTreeMap;

use tensor::rng::{Philox, Sequence};

use crate::LoaderConfig;

/// Names the stream of random numbers.
const SHUFFLE: u64 = 0x5348_5546;

/// A sample in the order of an epoch, and how many times the epoch has shown it before.
#[derive(Clone, Copy)]
pub(crate) struct Showing {
    pub sample: usize,
    pub before: usize,
}

/// The order of an epoch of a data set of `len` samples. The `labels` of all of them are needed where classes are
/// balanced.
pub(crate) fn order(config: &LoaderConfig, epoch: u64, len: usize, labels: &[u32]) -> Vec<Showing> {
    let LoaderConfig { batch_size, seed, shuffle, parts, .. } = *config;
    let (repeats, balance) =
        config.transform.augmentation().map_or((1, 0.0), |varied| (varied.repeats, varied.balance));
    let mut random = Philox::keyed(seed, &[SHUFFLE, epoch]).sequence();
    let samples = match (shuffle, balance > 0.0) {
        (true, true) => balanced(labels, balance, &mut random),
        (true, false) => random.permutation(len),
        (false, _) => (0..len).collect(),
    };
    let mut shown = vec![0; len];
    let showing = |place: usize| {
        let sample = samples[place / repeats];
        shown[sample] += 1;
        Showing { sample, before: shown[sample] - 1 }
    };
    let showings: Vec<Showing> = (0..len).map(showing).collect();
    if repeats == 1 {
        return showings;
    }
    showings.chunks(batch_size).flat_map(|batch| deal(batch, parts)).collect()
}

/// As many samples as there are labels, shuffled; the share of a class of n samples is proportional to n^(1 −
/// `balance`). Each sample of a class occurs equally often, give or take one.
fn balanced(labels: &[u32], balance: f64, random: &mut Sequence) -> Vec<usize> {
    let mut classes = BTreeMap::<u32, Vec<usize>>::new();
    for (sample, &label) in labels.iter().enumerate() {
        classes.entry(label).or_default().push(sample);
    }
    let parts = |samples: &Vec<usize>| libm::pow(samples.len() as f64, 1.0 - balance);
    let all: f64 = classes.values().map(parts).sum();
    let (mut drawn, mut upto) = (Vec::with_capacity(labels.len()), 0.0);
    for samples in classes.values() {
        upto += parts(samples);
        // The cumulative ends are rounded, not the shares, so that the total equals the number of labels.
        let end = (upto / all * labels.len() as f64).round() as usize;
        while drawn.len() < end {
            let round = random.permutation(samples.len()).into_iter().take(end - drawn.len());
            drawn.extend(round.map(|place| samples[place]));
        }
    }
    random.permutation(drawn.len()).into_iter().map(|place| drawn[place]).collect()
}

/// A batch dealt like cards, so that showings of a sample go to different parts: first what the first part gets, then
/// what the second gets, ...
fn deal(batch: &[Showing], parts: usize) -> impl Iterator<Item = Showing> {
    let parts = parts.min(batch.len());
    (0..parts).flat_map(move |part| batch.iter().skip(part).step_by(parts).copied())
}
