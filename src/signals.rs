//! Signals, by which a person or a system asks a program to end.

use anyhow::{Context, Result};
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Two interrupts within this time count as one: a terminal sends Ctrl-C both to the program and to its parent process,
/// which may forward it.
const ONE: Duration = Duration::from_millis(500);

/// Whether a run was asked to stop.
static STOP: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C (and on Unix SIGTERM, SIGHUP and SIGUSR1, by which schedulers warn of a time limit) no longer
/// ends the program but sets the returned flag; a second Ctrl-C ends it. Signals that the parent process has set to be
/// ignored, as `nohup` does, stay ignored. Must be called before other threads are started.
pub fn stop_when_asked() -> Result<&'static AtomicBool> {
    system::watch().context("Ctrl-C")?;
    Ok(&STOP)
}

fn stop() {
    STOP.store(true, Ordering::Release);
    let _ = writeln!(io::stderr(), "\nStopping with a checkpoint (press Ctrl-C again to stop at once, without) ...");
}

/// Ends the program as the request to stop would have ended it: by that signal. An exit with status 130 looks the same
/// to `$?`, but not to a shell's loop, to make or to a scheduler: they take it for an ordinary failure, and a loop
/// goes on with its next run.
pub fn end_as_asked() -> ! {
    system::end_as_asked()
}

/// From now on, a write beyond the file size limit (`ulimit -f`) fails with an error, like one on a full disk, instead
/// of ending the program by SIGXFSZ.
pub fn survive_size_limit() {
    #[cfg(unix)]
    // SAFETY: the signal is ignored; no handler is installed.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

#[cfg(unix)]
mod system {
    use super::{Instant, ONE, stop};
    use libc::{SIG_IGN, SIGHUP, SIGINT, SIGTERM, SIGUSR1, sigset_t};
    use std::io;
    use std::mem::zeroed;
    use std::ptr::{null, null_mut};
    use std::sync::atomic::{AtomicI32, Ordering, fence};
    use std::thread;
    use tensor::cpu::parallel::STACK;

    /// The signal by which the program was first asked to stop.
    static FIRST: AtomicI32 = AtomicI32::new(0);

    /// Blocks the signals in this thread, and so in all threads that it starts, and starts a thread that waits for
    /// them: unlike a signal handler, which may call async-signal-safe functions only, that thread may call anything.
    pub fn watch() -> io::Result<()> {
        let set = set_of([SIGINT, SIGTERM, SIGHUP, SIGUSR1].into_iter().filter(|&signal| !is_ignored(signal)));
        // SAFETY: the set is one that `sigemptyset` made.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, null_mut()) };
        thread::Builder::new().name("signals".into()).stack_size(STACK).spawn(move || {
            FIRST.store(wait(&set), Ordering::Relaxed);
            let asked = Instant::now();
            stop();
            // Only a second Ctrl-C ends the program at once: a scheduler may send its signal twice.
            while wait(&set) != SIGINT || asked.elapsed() < ONE {}
            end_by(SIGINT)
        })?;
        Ok(())
    }

    pub fn end_as_asked() -> ! {
        // Pairs with the release store in `stop`: whoever has seen the request also sees which signal it was.
        fence(Ordering::Acquire);
        end_by(FIRST.load(Ordering::Relaxed))
    }

    fn end_by(signal: i32) -> ! {
        let set = set_of([signal]);
        // SAFETY: the set is one that `sigemptyset` made; nothing handles the signal, so that it ends the program.
        unsafe {
            libc::raise(signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, null_mut());
        }
        // PID 1 of a container is not ended by a signal that it sends to itself.
        std::process::exit(128 + signal)
    }

    fn is_ignored(signal: i32) -> bool {
        // SAFETY: an all-zero `sigaction` is valid, and with a null pointer for the new action the call only reads the
        // current one.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            libc::sigaction(signal, null(), &raw mut action) == 0 && action.sa_sigaction == SIG_IGN
        }
    }

    fn set_of(signals: impl IntoIterator<Item = i32>) -> sigset_t {
        // SAFETY: an all-zero `sigset_t` is valid memory, which `sigemptyset` initialises.
        unsafe {
            let mut set: sigset_t = zeroed();
            libc::sigemptyset(&raw mut set);
            signals.into_iter().for_each(|signal| _ = libc::sigaddset(&raw mut set, signal));
            set
        }
    }

    /// Waits for one of the signals.
    fn wait(set: &sigset_t) -> i32 {
        let mut signal = 0;
        // SAFETY: both pointers are valid, and the signals are blocked.
        while unsafe { libc::sigwait(set, &raw mut signal) } != 0 {}
        signal
    }
}

#[cfg(not(unix))]
mod system {
    use super::{Instant, ONE, stop};
    use std::sync::OnceLock;

    /// What a shell's own interrupted commands end with.
    const INTERRUPTED: i32 = 130;

    pub fn watch() -> Result<(), ctrlc::Error> {
        static ASKED: OnceLock<Instant> = OnceLock::new();
        ctrlc::set_handler(|| match ASKED.get() {
            None => {
                let _ = ASKED.set(Instant::now());
                stop();
            }
            Some(asked) if asked.elapsed() >= ONE => end_as_asked(),
            Some(_) => {}
        })
    }

    pub fn end_as_asked() -> ! {
        std::process::exit(INTERRUPTED)
    }
}
