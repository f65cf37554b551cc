//! `biformer gradcheck`: the operations against their definitions.

use super::print_failures;
use anyhow::Result;
use ops::check::{DIFFERENCE_TOLERANCE, EXACT_TOLERANCE, Report, SINGLE_TOLERANCE, check};
use ops::registry::Op;
use serde_json::{Value, json};

/// Checks operations against their definitions. Returns the reports as JSON.
pub fn check_all(ops: &[&Op]) -> Result<Vec<Value>> {
    let reports = print_all(ops)?;
    let skipped: usize = reports.iter().map(|report| report.skipped).sum();
    let skipped = format!(" Skipped: {skipped} elements of large cases, by sampling.");
    print_failures(reports.len(), reports.iter().flat_map(|report| &report.failures), &skipped)?;
    Ok(reports.iter().map(as_json).collect())
}

/// Checks operations, and prints a line of each as soon as it is known.
fn print_all(ops: &[&Op]) -> Result<Vec<Report>> {
    let mut reports = vec![];
    say!(
        "Gradients in f64 against central differences (limit {DIFFERENCE_TOLERANCE:.0e}) and against dual numbers \
         through the\nreference (limit {EXACT_TOLERANCE:.0e}); values and gradients in f32 against f64 (limit \
         {SINGLE_TOLERANCE:.0e}); laws; and mutants,\nbackward rules broken on purpose, that must be caught.\n"
    );
    say!("operation           cases  checked  skipped  differences  dual numbers   laws  mutants caught");
    for op in ops {
        let report = check(op);
        let caught = format!("{}/{} ({:.0}%)", report.killed, report.mutants, 100.0 * report.kill_rate());
        let line = format!(
            "{:<19} {:>5}  {:>7}  {:>7}  {:>11}  {:>12}  {:>5}  {caught:>14}{}",
            report.op,
            report.cases,
            report.checked,
            report.skipped,
            format!("{:.1e}", report.difference_error),
            format!("{:.1e}", report.dual_error),
            report.laws,
            if report.passed() { "" } else { "  FAILED" }
        );
        reports.push(report);
        say!("{line}");
    }
    Ok(reports)
}

fn as_json(report: &Report) -> Value {
    json!({
        "op": report.op,
        "cases": report.cases,
        "checked": report.checked,
        "skipped": report.skipped,
        "value_error": report.value_error,
        "difference_error": report.difference_error,
        "dual_error": report.dual_error,
        "single_error": report.single_error,
        "laws": report.laws,
        "mutants": report.mutants,
        "killed": report.killed,
        "kill_rate": report.kill_rate(),
        "passed": report.passed(),
        "failures": report.failures,
    })
}
