//! Experts: the choice, the products of each expert with the rows that chose it, the weighted sum.
//!
//! Only the device knows which tokens chose which expert. It gives each pair of a token and an expert a place (`deal`),
//! with the places of one expert side by side. Products go through the experts with a persistent kernel, which finds
//! its work from the places; so a step can be recorded. Sums have one order, given by the shape of an expert's weights,
//! whichever kernel runs: that for one token, for few rows per expert, or for many.

use std::ops::Range;

use fornax_compute::{
    Between, Error, ExpertRoom, Experts, Glu, ROUTED_MAX, Routing, Rows, Scores, Shares, operands,
};

use super::gemm::{self, Cut, Many, room_for};
use super::gemv::{
    self, Call, Inputs, MULTIPROCESSORS, Prepared, Product, form_program, form_threads, steps,
};
use super::rows::Gated;
use crate::abi::{Constant, Layout, layout};
use crate::cuda::Cuda;
use crate::driver::{Abilities, Arg, Function};
use crate::grid::Grid;
use crate::layout::{Format, TILE_ROWS};
use crate::memory::{Buf, DevicePart, PARTIALS_BYTES, Weight, WeightPart, int};
use crate::program::Key;
use crate::step::Slot;

const OPERATION: &str = "experts";
/// The most experts of a token, and of a model: the same constants as in experts.cu and experts.cuh.
const EACH_MAX: usize = 64;
const EXPERTS_MAX: usize = ROUTED_MAX;
/// (columns, tiles, slices): experts with at least this many columns and fewer tiles have their columns split into this
/// many slices. Otherwise a single token would occupy too few warps.
const SLICES: [(usize, usize, usize); 2] = [(8192, usize::MAX, 4), (2560, 512, 2)];
/// Warps of a block of expert_f32.cu; each computes one output.
const WARPS_F32: usize = 8;
/// Threads of a block of `combine`; each has one column.
const COMBINE_THREADS: usize = 256;
/// The most pairs of a token and an expert that have places at a time: the height of a grid.
const PAIRS_MAX: usize = 65_535;
/// Up to this many tokens, each pair is multiplied on its own. Up to the second number the same is done where there are
/// at least `PAIRED_OF` times as many experts as pairs, since then few pairs share an expert.
const PAIRED: usize = 2;
const PAIRED_MAX: usize = 4;
const PAIRED_OF: usize = 4;
/// Pairs per thread of `deal` where a thread has few.
const DEALT_EACH: usize = 4;
/// From this many rows per expert on (the average), the kernels for many rows are faster.
const MANY_MIN: usize = 16;
/// Rows of activations per block of expert_rows.cu.
const ROWS: [usize; 3] = [8, 16, 32];
const STAGES_MAX: usize = 4;
/// The most of its blocks that share a multiprocessor: formats that have to be unpacked want many warps. And the bytes
/// of shared memory that each block needs beside its stages.
const SHARERS_MAX: usize = 3;
const SHARERS_BYTES: usize = 6 << 10;

/// `Stack` of experts.cuh.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Stack {
    chosen: u64,
    starts: u64,
    list: u64,
    places: u64,
    token: i32,
    limit: i32,
    each: i32,
    first: i32,
    count: i32,
    gathers: i32,
    known: i32,
    pad: i32,
}

/// `Route` of experts.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Route {
    experts: i32,
    each: i32,
    scores: i32,
    groups: i32,
    groups_chosen: i32,
    by_two: i32,
    by_score: i32,
    by_all: i32,
    of_all: i32,
    added: f32,
    least: f32,
    scale: f32,
}

impl Route {
    fn new(routing: &Routing, each: usize, corrected: bool) -> Route {
        let groups = routing.groups;
        Route {
            experts: int(routing.experts),
            each: int(each),
            scores: match routing.scores {
                Scores::Softmax => 0,
                Scores::Sigmoid => 1,
                Scores::SqrtSoftplus => 2,
            },
            groups: groups.map_or(0, |groups| int(groups.count)),
            groups_chosen: groups.map_or(0, |groups| int(groups.chosen)),
            by_two: i32::from(groups.is_some_and(|groups| groups.by_two)),
            by_score: i32::from(routing.chooses_by_score(corrected)),
            by_all: i32::from(routing.weighs_by_all()),
            of_all: i32::from(routing.shares == Shares::OfAll),
            added: routing.added,
            least: routing.least,
            scale: routing.scale,
        }
    }
}

pub(super) const LAYOUTS: &[Layout] = &[
    layout!(Stack, "Stack" in "experts.cuh", {
        chosen, starts, list, places, token, limit, each, first, count, gathers, known, pad,
    }),
    layout!(Route, "Route" in "experts.cu", {
        experts, each, scores, groups, groups_chosen, by_two, by_score, by_all, of_all, added, least, scale,
    }),
];
pub(super) const CONSTANTS: &[Constant] = &[
    Constant::new("experts.cu", "EACH_MAX", EACH_MAX),
    Constant::new("experts.cu", "SOFTMAX", 0),
    Constant::new("experts.cu", "SIGMOID", 1),
    Constant::new("experts.cu", "SQRT_SOFTPLUS", 2),
    Constant::new("experts.cuh", "EXPERTS_MAX", EXPERTS_MAX),
];

/// Weight rows that some experts have in common, in one part of a weight.
pub(super) struct Piece {
    /// Rows of one expert.
    pub(super) part: WeightPart,
    pub(super) device_part: DevicePart,
    pub(super) experts: Range<usize>,
}

/// A weight divided into stretches that its experts have alike: usually all of it. `rows`: rows per expert.
pub(super) fn pieces(weight: &Weight, experts: usize, rows: usize) -> Vec<Piece> {
    let piece = |part: &WeightPart, (first, own): (usize, usize), experts: Range<usize>| {
        let begin = experts.start * rows + first - part.first;
        // A part grows by whole tiles only.
        assert!(begin.is_multiple_of(TILE_ROWS), "expert {} begins within a tile", experts.start);
        let device_part = weight.device_part_from(part, begin / TILE_ROWS).with_rows(own);
        Piece { part: WeightPart { first, rows: own, ..*part }, device_part, experts }
    };
    let mut pieces = Vec::new();
    for part in &weight.parts {
        let end = part.first + part.rows;
        let mut row = part.first;
        while row < end {
            let (expert, first) = (row / rows, row % rows);
            let whole = (end - row) / rows;
            let own = rows.min(end - row).min(rows - first);
            let alike = if first == 0 && whole > 1 { whole } else { 1 };
            pieces.push(piece(part, (first, own), expert..expert + alike));
            row += alike * own;
        }
    }
    assert!(pieces.iter().all(|piece| piece.experts.end <= experts), "no more rows than experts have");
    pieces
}

/// How many slices the columns of an expert's weights are split into. This depends on the shape alone, so sums have the
/// same order everywhere.
fn slices(part: &WeightPart) -> usize {
    let fits =
        |(columns, tiles, _): &&(usize, usize, usize)| part.columns >= *columns && part.row_tiles() < *tiles;
    SLICES.iter().find(fits).map_or(1, |&(_, _, slices)| slices).min(steps(part))
}

/// How a product with few rows per expert is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExpertPlan {
    slices: usize,
    /// Stages of activations.
    rows: usize,
    warps: usize,
    stages: usize,
    /// Blocks per multiprocessor.
    sharers: usize,
    /// Dynamic shared memory of a block.
    shared: usize,
}

impl ExpertPlan {
    /// The plan for experts that have about this many rows of activations.
    fn new(part: &WeightPart, each: usize, room: usize) -> ExpertPlan {
        let row_bytes = part.format.step_columns() * 2 + 64;
        // Some have twice the average.
        let wanted = (2 * each).next_power_of_two();
        let rows = ROWS.into_iter().find(|&rows| rows >= wanted).unwrap_or(ROWS[ROWS.len() - 1]);
        // A number that divides the tiles of an expert without a rest, or nearly.
        let tiles = part.row_tiles();
        let rest = |warps: usize| tiles.next_multiple_of(warps) - tiles;
        let warps = [8, 7, 6].into_iter().min_by_key(|&warps| rest(warps)).unwrap_or(8).min(tiles);
        let stage = |warps: usize| rows * row_bytes + warps * part.format.step_bytes();
        // What each of several blocks gets; registers suffice for three blocks with few rows.
        let share = |sharers: usize| (room + SHARERS_BYTES) / sharers - SHARERS_BYTES;
        let most = if rows > 16 { 2 } else { SHARERS_MAX };
        let sharers = (1..=most).rev().find(|&sharers| 2 * stage(warps) <= share(sharers)).unwrap_or(1);
        let room = share(sharers);
        let warps =
            (1..=warps).rev().find(|&warps| 2 * stage(warps) <= room).expect("a tile fits every block");
        let stages = (room / stage(warps)).clamp(2, STAGES_MAX);
        ExpertPlan { slices: slices(part), rows, warps, stages, sharers, shared: stages * stage(warps) }
    }

    fn program(&self, part: &WeightPart) -> Key {
        let mut key = Key::quant("expert_rows.cu", part.format);
        key.defines.extend([
            format!("SLICES={}", self.slices),
            format!("ROWS={}", self.rows),
            format!("STAGES={}", self.stages),
            format!("SHARERS={}", self.sharers),
            "THREADS=256".to_owned(),
        ]);
        key
    }
}

/// The plan for one pair of a token and an expert, where a token has this many.
fn one(part: &WeightPart, gates: bool, each: usize, room: usize) -> Option<gemv::GemvPlan> {
    gemv::GemvPlan::one_of(part, gates, slices(part), (MULTIPROCESSORS / each).max(1), room)
}

fn of_experts(mut key: Key) -> Key {
    key.defines.push("EXPERTS=1".to_owned());
    key
}

/// The programs of an expert part's products, for steps of up to this many tokens.
pub(crate) fn programs(part: &WeightPart, experts: usize, tokens_max: usize, able: &Abilities) -> Vec<Key> {
    if part.format == Format::F32 {
        return vec![Key::plain("expert_f32.cu")];
    }
    let room = able.shared_max;
    let even = part.rows.is_multiple_of(2 * TILE_ROWS);
    // The number of experts per token is not known here; a wrong guess is compiled at its first use.
    let each = match experts {
        0..=16 => 2,
        17..=60 => 4,
        _ => 8,
    };
    let mean_max = tokens_max * each / experts.max(1);
    let sides = || [false, true].into_iter().filter(|gates| even || !gates);
    let mut keys: Vec<Key> = sides()
        .filter_map(|gates| Some(of_experts(one(part, gates, each, room)?.program(part, gates))))
        .collect();
    for rows in ROWS.into_iter().filter(|rows| rows / 4 <= mean_max) {
        keys.push(ExpertPlan::new(part, rows / 2, room).program(part));
    }
    if able.wgmma && mean_max >= MANY_MIN {
        for gates in sides() {
            let cut = Cut { gates, slices: slices(part) };
            let plan = gemm::GemmPlan::of_experts(part, cut, experts, mean_max, able);
            keys.push(of_experts(plan.program(part)));
        }
    }
    keys
}

/// Which kernels multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Those for few tokens: one pair of a token and an expert at a time.
    Pairs,
    /// Those for experts with few rows.
    Few,
    Many,
}

/// A layer of experts, to be computed pass by pass.
struct ExpertLayer<'a> {
    slot: &'a Slot,
    experts: &'a Experts<'a, Cuda>,
    gate_up: Vec<Piece>,
    down: Vec<Piece>,
    way: Way,
    /// Tokens of all passes; each pass has its own.
    stack: Stack,
    /// Tokens that grids are made for, and those of one pass.
    tokens: usize,
    at_once: usize,
}

/// What all products of some tokens' experts have in common.
#[derive(Clone, Copy)]
struct Pass<'a> {
    slot: &'a Slot,
    way: Way,
    stack: Stack,
    /// The most pairs of a token and an expert.
    pairs: usize,
    /// Rows per expert, on average.
    mean: usize,
    experts: usize,
}

impl Cuda {
    /// What is compiled ahead when the weights of experts are loaded.
    pub(crate) fn programs_of_experts(&self, weight: &Weight, experts: usize) -> Vec<Key> {
        let able = self.device.abilities();
        let mut keys = [false, true].map(|experts| form_program(weight.columns, experts)).to_vec();
        for piece in pieces(weight, experts, weight.rows / experts.max(1)) {
            let programs = programs(&piece.part, experts, self.options().tokens_max, able);
            keys.extend(programs.into_iter().filter(|key| !keys.contains(key)).collect::<Vec<_>>());
        }
        keys
    }

    pub(crate) fn op_add_gated(&self, slot: &Slot, gate: &Buf, y: &Buf, x: &mut Buf) -> Result<(), Error> {
        const OPERATION: &str = "add_gated";
        let columns = x.columns;
        operands::add_gated(slot.tokens, gate, y, x)?;
        self.op(slot, &[gate, y, &*x], &[&*x], || {
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Pointer(gate.pointer()),
                Arg::Pointer(y.pointer()),
                Arg::Pointer(x.pointer()),
                Arg::Int(int(columns)),
            ];
            self.launch_values(Call::of_tokens(OPERATION, slot), "experts.cu", columns, &args)
        })
    }

    pub(crate) fn op_route(
        &self,
        slot: &Slot,
        routing: &Routing,
        logits: &Buf,
        correction: Option<&Buf>,
        chosen: &mut Buf,
    ) -> Result<(), Error> {
        const OPERATION: &str = "route";
        // A token cannot have more experts than there are.
        let each = routing.chosen.min(routing.experts);
        operands::route(slot.tokens, routing, logits, correction, chosen)?;
        if each > EACH_MAX {
            let what = format!("{each} experts for a token; at most {EACH_MAX} can be");
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        let reads: Vec<&Buf> = std::iter::once(logits).chain(correction).collect();
        self.op(slot, &reads, &[&*chosen], || {
            let function = self.programs.function(&Key::plain("experts.cu"), OPERATION)?;
            let device_step = self.device_step(slot);
            let route = Route::new(routing, each, correction.is_some());
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&route)),
                Arg::Pointer(logits.pointer()),
                Arg::Pointer(correction.map_or(0, Buf::pointer)),
                Arg::Pointer(chosen.pointer()),
            ];
            let grid = [self.grid_rows(slot, Rows::Tokens), 1, 1];
            self.launch(OPERATION, function, Grid::new(grid, 32), &args)
        })
    }

    pub(crate) fn op_experts(
        &self,
        slot: &Slot,
        experts: &Experts<'_, Cuda>,
        chosen: &Buf,
        x: &Buf,
        room: &mut ExpertRoom<Buf>,
        residual: &mut Buf,
    ) -> Result<(), Error> {
        let (tokens, each) = (slot.tokens, chosen.columns / 2);
        let (hidden, ffn) = (x.columns, room.gated.columns);
        operands::experts(tokens, experts, chosen, x, room, residual)?;
        let gate_up = match experts.between {
            Between::Gates(_) => Some(&room.gate_up),
            Between::Function(_) => None,
        };
        let writes: Vec<&Buf> = [&room.rows, &room.gated, &*residual].into_iter().chain(gate_up).collect();
        self.op(slot, &[chosen, x, &*residual], &writes, || {
            if each == 0 || tokens == 0 {
                return Ok(());
            }
            let layer = self.expert_layer(slot, experts, chosen, hidden, ffn)?;
            let count = layer.tokens;
            (0..count).step_by(layer.at_once).try_for_each(|token| {
                let tokens = token..count.min(token + layer.at_once);
                self.experts_pass(&layer, tokens, x, room, residual)
            })
        })
    }

    /// Chooses the kernels, and lays out room for the places of pairs.
    fn expert_layer<'a>(
        &self,
        slot: &'a Slot,
        experts: &'a Experts<'a, Cuda>,
        chosen: &Buf,
        hidden: usize,
        ffn: usize,
    ) -> Result<ExpertLayer<'a>, Error> {
        let each = chosen.columns / 2;
        let refused = |what| Err(Error::Unsupported { what, backend: self.device.name() });
        if experts.count > EXPERTS_MAX {
            return refused(format!("{} experts; at most {EXPERTS_MAX} can be", experts.count));
        }
        let gate_up = pieces(experts.gate_up, experts.count, experts.between.columns(ffn));
        let down = pieces(experts.down, experts.count, hidden);
        let count = self.grid_rows(slot, Rows::Tokens);
        let formed = || gate_up.iter().chain(&down).filter(|piece| piece.part.format != Format::F32);
        let fits_one =
            |piece: &Piece| one(&piece.part, false, each, self.device.abilities().shared_max).is_some();
        // Rows per expert, if tokens choose evenly.
        let mean = (count * each).div_ceil(experts.count);
        let paired = count <= PAIRED || count <= PAIRED_MAX && count * each * PAIRED_OF <= experts.count;
        let way = match () {
            () if paired && formed().all(fits_one) => Way::Pairs,
            () if self.device.abilities().wgmma && mean >= MANY_MIN => Way::Many,
            () => Way::Few,
        };
        // Tokens whose prepared rows fit the scratch, and whose pairs have places.
        let formed_rows = |columns| self.scratch.rows(columns) / room_for(1) * room_for(1);
        let pairs_max = match way {
            Way::Pairs => PAIRS_MAX,
            Way::Few | Way::Many => PAIRS_MAX.min(formed_rows(ffn)).min(formed_rows(hidden)),
        };
        // Passes of equal size.
        let at_once = count.div_ceil(count.div_ceil((pairs_max / each).max(1)));
        if pairs_max < each {
            return refused(format!("{each} experts of {hidden} and {ffn} columns for a token"));
        }
        // Starts, list and places.
        let starts_bytes = ((experts.count + 1) * 4).next_multiple_of(16) as u64;
        let list_bytes = (at_once * each * 4).next_multiple_of(16) as u64;
        assert!(starts_bytes + 2 * list_bytes <= PARTIALS_BYTES, "{at_once} tokens have {each} places each");
        let starts = self.partials.pointer();
        let [list, places] = [starts + starts_bytes, starts + starts_bytes + list_bytes];
        let stack = Stack {
            chosen: chosen.pointer(),
            starts,
            list,
            places: if way == Way::Pairs { 0 } else { places },
            token: 0,
            limit: 0,
            each: int(each),
            first: 0,
            count: int(experts.count),
            gathers: 1,
            known: 0,
            pad: 0,
        };
        Ok(ExpertLayer { slot, experts, gate_up, down, way, stack, tokens: count, at_once })
    }

    /// Computes the experts of these tokens.
    fn experts_pass(
        &self,
        layer: &ExpertLayer<'_>,
        tokens: Range<usize>,
        x: &Buf,
        room: &ExpertRoom<Buf>,
        residual: &Buf,
    ) -> Result<(), Error> {
        let ExpertLayer { slot, experts, gate_up, down, way, .. } = layer;
        let (slot, way, hidden, ffn) = (*slot, *way, x.columns, room.gated.columns);
        let limit = tokens.len();
        let stack = Stack { token: int(tokens.start), limit: int(limit), ..layer.stack };
        let each = stack.each.cast_unsigned() as usize;
        let mean = (limit * each).div_ceil(experts.count);
        let pass = Pass { slot, way, stack, pairs: limit * each, mean, experts: experts.count };
        if way != Way::Pairs {
            self.deal(&pass)?;
        }
        let gates = self.gates_experts(&pass, experts.between, gate_up, ffn);
        // What no gates follow is where the second product reads it.
        let inner = match experts.between {
            Between::Gates(_) => &room.gate_up,
            Between::Function(_) => &room.gated,
        };
        let product = Product {
            values: inner.pointer(),
            bias: experts.gate_up_bias.map_or(0, Buf::pointer),
            columns: int(experts.between.columns(ffn)),
            first: 0,
            adds: 0,
            pairs: if gates { int(ffn / TILE_ROWS) } else { 0 },
            gated: if gates { room.gated.pointer() } else { 0 },
        };
        if experts.weighs_inputs {
            // What pairs make of it lies there only once it was read.
            self.weigh_inputs(&pass, x, &room.rows)?;
            let weighed = Pass { stack: Stack { gathers: 0, ..stack }, ..pass };
            self.multiply_experts(&weighed, gate_up, &room.rows, &product)?;
        } else {
            self.multiply_experts(&pass, gate_up, x, &product)?;
        }
        match experts.between {
            Between::Gates(_) if gates => {}
            Between::Gates(kind) => {
                let gated = Gated { tokens: limit, each, kind };
                self.gate_rows(OPERATION, slot, gated, &room.gate_up, &room.gated)?;
            }
            Between::Function(function) => {
                self.function_rows(OPERATION, slot, (limit, each), function, &room.gated)?;
            }
        }
        let product = Product {
            values: room.rows.pointer(),
            bias: experts.down_bias.map_or(0, Buf::pointer),
            columns: int(hidden),
            pairs: 0,
            gated: 0,
            ..product
        };
        // Kernels of pairs let the next kernel begin once they know the choice; those of F32 before that.
        let waited = gate_up.iter().all(|piece| piece.part.format != Format::F32);
        let known = i32::from(way == Way::Pairs && waited);
        let pass = Pass { stack: Stack { gathers: 0, known, ..stack }, ..pass };
        self.multiply_experts(&pass, down, &room.gated, &product)?;
        self.combine(slot, &stack, experts.weighs_inputs, &room.rows, residual)
    }

    /// A row for each pair: the token's, times the weight of its expert.
    fn weigh_inputs(&self, pass: &Pass<'_>, x: &Buf, rows: &Buf) -> Result<(), Error> {
        let device_step = self.device_step(pass.slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Struct(bytemuck::bytes_of(&pass.stack)),
            Arg::Pointer(x.pointer()),
            Arg::Pointer(rows.pointer()),
            Arg::Int(int(x.columns)),
        ];
        let function = self.programs.function(&Key::plain("experts.cu"), "weigh_inputs")?;
        let grid = Grid::new([x.columns.div_ceil(COMBINE_THREADS), pass.pairs, 1], COMBINE_THREADS);
        self.launch(OPERATION, function, grid, &args)
    }

    /// Adds each token's experts to its row, weighted where their inputs were not.
    fn combine(
        &self,
        slot: &Slot,
        stack: &Stack,
        weighed: bool,
        rows: &Buf,
        residual: &Buf,
    ) -> Result<(), Error> {
        let (columns, tokens) = (residual.columns, stack.limit.cast_unsigned() as usize);
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Struct(bytemuck::bytes_of(stack)),
            Arg::Int(i32::from(!weighed)),
            Arg::Pointer(rows.pointer()),
            Arg::Pointer(residual.pointer()),
            Arg::Int(int(columns)),
        ];
        let function = self.programs.function(&Key::plain("experts.cu"), "combine")?;
        let grid = Grid::new([columns.div_ceil(COMBINE_THREADS), tokens, 1], COMBINE_THREADS);
        self.launch(OPERATION, function, grid, &args)
    }

    /// Gives every pair of a token and an expert its place.
    fn deal(&self, pass: &Pass<'_>) -> Result<(), Error> {
        let Pass { slot, stack, pairs, experts, .. } = *pass;
        let function = self.programs.function(&Key::plain("experts.cu"), "deal")?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Struct(bytemuck::bytes_of(&stack)),
            Arg::Pointer(stack.starts),
            Arg::Pointer(stack.list),
            Arg::Pointer(stack.places),
        ];
        let threads = super::gemv::row_threads(pairs.div_ceil(DEALT_EACH));
        self.launch(OPERATION, function, Grid::new([experts, 1, 1], threads), &args)
    }

    /// Whether the products with gates can also apply the gated activation.
    fn gates_experts(&self, pass: &Pass<'_>, between: Between, gate_up: &[Piece], ffn: usize) -> bool {
        let [Piece { part, .. }] = gate_up else { return false };
        let whole = ffn.is_multiple_of(TILE_ROWS) && part.format != Format::F32;
        let each = pass.stack.each.cast_unsigned() as usize;
        between == Between::Gates(Glu::Silu)
            && whole
            && match pass.way {
                Way::Pairs => one(part, true, each, self.device.abilities().shared_max).is_some(),
                Way::Few => false,
                Way::Many => true,
            }
    }

    /// The products of experts with the rows that chose them.
    fn multiply_experts(
        &self,
        pass: &Pass<'_>,
        pieces: &[Piece],
        x: &Buf,
        product: &Product,
    ) -> Result<(), Error> {
        let columns = x.columns;
        if pass.way != Way::Pairs && pieces.iter().any(|piece| piece.part.format != Format::F32) {
            self.form_experts(pass, x)?;
        }
        for piece in pieces {
            let Piece { part, experts, .. } = piece;
            let rows = product.columns.cast_unsigned() as usize;
            let bias = match product.bias {
                0 => 0,
                bias => bias + (experts.start * rows * 4) as u64,
            };
            let product = Product { first: int(part.first), bias, ..*product };
            let stack = Stack { first: int(experts.start), count: int(experts.len()), ..pass.stack };
            let pass = Pass { stack, ..*pass };
            match pass.way {
                _ if part.format == Format::F32 => self.experts_f32(&pass, piece, x, &product)?,
                Way::Pairs => self.experts_of_pairs(&pass, piece, x, &product)?,
                Way::Few => self.experts_of_few(&pass, piece, columns, &product)?,
                Way::Many => self.experts_of_many(&pass, piece, columns, &product)?,
            }
        }
        Ok(())
    }

    /// Prepares rows: for few rows per expert those of tokens, which are looked up; otherwise those of places.
    fn form_experts(&self, pass: &Pass<'_>, x: &Buf) -> Result<(), Error> {
        let Pass { slot, way, stack, pairs, .. } = *pass;
        let (columns, many) = (x.columns, way == Way::Many);
        let (values, factors) = (self.scratch.values(), self.scratch.factors(columns));
        if !many && stack.gathers != 0 {
            let whole = stack.token == 0
                && stack.limit.cast_unsigned() as usize >= self.grid_rows(slot, Rows::Tokens);
            let inputs = Inputs {
                x: x.pointer(),
                values,
                factors,
                first: stack.token,
                limit: stack.limit,
                ..bytemuck::Zeroable::zeroed()
            };
            let call = Call::of_tokens(OPERATION, slot);
            return self.hold(call, Prepared { columns, many: false, floats8: false, whole }, &inputs);
        }
        self.scratch.forget();
        let name = if columns.is_multiple_of(4) { "form_experts_fours" } else { "form_experts_any" };
        let function = self.programs.function(&form_program(columns, true), name)?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Pointer(x.pointer()),
            Arg::Pointer(0),
            Arg::Float(0.0),
            Arg::Int(int(columns)),
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Struct(bytemuck::bytes_of(&stack)),
            Arg::Pointer(values),
            Arg::Pointer(factors),
            Arg::Int(if many { int(room_for(pairs)) } else { 0 }),
        ];
        // With many rows, several share a multiprocessor.
        let threads = form_threads(columns, if many { 512 } else { 1024 });
        self.launch(OPERATION, function, Grid::new([pairs, 1, 1], threads), &args)
    }

    fn experts_of_pairs(
        &self,
        pass: &Pass<'_>,
        piece: &Piece,
        x: &Buf,
        product: &Product,
    ) -> Result<(), Error> {
        let (part, gates) = (&piece.part, product.pairs > 0);
        let each = pass.stack.each.cast_unsigned() as usize;
        let plan = one(part, gates, each, self.device.abilities().shared_max).expect("asked before");
        let function = self.programs.function(&of_experts(plan.program(part, gates)), "gemv_one")?;
        let inputs = Inputs {
            x: x.pointer(),
            limit: 1,
            tiles: int(part.row_tiles() / if gates { 2 } else { 1 }),
            ..bytemuck::Zeroable::zeroed()
        };
        let grid = Grid::new([plan.blocks, pass.pairs, 1], plan.warps * 32).with_shared(plan.shared);
        let product = (bytemuck::bytes_of(&inputs), product);
        self.launch_product(function, grid, pass, piece, product)
    }

    /// Launches a kernel that models without experts use, too.
    fn launch_product(
        &self,
        function: Function,
        grid: Grid,
        pass: &Pass<'_>,
        piece: &Piece,
        (inputs, product): (&[u8], &Product),
    ) -> Result<(), Error> {
        let device_step = self.device_step(pass.slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&piece.device_part)),
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(0),
            Arg::Struct(inputs),
            Arg::Struct(bytemuck::bytes_of(product)),
            Arg::Struct(bytemuck::bytes_of(&pass.stack)),
        ];
        self.launch(OPERATION, function, grid, &args)
    }

    fn experts_of_few(
        &self,
        pass: &Pass<'_>,
        piece: &Piece,
        columns: usize,
        product: &Product,
    ) -> Result<(), Error> {
        let part = &piece.part;
        let plan = ExpertPlan::new(part, pass.mean, self.device.abilities().shared_max);
        let function = self.programs.function(&plan.program(part), "expert_rows")?;
        let args = [
            Arg::Struct(bytemuck::bytes_of(&piece.device_part)),
            Arg::Struct(bytemuck::bytes_of(&pass.stack)),
            Arg::Pointer(self.scratch.values()),
            Arg::Pointer(self.scratch.factors(columns)),
            Arg::Struct(bytemuck::bytes_of(product)),
        ];
        // Each pair has rows of its own at most.
        let items = part.row_tiles().div_ceil(plan.warps) * pass.pairs;
        let blocks = items.min(self.device.abilities().multiprocessors * plan.sharers);
        let grid = Grid::new([blocks, 1, 1], plan.warps * 32).with_shared(plan.shared);
        self.launch(OPERATION, function, grid, &args)
    }

    fn experts_of_many(
        &self,
        pass: &Pass<'_>,
        piece: &Piece,
        columns: usize,
        product: &Product,
    ) -> Result<(), Error> {
        let part = &piece.part;
        let able = self.device.abilities();
        let cut = Cut { gates: product.pairs > 0, slices: slices(part) };
        let plan = gemm::GemmPlan::of_experts(part, cut, piece.experts.len(), pass.mean, able);
        let function = self.programs.function(&of_experts(plan.program(part)), "gemm")?;
        let many = Many {
            values: self.scratch.values(),
            factors: self.scratch.factors(columns),
            first: 0,
            limit: int(pass.pairs),
            rows: int(room_for(pass.pairs)),
            tiles: int(plan.tiles),
            slices: int(plan.slices),
            pad: 0,
            partials: 0,
            tickets: 0,
        };
        let blocks = (plan.tiles * pass.pairs).min(able.multiprocessors);
        let grid = Grid::new([blocks, 1, 1], plan.threads()).with_shared(plan.shared);
        self.launch_product(function, grid, pass, piece, (bytemuck::bytes_of(&many), product))
    }

    fn experts_f32(&self, pass: &Pass<'_>, piece: &Piece, x: &Buf, product: &Product) -> Result<(), Error> {
        let function = self.programs.function(&Key::plain("expert_f32.cu"), "expert_f32")?;
        let device_step = self.device_step(pass.slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&piece.device_part)),
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Struct(bytemuck::bytes_of(&pass.stack)),
            Arg::Pointer(x.pointer()),
            Arg::Struct(bytemuck::bytes_of(product)),
        ];
        let grid = [pass.pairs, piece.part.rows.div_ceil(WARPS_F32), 1];
        self.launch(OPERATION, function, Grid::new(grid, WARPS_F32 * 32), &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::gemv::SHARED_MIN;
    use crate::ops::shapes::{HOPPER, part};

    #[test]
    fn blocks_of_few_rows_fit_every_chip_and_read_ahead() {
        let formats = [Format::F16, Format::Q8_0, Format::Q4_K, Format::Q5_K, Format::Q6_K, Format::Q5_1];
        for format in formats {
            for shape in [(16, 256), (40, 2880), (1536, 2048), (2048, 768), (4096, 14_336)] {
                for (each, room) in [(1, SHARED_MIN), (8, SHARED_MIN), (100, SHARED_MIN), (8, 219 << 10)] {
                    let part = part(format, shape);
                    let few = ExpertPlan::new(&part, each, room);
                    assert!(few.stages >= 2 && (1..=8).contains(&few.warps), "{format:?} {shape:?}: {few:?}");
                    assert!(few.sharers * (few.shared + SHARERS_BYTES) <= room + SHARERS_BYTES, "{few:?}");
                }
            }
        }
    }

    #[test]
    fn columns_are_cut_by_the_shape_of_an_expert_whoever_multiplies() {
        for (shape, wanted) in
            [((1536, 2048), 1), ((2048, 768), 1), ((5760, 2880), 2), ((28_672, 4096), 1), ((4096, 14_336), 4)]
        {
            let part = part(Format::Q4_K, shape);
            assert_eq!(slices(&part), wanted, "{shape:?}");
            let many = [8, 64, 300].map(|each| {
                let cut = Cut { gates: false, slices: slices(&part) };
                gemm::GemmPlan::of_experts(&part, cut, 8, each, &HOPPER).slices
            });
            let few = [1, 20].map(|each| ExpertPlan::new(&part, each, HOPPER.shared_max).slices);
            assert_eq!((many, few), ([wanted; 3], [wanted; 2]), "{shape:?}");
        }
    }
}
