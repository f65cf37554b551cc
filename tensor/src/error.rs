//! What can go wrong with a tensor.

use crate::memory::amount;
use crate::{DType, Device, Shape};

/// A failure of a tensor operation. All variants but `OutOfMemory` and `Gpu` name the operation.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
pub enum Error {
    /// The shapes do not fit the operation.
    #[error("{op}: expected {expected}, got shape {actual}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// What would have fitted.
        expected: String,
        /// What came.
        actual: String,
    },
    /// Two shapes that must broadcast together do not.
    #[error("{op}: shapes {left} and {right} do not broadcast together")]
    Broadcast {
        /// The operation.
        op: &'static str,
        /// The first shape.
        left: String,
        /// The second shape.
        right: String,
    },
    /// The element type does not fit the operation.
    #[error("{op}: expected {expected} elements, got {actual}")]
    DType {
        /// The operation.
        op: &'static str,
        /// What would have fitted.
        expected: &'static str,
        /// What came.
        actual: DType,
    },
    /// The operation needs elements that lie one after another.
    #[error("{op}: needs contiguous data, got shape {shape} with strides {strides:?}; call contiguous() first")]
    NotContiguous {
        /// The operation.
        op: &'static str,
        /// The view's shape.
        shape: String,
        /// The view's strides, in elements.
        strides: Vec<usize>,
    },
    /// An axis that the tensor does not have.
    #[error("{op}: a tensor with {rank} axes has no axis {axis} (axes count from 0)")]
    Axis {
        /// The operation.
        op: &'static str,
        /// The axis asked for.
        axis: usize,
        /// How many there are.
        rank: usize,
    },
    /// A position past the end.
    #[error("{op}: {what} {index} is out of range, must be below {bound}")]
    OutOfRange {
        /// The operation.
        op: &'static str,
        /// What the position selects.
        what: &'static str,
        /// The position.
        index: usize,
        /// The first position that does not exist.
        bound: usize,
    },
    /// A parameter of the operation (a probability, an epsilon, a count) that makes no sense.
    #[error("{op}: {message}")]
    Argument {
        /// The operation.
        op: &'static str,
        /// What is wrong and what would be right.
        message: String,
    },
    /// Tensors on different devices, or an operation that a device does not have.
    #[error("{op}: expected a tensor on {expected}, got one on {actual}")]
    Device {
        /// The operation.
        op: &'static str,
        /// Where it should be.
        expected: String,
        /// Where it is.
        actual: String,
    },
    /// A GPU has not enough free memory.
    #[error("{}", no_room(what, *bytes, *in_use, [*total, *free]))]
    OutOfMemory {
        /// A tensor's type and shape, or what else needs memory.
        what: String,
        /// How many bytes, if that is known: a driver does not report what it needs for itself.
        bytes: Option<usize>,
        /// The bytes of live tensors, if known.
        in_use: Option<usize>,
        /// The GPU's memory in bytes; 0 if unknown.
        total: usize,
        /// The bytes of it that no process uses.
        free: usize,
    },
    /// A GPU that is not there, cannot be used, or failed.
    #[error("{device}: {message}")]
    Gpu {
        /// The device's name.
        device: String,
        /// What is missing or went wrong, and the way out.
        message: String,
    },
    /// Writing to memory that another tensor shares.
    #[error(
        "{op}: cannot write what another tensor shares; drop that view, tape, pass, factors, state_dict or saved state first"
    )]
    Shared {
        /// The operation.
        op: &'static str,
    },
}

/// The result of a tensor operation.
pub type Result<T> = std::result::Result<T, Error>;

fn no_room(what: &str, bytes: Option<usize>, in_use: Option<usize>, [total, free]: [usize; 2]) -> String {
    let amount = |bytes: usize| amount(bytes as u64);
    let more = bytes.map(|bytes| format!(", {} more", amount(bytes))).unwrap_or_default();
    let tensors = in_use.map(|bytes| format!(" tensors of this program take {}, and", amount(bytes)));
    let figures = match total {
        0 => String::new(),
        _ => format!("; of its {},{} {} are free", amount(total), tensors.unwrap_or_default(), amount(free)),
    };
    let way_out = match in_use {
        Some(1..) => "a smaller batch needs less memory, and so does recomputing more",
        _ => "end other programs that use it",
    };
    format!("no room on the GPU for {what}{more}{figures}: {way_out}")
}

impl Error {
    /// Names the tensor that an out-of-memory error is about.
    pub(crate) fn of_tensor(mut self, tensor: String) -> Self {
        if let Error::OutOfMemory { what, .. } = &mut self {
            *what = tensor;
        }
        self
    }

    /// Adds to an out-of-memory error how many bytes live tensors take.
    pub(crate) fn beside_tensors(mut self, bytes: usize) -> Self {
        if let Error::OutOfMemory { in_use, .. } = &mut self {
            *in_use = Some(bytes);
        }
        self
    }

    /// Puts a kernel's name before a GPU error's message.
    pub(crate) fn within(mut self, kernel: &str) -> Self {
        if let Error::Gpu { message, .. } = &mut self {
            *message = format!("{kernel}: {message}");
        }
        self
    }

    /// A [`Error::Shape`].
    pub fn shape(op: &'static str, expected: impl Into<String>, actual: &[usize]) -> Self {
        Error::Shape { op, expected: expected.into(), actual: Shape::from(actual).to_string() }
    }

    /// A [`Error::Device`].
    pub fn device(op: &'static str, expected: &Device, actual: &Device) -> Self {
        let [expected, actual] = [expected, actual].map(Device::to_string);
        // Of two GPUs of one kind.
        let actual = if actual == expected { format!("another {actual}") } else { actual };
        Error::Device { op, expected, actual }
    }

    /// An [`Error::Argument`].
    pub fn argument(op: &'static str, message: impl Into<String>) -> Self {
        Error::Argument { op, message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_no_room_is_told_the_figures_that_are_known_and_the_way_out() {
        let full = |bytes, in_use, total| {
            let what = "f32 (3)".into();
            Error::OutOfMemory { what, bytes, in_use, total, free: 90_000_000 }.to_string()
        };
        let smaller = "a smaller batch needs less memory, and so does recomputing more";
        assert_eq!(
            full(Some(1_500_000), Some(2_000_000), 8_000_000_000),
            format!(
                "no room on the GPU for f32 (3), 1.5 MB more; of its 8.0 GB, tensors of this program take 2.0 MB, and \
                 90 MB are free: {smaller}"
            )
        );
        assert_eq!(full(None, Some(1), 0), format!("no room on the GPU for f32 (3): {smaller}"));
        let others = "no room on the GPU for f32 (3); of its 1.0 MB, 90 MB are free: end other programs that use it";
        assert_eq!(full(None, None, 1_000_000), others);
    }
}
