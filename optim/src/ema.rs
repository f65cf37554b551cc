//! The exponential moving average of the weights.
//!
//! After each optimiser step, e ← d·e + (1 − d)·p with a decay d just below 1: an average over about the
//! last 1/(1 − d) steps. It is written as e + (1 − d)·(p − e), whose fixed point is p in floating point
//! too: d and 1 − d rounded to f32 one by one do not add up to 1, which at d = 0.99996 could shift every
//! weight by nearly a part in a thousand. What f32 cannot do in either form is to add an increment below
//! its resolution: e stands still once |p − e| < |e|·2⁻²⁴/(1 − d), which is 0.15 % at that decay.
//!
//! Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992; timm's
//! `ModelEma` for the published recipe's decay.

use crate::adamw::MOST_STEPS;
use crate::error::{Error, Result, ensure, ensure_flat, ensure_layout};
use autograd::Parameters;
use tensor::{Device, Tensor};

/// The settings of [`Ema`]; by default for runs of some thousands of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmaConfig {
    /// d, in [0, 1). By default 0.999; the published recipe's is 0.99996.
    pub decay: f64,
    /// Whether update t = 0, 1, ... uses min(d, (1 + t)/(10 + t)) instead of d: the random weights of the
    /// start are then forgotten within the first updates, and not after several times 1/(1 − d) of them.
    /// The published recipe does not.
    pub warmup: bool,
}

impl Default for EmaConfig {
    fn default() -> Self {
        Self { decay: 0.999, warmup: true }
    }
}

impl EmaConfig {
    /// [`Error::Setting`] for a decay outside [0, 1).
    pub fn check(&self) -> Result<()> {
        ensure("decay", self.decay, "in [0, 1)", (0.0..1.0).contains(&self.decay))
    }

    /// The decay of update `t`, counted from 0.
    pub fn decay_at(&self, t: u64) -> f64 {
        if self.warmup { self.decay.min((1.0 + t as f64) / (10.0 + t as f64)) } else { self.decay }
    }
}

/// A second set of parameters that follows the trained ones slowly.
#[derive(Debug)]
pub struct Ema {
    config: EmaConfig,
    updates: u64,
    average: Parameters,
    /// 1 − d (1) of the update that was last prepared, on the average's device.
    rate: Option<Tensor>,
    /// Whether that update has not been counted yet.
    prepared: bool,
}

/// What a checkpoint keeps of [`Ema`] to continue with the same bits.
#[derive(Clone, Debug)]
pub struct EmaState {
    /// The number of updates made.
    pub updates: u64,
    /// The averaged parameters, flat, (layout length).
    pub average: Tensor,
}

impl Ema {
    /// An average that starts at these parameters. Errors: [`Error::Setting`]; on a GPU
    /// [`tensor::Error::OutOfMemory`].
    pub fn new(parameters: &Parameters, config: EmaConfig) -> Result<Self> {
        config.check()?;
        Ok(Self { config, updates: 0, average: parameters.duplicate()?, rate: None, prepared: false })
    }

    /// The averaged parameters, to evaluate the model with: a pass takes them in place of the model's own (the crate
    /// `model`: `Pass::new(&tape, Mode::Evaluate, ema.average(), &model.statistics)`, and `model.run` on it).
    pub fn average(&self) -> &Parameters {
        &self.average
    }

    /// The number of updates made.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Moves the average towards `parameters`.
    ///
    /// On the CPU this is a sweep of its own: fused into AdamW's it would save only one of the two sweeps' ten memory
    /// streams, at the cost of a kernel with an optional fifth buffer. On a GPU
    /// [`AdamW::clip_and_step`](crate::AdamW::clip_and_step) includes it.
    ///
    /// Errors: [`Error::Layout`] for another model's parameters; [`tensor::Error::Device`] for those on another device;
    /// [`tensor::Error::Shared`] while a tape or a view of the average lives.
    pub fn update(&mut self, parameters: &Parameters) -> Result<()> {
        ensure_layout(self.average.layout(), "parameters", parameters.layout())?;
        self.prepare()?;
        let (average, rate) = self.with_rate(parameters)?;
        average.move_towards(parameters.flat(), rate)?;
        self.finish(true);
        Ok(())
    }

    /// Stores the rate of the next update on the average's device. Errors: [`tensor::Error::Shared`] while a view of
    /// the average lives, for which a replayed update does not check.
    pub(crate) fn prepare(&mut self) -> Result<()> {
        self.average.flat().ensure_unique("ema")?;
        let rate = 1.0 - self.config.decay_at(self.updates);
        let rate = Tensor::full([1], rate).cast(self.average.layout().dtype())?;
        match &mut self.rate {
            Some(there) => there.overwrite(0, &rate)?,
            there => *there = Some(rate.to_device(&self.average.flat().device())?),
        }
        self.prepared = true;
        Ok(())
    }

    /// The rate, of shape (1), of the update that was last prepared or made, for other tensors that are averaged in the
    /// same way.
    pub fn rate(&self) -> Option<&Tensor> {
        self.rate.as_ref()
    }

    /// The average and its rate, for a kernel that moves it towards `parameters`. Errors: [`Error::Layout`];
    /// [`tensor::Error::Argument`] for an update that was not prepared.
    pub(crate) fn with_rate(&mut self, parameters: &Parameters) -> Result<(&mut Tensor, &Tensor)> {
        ensure_layout(self.average.layout(), "parameters", parameters.layout())?;
        ensure_flat(self.average.layout(), "averaged parameters", self.average.flat())?;
        let missing = || tensor::Error::argument("ema", "no update was prepared; pass the average to AdamW::prepare");
        let rate = self.rate.as_ref().filter(|_| self.prepared).ok_or_else(missing)?;
        Ok((self.average.flat_tensor_mut(), rate))
    }

    /// Counts the update, if one was prepared and made.
    pub(crate) fn finish(&mut self, made: bool) {
        self.updates += u64::from(made && self.prepared);
        self.prepared = false;
    }

    /// The state for a checkpoint. Its tensor shares the average's buffer: drop it before the next update.
    pub fn state(&self) -> EmaState {
        EmaState { updates: self.updates, average: self.average.flat().clone() }
    }

    /// Continues from a saved state, bit for bit. Numbers are matched to parameters by their places. Errors:
    /// [`Error::Layout`] for a state of another length or type; [`Error::Unusable`] for numbers that are not finite,
    /// or too many updates; [`tensor::Error::Shared`] while a tape or a view of the average lives, as one's own state
    /// is.
    pub fn restore(&mut self, state: &EmaState) -> Result<()> {
        let what = "averaged parameters";
        ensure_flat(self.average.layout(), what, &state.average)?;
        if let Some(number) = state.average.find(|x| !x.is_finite())? {
            return Err(Error::Unusable { what, number });
        }
        if state.updates > MOST_STEPS {
            return Err(Error::Unusable { what: "updates", number: state.updates as f64 });
        }
        self.average.flat_tensor_mut().overwrite(0, &state.average.to_device(&Device::Cpu)?)?;
        (self.updates, self.prepared) = (state.updates, false);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{parameters, values};
    use approx::assert_relative_eq;
    use tensor::DType;
    use tensor::cpu::parallel::thread_pool;

    const SHAPES: [(&str, &[usize]); 2] = [("weight", &[151, 211]), ("bias", &[13])];

    /// Towards parameters that stand still: e after n updates is p + dⁿ·(e₀ − p).
    #[test]
    fn closed_form() {
        for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-6)] {
            let mut parameters = parameters(dtype, &SHAPES);
            let start = values(&parameters);
            let mut ema = Ema::new(&parameters, EmaConfig { decay: 0.9, warmup: false }).unwrap();
            match dtype {
                DType::F64 => parameters.flat_mut::<f64>().unwrap().iter_mut().for_each(|p| *p = 3.0 - *p),
                _ => parameters.flat_mut::<f32>().unwrap().iter_mut().for_each(|p| *p = 3.0 - *p),
            }
            for _ in 0..7 {
                ema.update(&parameters).unwrap();
            }
            for (average, start) in values(ema.average()).iter().flatten().zip(start.iter().flatten()) {
                let p = 3.0 - start;
                assert_relative_eq!(
                    *average,
                    p + 0.9f64.powi(7) * (start - p),
                    epsilon = tolerance,
                    max_relative = tolerance
                );
            }
        }
    }

    #[test]
    fn parameters_that_stand_still_are_their_own_average() {
        let parameters = parameters(DType::F32, &SHAPES);
        let mut ema = Ema::new(&parameters, EmaConfig::default()).unwrap();
        (0..50).for_each(|_| ema.update(&parameters).unwrap());
        assert_eq!(values(ema.average()), values(&parameters));
    }

    #[test]
    fn warmup_forgets_the_start() {
        let config = EmaConfig { decay: 0.999, warmup: true };
        assert_eq!(config.decay_at(0), 0.1);
        assert_eq!(config.decay_at(8), 0.5);
        assert_eq!(config.decay_at(8990), 0.999);
        assert_eq!(config.decay_at(u64::MAX), 0.999);
        assert_eq!(EmaConfig { warmup: false, ..config }.decay_at(0), 0.999);

        let mut parameters = parameters(DType::F64, &[("x", &[1])]);
        parameters.flat_mut::<f64>().unwrap()[0] = 0.0;
        let mut ema = Ema::new(&parameters, config).unwrap();
        parameters.flat_mut::<f64>().unwrap()[0] = 1.0;
        ema.update(&parameters).unwrap();
        assert_relative_eq!(values(ema.average())[0][0], 0.9, epsilon = 1e-15);
        ema.update(&parameters).unwrap();
        assert_relative_eq!(values(ema.average())[0][0], 1.0 - 0.1 * 2.0 / 11.0, epsilon = 1e-15);
    }

    #[test]
    fn threads_and_resumption_leave_the_bits_alone() {
        let start = parameters(DType::F32, &SHAPES);
        let config = EmaConfig { decay: 0.99, warmup: true };
        let follow = |ema: &mut Ema, updates: u32| {
            let mut parameters = start.duplicate().unwrap();
            for i in 0..updates {
                parameters.flat_mut::<f32>().unwrap().iter_mut().for_each(|p| *p += 0.1 * i as f32);
                ema.update(&parameters).unwrap();
            }
        };
        let bits = |ema: &Ema| ema.average().flat().to_vec::<f32>().unwrap();
        let [one, two] = [1, 2].map(|threads| {
            thread_pool(threads).unwrap().install(|| {
                let mut ema = Ema::new(&start, config).unwrap();
                follow(&mut ema, 5);
                ema
            })
        });
        assert_eq!(bits(&one), bits(&two));

        let (mut straight, mut resumed) = (one, Ema::new(&start, config).unwrap());
        resumed.restore(&straight.state()).unwrap();
        assert_eq!(resumed.updates(), 5);
        follow(&mut straight, 4);
        follow(&mut resumed, 4);
        assert_eq!(bits(&straight), bits(&resumed));
    }

    #[test]
    fn refusals() {
        let own = parameters(DType::F32, &SHAPES);
        for foreign in [parameters(DType::F64, &SHAPES), parameters(DType::F32, &SHAPES[..1])] {
            let mut ema = Ema::new(&own, EmaConfig::default()).unwrap();
            assert!(matches!(ema.update(&foreign), Err(Error::Layout { what: "parameters", .. })));
            let state = Ema::new(&foreign, EmaConfig::default()).unwrap().state();
            assert!(matches!(ema.restore(&state), Err(Error::Layout { what: "averaged parameters", .. })));
        }
        let mut ema = Ema::new(&own, EmaConfig::default()).unwrap();
        let endless = EmaState { updates: u64::MAX, average: own.flat().duplicate().unwrap() };
        assert!(matches!(ema.restore(&endless), Err(Error::Unusable { what: "updates", .. })));
        ema.restore(&EmaState { updates: MOST_STEPS, ..endless }).unwrap();
        let state = ema.state();
        assert!(matches!(ema.update(&own), Err(Error::Tensor(tensor::Error::Shared { .. }))));
        drop(state);
        ema.update(&own).unwrap();
        for decay in [1.0, -0.1, f64::NAN] {
            let config = EmaConfig { decay, ..EmaConfig::default() };
            assert!(matches!(Ema::new(&own, config), Err(Error::Setting { what: "decay", .. })));
        }
    }
}
