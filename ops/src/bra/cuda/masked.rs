//! Attention on tensor cores over small maps: all keys are multiplied, and those that are not routed have no weight.

use super::{Geometry, Given, KERNELS, with_geometry};
use tensor::cuda::{Gpu, Launch, Out};
use tensor::{DType, Error, Result, Tensor};

/// The kernels of `masked.cuh` for heads of so many channels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Masked {
    pub dim: usize,
}

impl Masked {
    /// The channels of a head that there are kernels for.
    const DIMS: [usize; 2] = [24, 32];
    /// The maximum number of tokens, as in `masked.cuh`, where a block has a thread for each.
    const MOST: usize = 256;
    /// A region's routes are the bits of a word.
    const MOST_REGIONS: usize = 64;
    /// Products with all keys are worth it if at least one of so many is routed.
    const OF_KEYS: usize = 4;
    /// Elements from one row to the next of two maps side by side, as in `masked.cuh`.
    const PAIR: usize = 72;
    /// Bytes of shared memory that the driver takes for itself of each block's.
    const RESERVED: usize = 1 << 10;

    /// `None` unless the map [`suits`](Self::suits), and blocks for whole heads fit the GPU and fill it.
    pub fn of(gpu: &Gpu, g: Geometry, dim: usize) -> Option<Self> {
        let form = Self { dim };
        let fills = g.images * g.heads >= gpu.properties().multiprocessors;
        (Self::suits(g) && form.fits(gpu, g) && fills).then_some(form)
    }

    /// Whether a head fits the shared memory of a block.
    pub fn fits(self, gpu: &Gpu, g: Geometry) -> bool {
        let most = gpu.properties().shared_memory;
        Self::DIMS.contains(&self.dim) && self.shared_forward(g) <= most && Self::chunk(gpu, g).is_some()
    }

    /// Whether a map is small, enough of its products are needed, and two neighbouring columns of a product lie in the
    /// same region.
    pub fn suits(g: Geometry) -> bool {
        let of_region = g.regions.tokens();
        let small = g.tokens() <= Self::MOST && g.regions.count() <= Self::MOST_REGIONS;
        small && [2, 4, 8, 16].contains(&of_region) && Self::OF_KEYS * g.topk * of_region >= g.tokens()
    }

    /// Rows of each map in shared memory: whole tiles.
    fn rows(g: Geometry) -> usize {
        g.tokens().next_multiple_of(16)
    }

    /// For each region and each of four lanes, the bits that say which of its columns count.
    fn of_columns(g: Geometry) -> usize {
        g.regions.count() * 4 * size_of::<u32>()
    }

    /// Bytes of shared memory, forward: keys and values, and queries, into which the result goes.
    fn shared_forward(self, g: Geometry) -> usize {
        let elements = Self::rows(g) * (Self::PAIR + self.dim.next_multiple_of(16) + 8);
        elements * DType::Bf16.size() + Self::of_columns(g)
    }

    /// Bytes of shared memory, backward: queries and dout, keys and values, dSᵀ of all keys and so many queries, for
    /// each thread's token two numbers, and for each region its routes.
    fn shared_backward(g: Geometry, chunk: usize) -> usize {
        let elements = Self::rows(g) * (2 * Self::PAIR + chunk + 8);
        let of_regions = g.regions.count() * size_of::<u64>() + Self::of_columns(g);
        elements * DType::Bf16.size() + g.tokens().next_multiple_of(32) * 2 * DType::F32.size() + of_regions
    }

    /// The queries for which the backward pass has dSᵀ in shared memory at once: as many as leave room for a second
    /// block, or, if that is impossible, for one; whole tiles.
    fn chunk(gpu: &Gpu, g: Geometry) -> Option<usize> {
        let most = gpu.properties().shared_memory;
        let chunk = |parts| Self::rows(g).div_ceil(parts).next_multiple_of(16);
        let within = |most| (1..=4).map(chunk).find(|&chunk| Self::shared_backward(g, chunk) <= most);
        // A multiprocessor has what its largest block can have, and what the driver reserves for that.
        within((most + Self::RESERVED) / 2 - Self::RESERVED).or_else(|| within(most))
    }

    fn launch<'a>(self, qkv: &'a Tensor, kernel: &str, g: Geometry) -> Result<Launch<'a>> {
        let launch = KERNELS.launch_on(qkv, &format!("{kernel}<{}>", self.dim))?;
        Ok(launch.threads(g.tokens().next_multiple_of(32)).grid([g.heads, g.images, 1]))
    }

    /// The kernels' last parameters: log₂ of a region's tokens, and the geometry.
    fn finish(launch: Launch<'_>, g: Geometry) -> Result<Launch<'_>> {
        with_geometry(launch.int(g.regions.tokens().ilog2() as i32), g)
    }

    /// As [`forward`](super::forward); `attended`, if it is wanted, gets a copy of `out`.
    pub fn forward(
        self,
        g: Geometry,
        [qkv, routes]: [&Tensor; 2],
        scale: f64,
        [out, lse]: [&mut Tensor; 2],
        attended: Option<&mut Tensor>,
    ) -> Result<()> {
        let launch = self.launch(qkv, "attend_masked", g)?.shared(self.shared_forward(g));
        let launch = launch.input(qkv)?.input(routes)?.number(scale, DType::F32).output(out)?;
        let launch = launch.optional_output(attended)?.output(lse)?;
        // SAFETY: the tensors are those of this geometry; heads have the kernel's channels, and rows of qkv are packs.
        unsafe { Self::finish(launch, g)?.run() }
    }

    /// As [`backward`](super::backward), given what the forward pass has kept in `attended`.
    pub fn backward(self, g: Geometry, given: &Given<'_>, attended: &Tensor, dqkv: &Out<'_>) -> Result<()> {
        let Some(chunk) = Self::chunk(given.qkv.gpu("bra")?, g) else {
            return Err(Error::argument("bra", "a masked attention that does not fit the GPU"));
        };
        self.backward_in_chunks(chunk, g, given, attended, dqkv)
    }

    /// The same with dSᵀ of so many queries, a whole number of tiles, in shared memory at once.
    pub fn backward_in_chunks(
        self,
        chunk: usize,
        g: Geometry,
        given: &Given<'_>,
        attended: &Tensor,
        dqkv: &Out<'_>,
    ) -> Result<()> {
        let launch = self.launch(given.qkv, "attend_backward_masked", g)?.shared(Self::shared_backward(g, chunk));
        let launch = launch.input(given.qkv)?.input(given.routes)?.number(given.scale, DType::F32).input(attended)?;
        let launch = launch.input(given.lse)?.input(given.dout)?.out(Some(dqkv))?.extents([chunk])?;
        // SAFETY: as above; `attended` is like dout, and dqkv like qkv.
        unsafe { Self::finish(launch, g)?.run() }
    }
}
