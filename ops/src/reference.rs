//! What reference implementations share.

use autograd::exact::{Array, Scalar};

/// f(a, b) element by element, by NumPy's broadcasting rule.
pub fn broadcast<S: Scalar>(a: &Array<S>, b: &Array<S>, f: impl Fn(S, S) -> S) -> Array<S> {
    let rank = a.shape.len().max(b.shape.len());
    let extent = |x: &Array<S>, axis: usize| (axis + x.shape.len()).checked_sub(rank).map_or(1, |axis| x.shape[axis]);
    let shape: Vec<usize> =
        (0..rank).map(|axis| if extent(a, axis) == 1 { extent(b, axis) } else { extent(a, axis) }).collect();
    let pick = |x: &Array<S>, position: &[usize]| {
        let own = &position[rank - x.shape.len()..];
        let clamped: Vec<usize> = own.iter().zip(&x.shape).map(|(&i, &extent)| i.min(extent - 1)).collect();
        x.at(&clamped)
    };
    Array::from_fn(&shape, |position| f(pick(a, position), pick(b, position)))
}
