//! What happens when the system has no memory left at all.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};
use std::thread;
use std::time::Duration;
use tensor::memory::is_refusable;

/// What is to be said, unless more is known.
const NEED_LESS: &str = "smaller batches, images or models, or in training recompute = \"block\", need less";

static KNOWN: RwLock<&str> = RwLock::new(NEED_LESS);

/// Sets what is to be said if memory runs out from now on: that what was done is saved, say. It stays in memory.
pub fn when_it_runs_out(words: String) {
    *KNOWN.write().unwrap_or_else(PoisonError::into_inner) = words.leak();
}

/// What is to be said where memory has run out.
pub(super) fn advice() -> &'static str {
    KNOWN.try_read().map_or(NEED_LESS, |words| *words)
}

/// The program's global allocator: the system allocator, except that if it refuses a request, the program ends with an
/// error message and exit status 2. Otherwise it would abort, since most code that asks for memory does not handle a
/// refusal. Code that does has a better message of its own ([`is_refusable`]).
#[derive(Debug)]
pub struct OrEnd;

// SAFETY: all of it is the system's allocator.
unsafe impl GlobalAlloc for OrEnd {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by the caller, here and below.
        or_end(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        or_end(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        or_end(unsafe { System.realloc(place, layout, size) }, size)
    }
}

#[inline]
fn or_end(place: *mut u8, size: usize) -> *mut u8 {
    if place.is_null() && !is_refusable() {
        end(size);
    }
    place
}

#[cold]
fn end(size: usize) -> ! {
    speak_alone();
    // This takes no memory.
    let _ =
        writeln!(io::stderr(), "error: {}: the system refused {size} bytes more; {}", tensor::OUT_OF_MEMORY, advice());
    exit()
}

/// Returns in one thread: the first to say that memory has run out, which then ends the program. In any other thread it
/// does not return, since several may run out of memory at once, and that is reported once.
pub(super) fn speak_alone() {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    thread_local! {
        static SPEAKS: Cell<bool> = const { Cell::new(false) };
    }
    if SPEAKS.get() || !TAKEN.swap(true, Ordering::Relaxed) {
        return SPEAKS.set(true);
    }
    // Not for ever: this thread may hold what the one that speaks is waiting for.
    thread::sleep(Duration::from_secs(1));
    exit()
}

/// Ends the program without the destructors of this thread's variables, which might wait for a lock that it holds, or
/// ask for memory.
#[cfg(unix)]
fn exit() -> ! {
    // SAFETY: what is not run is of no use to a program that ends.
    unsafe { libc::_exit(2) }
}

#[cfg(not(unix))]
fn exit() -> ! {
    std::process::exit(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_count() {
        assert_eq!(advice(), NEED_LESS);
        for words in ["what is done is saved", "so are the pictures"] {
            when_it_runs_out(words.to_owned());
            assert_eq!(advice(), words);
        }
    }
}
