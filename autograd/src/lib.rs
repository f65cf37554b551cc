//! The tape, reverse-mode differentiation and gradient checking.
