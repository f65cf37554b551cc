//! How much memory a task needs, and the error messages if there is not enough.

mod forecast;
mod last;

use crate::config::RunConfig;
use crate::device::DeviceName;
use anyhow::{Result, bail};
use forecast::Sample;
use last::{advice, speak_alone};
use model::cost::gathered_bytes;
use std::any::Any;
use std::panic::{self, AssertUnwindSafe};
use tensor::memory::{amount, free_bytes};
use tensor::{DType, OUT_OF_MEMORY};

pub use forecast::{Size, activations, image_bytes, inference, training};
pub use last::{OrEnd, when_it_runs_out};

/// Refuses training that would not fit into the machine's memory, if the system reports how much is free and the
/// forecast would take neither minutes nor too much memory itself. `choice`, supplied by the command, is the
/// alternative that the error recommends. `images` is the number of bytes that images take outside the buffer pool:
/// those of more than one batch if batches are prefetched.
pub fn ensure_room_to_train(config: &RunConfig, size: Size, images: u64, choice: &str) -> Result<()> {
    let words = ["training", choice];
    let gathered = gathered_bytes(&config.architecture, size, DType::F32);
    // Weights, their gradients, and two moments.
    let Some(free) = room_beside(config, 4 * DType::F32.size(), images.saturating_add(gathered), words)? else {
        return Ok(());
    };
    let at_once = config.at_once();
    if Sample::to_train(config, size)?.is_some_and(|sample| sample.contains(at_once)) {
        // To measure it would take as much memory as to do it.
        return Ok(());
    }
    let Some(foretold) = training(config, size)? else { return Ok(()) };
    ensure_fit(words, "about", foretold + images.saturating_sub(image_bytes(config, size)), free)
}

/// The same for [`inference`].
pub fn ensure_room_to_infer(config: &RunConfig, size: Size, images: u64, dtype: DType, choice: &str) -> Result<()> {
    let words = ["inference", choice];
    let gathered = gathered_bytes(&config.architecture, size, dtype);
    // The weights twice: as they are, and as prepared for inference.
    let Some(free) = room_beside(config, 2 * dtype.size(), images.saturating_add(gathered), words)? else {
        return Ok(());
    };
    if Sample::to_infer(config, size)?.is_some_and(|(sample, _)| sample.contains(config.batch_size)) {
        return Ok(());
    }
    let Some(foretold) = inference(config, size, dtype)? else { return Ok(()) };
    ensure_fit(words, "about", foretold + images.saturating_sub(image_bytes(config, size)), free)
}

/// Refuses to forecast the memory of a model that is too large to be measured on images of this size.
pub fn ensure_room_to_foretell(config: &RunConfig, size: Size) -> Result<()> {
    // Not less than two images are measured.
    let gathered = gathered_bytes(&config.architecture, size, DType::F32).saturating_mul(2);
    let words = ["forecast", "a smaller model"];
    room_beside(config, 4 * DType::F32.size(), gathered, words).map(|_| ())
}

/// Ensures that the weights, at `weight` bytes per parameter, and `bytes` more fit into the free memory, since a model
/// that does not fit must not be measured. Returns the free memory, or none if no forecast is needed.
fn room_beside(config: &RunConfig, weight: usize, bytes: u64, words: [&str; 2]) -> Result<Option<u64>> {
    // On another device little is held in the machine's memory, and a GPU itself reports when it is full.
    if config.device != DeviceName::Cpu {
        return Ok(None);
    }
    let Some(free) = free_bytes() else { return Ok(None) };
    ensure_fit(
        words,
        "at least",
        bytes.saturating_add((weight as f64 * config.architecture.rough_size()) as u64),
        free,
    )?;
    Ok(Some(free))
}

fn ensure_fit([work, choice]: [&str; 2], how: &str, needed: u64, free: u64) -> Result<()> {
    if needed <= free {
        return Ok(());
    }
    let [needed, free] = [needed, free].map(amount);
    bail!("this {work} takes {how} {needed} of memory and {free} are free: choose {choice}")
}

/// Runs some work. If it panics because the system has unexpectedly run out of memory, turns that into an error; other
/// panics are resumed. The program is to end then: this is its last word on memory.
pub fn or_out_of_memory<R>(work: impl FnOnce() -> Result<R>) -> Result<R> {
    let as_ever = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        // Several threads may run out of memory at once: it is reported once, below.
        if !lack(info.payload()) {
            as_ever(info);
        }
    }));
    // Unwind-safe: nothing that the work has touched is used after a panic.
    match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(panic) if lack(panic.as_ref()) => {
            speak_alone();
            let said = panic.downcast_ref::<String>().map_or(OUT_OF_MEMORY, String::as_str);
            bail!("{said}; {}", advice())
        }
        Err(panic) => panic::resume_unwind(panic),
    }
}

/// Whether a panic says that there was no memory.
fn lack(panic: &(dyn Any + Send)) -> bool {
    panic.downcast_ref::<String>().is_some_and(|said| said.starts_with(OUT_OF_MEMORY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_the_ways_out() {
        assert!(ensure_fit(["training", "less"], "about", 1_000_000, 1_000_000).is_ok());
        let error =
            ensure_fit(["training", "a smaller batch_size"], "about", 3_260_000_000, 2_000_000_000).unwrap_err();
        let said = "this training takes about 3.3 GB of memory and 2.0 GB are free: choose a smaller batch_size";
        assert_eq!(error.to_string(), said);
        let error = ensure_fit(["forecast", "less"], "at least", 98_700_000, 0).unwrap_err().to_string();
        assert_eq!(error, "this forecast takes at least 98 MB of memory and 0.0 MB are free: choose less");
    }
}
