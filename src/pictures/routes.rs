//! Where a region looks: the routes of a few attentions, over the images they were chosen for.
//!
//! In the spirit of Fig. 4 of the paper (Zhu et al., "BiFormer: Vision Transformer with Bi-Level Routing Attention",
//! CVPR 2023), which shows, for a point of an image, the regions that its region is routed to.

use super::canvas::SCALE;
use super::gallery::{COLUMNS, Gallery, ROWS, evenly, on_page};
use super::overlay::{self, Cut};
use anyhow::{Context, Result, bail, ensure};
use model::{Routes, Trace};
use std::path::Path;

/// Draws, as a PNG, where the middle region of each image looks.
///
/// `shown` holds images, of which 32 at most are drawn, and the slots of the pass's batch that they were in. Each
/// gets a row: the image, then for at most four routed attentions, evenly chosen from the first to the last, the
/// image with one region outlined, the k regions that it attends to tinted (the stronger, the better they scored) and
/// all others dimmed.
///
/// The images are what the model saw: a region is a part of that, or of the padding beside it, which is not drawn. With
/// no routed attention in the trace only the images are drawn; with no images there is no file.
///
/// Errors: routes that are not (N, P, k) region indices below P, the number of regions, a slot that is not below N, a
/// file that cannot be written.
pub fn draw(shown: &[(usize, data::Image)], trace: &Trace, path: &Path) -> Result<()> {
    let shown = &shown[..shown.len().min(ROWS)];
    if shown.is_empty() {
        return Ok(());
    }
    let columns = evenly(&trace.routes, COLUMNS).map(Column::new).collect::<Result<Vec<_>>>()?;

    let heads: Vec<[String; 2]> = columns.iter().map(Column::head).collect();
    let images = shown.iter().map(|(_, image)| on_page(image)).collect::<Result<Vec<_>>>()?;
    let subtitle = match columns.is_empty() {
        true => "Nowhere: no attention is routed.",
        false => "Its tokens attend to those of k regions only.",
    };
    let mut page = Gallery::new("Where a region looks", subtitle, &heads, &images, &[])?;
    if !columns.is_empty() {
        page.legend(&overlay::legend("query region", "routed, best to last", overlay::tinted))?;
    }
    for (row, ((slot, _), image)) in shown.iter().zip(&images).enumerate() {
        for (index, column) in columns.iter().enumerate() {
            let source = column.middle();
            let drawn = overlay::draw(image, column.cut, source, column.routed(*slot, source)?, 2 * SCALE);
            page.place(row, index + 1, &drawn);
        }
    }
    page.save(path)
}

/// The routes of one attention.
struct Column<'a> {
    name: &'a str,
    cut: Cut,
    /// N, P and k.
    shape: [usize; 3],
    /// (N, P, k)
    routes: Vec<u32>,
}

impl<'a> Column<'a> {
    fn new(Routes { name, indices, regions, map }: &'a Routes) -> Result<Self> {
        let cut = Cut { regions: *regions, map: *map };
        let context = || format!("the routes of {name}");
        let shape @ [_, regions, k] = indices.dims("picture of routes", "(N, P, k)").with_context(context)?;
        let routes = indices.to_vec::<u32>().with_context(context)?;
        let expected = cut.regions.count();
        ensure!(regions == expected, "{}: {regions} regions, the map has {expected}", context());
        ensure!(k <= regions, "{}: {k} of {regions} regions", context());
        if let Some(beyond) = routes.iter().find(|&&region| region as usize >= regions) {
            bail!("{}: there is no region {beyond} among {regions}", context());
        }
        Ok(Self { name, cut, shape, routes })
    }

    fn head(&self) -> [String; 2] {
        let [_, regions, k] = self.shape;
        [self.name.to_owned(), format!("k = {k} of {regions}")]
    }

    /// The region in the middle of the map or, if four regions meet there, the lower right one.
    fn middle(&self) -> usize {
        let Cut { regions, map } = self.cut;
        let along = |axis: usize| map[axis] / 2 / regions.size()[axis];
        along(0) * regions.grid()[1] + along(1)
    }

    /// The k regions that a region of an image looks at, best first.
    fn routed(&self, slot: usize, region: usize) -> Result<&[u32]> {
        let [images, regions, k] = self.shape;
        ensure!(slot < images, "the routes of {} are of {images} images; there is no image {slot}", self.name);
        let start = (slot * regions + region) * k;
        Ok(&self.routes[start..start + k])
    }
}

#[cfg(test)]
mod tests {
    use super::super::gallery::{GAP, HEAD, MARGIN, SIDE};
    use super::super::saved;
    use super::*;
    use image::{Rgb, RgbImage};
    use ops::Regions;
    use tensor::{DType, Tensor};

    fn square(side: usize, byte: u8) -> Result<data::Image> {
        Ok(data::Image::new(side, side, vec![byte; side * side * 3])?)
    }

    /// Each region looks at itself and those behind it.
    fn routes(images: usize, regions: usize, k: usize) -> Result<Tensor> {
        let looked = |at: usize| ((at / k % regions + at % k) % regions) as u32;
        Ok(Tensor::from_slice(&(0..images * regions * k).map(looked).collect::<Vec<_>>(), [images, regions, k])?)
    }

    /// The trace of attentions whose maps have so many regions along each side.
    fn trace(attentions: impl IntoIterator<Item = (usize, Tensor)>) -> Trace {
        let mut trace = Trace::default();
        trace.routes = (0..)
            .zip(attentions)
            .map(|(index, (n_win, indices))| Routes {
                name: format!("stages.{index}.0.attn"),
                indices,
                regions: Regions::new("test", [n_win; 2], [2; 2]).unwrap(),
                map: [2 * n_win; 2],
            })
            .collect();
        trace
    }

    fn drawn(shown: &[(usize, data::Image)], trace: &Trace) -> Result<RgbImage> {
        saved(|path| draw(shown, trace, path))
    }

    fn size(columns: u32, rows: u32) -> (u32, u32) {
        (2 * MARGIN + columns * (SIDE + GAP) - GAP, HEAD + rows * (SIDE + GAP) - GAP + MARGIN)
    }

    #[test]
    fn there_is_a_row_an_image_and_a_column_an_attention() -> Result<()> {
        let shown = [(0, square(32, 90)?), (2, square(224, 90)?), (1, data::Image::new(300, 20, vec![90; 18000])?)];
        for attentions in 0..7 {
            let all = (0..attentions).map(|_| Ok((4, routes(3, 16, 4)?))).collect::<Result<Vec<_>>>()?;
            let page = drawn(&shown, &trace(all))?;
            assert_eq!(page.dimensions(), size(1 + attentions.min(4), 3));
            let margin = |x: u32| x < MARGIN - 2 || x >= page.width() - 20;
            assert!(page.enumerate_pixels().all(|(x, _, pixel)| !margin(x) || *pixel == Rgb([255; 3])), "cut off");
        }
        Ok(())
    }

    #[test]
    fn routed_regions_are_tinted_and_others_dimmed() -> Result<()> {
        let page = drawn(&[(1, square(32, 90)?)], &trace([(4, routes(2, 16, 3)?)]))?;
        let region = |region: u32| {
            let left = MARGIN + SIDE + GAP;
            page[(left + region % 4 * SIDE / 4 + SIDE / 8, HEAD + region / 4 * SIDE / 4 + SIDE / 8)]
        };
        let pixel = Rgb([90; 3]);
        for at in 0..16 {
            // The middle region, 10, looks at 10, 11 and 12.
            let expected = if (10..13).contains(&at) {
                overlay::tinted(pixel, at as usize - 10, 3)
            } else {
                overlay::dimmed(pixel)
            };
            assert_eq!(region(at), expected, "region {at}");
        }
        assert_eq!(page[(MARGIN + SIDE / 2, HEAD + SIDE / 2)], pixel, "the image itself is as it was");
        Ok(())
    }

    #[test]
    fn any_number_of_regions_will_do() -> Result<()> {
        let all = [(1, routes(1, 1, 1)?), (3, routes(1, 9, 9)?), (7, routes(1, 49, 0)?), (32, routes(1, 1024, 7)?)];
        assert_eq!(drawn(&[(0, square(7, 90)?)], &trace(all))?.dimensions(), size(5, 1));
        Ok(())
    }

    #[test]
    fn no_images_leave_no_file() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("routing.png");
        draw(&[], &trace([(4, routes(1, 16, 4)?)]), &path)?;
        assert!(!path.exists());
        Ok(())
    }

    #[test]
    fn routes_that_are_none_are_refused_by_name() -> Result<()> {
        let wrong = [
            ("15 regions, the map has 16", routes(1, 15, 4)?),
            ("0 regions, the map has 16", routes(1, 0, 1)?),
            ("17 of 16 regions", routes(1, 16, 17)?),
            ("(N, P, k)", routes(1, 16, 4)?.reshape([16, 4])?),
            ("u32", Tensor::zeros([1, 16, 4], DType::F32)),
            ("no region 16", Tensor::full([1, 16, 4], 16u32)),
            ("no image 0", routes(0, 16, 4)?),
        ];
        for (problem, routes) in wrong {
            let error = drawn(&[(0, square(32, 90)?)], &trace([(4, routes)])).expect_err(problem);
            let message = format!("{error:#}");
            assert!(message.contains("stages.0") && message.contains(problem), "{message}");
        }
        Ok(())
    }
}
