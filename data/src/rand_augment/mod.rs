//! RandAugment (Cubuk et al., "RandAugment: practical automated data augmentation", 2019) as timm has it with `inc1`: a
//! few operations an image, any of fifteen, each of which changes an image the more the higher its magnitude is.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | [`Operation`], what each makes of a magnitude, and how they are drawn |
//! | `colour.rs` | those that change colours where they are |
//! | `geometry.rs` | those that move pixels |
//!
//! Each gives the bytes that Pillow gave when the published weights were trained. (Newer versions refuse
//! [`Operation::Posterize`] with 0 bits, which made an image black.)

mod colour;
mod geometry;
#[cfg(test)]
mod tests;

use tensor::rng::Sequence;

use crate::Augmentation;
use geometry::Affine;

/// The highest magnitude.
pub(crate) const MAX_MAGNITUDE: f64 = 10.0;
/// How often an operation that was drawn is applied.
const APPLIED: f64 = 0.5;

/// What may be done to a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    AutoContrast,
    Equalize,
    Invert,
    Rotate,
    Posterize,
    Solarize,
    SolarizeAdd,
    Color,
    Contrast,
    Brightness,
    Sharpness,
    ShearX,
    ShearY,
    TranslateX,
    TranslateY,
}

impl Operation {
    const ALL: [Self; 15] = [
        Self::AutoContrast,
        Self::Equalize,
        Self::Invert,
        Self::Rotate,
        Self::Posterize,
        Self::Solarize,
        Self::SolarizeAdd,
        Self::Color,
        Self::Contrast,
        Self::Brightness,
        Self::Sharpness,
        Self::ShearX,
        Self::ShearY,
        Self::TranslateX,
        Self::TranslateY,
    ];
}

/// A square picture, and room for what an operation makes of it.
pub(crate) struct Canvas {
    side: usize,
    pixels: Vec<[u8; 3]>,
    spare: Vec<[u8; 3]>,
}

impl Canvas {
    /// A black picture.
    pub fn new(side: usize) -> Self {
        let pixels = vec![[0; 3]; side * side];
        Self { side, spare: pixels.clone(), pixels }
    }

    pub fn pixels(&self) -> &[[u8; 3]] {
        &self.pixels
    }

    pub fn pixels_mut(&mut self) -> &mut [[u8; 3]] {
        &mut self.pixels
    }

    /// Transforms the picture; pixels that nothing of it is moved to become `fill`.
    fn transform(&mut self, map: Affine, fill: [u8; 3]) {
        map.apply(&self.pixels, self.side, fill, &mut self.spare);
        std::mem::swap(&mut self.pixels, &mut self.spare);
    }
}

/// An operation that is applied, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    operation: Operation,
    /// In 0..=10.
    magnitude: f64,
    /// Whether those with two directions (rotating to the left or to the right, more or less colour) take the second.
    negative: bool,
}

impl Step {
    fn apply(self, canvas: &mut Canvas, fill: [u8; 3]) {
        let part = self.magnitude / MAX_MAGNITUDE;
        let signed = if self.negative { -part } else { part };
        let factor = (1.0 + signed * 0.9).max(0.1) as f32;
        let pixels = &mut canvas.pixels;
        match self.operation {
            Operation::AutoContrast => colour::auto_contrast(pixels),
            Operation::Equalize => colour::equalize(pixels),
            Operation::Invert => colour::map(pixels, |byte| 255 - byte),
            Operation::Posterize => colour::posterize(pixels, 4 - (part * 4.0) as u32),
            Operation::Solarize => colour::solarize(pixels, 256 - (part * 256.0) as usize),
            Operation::SolarizeAdd => colour::solarize_add(pixels, (part * 110.0) as u8),
            Operation::Color => colour::saturation(pixels, factor),
            Operation::Contrast => colour::contrast(pixels, factor),
            Operation::Brightness => colour::brightness(pixels, factor),
            Operation::Sharpness => colour::sharpness(canvas, factor),
            Operation::Rotate => canvas.transform(Affine::rotation(signed * 30.0, canvas.side), fill),
            Operation::ShearX => canvas.transform(Affine::shear_x(signed * 0.3), fill),
            Operation::ShearY => canvas.transform(Affine::shear_y(signed * 0.3), fill),
            Operation::TranslateX => canvas.transform(Affine::shift_x(signed * 0.45 * canvas.side as f64), fill),
            Operation::TranslateY => canvas.transform(Affine::shift_y(signed * 0.45 * canvas.side as f64), fill),
        }
    }
}

/// How pictures are varied.
pub(crate) struct RandAugment {
    operations: usize,
    magnitude: f64,
    magnitude_std: f64,
    /// The colour of pixels that a moved picture no longer covers.
    fill: [u8; 3],
}

impl RandAugment {
    /// As the augmentation says; nothing where it asks for no operation.
    pub fn new(augmentation: &Augmentation, fill: [u8; 3]) -> Option<Self> {
        let Augmentation { rand_augment: operations, magnitude, magnitude_std, .. } = *augmentation;
        (operations > 0).then_some(Self { operations, magnitude, magnitude_std, fill })
    }

    pub fn apply(&self, canvas: &mut Canvas, random: &mut Sequence) {
        for _ in 0..self.operations {
            if let Some(step) = self.draw(random) {
                step.apply(canvas, self.fill);
            }
        }
    }

    /// One of the operations, or none in half the cases.
    fn draw(&self, random: &mut Sequence) -> Option<Step> {
        let operation = Operation::ALL[random.below(Operation::ALL.len())];
        (random.uniform() < APPLIED).then(|| {
            let magnitude = (self.magnitude + self.magnitude_std * random.normal()).clamp(0.0, MAX_MAGNITUDE);
            Step { operation, magnitude, negative: random.uniform() < 0.5 }
        })
    }
}
