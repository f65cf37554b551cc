//! What `biformer bench` prints: speed, memory, profile, sweep.

use crate::common::program::{biformer, fresh, json, text};
use biformer::data::load_image;
use serde_json::Value;

#[test]
fn bench_tells_speed_and_memory() {
    let set = ["--set", "depth=1,1,1", "embed_dim=24,48,96"];
    for mode in ["train", "infer"] {
        let arguments = ["bench", "--mode", mode, "--batch-size", "4", "--steps", "2", "--threads", "1", "--json"];
        let report = json(&biformer(&[&arguments[..], &set].concat()).ok().out);
        for field in ["images_per_second", "median_step_ms"] {
            assert!(report[field].as_f64().unwrap() > 0.0, "{report}");
        }
        let number = |key: &str| report[key].as_f64().unwrap();
        approx::assert_relative_eq!(number("images_per_second") * number("median_step_ms"), 4e3, max_relative = 1e-9);
        assert_eq!((&report["precision"], &report["device"]), (&"f32".into(), &"cpu".into()));
        assert!(!cfg!(target_os = "linux") || report["peak_rss_bytes"].as_u64().unwrap() > 1 << 20);
        assert_eq!(report["threads"], 1);
        assert!(!report["isa"].as_str().unwrap().is_empty());
        // By which runs can be compared: the same each time.
        let outcomes = [&report["loss"], &report["output_rms"]];
        let [told, other] = if mode == "train" { outcomes } else { [outcomes[1], outcomes[0]] };
        assert!(told.as_f64().unwrap() > 0.0 && other.is_null(), "{report}");
        let again = json(&biformer(&[&arguments[..], &set].concat()).ok().out);
        assert_eq!([&again["loss"], &again["output_rms"]], outcomes);
    }
    let said = biformer(&[&["bench", "--batch-size", "32", "--steps", "1"][..], &set].concat()).ok().out;
    assert!(said.contains("images/s") && said.contains(", loss "), "{said}");
    let number = |before: &str, after: &str| {
        let (_, from) = said.split_once(before).unwrap();
        from.split_once(after).unwrap().0.trim().parse::<f64>().unwrap()
    };
    let (rate, median) = (number(": ", " images/s"), number("median step ", " ms"));
    // As exactly as they are printed.
    assert!((rate * median / 32e3 - 1.0).abs() <= 0.06 / median + 0.06 / rate, "{said}");
}

#[test]
fn bench_tells_where_the_time_goes() {
    let set = ["--set", "depth=1,1,1", "embed_dim=24,48,96"];
    for (mode, expected) in [
        ("train", &[("linear", "forward"), ("linear", "backward"), ("bra", "backward"), ("optimizer", "")][..]),
        ("infer", &[("linear", "forward"), ("bra", "forward"), ("other", "")][..]),
    ] {
        let arguments = ["bench", "--profile", "--mode", mode, "--batch-size", "4", "--steps", "3", "--json"];
        let report = json(&biformer(&[&arguments[..], &set].concat()).ok().out);
        let (profile, fastest) = (&report["profile"], report["min_step_ms"].as_f64().unwrap());
        for ceiling in ["gflops", "gb_per_s"] {
            assert!(profile["ceilings"][ceiling].as_f64().unwrap() > 0.1, "{report}");
        }
        let rows = profile["rows"].as_array().unwrap();
        let of = |row: &Value, key: &str| row[key].as_f64().unwrap();
        let sum = |key: &str| rows.iter().map(|row| of(row, key)).sum::<f64>();
        approx::assert_relative_eq!(sum("share"), 1.0, max_relative = 1e-9);
        // The mean step, all of it.
        assert!(sum("ms_per_step") > 0.99 * fastest, "{report}");
        if mode == "infer" {
            let info = json(&biformer(&[&["info", "--json"][..], &set].concat()).ok().out);
            let work: f64 = rows.iter().map(|row| row["gflops"].as_f64().unwrap_or(0.0) * of(row, "ms_per_step")).sum();
            approx::assert_relative_eq!(work, 2.0 * 4.0 * info["macs"].as_f64().unwrap() / 1e6, max_relative = 1e-6);
        }
        for (work, pass) in expected {
            let row = rows.iter().find(|row| row["work"] == *work && row["pass"] == *pass);
            let row = row.unwrap_or_else(|| panic!("no {work} {pass}: {report}"));
            assert!(of(row, "calls_per_step") >= 1.0 && of(row, "ms_per_step") > 0.0, "{row}");
            assert_eq!(of(row, "gflops") > 0.0 && of(row, "gb_per_s") > 0.0, !pass.is_empty(), "{row}");
        }
    }
    let calls = |steps: &str| {
        let arguments = ["bench", "--profile", "--batch-size", "2", "--steps", steps, "--json"];
        let report = json(&biformer(&[&arguments[..], &set].concat()).ok().out);
        let rows = report["profile"]["rows"].as_array().unwrap().clone();
        let linear = rows.iter().find(|row| row["work"] == "linear" && row["pass"] == "forward").unwrap();
        linear["calls_per_step"].clone()
    };
    assert_eq!(calls("1"), calls("3"));
    let said = biformer(&[&["bench", "--profile", "--batch-size", "2", "--steps", "1"][..], &set].concat()).ok().out;
    for part in ["linear", "bra", "optimizer", "GFLOP/s", "in all", "100.0 %", "100 % are "] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn bench_sweeps_attention_over_growing_maps() {
    let plot = fresh("cli-sweep").join("scaling.png");
    let arguments = ["bench", "--op", "bra", "--largest", "56", "--threads", "1", "--json", "--plot", text(&plot)];
    let report = json(&biformer(&arguments).ok().out);
    for (curve, attention, regions) in [(0, "bra", [7, 14]), (1, "attention", [1, 1])] {
        let curve = &report["curves"][curve];
        assert_eq!(curve["attention"], attention);
        let points = curve["points"].as_array().unwrap();
        assert_eq!(points.len(), 2);
        for (point, (regions, tokens)) in points.iter().zip(regions.into_iter().zip([784, 3136])) {
            let keys = if attention == "bra" { 4 * tokens / (regions * regions) } else { tokens };
            assert_eq!(point["keys_per_query"], keys, "{point}");
            assert_eq!((&point["regions_per_side"], &point["tokens"]), (&regions.into(), &tokens.into()));
            let time = |key: &str| point[key].as_f64().unwrap();
            assert!(0.0 < time("forward_ms") && time("forward_ms") < time("forward_backward_ms"), "{point}");
        }
    }
    // Unlike time, it does not depend on how busy the machine is.
    assert!(report["curves"][0]["extra_bytes_exponent"].as_f64().unwrap() < 1.1, "{report}");
    assert!(load_image(&plot).unwrap().width() > 100);
    let said = biformer(&["bench", "--op", "bra", "--largest", "56"]).ok().out;
    assert!(said.contains("tokens^") && said.contains("attention"), "{said}");
}

/// It computes on the CPU, in f32, and keeps all.
#[test]
fn a_sweep_takes_no_option_that_it_would_ignore() {
    for (ignored, what) in [(["--plot", "z.png"], "--plot is for --op"), (["--largest", "56"], "--largest is for --op")]
    {
        biformer(&[&["bench", "--model", "micro"][..], &ignored].concat()).refused(&[what]);
    }
    biformer(&["bench", "--mode", "infer", "--recompute", "block"]).refused(&["--recompute is for training"]);
    for option in [["--device", "emulated"], ["--precision", "bf16"], ["--recompute", "block"], ["--steps", "3"]] {
        let said = biformer(&[&["bench", "--op", "bra"][..], &option].concat());
        assert!(said.status == Some(2) && said.err.contains("cannot be used with"), "{option:?}: {said:?}");
    }
}

#[test]
fn bench_takes_routed_attention_out_of_a_model() {
    let arguments = ["bench", "--only-bra", "--batch-size", "2", "--steps", "2"];
    let report = json(&biformer(&[&arguments[..], &["--json"]].concat()).ok().out);
    let how = serde_json::json!({ "model": "nano", "image_size": [32, 32], "batch_size": 2, "device": "cpu", "precision": "f32" });
    how.as_object().unwrap().iter().for_each(|(name, value)| assert_eq!(&report[name], value, "{name}"));
    let stages = report["stages"].as_array().unwrap();
    // The third stage of nano attends to everything.
    for (stage, (tokens, keys)) in stages.iter().zip([([16, 16], 64), ([8, 8], 32)]) {
        assert_eq!((&stage["tokens"], &stage["keys_per_query"]), (&serde_json::json!(tokens), &keys.into()));
        assert!(
            ["forward_ms", "forward_backward_ms"].iter().all(|time| stage[time].as_f64().unwrap() > 0.0),
            "{stage}"
        );
    }
    assert_eq!(stages.len(), 2);
    assert!(biformer(&arguments).ok().out.contains("16x16"));
    biformer(&[&arguments[..], &["--set", "topks=-2,-2,-2"]].concat()).refused(&["no stage of this model routes"]);
    biformer(&["bench", "--only-bra", "--set", "soft_routing=true"]).refused(&["soft_routing", "hard routing"]);
    biformer(&["bench", "--only-bra", "--batch-size", "1000000"]).refused(&["--batch-size 1000000", "GB, more than 8"]);
}

#[test]
fn bench_takes_images_that_are_not_square() {
    let set = ["--set", "depth=1,1,1", "embed_dim=24,48,96"];
    let arguments = ["bench", "--image-size", "32x64", "--batch-size", "1", "--steps", "1", "--json"];
    let report = json(&biformer(&[&arguments[..], &set].concat()).ok().out);
    assert_eq!(report["image_size"], serde_json::json!([32, 64]));
}
