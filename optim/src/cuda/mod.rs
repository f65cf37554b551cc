//! The optimiser's sweeps on a GPU, and in `step.rs` how a step of AdamW is made of them.

mod step;

use crate::adamw::StepConstants;
use crate::groups::Groups;
use tensor::cuda::{Module, partial_sums};
use tensor::{DType, Device, Result, Tensor};

/// The kernels.
pub static KERNELS: Module = Module {
    name: "optim",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["gradient_norm<float|double>", "adamw<float|double>"],
};

/// Elements per piece of the norm's sum, and the maximum number of pieces.
const PIECE: usize = 1 << 14;
const MAX_PIECES: usize = 512;
/// The place of the norm among the controls of a step, and how many there are before those of the groups.
const NORM: usize = 7;
const CONTROLS: usize = 8;

/// What a step on a GPU needs besides its buffers, held in the GPU's memory so that a recorded step can be replayed
/// with other values.
#[derive(Debug)]
pub(crate) struct Controls {
    /// As `Control` in kernel.cu.
    numbers: Tensor,
    /// Four bytes in each number: the group of each cache line of the flat buffers.
    groups: Tensor,
    /// Whether they hold a step that was prepared but not finished yet.
    pub prepared: bool,
    /// Whether that step has been made; if by a replay, it is not known here.
    pub made: bool,
}

impl Controls {
    /// Controls for flat buffers of these groups.
    pub fn new(device: &Device, len: usize, dtype: DType, groups: &Groups) -> Result<Self> {
        let numbers = Tensor::zeros_on(device, [CONTROLS + 2 * groups.all().len()], dtype)?;
        Ok(Self { numbers, groups: group_bytes(device, len, dtype, groups)?, prepared: false, made: false })
    }

    /// Sets the constants of the next step; `max_norm` is the length to which gradients are clipped.
    pub fn set(&mut self, f: &StepConstants<f64>, max_norm: f64) -> Result<()> {
        let mut numbers = vec![f.scale, f.rate_m, f.beta_v, f.rate_v, f.root, f.eps, max_norm, f64::NAN];
        numbers.extend(f.groups.iter().flat_map(|group| [group.keep, group.step]));
        let numbers = Tensor::from_slice(&numbers, [numbers.len()])?.cast(self.numbers.dtype())?;
        self.numbers.overwrite(0, &numbers)?;
        (self.prepared, self.made) = (true, false);
        Ok(())
    }

    /// The norm that [`Controls::clip`] found, infinite if the square of the clipped norm would be, and NaN if it was
    /// not called. It waits for the GPU.
    pub fn norm(&self) -> Result<f64> {
        self.numbers.slice(0, NORM..NORM + 1)?.to_device(&Device::Cpu)?.cast(DType::F64)?.item()
    }

    /// Computes the norm of the gradients, and the scale that clips them.
    pub fn clip(&mut self, gradients: &Tensor) -> Result<()> {
        find_norm(gradients, None, Some(&mut self.numbers))
    }

    /// One step of AdamW: parameters and both moments, flat; and of their moving average with its rate, if there is
    /// one.
    pub fn step(
        &self,
        [p, m, v]: [&mut Tensor; 3],
        gradients: &Tensor,
        average: Option<(&mut Tensor, &Tensor)>,
    ) -> Result<()> {
        let (count, dtype) = (p.count(), p.dtype());
        let launch = KERNELS.launch(gradients.gpu("adamw")?, "adamw<T>", dtype)?.over_packs(count, dtype);
        let launch = launch.output(p)?.input(gradients)?.output(m)?.output(v)?.input(&self.groups)?.count(count);
        let (average, rate) = average.unzip();
        let launch = launch.input(&self.numbers)?.optional_output(average)?.optional(rate)?;
        // SAFETY: all five are of one layout, whose lines have a byte each, the number of a group among the controls.
        unsafe { launch.run() }
    }
}

/// √Σ x², summed in f64 in an order that depends on the number of elements alone.
pub(crate) fn norm(x: &Tensor) -> Result<f64> {
    let mut norm = Tensor::empty_on(&x.device(), [], DType::F64)?;
    find_norm(x, Some(&mut norm), None)?;
    norm.item()
}

/// The same, stored as a number, or among the controls of a step together with the scale that clips x.
fn find_norm(x: &Tensor, norm: Option<&mut Tensor>, controls: Option<&mut Tensor>) -> Result<()> {
    let pieces = x.count().div_ceil(PIECE).clamp(1, MAX_PIECES);
    let mut partial = partial_sums(&x.device(), DType::F64, [1, pieces, 1])?;
    let launch = KERNELS.launch(x.gpu("gradient_norm")?, "gradient_norm<T>", x.dtype())?.blocks(pieces);
    let launch = launch.input(x)?.output(&mut partial)?.optional_output(norm)?.optional_output(controls)?;
    // SAFETY: there is a place for each piece's sum, and the controls are those that the kernel knows.
    unsafe { launch.count(x.count()).run() }
}

/// The group of each cache line of a flat buffer, four to a number.
fn group_bytes(device: &Device, len: usize, dtype: DType, groups: &Groups) -> Result<Tensor> {
    let per_line = tensor::ALIGNMENT / dtype.size();
    let mut words = vec![0u32; len.div_ceil(per_line).div_ceil(4).max(1)];
    let mut line = 0;
    for (end, group) in groups.ends() {
        for line in line..end.div_ceil(per_line) {
            words[line / 4] |= (group as u32) << (line % 4 * 8);
        }
        line = end.div_ceil(per_line);
    }
    Tensor::from_slice(&words, [words.len()])?.to_device(device)
}
