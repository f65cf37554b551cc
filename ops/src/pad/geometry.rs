//! The extents of a padding.

/// The extents of a map before and after.
#[derive(Clone, Copy)]
pub struct Geometry {
    /// H
    pub rows: usize,
    /// H + bottom
    pub padded_rows: usize,
    /// W·C, the elements of a row
    pub row: usize,
    /// (W + right)·C
    pub padded_row: usize,
}
