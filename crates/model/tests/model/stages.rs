//! A model in parts: the rows that one leaves are what the next reads, and nothing else changes.

use fornax_compute::cpu::{Cpu, CpuOptions};
use fornax_compute::{Backend, Batch, KvSpec, Memory, PAGE_TOKENS, PageId, Row, RowState, Token};
use fornax_format::Checkpoint;
use fornax_model::{Config, Limits, Stage, load_stage};

use crate::fixture::Container::{self, Gguf, HuggingFace};
use crate::fixture::{Golden, open, open_gguf, rename};
use crate::rig::{Mode, Rig, Room, logits};

/// Logits of all tokens, each stage on a backend of its own with its own keys and values, fed in two steps.
fn in_stages(checkpoint: &Checkpoint, config: &Config, stages: &[Stage], tokens: &[u32]) -> Vec<Vec<f32>> {
    let limits = Limits { tokens_max: tokens.len(), wanted_max: tokens.len() };
    let mode = Mode::float();
    let options = CpuOptions {
        threads: 2,
        activations: mode.activations,
        simd: mode.simd,
        tokens_max: tokens.len(),
        slots: 1,
        ..CpuOptions::default()
    };
    let pages = tokens.len().div_ceil(PAGE_TOKENS);
    let mut loaded: Vec<_> = stages
        .iter()
        .map(|stage| {
            let backend = Cpu::new(options.clone()).unwrap();
            let model = load_stage(checkpoint, config, stage, &[], &backend, limits, &mut |_, _| {}).unwrap();
            let groups = config.stage_kv_groups(stage, 2 + pages);
            let kv = backend.alloc_kv(&KvSpec { groups, dtype: mode.kv }).unwrap();
            (backend, model, kv)
        })
        .collect();
    let table: Vec<PageId> = (1..=pages).map(|page| PageId(u32::try_from(page).unwrap())).collect();
    let (states, groups): (Vec<_>, Vec<_>) =
        config.kv_groups(0).into_iter().partition(|group| group.kind.is_state());
    let mut all = Vec::new();
    for tokens in tokens.chunks(50) {
        let (start, len) = (u32::try_from(all.len()).unwrap(), u32::try_from(tokens.len()).unwrap());
        let mut batch = Batch::default();
        let row = Row { slot: 0, start, len, pages: vec![table.clone(); groups.len()], wanted: len };
        batch.push(row, tokens.iter().map(|token| Token::Known(*token)));
        if !states.is_empty() {
            let state = RowState { from: (start > 0).then_some(PageId(1)), to: PageId(1), saves: vec![] };
            batch.states = vec![vec![state; states.len()]];
        }
        let mut handed: Option<Vec<f32>> = None;
        for (backend, model, kv) in &mut loaded {
            let step = backend.begin(&batch).unwrap();
            if let Some(rows) = handed {
                backend.write(model.residual(), 0, &rows).unwrap();
            }
            model.forward(backend, kv, &step).unwrap();
            handed = Some(backend.read(model.residual(), 0, tokens.len()).unwrap());
            backend.finish(step).unwrap();
        }
        let (backend, model, _) = loaded.last().unwrap();
        let rows = backend.read(model.logits(), 0, tokens.len()).unwrap();
        all.extend(rows.chunks_exact(config.vocab).map(<[f32]>::to_vec));
    }
    all
}

fn check(case: &str, container: Container, before: &[usize]) {
    let checkpoint = open(case, container);
    let config = Config::read(&checkpoint).unwrap();
    let tokens = Golden::read(case).tokens;
    let room = Room { tokens_max: tokens.len(), sequences: 1, context: tokens.len() };
    let mut rig = Rig::new(&checkpoint, &config, Mode::float(), room).unwrap();
    let whole = logits(&mut rig, &tokens, tokens.len());
    let stages = Stage::cut(&config, before).unwrap();
    assert_eq!(stages.len(), before.len() + 1);
    assert_eq!(in_stages(&checkpoint, &config, &stages, &tokens), whole, "{case} {container:?} {before:?}");
}

#[test]
fn a_model_in_stages_gives_the_bits_of_the_whole() {
    check("llama", Gguf, &[1]);
    // Tied: the last stage has the embedding as its head.
    check("llama-bias", HuggingFace, &[1]);
    // Groups of keys and values that a stage has no layer of.
    check("qwen2-window", HuggingFace, &[1]);
    check("gemma3", Gguf, &[2, 5]);
    // Feed-forwards of other kinds and widths on either side.
    check("qwen2moe-dense", HuggingFace, &[1]);
    check("qwen3moe-sparse", HuggingFace, &[3]);
    check("gpt2", HuggingFace, &[1]);
    // States that a stage has no layer of, and none but states.
    check("qwen35", Gguf, &[1, 2]);
    check("lfm2", HuggingFace, &[1]);
    check("granite-hybrid", Gguf, &[1, 2]);
    check("nemotron-h", HuggingFace, &[1, 3]);
    check("nemotron-h-latent", Gguf, &[1, 2]);
    check("jamba", Gguf, &[1, 3]);
}

#[test]
fn a_stage_demands_its_own_tensors_and_no_others() {
    // A tensor of the second layer is gone: the first stage does without it. One under an unknown name is known to
    // nobody.
    let without = open_gguf("llama", |bytes| rename(bytes, "blk.1.ffn_up.weight", "blk.0.ffn_up.weigh_"));
    let config = Config::read(&open("llama", Gguf)).unwrap();
    let limits = Limits { tokens_max: 8, wanted_max: 8 };
    let backend = Cpu::new(CpuOptions::default()).unwrap();
    let refusal = |checkpoint: &Checkpoint, stage: &Stage| {
        let loaded = load_stage(checkpoint, &config, stage, &[], &backend, limits, &mut |_, _| {});
        loaded.err().map(|error| error.to_string())
    };
    let stages = Stage::cut(&config, &[1]).unwrap();
    let said = refusal(&without, &stages[0]).unwrap();
    assert!(said.contains("\"blk.0.ffn_up.weigh_\" has no place"), "{said}");
    let said = refusal(&without, &stages[1]).unwrap();
    assert!(said.contains("\"blk.1.ffn_up.weight\" is missing"), "{said}");
    // The bytes that are loaded are those of the stage.
    let checkpoint = open("llama", Gguf);
    let bytes = |stage: &Stage| {
        let mut total = 0;
        load_stage(&checkpoint, &config, stage, &[], &backend, limits, &mut |_, all| total = all).unwrap();
        total
    };
    let parts: Vec<u64> = stages.iter().map(bytes).collect();
    assert_eq!(parts.iter().sum::<u64>(), bytes(&Stage::whole(&config)));
    assert!(parts.iter().all(|part| *part > 0));
}

#[test]
fn cuts_that_leave_a_stage_without_layers_are_refused() {
    let config = Config::read(&open("gemma3", Gguf)).unwrap();
    for before in [&[0][..], &[7], &[3, 3], &[4, 2], &[9]] {
        let said = Stage::cut(&config, before).unwrap_err().to_string();
        assert!(said.contains("supported: ascending layers from 1 to 6"), "{said}");
    }
    assert_eq!(Stage::cut(&config, &[]).unwrap(), [Stage::whole(&config)]);
    let checkpoint = open("bert", HuggingFace);
    let config = Config::read(&checkpoint).unwrap();
    let stage = Stage { heads: false, ..Stage::whole(&config) };
    let backend = Cpu::new(CpuOptions::default()).unwrap();
    let limits = Limits { tokens_max: 8, wanted_max: 8 };
    let refused = load_stage(&checkpoint, &config, &stage, &[], &backend, limits, &mut |_, _| {});
    assert!(refused.err().unwrap().to_string().contains("a part of an encoder"));
}
