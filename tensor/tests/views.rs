//! Views against a model: a tensor as a function from positions to elements.

use proptest::prelude::*;
use tensor::{DType, Device, Error, Shape, Tensor};

/// Extents, and the elements in order.
type Model = (Vec<usize>, Vec<u32>);

fn positions(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![vec![]], |all, &extent| {
        all.iter().flat_map(|start| (0..extent).map(move |i| [&start[..], &[i]].concat())).collect()
    })
}

/// The model of a view: its extents, and where each of its positions lies in what it is a view of.
fn seen((shape, elements): &Model, extents: Vec<usize>, source: impl Fn(&[usize]) -> Vec<usize>) -> Model {
    let place = |at: &[usize]| at.iter().zip(shape).fold(0, |place, (i, extent)| place * extent + i);
    let elements = positions(&extents).iter().map(|at| elements[place(&source(at))]).collect();
    (extents, elements)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_chain_of_views_shows_the_right_elements(
        shape in prop::collection::vec(0usize..5, 1..4),
        steps in prop::collection::vec((0u8..4, any::<[u8; 3]>()), 0..6),
    ) {
        let count: usize = shape.iter().product();
        let elements: Vec<u32> = (0..count as u32).collect();
        let mut tensor = Tensor::from_slice(&elements, shape.clone()).unwrap();
        let mut model: Model = (shape, elements);
        for (kind, [a, b, c]) in steps {
            let rank = model.0.len();
            let axis = usize::from(a) % rank;
            match kind {
                0 => {
                    let mut order: Vec<usize> = (0..rank).collect();
                    order.swap(axis, usize::from(b) % rank);
                    tensor = tensor.permute(&order).unwrap();
                    let extents = order.iter().map(|&axis| model.0[axis]).collect();
                    // A swap is its own inverse.
                    model = seen(&model, extents, |at| order.iter().map(|&axis| at[axis]).collect());
                }
                1 => {
                    let extent = model.0[axis];
                    let start = usize::from(b) % (extent + 1);
                    let end = start + usize::from(c) % (extent - start + 1);
                    tensor = tensor.slice(axis, start..end).unwrap();
                    let mut extents = model.0.clone();
                    extents[axis] = end - start;
                    model = seen(&model, extents, |at| {
                        let mut at = at.to_vec();
                        at[axis] += start;
                        at
                    });
                }
                2 => {
                    let extents = [&[1 + usize::from(b) % 3][..], &model.0].concat();
                    tensor = tensor.broadcast_to(extents.clone()).unwrap();
                    model = seen(&model, extents, |at| at[1..].to_vec());
                }
                _ => {
                    let extents = vec![model.1.len(), 1];
                    let reshaped = tensor.reshape(extents.clone());
                    if tensor.is_contiguous() {
                        tensor = reshaped.unwrap();
                    } else {
                        let refused = matches!(reshaped, Err(Error::NotContiguous { .. }));
                        prop_assert!(refused);
                        tensor = tensor.contiguous().unwrap().reshape(extents.clone()).unwrap();
                    }
                    model.0 = extents;
                }
            }
            prop_assert_eq!(&tensor.shape()[..], &model.0[..]);
            prop_assert_eq!(tensor.to_vec::<u32>().unwrap(), model.1.clone());
            let copy = tensor.contiguous().unwrap();
            prop_assert_eq!(copy.as_slice::<u32>("test").unwrap(), &model.1[..]);
            let shown = format!("{tensor:?}");
            prop_assert!(shown.starts_with("Tensor index"));
        }
    }
}

#[test]
fn what_does_not_exist_is_refused() {
    let t = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3]).unwrap();
    assert!(matches!(t.slice(2, 0..1), Err(Error::Axis { axis: 2, rank: 2, .. })));
    assert!(matches!(t.slice(1, 2..4), Err(Error::OutOfRange { index: 4, bound: 4, .. })));
    let row = t.reshape([6]).unwrap();
    assert!(matches!(row.transposed(), Err(Error::Axis { axis: 1, rank: 1, .. })));
    assert!(matches!(t.permute(&[0, 2]), Err(Error::Axis { axis: 2, rank: 2, .. })));
    for order in [&[0, 0][..], &[0], &[0, 1, 0]] {
        assert!(matches!(t.permute(order), Err(Error::Argument { .. })), "{order:?}");
    }
    assert!(matches!(t.broadcast_to([2, 2]), Err(Error::Broadcast { .. })));
    assert!(matches!(t.reshape([4]), Err(Error::Shape { .. })));
    assert!(matches!(t.as_slice::<f64>("test"), Err(Error::DType { .. })));
    assert!(matches!(t.as_strided_slice::<f64>("test"), Err(Error::DType { .. })));
    assert!(matches!(t.clone().as_mut_slice::<f64>("test"), Err(Error::DType { .. })));
    let mut turned = t.duplicate().unwrap().permute(&[1, 0]).unwrap();
    assert!(matches!(turned.as_slice::<f32>("test"), Err(Error::NotContiguous { .. })));
    assert!(matches!(turned.as_mut_slice::<f32>("test"), Err(Error::NotContiguous { .. })));
    assert!(matches!(turned.as_mut_bytes("test"), Err(Error::NotContiguous { .. })));
    assert!(matches!(t.item::<f32>(), Err(Error::Shape { .. })));
    assert_eq!(t.slice(0, 1..2).unwrap().slice(1, 2..3).unwrap().item::<f32>().unwrap(), 6.0);
    assert!(matches!(Tensor::from_slice(&[1u32], [2]), Err(Error::Shape { .. })));
    // Extents whose product a usize cannot hold.
    let none = Tensor::zeros([0], DType::F32);
    assert!(matches!(none.reshape([1 << 62, 4]), Err(Error::Shape { .. })));
    assert!(matches!(none.reshape([1 << 62, 4, 0]), Err(Error::Shape { .. })));
    for extents in [vec![1 << 61], vec![1 << 62, 4], vec![1 << 40, 1 << 40, 0]] {
        let made = [
            Tensor::empty_on(&Device::Cpu, extents.clone(), DType::Bf16),
            Tensor::zeros_on(&Device::Cpu, extents.clone(), DType::F32),
            Tensor::full_on(&Device::Cpu, extents, 1.0, DType::F64),
        ];
        assert!(made.iter().all(|made| matches!(made, Err(Error::Argument { .. }))), "{made:?}");
    }
}

#[test]
fn extents_broadcast_where_they_are_equal_or_one() {
    let broadcast = |a: &[usize], b: &[usize]| Shape::from(a).broadcast(&Shape::from(b), "test");
    for (a, b, both) in [
        (&[2, 3][..], &[2, 3][..], &[2, 3][..]),
        (&[], &[2], &[2]),
        (&[3], &[1], &[3]),
        (&[2, 1], &[4, 1, 3], &[4, 2, 3]),
        (&[0, 1], &[1, 5], &[0, 5]),
    ] {
        assert_eq!(broadcast(a, b).unwrap()[..], *both);
        assert_eq!(broadcast(b, a).unwrap()[..], *both);
    }
    for (a, b) in [(&[2, 3][..], &[2][..]), (&[0], &[2])] {
        assert!(matches!(broadcast(a, b), Err(Error::Broadcast { op: "test", .. })));
    }
    assert!(matches!(broadcast(&[1 << 40, 1], &[1, 1 << 40]), Err(Error::Argument { op: "test", .. })));
    let column = Tensor::from_slice(&[1u32, 2], [2, 1]).unwrap();
    assert_eq!(column.broadcast_to([2, 3]).unwrap().to_vec::<u32>().unwrap(), [1, 1, 1, 2, 2, 2]);
}

#[test]
fn a_view_is_contiguous_if_its_elements_follow_one_another_whatever_the_other_strides() {
    let t = Tensor::zeros([2, 3], DType::F32);
    let row = t.slice(0, 1..2).unwrap();
    assert!(row.is_contiguous() && row.slice(1, 1..3).unwrap().is_contiguous(), "an axis of one element");
    assert!(!t.slice(1, 0..1).unwrap().is_contiguous() && !t.permute(&[1, 0]).unwrap().is_contiguous());
    assert!(t.slice(1, 0..0).unwrap().permute(&[1, 0]).unwrap().is_contiguous(), "nothing");
}

#[test]
fn a_scalar_is_one_element() {
    let scalar = Tensor::scalar(2.5f32);
    assert_eq!((scalar.rank(), scalar.count()), (0, 1));
    assert_eq!(scalar.to_vec::<f32>().unwrap(), [2.5]);
}

#[test]
fn what_is_shown_of_a_tensor_is_its_type_its_shape_and_its_first_elements() {
    let numbers: Vec<f64> = (0..9).map(|i| f64::from(i) - 0.5).collect();
    let t = Tensor::from_slice(&numbers, [3, 3]).unwrap();
    assert_eq!(format!("{t:?}"), "Tensor f64 (3, 3) [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, ...]");
    let columns = t.slice(1, 1..3).unwrap();
    assert_eq!(format!("{columns:?}"), "Tensor f64 (3, 2) [0.5, 1.5, 3.5, 4.5, 6.5, 7.5]");
    let eight = t.reshape([9]).unwrap().slice(0, 0..8).unwrap().cast(DType::Bf16).unwrap();
    assert_eq!(format!("{eight:?}"), "Tensor bf16 (8) [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]");
    let turned = t.permute(&[1, 0]).unwrap();
    assert_eq!(format!("{turned:?}"), "Tensor f64 (3, 3) [-0.5, 2.5, 5.5, 0.5, 3.5, 6.5, 1.5, 4.5, ...]");
    assert_eq!(format!("{:?}", Tensor::full([2, 0], 1u32)), "Tensor index (u32) (2, 0) []");
    // Without a look at the others.
    let many = Tensor::scalar(1.5f32).broadcast_to([1 << 50, 1]).unwrap();
    assert!(format!("{many:?}").ends_with(&format!("[{}...]", "1.5, ".repeat(8))), "{many:?}");
}

#[test]
fn a_shared_buffer_is_not_written() {
    let mut t = Tensor::zeros([2, 2], DType::F32);
    let view = t.slice(0, 0..1).unwrap();
    assert!(matches!(t.as_mut_slice::<f32>("test"), Err(Error::Shared { .. })));
    assert!(!t.is_unique());
    drop(view);
    assert!(t.is_unique());
    t.as_mut_slice::<f32>("test").unwrap()[3] = 1.0;
    assert_eq!(t.to_vec::<f32>().unwrap(), [0.0, 0.0, 0.0, 1.0]);
}

#[test]
fn casting_rounds_to_nearest() {
    let t = Tensor::from_slice(&[1.0 + 2f64.powi(-25), 1.0 + 3.0 * 2f64.powi(-25), 3.0e-310], [3]).unwrap();
    assert_eq!(t.cast(DType::F32).unwrap().to_vec::<f32>().unwrap(), [1.0, 1.0 + 2f32.powi(-23), 0.0]);
    let t = Tensor::from_slice(&[1.0f32 + 2f32.powi(-9), 1.0 + 3.0 * 2f32.powi(-9)], [2]).unwrap();
    let halved = t.cast(DType::Bf16).unwrap().cast(DType::F32).unwrap();
    assert_eq!(halved.to_vec::<f32>().unwrap(), [1.0, 1.0 + 2f32.powi(-7)]);
}

/// Neighbours of bf16's ties, which f32 cannot tell from these.
#[test]
fn a_double_is_rounded_to_bf16_once() {
    let (tie, little) = (1.0 + 2f64.powi(-8), 2f64.powi(-40));
    let (largest, beyond) = (3.396e38, 3.397e38); // on both sides of the tie between the largest number and infinity
    let values = [tie - little, tie, tie + little, -tie - little, largest, beyond, 1e300, f64::NAN, -0.0];
    let t = Tensor::from_slice(&values, [values.len()]).unwrap().cast(DType::Bf16).unwrap();
    let found = t.cast(DType::F32).unwrap().to_vec::<f32>().unwrap();
    let (above, infinity) = (1.0 + 2f32.powi(-7), f32::INFINITY);
    let expected = [1.0, 1.0, above, -above, f32::from_bits(0x7f7f_0000), infinity, infinity, f32::NAN, -0.0];
    for (value, (found, expected)) in values.into_iter().zip(found.into_iter().zip(expected)) {
        assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "{value}: {found}");
    }
}

#[test]
fn parts_are_joined_in_order() {
    let parts = [&[1u32, 2][..], &[], &[3, 4, 5, 6]].map(|part| Tensor::from_slice(part, [part.len() / 2, 2]).unwrap());
    let joined = Tensor::join(&parts).unwrap();
    assert_eq!((&joined.shape()[..], joined.to_vec::<u32>().unwrap()), (&[3, 2][..], vec![1, 2, 3, 4, 5, 6]));
}

#[test]
fn what_does_not_fit_is_neither_joined_nor_overwritten() {
    let tensor = |shape: [usize; 2]| Tensor::full(shape, 1f32);
    let scalar = Tensor::join(&[tensor([1, 2]), Tensor::scalar(1f32)]).unwrap_err();
    assert!(matches!(scalar, Error::Shape { op: "join", .. }));
    let turned = tensor([3, 2]).permute(&[1, 0]).unwrap();
    assert!(matches!(Tensor::join(&[turned]).unwrap_err(), Error::NotContiguous { op: "join", .. }));
    let axis = Tensor::join(&[Tensor::scalar(1f32)]).unwrap_err();
    assert_eq!(axis, Error::Axis { op: "join", axis: 0, rank: 0 });
    assert!(matches!(Tensor::join(&[]).unwrap_err(), Error::Argument { op: "join", .. }));
    assert!(matches!(Tensor::join(&[tensor([1, 2]), tensor([1, 3])]).unwrap_err(), Error::Shape { op: "join", .. }));
    let other = Tensor::full([1, 2], 1f64);
    assert!(matches!(Tensor::join(&[tensor([1, 2]), other.clone()]).unwrap_err(), Error::DType { op: "join", .. }));

    let mut to = tensor([2, 2]);
    let empty = Tensor::full([0], 1f32);
    to.overwrite(4, &empty).unwrap();
    for (start, from) in [(3, &tensor([1, 2])), (5, &empty), (usize::MAX, &tensor([1, 2]))] {
        let error = to.overwrite(start, from).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { op: "overwrite", bound: 5, .. }), "{start}: {error}");
    }
    assert!(matches!(to.overwrite(0, &other).unwrap_err(), Error::DType { op: "overwrite", .. }));
    let seen = to.clone();
    assert!(matches!(to.overwrite(0, &tensor([1, 2])).unwrap_err(), Error::Shared { op: "overwrite" }));
    assert_eq!(seen.to_vec::<f32>().unwrap(), [1.0; 4]);
}

#[test]
fn the_first_number_of_a_kind_is_found_in_any_view_and_type() {
    let numbers = Tensor::from_slice(&[1.0, -2.0, 3.0, -4.0], [2, 2]).unwrap();
    for dtype in [DType::F64, DType::F32, DType::Bf16] {
        let numbers = numbers.cast(dtype).unwrap();
        assert_eq!(numbers.find(|x| x < 0.0).unwrap(), Some(-2.0), "{dtype}");
        assert_eq!(numbers.permute(&[1, 0]).unwrap().find(|x| x > 1.0).unwrap(), Some(3.0), "{dtype}");
        assert_eq!(numbers.find(f64::is_nan).unwrap(), None, "{dtype}");
    }
    assert_eq!(Tensor::scalar(1u32).find(|_| true).unwrap(), None);
}

#[test]
fn a_view_is_the_same_if_it_shows_the_same_elements_of_the_same_buffer() {
    let t = Tensor::zeros([2, 2], DType::F32);
    let first = t.slice(0, 0..1).unwrap();
    assert!(t.is_same_view(&t.clone()) && first.is_same_view(&t.slice(0, 0..1).unwrap()));
    let others = [first, t.permute(&[1, 0]).unwrap(), t.reshape([4]).unwrap(), t.duplicate().unwrap()];
    assert!(others.iter().all(|other| !t.is_same_view(other)), "{others:?}");
    assert!(!others[0].is_same_view(&t.slice(0, 1..2).unwrap()));
}
