//! What a model is made of besides its structure: parameters and running statistics, created by name.

use crate::error::{Error, Result};
use crate::trace::Trace;
use autograd::{ParamId, Parameters, ParametersBuilder};
use std::collections::HashSet;
use std::fmt;
use std::iter::{repeat, repeat_with};
use tensor::rng::{Philox, Sequence};
use tensor::{DType, Device, Shape, Tensor};

/// Running statistics of one BatchNorm: what evaluation normalises by.
#[derive(Clone, Debug)]
pub struct RunningStatistics {
    /// The BatchNorm's name.
    pub name: String,
    /// (C)
    pub mean: Tensor,
    /// (C), unbiased.
    pub variance: Tensor,
    /// How many batches went in.
    pub batches: u64,
}

/// What a BatchNorm's running statistics are called in a state_dict, behind its name.
pub(crate) const STATISTICS: [&str; 3] = ["running_mean", "running_var", "num_batches_tracked"];

/// Weight of a new batch in the running statistics.
pub(crate) const MOMENTUM: f64 = 0.1;

/// A pass with running statistics of another model.
pub(crate) const FOREIGN_STATISTICS: Error = Error::Pass { reason: "its running statistics are another model's" };

const FOREIGN_TRACE: Error = Error::Pass { reason: "its batch statistics are not those of the model's layers" };

impl RunningStatistics {
    /// Moves the running statistics of a model of one's own, all that its [`Builder`] has returned, a tenth of the way
    /// towards those of a training step's batches, and counts these. A [`BiFormer`](crate::BiFormer) does so by
    /// [`update_statistics`](crate::BiFormer::update_statistics).
    ///
    /// Errors: [`Error::Pass`] if the trace does not fit them, or on a CPU is not finite; [`tensor::Error::Shared`] as
    /// long as there is a pass with them, or a tape that has read them; [`tensor::Error::DType`],
    /// [`tensor::Error::Device`]. After each of these they are as they were.
    pub fn update(all: &mut [RunningStatistics], trace: &Trace) -> Result<()> {
        let Some(RunningStatistics { mean, .. }) = all.first() else { return Self::ensure_of(all, trace) };
        let momentum = Tensor::full_on(&mean.device(), [1], MOMENTUM, mean.dtype())?;
        Self::move_towards(all, trace, &momentum)?;
        Self::count(all, trace);
        Ok(())
    }

    /// Moves them, given their momentum (1).
    pub(crate) fn move_towards(all: &mut [RunningStatistics], trace: &Trace, momentum: &Tensor) -> Result<()> {
        Self::ensure_of(all, trace)?;
        for (id, batch) in &trace.statistics {
            let running = &mut all[id.place];
            for (running, batch) in [(&mut running.mean, &batch.mean), (&mut running.variance, &batch.variance)] {
                running.move_towards(batch, momentum)?;
            }
        }
        Ok(())
    }

    /// Counts the batches.
    pub(crate) fn count(all: &mut [RunningStatistics], trace: &Trace) {
        trace.statistics.iter().for_each(|(id, _)| all[id.place].batches += 1);
    }

    fn ensure_of(all: &[RunningStatistics], trace: &Trace) -> Result<()> {
        for (id, batch) in &trace.statistics {
            let running = id.of(all).map_err(|_| FOREIGN_TRACE)?;
            for (running, batch) in [(&running.mean, &batch.mean), (&running.variance, &batch.variance)] {
                if running.shape() != batch.shape() {
                    return Err(FOREIGN_TRACE);
                }
                let op = "move_towards";
                batch.ensure_dtype(op, running.dtype())?;
                if batch.device() != running.device() {
                    let [expected, actual] = [running, batch].map(|tensor| tensor.device().to_string());
                    return Err(tensor::Error::Device { op, expected, actual }.into());
                }
                running.ensure_unique(op)?;
                // A GPU would have to be waited for: there, a step that is not finite ends the run.
                if batch.device() == Device::Cpu && batch.find(|number| !number.is_finite())?.is_some() {
                    return Err(Error::Pass { reason: "its batch statistics are not finite" });
                }
            }
        }
        Ok(())
    }
}

/// Identifies one of a model's [`RunningStatistics`]. It is also valid for those of another model that have the same
/// name in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatisticsId {
    place: usize,
    /// A checksum of their name, by which another model's are recognised.
    name: u32,
}

impl StatisticsId {
    fn new(place: usize, name: &str) -> Self {
        Self { place, name: crc32fast::hash(name.as_bytes()) }
    }

    /// The statistics that it identifies, of all that a model has. Errors: [`Error::Pass`] if there are others in their
    /// place, or none.
    pub(crate) fn of(self, all: &[RunningStatistics]) -> Result<&RunningStatistics> {
        let own = all.get(self.place).filter(|running| Self::new(self.place, &running.name) == self);
        own.ok_or(FOREIGN_STATISTICS)
    }
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug)]
pub enum Init {
    /// All the same.
    Constant(f64),
    /// Normal with deviation 0.02: linear layers. (The published code cuts at ±2, a hundred deviations away.)
    Normal,
    /// Uniform within ±1/√fan_in, PyTorch's default for convolutions.
    Uniform {
        /// Inputs that one output sums over.
        fan_in: usize,
    },
}

/// Collects parameters and statistics under their state_dict names while a model is being built.
pub struct Builder {
    parameters: ParametersBuilder,
    statistics: Vec<(String, usize)>,
    /// Of the parameters so far, in order.
    pub(crate) ids: Vec<ParamId>,
    /// What a state_dict will call all parameters and statistics.
    pub(crate) keys: HashSet<String>,
    /// None: what would be drawn is zero.
    seed: Option<u64>,
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("keys", &self.keys).field("seed", &self.seed).finish_non_exhaustive()
    }
}

impl Builder {
    /// An empty collection; `seed` decides the initial values.
    pub fn new(seed: u64) -> Self {
        Self { seed: Some(seed), ..Self::blank() }
    }

    /// An empty collection for a model that is to be loaded or only looked at: nothing is drawn. Constants are what
    /// they are elsewhere: a file that lacks a norm's weight must not leave a norm that gives zeros.
    pub fn blank() -> Self {
        let (parameters, keys) = (ParametersBuilder::default(), HashSet::new());
        Self { parameters, statistics: vec![], ids: vec![], keys, seed: None }
    }

    /// Adds a parameter. Its initial values depend on the seed and its name alone. Panics if the name is taken.
    pub fn parameter(&mut self, name: String, shape: impl Into<Shape>, init: Init) -> ParamId {
        const PURPOSE: u64 = 0x69_6E69_7421;
        self.claim([name.clone()]);
        let shape = shape.into();
        let draws = self.seed.map(|seed| {
            let key: Vec<u64> = [PURPOSE].into_iter().chain(name.bytes().map(u64::from)).collect();
            Philox::keyed(seed, &key).sequence()
        });
        let values = init.values(draws).take(shape.count());
        let id = self.parameters.add(name, shape, values);
        self.ids.push(id);
        id
    }

    /// Adds running statistics of `channels` channels. Panics if the name is taken by others.
    pub fn statistics(&mut self, name: String, channels: usize) -> StatisticsId {
        self.claim(STATISTICS.map(|field| format!("{name}.{field}")));
        let id = StatisticsId::new(self.statistics.len(), &name);
        self.statistics.push((name, channels));
        id
    }

    /// Notes what a state_dict will call a tensor: of two of one name it would lose one.
    fn claim(&mut self, keys: impl IntoIterator<Item = String>) {
        for key in keys {
            assert!(self.keys.insert(key.clone()), "two tensors named {key}");
        }
    }

    /// Lays everything out in this type (f32 or f64): parameters with their initial values, and statistics as they are
    /// before the first batch, means of 0 and variances of 1. Errors: those of [`ParametersBuilder::build`].
    pub fn build(self, dtype: DType) -> Result<(Parameters, Vec<RunningStatistics>)> {
        let filled = |channels: usize, value: f64| Tensor::full([channels], value).cast(dtype);
        let statistics = self.statistics.into_iter().map(|(name, channels)| {
            Ok(RunningStatistics { name, mean: filled(channels, 0.0)?, variance: filled(channels, 1.0)?, batches: 0 })
        });
        Ok((self.parameters.build(dtype)?, statistics.collect::<Result<_>>()?))
    }
}

impl Init {
    /// Values without end, drawn from this sequence; without one, zeros instead of what would be drawn.
    fn values(self, draws: Option<Sequence>) -> Box<dyn Iterator<Item = f64> + Send> {
        match (self, draws) {
            (Init::Constant(value), _) => Box::new(repeat(value)),
            (_, None) => Box::new(repeat(0.0)),
            (Init::Normal, Some(mut draws)) => Box::new(repeat_with(move || 0.02 * draws.normal())),
            (Init::Uniform { fan_in }, Some(mut draws)) => {
                // What has no inputs has only a bias.
                let bound = libm::pow(fan_in.max(1) as f64, -0.5);
                Box::new(repeat_with(move || draws.uniform_in(-bound, bound)))
            }
        }
    }
}
