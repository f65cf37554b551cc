//! Libraries that stand in for CUDA's: the driver, NVRTC and cuBLASLt, of a GPU that is played. With them the host's side of
//! a GPU runs on a machine without one: each call that `tensor::cuda::nvidia` makes, in the order in which it makes them, by
//! the rules of their manuals, and as unkindly as those allow.
//!
//! | file | what it holds |
//! |---|---|
//! | `device.h`, `.cpp` | the device: memory, and streams, which do what they are asked for as late as they may |
//! | `driver.cpp` | `libcuda.so`: contexts, memory, events, kernels, graphs |
//! | `code.h` | kernels, as the driver has them once they are loaded: |
//! | `native.cpp` | those that `libnvrtc.so` has made |
//! | `ptx/` | those that NVIDIA's own NVRTC has made, instruction by instruction |
//! | `compiler.cpp` | `libnvrtc.so`: kernels are compiled by the system's C++ compiler, as those of the emulated device are |
//! | `blas.cpp` | `libcublasLt.so`: products by columns, from layouts, epilogues and plans |
//!
//! The emulated device does not do this: it takes the place of all that lies behind `tensor::cuda::Driver`.
//!
//! Variables say what GPU is played:
//!
//! | variable | what it says |
//! |---|---|
//! | `STANDIN_EAGER` | 1: of the two streams that a program makes the first is ahead, 2: the second; otherwise nothing is done before somebody waits for it |
//! | `STANDIN_DEVICES` | how many GPUs there are |
//! | `STANDIN_CAPABILITY` | 90 for 9.0 |
//! | `STANDIN_MULTIPROCESSORS`, `STANDIN_MEMORY` | how many, and how many bytes |
//! | `STANDIN_DRIVER`, `STANDIN_NVRTC`, `STANDIN_CUBLAS` | versions, as each library numbers them |
//! | `STANDIN_ENDINGS` | 0: cuBLASLt refuses to do anything besides a product; 2: only when it comes to it; 3: says that it would be slow |
//! | `STANDIN_WAVES` | which percentage of the GPU cuBLASLt says that it keeps busy with one product |
//! | `STANDIN_REFUSED` | how many of the three algorithms that it knows for a product cuBLASLt refuses when it comes to it |
//! | `STANDIN_REDUCTIONS` | 0: cuBLASLt knows no algorithm that may add up parts |
//! | `STANDIN_FAULT` | which of all kernels, counted from 1, does what it must not |
//! | `STANDIN_LAUNCHED` | a file that is to take the names of all kernels whose PTX has run |

use std::fmt::Display;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

/// What there is of each library: its file, the name by which others need it, and what it is made of. cuBLASLt needs the
/// driver. NVRTC is apart, as there is another one.
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
            "ptx/memory.cpp",
            "ptx/run.cpp",
        ],
    ),
    ("compiler/libnvrtc.so", "libnvrtc.so.13", &["compiler.cpp"]),
    ("libcublasLt.so", "libcublasLt.so.13", &["blas.cpp", "libcuda.so"]),
];
/// What they depend on.
const SOURCES: [&str; 16] = [
    include_str!("device.cpp"),
    include_str!("driver.cpp"),
    include_str!("native.cpp"),
    include_str!("ptx/parse.cpp"),
    include_str!("ptx/instructions.cpp"),
    include_str!("ptx/memory.cpp"),
    include_str!("ptx/run.cpp"),
    include_str!("compiler.cpp"),
    include_str!("blas.cpp"),
    include_str!("device.h"),
    include_str!("code.h"),
    include_str!("ptx/ptx.h"),
    include_str!("ptx/reader.h"),
    include_str!("ptx/traces.h"),
    include_str!("../../tensor/src/cuda/emulated/device.h"),
    include_str!("../../tensor/src/cuda/emulated/instructions.h"),
];
/// The newest NVRTC whose PTX has been tried: the next one may have instructions that are not known here.
const NEWEST_NVRTC: (i32, i32) = (13, 5);
/// A generation of GPUs, 9.9, that no NVRTC knows: it makes PTX for the one before, 9.0.
const FUTURE: &str = "99";

/// The libraries, compiled.
#[derive(Clone, Debug)]
pub struct Standin {
    folder: PathBuf,
    /// Whether kernels are compiled to PTX, by NVIDIA's NVRTC.
    ptx: bool,
}

impl Standin {
    /// Compiles them, at the first call. Where that cannot be it says that the test is skipped, and gives none: without a C++
    /// compiler, on other systems than Linux, and where `BIFORMER_TEST_GPU` asks for a GPU that is not played. Panics where
    /// `REQUIRE_EMULATED` is set, as in CI, and there is no compiler.
    pub fn compiled() -> Option<&'static Self> {
        static ONE: OnceLock<Option<Standin>> = OnceLock::new();
        ONE.get_or_init(|| {
            if env::var_os("BIFORMER_TEST_GPU").is_some() {
                return None;
            }
            if !cfg!(target_os = "linux") {
                skipped("libraries in the role of CUDA's are for Linux");
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

    /// The same, but for NVRTC, which is NVIDIA's own and makes PTX for this GPU. `version` is what it says of itself; where there
    /// is none, or one that is newer than those that are known, that the test is skipped is said, and in CI
    /// (`REQUIRE_NVRTC`) it may not be.
    pub fn in_ptx<E: Display>(version: Result<(i32, i32), E>) -> Option<Self> {
        let standin = Self::compiled()?;
        let why = match version {
            Ok(version) if version <= NEWEST_NVRTC => return Some(Self { ptx: true, ..standin.clone() }),
            Ok((major, minor)) => format!("what NVRTC {major}.{minor} writes is perhaps not known here"),
            Err(error) => error.to_string(),
        };
        assert!(env::var_os("REQUIRE_NVRTC").is_none(), "{why}");
        skipped(why);
        None
    }

    /// Lets a program find these libraries where it would look for CUDA's, and keep its kernels apart from those of a GPU.
    pub fn under<'c>(&self, program: &'c mut Command) -> &'c mut Command {
        let others = env::var_os("LD_LIBRARY_PATH");
        let compiler = (!self.ptx).then(|| self.folder.join("compiler"));
        let folders = [self.folder.clone()].into_iter().chain(compiler);
        let folders = folders.chain(others.iter().flat_map(env::split_paths));
        if self.ptx {
            program.env("STANDIN_CAPABILITY", FUTURE);
        }
        program
            .env("LD_LIBRARY_PATH", env::join_paths(folders).expect("folders that came from a path"))
            .env("BIFORMER_CACHE", self.kernels())
            .env_remove("BIFORMER_CUDA")
    }

    /// The file of a library, `libcuda.so` for instance.
    pub fn library(&self, file: &str) -> PathBuf {
        let library = LIBRARIES.iter().find(|(path, ..)| path.ends_with(file)).expect("a library that there is");
        self.folder.join(library.0)
    }

    /// The folder in which kernels that were compiled once are kept.
    pub fn kernels(&self) -> PathBuf {
        self.folder.join(if self.ptx { "ptx" } else { "kernels" })
    }

    /// Runs tests of this test's own program once more, in a process whose GPU is played: those whose names have one of these
    /// words in them, or all, and none of those that only the emulated device can be asked. Gives what they said. Panics when
    /// one fails.
    pub fn repeat(&self, words: &[&str], settings: &[(&str, &str)]) -> String {
        let mut program = Command::new(env::current_exe().expect("a test is a program"));
        program.args(words).args(["--skip", "emulated"]).env("BIFORMER_TEST_GPU", "1");
        let ran = self.under(&mut program).envs(settings.iter().copied()).output().expect("it ran just now");
        let [out, err] = [&ran.stdout, &ran.stderr].map(|said| String::from_utf8_lossy(said));
        assert!(ran.status.success(), "with {settings:?}, {}:\n{out}{err}", ran.status);
        assert!(!out.contains("running 0 tests"), "no test is called {words:?}");
        format!("{out}{err}")
    }
}

/// Tests of this test's own program once more, to be run in a process in which the kernels of the emulated device are watched:
/// memory errors and undefined behaviour end it. None where the compiler has no sanitizers, which is said, and in CI
/// (`REQUIRE_EMULATED`) may not be.
pub fn sanitized(words: &[&str]) -> Option<Command> {
    let library = compiler().arg("-print-file-name=libasan.so").output();
    let library = library.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    if !Path::new(&library).is_absolute() {
        assert!(env::var_os("REQUIRE_EMULATED").is_none(), "the compiler has no address sanitizer");
        skipped("the compiler has no address sanitizer");
        return None;
    }
    let test = env::current_exe().expect("a test is a program");
    // Older sanitizers hang now and then where addresses are drawn from very many.
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
        .env("BIFORMER_EMULATED_OPTIONS", "-fsanitize=address,undefined -fno-sanitize-recover=all");
    Some(program)
}

/// Says why tests are skipped: also to those who do not hear what a test that passes says by `eprintln`.
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
    // PTX is run by vectors, which are to be those of this processor; products are to be rounded before they are added.
    let native: &[&str] = if cfg!(target_arch = "x86_64") { &["-march=native"] } else { &[] };
    let options = [&["-std=c++17", "-O3", "-ffp-contract=off", "-fno-strict-aliasing"], native].concat();
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = cpu.lines().find(|line| line.starts_with("flags"));
    let mut hasher = DefaultHasher::new();
    let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tensor/src/cuda/emulated");
    (LIBRARIES, SOURCES, format!("{:?}", compiler()), &options, processor, &headers).hash(&mut hasher);
    let program = env::current_exe().expect("a test is a program");
    let folder = program.with_file_name(format!("in-the-role-of-cuda-{:016x}", hasher.finish()));
    if folder.is_dir() {
        return folder;
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    // Whole or not at all: other programs may be at it.
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
