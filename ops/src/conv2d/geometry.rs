//! The extents of a convolution, and who meets whom.

/// All extents of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// N.
    pub images: usize,
    /// H and W.
    pub input: [usize; 2],
    /// I.
    pub inputs: usize,
    /// KH and KW.
    pub kernel: [usize; 2],
    /// HO and WO.
    pub output: [usize; 2],
    /// O.
    pub outputs: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Geometry {
    /// KH·KW.
    pub fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Elements that a row of the kernel sees: KW·I.
    pub fn run(&self) -> usize {
        self.kernel[1] * self.inputs
    }

    /// Elements of a patch: KH·KW·I.
    pub fn patch(&self) -> usize {
        self.taps() * self.inputs
    }

    /// N·HO·WO.
    pub fn pixels(&self) -> usize {
        self.images * self.output[0] * self.output[1]
    }

    /// The row of x, counted through all images, that a row of the kernel sees from a row of y, counted likewise; none
    /// where that is padding.
    pub fn input_row(&self, output_row: usize, kernel_row: usize) -> Option<usize> {
        let (image, row) = (output_row / self.output[0], output_row % self.output[0]);
        let row = (row * self.stride + kernel_row).checked_sub(self.padding)?;
        (row < self.input[0]).then_some(image * self.input[0] + row)
    }

    /// What the rows or columns of x, counted from where the padding begins, leave by the stride.
    pub fn remainders(&self, axis: usize) -> impl Iterator<Item = usize> + use<> {
        let (stride, padding) = (self.stride, self.padding);
        (0..self.input[axis].min(stride)).map(move |row| (row + padding) % stride)
    }

    /// The taps of the kernel along an axis that lie a multiple of the stride behind one.
    pub fn taps_of(&self, axis: usize, remainder: usize) -> std::iter::StepBy<std::ops::Range<usize>> {
        (remainder..self.kernel[axis]).step_by(self.stride)
    }

    /// Of which row or column of y, which may lie behind the last one, the tap `remainder` meets a row or column of x, if
    /// it is one of those that it can meet. The next tap of [`Self::taps_of`] meets it from the one before.
    pub fn position(&self, input: usize, remainder: usize) -> Option<usize> {
        let padded = input + self.padding;
        (padded % self.stride == remainder).then(|| padded / self.stride)
    }
}
