//! cuBLASLt: matrix products, each shape's plan made once.

use super::failure;
use crate::cuda::Product;
use crate::{DType, Result};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver;
use std::collections::HashMap;
use std::ffi::c_void;

/// Scratch memory for products that are cut along the inner axis: as much as NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

/// An open cuBLASLt.
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    stream: driver::sys::CUstream,
    workspace: u64,
    plans: HashMap<Shape, Plan>,
}

/// What a plan depends on: everything but the addresses, and how they are aligned.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    extents: [usize; 3],
    batch: usize,
    strides: [usize; 3],
    transposed: [bool; 2],
    types: [DType; 2],
    tf32: bool,
    ending: Ending,
    alignment: [u32; 5],
}

/// What a product does besides.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Ending {
    None,
    /// Adds a row.
    Row,
    /// Sums up the rows of A.
    Sums,
}

impl Shape {
    fn of(product: &Product) -> Self {
        let Product { extents, batch, a, b, c, inputs, output, tf32, plus, row, sums } = *product;
        let plus = if plus == 0 { c.address } else { plus };
        Self {
            extents,
            batch,
            strides: [a.stride, b.stride, c.stride],
            transposed: [a.transposed, b.transposed],
            types: [inputs, output],
            tf32,
            ending: match (row, sums) {
                (0, 0) => Ending::None,
                (_, 0) => Ending::Row,
                _ => Ending::Sums,
            },
            alignment: [a.address, b.address, c.address, plus, row | sums]
                .map(|address| address.trailing_zeros().min(8)),
        }
    }
}

/// Descriptors, and the algorithm that cuBLASLt chose.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    /// In cuBLASLt's order, in which the first operand is our B: see `Blas::plan`.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

fn doing<T>(what: &str, result: std::result::Result<T, CublasError>) -> Result<T> {
    result.map_err(|error| failure(format!("cuBLASLt, {what}: {:?}", error.0)))
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::F64 => Ok(sys::cudaDataType::CUDA_R_64F),
        DType::Bf16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::Index => Err(failure("multiplies floating-point matrices")),
    }
}

impl Blas {
    /// Opens cuBLASLt for a stream of the current context.
    pub fn new(stream: driver::sys::CUstream) -> Result<Self> {
        // SAFETY: the memory is used as what it is, and freed when this value goes.
        let workspace = unsafe { driver::result::malloc_sync(WORKSPACE) }
            .map_err(|error| failure(format!("no room for cuBLASLt's workspace: {error}")))?;
        Ok(Self { handle: doing("opening", result::create_handle())?, stream, workspace, plans: HashMap::new() })
    }

    /// Whether cuBLASLt knows how to compute such a product with what it is to do besides, of which it does one thing.
    pub fn can_end(&mut self, product: &Product) -> bool {
        (product.row == 0 || product.sums == 0) && self.planned(&Shape::of(product)).is_ok()
    }

    /// The plan for a shape, made now or before.
    fn planned(&mut self, shape: &Shape) -> Result<&Plan> {
        if !self.plans.contains_key(shape) {
            let plan = self.plan(shape)?;
            self.plans.insert(*shape, plan);
        }
        self.plans.get(shape).ok_or_else(|| failure("a plan that is not there"))
    }

    /// # Safety
    /// The operands lie where the product says, in memory of the current context.
    pub unsafe fn multiply(&mut self, product: &Product) -> Result<()> {
        let Product { extents: [m, n, k], batch, a, b, c, plus, row, sums, .. } = *product;
        if m == 0 || n == 0 || batch == 0 {
            return Ok(());
        }
        if k == 0 {
            return Err(failure("a product with an empty inner axis"));
        }
        let (handle, workspace, stream) = (self.handle, self.workspace as *mut c_void, self.stream.cast());
        let plan = self.planned(&Shape::of(product))?;
        let vector = row | sums;
        if vector != 0 {
            let pointer = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            let value: *const c_void = (&raw const vector).cast();
            // SAFETY: the description is the plan's, and the value a pointer of eight bytes.
            doing("a row", unsafe { result::set_matmul_desc_attribute(plan.description, pointer, value, 8) })?;
        }
        let (one, beta) = (1.0f32, if plus == 0 { 0.0f32 } else { 1.0 });
        let (wide_one, wide_beta) = (1.0f64, f64::from(beta));
        let (one, beta): (*const c_void, *const c_void) = match product.inputs {
            DType::F64 => ((&raw const wide_one).cast(), (&raw const wide_beta).cast()),
            _ => ((&raw const one).cast(), (&raw const beta).cast()),
        };
        let [first, second, result] = plan.layouts;
        let c = c.address as *mut c_void;
        // What is times zero is not read, but has to be named.
        let plus = if plus == 0 { c } else { plus as *mut c_void };
        // SAFETY: the caller's promise; the plan was made for these extents; scalars are read before this returns.
        let outcome = unsafe {
            result::matmul(
                handle,
                plan.description,
                one,
                beta,
                b.address as *const c_void,
                first,
                a.address as *const c_void,
                second,
                plus,
                result,
                c,
                result,
                &plan.algorithm,
                workspace,
                WORKSPACE,
                stream,
            )
        };
        doing(&format!("a product of {m}x{k} and {k}x{n}"), outcome)
    }

    /// cuBLASLt reads matrices by columns. A row-major matrix is the transpose of the column-major one in the same
    /// memory, so it is asked for Cᵀ = Bᵀ·Aᵀ, whose operands are B and A as they lie.
    fn plan(&self, shape: &Shape) -> Result<Plan> {
        use sys::cublasComputeType_t as Compute;
        use sys::cublasLtMatmulDescAttributes_t as Of;
        use sys::cublasLtMatmulPreferenceAttributes_t as Prefer;
        let Shape { extents: [m, n, k], batch, strides, transposed: [a_transposed, b_transposed], types, .. } = *shape;
        let [inputs, output] = types;
        let (compute, scale) = match inputs {
            DType::F64 => (Compute::CUBLAS_COMPUTE_64F, DType::F64),
            DType::F32 if shape.tf32 => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, DType::F32),
            _ => (Compute::CUBLAS_COMPUTE_32F, DType::F32),
        };
        let description = doing("describing", result::create_matmul_desc(compute, data_type(scale)?))?;
        let layout = |dtype, (rows, cols): (usize, usize), stride: usize| -> Result<sys::cublasLtMatrixLayout_t> {
            // By columns: the rows of a column-major matrix are the columns of ours.
            let layout = result::create_matrix_layout(data_type(dtype)?, cols as u64, rows as u64, cols as i64);
            let layout = doing("a layout", layout)?;
            if batch > 1 {
                let (count, offset) = (batch as i32, stride as i64);
                use sys::cublasLtMatrixLayoutAttribute_t as Layout;
                // SAFETY: the layout is new, and the values have the sizes that are given.
                unsafe {
                    let set = |attribute, value: *const c_void, size| {
                        doing("a batch", result::set_matrix_layout_attribute(layout, attribute, value, size))
                    };
                    set(Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), 4)?;
                    set(Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const offset).cast(), 8)?;
                }
            }
            Ok(layout)
        };
        let turned = |rows, cols, transposed| if transposed { (cols, rows) } else { (rows, cols) };
        let layouts = [
            layout(inputs, turned(k, n, b_transposed), strides[1])?,
            layout(inputs, turned(m, k, a_transposed), strides[0])?,
            layout(output, (m, n), strides[2])?,
        ];
        let operation = |transposed: bool| -> i32 { transposed.into() }; // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1
        let (first, second) = (operation(b_transposed), operation(a_transposed));
        let preference = doing("preferences", result::create_matmul_pref())?;
        let workspace = WORKSPACE;
        let [a_bytes, b_bytes, c_bytes, plus_bytes, _] = shape.alignment.map(|zeros| 1u32 << zeros);
        // SAFETY: the objects are new, and the values have the sizes that are given.
        unsafe {
            let describe = |attribute, value: &i32| {
                let value: *const c_void = std::ptr::from_ref(value).cast();
                doing("an attribute", result::set_matmul_desc_attribute(description, attribute, value, 4))
            };
            describe(Of::CUBLASLT_MATMUL_DESC_TRANSA, &first)?;
            describe(Of::CUBLASLT_MATMUL_DESC_TRANSB, &second)?;
            let epilogue = match shape.ending {
                Ending::None => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
                // Along what cuBLASLt, which reads by columns, calls the rows of D: our columns.
                Ending::Row => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
                // Of its B, which is our A.
                Ending::Sums => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADB,
            };
            describe(Of::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as i32))?;
            let prefer = |attribute, value: *const c_void, size| {
                doing("a preference", result::set_matmul_pref_attribute(preference, attribute, value, size))
            };
            prefer(
                Prefer::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of::<usize>(),
            )?;
            prefer(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (&raw const b_bytes).cast(), 4)?;
            prefer(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (&raw const a_bytes).cast(), 4)?;
            prefer(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (&raw const plus_bytes).cast(), 4)?;
            prefer(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (&raw const c_bytes).cast(), 4)?;
            let [first, second, c] = layouts;
            // Of the ways to add up parts, the one that has an order, or none: equal bits each time.
            let choose = |scheme: sys::cublasLtReductionScheme_t| {
                let mask = scheme as u32;
                prefer(Prefer::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const mask).cast(), 4)?;
                let chosen =
                    result::get_matmul_algo_heuristic(self.handle, description, first, second, c, c, preference);
                doing(&format!("an algorithm for {m}x{k} by {k}x{n}"), chosen)
            };
            let chosen = choose(sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)
                .or_else(|_| choose(sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE));
            let _ = result::destroy_matmul_pref(preference);
            Ok(Plan { description, layouts, algorithm: chosen?.algo })
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: all of it is this value's. There is nobody to tell of an error.
        unsafe {
            for plan in self.plans.values() {
                let _ = result::destroy_matmul_desc(plan.description);
                for layout in plan.layouts {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            let _ = result::destroy_handle(self.handle);
            let _ = driver::result::free_sync(self.workspace);
        }
    }
}
