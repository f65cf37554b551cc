//! BiFormer from buffer to trained model.
