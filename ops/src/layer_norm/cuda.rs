//! CUDA kernels of [`layer_norm`](super::layer_norm): rows that fit into the registers of a warp, and any others.

use autograd::Slot;
use tensor::cuda::elements::add_pieces;
use tensor::cuda::{Launch, MULTIPROCESSORS, Module, Out, at_most, pieces};
use tensor::{DType, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "layer_norm",
    source: include_str!("kernel.cu"),
    headers: &[("any.cuh", include_str!("any.cuh"))],
    kernels: &[
        "layer_norm_forward<T, 1|2|4>",
        "layer_norm_recompute<T, 1|2|4>",
        "layer_norm_backward<T, 1|2|4>",
        "layer_norm_forward_any<T>",
        "layer_norm_recompute_any<T>",
        "layer_norm_backward_any<T>",
        "layer_norm_parameters_any<T>",
    ],
};

/// Threads per block, the maximum number of packs per lane, and how many packs a lane loads at once: as in `kernel.cu`.
const THREADS: usize = 256;
const MAX_PACKS: usize = 4;
const AHEAD: usize = 4;

/// How x (R, C) is divided among blocks and lanes.
struct Rows {
    rows: usize,
    channels: usize,
    /// `None` if rows do not fit into a warp's registers, or are not aligned to packs.
    shares: Option<Shares>,
}

/// How rows of whole packs are divided.
struct Shares {
    /// Packs of a lane, and lanes of a row.
    packs: usize,
    lanes: usize,
    /// Rows of a block.
    rows: usize,
    blocks: usize,
}

impl Rows {
    /// For x and maps like it, at the addresses `maps`.
    fn new(rows: usize, channels: usize, dtype: DType, maps: &[u64]) -> Self {
        let (pack, packs) = (dtype.per_pack(), channels / dtype.per_pack());
        let whole = channels.is_multiple_of(pack) && maps.iter().all(|address| address.is_multiple_of(16));
        let fits = whole && (1..=32 * MAX_PACKS).contains(&packs);
        Self { rows, channels, shares: fits.then(|| Shares::new(rows, packs)) }
    }

    /// Prepares the launch of a kernel that exists in both variants.
    fn launch<'a>(&self, x: &'a Tensor, kernel: &str) -> Result<Launch<'a>> {
        match &self.shares {
            Some(Shares { packs, blocks, .. }) => {
                Ok(KERNELS.launch_on(x, &format!("{kernel}<T, {packs}>"))?.threads(THREADS).blocks(*blocks))
            }
            None => Ok(KERNELS.launch_on(x, &format!("{kernel}_any<T>"))?.over_warps(self.rows)),
        }
    }

    /// Appends the last arguments, which describe the rows.
    fn describe<'a>(&self, launch: Launch<'a>) -> Result<Launch<'a>> {
        let launch = launch.count(self.rows);
        match &self.shares {
            Some(shares) => launch.extents([shares.rows, self.channels, shares.lanes]),
            None => launch.extents([self.channels]),
        }
    }
}

impl Shares {
    fn new(rows: usize, packs_of_row: usize) -> Self {
        let lanes = packs_of_row.next_power_of_two().min(32);
        let packs = packs_of_row.div_ceil(32).next_power_of_two();
        let turn = THREADS / lanes * AHEAD / packs;
        // As many blocks as registers allow to run at once, each with a whole number of turns.
        let resident = if packs == 4 { 1 } else { 4 - packs };
        let share = rows.div_ceil(at_most(resident * MULTIPROCESSORS)).max(1).next_multiple_of(turn);
        Self { packs, lanes, rows: share, blocks: rows.div_ceil(share).max(1) }
    }
}

/// y (R, C), and each row's mean and 1/√(variance + ε).
pub fn forward(
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    epsilon: f64,
    y: &mut Tensor,
    [mean, rstd]: [&mut Tensor; 2],
) -> Result<()> {
    [weight, bias].into_iter().try_for_each(|parameter| parameter.ensure_dtype("layer_norm", x.dtype().of_sums()))?;
    let gpu = x.gpu("layer_norm")?;
    let maps = [x.address("layer_norm", gpu)?, y.address("layer_norm", gpu)?];
    let rows = Rows::new(mean.count(), weight.count(), x.dtype(), &maps);
    let launch = rows.launch(x, "layer_norm_forward")?.input(x)?.input(weight)?.input(bias)?;
    let launch = launch.number(epsilon, x.dtype()).output(y)?.output(mean)?.output(rstd)?;
    // SAFETY: x and y are (rows, channels), the moments (rows), the parameters (channels).
    unsafe { rows.describe(launch)?.run() }
}

/// Recomputes y from the rows' moments.
pub fn recompute(x: &Tensor, [weight, bias]: [&Tensor; 2], [mean, rstd]: [&Tensor; 2], y: &mut Tensor) -> Result<()> {
    let gpu = x.gpu("layer_norm")?;
    let maps = [x.address("layer_norm", gpu)?, y.address("layer_norm", gpu)?];
    let rows = Rows::new(mean.count(), weight.count(), x.dtype(), &maps);
    let launch = rows.launch(x, "layer_norm_recompute")?.input(x)?.input(weight)?.input(bias)?;
    let launch = launch.input(mean)?.input(rstd)?.output(y)?;
    // SAFETY: as in `forward`.
    unsafe { rows.describe(launch)?.run() }
}

/// dx (R, C), dweight (C) and dbias (C) from dy (R, C). The latter two are added up [aside](Slot::write_aside), from
/// what the blocks leave: nobody waits for them.
pub fn backward(
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    [mean, rstd]: [&Tensor; 2],
    dx: Option<Out<'_>>,
    parameters: [&mut Slot<'_>; 2],
) -> autograd::Result<()> {
    dx.iter().try_for_each(|dx| dx.ensure_dtype("layer_norm", x.dtype()))?;
    let of_parameters = parameters.iter().any(|slot| slot.is_wanted());
    if dx.is_none() && !of_parameters {
        return Ok(());
    }
    let gpu = x.gpu("layer_norm")?;
    let mut maps = vec![dy.address("layer_norm", gpu)?, x.address("layer_norm", gpu)?];
    maps.extend(dx.iter().map(Out::address));
    let rows = Rows::new(mean.count(), weight.count(), x.dtype(), &maps);
    let strips = rows.channels.div_ceil(32);
    let pieces = rows.shares.as_ref().map_or_else(|| pieces(rows.rows, strips), |shares| shares.blocks);
    let partial = || Tensor::empty_on(&x.device(), [pieces, 2 * rows.channels], x.dtype().of_sums());
    let mut partial = of_parameters.then(partial).transpose()?;
    let of_x = |dx: Option<&Out<'_>>| -> Result<Launch<'_>> {
        let launch = rows.launch(x, "layer_norm_backward")?.input(dy)?.input(x)?.input(weight)?;
        launch.input(mean)?.input(rstd)?.out(dx)
    };
    // SAFETY: as in `forward`; dy and dx are like x, and there is a place for the sums of each block or piece.
    unsafe {
        if rows.shares.is_some() {
            rows.describe(of_x(dx.as_ref())?.optional_output(partial.as_mut())?)?.run()?;
        } else {
            if dx.is_some() {
                rows.describe(of_x(dx.as_ref())?)?.run()?;
            }
            if let Some(partial) = &mut partial {
                let launch = rows.launch(x, "layer_norm_parameters")?.grid([strips, pieces, 1]).input(dy)?.input(x)?;
                rows.describe(launch.input(mean)?.input(rstd)?.output(partial)?)?.run()?;
            }
        }
    }
    let Some(partial) = partial else { return Ok(()) };
    // SAFETY: it reads this tensor alone, and writes to the places that it is given.
    unsafe { Slot::write_aside(parameters, &[&partial], |places| Ok(add_pieces(&partial, places)?)) }
}
