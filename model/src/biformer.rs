//! The whole model.

use crate::block::Block;
use crate::config::{Family, Features, ModelConfig};
use crate::error::{Error, Result, did_you_mean, nearest};
use crate::factors::{Factors, Prepared};
use crate::layers::{BatchNorm, Conv, LayerNorm, Linear};
use crate::state::{Builder, MOMENTUM, RunningStatistics};
use crate::trace::Trace;
use autograd::Parameters;
use ops::Conv2d;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use tensor::{DType, Device, Tensor};

/// BiFormer: stages of blocks, each preceded by a merging that shrinks the map; then a classifier, or the features that
/// it would classify by, or the maps.
pub struct BiFormer {
    config: ModelConfig,
    pub(crate) stages: Vec<Stage>,
    pub(crate) tail: Tail,
    /// The trainable parameters, under the names of the published state_dict.
    pub parameters: Parameters,
    /// The running statistics of the BatchNorms.
    pub statistics: Vec<RunningStatistics>,
    /// The type that layers and convolutions multiply in.
    pub(crate) factor_type: DType,
    /// The type of the maps between layers.
    pub(crate) map_type: DType,
    /// [`MOMENTUM`] as a tensor of shape (1), on the device of the statistics.
    momentum: Tensor,
    /// Names of what is not the model's own: see [`BiFormer::with`].
    pub(crate) added: HashSet<String>,
}

impl fmt::Debug for BiFormer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BiFormer")
            .field("config", &self.config)
            .field("parameters", &self.parameters.layout().count())
            .field("device", &self.device())
            .finish_non_exhaustive()
    }
}

pub(crate) struct Stage {
    pub merging: Vec<Merging>,
    /// Shared with the tapes that run a block once more in the backward pass.
    pub blocks: Vec<Arc<Block>>,
}

/// A step of what comes before a stage.
pub(crate) enum Merging {
    Conv(Conv),
    Norm(BatchNorm),
}

pub(crate) enum Tail {
    /// Without a head, the pooled map is the result.
    Pool {
        norm: BatchNorm,
        head: Option<Linear>,
    },
    Dense(Vec<LayerNorm>),
}

impl BiFormer {
    /// A new model in f32 or f64. The seed decides its initial weights. Errors:
    /// [`Error::Config`](crate::Error::Config); [`tensor::Error::DType`] for another type.
    pub fn new(config: &ModelConfig, seed: u64, dtype: DType) -> Result<Self> {
        Ok(Self::build(config, Builder::new(seed), dtype, |_| ())?.0)
    }

    /// A new model together with a program's own layers, such as a head: `more` makes them, and their parameters and
    /// statistics are stored after the model's. So values can pass through both on one tape, and both share one
    /// optimiser, one file and one device. Their names must differ from the model's: a name that is taken is a
    /// programming error, and panics. They run on the model's [`pass`](Self::pass), as [`BiFormer::run`] does.
    /// [`BiFormer::load`] accepts files without them. Errors: those of [`BiFormer::new`].
    pub fn with<T>(
        config: &ModelConfig,
        seed: u64,
        dtype: DType,
        more: impl FnOnce(&mut Builder) -> T,
    ) -> Result<(Self, T)> {
        Self::build(config, Builder::new(seed), dtype, more)
    }

    /// A model in which weights that would be drawn at random are zero: to be loaded, or only inspected. Errors: those
    /// of [`BiFormer::new`].
    pub fn blank(config: &ModelConfig, dtype: DType) -> Result<Self> {
        Ok(Self::build(config, Builder::blank(), dtype, |_| ())?.0)
    }

    fn build<T>(
        config: &ModelConfig,
        mut builder: Builder,
        dtype: DType,
        more: impl FnOnce(&mut Builder) -> T,
    ) -> Result<(Self, T)> {
        config.check()?;
        let stages = (0..config.stages()).map(|stage| merging(&mut builder, config, stage)).collect::<Vec<_>>();
        let stages = stages
            .into_iter()
            .enumerate()
            .map(|(stage, merging)| {
                let blocks = (0..config.depth[stage]).map(|index| {
                    let inner = if config.family == Family::Biformer { "" } else { "blocks." };
                    let name = format!("stages.{stage}.{inner}{index}");
                    let before: usize = config.depth[..stage].iter().sum();
                    Arc::new(Block::new(&mut builder, &name, config, stage, config.drop_path_of(before + index)))
                });
                Stage { merging, blocks: blocks.collect() }
            })
            .collect();
        let last = config.embed_dim[config.stages() - 1];
        let tail = match config.features {
            Features::Logits => Tail::Pool {
                norm: BatchNorm::new(&mut builder, "norm", last),
                head: Some(Linear::new(&mut builder, "head", last, config.num_classes, true)),
            },
            Features::Pooled => Tail::Pool { norm: BatchNorm::new(&mut builder, "norm", last), head: None },
            Features::Dense => {
                let norm = |(stage, &dim)| LayerNorm::new(&mut builder, &format!("extra_norms.{stage}"), dim);
                Tail::Dense(config.embed_dim.iter().enumerate().map(norm).collect())
            }
        };
        let own = builder.keys.clone();
        let layers = more(&mut builder);
        let added = builder.keys.difference(&own).cloned().collect();
        let (parameters, statistics) = builder.build(dtype)?;
        let model = Self {
            config: config.clone(),
            stages,
            tail,
            parameters,
            statistics,
            factor_type: dtype,
            map_type: dtype,
            momentum: Tensor::full_on(&Device::Cpu, [1], MOMENTUM, dtype)?,
            added,
        };
        Ok((model, layers))
    }

    /// Its configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Moves the model to a device, where its layers and convolutions multiply in the type `factors`: that of its
    /// parameters, or bf16 if those are f32, and then on a GPU the maps between them are bf16, too. Gradients,
    /// optimisers and averages are on the device where the parameters were when they were made: make them after this.
    /// Errors: those of the device; [`tensor::Error::DType`] for another type.
    pub fn place(&mut self, device: &Device, factors: DType) -> Result<()> {
        let own = self.parameters.layout().dtype();
        if factors != own && (own, factors) != (DType::F32, DType::Bf16) {
            let expected = if own == DType::F32 { "f32 or bf16" } else { own.name() };
            return Err(tensor::Error::DType { op: "place", expected, actual: factors }.into());
        }
        // All of it or nothing, should the device fail half way.
        let mut statistics = self.statistics.clone();
        for running in &mut statistics {
            running.mean = running.mean.to_device(device)?;
            running.variance = running.variance.to_device(device)?;
        }
        let momentum = self.momentum.to_device(device)?;
        self.parameters = self.parameters.to_device(device)?;
        (self.statistics, self.momentum) = (statistics, momentum);
        (self.factor_type, self.map_type) = match device {
            Device::Cpu => (factors, self.parameters.layout().dtype()),
            Device::Cuda(_) => (factors, factors),
        };
        Ok(())
    }

    /// Freezes the parts of these names, `head` or `stages.0` for instance, and thaws all others: see
    /// [`Parameters::freeze`](autograd::Parameters::freeze). A frozen BatchNorm keeps its running statistics, and
    /// normalises by them in training, too. [`Error::Part`]: a name that no part has, or all parts.
    pub fn freeze<S: AsRef<str>>(&mut self, parts: &[S]) -> Result<()> {
        let names: Vec<&str> = self.parameters.layout().ids().map(|id| self.parameters.layout().name(id)).collect();
        let unknown = parts.iter().map(S::as_ref).find(|part| !names.iter().any(|name| is_within(name, part)));
        let frozen = |name: &str| parts.iter().any(|part| is_within(name, part.as_ref()));
        let mut known: Vec<String> = names.iter().map(|name| part_of(name)).collect();
        known.dedup();
        let reason = match unknown {
            Some(part) => {
                // The largest parts, and the first words of their names (`stages`).
                let begins = known.iter().filter_map(|name| name.split('.').next());
                let meant = nearest(part, known.iter().map(String::as_str).chain(begins));
                format!("there is no part \"{part}\"{}", did_you_mean(meant.as_deref()))
            }
            None if names.iter().all(|name| frozen(name)) => "that is all of the model".to_owned(),
            None => {
                self.parameters.freeze(frozen);
                return Ok(());
            }
        };
        Err(Error::Part { reason, known })
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        self.parameters.flat().device()
    }

    /// The parameters in the type that linear layers and convolutions multiply in: cast to bf16, all at once, if that
    /// is the type. While they live the parameters cannot be written ([`tensor::Error::Shared`]): take them for one
    /// step only.
    pub fn factors(&self) -> Result<Factors> {
        Factors::new(&self.parameters, self.factor_type)
    }

    /// As [`factors`](Self::factors), for many passes in [`Mode::Evaluate`](crate::Mode::Evaluate) during which the
    /// parameters and the running statistics do not change (nor can they): matrices are packed once, and each BatchNorm
    /// that follows a convolution is folded into it, which changes results by rounding. Errors: those of the device.
    pub fn prepared(&self) -> Result<Factors> {
        let (factors, mut prepared) = (self.factors()?, Prepared::default());
        for stage in &self.stages {
            for (place, step) in stage.merging.iter().enumerate() {
                match (step, stage.merging.get(place + 1)) {
                    (Merging::Conv(conv), Some(Merging::Norm(norm))) => {
                        let state = (&self.parameters, &self.statistics[..]);
                        conv.prepare_with(norm, state, self.factor_type, &mut prepared)?;
                    }
                    (Merging::Conv(conv), _) => conv.prepare(&factors, &mut prepared)?,
                    _ => {}
                }
            }
            for linear in stage.blocks.iter().flat_map(|block| block.linears()) {
                linear.prepare(&factors, &mut prepared)?;
            }
        }
        if let Tail::Pool { head: Some(head), .. } = &self.tail {
            head.prepare(&factors, &mut prepared)?;
        }
        Ok(factors.with(prepared, &self.statistics))
    }

    /// [`RunningStatistics::update`] of the model's own, with the same errors.
    pub fn update_statistics(&mut self, trace: &Trace) -> Result<()> {
        self.move_statistics(trace)?;
        RunningStatistics::count(&mut self.statistics, trace);
        Ok(())
    }

    /// The part of [`BiFormer::update_statistics`] that a GPU does, and that can be recorded with the pass; the errors
    /// are the same.
    pub fn move_statistics(&mut self, trace: &Trace) -> Result<()> {
        RunningStatistics::move_towards(&mut self.statistics, trace, &self.momentum)
    }

    /// The rest of it, for a step that a GPU replays and that therefore leaves no trace: counts a batch for all running
    /// statistics but the frozen ones.
    pub fn count_batch(&mut self) {
        let layout = self.parameters.layout();
        let is_frozen = |name: &str| layout.find(&format!("{name}.weight")).is_some_and(|id| layout.is_frozen(id));
        self.statistics.iter_mut().filter(|running| !is_frozen(&running.name)).for_each(|running| running.batches += 1);
    }
}

/// Whether a name is that of a part, or of something in it.
fn is_within(name: &str, part: &str) -> bool {
    name.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The large part that a parameter is of, with its number if it has one: `stages.0`, `head`.
pub(crate) fn part_of(name: &str) -> String {
    let numbered =
        |place: usize, text: &str| place == 0 || place == 1 && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.split('.').enumerate().take_while(|&(place, text)| numbered(place, text));
    parts.map(|(_, text)| text).collect::<Vec<_>>().join(".")
}

/// What comes before a stage: the stem, or a halving of the map.
fn merging(builder: &mut Builder, config: &ModelConfig, stage: usize) -> Vec<Merging> {
    let dims = &config.embed_dim;
    let name = |index: usize| format!("downsample_layers.{stage}.{index}");
    let mut conv = |index: usize, channels: [usize; 2], kernel: usize, stride: usize, padding: usize| {
        Merging::Conv(Conv::new(builder, &name(index), channels, kernel, Conv2d { stride, padding }))
    };
    match (config.family, stage) {
        (Family::Biformer, 0) => {
            let half = dims[0] / 2;
            let [first, second] = config.stem_strides;
            let (a, b) = (conv(0, [3, half], 3, first, 1), conv(3, [half, dims[0]], 3, second, 1));
            let mut norm = |index, channels| BatchNorm::new(builder, &name(index), channels);
            vec![a, Merging::Norm(norm(1, half).with_gelu()), b, Merging::Norm(norm(4, dims[0]))]
        }
        (Family::Biformer, _) => {
            let conv = conv(0, [dims[stage - 1], dims[stage]], 3, 2, 1);
            vec![conv, Merging::Norm(BatchNorm::new(builder, &name(1), dims[stage]))]
        }
        (_, 0) => {
            let conv = conv(0, [3, dims[0]], 4, 4, 0);
            vec![conv, Merging::Norm(BatchNorm::new(builder, &name(1), dims[0]))]
        }
        _ => {
            let conv = conv(1, [dims[stage - 1], dims[stage]], 2, 2, 0);
            vec![Merging::Norm(BatchNorm::new(builder, &name(0), dims[stage - 1])), conv]
        }
    }
}
