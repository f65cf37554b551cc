//! Parameter groups: those that weight decay applies to, and the others; each with a learning rate of its own, if asked
//! for.

use crate::error::{Result, ensure};
use autograd::{Layout, ParamId};
use std::ops::Range;

/// Whether weight decay applies to a parameter: it does to weights and kernels, with two or more axes, and not to
/// biases, normalisation scales and other vectors. The rule is that of the published model's recipe (timm's
/// `param_groups_weight_decay`), which also exempts every name that ends in `.bias`. Frozen parameters stay as they
/// are.
fn decays(layout: &Layout, id: ParamId) -> bool {
    layout.shape(id).len() >= 2 && !layout.name(id).ends_with(".bias") && !layout.is_frozen(id)
}

/// What the parameters of a group have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Group {
    /// Whether weight decay applies to them.
    pub decays: bool,
    /// What the learning rate is multiplied by.
    pub rate: f64,
}

/// The groups, and the flat buffer as runs of elements that are of one group. A gap between parameters belongs to the
/// one before it: it holds zeros, which stay zeros in any group.
#[derive(Debug)]
pub(crate) struct Groups {
    all: Vec<Group>,
    runs: Vec<Run>,
}

#[derive(Debug)]
struct Run {
    end: usize,
    /// The number of its group.
    group: usize,
}

impl Groups {
    /// The most groups that there can be: their numbers are bytes on a GPU.
    const MAX: usize = 256;

    /// The groups of a model whose parameters have these rates, by name.
    pub fn new(layout: &Layout, rate_of: impl Fn(&str) -> f64) -> Result<Self> {
        let (mut all, mut runs): (Vec<Group>, Vec<Run>) = (vec![], vec![]);
        let ends = layout.ids().skip(1).map(|next| layout.span(next).start).chain([layout.len()]);
        for (id, end) in layout.ids().zip(ends) {
            let own = Group { decays: decays(layout, id), rate: rate_of(layout.name(id)) };
            ensure("rate", own.rate, "finite and at least 0", own.rate >= 0.0 && own.rate.is_finite())?;
            let group = all.iter().position(|group| *group == own).unwrap_or_else(|| {
                all.push(own);
                all.len() - 1
            });
            match runs.last_mut() {
                Some(run) if run.group == group => run.end = end,
                _ => runs.push(Run { end, group }),
            }
        }
        ensure("groups", all.len() as f64, "at most 256 of equal rate and decay", all.len() <= Self::MAX)?;
        Ok(Self { all, runs })
    }

    /// All groups, by number.
    pub fn all(&self) -> &[Group] {
        &self.all
    }

    /// Where each run ends, and the number of its group, in order.
    pub fn ends(&self) -> impl Iterator<Item = (usize, usize)> {
        self.runs.iter().map(|run| (run.end, run.group))
    }

    /// The parts of `range`, in order, each with the number of its group.
    pub fn within(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let first = self.runs.partition_point(|run| run.end <= range.start);
        let mut start = range.start;
        self.runs[first..].iter().map_while(move |run| {
            let part = start..run.end.min(range.end);
            start = part.end;
            (part.start < range.end).then_some((part, run.group))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use autograd::ParametersBuilder;
    use tensor::DType;

    #[test]
    fn runs_tile_every_range_and_agree_with_the_rules() {
        let mut builder = ParametersBuilder::default();
        let shapes: [(&str, &[usize]); 8] = [
            ("stem.weight", &[3, 7]),
            ("stem.bias", &[7]),
            ("norm.weight", &[7]),
            ("none", &[0, 4]),
            ("qkv.weight", &[5, 9]),
            ("conv.weight", &[2, 2, 9]),
            ("table.bias", &[4, 4]),
            ("temperature", &[]),
        ];
        for (name, shape) in shapes {
            builder.add(name, shape, vec![1.0; shape.iter().product()]);
        }
        let parameters = builder.build(DType::F64).unwrap();
        let layout = parameters.layout();
        let rate_of = |name: &str| if name.starts_with("stem") { 0.5 } else { 1.0 };
        let groups = Groups::new(layout, rate_of).unwrap();
        assert_eq!(groups.all().len(), 4);
        let decayed: Vec<&str> = layout.ids().filter(|&id| decays(layout, id)).map(|id| layout.name(id)).collect();
        assert_eq!(decayed, ["stem.weight", "none", "qkv.weight", "conv.weight"]);

        let mut expected = vec![None; layout.len()];
        for id in layout.ids() {
            let group = Group { decays: decays(layout, id), rate: rate_of(layout.name(id)) };
            expected[layout.span(id)].fill(Some(group));
        }
        for start in 0..layout.len() {
            for end in start..=layout.len() {
                let mut next = start;
                for (part, group) in groups.within(start..end) {
                    let own = groups.all()[group];
                    assert!(part.start == next && !part.is_empty(), "{part:?}");
                    assert!(expected[part.clone()].iter().all(|group| group.is_none_or(|group| group == own)));
                    next = part.end;
                }
                assert_eq!(next, end);
            }
        }
    }

    #[test]
    fn no_parameters_make_no_runs() {
        let parameters = ParametersBuilder::default().build(DType::F32).unwrap();
        assert_eq!(Groups::new(parameters.layout(), |_| 1.0).unwrap().within(0..0).count(), 0);
    }

    #[test]
    fn rates_that_are_none_and_too_many_groups_are_refused() {
        let mut builder = ParametersBuilder::default();
        (0..300).for_each(|index| _ = builder.add(format!("{index}"), [1], [1.0]));
        let parameters = builder.build(DType::F32).unwrap();
        let groups = |rate_of: fn(&str) -> f64| Groups::new(parameters.layout(), rate_of);
        for rate_of in [|_: &str| -0.1, |_: &str| f64::NAN, |_: &str| f64::INFINITY, |name: &str| name.parse().unwrap()]
        {
            assert!(matches!(groups(rate_of), Err(Error::Setting { .. })));
        }
        assert_eq!(groups(|name| name.parse::<f64>().unwrap() % 256.0).unwrap().all().len(), 256);
    }
}
