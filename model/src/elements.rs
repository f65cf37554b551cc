//! The elements of tensors as files hold them.

use safetensors::tensor::Dtype;
use std::fmt;
use std::io::{self, Read, Write};
use tensor::{DType, Element, Shape, Tensor, bf16};

/// Writes tensors one after the other.
pub fn put_all(tensors: &[(String, Tensor)], out: &mut impl Write) -> std::io::Result<()> {
    tensors.iter().try_for_each(|(_, tensor)| match tensor.dtype() {
        DType::F32 => put(out, tensor, f32::to_le_bytes),
        DType::F64 => put(out, tensor, f64::to_le_bytes),
        DType::Bf16 => put(out, tensor, bf16::to_le_bytes),
        DType::Index => put(out, tensor, |index: u32| i64::from(index).to_le_bytes()),
    })
}

/// Writes a tensor's elements, a few at a time.
fn put<T: Element, const N: usize>(
    out: &mut impl Write,
    tensor: &Tensor,
    bytes: impl Fn(T) -> [u8; N],
) -> std::io::Result<()> {
    let elements = tensor.as_slice::<T>("file").map_err(std::io::Error::other)?;
    let mut buffer = Vec::with_capacity(4096);
    for few in elements.chunks(4096) {
        buffer.clear();
        buffer.extend(few.iter().map(|&element| bytes(element)));
        out.write_all(buffer.as_flattened())?;
    }
    Ok(())
}

/// What elements of a type are stored as, and in how many bytes: indices as I64, the type that PyTorch reads them as.
pub fn stored(dtype: DType) -> (&'static str, usize) {
    match dtype {
        DType::F32 => ("F32", 4),
        DType::F64 => ("F64", 8),
        DType::Bf16 => ("BF16", 2),
        DType::Index => ("I64", 8),
    }
}

/// Why a tensor cannot be read.
#[derive(Debug)]
pub enum Fault {
    /// Its bytes cannot be.
    Io(io::Error),
    /// They are not those of a tensor, as this says.
    Unfit(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(cause) => cause.fmt(f),
            Self::Unfit(reason) => f.write_str(reason),
        }
    }
}

/// A tensor of the next bytes that a source gives, as many as its elements take.
pub fn read_from(source: &mut impl Read, dtype: Dtype, shape: &[usize]) -> std::result::Result<Tensor, Fault> {
    // A tensor can be empty and yet have an impossible shape: an extent of 0 hides the others from the reader's own
    // overflow checks.
    let impossible = |_| Fault::Unfit(format!("has the impossible shape {shape:?}"));
    let shape = Shape::from(shape).countable("file").map_err(impossible)?;
    match dtype {
        Dtype::F32 => filled(source, shape, |bytes| Some(f32::from_le_bytes(bytes))),
        Dtype::F64 => filled(source, shape, |bytes| Some(f64::from_le_bytes(bytes))),
        Dtype::BF16 => filled(source, shape, |bytes| Some(bf16::from_le_bytes(bytes))),
        Dtype::F16 => filled(source, shape, |bytes| Some(half::f16::from_le_bytes(bytes).to_f32())),
        Dtype::I64 => filled(source, shape, |bytes| u32::try_from(i64::from_le_bytes(bytes)).ok()),
        Dtype::U64 => filled(source, shape, |bytes| u32::try_from(u64::from_le_bytes(bytes)).ok()),
        Dtype::I32 => filled(source, shape, |bytes| u32::try_from(i32::from_le_bytes(bytes)).ok()),
        Dtype::U32 => filled(source, shape, |bytes| Some(u32::from_le_bytes(bytes))),
        Dtype::I16 => filled(source, shape, |bytes| u32::try_from(i16::from_le_bytes(bytes)).ok()),
        Dtype::U16 => filled(source, shape, |bytes| Some(u32::from(u16::from_le_bytes(bytes)))),
        Dtype::I8 => filled(source, shape, |bytes| u32::try_from(i8::from_le_bytes(bytes)).ok()),
        Dtype::U8 => filled(source, shape, |[byte]| Some(u32::from(byte))),
        other => Err(Fault::Unfit(format!(
            "has elements of type {other:?}; expected floats (F32, F64, BF16, F16) or integers (of 8 to 64 bits)"
        ))),
    }
}

/// A tensor of elements that `read` makes of N bytes each; it makes none of an integer that is no index.
fn filled<T: Element, const N: usize>(
    source: &mut impl Read,
    shape: Shape,
    read: impl Fn([u8; N]) -> Option<T>,
) -> std::result::Result<Tensor, Fault> {
    const FEW: usize = 4096;
    let mut tensor = Tensor::empty(shape, T::DTYPE);
    let to = tensor.as_mut_slice::<T>("file").map_err(|error| Fault::Unfit(error.to_string()))?;
    let mut buffer = [[0; N]; FEW];
    for few in to.chunks_mut(FEW) {
        let bytes = &mut buffer[..few.len()];
        source.read_exact(bytes.as_flattened_mut()).map_err(Fault::Io)?;
        for (to, &mut bytes) in few.iter_mut().zip(bytes) {
            let wrong = || Fault::Unfit("holds an integer that is negative or too large".to_owned());
            *to = read(bytes).ok_or_else(wrong)?;
        }
    }
    Ok(tensor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_any_size_are_read() {
        let read = |dtype, mut bytes: &[u8]| {
            let tensor = read_from(&mut bytes, dtype, &[2]).map_err(|fault| fault.to_string())?;
            Ok::<_, String>(tensor.to_vec::<u32>().unwrap())
        };
        for (dtype, bytes) in [
            (Dtype::U8, &[1, 200][..]),
            (Dtype::I16, &[1, 0, 200, 0]),
            (Dtype::U16, &[1, 0, 200, 0]),
            (Dtype::I32, &[1, 0, 0, 0, 200, 0, 0, 0]),
            (Dtype::U32, &[1, 0, 0, 0, 200, 0, 0, 0]),
            (Dtype::I64, &[1, 0, 0, 0, 0, 0, 0, 0, 200, 0, 0, 0, 0, 0, 0, 0]),
            (Dtype::U64, &[1, 0, 0, 0, 0, 0, 0, 0, 200, 0, 0, 0, 0, 0, 0, 0]),
        ] {
            assert_eq!(read(dtype, bytes).unwrap(), [1, 200], "{dtype:?}");
        }
        assert_eq!(read(Dtype::I8, &[1, 100]).unwrap(), [1, 100]);
        assert!(read(Dtype::I8, &[1, 200]).unwrap_err().contains("negative"));
        assert!(read(Dtype::U64, &[0xFF; 16]).is_err());
    }
}
