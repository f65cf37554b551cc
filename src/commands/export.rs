//! `biformer export`.

use super::Status;
use super::options::Threads;
use super::output::{EXPORT, Kind, ensure_output, sign};
use crate::printing::{printable, tell};
use crate::trainer::stored::Stored;
use anyhow::{Result, bail};
use clap::Args;
use model::{Family, ModelConfig, TensorFile};
use std::io;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Arguments {
    /// A run folder, or the checkpoint in it; or a state_dict of any model, in a safetensors or .pth file.
    #[arg(long, value_name = "DIR|FILE")]
    checkpoint: PathBuf,
    /// Where the weights go: a safetensors file under the published code's state_dict names. They are the averaged ones
    /// if the run kept an average. What `eval`, `predict`, `forward` and `train --weights` need to use them is in its
    /// metadata.
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Takes the weights as the last step left them, even if the run kept an average.
    #[arg(long)]
    unaveraged: bool,
    #[command(flatten)]
    threads: Threads,
}

const UNAVERAGED: &str = "--unaveraged: there is one set of weights in the file; name the run's folder";

pub fn run(arguments: &Arguments) -> Result<Status> {
    arguments.threads.run(|| {
        ensure_output("--output", arguments.output.as_path(), Kind::Weights)?;
        let stored = Stored::read(&arguments.checkpoint)?;
        stored.note_better(&arguments.checkpoint, "--checkpoint");
        let mut weights = match stored {
            Stored::Described(mut described, _) => {
                if arguments.unaveraged && !described.drop_average() {
                    bail!("{UNAVERAGED}");
                }
                let trained = described.into_model()?;
                note_unpublished(trained.model.config());
                trained.export()?
            }
            Stored::Alone(_) if arguments.unaveraged => bail!("{UNAVERAGED}"),
            Stored::Alone(file) => TensorFile { metadata: Default::default(), ..file },
        };
        sign(&mut weights, EXPORT);
        weights.write(&arguments.output)?;
        let numbers: usize = weights.tensors.values().map(tensor::Tensor::count).sum();
        let output = printable(arguments.output.display());
        say!("{output}: {} tensors of {numbers} numbers", weights.tensors.len());
        Ok(Status::Done)
    })
}

/// The published code would take the weights of some models without an error, and compute something else with them.
fn note_unpublished(config: &ModelConfig) {
    let usual_heads = config.full_attention_heads == 8;
    let has = match config.family {
        Family::Biformer if (config.stages(), config.stem_strides) != (4, [2, 2]) || !usual_heads => {
            "four stages, strides of 2 and 2 in the stem, and 8 heads in the last stage"
        }
        Family::BiformerStl | Family::BiformerStlNchw if !usual_heads => "8 heads in the last stage",
        _ => return,
    };
    tell!(
        io::stderr(),
        "note: the published code has {has}, so it cannot use these weights; docs/weights.md says which models \
         benches/peers/biformer_torch.py has in PyTorch"
    );
}
