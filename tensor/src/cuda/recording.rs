//! Work that is recorded once and done again and again: a whole training step as one request.
//!
//! A recording holds kernels with their arguments, so everything that changes from one replay to the next (images, a
//! learning rate) must be in device memory, and be written there before the replay. The recording itself writes the
//! keys of random streams there: see [`Recording::replay`].

use super::driver::RecordingId;
use super::pool::give_free;
use super::{Gpu, Memory, Stream};
use crate::rng::Philox;
use crate::{Device, Error, Result, lock};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread::{self, ThreadId};

/// If this variable is set, repeated work is launched kernel by kernel every time: for finding out whether the
/// recording is at fault.
const UNRECORDED_VARIABLE: &str = "BIFORMER_UNRECORDED";

/// Recorded work. Its temporary memory is reserved for it while it lives, and so is memory of tensors that are dropped
/// meanwhile.
pub struct Recording {
    gpu: Arc<Gpu>,
    id: RecordingId,
    /// Its number among the device's recordings: see `Pool`.
    number: u64,
    keys: Keys,
    /// Blocks, by capacity, that were taken and returned while it was recorded.
    kept: BTreeMap<usize, Vec<u64>>,
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").field("gpu", &self.gpu).field("number", &self.number).finish_non_exhaustive()
    }
}

/// The random streams that recorded work draws from, and where kernels find their keys.
pub(super) struct Keys {
    /// The thread that records.
    by: ThreadId,
    memory: Memory,
    streams: Vec<Philox>,
    places: HashMap<Philox, usize>,
}

impl Keys {
    /// The most streams that a recording can draw from: enough for a thousand micro-batches of a model of 32 blocks,
    /// which take two streams per block.
    const MAX: usize = 1 << 16;
    /// A seed and the number of a stream.
    const BYTES: usize = 16;

    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let memory = Memory::new(gpu, Self::MAX * Self::BYTES);
        let memory = memory.map_err(|error| error.of_tensor("keys of random streams".into()))?;
        Ok(Self { by: thread::current().id(), memory, streams: vec![], places: HashMap::new() })
    }

    /// Whether another thread records than the one that asks.
    pub fn are_of_another_thread(&self) -> bool {
        self.by != thread::current().id()
    }

    /// Where the key of a stream lies.
    pub fn address(&mut self, stream: &Philox) -> Result<u64> {
        let place = *self.places.entry(*stream).or_insert_with(|| {
            self.streams.push(*stream);
            self.streams.len() - 1
        });
        if place >= Self::MAX {
            return Err(Error::argument(
                "record",
                format!("the work draws from more than {} random streams", Self::MAX),
            ));
        }
        Ok(self.memory.address() + (place * Self::BYTES) as u64)
    }
}

impl Gpu {
    /// Records what `work` asks of the device without executing it: [`Recording::replay`] does that, and only then do
    /// tensors that `work` returns get their values. Meanwhile what other threads ask of the device is refused; when
    /// the recording begins, they must not be about to ask for anything. Errors: those of `work`, and [`Error::Gpu`]
    /// when it needs what cannot be recorded: a copy from or to the machine's memory; [`Error::Argument`] within
    /// another recording, or within work aside.
    pub fn record<R, E: From<Error>>(
        self: &Arc<Self>,
        work: impl FnOnce() -> std::result::Result<R, E>,
    ) -> std::result::Result<(Recording, R), E> {
        if lock(&self.keys).is_some() {
            return Err(Error::argument("record", "a recording cannot start within another").into());
        }
        if self.stream() == Stream::Aside {
            return Err(Error::argument("record", "a recording cannot start within work aside").into());
        }
        // Free blocks that the pool holds would be lacking for the recording.
        self.join()?;
        self.trim()?;
        let keys = Keys::new(self)?;
        // First, so that other threads' requests are refused by the time that they would be recorded.
        *lock(&self.keys) = Some(keys);
        if let Err(error) = self.driver.begin_recording() {
            // Unlocked before the keys go, whose memory asks whether anything is recorded.
            let keys = lock(&self.keys).take();
            drop(keys);
            return Err(error.beside_tensors(self.stats().in_use).into());
        }
        // A panic, too, must not leave the device recording.
        let result = catch_unwind(AssertUnwindSafe(work));
        let joined = self.join();
        // As long as the device records, other threads' requests must be refused; and what they return meanwhile is the
        // recording's, too, until it has a number by which that is known.
        let ended = self.driver.end_recording();
        let (kept, number) = lock(&self.pool).add_recording();
        let keys = lock(&self.keys).take();
        let id = ended.and_then(|id| joined.map(|()| id)).map_err(|error| error.beside_tensors(self.stats().in_use));
        match (result, id, keys) {
            (Ok(Ok(value)), Ok(id), Some(keys)) => {
                Ok((Recording { gpu: Arc::clone(self), id, number, keys, kept }, value))
            }
            (result, id, _) => {
                if let Ok(id) = id {
                    self.driver.forget(id);
                }
                self.forget_aside();
                self.take_in(number, kept);
                match result {
                    Err(panic) => resume_unwind(panic),
                    Ok(Err(error)) => Err(error),
                    Ok(Ok(_)) => {
                        Err(id.err().unwrap_or_else(|| Error::argument("record", "nothing was recorded")).into())
                    }
                }
            }
        }
    }

    /// Returns to the pool the blocks that were kept for the recording of this number, which is gone, and those that
    /// were retained because it might have used them.
    fn take_in(&self, number: u64, kept: BTreeMap<usize, Vec<u64>>) {
        let mut pool = lock(&self.pool);
        pool.recordings.retain(|&other| other != number);
        give_free(&mut pool.free, kept);
        std::mem::take(&mut pool.retained).into_iter().for_each(|block| self.settle(&mut pool, block));
    }
}

impl Recording {
    /// The random streams that the work drew from when it was recorded, in the order in which it first did.
    pub fn streams(&self) -> &[Philox] {
        &self.keys.streams
    }

    /// Executes the work once more, on the present contents of the memory that it reads, and with `streams` in place of
    /// [`Recording::streams`]. Errors: [`Error::Argument`] unless there are as many of both; [`Error::Gpu`].
    pub fn replay(&self, streams: &[Philox]) -> Result<()> {
        if streams.len() != self.keys.streams.len() {
            let message =
                format!("{} random streams were given in place of {}", streams.len(), self.keys.streams.len());
            return Err(Error::argument("replay", message));
        }
        // Before the lock, which this thread has if it is aside.
        self.gpu.ensure_in_order("a replay")?;
        // What the recording has aside shares counters and workspaces with what is aside now, and with what comes next.
        let _alone = lock(&self.gpu.submitting);
        self.gpu.join_all()?;
        let keys: Vec<u64> = streams.iter().flat_map(Philox::key).collect();
        // SAFETY: the memory has room for the keys of as many streams as were recorded.
        unsafe { self.gpu.upload(bytemuck::cast_slice(&keys), self.keys.memory.address())? };
        // SAFETY: the memory that the work uses is reserved for it or belongs to tensors; when those are dropped, the
        // pool retains it.
        self.gpu.with_room(|| unsafe { self.gpu.driver.replay(self.id) })
    }
}

/// Work that the same code repeats on the same tensors: executed directly the first time, which also compiles its
/// kernels; recorded the second time; and replayed from then on.
#[derive(Debug)]
pub struct Repeated<R> {
    /// The result of the work when it was executed directly.
    left: Option<R>,
    recorded: Option<(Recording, R)>,
}

impl<R> Default for Repeated<R> {
    fn default() -> Self {
        Self { left: None, recorded: None }
    }
}

impl<R> Repeated<R> {
    /// Does the work and returns its result, which the next run overwrites. Nothing is recorded on the CPU, without
    /// `may_record`, or if the variable `BIFORMER_UNRECORDED` is set. `streams` returns the random streams of this run,
    /// given the work's result; only a replay calls it. The second time no other thread may use the device: see
    /// [`Gpu::record`]. Errors: those of the work, of [`Gpu::record`] and of [`Recording::replay`].
    pub fn run<E: From<Error>>(
        &mut self,
        device: &Device,
        may_record: bool,
        streams: impl FnOnce(&R) -> Vec<Philox>,
        work: impl FnOnce() -> std::result::Result<R, E>,
    ) -> std::result::Result<&R, E> {
        let may_record = may_record && std::env::var_os(UNRECORDED_VARIABLE).is_none();
        let recorded = match (self.recorded.take(), device) {
            (Some(recorded), _) if may_record => recorded,
            // The work has run once; the result of that is dropped first, so that its memory can be reused.
            (None, Device::Cuda(gpu)) if may_record && self.left.take().is_some() => gpu.record(work)?,
            (recorded, _) => {
                self.recorded = recorded;
                self.left = None;
                return Ok(self.left.insert(work()?));
            }
        };
        let (recording, left) = self.recorded.insert(recorded);
        recording.replay(&streams(left))?;
        Ok(left)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Before its memory is reused. There is nobody to tell of an error; while something is recorded there is no
        // wait, and whatever reuses the memory comes later on the stream.
        let _ = self.gpu.synchronize();
        self.gpu.driver.forget(self.id);
        self.gpu.take_in(self.number, std::mem::take(&mut self.kept));
    }
}
