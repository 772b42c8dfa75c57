//! Operations against outputs that `make_ops.py` had computed by transformers, torch and gguf.

use fornax_compute::cpu::{Activations, Cpu, Simd};
use fornax_compute::{
    Attention, Backend, Batch, ChannelInputs, ChannelScan, ConvForm, DeltaHeads, DeltaRule, GateOrder,
    GatedNorm, Glu, HeadProducts, Heads, KeySharing, KvDType, KvGroup, KvKind, KvLayer, KvSpec,
    LatentAttention, LatentHeads, Memory, Norm, PageId, Part, Purpose, Rope, Row, RowState, Rows, ScanHeads,
    SelectiveScan, ShortConv, Temperature, Token, channel_values, conv_values,
};
use fornax_format::{DType, View};
use serde::Deserialize;

use crate::cpu;

#[derive(Deserialize)]
struct Ops {
    rms_norm: Vec<RmsNorm>,
    rope: Vec<Rotary>,
    glu: Vec<Gated>,
    attention: Causal,
    matmul: Matmul,
    short_conv: Vec<Convolved>,
    delta_rule: Delta,
    gated_norm: NormGated,
    selective_scan: Scanned,
    channel_scan: ScannedByChannel,
    grouped_norm: Vec<NormGrouped>,
    glu_beside: Beside,
    scale_chosen: ScaledChoice,
    latent_attention: LatentRows,
    temperature: Warmed,
}

#[derive(Deserialize)]
struct LatentRows {
    heads: usize,
    latent: usize,
    turned: usize,
    kept: usize,
    value: usize,
    scale: f32,
    keys: Vec<f32>,
    values: Vec<f32>,
    rows: Vec<f32>,
    spun: Vec<f32>,
    queries: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct Warmed {
    positions: Vec<u32>,
    columns: usize,
    beta: f32,
    length: u32,
    x: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct Beside {
    columns: usize,
    column: usize,
    gate: Vec<f32>,
    up: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct ScaledChoice {
    each: usize,
    scales: Vec<f32>,
    chosen: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct Convolved {
    gated: bool,
    channels: usize,
    taps: usize,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct Delta {
    key: usize,
    value: usize,
    dim_k: usize,
    dim_v: usize,
    rate: Vec<f32>,
    bias: Vec<f32>,
    qkv: Vec<f32>,
    mixed: Vec<f32>,
    cases: Vec<Shared>,
}

#[derive(Deserialize)]
struct Shared {
    turns: bool,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct Scanned {
    heads: usize,
    groups: usize,
    dim: usize,
    state: usize,
    rate: Vec<f32>,
    bias: Vec<f32>,
    skip: Vec<f32>,
    x: Vec<f32>,
    steps: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct ScannedByChannel {
    channels: usize,
    state: usize,
    rates: Vec<f32>,
    bias: Vec<f32>,
    skip: Vec<f32>,
    x: Vec<f32>,
    keys: Vec<f32>,
    queries: Vec<f32>,
    steps: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct NormGrouped {
    gates_first: bool,
    groups: usize,
    eps: f32,
    x: Vec<f32>,
    gates: Vec<f32>,
    weight: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct NormGated {
    group: usize,
    eps: f32,
    x: Vec<f32>,
    gates: Vec<f32>,
    weight: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct RmsNorm {
    columns: usize,
    eps: f32,
    x: Vec<f32>,
    weight: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct Rotary {
    query: usize,
    kv: usize,
    dim: usize,
    positions: Vec<u32>,
    frequencies: Vec<f32>,
    qkv: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct Gated {
    columns: usize,
    x: Vec<f32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct Causal {
    query: usize,
    kv: usize,
    dim: usize,
    scale: f32,
    qkv: Vec<f32>,
    cases: Vec<Windowed>,
}

#[derive(Deserialize)]
struct Windowed {
    window: Option<u32>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct Matmul {
    rows: usize,
    columns: usize,
    x: Vec<f32>,
    cases: Vec<Stored>,
}

#[derive(Deserialize)]
struct Stored {
    dtype: String,
    bytes: String,
    out: Vec<f64>,
    usual: Vec<f64>,
}

fn ops() -> Ops {
    serde_json::from_str(include_str!("ops.json")).unwrap()
}

/// Runs `body` on every kind of CPU backend.
fn on_each(mut body: impl FnMut(&Cpu)) {
    for simd in Simd::present() {
        for activations in [Activations::Float, Activations::Integer] {
            body(&cpu(simd, activations, 2));
        }
    }
}

#[track_caller]
fn check(what: &str, got: &[f32], wanted: &[f64], bound: f64) {
    check_by(what, got, wanted, wanted, bound);
}

/// The squared error, measured by the squares of what is `usual`.
#[track_caller]
fn check_by(what: &str, got: &[f32], wanted: &[f64], usual: &[f64], bound: f64) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let error: f64 = got.iter().zip(wanted).map(|(got, wanted)| (f64::from(*got) - wanted).powi(2)).sum();
    let size: f64 = usual.iter().map(|usual| usual.powi(2)).sum();
    assert!(size > 0.0, "{what}: nothing to measure by");
    assert!(error <= bound * size, "{what}: error {:e}, at most {bound:e}", error / size);
}

/// A sequence of `len` tokens from `start`.
fn batch(start: usize, len: usize, pages: Vec<Vec<PageId>>) -> Batch {
    let mut batch = Batch::default();
    let row =
        Row { slot: 0, start: start.try_into().unwrap(), len: len.try_into().unwrap(), pages, wanted: 0 };
    batch.push(row, (0..len).map(|_| Token::Known(0)));
    batch
}

fn filled(cpu: &Cpu, columns: usize, values: &[f32]) -> <Cpu as Memory>::Buf {
    let mut buf = cpu.alloc(Purpose::Activations, values.len() / columns, columns).unwrap();
    cpu.write(&mut buf, 0, values).unwrap();
    buf
}

fn poisoned(cpu: &Cpu, rows: usize, columns: usize) -> <Cpu as Memory>::Buf {
    filled(cpu, columns, &vec![f32::NAN; rows * columns])
}

#[test]
fn rms_norm_is_that_of_transformers() {
    for case in ops().rms_norm {
        on_each(|cpu| {
            let rows = case.x.len() / case.columns;
            let norm = Norm::rms(cpu.upload_values(&case.weight).unwrap(), case.eps);
            let (x, mut out) = (filled(cpu, case.columns, &case.x), poisoned(cpu, rows, case.columns));
            let step = cpu.begin(&batch(0, rows, vec![])).unwrap();
            cpu.norm(&step, Rows::Tokens, &norm, &x, &mut out).unwrap();
            check("rms_norm", &cpu.read(&out, 0, rows).unwrap(), &case.out, 1e-12);
        });
    }
}

#[test]
fn rope_is_that_of_transformers_at_positions_beyond_zero() {
    for case in ops().rope {
        on_each(|cpu| {
            let heads = Heads { query: case.query, kv: case.kv, dim: case.dim };
            let rope = Rope {
                frequencies: cpu.upload_values(&case.frequencies).unwrap(),
                pairs: case.frequencies.len(),
                magnitude: 1.0,
                sections: Vec::new(),
            };
            let mut qkv = filled(cpu, heads.qkv_columns(), &case.qkv);
            let mut batch = batch(0, case.positions.len(), vec![]);
            batch.positions.clone_from(&case.positions);
            let step = cpu.begin(&batch).unwrap();
            cpu.rope(&step, heads, &rope, &mut qkv).unwrap();
            check("rope", &cpu.read(&qkv, 0, case.positions.len()).unwrap(), &case.out, 1e-12);
        });
    }
}

#[test]
fn glu_is_that_of_torch() {
    for case in ops().glu {
        on_each(|cpu| {
            let rows = case.out.len() / case.columns;
            let (x, mut out) = (filled(cpu, 2 * case.columns, &case.x), poisoned(cpu, rows, case.columns));
            let step = cpu.begin(&batch(0, rows, vec![])).unwrap();
            cpu.glu(&step, Glu::Silu, &x, &mut out).unwrap();
            check("glu", &cpu.read(&out, 0, rows).unwrap(), &case.out, 1e-12);
        });
    }
}

#[test]
fn a_gate_beside_wider_rows_is_that_of_transformers() {
    let case = ops().glu_beside;
    on_each(|cpu| {
        let rows = case.out.len() / case.columns;
        let (up, mut gate) =
            (filled(cpu, case.up.len() / rows, &case.up), filled(cpu, case.columns, &case.gate));
        let step = cpu.begin(&batch(0, rows, vec![])).unwrap();
        cpu.glu_beside(&step, Glu::GeluTanh, &up, case.column, &mut gate).unwrap();
        check("glu_beside", &cpu.read(&gate, 0, rows).unwrap(), &case.out, 1e-12);
    });
}

#[test]
fn scales_of_chosen_experts_are_those_of_transformers() {
    let case = ops().scale_chosen;
    on_each(|cpu| {
        let (scales, mut chosen) =
            (cpu.upload_values(&case.scales).unwrap(), filled(cpu, 2 * case.each, &case.chosen));
        let rows = case.out.len() / (2 * case.each);
        let step = cpu.begin(&batch(0, rows, vec![])).unwrap();
        cpu.scale_chosen(&step, &scales, &mut chosen).unwrap();
        check("scale_chosen", &cpu.read(&chosen, 0, rows).unwrap(), &case.out, 1e-12);
    });
}

/// In two chunks over pages out of order.
#[test]
fn attention_over_pages_is_that_of_torch() {
    let ops = ops().attention;
    let heads = Heads { query: ops.query, kv: ops.kv, dim: ops.dim };
    let (columns, out_columns) = (heads.qkv_columns(), heads.query * heads.dim);
    let tokens = ops.qkv.len() / columns;
    let layer = KvLayer { group: 0, layer: 0 };
    for case in &ops.cases {
        for first in [tokens, 32, 17] {
            on_each(|cpu| {
                let group = KvGroup {
                    layers: 1,
                    kind: KvKind::pairs(heads.kv, heads.dim),
                    window: case.window,
                    pages: 4,
                };
                let mut kv = cpu.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F32 }).unwrap();
                let attention = Attention::causal(heads, layer, ops.scale);
                let mut got = Vec::new();
                for (start, len) in [(0, first), (first, tokens - first)] {
                    if len == 0 {
                        continue;
                    }
                    let qkv = filled(cpu, columns, &ops.qkv[start * columns..][..len * columns]);
                    let mut out = poisoned(cpu, len, out_columns);
                    let step = cpu.begin(&batch(start, len, vec![vec![PageId(3), PageId(1)]])).unwrap();
                    cpu.kv_write(&step, heads, layer, &qkv, &mut kv).unwrap();
                    cpu.attention(&step, &attention, &qkv, &kv, &mut out).unwrap();
                    cpu.finish(step).unwrap();
                    got.extend(cpu.read(&out, 0, len).unwrap());
                }
                check(&format!("attention with window {:?}", case.window), &got, &case.out, 1e-12);
            });
        }
    }
}

/// Latent attention of the module that transformers computed: what comes out where its first tokens come in one step and
/// the others in the next.
fn latent_layer(cpu: &Cpu, case: &LatentRows, dtype: KvDType, first: usize) -> Vec<f32> {
    let heads = LatentHeads { query: case.heads, latent: case.latent, turned: case.turned };
    let layer = KvLayer { group: 0, layer: 0 };
    let attention = LatentAttention { heads, layer, scale: case.scale };
    let (each, read_columns, columns) =
        (case.turned + case.kept, case.heads * case.latent, case.heads * case.value);
    let tokens = case.rows.len() / case.latent;
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let weight = |values: &[f32], rows: usize, columns: usize| {
        let stored: Vec<Vec<u8>> = values.chunks_exact(rows * columns).map(bytes).collect();
        let parts: Vec<Part<'_>> = stored
            .iter()
            .map(|bytes| Part::from(View::new("w", DType::F32, vec![rows, columns], bytes).unwrap()))
            .collect();
        cpu.upload_heads(&parts, case.heads).unwrap()
    };
    let keys = weight(&case.keys, case.latent, case.kept);
    let values = weight(&case.values, case.value, case.latent);
    let kind = KvKind::Latent { width: heads.width() };
    let group = KvGroup { layers: 1, kind, window: None, pages: 4 };
    let mut kv = cpu.alloc_kv(&KvSpec { groups: vec![group], dtype }).unwrap();
    let mut got = Vec::new();
    for (start, len) in [(0, first), (first, tokens - first)] {
        if len == 0 {
            continue;
        }
        let some = |values: &[f32], columns: usize| {
            filled(cpu, columns, &values[start * columns..(start + len) * columns])
        };
        let (rows, spun) = (some(&case.rows, case.latent), some(&case.spun, case.turned));
        let queries = some(&case.queries, case.heads * each);
        let mut absorbed = poisoned(cpu, len, read_columns);
        let mut read = poisoned(cpu, len, read_columns);
        let mut out = poisoned(cpu, len, columns);
        let step = cpu.begin(&batch(start, len, vec![vec![PageId(3), PageId(1)]])).unwrap();
        let by_head = |weight, column| HeadProducts { heads: case.heads, weight, column };
        cpu.latent_write(&step, &attention, &rows, &spun, &mut kv).unwrap();
        cpu.head_products(&step, &by_head(&keys, case.turned), &queries, &mut absorbed).unwrap();
        cpu.latent_attention(&step, &attention, &queries, &absorbed, &kv, &mut read).unwrap();
        cpu.head_products(&step, &by_head(&values, 0), &read, &mut out).unwrap();
        cpu.finish(step).unwrap();
        got.extend(cpu.read(&out, 0, len).unwrap());
    }
    got
}

/// Keys and values of each head are never made here; the module's own are what is compared with.
#[test]
fn latent_attention_is_that_of_transformers_with_all_keys_and_values() {
    let case = ops().latent_attention;
    for first in [case.rows.len() / case.latent, 32, 17] {
        on_each(|cpu| {
            check("latent attention", &latent_layer(cpu, &case, KvDType::F32, first), &case.out, 1e-12);
        });
    }
}

/// What GPUs are held against rounds as stored rows do, and not by more.
#[test]
fn latent_attention_in_halves_is_as_near_to_transformers_as_its_rows_are() {
    let case = ops().latent_attention;
    let halves = Cpu::reference(Activations::Half).unwrap();
    for first in [case.rows.len() / case.latent, 17] {
        let got = latent_layer(&halves, &case, KvDType::F16, first);
        check("latent attention in halves", &got, &case.out, 1e-6);
        let floats = latent_layer(&cpu(Simd::Scalar, Activations::Float, 1), &case, KvDType::F16, first);
        assert_ne!(got, floats, "queries and weights are rounded");
        // Rows of f32 are the reference precision, and so is all else then.
        let got = latent_layer(&halves, &case, KvDType::F32, first);
        check("latent attention over f32", &got, &case.out, 1e-12);
    }
}

#[test]
fn queries_grow_with_their_positions_as_in_transformers() {
    let case = ops().temperature;
    on_each(|cpu| {
        let (rows, all) = (case.positions.len(), case.x.len() / case.positions.len());
        let mut x = filled(cpu, all, &case.x);
        let mut batch = batch(0, rows, vec![]);
        batch.positions.clone_from(&case.positions);
        let step = cpu.begin(&batch).unwrap();
        let temperature = Temperature { beta: case.beta, length: case.length, offset: 0 };
        cpu.scale_by_position(&step, temperature, case.columns, &mut x).unwrap();
        check("scale_by_position", &cpu.read(&x, 0, rows).unwrap(), &case.out, 1e-12);
    });
}

#[test]
fn products_are_those_of_weights_dequantised_by_gguf() {
    let ops = ops().matmul;
    assert_eq!(ops.cases.len(), 11);
    for case in &ops.cases {
        let dtype = DType::all().find(|dtype| dtype.name() == case.dtype).unwrap();
        let bytes: Vec<u8> = (0..case.bytes.len() / 2)
            .map(|at| u8::from_str_radix(&case.bytes[2 * at..][..2], 16).unwrap())
            .collect();
        let view = View::new("golden", dtype, vec![ops.rows, ops.columns], &bytes).unwrap();
        on_each(|cpu| {
            let tokens = ops.x.len() / ops.columns;
            let weight = cpu.upload(&[Part::from(view.clone())]).unwrap();
            let (x, mut out) = (filled(cpu, ops.columns, &ops.x), poisoned(cpu, tokens, ops.rows));
            let step = cpu.begin(&batch(0, tokens, vec![])).unwrap();
            cpu.matmul(&step, Rows::Tokens, &weight, &x, &mut out).unwrap();
            // Rounding to 16 bits errs by (largest / 32767)^2 / 12, and the largest of a block is some three times the
            // usual value.
            let bound = match cpu.options().activations {
                Activations::Float => 1e-12,
                Activations::Integer => 1e-8,
                Activations::Half => 1e-6,
            };
            let got = cpu.read(&out, 0, tokens).unwrap();
            check_by(&format!("{dtype} product"), &got, &case.out, &case.usual, bound);
        });
    }
}

/// Runs tokens in two chunks, the second of which goes on from the first one's state in another place.
fn in_chunks(
    cpu: &Cpu,
    (tokens, first, values): (usize, usize, usize),
    mut run: impl FnMut(&<Cpu as Backend>::Step, std::ops::Range<usize>, &mut <Cpu as Memory>::Kv) -> Vec<f32>,
) -> Vec<f32> {
    let kind = KvKind::State { bytes: 4 * values, every: 32 };
    let group = KvGroup { layers: 1, kind, window: None, pages: 4 };
    let mut kv = cpu.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F32 }).unwrap();
    let mut got = Vec::new();
    for (range, from, to) in [(0..first, None, 3), (first..tokens, Some(PageId(3)), 1)] {
        if range.is_empty() {
            continue;
        }
        let mut batch = batch(range.start, range.len(), vec![]);
        batch.states = vec![vec![RowState { from, to: PageId(to), saves: vec![] }]];
        let step = cpu.begin(&batch).unwrap();
        got.extend(run(&step, range, &mut kv));
        cpu.finish(step).unwrap();
    }
    got
}

const STATE: KvLayer = KvLayer { group: 0, layer: 0 };

#[test]
fn short_convolutions_are_those_of_transformers() {
    for case in ops().short_conv {
        let (channels, taps) = (case.channels, case.taps);
        let form = if case.gated { ConvForm::Gated } else { ConvForm::Silu };
        let columns = form.columns(channels);
        let tokens = case.x.len() / columns;
        for first in [tokens, 1, 17] {
            on_each(|cpu| {
                let weight = cpu.upload_values(&case.weight).unwrap();
                let bias = case.bias.as_ref().map(|bias| cpu.upload_values(bias).unwrap());
                let conv = ShortConv { layer: STATE, channels, taps, weight, bias, form };
                let got = in_chunks(cpu, (tokens, first, conv_values(channels, taps)), |step, range, kv| {
                    let x = filled(cpu, columns, &case.x[range.start * columns..range.end * columns]);
                    let mut out = poisoned(cpu, range.len(), channels);
                    cpu.short_conv(step, &conv, &x, kv, &mut out).unwrap();
                    cpu.read(&out, 0, range.len()).unwrap()
                });
                check(&format!("convolution by {form:?}"), &got, &case.out, 1e-12);
            });
        }
    }
}

#[test]
fn the_delta_rule_is_that_of_transformers() {
    let ops = ops().delta_rule;
    for case in &ops.cases {
        let sharing = if case.turns { KeySharing::Turns } else { KeySharing::Neighbours };
        let heads =
            DeltaHeads { key: ops.key, value: ops.value, dim_k: ops.dim_k, dim_v: ops.dim_v, sharing };
        let (columns, mixed_columns) = (heads.columns(), 2 * heads.value);
        let tokens = ops.qkv.len() / columns;
        for first in [tokens, 1, 17] {
            on_each(|cpu| {
                let rule = DeltaRule {
                    layer: STATE,
                    heads,
                    before: 5,
                    rate: cpu.upload_values(&ops.rate).unwrap(),
                    bias: cpu.upload_values(&ops.bias).unwrap(),
                };
                let got = in_chunks(cpu, (tokens, first, 5 + heads.state_values()), |step, range, kv| {
                    let part = |all: &[f32], columns: usize| {
                        filled(cpu, columns, &all[range.start * columns..range.end * columns])
                    };
                    let (mut qkv, mut mixed) = (part(&ops.qkv, columns), part(&ops.mixed, mixed_columns));
                    let mut out = poisoned(cpu, range.len(), heads.value * heads.dim_v);
                    cpu.delta_rule(step, &rule, &mut qkv, &mut mixed, kv, &mut out).unwrap();
                    cpu.read(&out, 0, range.len()).unwrap()
                });
                // The reference computes in f32 as well.
                check(&format!("delta rule, {sharing:?}"), &got, &case.out, 1e-11);
            });
        }
    }
}

#[test]
fn the_gated_norm_is_that_of_transformers() {
    let case = ops().gated_norm;
    on_each(|cpu| {
        let norm = Norm::rms(cpu.upload_values(&case.weight).unwrap(), case.eps);
        let gated = GatedNorm { norm: Some(norm), group: case.group, column: 0, order: GateOrder::NormFirst };
        let columns = 2 * case.group;
        let rows = case.x.len() / columns;
        let (mut x, gates) = (filled(cpu, columns, &case.x), filled(cpu, columns, &case.gates));
        let step = cpu.begin(&batch(0, rows, vec![])).unwrap();
        cpu.gated_norm(&step, &gated, &gates, &mut x).unwrap();
        check("gated norm", &cpu.read(&x, 0, rows).unwrap(), &case.out, 1e-12);
    });
}

#[test]
fn the_selective_scan_is_that_of_transformers() {
    let case = ops().selective_scan;
    let heads = ScanHeads { heads: case.heads, groups: case.groups, dim: case.dim, state: case.state };
    let tokens = case.x.len() / heads.columns();
    for first in [tokens, 1, 17] {
        on_each(|cpu| {
            let scan = SelectiveScan {
                layer: STATE,
                heads,
                before: 5,
                rate: cpu.upload_values(&case.rate).unwrap(),
                bias: cpu.upload_values(&case.bias).unwrap(),
                skip: cpu.upload_values(&case.skip).unwrap(),
            };
            let got = in_chunks(cpu, (tokens, first, 5 + heads.state_values()), |step, range, kv| {
                let part = |all: &[f32], columns: usize| {
                    filled(cpu, columns, &all[range.start * columns..range.end * columns])
                };
                let (x, mut steps) = (part(&case.x, heads.columns()), part(&case.steps, heads.heads));
                let mut out = poisoned(cpu, range.len(), heads.heads * heads.dim);
                cpu.selective_scan(step, &scan, &x, &mut steps, kv, &mut out).unwrap();
                cpu.read(&out, 0, range.len()).unwrap()
            });
            // The reference computes in f32 as well.
            check("selective scan", &got, &case.out, 1e-11);
        });
    }
}

#[test]
fn the_selective_scan_by_channels_is_that_of_transformers() {
    let case = ops().channel_scan;
    let (channels, state) = (case.channels, case.state);
    let tokens = case.x.len() / channels;
    for first in [tokens, 1, 17] {
        on_each(|cpu| {
            let scan = ChannelScan {
                layer: STATE,
                channels,
                state,
                before: 5,
                rates: cpu.upload_values(&case.rates).unwrap(),
                bias: cpu.upload_values(&case.bias).unwrap(),
                skip: cpu.upload_values(&case.skip).unwrap(),
            };
            let values = 5 + channel_values(state, channels);
            let got = in_chunks(cpu, (tokens, first, values), |step, range, kv| {
                let part = |all: &[f32], columns: usize| {
                    filled(cpu, columns, &all[range.start * columns..range.end * columns])
                };
                let (x, keys, queries) =
                    (part(&case.x, channels), part(&case.keys, state), part(&case.queries, state));
                let inputs = ChannelInputs { x: &x, keys: &keys, queries: &queries };
                let (mut steps, mut out) =
                    (part(&case.steps, channels), poisoned(cpu, range.len(), channels));
                cpu.channel_scan(step, &scan, &inputs, &mut steps, kv, &mut out).unwrap();
                cpu.read(&out, 0, range.len()).unwrap()
            });
            check("selective scan by channels", &got, &case.out, 1e-11);
        });
    }
}

#[test]
fn grouped_norms_and_gates_in_either_order_are_those_of_transformers() {
    for case in ops().grouped_norm {
        let columns = case.weight.len();
        let order = if case.gates_first { GateOrder::GatesFirst } else { GateOrder::NormFirst };
        on_each(|cpu| {
            let norm = Norm::rms(cpu.upload_values(&case.weight).unwrap(), case.eps);
            let gated = GatedNorm { norm: Some(norm), group: columns / case.groups, column: 0, order };
            let rows = case.x.len() / columns;
            let (mut x, gates) = (filled(cpu, columns, &case.x), filled(cpu, columns, &case.gates));
            let step = cpu.begin(&batch(0, rows, vec![])).unwrap();
            cpu.gated_norm(&step, &gated, &gates, &mut x).unwrap();
            check("grouped norm", &cpu.read(&x, 0, rows).unwrap(), &case.out, 1e-12);
        });
    }
}
