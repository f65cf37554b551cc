//! Every CUDA kernel, compiled for every generation of GPUs without one, and held against what it may take of a
//! multiprocessor: `tests/kernels.txt`. `UPDATE=1 cargo test --release --test kernels` writes that file anew.
//!
//! It needs NVRTC 13.0 (`pip install nvidia-cuda-nvrtc==13.0.88` in a virtual environment that is active). Where there
//! is none it says that it is skipped; in CI it may not be (`REQUIRE_NVRTC`).

use rayon::prelude::*;
use standin::skipped;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use tensor::cuda::Module;
use tensor::cuda::nvidia::compiler::{cached, compile, version};

const RECORD: &str = "tests/kernels.txt";
/// The release whose figures are recorded: another one allots registers in another way.
const RELEASE: (i32, i32) = (13, 0);
/// The generations, and the most shared memory that a block of theirs can declare.
const GENERATIONS: [(u32, u32); 4] = [(8, 0), (8, 6), (8, 9), (9, 0)];
const MAX_DECLARED: u32 = 48 << 10;
/// A generation that NVRTC does not know: it makes no machine code for it, which takes the most time, but PTX.
const AS_PTX: (u32, u32) = (9, 9);

/// What the compiler says of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Resources {
    registers: u32,
    /// Bytes of registers that were moved to memory.
    spilled: u32,
    /// Bytes of shared memory that it declares.
    shared: u32,
}

fn modules() -> Vec<&'static Module> {
    ops::registry::kernels().chain([&optim::cuda::KERNELS]).collect()
}

/// The number before a phrase.
fn number_before(line: &str, phrase: &str) -> Option<u32> {
    line[..line.find(phrase)?].split_whitespace().next_back()?.parse().ok()
}

/// The kernels of a module by instance, from the compiler's log.
fn resources(module: &Module, capability: (u32, u32)) -> Vec<(String, Resources)> {
    let compiled = compile(module, capability).unwrap();
    let mut of_symbol: BTreeMap<&str, Resources> = BTreeMap::new();
    let mut current = "";
    for line in compiled.log.lines() {
        if let Some((_, symbol)) = line.split_once("Function properties for ") {
            current = symbol.trim();
        }
        let entry = of_symbol.entry(current).or_default();
        let stores = number_before(line, " bytes spill stores").unwrap_or(0);
        entry.spilled += stores + number_before(line, " bytes spill loads").unwrap_or(0);
        entry.registers = entry.registers.max(number_before(line, " registers").unwrap_or(0));
        entry.shared = entry.shared.max(number_before(line, " bytes smem").unwrap_or(0));
    }
    let found = |symbol: &String| of_symbol.get(symbol.as_str()).copied().filter(|found| found.registers > 0);
    let of = |symbol: &String| found(symbol).unwrap_or_else(|| panic!("the compiler says nothing of {symbol}"));
    module.instances().into_iter().zip(compiled.symbols.iter().map(of)).collect()
}

/// A line for each kernel: its largest figures over the generations.
fn table() -> BTreeMap<String, Resources> {
    let work: Vec<(&Module, (u32, u32))> =
        modules().into_iter().flat_map(|module| GENERATIONS.map(|capability| (module, capability))).collect();
    let found: Vec<Vec<(String, Resources)>> = work
        .par_iter()
        .map(|&(module, capability)| {
            let name = |(kernel, resources)| (format!("{} {kernel}", module.name), resources);
            resources(module, capability).into_iter().map(name).collect()
        })
        .collect();
    let mut table: BTreeMap<String, Resources> = BTreeMap::new();
    for (name, resources) in found.into_iter().flatten() {
        let most = table.entry(name).or_default();
        most.registers = most.registers.max(resources.registers);
        most.spilled = most.spilled.max(resources.spilled);
        most.shared = most.shared.max(resources.shared);
    }
    table
}

fn parse(text: &str) -> BTreeMap<String, Resources> {
    let line = |line: &str| {
        let (name, figures) = line.split_at(64);
        let name = name.trim_end();
        let figures: Vec<u32> = figures.split_whitespace().map(|figure| figure.parse().unwrap()).collect();
        let [registers, spilled, shared] = figures[..] else { panic!("{RECORD}: {line}") };
        (name.to_owned(), Resources { registers, spilled, shared })
    };
    text.lines().filter(|line| !line.starts_with('#')).map(line).collect()
}

#[test]
fn every_kernel_compiles_for_every_generation_within_its_limits() {
    let release = match version() {
        Ok(release) => release,
        Err(error) if std::env::var_os("REQUIRE_NVRTC").is_none() => return skipped(error),
        Err(error) => panic!("{error}"),
    };
    let update = std::env::var_os("UPDATE").is_some();
    assert!(!update || release == RELEASE, "{RECORD} is what NVRTC {RELEASE:?} reports, and this is {release:?}");
    assert!(
        release == RELEASE || std::env::var_os("REQUIRE_NVRTC").is_none(),
        "{RECORD} is of NVRTC {RELEASE:?}, and this is {release:?}: record its figures"
    );
    if release != RELEASE {
        skipped(format!("{RECORD} is of NVRTC {RELEASE:?}, and this is {release:?}: kernels are only compiled"));
    }
    let table = table();
    if update {
        let mut text = String::from("# module kernel  registers  bytes spilled  bytes of shared memory declared\n");
        for (name, Resources { registers, spilled, shared }) in &table {
            writeln!(text, "{name:<64}  {registers:>3}  {spilled:>5}  {shared:>6}").unwrap();
        }
        std::fs::write(RECORD, text).unwrap();
    }
    let recorded = parse(&std::fs::read_to_string(RECORD).unwrap());
    let mut failures = vec![];
    for (name, now) in &table {
        if now.shared > MAX_DECLARED {
            failures.push(format!("{name}: declares {} bytes of shared memory", now.shared));
        }
        if release != RELEASE {
            continue;
        }
        match recorded.get(name) {
            None => failures.push(format!("{name} is not in {RECORD}; UPDATE=1 puts it there")),
            Some(most) if now.registers > most.registers || now.spilled > most.spilled || now.shared > most.shared => {
                failures.push(format!("{name} takes more than recorded: {now:?}, {most:?}"));
            }
            Some(_) => {}
        }
    }
    let gone: Vec<&String> = recorded.keys().filter(|name| !table.contains_key(*name)).collect();
    assert!(gone.is_empty(), "{RECORD} has kernels that are gone: {gone:?}");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// After all other tests: what their GPUs ran in PTX (`STANDIN_LAUNCHED` names the file that took the names) is every
/// kernel.
#[test]
#[ignore = "comes after all others"]
fn every_kernel_has_run() {
    let record = std::env::var("STANDIN_LAUNCHED").expect("STANDIN_LAUNCHED, the file that the other tests had");
    let record = std::fs::read_to_string(record).unwrap();
    let ran: BTreeSet<&str> = record.lines().collect();
    let missing: Vec<String> = modules()
        .into_par_iter()
        .flat_map_iter(|module| {
            let symbols = cached(module, AS_PTX).unwrap().symbols;
            let instances = module.instances().into_iter().zip(symbols);
            let unseen = instances.filter(|(_, symbol)| !ran.contains(symbol.as_str()));
            unseen.map(|(kernel, _)| format!("{} {kernel}", module.name))
        })
        .collect();
    assert!(missing.is_empty(), "no test runs {missing:#?}");
}

/// Compiles for GPUs of the capability that `CAPABILITY` names, 9.0 for instance, and leaves the machine code in the
/// cache: `benches/gpu/build.sh` takes it to a machine whose time is dear.
#[test]
#[ignore = "no check"]
fn the_cache_is_filled() {
    let (major, minor) = version().expect("an NVRTC to compile with");
    println!("compiled by NVRTC {major}.{minor}: one of another release will compile again");
    let capability = std::env::var("CAPABILITY").expect("CAPABILITY");
    let (major, minor) = capability.split_once('.').expect("CAPABILITY: expected 9.0, for instance");
    let capability = (major.parse().unwrap(), minor.parse().unwrap());
    modules().par_iter().for_each(|module| drop(cached(module, capability).unwrap()));
}
