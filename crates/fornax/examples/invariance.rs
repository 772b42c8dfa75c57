//! A request's tokens and the bits of their log-probabilities, alone, among 63 others, in other chunks, after a prefix
//! hit and after preemption, through the whole engine on a real device. Refuses to go on where a bit differs.
//!
//! `cargo run --release -p fornax --example invariance -- MODEL [DEVICE [PROMPT]]`, with DEVICE as in `cpu` or `cuda:0`
//! and PROMPT the tokens of the longest prompt.
#![expect(clippy::print_stdout, reason = "an example prints its result")]

use std::path::Path;

use anyhow::{Context, ensure};
use fornax::{Device, Fornax, OpenOptions};
use fornax_compute::Sampling;
use fornax_engine::{Event, Reply, Request};

/// Tokens of each answer.
const TOKENS: usize = 24;

/// Requests at once.
const CROWD: usize = 64;

/// Tokens with the bits of their log-probabilities.
type Answer = Vec<(u32, u32)>;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let model = args.next().context("which model?")?;
    let device = match args.next().as_deref() {
        None | Some("cpu") => Device::Cpu,
        Some(name) => Device::Cuda(name.strip_prefix("cuda:").context("a device is cpu or cuda:N")?.parse()?),
    };
    let longest: usize = args.next().map_or(Ok(600), |text| text.parse())?;
    let path = Path::new(&model);
    let context = longest + TOKENS;
    let open = |parallel: usize| {
        OpenOptions::new(path).device(device).context(context).parallel(parallel).drafts(false)
    };

    let model = open(1).open()?;
    let vocab = model.text().vocab() as u32;
    let requests: Vec<Request> = (0..CROWD).map(|index| request(index, longest, vocab)).collect();
    let mut wanted = Vec::new();
    for request in &requests {
        wanted.push(answers(&model, std::slice::from_ref(request))?.remove(0));
    }
    // Everything that fills a page was kept: the prompt's last page and the answer are computed again.
    let again = answers(&model, &requests[..1])?;
    ensure!(again[0] == wanted[0], "another answer after a prefix hit");
    let hits = model.stats().prefix_hits;
    println!(
        "alone: {CROWD} answers of {TOKENS} tokens; {hits} prompt tokens were found in the cache on the way"
    );
    drop(model);

    let model = open(CROWD).open()?;
    check(&model, &requests, &wanted, "together")?;
    check(&model, &requests, &wanted, "together, with prefixes of those before")?;
    drop(model);

    // The plan gives keys and values what the limit leaves: a little more than one context.
    let plan = open(CROWD).memory_limit(u64::MAX).plan()?.plan;
    let kv = plan.usage().bytes(fornax_compute::Purpose::Kv);
    let pool = plan.kv_token_bytes * (context as u64 * 5 / 2);
    let limit = plan.usage().total() + plan.runtime_bytes() - kv + pool;
    // The margin is a fiftieth of the whole, so a forty-ninth of the rest, between the plan's bounds.
    let limit = limit + (limit / 49 + 1).clamp(16 << 20, 512 << 20);
    let model = open(CROWD).memory_limit(limit).open()?;
    println!(
        "a cache for {} tokens, of which {} requests want {context} each",
        model.plan().pool_tokens(),
        CROWD
    );
    check(&model, &requests, &wanted, "in a cache too small for them")?;
    let preemptions = model.stats().preemptions;
    ensure!(preemptions > 0, "nobody was preempted: the cache was too large to show anything");
    println!("{preemptions} preemptions; every bit is the same");
    Ok(())
}

/// Requests of every length, half of which begin alike.
fn request(index: usize, longest: usize, vocab: u32) -> Request {
    let length = 1 + (longest - 1) * (index * 29 % CROWD) / (CROWD - 1);
    let story = if index.is_multiple_of(2) { 0 } else { index as u32 };
    let prompt = (0..length as u32).map(|at| (at * 7919 + story * 104_729 + 17) % vocab).collect();
    let temperature = if index.is_multiple_of(3) { 0.0 } else { 0.9 };
    let sampling = Sampling { temperature, top_p: 0.95, top_logprobs: Some(0), ..Sampling::greedy() };
    Request { seed: index as u64, ..Request::new(prompt, TOKENS, sampling) }
}

fn check(model: &Fornax, requests: &[Request], wanted: &[Answer], what: &str) -> anyhow::Result<()> {
    let got = answers(model, requests)?;
    for (index, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let at = got.iter().zip(wanted).position(|(got, wanted)| got != wanted);
        ensure!(got == wanted, "{what}: request {index} answers otherwise from token {at:?} on");
    }
    println!("{what}: {} answers, every bit the same", got.len());
    Ok(())
}

/// What becomes of requests that are sent at once.
fn answers(model: &Fornax, requests: &[Request]) -> anyhow::Result<Vec<Answer>> {
    let mut replies: Vec<Reply> = Vec::new();
    for request in requests {
        replies.extend(model.handle().submit(request.clone())?);
    }
    let mut all = Vec::new();
    for reply in &mut replies {
        let mut answer = Answer::new();
        while let Some(event) = reply.recv() {
            match event {
                Event::Token { token, logprob, .. } => {
                    answer.push((token, logprob.context("a log-probability was asked for")?.to_bits()));
                }
                Event::Failed(failure) => anyhow::bail!("{failure}"),
                _ => {}
            }
        }
        ensure!(answer.len() == TOKENS, "{} tokens", answer.len());
        all.push(answer);
    }
    Ok(all)
}
