//! A batch in pieces: a few samples at a time, each piece on a tape of its own.
//!
//! Most of a network processes each sample independently. If pieces are small enough, what one operation writes is
//! still in the core's own cache when the next one reads it, whereas a whole batch would go to memory and back after
//! every operation; and as pieces do not wait for each other, every core works on one of its own. (In the backward pass
//! up to four run at once.)
//!
//! How a batch is cut depends only on its size and that of the pieces. Gradients of parameters are accumulated within
//! groups of pieces in order, and then group by group, so the bits are the same with any number of threads.

use crate::InputGrads;
use crate::accumulated::{Accumulated, OfParameters, State, Target};
use crate::backward::walk;
use crate::tape::{Node, TapeKind};
use crate::{Error, Profile, Result, Rule, Tape, Var};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use tensor::cpu::parallel::{GRAIN, Out, put};
use tensor::{Device, Float, Tensor, match_float};

/// The most groups of pieces in a backward pass. Groups run in parallel; all but the first accumulate into gradient
/// buffers of their own.
const GROUPS: usize = 4;

impl Tape {
    /// Runs `work` on pieces of x (N, ...), as equal in size as possible and of at most `size` samples, and
    /// concatenates their values along the first axis. `work` gets the piece and the range of samples that it holds;
    /// what else it returns is collected, one entry per piece. It runs on several threads at once, and must process
    /// each sample independently.
    ///
    /// `work` must not wait for a lock across a call into the library: a thread that waits there for others may begin
    /// another piece in the meantime, and wait for itself.
    ///
    /// Errors: those of `work`, from the first piece that fails; [`Error::ForeignVar`]. On the CPU (a GPU has a single
    /// piece) [`tensor::Error::Shape`] if a piece's value does not have as many samples as the piece, and
    /// [`tensor::Error::NotContiguous`] if it is a view that is not contiguous; [`tensor::Error::Axis`] for an x
    /// without axes.
    pub fn in_pieces<'t, S: Send, E: From<Error> + Send>(
        &'t self,
        x: &Var<'t>,
        size: usize,
        work: impl for<'s> Fn(&Var<'s>, Range<usize>) -> std::result::Result<(Var<'s>, S), E> + Sync,
    ) -> std::result::Result<(Var<'t>, Vec<S>), E> {
        self.ensure_own("pieces", &[x])?;
        let samples = x.shape().first().copied().unwrap_or(0);
        // A GPU has no per-core cache in which a piece could stay, and takes the whole batch at once.
        if x.value().device() != Device::Cpu {
            let (y, rest) = work(x, 0..samples)?;
            return Ok((y, vec![rest]));
        }
        let whole =
            Whole { x: x.value(), wanted: x.node().is_some(), kind: self.kind(), profiled: self.profile().is_some() };
        let count = count_of(samples, size);
        let run = |piece: usize| whole.run(piece * samples / count..(piece + 1) * samples / count, &work);
        let done: Vec<_> = (0..count).into_par_iter().with_max_len(1).map(run).collect();
        let (mut pieces, mut values, mut rests) = (vec![], vec![], vec![]);
        for done in done {
            let Done { piece, uses_parameters, value, rest } = done?;
            if uses_parameters {
                self.uses_parameters.set(true);
            }
            pieces.push(piece);
            values.push(value);
            rests.push(rest);
        }

        // All that they have recorded is one node here.
        let joined = Tensor::join(&values).map_err(Error::from)?;
        drop(values);
        let profile = self.shared_profile();
        absorb(&profile, pieces.iter().map(|piece| &piece.profile));
        let y = match pieces.iter().any(|piece| piece.output.is_some()) {
            true => self.append(&[x], joined, Pieces { pieces, profile })?,
            false => self.constant(joined),
        };
        Ok((y, rests))
    }
}

/// The number of pieces of at most `size` samples. At least one, so that an empty batch has a result of the right
/// shape. From [`GROUPS`] on it is a multiple of `GROUPS` if the samples allow, so that the threads get equal groups in
/// the backward pass.
fn count_of(samples: usize, size: usize) -> usize {
    let count = samples.div_ceil(size.max(1)).max(1);
    match count.next_multiple_of(GROUPS) {
        even if count >= GROUPS && even <= samples => even,
        _ => count,
    }
}

/// Charges the time since the last lap to the pieces' operations, in proportion.
fn absorb<'p>(profile: &Option<Arc<Profile>>, pieces: impl IntoIterator<Item = &'p Option<Arc<Profile>>>) {
    if let Some(profile) = profile {
        profile.absorb(pieces.into_iter().flatten());
    }
}

/// What a piece must know of the whole to run on a tape of its own, on any thread.
struct Whole<'x> {
    x: &'x Tensor,
    /// Whether x needs a gradient.
    wanted: bool,
    kind: TapeKind,
    profiled: bool,
}

/// A piece that has run: what was recorded, whether parameters were used, the value, and what else `work` returned.
struct Done<S> {
    piece: Piece,
    uses_parameters: bool,
    value: Tensor,
    rest: S,
}

impl Whole<'_> {
    /// Runs `work` on these samples of x.
    fn run<S, E: From<Error>>(
        &self,
        samples: Range<usize>,
        work: impl for<'s> Fn(&Var<'s>, Range<usize>) -> std::result::Result<(Var<'s>, S), E>,
    ) -> std::result::Result<Done<S>, E> {
        let profile = self.profiled.then(|| Arc::new(Profile::default()));
        let tape = Tape::of_kind(self.kind).profiled(profile.clone());
        let x = self.x.slice(0, samples.clone()).map_err(Error::from)?;
        let (input, output, value, rest) = {
            let x = if self.wanted { tape.input(x) } else { tape.constant(x) };
            let (y, rest) = work(&x, samples.clone())?;
            if y.shape().first() != Some(&samples.len()) {
                let expected = format!("a piece of {} samples", samples.len());
                return Err(Error::from(tensor::Error::shape("pieces", expected, y.shape())).into());
            }
            (x.node(), y.node(), y.into_value(), rest)
        };
        let uses_parameters = tape.uses_parameters.get();
        let piece = Piece { nodes: tape.into_nodes(), profile, input, output, samples };
        Ok(Done { piece, uses_parameters, value, rest })
    }
}

/// What was recorded of one piece.
struct Piece {
    nodes: Vec<Node>,
    profile: Option<Arc<Profile>>,
    /// The nodes of its x and of its value.
    input: Option<usize>,
    output: Option<usize>,
    samples: Range<usize>,
}

struct Pieces {
    pieces: Vec<Piece>,
    profile: Option<Arc<Profile>>,
}

impl Rule for Pieces {
    fn name(&self) -> &'static str {
        "pieces"
    }

    fn is_frame(&self) -> bool {
        true
    }

    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        self.pieces.iter().flat_map(|piece| &piece.nodes).flat_map(Node::saved).collect()
    }

    fn saved_mut(&mut self) -> Vec<&mut Tensor> {
        vec![]
    }

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        match_float!(dy.dtype(), "pieces", T => self.backward_of::<T>(&dy, grads))
    }
}

impl Pieces {
    fn backward_of<T: Float>(self, dy: &Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        // dx has a row for each sample, none of any length where nobody wants it; pieces and groups are runs of them:
        //   | piece 0 | piece 1 | piece 2 | piece 3 | piece 4 | ..
        //   | group 0           | group 1           | group 2   ..
        // No slot is held open while the pieces are walked: if x is a parameter, they may use it, too.
        let mut dx = grads.room(0);
        let mut rest: &mut [T] = match &mut dx {
            Some(dx) => dx.as_mut_slice("pieces")?,
            None => &mut [],
        };
        let samples = dy.shape().first().copied().unwrap_or(0);
        let row = rest.len() / samples.max(1);
        let groups = in_groups(self.pieces);
        let profiles: Vec<_> = groups.iter().flatten().map(|piece| piece.profile.clone()).collect();
        // The first group adds to the gradients of parameters that the whole tape has; the others have tensors of their
        // own, which are made only when a group comes to them, as memory that other groups saved is free by then.
        let whole = grads.accumulated();
        let mut parameters = std::mem::take(&mut whole.parameters);
        let mut work = vec![];
        for pieces in groups {
            let samples: usize = pieces.iter().map(|piece| piece.samples.len()).sum();
            let (data, after) = rest.split_at_mut(samples * row);
            let accumulated = whole.with(std::mem::take(&mut parameters));
            work.push(Group { pieces, accumulated, dx: data });
            rest = after;
        }
        let walked: Vec<_> = work.into_par_iter().with_max_len(1).map(|group| group.walk(dy, row)).collect();
        let walked: Vec<(Accumulated<'_>, bool)> = walked.into_iter().collect::<Result<_>>()?;
        let (walked, reached): (Vec<_>, Vec<bool>) = walked.into_iter().unzip();
        walked.iter().filter_map(|group| group.owner).try_for_each(|owner| whole.ensure_model(owner))?;
        let mut parameters = walked.into_iter().map(|group| group.parameters);
        whole.parameters = parameters.next().unwrap_or_default();
        add_up::<T>(parameters, grads)?;
        match dx {
            Some(dx) if samples == 0 || reached.contains(&true) => grads.give(0, dx)?,
            _ => grads.leave(0),
        }
        absorb(&self.profile, &profiles);
        Ok(())
    }
}

/// Pieces whose backward passes run one after the other.
struct Group<'a, 'd, T> {
    pieces: Vec<Piece>,
    accumulated: Accumulated<'a>,
    /// The group's rows.
    dx: &'d mut [T],
}

impl<'a, T: Float> Group<'a, '_, T> {
    /// Walks the tapes in order, from dy (N, ...) to the group's part of dx, whose rows have `row` elements. Returns
    /// what has been accumulated, and whether any walk has reached its x.
    fn walk(self, dy: &Tensor, row: usize) -> Result<(Accumulated<'a>, bool)> {
        let Self { pieces, mut accumulated, dx: mut rest } = self;
        let mut reached = false;
        for Piece { mut nodes, profile, input, output, samples } in pieces {
            if let Some(profile) = &profile {
                profile.restart();
            }
            let (dx, after) = rest.split_at_mut(samples.len() * row);
            rest = after;
            let mut inputs = HashMap::new();
            if let Some(last) = output {
                accumulated.of_nodes = (0..=last).map(|_| State::Empty).collect();
                accumulated.of_nodes[last] = State::Filled(dy.slice(0, samples)?);
                walk(&mut nodes, profile.as_deref(), last, &mut accumulated, &mut inputs)?;
            }
            let gradient = input.and_then(|input| inputs.remove(&input));
            reached |= gradient.is_some();
            match gradient {
                Some(gradient) => dx.copy_from_slice(gradient.as_slice("pieces")?),
                None => dx.fill(T::zero()),
            }
        }
        Ok((accumulated, reached))
    }
}

/// Neighbouring pieces together, in at most [`GROUPS`] groups.
fn in_groups(pieces: Vec<Piece>) -> Vec<Vec<Piece>> {
    let size = pieces.len().div_ceil(GROUPS).max(1);
    let mut pieces = pieces.into_iter();
    std::iter::from_fn(|| Some(pieces.by_ref().take(size).collect::<Vec<_>>()).filter(|group| !group.is_empty()))
        .collect()
}

/// Adds the groups' own gradients of parameters, in order, to those of the whole tape.
fn add_up<'g, T: Float>(groups: impl Iterator<Item = OfParameters<'g>>, grads: &mut InputGrads<'_, '_>) -> Result<()> {
    let mut parts: BTreeMap<usize, Vec<Tensor>> = BTreeMap::new();
    for group in groups {
        let OfParameters::Own(states) = group else { continue };
        for (parameter, state) in states {
            if let State::Filled(part) = state {
                parts.entry(parameter).or_default().push(part);
            }
        }
    }
    let target = |(&parameter, parts): (&usize, &Vec<Tensor>)| {
        Some(Target { node: 0, parameter: Some(parameter), shape: parts[0].shape().clone(), dtype: parts[0].dtype() })
    };
    let targets = parts.iter().map(target).collect();
    let mut sums = InputGrads::new("pieces", Device::Cpu, targets, grads.accumulated());
    for (input, parts) in parts.values().enumerate() {
        let parts: Vec<&[T]> = parts.iter().map(|part| part.as_slice("pieces")).collect::<tensor::Result<_>>()?;
        let mut slot = sums.open(input)?;
        if let Some(Out { data, accumulate }) = slot.out::<T>()? {
            data.par_chunks_mut(GRAIN).enumerate().for_each(|(chunk, sum)| {
                for (index, part) in parts.iter().enumerate() {
                    put(sum, &part[chunk * GRAIN..][..sum.len()], accumulate || index > 0);
                }
            });
        }
        sums.close(slot);
    }
    sums.finish()
}
