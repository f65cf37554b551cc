//! One pass through a model: what its layers share on the way.

use crate::RunningStatistics;
use crate::attention_weights::{mean, token_at};
use crate::error::{Error, Result};
use crate::factors::Factors;
use crate::state::{FOREIGN_STATISTICS, StatisticsId};
use crate::trace::{Routes, Trace};
use autograd::{Layout, ParamId, Parameters, Tape, Var};
use ops::BatchStatistics;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::Arc;
use tensor::Tensor;
use tensor::rng::Philox;

/// Whether a pass is for training or for use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// Batch statistics, unless the layer is frozen; branches of samples dropped at random, unless all of the block is
    /// frozen, as a function of this seed and this step alone.
    Train {
        /// The run's seed.
        seed: u64,
        /// The step of the run or, if passes are more than steps, the number of the pass: two with the same number drop
        /// the same branches.
        step: u64,
    },
    /// Running statistics, nothing dropped.
    Evaluate,
}

impl Mode {
    /// The random stream of the `draw`-th draw of a pass, in training.
    pub fn stream(self, draw: u64) -> Option<Philox> {
        const PURPOSE: u64 = 0x64_726F_7021;
        let Mode::Train { seed, step } = self else { return None };
        Some(Philox::keyed(seed, &[PURPOSE, step, draw]))
    }
}

/// The state of one pass, or of a part of it: a segment, or some of the images.
pub struct Pass<'t> {
    tape: &'t Tape,
    given: Arc<Given>,
    /// Draws so far: each gets a random stream of its own.
    draws: Cell<u64>,
    /// Which image of the batch is the first of this pass.
    first_image: usize,
    trace: RefCell<Trace>,
}

impl fmt::Debug for Pass<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass")
            .field("mode", &self.given.mode)
            .field("first_image", &self.first_image)
            .field("trace", &self.trace)
            .finish_non_exhaustive()
    }
}

/// What all parts of a pass have in common.
#[derive(Clone)]
struct Given {
    mode: Mode,
    parameters: Arc<Parameters>,
    factors: Factors,
    /// Whether the parameters are constants of the tape.
    constant: bool,
    running: Vec<RunningStatistics>,
    /// Image size that decides how many images are processed together in a stage; none: their actual size.
    grouped_as: Option<[usize; 2]>,
    keeps_maps: bool,
    /// The point of the images whose attention is to be recorded, if any.
    attention_from: Option<[f64; 2]>,
}

impl<'t> Pass<'t> {
    /// A pass on a tape, through layers of one's own; through a BiFormer, [`BiFormer::pass`](crate::BiFormer::pass). It
    /// shares the parameters and the running statistics: while it lives, or a segment that it left on a tape, neither
    /// can be written ([`tensor::Error::Shared`]). [`into_trace`](Self::into_trace) ends it.
    ///
    /// A layer that runs on a pass with another model's parameters panics, unless that model has one of the same name
    /// in the place of each; with another model's statistics it fails ([`Error::Pass`]) under the same condition.
    /// [`BiFormer::run`](crate::BiFormer::run) checks all names and shapes.
    pub fn new(tape: &'t Tape, mode: Mode, parameters: &Parameters, running: &[RunningStatistics]) -> Self {
        let factors = Factors::unrounded(parameters);
        let (parameters, running) = (Arc::new(parameters.share()), running.to_vec());
        let given = Given {
            mode,
            parameters,
            factors,
            constant: false,
            running,
            grouped_as: None,
            keeps_maps: false,
            attention_from: None,
        };
        Self::part(tape, Arc::new(given), 0, 0)
    }

    /// A part of a pass, from an image and a draw on.
    fn part(tape: &'t Tape, given: Arc<Given>, first_image: usize, draws: u64) -> Self {
        Self { tape, given, draws: Cell::new(draws), first_image, trace: RefCell::default() }
    }

    fn with(mut self, change: impl FnOnce(&mut Given)) -> Self {
        change(Arc::make_mut(&mut self.given));
        self
    }

    /// Makes linear layers and convolutions use these: [`BiFormer::factors`](crate::BiFormer::factors), or
    /// [`BiFormer::prepared`](crate::BiFormer::prepared), as [`BiFormer::pass_with`](crate::BiFormer::pass_with) does;
    /// for other parameters than the model's, such as their average, [`Factors::new`]. Without them, layers use the
    /// parameters as they are, even in a model that is placed in bf16.
    pub fn with_factors(self, factors: Factors) -> Self {
        self.with(|given| given.factors = factors)
    }

    /// Keeps the maps after each merging and each stage in the trace.
    pub fn keep_maps(self) -> Self {
        self.with(|given| given.keeps_maps = true)
    }

    /// Records in the trace how much the token at a point of each image attends to each token, in each attention. The
    /// point is given as parts of the image's height and width, from 0 to 1 (outside, the nearest counts). With soft
    /// routing the weights include the regions' shares, and where a map is padded, what goes to padding is left out: so
    /// they need not sum to 1.
    pub fn attention_from(self, point: [f64; 2]) -> Self {
        self.with(|given| given.attention_from = Some(point))
    }

    /// Takes the parameters as constants of the tape, so that nothing is computed for their gradients: for a teacher,
    /// or for the gradients of images.
    pub fn with_constant_parameters(self) -> Self {
        self.with(|given| given.constant = true)
    }

    /// Processes as many images of a stage together as it would for images of this height and width, so that measuring
    /// small images shows in proportion how much memory large ones need.
    pub fn grouped_as(self, image: [usize; 2]) -> Self {
        self.with(|given| given.grouped_as = Some(image))
    }

    /// Checks that parameters, statistics and factors are those of a model with this layout and these statistics, and
    /// fit the mode.
    pub(crate) fn ensure_of(&self, layout: &Arc<Layout>, running: &[RunningStatistics]) -> Result<()> {
        fn of(running: &[RunningStatistics]) -> impl Iterator<Item = (&str, usize)> {
            running.iter().map(|running| (&running.name[..], running.mean.count()))
        }
        if !of(running).eq(of(&self.given.running)) {
            return Err(FOREIGN_STATISTICS);
        }
        let reason = match self.given.mode {
            _ if self.given.parameters.layout() != layout => "its parameters are another model's",
            _ if !self.given.factors.are_of(&self.given.parameters, &self.given.running) => {
                "its factors were made of other parameters than its own, or before these were frozen or moved: make them \
                 anew"
            }
            Mode::Train { .. } if self.given.factors.are_prepared() => {
                "what was prepared for inference cannot be trained: take factors()"
            }
            _ => return Ok(()),
        };
        Err(Error::Pass { reason })
    }

    /// The image size that decides how images of this size are grouped.
    pub(crate) fn grouping(&self, image: [usize; 2]) -> [usize; 2] {
        self.given.grouped_as.unwrap_or(image)
    }

    /// The tape.
    pub fn tape(&self) -> &'t Tape {
        self.tape
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.given.mode
    }

    /// A part of the model from x on, as a [segment](Tape::segment) of the tape: one that recomputes segments keeps x
    /// and nothing else of it. `work` runs on a pass that goes on from this one, and a second time on one that
    /// draws the same random streams; the trace takes in what the first run leaves behind. Errors: those of
    /// [`Tape::segment`].
    pub fn segment(
        &self,
        x: Var<'t>,
        work: impl for<'s> Fn(&Pass<'s>, Var<'s>) -> Result<Var<'s>> + Send + 'static,
    ) -> Result<Var<'t>> {
        let (given, first_image, draws) = (Arc::clone(&self.given), self.first_image, self.draws.get());
        let (y, (draws, trace)) = self.tape.segment([x], move |tape, [x]| {
            let pass = Pass::part(tape, Arc::clone(&given), first_image, draws);
            let y = work(&pass, x)?;
            Ok::<_, Error>((y, (pass.draws.get(), pass.into_trace())))
        })?;
        self.draws.set(draws);
        self.trace.borrow_mut().append(trace);
        Ok(y)
    }

    /// Runs a part of the model, from x (N, ...) on, that treats each image independently, on `size` images at a time:
    /// see [`Tape::in_pieces`], also about locks. Errors: also [`Error::Pass`] if that part does not treat them
    /// independently, because it normalises by its batch.
    pub fn in_pieces(
        &self,
        x: &Var<'t>,
        size: usize,
        work: impl for<'s> Fn(&Pass<'s>, &Var<'s>) -> Result<Var<'s>> + Sync,
    ) -> Result<Var<'t>> {
        if x.shape().first().is_none_or(|&images| images <= size) {
            return work(self, x);
        }
        let (given, first_image, draws) = (&self.given, self.first_image, self.draws.get());
        let (y, left) = self.tape.in_pieces(x, size, |x, images| {
            let pass = Pass::part(x.tape(), Arc::clone(given), first_image + images.start, draws);
            let y = work(&pass, x)?;
            Ok::<_, Error>((y, (pass.draws.get(), pass.into_trace())))
        })?;
        let (draws, traces): (Vec<u64>, Vec<Trace>) = left.into_iter().unzip();
        self.draws.set(draws.into_iter().fold(self.draws.get(), u64::max));
        self.trace.borrow_mut().append(Trace::joined(traces)?);
        Ok(y)
    }

    /// Whether images are computed independently, for their results only: nothing is recorded on the tape, and no batch
    /// statistics are used.
    pub(crate) fn is_inference(&self) -> bool {
        self.tape.is_inference() && self.given.mode == Mode::Evaluate
    }

    /// In inference, the whole model on `size` of the images (N, ...) at a time, one part of the batch after another,
    /// so that memory is needed for one part only. The values are joined, and so are the traces.
    pub(crate) fn in_turn(
        &self,
        images: &Tensor,
        size: usize,
        work: impl Fn(&Pass<'t>, &Tensor) -> Result<Vec<Var<'t>>>,
    ) -> Result<Vec<Var<'t>>> {
        let count = images.shape()[0];
        if count <= size {
            return work(self, images);
        }
        let parts = count.div_ceil(size);
        let (mut values, mut traces) = (vec![], vec![]);
        for part in 0..parts {
            let images = images.slice(0, part * count / parts..(part + 1) * count / parts)?;
            let pass = Pass::part(self.tape, Arc::clone(&self.given), 0, 0);
            values.push(work(&pass, &images)?.into_iter().map(Var::into_value).collect::<Vec<_>>());
            traces.push(pass.into_trace());
        }
        self.trace.borrow_mut().append(Trace::joined(traces)?);
        let join = |place: usize| -> Result<Var<'t>> {
            let parts: Vec<Tensor> = values.iter().map(|part| part[place].clone()).collect();
            Ok(self.tape.constant(Tensor::join(&parts)?))
        };
        (0..values.first().map_or(0, Vec::len)).map(join).collect()
    }

    /// A parameter, on the tape.
    pub fn parameter(&self, id: ParamId) -> Var<'t> {
        match self.given.constant {
            true => self.tape.constant(self.given.parameters.get(id)),
            false => self.tape.parameter(&self.given.parameters, id),
        }
    }

    /// Whether a parameter is frozen.
    pub fn is_frozen(&self, id: ParamId) -> bool {
        self.given.parameters.layout().is_frozen(id)
    }

    /// A weight or bias of a linear layer or convolution, in the type that these multiply in.
    pub fn factor(&self, id: ParamId) -> Var<'t> {
        self.given.factors.on(self.tape, id, self.given.constant)
    }

    /// The same as a matrix.
    pub(crate) fn factor_as(&self, id: ParamId, extents: [usize; 2]) -> Result<Var<'t>> {
        self.given.factors.on_as(self.tape, id, extents, self.given.constant)
    }

    /// Whether a BatchNorm has been folded into the convolution before it.
    pub(crate) fn is_folded(&self, norm: StatisticsId) -> bool {
        self.given.factors.is_folded(norm)
    }

    /// Whether a convolution applies the GELU after the BatchNorm that has been folded into it.
    pub(crate) fn applies_gelu(&self, weight: ParamId) -> bool {
        self.given.factors.applies_gelu(weight)
    }

    /// The running statistics of a BatchNorm. Errors: [`Error::Pass`] if the pass has another model's.
    pub fn running(&self, id: StatisticsId) -> Result<&RunningStatistics> {
        id.of(&self.given.running)
    }

    /// A random stream for the next draw, in training.
    pub fn stream(&self) -> Option<Philox> {
        let draw = self.draws.get();
        let stream = self.given.mode.stream(draw)?;
        self.draws.set(draw + 1);
        self.trace.borrow_mut().draws.push(draw);
        Some(stream)
    }

    /// Leaves out the next draw, so that later ones are what they would be with it.
    pub fn skip_stream(&self) {
        self.draws.set(self.draws.get() + 1);
    }

    /// Which image of the batch is the first of this pass. Within a branch that images may
    /// [skip](ops::drop_path_residual), rows are not numbered from it.
    pub fn first_image(&self) -> usize {
        self.first_image
    }

    pub(crate) fn record_statistics(&self, id: StatisticsId, batch: BatchStatistics) {
        self.trace.borrow_mut().statistics.push((id, batch));
    }

    /// Records where the regions of an attention look, in the [trace](Trace::routes).
    pub fn record_routes(&self, routes: Routes) {
        self.trace.borrow_mut().routes.push(routes);
    }

    /// Records how much the token at the requested point attends to each token of an attention's map, without its
    /// padding: (H, W). `weights` gives a token's, with padding.
    pub(crate) fn record_attention_weights(
        &self,
        name: &str,
        map: [usize; 2],
        weights: impl FnOnce([usize; 2]) -> tensor::Result<Tensor>,
    ) -> Result<()> {
        if let Some(point) = self.given.attention_from {
            let mean = mean(&weights(token_at(point, map))?, map)?;
            self.trace.borrow_mut().attention_weights.push((name.to_owned(), mean));
        }
        Ok(())
    }

    pub(crate) fn record_map(&self, name: impl FnOnce() -> String, map: &Var<'t>) {
        let mut trace = self.trace.borrow_mut();
        if self.given.keeps_maps {
            trace.maps.push((name(), map.value().clone()));
        }
    }

    /// Keeps a stage's map, of some of the images, as a part of the results.
    pub(crate) fn record_output(&self, stage: usize, map: Var<'t>) {
        self.trace.borrow_mut().outputs.push((format!("out{stage}"), map.into_value()));
    }

    /// The stages' maps that were kept.
    pub(crate) fn take_outputs(&self) -> Vec<Var<'t>> {
        let outputs = std::mem::take(&mut self.trace.borrow_mut().outputs);
        outputs.into_iter().map(|(_, map)| self.tape.constant(map)).collect()
    }

    /// What the pass left behind.
    pub fn into_trace(self) -> Trace {
        self.trace.into_inner()
    }
}
