//! Routed regions and attention weights, drawn over an image's pixels.

use super::{BLUE, rgb};
use image::{Rgb, RgbImage};
use ops::Regions;
use plotters::style::RGBColor;

/// The tint of regions and tokens that are attended to.
const TINT: RGBColor = RGBColor(255, 176, 0);
/// The outline of the query region, and the ring around the query point.
const OUTLINE: Rgb<u8> = rgb(BLUE);
/// A rim beside the outline that separates it from the picture.
const RIM: Rgb<u8> = Rgb([255; 3]);
/// The opacity of the tint on the best-scoring and on the last of the routed regions.
const STRENGTH: (f32, f32) = (0.62, 0.14);
/// The opacity of the tint on the token with the largest weight.
const BRIGHTEST: f32 = 0.85;
/// The share of its own luma that a pixel keeps if it is not attended to, and the grey that it fades to.
const KEPT: f32 = 0.30;
const FADED: RGBColor = RGBColor(46, 50, 56);

/// How a map is cut into regions, which may reach beyond it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// The regions.
    pub regions: Regions,
    /// The map's height and width, which a picture shows.
    pub map: [usize; 2],
}

/// Where the regions lie in a picture, in pixels.
///
/// The tiles are equal in size, except for a pixel of rounding and for what is cut off where regions reach beyond the
/// map; if a picture has fewer pixels than regions, some tiles are empty.
#[derive(Clone, Copy, Debug)]
struct Tiles {
    cut: Cut,
    /// The picture's height and width.
    size: [u32; 2],
}

impl Tiles {
    /// The region of a pixel along an axis.
    fn along(&self, axis: usize, at: u32) -> usize {
        at as usize * self.cut.map[axis] / self.size[axis] as usize / self.cut.regions.size()[axis]
    }

    /// The region of a pixel, row-major.
    fn of(&self, x: u32, y: u32) -> usize {
        self.along(0, y) * self.cut.regions.grid()[1] + self.along(1, x)
    }

    /// How far inside its region a pixel is: 0 on its border.
    fn depth(&self, x: u32, y: u32) -> u32 {
        let depth = |axis: usize, at: u32| {
            let (extent, tokens) = (self.size[axis], self.cut.map[axis]);
            let edge = |region: usize| {
                let first = (region * self.cut.regions.size()[axis]).min(tokens);
                (first * extent as usize).div_ceil(tokens) as u32
            };
            let region = self.along(axis, at);
            (at - edge(region)).min(edge(region + 1) - 1 - at)
        };
        depth(0, y).min(depth(1, x))
    }
}

/// The picture with one region outlined, those that it looks at (best first) tinted, and the others dimmed. `line` is
/// the width of the outline, in pixels.
pub(super) fn draw(picture: &RgbImage, cut: Cut, source: usize, routed: &[u32], line: u32) -> RgbImage {
    let tiles = Tiles { cut, size: [picture.height(), picture.width()] };
    let mut ranks = vec![None; cut.regions.count()];
    for (rank, &region) in routed.iter().enumerate() {
        ranks[region as usize] = Some(rank);
    }

    let mut drawn = picture.clone();
    for (x, y, pixel) in drawn.enumerate_pixels_mut() {
        let region = tiles.of(x, y);
        let depth = tiles.depth(x, y);
        *pixel = match ranks[region] {
            _ if region == source && depth < line => OUTLINE,
            _ if region == source && depth < line + line / 2 => RIM,
            Some(rank) => tinted(*pixel, rank, routed.len()),
            None => dimmed(*pixel),
        };
        // A hair line shows where the regions part.
        if depth == 0 && region != source {
            *pixel = mixed(*pixel, FADED, 0.35);
        }
    }
    drawn
}

/// The picture of a map (H, W) with each token tinted by its weight, and those dimmed that have none.
pub(super) fn weighed(picture: &RgbImage, [height, width]: [usize; 2], weights: &[f32]) -> RgbImage {
    let heaviest = weights.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
    let mut drawn = picture.clone();
    let along = |at: u32, side: u32, tokens: usize| at as usize * tokens / side as usize;
    for (x, y, pixel) in drawn.enumerate_pixels_mut() {
        let weight = weights[along(y, picture.height(), height) * width + along(x, picture.width(), width)];
        *pixel = if weight > 0.0 { lit(*pixel, weight / heaviest) } else { dimmed(*pixel) };
    }
    drawn
}

/// A pixel of a token with this weight, relative to the largest one. The square root keeps small weights visible.
pub(super) fn lit(pixel: Rgb<u8>, weight: f32) -> Rgb<u8> {
    mixed(pixel, TINT, BRIGHTEST * weight.sqrt())
}

/// Draws a ring around a point of the picture, given as parts of its height and width. Lengths are in its pixels.
pub(super) fn ring(picture: &mut RgbImage, point: [f64; 2], radius: f64, line: f64) {
    let centre = [point[1] * f64::from(picture.width()), point[0] * f64::from(picture.height())];
    for (x, y, pixel) in picture.enumerate_pixels_mut() {
        let distance = (f64::from(x) + 0.5 - centre[0]).hypot(f64::from(y) + 0.5 - centre[1]);
        match (distance - radius).abs() {
            off if off < line / 2.0 => *pixel = OUTLINE,
            off if off < line => *pixel = RIM,
            _ => {}
        }
    }
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

/// A pixel blended with a colour, whose opacity is `share`.
fn mixed(Rgb(pixel): Rgb<u8>, RGBColor(red, green, blue): RGBColor, share: f32) -> Rgb<u8> {
    let over = [red, green, blue];
    Rgb(std::array::from_fn(|i| (f32::from(pixel[i]) * (1.0 - share) + f32::from(over[i]) * share).round() as u8))
}

/// The legend: the colour of the query region; the shades of the regions it reads, `shade(pixel, step, steps)` each;
/// and the colour of what it does not read.
pub(super) fn legend(
    source: &'static str,
    reads: &'static str,
    shade: impl Fn(Rgb<u8>, usize, usize) -> Rgb<u8>,
) -> [(&'static str, Vec<RGBColor>); 3] {
    const STEPS: usize = 6;
    const PIXEL: Rgb<u8> = Rgb([190; 3]);
    let colour = |Rgb([red, green, blue]): Rgb<u8>| RGBColor(red, green, blue);
    let shades = (0..STEPS).map(|step| colour(shade(PIXEL, step, STEPS))).collect();
    [(source, vec![BLUE]), (reads, shades), ("not read", vec![colour(dimmed(PIXEL))])]
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIXEL: Rgb<u8> = Rgb([40, 120, 200]);

    /// A square map in a square grid, whose regions are as small as they can be.
    fn cut(tokens: usize, per_side: usize) -> Cut {
        let regions = Regions::new("test", [per_side; 2], [tokens.div_ceil(per_side); 2]).unwrap();
        Cut { regions, map: [tokens; 2] }
    }

    /// A map of 5x5 tokens in regions of 2x2: those of the last row and column are half padding.
    #[test]
    fn padding_is_not_in_the_picture() {
        let picture = RgbImage::from_pixel(50, 50, PIXEL);
        let drawn = draw(&picture, cut(5, 3), 4, &[8], 1);
        assert_eq!(drawn[(45, 45)], tinted(PIXEL, 0, 1), "region 8 begins at token 4");
        assert_eq!([drawn[(35, 35)], drawn[(35, 45)]], [dimmed(PIXEL); 2]);
        assert_eq!([drawn[(20, 20)], drawn[(39, 39)]], [OUTLINE; 2], "region 4 has the tokens 2 and 3");
    }

    #[test]
    fn routed_regions_are_tinted_by_rank_and_others_dimmed() {
        let picture = RgbImage::from_pixel(80, 40, PIXEL);
        let drawn = draw(&picture, cut(4, 4), 10, &[10, 3, 0], 2);
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
    fn tokens_are_lit_by_weight() {
        let picture = RgbImage::from_pixel(30, 20, PIXEL);
        let mut drawn = weighed(&picture, [2, 3], &[0.4, 0.1, 0.0, f32::MIN_POSITIVE, 0.2, 0.3]);
        let expected = [lit(PIXEL, 1.0), lit(PIXEL, 0.25), dimmed(PIXEL), PIXEL, lit(PIXEL, 0.5), lit(PIXEL, 0.75)];
        for (token, expected) in expected.into_iter().enumerate() {
            let (x, y) = (token as u32 % 3 * 10, token as u32 / 3 * 10);
            assert_eq!([drawn[(x, y)], drawn[(x + 9, y + 9)]], [expected; 2], "token {token}");
        }
        ring(&mut drawn, [0.5, 0.5], 6.0, 2.0);
        assert_eq!([drawn[(21, 10)], drawn[(15, 4)], drawn[(19, 10)]], [OUTLINE, OUTLINE, RIM]);
        assert_eq!(drawn[(15, 10)], lit(PIXEL, 0.5), "what the ring is around");
        ring(&mut drawn, [1.0, 0.0], 6.0, 2.0);
    }

    #[test]
    fn every_pixel_lies_in_one_region_whatever_the_sizes() {
        let sizes = [(1, (5, 3)), (7, (56, 56)), (7, (32, 30)), (5, (3, 11)), (9, (1, 1))];
        for ((per_side, (width, height)), tokens) in sizes.into_iter().flat_map(|it| [(it, it.0), (it, 3 * it.0 - 1)]) {
            let cut = cut(tokens, per_side);
            let tiles = Tiles { cut, size: [height, width] };
            let picture = RgbImage::new(width, height);
            for (x, y, _) in picture.enumerate_pixels() {
                assert!(tiles.of(x, y) < per_side * per_side);
                // The neighbours of its own region, on either side.
                let inside = |axis: usize, at: u32| {
                    let own = |other: &u32| tiles.along(axis, *other) == tiles.along(axis, at);
                    let (before, after) = ((0..at).rev(), at + 1..tiles.size[axis]);
                    before.take_while(own).count().min(after.take_while(own).count())
                };
                assert_eq!(tiles.depth(x, y) as usize, inside(0, y).min(inside(1, x)), "{x}, {y} of {width}x{height}");
            }
            let all: Vec<u32> = (0..(per_side * per_side) as u32).collect();
            assert_eq!(draw(&picture, cut, 0, &all, 6).dimensions(), (width, height));
        }
    }
}
