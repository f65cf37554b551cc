//! The order of the house: which crate may know which, and what belongs to an operation.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// What each crate may know of the others. No crate reaches upward, and data know nothing of models.
const MAY_KNOW: [(&str, &[&str]); 8] = [
    ("standin", &[]),
    ("tensor", &["standin"]),
    ("autograd", &["tensor"]),
    ("ops", &["tensor", "autograd", "standin"]),
    ("model", &["tensor", "autograd", "ops"]),
    ("optim", &["tensor", "autograd", "standin"]),
    ("data", &["tensor"]),
    (".", &["tensor", "autograd", "ops", "model", "optim", "data", "standin"]),
];

fn manifest(folder: &str) -> Table {
    let path = Path::new(ROOT).join(folder).join("Cargo.toml");
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).parse().unwrap()
}

/// The names in every table of dependencies but those called `without`: those for building, for tests, and for one
/// platform too.
fn dependencies(table: &Table, without: &str, found: &mut BTreeSet<String>) {
    for (key, value) in table {
        let Value::Table(inner) = value else { continue };
        match key.as_str() {
            "workspace" => {}
            key if key == without => {}
            key if key.ends_with("dependencies") => found.extend(inner.keys().cloned()),
            _ => dependencies(inner, without, found),
        }
    }
}

/// The crates that a build of the workspace's packages takes, each with its version and its features.
#[cfg(target_os = "linux")]
fn built(arguments: &[&str]) -> BTreeSet<String> {
    let mut cargo = std::process::Command::new(env!("CARGO"));
    cargo.args(["tree", "--offline", "--prefix=none", "--format={p} [{f}]"]).args(arguments).current_dir(ROOT);
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Those that have been listed before are marked.
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
}

/// A crate that the tests need with other features than the program is compiled again for them, with all that depend on
/// it: that is most of a build. (Other systems have other crates.)
#[cfg(target_os = "linux")]
#[test]
fn tests_share_the_program_s_dependencies() {
    let (program, tests) = (built(&["--edges=normal,build"]), built(&["--workspace", "--edges=normal,build,dev"]));
    let others: Vec<&String> = program.difference(&tests).collect();
    assert!(
        others.is_empty(),
        "the tests ask more of {others:?}; see Cargo.toml's `[dependencies]`, which should, too"
    );
}

#[test]
fn crates_know_only_those_below_them() {
    let workspace = manifest(".");
    let members = workspace["workspace"]["members"].as_array().unwrap();
    let members: BTreeSet<&str> = members.iter().map(|member| member.as_str().unwrap()).collect();
    let known: BTreeMap<&str, &[&str]> = MAY_KNOW.into_iter().collect();
    for member in &members {
        assert!(known.contains_key(member), "the crate {member} has no place in the order; give it one");
    }
    for (krate, may) in known {
        let (mut found, mut in_the_product) = (BTreeSet::new(), BTreeSet::new());
        dependencies(&manifest(krate), "", &mut found);
        dependencies(&manifest(krate), "dev-dependencies", &mut in_the_product);
        assert!(!in_the_product.contains("standin"), "{krate} needs what stands in for CUDA outside of its tests");
        for dependency in found.iter().map(|name| name.strip_prefix("biformer-").unwrap_or(name)) {
            let ours = members.contains(dependency);
            assert!(!ours || may.contains(&dependency), "{krate} depends on {dependency}, which it must not know");
        }
    }
}

#[test]
fn an_operation_is_a_folder_with_all_that_belongs_to_it() {
    let registered: BTreeSet<String> = biformer::ops::registry::OPS.iter().map(|op| op.name.to_owned()).collect();
    let source = Path::new(ROOT).join("ops/src");
    let mut folders = BTreeSet::new();
    for entry in fs::read_dir(&source).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_dir()) {
        let (name, path) = (entry.file_name().into_string().unwrap(), entry.path());
        // The checker is no operation, and neither is what several of them share.
        if ["check", "broadcast"].contains(&name.as_str()) {
            continue;
        }
        for file in ["mod.rs", "reference.rs", "cases.rs"] {
            assert!(path.join(file).is_file(), "ops/src/{name} has no {file}");
        }
        let text = fs::read_to_string(path.join("mod.rs")).unwrap();
        assert!(text.starts_with("//!"), "ops/src/{name}/mod.rs begins with the mathematics");
        folders.insert(name);
    }
    assert_eq!(folders, registered, "folders in ops/src, and operations in the registry");
}

/// The Rust files of all crates, with their text.
fn sources() -> Vec<(PathBuf, String)> {
    fn gather(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                gather(&path, found);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    let mut found = vec![];
    let crates = MAY_KNOW.map(|(krate, _)| Path::new(ROOT).join(krate));
    let parts = crates.iter().flat_map(|krate| ["src", "tests", "benches", "examples"].map(|part| krate.join(part)));
    parts.filter(|path| path.is_dir()).for_each(|path| gather(&path, &mut found));
    found
}

#[test]
fn no_file_is_two_rooms() {
    for (path, text) in sources() {
        let lines = text.lines().count();
        assert!(lines <= 440, "about 400 lines are enough for a file: {} has {lines}", path.display());
    }
}

/// rustfmt leaves them as they are. (Rows of tables cannot be broken.)
#[test]
fn comments_are_no_wider_than_code() {
    for (path, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            let comment = line.trim_start().strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!', ' ']));
            let wide = comment.is_some_and(|comment| !comment.starts_with('|')) && line.chars().count() > 120;
            assert!(!wide, "{}:{}: a comment of more than 120 characters", path.display(), number + 1);
        }
    }
}
