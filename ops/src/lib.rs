//! Every differentiable operation, one folder each, and the registry that lists them.
