//! How the program prints. Names come from files and folders and may contain anything: control characters, which would
//! act on a terminal, and those that reverse the order of letters are printed in escaped form, as in `\u001b`.

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fmt::{self, Display, Write as _};
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use unicode_width::UnicodeWidthStr;

/// Prints a line, unless [quiet](set_quiet), and ignores errors, unlike `println!`, which panics on a closed pipe.
macro_rules! tell {
    ($stream:expr, $($part:tt)*) => {
        if !$crate::printing::is_quiet() {
            use std::io::Write;
            let line = $crate::printing::printable(format_args!($($part)*));
            let _ = writeln!($stream, "{}", $crate::printing::shortened(line));
        }
    };
}
pub(crate) use tell;

/// Whether [`set_quiet`] has turned printing off.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Turns off, or on again, what this process prints of a run by itself: its progress, and notes such as those on images
/// that were skipped. It prints at first. Errors are returned either way.
pub fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

/// Whether [`set_quiet`] has turned printing off.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Whether whoever read the output has seen enough: `biformer info | head -3`.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether nobody reads what is printed any more, so that a command that does nothing else may end.
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

/// Prints lines of a command's result; or nothing, if nobody reads it any more. Errors: a full disk, for instance.
pub fn print_lines(text: fmt::Arguments<'_>) -> Result<()> {
    print(format_args!("{text}\n"))
}

/// The same without a final line break: what is printed next continues the last line.
pub fn print(text: fmt::Arguments<'_>) -> Result<()> {
    if is_closed() {
        return Ok(());
    }
    let text = text.to_string();
    let lines: Vec<String> = text.split('\n').map(printable).collect();
    match io::stdout().lock().write_all(lines.join("\n").as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            CLOSED.store(true, Ordering::Relaxed);
            Ok(())
        }
        printed => printed.context("standard output"),
    }
}

/// Prints an error in one line, also when [quiet](set_quiet).
pub fn print_error(error: &anyhow::Error) {
    let _ = writeln!(io::stderr(), "error: {}", shortened(printable(without_breaks(&format!("{error:#}")))));
}

/// A text whose lines follow each other on one. Its other spaces stay, as they may be those of a file's name.
fn without_breaks(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A text on one line: every run of whitespace becomes a single space.
pub fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A text with its control characters as JSON writes them, so that JSON stays JSON.
pub fn printable(text: impl Display) -> String {
    let mut shown = String::new();
    for c in text.to_string().chars() {
        match c.is_control() || is_direction(c) {
            // Writing to a `String` cannot fail.
            true => _ = write!(shown, "\\u{:04x}", u32::from(c)),
            false => shown.push(c),
        }
    }
    shown
}

/// Whether a character, itself invisible, changes the direction of those after it, so that a name could pretend to be
/// another: `\u{202e}gpj.exe` looks like `exe.jpg`.
fn is_direction(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// How many characters of a line that is too long to be read are shown, of its beginning and of its end.
const HALF: usize = 5_000;

/// A line that is not a command's result, without its middle if it is too long, as names in files may have megabytes:
/// what is wrong comes first, and the way out last.
pub fn shortened(line: String) -> String {
    let place_of = |character: Option<(usize, char)>| character.map_or(0, |(place, _)| place);
    let (beginning, end) = (place_of(line.char_indices().nth(HALF)), place_of(line.char_indices().nth_back(HALF - 1)));
    if 0 < beginning && beginning < end { format!("{} … {}", &line[..beginning], &line[end..]) } else { line }
}

/// A progress bar for this many steps, with a message after it; hidden when [quiet](set_quiet), or if standard error is
/// no terminal.
pub fn bar(steps: usize) -> ProgressBar {
    let target = if is_quiet() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(4) };
    let bar = ProgressBar::with_draw_target(Some(steps as u64), target);
    let style = ProgressStyle::with_template("{bar:10} {wide_msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.with_style(style.progress_chars("█▓░"))
}

/// A word in ASCII as a sentence begins with it.
pub fn capitalized(word: &str) -> String {
    let (first, rest) = word.split_at(word.len().min(1));
    first.to_ascii_uppercase() + rest
}

/// Seconds as minutes and seconds, or hours and minutes.
pub fn clock(seconds: f64) -> String {
    let seconds = seconds.clamp(0.0, 1e9) as u64;
    match seconds {
        0..3600 => format!("{}:{:02}", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}", seconds / 3600, seconds / 60 % 60),
    }
}

/// The ending of a noun that is counted.
pub fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Names in a column below a heading, filled up to the same width; letters such as 漢 are two places wide.
pub fn column<T: Display>(heading: &str, names: impl IntoIterator<Item = T>) -> (String, Vec<String>) {
    let names: Vec<String> = names.into_iter().map(printable).collect();
    let width = names.iter().map(|name| name.width()).max().unwrap_or(0).max(heading.width());
    let filled = |name: &str| format!("{name}{}", " ".repeat(width - name.width()));
    (filled(heading), names.iter().map(|name| filled(name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fill_a_column() {
        let (heading, names) = column("class", ["漢字", "Größe 7", "a\tb", ""]);
        assert_eq!(heading, "class   ");
        assert_eq!(names, ["漢字    ", "Größe 7 ", "a\\u0009b", "        "].map(|name| name.to_owned()));
    }

    #[test]
    fn a_line_is_short_enough_to_be_read() {
        for length in [0, 1, HALF, 2 * HALF] {
            assert_eq!(shortened("ä".repeat(length)), "ä".repeat(length));
        }
        assert_eq!(shortened("ä".repeat(2 * HALF + 1)).chars().filter(|&c| c == 'ä').count(), 2 * HALF);
        let short = shortened(format!("error: {}: take another", "漢".repeat(1 << 20)));
        assert!(short.starts_with("error: 漢") && short.ends_with("漢: take another") && short.len() < 8 * HALF);
    }

    #[test]
    fn what_would_act_on_a_terminal_is_shown() {
        assert_eq!(printable("\x1b[31mrot\x1b[0m\r\n\u{9b}2J"), "\\u001b[31mrot\\u001b[0m\\u000d\\u000a\\u009b2J");
        assert_eq!(printable("\u{202e}gpj.exe"), "\\u202egpj.exe");
        assert_eq!(printable("ünï 🐱 \"a\\b\""), "ünï 🐱 \"a\\b\"", "and nothing else is touched");
    }
}
