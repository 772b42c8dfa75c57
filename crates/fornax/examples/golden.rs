//! A device against Hugging Face transformers: the logits of every tiny checkpoint at every position, the vectors of
//! the tiny encoder, and what real models answer through the whole engine. Ends with an error where something differs
//! by more than the bounds below.
//!
//! `cargo run --release -p fornax --example golden -- DEVICE [KERNEL_FOLDER [MODEL ANSWERS]...]`, from the root of the
//! repository, with DEVICE as in `cpu` or `cuda:0`, or `half` for the specification of a GPU's arithmetic, slowly
//! computed on the CPU, and ANSWERS as in `tests/golden/smollm2-q4_1.json`.
#![expect(clippy::print_stdout, reason = "a proof prints its figures")]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use fornax::{Activations, Device, Error, KvDType, OpenOptions, Opinion, Request, Sampling};
use serde::Deserialize;

/// Most that values may differ. A GPU rounds activations to the 11 bits of an f16 for its products; transformers' own
/// results in f16 are two to four times as far from those in f32 (docs/log/2026-11.md, "every fixture, with products of
/// f16").
struct Bounds {
    /// A log-probability of a tiny checkpoint, keys and values in f32.
    tiny: f64,
    /// The same of those whose random weights are the least tame.
    wild: f64,
    /// A value of the encoder's vectors.
    vector: f32,
}
const FULL: Bounds = Bounds { tiny: 2e-4, wild: 1e-3, vector: 2e-5 };
const HALF: Bounds = Bounds { tiny: 0.06, wild: 0.3, vector: 5e-3 };
/// Most that a log-probability of a real model may differ; of two tokens that are nearer to each other, either may come
/// first.
const REAL: f32 = 0.05;

/// Small changes of what these compute become large ones; the specification in halves, on a CPU, differs as much.
const WILD: [&str; 7] = ["gemma3", "cwm", "granite-hybrid", "jamba", "mamba", "qwen35", "qwen3next"];

/// Positions at which a mixture may have chosen other experts.
const JUMPS: usize = 2;

const FIXTURES: &str = "crates/model/tests/fixtures";

/// Tokens of a tiny checkpoint; its logits lie beside it.
#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
}

#[derive(Deserialize)]
struct Texts {
    texts: Vec<Vec<u32>>,
}

/// What transformers answers.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt_tokens: Vec<u32>,
    prompt_logprobs: Vec<f32>,
    /// After the prompt.
    top10: Vec<(u32, f32)>,
    greedy_tokens: Vec<u32>,
}

/// A file of answers: a list, or an object that says for which file they are.
#[derive(Deserialize)]
#[serde(untagged)]
enum Answers {
    Cases(Vec<Case>),
    Of { cases: Vec<Case> },
}

/// Where to compute.
struct Place {
    device: Device,
    activations: Activations,
    kernel_folder: Option<PathBuf>,
    bounds: Bounds,
}

impl Place {
    fn open(&self, path: &Path) -> OpenOptions {
        let options = OpenOptions::new(path).device(self.device).activations(self.activations);
        match &self.kernel_folder {
            Some(folder) => options.kernel_folder(folder),
            None => options,
        }
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let cuda = |name: &str| -> Result<Device> {
        Ok(Device::Cuda(name.strip_prefix("cuda:").context("a device is cpu, half or cuda:N")?.parse()?))
    };
    let (device, activations, bounds) = match arguments.next().as_deref() {
        Some("cpu") => (Device::Cpu, Activations::Float, FULL),
        Some("half") => (Device::Cpu, Activations::Half, HALF),
        Some(name) => (cuda(name)?, Activations::Float, HALF),
        None => anyhow::bail!("golden DEVICE [KERNEL_FOLDER [MODEL ANSWERS]...]"),
    };
    let place = Place { device, activations, kernel_folder: arguments.next().map(PathBuf::from), bounds };
    let mut differing = tiny_checkpoints(&place)?;
    differing.extend(encoder(&place)?);
    while let Some(model) = arguments.next() {
        let answers = arguments.next().with_context(|| format!("which answers for {model}?"))?;
        differing.extend(answered(&place, Path::new(&model), Path::new(&answers))?);
    }
    ensure!(differing.is_empty(), "too far from transformers: {}", differing.join(", "));
    Ok(())
}

/// Names of those that differ too much; so below.
fn tiny_checkpoints(place: &Place) -> Result<Vec<String>> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(FIXTURES).with_context(|| format!("{FIXTURES} is not here"))? {
        let path = entry?.path();
        let golden = path.with_extension("").join("golden.json");
        // Encoders and adapters have other files.
        if fs::read(&golden).is_ok_and(|json| serde_json::from_slice::<Tokens>(&json).is_ok()) {
            paths.push(path);
        }
    }
    paths.sort();
    let mut differing = Vec::new();
    let (mut largest, mut refused) = (0.0, 0);
    for path in &paths {
        let golden = path.with_extension("");
        let Tokens { tokens } = serde_json::from_slice(&fs::read(golden.join("golden.json"))?)?;
        let wanted = floats(&fs::read(golden.join("golden.bin"))?);
        let columns = wanted.len() / tokens.len();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Of a file that says that it was made for fewer positions, those.
        let mut count = tokens.len();
        let opened = loop {
            let options = place.open(path).kv_dtype(KvDType::F32).context(count);
            match options.evaluator(count, &mut |_| {}) {
                Err(Error::ContextTooLong { trained, .. }) if trained < count => count = trained,
                opened => break opened,
            }
        };
        let mut model = match opened {
            // A GPU has not every operation.
            Err(error)
                if place.device != Device::Cpu && error.to_string().contains("is not available on") =>
            {
                println!("{name:<20} refused: {error}");
                refused += 1;
                continue;
            }
            opened => opened?,
        };
        let mut by_position = Vec::new();
        model.logits(&tokens[..count], false, &mut |position, row| {
            let wanted = log_softmax(&wanted[position * columns..][..columns]);
            let differences =
                log_softmax(&row[..columns]).into_iter().zip(wanted).map(|(a, b)| (a - b).abs());
            by_position.push(differences.fold(0.0, f64::max));
            ControlFlow::Continue(())
        })?;
        by_position.sort_by(f64::total_cmp);
        let mut worst = by_position.pop().context("a checkpoint without tokens")?;
        let is_wild = WILD.iter().any(|wild| name.starts_with(wild));
        let bound = if is_wild { place.bounds.wild } else { place.bounds.tiny };
        let mut note = String::new();
        // A choice of experts is a jump: where two are nearly as good, two positions of a model may have the other.
        let experts = fs::read_to_string(golden.join("config.json"))?.contains("_experts\":");
        for _ in 0..JUMPS {
            if worst > bound && experts {
                note += &format!(", but for one where other experts are chosen: {worst:.1e}");
                worst = by_position.pop().unwrap_or(0.0);
            }
        }
        println!("{name:<20} {worst:.1e} over {count} positions{note}");
        largest = worst.max(largest);
        if worst > bound {
            differing.push(name);
        }
    }
    let computed = paths.len() - refused;
    println!(
        "{computed} tiny checkpoints: log-probabilities differ by at most {largest:.1e}; {refused} are refused by name"
    );
    ensure!(computed > 0, "no checkpoint in {FIXTURES}");
    Ok(differing)
}

fn encoder(place: &Place) -> Result<Vec<String>> {
    let golden = Path::new(FIXTURES).join("bert");
    let Texts { texts } = serde_json::from_slice(&fs::read(golden.join("golden.json"))?)?;
    let values = floats(&fs::read(golden.join("golden.bin"))?);
    // The mean, which the folder's pooling is, and the first, by turns.
    let columns = values.len() / (2 * texts.len());
    let model = place.open(&golden).parallel(4).open()?;
    let ours = model.embed(&texts, &mut |_| ControlFlow::Continue(()))?;
    let wanted = values.chunks_exact(columns).step_by(2).flatten();
    let differences = ours.iter().flatten().zip(wanted).map(|(a, b)| (a - b).abs());
    let worst = differences.fold(0.0, f32::max);
    println!("bert, {} texts: vectors differ by at most {worst:.1e}", texts.len());
    Ok(if worst > place.bounds.vector { vec!["bert".to_owned()] } else { Vec::new() })
}

fn answered(place: &Place, path: &Path, answers: &Path) -> Result<Vec<String>> {
    let answers = serde_json::from_slice(&fs::read(answers)?)
        .with_context(|| format!("{} holds no answers", answers.display()))?;
    let (Answers::Cases(cases) | Answers::Of { cases }) = answers;
    let model = place.open(path).context(2048).parallel(4).open()?;
    let mut differing = Vec::new();
    let (mut equal, mut tokens, mut of_prompts, mut of_likeliest) = (0, 0, 0f32, 0f32);
    for case in &cases {
        let completion = model.generate(&Request {
            sampling: Sampling { top_logprobs: Some(10), ..Sampling::greedy() },
            max_tokens: Some(case.greedy_tokens.len()),
            ignore_eos: true,
            prompt_logprobs: Some(1),
            ..Request::tokens(case.prompt_tokens.clone())
        })?;
        let pairs = || completion.tokens.iter().zip(&case.greedy_tokens);
        let same = pairs().take_while(|(a, b)| a == b).count();
        // Behind a difference the texts are two.
        let margin = match (completion.logprobs.get(same), case.greedy_tokens.get(same)) {
            (Some(ours), Some(&theirs)) => likeliest(ours, &[(theirs, ours.top[0].1)]),
            _ => 0.0,
        };
        ensure!(
            completion.prompt_logprobs.len() == case.prompt_logprobs.len(),
            "{}: other positions",
            case.name
        );
        let told = completion.prompt_logprobs.iter().map(|(_, opinion)| opinion.logprob);
        let prompt = told
            .zip(&case.prompt_logprobs)
            .map(|(ours, theirs)| ours.map_or(f32::INFINITY, |ours| (ours - theirs).abs()))
            .fold(0.0, f32::max);
        let first = completion.logprobs.first().context("no log-probabilities")?;
        let likeliest = likeliest(first, &case.top10);
        if same < case.greedy_tokens.len() {
            println!("{}: token {same} is another, and {margin:.4} likelier", case.name);
        }
        if margin.max(prompt).max(likeliest) > REAL {
            differing.push(case.name.clone());
        }
        equal += same;
        tokens += case.greedy_tokens.len();
        of_prompts = of_prompts.max(prompt);
        of_likeliest = of_likeliest.max(likeliest);
    }
    println!(
        "{} on {}: {equal} of {tokens} greedy tokens equal up to the first that is another; log-probabilities of prompts differ by at most {of_prompts:.4}, of the likeliest by {of_likeliest:.4}",
        path.file_name().unwrap_or_default().to_string_lossy(),
        model.device()
    );
    Ok(differing)
}

/// How far the likeliest tokens are from what they should be. The tenth may be another where it is nearly as likely.
fn likeliest(ours: &Opinion, wanted: &[(u32, f32)]) -> f32 {
    let least = ours.top.last().map_or(f32::INFINITY, |&(_, logprob)| logprob);
    let difference = |&(token, theirs): &(u32, f32)| {
        let ours = ours.top.iter().find(|&&(found, _)| found == token);
        ours.map_or((theirs - least).max(0.0), |&(_, ours)| (ours - theirs).abs())
    };
    wanted.iter().map(difference).fold(0.0, f32::max)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = row.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
    row.iter().map(|&logit| f64::from(logit) - max - sum.ln()).collect()
}
