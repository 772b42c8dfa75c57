//! A request's tokens and log-probabilities are the same bits alone, among others, after a prefix hit, before and after
//! preemption, for every chunk size, and with and without drafts: on a real backend with real (tiny) models, in both
//! activation modes.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::{path::Path, sync::Arc, time::Duration};

use fornax_compute::{
    KvDType, KvSpec, Memory, PAGE_TOKENS, Sampling,
    cpu::{Activations, Cpu, CpuOptions},
};
use fornax_engine::{
    DraftStats, Engine, EngineOptions, Event, Handle, Local, LocalParts, QueueLimits, Reply, Request,
    Speculation, Stats, StepLimits, Turn, look_up,
};
use fornax_format::Checkpoint;
use fornax_model::{Config, Limits};

const CONTEXT: usize = 200;

/// What varies between two runs that must agree.
#[derive(Clone, Copy, Debug)]
struct Setting {
    fixture: &'static str,
    activations: Activations,
    kv: KvDType,
    tokens_max: usize,
    slots: usize,
    pages: usize,
    threads: usize,
}

impl Setting {
    fn engine(&self, speculation: Speculation) -> (Engine, Handle) {
        self.engine_of(self.runner(), speculation)
    }

    fn engine_of(&self, runner: Local<Cpu>, speculation: Speculation) -> (Engine, Handle) {
        let options = EngineOptions {
            queue: QueueLimits { requests_max: 100, tokens_max: 10_000 },
            speculation,
            ..EngineOptions::new(CONTEXT, Arc::new(|| Duration::ZERO))
        };
        Engine::new(Box::new(runner), options)
    }

    fn runner(&self) -> Local<Cpu> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(self.fixture);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let config = Config::read(&checkpoint).unwrap();
        let backend = Cpu::new(CpuOptions {
            threads: self.threads,
            activations: self.activations,
            tokens_max: self.tokens_max,
            slots: self.slots,
            depth: 0,
            ..CpuOptions::default()
        })
        .unwrap();
        let wanted_max = self.slots + self.tokens_max.min(16);
        let limits = Limits { tokens_max: self.tokens_max, wanted_max };
        let model = fornax_model::load(&checkpoint, &config, &backend, limits, &mut |_, _| {}).unwrap();
        let groups = config.kv_groups(self.pages);
        let kv = backend.alloc_kv(&KvSpec { groups: groups.clone(), dtype: self.kv }).unwrap();
        Local::new(LocalParts {
            backend,
            model,
            kv,
            groups,
            limits: StepLimits { tokens_max: self.tokens_max, wanted_max, slots: self.slots },
            depth: 0,
            vocab: u32::try_from(config.vocab).unwrap(),
        })
    }
}

/// Requests that share prefixes, cross pages, and sample at a temperature.
fn requests() -> Vec<Request> {
    let story: Vec<u32> = (0..150).map(|i| (i * 37 + 11) % 97).collect();
    [(20, 40, 0.0), (70, 30, 0.8), (70, 50, 0.0), (101, 33, 1.0), (150, 40, 0.7), (3, 90, 0.9)]
        .into_iter()
        .zip(1..)
        .map(|((prompt, max_tokens, temperature), seed)| {
            let sampling = Sampling {
                temperature,
                top_p: 0.95,
                repetition_penalty: 1.1,
                top_logprobs: Some(2),
                ..Sampling::greedy()
            };
            // Half of them tell their prompt's log-probabilities and so take nothing from the cache.
            let prompt_logprobs = (seed % 2 == 0).then_some(1);
            Request { seed, prompt_logprobs, ..Request::new(story[..prompt].to_vec(), max_tokens, sampling) }
        })
        .chain([1, 33, 140].map(|prompt| {
            let request = Request::new(story[..prompt].to_vec(), 0, Sampling::greedy());
            Request { embeds: true, ..request }
        }))
        .collect()
}

/// Tokens of the prompt that were told, then the answer's, each with the bits of its log-probability; or the places of
/// an embedding with the bits of its values.
type Answer = Vec<(u32, u32)>;

fn drain(engine: &mut Engine, mut replies: Vec<Reply>) -> Vec<Answer> {
    while engine.turn() == Turn::Worked {}
    replies
        .iter_mut()
        .map(|reply| {
            let events: Vec<Event> = std::iter::from_fn(|| reply.recv()).collect();
            assert!(matches!(events.last(), Some(Event::End { .. })), "{events:?}");
            let bits = |event: &Event| match event {
                Event::Scored { token, logprob, .. } => vec![(*token, logprob.to_bits())],
                Event::Token { token, logprob, .. } => vec![(*token, logprob.unwrap().to_bits())],
                Event::Embedding(values) => (0..).zip(values.iter().map(|value| value.to_bits())).collect(),
                _ => Vec::new(),
            };
            events.iter().flat_map(bits).collect()
        })
        .collect()
}

/// Each request in an engine of its own.
fn alone(setting: &Setting) -> Vec<Answer> {
    let answer = |request: Request| {
        let (mut engine, handle) = setting.engine(Speculation::Off);
        let replies = handle.submit(request).unwrap();
        drain(&mut engine, replies).remove(0)
    };
    requests().into_iter().map(answer).collect()
}

/// All requests at once, twice: the second round finds prefixes of the first.
fn together(setting: &Setting, wanted: &[Answer], what: &str) -> Stats {
    together_drafting(setting, wanted, what, Speculation::Off)
}

fn together_drafting(setting: &Setting, wanted: &[Answer], what: &str, speculation: Speculation) -> Stats {
    twice(setting.engine(speculation), setting, wanted, what)
}

/// All requests at once, while another model drafts.
fn together_drafted_by(setting: &Setting, drafter: &Setting, wanted: &[Answer], what: &str) -> DraftStats {
    let runner = setting.runner().with_drafter(Box::new(drafter.runner()));
    let engine = setting.engine_of(runner, Speculation::AlwaysByModel);
    let drafts = twice(engine, setting, wanted, what).draft_model.unwrap();
    assert_eq!(drafts.failed, None);
    drafts
}

fn twice((mut engine, handle): (Engine, Handle), setting: &Setting, wanted: &[Answer], what: &str) -> Stats {
    for round in ["first", "second"] {
        let replies = requests().into_iter().flat_map(|request| handle.submit(request).unwrap()).collect();
        let answers = drain(&mut engine, replies);
        for (index, (answer, wanted)) in answers.iter().zip(wanted).enumerate() {
            assert_eq!(answer, wanted, "request {index}, {round} round, {what}: {setting:?}");
        }
    }
    engine.assert_consistent();
    let stats = handle.stats();
    assert!(stats.pages.iter().all(|pages| pages.referenced == 0));
    assert!(stats.prefix_hits > 0, "the second round shares prefixes with the first");
    stats
}

/// All of them among others, 64 in all, in one step.
fn in_a_crowd(setting: &Setting, wanted: &[Answer]) {
    let setting = Setting { slots: 64, pages: 600, ..*setting };
    let (mut engine, handle) = setting.engine(Speculation::Off);
    let own = requests();
    let others = (0..64 - own.len() as u32).map(|other| {
        let prompt = (0..1 + other % 40).map(|at| (at * 13 + other * 7 + 5) % 97).collect();
        Request::new(prompt, 30, Sampling::greedy())
    });
    let mut replies = Vec::new();
    // The others come first and between.
    for (index, other) in others.enumerate() {
        let other = Request { sampling: Sampling { top_logprobs: Some(0), ..other.sampling }, ..other };
        replies.extend(handle.submit(other).unwrap().into_iter().map(|reply| (None, reply)));
        if let Some(request) = own.get(index) {
            replies.extend(
                handle.submit(request.clone()).unwrap().into_iter().map(|reply| (Some(index), reply)),
            );
        }
    }
    assert_eq!(replies.len(), 64);
    let (indices, replies): (Vec<Option<usize>>, Vec<Reply>) = replies.into_iter().unzip();
    let answers = drain(&mut engine, replies);
    for (index, answer) in indices.into_iter().zip(answers) {
        if let Some(index) = index {
            assert_eq!(answer, wanted[index], "request {index} among 63 others: {setting:?}");
        }
    }
}

/// Drafts from the answers themselves, every fifth token wrong: most drafts are right for a while.
fn mostly_right(wanted: &[Answer]) -> Speculation {
    let tokens = |answer: &Answer| answer.iter().map(|&(token, _)| token).collect::<Vec<u32>>();
    let whole: Vec<Vec<u32>> = requests()
        .into_iter()
        .zip(wanted)
        .map(|(request, answer)| {
            // The told part of the prompt lacks its first token.
            let told = if request.prompt_logprobs.is_some() { request.prompt.len() - 1 } else { 0 };
            [request.prompt, tokens(answer).split_off(told)].concat()
        })
        .collect();
    Speculation::Always(Box::new(move |tokens, count| {
        let own = whole.iter().find(|whole| whole.starts_with(tokens)).expect("one of the requests");
        let ahead = own[tokens.len()..].iter().take(count).enumerate();
        ahead
            .map(|(at, &token)| if (tokens.len() + at) % 5 == 4 { (token + 1) % 97 } else { token })
            .collect()
    }))
}

fn check(fixture: &'static str) {
    check_all(fixture, Keeps::Keys);
}

/// What a model's layers keep of a sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keeps {
    Keys,
    States,
    Both,
}

fn check_all(fixture: &'static str, keeps: Keeps) {
    for (activations, kv) in [(Activations::Integer, KvDType::F16), (Activations::Float, KvDType::F32)] {
        let base = Setting { fixture, activations, kv, tokens_max: 256, slots: 8, pages: 80, threads: 1 };
        let wanted = alone(&base);
        together(&base, &wanted, "whole prompts");
        in_a_crowd(&base, &wanted);
        together(&Setting { threads: 2, ..base }, &wanted, "two threads");
        for tokens_max in [1, 7, 32, 45] {
            together(&Setting { tokens_max, ..base }, &wanted, "chunks");
        }
        // A state cannot go back, so nothing is drafted where there is one.
        if keeps == Keeps::Both {
            in_few_pages(&base, &wanted);
        }
        // Where there are states alone a sequence has one however long it is, so nobody has to make room.
        if keeps != Keeps::Keys {
            continue;
        }
        let drafts = together_drafting(&base, &wanted, "drafts", mostly_right(&wanted));
        assert!(drafts.accepted_tokens > 100, "right drafts are accepted: {drafts:?}");
        assert!(drafts.drafted_tokens > drafts.accepted_tokens, "wrong ones are not: {drafts:?}");
        let repetitions = Speculation::Always(Box::new(look_up));
        together_drafting(&base, &wanted, "drafts from repetitions", repetitions);
        let narrow = Setting { pages: 9, slots: 6, ..base };
        together_drafting(&narrow, &wanted, "drafts in a pool for one", mostly_right(&wanted));
        let itself = together_drafted_by(&base, &base, &wanted, "drafts by itself");
        assert!(itself.drafted_tokens > 100, "{itself:?}");
        assert_eq!(itself.accepted_tokens, itself.drafted_tokens, "the same model says the same");
        // The same weights with other activations and in little room are often right, and sometimes not.
        let (activations, kv) = match activations {
            Activations::Float => (Activations::Integer, KvDType::Q8_0),
            _ => (Activations::Float, KvDType::F32),
        };
        let other = Setting { activations, kv, pages: 12, tokens_max: 20, ..base };
        let drafts = together_drafted_by(&base, &other, &wanted, "drafts by another");
        assert!(drafts.accepted_tokens > 50, "{drafts:?}");
        let drafts = together_drafted_by(&narrow, &other, &wanted, "drafts by another in a pool for one");
        assert!(drafts.accepted_tokens > 10, "{drafts:?}");
        in_few_pages(&base, &wanted);
    }
}

/// Where one request has to make room for another.
fn in_few_pages(base: &Setting, wanted: &[Answer]) {
    let narrow = Setting { pages: 9, slots: 6, ..*base };
    let stats = together(&narrow, wanted, "a pool for one");
    assert!(stats.preemptions > 0, "a pool this small must preempt");
    together(&Setting { tokens_max: 9, ..narrow }, wanted, "a pool for one, in chunks");
}

#[test]
fn a_llama_answers_with_the_same_bits_whatever_else_runs() {
    check("llama.gguf");
}

#[test]
fn a_qwen2_answers_with_the_same_bits_whatever_else_runs() {
    check("qwen2.gguf");
}

#[test]
fn a_windowed_mistral_answers_with_the_same_bits_whatever_else_runs() {
    check("mistral");
}

#[test]
fn a_gemma4_whose_layers_share_keys_answers_with_the_same_bits_whatever_else_runs() {
    check("gemma4-e.gguf");
}

#[test]
fn a_deepseek_of_latent_rows_answers_with_the_same_bits_whatever_else_runs() {
    check("deepseek-v3.gguf");
}

#[test]
fn a_llama4_of_chunks_answers_with_the_same_bits_whatever_else_runs() {
    check("llama4");
}

#[test]
fn a_qwen35_whose_layers_keep_states_answers_with_the_same_bits_whatever_else_runs() {
    check_all("qwen35", Keeps::Both);
}

#[test]
fn an_lfm2_of_short_convolutions_answers_with_the_same_bits_whatever_else_runs() {
    check_all("lfm2.gguf", Keeps::Both);
}

#[test]
fn a_granite_of_selective_scans_and_experts_answers_with_the_same_bits_whatever_else_runs() {
    check_all("granite-hybrid.gguf", Keeps::Both);
}

#[test]
fn a_nemotron_of_layers_that_are_one_branch_alone_answers_with_the_same_bits_whatever_else_runs() {
    check_all("nemotron-h-latent.gguf", Keeps::Both);
}

#[test]
fn a_jamba_whose_channels_decay_value_by_value_answers_with_the_same_bits_whatever_else_runs() {
    check_all("jamba.gguf", Keeps::Both);
}

#[test]
fn a_mamba2_without_attention_answers_with_the_same_bits_whatever_else_runs() {
    check_all("mamba2.gguf", Keeps::States);
}

#[test]
fn answers_to_one_prompt_over_states_are_those_of_requests_with_their_seeds() {
    const CHOICES: u32 = 3;
    // How the engine keeps the random numbers of choices apart.
    let seed_of = |choice: u64| 5u64.wrapping_add(choice.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    for fixture in ["qwen35", "lfm2.gguf", "mamba2.gguf", "jamba.gguf", "nemotron-h.gguf"] {
        let (activations, kv) = (Activations::Integer, KvDType::F16);
        let base = Setting { fixture, activations, kv, tokens_max: 64, slots: 8, pages: 80, threads: 1 };
        let request = |seed: u64| {
            let prompt = (0..70).map(|at| (at * 37 + 11) % 97).collect();
            let sampling = Sampling { temperature: 0.9, top_logprobs: Some(0), ..Sampling::greedy() };
            Request { seed, ..Request::new(prompt, 40, sampling) }
        };
        let alone: Vec<Answer> = (0..u64::from(CHOICES))
            .map(|choice| {
                let (mut engine, handle) = base.engine(Speculation::Off);
                let replies = handle.submit(request(seed_of(choice))).unwrap();
                drain(&mut engine, replies).remove(0)
            })
            .collect();
        assert!(alone.iter().skip(1).all(|answer| *answer != alone[0]), "{fixture}: seeds choose");
        // With room for all, in a pool that holds one at a time, and from the cache.
        for setting in [base, Setting { pages: 6, slots: 3, ..base }, Setting { tokens_max: 7, ..base }] {
            let (mut engine, handle) = setting.engine(Speculation::Off);
            for round in ["first", "second"] {
                let asked = Request { choices: CHOICES, ..request(seed_of(0)) };
                let replies = handle.submit(asked).unwrap();
                assert_eq!(drain(&mut engine, replies), alone, "{fixture}, {round} round: {setting:?}");
            }
            engine.assert_consistent();
        }
    }
}

#[test]
fn a_turn_of_a_conversation_computes_no_more_than_a_page_beyond_what_is_new() {
    const ANSWER: usize = 47;
    const SAID: u32 = 10;
    for fixture in ["llama.gguf", "qwen35", "lfm2.gguf", "mamba2.gguf", "jamba.gguf"] {
        let (activations, kv) = (Activations::Integer, KvDType::F16);
        let setting = Setting { fixture, activations, kv, tokens_max: 64, slots: 3, pages: 60, threads: 1 };
        let (mut engine, handle) = setting.engine(Speculation::Off);
        let said = |count: u32, agent: u32| (0..count).map(move |at| (at * 37 + agent * 5 + 11) % 97);
        let mut talks: Vec<Vec<u32>> = (0..3).map(|agent| said(38 - agent, agent).collect()).collect();
        let mut known = [0; 3];
        for turn in 0..3 {
            let submit = |talk: &Vec<u32>| {
                handle.submit(Request::new(talk.clone(), ANSWER, Sampling::greedy())).unwrap().remove(0)
            };
            let mut replies: Vec<Reply> = talks.iter().map(submit).collect();
            while engine.turn() == Turn::Worked {}
            for (agent, (reply, talk)) in (0..).zip(replies.iter_mut().zip(&mut talks)) {
                let known = &mut known[agent as usize];
                let prompt = talk.len();
                let mut cached = 0;
                while let Some(event) = reply.recv() {
                    match event {
                        Event::Started { cached_tokens, .. } => cached = cached_tokens,
                        Event::Token { token, .. } => talk.push(token),
                        Event::End { .. } => {}
                        other => panic!("{other:?}"),
                    }
                }
                assert_eq!(talk.len(), prompt + ANSWER, "{fixture}");
                let (computed, new) = (prompt - cached, prompt - *known);
                assert!(
                    computed <= new + PAGE_TOKENS,
                    "{fixture}: turn {turn} computed {computed} of {prompt} tokens, {new} of them new"
                );
                *known = talk.len();
                talk.extend(said(SAID, agent + 7));
            }
        }
        engine.assert_consistent();
    }
}
