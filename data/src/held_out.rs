//! Which images are held out as a test, where a folder does not say.
//!
//! Membership is decided by an image's class and its path within it, not by how many other images there are or when
//! they were added. Adding pictures therefore never moves another one between the parts, and continued training never
//! tests on what it was trained on. The exception is a small class of which none or all would be held out: then one
//! image is moved to the other part.

use std::path::{Path, PathBuf};

use tensor::rng::Philox;

/// About one image in so many is held out.
pub(crate) const ONE_IN: u32 = 5;

/// For each of a class's images below its folder, whether it is held out; of two or more images, at least one is held
/// out and at least one is not. The paths must be in the same order on every machine.
pub(crate) fn held_out(folder: &Path, images: &[PathBuf]) -> Vec<bool> {
    let within = |image: &PathBuf| draw(image.strip_prefix(folder.parent().unwrap_or(folder)).unwrap_or(image));
    let drawn: Vec<u32> = images.iter().map(within).collect();
    let mut held_out: Vec<bool> = drawn.iter().map(|&word| word < u32::MAX / ONE_IN).collect();
    let places = || drawn.iter().enumerate();
    // Of equals these are the first and the last.
    let (least, greatest) = (places().min_by_key(|(_, word)| *word), places().max_by_key(|(_, word)| *word));
    if let (Some((least, _)), Some((greatest, _))) = (least, greatest) {
        held_out[least] = true;
        held_out[greatest] = false;
    }
    held_out
}

/// A random number that is a function of a path's parts.
fn draw(path: &Path) -> u32 {
    let bytes = path.iter().flat_map(|part| part.as_encoded_bytes().iter().chain(b"/"));
    let bytes: Vec<u64> = bytes.map(|&byte| u64::from(byte)).collect();
    Philox::keyed(0, &bytes).word(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: impl Iterator<Item = usize>) -> Vec<PathBuf> {
        names.map(|number| PathBuf::from(format!("class/{number:04}.jpg"))).collect()
    }

    fn renamed(path: &Path) -> PathBuf {
        Path::new("other").join(path.strip_prefix("class").unwrap())
    }

    #[test]
    fn one_in_five_is_held_out_whatever_else_is_there() {
        let all = named(0..2000);
        let of_all = held_out(Path::new("class"), &all);
        let count = of_all.iter().filter(|&&held| held).count();
        assert!((340..460).contains(&count), "{count} of 2000");
        let some = held_out(Path::new("class"), &all[500..700]);
        assert_eq!(some, of_all[500..700]);
        let of_another = held_out(Path::new("other"), &all.iter().map(|path| renamed(path)).collect::<Vec<_>>());
        assert_ne!(of_another, of_all, "names that come again in each class");
        let moved: Vec<PathBuf> = all.iter().map(|path| Path::new("/elsewhere").join(path)).collect();
        assert_eq!(held_out(Path::new("/elsewhere/class"), &moved), of_all);
    }

    #[test]
    fn of_few_there_is_one_to_learn_from_and_one_to_be_tested_on() {
        for count in 2..30 {
            for first in 0..50 {
                let held_out = held_out(Path::new("class"), &named(first..first + count));
                assert!(held_out.contains(&true) && held_out.contains(&false), "{first} and {count} from there");
            }
        }
    }
}
