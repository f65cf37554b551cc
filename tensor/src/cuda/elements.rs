//! What tensors need of a device: copies of views, conversions, sums.

use super::layout::Layout;
use super::module::c_name;
use super::{Module, Out, Tiles};
use crate::{DType, Error, Result, Tensor};

/// The kernels.
pub static KERNELS: Module = Module {
    name: "elements",
    source: include_str!("elements.cu"),
    headers: &[],
    kernels: &[
        "put_view<T>",
        "put_packs<T>",
        "convert<float, double>",
        "convert<float, bf16>",
        "convert<double, float>",
        "convert<double, bf16>",
        "convert<bf16, float>",
        "convert<bf16, double>",
        "add_row<T>",
        "sum_rows<float, float|bf16>",
        "sum_rows<double, double>",
        "sum_rows<bf16, float|bf16>",
        "add_pieces<float, float|bf16>",
        "add_pieces<double, double>",
        "move_towards<float|double>",
        "fill_with<T>",
    ],
};

/// A contiguous copy of a view on a GPU.
pub(crate) fn contiguous(view: &Tensor) -> Result<Tensor> {
    let mut copy = view.empty_like()?;
    put(copy.as_out("contiguous", false)?, view)?;
    Ok(copy)
}

/// A contiguous tensor on a GPU in another floating-point type.
pub(crate) fn cast(from: &Tensor, dtype: DType) -> Result<Tensor> {
    if [from.dtype(), dtype].contains(&DType::Index) {
        return Err(Error::DType { op: "cast", expected: "floating-point", actual: DType::Index });
    }
    let mut to = Tensor::empty_on(&from.device(), from.shape().clone(), dtype)?;
    let narrower = if from.dtype().size() < dtype.size() { from.dtype() } else { dtype };
    let kernel = format!("convert<{}, {}>", c_name(from.dtype()), c_name(dtype));
    let launch = KERNELS.launch(from.gpu("cast")?, &kernel, from.dtype())?.over_packs(from.count(), narrower);
    // SAFETY: both have as many elements, of the types in the kernel's name.
    unsafe { launch.input(from)?.output(&mut to)?.count(from.count()).run()? };
    Ok(to)
}

/// Stores or adds the elements of a view in order. Errors: [`Error::DType`], [`Error::Shape`].
pub fn put(out: Out<'_>, values: &Tensor) -> Result<()> {
    if out.count() != values.count() {
        return Err(Error::shape("put", format!("{} elements", out.count()), values.shape()));
    }
    put_within(out, 0, &values.shape().contiguous_strides(), values)
}

/// Stores or adds the elements of a view in a part of `out`, and leaves the rest as it is: element (i, j, ...) goes to
/// `start` plus the sum of the positions times the strides. The mirror image of reading a view; two elements must not
/// go to one place. Errors: [`Error::DType`], [`Error::OutOfRange`]. Panics unless there is a stride for each axis.
pub fn put_within(out: Out<'_>, start: usize, strides: &[usize], values: &Tensor) -> Result<()> {
    assert_eq!(strides.len(), values.rank(), "strides of a place for values");
    let (dtype, count) = (values.dtype(), values.count());
    out.ensure_dtype("put", dtype)?;
    let (source, target) = (Layout::merged(values.shape(), values.strides()), Layout::merged(values.shape(), strides));
    let last = target.reach().and_then(|reach| reach.checked_add(start)).unwrap_or(usize::MAX);
    if count > 0 && last >= out.count() {
        return Err(Error::OutOfRange { op: "put", what: "the last element", index: last, bound: out.count() });
    }
    let (from, to) = (values.address("put", out.gpu())?, out.address() + (start * dtype.size()) as u64);
    // Indices are moved as f32, which has the same size.
    let moved = if dtype == DType::Index && !out.accumulate { DType::F32 } else { dtype };
    let in_packs = [(&source, from), (&target, to)]
        .iter()
        .all(|(layout, address)| address.is_multiple_of(16) && layout.is_in_packs(dtype.per_pack()));
    let launch = if in_packs {
        KERNELS.launch(out.gpu(), "put_packs<T>", moved)?.over_packs(count, dtype)
    } else {
        KERNELS.launch(out.gpu(), "put_view<T>", moved)?.over(count)
    };
    let launch = launch.pointer(from).layout(&source)?.pointer(to).layout(&target)?;
    // SAFETY: the source is the view's layout, and the target ends within `out`, by the check above.
    unsafe { launch.int(out.accumulate.into()).count(count).run() }
}

/// y (R, C) += row (C), regardless of `accumulate` in `y`. Errors: [`Error::Shape`], [`Error::DType`],
/// [`Error::Device`], [`Error::NotContiguous`].
pub fn add_row(y: Out<'_>, row: &Tensor) -> Result<()> {
    let (count, columns) = (y.count(), row.count());
    if count != 0 && (columns == 0 || !count.is_multiple_of(columns)) {
        return Err(Error::shape("add_row", format!("a row whose length divides {count}"), row.shape()));
    }
    let row = row.cast(y.dtype().of_sums())?;
    let tiles = Tiles::new(count.checked_div(columns).unwrap_or(0), columns, y.dtype());
    let launch = tiles.sweep(KERNELS.launch(y.gpu(), "add_row<T>", y.dtype())?);
    // SAFETY: y has rows as long as `row`, by the check above.
    unsafe { tiles.describe(launch.pointer(y.address()).input(&row)?)?.run() }
}

/// out (O, I) = Σ x (O, S, I) over S, in a fixed order; `extents` are O, S and I. `out` has a type whose
/// sums are those of x ([`DType::of_sums`]). Errors: [`Error::DType`], [`Error::Shape`], [`Error::NotContiguous`].
pub fn sum_rows(x: &Tensor, [outer, rows, columns]: [usize; 3], out: Out<'_>) -> Result<()> {
    let product = |extents: &[usize]| extents.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent));
    if [x.count(), out.count()].map(Some) != [product(&[outer, rows, columns]), product(&[outer, columns])] {
        return Err(Error::shape("sum_rows", format!("({outer}, {rows}, {columns})"), x.shape()));
    }
    let wrong = |expected, actual| Err(Error::DType { op: "sum_rows", expected, actual });
    match x.dtype() {
        DType::Index => return wrong("floating-point", x.dtype()),
        summed if summed.of_sums() != out.dtype().of_sums() => return wrong("matching floating-point", out.dtype()),
        _ => {}
    }
    let kernel = format!("sum_rows<{}, {}>", c_name(x.dtype()), c_name(out.dtype()));
    let tiles = Tiles::new(rows, columns, x.dtype());
    let mut partial = tiles.partial(x, outer, 1)?;
    let launch = tiles.sum(KERNELS.launch(out.gpu(), &kernel, x.dtype())?, outer).input(x)?.output(&mut partial)?;
    // SAFETY: x and the result have so many elements, by the check above, and there is a place for each partial sum.
    unsafe { tiles.describe(launch.out(Some(&out))?.extents([tiles.strips])?)?.run() }
}

/// The sums of x (P, C) over P, in a fixed order: the first ones go to the first place, and the last ones to the last,
/// as many as each has room for. A block has all rows of its columns, so there should not be more than some hundreds.
/// Errors: [`Error::DType`] unless the places are of one type, whose sums are x's; [`Error::Shape`] unless both
/// together have room for C sums, or only one is wanted, and has room for no more; [`Error::NotContiguous`].
pub fn add_pieces(x: &Tensor, places: [Option<Out<'_>>; 2]) -> Result<()> {
    let [pieces, columns] = x.dims("add_pieces", "pieces (P, C)")?;
    let [first, last] = &places;
    let Some(out) = first.as_ref().or(last.as_ref()) else { return Ok(()) };
    places.iter().flatten().try_for_each(|place| place.ensure_dtype("add_pieces", out.dtype()))?;
    x.ensure_dtype("add_pieces", out.dtype().of_sums())?;
    let [of_first, of_last] = [first, last].map(|place| place.as_ref().map(Out::count));
    let split = of_first.or_else(|| columns.checked_sub(of_last?)).filter(|&split| split <= columns);
    let Some(split) = split.filter(|split| of_last.is_none_or(|of_last| split + of_last == columns)) else {
        return Err(Error::shape("add_pieces", "as many columns as there is room for sums", x.shape()));
    };
    let tiles = Tiles::new(pieces, columns, x.dtype());
    let kernel = format!("add_pieces<{}, {}>", c_name(x.dtype()), c_name(out.dtype()));
    let launch = KERNELS.launch(out.gpu(), &kernel, x.dtype())?.blocks(tiles.strips).input(x)?;
    let launch = launch.out(first.as_ref())?.out(last.as_ref())?.extents([split])?;
    // SAFETY: x has so many elements, and the places have room for the sums before and after the split, by the checks
    // above.
    unsafe { tiles.describe(launch)?.run() }
}

/// [`Tensor::move_towards`], whose operands agree in shape.
pub(crate) fn move_towards(y: &mut Tensor, x: &Tensor, rate: &Tensor) -> Result<()> {
    let (count, dtype) = (y.count(), y.dtype());
    [x, rate].into_iter().try_for_each(|operand| operand.ensure_dtype("move_towards", dtype))?;
    let launch = KERNELS.launch(x.gpu("move_towards")?, "move_towards<T>", dtype)?.over(count);
    // SAFETY: both have as many elements, as the caller has checked.
    unsafe { launch.output(y)?.input(x)?.input(rate)?.count(count).run() }
}

/// Fills a tensor with a number.
pub(crate) fn fill(to: &mut Tensor, value: f64) -> Result<()> {
    let (count, dtype) = (to.count(), to.dtype());
    let gpu = std::sync::Arc::clone(to.gpu("fill")?);
    let launch = KERNELS.launch(&gpu, "fill_with<T>", dtype)?.over(count).output(to)?;
    // SAFETY: the tensor has so many elements.
    unsafe { launch.number(value, dtype).count(count).run() }
}
