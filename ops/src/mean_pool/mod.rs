//! The mean token of a map: global average pooling.
//!
//! **Forward.** y (N, C) from x (N, H, W, C): y\[n, c\] = 1/(H·W) · Σ x\[n, h, w, c\] over h and w.
//!
//! **Backward.** Each token has the weight 1/(H·W), so dx\[n, h, w, c\] = dy\[n, c\] / (H·W). Nothing is
//! saved.
//!
//! x may be a view whose channels lie side by side; f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::Shape`] for
//! another number of axes or an empty map, [`tensor::Error::NotContiguous`], [`tensor::Error::DType`].
//! Source: the head of BiFormer (`x.flatten(2).mean(-1)` on channels-first maps).

pub mod cases;
pub mod reference;

use crate::region_pool::cpu::{self, Tokens};
use crate::region_pool::cuda;
use crate::region_pool::geometry::Geometry;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{Device, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "mean over height and width, (N, H, W, C) -> (N, C)";

/// The mean of x (N, H, W, C) over its tokens: (N, C).
pub fn mean_pool<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    let map = Geometry::new("mean_pool", x.value(), [1, 1])?;
    let device = x.value().device();
    let mut y = Tensor::empty_on(&device, [map.images, map.channels], x.dtype())?;
    match &device {
        Device::Cpu => match_float!(x.dtype(), "mean_pool", T => {
            cpu::forward::<T>(Tokens::new("mean_pool", x.value())?, map, y.as_mut_slice("mean_pool")?);
        }),
        Device::Cuda(gpu) => cuda::forward(gpu, "mean_pool", x.value(), map, &mut y)?,
    }
    x.tape().record("mean_pool", &[x], y, || MeanPool { map })
}

struct MeanPool {
    map: Geometry,
}

impl Rule for MeanPool {
    rule_fields!("mean_pool");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let mut dx = grads.open(0)?;
        match dy.device() {
            Device::Cpu => match_float!(dy.dtype(), "mean_pool", T => {
                if let Some(out) = dx.out::<T>()? {
                    cpu::backward(dy.as_slice("mean_pool")?, self.map, out);
                }
            }),
            Device::Cuda(gpu) => cuda::backward(&gpu, &dy, self.map, dx.out_on_gpu()?)?,
        }
        grads.close(dx);
        Ok(())
    }
}
