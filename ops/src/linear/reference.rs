//! The definition of [`linear`](super::linear).

use autograd::exact::{Array, Scalar};

/// y[n, o] = Σᵢ x[n, i] w[o, i] + b\[o\] + e[n, o], where e is the residual
pub fn linear<S: Scalar>(
    x: &Array<S>,
    weight: &Array<S>,
    bias: Option<&Array<S>>,
    residual: Option<&Array<S>>,
) -> Array<S> {
    let [outputs, inputs] = weight.dims();
    let mut shape = x.shape.clone();
    shape[x.shape.len() - 1] = outputs;
    let mut y = Array::zeros(&shape);
    for (place, y) in y.data.iter_mut().enumerate() {
        let (row, output) = (place / outputs, place % outputs);
        *y = (0..inputs).map(|i| x.data[row * inputs + i] * weight.at(&[output, i])).sum();
        *y += bias.map_or(S::of(0.0), |bias| bias.at(&[output]));
        *y += residual.map_or(S::of(0.0), |residual| residual.data[place]);
    }
    y
}
