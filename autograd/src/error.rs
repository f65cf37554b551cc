//! What can go wrong between a forward pass and its gradients.

/// A failure of the tape, or of an operation that it recorded.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
pub enum Error {
    /// An operation refused its operands.
    #[error(transparent)]
    Tensor(#[from] tensor::Error),
    /// A backward pass from a value that no gradient can flow back from.
    #[error("backward: the value depends on no recorded input or parameter; a tape from Tape::new records them")]
    NotRecorded,
    /// A backward pass that starts at a parameter itself.
    #[error("backward: the value is a parameter itself; begin with the result of an operation")]
    BareParameter,
    /// A backward pass through an operation that one has been through already.
    #[error("backward of {op}: walked already, and its saved tensors are freed; compute the value again on a new tape")]
    Walked {
        /// The operation.
        op: &'static str,
    },
    /// A value of one tape used on another: its gradient would be lost, or go to the wrong place.
    #[error("{op}: a value of another tape; values can only be combined on the tape that they were made on")]
    ForeignVar {
        /// The operation.
        op: &'static str,
    },
    /// A backward rule that forgot an input: without this error it would be a silent detach.
    #[error("backward of {op}: its rule gave no gradient for input {input}")]
    MissingGradient {
        /// The operation.
        op: &'static str,
        /// The input's position.
        input: usize,
    },
    /// Trainable parameters that the loss does not depend on.
    #[error("no gradient reaches {}: the loss does not depend on {}", some(names), if names.len() == 1 { "it" } else { "them" })]
    Unreached {
        /// Their names.
        names: Vec<String>,
    },
    /// No parameter has a gradient of this step.
    #[error(
        "no parameter has a gradient: since the last step of the optimiser there was no backward pass, it failed, or its \
         loss depends on no parameter"
    )]
    NoBackward,
    /// An operation produced a NaN or an infinity while the tape was checking for them.
    #[error("{op} (node {node}) produced a value that is not finite")]
    NotFinite {
        /// The operation.
        op: &'static str,
        /// The number of its node on its tape; within [`Tape::in_pieces`](crate::Tape::in_pieces), on the tape of its
        /// piece.
        node: usize,
    },
    /// A [segment](crate::Tape::segment) or a [value](crate::Rule::recompute) whose second computation differed from
    /// the first, or failed for a reason that is not one of these errors.
    #[error("backward: what was not kept could not be computed again: {reason}")]
    Recompute {
        /// What went wrong.
        reason: String,
    },
    /// Gradients of another model's parameters, or of another element type.
    #[error(
        "backward: the gradients {}; make them with Gradients::new, and compute the value again on a new tape",
        match parameters {
            0 => "have no room for parameters".to_owned(),
            _ => format!("are laid out for other parameters ({parameters} of them): another model's, or from before these \
                 were frozen, thawed or cast"),
        }
    )]
    ForeignGradients {
        /// The number of parameters that the gradients are laid out for.
        parameters: usize,
    },
    /// Parameters of two models with the same layout, such as a teacher and its student, in a value, in the backward
    /// passes of one step, or in an optimiser's step: their gradients would be taken for those of one model.
    #[error(
        "backward: the parameters of two models that are laid out alike; give each model gradients of its own or, where \
         one depends on the other, compute that on a tape of its own, and give its values to this one with \
         Tape::constant or Tape::input"
    )]
    TwoModels,
}

/// The first few names, and how many more there are.
fn some(names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names.len().saturating_sub(SHOWN) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names[..SHOWN].join(", ")),
    }
}

/// The result of a recorded operation.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_names_the_first_are_said() {
        let names = |count: usize| (1..=count).map(|number| format!("p{number}")).collect();
        let said = |count| Error::Unreached { names: names(count) }.to_string();
        assert!(said(1).contains("p1") && !said(1).contains("more"), "{}", said(1));
        assert!(said(10).contains("p1, p2, p3, p4, p5, p6, p7, p8 and 2 more"), "{}", said(10));
    }
}
