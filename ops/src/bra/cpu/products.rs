//! The products of attention, quad by quad.
//!
//! Queries times keys: the scores of a quad of queries p, q, r, s with a quad of keys a, b, c, d form a *square* of 4 ×
//! 4 numbers, which fills one AVX-512 register, or several smaller ones:
//!
//! ```text
//! pa pb pc pd | qa qb qc qd | ra rb rc rd | sa sb sc sd
//! ```
//!
//! It is a sum over the channels. From each channel's columns (`quads.rs`), the queries' elements are replicated to
//! four lanes each, `p p p p | q q q q | ..`, and the keys' quad is repeated, `a b c d | a b c d | ..`. So no region is
//! too small to fill registers, no sum runs across lanes, and keys are transposed once instead of for each region that
//! attends to them.
//!
//! Weights times tokens: a tile of the result stays in registers; the weights are read element by element, the tokens
//! row by row.

use super::quads::QUAD;
use tensor::cpu::isa::Arch;
use tensor::cpu::registers::{Vector, load, store};
use tensor::{Float, unrolled};

/// The elements of a square: a quad of queries by a quad of keys.
pub(super) const SQUARE: usize = QUAD * QUAD;

/// The memory layout of scores, and of what is computed from them: one line of squares per quad of queries, with one
/// square per quad of keys that it attends to; the regions' lines follow one another.
///
/// ```text
/// queries 0 to 3 of a region:  | keys 0 to 3 | keys 4 to 7 | ..
/// queries 4 to 7:              | keys 0 to 3 | keys 4 to 7 | ..
/// ```
#[derive(Clone, Copy)]
pub(super) struct ScoreLayout {
    pub regions: usize,
    /// Quads of queries of a region.
    pub query_quads: usize,
    /// Quads of keys that a region attends to.
    pub key_quads: usize,
    /// Tokens of a region that is attended to, and its quads, of which the last may have fewer than four.
    pub region: [usize; 2],
}

impl ScoreLayout {
    /// How many elements there are.
    pub fn len(self) -> usize {
        self.quads() * self.key_quads * SQUARE
    }

    /// The quads of all regions' queries.
    pub fn quads(self) -> usize {
        self.regions * self.query_quads
    }

    /// How many registers the scores of all these queries with one quad of keys take.
    pub fn registers<T: Float, A: Arch>(self) -> usize {
        self.quads() * SQUARE / A::Vector::<T>::LANES
    }

    /// Where the `register`-th of them lies for the first quad of keys; those for the next quads of keys follow, one
    /// square apart.
    #[inline(always)]
    pub fn place<T: Float, A: Arch>(self, register: usize) -> usize {
        let element = register * A::Vector::<T>::LANES;
        element / SQUARE * self.key_quads * SQUARE + element % SQUARE
    }

    /// Each query times each key that its region attends to, over `dim` channels, from the columns of both.
    pub fn scores<T: Float, A: Arch>(self, dim: usize, queries: &[T], keys: Quads<'_, &[T]>, to: &mut [T]) {
        let size = dim * QUAD;
        assert!(queries.len() >= self.quads() * size && to.len() >= self.len(), "operands of scores");
        assert!(keys.quads.len() == self.regions * self.key_quads, "quads of keys");
        let operands = ColumnOperands { dim, queries: queries.as_ptr(), keys: keys.data.as_ptr(), to: to.as_mut_ptr() };
        let registers = self.registers::<T, A>() / self.regions.max(1);
        A::run(
            #[inline(always)]
            || {
                assert!(keys.all_inside(size), "quads of keys");
                // For each region, tiles of the largest size as long as they fit, then of the next smaller sizes.
                macro_rules! tiles {
                    ($($height:literal [$($width:literal)*])*) => {
                        for (region, quads) in keys.quads.chunks_exact(self.key_quads).enumerate() {
                            let (mut register, end) = (region * registers, (region + 1) * registers);
                            $(while end - register >= $height {
                                let mut key = 0;
                                $(while self.key_quads - key >= $width {
                                    // SAFETY: all of it lies inside the slices, as just checked; `A::run` makes sure
                                    // of the instruction set.
                                    unsafe { self.score_tile::<T, A, $height, $width>(operands, register, key, quads) };
                                    key += $width;
                                })*
                                register += $height;
                            })*
                        }
                    };
                }
                if A::MANY_REGISTERS {
                    // On Intel's processors, replicating queries competes with multiplying for execution units; loading
                    // keys does not.
                    tiles!(2 [8 4 1] 1 [8 4 1]);
                } else {
                    tiles!(2 [6 4 2 1] 1 [8 4 1]);
                }
            },
        );
    }

    /// HEIGHT registers of queries, from `register` on, by WIDTH of these quads of keys, from number `key` on.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`, and there must be `dim` channels of each operand and room for the
    /// scores, which nobody else may use.
    #[inline(always)]
    unsafe fn score_tile<T: Float, A: Arch, const HEIGHT: usize, const WIDTH: usize>(
        self,
        ColumnOperands { dim, queries, keys, to }: ColumnOperands<T>,
        register: usize,
        key: usize,
        quads: &[u32],
    ) {
        let (lanes, size) = (A::Vector::<T>::LANES, dim * QUAD);
        let (mut queries, mut keys, mut to) = ([queries; HEIGHT], [keys; WIDTH], [to; HEIGHT]);
        unrolled!(i in 0..HEIGHT => {
            let element = (register + i) * lanes;
            queries[i] = queries[i].wrapping_add(element / SQUARE * size + element % SQUARE / QUAD);
            to[i] = to[i].wrapping_add(self.place::<T, A>(register + i) + key * SQUARE);
        });
        unrolled!(j in 0..WIDTH => { keys[j] = keys[j].wrapping_add(quads[key + j] as usize * size); });
        // SAFETY: the caller vouches for the register and for all places, here and below.
        let zero = unsafe { A::Vector::<T>::zero() };
        let mut sums = [[zero; WIDTH]; HEIGHT];
        for channel in 0..dim {
            let mut query = [zero; HEIGHT];
            unrolled!(i in 0..HEIGHT => {
                // SAFETY: as above.
                query[i] = unsafe {
                    A::Vector::spread(std::slice::from_raw_parts(queries[i].add(channel * QUAD), lanes / QUAD))
                };
            });
            unrolled!(j in 0..WIDTH => {
                // SAFETY: as above.
                let key = unsafe {
                    A::Vector::load_quads(std::slice::from_raw_parts(keys[j].add(channel * QUAD), QUAD))
                };
                unrolled!(i in 0..HEIGHT => { sums[i][j] = key.mul_add(query[i], sums[i][j]); });
            });
        }
        unrolled!(i in 0..HEIGHT => {
            unrolled!(j in 0..WIDTH => {
                // SAFETY: as above.
                unsafe { store(sums[i][j], to[i].add(j * SQUARE)) };
            });
        });
    }

    /// These weights as a matrix (queries, keys).
    pub fn by_query<T>(self, weights: &[T]) -> Weights<'_, T, QUAD, 1> {
        let extents = [self.regions, self.query_quads, self.key_quads];
        Weights { data: weights, row_quad: self.key_quads * SQUARE, column_quad: SQUARE, extents }
    }

    /// The same as a matrix (keys, queries).
    pub fn by_key<T>(self, weights: &[T]) -> Weights<'_, T, 1, QUAD> {
        let extents = [self.regions, self.key_quads, self.query_quads];
        Weights { data: weights, row_quad: SQUARE, column_quad: self.key_quads * SQUARE, extents }
    }
}

/// Columns of queries and of keys, of `dim` channels, and where their scores go.
#[derive(Clone, Copy)]
struct ColumnOperands<T> {
    dim: usize,
    queries: *const T,
    keys: *const T,
    to: *mut T,
}

/// Each region's scores read as a matrix: in a square, rows lie ROW elements apart and columns COLUMN.
///
/// ```text
/// a square in memory:   pa pb pc pd qa qb qc qd ra rb rc rd sa sb sc sd
///
/// by query, ROW = 4, COLUMN = 1:        by key, ROW = 1, COLUMN = 4:
///     pa pb pc pd                           pa qa ra sa
///     qa qb qc qd                           pb qb rb sb
///     ..                                    ..
/// ```
#[derive(Clone, Copy)]
pub(super) struct Weights<'a, T, const ROW: usize, const COLUMN: usize> {
    data: &'a [T],
    /// From one quad of rows, or of columns, to the next.
    row_quad: usize,
    column_quad: usize,
    /// Regions, and each one's quads of rows and of columns.
    extents: [usize; 3],
}

/// Tokens in quads, and the list of the quads to use.
pub(super) struct Quads<'a, D> {
    pub data: D,
    pub quads: &'a [u32],
}

impl<T, D: std::ops::Deref<Target = [T]>> Quads<'_, D> {
    /// Whether all of these quads, of `size` elements each, lie within the data.
    #[inline(always)]
    fn all_inside(&self, size: usize) -> bool {
        let largest = self.quads.iter().fold(0, |largest, &quad| largest.max(quad));
        self.quads.is_empty() || (largest as usize + 1) * size <= self.data.len()
    }
}

impl<T: Float, const ROW: usize, const COLUMN: usize> Weights<'_, T, ROW, COLUMN> {
    /// Multiplies each region's weights by rows of `width` elements, which fill whole registers: result (+)=
    /// weights·rows.
    pub fn times<A: Arch>(self, width: usize, rows: Quads<'_, &[T]>, to: Quads<'_, &mut [T]>, accumulate: bool) {
        let (lanes, size) = (A::Vector::<T>::LANES, width * QUAD);
        let [regions, height, depth] = self.extents;
        let fits = [to.quads.len(), rows.quads.len()] == [regions * height, regions * depth];
        assert!(fits && self.data.len() >= regions * height * depth * SQUARE, "weights of tokens");
        assert!(width.is_multiple_of(lanes), "whole registers");
        let (target, from) = (to.data.as_mut_ptr(), rows.data.as_ptr());
        A::run(
            #[inline(always)]
            || {
                assert!(rows.all_inside(size) && to.all_inside(size), "quads of tokens");
                for region in 0..regions {
                    let operands = RowOperands {
                        weights: self.data[region * height * depth * SQUARE..].as_ptr(),
                        from,
                        from_quads: &rows.quads[region * depth..][..depth],
                        to: target,
                        to_quads: &to.quads[region * height..][..height],
                        width,
                    };
                    let mut quad = 0;
                    macro_rules! tiles {
                        ($quads:literal by [$($count:literal)*]) => {
                            while height - quad >= $quads {
                                let mut column = 0;
                                $(while width - column >= $count * lanes {
                                    // SAFETY: all of it lies inside the slices, as just checked; `A::run` makes sure
                                    // of the instruction set.
                                    unsafe {
                                        self.tile::<A::Vector<T>, { $quads * QUAD }, $count>(
                                            operands, quad, column, accumulate,
                                        )
                                    };
                                    column += $count * lanes;
                                })*
                                quad += $quads;
                            }
                        };
                    }
                    if A::MANY_REGISTERS {
                        tiles!(2 by [2 1]);
                    }
                    tiles!(1 by [2 1]);
                }
            },
        );
    }

    /// HEIGHT rows of the result, from the quad number `quad` on, by COUNT registers of columns, from `column` on.
    ///
    /// # Safety
    /// The machine must have the register; there must be weights for these rows, and as many elements from `column` on
    /// in each row of the operands, and of the result, which nobody else may use.
    #[inline(always)]
    unsafe fn tile<V: Vector<T>, const HEIGHT: usize, const COUNT: usize>(
        self,
        RowOperands { weights, from, from_quads, to, to_quads, width }: RowOperands<'_, T>,
        quad: usize,
        column: usize,
        accumulate: bool,
    ) {
        let size = width * QUAD;
        let (weights, from) = (weights.wrapping_add(quad * self.row_quad), from.wrapping_add(column));
        let mut to = [to.wrapping_add(column); HEIGHT];
        unrolled!(row in 0..HEIGHT => {
            to[row] = to[row].wrapping_add(to_quads[quad + row / QUAD] as usize * size + row % QUAD * width);
        });
        // SAFETY: the caller vouches for the register and for all places, here and below.
        let zero = unsafe { V::zero() };
        let mut sums = [[zero; COUNT]; HEIGHT];
        if accumulate {
            unrolled!(i in 0..HEIGHT => { unrolled!(j in 0..COUNT => {
                // SAFETY: as above.
                sums[i][j] = unsafe { load(to[i].add(j * V::LANES)) };
            }); });
        }
        for (place, &from_quad) in from_quads.iter().enumerate() {
            let mut weights = weights.wrapping_add(place * self.column_quad);
            let mut from = from.wrapping_add(from_quad as usize * size);
            for _ in 0..QUAD {
                let mut row = [zero; COUNT];
                unrolled!(j in 0..COUNT => {
                    // SAFETY: as above.
                    row[j] = unsafe { load(from.add(j * V::LANES)) };
                });
                unrolled!(i in 0..HEIGHT => {
                    // SAFETY: as above.
                    let weight = unsafe { V::splat(*weights.add(i / QUAD * self.row_quad + i % QUAD * ROW)) };
                    unrolled!(j in 0..COUNT => { sums[i][j] = weight.mul_add(row[j], sums[i][j]); });
                });
                (weights, from) = (weights.wrapping_add(COLUMN), from.wrapping_add(width));
            }
        }
        unrolled!(i in 0..HEIGHT => { unrolled!(j in 0..COUNT => {
            // SAFETY: as above.
            unsafe { store(sums[i][j], to[i].wrapping_add(j * V::LANES)) };
        }); });
    }
}

/// One region's operands of a product with weights: rows of `width` elements, in quads, and where the result's lie.
#[derive(Clone, Copy)]
struct RowOperands<'a, T> {
    weights: *const T,
    from: *const T,
    from_quads: &'a [u32],
    to: *mut T,
    to_quads: &'a [u32],
    width: usize,
}
