//! `biformer gradcheck --device`: the kernels of a GPU against those of the CPU.

use super::print_failures;
use crate::device::{Compute, DeviceName};
use anyhow::Result;
use ops::check::device::{DeviceReport, check_on, tolerance};
use ops::registry::Op;
use serde_json::{Value, json};
use tensor::{DType, Tensor};

/// First what most people train in: after a fault a GPU refuses its process everything.
const TYPES: [DType; 3] = [DType::Bf16, DType::F32, DType::F64];

/// Checks operations in each type, and prints a line of each as soon as it is known. Returns the reports as JSON.
pub fn check_all(device: DeviceName, ops: &[&Op]) -> Result<Vec<Value>> {
    let device = Compute { device, ..Compute::default() }.open()?;
    // Where no kernel can be compiled at all, it is not the operations that fail.
    Tensor::full_on(&device, [1], 1.0, DType::F32)?.cast(DType::F64)?;
    let [bf16, f32, f64] = TYPES.map(tolerance);
    say!(
        "Values and gradients on {device} against those of the CPU in f64, of the same inputs (limits: {bf16:.1e} in bf16, \
         {f32:.1e}\nin f32, {f64:.1e} in f64); gradients that are added to others; and a second run, whose bits must be the \
         same.\n"
    );
    say!("operation           type  cases     values  gradients");
    let mut reports = vec![];
    for op in ops {
        for dtype in TYPES {
            let report = check_on(op, &device, dtype, true);
            say!(
                "{:<19} {:<5} {:>5}  {:>9}  {:>9}{}",
                report.op,
                dtype.name(),
                report.cases,
                format!("{:.1e}", report.worst.value),
                format!("{:.1e}", report.worst.gradient),
                if report.failures.is_empty() { "" } else { "  FAILED" }
            );
            reports.push(report);
        }
    }
    print_failures(ops.len(), reports.iter().flat_map(|report| &report.failures), "")?;
    let device = device.to_string();
    Ok(reports.iter().map(|report| as_json(report, &device)).collect())
}

fn as_json(report: &DeviceReport, device: &str) -> Value {
    json!({
        "op": report.op,
        "device": device,
        "type": report.dtype.name(),
        "cases": report.cases,
        "value_error": report.worst.value,
        "gradient_error": report.worst.gradient,
        "passed": report.failures.is_empty(),
        "failures": report.failures,
    })
}
