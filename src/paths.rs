//! Paths: what they lead to, and how a shell takes them.

use std::path::{Component, Path, PathBuf};
use std::{fs, io};

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
