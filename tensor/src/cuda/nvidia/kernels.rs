//! The kernels of a loaded module.

use super::{Doing, failure};
use crate::Result;
use cudarc::driver::result;
use cudarc::driver::sys::{CUfunction, CUfunction_attribute as Attribute, CUmodule};
use std::ffi::CString;

/// A module's kernels, ready to run on a GPU whose blocks can have so many bytes of shared memory.
///
/// # Safety
/// The module is loaded, and its context current.
pub unsafe fn of(module: CUmodule, symbols: Vec<String>, shared_memory: usize) -> Result<Vec<CUfunction>> {
    let kernel = |symbol: String| {
        let name = CString::new(symbol.clone()).map_err(|_| failure("a kernel's name with a zero in it"))?;
        // SAFETY: guaranteed by the caller.
        let function = unsafe { result::module::get_function(module, name) }.doing(&format!("looking for {symbol}"))?;
        allow_shared_memory(function, shared_memory)?;
        Ok(function)
    };
    symbols.into_iter().map(kernel).collect()
}

/// Lets a kernel have as much shared memory as the GPU can give it.
fn allow_shared_memory(function: CUfunction, most: usize) -> Result<()> {
    // SAFETY: the function is of a module that stays loaded.
    unsafe {
        let declared =
            result::function::get_function_attribute(function, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
        let most = most as i32 - declared.doing("asking for a kernel's shared memory")?;
        let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        result::function::set_function_attribute(function, dynamic, most).doing("allowing a kernel shared memory")
    }
}
