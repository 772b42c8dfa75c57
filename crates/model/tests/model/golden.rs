//! Logits of the tiny checkpoints against those of transformers in float32.

use fornax_compute::cpu::{Activations, CpuSizes, Simd};
use fornax_compute::{Counting, KvDType, KvSpec, Memory, PAGE_TOKENS};
use fornax_model::{Config, Limits, load, measure};

use crate::fixture::{ALL, Container, Golden, open, open_gguf, open_hugging_face, position};
use crate::rig::{Mode, Rig, Room, Share, distance, logits};

/// The most that a log-probability may differ at any position, with float activations and f32 keys and values.
pub(crate) const BOUND: f64 = 1e-3;

fn room(golden: &Golden, sequences: usize) -> Room {
    let context = golden.tokens.len();
    Room { tokens_max: sequences * context, sequences, context }
}

fn rig(case: &str, container: Container, mode: Mode, sequences: usize) -> (Rig, Golden) {
    let checkpoint = open(case, container);
    let golden = Golden::read(case);
    let config = Config::read(&checkpoint).unwrap();
    (Rig::new(&checkpoint, &config, mode, room(&golden, sequences)).unwrap(), golden)
}

#[test]
fn every_position_agrees_in_one_chunk_and_in_several() {
    let mut wrong = Vec::new();
    for (case, container) in ALL {
        for simd in Simd::present() {
            let mode = Mode { simd, ..Mode::float() };
            let (mut rig, golden) = rig(case, *container, mode, 1);
            assert!(golden.tokens.len() > 2 * PAGE_TOKENS);
            for chunk in [golden.tokens.len(), PAGE_TOKENS, 7, 1] {
                let error = distance(&logits(&mut rig, &golden.tokens, chunk), &golden.logits);
                if error > BOUND {
                    wrong.push(format!("{case} {container:?} {simd:?} chunks of {chunk}: {error:e}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn chunks_change_no_bit() {
    for (case, container) in ALL {
        let (mut rig, golden) = rig(case, *container, Mode::float(), 1);
        let whole = logits(&mut rig, &golden.tokens, golden.tokens.len());
        for chunk in [PAGE_TOKENS, 7, 1] {
            assert_eq!(
                whole,
                logits(&mut rig, &golden.tokens, chunk),
                "{case} {container:?} chunks of {chunk}"
            );
        }
    }
}

#[test]
fn a_sequence_among_others_is_what_it_is_alone() {
    let hybrids = [
        "qwen35",
        "qwen3next",
        "lfm2",
        "granite-hybrid",
        "granite-hybrid-dense",
        "mamba2",
        "nemotron-h",
        "nemotron-h-moe",
        "nemotron-h-latent",
        "jamba",
        "falcon-mamba",
        "falcon-h1",
    ];
    let others = [
        "llama",
        "llama-bias",
        "qwen2-window",
        "mixtral",
        "qwen2moe",
        "qwen2moe-dense",
        "gpt-oss",
        "glm4-moe",
    ];
    let gemmas =
        ["gemma4", "gemma4-e", "gemma4-experts", "deepseek-v2-lite", "deepseek-v3", "mistral4", "llama4"];
    for case in others.into_iter().chain(hybrids).chain(gemmas) {
        let (mut rig, golden) = rig(case, Container::HuggingFace, Mode::float(), 2);
        let alone = logits(&mut rig, &golden.tokens, 16);
        // The second sequence has the tokens in reverse and runs ahead, so positions and lengths differ.
        let other: Vec<u32> = golden.tokens.iter().rev().copied().collect();
        rig.step(&[Share { slot: 1, start: 0, tokens: &other[..9] }]);
        let mut together = Vec::new();
        for (index, tokens) in golden.tokens.chunks(16).enumerate() {
            let start = 9 + 10 * index;
            let shares = [
                Share { slot: 1, start, tokens: &other[start..start + 10] },
                Share { slot: 0, start: 16 * index, tokens },
            ];
            together.extend(rig.step(&shares).split_off(10));
        }
        assert_eq!(alone, together, "{case}");
        assert!(distance(&together, &golden.logits) <= BOUND, "{case}");
    }
}

#[test]
fn half_precision_keys_and_values_cost_their_missing_bits() {
    // Spread weights make attention sharp, so the tiny checkpoints feel a key's last bits: 3.3e-2 was the most seen
    // with F16, and BF16 has three bits less.
    let mut wrong = Vec::new();
    for (kv, bound) in [(KvDType::F16, 5e-2), (KvDType::BF16, 4e-1)] {
        for (case, container) in ALL {
            // A router jumps: where two experts are almost as good, a key's last bits choose another one.
            if Config::read(&open(case, *container)).unwrap().mixture().is_some() {
                continue;
            }
            let (mut rig, golden) = rig(case, *container, Mode { kv, ..Mode::float() }, 1);
            // Norms make queries and keys larger: of one it has seven layers, of the others scaled embeddings or
            // several heads.
            let bound = match *case {
                "gemma3" => 6.0 * bound,
                "gemma" => 2.0 * bound,
                _ => bound,
            };
            let error = distance(&logits(&mut rig, &golden.tokens, PAGE_TOKENS), &golden.logits);
            if error > bound {
                wrong.push(format!("{case} {container:?} {kv}: {error:e}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn counting_a_load_gives_what_the_load_allocates() {
    for (case, container) in ALL {
        let checkpoint = open(case, *container);
        let config = Config::read(&checkpoint).unwrap();
        let room = Room { tokens_max: 48, sequences: 3, context: 100 };
        let rig = Rig::new(&checkpoint, &config, Mode::float(), room).unwrap();

        let counting = Counting::new(CpuSizes::new(rig.backend.options()));
        measure(&checkpoint, &config, &counting, Limits { tokens_max: 48, wanted_max: 48 }).unwrap();
        let spec = KvSpec { groups: config.kv_groups(1 + 3 * 4), dtype: KvDType::F32 };
        counting.alloc_kv(&spec).unwrap();
        assert_eq!(counting.usage(), rig.backend.usage(), "{case} {container:?}");
    }
}

#[test]
fn dropping_a_model_gives_all_its_memory_back() {
    let checkpoint = open("llama-bias", Container::Gguf);
    let config = Config::read(&checkpoint).unwrap();
    let backend = fornax_compute::cpu::Cpu::reference(Activations::Float).unwrap();
    let before = backend.usage();
    let limits = Limits { tokens_max: 8, wanted_max: 1 };
    let model = load(&checkpoint, &config, &backend, limits, &mut |_, _| {}).unwrap();
    assert!(backend.usage().total() > before.total());
    drop(model);
    assert_eq!(backend.usage(), before);
}

#[test]
fn progress_counts_every_byte_of_weights_once() {
    for (case, container) in ALL {
        let checkpoint = open(case, *container);
        let config = Config::read(&checkpoint).unwrap();
        let backend = fornax_compute::cpu::Cpu::reference(Activations::Float).unwrap();
        let mut reports = Vec::new();
        let limits = Limits { tokens_max: 8, wanted_max: 1 };
        let progress = &mut |done, total| reports.push((done, total));
        load(&checkpoint, &config, &backend, limits, progress).unwrap();
        let (done, total) = *reports.last().unwrap();
        assert_eq!(done, total, "{case} {container:?}");
        assert_eq!(reports[0], (0, total));
        assert!(reports.is_sorted());
    }
}

#[test]
fn dense_first_layers_may_be_counted_instead_of_listed() {
    let counted = |json: &mut serde_json::Value| {
        json["mlp_only_layers"] = serde_json::json!([]);
        json["first_k_dense_replace"] = serde_json::json!(1);
    };
    let checkpoint = open_hugging_face("qwen2moe-dense", counted, |_| {});
    let golden = Golden::read("qwen2moe-dense");
    let config = Config::read(&checkpoint).unwrap();
    let mut rig = Rig::new(&checkpoint, &config, Mode::float(), room(&golden, 1)).unwrap();
    let error = distance(&logits(&mut rig, &golden.tokens, golden.tokens.len()), &golden.logits);
    assert!(error <= BOUND, "{error:e}");
}

#[test]
fn a_shared_experts_router_may_be_stored_as_a_vector() {
    // What llama.cpp's own writer makes of a matrix of one row, and the bytes that are missing in another key.
    let checkpoint = open_gguf("qwen2moe", |bytes| {
        for layer in [0, 1] {
            let name = format!("blk.{layer}.ffn_gate_inp_shexp.weight");
            let dims = position(bytes, name.as_bytes()) + name.len();
            assert_eq!(bytes[dims..dims + 4], 2_u32.to_le_bytes());
            bytes[dims] = 1;
            bytes.drain(dims + 12..dims + 20);
        }
        let pairs = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
        bytes[16..24].copy_from_slice(&(pairs + 1).to_le_bytes());
        let pair = [&3_u64.to_le_bytes()[..], b"pad", &7_u32.to_le_bytes(), &[1]].concat();
        bytes.splice(24..24, pair);
    });
    let golden = Golden::read("qwen2moe");
    let config = Config::read(&checkpoint).unwrap();
    let mut rig = Rig::new(&checkpoint, &config, Mode::float(), room(&golden, 1)).unwrap();
    let error = distance(&logits(&mut rig, &golden.tokens, golden.tokens.len()), &golden.logits);
    assert!(error <= BOUND, "{error:e}");
}
