//! Depthwise convolution: one K×K kernel per channel, stride 1, zero padding.
//!
//! **Forward.** y[n, i, j, c] = b\[c\] + Σ_{a,b} x[n, i + a − P, j + b − P, c] · w[c, 0, a, b], with K odd and
//! P = (K − 1)/2, so that y has the shape of x (N, H, W, C); w is (C, 1, K, K), b (C) or none. Terms outside
//! the image are zero.
//!
//! **Backward.** x[n, i', j', c] meets w[c, 0, a, b] in y[n, i' − a + P, j' − b + P, c], hence dx[n, i', j', c] =
//! Σ_{a,b} dy[n, i' − a + P, j' − b + P, c] · w[c, 0, a, b]: the same correlation, of dy with the kernel rotated by
//! 180° (a → K − 1 − a, b likewise). dw[c, 0, a, b] = Σ_{n,i,j} dy[n, i, j, c] · x[n, i + a − P, j + b − P, c] and
//! db\[c\] = Σ_{n,i,j} dy[n, i, j, c]. Saved: x and w.
//!
//! **Residual.** [`dwconv_residual`] is x + dwconv(x), the position encoding as BiFormer uses it: equivalent to adding
//! one to the kernel's centre (a = b = P), in y and in dx; all else is as above.
//!
//! K is 3, 5 or 7: the kernels are compiled for each. Operands must be contiguous; f32 or f64, and on a GPU also x in bf16
//! with w and b in f32. Errors: [`tensor::Error::Shape`], [`tensor::Error::NotContiguous`], [`tensor::Error::DType`].
//! Source: `torch.nn.Conv2d` with `groups = C, padding = K // 2`, whose weight layout this is. In BiFormer: the position
//! encoding (K = 3) and the local context enhancement of the values (K = 5).

pub mod cases;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod geometry;
pub mod reference;

use autograd::{InputGrads, MultiplyAdds, Result, Rule, Slot, Var, rule_fields};
use cpu::{Kernel, Map, MapMut};
use geometry::Geometry;
use tensor::cpu::parallel::Out;
use tensor::cuda::Module;
use tensor::{Device, Error, Shape, Tensor, match_float};

/// The supported kernel extents K.
pub const SIZES: [usize; 3] = [3, 5, 7];
pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "each channel convolved with its own K×K kernel";

/// x (N, H, W, C) convolved channel by channel with `weight` (C, 1, K, K), K = 3, 5 or 7, plus `bias` (C) if there
/// is one: (N, H, W, C).
pub fn dwconv<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>) -> Result<Var<'t>> {
    convolve(x, weight, bias, false)
}

/// x + [`dwconv`]`(x, weight, bias)` in one pass: a residual around a convolution is equivalent to adding one to the
/// kernel's centre, forward and backward.
pub fn dwconv_residual<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>) -> Result<Var<'t>> {
    convolve(x, weight, bias, true)
}

fn convolve<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>, residual: bool) -> Result<Var<'t>> {
    let map = x.value().dims("dwconv", "x (N, H, W, C)")?;
    let geometry = geometry("dwconv", map, weight.value(), bias.map(Var::value))?;
    let channels = geometry.channels;
    let mut y = Tensor::empty_on(&x.value().device(), x.shape().clone(), x.dtype())?;
    match x.value().device() {
        Device::Cpu => match_float!(x.dtype(), "dwconv", T => cpu::forward::<T>(
            geometry,
            Map { data: x.value().as_slice("dwconv")?, stride: channels },
            Kernel { weight: weight.value().as_slice("dwconv")?, residual },
            bias.map(|bias| bias.value().as_slice("dwconv")).transpose()?,
            MapMut { out: Out::store(y.as_mut_slice("dwconv")?), stride: channels },
        )),
        Device::Cuda(_) => {
            let x = cuda::Map::new(x.value(), 0, channels)?;
            let kernel = cuda::Kernel { weight: weight.value(), residual };
            let y = cuda::MapMut { out: y.as_out("dwconv", false)?, stride: channels };
            cuda::forward(geometry, &x, kernel, bias.map(Var::value), y)?;
        }
    }
    let rule = || Dwconv { x: x.value().clone(), weight: weight.value().clone(), residual };
    let inputs: Vec<_> = [Some(x), Some(weight), bias].into_iter().flatten().collect();
    x.tape().record("dwconv", &inputs, y, rule)
}

/// The extents of a convolution of a map (N, H, W, C), if weight and bias fit it.
pub(crate) fn geometry(
    op: &'static str,
    [images, height, width, channels]: [usize; 4],
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> tensor::Result<Geometry> {
    let [filters, group, kernel, across] = weight.dims(op, "a weight (C, 1, K, K)")?;
    if [filters, group, kernel] != [channels, 1, across] || !SIZES.contains(&kernel) {
        let expected = format!("a weight ({channels}, 1, K, K) with K one of {SIZES:?}");
        return Err(Error::shape(op, expected, weight.shape()));
    }
    if let Some(bias) = bias.filter(|bias| *bias.shape() != [channels]) {
        return Err(Error::shape(op, format!("a bias of ({channels})"), bias.shape()));
    }
    Ok(Geometry { images, height, width, channels, kernel })
}

struct Dwconv {
    x: Tensor,
    weight: Tensor,
    residual: bool,
}

impl Rule for Dwconv {
    rule_fields!("dwconv", x, weight);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let map = self.x.dims("dwconv", "x (N, H, W, C)")?;
        let geometry = geometry("dwconv", map, &self.weight, None)?;
        let stride = geometry.channels;
        let (mut dx, mut dweight, mut dbias) = (grads.open(0)?, grads.open(1)?, grads.open(2)?);
        match dy.device() {
            Device::Cpu => match_float!(dy.dtype(), "dwconv", T => {
                let dy = Map::<T> { data: dy.as_slice("dwconv")?, stride };
                if let Some(out) = dx.out()? {
                    let kernel = Kernel { weight: self.weight.as_slice("dwconv")?, residual: self.residual };
                    cpu::backward_input(geometry, dy, kernel, MapMut { out, stride });
                }
                let x = Map { data: self.x.as_slice("dwconv")?, stride };
                cpu::backward_weight(geometry, dy, x, dweight.out()?, dbias.out()?);
            }),
            Device::Cuda(_) => {
                let [dy_map, x_map] = [cuda::Map::new(&dy, 0, stride)?, cuda::Map::new(&self.x, 0, stride)?];
                Slot::write_aside([&mut dweight, &mut dbias], &[&dy, &self.x], |outs| {
                    Ok(cuda::backward_weight(geometry, &dy_map, &x_map, outs)?)
                })?;
                if let Some(out) = dx.out_on_gpu()? {
                    let kernel = cuda::Kernel { weight: &self.weight, residual: self.residual };
                    cuda::backward_input(geometry, &dy_map, kernel, cuda::MapMut { out, stride })?;
                }
            }
        }
        [dx, dweight, dbias].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }

    /// Counts all positions of the kernel, including those that read padding.
    fn multiply_adds(&self, y: &Shape) -> MultiplyAdds {
        MultiplyAdds::product(y.count() * self.weight.shape()[1..].iter().product::<usize>())
    }
}

#[cfg(test)]
mod tests {
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
        for _limited in limits(&[Isa::Portable, Isa::Avx2, Isa::Avx512]) {
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
            let [narrow_x, narrow_dy] =
                [cuda::Map::new(&of(&x)?, 0, channels)?, cuda::Map::new(&of(&dy)?, 0, channels)?];
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
        for weight in [[3, 1, 1, 1], [3, 1, 4, 4], [3, 1, 9, 9], [3, 1, 3, 5], [3, 3, 3, 3], [2, 1, 3, 3], [3, 1, 0, 0]]
        {
            let weight = tape.constant(Tensor::zeros(weight, DType::F32));
            let error = dwconv(&x, &weight, None).unwrap_err();
            assert!(matches!(error, autograd::Error::Tensor(Error::Shape { op: "dwconv", .. })), "{error}");
        }
    }
}
