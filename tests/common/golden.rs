//! Reading golden vectors.

use super::generator;
use biformer::model::{BiFormer, FIELDS, ModelConfig, TensorFile, field_name, preset};
use biformer::tensor::{DType, Tensor};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A file of vectors.
pub struct Vector {
    /// Its path.
    pub path: PathBuf,
    /// Its contents.
    pub json: Value,
}

/// All vectors of a kind: the project's own, and those in the folder that BIFORMER_GOLDEN_DIR names. A folder in
/// which there are none is a mistake: a comparison with nothing would pass.
pub fn vectors(kind: &str) -> Vec<Vector> {
    let of_kind = |vectors: Vec<Vector>| vectors.into_iter().filter(|vector| vector.json["kind"] == kind);
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden");
    let mut found: Vec<Vector> = of_kind(vectors_in(&own)).collect();
    assert!(!found.is_empty(), "{}: no vectors of kind {kind}", own.display());
    if let Some(more) = std::env::var_os("BIFORMER_GOLDEN_DIR").map(PathBuf::from) {
        let more_found = vectors_in(&more);
        assert!(!more_found.is_empty(), "BIFORMER_GOLDEN_DIR = {}: no vectors of any kind", more.display());
        found.extend(of_kind(more_found));
    }
    found
}

/// All vectors in a folder, by name.
fn vectors_in(folder: &Path) -> Vec<Vector> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "json"));
    paths.sort();
    let read = |path: PathBuf| {
        let json = serde_json::from_slice(&std::fs::read(&path).unwrap());
        Vector { json: json.unwrap_or_else(|error| panic!("{}: {error}", path.display())), path }
    };
    // Other files of JSON lie there too.
    paths
        .into_iter()
        .map(read)
        .filter(|vector| ["forward", "train"].iter().any(|kind| vector.json["kind"] == *kind))
        .collect()
}

impl Vector {
    /// Its name.
    pub fn name(&self) -> &str {
        self.json["name"].as_str().unwrap()
    }

    /// The model that it is about.
    pub fn config(&self) -> ModelConfig {
        let family = self.json["model"]["family"].as_str().unwrap_or("biformer");
        let base = match family {
            "biformer" => "tiny",
            "biformer_stl" => "stl",
            "biformer_stl_nchw" => "stl_nchw",
            other => panic!("{}: unknown family {other}", self.name()),
        };
        let mut table = serde_json::to_value(preset(base).unwrap().config()).unwrap();
        for (key, value) in self.json["model"].as_object().unwrap() {
            let key = field_name(key);
            assert!(FIELDS.contains(&key), "{}: the model has no field {key}", self.name());
            table[key] = value.clone();
        }
        serde_json::from_value(table).unwrap()
    }

    /// The model with the generated weights.
    pub fn model(&self, dtype: DType) -> BiFormer {
        let mut model = BiFormer::blank(&self.config(), dtype).unwrap();
        let weights = generator::state_dict(&model.state_dict().unwrap());
        model.load(&weights, "generated").unwrap();
        model
    }

    /// The complete outputs, beside the file.
    pub fn outputs(&self) -> TensorFile {
        TensorFile::read(&self.path.with_file_name(format!("{}.f64.safetensors", self.name()))).unwrap()
    }
}

/// A generated image batch (N, 3, H, W), as (N, H, W, 3).
pub fn images(key: &str, shape: &[usize], dtype: DType) -> Tensor {
    generator::tensor(key, shape).permute(&[0, 2, 3, 1]).unwrap().contiguous().unwrap().cast(dtype).unwrap()
}

/// A map (N, H, W, C) in the order of (N, C, H, W).
pub fn nchw(map: &Tensor) -> Vec<f64> {
    elements(&map.permute(&[0, 3, 1, 2]).unwrap())
}

/// A tensor's elements, one row after the other.
pub fn elements(tensor: &Tensor) -> Vec<f64> {
    tensor.cast(DType::F64).unwrap().to_vec().unwrap()
}

/// A shape.
pub fn extents(json: &Value) -> Vec<usize> {
    numbers(json).iter().map(|&extent| extent as usize).collect()
}

/// A list of numbers.
pub fn numbers(json: &Value) -> Vec<f64> {
    json.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// The square root of the sum of squares.
pub fn l2(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Asserts that values agree within `tolerance` times the largest of them.
pub fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    let scale = want.iter().fold(0.0_f64, |scale, x| scale.max(x.abs()));
    assert_within(what, got, want, tolerance * scale);
}

/// Asserts that values agree within `bound`.
pub fn assert_within(what: &str, got: &[f64], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of values");
    for (place, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= bound, "{what}, element {place}: {got}, should be {want} within {bound:.1e}");
    }
}
