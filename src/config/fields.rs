//! Fields of a run by name, as `--set` takes them.

use super::changes::DEFAULT_MODEL;
use super::{RunConfig, WITHOUT_EFFECT};
use crate::printing::one_line;
use anyhow::Result;
use model::{FIELDS, did_you_mean, field_name, nearest};
use std::collections::{BTreeMap, BTreeSet, HashMap};
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
    /// What the field of this name, dotted (`optimizer.eps`), is by default, if there is one; those of the model not
    /// counted.
    pub fn default_of(name: &str) -> Option<Value> {
        of_run().into_iter().find_map(|(field, value)| (field == name.trim()).then_some(value))
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

/// All fields but the model's, and what they are by default.
fn of_run() -> Vec<(String, Value)> {
    let usual =
        RunConfig::for_model(DEFAULT_MODEL).ok().and_then(|config| Table::try_from(config).ok()).unwrap_or_default();
    let of_run = fields(&usual).into_iter().filter(|(name, _)| !name.starts_with("architecture."));
    of_run.map(|(name, value)| (name, value.clone())).collect()
}

/// All fields of a configuration, dotted, and their values.
fn fields(config: &Table) -> Vec<(String, &Value)> {
    let of_entry = config.iter().flat_map(|(name, value)| match value {
        Value::Table(section) => {
            fields(section).into_iter().map(|(field, value)| (format!("{name}.{field}"), value)).collect()
        }
        value => vec![(name.clone(), value)],
    });
    of_entry.collect()
}

/// The first number in a configuration that is not 0 and computes as 0, if there is one, with its field: computations
/// are in f32, and flush subnormals.
pub fn computes_as_zero(config: &Table) -> Option<(String, f64)> {
    let tiny = |number: &f64| *number != 0.0 && number.abs() < f64::from(f32::MIN_POSITIVE);
    let number = |value: &Value| value.as_float().filter(tiny);
    fields(config).into_iter().find_map(|(name, value)| Some((name, number(value)?)))
}

/// A value as a user reads it.
pub fn show(value: &Value) -> String {
    match value {
        // As 1e-300, not with all its zeros.
        Value::Float(number) => format!("{number:?}"),
        // On one line.
        Value::String(text) if text.contains('\n') => format!("{text:?}"),
        other => {
            let text = other.to_string();
            if text.contains('\n') { one_line(&text) } else { text }
        }
    }
}

impl RunConfig {
    /// What sets each of these runs apart from the others: its values of the fields in which they are not all alike.
    /// Left out are those that change no bit of a result, and a model's own fields where the models are others and each
    /// has its preset's.
    pub fn set_apart(runs: &[&Self]) -> Result<Vec<BTreeMap<String, Value>>> {
        let table_of = |config: &Self| {
            let table = Table::try_from(config)?;
            Ok(fields(&table).into_iter().map(|(name, value)| (name, value.clone())).collect::<BTreeMap<_, _>>())
        };
        let mut all = runs.iter().map(|run| table_of(run)).collect::<Result<Vec<_>>>()?;
        // A model that this version does not know has no preset.
        let preset = |run: &&Self| Self::for_model(&run.model).map_or(Ok(BTreeMap::new()), |preset| table_of(&preset));
        let presets = runs.iter().map(preset).collect::<Result<Vec<_>>>()?;
        let names: BTreeSet<String> = all.iter().flat_map(BTreeMap::keys).cloned().collect();
        let differs = |name: &String| {
            let alike = all.windows(2).all(|pair| pair[0].get(name) == pair[1].get(name));
            let of_presets = || all.iter().zip(&presets).all(|(run, preset)| run.get(name) == preset.get(name));
            let of_model = name.starts_with("architecture.");
            !(alike || WITHOUT_EFFECT.contains(&name.as_str()) || of_model && of_presets())
        };
        let differing: BTreeSet<String> = names.into_iter().filter(differs).collect();
        all.iter_mut().for_each(|run| run.retain(|name, _| differing.contains(name)));
        Ok(all)
    }
}

/// The fields in which two configurations differ, and their values in `here` and in `there`.
pub fn differences(here: &Table, there: &Table) -> Vec<(String, String, String)> {
    let there: HashMap<String, &Value> = fields(there).into_iter().collect();
    let differing = fields(here).into_iter().filter(|(name, value)| there.get(name) != Some(value));
    let shown = |(name, value): (String, &Value)| {
        let other = there.get(&name).map_or_else(String::new, |other| show(other));
        (name, show(value), other)
    };
    differing.map(shown).collect()
}
