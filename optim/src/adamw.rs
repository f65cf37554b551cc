//! AdamW: Adam with decoupled weight decay.
//!
//! With the gradient g of step t = 1, 2, ..., the learning rate η (times a parameter's own rate, if it has one), the
//! weight decay λ and the decays β₁ and β₂ of the moments, each element of the parameters p goes through
//!
//! ```text
//! p ← p·(1 − η·λ)                          only of what has two axes or more, see `groups.rs`
//! m ← m + (1 − β₁)·(g − m)                 the mean of the gradient
//! v ← β₂·v + (1 − β₂)·g²                   the mean of its square
//! m̂ = m/(1 − β₁ᵗ),  v̂ = v/(1 − β₂ᵗ)        both started at 0, which the division corrects
//! p ← p − η·m̂/(√v̂ + ε)
//! ```
//!
//! in this order, that of `torch.optim.AdamW`. Decay acts on p and not through g, so that v does not
//! rescale it. Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
//!
//! Parameters, gradients and moments are flat buffers of one layout, so a step is a single sweep that
//! reads four streams and writes three. Each element is computed from its own history only: the bits do
//! not depend on the number of threads.

use crate::clip::{clip_factor, gradient_norm, has_finite_squares};
use crate::cuda::Controls;
use crate::error::{Error, Result, ensure, ensure_flat, ensure_layout};
use crate::groups::{Group, Groups};
use autograd::{Gradients, Layout, Parameters};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::GRAIN;
use tensor::{Device, Float, Tensor, match_float, simd};

/// The settings of [`AdamW`], with the published recipe's values as defaults.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    /// β₁ and β₂, each in [0, 1): about 1/(1 − β) steps are remembered.
    pub betas: [f64; 2],
    /// ε, positive: bounds the step where gradients vanish.
    pub eps: f64,
    /// λ, at least 0.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.05 }
    }
}

impl AdamWConfig {
    /// [`Error::Setting`] for a value outside its range.
    pub fn check(&self) -> Result<()> {
        for (what, beta) in ["betas[0]", "betas[1]"].into_iter().zip(self.betas) {
            ensure(what, beta, "in [0, 1)", (0.0..1.0).contains(&beta))?;
        }
        // An ε that rounds to 0 would make 0/0 of a zero gradient, and of every gap between parameters.
        let (lowest, highest) = (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX));
        ensure("eps", self.eps, "finite and positive, also in f32", (lowest..=highest).contains(&self.eps))?;
        let fits = (0.0..=highest).contains(&self.weight_decay);
        ensure("weight_decay", self.weight_decay, "finite and at least 0, also in f32", fits)
    }
}

/// The optimiser: its settings, and the moments of every parameter.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    layout: Arc<Layout>,
    groups: Groups,
    /// On a GPU, what changes from step to step.
    pub(crate) controls: Option<Controls>,
    pub(crate) steps: u64,
    pub(crate) m: Tensor,
    pub(crate) v: Tensor,
}

/// What a checkpoint keeps of [`AdamW`] to continue with the same bits.
#[derive(Clone, Debug)]
pub struct AdamWState {
    /// t, the number of steps made.
    pub steps: u64,
    /// The mean of the gradient, flat, (layout length).
    pub m: Tensor,
    /// The mean of its square, flat, (layout length).
    pub v: Tensor,
}

impl AdamWState {
    /// The same on a device, in memory that nobody shares, with zeros for frozen parameters. Errors: [`Error::Layout`]
    /// and [`Error::Unusable`], as of [`AdamW::restore`].
    fn own(self, layout: &Layout, device: &Device) -> Result<Self> {
        ensure_flat(layout, "first moments", &self.m)?;
        ensure_flat(layout, "second moments", &self.v)?;
        let wrong = [
            ("first moments", self.m.find(|m| !m.is_finite())?),
            ("second moments", self.v.find(|v| !(v >= 0.0 && v.is_finite()))?),
        ];
        let steps = (self.steps > MOST_STEPS).then_some(("steps", Some(self.steps as f64)));
        if let Some((what, number)) = wrong.into_iter().chain(steps).find_map(|(what, number)| Some((what, number?))) {
            return Err(Error::Unusable { what, number });
        }
        let own = |moment: Tensor| {
            let mut own = moment.to_device(&Device::Cpu)?;
            drop(moment);
            if !(own.is_unique() && own.is_contiguous()) {
                own = own.duplicate()?;
            }
            for id in layout.ids().filter(|&id| layout.is_frozen(id)) {
                let nothing = Tensor::zeros(layout.shape(id).clone(), layout.dtype());
                own.overwrite(layout.span(id).start, &nothing)?;
            }
            own.to_device(device)
        };
        Ok(Self { steps: self.steps, m: own(self.m)?, v: own(self.v)? })
    }
}

impl AdamW {
    /// An optimiser for these parameters, on their device, that has made no step. Errors:
    /// [`Error::Setting`]; on a GPU [`tensor::Error::OutOfMemory`].
    pub fn new(parameters: &Parameters, config: AdamWConfig) -> Result<Self> {
        Self::with_rates(parameters, config, |_| 1.0)
    }

    /// The same where each parameter, by name, has a learning rate of its own: that of the step times `rate_of(name)`.
    /// Errors: those of [`AdamW::new`]; [`Error::Setting`] also for a rate that is negative or not finite, and if rates
    /// and decay make more than 256 groups.
    pub fn with_rates(parameters: &Parameters, config: AdamWConfig, rate_of: impl Fn(&str) -> f64) -> Result<Self> {
        let (device, layout) = (parameters.flat().device(), parameters.layout());
        let zeros = || Tensor::zeros_on(&device, [layout.len()], layout.dtype());
        Self::from_state(parameters, config, rate_of, AdamWState { steps: 0, m: zeros()?, v: zeros()? })
    }

    /// The same, going on from a saved state as [`AdamW::restore`] does. Moments that nobody else has are not copied.
    /// Errors: those of both.
    pub fn resumed(
        parameters: &Parameters,
        config: AdamWConfig,
        rate_of: impl Fn(&str) -> f64,
        state: AdamWState,
    ) -> Result<Self> {
        let state = state.own(parameters.layout(), &parameters.flat().device())?;
        Self::from_state(parameters, config, rate_of, state)
    }

    fn from_state(
        parameters: &Parameters,
        config: AdamWConfig,
        rate_of: impl Fn(&str) -> f64,
        AdamWState { steps, m, v }: AdamWState,
    ) -> Result<Self> {
        config.check()?;
        let layout = Arc::clone(parameters.layout());
        let groups = Groups::new(&layout, rate_of)?;
        let controls = match parameters.flat().device() {
            Device::Cpu => None,
            device @ Device::Cuda(_) => Some(Controls::new(&device, layout.len(), layout.dtype(), &groups)?),
        };
        Ok(Self { config, groups, controls, steps, m, v, layout })
    }

    /// The number of steps made.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Makes one step with the learning rate `lr` along the gradients as they are: [`AdamW::step_clipped`] without a
    /// limit. Errors: those of it.
    pub fn step(&mut self, parameters: &mut Parameters, gradients: &mut Gradients, lr: f64) -> Result<f64> {
        self.step_clipped(parameters, gradients, lr, f64::INFINITY)
    }

    /// Makes one step with the learning rate `lr` along the gradients, scaled down to the norm `max_norm` if theirs is
    /// larger; infinity is no limit. Returns the norm that they had. The step of the gradients then
    /// [ends](Gradients::end_step).
    ///
    /// Errors, each before the weights or the moments have changed: [`Error::NonFinite`] for gradients that would
    /// destroy the weights (their step ends, too): the norm, and its square once it is clipped, have to be finite in
    /// the parameters' type; [`Error::Setting`] when `lr` is negative or, by itself or times a parameter's rate and
    /// decay, not finite in the parameters' type, or when `max_norm` is not positive; [`Error::Layout`] for another
    /// model's parameters or gradients; [`Error::NoParameters`] for gradients that were made for none;
    /// [`autograd::Error::Unreached`] when some parameter got no gradient in this step (its old one would be used
    /// again), [`autograd::Error::NoBackward`] when none did; [`tensor::Error::Shared`] while a tape or a view of the
    /// parameters lives, or a tensor of the [state](Self::state).
    pub fn step_clipped(
        &mut self,
        parameters: &mut Parameters,
        gradients: &mut Gradients,
        lr: f64,
        max_norm: f64,
    ) -> Result<f64> {
        let mut constants = self.constants(lr, max_norm)?;
        let flat = self.ensure_own(parameters, gradients)?;
        if self.controls.is_some() {
            self.prepare(parameters, lr, max_norm, None)?;
            self.clip_and_step(parameters, gradients, None)?;
            return self.finish(None);
        }
        let norm = gradient_norm(gradients)?;
        constants.scale = clip_factor(norm, max_norm);
        if !has_finite_squares(norm, constants.scale, self.layout.dtype()) {
            gradients.end_step();
            return Err(Error::NonFinite { norm });
        }
        match_float!(self.layout.dtype(), "adamw", T => {
            let p = parameters.flat_mut::<T>()?;
            let g = flat.as_slice::<T>("adamw")?;
            let m = self.m.as_mut_slice::<T>("adamw")?;
            let v = self.v.as_mut_slice::<T>("adamw")?;
            sweep(&constants.rounded::<T>(), &self.groups, p, g, m, v);
        });
        gradients.end_step();
        self.steps += 1;
        Ok(norm)
    }

    /// The constants of the next step, along the gradients as they are; `max_norm` is only checked. Errors:
    /// [`Error::Setting`].
    pub(crate) fn constants(&self, lr: f64, max_norm: f64) -> Result<StepConstants<f64>> {
        ensure("max_norm", max_norm, "positive", max_norm > 0.0)?;
        let fits = |x: f64| self.layout.dtype().rounded_sum(x).is_finite();
        ensure("lr", lr, "at least 0, and finite in the weights' type", lr >= 0.0 && fits(lr))?;
        let constants = StepConstants::new(&self.config, self.groups.all(), self.steps + 1, lr);
        let all_fit = constants.groups.iter().all(|group| fits(group.keep) && fits(group.step));
        ensure(
            "lr",
            lr,
            "such that its product with each parameter's rate and decay is finite in the weights' type",
            all_fit,
        )?;
        Ok(constants)
    }

    /// The gradients, flat, if they and the parameters are those of this optimiser's model, in its type.
    pub(crate) fn ensure_own<'g>(&self, parameters: &Parameters, gradients: &'g Gradients) -> Result<&'g Tensor> {
        ensure_layout(&self.layout, "parameters", parameters.layout())?;
        ensure_flat(&self.layout, "parameters", parameters.flat())?;
        ensure_layout(&self.layout, "gradients", gradients.layout().ok_or(Error::NoParameters)?)?;
        gradients.ensure_of(parameters)?;
        gradients.require_all()?;
        gradients.flat().ok_or(Error::NoParameters)
    }

    /// The state for a checkpoint. Its tensors share the optimiser's buffers: drop them before the next step.
    pub fn state(&self) -> AdamWState {
        AdamWState { steps: self.steps, m: self.m.clone(), v: self.v.clone() }
    }

    /// Continues from a saved state, bit for bit; the moments of frozen parameters are set to zero, whatever was saved
    /// for them. So, when parts of a model have been frozen, its new optimiser can take over the moments of the old
    /// one: `restore(&old.state())`. But where parts have been thawed, begin with new moments: those of thawed
    /// parameters would be zero, and after many steps nothing corrects for that, so that their first steps would be
    /// several times too long.
    ///
    /// Moments are matched to parameters by their places: save and restore with the same layout. The optimiser gets
    /// other memory: a [recording](tensor::cuda::Gpu::record) that was made before would go on with the old moments.
    /// Errors: [`Error::Layout`] for a state of another length or type; [`Error::Unusable`] for values that no step can
    /// have left.
    pub fn restore(&mut self, state: &AdamWState) -> Result<()> {
        let AdamWState { steps, m, v } = state.clone().own(&self.layout, &self.m.device())?;
        (self.steps, self.m, self.v) = (steps, m, v);
        self.controls.iter_mut().for_each(|controls| controls.prepared = false);
        Ok(())
    }
}

/// More steps than any run takes; f64 counts them exactly.
pub(crate) const MOST_STEPS: u64 = 1 << 53;

/// The constants of one step, computed in f64 and rounded once.
pub(crate) struct StepConstants<T> {
    /// On the gradient.
    pub scale: T,
    /// 1 − β₁
    pub rate_m: T,
    /// β₂ and 1 − β₂
    pub beta_v: T,
    pub rate_v: T,
    /// 1/√(1 − β₂ᵗ), which turns √v into √v̂
    pub root: T,
    pub eps: T,
    /// Those of each group, by number.
    pub groups: Vec<GroupConstants<T>>,
}

/// The constants of a group, whose learning rate is η.
#[derive(Clone, Copy)]
pub(crate) struct GroupConstants<T> {
    /// 1 − η·λ, or 1 without weight decay
    pub keep: T,
    /// −η/(1 − β₁ᵗ)
    pub step: T,
}

/// x to the n, by repeated squaring: the standard library's power may round differently on another system.
fn power(mut x: f64, mut n: u64) -> f64 {
    let mut power = 1.0;
    while n > 0 {
        if n % 2 == 1 {
            power *= x;
        }
        x *= x;
        n /= 2;
    }
    power
}

impl StepConstants<f64> {
    fn new(config: &AdamWConfig, groups: &[Group], t: u64, lr: f64) -> Self {
        let [beta_m, beta_v] = config.betas;
        let correction = |beta: f64| 1.0 - power(beta, t);
        let of_group = |group: &Group| {
            let lr = lr * group.rate;
            let keep = if group.decays { 1.0 - lr * config.weight_decay } else { 1.0 };
            GroupConstants { keep, step: -lr / correction(beta_m) }
        };
        StepConstants {
            scale: 1.0,
            rate_m: 1.0 - beta_m,
            beta_v,
            rate_v: 1.0 - beta_v,
            root: 1.0 / correction(beta_v).sqrt(),
            eps: config.eps,
            groups: groups.iter().map(of_group).collect(),
        }
    }

    fn rounded<T: Float>(&self) -> StepConstants<T> {
        let of_group =
            |group: &GroupConstants<f64>| GroupConstants { keep: T::of(group.keep), step: T::of(group.step) };
        StepConstants {
            scale: T::of(self.scale),
            rate_m: T::of(self.rate_m),
            beta_v: T::of(self.beta_v),
            rate_v: T::of(self.rate_v),
            root: T::of(self.root),
            eps: T::of(self.eps),
            groups: self.groups.iter().map(of_group).collect(),
        }
    }
}

fn sweep<T: Float>(constants: &StepConstants<T>, groups: &Groups, p: &mut [T], g: &[T], m: &mut [T], v: &mut [T]) {
    let moments = m.par_chunks_mut(GRAIN).zip(v.par_chunks_mut(GRAIN));
    p.par_chunks_mut(GRAIN).zip(g.par_chunks(GRAIN)).zip(moments).enumerate().for_each(|(chunk, ((p, g), (m, v)))| {
        let start = chunk * GRAIN;
        for (run, group) in groups.within(start..start + p.len()) {
            let run = run.start - start..run.end - start;
            let (p, g) = (&mut p[run.clone()], &g[run.clone()]);
            let (m, v) = (&mut m[run.clone()], &mut v[run]);
            simd!(A => update::<T, A>(constants, constants.groups[group], p, g, m, v));
        }
    });
}

#[inline(always)]
fn update<T: Float, A: Arch>(
    f: &StepConstants<T>,
    group: GroupConstants<T>,
    p: &mut [T],
    g: &[T],
    m: &mut [T],
    v: &mut [T],
) {
    for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        let g = g * f.scale;
        *m = A::mul_add(f.rate_m, g - *m, *m);
        *v = A::mul_add(f.beta_v, *v, f.rate_v * g * g);
        let deviation = A::mul_add(v.sqrt(), f.root, f.eps);
        *p = A::mul_add(group.step, *m / deviation, *p * group.keep);
    }
}

#[cfg(test)]
mod tests;
