//! Attention on tensor cores over small maps: all keys are multiplied, and those that are not routed have no weight.

use super::{Geometry, Given, KERNELS, with_geometry};
use tensor::cuda::{Gpu, Launch, Out};
use tensor::{DType, Result, Tensor};

/// The kernels of `masked.cuh` for heads of so many channels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Masked {
    pub dim: usize,
}

impl Masked {
    /// The maximum number of threads of a block, as in `masked.cuh`; and of tokens, since a warp takes 32 of them.
    const MOST: usize = 256;
    /// Maps of a head that the kernels keep in shared memory: queries, into which the result goes, keys and values; backward
    /// also dout, and the queries' gradients.
    const MAPS: [usize; 2] = [3, 5];
    /// A region's routes are the bits of a word.
    const MOST_REGIONS: usize = 64;
    /// Products with all keys are worth it if at least one of so many is routed.
    const OF_KEYS: usize = 4;

    /// `None` unless the map [`suits`](Self::suits), and blocks for whole heads fit the GPU and fill it.
    pub fn of(gpu: &Gpu, g: Geometry, dim: usize) -> Option<Self> {
        let form = Self { dim };
        let fills = g.images * g.heads >= gpu.driver().properties().multiprocessors;
        (Self::suits(g) && form.fits(gpu, g) && fills).then_some(form)
    }

    /// Whether a head fits the shared memory of a block.
    pub fn fits(self, gpu: &Gpu, g: Geometry) -> bool {
        let most = gpu.driver().properties().shared_memory;
        Self::MAPS.iter().all(|&maps| self.shared(g, maps) <= most)
    }

    /// Whether a map is small, enough of its products are needed, and two neighbouring columns of a product lie in the
    /// same region.
    pub fn suits(g: Geometry) -> bool {
        let of_region = g.regions.tokens();
        let small = g.tokens() <= Self::MOST && g.regions.count() <= Self::MOST_REGIONS;
        small && [2, 4, 8, 16].contains(&of_region) && Self::OF_KEYS * g.topk * of_region >= g.tokens()
    }

    /// Rows of each map, with those that no token has: as many as the warps take.
    fn rows(g: Geometry) -> usize {
        g.tokens().next_multiple_of(32)
    }

    /// Bytes of shared memory: the maps, for each region its routes and for each of four lanes what is routed to and
    /// from, and two numbers for each row.
    fn shared(self, g: Geometry, maps: usize) -> usize {
        let of_row = maps * self.dim.next_multiple_of(16) * DType::Bf16.size() + 2 * DType::F32.size();
        Self::rows(g) * of_row + g.regions.count() * (size_of::<u64>() + 2 * 4 * size_of::<u32>())
    }

    fn launch<'a>(self, qkv: &'a Tensor, kernel: &str, g: Geometry, maps: usize) -> Result<Launch<'a>> {
        let launch = KERNELS.launch_on(qkv, &format!("{kernel}<{}>", self.dim))?.shared(self.shared(g, maps));
        Ok(launch.threads(Self::rows(g)).grid([g.heads, g.images, 1]))
    }

    /// The kernels' last parameters: rows in shared memory, log₂ of a region's tokens, and the geometry.
    fn finish(launch: Launch<'_>, g: Geometry) -> Result<Launch<'_>> {
        with_geometry(launch.extents([Self::rows(g)])?.int(g.regions.tokens().ilog2() as i32), g)
    }

    /// As [`forward`](super::forward).
    pub fn forward(
        self,
        g: Geometry,
        [qkv, routes]: [&Tensor; 2],
        scale: f64,
        [out, lse]: [&mut Tensor; 2],
    ) -> Result<()> {
        let launch = self.launch(qkv, "attend_masked", g, Self::MAPS[0])?.input(qkv)?.input(routes)?;
        let launch = launch.number(scale, DType::F32).output(out)?.output(lse)?;
        // SAFETY: the tensors are those of this geometry; heads have the kernel's channels, and rows of qkv are packs.
        unsafe { Self::finish(launch, g)?.run() }
    }

    /// As [`backward`](super::backward).
    pub fn backward(self, g: Geometry, given: &Given<'_>, dqkv: &Out<'_>) -> Result<()> {
        let launch = self.launch(given.qkv, "attend_backward_masked", g, Self::MAPS[1])?;
        let launch = launch.input(given.qkv)?.input(given.routes)?;
        let launch = launch.number(given.scale, DType::F32).input(given.lse)?.input(given.dout)?.out(Some(dqkv));
        // SAFETY: as above; dqkv is like qkv.
        unsafe { Self::finish(launch, g)?.run() }
    }
}
