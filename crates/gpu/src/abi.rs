//! What Rust and the kernels share: structures that launches pass by value, and constants that both sides count with.
//!
//! Each structure is written twice, in Rust and in CUDA C++. Here the Rust side says what it takes the other to be, and
//! that is asserted at the end of the kernel file which declares it, whenever that file is compiled: size, and name,
//! offset and size of every field. A field that is moved, added, renamed or widened on one side alone is an error of
//! the compiler, not wrong numbers.

use std::fmt::Write;

use crate::{memory, ops, rate, step, upload};

/// A structure as Rust lays it out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// The file of `kernels/` that declares it, and its name there.
    pub(crate) file: &'static str,
    pub(crate) name: &'static str,
    pub(crate) bytes: usize,
    pub(crate) fields: &'static [Field],
}

/// A field: one in the kernel's structure, or where Rust has an array, several of one size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) names: &'static [&'static str],
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// A number that a kernel file computes with and the host counts by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Constant {
    pub(crate) file: &'static str,
    /// Any constant expression of that file.
    pub(crate) name: &'static str,
    pub(crate) value: usize,
}

impl Constant {
    pub(crate) const fn new(file: &'static str, name: &'static str, value: usize) -> Constant {
        Constant { file, name, value }
    }
}

/// Bytes of what a function points at: of a field, where `size_of` cannot name its type.
pub(crate) const fn field_bytes<S, F>(_field: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// `layout!(Type, "Name" in "file.cuh", { field, array: first second })`. Every field is named, or it does not compile.
macro_rules! layout {
    ($type:ident, $name:literal in $file:literal, { $($field:ident $(: $($there:ident)+)?),* $(,)? }) => {{
        const _: fn($type) = |$type { $($field: _),* }| ();
        $crate::abi::Layout {
            file: $file,
            name: $name,
            bytes: size_of::<$type>(),
            fields: &[$($crate::abi::Field {
                names: $crate::abi::layout!(@names $field $(: $($there)+)?),
                offset: std::mem::offset_of!($type, $field),
                bytes: $crate::abi::field_bytes(|of: &$type| &of.$field),
            }),*],
        }
    }};
    (@names $field:ident) => { &[stringify!($field)] };
    (@names $field:ident : $($there:ident)+) => { &[$(stringify!($there)),+] };
}
pub(crate) use layout;

/// Every structure that a launch passes or a kernel finds in memory.
fn layouts() -> impl Iterator<Item = &'static Layout> {
    [step::LAYOUTS, memory::LAYOUTS, upload::LAYOUTS].into_iter().chain(ops::LAYOUTS).flatten()
}

fn constants() -> impl Iterator<Item = &'static Constant> {
    [step::CONSTANTS, memory::CONSTANTS, rate::CONSTANTS].into_iter().chain(ops::CONSTANTS).flatten()
}

/// A kernel file with what Rust takes its structures and constants to be asserted at its end.
pub(crate) fn checked(file: &str, text: &str) -> String {
    let mut text = text.to_owned();
    let mut assert = |what: &str, holds: String| {
        writeln!(text, "static_assert({holds}, \"{what} of {file} is not what Rust takes it for\");")
            .expect("a string takes everything");
    };
    for layout in layouts().filter(|layout| layout.file == file) {
        let name = layout.name;
        for Field { names, offset, bytes } in layout.fields {
            let each = bytes / names.len();
            for (index, field) in names.iter().enumerate() {
                let at = offset + index * each;
                // NVRTC has no `offsetof`; this is what its front end makes of one.
                let offset = format!("__INTADDR__(&(({name}*)0)->{field})");
                let holds = format!("{offset} == {at} && sizeof({name}::{field}) == {each}");
                assert(&format!("{name}::{field}"), holds);
            }
        }
        assert(name, format!("sizeof({name}) == {}", layout.bytes));
    }
    for Constant { name, value, .. } in constants().filter(|constant| constant.file == file) {
        assert(name, format!("({name}) == {value}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::program::{HEADERS, UNITS};

    /// All of this crate's sources, one after the other.
    fn sources(folder: &Path) -> String {
        let mut entries: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        let text = |path: &std::path::PathBuf| match path.is_dir() {
            true => sources(path),
            false => std::fs::read_to_string(path).unwrap(),
        };
        entries.iter().map(text).collect()
    }

    #[test]
    fn every_structure_that_rust_lays_out_for_kernels_is_compared() {
        let text = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
        let laid_out = text.lines().filter(|line| line.trim() == "#[repr(C)]").count();
        assert_eq!(layouts().filter(|layout| !layout.fields.is_empty()).count(), laid_out);
    }

    #[test]
    fn what_is_compared_stands_in_a_kernel_file() {
        let texts = HEADERS.iter().chain(UNITS);
        let text = |file: &str| texts.clone().find(|(name, _)| *name == file).map(|(_, text)| *text);
        for layout in layouts() {
            let text = text(layout.file).unwrap_or_else(|| panic!("no file {}", layout.file));
            assert!(text.contains(&format!("struct {} {{", layout.name)), "{layout:?}");
            assert!(checked(layout.file, text).contains(&format!("sizeof({})", layout.name)), "{layout:?}");
        }
        for constant in constants() {
            assert!(
                text(constant.file).is_some_and(|text| checked(constant.file, text) != text),
                "{constant:?}"
            );
        }
    }

    #[test]
    fn fields_have_the_offsets_that_rust_gives_them() {
        #[repr(C, align(8))]
        struct Pair {
            first: u64,
            both: [i32; 2],
            last: f32,
        }
        const LAYOUT: Layout = layout!(Pair, "Pair" in "pair.cuh", { first, both: left right, last });
        assert_eq!(LAYOUT.bytes, 24);
        let fields: Vec<_> =
            LAYOUT.fields.iter().map(|field| (field.names, field.offset, field.bytes)).collect();
        let wanted: [(&[&str], usize, usize); 3] =
            [(&["first"], 0, 8), (&["left", "right"], 8, 8), (&["last"], 16, 4)];
        assert_eq!(fields, wanted);
    }
}
