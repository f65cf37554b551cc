//! Fields of a run by name, as `--set` takes them.

use super::RunConfig;
use super::changes::DEFAULT_MODEL;
use model::{FIELDS, did_you_mean, field_name, nearest};
use toml::{Table, Value};

/// What other trainers call some of them.
const ALIASES: [(&str, &str); 5] = [
    ("lr", "schedule.peak"),
    ("learning_rate", "schedule.peak"),
    ("wd", "optimizer.weight_decay"),
    ("grad_clip", "clip_norm"),
    ("class_weights", "augmentation.balance"),
];

impl RunConfig {
    /// Whether there is a field of this name, dotted (`optimizer.eps`); those of the model not counted.
    pub fn has_field(name: &str) -> bool {
        usual(name).is_some()
    }

    /// Whether there is a field of this name, and it is a list.
    pub fn is_list(name: &str) -> bool {
        usual(name).is_some_and(|value| value.is_array())
    }

    /// Whether there is a field of this name, and it is a text.
    pub fn is_text(name: &str) -> bool {
        usual(name).is_some_and(|value| value.is_str())
    }

    /// The field, dotted, that goes by this name elsewhere: in other trainers, or in another section.
    pub fn elsewhere(name: &str) -> Option<String> {
        let name = tail(name);
        let alias = ALIASES.iter().find(|(theirs, _)| *theirs == name).map(|&(_, ours)| ours.to_owned());
        let of_run = || of_run().into_iter().map(|(field, _)| field).find(|field| tail(field) == name);
        let of_model = || FIELDS.contains(&field_name(name)).then(|| format!("architecture.{}", field_name(name)));
        alias.or_else(of_run).or_else(of_model)
    }

    /// The error message for a name that is a field of neither the run nor the model, with a hint at what was meant:
    /// the fields of a section, a field that was named without its section, or the most similar field. None if there is
    /// such a field.
    pub fn unknown_field(name: &str) -> Option<String> {
        let name = name.trim();
        let of_run: Vec<String> = of_run().into_iter().map(|(field, _)| field).collect();
        if FIELDS.contains(&field_name(name)) || of_run.iter().any(|field| field == name) {
            return None;
        }
        let inside: Vec<&str> = of_run
            .iter()
            .filter(|field| field.split_once('.').is_some_and(|(section, _)| section == name))
            .map(String::as_str)
            .collect();
        let like = || {
            let meant = nearest(tail(name), of_run.iter().map(|field| tail(field)).chain(FIELDS))?;
            Some(of_run.iter().find(|field| tail(field) == meant).cloned().unwrap_or(meant))
        };
        let hint = match inside[..] {
            [] => did_you_mean(Self::elsewhere(name).or_else(like).as_deref()),
            _ => format!(", which is a section with {}", inside.join(", ")),
        };
        Some(format!("neither the run nor the model has a field \"{name}\"{hint}; a run's config.toml has them all"))
    }
}

/// A field's own name, without its sections.
fn tail(field: &str) -> &str {
    field.rsplit('.').next().unwrap_or(field)
}

/// What the field of this name is by default, if there is one.
fn usual(name: &str) -> Option<Value> {
    of_run().into_iter().find_map(|(field, value)| (field == name.trim()).then_some(value))
}

/// All fields but the model's, dotted, and what they are by default.
fn of_run() -> Vec<(String, Value)> {
    let fields =
        RunConfig::for_model(DEFAULT_MODEL).ok().and_then(|config| Table::try_from(config).ok()).unwrap_or_default();
    let named = |(name, value)| match value {
        Value::Table(_) if name == "architecture" => vec![],
        Value::Table(inner) => inner.into_iter().map(|(field, value)| (format!("{name}.{field}"), value)).collect(),
        value => vec![(name, value)],
    };
    fields.into_iter().flat_map(named).collect()
}
