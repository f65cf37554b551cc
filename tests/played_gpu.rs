//! The program on a GPU of NVIDIA's that is played: what it says where something is missing, and what it does when the GPU
//! fails.

mod common;

use common::program::{Ran, assert_same_run, command, fresh, text};
use common::samples;
use standin::Standin;
use std::fs;
use std::path::{Path, PathBuf};

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
        (
            ("STANDIN_DRIVER", "12080"),
            "cuda",
            "NVRTC is of CUDA 13.90, and the driver knows CUDA up to 12.8: update the",
        ),
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

/// The folder of a run that nothing disturbed, in it `whole`, and what it learned from.
fn whole(standin: &Standin, name: &str) -> PathBuf {
    let folder = fresh(name);
    samples::cifar10(&folder.join("data"));
    fs::rename(samples::config(&folder, ""), folder.join("small.toml")).unwrap();
    train(standin, &folder, "whole", &[], &[]).ok();
    folder
}

#[test]
fn a_run_goes_on_after_its_gpu_has_failed() {
    let Some(standin) = Standin::compiled() else { return };
    let folder = whole(standin, "played-gpu-fails");
    // In the second epoch.
    let failed = train(standin, &folder, "parts", &[("STANDIN_FAULT", "2000")], &[]);
    failed.refused(&["epoch 2", "unspecified launch failure; what was saved before is unharmed: go on with --resume"]);
    train(standin, &folder, "parts", &[], &["--resume"]).ok();
    assert_same_run("after a fault", &folder.join("whole"), &folder.join("parts"));
}

#[test]
fn damaged_kernels_are_compiled_anew() {
    let Some(standin) = Standin::compiled() else { return };
    let folder = whole(standin, "played-gpu-kernels");
    let kernels = folder.join("kernels");
    fs::create_dir(&kernels).unwrap();
    let small = ["add-", "scale-", "drop_path-"];
    let mut damaged = vec![];
    for entry in fs::read_dir(standin.kernels()).unwrap().map(Result::unwrap) {
        let (name, mut bytes) = (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
        let copy = kernels.join(&name);
        if let Some(number) = small.iter().position(|start| name.starts_with(start)) {
            // Cut off, changed, empty.
            match number {
                0 => bytes.truncate(bytes.len() / 2),
                1 => bytes[100] ^= 1,
                _ => bytes.clear(),
            }
            damaged.push((copy.clone(), bytes.clone()));
        }
        fs::write(copy, bytes).unwrap();
    }
    assert_eq!(damaged.len(), small.len());
    train(standin, &folder, "again", &[("BIFORMER_CACHE", text(&kernels))], &[]).ok();
    assert_same_run("from damaged kernels", &folder.join("whole"), &folder.join("again"));
    for (copy, bytes) in damaged {
        assert_ne!(fs::read(&copy).unwrap(), bytes, "{} is whole again", copy.display());
    }
}
