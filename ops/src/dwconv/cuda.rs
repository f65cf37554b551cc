//! CUDA kernels of [`dwconv`](super::dwconv), also run by operations that hold its operands inside wider tensors.

use super::geometry::Geometry;
use std::sync::Arc;
use tensor::cuda::{Gpu, Module, Out, partial_sums};
use tensor::{DType, Error, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "dwconv",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &[
        "dwconv_forward<T, 3|5|7, false>",
        "dwconv_forward<float|bf16, 3|5|7, true>",
        "dwconv_backward<T, 3|5|7, false>",
        "dwconv_backward<float|bf16, 3|5|7, true>",
    ],
};

/// Threads per block in the forward and the backward pass, and the maximum number of threads that share the channels of
/// one pixel; as in the kernels.
const THREADS: usize = 128;
const THREADS_BACKWARD: usize = 256;
const TILE: usize = 32;

/// Columns are split among more threads until there are this many threads, or only this many columns per thread.
const ENOUGH_THREADS: usize = 1 << 16;
const FEW_COLUMNS: usize = 8;

/// The maximum number of blocks of the backward kernel: one per multiprocessor of an H200, whose registers allow no
/// more; a few extra blocks would run after all others and double its time. A constant, because the order of summation
/// depends on it.
const BLOCKS_BACKWARD: usize = 132;

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
pub(crate) fn forward(
    g: Geometry,
    x: &Map,
    Kernel { weight, residual }: Kernel<'_>,
    bias: Option<&Tensor>,
    y: MapMut<'_>,
) -> Result<()> {
    if g.is_empty() {
        return Ok(());
    }
    let dtype = x.elements.dtype();
    let MapMut { out, stride } = y;
    out.ensure_dtype("dwconv", dtype)?;
    [Some(weight), bias]
        .into_iter()
        .flatten()
        .try_for_each(|parameter| parameter.ensure_dtype("dwconv", dtype.of_sums()))?;
    let x_address = address(g, x, out.gpu())?;
    ensure_room(g, stride, out.count())?;
    let pairs = pairs(g, dtype, &[(x_address, x.stride), (out.address(), stride)]);
    let Tiling { tile, tiles } = Tiling::new(g, pairs);
    let segments = ENOUGH_THREADS / (g.images * strips(g) * tile * tiles);
    let length = g.width.div_ceil(segments.clamp(1, g.width.div_ceil(FEW_COLUMNS)));
    let segments = g.width.div_ceil(length);
    let blocks = (strips(g) * tile).div_ceil(THREADS) * tiles * segments * g.images;
    let launch = KERNELS.launch(out.gpu(), &format!("dwconv_forward<T, {}, {pairs}>", g.kernel), dtype)?;
    let launch = launch.threads(THREADS).blocks(blocks).pointer(x_address).count(x.stride).input(weight)?;
    let launch = launch.int(residual.into()).optional(bias)?.out(Some(&out)).count(stride);
    // SAFETY: x and y hold maps of these extents, by the checks above, and `dwconv::geometry` that the parameters fit
    // them.
    unsafe { launch.extents([g.height, g.width, g.channels, tile, tiles, length, segments])?.run() }
}

/// From dy and x, in one pass, those of dx = dy ∗ the kernel rotated by 180°, dweight (C, 1, K, K) and dbias (C) that
/// are wanted, each stored or accumulated.
pub(crate) fn backward(
    g: Geometry,
    dy: &Map,
    x: &Map,
    Kernel { weight, residual }: Kernel<'_>,
    dx: Option<MapMut<'_>>,
    [dweight, dbias]: [Option<Out<'_>>; 2],
) -> Result<()> {
    let of_parameters = dweight.is_some() || dbias.is_some();
    if dx.is_none() && !of_parameters {
        return Ok(());
    }
    let dtype = x.elements.dtype();
    dy.elements.ensure_dtype("dwconv", dtype)?;
    weight.ensure_dtype("dwconv", dtype.of_sums())?;
    [&dweight, &dbias].into_iter().flatten().try_for_each(|out| out.ensure_dtype("dwconv", dtype.of_sums()))?;
    let gpu = x.elements.gpu("dwconv")?;
    let [dy_address, x_address] = [address(g, dy, gpu)?, address(g, x, gpu)?];
    // If dx is not wanted, it goes to a scratch tensor.
    let mut waste = None;
    let dx = match dx {
        Some(dx) => dx,
        None => {
            let shape = [g.images, g.height, g.width, g.channels];
            let waste = waste.insert(Tensor::empty_on(&x.elements.device(), shape, dtype)?);
            MapMut { out: waste.as_out("dwconv", false)?, stride: g.channels }
        }
    };
    dx.out.ensure_dtype("dwconv", dtype)?;
    ensure_room(g, dx.stride, dx.out.count())?;
    let maps = [(dy_address, dy.stride), (x_address, x.stride), (dx.out.address(), dx.stride)];
    let pairs = pairs(g, dtype, &maps);
    let Tiling { tile, tiles } = Tiling::new(g, pairs);
    let strips = if g.is_empty() { 0 } else { g.images * strips(g) };
    let pieces = strips.div_ceil(THREADS_BACKWARD / tile).clamp(1, (BLOCKS_BACKWARD / tiles.max(1)).max(1));
    let sums = tile * if pairs { 2 } else { 1 } * (g.taps() + 1);
    let partial = of_parameters.then(|| partial_sums(&x.elements.device(), dtype.of_sums(), [tiles, pieces, sums]));
    let mut partial = partial.transpose()?;
    let launch = KERNELS.launch(gpu, &format!("dwconv_backward<T, {}, {pairs}>", g.kernel), dtype)?;
    let launch = launch.threads(THREADS_BACKWARD).blocks(pieces * tiles).pointer(dy_address).count(dy.stride);
    let launch = launch.pointer(x_address).count(x.stride).input(weight)?.int(residual.into());
    let launch = launch.out(Some(&dx.out)).count(dx.stride);
    let launch = launch.optional_output(partial.as_mut())?.out(dweight.as_ref()).out(dbias.as_ref());
    // SAFETY: the three hold maps of these extents, by the checks above, the parameters and their gradients fit them,
    // and there is a place for each piece's sums.
    unsafe { launch.count(strips).extents([g.height, g.width, g.channels, tile, tiles])?.run() }
}

/// Strips of rows of an image, each for one thread; as in the kernels.
fn strips(g: Geometry) -> usize {
    let rows = match g.kernel {
        3 => 4,
        5 => 2,
        _ => 1,
    };
    g.height.div_ceil(rows)
}

/// How channels are shared out: among `tile` threads in each of `tiles` blocks.
struct Tiling {
    tile: usize,
    tiles: usize,
}

impl Tiling {
    fn new(g: Geometry, pairs: bool) -> Self {
        let threads = if pairs { g.channels / 2 } else { g.channels };
        let tiles = threads.div_ceil(TILE);
        Self { tile: threads.div_ceil(tiles.max(1)).max(1), tiles }
    }
}

/// Whether each thread takes a pair of channels: if pairs are aligned in all maps, so that one instruction can load
/// them. In f64 there are too few registers.
fn pairs(g: Geometry, dtype: DType, maps: &[(u64, usize)]) -> bool {
    let even =
        |&(address, stride): &(u64, usize)| address.is_multiple_of(2 * dtype.size() as u64) && stride.is_multiple_of(2);
    dtype != DType::F64 && g.channels.is_multiple_of(2) && maps.iter().all(even)
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
