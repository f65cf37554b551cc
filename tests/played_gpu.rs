//! The program on a GPU of NVIDIA's that is played: what it says where something is missing, and what it does when the GPU
//! fails.

mod common;

use common::program::{Ran, assert_same_run, command, fresh, text};
use common::samples;
use standin::Standin;
use std::fs;
use std::path::Path;

fn run(standin: &Standin, settings: &[(&str, &str)], arguments: &[&str]) -> Ran {
    let mut program = command(arguments);
    Ran::from(standin.under(&mut program).envs(settings.iter().copied()).output().unwrap())
}

#[test]
fn what_is_missing_is_said() {
    let Some(standin) = Standin::compiled() else { return };
    let listed = run(standin, &[("STANDIN_DEVICES", "2"), ("STANDIN_CAPABILITY", "89")], &["devices"]);
    assert!(listed.out.contains("cuda:1    GPU that is played, compute capability 8.9, 132 multi"), "{}", listed.out);
    for (settings, device, words) in [
        (("STANDIN_DEVICES", "0"), "cuda", "the NVIDIA driver is there, but no GPU is"),
        (("STANDIN_DEVICES", "2"), "cuda:3", "there is no GPU 3; there are 2, counted from 0"),
        (("STANDIN_CAPABILITY", "75"), "cuda", "has compute capability 7.5, and the kernels need 8.0"),
        (("STANDIN_DRIVER", "11020"), "cuda", "the NVIDIA driver is of CUDA 11.2, and 11.4 is the oldest that will do"),
        (("STANDIN_DRIVER", "12080"), "cuda", "NVRTC is of CUDA 13.0, and the driver knows CUDA up to 12.8: update the"),
        (("STANDIN_CUBLAS", "140100"), "cuda", "cuBLASLt is of CUDA 14.1, and the driver knows CUDA up to 13.0"),
        (("STANDIN_MEMORY", "1000000"), "cuda", "no room for cuBLASLt's workspace"),
    ] {
        let ran = run(standin, &[settings], &["bench", "--device", device, "--steps", "1"]);
        ran.refused(&[words]);
    }
}

#[test]
fn memory_that_runs_out_is_called_by_its_name() {
    let Some(standin) = Standin::compiled() else { return };
    let bench = ["bench", "--device", "cuda", "--batch-size", "8", "--steps", "1"];
    run(standin, &[("STANDIN_MEMORY", "60000000")], &bench).refused(&["memory", "--batch-size"]);
}

/// A small run on the played GPU.
fn train(standin: &Standin, folder: &Path, out: &str, settings: &[(&str, &str)], more: &[&str]) -> Ran {
    let (config, data, out) = (folder.join("small.toml"), folder.join("data"), folder.join(out));
    let arguments = ["train", "--config", text(&config), "--data", text(&data), "--out", text(&out)];
    let settings = [&[("STANDIN_MULTIPROCESSORS", "1")], settings].concat();
    run(standin, &settings, &[&arguments[..], &["--device", "cuda", "--epochs", "2"], more].concat())
}

#[test]
fn a_run_outlives_a_gpu_that_fails_and_a_damaged_cache_of_kernels() {
    let Some(standin) = Standin::compiled() else { return };
    let folder = fresh("played-gpu");
    samples::cifar10(&folder.join("data"));
    fs::rename(samples::config(&folder, ""), folder.join("small.toml")).unwrap();
    train(standin, &folder, "whole", &[], &[]).ok();
    // A kernel of the second epoch.
    let failed = train(standin, &folder, "parts", &[("STANDIN_FAULT", "2000")], &[]);
    assert!(failed.status == Some(2) && failed.err.contains("epoch 2") && failed.err.contains("launch failure"), "{failed:?}");
    assert!(!failed.err.contains("panicked"), "{}", failed.err);
    let kernels = folder.join("kernels");
    let cache = [("BIFORMER_CACHE", text(&kernels))];
    train(standin, &folder, "parts", &cache, &["--resume"]).ok();
    assert_same_run("after a fault", &folder.join("whole"), &folder.join("parts"));

    let files: Vec<_> = fs::read_dir(&kernels).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(!files.is_empty());
    for (number, file) in files.iter().enumerate() {
        let bytes = fs::read(file).unwrap();
        // Cut off, changed, empty.
        let damaged = match number % 3 {
            0 => bytes[..bytes.len() / 2].to_vec(),
            1 => bytes.iter().enumerate().map(|(i, byte)| byte ^ u8::from(i == bytes.len() / 2)).collect(),
            _ => vec![],
        };
        fs::write(file, damaged).unwrap();
    }
    train(standin, &folder, "again", &cache, &[]).ok();
    assert_same_run("from damaged kernels", &folder.join("whole"), &folder.join("again"));
}
