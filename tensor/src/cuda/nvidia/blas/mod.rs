//! cuBLASLt: matrix products, each shape's plan made once.

mod plan;
mod trial;

use self::plan::{Plan, PlanKey};
use super::{driver_failure, ensure_no_fault, failure, no_room};
use crate::Result;
use crate::cuda::Product;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasStatus_t as Status};
use cudarc::driver::{
    self,
    sys::{CUresult, CUstream},
};
use std::collections::HashMap;
use std::io::{self, Write};

/// The workspace for products that are split along the inner axis (split-K): as much as NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

/// If this variable is set, cuBLASLt is not asked for epilogues, and kernels of our own compute them. For finding out
/// whether they are wrong or slow.
const BARE_VARIABLE: &str = "BIFORMER_BARE_PRODUCTS";

/// If this variable is set, the algorithm that cuBLASLt recommends first is used for each product, and no other is
/// tried.
const UNTRIED_VARIABLE: &str = "BIFORMER_UNTRIED_PRODUCTS";

/// If this variable is set, each new plan is printed, with the time that each of its algorithms takes: to see what the
/// choices are made from, and whether they are good.
const PLANS_VARIABLE: &str = "BIFORMER_PLANS";

/// cuBLASLt's version, of which the major number is that of its CUDA: (13, 4) for 13.4.
pub fn version() -> (i32, i32) {
    // SAFETY: it takes nothing.
    let version = unsafe { sys::cublasLtGetVersion() } as i32;
    (version / 10_000, version / 100 % 100)
}

/// An open cuBLASLt.
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    /// Those of the work, on which algorithms are tried, and of the work aside.
    queues: [Queue; 2],
    plans: HashMap<PlanKey, Plan>,
    /// Whether epilogues may be requested.
    may_end: bool,
    /// Whether algorithms are tried.
    may_try: bool,
}

/// A stream, and the workspace of the products on it.
#[derive(Clone, Copy)]
struct Queue {
    stream: CUstream,
    workspace: u64,
}

impl Queue {
    fn new(stream: CUstream) -> Result<Self> {
        // SAFETY: the memory is used as what it is.
        let workspace = unsafe { driver::result::malloc_sync(WORKSPACE) }.map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => no_room("cuBLASLt's workspace", Some(WORKSPACE)),
            _ => driver_failure("asking for cuBLASLt's workspace", error),
        })?;
        Ok(Self { stream, workspace })
    }

    /// # Safety
    /// Nobody uses the workspace any more.
    unsafe fn free(self) {
        // SAFETY: the caller's promise. There is nobody to tell of an error.
        let _ = unsafe { driver::result::free_sync(self.workspace) };
    }
}

fn doing<T>(what: &str, result: std::result::Result<T, CublasError>) -> Result<T> {
    result.map_err(|error| match error.0 {
        Status::CUBLAS_STATUS_ALLOC_FAILED => no_room(&format!("cuBLASLt, {what}"), None),
        status => failure(format!("cuBLASLt, {what}: {status:?}")),
    })
}

/// Whether cuBLASLt refuses what it is asked for, whatever state the GPU is in.
fn is_refusal(error: &CublasError) -> bool {
    use Status::{CUBLAS_STATUS_ARCH_MISMATCH, CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
    [CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_ARCH_MISMATCH].contains(&error.0)
}

impl Blas {
    /// Opens cuBLASLt for two streams of the current context.
    pub fn new([work, aside]: [CUstream; 2]) -> Result<Self> {
        let handle = doing("opening", result::create_handle())?;
        let queues = || {
            let first = Queue::new(work)?;
            // SAFETY: nobody has it but this function.
            let second = Queue::new(aside).inspect_err(|_| unsafe { first.free() })?;
            Ok([first, second])
        };
        // SAFETY: as above.
        let queues = queues().inspect_err(|_| _ = unsafe { result::destroy_handle(handle) })?;
        let unset = |variable| std::env::var_os(variable).is_none();
        let (may_end, may_try) = (unset(BARE_VARIABLE), unset(UNTRIED_VARIABLE));
        Ok(Self { handle, queues, plans: HashMap::new(), may_end, may_try })
    }

    /// Whether cuBLASLt computes such a product efficiently with its epilogue. Fewer algorithms support one. If the
    /// best of them does not occupy at least 70 % as much of the GPU as the bare product, a separate kernel costs less.
    fn can_end(&mut self, product: &Product) -> Result<bool> {
        let key = PlanKey::of(product);
        // An algorithm may access the row 16 bytes at a time.
        if !self.may_end || key.alignment[4] < 4 {
            return Ok(false);
        }
        let mut busy = |key| self.planned(&key).map(|plan| plan.waves.min(1.0));
        Ok(busy(key)? >= 0.7 * busy(key.bare())?)
    }

    /// The plan for a shape, made now or before.
    fn planned(&mut self, key: &PlanKey) -> Result<&mut Plan> {
        if !self.plans.contains_key(key) {
            let mut plan = Plan::new(key, self.handle, self.queues[0].workspace)?;
            self.settle(key, &mut plan);
            self.plans.insert(*key, plan);
        }
        self.plans.get_mut(key).ok_or_else(|| failure("a plan that is not there"))
    }

    /// Lets a new plan prefer its fastest algorithm, of those with the first one's bits. If that cannot be found out,
    /// the order is cuBLASLt's.
    fn settle(&self, key: &PlanKey, plan: &mut Plan) {
        let (says, tries) = (std::env::var_os(PLANS_VARIABLE).is_some(), self.may_try && trial::matters(key));
        if plan.algorithms.is_empty() || (!says && !tries) {
            return;
        }
        // SAFETY: the plan is that of the key, and all else this value's.
        let tried = unsafe { trial::of(key, plan, self.handle, &self.queues) };
        let best = tried.as_deref().map_or(0, trial::best);
        if tries {
            plan.prefer(best);
        }
        if says {
            let said = match &tried {
                Ok(tried) => tried.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
                Err(error) => error.to_string(),
            };
            let used = if tries { best + 1 } else { 1 };
            // It changes nothing if nobody reads it.
            let _ = writeln!(io::stderr(), "plan {key}: {said}; number {used} is used");
        }
    }

    /// Whether it has added the row: see [`Driver::multiply`](crate::cuda::Driver::multiply).
    ///
    /// # Safety
    /// The operands lie where the product says, in memory of the current context.
    pub unsafe fn multiply(&mut self, stream: CUstream, product: &Product) -> Result<bool> {
        let queue = self.queues.into_iter().find(|queue| queue.stream == stream);
        let queue = queue.ok_or_else(|| failure("a product on a stream without a workspace"))?;
        // SAFETY: the caller's promise.
        if product.row != 0 && self.can_end(product)? && unsafe { self.run(queue, product)? } {
            return Ok(true);
        }
        // SAFETY: as above.
        match unsafe { self.run(queue, &Product { row: 0, ..*product })? } {
            true => Ok(false),
            false => Err(failure(format!("cuBLASLt refuses a product of {}", PlanKey::of(product).bare()))),
        }
    }

    /// Multiplies by the first algorithm that cuBLASLt does not refuse; those that it does are not tried again. Whether
    /// there was one. Nothing else may decide which one it is, least of all a lack of memory: others may give other
    /// bits.
    ///
    /// # Safety
    /// As [`Blas::multiply`]'s.
    unsafe fn run(&mut self, queue: Queue, product: &Product) -> Result<bool> {
        let (key, handle) = (PlanKey::of(product), self.handle);
        let plan = self.planned(&key)?;
        while !plan.algorithms.is_empty() {
            // SAFETY: the caller's promise; the plan is that of the product, and all else this value's.
            match unsafe { plan.multiply(0, product, handle, queue) } {
                Ok(()) => return Ok(true),
                Err(error) if is_refusal(&error) => _ = plan.algorithms.remove(0),
                Err(error) => {
                    // Perhaps an earlier kernel failed, and cuBLASLt is the first to notice; or there was no memory for
                    // cuBLASLt's own kernels, for which it has no distinct error.
                    ensure_no_fault(queue.stream)?;
                    let free = driver::result::mem_get_info().map_or(usize::MAX, |(free, _)| free);
                    let error = if free < WORKSPACE { CublasError(Status::CUBLAS_STATUS_ALLOC_FAILED) } else { error };
                    return doing(&format!("a product of {key}"), Err(error));
                }
            }
        }
        Ok(false)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: all of it is this value's. There is nobody to tell of an error.
        unsafe {
            let _ = result::destroy_handle(self.handle);
            self.queues.into_iter().for_each(|queue| queue.free());
        }
    }
}
