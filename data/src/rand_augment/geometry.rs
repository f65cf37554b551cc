//! Operations that move pixels.
//!
//! The middle of each output pixel is mapped back into the picture and shows a cubic (Keys' with a = -1, other than
//! that of resizing) of the 4 x 4 pixels around that place, of which those beyond an edge are the edge's. Pillow computes
//! it in f64 and truncates, so only the same sums in the same order give the same bytes.

/// From an output pixel's place (x to the right, y down) to the picture's: (a x + b y + c, d x + e y + f).
#[derive(Clone, Copy)]
pub(super) struct Affine([f64; 6]);

impl Affine {
    /// The picture turned to the left, about its middle.
    pub fn rotation(degrees: f64, side: usize) -> Self {
        let (sin, cos) = (-degrees.rem_euclid(360.0).to_radians()).sin_cos();
        // Pillow rounds to 15 places, which also hides in what the platforms' sines differ.
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

/// The colour of a place in the picture.
fn interpolated(picture: &[[u8; 3]], side: usize, x: f64, y: f64) -> [u8; 3] {
    let ((columns, right), (rows, down)) = (taps(x, side), taps(y, side));
    let pixel = |row: usize, column: usize| picture[row * side + column].map(f64::from);
    // At the middle of a column or row the cubic is that one's colour, to the bit.
    let along = |row: usize| match right == 0.0 {
        true => pixel(row, columns[1]),
        false => cubic(columns.map(|column| pixel(row, column)), right),
    };
    let colour = if down == 0.0 { along(rows[1]) } else { cubic(rows.map(along), down) };
    colour.map(|x| x as u8) // truncates and saturates
}

/// The four pixels of an axis around a place, and how far that is from the second towards the third.
fn taps(at: f64, side: usize) -> ([usize; 4], f64) {
    let at = at - 0.5;
    let second = if at < 0.0 { -1 } else { at as isize }; // at least -1/2, and `floor` is slow
    let last = side as isize - 1;
    ([-1, 0, 1, 2].map(|step| (second + step).clamp(0, last) as usize), at - second as f64)
}

/// The cubic through the second colour (`at` is 0) and the third (1).
fn cubic([first, second, third, fourth]: [[f64; 3]; 4], at: f64) -> [f64; 3] {
    std::array::from_fn(|channel| {
        let [p, q, r, s] = [first[channel], second[channel], third[channel], fourth[channel]];
        q + at * (-p + r + at * (2.0 * (p - q) + r - s + at * (-p + q - r + s)))
    })
}
