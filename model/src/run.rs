//! How images run through the model: stage by stage, and how many of them together.

use crate::biformer::{BiFormer, Merging, Tail};
use crate::config::Features;
use crate::error::{Error, Result};
use crate::factors::Factors;
use crate::pass::{Mode, Pass};
use crate::trace::Trace;
use autograd::{Tape, Var};
use std::sync::Arc;
use tensor::{DType, Device, Tensor};

/// The result of a pass.
#[derive(Debug)]
pub struct Output<'t> {
    /// As the configuration's [`Features`] say: logits (N, classes), the pooled last map (N, C), or the stages' maps
    /// (N, H, W, C).
    pub values: Vec<Var<'t>>,
    /// What those are.
    pub features: Features,
    /// What the pass leaves beside its values: statistics to be applied after a training step, and what was asked for.
    pub trace: Trace,
}

impl<'t> Output<'t> {
    /// A classifier's logits (N, classes). [`Error::Headless`]: the model has no head.
    pub fn logits(&self) -> Result<&Var<'t>> {
        match (self.features, &self.values[..]) {
            (Features::Logits, [logits]) => Ok(logits),
            (features, _) => Err(Error::Headless { features: features.name() }),
        }
    }
}

impl BiFormer {
    /// A pass with the model's parameters, [factors](BiFormer::factors) and running statistics: to be given options,
    /// for [`run`](BiFormer::run), and for layers [beside](BiFormer::with) the model. Errors: those of the device.
    pub fn pass<'t>(&self, tape: &'t Tape, mode: Mode) -> Result<Pass<'t>> {
        Ok(self.pass_with(self.factors()?, tape, mode))
    }

    /// The same with the parameters' [factors](BiFormer::factors), or [prepared](BiFormer::prepared), for passes
    /// between which they do not change. Those of another model, or prepared ones in training, are refused by
    /// [`run`](BiFormer::run).
    pub fn pass_with<'t>(&self, factors: Factors, tape: &'t Tape, mode: Mode) -> Pass<'t> {
        Pass::new(tape, mode, &self.parameters, &self.statistics).with_factors(factors)
    }

    /// A pass over images (N, H, W, 3), which are brought to the model's device and its type. Errors:
    /// [`Error::ImageSize`](crate::Error::ImageSize); [`tensor::Error::Shape`] and [`tensor::Error::DType`] for what
    /// are no images; those of the device.
    pub fn forward<'t>(&self, tape: &'t Tape, images: &Tensor, mode: Mode) -> Result<Output<'t>> {
        self.output(self.pass(tape, mode)?, images)
    }

    pub(crate) fn output<'t>(&self, pass: Pass<'t>, images: &Tensor) -> Result<Output<'t>> {
        let values = self.run(&pass, images)?;
        Ok(Output { values, features: self.config().features, trace: pass.into_trace() })
    }

    /// A pass whose options and trace are the caller's. Errors: as those of [`BiFormer::forward`], and
    /// [`Error::Pass`](crate::Error::Pass) where it is not for this model.
    ///
    /// On the CPU, inference processes a batch [a number of images](BiFormer::images_at_once) at a time: a large batch
    /// needs hardly more memory than a small one, and is as fast.
    pub fn run<'t>(&self, pass: &Pass<'t>, images: &Tensor) -> Result<Vec<Var<'t>>> {
        let image = self.grouping(pass, images)?;
        let together = |pass: &Pass<'t>, images: &Tensor| {
            let images = images.contiguous()?.to_device(&self.device())?.cast(self.map_type)?;
            self.run_together(pass, pass.tape().constant(images), image)
        };
        match self.images_at_once(image) {
            Some(at_once) if pass.is_inference() => pass.in_turn(images, at_once, together),
            _ => together(pass, images),
        }
    }

    /// The same of images that are on the tape already, all together: as an [input](Tape::input) they get a gradient,
    /// which tells on which of their pixels a result depends. Their type must be the maps' ([`tensor::Error::DType`])
    /// and their place the model's ([`tensor::Error::Device`]).
    pub fn run_on<'t>(&self, pass: &Pass<'t>, images: &Var<'t>) -> Result<Vec<Var<'t>>> {
        let image = self.grouping(pass, images.value())?;
        images.value().ensure_dtype("biformer", self.map_type)?;
        self.run_together(pass, images.clone(), image)
    }

    /// The size as which a pass groups images (N, H, W, 3), if model and pass are for them.
    fn grouping(&self, pass: &Pass<'_>, images: &Tensor) -> Result<[usize; 2]> {
        pass.ensure_of(self.parameters.layout(), &self.statistics)?;
        let [_, height, width, channels] = images.dims("biformer", "images (N, H, W, 3)")?;
        if channels != 3 {
            return Err(tensor::Error::shape("biformer", "images (N, H, W, 3)", images.shape()).into());
        }
        if images.dtype() == DType::Index {
            return Err(
                tensor::Error::DType { op: "biformer", expected: "floating-point", actual: DType::Index }.into()
            );
        }
        self.config().check_image(height, width)?;
        Ok(pass.grouping([height, width]))
    }

    /// How many images of this height and width inference processes at a time: as many as keep all threads busy in
    /// every stage. None on a GPU, which processes the whole batch at once.
    pub fn images_at_once(&self, image: [usize; 2]) -> Option<usize> {
        if self.device() != Device::Cpu {
            return None;
        }
        let in_stage = (0..self.stages.len()).map(|stage| self.images_per_piece(image, stage));
        Some(rayon::current_num_threads() * in_stage.max().unwrap_or(1))
    }

    /// Runs images (N, H, W, 3) together, from the first stage to the results, grouped as images of the size `image`
    /// are.
    fn run_together<'t>(&self, pass: &Pass<'t>, images: Var<'t>, image: [usize; 2]) -> Result<Vec<Var<'t>>> {
        let (x, maps) = if pass.is_inference() {
            let x = self.depth_first(pass, &images, image, self.stages.len())?;
            (x, pass.take_outputs())
        } else {
            self.stage_by_stage(pass, images, image)?
        };
        let Tail::Pool { norm, head } = &self.tail else { return Ok(maps) };
        let pooled = ops::mean_pool(&norm.forward(pass, &x)?)?;
        Ok(vec![match head {
            Some(head) => head.forward(pass, &pooled)?,
            None => pooled,
        }])
    }

    /// The last map and, for a backbone, the maps of all stages: each stage runs on all images before the next. In
    /// training, batch normalisation needs the whole batch.
    fn stage_by_stage<'t>(
        &self,
        pass: &Pass<'t>,
        images: Var<'t>,
        image: [usize; 2],
    ) -> Result<(Var<'t>, Vec<Var<'t>>)> {
        let (mut x, mut maps) = (images, vec![]);
        for stage in 0..self.stages.len() {
            x = self.merge(pass, x, stage)?;
            x =
                pass.in_pieces(&x, self.images_per_piece(image, stage), |pass, x| self.blocks(pass, x.clone(), stage))?;
            if let Tail::Dense(norms) = &self.tail {
                maps.push(norms[stage].forward(pass, &x)?);
            }
        }
        Ok((x, maps))
    }

    /// The last map of the first `stages` stages, in inference. Earlier stages have larger maps and run on fewer images
    /// at a time; each group that the last stage takes is assembled from several such runs, so the large maps of a
    /// whole batch are never in memory at once.
    fn depth_first<'t>(&self, pass: &Pass<'t>, images: &Var<'t>, image: [usize; 2], stages: usize) -> Result<Var<'t>> {
        let Some(last) = stages.checked_sub(1) else { return Ok(images.clone()) };
        pass.in_pieces(images, self.images_per_piece(image, last), |pass, images| {
            let x = self.merge(pass, self.depth_first(pass, images, image, last)?, last)?;
            let x = self.blocks(pass, x, last)?;
            if let Tail::Dense(norms) = &self.tail {
                pass.record_output(last, norms[last].forward(pass, &x)?);
            }
            Ok(x)
        })
    }

    /// What comes before the blocks of a stage.
    fn merge<'t>(&self, pass: &Pass<'t>, x: Var<'t>, stage: usize) -> Result<Var<'t>> {
        let x = self.stages[stage].merging.iter().try_fold(x, |x, step| match step {
            Merging::Conv(conv) => conv.forward(pass, &x),
            Merging::Norm(norm) => norm.forward(pass, &x),
        })?;
        pass.record_map(|| format!("down{stage}"), &x);
        Ok(x)
    }

    /// The blocks of a stage.
    fn blocks<'t>(&self, pass: &Pass<'t>, x: Var<'t>, stage: usize) -> Result<Var<'t>> {
        let x = self.stages[stage].blocks.iter().try_fold(x, |x, block| {
            let block = Arc::clone(block);
            pass.segment(x, move |pass, x| block.forward(pass, x))
        })?;
        pass.record_map(|| format!("stage{stage}"), &x);
        Ok(x)
    }

    /// How many images of a height and width run through a stage together: as many as keep a block's widest maps, about
    /// three times the stage's channels, in a core's cache, but at least enough tokens to make the cost of reading a
    /// layer's weights small beside that of multiplying by them (twice as many in bf16, which multiplies faster).
    fn images_per_piece(&self, image: [usize; 2], stage: usize) -> usize {
        const CACHE: usize = 1 << 19;
        let [height, width] = image.map(|side| self.config().map_side(side, stage));
        let (tokens, channels) = (height.saturating_mul(width).max(1), self.config().embed_dim[stage]);
        let bytes = tokens.saturating_mul(3 * channels * self.map_type.size());
        let fit = CACHE / bytes.max(1);
        let worth_reading = if self.factor_type == DType::Bf16 { 2 * channels } else { channels };
        fit.max(worth_reading.div_ceil(tokens)).max(1)
    }
}
