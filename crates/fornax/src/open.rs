//! How a model is opened: options, and everything that follows from them before a weight is touched.

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use fornax_chat::READS_NO_IMAGES;
use fornax_compute::cpu::{Activations, Simd, Watch};
use fornax_compute::{KvDType, Need, Pooling, Purpose};
use fornax_engine::{Change, Plan, Remedy};
use fornax_format::{AdapterFiles, Checkpoint, DType};
use fornax_model::{Adapter, AdapterRoom, Config, Limits};

use crate::device::{Held, Place, Setup, Wish};
use crate::hub;
use crate::kept::KvDisk;
use crate::private::Private;
use crate::sight::{IMAGE_TOKENS, Reading};
use crate::text::Text;
use crate::{Device, Error, Fornax, Loading};

/// How a model is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    device: Device,
    setup: Setup,
    parallel: usize,
    logit_rows: usize,
    drafts: bool,
    prefix_reuse: bool,
    fast_forward: bool,
    asks_anew: bool,
    kv_dtype: Option<KvDType>,
    memory_limit: Option<u64>,
    returning: u64,
    chat_template: Option<String>,
    queue: Option<usize>,
    quantize: Option<DType>,
    floats8: bool,
    pooling: Option<Pooling>,
    images: bool,
    image_tokens: usize,
    projector: Option<PathBuf>,
    draft: Option<PathBuf>,
    kv_disk: Option<KvDisk>,
    /// Names and folders.
    adapters: Vec<(String, PathBuf)>,
    adapter_room: AdapterRoom,
}

/// What [`OpenOptions::quantize`] can bring matrices into, by the names that people have for it.
pub const QUANTS: [(&str, DType); 3] = [("q8_0", DType::Q8_0), ("fp8", DType::MXFP8), ("q4_k", DType::Q4_K)];

/// Rows of logits beyond one for each request: for drafts that are verified and prompts that are scored. They take 10
/// MB for a vocabulary of 150,000.
const LOGIT_ROWS: usize = 15;

impl OpenOptions {
    /// The model at `path` (a GGUF file, the first shard of a split one, or a Hugging Face directory) with everything
    /// by default: on the CPU, its own context, one request at a time, integer activations, keys and values in f16,
    /// every core.
    pub fn new(path: impl Into<PathBuf>) -> OpenOptions {
        OpenOptions {
            device: Device::Cpu,
            setup: Setup {
                model: path.into(),
                kernel_folder: None,
                context: None,
                assumed_bytes: None,
                private: None,
                activations: Activations::Integer,
                threads: None,
                watch: None,
            },
            parallel: 1,
            logit_rows: LOGIT_ROWS,
            drafts: true,
            prefix_reuse: true,
            fast_forward: true,
            asks_anew: true,
            kv_dtype: None,
            memory_limit: None,
            returning: 0,
            chat_template: None,
            queue: None,
            quantize: None,
            floats8: false,
            pooling: None,
            images: true,
            image_tokens: IMAGE_TOKENS,
            projector: None,
            draft: None,
            kv_disk: None,
            adapters: Vec::new(),
            adapter_room: AdapterRoom::default(),
        }
    }

    /// Where it is computed. Nothing moves to another device than this one.
    pub fn device(mut self, device: Device) -> OpenOptions {
        self.device = device;
        self
    }

    /// Where a GPU's compiled kernels are kept; without it they are compiled anew each time.
    pub fn kernel_folder(mut self, folder: impl Into<PathBuf>) -> OpenOptions {
        self.setup.kernel_folder = Some(folder.into());
        self
    }

    /// Most tokens of a request, prompt and answer together.
    pub fn context(mut self, tokens: usize) -> OpenOptions {
        self.setup.context = Some(tokens);
        self
    }

    /// Requests computed at once; others wait. The cache holds a whole context for each.
    pub fn parallel(mut self, requests: usize) -> OpenOptions {
        self.parallel = requests.max(1);
        self
    }

    /// Rows of logits in a step beyond one for each request; each takes four bytes for every token of the vocabulary.
    pub fn logit_rows(mut self, rows: usize) -> OpenOptions {
        self.logit_rows = rows;
        self
    }

    /// Whether answers are drafted from their own repetitions where that helps. It changes no token, only the speed.
    pub fn drafts(mut self, drafts: bool) -> OpenOptions {
        self.drafts = drafts;
        self
    }

    /// Whether cached prefixes are used again. It changes no token, only the speed.
    pub fn prefix_reuse(mut self, reuse: bool) -> OpenOptions {
        self.prefix_reuse = reuse;
        self
    }

    /// Whether tokens that a form leaves no choice about are computed together. It changes no token, only the speed.
    pub fn fast_forward(mut self, forward: bool) -> OpenOptions {
        self.fast_forward = forward;
        self
    }

    /// Whether the model may be asked anew in the middle of an answer, as strict tools, several calls and bounded
    /// thinking need. What was said until then is computed again where it is not found in the cache.
    pub fn asks_anew(mut self, asks_anew: bool) -> OpenOptions {
        self.asks_anew = asks_anew;
        self
    }

    /// Products with weights are done as private inference does them, everything else on the CPU. What would make the
    /// rows of a round depend on what is said (drafts, reuse of prefixes, forced tokens together, asking anew in the
    /// middle of an answer) is off from here on.
    pub fn private(mut self, private: Private) -> OpenOptions {
        self.setup.private = Some(private);
        self.drafts(false).prefix_reuse(false).fast_forward(false).asks_anew(false)
    }

    /// How keys and values are stored. By default f16, and f32 with float activations: whoever asks for full precision
    /// means all of it (f16 keys alone move log-probabilities by up to 0.02).
    pub fn kv_dtype(mut self, dtype: KvDType) -> OpenOptions {
        self.kv_dtype = Some(dtype);
        self
    }

    /// How activations enter products with quantised weights on the CPU; on a GPU they are float. [`Activations::Half`]
    /// is slow: the specification of what a GPU computes, to compare it with.
    pub fn activations(mut self, activations: Activations) -> OpenOptions {
        self.setup.activations = activations;
        self
    }

    /// Counts on the CPU what matrices are multiplied by.
    pub(crate) fn watch(mut self, watch: Arc<Watch>) -> OpenOptions {
        self.setup.watch = Some(watch);
        self
    }

    /// CPU threads.
    pub fn threads(mut self, threads: usize) -> OpenOptions {
        self.setup.threads = Some(threads);
        self
    }

    /// The most bytes to use.
    pub fn memory_limit(mut self, bytes: u64) -> OpenOptions {
        self.memory_limit = Some(bytes);
        self
    }

    /// Bytes of the device's memory that others will have given back before this model is loaded: for plans of what
    /// would fit then.
    pub fn returning(mut self, bytes: u64) -> OpenOptions {
        self.returning = bytes;
        self
    }

    /// Plans for a GPU with so many free bytes, without looking whether one is there. A model planned so can be loaded
    /// only where one is.
    pub fn assume_free(mut self, bytes: u64) -> OpenOptions {
        self.setup.assumed_bytes = Some(bytes);
        self
    }

    /// A Jinja chat template in place of the model's own.
    pub fn chat_template(mut self, template: String) -> OpenOptions {
        self.chat_template = Some(template);
        self
    }

    /// Requests that may wait for those being computed; further ones are refused.
    pub fn queue(mut self, requests: usize) -> OpenOptions {
        self.queue = Some(requests);
        self
    }

    /// Brings the matrices of a safetensors model into Q8_0, MXFP8 or Q4_K while they are loaded, which loses some
    /// precision; a GGUF file is refused. Rows that do not fill blocks of Q4_K become Q8_0.
    pub fn quantize(mut self, dtype: DType) -> OpenOptions {
        self.quantize = Some(dtype);
        self
    }

    /// Rounds activations to 8-bit floats where a safetensors model's weights are 8-bit floats, in its files or by
    /// [`OpenOptions::quantize`] to MXFP8: faster, and less exact. Experts and heads keep wide activations. A model without
    /// such weights is refused, and so is a device that cannot multiply so.
    pub fn floats8(mut self, multiplied: bool) -> OpenOptions {
        self.floats8 = multiplied;
        self
    }

    /// How an encoder makes one vector of a text, whatever its files say. Of what is no encoder it is the last, and of what
    /// ranks there is none: other ways are refused there.
    pub fn pooling(mut self, pooling: Pooling) -> OpenOptions {
        self.pooling = Some(pooling);
        self
    }

    /// Whether images are read where the model's files have what it takes. Otherwise that takes no memory, and images are
    /// refused.
    pub fn images(mut self, images: bool) -> OpenOptions {
        self.images = images;
        self
    }

    /// The most tokens that an image becomes: larger ones are shrunk, by the rule of the model's own processor. What a
    /// tower works in grows with it.
    pub fn image_tokens(mut self, tokens: usize) -> OpenOptions {
        self.image_tokens = tokens.max(1);
        self
    }

    /// The file that reads images for a model in GGUF, where it does not lie beside the model or is not called as it
    /// is.
    pub fn projector(mut self, path: impl Into<PathBuf>) -> OpenOptions {
        self.projector = Some(path.into());
        self
    }

    /// A smaller model with the same tokens, which drafts for this one: it changes no token, only the speed. It is
    /// loaded onto the same device, and the plan counts it.
    pub fn draft(mut self, path: impl Into<PathBuf>) -> OpenOptions {
        self.draft = Some(path.into());
        self
    }

    /// Keeps pages of prompts on a disk too: what was read before a restart need not be computed again. On the CPU.
    pub fn kv_disk(mut self, disk: KvDisk) -> OpenOptions {
        self.kv_disk = Some(disk);
        self
    }

    /// Refuses a disk that nothing would be read from.
    fn check_kv_disk(&self) -> Result<(), Error> {
        let reason = match &self.kv_disk {
            None => return Ok(()),
            Some(_) if self.setup.private.is_some() => {
                "with private inference: what was said would lie on the disk".to_owned()
            }
            Some(_) if self.device != Device::Cpu => format!("on {}; use --device cpu", self.device),
            Some(_) if !self.prefix_reuse => "where cached prefixes are not used again".to_owned(),
            Some(_) => return Ok(()),
        };
        Err(Error::NoKvDisk { reason })
    }

    /// The model that drafts, by options of its own.
    fn draft_options(&self, path: &Path) -> OpenOptions {
        let mut options = OpenOptions::new(path);
        options.device = self.device;
        options.setup = Setup { model: path.to_owned(), context: None, private: None, ..self.setup.clone() };
        options.parallel = self.parallel;
        options.logit_rows = 0;
        options.kv_dtype = self.kv_dtype;
        options.images(false)
    }

    /// Loads a low-rank adapter beside the model, from a folder as PEFT writes it. Requests of the engine's own kind
    /// ([`Fornax::handle`]) take it by its place among all that were named; each may take another one, in one batch.
    pub fn adapter(mut self, name: impl Into<String>, folder: impl Into<PathBuf>) -> OpenOptions {
        self.adapters.push((name.into(), folder.into()));
        self
    }

    /// Plans room for so many adapters, of at most this rank, that come while the model is loaded
    /// ([`Fornax::load_adapter`]). An encoder has none.
    pub fn adapter_room(mut self, adapters: usize, rank: usize) -> OpenOptions {
        self.adapter_room = AdapterRoom { adapters, rank };
        self
    }

    /// Reads, plans and loads the model.
    pub fn open(self) -> Result<Fornax, Error> {
        self.open_with(&mut |_| {})
    }

    /// The same; `progress` is told how far it is.
    pub fn open_with(self, progress: &mut dyn FnMut(Loading)) -> Result<Fornax, Error> {
        Fornax::load(self.blueprint()?, progress)
    }

    /// What the model will take, from headers and options alone, and what would fit if that does not.
    pub fn plan(&self) -> Result<Planned, Error> {
        self.clone().read()?.plan()
    }

    /// Opens the files and reads their headers, once for every plan and for loading.
    pub fn read(self) -> Result<Unloaded, Error> {
        let place = self.device.place(&self.setup);
        self.read_for(place)
    }

    fn read_for(self, place: Box<dyn Place>) -> Result<Unloaded, Error> {
        self.check_kv_disk()?;
        let (checkpoint, adapters) = (self.checkpoint()?, self.read_adapters()?);
        let draft = match &self.draft {
            Some(path) => Some(Box::new(self.draft_options(path).read()?)),
            None => None,
        };
        let checkpoint = Arc::new(checkpoint);
        Ok(Unloaded { options: self, checkpoint, adapters, draft, place, held: None })
    }

    /// What follows from the options and the files' headers.
    pub(crate) fn blueprint(self) -> Result<Blueprint, Error> {
        let mut unloaded = self.read()?;
        unloaded.hold();
        unloaded.blueprint(None)
    }

    /// The adapters' files.
    fn read_adapters(&self) -> Result<Vec<Adapter>, Error> {
        let read = |(name, folder): &(String, PathBuf)| Ok(Adapter::new(name, AdapterFiles::open(folder)?)?);
        self.adapters.iter().map(read).collect()
    }

    /// What the model is called in messages.
    fn name(&self) -> String {
        self.setup.model.display().to_string()
    }

    /// The files, as the options say to read them.
    fn checkpoint(&self) -> Result<Checkpoint, Error> {
        let mut checkpoint = Checkpoint::open(&self.setup.model)?;
        match (&mut checkpoint, &self.projector) {
            (Checkpoint::Gguf(gguf), Some(path)) => gguf.add(path)?,
            (Checkpoint::Gguf(gguf), None) if self.images && gguf.beside().is_empty() => {
                if let Some(path) = projector_beside(&self.setup.model) {
                    gguf.add(&path)?;
                }
            }
            (Checkpoint::HuggingFace(_), Some(path)) => return Err(Error::Projector { path: path.clone() }),
            (_, None) => {}
        }
        if let Some(dtype) = self.quantize {
            checkpoint.quantize(dtype)?;
        }
        if self.floats8 {
            checkpoint.multiply_floats8()?;
        }
        Ok(checkpoint)
    }
}

/// The file beside a model's that reads its images, by their names. A folder that cannot be read has none.
fn projector_beside(model: &Path) -> Option<PathBuf> {
    let (folder, own) = (model.parent()?, model.file_name()?.to_str()?);
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let entries = std::fs::read_dir(folder).ok()?.filter_map(Result::ok);
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    Some(folder.join(hub::projector(&names, own)?))
}

/// A model whose files are open and whose headers are read; nothing of it is loaded.
pub struct Unloaded {
    options: OpenOptions,
    checkpoint: Arc<Checkpoint>,
    adapters: Vec<Adapter>,
    /// What drafts for it.
    draft: Option<Box<Unloaded>>,
    place: Box<dyn Place>,
    held: Option<Held>,
}

impl Unloaded {
    /// Begins to open the device and holds it, so that those who look at it from here on need not open it each: for a
    /// model that is about to be loaded.
    pub fn hold(&mut self) {
        if self.held.is_none() {
            self.held = self.place.hold();
        }
    }

    /// What the model will take, and what would fit if that does not.
    pub fn plan(&self) -> Result<Planned, Error> {
        self.plan_within(self.options.memory_limit, self.options.returning)
    }

    /// The same with other bounds than the options': see [`OpenOptions::memory_limit`] and [`OpenOptions::returning`].
    pub fn plan_within(&self, memory_limit: Option<u64>, returning: u64) -> Result<Planned, Error> {
        let planned = self.plan_beside(0, memory_limit, returning)?;
        let Some(draft) = &self.draft else { return Ok(planned) };
        self.may_be_drafted(draft, &planned.plan)?;
        // A whole context for every request where both fit so, else for one.
        let mut plan = draft.plan_drafting(&planned.plan, u64::MAX)?;
        let mut both = self.plan_beside(plan.usage().total(), memory_limit, returning)?;
        if !both.plan.fits() || both.plan.pool_tokens() < both.plan.pool_tokens_wanted() {
            let least = draft.plan_drafting(&planned.plan, 1)?.total_bytes();
            plan = draft.plan_drafting(&planned.plan, least)?;
            both = self.plan_beside(plan.usage().total(), memory_limit, returning)?;
        }
        Ok(Planned { draft: Some(plan), ..both })
    }

    /// The plan of this model as one that drafts for what was planned.
    fn plan_drafting(&self, drafted: &Plan, limit_bytes: u64) -> Result<Plan, Error> {
        let trained = Config::read(&self.checkpoint)?.context as usize;
        let wish = Wish {
            context: Some(drafted.context.min(trained)),
            limit_bytes,
            vocabulary: 0,
            ..self.wish(0, None, 0)?
        };
        Ok(self.place.plan((&self.checkpoint, &[]), &wish)?.plan)
    }

    /// Refuses a model whose drafts could not be verified, and one that cannot draft.
    fn may_be_drafted(&self, draft: &Unloaded, plan: &Plan) -> Result<(), Error> {
        let states = "it keeps states of sequences, which cannot go back behind a wrong guess";
        if plan.states().is_some() {
            return Err(self.cannot_draft(draft, format!("of {}, {states}", self.options.name())));
        }
        if self.options.setup.private.is_some() {
            let reason = "drafts would show both servers how predictable an answer is".to_owned();
            return Err(self.cannot_draft(draft, reason));
        }
        if Config::read(&self.checkpoint)?.pooling.is_some() {
            return Err(self.cannot_draft(draft, "that one answers nothing, it makes embeddings".to_owned()));
        }
        let config = Config::read(&draft.checkpoint)?;
        if config.pooling.is_some() {
            return Err(self.cannot_draft(draft, "it makes embeddings".to_owned()));
        }
        if config.kv_groups(2).iter().any(|group| group.kind.is_state()) {
            return Err(self.cannot_draft(draft, states.to_owned()));
        }
        Ok(())
    }

    fn cannot_draft(&self, draft: &Unloaded, reason: String) -> Error {
        let (draft, model) = (draft.options.setup.model.clone(), self.options.setup.model.clone());
        Error::Draft { draft, model, reason }
    }

    /// Refuses a model that knows other tokens.
    fn same_tokens(&self, draft: &Unloaded, texts: [&Text; 2]) -> Result<(), Error> {
        let [own, drafting] = texts;
        let reason = match (own.tokenizer(), drafting.tokenizer()) {
            (Some(own), Some(drafting)) => own.differs(drafting).map(|id| {
                let (theirs, ours) = (drafting.piece(id), own.piece(id));
                format!("their tokenizers differ: token {id} is {theirs:?} there and {ours:?} here")
            }),
            (None, None) => None,
            _ => Some("one of them has a tokenizer and the other one has none".to_owned()),
        };
        let counts = (drafting.vocab(), own.vocab());
        let counted = (counts.0 != counts.1)
            .then(|| format!("their tokenizers differ: it has {} tokens, not {}", counts.0, counts.1));
        reason.or(counted).map_or(Ok(()), |reason| Err(self.cannot_draft(draft, reason)))
    }

    /// The same of this model alone, beside so many bytes of others.
    fn plan_beside(&self, beside: u64, memory_limit: Option<u64>, returning: u64) -> Result<Planned, Error> {
        self.place.plan((&self.checkpoint, &self.adapters), &self.wish(beside, memory_limit, returning)?)
    }

    fn wish(&self, beside: u64, memory_limit: Option<u64>, returning: u64) -> Result<Wish, Error> {
        let options = &self.options;
        let (tower_bytes, whole_tokens) = match self.reading() {
            Ok(reading) => {
                let reading = reading?;
                (reading.bytes(&self.checkpoint)?, reading.whole_tokens())
            }
            Err(_) => (0, 0),
        };
        let wish = Wish {
            context: options.setup.context,
            parallel: options.parallel,
            kv_dtype: options.kv_dtype,
            logit_rows: options.logit_rows,
            vocabulary: vocabulary_tokens(&self.checkpoint),
            limit_bytes: memory_limit.unwrap_or(u64::MAX),
            beside_bytes: tower_bytes.saturating_add(beside),
            whole_tokens,
            returning,
            adapter_room: options.adapter_room,
        };
        Ok(wish)
    }

    /// What reads images for the model, or why nothing does. The inner error is of files that contradict themselves.
    fn reading(&self) -> Result<Result<Reading, Error>, &'static str> {
        let options = &self.options;
        if options.setup.private.is_some() {
            return Err("private inference reads no images: what they show would not be hidden");
        }
        if !options.images {
            return Err("images are turned off for this model (--no-images)");
        }
        // What cannot be computed at all is said elsewhere.
        let Ok(config) = Config::read(&self.checkpoint) else { return Err(READS_NO_IMAGES) };
        let threads = self.place.threads().max(1);
        match Reading::of(&self.checkpoint, &config, options.image_tokens, threads) {
            Ok(None) => Err(READS_NO_IMAGES),
            Ok(Some(reading)) if !self.takes_images(&config, &reading) => Err(
                "this model reads images on the CPU alone: its device takes no given rows in place of tokens",
            ),
            Ok(Some(reading)) => Ok(Ok(reading)),
            // Nobody has asked for it: it was found beside the model, which reads text without it.
            Err(Error::Model(fornax_model::Error::Unsupported { .. }))
                if options.projector.is_none() && matches!(*self.checkpoint, Checkpoint::Gguf(_)) =>
            {
                Err("the file beside this model that reads images is of a kind that is not computed")
            }
            Err(error) => Ok(Err(error)),
        }
    }

    /// Whether the model's device computes what images need of it.
    fn takes_images(&self, config: &Config, reading: &Reading) -> bool {
        let mut seeing = config.clone();
        seeing.see(&reading.tower);
        let of_images = [Need::GivenRows, Need::Sections, Need::LastSeen];
        let mut needs = seeing.needs().into_iter().filter(|need| of_images.contains(need));
        needs.all(|need| self.place.supports(need).is_ok())
    }

    /// Loads the model as it was planned; `progress` is told how far it is.
    pub fn load(self, planned: Planned, progress: &mut dyn FnMut(Loading)) -> Result<Fornax, Error> {
        Fornax::load(self.blueprint(Some(planned))?, progress)
    }

    /// All that loading the model that drafts needs.
    fn draft_blueprint(&self, draft: &Unloaded, plan: Plan, text: &Text) -> Result<Box<Blueprint>, Error> {
        let options = draft.options.clone();
        let place = options.device.place(&options.setup);
        let (checkpoint, adapters) = (Arc::clone(&draft.checkpoint), Vec::new());
        let unloaded = Unloaded { options, checkpoint, adapters, draft: None, place, held: None };
        let planned = Planned { plan, draft: None, remedies: Vec::new(), device: "" };
        let blueprint = unloaded.blueprint(Some(planned))?;
        self.same_tokens(draft, [text, &blueprint.text])?;
        Ok(Box::new(blueprint))
    }

    /// All that loading needs, by the plan given or one that is made here. What does not fit is refused here, before
    /// anything is loaded.
    fn blueprint(self, planned: Option<Planned>) -> Result<Blueprint, Error> {
        let mut config = Config::read(&self.checkpoint)?;
        if let Some(pooling) = self.options.pooling {
            config.pool_by(pooling)?;
        }
        config.adapter_room = self.options.adapter_room;
        // A plan waits for the device, and a tokenizer takes as long to read.
        let (planned, text) = thread::scope(|scope| {
            let (checkpoint, template) = (&self.checkpoint, self.options.chat_template.as_deref());
            let (vocab, asks_anew) = (config.vocab, self.options.asks_anew);
            let text = scope.spawn(move || Text::open(checkpoint, template, vocab, asks_anew));
            let planned = planned.map_or_else(|| self.plan(), Ok);
            (planned, text.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        let planned = planned?;
        let reading = match self.reading() {
            Ok(reading) => Ok(reading?),
            Err(reason) => Err(reason),
        };
        if let Ok(reading) = &reading {
            config.see(&reading.tower);
        }
        config.limit_context(u32::try_from(planned.plan.context).unwrap_or(u32::MAX));
        let step = planned.plan.step;
        if planned.plan.unsupported.is_some() {
            // The plan was made from the table of tensors; this says by name what cannot be computed.
            self.place.refuse(&self.checkpoint, &config, step)?;
        }
        if !planned.plan.fits() {
            return Err(planned.refusal());
        }
        let text = text?;
        let draft = match (&self.draft, planned.draft) {
            (Some(draft), Some(plan)) => Some(self.draft_blueprint(draft, plan, &text)?),
            _ => None,
        };
        let Unloaded { options, checkpoint, adapters, place, held, .. } = self;
        Ok(Blueprint {
            checkpoint,
            adapters,
            config,
            reading,
            text,
            plan: planned.plan,
            draft,
            queue: options.queue,
            place,
            _held: held,
            limits: Limits { tokens_max: step.tokens_max, wanted_max: step.wanted_max },
            drafts: options.drafts,
            prefix_reuse: options.prefix_reuse,
            fast_forward: options.fast_forward,
            computing: format!("{:?} {:?}", options.setup.activations, Simd::detect()),
            model: options.setup.model,
            kv_disk: options.kv_disk,
        })
    }
}

/// A model that is about to be loaded.
pub(crate) struct Blueprint {
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) adapters: Vec<Adapter>,
    pub(crate) config: Config,
    /// What reads images, or why nothing does.
    pub(crate) reading: Result<Reading, &'static str>,
    pub(crate) text: Text,
    pub(crate) plan: Plan,
    /// What drafts for it.
    pub(crate) draft: Option<Box<Blueprint>>,
    /// Requests that may wait.
    pub(crate) queue: Option<usize>,
    pub(crate) place: Box<dyn Place>,
    /// Holds the device open between those who look at it, until the model is loaded.
    _held: Option<Held>,
    pub(crate) limits: Limits,
    /// Whether answers are drafted.
    pub(crate) drafts: bool,
    /// Whether cached prefixes are used again.
    pub(crate) prefix_reuse: bool,
    /// Whether forced tokens are computed together.
    pub(crate) fast_forward: bool,
    /// How it is computed, as far as bits depend on it.
    pub(crate) computing: String,
    /// Where it lies.
    pub(crate) model: PathBuf,
    /// Where its pages are kept beyond the memory.
    pub(crate) kv_disk: Option<KvDisk>,
}

/// A plan, and what would fit where it does not.
#[derive(Clone, Debug)]
pub struct Planned {
    /// What was asked for. The runtime's bytes contain those of a model that drafts.
    pub plan: Plan,
    /// The plan of the model that drafts, if there is one.
    pub draft: Option<Plan>,
    /// What would fit instead; empty where the plan fits.
    pub remedies: Vec<Remedy>,
    /// The device that it is a plan of.
    pub device: &'static str,
}

impl Planned {
    /// The error of a plan that does not fit.
    pub fn refusal(&self) -> Error {
        let plan = &self.plan;
        let advice: Vec<String> = self
            .remedies
            .iter()
            .map(|remedy| match remedy.change {
                Change::Context(context) => format!("--context {context}"),
                Change::Parallel(parallel) => format!("--parallel {parallel}"),
                Change::Quant(dtype) => format!("a version of the model in {dtype}"),
            })
            .collect();
        Error::DoesNotFit {
            needed: plan.total_bytes(),
            weights: plan.usage().bytes(Purpose::Weights),
            kv: plan.usage().bytes(Purpose::Kv),
            context: plan.context,
            limit: plan.limit_bytes(),
            advice: if advice.is_empty() {
                "no shorter --context would fit either: use a smaller model or a larger --memory-limit"
                    .to_owned()
            } else {
                format!("use {}, or a larger --memory-limit", advice.join(", or "))
            },
        }
    }
}

/// Tokens that the tokenizer will hold, as the headers count them.
fn vocabulary_tokens(checkpoint: &Checkpoint) -> u64 {
    match checkpoint {
        Checkpoint::Gguf(gguf) => {
            let tokens = gguf.metadata().opt_strings("tokenizer.ggml.tokens").ok().flatten();
            tokens.map_or(0, |tokens| tokens.len() as u64)
        }
        Checkpoint::HuggingFace(model) => {
            let tokens = model.config().get("vocab_size").and_then(|tokens| tokens.as_u64());
            tokens.filter(|_| model.tokenizer_json().is_some()).unwrap_or(0)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use fornax_compute::cpu::{Cpu, CpuSizes};
    use fornax_compute::{Counting, Sizes};
    use fornax_engine::{Ask, StepLimits};

    use super::*;
    use crate::Code;
    use crate::device::{Arm, CpuArm, CudaArm, planned};

    #[test]
    fn a_plan_for_a_gpu_counts_keys_and_values_as_they_are_allocated() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
        // A page of its 8-bit floats is 16.5 times what memory is cut in.
        let path = fixtures.join("yarn");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let options = OpenOptions::new(path);
        let cuda = CudaArm::new(0, &options.setup);
        for kv_dtype in [KvDType::F32, KvDType::F16, KvDType::F8] {
            for (context, limit_bytes) in [(33, 1 << 30), (100, 1 << 30), (128, 600 << 20)] {
                let ask = Ask {
                    context: Some(context),
                    parallel: 3,
                    kv_dtype,
                    step_tokens: 64,
                    logit_rows: 0,
                    runtime_bytes: 0,
                    limit_bytes,
                };
                let plan = planned(&cuda, (&checkpoint, &[]), AdapterRoom::default(), &ask).unwrap().plan;
                let taken = cuda.sizes(plan.step).kv_bytes(&plan.kv);
                assert_eq!(plan.usage().bytes(Purpose::Kv), taken, "{kv_dtype}, {context} tokens");
                assert_eq!(taken % 256, 0);
            }
        }
    }

    #[test]
    fn a_plan_refuses_keys_and_values_that_a_gpu_does_not_keep_and_says_which_it_does() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/yarn");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let options = OpenOptions::new(path);
        let ask = |kv_dtype| Ask {
            context: Some(64),
            parallel: 1,
            kv_dtype,
            step_tokens: 64,
            logit_rows: 0,
            runtime_bytes: 0,
            limit_bytes: 1 << 30,
        };
        for kv_dtype in KvDType::ALL {
            let ask = ask(kv_dtype);
            let cpu = planned(&CpuArm::new(&options.setup), (&checkpoint, &[]), AdapterRoom::default(), &ask);
            assert_eq!(cpu.unwrap().plan.kv.dtype, kv_dtype);
            let cuda =
                planned(&CudaArm::new(0, &options.setup), (&checkpoint, &[]), AdapterRoom::default(), &ask);
            if kv_dtype != KvDType::Q8_0 {
                assert_eq!(cuda.unwrap().plan.kv.dtype, kv_dtype);
                continue;
            }
            let refused = cuda.unwrap_err();
            let wanted = "keys and values in q8_0 are not available on cuda; use f32, f16, bf16 or fp8";
            assert_eq!((refused.to_string().as_str(), refused.code()), (wanted, Code::InvalidInput));
        }
    }

    #[test]
    fn what_matrices_can_be_brought_into_is_computed_on_every_device() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/yarn");
        let options = OpenOptions::new(path.clone());
        let step = StepLimits { tokens_max: 1, wanted_max: 1, slots: 1 };
        for quant in [DType::Q8_0, DType::MXFP8, DType::Q4_K] {
            let mut checkpoint = Checkpoint::open(&path).unwrap();
            // Its rows are too short for 8-bit activations.
            assert!(checkpoint.multiply_floats8().is_err());
            let mut checkpoint = Checkpoint::open(&path).unwrap();
            checkpoint.quantize(quant).unwrap();
            let config = Config::read(&checkpoint).unwrap();
            let limits = Limits { tokens_max: 1, wanted_max: 1 };
            let cpu = Counting::new(CpuArm::new(&options.setup).sizes(step));
            fornax_model::measure(&checkpoint, &config, &cpu, limits).unwrap();
            let cuda = Counting::new(CudaArm::new(0, &options.setup).sizes(step));
            fornax_model::measure(&checkpoint, &config, &cuda, limits).unwrap();
        }
    }

    /// The CPU as a card that counts how often it is looked at, held and opened.
    struct Counted {
        cpu: CpuArm,
        looks: Arc<AtomicUsize>,
        holds: Arc<AtomicUsize>,
        opens: Arc<AtomicUsize>,
    }

    impl Arm for Counted {
        type Backend = Cpu;
        type Sizes = CpuSizes;

        fn device(&self) -> Device {
            Device::Cpu
        }

        fn step_tokens(&self) -> usize {
            self.cpu.step_tokens()
        }

        fn runtime_bytes(&self, _: u64) -> u64 {
            0
        }

        fn free_bytes(&self) -> Result<Option<u64>, Error> {
            self.looks.fetch_add(1, Ordering::Relaxed);
            Ok(Some(1 << 30))
        }

        fn sizes(&self, step: StepLimits) -> CpuSizes {
            self.cpu.sizes(step)
        }

        fn hold(&self) -> Option<Held> {
            self.holds.fetch_add(1, Ordering::Relaxed);
            Some(Box::new(()))
        }

        fn depth(&self) -> usize {
            self.cpu.depth()
        }

        fn open(&self, plan: &Plan) -> Result<Cpu, Error> {
            self.opens.fetch_add(1, Ordering::Relaxed);
            self.cpu.open(plan)
        }
    }

    #[test]
    fn a_model_is_read_planned_and_opened_once() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama.gguf");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        std::fs::copy(fixture, &path).unwrap();
        let options = OpenOptions::new(&path);
        let (looks, holds, opens) = <(Arc<AtomicUsize>, Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let counts = || [&looks, &holds, &opens].map(|count| count.load(Ordering::Relaxed));
        let cpu = CpuArm::new(&options.setup);
        let counted =
            Counted { cpu, looks: Arc::clone(&looks), holds: Arc::clone(&holds), opens: Arc::clone(&opens) };
        let mut unloaded = options.read_for(Box::new(counted)).unwrap();
        // Whoever opened it once more would not find it.
        std::fs::remove_file(&path).unwrap();
        unloaded.hold();
        let planned = unloaded.plan().unwrap();
        assert_eq!(counts(), [1, 1, 0]);
        let less = unloaded.plan_within(Some(1), 0).unwrap();
        assert!(planned.plan.fits() && !less.plan.fits());
        assert_eq!(counts(), [2, 1, 0], "another plan looks again at what is free");
        let plan = planned.plan.clone();
        let model = unloaded.load(planned, &mut |_| {}).unwrap();
        assert_eq!(counts(), [2, 1, 1], "loading makes no plan");
        assert_eq!(*model.plan(), plan);
    }
}
