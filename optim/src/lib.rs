//! AdamW, schedules, gradient clipping and the moving average of weights.
