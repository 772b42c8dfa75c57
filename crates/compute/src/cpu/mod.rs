//! The CPU backend: scalar code that is the specification, and vector code chosen at run time.
//!
//! Memory is host memory, counted as if it were a device's. An operation runs when it is called and is over when it
//! returns, so a step is never in flight behind the caller's back. [`Cpu`] checks what an operation was given and
//! hands plain slices to the operation's own file.

#![expect(
    unsafe_code,
    reason = "threads share slices in parts, vector code needs its features detected, memory is aligned"
)]

mod attention;
mod cores;
mod disjoint;
mod exp;
mod experts;
mod glu;
mod latent;
mod low_rank;
mod matmul;
mod memory;
mod norm;
mod pool;
mod quant;
mod recurrence;
mod ring;
mod rope;
mod step;
mod watch;
pub(crate) mod widest;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

pub use memory::{Buf, CpuSizes, Kv, Weight, dequantize, expand_rows};
pub use quant::{Run, Runs, Simd};
pub use ring::{CpuRing, CpuRingOptions, RingMatrix};
pub use step::Step;
pub use watch::{Seen, Watch};

use disjoint::{Disjoint, for_each_row};
use matmul::{HeadShares, Multiplier};
use memory::{Block, Ledger};
use pool::Pool;
use step::{Slot, Steps};

use crate::batch::below;
use crate::landing::{Content, land};
use crate::operands::{self, fits};
use crate::{
    Attention, Backend, Batch, Between, ChannelInputs, ChannelScan, DeltaRule, Error, ExpertRoom, Experts,
    GatedNorm, Glu, HeadProducts, Heads, KvLayer, KvSpec, LatentAttention, LowRank, Memory, Need, Norm,
    Output, PageCopy, PageId, Part, Pointwise, Pooling, Purpose, QkNorm, Rope, Routing, Rows, SampleRow,
    SampleScratch, SelectiveScan, ShortConv, Sizes, Temperature, Token, Usage, sample,
};

const NAME: &str = "cpu";

/// f32 values that each thread has for itself: a page of keys and values with its queries' states, or some columns of
/// sixteen weight rows and their products with a pass of activations.
const THREAD_SCRATCH_VALUES: usize = 1 << 18;
/// The longest row of a weight: one of them fits the room for activations and a thread's scratch.
const COLUMNS_MAX: usize = 1 << 17;
/// Room for activations on their way into a product: as much as the second cache of most processors holds. More of them
/// go in several passes. One row of the widest weight fits, as integers and as floats.
const ACTIVATION_SCRATCH_BYTES: usize = 1 << 20;

/// What activations are when they meet quantised weights. Each mode has its own scalar specification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// Weights are dequantised, products are f32.
    Float,
    /// Activations are integers of 16 bits with a scale for each 32 of them; products are exact integers among values
    /// that share their scales. As good as float (see the specification in `cpu/quant/activations.rs`), and faster.
    #[default]
    Integer,
    /// Activations and weights are one f16 for each value (see the specification in `cpu/quant/halves.rs`), as tensor
    /// cores of GPUs take them. On the CPU by scalar code alone: it is what such devices are held against.
    Half,
}

/// How a CPU backend is made.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Threads that compute, the caller's included.
    pub threads: usize,
    /// What activations are when they meet quantised weights.
    pub activations: Activations,
    /// The vector instructions to use.
    pub simd: Simd,
    /// The most bytes to allocate; `None` means what the machine has.
    pub memory_limit: Option<u64>,
    /// The largest batch, in tokens.
    pub tokens_max: usize,
    /// Sequence slots: the largest batch in rows.
    pub slots: usize,
    /// Steps that may be begun while another one is unfinished.
    pub depth: usize,
    /// Where inputs of products are counted, if they are.
    pub watch: Option<Arc<Watch>>,
}

impl Default for CpuOptions {
    /// The processors that this process may use, of one memory node; the best instructions, batches of 512 tokens of 16
    /// sequences.
    fn default() -> CpuOptions {
        CpuOptions {
            threads: cores::threads_by_default(),
            activations: Activations::default(),
            simd: Simd::detect(),
            memory_limit: None,
            tokens_max: 512,
            slots: 16,
            depth: 1,
            watch: None,
        }
    }
}

/// The CPU as a device.
pub struct Cpu {
    options: CpuOptions,
    sizes: CpuSizes,
    ledger: Arc<Ledger>,
    pool: Pool,
    scratch: RefCell<Scratch>,
    steps: Rc<Steps>,
    /// The token last sampled into each slot.
    sampled: RefCell<Vec<Option<u32>>>,
}

/// Memory that operations use while they run.
struct Scratch {
    /// Quantised activations, shared.
    activations: Block,
    /// The same stretch for each thread.
    threads: Block,
    /// One for each thread.
    samplers: Vec<SampleScratch>,
    /// Who goes to which expert.
    places: experts::Places,
}

impl Cpu {
    /// Starts the threads and allocates the workspace.
    pub fn new(options: CpuOptions) -> Result<Cpu, Error> {
        if options.activations == Activations::Half && options.simd != Simd::Scalar {
            let what = format!("half activations by {}", options.simd.name());
            return Err(Error::Unsupported { what, backend: NAME });
        }
        if !Simd::present().any(|simd| simd == options.simd) {
            return Err(Error::Unsupported { what: options.simd.name().to_owned(), backend: NAME });
        }
        if options.threads == 0 {
            return Err(Error::Unsupported { what: "a backend of 0 threads".to_owned(), backend: NAME });
        }
        let ledger = Ledger::new(options.memory_limit.unwrap_or_else(memory_bytes));
        let block = |bytes: usize| Block::new(&ledger, Purpose::Workspace, bytes as u64);
        let scratch = Scratch {
            activations: block(ACTIVATION_SCRATCH_BYTES)?,
            threads: block(options.threads.saturating_mul(THREAD_SCRATCH_VALUES * size_of::<f32>()))?,
            samplers: (0..options.threads).map(|_| SampleScratch::default()).collect(),
            places: experts::Places::default(),
        };
        let steps = Steps::new(&ledger, options.depth.saturating_add(1), options.tokens_max, options.slots)?;
        let pool = Pool::new(options.threads)
            .map_err(|reason| Error::Threads { threads: options.threads, reason })?;
        Ok(Cpu {
            sizes: CpuSizes::new(&options),
            ledger,
            pool,
            scratch: RefCell::new(scratch),
            steps,
            sampled: RefCell::new(vec![None; options.slots]),
            options,
        })
    }

    /// The specification: one thread, scalar code, everything else by default.
    pub fn reference(activations: Activations) -> Result<Cpu, Error> {
        Cpu::new(CpuOptions { threads: 1, simd: Simd::Scalar, activations, ..CpuOptions::default() })
    }

    fn multiplier<'a>(&'a self, panels: &'a mut Block, scratch: &'a mut Block) -> Multiplier<'a> {
        let CpuOptions { simd, activations, .. } = self.options;
        Multiplier { pool: &self.pool, simd, activations, panels, scratch }
    }

    /// The gated activation of whole rows.
    fn gate(&self, kind: Glu, columns: usize, gate_up: &[f32], out: &mut [f32]) {
        glu::glu(&self.pool, self.options.simd, kind, columns, gate_up, out);
    }

    /// What it was made with.
    pub fn options(&self) -> &CpuOptions {
        &self.options
    }

    /// What it takes for each thing.
    pub fn sizes(&self) -> &CpuSizes {
        &self.sizes
    }
}

/// Bytes of memory that the machine has.
fn memory_bytes() -> u64 {
    // SAFETY: sysconf reads a number and has no preconditions.
    let (pages, page_bytes) =
        unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    // A system that does not tell is taken at its allocator's word.
    match (u64::try_from(pages), u64::try_from(page_bytes)) {
        (Ok(pages), Ok(page_bytes)) => pages.saturating_mul(page_bytes),
        _ => u64::MAX,
    }
}

impl Memory for Cpu {
    type Weight = Weight;
    type Buf = Buf;
    type Kv = Kv;

    fn upload(&self, parts: &[Part<'_>]) -> Result<Weight, Error> {
        let mut weight =
            land(parts, Content::Values, |parts| Weight::new(&self.ledger, &self.sizes, &self.pool, parts))?;
        if self.options.watch.is_some() {
            weight.named(parts);
        }
        Ok(weight)
    }

    fn upload_vector(&self, parts: &[Part<'_>]) -> Result<Buf, Error> {
        Buf::vector(&self.ledger, &self.sizes, parts)
    }

    fn upload_values(&self, values: &[f32]) -> Result<Buf, Error> {
        let mut buf = self.alloc(Purpose::Weights, 1, values.len())?;
        buf.values_mut().copy_from_slice(values);
        Ok(buf)
    }

    fn alloc(&self, purpose: Purpose, rows: usize, columns: usize) -> Result<Buf, Error> {
        Buf::new(&self.ledger, &self.sizes, purpose, rows, columns)
    }

    fn alloc_kv(&self, spec: &KvSpec) -> Result<Kv, Error> {
        Kv::new(&self.ledger, &self.sizes, spec)
    }

    fn usage(&self) -> Usage {
        self.ledger.usage()
    }

    fn supports(&self, need: Need) -> Result<(), Error> {
        self.sizes.supports(need)
    }
}

/// Refuses pages that are not of this layer's shape, and page tables that name other pages than the pool has.
fn pages_fit(
    operation: &'static str,
    step: &Slot,
    heads: Heads,
    layer: KvLayer,
    kv: &Kv,
) -> Result<(), Error> {
    let group = kv.group(layer);
    operands::pages_fit(operation, heads, group)?;
    step.check_pages(layer.group, group.pages)
}

impl Backend for Cpu {
    type Step = Step;

    fn name(&self) -> &'static str {
        NAME
    }

    fn begin(&self, batch: &Batch) -> Result<Step, Error> {
        batch.needs().try_for_each(|need| self.supports(need))?;
        self.steps.begin(batch)
    }

    fn record(&self, _step: &Step, body: &mut dyn FnMut() -> Result<(), Error>) -> Result<(), Error> {
        body()
    }

    fn finish(&self, step: Step) -> Result<Output, Error> {
        Ok(Output { sampled: step.slot().sampled().to_vec() })
    }

    fn write(&self, buf: &mut Buf, row: usize, values: &[f32]) -> Result<(), Error> {
        let (rows, columns) = (buf.rows, buf.columns);
        let start = row.checked_mul(columns);
        let to = start.and_then(|start| buf.values_mut().get_mut(start..start.checked_add(values.len())?));
        let wanted = (row.saturating_add(values.len().div_ceil(columns.max(1))), columns);
        let got = (rows, columns);
        to.ok_or(Error::OperandShape { operation: "write", operand: "buf", got, wanted })?
            .copy_from_slice(values);
        Ok(())
    }

    fn read(&self, buf: &Buf, row: usize, rows: usize) -> Result<Vec<f32>, Error> {
        let end = row.saturating_add(rows);
        fits("read", "buf", buf, (end, buf.columns))?;
        Ok(buf.values()[row * buf.columns..end * buf.columns].to_vec())
    }

    fn copy_out(&self, kv: &Kv, group: usize, page: PageId) -> Result<PageCopy, Error> {
        kv.copy_out(group, page)
    }

    fn copy_in(&self, kv: &mut Kv, group: usize, page: PageId, copy: &PageCopy) -> Result<(), Error> {
        kv.copy_in(group, page, copy)
    }

    fn embed(&self, step: &Step, table: &Weight, out: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns) = (step.tokens().len(), table.columns);
        fits("embed", "out", out, (count, columns))?;
        let table = table.matrix();
        let sampled = self.sampled.borrow();
        let sampled: &[Option<u32>] = &sampled;
        let given = step.given();
        // The table's row of a token, or the given one.
        let row = |token| match token {
            Token::Known(id) => Ok(Ok(id)),
            Token::Sampled(slot) => sampled[slot as usize].ok_or(Error::NothingSampled { slot }).map(Ok),
            Token::Given(row) => Ok(Err(&given.values[row as usize * given.columns..][..given.columns])),
        };
        for &token in step.tokens() {
            match row(token)? {
                Ok(id) => below("token", id as usize, table.rows)?,
                Err(given) if given.len() >= columns && given.len().is_multiple_of(columns) => {}
                Err(given) => {
                    let (got, wanted) = ((1, given.len()), (1, columns));
                    return Err(Error::OperandShape { operation: "embed", operand: "given", got, wanted });
                }
            }
        }
        for_each_row(&self.pool, &mut out.values_mut()[..count * columns], columns, |at, out| {
            match row(step.tokens()[at]).expect("checked above") {
                Ok(id) => table.expand_row(id as usize, out),
                Err(given) => out.copy_from_slice(&given[..columns]),
            }
        });
        Ok(())
    }

    fn add_given(&self, step: &Step, column: usize, x: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns, given) = (step.tokens().len(), x.columns, step.given());
        fits("add_given", "x", x, (count, columns))?;
        let end = column.saturating_add(columns);
        if given.rows() > 0 && end > given.columns {
            let (got, wanted) = ((1, given.columns), (1, end));
            return Err(Error::OperandShape { operation: "add_given", operand: "given", got, wanted });
        }
        for_each_row(&self.pool, &mut x.values_mut()[..count * columns], columns, |at, x| {
            if let Token::Given(row) = step.tokens()[at] {
                add(&given.values[row as usize * given.columns + column..][..columns], x);
            }
        });
        Ok(())
    }

    fn matmul(&self, step: &Step, rows: Rows, weight: &Weight, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let count = step.count(rows);
        operands::linear("matmul", count, weight, None, x, out)?;
        let scratch = &mut *self.scratch.borrow_mut();
        let mut multiplier = self.multiplier(&mut scratch.activations, &mut scratch.threads);
        let (x, out) = (&x.values()[..count * weight.columns], &mut out.values_mut()[..count * weight.rows]);
        if let Some(watch) = &self.options.watch {
            watch.see(&weight.names, (0, 1), weight.columns, x);
        }
        multiplier.multiply(weight.matrix(), x, out);
        Ok(())
    }

    fn add_vector(&self, step: &Step, rows: Rows, vector: &Buf, x: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns) = (step.count(rows), x.columns);
        operands::pair("add_vector", ("vector", vector), ("x", x), (1, count))?;
        let vector = vector.row(0);
        for_each_row(&self.pool, &mut x.values_mut()[..count * columns], columns, |_, x| add(vector, x));
        Ok(())
    }

    fn add(&self, step: &Step, rows: Rows, y: &Buf, x: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns) = (step.count(rows), x.columns);
        operands::pair("add", ("y", y), ("x", x), (count, count))?;
        let y = y.values();
        for_each_row(&self.pool, &mut x.values_mut()[..count * columns], columns, |row, x| {
            add(&y[row * columns..][..columns], x)
        });
        Ok(())
    }

    fn add_positions(&self, step: &Step, table: &Weight, x: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let (positions, columns) = (step.positions(), table.columns);
        fits("add_positions", "x", x, (positions.len(), columns))?;
        let table = table.matrix();
        for &position in positions {
            below("position", position as usize, table.rows)?;
        }
        let scratch = &mut *self.scratch.borrow_mut();
        let room = &mut scratch.threads.values_mut()[..columns];
        for (x, &position) in x.values_mut().chunks_exact_mut(columns).zip(positions) {
            table.expand_row(position as usize, room);
            add(room, x);
        }
        Ok(())
    }

    fn pointwise(&self, step: &Step, rows: Rows, function: Pointwise, x: &mut Buf) -> Result<(), Error> {
        let (count, columns) = (step.slot().count(rows), x.columns);
        fits("pointwise", "x", x, (count, columns))?;
        let x = &mut x.values_mut()[..count * columns];
        glu::pointwise(&self.pool, self.options.simd, function, columns, x);
        Ok(())
    }

    fn scale_columns(&self, step: &Step, factors: &Buf, x: &mut Buf) -> Result<(), Error> {
        let (count, columns) = (step.slot().tokens().len(), x.columns);
        operands::pair("scale_columns", ("factors", factors), ("x", x), (1, count))?;
        let factors = factors.row(0);
        for_each_row(&self.pool, &mut x.values_mut()[..count * columns], columns, |_, x| {
            x.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
        });
        Ok(())
    }

    fn norm(&self, step: &Step, rows: Rows, norm: &Norm<Buf>, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns) = (step.count(rows), norm.weight.columns);
        operands::norm("norm", norm)?;
        fits("norm", "x", x, (count, columns))?;
        fits("norm", "out", out, (count, columns))?;
        let (x, out) = (&x.values()[..count * columns], &mut out.values_mut()[..count * columns]);
        norm::norm(&self.pool, self.options.simd, row_norm(norm), x, out);
        Ok(())
    }

    fn qk_norm(&self, step: &Step, heads: Heads, norm: &QkNorm<Buf>, qkv: &mut Buf) -> Result<(), Error> {
        let (count, columns) = (step.slot().tokens().len(), heads.qkv_columns());
        operands::qk_norm(count, heads, norm, qkv)?;
        let norms = ([row_norm(&norm.query), row_norm(&norm.key)], norm.value.as_ref().map(row_norm));
        let qkv = &mut qkv.values_mut()[..count * columns];
        norm::qk_norm(&self.pool, self.options.simd, heads, norms, qkv);
        Ok(())
    }

    fn rope(&self, step: &Step, heads: Heads, rope: &Rope<Buf>, qkv: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns) = (step.tokens().len(), heads.qkv_columns());
        operands::rope(count, heads, rope, qkv)?;
        let rotation = rope::Rotation {
            frequencies: rope.frequencies.row(0),
            magnitude: rope.magnitude,
            positions: step.positions(),
            pairs: &rope.sections,
            sections: step.sections(),
        };
        rope::rotate(
            &self.pool,
            self.options.simd,
            heads,
            &rotation,
            &mut qkv.values_mut()[..count * columns],
        );
        Ok(())
    }

    fn kv_write(
        &self,
        step: &Step,
        heads: Heads,
        layer: KvLayer,
        qkv: &Buf,
        kv: &mut Kv,
    ) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns) = (step.tokens().len(), heads.qkv_columns());
        fits("kv_write", "qkv", qkv, (count, columns))?;
        pages_fit("kv_write", step, heads, layer, kv)?;
        let dtype = kv.dtype;
        let (geometry, pages) = kv.pages_mut(layer);
        let writer = attention::Writer { heads, group: layer.group, dtype, geometry, pages };
        writer.write(&self.pool, step, qkv.values());
        Ok(())
    }

    fn attention(
        &self,
        step: &Step,
        attention: &Attention<Buf>,
        qkv: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let step = step.slot();
        let (heads, count) = (attention.heads, step.tokens().len());
        let group = kv.group(attention.layer);
        operands::attention(count, attention, qkv, group, out)?;
        step.check_pages(attention.layer.group, group.pages)?;
        let (sharing, rest) = (heads.query / heads.kv, heads.query % heads.kv);
        if rest > 0 || attention::scratch_values(heads) > THREAD_SCRATCH_VALUES {
            let what =
                format!("attention of {sharing} query heads, {rest} over, per K/V head of {}", heads.dim);
            return Err(Error::Unsupported { what, backend: NAME });
        }
        let layer = attention::Layer {
            heads,
            scale: attention.scale,
            soft_cap: attention.soft_cap,
            sinks: attention.sinks.as_ref().map(|sinks| sinks.row(0)),
            causal: attention.causal,
            reach: attention.reach.map(|reach| reach as usize),
            chunk: attention.chunk.map(|chunk| chunk as usize).filter(|chunk| *chunk > 0),
            group: attention.layer.group,
            columns: qkv.columns,
            window: group.window,
            dtype: kv.dtype,
            pages: kv.pages(attention.layer),
        };
        let scratch = &mut *self.scratch.borrow_mut();
        let (scratch, out) = (scratch.threads.values_mut(), out.values_mut());
        layer.attend(&self.pool, self.options.simd, step, qkv.values(), scratch, out);
        Ok(())
    }

    fn glu(&self, step: &Step, kind: Glu, gate_up: &Buf, out: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns) = (step.tokens().len(), out.columns);
        operands::glu(count, gate_up, out)?;
        let out = &mut out.values_mut()[..count * columns];
        self.gate(kind, columns, gate_up.values(), out);
        Ok(())
    }

    fn add_gated(&self, step: &Step, gate: &Buf, y: &Buf, x: &mut Buf) -> Result<(), Error> {
        let (count, columns) = (step.slot().tokens().len(), x.columns);
        operands::add_gated(count, gate, y, x)?;
        let (gate, y) = (gate.values(), y.values());
        for_each_row(&self.pool, &mut x.values_mut()[..count * columns], columns, |row, x| {
            let share = 1.0 / (1.0 + exp::exp(-gate[row]));
            let y = &y[row * columns..][..columns];
            x.iter_mut().zip(y).for_each(|(x, y)| *x += share * y);
        });
        Ok(())
    }

    fn low_rank(
        &self,
        step: &Step,
        changes: &[Vec<LowRank<Buf>>],
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let (slot, columns) = (step.slot(), out.columns);
        let count = slot.tokens().len();
        operands::low_rank(count, changes, x, out)?;
        if let Some(adapter) = slot.adapters().iter().flatten().max() {
            below("adapter", *adapter as usize, changes.len())?;
        }
        let (x_columns, x) = (x.columns, x.values());
        for (adapter, changes) in changes.iter().enumerate() {
            let here = slot.adapters().iter().flatten().any(|named| *named as usize == adapter);
            for change in changes.iter().filter(|_| here) {
                let (down, up, scale) = (change.down.values(), change.up.values(), change.scale);
                let changed = change.column..change.column + change.columns;
                for_each_row(&self.pool, &mut out.values_mut()[..count * columns], columns, |token, out| {
                    if slot.adapter(token) == Some(adapter) {
                        let x = &x[token * x_columns..][..x_columns];
                        low_rank::add(down, up, scale, x, &mut out[changed.clone()]);
                    }
                });
            }
        }
        Ok(())
    }

    fn short_conv(
        &self,
        step: &Step,
        conv: &ShortConv<Buf>,
        x: &Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns) = (step.tokens().len(), x.columns);
        let group = kv.group(conv.layer);
        operands::short_conv(count, conv, x, group, out)?;
        let states = step.state_group(conv.layer.group, group.pages)?;
        let (values, each) = kv.states_mut(conv.layer);
        let states = recurrence::States::new(values, each, states);
        let conv = recurrence::Conv {
            channels: conv.channels,
            taps: conv.taps,
            weight: conv.weight.row(0),
            bias: conv.bias.as_ref().map(|bias| bias.row(0)),
            form: conv.form,
        };
        let out = &mut out.values_mut()[..count * conv.channels];
        conv.run((&self.pool, self.options.simd), step, (x.values(), columns), &states, out);
        Ok(())
    }

    fn delta_rule(
        &self,
        step: &Step,
        rule: &DeltaRule<Buf>,
        qkv: &mut Buf,
        mixed: &mut Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns, heads) = (step.tokens().len(), mixed.columns, rule.heads);
        let group = kv.group(rule.layer);
        operands::delta_rule(count, rule, (qkv, mixed), group, out)?;
        let states = step.state_group(rule.layer.group, group.pages)?;
        let (values, each) = kv.states_mut(rule.layer);
        let states = recurrence::States::new(values, each, states);
        let qkv = &mut qkv.values_mut()[..count * heads.columns()];
        let mixed = &mut mixed.values_mut()[..count * columns];
        let vectors = (rule.rate.row(0), rule.bias.row(0));
        recurrence::Delta::prepare(&self.pool, heads, vectors, qkv, (mixed, columns));
        let delta = recurrence::Delta { heads, qkv, mixed, columns };
        let out = out.values_mut();
        recurrence::recur((&self.pool, self.options.simd), &delta, step, rule.before, &states, out);
        Ok(())
    }

    fn selective_scan(
        &self,
        step: &Step,
        scan: &SelectiveScan<Buf>,
        x: &Buf,
        mixed: &mut Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let step = step.slot();
        let (count, columns, heads) = (step.tokens().len(), mixed.columns, scan.heads);
        let group = kv.group(scan.layer);
        operands::selective_scan(count, scan, (x, mixed), group, out)?;
        let states = step.state_group(scan.layer.group, group.pages)?;
        let (values, each) = kv.states_mut(scan.layer);
        let states = recurrence::States::new(values, each, states);
        let mixed = &mut mixed.values_mut()[..count * columns];
        recurrence::Scan::prepare(&self.pool, scan.bias.row(0), (mixed, columns));
        let (rate, skip) = (scan.rate.row(0), scan.skip.row(0));
        let rule = recurrence::Scan { heads, x: x.values(), mixed, columns, rate, skip };
        let out = out.values_mut();
        recurrence::recur((&self.pool, self.options.simd), &rule, step, scan.before, &states, out);
        Ok(())
    }

    fn channel_scan(
        &self,
        step: &Step,
        scan: &ChannelScan<Buf>,
        inputs: &ChannelInputs<'_, Buf>,
        steps: &mut Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let step = step.slot();
        let count = step.tokens().len();
        let group = kv.group(scan.layer);
        operands::channel_scan(count, scan, inputs, (&*steps, &*out), group)?;
        let states = step.state_group(scan.layer.group, group.pages)?;
        let (values, each) = kv.states_mut(scan.layer);
        let states = recurrence::States::new(values, each, states);
        let (channels, state) = (scan.channels, scan.state);
        let steps = &mut steps.values_mut()[..count * channels];
        recurrence::Scan::prepare(&self.pool, scan.bias.row(0), (steps, channels));
        let rule = recurrence::Channels {
            channels,
            state,
            x: inputs.x.values(),
            keys: inputs.keys.values(),
            queries: inputs.queries.values(),
            steps,
            rates: scan.rates.row(0),
            skip: scan.skip.row(0),
        };
        let out = out.values_mut();
        recurrence::recur((&self.pool, self.options.simd), &rule, step, scan.before, &states, out);
        Ok(())
    }

    fn gated_norm(&self, step: &Step, norm: &GatedNorm<Buf>, gates: &Buf, x: &mut Buf) -> Result<(), Error> {
        let (count, columns) = (step.slot().tokens().len(), x.columns);
        operands::gated_norm(count, norm, gates, x)?;
        recurrence::gated_norm(
            (&self.pool, self.options.simd),
            (norm.norm.as_ref().map(row_norm), norm.group, norm.order),
            (gates.values(), gates.columns, norm.column),
            (&mut x.values_mut()[..count * columns], columns),
        );
        Ok(())
    }

    fn sigmoid_gate(&self, step: &Step, gates: &Buf, x: &mut Buf) -> Result<(), Error> {
        let (count, columns) = (step.slot().tokens().len(), x.columns);
        operands::pair("sigmoid_gate", ("gates", gates), ("x", x), (count, count))?;
        let x = &mut x.values_mut()[..count * columns];
        recurrence::sigmoid_gate(&self.pool, columns, gates.values(), x);
        Ok(())
    }

    fn glu_beside(
        &self,
        step: &Step,
        kind: Glu,
        up: &Buf,
        column: usize,
        gate: &mut Buf,
    ) -> Result<(), Error> {
        let (count, columns) = (step.slot().tokens().len(), gate.columns);
        operands::glu_beside(count, up, column, gate)?;
        let gate = &mut gate.values_mut()[..count * columns];
        glu::beside(&self.pool, self.options.simd, kind, (columns, |row| &up.row(row)[column..]), gate);
        Ok(())
    }

    fn scale_chosen(&self, step: &Step, scales: &Buf, chosen: &mut Buf) -> Result<(), Error> {
        let (count, columns) = (step.slot().tokens().len(), chosen.columns);
        operands::scale_chosen(count, scales, chosen)?;
        let scales = scales.row(0);
        let rows = chosen.values_mut()[..count * columns].chunks_exact_mut(columns);
        experts::scale_chosen(rows, scales)
    }

    fn scale_by_position(
        &self,
        step: &Step,
        temperature: Temperature,
        columns: usize,
        x: &mut Buf,
    ) -> Result<(), Error> {
        let (positions, all) = (step.slot().positions(), x.columns);
        operands::scale_by_position(positions.len(), columns, x)?;
        for_each_row(&self.pool, &mut x.values_mut()[..positions.len() * all], all, |row, x| {
            let factor = temperature.at(positions[row]);
            x[..columns].iter_mut().for_each(|x| *x *= factor);
        });
        Ok(())
    }

    fn head_products(
        &self,
        step: &Step,
        products: &HeadProducts<'_, Cpu>,
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let (count, heads, weight) = (step.slot().tokens().len(), products.heads, products.weight);
        operands::head_products(count, products, x, out)?;
        if !weight.is_stack_of(heads) {
            let shape = (weight.rows, weight.columns);
            let (operation, operand) = ("head_products", "weight");
            return Err(Error::OperandShape { operation, operand, got: shape, wanted: shape });
        }
        let scratch = &mut *self.scratch.borrow_mut();
        let mut multiplier = self.multiplier(&mut scratch.activations, &mut scratch.threads);
        let values = &x.values()[..count * x.columns];
        let shares = HeadShares { values, each: x.columns / heads, column: products.column };
        let out = &mut out.values_mut()[..count * weight.rows];
        multiplier.multiply_heads(weight.matrix(), heads, shares, out);
        Ok(())
    }

    fn latent_write(
        &self,
        step: &Step,
        attention: &LatentAttention,
        latent: &Buf,
        turned: &Buf,
        kv: &mut Kv,
    ) -> Result<(), Error> {
        let (step, layer) = (step.slot(), attention.layer);
        let group = kv.group(layer);
        operands::latent_write(step.tokens().len(), attention.heads, latent, turned, group)?;
        step.check_pages(layer.group, group.pages)?;
        let dtype = kv.dtype;
        let (geometry, pages) = kv.pages_mut(layer);
        let writer = latent::Writer { heads: attention.heads, group: layer.group, dtype, geometry, pages };
        writer.write(step, latent.values(), turned.values());
        Ok(())
    }

    fn latent_attention(
        &self,
        step: &Step,
        attention: &LatentAttention,
        queries: &Buf,
        absorbed: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let (step, heads) = (step.slot(), attention.heads);
        let group = kv.group(attention.layer);
        operands::latent_attention(step.tokens().len(), attention, queries, absorbed, group, out)?;
        step.check_pages(attention.layer.group, group.pages)?;
        if latent::scratch_values(heads, 1) > THREAD_SCRATCH_VALUES {
            let what = format!("attention over latent rows of {}", heads.width());
            return Err(Error::Unsupported { what, backend: NAME });
        }
        let layer = latent::Layer {
            heads,
            scale: attention.scale,
            group: attention.layer.group,
            window: group.window,
            dtype: kv.dtype,
            pages: kv.pages(attention.layer),
        };
        let each = queries.columns.checked_div(heads.query).unwrap_or(0);
        let queries = latent::Queries { absorbed: absorbed.values(), turned: queries.values(), each };
        let scratch = &mut *self.scratch.borrow_mut();
        let (scratch, out) = (scratch.threads.values_mut(), out.values_mut());
        layer.attend((&self.pool, self.options.simd), step, queries, scratch, out);
        Ok(())
    }

    fn route(
        &self,
        step: &Step,
        routing: &Routing,
        logits: &Buf,
        correction: Option<&Buf>,
        chosen: &mut Buf,
    ) -> Result<(), Error> {
        let count = step.slot().tokens().len();
        operands::route(count, routing, logits, correction, chosen)?;
        let (logits, columns) = (logits.values(), chosen.columns);
        let correction = correction.map(|correction| correction.row(0));
        for_each_row(&self.pool, &mut chosen.values_mut()[..count * columns], columns, |row, chosen| {
            let logits = &logits[row * routing.experts..][..routing.experts];
            experts::route(routing, logits, correction, chosen);
        });
        Ok(())
    }

    fn experts(
        &self,
        step: &Step,
        experts: &Experts<'_, Cpu>,
        chosen: &Buf,
        x: &Buf,
        room: &mut ExpertRoom<Buf>,
        residual: &mut Buf,
    ) -> Result<(), Error> {
        let tokens = step.slot().tokens().len();
        let (hidden, ffn) = (x.columns, room.gated.columns);
        let each = chosen.columns / 2;
        operands::experts(tokens, experts, chosen, x, room, residual)?;
        // A weight of that shape that was not uploaded as experts cannot be cut into them.
        for (operand, weight) in [("gate_up", experts.gate_up), ("down", experts.down)] {
            if !weight.is_stack_of(experts.count) {
                let shape = (weight.rows, weight.columns);
                return Err(Error::OperandShape { operation: "experts", operand, got: shape, wanted: shape });
            }
        }

        let scratch = &mut *self.scratch.borrow_mut();
        let places = &mut scratch.places;
        places.fill(&chosen.values()[..tokens * chosen.columns], each, experts.count)?;
        let places = &*places;
        let mut multiplier = self.multiplier(&mut scratch.activations, &mut scratch.threads);
        let mut multiply = |weight: &Weight, bias: Option<&Buf>, x: &[f32], out: &mut [f32]| {
            for (expert, rows) in places.taken() {
                let matrix = weight.matrix().stacked(expert, experts.count);
                let (x_rows, out_rows) = (
                    rows.start * matrix.columns..rows.end * matrix.columns,
                    rows.start * matrix.rows..rows.end * matrix.rows,
                );
                let out = &mut out[out_rows];
                if let Some(watch) = &self.options.watch {
                    watch.see(&weight.names, (expert, experts.count), matrix.columns, &x[x_rows.clone()]);
                }
                multiplier.multiply(matrix, &x[x_rows], out);
                if let Some(bias) = bias {
                    let bias = &bias.row(0)[expert * matrix.rows..][..matrix.rows];
                    for_each_row(&self.pool, out, matrix.rows, |_, out| add(bias, out));
                }
            }
        };
        let (pairs, x) = (tokens * each, x.values());
        let rows = &mut room.rows.values_mut()[..pairs * hidden];
        let gated = &mut room.gated.values_mut()[..pairs * ffn];
        let chosen = chosen.values();
        let weights = |token: usize| &chosen[token * 2 * each + each..][..each];
        for_each_row(&self.pool, rows, hidden, |place, row| {
            let token = places.token(place);
            let x = &x[token * hidden..][..hidden];
            if experts.weighs_inputs {
                let own = places.of(token).iter().position(|other| *other as usize == place);
                let weight = weights(token)[own.expect("a place is one of its token's")];
                row.iter_mut().zip(x).for_each(|(row, x)| *row = weight * x);
            } else {
                row.copy_from_slice(x);
            }
        });
        match experts.between {
            Between::Gates(kind) => {
                let gate_up = &mut room.gate_up.values_mut()[..pairs * 2 * ffn];
                multiply(experts.gate_up, experts.gate_up_bias, rows, gate_up);
                self.gate(kind, ffn, gate_up, gated);
            }
            Between::Function(function) => {
                multiply(experts.gate_up, experts.gate_up_bias, rows, gated);
                glu::pointwise(&self.pool, self.options.simd, function, ffn, gated);
            }
        }
        multiply(experts.down, experts.down_bias, gated, rows);
        let residual = &mut residual.values_mut()[..tokens * hidden];
        let ones = vec![1.0; each];
        for_each_row(&self.pool, residual, hidden, |token, residual| {
            let weights = if experts.weighs_inputs { &ones } else { weights(token) };
            experts::combine(places.of(token), weights, rows, residual);
        });
        Ok(())
    }

    fn gather_wanted(&self, step: &Step, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let (wanted, columns) = (step.wanted(), out.columns);
        operands::pair("gather_wanted", ("x", x), ("out", out), (step.tokens().len(), wanted.len()))?;
        let x = x.values();
        for_each_row(&self.pool, &mut out.values_mut()[..wanted.len() * columns], columns, |row, out| {
            out.copy_from_slice(&x[wanted[row] as usize * columns..][..columns]);
        });
        Ok(())
    }

    fn pool(&self, step: &Step, pooling: Pooling, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        let step = step.slot();
        let columns = out.columns;
        operands::pair("pool", ("x", x), ("out", out), (step.tokens().len(), step.wanted().len()))?;
        let x = x.values();
        let mut outs = out.values_mut().chunks_exact_mut(columns);
        let mut wanted = step.wanted().iter().peekable();
        for row in step.rows() {
            let rows = row.first..row.first + row.len;
            while wanted.next_if(|&&at| rows.contains(&(at as usize))).is_some() {
                let out = outs.next().expect("as many rows as positions that want them");
                pool_rows(pooling, &x[rows.start * columns..rows.end * columns], out);
            }
        }
        Ok(())
    }

    fn sample(&self, step: &mut Step, logits: &Buf, rows: &[SampleRow<'_>]) -> Result<(), Error> {
        fits("sample", "logits", logits, (step.slot().wanted().len(), logits.columns))?;
        let mut sampled = self.sampled.borrow_mut();
        for row in rows {
            row.check()?;
            below("sampled row", row.wanted as usize, step.slot().wanted().len())?;
            below("slot", row.slot as usize, sampled.len())?;
        }
        let (columns, logits) = (logits.columns, logits.values());
        let chosen = step.slot_mut().sampled_more(rows.len());
        let scratch = &mut *self.scratch.borrow_mut();
        let samplers = Disjoint::new(&mut scratch.samplers);
        let out = Disjoint::new(&mut *chosen);
        self.pool.for_each_claimed(rows.len(), |thread, index| {
            // SAFETY: each thread has its own scratch, and each row is claimed once.
            let (scratch, out) = unsafe { (samplers.part(thread..thread + 1), out.part(index..index + 1)) };
            let row = &rows[index];
            out[0] = sample(&logits[row.wanted as usize * columns..][..columns], row, &mut scratch[0]);
        });
        for (row, chosen) in rows.iter().zip(chosen).filter(|(row, _)| row.given.is_none()) {
            // After a fault this is token 0: that row's request fails, and the step of the others goes on.
            sampled[row.slot as usize] = Some(chosen.token);
        }
        Ok(())
    }
}

/// A norm whose vectors have been looked at.
fn row_norm(norm: &Norm<Buf>) -> norm::RowNorm<'_> {
    norm::RowNorm {
        kind: norm.kind,
        weight: norm.weight.row(0),
        bias: norm.bias.as_ref().map(|bias| bias.row(0)),
        eps: norm.eps,
    }
}

/// `out` = the rows of `x` made one; a mean adds them in order.
fn pool_rows(pooling: Pooling, x: &[f32], out: &mut [f32]) {
    let columns = out.len();
    match pooling {
        Pooling::First => out.copy_from_slice(&x[..columns]),
        Pooling::Last => out.copy_from_slice(&x[x.len() - columns..]),
        Pooling::Mean => {
            out.fill(0.0);
            x.chunks_exact(columns).for_each(|x| add(x, out));
            let count = (x.len() / columns) as f32;
            out.iter_mut().for_each(|out| *out /= count);
        }
    }
}

/// `x` += `y`. Bound by memory: what the compiler makes of it for any processor is enough.
fn add(y: &[f32], x: &mut [f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

#[cfg(test)]
mod testing {
    use crate::{Batch, Row, Token};

    /// Numbers in -1..1 from a small generator: the same for the same seed.
    pub(super) fn numbers(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    /// One token of each of `rows` sequences, without pages.
    pub(super) fn decode_batch(rows: usize) -> Batch {
        let mut batch = Batch::default();
        for slot in 0..rows as u32 {
            batch.push(Row { slot, start: 0, len: 1, pages: vec![], wanted: 1 }, [Token::Known(0)]);
        }
        batch
    }

    /// For comparing bit by bit, NaN included.
    pub(super) fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }
}

#[cfg(test)]
mod tests {
    use fornax_format::{DType, View};

    use super::testing::decode_batch;
    use super::*;
    use crate::Sampling;

    fn cpu() -> Cpu {
        Cpu::new(CpuOptions::default()).unwrap()
    }

    /// A table of three rows: 0, 10 and 20 in every column.
    fn table(cpu: &Cpu) -> Weight {
        let bytes: Vec<u8> =
            [0.0_f32, 10.0, 20.0].iter().flat_map(|row| row.to_le_bytes().repeat(4)).collect();
        cpu.upload(&[View::new("table", DType::F32, vec![3, 4], &bytes).unwrap().into()]).unwrap()
    }

    fn greedy(sampling: &Sampling, wanted: u32, slot: u32) -> SampleRow<'_> {
        SampleRow { wanted, slot, position: 1, ..SampleRow::plain(3, sampling) }
    }

    #[test]
    fn options_that_cannot_be_had_are_refused() {
        let check = |options: CpuOptions, message: &str| {
            assert_eq!(Cpu::new(options).err().expect(message).to_string(), message);
        };
        let none = CpuOptions { threads: 0, ..CpuOptions::default() };
        check(none, "a backend of 0 threads is not available on cpu");
        let tiny = CpuOptions { memory_limit: Some(1000), ..CpuOptions::default() };
        check(tiny, "out of memory for workspace: 1048576 bytes wanted, 0 of 1000 bytes in use");
        let huge = CpuOptions { tokens_max: usize::MAX, slots: usize::MAX, ..CpuOptions::default() };
        assert!(matches!(Cpu::new(huge), Err(Error::OutOfMemory { purpose: Purpose::Workspace, .. })));
    }

    #[test]
    fn a_sampled_token_feeds_the_next_step_of_its_slot_only() {
        let cpu = cpu();
        let table = table(&cpu);
        let mut out = cpu.alloc(Purpose::Residual, 2, 4).unwrap();
        let mut logits = cpu.alloc(Purpose::Logits, 2, 3).unwrap();
        let mut batch = decode_batch(2);
        batch.tokens = vec![Token::Sampled(0), Token::Sampled(1)];
        let step = cpu.begin(&batch).unwrap();
        assert!(matches!(cpu.embed(&step, &table, &mut out), Err(Error::NothingSampled { slot: 0 })));
        drop(step);

        let mut step = cpu.begin(&decode_batch(2)).unwrap();
        cpu.write(&mut logits, 0, &[0.0, 1.0, 2.0, 0.0, 5.0, 2.0]).unwrap();
        let sampling = Sampling::greedy();
        cpu.sample(&mut step, &logits, &[greedy(&sampling, 1, 0), greedy(&sampling, 0, 1)]).unwrap();
        let tokens: Vec<_> = cpu.finish(step).unwrap().sampled.iter().map(|sampled| sampled.token).collect();
        assert_eq!(tokens, [1, 2]);

        let step = cpu.begin(&batch).unwrap();
        cpu.embed(&step, &table, &mut out).unwrap();
        assert_eq!(cpu.read(&out, 0, 2).unwrap(), [[10.0; 4], [20.0; 4]].concat());
    }

    #[test]
    fn wrong_operands_are_refused_with_their_shapes() {
        let cpu = cpu();
        let step = cpu.begin(&decode_batch(3)).unwrap();
        let buf = |rows, columns| cpu.alloc(Purpose::Activations, rows, columns).unwrap();
        let check = |done: Result<(), Error>, message: &str| {
            assert_eq!(done.expect_err(message).to_string(), message);
        };
        let (table, rows) = (table(&cpu), Rows::Tokens);
        check(
            cpu.embed(&step, &table, &mut buf(2, 4)),
            "embed: out is (2, 4) (rows, columns), wanted (3, 4) or more rows",
        );
        check(
            cpu.matmul(&step, rows, &table, &buf(3, 5), &mut buf(3, 3)),
            "matmul: x is (3, 5) (rows, columns), wanted (3, 4) or more rows",
        );
        check(
            cpu.add(&step, rows, &buf(3, 5), &mut buf(3, 4)),
            "add: y is (3, 5) (rows, columns), wanted (3, 4) or more rows",
        );
        check(
            cpu.glu(&step, Glu::Silu, &buf(3, 7), &mut buf(3, 4)),
            "glu: gate_up is (3, 7) (rows, columns), wanted (3, 8) or more rows",
        );
        check(
            cpu.write(&mut buf(2, 4), 1, &[0.0; 5]),
            "write: buf is (2, 4) (rows, columns), wanted (3, 4) or more rows",
        );
        assert!(cpu.read(&buf(2, 4), usize::MAX, 2).is_err());
        let rope = Rope { frequencies: buf(1, 3), pairs: 3, magnitude: 1.0, sections: Vec::new() };
        let heads = Heads { query: 1, kv: 1, dim: 4 };
        check(
            cpu.rope(&step, heads, &rope, &mut buf(3, 12)),
            "rope: frequencies is (1, 3) (rows, columns), wanted (1, 2) or more rows",
        );
        check(
            cpu.kv_write(&step, heads, KvLayer { group: 0, layer: 0 }, &buf(3, 12), &mut kv(&cpu)),
            "batch: page tables of a row: 0, wanted 1",
        );
    }

    fn kv(cpu: &Cpu) -> Kv {
        let group = crate::KvGroup { layers: 1, kind: crate::KvKind::pairs(1, 4), window: None, pages: 2 };
        cpu.alloc_kv(&KvSpec { groups: vec![group], dtype: crate::KvDType::F16 }).unwrap()
    }
}
