//! What a point of an image attends to: weights of a few attentions, over the images.
//!
//! In the spirit of the right half of Fig. 4 of the paper (Zhu et al., "BiFormer: Vision Transformer with Bi-Level
//! Routing Attention", CVPR 2023). The published code has nothing that would draw it.

use super::canvas::SCALE;
use super::gallery::{COLUMNS, Gallery, ROWS, evenly, on_page};
use super::overlay;
use anyhow::{Context, Result, ensure};
use image::RgbImage;
use model::Trace;
use std::path::Path;
use tensor::Tensor;

/// The ring around the point, and its line, in pixels of the page.
const RADIUS: f64 = 6.0;
const LINE: f64 = 2.0;

/// Draws, as a PNG, what a point of each image attends to. `images` are the images of the pass, as the model saw them,
/// with their names; at most 32 are drawn. `trace` must be that of a pass that looked from the same
/// [point](model::Pass::attention_from).
///
/// Each image gets a row: itself, with a ring around the point; then for at most four attentions, evenly chosen from
/// the first to the last, the image with each token tinted by its weight relative to the largest one, or dimmed if it
/// is not attended to.
///
/// Errors: attention weights that are not (N, H, W) weights of the images, a file that cannot be written.
pub fn draw(images: &[(String, data::Image)], trace: &Trace, point: [f64; 2], path: &Path) -> Result<()> {
    let columns =
        evenly(&trace.attention_weights, COLUMNS).map(|(name, weights)| Column::new(name, weights, images.len()));
    let columns = columns.collect::<Result<Vec<_>>>()?;
    let ringed = |image: &RgbImage| {
        let mut image = image.clone();
        overlay::ring(&mut image, point, RADIUS * f64::from(SCALE), LINE * f64::from(SCALE));
        image
    };
    let shown = images.iter().take(ROWS).map(|(_, image)| on_page(image)).collect::<Result<Vec<_>>>()?;
    let heads: Vec<[String; 2]> = columns.iter().map(Column::head).collect();
    let subtitle = "The weights of the token there, mean of all heads.";
    let names: Vec<String> = images.iter().take(ROWS).map(|(name, _)| name.clone()).collect();
    let ringed_images: Vec<RgbImage> = shown.iter().map(ringed).collect();
    let mut page = Gallery::new("What a point attends to", subtitle, &heads, &ringed_images, &names)?;
    let shade = |pixel, step, steps| overlay::lit(pixel, ((steps - step) as f32 / steps as f32).powi(2));
    page.legend(&overlay::legend("the point", "weight, most to least", shade))?;
    for (row, image) in shown.iter().enumerate() {
        for (index, column) in columns.iter().enumerate() {
            let drawn = overlay::weighed(image, column.map, column.of(row));
            page.place(row, index + 1, &ringed(&drawn));
        }
    }
    page.save(path)
}

/// The weights of one attention.
struct Column<'a> {
    name: &'a str,
    /// The height and width of its map.
    map: [usize; 2],
    /// (N, H, W)
    weights: Vec<f32>,
}

impl<'a> Column<'a> {
    fn new(name: &'a str, weights: &Tensor, images: usize) -> Result<Self> {
        let context = || format!("the weights of {name}");
        let [count, height, width] = weights.dims("picture of weights", "(N, H, W)").with_context(context)?;
        ensure!(count == images && height * width > 0, "{}: {} for {images} images", context(), weights.shape());
        Ok(Self { name, map: [height, width], weights: weights.to_vec::<f32>().with_context(context)? })
    }

    fn of(&self, image: usize) -> &[f32] {
        let tokens = self.map[0] * self.map[1];
        &self.weights[image * tokens..(image + 1) * tokens]
    }

    /// The column's heading. The number of tokens read is the first image's; it is the same for all images, except
    /// where there is padding.
    fn head(&self) -> [String; 2] {
        let tokens = self.map[0] * self.map[1];
        let read = self.weights[..tokens].iter().filter(|&&weight| weight > 0.0).count();
        [self.name.to_owned(), format!("reads {read} of {tokens} tokens")]
    }
}

#[cfg(test)]
mod tests {
    use super::super::gallery::{GAP, HEAD, MARGIN, NAMED_GAP, SIDE};
    use super::super::{BLUE, rgb, saved};
    use super::*;
    use image::Rgb;

    fn drawn(images: usize, all: Vec<Tensor>) -> Result<RgbImage> {
        let image = data::Image::new(48, 48, vec![90; 48 * 48 * 3])?;
        let mut trace = Trace::default();
        trace.attention_weights = all.into_iter().map(|weights| ("stages.0.0.attn".to_owned(), weights)).collect();
        saved(|path| draw(&vec![("one of them".to_owned(), image); images], &trace, [0.5, 0.25], path))
    }

    #[test]
    fn what_weighs_is_lit_in_its_images_row() -> Result<()> {
        let weights = Tensor::from_slice(&[0.0, 0.5, 0.5, 0.0, 0.25, 0.0, 0.0, 0.75f32], [2, 2, 2])?;
        let page = drawn(2, vec![weights])?;
        assert_eq!(page.dimensions(), (2 * (MARGIN + SIDE) + GAP, HEAD + 2 * SIDE + NAMED_GAP + MARGIN));
        let pixel = Rgb([90; 3]);
        let at = |row: u32, token: u32| {
            let (left, top) = (MARGIN + SIDE + GAP, HEAD + row * (SIDE + NAMED_GAP));
            page[(left + token % 2 * SIDE / 2 + 30, top + token / 2 * SIDE / 2 + 30)]
        };
        let (one, third, none) = (overlay::lit(pixel, 1.0), overlay::lit(pixel, 1.0 / 3.0), overlay::dimmed(pixel));
        assert_eq!([0, 1, 2, 3].map(|token| at(0, token)), [none, one, one, none]);
        assert_eq!([0, 1, 2, 3].map(|token| at(1, token)), [third, none, none, one]);
        let ringed = page[(MARGIN + SIDE / 4 + RADIUS as u32, HEAD + SIDE / 2)];
        assert_eq!(ringed, rgb(BLUE), "the point, in the image itself");
        Ok(())
    }

    #[test]
    fn weights_that_are_none_are_refused_by_name() -> Result<()> {
        for (wrong, problem) in [
            (Tensor::full([2, 4], 0.5f32), "(N, H, W)"),
            (Tensor::full([1, 2, 2], 0.5f32), "for 2 images"),
            (Tensor::full([2, 0, 2], 0.5f32), "for 2 images"),
            (Tensor::full([2, 2, 2], 1u32), "f32"),
        ] {
            let message = format!("{:#}", drawn(2, vec![wrong]).expect_err(problem));
            assert!(message.contains("stages.0.0.attn") && message.contains(problem), "{message}");
        }
        Ok(())
    }

    #[test]
    fn a_page_is_no_longer_than_can_be_looked_at() -> Result<()> {
        assert!(drawn(40, vec![Tensor::full([40, 3, 3], 0.5f32)])?.height() < HEAD + 33 * (SIDE + NAMED_GAP));
        Ok(())
    }
}
