//! CUDA kernels of [`dwconv`](super::dwconv), also run by operations that hold its operands inside wider tensors; in
//! bf16 [on tensor cores](tensor_cores), where those are faster.

mod tensor_cores;

use super::geometry::Geometry;
use std::sync::Arc;
use tensor::cuda::{Gpu, Module, Out, at_most, partial_sums};
use tensor::{DType, Error, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "dwconv",
    source: include_str!("kernel.cu"),
    headers: &[("tensor_cores.cuh", include_str!("tensor_cores.cuh"))],
    kernels: &[
        "dwconv_forward<T, 3|5|7, 1, 32>",
        "dwconv_forward<float, 3|5|7, 2, 32>",
        "dwconv_forward<bf16, 3, 4, 16|32>",
        "dwconv_backward_weight<T, 3|5|7, 1>",
        "dwconv_backward_weight<float, 3|5|7, 2>",
        "dwconv_on_tensor_cores<5, 1|2>",
        "dwconv_backward_weight_on_tensor_cores<3|5>",
    ],
};

/// The maximum number of warps of a block; as in the kernels.
const WARPS: usize = 7;

/// The maximum number of blocks among which the bands are shared out: two per
/// [multiprocessor](tensor::cuda::MULTIPROCESSORS), whose registers have no room for more with a 5x5 kernel, rounded
/// down so that bands, often a power of two, are shared out evenly. A constant, because the order of summation depends
/// on it.
const BLOCKS: usize = 256;

/// An operand (N, H, W, C) that is read: pixel p, counted in (N, H, W) order, is the C elements from p·stride on.
#[derive(Clone, Debug)]
pub(crate) struct Map {
    elements: Tensor,
    stride: usize,
}

impl Map {
    /// From element `offset` of a contiguous tensor on.
    pub fn new(tensor: &Tensor, offset: usize, stride: usize) -> Result<Self> {
        let count = tensor.count();
        Ok(Self { elements: tensor.reshape([count])?.slice(0, offset.min(count)..count)?, stride })
    }
}

/// An operand (N, H, W, C) that is written, or added to; what lies between its pixels is left alone.
#[derive(Debug)]
pub(crate) struct MapMut<'a> {
    pub out: Out<'a>,
    pub stride: usize,
}

/// What x is convolved with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel<'a> {
    /// (C, 1, K, K)
    pub weight: &'a Tensor,
    /// Whether x itself is added to the result: as if the centre of the weight were greater by one.
    pub residual: bool,
}

/// y = x ∗ kernel + bias, or y += x ∗ kernel + bias.
pub(crate) fn forward(g: Geometry, x: &Map, kernel: Kernel<'_>, bias: Option<&Tensor>, y: MapMut<'_>) -> Result<()> {
    convolve(g, x, kernel, false, bias, y)
}

/// dx = dy ∗ the kernel rotated by 180°, stored or accumulated.
pub(crate) fn backward_input(g: Geometry, dy: &Map, kernel: Kernel<'_>, dx: MapMut<'_>) -> Result<()> {
    convolve(g, dy, kernel, true, None, dx)
}

/// dweight (C, 1, K, K) and dbias (C), if they are wanted, each stored or accumulated.
pub(crate) fn backward_weight(g: Geometry, dy: &Map, x: &Map, [dweight, dbias]: [Option<Out<'_>>; 2]) -> Result<()> {
    if dweight.is_none() && dbias.is_none() {
        return Ok(());
    }
    let dtype = x.elements.dtype();
    dy.elements.ensure_dtype("dwconv", dtype)?;
    [&dweight, &dbias].into_iter().flatten().try_for_each(|out| out.ensure_dtype("dwconv", dtype.of_sums()))?;
    let gpu = x.elements.gpu("dwconv")?;
    let [dy_address, x_address] = [address(g, dy, gpu)?, address(g, x, gpu)?];
    let packed = packed(g, dtype, [(dy_address, dy.stride), (x_address, x.stride)]);
    // An empty map has no blocks there, and gradients of zero.
    if packed && !g.is_empty() && dtype == DType::Bf16 && tensor_cores::usable(g, [dy.stride, x.stride]) {
        return tensor_cores::backward_weight(g, gpu, (dy_address, dy.stride), (x_address, x.stride), [dweight, dbias]);
    }
    let tiling = Tiling::new(g, if packed && dtype == DType::F32 { 2 } else { 1 }, 32);
    let Tiling { tiles, channels, bands, .. } = tiling;
    let all_bands = if g.is_empty() { 0 } else { g.images * bands };
    let pieces = pieces(all_bands, at_most(BLOCKS), tiles);
    let sums = [tiles, pieces, tiling.tile() * (g.taps() + 1)];
    let mut partial = partial_sums(&x.elements.device(), dtype.of_sums(), sums)?;
    let launch = KERNELS.launch(gpu, &format!("dwconv_backward_weight<T, {}, {channels}>", g.kernel), dtype)?;
    let launch = launch.threads(tiling.threads()).blocks(pieces * tiles);
    let launch = launch.shared(tiling.chunks(g.kernel, dtype, &[g.kernel - 1, 0]));
    let launch = launch.pointer(dy_address).count(dy.stride).pointer(x_address).count(x.stride);
    let launch = launch.output(&mut partial)?.out(dweight.as_ref())?.out(dbias.as_ref())?;
    // SAFETY: both hold maps of these extents, by the checks above, the gradients fit them, and there is a place for
    // each piece's sums.
    unsafe { launch.extents([all_bands, g.height, g.width, g.channels, tiles, bands])?.run() }
}

/// y = x ∗ kernel + bias, or y += x ∗ kernel + bias, with the kernel `turned` by 180° or not.
fn convolve(
    g: Geometry,
    x: &Map,
    Kernel { weight, residual }: Kernel<'_>,
    turned: bool,
    bias: Option<&Tensor>,
    MapMut { out, stride }: MapMut<'_>,
) -> Result<()> {
    if g.is_empty() {
        return Ok(());
    }
    let dtype = x.elements.dtype();
    out.ensure_dtype("dwconv", dtype)?;
    [Some(weight), bias]
        .into_iter()
        .flatten()
        .try_for_each(|parameter| parameter.ensure_dtype("dwconv", dtype.of_sums()))?;
    let x_address = address(g, x, out.gpu())?;
    ensure_room(g, stride, out.count())?;
    let packed = packed(g, dtype, [(x_address, x.stride), (out.address(), stride)]);
    let on_tensor_cores = packed && dtype == DType::Bf16 && tensor_cores::usable(g, [x.stride, stride]);
    // The nine multiply-adds of a 3x3 kernel take less time than what comes with tensor cores.
    if on_tensor_cores && g.kernel > 3 {
        return tensor_cores::convolve(g, (x_address, x.stride), (weight, residual, turned), bias, (&out, stride));
    }
    let tiling = match dtype {
        DType::F32 if packed => Tiling::new(g, 2, 32),
        // In groups of 16 lanes, if 32 would leave more of them without a channel.
        DType::Bf16 if packed && g.kernel == 3 => {
            Tiling::new(g, 4, if (1..=64).contains(&(g.channels % 128)) { 16 } else { 32 })
        }
        _ => Tiling::new(g, 1, 32),
    };
    let Tiling { channels, lanes, tiles, bands, .. } = tiling;
    let kernel = format!("dwconv_forward<T, {}, {channels}, {lanes}>", g.kernel);
    // There is room for twice as many blocks if a thread needs few registers, and mostly if they have few warps.
    let roomy = (g.kernel == 3 && channels < 4) || 2 * tiling.threads() <= 32 * (WARPS + 1);
    let pieces = pieces(g.images * bands, at_most(if roomy { 2 * BLOCKS } else { BLOCKS }), tiles);
    let launch = KERNELS.launch(out.gpu(), &kernel, dtype)?.threads(tiling.threads()).blocks(pieces * tiles);
    let launch = launch.shared(tiling.chunks(g.kernel, dtype, &[g.kernel - 1]));
    let launch = launch.pointer(x_address).count(x.stride).input(weight)?.int(residual.into()).int(turned.into());
    let launch = launch.optional(bias)?.out(Some(&out))?.count(stride);
    // SAFETY: x and y hold maps of these extents, by the checks above, and `dwconv::geometry` that the parameters fit
    // them.
    unsafe { launch.extents([g.images * bands, g.height, g.width, g.channels, tiles, bands])?.run() }
}

/// Among how many blocks the bands of each tile of the channels are shared out, if there are `blocks` in all.
fn pieces(bands: usize, blocks: usize, tiles: usize) -> usize {
    bands.clamp(1, (blocks / tiles.max(1)).max(1))
}

/// Rows of a strip; as in the kernels.
fn rows(kernel: usize) -> usize {
    if kernel < 7 { 2 } else { 1 }
}

/// Whether each pixel of maps at these addresses, with these strides, is a number of whole packs of 16 bytes, aligned.
/// These are copied at once, and each thread takes two or four channels. In f64 there are too few registers for that.
fn packed(g: Geometry, dtype: DType, maps: [(u64, usize); 2]) -> bool {
    let pack = dtype.per_pack();
    let whole = |(address, stride): (u64, usize)| address.is_multiple_of(16) && stride.is_multiple_of(pack);
    dtype != DType::F64 && g.channels.is_multiple_of(pack) && maps.into_iter().all(whole)
}

/// How a map is shared out among blocks: in `tiles` of the channels, and each image in `bands` of `strips` of rows.
/// `lanes` threads have a strip of a tile, each of them so many `channels`.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    channels: usize,
    lanes: usize,
    tiles: usize,
    strips: usize,
    bands: usize,
}

impl Tiling {
    /// With so many channels to a thread, and so many lanes to a strip: 16 or 32.
    fn new(g: Geometry, channels: usize, lanes: usize) -> Self {
        let strips = g.height.div_ceil(rows(g.kernel)).max(1);
        let bands = strips.div_ceil(Self::most_strips(lanes));
        Self { channels, lanes, tiles: g.channels.div_ceil(lanes * channels), strips: strips.div_ceil(bands), bands }
    }

    /// The strips that a block has at most.
    fn most_strips(lanes: usize) -> usize {
        32 * WARPS / lanes
    }

    /// The channels of a tile.
    fn tile(&self) -> usize {
        self.lanes * self.channels
    }

    /// The threads of a block: whole warps.
    fn threads(&self) -> usize {
        (self.strips * self.lanes).next_multiple_of(32)
    }

    /// Bytes of shared memory for two chunks of columns of maps, as in the kernels, each with so many rows more than a
    /// band has.
    fn chunks(&self, kernel: usize, dtype: DType, more: &[usize]) -> usize {
        let columns = if kernel == 3 { 6 } else { kernel } * if self.channels * dtype.size() == 2 { 2 } else { 1 };
        let rows: usize = more.iter().map(|more| Self::most_strips(self.lanes) * rows(kernel) + more).sum();
        2 * columns * rows * self.tile() * dtype.size()
    }
}

/// The address of a map, once it is checked that its tensor holds all its pixels.
fn address(g: Geometry, map: &Map, gpu: &Arc<Gpu>) -> Result<u64> {
    ensure_room(g, map.stride, map.elements.count())?;
    map.elements.address("dwconv", gpu)
}

/// [`Error::Shape`] unless a map of this stride fits into `count` elements.
fn ensure_room(g: Geometry, stride: usize, count: usize) -> Result<()> {
    if g.is_empty() || (stride >= g.channels && g.span(stride) <= count) {
        return Ok(());
    }
    let expected = format!("a map that spans {} elements, with a stride of {stride} between pixels", g.span(stride));
    Err(Error::shape("dwconv", expected, &[count]))
}
