//! Signals, by which a system asks a program to end: which of them this one is to ignore.

#[cfg(unix)]
use libc::{SIG_IGN, SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

/// Those of the requests to stop that whoever started the program has it ignore, as `nohup` does.
#[cfg(unix)]
pub fn ignored() -> Vec<i32> {
    let is_ignored = |&signal: &i32| {
        // SAFETY: all zeros are an action, and without a new one the system only fills in the one that holds.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0 && action.sa_sigaction == SIG_IGN
        }
    };
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(is_ignored).collect()
}

/// Ignores signals from now on.
#[cfg(unix)]
pub fn ignore(signals: &[i32]) {
    for &signal in signals {
        // SAFETY: no handler is set that could do anything.
        unsafe { libc::signal(signal, SIG_IGN) };
    }
}

/// A file that outgrows the limit on sizes (`ulimit -f`) is from now on an error like that of a full disk, and no longer
/// the end of the program.
pub fn survive_size_limit() {
    #[cfg(unix)]
    ignore(&[SIGXFSZ]);
}

/// None: they are Unix's.
#[cfg(not(unix))]
pub fn ignored() -> Vec<i32> {
    vec![]
}

/// Nothing: they are Unix's.
#[cfg(not(unix))]
pub fn ignore(_: &[i32]) {}
