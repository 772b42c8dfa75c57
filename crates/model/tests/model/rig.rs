//! A model on the CPU backend with pages for some sequences, fed step by step.

use std::ops::Range;

use fornax_compute::cpu::{Activations, Cpu, CpuOptions, Kv, Simd};
use fornax_compute::{
    Backend, Batch, GivenRows, KvDType, KvGroup, KvSpec, Memory, PAGE_TOKENS, PageId, Row, RowState, Token,
};
use fornax_format::Checkpoint;
use fornax_model::{Adapter, Config, Error, Limits, Model, load_with};

/// What the numbers depend on beside the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mode {
    pub(crate) simd: Simd,
    pub(crate) activations: Activations,
    pub(crate) kv: KvDType,
}

impl Mode {
    /// What the tightest bound is for.
    pub(crate) fn float() -> Mode {
        Mode { simd: Simd::detect(), activations: Activations::Float, kv: KvDType::F32 }
    }
}

/// How large the steps and the cache are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) tokens_max: usize,
    pub(crate) sequences: usize,
    pub(crate) context: usize,
}

pub(crate) struct Rig {
    pub(crate) backend: Cpu,
    model: Box<dyn Model<Cpu>>,
    kv: Kv,
    groups: Vec<KvGroup>,
    vocab: usize,
    room: Room,
}

/// A prompt with rows in place of some of its tokens.
#[derive(Clone)]
pub(crate) struct Seen {
    pub(crate) tokens: Vec<Token>,
    pub(crate) given: GivenRows,
    /// Where each of them is.
    pub(crate) sections: Vec<Vec<u32>>,
    /// The last position that each sees; empty where none sees what is behind it.
    pub(crate) lasts: Vec<u32>,
}

/// One sequence's share of a step, all of whose positions want logits.
pub(crate) struct Share<'a> {
    pub(crate) slot: usize,
    pub(crate) start: usize,
    pub(crate) tokens: &'a [u32],
}

impl Rig {
    pub(crate) fn new(
        checkpoint: &Checkpoint,
        config: &Config,
        mode: Mode,
        room: Room,
    ) -> Result<Rig, Error> {
        Rig::with_adapters(checkpoint, config, &[], mode, room)
    }

    pub(crate) fn with_adapters(
        checkpoint: &Checkpoint,
        config: &Config,
        adapters: &[Adapter],
        mode: Mode,
        room: Room,
    ) -> Result<Rig, Error> {
        let options = CpuOptions {
            threads: 2,
            activations: mode.activations,
            simd: mode.simd,
            tokens_max: room.tokens_max,
            slots: room.sequences,
            ..CpuOptions::default()
        };
        let backend = Cpu::new(options)?;
        let limits = Limits { tokens_max: room.tokens_max, wanted_max: room.tokens_max };
        let model = load_with(checkpoint, config, adapters, &backend, limits, &mut |_, _| {})?;
        let groups = config.kv_groups(1 + room.sequences * room.context.div_ceil(PAGE_TOKENS));
        let kv = backend.alloc_kv(&KvSpec { groups: groups.clone(), dtype: mode.kv })?;
        Ok(Rig { backend, model, kv, groups, vocab: config.vocab, room })
    }

    /// Logits of every token of the step, (tokens, vocab).
    pub(crate) fn step(&mut self, shares: &[Share<'_>]) -> Vec<Vec<f32>> {
        self.step_by(shares, Vec::new())
    }

    /// The same with an adapter for each share, or none for any.
    pub(crate) fn step_by(&mut self, shares: &[Share<'_>], adapters: Vec<Option<u32>>) -> Vec<Vec<f32>> {
        let mut batch = Batch { adapters, ..Batch::default() };
        for share in shares {
            if self.groups.iter().any(|group| group.kind.is_state()) {
                batch.states.push(self.states(share));
            }
            let len = u32::try_from(share.tokens.len()).unwrap();
            let row = Row {
                slot: u32::try_from(share.slot).unwrap(),
                start: u32::try_from(share.start).unwrap(),
                len,
                pages: self.paged().map(|group| self.pages(group, share)).collect(),
                wanted: len,
            };
            batch.push(row, share.tokens.iter().map(|token| Token::Known(*token)));
        }
        let step = self.backend.begin(&batch).unwrap();
        self.model.forward(&self.backend, &mut self.kv, &step).unwrap();
        let logits = self.backend.read(self.model.logits(), 0, batch.wanted()).unwrap();
        self.backend.finish(step).unwrap();
        logits.chunks_exact(self.vocab).map(<[f32]>::to_vec).collect()
    }

    /// Logits of a part of what is shown.
    pub(crate) fn show(&mut self, slot: usize, part: Range<usize>, seen: &Seen) -> Vec<Vec<f32>> {
        self.show_with((slot, part), seen, &[])
    }

    /// The same of the first sequence, with a text of another one behind it.
    pub(crate) fn show_beside(&mut self, part: Range<usize>, seen: &Seen, text: &[u32]) -> Vec<Vec<f32>> {
        self.show_with((0, part), seen, text)
    }

    fn show_with(&mut self, (slot, part): (usize, Range<usize>), seen: &Seen, text: &[u32]) -> Vec<Vec<f32>> {
        let mut batch = Batch { given: seen.given.clone(), ..Batch::default() };
        let placeholders = vec![0; part.len()];
        let shares = [
            Share { slot, start: part.start, tokens: &placeholders },
            Share { slot: slot + 1, start: 0, tokens: text },
        ];
        for share in shares.iter().filter(|share| !share.tokens.is_empty()) {
            if self.groups.iter().any(|group| group.kind.is_state()) {
                batch.states.push(self.states(share));
            }
            let len = u32::try_from(share.tokens.len()).unwrap();
            let row = Row {
                slot: u32::try_from(share.slot).unwrap(),
                start: u32::try_from(share.start).unwrap(),
                len,
                pages: self.paged().map(|group| self.pages(group, share)).collect(),
                wanted: len,
            };
            batch.push(row, share.tokens.iter().map(|token| Token::Known(*token)));
        }
        batch.tokens[..part.len()].copy_from_slice(&seen.tokens[part.clone()]);
        let behind = batch.positions.split_off(part.len());
        let section = |at: usize| [&seen.sections[at][part.clone()], &behind].concat();
        (batch.positions, batch.sections) = (section(0), (1..seen.sections.len()).map(section).collect());
        if !seen.lasts.is_empty() {
            batch.lasts =
                [&seen.lasts[part], &(0..u32::try_from(text.len()).unwrap()).collect::<Vec<_>>()].concat();
        }
        let step = self.backend.begin(&batch).unwrap();
        self.model.forward(&self.backend, &mut self.kv, &step).unwrap();
        let logits = self.backend.read(self.model.logits(), 0, batch.wanted()).unwrap();
        self.backend.finish(step).unwrap();
        logits.chunks_exact(self.vocab).map(<[f32]>::to_vec).collect()
    }

    /// An encoder's embeddings of whole sequences.
    pub(crate) fn embed(&mut self, shares: &[Share<'_>]) -> Vec<Vec<f32>> {
        self.embed_pairs(shares, &[])
    }

    /// The same of pairs, where the second texts begin at `seconds`.
    pub(crate) fn embed_pairs(&mut self, shares: &[Share<'_>], seconds: &[usize]) -> Vec<Vec<f32>> {
        let mut batch = Batch::default();
        for (at, share) in shares.iter().enumerate() {
            let first = batch.positions.len();
            let len = u32::try_from(share.tokens.len()).unwrap();
            let pages = self.groups.iter().map(|group| self.pages(group, share)).collect();
            let row = Row { slot: u32::try_from(share.slot).unwrap(), start: 0, len, pages, wanted: 1 };
            batch.push(row, share.tokens.iter().map(|token| Token::Known(*token)));
            if let Some(second) = seconds.get(at) {
                let shift = self.model.pairs().expect("a model that reads pairs");
                batch.positions[first + second..].iter_mut().for_each(|position| *position += shift);
            }
        }
        let step = self.backend.begin(&batch).unwrap();
        self.model.forward(&self.backend, &mut self.kv, &step).unwrap();
        let hidden = self.model.hidden(&self.backend, &step).unwrap();
        let rows = (0..shares.len()).map(|row| self.backend.read(hidden, row, 1).unwrap()).collect();
        self.backend.finish(step).unwrap();
        rows
    }

    fn paged(&self) -> impl Iterator<Item = &KvGroup> {
        self.groups.iter().filter(|group| !group.kind.is_state())
    }

    /// States of a sequence, which change their place with every step, as after a prefix hit.
    fn states(&self, share: &Share<'_>) -> Vec<RowState> {
        let place = |odd: usize| PageId(u32::try_from(1 + share.slot * 2 + odd).unwrap());
        let odd = share.start % 2;
        let from = (share.start > 0).then(|| place(odd));
        let to = place((share.start + share.tokens.len()) % 2);
        let states = self.groups.iter().filter(|group| group.kind.is_state());
        states.map(|_| RowState { from, to, saves: Vec::new() }).collect()
    }

    /// Pages of a sequence: neither in order nor next to each other, and none where the window has passed.
    fn pages(&self, group: &KvGroup, share: &Share<'_>) -> Vec<PageId> {
        let count = self.room.context.div_ceil(PAGE_TOKENS);
        let first_seen = group.window.map_or(0, |window| (share.start + 1).saturating_sub(window as usize));
        let page = |page: usize| {
            if (page + 1) * PAGE_TOKENS <= first_seen {
                return PageId::TRASH;
            }
            PageId(u32::try_from(1 + share.slot + self.room.sequences * (count - 1 - page)).unwrap())
        };
        (0..(share.start + share.tokens.len()).div_ceil(PAGE_TOKENS)).map(page).collect()
    }
}

/// Logits of all positions of one sequence, fed in chunks.
pub(crate) fn logits(rig: &mut Rig, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for tokens in tokens.chunks(chunk) {
        let start = all.len();
        all.extend(rig.step(&[Share { slot: 0, start, tokens }]));
    }
    all
}

/// Log-probabilities of one row of logits, in double precision.
pub(crate) fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().fold(f64::NEG_INFINITY, |largest, logit| largest.max(f64::from(*logit)));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    logits.iter().map(|logit| f64::from(*logit) - largest - sum.ln()).collect()
}

/// The largest difference of log-probabilities over all positions. NaN is infinitely far from everything.
pub(crate) fn distance(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let mut largest = 0.0_f64;
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in log_softmax(ours).iter().zip(log_softmax(theirs)) {
            let difference = (ours - theirs).abs();
            largest = if difference.is_nan() { f64::INFINITY } else { largest.max(difference) };
        }
    }
    largest
}
