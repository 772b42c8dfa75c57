//! How fast products and attention are, beside what the machine can do at most:
//! `cargo bench -p fornax-compute -- [THREADS] [FILTER]`.
//!
//! The limits are measured in the same run: bytes per second of reading memory for one token, and operations per second
//! of multiply-adds that stay in registers, of 16-bit integers and of f32, for many.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark prints, and stops at what goes wrong"
)]

use std::hint::black_box;
use std::time::Instant;

use fornax_compute::cpu::{Activations, Cpu, CpuOptions, CpuRing, CpuRingOptions, Simd};
use fornax_compute::{Backend, Batch, Memory, Purpose, Ring, Row, Rows, Token, WEIGHT_TYPES};
use fornax_format::{DType, View};

/// The best of five runs, each over all weights and often enough to be timed: seconds of one product.
fn best(tokens: usize, weights: usize, mut run: impl FnMut(usize)) -> f64 {
    let repeats = if tokens == 8 { 20 } else { 1 };
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        (0..repeats).for_each(|_| (0..weights).for_each(&mut run));
        best = best.min(start.elapsed().as_secs_f64() / (repeats * weights) as f64);
    }
    best
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let threads = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(1);
    let filter = arguments.next().unwrap_or_default();
    println!("threads {threads}; reading memory {:.1} GB/s", read_rate(threads));
    #[cfg(target_arch = "x86_64")]
    for simd in Simd::present() {
        if let Some((integers, floats)) = limits::operations(simd, threads) {
            let name = simd.name();
            println!("{name}: multiply-adds in registers {integers:.1} GOPS of i16, {floats:.1} of f32");
        }
    }
    println!(
        "{:<8} {:<6} {:>6} {:>6} {:>9} {:>9} {:>9}",
        "simd", "type", "rows", "tokens", "us", "GB/s", "GOPS"
    );
    for simd in Simd::present().filter(|&simd| simd != Simd::Scalar) {
        for dtype in WEIGHT_TYPES {
            for tokens in [1, 8, 512] {
                let name = format!("{} {dtype}", simd.name());
                if name.contains(&filter) {
                    matmul(simd, threads, dtype, tokens);
                }
            }
        }
        for tokens in [1, 8, 512] {
            if format!("{} ring", simd.name()).contains(&filter) {
                ring(simd, threads, tokens);
            }
        }
    }
}

/// The same product of bytes and words mod 2^32.
fn ring(simd: Simd, threads: usize, tokens: usize) {
    let (rows, columns) = (4864 * 2, 896);
    let ring = CpuRing::new(&CpuRingOptions { threads, simd, tiles: true, memory_limit: None }).unwrap();
    let weights: Vec<i8> = stored(DType::Q8_0, rows * columns)
        .into_iter()
        .take(rows * columns)
        .map(|byte| byte.cast_signed())
        .collect();
    let copies = if tokens == 1 { (400 << 20) / weights.len() + 1 } else { 1 };
    let matrices: Vec<_> = (0..copies).map(|_| ring.matrix(rows, columns, &weights).unwrap()).collect();
    let x: Vec<u32> = (0..tokens * columns).map(|at| (at as u32).wrapping_mul(2_654_435_769)).collect();
    let mut out = vec![0; tokens * rows];
    let best = best(tokens, copies, |copy| {
        ring.multiply(&matrices[copy], &x, tokens, &mut out).unwrap();
        black_box(&out);
    });
    print_line(simd, "ring", (rows, columns, tokens), weights.len(), best);
}

/// Gate and up of a 0.5B model, as many copies as no cache holds.
fn matmul(simd: Simd, threads: usize, dtype: DType, tokens: usize) {
    let (rows, columns) = (4864 * 2, if dtype.block_values() == 256 { 1024 } else { 896 });
    let options = CpuOptions { simd, threads, activations: Activations::Integer, ..CpuOptions::default() };
    let cpu = Cpu::new(CpuOptions { slots: 1, ..options }).unwrap();
    let stored = stored(dtype, rows * columns);
    let copies = if tokens == 1 { (400 << 20) / stored.len() + 1 } else { 1 };
    let weights: Vec<_> = (0..copies)
        .map(|_| cpu.upload(&[View::new("w", dtype, vec![rows, columns], &stored).unwrap().into()]).unwrap())
        .collect();
    let mut x = cpu.alloc(Purpose::Activations, tokens, columns).unwrap();
    let mut out = cpu.alloc(Purpose::Activations, tokens, rows).unwrap();
    let values: Vec<_> = (0..tokens * columns).map(|i| ((i * 7919 % 1000) as f32 - 500.0) / 250.0).collect();
    cpu.write(&mut x, 0, &values).unwrap();
    let mut batch = Batch::default();
    let row = Row { slot: 0, start: 0, len: tokens as u32, pages: vec![], wanted: 0 };
    batch.push(row, std::iter::repeat_n(Token::Known(0), tokens));
    let best = best(tokens, copies, |copy| {
        let step = cpu.begin(&batch).unwrap();
        cpu.matmul(&step, Rows::Tokens, &weights[copy], &x, &mut out).unwrap();
        cpu.finish(step).unwrap();
    });
    print_line(simd, &dtype.to_string(), (rows, columns, tokens), stored.len(), best);
}

fn print_line(
    simd: Simd,
    name: &str,
    (rows, columns, tokens): (usize, usize, usize),
    bytes: usize,
    seconds: f64,
) {
    let operations = 2.0 * (rows * columns * tokens) as f64;
    println!(
        "{:<8} {name:<6} {rows:>6} {tokens:>6} {:>9.0} {:>9.1} {:>9.1}",
        simd.name(),
        seconds * 1e6,
        bytes as f64 / seconds / 1e9,
        operations / seconds / 1e9
    );
}

/// Random codes with ordinary scales: subnormal ones would be timed instead of the kernel.
fn stored(dtype: DType, values: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let mut bytes: Vec<u8> =
        std::iter::repeat_with(&mut random).take(dtype.bytes_for(values).unwrap()).collect();
    let (stride, scales): (usize, &[usize]) = match dtype {
        DType::F32 => (4, &[2]),
        DType::F16 | DType::BF16 => (2, &[0]),
        DType::Q6_K => (dtype.block_bytes(), &[208]),
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => (dtype.block_bytes(), &[0]),
        DType::Q2_K => (dtype.block_bytes(), &[80, 82]),
        DType::Q3_K => (dtype.block_bytes(), &[108]),
        DType::TQ1_0 => (dtype.block_bytes(), &[52]),
        DType::TQ2_0 => (dtype.block_bytes(), &[64]),
        DType::IQ1_M => (dtype.block_bytes(), &[54]),
        _ => (dtype.block_bytes(), &[0, 2]),
    };
    let exponent = if matches!(dtype, DType::F32 | DType::BF16) { 0x3c } else { 0x20 };
    for block in bytes.chunks_exact_mut(stride) {
        if dtype == DType::MXFP8 {
            block[0] = 110 + block[0] % 16;
            continue;
        }
        if matches!(dtype, DType::FP8_128 | DType::FP8_A8) {
            block[3] = 0x3a;
            continue;
        }
        for &at in scales {
            block[at + 1] = exponent | block[at + 1] & 0x83;
        }
    }
    bytes
}

/// GB/s of summing 1 GB.
fn read_rate(threads: usize) -> f64 {
    let data = vec![1u64; 1 << 27];
    let mut best = f64::MAX;
    for _ in 0..3 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in data.chunks(data.len() / threads) {
                scope.spawn(|| black_box(part.iter().fold(0u64, |sum, value| sum ^ value)));
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    (data.len() * 8) as f64 / best / 1e9
}

/// What the processor multiplies at most: chains of multiply-adds on registers, as many as hide their latency.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the instructions themselves are measured")]
mod limits {
    use std::arch::asm;
    use std::time::Instant;

    use fornax_compute::cpu::Simd;

    const ROUNDS: u32 = 20_000_000;
    const CHAINS: u32 = 12;

    /// Twelve of one instruction, each on its own register.
    macro_rules! chains {
        ($instruction:literal, $register:literal) => {
            asm!(
                "2:",
                chains!(@ $instruction, $register, "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"),
                "sub {rounds:e}, 1",
                "jnz 2b",
                rounds = inout(reg) ROUNDS => _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
                out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                options(nostack)
            )
        };
        (@ $instruction:literal, $register:literal, $($number:literal),+) => {
            concat!($($instruction, " ", $register, $number, ", ", $register, "12, ", $register, "13\n"),+)
        };
    }

    /// Billions of operations a second of i16 and of f32, where the level has them in one instruction each.
    pub(super) fn operations(simd: Simd, threads: usize) -> Option<(f64, f64)> {
        // Values of 16 bits and of 32 that one instruction multiplies and adds.
        let (integers, floats, lanes): (fn(), fn(), _) = match simd {
            // SAFETY: the level is present, and registers are all that these touch. Whatever the last two hold is fine:
            // sums of integers wrap, and these run at one speed for all floats but subnormal ones.
            Simd::Avx512 => (
                || unsafe { chains!("vpdpwssd", "zmm") },
                || unsafe { chains!("vfmadd231ps", "zmm") },
                (32, 16),
            ),
            _ => return None,
        };
        let rate = |run: fn(), lanes: u32| {
            let start = Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(run);
                }
            });
            let operations = 2.0 * f64::from(ROUNDS) * f64::from(CHAINS * lanes) * threads as f64;
            operations / start.elapsed().as_secs_f64() / 1e9
        };
        Some((rate(integers, lanes.0), rate(floats, lanes.1)))
    }
}
