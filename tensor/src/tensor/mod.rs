//! The tensor: a shape and strides over a shared buffer.

mod average;
mod carried;
mod place;
mod view;

use crate::cpu::pairs::rounding::{nearest_of_f64, round_all};
use crate::cuda::{Memory, elements};
use crate::memory::reserve;
use crate::{Buffer, DType, Device, Element, Error, OUT_OF_MEMORY, Result, Shape, shape::Strides};
use carried::Carried;
use half::bf16;
use std::{fmt, sync::Arc};

/// An n-dimensional array. Cloning it, and taking views of it, shares the elements; they can be written
/// only while no other tensor shares their buffer ([`Tensor::as_mut_slice`]).
#[derive(Clone)]
pub struct Tensor {
    storage: Storage,
    dtype: DType,
    shape: Shape,
    strides: Strides,
    /// The first element's place in the buffer, in elements.
    offset: usize,
    /// See [`Tensor::carrying`].
    carried: Carried,
}

/// The memory that tensors share.
#[derive(Clone)]
enum Storage {
    Cpu(Arc<Buffer>),
    Cuda(Arc<Memory>),
}

impl Tensor {
    /// A tensor whose elements are whatever the recycled buffer held. For results that are about to be
    /// written in full. Panics for more bytes than can be counted, or than the machine has.
    pub fn empty(shape: impl Into<Shape>, dtype: DType) -> Self {
        let shape = shape.into();
        let bytes = shape.count().checked_mul(dtype.size());
        let bytes = bytes.unwrap_or_else(|| panic!("a tensor of shape {shape} cannot exist"));
        let storage = Storage::Cpu(Arc::new(Buffer::new(bytes)));
        Self { storage, dtype, strides: shape.contiguous_strides(), shape, offset: 0, carried: Carried::default() }
    }

    /// A tensor of zeros. Panics as [`Tensor::empty`] does.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType) -> Self {
        let mut tensor = Self::empty(shape, dtype);
        tensor.fresh_buffer().clear();
        tensor
    }

    /// A tensor of one value. Panics as [`Tensor::empty`] does.
    pub fn full<T: Element>(shape: impl Into<Shape>, value: T) -> Self {
        let mut tensor = Self::empty(shape, T::DTYPE);
        tensor.fresh_buffer().slice_mut::<T>().fill(value);
        tensor
    }

    /// A tensor without axes that holds one value.
    pub fn scalar<T: Element>(value: T) -> Self {
        Self::full([], value)
    }

    /// A tensor with these elements, last axis fastest. [`Error::Shape`] unless there are as many as the shape has.
    pub fn from_slice<T: Element>(elements: &[T], shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.checked_count() != Some(elements.len()) {
            return Err(Error::shape("from_slice", format!("a shape of {} elements", elements.len()), &shape));
        }
        let mut tensor = Self::empty(shape, T::DTYPE);
        tensor.fresh_buffer().slice_mut::<T>().copy_from_slice(elements);
        Ok(tensor)
    }

    /// The buffer of a tensor that was just made, which nobody else can see yet.
    fn fresh_buffer(&mut self) -> &mut Buffer {
        match &mut self.storage {
            Storage::Cpu(buffer) => Arc::get_mut(buffer),
            Storage::Cuda(_) => None,
        }
        .expect("invariant: a new buffer has one owner")
    }

    /// The extents.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The extents as an array, or [`Error::Shape`] when there are not `N` axes. `expected` names the
    /// axes for the error: `"(N, H, W, C)"`.
    pub fn dims<const N: usize>(&self, op: &'static str, expected: &str) -> Result<[usize; N]> {
        self.shape[..].try_into().map_err(|_| Error::shape(op, expected, &self.shape))
    }

    /// The steps between neighbours, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// The number of axes.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn count(&self) -> usize {
        self.shape.count()
    }

    /// The bytes of its elements.
    pub fn bytes(&self) -> usize {
        self.count() * self.dtype.size()
    }

    /// Whether the elements lie one after another, last axis fastest.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&extent, &stride)| {
            let fits = extent <= 1 || stride == step;
            step *= extent.max(1);
            fits
        }) || self.count() == 0
    }

    /// The elements of a contiguous tensor. Errors: [`Error::DType`] if they are of another type than `T`,
    /// [`Error::NotContiguous`], [`Error::Device`] on a GPU.
    pub fn as_slice<T: Element>(&self, op: &'static str) -> Result<&[T]> {
        self.ensure_dtype(op, T::DTYPE)?;
        self.ensure_contiguous(op)?;
        Ok(&self.host(op)?.slice()[self.offset..][..self.count()])
    }

    /// The elements of a contiguous tensor, to be written. Errors: those of [`Self::as_slice`], and [`Error::Shared`]
    /// while another tensor shares the buffer, even if it sees other elements of it.
    pub fn as_mut_slice<T: Element>(&mut self, op: &'static str) -> Result<&mut [T]> {
        self.ensure_dtype(op, T::DTYPE)?;
        self.ensure_contiguous(op)?;
        let range = self.offset..self.offset + self.count();
        let buffer = self.host_mut(op)?;
        Ok(&mut buffer.slice_mut()[range])
    }

    /// The bytes of a contiguous tensor, to be written. Errors: [`Error::Shared`] while another tensor shares the
    /// buffer, [`Error::NotContiguous`], [`Error::Device`] on a GPU.
    pub fn as_mut_bytes(&mut self, op: &'static str) -> Result<&mut [u8]> {
        self.ensure_contiguous(op)?;
        let size = self.dtype.size();
        let range = self.offset * size..(self.offset + self.count()) * size;
        let buffer = self.host_mut(op)?;
        Ok(&mut buffer.slice_mut()[range])
    }

    /// The buffer from this tensor's first element on: element (i, j, ..) lies at the sum of the positions times
    /// [`Tensor::strides`]. Errors: [`Error::DType`], [`Error::Device`] on a GPU.
    pub fn as_strided_slice<T: Element>(&self, op: &'static str) -> Result<&[T]> {
        self.ensure_dtype(op, T::DTYPE)?;
        Ok(&self.host(op)?.slice()[self.offset..])
    }

    /// The bytes of a contiguous tensor in the machine's memory.
    fn as_bytes(&self, op: &'static str) -> Result<&[u8]> {
        self.ensure_contiguous(op)?;
        Ok(&self.host(op)?.slice()[self.offset * self.dtype.size()..][..self.bytes()])
    }

    fn host(&self, op: &'static str) -> Result<&Arc<Buffer>> {
        match &self.storage {
            Storage::Cpu(buffer) => Ok(buffer),
            Storage::Cuda(_) => Err(self.wrong_device(op, &Device::Cpu)),
        }
    }

    fn host_mut(&mut self, op: &'static str) -> Result<&mut Buffer> {
        match self.storage {
            Storage::Cpu(ref mut buffer) => {
                let buffer = Arc::get_mut(buffer).ok_or(Error::Shared { op })?;
                self.carried = Carried::default();
                Ok(buffer)
            }
            Storage::Cuda(_) => Err(self.wrong_device(op, &Device::Cpu)),
        }
    }

    /// Whether no other tensor shares the buffer, so that the elements can be written in place.
    pub fn is_unique(&self) -> bool {
        match &self.storage {
            Storage::Cpu(buffer) => Arc::strong_count(buffer) == 1,
            Storage::Cuda(memory) => Arc::strong_count(memory) == 1,
        }
    }

    /// Whether the other tensor is a clone of this one: the same elements of the same buffer in the same order.
    pub fn is_same_view(&self, other: &Tensor) -> bool {
        self.buffer_id() == other.buffer_id()
            && (self.offset, &self.shape, &self.strides) == (other.offset, &other.shape, &other.strides)
    }

    /// The address and length in bytes of the buffer, by which tensors that share it are told from others.
    pub fn buffer_id(&self) -> (usize, usize) {
        match &self.storage {
            Storage::Cpu(buffer) => (buffer.slice::<u8>().as_ptr() as usize, buffer.len()),
            Storage::Cuda(memory) => (memory.address() as usize, memory.len()),
        }
    }

    /// [`Error::DType`] unless the elements are of this type.
    pub fn ensure_dtype(&self, op: &'static str, dtype: DType) -> Result<()> {
        self.dtype.ensure_dtype(op, dtype)
    }

    fn ensure_contiguous(&self, op: &'static str) -> Result<()> {
        if self.is_contiguous() { Ok(()) } else { Err(self.not_contiguous(op)) }
    }

    pub(crate) fn not_contiguous(&self, op: &'static str) -> Error {
        Error::NotContiguous { op, shape: self.shape.to_string(), strides: self.strides.to_vec() }
    }

    /// The one element of a tensor that has one element, on any device. Errors: [`Error::Shape`] for another number of
    /// elements, [`Error::DType`], those of a GPU.
    pub fn item<T: Element>(&self) -> Result<T> {
        if self.count() != 1 {
            return Err(Error::shape("item", "one element", &self.shape));
        }
        Ok(self.to_device(&Device::Cpu)?.as_strided_slice::<T>("item")?[0])
    }

    /// A copy of the elements in order, from any view on any device. Errors: [`Error::DType`], those of a GPU. Panics
    /// with [`OUT_OF_MEMORY`](crate::OUT_OF_MEMORY) if the system has no room for it.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if let Storage::Cuda(_) = &self.storage {
            return self.to_device(&Device::Cpu)?.to_vec();
        }
        let elements = self.as_strided_slice::<T>("to_vec")?;
        let mut copy = Vec::new();
        reserve(&mut copy, self.count()).unwrap_or_else(|error| panic!("{OUT_OF_MEMORY}: {error}"));
        self.for_each_row(|start, stride, len| copy.extend((0..len).map(|i| elements[start + i * stride])));
        Ok(copy)
    }

    /// The first number, in order, for which `sought` is true; always `None` for a tensor of indices. Works for any
    /// view on any device. Errors: those of a GPU.
    pub fn find(&self, sought: impl Fn(f64) -> bool) -> Result<Option<f64>> {
        let own = self.to_device(&Device::Cpu)?.contiguous()?;
        let sought = |number: &f64| sought(*number);
        Ok(match self.dtype {
            DType::F64 => own.as_slice::<f64>("find")?.iter().copied().find(sought),
            DType::F32 => own.as_slice::<f32>("find")?.iter().map(|&number| f64::from(number)).find(sought),
            DType::Bf16 => own.as_slice::<bf16>("find")?.iter().map(|&number| f64::from(number)).find(sought),
            DType::Index => None,
        })
    }

    /// This tensor if it is contiguous, otherwise a contiguous copy. Errors: those of a GPU.
    pub fn contiguous(&self) -> Result<Tensor> {
        if self.is_contiguous() {
            return Ok(self.clone());
        }
        if let Storage::Cuda(_) = &self.storage {
            return elements::contiguous(self);
        }
        let mut copy = Self::empty(self.shape.clone(), self.dtype);
        match self.dtype {
            DType::F64 => self.copy_into::<f64>(&mut copy)?,
            DType::F32 => self.copy_into::<f32>(&mut copy)?,
            DType::Index => self.copy_into::<u32>(&mut copy)?,
            DType::Bf16 => self.copy_into::<bf16>(&mut copy)?,
        }
        Ok(copy)
    }

    /// Concatenates tensors of one type, whose shapes differ only in their first extents, along the first axis. Errors:
    /// [`Error::Argument`] for none, or more elements than can be counted, [`Error::Axis`] for a scalar,
    /// [`Error::Shape`], [`Error::DType`], [`Error::NotContiguous`], [`Error::Device`] for parts on different devices.
    pub fn join(parts: &[Tensor]) -> Result<Tensor> {
        let first = parts.first().ok_or_else(|| Error::argument("join", "needs at least one tensor"))?;
        first.shape.ensure_axis("join", 0)?;
        for part in parts {
            if part.rank() != first.rank() || part.shape.with(0, first.shape[0]) != first.shape {
                return Err(Error::shape("join", format!("{} except for the first extent", first.shape), &part.shape));
            }
            part.ensure_dtype("join", first.dtype)?;
            part.ensure_contiguous("join")?;
        }
        let rows = parts.iter().fold(0, |sum: usize, part| sum.saturating_add(part.shape[0]));
        let shape = first.shape.with(0, rows).countable("join")?;
        let mut joined = Self::empty_on(&first.device(), shape, first.dtype)?;
        match first.device() {
            Device::Cpu => {
                let mut rest = joined.as_mut_bytes("join")?;
                for part in parts {
                    let (own, after) = rest.split_at_mut(part.bytes());
                    own.copy_from_slice(part.as_bytes("join")?);
                    rest = after;
                }
            }
            Device::Cuda(gpu) => {
                let (stream, mut to) = (gpu.stream_to_ask()?, joined.address_mut("join", &gpu)?);
                for part in parts {
                    // SAFETY: the joined tensor is as long as its parts together, and shares nothing with them.
                    unsafe { gpu.driver().copy(stream, part.address("join", &gpu)?, to, part.bytes())? };
                    to += part.bytes() as u64;
                }
            }
        }
        Ok(joined)
    }

    fn copy_into<T: Element>(&self, copy: &mut Tensor) -> Result<()> {
        let from = self.as_strided_slice::<T>("contiguous")?;
        let mut to = copy.fresh_buffer().slice_mut::<T>();
        self.for_each_row(|start, stride, len| {
            let (row, rest) = std::mem::take(&mut to).split_at_mut(len);
            match stride {
                1 => row.copy_from_slice(&from[start..][..len]),
                _ => row.iter_mut().enumerate().for_each(|(i, element)| *element = from[start + i * stride]),
            }
            to = rest;
        });
        Ok(())
    }

    /// Calls `visit(start, stride, len)` for each run along the last axis, in order.
    fn for_each_row(&self, mut visit: impl FnMut(usize, usize, usize)) {
        if self.count() == 0 {
            return;
        }
        let outer = self.rank().saturating_sub(1);
        let (len, stride) = if self.rank() == 0 { (1, 1) } else { (self.shape[outer], self.strides[outer]) };
        let mut position = Strides::from_elem(0, outer);
        loop {
            visit(position.iter().zip(&self.strides).map(|(i, stride)| i * stride).sum(), stride, len);
            let Some(axis) = (0..outer).rev().find(|&axis| position[axis] + 1 < self.shape[axis]) else { return };
            position[axis] += 1;
            position[axis + 1..].fill(0);
        }
    }

    /// The elements converted to another type. Floating-point types convert to each other, rounding to nearest, ties to
    /// even (to bf16 on a CPU, magnitudes below 2⁻¹²⁶ become zero); conversions from or to indices are
    /// [`Error::DType`].
    pub fn cast(&self, dtype: DType) -> Result<Tensor> {
        if dtype == self.dtype {
            return Ok(self.clone());
        }
        if let Storage::Cuda(_) = &self.storage {
            return elements::cast(&self.contiguous()?, dtype);
        }
        match (self.dtype, dtype) {
            (DType::F32, DType::F64) => self.converted(dtype, |x: f32| f64::from(x)),
            (DType::F32, DType::Bf16) => {
                let mut rounded = Self::empty(self.shape.clone(), dtype);
                round_all(self.contiguous()?.as_slice("cast")?, rounded.as_mut_slice("cast")?);
                Ok(rounded)
            }
            (DType::F64, DType::F32) => self.converted(dtype, |x: f64| x as f32),
            (DType::F64, DType::Bf16) => self.converted(dtype, nearest_of_f64),
            (DType::Bf16, DType::F32) => self.converted(dtype, bf16::to_f32),
            (DType::Bf16, DType::F64) => self.converted(dtype, bf16::to_f64),
            _ => Err(Error::DType { op: "cast", expected: "floating-point", actual: DType::Index }),
        }
    }

    fn converted<A: Element, B: Element>(&self, dtype: DType, convert: impl Fn(A) -> B) -> Result<Tensor> {
        let mut converted = Self::empty(self.shape.clone(), dtype);
        let from = self.contiguous()?;
        let pairs = converted.as_mut_slice("cast")?.iter_mut().zip(from.as_slice::<A>("cast")?);
        pairs.for_each(|(to, &from)| *to = convert(from));
        Ok(converted)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        write!(f, "Tensor {} {} [", self.dtype, self.shape)?;
        let Storage::Cpu(buffer) = &self.storage else { return write!(f, "on {}]", self.device()) };
        for index in 0..self.count().min(SHOWN) {
            let step = |(place, rest): (usize, usize), (&extent, &stride): (&usize, &usize)| {
                (place + rest % extent * stride, rest / extent)
            };
            let (place, _) = self.shape.iter().zip(&self.strides).rev().fold((self.offset, index), step);
            let comma = if index > 0 { ", " } else { "" };
            match self.dtype {
                DType::F32 => write!(f, "{comma}{}", buffer.slice::<f32>()[place]),
                DType::F64 => write!(f, "{comma}{}", buffer.slice::<f64>()[place]),
                DType::Bf16 => write!(f, "{comma}{}", buffer.slice::<bf16>()[place]),
                DType::Index => write!(f, "{comma}{}", buffer.slice::<u32>()[place]),
            }?;
        }
        write!(f, "{}]", if self.count() > SHOWN { ", ..." } else { "" })
    }
}
