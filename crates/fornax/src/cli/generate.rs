//! Raw completion.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use fornax::{Completion, Event, Fornax, Prompt, Sampling};
use serde::Serialize;

use super::args::{DeviceArgs, Generate, PromptArgs, SamplingArgs};
use super::interrupt::Interrupt;
use super::meter::Meter;
use super::{device, locate, machine, output};

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Answer<'a> {
    text: &'a str,
    tokens: &'a [u32],
    finish_reason: &'static str,
    usage: Usage,
    timings: Timings,
    seed: u64,
}

#[derive(Debug, Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

/// Durations are milliseconds.
#[derive(Debug, Serialize)]
struct Timings {
    load_ms: f64,
    first_token_ms: f64,
    decode_ms: f64,
    prompt_tokens_per_second: f64,
    decode_tokens_per_second: Option<f64>,
    /// The most memory that the process held, where the system says.
    peak_bytes: Option<u64>,
    /// Of that, what holds keys and values.
    kv_bytes: u64,
    device: &'static str,
    threads: usize,
    kv_dtype: String,
    activations: &'static str,
}

pub(crate) fn generate(args: &Generate) -> anyhow::Result<()> {
    let prompt = prompt(&args.prompt)?;
    let sampling = sampling(&args.sampling, Sampling::default());
    let path = locate::locate(args.model.as_deref())?;
    let interrupt = Interrupt::install()?;
    let started = Instant::now();
    let mut model = device::open(device::options(&path, &args.device)?)?;
    let load = started.elapsed();
    model.room(model.prompt_tokens(&prompt)?.len(), sampling.max_tokens)?;
    device::announce(&model, &args.device)?;
    if args.json {
        let completion =
            interrupt.during(|| complete(&mut model, &prompt, &sampling, &interrupt, &mut |_| Ok(())))?;
        return output::json(&answer(&completion, &model, &args.device, load));
    }
    let mut out = io::stdout().lock();
    interrupt
        .during(|| complete(&mut model, &prompt, &sampling, &interrupt, &mut |text| show(&mut out, text)))?;
    writeln!(out)?;
    Ok(())
}

/// The prompt that the flags hold.
pub(crate) fn prompt(args: &PromptArgs) -> anyhow::Result<Prompt> {
    if let Some(tokens) = &args.tokens {
        return Ok(Prompt::Tokens(tokens.clone()));
    }
    let text = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => output::text_of(path)?,
        (None, None) => String::new(),
    };
    Ok(Prompt::Text { text, special: args.special })
}

/// What the flags say, and the command's defaults for what they do not.
pub(crate) fn sampling(args: &SamplingArgs, defaults: Sampling) -> Sampling {
    Sampling {
        max_tokens: args.max_tokens,
        temperature: args.temperature.unwrap_or(defaults.temperature),
        top_k: args.top_k.unwrap_or(defaults.top_k),
        top_p: args.top_p.unwrap_or(defaults.top_p),
        min_p: args.min_p.unwrap_or(defaults.min_p),
        seed: args.seed,
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
    }
}

/// Runs a request, handing its text to `show`, until it ends, the user interrupts it or nobody reads on.
pub(crate) fn complete(
    model: &mut Fornax,
    prompt: &Prompt,
    sampling: &Sampling,
    interrupt: &Interrupt,
    show: &mut dyn FnMut(&str) -> io::Result<()>,
) -> anyhow::Result<Completion> {
    let mut shown = Ok(());
    let mut meter = Some(Meter::new(Duration::from_secs(2)));
    let completion = model.complete(prompt, sampling, &mut |event| {
        match event {
            Event::Prompt { computed, total } => {
                if let Some(meter) = &mut meter {
                    let amount = format!("{computed} of {total} tokens");
                    meter.show("reading the prompt:", (computed as u64, total as u64), &amount);
                }
            }
            Event::Text(text) => {
                // The bar goes before the answer comes.
                meter = None;
                shown = show(text);
            }
        }
        if shown.is_err() || interrupt.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    // Why it was cancelled says more than that it was.
    shown?;
    Ok(completion?)
}

/// Prints text at once: whoever waits for it sees each token.
pub(crate) fn show(out: &mut impl Write, text: &str) -> io::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn answer<'a>(
    completion: &'a Completion,
    model: &Fornax,
    args: &'a DeviceArgs,
    load: Duration,
) -> Answer<'a> {
    let completion_tokens = completion.tokens.len();
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
    let timings = completion.timings;
    Answer {
        text: &completion.text,
        tokens: &completion.tokens,
        finish_reason: completion.finish.name(),
        usage: Usage {
            prompt_tokens: completion.prompt_tokens,
            completion_tokens,
            total_tokens: completion.prompt_tokens + completion_tokens,
        },
        timings: Timings {
            load_ms: milliseconds(load),
            first_token_ms: milliseconds(timings.first_token),
            decode_ms: milliseconds(timings.decode),
            prompt_tokens_per_second: completion.prompt_tokens_per_second(),
            decode_tokens_per_second: completion.decode_tokens_per_second(),
            peak_bytes: machine::peak_bytes(),
            kv_bytes: model.usage().bytes(fornax_compute::Purpose::Kv),
            device: "cpu",
            threads: model.threads(),
            kv_dtype: model.kv_dtype().to_string(),
            activations: args.activations.name(),
        },
        seed: completion.seed,
    }
}
