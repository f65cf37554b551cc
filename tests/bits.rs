//! The bits of short training runs, as they were recorded: the same on every machine with an instruction set, whatever
//! its system. Who changes how something is rounded records them anew: `UPDATE=1 cargo test --release --test bits`
//! writes `tests/fixtures/bits.txt`. The lines of instruction sets that the machine lacks stay as they are, and may
//! then be wrong.

mod common;

use biformer::tensor::cpu::isa::Isa;
use common::program::{Ran, command, fresh, text};
use common::samples;
use standin::skipped;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const RECORD: &str = "tests/fixtures/bits.txt";

/// Of everything that a run computes from its data and its seed: weights, moments, average, and what the epochs
/// reached.
fn bits(run: &Path) -> u64 {
    let checkpoint = fs::read(run.join("checkpoint.safetensors")).unwrap();
    // The header says where things are, the paths among them.
    let header = u64::from_le_bytes(checkpoint[..8].try_into().unwrap()) as usize;
    let metrics = fs::read(run.join("metrics.jsonl")).unwrap();
    // FNV-1a
    let hashed = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    checkpoint[8 + header..].iter().chain(&metrics).fold(0xcbf2_9ce4_8422_2325, hashed)
}

/// What the runs are called and asked for; this file configures a small model.
fn runs(config: &str) -> [(&'static str, Vec<&str>); 4] {
    let pieces = ["--batch-size", "80", "--epochs", "1", "--set", "depth=1,1,1", "schedule.warmup_epochs=1"];
    let family = ["--config", config, "--epochs", "1", "--set", "family=biformer_stl_nchw", "image_size=64"];
    let settings = "image_size=40 micro_batches=2 precision=bf16 recompute=block backbone_lr=0.5 layer_decay=0.9 \
        freeze=stages.0.0.mlp schedule.rule=timm schedule.warmup_epochs=1 augmentation.crop=padded \
        augmentation.fill=mean augmentation.filter=triangle augmentation.vertical_flip=0.5 \
        augmentation.erase_fill=noise augmentation.repeats=3 soft_routing=true auto_pad=true layer_scale=0.1 \
        topks=2,-1 depth=1,2 lce_kernel=3 n_win=3";
    [
        // Batches of the small model are computed whole, those of the larger one in pieces of a few images.
        ("whole", vec!["--config", config]),
        ("pieces", pieces.to_vec()),
        ("family", family.to_vec()),
        ("settings", ["--config", config, "--set"].into_iter().chain(settings.split_whitespace()).collect()),
    ]
}

#[test]
fn a_run_has_the_recorded_bits_on_every_instruction_set() {
    let folder = fresh("bits");
    let data = samples::cifar10(&folder.join("data"));
    let config = samples::config(
        &folder,
        "augmentation = { crop = \"resized\", rand_augment = 2, erase = 0.25, mixup = 0.8, cutmix = 1.0, balance = 0.5 }",
    );
    // NEON's registers act in pairs, and so add in the order of AVX2's.
    let isas = if cfg!(target_arch = "aarch64") {
        vec![(Isa::Portable, "avx2")]
    } else {
        vec![(Isa::Portable, "portable"), (Isa::Avx2, "avx2"), (Isa::Avx512, "avx512")]
    };
    let mut found = BTreeMap::new();
    for (isa, name) in isas {
        if isa > Isa::detected() {
            skipped(format!("this machine has no {name}"));
            continue;
        }
        for (kind, asked) in runs(text(&config)) {
            let run = folder.join(format!("{name}-{kind}"));
            let files = ["--data", text(&data), "--out", text(&run)];
            let mut train = command(&[&["train"], &asked[..], &files].concat());
            Ran::from(train.env("BIFORMER_ISA", isa.name()).output().unwrap()).ok();
            found.insert(format!("{name} {kind}"), format!("{:016x}", bits(&run)));
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(RECORD);
    let recorded = fs::read_to_string(&path).unwrap();
    let mut known: BTreeMap<&str, &str> = recorded.lines().filter_map(|line| line.rsplit_once(' ')).collect();
    if std::env::var_os("UPDATE").is_some() {
        known.extend(found.iter().map(|(run, bits)| (run.as_str(), bits.as_str())));
        let lines = known.iter().map(|(run, bits)| format!("{run} {bits}\n"));
        return fs::write(path, lines.collect::<String>()).unwrap();
    }
    for (run, bits) in &found {
        let known = known.get(run.as_str());
        assert_eq!(known, Some(&bits.as_str()), "{run} has other bits than in {RECORD}; UPDATE=1 records them");
    }
}
