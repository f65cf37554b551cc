//! Running the real program, and looking at what it leaves behind.

use biformer::model::TensorFile;
use biformer::trainer::checkpoint::Checkpoint;
use biformer::trainer::metrics::EpochMetrics;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// What a finished program said.
#[derive(Debug)]
pub struct Ran {
    /// Its exit status; none if a signal ended it.
    pub status: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// Runs the program to its end.
pub fn biformer(arguments: &[&str]) -> Ran {
    Ran::from(command(arguments).output().unwrap())
}

/// Runs the program to its end, in a shell that has set limits first: of files in blocks of 512 bytes, of memory in
/// KiB.
pub fn limited(limits: &str, arguments: &[&str]) -> Ran {
    Ran::from(limited_command(limits, arguments).output().unwrap())
}

/// The same, to be started.
pub fn limited_command(limits: &str, arguments: &[&str]) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{limits}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_biformer")]).args(arguments);
    without_wishes(&mut shell).stdout(Stdio::piped()).stderr(Stdio::piped());
    shell
}

/// Runs the program to its end, whose output nobody reads: as in `biformer info | head -0`.
pub fn unread(mut command: Command) -> Ran {
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    Ran::from(child.wait_with_output().unwrap())
}

/// What whoever runs the tests may wish of the program is not what they ask of it.
fn without_wishes(command: &mut Command) -> &mut Command {
    ["BIFORMER_ISA", "CLICOLOR_FORCE", "RAYON_NUM_THREADS"]
        .iter()
        .fold(command, |command, name| command.env_remove(name))
}

/// The program, to be started.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_biformer"));
    without_wishes(&mut command).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        // Tests that a script started in the background have Ctrl-C ignored, those that `nohup` started SIGHUP, and
        // with them what they start.
        let signals = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1];
        // SAFETY: `signal` may be called there.
        unsafe { command.pre_exec(move || Ok(signals.iter().for_each(|&it| _ = libc::signal(it, libc::SIG_DFL)))) };
    }
    command
}

/// Sends a running program a signal, by name.
#[cfg(unix)]
pub fn signal(child: &std::process::Child, name: &str) {
    let sent = Command::new("sh").arg("-c").arg(format!("kill -{name} {}", child.id())).status().unwrap();
    assert!(sent.success());
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { status: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}

impl Ran {
    /// Asserts that all went well.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.status, Some(0), "{self:?}");
        self
    }

    /// The notes of a run that was made longer, except for the one that says so of its learning rate.
    pub fn other_notes(&self) -> String {
        self.err.split_inclusive('\n').filter(|line| !line.starts_with("note: as in a run of ")).collect()
    }

    /// Asserts that it was refused as bad input is to be: exit status 2 and, after the notes of what was begun, one
    /// line, no longer than can be read, that says all of `parts`.
    #[track_caller]
    pub fn refused(self, parts: &[&str]) {
        assert_eq!(self.status, Some(2), "{self:?}");
        let lines: Vec<&str> = self.err.lines().skip_while(|line| line.starts_with("note: ")).collect();
        assert_eq!(lines.len(), 1, "not one line: {:?}", self.err);
        assert!(lines[0].starts_with("error: ") && lines[0].len() < 30_000, "{}", self.err);
        let said = with_slashes(lines[0]);
        for part in parts {
            assert!(said.contains(&with_slashes(part)), "nothing of {part:?} in: {}", self.err);
        }
        // For whoever runs the tests with --nocapture: they are to be read by people.
        print!("{}", self.err);
    }
}

/// An empty folder of this name, for a test to work in. It stays until the next run, to be looked at.
pub fn fresh(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if path.exists() {
        fs::remove_dir_all(&path).unwrap();
    }
    fs::create_dir_all(&path).unwrap();
    path
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A text with the paths in it as every system but Windows writes them.
pub fn with_slashes(text: &str) -> String {
    if cfg!(windows) { text.replace('\\', "/") } else { text.to_owned() }
}

/// Copies a folder with all that is in it.
pub fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let copy = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &copy);
        } else {
            fs::copy(entry.path(), copy).unwrap();
        }
    }
}

/// What a program printed as JSON.
pub fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The lines of a file, each of them JSON.
pub fn json_lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(json).collect()
}

/// All files in a folder, by name.
pub fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap_or_default()))
        .collect()
}

/// What must be the same for equal runs: the metrics, and the bits of every tensor of the last checkpoint and of the
/// best.
#[track_caller]
pub fn assert_same_run(what: &str, a: &Path, b: &Path) {
    let metrics = |run: &Path| fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert_eq!(metrics(a), metrics(b), "{what}: metrics");
    for name in ["checkpoint.safetensors", "best.safetensors"] {
        let tensors = |run: &Path| {
            let mut file = TensorFile::read(&run.join(name)).unwrap();
            // The configuration names the folder and the threads.
            file.metadata.clear();
            file.to_bytes().unwrap()
        };
        assert!(tensors(a) == tensors(b), "{what}: some tensor of {name} differs");
    }
}

/// The place in the run that a checkpoint was made at: epoch and batch.
pub fn place(run: &Path) -> Option<(u64, u64)> {
    let path = run.join("checkpoint.safetensors");
    let file = path.exists().then(|| TensorFile::read(&path).expect("a checkpoint is whole at every moment"))?;
    let progress = json(&file.metadata["progress"]);
    Some((progress["epochs"].as_array()?.len() as u64, progress["batch"].as_u64()?))
}

/// The metrics of the epochs that are done in a checkpoint.
pub fn epochs(checkpoint: &Path) -> Vec<EpochMetrics> {
    Checkpoint::read(checkpoint).unwrap().progress.epochs
}

/// Gives the epochs of a run's checkpoint other metrics, as if it had gone otherwise.
pub fn change_epochs(run: &Path, change: impl FnOnce(&mut [EpochMetrics])) {
    let path = run.join("checkpoint.safetensors");
    let mut checkpoint = Checkpoint::read(&path).unwrap();
    change(&mut checkpoint.progress.epochs);
    checkpoint.write(&path).unwrap();
}

/// Makes the first epoch of a run the best, all its images being right; the weights that are kept as its are the last
/// ones. Returns their file.
pub fn make_first_best(run: &Path) -> PathBuf {
    change_epochs(run, |epochs| epochs[0].test_accuracy = 1.0);
    let mut first = Checkpoint::read(&run.join("checkpoint.safetensors")).unwrap();
    first.progress.epochs.truncate(1);
    let best = run.join("best.safetensors");
    first.write(&best).unwrap();
    best
}
