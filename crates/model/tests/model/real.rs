//! Real models against what transformers computes of them in float32 (`tests/golden`), in both activation modes.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use fornax_compute::KvDType;
use fornax_compute::cpu::{Activations, Simd};
use fornax_format::Checkpoint;
use fornax_model::Config;
use serde::Deserialize;
use serde_json::Value;

use crate::rig::{Mode, Rig, Room, Share, log_softmax};

/// One prompt and what follows from it.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt_tokens: Vec<u32>,
    /// Of token i + 1 after token i.
    prompt_logprobs: Vec<f64>,
    /// (token, log-probability) after the prompt.
    top10: Vec<(u32, f64)>,
    greedy_tokens: Vec<u32>,
    /// First minus second logit at each step.
    greedy_margins: Vec<f64>,
}

/// How far an activation mode may be from float32.
struct Bounds {
    logprob: f64,
    /// Log-probabilities below this are not compared.
    floor: f64,
    /// Greedy tokens are compared up to the first step with a smaller margin.
    margin: f64,
}

const FLOAT: Bounds = Bounds { logprob: 0.02, floor: f64::NEG_INFINITY, margin: 0.05 };
const INT8: Bounds = Bounds { logprob: 0.3, floor: -4.0, margin: 0.3 };

/// Bounded by the logits of a chunk: 128 rows of 152k values are 78 MB.
const CHUNK: usize = 128;

#[test]
fn smollm2_with_float_activations() {
    check("smollm2-q4_1.json", &smollm2(), Activations::Float, KvDType::F32, FLOAT);
}

#[test]
fn smollm2_with_int8_activations() {
    check("smollm2-q4_1.json", &smollm2(), Activations::Integer, KvDType::F16, INT8);
}

#[test]
fn qwen2_5_coder_with_float_activations() {
    let Some(model) = qwen("real::qwen2_5_coder_with_float_activations") else { return };
    check("qwen2.5-coder-0.5b-q4_k_m.json", &model, Activations::Float, KvDType::F32, FLOAT);
}

#[test]
fn qwen2_5_coder_with_int8_activations() {
    let Some(model) = qwen("real::qwen2_5_coder_with_int8_activations") else { return };
    check("qwen2.5-coder-0.5b-q4_k_m.json", &model, Activations::Integer, KvDType::F16, INT8);
}

fn check(golden: &str, model: &Path, activations: Activations, kv: KvDType, bounds: Bounds) {
    let cases = read_golden(golden);
    assert!(cases.len() >= 4);
    let context = cases.iter().map(|case| case.prompt_tokens.len() + case.greedy_tokens.len()).max().unwrap();
    let checkpoint = Checkpoint::open(model).unwrap();
    let config = Config::read(&checkpoint).unwrap();
    let room = Room { tokens_max: CHUNK, sequences: 1, context };
    let mode = Mode { simd: Simd::detect(), activations, kv };
    let mut rig = Rig::new(&checkpoint, &config, mode, room).unwrap();
    for case in cases {
        let worst = case.check(&mut rig, &bounds);
        println!("{golden} {} {activations:?} {kv}: at most {worst:.4} from float32", case.name);
    }
}

impl Case {
    /// Checks everything, and returns the largest difference of a log-probability.
    fn check(&self, rig: &mut Rig, bounds: &Bounds) -> f64 {
        let name = &self.name;
        let mut worst = 0.0_f64;
        let mut compare = |what: &str, ours: f64, theirs: f64| {
            let error = (ours - theirs).abs();
            if theirs > bounds.floor {
                assert!(error <= bounds.logprob, "{name}: {what}: {ours} against {theirs}");
                worst = worst.max(error);
            }
        };
        let mut last = Vec::new();
        for (index, tokens) in self.prompt_tokens.chunks(CHUNK).enumerate() {
            let start = index * CHUNK;
            for (offset, logits) in rig.step(&[Share { slot: 0, start, tokens }]).into_iter().enumerate() {
                let position = start + offset;
                if let Some(next) = self.prompt_tokens.get(position + 1) {
                    let ours = log_softmax(&logits)[*next as usize];
                    compare(&format!("after position {position}"), ours, self.prompt_logprobs[position]);
                }
                last = logits;
            }
        }
        let ours = log_softmax(&last);
        for (token, theirs) in &self.top10 {
            compare(&format!("token {token} after the prompt"), ours[*token as usize], *theirs);
        }
        // Steps whose margin is too small to demand a choice end the comparison: what follows may differ.
        let certain = self.greedy_margins.iter().take_while(|margin| **margin >= bounds.margin).count();
        for (step, theirs) in self.greedy_tokens[..certain].iter().enumerate() {
            assert_eq!(argmax(&last), *theirs, "{name}: greedy step {step}");
            let start = self.prompt_tokens.len() + step;
            last = rig.step(&[Share { slot: 0, start, tokens: &[*theirs] }]).remove(0);
        }
        worst
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
    u32::try_from(best).unwrap()
}

fn read_golden(file: &str) -> Vec<Case> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(file);
    let json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    // Some files say of which model they are, with the cases inside.
    let cases = json.get("cases").unwrap_or(&json).clone();
    serde_json::from_value(cases).unwrap()
}

/// The default model, without which the tests of a checkout say nothing.
fn smollm2() -> PathBuf {
    let path = cached("smollm2-135m-instruct-q4_1.gguf");
    assert!(path.is_file(), "{} is not there: run `cargo xtask fixtures`", path.display());
    path
}

fn qwen(test: &str) -> Option<PathBuf> {
    let path = cached("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf");
    if path.is_file() {
        return Some(path);
    }
    println!("SKIP {test}: {} is not there: run `cargo xtask fixtures --all`", path.display());
    None
}

/// Where `cargo xtask fixtures` puts a model.
pub(crate) fn cached(file: &str) -> PathBuf {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = variable("FORNAX_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("fornax")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/fornax")));
    cache.expect("FORNAX_CACHE, XDG_CACHE_HOME or HOME is set").join("models").join(file)
}
