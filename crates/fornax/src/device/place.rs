//! A device as a place for models: what they take there, and how they are loaded.

use fornax_compute::{Backend, Batch, Counting, KvDType, Memory as _, Need, Sizes, Usage};
use fornax_engine::{Ask, Local, LocalParts, Plan, Planner, Runner, StepLimits};
use fornax_format::Checkpoint;
use fornax_model::{Adapter, AdapterRoom, Config, Limits, Model};

use super::Device;
use crate::Error;
use crate::open::{Blueprint, Planned};

/// What a backend says about the device that it computes on. Everything else follows.
pub(crate) trait Arm: Send + 'static {
    /// What computes.
    type Backend: Backend + 'static;
    /// The bytes that it takes.
    type Sizes: Sizes;

    /// The device.
    fn device(&self) -> Device;

    /// Its name with what matters about it, for messages.
    fn words(&self) -> String {
        self.device().to_string()
    }

    /// CPU threads that compute.
    fn threads(&self) -> usize {
        0
    }

    /// Tokens of its longest step.
    fn step_tokens(&self) -> usize;

    /// How keys and values are stored where nobody says.
    fn kv_dtype(&self) -> KvDType {
        KvDType::F16
    }

    /// Bytes that the process itself takes of its memory, beside a tokenizer of this many tokens.
    fn runtime_bytes(&self, vocabulary: u64) -> u64;

    /// Bytes that are free on it now; `None` where whoever asks knows better.
    fn free_bytes(&self) -> Result<Option<u64>, Error>;

    /// Bytes of what lies on it, for steps of these bounds.
    fn sizes(&self, step: StepLimits) -> Self::Sizes;

    /// Begins to open it, ahead of everyone who will look at it; `None` where there is nothing to open.
    fn hold(&self) -> Option<Held> {
        None
    }

    /// Steps that may be begun while another one is unfinished.
    fn depth(&self) -> usize;

    /// The backend for a plan. What was not planned is not allocated.
    fn open(&self, plan: &Plan) -> Result<Self::Backend, Error>;

    /// Told when all weights are there, and room for keys and values by this plan.
    fn loaded(&self, loaded: &mut Loaded<Self::Backend>, plan: &Plan) -> Result<(), Error> {
        let _ = (loaded, plan);
        Ok(())
    }

    /// Of its threads, those that compute a step of few tokens.
    fn threads_for_few(&self, backend: &Self::Backend) -> usize {
        let _ = backend;
        self.threads()
    }
}

/// Holds a device open until it is dropped.
pub(crate) type Held = Box<dyn Send>;

/// What is asked of a plan, as far as no device decides it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub(crate) context: Option<usize>,
    pub(crate) parallel: usize,
    pub(crate) kv_dtype: Option<KvDType>,
    pub(crate) logit_rows: usize,
    /// Tokens of the tokenizer.
    pub(crate) vocabulary: u64,
    pub(crate) limit_bytes: u64,
    /// Bytes of what lies beside the model: of what reads images, of a model that drafts.
    pub(crate) beside_bytes: u64,
    /// Tokens of an image that one step has to compute together.
    pub(crate) whole_tokens: usize,
    /// Bytes of the device that others will have given back.
    pub(crate) returning: u64,
    /// Room for adapters that come while the model is loaded.
    pub(crate) adapter_room: AdapterRoom,
}

/// A model that can be computed.
pub(crate) struct Opened {
    pub(crate) runner: Box<dyn Runner>,
    pub(crate) counted: Counted,
}

/// What is known of a model once it is loaded.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    /// Bytes of its device, by the allocator.
    pub(crate) usage: Usage,
    /// CPU threads that compute a step of few tokens.
    pub(crate) threads_for_few: usize,
}

/// An [`Arm`] whose backend nobody needs to know.
pub(crate) trait Place: Send {
    /// The device.
    fn device(&self) -> Device;

    /// Its name with what matters about it, for messages.
    fn words(&self) -> String;

    /// CPU threads that compute.
    fn threads(&self) -> usize;

    /// Begins to open it.
    fn hold(&self) -> Option<Held>;

    /// What a model takes here, and what would fit if it does not. What is free is a limit too.
    fn plan(&self, model: (&Checkpoint, &[Adapter]), wish: &Wish) -> Result<Planned, Error>;

    /// Says by name what of a model cannot be computed here.
    fn refuse(&self, checkpoint: &Checkpoint, config: &Config, step: StepLimits) -> Result<(), Error>;

    /// Refuses what is not computed here.
    fn supports(&self, need: Need) -> Result<(), Error>;

    /// Loads the model and its cache on the thread that will compute.
    fn runner(
        &self,
        blueprint: &Blueprint,
        vocab: usize,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Opened, Error>;

    /// Loads the model for [`Forward`].
    fn forward(
        &self,
        blueprint: &Blueprint,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Box<dyn Forward>, Error>;
}

impl<A: Arm> Place for A {
    fn device(&self) -> Device {
        Arm::device(self)
    }

    fn words(&self) -> String {
        Arm::words(self)
    }

    fn threads(&self) -> usize {
        Arm::threads(self)
    }

    fn hold(&self) -> Option<Held> {
        Arm::hold(self)
    }

    fn plan(&self, model: (&Checkpoint, &[Adapter]), wish: &Wish) -> Result<Planned, Error> {
        let free = self.free_bytes()?.map_or(u64::MAX, |bytes| bytes.saturating_add(wish.returning));
        let ask = Ask {
            context: wish.context,
            parallel: wish.parallel,
            kv_dtype: wish.kv_dtype.unwrap_or(self.kv_dtype()),
            // Beside them every other request may want its next token.
            step_tokens: self.step_tokens().max(match wish.whole_tokens {
                0 => 0,
                whole => whole.saturating_add(wish.parallel),
            }),
            logit_rows: wish.logit_rows,
            runtime_bytes: self.runtime_bytes(wish.vocabulary).saturating_add(wish.beside_bytes),
            limit_bytes: wish.limit_bytes.min(free),
        };
        planned(self, model, wish.adapter_room, &ask)
    }

    fn refuse(&self, checkpoint: &Checkpoint, config: &Config, step: StepLimits) -> Result<(), Error> {
        let memory = Counting::new(self.sizes(step));
        let limits = Limits { tokens_max: step.tokens_max, wanted_max: step.wanted_max };
        Ok(fornax_model::measure(checkpoint, config, &memory, limits)?)
    }

    fn supports(&self, need: Need) -> Result<(), Error> {
        Ok(self.sizes(StepLimits { tokens_max: 1, wanted_max: 1, slots: 1 }).supports(need)?)
    }

    fn runner(
        &self,
        blueprint: &Blueprint,
        vocab: usize,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Opened, Error> {
        let plan = &blueprint.plan;
        let Loaded { backend, model, kv } = Loaded::new(self, blueprint, progress)?;
        let threads_for_few = self.threads_for_few(&backend);
        let mut usage = backend.usage();
        let local = Local::new(LocalParts {
            backend,
            model,
            kv,
            groups: plan.kv.groups.clone(),
            limits: plan.step,
            depth: self.depth(),
            vocab: u32::try_from(vocab).expect("the configuration bounds the vocabulary"),
        });
        let local = match blueprint.config.given() {
            Some(columns) => local.with_given(columns).with_sections(blueprint.config.position_sections()),
            None => local,
        };
        let local = match &blueprint.draft {
            Some(draft) => {
                let opened = draft.place.runner(draft, vocab, progress)?;
                usage = usage.and(&opened.counted.usage);
                local.with_drafter(opened.runner)
            }
            None => local,
        };
        Ok(Opened { runner: Box::new(local), counted: Counted { usage, threads_for_few } })
    }

    fn forward(
        &self,
        blueprint: &Blueprint,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Box<dyn Forward>, Error> {
        Ok(Box::new(Loaded::new(self, blueprint, progress)?))
    }
}

/// A plan of exactly what is asked for, and what would fit if it does not.
pub(crate) fn planned<A: Arm>(
    arm: &A,
    (checkpoint, adapters): (&Checkpoint, &[Adapter]),
    room: AdapterRoom,
    ask: &Ask,
) -> Result<Planned, Error> {
    let planner = Planner::new(checkpoint, |step| arm.sizes(step))?.with_adapter_room(room)?;
    let planner = planner.with_adapters(adapters)?;
    let plan = planner.plan(ask)?;
    if plan.context > plan.context_trained {
        return Err(Error::ContextTooLong { asked: plan.context, trained: plan.context_trained });
    }
    let remedies = if plan.fits() { Vec::new() } else { planner.remedies(ask)? };
    Ok(Planned { plan, draft: None, remedies, device: Arm::device(arm).kind_name() })
}

/// A model on a device, one step at a time on the caller's thread.
pub(crate) trait Forward {
    /// Computes a batch and returns the first `rows` rows of logits.
    fn forward(&mut self, batch: &Batch, rows: usize) -> Result<Vec<f32>, Error>;
}

/// How far a model is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loading {
    /// Weights are on their way to the device.
    Weights {
        /// Bytes of them that have been sent.
        bytes: u64,
        /// Bytes that there are.
        total: u64,
    },
    /// They are there, and the programs of a GPU are being compiled.
    Kernels {
        /// Programs that are.
        compiled: usize,
        /// Programs that there are.
        total: usize,
    },
}

/// Fields in the order in which they may go: memory before the device that it lies on.
pub(crate) struct Loaded<B: Backend> {
    model: Box<dyn Model<B>>,
    kv: B::Kv,
    pub(super) backend: B,
}

impl<B: Backend + 'static> Loaded<B> {
    pub(super) fn new<A: Arm<Backend = B>>(
        arm: &A,
        blueprint: &Blueprint,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Loaded<B>, Error> {
        let Blueprint { checkpoint, adapters, config, plan, limits, .. } = blueprint;
        let backend = arm.open(plan)?;
        let mut all = 0;
        let mut weights = |bytes, total| {
            all = total;
            progress(Loading::Weights { bytes, total });
        };
        let model = fornax_model::load_with(checkpoint, config, adapters, &backend, *limits, &mut weights)?;
        // Room for keys and values is given when all weights are there.
        let kv = backend.alloc_kv(&plan.kv)?;
        progress(Loading::Weights { bytes: all, total: all });
        backend.ready(&mut |compiled, total| progress(Loading::Kernels { compiled, total }))?;
        let mut loaded = Loaded { model, kv, backend };
        arm.loaded(&mut loaded, plan)?;
        Ok(loaded)
    }

    /// Computes a batch, whose logits nobody reads.
    pub(super) fn compute(&mut self, batch: &Batch) -> Result<(), Error> {
        let step = self.backend.begin(batch)?;
        let (backend, model, kv) = (&self.backend, &mut self.model, &mut self.kv);
        backend.record(&step, &mut || model.forward(backend, kv, &step))?;
        backend.finish(step)?;
        Ok(())
    }
}

impl<B: Backend + 'static> Forward for Loaded<B> {
    fn forward(&mut self, batch: &Batch, rows: usize) -> Result<Vec<f32>, Error> {
        self.compute(batch)?;
        Ok(self.backend.read(self.model.logits(), 0, rows)?)
    }
}
