//! Data sets, transforms and the loader as a program uses them: one program, because linking takes longer than most
//! tests.

mod support;

mod advice;
mod augmentation;
mod corruption;
mod datasets;
mod faults;
mod folders;
mod heads;
#[cfg(unix)]
mod links;
mod loader;
mod mixing;
mod rand_augment;
mod transforms;
