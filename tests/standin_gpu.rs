//! The program on the stand-in GPU: what it says where something is missing, and what it does when the GPU
//! fails.

mod common;

use common::program::{Ran, assert_same_run, command, fresh, json, text};
use common::samples;
use standin::Standin;
use std::fs;
use std::path::{Path, PathBuf};

fn run(standin: &Standin, settings: &[(&str, &str)], arguments: &[&str]) -> Ran {
    let mut program = command(arguments);
    Ran::from(standin.under(&mut program).envs(settings.iter().copied()).output().unwrap())
}

/// Training steps of a small model, one image each.
const BENCH: [&str; 11] = [
    "bench",
    "--device",
    "cuda",
    "--batch-size",
    "1",
    "--steps",
    "1",
    "--set",
    "depth=1,1,1",
    "--set",
    "embed_dim=24,48,96",
];

#[test]
fn what_is_missing_is_said() {
    let Some(standin) = Standin::compiled() else { return };
    let listed = run(standin, &[("STANDIN_DEVICES", "2"), ("STANDIN_CAPABILITY", "89")], &["devices"]);
    assert!(listed.out.contains("cuda:1    stand-in GPU, compute capability 8.9, 132 multi"), "{}", listed.out);
    for (settings, device, words) in [
        (("STANDIN_DEVICES", "0"), "cuda", "the NVIDIA driver is there, but no GPU is"),
        (("STANDIN_DEVICES", "2"), "cuda:3", "there is no GPU 3; there are 2, counted from 0"),
        (("STANDIN_CAPABILITY", "75"), "cuda", "has compute capability 7.5, and the kernels need 8.0"),
        (("STANDIN_DRIVER", "11020"), "cuda", "the NVIDIA driver is of CUDA 11.2, and 12.0 is the oldest that will do"),
        (
            ("STANDIN_DRIVER", "12080"),
            "cuda",
            "NVRTC is of CUDA 13.90, and the driver knows CUDA up to 12.8: update the",
        ),
        (("STANDIN_CUBLAS", "110000"), "cuda", "cuBLASLt is of CUDA 11.0, and 12.0 is the oldest that will do"),
        (("STANDIN_CUBLAS", "140100"), "cuda", "cuBLASLt is of CUDA 14.1, and the driver knows CUDA up to 13.0"),
        (
            ("STANDIN_MEMORY", "1000000"),
            "cuda",
            "no room on the GPU for cuBLASLt's workspace, 33 MB more; of its 1.0 MB",
        ),
    ] {
        let ran = run(standin, &[settings], &["bench", "--device", device, "--steps", "1"]);
        ran.refused(&[words]);
    }
}

/// With libraries in a folder that the user names, and the driver's where the system looks.
#[test]
fn the_libraries_that_are_named_are_used() {
    let Some(standin) = Standin::compiled() else { return };
    let folder = fresh("standin-gpu-libraries");
    let [driver, named] = ["driver", "named/lib64"].map(|name| folder.join(name));
    for (library, folder, name) in [
        ("libcuda.so", &driver, "libcuda.so"),
        ("libnvrtc.so", &named, "libnvrtc.so.13"),
        ("libcublasLt.so", &named, "libcublasLt.so.13"),
    ] {
        fs::create_dir_all(folder).unwrap();
        fs::copy(standin.library(library), folder.join(name)).unwrap();
    }
    // Another name of the same file, which the loader takes for the same library.
    fs::hard_link(named.join("libnvrtc.so.13"), named.join("libnvrtc-builtins.so.13.0")).unwrap();
    let bench = |found: &Path, named: &Path| {
        let settings =
            [("LD_LIBRARY_PATH", text(found)), ("BIFORMER_CUDA", text(named)), ("STANDIN_MULTIPROCESSORS", "1")];
        run(standin, &settings, &BENCH)
    };
    bench(&driver, &folder.join("named")).ok();
    bench(&driver, &named).ok();
    bench(&driver, &folder).refused(&["BIFORMER_CUDA names", "neither NVRTC nor cuBLASLt is there"]);
    // A toolkit's, without a version in its name, is what cudarc takes first.
    fs::copy(standin.library("libnvrtc.so"), driver.join("libnvrtc.so")).unwrap();
    bench(&driver, &named).refused(&["BIFORMER_CUDA names", "driver/libnvrtc.so first", "out of LD_LIBRARY_PATH"]);
    // What is not there cannot be meant.
    fs::remove_file(named.join("libnvrtc.so.13")).unwrap();
    bench(&driver, &named).ok();
    fs::write(named.join("libcublasLt.so.13"), "no library").unwrap();
    bench(&driver, &named).refused(&["whose cuBLASLt does not load:", "libcublasLt.so.13"]);
}

#[test]
fn memory_that_runs_out_is_called_by_its_name() {
    let Some(standin) = Standin::compiled() else { return };
    let bench = ["bench", "--device", "cuda", "--batch-size", "8", "--steps", "1"];
    run(standin, &[("STANDIN_MEMORY", "93500000")], &bench).refused(&["memory", "--batch-size"]);
}

#[test]
fn what_is_recommended_for_a_product_is_printed_if_asked_for() {
    let Some(standin) = Standin::compiled() else { return };
    let settings = [("BIFORMER_PLANS", "1"), ("STANDIN_MULTIPROCESSORS", "1")];
    let said = run(standin, &settings, &BENCH).ok().err;
    let plans: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("plan ")).collect();
    assert!(plans.len() > 10 && plans.iter().all(|plan| plan.contains(" by ") && plan.contains(" waves (")), "{said}");
    assert!(plans.iter().all(|plan| plan.contains(" µs)") && !plan.contains("refused")), "{said}");
    for added in [" f32: ", ", a row added: ", ", a matrix added: "] {
        assert!(plans.iter().any(|plan| plan.contains(added)), "{added}: {said}");
    }
}

/// A variable that makes a GPU do the same in another way: a step gives the same loss, to the bit, but where biases are
/// added after a product, whose result is rounded before that.
#[test]
fn what_a_variable_changes_is_no_result() {
    let Some(standin) = Standin::compiled() else { return };
    let loss = |variable: Option<&str>| {
        let settings: Vec<_> = variable.map(|variable| (variable, "1")).into_iter().collect();
        let ran = run(standin, &settings, &[&BENCH[..], &["--precision", "bf16", "--json"]].concat()).ok();
        let report = json(&ran.out);
        report["loss"].as_f64().unwrap()
    };
    let plain = loss(None);
    for variable in ["BIFORMER_UNRECORDED", "BIFORMER_ONE_STREAM"] {
        assert_eq!(loss(Some(variable)), plain, "{variable}");
    }
    let bare = loss(Some("BIFORMER_BARE_PRODUCTS"));
    assert!(bare != plain && (bare / plain - 1.0).abs() < 1e-2, "{bare}, {plain}");
}

/// A small run on the stand-in GPU.
fn train(standin: &Standin, folder: &Path, out: &str, settings: &[(&str, &str)], more: &[&str]) -> Ran {
    let (config, data, out) = (folder.join("small.toml"), folder.join("data"), folder.join(out));
    let arguments = ["train", "--config", text(&config), "--data", text(&data), "--out", text(&out)];
    let settings = [&[("STANDIN_MULTIPROCESSORS", "1")], settings].concat();
    run(standin, &settings, &[&arguments[..], &["--device", "cuda", "--epochs", "2"], more].concat())
}

/// The folder of a run that nothing disturbed, in it `whole`, and what it learned from.
fn whole(standin: &Standin, name: &str, settings: &[(&str, &str)]) -> PathBuf {
    let folder = fresh(name);
    samples::cifar10(&folder.join("data"));
    fs::rename(samples::config(&folder, ""), folder.join("small.toml")).unwrap();
    train(standin, &folder, "whole", settings, &[]).ok();
    folder
}

#[test]
fn a_run_goes_on_after_its_gpu_has_failed() {
    let Some(standin) = Standin::compiled() else { return };
    let folder = whole(standin, "standin-gpu-fails", &[]);
    // In the second epoch.
    let failed = train(standin, &folder, "parts", &[("STANDIN_FAULT", "2000")], &[]);
    failed.refused(&["epoch 2", "unspecified launch failure; what was saved before is unharmed: go on with --resume"]);
    // Or where others have taken its memory meanwhile.
    let full = train(standin, &folder, "parts", &[("STANDIN_MEMORY", "73500000")], &["--resume"]);
    full.refused(&["--recompute block", "no room on the GPU for", "--resume --recompute block --out", "another --out"]);
    train(standin, &folder, "parts", &[], &["--resume"]).ok();
    assert_same_run("after a fault", &folder.join("whole"), &folder.join("parts"));
}

/// Where kernels run as soon as they are asked for, as the first ones do, before any waits for work aside, cuBLASLt is
/// now and then the first to be told of a fault.
#[test]
fn a_fault_is_that_of_the_gpu_whoever_is_told() {
    let Some(standin) = Standin::compiled() else { return };
    let mut told = vec![];
    for number in 1..9 {
        let settings = [("STANDIN_EAGER", "1"), ("STANDIN_FAULT", &number.to_string())];
        let failed = run(standin, &settings, &BENCH);
        told.push(failed.err.contains("an earlier kernel"));
        failed.refused(&["unspecified launch failure"]);
    }
    assert!(told.contains(&true) && told.contains(&false), "{told:?}");
}

#[test]
fn damaged_kernels_are_compiled_anew() {
    let Some(standin) = Standin::compiled() else { return };
    let kernels = fresh("standin-gpu-kernels-cache");
    let small = ["add-", "scale-", "drop_path-"];
    // What other tests have compiled, and this one does not damage, need not be compiled again.
    for entry in fs::read_dir(standin.kernels()).into_iter().flatten().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if name.ends_with(".code") && !small.iter().any(|start| name.starts_with(start)) {
            fs::copy(entry.path(), kernels.join(name)).unwrap();
        }
    }
    let cache = [("BIFORMER_CACHE", text(&kernels))];
    let folder = whole(standin, "standin-gpu-kernels", &cache);
    let mut damaged = vec![];
    for entry in fs::read_dir(&kernels).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        let Some(number) = small.iter().position(|start| name.starts_with(start)) else { continue };
        let mut bytes = fs::read(entry.path()).unwrap();
        // Cut off, changed, empty.
        match number {
            0 => bytes.truncate(bytes.len() / 2),
            1 => bytes[100] ^= 1,
            _ => bytes.clear(),
        }
        fs::write(entry.path(), &bytes).unwrap();
        damaged.push((entry.path(), bytes));
    }
    assert_eq!(damaged.len(), small.len());
    train(standin, &folder, "again", &cache, &[]).ok();
    assert_same_run("from damaged kernels", &folder.join("whole"), &folder.join("again"));
    for (file, bytes) in damaged {
        assert_ne!(fs::read(&file).unwrap(), bytes, "{} is whole again", file.display());
    }
}
