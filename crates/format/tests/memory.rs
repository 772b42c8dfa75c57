//! Reading a file takes a small multiple of its size, however hostile it is.
#![expect(unsafe_code, reason = "a global allocator, to count with, cannot be written without")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use fornax_format::{Gguf, Safetensors};

/// Counts what each thread holds, so that tests beside each other do not disturb the figure.
struct Counting;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn add(bytes: usize) {
    HELD.set(HELD.get().wrapping_add(bytes));
    PEAK.set(PEAK.get().max(HELD.get()));
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.set(HELD.get().wrapping_sub(layout.size()));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
    // `realloc` is the default one, made of these: it counts old and new together, as the worst allocator would.
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes held at once by `act`, more than before it.
fn peak(act: impl FnOnce()) -> usize {
    let before = HELD.get();
    PEAK.set(before);
    act();
    PEAK.get() - before
}

/// What reading a file of `len` bytes may take: ten times its size, and room for paths and messages. A model's
/// own file is mostly data, of which reading takes nothing.
fn allowed(len: usize) -> usize {
    10 * len + (64 << 10)
}

fn check_gguf(what: &str, file: Vec<u8>) {
    let allowed = allowed(file.len());
    let taken = peak(|| drop(Gguf::from_bytes(vec![file])));
    assert!(taken <= allowed, "{what}: {taken} bytes taken, {allowed} allowed");
}

fn check_safetensors(what: &str, file: Vec<u8>) {
    let allowed = allowed(file.len());
    let taken = peak(|| drop(Safetensors::from_bytes(file)));
    assert!(taken <= allowed, "{what}: {taken} bytes taken, {allowed} allowed");
}

#[test]
fn hostile_files_take_a_small_multiple_of_their_size() {
    for directory in ["tests/hostile", "tests/valid"] {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let what = path.to_str().unwrap();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("gguf") => check_gguf(what, std::fs::read(&path).unwrap()),
                Some("safetensors") => check_safetensors(what, std::fs::read(&path).unwrap()),
                _ => {}
            }
        }
    }
}

/// A GGUF file with this many pairs and tensors, as `body` lists them.
fn gguf(tensors: u64, pairs: u64, body: &[u8]) -> Vec<u8> {
    [b"GGUF".as_slice(), &3u32.to_le_bytes(), &tensors.to_le_bytes(), &pairs.to_le_bytes(), body].concat()
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A pair whose value is an array: its elements are in `body`.
fn array(kind: u32, count: u64, body: &[u8]) -> Vec<u8> {
    [&string("k")[..], &9u32.to_le_bytes(), &kind.to_le_bytes(), &count.to_le_bytes(), body].concat()
}

/// How many of the smallest things the files below hold. The growth of a vector is at its worst just behind a power
/// of two.
const MANY: u64 = (1 << 15) + 1;

#[test]
fn many_tiny_pairs_take_a_small_multiple() {
    let pair = |number: u64| [&string(&format!("{number:x}"))[..], &0u32.to_le_bytes(), &[1]].concat();
    check_gguf("pairs", gguf(0, MANY, &(0..MANY).flat_map(pair).collect::<Vec<_>>()));
}

#[test]
fn many_tiny_strings_and_arrays_take_a_small_multiple() {
    let many = |element: &[u8]| element.repeat(MANY as usize);
    let empty_array = [&0u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat();
    check_gguf("strings", gguf(0, 1, &array(8, MANY, &many(&0u64.to_le_bytes()))));
    check_gguf("one-byte strings", gguf(0, 1, &array(8, MANY, &many(&string("x")))));
    check_gguf("bools", gguf(0, 1, &array(7, MANY, &many(&[1]))));
    check_gguf("arrays", gguf(0, 1, &array(9, MANY, &many(&empty_array))));
    // Every level of nesting claims all of the rest, which is made of nothing.
    let level = [&9u32.to_le_bytes()[..], &MANY.to_le_bytes()].concat();
    let levels = [&level[..], &level, &8u32.to_le_bytes(), &MANY.to_le_bytes()].concat();
    check_gguf("levels", gguf(0, 1, &array(9, MANY, &[levels, many(&empty_array)].concat())));
}

#[test]
fn many_tiny_tensors_take_a_small_multiple() {
    let line = |number: u64| {
        [
            &string(&format!("{number:x}"))[..],
            &0u32.to_le_bytes(),
            &24u32.to_le_bytes(),
            &(number * 32).to_le_bytes(),
        ]
        .concat()
    };
    let list: Vec<u8> = (0..MANY).flat_map(line).collect();
    check_gguf("lines without data", gguf(MANY, 0, &list));
    let empty = |number: u64| {
        let rank_and_dimension = [&1u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat();
        [&string(&format!("{number:x}"))[..], &rank_and_dimension, &24u32.to_le_bytes(), &0u64.to_le_bytes()]
            .concat()
    };
    check_gguf("empty tensors", gguf(MANY, 0, &(0..MANY).flat_map(empty).collect::<Vec<_>>()));
}

#[test]
fn headers_of_safetensors_take_a_small_multiple() {
    let file = |header: String| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let list = |line: &dyn Fn(u64) -> String| (0..MANY).map(line).collect::<Vec<_>>().join(",");
    let tensors =
        list(&|number| format!(r#""{number:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#));
    check_safetensors("tensors", file(format!("{{{tensors}}}")));
    let dimensions = list(&|_| "0".to_owned());
    let info = format!(r#"{{"dtype":"U8","shape":[{dimensions}],"data_offsets":[0,0]}}"#);
    check_safetensors("dimensions", file(format!(r#"{{"a":{info}}}"#)));
    check_safetensors("unknown", file(format!(r#"{{"a":{{"x":[{dimensions}]}}}}"#)));
    let notes = list(&|number| format!(r#""{number:x}":"""#));
    check_safetensors("notes", file(format!(r#"{{"__metadata__":{{{notes}}}}}"#)));
    check_safetensors("open brackets", file(format!(r#"{{"a":{{"x":{}"#, "[".repeat(MANY as usize))));
}

#[test]
fn an_index_takes_a_small_multiple() {
    let list = |line: &dyn Fn(u64) -> String| (0..MANY).map(line).collect::<Vec<_>>().join(",");
    for (what, names) in [
        ("one file", list(&|number| format!(r#""{number:x}":"a""#))),
        ("many files", list(&|number| format!(r#""{number:x}":"{number:x}""#))),
    ] {
        let index = format!(r#"{{"weight_map":{{{names}}}}}"#).into_bytes();
        let allowed = allowed(index.len());
        let taken = peak(|| drop(Safetensors::from_shards(index, Vec::new())));
        assert!(taken <= allowed, "{what}: {taken} bytes taken, {allowed} allowed");
    }
}
