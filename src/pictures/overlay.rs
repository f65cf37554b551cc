//! The routed regions, drawn over an image's pixels.

use super::BLUE;
use image::{Rgb, RgbImage};
use plotters::style::RGBColor;

/// The colour of what is looked at.
const TINT: RGBColor = RGBColor(255, 176, 0);
/// The outline of the region that looks.
const OUTLINE: Rgb<u8> = Rgb([BLUE.0, BLUE.1, BLUE.2]);
/// A rim inside the outline, that parts it from whatever the picture shows.
const RIM: Rgb<u8> = Rgb([255; 3]);
/// How much of the colour the best and the last region get.
const STRENGTH: (f32, f32) = (0.62, 0.14);
/// The share of itself that a pixel nobody looks at keeps, and the grey that it fades to.
const KEPT: f32 = 0.30;
const FADED: RGBColor = RGBColor(46, 50, 56);

/// Where the S by S regions of a map lie in the picture, in pixels.
///
/// These tiles are equal but for a pixel of rounding, so a picture of fewer pixels than regions has empty ones.
#[derive(Clone, Copy, Debug)]
struct Tiles {
    /// S.
    per_side: usize,
    /// The picture's width and height.
    size: (u32, u32),
}

impl Tiles {
    /// The region of a pixel, row-major.
    fn of(&self, x: u32, y: u32) -> usize {
        let index = |at: u32, extent: u32| at as usize * self.per_side / extent as usize;
        index(y, self.size.1) * self.per_side + index(x, self.size.0)
    }

    /// How far inside its region a pixel is: 0 on its border.
    fn depth(&self, x: u32, y: u32) -> u32 {
        let depth = |at: u32, extent: u32| {
            let edge = |index: usize| (index * extent as usize).div_ceil(self.per_side) as u32;
            let index = at as usize * self.per_side / extent as usize;
            (at - edge(index)).min(edge(index + 1) - 1 - at)
        };
        depth(x, self.size.0).min(depth(y, self.size.1))
    }
}

/// The picture with one region outlined, those that it looks at (best first) tinted, and the others dimmed. `line` is
/// the width of the outline, in pixels.
pub(super) fn draw(picture: &RgbImage, per_side: usize, looking: usize, routed: &[u32], line: u32) -> RgbImage {
    let tiles = Tiles { per_side, size: picture.dimensions() };
    let mut ranks = vec![None; per_side * per_side];
    for (rank, &region) in routed.iter().enumerate() {
        ranks[region as usize] = Some(rank);
    }

    let mut drawn = picture.clone();
    for (x, y, pixel) in drawn.enumerate_pixels_mut() {
        let region = tiles.of(x, y);
        let depth = tiles.depth(x, y);
        *pixel = match ranks[region] {
            _ if region == looking && depth < line => OUTLINE,
            _ if region == looking && depth < line + line / 2 => RIM,
            Some(rank) => tinted(*pixel, rank, routed.len()),
            None => dimmed(*pixel),
        };
        // A hair line shows where the regions part.
        if depth == 0 && region != looking {
            *pixel = mixed(*pixel, FADED, 0.35);
        }
    }
    drawn
}

/// A pixel of the region at a rank of `count`, the best being 0.
pub(super) fn tinted(pixel: Rgb<u8>, rank: usize, count: usize) -> Rgb<u8> {
    let (best, last) = STRENGTH;
    mixed(pixel, TINT, best + (last - best) * rank as f32 / (count.max(2) - 1) as f32)
}

/// A pixel of a region that is not looked at: nearly without colour and light.
pub(super) fn dimmed(Rgb([red, green, blue]): Rgb<u8>) -> Rgb<u8> {
    // The weights of Rec. 601.
    let luma = 0.299 * f32::from(red) + 0.587 * f32::from(green) + 0.114 * f32::from(blue);
    mixed(Rgb([luma.round() as u8; 3]), FADED, 1.0 - KEPT)
}

/// A pixel with a share of a colour over it.
fn mixed(Rgb(pixel): Rgb<u8>, RGBColor(red, green, blue): RGBColor, share: f32) -> Rgb<u8> {
    let over = [red, green, blue];
    Rgb(std::array::from_fn(|i| (f32::from(pixel[i]) * (1.0 - share) + f32::from(over[i]) * share).round() as u8))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIXEL: Rgb<u8> = Rgb([40, 120, 200]);

    #[test]
    fn routed_regions_are_tinted_by_rank_and_others_dimmed() {
        let picture = RgbImage::from_pixel(80, 40, PIXEL);
        let drawn = draw(&picture, 4, 10, &[10, 3, 0], 2);
        assert_eq!(drawn.dimensions(), (80, 40));
        let middle = |region: u32| drawn[(region % 4 * 20 + 10, region / 4 * 10 + 5)];
        for region in 0..16 {
            let expected = match region {
                10 => tinted(PIXEL, 0, 3),
                3 => tinted(PIXEL, 1, 3),
                0 => tinted(PIXEL, 2, 3),
                _ => dimmed(PIXEL),
            };
            assert_eq!(middle(region), expected, "region {region}");
        }
        // Region 10 begins at (40, 20): its outline, then the rim.
        assert_eq!(
            [drawn[(40, 20)], drawn[(59, 29)], drawn[(41, 25)], drawn[(42, 25)]],
            [OUTLINE, OUTLINE, OUTLINE, RIM]
        );
    }

    #[test]
    fn a_better_rank_is_closer_to_the_tint() {
        let blue = |rank| tinted(PIXEL, rank, 8).0[2];
        assert!((1..8).all(|rank| blue(rank - 1) < blue(rank)) && blue(7) < PIXEL.0[2]);
        assert_eq!(tinted(PIXEL, 0, 1), tinted(PIXEL, 0, 8));
    }

    #[test]
    fn every_pixel_lies_in_one_region_whatever_the_sizes() {
        for (per_side, size) in [(1, (5, 3)), (7, (56, 56)), (7, (32, 30)), (5, (3, 11)), (9, (1, 1))] {
            let tiles = Tiles { per_side, size };
            let picture = RgbImage::new(size.0, size.1);
            for (x, y, _) in picture.enumerate_pixels() {
                assert!(tiles.of(x, y) < per_side * per_side && tiles.depth(x, y) <= x.max(y));
            }
            let all: Vec<u32> = (0..(per_side * per_side) as u32).collect();
            assert_eq!(draw(&picture, per_side, 0, &all, 6).dimensions(), size);
        }
    }
}
