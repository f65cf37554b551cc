//! Tokens in fours.
//!
//! A head's operands are taken out of the map once and laid out region by region, in quads: four tokens of a region,
//! the last quad of a region filled up with zeros. Of the tokens a, b, c, d
//!
//! ```text
//! as rows:     a0 a1 a2 .. | b0 b1 b2 .. | c0 .. | d0 ..
//! as columns:  a0 b0 c0 d0 | a1 b1 c1 d1 | a2 ..
//! ```

use tensor::Float;
use tensor::cpu::parallel::{Interleaved, put};
use tensor::cpu::registers::{Registers, Vector, copy_run, fetch};

/// The tokens of a quad.
pub(super) const QUAD: usize = 4;

/// The pixels of some regions, or of a part of one.
#[derive(Clone, Copy)]
pub(super) struct Pixels<'a> {
    pub list: &'a [u32],
    /// How many of them each region has.
    pub region: usize,
}

impl<'a> Pixels<'a> {
    /// The quads of all regions.
    pub fn quads(self) -> usize {
        self.list.len() / self.region * self.region.div_ceil(QUAD)
    }

    /// Each pixel with its token's place in the quads.
    #[inline(always)]
    pub fn places(self) -> impl Iterator<Item = (usize, usize)> + 'a {
        let next = self.region.next_multiple_of(QUAD);
        let regions = self.list.chunks_exact(self.region).zip((0..).step_by(next));
        regions.flat_map(|(pixels, first)| (first..).zip(pixels.iter().map(|&pixel| pixel as usize)))
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
    /// Panics unless all of these pixels' lie inside a map of `len` elements.
    fn expect_inside(self, pixels: Pixels<'_>, len: usize) {
        let largest = pixels.list.iter().fold(0, |largest, &pixel| largest.max(pixel));
        let start = (largest as usize).checked_mul(self.stride).and_then(|start| start.checked_add(self.first));
        let end = start.and_then(|start| start.checked_add(self.dim));
        assert!(end.is_some_and(|end| end <= len), "pixel {largest} of a map of {len} elements");
    }

    /// Those of one pixel.
    ///
    /// # Safety
    /// They must lie inside the map.
    #[inline(always)]
    unsafe fn of<T>(self, map: &[T], pixel: usize) -> &[T] {
        // SAFETY: by the caller's word.
        unsafe { map.get_unchecked(self.first + pixel * self.stride..).get_unchecked(..self.dim) }
    }

    /// Has the cache fetch some pixels' elements, which the next task will read.
    pub fn fetch<T>(self, map: &[T], pixels: Pixels<'_>) {
        for &pixel in pixels.list {
            let start = self.first + pixel as usize * self.stride;
            fetch(&map[start..start + self.dim]);
        }
    }

    /// Writes the quads of some pixels as rows of [`row_width`] elements.
    pub fn rows<T: Float, A: Registers>(self, map: &[T], pixels: Pixels<'_>, to: &mut [T]) {
        self.expect_inside(pixels, map.len());
        let width = row_width::<T, A>(self.dim);
        let to = &mut to[..pixels.quads() * QUAD * width];
        A::run(
            #[inline(always)]
            || {
                if !pixels.region.is_multiple_of(QUAD) {
                    to.fill(T::zero());
                }
                for (place, pixel) in pixels.places() {
                    let row = &mut to[place * width..][..width];
                    // SAFETY: inside, as just checked; `A::run` makes sure of the instruction set.
                    unsafe {
                        if self.dim < width {
                            A::Vector::<T>::zero().store(&mut row[width - A::Vector::<T>::LANES..]);
                        }
                        copy_run(&mut row[..self.dim], self.of(map, pixel));
                    }
                }
            },
        );
    }

    /// Writes the quads of some pixels as columns.
    pub fn columns<T: Float, A: Registers>(self, map: &[T], pixels: Pixels<'_>, to: &mut [T]) {
        self.lay_out::<T, A, false>(map, pixels, to, &mut []);
    }

    /// Writes them as columns and as rows, at hardly more cost than as columns.
    pub fn both<T: Float, A: Registers>(self, map: &[T], pixels: Pixels<'_>, columns: &mut [T], rows: &mut [T]) {
        self.lay_out::<T, A, true>(map, pixels, columns, rows);
    }

    fn lay_out<T: Float, A: Registers, const ROWS: bool>(
        self,
        map: &[T],
        pixels: Pixels<'_>,
        columns: &mut [T],
        rows: &mut [T],
    ) {
        self.expect_inside(pixels, map.len());
        let (size, width) = (QUAD * self.dim, row_width::<T, A>(self.dim));
        let columns = &mut columns[..pixels.quads() * size];
        let rows = &mut rows[..if ROWS { pixels.quads() * QUAD * width } else { 0 }];
        A::run(
            #[inline(always)]
            || {
                let mut rows = rows.chunks_exact_mut((QUAD * width).max(1));
                let regions = columns.chunks_exact_mut((pixels.region.div_ceil(QUAD) * size).max(1));
                for (columns, pixels) in regions.zip(pixels.list.chunks_exact(pixels.region)) {
                    for (columns, quad) in columns.chunks_exact_mut(size).zip(pixels.chunks(QUAD)) {
                        let rows = rows.next().unwrap_or_default();
                        match *quad {
                            [a, b, c, d] if self.dim >= A::Vector::<T>::LANES => {
                                let quad = [a, b, c, d];
                                // SAFETY: inside, as just checked; `A::run` makes sure of the instruction set.
                                unsafe {
                                    let tokens = [0, 1, 2, 3].map(|place| self.of(map, quad[place] as usize));
                                    lay_out_quad::<T, A::Vector<T>, ROWS>(tokens, columns, rows, width);
                                }
                            }
                            _ => {
                                columns.fill(T::zero());
                                rows.fill(T::zero());
                                for (place, &pixel) in quad.iter().enumerate() {
                                    // SAFETY: as above.
                                    let token = unsafe { self.of(map, pixel as usize) };
                                    let places = columns.chunks_exact_mut(QUAD).zip(token);
                                    places.for_each(|(to, &element)| to[place] = element);
                                    if ROWS {
                                        rows[place * width..][..self.dim].copy_from_slice(token);
                                    }
                                }
                            }
                        }
                    }
                }
            },
        );
    }

    /// Writes the quads of some pixels, rows of [`row_width`] elements, to where they lie in a map, or adds them there.
    ///
    /// # Safety
    /// Nobody else may use the head's channels of these pixels.
    pub unsafe fn write<T: Float, A: Registers>(
        self,
        rows: &[T],
        pixels: Pixels<'_>,
        map: Interleaved<'_, T>,
        accumulate: bool,
    ) {
        let width = row_width::<T, A>(self.dim);
        A::run(
            #[inline(always)]
            || {
                for (place, pixel) in pixels.places() {
                    let (row, start) = (&rows[place * width..][..self.dim], self.first + pixel * self.stride);
                    // SAFETY: nobody else uses them, by the caller's word; `A::run` makes sure of the instruction set.
                    unsafe {
                        let to = map.part(start..start + self.dim);
                        if accumulate {
                            put(to, row, true);
                        } else {
                            copy_run(to, row);
                        }
                    }
                }
            },
        );
    }
}

/// The columns of a quad, whose channels fill a register or more, and its rows, but for what fills them up: of that
/// nobody reads what becomes.
///
/// # Safety
/// The machine must have the register.
#[inline(always)]
unsafe fn lay_out_quad<T: Float, V: Vector<T>, const ROWS: bool>(
    [a, b, c, d]: [&[T]; QUAD],
    columns: &mut [T],
    rows: &mut [T],
    width: usize,
) {
    // The last registers may overlap those before them.
    for channel in (0..a.len()).step_by(V::LANES) {
        let channel = channel.min(a.len() - V::LANES);
        // SAFETY: the caller vouches for the register.
        let (a, b, c, d) =
            unsafe { (V::load(&a[channel..]), V::load(&b[channel..]), V::load(&c[channel..]), V::load(&d[channel..])) };
        if ROWS {
            a.store(&mut rows[channel..]);
            b.store(&mut rows[width + channel..]);
            c.store(&mut rows[2 * width + channel..]);
            d.store(&mut rows[3 * width + channel..]);
        }
        let ([a, c], [b, d]) = (a.interleave(c), b.interleave(d));
        let ([first, second], [third, fourth]) = (a.interleave(b), c.interleave(d));
        let to = &mut columns[QUAD * channel..][..QUAD * V::LANES];
        first.store(to);
        second.store(&mut to[V::LANES..]);
        third.store(&mut to[2 * V::LANES..]);
        fourth.store(&mut to[3 * V::LANES..]);
    }
}

/// A row of so many channels, filled up to whole registers.
pub(super) fn row_width<T: Float, A: Registers>(dim: usize) -> usize {
    dim.next_multiple_of(A::Vector::<T>::LANES)
}
