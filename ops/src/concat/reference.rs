//! The definition of [`concat`](super::concat).

use autograd::exact::{Array, Scalar};

/// y[.., i, ..] = part[.., i − the extents before it, ..]
pub fn concat<S: Scalar>(parts: &[Array<S>], axis: usize) -> Array<S> {
    let mut shape = parts[0].shape.clone();
    shape[axis] = parts.iter().map(|part| part.shape[axis]).sum();
    Array::from_fn(&shape, |position| {
        let (mut position, mut part) = (position.to_vec(), 0);
        while position[axis] >= parts[part].shape[axis] {
            position[axis] -= parts[part].shape[axis];
            part += 1;
        }
        parts[part].at(&position)
    })
}
