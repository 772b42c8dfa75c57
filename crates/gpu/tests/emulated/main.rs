//! Kernels on a CPU, compiled from the sources that NVRTC gets: `device.h` is the language, `chip.h` the chip. What no
//! card has to be there for, and what a card shows only now and then.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a helper of a test fails the test, or says that it is skipped"
)]

use std::fs;
use std::path::Path;
use std::process::Command;

/// What a program is compiled for, as defines; the last of a name counts.
type Defines = &'static [&'static str];
const PLAIN: Defines = &["KV_BYTES=2", "KV_BF16=0", "CAPPED=0", "SINKS=0", "BOTH=0"];
const MAIN: Defines = &["DIM=128", "GROUP=7"];
/// Rows are copied in pieces of 8 bytes and padded to whole steps of the tensor-core instruction.
const PADDED: Defines = &["DIM=20", "GROUP=3"];

/// Latent rows, and how long a sequence is that goes beyond a span.
const LATENT: Defines = &["LATENT=64", "TURNED=16", "ROWS=16", "STAGES=2", "LONG=1100"];
const F32: Defines = &["KV_BYTES=4", "DIM=20", "GROUP=3"];
/// Products of one row, and of several.
const ONE: Defines = &[
    "QUANT=\"quant/q8_0.cuh\"",
    "F16_CODES=0",
    "SLICES=2",
    "STAGES=3",
    "THREADS=128",
    "GATES=0",
    "ONE_ROW=1",
    "EACH=2",
    "FOURS=1",
    "FEW_GROUPS=1",
    "ALL_AHEAD=0",
    "EARLY=0",
];
const SEVERAL: Defines = &[
    "QUANT=\"quant/f16.cuh\"",
    "F16_CODES=1",
    "SLICES=2",
    "STAGES=3",
    "THREADS=64",
    "GATES=0",
    "ONE_ROW=0",
    "ROWS=8",
    "FOURS=1",
];

/// A kernel's file, a line of it that is needed, and what stands there instead in a mutant.
type Mutant = (&'static str, &'static str, &'static str);

#[test]
fn attention_of_single_tokens_is_right_whenever_its_copies_are_done() {
    let test = Test::new("attention_of_single_tokens_is_right_whenever_its_copies_are_done", "attention.cpp");
    for shape in [
        MAIN,
        PADDED,
        &["DIM=64", "GROUP=3"],
        &["DIM=128", "GROUP=12"],
        &["DIM=96", "GROUP=8", "KV_BF16=1", "CAPPED=1"],
        &["DIM=128", "GROUP=4", "KV_BYTES=1"],
        &["DIM=76", "GROUP=2", "KV_BYTES=1", "SINKS=1"],
    ] {
        test.passes(shape);
    }
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
        (PADDED, "if (a.clusters) cluster_wait_relaxed();", ""),
        (PADDED, "max(merged, 0) * 4 + GROUP * 8", "max(merged, 0) * 4"),
        (PADDED, "cluster_receive(&arrived);", ""),
    ] {
        test.fails_with(shape, ("attention.cu", needed, instead));
    }
}

#[test]
fn attention_in_f32_is_right_and_a_token_has_the_same_bits_alone() {
    let test =
        Test::new("attention_in_f32_is_right_and_a_token_has_the_same_bits_alone", "attention_f32.cpp");
    test.passes(F32);
    test.passes(&["KV_BYTES=4", "DIM=64", "GROUP=7", "CAPPED=1", "SINKS=1"]);
    for (needed, instead) in [
        ("rescale[h] = expf(before - most);", "rescale[h] = 1.0f;"),
        ("if (key >= from && key < to) {", "if (key < to) {"),
    ] {
        test.fails_with(F32, ("attention_f32.cu", needed, instead));
    }
}

#[test]
fn attention_over_latent_rows_is_right_and_has_the_same_bits_however_it_is_spread() {
    let name = "attention_over_latent_rows_is_right_and_has_the_same_bits_however_it_is_spread";
    let test = Test::new(name, "latent.cpp");
    test.passes(LATENT);
    for shape in [
        // Rows that are copied value by value, and padded.
        &["LATENT=33", "TURNED=8", "ROWS=32", "STAGES=1"][..],
        &["LATENT=33", "TURNED=8", "ROWS=16", "STAGES=3", "KV_BYTES=1"],
        &["LATENT=96", "TURNED=32", "ROWS=32", "STAGES=2", "KV_BF16=1"],
        &["LATENT=64", "TURNED=64", "ROWS=64", "STAGES=3"],
    ] {
        test.passes(&shape.iter().chain(&["LONG=1100"]).copied().collect::<Vec<_>>());
    }
    test.passes(&["LATENT=20", "TURNED=4", "KV_BYTES=4", "LONG=70"]);
    let copied = "copy_wait<STAGES == 1 ? 0 : STAGES - 2>();\n                __syncthreads();";
    for (needed, instead) in [
        (copied, "__syncthreads();"),
        (copied, "copy_wait<STAGES == 1 ? 0 : STAGES - 2>();"),
        ("s[i] = key < own_from || key > own ?", "s[i] = key > own ?"),
        ("place >= from && place <= last);", "true);"),
        (
            "score_page(queries_at, keys, scores, warp, lane);\n                __syncthreads();",
            "score_page(queries_at, keys, scores, warp, lane);",
        ),
        ("if (__any_sync(ALL_LANES, rescale[0] != 1.0f || rescale[1] != 1.0f))", "if (false)"),
        ("starts ? 0.0f : to[column]", "0.0f"),
        ("before_max = all;", ""),
    ] {
        test.fails_with(LATENT, ("latent.cu", needed, instead));
    }
    let merged = "earlier = rescale_of(most, all), later = rescale_of(from[LATENT], all);";
    test.fails_with(LATENT, ("latent_merge.cu", merged, "earlier = 1.0f, later = 1.0f;"));
}

#[test]
fn products_of_heads_are_right_and_a_token_has_the_same_bits_alone() {
    let test =
        Test::new("products_of_heads_are_right_and_a_token_has_the_same_bits_alone", "head_products.cpp");
    test.passes(&[]);
    for (needed, instead) in [
        ("copy_wait<STAGES - 2>();", ""),
        ("blockIdx.y * tiles + tile", "tile"),
        ("head * a.each + a.column", "head * a.each"),
        (
            "if (lane == 0) factors[row] = row_unscale(most);\n    }\n    __syncthreads();",
            "if (lane == 0) factors[row] = row_unscale(most);\n    }",
        ),
    ] {
        test.fails_with(&[], ("head_products.cu", needed, instead));
    }
}

#[test]
fn operations_on_rows_are_right_in_every_storage_of_keys() {
    let test = Test::new("operations_on_rows_are_right_in_every_storage_of_keys", "rows.cpp");
    for storage in [&["KV_BYTES=2"], &["KV_BF16=1"], &["KV_BYTES=1"], &["KV_BYTES=4"]] {
        test.passes(storage);
    }
    test.fails_with(&[], ("norm.cu", "if (norm.centred) {", "if (false) {"));
    test.fails_with(
        &[],
        (
            "norm.cu",
            "for (int k = AT_ONCE * WARP + lane; k < norm.columns; k += WARP) squares",
            "for (int k = 0; k < 0;) squares",
        ),
    );
    let function = "of_value(function, parameters, x[r * columns + k])";
    let other =
        "of_value(function, make_float4(parameters.x, parameters.y, parameters.z, 0), x[r * columns + k])";
    test.fails_with(&[], ("rows.cu", function, other));
    test.fails_with(&[], ("rows.cu", "step.positions[r] + (u32)offset", "step.positions[r]"));
    test.fails_with(
        &[],
        ("rope.cu", "latents[(long)r * latent + i] : turneds", "latents[(long)r * latent] : turneds"),
    );
    let barrier = "__syncthreads();\n        if (start == 0) wait_for_inputs();";
    test.fails_with(&[], ("rope.cu", barrier, ""));
}

#[test]
fn products_in_f32_lookups_and_adapters_are_right() {
    let test = Test::new("products_in_f32_lookups_and_adapters_are_right", "plain.cpp");
    test.passes(&[]);
    test.fails_with(&[], ("gemv_f32.cu", "if (lane > 0) return;", "if (lane > 1) return;"));
    test.fails_with(&[], ("expert_f32.cu", "(part.rows + 15) / 16 * 16", "part.rows"));
    test.fails_with(&[], ("embed.cu", "if (id < 0) id = sampled[-1 - id];", "if (id < 0) id = 0;"));
    test.fails_with(&[], ("low_rank.cu", "change.adapter != adapter || own < 0", "own < 0"));
}

#[test]
fn what_keeps_a_state_is_right_in_any_chunks_and_leaves_it_where_it_should() {
    let name = "what_keeps_a_state_is_right_in_any_chunks_and_leaves_it_where_it_should";
    let test = Test::new(name, "recurrence.cpp");
    test.passes(&[]);
    for (needed, instead) in [
        // The stage that is read is another than the one that is filled.
        ("chunk % 2 * a.chunk * TOKEN", "0 * a.chunk * TOKEN"),
        ("        __syncthreads();\n    }\n    if (there) store_share", "    }\n    if (there) store_share"),
        ("state_at(a.states, row.from) + at, part", "state_at(a.states, row.to) + at, part"),
        ("if (start + t + 1 == due) {", "if (start + t == due) {"),
        ("tokens - before + i)", "row.tokens - before + i)"),
        (
            "fmaf_rn(kept, sum, __fmul_rn(of_column, shares.z))",
            "fmaf_rn(kept, sum, __fmul_rn(change, shares.z))",
        ),
        ("a.turns ? head % a.key : head / (a.value / a.key)", "head % a.key"),
        ("min(t + 1, count - 1) * TOKEN", "t * TOKEN"),
        ("float sum = bias;", "float sum = 0.0f;"),
        ("(chunk & 1) * a.chunk * TOKEN", "0 * a.chunk * TOKEN"),
        (
            "const float* from = state_at(a.states, row.from) + at;",
            "const float* from = state_at(a.states, row.to) + at;",
        ),
        ("if (due == start + t + 1) {", "if (due == start + t) {"),
        ("head / (a.heads / a.groups) * a.state", "head % a.groups * a.state"),
        ("__fmaf_rn(value, skip, sum)", "sum"),
        ("odd ? values.w : values.z", "odd ? values.z : values.w"),
        ("__fmul_rn(rates[i], length)", "__fmul_rn(rates[0], length)"),
        ("if (due == t + 1) {\n            leave", "if (due == t) {\n            leave"),
        ("next_x = a.x[(token + 1) * a.channels + channel],", ""),
    ] {
        test.fails_with(&[], ("recurrence.cu", needed, instead));
    }
}

#[test]
fn experts_are_chosen_and_dealt_their_rows() {
    let test = Test::new("experts_are_chosen_and_dealt_their_rows", "experts.cpp");
    test.passes(&[]);
    test.fails_with(
        &[],
        ("experts.cu", "__syncthreads();\n    int start = 0, all = 0;", "int start = 0, all = 0;"),
    );
    test.fails_with(&[], ("experts.cu", "(0xffffffffu - number)", "(u32)number"));
    test.fails_with(&[], ("experts.cu", "rank(groups[e / size], e / size) < last", "false"));
    test.fails_with(&[], ("experts.cu", "if (sum < least) sum = least;", ""));
    test.fails_with(
        &[],
        (
            "experts.cu",
            "place = stack.places ? stack.places[pair] : pair;\n    rows",
            "place = pair;\n    rows",
        ),
    );
    test.fails_with(&[], ("experts.cu", "weighs ? stack", "!weighs ? stack"));
}

#[test]
fn tokens_are_drawn_from_what_is_kept() {
    let test = Test::new("tokens_are_drawn_from_what_is_kept", "sample.cpp");
    test.passes(&[]);
    let barrier =
        "__syncthreads();\n    for (int w = 0; w < THREADS / WARP; w++) value = max(value, room[w]);";
    test.fails_with(
        &[],
        ("sample.cu", barrier, "for (int w = 0; w < THREADS / WARP; w++) value = max(value, room[w]);"),
    );
    test.fails_with(&[], ("sample.cu", "if (!kept) logits[q][i] = -INFINITY_F;", ""));
}

#[test]
fn products_of_one_row_and_of_several_are_right_whenever_their_copies_are_done() {
    let name = "products_of_one_row_and_of_several_are_right_whenever_their_copies_are_done";
    let test = Test::new(name, "gemv.cpp");
    test.passes(ONE);
    test.passes(SEVERAL);
    for format in [ONE, SEVERAL] {
        let floats = ["QUANT=\"quant/fp8_128.cuh\"", "F16_CODES=0", "F32_SCALES"];
        let defines: Vec<&str> = format.iter().chain(&floats).copied().collect();
        test.passes(&defines);
    }
    test.fails_with(ONE, ("gemv.cu", "copy_wait<STAGES - 1>();", ""));
    test.fails_with(ONE, ("gemv.cu", "team_sync(team);\n        if (ends) {", "if (ends) {"));
    test.fails_with(SEVERAL, ("gemv.cu", "if (AHEAD > 0) copy_wait<(AHEAD > 0 ? AHEAD - 1 : 0)>();", ""));
    test.fails_with(SEVERAL, ("gemv.cu", "if (threadIdx.x == 0) *ticket = 0;", ""));
}

#[test]
fn rows_and_weights_of_8_bit_floats_lie_as_products_read_them() {
    let test = Test::new("rows_and_weights_of_8_bit_floats_lie_as_products_read_them", "floats8.cpp");
    test.passes(&[]);
    test.fails_with(
        &[],
        ("form.cu", "((lane / 8 * 2 + lane % 2) ^ to.swizzle) * 16", "(lane / 8 * 2 + lane % 2) * 16"),
    );
    test.fails_with(&[], ("form.cu", "((lane / 8 * 2 + lane % 2) ^ to.swizzle)", "(lane / 4 ^ to.swizzle)"));
    let second = "second[4] = {w0.z, w1.z, w0.w, w1.w};";
    test.fails_with(&[], ("quant/fp8_128.cuh", second, "second[4] = {w0.z, w0.w, w1.z, w1.w};"));
}

/// A program of this folder that runs kernels and compares what they write with an independent result.
struct Test {
    program: &'static str,
    /// Whether this machine can run it.
    runs: bool,
}

impl Test {
    fn new(name: &str, program: &'static str) -> Test {
        let runs = cfg!(all(target_arch = "x86_64", target_os = "linux"))
            && Command::new("c++").arg("--version").output().is_ok();
        if !runs {
            println!("SKIP {name}: needs Linux on x86-64 and a C++ compiler");
        }
        Test { program, runs }
    }

    /// The kernels as they are.
    fn passes(&self, defines: &[&str]) {
        let (right, said) = self.run(defines, None);
        assert!(right, "{} {defines:?}:\n{said}", self.program);
    }

    /// A mutant is found out.
    fn fails_with(&self, defines: Defines, mutant: Mutant) {
        let (right, _) = self.run(defines, Some(mutant));
        assert!(!right || !self.runs, "nobody misses {}", mutant.1);
    }

    /// Whether the kernels do what they should, and what was said.
    fn run(&self, defines: &[&str], mutant: Option<Mutant>) -> (bool, String) {
        if !self.runs {
            return (true, String::new());
        }
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = tempfile::tempdir().unwrap();
        if let Some((file, needed, instead)) = mutant {
            let source = fs::read_to_string(here.join("kernels").join(file)).unwrap();
            assert_eq!(source.matches(needed).count(), 1, "{needed}");
            let file = folder.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, source.replace(needed, instead)).unwrap();
        }
        let program = folder.path().join("program");
        let mut compiler = Command::new("c++");
        // Products are rounded where the kernel says so, memory has no types there, and a misaligned load fails.
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
        compiler.args(PLAIN.iter().chain(defines).map(|define| format!("-D{define}")));
        // A mutant's file is found before the one that it replaces.
        for folder in [folder.path(), &here.join("kernels"), &here.join("tests/emulated")] {
            compiler.arg("-I").arg(folder);
        }
        compiler.args(["-DCHIP=\"chip.h\"", "-o"]);
        compiler.arg(&program).arg(here.join("tests/emulated").join(self.program));
        let compiled = compiler.output().unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let ran = Command::new(program).output().unwrap();
        (ran.status.success(), format!("{}{}", String::from_utf8_lossy(&ran.stdout), ran.status))
    }
}
