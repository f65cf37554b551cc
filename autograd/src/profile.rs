//! Where the time of a pass goes: operation by operation, with the arithmetic and the memory traffic of each.
//!
//! It works like a stopwatch with laps. An operation is recorded right after it has computed, so the time since the
//! last lap is its own; a backward rule's lap ends when it has run; and code that does other work in between calls
//! [`Profile::lap`]. Every moment is charged to exactly one line, so the lines add up to the total; only that of pieces
//! that record nothing is charged to none.

use crate::Rule;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tensor::{Device, Tensor, lock};

/// Multiply-adds of an operation, as many as its mathematics needs: what a kernel computes again to save memory
/// does not count. Additions alone, normalisations and elementary functions do not count either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MultiplyAdds {
    /// For the value.
    pub value: u64,
    /// For the gradients of the first and of the second input.
    pub gradients: [u64; 2],
}

impl MultiplyAdds {
    /// Of a product of two inputs: a gradient is the product of the other one with the upstream gradient, and as
    /// much work as the value.
    pub fn product(count: usize) -> Self {
        Self { value: count as u64, gradients: [count as u64; 2] }
    }
}

/// Which work a line of a profile is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// The values of an operation.
    Forward,
    /// The gradients of an operation's inputs.
    Backward,
    /// No operation.
    Other,
}

/// What was measured about one kind of work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProfileLine {
    /// The operation's name, or that of other work.
    pub name: &'static str,
    /// Values, gradients, or neither.
    pub work: Work,
    /// How often.
    pub calls: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// Multiply-adds, as the operation's rule counts them.
    pub multiply_adds: u64,
    /// The minimum memory traffic: each input and output tensor once; none if the output is a view of an input.
    pub bytes: u64,
}

/// A stopwatch that knows what it measures. A tape fills it in: see [`Tape::profiled`](crate::Tape::profiled).
#[derive(Debug, Default)]
pub struct Profile {
    laps: Mutex<Laps>,
}

#[derive(Debug)]
struct Laps {
    last: Instant,
    lines: Vec<ProfileLine>,
}

impl Default for Laps {
    fn default() -> Self {
        Self { last: Instant::now(), lines: vec![] }
    }
}

impl Laps {
    fn take_in(&mut self, new: ProfileLine) {
        match self.lines.iter_mut().find(|line| line.name == new.name && line.work == new.work) {
            Some(line) => {
                line.calls += new.calls;
                line.seconds += new.seconds;
                line.multiply_adds += new.multiply_adds;
                line.bytes += new.bytes;
            }
            None => self.lines.push(new),
        }
    }
}

impl Profile {
    /// Forgets what was measured, and starts now.
    pub fn restart(&self) {
        *lock(&self.laps) = Laps::default();
    }

    /// Ends a lap: the time since the last one is charged to `name`, as work that is not an operation.
    pub fn lap(&self, name: &'static str) {
        self.add(name, Work::Other, 0, 0);
    }

    /// What was measured, in the order in which it first happened.
    pub fn lines(&self) -> Vec<ProfileLine> {
        lock(&self.laps).lines.clone()
    }

    /// An operation has computed its value.
    pub(crate) fn forward<'a>(
        &self,
        rule: &dyn Rule,
        mut inputs: impl Iterator<Item = &'a Tensor> + Clone,
        value: &Tensor,
    ) {
        wait_for(&value.device());
        let moved = value.bytes() + inputs.clone().map(Tensor::bytes).sum::<usize>();
        let is_view = inputs.any(|input| input.buffer_id() == value.buffer_id());
        let bytes = if is_view { 0 } else { moved };
        self.add(rule.name(), Work::Forward, rule.multiply_adds(value.shape()).value, bytes);
    }

    /// A backward rule has run: it read and wrote `bytes`.
    pub(crate) fn backward(&self, device: &Device, name: &'static str, multiply_adds: u64, bytes: usize) {
        wait_for(device);
        self.add(name, Work::Backward, multiply_adds, bytes);
    }

    /// Adds the lines of other profiles, which ran at the same time since the last lap: the wall-clock time since then
    /// is divided among their lines in proportion to each line's own time.
    pub(crate) fn absorb<'p>(&self, others: impl Iterator<Item = &'p Arc<Self>>) {
        let lines: Vec<ProfileLine> = others.flat_map(|other| other.lines()).collect();
        let total: f64 = lines.iter().map(|line| line.seconds).sum();
        let mut laps = lock(&self.laps);
        let now = Instant::now();
        let share = (now - std::mem::replace(&mut laps.last, now)).as_secs_f64() / total.max(f64::MIN_POSITIVE);
        lines.into_iter().for_each(|line| laps.take_in(ProfileLine { seconds: share * line.seconds, ..line }));
    }

    fn add(&self, name: &'static str, work: Work, multiply_adds: u64, bytes: usize) {
        let mut laps = lock(&self.laps);
        let now = Instant::now();
        let seconds = (now - std::mem::replace(&mut laps.last, now)).as_secs_f64();
        laps.take_in(ProfileLine { name, work, calls: 1, seconds, multiply_adds, bytes: bytes as u64 });
    }
}

/// On a GPU a recorded operation has only been launched, so its time can be taken only after waiting for it. Errors are
/// ignored here: the next call that uses the GPU reports them.
fn wait_for(device: &Device) {
    let _ = device.synchronize();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_profiles_that_ran_together_is_divided_among_their_lines() {
        let started = Instant::now();
        let line = |name, seconds, bytes| ProfileLine {
            name,
            work: Work::Forward,
            calls: 1,
            seconds,
            multiply_adds: 5,
            bytes,
        };
        let others = [vec![line("a", 3.0, 10)], vec![line("a", 1.0, 20), line("b", 12.0, 40)]].map(|lines| {
            let other = Profile::default();
            lines.into_iter().for_each(|line| lock(&other.laps).take_in(line));
            Arc::new(other)
        });
        let profile = Profile::default();
        std::thread::sleep(std::time::Duration::from_millis(2));
        profile.absorb(others.iter());
        let lines = profile.lines();
        let counts: Vec<_> = lines.iter().map(|line| (line.name, line.calls, line.multiply_adds, line.bytes)).collect();
        assert_eq!(counts, [("a", 2, 10, 30), ("b", 1, 5, 40)]);
        let [a, b] = [lines[0].seconds, lines[1].seconds];
        assert!((b / a - 3.0).abs() < 1e-9, "in proportion: {a}, {b}");
        assert!((0.002..=started.elapsed().as_secs_f64()).contains(&(a + b)), "all of the time, and no more");
    }
}
