//! `biformer gradcheck`.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | what can be asked for |
//! | `on_cpu.rs` | the operations, against their definitions |
//! | `on_device.rs` | `--device`: a GPU's kernels, against those of the CPU |
//! | `of_model.rs` | `--model`: the gradients of a whole model |

mod of_model;
mod on_cpu;
mod on_device;

use super::Status;
use super::options::{ImageSize, ModelChoice, Threads, model_names};
use super::output::{Kind, ensure_output};
use super::set::assignment;
use crate::device::DeviceName;
use crate::printing::plural;
use anyhow::{Result, bail};
use clap::Args;
use model::{did_you_mean, nearest, write_safely};
use ops::registry::{OPS, Op, find};
use serde_json::Value;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Arguments {
    /// Only this operation.
    #[arg(long, value_name = "NAME")]
    op: Option<String>,
    #[arg(
        long,
        value_name = "NAME",
        conflicts_with_all = ["op", "device"],
        help = format!("Instead of operations, the whole of a model: {}", model_names())
    )]
    model: Option<String>,
    /// With --model: changes a field of the model, for instance --set depth=1,1,1 soft_routing=true.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = assignment, requires = "model")]
    set: Vec<String>,
    /// With --model: the images' side, or height and width (600x500); by default what the model is meant for.
    #[arg(long, value_name = "N|HxW", requires = "model")]
    image_size: Option<ImageSize>,
    /// Checks the kernels of this device, cuda (or cuda:1, ...) or emulated, against those of the CPU, instead of these
    /// against the operations' definitions.
    #[arg(long, value_name = "NAME", default_value_t)]
    device: DeviceName,
    /// Writes the report to this file as well, as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
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
    ensure_output("--report", arguments.report.as_deref(), Kind::Checks)?;
    arguments.threads.run(|| check_all(arguments, &ops))
}

fn check_all(arguments: &Arguments, ops: &[&Op]) -> Result<Status> {
    // What a kernel forgets to write must not pass for zeros.
    tensor::set_poison(true);
    let reports = match (&arguments.model, arguments.device) {
        (Some(model), _) => {
            let choice = ModelChoice { model: model.clone(), set: arguments.set.clone() };
            of_model::check_all(model, &choice.config()?, choice.image_size(arguments.image_size)?.0)?
        }
        (None, DeviceName::Cpu) => on_cpu::check_all(ops)?,
        (None, device) => on_device::check_all(device, ops)?,
    };
    if let Some(path) = &arguments.report {
        write_safely(path, serde_json::to_string_pretty(&reports)?.as_bytes())?;
    }
    Ok(status(&reports))
}

/// Prints what failed, and how much was checked; `note` ends the line.
fn print_failures<'r>(operations: usize, failures: impl Iterator<Item = &'r String>, note: &str) -> Result<()> {
    say!("");
    let mut failed = 0;
    for failure in failures {
        say!("{failure}");
        failed += 1;
    }
    say!("{operations} operation{}, {failed} failure{}.{note}", plural(operations), plural(failed));
    Ok(())
}

fn status(reports: &[Value]) -> Status {
    if reports.iter().all(|report| report["passed"] == true) { Status::Done } else { Status::CheckFailed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_failure_among_many_is_a_failure() {
        let [passed, failed] = [true, false].map(|passed| json!({ "passed": passed }));
        assert_eq!(status(&[passed.clone(), passed.clone()]), Status::Done);
        assert_eq!(status(&[passed.clone(), failed, passed]), Status::CheckFailed);
    }
}
