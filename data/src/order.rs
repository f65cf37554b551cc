//! Which samples an epoch shows, and in which order: a function of (seed, epoch).

use tensor::rng::Philox;

use crate::LoaderConfig;

/// Names the stream of random numbers.
const SHUFFLE: u64 = 0x5348_5546;

/// A sample in the order of an epoch, which has shown it so many times before.
#[derive(Clone, Copy)]
pub(crate) struct Showing {
    pub sample: usize,
    pub before: usize,
}

/// The order of an epoch of a data set of `len` samples.
pub(crate) fn order(config: &LoaderConfig, epoch: u64, len: usize) -> Vec<Showing> {
    let LoaderConfig { batch_size, seed, shuffle, parts, repeats, .. } = *config;
    let samples = match shuffle {
        true => Philox::keyed(seed, &[SHUFFLE, epoch]).sequence().permutation(len),
        false => (0..len).collect(),
    };
    let showing = |place: usize| Showing { sample: samples[place / repeats], before: place % repeats };
    let showings: Vec<Showing> = (0..len).map(showing).collect();
    if repeats == 1 {
        return showings;
    }
    showings.chunks(batch_size).flat_map(|batch| deal(batch, parts)).collect()
}

/// A batch dealt like cards, so that showings of a sample go to different parts: first what the first part gets, then what the
/// second gets, ...
fn deal(batch: &[Showing], parts: usize) -> impl Iterator<Item = Showing> {
    let parts = parts.min(batch.len());
    (0..parts).flat_map(move |part| batch.iter().skip(part).step_by(parts).copied())
}
