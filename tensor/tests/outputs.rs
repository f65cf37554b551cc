//! Tensors on a GPU as what is written, on the emulated device.

use standin::Standin;
use tensor::cuda::{Gemm, Gpu, Matrix, elements, with_multiprocessors};
use tensor::{DType, Device, Error, Tensor};

/// Moves tensors to the device.
fn device() -> Option<(Device, impl Fn(Tensor) -> Tensor)> {
    let device = Device::Cuda(Gpu::for_tests(1)?);
    Some((device.clone(), move |tensor: Tensor| tensor.to_device(&device).unwrap()))
}

#[test]
fn parts_are_joined_in_order() {
    let Some((device, there)) = device() else { return };
    let parts = [&[1f32, 2.0][..], &[], &[3.0, 4.0, 5.0, 6.0]];
    let parts = parts.map(|part| there(Tensor::from_slice(part, [part.len() / 2, 2]).unwrap()));
    let joined = Tensor::join(&parts).unwrap();
    assert_eq!((joined.device(), &joined.shape()[..]), (device, &[3, 2][..]));
    assert_eq!(joined.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let turned = parts[2].permute(&[1, 0]).unwrap();
    assert!(matches!(Tensor::join(&[turned]), Err(Error::NotContiguous { op: "join", .. })));
}

#[test]
fn only_what_nobody_else_sees_is_written() {
    let Some((device, _)) = device() else { return };
    let mut t = Tensor::zeros_on(&device, [2, 3], DType::F32).unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), [0.0; 6]);
    let same = t.to_device(&device).unwrap();
    assert!(same.is_same_view(&t) && !t.is_unique(), "it is there, and is not copied");
    assert!(matches!(t.as_out("test", false), Err(Error::Shared { op: "test" })));
    assert!(matches!(t.as_span("test"), Err(Error::Shared { op: "test" })));
    assert!(matches!(t.as_mut_slice::<f32>("test"), Err(Error::Device { op: "test", .. })));
    drop(same);
    let mut t = t.carrying("made of zeros");
    t.as_out("test", false).unwrap().clear().unwrap();
    assert_eq!(t.carried::<&str>(), None, "its elements may be others");
    let mut turned = t.permute(&[1, 0]).unwrap();
    drop(t);
    assert!(turned.is_unique());
    assert!(matches!(turned.as_out("test", false), Err(Error::NotContiguous { op: "test", .. })));
}

#[test]
fn parts_of_an_output_are_written_alone() {
    let Some((device, there)) = device() else { return };
    let mut t = Tensor::full_on(&device, [6], 1.0, DType::F32).unwrap();
    t.as_out("test", false).unwrap().part(2, 3).clear().unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]);
    let pair = there(Tensor::from_slice(&[5.0f32, 7.0], [2]).unwrap());
    elements::put(t.as_out("test", true).unwrap().part(1, 2), &pair).unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), [1.0, 6.0, 7.0, 0.0, 0.0, 1.0]);
    let (_, mut last) = t.as_span("test").unwrap().split_at(16);
    elements::put(last.out(DType::F32, false), &pair).unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), [1.0, 6.0, 7.0, 0.0, 5.0, 7.0]);
    // Nothing goes anywhere, even behind the end.
    let nothing = there(Tensor::zeros([0], DType::F32));
    elements::put_within(t.as_out("test", false).unwrap(), 7, &[1], &nothing).unwrap();
}

/// In blocks of several batches of rows.
#[test]
fn a_row_is_added_to_every_row() {
    let Some((_, there)) = device() else { return };
    let numbers: Vec<f64> = (0..60_000).map(|i| f64::from(i % 17)).collect();
    let mut y = there(Tensor::from_slice(&numbers, [20_000, 3]).unwrap());
    let row = there(Tensor::from_slice(&[100.0, 200.0, 300.0], [3]).unwrap());
    with_multiprocessors(1, || elements::add_row(y.as_out("test", true).unwrap(), &row)).unwrap();
    let expected: Vec<f64> = numbers.iter().enumerate().map(|(i, x)| x + 100.0 * (1 + i % 3) as f64).collect();
    assert_eq!(y.to_vec::<f64>().unwrap(), expected);
}

#[test]
fn what_is_of_another_type_or_length_is_not_written() {
    let Some((device, there)) = device() else { return };
    let of = |dtype, count| Tensor::zeros_on(&device, [count], dtype).unwrap();
    let (mut narrow, mut wide) = (of(DType::F32, 4), of(DType::F64, 4));
    let outcome = elements::put(narrow.as_out("test", false).unwrap(), &wide);
    assert!(matches!(outcome, Err(Error::DType { op: "put", .. })));
    for (columns, fits) in [(1, true), (2, true), (3, false), (0, false), (8, false)] {
        let outcome = elements::add_row(narrow.as_out("test", true).unwrap(), &of(DType::F32, columns));
        assert_eq!(outcome.is_ok(), fits, "{columns} of 4: {outcome:?}");
        assert!(fits || matches!(outcome, Err(Error::Shape { op: "add_row", .. })));
    }
    let pieces = there(Tensor::zeros([2, 4], DType::F32));
    let outcome = elements::add_pieces(&pieces, [Some(wide.as_out("test", false).unwrap()), None]);
    assert!(matches!(outcome, Err(Error::DType { op: "add_pieces", .. })));

    let square = |dtype| of(dtype, 4).reshape([2, 2]).unwrap();
    let [a, b] = [DType::F32, DType::F64].map(square);
    let product = |a, b| Gemm::new("test", Matrix::plain(a), Matrix::plain(b), [2; 3]);
    let outcome = product(&a, &b).into(narrow.as_out("test", false).unwrap());
    assert!(matches!(outcome, Err(Error::DType { op: "test", .. })), "factors of two types");
    let outcome = product(&a, &a).into(wide.as_out("test", false).unwrap());
    assert!(matches!(outcome, Err(Error::DType { op: "test", .. })), "a result of another");
    let outcome = product(&a, &a).plus(Some(&b)).into(narrow.as_out("test", false).unwrap());
    assert!(matches!(outcome, Err(Error::DType { op: "test", .. })), "something to add of another");
}

#[test]
fn what_a_product_reads_is_contiguous() {
    let Some((device, there)) = device() else { return };
    let a = Tensor::zeros_on(&device, [2, 2], DType::F32).unwrap();
    let turned = there(Tensor::full([2, 2], 1f32)).permute(&[1, 0]).unwrap();
    let repeated = there(Tensor::full([1], 1f32)).broadcast_to([2]).unwrap();
    let product = |a, b| Gemm::new("test", Matrix::plain(a), Matrix::plain(b), [2; 3]);
    for (product, what) in [
        (product(&turned, &a), "a factor"),
        (product(&a, &turned), "the other factor"),
        (product(&a, &a).plus(Some(&turned)), "a matrix to add"),
        (product(&a, &a).row(Some(&repeated)), "a row to add"),
    ] {
        let mut result = Tensor::zeros_on(&device, [2, 2], DType::F32).unwrap();
        let outcome = product.into(result.as_out("test", false).unwrap());
        assert!(matches!(outcome, Err(Error::NotContiguous { op: "test", .. })), "{what}: {outcome:?}");
    }
}

#[test]
fn a_product_without_terms_is_what_is_added_to_it() {
    let Some((device, there)) = device() else { return };
    let (a, b) = (there(Tensor::zeros([2, 0], DType::F32)), there(Tensor::zeros([0, 3], DType::F32)));
    let plus = there(Tensor::full([2, 3], 5f32));
    let row = there(Tensor::from_slice(&[1f32, 2.0, 3.0], [3]).unwrap());
    for (with_plus, with_row, accumulate) in
        [(false, false, false), (false, false, true), (true, false, false), (false, true, true), (true, true, false)]
    {
        let mut result = Tensor::full_on(&device, [2, 3], 7.0, DType::F32).unwrap();
        Gemm::new("test", Matrix::plain(&a), Matrix::plain(&b), [2, 3, 0])
            .plus(with_plus.then_some(&plus))
            .row(with_row.then_some(&row))
            .into(result.as_out("test", accumulate).unwrap())
            .unwrap();
        let before = if with_plus { 5.0 } else { 0.0 } + if accumulate { 7.0 } else { 0.0 };
        let expected = [1.0, 2.0, 3.0].map(|of_row| before + if with_row { of_row } else { 0.0 });
        assert_eq!(result.to_vec::<f32>().unwrap(), expected.repeat(2), "{with_plus} {with_row} {accumulate}");
    }
    let mut nothing = Tensor::zeros_on(&device, [0, 3], DType::F32).unwrap();
    let no_rows = there(Tensor::zeros([0, 2], DType::F32));
    let product = Gemm::new("test", Matrix::plain(&no_rows), Matrix::plain(&plus), [0, 3, 2]);
    product.row(Some(&row)).into(nothing.as_out("test", false).unwrap()).unwrap();
}

#[test]
fn on_the_standin_gpu() {
    Standin::compiled().into_iter().for_each(|standin| _ = standin.repeat(&[], &[]));
}
