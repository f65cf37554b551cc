//! How many threads a command computes on.

use crate::printing::{plural, tell};
use anyhow::{Result, anyhow};
use rayon::ThreadPool;
use std::io;
use std::thread::available_parallelism;
use tensor::cpu::parallel::thread_pool;

/// The most threads that can be asked for.
pub const MAX_THREADS: usize = 1024;
/// The most threads per core. More would spend their time looking for work: 32 take one and a half times as long as
/// one, 512 four hundred times.
const MAX_PER_CORE: usize = 8;

/// The environment variable from which rayon takes the number of threads if none is given.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// The pool of threads to compute on: as many as asked for (0: as rayon's variable says, or one per core), but at most
/// 8 per core. Results are bit-identical for any number of threads. Errors: the system refuses to start them.
pub fn pool(asked: usize) -> Result<ThreadPool> {
    let cores = available_parallelism().map_or(1, usize::from);
    let usual = || usual_threads(&std::env::var(VARIABLE).ok()?);
    let asked = Some(asked).filter(|&asked| asked > 0).or_else(usual).filter(|&asked| asked > 0).unwrap_or(cores);
    let threads = asked.min(cores * MAX_PER_CORE);
    if threads < asked {
        tell!(
            io::stderr(),
            "note: {threads} threads instead of {asked}, which would be slower on {cores} core{}",
            plural(cores)
        );
    }
    // Not as its context: the pool's error is its source's words again.
    thread_pool(threads).map_err(|error| anyhow!("starting {threads} thread{}: {error}", plural(threads)))
}

/// The number in rayon's variable. An invalid one is ignored with a note, as no run should fail over it.
fn usual_threads(text: &str) -> Option<usize> {
    let threads = text.parse().ok();
    if threads.is_none() && !text.is_empty() {
        tell!(io::stderr(), "note: {VARIABLE}={text} is no number of threads, and is ignored");
    }
    threads
}
