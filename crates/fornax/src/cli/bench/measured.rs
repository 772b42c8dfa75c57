//! A model under measurement: its figures, beside what the device can do at most.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use fornax::{Device, Error, Fornax};
use fornax_compute::SplitMix64;
use fornax_format::{Checkpoint, View};
use fornax_model::{LayerConfig, Mixture};
use serde::Serialize;

use super::args::{Bench, Part};
use super::load::{Ask, Clients, Percentiles, Target, Timeline, arrivals, between, steady_rate};
use crate::cli::failure::Failure;
use crate::cli::interrupt::Interrupt;
use crate::cli::locate;

/// What stands before the answer of a long conversation, which is timed where the context has room: always on a GPU.
pub(super) const LONG_PROMPT: usize = 8000;
/// The prompt that is asked about twice.
const PREFIX: usize = 1024;
/// Tokens of an answer that is not timed.
const WARM_TOKENS: usize = 8;
/// A mixed load's prompts have half of the usual length to so many halves of it.
const MIXED_HALVES: usize = 15;

/// What is measured: the flags, with what a device gets where they are silent.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    parts: Vec<Part>,
    /// Streams that are decoded together.
    streams: Vec<usize>,
    /// What stands before an answer that is timed.
    prompt: usize,
    /// How long it is.
    tokens: usize,
    /// Lengths of prompts that are timed themselves.
    prefill: Vec<usize>,
    /// Requests a second of the mixed load.
    rate: Option<f64>,
    /// Requests of the mixed load.
    requests: usize,
    seed: u64,
    /// Whether a long conversation is timed.
    long: bool,
}

impl Setup {
    pub(super) fn new(args: &Bench, device: Device) -> Result<Setup, Failure> {
        let on_gpu = device != Device::Cpu;
        let list = |given: &[usize], cpu: &[usize], gpu: &[usize]| match (given, on_gpu) {
            ([], false) => cpu.to_vec(),
            ([], true) => gpu.to_vec(),
            (given, _) => given.to_vec(),
        };
        let number = |given: Option<usize>, cpu, gpu| given.unwrap_or(if on_gpu { gpu } else { cpu });
        let parts = if args.only.is_empty() { Part::ALL.to_vec() } else { args.only.clone() };
        let promises = [Part::Prefill, Part::Decode].iter().all(|part| parts.contains(part));
        if parts.contains(&Part::Mixed) && args.rate.is_none() && !promises {
            return Err(Failure::usage("--only mixed needs --rate, or prefill and decode to take it from"));
        }
        Ok(Setup {
            parts,
            streams: list(&args.streams, &[1, 4, 16], &[1, 8, 32, 64, 128, 256]),
            prompt: number(args.prompt, 16, 128),
            tokens: number(args.tokens, 32, 128),
            prefill: list(&args.prefill, &[128, 512], &[128, 512, 2048, 8192]),
            rate: args.rate,
            requests: number(args.requests, 16, 128),
            seed: args.seed,
            long: on_gpu,
        })
    }

    fn has(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    /// Requests that are computed at once.
    pub(super) fn parallel(&self) -> usize {
        let most = self.streams.iter().copied().max().filter(|_| self.has(Part::Decode)).unwrap_or(1);
        if self.has(Part::Mixed) { most.max(16) } else { most }
    }

    /// Requests that may wait: a mixed load faster than the model queues up whole.
    pub(super) fn queue(&self) -> usize {
        self.parallel().max(self.requests)
    }

    /// Tokens of the longest request, and of the longest without a long conversation.
    pub(super) fn contexts(&self) -> [usize; 2] {
        let lengths = [
            (Part::Prefill, self.prefill.iter().copied().max().unwrap_or(0) + 1),
            (Part::Decode, self.prompt + self.tokens),
            (Part::Mixed, self.mixed_prompts().1 + self.mixed_answers().1),
            (Part::Prefix, PREFIX + 1),
        ];
        let short = lengths.iter().filter(|(part, _)| self.has(*part)).map(|(_, length)| *length);
        let short = short.max().unwrap_or(0).max(self.tokens + 1);
        let long = if self.long && self.has(Part::Decode) { LONG_PROMPT + self.tokens } else { 0 };
        [short.max(long), short]
    }

    /// The shortest and the longest prompt of the mixed load.
    fn mixed_prompts(&self) -> (usize, usize) {
        ((self.prompt / 2).max(1), (self.prompt * MIXED_HALVES / 2).max(1))
    }

    /// The shortest and the longest answer.
    fn mixed_answers(&self) -> (usize, usize) {
        ((self.tokens / 2).max(1), self.tokens * 3 / 2)
    }
}

/// What the device can do at most, measured in the same run.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Rates {
    /// What all threads together read from memory; of a GPU, what it copies inside its own memory, read and written
    /// bytes together.
    pub(super) memory_bytes_per_second: f64,
    /// From pinned memory of the host to a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) upload_bytes_per_second: Option<f64>,
    /// Multiplications and additions of a GPU's tensor cores in f16, from operands that are there already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) matrix_operations_per_second: Option<f64>,
}

impl Rates {
    pub(super) fn measure(model: &Fornax) -> Result<Rates, Error> {
        let folder = locate::cache_dir().ok().map(|cache| cache.join("kernels"));
        Ok(match model.kind().rates(folder)? {
            None => Rates {
                memory_bytes_per_second: memory_rate(model.threads()),
                upload_bytes_per_second: None,
                matrix_operations_per_second: None,
            },
            Some(rates) => Rates {
                memory_bytes_per_second: rates.copy,
                upload_bytes_per_second: Some(rates.host_to_device),
                matrix_operations_per_second: Some(rates.matrix),
            },
        })
    }

    /// In words.
    pub(super) fn words(&self) -> String {
        let memory = self.memory_bytes_per_second / 1e9;
        let mut words = match self.upload_bytes_per_second {
            None => format!("memory read at {memory:.1} GB/s in this run"),
            Some(upload) => format!(
                "in this run memory copied at {memory:.0} GB/s, pinned memory sent to the device at {:.1} GB/s",
                upload / 1e9
            ),
        };
        if let Some(matrix) = self.matrix_operations_per_second {
            let operations = matrix / 1e12;
            words += &format!(", tensor cores at {operations:.0} TFLOP/s (f16, nothing loaded)");
        }
        words
    }
}

/// What a token moves and takes, from the table of tensors and the numbers of the model.
#[derive(Clone, Debug)]
pub(super) struct Traffic {
    pub(super) file_bytes: u64,
    /// Bytes of the weights that every step reads.
    weight_bytes: u64,
    /// Bytes of all experts, of which a step reads those that are chosen.
    expert_bytes: u64,
    /// The share of a layer's experts that one token takes: 1 where there are none.
    expert_share: f64,
    /// Bytes of a sequence's states, which a step reads and writes.
    state_bytes: u64,
    /// Multiplications and additions of a token with all matrices but the head, and with the head.
    body_operations: f64,
    head_operations: f64,
    /// By layer: multiplications and additions of a token for each place that it sees, and how many it sees at most.
    layers: Vec<(f64, Option<u32>)>,
}

impl Traffic {
    pub(super) fn of(path: &Path, model: &Fornax) -> Result<Traffic, Error> {
        let checkpoint = Checkpoint::open(path)?;
        let (tensors, file_bytes): (Vec<View<'_>>, u64) = match &checkpoint {
            Checkpoint::Gguf(gguf) => (gguf.tensors().collect(), gguf.file_bytes()),
            Checkpoint::HuggingFace(model) => {
                (model.weights().tensors().collect(), model.weights().file_bytes())
            }
        };
        let is = |view: &View<'_>, names: [&str; 2]| names.contains(&view.name);
        let head = ["output.weight", "lm_head.weight"];
        let untied = tensors.iter().any(|view| is(view, head));
        let config = model.config();
        let share = |mixture: Mixture| mixture.routing.chosen as f64 / mixture.routing.experts.max(1) as f64;
        let mut traffic = Traffic {
            file_bytes,
            weight_bytes: 0,
            expert_bytes: 0,
            expert_share: config.mixture().map_or(1.0, share),
            state_bytes: model.plan().states().map_or(0, |(_, bytes, _)| bytes),
            body_operations: 0.0,
            head_operations: 0.0,
            layers: config.layers.iter().filter_map(attention_of).collect(),
        };
        for view in &tensors {
            let embeds = is(view, ["token_embd.weight", "model.embed_tokens.weight"]);
            // One row of an embedding is looked up; where the head is tied, all of it is multiplied by.
            if untied && embeds {
                continue;
            }
            let chosen = is_of_experts(view.name);
            if chosen {
                traffic.expert_bytes += view.bytes.len() as u64;
            } else {
                traffic.weight_bytes += view.bytes.len() as u64;
            }
            if view.shape.len() > 1 {
                let operations = 2.0 * view.values() as f64;
                if embeds || is(view, head) {
                    traffic.head_operations += operations;
                } else if chosen {
                    traffic.body_operations += operations * traffic.expert_share;
                } else {
                    traffic.body_operations += operations;
                }
            }
        }
        Ok(traffic)
    }

    /// Bytes of weights that a step of this many tokens reads. Which experts are chosen is the model's affair: this
    /// counts as many as even choices touch.
    fn step_bytes(&self, tokens: usize) -> f64 {
        let untouched = (1.0 - self.expert_share).powf(tokens as f64);
        self.weight_bytes as f64 + self.expert_bytes as f64 * (1.0 - untouched)
    }

    /// Operations of the tokens at these places, `heads` of which are asked for what follows them.
    fn operations(&self, places: std::ops::Range<usize>, heads: usize) -> f64 {
        let seen = |(operations, window): &(f64, Option<u32>)| {
            let most = window.map_or(usize::MAX, |window| window as usize);
            operations * places.clone().map(|place| (place + 1).min(most) as f64).sum::<f64>()
        };
        let attention = self.layers.iter().map(seen).sum::<f64>();
        places.len() as f64 * self.body_operations + heads as f64 * self.head_operations + attention
    }
}

/// Whether a tensor belongs to experts that are chosen, in either container. Shared experts have names of their own.
fn is_of_experts(name: &str) -> bool {
    name.contains("_exps.") || name.contains(".experts.")
}

/// Multiplications and additions of one layer's attention for each place seen, and its window.
fn attention_of(layer: &LayerConfig) -> Option<(f64, Option<u32>)> {
    if let Some(latent) = layer.latent() {
        return Some(((2 * latent.heads * (2 * latent.latent + latent.turned)) as f64, None));
    }
    let attention = layer.attention()?;
    Some(((4 * attention.heads.query * attention.heads.dim) as f64, attention.window))
}

/// Everything that was measured. Rates are tokens per second.
#[derive(Debug, Default, Serialize)]
pub(super) struct Figures {
    prefill: Vec<Prefill>,
    decode: Vec<Decode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mixed: Option<Mixed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix: Option<Prefix>,
    /// The same through a server on this machine, by clients on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    http: Option<Http>,
    /// What was asked for and could not be measured, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    skipped: Vec<String>,
}

/// What clients of a server saw.
#[derive(Debug, Default, Serialize)]
pub(super) struct Http {
    decode: Vec<Decode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mixed: Option<Mixed>,
}

#[derive(Debug, Serialize)]
struct Prefill {
    tokens: usize,
    tokens_per_second: f64,
    first_token_ms: f64,
    /// Weights once for each step, keys and values once.
    bytes: f64,
    memory_rate_percent: f64,
    operations_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    matrix_rate_percent: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Decode {
    streams: usize,
    /// Tokens before the first that is timed.
    prompt: usize,
    /// Of all streams together.
    tokens_per_second: f64,
    /// What is known of the model's work; of a server elsewhere nothing is.
    #[serde(flatten)]
    work: Option<Work>,
    /// What the engine's thread spends on a step beside waiting for the device: where it is less than a step takes, the
    /// device never waits for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    host_us_per_step: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_us: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Work {
    /// Weights once a step for all streams, and each stream's keys and values.
    bytes_per_token: f64,
    memory_rate_percent: f64,
    operations_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    matrix_rate_percent: Option<f64>,
}

/// Requests of many lengths that arrive at random times.
#[derive(Debug, Serialize)]
struct Mixed {
    requests: usize,
    requests_per_second: f64,
    prompt_tokens: usize,
    generated_tokens: usize,
    /// From the first request to the last token.
    seconds: f64,
    /// Generated.
    tokens_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    operations_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    matrix_rate_percent: Option<f64>,
    first_token_ms: Option<Percentiles>,
    between_tokens_ms: Option<Percentiles>,
}

/// The same long prompt twice.
#[derive(Debug, Serialize)]
struct Prefix {
    tokens: usize,
    cached_tokens: usize,
    first_ms: f64,
    again_ms: f64,
}

/// Asks, and makes figures of the answers.
pub(super) struct Measured<'a> {
    pub(super) setup: &'a Setup,
    pub(super) interrupt: &'a Interrupt,
    pub(super) clients: &'a Clients,
    /// Tokens that prompts are made of.
    pub(super) vocab: usize,
    /// Tokens of a request.
    pub(super) context: usize,
    /// What is known where the model is this process's own.
    pub(super) inside: Option<Inside<'a>>,
}

/// A model in this process.
pub(super) struct Inside<'a> {
    pub(super) model: &'a Fornax,
    pub(super) traffic: Traffic,
    pub(super) rates: Rates,
}

impl Measured<'_> {
    /// Everything that is asked for, of the engine and, where there is one, of the server in front of it.
    pub(super) fn figures(&self, inside: &Inside<'_>, server: Option<&Target>) -> anyhow::Result<Figures> {
        let engine = Target::Engine(inside.model.handle().clone());
        let mut figures = Figures::default();
        if self.setup.has(Part::Prefill) {
            for &tokens in &self.setup.prefill {
                if tokens < self.context {
                    figures.prefill.push(self.prefill(&engine, inside, tokens)?);
                } else {
                    figures.skipped.push(format!("prefill {tokens}: the context holds {}", self.context));
                }
            }
        }
        if self.setup.has(Part::Decode) {
            figures.decode = self.decodes(&engine, &mut figures.skipped)?;
            if self.setup.long && self.context >= LONG_PROMPT + self.setup.tokens {
                figures.decode.push(self.decode(&engine, 1, LONG_PROMPT)?);
            }
        }
        let rate = self.setup.rate.or_else(|| self.half_of_what_is_promised(&figures));
        let mixed = |target: &Target| match rate {
            Some(rate) if self.setup.has(Part::Mixed) => self.mixed(target, rate).map(Some),
            _ => Ok(None),
        };
        figures.mixed = mixed(&engine)?;
        if self.setup.has(Part::Prefix) {
            figures.prefix = Some(self.prefix(&engine)?);
        }
        if let Some(server) = server {
            let decode = match self.setup.has(Part::Decode) {
                true => self.decodes(server, &mut Vec::new())?,
                false => Vec::new(),
            };
            figures.http = Some(Http { decode, mixed: mixed(server)? });
        }
        Ok(figures)
    }

    /// What a server elsewhere can be asked about.
    pub(super) fn http(&self, server: &Target) -> anyhow::Result<Http> {
        let decode = match self.setup.has(Part::Decode) {
            true => self.decodes(server, &mut Vec::new())?,
            false => Vec::new(),
        };
        let rate = self.setup.rate.filter(|_| self.setup.has(Part::Mixed));
        Ok(Http { decode, mixed: rate.map(|rate| self.mixed(server, rate)).transpose()? })
    }

    /// Half of the requests a second that prompts and answers of the mixed load would take of the device if each were
    /// computed as fast as it was alone.
    fn half_of_what_is_promised(&self, figures: &Figures) -> Option<f64> {
        let best = |rates: &mut dyn Iterator<Item = f64>| rates.reduce(f64::max).filter(|&rate| rate > 0.0);
        let prefill = best(&mut figures.prefill.iter().map(|prefill| prefill.tokens_per_second))?;
        let decode = best(&mut figures.decode.iter().map(|decode| decode.tokens_per_second))?;
        let mean = |(least, most): (usize, usize)| (least + most) as f64 / 2.0;
        let prompt = mean(self.setup.mixed_prompts()) / prefill;
        let answer = mean(self.setup.mixed_answers()) / decode;
        Some(0.5 / (prompt + answer))
    }

    /// A prompt that was never asked about before: no two have the same seed.
    fn prompt(&self, tokens: usize, random: &mut SplitMix64) -> Vec<u32> {
        let vocab = self.vocab.max(1) as u64;
        (0..tokens).map(|_| (random.bits() % vocab) as u32).collect()
    }

    fn random(&self, of: u64) -> SplitMix64 {
        SplitMix64(self.setup.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ unique() << 20 ^ of)
    }

    fn run(&self, target: &Target, asks: &[Ask]) -> anyhow::Result<Vec<Timeline>> {
        self.clients.run(target, asks, self.interrupt)
    }

    /// The best of three: the first one pages weights in and compiles what is missing.
    fn prefill(&self, target: &Target, inside: &Inside<'_>, tokens: usize) -> anyhow::Result<Prefill> {
        let mut seconds = f64::INFINITY;
        let mut random = self.random(tokens as u64);
        for _ in 0..3 {
            let prompt = self.prompt(tokens, &mut random);
            let ask = Ask { at: Duration::ZERO, prompt, tokens: 1, seed: 0 };
            for timeline in self.run(target, &[ask])? {
                if let Some(first) = timeline.came.first() {
                    seconds = seconds.min(first.duration_since(timeline.sent).as_secs_f64());
                }
            }
        }
        let Inside { model, traffic, rates } = inside;
        let longest = model.plan().step.tokens_max.max(1);
        let (whole, rest) = (tokens / longest, tokens % longest);
        let kv = model.plan().kv_token_bytes as f64 * tokens as f64;
        let last = if rest > 0 { traffic.step_bytes(rest) } else { 0.0 };
        let states = (2 * traffic.state_bytes) as f64 * tokens.div_ceil(longest) as f64;
        let bytes = whole as f64 * traffic.step_bytes(longest) + last + kv + states;
        let operations = traffic.operations(0..tokens, 1) / seconds;
        Ok(Prefill {
            tokens,
            tokens_per_second: tokens as f64 / seconds,
            first_token_ms: seconds * 1e3,
            bytes,
            memory_rate_percent: 100.0 * bytes / seconds / rates.memory_bytes_per_second,
            operations_per_second: operations,
            matrix_rate_percent: rates.share_of_matrix(operations),
        })
    }

    /// All numbers of streams that there is room for; the others are said to be left out.
    fn decodes(&self, target: &Target, skipped: &mut Vec<String>) -> anyhow::Result<Vec<Decode>> {
        let prompt = self.setup.prompt.min(self.context / 2);
        let mut decodes = Vec::new();
        for &streams in &self.setup.streams {
            let tokens = streams * (prompt + self.answer(prompt));
            let pool = self.inside.as_ref().map(|inside| inside.model.plan().pool_tokens());
            if let Some(pool) = pool.filter(|&pool| tokens > pool) {
                skipped
                    .push(format!("decode x {streams}: it takes {tokens} tokens and the cache holds {pool}"));
                continue;
            }
            decodes.push(self.decode(target, streams, prompt)?);
        }
        Ok(decodes)
    }

    /// Tokens of an answer behind such a prompt.
    fn answer(&self, prompt: usize) -> usize {
        self.setup.tokens.min(self.context - prompt)
    }

    fn decode(&self, target: &Target, streams: usize, prompt: usize) -> anyhow::Result<Decode> {
        let tokens = self.answer(prompt);
        let mut random = self.random((streams << 16 ^ prompt) as u64);
        let ask = |seed| Ask { at: Duration::ZERO, prompt: self.prompt(prompt, &mut random), tokens, seed };
        let asks: Vec<Ask> = (0..streams as u64).map(ask).collect();
        // The first answers warm up: steps of this size are run and recorded, and prompts are found in the cache the
        // second time, so that all streams soon run together.
        let short = |ask: &Ask| Ask { tokens: tokens.min(WARM_TOKENS), ..ask.clone() };
        self.run(target, &asks.iter().map(short).collect::<Vec<_>>())?;
        let before = self.inside.as_ref().map(|inside| inside.model.stats());
        let timelines = self.run(target, &asks)?;
        let tokens_per_second = steady_rate(&timelines);
        let mut decode =
            Decode { streams, prompt, tokens_per_second, work: None, host_us_per_step: None, step_us: None };
        if let Some((Inside { model, traffic, rates }, before)) = self.inside.as_ref().zip(before) {
            let kv = model.plan().kv_token_bytes as f64 * (prompt as f64 + tokens as f64 / 2.0);
            let states = (2 * traffic.state_bytes) as f64;
            let bytes = traffic.step_bytes(streams) / streams as f64 + kv + states;
            let each = traffic.operations(prompt..prompt + tokens, tokens) / tokens as f64;
            decode.work = Some(Work {
                bytes_per_token: bytes,
                memory_rate_percent: 100.0 * bytes * tokens_per_second / rates.memory_bytes_per_second,
                operations_per_second: each * tokens_per_second,
                matrix_rate_percent: rates.share_of_matrix(each * tokens_per_second),
            });
            if model.kind() != Device::Cpu {
                let after = model.stats();
                let steps = (after.steps - before.steps).max(1) as f64;
                let busy = after.busy.saturating_sub(before.busy).as_secs_f64();
                let waited = after.waited.saturating_sub(before.waited).as_secs_f64();
                decode.host_us_per_step = Some(busy * 1e6 / steps);
                decode.step_us = Some((busy + waited) * 1e6 / steps);
            }
        }
        Ok(decode)
    }

    /// Requests that arrive at random times at a rate, whether or not earlier ones have ended.
    fn mixed(&self, target: &Target, rate: f64) -> anyhow::Result<Mixed> {
        // The lengths and times are the same for every target; the prompts are not, so that none is cached.
        let mut lengths = SplitMix64(self.setup.seed);
        let mut random = self.random(1);
        let times = arrivals(rate, self.setup.requests, &mut lengths);
        let (prompts, answers) = (self.setup.mixed_prompts(), self.setup.mixed_answers());
        let asks: Vec<Ask> = (0u64..)
            .zip(times)
            .map(|(seed, at)| {
                let tokens = between(answers.0, answers.1, &mut lengths).min(self.context - 1);
                let prompt = between(prompts.0, prompts.1, &mut lengths).min(self.context - tokens);
                Ask { at, prompt: self.prompt(prompt, &mut random), tokens, seed }
            })
            .collect();
        let timelines = self.run(target, &asks)?;
        let first = timelines.iter().map(|timeline| timeline.sent).min();
        let last = timelines.iter().filter_map(|timeline| timeline.came.last()).max();
        let seconds = first.zip(last).map_or(0.0, |(first, last)| last.duration_since(first).as_secs_f64());
        let generated: usize = timelines.iter().map(|timeline| timeline.tokens).sum();
        let operations = self.inside.as_ref().map(|inside| {
            let of = |ask: &Ask| inside.traffic.operations(0..ask.prompt.len() + ask.tokens - 1, ask.tokens);
            asks.iter().map(of).sum::<f64>() / seconds.max(f64::MIN_POSITIVE)
        });
        Ok(Mixed {
            requests: asks.len(),
            requests_per_second: rate,
            prompt_tokens: asks.iter().map(|ask| ask.prompt.len()).sum(),
            generated_tokens: generated,
            seconds,
            tokens_per_second: generated as f64 / seconds.max(f64::MIN_POSITIVE),
            operations_per_second: operations,
            matrix_rate_percent: self
                .inside
                .as_ref()
                .zip(operations)
                .and_then(|(inside, operations)| inside.rates.share_of_matrix(operations)),
            first_token_ms: Percentiles::first_token(&timelines),
            between_tokens_ms: Percentiles::between_tokens(&timelines),
        })
    }

    fn prefix(&self, target: &Target) -> anyhow::Result<Prefix> {
        let tokens = PREFIX.min(self.context - 1);
        let prompt = self.prompt(tokens, &mut self.random(2));
        let ask = Ask { at: Duration::ZERO, prompt, tokens: 1, seed: 0 };
        let time = || -> anyhow::Result<(f64, usize)> {
            let timelines = self.run(target, std::slice::from_ref(&ask))?;
            let first = Percentiles::first_token(&timelines).map_or(0.0, |first| first.p50);
            Ok((first, timelines.iter().map(|timeline| timeline.cached_tokens).sum()))
        };
        let ((first_ms, _), (again_ms, cached_tokens)) = (time()?, time()?);
        Ok(Prefix { tokens, cached_tokens, first_ms, again_ms })
    }
}

impl Rates {
    fn share_of_matrix(&self, operations: f64) -> Option<f64> {
        self.matrix_operations_per_second.map(|most| 100.0 * operations / most)
    }
}

/// A number that this process has not had before: prompts made with it are in no cache.
fn unique() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Bytes a second that all threads together read of a block larger than any cache: the best of three passes.
fn memory_rate(threads: usize) -> f64 {
    const WORDS: usize = (256 << 20) / size_of::<u64>();
    let block: Vec<u64> = (0..WORDS as u64).collect();
    let pass = || {
        let started = Instant::now();
        let sum = std::thread::scope(|scope| {
            let parts = block.chunks(WORDS.div_ceil(threads.max(1)));
            let sums: Vec<_> = parts.map(|part| scope.spawn(move || sum(part))).collect();
            sums.into_iter().fold(0u64, |all, sum| all.wrapping_add(sum.join().unwrap_or_default()))
        });
        std::hint::black_box(sum);
        started.elapsed().as_secs_f64()
    };
    let best = (0..3).map(|_| pass()).fold(f64::INFINITY, f64::min);
    (WORDS * size_of::<u64>()) as f64 / best
}

/// In eight sums, so that additions do not wait for each other.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 8];
    for eight in words.as_chunks::<8>().0 {
        for (sum, word) in sums.iter_mut().zip(eight) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

impl Figures {
    /// Tokens a second of everything that is measured in them, by its name.
    pub(super) fn rates(&self) -> Vec<(String, f64)> {
        let prefill = self.prefill.iter().map(|prefill| (prefill.name(), prefill.tokens_per_second));
        let decode = self.decode.iter().map(|decode| (decode.name(""), decode.tokens_per_second));
        let served = self.http.iter().flat_map(|http| &http.decode);
        let served = served.map(|decode| (decode.name("http "), decode.tokens_per_second));
        prefill.chain(decode).chain(served).collect()
    }

    /// For people.
    pub(super) fn table(&self) -> Result<String, std::fmt::Error> {
        let mut out = String::new();
        let http = self.http.as_ref();
        let served = http.map_or(&[][..], |http| &http.decode);
        if !(self.prefill.is_empty() && self.decode.is_empty() && served.is_empty()) {
            writeln!(out, "{}", heading())?;
            for prefill in &self.prefill {
                writeln!(out, "{}", prefill.line())?;
            }
            for decode in &self.decode {
                writeln!(out, "{}", decode.line(""))?;
            }
            for decode in served {
                writeln!(out, "{}", decode.line("http "))?;
            }
        }
        mixed_table(&mut out, self.mixed.as_ref(), http.and_then(|http| http.mixed.as_ref()))?;
        if let Some(prefix) = &self.prefix {
            writeln!(
                out,
                "\na prompt of {} tokens: {:.1} ms to the first token, {:.1} ms when {} of them are cached",
                prefix.tokens, prefix.first_ms, prefix.again_ms, prefix.cached_tokens
            )?;
        }
        for skipped in &self.skipped {
            writeln!(out, "left out: {skipped}")?;
        }
        Ok(out)
    }
}

impl Http {
    /// For people.
    pub(super) fn table(&self) -> Result<String, std::fmt::Error> {
        let mut out = String::new();
        if !self.decode.is_empty() {
            writeln!(out, "{}", heading())?;
        }
        for decode in &self.decode {
            writeln!(out, "{}", decode.line("http "))?;
        }
        mixed_table(&mut out, None, self.mixed.as_ref())?;
        Ok(out)
    }
}

fn heading() -> String {
    format!(
        "\n{:<20} {:>10} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "", "tok/s", "MB/token", "of memory", "GOP/s", "of matrix", "us/step", "host us"
    )
}

fn percent(share: Option<f64>) -> String {
    share.map_or(String::new(), |share| format!("{share:.1} %"))
}

impl Prefill {
    fn name(&self) -> String {
        format!("prefill {}", self.tokens)
    }

    fn line(&self) -> String {
        let name = self.name();
        let line = format!(
            "{name:<20} {:>10.1} {:>10.2} {:>9} {:>9.1} {:>9}",
            self.tokens_per_second,
            self.bytes / self.tokens as f64 / 1e6,
            percent(Some(self.memory_rate_percent)),
            self.operations_per_second / 1e9,
            percent(self.matrix_rate_percent),
        );
        line.trim_end().to_owned()
    }
}

impl Decode {
    fn name(&self, through: &str) -> String {
        match self.prompt {
            LONG_PROMPT => format!("{through}decode at {LONG_PROMPT}"),
            _ => format!("{through}decode x {}", self.streams),
        }
    }

    fn line(&self, through: &str) -> String {
        let name = self.name(through);
        let mut line = format!("{name:<20} {:>10.1}", self.tokens_per_second);
        if let Some(work) = &self.work {
            line += &format!(
                " {:>10.2} {:>9} {:>9.1} {:>9}",
                work.bytes_per_token / 1e6,
                percent(Some(work.memory_rate_percent)),
                work.operations_per_second / 1e9,
                percent(work.matrix_rate_percent),
            );
        }
        if let Some((step, host)) = self.step_us.zip(self.host_us_per_step) {
            line += &format!(" {step:>9.0} {host:>9.0}");
        }
        line.trim_end().to_owned()
    }
}

fn mixed_table(out: &mut String, engine: Option<&Mixed>, http: Option<&Mixed>) -> std::fmt::Result {
    let Some(any) = engine.or(http) else { return Ok(()) };
    writeln!(
        out,
        "\n{} requests at random times, {:.2} a second: {} tokens of prompts, {} of answers",
        any.requests, any.requests_per_second, any.prompt_tokens, any.generated_tokens
    )?;
    writeln!(
        out,
        "{:<20} {:>10} {:>29} {:>29}",
        "", "tok/s", "first token, ms 50/90/99 %", "between tokens, ms 50/90/99 %"
    )?;
    let times = |times: Option<Percentiles>| {
        times.map_or(String::new(), |Percentiles { p50, p90, p99 }| {
            format!("{p50:>9.1} {p90:>9.1} {p99:>9.1}")
        })
    };
    for (name, mixed) in [("mixed", engine), ("http mixed", http)] {
        if let Some(mixed) = mixed {
            let (first, between) = (times(mixed.first_token_ms), times(mixed.between_tokens_ms));
            writeln!(out, "{name:<20} {:>10.1} {first:>29} {between:>29}", mixed.tokens_per_second)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic() -> Traffic {
        Traffic {
            file_bytes: 0,
            weight_bytes: 0,
            expert_bytes: 0,
            expert_share: 1.0,
            state_bytes: 0,
            body_operations: 100.0,
            head_operations: 10.0,
            layers: vec![(2.0, None), (2.0, Some(2))],
        }
    }

    #[test]
    fn a_step_reads_the_experts_that_are_chosen() {
        let dense = Traffic { weight_bytes: 1000, ..traffic() };
        assert_eq!(dense.step_bytes(1), 1000.0);
        // Two of eight for each token: a quarter for one token, 7/16 for two, nearly all for many.
        let mixture = Traffic { expert_bytes: 1600, expert_share: 0.25, ..dense };
        assert_eq!(mixture.step_bytes(1), 1400.0);
        assert_eq!(mixture.step_bytes(2), 1700.0);
        assert!(mixture.step_bytes(64) > 2599.9 && mixture.step_bytes(64) < 2600.0);
    }

    #[test]
    fn experts_are_known_by_their_tensors_names() {
        let of_experts = ["blk.3.ffn_gate_exps.weight", "model.layers.0.mlp.experts.7.up_proj.weight"];
        let others = [
            "blk.3.ffn_gate_shexp.weight",
            "blk.3.ffn_gate_inp.weight",
            "model.layers.0.mlp.shared_expert.up_proj.weight",
        ];
        assert!(of_experts.into_iter().all(is_of_experts));
        assert!(!others.into_iter().any(is_of_experts));
    }

    #[test]
    fn operations_are_those_of_every_product() {
        let traffic = traffic();
        let check = |places, heads, wanted| assert_eq!(traffic.operations(places, heads), wanted);
        // The first token sees itself in both layers.
        check(0..1, 1, 100.0 + 10.0 + 2.0 * 2.0);
        // Three tokens: 1 + 2 + 3 places in one layer, 1 + 2 + 2 in the other.
        check(0..3, 1, 300.0 + 10.0 + 2.0 * 11.0);
        check(2..3, 0, 100.0 + 2.0 * 5.0);
    }
}
