//! Convolutions of images, which have few channels, and gradients of their weights: `few_channels.cuh`.

use super::super::geometry::Geometry;
use super::{KERNELS, row};
use crate::linear::tall;
use tensor::cuda::elements::add_pieces;
use tensor::cuda::{Launch, MULTIPROCESSORS, Out, at_most};
use tensor::{DType, Result, Tensor};

/// As in the kernels: elements of a padded patch, rows of y whose lines are in shared memory, the most threads of a
/// block, and the pixels of a warp.
const PATCH: usize = 32;
const STAGES: usize = 3;
const MOST_THREADS: usize = 256;
const PIXELS: usize = 16;

/// The output channels that there are kernels for.
const OUTPUTS: [usize; 4] = [16, 32, 48, 64];

/// A convolution that the kernels are for.
#[derive(Clone, Copy, Debug)]
pub struct FewChannels<'a> {
    geometry: &'a Geometry,
    x: &'a Tensor,
}

impl<'a> FewChannels<'a> {
    /// `None` if the kernels are not for this convolution of x, whose result, or that result's gradient, has this type
    /// and lies at this address.
    pub fn of(g: &'a Geometry, x: &'a Tensor, (dtype, address): (DType, u64)) -> Result<Option<Self>> {
        let call = Self { geometry: g, x };
        // Rows of the weight are padded, and so copied to aligned memory.
        let known = OUTPUTS.contains(&g.outputs) && row(g, DType::Bf16) == PATCH && g.patch() < PATCH;
        // Whole packs of channels need not be picked apart: for those there are faster kernels.
        let known = known && !g.inputs.is_multiple_of(8);
        // Rows of x are copied in packs, and places within an image are counted with an `int`.
        let whole = (g.input[1] * g.inputs).is_multiple_of(8);
        let fits = call.shared(g.outputs + 8) <= x.gpu("conv2d")?.properties().shared_memory;
        let something = g.pixels() * x.count() > 0;
        let aligned = dtype == DType::Bf16 && address.is_multiple_of(16) && tall::in_packs(x, x.count())?;
        let countable = i32::try_from(g.pixels() * g.outputs).is_ok();
        Ok((known && whole && countable && fits && something && aligned).then_some(call))
    }

    /// In a line of shared memory, which has a row of x: where that begins, behind at least the padding; and the line's
    /// elements, which are all that pixels see.
    fn line(&self) -> [usize; 2] {
        let g = self.geometry;
        let lead = (g.padding * g.inputs).next_multiple_of(8);
        let seen = ((g.output[1].max(1) - 1) * g.stride + g.kernel[1]).saturating_sub(g.padding);
        [lead, (lead + seen.max(g.input[1]) * g.inputs).next_multiple_of(8)]
    }

    /// Bytes of shared memory, if a stage has a row of pixels of so many elements besides the lines.
    fn shared(&self, of_pixel: usize) -> usize {
        let g = self.geometry;
        let stage = g.output[1].next_multiple_of(PIXELS) * of_pixel + g.kernel[0] * self.line()[1];
        STAGES * stage * DType::Bf16.size()
    }

    /// As many blocks as the multiprocessors' registers have room for.
    fn pieces(&self) -> usize {
        let g = self.geometry;
        (g.images * g.output[0]).min(at_most(MULTIPROCESSORS * if g.outputs > 32 { 2 } else { 3 }))
    }

    fn launch(&self, kernel: &str) -> Result<Launch<'a>> {
        let warps = self.geometry.output[1].div_ceil(PIXELS).min(MOST_THREADS / 32);
        let launch = KERNELS.launch_on(self.x, &format!("{kernel}<{}>", self.geometry.outputs))?;
        Ok(launch.threads(warps * 32).blocks(self.pieces()))
    }

    /// The kernels' last arguments.
    fn describe(self, launch: Launch<'a>) -> Result<Launch<'a>> {
        let g = self.geometry;
        let launch = launch.count(g.images * g.output[0]);
        let launch = launch.extents([g.input[0], g.input[1] * g.inputs, g.inputs])?.extents(g.kernel)?;
        launch.extents(g.output)?.extents([g.stride, g.padding])?.extents(self.line())
    }

    /// y, or GELU of it. The weight is (O, 32), its rows padded.
    pub fn forward(self, weight: &Tensor, bias: Option<&Tensor>, gelu: bool, y: &Out<'_>) -> Result<()> {
        let bias = bias.map(|bias| bias.cast(DType::Bf16)).transpose()?;
        let launch = self.launch("conv2d_of_few_channels")?.shared(self.shared(0));
        let launch = launch.input(self.x)?.input(weight)?.optional(bias.as_ref())?.pointer(y.address());
        // SAFETY: x, the weight and y have these extents.
        unsafe { self.describe(launch.int(gelu.into()))?.run() }
    }

    /// dyᵀ·patches (O, 32), stored or accumulated, and the sum of dy's rows (O) if it is wanted; both in one type.
    pub fn backward_weight(self, dy: &Tensor, sums: Out<'_>, dbias: Option<Out<'_>>) -> Result<()> {
        let outputs = self.geometry.outputs;
        let biases = if dbias.is_some() { outputs } else { 0 };
        let mut partial = Tensor::empty_on(&dy.device(), [self.pieces(), outputs * PATCH + biases], DType::F32)?;
        // At last a block's sums, in the place of the stages.
        let shared = self.shared(outputs + 8).max(outputs * (PATCH + 1) * DType::F32.size());
        let launch = self.launch("conv2d_backward_weight_of_few_channels")?.shared(shared);
        let launch = launch.input(dy)?.input(self.x)?.output(&mut partial)?.int(dbias.is_some().into());
        // SAFETY: dy and x have these extents, and `partial` has room for the sums of each piece.
        unsafe { self.describe(launch)?.run()? };
        add_pieces(&partial, [Some(sums), dbias])
    }
}
