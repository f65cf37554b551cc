//! The products of attention, quad by quad.
//!
//! Of queries and keys: a register holds the scores of a quad of queries with a quad of keys, 4 × 4, or a part of
//! them: `pa pb pc pd | qa qb qc qd | ra .. | sa ..`, of the queries p, q, r, s and the keys a, b, c, d. Of the columns of both, the queries' elements are spread to four places each and the keys' are read over and
//! over. So no region is too small to fill registers, no sum goes across them, and keys are transposed once and not
//! for each region that attends to them.
//!
//! Of weights and tokens: a tile of the result stays in registers, the weights are read element by element, the
//! tokens in rows.

use super::quads::QUAD;
use tensor::cpu::registers::{Registers, Vector, load};
use tensor::{Float, unrolled};

/// The elements of a block: a quad of queries by a quad of keys.
pub(super) const BLOCK: usize = QUAD * QUAD;

/// Blocks of scores, or of what was made of them: for each region's quads of queries one after the other those of all
/// quads of keys, each with the keys side by side.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    pub regions: usize,
    /// Quads of queries of a region.
    pub queries: usize,
    /// Quads of keys that a region attends to.
    pub keys: usize,
}

impl Blocks {
    /// How many elements they have.
    pub fn len(self) -> usize {
        self.quads() * self.keys * BLOCK
    }

    /// The quads of all regions' queries.
    pub fn quads(self) -> usize {
        self.regions * self.queries
    }

    /// How many registers the scores of all these queries with one quad of keys take.
    pub fn registers<T: Float, A: Registers>(self) -> usize {
        self.quads() * BLOCK / A::Vector::<T>::LANES
    }

    /// Where the first of these registers lies; the next quads of keys follow, a block apart.
    #[inline(always)]
    pub fn place<T: Float, A: Registers>(self, register: usize) -> usize {
        let element = register * A::Vector::<T>::LANES;
        element / BLOCK * self.keys * BLOCK + element % BLOCK
    }

    /// Each query times each key that its region attends to, over `dim` channels, from the columns of both.
    pub fn scores<T: Float, A: Registers>(self, dim: usize, queries: &[T], keys: Quads<'_, &[T]>, to: &mut [T]) {
        let (size, columns) = (dim * QUAD, keys.data.as_ptr());
        assert!(queries.len() >= self.quads() * size && to.len() >= self.len(), "operands of scores");
        assert!(keys.quads.len() == self.regions * self.keys, "quads of keys");
        assert!(keys.all_inside(size), "quads of keys");
        let (queries, to) = (queries.as_ptr(), to.as_mut_ptr());
        let registers = self.registers::<T, A>() / self.regions.max(1);
        A::run(
            #[inline(always)]
            || {
                macro_rules! tiles {
                    ($($height:literal [$($width:literal)*])*) => {
                        for (region, quads) in keys.quads.chunks_exact(self.keys).enumerate() {
                            let (mut register, end) = (region * registers, (region + 1) * registers);
                            $(while end - register >= $height {
                                let mut key = 0;
                                $(while self.keys - key >= $width {
                                    let (mut rows, mut places) = ([queries; $height], [to; $height]);
                                    unrolled!(i in 0..$height => {
                                        let element = (register + i) * A::Vector::<T>::LANES;
                                        rows[i] = rows[i].wrapping_add(element / BLOCK * size + element % BLOCK / QUAD);
                                        let start = self.place::<T, A>(register + i) + key * BLOCK;
                                        places[i] = places[i].wrapping_add(start);
                                    });
                                    let mut columns = [columns; $width];
                                    unrolled!(j in 0..$width => {
                                        columns[j] = columns[j].wrapping_add(quads[key + j] as usize * size);
                                    });
                                    // SAFETY: all of it lies inside the slices, as just checked; `A::run` makes sure
                                    // of the instruction set.
                                    unsafe {
                                        score_tile::<T, A::Vector<T>, $height, $width>(dim, rows, columns, places)
                                    };
                                    key += $width;
                                })*
                                register += $height;
                            })*
                        }
                    };
                }
                if A::WIDE {
                    // Spreading queries takes turns with multiplying on Intel's processors, reading keys does not.
                    tiles!(2 [8 4 1] 1 [8 4 1]);
                } else {
                    tiles!(2 [4 1] 1 [4 1]);
                }
            },
        );
    }

    /// These weights as a matrix (queries, keys).
    pub fn by_query<T>(self, weights: &[T]) -> Weights<'_, T, QUAD, 1> {
        let extents = [self.regions, self.queries, self.keys];
        Weights { data: weights, row_quad: self.keys * BLOCK, column_quad: BLOCK, extents }
    }

    /// The same as a matrix (keys, queries).
    pub fn by_key<T>(self, weights: &[T]) -> Weights<'_, T, 1, QUAD> {
        let extents = [self.regions, self.keys, self.queries];
        Weights { data: weights, row_quad: BLOCK, column_quad: self.keys * BLOCK, extents }
    }
}

/// HEIGHT registers of queries by WIDTH quads of keys.
///
/// # Safety
/// The machine must have the register, and there must be `dim` channels of each operand and a register at each place
/// of the result, which nobody else may use.
#[inline(always)]
unsafe fn score_tile<T: Float, V: Vector<T>, const HEIGHT: usize, const WIDTH: usize>(
    dim: usize,
    queries: [*const T; HEIGHT],
    keys: [*const T; WIDTH],
    to: [*mut T; HEIGHT],
) {
    // SAFETY: the caller vouches for the register and for all places, here and below.
    let zero = unsafe { V::zero() };
    let mut sums = [[zero; WIDTH]; HEIGHT];
    for channel in 0..dim {
        let mut query = [zero; HEIGHT];
        unrolled!(i in 0..HEIGHT => {
            // SAFETY: as above.
            query[i] = unsafe { V::spread(std::slice::from_raw_parts(queries[i].add(channel * QUAD), V::LANES / QUAD)) };
        });
        unrolled!(j in 0..WIDTH => {
            // SAFETY: as above.
            let key = unsafe { V::load_quads(std::slice::from_raw_parts(keys[j].add(channel * QUAD), QUAD)) };
            unrolled!(i in 0..HEIGHT => { sums[i][j] = key.mul_add(query[i], sums[i][j]); });
        });
    }
    unrolled!(i in 0..HEIGHT => {
        unrolled!(j in 0..WIDTH => {
            // SAFETY: as above.
            sums[i][j].store(unsafe { std::slice::from_raw_parts_mut(to[i].add(j * BLOCK), V::LANES) });
        });
    });
}

/// Each region's blocks read as a matrix: in a block, rows lie ROW elements apart and columns COLUMN.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a, T, const ROW: usize, const COLUMN: usize> {
    data: &'a [T],
    /// From one quad of rows, or of columns, to the next.
    row_quad: usize,
    column_quad: usize,
    /// Regions, and each one's quads of rows and of columns.
    extents: [usize; 3],
}

/// Tokens in quads, and which quads are meant.
pub(super) struct Quads<'a, D> {
    pub data: D,
    pub quads: &'a [u32],
}

impl<T, D: std::ops::Deref<Target = [T]>> Quads<'_, D> {
    /// Whether the data have all of these quads, of so many elements each.
    fn all_inside(&self, size: usize) -> bool {
        let largest = self.quads.iter().fold(0, |largest, &quad| largest.max(quad));
        self.quads.is_empty() || (largest as usize + 1) * size <= self.data.len()
    }
}

impl<T: Float, const ROW: usize, const COLUMN: usize> Weights<'_, T, ROW, COLUMN> {
    /// Each region's weights times rows of `width` elements, whole registers: result (+)= weights·rows.
    pub fn times<A: Registers>(self, width: usize, rows: Quads<'_, &[T]>, to: Quads<'_, &mut [T]>, accumulate: bool) {
        let (lanes, size) = (A::Vector::<T>::LANES, width * QUAD);
        assert!(rows.all_inside(size) && to.all_inside(size), "quads of tokens");
        let [regions, height, depth] = self.extents;
        let fits = [to.quads.len(), rows.quads.len()] == [regions * height, regions * depth];
        assert!(fits && self.data.len() >= regions * height * depth * BLOCK, "weights of tokens");
        assert!(width.is_multiple_of(lanes), "whole registers");
        let (target, from) = (to.data.as_mut_ptr(), rows.data.as_ptr());
        A::run(
            #[inline(always)]
            || {
                for region in 0..regions {
                    let weights = self.data[region * height * depth * BLOCK..].as_ptr();
                    let (to, steps) = (&to.quads[region * height..][..height], &rows.quads[region * depth..][..depth]);
                    let mut quad = 0;
                    macro_rules! tiles {
                        ($quads:literal by [$($count:literal)*]) => {
                            while height - quad >= $quads {
                                let mut column = 0;
                                $(while width - column >= $count * lanes {
                                    let mut places = [target.wrapping_add(column); $quads * QUAD];
                                    unrolled!(row in 0..$quads * QUAD => {
                                        let start = to[quad + row / QUAD] as usize * size + row % QUAD * width;
                                        places[row] = places[row].wrapping_add(start);
                                    });
                                    let weights = weights.wrapping_add(quad * self.row_quad);
                                    let rows = (from.wrapping_add(column), steps, width);
                                    // SAFETY: all of it lies inside the slices, as just checked; `A::run` makes sure
                                    // of the instruction set.
                                    unsafe {
                                        self.tile::<A::Vector<T>, { $quads * QUAD }, $count>(
                                            weights, rows, places, accumulate,
                                        )
                                    };
                                    column += $count * lanes;
                                })*
                                quad += $quads;
                            }
                        };
                    }
                    if A::WIDE {
                        tiles!(2 by [2 1]);
                    }
                    tiles!(1 by [2 1]);
                }
            },
        );
    }

    /// HEIGHT rows by COUNT registers of columns.
    ///
    /// # Safety
    /// The machine must have the register; the weights must contain the rows, and there must be as many elements in
    /// the quads of `rows` and in each row of the result, which nobody else may use.
    #[inline(always)]
    unsafe fn tile<V: Vector<T>, const HEIGHT: usize, const COUNT: usize>(
        self,
        weights: *const T,
        (rows, quads, width): (*const T, &[u32], usize),
        to: [*mut T; HEIGHT],
        accumulate: bool,
    ) {
        // SAFETY: the caller vouches for the register and for all places, here and below.
        let zero = unsafe { V::zero() };
        let mut sums = [[zero; COUNT]; HEIGHT];
        if accumulate {
            unrolled!(i in 0..HEIGHT => { unrolled!(j in 0..COUNT => {
                // SAFETY: as above.
                sums[i][j] = unsafe { load(to[i].add(j * V::LANES)) };
            }); });
        }
        for (place, &quad) in quads.iter().enumerate() {
            let mut weights = weights.wrapping_add(place * self.column_quad);
            let mut rows = rows.wrapping_add(quad as usize * width * QUAD);
            for _ in 0..QUAD {
                let mut row = [zero; COUNT];
                unrolled!(j in 0..COUNT => {
                    // SAFETY: as above.
                    row[j] = unsafe { load(rows.add(j * V::LANES)) };
                });
                unrolled!(i in 0..HEIGHT => {
                    // SAFETY: as above.
                    let weight = unsafe { V::splat(*weights.add(i / QUAD * self.row_quad + i % QUAD * ROW)) };
                    unrolled!(j in 0..COUNT => { sums[i][j] = weight.mul_add(row[j], sums[i][j]); });
                });
                (weights, rows) = (weights.wrapping_add(COLUMN), rows.wrapping_add(width));
            }
        }
        unrolled!(i in 0..HEIGHT => { unrolled!(j in 0..COUNT => {
            let to = to[i].wrapping_add(j * V::LANES);
            // SAFETY: as above.
            sums[i][j].store(unsafe { std::slice::from_raw_parts_mut(to, V::LANES) });
        }); });
    }
}
