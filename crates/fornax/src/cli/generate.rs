//! Raw completion.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use clap::Args;
use fornax::machine;
use fornax::{Completion, Event, Fornax, OpenOptions, Opinion, Prompt, Request, Sampling, Text};
use serde::Serialize;

use super::args::{ModelArg, PromptArgs};
use super::device::{CapacityArgs, DeviceArgs, DraftArg, KvDiskArgs};
use super::failure::Failure;
use super::interrupt::Interrupt;
use super::meter::Meter;
use super::sampling::SamplingArgs;
use super::{device, locate, output, plan};

/// Continue a text, without a chat template
///
/// Greedy unless --temperature says otherwise. Text is printed as it is made; --json prints one object at the end:
/// {text, tokens, finish_reason, usage, timings, seed}, with logprobs where they are asked for, and with choices in
/// place of text, tokens, finish_reason and seed where --n asks for several. `tokens` are the generated ids, an end
/// token that stopped the generation included; `text` holds neither control tokens nor a stop string. finish_reason is
/// "stop" (an end token, a stop string, or a form that is complete) or "length" (--max-tokens or the context is used
/// up). An answer that is cut before its form is complete is the error OUTPUT_TRUNCATED.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  fornax generate --prompt \"The sky is blue because\" --max-tokens 32
  fornax generate ./model.gguf --prompt-file story.txt --temperature 0.8 --seed 7
  fornax generate --tokens 504,6376,314 --max-tokens 8 --json
  fornax generate --prompt \"1, 2, 3,\" --stop 10 --json
  fornax generate --prompt \"A person as JSON: \" --schema person.json --max-tokens 200
  fornax generate --prompt \"Once\" --temperature 1 --n 4 --parallel 4 --max-tokens 20 --json

The tokenizer's BOS token is added once in front of a text where the model wants one, and never to --tokens.")]
pub(crate) struct Generate {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Print one JSON object at the end instead of streaming text
    #[arg(long)]
    pub(crate) json: bool,
    /// How many answers, each with its own random numbers; more than one needs --json
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true)]
    pub(crate) n: u32,
    /// Print the log-probability of each generated token; needs --json
    #[arg(long, requires = "json")]
    pub(crate) logprobs: bool,
    /// Print those of the N most likely tokens too
    #[arg(long, value_name = "N", allow_negative_numbers = true, requires = "json")]
    pub(crate) top_logprobs: Option<u32>,
    /// Print the log-probability of every prompt token after the first, each with the N most likely tokens
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0", allow_negative_numbers = true, requires = "json")]
    pub(crate) prompt_logprobs: Option<u32>,
    #[command(flatten)]
    pub(crate) capacity: CapacityArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArg,
    #[command(flatten)]
    pub(crate) kv_disk: KvDiskArgs,
    /// Print the memory that was planned and allocated
    #[arg(long, help_heading = "Model")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Answer<'a> {
    /// Alone, a choice is the answer.
    #[serde(flatten)]
    choice: Option<Choice<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    choices: Vec<Choice<'a>>,
    /// From the second token on.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<Logprob>>,
    usage: Usage,
    timings: Timings,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Plan and allocator side by side, by purpose.
    memory: serde_json::Value,
}

#[derive(Debug, Serialize)]
struct Choice<'a> {
    text: &'a str,
    tokens: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<Logprob>>,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
}

/// What the model thought of a token.
#[derive(Debug, Serialize)]
struct Logprob {
    token: u32,
    piece: String,
    /// Absent for a token that the form forced.
    logprob: Option<f32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top: Vec<Candidate>,
}

#[derive(Debug, Serialize)]
struct Candidate {
    token: u32,
    piece: String,
    logprob: f32,
}

#[derive(Debug, Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    /// Tokens of the prompt that were found in the cache.
    cached_tokens: usize,
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
    device: String,
    threads: usize,
    kv_dtype: String,
    activations: &'static str,
}

pub(crate) fn generate(args: &Generate) -> anyhow::Result<()> {
    generate_with(args, &|options| options)
}

/// The same, with the model opened by options that `adapt` changes.
pub(crate) fn generate_with(
    args: &Generate,
    adapt: &dyn Fn(OpenOptions) -> OpenOptions,
) -> anyhow::Result<()> {
    let prompt = prompt(&args.prompt)?;
    let form = args.sampling.form()?;
    if args.n > 1 && !args.json {
        return Err(Failure::usage("--n above 1 needs --json: several texts cannot be told apart").into());
    }
    let path = locate::locate(args.model.name())?;
    let interrupt = Interrupt::install()?;
    let started = Instant::now();
    let options = device::options(&path, &args.capacity.device)?.parallel(args.capacity.parallel);
    let options = args.kv_disk.apply(args.draft.apply(options)?, device::tell_of_disk)?;
    let model = device::open(adapt(options))?;
    let load = started.elapsed();
    let mut request = args.sampling.request(prompt, form, Sampling::greedy(), model.text())?;
    request.choices = args.n;
    request.prompt_logprobs = args.prompt_logprobs;
    if args.logprobs || args.top_logprobs.is_some() {
        request.sampling.top_logprobs = Some(args.top_logprobs.unwrap_or(0));
    }
    // Before anything is said: a refusal stays the only line.
    model.check(&request)?;
    // From the first thing that is seen on, an interrupt is answered.
    interrupt.during(|| {
        device::announce(model.device(), &args.capacity.device)?;
        if args.verbose {
            writeln!(io::stderr(), "{}", plan::comparison_line(&model.memory()))?;
        }
        if args.json {
            let completions = model.complete_all(&request, &mut || interrupt.flow())?;
            return output::json(&answer(&completions, &model, &args.capacity.device, load));
        }
        let mut out = io::stdout().lock();
        complete(&model, &request, &interrupt, &mut |event| match event {
            Event::Text(text) => show(&mut out, text),
            _ => Ok(()),
        })?;
        writeln!(out)?;
        Ok(())
    })
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

/// Runs a request, handing what it says to `show`, until it ends, the user interrupts it or nobody reads on.
pub(crate) fn complete(
    model: &Fornax,
    request: &Request,
    interrupt: &Interrupt,
    show: &mut dyn FnMut(Event<'_>) -> io::Result<()>,
) -> anyhow::Result<Completion> {
    let mut shown = Ok(());
    let mut meter = Some(Meter::new(Duration::from_secs(2)));
    let completion = model.complete(request, &mut |event| {
        match event {
            Event::Prompt { computed, total } => {
                if let Some(meter) = &mut meter {
                    let amount = format!("{computed} of {total} tokens");
                    meter.show("reading the prompt:", (computed as u64, total as u64), &amount);
                }
            }
            Event::Waiting => {}
            Event::Text(_) | Event::Thought(_) | Event::Call(_) | Event::Arguments(_) => {
                // The bar goes before the answer comes.
                meter = None;
                shown = show(event);
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

/// All choices of a request. Their prompt is counted once; times are those of the slowest.
fn answer<'a>(
    completions: &'a [Completion],
    model: &Fornax,
    args: &'a DeviceArgs,
    load: Duration,
) -> Answer<'a> {
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
    let slowest = completions.iter().max_by_key(|completion| {
        let timings = completion.timings;
        timings.first_token + timings.decode
    });
    let first = completions.first();
    let prompt_tokens = first.map_or(0, |completion| completion.prompt_tokens);
    let completion_tokens = completions.iter().map(|completion| completion.tokens.len()).sum();
    let timings = slowest.map(|completion| completion.timings).unwrap_or_default();
    let mut choices: Vec<Choice<'_>> =
        completions.iter().map(|completion| choice(completion, model.text())).collect();
    let (alone, seed) = if choices.len() == 1 {
        let alone = choices.pop().map(|choice| Choice { seed: None, ..choice });
        (alone, first.map(|completion| completion.seed))
    } else {
        (None, None)
    };
    let scored = first.filter(|completion| !completion.prompt_logprobs.is_empty());
    let score = |(token, opinion): &(u32, Opinion)| logprob(*token, opinion, model.text());
    let kind = model.kind();
    Answer {
        choice: alone,
        choices,
        prompt_logprobs: scored.map(|completion| completion.prompt_logprobs.iter().map(score).collect()),
        usage: Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            cached_tokens: first.map_or(0, |completion| completion.cached_tokens),
        },
        timings: Timings {
            load_ms: milliseconds(load),
            first_token_ms: first.map_or(0.0, |completion| milliseconds(completion.timings.first_token)),
            decode_ms: milliseconds(timings.decode),
            prompt_tokens_per_second: first.map_or(0.0, Completion::prompt_tokens_per_second),
            decode_tokens_per_second: slowest.and_then(Completion::decode_tokens_per_second),
            peak_bytes: machine::peak_bytes(),
            kv_bytes: model.memory().allocated.bytes(fornax_compute::Purpose::Kv),
            device: kind.to_string(),
            threads: model.threads(),
            kv_dtype: model.kv_dtype().to_string(),
            activations: args.activations_on(kind).name(),
        },
        seed,
        memory: plan::comparison(&model.memory()),
    }
}

fn choice<'a>(completion: &'a Completion, text: &Text) -> Choice<'a> {
    let opinions = completion.tokens.iter().zip(&completion.logprobs);
    Choice {
        text: &completion.text,
        tokens: &completion.tokens,
        logprobs: (!completion.logprobs.is_empty())
            .then(|| opinions.map(|(&token, opinion)| logprob(token, opinion, text)).collect()),
        finish_reason: completion.finish.name(),
        seed: Some(completion.seed),
    }
}

fn logprob(token: u32, opinion: &Opinion, text: &Text) -> Logprob {
    let piece = |token| text.tokenizer().map(|tokenizer| tokenizer.piece(token)).unwrap_or_default();
    let candidate = |&(token, logprob): &(u32, f32)| Candidate { token, piece: piece(token), logprob };
    Logprob {
        token,
        piece: piece(token),
        logprob: opinion.logprob,
        top: opinion.top.iter().map(candidate).collect(),
    }
}
