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
}

/// Checks an operation on all its cases, and by mutation testing whether the check would catch a wrong backward rule of
/// it. An operation without cases fails.
pub fn check(op: &Op) -> Report {
    let cases = (op.cases)();
    let mut report = Report { op: op.name, ..Report::default() };
    if cases.is_empty() {
        report.failures.push(format!("{}: it has no cases, so that nothing was checked", op.name));
    }
    for case in &cases {
        check_case(case, &mut report);
    }
    mutants::check(&cases, &mut report);
    report
}

/// Checks one case: value and gradients, in f64 and in f32, and laws.
pub fn check_case(case: &Case, report: &mut Report) {
    report.cases += 1;
    match gradient::check(case) {
        Ok(found) => {
            report.checked += found.checked;
            report.skipped += found.skipped;
            report.value_error = nan_max(report.value_error, found.value_error);
            report.difference_error = nan_max(report.difference_error, found.difference_error);
            report.dual_error = nan_max(report.dual_error, found.dual_error);
            for (what, error, limit) in [
                ("value against the reference", found.value_error, EXACT_TOLERANCE),
                ("gradient against differences", found.difference_error, DIFFERENCE_TOLERANCE),
                ("gradient against dual numbers", found.dual_error, EXACT_TOLERANCE),
            ] {
                if error.is_nan() || error > limit {
                    report.fail(case, format!("{what}: relative error {error:.1e}, more than {limit:.0e}"));
                }
            }
        }
        Err(error) => report.fail(case, error),
    }
    match single_error(case, DType::F32) {
        Ok(error) => {
            report.single_error = nan_max(report.single_error, error);
            if error.is_nan() || error > SINGLE_TOLERANCE {
                report.fail(
                    case,
                    format!("f32 against f64: relative error {error:.1e}, more than {SINGLE_TOLERANCE:.0e}"),
                );
            }
        }
        Err(error) => report.fail(case, format!("in f32: {error}")),
    }
    match laws::check(case) {
        Ok(broken) => {
            report.laws += laws::COUNT;
            broken.into_iter().for_each(|law| report.fail(case, law));
        }
        Err(error) => report.fail(case, error),
    }
}
