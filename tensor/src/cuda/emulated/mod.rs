//! The CPU in the role of a GPU: kernels are compiled by the system's C++ compiler with `device.h`, which says how it
//! plays. What it is for: every kernel, and all that the host does around it, runs and is checked on a machine without a
//! GPU; and whoever learns can step through a kernel with a debugger.

mod products;

use super::driver::{Arg, Driver, Extent, Function, Product, Properties, RecordingId};
use super::module::Module;
use crate::{DType, Error, Result};
use libloading::Library;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// The compiler, unless this variable names another.
const COMPILER: &str = "c++";
const COMPILER_VARIABLE: &str = "CXX";
/// Further options for the compiler, separated by blanks: the sanitizers, say.
const OPTIONS_VARIABLE: &str = "BIFORMER_EMULATED_OPTIONS";
/// The seed of the order in which threads run, where it is to be another.
const SEED_VARIABLE: &str = "BIFORMER_EMULATED_SEED";

/// The libraries that this process has asked for: one compiles them, and one at a time runs a kernel, whose shared memory
/// and fibers are statics of the library.
static LIBRARIES: LazyLock<Mutex<HashMap<PathBuf, Shared>>> = LazyLock::new(Mutex::default);

type Shared = Arc<Mutex<Option<Library>>>;

/// The emulated device.
pub struct Emulated {
    properties: Properties,
    compiler: String,
    options: Vec<String>,
    seed: AtomicU64,
    blocks: Mutex<HashMap<u64, Layout>>,
    loaded: Mutex<Vec<Arc<Kernel>>>,
    /// What is being recorded, if anything is, and what has been.
    recording: Mutex<Option<Vec<Request>>>,
    recordings: Mutex<Vec<Arc<Vec<Request>>>>,
}

/// What can be recorded.
enum Request {
    Copy(u64, u64, usize),
    Fill(u64, u8, usize),
    Launch(Function, Extent, Vec<Arg>),
    Multiply(Product),
}

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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Emulated {
    /// Opens the device. [`Error::Gpu`] where there is no C++ compiler.
    pub fn open(seed: u64) -> Result<Self> {
        let compiler = std::env::var(COMPILER_VARIABLE).unwrap_or_else(|_| COMPILER.into());
        let works = Command::new(&compiler).arg("--version").output().is_ok_and(|output| output.status.success());
        if !works {
            return Err(failure(format!(
                "needs a C++ compiler, and {compiler} is none: install g++ or clang, or name one in {COMPILER_VARIABLE}"
            )));
        }
        let options = std::env::var(OPTIONS_VARIABLE).unwrap_or_default();
        let seed = std::env::var(SEED_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(seed);
        Ok(Self {
            properties: Properties {
                name: "emulated".into(),
                capability: (8, 0),
                multiprocessors: 1,
                memory: usize::MAX / 4,
                shared_memory: 227 << 10,
            },
            compiler,
            options: options.split_whitespace().map(str::to_owned).collect(),
            seed: AtomicU64::new(seed),
            blocks: Mutex::default(),
            loaded: Mutex::default(),
            recording: Mutex::default(),
            recordings: Mutex::default(),
        })
    }

    /// The module as a library, compiled now or before, and loaded.
    fn library(&self, module: &Module) -> Result<Shared> {
        let mut source =
            format!("#include \"prelude.cuh\"\n#line 1 \"{}/kernel.cu\"\n{}\n", module.name, module.source);
        for (number, instance) in module.instances().iter().enumerate() {
            source.push_str(&format!("EMULATED_ENTRY({number}, {instance})\n"));
        }
        let mut files: Vec<(&str, &str)> =
            vec![("device.h", include_str!("device.h")), ("instructions.h", include_str!("instructions.h"))];
        for header in module.all_headers() {
            files.push(header);
        }
        let mut hasher = DefaultHasher::new();
        (&source, &files, &self.compiler, &self.options).hash(&mut hasher);
        let folder = std::env::temp_dir().join(format!("biformer-emulated-{}", user()));
        let path = folder.join(format!("{}-{:016x}.so", module.name, hasher.finish()));
        let shared = Arc::clone(lock(&LIBRARIES).entry(path.clone()).or_default());
        let mut library = lock(&shared);
        if library.is_none() {
            if !path.exists() {
                self.compile(module, &source, &files, &path)?;
            }
            // SAFETY: the library is our own compilation, whose loading runs no code.
            let loaded = unsafe { Library::new(&path) };
            *library = Some(loaded.map_err(|error| failure(format!("cannot load {}: {error}", path.display())))?);
        }
        drop(library);
        Ok(shared)
    }

    /// Takes a request into what is being recorded, if anything is.
    fn records(&self, request: impl FnOnce() -> Request) -> bool {
        lock(&self.recording).as_mut().map(|recorded| recorded.push(request())).is_some()
    }

    fn compile(&self, module: &Module, source: &str, headers: &[(&str, &str)], library: &Path) -> Result<()> {
        let io = |path: &Path, error: std::io::Error| failure(format!("cannot write {}: {error}", path.display()));
        // A folder of its own: other processes may compile the same module.
        let work = library.with_extension(std::process::id().to_string());
        std::fs::create_dir_all(&work).map_err(|error| io(&work, error))?;
        for (name, text) in headers.iter().chain(&[("kernel.cpp", source)]) {
            let path = work.join(name);
            std::fs::write(&path, text).map_err(|error| io(&path, error))?;
        }
        let built = work.join("kernel.so");
        let output = Command::new(&self.compiler)
            // Hidden, or the loader would let libraries share what a template that both have calls static: shared memory.
            .args(["-std=c++17", "-O2", "-g1", "-DEMULATED", "-fPIC", "-shared", "-fno-strict-aliasing"])
            .arg("-fvisibility=hidden")
            .args(["-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-variable"])
            .args(&self.options)
            .arg("-I")
            .arg(&work)
            .arg(work.join("kernel.cpp"))
            .arg("-o")
            .arg(&built)
            .output()
            .map_err(|error| failure(format!("cannot run {}: {error}", self.compiler)))?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            return Err(failure(format!("{} does not compile:\n{log}", module.name)));
        }
        // In one step, so that nobody sees half a library.
        std::fs::rename(&built, library).map_err(|error| io(library, error))?;
        let _ = std::fs::remove_dir_all(&work); // what is left behind does no harm
        Ok(())
    }
}

/// Something that tells users of one machine apart, as they share its folder for temporary files.
fn user() -> String {
    std::env::var("USER").or_else(|_| std::env::var("LOGNAME")).unwrap_or_else(|_| "user".into())
}

impl Driver for Emulated {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn recycles(&self) -> bool {
        !self.options.iter().any(|option| option.starts_with("-fsanitize"))
    }

    fn allocate(&self, bytes: usize) -> Result<Option<u64>> {
        let Ok(layout) = Layout::from_size_align(bytes.max(1), 256) else { return Ok(None) };
        // SAFETY: the size is not zero.
        let address = unsafe { alloc(layout) } as u64;
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
        Ok(self.properties.memory)
    }

    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        // SAFETY: the caller's promise; device memory is the host's here.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        if self.records(|| Request::Copy(from, to, bytes)) {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<()> {
        if self.records(|| Request::Fill(to, byte, bytes)) {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { (to as *mut u8).write_bytes(byte, bytes) };
        Ok(())
    }

    fn load(&self, module: &Module) -> Result<Vec<Function>> {
        let shared = self.library(module)?;
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

    unsafe fn launch(&self, function: Function, extent: Extent, arguments: &[Arg]) -> Result<()> {
        if self.records(|| Request::Launch(function, extent, arguments.to_vec())) {
            return Ok(());
        }
        let kernel = Arc::clone(&lock(&self.loaded)[function.0]);
        let given: Vec<u8> = arguments.iter().map(|argument| argument.letter()).collect();
        if given != kernel.signature {
            let [given, declared] = [&given, &kernel.signature].map(|letters| String::from_utf8_lossy(letters));
            return Err(failure(format!("{} is called with ({given}), and declares ({declared})", kernel.name)));
        }
        if extent.shared as usize > self.properties.shared_memory {
            return Err(failure(format!("{} asks for {} bytes of shared memory", kernel.name, extent.shared)));
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

    fn can_end(&self, product: &Product) -> bool {
        // As cuBLASLt.
        product.output != DType::F64 && (product.row == 0 || product.sums == 0)
    }

    unsafe fn multiply(&self, product: &Product) -> Result<()> {
        if self.records(|| Request::Multiply(*product)) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { products::multiply(product) }
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
        for request in requests.iter() {
            // SAFETY: the caller's promise.
            unsafe {
                match request {
                    Request::Copy(from, to, bytes) => self.copy(*from, *to, *bytes)?,
                    Request::Fill(to, byte, bytes) => self.fill(*to, *byte, *bytes)?,
                    Request::Launch(function, extent, arguments) => self.launch(*function, *extent, arguments)?,
                    Request::Multiply(product) => self.multiply(product)?,
                }
            }
        }
        Ok(())
    }

    fn forget(&self, recording: RecordingId) {
        lock(&self.recordings)[recording.0] = Arc::default();
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}
