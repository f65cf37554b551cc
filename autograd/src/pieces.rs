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
use crate::accumulated::{Accumulated, FlatSpan, State};
use crate::backward::walk;
use crate::params::Owner;
use crate::tape::{Node, Origin, TapeKind, Used};
use crate::{Error, ParamId, Profile, Result, Rule, Tape, Var};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use tensor::cpu::parallel::{GRAIN, Out, put};
use tensor::{DType, Device, Float, Tensor, match_float};

/// The most groups of pieces in a backward pass. Groups run in parallel; all but the first accumulate into gradient
/// buffers of their own.
const GROUPS: usize = 4;

impl Tape {
    /// Runs `work` on pieces of x (N, ...), as equal in size as possible and of at most `size` samples, and
    /// concatenates their values along the first axis. `work` gets the piece and the range of samples that it holds;
    /// what else it returns is collected, one entry per piece. It runs on several threads at once, and must process
    /// each sample independently.
    ///
    /// Errors: those of `work`, from the first piece that fails. On the CPU (a GPU has a single piece)
    /// [`tensor::Error::Shape`] if a piece's value does not have as many samples as the piece, and
    /// [`tensor::Error::NotContiguous`] if it is a view that is not contiguous.
    pub fn in_pieces<'t, S: Send, E: From<Error> + Send>(
        &'t self,
        x: &Var<'t>,
        size: usize,
        work: impl for<'s> Fn(&Var<'s>, Range<usize>) -> std::result::Result<(Var<'s>, S), E> + Sync,
    ) -> std::result::Result<(Var<'t>, Vec<S>), E> {
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
        let (mut pieces, mut values, mut rests, mut parameters) = (vec![], vec![], vec![], Used::new());
        for done in done {
            let Done { piece, used, value, rest } = done?;
            pieces.push(piece);
            parameters.extend(used);
            values.push(value);
            rests.push(rest);
        }

        // All that they have recorded is one node here.
        let joined = Tensor::join(&values).map_err(Error::from)?;
        drop(values);
        let profile = self.shared_profile();
        absorb(&profile, pieces.iter().map(|piece| &piece.profile));
        let y = match pieces.iter().any(|piece| piece.output.is_some()) {
            true => self.append(&[x], joined, Pieces { pieces, used: parameters.clone(), profile })?,
            false => self.constant(joined),
        };
        self.also_uses(parameters);
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

/// A piece that has run: what was recorded, the parameters that were used, the value, and what else `work` returned.
struct Done<S> {
    piece: Piece,
    used: Used,
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
        let (nodes, used) = tape.into_parts();
        Ok(Done { piece: Piece { nodes, profile, input, output, samples }, used, value, rest })
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

impl Piece {
    /// Whether the gradient of its value reaches a parameter of this owner, not counting segments.
    fn reaches(&self, owner: u64) -> bool {
        let mut reached = vec![false; self.nodes.len()];
        self.output.iter().for_each(|&output| reached[output] = true);
        self.nodes.iter().enumerate().rev().any(|(place, node)| {
            if reached[place] {
                node.inputs.iter().flatten().for_each(|&input| reached[input] = true);
            }
            reached[place] && matches!(&node.origin, Origin::Parameter(_, other) if other.number == owner)
        })
    }
}

struct Pieces {
    pieces: Vec<Piece>,
    used: Used,
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
        self.pieces.iter_mut().flat_map(|piece| &mut piece.nodes).flat_map(Node::saved_mut).collect()
    }

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        match_float!(dy.dtype(), "pieces", T => self.backward_of::<T>(&dy, grads))
    }
}

impl Pieces {
    fn backward_of<T: Float>(mut self, dy: &Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let mut slot = grads.open(0)?;
        let dx = slot.out::<T>()?;
        // dx has a row for each sample, none of any length where nobody wants it; pieces and groups are runs of them:
        //   | piece 0 | piece 1 | piece 2 | piece 3 | piece 4 | ..
        //   | group 0           | group 1           | group 2   ..
        let samples = dy.shape().first().copied().unwrap_or(0);
        let row = dx.as_ref().map_or(0, |dx| dx.data.len() / samples.max(1));
        let accumulate = dx.as_ref().is_some_and(|dx| dx.accumulate);
        let mut rest = dx.map_or(&mut [][..], |dx| dx.data);
        let parameters = UsedParameters::of(&self.used, grads, &self.pieces);
        let groups = in_groups(std::mem::take(&mut self.pieces));
        let profiles: Vec<_> = groups.iter().flatten().map(|piece| piece.profile.clone()).collect();
        // All but the first group have gradients of their own, which are allocated only when a group's turn comes, as
        // memory that other groups saved is free by then.
        let mut whole = Some(parameters.accumulated_in_whole(grads)?);
        let mut work = vec![];
        for pieces in groups {
            let samples: usize = pieces.iter().map(|piece| piece.samples.len()).sum();
            let (data, after) = rest.split_at_mut(samples * row);
            work.push(Group { pieces, whole: whole.take(), dx: Out { data, accumulate } });
            rest = after;
        }
        let backward_of_group = |Group { pieces, whole, dx }: Group<'_, T>| -> Result<Option<Partial>> {
            if let Some(accumulated) = whole {
                return walk_group(pieces, accumulated, dy, dx, row).map(|()| None);
            }
            let mut partial = parameters.partial(T::DTYPE);
            walk_group(pieces, parameters.accumulated_in_group(&mut partial)?, dy, dx, row)?;
            Ok(Some(partial))
        };
        let walked: Vec<_> = work.into_par_iter().with_max_len(1).map(backward_of_group).collect();
        let partials: Vec<Partial> = walked.into_iter().filter_map(Result::transpose).collect::<Result<_>>()?;
        grads.close(slot);
        parameters.add_up::<T>(&partials, grads)?;
        absorb(&self.profile, &profiles);
        Ok(())
    }
}

/// Pieces whose backward passes run one after the other.
struct Group<'a, T> {
    pieces: Vec<Piece>,
    /// The whole tape's gradients of parameters, for the first group: it adds to them directly.
    whole: Option<Accumulated<'a>>,
    /// The group's rows.
    dx: Out<'a, T>,
}

/// Walks the tapes of a group in order, from dy (N, ...) to the group's part of dx, whose rows have `row` elements.
fn walk_group<T: Float>(
    pieces: Vec<Piece>,
    mut accumulated: Accumulated<'_>,
    dy: &Tensor,
    dx: Out<'_, T>,
    row: usize,
) -> Result<()> {
    let mut dx_rest = dx.data;
    for Piece { mut nodes, profile, input, output, samples } in pieces {
        if let Some(profile) = &profile {
            profile.restart();
        }
        let (data, after) = dx_rest.split_at_mut(samples.len() * row);
        dx_rest = after;
        let mut inputs = HashMap::new();
        if let Some(last) = output {
            accumulated.interior = (0..=last).map(|_| State::Empty).collect();
            accumulated.interior[last] = State::Filled(dy.slice(0, samples)?);
            walk(&mut nodes, profile.as_deref(), last, &mut accumulated, &mut inputs)?;
        }
        match input.and_then(|input| inputs.remove(&input)) {
            Some(gradient) => put(data, gradient.as_slice("pieces")?, dx.accumulate),
            None if !dx.accumulate => data.fill(T::zero()),
            None => {}
        }
    }
    Ok(())
}

/// Neighbouring pieces together, in at most [`GROUPS`] groups.
fn in_groups(pieces: Vec<Piece>) -> Vec<Vec<Piece>> {
    let size = pieces.len().div_ceil(GROUPS).max(1);
    let mut pieces = pieces.into_iter();
    std::iter::from_fn(|| Some(pieces.by_ref().take(size).collect::<Vec<_>>()).filter(|group| !group.is_empty()))
        .collect()
}

/// Those parameters that the pieces use and may have gradients of, and how many elements each has.
struct UsedParameters {
    /// Their owner; `None` if there are none.
    owner: Option<Owner>,
    sizes: BTreeMap<usize, usize>,
}

/// A group's gradients by parameter, and which parameters have one. Each is a tensor of its own: after a stage the free
/// memory of the pool is fragmented, and one buffer for all of them might not fit anywhere.
struct Partial {
    gradients: Vec<(usize, Tensor)>,
    written: Vec<bool>,
}

impl UsedParameters {
    /// Those of the one owner whose gradients this backward pass collects. (Others may have been used, too: a
    /// teacher's, whose values were detached.)
    fn of(used: &Used, grads: &InputGrads<'_, '_>, pieces: &[Piece]) -> Self {
        let (layout, met) = grads.collected();
        let mut owners: Vec<&Owner> =
            used.values().filter(|owner| layout.is_some_and(|layout| *layout == *owner.layout)).collect();
        owners.dedup_by_key(|owner| owner.number);
        let of_met = owners.iter().find(|owner| met == Some(owner.number));
        let reached = || owners.iter().find(|owner| pieces.iter().any(|piece| piece.reaches(owner.number)));
        // One that is used in segments alone has no nodes here.
        let only = || owners.first().filter(|_| met.is_none());
        let owner = of_met.or_else(reached).or_else(only).copied().cloned();
        let is_theirs = |number: u64| owner.as_ref().is_some_and(|owner| owner.number == number);
        let size = |(&(number, id), owner): (&(u64, ParamId), &Owner)| {
            is_theirs(number).then(|| (id.index(), owner.layout.shape(id).count()))
        };
        let sizes = used.iter().filter_map(size).collect();
        Self { owner, sizes }
    }

    /// Memory for a group's gradients.
    fn partial(&self, dtype: DType) -> Partial {
        let parameters = self.sizes.last_key_value().map_or(0, |(&last, _)| last + 1);
        let gradients = self.sizes.iter().map(|(&parameter, &size)| (parameter, Tensor::empty([size], dtype)));
        Partial { gradients: gradients.collect(), written: vec![false; parameters] }
    }

    /// Where a group's walk puts gradients: into memory of its own.
    fn accumulated_in_group<'p>(&self, partial: &'p mut Partial) -> Result<Accumulated<'p>> {
        let mut spans: Vec<Option<FlatSpan<'_>>> = partial.written.iter().map(|_| None).collect();
        for (parameter, gradient) in &mut partial.gradients {
            spans[*parameter] = Some(FlatSpan::Cpu(gradient.as_mut_bytes("pieces")?));
        }
        Ok(self.accumulated_with(spans, &mut partial.written))
    }

    /// Where the first group's does: straight into the gradients of the whole tape.
    fn accumulated_in_whole<'g>(&self, grads: &'g mut InputGrads<'_, '_>) -> Result<Accumulated<'g>> {
        let (spans, written) = match &self.owner {
            Some(owner) => grads.parameters(owner)?,
            None => (&mut [][..], &mut [][..]),
        };
        let borrowed = |span: &'g mut Option<FlatSpan<'_>>| match span {
            Some(FlatSpan::Cpu(bytes)) => Some(FlatSpan::Cpu(bytes)),
            _ => None,
        };
        let spans = spans.iter_mut().map(borrowed).collect();
        Ok(self.accumulated_with(spans, written))
    }

    fn accumulated_with<'p>(&self, spans: Vec<Option<FlatSpan<'p>>>, written: &'p mut [bool]) -> Accumulated<'p> {
        let (layout, owner) = self.owner.clone().map(|owner| (owner.layout, owner.number)).unzip();
        Accumulated { interior: vec![], layout, owner, spans, written }
    }

    /// Adds the groups' gradients, in order, to those of the whole tape.
    fn add_up<T: Float>(&self, partials: &[Partial], grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let Some(owner) = &self.owner else { return Ok(()) };
        let (sums, written) = grads.parameters(owner)?;
        for (place, (&parameter, &size)) in self.sizes.iter().enumerate() {
            let parts = partials.iter().filter(|partial| partial.written[parameter]);
            let parts = parts.map(|partial| Ok(partial.gradients[place].1.as_slice::<T>("pieces")?));
            let parts: Vec<&[T]> = parts.collect::<Result<_>>()?;
            let sum = sums.get_mut(parameter).and_then(Option::as_mut);
            let Some(FlatSpan::Cpu(sum)) = sum.filter(|sum| sum.bytes() == size_of::<T>() * size) else {
                return Err(Error::ForeignGradients { parameters: sums.len() });
            };
            if parts.is_empty() {
                continue;
            }
            let accumulate = std::mem::replace(&mut written[parameter], true);
            let chunks = bytemuck::cast_slice_mut::<u8, T>(sum).par_chunks_mut(GRAIN).enumerate();
            chunks.for_each(|(chunk, sum)| {
                for (index, part) in parts.iter().enumerate() {
                    put(sum, &part[chunk * GRAIN..][..sum.len()], accumulate || index > 0);
                }
            });
        }
        Ok(())
    }
}
