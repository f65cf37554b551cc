//! Gradients of the weights of convolutions of images, which have few channels: `few_channels.cuh`.

use super::super::geometry::Geometry;
use super::{KERNELS, row};
use crate::linear::tall;
use tensor::cuda::Out;
use tensor::{DType, Result, Tensor};

/// As in the kernel: elements of a padded patch, rows in shared memory, the most threads of a block, and the pixels of a
/// warp.
const PATCH: usize = 32;
const STAGES: usize = 3;
const MOST_THREADS: usize = 256;
const PIXELS: usize = 16;

/// The output channels that there are kernels for.
const OUTPUTS: [usize; 4] = [16, 32, 48, 64];

/// Blocks that keep an H200's 132 multiprocessors busy: as many as its registers have room for. Constants, because the
/// order of summation depends on them.
fn blocks(outputs: usize) -> usize {
    132 * if outputs > 32 { 2 } else { 3 }
}

/// A call of the kernel.
pub struct FewChannels<'a> {
    geometry: &'a Geometry,
    dy: &'a Tensor,
    x: &'a Tensor,
}

impl<'a> FewChannels<'a> {
    /// `None` if the kernel is not for this convolution.
    pub fn of(g: &'a Geometry, dy: &'a Tensor, x: &'a Tensor, dbias: Option<&Out<'_>>) -> Result<Option<Self>> {
        let call = Self { geometry: g, dy, x };
        let known = OUTPUTS.contains(&g.outputs) && row(g, DType::Bf16) == PATCH && !g.inputs.is_multiple_of(8);
        // Rows of x are copied in packs, and places within an image are counted with an `int`.
        let whole = (g.input[1] * g.inputs).is_multiple_of(8);
        let countable = [g.images * g.output[0], call.shared(), g.output[1] * g.outputs, g.padding * g.inputs]
            .into_iter()
            .all(|count| i32::try_from(count).is_ok());
        let typed = dbias.is_none_or(|dbias| dbias.dtype() == DType::F32 && dbias.count() == g.outputs);
        let fits = call.shared() <= dy.gpu("conv2d")?.driver().properties().shared_memory;
        let usable = known && whole && countable && typed && fits && dy.count() * x.count() > 0;
        Ok((usable && tall::in_packs(dy, dy.count())? && tall::in_packs(x, x.count())?).then_some(call))
    }

    /// In a line of shared memory, which has a row of x: where that begins, behind at least the padding; and the line's
    /// elements, which are all that pixels see.
    fn line(&self) -> [usize; 2] {
        let g = self.geometry;
        let lead = (g.padding * g.inputs).next_multiple_of(8);
        let seen = ((g.output[1].max(1) - 1) * g.stride + g.kernel[1]).saturating_sub(g.padding);
        [lead, (lead + seen.max(g.input[1]) * g.inputs).next_multiple_of(8)]
    }

    /// Bytes of shared memory: the stages, which later have the sums of a block.
    fn shared(&self) -> usize {
        let g = self.geometry;
        let stage = g.output[1].next_multiple_of(PIXELS) * (g.outputs + 8) + g.kernel[0] * self.line()[1];
        (STAGES * stage * DType::Bf16.size()).max(g.outputs * (PATCH + 1) * DType::F32.size())
    }

    /// dyᵀ·patches (O, 32), stored or accumulated, and the sum of dy's rows (O) if it is wanted.
    pub fn run(self, sums: Out<'_>, dbias: Option<Out<'_>>) -> Result<()> {
        let Self { geometry: g, dy, x } = self;
        let [height, width] = g.output;
        let rows = g.images * height;
        let pieces = rows.min(blocks(g.outputs));
        let biases = if dbias.is_some() { g.outputs } else { 0 };
        let mut partial = Tensor::empty_on(&dy.device(), [pieces, g.outputs * PATCH + biases], DType::F32)?;
        let kernel = format!("conv2d_backward_weight_of_few_channels<{}>", g.outputs);
        let launch = KERNELS.launch_on(dy, &kernel)?.blocks(pieces).shared(self.shared());
        let launch = launch.threads(width.next_multiple_of(PIXELS).min(PIXELS * MOST_THREADS / 32) / PIXELS * 32);
        let launch = launch.input(dy)?.input(x)?.output(&mut partial)?.int(dbias.is_some().into()).count(rows);
        let launch = launch.extents([g.input[0], g.input[1] * g.inputs, g.inputs])?.extents(g.kernel)?;
        let launch = launch.extents([height, width, g.stride, g.padding])?.extents(self.line())?;
        // SAFETY: dy and x have these extents, and `partial` has room for the sums of each piece.
        unsafe { launch.run()? };
        tall::add_up(&partial, sums, dbias)
    }
}
