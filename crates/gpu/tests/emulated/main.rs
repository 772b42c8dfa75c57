//! Kernels of single blocks on a CPU (`device.h`), compiled from the sources that NVRTC gets: what no card has to be there for, and
//! what a card shows only now and then.
#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::fs;
use std::path::Path;
use std::process::Command;

/// Functions whose stand-in is called otherwise than they are.
const OTHERWISE: [(&str, &str); 1] = [("copy_wait", "emulated::copy_wait(GROUPS);")];

#[test]
fn attention_of_single_tokens_is_right_whenever_its_copies_are_done() {
    const NAME: &str = "attention_of_single_tokens_is_right_whenever_its_copies_are_done";
    if !cfg!(all(target_arch = "x86_64", target_os = "linux"))
        || Command::new("c++").arg("--version").output().is_err()
    {
        println!("SKIP {NAME}: needs Linux on x86-64 and a C++ compiler");
        return;
    }
    for (dim, shared) in [(128, 7), (64, 3), (128, 12)] {
        let (right, said) = emulate((dim, shared), |source| source);
        assert!(right, "heads of {dim}, {shared} for a K/V head:\n{said}");
    }
    // Each of these is needed, and missed where it is not there.
    for (needed, instead) in [
        ("if (apart) await_oldest();", ""),
        (
            "__syncthreads();\n#if !KV_F8\n        if (apart) stage_keys(i + 1, following);",
            "#if !KV_F8\n        if (apart) stage_keys(i + 1, following);\n        __syncthreads();",
        ),
        (
            "__syncthreads();\n#if !KV_F8\n            if (apart) stage_values",
            "#if !KV_F8\n            if (apart) stage_values",
        ),
    ] {
        let (right, _) = emulate((128, 7), |source| {
            assert_eq!(source.matches(needed).count(), 1, "{needed}");
            source.replace(needed, instead)
        });
        assert!(!right, "nobody misses {needed}");
    }
}

/// Whether `attention.cu`, changed so, does what it should, and what was said.
fn emulate((dim, shared): (usize, usize), changed: impl Fn(String) -> String) -> (bool, String) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let device = fs::read_to_string(here.join("tests/emulated/device.h")).unwrap();
    for name in
        ["prelude.cuh", "activation.cuh", "attention.cuh", "float8.cuh", "kv.cuh", "rope.cuh", "attention.cu"]
    {
        let source = fs::read_to_string(here.join("kernels").join(name)).unwrap();
        let source = if name == "attention.cu" { changed(source) } else { source };
        let source =
            source.replace("extern __shared__ uint4 room[];", "uint4* room = (uint4*)emulated::shared;");
        fs::write(folder.path().join(name), with_stand_ins(&source, &device)).unwrap();
    }
    let program = folder.path().join("attention");
    let defines = [format!("DIM={dim}"), format!("SHARED={shared}")]
        .into_iter()
        .chain(["KV_BYTES=2", "KV_BF16=0", "CAPPED=0", "SINKS=0", "BOTH=0"].map(str::to_owned));
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O1", "-mf16c", "-mfma", "-w", "-o"]).arg(&program);
    compiler.args(defines.map(|define| format!("-D{define}"))).arg("-I").arg(folder.path());
    let compiled = compiler.arg(here.join("tests/emulated/attention.cpp")).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(program).output().unwrap();
    (ran.status.success(), String::from_utf8_lossy(&ran.stdout).into_owned())
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
            let call = format!("return emulated::{name}({});", arguments.join(", "));
            let otherwise = OTHERWISE.iter().find(|(function, _)| *function == name).map(|(_, call)| *call);
            let known = device.contains(&format!(" {name}("));
            made.push_str(&format!("{{ {} }}", otherwise.unwrap_or(if known { &call } else { "abort();" })));
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
