//! What a model will take, from headers and flags alone.
//!
//! The model is loaded on the counting memory with the backend's own size functions, which are the ones it allocates
//! by: plan and allocation cannot drift. No byte of a weight is read.

use std::collections::BTreeMap;
use std::ops::Range;

use fornax_compute::landing::landing;
use fornax_compute::{
    Counting, Error as ComputeError, KvDType, KvGroup, KvKind, KvSpec, Memory, Need, PAGE_TOKENS, Part,
    Purpose, Sizes, Usage, WeightPlace,
};
use fornax_format::{Checkpoint, DType, View};
use fornax_model::{Adapter, AdapterRoom, Config, Error, Limits};

use crate::StepLimits;

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Tokens of one request; `None` is what the model was made for.
    pub context: Option<usize>,
    /// Requests computed at once.
    pub parallel: usize,
    /// How keys and values are stored.
    pub kv_dtype: KvDType,
    /// Tokens of one step.
    pub step_tokens: usize,
    /// Rows of logits in a step beyond one for each request.
    pub logit_rows: usize,
    /// Bytes that the process takes whatever the model: its code, stacks, tokenizer.
    pub runtime_bytes: u64,
    /// Bytes that may be used in all.
    pub limit_bytes: u64,
}

/// A model and the bytes that it takes, device by device.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Tokens of one request.
    pub context: usize,
    /// Tokens that the model was made for.
    pub context_trained: usize,
    /// Requests computed at once.
    pub parallel: usize,
    /// Bounds of one step.
    pub step: StepLimits,
    /// The KV pools. They hold a whole context for every request, or what the limit leaves, but at least one context.
    pub kv: KvSpec,
    /// Keys and values of one token over all layers.
    pub kv_token_bytes: u64,
    /// The weights as they are stored, by type.
    pub stored: Vec<Stored>,
    /// What each device takes, in the order of the layers; one today.
    pub devices: Vec<DevicePlan>,
    /// Why this build cannot compute the model, if it cannot. The plan is then made from the table of tensors and the
    /// metadata, with the activations of a dense decoder.
    pub unsupported: Option<String>,
}

/// Bytes of what a model has on one device, by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePlan {
    /// Bytes that the backend will allocate, by purpose.
    pub usage: Usage,
    /// Bytes of weights that lie in the host's memory, beside a device that has its own. They are no part of the
    /// device's.
    pub host_bytes: u64,
    /// Bytes of the process itself.
    pub runtime_bytes: u64,
    /// Bytes left for what nobody counts: the allocator's rounding, page tables, a neighbour that grows.
    pub margin_bytes: u64,
    /// Bytes that may be used in all.
    pub limit_bytes: u64,
}

impl DevicePlan {
    /// All bytes.
    pub fn total_bytes(&self) -> u64 {
        self.usage.total().saturating_add(self.runtime_bytes).saturating_add(self.margin_bytes)
    }

    /// Whether they may be used.
    pub fn fits(&self) -> bool {
        self.total_bytes() <= self.limit_bytes
    }
}

/// Tensors of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The type.
    pub dtype: DType,
    /// The type that they are computed in: another one where they are quantised on load, or have none of their own.
    pub computed: DType,
    /// How many there are.
    pub tensors: usize,
    /// Their values.
    pub values: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What would fit where a plan does not: each was verified by making its plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Remedy {
    /// What to change.
    pub change: Change,
    /// The plan with that change.
    pub plan: Plan,
}

/// A change of one thing that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The longest context at the same parallel.
    Context(usize),
    /// The most requests at the same context.
    Parallel(usize),
    /// The same model with its matrices in this type: the largest that fits.
    Quant(DType),
}

impl Plan {
    /// All bytes, of all devices.
    pub fn total_bytes(&self) -> u64 {
        self.sum(DevicePlan::total_bytes)
    }

    /// Whether every device may use its bytes.
    pub fn fits(&self) -> bool {
        self.devices.iter().all(DevicePlan::fits)
    }

    /// Bytes that all backends together will allocate, by purpose.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for device in &self.devices {
            Purpose::ALL.iter().for_each(|&purpose| usage.add(purpose, device.usage.bytes(purpose)));
        }
        usage
    }

    /// Bytes of the process itself.
    pub fn runtime_bytes(&self) -> u64 {
        self.sum(|device| device.runtime_bytes)
    }

    /// Bytes of weights in the host's memory, beside the devices'.
    pub fn host_bytes(&self) -> u64 {
        self.sum(|device| device.host_bytes)
    }

    /// Bytes left for what nobody counts.
    pub fn margin_bytes(&self) -> u64 {
        self.sum(|device| device.margin_bytes)
    }

    /// Bytes that may be used in all.
    pub fn limit_bytes(&self) -> u64 {
        self.sum(|device| device.limit_bytes)
    }

    fn sum(&self, bytes: impl Fn(&DevicePlan) -> u64) -> u64 {
        self.devices.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// How many states there are, what one takes over all layers, and how many tokens lie between two checkpoints of a
    /// sequence; `None` where no layer keeps one.
    pub fn states(&self) -> Option<(usize, u64, usize)> {
        let of = |group: &KvGroup| match group.kind {
            KvKind::State { every, .. } => Some((group.pages, group.page_bytes(self.kv.dtype), every)),
            KvKind::Pairs { .. } | KvKind::Latent { .. } => None,
        };
        let both =
            |a: (usize, u64, usize), b: (usize, u64, usize)| (a.0.min(b.0), a.1.saturating_add(b.1), a.2);
        self.kv.groups.iter().filter_map(of).reduce(both)
    }

    /// Tokens that the KV pool holds, of all requests together.
    pub fn pool_tokens(&self) -> usize {
        let paged = self.kv.groups.iter().filter(|group| !group.kind.is_state());
        let pages = paged.map(|group| group.pages.saturating_sub(1)).min();
        pages.unwrap_or(0).saturating_mul(PAGE_TOKENS)
    }

    /// Tokens that it would hold if every request had its whole context.
    pub fn pool_tokens_wanted(&self) -> usize {
        pages_for(self.context).saturating_mul(self.parallel).saturating_mul(PAGE_TOKENS)
    }
}

/// Makes plans of one model on one kind of device.
pub struct Planner<'a, F> {
    checkpoint: &'a Checkpoint,
    adapters: &'a [Adapter],
    subject: Subject,
    stored: Vec<Stored>,
    sizes: F,
}

/// What is known of the model.
enum Subject {
    Known(Box<Config>),
    /// This build cannot compute it.
    Outlined {
        outline: Outline,
        reason: String,
    },
}

/// The numbers of a decoder that decide its memory.
#[derive(Clone, Copy, Debug)]
struct Outline {
    layers: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    heads_kv: usize,
    head_dim: usize,
    vocab: usize,
    context: usize,
}

/// Types that the matrices of a model could have instead, the most precise first.
const QUANTS: [DType; 5] = [DType::BF16, DType::Q8_0, DType::Q6_K, DType::Q5_K, DType::Q4_K];

/// A shorter context than this helps nobody.
const CONTEXT_LEAST: usize = 4 * PAGE_TOKENS;

impl<'a, S: Sizes, F: Fn(StepLimits) -> S> Planner<'a, F> {
    /// A planner whose backend takes the bytes that `sizes` says for steps of some bounds. A damaged model is an error;
    /// one that this build cannot compute is planned all the same.
    pub fn new(checkpoint: &'a Checkpoint, sizes: F) -> Result<Self, Error> {
        let outlined = |error: Error| match Outline::read(checkpoint) {
            Ok(outline) => Ok(Subject::Outlined { outline, reason: error.to_string() }),
            // Its files do not even say how large it is: that it cannot be computed says more.
            Err(_) => Err(error),
        };
        let subject = match Config::read(checkpoint) {
            Ok(config) => {
                let tiny = StepLimits { tokens_max: 1, wanted_max: 1, slots: 1 };
                let limits = Limits { tokens_max: 1, wanted_max: 1 };
                match fornax_model::measure(checkpoint, &config, &Counting::new(sizes(tiny)), limits) {
                    Ok(()) => Subject::Known(Box::new(config)),
                    Err(error) if is_unsupported(&error) => outlined(error)?,
                    Err(error) => return Err(error),
                }
            }
            Err(error) if is_unsupported(&error) => outlined(error)?,
            Err(error) => return Err(error),
        };
        Ok(Planner { checkpoint, adapters: &[], subject, stored: stored(checkpoint), sizes })
    }

    /// The same for the model with adapters beside it; what cannot be had of them is refused.
    pub fn with_adapters(mut self, adapters: &'a [Adapter]) -> Result<Self, Error> {
        self.adapters = adapters;
        if let Subject::Known(config) = &self.subject {
            let sizes = (self.sizes)(StepLimits { tokens_max: 1, wanted_max: 1, slots: 1 });
            let limits = Limits { tokens_max: 1, wanted_max: 1 };
            fornax_model::measure_with(self.checkpoint, config, adapters, &Counting::new(sizes), limits)?;
        }
        Ok(self)
    }

    /// The same with room for adapters that come while the model is loaded.
    pub fn with_adapter_room(mut self, room: AdapterRoom) -> Result<Self, Error> {
        if let Subject::Known(config) = &mut self.subject {
            config.adapter_room = room;
            if room.adapters > 0 {
                (self.sizes)(StepLimits { tokens_max: 1, wanted_max: 1, slots: 1 })
                    .supports(Need::LowRank)?;
            }
        }
        Ok(self)
    }

    /// The same with the experts of some layers elsewhere than on the device; what the backend does not have is
    /// refused.
    pub fn with_experts_at(mut self, layers: Range<usize>, place: WeightPlace) -> Result<Self, Error> {
        if let Subject::Known(config) = &mut self.subject {
            config.place_experts(layers, place);
            let sizes = (self.sizes)(StepLimits { tokens_max: 1, wanted_max: 1, slots: 1 });
            config.needs().into_iter().try_for_each(|need| sizes.supports(need))?;
        }
        Ok(self)
    }

    /// The plan of what is asked for.
    pub fn plan(&self, ask: &Ask) -> Result<Plan, Error> {
        self.plan_as(ask, None)
    }

    /// What would fit in its place, one change at a time.
    pub fn remedies(&self, ask: &Ask) -> Result<Vec<Remedy>, Error> {
        let asked = self.plan(ask)?;
        let mut remedies = Vec::new();
        let fitting = |ask: Ask, quant| Ok::<_, Error>(Some(self.plan_as(&ask, quant)?).filter(Plan::fits));
        // From the least that helps to what was asked for, in whole pages.
        let context = |pages: usize| Ask { context: Some(pages * PAGE_TOKENS), ..*ask };
        let longest = largest(CONTEXT_LEAST / PAGE_TOKENS, asked.context / PAGE_TOKENS, |pages| {
            Ok(fitting(context(pages), None)?.is_some())
        })?;
        if let Some(pages) = longest
            && let Some(plan) = fitting(context(pages), None)?
        {
            remedies.push(Remedy { change: Change::Context(plan.context), plan });
        }
        let parallel = |parallel: usize| Ask { parallel, ..*ask };
        let most = largest(1, ask.parallel.saturating_sub(1), |requests| {
            Ok(fitting(parallel(requests), None)?.is_some())
        })?;
        if let Some(requests) = most
            && let Some(plan) = fitting(parallel(requests), None)?
        {
            remedies.push(Remedy { change: Change::Parallel(requests), plan });
        }
        for quant in QUANTS {
            let plan = self.plan_as(ask, Some(quant))?;
            let smaller = plan.usage().bytes(Purpose::Weights) < asked.usage().bytes(Purpose::Weights);
            if smaller && plan.fits() {
                remedies.push(Remedy { change: Change::Quant(quant), plan });
                break;
            }
        }
        Ok(remedies)
    }

    /// The plan with the matrices in another type.
    fn plan_as(&self, ask: &Ask, quant: Option<DType>) -> Result<Plan, Error> {
        let trained = self.trained();
        let context = ask.context.unwrap_or(trained);
        // An encoder computes a text whole in one step.
        let encodes = matches!(&self.subject, Subject::Known(config) if config.pooling.is_some());
        let tokens = if encodes { context } else { ask.step_tokens.min(context) };
        let step = StepLimits {
            tokens_max: tokens.max(ask.parallel),
            wanted_max: ask.parallel.saturating_add(ask.logit_rows),
            slots: ask.parallel,
        };
        let sizes = (self.sizes)(step);
        let mut kv = KvSpec { groups: self.groups(0, 0), dtype: ask.kv_dtype };
        sizes.keeps(&kv)?;
        let bytes_of = |states: bool| {
            let groups = kv.groups.iter().filter(|group| group.kind.is_state() == states);
            groups.map(|group| sizes.page_bytes(&kv, group)).fold(0, u64::saturating_add)
        };
        let (page_bytes, state_bytes) = (bytes_of(false), bytes_of(true));
        let (mut usage, host_bytes) = self.usage(Requantized { sizes: (self.sizes)(step), quant }, step)?;
        let margin_bytes = (ask.limit_bytes / 50).clamp(MARGIN_LEAST, MARGIN_MOST);
        let room = ask
            .limit_bytes
            .saturating_sub(usage.total())
            .saturating_sub(ask.runtime_bytes)
            .saturating_sub(margin_bytes);
        // One page of each group is the trash page.
        let least = pages_for(context).saturating_add(1);
        let wanted = pages_for(context).saturating_mul(ask.parallel).saturating_add(1);
        let spare = |bytes: u64| room.saturating_sub(bytes);
        // States come first, since without its own no request moves. Checkpoints share with keys and values what is
        // left.
        let states = States::of(&kv.groups, ask.parallel);
        let kept = spare(state_bytes.saturating_mul(states.least as u64));
        let share = states.share(page_bytes, state_bytes);
        let leaves = usize::try_from(kept / share.max(1)).unwrap_or(usize::MAX);
        let pages = leaves.min(wanted).max(least);
        let after_pages = spare(page_bytes.saturating_mul(pages as u64));
        let fitting = usize::try_from(after_pages / state_bytes.max(1)).unwrap_or(usize::MAX);
        let states = states.wanted(pages).min(fitting).max(states.least);
        kv.groups = self.groups(pages, states);
        // A backend may round up what a group takes.
        if sizes.kv_bytes(&kv) > room && leaves > least {
            kv.groups = self.groups(pages - 1, states);
        }
        usage.add(Purpose::Kv, sizes.kv_bytes(&kv));
        Ok(Plan {
            context,
            context_trained: trained,
            parallel: ask.parallel,
            step,
            kv,
            kv_token_bytes: page_bytes / PAGE_TOKENS as u64,
            stored: self.stored.clone(),
            devices: vec![DevicePlan {
                usage,
                host_bytes,
                runtime_bytes: ask.runtime_bytes,
                margin_bytes,
                limit_bytes: ask.limit_bytes,
            }],
            unsupported: match &self.subject {
                Subject::Known(_) => None,
                Subject::Outlined { reason, .. } => Some(reason.clone()),
            },
        })
    }

    /// Everything but keys and values, and the weights in the host's memory.
    fn usage(&self, sizes: Requantized<S>, step: StepLimits) -> Result<(Usage, u64), Error> {
        match &self.subject {
            Subject::Known(config) => {
                let counting = Counting::new(sizes);
                let limits = Limits { tokens_max: step.tokens_max, wanted_max: step.wanted_max };
                fornax_model::measure_with(self.checkpoint, config, self.adapters, &counting, limits)?;
                Ok((counting.usage(), counting.host_bytes()))
            }
            Subject::Outlined { outline, .. } => {
                let mut usage = outline.usage(&sizes, step);
                let bytes = tensors(self.checkpoint).iter().map(|view| sizes.stored_bytes(view)).sum();
                usage.add(Purpose::Weights, bytes);
                Ok((usage, 0))
            }
        }
    }

    fn trained(&self) -> usize {
        match &self.subject {
            Subject::Known(config) => config.context as usize,
            Subject::Outlined { outline, .. } => outline.context,
        }
    }

    /// The groups with so many pages, and so many states.
    fn groups(&self, pages: usize, states: usize) -> Vec<KvGroup> {
        match &self.subject {
            Subject::Known(config) => {
                let mut groups = config.kv_groups(pages);
                groups
                    .iter_mut()
                    .filter(|group| group.kind.is_state())
                    .for_each(|group| group.pages = states);
                groups
            }
            Subject::Outlined { outline, .. } => vec![KvGroup {
                layers: outline.layers,
                kind: KvKind::pairs(outline.heads_kv, outline.head_dim),
                window: None,
                pages,
            }],
        }
    }
}

/// How many states there should be.
struct States {
    /// The trash, one for each request, and one that somebody goes on from.
    least: usize,
    /// A checkpoint at the end of each prompt, and one at the end of each answer.
    ends: usize,
    /// Pages from one checkpoint to the next.
    every: usize,
}

impl States {
    /// Those of the groups, which all have the same distance between checkpoints.
    fn of(groups: &[KvGroup], parallel: usize) -> States {
        let every = groups.iter().find_map(|group| match group.kind {
            KvKind::State { every, .. } => Some(every / PAGE_TOKENS),
            KvKind::Pairs { .. } | KvKind::Latent { .. } => None,
        });
        let least = if every.is_some() { parallel.saturating_add(2) } else { 0 };
        States { least, ends: parallel.saturating_mul(2), every: every.unwrap_or(usize::MAX).max(1) }
    }

    /// What every prefix of this many pages can leave.
    fn wanted(&self, pages: usize) -> usize {
        self.least.saturating_add(self.ends).saturating_add(pages / self.every)
    }

    /// Bytes of a page with its share of a checkpoint.
    fn share(&self, page_bytes: u64, state_bytes: u64) -> u64 {
        page_bytes.saturating_add(state_bytes / self.every as u64)
    }
}

/// The margin is a fiftieth of the limit, between these.
const MARGIN_LEAST: u64 = 16 << 20;
const MARGIN_MOST: u64 = 512 << 20;

fn pages_for(context: usize) -> usize {
    context.div_ceil(PAGE_TOKENS)
}

/// The largest of `least..=most` that holds, where everything below a number that holds does too.
fn largest(
    least: usize,
    most: usize,
    mut holds: impl FnMut(usize) -> Result<bool, Error>,
) -> Result<Option<usize>, Error> {
    if least > most || !holds(least)? {
        return Ok(None);
    }
    let (mut yes, mut no) = (least, most + 1);
    while no - yes > 1 {
        let middle = yes + (no - yes) / 2;
        if holds(middle)? { yes = middle } else { no = middle }
    }
    Ok(Some(yes))
}

/// Whether the model is whole and only this build cannot compute it.
fn is_unsupported(error: &Error) -> bool {
    matches!(
        error,
        Error::Unsupported { .. }
            | Error::UnknownTensor { .. }
            | Error::Compute(ComputeError::DType { .. } | ComputeError::Unsupported { .. })
    )
}

fn tensors(checkpoint: &Checkpoint) -> Vec<View<'_>> {
    match checkpoint {
        Checkpoint::Gguf(gguf) => gguf.tensors().collect(),
        Checkpoint::HuggingFace(model) => model.weights().tensors().collect(),
    }
}

/// The tensors by type, the most bytes first.
fn stored(checkpoint: &Checkpoint) -> Vec<Stored> {
    let mut types = BTreeMap::new();
    for view in tensors(checkpoint) {
        let (dtype, computed) = (view.dtype, landing(&view));
        let new = Stored { dtype, computed, tensors: 0, values: 0, bytes: 0 };
        let entry = types.entry((dtype, computed)).or_insert(new);
        entry.tensors += 1;
        entry.values += view.values() as u64;
        entry.bytes += view.bytes.len() as u64;
    }
    let mut types: Vec<Stored> = types.into_values().collect();
    types.sort_by_key(|stored| std::cmp::Reverse(stored.bytes));
    types
}

/// A backend's sizes for a model whose matrices have another type.
struct Requantized<S> {
    sizes: S,
    quant: Option<DType>,
}

impl<S: Sizes> Requantized<S> {
    /// The matrix in the other type, where that is smaller. No byte of it is read: the smaller size is a part of the
    /// larger.
    fn smaller<'v>(&self, view: &View<'v>) -> Option<View<'v>> {
        let columns = *view.shape.last().filter(|_| view.shape.len() > 1)?;
        let dtype = stored_as(self.quant?, columns);
        let bytes = view.bytes.get(..dtype.bytes_for(view.values())?)?;
        (bytes.len() < view.bytes.len())
            .then(|| View::new(view.name, dtype, view.shape.clone(), bytes).ok())
            .flatten()
    }

    /// Bytes of a tensor as it is stored.
    fn stored_bytes(&self, view: &View<'_>) -> u64 {
        self.smaller(view).map_or(view.bytes.len(), |smaller| smaller.bytes.len()) as u64
    }
}

/// The type of a matrix that is meant to have type `quant`: where its rows do not fill the blocks, what llama.cpp uses.
pub fn stored_as(quant: DType, columns: usize) -> DType {
    let whole = |dtype: DType| columns.is_multiple_of(dtype.block_values());
    match quant {
        _ if whole(quant) => quant,
        DType::Q4_K if whole(DType::Q5_0) => DType::Q5_0,
        DType::Q5_K if whole(DType::Q5_1) => DType::Q5_1,
        DType::Q6_K if whole(DType::Q8_0) => DType::Q8_0,
        _ => DType::F16,
    }
}

impl<S: Sizes> Sizes for Requantized<S> {
    fn supports(&self, need: Need) -> Result<(), ComputeError> {
        self.sizes.supports(need)
    }

    fn keeps(&self, spec: &KvSpec) -> Result<(), ComputeError> {
        self.sizes.keeps(spec)
    }

    fn lies(&self, place: WeightPlace) -> WeightPlace {
        self.sizes.lies(place)
    }

    fn weight_bytes(&self, parts: &[Part<'_>]) -> Result<u64, ComputeError> {
        if self.quant.is_none() {
            return self.sizes.weight_bytes(parts);
        }
        let smaller = |part: &Part<'_>| -> u64 {
            let view = self.smaller(&part.view).unwrap_or_else(|| part.view.clone());
            // One part after the other, since each borrows for itself; rows are kept in number, whatever their order.
            self.sizes.weight_bytes(&[Part::from(view)]).unwrap_or(u64::MAX)
        };
        Ok(parts.iter().map(smaller).fold(0, u64::saturating_add))
    }

    fn table_bytes(&self, parts: &[Part<'_>], tied: bool) -> Result<u64, ComputeError> {
        if self.quant.is_none() { self.sizes.table_bytes(parts, tied) } else { self.weight_bytes(parts) }
    }

    fn experts_bytes(&self, parts: &[Part<'_>], experts: usize) -> Result<u64, ComputeError> {
        if self.quant.is_none() { self.sizes.experts_bytes(parts, experts) } else { self.weight_bytes(parts) }
    }

    fn vector_bytes(&self, parts: &[Part<'_>]) -> Result<u64, ComputeError> {
        self.sizes.vector_bytes(parts)
    }

    fn buf_bytes(&self, purpose: Purpose, rows: usize, columns: usize) -> u64 {
        self.sizes.buf_bytes(purpose, rows, columns)
    }

    fn page_bytes(&self, spec: &KvSpec, group: &KvGroup) -> u64 {
        self.sizes.page_bytes(spec, group)
    }

    fn kv_bytes(&self, spec: &KvSpec) -> u64 {
        self.sizes.kv_bytes(spec)
    }

    fn workspace_bytes(&self) -> u64 {
        self.sizes.workspace_bytes()
    }
}

impl Outline {
    /// Reads the numbers under the names that every decoder's files use.
    fn read(checkpoint: &Checkpoint) -> Result<Outline, Error> {
        let read = |gguf: &str, hugging_face: &str| number(checkpoint, gguf, hugging_face);
        let need = |gguf: &str, hugging_face: &str| {
            read(gguf, hugging_face).ok_or_else(|| {
                let key = if matches!(checkpoint, Checkpoint::Gguf(_)) { gguf } else { hugging_face };
                Error::MissingKey { key: key.to_owned() }
            })
        };
        let hidden = need("embedding_length", "hidden_size")?;
        let heads = need("attention.head_count", "num_attention_heads")?.max(1);
        let rows = |name: &str| Some(tensors(checkpoint).iter().find(|view| view.name == name)?.shape[0]);
        let vocab = match checkpoint {
            Checkpoint::Gguf(_) => rows("token_embd.weight"),
            Checkpoint::HuggingFace(_) => read("", "vocab_size"),
        };
        Ok(Outline {
            layers: need("block_count", "num_hidden_layers")?,
            hidden,
            // Experts that are computed together have their inner widths side by side.
            ffn: read("feed_forward_length", "intermediate_size")
                .unwrap_or(0)
                .saturating_mul(read("expert_used_count", "num_experts_per_tok").unwrap_or(1).max(1)),
            heads,
            heads_kv: read("attention.head_count_kv", "num_key_value_heads").unwrap_or(heads),
            head_dim: read("attention.key_length", "head_dim").unwrap_or(hidden / heads),
            vocab: vocab.unwrap_or(0),
            context: need("context_length", "max_position_embeddings")?,
        })
    }

    /// Activations, logits and workspace of a dense decoder of these sizes.
    fn usage<S: Sizes>(&self, sizes: &S, step: StepLimits) -> Usage {
        let mut usage = Usage::default();
        let heads = self.heads.saturating_add(self.heads_kv.saturating_mul(2));
        let columns = [
            self.hidden,
            heads.saturating_mul(self.head_dim),
            self.heads.saturating_mul(self.head_dim),
            self.ffn.saturating_mul(3),
        ];
        for columns in columns {
            let bytes = sizes.buf_bytes(Purpose::Activations, step.tokens_max, columns);
            usage.add(Purpose::Activations, bytes);
        }
        usage.add(Purpose::Residual, sizes.buf_bytes(Purpose::Residual, step.tokens_max, self.hidden));
        usage.add(Purpose::Logits, sizes.buf_bytes(Purpose::Logits, step.wanted_max, self.vocab));
        usage.add(Purpose::Workspace, sizes.workspace_bytes());
        usage
    }
}

/// A number of the metadata; of a list, which some files have by layer, the largest.
fn number(checkpoint: &Checkpoint, gguf: &str, hugging_face: &str) -> Option<usize> {
    let number = match checkpoint {
        Checkpoint::Gguf(file) => {
            let metadata = file.metadata();
            let architecture = metadata.opt_str("general.architecture").ok().flatten()?;
            let key = format!("{architecture}.{gguf}");
            match metadata.opt_u64(&key) {
                Ok(number) => number?,
                Err(_) => u64::from(*metadata.opt_u32s(&key).ok()??.iter().max()?),
            }
        }
        Checkpoint::HuggingFace(model) => model.config().get(hugging_face)?.as_u64()?,
    };
    usize::try_from(number).ok()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_largest_that_holds_is_found() {
        let check = |least, most, bound, wanted: Option<usize>| {
            let found = largest(least, most, |number| Ok(number <= bound)).unwrap();
            assert_eq!(found, wanted, "{least}..={most}, up to {bound}");
        };
        for bound in 3..=20 {
            check(3, 20, bound, Some(bound));
        }
        check(3, 20, 100, Some(20));
        check(3, 20, 2, None);
        check(5, 4, 100, None);
        check(1, 1, 1, Some(1));
    }

    #[test]
    fn a_plan_of_several_devices_fits_where_each_of_them_does() {
        let device = |weights, limit_bytes| {
            let mut usage = Usage::default();
            usage.add(Purpose::Weights, weights);
            DevicePlan { usage, host_bytes: 0, runtime_bytes: 3, margin_bytes: 2, limit_bytes }
        };
        let plan = |devices| Plan {
            context: 1,
            context_trained: 1,
            parallel: 1,
            step: StepLimits { tokens_max: 1, wanted_max: 1, slots: 1 },
            kv: KvSpec { groups: Vec::new(), dtype: KvDType::F16 },
            kv_token_bytes: 0,
            stored: Vec::new(),
            devices,
            unsupported: None,
        };
        let two = plan(vec![device(10, 15), device(20, 30)]);
        assert!(two.fits());
        assert_eq!((two.usage().bytes(Purpose::Weights), two.total_bytes(), two.limit_bytes()), (30, 40, 45));
        assert_eq!((two.runtime_bytes(), two.margin_bytes()), (6, 4));
        let uneven = plan(vec![device(11, 15), device(19, 30)]);
        assert_eq!((uneven.total_bytes(), uneven.limit_bytes()), (40, 45));
        assert!(!uneven.fits(), "room on one device is no room on the other");
    }

    /// A device beside the host, that takes experts from either memory and reads none from files.
    struct Beside;

    impl Sizes for Beside {
        fn weight_bytes(&self, parts: &[Part<'_>]) -> Result<u64, ComputeError> {
            Ok(parts.iter().map(|part| part.view.bytes.len() as u64).sum())
        }

        fn buf_bytes(&self, _: Purpose, rows: usize, columns: usize) -> u64 {
            (rows * columns * 4) as u64
        }

        fn workspace_bytes(&self) -> u64 {
            0
        }

        fn supports(&self, need: Need) -> Result<(), ComputeError> {
            if need != Need::FileWeights {
                return Ok(());
            }
            Err(ComputeError::Unsupported { what: need.to_string(), backend: "beside" })
        }
    }

    #[test]
    fn experts_in_the_hosts_memory_are_planned_beside_the_device() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
        let checkpoint = Checkpoint::open(&fixtures.join("mixtral.gguf")).unwrap();
        let ask = Ask {
            context: None,
            parallel: 1,
            kv_dtype: KvDType::F16,
            step_tokens: 32,
            logit_rows: 0,
            runtime_bytes: 0,
            limit_bytes: u64::MAX,
        };
        let planned = |layers: Range<usize>, place| {
            let planner = Planner::new(&checkpoint, |_| Beside).unwrap().with_experts_at(layers, place)?;
            let device = planner.plan(&ask)?.devices[0];
            Ok::<_, Error>((device.usage.bytes(Purpose::Weights), device.host_bytes))
        };
        let layers = Config::read(&checkpoint).unwrap().layers.len();
        let (all, none) = planned(0..layers, WeightPlace::Device).unwrap();
        assert_eq!(none, 0);
        let experts: u64 = tensors(&checkpoint)
            .iter()
            .filter(|view| view.name.contains("_exps."))
            .map(|view| view.bytes.len() as u64)
            .sum();
        assert!(0 < experts && experts < all);
        assert_eq!(planned(0..layers, WeightPlace::Host).unwrap(), (all - experts, experts));
        let (device, host) = planned(1..layers, WeightPlace::Host).unwrap();
        assert!(host < experts && device + host == all);
        let refused = planned(0..1, WeightPlace::File).unwrap_err();
        assert_eq!(refused.to_string(), "weights that stay in their file is not available on beside");
    }

    #[test]
    fn states_that_memory_does_not_hold_are_counted_before_anything_is_loaded() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
        let checkpoint = Checkpoint::open(&fixtures.join("qwen35.gguf")).unwrap();
        let planner = Planner::new(&checkpoint, |_| Beside).unwrap();
        let plan = |parallel, limit_bytes| {
            let ask = Ask {
                context: Some(128),
                parallel,
                kv_dtype: KvDType::F16,
                step_tokens: 16,
                logit_rows: 0,
                runtime_bytes: 0,
                limit_bytes,
            };
            planner.plan(&ask).unwrap()
        };
        let limit = 64 << 20;
        let few = plan(4, limit);
        let (states, bytes, _) = few.states().unwrap();
        // The trash, one for each request and one to go on from; ends of prompts and of answers, and what lies between.
        assert!(few.fits() && states >= 4 + 2 + 8, "{states} states");
        let many = usize::try_from(limit / bytes).unwrap() + 1;
        let beyond = plan(many, limit);
        assert!(!beyond.fits(), "{many} states of {bytes} bytes in {limit}");
        assert_eq!(beyond.states().unwrap().0, many + 2, "no checkpoint is promised where there is no room");
    }

    #[test]
    fn rows_that_do_not_fill_a_block_fall_back() {
        assert_eq!(stored_as(DType::Q4_K, 4096), DType::Q4_K);
        // 896 is what Qwen2.5-0.5B is wide, which is why its files hold these types.
        assert_eq!(stored_as(DType::Q4_K, 896), DType::Q5_0);
        assert_eq!(stored_as(DType::Q5_K, 896), DType::Q5_1);
        assert_eq!(stored_as(DType::Q6_K, 896), DType::Q8_0);
        assert_eq!(stored_as(DType::Q8_0, 100), DType::F16);
    }
}
