//! Tokens in groups of four.
//!
//! A head's operands are copied out of the map once and laid out region by region, in quads of four tokens; the last
//! quad of a region is padded with zeros. The tokens a, b, c, d are stored
//!
//! ```text
//! as rows:     a0 a1 a2 .. | b0 b1 b2 .. | c0 .. | d0 ..
//! as columns:  a0 b0 c0 d0 | a1 b1 c1 d1 | a2 ..
//! ```

use std::ops::Range;
use tensor::Float;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::Interleaved;
use tensor::cpu::registers::{Vector, fetch, load, store};

/// The tokens of a quad.
pub(super) const QUAD: usize = 4;

/// The pixels of some regions, or of a part of one.
#[derive(Clone, Copy)]
pub(super) struct Pixels<'a> {
    list: &'a [u32],
    /// How many of them each region has.
    region: usize,
    /// None of them is larger: that of the list which these are a part of.
    largest: u32,
}

impl<'a> Pixels<'a> {
    /// The pixels of some regions, `region` of each, one region's after the other's.
    pub fn new(list: &'a [u32], region: usize) -> Self {
        Self { list, region, largest: list.iter().fold(0, |largest, &pixel| largest.max(pixel)) }
    }

    /// Some of them, `region` of each region.
    pub fn part(self, pixels: Range<usize>, region: usize) -> Self {
        Self { list: &self.list[pixels], region, ..self }
    }

    /// The quads of all regions.
    pub fn quads(self) -> usize {
        self.list.len() / self.region * self.region.div_ceil(QUAD)
    }

    /// Each region's pixels with the place of its first token in the quads.
    #[inline(always)]
    pub fn regions(self) -> impl Iterator<Item = (usize, &'a [u32])> {
        (0..).step_by(self.region.next_multiple_of(QUAD)).zip(self.list.chunks_exact(self.region))
    }
}

/// Where one head's queries, keys, values or results lie in a map.
#[derive(Clone, Copy)]
pub(super) struct Channels {
    /// Where the first of them lies for the image's first pixel.
    pub first: usize,
    /// Elements from one pixel to the next.
    pub stride: usize,
    pub dim: usize,
}

impl Channels {
    /// Panics unless these channels of all pixels lie inside a map of `len` elements.
    fn assert_inside(self, pixels: Pixels<'_>, len: usize) {
        let start = (pixels.largest as usize).checked_mul(self.stride).and_then(|start| start.checked_add(self.first));
        let end = start.and_then(|start| start.checked_add(self.dim));
        assert!(end.is_some_and(|end| end <= len), "pixel {} of a map of {len} elements", pixels.largest);
    }

    /// Where those of one pixel begin.
    #[inline(always)]
    fn of(self, pixel: u32) -> usize {
        self.first + pixel as usize * self.stride
    }

    /// Prefetches some pixels' elements, which the next task will read.
    pub fn fetch<T>(self, map: &[T], pixels: Pixels<'_>) {
        for &pixel in pixels.list {
            fetch(&map[self.of(pixel)..][..self.dim]);
        }
    }

    /// Writes the quads of some pixels as rows of [`row_width`] elements.
    pub fn rows<T: Float, A: Arch>(self, map: &[T], pixels: Pixels<'_>, to: &mut [T]) {
        self.assert_inside(pixels, map.len());
        let width = row_width::<T, A>(self.dim);
        let to = &mut to[..pixels.quads() * QUAD * width];
        A::run(
            #[inline(always)]
            || {
                if !pixels.region.is_multiple_of(QUAD) {
                    to.fill(T::zero());
                }
                let (map, to) = (map.as_ptr(), to.as_mut_ptr());
                for (first, region) in pixels.regions() {
                    for (place, &pixel) in (first..).zip(region) {
                        let row = to.wrapping_add(place * width);
                        // SAFETY: both lie inside, as just checked; `A::run` makes sure of the instruction set.
                        unsafe { put_row::<T, A::Vector<T>, false>(map.add(self.of(pixel)), row, self.dim) };
                    }
                }
            },
        );
    }

    /// Writes the quads of some pixels as columns.
    pub fn columns<T: Float, A: Arch>(self, map: &[T], pixels: Pixels<'_>, to: &mut [T]) {
        self.lay_out::<T, A, false>(map, pixels, to, &mut []);
    }

    /// Writes them as columns and as rows, at hardly more cost than as columns.
    pub fn both<T: Float, A: Arch>(self, map: &[T], pixels: Pixels<'_>, columns: &mut [T], rows: &mut [T]) {
        self.lay_out::<T, A, true>(map, pixels, columns, rows);
    }

    fn lay_out<T: Float, A: Arch, const ROWS: bool>(
        self,
        map: &[T],
        pixels: Pixels<'_>,
        columns: &mut [T],
        rows: &mut [T],
    ) {
        self.assert_inside(pixels, map.len());
        let (size, width) = (QUAD * self.dim, row_width::<T, A>(self.dim));
        let columns = &mut columns[..pixels.quads() * size];
        let rows = &mut rows[..if ROWS { pixels.quads() * QUAD * width } else { 0 }];
        A::run(
            #[inline(always)]
            || {
                let (map, mut columns, mut rows) = (map.as_ptr(), columns.as_mut_ptr(), rows.as_mut_ptr());
                for region in pixels.list.chunks_exact(pixels.region) {
                    for quad in region.chunks(QUAD) {
                        // SAFETY: all of it lies inside, as just checked; `A::run` makes sure of the instruction set.
                        unsafe {
                            match *quad {
                                [a, b, c, d] if self.dim >= A::Vector::<T>::LANES => {
                                    let tokens = [a, b, c, d].map(|pixel| map.add(self.of(pixel)));
                                    lay_out_quad::<T, A::Vector<T>, ROWS>(tokens, self.dim, columns, rows, width);
                                }
                                _ => {
                                    let rows =
                                        std::slice::from_raw_parts_mut(rows, if ROWS { QUAD * width } else { 0 });
                                    let columns = std::slice::from_raw_parts_mut(columns, size);
                                    rows.fill(T::zero());
                                    columns.fill(T::zero());
                                    for (place, &pixel) in quad.iter().enumerate() {
                                        let token = std::slice::from_raw_parts(map.add(self.of(pixel)), self.dim);
                                        let places = columns.chunks_exact_mut(QUAD).zip(token);
                                        places.for_each(|(to, &element)| to[place] = element);
                                        if ROWS {
                                            rows[place * width..][..self.dim].copy_from_slice(token);
                                        }
                                    }
                                }
                            }
                        }
                        columns = columns.wrapping_add(size);
                        rows = rows.wrapping_add(if ROWS { QUAD * width } else { 0 });
                    }
                }
            },
        );
    }

    /// Writes the quads of some pixels, rows of [`row_width`] elements, to where they lie in a map, or adds them there.
    ///
    /// # Safety
    /// Nobody else may use the head's channels of these pixels.
    pub unsafe fn write<T: Float, A: Arch>(
        self,
        rows: &[T],
        pixels: Pixels<'_>,
        map: Interleaved<'_, T>,
        accumulate: bool,
    ) {
        self.assert_inside(pixels, map.len());
        let width = row_width::<T, A>(self.dim);
        let (rows, map) = (rows[..pixels.quads() * QUAD * width].as_ptr(), map.as_mut_ptr());
        macro_rules! put_rows {
            ($add:literal) => {
                for (first, region) in pixels.regions() {
                    for (place, &pixel) in (first..).zip(region) {
                        // SAFETY: both lie inside, as just checked, and nobody else uses them, guaranteed by the
                        // caller; `A::run` makes sure of the instruction set.
                        unsafe {
                            let (row, to) = (rows.add(place * width), map.add(self.of(pixel)));
                            put_row::<T, A::Vector<T>, $add>(row, to, self.dim);
                        }
                    }
                }
            };
        }
        A::run(
            #[inline(always)]
            || {
                if accumulate {
                    put_rows!(true);
                } else {
                    put_rows!(false);
                }
            },
        );
    }
}

/// Writes the columns of a quad whose `dim` channels fill at least one register, and its rows except for their padding:
/// nothing that is computed from the padding is ever read.
///
/// # Safety
/// The machine must have the register. There must be as many channels of each token, and room for the columns and, with
/// `ROWS`, for the rows of `width` elements.
#[inline(always)]
unsafe fn lay_out_quad<T: Float, V: Vector<T>, const ROWS: bool>(
    tokens: [*const T; QUAD],
    dim: usize,
    columns: *mut T,
    rows: *mut T,
    width: usize,
) {
    // The last registers may overlap those before them.
    for channel in (0..dim).step_by(V::LANES) {
        let channel = channel.min(dim - V::LANES);
        // SAFETY: guaranteed by the caller.
        let [a, b, c, d] = tokens.map(|token| unsafe { load::<T, V>(token.add(channel)) });
        if ROWS {
            // SAFETY: as above.
            unsafe {
                let row = rows.add(channel);
                store(a, row);
                store(b, row.add(width));
                store(c, row.add(2 * width));
                store(d, row.add(3 * width));
            }
        }
        let ([a, c], [b, d]) = (a.interleave(c), b.interleave(d));
        let ([first, second], [third, fourth]) = (a.interleave(b), c.interleave(d));
        // SAFETY: as above.
        unsafe {
            let to = columns.add(QUAD * channel);
            store(first, to);
            store(second, to.add(V::LANES));
            store(third, to.add(2 * V::LANES));
            store(fourth, to.add(3 * V::LANES));
        }
    }
}

/// Writes a row of `dim` elements to another place, or adds it there.
///
/// # Safety
/// The machine must have the register, and there must be as many elements in both places.
#[inline(always)]
unsafe fn put_row<T: Float, V: Vector<T>, const ADD: bool>(from: *const T, to: *mut T, dim: usize) {
    macro_rules! register {
        ($channel:expr) => {{
            let row = load::<T, V>(from.add($channel));
            if ADD { row.add(load(to.add($channel))) } else { row }
        }};
    }
    let Some(last) = dim.checked_sub(V::LANES) else {
        for channel in 0..dim {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let sum = if ADD { *to.add(channel) + *from.add(channel) } else { *from.add(channel) };
                *to.add(channel) = sum;
            }
        }
        return;
    };
    // The last register may overlap the one before it, so it is loaded before that one is stored.
    // SAFETY: guaranteed by the caller.
    unsafe {
        let end = register!(last);
        for channel in (0..last).step_by(V::LANES) {
            store(register!(channel), to.add(channel));
        }
        store(end, to.add(last));
    }
}

/// The width of a row of `dim` channels, padded to whole registers.
pub(super) fn row_width<T: Float, A: Arch>(dim: usize) -> usize {
    dim.next_multiple_of(A::Vector::<T>::LANES)
}
