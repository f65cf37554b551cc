//! Libraries that stand in for CUDA's, for a GPU that does not exist: the driver, NVRTC and cuBLASLt. With them the
//! host code for a GPU runs on a machine without one: every call that `tensor::cuda::nvidia` makes is executed by the
//! rules of the manuals, and as adversarially as those allow.
//!
//! | file | what it holds |
//! |---|---|
//! | `device.h`, `.cpp` | the device: memory, and streams, which execute requests as late as they may |
//! | `driver.cpp` | `libcuda.so`: contexts, memory, events, kernels, graphs |
//! | `code.h` | kernels, as the driver has them once they are loaded: |
//! | `native.cpp` | native kernels, from the stand-in `libnvrtc.so` |
//! | `ptx/` | PTX kernels, from NVIDIA's own NVRTC, interpreted instruction by instruction |
//! | `compiler.cpp` | `libnvrtc.so`: kernels are compiled by the system's C++ compiler, as those of the emulated device are |
//! | `blas.cpp` | `libcublasLt.so`: column-major products, with layouts, epilogues and plans |
//!
//! The emulated device does not exercise that code: it replaces everything behind the trait `Driver` of `tensor::cuda`.
//!
//! Variables say what GPU it is:
//!
//! | variable | what it says |
//! |---|---|
//! | `STANDIN_EAGER` | 1: of the three streams that a program makes the first executes requests as early as possible, 2: the second, 3: the third; otherwise nothing executes before something waits for it |
//! | `STANDIN_DEVICES` | how many GPUs there are |
//! | `STANDIN_CAPABILITY` | 90 for 9.0 |
//! | `STANDIN_MULTIPROCESSORS`, `STANDIN_MEMORY` | how many, and how many bytes |
//! | `STANDIN_SHARED` | how many bytes of shared memory a block may have |
//! | `STANDIN_DRIVER`, `STANDIN_NVRTC`, `STANDIN_CUBLAS` | versions, as each library numbers them |
//! | `STANDIN_EPILOGUES` | 0: cuBLASLt refuses all epilogues; 2: only when a product with one is to be computed; 3: it reports that they would be slow; 4: products with one fail |
//! | `STANDIN_REFUSED` | how many of the three algorithms that it recommends for a product cuBLASLt refuses when they are used |
//! | `STANDIN_SLOW`, `STANDIN_INEXACT`, `STANDIN_INEXACT_SUMS` | which of these take a tenth of a second, which give other bits, and which only if something is added: the sum of 1 for the first, 2 for the second, 4 for the third |
//! | `STANDIN_REDUCTIONS` | 0: cuBLASLt knows no algorithm with split-K |
//! | `STANDIN_FAULT` | the number of the kernel launch, counted from 1, that causes a fault |
//! | `STANDIN_LAUNCHED` | a file to which the names of all kernels whose PTX has run are appended |

use std::fmt::Display;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

/// For each library: its file, its soname, and the sources or libraries that it is built from. cuBLASLt needs the
/// driver. NVRTC is in a folder of its own, because NVIDIA's may be used instead.
const LIBRARIES: [(&str, &str, &[&str]); 3] = [
    (
        "libcuda.so",
        "libcuda.so.1",
        &[
            "device.cpp",
            "driver.cpp",
            "native.cpp",
            "ptx/parse.cpp",
            "ptx/instructions.cpp",
            "ptx/fuse.cpp",
            "ptx/memory.cpp",
            "ptx/run.cpp",
        ],
    ),
    ("compiler/libnvrtc.so", "libnvrtc.so.13", &["compiler.cpp"]),
    ("libcublasLt.so", "libcublasLt.so.13", &["blas.cpp", "libcuda.so"]),
];
/// The newest NVRTC whose PTX has been tried: a later one may use instructions that are not supported here.
const NEWEST_NVRTC: (i32, i32) = (13, 5);
/// A compute capability, 9.9, that no NVRTC knows, so that PTX is made, for 9.0.
const FUTURE: &str = "99";

/// The libraries, compiled.
#[derive(Clone, Debug)]
pub struct Standin {
    folder: PathBuf,
    /// Whether kernels are compiled to PTX, by NVIDIA's NVRTC.
    ptx: bool,
}

impl Standin {
    /// Compiles them at the first call. Without a C++ compiler, and on systems other than Linux, says that the test is
    /// skipped and returns `None`; returns `None` silently if `BIFORMER_TEST_GPU` asks for a real GPU. Panics where
    /// `REQUIRE_EMULATED` is set, as in CI, and there is no compiler.
    pub fn compiled() -> Option<&'static Self> {
        static ONE: OnceLock<Option<Standin>> = OnceLock::new();
        ONE.get_or_init(|| {
            if env::var_os("BIFORMER_TEST_GPU").is_some() {
                return None;
            }
            if !cfg!(target_os = "linux") {
                skipped("the libraries that stand in for CUDA's need Linux");
                return None;
            }
            if !compiler().arg("--version").output().is_ok_and(|output| output.status.success()) {
                assert!(env::var_os("REQUIRE_EMULATED").is_none(), "there is no C++ compiler");
                skipped("there is no C++ compiler");
                return None;
            }
            Some(Self { folder: compile(), ptx: false })
        })
        .as_ref()
    }

    /// The same, except that NVRTC is NVIDIA's own, which makes PTX for this GPU. `version` is its version. Without
    /// NVRTC, or with one newer than those that have been tried, says that the test is skipped and returns `None`;
    /// panics instead if `REQUIRE_NVRTC` is set, as in CI.
    pub fn in_ptx<E: Display>(version: Result<(i32, i32), E>) -> Option<Self> {
        let standin = Self::compiled()?;
        let why = match version {
            Ok(version) if version <= NEWEST_NVRTC => return Some(Self { ptx: true, ..standin.clone() }),
            Ok((major, minor)) => {
                format!("the PTX of NVRTC {major}.{minor} may have instructions that are not supported here")
            }
            Err(error) => error.to_string(),
        };
        assert!(env::var_os("REQUIRE_NVRTC").is_none(), "{why}");
        skipped(why);
        None
    }

    /// Lets a program find these libraries where it would look for CUDA's, and keep what they compile apart from the
    /// kernels of a GPU. PTX is NVRTC's own.
    pub fn under<'c>(&self, program: &'c mut Command) -> &'c mut Command {
        let others = env::var_os("LD_LIBRARY_PATH");
        let compiler = (!self.ptx).then(|| self.folder.join("compiler"));
        let folders = [self.folder.clone()].into_iter().chain(compiler);
        let folders = folders.chain(others.iter().flat_map(env::split_paths));
        if self.ptx {
            program.env("STANDIN_CAPABILITY", FUTURE);
        } else {
            program.env("BIFORMER_CACHE", self.kernels());
        }
        program
            .env("LD_LIBRARY_PATH", env::join_paths(folders).expect("folders that came from a path"))
            .env_remove("BIFORMER_CUDA")
    }

    /// The file of a library, `libcuda.so` for instance.
    pub fn library(&self, file: &str) -> PathBuf {
        let library = LIBRARIES.iter().find(|(path, ..)| path.ends_with(file)).expect("a library that there is");
        self.folder.join(library.0)
    }

    /// The folder in which kernels that the stand-in compiled once are kept.
    pub fn kernels(&self) -> PathBuf {
        self.folder.join("kernels")
    }

    /// Runs tests of this test's own program again, in a process with the stand-in GPU: those whose names contain one
    /// of these words, or all, but none of those that need the emulated device. Returns their output. Panics if one
    /// fails.
    pub fn repeat(&self, words: &[&str], settings: &[(&str, &str)]) -> String {
        let mut program = Command::new(env::current_exe().expect("a test is a program"));
        program.args(words).args(["--skip", "emulated"]).env("BIFORMER_TEST_GPU", "1");
        let ran = self.under(&mut program).envs(settings.iter().copied()).output().expect("it ran just now");
        let [out, err] = [&ran.stdout, &ran.stderr].map(|said| String::from_utf8_lossy(said));
        assert!(ran.status.success(), "with {settings:?}, {}:\n{out}{err}", ran.status);
        let none = words.iter().find(|&&word| !out.contains(word));
        assert!(none.is_none() && !out.contains("running 0 tests"), "no test is called {none:?}");
        format!("{out}{err}")
    }

    /// The same in each order of execution that `STANDIN_EAGER` knows: when requests are done as late as can be, and
    /// where one of the streams is ahead of the others.
    pub fn repeat_in_each_order(&self, words: &[&str], settings: &[(&str, &str)]) {
        for eager in ["0", "1", "2", "3"] {
            self.repeat(words, &[settings, &[("STANDIN_EAGER", eager)]].concat());
        }
    }
}

/// A command that runs tests of this test's own program again, in a process in which the kernels of the emulated device
/// are compiled with sanitizers: memory errors and undefined behaviour end it. If the compiler has no sanitizers, says
/// so and returns `None`; panics instead if `REQUIRE_EMULATED` is set, as in CI.
pub fn sanitized(words: &[&str]) -> Option<Command> {
    let library = compiler().arg("-print-file-name=libasan.so").output();
    let library = library.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    if !Path::new(&library).is_absolute() {
        assert!(env::var_os("REQUIRE_EMULATED").is_none(), "the compiler has no address sanitizer");
        skipped("the compiler has no address sanitizer");
        return None;
    }
    let test = env::current_exe().expect("a test is a program");
    // Older sanitizers occasionally hang if address space randomisation uses many bits, so it is switched off.
    let steady = ["setarch", env::consts::ARCH, "-R"];
    let in_order = |program: &str| {
        let mut command = Command::new(steady[0]);
        command.args(&steady[1..]).arg(program);
        command
    };
    let can = in_order("true").output().is_ok_and(|output| output.status.success());
    let mut program = if can { in_order(&test.to_string_lossy()) } else { Command::new(&test) };
    program
        .args(words)
        .env_remove("BIFORMER_TEST_GPU")
        .env("LD_PRELOAD", library)
        .env("ASAN_OPTIONS", "detect_leaks=0")
        // To optimise further what sanitizers have added takes minutes, and saves seconds.
        .env("BIFORMER_EMULATED_OPTIONS", "-Og -fsanitize=address,undefined -fno-sanitize-recover=all");
    Some(program)
}

/// Says why tests are skipped, on standard error itself: the output of `eprintln` is not shown for tests that pass.
pub fn skipped(why: impl Display) {
    let _ = writeln!(io::stderr(), "skipped: {why}");
}

/// The system's C++ compiler, or the one that `CXX` names, which may be several words: `ccache g++`.
fn compiler() -> Command {
    let named = env::var("CXX").unwrap_or_default();
    let mut words = named.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("c++"));
    command.args(words);
    command
}

/// Compiles the libraries beside this program, unless they are there.
fn compile() -> PathBuf {
    // PTX is interpreted with vector code, compiled for this processor; products must be rounded before they are added.
    let native: &[&str] = if cfg!(target_arch = "x86_64") { &["-march=native"] } else { &[] };
    let options = [&["-std=c++17", "-O3", "-ffp-contract=off", "-fno-strict-aliasing"], native].concat();
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = cpu.lines().find(|line| line.starts_with("flags"));
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tensor/src/cuda/emulated");
    let mut hasher = DefaultHasher::new();
    for folder in [&sources, &sources.join("ptx"), &headers] {
        contents(folder).hash(&mut hasher);
    }
    (LIBRARIES, format!("{:?}", compiler()), &options, processor, &headers).hash(&mut hasher);
    let program = env::current_exe().expect("a test is a program");
    let folder = program.with_file_name(format!("in-the-role-of-cuda-{:016x}", hasher.finish()));
    if folder.is_dir() {
        return folder;
    }
    // Atomically: other programs may be building the same libraries.
    let work = folder.with_extension(std::process::id().to_string());
    fs::create_dir_all(work.join("compiler")).expect("a folder for the libraries");
    for (library, name, parts) in LIBRARIES {
        let place = |part: &&str| if part.ends_with(".so") { work.join(part) } else { sources.join(part) };
        let output = compiler()
            .args(&options)
            .args(["-fPIC", "-shared", "-Wall", "-Wextra"])
            .arg(format!("-Wl,-soname,{name}"))
            .arg(format!("-DEMULATED_HEADERS=\"{}\"", headers.display()))
            .args(parts.iter().map(place))
            .arg("-o")
            .arg(work.join(library))
            .args(["-ldl", "-lpthread"])
            .output()
            .expect("the compiler ran just now");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    if fs::rename(&work, &folder).is_err() {
        let _ = fs::remove_dir_all(&work); // somebody else was faster
    }
    folder
}

/// What the C++ files in a folder hold, in the order of their names.
fn contents(folder: &Path) -> Vec<Vec<u8>> {
    let files = fs::read_dir(folder).expect("the sources that this was compiled from");
    let mut files: Vec<PathBuf> = files.map(|file| file.expect("a file's name").path()).collect();
    files.retain(|file| file.extension().is_some_and(|end| end == "cpp" || end == "h"));
    files.sort();
    files.iter().map(|file| fs::read(file).expect("a source file")).collect()
}
