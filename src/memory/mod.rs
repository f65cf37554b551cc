//! How much memory work takes, and what is said where it is not there.

mod forecast;
mod free;
mod last;

use crate::config::RunConfig;
use crate::device::DeviceName;
use anyhow::{Result, bail};
use forecast::Sample;
use free::free_bytes;
use model::cost::gathered_bytes;
use std::any::Any;
use std::panic::{self, AssertUnwindSafe};
use tensor::{DType, OUT_OF_MEMORY};

pub use forecast::{Size, activations, image_bytes, inference, training};
pub use free::peak_resident_bytes;
pub use last::OrEnd;

/// What is to be said where memory has run out.
const NEED_LESS: &str = "smaller batches or images, or in training recompute = \"block\", need less";

/// Refuses training that would not fit into the machine's memory, where the system tells how much is free, and says what
/// to choose instead, which is the command's to say. The images lie beside the pool, in so many bytes: more than a batch,
/// where batches are made ahead.
pub fn ensure_room_to_train(config: &RunConfig, size: Size, images: u64, choice: &str) -> Result<()> {
    let words = ["training", choice];
    let gathered = gathered_bytes(&config.architecture, size, DType::F32);
    // Weights, their gradients, and two moments.
    let Some(free) = room_beside(config, 4 * DType::F32.size(), images.saturating_add(gathered), words)? else {
        return Ok(());
    };
    let at_once = config.at_once();
    if Sample::to_train(config, size)?.contains(at_once) {
        return Ok(());
    }
    ensure_fit(words, training(config, size)? + images.saturating_sub(image_bytes(config, size)), free)
}

/// The same for [`inference`].
pub fn ensure_room_to_infer(config: &RunConfig, size: Size, images: u64, dtype: DType, choice: &str) -> Result<()> {
    let words = ["inference", choice];
    let gathered = gathered_bytes(&config.architecture, size, dtype);
    // Weights, as they are and as they are prepared.
    let Some(free) = room_beside(config, 2 * dtype.size(), images.saturating_add(gathered), words)? else {
        return Ok(());
    };
    if Sample::to_infer(config, size)?.0.contains(config.batch_size) {
        return Ok(());
    }
    ensure_fit(words, inference(config, size, dtype)? + images.saturating_sub(image_bytes(config, size)), free)
}

/// Refuses a forecast of a model that is too large to be measured, on images of a size.
pub fn ensure_room_to_foretell(config: &RunConfig, size: Size) -> Result<()> {
    // Not less than two images are measured.
    let gathered = gathered_bytes(&config.architecture, size, DType::F32).saturating_mul(2);
    let words = ["forecast", "a smaller model"];
    room_beside(config, 4 * DType::F32.size(), gathered, words).map(|_| ())
}

/// The memory that is free, after weights of so many bytes each, and bytes beside them, have been found to fit into it: what
/// does not is not measured. None where nothing needs to be foretold.
fn room_beside(config: &RunConfig, weight: usize, bytes: u64, words: [&str; 2]) -> Result<Option<u64>> {
    // What the machine's memory holds then is little; a GPU says itself when it has no room.
    if config.device != DeviceName::Cpu {
        return Ok(None);
    }
    let Some(free) = free_bytes() else { return Ok(None) };
    ensure_fit(words, bytes.saturating_add((weight as f64 * config.architecture.rough_size()) as u64), free)?;
    Ok(Some(free))
}

fn ensure_fit([work, choice]: [&str; 2], needed: u64, free: u64) -> Result<()> {
    if needed <= free {
        return Ok(());
    }
    let [needed, free] = [needed, free].map(amount);
    bail!("this {work} takes about {needed} of memory and {free} are free: choose {choice}")
}

/// So many bytes, in words.
fn amount(bytes: u64) -> String {
    match bytes {
        0..1_000_000_000 => format!("{} MB", bytes / 1_000_000),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

/// Does some work, and where it ends because the system has no memory left, which nobody could foretell, makes that an
/// error. Other panics go on.
pub fn or_out_of_memory<R>(work: impl FnOnce() -> Result<R>) -> Result<R> {
    let as_ever = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        // Several threads may find that there is none: it is said once, below.
        if !lack(info.payload()) {
            as_ever(info);
        }
    }));
    // Nothing that the work was about is used afterwards.
    match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(panic) if lack(panic.as_ref()) => {
            let said = panic.downcast_ref::<String>().map_or(OUT_OF_MEMORY, String::as_str);
            bail!("{said}; {NEED_LESS}")
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
        assert!(ensure_fit(["training", "less"], 1_000_000, 1_000_000).is_ok());
        let error = ensure_fit(["training", "a smaller batch_size"], 3_260_000_000, 2_000_000_000).unwrap_err();
        let said = "this training takes about 3.3 GB of memory and 2.0 GB are free: choose a smaller batch_size";
        assert_eq!(error.to_string(), said);
        let error = ensure_fit(["forecast", "less"], 98_700_000, 0).unwrap_err().to_string();
        assert_eq!(error, "this forecast takes about 98 MB of memory and 0 MB are free: choose less");
    }
}
