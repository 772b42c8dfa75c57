//! How much of a prompt's time goes into what is computed token by token: the delta rules, selective scans and short
//! convolutions of a hybrid, whose form for whole chunks could save no more than that.
//!
//! `cargo run --release -p fornax-model --example recurrence -- MODEL THREADS [TOKENS]`
//!
//! The prompt is computed whole; then each layer's recurrence alone, on as many tokens. Medians of five.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark prints, and stops at what goes wrong"
)]

use std::path::Path;
use std::time::Instant;

use fornax_compute::cpu::{Buf, Cpu, CpuOptions, Kv};
use fornax_compute::{
    Backend, Batch, ChannelInputs, ChannelScan, ConvForm, DeltaRule, KvDType, KvGroup, KvKind, KvLayer,
    KvSpec, Memory, PAGE_TOKENS, PageId, Purpose, Row, RowState, SelectiveScan, ShortConv, Token,
    channel_values, conv_values,
};
use fornax_format::Checkpoint;
use fornax_model::{Config, Limits, Mixer, load};

const ROUNDS: usize = 5;
const AT: KvLayer = KvLayer { group: 1, layer: 0 };

fn median(mut act: impl FnMut()) -> f64 {
    act();
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            act();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

/// A sequence's first tokens, whose state begins with zeros.
fn batch(tokens: usize, paged: usize, states: usize) -> Batch {
    let mut batch = Batch::default();
    let table: Vec<_> = (1..=tokens.div_ceil(PAGE_TOKENS)).map(|page| PageId(page as u32)).collect();
    let row = Row { slot: 0, start: 0, len: tokens as u32, pages: vec![table; paged], wanted: 1 };
    batch.push(row, (0..tokens as u32).map(|i| Token::Known(i * 7919 % 1000)));
    if states > 0 {
        batch.states.push(vec![RowState { from: None, to: PageId(1), saves: Vec::new() }; states]);
    }
    batch
}

/// The buffers and the state of one layer.
struct Layer<'a> {
    cpu: &'a Cpu,
    kv: Kv,
    tokens: usize,
}

impl Layer<'_> {
    fn new(cpu: &Cpu, tokens: usize, values: usize) -> Layer<'_> {
        let group = |kind, pages| KvGroup { layers: 1, kind, window: None, pages };
        let state = KvKind::State { bytes: 4 * values, every: 8 * PAGE_TOKENS };
        let groups = vec![group(KvKind::pairs(1, 16), 1 + tokens.div_ceil(PAGE_TOKENS)), group(state, 3)];
        let kv = cpu.alloc_kv(&KvSpec { groups, dtype: KvDType::F16 }).unwrap();
        Layer { cpu, kv, tokens }
    }

    /// Rows of small numbers.
    fn rows(&self, columns: usize) -> Buf {
        let mut buf = self.cpu.alloc(Purpose::Activations, self.tokens, columns).unwrap();
        let values: Vec<f32> =
            (0..self.tokens * columns).map(|i| (i * 31 % 17) as f32 / 17.0 - 0.5).collect();
        self.cpu.write(&mut buf, 0, &values).unwrap();
        buf
    }

    fn vector(&self, values: usize, value: f32) -> Buf {
        self.cpu.upload_values(&vec![value; values]).unwrap()
    }

    fn time(&mut self, mut act: impl FnMut(&Cpu, &<Cpu as Backend>::Step, &mut Kv)) -> f64 {
        let batch = batch(self.tokens, 1, 1);
        let (cpu, kv) = (self.cpu, &mut self.kv);
        median(|| {
            let step = cpu.begin(&batch).unwrap();
            act(cpu, &step, kv);
            cpu.finish(step).unwrap();
        })
    }

    /// A short convolution, by itself.
    fn conv(&mut self, channels: usize, taps: usize, form: ConvForm) -> f64 {
        let (x, mut out) = (self.rows(form.columns(channels)), self.rows(channels));
        let weight = self.vector(taps * channels, 0.3);
        let conv = ShortConv { layer: AT, channels, taps, weight, bias: None, form };
        self.time(|cpu, step, kv| cpu.short_conv(step, &conv, &x, kv, &mut out).unwrap())
    }
}

/// What a layer's mixer takes token by token, in seconds; nothing where it attends.
fn seconds(cpu: &Cpu, mixer: &Mixer, tokens: usize) -> Option<f64> {
    Some(match *mixer {
        Mixer::Attention(_) | Mixer::Latent(_) | Mixer::None => return None,
        Mixer::Conv(conv) => {
            let mut layer = Layer::new(cpu, tokens, conv_values(conv.channels, conv.taps));
            layer.conv(conv.channels, conv.taps, ConvForm::Gated)
        }
        Mixer::Delta(delta) => {
            let heads = delta.heads;
            let before = conv_values(heads.columns(), delta.taps);
            let mut layer = Layer::new(cpu, tokens, before + heads.state_values());
            let convolved = layer.conv(heads.columns(), delta.taps, ConvForm::Silu);
            let (mut qkv, mut mixed) = (layer.rows(heads.columns()), layer.rows(2 * heads.value));
            let mut out = layer.rows(heads.value * heads.dim_v);
            let (rate, bias) = (layer.vector(heads.value, -0.5), layer.vector(heads.value, 0.1));
            let rule = DeltaRule { layer: AT, heads, before, rate, bias };
            convolved
                + layer.time(|cpu, step, kv| {
                    cpu.delta_rule(step, &rule, &mut qkv, &mut mixed, kv, &mut out).unwrap();
                })
        }
        Mixer::Scan(scan) | Mixer::Beside(_, scan) => {
            let heads = scan.heads;
            let before = conv_values(heads.columns(), scan.taps);
            let mut layer = Layer::new(cpu, tokens, before + heads.state_values());
            let convolved = layer.conv(heads.columns(), scan.taps, ConvForm::Silu);
            let (x, mut mixed) = (layer.rows(heads.columns()), layer.rows(heads.heads));
            let mut out = layer.rows(heads.heads * heads.dim);
            let vector = |value| layer.vector(heads.heads, value);
            let (rate, bias, skip) = (vector(-0.5), vector(0.1), vector(0.2));
            let scan = SelectiveScan { layer: AT, heads, before, rate, bias, skip };
            convolved
                + layer.time(|cpu, step, kv| {
                    cpu.selective_scan(step, &scan, &x, &mut mixed, kv, &mut out).unwrap();
                })
        }
        Mixer::ChannelScan(scan) => {
            let (channels, state) = (scan.channels, scan.state);
            let before = conv_values(channels, scan.taps);
            let mut layer = Layer::new(cpu, tokens, before + channel_values(state, channels));
            let convolved = layer.conv(channels, scan.taps, ConvForm::Silu);
            let (x, keys, queries) = (layer.rows(channels), layer.rows(state), layer.rows(state));
            let (mut steps, mut out) = (layer.rows(channels), layer.rows(channels));
            let (rates, bias) = (layer.vector(channels * state, -0.5), layer.vector(channels, 0.1));
            let skip = layer.vector(channels, 0.2);
            let scan = ChannelScan { layer: AT, channels, state, before, rates, bias, skip };
            let inputs = ChannelInputs { x: &x, keys: &keys, queries: &queries };
            convolved
                + layer.time(|cpu, step, kv| {
                    cpu.channel_scan(step, &scan, &inputs, &mut steps, kv, &mut out).unwrap();
                })
        }
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let threads = arguments[2].parse().unwrap();
    let tokens: usize = arguments.get(3).map_or(512, |tokens| tokens.parse().unwrap());
    let checkpoint = Checkpoint::open(Path::new(&arguments[1])).unwrap();
    let config = Config::read(&checkpoint).unwrap();
    let options = CpuOptions { threads, tokens_max: tokens, slots: 1, ..CpuOptions::default() };
    let cpu = Cpu::new(options).unwrap();

    let mut alone = 0.0;
    let mut known: Vec<(Mixer, f64)> = Vec::new();
    for layer in &config.layers {
        let found = known.iter().find(|(mixer, _)| *mixer == layer.mixer).map(|(_, seconds)| *seconds);
        let Some(own) = found.or_else(|| seconds(&cpu, &layer.mixer, tokens)) else { continue };
        known.push((layer.mixer, own));
        alone += own;
    }

    let limits = Limits { tokens_max: tokens, wanted_max: 1 };
    let mut model = load(&checkpoint, &config, &cpu, limits, &mut |_, _| {}).unwrap();
    let mut groups = config.kv_groups(1 + tokens.div_ceil(PAGE_TOKENS));
    let states = groups.iter_mut().filter(|group| group.kind.is_state());
    states.for_each(|group| group.pages = 3);
    let states = groups.iter().filter(|group| group.kind.is_state()).count();
    let batch = batch(tokens, groups.len() - states, states);
    let mut kv = cpu.alloc_kv(&KvSpec { groups, dtype: KvDType::F16 }).unwrap();
    let whole = median(|| {
        let step = cpu.begin(&batch).unwrap();
        model.forward(&cpu, &mut kv, &step).unwrap();
        cpu.finish(step).unwrap();
    });
    println!(
        "{tokens} tokens: {:.1} ms, of which {:.1} ms token by token in {} layers: {:.1} %",
        whole * 1e3,
        alone * 1e3,
        known.len(),
        alone / whole * 100.0
    );
}
