//! The moving average of a model: of its weights, and of the statistics that its BatchNorms evaluate by.
//!
//! The running statistics describe the activations that the trained weights produce. Averaged weights produce
//! activations with other statistics, which no pass measures; but as long as the weights change slowly, the average of
//! the running statistics is close to those. timm's `ModelEma` averages them, too.

use anyhow::{Context, Result, bail};
use autograd::Parameters;
use model::{BiFormer, RunningStatistics};
use optim::{Ema, EmaConfig, EmaState};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use tensor::{DType, Tensor};

/// The exponential moving average (EMA) of a model.
pub struct Average {
    parameters: Ema,
    /// Of each BatchNorm in order: the mean, then the variance. On the model's device.
    statistics: Vec<Tensor>,
}

/// What a checkpoint keeps of [`Average`].
#[derive(Debug)]
pub struct AverageState {
    /// The number of updates made.
    pub updates: u64,
    /// The averaged parameters, flat.
    pub parameters: Tensor,
    /// The averaged statistics, flat.
    pub statistics: Tensor,
}

impl fmt::Debug for Average {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Average").field("parameters", &self.parameters).finish_non_exhaustive()
    }
}

impl Average {
    /// An average that starts at this model, in f32. Errors: those of [`Ema::new`], and of the device; a model in f64.
    pub fn new(model: &BiFormer, config: EmaConfig) -> Result<Self> {
        model.parameters.flat().ensure_dtype("average", DType::F32)?;
        let parameters = Ema::new(&model.parameters, config)?;
        let statistics = tensors(&model.statistics).map(Tensor::duplicate).collect::<tensor::Result<_>>()?;
        Ok(Self { parameters, statistics })
    }

    /// Moves the average towards a model, by the same step in all its numbers: e ← e + (1 − d)·(x − e). Errors: those
    /// of [`Ema::update`].
    pub fn update(&mut self, model: &BiFormer) -> Result<()> {
        self.parameters.update(&model.parameters)?;
        self.follow_statistics(model)
    }

    /// The average of the parameters, which on a GPU is updated as part of the optimiser's step.
    pub fn of_parameters(&mut self) -> &mut Ema {
        &mut self.parameters
    }

    /// Moves the averaged statistics by the rate of the parameters' update; on a GPU without waiting for it. Errors:
    /// that update has not begun; those of a GPU.
    pub fn follow_statistics(&mut self, model: &BiFormer) -> Result<()> {
        let rate = self.parameters.rate().context("no update of the average was prepared")?;
        for (average, values) in self.statistics.iter_mut().zip(tensors(&model.statistics)) {
            average.move_towards(values, rate)?;
        }
        Ok(())
    }

    /// Runs `work` on the model with the averages in place of its own values. Afterwards the model has its own values
    /// again, even if `work` returns an error, or panics. Errors: those of `work`; another model.
    pub fn lend<R>(&self, model: &mut BiFormer, work: impl FnOnce(&BiFormer) -> Result<R>) -> Result<R> {
        if self.parameters.average().layout() != model.parameters.layout() {
            bail!("this is the average of a model with other parameters");
        }
        let parameters = self.parameters.average().share();
        let mut statistics = model.statistics.clone();
        let mut averages = self.statistics.iter().cloned();
        for values in tensors_mut(&mut statistics) {
            *values = averages.next().context("an average of other statistics")?;
        }
        let own = (
            std::mem::replace(&mut model.parameters, parameters),
            std::mem::replace(&mut model.statistics, statistics),
        );
        let result = catch_unwind(AssertUnwindSafe(|| work(model)));
        (model.parameters, model.statistics) = own;
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// The state for a checkpoint. Its parameters share memory with the average: they must be dropped before the next
    /// update. Errors: those of a GPU.
    pub fn state(&self) -> Result<AverageState> {
        let EmaState { updates, average: parameters } = self.parameters.state();
        let mut flat = vec![];
        for average in &self.statistics {
            flat.extend(average.to_vec::<f32>()?);
        }
        let statistics = Tensor::from_slice(&flat, [flat.len()])?;
        Ok(AverageState { updates, parameters, statistics })
    }

    /// Continues from a saved state, bit for bit. Errors: it is of another model, or holds numbers that are not finite.
    pub fn restore(&mut self, state: AverageState) -> Result<()> {
        let AverageState { updates, parameters, statistics } = state;
        self.parameters.restore(&EmaState { updates, average: parameters })?;
        split(statistics.as_slice("averaged statistics")?, self.statistics.iter_mut())
    }
}

/// Replaces a model's numbers by the averages of a checkpoint.
pub(super) fn adopt(model: &mut BiFormer, parameters: &Tensor, statistics: &Tensor) -> Result<()> {
    copy_parameters(&mut model.parameters, parameters)?;
    split(statistics.as_slice("averaged statistics")?, tensors_mut(&mut model.statistics))
}

fn copy_parameters(parameters: &mut Parameters, flat: &Tensor) -> Result<()> {
    let (own, average) = (parameters.flat().shape().clone(), flat.as_slice::<f32>("average")?);
    if *flat.shape() != own {
        bail!("the averaged parameters are {}, the model's {own}", flat.shape());
    }
    ensure_all("parameters", average, |x| x.is_finite())?;
    parameters.flat_mut::<f32>()?.copy_from_slice(average);
    Ok(())
}

/// Checks what a damaged file could hold.
fn ensure_all(what: &str, numbers: &[f32], is_sound: impl Fn(f32) -> bool) -> Result<()> {
    match numbers.iter().find(|&&x| !is_sound(x)) {
        None => Ok(()),
        Some(number) => bail!("the averaged {what} hold {number}: this average is of no use, take that of another run"),
    }
}

/// Overwrites statistics from their flat form.
fn split<'s>(flat: &[f32], statistics: impl Iterator<Item = &'s mut Tensor>) -> Result<()> {
    let statistics: Vec<&mut Tensor> = statistics.collect();
    let count: usize = statistics.iter().map(|values| values.count()).sum();
    if flat.len() != count {
        bail!("the averaged statistics are laid out for {} numbers, the model has {count}", flat.len());
    }
    let mut rest = flat;
    for (place, values) in statistics.into_iter().enumerate() {
        let (own, after) = rest.split_at(values.count());
        // Means and variances take turns.
        ensure_all("statistics", own, |x| x.is_finite() && (place % 2 == 0 || x >= 0.0))?;
        *values = Tensor::from_slice(own, values.shape().clone())?.to_device(&values.device())?;
        rest = after;
    }
    Ok(())
}

fn tensors(statistics: &[RunningStatistics]) -> impl Iterator<Item = &Tensor> {
    statistics.iter().flat_map(|running| [&running.mean, &running.variance])
}

fn tensors_mut(statistics: &mut [RunningStatistics]) -> impl Iterator<Item = &mut Tensor> {
    statistics.iter_mut().flat_map(|running| [&mut running.mean, &mut running.variance])
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::preset;
    use tensor::DType;

    #[test]
    fn weights_and_statistics_are_averaged_alike_and_lent() -> Result<()> {
        let config = preset("nano")?.config().with_overrides(["depth=1,1,1", "embed_dim=24,48,96"])?;
        let mut model = BiFormer::new(&config, 0, DType::F32)?;
        model.parameters.flat_mut::<f32>()?.fill(0.0);
        let channels = model.statistics[0].mean.count();
        let mut average = Average::new(&model, EmaConfig { decay: 0.75, warmup: false })?;
        model.parameters.flat_mut::<f32>()?.fill(4.0);
        // Means start at 0, variances at 1.
        model.statistics[0].mean = Tensor::full([channels], 4f32);
        model.statistics[0].variance = Tensor::full([channels], 5f32);
        average.update(&model)?;
        let numbers = |model: &BiFormer| -> Result<[f32; 3]> {
            let running = &model.statistics[0];
            let first = |tensor: &Tensor| Ok::<f32, tensor::Error>(tensor.as_slice::<f32>("test")?[0]);
            Ok([first(model.parameters.flat())?, first(&running.mean)?, first(&running.variance)?])
        };
        assert_eq!(average.lend(&mut model, numbers)?, [1.0, 1.0, 2.0]);
        assert_eq!(numbers(&model)?, [4.0, 4.0, 5.0]);
        let panics = || average.lend(&mut model, |_| -> Result<()> { resume_unwind(Box::new("a panic")) });
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert_eq!(numbers(&model)?, [4.0, 4.0, 5.0]);
        let mut other = BiFormer::blank(&config.with_overrides(["depth=1,1,2"])?, DType::F32)?;
        assert!(average.lend(&mut other, numbers).is_err());
        assert!(Average::new(&BiFormer::blank(&config, DType::F64)?, EmaConfig::default()).is_err());
        let AverageState { parameters, statistics, .. } = average.state()?;
        adopt(&mut model, &parameters, &statistics)?;
        assert_eq!(numbers(&model)?, [1.0, 1.0, 2.0]);
        let short = Tensor::full([3], 0f32);
        assert!(adopt(&mut model, &parameters, &short).unwrap_err().to_string().contains("laid out for 3 numbers"));
        let short = Tensor::full([parameters.count() - 1], 0f32);
        assert!(
            adopt(&mut model, &short, &statistics).unwrap_err().to_string().contains("the averaged parameters are")
        );
        assert_eq!(numbers(&model)?, [1.0, 1.0, 2.0]);
        // What no average is: NaN anywhere, or a variance below 0.
        let damaged = |tensor: &Tensor, at: usize, number: f32| -> Result<Tensor> {
            let mut numbers = tensor.to_vec::<f32>()?;
            numbers[at] = number;
            Ok(Tensor::from_slice(&numbers, tensor.shape().clone())?)
        };
        for (parameters, statistics) in [
            (damaged(&parameters, 5, f32::NAN)?, statistics.clone()),
            (parameters.clone(), damaged(&statistics, 0, f32::INFINITY)?),
            (parameters.clone(), damaged(&statistics, channels, -1.0)?),
        ] {
            let error = adopt(&mut model, &parameters, &statistics).unwrap_err().to_string();
            assert!(error.contains("of no use"), "{error}");
        }
        adopt(&mut model, &parameters, &damaged(&statistics, 0, -1.0)?)?;
        Ok(())
    }
}
