//! Operations that move pixels.
//!
//! The centre of each output pixel is mapped back into the picture, and the pixel is interpolated bicubically (Keys'
//! kernel with a = -1, unlike that of resizing) from the 4 x 4 pixels around that place, where pixels beyond an edge
//! repeat those of the edge. Pillow computes it in f64 and truncates, so only the same sums in the same order give the
//! same bytes.

/// From an output pixel's place (x to the right, y down) to the picture's: (a x + b y + c, d x + e y + f).
#[derive(Clone, Copy)]
pub(super) struct Affine([f64; 6]);

impl Affine {
    /// The picture rotated counterclockwise about its centre.
    pub fn rotation(degrees: f64, side: usize) -> Self {
        let (sin, cos) = libm::sincos(-degrees.rem_euclid(360.0).to_radians());
        // Pillow rounds to 15 decimal places, which also hides the differences between its sines and these.
        let [sin, cos] = [sin, cos].map(|x| (x * 1e15).round() / 1e15);
        let middle = side as f64 / 2.0;
        let (c, f) = (cos * -middle + sin * -middle, -sin * -middle + cos * -middle);
        Self([cos, sin, c + middle, -sin, cos, f + middle])
    }

    pub fn shear_x(factor: f64) -> Self {
        Self([1.0, factor, 0.0, 0.0, 1.0, 0.0])
    }

    pub fn shear_y(factor: f64) -> Self {
        Self([1.0, 0.0, 0.0, factor, 1.0, 0.0])
    }

    pub fn shift_x(pixels: f64) -> Self {
        Self([1.0, 0.0, pixels, 0.0, 1.0, 0.0])
    }

    pub fn shift_y(pixels: f64) -> Self {
        Self([1.0, 0.0, 0.0, 0.0, 1.0, pixels])
    }

    /// Writes to `out` what `picture`, (side, side), becomes; `fill` where a pixel comes from outside.
    pub fn apply(self, picture: &[[u8; 3]], side: usize, fill: [u8; 3], out: &mut [[u8; 3]]) {
        let Self([a, b, c, d, e, f]) = self;
        let inside = 0.0..side as f64;
        for (y, row) in out.chunks_exact_mut(side).enumerate() {
            let y = y as f64 + 0.5;
            for (x, pixel) in row.iter_mut().enumerate() {
                let x = x as f64 + 0.5;
                let (from_x, from_y) = (a * x + b * y + c, d * x + e * y + f);
                let shown = inside.contains(&from_x) && inside.contains(&from_y);
                *pixel = if shown { interpolated(picture, side, from_x, from_y) } else { fill };
            }
        }
    }
}

/// A colour as floats; the fourth pads it to the width of a SIMD vector.
type Colour = [f64; 4];

/// The colour of a place in the picture. Inlined, like what it calls: with colours in memory instead of registers it
/// takes twice the time.
#[inline(always)]
fn interpolated(picture: &[[u8; 3]], side: usize, x: f64, y: f64) -> [u8; 3] {
    let ((columns, right), (rows, down)) = (taps(x, side), taps(y, side));
    let [above, row, below, last] = rows.map(|y| &picture[y * side..][..side]);
    // At the centre of a row or column, the cubic gives the colour of that row or column, bit for bit.
    let [red, green, blue, _] = if down == 0.0 {
        along(row, columns, right)
    } else if right == 0.0 {
        let at = |row: &[[u8; 3]]| colour(row[columns[1]]);
        cubic(at(above), at(row), at(below), at(last), down)
    } else {
        let at = |row| along(row, columns, right);
        cubic(at(above), at(row), at(below), at(last), down)
    };
    [red as u8, green as u8, blue as u8] // truncates and saturates
}

/// The colour of a place in a row.
#[inline(always)]
fn along(row: &[[u8; 3]], [p, q, r, s]: [usize; 4], at: f64) -> Colour {
    cubic(colour(row[p]), colour(row[q]), colour(row[r]), colour(row[s]), at)
}

#[inline(always)]
fn colour([red, green, blue]: [u8; 3]) -> Colour {
    [f64::from(red), f64::from(green), f64::from(blue), 0.0]
}

/// The four pixels of an axis around a place, and how far that is from the second towards the third.
fn taps(at: f64, side: usize) -> ([usize; 4], f64) {
    let at = at - 0.5;
    let second = if at < 0.0 { -1 } else { at as isize }; // at least -1/2, and `floor` is slow
    let last = side as isize - 1;
    ([-1, 0, 1, 2].map(|step| (second + step).clamp(0, last) as usize), at - second as f64)
}

/// The cubic through `q` (`at` is 0) and `r` (1), between `p` and `s`.
#[inline(always)]
fn cubic(p: Colour, q: Colour, r: Colour, s: Colour, at: f64) -> Colour {
    let mut level = [0.0; 4];
    for i in 0..4 {
        let (one, two) = (-p[i] + r[i], 2.0 * (p[i] - q[i]) + r[i] - s[i]);
        let three = -p[i] + q[i] - r[i] + s[i];
        level[i] = q[i] + at * (one + at * (two + at * three));
    }
    level
}
