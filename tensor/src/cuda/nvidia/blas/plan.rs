//! How a product is described to cuBLASLt, and the algorithms that it recommends.

use super::{Queue, WORKSPACE, doing, failure, is_refusal};
use crate::cuda::{Operand, Product};
use crate::{DType, Result};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasStatus_t as Status};
use std::ffi::c_void;
use std::fmt;

/// How many algorithms are requested. At run time cuBLASLt may refuse the one that it has recommended first; and of
/// eight, the last ones were the fastest about as often as the second.
const CHOICES: usize = 16;

/// The largest block of the inner axis that its kernels process at once. Its split-K kernels are reported to leave out
/// an incomplete last block for some numbers of parts (CUDA 12.8 and 13.1, on H100 and later: pull request 2767 of
/// facebookexperimental/triton). So split-K is allowed only if all blocks are full.
const BLOCK: usize = 128;

/// The number of trailing zero bits of an address above which better alignment makes no difference.
const MAX_ALIGNED: u32 = 8;

/// What a plan depends on: everything about a product except its addresses, of which only the alignment counts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlanKey {
    extents: [usize; 3],
    batch: usize,
    strides: [usize; 3],
    transposed: [bool; 2],
    types: [DType; 2],
    tf32: bool,
    /// Whether a matrix is added. cuBLASLt recommends the same algorithms then, but runs other kernels.
    plus: bool,
    /// Whether a row is added.
    pub row: bool,
    /// The trailing zero bits of the addresses of A, B, C, what is added to C, and the row.
    pub alignment: [u32; 5],
}

impl PlanKey {
    pub fn of(product: &Product) -> Self {
        let Product { extents, batch, a, b, c, inputs, output, tf32, plus, row } = *product;
        // With nothing to add, an address is required all the same.
        let added = if plus == 0 { c.address } else { plus };
        // The address of every matrix of the batch has at least as many trailing zero bits as this value.
        let of_all = |address: u64, stride: usize, dtype: DType| match batch {
            1 => address,
            _ => address | (stride * dtype.size()) as u64,
        };
        Self {
            extents,
            batch,
            strides: [a.stride, b.stride, c.stride],
            transposed: [a.transposed, b.transposed],
            types: [inputs, output],
            tf32,
            plus: plus != 0,
            row: row != 0,
            alignment: [
                of_all(a.address, a.stride, inputs),
                of_all(b.address, b.stride, inputs),
                of_all(c.address, c.stride, output),
                of_all(added, c.stride, output),
                row,
            ]
            .map(|address| address.trailing_zeros().min(MAX_ALIGNED)),
        }
    }

    /// A product like this whose operands lie one after the other from `address` on, and where they end.
    pub fn product(&self, address: u64) -> (Product, u64) {
        let PlanKey { extents: [m, n, k], batch, strides, transposed, types: [inputs, output], .. } = *self;
        let mut end = address;
        let mut place = |count: usize, dtype: DType| {
            let start = end.next_multiple_of(1 << MAX_ALIGNED);
            end = start + (count * dtype.size()) as u64;
            start
        };
        let mut operand = |count, which: usize, transposed, dtype| Operand {
            address: place((batch - 1) * strides[which] + count, dtype),
            transposed,
            stride: strides[which],
        };
        let a = operand(m * k, 0, transposed[0], inputs);
        let b = operand(k * n, 1, transposed[1], inputs);
        let c = operand(m * n, 2, false, output);
        let plus = if self.plus { operand(m * n, 2, false, output).address } else { 0 };
        let row = if self.row { place(n, output) } else { 0 };
        (Product { extents: self.extents, batch, a, b, c, inputs, output, plus, row, tf32: self.tf32 }, end)
    }

    pub fn multiply_adds(&self) -> usize {
        let extents = self.extents.iter().product::<usize>();
        extents * self.batch
    }

    /// From the first byte of the result to the last, of all of a batch.
    pub fn bytes_of_result(&self) -> usize {
        let [m, n, _] = self.extents;
        ((self.batch - 1) * self.strides[2] + m * n) * self.types[1].size()
    }

    /// The key of the product without its epilogue.
    pub fn bare(self) -> Self {
        let [a, b, c, plus, _] = self.alignment;
        Self { row: false, alignment: [a, b, c, plus, MAX_ALIGNED], ..self }
    }
}

/// `401408x64 by 64x192, bf16 to bf16, a matrix added, a row added`
impl fmt::Display for PlanKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [m, n, k] = self.extents;
        write!(f, "{m}x{k} by {k}x{n}, {} to {}", self.types[0], self.types[1])?;
        if self.batch > 1 {
            write!(f, ", {} of them", self.batch)?;
        }
        f.write_str(if self.plus { ", a matrix added" } else { "" })?;
        f.write_str(if self.row { ", a row added" } else { "" })
    }
}

/// A product as cuBLASLt wants it described.
struct Described {
    product: sys::cublasLtMatmulDesc_t,
    /// The layouts of its operands, the first of which is our B, and of the result.
    layouts: [Layout; 3],
}

impl Described {
    /// cuBLASLt's matrices are column-major. A row-major matrix is the transpose of the column-major one in the same
    /// memory, so cuBLASLt is asked for Cᵀ = Bᵀ·Aᵀ, whose operands are B and A as stored.
    fn new(key: &PlanKey) -> Result<Self> {
        use sys::cublasComputeType_t as Compute;
        use sys::cublasLtEpilogue_t as Asked;
        use sys::cublasLtMatmulDescAttributes_t as Of;
        let PlanKey { extents: [m, n, k], strides, transposed: [a_transposed, b_transposed], types, .. } = *key;
        let [inputs, output] = types;
        let (compute, scale) = match inputs {
            DType::F64 => (Compute::CUBLAS_COMPUTE_64F, DType::F64),
            DType::F32 if key.tf32 => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, DType::F32),
            _ => (Compute::CUBLAS_COMPUTE_32F, DType::F32),
        };
        let turned = |rows, cols, transposed| if transposed { (cols, rows) } else { (rows, cols) };
        let layouts = [
            Layout::new(inputs, turned(k, n, b_transposed), key.batch, strides[1])?,
            Layout::new(inputs, turned(m, k, a_transposed), key.batch, strides[0])?,
            Layout::new(output, (m, n), key.batch, strides[2])?,
        ];
        let product = doing("describing", result::create_matmul_desc(compute, data_type(scale)?))?;
        let described = Self { product, layouts };
        // A bias has one element for each row of cuBLASLt's column-major D: each of our columns.
        let epilogue = if key.row { Asked::CUBLASLT_EPILOGUE_BIAS } else { Asked::CUBLASLT_EPILOGUE_DEFAULT };
        for (attribute, value) in [
            // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1.
            (Of::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(b_transposed)),
            (Of::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(a_transposed)),
            (Of::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as i32),
        ] {
            // SAFETY: the description is alive, and the value has four bytes.
            let set = unsafe { result::set_matmul_desc_attribute(product, attribute, (&raw const value).cast(), 4) };
            doing("an attribute", set)?;
        }
        Ok(described)
    }

    /// The algorithms that cuBLASLt expects to be the fastest, the best first; none if it refuses such a product.
    ///
    /// # Safety
    /// Handle and preference are alive.
    unsafe fn algorithms(
        &self,
        key: &PlanKey,
        handle: sys::cublasLtHandle_t,
        preference: sys::cublasLtMatmulPreference_t,
    ) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Prefer;
        let workspace = WORKSPACE;
        let [a_bytes, b_bytes, c_bytes, plus_bytes, _] = key.alignment.map(|zeros| 1u32 << zeros);
        let [first, second, c] = self.layouts.each_ref().map(|layout| layout.0);
        let prefer = |attribute, value: *const c_void, size| {
            // SAFETY: the preference is the caller's, and the values have the sizes that are given.
            let set = unsafe { result::set_matmul_pref_attribute(preference, attribute, value, size) };
            doing("a preference", set)
        };
        prefer(Prefer::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const workspace).cast(), size_of::<usize>())?;
        prefer(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (&raw const b_bytes).cast(), 4)?;
        prefer(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (&raw const a_bytes).cast(), 4)?;
        prefer(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (&raw const plus_bytes).cast(), 4)?;
        prefer(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (&raw const c_bytes).cast(), 4)?;
        // Of the reduction schemes for split-K only the one with a fixed order, or none: the same bits at every run.
        let choose = |scheme: sys::cublasLtReductionScheme_t| {
            let mask = scheme as u32;
            prefer(Prefer::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const mask).cast(), 4)?;
            let (mut choices, mut found) = (Vec::with_capacity(CHOICES), 0);
            // SAFETY: all of these are alive, and there is room for as many choices as are asked for, of which so many
            // were written as it says.
            let status = unsafe {
                let room = choices.as_mut_ptr();
                let (product, asked) = (self.product, CHOICES as i32);
                let status = sys::cublasLtMatmulAlgoGetHeuristic(
                    handle, product, first, second, c, c, preference, asked, room, &mut found,
                );
                choices.set_len(found.clamp(0, asked) as usize);
                status
            };
            choices.retain(|choice| choice.state == Status::CUBLAS_STATUS_SUCCESS);
            match status.result() {
                Err(error) if !is_refusal(&error) => doing(&format!("an algorithm for {key}"), Err(error)),
                _ => Ok(choices),
            }
        };
        if key.extents[2].is_multiple_of(BLOCK) {
            let split = choose(sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)?;
            if !split.is_empty() {
                return Ok(split);
            }
        }
        choose(sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE)
    }

    /// Sets the address of the row that is added.
    fn end_with(&self, address: u64) -> std::result::Result<(), CublasError> {
        let pointer = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        let value: *const c_void = (&raw const address).cast();
        // SAFETY: the description is alive, and the value a pointer of eight bytes.
        unsafe { result::set_matmul_desc_attribute(self.product, pointer, value, 8) }
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: it is this value's. There is nobody to tell of an error.
        let _ = unsafe { result::destroy_matmul_desc(self.product) };
    }
}

/// How the matrices of a batch lie.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(dtype: DType, (rows, cols): (usize, usize), batch: usize, stride: usize) -> Result<Self> {
        use sys::cublasLtMatrixLayoutAttribute_t as Of;
        // Column-major: the rows of cuBLASLt's matrix are the columns of ours.
        let layout = result::create_matrix_layout(data_type(dtype)?, cols as u64, rows as u64, cols as i64);
        let layout = Self(doing("a layout", layout)?);
        if batch == 1 {
            return Ok(layout);
        }
        let (count, offset) = (batch as i32, stride as i64);
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: the layout is alive, and the values have the sizes that are given.
            doing("a batch", unsafe { result::set_matrix_layout_attribute(layout.0, attribute, value, size) })
        };
        set(Of::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), 4)?;
        set(Of::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const offset).cast(), 8)?;
        Ok(layout)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it is this value's. There is nobody to tell of an error.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// A product and the algorithms for it; none if cuBLASLt refuses it.
pub struct Plan {
    described: Described,
    /// In the order in which cuBLASLt recommends them, behind the one that is preferred, and without those that it then
    /// refused.
    pub algorithms: Vec<sys::cublasLtMatmulHeuristicResult_t>,
    /// How many times the blocks of the algorithm that cuBLASLt recommends first fill the GPU (waves).
    pub waves: f32,
}

impl Plan {
    /// The algorithms that cuBLASLt recommends, for a workspace at this address.
    pub fn new(key: &PlanKey, handle: sys::cublasLtHandle_t, workspace: u64) -> Result<Self> {
        let described = Described::new(key)?;
        if key.row {
            // cuBLASLt's choice depends on the alignment of this address: a placeholder that is aligned like the real
            // one.
            doing("a row", described.end_with(workspace + ((1 << key.alignment[4]) & 255)))?;
        }
        let preference = doing("preferences", result::create_matmul_pref())?;
        // SAFETY: the preference is new, and destroyed nowhere else.
        let algorithms = unsafe {
            let algorithms = described.algorithms(key, handle, preference);
            let _ = result::destroy_matmul_pref(preference);
            algorithms?
        };
        let waves = algorithms.first().map_or(0.0, |first| first.wavesCount);
        Ok(Self { described, algorithms, waves })
    }

    /// From now on the algorithm of this place is the first.
    pub fn prefer(&mut self, place: usize) {
        self.algorithms[..=place].rotate_right(1);
    }

    /// Multiplies by the algorithm of this place in the list.
    ///
    /// # Safety
    /// The plan was made for such a product, and its operands lie where it says, in memory of the current context, to
    /// which handle and stream belong.
    pub unsafe fn multiply(
        &self,
        choice: usize,
        product: &Product,
        handle: sys::cublasLtHandle_t,
        queue: Queue,
    ) -> std::result::Result<(), CublasError> {
        let Product { a, b, c, plus, row, .. } = *product;
        if row != 0 {
            self.described.end_with(row)?;
        }
        let (one, beta) = (1.0f32, if plus == 0 { 0.0f32 } else { 1.0 });
        let (wide_one, wide_beta) = (1.0f64, f64::from(beta));
        let (one, beta): (*const c_void, *const c_void) = match product.inputs {
            DType::F64 => ((&raw const wide_one).cast(), (&raw const wide_beta).cast()),
            _ => ((&raw const one).cast(), (&raw const beta).cast()),
        };
        let [first, second, result] = self.described.layouts.each_ref().map(|layout| layout.0);
        // With a beta of zero it is not read, but an address is required.
        let plus = if plus == 0 { c.address } else { plus };
        let at = |address: u64| address as *mut c_void;
        // SAFETY: the caller's promise; scalars are read before this returns.
        unsafe {
            result::matmul(
                handle,
                self.described.product,
                one,
                beta,
                at(b.address),
                first,
                at(a.address),
                second,
                at(plus),
                result,
                at(c.address),
                result,
                &self.algorithms[choice].algo,
                at(queue.workspace),
                WORKSPACE,
                queue.stream.cast(),
            )
        }
    }
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::F64 => Ok(sys::cudaDataType::CUDA_R_64F),
        DType::Bf16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::Index => Err(failure("only floating-point matrices can be multiplied")),
    }
}
