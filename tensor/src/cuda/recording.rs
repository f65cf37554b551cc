//! Work that is recorded once and done again and again: a whole training step as one request.
//!
//! What is recorded are kernels with their arguments, so everything that changes from one time to the next (images, a
//! learning rate) must lie in memory of the device, and be written there before. The keys of random streams are put
//! there by the recording itself: see [`Recording::replay`].

use super::driver::RecordingId;
use super::{Gpu, Memory, Pool, give_free};
use crate::rng::Philox;
use crate::{Device, Error, Result, lock};
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// Where this variable is set, work that is repeated is asked for kernel by kernel each time: to find out whether it is the
/// recording that goes wrong.
const UNRECORDED_VARIABLE: &str = "BIFORMER_UNRECORDED";

/// Recorded work. Memory that it uses for itself is kept for it, and so is that of tensors that go while it lives.
pub struct Recording {
    gpu: Arc<Gpu>,
    id: RecordingId,
    /// Which one of the device's it is: see `Pool`.
    number: u64,
    keys: Keys,
    /// Blocks by capacity that were taken and given back in between.
    kept: BTreeMap<usize, Vec<u64>>,
}

/// The random streams that recorded work draws from, and where kernels find their keys.
pub(super) struct Keys {
    memory: Memory,
    streams: Vec<Philox>,
    places: HashMap<Philox, usize>,
}

impl Keys {
    /// The most streams that there can be: those of a thousand micro-batches, of which each block of a model has two.
    const MOST: usize = 1 << 16;
    /// A seed and the number of a stream.
    const BYTES: usize = 16;

    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let memory = Memory::new(gpu, Self::MOST * Self::BYTES);
        let memory = memory.map_err(|error| error.of_tensor("keys of random streams".into()))?;
        Ok(Self { memory, streams: vec![], places: HashMap::new() })
    }

    /// Where the key of a stream lies.
    pub fn address(&mut self, stream: &Philox) -> Result<u64> {
        let place = *self.places.entry(*stream).or_insert_with(|| {
            self.streams.push(*stream);
            self.streams.len() - 1
        });
        if place >= Self::MOST {
            return Err(Error::argument("record", format!("more than {} random streams", Self::MOST)));
        }
        Ok(self.memory.address() + (place * Self::BYTES) as u64)
    }
}

impl Gpu {
    /// Records what `work` asks of the device, which is not done yet: [`Recording::replay`] does it. Tensors that `work`
    /// returns get their values then. Meanwhile nobody else may use the device. Errors: those of `work`, and
    /// [`Error::Gpu`] when it needs what cannot be recorded: a copy from or to the machine's memory.
    pub fn record<R, E: From<Error>>(
        self: &Arc<Self>,
        work: impl FnOnce() -> std::result::Result<R, E>,
    ) -> std::result::Result<(Recording, R), E> {
        if lock(&self.keys).is_some() {
            return Err(Error::argument("record", "within what is being recorded").into());
        }
        // Free memory that is held would be missing for the recording's own.
        self.trim()?;
        let keys = Keys::new(self)?;
        self.driver.begin_recording().map_err(|error| error.beside_tensors(self.stats().in_use))?;
        *lock(&self.keys) = Some(keys);
        // A panic, too, must not leave the device recording.
        let result = catch_unwind(AssertUnwindSafe(work));
        let keys = lock(&self.keys).take();
        let id = self.driver.end_recording().map_err(|error| error.beside_tensors(self.stats().in_use));
        let kept = std::mem::take(&mut lock(&self.pool).free);
        match (result, id, keys) {
            (Ok(Ok(value)), Ok(id), Some(keys)) => {
                let number = lock(&self.pool).add_recording();
                Ok((Recording { gpu: Arc::clone(self), id, number, keys, kept }, value))
            }
            (result, id, _) => {
                if let Ok(id) = id {
                    self.driver.forget(id);
                }
                self.take_in(kept, &mut lock(&self.pool));
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

    /// Takes in what was kept for a recording that is gone, and what was retained because it might have used it.
    fn take_in(&self, kept: BTreeMap<usize, Vec<u64>>, pool: &mut Pool) {
        give_free(&mut pool.free, kept);
        let (used, unused) =
            std::mem::take(&mut pool.retained).into_iter().partition(|&(age, ..)| pool.may_be_used(age));
        pool.retained = used;
        for (_, capacity, address) in Vec::from_iter(unused) {
            self.put_away(pool, address, capacity);
        }
    }
}

impl Recording {
    /// The random streams that the work drew from when it was recorded, in the order in which it first did.
    pub fn streams(&self) -> &[Philox] {
        &self.keys.streams
    }

    /// Does the work once more, with what now lies in the memory that it reads, and with other random streams in place
    /// of [`Recording::streams`]. Errors: [`Error::Argument`] when there are not as many.
    pub fn replay(&self, streams: &[Philox]) -> Result<()> {
        if streams.len() != self.keys.streams.len() {
            let message = format!("{} random streams in place of {}", streams.len(), self.keys.streams.len());
            return Err(Error::argument("replay", message));
        }
        let keys: Vec<u64> = streams.iter().flat_map(Philox::key).collect();
        // SAFETY: the memory has room for the keys of as many streams as were recorded.
        unsafe { self.gpu.upload(bytemuck::cast_slice(&keys), self.keys.memory.address())? };
        // SAFETY: the memory that the work uses is kept for it, or belongs to tensors, and when those go the pool retains
        // it.
        self.gpu.with_room(|| unsafe { self.gpu.driver.replay(self.id) })
    }
}

/// Work that the same code does again and again on the same tensors: as it stands the first time, which compiles its
/// kernels; recorded the second time; and replayed from then on.
pub struct Repeated<R> {
    /// What the work left behind when it was done as it stands.
    left: Option<R>,
    recorded: Option<(Recording, R)>,
}

impl<R> Default for Repeated<R> {
    fn default() -> Self {
        Self { left: None, recorded: None }
    }
}

impl<R> Repeated<R> {
    /// Does the work, and gives what it leaves behind, which the next time overwrites. Nothing is recorded on the CPU, nor
    /// unless it may be, nor where the variable `BIFORMER_UNRECORDED` is set. `streams` gives the random streams of this time, of
    /// which there are as many as it is told. Errors: those of the work, of [`Gpu::record`] and of [`Recording::replay`].
    pub fn run<E: From<Error>>(
        &mut self,
        device: &Device,
        may_record: bool,
        streams: impl FnOnce(usize) -> Vec<Philox>,
        work: impl FnOnce() -> std::result::Result<R, E>,
    ) -> std::result::Result<&R, E> {
        let may_record = may_record && std::env::var_os(UNRECORDED_VARIABLE).is_none();
        let recorded = match (self.recorded.take(), device) {
            (Some(recorded), _) if may_record => recorded,
            // Before, it has run once; what that left behind goes, and its memory serves this time.
            (None, Device::Cuda(gpu)) if may_record && self.left.take().is_some() => gpu.record(work)?,
            (recorded, _) => {
                self.recorded = recorded;
                self.left = None;
                return Ok(self.left.insert(work()?));
            }
        };
        let (recording, left) = self.recorded.insert(recorded);
        recording.replay(&streams(recording.streams().len()))?;
        Ok(left)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Before its memory goes to somebody else. There is nobody to tell of an error.
        let _ = self.gpu.synchronize();
        self.gpu.driver.forget(self.id);
        let mut pool = lock(&self.gpu.pool);
        pool.recordings.retain(|&number| number != self.number);
        self.gpu.take_in(std::mem::take(&mut self.kept), &mut pool);
    }
}
