//! Which images a configuration takes.

use crate::config::{Attend, Family, MAX_N_WIN, ModelConfig, PerStage};
use crate::error::{Error, Result};

/// The largest side of an image, and the most tokens of a stage's map with its padding.
const MAX_SIDE: usize = 1 << 13;
const MAX_TOKENS: usize = 1 << 22;

impl ModelConfig {
    /// Checks that an image of this size fits: its sides are at most 8192; every map has tokens, at most 2²² of them,
    /// in at most 4096 regions; and every map divides into its regions, unless auto_pad is set. In the
    /// `biformer_stl_nchw` family a map need not divide, but each of its sides must have at least n_win tokens. Errors:
    /// [`Error::ImageSize`], with a size nearby that fits, and numbers of regions that do; those of
    /// [`check`](Self::check).
    pub fn check_image(&self, height: usize, width: usize) -> Result<()> {
        self.check()?;
        let unfit = |reason: String, advice: String| Err(Error::ImageSize { height, width, reason, advice });
        let large = |stage: usize| {
            let map = [height, width].map(|side| self.map_side(side, stage));
            let cut = self.regions(map, stage);
            let (regions, map) = cut.map_or((1, map), |regions| (regions.count(), regions.map()));
            map[0] * map[1] > MAX_TOKENS || regions > MAX_N_WIN * MAX_N_WIN
        };
        if height.max(width) > MAX_SIDE || (0..self.stages()).any(large) {
            let most = format!("{MAX_TOKENS} tokens or {} regions in a stage", MAX_N_WIN * MAX_N_WIN);
            return unfit(format!("expected at most {MAX_SIDE} pixels a side, and {most}"), "use a smaller one".into());
        }
        let unfit_side = |side: usize| Some((side, self.unfit_stage(side)?));
        let Some((side, stage)) = [height, width].into_iter().find_map(unfit_side) else {
            return Ok(());
        };
        let (map, n_win, stl_nchw) =
            (self.map_side(side, stage), self.n_win.at(stage), self.family == Family::BiformerStlNchw);
        let reason = match map {
            0 => format!("nothing is left of a side of {side} in stage {}", stage + 1),
            _ if map < n_win && stl_nchw => {
                format!("a side of {side} is {map} in stage {}, too little for n_win = {n_win} regions", stage + 1)
            }
            _ => format!("a side of {side} is {map} in stage {}, which n_win = {n_win} does not divide", stage + 1),
        };
        let (regions, padding) = match map > 0 && !stl_nchw {
            true => {
                let padded = ModelConfig { auto_pad: true, ..self.clone() };
                let fits = [height, width].into_iter().all(|side| padded.unfit_stage(side).is_none());
                (self.regions_that_fit([height, width], n_win), fits.then(|| "set auto_pad = true".to_owned()))
            }
            false => (None, None),
        };
        let advice: Vec<String> = [self.sides_that_fit(side), regions, padding].into_iter().flatten().collect();
        unfit(reason, advice.join(", or "))
    }

    /// Sides near one that does not fit: preferably one that all stages halve without rounding, and that is not far
    /// away; otherwise one that is cut into patches without a remainder; otherwise any.
    fn sides_that_fit(&self, side: usize) -> Option<String> {
        let strides = self.strides();
        let (whole, last) = (strides[0], strides[self.stages() - 1]);
        let fits = |of: usize| move |&side: &usize| self.unfit_stage(side).is_none() && side.is_multiple_of(of);
        let below = |of| (1..side).rev().find(fits(of));
        let above = |of| (side + 1..=MAX_SIDE).find(fits(of));
        let (below, above) = (
            below(last).or_else(|| below(whole)).or_else(|| below(1)),
            above(last).filter(|&fits| fits <= 2 * side).or_else(|| above(whole)).or_else(|| above(1)),
        );
        Some(format!("a side of {} fits", either(below, above)?))
    }

    /// Numbers of regions near `n_win` that divide the maps of an image, as no weight depends on them.
    fn regions_that_fit(&self, sides: [usize; 2], n_win: usize) -> Option<String> {
        let fits = |n: &usize| {
            let other = ModelConfig { n_win: PerStage::All(*n), ..self.clone() };
            other.check().is_ok() && sides.into_iter().all(|side| other.unfit_stage(side).is_none())
        };
        let (fewer, more) = ((2..n_win).rev().find(fits), (n_win + 1..=2 * n_win).find(fits));
        Some(format!("set n_win = {}", either(fewer, more)?))
    }

    /// The first stage whose map of an image with this side has no tokens, or does not divide into regions where it
    /// must.
    fn unfit_stage(&self, side: usize) -> Option<usize> {
        (0..self.stages()).find(|&stage| !self.side_fits(side, stage))
    }

    /// Whether a stage's map of an image with this side has tokens and divides into regions where it must.
    fn side_fits(&self, image_side: usize, stage: usize) -> bool {
        let side = self.map_side(image_side, stage);
        let n_win = self.n_win.at(stage);
        side > 0
            && match (self.attend(stage), self.family) {
                (Attend::Full | Attend::FullWithContext, _) => true,
                // Its regions are rounded down, and must not vanish.
                (_, Family::BiformerStlNchw) => side >= n_win,
                _ => self.auto_pad || side.is_multiple_of(n_win),
            }
    }
}

/// `6 or 8`, if there are both.
fn either(one: Option<usize>, other: Option<usize>) -> Option<String> {
    let numbers: Vec<String> = [one, other].into_iter().flatten().map(|number| number.to_string()).collect();
    (!numbers.is_empty()).then(|| numbers.join(" or "))
}
