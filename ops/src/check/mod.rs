//! The check of an operation, from its cases alone: values, gradients, laws, and whether the check would
//! notice a wrong backward rule.
//!
//! | file | what it holds |
//! |---|---|
//! | `gradient.rs` | value against the reference; gradient against differences and against dual numbers |
//! | `device.rs` | a GPU against the CPU |
//! | `laws.rs` | what must hold of any operation: linearity, the same bits again, views, operands used twice, .. |
//! | `single.rs` | f32 against f64 |
//! | `mutants.rs` | backward rules broken on purpose, each of which the gradient check must catch |

pub mod device;
mod gradient;
mod laws;
mod mutants;
mod single;

pub use laws::check_bits;
pub use single::single_error;

use crate::case::Case;
use crate::registry::Op;
use autograd::gradcheck::nan_max;
use gradient::Oracle;
use tensor::DType;

/// Largest relative error that a gradient may have against central differences.
pub const DIFFERENCE_TOLERANCE: f64 = 1e-6;
/// Largest relative error that a gradient or a value may have against the reference in dual numbers.
pub const EXACT_TOLERANCE: f64 = 1e-10;
/// Largest relative error that a value or a gradient in f32 may have against f64: about a thousand roundings of 6e-8,
/// of terms that may cancel.
pub const SINGLE_TOLERANCE: f64 = 1e-4;

/// What the check of one operation found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The operation.
    pub op: &'static str,
    /// Cases checked.
    pub cases: usize,
    /// Gradient elements compared with both witnesses.
    pub checked: usize,
    /// Gradient elements of large cases that were left out of the sample.
    pub skipped: usize,
    /// The largest relative error of a value against the reference.
    pub value_error: f64,
    /// The largest relative error of a gradient against central differences.
    pub difference_error: f64,
    /// The largest relative error of a gradient against dual numbers.
    pub dual_error: f64,
    /// The largest relative error of a value or a gradient in f32 against f64.
    pub single_error: f64,
    /// Law checks made: each law, once for each case.
    pub laws: usize,
    /// Broken backward rules that were tried.
    pub mutants: usize,
    /// How many of them the gradient check caught.
    pub killed: usize,
    /// What failed, one line each.
    pub failures: Vec<String>,
}

impl Report {
    /// Whether all that was checked holds.
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// The share of broken rules that were caught.
    pub fn kill_rate(&self) -> f64 {
        if self.mutants == 0 { 1.0 } else { self.killed as f64 / self.mutants as f64 }
    }

    fn fail(&mut self, case: &Case, what: impl std::fmt::Display) {
        self.failures.push(format!("{}, case \"{}\": {what}", self.op, case.name));
    }

    /// Takes an error of a case into account, which must be `within` the limit, and may be the worst so far.
    fn note(&mut self, case: &Case, what: &str, error: f64, limit: f64, worst: fn(&mut Self) -> &mut f64) {
        let worst = worst(self);
        *worst = nan_max(*worst, error);
        if !within(error, limit) {
            self.fail(case, format!("{what}: relative error {error:.1e}, more than {limit:.0e}"));
        }
    }
}

/// Whether an error is no larger than a limit. NaN never is.
pub fn within(error: f64, limit: f64) -> bool {
    error <= limit
}

/// Checks an operation on all its cases, and by mutation testing whether the check would catch a wrong backward rule of
/// it. An operation without cases, or only of empty inputs, fails.
pub fn check(op: &Op) -> Report {
    let cases = (op.cases)();
    let mut report = Report { op: op.name, ..Report::default() };
    if cases.iter().all(|case| case.inputs.iter().all(|input| input.count() == 0)) {
        report.failures.push(format!("{}: it has no cases with numbers, so that nothing was checked", op.name));
    }
    let oracles: Vec<_> = cases.iter().map(|case| check_but_mutants(case, &mut report)).collect();
    // A case with an error might have been the one that catches a mutant.
    if let Some(oracles) = oracles.into_iter().collect::<Option<Vec<_>>>() {
        mutants::check(&oracles, &mut report);
    }
    report
}

/// Checks one case: value and gradients, in f64 and in f32, and laws.
pub fn check_case(case: &Case, report: &mut Report) {
    check_but_mutants(case, report);
}

/// As [`check_case`]. Returns the exact gradients, unless there is an error.
fn check_but_mutants<'a>(case: &'a Case, report: &mut Report) -> Option<Oracle<'a>> {
    report.cases += 1;
    let oracle = gradient::check(case, report).map_err(|error| report.fail(case, error)).ok();
    match single_error(case, DType::F32) {
        Ok(error) => report.note(case, "f32 against f64", error, SINGLE_TOLERANCE, |r| &mut r.single_error),
        Err(error) => report.fail(case, format!("in f32: {error}")),
    }
    match laws::check(case) {
        Ok(broken) => {
            report.laws += laws::COUNT;
            broken.into_iter().for_each(|law| report.fail(case, law));
        }
        Err(error) => report.fail(case, error),
    }
    oracle
}
