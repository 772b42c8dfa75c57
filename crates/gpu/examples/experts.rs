//! A layer of experts with random weights of a real shape: `experts SHAPE FORMAT [KERNEL_FOLDER]`, where SHAPE is qwen3
//! (Qwen3-30B-A3B), mixtral (8x7B) or gpt-oss (20B) and FORMAT is bf16, q8_0, q4_k or mxfp4. Prints for steps of one
//! token and of many how long a layer's experts take, the rate of the weights that are needed and of the arithmetic.
//! Tokens choose evenly.

#![expect(clippy::print_stdout, reason = "an example talks to a person")]

use std::time::Instant;

use fornax_compute::{
    Backend, Batch, Between, Error, ExpertRoom, Experts, Glu, Memory, PAGE_TOKENS, PageId, Part, Purpose,
    Row, Token,
};
use fornax_format::{DType, View};
use fornax_gpu::{Buf, Cuda, CudaOptions, Weight};

const TOKENS: [usize; 8] = [1, 2, 8, 16, 64, 256, 512, TOKENS_MAX];
const TOKENS_MAX: usize = 2048;
/// Steps of up to so many tokens are streams that decode, each a token: they are recorded. More are a prompt.
const STREAMS_MAX: usize = 64;

#[derive(Clone, Copy)]
struct Shape {
    /// Enough that no cache holds the next one's weights.
    layers: usize,
    experts: usize,
    each: usize,
    hidden: usize,
    ffn: usize,
    between: Between,
}

struct Layer {
    gate_up: Weight,
    down: Weight,
    /// (tokens, 2 each)
    chosen: Buf,
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 11) as usize % end
    }

    /// Blocks of a type, with their scales made ordinary.
    fn stored(&mut self, dtype: DType, values: usize) -> Vec<u8> {
        let bytes = dtype.bytes_for(values).expect("whole blocks");
        let mut stored = Vec::with_capacity(bytes + 8);
        while stored.len() < bytes {
            stored.extend(self.next().to_le_bytes());
        }
        stored.truncate(bytes);
        // The upper byte of a number about 0.01; MXFP4 has an exponent alone.
        let (scales, exponent): (&[usize], u8) = match dtype {
            DType::BF16 => (&[1], 0x3c),
            DType::Q8_0 => (&[1], 0x18),
            DType::MXFP4 => (&[0], 0x78),
            _ => (&[1, 3], 0x18),
        };
        let keep = if dtype == DType::MXFP4 { 0 } else { 0x80 };
        for block in stored.chunks_exact_mut(dtype.block_bytes()) {
            for &at in scales {
                block[at] = exponent | block[at] & keep;
            }
        }
        stored
    }

    /// For each token the numbers of its experts, then their weights.
    fn chosen(&mut self, tokens: usize, shape: Shape) -> Vec<f32> {
        let mut chosen = Vec::new();
        for _ in 0..tokens {
            let mut taken: Vec<usize> = Vec::new();
            while taken.len() < shape.each {
                let expert = self.below(shape.experts);
                if !taken.contains(&expert) {
                    taken.push(expert);
                }
            }
            taken.sort_unstable();
            chosen.extend(taken.iter().map(|&expert| expert as f32));
            chosen.extend(taken.iter().map(|_| 1.0 / shape.each as f32));
        }
        chosen
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [shape, format, folder @ ..] = &args[..] else {
        return Err("experts SHAPE FORMAT [KERNEL_FOLDER]".into());
    };
    let (name, between) = (shape.as_str(), Between::Gates(Glu::Silu));
    let shape = match name {
        "qwen3" => Shape { layers: 3, experts: 128, each: 8, hidden: 2048, ffn: 768, between },
        "mixtral" => Shape { layers: 2, experts: 8, each: 2, hidden: 4096, ffn: 14_336, between },
        "gpt-oss" => {
            let between = Between::Gates(Glu::Clamped);
            Shape { layers: 3, experts: 32, each: 4, hidden: 2880, ffn: 2880, between }
        }
        _ => return Err("SHAPE is qwen3, mixtral or gpt-oss".into()),
    };
    let dtype = match format.as_str() {
        "bf16" => DType::BF16,
        "q8_0" => DType::Q8_0,
        "q4_k" => DType::Q4_K,
        "mxfp4" => DType::MXFP4,
        _ => return Err("FORMAT is bf16, q8_0, q4_k or mxfp4".into()),
    };
    let cuda = Cuda::new(CudaOptions {
        tokens_max: TOKENS_MAX,
        slots: STREAMS_MAX,
        kernel_folder: folder.first().map(Into::into),
        ..CudaOptions::default()
    })?;
    let Shape { layers, experts, each, hidden, ffn, between } = shape;
    println!("{name} in {format}: {each} of {experts} experts of {hidden} and {ffn}");

    let mut random = Random(1);
    let gate_up = random.stored(dtype, 2 * ffn * hidden);
    let down = random.stored(dtype, hidden * ffn);
    let expert_bytes = gate_up.len() + down.len();
    let upload = |rows, columns, stored: &[u8]| -> Result<Weight, Error> {
        let part =
            || Part::from(View::new("random", dtype, vec![rows, columns], stored).expect("whole blocks"));
        cuda.upload_experts(&(0..experts).map(|_| part()).collect::<Vec<_>>(), experts)
    };
    let started = Instant::now();
    let mut stack = Vec::new();
    for _ in 0..layers {
        stack.push(Layer {
            gate_up: upload(2 * ffn, hidden, &gate_up)?,
            down: upload(hidden, ffn, &down)?,
            chosen: cuda.alloc(Purpose::Residual, TOKENS_MAX, 2 * each)?,
        });
    }
    println!("loaded in {:.1} s", started.elapsed().as_secs_f64());
    let mut x = cuda.alloc(Purpose::Activations, TOKENS_MAX, hidden)?;
    let mut residual = cuda.alloc(Purpose::Residual, TOKENS_MAX, hidden)?;
    let values: Vec<f32> = (0..TOKENS_MAX * hidden).map(|at| (at * 7919 % 1000) as f32 / 1e3 - 0.5).collect();
    cuda.write(&mut x, 0, &values)?;
    cuda.write(&mut residual, 0, &values)?;
    let inner = |columns| cuda.alloc(Purpose::Activations, TOKENS_MAX * each, columns);
    let mut room = ExpertRoom { rows: inner(hidden)?, gate_up: inner(2 * ffn)?, gated: inner(ffn)? };

    let mut measured = Vec::new();
    for tokens in TOKENS {
        let mut needed = 0;
        for layer in &mut stack {
            let chosen = random.chosen(tokens, shape);
            let numbers = chosen.chunks_exact(2 * each).flat_map(|row| &row[..each]);
            let mut taken: Vec<u32> = numbers.map(|number| number.to_bits()).collect();
            taken.sort_unstable();
            taken.dedup();
            needed += taken.len() * expert_bytes;
            cuda.write(&mut layer.chosen, 0, &chosen)?;
            measured = chosen;
        }
        let batch = batch(tokens);
        let mut times = Vec::new();
        for _ in 0..9 {
            let step = cuda.begin(&batch)?;
            let time = cuda.time(&mut || {
                cuda.record(&step, &mut || {
                    stack.iter().try_for_each(|layer| {
                        let (gate_up, down) = (&layer.gate_up, &layer.down);
                        let (gate_up_bias, down_bias) = (None, None);
                        let experts = Experts {
                            count: experts,
                            gate_up,
                            gate_up_bias,
                            down,
                            down_bias,
                            between,
                            weighs_inputs: false,
                        };
                        cuda.experts(&step, &experts, &layer.chosen, &x, &mut room, &mut residual)
                    })
                })
            })?;
            cuda.finish(step)?;
            times.push(f64::from(time) * 1e3 / layers as f64);
        }
        // Without those that compile and record.
        times.drain(..3);
        times.sort_by(f64::total_cmp);
        let us = times[times.len() / 2];
        println!(
            "{tokens:>5} tokens {us:10.1} us a layer (best {:10.1}) {:6.2} TB/s {:7.1} TFLOP/s",
            times[0],
            needed as f64 / layers as f64 / us / 1e6,
            (6 * tokens * each * hidden * ffn) as f64 / us / 1e6
        );
    }
    // Tokens of the last step, alone: the same bits.
    let layer = stack.last_mut().expect("there are layers");
    let mut compute = |tokens: usize, chosen: &[f32], x: &[f32]| -> Result<Vec<f32>, Error> {
        let mut rows = cuda.alloc(Purpose::Activations, tokens, hidden)?;
        let mut sums = cuda.alloc(Purpose::Residual, tokens, hidden)?;
        cuda.write(&mut layer.chosen, 0, chosen)?;
        cuda.write(&mut rows, 0, x)?;
        cuda.write(&mut sums, 0, &vec![0.0; tokens * hidden])?;
        let (gate_up, down, gate_up_bias, down_bias) = (&layer.gate_up, &layer.down, None, None);
        let experts =
            Experts { count: experts, gate_up, gate_up_bias, down, down_bias, between, weighs_inputs: false };
        let step = cuda.begin(&batch(tokens))?;
        cuda.experts(&step, &experts, &layer.chosen, &rows, &mut room, &mut sums)?;
        cuda.finish(step)?;
        cuda.read(&sums, 0, tokens)
    };
    let all = compute(TOKENS_MAX, &measured, &values)?;
    let mut different = 0;
    for (first, tokens) in [(0, 1), (1, 1), (1000, 1), (2047, 1), (700, 3), (100, 40), (1400, 600)] {
        let some = |values: &[f32], columns: usize| values[first * columns..][..tokens * columns].to_vec();
        let alone = compute(tokens, &some(&measured, 2 * each), &some(&values, hidden))?;
        let same = |(a, b): (&f32, &f32)| a.is_finite() && a.to_bits() == b.to_bits();
        different += alone.iter().zip(&some(&all, hidden)).filter(|pair| !same(*pair)).count();
    }
    println!("{different} values differ between steps of all tokens and of some");
    if different == 0 { Ok(()) } else { Err("bits depend on the batch".into()) }
}

/// A token of each of this many sequences, or one sequence's.
fn batch(tokens: usize) -> Batch {
    let mut batch = Batch::default();
    if tokens <= STREAMS_MAX {
        for slot in 0..tokens as u32 {
            let row = Row { slot, start: 0, len: 1, pages: vec![vec![PageId(1 + slot)]], wanted: 1 };
            batch.push(row, [Token::Known(0)]);
        }
    } else {
        let pages = (1..=tokens.div_ceil(PAGE_TOKENS) as u32).map(PageId).collect();
        let row = Row { slot: 0, start: 0, len: tokens as u32, pages: vec![pages], wanted: 1 };
        batch.push(row, (0..tokens).map(|_| Token::Known(0)));
    }
    batch
}
