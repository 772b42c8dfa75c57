//! The device as a backend: memory, steps, recording. The operations are in `ops`.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use fornax_compute::cpu::dequantize;
use fornax_compute::landing::{Content, land};
use fornax_compute::operands;
use fornax_compute::{
    Attention, Backend, Batch, ChannelInputs, ChannelScan, DeltaRule, Error, ExpertRoom, Experts, GatedNorm,
    Glu, HeadProducts, Heads, KvLayer, KvSpec, LatentAttention, LatentHeads, Linear, LowRank, Memory, Need,
    Norm, Output, Part, Pointwise, Pooling, Purpose, QkNorm, Role, Rope, Routing, Rows, SampleFault,
    SampleRow, Sampled, SelectiveScan, ShortConv, Sizes, Temperature, Usage, WeightPlace,
};

use crate::arena::{Arena, Piece};
use crate::check::Checks;
use crate::driver::{Arg, CUDA, Device, Event, Function, Graph, Launch};
use crate::grid::Grid;
use crate::layout::Format;
use crate::memory::{Buf, CudaSizes, Kv, PARTIALS_BYTES, TICKETS, Weight, formed_bytes, int};
use crate::ops::{Call, Fuse, Scratch, latent_programs, recurrence_program, sample_program};
use crate::program::{Key, Programs};
use crate::step::{BINS_BYTES, Chosen, DeviceStep, Outcome, Slot, Step, Steps};
use crate::upload::{Ring, UploadTimes};

/// Steps of up to this many tokens are recorded. In longer ones the work hides the launches.
const RECORDED_TOKENS_MAX: usize = 256;

/// How a CUDA backend is made.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Which device, as the driver counts them.
    pub device: usize,
    /// The most bytes to allocate; `None` means what is free on the device.
    pub memory_limit: Option<u64>,
    /// The largest batch, in tokens.
    pub tokens_max: usize,
    /// The most rows of a batch that want logits.
    pub wanted_max: usize,
    /// Sequence slots: the largest batch in rows.
    pub slots: usize,
    /// Steps that may be begun while another one is unfinished.
    pub depth: usize,
    /// Entries of all page tables of a step, and `tokens_max` more for each KV group. For each group of states six
    /// words for each slot, and two for each checkpoint.
    pub pages_max: usize,
    /// Where compiled kernels are kept; `None` compiles them anew each time.
    pub kernel_folder: Option<PathBuf>,
    /// Whether a step of decoding is recorded once and replayed.
    pub graphs: bool,
}

impl Default for CudaOptions {
    /// The first device, batches of 512 tokens of 16 sequences, page tables for two million tokens.
    fn default() -> CudaOptions {
        CudaOptions {
            device: 0,
            memory_limit: None,
            tokens_max: 512,
            wanted_max: 512,
            slots: 16,
            depth: 1,
            pages_max: 1 << 16,
            kernel_folder: None,
            graphs: true,
        }
    }
}

/// A part's format, rows and columns.
type Kind = (Format, usize, usize);

/// An NVIDIA GPU as a device.
pub struct Cuda {
    pub(crate) device: Rc<Device>,
    options: CudaOptions,
    sizes: CudaSizes,
    arena: Rc<Arena>,
    pub(crate) programs: Programs,
    steps: Rc<Steps>,
    pub(crate) scratch: Scratch,
    /// Partial results: of attention over splits, and of the first products of adapters.
    pub(crate) partials: Piece,
    /// Counts of blocks that have arrived, zero between kernels.
    pub(crate) tickets: Piece,
    pub(crate) fuse: Fuse,
    /// Totals of weights for each row that is drawn from, zero between kernels.
    pub(crate) bins: Piece,
    /// The token last sampled into each slot, on the device, and whether there is one.
    pub(crate) sampled: Piece,
    pub(crate) has_sampled: RefCell<Vec<bool>>,
    ring: RefCell<Option<Ring>>,
    /// Rows of new weights that are being read back.
    checked: RefCell<Option<Checks>>,
    /// Kinds of weights, by role and parts, whose products are being compiled or are compiled.
    prepared: RefCell<HashSet<(Option<Role>, Vec<Kind>)>>,
    /// Attention that will be asked for, and whether queries and keys are rotated before.
    foreseen: RefCell<Vec<(Attention<()>, bool)>>,
    /// The heads of latent attention that will be asked for.
    latents: RefCell<HashSet<LatentHeads>>,
    pub(crate) upload_times: Cell<UploadTimes>,
    graphs: RefCell<HashMap<Bucket, Recorded>>,
    /// The bucket that is being recorded: grids are sized for it and not for the step.
    bucket: Cell<Option<Bucket>>,
    /// Checks that a recorded step must pass before it is replayed.
    checks: RefCell<Option<Vec<Check>>>,
}

/// The key of recorded graphs: grids are sized for the largest step of a bucket, and kernels read the real counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Bucket {
    slot: usize,
    tokens: usize,
    wanted: usize,
    /// Whether a sequence takes an adapter: without one nothing is launched for them.
    adapted: bool,
    /// Places of the longest sequence, rounded up.
    pub(crate) places: usize,
}

/// The largest number of rows in the bucket of a step with this many. Up to 64 rows, a product takes about as long as
/// reading its weight; beyond that, every row costs.
fn bucket_rows(rows: usize) -> usize {
    match rows {
        0 => 0,
        1..=64 => rows.next_power_of_two(),
        _ => rows.next_multiple_of(32),
    }
}

enum Recorded {
    /// It ran once, so everything that it needs is compiled. The next time it is recorded.
    Seen {
        generation: u64,
    },
    Graph {
        graph: Graph,
        generation: u64,
        checks: Vec<Check>,
    },
}

/// A check that an operation made of a step on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Check {
    Tokens { rows: usize },
    Positions { rows: usize },
    Pages { group: usize, pages: usize },
    Adapters { count: usize },
    States { group: usize, groups: usize, pages: usize },
}

impl Cuda {
    /// Opens the device, allocates the workspace and begins to compile what every model needs.
    pub fn new(options: CudaOptions) -> Result<Cuda, Error> {
        let device = Device::open(&CUDA, options.device)?;
        let programs = Programs::new(&device, options.kernel_folder.clone())?;
        let limit = options.memory_limit.unwrap_or(u64::MAX).min(device.memory_free);
        let arena = Arena::new(device.clone(), limit);
        [true, false].map(sample_program).into_iter().for_each(|key| programs.prepare(key));
        for unit in ["norm.cu", "rows.cu", "glu.cu", "low_rank.cu"] {
            programs.prepare(Key::plain(unit));
        }
        let steps = Steps::new(&device, &arena, &options)?;
        let workspace = |bytes| arena.cut(Purpose::Workspace, bytes);
        let tickets = workspace(TICKETS as u64 * 4)?;
        device.fill("open", tickets.pointer(), 0, TICKETS * 4)?;
        let bins = workspace((options.slots as u64).saturating_mul(BINS_BYTES as u64))?;
        device.fill("open", bins.pointer(), 0, options.slots * BINS_BYTES)?;
        Ok(Cuda {
            scratch: Scratch::new(workspace(formed_bytes(options.tokens_max))?),
            partials: workspace(PARTIALS_BYTES)?,
            tickets,
            fuse: Fuse::default(),
            bins,
            sampled: workspace((options.slots as u64).saturating_mul(4))?,
            has_sampled: RefCell::new(vec![false; options.slots]),
            ring: RefCell::new(None),
            checked: RefCell::new(None),
            prepared: RefCell::default(),
            foreseen: RefCell::default(),
            latents: RefCell::default(),
            upload_times: Cell::default(),
            graphs: RefCell::default(),
            bucket: Cell::new(None),
            checks: RefCell::new(None),
            sizes: CudaSizes::new(&options),
            options,
            arena,
            programs,
            steps,
            device,
        })
    }

    /// What it was made with.
    pub fn options(&self) -> &CudaOptions {
        &self.options
    }

    /// How many bytes it takes for each thing.
    pub fn sizes(&self) -> &CudaSizes {
        &self.sizes
    }

    /// Takes the memory for things of one purpose from the driver in one piece, as far as there is that much, so that a
    /// load does not ask for each weight. What does not fit is refused when it is asked for.
    pub fn reserve(&self, purpose: Purpose, bytes: u64) -> Result<(), Error> {
        self.timed(|times| &mut times.memory, || self.arena.reserve(purpose, bytes))
    }

    /// Where the time of all uploads went.
    pub fn upload_times(&self) -> UploadTimes {
        self.upload_times.get()
    }

    /// Milliseconds that the device takes for what `body` launches.
    pub fn time(&self, body: &mut dyn FnMut() -> Result<(), Error>) -> Result<f32, Error> {
        let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        start.record()?;
        body()?;
        end.record()?;
        end.wait("time")?;
        end.since(&start)
    }

    /// Launches a kernel that runs over the rows of a step.
    pub(crate) fn launch(
        &self,
        operation: &'static str,
        function: Function,
        grid: Grid,
        args: &[Arg<'_>],
    ) -> Result<(), Error> {
        let Grid { blocks: [x, y, z], threads, shared, cluster } = grid;
        let [x, y, z, block, shared, cluster] = [x, y, z, threads, shared, cluster]
            .map(|count| u32::try_from(count).expect("grids are counted in 32 bits"));
        assert!(
            self.is_launching(),
            "{operation} launches outside of an operation that says what it touches"
        );
        self.programs.allow_shared(function, shared)?;
        self.device.launch(operation, &Launch { function, grid: [x, y, z], block, shared, cluster, args })
    }

    /// How many rows grids are made for: the step's own, or the largest of the bucket that is being recorded.
    pub(crate) fn grid_rows(&self, slot: &Slot, rows: Rows) -> usize {
        match (self.bucket.get(), rows) {
            (None, _) => slot.count(rows),
            (Some(bucket), Rows::Tokens) => bucket.tokens,
            (Some(bucket), Rows::Wanted) => bucket.wanted,
        }
    }

    /// A step's arrays as kernels take them. Counts are passed where they cannot change: outside of a recording, and in
    /// a bucket for steps of one row.
    pub(crate) fn device_step(&self, slot: &Slot) -> DeviceStep {
        let known = |rows| match (self.bucket.get(), self.grid_rows(slot, rows)) {
            (None, count) | (Some(_), count @ 0..=1) => int(count),
            (Some(_), _) => -1,
        };
        let mut step = slot.device_step();
        step.known = [known(Rows::Tokens), known(Rows::Wanted)];
        step
    }

    /// Whether a step's body is run for all steps of its bucket.
    pub(crate) fn is_recording(&self) -> bool {
        self.bucket.get().is_some()
    }

    /// Places of the longest sequence that grids are made for.
    pub(crate) fn grid_places(&self, slot: &Slot) -> usize {
        self.bucket.get().map_or(slot.place_max + 1, |bucket| bucket.places)
    }

    /// Runs a check, and remembers it where a step is being recorded.
    pub(crate) fn check(&self, slot: &Slot, check: Check) -> Result<(), Error> {
        if let Some(checks) = self.checks.borrow_mut().as_mut() {
            checks.push(check);
        }
        check.holds(slot)
    }

    /// Room for a weight of these parts. Packing kernels are compiled from here on, before anything else.
    fn weight(&self, parts: &[Part<'_>]) -> Result<Weight, Error> {
        let place = parts.first().map_or(WeightPlace::Device, |part| part.place);
        let weight = self.timed(
            |times| &mut times.memory,
            || match place {
                WeightPlace::Host => Weight::in_host(&self.device, &self.sizes, parts),
                _ => Weight::new(&self.arena, &self.sizes, parts),
            },
        )?;
        for part in &weight.parts {
            self.programs.prepare(crate::upload::packer(part.format));
            self.programs.prepare(Key::quant("embed.cu", part.format));
        }
        Ok(weight)
    }

    /// A weight that is multiplied by, with the products of its role; without a role, with all products.
    fn multiplied(&self, role: Option<Role>, parts: &[Part<'_>]) -> Result<Weight, Error> {
        land(parts, Content::Values, |parts| {
            let weight = self.weight(parts)?;
            if !self.device.abilities().wgmma && weight.parts.iter().any(|part| part.format.takes_floats8()) {
                let what = format!("tensor {}: {} on this chip", parts[0].view.name, Need::Floats8);
                return Err(Error::Unsupported { what, backend: self.device.name() });
            }
            self.timed(
                |times| &mut times.kernels,
                || {
                    self.prepare_products(&weight, role);
                    Ok(())
                },
            )?;
            self.fill(weight, parts)
        })
    }

    /// Sends the stored rows to where they belong, and compares some of them with the file.
    fn fill(&self, weight: Weight, parts: &[Part<'_>]) -> Result<Weight, Error> {
        let mut ring = self.ring.borrow_mut();
        let ring = match ring.as_mut() {
            Some(ring) => ring,
            None => ring.insert(Ring::new(&self.device)?),
        };
        let mut checked = self.checked.borrow_mut();
        self.send(ring, &mut checked, &weight, parts)?;
        let checked = match checked.as_mut() {
            Some(checked) => checked,
            None => checked.insert(Checks::new(&self.device)?),
        };
        self.timed(|times| &mut times.checking, || self.begin_check(checked, &weight, parts))?;
        parts.iter().for_each(|part| part.view.release());
        Ok(weight)
    }

    /// Begins to compile what a weight's products need.
    fn prepare_products(&self, weight: &Weight, role: Option<Role>) {
        let kinds = weight.parts.iter().map(|part| (part.format, part.rows, part.columns));
        // Layers are alike: to list the programs of each takes longer than to send a small one.
        if self.prepared.borrow_mut().insert((role, kinds.collect())) {
            self.products(&weight.parts, role).into_iter().for_each(|key| self.programs.prepare(key));
        }
    }

    /// Compares what was read back of new weights with the file. Nothing is computed before that.
    fn settle(&self) -> Result<(), Error> {
        match &mut *self.checked.borrow_mut() {
            Some(checks) => self.timed(|times| &mut times.checking, || checks.settle()),
            None => Ok(()),
        }
    }

    /// Counts the time of `body` to a part of a load's.
    fn timed<T>(
        &self,
        which: impl FnOnce(&mut UploadTimes) -> &mut Duration,
        body: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let started = Instant::now();
        let done = body()?;
        let mut times = self.upload_times.get();
        *which(&mut times) += started.elapsed();
        self.upload_times.set(times);
        Ok(done)
    }

    pub(crate) fn cut(&self, purpose: Purpose, bytes: u64) -> Result<Piece, Error> {
        self.arena.cut(purpose, bytes)
    }
}

impl Check {
    fn holds(self, slot: &Slot) -> Result<(), Error> {
        match self {
            Check::Tokens { rows } => slot.check_tokens(rows),
            Check::Positions { rows } => slot.check_positions(rows),
            Check::Pages { group, pages } => slot.check_pages(group, pages),
            Check::Adapters { count } => slot.check_adapters(count),
            Check::States { group, groups, pages } => slot.check_states(group, groups, pages),
        }
    }
}

impl Memory for Cuda {
    type Weight = Weight;
    type Buf = Buf;
    type Kv = Kv;

    fn upload(&self, parts: &[Part<'_>]) -> Result<Weight, Error> {
        self.multiplied(None, parts)
    }

    fn upload_for(&self, role: Role, parts: &[Part<'_>]) -> Result<Weight, Error> {
        self.multiplied(Some(role), parts)
    }

    fn upload_table(&self, parts: &[Part<'_>], tied: bool) -> Result<Weight, Error> {
        if tied {
            return self.upload_for(Role::Head, parts);
        }
        land(parts, Content::Values, |parts| self.fill(self.weight(parts)?, parts))
    }

    fn upload_experts(&self, parts: &[Part<'_>], experts: usize) -> Result<Weight, Error> {
        // Their slices follow from an expert's shape.
        if parts.iter().any(|part| part.whole.is_some()) {
            let what = format!("tensor {}: a shard of experts", parts[0].view.name);
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        land(parts, Content::Values, |parts| {
            let weight = self.weight(parts)?;
            if weight.parts.iter().any(|part| part.format.takes_floats8()) {
                let what = format!("tensor {}: experts times 8-bit floats", parts[0].view.name);
                return Err(Error::Unsupported { what, backend: self.device.name() });
            }
            self.programs.prepare(Key::plain("experts.cu"));
            self.programs_of_experts(&weight, experts).into_iter().for_each(|key| self.programs.prepare(key));
            self.fill(weight, parts)
        })
    }

    fn upload_heads(&self, parts: &[Part<'_>], heads: usize) -> Result<Weight, Error> {
        land(parts, Content::Values, |parts| {
            let weight = self.weight(parts)?;
            if weight.parts.iter().any(|part| part.format.takes_floats8()) {
                let what = format!("tensor {}: products of heads times 8-bit floats", parts[0].view.name);
                return Err(Error::Unsupported { what, backend: self.device.name() });
            }
            self.programs_of_heads(&weight, heads).into_iter().for_each(|key| self.programs.prepare(key));
            self.fill(weight, parts)
        })
    }

    fn upload_vector(&self, parts: &[Part<'_>]) -> Result<Buf, Error> {
        let mut values = Vec::new();
        for part in parts {
            let count = self.sizes.vector_values(part)?;
            let bytes = crate::gather::read(&part.view, part.view.bytes).map_err(|reason| Error::Device {
                backend: self.device.name(),
                operation: "upload",
                reason,
            })?;
            let mut stored = vec![0.0; part.view.values()];
            dequantize(part.view.dtype, &bytes, &mut stored).ok_or_else(|| Error::DType {
                tensor: part.view.name.to_owned(),
                dtype: part.view.dtype,
                backend: self.device.name(),
            })?;
            match &part.rows {
                None => values.extend(&stored),
                Some(rows) => values.extend(rows.iter().map(|&row| stored[row as usize])),
            }
            assert!(values.len() >= count, "a vector of {count} values");
            part.view.release();
        }
        self.upload_values(&values)
    }

    fn upload_values(&self, values: &[f32]) -> Result<Buf, Error> {
        let buf = self.alloc(Purpose::Weights, 1, values.len())?;
        self.device.write_kept("upload", buf.pointer(), bytemuck::cast_slice(values))?;
        Ok(buf)
    }

    fn alloc(&self, purpose: Purpose, rows: usize, columns: usize) -> Result<Buf, Error> {
        let buf = Buf::new(&self.arena, &self.sizes, purpose, rows, columns)?;
        self.poison(buf.pointer(), buf.bytes())?;
        Ok(buf)
    }

    fn alloc_kv(&self, spec: &KvSpec) -> Result<Kv, Error> {
        self.settle()?;
        let kv = Kv::new(&self.arena, &self.sizes, spec)?;
        for (attention, rotates) in self.foreseen.borrow().iter() {
            let keys = self.attention_programs(attention, *rotates, spec.dtype);
            keys.into_iter().for_each(|key| self.programs.prepare(key));
        }
        for heads in self.latents.borrow().iter() {
            let keys = latent_programs(*heads, spec.dtype, self.device.abilities());
            keys.into_iter().for_each(|key| self.programs.prepare(key));
        }
        if spec.groups.iter().any(|group| group.kind.is_state()) {
            self.programs.prepare(recurrence_program());
        }
        for (pointer, bytes) in kv.memory() {
            self.poison(pointer, bytes)?;
        }
        Ok(kv)
    }

    fn foresee(&self, attention: &Attention<Buf>, rotates: bool) {
        let mut foreseen = self.foreseen.borrow_mut();
        let Attention { heads, layer, scale, soft_cap, causal, chunk, .. } = *attention;
        let sinks = attention.sinks.as_ref().map(|_| ());
        // Layers may differ in what no program depends on.
        let alike = |(other, others): &(Attention<()>, bool)| {
            (other.heads, other.soft_cap.is_some(), other.sinks.is_some(), other.causal, *others)
                == (heads, soft_cap.is_some(), sinks.is_some(), causal, rotates)
                && other.chunk.is_some() == chunk.is_some()
        };
        if !foreseen.iter().any(alike) {
            let (ahead, reach) = (true, None);
            let attention = Attention { heads, layer, scale, soft_cap, sinks, causal, ahead, reach, chunk };
            foreseen.push((attention, rotates));
        }
    }

    fn foresee_latent(&self, attention: &LatentAttention) {
        self.latents.borrow_mut().insert(attention.heads);
    }

    fn ready(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<(), Error> {
        self.programs.ready(progress)
    }

    fn usage(&self) -> Usage {
        self.arena.usage()
    }

    fn supports(&self, need: Need) -> Result<(), Error> {
        if need == Need::Floats8 && !self.device.abilities().wgmma {
            return Err(Error::Unsupported { what: need.to_string(), backend: self.device.name() });
        }
        self.sizes.supports(need)
    }
}

impl Cuda {
    /// With debug assertions, memory starts as NaN in every float type, so that a read of unwritten memory is seen;
    /// otherwise it starts as zeros.
    fn poison(&self, pointer: u64, bytes: u64) -> Result<(), Error> {
        let byte = if cfg!(debug_assertions) { 0xff } else { 0 };
        self.device.fill("alloc", pointer, byte, usize::try_from(bytes).expect("allocated"))
    }
}

/// Operations of `Backend`, and the method in `ops` that does each.
macro_rules! done_in_ops {
    ($($operation:ident => $method:ident($($operand:ident: $type:ty),*);)*) => {
        $(fn $operation(&self, step: &Step, $($operand: $type),*) -> Result<(), Error> {
            self.$method(step.slot(), $($operand),*)
        })*
    };
}

impl Backend for Cuda {
    type Step = Step;

    fn name(&self) -> &'static str {
        self.device.name()
    }

    fn begin(&self, batch: &Batch) -> Result<Step, Error> {
        self.settle()?;
        self.scratch.forget();
        batch.needs().try_for_each(|need| self.supports(need))?;
        self.steps.begin(batch)
    }

    fn record(&self, step: &Step, body: &mut dyn FnMut() -> Result<(), Error>) -> Result<(), Error> {
        let slot = step.slot();
        let recordable =
            self.options.graphs && slot.decode && (1..=RECORDED_TOKENS_MAX).contains(&slot.tokens);
        let body = &mut || self.fused(slot, body);
        let done = if recordable { self.replay(slot, body) } else { body() };
        self.scratch.forget();
        done?;
        slot.done.record()?;
        slot.behind.set(true);
        Ok(())
    }

    fn finish(&self, mut step: Step) -> Result<Output, Error> {
        let slot = step.slot_mut();
        // Not after the next step, which may be running already: its end is not waited for here.
        if !slot.behind.get() {
            slot.done.record()?;
        }
        slot.done.wait("finish")?;
        let chosen: &[Chosen] = bytemuck::cast_slice(slot.chosen.bytes());
        let sampled = slot.results.drain(..).map(|outcome| match outcome {
            Outcome::Known(sampled) => sampled,
            Outcome::Device { index, logprob, mu } => {
                let chosen = chosen[index];
                match chosen.fault {
                    0 => Sampled {
                        token: chosen.token.cast_unsigned(),
                        logprob: logprob.then_some(chosen.logprob),
                        top: Vec::new(),
                        mu,
                        fault: None,
                    },
                    1 => Sampled::fault(SampleFault::Logits),
                    _ => Sampled::fault(SampleFault::NothingAllowed),
                }
            }
        });
        Ok(Output { sampled: sampled.collect() })
    }

    fn write(&self, buf: &mut Buf, row: usize, values: &[f32]) -> Result<(), Error> {
        let (rows, columns) = (buf.rows, buf.columns);
        let wanted = (row.saturating_add(values.len().div_ceil(columns.max(1))), columns);
        let start =
            row.checked_mul(columns).filter(|start| start.saturating_add(values.len()) <= rows * columns);
        let got = (rows, columns);
        let start = start.ok_or(Error::OperandShape { operation: "write", operand: "buf", got, wanted })?;
        self.scratch.forget();
        self.device.write("write", buf.pointer() + (start * 4) as u64, bytemuck::cast_slice(values))
    }

    fn read(&self, buf: &Buf, row: usize, rows: usize) -> Result<Vec<f32>, Error> {
        let end = row.saturating_add(rows);
        operands::fits("read", "buf", buf, (end, buf.columns))?;
        let mut values = vec![0.0; rows * buf.columns];
        let from = buf.pointer() + (row * buf.columns * 4) as u64;
        self.device.read("read", from, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    fn matmul(&self, step: &Step, rows: Rows, weight: &Weight, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        let call = Call { operation: "matmul", slot: step.slot(), rows };
        self.op_linear(call, Linear { weight, bias: None }, x, out, None)
    }

    fn linear(
        &self,
        step: &Step,
        rows: Rows,
        weight: &Weight,
        bias: Option<&Buf>,
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let call = Call { operation: "linear", slot: step.slot(), rows };
        self.op_linear(call, Linear { weight, bias }, x, out, None)
    }

    fn linear_add(
        &self,
        step: &Step,
        rows: Rows,
        linear: Linear<'_, Cuda>,
        x: &Buf,
        room: &mut Buf,
        residual: &mut Buf,
    ) -> Result<(), Error> {
        let call = Call { operation: "linear_add", slot: step.slot(), rows };
        self.op_linear(call, linear, x, residual, Some(room))
    }

    fn add_vector(&self, step: &Step, rows: Rows, vector: &Buf, x: &mut Buf) -> Result<(), Error> {
        self.op_add("add_vector", step.slot(), rows, vector, x)
    }

    fn add(&self, step: &Step, rows: Rows, y: &Buf, x: &mut Buf) -> Result<(), Error> {
        self.op_add("add", step.slot(), rows, y, x)
    }

    done_in_ops! {
        embed => op_embed(table: &Weight, out: &mut Buf);
        add_positions => op_add_positions(table: &Weight, x: &mut Buf);
        pointwise => op_pointwise(rows: Rows, function: Pointwise, x: &mut Buf);
        scale_columns => op_scale_columns(factors: &Buf, x: &mut Buf);
        norm => op_norm(rows: Rows, norm: &Norm<Buf>, x: &Buf, out: &mut Buf);
        qk_norm => op_qk_norm(heads: Heads, norm: &QkNorm<Buf>, qkv: &mut Buf);
        rope => op_rope(heads: Heads, rope: &Rope<Buf>, qkv: &mut Buf);
        kv_write => op_kv_write(heads: Heads, layer: KvLayer, qkv: &Buf, kv: &mut Kv);
        attention => op_attention(attention: &Attention<Buf>, qkv: &Buf, kv: &Kv, out: &mut Buf);
        attend => op_attend(attention: &Attention<Buf>, rope: Option<&Rope<Buf>>, qkv: &mut Buf, kv: &mut Kv, out: &mut Buf);
        glu => op_glu(kind: Glu, gate_up: &Buf, out: &mut Buf);
        add_gated => op_add_gated(gate: &Buf, y: &Buf, x: &mut Buf);
        low_rank => op_low_rank(changes: &[Vec<LowRank<Buf>>], x: &Buf, out: &mut Buf);
        short_conv => op_short_conv(conv: &ShortConv<Buf>, x: &Buf, kv: &mut Kv, out: &mut Buf);
        delta_rule => op_delta_rule(rule: &DeltaRule<Buf>, qkv: &mut Buf, mixed: &mut Buf, kv: &mut Kv, out: &mut Buf);
        selective_scan => op_selective_scan(scan: &SelectiveScan<Buf>, x: &Buf, mixed: &mut Buf, kv: &mut Kv, out: &mut Buf);
        channel_scan => op_channel_scan(scan: &ChannelScan<Buf>, inputs: &ChannelInputs<'_, Buf>, steps: &mut Buf, kv: &mut Kv, out: &mut Buf);
        gated_norm => op_gated_norm(norm: &GatedNorm<Buf>, gates: &Buf, x: &mut Buf);
        sigmoid_gate => op_sigmoid_gate(gates: &Buf, x: &mut Buf);
        glu_beside => op_glu_beside(kind: Glu, up: &Buf, column: usize, gate: &mut Buf);
        scale_chosen => op_scale_chosen(scales: &Buf, chosen: &mut Buf);
        scale_by_position => op_scale_by_position(temperature: Temperature, columns: usize, x: &mut Buf);
        head_products => op_head_products(products: &HeadProducts<'_, Cuda>, x: &Buf, out: &mut Buf);
        latent_write => op_latent_write(attention: &LatentAttention, latent: &Buf, turned: &Buf, kv: &mut Kv);
        latent_attention => op_latent_attention(attention: &LatentAttention, queries: &Buf, absorbed: &Buf, kv: &Kv, out: &mut Buf);
        route => op_route(routing: &Routing, logits: &Buf, correction: Option<&Buf>, chosen: &mut Buf);
        experts => op_experts(experts: &Experts<'_, Cuda>, chosen: &Buf, x: &Buf, room: &mut ExpertRoom<Buf>, residual: &mut Buf);
        gather_wanted => op_gather(x: &Buf, out: &mut Buf);
        pool => op_pool(pooling: Pooling, x: &Buf, out: &mut Buf);
    }

    fn sample(&self, step: &mut Step, logits: &Buf, rows: &[SampleRow<'_>]) -> Result<(), Error> {
        self.op_sample(step.slot_mut(), logits, rows)
    }
}

impl Cuda {
    /// Runs a step's body the first time, records it the second time and replays it from then on. A recording holds
    /// addresses, so it becomes stale when memory is allocated or freed.
    fn replay(&self, slot: &Slot, body: &mut dyn FnMut() -> Result<(), Error>) -> Result<(), Error> {
        let places = (slot.place_max + 1).next_power_of_two().max(512);
        let bucket = Bucket {
            slot: slot.index,
            tokens: bucket_rows(slot.tokens),
            wanted: bucket_rows(slot.wanted),
            adapted: slot.adapter_max.is_some(),
            places,
        };
        let now = self.arena.generation();
        let mut graphs = self.graphs.borrow_mut();
        match graphs.get(&bucket) {
            Some(Recorded::Graph { graph, generation, checks }) if *generation == now => {
                checks.iter().try_for_each(|check| check.holds(slot))?;
                self.check_sampled(slot)?;
                graph.launch()
            }
            Some(Recorded::Seen { generation }) if *generation == now => {
                self.bucket.set(Some(bucket));
                self.checks.replace(Some(Vec::new()));
                let graph = Graph::record(&self.device, body);
                self.bucket.set(None);
                let checks = self.checks.take().unwrap_or_default();
                let graph = graph?;
                graph.launch()?;
                graphs.insert(bucket, Recorded::Graph { graph, generation: now, checks });
                Ok(())
            }
            _ => {
                // Stale graphs are useless, whatever their bucket.
                graphs.retain(|_, recorded| match recorded {
                    Recorded::Seen { generation } | Recorded::Graph { generation, .. } => *generation == now,
                });
                self.bucket.set(Some(bucket));
                let done = body();
                self.bucket.set(None);
                done?;
                graphs.insert(bucket, Recorded::Seen { generation: now });
                Ok(())
            }
        }
    }

    /// Refuses a step that uses a sampled token where none was sampled.
    pub(crate) fn check_sampled(&self, slot: &Slot) -> Result<(), Error> {
        let has = self.has_sampled.borrow();
        match slot.sampled_slots.iter().find(|&&slot| !has[slot as usize]) {
            Some(&slot) => Err(Error::NothingSampled { slot }),
            None => Ok(()),
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // The device must not use any of what follows. A lost device answers with an error, which is as good.
        self.device.synchronize("close").ok();
        self.graphs.get_mut().clear();
    }
}

impl Cuda {
    pub(crate) fn generation(&self) -> u64 {
        self.arena.generation()
    }
}

#[cfg(test)]
mod tests;
