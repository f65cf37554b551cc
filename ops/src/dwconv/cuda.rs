//! CUDA kernels of [`dwconv`](super::dwconv), also run by operations that hold its operands inside wider tensors.

use super::cpu::Extents;
use std::sync::Arc;
use tensor::cuda::elements::finish_sums;
use tensor::cuda::{Gpu, Module, Out};
use tensor::{DType, Error, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "dwconv",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &[
        "dwconv_correlate<T, 3, true>",
        "dwconv_correlate<T, 3, false>",
        "dwconv_correlate<T, 5, true>",
        "dwconv_correlate<T, 5, false>",
        "dwconv_correlate<T, 7, true>",
        "dwconv_correlate<T, 7, false>",
        "dwconv_weight<T, 3, true>",
        "dwconv_weight<T, 3, false>",
        "dwconv_weight<T, 5, true>",
        "dwconv_weight<T, 5, false>",
        "dwconv_weight<T, 7, true>",
        "dwconv_weight<T, 7, false>",
    ],
};

/// The name of a kernel for an extent K, with or without pairs of channels.
macro_rules! instance {
    ($kernel:literal, $extent:expr, $pairs:expr) => {
        match ($extent, $pairs) {
            (3, true) => concat!($kernel, "<T, 3, true>"),
            (3, false) => concat!($kernel, "<T, 3, false>"),
            (5, true) => concat!($kernel, "<T, 5, true>"),
            (5, false) => concat!($kernel, "<T, 5, false>"),
            (7, true) => concat!($kernel, "<T, 7, true>"),
            (7, false) => concat!($kernel, "<T, 7, false>"),
            (other, _) => unreachable!("invariant: a kernel of extent {other} was refused"),
        }
    };
}

/// Threads of a block, and the most of them that have channels of one pixel; as in the kernels.
const THREADS: usize = 128;
const TILE: usize = 32;

/// Columns are shared out among threads until there are so many threads, or so few columns to each.
const ENOUGH_THREADS: usize = 1 << 16;
const FEW_COLUMNS: usize = 8;

/// Blocks that the weight's gradient is shared out among, about.
const WEIGHT_BLOCKS: usize = 512;

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
pub(crate) fn forward(e: Extents, x: &Map, kernel: Kernel<'_>, bias: Option<&Tensor>, y: MapMut<'_>) -> Result<()> {
    correlate(e, x, kernel, false, bias, y)
}

/// dx = dy ∗ the kernel turned by half a turn, stored or added.
pub(crate) fn backward_input(e: Extents, dy: &Map, kernel: Kernel<'_>, dx: MapMut<'_>) -> Result<()> {
    correlate(e, dy, kernel, true, None, dx)
}

/// dweight (C, 1, K, K) and dbias (C), where they are wanted, from dy and x in one pass.
pub(crate) fn backward_weight(
    e: Extents,
    dy: &Map,
    x: &Map,
    dweight: Option<Out<'_>>,
    dbias: Option<Out<'_>>,
) -> Result<()> {
    if dweight.is_none() && dbias.is_none() {
        return Ok(());
    }
    let dtype = x.elements.dtype();
    dy.elements.expect("dwconv", dtype)?;
    let gpu = x.elements.gpu("dwconv")?;
    let [dy_address, x_address] = [address(e, dy, gpu)?, address(e, x, gpu)?];
    let pairs = pairs(e, dtype, &[(dy_address, dy.stride), (x_address, x.stride)]);
    let Tiles { tile, tiles } = Tiles::new(e, pairs);
    let (strips, lines) = (if e.is_empty() { 0 } else { e.images * strips(e) }, THREADS / tile);
    let strips_per_line = (strips * tiles).div_ceil(lines * WEIGHT_BLOCKS).max(1);
    let strips_per_piece = strips_per_line * lines;
    let pieces = strips.div_ceil(strips_per_piece).max(1);
    let mut partial = Tensor::empty_on(&x.elements.device(), [pieces, (e.taps() + 1) * e.channels], dtype.wide())?;
    let launch = KERNELS.launch(gpu, instance!("dwconv_weight", e.kernel, pairs), dtype)?;
    let launch = launch.threads(THREADS).blocks(pieces * tiles).pointer(dy_address).count(dy.stride);
    let launch = launch.pointer(x_address).count(x.stride).output(&mut partial)?.count(strips).count(strips_per_piece);
    // SAFETY: dy and x hold maps of these extents, `address` has seen to that, and there is a place for each piece's sums.
    unsafe { launch.extents([e.height, e.width, e.channels, tile, tiles])?.run()? };
    finish_sums(&partial, e.taps() * e.channels, [dweight, dbias])
}

fn correlate(
    e: Extents,
    x: &Map,
    Kernel { weight, residual }: Kernel<'_>,
    turned: bool,
    bias: Option<&Tensor>,
    y: MapMut<'_>,
) -> Result<()> {
    if e.is_empty() {
        return Ok(());
    }
    let dtype = x.elements.dtype();
    let MapMut { out, stride } = y;
    out.expect("dwconv", dtype)?;
    [Some(weight), bias].into_iter().flatten().try_for_each(|parameter| parameter.expect("dwconv", dtype.wide()))?;
    let x_address = address(e, x, out.gpu())?;
    expect_room(e, stride, out.count())?;
    let pairs = pairs(e, dtype, &[(x_address, x.stride), (out.address(), stride)]);
    let Tiles { tile, tiles } = Tiles::new(e, pairs);
    let segments = ENOUGH_THREADS / (e.images * strips(e) * tile * tiles);
    let length = e.width.div_ceil(segments.clamp(1, e.width.div_ceil(FEW_COLUMNS)));
    let segments = e.width.div_ceil(length);
    let blocks = (strips(e) * tile).div_ceil(THREADS) * tiles * segments * e.images;
    let launch = KERNELS.launch(out.gpu(), instance!("dwconv_correlate", e.kernel, pairs), dtype)?;
    let launch = launch.threads(THREADS).blocks(blocks).pointer(x_address).count(x.stride).input(weight)?;
    let launch = launch.int(turned.into()).int(residual.into()).optional(bias)?.out(Some(&out)).count(stride);
    // SAFETY: x and y hold maps of these extents, by the checks above, and `dwconv::extents` that the parameters fit them.
    unsafe { launch.extents([e.height, e.width, e.channels, tile, tiles, length, segments])?.run() }
}

/// Strips of rows of an image, each for one thread; as in the kernels.
fn strips(e: Extents) -> usize {
    let rows = match e.kernel {
        3 => 4,
        5 => 2,
        _ => 1,
    };
    e.height.div_ceil(rows)
}

/// How channels are shared out: among `tile` threads in each of `tiles` blocks.
struct Tiles {
    tile: usize,
    tiles: usize,
}

impl Tiles {
    fn new(e: Extents, pairs: bool) -> Self {
        let threads = if pairs { e.channels / 2 } else { e.channels };
        let tiles = threads.div_ceil(TILE);
        Self { tile: threads.div_ceil(tiles.max(1)).max(1), tiles }
    }
}

/// Whether threads have pairs of channels: where these lie in all maps so that an instruction can load them. In f64 there
/// are too few registers.
fn pairs(e: Extents, dtype: DType, maps: &[(u64, usize)]) -> bool {
    let even =
        |&(address, stride): &(u64, usize)| address.is_multiple_of(2 * dtype.size() as u64) && stride.is_multiple_of(2);
    dtype != DType::F64 && e.channels.is_multiple_of(2) && maps.iter().all(even)
}

/// Where a map begins that has all its pixels.
fn address(e: Extents, map: &Map, gpu: &Arc<Gpu>) -> Result<u64> {
    expect_room(e, map.stride, map.elements.count())?;
    map.elements.address("dwconv", gpu)
}

/// [`Error::Shape`] unless a map of this stride fits into `count` elements.
fn expect_room(e: Extents, stride: usize, count: usize) -> Result<()> {
    if e.is_empty() || (stride >= e.channels && e.span(stride) <= count) {
        return Ok(());
    }
    let expected = format!("a map of {} elements, {stride} from a pixel to the next", e.span(stride));
    Err(Error::shape("dwconv", expected, &[count]))
}
