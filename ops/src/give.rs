//! The rule of one gradient, as most operations have it.

/// Gives an input its gradient, unless nobody wants it: `give!(grads, 0, dy, "gelu", out => { Cpu<T>: .., Cuda: .. })`
/// lets one of two kernels write it to `out`, by where dy is. T is the type of dy.
macro_rules! give {
    (
        $grads:expr, $input:expr, $dy:expr, $op:expr,
        $out:ident => { Cpu<$T:ident>: $cpu:expr, Cuda: $cuda:expr $(,)? }
    ) => {{
        let mut slot = $grads.open($input)?;
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
