//! Parameter groups: those that weight decay applies to, and the others.

use autograd::{Layout, ParamId};
use std::ops::Range;

/// Whether weight decay applies to a parameter: it does to weights and kernels, with two or more axes,
/// and not to biases, normalisation scales and other vectors. The rule is that of the reference model's
/// recipe (timm's `param_groups_weight_decay`), which also exempts every name that ends in `.bias`. Frozen parameters stay
/// as they are.
fn decays(layout: &Layout, id: ParamId) -> bool {
    layout.shape(id).len() >= 2 && !layout.name(id).ends_with(".bias") && !layout.is_frozen(id)
}

/// The flat buffer as alternating runs of decayed and undecayed elements. A gap between parameters
/// belongs to the one before it: it holds zeros, which stay zeros either way.
#[derive(Debug)]
pub(crate) struct Runs(Vec<Run>);

#[derive(Debug)]
struct Run {
    end: usize,
    decays: bool,
}

impl Runs {
    pub fn new(layout: &Layout) -> Self {
        let mut runs: Vec<Run> = vec![];
        let ends = layout.ids().skip(1).map(|next| layout.span(next).start).chain([layout.len()]);
        for (id, end) in layout.ids().zip(ends) {
            let decays = decays(layout, id);
            match runs.last_mut() {
                Some(run) if run.decays == decays => run.end = end,
                _ => runs.push(Run { end, decays }),
            }
        }
        Runs(runs)
    }

    /// Where each run ends, and whether it decays, in order.
    pub fn ends(&self) -> impl Iterator<Item = (usize, bool)> {
        self.0.iter().map(|run| (run.end, run.decays))
    }

    /// The parts of `range`, in order, each with whether it decays.
    pub fn within(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> {
        let first = self.0.partition_point(|run| run.end <= range.start);
        let mut start = range.start;
        self.0[first..].iter().map_while(move |run| {
            let part = start..run.end.min(range.end);
            start = part.end;
            (part.start < range.end).then_some((part, run.decays))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use autograd::ParametersBuilder;
    use tensor::DType;

    #[test]
    fn runs_tile_every_range_and_agree_with_the_rule() {
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
        let runs = Runs::new(layout);
        let decayed: Vec<&str> = layout.ids().filter(|&id| decays(layout, id)).map(|id| layout.name(id)).collect();
        assert_eq!(decayed, ["stem.weight", "none", "qkv.weight", "conv.weight"]);

        let mut expected = vec![None; layout.len()];
        for id in layout.ids() {
            expected[layout.span(id)].fill(Some(decays(layout, id)));
        }
        for start in 0..layout.len() {
            for end in start..=layout.len() {
                let mut next = start;
                for (part, decays) in runs.within(start..end) {
                    assert_eq!(part.start, next);
                    assert!(expected[part.clone()].iter().all(|rule| rule.is_none_or(|rule| rule == decays)));
                    next = part.end;
                }
                assert_eq!(next, end);
            }
        }
    }

    #[test]
    fn no_parameters_make_no_runs() {
        let parameters = ParametersBuilder::default().build(DType::F32).unwrap();
        assert_eq!(Runs::new(parameters.layout()).within(0..0).count(), 0);
    }
}
