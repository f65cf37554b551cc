//! Fields of a configuration by name: how they are written in files and on the command line.

use crate::config::ModelConfig;
use crate::error::{Error, Result, in_plain_words};
use serde_json::Value;

/// The fields of [`ModelConfig`], as they are written in files and on the command line.
pub const FIELDS: [&str; 17] = [
    "family",
    "features",
    "num_classes",
    "depth",
    "embed_dim",
    "topks",
    "n_win",
    "head_dim",
    "full_attention_heads",
    "mlp_ratio",
    "lce_kernel",
    "pos_kernel",
    "stem_strides",
    "auto_pad",
    "soft_routing",
    "layer_scale",
    "drop_path",
];

/// What the published code calls some of them.
const ALIASES: [(&str, &str); 6] = [
    ("n_wins", "n_win"),
    ("mlp_ratios", "mlp_ratio"),
    ("side_dwconv", "lce_kernel"),
    ("before_attn_dwconv", "pos_kernel"),
    ("layer_scale_init_value", "layer_scale"),
    ("drop_path_rate", "drop_path"),
];

/// The name that a field has here, whether it is given by that or by the published code's.
pub fn field_name(key: &str) -> &str {
    ALIASES.iter().find(|(theirs, _)| *theirs == key).map_or(key, |(_, ours)| ours)
}

impl ModelConfig {
    /// This configuration with fields changed as on a command line: `n_win=8`, `topks=1,4,16,-2`, `auto_pad=true`.
    /// Errors: [`Error::UnknownField`]; [`Error::Override`] for a value of another kind; [`Error::Config`] where the
    /// whole does not hold together.
    pub fn with_overrides<'a>(&self, overrides: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let mut config = self.clone();
        for entry in overrides {
            // One by one, so that a value of the wrong kind is told together with its field.
            config = config.with_override(entry)?.0;
        }
        config.check()?;
        Ok(config)
    }

    /// This configuration, not checked, with one field changed; the field, and its value as it is written in files.
    /// Errors: [`Error::UnknownField`], [`Error::Override`].
    pub fn with_override(&self, entry: &str) -> Result<(Self, &'static str, Value)> {
        let wrong = |reason: String| Error::Override { entry: entry.to_owned(), reason };
        let (key, value) = entry
            .split_once('=')
            .ok_or_else(|| wrong("expected key=value, for instance n_win=8 or topks=1,4,16,-2".into()))?;
        let key = field_name(key.trim());
        let Some(field) = FIELDS.into_iter().find(|&field| field == key) else {
            let known = FIELDS.map(str::to_owned).to_vec();
            return Err(Error::UnknownField { key: key.into(), known });
        };
        let mut table = serde_json::to_value(self).map_err(|error| wrong(error.to_string()))?;
        let value = parse(value, table[field].is_array());
        table[field] = value.clone();
        let config = serde_json::from_value(table).map_err(|error| wrong(in_plain_words(&error.to_string())))?;
        Ok((config, field, value))
    }
}

/// A number that neither JSON nor TOML takes for one, as it begins or ends with its point: `.1`, `1.`.
pub fn bare_number(text: &str) -> Option<f64> {
    let text = text.trim();
    let digits = text.trim_start_matches(['+', '-']);
    let digits = digits.strip_prefix('.').or_else(|| digits.strip_suffix('.'))?;
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// A value from the command line: a list where commas or the field ask for one.
fn parse(text: &str, list: bool) -> Value {
    let scalar = |text: &str| {
        let (text, number) = (text.trim(), || bare_number(text).map(Value::from));
        serde_json::from_str(text).ok().or_else(number).unwrap_or_else(|| Value::from(text))
    };
    let text = text.trim();
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if list || inner.contains(',') { inner.split(',').map(scalar).collect() } else { scalar(inner) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn numbers_are_read_as_people_write_them() {
        for (text, number) in [(".1", 0.1), ("1.", 1.0), ("+.5", 0.5), ("-.25", -0.25), ("1e-1", 0.1)] {
            assert_eq!(parse(text, false), Value::from(number), "{text}");
        }
        for text in ["inf", "007", "-02", ".", "1.2.", "--.5"] {
            assert_eq!(parse(text, false), Value::from(text));
        }
    }

    #[test]
    fn fields_that_do_not_go_together_are_refused() {
        let changed = ModelConfig::default().with_overrides(["depth=1,1", "embed_dim=24,48", "topks=1,2,4"]);
        assert!(matches!(changed, Err(Error::Config { field: "topks", .. })), "{changed:?}");
    }

    #[test]
    fn fields_are_those_that_files_have_and_aliases_are_of_them() {
        let table = serde_json::to_value(ModelConfig::default()).unwrap();
        let keys: BTreeSet<&str> = table.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, BTreeSet::from(FIELDS));
        assert!(ALIASES.iter().all(|(theirs, ours)| FIELDS.contains(ours) && !FIELDS.contains(theirs)));
    }
}
