//! The interface to a GPU that the rest of this project uses, with two implementations: an NVIDIA GPU
//! ([`nvidia`](super::nvidia)), and a device that is emulated on the CPU ([`emulated`](super::emulated)).

use super::Module;
use super::locked::Locked;
use crate::{DType, Result};
use std::ffi::c_void;

/// A kernel of a loaded module: its place in the driver's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(pub(super) usize);

/// Recorded work: its place in the driver's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingId(pub(super) usize);

/// An argument of a kernel, as the kernel declares it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// A pointer to device memory; 0 for none.
    Pointer(u64),
    /// `int`
    I32(i32),
    /// `i64`
    I64(i64),
    /// `float`
    F32(f32),
    /// `double`
    F64(f64),
    /// `Layout`: six extents, then six strides.
    Layout([i64; 12]),
}

impl Arg {
    /// A pointer to its value, as a launch takes it.
    pub(super) fn value(&self) -> *mut c_void {
        match self {
            Arg::Pointer(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::I32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::I64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::F64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::Layout(value) => std::ptr::from_ref(value).cast_mut().cast(),
        }
    }

    /// The letter by which `emulated/device.h` calls a parameter of this type.
    pub(super) fn letter(self) -> u8 {
        match self {
            Arg::Pointer(_) => b'p',
            Arg::I32(_) => b'i',
            Arg::I64(_) => b'l',
            Arg::F32(_) => b'f',
            Arg::F64(_) => b'd',
            Arg::Layout(_) => b'v',
        }
    }
}

/// The launch configuration of a kernel: grid, threads per block, and bytes of dynamic shared memory per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, a multiple of 32.
    pub threads: u32,
    /// Bytes.
    pub shared: u32,
}

/// A matrix of a product, in device memory, row-major. If `transposed`, memory holds its transpose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    /// Where it begins.
    pub address: u64,
    /// Whether the transpose is what lies there.
    pub transposed: bool,
    /// From one matrix of a batch to the next, in elements.
    pub stride: usize,
}

/// C = A·B plus the terms below, for each matrix of a batch: A is (m, k), B is (k, n), C is (m, n). An address of 0
/// means that the term is absent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    /// (m, n, k)
    pub extents: [usize; 3],
    /// How many products.
    pub batch: usize,
    /// A.
    pub a: Operand,
    /// B.
    pub b: Operand,
    /// C; never transposed.
    pub c: Operand,
    /// The type of A and B.
    pub inputs: DType,
    /// The type of C: that of the inputs, or f32.
    pub output: DType,
    /// A matrix like C that is added: C itself if the product accumulates into C.
    pub plus: u64,
    /// A row (n) of C's type that is added to every row.
    pub row: u64,
    /// Whether f32 operands may be rounded to TF32, whose mantissa has 10 bits.
    pub tf32: bool,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq)]
pub struct Properties {
    /// Its name, as the vendor gives it.
    pub name: String,
    /// The compute capability: 9.0 is (9, 0).
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of memory.
    pub memory: usize,
    /// The most bytes of shared memory that a block can have.
    pub shared_memory: usize,
}

/// One of a device's streams: each executes its requests in order, concurrently with the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// All requests but those of the other two.
    Work,
    /// [Work that nothing waits for yet](super::Gpu::aside). If there is too much to do, the other work has priority.
    Aside,
    /// [`Driver::send`].
    Copies,
}

/// A point in a stream: behind all requests that were made on it before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The stream.
    pub(super) on: Stream,
    /// By which the driver knows it.
    pub(super) id: u64,
}

/// A device. Requests that take no stream are made on [`Stream::Work`], but for [`Driver::send`]. Those of one stream
/// execute in the order in which they were made, and may be asynchronous; a download never is. Those of different
/// streams are ordered by [`Driver::wait`] alone.
///
/// # Safety
/// Of the unsafe functions: addresses lie, with all the bytes that are read or written there, in memory of
/// [`Driver::allocate`] that has not been freed.
#[allow(clippy::missing_safety_doc)] // said above, once
pub trait Driver: Send + Sync {
    /// What it is.
    fn properties(&self) -> &Properties;

    /// Whether the pool should recycle memory, in sizes that are rounded up. Otherwise each tensor gets an allocation
    /// of exactly its length, so that a sanitizer notices when a kernel accesses memory beyond its end.
    fn recycles(&self) -> bool {
        true
    }

    /// New memory, aligned to 256 bytes; none where there is not enough.
    fn allocate(&self, bytes: usize) -> Result<Option<u64>>;

    /// Gives memory back.
    unsafe fn free(&self, address: u64);

    /// Free bytes of memory.
    fn free_memory(&self) -> Result<usize>;

    /// Copies from the host.
    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<()>;

    /// Copies to the host, once everything asked of the stream before has been done: from each address as many bytes as
    /// its slice has.
    unsafe fn download(&self, pieces: &mut [(u64, &mut [u8])]) -> Result<()>;

    /// Page-locked host memory, from which [`Driver::send`] copies asynchronously; `None` if it cannot be allocated.
    fn allocate_locked(&self, bytes: usize) -> Result<Option<Locked>>;

    /// Gives page-locked memory back.
    unsafe fn free_locked(&self, memory: Locked);

    /// Copies from the host on [`Stream::Copies`]. The source must stay unchanged until that stream is
    /// [finished](Driver::finish), and nothing else may use the target until an [order](Driver::order) makes it wait
    /// for the copy.
    unsafe fn send(&self, from: &[u8], to: u64) -> Result<()>;

    /// Marks the present end of a stream.
    fn mark(&self, stream: Stream) -> Result<Mark>;

    /// Makes all later requests on a stream wait for what another one was asked for before the mark, which can be
    /// waited for once. The host does not wait.
    fn wait(&self, stream: Stream, mark: Mark) -> Result<()>;

    /// Releases a mark that nothing will wait for.
    fn drop_mark(&self, _mark: Mark) {}

    /// Makes all later requests on `then` wait for all earlier requests on `first`.
    fn order(&self, first: Stream, then: Stream) -> Result<()> {
        let mark = self.mark(first)?;
        self.wait(then, mark).inspect_err(|_| self.drop_mark(mark))
    }

    /// Copies within the device, between places that do not overlap.
    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Fills memory with a byte.
    unsafe fn fill(&self, stream: Stream, to: u64, byte: u8, bytes: usize) -> Result<()>;

    /// Compiles a module, or takes it from the cache on disk, and gives its kernels, in the order of
    /// [`Module::instances`].
    fn load(&self, module: &Module) -> Result<Vec<Function>>;

    /// Runs a kernel. The arguments must be those that it declares, and it must stay within memory that is the
    /// caller's.
    unsafe fn launch(&self, stream: Stream, function: Function, extent: Extent, arguments: &[Arg]) -> Result<()>;

    /// Multiplies matrices, none of which is empty. Whether the row was added: not if the device cannot do that on the
    /// way, at little cost. A lack of memory is an error and not a no: a row that is added later gives other bits.
    unsafe fn multiply(&self, stream: Stream, product: &Product) -> Result<bool>;

    /// From now on requests of [`Stream::Work`] are recorded instead of executed, and so are those of other streams
    /// from when these are made to wait for it.
    fn begin_recording(&self) -> Result<()>;

    /// Ends the recording. Before, [`Stream::Work`] must have been made to wait for all else that was recorded.
    fn end_recording(&self) -> Result<RecordingId>;

    /// Executes recorded work once more. Later requests of [`Stream::Work`] wait for all of it.
    unsafe fn replay(&self, recording: RecordingId) -> Result<()>;

    /// Releases recorded work.
    fn forget(&self, recording: RecordingId);

    /// Waits until everything asked of a stream has been done, and reports what went wrong on the way.
    fn finish(&self, stream: Stream) -> Result<()>;

    /// Tells a profiler, if there is one, whether to record what is launched from now on.
    fn tell_profiler(&self, _records: bool) {}
}
