//! Gradients of weights and biases from maps with many more rows than columns: see `tall.cuh`.

use tensor::cuda::{Launch, MULTIPROCESSORS, Out, at_most};
use tensor::{DType, Result, Tensor};

/// The header of kernels for such products.
pub const HEADER: (&str, &str) = ("tall.cuh", include_str!("tall.cuh"));

/// Rows of a stage, the number of stages, and the part of a weight (outputs, inputs) that a warp has: as in `tall.cuh`.
const ROWS: usize = 48;
const STAGES: usize = 4;
const WARP: [usize; 2] = [64, 32];
/// The most warps for which a multiprocessor has registers, and so the largest tile of a weight that a block has.
const WARPS: usize = 16;
/// The shared memory of an H200's multiprocessor, and what a block takes of it besides its own. Constants, because the
/// order of summation depends on them.
const SHARED_MEMORY: usize = 228 << 10;
const RESERVED: usize = 1 << 10;
/// The fewest rows that are worth a block: a few times the stages.
const PIECE: usize = 256;

/// The warps of a tile.
fn warps([tall, wide]: [usize; 2]) -> usize {
    tall / WARP[0] * (wide / WARP[1])
}

/// How a kernel divides a weight and the rows of maps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tall {
    rows: usize,
    outputs: usize,
    inputs: usize,
    /// Outputs and inputs of a block's tile.
    tile: [usize; 2],
    pieces: usize,
}

impl Tall {
    /// For maps (R, O) and (R, I), whose extents are R, O and I. `None` unless there are at most `intensity`
    /// multiply-adds for each element that is read, and so many rows that they make enough pieces for all
    /// multiprocessors, with far fewer partial sums than elements; or if kernels cannot take such extents or results.
    pub fn of(extents: [usize; 3], intensity: usize, dweight: &Out<'_>, dbias: Option<&Out<'_>>) -> Option<Self> {
        let [rows, outputs, inputs] = extents;
        let pays = outputs * inputs <= intensity * (outputs + inputs) && rows >= 128 * (outputs + inputs);
        let whole_packs = [outputs, inputs].iter().all(|&columns| columns > 0 && columns.is_multiple_of(8));
        let fit = |out: &Out<'_>, count| out.count() == count && out.dtype() == dweight.dtype();
        let wide = dweight.dtype().of_sums() == DType::F32;
        let results = wide && fit(dweight, outputs * inputs) && dbias.is_none_or(|dbias| fit(dbias, outputs));
        let most = dweight.gpu().properties().shared_memory;
        (pays && whole_packs && results).then(|| Self::new(extents)).filter(|tall| tall.shared() <= most)
    }

    /// The division for maps (R, O) and (R, I): R, O and I.
    pub fn new([rows, outputs, inputs]: [usize; 3]) -> Self {
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
        let pieces = (at_most(MULTIPROCESSORS * resident) / whole.tiles()).min(rows / PIECE).max(1);
        Self { pieces, ..whole }
    }

    /// How many tiles the weight has.
    fn tiles(&self) -> usize {
        let Self { outputs, inputs, tile: [tall, wide], .. } = *self;
        outputs.div_ceil(tall) * inputs.div_ceil(wide)
    }

    /// Bytes of the stages in shared memory, whose rows are a pack longer.
    fn shared(&self) -> usize {
        STAGES * ROWS * (self.tile[0] + self.tile[1] + 8) * DType::Bf16.size()
    }

    /// Room for the partial sums of each piece, those of the bias last.
    pub fn partial(&self, dy: &Tensor, biased: bool) -> Result<Tensor> {
        let bias = if biased { self.outputs } else { 0 };
        Tensor::empty_on(&dy.device(), [self.pieces, self.outputs * self.inputs + bias], DType::F32)
    }

    /// The blocks of a kernel, and R, O, I and the tile as its next arguments.
    pub fn describe<'a>(&self, launch: Launch<'a>) -> Result<Launch<'a>> {
        let launch = launch.grid([self.tiles(), self.pieces, 1]).threads(warps(self.tile) * 32).shared(self.shared());
        launch.count(self.rows).extents([self.outputs, self.inputs])?.extents(self.tile)
    }
}

/// Whether a map of so many elements is one that kernels can copy in packs.
pub fn in_packs(map: &Tensor, count: usize) -> Result<bool> {
    let usable = map.dtype() == DType::Bf16 && map.is_contiguous() && map.count() == count;
    Ok(usable && map.address("linear", map.gpu("linear")?)?.is_multiple_of(16))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{array, uniform};
    use crate::check::device::tolerance;
    use crate::linear::cuda::multiply;
    use autograd::gradcheck::relative_error;
    use standin::Standin;
    use tensor::Device;
    use tensor::cuda::elements::sum_rows;
    use tensor::cuda::nvidia::compiler::version;
    use tensor::cuda::{Gemm, Gpu, Matrix};

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
        let (out, out_bias) = (dweight.as_out("linear", accumulate)?, dbias.as_out("linear", accumulate)?);
        multiply(&tall, [&dy, &x], out, Some(out_bias))?;
        for (got, expected) in [(&dweight, &expected), (&dbias, &expected_bias)] {
            let error = relative_error(&array(got).data, &array(expected).data);
            assert!(error < tolerance(dtype), "{rows} rows, {outputs}x{inputs}, {dtype}: {error}");
        }
        // The weight's gradient has the same bits if nobody wants the bias's.
        let mut alone = ones(outputs * inputs)?;
        multiply(&tall, [&dy, &x], alone.as_out("linear", accumulate)?, None)?;
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
        Standin::in_ptx(version()).into_iter().for_each(|standin| _ = standin.repeat(&["linear::tall"], &[]));
    }
}
