//! A thousand mixed requests on one device: each ends once, equal greedy requests get equal answers however they were
//! batched, and the device has as much free memory afterwards as before.
//! `cargo run --release -p fornax --example soak -- MODEL DEVICE [REQUESTS [KERNEL_FOLDER]]`, DEVICE is cpu or cuda:N.
#![expect(clippy::print_stdout, reason = "a proof prints its figures")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use fornax::{Device, OpenOptions, Request, Sampling};

const THREADS: usize = 12;
const PROMPTS: [&str; 5] = [
    "The capital of France is",
    "Once upon a time there was a small ship that",
    "fn main() {",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen,",
    "A",
];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, device, rest @ ..] = &arguments[..] else { anyhow::bail!("soak MODEL DEVICE [REQUESTS]") };
    let requests: usize = rest.first().map_or(Ok(1000), |requests| requests.parse())?;
    let ordinal = device.strip_prefix("cuda:").map(str::parse::<usize>).transpose()?;
    let free = || -> Result<u64> {
        Ok(match ordinal {
            Some(ordinal) => fornax_gpu::probe(ordinal)?.memory_free,
            None => 0,
        })
    };
    let before = free()?;
    let mut options =
        OpenOptions::new(path).device(ordinal.map_or(Device::Cpu, Device::Cuda)).context(512).parallel(8);
    if let Some(folder) = rest.get(1) {
        options = options.kernel_folder(folder);
    }
    let started = Instant::now();
    let model = options.open()?;
    println!("{} on {}: open after {:.2} s", path, model.device(), started.elapsed().as_secs_f64());
    let answers: Mutex<Vec<Option<Vec<u32>>>> = Mutex::new(vec![None; PROMPTS.len()]);
    let (next, tokens) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let mut loaded = None;
    let started = Instant::now();
    std::thread::scope(|scope| -> Result<()> {
        let work = || -> Result<()> {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= requests {
                    return Ok(());
                }
                let which = index % PROMPTS.len();
                let request = request(index, which);
                let completion = model.generate(&request).with_context(|| format!("request {index}"))?;
                tokens.fetch_add(completion.tokens.len(), Ordering::Relaxed);
                if request.sampling.temperature == 0.0 && request.sampling.repetition_penalty == 1.0 {
                    let mut answers = answers.lock().expect("nobody panics with it");
                    let known = answers[which].get_or_insert_with(|| completion.tokens.clone());
                    let length = known.len().min(completion.tokens.len());
                    ensure!(
                        known[..length] == completion.tokens[..length],
                        "request {index} got another answer"
                    );
                }
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))?;
        loaded = Some(free()?);
        Ok(())
    })?;
    let seconds = started.elapsed().as_secs_f64();
    let tokens = tokens.into_inner();
    println!("requests: {requests}, tokens: {tokens}, {:.0} tokens/s", tokens as f64 / seconds);
    println!("engine: {:?}", model.stats());
    drop(model);
    let after = free()?;
    println!("free before {before}, after all requests {}, after closing {after}", loaded.unwrap_or(0));
    ensure!(after >= before, "{} bytes stayed behind", before - after);
    Ok(())
}

/// Every fifth kind: greedy, short greedy, sampled, penalised, truncated.
fn request(index: usize, which: usize) -> Request {
    let greedy = Sampling::greedy();
    let (sampling, max_tokens) = match index / PROMPTS.len() % 5 {
        0 => (greedy, 24),
        1 => (greedy, 3 + index % 7),
        2 => (Sampling { temperature: 0.8, top_k: 40, top_p: 0.9, ..greedy }, 16),
        3 => (Sampling { repetition_penalty: 1.2, presence_penalty: 0.3, ..greedy }, 20),
        _ => (Sampling { temperature: 1.1, min_p: 0.05, top_logprobs: Some(2), ..greedy }, 8),
    };
    Request {
        sampling,
        max_tokens: Some(max_tokens),
        ignore_eos: index.is_multiple_of(2),
        seed: Some(index as u64),
        ..Request::text(PROMPTS[which])
    }
}
