//! GPUs: memory, kernels and matrix products on a device, behind one type, [`Gpu`].
//!
//! | file | what it holds |
//! |---|---|
//! | `driver.rs` | what a device can do |
//! | `nvidia/` | a GPU, through its driver, NVRTC and cuBLASLt, all loaded at run time |
//! | `emulated/` | a device emulated on the CPU: kernels compiled by the system's C++ compiler, one fiber per thread |
//! | `cache.rs` | compiled kernels on disk |
//! | `memory.rs` | device memory, and borrowed parts of it |
//! | `pool.rs` | the pool of that memory: [`GpuStats`] |
//! | `layout.rs` | where the elements of a view lie |
//! | `module.rs` | [`Module`], the source of some kernels; [`Launch`], a call of one |
//! | `recording.rs` | [`Recording`]: work that is recorded once and done again and again |
//! | `aside.rs` | [`Gpu::aside`]: work beside other work |
//! | `locked.rs` | page-locked memory of the host |
//! | `prefetch.rs` | [`Prefetch`]: copies from host memory that overlap with the device's work |
//! | `prelude.cuh` | what every kernel begins with |
//! | `instructions.cuh` | what is written as inline PTX: tensor cores, asynchronous copies, fast functions |
//! | `gemm.rs` | matrix products of tensors |
//! | `words.cuh` | packs of elements, moved as words |
//! | `sums.rs`, `.cuh` | sums over the blocks of a launch, finished within the launch |
//! | `rows.rs`, `.cuh` | how kernels divide matrices (rows, columns) among blocks |
//! | `elements.rs`, `.cu` | copies of views, conversions, sums: what tensors need of a device |
//!
//! Everything that is asked of a device happens in order, on one stream. So memory can be recycled as soon as its
//! tensor is gone: whatever uses it next comes later on the stream. There are two exceptions, each with a stream of its
//! own: [`Gpu::aside`], and [`Prefetch`], which orders its copies itself.

mod aside;
mod cache;
mod driver;
pub mod elements;
mod emulated;
mod gemm;
mod layout;
mod locked;
mod memory;
mod module;
pub mod nvidia;
mod pool;
mod prefetch;
mod recording;
mod rows;
mod sums;

pub use aside::Joining;
pub use driver::Properties;
pub use gemm::{Gemm, Matrix};
pub use memory::{Memory, Out, Span};
pub use module::{Launch, Module};
pub use pool::GpuStats;
pub use prefetch::Prefetch;
pub use recording::{Recording, Repeated};
pub use rows::Tiles;
pub use sums::{MULTIPROCESSORS, at_most, partial_sums, pieces, with_multiprocessors};

use crate::rng::Philox;
use crate::{Error, Result, lock};
use driver::{Driver, Function, Mark, Operand, Product, Stream};
use pool::Pool;
use recording::Keys;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once};

/// A GPU that is open for work: its driver, the pool of its memory, and the kernels that were compiled for it.
pub struct Gpu {
    driver: Box<dyn Driver>,
    pool: Mutex<Pool>,
    /// The kernels of each module, loaded once for each stream.
    functions: Mutex<HashMap<(usize, Stream), Arc<Functions>>>,
    /// The random streams of what is being recorded, if anything is.
    keys: Mutex<Option<Keys>>,
    /// The work that is aside, in order; whether there may be any.
    aside: Mutex<VecDeque<aside::Pending>>,
    may_divert: bool,
    /// Locked while work is submitted aside or joined, and while a recording is replayed.
    submitting: Mutex<()>,
    /// Whether products of f32 matrices may round their factors to TF32.
    tf32: AtomicBool,
    /// Whether memory is filled with 0xFF before it is handed out: NaN, and an impossible index.
    poison: bool,
}

/// The kernels of a module by name.
type Functions = HashMap<String, Function>;

impl Gpu {
    /// The NVIDIA GPU of this number. Errors: [`Error::Gpu`], which says what is missing.
    pub fn open(ordinal: usize) -> Result<Arc<Gpu>> {
        Ok(Self::with(Box::new(nvidia::Nvidia::open(ordinal)?), false))
    }

    /// The emulated device. The order in which its threads run is drawn from `seed`. Errors: [`Error::Gpu`] where there
    /// is no C++ compiler.
    pub fn emulated(seed: u64) -> Result<Arc<Gpu>> {
        Ok(Self::with(Box::new(emulated::Emulated::open(seed)?), true))
    }

    /// A device for tests of kernels, whose memory is poisoned before it is handed out: the machine's first GPU where
    /// the variable `BIFORMER_TEST_GPU` is set, the emulated device otherwise. If the device cannot be opened, prints
    /// once per process that its tests are skipped, and returns `None`. Panics instead if `REQUIRE_EMULATED` (as in CI)
    /// or `BIFORMER_TEST_GPU` is set.
    pub fn for_tests(seed: u64) -> Option<Arc<Gpu>> {
        let opened = match std::env::var_os("BIFORMER_TEST_GPU") {
            Some(_) => nvidia::Nvidia::open(0).map(|driver| Self::with(Box::new(driver), true)),
            None => Self::emulated(seed),
        };
        let required = ["BIFORMER_TEST_GPU", "REQUIRE_EMULATED"].iter().any(|name| std::env::var_os(name).is_some());
        match opened {
            Ok(gpu) => Some(gpu),
            Err(error) if !required => {
                // The output of `eprintln` is not shown for tests that pass.
                static SAID: Once = Once::new();
                SAID.call_once(|| _ = writeln!(io::stderr(), "skipped, all tests of a GPU: {error}"));
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn with(driver: Box<dyn Driver>, poison: bool) -> Arc<Gpu> {
        Arc::new(Gpu {
            driver,
            pool: Mutex::default(),
            functions: Mutex::default(),
            keys: Mutex::default(),
            aside: Mutex::default(),
            may_divert: aside::allowed(),
            submitting: Mutex::default(),
            tf32: AtomicBool::new(false),
            poison,
        })
    }

    /// What the device is.
    pub fn properties(&self) -> &Properties {
        self.driver.properties()
    }

    /// The device itself.
    pub(crate) fn driver(&self) -> &dyn Driver {
        self.driver.as_ref()
    }

    /// Lets products of f32 matrices round their factors to TF32, whose mantissa has 10 bits: several times as fast on
    /// tensor cores. Off unless asked for.
    pub fn set_tf32(&self, on: bool) {
        self.tf32.store(on, Ordering::Relaxed);
    }

    /// Whether products of f32 matrices may round their factors to TF32.
    pub fn tf32(&self) -> bool {
        self.tf32.load(Ordering::Relaxed)
    }

    /// Waits until all work has finished. Errors: those of that work, and [`Error::Gpu`] while work is recorded, which
    /// does not finish before its replay.
    pub fn synchronize(&self) -> Result<()> {
        if lock(&self.keys).is_some() {
            return Err(self.refusal("waiting for the device cannot be recorded"));
        }
        [Stream::Copies, Stream::Aside, Stream::Work].into_iter().try_for_each(|stream| self.driver.finish(stream))
    }

    /// Tells a profiler that waits for this (`ncu --profile-from-start off`) whether to record what follows; without
    /// one, nothing happens. Waits for all work before. Errors: those of that work.
    pub fn tell_profiler(&self, records: bool) -> Result<()> {
        self.synchronize()?;
        self.driver.tell_profiler(records);
        Ok(())
    }

    /// Copies bytes from the machine's memory. [`Error::Gpu`] while work is recorded: a replay would read the source
    /// again, which may hold something else by then; and [aside](Gpu::aside), where copies would not be in order.
    ///
    /// # Safety
    /// As [`Driver`]'s.
    pub(crate) unsafe fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        self.ensure_in_order("a copy from the machine's memory")?;
        // SAFETY: the caller's promise.
        if from.is_empty() { Ok(()) } else { unsafe { self.driver.upload(from, to) } }
    }

    /// Copies bytes to the machine's memory, from each address as many as its slice has, when all work asked for before
    /// is done, but for work that is aside. Errors: as of [`Gpu::upload`].
    ///
    /// # Safety
    /// As [`Driver`]'s.
    pub(crate) unsafe fn download(&self, mut pieces: Vec<(u64, &mut [u8])>) -> Result<()> {
        self.ensure_in_order("a copy to the machine's memory")?;
        pieces.retain(|(_, to)| !to.is_empty());
        // SAFETY: the caller's promise.
        if pieces.is_empty() { Ok(()) } else { unsafe { self.driver.download(&mut pieces) } }
    }

    /// Refuses what is neither recorded nor aside but always part of the work in order.
    fn ensure_in_order(&self, what: &str) -> Result<()> {
        let problem = match self.stream() {
            Stream::Aside => "cannot be aside",
            _ if lock(&self.keys).is_some() => "cannot be recorded",
            _ => return Ok(()),
        };
        Err(self.refusal(format!("{what} {problem}")))
    }

    fn refusal(&self, message: impl Into<String>) -> Error {
        Error::Gpu { device: self.driver.properties().name.clone(), message: message.into() }
    }

    /// The address of a random stream's key while work is recorded; 0 otherwise. Errors: those of
    /// [`Gpu::stream_to_ask`].
    fn key_address(&self, stream: &Philox) -> Result<u64> {
        self.stream_to_ask()?;
        lock(&self.keys).as_mut().map_or(Ok(0), |keys| keys.address(stream))
    }

    /// Makes a request for which the driver allocates memory of its own: to load kernels, ours or cuBLASLt's, or to
    /// launch a recording. If there is too little, returns the pool's free blocks to the device and tries once more,
    /// unless work is being recorded. Errors: [`Error::OutOfMemory`], and those of `act`.
    fn with_room<R>(&self, act: impl Fn() -> Result<R>) -> Result<R> {
        let outcome = match act() {
            Err(Error::OutOfMemory { .. }) if lock(&self.keys).is_none() => self.trim().and_then(|()| act()),
            outcome => outcome,
        };
        outcome.map_err(|error| error.beside_tensors(self.stats().in_use))
    }

    /// The kernels of a module for this thread's stream, compiled at the first call.
    fn functions(&self, module: &'static Module) -> Result<Arc<Functions>> {
        let mut known = lock(&self.functions);
        // A static has a unique address, which identifies the module. On streams of their own, kernels may run at the
        // same time, and must not share the module's counters.
        let key = (std::ptr::from_ref(module) as usize, self.stream());
        if let Some(functions) = known.get(&key) {
            return Ok(Arc::clone(functions));
        }
        let loaded = self.with_room(|| self.driver.load(module))?;
        let functions: Functions = module.instances().into_iter().zip(loaded).collect();
        let functions = Arc::new(functions);
        known.insert(key, Arc::clone(&functions));
        Ok(functions)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let free = std::mem::take(&mut lock(&self.pool).free);
        // Without the wait memory could go while a kernel still uses it. There is nobody to tell of an error.
        let _ = self.synchronize();
        // SAFETY: every tensor holds the device, so none is left.
        free.into_values().flatten().for_each(|block| unsafe { self.driver.free(block) });
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu {}", self.driver.properties().name)
    }
}
