//! Settings that do nothing beside others.

use super::RunConfig;
use data::{Augmentation, Crop};
use optim::EmaConfig;

impl RunConfig {
    /// Fields of the augmentation and the average that differ from their defaults and do nothing, each with what it
    /// needs.
    pub fn idle_fields(&self) -> Vec<(&'static str, &'static str)> {
        let (a, usual, ema, usual_ema) = (&self.augmentation, Augmentation::default(), &self.ema, EmaConfig::default());
        let (padded, resized) = ("augmentation.crop=padded or auto", "augmentation.crop=resized or auto");
        let (random, erase) = ("augmentation.rand_augment, such as 2", "augmentation.erase, such as 0.25");
        let fields = [
            ("ema.decay", "ema.enabled=true", ema.enabled, ema.decay != usual_ema.decay),
            ("ema.warmup", "ema.enabled=true", ema.enabled, ema.warmup != usual_ema.warmup),
            ("augmentation.padding", padded, a.crop != Crop::Resized, a.padding != usual.padding),
            ("augmentation.fill", padded, a.crop != Crop::Resized, a.fill != usual.fill),
            ("augmentation.min_scale", resized, a.crop != Crop::Padded, a.min_scale != usual.min_scale),
            ("augmentation.erase_fill", erase, a.erase > 0.0, a.erase_fill != usual.erase_fill),
            ("augmentation.magnitude", random, a.rand_augment > 0, a.magnitude != usual.magnitude),
            ("augmentation.magnitude_std", random, a.rand_augment > 0, a.magnitude_std != usual.magnitude_std),
            ("augmentation.mix", "augmentation.mixup or cutmix, such as 1", a.mixes(), a.mix != usual.mix),
        ];
        let idle = fields.into_iter().filter(|&(.., used, changed)| changed && !used);
        idle.map(|(field, needs, ..)| (field, needs)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Result;
    use data::{EraseFill, Fill};

    #[test]
    fn what_is_idle_depends_on_what_uses_it() -> Result<()> {
        let run = RunConfig::for_model("nano")?;
        assert!(run.idle_fields().is_empty());
        let changed = |crop, used: bool| {
            let mut run = run.clone();
            (run.augmentation.crop, run.augmentation.padding, run.augmentation.min_scale) = (crop, 2, 0.5);
            (run.augmentation.fill, run.augmentation.erase_fill) = (Fill::Mean, EraseFill::Noise);
            (run.augmentation.magnitude, run.augmentation.magnitude_std, run.augmentation.mix) = (5.0, 0.1, 0.5);
            (run.ema.decay, run.ema.warmup, run.ema.enabled) = (0.5, false, used);
            if used {
                (run.augmentation.erase, run.augmentation.rand_augment, run.augmentation.mixup) = (0.1, 1, 0.2);
            }
            run.idle_fields()
                .into_iter()
                .map(|(field, _)| field.rsplit('.').next().unwrap_or(field))
                .collect::<Vec<_>>()
        };
        assert!(changed(Crop::Auto, true).is_empty());
        assert_eq!(changed(Crop::Padded, true), ["min_scale"]);
        assert_eq!(changed(Crop::Resized, true), ["padding", "fill"]);
        let all = ["decay", "warmup", "erase_fill", "magnitude", "magnitude_std", "mix"];
        assert_eq!(changed(Crop::Auto, false), all);
        Ok(())
    }
}
