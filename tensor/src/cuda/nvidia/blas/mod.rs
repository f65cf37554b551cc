//! cuBLASLt: matrix products, each shape's plan made once.

mod plan;
mod trial;

use self::plan::{Plan, PlanKey};
use super::{driver_failure, ensure_no_fault, failure, no_room};
use crate::cuda::Product;
use crate::{Error, Result};
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

/// If this variable is set, the algorithm that cuBLASLt recommends first is used for each product, and no other is tried.
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
    /// The plan for each key, or why there is none.
    plans: HashMap<PlanKey, std::result::Result<Plan, Error>>,
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
    [Status::CUBLAS_STATUS_INVALID_VALUE, Status::CUBLAS_STATUS_NOT_SUPPORTED].contains(&error.0)
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

    /// Whether cuBLASLt computes such a product efficiently with its epilogue. Fewer algorithms support one. If the best
    /// of them does not occupy at least 70 % as much of the GPU as the bare product, a separate kernel costs less. Errors:
    /// [`Error::OutOfMemory`].
    pub fn can_end(&mut self, product: &Product) -> Result<bool> {
        let key = PlanKey::of(product);
        // An algorithm may access the row 16 bytes at a time.
        if !self.may_end || key.alignment[4] < 4 {
            return Ok(false);
        }
        let mut busy = |key| match self.planned(&key) {
            Ok(plan) => Ok(Some(plan.waves.min(1.0))),
            Err(error @ Error::OutOfMemory { .. }) => Err(error),
            Err(_) => Ok(None),
        };
        Ok(matches!((busy(key)?, busy(key.bare())?), (Some(with), Some(without)) if with >= 0.7 * without))
    }

    /// The plan for a shape, made now or before.
    fn planned(&mut self, key: &PlanKey) -> Result<&Plan> {
        if !self.plans.contains_key(key) {
            match Plan::new(key, self.handle, self.queues[0].workspace) {
                // A refused epilogue is remembered and not requested again; a bare product is, because there is no
                // alternative to it.
                Err(error) if !key.row || matches!(error, Error::OutOfMemory { .. }) => {
                    return Err(error);
                }
                mut plan => {
                    if let Ok(plan) = &mut plan {
                        self.settle(key, plan);
                    }
                    self.plans.insert(*key, plan);
                }
            }
        }
        match self.plans.get(key) {
            Some(plan) => plan.as_ref().map_err(Error::clone),
            None => Err(failure("a plan that is not there")),
        }
    }

    /// Lets a new plan prefer its fastest algorithm, of those with the first one's bits. If that cannot be found out, the
    /// order is cuBLASLt's.
    fn settle(&self, key: &PlanKey, plan: &mut Plan) {
        let (says, tries) = (std::env::var_os(PLANS_VARIABLE).is_some(), self.may_try && trial::matters(key));
        if !says && !tries {
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

    /// # Safety
    /// The operands lie where the product says, in memory of the current context.
    pub unsafe fn multiply(&mut self, stream: CUstream, product: &Product) -> Result<()> {
        let Product { extents: [m, n, k], batch, .. } = *product;
        if m == 0 || n == 0 || batch == 0 {
            return Ok(());
        }
        if k == 0 {
            return Err(failure("a product with an empty inner axis"));
        }
        let (key, handle) = (PlanKey::of(product), self.handle);
        let queue = self.queues.into_iter().find(|queue| queue.stream == stream);
        let queue = queue.ok_or_else(|| failure("a product on a stream without a workspace"))?;
        loop {
            let plan = self.planned(&key)?;
            // SAFETY: the caller's promise; the plan is that of the product, and all else this value's.
            let Err(error) = (unsafe { plan.multiply(0, product, handle, queue) }) else { return Ok(()) };
            let what = format!("a product of {m}x{k} and {k}x{n}");
            if !is_refusal(&error) {
                // Perhaps an earlier kernel failed, and cuBLASLt is the first to notice; or there was no memory for
                // cuBLASLt's own kernels, for which it has no distinct error.
                ensure_no_fault(stream)?;
                let free = driver::result::mem_get_info().map_or(usize::MAX, |(free, _)| free);
                if free < WORKSPACE {
                    return Err(no_room(&format!("cuBLASLt, {what}"), None));
                }
            }
            let outcome = doing(&what, Err(error));
            let Err(refused @ Error::Gpu { .. }) = &outcome else { return outcome };
            // An algorithm that cuBLASLt recommended but then refuses is not tried again: the next one is used, or no
            // epilogue.
            match self.plans.get_mut(&key) {
                Some(Ok(plan)) if plan.algorithms.len() > 1 => _ = plan.algorithms.remove(0),
                Some(plan) if key.row => {
                    *plan = Err(refused.clone());
                    return outcome;
                }
                _ => return outcome,
            }
        }
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
