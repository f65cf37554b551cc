//! Poisoned memory, in a process of its own: it is switched on for all of it.

use tensor::{Buffer, DType, Tensor, set_poison};

#[test]
fn every_byte_is_poisoned_whatever_the_length() {
    for round in 0..2 {
        for len in [1, 2, 6, 63, 64, 1001] {
            let mut buffer = Buffer::new(len);
            assert!(round == 0 || buffer.slice::<u8>().iter().all(|&byte| byte == u8::MAX), "{len} bytes");
            buffer.slice_mut::<u8>().fill(7);
        }
        set_poison(true);
    }
    let made = [Tensor::empty([1001], DType::F32), Tensor::zeros([1001], DType::F32)];
    let [poisoned, zeros] = made.map(|tensor| tensor.to_vec::<f32>().unwrap());
    assert!(poisoned.iter().all(|x| x.is_nan()) && zeros.iter().all(|&x| x == 0.0));
}
