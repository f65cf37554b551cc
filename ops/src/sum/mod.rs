//! The sum over some axes.
//!
//! **Forward.** y = Σ x over the named axes, which stay with extent 1 (`keep`) or disappear. Naming an
//! axis twice is naming it once; naming none changes nothing. A mean is this sum, scaled by one over the
//! number of terms.
//!
//! **Backward.** Each x enters one sum with derivative 1, so dx is dy repeated along the axes that were
//! summed: the adjoint of broadcasting is a sum, and of a sum, broadcasting. Nothing is saved but shapes.
//!
//! x must be contiguous; f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::Axis`],
//! [`tensor::Error::NotContiguous`], [`tensor::Error::DType`].

pub mod cases;
pub mod reference;

use crate::broadcast;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cpu::parallel::Out;
use tensor::cuda::Module;
use tensor::{Device, Shape, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "the sum over some axes";

/// x added up over `axes`, which keep the extent 1 or disappear.
/// Operands and errors: those of the [module](mod@crate::sum).
pub fn sum<'t>(x: &Var<'t>, axes: &[usize], keep: bool) -> Result<Var<'t>> {
    let mut kept = x.shape().clone();
    for &axis in axes {
        x.shape().ensure_axis("sum", axis)?;
        kept = kept.with(axis, 1);
    }
    let left = |axis: &usize| keep || !axes.contains(axis);
    let shape: Shape = (0..kept.len()).filter(left).map(|axis| kept[axis]).collect();
    let device = x.value().device();
    let mut y = Tensor::empty_on(&device, shape, x.dtype())?;
    match device {
        Device::Cpu => match_float!(x.dtype(), "sum", T => {
            broadcast::cpu::reduce::<T>("sum", x.value(), &kept, Out::store(y.as_mut_slice("sum")?))?;
        }),
        Device::Cuda(_) => broadcast::cuda::reduce("sum", x.value(), &kept, y.as_out("sum", false)?)?,
    }
    x.tape().record("sum", &[x], y, || Sum { shape: x.shape().clone(), kept })
}

struct Sum {
    /// The shape of x.
    shape: Shape,
    /// The same with extent 1 along the summed axes.
    kept: Shape,
}

impl Rule for Sum {
    rule_fields!("sum");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        grads.give(0, dy.reshape(self.kept)?.broadcast_to(self.shape)?)
    }
}
