//! Matrix products, batched over any leading axes.
//!
//! **Forward.** y = a·b, with a (..., M, K), b (..., K, N) under the same leading axes, y (..., M, N). One matrix
//! for all of a is for [`linear`](mod@crate::linear).
//!
//! **Backward.** y\[m, n\] = Σₖ a\[m, k\] b\[k, n\], hence da = dy·bᵀ and db = aᵀ·dy for each pair. Saved: a and b, the
//! factors of the two products.
//!
//! Operands may be views with any strides, so a transposed or permuted operand (`permute`) costs nothing; both of the
//! same type: f32 or f64, and on a GPU also bf16. On a GPU a view costs a copy unless its matrices, or their
//! transposes, are contiguous. Errors: [`tensor::Error::Shape`] when the extents do not fit, [`tensor::Error::DType`],
//! [`tensor::Error::Argument`] if the size of y overflows. Source: `torch.matmul`, without its broadcasting.

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use autograd::{InputGrads, MultiplyAdds, Result, Rule, Var, rule_fields};
use cpu::Matrices;
use tensor::cuda::Module;
use tensor::{Device, Error, Shape, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "a·b, batched over leading axes";

/// a (..., M, K) times b (..., K, N): (..., M, N).
/// Operands and errors: those of the [module](mod@crate::matmul).
pub fn matmul<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    let [leading @ .., _, inner] = &a.shape()[..] else {
        return Err(Error::shape("matmul", "a (..., M, K)", a.shape()).into());
    };
    let cols = match &b.shape()[..] {
        [b_leading @ .., rows, cols] if rows == inner && b_leading == leading => *cols,
        _ => {
            let axes = Shape::from(leading);
            let expected =
                format!("b (..., {inner}, N) under the leading axes {axes} of a; `linear` takes one b for all");
            return Err(Error::shape("matmul", expected, b.shape()).into());
        }
    };
    let device = a.value().device();
    let shape = a.shape().with(a.shape().len() - 1, cols).countable("matmul")?;
    let mut y = Tensor::empty_on(&device, shape, a.dtype())?;
    match device {
        Device::Cpu => match_float!(a.dtype(), "matmul", T => cpu::forward::<T>(
            Matrices::new(a.value())?,
            Matrices::new(b.value())?,
            y.as_mut_slice("matmul")?,
        )),
        Device::Cuda(_) => cuda::forward(a.value(), b.value(), &mut y)?,
    }
    a.tape().record("matmul", &[a, b], y, || Matmul { a: a.value().clone(), b: b.value().clone() })
}

struct Matmul {
    a: Tensor,
    b: Tensor,
}

impl Rule for Matmul {
    rule_fields!("matmul", a, b);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let (mut da, mut db) = (grads.open(0)?, grads.open(1)?);
        match dy.device() {
            Device::Cpu => match_float!(dy.dtype(), "matmul", T => cpu::backward::<T>(
                Matrices::new(&dy)?,
                Matrices::new(&self.a)?,
                Matrices::new(&self.b)?,
                [da.out()?, db.out()?],
            )),
            Device::Cuda(_) => cuda::backward(&dy, &self.a, &self.b, [da.out_on_gpu()?, db.out_on_gpu()?])?,
        }
        [da, db].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }

    fn multiply_adds(&self, y: &Shape) -> MultiplyAdds {
        MultiplyAdds::product(y.count() * self.a.shape().last().unwrap_or(&0))
    }
}
