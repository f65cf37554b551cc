//! Attention on tensor cores where each query attends to a single region, of at most a tile of keys.

use super::{Geometry, Given, KERNELS, TILE, invert, with_geometry};
use tensor::cuda::{Launch, Out};
use tensor::{DType, Result, Tensor};

/// The kernels of `single.cuh` for heads of so many channels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Single {
    pub dim: usize,
}

impl Single {
    /// Threads of a block, as in `single.cuh`.
    const THREADS: usize = 128;
    /// Of what shared memory holds a tile: maps, and squares of scores. Forward these are queries, keys and values;
    /// backward keys and values, queries and dout, both of the next region, too, and A and dS.
    const FORWARD: [usize; 2] = [3, 0];
    const BACKWARD: [usize; 2] = [6, 2];
    /// Channels by which their rows are padded, as in `own_rows.cuh`.
    const PADDING: usize = 8;

    /// `None` unless each query attends to one region whose tokens are a tile, or more than half of one, since a block
    /// computes with whole tiles; and unless an `int` counts the elements of an image.
    pub fn of(g: Geometry, dim: usize) -> Option<Self> {
        let tokens = g.regions.tokens();
        let suits = g.topk == 1 && tokens <= TILE && 2 * tokens > TILE;
        (suits && i32::try_from(g.tokens() * g.row()).is_ok()).then_some(Self { dim })
    }

    /// A block for each region, with maps and squares in shared memory: at most 96 KiB, which every GPU with bf16 has.
    fn launch<'a>(self, qkv: &'a Tensor, kernel: &str, g: Geometry, [maps, squares]: [usize; 2]) -> Result<Launch<'a>> {
        let row = maps * (self.dim.next_multiple_of(16) + Self::PADDING) + squares * (TILE + Self::PADDING);
        let launch = KERNELS.launch_on(qkv, &format!("{kernel}<{}>", self.dim))?.threads(Self::THREADS);
        Ok(launch.shared(TILE * row * DType::Bf16.size()).grid([g.regions.count(), g.heads, g.images]))
    }

    /// As [`forward`](super::forward).
    pub fn forward(
        self,
        g: Geometry,
        [qkv, routes]: [&Tensor; 2],
        scale: f64,
        [out, lse]: [&mut Tensor; 2],
    ) -> Result<()> {
        let launch = self.launch(qkv, "attend_single", g, Self::FORWARD)?;
        let launch = launch.input(qkv)?.input(routes)?.number(scale, DType::F32).output(out)?.output(lse)?;
        // SAFETY: the tensors are those of this geometry, in which the tokens of a region fit in a tile; heads have the
        // kernel's channels, and rows of qkv are packs.
        unsafe { with_geometry(launch, g)?.run() }
    }

    /// As [`backward`](super::backward).
    pub fn backward(self, g: Geometry, given: &Given<'_>, dqkv: &Out<'_>) -> Result<()> {
        let [starts, entries] = invert(g, given.routes)?;
        let launch = self.launch(given.qkv, "attend_backward_single", g, Self::BACKWARD)?;
        let launch = launch.input(given.qkv)?.input(&starts)?.input(&entries)?.number(given.scale, DType::F32);
        let launch = launch.input(given.lse)?.input(given.dout)?.out(Some(dqkv))?;
        // SAFETY: as above; the lists are those of the routes, and dqkv is like qkv.
        unsafe { with_geometry(launch, g)?.run() }
    }
}
