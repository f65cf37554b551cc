//! The generator of the golden vectors' weights and inputs: integer arithmetic on a tensor's name.

use biformer::model::TensorFile;
use biformer::tensor::{DType, Tensor};

/// The values of the tensor with this name and shape.
pub fn values(key: &str, shape: &[usize]) -> Vec<f32> {
    let (amplitude, offset) = range(key, shape);
    let hash = key
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3));
    let uniform = |i: u64| {
        let z = hash.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f64 / (1u64 << 24) as f64
    };
    let count: usize = shape.iter().product();
    (0..count as u64).map(|i| (offset + amplitude * (2.0 * uniform(i) - 1.0)) as f32).collect()
}

/// The tensor with this name, in f64.
pub fn tensor(key: &str, shape: &[usize]) -> Tensor {
    Tensor::from_slice(&values(key, shape), shape).unwrap().cast(DType::F64).unwrap()
}

/// Amplitude and offset, by the kind of tensor that the name tells.
fn range(key: &str, shape: &[usize]) -> (f64, f64) {
    match key {
        _ if key.ends_with(".running_mean") => (0.1, 0.0),
        _ if key.ends_with(".running_var") => (0.5, 1.0),
        _ if key.ends_with(".bias") => (0.1, 0.0),
        _ if key == "input" || key.starts_with("input.") => (2.0, 0.0),
        _ if shape.len() == 1 => (0.25, 1.0),
        _ => {
            let fan_in: usize = shape[1..].iter().product();
            let amplitude = (3.0 / fan_in as f64).sqrt();
            (if key.ends_with("pos_embed.weight") { 0.25 * amplitude } else { amplitude }, 0.0)
        }
    }
}

/// A state_dict with the generated values under the names and shapes of another.
pub fn state_dict(like: &TensorFile) -> TensorFile {
    let mut file = TensorFile::default();
    for (name, tensor) in &like.tensors {
        let generated = match tensor.dtype() {
            DType::Index => Tensor::scalar(0u32),
            _ => Tensor::from_slice(&values(name, tensor.shape()), tensor.shape().clone()).unwrap(),
        };
        file.tensors.insert(name.clone(), generated);
    }
    file
}
