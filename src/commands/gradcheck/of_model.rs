//! `biformer gradcheck --model`: the gradients of a whole model.

use crate::config::{Recompute, RunConfig};
use crate::memory::{ensure_room_to_train, image_bytes};
use crate::printing::tell;
use anyhow::{Result, bail};
use model::{Features, GRADIENT_TOLERANCE, ModelConfig, PartCheck, check_gradients, images_to_check};
use serde_json::{Value, json};
use std::io;

/// How many elements of each parameter are compared.
const SAMPLED: usize = 2;
/// Decides which, and the weights and the images.
const SEED: u64 = 1;

/// Checks a model on images of this height and width, and prints a line of each of its parts as soon as it is known.
/// Returns the reports as JSON.
pub fn check_all(model: &str, config: &ModelConfig, image: [usize; 2]) -> Result<Vec<Value>> {
    if config.features != Features::Logits {
        bail!(
            "features = \"{}\": the loss that is differentiated is one of logits; leave it out",
            config.features.name()
        );
    }
    config.check_image(image[0], image[1])?;
    let images = images_to_check(config, image);
    // As many bytes as twice the images take in f32.
    let step = RunConfig { architecture: config.clone(), batch_size: 2 * images, ..RunConfig::for_model(model)? };
    let step = RunConfig { micro_batches: 1, recompute: Recompute::None, ..step };
    ensure_room_to_train(&step, image, image_bytes(&step, image), "a smaller --image-size")?;
    say!(
        "The gradients of a training step's loss with respect to every parameter, in f64 on {images} random images, \
         against central\ndifferences at up to {SAMPLED} elements of each; relative to the model's largest gradient \
         (limit {GRADIENT_TOLERANCE:.0e}). Where a step along an\nelement changes which regions are routed to, the loss \
         has no slope: such elements are not compared.\n"
    );
    say!("part                parameters  checked  rerouted  differences");
    let parts = check_gradients(config, image, SAMPLED, SEED, |part| {
        tell!(
            io::stdout(),
            "{:<19} {:>10}  {:>7}  {:>8}  {:>11}{}",
            part.part,
            part.parameters,
            part.checked,
            part.rerouted,
            format!("{:.1e}", part.error),
            match part.checked {
                _ if part.passed() => String::new(),
                0 => "  FAILED: nothing could be compared".to_owned(),
                _ => format!("  FAILED: {}", part.worst),
            }
        );
    })?;
    let sum = |of: fn(&PartCheck) -> usize| parts.iter().map(of).sum::<usize>();
    let (parameters, checked, rerouted) =
        (sum(|part| part.parameters), sum(|part| part.checked), sum(|part| part.rerouted));
    say!("\n{parameters} parameters: {checked} elements compared, {rerouted} rerouted.");
    Ok(parts.iter().map(as_json).collect())
}

fn as_json(part: &PartCheck) -> Value {
    json!({
        "part": part.part,
        "parameters": part.parameters,
        "checked": part.checked,
        "rerouted": part.rerouted,
        "difference_error": part.error,
        "worst": part.worst,
        "passed": part.passed(),
    })
}
