//! Work that nothing waits for yet, on a stream of its own, beside all other work: a GPU fills with it what one kernel
//! after another would leave idle.
//!
//! Three things make that correct. Work aside waits for all work before it, and later work waits for it from the
//! [`Gpu::join`] on. Until then the tensors that it reads are kept, so nobody can reuse their memory or write to them
//! in place. And memory that is returned while it is being submitted, its own temporary tensors above all, goes back to
//! the pool only when it is joined.
//!
//! At most one piece of work is aside: the next one joins it first, which bounds what is kept.

use super::{Gpu, Stream};
use crate::{Error, Result, Tensor, lock};
use std::cell::Cell;

/// If this variable is set, nothing is aside: all work is done in order. For finding out whether the second stream is at
/// fault, and what it gains.
const ONE_STREAM_VARIABLE: &str = "BIFORMER_ONE_STREAM";

/// Whether work may be aside.
pub(super) fn allowed() -> bool {
    std::env::var_os(ONE_STREAM_VARIABLE).is_none()
}

thread_local! {
    /// The device whose second stream this thread is using, if any.
    static ASIDE_ON: Cell<*const Gpu> = const { Cell::new(std::ptr::null()) };
}

/// What the work that is aside reads; none if there is no such work.
pub(super) type Reads = Option<Vec<Tensor>>;

/// While it lives, this thread's requests go to the second stream.
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

impl Gpu {
    /// The stream of this thread's requests.
    pub(crate) fn stream(&self) -> Stream {
        if std::ptr::eq(ASIDE_ON.get(), self) { Stream::Aside } else { Stream::Work }
    }

    /// Submits work that executes beside everything that is submitted after it, until [`Gpu::join`]. `reads` are all
    /// tensors that it reads and that somebody else could drop or change meanwhile; nobody but it may use what it
    /// writes. Within other work aside it is a part of that; with the variable `BIFORMER_ONE_STREAM` set, nothing is aside.
    /// Errors: those of the work, and [`Error::Gpu`].
    pub fn aside<R, E: From<Error>>(
        &self,
        reads: &[&Tensor],
        work: impl FnOnce() -> std::result::Result<R, E>,
    ) -> std::result::Result<R, E> {
        if !self.may_divert || self.stream() == Stream::Aside {
            return work();
        }
        // Locked to the end: a join by another thread must not miss a part of the work.
        let mut aside = lock(&self.aside);
        self.join_all(&mut aside)?;
        self.driver.order(Stream::Work, Stream::Aside)?;
        *aside = Some(reads.iter().map(|&tensor| tensor.clone()).collect());
        let _diverted = Diverted::new(self);
        work()
    }

    /// Does two pieces of work at once, the first one [aside](Gpu::aside), and joins them. Errors: those of both, and
    /// [`Error::Gpu`].
    pub fn overlap<R, E: From<Error>>(
        &self,
        reads: &[&Tensor],
        aside: impl FnOnce() -> std::result::Result<(), E>,
        work: impl FnOnce() -> std::result::Result<R, E>,
    ) -> std::result::Result<R, E> {
        let done = self.aside(reads, aside).and_then(|()| work());
        self.join()?;
        done
    }

    /// Makes all later work wait for the work that is aside. Within that, does nothing. Errors: [`Error::Gpu`].
    pub fn join(&self) -> Result<()> {
        match self.stream() {
            Stream::Aside => Ok(()),
            _ => self.join_all(&mut lock(&self.aside)),
        }
    }

    fn join_all(&self, aside: &mut Reads) -> Result<()> {
        if aside.is_none() {
            return Ok(());
        }
        self.driver.order(Stream::Aside, Stream::Work)?;
        *aside = None;
        self.release_held_back();
        Ok(())
    }
}
