//! Depthwise convolutions in bf16 on tensor cores: `tensor_cores.cuh`.

use super::super::geometry::Geometry;
use super::KERNELS;
use std::sync::Arc;
use tensor::cuda::{Gpu, Launch, MULTIPROCESSORS, Out, at_most, partial_sums};
use tensor::{DType, Device, Result, Tensor};

/// As in the kernels: columns of a tile, at most; its channels; rows in a group, and groups in shared memory; elements
/// from a pixel to the next there.
const SIDE: usize = 16;
const CHANNELS: usize = 32;
const GROUP: usize = 4;
const RING: usize = 4;
const PITCH: usize = CHANNELS + 8;

/// The maximum number of blocks: as many as run at once.
const BLOCKS: usize = 4 * MULTIPROCESSORS;

/// The address of a map, and its stride.
type At = (u64, usize);

/// Whether the kernels are for maps of these extents and strides, if their type and places are. There are none of 7x7,
/// which no preset has.
pub fn usable(g: Geometry, strides: [usize; 2]) -> bool {
    let Tiling { strips: [channels, columns], groups, .. } = Tiling::new(g);
    // A kernel counts rows, from some before the first to some after the last, and a row's elements, with `int`s.
    let rows = (groups + 2 * RING) * GROUP;
    let mut counts = strides.into_iter().map(|stride| g.width.saturating_mul(stride)).chain([rows]);
    g.kernel < 7 && channels * columns <= BLOCKS && counts.all(|count| i32::try_from(count).is_ok())
}

/// As [`convolve`](super::convolve), with a kernel that is residual and turned, or not.
pub fn convolve(
    g: Geometry,
    x: At,
    (weight, residual, turned): (&Tensor, bool, bool),
    bias: Option<&Tensor>,
    (y, stride): (&Out<'_>, usize),
) -> Result<()> {
    let tiling = Tiling::new(g);
    let octets = tiling.wide.div_ceil(8).max(1);
    let launch = tiling.launch(y.gpu(), &format!("dwconv_on_tensor_cores<{}, {octets}>", g.kernel))?;
    let launch = launch.pointer(x.0).count(x.1).input(weight)?.int(residual.into()).int(turned.into());
    let launch = launch.optional(bias)?.out(Some(y))?.count(stride);
    // SAFETY: the caller has checked that x and y hold maps of these extents, and that the parameters fit them.
    unsafe { tiling.describe(launch)?.run() }
}

/// dweight (C, 1, K, K) and dbias (C), from dy and x.
pub fn backward_weight(
    g: Geometry,
    gpu: &Arc<Gpu>,
    dy: At,
    x: At,
    [dweight, dbias]: [Option<Out<'_>>; 2],
) -> Result<()> {
    let tiling = Tiling::new(g);
    let [strips, columns] = tiling.strips;
    let sums = [strips, columns * tiling.pieces, CHANNELS * (g.taps() + 1)];
    let mut partial = partial_sums(&Device::Cuda(Arc::clone(gpu)), DType::F32, sums)?;
    let launch = tiling.launch(gpu, &format!("dwconv_backward_weight_on_tensor_cores<{}>", g.kernel))?;
    let launch = launch.pointer(dy.0).count(dy.1).pointer(x.0).count(x.1);
    let launch = launch.output(&mut partial)?.out(dweight.as_ref())?.out(dbias.as_ref())?;
    // SAFETY: as above, and there is a place for each piece's sums.
    unsafe { tiling.describe(launch)?.run() }
}

/// How a map is shared out among blocks.
struct Tiling {
    g: Geometry,
    /// Tiles of the channels, and of the columns, of `wide` columns at most.
    strips: [usize; 2],
    wide: usize,
    /// Groups of rows of all images with what lies between them, and into how many pieces they are split.
    groups: usize,
    pieces: usize,
}

impl Tiling {
    fn new(g: Geometry) -> Self {
        let strips = [g.channels.div_ceil(CHANNELS), g.width.div_ceil(SIDE)];
        let groups = (g.images * (g.height + g.reach())).div_ceil(GROUP);
        let pieces = groups.clamp(1, (at_most(BLOCKS) / strips.iter().product::<usize>().max(1)).max(1));
        Self { g, strips, wide: g.width.div_ceil(strips[1].max(1)), groups, pieces }
    }

    /// A launch with room in shared memory for two rings of groups: of what is seen from a tile, and of the tile
    /// itself.
    fn launch<'a>(&self, gpu: &'a Arc<Gpu>, kernel: &str) -> Result<Launch<'a>> {
        let [channels, columns] = self.strips;
        let launch = KERNELS.launch(gpu, kernel, DType::Bf16)?;
        let pixels = RING * GROUP * (SIDE + self.g.kernel - 1 + SIDE);
        let launch = launch.threads(4 * CHANNELS).grid([channels, columns, self.pieces]);
        Ok(launch.shared(pixels * PITCH * DType::Bf16.size()))
    }

    /// The kernels' last arguments.
    fn describe<'a>(&self, launch: Launch<'a>) -> Result<Launch<'a>> {
        let g = self.g;
        launch.extents([g.images * g.height, self.groups, g.height, g.width, g.channels, self.wide])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_that_the_kernels_cannot_count_are_left_to_others() {
        let usual = Geometry { images: 3, height: 14, width: 14, channels: 256, kernel: 5 };
        assert!(usable(usual, [256, 768]));
        assert!(!usable(Geometry { width: SIDE * BLOCKS, ..usual }, [256; 2]));
        assert!(!usable(Geometry { images: 1 << 28, ..usual }, [256; 2]));
        assert!(!usable(usual, [256, usize::MAX]));
        assert!(!usable(Geometry { kernel: 7, ..usual }, [256; 2]));
        // Every row has its group, and no piece is without one.
        for images in [0, 1, 5, 1000] {
            let Tiling { groups, pieces, g, .. } = Tiling::new(Geometry { images, ..usual });
            assert!(groups * GROUP >= g.rows() + images * g.reach() && (pieces <= groups || images == 0));
        }
    }
}
