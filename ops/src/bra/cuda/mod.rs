//! CUDA kernels of [`bra`](mod@super).
//!
//! | file | what it holds |
//! |---|---|
//! | `routing.cuh` | region means, the choice of regions, the inverted list |
//! | `attention.cuh` | attention, forward and backward, for any type and head |
//! | `gathered.rs`, `gathered.cuh`, `gathered_tiles.cuh` | attention in bf16 on tensor cores, for any map |
//! | `masked.rs`, `masked.cuh` | the same for maps so small that all keys are multiplied, and weights masked |
//! | `single.rs`, `single.cuh` | the same where each query attends to one region |
//! | `own_rows.cuh` | what these three are built from |
//! | `geometry.cuh` | where tokens, heads and regions lie |

mod gathered;
mod masked;
mod single;

use super::geometry::Geometry;
use crate::dwconv::cuda::{self as dwconv, Kernel, Map, MapMut};
use crate::dwconv::geometry::Geometry as Context;
use gathered::Gathered;
use masked::Masked;
use single::Single;
use tensor::cuda::{Gpu, Launch, Module, Out};
use tensor::{DType, Error, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "bra",
    source: include_str!("kernel.cu"),
    headers: &[
        ("geometry.cuh", include_str!("geometry.cuh")),
        ("routing.cuh", include_str!("routing.cuh")),
        ("attention.cuh", include_str!("attention.cuh")),
        ("own_rows.cuh", include_str!("own_rows.cuh")),
        ("gathered_tiles.cuh", include_str!("gathered_tiles.cuh")),
        ("gathered.cuh", include_str!("gathered.cuh")),
        ("masked.cuh", include_str!("masked.cuh")),
        ("single.cuh", include_str!("single.cuh")),
    ],
    kernels: &[
        "region_means<T>",
        "choose_regions<T>",
        "route<T>",
        "invert_routes",
        "attend<T>",
        "attend_backward_queries<T>",
        "attend_backward_keys<T>",
        "attend_gathered<24|32|64|96, false|true>",
        "attend_backward_queries_gathered<24|32|64|96, false|true>",
        "attend_backward_keys_gathered<24|32|64|96, false|true>",
        "attend_masked<24|32>",
        "attend_backward_masked<24|32>",
        "attend_single<24|32|64|96>",
        "attend_backward_single<24|32|64|96>",
    ],
};

/// Tokens of a tile, as in `attention.cuh`.
const QUERIES: usize = 16;
const KEYS: usize = 32;
/// The same on tensor cores, as in `own_rows.cuh`.
const TILE: usize = 64;
/// Regions per warp when choosing, the maximum number of warps per block, and the bytes of the statically declared
/// tiles, as in `routing.cuh`.
const OWN: usize = 4;
const WARPS: usize = 8;
const CHOOSING_TILES: usize = 13 << 10;
/// Of the kernel that routes a whole image, as in `routing.cuh`: warps per block, the regions of a warp, and into how
/// many shares warps divide the channels. The maximum number of regions for which it is used.
const ROUTING_WARPS: usize = 28;
const ROWS: usize = 7;
const SHARES: usize = 4;
const FEW_REGIONS: usize = 64;
/// Even if there are too few images to fill the GPU, one block reads this many bytes of queries and keys in less time
/// than it takes to launch another kernel.
const OF_BLOCK: usize = 256 << 10;

/// What a kernel needs to divide by a number: the magic of `Divisor` in `geometry.cuh`.
fn magic(by: usize) -> i32 {
    let by = by.max(1) as u64;
    let shift = by.next_power_of_two().trailing_zeros();
    (1u64 << (31 + shift)).div_ceil(by) as u32 as i32
}

/// The geometry as kernels take it.
fn with_geometry(launch: Launch<'_>, g: Geometry) -> Result<Launch<'_>> {
    let ([rows, cols], [height, width], [d, dv]) = (g.regions.grid(), g.regions.size(), g.head_dims());
    let launch = launch.extents([rows, cols, height, width, g.heads, d, dv, g.topk])?;
    Ok(launch.int(magic(cols)).int(magic(width)).int(magic(height * width)))
}

/// Blocks for tiles of `size` tokens of each region, head and image.
fn tiles(g: Geometry, size: usize) -> [usize; 3] {
    [g.regions.count() * g.regions.tokens().div_ceil(size), g.heads, g.images]
}

/// routes and their affinities, both (N, P, k), of qkv (N, H, W, 2D + C).
pub fn route(
    g: Geometry,
    valid: [usize; 2],
    scale: f64,
    qkv: &Tensor,
    [routes, affinities]: [&mut Tensor; 2],
) -> Result<()> {
    let (dtype, regions, gpu) = (qkv.dtype(), g.regions.count(), qkv.gpu("bra")?);
    let (pack, of_image) = (dtype.per_pack(), g.tokens() * 2 * g.qk_dim * dtype.size());
    let in_packs = [g.qk_dim, g.v_dim].iter().all(|dim| dim.is_multiple_of(pack));
    let in_packs = in_packs && qkv.address("bra", gpu)?.is_multiple_of(16);
    let properties = gpu.properties();
    let filled = 4 * g.images >= 3 * properties.multiprocessors;
    // In shared memory, all regions' affinities and means.
    let pack_of_sums = dtype.of_sums().per_pack();
    let row = regions.next_multiple_of(pack_of_sums);
    let shared = SHARES * regions * row + 2 * g.qk_dim * (regions.next_multiple_of(ROWS) | 1);
    let shared = shared * dtype.of_sums().size();
    let fits = regions <= FEW_REGIONS && shared <= properties.shared_memory;
    if fits && in_packs && (filled || of_image <= OF_BLOCK) {
        let launch = KERNELS.launch_on(qkv, "route<T>")?.threads(32 * ROUTING_WARPS).blocks(g.images).shared(shared);
        let launch = launch.input(qkv)?.extents(valid)?.number(scale, dtype).output(routes)?.output(affinities)?;
        let launch = launch.int(magic(2 * g.qk_dim / pack));
        // SAFETY: qkv is a map of this geometry, and there is a place for each region's k choices.
        return unsafe { with_geometry(launch, g)?.run() };
    }
    let mut means = Tensor::empty_on(&qkv.device(), [g.images, regions, 2 * g.qk_dim], dtype.of_sums())?;
    let launch = KERNELS.launch_on(qkv, "region_means<T>")?.grid([regions, g.images, 1]).input(qkv)?;
    let launch = with_geometry(launch.output(&mut means)?.extents(valid)?, g)?;
    // SAFETY: as above, and for its means.
    unsafe { launch.run()? };
    // A warp keeps the affinities of its regions in shared memory, beside what the kernel declares.
    let of_warp = OWN * row * dtype.of_sums().size();
    let most = properties.shared_memory - CHOOSING_TILES;
    let warps = (most / 2 / of_warp).clamp(1, WARPS);
    if of_warp > most {
        return Err(Error::argument("bra", format!("{regions} regions do not fit a GPU's shared memory; use fewer")));
    }
    let launch = KERNELS.launch_on(qkv, "choose_regions<T>")?.threads(32 * warps).shared(warps * of_warp);
    let launch = launch.grid([regions.div_ceil(OWN * warps), g.images, 1]).input(&means)?.number(scale, dtype);
    let launch = launch.output(routes)?.output(affinities)?;
    // SAFETY: there are means for each region of each image, and room for k choices.
    unsafe { launch.extents([regions, g.qk_dim, g.topk])?.run() }
}

/// out (N, H, W, C) and lse (N, heads, H·W) of qkv (N, H, W, 2D + C). If the backward pass will be `wanted`, and needs
/// out as it is before the local context is added, a copy of it.
pub fn forward(
    g: Geometry,
    [qkv, routes]: [&Tensor; 2],
    scale: f64,
    [out, lse]: [&mut Tensor; 2],
    wanted: bool,
) -> Result<Option<Tensor>> {
    let gpu = qkv.gpu("bra")?;
    let maps = [qkv.address("bra", gpu)?, out.address("bra", gpu)?];
    match Form::of(gpu, g, qkv.dtype(), scale, &maps) {
        Some(Form::Masked(masked)) => {
            let mut attended = wanted.then(|| out.empty_like()).transpose()?;
            masked.forward(g, [qkv, routes], scale, [out, lse], attended.as_mut())?;
            return Ok(attended);
        }
        Some(Form::Single(single)) => single.forward(g, [qkv, routes], scale, [out, lse])?,
        Some(Form::Gathered(gathered)) => gathered.forward(g, [qkv, routes], scale, [out, lse])?,
        None => {
            let [d, dv] = g.head_dims();
            let elements = QUERIES * d + KEYS * (d + 1) + KEYS * dv + QUERIES * KEYS + QUERIES * dv + 3 * QUERIES;
            let launch = KERNELS.launch_on(qkv, "attend<T>")?.threads(128).grid(tiles(g, QUERIES));
            let launch = launch.shared(elements * qkv.dtype().of_sums().size()).input(qkv)?.input(routes)?;
            let launch = launch.number(scale, qkv.dtype()).output(out)?.output(lse)?;
            // SAFETY: the tensors are those of this geometry, and routes are regions of the map.
            unsafe { with_geometry(launch, g)?.run()? };
        }
    }
    Ok(None)
}

/// What a backward pass is given.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    /// (N, H, W, 2D + C)
    pub qkv: &'a Tensor,
    /// (N, P, k)
    pub routes: &'a Tensor,
    /// s
    pub scale: f64,
    /// (N, heads, H·W)
    pub lse: &'a Tensor,
    /// (N, H, W, C), if the forward pass kept it.
    pub attended: Option<&'a Tensor>,
    /// (N, H, W, C)
    pub dout: &'a Tensor,
}

/// dqkv (N, H, W, 2D + C).
pub fn backward(g: Geometry, given: &Given<'_>, dqkv: &Out<'_>) -> Result<()> {
    let (dtype, gpu) = (given.qkv.dtype(), given.qkv.gpu("bra")?);
    dqkv.ensure_dtype("bra", dtype)?;
    let maps = [given.qkv.address("bra", gpu)?, given.dout.address("bra", gpu)?, dqkv.address()];
    match (Form::of(gpu, g, dtype, given.scale, &maps), given.attended) {
        (Some(Form::Masked(masked)), Some(attended)) => masked.backward(g, given, attended, dqkv),
        (Some(Form::Single(single)), _) => single.backward(g, given, dqkv),
        (Some(Form::Gathered(gathered)), _) => gathered.backward(g, given, dqkv),
        // Nothing is kept for the masked form if the forward pass took another one.
        (Some(Form::Masked(_)) | None, _) => {
            let lists = invert(g, given.routes)?;
            let mut delta = given.lse.empty_like()?;
            backward_queries(g, given, dqkv, &mut delta)?;
            backward_keys(g, given, [&lists[0], &lists[1], &delta], dqkv)
        }
    }
}

fn backward_queries(g: Geometry, given: &Given<'_>, dqkv: &Out<'_>, delta: &mut Tensor) -> Result<()> {
    let ([d, dv], dtype) = (g.head_dims(), given.qkv.dtype());
    let elements = QUERIES * (2 * d + dv) + KEYS * (d + dv + 2) + QUERIES * KEYS + 2 * QUERIES;
    let launch = KERNELS.launch_on(given.qkv, "attend_backward_queries<T>")?.threads(128).grid(tiles(g, QUERIES));
    let launch = launch.shared(elements * dtype.of_sums().size()).input(given.qkv)?.input(given.routes)?;
    let launch =
        launch.number(given.scale, dtype).input(given.lse)?.input(given.dout)?.out(Some(dqkv))?.output(delta)?;
    // SAFETY: as in `forward`; dqkv is like qkv.
    unsafe { with_geometry(launch, g)?.run() }
}

fn backward_keys(g: Geometry, given: &Given<'_>, [starts, entries, delta]: [&Tensor; 3], dqkv: &Out<'_>) -> Result<()> {
    let ([d, dv], dtype) = (g.head_dims(), given.qkv.dtype());
    let elements = KEYS * (d + dv + 2) + KEYS * (d + dv) + QUERIES * (d + dv) + 2 * QUERIES * KEYS;
    let launch = KERNELS.launch_on(given.qkv, "attend_backward_keys<T>")?.threads(128).grid(tiles(g, KEYS));
    let launch = launch.shared(elements * dtype.of_sums().size()).input(given.qkv)?.input(starts)?.input(entries)?;
    let launch =
        launch.number(given.scale, dtype).input(given.lse)?.input(delta)?.input(given.dout)?.out(Some(dqkv))?;
    // SAFETY: as above; the lists are those of the routes.
    unsafe { with_geometry(launch, g)?.run() }
}

/// The values within a map like qkv.
fn values(g: Geometry, qkv: &Tensor) -> Result<Map> {
    Map::new(qkv, 2 * g.qk_dim, g.row())
}

/// out += dwconv(v): the local context, with the convolution's weight and bias.
pub fn add_context(
    g: Geometry,
    context: Context,
    qkv: &Tensor,
    [weight, bias]: [&Tensor; 2],
    out: &mut Tensor,
) -> Result<()> {
    let out = MapMut { out: out.as_out("bra", true)?, stride: g.v_dim };
    dwconv::forward(context, &values(g, qkv)?, Kernel { weight, residual: false }, Some(bias), out)
}

/// dqkv += the values' gradient through the local context; the attention has written theirs through itself.
pub fn add_context_backward(
    g: Geometry,
    context: Context,
    given: &Given<'_>,
    weight: &Tensor,
    mut dqkv: Out<'_>,
) -> Result<()> {
    let start = (2 * g.qk_dim).min(dqkv.count());
    let mut out = dqkv.part(start, dqkv.count() - start);
    out.accumulate = true;
    let kernel = Kernel { weight, residual: false };
    let dout = Map::new(given.dout, 0, g.v_dim)?;
    dwconv::backward_input(context, &dout, kernel, MapMut { out, stride: g.row() })
}

/// The gradients of the local context's weight and bias, if they are wanted.
pub fn backward_context_weight(
    g: Geometry,
    context: Context,
    given: &Given<'_>,
    outs: [Option<Out<'_>>; 2],
) -> Result<()> {
    dwconv::backward_weight(context, &Map::new(given.dout, 0, g.v_dim)?, &values(g, given.qkv)?, outs)
}

/// For each region the regions routed to it: starts (N, P + 1) and entries (N, P·k).
fn invert(g: Geometry, routes: &Tensor) -> Result<[Tensor; 2]> {
    let device = routes.device();
    let mut starts = Tensor::empty_on(&device, [g.images, g.regions.count() + 1], DType::Index)?;
    let mut entries = Tensor::empty_on(&device, [g.images, g.regions.count() * g.topk], DType::Index)?;
    let launch = KERNELS.launch(routes.gpu("bra")?, "invert_routes", DType::F32)?;
    let launch = launch.grid([(g.regions.count() + 1).div_ceil(8), g.images, 1]).input(routes)?;
    let launch = launch.output(&mut starts)?.output(&mut entries)?;
    // SAFETY: each image has a list of P starts and an end, and P·k entries.
    unsafe { launch.extents([g.regions.count(), g.topk])?.int(magic(g.topk)).run()? };
    Ok([starts, entries])
}

/// How attention is computed on tensor cores.
#[derive(Clone, Copy, Debug)]
enum Form {
    Masked(Masked),
    Single(Single),
    Gathered(Gathered),
}

impl Form {
    /// `None` if tensor cores cannot be used: among other conditions, the addresses `maps` must be aligned to packs,
    /// and the scale must be positive, so that larger products mean larger scores.
    fn of(gpu: &Gpu, g: Geometry, dtype: DType, scale: f64, maps: &[u64]) -> Option<Form> {
        let [dim, v_dim] = g.head_dims();
        let known = dtype == DType::Bf16 && dim == v_dim && [24, 32, 64, 96].contains(&dim);
        let in_packs = maps.iter().all(|address| address.is_multiple_of(16));
        let masked = || Masked::of(gpu, g, dim).map(Form::Masked);
        let single = || Single::of(g, dim).map(Form::Single);
        let gathered = || Form::Gathered(Gathered::of(gpu, g, dim));
        let usable = known && in_packs && scale as f32 > 0.0 && g.tokens() > 0;
        usable.then(|| masked().or_else(single).unwrap_or_else(gathered))
    }
}

#[cfg(test)]
mod tests;
