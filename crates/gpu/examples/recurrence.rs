//! A layer of the gated delta rule in a real shape, without its products: `recurrence SHAPE [KERNEL_FOLDER]`, where
//! SHAPE is 35b (Qwen3.6-35B-A3B) or 27b (Qwen3.6-27B). Prints how long its kernels take for streams that decode and
//! for prompts, and the rate of the states' bytes, each read and written once in a step.

#![expect(clippy::print_stdout, reason = "an example talks to a person")]

use fornax_compute::{
    Backend, Batch, ConvForm, DeltaHeads, DeltaRule, Error, GateOrder, GatedNorm, KeySharing, KvDType,
    KvGroup, KvKind, KvLayer, KvSpec, Memory, Norm, PAGE_TOKENS, PageId, Purpose, Row, RowState, ShortConv,
    Token, conv_values,
};
use fornax_gpu::{Buf, Cuda, CudaOptions, Kv};

const TAPS: usize = 4;
const TOKENS_MAX: usize = 2048;
const STREAMS_MAX: usize = 256;
/// Sequences, and tokens of each.
const STEPS: [(usize, usize); 10] = [
    (1, 1),
    (8, 1),
    (32, 1),
    (128, 1),
    (STREAMS_MAX, 1),
    (1, 17),
    (1, 128),
    (1, 512),
    (1, TOKENS_MAX),
    (4, 512),
];
/// Layers in turn, so that no cache holds the next one's states.
const LAYERS: usize = 3;

/// What a layer computes in.
struct Layer {
    conv: ShortConv<Buf>,
    rule: DeltaRule<Buf>,
    norm: GatedNorm<Buf>,
}

struct Room {
    mixed: Buf,
    convolved: Buf,
    read: Buf,
    kv: Kv,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [shape, folder @ ..] = &args[..] else {
        return Err("recurrence SHAPE [KERNEL_FOLDER]".into());
    };
    let value = match shape.as_str() {
        "35b" => 32,
        "27b" => 48,
        _ => return Err("SHAPE is 35b or 27b".into()),
    };
    let heads = DeltaHeads { key: 16, value, dim_k: 128, dim_v: 128, sharing: KeySharing::Turns };
    let cuda = Cuda::new(CudaOptions {
        tokens_max: TOKENS_MAX,
        slots: STREAMS_MAX,
        kernel_folder: folder.first().map(Into::into),
        ..CudaOptions::default()
    })?;
    let channels = heads.columns();
    let before = conv_values(channels, TAPS);
    let values = |count: usize, size: f32| -> Vec<f32> {
        (0..count).map(|at| ((at * 7919 % 1000) as f32 / 1e3 - 0.5) * size).collect()
    };
    let state_bytes = 4 * (before + heads.state_values());
    let groups = vec![
        KvGroup { layers: 1, kind: KvKind::pairs(1, 16), window: None, pages: STREAMS_MAX + 1 },
        KvGroup {
            layers: LAYERS,
            kind: KvKind::State { bytes: state_bytes, every: 8 * PAGE_TOKENS },
            window: None,
            pages: STREAMS_MAX + 1,
        },
    ];
    let rows = |columns: usize| -> Result<Buf, Error> {
        let mut buf = cuda.alloc(Purpose::Activations, TOKENS_MAX, columns)?;
        cuda.write(&mut buf, 0, &values(TOKENS_MAX * columns, 1.0))?;
        Ok(buf)
    };
    let out = heads.value * heads.dim_v;
    let mut room = Room {
        mixed: rows(channels + out + 2 * heads.value)?,
        convolved: rows(channels)?,
        read: rows(out)?,
        kv: cuda.alloc_kv(&KvSpec { groups, dtype: KvDType::F16 })?,
    };
    let mut layers = Vec::new();
    for layer in 0..LAYERS {
        let layer = KvLayer { group: 1, layer };
        let rate: Vec<f32> = values(heads.value, 1.0).iter().map(|rate| -rate.abs() - 0.01).collect();
        layers.push(Layer {
            conv: ShortConv {
                layer,
                channels,
                taps: TAPS,
                weight: cuda.upload_values(&values(TAPS * channels, 1.0))?,
                bias: None,
                form: ConvForm::Silu,
            },
            rule: DeltaRule {
                layer,
                heads,
                before,
                rate: cuda.upload_values(&rate)?,
                bias: cuda.upload_values(&values(heads.value, 0.1))?,
            },
            norm: GatedNorm {
                norm: Some(Norm::rms(cuda.upload_values(&vec![1.0; heads.dim_v])?, 1e-6)),
                group: heads.dim_v,
                column: channels,
                order: GateOrder::NormFirst,
            },
        });
    }
    println!("{shape}: a state of {state_bytes} bytes");
    for (streams, tokens) in STEPS {
        // From nothing, then on from it.
        for start in [0, 1] {
            let step = cuda.begin(&batch(streams, tokens, start))?;
            for layer in &layers {
                run(&cuda, &step, layer, &mut room, [true; 3])?;
            }
            cuda.finish(step)?;
        }
        let mut all = Vec::new();
        for which in [[true, false, false], [false, true, false], [false, false, true], [true; 3]] {
            let mut times = Vec::new();
            for _ in 0..9 {
                let step = cuda.begin(&batch(streams, tokens, 1))?;
                let time = cuda.time(&mut || {
                    layers.iter().try_for_each(|layer| run(&cuda, &step, layer, &mut room, which))
                })?;
                cuda.finish(step)?;
                times.push(f64::from(time) * 1e3 / LAYERS as f64);
            }
            times.sort_by(f64::total_cmp);
            all.push(times[times.len() / 2]);
        }
        let [conv, rule, norm, together] = all[..] else { unreachable!("four ways") };
        println!(
            "{streams:>4} x {tokens:>4} tokens: short_conv {conv:8.1} us, delta_rule {rule:8.1} us ({:5.2} TB/s, {:6.1} ns a token), \
             gated_norm {norm:8.1} us, together {together:8.1} us",
            (2 * streams * state_bytes) as f64 / rule / 1e6,
            rule * 1e3 / tokens as f64,
        );
    }
    Ok(())
}

/// Those of a layer's three operations that are asked for.
fn run(
    cuda: &Cuda,
    step: &<Cuda as Backend>::Step,
    layer: &Layer,
    room: &mut Room,
    [conv, rule, norm]: [bool; 3],
) -> Result<(), Error> {
    let Room { mixed, convolved, read, kv } = room;
    if conv {
        cuda.short_conv(step, &layer.conv, mixed, kv, convolved)?;
    }
    if rule {
        cuda.delta_rule(step, &layer.rule, convolved, mixed, kv, read)?;
    }
    if norm {
        cuda.gated_norm(step, &layer.norm, mixed, read)?;
    }
    Ok(())
}

/// So many tokens of each sequence, whose states go on from themselves unless they begin.
fn batch(streams: usize, tokens: usize, start: u32) -> Batch {
    let mut batch = Batch::default();
    for slot in 0..streams as u32 {
        let pages = vec![vec![PageId::TRASH; (start as usize + tokens).div_ceil(PAGE_TOKENS)]];
        let row = Row { slot, start, len: tokens as u32, pages, wanted: 0 };
        batch.push(row, (0..tokens).map(|_| Token::Known(0)));
        let own = PageId(1 + slot);
        batch.states.push(vec![RowState { from: (start > 0).then_some(own), to: own, saves: Vec::new() }]);
    }
    batch
}
