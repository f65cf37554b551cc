//! How most backward rules supply a gradient: with one kernel for the CPU and one for the GPU.

/// Supplies the gradient of an input, if it is needed: `give!(grads, 0, dy, "gelu", out => { Cpu<T>: .., Cuda: .. })`
/// runs the kernel for the device of dy, which writes to `out`. T is the element type of dy.
macro_rules! give {
    (
        $grads:expr, $input:expr, $dy:expr, $op:expr,
        $out:ident => { Cpu<$T:ident>: $cpu:expr, Cuda: $cuda:expr $(,)? }
    ) => {{
        let mut slot = $grads.open_in($input, $dy.dtype())?;
        match $dy.device() {
            tensor::Device::Cpu => tensor::match_float!($dy.dtype(), $op, $T => {
                if let Some($out) = slot.out::<$T>()? {
                    $cpu;
                }
            }),
            tensor::Device::Cuda(_) => {
                if let Some($out) = slot.out_on_gpu()? {
                    $cuda;
                }
            }
        }
        $grads.close(slot);
    }};
}

pub(crate) use give;
