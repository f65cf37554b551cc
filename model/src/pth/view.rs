//! Tensors, as a pickle describes them: parts of storages.

use super::pickle::{Id, Value, Values};
use super::{Problem, Result};
use crate::elements::read_from;
use safetensors::tensor::Dtype;
use tensor::Tensor;
use tensor::memory::reserve;

/// The most axes of a tensor that is read: no layer has more.
const MAX_AXES: usize = 8;
/// How many levels of wrappers around a tensor are followed, such as a parameter or a tensor subclass.
const DEEPEST: usize = 4;

/// How a pickle makes a tensor.
pub enum Made<'v> {
    /// As a part of a storage, with these arguments.
    View(Id),
    /// Otherwise, by a function of PyTorch with this name.
    Other(&'v str),
}

/// How a value is made, if it is a tensor, or wraps one.
pub fn made(values: &Values, id: Id) -> Option<Made<'_>> {
    let Value::Call { mut function, mut arguments, .. } = *values.get(id) else { return None };
    for _ in 0..DEEPEST {
        let items = || if let Value::Sequence(items) = values.get(arguments) { items.as_slice() } else { &[] };
        (function, arguments) = match (values.global(function)?, items()) {
            (("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2"), _) => return Some(Made::View(arguments)),
            // A parameter, whose first argument is the tensor that it wraps.
            (("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state"), &[tensor, ..]) => {
                let Value::Call { function, arguments, .. } = *values.get(tensor) else { return None };
                (function, arguments)
            }
            // A tensor of a subclass, or with attributes: the function that makes it, the class, the arguments.
            (("torch._tensor", "_rebuild_from_type_v2"), &[function, _, arguments, ..]) => (function, arguments),
            (("torch._utils", other), _) if other.starts_with("_rebuild_") => return Some(Made::Other(other)),
            _ => return None,
        };
    }
    None
}

/// A tensor: a part of a storage.
pub struct View<'v> {
    /// What the storage is called.
    pub key: &'v str,
    dtype: Dtype,
    /// The bytes of an element.
    size: usize,
    /// The first element's place in the storage.
    offset: usize,
    shape: Vec<usize>,
    /// From one element to the next along each axis.
    strides: Vec<usize>,
}

impl<'v> View<'v> {
    /// The view that the arguments of `_rebuild_tensor_v2` describe: (storage, offset, shape, strides, requires_grad,
    /// backward_hooks, metadata); the metadata say whether the view is negated or conjugated.
    pub fn of(values: &'v Values, arguments: Id) -> Result<Self> {
        let impossible = || Problem::Damaged("its description makes no sense".to_owned());
        let number = |id: Id| match values.get(id) {
            Value::Int(number) => usize::try_from(*number).map_err(|_| impossible()),
            _ => Err(impossible()),
        };
        let items = |id: Id| match values.get(id) {
            Value::Sequence(items) => Ok(items.as_slice()),
            _ => Err(impossible()),
        };
        let extents = |id: Id| match items(id)? {
            axes if axes.len() <= MAX_AXES => axes.iter().map(|&axis| number(axis)).collect(),
            axes => Err(Problem::Unfit(format!("it has {} axes; up to {MAX_AXES} are read", axes.len()))),
        };
        let arguments = items(arguments)?;
        let [storage, offset, shape, strides, ..] = *arguments else { return Err(impossible()) };
        if arguments.get(6).is_some_and(|&otherwise| !values.entries(otherwise).is_empty()) {
            return Err(Problem::Unfit("it is negated or conjugated when it is read; save a copy of it".to_owned()));
        }
        let Value::Persistent(storage) = *values.get(storage) else { return Err(impossible()) };
        // ("storage", class, key, device, number of elements)
        let [_, class, key, ..] = *items(storage)? else { return Err(impossible()) };
        let (Some((_, class)), Some(key)) = (values.global(class), values.text(key)) else { return Err(impossible()) };
        let (offset, shape, strides): (_, Vec<usize>, Vec<usize>) =
            (number(offset)?, extents(shape)?, extents(strides)?);
        let (dtype, size) = match class {
            "FloatStorage" => (Dtype::F32, 4),
            "DoubleStorage" => (Dtype::F64, 8),
            "BFloat16Storage" => (Dtype::BF16, 2),
            "HalfStorage" => (Dtype::F16, 2),
            "LongStorage" => (Dtype::I64, 8),
            "IntStorage" => (Dtype::I32, 4),
            "ShortStorage" => (Dtype::I16, 2),
            "CharStorage" => (Dtype::I8, 1),
            "ByteStorage" => (Dtype::U8, 1),
            other => {
                return Err(Problem::Unfit(format!(
                    "its elements lie in a {other}, which no model uses; leave it out"
                )));
            }
        };
        let count = shape.iter().try_fold(1, |count: usize, &extent| count.checked_mul(extent.max(1)));
        if shape.len() != strides.len() || count.and_then(|count| count.checked_mul(size)).is_none() {
            return Err(impossible());
        }
        Ok(Self { key, dtype, size, offset, shape, strides })
    }

    /// Its size in bytes once it is contiguous.
    pub fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.size) as u64
    }

    /// The tensor, from its storage's bytes.
    pub fn tensor(&self, storage: &[u8]) -> Result<Tensor> {
        let beyond = || "it reaches beyond its storage".to_owned();
        let mut gathered = vec![];
        let bytes = match self.run(0) {
            _ if self.bytes() == 0 => &[],
            Some(length) => self.part(storage, self.offset, length).ok_or_else(beyond)?,
            None => {
                reserve(&mut gathered, self.bytes() as usize).map_err(|error| Problem::Unfit(error.to_string()))?;
                self.gather(storage, 0, self.offset, &mut gathered).ok_or_else(beyond)?;
                &gathered
            }
        };
        read_from(&mut &bytes[..], self.dtype, &self.shape).map_err(|fault| Problem::Unfit(fault.to_string()))
    }

    /// The bytes of `length` elements from `at` on.
    fn part<'s>(&self, storage: &'s [u8], at: usize, length: usize) -> Option<&'s [u8]> {
        storage.get(at.checked_mul(self.size)?..at.checked_add(length)?.checked_mul(self.size)?)
    }

    /// Appends the elements of the axes from `axis` on to `bytes`, in order.
    fn gather(&self, storage: &[u8], axis: usize, at: usize, bytes: &mut Vec<u8>) -> Option<()> {
        if let Some(length) = self.run(axis) {
            bytes.extend(self.part(storage, at, length)?);
            return Some(());
        }
        (0..self.shape[axis]).try_for_each(|index| {
            let at = at.checked_add(index.checked_mul(self.strides[axis])?)?;
            self.gather(storage, axis + 1, at, bytes)
        })
    }

    /// The number of elements of the axes from `axis` on, if they are contiguous.
    fn run(&self, axis: usize) -> Option<usize> {
        let mut axes = self.shape[axis..].iter().zip(&self.strides[axis..]).rev();
        axes.try_fold(1, |length, (&extent, &stride)| (extent == 1 || stride == length).then_some(length * extent))
    }
}
