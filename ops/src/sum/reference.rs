//! The definition of [`sum`](super::sum).

use autograd::exact::{Array, Scalar};

/// Adds each element to the place that its position has when the named axes are at 0.
pub fn sum<S: Scalar>(x: &Array<S>, axes: &[usize], keep: bool) -> Array<S> {
    let shape: Vec<usize> =
        (0..x.shape.len()).map(|axis| if axes.contains(&axis) { 1 } else { x.shape[axis] }).collect();
    let mut y = Array::zeros(&shape);
    for (place, &element) in x.data.iter().enumerate() {
        let (mut position, mut rest) = (vec![0; shape.len()], place);
        for axis in (0..shape.len()).rev() {
            position[axis] = if axes.contains(&axis) { 0 } else { rest % x.shape[axis] };
            rest /= x.shape[axis];
        }
        *y.at_mut(&position) += element;
    }
    if !keep {
        y.shape = (0..shape.len()).filter(|axis| !axes.contains(axis)).map(|axis| shape[axis]).collect();
    }
    y
}
