//! Every operation's CUDA kernels, run by the CPU in the role of a GPU, on all cases and in every type.

use ops::check::device::{parity, tolerance};
use ops::registry::OPS;
use tensor::cuda::Gpu;
use tensor::{DType, Device};

/// Where there is no C++ compiler the test says that it is skipped; in CI it may not be.
#[test]
fn every_operation_runs_on_the_emulated_device() {
    let device = match Gpu::emulated(7) {
        Ok(gpu) => Device::Cuda(gpu),
        Err(error) if std::env::var_os("REQUIRE_EMULATED").is_none() => return eprintln!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    };
    let only = std::env::var("ONLY").unwrap_or_default();
    let mut failures = vec![];
    for op in OPS.iter().filter(|op| only.is_empty() || only.split(',').any(|name| name == op.name)) {
        for dtype in [DType::F64, DType::F32, DType::Bf16] {
            let mut worst = [0.0f64; 2];
            for case in (op.cases)() {
                match parity(&case, &device, dtype) {
                    Ok(found) => {
                        worst = [worst[0].max(found.value), worst[1].max(found.gradient)];
                        let within = |error: f64| error <= tolerance(dtype);
                        if !within(found.value) || !within(found.gradient) {
                            let bound = tolerance(dtype);
                            failures.push(format!(
                                "{} {dtype}, \"{}\": {found:?}, more than {bound:.1e}",
                                op.name, case.name
                            ));
                        }
                    }
                    Err(error) => failures.push(format!("{} {dtype}, \"{}\": {error}", op.name, case.name)),
                }
            }
            println!("{:<20} {dtype:<5} value {:.1e}  gradient {:.1e}", op.name, worst[0], worst[1]);
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
