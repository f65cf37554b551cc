//! Results must not depend on the number of threads. (A process of its own: other tests change the instruction
//! set while they run.)

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
