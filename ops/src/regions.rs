//! How a map is cut into a grid of regions.

use tensor::{Error, Result, Shape};

/// The regions of a map: a grid of equally sized regions. None of the counts below can overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regions {
    grid: [usize; 2],
    size: [usize; 2],
}

impl Regions {
    /// A grid (G_h, G_w) of regions of (r_h, r_w) tokens each. Errors: [`Error::Argument`] if the number of tokens
    /// overflows.
    pub fn new(op: &'static str, grid: [usize; 2], size: [usize; 2]) -> Result<Self> {
        Shape::from([grid[0], grid[1], size[0], size[1]]).countable(op)?;
        Ok(Self { grid, size })
    }

    /// How a grid (G_h, G_w) cuts a map (H, W). Errors: [`Error::Argument`] for a grid without regions, and for one
    /// that does not divide the map (the message names the next larger map that it divides).
    pub fn cut(op: &'static str, map: [usize; 2], grid: [usize; 2]) -> Result<Self> {
        let ([height, width], [down, across]) = (map, grid);
        if grid.contains(&0) {
            return Err(Error::argument(op, format!("a grid of {down}x{across} regions; it needs at least 1x1")));
        }
        if !height.is_multiple_of(down) || !width.is_multiple_of(across) {
            let next = height.checked_next_multiple_of(down).zip(width.checked_next_multiple_of(across));
            let fits =
                next.map_or(String::new(), |(height, width)| format!(" (the next that does is {height}x{width})"));
            let message =
                format!("a map of {height}x{width} tokens does not divide into {down}x{across} regions{fits}");
            return Err(Error::argument(op, message));
        }
        Self::new(op, grid, [height / down, width / across])
    }

    /// How many regions there are along height and width.
    pub fn grid(&self) -> [usize; 2] {
        self.grid
    }

    /// The height and width of a region, in tokens.
    pub fn size(&self) -> [usize; 2] {
        self.size
    }

    /// How many rows of a region's tokens are added up in one chain, whose rounding errors grow with its length: those
    /// of 256 tokens, or one.
    pub(crate) fn rows_of_chain(&self) -> usize {
        (256 / self.size[1].max(1)).max(1)
    }

    /// The number of regions.
    pub fn count(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    /// The tokens of one region.
    pub fn tokens(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// The height and width of the map that the regions make up.
    pub fn map(&self) -> [usize; 2] {
        [self.grid[0] * self.size[0], self.grid[1] * self.size[1]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_cuts_a_map_into_equal_regions() {
        let regions = Regions::cut("test", [6, 20], [2, 4]).unwrap();
        assert_eq!(regions, Regions::new("test", [2, 4], [3, 5]).unwrap());
        assert_eq!((regions.grid(), regions.size()), ([2, 4], [3, 5]));
        assert_eq!((regions.count(), regions.tokens(), regions.map()), (8, 15, [6, 20]));
        assert_eq!(Regions::cut("test", [0, 4], [2, 2]).unwrap().map(), [0, 4]);
    }

    #[test]
    fn a_map_that_does_not_divide_is_refused_with_one_that_does() {
        let message = |map, grid| Regions::cut("test", map, grid).unwrap_err().to_string();
        assert_eq!(
            message([30, 28], [7, 7]),
            "test: a map of 30x28 tokens does not divide into 7x7 regions (the next that does is 35x28)"
        );
        assert_eq!(message([30, 28], [0, 7]), "test: a grid of 0x7 regions; it needs at least 1x1");
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        const HALF: usize = usize::MAX / 2 + 1;
        // There is no next map.
        let message = Regions::cut("test", [HALF + 1, 4], [HALF, 2]).unwrap_err().to_string();
        assert!(message.ends_with(&format!("into {HALF}x2 regions")), "{message}");
        // A map without tokens divides into any grid.
        let all = [Regions::cut("test", [0, 4], [HALF, 2]), Regions::new("test", [2, 2], [HALF, 1])];
        for error in all.map(Result::unwrap_err) {
            assert!(matches!(error, Error::Argument { op: "test", .. }), "{error}");
        }
    }
}
