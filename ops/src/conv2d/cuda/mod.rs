//! The GPU's side of [`conv2d`](super::conv2d): matrices of patches (im2col), some images at a time, and matrix
//! products; in bf16 kernels without such matrices, [on tensor cores](tensor_cores) unless there are many output
//! channels, for the gradient of a weight with few of them, and for [images](few_channels).

mod few_channels;
mod tensor_cores;

use super::geometry::Geometry;
use crate::gelu;
use crate::linear::cuda::{backward_weight as backward_product, ensure_dtypes};
use crate::linear::tall::{self, Tall};
use few_channels::FewChannels;
use std::ops::Range;
use tensor::cuda::elements::{add_pieces, put, put_within, sum_rows};
use tensor::cuda::{Gemm, Matrix, Module, Out};
use tensor::{DType, Result, Tensor};
use tensor_cores::Direct;

pub static KERNELS: Module = Module {
    name: "conv2d",
    source: include_str!("kernel.cu"),
    headers: &[
        tall::HEADER,
        gelu::cuda::NORMAL,
        ("tensor_cores.cuh", include_str!("tensor_cores.cuh")),
        ("few_channels.cuh", include_str!("few_channels.cuh")),
    ],
    kernels: &[
        "conv2d_patches<T>",
        "conv2d_gather<T>",
        "conv2d_on_tensor_cores<32|64|128, false|true>",
        "conv2d_backward_weight",
        "conv2d_of_few_channels<16|32|48|64>",
        "conv2d_backward_weight_of_few_channels<16|32|48|64>",
    ],
};

/// The maximum bytes of a matrix of patches, unless a single image needs more. In this crate's own tests it is so small
/// that the images take several matrices.
const PATCHES: usize = if cfg!(test) { 4 << 10 } else { 256 << 20 };

/// The most multiply-adds for each element of a patch and of dy with which patches are not written to memory for the
/// gradient of the weight. Writing and reading them takes longer than a product not quite bound by memory loses.
const INTENSITY: usize = 128;

/// y (N, HO, WO, O) from x (N, H, W, I), weight (O, I, KH, KW) and bias (O); or GELU of that.
pub fn forward(
    g: &Geometry,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    gelu: bool,
    y: &mut Tensor,
) -> Result<()> {
    ensure_dtypes("conv2d", x, [Some(weight), bias])?;
    let mut out = y.as_out("conv2d", false)?;
    let reordered = reorder(g, weight, x.dtype())?;
    if let Some(call) = FewChannels::of(g, x, (out.dtype(), out.address()))? {
        return call.forward(&reordered, bias, gelu, &out);
    }
    if let Some(product) = Direct::forward(g, x, weight, &out)? {
        return product.run(&reordered, bias, gelu, &out);
    }
    for images in chunks(g, x.dtype()) {
        let patches = patches(g, x, images.clone())?;
        let Range { start, end } = pixels(g, &images);
        let extents = [end - start, g.outputs, row(g, x.dtype())];
        let product = Gemm::new("conv2d", Matrix::plain(&patches), Matrix::transposed(&reordered), extents);
        product.row(bias).into(out.part(start * g.outputs, (end - start) * g.outputs))?;
    }
    if gelu {
        let before = std::mem::replace(y, y.empty_like()?);
        gelu::cuda::forward(&before, y)?;
    }
    Ok(())
}

/// dbias from dy.
fn backward_bias(g: &Geometry, dy: &Tensor, dbias: Option<Out<'_>>) -> Result<()> {
    dbias.map_or(Ok(()), |dbias| sum_rows(dy, [1, g.pixels(), g.outputs], dbias))
}

/// dx (N, H, W, I) from dy (N, HO, WO, O).
pub fn backward_input(g: &Geometry, dy: &Tensor, weight: &Tensor, mut dx: Out<'_>) -> Result<()> {
    dx.ensure_dtype("conv2d", dy.dtype())?;
    if let Some(product) = Direct::backward(g, dy, weight, &dx)? {
        let weight = weight.permute(&[1, 2, 3, 0])?.contiguous()?.cast(dy.dtype())?;
        return product.run(&weight, None, false, &dx);
    }
    let weight = reorder(g, weight, dy.dtype())?;
    let ([height, width], row) = (g.input, row(g, dy.dtype()));
    for images in chunks(g, dy.dtype()) {
        let upstream = part(dy, &images)?;
        let Range { start, end } = pixels(g, &images);
        let mut dpatches = Tensor::empty_on(&dy.device(), [end - start, row], dy.dtype())?;
        let extents = [end - start, row, g.outputs];
        let product = Gemm::new("conv2d", Matrix::plain(&upstream), Matrix::plain(&weight), extents);
        product.into(dpatches.as_out("conv2d", false)?)?;
        let image = height * width * g.inputs;
        let dx = dx.part(images.start * image, images.len() * image);
        let launch = KERNELS.launch(dx.gpu(), "conv2d_gather<T>", dy.dtype())?.blocks(images.len() * height);
        let launch = launch.input(&dpatches)?.out(Some(&dx))?.extents([height, width, g.inputs])?;
        let launch = launch.extents(g.kernel)?.extents(g.output)?.count(row).extents([g.stride, g.padding])?;
        // SAFETY: dx has these images, and dpatches the patches of them all.
        unsafe { launch.run()? };
    }
    Ok(())
}

/// dweight (O, I, KH, KW) and dbias (O), if they are wanted, from dy (N, HO, WO, O) and x.
pub fn backward_weight(g: &Geometry, dy: &Tensor, x: &Tensor, [dweight, dbias]: [Option<Out<'_>>; 2]) -> Result<()> {
    let Some(dweight) = dweight else { return backward_bias(g, dy, dbias) };
    let ([down, across], outputs, row) = (g.kernel, g.outputs, row(g, x.dtype()));
    let mut sums = Tensor::zeros_on(&x.device(), [outputs, row], dweight.dtype())?;
    let tall = Tall::of([g.pixels(), outputs, row], INTENSITY, &sums.as_out("conv2d", true)?, dbias.as_ref());
    // A pack of a patch is one of x if it has whole packs; the kernel counts pixels in an `int`.
    let in_place = g.inputs.is_multiple_of(8) && i32::try_from(g.pixels()).is_ok();
    let few = FewChannels::of(g, x, (dy.dtype(), dy.address("conv2d", dweight.gpu())?))?;
    let fit = dbias.iter().chain([&dweight]).all(|out| out.dtype() == DType::F32) && dy.is_contiguous();
    match (few.filter(|_| fit), tall.filter(|_| in_place)) {
        (Some(call), _) => call.backward_weight(dy, sums.as_out("conv2d", false)?, dbias)?,
        (None, Some(tall)) if tall::in_packs(dy, dy.count())? && tall::in_packs(x, x.count())? => {
            multiply_in_place(&tall, g, [dy, x], sums.as_out("conv2d", false)?, dbias)?;
        }
        _ => {
            let mut dbias = dbias;
            for images in chunks(g, x.dtype()) {
                let (upstream, patches) = (part(dy, &images)?, patches(g, x, images.clone())?);
                let extents = [pixels(g, &images).len(), outputs, row];
                let of_bias = dbias.as_mut().map(|dbias| dbias.part(0, outputs));
                backward_product([&upstream, &patches], extents, [Some(sums.as_out("conv2d", true)?), of_bias])?;
                dbias.iter_mut().for_each(|dbias| dbias.accumulate = true); // the next images' are added
            }
        }
    }
    let sums = sums.slice(1, 0..g.patch())?.contiguous()?.reshape([outputs, down, across, g.inputs])?;
    put(dweight, &sums.permute(&[0, 3, 1, 2])?.contiguous()?)
}

/// dyᵀ·patches (O, P), of patches whose packs are copied from x itself, and the sum of dy's rows.
fn multiply_in_place(
    tall: &Tall,
    g: &Geometry,
    [dy, x]: [&Tensor; 2],
    sums: Out<'_>,
    dbias: Option<Out<'_>>,
) -> Result<()> {
    let mut partial = tall.partial(dy, dbias.is_some())?;
    let launch = KERNELS.launch_on(dy, "conv2d_backward_weight")?.input(dy)?.input(x)?.output(&mut partial)?;
    let launch =
        tall.describe(launch.int(dbias.is_some().into()))?.extents(g.input)?.extents([g.inputs, g.kernel[1]])?;
    // SAFETY: the maps have the extents of the convolution, and the patches those that `tall` describes.
    unsafe { launch.extents(g.output)?.extents([g.stride, g.padding])?.run()? };
    add_pieces(&partial, [Some(sums), dbias])
}

/// The ranges of images whose patches form one matrix each; without images, a single empty range.
fn chunks(g: &Geometry, dtype: DType) -> impl Iterator<Item = Range<usize>> + use<> {
    let (images, bytes) = (g.images, pixels(g, &(0..1)).len() * row(g, dtype) * dtype.size());
    let chunk = (PATCHES / bytes.max(1)).max(1);
    (0..images.max(1)).step_by(chunk).map(move |start| start..(start + chunk).min(images))
}

/// The output pixels of some images.
fn pixels(g: &Geometry, images: &Range<usize>) -> Range<usize> {
    let pixels = g.output[0] * g.output[1];
    images.start * pixels..images.end * pixels
}

/// Some images of a map.
fn part(map: &Tensor, images: &Range<usize>) -> Result<Tensor> {
    map.slice(0, images.clone())
}

/// The length of a row of patches: one patch, padded to whole packs.
fn row(g: &Geometry, dtype: DType) -> usize {
    g.patch().next_multiple_of(dtype.per_pack())
}

/// The patches of the output pixels of some images, (pixels, row).
fn patches(g: &Geometry, x: &Tensor, images: Range<usize>) -> Result<Tensor> {
    let row = row(g, x.dtype());
    let mut patches = Tensor::empty_on(&x.device(), [pixels(g, &images).len(), row], x.dtype())?;
    let launch = KERNELS.launch_on(x, "conv2d_patches<T>")?.blocks(images.len() * g.output[0]);
    let launch = launch.input(&part(x, &images)?)?.output(&mut patches)?.extents(g.input)?.extents([g.inputs])?;
    let launch = launch.extents(g.kernel)?.extents([g.output[0], g.output[1] * row, row, g.stride, g.padding])?;
    // SAFETY: x has these images, and there is a row of patches for each of their output pixels.
    unsafe { launch.run()? };
    Ok(patches)
}

/// The weight (O, I, KH, KW) in the order of the patches and padded like them, (O, row), in their type.
fn reorder(g: &Geometry, weight: &Tensor, dtype: DType) -> Result<Tensor> {
    let weight = weight.permute(&[0, 2, 3, 1])?.contiguous()?.cast(dtype)?;
    let (row, [_, across]) = (row(g, dtype), g.kernel);
    if row == g.patch() {
        return Ok(weight);
    }
    let mut reordered = Tensor::zeros_on(&weight.device(), [g.outputs, row], dtype)?;
    put_within(reordered.as_out("conv2d", false)?, 0, &[row, across * g.inputs, g.inputs, 1], &weight)?;
    Ok(reordered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{array, uniform};
    use crate::check::device::{parity, tolerance};
    use autograd::gradcheck::relative_error;
    use standin::Standin;
    use tensor::Device;
    use tensor::cpu::isa::unlimited;
    use tensor::cuda::Gpu;
    use tensor::cuda::nvidia::compiler::version;

    #[test]
    fn images_in_several_matrices_of_patches() {
        let Some(gpu) = Gpu::for_tests(9) else { return };
        let device = Device::Cuda(gpu);
        // Both runs of a computation must use the same instruction set.
        let _unlimited = unlimited();
        for case in crate::conv2d::cases::cases() {
            for dtype in [DType::F32, DType::Bf16] {
                let found = parity(&case, &device, dtype, false).unwrap();
                assert!(found.value.max(found.gradient) <= tolerance(dtype), "{} {dtype}: {found:?}", case.name);
            }
        }
    }

    fn place(tensor: &mut Tensor) -> Out<'_> {
        tensor.as_out("conv2d", false).unwrap()
    }

    #[test]
    fn what_is_computed_without_a_matrix_of_patches() {
        let Some(gpu) = Gpu::for_tests(9) else { return };
        let device = Device::Cuda(gpu);
        let map =
            |shape: [usize; 4], stream| uniform(shape, stream).cast(DType::Bf16).unwrap().to_device(&device).unwrap();
        for ([images, height, width, inputs], outputs, kernel, [stride, padding]) in [
            ([2, 9, 7, 8], 16, [3, 3], [2, 1]),
            ([1, 40, 23, 16], 72, [3, 3], [1, 1]),
            ([3, 5, 4, 8], 8, [5, 2], [3, 2]),
            ([9, 2, 1, 8], 8, [2, 1], [1, 0]),
            // Few channels; so many rows that a block takes several, also past the end of an image.
            ([1, 1300, 8, 3], 32, [3, 3], [1, 1]),
            ([41, 40, 16, 1], 64, [5, 5], [1, 2]),
            ([2, 900, 40, 3], 48, [3, 3], [2, 4]),
        ] {
            let output = [(height, kernel[0]), (width, kernel[1])]
                .map(|(extent, taps): (usize, usize)| (extent + 2 * padding - taps) / stride + 1);
            let g = Geometry { images, input: [height, width], inputs, kernel, output, outputs, stride, padding };
            let (x, dy) = (map([images, height, width, inputs], 1), map([images, output[0], output[1], outputs], 2));
            let sums = || Tensor::zeros_on(&device, [outputs, row(&g, DType::Bf16)], DType::F32).unwrap();
            let biases = || Tensor::zeros_on(&device, [outputs], DType::F32).unwrap();
            let ([mut got, mut expected], [mut got_bias, mut expected_bias]) = ([sums(), sums()], [biases(), biases()]);
            let extents = [g.pixels(), outputs, row(&g, DType::Bf16)];
            let of_bias = Some(place(&mut got_bias));
            let patches = patches(&g, &x, 0..images).unwrap();
            match FewChannels::of(&g, &x, (DType::Bf16, 0)).unwrap() {
                Some(call) => {
                    let weight = map([1, 1, outputs, row(&g, DType::Bf16)], 3);
                    let [mut y, mut expected_y] =
                        [(); 2].map(|()| Tensor::empty_on(&device, [g.pixels() * outputs], DType::Bf16).unwrap());
                    call.forward(&weight, None, false, &place(&mut y)).unwrap();
                    let product = Gemm::new("conv2d", Matrix::plain(&patches), Matrix::transposed(&weight), extents);
                    product.into(place(&mut expected_y)).unwrap();
                    let error = relative_error(&array(&y).data, &array(&expected_y).data);
                    assert!(error < tolerance(DType::Bf16), "{g:?}: {error}");
                    call.backward_weight(&dy, place(&mut got), of_bias).unwrap();
                }
                None => multiply_in_place(&Tall::new(extents), &g, [&dy, &x], place(&mut got), of_bias).unwrap(),
            }
            backward_product([&dy, &patches], extents, [Some(place(&mut expected)), None]).unwrap();
            backward_bias(&g, &dy, Some(place(&mut expected_bias))).unwrap();
            let of_patch = |sums: Tensor| sums.slice(1, 0..g.patch()).unwrap().contiguous().unwrap();
            let error = [(of_patch(got), of_patch(expected)), (got_bias, expected_bias)]
                .map(|(got, expected)| relative_error(&array(&got).data, &array(&expected).data));
            assert!(error.iter().all(|&error| error < tolerance(DType::F32)), "{g:?}: {error:?}");
        }
    }

    #[test]
    fn in_ptx() {
        let standin = Standin::in_ptx(version());
        standin.into_iter().for_each(|standin| _ = standin.repeat(&["without_a_matrix_of_patches"], &[]));
    }
}
