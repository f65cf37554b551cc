//! NVRTC: kernels from source to machine code, and the cache of what it made.

use super::{failure, libraries};
use crate::Result;
use crate::cuda::{Module, cache};
use cudarc::nvrtc::{result, sys};
use std::ffi::{CStr, CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Compiled kernels.
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// Machine code, a cubin; or PTX, for GPUs that are newer than NVRTC.
    pub image: Vec<u8>,
    /// The kernels' names in it, in the order of [`Module::instances`].
    pub symbols: Vec<String>,
    /// What the compiler said: registers, spills and shared memory of each kernel.
    pub log: String,
}

/// What NVRTC compiles to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Target {
    /// The machine code of a generation that it knows, 90 for 9.0.
    Machine(u32),
    /// PTX for the newest generation that it knows that is older than the GPU: the driver, which knows the GPU,
    /// compiles it to machine code.
    Ptx(u32),
}

impl Target {
    /// For GPUs of a compute capability, where NVRTC knows these generations.
    fn choose(capability: (u32, u32), known: &[u32]) -> Option<Self> {
        let wanted = capability.0 * 10 + capability.1;
        if known.contains(&wanted) {
            return Some(Self::Machine(wanted));
        }
        known.iter().copied().filter(|&older| older < wanted).max().map(Self::Ptx)
    }

    fn of(capability: (u32, u32)) -> Result<Self> {
        let mut count = 0;
        // SAFETY: a valid pointer, and then one to as many numbers as it was said to take.
        let known = unsafe {
            sys::nvrtcGetNumSupportedArchs(&mut count).result().and_then(|()| {
                let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
                sys::nvrtcGetSupportedArchs(known.as_mut_ptr()).result().map(|()| known)
            })
        };
        let known = known.map_err(|error| failure(format!("asking NVRTC what GPUs it knows: {error}")))?;
        let known: Vec<u32> = known.into_iter().filter_map(|number| number.try_into().ok()).collect();
        Self::choose(capability, &known).ok_or_else(|| {
            let (major, minor) = capability;
            failure(format!(
                "NVRTC no longer compiles for GPUs of compute capability {major}.{minor}: install an older one"
            ))
        })
    }

    fn options(self) -> Vec<String> {
        // No fast-math options: kernels call fast approximations explicitly.
        let mut options = vec!["--std=c++17".into()];
        match self {
            // Registers and spills, for the log. Where there is no machine code, NVRTC 13.0 crashes when asked for
            // them.
            Self::Machine(number) => {
                options.extend([format!("--gpu-architecture=sm_{number}"), "--ptxas-options=-v".into()])
            }
            Self::Ptx(number) => options.push(format!("--gpu-architecture=compute_{number}")),
        }
        options
    }

    /// The compiled code. PTX is zero-terminated, as the driver requires.
    ///
    /// # Safety
    /// The program is one of NVRTC's that was compiled with these options.
    unsafe fn code(self, program: sys::nvrtcProgram) -> std::result::Result<Vec<u8>, result::NvrtcError> {
        let mut size = 0;
        // SAFETY: the caller's promise; the buffers are as long as NVRTC says.
        unsafe {
            match self {
                Self::Machine(_) => sys::nvrtcGetCUBINSize(program, &mut size),
                Self::Ptx(_) => sys::nvrtcGetPTXSize(program, &mut size),
            }
            .result()?;
            let mut code = vec![0u8; size];
            match self {
                Self::Machine(_) => sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()),
                Self::Ptx(_) => sys::nvrtcGetPTX(program, code.as_mut_ptr().cast()),
            }
            .result()?;
            Ok(code)
        }
    }
}

/// Compiles a module for GPUs of a compute capability; no GPU is needed. [`Error::Gpu`](crate::Error::Gpu) with the
/// compiler's messages.
pub fn compile(module: &Module, capability: (u32, u32)) -> Result<Compiled> {
    libraries::compiler()?;
    let target = Target::of(capability)?;
    let text = |text: &str| CString::new(text).map_err(|_| failure("a kernel's source with a zero in it"));
    let source = text(&format!("#include \"prelude.cuh\"\n#line 1 \"{}/kernel.cu\"\n{}", module.name, module.source))?;
    let name = text(module.name)?;
    let headers: Vec<(CString, CString)> =
        module.all_headers().map(|(name, source)| Ok((text(name)?, text(source)?))).collect::<Result<_>>()?;
    let names: Vec<*const c_char> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
    let sources: Vec<*const c_char> = headers.iter().map(|(_, source)| source.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings live until the program is destroyed below, and the arrays have the length that is given.
    unsafe {
        let count = headers.len() as i32;
        sys::nvrtcCreateProgram(&mut program, source.as_ptr(), name.as_ptr(), count, sources.as_ptr(), names.as_ptr())
            .result()
            .map_err(|error| failure(format!("NVRTC: {error}")))?;
        let compiled = build(program, module, target);
        // It leaks at worst.
        let _ = result::destroy_program(program);
        compiled
    }
}

/// # Safety
/// The program is one of NVRTC's, not compiled yet.
unsafe fn build(program: sys::nvrtcProgram, module: &Module, target: Target) -> Result<Compiled> {
    let instances: Vec<CString> = module.instances().into_iter().flat_map(CString::new).collect();
    let nvrtc = |what: &str, error| failure(format!("{}: {what}: {error}", module.name));
    // SAFETY: the caller's promise; the buffers are as long as NVRTC says.
    unsafe {
        for instance in &instances {
            sys::nvrtcAddNameExpression(program, instance.as_ptr()).result().map_err(|error| nvrtc("naming", error))?;
        }
        let outcome = result::compile_program(program, &target.options());
        let log = result::get_program_log(program).unwrap_or_default();
        let log: Vec<u8> = log.into_iter().map(|byte| byte as u8).take_while(|&byte| byte != 0).collect();
        let log = String::from_utf8_lossy(&log).into_owned();
        if outcome.is_err() {
            return Err(failure(format!("{} does not compile:\n{log}", module.name)));
        }
        let mut symbols = vec![];
        for instance in &instances {
            let mut lowered = std::ptr::null();
            sys::nvrtcGetLoweredName(program, instance.as_ptr(), &mut lowered)
                .result()
                .map_err(|error| nvrtc("looking for a kernel", error))?;
            symbols.push(CStr::from_ptr(lowered).to_string_lossy().into_owned());
        }
        let image = target.code(program).map_err(|error| nvrtc("taking the code", error))?;
        Ok(Compiled { image, symbols, log })
    }
}

/// As [`compile`], from the cache on disk if it is there and whole. A cache that cannot be written or read costs time
/// and nothing else.
pub fn cached(module: &Module, capability: (u32, u32)) -> Result<Compiled> {
    let Some(folder) = cache::folder() else { return compile(module, capability) };
    let path = folder.join(format!("{}-{:016x}.code", module.name, key(module, capability)?));
    if let Some(compiled) = cache::read(&path).as_deref().and_then(decode) {
        return Ok(compiled);
    }
    let compiled = compile(module, capability)?;
    let _ = cache::write(&path, &encode(&compiled));
    Ok(compiled)
}

/// NVRTC's version, (13, 0) for 13.0. [`Error::Gpu`](crate::Error::Gpu) where there is none.
pub fn version() -> Result<(i32, i32)> {
    libraries::compiler()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two valid pointers.
    let outcome = unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result();
    outcome.map_err(|error| failure(format!("NVRTC's version: {error}")))?;
    Ok((major, minor))
}

/// What the machine code depends on.
fn key(module: &Module, capability: (u32, u32)) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    (version()?, Target::of(capability)?.options(), module.source, module.instances()).hash(&mut hasher);
    module.all_headers().for_each(|header| header.hash(&mut hasher));
    Ok(hasher.finish())
}

/// A line of names, separated by blanks, followed by the code.
fn encode(compiled: &Compiled) -> Vec<u8> {
    let mut bytes = format!("{}\n", compiled.symbols.join(" ")).into_bytes();
    bytes.extend(&compiled.image);
    bytes
}

fn decode(bytes: &[u8]) -> Option<Compiled> {
    let end = bytes.iter().position(|&byte| byte == b'\n')?;
    let symbols = std::str::from_utf8(&bytes[..end]).ok()?.split(' ').map(str::to_owned).collect();
    let image = bytes[end + 1..].to_vec();
    // The driver reads PTX up to a zero.
    let ends = image.starts_with(b"\x7fELF") || image.last() == Some(&0);
    ends.then(|| Compiled { image, symbols, log: String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_newer_than_the_compiler_get_ptx() {
        let known = [75, 80, 86, 90, 120];
        let targets = [(8, 6), (8, 7), (12, 1), (13, 0), (7, 0)].map(|capability| Target::choose(capability, &known));
        let [ptx, machine] = [Target::Ptx, Target::Machine].map(|target| move |number| Some(target(number)));
        assert_eq!(targets, [machine(86), ptx(86), ptx(120), ptx(120), None]);
    }

    #[test]
    fn what_is_cached_comes_back() {
        let compiled =
            Compiled { image: vec![1, 2, 10, 5, 0], symbols: vec!["a".into(), "b".into()], log: String::new() };
        assert_eq!(decode(&encode(&compiled)), Some(compiled));
        assert_eq!(decode(b"no line"), None);
        assert_eq!(decode(b"a\nPTX without an end"), None);
    }
}
