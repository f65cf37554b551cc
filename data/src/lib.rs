//! Data sets, image decoding, augmentation and the prefetching loader.
