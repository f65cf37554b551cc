//! Attention on tensor cores over any map: tiles of the keys that a region is routed to.

use super::{Geometry, Given, KERNELS, TILE, invert, with_geometry};
use tensor::cuda::{Gpu, Launch, Out};
use tensor::{DType, Result, Tensor};

/// The kernels of `gathered.cuh` for heads of so many channels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gathered {
    pub dim: usize,
    /// Whether all keys and values of an image's head are in shared memory.
    pub resident: bool,
}

impl Gathered {
    /// Tokens that a warp owns at a time, as in `gathered_tiles.cuh`.
    const OWN_ROWS: usize = 16;
    /// The maximum number of warps per block where all tokens are resident, as `THREADS` there.
    const WARPS: usize = 8;

    /// With all keys and values resident if they fit, and blocks for whole heads fill the GPU.
    pub fn of(gpu: &Gpu, g: Geometry, dim: usize) -> Self {
        let (properties, form) = (gpu.properties(), Self { dim, resident: true });
        let fills = g.images * g.heads >= properties.multiprocessors;
        Self { resident: fills && form.shared(g) <= properties.shared_memory, ..form }
    }

    /// Bytes of shared memory: keys and values.
    fn shared(self, g: Geometry) -> usize {
        let held = if self.resident { g.tokens() } else { TILE };
        2 * held * self.dim.next_multiple_of(16) * DType::Bf16.size()
    }

    /// Prepares the launch of one of the kernels. If warps share the regions (`resident`), a block has only as many as
    /// the minimum number of rounds needs; what further warps would occupy is left to other blocks.
    fn launch<'a>(self, qkv: &'a Tensor, kernel: &str, g: Geometry) -> Result<Launch<'a>> {
        let chunks = g.regions.count() * g.regions.tokens().div_ceil(Self::OWN_ROWS);
        let (regions, warps) = match self.resident {
            true => (1, chunks.div_ceil(chunks.div_ceil(Self::WARPS))),
            false => (g.regions.count(), TILE / Self::OWN_ROWS),
        };
        let kernel = format!("{kernel}<{}, {}>", self.dim, self.resident);
        let launch = KERNELS.launch_on(qkv, &kernel)?.threads(32 * warps).shared(self.shared(g));
        Ok(launch.grid([regions, g.heads, g.images]))
    }

    /// As [`forward`](super::forward).
    pub fn forward(
        self,
        g: Geometry,
        [qkv, routes]: [&Tensor; 2],
        scale: f64,
        [out, lse]: [&mut Tensor; 2],
    ) -> Result<()> {
        let launch = self.launch(qkv, "attend_gathered", g)?.input(qkv)?.input(routes)?.number(scale, DType::F32);
        // SAFETY: the tensors are those of this geometry, and routes are regions of the map; heads have the kernel's
        // channels, and rows of qkv are packs.
        unsafe { with_geometry(launch.output(out)?.output(lse)?, g)?.run() }
    }

    /// As [`backward`](super::backward).
    pub fn backward(self, g: Geometry, given: &Given<'_>, dqkv: &Out<'_>) -> Result<()> {
        let [starts, entries] = invert(g, given.routes)?;
        let mut delta = Tensor::empty_on(&given.qkv.device(), given.lse.shape().clone(), DType::F32)?;
        let launch = self.launch(given.qkv, "attend_backward_queries_gathered", g)?.input(given.qkv)?;
        let launch = launch.input(given.routes)?.number(given.scale, DType::F32).input(given.lse)?;
        let launch = launch.input(given.dout)?.out(Some(dqkv))?.output(&mut delta)?;
        // SAFETY: as above; dqkv is like qkv, and delta like lse.
        unsafe { with_geometry(launch, g)?.run()? };
        let launch = self.launch(given.qkv, "attend_backward_keys_gathered", g)?.input(given.qkv)?;
        let launch = launch.input(&starts)?.input(&entries)?.number(given.scale, DType::F32).input(given.lse)?;
        let launch = launch.input(&delta)?.input(given.dout)?.out(Some(dqkv))?;
        // SAFETY: as above; the lists are those of the routes.
        unsafe { with_geometry(launch, g)?.run() }
    }
}
