//! Requested changes to a configuration: those of a TOML file, overridden by those of the command line.

use super::RunConfig;
use crate::paths::read_text;
use crate::printing::one_line;
use anyhow::{Context, Result, bail};
use model::{did_you_mean, field_name, nearest, preset};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// How many letters of a wrong line an error shows.
const MAX_LINE: usize = 60;

/// The model of a run that asks for none.
pub const DEFAULT_MODEL: &str = "nano";

/// The default run folder of a model. It is written with a forward slash on every system.
pub fn usual_folder(model: &str) -> PathBuf {
    format!("runs/{model}").into()
}

/// Fields of a configuration that are to differ from where it starts.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    table: Table,
    /// Where they come from, for errors.
    origin: String,
}

impl Changes {
    /// The changes of a TOML file, if there is one, overridden by those of the command line. Errors: the file cannot be
    /// read or is no TOML; file and command line contradict each other.
    pub fn gather(file: Option<&Path>, flags: Table) -> Result<Self> {
        let mut table = match file {
            Some(path) => {
                let named = || format!("configuration {}", path.display());
                let text = read_text(path, "a TOML file like a run folder's config.toml").with_context(named)?;
                parse_table(&text).and_then(with_own_names).with_context(named)?
            }
            None => Table::new(),
        };
        let origin = match file {
            None => "command line".to_owned(),
            Some(path) if flags.is_empty() => path.display().to_string(),
            Some(path) => format!("{} and command line", path.display()),
        };
        let flags = with_own_names(flags)?;
        if let Some(path) = file {
            ensure_of_model(&table, &flags).with_context(|| format!("configuration {}", path.display()))?;
        }
        merge(&mut table, flags).with_context(|| format!("configuration ({origin})"))?;
        Ok(Self { table, origin })
    }

    /// The changes of a TOML text; `Changes::default()` are none. Errors: it is no TOML.
    ///
    /// ```
    /// use biformer::config::{Changes, RunConfig};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// let config = RunConfig::changed(&Changes::parse("epochs = 48\nschedule.peak = 1e-3")?)?;
    /// assert_eq!((config.epochs, config.schedule.peak), (48, 1e-3));
    /// # Ok(())
    /// # }
    /// ```
    pub fn parse(text: &str) -> Result<Self> {
        Self::gather(None, parse_table(text)?)
    }

    /// The model that is asked for, if one is. Errors: it is no text.
    pub fn model(&self) -> Result<Option<&str>> {
        self.text("model")
    }

    /// The weights to start from that are asked for; empty if none are. Errors: they are no text.
    pub fn weights(&self) -> Result<&str> {
        self.text("weights").map(Option::unwrap_or_default)
    }

    /// The requested run folder, by default that of the model. Error: neither folder nor model is given, but weights
    /// are, which may imply another model; the folder must then be named.
    pub fn folder(&self) -> Result<PathBuf> {
        Ok(match self.text("out")? {
            Some(out) => out.into(),
            None if self.model()?.is_none() && !self.weights()?.is_empty() => {
                bail!("--resume: with --weights and without --model the run's folder is not known; name it with --out")
            }
            None => usual_folder(self.model()?.unwrap_or(DEFAULT_MODEL)),
        })
    }

    /// Whether a field at the top is asked for.
    pub fn has(&self, field: &str) -> bool {
        self.table.contains_key(field)
    }

    fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => bail!("{key}: expected a text in quotes, got {}", one_line(&other.to_string())),
        }
    }

    /// Makes the changes in a configuration's table. Errors: a field that does not exist.
    pub fn apply(&self, table: &mut Table) -> Result<()> {
        overlay(table, &self.table, "")
    }

    /// Where the changes come from, for errors.
    pub fn origin(&self) -> &str {
        &self.origin
    }
}

/// A TOML text as a table, or what is wrong with it, in one line.
pub fn parse_table(text: &str) -> Result<Table> {
    text.parse::<Table>().map_err(|error| {
        let said = one_line(error.message());
        let Some(span) = error.span() else { return anyhow::anyhow!("{said}") };
        let line = text.as_bytes()[..span.start.min(text.len())].split(|&b| b == b'\n').count();
        let shown = text.lines().nth(line - 1).unwrap_or_default().trim();
        let shown: String = shown.chars().take(MAX_LINE).collect();
        // As in data = "C:\Users\me": \U would begin a letter's number.
        let hint = if shown.contains('\\') { "; write paths with /, or between single quotes" } else { "" };
        anyhow::anyhow!("line {line} ({shown}): {said}{hint}")
    })
}

/// The table with the model fields that are given under the published code's names renamed to this program's names.
fn with_own_names(mut table: Table) -> Result<Table> {
    let Some(Value::Table(fields)) = table.get_mut("architecture") else { return Ok(table) };
    for (key, value) in std::mem::take(fields) {
        let name = field_name(&key);
        if fields.insert(name.to_owned(), value).is_some() {
            bail!("architecture.{name} is given twice, under both of its names");
        }
    }
    Ok(table)
}

/// Refuses another model on the command line than that of a file that describes all of its own, as a run folder's
/// configuration does: what is left of that other model would be its name.
fn ensure_of_model(file: &Table, flags: &Table) -> Result<()> {
    let named = |table: &Table| table.get("model").and_then(Value::as_str).map(str::to_owned);
    let (Some(asked), Some(Value::Table(fields))) = (named(flags), file.get("architecture")) else { return Ok(()) };
    let own = named(file).unwrap_or_else(|| DEFAULT_MODEL.to_owned());
    let (Ok(asked_preset), Ok(own_preset)) = (preset(&asked), preset(&own)) else { return Ok(()) };
    let [asked_preset, own_preset] = [asked_preset, own_preset].map(|preset| Table::try_from(preset.config()));
    let (asked_preset, own_preset) = (asked_preset?, own_preset?);
    if own_preset.keys().any(|key| !fields.contains_key(key)) {
        return Ok(());
    }
    let is_others =
        |(key, value): (&String, &Value)| own_preset.get(key) == Some(value) && asked_preset.get(key) != Some(value);
    if let Some((field, _)) = fields.iter().find(|&field| is_others(field)) {
        bail!(
            "--model {asked}: the file describes {own} (in [architecture], {field} for instance); leave --model out, or take \
             [architecture], and image_size, out of a copy of the file"
        );
    }
    Ok(())
}

/// Merges one table into another recursively, without checking the keys; values in `over` take precedence. Errors: a
/// table in `over` is none in `base`.
pub fn merge(base: &mut Table, over: Table) -> Result<()> {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(inner)), Value::Table(value)) => merge(inner, value)?,
            (Some(other), Value::Table(_)) => bail!("{key}: expected a table, got {}", one_line(&other.to_string())),
            (_, value) => _ = base.insert(key, value),
        }
    }
    Ok(())
}

/// Puts changes over a configuration, key by key; a key that it does not have is an error that names the
/// nearest one.
fn overlay(base: &mut Table, changes: &Table, path: &str) -> Result<()> {
    for (key, change) in changes {
        let name = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        if !base.contains_key(key) {
            let known: Vec<&str> = base.keys().map(String::as_str).collect();
            let meant = RunConfig::elsewhere(&name).or_else(|| nearest(key, known.iter().copied()));
            let hint = match meant {
                Some(meant) if meant == name => "; write it without quotes".to_owned(),
                meant => did_you_mean(meant.as_deref()),
            };
            bail!("there is no configuration key \"{name}\"{hint}; known here: {}", known.join(", "));
        }
        let value = &mut base[key];
        match (value, change) {
            (Value::Table(inner), Value::Table(change)) => overlay(inner, change, &name)?,
            (Value::Table(_), other) => bail!("{name}: expected a table, got {}", one_line(&other.to_string())),
            // 1 is a fine way to write 1.0.
            (value @ Value::Float(_), Value::Integer(change)) => *value = Value::Float(*change as f64),
            (value, change) => *value = change.clone(),
        }
    }
    Ok(())
}
