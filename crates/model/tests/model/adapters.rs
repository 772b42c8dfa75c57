//! Low-rank adapters against PEFT (`tests/fixtures/make_adapters.py` makes them), alone and mixed in one batch.

use fornax_compute::cpu::{Cpu, CpuOptions, CpuSizes};
use fornax_compute::{Counting, KvDType, KvSpec, Memory, Need};
use fornax_format::{AdapterFiles, Checkpoint};
use fornax_model::{Adapter, AdapterRoom, Config, Limits, load_with, measure_with};

use crate::fixture::{Container, Golden, folder, open, open_hugging_face};
use crate::golden::BOUND;
use crate::refusals::Floats;
use crate::rig::{Mode, Rig, Room, Share, distance};

const CASES: [(&str, &str); 6] = [
    ("llama-qv", "llama"),
    ("llama-all", "llama"),
    ("qwen2-all", "qwen2"),
    ("phi3-fused", "phi3"),
    ("olmo2-all", "olmo2"),
    ("qwen35-some", "qwen35"),
];

pub(crate) fn adapter(name: &str) -> Adapter {
    Adapter::new(name, AdapterFiles::open(&folder().join("adapters").join(name)).unwrap()).unwrap()
}

/// What PEFT computes with it: beside the weights, and merged into them.
fn golden(name: &str, file: &str, rows: usize) -> Vec<Vec<f32>> {
    let bytes = std::fs::read(folder().join("adapters").join(name).join(file)).unwrap();
    let logit = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    bytes.chunks_exact(bytes.len() / rows).map(|row| row.chunks_exact(4).map(logit).collect()).collect()
}

fn rig(base: &str, container: Container, adapters: &[Adapter], sequences: usize) -> (Rig, Golden) {
    let (checkpoint, golden) = (open(base, container), Golden::read(base));
    let config = Config::read(&checkpoint).unwrap();
    let context = golden.tokens.len();
    let room = Room { tokens_max: sequences * context, sequences, context };
    (Rig::with_adapters(&checkpoint, &config, adapters, Mode::float(), room).unwrap(), golden)
}

/// Logits of one sequence in a slot, in chunks.
fn logits(rig: &mut Rig, slot: usize, adapter: Option<u32>, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let chunks = tokens.chunks(chunk).enumerate();
    let step = |(index, tokens)| rig.step_by(&[Share { slot, start: index * chunk, tokens }], vec![adapter]);
    chunks.flat_map(step).collect()
}

#[test]
fn every_adapter_computes_what_peft_does_beside_the_weights_and_merged_into_them() {
    for (name, base) in CASES {
        for container in [Container::HuggingFace, Container::Gguf] {
            let (mut rig, plain) = rig(base, container, &[adapter(name)], 1);
            for chunk in [plain.tokens.len(), 7] {
                let got = logits(&mut rig, 0, Some(0), &plain.tokens, chunk);
                for file in ["golden.bin", "merged.bin"] {
                    let error = distance(&got, &golden(name, file, plain.tokens.len()));
                    assert!(error <= BOUND, "{name} {container:?} {file} chunks of {chunk}: {error:e}");
                }
                // And it changes something, by far more than the bound.
                assert!(distance(&got, &plain.logits) > 1000.0 * BOUND, "{name}");
            }
            let without = logits(&mut rig, 0, None, &plain.tokens, 16);
            assert!(distance(&without, &plain.logits) <= BOUND, "{name} {container:?} without it");
        }
    }
}

#[test]
fn rows_of_different_adapters_and_of_none_share_a_step_and_no_bit() {
    let adapters = [adapter("llama-qv"), adapter("llama-all")];
    let (mut rig, plain) = rig("llama", Container::HuggingFace, &adapters, 4);
    let chosen = [Some(1), None, Some(0), Some(1)];
    let tokens = &plain.tokens;
    let alone: Vec<_> =
        (0..4).map(|slot| logits(&mut rig, slot, chosen[slot], tokens, tokens.len())).collect();
    let mut together = vec![Vec::new(); 4];
    for (index, chunk) in tokens.chunks(16).enumerate() {
        // In another order in each step.
        let order: Vec<usize> = (0..4).map(|at| (at + index) % 4).collect();
        let share = |&slot: &usize| Share { slot, start: 16 * index, tokens: chunk };
        let shares: Vec<Share<'_>> = order.iter().map(share).collect();
        let rows = rig.step_by(&shares, order.iter().map(|&slot| chosen[slot]).collect());
        for (rows, slot) in rows.chunks(chunk.len()).zip(order) {
            together[slot].extend_from_slice(rows);
        }
    }
    assert_eq!(alone, together);
    for (slot, name) in [(0, "llama-all"), (2, "llama-qv"), (3, "llama-all")] {
        assert!(distance(&together[slot], &golden(name, "golden.bin", tokens.len())) <= BOUND, "{name}");
    }
    assert!(distance(&together[1], &plain.logits) <= BOUND);
}

#[test]
fn the_plan_counts_an_adapters_bytes() {
    let (checkpoint, adapters) = (open("llama", Container::Gguf), [adapter("llama-all")]);
    let config = Config::read(&checkpoint).unwrap();
    let room = Room { tokens_max: 48, sequences: 3, context: 100 };
    let counted = |adapters: &[Adapter]| {
        let rig = Rig::with_adapters(&checkpoint, &config, adapters, Mode::float(), room).unwrap();
        let counting = Counting::new(CpuSizes::new(rig.backend.options()));
        let limits = Limits { tokens_max: 48, wanted_max: 48 };
        measure_with(&checkpoint, &config, adapters, &counting, limits).unwrap();
        let spec = KvSpec { groups: config.kv_groups(1 + 3 * 4), dtype: KvDType::F32 };
        counting.alloc_kv(&spec).unwrap();
        assert_eq!(counting.usage(), rig.backend.usage());
        counting.usage().total()
    };
    // Two layers of 64 wide, rank 3: seven matrices down and up, of 64 and 32 columns, four bytes each.
    let values = 3 * (7 * 64 + 4 * 64 + 2 * 32 + 64);
    let more = counted(&adapters) - counted(&[]);
    assert!((4 * 2 * values..8 * 2 * values).contains(&more), "{more}, at least {}", 4 * 2 * values);
}

#[test]
fn the_plan_counts_the_room_of_adapters_that_come_later_and_they_take_no_more() {
    let checkpoint = open("llama", Container::Gguf);
    let mut config = Config::read(&checkpoint).unwrap();
    let counted = |config: &Config| {
        let options = CpuOptions { threads: 1, tokens_max: 48, slots: 3, ..CpuOptions::default() };
        let counting = Counting::new(CpuSizes::new(&options));
        let limits = Limits { tokens_max: 48, wanted_max: 48 };
        measure_with(&checkpoint, config, &[], &counting, limits).unwrap();
        let backend = Cpu::new(options).unwrap();
        let mut model = load_with(&checkpoint, config, &[], &backend, limits, &mut |_, _| {}).unwrap();
        let empty = backend.usage().total();
        if config.adapter_room.adapters > 0 {
            for place in 0..2 {
                model.set_adapter(&backend, place, Some(&adapter("llama-all"))).unwrap();
            }
            // All matrices, of the largest rank: exactly the room for them.
            assert_eq!(backend.usage(), counting.usage());
            model.set_adapter(&backend, 0, None).unwrap();
            model.set_adapter(&backend, 1, None).unwrap();
        }
        assert_eq!(backend.usage().total(), empty, "what was unloaded is free");
        (counting.usage().total(), empty)
    };
    let (planned, loaded) = counted(&config);
    assert_eq!(planned, loaded);
    config.adapter_room = AdapterRoom { adapters: 2, rank: 3 };
    let (with_room, loaded) = counted(&config);
    assert_eq!(loaded, planned, "room is taken by what comes");
    assert!(with_room > planned);
}

#[test]
fn an_adapter_that_is_not_for_this_model_is_refused_by_name_and_numbers() {
    let check = |checkpoint: Checkpoint, name: &str, floats: Floats, words: &[&str]| {
        let config = Config::read(&checkpoint).unwrap();
        let limits = Limits { tokens_max: 8, wanted_max: 2 };
        let refused =
            measure_with(&checkpoint, &config, &[adapter(name)], &Counting::new(floats), limits).unwrap_err();
        for words in words {
            assert!(refused.to_string().contains(words), "{refused} does not say {words}");
        }
    };
    let both = |base, name, words: &[&str]| {
        check(open(base, Container::HuggingFace), name, Floats(&[]), words);
        check(open(base, Container::Gguf), name, Floats(&[]), words);
    };
    both(
        "llama-bias",
        "llama-qv",
        &["adapter \"llama-qv\"", "layers.0.self_attn.q_proj.lora_B", "[64, 4]", "[96, 4]"],
    );
    both("phi3", "llama-all", &["mlp.gate_proj", "phi3", "self_attn.qkv_proj"]);
    both("mixtral", "llama-all", &["mlp.", "self_attn.q_proj"]);
    both("gpt2", "llama-qv", &["q_proj", "gpt2"]);
    let named = open_hugging_face("llama", |config| config["_name_or_path"] = "tiny/other".into(), |_| {});
    check(named, "llama-qv", Floats(&[]), &["trained on \"tiny/llama\"", "this model is \"tiny/other\""]);
    let lacking = "low-rank adapters is not available on floats";
    check(open("llama", Container::Gguf), "llama-qv", Floats(&[Need::LowRank]), &[lacking]);
}
