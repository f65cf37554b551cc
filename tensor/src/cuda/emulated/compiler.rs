//! The emulated device's compiler: compiles each module once, to a shared library for this machine.

use super::{Module, failure};
use crate::cuda::cache;
use crate::{Result, lock};
use libloading::Library;
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex};

/// The compiler, unless this variable names another.
const COMPILER: &str = "c++";
const COMPILER_VARIABLE: &str = "CXX";
/// Further options for the compiler, separated by blanks: the sanitizers, say.
const OPTIONS_VARIABLE: &str = "BIFORMER_EMULATED_OPTIONS";

/// The libraries that this process has requested. The lock of each lets one thread compile it, and one at a time run
/// its kernels, whose shared memory and fibers are statics of the library.
static LIBRARIES: LazyLock<Mutex<HashMap<PathBuf, Shared>>> = LazyLock::new(Mutex::default);

/// A library, once it is loaded.
pub type Shared = Arc<Mutex<Option<Library>>>;

/// The system's C++ compiler, with additional options.
pub struct Compiler {
    /// The program, and perhaps words before the options: `ccache g++`.
    command: Vec<String>,
    options: Vec<String>,
}

impl Compiler {
    /// Finds the compiler. [`Error::Gpu`](crate::Error::Gpu) if there is none, and always on Windows.
    pub fn find() -> Result<Self> {
        if cfg!(windows) {
            return Err(failure("is not available on Windows"));
        }
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let command = words(&std::env::var(COMPILER_VARIABLE).unwrap_or_default());
        let command = if command.is_empty() { vec![COMPILER.to_owned()] } else { command };
        let options = words(&std::env::var(OPTIONS_VARIABLE).unwrap_or_default());
        let found = Self { command, options };
        if !found.start().arg("--version").output().is_ok_and(|output| output.status.success()) {
            return Err(failure(format!(
                "needs a C++ compiler, and {} does not run as one: install g++ or clang, or name one in {COMPILER_VARIABLE}",
                found.command.join(" ")
            )));
        }
        Ok(found)
    }

    /// A command that runs the compiler, still without options.
    fn start(&self) -> Command {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        command
    }

    /// Whether sanitizers watch what it compiles.
    pub fn sanitizes(&self) -> bool {
        self.options.iter().any(|option| option.starts_with("-fsanitize"))
    }

    /// The module as a loaded library, which is compiled if the cache does not have it.
    pub fn library(&self, module: &Module) -> Result<Shared> {
        let mut source =
            format!("#include \"prelude.cuh\"\n#line 1 \"{}/kernel.cu\"\n{}\n", module.name, module.source);
        for (number, instance) in module.instances().iter().enumerate() {
            source.push_str(&format!("EMULATED_ENTRY({number}, {instance})\n"));
        }
        let mut files: Vec<(&str, &str)> =
            vec![("device.h", include_str!("device.h")), ("instructions.h", include_str!("instructions.h"))];
        for header in module.all_headers() {
            files.push(header);
        }
        // Machines of several kinds may share the folder.
        let machine = (std::env::consts::ARCH, std::env::consts::OS);
        let depends_on = (&source, &files, &self.command, &self.options, machine);
        let key = BuildHasherDefault::<DefaultHasher>::default().hash_one(depends_on);
        let folder = cache::folder()
            .ok_or_else(|| failure("needs a folder for compiled kernels; name one in BIFORMER_CACHE"))?;
        let path = folder.join("emulated").join(format!("{}-{key:016x}.so", module.name));
        let shared = Arc::clone(lock(&LIBRARIES).entry(path.clone()).or_default());
        let mut library = lock(&shared);
        if library.is_none() {
            *library = Some(loaded(&path, || self.compile(module, &source, &files, &path))?);
        }
        drop(library);
        Ok(shared)
    }

    fn compile(&self, module: &Module, source: &str, headers: &[(&str, &str)], library: &Path) -> Result<()> {
        let io = |path: &Path, error: std::io::Error| {
            failure(format!("cannot write {}: {error}; name another folder in BIFORMER_CACHE", path.display()))
        };
        // A folder of its own: other processes may compile the same module.
        let work = library.with_extension(std::process::id().to_string());
        cache::make(&work).map_err(|error| io(&work, error))?;
        for (name, text) in headers.iter().chain(&[("kernel.cpp", source)]) {
            let path = work.join(name);
            std::fs::write(&path, text).map_err(|error| io(&path, error))?;
        }
        let built = work.join("kernel.so");
        let output = self
            .start()
            // Level 1, which takes two thirds of level 2's time to compile; the kernels run no slower.
            .args(["-std=c++17", "-O1", "-g1", "-DEMULATED", "-fPIC", "-shared", "-fno-strict-aliasing"])
            // No contraction: a product is rounded even where the processor has a fused multiply-add.
            .arg("-ffp-contract=off")
            // Hidden visibility: otherwise the loader would share the static variables of templates, which are shared
            // memory, between libraries.
            .arg("-fvisibility=hidden")
            .args(["-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-variable"])
            .args(&self.options)
            .arg("-I")
            .arg(&work)
            .arg(work.join("kernel.cpp"))
            .arg("-o")
            .arg(&built)
            .output()
            .map_err(|error| failure(format!("cannot run {}: {error}", self.command.join(" "))))?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            return Err(failure(format!("{} does not compile:\n{log}", module.name)));
        }
        // The loader ignores bytes beyond a library's end: the cache's checksum.
        let code = std::fs::read(&built).map_err(|error| io(&built, error))?;
        cache::write(library, &code).map_err(|error| io(library, error))?;
        let _ = std::fs::remove_dir_all(&work); // what is left behind does no harm
        Ok(())
    }
}

/// Loads the library in a file of the cache, which `compile` writes if it is missing or does not load. A damaged one is
/// not passed to the loader, because that would crash the program; one that was built on a system with other libraries
/// does not load.
fn loaded(path: &Path, compile: impl FnOnce() -> Result<()>) -> Result<Library> {
    // SAFETY: the library is our own compilation, whose loading runs no code.
    let load = || unsafe { Library::new(path) };
    if let Some(library) = cache::read(path).and_then(|_| load().ok()) {
        return Ok(library);
    }
    compile()?;
    load().map_err(|error| failure(format!("cannot load {}: {error:?}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The compiler, and a folder that does not exist yet: not in that for temporary files, which may be mounted
    /// without permission to execute.
    fn compiler(folder: &str) -> Option<(Compiler, PathBuf)> {
        let Ok(compiler) = Compiler::find() else {
            eprintln!("skipped: there is no C++ compiler");
            return None;
        };
        Some((compiler, std::env::current_exe().unwrap().with_file_name(format!("{folder}-{}", std::process::id()))))
    }

    #[cfg(unix)]
    #[test]
    fn only_the_user_may_access_what_was_compiled() {
        use std::os::unix::fs::PermissionsExt;
        let Some((compiler, folder)) = compiler("own") else { return };
        let path = folder.join("deeper/library.so");
        let nothing = Module { name: "nothing", source: "", headers: &[], kernels: &[] };
        compiler.compile(&nothing, nothing.source, &[], &path).unwrap();
        for folder in [&folder, path.parent().unwrap()] {
            assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700, "{}", folder.display());
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_does_not_load_is_compiled_anew() {
        let Some((compiler, folder)) = compiler("libraries") else { return };
        let (path, empty) = (folder.join("library.so"), folder.join("empty.cpp"));
        cache::write(&path, b"a library of another system").unwrap();
        std::fs::write(&empty, "").unwrap();
        let compile = || {
            let mut made = compiler.start();
            let built = folder.join("built.so");
            assert!(made.args(["-shared", "-fPIC", "-o"]).args([&built, &empty]).status().unwrap().success());
            cache::write(&path, &std::fs::read(built).unwrap()).unwrap();
            Ok(())
        };
        drop(loaded(&path, compile).unwrap());
        drop(loaded(&path, || unreachable!("it is there")).unwrap());
        assert!(loaded(&folder.join("another.so"), || Ok(())).unwrap_err().to_string().contains("cannot load"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
