//! Paths: what they lead to, and how a shell takes them.

use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

/// Where a path leads, or would, without symbolic links and dots.
pub fn resolved(path: &Path) -> io::Result<PathBuf> {
    let mut place = PathBuf::new();
    for component in std::path::absolute(path)?.components() {
        match component {
            // What is there is without links by now, and what is not will be a folder.
            Component::ParentDir => _ = place.pop(),
            component => place.push(component),
        }
        if let Ok(real) = fs::canonicalize(&place) {
            place = real;
        }
    }
    Ok(place)
}

/// A data set's source by a name that leads there from any folder.
pub fn rooted(source: &str) -> Result<String> {
    let path = Path::new(source);
    if source == "embedded" || path.is_absolute() {
        return Ok(source.to_owned());
    }
    // What is above a link is not what is above its end.
    let upwards = path.components().any(|component| component == Component::ParentDir);
    let rooted = if upwards { resolved(path) } else { std::path::absolute(path) };
    let rooted = rooted.with_context(|| format!("data {source}"))?;
    Ok(rooted.to_str().with_context(|| format!("data {}: no UTF-8 text", rooted.display()))?.to_owned())
}

/// The text of a file, which may be a pipe, but not one without end.
pub fn read_text(path: &Path, expected: &str) -> Result<String> {
    const MOST: u64 = 1 << 20;
    let mut text = vec![];
    if File::open(path)?.take(MOST + 1).read_to_end(&mut text)? as u64 > MOST {
        bail!("more than {MOST} bytes; expected {expected}");
    }
    String::from_utf8(text).with_context(|| format!("no UTF-8 text; expected {expected}"))
}

/// Refuses what is there, and no regular file: to read from a pipe, or to open it, might never end.
pub fn ensure_regular(path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(there) if !there.is_file() => bail!("{}: it is there, but not as a regular file; remove it", path.display()),
        _ => Ok(()),
    }
}

/// A text as one word of a shell's command. On Windows paths have backslashes, and no quotation marks.
pub fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c) || (cfg!(windows) && c == '\\');
    match !text.is_empty() && text.chars().all(plain) {
        true => text.to_owned(),
        false if cfg!(windows) => format!("\"{text}\""),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_a_path_as_one_word() {
        let words = match cfg!(windows) {
            true => {
                [(r"C:\runs\a-1", r"C:\runs\a-1"), ("my runs", r#""my runs""#), ("it's", r#""it's""#), ("", r#""""#)]
            }
            false => [("runs/a-1", "runs/a-1"), ("my runs", "'my runs'"), ("it's", r"'it'\''s'"), ("", "''")],
        };
        for (path, word) in words {
            assert_eq!(quoted(path), word);
        }
    }
}
