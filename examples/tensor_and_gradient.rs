//! A tensor, a tape, and a gradient that one can check by hand.
//!
//! `cargo run --release --example tensor_and_gradient`

use biformer::autograd::{Gradients, Result, Tape};
use biformer::ops;
use biformer::tensor::Tensor;

/// From a tensor to the gradient of a weight.
pub fn main() -> Result<()> {
    // A tensor is a shape and strides over a shared buffer. A view moves no element.
    let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?;
    let turned = x.permute(&[1, 0])?;
    println!("x:       {x:?} with strides {:?}", x.strides());
    println!("turned:  {turned:?} with strides {:?}, the same buffer: {}", turned.strides(), {
        turned.buffer_id() == x.buffer_id()
    });

    // Operations compute eagerly, and record on the tape how to differentiate them.
    let tape = Tape::new();
    let x = tape.input(x); // (2, 3), its gradient is wanted
    let weight = tape.input(Tensor::from_slice(&[1.0, 0.0, -1.0], [1, 3])?); // (1, 3)
    let y = ops::linear(&x, &weight, None)?; // (2, 1): one row of x times the weight each
    let loss = ops::sum(&ops::mul(&y, &y)?, &[0, 1], false)?; // y₁² + y₂²
    println!("\ny:       {:?}", y.value());
    println!("loss:    {}\n\n{tape}\n", loss.value().item::<f64>()?);

    // Backward walks the tape once, from the last line to the first, and frees it as it goes.
    let mut gradients = Gradients::default();
    tape.backward(&loss, &mut gradients)?;

    // d loss/dW = 2·(y₁·x₁ + y₂·x₂) with y = (−2, −2): −4·(1 + 4, 2 + 5, 3 + 6).
    let dweight = gradients.of(&weight).expect("the loss depends on the weight").to_vec::<f64>()?;
    println!("dweight: {dweight:?}");
    assert_eq!(dweight, [-20.0, -28.0, -36.0]);
    Ok(())
}
