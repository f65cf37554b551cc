//! Backward rules broken on purpose.
//!
//! A check that never fails proves nothing. For every operation each breakage below is tried on what its rule reads
//! (the upstream gradient, and each tensor that it saved) and on what it returns (the gradient of each input); at least
//! one case must detect it. A breakage that changes no bit on any case (say, two equal operands swapped) is no mutant
//! and does not count.

use super::Report;
use super::gradient::Oracle;
use super::laws::same_bits;
use autograd::Result;
use tensor::{DType, Tensor};

/// A way to corrupt a list of numbers.
type Breakage = (&'static str, fn(&mut [f64]));
const WRONG_SIGN: &str = "one wrong sign";
const BREAKAGES: [Breakage; 5] = [
    ("a factor 1 + 1e-6", |x| x.iter_mut().for_each(|x| *x *= 1.0 + 1e-6)),
    ("all zeros", |x| x.fill(0.0)),
    ("one element dropped", |x| {
        if let Some(x) = x.iter_mut().find(|x| **x != 0.0) {
            *x = 0.0;
        }
    }),
    ("all elements moved by one place", |x| {
        if !x.is_empty() {
            x.rotate_right(1);
        }
    }),
    (WRONG_SIGN, |x| {
        if let Some(x) = x.iter_mut().find(|x| **x != 0.0) {
            *x = -*x;
        }
    }),
];

/// What is corrupted, and how.
#[derive(Clone, Copy)]
enum Mutant {
    /// The upstream gradient, as the rule reads it.
    Upstream { breakage: usize },
    /// The gradient of one input.
    Gradient { input: usize, breakage: usize },
    /// The gradients of two inputs, exchanged.
    SwappedGradients { first: usize, second: usize },
    /// A tensor that a node saved.
    Saved { node: usize, tensor: usize, breakage: usize },
    /// Two tensors that a node saved, exchanged.
    SwappedSaved { node: usize, first: usize, second: usize },
}

enum Outcome {
    Unchanged,
    Caught,
    Survived,
}

pub(super) fn check(oracles: &[Oracle<'_>], report: &mut Report) {
    let arity = oracles.iter().map(|oracle| oracle.case.inputs.len()).max().unwrap_or(0);
    // The maximum number of nodes, and of saved tensors of each node, over all cases.
    let mut saved: Vec<usize> = vec![];
    for oracle in oracles {
        match saved_per_node(oracle) {
            Ok(counts) => {
                saved.resize(saved.len().max(counts.len()), 0);
                saved.iter_mut().zip(counts).for_each(|(most, count)| *most = count.max(*most));
            }
            Err(error) => return report.fail(oracle.case, error),
        }
    }
    for mutant in all(arity, &saved) {
        let (mut changed, mut caught) = (false, false);
        for oracle in oracles {
            match run(mutant, oracle) {
                Ok(Outcome::Unchanged) => {}
                Ok(Outcome::Survived) => changed = true,
                // A rule that refuses spoilt data has noticed it as well.
                Ok(Outcome::Caught) | Err(_) => (changed, caught) = (true, true),
            }
            if caught {
                break;
            }
        }
        report.mutants += usize::from(changed);
        report.killed += usize::from(caught);
        if changed && !caught {
            report.failures.push(format!("{}: no case detects {}", report.op, describe(mutant)));
        }
    }
}

fn all(arity: usize, saved: &[usize]) -> Vec<Mutant> {
    let breakages = 0..BREAKAGES.len();
    let mut mutants: Vec<Mutant> = breakages.clone().map(|breakage| Mutant::Upstream { breakage }).collect();
    for input in 0..arity {
        mutants.extend(breakages.clone().map(|breakage| Mutant::Gradient { input, breakage }));
        mutants.extend((0..input).map(|first| Mutant::SwappedGradients { first, second: input }));
    }
    for (node, &tensors) in saved.iter().enumerate() {
        for tensor in 0..tensors {
            mutants.extend(breakages.clone().map(|breakage| Mutant::Saved { node, tensor, breakage }));
            mutants.extend((0..tensor).map(|first| Mutant::SwappedSaved { node, first, second: tensor }));
        }
    }
    mutants
}

/// How many tensors each node of a case saves.
fn saved_per_node(oracle: &Oracle<'_>) -> Result<Vec<usize>> {
    let mut counts = vec![];
    oracle.gradients(oracle.upstream(), |tape| {
        counts = tape.nodes().iter().map(|node| node.saved().len()).collect::<Vec<_>>()
    })?;
    Ok(counts)
}

fn run(mutant: Mutant, oracle: &Oracle<'_>) -> Result<Outcome> {
    let mut changed = false;
    let mut upstream = oracle.upstream().clone();
    if let Mutant::Upstream { breakage } = mutant {
        changed = spoil(&mut upstream, BREAKAGES[breakage].1);
    }
    let mut gradients = oracle.gradients(&upstream, |tape| match mutant {
        Mutant::Saved { node, tensor, breakage } => tape.tamper(node, |mut saved| {
            if let Some(saved) = saved.get_mut(tensor) {
                changed = spoil(saved, BREAKAGES[breakage].1);
            }
        }),
        Mutant::SwappedSaved { node, first, second } => tape.tamper(node, |mut saved| {
            if second < saved.len() && swap_matters(saved[first], saved[second]) {
                let (left, right) = saved.split_at_mut(second);
                changed = true;
                std::mem::swap(&mut *left[first], &mut *right[0]);
            }
        }),
        _ => {}
    })?;
    match mutant {
        Mutant::Gradient { input, breakage } => {
            if let Some(Some(gradient)) = gradients.get_mut(input) {
                changed = spoil(gradient, BREAKAGES[breakage].1);
            }
        }
        Mutant::SwappedGradients { first, second } => {
            if let Ok([Some(a), Some(b)]) = gradients.get_disjoint_mut([first, second])
                && swap_matters(a, b)
            {
                std::mem::swap(a, b);
                changed = true;
            }
        }
        _ => {}
    }
    // A rule may be even in what it saves: 1 − y², of tanh, is the same for −y. (One that ignores it altogether does
    // not notice the other breakages either.)
    let even = changed
        && matches!(mutant, Mutant::Saved { breakage, .. } if BREAKAGES[breakage].0 == WRONG_SIGN)
        && same_bits(&gradients, &oracle.gradients(oracle.upstream(), |_| {})?);
    if !changed || even {
        return Ok(Outcome::Unchanged);
    }
    Ok(if oracle.accepts(&gradients)? { Outcome::Survived } else { Outcome::Caught })
}

/// Whether exchanging two tensors is possible and has an effect: same shape and type, but different elements.
fn swap_matters(a: &Tensor, b: &Tensor) -> bool {
    a.shape() == b.shape() && a.dtype() == b.dtype() && crate::case::array(a) != crate::case::array(b)
}

/// Replaces a tensor by a corrupted copy; returns whether anything changed.
fn spoil(tensor: &mut Tensor, breakage: fn(&mut [f64])) -> bool {
    let before = crate::case::array(tensor).data;
    let mut after = before.clone();
    breakage(&mut after);
    let shape = tensor.shape().clone();
    let spoilt = match tensor.dtype() {
        DType::Index => Tensor::from_slice(&after.iter().map(|&x| x.abs() as u32).collect::<Vec<_>>(), shape),
        _ => Tensor::from_slice(&after, shape),
    };
    // invariant: as many values as before.
    *tensor = spoilt.expect("values of the tensor's shape");
    crate::case::array(tensor).data != before
}

fn describe(mutant: Mutant) -> String {
    match mutant {
        Mutant::Upstream { breakage } => format!("{} in the upstream gradient", BREAKAGES[breakage].0),
        Mutant::Gradient { input, breakage } => format!("{} in the gradient of input {input}", BREAKAGES[breakage].0),
        Mutant::SwappedGradients { first, second } => format!("the gradients of inputs {first} and {second} swapped"),
        Mutant::Saved { node, tensor, breakage } => {
            format!("{} in saved tensor {tensor} of node {node}", BREAKAGES[breakage].0)
        }
        Mutant::SwappedSaved { node, first, second } => {
            format!("saved tensors {first} and {second} of node {node} swapped")
        }
    }
}
