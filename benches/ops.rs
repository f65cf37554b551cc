//! Every operation of the registry, on all its cases, in f32: the forward pass alone, and forward and backward
//! through the tape. An operation that is added to the registry is timed without another edit.
//!
//! All of them take some minutes: `cargo bench --bench ops`. One operation: `cargo bench --bench ops -- linear/`. All
//! cores work; set RAYON_NUM_THREADS for fewer. Criterion keeps each figure, and shows by how much the next run
//! differs.

use autograd::gradcheck::{backward, value};
use criterion::{BenchmarkId, Criterion};
use ops::case::{Case, uniform};
use ops::registry::{OPS, Op};
use std::hint::black_box;
use std::time::Duration;
use tensor::DType;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(200))
        .configure_from_args();
    OPS.iter().for_each(|op| time(&mut criterion, op));
    criterion.final_summary();
}

fn time(criterion: &mut Criterion, op: &Op) {
    let mut group = criterion.benchmark_group(op.name);
    for case in (op.cases)() {
        // Nothing to be measured where there is nothing to be computed.
        if case.inputs.iter().all(|input| input.count() > 0) {
            time_case(&mut group, &case).unwrap_or_else(|error| panic!("{}, {}: {error}", op.name, case.name));
        }
    }
    group.finish();
}

fn time_case(
    group: &mut criterion::BenchmarkGroup<'_, criterion::measurement::WallTime>,
    case: &Case,
) -> autograd::Result<()> {
    let inputs = case.inputs_as(DType::F32)?;
    group.bench_function(BenchmarkId::new("forward", &case.name), |bencher| {
        bencher.iter(|| value(case, black_box(&inputs)));
    });
    let upstream = uniform(value(case, &inputs)?.shape().clone(), 99).cast(DType::F32)?;
    group.bench_function(BenchmarkId::new("forward and backward", &case.name), |bencher| {
        bencher.iter(|| backward(case, black_box(&inputs), &upstream));
    });
    Ok(())
}
