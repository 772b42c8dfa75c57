//! The run-time compiler: CUDA C++ in, machine code for one chip out. Usable from any thread.

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use cudarc::nvrtc::sys::{self, nvrtcResult};

/// A translation unit with the headers it may include.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) name: &'a str,
    pub(crate) text: &'a str,
    /// (the name that `#include` uses, text)
    pub(crate) headers: &'a [(&'a str, String)],
}

/// What compiles kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compiler {
    /// (major, minor), or what is missing.
    pub(crate) version: fn() -> Result<(i32, i32), String>,
    /// Machine code for what the options say, or the compiler's own words.
    pub(crate) compile: fn(&Source<'_>, &[String]) -> Result<Vec<u8>, String>,
}

/// The one that comes with CUDA.
pub(crate) const NVRTC: Compiler = Compiler { version, compile };

/// (major, minor), or what is missing.
pub(crate) fn version() -> Result<(i32, i32), String> {
    // SAFETY: asks the loader whether a library can be opened.
    if !unsafe { sys::is_culib_present() } {
        return Err("NVRTC is not installed (no libnvrtc); install the CUDA toolkit's nvrtc package, or \
                    `pip install nvidia-cuda-nvrtc` and put its lib folder on LD_LIBRARY_PATH"
            .to_owned());
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two integers.
    match unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) } {
        nvrtcResult::NVRTC_SUCCESS => Ok((major, minor)),
        code => Err(words(code)),
    }
}

/// Machine code for what `options` say, or the compiler's own words.
pub(crate) fn compile(source: &Source<'_>, options: &[String]) -> Result<Vec<u8>, String> {
    version()?;
    let text =
        |text: &str| CString::new(text).map_err(|_| format!("{}: a zero byte in its text", source.name));
    let (name, body) = (text(source.name)?, text(source.text)?);
    let headers = source.headers.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>, _>>()?;
    let names = source.headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
    let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
    let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
    let (headers, names, options) = (pointers(&headers), pointers(&names), pointers(&options));

    let mut program = Program(ptr::null_mut());
    let count = |strings: &[*const c_char]| i32::try_from(strings.len()).expect("few headers and options");
    // SAFETY: the strings outlive the call, which copies them.
    checked(unsafe {
        sys::nvrtcCreateProgram(
            &raw mut program.0,
            body.as_ptr(),
            name.as_ptr(),
            count(&headers),
            headers.as_ptr(),
            names.as_ptr(),
        )
    })?;
    // SAFETY: the program was made above, the options outlive the call.
    let result = unsafe { sys::nvrtcCompileProgram(program.0, count(&options), options.as_ptr()) };
    if result != nvrtcResult::NVRTC_SUCCESS {
        return Err(format!("{}: {}\n{}", source.name, words(result), program.log()));
    }
    let mut bytes = 0;
    // SAFETY: compiled above; writes one integer.
    checked(unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut bytes) })?;
    let mut image = vec![0; bytes];
    // SAFETY: `image` has the size that was just told.
    checked(unsafe { sys::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast()) })?;
    Ok(image)
}

/// Destroyed when it goes out of scope.
struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the program exists; writes one integer.
        if unsafe { sys::nvrtcGetProgramLogSize(self.0, &raw mut bytes) } != nvrtcResult::NVRTC_SUCCESS {
            return String::new();
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: `log` has the size that was just told.
        let _ = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made once, destroyed once.
            let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
        }
    }
}

fn checked(result: nvrtcResult) -> Result<(), String> {
    if result == nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(words(result)) }
}

fn words(code: nvrtcResult) -> String {
    // SAFETY: yields a string that is never freed.
    let text = unsafe { sys::nvrtcGetErrorString(code) };
    if text.is_null() {
        return format!("NVRTC error {}", code as u32);
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
