//! Finds CUDA's libraries. cudarc loads them by name through the system's loader, and panics if they are not found; so
//! they are located and loaded here first, also from where toolkits and PyPI's wheels install them. cudarc then finds a
//! loaded library by its versioned name. But it tries the unversioned name first, which toolkits install: if the loader
//! finds a library by that name, the folder that the user has chosen would be ignored, which is reported as an error.

use super::failure;
use crate::cuda::cache::variable;
use crate::{Result, lock};
use libloading::Library;
use std::error::Error;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

/// Names a folder that holds the libraries.
const VARIABLE: &str = "BIFORMER_CUDA";

/// How the files of the libraries that are looked for begin.
const LIBRARIES: [&str; 2] = [NVRTC, CUBLASLT];
const NVRTC: &str = "libnvrtc.so.";
const CUBLASLT: &str = "libcublasLt.so.";

/// Libraries that were loaded from a folder: they stay loaded, so that the loader finds them by name.
static KEPT: Mutex<Vec<Library>> = Mutex::new(vec![]);

/// The driver. Its library comes with the driver itself and is always where the system looks.
pub fn driver() -> Result<()> {
    // SAFETY: loading the driver's library runs nothing but its own initialisation.
    if unsafe { cudarc::driver::sys::is_culib_present() } {
        return Ok(());
    }
    let library = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
    Err(failure(format!("this machine has no NVIDIA driver ({library})")))
}

/// NVRTC, which compiles kernels.
pub fn compiler() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    // NVRTC opens its builtins library by its bare name, so that one is loaded first.
    let files = [NVRTC, "libnvrtc-builtins.so."];
    let find = || {
        find("NVRTC", "nvidia-cuda-nvrtc", &files, c"nvrtcVersion", || {
            use cudarc::nvrtc::sys::{culib, is_culib_present};
            // SAFETY: as above.
            unsafe { is_culib_present().then(|| culib()) }
        })
    };
    FOUND.get_or_init(find).clone()
}

/// cuBLASLt, which multiplies matrices.
pub fn blas() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    let find = || {
        find("cuBLASLt", "nvidia-cublas", &[CUBLASLT], c"cublasLtGetVersion", || {
            use cudarc::cublaslt::sys::{culib, is_culib_present};
            // SAFETY: as above.
            unsafe { is_culib_present().then(|| culib()) }
        })
    };
    FOUND.get_or_init(find).clone()
}

/// Finds and loads a library: the first of these files; the others are those that it needs. `open` returns the library
/// that cudarc will use, if it finds one. The folder that the user names comes first, if it has the library, then what
/// the system's loader finds, then other folders.
fn find(
    name: &str,
    wheel: &str,
    files: &[&str],
    function: &CStr,
    open: impl Fn() -> Option<&'static Library>,
) -> Result<()> {
    if let Some(named) = variable(VARIABLE) {
        let folders = inner_folders(&named);
        if let Some((folder, file)) = folders.iter().find_map(|folder| Some((folder, newest(folder, files[0])?))) {
            let wrong = |why: &str| failure(format!("{VARIABLE} names {}, whose {name} {why}", named.display()));
            for part in files.iter().rev() {
                let part = newest(folder, part).ok_or_else(|| wrong(&format!("lacks {part}*")))?;
                load(&part).map_err(|error| wrong(&format!("does not load: {error}")))?;
            }
            let library = open().ok_or_else(|| wrong("belongs to a CUDA version that is too old or too new"))?;
            return ensure_origin(library, function, &file, &named);
        }
        if !folders.iter().any(|folder| LIBRARIES.iter().any(|library| newest(folder, library).is_some())) {
            let named = named.display();
            return Err(failure(format!("{VARIABLE} names {named}, and neither NVRTC nor cuBLASLt is there")));
        }
    }
    if open().is_some() {
        return Ok(());
    }
    for folder in folders() {
        let found: Vec<PathBuf> = files.iter().filter_map(|file| newest(&folder, file)).collect();
        // In reverse order: the last one is needed by the others.
        if found.len() == files.len() && found.iter().rev().all(|file| load(file).is_ok()) && open().is_some() {
            return Ok(());
        }
    }
    Err(failure(format!(
        "{name} is missing: install the CUDA toolkit, or `pip install {wheel}`, or set {VARIABLE} to the folder with its \
         library"
    )))
}

/// Checks that a library was loaded from this file, which the user has chosen.
fn ensure_origin(library: &Library, function: &CStr, file: &Path, named: &Path) -> Result<()> {
    // SAFETY: nothing is called; only the address counts.
    let address = unsafe { library.get::<unsafe extern "C" fn()>(function.to_bytes_with_nul()) };
    let origin = address.ok().and_then(|function| file_at(*function as usize));
    match origin {
        Some(origin) if identity(&origin) != identity(file) => Err(failure(format!(
            "{VARIABLE} names {}, but the system's loader finds {} first: take its folder out of LD_LIBRARY_PATH or \
             /etc/ld.so.conf.d, or unset {VARIABLE}",
            named.display(),
            origin.display()
        ))),
        _ => Ok(()),
    }
}

/// The identity of a file, which is the same for all its names.
fn identity(file: &Path) -> Option<(u64, u64)> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        file.metadata().ok().map(|file| (file.dev(), file.ino()))
    }
    #[cfg(not(unix))]
    file.metadata().ok().map(|_| (0, 0))
}

/// The file that this process has mapped at an address. `None` if the system does not tell.
fn file_at(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    // Addresses, permissions, offset, device, inode, path.
    let inside = |line: &&str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16));
        Some((start.ok()?..end.ok()?).contains(&address))
    };
    let line = maps.lines().find(|line| inside(line) == Some(true))?;
    line.find('/').map(|path| PathBuf::from(&line[path..]))
}

/// A folder, and where libraries lie in it if it is that of a toolkit or a system.
fn inner_folders(named: &Path) -> Vec<PathBuf> {
    let of_system = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    ["", "lib64", "lib", &of_system].map(|inner| named.join(inner)).into()
}

/// Where libraries may be, best first: toolkits, PyPI's wheels.
fn folders() -> Vec<PathBuf> {
    let mut folders = vec![];
    let toolkits =
        ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).chain([PathBuf::from("/usr/local/cuda")]);
    folders.extend(toolkits.flat_map(|toolkit| ["lib64", "lib"].map(|inner| toolkit.join(inner))));
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
    let home = variable("HOME").map(|home| home.join(".local"));
    for prefix in environments.chain(home).chain(["/usr/local", "/usr"].map(PathBuf::from)) {
        let pythons = entries(&prefix.join("lib")).into_iter().filter(|path| name_of(path).starts_with("python3"));
        for packages in pythons.flat_map(|python| ["site-packages", "dist-packages"].map(|inner| python.join(inner))) {
            folders.extend(entries(&packages.join("nvidia")).into_iter().map(|wheel| wheel.join("lib")));
        }
    }
    folders
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The library of this name with the highest version in a folder.
fn newest(folder: &Path, start: &str) -> Option<PathBuf> {
    let version = |path: &PathBuf| -> Option<Vec<u32>> {
        name_of(path).strip_prefix(start)?.split('.').map(|part| part.parse().ok()).collect()
    };
    entries(folder).into_iter().filter(|path| version(path).is_some()).max_by_key(|path| version(path))
}

/// Loads a library with global symbol visibility. Errors: the loader's message.
fn load(path: &PathBuf) -> std::result::Result<(), String> {
    #[cfg(unix)]
    // SAFETY: as above.
    let library = unsafe {
        use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
        Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL).map(libloading::Library::from)
    };
    #[cfg(not(unix))]
    // SAFETY: as above.
    let library = unsafe { Library::new(path) };
    let words = |error: libloading::Error| error.source().map_or(error.to_string(), ToString::to_string);
    lock(&KEPT).push(library.map_err(words)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_version_in_a_folder_is_the_newest() {
        let folder = tempfile::tempdir().unwrap();
        let names =
            ["libnvrtc.so", "libnvrtc.so.9", "libnvrtc.so.13.0", "libnvrtc.so.12.9", "libnvrtc.so.x", "other.so.14"];
        names.iter().for_each(|name| std::fs::write(folder.path().join(name), "").unwrap());
        assert_eq!(newest(folder.path(), "libnvrtc.so."), Some(folder.path().join("libnvrtc.so.13.0")));
        assert_eq!(newest(folder.path(), "libcublasLt.so."), None);
        assert_eq!(newest(&folder.path().join("nowhere"), "libnvrtc.so."), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_system_tells_what_file_a_function_is_from_by_any_of_its_names() {
        let own = std::env::current_exe().unwrap();
        let from = file_at(newest as fn(&Path, &str) -> Option<PathBuf> as usize).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&own, &link).unwrap();
        assert!(identity(&own).is_some() && [from, link].iter().all(|name| identity(name) == identity(&own)));
        assert_ne!(identity(folder.path()), identity(&own));
        assert_eq!(file_at(0), None);
    }
}
