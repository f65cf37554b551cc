//! Tests of [`dwconv`](super) beyond its [cases](super::cases).

use super::*;
use crate::case::{array, uniform};
use autograd::Tape;
use autograd::exact::Array;
use standin::Standin;
use tensor::cpu::isa::{Isa, limits};
use tensor::cuda::Gpu;
use tensor::cuda::nvidia::compiler::version;
use tensor::{DType, Float};

/// The elements of a map that lies, from `offset` on, in pixels of `stride` elements; the rest is 7.
fn spread<T: Float>(map: &Array<f64>, offset: usize, stride: usize) -> Vec<T> {
    let channels = map.shape[3];
    let mut wide = vec![T::of(7.0); map.data.len() / channels * stride];
    for (place, &value) in map.data.iter().enumerate() {
        wide[place / channels * stride + offset + place % channels] = T::of(value);
    }
    wide
}

fn assert_close<T: Float>(got: &[T], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), expected.len());
    for (&got, &expected) in got.iter().zip(expected) {
        assert!((got.as_f64() - expected).abs() <= tolerance, "{what}: {got}, not {expected}");
    }
}

fn kernels_agree_with_the_reference<T: Float>(tolerance: f64) {
    for (shape, kernel) in [([2, 5, 11, 51], 5), ([1, 4, 3, 8], 3), ([1, 3, 9, 19], 7), ([2, 1, 4, 33], 3)] {
        let channels = shape[3];
        let e = Geometry { images: shape[0], height: shape[1], width: shape[2], channels, kernel };
        let [x, dy, old] = [1, 2, 3].map(|stream| array(&uniform(shape, stream)));
        let weight = array(&uniform([channels, 1, kernel, kernel], 4));
        let bias = array(&uniform([channels], 5));
        // As the values of a qkv buffer (N, H, W, 3C) that ends where they end, beside an output of its own.
        let (offset, stride) = (2 * channels, 3 * channels);
        let of = |values: &Array<f64>| values.data.iter().map(|&value| T::of(value)).collect::<Vec<T>>();
        let (x_wide, old_wide) = (spread::<T>(&x, offset, stride), spread::<T>(&old, offset, stride));
        let (narrow_dy, weights) = (Map { data: &of(&dy), stride: channels }, of(&weight));
        let kernel_of_weights = Kernel { weight: &weights, residual: false };
        let x_map = Map { data: &x_wide[offset..], stride };

        let mut y = of(&old);
        let out = MapMut { out: Out { data: &mut y, accumulate: true }, stride: channels };
        cpu::forward(e, x_map, kernel_of_weights, Some(&of(&bias)), out);
        let value = reference::dwconv(&x, &weight, Some(&bias));
        let expected: Vec<f64> = value.data.iter().zip(&old.data).map(|(y, old)| y + old).collect();
        assert_close(&y, &expected, tolerance, "y");

        let turned = Array::from_fn(&weight.shape, |p| weight.at(&[p[0], 0, kernel - 1 - p[2], kernel - 1 - p[3]]));
        let dx = reference::dwconv(&dy, &turned, None);
        for accumulate in [false, true] {
            let mut wide = old_wide.clone();
            let out = MapMut { out: Out { data: &mut wide[offset..], accumulate }, stride };
            cpu::backward_input(e, narrow_dy, kernel_of_weights, out);
            let sum = dx.data.iter().zip(&old.data).map(|(dx, old)| if accumulate { dx + old } else { *dx });
            let expected = spread::<f64>(&Array { data: sum.collect(), ..dx.clone() }, offset, stride);
            assert_close(&wide, &expected, tolerance, "dx");
        }

        let mut dweight = of(&weight);
        cpu::backward_weight(e, narrow_dy, x_map, Some(Out::store(&mut dweight)), None);
        let mut from_narrow = vec![T::zero(); dweight.len()];
        let narrow_x = Map { data: &of(&x), stride: channels };
        cpu::backward_weight(e, narrow_dy, narrow_x, Some(Out::store(&mut from_narrow)), None);
        assert_eq!(dweight, from_narrow);
        // <dy, dwconv(x, w)> is linear in w, so <dw, w> must give it back.
        let products = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let dweight: Vec<f64> = dweight.iter().map(|dw| dw.as_f64()).collect();
        let expected = products(&dy.data, &reference::dwconv(&x, &weight, None).data);
        let got = products(&dweight, &weight.data);
        assert!((got - expected).abs() <= 100.0 * tolerance, "<dw, w> is {got}, not {expected}");
    }
}

#[test]
fn maps_inside_wider_tensors_on_every_instruction_set() {
    for _limited in limits(&Isa::SIMD) {
        kernels_agree_with_the_reference::<f32>(1e-5);
        kernels_agree_with_the_reference::<f64>(1e-13);
    }
}

#[test]
fn maps_inside_wider_tensors_on_a_gpu() {
    let Some(gpu) = Gpu::for_tests(5) else { return };
    let device = Device::Cuda(gpu);
    let there = |values: Vec<f32>| Tensor::from_slice(&values, [values.len()])?.to_device(&device);
    let of = |values: &Array<f64>| there(values.data.iter().map(|&value| value as f32).collect());
    let check = |[height, width, channels, kernel]: [usize; 4], offset: usize, stride: usize| {
        let e = Geometry { images: 2, height, width, channels, kernel };
        let shape = [2, height, width, channels];
        let [x, dy, old] = [1, 2, 3].map(|stream| array(&uniform(shape, stream)));
        let weight = array(&uniform([channels, 1, kernel, kernel], 4));
        let bias = array(&uniform([channels], 5));
        let x_map = cuda::Map::new(&there(spread(&x, offset, stride))?, offset, stride)?;
        let [narrow_x, narrow_dy] = [cuda::Map::new(&of(&x)?, 0, channels)?, cuda::Map::new(&of(&dy)?, 0, channels)?];
        let (weight_there, bias_there) = (of(&weight)?, of(&bias)?);
        let kernel_there = cuda::Kernel { weight: &weight_there, residual: false };

        let mut y = of(&old)?;
        let out = cuda::MapMut { out: y.as_out("dwconv", true)?, stride: channels };
        cuda::forward(e, &x_map, kernel_there, Some(&bias_there), out)?;
        let value = reference::dwconv(&x, &weight, Some(&bias));
        let expected: Vec<f64> = value.data.iter().zip(&old.data).map(|(y, old)| y + old).collect();
        assert_close(&y.to_vec::<f32>()?, &expected, 1e-5, "y");

        let turned = Array::from_fn(&weight.shape, |p| weight.at(&[p[0], 0, kernel - 1 - p[2], kernel - 1 - p[3]]));
        let dx = reference::dwconv(&dy, &turned, None);
        let products = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut found: Vec<[Vec<f32>; 2]> = vec![];
        for (x, accumulate) in [(&x_map, false), (&narrow_x, true)] {
            let mut wide = there(spread(&old, offset, stride))?;
            let [mut dweight, mut dbias] = [of(&weight)?, of(&bias)?];
            let count = wide.count();
            let mut whole = wide.as_out("dwconv", accumulate)?;
            let out = cuda::MapMut { out: whole.part(offset, count - offset), stride };
            let of_parameters = [dweight.as_out("dwconv", false)?, dbias.as_out("dwconv", false)?];
            cuda::backward_weight(e, &narrow_dy, x, of_parameters.map(Some))?;
            cuda::backward_input(e, &narrow_dy, kernel_there, out)?;
            let sum = dx.data.iter().zip(&old.data).map(|(dx, old)| if accumulate { dx + old } else { *dx });
            let expected = spread::<f64>(&Array { data: sum.collect(), ..dx.clone() }, offset, stride);
            assert_close(&wide.to_vec::<f32>()?, &expected, 1e-5, "dx");
            found.push([dweight.to_vec()?, dbias.to_vec()?]);
        }
        assert_eq!(found[0], found[1]);
        let mut alone = of(&weight)?;
        cuda::backward_weight(e, &narrow_dy, &x_map, [Some(alone.as_out("dwconv", false)?), None])?;
        assert_eq!(alone.to_vec::<f32>()?, found[0][0]);
        // <dy, dwconv(x, w)> is linear in w, so <dw, w> must give it back.
        let dweight: Vec<f64> = found[0][0].iter().map(|&dw| dw.into()).collect();
        let expected = products(&dy.data, &reference::dwconv(&x, &weight, None).data);
        assert_close(&[products(&dweight, &weight.data)], &[expected], 1e-3, "<dw, w>");
        tensor::Result::Ok(())
    };
    // Whole packs of channels, as the values of a qkv buffer, in several tiles, bands and chunks; misaligned packs;
    // parts of packs; odd channels; and so many rows that blocks take several bands, and groups of blocks add up
    // the weight's gradient.
    for (extents, offset, stride) in [
        ([17, 11, 72, 5], 144, 216),
        ([6, 3, 8, 3], 3, 12),
        ([5, 11, 70, 5], 140, 210),
        ([4, 3, 8, 7], 3, 12),
        ([3, 9, 7, 5], 14, 21),
        ([1900, 2, 8, 3], 8, 16),
    ] {
        check(extents, offset, stride).unwrap();
    }
}

#[test]
fn in_ptx() {
    Standin::in_ptx(version()).into_iter().for_each(|standin| _ = standin.repeat(&["tensors_on_a_gpu"], &[]));
}

#[test]
fn a_map_beyond_its_tensor_is_refused() {
    let Some(gpu) = Gpu::for_tests(5) else { return };
    let device = Device::Cuda(gpu);
    let e = Geometry { images: 1, height: 2, width: 2, channels: 3, kernel: 3 };
    let zeros = |shape: &[usize]| Tensor::zeros_on(&device, shape, DType::F32).unwrap();
    let (x, weight, mut y) = (zeros(&[12]), zeros(&[3, 1, 3, 3]), zeros(&[12]));
    for (offset, stride) in [(1, 3), (0, 4), (0, 2)] {
        let out = cuda::MapMut { out: y.as_out("dwconv", false).unwrap(), stride: 3 };
        let x = cuda::Map::new(&x, offset, stride).unwrap();
        let error = cuda::forward(e, &x, cuda::Kernel { weight: &weight, residual: false }, None, out).unwrap_err();
        assert!(matches!(error, Error::Shape { op: "dwconv", .. }), "{error}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let tape = Tape::inference();
    let x = tape.constant(Tensor::zeros([1, 4, 4, 3], DType::F32));
    for weight in [[3, 1, 1, 1], [3, 1, 4, 4], [3, 1, 9, 9], [3, 1, 3, 5], [3, 3, 3, 3], [2, 1, 3, 3], [3, 1, 0, 0]] {
        let weight = tape.constant(Tensor::zeros(weight, DType::F32));
        let error = dwconv(&x, &weight, None).unwrap_err();
        assert!(matches!(error, autograd::Error::Tensor(Error::Shape { op: "dwconv", .. })), "{error}");
    }
}
