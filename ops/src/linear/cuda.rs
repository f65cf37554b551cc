//! The GPU's side of [`linear`](super::linear): matrix products by cuBLASLt, and the bias; and a kernel for the gradients
//! of weight and bias where they are bound by memory.

use tensor::cuda::elements::sum_rows;
use tensor::cuda::{Gemm, Matrix, Module, Out, Tiles};
use tensor::{DType, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "linear",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["linear_backward_weight", "linear_add_pieces<float|bf16>"],
};

/// y (R, O) = x (R, I) · weight (O, I)ᵀ + bias (O) + residual (R, O).
pub fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    let [outputs, inputs] = weight.dims("linear", "a weight (O, I)")?;
    let rows = rows(x, inputs, y.count(), outputs);
    let weight = weight.cast(x.dtype())?;
    let product = Gemm::new("linear", Matrix::plain(x), Matrix::transposed(&weight), [rows, outputs, inputs]);
    product.row(bias).plus(residual).into(y.as_out("linear", false)?)
}

/// dx (R, I), dweight (O, I) and dbias (O) from dy (R, O).
pub fn backward(dy: &Tensor, x: &Tensor, weight: &Tensor, [dx, dweight, dbias]: [Option<Out<'_>>; 3]) -> Result<()> {
    let [outputs, inputs] = weight.dims("linear", "a weight (O, I)")?;
    let rows = rows(x, inputs, dy.count(), outputs);
    if let Some(dx) = dx {
        let weight = weight.cast(dy.dtype())?;
        Gemm::new("linear", Matrix::plain(dy), Matrix::plain(&weight), [rows, inputs, outputs]).into(dx)?;
    }
    if let Some(dweight) = dweight {
        if let Some(tall) = Tall::of([dy, x], [rows, outputs, inputs], &dweight, dbias.as_ref())? {
            return tall.gradients([dy, x], dweight, dbias);
        }
        Gemm::new("linear", Matrix::transposed(dy), Matrix::plain(x), [outputs, inputs, rows]).into(dweight)?;
    }
    dbias.map_or(Ok(()), |dbias| sum_rows(dy, [1, rows, outputs], dbias))
}

/// The number of rows R, from x (R, I) or from the `count` elements of y (R, O), as one of the two may have no columns.
fn rows(x: &Tensor, inputs: usize, count: usize, outputs: usize) -> usize {
    x.count().checked_div(inputs).or(count.checked_div(outputs)).unwrap_or(0)
}

/// Rows of a stage, the number of stages, and the part of a weight (outputs, inputs) that a warp has: as in `kernel.cu`.
const ROWS: usize = 48;
const STAGES: usize = 4;
const WARP: [usize; 2] = [64, 32];
/// The most warps for which a multiprocessor has registers, and so the largest tile of a weight that a block has.
const WARPS: usize = 16;
/// An H200's multiprocessors and the shared memory of each, less what a block takes besides. Constants, because the order
/// of summation depends on them.
const MULTIPROCESSORS: usize = 132;
const SHARED_MEMORY: usize = 228 << 10;
const RESERVED: usize = 1 << 10;
/// The fewest rows that are worth a block: a few times the stages.
const PIECE: usize = 256;

/// The warps of a tile.
fn warps([tall, wide]: [usize; 2]) -> usize {
    tall / WARP[0] * (wide / WARP[1])
}

/// How the kernel divides a weight and the rows of maps.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tall {
    rows: usize,
    outputs: usize,
    inputs: usize,
    /// Outputs and inputs of a block's tile.
    tile: [usize; 2],
    pieces: usize,
}

impl Tall {
    /// `None` if the kernels cannot take these operands, or if cuBLASLt is better at them.
    fn of(
        [dy, x]: [&Tensor; 2],
        extents: [usize; 3],
        dweight: &Out<'_>,
        dbias: Option<&Out<'_>>,
    ) -> Result<Option<Self>> {
        let (gpu, [rows, outputs, inputs]) = (dweight.gpu(), extents);
        // For each element that is read there are fewer than 96 multiply-adds, of the 150 that tensor cores do while it
        // is read: so it matters that everything is read just once. And there are so many rows that there are enough
        // pieces for all multiprocessors, with little to add up for each.
        let bound_by_memory = outputs * inputs <= 96 * (outputs + inputs) && rows >= 128 * (outputs + inputs);
        let usable = |map: &Tensor, channels: usize| -> Result<bool> {
            let whole_packs = channels > 0 && channels.is_multiple_of(8) && map.dtype() == DType::Bf16;
            let in_order = map.is_contiguous() && map.count() == rows * channels;
            Ok(whole_packs && in_order && map.address("linear", gpu)?.is_multiple_of(16))
        };
        let known = |out: &Out<'_>, count| out.count() == count && out.dtype() == dweight.dtype();
        let outs = dweight.dtype().of_sums() == DType::F32
            && known(dweight, outputs * inputs)
            && dbias.is_none_or(|dbias| known(dbias, outputs));
        if !(bound_by_memory && outs && usable(dy, outputs)? && usable(x, inputs)?) {
            return Ok(None);
        }
        let tall = Self::new(extents);
        Ok((tall.shared() <= gpu.driver().properties().shared_memory).then_some(tall))
    }

    /// The division for maps (R, O) and (R, I): R, O and I.
    fn new([rows, outputs, inputs]: [usize; 3]) -> Self {
        let [mut down, mut across] = [1, 1];
        let tile = loop {
            let tile = [(outputs, down, WARP[0]), (inputs, across, WARP[1])]
                .map(|(channels, parts, unit)| channels.div_ceil(parts).next_multiple_of(unit));
            match tile {
                _ if warps(tile) <= WARPS => break tile,
                [tall, wide] if tall > wide => down += 1,
                _ => across += 1,
            }
        };
        let whole = Self { rows, outputs, inputs, tile, pieces: 1 };
        let resident = (SHARED_MEMORY / (whole.shared() + RESERVED)).clamp(1, WARPS / warps(tile));
        let pieces = (MULTIPROCESSORS * resident / whole.tiles()).min(rows / PIECE).max(1);
        Self { pieces, ..whole }
    }

    fn tiles(&self) -> usize {
        let Self { outputs, inputs, tile: [tall, wide], .. } = *self;
        outputs.div_ceil(tall) * inputs.div_ceil(wide)
    }

    /// Bytes of the stages in shared memory, whose rows are a pack longer.
    fn shared(&self) -> usize {
        STAGES * ROWS * (self.tile[0] + self.tile[1] + 8) * DType::Bf16.size()
    }

    /// dweight (O, I) and dbias (O) from dy (R, O) and x (R, I).
    fn gradients(&self, [dy, x]: [&Tensor; 2], dweight: Out<'_>, dbias: Option<Out<'_>>) -> Result<()> {
        let Self { rows, outputs, inputs, tile, pieces } = *self;
        let weights = outputs * inputs;
        let columns = weights + dbias.as_ref().map_or(0, Out::count);
        let mut partial = Tensor::empty_on(&dy.device(), [pieces, columns], DType::F32)?;
        let launch = KERNELS.launch_on(dy, "linear_backward_weight")?.grid([self.tiles(), pieces, 1]);
        let launch =
            launch.threads(warps(tile) * 32).shared(self.shared()).input(dy)?.input(x)?.output(&mut partial)?;
        // SAFETY: the maps have so many rows, and each piece has a place for its sums.
        unsafe { launch.int(dbias.is_some().into()).count(rows).extents([outputs, inputs])?.extents(tile)?.run()? };
        let tiles = Tiles::new(pieces, columns, DType::F32);
        let launch = KERNELS.launch(dweight.gpu(), "linear_add_pieces<T>", dweight.dtype())?.blocks(tiles.strips);
        let launch = launch.input(&partial)?.out(Some(&dweight)).out(dbias.as_ref()).extents([weights])?;
        // SAFETY: the two have so many elements, of one type: see `of`.
        unsafe { tiles.describe(launch)?.run() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{array, uniform};
    use crate::check::device::tolerance;
    use autograd::gradcheck::relative_error;
    use standin::Standin;
    use tensor::Device;
    use tensor::cuda::Gpu;
    use tensor::cuda::nvidia::compiler::version;

    /// Tile and pieces of a weight (O, I) for so many rows.
    fn division(extents: [usize; 3]) -> ([usize; 2], usize) {
        let Tall { tile, pieces, .. } = Tall::new(extents);
        (tile, pieces)
    }

    #[test]
    fn a_weight_is_cut_into_tiles_that_a_block_can_hold() {
        assert_eq!(division([401_408, 192, 64]), ([192, 64], 264));
        assert_eq!(division([401_408, 64, 192]), ([64, 192], 264));
        assert_eq!(division([401_408, 64, 64]), ([64, 64], 528));
        assert_eq!(division([100_352, 384, 128]), ([192, 128], 66));
        assert_eq!(division([100_352, 128, 384]), ([128, 192], 66));
        assert_eq!(division([100_352, 128, 128]), ([128, 128], 264));
        assert_eq!(division([401_408, 288, 96]), ([320, 96], 132));
        assert_eq!(division([401_408, 96, 288]), ([128, 160], 66));
        assert_eq!(division([2100, 8, 8]), ([64, 32], 8));
        assert_eq!(division([1, 8, 8]), ([64, 32], 1));
    }

    /// The kernel's gradients, stored or added to ones, against those of a product and a sum.
    fn check([rows, outputs, inputs]: [usize; 3], dtype: DType, accumulate: bool) -> Result<()> {
        let Some(gpu) = Gpu::for_tests(3) else { return Ok(()) };
        let device = Device::Cuda(gpu);
        let map = |columns, stream| uniform([rows, columns], stream).cast(DType::Bf16)?.to_device(&device);
        let ones = |count| Tensor::full([count], 1.0f32).cast(dtype)?.to_device(&device);
        let (dy, x) = (map(outputs, 1)?, map(inputs, 2)?);
        let [mut dweight, mut expected] = [ones(outputs * inputs)?, ones(outputs * inputs)?];
        let [mut dbias, mut expected_bias] = [ones(outputs)?, ones(outputs)?];
        let product = Gemm::new("linear", Matrix::transposed(&dy), Matrix::plain(&x), [outputs, inputs, rows]);
        product.into(expected.as_out("linear", accumulate)?)?;
        sum_rows(&dy, [1, rows, outputs], expected_bias.as_out("linear", accumulate)?)?;
        let tall = Tall::new([rows, outputs, inputs]);
        let out = dweight.as_out("linear", accumulate)?;
        tall.gradients([&dy, &x], out, Some(dbias.as_out("linear", accumulate)?))?;
        for (got, expected) in [(&dweight, &expected), (&dbias, &expected_bias)] {
            let error = relative_error(&array(got).data, &array(expected).data);
            assert!(error < tolerance(dtype), "{rows} rows, {outputs}x{inputs}, {dtype}: {error}");
        }
        // The weight's gradient has the same bits if nobody wants the bias's.
        let mut alone = ones(outputs * inputs)?;
        tall.gradients([&dy, &x], alone.as_out("linear", accumulate)?, None)?;
        assert_eq!(array(&alone).data, array(&dweight).data);
        Ok(())
    }

    #[test]
    fn gradients_are_those_of_a_product_and_a_sum() {
        for extents in
            [[777, 192, 64], [512, 64, 192], [300, 384, 128], [100, 96, 288], [1000, 72, 40], [49, 8, 8], [1, 16, 24]]
        {
            check(extents, DType::F32, false).unwrap();
        }
        check([96, 64, 64], DType::F32, true).unwrap();
        check([600, 64, 64], DType::Bf16, true).unwrap();
    }

    #[test]
    fn in_ptx() {
        Standin::in_ptx(version()).into_iter().for_each(|standin| _ = standin.repeat(&["linear::cuda"], &[]));
    }
}
