//! Attention on tensor cores where each query attends to a single region: backward in one kernel.

use super::{Form, Geometry, Given, KERNELS, with_geometry};
use tensor::cuda::Out;
use tensor::{DType, Result, Tensor};

/// The kernel of `single.cuh` for heads of so many channels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Single {
    pub dim: usize,
}

impl Single {
    /// Threads of a block, as in `single.cuh`.
    const THREADS: usize = 128;
    /// Maps of which shared memory holds a tile: keys and values, queries and dout; and the latter of the next region.
    const MAPS: usize = 6;
    /// Channels by which rows are padded, as in `own_rows.cuh`.
    const PADDING: usize = 8;

    /// `None` unless each query attends to one region whose tokens are a tile, or more than half of one, since a block
    /// computes with whole tiles; and unless an `int` counts the elements of an image.
    pub fn of(g: Geometry, dim: usize) -> Option<Self> {
        let tokens = g.regions.tokens();
        let suits = g.topk == 1 && tokens <= Form::TILE && 2 * tokens > Form::TILE;
        (suits && i32::try_from(g.tokens() * g.row()).is_ok()).then_some(Self { dim })
    }

    /// Bytes of shared memory: P, dS and the maps. That is 96 KiB at most, which every GPU with bf16 has.
    fn shared(self) -> usize {
        let row = 2 * (Form::TILE + Self::PADDING) + Self::MAPS * (self.dim.next_multiple_of(16) + Self::PADDING);
        Form::TILE * row * DType::Bf16.size()
    }

    /// As [`backward`](super::backward), with the inverted lists of the routes.
    pub fn backward(
        self,
        g: Geometry,
        given: &Given<'_>,
        [starts, entries]: [&Tensor; 2],
        dqkv: &Out<'_>,
    ) -> Result<()> {
        let launch = KERNELS.launch_on(given.qkv, &format!("attend_backward_single<{}>", self.dim))?;
        let launch = launch.threads(Self::THREADS).shared(self.shared()).grid([g.regions.count(), g.heads, g.images]);
        let launch = launch.input(given.qkv)?.input(starts)?.input(entries)?.number(given.scale, DType::F32);
        let launch = launch.input(given.lse)?.input(given.dout)?.out(Some(dqkv));
        // SAFETY: the tensors are those of this geometry, the lists those of the routes, and dqkv is like qkv; heads have
        // the kernel's channels, rows of qkv are packs, and the tokens of a region fit in a tile.
        unsafe { with_geometry(launch, g)?.run() }
    }
}
