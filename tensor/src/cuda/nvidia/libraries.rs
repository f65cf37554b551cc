//! Where CUDA's libraries are. cudarc looks for them by name where the system's loader does, and panics when they are
//! nowhere; so they are looked for here first, also where toolkits and PyPI's wheels put them.

use super::failure;
use crate::{Result, lock};
use libloading::Library;
use std::path::PathBuf;
use std::sync::Mutex;

/// Names a folder that holds the libraries.
const VARIABLE: &str = "BIFORMER_CUDA";

/// What was loaded from a folder: it stays loaded, so that its name finds it again.
static KEPT: Mutex<Vec<Library>> = Mutex::new(vec![]);

/// The driver. Its library comes with the driver itself and is always where the system looks.
pub fn driver() -> Result<()> {
    // SAFETY: loading the driver's library runs its own initialisation alone.
    if unsafe { cudarc::driver::sys::is_culib_present() } {
        return Ok(());
    }
    Err(failure("this machine has no NVIDIA driver (libcuda.so.1)"))
}

/// NVRTC, which compiles kernels.
pub fn compiler() -> Result<()> {
    // It opens its builtins by their bare name, so they are loaded beforehand.
    // SAFETY: as above.
    find("NVRTC", "nvidia-cuda-nvrtc", &["libnvrtc-builtins.so.", "libnvrtc.so."], || unsafe {
        cudarc::nvrtc::sys::is_culib_present()
    })
}

/// cuBLASLt, which multiplies matrices.
pub fn blas() -> Result<()> {
    // SAFETY: as above.
    find("cuBLASLt", "nvidia-cublas", &["libcublasLt.so."], || unsafe { cudarc::cublaslt::sys::is_culib_present() })
}

fn find(name: &str, wheel: &str, files: &[&str], is_present: impl Fn() -> bool) -> Result<()> {
    let named = std::env::var_os(VARIABLE).is_some();
    if !named && is_present() {
        return Ok(());
    }
    for folder in folders() {
        let found: Vec<PathBuf> = files.iter().filter_map(|file| newest(&folder, file)).collect();
        if found.len() == files.len() && found.iter().all(load) && is_present() {
            return Ok(());
        }
    }
    // The folder that is named may hold one of them, and the loader find the other.
    if named && is_present() {
        return Ok(());
    }
    Err(failure(format!(
        "{name} is missing: install the CUDA toolkit, or `pip install {wheel}`, or let {VARIABLE} name the folder with its \
         library"
    )))
}

/// Where libraries may be, best first: the folder that the user names, toolkits, PyPI's wheels.
fn folders() -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let mut folders = vec![];
    if let Some(named) = variable(VARIABLE) {
        folders.extend(["", "lib64", "lib", "lib/x86_64-linux-gnu"].map(|inner| named.join(inner)));
    }
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

fn entries(folder: &std::path::Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

fn name_of(path: &std::path::Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The library of this name with the highest version in a folder.
fn newest(folder: &std::path::Path, start: &str) -> Option<PathBuf> {
    let version = |path: &PathBuf| -> Option<Vec<u32>> {
        name_of(path).strip_prefix(start)?.split('.').map(|part| part.parse().ok()).collect()
    };
    entries(folder).into_iter().filter(|path| version(path).is_some()).max_by_key(|path| version(path))
}

/// Loads a library for all to see.
fn load(path: &PathBuf) -> bool {
    #[cfg(unix)]
    // SAFETY: as above.
    let library = unsafe {
        use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
        Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL).map(libloading::Library::from)
    };
    #[cfg(not(unix))]
    // SAFETY: as above.
    let library = unsafe { Library::new(path) };
    let loaded = library.is_ok();
    if let Ok(library) = library {
        lock(&KEPT).push(library);
    }
    loaded
}
