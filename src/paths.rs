//! Paths: what they lead to, and how a shell takes them.

use anyhow::Result;
use std::path::{Path, PathBuf};

/// A path without links and dots, as far as it is there.
pub fn resolved(path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let there = path.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    Ok(there
        .map_or_else(|| path.clone(), |(above, place)| place.join(path.strip_prefix(above).unwrap_or(Path::new("")))))
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
