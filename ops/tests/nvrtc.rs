//! Every kernel, compiled for GPUs by NVRTC without one, and what the compiler says of it.

use ops::registry::kernels;
use tensor::cuda::nvidia::compiler::compile;

#[test]
fn compiles() {
    for module in kernels() {
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0)] {
            let compiled = compile(module, capability).unwrap();
            println!("{} {capability:?} {}\n{}", module.name, compiled.image.len(), compiled.log);
        }
    }
}
