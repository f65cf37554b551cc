//! Work that nothing waits for yet, on a stream of its own, beside all other work: a GPU fills with it what one kernel
//! after another would leave idle.
//!
//! Four things make that correct. Work aside waits for all work before it, and later work waits for it from the
//! [`Gpu::join`] on. Until then the tensors that it reads are kept, so nobody can reuse their memory; whoever wants to
//! write to one in place calls [`Gpu::join_readers`]. Memory that is returned while it is being submitted, its own
//! temporary tensors above all, goes back to the pool only when it is joined, or when memory runs out and both streams
//! wait for each other. And it has its own instance of each module, as kernels count in a module's memory which of
//! their blocks are done.
//!
//! Several pieces of work can be aside, which execute in order. How much memory they keep is limited: a new piece joins
//! the first ones, if need be.

use super::pool::{Block, GpuStats};
use super::{Gpu, Mark, Stream};
use crate::{Error, Result, Tensor, lock};
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// If this variable is set, nothing is aside: all work is done in order. For finding out whether that stream is at
/// fault, and what it gains.
const ONE_STREAM_VARIABLE: &str = "BIFORMER_ONE_STREAM";

/// Whether work may be aside.
pub(super) fn allowed() -> bool {
    std::env::var_os(ONE_STREAM_VARIABLE).is_none()
}

thread_local! {
    /// The device on whose stream aside this thread makes its requests, if any.
    static ASIDE_ON: Cell<*const Gpu> = const { Cell::new(std::ptr::null()) };
}

/// Work aside may keep one in so many bytes of all tensors: so little more memory makes no difference to a user.
const OF_BYTES: usize = 100;

/// How many bytes work aside may keep. That is also up to half of the difference from the peak so far, as a backward
/// pass frees memory as it goes. One piece may always be aside, whatever it keeps.
fn budget(GpuStats { in_use, peak_in_use, .. }: GpuStats) -> usize {
    (in_use / OF_BYTES).max(peak_in_use.saturating_sub(in_use) / 2)
}

/// A piece of work that is aside: where it ends, what it reads, and what it has used.
pub(super) struct Pending {
    end: Mark,
    reads: Vec<Tensor>,
    used: Vec<Block>,
}

impl Pending {
    /// The bytes that it keeps.
    fn kept(&self) -> usize {
        let read: usize = self.reads.iter().map(Tensor::bytes).sum();
        read + self.used.iter().map(|block| block.capacity).sum::<usize>()
    }
}

/// While it lives, this thread's requests go aside.
struct Diverted<'a> {
    gpu: &'a Gpu,
    before: *const Gpu,
}

impl<'a> Diverted<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        lock(&gpu.pool).holds_back = true;
        Self { gpu, before: ASIDE_ON.replace(gpu) }
    }
}

impl Drop for Diverted<'_> {
    fn drop(&mut self) {
        ASIDE_ON.set(self.before);
        lock(&self.gpu.pool).holds_back = false;
    }
}

/// Joins what is aside when it goes: at the latest, and even by a panic.
#[derive(Debug)]
pub struct Joining<'a>(&'a Gpu);

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        // Whoever wants to know of an error has joined before.
        let _ = self.0.join();
    }
}

impl Gpu {
    /// The stream of this thread's requests.
    pub(crate) fn stream(&self) -> Stream {
        if std::ptr::eq(ASIDE_ON.get(), self) { Stream::Aside } else { Stream::Work }
    }

    /// The same, for a request that is about to be made. Errors: [`Error::Gpu`] while another thread records, as the
    /// request would become a part of that.
    pub(crate) fn stream_to_ask(&self) -> Result<Stream> {
        match &*lock(&self.keys) {
            Some(keys) if keys.are_of_another_thread() => Err(self.refusal("another thread is recording")),
            _ => Ok(self.stream()),
        }
    }

    /// Submits work that executes beside everything that is submitted after it, until [`Gpu::join`]. Nothing can be
    /// copied from or to the machine's memory. Within other work aside it is a part of that; with the variable
    /// `BIFORMER_ONE_STREAM` set, nothing is aside. Errors: those of the work, and [`Error::Gpu`].
    ///
    /// # Safety
    /// Until the join, all tensors that the work reads, and that somebody else could drop or change, must be in
    /// `reads`; and nobody else may use, or drop, what it writes, except for tensors that it makes and drops itself.
    pub unsafe fn aside<E: From<Error>>(
        &self,
        reads: &[&Tensor],
        work: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        if !self.may_divert || self.stream() == Stream::Aside {
            return work();
        }
        self.stream_to_ask()?;
        // To the end: a join by another thread must not miss a part of the work.
        let _alone = lock(&self.submitting);
        let reads: Vec<Tensor> = reads.iter().map(|&tensor| tensor.clone()).collect();
        let (own, most) = (reads.iter().map(Tensor::bytes).sum::<usize>(), budget(self.stats()));
        self.join_while(|aside| own + aside.iter().map(Pending::kept).sum::<usize>() > most)?;
        // From now on what other threads return is held back: their requests are not ordered before this work.
        let diverted = Diverted::new(self);
        if let Err(error) = self.driver.order(Stream::Work, Stream::Aside) {
            drop(diverted);
            self.release(self.held_back());
            return Err(error.into());
        }
        let done = catch_unwind(AssertUnwindSafe(work));
        drop(diverted);
        // Even if the work has failed: what it had submitted before will execute.
        let (end, used) = (self.driver.mark(Stream::Aside), self.held_back());
        match end {
            Ok(end) => lock(&self.aside).push_back(Pending { end, reads, used }),
            Err(error) => {
                // Nothing could wait for it later. If it failed itself, that is the cause.
                let _ = self.driver.finish(Stream::Aside);
                self.release(used);
                done.unwrap_or_else(|panic| resume_unwind(panic))?;
                return Err(error.into());
            }
        }
        done.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Makes all later work wait for the work that is aside. Within that, does nothing. Errors: [`Error::Gpu`].
    pub fn join(&self) -> Result<()> {
        match self.stream() {
            Stream::Aside => Ok(()),
            _ => {
                let _alone = lock(&self.submitting);
                self.join_all()
            }
        }
    }

    /// The same, by a thread that has locked `submitting`.
    pub(super) fn join_all(&self) -> Result<()> {
        self.join_while(|_| true)
    }

    /// Makes all later work wait for all that is aside, and, within work aside, the rest of that for all other work. So
    /// either may use whatever memory has been returned until now. Errors: [`Error::Gpu`].
    pub(super) fn meet(&self) -> Result<()> {
        if self.stream() != Stream::Aside {
            return self.join();
        }
        self.driver.order(Stream::Aside, Stream::Work)?;
        lock(&self.pool).holds_back = false;
        self.forget_aside();
        self.release(self.held_back());
        lock(&self.pool).holds_back = true;
        // Last, as other threads may have returned something in between.
        self.driver.order(Stream::Work, Stream::Aside)
    }

    /// As [`Gpu::join`], when the returned value is dropped.
    pub fn joining(&self) -> Joining<'_> {
        Joining(self)
    }

    /// As [`Gpu::join`], of the work that reads this tensor, and what comes before it: then the tensor may be written.
    pub fn join_readers(&self, tensor: &Tensor) -> Result<()> {
        let reads = |pending: &Pending| pending.reads.iter().any(|read| read.buffer_id() == tensor.buffer_id());
        match self.stream() {
            Stream::Aside => Ok(()),
            _ => {
                let _alone = lock(&self.submitting);
                self.join_while(|aside| aside.iter().any(reads))
            }
        }
    }

    /// Joins the first of what is aside while there is anything, and this holds for it.
    fn join_while(&self, holds: impl Fn(&VecDeque<Pending>) -> bool) -> Result<()> {
        let mut aside = lock(&self.aside);
        while holds(&aside)
            && let Some(first) = aside.front()
        {
            if let Err(error) = self.driver.wait(Stream::Work, first.end) {
                drop(aside);
                // Then this thread waits. If it cannot, either, the device will execute nothing more.
                let _ = self.driver.finish(Stream::Aside);
                self.forget_aside();
                return Err(error);
            }
            aside.pop_front().into_iter().for_each(|done| self.let_go(done));
        }
        Ok(())
    }

    /// Lets go of all that is aside, when nobody need wait for it any more.
    pub(super) fn forget_aside(&self) {
        let aside = std::mem::take(&mut *lock(&self.aside));
        for pending in aside {
            self.driver.drop_mark(pending.end);
            self.let_go(pending);
        }
    }

    fn let_go(&self, Pending { reads, used, .. }: Pending) {
        drop(reads);
        self.release(used);
    }
}
