//! Results must not depend on the number of threads. (A process of its own: other tests change the instruction
//! set while they run.)

use std::hint::black_box;
use tensor::cpu::gemm::{Mat, gemm};
use tensor::cpu::parallel::{Out, sum_in_pieces, thread_pool};
use tensor::rng::Philox;

fn random(count: usize, stream: u64) -> Vec<f32> {
    (0..count).map(|i| Philox::new(1, stream).uniform(i as u64) - 0.5).collect()
}

fn with_threads<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    thread_pool(threads).unwrap().install(work)
}

#[test]
fn of_a_matrix_product() {
    // Cut by rows, by panels, and along the inner axis.
    for (m, k, n) in [(3000, 64, 65), (49, 300, 1777), (31, 90_000, 17)] {
        let (a, b) = (random(m * k, 1), random(k * n, 2));
        let run = |threads| {
            let mut c = vec![0.0; m * n];
            with_threads(threads, || gemm(Mat::new(&a, m, k), Mat::new(&b, k, n), Out::store(&mut c)));
            c
        };
        assert_eq!(run(1), run(3), "{m}x{k}x{n}");
    }
}

#[test]
fn of_a_long_sum() {
    let x = random(1 << 20, 1);
    let run = |threads| {
        let mut sum = [0.0];
        with_threads(threads, || {
            sum_in_pieces(x.len(), 1, 1, Out::store(&mut sum), |range, sum| sum[0] += x[range].iter().sum::<f32>())
        });
        sum
    };
    assert_eq!(run(1), run(4));
}

#[test]
fn a_sum_of_nothing_is_zero_or_leaves_what_is_there() {
    for (accumulate, expected) in [(false, 0.0), (true, 7.0)] {
        let mut sum = [7.0f32; 2];
        sum_in_pieces(0, 1, 2, Out { data: &mut sum, accumulate }, |_, _| unreachable!("there is no piece"));
        assert_eq!(sum, [expected; 2]);
        sum_in_pieces(5, 1, 0, Out { data: &mut sum[..0], accumulate }, |_, _| unreachable!("there is no column"));
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn threads_of_a_pool_flush_denormals() {
    let (smallest, denormal) = (f32::MIN_POSITIVE, f32::from_bits(1000));
    with_threads(2, || {
        assert_eq!(black_box(smallest) * black_box(0.5), 0.0, "a result");
        assert_eq!(black_box(denormal) * black_box(1e30), 0.0, "an operand");
    });
}
