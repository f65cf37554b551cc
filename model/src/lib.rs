//! BiFormer: configurations, blocks, initialisation and weight files.
