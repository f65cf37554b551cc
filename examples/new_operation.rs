//! A new operation outside the library, and the proof that its gradient is right.
//!
//! Softplus, y = ln(1 + eˣ), is a smooth version of max(0, x). Its slope is the logistic function, so the backward rule
//! is dx = dy/(1 + e⁻ˣ). An operation needs four things: the definition in plain loops, the fast forward pass, the
//! backward rule, and inputs to check it on. The check is the library's own.
//!
//! `cargo run --release --example new_operation`

use biformer::autograd::exact::{Array, Scalar};
use biformer::autograd::{InputGrads, Result, Rule, Var, rule_fields};
use biformer::ops::case::{Case, Definition, Draw, uniform};
use biformer::ops::check::check;
use biformer::ops::registry::Op;
use biformer::tensor::{Tensor, match_float};

/// 1. The definition: plain loops over any scalar. On dual numbers it gives exact derivatives.
fn reference<S: Scalar>(x: &Array<S>) -> Array<S> {
    Array { shape: x.shape.clone(), data: x.data.iter().map(|&x| (S::of(1.0) + x.exp()).ln()).collect() }
}

/// 2. The forward pass, for f32 and f64. Written so that a large x does not overflow eˣ.
fn softplus<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    let mut y = Tensor::empty(x.shape().clone(), x.dtype());
    match_float!(x.dtype(), "softplus", T => {
        for (y, &x) in y.as_mut_slice::<T>("softplus")?.iter_mut().zip(x.value().as_slice::<T>("softplus")?) {
            *y = x.max(0.0) + (-x.abs()).exp().ln_1p();
        }
    });
    // Nothing can be recorded without a rule. The rule keeps what it needs, here x, and is made only if some
    // gradient is wanted.
    x.tape().record("softplus", &[x], y, || Softplus { x: x.value().clone() })
}

struct Softplus {
    x: Tensor,
}

/// 3. The backward rule: from dy to dx.
impl Rule for Softplus {
    rule_fields!("softplus", x); // its name, and the tensors it keeps

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        // The slot is the memory for dx, and knows whether it already holds a gradient that this one must be added to.
        // (A tensor that is there already, of dx's shape, would be handed over by `grads.give`.)
        let mut slot = grads.open(0)?;
        match_float!(dy.dtype(), "softplus", T => {
            let (dy, x) = (dy.as_slice::<T>("softplus")?, self.x.as_slice::<T>("softplus")?);
            let slope = |x: T| 1.0 / (1.0 + (-x).exp());
            let dx: Vec<T> = dy.iter().zip(x).map(|(&dy, &x)| dy * slope(x)).collect();
            if let Some(mut out) = slot.out::<T>()? {
                out.put(&dx);
            }
        });
        grads.close(slot);
        Ok(())
    }
}

/// 4. What it is checked on: the production function and the reference side by side, and inputs.
struct Checked;

impl Definition for Checked {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        softplus(&x[0])
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        reference(&x[0])
    }
}

fn cases() -> Vec<Case> {
    let case = |name: &str, shape: &[usize]| Case::new(name, vec![uniform(shape, 1)], Checked);
    vec![case("a map", &[2, 3, 3, 4]), case("one element", &[1]), case("no elements", &[0, 3])]
}

fn drawn(draw: &Draw) -> Case {
    Case::new("drawn", vec![uniform([draw.within(0, 0..=9)], 1)], Checked)
}

/// 5. The check, all of it: values, gradients, laws, and whether the check would notice a wrong rule.
pub fn main() -> Result<()> {
    biformer::tensor::set_poison(true); // memory that a rule forgets to write holds NaN, not zeros
    let report = check(&Op { name: "softplus", summary: "ln(1 + exp(x))", cases, drawn, kernels: None });
    println!("{} gradient elements of {} cases compared:", report.checked, report.cases);
    println!("  with central differences, relative error {:.1e}", report.difference_error);
    println!("  with dual numbers through the reference, relative error {:.1e}", report.dual_error);
    println!("in f32, relative error {:.1e} to f64", report.single_error);
    println!("{} times a law that all gradients obey was tried (docs/03-operation.md lists them)", report.laws);
    println!("{} of {} rules broken on purpose were caught", report.killed, report.mutants);
    assert!(report.passed(), "{}", report.failures.join("\n"));
    Ok(())
}
