//! The emulated device's second stream. A GPU may copy at any time that the order of its streams allows; here it always
//! is the one that harms whoever forgot to order them or to wait. What is sent arrives as late as possible, and its target
//! is poison until then; to send where other work may still be is an error, and so is to change what the host cannot
//! know to have left.

use super::failure;
use crate::Result;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};

/// Copies that were sent.
#[derive(Default)]
pub struct Copies {
    pending: Vec<Sent>,
    /// Those that are done; but the host has not waited for it.
    arrived: Vec<Sent>,
    /// What other work used since copies were last ordered after it: from an address up to another.
    used: HashMap<u64, u64>,
}

struct Sent {
    from: u64,
    to: u64,
    bytes: usize,
    /// Of what lay there when it was sent.
    hash: u64,
}

impl Copies {
    /// Takes down what work uses.
    pub fn mark_used(&mut self, address: u64, bytes: usize) {
        let end = self.used.entry(address).or_default();
        *end = (*end).max(address + bytes as u64);
    }

    /// Copies come after the work so far.
    pub fn follow_work(&mut self) {
        self.used.clear();
    }

    /// See [`Driver::send`](super::Driver::send).
    pub unsafe fn send(&mut self, from: &[u8], to: u64) -> Result<()> {
        let end = to + from.len() as u64;
        if self.used.iter().any(|(&start, &stop)| start < end && to < stop) {
            return Err(failure(
                "a copy is sent to where work may not be done, as no order says that it comes after it",
            ));
        }
        // SAFETY: the caller's promise.
        unsafe { (to as *mut u8).write_bytes(0xFF, from.len()) };
        self.pending.push(Sent { from: from.as_ptr() as u64, to, bytes: from.len(), hash: hash(from) });
        Ok(())
    }

    /// Work comes after the copies so far.
    pub fn arrive(&mut self) {
        for sent in self.pending.drain(..) {
            // SAFETY: whoever sent it promised that both places stay until the host has waited.
            unsafe { std::ptr::copy_nonoverlapping(sent.from as *const u8, sent.to as *mut u8, sent.bytes) };
            self.arrived.push(sent);
        }
    }

    /// The host has waited for all that arrived.
    pub fn leave(&mut self) -> Result<()> {
        let changed = |sent: Sent| {
            // SAFETY: as above.
            hash(unsafe { std::slice::from_raw_parts(sent.from as *const u8, sent.bytes) }) != sent.hash
        };
        match self.arrived.drain(..).any(changed) {
            true => Err(failure("what was sent was changed by the host, which had not waited until it left")),
            false => Ok(()),
        }
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}
