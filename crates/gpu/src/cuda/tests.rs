//! What the backend asks of the driver, seen by a fake one: launches, graphs, memory, errors. Nothing is computed.

use std::collections::BTreeSet;

use fornax_compute::{
    Between, ConvForm, DeltaHeads, GateOrder, GivenRows, HeadProducts, KeySharing, KvDType, KvGroup, KvKind,
    LatentAttention, LatentHeads, PageId, Row, RowState, Sampling, ScanHeads, Sizes, Token, conv_values,
};
use fornax_format::{DType, View};

use super::*;
use crate::driver::fake::{self, Live};
use crate::memory::COLUMNS_MAX;
use crate::upload::SLOTS;

const HEADS: Heads = Heads { query: 4, kv: 2, dim: 32 };
const HIDDEN: usize = 128;
const FFN: usize = 256;
const VOCAB: usize = 64;
const TOKENS_MAX: usize = 80;
const PAGES: usize = TOKENS_MAX + 2;

/// One layer of the llama family, of zeros.
struct Model {
    embedding: Weight,
    norm: Norm<Buf>,
    qkv: Weight,
    output: Weight,
    gate_up: Weight,
    down: Weight,
    rope: Rope<Buf>,
    kv: Kv,
    residual: Buf,
    branch: Buf,
    attention: [Buf; 2],
    mlp: [Buf; 2],
    wanted: [Buf; 2],
    logits: Buf,
}

fn options() -> CudaOptions {
    CudaOptions { tokens_max: TOKENS_MAX, slots: TOKENS_MAX, pages_max: 1 << 10, ..CudaOptions::default() }
}

fn with_zeros<T>(dtype: DType, rows: usize, columns: usize, body: impl FnOnce(Part<'_>) -> T) -> T {
    let bytes = vec![0; dtype.bytes_for(rows * columns).expect("whole blocks")];
    body(View::new("zeros", dtype, vec![rows, columns], &bytes).expect("whole blocks").into())
}

fn zeros(cuda: &Cuda, dtype: DType, rows: usize, columns: usize) -> Result<Weight, Error> {
    with_zeros(dtype, rows, columns, |part| cuda.upload(&[part]))
}

impl Model {
    fn new(cuda: &Cuda) -> Result<Model, Error> {
        let rows = |columns| cuda.alloc(Purpose::Activations, TOKENS_MAX, columns);
        let group =
            KvGroup { layers: 1, kind: KvKind::pairs(HEADS.kv, HEADS.dim), window: None, pages: PAGES };
        cuda.foresee(&Model::attention(), true);
        let gates = Role::Gates { glu: Glu::Silu, adapted: false };
        let zeros_for = |role, dtype, rows, columns| {
            with_zeros(dtype, rows, columns, |part| cuda.upload_for(role, &[part]))
        };
        Ok(Model {
            embedding: with_zeros(DType::F16, VOCAB, HIDDEN, |part| cuda.upload_table(&[part], true))?,
            norm: Norm::rms(cuda.upload_values(&[1.0; HIDDEN])?, 1e-6),
            qkv: zeros_for(Role::Tokens, DType::Q8_0, HEADS.qkv_columns(), HIDDEN)?,
            output: zeros_for(Role::Tokens, DType::BF16, HIDDEN, HIDDEN)?,
            gate_up: zeros_for(gates, DType::Q8_0, 2 * FFN, HIDDEN)?,
            down: zeros_for(Role::Tokens, DType::BF16, HIDDEN, FFN)?,
            rope: Rope {
                frequencies: cuda.upload_values(&[1.0; 16])?,
                pairs: 16,
                magnitude: 1.0,
                sections: Vec::new(),
            },
            kv: cuda.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F16 })?,
            residual: cuda.alloc(Purpose::Residual, TOKENS_MAX, HIDDEN)?,
            branch: rows(HIDDEN)?,
            attention: [rows(HEADS.qkv_columns())?, rows(HIDDEN)?],
            mlp: [rows(2 * FFN)?, rows(FFN)?],
            wanted: [rows(HIDDEN)?, rows(HIDDEN)?],
            logits: cuda.alloc(Purpose::Logits, TOKENS_MAX, VOCAB)?,
        })
    }

    fn attention() -> Attention<Buf> {
        Attention::causal(HEADS, KvLayer { group: 0, layer: 0 }, 0.2)
    }

    fn forward(&mut self, cuda: &Cuda, step: &Step) -> Result<(), Error> {
        let ([qkv, attended], [gate_up, gated], [wanted, normed]) =
            (&mut self.attention, &mut self.mlp, &mut self.wanted);
        let layer = Model::attention();
        let tokens = Rows::Tokens;
        cuda.embed(step, &self.embedding, &mut self.residual)?;
        cuda.norm(step, tokens, &self.norm, &self.residual, &mut self.branch)?;
        cuda.linear(step, tokens, &self.qkv, None, &self.branch, qkv)?;
        cuda.attend(step, &layer, Some(&self.rope), qkv, &mut self.kv, attended)?;
        let output = Linear { weight: &self.output, bias: None };
        cuda.linear_add(step, tokens, output, attended, &mut self.branch, &mut self.residual)?;
        cuda.norm(step, tokens, &self.norm, &self.residual, &mut self.branch)?;
        cuda.matmul(step, tokens, &self.gate_up, &self.branch, gate_up)?;
        cuda.glu(step, Glu::Silu, gate_up, gated)?;
        let down = Linear { weight: &self.down, bias: None };
        cuda.linear_add(step, tokens, down, gated, &mut self.branch, &mut self.residual)?;
        cuda.gather_wanted(step, &self.residual, wanted)?;
        cuda.norm(step, Rows::Wanted, &self.norm, wanted, normed)?;
        cuda.matmul(step, Rows::Wanted, &self.embedding, normed, &mut self.logits)
    }

    /// A step of `streams` sequences at `place`: forward, choice, end.
    fn step(&mut self, cuda: &Cuda, streams: usize, place: u32) -> Result<(), Error> {
        let mut batch = Batch::default();
        for stream in 0..streams as u32 {
            let pages = (0..=place / 32).map(|page| PageId(1 + stream + page)).collect();
            let row = Row { slot: stream, start: place, len: 1, pages: vec![pages], wanted: 1 };
            batch.push(row, [Token::Known(stream % VOCAB as u32)]);
        }
        let mut step = cuda.begin(&batch)?;
        cuda.record(&step, &mut || self.forward(cuda, &step))?;
        let sampling = Sampling::greedy();
        let rows: Vec<SampleRow<'_>> = (0..streams as u32)
            .map(|stream| SampleRow {
                wanted: stream,
                slot: stream,
                position: place,
                ..SampleRow::plain(VOCAB as u32, &sampling)
            })
            .collect();
        cuda.sample(&mut step, &self.logits, &rows)?;
        assert_eq!(cuda.finish(step)?.sampled.len(), streams);
        Ok(())
    }
}

/// From opening the device to closing it, with every kind of call between.
fn whole_life() -> Result<(), Error> {
    let cuda = Cuda::new(options())?;
    let mut model = Model::new(&cuda)?;
    for _ in 0..3 {
        model.step(&cuda, 1, 0)?;
    }
    model.step(&cuda, 2, 0)?;
    cuda.write(&mut model.residual, 0, &[1.0; HIDDEN])?;
    assert_eq!(cuda.read(&model.residual, 0, 1)?, [1.0; HIDDEN]);
    cuda.time(&mut || Ok(()))?;
    Ok(())
}

/// What is left when everything was dropped: nothing.
fn assert_clean(case: &str) {
    fake::with(|fake| {
        assert_eq!(fake.live, Live::default(), "{case}");
        assert!(fake.faults.is_empty(), "{case}: {:?}", fake.faults);
    });
}

#[test]
fn a_step_of_one_token_is_five_kernels_a_layer_and_the_ends() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut model = Model::new(&cuda).unwrap();
    fake::with(|fake| fake.launched.clear());
    model.step(&cuda, 1, 200).unwrap();
    let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
    let names: Vec<&str> = launched.iter().map(|launch| launch.kernel.as_str()).collect();
    let layer = ["gemv_one", "attention", "gemv_one", "gemv_one", "gemv_one"];
    // The head does the last norm itself; its result is written behind it, for whoever reads it.
    let end = ["gather", "gemv_one", "rms_norm", "scan", "draw"];
    let wanted = [&["embed"][..], &layer[..], &end[..]].concat();
    assert_eq!(names, wanted);
    // 512 places are made room for: eight tiles of keys, merged through a cluster, for each of two K/V heads.
    assert_eq!((launched[2].grid, launched[2].cluster), ([2, 1, 8], 8));
    // Several tokens: activations are brought into form by a kernel in front of each product.
    model.step(&cuda, 3, 0).unwrap();
    let names =
        fake::with(|fake| fake.launched.iter().map(|launch| launch.kernel.clone()).collect::<Vec<_>>());
    let count = |name: &str| names.iter().filter(|launched| launched.starts_with(name)).count();
    assert_eq!(
        (count("form_"), count("gemm_few"), count("gemv_one"), count("glu_silu")),
        (5, 5, 0, 0),
        "{names:?}"
    );
}

#[test]
fn a_prompt_is_multiplied_by_kernels_of_many_rows_which_also_gate() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut model = Model::new(&cuda).unwrap();
    let batch = prompt_batch(70);
    fake::with(|fake| fake.launched.clear());
    let step = cuda.begin(&batch).unwrap();
    cuda.record(&step, &mut || model.forward(&cuda, &step)).unwrap();
    cuda.finish(step).unwrap();
    let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
    let count = |name: &str| launched.iter().filter(|launch| launch.kernel.starts_with(name)).count();
    // The head has one row.
    assert_eq!((count("form_"), count("gemm"), count("gemv_one"), count("glu")), (4, 4, 1, 0));
}

#[test]
fn weights_times_8_bit_floats_have_the_same_kernels_for_any_number_of_rows_or_are_refused_by_name() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut model = Model::new(&cuda).unwrap();
    let eights =
        |role, rows, columns| with_zeros(DType::FP8_A8, rows, columns, |part| cuda.upload_for(role, &[part]));
    model.qkv = eights(Role::Tokens, HEADS.qkv_columns(), HIDDEN).unwrap();
    model.output = eights(Role::Tokens, HIDDEN, HIDDEN).unwrap();
    model.gate_up = eights(Role::Gates { glu: Glu::Silu, adapted: false }, 2 * FFN, HIDDEN).unwrap();
    model.down = eights(Role::Tokens, HIDDEN, FFN).unwrap();
    // (streams; rows prepared by a kernel; products of wgmma; of one row: the head's)
    for (streams, wanted) in [(1, (0, 4, 1)), (2, (5, 5, 0)), (70, (5, 5, 0))] {
        let compiled = cuda.programs.keys();
        fake::with(|fake| fake.launched.clear());
        model.step(&cuda, streams, 0).unwrap();
        let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
        let count = |name: &str| launched.iter().filter(|launch| launch.kernel.starts_with(name)).count();
        assert_eq!(
            (count("form_"), count("gemm"), count("gemv_one")),
            wanted,
            "{streams} streams: {launched:?}"
        );
        assert_eq!(cuda.programs.keys().len(), compiled.len(), "{streams} streams compile nothing");
    }
    let expert = with_zeros(DType::FP8_A8, 4 * FFN, HIDDEN, |part| cuda.upload_experts(&[part], 4));
    let refused = expert.unwrap_err().to_string();
    assert!(refused.contains("tensor zeros: experts times 8-bit floats"), "{refused}");
    drop((model, cuda));
    assert_clean("8-bit activations");
    for capability in [80, 89, 120] {
        fake::willing();
        fake::with(|fake| fake.capability = Some(capability));
        let cuda = Cuda::new(options()).unwrap();
        let refused = zeros(&cuda, DType::FP8_A8, HIDDEN, HIDDEN).unwrap_err().to_string();
        assert!(
            refused.contains("tensor zeros: products of 8-bit floats with 8-bit floats on this chip"),
            "{capability}: {refused}"
        );
    }
}

#[test]
fn a_chip_is_asked_for_what_it_can_do_and_for_nothing_else() {
    // (capability; whether it has wgmma; the largest cluster of a step with eight tiles of keys; early starts)
    for (capability, wgmma, cluster, early) in
        [(80, false, 1, false), (90, true, 8, true), (120, false, 8, true)]
    {
        fake::willing();
        fake::with(|fake| fake.capability = Some(capability));
        let cuda = Cuda::new(options()).unwrap();
        let mut model = Model::new(&cuda).unwrap();
        fake::with(|fake| fake.launched.clear());
        let step = cuda.begin(&prompt_batch(70)).unwrap();
        cuda.record(&step, &mut || model.forward(&cuda, &step)).unwrap();
        cuda.finish(step).unwrap();
        model.step(&cuda, 1, 200).unwrap();
        let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
        let has = |name: &str| launched.iter().any(|launch| launch.kernel.starts_with(name));
        assert_eq!((has("gemm"), has("gemv_several")), (wgmma, !wgmma), "{capability}: {launched:?}");
        // Without clusters, tiles of keys are merged by a kernel of their own.
        assert_eq!(launched.iter().map(|launch| launch.cluster).max(), Some(cluster), "{capability}");
        assert_eq!(has("merge_tiles"), cluster == 1, "{capability}");
        assert!(launched.iter().all(|launch| launch.early_start == early), "{capability}");
        assert_eq!(fake::with(|fake| fake.calls.contains(&"prefer_shared")), early, "{capability}");
        drop((model, cuda));
        assert_clean(&format!("capability {capability}"));
    }
}

#[test]
fn prompts_and_single_tokens_of_one_step_have_a_kernel_each() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut model = Model::new(&cuda).unwrap();
    // (tokens and places before them of each sequence; grids of what is launched, many tokens before single ones)
    let mut check = |rows: &[(u32, u32)], wanted: &[(&str, [u32; 3])]| {
        let mut batch = Batch::default();
        for (slot, &(len, start)) in rows.iter().enumerate() {
            let pages = (0..=(start + len) / 32).map(PageId).collect();
            let row = Row { slot: slot as u32, start, len, pages: vec![pages], wanted: 1 };
            batch.push(row, (0..len).map(Token::Known));
        }
        fake::with(|fake| fake.launched.clear());
        let step = cuda.begin(&batch).unwrap();
        cuda.record(&step, &mut || model.forward(&cuda, &step)).unwrap();
        cuda.finish(step).unwrap();
        let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
        let attention = launched.iter().filter(|launch| launch.kernel.starts_with("attention"));
        let got: Vec<_> = attention.map(|launch| (launch.kernel.as_str(), launch.grid)).collect();
        assert_eq!(got, wanted, "{rows:?}");
    };
    check(&[(5, 0)], &[("attention_rows", [2, 1, 1])]);
    check(&[(1, 0), (1, 9)], &[("attention", [2, 2, 8])]);
    check(
        &[(1, 9), (1, 300), (4, 64), (1, 1000)],
        &[("attention_rows", [2, 1, 1]), ("attention", [2, 2, 8]), ("attention", [2, 1, 16])],
    );
}

#[test]
fn prompts_of_heads_that_wgmma_takes_are_attended_to_by_it_on_hopper() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let check = |dim: usize, wanted: &[(&str, [u32; 3])]| {
        let heads = Heads { query: 8, kv: 2, dim };
        let group = KvGroup { layers: 1, kind: KvKind::pairs(2, dim), window: None, pages: 8 };
        let mut kv = cuda.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F16 }).unwrap();
        let rows = |columns| cuda.alloc(Purpose::Activations, TOKENS_MAX, columns).unwrap();
        let (mut qkv, mut out) = (rows(heads.qkv_columns()), rows(8 * dim));
        let frequencies = cuda.upload_values(&vec![0.5; dim / 2]).unwrap();
        let rope = Rope { frequencies, pairs: dim / 2, magnitude: 1.0, sections: Vec::new() };
        let attention = Attention::causal(heads, KvLayer { group: 0, layer: 0 }, 0.1);
        let mut batch = Batch::default();
        for (slot, (start, len)) in [(0, 40), (9, 1)].into_iter().enumerate() {
            let pages = vec![vec![PageId(2 * slot as u32), PageId(2 * slot as u32 + 1)]];
            let row = Row { slot: slot as u32, start, len, pages, wanted: 0 };
            batch.push(row, (0..len).map(|_| Token::Known(0)));
        }
        fake::with(|fake| fake.launched.clear());
        let step = cuda.begin(&batch).unwrap();
        let mut body = || cuda.attend(&step, &attention, Some(&rope), &mut qkv, &mut kv, &mut out);
        cuda.record(&step, &mut body).unwrap();
        cuda.finish(step).unwrap();
        let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
        let got: Vec<_> = launched.iter().map(|launch| (launch.kernel.as_str(), launch.grid)).collect();
        assert_eq!(got, wanted, "heads of {dim}");
    };
    // 128 and 64 rows of a block, four of each token.
    check(128, &[("rope_and_write", [41, 1, 1]), ("attention_wgmma", [2, 2, 1]), ("attention", [2, 1, 1])]);
    check(32, &[("rope_and_write", [41, 1, 1]), ("attention_rows", [2, 3, 1]), ("attention", [2, 1, 1])]);
}

#[test]
fn everything_that_a_step_needs_is_compiled_before_the_first() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut model = Model::new(&cuda).unwrap();
    let mut told = Vec::new();
    cuda.ready(&mut |compiled, total| told.push((compiled, total))).unwrap();
    let (total, compiling) = cuda.programs.counts();
    assert_eq!(compiling, 0);
    assert!(told.iter().all(|&(compiled, all)| compiled < all && all == total), "{told:?} of {total}");
    // Any number of streams, and prompts of any length: nothing that was not there.
    for rows in 1..=TOKENS_MAX {
        model.step(&cuda, rows, 0).unwrap();
        let step = cuda.begin(&prompt_batch(rows as u32)).unwrap();
        cuda.record(&step, &mut || model.forward(&cuda, &step)).unwrap();
        cuda.finish(step).unwrap();
        assert_eq!(cuda.programs.counts(), (total, 0), "{rows} rows");
    }
    // Ready again at once, with nothing to say.
    cuda.ready(&mut |_, _| panic!("nothing is compiled")).unwrap();
}

#[test]
fn tables_that_are_only_looked_up_have_no_products() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let (before, _) = cuda.programs.counts();
    with_zeros(DType::Q4_K, VOCAB, 256, |part| cuda.upload_table(&[part], false)).unwrap();
    let mut units: Vec<_> = cuda.programs.keys().into_iter().map(|key| key.unit).collect();
    assert_eq!(units.len(), before + 2);
    units.retain(|unit| unit.starts_with("gem"));
    assert_eq!(units, [""; 0]);
}

#[test]
fn what_does_not_compile_is_said_by_who_waits_for_it() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let fault = |number| Key { unit: "glu.cu", defines: vec![format!("FAULT={number}")] };
    for (number, words) in [(1, "glu.cu: a fault"), (2, "the compiler broke on glu.cu")] {
        cuda.programs.prepare(fault(number));
        let said = [
            cuda.ready(&mut |_, _| ()).unwrap_err(),
            cuda.programs.function(&fault(number), "glu_silu").unwrap_err(),
        ];
        assert!(said.iter().all(|error| error.to_string().contains(words)), "{said:?}");
    }
    // The others are there.
    cuda.ready(&mut |_, _| ()).unwrap();
    cuda.programs.function(&Key::plain("glu.cu"), "glu_silu").unwrap();
}

#[test]
fn attention_is_compiled_in_the_form_that_steps_ask_for() {
    fake::willing();
    // Heads of which wgmma rotates the queries itself, has them rotated, and has none; heads that nobody rotates.
    let heads = [(8, 128), (2, 128), (4, 64), (4, 32)];
    for ((query, dim), rotates) in heads.into_iter().flat_map(|heads| [(heads, true), (heads, false)]) {
        let heads = Heads { query, kv: 2, dim };
        let attention = Attention::causal(heads, KvLayer { group: 0, layer: 0 }, 0.1);
        let cuda = Cuda::new(options()).unwrap();
        cuda.foresee(&attention, rotates);
        let group = KvGroup { layers: 1, kind: KvKind::pairs(2, dim), window: None, pages: 8 };
        let mut kv = cuda.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F16 }).unwrap();
        cuda.ready(&mut |_, _| ()).unwrap();
        let (total, _) = cuda.programs.counts();
        let rows = |columns| cuda.alloc(Purpose::Activations, TOKENS_MAX, columns).unwrap();
        let (mut qkv, mut out) = (rows(heads.qkv_columns()), rows(query * dim));
        let frequencies = cuda.upload_values(&vec![0.5; dim / 2]).unwrap();
        let rope = Rope { frequencies, pairs: dim / 2, magnitude: 1.0, sections: Vec::new() };
        let rope = rotates.then_some(&rope);
        for tokens in [40, 1] {
            let step = cuda.begin(&prompt_batch(tokens)).unwrap();
            let mut body = || cuda.attend(&step, &attention, rope, &mut qkv, &mut kv, &mut out);
            cuda.record(&step, &mut body).unwrap();
            cuda.finish(step).unwrap();
            let what = format!("{query} heads of {dim}, {tokens} tokens, {rotates}");
            assert_eq!(cuda.programs.counts().0, total, "{what}");
        }
    }
    // Heads that attention refuses have no programs: it says so itself, when it is asked.
    let cuda = Cuda::new(options()).unwrap();
    for heads in [Heads { query: 5, ..HEADS }, Heads { dim: 30, ..HEADS }, Heads { query: 64, ..HEADS }] {
        let attention = Attention::<Buf>::causal(heads, KvLayer { group: 0, layer: 0 }, 0.2);
        assert_eq!(cuda.attention_programs(&attention, true, KvDType::F16), [], "{heads:?}");
    }
}

#[test]
fn latent_attention_is_compiled_ahead_and_spread_by_what_there_is() {
    for (query, dtype) in [(128, KvDType::F16), (20, KvDType::BF16), (3, KvDType::F8), (16, KvDType::F32)] {
        fake::willing();
        let cuda = Cuda::new(options()).unwrap();
        let heads = LatentHeads { query, latent: 512, turned: 64 };
        let attention = LatentAttention { heads, layer: KvLayer { group: 0, layer: 0 }, scale: 0.1 };
        cuda.foresee_latent(&attention);
        let stored = vec![0; 128 * 512 * 2];
        let part = || Part::from(View::new("zeros", DType::F16, vec![512, 128], &stored).unwrap());
        let parts: Vec<Part<'_>> = (0..query).map(|_| part()).collect();
        let weight = cuda.upload_heads(&parts, query).unwrap();
        let kind = KvKind::Latent { width: heads.width() };
        let group = KvGroup { layers: 1, kind, window: None, pages: 8 };
        let mut kv = cuda.alloc_kv(&KvSpec { groups: vec![group], dtype }).unwrap();
        cuda.ready(&mut |_, _| ()).unwrap();
        let (total, _) = cuda.programs.counts();
        let rows = |columns| cuda.alloc(Purpose::Activations, TOKENS_MAX, columns).unwrap();
        let (latent, turned, queries) = (rows(512), rows(64), rows(query * 192));
        let (mut absorbed, mut out) = (rows(query * 512), rows(query * 512));
        let mut launched = |batch: &Batch| {
            fake::with(|fake| fake.launched.clear());
            let step = cuda.begin(batch).unwrap();
            cuda.latent_write(&step, &attention, &latent, &turned, &mut kv).unwrap();
            let products = HeadProducts { heads: query, weight: &weight, column: 64 };
            cuda.head_products(&step, &products, &queries, &mut absorbed).unwrap();
            cuda.latent_attention(&step, &attention, &queries, &absorbed, &kv, &mut out).unwrap();
            cuda.finish(step).unwrap();
            let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
            launched.into_iter().map(|launch| (launch.kernel, launch.grid)).collect::<Vec<_>>()
        };
        let wanted = |tokens: u32, blocks: [u32; 3], products: u32| {
            let heads = u32::try_from(query).unwrap();
            vec![
                ("latent_write".to_owned(), [tokens, 1, 1]),
                ("head_products".to_owned(), [4, heads, products]),
                (if query == 128 { "latent_wgmma" } else { "latent_attention" }.to_owned(), blocks),
            ]
        };
        // Heads in groups of what a block takes, and neighbouring tokens beside each other.
        let [one, many] = match query {
            128 => [[2, 1, 1], [2, 40, 1]],
            20 => [[1, 1, 1], [1, 14, 1]],
            3 => [[1, 1, 1], [1, 2, 1]],
            _ => [[16, 1, 1], [16, 40, 1]],
        };
        assert_eq!(launched(&prompt_batch(1)), wanted(1, one, 1), "{query} {dtype}");
        assert_eq!(launched(&prompt_batch(40)), wanted(40, many, 2), "{query} {dtype}");
        assert_eq!(cuda.programs.counts().0, total, "{query} {dtype}");
        drop((weight, kv, latent, turned, queries, absorbed, out));
        drop(cuda);
        assert_clean("latent attention");
    }
}

#[test]
fn prompts_of_any_length_are_multiplied_by_what_is_compiled() {
    fake::willing();
    let options = CudaOptions { tokens_max: 700, ..options() };
    let cuda = Cuda::new(options).unwrap();
    let weights = [(DType::Q4_K, 4608, 3584), (DType::BF16, 1100, 2048), (DType::F32, 512, 256)]
        .map(|(dtype, rows, columns)| zeros(&cuda, dtype, rows, columns).unwrap());
    // These have no products by matrix instructions, whose source would not compile for them.
    assert_eq!(cuda.products(&weights[2].parts, None), [Key::plain("gemv_f32.cu")]);
    cuda.ready(&mut |_, _| ()).unwrap();
    let (total, _) = cuda.programs.counts();
    let room = |columns| cuda.alloc(Purpose::Activations, 700, columns).unwrap();
    let mut rooms = [(room(3584), room(4608)), (room(2048), room(1100)), (room(256), room(512))];
    for tokens in (1..=700u32).step_by(11) {
        let step = cuda.begin(&prompt_batch(tokens)).unwrap();
        for (weight, (x, out)) in weights.iter().zip(&mut rooms) {
            cuda.matmul(&step, Rows::Tokens, weight, x, out).unwrap();
        }
        cuda.finish(step).unwrap();
        assert_eq!(cuda.programs.counts().0, total, "{tokens} tokens");
    }
}

/// The first tokens of one sequence.
fn prompt_batch(tokens: u32) -> Batch {
    let mut batch = Batch::default();
    let pages = (1..=tokens.div_ceil(32)).map(PageId).collect();
    let row = Row { slot: 0, start: 0, len: tokens, pages: vec![pages], wanted: 1 };
    batch.push(row, (0..tokens).map(|token| Token::Known(token % VOCAB as u32)));
    batch
}

/// The first token of this many sequences.
fn streams_batch(streams: u32) -> Batch {
    let mut batch = Batch::default();
    for slot in 0..streams {
        let row = Row { slot, start: 0, len: 1, pages: vec![vec![PageId(1 + slot)]], wanted: 1 };
        batch.push(row, [Token::Known(0)]);
    }
    batch
}

/// Experts of zeros: gate, up and down as they are stored.
struct Mixture {
    weights: [Weight; 2],
    room: ExpertRoom<Buf>,
    chosen: Buf,
    x: Buf,
    residual: Buf,
    experts: usize,
}

impl Mixture {
    fn new(cuda: &Cuda, counts: (usize, usize), ffn: usize, dtypes: [DType; 3]) -> Mixture {
        Mixture::with(cuda, counts, ffn, dtypes, 2)
    }

    /// Without gates.
    fn plain(cuda: &Cuda, counts: (usize, usize), ffn: usize, dtype: DType) -> Mixture {
        Mixture::with(cuda, counts, ffn, [dtype; 3], 1)
    }

    /// `halves`: matrices of an expert's first product.
    fn with(
        cuda: &Cuda,
        (experts, each): (usize, usize),
        ffn: usize,
        dtypes: [DType; 3],
        halves: usize,
    ) -> Mixture {
        let zeros = |dtype: DType, values: usize| vec![0; dtype.bytes_for(values).expect("whole blocks")];
        let stored = dtypes.map(|dtype| zeros(dtype, ffn * HIDDEN));
        let view = |at: usize, shape: [usize; 2]| {
            Part::from(View::new("zeros", dtypes[at], shape.to_vec(), &stored[at]).expect("whole blocks"))
        };
        let gate_up = (0..halves * experts).map(|at| view(at % halves, [ffn, HIDDEN])).collect::<Vec<_>>();
        let down = (0..experts).map(|_| view(2, [HIDDEN, ffn])).collect::<Vec<_>>();
        let rows = |columns| cuda.alloc(Purpose::Activations, TOKENS_MAX * each, columns).unwrap();
        Mixture {
            weights: [gate_up, down].map(|parts| cuda.upload_experts(&parts, experts).unwrap()),
            room: ExpertRoom { rows: rows(HIDDEN), gate_up: rows(2 * ffn), gated: rows(ffn) },
            chosen: cuda.alloc(Purpose::Residual, TOKENS_MAX, 2 * each).unwrap(),
            x: cuda.alloc(Purpose::Activations, TOKENS_MAX, HIDDEN).unwrap(),
            residual: cuda.alloc(Purpose::Residual, TOKENS_MAX, HIDDEN).unwrap(),
            experts,
        }
    }

    fn forward(&mut self, cuda: &Cuda, step: &Step, between: Between) -> Result<(), Error> {
        let [gate_up, down] = &self.weights;
        let experts = Experts {
            count: self.experts,
            gate_up,
            gate_up_bias: None,
            down,
            down_bias: None,
            between,
            weighs_inputs: false,
        };
        cuda.experts(step, &experts, &self.chosen, &self.x, &mut self.room, &mut self.residual)
    }

    /// What a step of this many streams launches: kernels and grids.
    fn launched(&mut self, cuda: &Cuda, streams: u32, between: Between) -> Vec<(String, [u32; 3])> {
        let step = cuda.begin(&streams_batch(streams)).unwrap();
        fake::with(|fake| fake.launched.clear());
        self.forward(cuda, &step, between).unwrap();
        let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
        cuda.finish(step).unwrap();
        launched.into_iter().map(|launch| (launch.kernel, launch.grid)).collect()
    }
}

#[test]
fn tokens_are_chosen_by_the_kernels_that_their_parameters_need() {
    // Five stretches of ids, the last of which has one.
    const IDS: usize = 4 * 4096 + 1;
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let logits = cuda.alloc(Purpose::Logits, 2, IDS).unwrap();
    let mask = vec![u32::MAX; IDS.div_ceil(32)];
    let plain = Sampling::default;
    let check = |sampling: [Sampling; 2], wanted: &[(&str, [u32; 3])]| {
        let mut step = cuda.begin(&streams_batch(2)).unwrap();
        fake::with(|fake| fake.launched.clear());
        let rows = [0, 1].map(|row: u32| SampleRow {
            wanted: row,
            slot: row,
            position: 1,
            mask: Some(&mask),
            ..SampleRow::plain(IDS as u32, &sampling[row as usize])
        });
        cuda.sample(&mut step, &logits, &rows).unwrap();
        let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
        cuda.finish(step).unwrap();
        let launched: Vec<_> = launched.iter().map(|launch| (launch.kernel.as_str(), launch.grid)).collect();
        assert_eq!(launched, wanted);
    };
    let (scan, keep, draw) = (("scan", [5, 2, 1]), ("keep", [5, 2, 1]), ("draw", [2, 1, 1]));
    check([Sampling::greedy(), plain()], &[scan, draw]);
    check([Sampling { min_p: 0.1, ..plain() }, plain()], &[scan, keep, draw]);
    let cut = [scan, ("weigh", [5, 2, 1]), ("cut", [2, 1, 1]), keep, draw];
    check([Sampling::greedy(), Sampling { top_p: 0.9, ..plain() }], &cut);
    check([Sampling { top_k: 40, ..plain() }, plain()], &cut);
    // The most likely needs no cut.
    check([Sampling { top_k: 40, ..Sampling::greedy() }, Sampling::greedy()], &[scan, draw]);
}

#[test]
fn experts_are_multiplied_pair_by_pair_or_with_few_rows_or_with_many() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let check = |mixture: &mut Mixture, streams, glu, wanted: &[&str]| {
        let launched = mixture.launched(&cuda, streams, Between::Gates(glu));
        let names: Vec<&str> = launched.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, wanted, "{streams} streams, {glu:?}");
        launched
    };
    let mut eight = Mixture::new(&cuda, (8, 2), FFN, [DType::Q8_0; 3]);
    let one = check(&mut eight, 1, Glu::Silu, &["gemv_one", "gemv_one", "combine"]);
    assert_eq!((one[0].1[1], one[1].1[1]), (2, 2), "blocks for each expert of the token");
    check(&mut eight, 1, Glu::Clamped, &["gemv_one", "glu_clamped", "gemv_one", "combine"]);
    let few = ["deal", "form_few", "expert_rows", "glu_silu", "form_experts_fours", "expert_rows", "combine"];
    let launched = check(&mut eight, 6, Glu::Silu, &few);
    assert_eq!((launched[0].1, launched[4].1), ([8, 1, 1], [12, 1, 1]), "experts, and a row for each pair");
    // Of many experts several tokens choose few together.
    let mut forty = Mixture::new(&cuda, (40, 2), FFN, [DType::Q8_0; 3]);
    assert_eq!(check(&mut forty, 4, Glu::Silu, &["gemv_one", "gemv_one", "combine"])[0].1[1], 8);
    check(&mut forty, 6, Glu::Silu, &few);
    let mut four = Mixture::new(&cuda, (4, 2), FFN, [DType::Q8_0; 3]);
    let many = ["deal", "form_experts_fours", "gemm", "form_experts_fours", "gemm", "combine"];
    check(&mut four, 80, Glu::Silu, &many);
    // F32 is multiplied as it is.
    let mut floats = Mixture::new(&cuda, (4, 2), FFN, [DType::F32; 3]);
    check(&mut floats, 1, Glu::Silu, &["expert_f32", "glu_silu", "expert_f32", "combine"]);
    check(&mut floats, 80, Glu::Silu, &["deal", "expert_f32", "glu_silu", "expert_f32", "combine"]);
    // Without gates a function goes over the first product where it lies.
    let check_plain = |dtype, streams, wanted: &[&str]| {
        let function = Between::Function(Pointwise::ReluSquared);
        let launched = Mixture::plain(&cuda, (8, 2), FFN, dtype).launched(&cuda, streams, function);
        let names: Vec<&str> = launched.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, wanted, "{streams} streams, {dtype}");
    };
    check_plain(DType::Q8_0, 1, &["gemv_one", "of_values", "gemv_one", "combine"]);
    let few =
        ["deal", "form_few", "expert_rows", "of_values", "form_experts_fours", "expert_rows", "combine"];
    check_plain(DType::Q8_0, 6, &few);
    check_plain(DType::F32, 1, &["expert_f32", "of_values", "expert_f32", "combine"]);
    // Gates and counterparts of different types are weights of their own, expert by expert.
    let mut mixed = Mixture::new(&cuda, (3, 2), FFN, [DType::Q8_0, DType::F16, DType::Q8_0]);
    let gate_up = ["gemv_one"; 6];
    check(&mut mixed, 1, Glu::Silu, &[&gate_up[..], &["glu_silu", "gemv_one", "combine"]].concat());
}

#[test]
fn tokens_whose_experts_have_no_room_at_once_go_in_passes() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut mixture = Mixture::new(&cuda, (8, 8), 4096, [DType::Q8_0; 3]);
    let launched = mixture.launched(&cuda, TOKENS_MAX as u32, Between::Gates(Glu::Silu));
    let tokens: Vec<u32> =
        launched.iter().filter(|(name, _)| name == "combine").map(|(_, grid)| grid[1]).collect();
    assert_eq!(tokens.len(), 2, "{launched:?}");
    assert_eq!(tokens.iter().sum::<u32>(), TOKENS_MAX as u32);
    assert_eq!(launched.iter().filter(|(name, _)| name == "deal").count(), 2);
}

#[test]
fn experts_of_streams_are_recorded_and_replayed() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut mixture = Mixture::new(&cuda, (8, 2), FFN, [DType::Q8_0; 3]);
    for (streams, replays) in [(6, 0), (7, 1), (8, 2), (5, 3)] {
        let step = cuda.begin(&streams_batch(streams)).unwrap();
        cuda.record(&step, &mut || mixture.forward(&cuda, &step, Between::Gates(Glu::Silu))).unwrap();
        cuda.finish(step).unwrap();
        assert_eq!(fake::with(|fake| fake.replayed.len()), replays, "{streams} streams");
    }
}

/// A layer of the gated delta rule, of zeros, whose states lie behind a group of pages; and of the selective scan in the same
/// places.
struct Recurrent {
    conv: ShortConv<Buf>,
    rule: DeltaRule<Buf>,
    norm: GatedNorm<Buf>,
    scan: SelectiveScan<Buf>,
    gated: GatedNorm<Buf>,
    kv: Kv,
    mixed: Buf,
    convolved: Buf,
    read: Buf,
}

impl Recurrent {
    const HEADS: DeltaHeads =
        DeltaHeads { key: 1, value: 2, dim_k: 32, dim_v: 40, sharing: KeySharing::Neighbours };
    const SCAN: ScanHeads = ScanHeads { heads: 2, groups: 1, dim: 40, state: 32 };
    const STATES: usize = 9;

    fn new(cuda: &Cuda) -> Recurrent {
        let (heads, taps) = (Recurrent::HEADS, 4);
        let channels = heads.columns();
        let before = conv_values(channels, taps);
        let kind = KvKind::State { bytes: 4 * (before + heads.state_values()), every: 256 };
        let layer = KvLayer { group: 1, layer: 0 };
        let groups = vec![
            KvGroup { layers: 1, kind: KvKind::pairs(HEADS.kv, HEADS.dim), window: None, pages: PAGES },
            KvGroup { layers: 1, kind, window: None, pages: Recurrent::STATES },
        ];
        let zeros = |values: usize| cuda.upload_values(&vec![0.0; values]).unwrap();
        let rows = |columns| cuda.alloc(Purpose::Activations, TOKENS_MAX, columns).unwrap();
        let out = heads.value * heads.dim_v;
        Recurrent {
            conv: ShortConv {
                layer,
                channels,
                taps,
                weight: zeros(taps * channels),
                bias: None,
                form: ConvForm::Silu,
            },
            rule: DeltaRule { layer, heads, before, rate: zeros(heads.value), bias: zeros(heads.value) },
            norm: GatedNorm {
                norm: Some(Norm::rms(zeros(heads.dim_v), 1e-6)),
                group: heads.dim_v,
                column: channels,
                order: GateOrder::NormFirst,
            },
            scan: SelectiveScan {
                layer,
                heads: Recurrent::SCAN,
                before,
                rate: zeros(2),
                bias: zeros(2),
                skip: zeros(2),
            },
            gated: GatedNorm {
                norm: Some(Norm::rms(zeros(out), 1e-6)),
                group: out / 2,
                column: channels,
                order: GateOrder::GatesFirst,
            },
            kv: cuda.alloc_kv(&KvSpec { groups, dtype: KvDType::F16 }).unwrap(),
            mixed: rows(channels + out + 2 * heads.value),
            convolved: rows(channels),
            read: rows(out),
        }
    }

    fn forward(&mut self, cuda: &Cuda, step: &Step) -> Result<(), Error> {
        let Recurrent { conv, rule, norm, scan, gated, kv, mixed, convolved, read } = self;
        cuda.short_conv(step, conv, mixed, kv, convolved)?;
        cuda.delta_rule(step, rule, convolved, mixed, kv, read)?;
        cuda.gated_norm(step, norm, mixed, read)?;
        cuda.selective_scan(step, scan, convolved, mixed, kv, read)?;
        cuda.gated_norm(step, gated, mixed, read)
    }

    /// What a step of sequences launches that have this many tokens each, with the first's state in this place.
    fn step(&mut self, cuda: &Cuda, tokens: &[u32], to: u32) -> Result<Vec<(String, [u32; 3], u32)>, Error> {
        let mut batch = Batch::default();
        for (slot, &len) in (0..).zip(tokens) {
            let pages = vec![(0..=len / 32).map(|page| PageId(1 + 8 * slot + page)).collect()];
            batch.push(Row { slot, start: 0, len, pages, wanted: 0 }, (0..len).map(|_| Token::Known(0)));
            let to = PageId(if slot == 0 { to } else { 1 + slot });
            batch.states.push(vec![RowState { from: None, to, saves: vec![] }]);
        }
        fake::with(|fake| fake.launched.clear());
        let step = cuda.begin(&batch)?;
        cuda.record(&step, &mut || self.forward(cuda, &step))?;
        cuda.finish(step)?;
        let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
        Ok(launched.into_iter().map(|launch| (launch.kernel, launch.grid, launch.shared)).collect())
    }
}

#[test]
fn states_have_a_block_for_some_columns_of_each_sequence_whatever_its_length() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut layer = Recurrent::new(&cuda);
    cuda.ready(&mut |_, _| ()).unwrap();
    let (total, _) = cuda.programs.counts();
    // 144 channels; two blocks of columns of each head; a token's keys and queries, values and shares.
    let token = (2 * 32 + 32 + 4) * 4;
    let mut check = |tokens: &[u32], conv: [u32; 3], rule: ([u32; 3], u32), norm: [u32; 3]| {
        let launched = layer.step(&cuda, tokens, 1).unwrap();
        let scan = ("selective_scan_2", rule.0, rule.1);
        let group = ("gated_group_norm", [2, norm[1], 1], 0);
        let wanted =
            [("short_conv", conv, 0), ("delta_rule_2", rule.0, rule.1), ("gated_norm", norm, 0), scan, group]
                .map(|(kernel, grid, shared)| (kernel.to_owned(), grid, shared));
        assert_eq!(launched, wanted, "{tokens:?}");
        // Whether it was run, recorded or replayed: nothing is compiled.
        assert_eq!(cuda.programs.counts(), (total, 0), "{tokens:?}");
    };
    check(&[40, 1, 3], [2, 3, 2], ([4, 3, 1], 2 * 16 * token), [1, 44, 1]);
    check(&[16, 2], [2, 2, 1], ([4, 2, 1], 16 * token), [1, 18, 1]);
    // Streams are recorded for as many as a power of two.
    check(&[1, 1, 1], [2, 4, 1], ([4, 4, 1], token), [1, 4, 1]);
    // Recorded, then replayed: a graph launches nothing by itself, and what it was checked against is checked again.
    layer.step(&cuda, &[1, 1, 1], 1).unwrap();
    assert_eq!(layer.step(&cuda, &[1, 1], 1).unwrap().len(), 5);
    assert_eq!(layer.step(&cuda, &[1, 1, 1], 1).unwrap(), []);
    let beyond = layer.step(&cuda, &[1, 1, 1], Recurrent::STATES as u32).unwrap_err().to_string();
    assert_eq!(beyond, "batch: state 9 beyond the limit 8");
    drop((layer, cuda));
    assert_clean("states");
}

#[test]
fn a_plan_counts_states_as_they_are_allocated() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let layer = Recurrent::new(&cuda);
    let pages = (PAGES * 2 * 2 * 32 * 32 * 2) as u64;
    let heads = Recurrent::HEADS;
    // Forty columns are three blocks of sixteen.
    let state = 4 * (3 * heads.columns() + heads.value * 32 * 48) as u64;
    let rounded = crate::arena::rounded(Recurrent::STATES as u64 * state);
    assert_eq!(cuda.usage().bytes(Purpose::Kv), crate::arena::rounded(pages) + rounded);
    drop((layer, cuda));
    assert_clean("states");
}

#[test]
fn a_bucket_is_run_then_recorded_then_replayed_until_memory_changes() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut model = Model::new(&cuda).unwrap();
    let mut check = |streams: usize, place: u32, wanted: (usize, usize), why: &str| {
        let counts = || {
            fake::with(|fake| {
                let begun = fake.calls.iter().filter(|call| **call == "begin_recording").count();
                (begun, fake.replayed.len())
            })
        };
        let before = counts();
        model.step(&cuda, streams, place).unwrap();
        let after = counts();
        assert_eq!((after.0 - before.0, after.1 - before.1), wanted, "{streams} streams at {place}: {why}");
    };
    // (recordings, replays)
    check(1, 0, (0, 0), "run");
    check(1, 1, (1, 1), "recorded and replayed");
    check(1, 511, (0, 1), "replayed");
    check(1, 512, (0, 0), "longer than 512 places: another bucket");
    check(3, 0, (0, 0), "run");
    check(4, 0, (1, 1), "three and four share a bucket");
    check(3, 7, (0, 1), "replayed");
    check(2, 0, (0, 0), "two have their own");
    check(5, 0, (0, 0), "five do not fit four");
    let held = cuda.alloc(Purpose::Activations, 1, 1).unwrap();
    check(1, 0, (0, 0), "addresses may have changed");
    check(1, 0, (1, 1), "recorded anew");
    drop(held);
    check(1, 0, (0, 0), "and again");
    // The kernels of the last replay are a step's: those that choose come behind, outside of it.
    assert_eq!(fake::with(|fake| fake.replayed.last().copied()), Some(9));
}

#[test]
fn buckets_are_at_most_a_third_larger_than_steps_that_every_row_makes_longer() {
    for rows in 1..=RECORDED_TOKENS_MAX {
        let bucket = bucket_rows(rows);
        assert!(rows <= bucket && bucket_rows(bucket) == bucket, "{rows} rows: {bucket}");
        assert!(rows <= 64 || 3 * (bucket - rows) <= bucket, "{rows} rows: {bucket}");
    }
    assert_eq!([0, 1, 3, 33, 64, 65, 129, 192, 256].map(bucket_rows), [0, 1, 4, 64, 64, 96, 160, 192, 256]);
}

#[test]
fn what_a_recorded_step_was_checked_against_is_checked_at_every_replay() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut model = Model::new(&cuda).unwrap();
    for _ in 0..3 {
        model.step(&cuda, 1, 0).unwrap();
    }
    let step = |token: Token, page: u32| {
        let mut batch = Batch::default();
        batch.push(Row { slot: 0, start: 0, len: 1, pages: vec![vec![PageId(page)]], wanted: 1 }, [token]);
        let step = cuda.begin(&batch)?;
        let never = || panic!("replayed, not run");
        cuda.record(&step, &mut || never())?;
        cuda.finish(step).map(|_| ())
    };
    step(Token::Known(3), 1).unwrap();
    assert!(matches!(step(Token::Known(64), 1), Err(Error::BatchLimit { what: "token", got: 64, .. })));
    let beyond = PAGES as u32;
    assert!(matches!(step(Token::Known(3), beyond), Err(Error::BatchLimit { what: "page", .. })));
    step(Token::Sampled(0), 1).unwrap();
    assert!(matches!(step(Token::Sampled(5), 1), Err(Error::NothingSampled { slot: 5 })));
}

#[test]
fn adapters_are_two_kernels_behind_a_product_where_a_sequence_takes_one() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let change = |rank: usize, column: usize, columns: usize| LowRank {
        down: cuda.upload_values(&vec![0.0; rank * HIDDEN]).unwrap(),
        up: cuda.upload_values(&vec![0.0; columns * rank]).unwrap(),
        rank,
        scale: 1.0,
        column,
        columns,
    };
    let x = cuda.alloc(Purpose::Activations, TOKENS_MAX, HIDDEN).unwrap();
    let mut out = cuda.alloc(Purpose::Activations, TOKENS_MAX, FFN).unwrap();
    let mut run = |changes: &[Vec<LowRank<Buf>>], adapters: &[Option<u32>]| {
        let mut batch = Batch { adapters: adapters.to_vec(), ..Batch::default() };
        for slot in 0..adapters.len() as u32 {
            batch.push(Row { slot, start: 0, len: 1, pages: vec![], wanted: 0 }, [Token::Known(0)]);
        }
        fake::with(|fake| fake.launched.clear());
        let step = cuda.begin(&batch)?;
        cuda.record(&step, &mut || cuda.low_rank(&step, changes, &x, &mut out))?;
        cuda.finish(step)?;
        let launched = fake::with(|fake| std::mem::take(&mut fake.launched));
        let grids = launched.into_iter().map(|launch| (launch.kernel, launch.grid));
        Ok::<_, Error>(grids.collect::<Vec<_>>())
    };
    let (down, up) = (|grid| ("low_rank_down".to_owned(), grid), |grid| ("low_rank_up".to_owned(), grid));
    // Ranks 12 and 4: twelve warps, eight to a block; one thread for each of the product's columns.
    let two = [vec![change(12, 0, FFN)], vec![change(4, 0, 8), change(4, 8, 8)]];
    assert_eq!(run(&two, &[None, None]).unwrap(), [], "nobody takes one");
    let once = [down([2, 2, 3]), up([1, 2, 1])];
    for _ in 0..2 {
        // Run, then recorded: not the recording of steps without.
        assert_eq!(run(&two, &[Some(1), None]).unwrap(), once);
    }
    assert_eq!(run(&two, &[None, Some(0)]).unwrap(), [], "replayed");
    assert_eq!(run(&two, &[None, None]).unwrap(), [], "recorded, of no kernels");
    let refused = run(&two, &[Some(2), None]).unwrap_err();
    assert!(matches!(refused, Error::BatchLimit { what: "adapter", got: 2, limit: 1 }), "{refused}");
    // What does not fit the parameters of one launch has another.
    let many: Vec<_> = (0..33).map(|_| vec![change(1, 0, FFN)]).collect();
    assert_eq!(
        run(&many, &[Some(32); 3]).unwrap(),
        [down([1, 4, 32]), up([1, 4, 1]), down([1, 4, 1]), up([1, 4, 1])]
    );
    let wide = [vec![change(1, 1, FFN)]];
    assert!(matches!(run(&wide, &[None]), Err(Error::OperandShape { operand: "columns", .. })));
    drop((two, many, wide, x, out));
    drop(cuda);
    assert_clean("closed");
}

#[test]
fn each_call_that_fails_is_an_error_with_the_operations_name_and_leaves_nothing_behind() {
    let mut operations = BTreeSet::new();
    for at in 0.. {
        fake::failing(at, fake::INVALID_VALUE, false);
        let done = whole_life();
        let (called, asked) = fake::with(|fake| (fake.calls.get(at).copied(), fake.calls.len()));
        let Some(called) = called else {
            done.unwrap();
            assert!(asked > 100, "{asked} calls");
            break;
        };
        // The event that a dropped step waits for, and what gives something back, have nobody to tell; memory that
        // cannot be pinned is copied from all the same.
        let silent =
            ["free", "destroy", "unload", "release", "register"].iter().any(|word| called.contains(word));
        let closing = called == "wait_stream" && done.is_ok();
        match done {
            Ok(()) => assert!(silent || closing, "call {at}, {called}, failed and nobody heard of it"),
            Err(Error::Device { backend, operation, reason }) => {
                assert_eq!(backend, "cuda:0");
                assert_eq!(reason, "the fake driver was told to fail (1)", "call {at}, {called}");
                operations.insert(operation);
            }
            Err(Error::DeviceUnavailable { device, reason }) => {
                assert_eq!(device, "cuda:0");
                assert!(reason.contains("told to fail"), "call {at}, {called}: {reason}");
            }
            Err(other) => panic!("call {at}, {called}: {other}"),
        }
        assert_clean(&format!("call {at}, {called}"));
    }
    // Opening apart, each is what the user or the engine asked for.
    let wanted = [
        "alloc",
        "attention",
        "begin",
        "begin recording",
        "check upload",
        "embed",
        "end recording",
        "find kernel",
        "finish",
        "gather_wanted",
        "linear",
        "linear_add",
        "load module",
        "make event",
        "make graph",
        "matmul",
        "measure time",
        "open",
        "pin memory",
        "read",
        "record event",
        "replay",
        "sample",
        "upload",
        "write",
    ];
    let missing: Vec<_> = wanted.iter().filter(|operation| !operations.contains(*operation)).collect();
    assert!(missing.is_empty(), "{missing:?} are not among {operations:?}");
}

#[test]
fn a_lost_device_says_so_from_the_call_that_lost_it_on() {
    let opening = {
        fake::willing();
        drop(Cuda::new(options()).unwrap());
        fake::with(|fake| fake.calls.iter().position(|call| *call == "create_stream").unwrap())
    };
    for at in (opening + 1..).step_by(5) {
        fake::failing(at, fake::ILLEGAL_ADDRESS, true);
        let done = whole_life();
        if fake::with(|fake| fake.calls.len()) <= at {
            done.unwrap();
            break;
        }
        match done {
            // Closing has nobody to tell.
            Ok(()) => {}
            Err(Error::DeviceLost { backend, .. }) => assert_eq!(backend, "cuda:0", "call {at}"),
            Err(other) => panic!("call {at}: {other}"),
        }
        assert_clean(&format!("call {at}"));
    }
    // Even if the driver answers well again, nothing of that device is believed.
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let calls = fake::with(|fake| fake.calls.len());
    fake::with(|fake| fake.fail_next(calls, fake::LAUNCH_FAILED));
    assert!(matches!(cuda.upload_values(&[1.0]), Err(Error::DeviceLost { .. })));
    let again = cuda.upload_values(&[1.0]).map(|_| ());
    assert!(
        matches!(&again, Err(Error::DeviceLost { reason, .. }) if reason.contains("after an operation")),
        "{again:?}"
    );
}

#[test]
fn the_end_of_a_step_does_not_wait_for_the_next_one() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let mut model = Model::new(&cuda).unwrap();
    model.step(&cuda, 1, 0).unwrap();
    let mut begin = || {
        let mut batch = Batch::default();
        batch.push(
            Row { slot: 0, start: 1, len: 1, pages: vec![vec![PageId(1)]], wanted: 1 },
            [Token::Sampled(0)],
        );
        let step = cuda.begin(&batch).unwrap();
        cuda.record(&step, &mut || model.forward(&cuda, &step)).unwrap();
        step
    };
    let (one, other) = (begin(), begin());
    let waiting = || fake::with(|fake| fake.launches_waiting());
    let both = waiting();
    cuda.finish(one).unwrap();
    assert_eq!(waiting(), both / 2, "the second step's kernels are still to be run");
    cuda.finish(other).unwrap();
    assert_eq!(waiting(), 0);
}

#[test]
fn weights_arrive_whole_and_in_order_however_late_copies_are_done() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    // Longer than the pinned ring, and not a whole number of its slots; then one that begins in the middle of it.
    for (rows, columns) in [(18_000, 1024), (5000, 1024), (7, 64)] {
        let bytes: Vec<u8> = (0..rows * columns)
            .flat_map(|at| ((at as u32).wrapping_mul(2_654_435_761) >> 9).to_le_bytes())
            .collect();
        let view = View::new("w", DType::F32, vec![rows, columns], &bytes).unwrap();
        let weight = cuda.upload(&[view.into()]).unwrap();
        cuda.settle().unwrap();
        assert!(fake::with(|fake| std::mem::take(&mut fake.arrived)) == bytes, "{rows} x {columns}");
        assert_eq!((weight.rows, weight.columns), (rows, columns));
    }
}

#[test]
fn weights_arrive_from_memory_that_cannot_be_pinned() {
    let bytes: Vec<u8> =
        (0..5000u32 * 1024).flat_map(|at| at.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let arrived = || {
        let cuda = Cuda::new(options()).unwrap();
        let view = View::new("w", DType::F32, vec![5000, 1024], &bytes).unwrap();
        let _weight = cuda.upload(&[view.into()]).unwrap();
        cuda.settle().unwrap();
        fake::with(|fake| std::mem::take(&mut fake.arrived))
    };
    fake::willing();
    assert!(arrived() == bytes);
    let first = fake::with(|fake| fake.calls.iter().position(|call| *call == "register"));
    for refusal in [fake::NOT_SUPPORTED, fake::OUT_OF_MEMORY] {
        fake::failing(first.unwrap(), refusal, false);
        assert!(arrived() == bytes, "{refusal:?}");
        assert_clean("one slot that is not pinned");
    }
}

#[test]
fn a_bit_that_changes_on_the_way_is_noticed_before_anything_is_computed() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let bytes = [0u8; 3 * 64 * 4];
    let upload = |name| {
        let view = View::new(name, DType::F32, vec![3, 64], &bytes).unwrap();
        cuda.upload(&[view.into()]).unwrap()
    };
    let group = KvGroup { layers: 1, kind: KvKind::pairs(HEADS.kv, HEADS.dim), window: None, pages: 4 };
    let spec = KvSpec { groups: vec![group], dtype: KvDType::F16 };
    let begin = || cuda.begin(&Batch::default()).map(|_| ());
    // The end of a load is where pages are made.
    let noticed: [&dyn Fn() -> Result<(), Error>; 2] = [&|| cuda.alloc_kv(&spec).map(|_| ()), &begin];
    for next in noticed {
        let _before = upload("blk.0.v");
        fake::with(|fake| {
            // What waits on the stream is done first: the bit belongs to the next.
            fake.wait_all();
            fake.flips = true;
        });
        let _weight = upload("blk.0.w");
        let _behind = upload("blk.0.x");
        let refused = next().unwrap_err();
        assert!(matches!(refused, Error::Device { operation: "check upload", .. }), "{refused}");
        assert!(refused.to_string().contains("blk.0.w: row 1 column 32"), "{refused}");
    }
    let _weight = upload("blk.0.w");
    begin().unwrap();
}

#[test]
fn rows_are_compared_once_they_are_there_or_their_room_is_needed() {
    // What is done so far is known when a slot is used again; rows of the longest fill the room for what is read back.
    for (columns, noticed_behind) in [(64, SLOTS), (COLUMNS_MAX, 0)] {
        fake::willing();
        let cuda = Cuda::new(options()).unwrap();
        let bytes = vec![0u8; 3 * columns * 4];
        let upload = |name| {
            let view = View::new(name, DType::F32, vec![3, columns], &bytes).unwrap();
            cuda.upload(&[view.into()])
        };
        fake::with(|fake| fake.flips = true);
        let _changed = upload("changed").unwrap();
        let mut weights = Vec::new();
        let refused = loop {
            match upload("other") {
                Ok(weight) => weights.push(weight),
                Err(refused) => break refused,
            }
        };
        let wanted = format!("changed: row 1 column {}", columns / 2);
        assert!(refused.to_string().contains(&wanted), "{refused}");
        assert_eq!(weights.len(), noticed_behind, "{columns} columns");
    }
}

#[test]
fn an_upload_that_fails_says_so_and_the_next_one_arrives() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let (rows, columns) = (18_000, 1024);
    let bytes: Vec<u8> = (0..rows * columns).flat_map(|at| (at as u32 >> 3).to_le_bytes()).collect();
    let upload = || cuda.upload(&[View::new("w", DType::F32, vec![rows, columns], &bytes).unwrap().into()]);
    let begun = fake::with(|fake| fake.calls.len());
    upload().unwrap();
    cuda.settle().unwrap();
    let sent: Vec<usize> = fake::with(|fake| {
        let packs = (begun..fake.calls.len()).filter(|at| fake.calls[*at] == "launch");
        packs.map(|at| at - begun).collect()
    });
    assert_eq!(sent.len(), 6, "five slots, and the rows that are read back");
    // The third slot's, while threads fill others. Memory is pinned already: the calls are fewer by now.
    let again = fake::with(|fake| fake.calls.len());
    upload().unwrap();
    let third = fake::with(|fake| {
        let packs = (again..fake.calls.len()).filter(|at| fake.calls[*at] == "launch");
        packs.map(|at| at - again).nth(2).expect("six")
    });
    cuda.settle().unwrap();
    let now = fake::with(|fake| fake.calls.len());
    fake::with(|fake| fake.fail_next(now + third, fake::INVALID_VALUE));
    let refused = upload().unwrap_err();
    assert!(matches!(refused, Error::Device { operation: "upload", .. }), "{refused}");
    fake::with(|fake| fake.arrived.clear());
    let _weight = upload().unwrap();
    cuda.settle().unwrap();
    assert!(fake::with(|fake| std::mem::take(&mut fake.arrived)) == bytes);
}

#[test]
#[cfg(target_os = "linux")]
fn a_file_that_ends_early_is_an_error_with_the_tensors_name() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (rows, columns) = (2048usize, 1024usize);
    let data = rows * columns * 4;
    let header = format!(r#"{{"w":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":[0,{data}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 0);
    std::fs::write(&path, &file).unwrap();
    let stored = fornax_format::Safetensors::open(&path).unwrap();
    let upload = || cuda.upload(&[stored.tensor("w").unwrap().into()]);
    upload().unwrap();
    let shorter = std::fs::File::options().write(true).open(&path).unwrap();
    shorter.set_len(file.len() as u64 / 2).unwrap();
    let refused = upload().unwrap_err();
    assert!(matches!(refused, Error::Device { operation: "upload", .. }), "{refused}");
    assert!(refused.to_string().contains("w: ") && refused.to_string().contains("shorter"), "{refused}");
}

#[test]
fn a_load_takes_its_memory_once() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let bytes = vec![0u8; 4096 * 4096];
    let upload = || {
        cuda.upload(&[View::new("w", DType::Q8_0, vec![1024, 4096], &bytes[..1024 * 4096 / 32 * 34])
            .unwrap()
            .into()])
    };
    let first = upload().unwrap();
    let each = cuda.usage().bytes(Purpose::Weights);
    cuda.reserve(Purpose::Weights, 20 * each).unwrap();
    let slabs = |name| fake::with(|fake| fake.calls.iter().filter(|call| **call == name).count());
    let before = slabs("alloc");
    let weights: Vec<Weight> = (0..20).map(|_| upload().unwrap()).collect();
    assert_eq!(slabs("alloc"), before);
    assert_eq!(cuda.usage().bytes(Purpose::Weights), 21 * each);
    drop((first, weights));
    assert_eq!(cuda.usage().bytes(Purpose::Weights), 0);
    drop(cuda);
    assert_clean("closed");
}

#[test]
fn bytes_are_counted_by_purpose_as_the_plan_counts_them() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let workspace = cuda.usage().bytes(Purpose::Workspace);
    assert_eq!(workspace, cuda.sizes().workspace_bytes());
    let model = Model::new(&cuda).unwrap();
    let usage = cuda.usage();
    let buf = |purpose, columns| cuda.sizes().buf_bytes(purpose, TOKENS_MAX, columns);
    assert_eq!(usage.bytes(Purpose::Workspace), workspace, "loading leaves nothing in the workspace");
    assert_eq!(usage.bytes(Purpose::Logits), buf(Purpose::Logits, VOCAB));
    assert_eq!(usage.bytes(Purpose::Residual), buf(Purpose::Residual, HIDDEN));
    assert_eq!(usage.bytes(Purpose::Kv), PAGES as u64 * 2 * 2 * 32 * 32 * 2);
    drop(model);
    assert_eq!(cuda.usage().total(), workspace);
    drop(cuda);
    assert_clean("closed");
}

#[test]
fn eight_bit_floats_are_kept_by_every_card_and_codes_are_refused_by_name() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let group = KvGroup { layers: 1, kind: KvKind::pairs(HEADS.kv, HEADS.dim), window: None, pages: PAGES };
    let spec = |dtype| KvSpec { groups: vec![group.clone()], dtype };
    let error = cuda.alloc_kv(&spec(KvDType::Q8_0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "keys and values in q8_0 are not available on cuda; use f32, f16, bf16 or fp8"
    );
    // Keys and values of 32 tokens, each head with its power of two.
    let sizes = CudaSizes::new(&options());
    assert_eq!(sizes.page_bytes(&spec(KvDType::F8), &group), (2 * HEADS.kv * 32 * (HEADS.dim + 1)) as u64);
    let mut model = Model::new(&cuda).unwrap();
    let shared = |model: &mut Model, dtype: KvDType| {
        model.kv = cuda.alloc_kv(&spec(dtype)).unwrap();
        fake::with(|fake| fake.launched.clear());
        model.step(&cuda, 1, 100).unwrap();
        fake::with(|fake| {
            let launched = fake.launched.iter().find(|launched| launched.kernel == "attention");
            launched.expect("a step attends").shared
        })
    };
    let (halves, floats) = (shared(&mut model, KvDType::F16), shared(&mut model, KvDType::F8));
    // A tile in f16, of rows of 64 bytes and 16 between, and beside it as it is stored.
    assert_eq!(floats - halves, 2 * 64 * (HEADS.dim as u32 + 1));
    drop((model, cuda));
    assert_clean("8-bit floats");
}

#[test]
fn what_is_missing_is_said_before_anything_is_loaded() {
    let refused = |change: &dyn Fn(&mut fake::Fake)| {
        fake::willing();
        fake::with(|fake| change(fake));
        let refused = Cuda::new(options()).err().expect("refused").to_string();
        assert_clean(&refused);
        refused
    };
    let check = |change: &dyn Fn(&mut fake::Fake), wanted: &str| {
        let refused = refused(change);
        assert!(refused.contains(wanted), "{refused}");
    };
    check(&|fake| fake.absent = true, "the NVIDIA driver is not installed");
    check(&|fake| fake.version = Some(11_080), "its driver knows CUDA 11.8 and Fornax needs 12.0 or newer");
    check(&|fake| fake.capability = Some(75), "compute capability 7.5, 8.0 or newer is needed");
    check(&|fake| fake.memory_bytes = Some(32 << 20), "out of memory for workspace");
}

#[test]
fn what_a_batch_or_a_cache_has_beyond_text_is_refused_by_name() {
    fake::willing();
    let cuda = Cuda::new(options()).unwrap();
    let refused = |change: &dyn Fn(&mut Batch)| {
        let mut batch = Batch::default();
        batch.push(Row { slot: 0, start: 0, len: 1, pages: vec![], wanted: 0 }, [Token::Known(0)]);
        change(&mut batch);
        cuda.begin(&batch).map(drop).unwrap_err().to_string()
    };
    let said = [
        refused(&|batch| batch.given = GivenRows { columns: 1, values: vec![0.5] }),
        refused(&|batch| batch.sections = vec![vec![0]]),
        refused(&|batch| batch.lasts = vec![0]),
    ];
    let needs = [Need::GivenRows, Need::Sections, Need::LastSeen];
    assert_eq!(said, needs.map(|need| format!("{need} is not available on cuda")));
    for (kind, wanted) in [
        (
            KvKind::Pairs { heads: 3, dim_k: 192, dim_v: 128 },
            "a cache of 3 heads with keys of 192 and values of 128 is not available on cuda",
        ),
        // Values of four bytes do not fit.
        (
            KvKind::State { bytes: 1001, every: 256 },
            "a cache of one state of 1001 bytes a sequence is not available on cuda",
        ),
    ] {
        let group = KvGroup { layers: 1, kind, window: None, pages: PAGES };
        let refused = cuda.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F16 }).map(drop);
        assert_eq!(refused.unwrap_err().to_string(), wanted);
    }
    for need in [Need::Reach, Need::SharedKeys, Need::WideGroups, Need::Clamp] {
        let refused = cuda.supports(need).unwrap_err().to_string();
        assert_eq!(refused, format!("{need} is not available on cuda"));
    }
    drop(cuda);
    assert_clean("refusals");
}
