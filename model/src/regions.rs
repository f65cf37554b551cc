//! How routed attention cuts a map into regions.

use crate::config::{Attend, Family, ModelConfig};
use ops::Regions;

/// The regions of a map (H, W) for this `n_win`, which together may be larger than it: the rest is padding, at the
/// bottom and right. Nothing where the map is too small to have any.
pub fn padded(map: [usize; 2], n_win: usize, family: Family) -> Option<Regions> {
    let (grid, size) = match family {
        // Regions of a rounded-down size, as many as it takes.
        Family::BiformerStlNchw => {
            let size = map.map(|side| side / n_win.max(1));
            (std::array::from_fn(|axis| map[axis].div_ceil(size[axis].max(1))), size)
        }
        // `n_win` by `n_win` regions, of a rounded-up size.
        _ => ([n_win; 2], map.map(|side| side.div_ceil(n_win.max(1)))),
    };
    // This fails only for sizes that overflow, which the map of no image has.
    Regions::new("regions", grid, size).ok().filter(|_| !grid.contains(&0) && !size.contains(&0))
}

impl ModelConfig {
    /// The regions of a stage's map, if the stage routes and the map is large enough.
    pub fn regions(&self, map: [usize; 2], stage: usize) -> Option<Regions> {
        matches!(self.attend(stage), Attend::Routed(_))
            .then(|| padded(map, self.n_win.at(stage), self.family))
            .flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_cover_the_map_as_each_layout_rounds() {
        let of = |map, n_win, family| padded(map, n_win, family).map(|regions| (regions.grid(), regions.map()));
        assert_eq!(of([56, 28], 7, Family::Biformer), Some(([7, 7], [56, 28])));
        assert_eq!(of([50, 76], 7, Family::Biformer), Some(([7, 7], [56, 77])));
        assert_eq!(of([3, 3], 7, Family::BiformerStl), Some(([7, 7], [7, 7])));
        assert_eq!(of([50, 76], 7, Family::BiformerStlNchw), Some(([8, 8], [56, 80])));
        assert_eq!(of([13, 7], 7, Family::BiformerStlNchw), Some(([13, 7], [13, 7])));
        assert_eq!(of([6, 7], 7, Family::BiformerStlNchw), None);
        assert_eq!(of([0, 7], 7, Family::Biformer), None);
    }
}
