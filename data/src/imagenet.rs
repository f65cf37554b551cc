//! What is known of ImageNet without its images.

/// The names of the 1,000 classes, in the order of the published models' scores ([their origin](../assets/imagenet/ORIGIN.md)).
pub fn imagenet_classes() -> Vec<String> {
    include_str!("../assets/imagenet/classes.txt").lines().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn there_are_a_thousand_names_and_each_is_another() {
        let names = super::imagenet_classes();
        let distinct: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!([names.len(), distinct.len()], [1000, 1000]);
        assert_eq!([&names[0], &names[281], &names[999]], ["tench", "tabby", "toilet tissue"]);
    }
}
