//! How routed attention cuts a map into regions.

use crate::config::{Attend, Family, ModelConfig};
use ops::Regions;

/// The regions of a map (H, W) for S = `n_win`, which together may be larger than it: the rest is padding, at the bottom
/// and right. Nothing where the map is too small to have any.
pub fn cut(map: [usize; 2], n_win: usize, family: Family) -> Option<Regions> {
    let (grid, size) = match family {
        // Regions of a rounded-down size, as many as it takes.
        Family::BiformerStlNchw => {
            let size = map.map(|side| side / n_win.max(1));
            (std::array::from_fn(|axis| map[axis].div_ceil(size[axis].max(1))), size)
        }
        // S by S regions, of a rounded-up size.
        _ => ([n_win; 2], map.map(|side| side.div_ceil(n_win.max(1)))),
    };
    // This fails only for sizes that overflow, which the map of no image has.
    Regions::new("regions", grid, size).ok().filter(|_| !grid.contains(&0) && !size.contains(&0))
}

impl ModelConfig {
    /// The regions of a stage's map, if the stage routes and the map is large enough.
    pub fn regions(&self, map: [usize; 2], stage: usize) -> Option<Regions> {
        matches!(self.attend(stage), Attend::Routed(_)).then(|| cut(map, self.n_win.at(stage), self.family)).flatten()
    }

    /// How a routed attention, by its name in a [`Trace`](crate::Trace), cuts its map of an image (H, W): the regions, and
    /// the height and width of the map, beyond which they are padding.
    pub fn regions_of(&self, attention: &str, image: [usize; 2]) -> Option<(Regions, [usize; 2])> {
        let stage: usize = attention.strip_prefix("stages.")?.split('.').next()?.parse().ok()?;
        if stage >= self.stages() {
            return None;
        }
        let map = image.map(|side| self.map_side(side, stage));
        self.regions(map, stage).map(|regions| (regions, map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attention_is_found_by_its_name() {
        let config = ModelConfig { auto_pad: true, ..crate::preset("tiny").unwrap().config() };
        let (regions, map) = config.regions_of("stages.2.0.attn", [120, 112]).unwrap();
        assert_eq!((regions.size(), regions.map(), map), ([2, 1], [14, 7], [8, 7]));
        // One that attends in full, one that is not there, and what is no attention.
        let others = ["stages.3.0.attn", "stages.4.0.attn", "stages.18446744073709551615.0.attn", "norm"];
        assert_eq!(others.map(|name| config.regions_of(name, [224; 2])), [None; 4]);
    }

    #[test]
    fn regions_cover_the_map_as_each_layout_rounds() {
        let of = |map, n_win, family| cut(map, n_win, family).map(|regions| (regions.grid(), regions.map()));
        assert_eq!(of([56, 28], 7, Family::Biformer), Some(([7, 7], [56, 28])));
        assert_eq!(of([50, 76], 7, Family::Biformer), Some(([7, 7], [56, 77])));
        assert_eq!(of([3, 3], 7, Family::BiformerStl), Some(([7, 7], [7, 7])));
        assert_eq!(of([50, 76], 7, Family::BiformerStlNchw), Some(([8, 8], [56, 80])));
        assert_eq!(of([13, 7], 7, Family::BiformerStlNchw), Some(([13, 7], [13, 7])));
        assert_eq!(of([6, 7], 7, Family::BiformerStlNchw), None);
        assert_eq!(of([0, 7], 7, Family::Biformer), None);
    }
}
