//! Convolutions and their dx in bf16 on tensor cores, without a matrix of patches: `tensor_cores.cuh`.

use super::super::geometry::Geometry;
use super::KERNELS;
use tensor::cuda::Out;
use tensor::{DType, Result, Tensor};

/// As in the kernel: threads of a block; elements of the inner axis in a step, and steps in shared memory; how far
/// along an axis a pixel may see.
const THREADS: usize = 256;
const DEPTH: usize = 32;
const STAGES: usize = 3;
const REACH: usize = 15;

/// The most output channels. Patches are 2 bytes per element, which are written and read, at 4.3 TB/s on an H200, and
/// take part in 2·O operations. Without them a product uses an older instruction, with which perhaps 250 TFLOP/s can
/// be reached instead of cuBLASLt's 600: 2·O·(1/250 − 1/600) < 4/4.3 for O < 199. The same holds for dx.
const OUTPUTS: usize = 192;

/// A call of the kernel.
pub struct Direct<'a> {
    geometry: &'a Geometry,
    /// What patches are gathered from: x, or dy for dx.
    map: &'a Tensor,
    /// Whether the result is dx.
    transposed: bool,
}

impl<'a> Direct<'a> {
    /// For y; `None` if the kernel is not for this convolution.
    pub fn forward(g: &'a Geometry, x: &'a Tensor, weight: &Tensor, y: &Out<'_>) -> Result<Option<Self>> {
        Self { geometry: g, map: x, transposed: false }.if_usable(weight, y)
    }

    /// For dx.
    pub fn backward(g: &'a Geometry, dy: &'a Tensor, weight: &Tensor, dx: &Out<'_>) -> Result<Option<Self>> {
        Self { geometry: g, map: dy, transposed: true }.if_usable(weight, dx)
    }

    fn if_usable(self, weight: &Tensor, result: &Out<'_>) -> Result<Option<Self>> {
        let (g, gpu) = (self.geometry, result.gpu());
        let [(_, channels), (_, outputs)] = self.maps();
        let known = [self.map.dtype(), result.dtype()] == [DType::Bf16; 2] && g.outputs <= OUTPUTS;
        // Results are stored in packs. Those of a map with other channels are put together, if no taps are left out.
        let in_packs = outputs.is_multiple_of(8) && (channels.is_multiple_of(8) || !self.transposed);
        // A weight still to be rounded will be copied to aligned memory.
        let mut addresses = vec![self.map.address("conv2d", gpu)?, result.address()];
        if weight.dtype() == DType::Bf16 {
            addresses.push(weight.address("conv2d", gpu)?);
        }
        let aligned = addresses.iter().all(|address| address.is_multiple_of(16));
        // A pixel of dx sees at most one tap more than there are, and pixels with their padding are counted with
        // `int`s.
        let near = g.kernel.iter().chain([&g.padding]).all(|&extent| extent < REACH);
        let countable = self.maps().iter().all(|&([height, width], channels)| {
            let padded = (g.images * height + 2 * REACH).checked_mul((width + 2 * REACH) * channels);
            padded.is_some_and(|elements| i32::try_from(elements).is_ok())
        });
        // As is the weight, with its rows padded to packs.
        let padded = (g.kernel[0] * g.kernel[1]).checked_mul(channels.next_multiple_of(8) * outputs);
        let countable = countable && padded.is_some_and(|elements| i32::try_from(elements).is_ok());
        let something = self.map.count() * result.count() > 0;
        Ok((known && in_packs && aligned && near && countable && something).then_some(self))
    }

    /// The extents of the map and of the result, with their channels.
    fn maps(&self) -> [([usize; 2], usize); 2] {
        let g = self.geometry;
        let [x, y] = [(g.input, g.inputs), (g.output, g.outputs)];
        if self.transposed { [y, x] } else { [x, y] }
    }

    /// Stores or accumulates the result, or stores GELU of it. The weight is (outputs, taps, channels), its rows padded
    /// to whole packs.
    pub fn run(self, weight: &Tensor, bias: Option<&Tensor>, gelu: bool, result: &Out<'_>) -> Result<()> {
        let Self { geometry: g, map, transposed } = self;
        let [(extents, channels), (result_extents, outputs)] = self.maps();
        // A block's columns and rows of the product, and the pixels of the first class: see the kernel.
        let columns = [32, 64].into_iter().find(|&columns| outputs <= columns).unwrap_or(128);
        let rows = if columns > 64 { THREADS / 2 } else { THREADS };
        let step = if transposed { g.stride } else { 1 };
        let pixels = g.images * result_extents.iter().map(|extent| extent.div_ceil(step)).product::<usize>();
        let blocks = pixels.div_ceil(rows) * outputs.div_ceil(columns);
        let bias = bias.map(|bias| bias.cast(DType::Bf16)).transpose()?;
        let packs = channels.is_multiple_of(8);
        let kernel = format!("conv2d_on_tensor_cores<{columns}, {packs}>");
        let launch = KERNELS.launch_on(map, &kernel)?.threads(THREADS).blocks(blocks).shared(shared(rows, columns));
        let launch = launch.input(map)?.input(weight)?.optional(bias.as_ref())?.out(Some(result))?;
        let launch = launch.int(gelu.into()).int(transposed.into());
        let launch = launch.extents([g.images])?.extents(extents)?.extents([channels])?;
        let launch = launch.extents(result_extents)?.extents([outputs])?.extents(g.kernel)?;
        let launch = launch.extents([weight.count() / outputs, g.stride, g.padding])?;
        // SAFETY: the map, the weight and the result have these extents; what lies beyond is not read or written.
        unsafe { launch.run() }
    }
}

/// Bytes of `Tiles` in the kernel.
fn shared(rows: usize, columns: usize) -> usize {
    let word = size_of::<i32>();
    let (pixel, tap, axes) = (4 * word, 4 * word, 2 * 10 * word);
    let operands = STAGES * (rows + columns) * DEPTH * DType::Bf16.size();
    operands + rows * pixel + REACH * REACH * tap + axes + columns * word
}
