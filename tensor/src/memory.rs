//! How much memory the machine has, as the system tells (Linux), and asking for more than it may have.

use std::cell::Cell;
use std::collections::TryReserveError;
use std::path::Path;

thread_local! {
    static REFUSABLE: Cell<bool> = const { Cell::new(false) };
}

/// Calls something that asks for memory and can do without, on this thread.
pub(crate) fn refusable<R>(ask: impl FnOnce() -> R) -> R {
    let before = REFUSABLE.replace(true);
    let answer = ask();
    REFUSABLE.set(before);
    answer
}

/// Whether this thread can do without the memory that it is asking for. A program's global allocator may want to know:
/// what the system refuses to others ends the program.
pub fn is_refusable() -> bool {
    REFUSABLE.get()
}

/// A number of bytes as messages have it, in MB or GB.
pub fn amount(bytes: u64) -> String {
    match bytes {
        0..10_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        10_000_000..1_000_000_000 => format!("{} MB", bytes / 1_000_000),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

/// Room for `more` elements, and the system's refusal as an error.
pub fn reserve<T>(vector: &mut Vec<T>, more: usize) -> Result<(), TryReserveError> {
    refusable(|| vector.try_reserve_exact(more))
}

/// The peak resident set size of this process so far, if the system reports it (Linux).
pub fn peak_resident_bytes() -> Option<u64> {
    status_bytes("/proc/self/status", "VmHWM:")
}

/// The memory that this process may still take: the least of what the machine, the control group (of a container, for
/// example) and the address-space limit have left, if the system reports it (Linux).
pub fn free_bytes() -> Option<u64> {
    let machine = status_bytes("/proc/meminfo", "MemAvailable:")?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let left = groups.lines().filter_map(left_in_groups).chain(free_addresses());
    Some(left.fold(machine, u64::min))
}

/// The memory still available to the control group that a line of /proc/self/cgroup names: the least of what it and its
/// ancestors have left. (Inside a container its own group appears at the root.)
fn left_in_groups(line: &str) -> Option<u64> {
    let (_, line) = line.split_once(':')?;
    let (root, version, name) = match line.split_once(':')? {
        ("", name) => ("/sys/fs/cgroup", Version::Two, name),
        (controllers, name) if controllers.split(',').any(|it| it == "memory") => {
            ("/sys/fs/cgroup/memory", Version::One, name)
        }
        _ => return None,
    };
    let groups = Path::new(name.trim_start_matches('/')).ancestors();
    groups.filter_map(|group| left_in(&Path::new(root).join(group), version)).min()
}

/// The version of Linux's control groups (cgroups).
#[derive(Clone, Copy)]
enum Version {
    One,
    Two,
}

/// What is left of the address space, if that is limited (`ulimit -v`).
fn free_addresses() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let limit: u64 = entry(&limits, "Max address space")?.parse().ok()?;
    Some(limit.saturating_sub(status_bytes("/proc/self/status", "VmSize:")?))
}

/// What a control group's memory limit leaves, if it has one. Inactive page cache counts as free, since the system can
/// reclaim it.
fn left_in(group: &Path, version: Version) -> Option<u64> {
    let (files, cached) = match version {
        Version::One => (["memory.limit_in_bytes", "memory.usage_in_bytes"], "total_inactive_file"),
        Version::Two => (["memory.max", "memory.current"], "inactive_file"),
    };
    let read = |file: &str| std::fs::read_to_string(group.join(file)).ok();
    let [limit, used] = files.map(|file| read(file)?.trim().parse::<u64>().ok());
    let stat = read("memory.stat")?;
    let cached = stat.lines().find_map(|line| line.strip_prefix(cached)?.strip_prefix(' ')?.parse().ok());
    Some(limit?.saturating_sub(used?.saturating_sub(cached.unwrap_or(0))))
}

/// An entry of one of Linux's tables of sizes in kB.
fn status_bytes(path: &str, key: &str) -> Option<u64> {
    let kilobytes: u64 = entry(&std::fs::read_to_string(path).ok()?, key)?.parse().ok()?;
    Some(1024 * kilobytes)
}

/// The first word after `key` on the table's line that begins with it.
fn entry<'t>(table: &'t str, key: &str) -> Option<&'t str> {
    table.lines().find_map(|line| line.strip_prefix(key))?.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_of_processes_has_what_its_limit_leaves() {
        let group = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| std::fs::write(group.path().join(file), text).unwrap();
        let left_in = |group: &Path| super::left_in(group, Version::Two);
        assert_eq!(left_in(group.path()), None);
        write("memory.max", "max\n");
        write("memory.current", "3000\n");
        write("memory.stat", "anon 2000\ninactive_file 700\nactive_file 300\n");
        assert_eq!(left_in(group.path()), None, "no limit");
        write("memory.max", "10000\n");
        assert_eq!(left_in(group.path()), Some(7700));
        write("memory.max", "1000\n");
        assert_eq!(left_in(group.path()), Some(0));
        write("memory.limit_in_bytes", "5000\n");
        write("memory.usage_in_bytes", "3000\n");
        write("memory.stat", "inactive_file 9\ntotal_inactive_file 500\n");
        assert_eq!(super::left_in(group.path(), Version::One), Some(2500));
    }
}
