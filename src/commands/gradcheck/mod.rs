//! `biformer gradcheck`.

mod on_device;

use super::Status;
use super::options::Threads;
use super::output::{Kind, ensure_output};
use crate::device::DeviceName;
use crate::printing::plural;
use anyhow::{Result, bail};
use clap::Args;
use model::{did_you_mean, nearest, write_safely};
use ops::check::{DIFFERENCE_TOLERANCE, EXACT_TOLERANCE, Report, check};
use ops::registry::{OPS, Op, find};
use serde_json::{Value, json};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Arguments {
    /// Only this operation.
    #[arg(long, value_name = "NAME")]
    op: Option<String>,
    /// Checks the kernels of this device, cuda (or cuda:1, ...) or emulated, against those of the CPU, instead of these
    /// against the operations' definitions.
    #[arg(long, value_name = "NAME", default_value_t)]
    device: DeviceName,
    /// Writes the report as JSON as well.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    threads: Threads,
}

pub fn run(arguments: &Arguments) -> Result<Status> {
    let ops: Vec<&Op> = match &arguments.op {
        None => OPS.iter().collect(),
        Some(name) => match find(name) {
            Some(op) => vec![op],
            None => {
                let known: Vec<&str> = OPS.iter().map(|op| op.name).collect();
                let hint = nearest(name, known.iter().copied());
                let hint = did_you_mean(hint.as_deref());
                bail!("there is no operation \"{name}\"{hint}; the operations are {}", known.join(", "));
            }
        },
    };
    arguments.json.as_deref().map_or(Ok(()), |path| ensure_output("--json", path, Kind::Checks))?;
    arguments.threads.run(|| check_all(arguments, &ops))
}

fn check_all(arguments: &Arguments, ops: &[&Op]) -> Result<Status> {
    let (reports, passed) = match arguments.device {
        DeviceName::Cpu => on_cpu(ops)?,
        device => on_device::check_all(device, ops)?,
    };
    if let Some(path) = &arguments.json {
        write_safely(path, serde_json::to_string_pretty(&reports)?.as_bytes())?;
    }
    Ok(if passed { Status::Done } else { Status::CheckFailed })
}

/// Checks operations against their definitions. Returns the reports as JSON, and whether all passed.
fn on_cpu(ops: &[&Op]) -> Result<(Vec<Value>, bool)> {
    let reports = print_all(ops)?;
    print_failures(&reports)?;
    Ok((reports.iter().map(as_json).collect(), reports.iter().all(|report| report.failures.is_empty())))
}

/// Checks operations, and prints a line of each as soon as it is known.
fn print_all(ops: &[&Op]) -> Result<Vec<Report>> {
    let mut reports = vec![];
    say!(
        "Gradients in f64 against central differences (limit {DIFFERENCE_TOLERANCE:.0e}) and against dual numbers \
         through the\nreference (limit {EXACT_TOLERANCE:.0e}); laws; and mutants, backward rules broken on purpose, \
         that must be caught.\n"
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

fn print_failures(reports: &[Report]) -> Result<()> {
    let failures: Vec<&String> = reports.iter().flat_map(|report| &report.failures).collect();
    say!("");
    for failure in &failures {
        say!("{failure}");
    }
    let skipped: usize = reports.iter().map(|report| report.skipped).sum();
    say!(
        "{} operation{}, {} failure{}. Skipped: {skipped} elements of large cases, by sampling.",
        reports.len(),
        plural(reports.len()),
        failures.len(),
        plural(failures.len())
    );
    Ok(())
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
        "laws": report.laws,
        "mutants": report.mutants,
        "killed": report.killed,
        "kill_rate": report.kill_rate(),
        "passed": report.passed(),
        "failures": report.failures,
    })
}
