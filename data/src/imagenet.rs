//! What is known of ImageNet without its images.

/// The 1,000 classes ([their origin](../assets/imagenet/ORIGIN.md)), in the order of the published models' scores: for
/// each the name of the folder that has its images (its ID in WordNet, `n01440764`), and its own.
fn classes() -> impl Iterator<Item = (&'static str, &'static str)> {
    include_str!("../assets/imagenet/classes.txt").lines().filter_map(|line| line.split_once(' '))
}

/// The names of the 1,000 classes, in the order of the published models' scores.
pub fn imagenet_classes() -> Vec<String> {
    classes().map(|(_, name)| name.to_owned()).collect()
}

/// What else a class of ImageNet is called: by its own name if this is its folder's, and the other way round.
pub(crate) fn other_name(name: &str) -> Option<&'static str> {
    classes().find_map(|(folder, class)| match name {
        _ if name == folder => Some(class),
        _ if name == class => Some(folder),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    #[test]
    fn there_are_a_thousand_names_and_each_is_another() {
        let names = super::imagenet_classes();
        let distinct: BTreeSet<&String> = names.iter().collect();
        assert_eq!([names.len(), distinct.len()], [1000, 1000]);
        assert_eq!([&names[0], &names[281], &names[999]], ["tench", "tabby", "toilet tissue"]);
    }

    #[test]
    fn folders_are_in_the_order_of_their_names() {
        let folders: Vec<&str> = super::classes().map(|(folder, _)| folder).collect();
        assert!(folders.is_sorted() && folders.iter().all(|folder| folder.len() == 9 && folder.starts_with('n')));
        assert_eq!(["n02123045", "tabby", "my cat"].map(super::other_name), [Some("tabby"), Some("n02123045"), None]);
    }
}
