//! The extents of a convolution, and which input and output positions meet through which tap.

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

    /// The row of x, numbered across all images, that a row of the kernel reads for a row of y, numbered likewise;
    /// `None` if it lies in the padding.
    pub fn input_row(&self, output_row: usize, kernel_row: usize) -> Option<usize> {
        let (image, row) = (output_row / self.output[0], output_row % self.output[0]);
        let row = (row * self.stride + kernel_row).checked_sub(self.padding)?;
        (row < self.input[0]).then_some(image * self.input[0] + row)
    }

    /// The remainders modulo the stride of the rows or columns of x, counted from the start of the padding, each once.
    pub fn remainders(&self, axis: usize) -> impl Iterator<Item = usize> + use<> {
        let (stride, padding) = (self.stride, self.padding);
        (0..self.input[axis].min(stride)).map(move |row| (row + padding) % stride)
    }

    /// The taps of the kernel along an axis whose index leaves this remainder when divided by the stride.
    pub fn taps_of(&self, axis: usize, remainder: usize) -> std::iter::StepBy<std::ops::Range<usize>> {
        (remainder..self.kernel[axis]).step_by(self.stride)
    }

    /// With padding p and stride s, row (or column) i of y reads row x of the map through tap x + p − i·s. So the taps
    /// that read row `input` are those of [`Self::taps_of`] for the remainder r of input + p modulo s: tap r + q·s does
    /// so for row ⌊(input + p)/s⌋ − q of y. Returns that row for q = 0, which may lie past the last row of y; `None` if
    /// `remainder` is not r. With p = 1 and s = 2, row 4 is read through tap 1 for row 2, and through tap 3, if there
    /// is one, for row 1.
    pub fn position(&self, input: usize, remainder: usize) -> Option<usize> {
        let padded = input + self.padding;
        (padded % self.stride == remainder).then(|| padded / self.stride)
    }
}
