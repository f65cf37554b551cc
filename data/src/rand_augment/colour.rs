//! Operations on colours.

use super::Canvas;

/// The table of each channel.
type Tables = [[u8; 256]; 3];

fn look_up(pixels: &mut [[u8; 3]], tables: &Tables) {
    for pixel in pixels {
        *pixel = std::array::from_fn(|channel| tables[channel][usize::from(pixel[channel])]);
    }
}

/// Replaces each byte, in all channels alike.
pub(super) fn map(pixels: &mut [[u8; 3]], replaced: impl Fn(u8) -> u8) {
    let table = std::array::from_fn(|byte| replaced(byte as u8));
    look_up(pixels, &[table; 3]);
}

/// How often each byte occurs in each channel.
fn histograms(pixels: &[[u8; 3]]) -> [[usize; 256]; 3] {
    let mut counts = [[0; 256]; 3];
    for pixel in pixels {
        for (counts, &byte) in counts.iter_mut().zip(pixel) {
            counts[usize::from(byte)] += 1;
        }
    }
    counts
}

const IDENTITY: [u8; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = byte as u8;
        byte += 1;
    }
    table
};

/// Stretches each channel to 0..=255.
pub(super) fn auto_contrast(pixels: &mut [[u8; 3]]) {
    let tables = histograms(pixels).map(|counts| {
        let darkest = counts.iter().position(|&count| count > 0);
        let brightest = counts.iter().rposition(|&count| count > 0);
        match (darkest, brightest) {
            (Some(darkest), Some(brightest)) if darkest < brightest => {
                let scale = 255.0 / (brightest - darkest) as f64;
                let offset = -(darkest as f64) * scale;
                std::array::from_fn(|byte| (byte as f64 * scale + offset) as u8) // saturates, as the table must
            }
            _ => IDENTITY,
        }
    });
    look_up(pixels, &tables);
}

/// Spreads each channel's bytes so that all levels are about equally frequent.
pub(super) fn equalize(pixels: &mut [[u8; 3]]) {
    let tables = histograms(pixels).map(|counts| {
        let brightest = counts.iter().rfind(|&&count| count > 0).map_or(0, |&count| count);
        // If there is only one level, there are no other pixels, and the step is 0.
        let step = (pixels.len() - brightest) / 255;
        if step == 0 {
            return IDENTITY;
        }
        let mut below = step / 2;
        counts.map(|count| {
            let level = below / step;
            below += count;
            level.min(255) as u8
        })
    });
    look_up(pixels, &tables);
}

/// Keeps the highest `bits` (up to 8) of each byte.
pub(super) fn posterize(pixels: &mut [[u8; 3]], bits: u32) {
    let mask = !(0xFFu32 >> bits) as u8;
    map(pixels, |byte| byte & mask);
}

/// Inverts bytes from `threshold` on.
pub(super) fn solarize(pixels: &mut [[u8; 3]], threshold: usize) {
    map(pixels, |byte| if usize::from(byte) < threshold { byte } else { 255 - byte });
}

/// Brightens bytes of the darker half.
pub(super) fn solarize_add(pixels: &mut [[u8; 3]], added: u8) {
    map(pixels, |byte| if byte < 128 { byte.saturating_add(added) } else { byte });
}

/// `plain` at factor 0, `byte` at 1, interpolated between them and extrapolated beyond. The cast truncates and
/// saturates.
fn blend(plain: u8, byte: u8, factor: f32) -> u8 {
    let (plain, byte) = (f32::from(plain), f32::from(byte));
    (plain + factor * (byte - plain)) as u8
}

/// The luma of ITU-R 601-2.
fn grey([red, green, blue]: [u8; 3]) -> u8 {
    ((u32::from(red) * 19595 + u32::from(green) * 38470 + u32::from(blue) * 7471 + 0x8000) >> 16) as u8
}

/// Away from grey, or towards it.
pub(super) fn saturation(pixels: &mut [[u8; 3]], factor: f32) {
    for pixel in pixels {
        let grey = grey(*pixel);
        *pixel = pixel.map(|byte| blend(grey, byte, factor));
    }
}

/// Away from the mean grey, or towards it.
pub(super) fn contrast(pixels: &mut [[u8; 3]], factor: f32) {
    let sum: u64 = pixels.iter().map(|&pixel| u64::from(grey(pixel))).sum();
    let mean = (sum as f64 / pixels.len() as f64).round() as u8;
    map(pixels, |byte| blend(mean, byte, factor));
}

/// Away from black, or towards it.
pub(super) fn brightness(pixels: &mut [[u8; 3]], factor: f32) {
    map(pixels, |byte| blend(0, byte, factor));
}

/// Away from the mean of a pixel's 3 x 3 neighbourhood, in which the pixel itself counts five times, or towards it.
/// Pixels at the edge stay as they are.
pub(super) fn sharpness(canvas: &mut Canvas, factor: f32) {
    let stride = canvas.side * 3;
    canvas.spare.copy_from_slice(&canvas.pixels);
    let (source, out) = (canvas.spare.as_flattened(), canvas.pixels.as_flattened_mut());
    let rows = source.windows(stride * 3).step_by(stride);
    for (rows, out) in rows.zip(out.chunks_exact_mut(stride).skip(1)) {
        let (above, rest) = rows.split_at(stride);
        let (row, under) = rest.split_at(stride);
        let three = |row: &[u8], at: usize| u16::from(row[at]) + u16::from(row[at + 3]) + u16::from(row[at + 6]);
        for at in 0..stride.saturating_sub(6) {
            let sum = three(above, at) + three(row, at) + three(under, at) + 4 * u16::from(row[at + 3]);
            let mean = ((2 * sum + 13) / 26) as u8;
            out[at + 3] = blend(mean, row[at + 3], factor);
        }
    }
}
