//! What must hold of any differentiable operation, whatever it computes.

use super::gradient::upstream_of;
use crate::case::{Case, array, uniform};
use autograd::gradcheck::{Function, backward, backward_on, relative_error, value};
use autograd::{Error, Result, Tape, Var};
use tensor::cpu::parallel::thread_pool;
use tensor::{DType, Tensor};

/// Relative error that is attributed to rounding.
const ROUNDING: f64 = 1e-12;

/// Of each input, its gradient.
type PerInput = Vec<Option<Tensor>>;
type Law = fn(&Case, &Tensor, &PerInput) -> Result<bool>;

const SUMS: [(&str, Law); 3] = [
    ("law broken: the gradient is linear in the upstream gradient", linear_in_upstream),
    ("law broken: a second contribution to a gradient is accumulated, not stored", used_twice),
    ("law broken: one tensor passed as several operands accumulates all their gradients", one_tensor_everywhere),
];

const BITS: [(&str, Law); 5] = [
    ("law broken: two runs give the same bits", repeatable),
    ("law broken: one thread and two give the same bits", threads_do_not_matter),
    ("law broken: a tape that recomputes cheap values gives the same bits", recomputing_does_not_matter),
    ("law broken: a gradient that is wanted alone has the same bits", |case, upstream, gradients| {
        alone_as_among_all(case, &case.inputs, upstream, gradients)
    }),
    ("law broken: a strided view gives the same bits as a copy, or is refused", |case, upstream, _| {
        views_agree(case, &case.inputs, upstream)
    }),
];

/// How many laws there are.
pub(super) const COUNT: usize = SUMS.len() + BITS.len();

/// The laws that a case in f64 breaks.
pub(super) fn check(case: &Case) -> Result<Vec<&'static str>> {
    broken(case, SUMS.into_iter().chain(BITS))
}

/// The laws about bits that a case breaks, whatever the type of its inputs.
pub fn check_bits(case: &Case) -> Result<Vec<&'static str>> {
    broken(case, BITS)
}

fn broken(case: &Case, laws: impl IntoIterator<Item = (&'static str, Law)>) -> Result<Vec<&'static str>> {
    let value = value(case, &case.inputs)?;
    let upstream = upstream_of(&value).cast(value.dtype())?;
    let gradients = backward(case, &case.inputs, &upstream)?;
    let mut broken = vec![];
    for (name, holds) in laws {
        if !holds(case, &upstream, &gradients)? {
            broken.push(name);
        }
    }
    Ok(broken)
}

fn linear_in_upstream(case: &Case, upstream: &Tensor, gradients: &PerInput) -> Result<bool> {
    let other = uniform(upstream.shape().clone(), 77);
    let mixed = combine(upstream, 2.5, &other)?;
    let of_other = backward(case, &case.inputs, &other)?;
    let of_mixed = backward(case, &case.inputs, &mixed)?;
    let expected = gradients.iter().zip(&of_other).map(|(a, b)| match (a, b) {
        (Some(a), Some(b)) => combine(a, 2.5, b).map(Some),
        _ => Ok(None),
    });
    Ok(close(&of_mixed, &expected.collect::<Result<Vec<_>>>()?))
}

fn used_twice(case: &Case, upstream: &Tensor, gradients: &PerInput) -> Result<bool> {
    let twice = Twice(case);
    let doubled = backward(&twice, &case.inputs, upstream)?;
    let expected = gradients.iter().map(|g| g.as_ref().map(|g| combine(g, 1.0, g)).transpose());
    Ok(close(&doubled, &expected.collect::<Result<Vec<_>>>()?))
}

/// f(x) + f(x): every gradient arrives twice at the same place.
pub(super) struct Twice<'a>(pub &'a Case);

impl Function for Twice<'_> {
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> Result<Var<'t>> {
        crate::add(&self.0.apply(inputs)?, &self.0.apply(inputs)?)
    }
}

/// Inputs of one shape are replaced by one tensor; its gradient must be the sum of theirs.
fn one_tensor_everywhere(case: &Case, upstream: &Tensor, _: &PerInput) -> Result<bool> {
    for first in 0..case.inputs.len() {
        let like = |i: usize| {
            let (a, b) = (&case.inputs[first], &case.inputs[i]);
            a.shape() == b.shape() && a.dtype() == b.dtype() && a.dtype() != DType::Index
        };
        let group: Vec<usize> = (first..case.inputs.len()).filter(|&i| like(i)).collect();
        if group.len() < 2 {
            continue;
        }
        let mut inputs = case.inputs.clone();
        group.iter().for_each(|&i| inputs[i] = case.inputs[first].clone());
        let apart = backward(case, &inputs, upstream)?;
        let together = backward(&Same { case, group: &group }, &inputs, upstream)?;
        let mut sum: Option<Tensor> = None;
        for part in group.iter().filter_map(|&i| apart[i].as_ref()) {
            sum = Some(match sum {
                Some(sum) => combine(&sum, 1.0, part)?,
                None => part.clone(),
            });
        }
        if !close(&[together[first].clone()], &[sum]) {
            return Ok(false);
        }
    }
    Ok(true)
}

struct Same<'a> {
    case: &'a Case,
    group: &'a [usize],
}

impl Function for Same<'_> {
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> Result<Var<'t>> {
        let mut inputs = inputs.to_vec();
        for &i in &self.group[1..] {
            inputs[i] = inputs[self.group[0]].clone();
        }
        self.case.apply(&inputs)
    }
}

fn repeatable(case: &Case, upstream: &Tensor, gradients: &PerInput) -> Result<bool> {
    Ok(same_bits(gradients, &backward(case, &case.inputs, upstream)?))
}

/// What is computed for other inputs does not matter to the gradient of one.
pub(super) fn alone_as_among_all(
    case: &Case,
    inputs: &[Tensor],
    upstream: &Tensor,
    gradients: &[Option<Tensor>],
) -> Result<bool> {
    for input in (0..inputs.len()).filter(|&input| gradients[input].is_some()) {
        let alone = backward(&Alone { case, input }, inputs, upstream)?.swap_remove(input);
        if !same_bits(&[alone], &gradients[input..=input]) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// All inputs but one are constants.
struct Alone<'a> {
    case: &'a Case,
    input: usize,
}

impl Function for Alone<'_> {
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> Result<Var<'t>> {
        let constant = |x: &Var<'t>| x.tape().constant(x.value().clone());
        let fixed = inputs.iter().enumerate().map(|(i, x)| if i == self.input { x.clone() } else { constant(x) });
        self.case.apply(&fixed.collect::<Vec<_>>())
    }
}

fn threads_do_not_matter(case: &Case, upstream: &Tensor, _: &PerInput) -> Result<bool> {
    let run = |threads: usize| -> Result<(Tensor, PerInput)> {
        let no_threads =
            |error| tensor::Error::argument("gradcheck", format!("{threads} threads cannot be started: {error}"));
        let pool = thread_pool(threads).map_err(no_threads)?;
        pool.install(|| Ok((value(case, &case.inputs)?, backward(case, &case.inputs, upstream)?)))
    };
    let (one, two) = (run(1)?, run(2)?);
    Ok(same_bits(&[Some(one.0)], &[Some(two.0)]) && same_bits(&one.1, &two.1))
}

fn recomputing_does_not_matter(case: &Case, upstream: &Tensor, _: &PerInput) -> Result<bool> {
    let f = ReadAgain(case);
    let run = |tape: Tape| backward_on(&tape, &f, &case.inputs, upstream, |_| ());
    Ok(same_bits(&run(Tape::new())?, &run(Tape::recomputing_cheap())?))
}

/// f(x)·gelu(f(x)), where both factors are read by operations that keep them.
struct ReadAgain<'a>(&'a Case);

impl Function for ReadAgain<'_> {
    fn apply<'t>(&self, inputs: &[Var<'t>]) -> Result<Var<'t>> {
        let y = self.0.apply(inputs)?;
        crate::mul(&y, &crate::gelu(&crate::contiguous(&y)?)?)
    }
}

/// Whether strided views of these inputs, which may be on a GPU, give the same bits as copies of them, or are refused.
pub(super) fn views_agree(case: &Case, inputs: &[Tensor], upstream: &Tensor) -> Result<bool> {
    for input in 0..inputs.len() {
        for view in [with_gaps, transposed, repeated] {
            let Some(view) = view(&inputs[input])? else { continue };
            let given = |tensor: Tensor| {
                let mut inputs = inputs.to_vec();
                inputs[input] = tensor;
                inputs
            };
            let views = given(view.clone());
            let value_of_views = match value(case, &views) {
                Err(Error::Tensor(tensor::Error::NotContiguous { .. })) => continue,
                outcome => outcome?,
            };
            let copies = given(view.contiguous()?);
            if !same_bits(&[Some(value_of_views)], &[Some(value(case, &copies)?)])
                || !same_bits(&backward(case, &views, upstream)?, &backward(case, &copies, upstream)?)
            {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// The same elements, stored with the last two axes exchanged, if there are two.
fn transposed(tensor: &Tensor) -> Result<Option<Tensor>> {
    if tensor.rank() < 2 {
        return Ok(None);
    }
    Ok(Some(tensor.transposed()?.contiguous()?.transposed()?))
}

/// The same elements with gaps between the rows, if there is more than one row.
fn with_gaps(tensor: &Tensor) -> Result<Option<Tensor>> {
    let rank = tensor.rank();
    if rank < 2 || tensor.dtype() == DType::Index {
        return Ok(None);
    }
    let cols = tensor.shape()[rank - 1];
    let mut wider = Tensor::zeros(tensor.shape().with(rank - 1, cols + 3), DType::F64);
    let values = tensor.cast(DType::F64)?.to_vec::<f64>()?;
    let out = wider.as_mut_slice::<f64>("strided")?;
    for (row, values) in values.chunks(cols.max(1)).enumerate() {
        out[row * (cols + 3) + 1..][..cols].copy_from_slice(values);
    }
    Ok(Some(wider.cast(tensor.dtype())?.to_device(&tensor.device())?.slice(rank - 1, 1..cols + 1)?))
}

/// The first element of a vector, broadcast to as many.
fn repeated(tensor: &Tensor) -> Result<Option<Tensor>> {
    if tensor.rank() != 1 || tensor.count() < 2 {
        return Ok(None);
    }
    Ok(Some(tensor.slice(0, 0..1)?.broadcast_to(tensor.shape().clone())?))
}

/// a·factor + b
fn combine(a: &Tensor, factor: f64, b: &Tensor) -> Result<Tensor> {
    let sum: Vec<f64> = a.to_vec::<f64>()?.iter().zip(b.to_vec::<f64>()?).map(|(a, b)| a * factor + b).collect();
    Ok(Tensor::from_slice(&sum, a.shape().clone())?)
}

fn close(a: &[Option<Tensor>], b: &[Option<Tensor>]) -> bool {
    pairwise(a, b, |a, b| relative_error(a, b) <= ROUNDING)
}

/// Whether the same inputs have gradients, with the same shapes and bits.
pub(super) fn same_bits(a: &[Option<Tensor>], b: &[Option<Tensor>]) -> bool {
    pairwise(a, b, |a, b| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()))
}

fn pairwise(a: &[Option<Tensor>], b: &[Option<Tensor>], agree: impl Fn(&[f64], &[f64]) -> bool) -> bool {
    let both = a.iter().zip(b).all(|pair| match pair {
        (Some(a), Some(b)) => a.shape() == b.shape() && agree(&array(a).data, &array(b).data),
        (None, None) => true,
        _ => false,
    });
    both && a.len() == b.len()
}
