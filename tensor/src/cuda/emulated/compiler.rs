//! The emulated device's compiler: modules become libraries of this machine's code, each once.

use super::{Module, failure};
use crate::cuda::cache;
use crate::{Result, lock};
use libloading::Library;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex};

/// The compiler, unless this variable names another.
const COMPILER: &str = "c++";
const COMPILER_VARIABLE: &str = "CXX";
/// Further options for the compiler, separated by blanks: the sanitizers, say.
const OPTIONS_VARIABLE: &str = "BIFORMER_EMULATED_OPTIONS";

/// The libraries that this process has asked for: one compiles them, and one at a time runs a kernel, whose shared memory
/// and fibers are statics of the library.
static LIBRARIES: LazyLock<Mutex<HashMap<PathBuf, Shared>>> = LazyLock::new(Mutex::default);

/// A library, once it is loaded.
pub type Shared = Arc<Mutex<Option<Library>>>;

/// The system's C++ compiler, with what it is told beside the usual.
pub struct Compiler {
    /// The program, and perhaps words before the options: `ccache g++`.
    command: Vec<String>,
    options: Vec<String>,
}

impl Compiler {
    /// Finds it. [`Error::Gpu`](crate::Error::Gpu) where there is none, and on Windows, whatever there is.
    pub fn find() -> Result<Self> {
        if cfg!(windows) {
            return Err(failure("is not for Windows"));
        }
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let command = words(&std::env::var(COMPILER_VARIABLE).unwrap_or_default());
        let command = if command.is_empty() { vec![COMPILER.to_owned()] } else { command };
        let options = words(&std::env::var(OPTIONS_VARIABLE).unwrap_or_default());
        let found = Self { command, options };
        if !found.start().arg("--version").output().is_ok_and(|output| output.status.success()) {
            return Err(failure(format!(
                "needs a C++ compiler, and {} is none: install g++ or clang, or name one in {COMPILER_VARIABLE}",
                found.command.join(" ")
            )));
        }
        Ok(found)
    }

    /// It, to be told what to do.
    fn start(&self) -> Command {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        command
    }

    /// Whether sanitizers watch what it compiles.
    pub fn sanitizes(&self) -> bool {
        self.options.iter().any(|option| option.starts_with("-fsanitize"))
    }

    /// The module as a library, compiled now or before, and loaded.
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
        let mut hasher = DefaultHasher::new();
        // Machines of several kinds may share the folder.
        let machine = (std::env::consts::ARCH, std::env::consts::OS);
        (&source, &files, &self.command, &self.options, machine).hash(&mut hasher);
        let folder = cache::folder()
            .ok_or_else(|| failure("needs a folder for compiled kernels; name one in BIFORMER_CACHE"))?;
        let path = folder.join("emulated").join(format!("{}-{:016x}.so", module.name, hasher.finish()));
        let shared = Arc::clone(lock(&LIBRARIES).entry(path.clone()).or_default());
        let mut library = lock(&shared);
        if library.is_none() {
            *library = Some(loaded(&path, || self.compile(module, &source, &files, &path))?);
        }
        drop(library);
        Ok(shared)
    }

    fn compile(&self, module: &Module, source: &str, headers: &[(&str, &str)], library: &Path) -> Result<()> {
        let io = |path: &Path, error: std::io::Error| failure(format!("cannot write {}: {error}", path.display()));
        // A folder of its own: other processes may compile the same module.
        let work = library.with_extension(std::process::id().to_string());
        std::fs::create_dir_all(&work).map_err(|error| io(&work, error))?;
        for (name, text) in headers.iter().chain(&[("kernel.cpp", source)]) {
            let path = work.join(name);
            std::fs::write(&path, text).map_err(|error| io(&path, error))?;
        }
        let built = work.join("kernel.so");
        let output = self
            .start()
            // Hidden, or the loader would let libraries share what a template that both have calls static: shared memory.
            .args(["-std=c++17", "-O2", "-g1", "-DEMULATED", "-fPIC", "-shared", "-fno-strict-aliasing"])
            // A product that is to be rounded is, also where the processor could multiply and add at once.
            .arg("-ffp-contract=off")
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
        // What lies behind a library's end, its loader does not read.
        let code = std::fs::read(&built).map_err(|error| io(&built, error))?;
        cache::write(library, &code).map_err(|error| io(library, error))?;
        let _ = std::fs::remove_dir_all(&work); // what is left behind does no harm
        Ok(())
    }
}

/// The library in a file of the cache, which `compile` writes where there is none that loads. One that is damaged is not
/// loaded, which would end the program; nor can be one that a system with other libraries has made.
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

    #[test]
    fn what_does_not_load_is_compiled_anew() {
        let Ok(compiler) = Compiler::find() else {
            return eprintln!("skipped: there is no C++ compiler");
        };
        // Not with temporary files, which may lie where nothing can be run.
        let folder = std::env::current_exe().unwrap().with_file_name(format!("libraries-{}", std::process::id()));
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
