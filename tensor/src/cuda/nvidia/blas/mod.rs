//! cuBLASLt: matrix products, each shape's plan made once.

use super::{driver_failure, expect_no_fault, failure, no_room};
use crate::cuda::Product;
use crate::{DType, Error, Result};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasStatus_t as Status};
use cudarc::driver::{self, sys::CUresult};
use std::collections::HashMap;
use std::ffi::c_void;

/// Scratch memory for products that are cut along the inner axis: as much as NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

/// Where this variable is `rows`, `sums` or `all`, these are left to kernels of our own: to find out which of the two is
/// wrong, or slow.
const BARE_VARIABLE: &str = "BIFORMER_BARE_PRODUCTS";

/// cuBLASLt's version, of which the major number is that of its CUDA: (13, 4) for 13.4.
pub fn version() -> (i32, i32) {
    // SAFETY: it takes nothing.
    let version = unsafe { sys::cublasLtGetVersion() } as i32;
    (version / 10_000, version / 100 % 100)
}

/// An open cuBLASLt.
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    stream: driver::sys::CUstream,
    workspace: u64,
    /// Or why there is none.
    plans: HashMap<PlanKey, std::result::Result<Plan, Error>>,
    /// Whether it may be asked to add a row, and whether for sums.
    may_end: [bool; 2],
}

/// What a plan depends on: everything but the addresses, and how they are aligned.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct PlanKey {
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

impl PlanKey {
    fn of(product: &Product) -> Self {
        let Product { extents, batch, a, b, c, inputs, output, tf32, plus, row, sums } = *product;
        let plus = if plus == 0 { c.address } else { plus };
        // What is true of the zeros at the end of this is true of each matrix's address.
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
            ending: match (row, sums) {
                (0, 0) => Ending::None,
                (_, 0) => Ending::Row,
                _ => Ending::Sums,
            },
            alignment: [
                of_all(a.address, a.stride, inputs),
                of_all(b.address, b.stride, inputs),
                of_all(c.address, c.stride, output),
                of_all(plus, c.stride, output),
                row | sums,
            ]
            .map(|address| address.trailing_zeros().min(8)),
        }
    }
}

/// A product as cuBLASLt wants it described.
struct Described {
    product: sys::cublasLtMatmulDesc_t,
    /// In cuBLASLt's order, in which the first operand is our B: see `Blas::plan`.
    layouts: Vec<sys::cublasLtMatrixLayout_t>,
}

impl Described {
    /// cuBLASLt reads matrices by columns. A row-major matrix is the transpose of the column-major one in the same
    /// memory, so it is asked for Cᵀ = Bᵀ·Aᵀ, whose operands are B and A as they lie.
    fn new(key: &PlanKey) -> Result<Self> {
        use sys::cublasComputeType_t as Compute;
        use sys::cublasLtEpilogue_t as Epilogue;
        use sys::cublasLtMatmulDescAttributes_t as Of;
        let PlanKey { extents: [m, n, k], strides, transposed: [a_transposed, b_transposed], types, .. } = *key;
        let [inputs, output] = types;
        let (compute, scale) = match inputs {
            DType::F64 => (Compute::CUBLAS_COMPUTE_64F, DType::F64),
            DType::F32 if key.tf32 => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, DType::F32),
            _ => (Compute::CUBLAS_COMPUTE_32F, DType::F32),
        };
        let product = doing("describing", result::create_matmul_desc(compute, data_type(scale)?))?;
        let mut described = Self { product, layouts: vec![] };
        let turned = |rows, cols, transposed| if transposed { (cols, rows) } else { (rows, cols) };
        described.add(inputs, turned(k, n, b_transposed), key.batch, strides[1])?;
        described.add(inputs, turned(m, k, a_transposed), key.batch, strides[0])?;
        described.add(output, (m, n), key.batch, strides[2])?;
        let epilogue = match key.ending {
            Ending::None => Epilogue::CUBLASLT_EPILOGUE_DEFAULT,
            // Along what cuBLASLt, which reads by columns, calls the rows of D: our columns.
            Ending::Row => Epilogue::CUBLASLT_EPILOGUE_BIAS,
            // Of its B, which is our A.
            Ending::Sums => Epilogue::CUBLASLT_EPILOGUE_BGRADB,
        };
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

    /// Names the row that is added, or that sums go to.
    fn end_with(&self, address: u64) -> Result<()> {
        let pointer = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        let value: *const c_void = (&raw const address).cast();
        // SAFETY: the description is alive, and the value a pointer of eight bytes.
        doing("a row", unsafe { result::set_matmul_desc_attribute(self.product, pointer, value, 8) })
    }

    /// Adds the layout of a matrix of ours.
    fn add(&mut self, dtype: DType, (rows, cols): (usize, usize), batch: usize, stride: usize) -> Result<()> {
        use sys::cublasLtMatrixLayoutAttribute_t as Layout;
        // By columns: the rows of a column-major matrix are the columns of ours.
        let layout = result::create_matrix_layout(data_type(dtype)?, cols as u64, rows as u64, cols as i64);
        let layout = doing("a layout", layout)?;
        self.layouts.push(layout);
        if batch == 1 {
            return Ok(());
        }
        let (count, offset) = (batch as i32, stride as i64);
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: the layout is alive, and the values have the sizes that are given.
            doing("a batch", unsafe { result::set_matrix_layout_attribute(layout, attribute, value, size) })
        };
        set(Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), 4)?;
        set(Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const offset).cast(), 8)
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: they are this value's. There is nobody to tell of an error.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for &layout in &self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

/// A product and the algorithm that cuBLASLt chose.
struct Plan {
    described: Described,
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// How often its blocks fill the GPU.
    waves: f32,
}

fn doing<T>(what: &str, result: std::result::Result<T, CublasError>) -> Result<T> {
    result.map_err(|error| match error.0 {
        Status::CUBLAS_STATUS_ALLOC_FAILED => no_room(&format!("cuBLASLt, {what}"), None),
        status => failure(format!("cuBLASLt, {what}: {status:?}")),
    })
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
        let handle = doing("opening", result::create_handle())?;
        // SAFETY: the memory is used as what it is, and freed when this value goes.
        let workspace = unsafe { driver::result::malloc_sync(WORKSPACE) }
            .map_err(|error| match error.0 {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => no_room("cuBLASLt's workspace", Some(WORKSPACE)),
                _ => driver_failure("asking for cuBLASLt's workspace", error),
            })
            // SAFETY: nobody has it but this function.
            .inspect_err(|_| _ = unsafe { result::destroy_handle(handle) })?;
        let bare = std::env::var(BARE_VARIABLE).unwrap_or_default();
        let may_end = ["rows", "sums"].map(|ending| bare != ending && bare != "all");
        Ok(Self { handle, stream, workspace, plans: HashMap::new(), may_end })
    }

    /// Whether cuBLASLt computes such a product well with what it is to do besides, of which it does one thing. The
    /// algorithms with an ending are fewer. Where none of them keeps 70 % as much of the GPU busy as the product alone would
    /// (one of few rows and columns and a long inner axis has to be cut along that), a kernel of its own costs less.
    pub fn can_end(&mut self, product: &Product) -> bool {
        // That of CUDA 11.6 is reported to write where it must not when it sums beside a product in f32 of one column (issue
        // 1392 of NVIDIA's apex). So it is asked for sums only where many ask for them: with bf16, in full packs.
        let [m, n, _] = product.extents;
        let usual = product.inputs == DType::Bf16 && [m, n].iter().all(|&extent| extent >= 16 && extent % 8 == 0);
        let [rows, sums] = self.may_end;
        if (product.row != 0 && !rows) || (product.sums != 0 && !(sums && usual)) {
            return false;
        }
        let key = PlanKey::of(product);
        let mut busy = |ending| self.planned(&PlanKey { ending, ..key }).map(|plan| plan.waves.min(1.0));
        let (Ok(with), Ok(without)) = (busy(key.ending), busy(Ending::None)) else { return false };
        // An algorithm may read a row 16 bytes at a time.
        let lies_well = key.alignment[4] >= 4;
        lies_well && (product.row == 0 || product.sums == 0) && with >= 0.7 * without
    }

    /// The plan for a shape, made now or before.
    fn planned(&mut self, key: &PlanKey) -> Result<&Plan> {
        if !self.plans.contains_key(key) {
            match self.plan(key) {
                // An ending that is refused is not asked for again; a product is, for there is nothing to do instead.
                Err(error) if key.ending == Ending::None || matches!(error, Error::OutOfMemory { .. }) => {
                    return Err(error);
                }
                plan => _ = self.plans.insert(*key, plan),
            }
        }
        match self.plans.get(key) {
            Some(plan) => plan.as_ref().map_err(Error::clone),
            None => Err(failure("a plan that is not there")),
        }
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
        let (handle, workspace, stream) = (self.handle, self.workspace as *mut c_void, self.stream);
        let key = PlanKey::of(product);
        let plan = self.planned(&key)?;
        if key.ending != Ending::None {
            plan.described.end_with(row | sums)?;
        }
        let (one, beta) = (1.0f32, if plus == 0 { 0.0f32 } else { 1.0 });
        let (wide_one, wide_beta) = (1.0f64, f64::from(beta));
        let (one, beta): (*const c_void, *const c_void) = match product.inputs {
            DType::F64 => ((&raw const wide_one).cast(), (&raw const wide_beta).cast()),
            _ => ((&raw const one).cast(), (&raw const beta).cast()),
        };
        let Described { product: description, layouts } = &plan.described;
        let [first, second, result] = layouts[..] else { return Err(failure("a product of other than two matrices")) };
        let c = c.address as *mut c_void;
        // What is times zero is not read, but has to be named.
        let plus = if plus == 0 { c } else { plus as *mut c_void };
        // SAFETY: the caller's promise; the plan was made for these extents; scalars are read before this returns.
        let outcome = unsafe {
            result::matmul(
                handle,
                *description,
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
                stream.cast(),
            )
        };
        let what = format!("a product of {m}x{k} and {k}x{n}");
        if let Err(CublasError(status)) = outcome
            && ![Status::CUBLAS_STATUS_INVALID_VALUE, Status::CUBLAS_STATUS_NOT_SUPPORTED].contains(&status)
        {
            // Perhaps an earlier kernel went wrong, and cuBLASLt is the first to hear of it; or there was no room for its
            // kernels, for which it has no word of its own.
            expect_no_fault(stream)?;
            let free = driver::result::mem_get_info().map_or(usize::MAX, |(free, _)| free);
            if free < WORKSPACE {
                return Err(no_room(&format!("cuBLASLt, {what}"), None));
            }
        }
        let outcome = doing(&what, outcome);
        if let (Err(error @ Error::Gpu { .. }), true) = (&outcome, key.ending != Ending::None) {
            // It is not to be planned so again: cuBLASLt may refuse what it has promised.
            self.plans.insert(key, Err(error.clone()));
        }
        outcome
    }

    fn plan(&self, key: &PlanKey) -> Result<Plan> {
        let described = Described::new(key)?;
        if key.ending != Ending::None {
            // cuBLASLt chooses by how this address is aligned: as the one that comes, and no better.
            described.end_with(self.workspace + ((1 << key.alignment[4]) & 255))?;
        }
        let preference = doing("preferences", result::create_matmul_pref())?;
        // SAFETY: the preference is new, and destroyed nowhere else.
        let chosen = unsafe {
            let chosen = self.choose(key, &described, preference);
            let _ = result::destroy_matmul_pref(preference);
            chosen?
        };
        Ok(Plan { described, algorithm: chosen.algo, waves: chosen.wavesCount })
    }

    /// What cuBLASLt holds for the fastest algorithm.
    unsafe fn choose(
        &self,
        key: &PlanKey,
        described: &Described,
        preference: sys::cublasLtMatmulPreference_t,
    ) -> Result<sys::cublasLtMatmulHeuristicResult_t> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Prefer;
        let workspace = WORKSPACE;
        let [a_bytes, b_bytes, c_bytes, plus_bytes, _] = key.alignment.map(|zeros| 1u32 << zeros);
        let [first, second, c] = described.layouts[..] else { return Err(failure("a product of other matrices")) };
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
        // Of the ways to add up parts, the one that has an order, or none: equal bits each time.
        let choose = |scheme: sys::cublasLtReductionScheme_t| {
            let mask = scheme as u32;
            prefer(Prefer::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const mask).cast(), 4)?;
            let (handle, product) = (self.handle, described.product);
            // SAFETY: all of these are alive.
            let chosen = unsafe { result::get_matmul_algo_heuristic(handle, product, first, second, c, c, preference) };
            let [m, n, k] = key.extents;
            doing(&format!("an algorithm for {m}x{k} by {k}x{n}"), chosen)
        };
        choose(sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)
            .or_else(|_| choose(sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: all of it is this value's. There is nobody to tell of an error.
        unsafe {
            let _ = result::destroy_handle(self.handle);
            let _ = driver::result::free_sync(self.workspace);
        }
    }
}
