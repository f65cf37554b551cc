//! A device that is emulated on the CPU: kernels are compiled by the system's C++ compiler with `device.h`, which
//! describes the emulation. With it every kernel, and all host code around it, is run and checked on a machine without
//! a GPU, and a learner can step through a kernel in a debugger.

mod compiler;
mod copies;
mod products;

use super::driver::{Arg, Driver, Extent, Function, Mark, Product, Properties, RecordingId, Stream};
use super::locked::Locked;
use super::module::Module;
use crate::{DType, Error, Result, lock};
use compiler::{Compiler, Shared};
use copies::Copies;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Overrides the seed from which the order of threads is drawn.
const SEED_VARIABLE: &str = "BIFORMER_EMULATED_SEED";
/// Limits the device's memory, in bytes.
const MEMORY_VARIABLE: &str = "BIFORMER_EMULATED_MEMORY";
/// The number of multiprocessors that it reports, by which kernels choose their variants; one by default.
const MULTIPROCESSORS_VARIABLE: &str = "BIFORMER_EMULATED_MULTIPROCESSORS";

/// The emulated device.
pub struct Emulated {
    properties: Properties,
    compiler: Compiler,
    seed: AtomicU64,
    blocks: Mutex<HashMap<u64, Layout>>,
    copies: Mutex<Copies>,
    loaded: Mutex<Vec<Arc<Kernel>>>,
    /// Requests of [`Stream::Aside`], which are executed as late as possible: when something waits for them.
    aside: Mutex<VecDeque<Request>>,
    /// Locked while they are executed.
    executing_aside: Mutex<()>,
    /// Locked while a request reads or writes memory.
    memory: Mutex<()>,
    /// How many marks were made.
    marks: AtomicU64,
    /// What is being recorded, if anything is, and what has been.
    recording: Mutex<Option<Recorded>>,
    recordings: Mutex<Vec<Arc<Recorded>>>,
}

/// What can be recorded.
#[derive(Clone)]
enum Request {
    Copy(u64, u64, usize),
    Fill(u64, u8, usize),
    Launch(Function, Extent, Vec<Arg>),
    Multiply(Product),
    /// Here is the mark of this number.
    Mark(u64),
    /// Wait for what was asked of another stream before this mark.
    Await(Stream, u64),
}

/// Requests, each with its stream.
type Recorded = Vec<(Stream, Request)>;

/// As `device.h` declares it.
#[repr(C)]
struct Launch {
    grid: [u32; 3],
    threads: [u32; 3],
    shared_bytes: u32,
    seed: u64,
    arguments: *mut *mut c_void,
}

struct Kernel {
    name: String,
    signature: Vec<u8>,
    launch: unsafe extern "C" fn(*const Launch) -> *const c_char,
    library: Shared,
}

fn failure(message: impl Into<String>) -> Error {
    Error::Gpu { device: "the emulated device".into(), message: message.into() }
}

/// The number in an environment variable, or the default if it is not set.
fn variable<N: FromStr>(name: &str, usual: N) -> Result<N> {
    let Some(text) = std::env::var_os(name).filter(|text| !text.is_empty()) else { return Ok(usual) };
    let number = text.to_str().and_then(|text| text.parse().ok());
    number.ok_or_else(|| Error::argument("emulated", format!("{name}: expected a whole number, got {text:?}")))
}

impl Emulated {
    /// Opens the device. [`Error::Gpu`] where there is no C++ compiler, [`Error::Argument`] if a variable is not a
    /// number.
    pub fn open(seed: u64) -> Result<Self> {
        let compiler = Compiler::find()?;
        let seed = variable(SEED_VARIABLE, seed)?;
        let memory = variable(MEMORY_VARIABLE, usize::MAX / 4)?;
        let multiprocessors = variable(MULTIPROCESSORS_VARIABLE, 1)?;
        Ok(Self {
            properties: Properties {
                name: "emulated".into(),
                capability: (8, 0),
                multiprocessors,
                memory,
                shared_memory: 227 << 10,
            },
            compiler,
            seed: AtomicU64::new(seed),
            blocks: Mutex::default(),
            copies: Mutex::default(),
            loaded: Mutex::default(),
            aside: Mutex::default(),
            executing_aside: Mutex::default(),
            memory: Mutex::default(),
            marks: AtomicU64::new(0),
            recording: Mutex::default(),
            recordings: Mutex::default(),
        })
    }

    /// Records a request if a recording is in progress; otherwise executes it, or lets it wait if it is aside.
    ///
    /// # Safety
    /// As [`Driver`]'s.
    unsafe fn ask(&self, stream: Stream, request: Request) -> Result<()> {
        if let Some(recorded) = lock(&self.recording).as_mut() {
            recorded.push((stream, request));
            return Ok(());
        }
        match (stream, &request) {
            // All that it could wait for has been executed.
            (Stream::Aside, Request::Await(..)) => Ok(()),
            (Stream::Aside, _) => {
                lock(&self.aside).push_back(request);
                Ok(())
            }
            // SAFETY: the caller's promise.
            _ => unsafe { self.execute(stream, &request) },
        }
    }

    unsafe fn execute(&self, stream: Stream, request: &Request) -> Result<()> {
        // One at a time: two threads' requests must not touch the host's memory at once.
        let _alone = (!matches!(request, Request::Mark(_) | Request::Await(..))).then(|| lock(&self.memory));
        // SAFETY: the caller's promise; device memory is the host's here.
        unsafe {
            match *request {
                Request::Copy(from, to, bytes) => {
                    [from, to].into_iter().for_each(|address| lock(&self.copies).mark_used(address, bytes));
                    std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes);
                    Ok(())
                }
                Request::Fill(to, byte, bytes) => {
                    lock(&self.copies).mark_used(to, bytes);
                    (to as *mut u8).write_bytes(byte, bytes);
                    Ok(())
                }
                Request::Launch(function, extent, ref arguments) => self.run(function, extent, arguments),
                Request::Multiply(ref product) => products::multiply(product),
                Request::Mark(_) => Ok(()),
                Request::Await(first, mark) => {
                    match (first, stream) {
                        (Stream::Work, Stream::Copies) => lock(&self.copies).follow_work(),
                        (Stream::Copies, Stream::Work) => {
                            let _alone = lock(&self.memory);
                            lock(&self.copies).arrive();
                        }
                        (Stream::Aside, _) => self.execute_aside(Some(mark))?,
                        _ => {}
                    }
                    Ok(())
                }
            }
        }
    }

    /// Executes what is aside up to a mark, if it has not been executed yet, or everything.
    fn execute_aside(&self, mark: Option<u64>) -> Result<()> {
        // Whoever finds nothing to be executed waits until what another thread has taken out is done.
        let _alone = lock(&self.executing_aside);
        let waiting: Vec<Request> = {
            let mut aside = lock(&self.aside);
            let is_mark = |request: &Request| matches!(request, Request::Mark(id) if Some(*id) == mark);
            let count = match mark {
                Some(_) => aside.iter().position(is_mark).map_or(0, |place| place + 1),
                None => aside.len(),
            };
            aside.drain(..count).collect()
        };
        // SAFETY: promised when they were asked for.
        waiting.iter().try_for_each(|request| unsafe { self.execute(Stream::Aside, request) })
    }

    /// Runs a kernel.
    unsafe fn run(&self, function: Function, extent: Extent, arguments: &[Arg]) -> Result<()> {
        let kernel = Arc::clone(&lock(&self.loaded)[function.0]);
        let given: Vec<u8> = arguments.iter().map(|argument| argument.letter()).collect();
        if given != kernel.signature {
            let [given, declared] = [&given, &kernel.signature].map(|letters| String::from_utf8_lossy(letters));
            return Err(failure(format!("{} is called with ({given}), and declares ({declared})", kernel.name)));
        }
        let mut values: Vec<*mut c_void> = arguments.iter().map(Arg::value).collect();
        let launch = Launch {
            grid: extent.grid,
            threads: [extent.threads, 1, 1],
            shared_bytes: extent.shared,
            seed: self.seed.fetch_add(1, Ordering::Relaxed),
            arguments: values.as_mut_ptr(),
        };
        let running = lock(&kernel.library);
        // SAFETY: the library is loaded, the arguments have the declared types, and where they point to is the
        // caller's promise.
        let error = unsafe { (kernel.launch)(&launch) };
        drop(running);
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: a string literal of the library.
        let message = unsafe { CStr::from_ptr(error) }.to_string_lossy();
        Err(failure(format!("{}: {message}", kernel.name)))
    }
}

impl Driver for Emulated {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn recycles(&self) -> bool {
        !self.compiler.sanitizes()
    }

    fn allocate(&self, bytes: usize) -> Result<Option<u64>> {
        let Ok(layout) = Layout::from_size_align(bytes.max(1), 256) else { return Ok(None) };
        if bytes > self.free_memory()? {
            return Ok(None);
        }
        // Zeroed, as the host may read what nothing has written.
        // SAFETY: the size is not zero.
        let address = unsafe { alloc_zeroed(layout) } as u64;
        if address == 0 {
            return Ok(None);
        }
        lock(&self.blocks).insert(address, layout);
        Ok(Some(address))
    }

    unsafe fn free(&self, address: u64) {
        if let Some(layout) = lock(&self.blocks).remove(&address) {
            // SAFETY: `allocate` took the block with this layout.
            unsafe { dealloc(address as *mut u8, layout) };
        }
    }

    fn free_memory(&self) -> Result<usize> {
        let taken: usize = lock(&self.blocks).values().map(Layout::size).sum();
        Ok(self.properties.memory.saturating_sub(taken))
    }

    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        let _alone = lock(&self.memory);
        // SAFETY: the caller's promise; device memory is the host's here.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn download(&self, pieces: &mut [(u64, &mut [u8])]) -> Result<()> {
        for (from, to) in pieces {
            let _alone = lock(&self.memory);
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(*from as *const u8, to.as_mut_ptr(), to.len()) };
        }
        self.finish(Stream::Work)
    }

    fn allocate_locked(&self, bytes: usize) -> Result<Option<Locked>> {
        let start = self.allocate(bytes)?.and_then(|address| NonNull::new(address as *mut u8));
        // SAFETY: it was allocated for this alone, as long as this.
        Ok(start.map(|start| unsafe { Locked::new(start, bytes) }))
    }

    unsafe fn free_locked(&self, memory: Locked) {
        // SAFETY: the caller's promise.
        unsafe { self.free(memory.into_start().as_ptr() as u64) };
    }

    unsafe fn send(&self, from: &[u8], to: u64) -> Result<()> {
        let _alone = lock(&self.memory);
        // SAFETY: the caller's promise.
        unsafe { lock(&self.copies).send(from, to) }
    }

    fn mark(&self, stream: Stream) -> Result<Mark> {
        let id = self.marks.fetch_add(1, Ordering::Relaxed);
        // SAFETY: it reads and writes no memory.
        unsafe { self.ask(stream, Request::Mark(id))? };
        Ok(Mark { on: stream, id })
    }

    fn wait(&self, stream: Stream, mark: Mark) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.ask(stream, Request::Await(mark.on, mark.id)) }
    }

    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.ask(stream, Request::Copy(from, to, bytes)) }
    }

    unsafe fn fill(&self, stream: Stream, to: u64, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.ask(stream, Request::Fill(to, byte, bytes)) }
    }

    fn load(&self, module: &Module) -> Result<Vec<Function>> {
        let shared = self.compiler.library(module)?;
        let library = lock(&shared);
        let Some(library) = library.as_ref() else { return Err(failure("a library that is not loaded")) };
        let mut loaded = lock(&self.loaded);
        let mut functions = vec![];
        for (number, name) in module.instances().into_iter().enumerate() {
            // SAFETY: EMULATED_ENTRY defines both functions, with these types.
            let (signature, launch) = unsafe {
                let signature = library.get::<unsafe extern "C" fn() -> *const c_char>(format!("signature_{number}"));
                let launch =
                    library.get::<unsafe extern "C" fn(*const Launch) -> *const c_char>(format!("launch_{number}"));
                match (signature, launch) {
                    (Ok(signature), Ok(launch)) => (CStr::from_ptr(signature()).to_bytes().to_vec(), *launch),
                    _ => return Err(failure(format!("{} has no kernel {name}", module.name))),
                }
            };
            loaded.push(Arc::new(Kernel { name, signature, launch, library: Arc::clone(&shared) }));
            functions.push(Function(loaded.len() - 1));
        }
        Ok(functions)
    }

    unsafe fn launch(&self, stream: Stream, function: Function, extent: Extent, arguments: &[Arg]) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.ask(stream, Request::Launch(function, extent, arguments.to_vec())) }
    }

    unsafe fn multiply(&self, stream: Stream, product: &Product) -> Result<bool> {
        // As cuBLASLt, which has no epilogue in f64.
        let adds = product.row != 0 && product.output != DType::F64;
        let product = Product { row: if adds { product.row } else { 0 }, ..*product };
        // SAFETY: as above.
        unsafe { self.ask(stream, Request::Multiply(product)) }.map(|()| adds)
    }

    fn begin_recording(&self) -> Result<()> {
        *lock(&self.recording) = Some(vec![]);
        Ok(())
    }

    fn end_recording(&self) -> Result<RecordingId> {
        let recorded = lock(&self.recording).take().ok_or_else(|| failure("nothing is being recorded"))?;
        let mut recordings = lock(&self.recordings);
        recordings.push(Arc::new(recorded));
        Ok(RecordingId(recordings.len() - 1))
    }

    unsafe fn replay(&self, recording: RecordingId) -> Result<()> {
        let requests = Arc::clone(&lock(&self.recordings)[recording.0]);
        // SAFETY: the caller's promise.
        requests.iter().try_for_each(|(stream, request)| unsafe { self.ask(*stream, request.clone()) })
    }

    fn forget(&self, recording: RecordingId) {
        lock(&self.recordings)[recording.0] = Arc::default();
    }

    fn finish(&self, stream: Stream) -> Result<()> {
        match stream {
            Stream::Work => lock(&self.copies).follow_work(),
            Stream::Aside => return self.execute_aside(None),
            Stream::Copies => lock(&self.copies).arrive(),
        }
        lock(&self.copies).leave()
    }
}
