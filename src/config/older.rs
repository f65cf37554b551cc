//! What holds for runs whose configuration is older than a field.

pub(super) fn is_strict() -> bool {
    true
}

pub(super) fn no_decay() -> f64 {
    1.0
}

#[cfg(test)]
mod tests {
    use crate::config::RunConfig;

    #[test]
    fn a_run_that_began_before_there_was_a_field_goes_on() {
        let config = RunConfig::for_model("nano").unwrap();
        let is_older = |line: &&str| {
            !["strict_weights", "layer_decay", "vertical_flip", "best_by"].iter().any(|it| line.starts_with(it))
        };
        let text = config.to_toml().unwrap();
        let older: Vec<&str> = text.lines().filter(is_older).collect();
        assert_eq!((older.len() + 4, RunConfig::parse(&older.join("\n")).unwrap()), (text.lines().count(), config));
    }
}
