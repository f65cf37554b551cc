//! What can go wrong with a model: its configuration, its weights, or the engine below.

use std::fmt;

/// A failure of a model.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation refused its operands.
    #[error(transparent)]
    Engine(#[from] autograd::Error),
    /// A name that no model has.
    #[error("there is no model named \"{name}\"{}; the models are {}", like(name, known), known.join(", "))]
    UnknownModel {
        /// What was asked for.
        name: String,
        /// All known names.
        known: Vec<String>,
    },
    /// A field that the configuration does not have.
    #[error("a model has no field \"{key}\"{}; the fields are {}", like(key, known), known.join(", "))]
    UnknownField {
        /// What was given.
        key: String,
        /// All fields.
        known: Vec<String>,
    },
    /// A configuration that no model can have, or that does not go with the size of a map.
    #[error("model field {field}: {message}")]
    Config {
        /// The field.
        field: &'static str,
        /// What is wrong with it, and what would be right.
        message: String,
    },
    /// A change of one field that cannot be understood.
    #[error("{entry}: {reason}")]
    Override {
        /// The change, as it was given.
        entry: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A pass that this model cannot make.
    #[error("biformer: this pass does not fit the model: {reason}")]
    Pass {
        /// Why not.
        reason: &'static str,
    },
    /// Logits that were asked of a model without a head.
    #[error("a model with features = \"{features}\" has no head and gives no logits; see Output::values")]
    Headless {
        /// Its [`Features`](crate::Features), by name.
        features: &'static str,
    },
    /// Parts of a model that cannot be frozen.
    #[error("freeze: {reason}; parts are {}, and what is in them", known.join(", "))]
    Part {
        /// Why not.
        reason: String,
        /// The largest parts.
        known: Vec<String>,
    },
    /// An image size whose maps do not divide into regions, or have no tokens, or too many.
    #[error("an image of {height}x{width} does not fit: {reason}; {advice}")]
    ImageSize {
        /// The image's height.
        height: usize,
        /// The image's width.
        width: usize,
        /// Which stage fails, and at which size.
        reason: String,
        /// Sizes that fit, or what else to do.
        advice: String,
    },
    /// A weight file that does not fit the model. All differences are listed, and the first of each kind are shown.
    #[error(
        "{path}: these weights do not fit the model: {differences}; {}", differences.way_out()
    )]
    Weights {
        /// The file.
        path: String,
        /// Missing, surplus and misshapen tensors.
        differences: Differences,
    },
    /// A weight file with unusable numbers: one that is not finite, or a negative variance.
    #[error("{path}: tensor {tensor} holds {number}: these weights are of no use, take those of another run")]
    Unusable {
        /// The file.
        path: String,
        /// The first such tensor.
        tensor: String,
        /// The first such number.
        number: f64,
    },
    /// A file as PyTorch's `torch.save` wrote them before version 1.6.
    #[error(
        "{path}: written by PyTorch before 1.6, which this program does not read; if you trust the file (loading it runs its \
         code), save it again: torch.save(torch.load(FILE, weights_only=False), \"w.pth\")"
    )]
    OldArchive {
        /// The file.
        path: String,
    },
    /// A file that begins neither like a safetensors file nor like one of PyTorch's: another kind of file, not a
    /// damaged one.
    #[error("{path}: neither a safetensors file nor a PyTorch file")]
    Foreign {
        /// The file.
        path: String,
    },
    /// A file that begins like a tensor file but is malformed further on.
    #[error("{path}: not a file of tensors, or a damaged one ({reason}); take another copy of it")]
    Format {
        /// The file.
        path: String,
        /// What the reader met.
        reason: String,
    },
    /// An intact file whose tensors cannot be used.
    #[error("{path}: {reason}")]
    Unfit {
        /// The file.
        path: String,
        /// Why not, and the way out.
        reason: String,
    },
    /// A file that cannot be read or written.
    #[error("{path}: {cause}")]
    Io {
        /// The file.
        path: String,
        /// The system's reason. (Not called `source`: the message includes it already.)
        cause: std::io::Error,
    },
}

/// The result of a model function.
pub type Result<T> = std::result::Result<T, Error>;

impl From<tensor::Error> for Error {
    fn from(error: tensor::Error) -> Self {
        Error::Engine(error.into())
    }
}

/// An error within a [segment](autograd::Tape::segment) of the tape, which a backward pass runs again.
impl From<Error> for autograd::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Engine(error) => error,
            other => autograd::Error::Recompute { reason: other.to_string() },
        }
    }
}

/// How a weight file differs from a model. Each tensor is named in a sentence of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// The model has them, the file has not.
    pub missing: Vec<String>,
    /// Both have them, with other shapes or types.
    pub unlike: Vec<String>,
    /// The file has them, the model has not.
    pub surplus: Vec<String>,
}

impl Differences {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        [&self.missing, &self.unlike, &self.surplus].iter().all(|kind| kind.is_empty())
    }

    fn way_out(&self) -> &'static str {
        // What a run's checkpoint holds beside the weights.
        if self.missing.is_empty() && self.surplus.iter().any(|name| name.starts_with("optimizer.")) {
            return "this is a run's checkpoint: take the weights out of it, as `biformer export` and \
                    `Stored::into_weights` do";
        }
        // No configuration leaves it out.
        if let ([missing], [], []) = (&self.missing[..], &self.unlike[..], &self.surplus[..])
            && missing.starts_with("head.bias ")
        {
            return "a head without a bias is one whose bias is zero: add head.bias with zeros to the file";
        }
        "use the configuration that they belong to (the program's --model, and --set for fields that differ from it)"
    }
}

impl fmt::Display for Differences {
    /// Some of each kind, and how many more there are: weights of another model differ in everything, and it is missing
    /// and surplus names side by side that tell why.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 3;
        let kinds = [(&self.missing, "are missing"), (&self.unlike, "differ"), (&self.surplus, "are not part of it")];
        let mut said = vec![];
        for (kind, what) in kinds {
            let (shown, more) = kind.split_at(kind.len().min(SHOWN));
            said.extend(shown.iter().cloned());
            if !more.is_empty() {
                said.push(format!("{} more {what}", more.len()));
            }
        }
        f.write_str(&said.join("; "))
    }
}

/// A hint with the known name that is most like what was asked for, to be appended to a message; empty if there is
/// none.
pub fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |name| format!(" (did you mean \"{name}\"?)"))
}

fn like(name: &str, known: &[String]) -> String {
    did_you_mean(nearest(name, known.iter().map(String::as_str)).as_deref())
}

/// serde's message about a value, reworded for those who write configurations instead of Rust.
pub fn in_plain_words(message: &str) -> String {
    let words = [
        ("expected usize", "expected a whole number (0 or more)"),
        ("expected u64", "expected a whole number (0 or more)"),
        ("expected i64", "expected a whole number"),
        ("expected f64", "expected a number"),
        ("expected a boolean", "expected true or false"),
        ("expected a string", "expected a text"),
        ("unit variant, expected string only", "no text, expected a text"),
        ("expected string or map", "expected a text"),
        ("expected a sequence", "expected a list, as in [1, 2] or [\"a\", \"b\"]"),
        ("expected an array of length", "expected a list of length"),
        ("unknown variant", "there is no"),
        ("floating point `", "`"),
        ("integer `", "`"),
        ("string \"", "\""),
        ("invalid type: ", "got "),
        ("invalid value: ", "got "),
        ("invalid length ", "got a list of length "),
    ];
    words.into_iter().fold(message.to_owned(), |message, (theirs, ours)| message.replace(theirs, ours))
}

/// The known name that is most like `name`, if one is like it at all.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let scored = known.into_iter().map(|other| (strsim::jaro_winkler(name, other), other));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 > 0.7).then(|| best.1.to_owned())
}
