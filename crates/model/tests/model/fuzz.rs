//! Adapters and whole models that somebody changed at random.

use std::fs;
use std::path::Path;

use fornax_compute::cpu::{Cpu, CpuOptions, CpuSizes};
use fornax_compute::landing::{Content, land};
use fornax_compute::{Counting, Memory as _, Part};
use fornax_format::{Checkpoint, Gguf};
use fornax_model::{Config, Limits, load, measure};
use serde_json::{Value, json};

use crate::fixture::folder;

#[path = "../../../../fuzz/src/adapter.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod adapter;
#[path = "../../../../fuzz/src/alter.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod alter;
#[path = "../../../../fuzz/src/mutate.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod mutate;

const WORDS: &[&[u8]] = &[
    b"\"r\": 0,",
    b"\"r\": 513,",
    b"\"r\": 4294967296,",
    b"\"lora_alpha\": 1e400,",
    b"\"lora_alpha\": -1,",
    b"null",
    b"{}",
    b"[]",
    b"\"dtype\":\"F64\"",
    b"\"dtype\":\"I8\"",
    b"\"shape\":[0,0]",
    b"\"shape\":[4294967296,4294967296]",
    b"\"shape\":[]",
    b"\"data_offsets\":[0,0]",
    b"\"data_offsets\":[18446744073709551615,0]",
    b"lora_A",
    b"lora_B",
    b"layers.99.",
    b"\xffFILE\xff",
    b"\x1b[2J",
    b"\"use_rslora\": true,",
    b"\"use_dora\": true,",
    b"\"peft_type\": \"IA3\",",
    b"self_attn.v_proj",
    b"mlp.up_proj",
];

#[test]
fn changed_adapters_are_taken_or_refused_in_a_line() {
    let scratch = tempfile::tempdir().unwrap();
    let bench = adapter::Bench::new(&folder().join("llama"), scratch.path().to_owned());
    let seeds = mutate::seeds("adapter");
    assert!(seeds.iter().any(|seed| bench.adapter(seed)), "one of them is for this model");
    mutate::cases("adapters", 4000, |mut random| bench.adapter(&mutate::changed(&mut random, &seeds, WORDS)));
}

/// Models in one file of GGUF or in a folder, of families that differ in what they read.
const MODELS: [&str; 14] = [
    "bert",
    "deepseek-v3",
    "falcon-h1",
    "gemma3",
    "gemma4-e",
    "glm4",
    "gpt-oss",
    "jamba",
    "llama",
    "mamba2",
    "mixtral",
    "modernbert",
    "qwen2moe",
    "yarn",
];

/// Folders with a matrix or several in each packed format.
const PACKED: [&str; 14] = [
    "awq",
    "awq_gemv",
    "awq_gemv_64",
    "bnb",
    "compressed",
    "fp8",
    "fp8_128",
    "gptq",
    "gptq_bits",
    "gptq_v2",
    "mlx",
    "modelopt",
    "mxfp4",
    "nvfp4",
];

/// What does not belong where it comes.
fn strange() -> Vec<Value> {
    let numbers = [json!(0), json!(1), json!(-1), json!(2), json!(3), json!(33), json!(65_536)];
    let far = [json!(u32::MAX), json!(u64::MAX), json!(i64::MIN), json!(1e308), json!(0.5), json!(-0.0)];
    let words = [
        "",
        "a",
        "F64",
        "F32",
        "BF16",
        "I8",
        "U8",
        "I64",
        "F8_E4M3",
        "gptq",
        "awq",
        "mlx",
        "fp8",
        "symmetric",
    ];
    let shapes =
        [json!([]), json!([0, 0]), json!([1, 1_u64 << 40]), json!([64, 64]), json!([0, 4]), json!({})];
    let lists = [json!(null), json!(true), json!(false), json!(["full_attention"]), json!([0, 1, 2])];
    let words = words.into_iter().map(Value::from);
    numbers.into_iter().chain(far).chain(shapes).chain(lists).chain(words).collect()
}

/// A folder of a model, its configuration and its weights changed at random.
struct Stranger {
    config: Value,
    /// The header of the weights, and what is behind it.
    header: Value,
    data: Vec<u8>,
}

impl Stranger {
    fn of(folder: &Path) -> Stranger {
        let weights = fs::read(folder.join("model.safetensors")).unwrap();
        let (length, rest) = weights.split_at(8);
        let length = usize::try_from(u64::from_le_bytes(length.try_into().unwrap())).unwrap();
        Stranger {
            config: serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap(),
            header: serde_json::from_slice(&rest[..length]).unwrap(),
            data: rest[length..].to_vec(),
        }
    }

    fn change(&self, random: &mut mutate::Random, strange: &[Value], folder: &Path) {
        let (mut config, mut header) = (self.config.clone(), self.header.clone());
        for _ in 0..=random.below(2) {
            match random.below(3) {
                0 => alter::alter(&mut header, random, strange),
                _ => alter::alter(&mut config, random, strange),
            }
        }
        let mut data = self.data.clone();
        if random.below(3) == 0 && !data.is_empty() {
            let at = random.below(data.len());
            data[at] ^= 1 << random.below(8);
            data.truncate(if random.below(8) == 0 { at } else { usize::MAX });
        }
        let header = header.to_string();
        let weights = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        fs::write(folder.join("model.safetensors"), weights).unwrap();
    }
}

/// Why it was refused is said in one line that no terminal obeys.
fn said(error: &dyn std::error::Error) -> bool {
    let message = error.to_string();
    assert!(!message.is_empty() && !message.contains(char::is_control), "{message:?}");
    false
}

/// Plans the model and, if it asks for little, loads it. Whether it can be had.
fn model(checkpoint: &Checkpoint, cpu: &Cpu) -> bool {
    let config = match Config::read(checkpoint) {
        Ok(config) => config,
        Err(error) => return said(&error),
    };
    let memory = Counting::new(CpuSizes::new(&options()));
    let limits = Limits { tokens_max: 8, wanted_max: 2 };
    match measure(checkpoint, &config, &memory, limits) {
        Ok(()) if memory.usage().total() < 64 << 20 => {}
        Ok(()) => return true,
        Err(error) => return said(&error),
    }
    match load(checkpoint, &config, cpu, limits, &mut |_, _| {}) {
        Ok(_) => true,
        Err(error) => said(&error),
    }
}

/// Expands every matrix. Whether all could be.
fn matrices(checkpoint: &Checkpoint) -> bool {
    let Checkpoint::HuggingFace(model) = checkpoint else { return false };
    model.weights().tensors().fold(true, |all, view| {
        let part = [Part::from(view)];
        let planned = land(&part, Content::Room, |parts| Ok(parts[0].view.bytes.len()));
        let landed = land(&part, Content::Values, |parts| Ok(parts[0].view.bytes.len()));
        match (planned, landed) {
            (Ok(planned), Ok(landed)) => {
                assert_eq!(planned, landed, "a plan says what is taken");
                all
            }
            (Err(error), Err(_)) => said(&error),
            (planned, landed) => panic!("planned {planned:?}, but {landed:?}"),
        }
    })
}

fn options() -> CpuOptions {
    CpuOptions { threads: 1, tokens_max: 8, slots: 1, ..CpuOptions::default() }
}

#[test]
fn changed_checkpoints_are_read_or_refused_in_a_line() {
    let scratch = tempfile::tempdir().unwrap();
    let packed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../compute/tests/packed");
    let read = |folder: &Path, names: &[&str]| -> Vec<Stranger> {
        names.iter().map(|name| Stranger::of(&folder.join(name))).collect()
    };
    let (models, packed) = (read(&folder(), &MODELS), read(&packed, &PACKED));
    let file = |name: &&str| fs::read(folder().join(format!("{name}.gguf"))).unwrap();
    let files: Vec<Vec<u8>> = MODELS.iter().map(file).collect();
    let (strange, cpu) = (strange(), Cpu::new(options()).unwrap());
    mutate::cases("checkpoints", 1500, |mut random| {
        let which = random.below(MODELS.len());
        if random.below(4) == 0 {
            // What changes is the header, in which everything is said.
            let file = &files[which];
            let (header, data) = file.split_at(file.len().min(4096));
            let changed = mutate::changed(&mut random, &[header.to_vec()], &[]);
            return match Gguf::from_bytes(vec![[changed, data.to_vec()].concat()]) {
                Ok(file) => model(&Checkpoint::Gguf(file), &cpu),
                Err(error) => said(&error),
            };
        }
        let is_packed = random.below(2) == 0;
        let stranger = if is_packed { &packed[which] } else { &models[which] };
        stranger.change(&mut random, &strange, scratch.path());
        match Checkpoint::open(scratch.path()) {
            Ok(checkpoint) if is_packed => matrices(&checkpoint),
            Ok(checkpoint) => model(&checkpoint, &cpu),
            Err(error) => said(&error),
        }
    });
}
