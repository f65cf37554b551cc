//! Stochastic depth: dropout of whole samples.
//!
//! **Forward.** y\[n\] = kₙ·x\[n\]/(1 − p) for each sample n of x (N, ...), where kₙ is 1 if the random stream's
//! uniform number n₀ + n is at least p and 0 otherwise, with n₀ the index of x's first sample in the whole batch: a
//! batch processed in pieces drops the same samples. For p = 0 y is x.
//!
//! [`drop_path_residual`] is x with a branch: y\[n\] = x\[n\] + kₙ·f(x)\[n\]/(1 − p), for an f that treats each sample
//! by itself. On the CPU f gets only the samples that survive, copied together where others are dropped, so that a
//! branch of which a tenth is dropped takes a tenth less time. A GPU computes all of them: it replays launches whose
//! sizes were recorded.
//!
//! **Backward.** y is linear in x: dx\[n\] = kₙ·dy\[n\]/(1 − p). Nothing is saved but which samples survive. The
//! residual's gradient is dy, and what comes back through f is added to that of the samples that went into it.
//!
//! Operands must be contiguous; f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::Argument`] for p outside [0,
//! 1), or if the numbers of the samples overflow, [`tensor::Error::Shape`] for a tensor without axes or a branch of
//! another shape than what it was given, [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source: Huang et
//! al., "Deep networks with stochastic depth", ECCV 2016; one draw per sample, as in timm's `DropPath`.

pub mod cases;
mod cpu;
mod cuda;
mod draws;
pub mod reference;

use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use draws::{Draws, Moves};
use tensor::cpu::parallel::Out;
use tensor::cuda::Module;
use tensor::rng::Philox;
use tensor::{Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "drops whole samples at random, scales the rest by 1/(1-p)";

/// x (N, ...) with each sample dropped with probability `p`, which `rng` decides, and the others divided by 1 − p.
/// `first` is the index of x's first sample in the whole batch, if x is only a part of it; otherwise 0.
/// Operands and errors: those of the [module](mod@crate::drop_path).
pub fn drop_path<'t>(x: &Var<'t>, p: f64, rng: Philox, first: usize) -> Result<Var<'t>> {
    let Some(draws) = Draws::new(x.shape(), p, rng, first)? else { return Ok(x.clone()) };
    moved(x, None, draws.in_place(&x.value().device()))
}

/// x (N, ...) + [`drop_path`]`(branch(x), p, rng, first)`. The branch must treat each sample by itself, whatever its
/// number in the batch: it may be given only some of them, one after the other, or none. So a `drop_path` within it
/// would draw for other samples. Errors: also those of `branch`.
pub fn drop_path_residual<'t, E: From<autograd::Error>>(
    x: &Var<'t>,
    p: f64,
    rng: Philox,
    first: usize,
    branch: impl FnOnce(&Var<'t>) -> std::result::Result<Var<'t>, E>,
) -> std::result::Result<Var<'t>, E> {
    let branch = |x: &Var<'t>| {
        let y = branch(x)?;
        if y.shape() == x.shape() {
            return Ok(y);
        }
        let expected = format!("a branch of shape {}", x.shape());
        Err(E::from(Error::shape("drop_path", expected, y.shape()).into()))
    };
    let Some(draws) = Draws::new(x.shape(), p, rng, first)? else { return Ok(crate::add(x, &branch(x)?)?) };
    let device = x.value().device();
    if device == Device::Cpu && draws.survivors().len() < draws.samples() {
        let survivors = moved(x, None, draws.collected())?;
        return Ok(moved(&branch(&survivors)?, Some(x), draws.spread())?);
    }
    Ok(moved(&branch(x)?, Some(x), draws.in_place(&device))?)
}

/// The samples of x where `moves` takes them, plus a residual.
fn moved<'t>(x: &Var<'t>, residual: Option<&Var<'t>>, moves: Moves) -> Result<Var<'t>> {
    let mut y = Tensor::empty_on(&x.value().device(), x.shape().with(0, moves.samples()), x.dtype())?;
    let added = residual.map(Var::value);
    match &moves {
        Moves::Rows { forth, scale, .. } => match_float!(x.dtype(), "drop_path", T => cpu::apply::<T>(
            x.value().as_slice("drop_path")?,
            added.map(|added| added.as_slice("drop_path")).transpose()?,
            forth,
            *scale,
            Out::store(y.as_mut_slice("drop_path")?),
        )),
        Moves::OnGpu(draws) => cuda::apply(x.value(), added, draws, y.as_out("drop_path", false)?)?,
    }
    let inputs: Vec<&Var<'t>> = [Some(x), residual].into_iter().flatten().collect();
    x.tape().record("drop_path", &inputs, y, || DropPath { moves, residual: residual.is_some() })
}

struct DropPath {
    moves: Moves,
    residual: bool,
}

impl Rule for DropPath {
    rule_fields!("drop_path");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let mut slot = grads.open_in(0, dy.dtype())?;
        match &self.moves {
            Moves::Rows { back, scale, .. } => match_float!(dy.dtype(), "drop_path", T => {
                if let Some(out) = slot.out::<T>()? {
                    cpu::apply(dy.as_slice("drop_path")?, None, back, *scale, out);
                }
            }),
            Moves::OnGpu(draws) => {
                if let Some(out) = slot.out_on_gpu()? {
                    cuda::apply(&dy, None, draws, out)?;
                }
            }
        }
        grads.close(slot);
        if self.residual {
            grads.give(1, dy)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use autograd::{Error, Gradients, Tape};

    /// The samples that `branch` got, the result, and x's gradient, for x[n] = n + 1 and the branch 10·x.
    fn skipping(samples: usize, p: f64, stream: u64, first: usize) -> Result<[Vec<f64>; 3]> {
        let tape = Tape::new();
        let x: Vec<f64> = (1..=samples).map(|n| n as f64).collect();
        let x = tape.input(Tensor::from_slice(&x, [samples, 1])?);
        let mut given = vec![];
        let y = drop_path_residual(&x, p, Philox::new(1, stream), first, |x| {
            given = x.value().to_vec::<f64>()?;
            crate::scale(x, 10.0)
        })?;
        let mut gradients = Gradients::default();
        tape.backward(&crate::sum(&y, &[0, 1], false)?, &mut gradients)?;
        let dx = gradients.of(&x).map_or(Ok(vec![]), |dx| dx.to_vec::<f64>())?;
        Ok([given, y.value().to_vec()?, dx])
    }

    #[test]
    fn samples_that_are_dropped_skip_the_branch() -> Result<()> {
        let survives = |n: usize| Philox::new(1, 4).uniform(n as u64) >= 0.5;
        let [given, y, dx] = skipping(40, 0.5, 4, 7)?;
        let survivors: Vec<f64> = (1..=40).filter(|n| survives(n - 1 + 7)).map(|n| n as f64).collect();
        assert!(given == survivors && (10..30).contains(&given.len()), "{given:?}");
        for (n, (y, dx)) in y.iter().zip(dx).enumerate() {
            let slope = if survives(n + 7) { 21.0 } else { 1.0 };
            assert_eq!([*y, dx], [slope * (n + 1) as f64, slope], "sample {n}");
        }
        Ok(())
    }

    #[test]
    fn where_all_survive_they_are_not_copied_and_where_none_does_the_branch_gets_none() -> Result<()> {
        assert_eq!(skipping(3, 0.0, 1, 0)?, [vec![1.0, 2.0, 3.0], vec![11.0, 22.0, 33.0], vec![11.0; 3]]);
        assert_eq!(skipping(3, 0.999_999, 1, 0)?, [vec![], vec![1.0, 2.0, 3.0], vec![1.0; 3]]);
        let tape = Tape::inference();
        let x = tape.constant(Tensor::full([3, 2], 1.0));
        drop_path_residual(&x, 1e-9, Philox::new(1, 1), 0, |given| {
            assert!(std::ptr::eq(given, &x));
            Ok::<_, Error>(given.clone())
        })?;
        Ok(())
    }

    #[test]
    fn a_branch_of_another_shape_and_its_own_errors_come_out() {
        let tape = Tape::inference();
        let x = tape.constant(Tensor::full([4, 2], 1.0));
        let run = |p, branch: fn(&Var<'_>) -> Result<()>| {
            let y = drop_path_residual(&x, p, Philox::new(1, 3), 0, |given| {
                branch(given)?;
                Ok::<_, Error>(tape.constant(Tensor::full([1, 2], 1.0)))
            });
            y.unwrap_err().to_string()
        };
        for p in [0.0, 1e-9, 0.5] {
            let error = run(p, |_| Ok(()));
            assert!(error.contains("a branch of shape ") && error.contains("(1, 2)"), "{error}");
            let error = run(p, |x| Ok(x.value().ensure_dtype("branch", tensor::DType::F32)?));
            assert!(error.contains("branch: "), "{error}");
        }
        let flat = tape.constant(Tensor::full([0; 0], 1.0));
        let error = drop_path_residual(&flat, 0.5, Philox::new(1, 3), 0, |x| Ok::<_, Error>(x.clone())).unwrap_err();
        assert!(error.to_string().contains("x (N, ...)"), "{error}");
    }
}
