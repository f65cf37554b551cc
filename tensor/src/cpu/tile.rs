//! Small matrix products whose operands already lie in the cache: the tiles of attention.
//!
//! `matrixmultiply` packs both operands on each call, which costs more than the product itself when the
//! inner extent is a head's 32 channels. Here nothing is packed: the result's rows stay in registers, B is read in
//! rows as it lies, and A element by element. Rows lie at equal distances or wherever a list says ([`Rows`]), so
//! that the tokens of scattered regions are multiplied without being gathered.

use super::parallel::Interleaved;
use super::registers::{Each, Registers, Vector};
use crate::{Float, unrolled};

/// Where the rows of a matrix start.
pub trait Rows: Copy {
    /// The place of a row's first element.
    fn start(self, row: usize) -> usize;
    /// A place at which or before which the first `count` rows start; none when it is beyond all memory. Panics when
    /// there are fewer rows.
    fn last_start(self, count: usize) -> Option<usize>;
}

/// Rows that lie so many elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Apart(pub usize);

/// The rows of a list, out of rows that lie some elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Listed<'a> {
    rows: &'a [u32],
    largest: u32,
    stride: usize,
}

impl<'a> Listed<'a> {
    /// These rows, out of rows that lie `stride` elements apart.
    #[inline(always)]
    pub fn new(rows: &'a [u32], stride: usize) -> Self {
        Self { rows, largest: rows.iter().fold(0, |largest, &row| largest.max(row)), stride }
    }

    /// The same rows of another matrix.
    #[inline(always)]
    pub fn apart(self, stride: usize) -> Self {
        Self { stride, ..self }
    }
}

impl Rows for Apart {
    #[inline(always)]
    fn start(self, row: usize) -> usize {
        row * self.0
    }
    #[inline(always)]
    fn last_start(self, count: usize) -> Option<usize> {
        (count.saturating_sub(1)).checked_mul(self.0)
    }
}

impl Rows for Listed<'_> {
    #[inline(always)]
    fn start(self, row: usize) -> usize {
        self.rows[row] as usize * self.stride
    }
    #[inline(always)]
    fn last_start(self, count: usize) -> Option<usize> {
        assert!(count <= self.rows.len(), "{count} rows of {}", self.rows.len());
        (self.largest as usize).checked_mul(self.stride)
    }
}

/// A matrix that is read element by element: (i, p) lies `p * col_stride` after the start of row i.
#[derive(Clone, Copy, Debug)]
pub struct Left<'a, T, R> {
    /// The elements.
    pub data: &'a [T],
    /// Where its rows start.
    pub rows: R,
    /// From one column to the next.
    pub col_stride: usize,
}

/// A matrix that is read in rows.
#[derive(Clone, Copy, Debug)]
pub struct Right<'a, T, R> {
    /// The elements.
    pub data: &'a [T],
    /// Where its rows start.
    pub rows: R,
}

/// A matrix that is written in rows.
#[derive(Clone, Copy)]
pub struct Target<'a, T, R> {
    /// The elements, of which other tasks may be writing others.
    pub data: Interleaved<'a, T>,
    /// The place from which the rows' starts are counted.
    pub offset: usize,
    /// Where its rows start.
    pub rows: R,
    /// Whether what is there is added to instead of overwritten.
    pub accumulate: bool,
}

/// The place of the last element of some rows, if a `usize` can say it: the unsafe code below relies on this not
/// wrapping around.
#[inline(always)]
pub(super) fn last(rows: impl Rows, [count, columns]: [usize; 2], col_stride: usize) -> Option<usize> {
    rows.last_start(count)?.checked_add((columns - 1).checked_mul(col_stride)?)
}

/// C (m×n) = A (m×k) · B (k×n), or C += A·B. Panics when an operand is too short for its extents.
///
/// # Safety
/// The machine must have the instruction set `A`, nobody else may use C's elements meanwhile, and C's rows may not
/// overlap.
#[inline(always)]
pub unsafe fn product<T: Float, A: Registers>(
    [m, k, n]: [usize; 3],
    a: Left<'_, T, impl Rows>,
    b: Right<'_, T, impl Rows>,
    c: Target<'_, T, impl Rows>,
) {
    if m == 0 || n == 0 {
        return;
    }
    let end_of_c = last(c.rows, [m, n], 1).and_then(|last| last.checked_add(c.offset));
    c.data.at(end_of_c.unwrap_or(usize::MAX)); // panics when it is out of bounds
    if k > 0 {
        let inside = |last: Option<usize>, len| last.is_some_and(|last| last < len);
        assert!(inside(last(a.rows, [m, k], a.col_stride), a.data.len()), "A of a {m}x{k}x{n} product");
        assert!(inside(last(b.rows, [k, n], 1), b.data.len()), "B of a {m}x{k}x{n} product");
    }
    A::run(
        // SAFETY: the extents lie inside the operands, as just checked; the rest is the caller's word.
        #[inline(always)]
        || unsafe { tiles::<T, A, _, _, _>([m, k, n], a, b, c) },
    );
}

/// # Safety
/// As of [`product`], and the operands must contain their extents.
#[inline(always)]
unsafe fn tiles<T: Float, A: Registers, AR: Rows, BR: Rows, CR: Rows>(
    [m, k, n]: [usize; 3],
    a: Left<'_, T, AR>,
    b: Right<'_, T, BR>,
    c: Target<'_, T, CR>,
) {
    let mut column = 0;
    macro_rules! tiles {
        ($vector:ty, $offsets:expr, [$($height:literal)*]) => {{
            let mut row = 0;
            $(while m - row >= $height {
                // SAFETY: the tile lies inside the extents; the rest is the caller's word.
                unsafe { small_tile::<T, $vector, AR, BR, CR, $height, _>(k, a, b, c, [row, column], $offsets) };
                row += $height;
            })*
        }};
    }
    let lanes = A::Vector::<T>::LANES;
    while column < n {
        let left = n - column;
        if left > lanes {
            // The second register may overlap the first; both then compute the same.
            let second = lanes.min(left - lanes);
            // 8·2 sums of 32 registers, or 4·2 of 16.
            if A::WIDE {
                tiles!(A::Vector<T>, [0, second], [8 4 1]);
            } else {
                tiles!(A::Vector<T>, [0, second], [4 1]);
            }
            column += lanes + second;
        } else if left == lanes {
            tiles!(A::Vector<T>, [0], [8 4 1]);
            column += lanes;
        } else if left >= A::Half::<T>::LANES {
            tiles!(A::Half<T>, [0], [4 1]);
            column += A::Half::<T>::LANES;
        } else {
            tiles!(Each<T, A, 1>, [0], [4 1]);
            column += 1;
        }
    }
}

/// One tile of C = A·B or C += A·B: HEIGHT rows by COUNT registers that lie at `offsets` from a column on.
///
/// # Safety
/// The operands must contain the tile, nobody else may use C's elements, and the machine must have the registers.
#[inline(always)]
unsafe fn small_tile<T: Float, V: Vector<T>, AR: Rows, BR: Rows, CR: Rows, const HEIGHT: usize, const COUNT: usize>(
    k: usize,
    a: Left<'_, T, AR>,
    b: Right<'_, T, BR>,
    c: Target<'_, T, CR>,
    [row, column]: [usize; 2],
    offsets: [usize; COUNT],
) {
    let mut a_rows = [a.data.as_ptr(); HEIGHT];
    // SAFETY: the caller vouches for the registers, and for a register's memory at each place, here and below.
    let zero = unsafe { V::zero() };
    let mut sums = [[zero; COUNT]; HEIGHT];
    unrolled!(i in 0..HEIGHT => {
        // SAFETY: as above.
        a_rows[i] = unsafe { a_rows[i].add(a.rows.start(row + i)) };
    });
    for p in 0..k {
        let b_start = b.rows.start(p) + column;
        let mut b_row = [zero; COUNT];
        unrolled!(j in 0..COUNT => {
            // SAFETY: as above.
            b_row[j] = unsafe { load(b.data.as_ptr().add(b_start + offsets[j])) };
        });
        unrolled!(i in 0..HEIGHT => {
            // SAFETY: as above.
            let a = unsafe { V::splat(*a_rows[i].add(p * a.col_stride)) };
            unrolled!(j in 0..COUNT => { sums[i][j] = a.mul_add(b_row[j], sums[i][j]); });
        });
    }
    unrolled!(i in 0..HEIGHT => {
        let c_row = c.data.at(c.offset + c.rows.start(row + i) + column);
        // All is read before anything is written: registers may overlap.
        if c.accumulate {
            unrolled!(j in 0..COUNT => {
                // SAFETY: as above.
                sums[i][j] = unsafe { load::<T, V>(c_row.add(offsets[j])) }.add(sums[i][j]);
            });
        }
        unrolled!(j in 0..COUNT => {
            // SAFETY: as above; nobody else uses these elements.
            sums[i][j].store(unsafe { std::slice::from_raw_parts_mut(c_row.add(offsets[j]), V::LANES) });
        });
    });
}

/// A register from memory.
///
/// # Safety
/// As of [`Vector::zero`], and there must be as many elements.
#[inline(always)]
pub(super) unsafe fn load<T: Float, V: Vector<T>>(from: *const T) -> V {
    // SAFETY: both by the caller's word.
    unsafe { V::load(std::slice::from_raw_parts(from, V::LANES)) }
}

/// What the sums of a tile start from, and whether they are added to C.
#[derive(Clone, Copy)]
pub(super) enum Begin<'a, T> {
    /// C = A·B
    Zero,
    /// C += A·B
    Kept,
    /// C = A·B + row, with the row's part for this tile's columns.
    Row(&'a [T]),
}

/// One tile of C = A·B, C += A·B or C = A·B + row, held in HEIGHT·COUNT registers. A is read element by element,
/// B and C in rows. Panics when B or the row is too short.
///
/// # Safety
/// `a` must reach HEIGHT rows of k columns, `c` HEIGHT rows of as many columns as COUNT registers hold, which
/// nobody else may use; and the machine must have the registers.
#[inline(always)]
pub(super) unsafe fn tile<T: Float, V: Vector<T>, const HEIGHT: usize, const COUNT: usize>(
    k: usize,
    (a, a_row, a_col): (*const T, usize, usize),
    (b, b_row): (&[T], usize),
    (c, c_row): (*mut T, usize),
    begin: Begin<'_, T>,
) {
    // SAFETY: the caller vouches for the registers.
    let mut sums = match begin {
        Begin::Row(row) => [std::array::from_fn(|j| unsafe { V::load(&row[j * V::LANES..]) }); HEIGHT],
        _ => unsafe { [[V::zero(); COUNT]; HEIGHT] },
    };
    for p in 0..k {
        let row = &b[p * b_row..];
        // SAFETY: the caller vouches for the registers.
        let b: [V; COUNT] = std::array::from_fn(|j| unsafe { V::load(&row[j * V::LANES..]) });
        unrolled!(i in 0..HEIGHT => {
            // SAFETY: element (i, p) of A exists, and the registers do.
            let a = unsafe { V::splat(*a.add(i * a_row + p * a_col)) };
            unrolled!(j in 0..COUNT => { sums[i][j] = a.mul_add(b[j], sums[i][j]); });
        });
    }
    unrolled!(i in 0..HEIGHT => {
        // SAFETY: row i of C has these columns, and nobody else uses them.
        let c = unsafe { std::slice::from_raw_parts_mut(c.add(i * c_row), COUNT * V::LANES) };
        unrolled!(j in 0..COUNT => {
            let c = &mut c[j * V::LANES..];
            // SAFETY: the caller vouches for the registers.
            let sum = if let Begin::Kept = begin { unsafe { V::load(c) }.add(sums[i][j]) } else { sums[i][j] };
            sum.store(c);
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::{Mat, gemm_on_this_thread};
    use crate::cpu::isa::{Isa, limit};
    use crate::cpu::parallel::Out;
    use crate::rng::Philox;
    use crate::simd;

    fn random(count: usize, stream: u64) -> Vec<f32> {
        (0..count as u64).map(|i| Philox::new(5, stream).uniform(i)).collect()
    }

    /// The rows of a matrix of `count` rows, each in another's place, and with one between each two.
    fn scattered(matrix: &[f32], count: usize, columns: usize) -> (Vec<f32>, Vec<u32>) {
        let rows: Vec<u32> = (0..count as u32).map(|row| (row * 7 + 3) % 101 * 2).collect();
        let mut apart = vec![f32::NAN; 202 * columns];
        for (row, &place) in rows.iter().enumerate() {
            apart[place as usize * columns..][..columns].copy_from_slice(&matrix[row * columns..][..columns]);
        }
        (apart, rows)
    }

    #[test]
    fn agrees_with_gemm_on_every_instruction_set() {
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            let _limited = limit(isa);
            for [m, k, n] in [[1, 1, 1], [8, 32, 64], [16, 0, 5], [9, 7, 51], [49, 64, 49], [3, 5, 33], [16, 64, 24]] {
                let (a, b, start) = (random(1 + m * k, 1), random(1 + k * n, 2), random(m * n, 3));
                let (b_apart, b_rows) = scattered(&b, k, n);
                let (c_apart, c_rows) = scattered(&start, m, n);
                for accumulate in [false, true] {
                    let (mut expected, mut c, mut c_apart) = (start.clone(), start.clone(), c_apart.clone());
                    let left = Mat::strided(&a, (m, k), (1, m));
                    gemm_on_this_thread(left, Mat::new(&b, k, n), Out { data: &mut expected, accumulate });
                    let left = Left { data: &a, rows: Apart(1), col_stride: m };
                    let right = Right { data: &b, rows: Apart(n) };
                    let target = Target { data: Interleaved::new(&mut c), offset: 0, rows: Apart(n), accumulate };
                    // SAFETY: `simd!` chooses what the machine has; C is this test's own.
                    simd!(A => unsafe { product::<f32, A>([m, k, n], left, right, target) });
                    for (got, want) in c.iter().zip(&expected) {
                        assert!((got - want).abs() <= 1e-5 * k as f32, "{isa:?} {m}x{k}x{n}: {got} is not {want}");
                    }
                    // Rows out of lists: the same bits, and nothing between them is touched.
                    let right = Right { data: &b_apart, rows: Listed::new(&b_rows, n) };
                    let rows = Listed::new(&c_rows, n);
                    let target = Target { data: Interleaved::new(&mut c_apart), offset: 0, rows, accumulate };
                    // SAFETY: as above.
                    simd!(A => unsafe { product::<f32, A>([m, k, n], left, right, target) });
                    let (expected, _) = scattered(&c, m, n);
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&c_apart), bits(&expected), "{isa:?} {m}x{k}x{n}");
                }
            }
        }
    }
}
