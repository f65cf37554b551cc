//! Paths: what they lead to, and how a shell takes them.

use anyhow::{Context, Error, Result, anyhow, bail};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

/// The absolute path that a path refers to, whether or not it exists yet, with symbolic links, `.` and `..` resolved.
pub fn resolved(path: &Path) -> io::Result<PathBuf> {
    let mut place = PathBuf::new();
    for component in std::path::absolute(path)?.components() {
        match component {
            // What exists has been resolved by now, and what does not exist yet will be a plain folder.
            Component::ParentDir => _ = place.pop(),
            component => place.push(component),
        }
        if let Ok(real) = dunce::canonicalize(&place) {
            place = real;
        }
    }
    Ok(place)
}

/// The folders from `root` down, but without it, in which files lie that were listed there; with symbolic links
/// resolved, as far as they can be.
pub fn folders_of<'a>(root: &Path, files: impl Iterator<Item = &'a Path>) -> BTreeSet<PathBuf> {
    let mut folders: Vec<&Path> = files.filter_map(Path::parent).collect();
    // Of a million files sorted by path.
    folders.dedup();
    let below = |folder: &&Path| folder.starts_with(root) && *folder != root;
    let folders: BTreeSet<&Path> =
        folders.into_iter().flat_map(|folder| folder.ancestors().take_while(below)).collect();
    folders.into_par_iter().filter_map(|folder| dunce::canonicalize(folder).ok()).collect()
}

/// Refuses a path with a ~ that no shell has replaced.
pub fn ensure_expanded(path: &Path) -> Result<()> {
    if path.starts_with("~") {
        let shown = path.display();
        bail!("{shown}: only a shell knows what ~ is; write the path in full, or ./{shown} for a folder named ~");
    }
    Ok(())
}

/// A data set's source as an absolute path.
pub fn rooted(source: &str) -> Result<String> {
    if source == "embedded" { Ok(source.to_owned()) } else { absolute("data", source) }
}

/// What a setting names as an absolute path, so that it is valid from any working folder. Nothing stays nothing.
/// Errors: a `~` that no shell has expanded, a working folder that is missing or whose name is no UTF-8 text.
pub fn absolute(setting: &str, source: &str) -> Result<String> {
    let path = Path::new(source);
    if source.is_empty() || path.is_absolute() {
        return Ok(source.to_owned());
    }
    ensure_expanded(path).context(setting.to_owned())?;
    // The parent of a symbolic link is not the parent of its target.
    let upwards = path.components().any(|component| component == Component::ParentDir);
    let rooted = if upwards { resolved(path) } else { std::path::absolute(path) };
    let rooted = rooted.with_context(|| format!("{setting} {source}"))?;
    Ok(rooted.to_str().with_context(|| format!("{setting} {}: no UTF-8 text", rooted.display()))?.to_owned())
}

/// Whether a setting, which may be relative, names what another one named, perhaps from another folder: `runs/first`
/// ends `/home/me/runs/first`. Errors: those of [`absolute`].
pub fn names_same(setting: &str, one: &str, other: &str) -> Result<bool> {
    if one.is_empty() || other.is_empty() {
        return Ok(one == other);
    }
    let relative = Path::new(one).strip_prefix(".").unwrap_or(Path::new(one));
    // Every path ends with the empty one.
    Ok(!relative.as_os_str().is_empty() && Path::new(other).ends_with(relative)
        || Path::new(&absolute(setting, one)?) == Path::new(&absolute(setting, other)?))
}

/// Whether two data sources are the same one.
pub fn is_same_source(one: &str, other: &str) -> bool {
    let place = |source: &str| resolved(Path::new(source)).ok().filter(|_| source != "embedded");
    one == other || place(one).is_some_and(|one| place(other) == Some(one))
}

/// The error of what is read at a path, which begins with its role: `data pictures is missing`. Most errors name the
/// path first, and it is not said twice. `whose` is appended to it.
pub fn error_of(role: &str, path: &str, whose: &str, error: impl Into<Error>) -> Error {
    let said = format!("{:#}", error.into());
    match said.strip_prefix(path).filter(|rest| rest.starts_with([' ', ':'])) {
        Some(rest) => anyhow!("{role} {path}{whose}{rest}"),
        None => anyhow!("{role} {path}{whose}: {said}"),
    }
}

/// The most bytes of a text that is read: parsed, it takes a hundred times as much.
pub const MAX_TEXT: usize = 1 << 20;

/// The text of a file or pipe, of at most 1 MiB, so that an endless pipe is refused.
pub fn read_text(path: &Path, expected: &str) -> Result<String> {
    let mut text = vec![];
    if File::open(path)?.take(MAX_TEXT as u64 + 1).read_to_end(&mut text)? > MAX_TEXT {
        bail!("more than {MAX_TEXT} bytes; expected {expected}");
    }
    String::from_utf8(text).with_context(|| format!("no UTF-8 text; expected {expected}"))
}

/// Refuses a path that exists but is not a regular file: opening or reading a pipe might block forever.
pub fn ensure_regular(path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(there) if !there.is_file() => bail!("{}: it is there, but not as a regular file; remove it", path.display()),
        _ => Ok(()),
    }
}

/// A path quoted as one word of a shell command, which is not taken for an option. On Windows, paths contain
/// backslashes, which some shells take for something else unless they are quoted, and cannot contain quotation marks.
pub fn quoted(path: impl Display) -> String {
    let mut text = path.to_string();
    if text.starts_with('-') {
        text.insert_str(0, "./");
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text,
        false if cfg!(windows) => format!("\"{text}\""),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_name_is_of_the_folder_that_it_ends() {
        let same = |one, other| names_same("weights", one, other).unwrap();
        for one in ["runs/a", "./runs/a/", "a", "/home/me/runs/a/", "/home/me/./runs/a"] {
            assert!(same(one, "/home/me/runs/a"), "{one}");
        }
        for one in ["", ".", "./", "runs", "b/a", "/runs/a", "runs/a/b"] {
            assert!(!same(one, "/home/me/runs/a"), "{one}");
        }
        assert!(same("", "") && same("runs/a", "runs/a/") && !same("runs/a", ""));
    }

    #[test]
    fn a_source_is_rooted_unless_it_is_inside_the_program() {
        assert_eq!(rooted("embedded").unwrap(), "embedded");
        let here = std::env::current_dir().unwrap();
        assert_eq!(Path::new(&rooted("pictures").unwrap()), here.join("pictures"));
        assert_eq!(rooted(here.to_str().unwrap()).unwrap(), here.to_str().unwrap());
        assert!(format!("{:#}", rooted("~/pictures").unwrap_err()).contains("only a shell knows what ~ is"));
    }

    #[test]
    fn a_path_is_said_once() {
        let of = |said: &'static str| error_of("data", "a/b", " (as it was)", Error::msg(said)).to_string();
        assert_eq!(of("a/b is missing"), "data a/b (as it was) is missing");
        assert_eq!(of("a/b: no text"), "data a/b (as it was): no text");
        assert_eq!(of("a/b/c is missing"), "data a/b (as it was): a/b/c is missing");
        assert_eq!(of("no memory"), "data a/b (as it was): no memory");
    }

    #[test]
    fn a_shell_takes_a_path_as_one_word() {
        let words = match cfg!(windows) {
            true => [
                (r"C:\runs\a-1", r#""C:\runs\a-1""#),
                ("my runs", r#""my runs""#),
                ("it's", r#""it's""#),
                ("", r#""""#),
            ],
            false => [("runs/a-1", "runs/a-1"), ("my runs", "'my runs'"), ("it's", r"'it'\''s'"), ("", "''")],
        };
        assert_eq!(quoted("-runs"), "./-runs", "no option");
        for (path, word) in words {
            assert_eq!(quoted(path), word);
        }
    }
}
