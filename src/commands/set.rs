//! `--set`, which changes single fields of a model or of a run.

use super::Cli;
use crate::config::RunConfig;
use anyhow::{Context, Result, anyhow, bail};
use clap::{Command, CommandFactory};
use model::{ModelConfig, bare_number, field_name};
use std::num::IntErrorKind;
use toml::{Table, Value};

/// Parses an argument of `--set`, which takes all arguments that follow it.
pub fn assignment(text: &str) -> Result<String, String> {
    match text.contains('=') {
        true => Ok(text.to_owned()),
        false => {
            Err("--set takes all that follows it, and this is no KEY=VALUE: put it before --set, or after --"
                .to_owned())
        }
    }
}

/// What `--set` changes, `key=value` each.
#[derive(Default)]
pub struct Assignments {
    /// Fields of a run.
    pub of_run: Vec<String>,
    /// Fields of a model, by the names that they have here.
    pub of_model: Vec<String>,
}

impl Assignments {
    /// Fields whose names `is_of_run` accepts are the run's, all others the model's. A model field may be given by its
    /// name alone, by the published code's name for it, or as error messages name it: `architecture.n_win`.
    ///
    /// Errors: a field that is given twice, by one name or by two.
    pub fn new(set: &[String], is_of_run: impl Fn(&str) -> bool) -> Result<Self> {
        let (mut assignments, mut keys) = (Self::default(), vec![]);
        for entry in set {
            let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
            let key = key.trim();
            let of_model = key.strip_prefix("architecture.");
            let key = field_name(of_model.unwrap_or(key));
            if keys.contains(&key) {
                bail!("--set {key}: it is given twice; leave one of them out");
            }
            keys.push(key);
            let list =
                if of_model.is_none() && is_of_run(key) { &mut assignments.of_run } else { &mut assignments.of_model };
            list.push(format!("{key}={value}"));
        }
        Ok(assignments)
    }
}

/// A model's configuration, changed as `--set` asks.
pub fn changed(config: &ModelConfig, set: &[String]) -> Result<ModelConfig> {
    let Assignments { of_model, .. } = Assignments::new(set, |_| false)?;
    config.with_overrides(of_model.iter().map(String::as_str)).map_err(as_set)
}

/// Rewords an error about a model's field as one about `--set`.
fn as_set(error: model::Error) -> anyhow::Error {
    match &error {
        model::Error::Override { .. } => anyhow!("--set {error}"),
        model::Error::UnknownField { key, .. } => match field_of_run(key) {
            Some(field) => anyhow!("--set {key}: a field of training runs, not of a model; {}", takers(key, &field)),
            None => error.into(),
        },
        _ => error.into(),
    }
}

/// The field of a run, dotted, that goes by this name, perhaps without its section or in other trainers.
fn field_of_run(key: &str) -> Option<String> {
    let is_of_run = |field: &String| RunConfig::default_of(field).is_some();
    Some(key.to_owned()).filter(is_of_run).or_else(|| RunConfig::elsewhere(key).filter(is_of_run))
}

/// Which commands take a field of a run, that was called `key`, and how.
fn takers(key: &str, field: &str) -> String {
    let option = key.replace('_', "-");
    match &commands_with(&option)[..] {
        _ if is_of_images(field) => format!("train, eval and predict take it, as {field}=.."),
        [] => format!("train alone takes it, as {field}=.."),
        commands => format!("train takes it, as {field}=..; --{option} is an option of {}", commands.join(", ")),
    }
}

/// The commands other than train that have an option of this name.
fn commands_with(option: &str) -> Vec<String> {
    let cli = Cli::command();
    let has = |command: &&Command| command.get_arguments().any(|argument| argument.get_long() == Some(option));
    let commands = cli.get_subcommands().filter(has).map(|command| command.get_name().to_owned());
    commands.filter(|name| name != "train").collect()
}

/// Whether a field of a run says how images are prepared, which a trained model's commands can change, too.
pub fn is_of_images(key: &str) -> bool {
    key.starts_with("preprocessing.")
}

/// The fields of the model that `--set` changes, as a configuration has them, if there are any.
pub fn fields(set: &[String]) -> Result<Option<Value>> {
    let mut fields = Table::new();
    for entry in set {
        let (_, field, value) = ModelConfig::default().with_override(entry).map_err(as_set)?;
        let value = Value::try_from(value).map_err(|_| anyhow!("--set {entry}: too large a number"))?;
        fields.insert(field.to_owned(), value);
    }
    Ok((!fields.is_empty()).then_some(Value::Table(fields)))
}

/// A field of a run, given as `key=value` with a dotted key, as a table of a TOML file.
pub fn run_field(entry: &str) -> Result<Table> {
    let (key, value) = entry.split_once('=').with_context(|| format!("--set {entry}: expected key=value"))?;
    let usual = RunConfig::default_of(key);
    let [is_text, is_list] = [Value::is_str, Value::is_array].map(|is| usual.as_ref().is_some_and(is));
    // It would be taken for a text.
    if !is_text && value.trim().parse::<i64>().is_err_and(|error| *error.kind() == IntErrorKind::PosOverflow) {
        bail!("--set {entry}: whole numbers go up to {}", i64::MAX);
    }
    let line = |value: &str| format!("{} = {value}", key.trim()).parse().ok().filter(is_one_field);
    // Strings need no quotes here, since a shell would remove them, and lists need no brackets.
    let text = |value: &str| Value::from(value.trim()).to_string();
    let quoted = |value: &str| value.trim_start().starts_with(['"', '\'']);
    let scalar = |value: &str| match bare_number(value) {
        _ if line(value).is_some() && (!is_text || quoted(value)) => value.to_owned(),
        Some(number) if !is_text => format!("{number:?}"),
        _ => text(value),
    };
    let bare_list = is_list && !value.trim_start().starts_with('[');
    let entries: Vec<&str> = if value.trim().is_empty() { vec![] } else { value.split(',').collect() };
    if bare_list && entries.iter().any(|entry| entry.trim().is_empty()) {
        bail!("--set {entry}: an entry is empty: two commas in a row, or one at an end");
    }
    let list = || format!("[{}]", entries.iter().map(|entry| scalar(entry)).collect::<Vec<_>>().join(", "));
    let value = if bare_list { list() } else { scalar(value) };
    line(&value).with_context(|| format!("--set {entry}: not a value"))
}

/// Whether a table has one field, however deep: after a line break, a value could be followed by another field.
fn is_one_field(table: &Table) -> bool {
    let mut values = table.values();
    match [values.next(), values.next()] {
        [Some(Value::Table(section)), None] => is_one_field(section),
        [value, other] => value.is_some() && other.is_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_that_are_lists_need_no_brackets_and_texts_no_quotes() {
        for (entry, expected) in [
            ("freeze=head", r#"freeze = ["head"]"#),
            ("freeze=downsample_layers, stages.0", r#"freeze = ["downsample_layers", "stages.0"]"#),
            (r#"freeze=["head"]"#, r#"freeze = ["head"]"#),
            ("freeze=", "freeze = []"),
            ("optimizer.betas=0.9,0.95", "optimizer.betas = [0.9, 0.95]"),
            ("data=a,b", r#"data = "a,b""#),
            ("label_smoothing=.1", "label_smoothing = 0.1"),
            ("preprocessing.mean=.1,1.,+.5", "preprocessing.mean = [0.1, 1.0, 0.5]"),
            ("data=01", r#"data = "01""#),
            ("data=.5", r#"data = ".5""#),
            ("data=1e5", r#"data = "1e5""#),
            ("data=9223372036854775808", r#"data = "9223372036854775808""#),
            ("data='1'", r#"data = "1""#),
            ("out=2024-05-01", r#"out = "2024-05-01""#),
            ("out=true", r#"out = "true""#),
            ("out=[1]", r#"out = "[1]""#),
            ("seed=007", r#"seed = "007""#),
            ("epochs=3", "epochs = 3"),
            ("epochs=3\nseed=5", r#"epochs = "3\nseed=5""#), // no other field
        ] {
            assert_eq!(run_field(entry).unwrap(), expected.parse::<Table>().unwrap(), "{entry}");
        }
        assert!(run_field("optimizer.betas=0.9,,0.95").unwrap_err().to_string().contains("an entry is empty"));
    }
}
