//! Kernels as source: what an operation's `kernel.cu` holds, and how it is called.

use super::Gpu;
use super::driver::{Arg, Extent, Function, Stream};
use super::layout::Layout;
use super::memory::Out;
use crate::rng::Philox;
use crate::{DType, Device, Error, Result, Tensor};
use smallvec::SmallVec;
use std::sync::Arc;

/// The source of some kernels, which are compiled together.
///
/// A kernel has its C++ name. The template argument `T` stands for each of float, double and bf16, and `a|b` for each
/// of a and b: `dwconv_forward<T, 3|5>` is six kernels.
#[derive(Debug)]
pub struct Module {
    /// The operation.
    pub name: &'static str,
    /// CUDA C++ that begins with `prelude.cuh`, and may include `instructions.cuh`, `words.cuh`, `sums.cuh`,
    /// `rows.cuh` and [`Module::headers`].
    pub source: &'static str,
    /// Other sources that it includes: name and text.
    pub headers: &'static [(&'static str, &'static str)],
    /// The kernels.
    pub kernels: &'static [&'static str],
}

/// The types that a kernel's T stands for.
const TYPES: [DType; 3] = [DType::F32, DType::F64, DType::Bf16];

/// The name of an element type in C++.
pub(super) fn c_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::Bf16 => "bf16",
        DType::Index => "u32",
    }
}

/// A kernel's name and the arguments of its template.
fn parts(kernel: &str) -> (&str, impl Iterator<Item = &str>) {
    let (name, arguments) = kernel.split_once('<').unwrap_or((kernel, ""));
    (name, arguments.trim_end_matches('>').split(',').map(str::trim).filter(|argument| !argument.is_empty()))
}

fn joined(name: &str, arguments: &[&str]) -> String {
    if arguments.is_empty() { name.to_owned() } else { format!("{name}<{}>", arguments.join(", ")) }
}

/// A kernel's name with T filled in.
fn for_type(kernel: &str, dtype: DType) -> String {
    let (name, arguments) = parts(kernel);
    let arguments: Vec<&str> = arguments.map(|part| if part == "T" { c_name(dtype) } else { part }).collect();
    joined(name, &arguments)
}

/// All kernels that a name with alternatives stands for.
fn expand(kernel: &str) -> Vec<String> {
    let (name, arguments) = parts(kernel);
    let mut lists: Vec<Vec<&str>> = vec![vec![]];
    for argument in arguments {
        let choices: Vec<&str> =
            if argument == "T" { TYPES.map(c_name).to_vec() } else { argument.split('|').map(str::trim).collect() };
        let with_each = lists.iter().flat_map(|list| choices.iter().map(move |choice| [&list[..], &[choice]].concat()));
        lists = with_each.collect();
    }
    lists.iter().map(|arguments| joined(name, arguments)).collect()
}

impl Module {
    /// The kernels one by one, as C++ names them.
    pub fn instances(&self) -> Vec<String> {
        self.kernels.iter().flat_map(|kernel| expand(kernel)).collect()
    }

    /// The sources that may be included, the common ones among them.
    pub(super) fn all_headers(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let common = [
            ("prelude.cuh", include_str!("prelude.cuh")),
            ("instructions.cuh", include_str!("instructions.cuh")),
            ("words.cuh", include_str!("words.cuh")),
            ("sums.cuh", include_str!("sums.cuh")),
            ("rows.cuh", include_str!("rows.cuh")),
        ];
        common.into_iter().chain(self.headers.iter().copied())
    }

    /// Prepares the launch of a kernel of this module, named with its template arguments; T stands for `dtype`. The
    /// module is compiled before its first launch on a device. Errors: [`Error::DType`] if T cannot be that type,
    /// [`Error::Gpu`] if the module does not compile. Panics if it has no such kernel.
    pub fn launch<'a>(&'static self, gpu: &'a Arc<Gpu>, kernel: &str, dtype: DType) -> Result<Launch<'a>> {
        if !TYPES.contains(&dtype) {
            return Err(Error::DType { op: self.name, expected: "f32, f64 or bf16", actual: dtype });
        }
        let kernel = for_type(kernel, dtype);
        let function = gpu.functions(self)?.get(&kernel).copied();
        let function = function.unwrap_or_else(|| panic!("the module {} has no kernel {kernel}", self.name));
        let extent = Extent { grid: [1, 1, 1], threads: 256, shared: 0 };
        let (stream, arguments) = (gpu.stream(), SmallVec::new());
        Ok(Launch { gpu, op: self.name, kernel, function, stream, extent, elements: None, arguments })
    }

    /// As [`Module::launch`], on the GPU that a tensor is on, with the type of its elements for T. [`Error::Device`]
    /// where it is on none.
    pub fn launch_on<'a>(&'static self, tensor: &'a Tensor, kernel: &str) -> Result<Launch<'a>> {
        self.launch(tensor.gpu(self.name)?, kernel, tensor.dtype())
    }
}

/// A kernel launch that is being prepared: its configuration and its arguments.
#[derive(Debug)]
pub struct Launch<'a> {
    gpu: &'a Arc<Gpu>,
    op: &'static str,
    kernel: String,
    function: Function,
    /// The one for which the kernel was loaded, and whose counters it uses.
    stream: Stream,
    extent: Extent,
    /// The number of threads, if the number of blocks is to be derived from it.
    elements: Option<usize>,
    arguments: SmallVec<[Arg; 16]>,
}

impl Launch<'_> {
    /// Threads of a block: 256 unless told.
    pub fn threads(mut self, threads: usize) -> Self {
        self.extent.threads = threads as u32;
        self
    }

    /// A grid of this many blocks. More than a grid can have are an error in [`Launch::run`].
    pub fn blocks(mut self, blocks: usize) -> Self {
        self.elements = None;
        self.extent.grid[0] = blocks.try_into().unwrap_or(u32::MAX);
        self
    }

    /// Blocks along three axes; the second and third at most 65,535.
    pub fn grid(mut self, grid: [usize; 3]) -> Self {
        self.elements = None;
        self.extent.grid = grid.map(|blocks| blocks.try_into().unwrap_or(u32::MAX));
        self
    }

    /// As many blocks as it takes for one thread an element.
    pub fn over(mut self, elements: usize) -> Self {
        self.elements = Some(elements);
        self
    }

    /// As many blocks as it takes for one thread per `Pack` of 16 bytes.
    pub fn over_packs(self, elements: usize, dtype: DType) -> Self {
        self.over(elements.div_ceil(16 / dtype.size()))
    }

    /// As many blocks as it takes for one warp per row.
    pub fn over_warps(self, rows: usize) -> Self {
        self.over(rows.saturating_mul(32))
    }

    /// Bytes of dynamic shared memory.
    pub fn shared(mut self, bytes: usize) -> Self {
        self.extent.shared = bytes.try_into().unwrap_or(u32::MAX);
        self
    }

    /// A tensor that the kernel reads: a pointer to its first element. Errors: [`Error::NotContiguous`],
    /// [`Error::Device`].
    pub fn input(mut self, tensor: &Tensor) -> Result<Self> {
        if !tensor.is_contiguous() {
            return Err(tensor.not_contiguous(self.op));
        }
        self.arguments.push(Arg::Pointer(tensor.address(self.op, self.gpu)?));
        Ok(self)
    }

    /// As [`Launch::input`], of a tensor that may be missing: then the pointer is null.
    pub fn optional(self, tensor: Option<&Tensor>) -> Result<Self> {
        match tensor {
            Some(tensor) => self.input(tensor),
            None => Ok(self.pointer(0)),
        }
    }

    /// Any view that the kernel reads, as two parameters: a pointer, and a `Layout`. [`Error::Argument`] when it has
    /// more than six axes.
    pub fn view(self, tensor: &Tensor) -> Result<Self> {
        let address = tensor.address(self.op, self.gpu)?;
        self.pointer(address).layout(&Layout::plain(tensor.shape(), tensor.strides()))
    }

    /// As [`Launch::view`], for a kernel that only enumerates the elements in order: the axes of the `Layout` are not
    /// the view's, but merged as far as possible.
    pub fn elements(self, tensor: &Tensor) -> Result<Self> {
        let address = tensor.address(self.op, self.gpu)?;
        self.pointer(address).layout(&Layout::merged(tensor.shape(), tensor.strides()))
    }

    /// A `Layout`. [`Error::Argument`] when it has more than six axes.
    pub(super) fn layout(mut self, layout: &Layout) -> Result<Self> {
        self.arguments.push(Arg::Layout(layout.argument(self.op)?));
        Ok(self)
    }

    /// A tensor that the kernel writes: a pointer to its first element. Errors: [`Error::NotContiguous`],
    /// [`Error::Device`], [`Error::Shared`].
    pub fn output(mut self, tensor: &mut Tensor) -> Result<Self> {
        self.arguments.push(Arg::Pointer(tensor.address_mut(self.op, self.gpu)?));
        Ok(self)
    }

    /// As [`Launch::output`], of a tensor that may be missing: then the pointer is null.
    pub fn optional_output(self, tensor: Option<&mut Tensor>) -> Result<Self> {
        match tensor {
            Some(tensor) => self.output(tensor),
            None => Ok(self.pointer(0)),
        }
    }

    /// Where a gradient goes, as two parameters: `wide<T>*` or `T*` and `int accumulate`; null where nobody wants it.
    /// [`Error::Device`] for a place on another GPU.
    pub fn out(self, out: Option<&Out<'_>>) -> Result<Self> {
        let Some(out) = out else { return Ok(self.pointer(0).int(0)) };
        if !Arc::ptr_eq(out.gpu(), self.gpu) {
            let [own, other] = [self.gpu, out.gpu()].map(|gpu| Device::Cuda(Arc::clone(gpu)));
            return Err(Error::device(self.op, &own, &other));
        }
        Ok(self.pointer(out.address()).int(out.accumulate.into()))
    }

    /// An address.
    pub fn pointer(mut self, address: u64) -> Self {
        self.arguments.push(Arg::Pointer(address));
        self
    }

    /// An `int`. For extents, which may not fit, there is [`Launch::extents`].
    pub fn int(mut self, value: i32) -> Self {
        self.arguments.push(Arg::I32(value));
        self
    }

    /// Extents, as `int`s. [`Error::Argument`] when one does not fit.
    pub fn extents<const N: usize>(mut self, extents: [usize; N]) -> Result<Self> {
        for extent in extents {
            let value = i32::try_from(extent).map_err(|_| {
                Error::argument(self.op, format!("an extent of {extent} is more than a GPU kernel takes"))
            })?;
            self.arguments.push(Arg::I32(value));
        }
        Ok(self)
    }

    /// A number of elements, an `i64`.
    pub fn count(mut self, count: usize) -> Self {
        self.arguments.push(Arg::I64(count as i64));
        self
    }

    /// A number: `double` where the activations are, otherwise `float`.
    pub fn number(mut self, value: f64, dtype: DType) -> Self {
        self.arguments.push(if dtype == DType::F64 { Arg::F64(value) } else { Arg::F32(value as f32) });
        self
    }

    /// A stream of random numbers, as three parameters that make a `Philox`: `const u64* key, u64 seed, u64 stream`.
    pub fn random(mut self, rng: &Philox) -> Result<Self> {
        self.arguments.push(Arg::Pointer(self.gpu.key_address(rng)?));
        self.arguments.extend(rng.key().map(|word| Arg::I64(word as i64)));
        Ok(self)
    }

    /// Runs the kernel, unless there are no blocks. Errors: [`Error::Argument`] for more blocks, threads or shared
    /// memory than the GPU allows, and if it was prepared outside of work [aside](Gpu::aside) and is to run within it,
    /// or the other way round; [`Error::Gpu`].
    ///
    /// # Safety
    /// The arguments are those that the kernel declares, and with them it reads and writes only within the tensors
    /// that were given.
    pub unsafe fn run(mut self) -> Result<()> {
        if let Some(elements) = self.elements {
            let blocks = elements.div_ceil(self.extent.threads as usize);
            self = self.blocks(blocks);
        }
        if self.stream != self.gpu.stream_to_ask()? {
            return Err(Error::argument(
                self.op,
                "a launch that was prepared outside of work aside cannot run within it, nor the other way round",
            ));
        }
        let Extent { grid, threads, .. } = self.extent;
        if grid.contains(&0) {
            return Ok(());
        }
        if grid[0] > i32::MAX as u32 || grid[1] > 65_535 || grid[2] > 65_535 || threads > 1024 {
            let [x, y, z] = grid;
            let message = format!(
                "a grid of {x}x{y}x{z} blocks of {threads} threads is larger than a GPU allows: use a smaller batch"
            );
            return Err(Error::argument(self.op, message));
        }
        let (asked, most) = (self.extent.shared as usize, self.gpu.properties().shared_memory);
        if asked > most {
            let message = format!("a block needs {asked} bytes of shared memory, but this GPU allows {most}");
            return Err(Error::argument(self.op, message));
        }
        // SAFETY: the caller's promise.
        let launch = || unsafe { self.gpu.driver.launch(self.stream, self.function, self.extent, &self.arguments) };
        self.gpu.with_room(launch).map_err(|error| error.within(&self.kernel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_and_alternatives_are_filled_in() {
        let kernels = &["plain", "generic<T>", "Title<T, 3|5>", "fixed<7, false|true>"];
        let module = Module { name: "example", source: "", headers: &[], kernels };
        let expected = "plain; generic<float>; generic<double>; generic<bf16>; Title<float, 3>; Title<float, 5>; \
                        Title<double, 3>; Title<double, 5>; Title<bf16, 3>; Title<bf16, 5>; fixed<7, false>; fixed<7, true>";
        assert_eq!(module.instances().join("; "), expected);
        assert_eq!(for_type("Title<T, 5>", DType::Bf16), "Title<bf16, 5>");
        assert_eq!(for_type("plain", DType::F64), "plain");
    }
}
