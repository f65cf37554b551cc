//! How many instructions the main kernels take, compared with recorded counts: unlike times, these do not change on a
//! busy machine, so a slowdown shows in the change that causes it.
//!
//! `cargo bench --bench instructions` runs the kernels under valgrind and fails where one takes over 10 % more than
//! `benches/instructions/recorded.json` says. `UPDATE=1 cargo bench --bench instructions` writes that file. Valgrind
//! knows no AVX-512: what is counted is the path for AVX2.
//!
//! Where there is no valgrind it says so and succeeds, unless REQUIRE_VALGRIND is set.

mod kernels;

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A kernel may take this many times the recorded instructions.
const TOLERANCE: f64 = 1.10;
/// The argument with which this program runs the kernels.
const KERNELS: &str = "run-the-kernels";
/// The instruction set that valgrind offers.
const ISA: &str = "avx2";

#[derive(Debug, Deserialize, Serialize)]
struct Counts {
    /// The compiler's version: counts are comparable only between builds of the same compiler.
    rustc: String,
    /// Instructions by kernel.
    instructions: BTreeMap<String, u64>,
}

fn main() -> ExitCode {
    if env::args().any(|argument| argument == KERNELS) {
        kernels::run();
        return ExitCode::SUCCESS;
    }
    match check() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Counts, and compares or records. Whether all is well.
fn check() -> Result<bool> {
    if !cfg!(target_arch = "x86_64") {
        println!("Skipped: the recorded instructions are those of x86-64 with AVX2.");
        return Ok(true);
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        let required = env::var_os("REQUIRE_VALGRIND").is_some();
        println!("{} valgrind is not installed.", if required { "REQUIRE_VALGRIND is set, and" } else { "Skipped:" });
        return Ok(!required);
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/instructions/recorded.json");
    let now = Counts { rustc: rustc()?, instructions: count()? };
    if env::var_os("UPDATE").is_some() {
        fs::write(&file, serde_json::to_string_pretty(&now)? + "\n")?;
        println!("{} kernels recorded in {}.", now.instructions.len(), file.display());
        return Ok(true);
    }
    let read = || -> Result<Counts> { Ok(serde_json::from_str(&fs::read_to_string(&file)?)?) };
    let recorded = read().map_err(|error| format!("{}: {error} (UPDATE=1 writes it anew)", file.display()))?;
    let well = compare(&recorded.instructions, &now.instructions);
    if recorded.rustc != now.rustc {
        println!(
            "This is {}, but the counts were recorded with {}: they are compared for information only.",
            now.rustc, recorded.rustc
        );
        return Ok(true);
    }
    Ok(well)
}

/// Prints the counts side by side. Returns whether all kernels are recorded and none takes too many instructions.
fn compare(recorded: &BTreeMap<String, u64>, now: &BTreeMap<String, u64>) -> bool {
    println!("Instructions with one thread and {ISA} (valgrind has no AVX-512):\n");
    println!("{:<32} {:>12} {:>12} {:>9}", "kernel", "recorded", "now", "change");
    let mut well = true;
    for (name, &count) in now {
        let Some(&before) = recorded.get(name) else {
            println!("{name:<32} {:>12} {count:>12} {:>9}  not recorded", "", "");
            well = false;
            continue;
        };
        let ratio = count as f64 / before as f64;
        let verdict = match ratio {
            _ if ratio > TOLERANCE => "  slower",
            _ if ratio < 1.0 / TOLERANCE => "  faster",
            _ => "",
        };
        well &= ratio <= TOLERANCE;
        // Rounded here, so that what is next to nothing does not show as -0.0.
        let change = (1e3 * (ratio - 1.0)).round() / 10.0 + 0.0;
        println!("{name:<32} {before:>12} {count:>12} {change:>+7.1} %{verdict}");
    }
    for name in recorded.keys().filter(|&name| !now.contains_key(name)) {
        println!("{name:<32} is recorded, but was not measured");
        well = false;
    }
    let verdict =
        if well { "No kernel takes over" } else { "The recorded kernels are others, or some kernel takes over" };
    println!("\n{verdict} 10 % more instructions than recorded. To record: UPDATE=1 cargo bench --bench instructions");
    well
}

/// Runs the kernels under callgrind: it counts inside of `counted` alone, and writes a file each time that returns.
fn count() -> Result<BTreeMap<String, u64>> {
    let folder = Scratch::new()?;
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--quiet"]);
    // By its full name: the second option takes no pattern.
    const COUNTED: &str = "instructions::kernels::counted";
    valgrind.args([format!("--toggle-collect={COUNTED}"), format!("--dump-after={COUNTED}")]);
    valgrind.arg(format!("--callgrind-out-file={}", folder.0.join("out").display()));
    let ran = valgrind.arg(env::current_exe()?).arg(KERNELS).stderr(Stdio::inherit()).output()?;
    if !ran.status.success() {
        return Err(format!("valgrind ended with {}", ran.status).into());
    }
    let said = String::from_utf8(ran.stdout)?;
    let (isa, names) = said.split_once('\n').ok_or("the kernels said nothing")?;
    if isa != ISA {
        return Err(format!("under valgrind this machine uses {isa}, but the recorded counts are for {ISA}").into());
    }
    let total = |(index, name): (usize, &str)| {
        let path = folder.0.join(format!("out.{}", index + 1));
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let total = text.lines().find_map(|line| line.strip_prefix("totals: ")).ok_or("a file without totals")?;
        Ok((name.to_owned(), total.trim().parse()?))
    };
    names.lines().enumerate().map(total).collect()
}

/// The compiler that cargo takes here.
fn rustc() -> Result<String> {
    let program = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let said = Command::new(program).arg("--version").current_dir(env!("CARGO_MANIFEST_DIR")).output()?;
    Ok(String::from_utf8(said.stdout)?.trim().to_owned())
}

/// A folder for callgrind's files that goes when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let path = env::temp_dir().join(format!("biformer-instructions-{}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is left to the system's own cleaning.
        let _ = fs::remove_dir_all(&self.0);
    }
}
