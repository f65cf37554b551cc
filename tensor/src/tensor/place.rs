//! Tensors on devices: how they come there and back, and what kernels need of them.

use super::carried::Carried;
use super::{Storage, Tensor};
use crate::cuda::{Gpu, Memory, Out, Span, elements};
use crate::{DType, Device, Error, Result, Shape};
use std::sync::Arc;

impl Tensor {
    /// As [`Tensor::empty`], on a device. Errors: [`Error::Argument`] for more bytes than can be counted;
    /// [`Error::OutOfMemory`] where a GPU has no room. Panics where the machine has none.
    pub fn empty_on(device: &Device, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let shape = shape.into().countable("empty")?;
        let Device::Cuda(gpu) = device else { return Ok(Self::empty(shape, dtype)) };
        let memory = Memory::new(gpu, shape.count() * dtype.size())
            .map_err(|error| error.of_tensor(format!("{dtype} {shape}")))?;
        let storage = Storage::Cuda(Arc::new(memory));
        Ok(Self { storage, dtype, strides: shape.contiguous_strides(), shape, offset: 0, carried: Carried::default() })
    }

    /// As [`Tensor::zeros`], on a device. Errors: those of [`Tensor::empty_on`].
    pub fn zeros_on(device: &Device, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let shape = shape.into().countable("zeros")?;
        let Device::Cuda(gpu) = device else { return Ok(Self::zeros(shape, dtype)) };
        let zeros = Self::empty_on(device, shape, dtype)?;
        let stream = gpu.stream_to_ask()?;
        // SAFETY: the memory belongs to this tensor alone, and has this many bytes.
        unsafe { gpu.driver().fill(stream, zeros.address("zeros", gpu)?, 0, zeros.bytes())? };
        Ok(zeros)
    }

    /// A tensor of one floating-point number, on a device. Errors: [`Error::DType`] for another type; those of
    /// [`Tensor::empty_on`].
    pub fn full_on(device: &Device, shape: impl Into<Shape>, value: f64, dtype: DType) -> Result<Self> {
        let shape = shape.into().countable("full")?;
        if *device == Device::Cpu {
            return Tensor::full(shape, value).cast(dtype);
        }
        let mut full = Self::empty_on(device, shape, dtype)?;
        elements::fill(&mut full, value)?;
        Ok(full)
    }

    /// This tensor on a device: itself if it is there, otherwise a contiguous copy. Errors: [`Error::OutOfMemory`]
    /// where a GPU has no room, [`Error::Gpu`] from copying.
    pub fn to_device(&self, device: &Device) -> Result<Tensor> {
        match (&self.storage, device) {
            (Storage::Cpu(_), Device::Cpu) => Ok(self.clone()),
            (Storage::Cuda(memory), Device::Cuda(gpu)) if Arc::ptr_eq(memory.gpu(), gpu) => Ok(self.clone()),
            (Storage::Cpu(_), Device::Cuda(gpu)) => {
                let from = self.contiguous()?;
                let to = Self::empty_on(device, self.shape.clone(), self.dtype)?;
                // SAFETY: nothing else uses the new tensor, which has as many bytes.
                unsafe { gpu.upload(from.as_bytes("to_device")?, to.address("to_device", gpu)?)? };
                Ok(to)
            }
            (Storage::Cuda(_), Device::Cpu) => Ok(Self::all_to_cpu([self])?.remove(0)),
            (Storage::Cuda(_), Device::Cuda(_)) => self.to_device(&Device::Cpu)?.to_device(device),
        }
    }

    /// These tensors, contiguous, in the machine's memory. For up to 1 MiB in all the host waits for a GPU once, where
    /// [`Tensor::to_device`] would wait for each. Errors: [`Error::Device`] if they are on several GPUs;
    /// [`Error::OutOfMemory`] where a view has no room to be made contiguous; [`Error::Gpu`] from copying.
    pub fn all_to_cpu<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> Result<Vec<Tensor>> {
        let from: Vec<Tensor> = tensors.into_iter().map(Tensor::contiguous).collect::<Result<_>>()?;
        let here = |from: &Tensor| match from.storage {
            Storage::Cpu(_) => from.clone(),
            Storage::Cuda(_) => Self::empty(from.shape.clone(), from.dtype),
        };
        let mut to: Vec<Tensor> = from.iter().map(here).collect();
        let mut pieces = vec![];
        let mut on = None;
        for (from, to) in from.iter().zip(&mut to) {
            if let Storage::Cuda(memory) = &from.storage {
                let gpu = *on.get_or_insert(memory.gpu());
                pieces.push((from.address("all_to_cpu", gpu)?, to.as_mut_bytes("all_to_cpu")?));
            }
        }
        if let Some(gpu) = on {
            // SAFETY: each contiguous tensor has as many bytes as its copy, which is new.
            unsafe { gpu.download(pieces)? };
        }
        Ok(to)
    }

    /// Overwrites the elements from the `start`-th on of a contiguous tensor, wherever it is, with those of a tensor in
    /// the machine's memory. Errors: [`Error::OutOfRange`]; [`Error::DType`]; [`Error::Shared`] while another tensor
    /// shares the buffer; [`Error::NotContiguous`]; [`Error::Device`] for one whose elements are on a GPU;
    /// [`Error::Gpu`] from copying.
    pub fn overwrite(&mut self, start: usize, from: &Tensor) -> Result<()> {
        let end = start.saturating_add(from.count());
        if end > self.count() {
            let (index, bound) = (end, self.count() + 1);
            return Err(Error::OutOfRange { op: "overwrite", what: "the end", index, bound });
        }
        from.ensure_dtype("overwrite", self.dtype)?;
        let from = from.contiguous()?;
        let (from, start) = (from.as_bytes("overwrite")?, start * self.dtype.size());
        match self.device() {
            Device::Cpu => self.as_mut_bytes("overwrite")?[start..][..from.len()].copy_from_slice(from),
            Device::Cuda(gpu) => {
                let address = self.address_mut("overwrite", &gpu)? + start as u64;
                // SAFETY: the memory is this tensor's alone, and long enough.
                unsafe { gpu.upload(from, address)? };
            }
        }
        Ok(())
    }

    /// A tensor of the same shape and type on the same device, with arbitrary contents. Errors: those of
    /// [`Tensor::empty_on`].
    pub fn empty_like(&self) -> Result<Tensor> {
        Self::empty_on(&self.device(), self.shape.clone(), self.dtype)
    }

    /// The same elements in a buffer of their own, contiguous, on the same device. Errors: [`Error::OutOfMemory`]
    /// where a GPU has no room, [`Error::Gpu`] from copying.
    pub fn duplicate(&self) -> Result<Tensor> {
        if !self.is_contiguous() {
            return self.contiguous();
        }
        let mut copy = self.empty_like()?;
        match self.device() {
            Device::Cpu => copy.as_mut_bytes("duplicate")?.copy_from_slice(self.as_bytes("duplicate")?),
            Device::Cuda(gpu) => {
                let (from, to) = (self.address("duplicate", &gpu)?, copy.address_mut("duplicate", &gpu)?);
                let stream = gpu.stream_to_ask()?;
                // SAFETY: both have this many bytes, and do not overlap.
                unsafe { gpu.driver().copy(stream, from, to, copy.bytes())? };
            }
        }
        Ok(copy)
    }

    pub(super) fn wrong_device(&self, op: &'static str, expected: &Device) -> Error {
        Error::device(op, expected, &self.device())
    }

    /// Where its elements are.
    pub fn device(&self) -> Device {
        match &self.storage {
            Storage::Cpu(_) => Device::Cpu,
            Storage::Cuda(memory) => Device::Cuda(Arc::clone(memory.gpu())),
        }
    }

    /// The GPU that has its elements. [`Error::Device`] when none has.
    pub fn gpu(&self, op: &'static str) -> Result<&Arc<Gpu>> {
        match &self.storage {
            Storage::Cuda(memory) => Ok(memory.gpu()),
            Storage::Cpu(_) => Err(Error::Device { op, expected: "cuda".into(), actual: Device::Cpu.to_string() }),
        }
    }

    /// The address of its first element in a GPU's memory. [`Error::Device`] when it is not there.
    pub fn address(&self, op: &'static str, gpu: &Arc<Gpu>) -> Result<u64> {
        match &self.storage {
            Storage::Cuda(memory) if Arc::ptr_eq(memory.gpu(), gpu) => {
                Ok(memory.address() + (self.offset * self.dtype.size()) as u64)
            }
            _ => Err(self.wrong_device(op, &Device::Cuda(Arc::clone(gpu)))),
        }
    }

    /// [`Error::Shared`] while another tensor shares the buffer. To be called before a replay, which writes the tensor
    /// without checking.
    pub fn ensure_unique(&self, op: &'static str) -> Result<()> {
        if self.is_unique() { Ok(()) } else { Err(Error::Shared { op }) }
    }

    /// As [`Tensor::address`], of a contiguous tensor that is to be written. Also [`Error::NotContiguous`], and
    /// [`Error::Shared`] while another tensor shares its buffer.
    pub(crate) fn address_mut(&mut self, op: &'static str, gpu: &Arc<Gpu>) -> Result<u64> {
        self.ensure_contiguous(op)?;
        self.ensure_unique(op)?;
        self.carried = Carried::default();
        self.address(op, gpu)
    }

    /// A contiguous tensor on a GPU as the place of a gradient. Errors: [`Error::Device`],
    /// [`Error::NotContiguous`], [`Error::Shared`].
    pub fn as_out(&mut self, op: &'static str, accumulate: bool) -> Result<Out<'_>> {
        let gpu = Arc::clone(self.gpu(op)?);
        let address = self.address_mut(op, &gpu)?;
        Ok(Out::new(self.gpu(op)?, address, self.count(), self.dtype, accumulate))
    }

    /// The memory of a contiguous tensor on a GPU, to be written. Errors: [`Error::Device`],
    /// [`Error::NotContiguous`], [`Error::Shared`].
    pub fn as_span(&mut self, op: &'static str) -> Result<Span<'_>> {
        let gpu = Arc::clone(self.gpu(op)?);
        let address = self.address_mut(op, &gpu)?;
        Ok(Span::new(self.gpu(op)?, address, self.bytes()))
    }
}
