//! Kernels on a CPU (`device.h`), compiled from the sources that NVRTC gets: what no card has to be there for, and what a card shows
//! only now and then.
#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::fs;
use std::path::Path;
use std::process::Command;

/// Functions whose stand-in has another name, or knows what they know when they are compiled.
const OTHERWISE: [(&str, &str); 3] = [
    ("copy_wait", "copy_wait<GROUPS>"),
    ("copy_piece", "copy_piece<PIECE>"),
    ("copy_exponents", "copy_piece<4>"),
];

/// What `attention.cu` is compiled for, as defines; the last of a name counts.
type Shape = &'static [&'static str];
const PLAIN: Shape = &["KV_BYTES=2", "KV_BF16=0", "CAPPED=0", "SINKS=0", "BOTH=0"];
const MAIN: Shape = &["DIM=128", "GROUP=7"];
/// Rows are copied in pieces of 8 bytes and filled up to whole steps of the matrix instruction.
const PADDED: Shape = &["DIM=20", "GROUP=3"];

#[test]
fn attention_of_single_tokens_is_right_whenever_its_copies_are_done() {
    const NAME: &str = "attention_of_single_tokens_is_right_whenever_its_copies_are_done";
    if !cfg!(all(target_arch = "x86_64", target_os = "linux"))
        || Command::new("c++").arg("--version").output().is_err()
    {
        println!("SKIP {NAME}: needs Linux on x86-64 and a C++ compiler");
        return;
    }
    for shape in [
        MAIN,
        PADDED,
        &["DIM=64", "GROUP=3"],
        &["DIM=128", "GROUP=12"],
        &["DIM=96", "GROUP=8", "KV_BF16=1", "CAPPED=1"],
        &["DIM=128", "GROUP=4", "KV_BYTES=1"],
        &["DIM=76", "GROUP=2", "KV_BYTES=1", "SINKS=1"],
    ] {
        let (right, said) = emulate(shape, |source| source);
        assert!(right, "{shape:?}:\n{said}");
    }
    // Each of these is needed, and missed where it is not there.
    for (shape, needed, instead) in [
        (MAIN, "if (apart) await_oldest();", ""),
        (
            MAIN,
            "__syncthreads();\n#if !KV_F8\n        if (apart) stage_keys(i + 1, following);",
            "#if !KV_F8\n        if (apart) stage_keys(i + 1, following);\n        __syncthreads();",
        ),
        (
            MAIN,
            "__syncthreads();\n#if !KV_F8\n            if (apart) stage_values",
            "#if !KV_F8\n            if (apart) stage_values",
        ),
        (PADDED, "clear_padding<THREADS>(queries_at, PARTS * QUERIES);", ""),
        (PADDED, "if (a.clusters) cluster_await();", ""),
        (PADDED, "max(merged, 0) * 4 + GROUP * 8", "max(merged, 0) * 4"),
        (PADDED, "await_sent(&arrived);", ""),
    ] {
        let (right, _) = emulate(shape, |source| {
            assert_eq!(source.matches(needed).count(), 1, "{needed}");
            source.replace(needed, instead)
        });
        assert!(!right, "nobody misses {needed}");
    }
}

/// Whether `attention.cu`, changed so, does what it should, and what was said.
fn emulate(shape: Shape, changed: impl Fn(String) -> String) -> (bool, String) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let device = fs::read_to_string(here.join("tests/emulated/device.h")).unwrap();
    for name in
        ["prelude.cuh", "activation.cuh", "attention.cuh", "float8.cuh", "kv.cuh", "rope.cuh", "attention.cu"]
    {
        let source = fs::read_to_string(here.join("kernels").join(name)).unwrap();
        let source = if name == "attention.cu" { changed(source) } else { source };
        let source =
            source.replace("extern __shared__ uint4 room[];", "uint4* room = (uint4*)emulated::shared();");
        fs::write(folder.path().join(name), with_stand_ins(&source, &device)).unwrap();
    }
    let program = folder.path().join("attention");
    let mut compiler = Command::new("c++");
    // Products are rounded where the kernel says so, memory has no types there, and a load that is not aligned fails.
    compiler.args([
        "-std=c++17",
        "-O1",
        "-mf16c",
        "-mfma",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-w",
    ]);
    compiler.args(["-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"]);
    compiler.args(PLAIN.iter().chain(shape).map(|define| format!("-D{define}"))).arg("-I").arg(folder.path());
    compiler.arg("-o").arg(&program).arg(here.join("tests/emulated/attention.cpp"));
    let compiled = compiler.output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(program).output().unwrap();
    (ran.status.success(), format!("{}{}", String::from_utf8_lossy(&ran.stdout), ran.status))
}

/// A source whose functions call those of `device.h` where they are written in the chip's own instructions; what has none there is
/// not to be reached.
fn with_stand_ins(source: &str, device: &str) -> String {
    let mut made = String::new();
    let mut rest = source;
    while let Some(at) = rest.find("DEVICE ") {
        let opens = at + rest[at..].find(['{', '\n']).expect("a line ends");
        let (Some(parameters), true) = (rest[at..opens].find('('), rest[opens..].starts_with('{')) else {
            made.push_str(&rest[..opens]);
            rest = &rest[opens..];
            continue;
        };
        let (head, body) = (&rest[..opens], &rest[opens..]);
        let ends = 1 + closing(body);
        let name = head[at..at + parameters].rsplit(' ').next().unwrap_or_default();
        made.push_str(head);
        if body[..ends].contains("asm") {
            let arguments: Vec<&str> = head[at + parameters + 1..]
                .trim_end()
                .trim_end_matches(')')
                .split(',')
                .filter_map(|parameter| parameter.rsplit([' ', '*', '&']).next())
                .map(|name| name.split('[').next().unwrap_or_default())
                .collect();
            let otherwise =
                OTHERWISE.iter().find(|(function, _)| *function == name).map(|(_, called)| *called);
            let own = Some(name).filter(|name| device.contains(&format!(" {name}(")));
            let call = otherwise
                .or(own)
                .map(|called| format!("return emulated::{called}({});", arguments.join(", ")));
            made.push_str(&format!("{{ {} }}", call.as_deref().unwrap_or("abort();")));
        } else {
            made.push_str(&body[..ends]);
        }
        rest = &body[ends..];
    }
    made.push_str(rest);
    made
}

/// Where the brace that a text begins with is closed.
fn closing(text: &str) -> usize {
    let mut depth = 0;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            return at;
        }
    }
    panic!("a brace that is never closed");
}
