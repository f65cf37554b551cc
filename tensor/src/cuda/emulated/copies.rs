//! The emulated device's stream of copies. A GPU may copy at any time that the order of its streams allows; here the
//! time is always the one that exposes a missing order or wait. A copy arrives as late as possible, and its target is
//! poisoned until then. It is an error to send to memory that a copy or fill of the other work may still use, or to
//! change the source before the host has waited for the copy.

use super::failure;
use crate::Result;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};

/// Copies that were sent.
#[derive(Default)]
pub struct Copies {
    pending: Vec<Sent>,
    /// Copies that are done, but for which the host has not waited.
    arrived: Vec<Sent>,
    /// The memory that copies and fills of the other work have used since sent copies were last ordered after them:
    /// start and end of each range.
    used: HashMap<u64, u64>,
}

struct Sent {
    from: u64,
    to: u64,
    bytes: usize,
    /// The hash of the source when it was sent.
    hash: u64,
}

impl Copies {
    /// Notes memory that work uses.
    pub fn mark_used(&mut self, address: u64, bytes: usize) {
        let end = self.used.entry(address).or_default();
        *end = (*end).max(address + bytes as u64);
    }

    /// Orders later copies after all work so far.
    pub fn follow_work(&mut self) {
        self.used.clear();
    }

    /// See [`Driver::send`](super::Driver::send).
    pub unsafe fn send(&mut self, from: &[u8], to: u64) -> Result<()> {
        let end = to + from.len() as u64;
        if self.used.iter().any(|(&start, &stop)| start < end && to < stop) {
            return Err(failure(
                "a copy is sent to memory that earlier work may still use: no order makes it wait for that work",
            ));
        }
        // SAFETY: the caller's promise.
        unsafe { (to as *mut u8).write_bytes(0xFF, from.len()) };
        self.pending.push(Sent { from: from.as_ptr() as u64, to, bytes: from.len(), hash: hash(from) });
        Ok(())
    }

    /// Orders later work after all copies so far: they are done now.
    pub fn arrive(&mut self) {
        for sent in self.pending.drain(..) {
            // SAFETY: whoever sent it promised that both places stay until the host has waited.
            unsafe { std::ptr::copy_nonoverlapping(sent.from as *const u8, sent.to as *mut u8, sent.bytes) };
            self.arrived.push(sent);
        }
    }

    /// The host has waited for the copies that are done: their sources may change from now on.
    pub fn leave(&mut self) -> Result<()> {
        let changed = |sent: Sent| {
            // SAFETY: as above.
            hash(unsafe { std::slice::from_raw_parts(sent.from as *const u8, sent.bytes) }) != sent.hash
        };
        match self.arrived.drain(..).any(changed) {
            true => Err(failure("the host changed memory that was being sent: it had not waited for the copy")),
            false => Ok(()),
        }
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use crate::cuda::{Gpu, Stream};

    /// On a GPU each of these would be right most of the time.
    #[test]
    fn copies_out_of_order_are_noticed() {
        let Some(gpu) = Gpu::for_tests(1) else { return };
        let driver = gpu.driver();
        let [there, elsewhere] = [(); 2].map(|()| driver.allocate(16).unwrap().unwrap());
        let mut host = [1u8; 16];
        let read = |address| {
            let mut bytes = [0; 16];
            // SAFETY: there are as many.
            unsafe { driver.download(&mut [(address, &mut bytes)]).unwrap() };
            bytes
        };
        // SAFETY: all places have 16 bytes, and what is sent from them stays.
        unsafe {
            driver.send(&host, there).unwrap();
            driver.copy(Stream::Work, there, elsewhere, 16).unwrap();
            assert_eq!(read(elsewhere), [0xFF; 16], "work that does not wait for a copy");

            driver.order(Stream::Copies, Stream::Work).unwrap();
            driver.copy(Stream::Work, there, elsewhere, 16).unwrap();
            assert!(
                driver.send(&host, there).unwrap_err().to_string().contains("no order"),
                "a copy that overtakes work"
            );
            driver.order(Stream::Work, Stream::Copies).unwrap();
            driver.send(&host, there).unwrap();
            assert_eq!(read(elsewhere), [1; 16]);

            host.fill(2);
            let error = driver.finish(Stream::Copies).unwrap_err().to_string();
            assert!(error.contains("had not waited"), "a host that changes what has not left yet: {error}");
            [there, elsewhere].into_iter().for_each(|address| driver.free(address));
        }
    }
}
