//! What the documentation says is so: the tables of operations and of the configuration are those of the source,
//! command lines and the README's configuration are understood, and every link leads somewhere.

use autograd::{Tape, Var};
use biformer::commands::Cli;
use biformer::config::{Changes, RunConfig};
use clap::Parser;
use clap::error::ErrorKind;
use data::{Augmentation, EraseFill};
use ops::registry::{OPS, Op};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use tensor::{DType, Tensor};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The blocks of code in a language, without their fences.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let opening = format!("\n```{language}\n");
    text.split(opening.as_str()).skip(1).map(|rest| rest.split("\n```").next().unwrap_or(rest)).collect()
}

// ---- The table of operations ----

/// One tensor, as the table shows it.
fn shown(tensor: &Tensor) -> String {
    let kind = if tensor.dtype() == DType::Index { " of indices" } else { "" };
    format!("{}{kind}", tensor.shape())
}

/// What the first case of an operation takes, gives, and keeps for the backward pass.
fn first_case(op: &Op) -> (String, String, Vec<&'static str>) {
    let case = &(op.cases)()[0];
    let tape = Tape::new();
    let leaf = |input: &Tensor| match input.dtype() {
        DType::Index => tape.constant(input.clone()),
        _ => tape.input(input.clone()),
    };
    let inputs: Vec<Var<'_>> = case.inputs.iter().map(leaf).collect();
    let value = autograd::gradcheck::Function::apply(case, &inputs).unwrap();
    let nodes = tape.nodes();
    let kept = match nodes.iter().rfind(|node| node.name().starts_with(op.name)) {
        Some(node) => node.saved().iter().map(|(name, _)| *name).collect(),
        None => {
            let parts: Vec<&str> = nodes.iter().map(|node| node.name()).filter(|&name| name != "input").collect();
            assert!(parts.len() > 1, "{} is not on its tape: {parts:?}", op.name);
            vec!["what its parts keep"]
        }
    };
    let taken: Vec<String> = case.inputs.iter().map(shown).collect();
    (taken.join(", "), shown(value.value()), kept)
}

fn table() -> String {
    let mut text = String::from(
        "# The operations\n\
         Every differentiable operation, from the registry (`ops/src/registry.rs`). This file is generated: \
         `UPDATE=1 cargo test --release --test docs` writes it, and the same test without `UPDATE` fails when it is \
         out of date.\n\n\
         *Keeps* is what lives from the forward to the backward pass on a CPU; a view or a shared buffer costs \
         nothing extra. *Example* is the first case: the inputs' shapes, then the result's. `biformer gradcheck` \
         measures every operation on all its cases, against differences, dual numbers, laws and mutants ([chapter \
         3](03-operation.md)). `concat`, `dropout` and `sum` are for programs that use this library; BiFormer uses \
         none of them.\n\n\
         | operation | computes | keeps | example |\n|---|---|---|---|\n",
    );
    for op in OPS {
        let (taken, given, kept) = first_case(op);
        let kept = if kept.is_empty() { "nothing".to_owned() } else { kept.join(", ") };
        let name = op.name;
        writeln!(text, "| [`{name}`](../ops/src/{name}/mod.rs) | {} | {kept} | {taken} → {given} |", op.summary)
            .unwrap();
    }
    text.push_str("\n## What each is checked on\n");
    for op in OPS {
        let names: Vec<String> = (op.cases)().into_iter().map(|case| case.name).collect();
        writeln!(text, "- **{}**, {} cases: {}", op.name, names.len(), names.join("; ")).unwrap();
    }
    text
}

/// Compares a generated file with what it should be, or writes it.
fn assert_generated(path: &str, now: &str) {
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(root().join(path), now).unwrap();
    }
    assert!(read(path) == now, "{path} is out of date: UPDATE=1 cargo test --release --test docs");
}

#[test]
fn the_table_of_operations_is_the_registrys() {
    assert_generated("docs/operations.md", &table());
}

// ---- The table of a configuration's fields ----

/// What a struct's public fields, or an enum's variants, are called, of what type they are, and what their comments
/// say.
fn documented(source: &str, item: &str) -> Vec<(String, String, String)> {
    let opening = [format!("pub struct {item} {{"), format!("pub enum {item} {{")];
    let start = opening.iter().find_map(|opening| source.find(opening.as_str()));
    let body = &source[start.unwrap_or_else(|| panic!("there is no {item}"))..];
    let (mut found, mut comment) = (vec![], String::new());
    for line in body.lines().skip(1).take_while(|line| *line != "}").map(str::trim) {
        if let Some(text) = line.strip_prefix("/// ") {
            comment = format!("{comment} {text}").trim_start().to_owned();
        } else if !line.starts_with('#') {
            let member = line.split("//").next().unwrap().trim().trim_end_matches(',').trim_start_matches("pub ");
            let (name, kind) = member.split_once(": ").unwrap_or((member, ""));
            found.push((name.to_owned(), kind.to_owned(), std::mem::take(&mut comment)));
        }
    }
    found
}

/// `DropPath` as it is written in files.
fn snake_case(name: &str) -> String {
    let parted = name.chars().enumerate().map(|(place, letter)| {
        let parts = place > 0 && letter.is_uppercase();
        format!("{}{}", if parts { "_" } else { "" }, letter.to_lowercase())
    });
    parted.collect()
}

fn configuration() -> String {
    let mut text = String::from(
        "# The configuration\n\
         Every field of a run, as a TOML file (`--config`) has it, with its default for `nano`; `train --set` takes them \
         on the command line, too: `--set label_smoothing=0 optimizer.weight_decay=0.1 depth=2,2,2`. Fields of the \
         model also go by the names that the published code gives them, such as `n_wins`. This file is \
         generated from the comments in the source: `UPDATE=1 cargo test --release --test docs` writes it.\n",
    );
    let defaults = toml::Table::try_from(RunConfig::for_model("nano").unwrap()).unwrap();
    let sections = [
        ("", "RunConfig", read("src/config/mod.rs") + &read("src/config/recompute.rs")),
        ("schedule", "ScheduleConfig", read("src/config/schedule.rs")),
        ("optimizer", "AdamWConfig", read("optim/src/adamw.rs")),
        ("ema", "AverageConfig", read("src/config/average.rs")),
        ("preprocessing", "Preprocessing", read("src/config/preprocessing.rs")),
        ("augmentation", "Augmentation", read("data/src/augmentation.rs") + &read("data/src/resample.rs")),
        ("architecture", "ModelConfig", read("model/src/config.rs")),
    ];
    for (section, item, source) in sections {
        let (title, table) = match defaults.get(section) {
            Some(toml::Value::Table(table)) => (format!("`[{section}]`"), table),
            _ => ("At the top".to_owned(), &defaults),
        };
        write!(text, "\n## {title}\n| field | default | what it is |\n|---|---|---|\n").unwrap();
        let fields = documented(&source, item);
        assert_eq!(fields.len(), table.len(), "{item}");
        for (name, kind, comment) in fields {
            let Some(default) = table.get(&name).filter(|default| !default.is_table()) else { continue };
            let choices = match source.contains(&format!("pub enum {kind} {{")) {
                true => documented(&source, &kind),
                false => vec![],
            };
            let choice = |(name, _, comment): &(String, String, String)| {
                format!(" `\"{}\"`: {}", snake_case(name), comment.trim_end_matches('.'))
            };
            let choices: Vec<String> = choices.iter().map(choice).collect();
            let comment = (comment + &choices.join(";")).replace("[`", "`").replace("`]", "`");
            writeln!(text, "| `{name}` | `{default}` | {comment} |").unwrap();
        }
    }
    text
}

#[test]
fn the_table_of_the_configuration_has_every_field() {
    assert_generated("docs/configuration.md", &configuration());
}

// ---- Command lines ----

/// The program's command lines in a text's shell blocks, split into words, the program's name first.
fn command_lines(text: &str) -> Vec<Vec<&str>> {
    let lines = blocks(text, "sh").into_iter().flat_map(str::lines).map(without_comment);
    lines.map(|line| line.split_whitespace().collect()).filter_map(program).collect()
}

/// Those within a text's sentences, where a command may be named without all that it needs.
fn mentioned(text: &str) -> Vec<Vec<&str>> {
    let quoted = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let words =
        quoted.map(|line| line.split_whitespace().collect::<Vec<_>>()).filter(|words| words.get(1) != Some(&"="));
    words.filter_map(program).collect()
}

fn without_comment(line: &str) -> &str {
    line.split(" #").next().unwrap_or(line).trim()
}

/// The words from the program's name on, if it is this program that they run.
fn program(words: Vec<&str>) -> Option<Vec<&str>> {
    match &words[..] {
        ["biformer", ..] => Some(words),
        ["cargo", "run", "--release"] => Some(vec!["biformer"]),
        ["cargo", "run", "--release", "--", arguments @ ..] => Some([&["biformer"], arguments].concat()),
        _ => None,
    }
}

#[test]
fn the_program_understands_every_command_line() {
    let mut found = 0;
    for file in markdown() {
        let text = std::fs::read_to_string(&file).unwrap();
        let whole = command_lines(&text).into_iter().map(|words| (words, true));
        for (words, whole) in whole.chain(mentioned(&text).into_iter().map(|words| (words, false))) {
            found += 1;
            let shown = || format!("{}: {}", file.display(), words.join(" "));
            match Cli::try_parse_from(&words) {
                Err(error) if error.kind() == ErrorKind::MissingRequiredArgument && !whole => {}
                Err(error) if error.exit_code() != 0 => panic!("{}: {error}", shown()),
                _ => {}
            }
            let settings = words.iter().filter_map(|word| word.split_once('=')).map(|(field, _)| field);
            for field in settings.filter(|field| !field.starts_with("--")) {
                if let Some(wrong) = RunConfig::unknown_field(field) {
                    panic!("{}: {wrong}", shown());
                }
            }
        }
    }
    assert!(found >= 60, "only {found}");
}

// ---- The README ----

#[test]
fn the_readmes_first_screen_has_the_two_commands() {
    let text = read("README.md");
    let first = blocks(&text, "sh")[0];
    let commands: Vec<&str> = first.lines().map(without_comment).collect();
    assert_eq!(commands.len(), 2, "{first}");
    assert!(commands[0].starts_with("cargo run ") && commands[1].starts_with("cargo test "), "{first}");
    let ci = read(".ci/run");
    assert!(commands.iter().all(|command| ci.contains(command)), "in .ci/run: {commands:?}");
}

#[test]
fn the_readmes_configuration_is_understood() {
    let text = read("README.md");
    let examples = blocks(&text, "toml");
    assert!(!examples.is_empty());
    for example in examples {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("example.toml");
        std::fs::write(&path, example).unwrap();
        RunConfig::changed(&Changes::gather(Some(&path), toml::Table::new()).unwrap()).unwrap();
    }
}

#[test]
fn every_configuration_that_is_kept_is_understood() {
    let files = std::fs::read_dir(root().join("configs")).unwrap().map(|entry| entry.unwrap().path());
    let understood = |path: PathBuf| {
        let changes = Changes::gather(Some(&path), toml::Table::new()).unwrap();
        RunConfig::changed(&changes).unwrap_or_else(|error| panic!("{}: {error:#}", path.display()));
    };
    assert!(files.map(understood).count() >= 2);
}

/// The learning rates are those that the published code was seen to give.
#[test]
fn the_published_recipe_is_as_published() {
    let changes = Changes::gather(Some(&root().join("configs/imagenet.toml")), toml::Table::new()).unwrap();
    let config = RunConfig::changed(&changes).unwrap();
    let schedule = config.schedule(1251).unwrap();
    for (epoch, rate) in
        [(0, 1e-6), (1, 1e-6), (2, 2.008e-4), (5, 8.002e-4), (6, 9.9932e-4), (150, 5.10184e-4), (299, 1.01086e-5)]
    {
        for step in [epoch * 1251, epoch * 1251 + 1250] {
            let got = schedule.lr(step);
            assert!((got / rate - 1.0).abs() < 1e-4, "epoch {epoch}: {got:e}, not {rate:e}");
        }
    }
    let Augmentation { erase, erase_fill, rand_augment, magnitude, magnitude_std, mixup, cutmix, mix, repeats, .. } =
        config.augmentation;
    assert_eq!((rand_augment, magnitude, magnitude_std), (2, 9.0, 0.5));
    assert_eq!((erase, erase_fill, mixup, cutmix, mix, repeats), (0.25, EraseFill::Noise, 0.8, 1.0, 1.0, 3));
    assert_eq!((config.batch_size / config.micro_batches, config.label_smoothing), (128, 0.1));
    assert_eq!((config.optimizer.weight_decay, config.architecture.drop_path), (0.05, 0.1));
}

// ---- Quotations and links ----

#[test]
fn quoted_code_is_in_the_source() {
    let quotations = [
        (
            "docs/03-operation.md",
            "rust,ignore",
            &["ops/src/softmax/mod.rs", "ops/src/layer_norm/mod.rs", "ops/src/softmax/cpu.rs"][..],
        ),
        ("docs/07-trainer.md", "rust,ignore", &["src/trainer/learner.rs"]),
        ("docs/08-gpu.md", "rust,ignore", &["ops/src/gelu/cuda.rs"]),
        ("docs/08-gpu.md", "cuda", &["ops/src/gelu/kernel.cu"]),
    ];
    for (chapter, language, paths) in quotations {
        let chapter = read(chapter);
        let quoted = blocks(&chapter, language);
        assert_eq!(quoted.len(), paths.len(), "of {paths:?}");
        for (code, path) in quoted.into_iter().zip(paths) {
            assert!(read(path).contains(code), "no longer in {path}:\n{code}");
        }
    }
}

/// All Markdown files, of the project and those of its folders that may have some.
fn markdown() -> Vec<PathBuf> {
    let mut found = vec![];
    let inside = ["benches", "data/assets", "docs", "ops"].map(|folder| root().join(folder));
    let mut folders = [&[root().to_owned()], &inside[..]].concat();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() && folder != root() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "md") {
                found.push(path);
            }
        }
    }
    found
}

#[test]
fn every_link_leads_to_a_file() {
    let files = markdown();
    assert!(files.len() >= 9, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let pictures = text.split("<img src=\"").skip(1).filter_map(|rest| rest.split('"').next());
        for link in links.chain(pictures) {
            if link.contains("://") || link.contains(char::is_whitespace) {
                continue;
            }
            let (target, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if target.is_empty() { file.clone() } else { file.parent().unwrap().join(target) };
            assert!(target.exists(), "{} links to {link}, which is not there", file.display());
            let there = heading.is_empty() || anchors(&std::fs::read_to_string(&target).unwrap()).contains(heading);
            assert!(there, "{} links to {link}, where no heading is called so", file.display());
        }
    }
}

/// What links call a text's headings by, as GitHub forms it: in lower case, without marks, with hyphens for spaces.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let kept = |letter: char| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_');
    let anchor = |heading: &str| heading.chars().filter(|&letter| kept(letter)).collect::<String>();
    headings.map(|heading| anchor(heading).to_lowercase().replace(' ', "-")).collect()
}
