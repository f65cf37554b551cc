//! Kernels as source: what an operation's `kernel.cu` holds, and how it is called.

use super::Gpu;
use super::driver::{Arg, Extent, Function};
use super::layout::Layout;
use super::memory::Out;
use crate::rng::Philox;
use crate::{DType, Error, Result, Tensor};
use smallvec::SmallVec;
use std::sync::Arc;

/// The source of some kernels, which are compiled together.
///
/// A kernel is named as C++ names it, with a capital T for the type of the activations: `dwconv_forward<T, 5>` stands
/// for `dwconv_forward<float, 5>`, `<double, 5>` and `<bf16, 5>`. One without T is there once.
#[derive(Debug)]
pub struct Module {
    /// The operation.
    pub name: &'static str,
    /// CUDA C++ that may include `prelude.cuh` and [`Module::headers`].
    pub source: &'static str,
    /// Other sources that it includes: name and text.
    pub headers: &'static [(&'static str, &'static str)],
    /// The kernels.
    pub kernels: &'static [&'static str],
}

/// The types that a kernel's T stands for.
const TYPES: [DType; 3] = [DType::F32, DType::F64, DType::Bf16];

/// The name of an element type in C++.
fn c_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::Bf16 => "bf16",
        DType::Index => "u32",
    }
}

/// Whether a T stands alone in a kernel's name.
fn is_generic(kernel: &str) -> bool {
    kernel.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "T")
}

impl Module {
    /// The kernels with their types filled in, as C++ names them.
    pub fn instances(&self) -> Vec<String> {
        let types = |kernel: &&'static str| if is_generic(kernel) { &TYPES[..] } else { &TYPES[..1] };
        let filled = |kernel: &str, dtype: DType| -> String {
            // Only the template's arguments: a name may contain the letter.
            let (name, arguments) = kernel.split_once('<').unwrap_or((kernel, ""));
            let arguments: Vec<&str> =
                arguments.trim_end_matches('>').split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
            let arguments: Vec<&str> =
                arguments.iter().map(|&part| if part == "T" { c_name(dtype) } else { part }).collect();
            if arguments.is_empty() { name.to_owned() } else { format!("{name}<{}>", arguments.join(", ")) }
        };
        self.kernels.iter().flat_map(|kernel| types(kernel).iter().map(move |&dtype| filled(kernel, dtype))).collect()
    }

    /// The place of a kernel among [`Module::instances`], for this type.
    fn place(&self, kernel: &str, dtype: DType) -> Option<usize> {
        let mut place = 0;
        for known in self.kernels {
            let types = if is_generic(known) { TYPES.len() } else { 1 };
            if *known == kernel {
                let index = if types == 1 { Some(0) } else { TYPES.iter().position(|&known| known == dtype) };
                return index.map(|index| place + index);
            }
            place += types;
        }
        None
    }

    /// The sources that may be included, the common one among them.
    pub(super) fn all_headers(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        [("prelude.cuh", include_str!("prelude.cuh"))].into_iter().chain(self.headers.iter().copied())
    }

    /// Begins the call of a kernel of this module for activations of type `dtype`. The module is compiled at its first
    /// call on a device. Errors: [`Error::DType`] where the kernel is not there for the type, [`Error::Gpu`] when it
    /// does not compile. Panics when the module has no such kernel.
    pub fn launch<'a>(&'static self, gpu: &'a Arc<Gpu>, kernel: &'static str, dtype: DType) -> Result<Launch<'a>> {
        assert!(self.kernels.contains(&kernel), "the module {} has no kernel {kernel}", self.name);
        let place = self.place(kernel, dtype).ok_or(Error::DType {
            op: self.name,
            expected: "f32, f64 or bf16",
            actual: dtype,
        })?;
        let function = gpu.functions(self)?[place];
        let extent = Extent { grid: [1, 1, 1], threads: 256, shared: 0 };
        Ok(Launch { gpu, op: self.name, kernel, function, extent, arguments: SmallVec::new() })
    }
}

/// A call of a kernel under way: how many threads, and which arguments.
pub struct Launch<'a> {
    gpu: &'a Arc<Gpu>,
    op: &'static str,
    kernel: &'static str,
    function: Function,
    extent: Extent,
    arguments: SmallVec<[Arg; 16]>,
}

impl Launch<'_> {
    /// Threads of a block: 256 unless told.
    pub fn threads(mut self, threads: usize) -> Self {
        self.extent.threads = threads as u32;
        self
    }

    /// So many blocks. Errors at [`Launch::run`] when there are more than a grid can have.
    pub fn blocks(mut self, blocks: usize) -> Self {
        self.extent.grid[0] = blocks.try_into().unwrap_or(u32::MAX);
        self
    }

    /// Blocks along three axes; the second and third at most 65,535.
    pub fn grid(mut self, grid: [usize; 3]) -> Self {
        self.extent.grid = grid.map(|blocks| blocks.try_into().unwrap_or(u32::MAX));
        self
    }

    /// As many blocks as it takes for one thread an element.
    pub fn over(self, elements: usize) -> Self {
        let blocks = elements.div_ceil(self.extent.threads as usize);
        self.blocks(blocks)
    }

    /// As many blocks as it takes for one thread a `Pack` of 16 bytes.
    pub fn over_packs(self, elements: usize, dtype: DType) -> Self {
        self.over(elements.div_ceil(16 / dtype.size()))
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
    pub fn optional(mut self, tensor: Option<&Tensor>) -> Result<Self> {
        match tensor {
            Some(tensor) => self.input(tensor),
            None => {
                self.arguments.push(Arg::Pointer(0));
                Ok(self)
            }
        }
    }

    /// Any view that the kernel reads, as two parameters: a pointer, and a `Layout`. [`Error::Argument`] when it has more
    /// than six axes.
    pub fn view(self, tensor: &Tensor) -> Result<Self> {
        let address = tensor.address(self.op, self.gpu)?;
        self.pointer(address).layout(&Layout::plain(tensor.shape(), tensor.strides()))
    }

    /// As [`Launch::view`], for a kernel that asks for nothing but the places of elements in order: the axes are not the
    /// view's, but as few as lead there.
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

    /// Where a gradient goes, as two parameters: `wide<T>*` or `T*` and `int accumulate`; null where nobody wants it.
    pub fn out(mut self, out: Option<&Out<'_>>) -> Self {
        self.arguments.push(Arg::Pointer(out.map_or(0, |out| out.address())));
        self.int(out.is_some_and(|out| out.accumulate).into())
    }

    /// An address.
    pub fn pointer(mut self, address: u64) -> Self {
        self.arguments.push(Arg::Pointer(address));
        self
    }

    /// An `int`. Errors at [`Launch::run`] cannot come of it: extents that do not fit are refused before.
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

    /// A stream of random numbers, as two parameters: `u64 seed` and `u64 stream`, which make a `Philox`.
    pub fn random(mut self, rng: &Philox) -> Self {
        self.arguments.extend(rng.key().map(|word| Arg::I64(word as i64)));
        self
    }

    /// Runs the kernel, unless there are no blocks.
    ///
    /// # Safety
    /// The arguments are those that the kernel declares, and with them it reads and writes only within the tensors
    /// that were given.
    pub unsafe fn run(self) -> Result<()> {
        let Extent { grid, threads, .. } = self.extent;
        if grid.contains(&0) {
            return Ok(());
        }
        if grid[0] > i32::MAX as u32 || grid[1] > 65_535 || grid[2] > 65_535 || threads > 1024 {
            let message = format!("{} blocks of {threads} threads are more than a GPU runs at once", grid[0]);
            return Err(Error::argument(self.op, message));
        }
        // SAFETY: the caller's promise.
        unsafe { self.gpu.driver().launch(self.function, self.extent, &self.arguments) }
            .map_err(|error| error.within(self.kernel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static MODULE: Module = Module {
        name: "example",
        source: "",
        headers: &[],
        kernels: &["plain", "generic<T>", "Title<T, 5>", "fixed<7>"],
    };

    #[test]
    fn types_are_filled_in_and_found_again() {
        let instances = MODULE.instances();
        let expected = [
            "plain",
            "generic<float>",
            "generic<double>",
            "generic<bf16>",
            "Title<float, 5>",
            "Title<double, 5>",
            "Title<bf16, 5>",
            "fixed<7>",
        ];
        assert_eq!(instances, expected);
        let place = |kernel, dtype| MODULE.place(kernel, dtype).map(|place| instances[place].as_str());
        assert_eq!(place("plain", DType::Bf16), Some("plain"));
        assert_eq!(place("generic<T>", DType::F64), Some("generic<double>"));
        assert_eq!(place("Title<T, 5>", DType::Bf16), Some("Title<bf16, 5>"));
        assert_eq!(place("generic<T>", DType::Index), None);
        assert_eq!(place("missing", DType::F32), None);
    }
}
