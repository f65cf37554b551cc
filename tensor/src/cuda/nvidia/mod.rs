//! A GPU of NVIDIA's, through cudarc: the driver, NVRTC and cuBLASLt, each loaded when a GPU is opened. A machine that
//! lacks them gets an error that says which.

mod blas;
pub mod compiler;
mod downloads;
mod kernels;
mod libraries;
mod machine;
mod uploads;

use super::driver::{Arg, Driver, Extent, Function, Mark, Product, Properties, RecordingId, Stream};
use super::locked::Locked;
use super::module::Module;
use crate::{Error, Result, lock};
use blas::Blas;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{
    self, CUcontext, CUevent, CUevent_flags, CUevent_wait_flags, CUfunction, CUgraphExec, CUgraphInstantiate_flags,
    CUmodule, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};
use cudarc::driver::{profiler_start, profiler_stop};
use downloads::Downloads;
pub use machine::devices;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Mutex;
use uploads::Uploads;

/// The oldest generation whose instructions the kernels use: that of the A100.
const OLDEST: (u32, u32) = (8, 0);

const CAPTURES_NOTHING: CUstreamCaptureStatus = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
/// What is reported to have failed if a stream has run into a fault.
const WAITING: &str = "waiting for the GPU";
const ORDERING: &str = "ordering streams";

/// A GPU of NVIDIA's that is open for work.
pub struct Nvidia {
    properties: Properties,
    context: CUcontext,
    /// Those of [`Stream::Work`], [`Stream::Copies`] and [`Stream::Aside`].
    work: CUstream,
    copies: CUstream,
    aside: CUstream,
    /// Declared to be dropped before the context goes.
    blas: Option<Mutex<Blas>>,
    /// On the work's stream.
    uploads: Mutex<Uploads>,
    downloads: Mutex<Downloads>,
    /// What has been loaded, and its kernels.
    modules: Mutex<Vec<CUmodule>>,
    functions: Mutex<Vec<CUfunction>>,
    /// Recorded work; none where it has been forgotten.
    recordings: Mutex<Vec<Option<CUgraphExec>>>,
}

impl fmt::Debug for Nvidia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvidia").field("properties", &self.properties).finish_non_exhaustive()
    }
}

// SAFETY: the driver's handles may be used from any thread, once the context is made current there, as every function
// here does first.
unsafe impl Send for Nvidia {}
// SAFETY: as above; what is not handles is behind mutexes.
unsafe impl Sync for Nvidia {}

pub(super) fn failure(message: impl Into<String>) -> Error {
    Error::Gpu { device: "cuda".into(), message: message.into() }
}

/// An out-of-memory error. A caller that knows how much memory tensors take adds that.
pub(super) fn no_room(what: &str, bytes: Option<usize>) -> Error {
    let (free, total) = result::mem_get_info().unwrap_or_default();
    Error::OutOfMemory { what: what.into(), bytes, in_use: None, total, free }
}

/// A failure of the driver, in its own words.
fn driver_failure(what: &str, error: DriverError) -> Error {
    if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return no_room(what, None);
    }
    let words = error.error_string().map(|words| words.to_string_lossy().into_owned());
    failure(format!("{what}: {}", words.unwrap_or_else(|_| format!("{:?}", error.0))))
}

/// The fault that a stream has run into so far, if any. A stream that is being recorded cannot be queried.
fn ensure_no_fault(stream: CUstream) -> Result<()> {
    // SAFETY: the stream is the caller's.
    unsafe {
        if result::stream::is_capturing(stream).doing("an earlier kernel")? != CAPTURES_NOTHING {
            return Ok(());
        }
        match sys::cuStreamQuery(stream) {
            CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            outcome => outcome.result().doing("an earlier kernel"),
        }
    }
}

/// Adds to a result of the driver what was being done.
trait Doing<T> {
    fn doing(self, what: &str) -> Result<T>;
}

impl<T> Doing<T> for std::result::Result<T, DriverError> {
    fn doing(self, what: &str) -> Result<T> {
        self.map_err(|error| driver_failure(what, error))
    }
}

impl Nvidia {
    /// Opens the GPU of this number. [`Error::Gpu`] says what is missing: the driver, the GPU, a library, or a
    /// generation that is new enough.
    pub fn open(ordinal: usize) -> Result<Self> {
        let known = machine::devices()?;
        let Some(properties) = known.get(ordinal).cloned() else {
            return Err(failure(format!("there is no GPU {ordinal}; there are {}, counted from 0", known.len())));
        };
        if properties.capability < OLDEST {
            let ((major, minor), (least, _)) = (properties.capability, OLDEST);
            let name = &properties.name;
            return Err(failure(format!(
                "{name} has compute capability {major}.{minor}, and the kernels need {least}.0"
            )));
        }
        libraries::compiler()?;
        libraries::blas()?;
        machine::ensure_libraries_for_driver()?;
        let device = result::device::get(ordinal as i32).doing("asking for a GPU")?;
        // SAFETY: the device is one that the driver gave.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(|error| match error.0 {
            // Without a context the free memory cannot be queried.
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Error::OutOfMemory { what: "opening it".into(), bytes: None, in_use: None, total: 0, free: 0 }
            }
            _ => driver_failure("opening a GPU", error),
        })?;
        let mut gpu = Self {
            properties,
            context,
            work: std::ptr::null_mut(),
            copies: std::ptr::null_mut(),
            aside: std::ptr::null_mut(),
            blas: None,
            uploads: Mutex::default(),
            downloads: Mutex::default(),
            modules: Mutex::default(),
            functions: Mutex::default(),
            recordings: Mutex::default(),
        };
        gpu.enter()?;
        let (least, greatest) = result::stream::get_priority_range().doing("asking for the streams' priorities")?;
        let stream = |priority| {
            let kind = result::stream::StreamKind::NonBlocking;
            result::stream::create_with_priority(kind, priority).doing("making a stream")
        };
        gpu.work = stream(greatest)?;
        gpu.copies = stream(least)?;
        gpu.aside = stream(least)?;
        gpu.blas = Some(Mutex::new(Blas::new([gpu.work, gpu.aside])?));
        gpu.uploads = Mutex::new(Uploads::new(gpu.allocate_locked(uploads::ROOM)?));
        gpu.downloads = Mutex::new(Downloads::new(gpu.allocate_locked(downloads::ROOM)?));
        Ok(gpu)
    }

    /// Makes the GPU's context current on this thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }.doing("entering a GPU's context")
    }

    fn handle(&self, stream: Stream) -> CUstream {
        match stream {
            Stream::Work => self.work,
            Stream::Aside => self.aside,
            Stream::Copies => self.copies,
        }
    }

    /// Waits for the work stream; the kept bytes of uploads are not needed any more then.
    fn finish_work(&self, uploads: &mut Uploads) -> Result<()> {
        // SAFETY: the stream is this value's.
        unsafe { result::stream::synchronize(self.work) }.doing(WAITING)?;
        uploads.all_read();
        Ok(())
    }
}

impl Drop for Nvidia {
    fn drop(&mut self) {
        // There is nobody to tell of an error here.
        if self.enter().is_ok() {
            // Those that were made before opening failed, if it did.
            let streams = [self.work, self.copies, self.aside].into_iter().filter(|stream| !stream.is_null());
            // SAFETY: the streams are this value's, and nothing uses them any more.
            unsafe {
                streams.clone().for_each(|stream| _ = result::stream::synchronize(stream));
                self.blas = None;
                let locked = [lock(&self.uploads).take(), lock(&self.downloads).take()];
                locked.into_iter().flatten().for_each(|memory| self.free_locked(memory));
                lock(&self.modules).drain(..).for_each(|module| _ = result::module::unload(module));
                // The context stays: cuBLASLt holds kernels of its own in it, for as long as the process lives.
                streams.for_each(|stream| _ = result::stream::destroy(stream));
            }
        }
    }
}

impl Driver for Nvidia {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&self, bytes: usize) -> Result<Option<u64>> {
        self.enter()?;
        // SAFETY: the address is used as memory of this size.
        match unsafe { result::malloc_sync(bytes.max(1)) } {
            Ok(address) => Ok(Some(address)),
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(error) => Err(driver_failure("asking for memory", error)),
        }
    }

    unsafe fn free(&self, address: u64) {
        if self.enter().is_ok() {
            // SAFETY: the caller's promise. Callers wait for the GPU before they free memory: the driver need not.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    fn free_memory(&self) -> Result<usize> {
        self.enter()?;
        Ok(result::mem_get_info().doing("asking for the free memory")?.0)
    }

    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller's promise.
        let copy = |from: &[u8]| unsafe { result::memcpy_htod_async(to, from, self.work) }.doing("copying to the GPU");
        let mut uploads = lock(&self.uploads);
        if let Some(own) = uploads.keep(from) {
            return copy(own);
        }
        copy(from)?;
        // If a GPU can read pageable memory directly, the driver may not have copied the bytes yet.
        self.finish_work(&mut uploads)
    }

    unsafe fn download(&self, pieces: &mut [(u64, &mut [u8])]) -> Result<()> {
        self.enter()?;
        let request = |from: u64, to: &mut [u8]| {
            // SAFETY: the caller's promise; the copy has happened when `finish` returns.
            unsafe { result::memcpy_dtoh_async(to, from, self.work) }.doing("copying from the GPU")
        };
        lock(&self.downloads).fetch(pieces, request, || self.finish(Stream::Work))
    }

    fn allocate_locked(&self, bytes: usize) -> Result<Option<Locked>> {
        self.enter()?;
        // SAFETY: the memory is used as bytes, this many.
        let start = unsafe { result::malloc_host(bytes.max(1), 0) };
        // Whatever the error is, callers can do without page-locked memory.
        let start = start.ok().and_then(|start| NonNull::new(start.cast()));
        // SAFETY: it was allocated for this alone, as long as this.
        Ok(start.map(|start| unsafe { Locked::new(start, bytes) }))
    }

    unsafe fn free_locked(&self, memory: Locked) {
        if self.enter().is_ok() {
            // SAFETY: the caller's promise.
            let _ = unsafe { result::free_host(memory.into_start().as_ptr().cast()) };
        }
    }

    unsafe fn send(&self, from: &[u8], to: u64) -> Result<()> {
        self.enter()?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_htod_async(to, from, self.copies) }.doing("sending to the GPU")
    }

    fn mark(&self, stream: Stream) -> Result<Mark> {
        self.enter()?;
        let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).doing("making an event")?;
        // SAFETY: the stream is this value's, and the event whoever's has the mark.
        unsafe { result::event::record(event, self.handle(stream)) }
            // SAFETY: then nobody has it.
            .inspect_err(|_| _ = unsafe { result::event::destroy(event) })
            .doing(ORDERING)?;
        Ok(Mark { on: stream, id: event as u64 })
    }

    fn wait(&self, stream: Stream, mark: Mark) -> Result<()> {
        self.enter()?;
        let (event, wait) = (mark.id as CUevent, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT);
        // SAFETY: the stream is this value's. Until it waits for the event, whoever has the mark may try again.
        unsafe { result::stream::wait_event(self.handle(stream), event, wait) }.doing(ORDERING)?;
        // Once a stream waits for it, the event may go: so says the driver's manual.
        self.drop_mark(mark);
        Ok(())
    }

    fn drop_mark(&self, mark: Mark) {
        if self.enter().is_ok() {
            // SAFETY: nobody has the mark any more. There is nobody to tell of an error.
            let _ = unsafe { result::event::destroy(mark.id as CUevent) };
        }
    }

    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.enter()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.handle(stream)) }.doing("copying on the GPU")
    }

    unsafe fn fill(&self, stream: Stream, to: u64, byte: u8, bytes: usize) -> Result<()> {
        self.enter()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { result::memset_d8_async(to, byte, bytes, self.handle(stream)) }.doing("filling memory")
    }

    fn load(&self, module: &Module) -> Result<Vec<Function>> {
        self.enter()?;
        let compiled = compiler::cached(module, self.properties.capability)?;
        // SAFETY: the image is as NVRTC made it: machine code, which knows its length, or PTX with a zero behind it.
        let loaded = unsafe { result::module::load_data(compiled.image.as_ptr().cast()) }
            .doing(&format!("loading the kernels of {}", module.name))?;
        let most = self.properties.shared_memory;
        // SAFETY: the module is the one that was just loaded; where its kernels cannot be had, nobody has any of it.
        let handles =
            unsafe { kernels::of(loaded, compiled.symbols, most).inspect_err(|_| _ = result::module::unload(loaded))? };
        lock(&self.modules).push(loaded);
        let mut known = lock(&self.functions);
        let first = known.len();
        known.extend(handles);
        Ok((first..known.len()).map(Function).collect())
    }

    unsafe fn launch(&self, stream: Stream, function: Function, extent: Extent, arguments: &[Arg]) -> Result<()> {
        self.enter()?;
        let (stream, kernel) = (self.handle(stream), lock(&self.functions)[function.0]);
        let mut values: Vec<_> = arguments.iter().map(Arg::value).collect();
        let Extent { grid: [x, y, z], threads, shared } = extent;
        // SAFETY: the caller's promise; the values are copied before this returns.
        unsafe { result::launch_kernel(kernel, (x, y, z), (threads, 1, 1), shared, stream, &mut values) }
            .doing("starting a kernel")
    }

    unsafe fn multiply(&self, stream: Stream, product: &Product) -> Result<bool> {
        self.enter()?;
        let blas = self.blas.as_ref().ok_or_else(|| failure("cuBLASLt is not open"))?;
        // SAFETY: the caller's promise.
        unsafe { lock(blas).multiply(self.handle(stream), product) }
    }

    fn begin_recording(&self) -> Result<()> {
        self.enter()?;
        // Relaxed, because memory may be allocated during the capture, which is not part of the recording.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is this value's.
        unsafe { result::stream::begin_capture(self.work, mode) }.doing("beginning to record")
    }

    fn end_recording(&self) -> Result<RecordingId> {
        self.enter()?;
        // Kernels keep the priority of the stream on which they were recorded.
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        // SAFETY: the stream is this value's, and the graph is taken apart once it is executable.
        let executable = unsafe {
            let graph = result::stream::end_capture(self.work).doing("ending a recording")?;
            let executable = result::graph::instantiate(graph, flags);
            let _ = result::graph::destroy(graph);
            executable.doing("preparing a recording")?
        };
        let mut recordings = lock(&self.recordings);
        recordings.push(Some(executable));
        Ok(RecordingId(recordings.len() - 1))
    }

    unsafe fn replay(&self, recording: RecordingId) -> Result<()> {
        self.enter()?;
        let executable = lock(&self.recordings)[recording.0];
        let executable = executable.ok_or_else(|| failure("the recording has been released already"))?;
        // SAFETY: the caller's promise.
        unsafe { result::graph::launch(executable, self.work) }.doing("replaying a recording")
    }

    fn forget(&self, recording: RecordingId) {
        let executable = lock(&self.recordings)[recording.0].take();
        if let Some(executable) = executable.filter(|_| self.enter().is_ok()) {
            // SAFETY: nobody else has it. There is nobody to tell of an error.
            let _ = unsafe { result::graph::exec_destroy(executable) };
        }
    }

    fn finish(&self, stream: Stream) -> Result<()> {
        self.enter()?;
        match stream {
            Stream::Work => self.finish_work(&mut lock(&self.uploads)),
            // SAFETY: the stream is this value's.
            stream => unsafe { result::stream::synchronize(self.handle(stream)) }.doing(WAITING),
        }
    }

    fn tell_profiler(&self, records: bool) {
        // Results do not depend on it.
        let _ = self.enter().map(|()| if records { profiler_start() } else { profiler_stop() });
    }
}
