//! A tower: what makes of a picture's patches the rows that a language model reads in place of tokens. Patches see
//! each other in both directions; how they know where they are, what stands in a block and how several patches become
//! a row is told by the family's facts. Where the model has it, rows are also made after some blocks on the way (the
//! levels, which go into the first layers of the language model).
//!
//! It is a model of its own over a backend of its own, and knows no image file: patches come as numbers.

mod block;
mod config;
pub(crate) mod facts;
mod head;
mod layer;
mod merger;
mod weights;

use fornax_compute::{
    Attention, Backend, Batch, Error, Heads, KvDType, KvGroup, KvKind, KvLayer, KvSpec, Memory, Need, Norm,
    NormKind, PAGE_TOKENS, PageId, Purpose, Rope, Row, Rows, Token,
};
use fornax_format::Checkpoint;

use block::{Alike, Block};
pub use config::TowerConfig;
pub use facts::TowerFacts;
use facts::{Function, Part, Positions, Rotary, Scale};
use layer::Layer;
use merger::Merger;
use weights::Weights;

/// A picture's patches.
#[derive(Clone, Copy, Debug)]
pub struct PatchGrid<'a> {
    /// Patches across.
    pub width: u32,
    /// Patches down.
    pub height: u32,
    /// Row and column of each: those that become one row follow each other.
    pub places: &'a [(u32, u32)],
    /// (patches, values of a patch)
    pub values: &'a [f32],
}

/// Weights and activations.
pub struct Tower<M: Memory> {
    config: TowerConfig,
    patches_max: usize,
    patches: Layer<M>, // (hidden, patch values)
    /// (side x side, hidden), or (2, positions, hidden) by column and by row: on the host, where those of a picture
    /// are taken.
    positions: Vec<f32>,
    alike: Alike<M>,
    blocks: Vec<Block<M>>,
    last_norm: Option<Norm<M::Buf>>, // (hidden)
    merger: Merger<M>,
    /// After which block, and what makes rows there.
    levels: Vec<(usize, Merger<M>)>,
    kv: M::Kv,
    room: Room<M>,
}

/// What a picture is computed in; by patches, then by merged rows.
struct Room<M: Memory> {
    pixels: M::Buf,        // (patches, patch values)
    residual: M::Buf,      // (patches, hidden)
    branch: M::Buf,        // (patches, hidden)
    room: M::Buf,          // (patches, hidden)
    qkv: M::Buf,           // (patches, 3 x heads x head)
    attended: M::Buf,      // (patches, heads x head)
    inner: M::Buf,         // (patches, ffn), or twice as wide
    gated: Option<M::Buf>, // (patches, ffn)
    merged: M::Buf,        // (rows, merged)
    normed: M::Buf,        // (rows, merged), where levels are
    above: M::Buf,         // (rows, merged)
    out: M::Buf,           // (rows, out)
}

impl<M: Memory> Tower<M> {
    /// Loads a tower that takes pictures of at most so many patches; `progress` is told the bytes of each weight.
    pub fn load(
        checkpoint: &Checkpoint,
        config: &TowerConfig,
        memory: &M,
        patches_max: usize,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Tower<M>, crate::Error> {
        for need in [Need::LayerNorm, Need::Pointwise, Need::BothDirections, Need::Sections] {
            memory.supports(need)?;
        }
        let TowerConfig { hidden, out, merge, facts, .. } = *config;
        let square = merge * merge;
        let patches_max = patches_max.next_multiple_of(square);
        let mut weights = Weights::new(checkpoint, config, memory, progress);
        let heads = heads(config);
        let blocks =
            (0..config.blocks).map(|at| Block::load(&mut weights, config, at)).collect::<Result<_, _>>()?;
        let levels = config.levels.iter().enumerate();
        let levels = levels.map(|(at, block)| Ok((*block, Merger::of_level(&mut weights, config, at)?)));
        let levels = levels.collect::<Result<_, crate::Error>>()?;
        let tokens = |columns| memory.alloc(Purpose::Activations, patches_max, columns);
        let rows = |columns| memory.alloc(Purpose::Activations, patches_max / square, columns);
        // Keys and values of one block at a time.
        let group = KvGroup {
            layers: 1,
            kind: KvKind::pairs(heads.kv, heads.dim),
            window: None,
            pages: 1 + patches_max.div_ceil(PAGE_TOKENS),
        };
        let scale = match facts.scale {
            // Of the stored head: zeros behind it are none of its values.
            Scale::RootOfHead => ((hidden / config.heads) as f32).powf(-0.5),
            Scale::One => 1.0,
        };
        let (inner, gated) = match facts.function {
            Function::Plain(_) => (config.ffn, None),
            Function::Gated(_) => (2 * config.ffn, Some(tokens(config.ffn)?)),
        };
        let tower = Tower {
            patches: weights.patches()?,
            positions: weights.table(Part::Positions, &config.table())?,
            alike: Alike {
                rope: facts.rotary.map(|rotary| rope(memory, config, rotary)).transpose()?,
                shape: Attention {
                    causal: false,
                    ..Attention::causal(heads, KvLayer { group: 0, layer: 0 }, scale)
                },
                function: facts.function,
            },
            blocks,
            last_norm: weights.opt_norm(NormKind::Layer, Part::LastNorm, 0, hidden)?,
            merger: Merger::load(&mut weights, config)?,
            levels,
            kv: memory.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F32 })?,
            room: Room {
                pixels: tokens(config.patch_values())?,
                residual: memory.alloc(Purpose::Residual, patches_max, hidden)?,
                branch: tokens(hidden)?,
                room: tokens(hidden)?,
                qkv: tokens(heads.qkv_columns())?,
                attended: tokens(heads.query * heads.dim)?,
                inner: tokens(inner)?,
                gated,
                merged: rows(config.merged())?,
                normed: rows(if config.levels.is_empty() { 0 } else { config.merged() })?,
                above: rows(config.merged())?,
                out: rows(out)?,
            },
            config: config.clone(),
            patches_max,
        };
        weights.finish()?;
        Ok(tower)
    }

    /// Its sizes.
    pub fn config(&self) -> &TowerConfig {
        &self.config
    }
}

fn heads(config: &TowerConfig) -> Heads {
    Heads { query: config.heads, kv: config.heads, dim: config.head_layout().padded() }
}

/// A quarter of a head's values turn by the row, another by the column; with their partners that is all of it.
fn rope<M: Memory>(memory: &M, config: &TowerConfig, rotary: Rotary) -> Result<Rope<M::Buf>, Error> {
    let quarter = config.hidden / config.heads / 4;
    let still = heads(config).dim / 2 - 2 * quarter;
    let frequency = |at: usize| rotary.base.powf(-(at as f64) / quarter as f64) as f32;
    let turning = (0..quarter).chain(0..quarter).map(frequency);
    let frequencies: Vec<f32> = turning.chain(std::iter::repeat_n(0.0, still)).collect();
    Ok(Rope {
        pairs: frequencies.len(),
        frequencies: memory.upload_values(&frequencies)?,
        magnitude: 1.0,
        sections: [vec![0; quarter], vec![1; quarter], vec![0; still]].concat(),
    })
}

impl<B: Backend> Tower<B> {
    /// The rows that a picture becomes, (rows, [`columns`](TowerConfig::columns)); `None` where `go_on` said no on the way.
    /// The backend's steps hold as many tokens as a picture may have patches, of one sequence, and two may be begun.
    pub fn see(
        &mut self,
        backend: &B,
        grid: PatchGrid<'_>,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<f32>>, Error> {
        let patches = self.check(grid)?;
        let square = self.config.merge * self.config.merge;
        backend.write(&mut self.room.pixels, 0, grid.values)?;
        let positions = self.learned(grid);
        backend.write(&mut self.room.room, 0, &positions)?;
        let step = backend.begin(&batch(patches, grid.places))?;
        let rows = self.blocks(backend, &step, patches, go_on)?;
        backend.finish(step)?;
        let Some(rows) = rows else { return Ok(None) };
        // Side by side: of each token first what it is, then what the first layers add to it.
        let (count, out) = (patches / square, self.config.out);
        let mut all = Vec::with_capacity(count * self.config.columns());
        for row in 0..count {
            rows.iter().for_each(|level| all.extend_from_slice(&level[row * out..][..out]));
        }
        // By one nothing changes, to the bit.
        all.iter_mut().for_each(|value| *value /= self.config.multiplied);
        Ok(Some(all))
    }

    /// The number of patches, if they are as many as the grid says and can be taken.
    fn check(&self, grid: PatchGrid<'_>) -> Result<usize, Error> {
        let patches = grid.places.len();
        let wrong = |what, got, wanted| Err(Error::BatchShape { what, got, wanted });
        if patches > self.patches_max {
            return Err(Error::BatchLimit { what: "patches", got: patches, limit: self.patches_max });
        }
        let square = self.config.merge * self.config.merge;
        if patches == 0 || !patches.is_multiple_of(square) {
            return wrong("patches", patches, patches.next_multiple_of(square).max(square));
        }
        if (grid.width as usize).checked_mul(grid.height as usize) != Some(patches) {
            return wrong("patches of the grid", patches, grid.width as usize * grid.height as usize);
        }
        let values = patches * self.config.patch_values();
        if grid.values.len() != values {
            return wrong("values of patches", grid.values.len(), values);
        }
        let most = self.config.positions;
        let (width, height) = (grid.width as usize, grid.height as usize);
        match self.config.facts.positions {
            Positions::Square if (width, height) != (most, most) => {
                return wrong("patches on a side", width, most);
            }
            Positions::ByAxis if width.max(height) > most => {
                return Err(Error::BatchLimit {
                    what: "patches on a side",
                    got: width.max(height),
                    limit: most,
                });
            }
            _ => {}
        }
        let outside = |place: &&(u32, u32)| place.0 >= grid.height || place.1 >= grid.width;
        match grid.places.iter().find(outside) {
            Some(place) => wrong("row of a patch", place.0 as usize, grid.height as usize),
            None => Ok(patches),
        }
    }

    /// What is added to each patch for where it is. (patches, hidden)
    fn learned(&self, grid: PatchGrid<'_>) -> Vec<f32> {
        let TowerConfig { hidden, positions: side, facts, .. } = self.config;
        let place = |at: usize| &self.positions[at * hidden..][..hidden];
        let row = |&(down, across): &(u32, u32)| -> Vec<f32> {
            let (down, across) = (down as usize, across as usize);
            match facts.positions {
                Positions::Stretched => self.stretched(down, across, grid),
                Positions::Square => place(down * side + across).to_vec(),
                Positions::ByAxis => {
                    let (column, row) = (place(across), place(side + down));
                    column.iter().zip(row).map(|(column, row)| column + row).collect()
                }
            }
        };
        grid.places.iter().flat_map(row).collect()
    }

    /// The learned positions, stretched over the picture from edge to edge: of a patch the four around it, weighed by
    /// how near they are. (hidden)
    #[expect(clippy::cast_sign_loss, reason = "places are not negative")]
    fn stretched(&self, down: usize, across: usize, grid: PatchGrid<'_>) -> Vec<f32> {
        let TowerConfig { hidden, positions: side, .. } = self.config;
        let axis = |at: usize, size: u32| {
            let source = at as f32 * (side - 1) as f32 / size.saturating_sub(1).max(1) as f32;
            let below = (source.floor() as usize).min(side - 1);
            let far = source - below as f32;
            [(below, 1.0 - far), ((below + 1).min(side - 1), far)]
        };
        let mut stretched = vec![0.0; hidden];
        for (y, y_weight) in axis(down, grid.height) {
            for (x, x_weight) in axis(across, grid.width) {
                let learned = &self.positions[(y * side + x) * hidden..][..hidden];
                let weight = y_weight * x_weight;
                stretched.iter_mut().zip(learned).for_each(|(sum, value)| *sum += value * weight);
            }
        }
        stretched
    }

    /// By level what the rows are, those of the end first.
    fn blocks(
        &mut self,
        backend: &B,
        step: &B::Step,
        patches: usize,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Vec<f32>>>, Error> {
        let Tower { config, patches: embed, alike, blocks, last_norm, merger, levels, kv, room: r, .. } =
            self;
        let tokens = Rows::Tokens;
        embed.forward(backend, step, &mut r.pixels, &mut r.residual)?;
        backend.add(step, tokens, &r.room, &mut r.residual)?;
        let count = patches / (config.merge * config.merge);
        let mut of_levels = Vec::with_capacity(levels.len());
        for (at, block) in blocks.iter().enumerate() {
            if !go_on() {
                return Ok(None);
            }
            block.forward(backend, step, alike, kv, r)?;
            if let Some((_, merger)) = levels.iter().find(|(level, _)| *level == at) {
                let residual = backend.read(&r.residual, 0, patches)?;
                of_levels.push(merger.rows_of(backend, &residual, count, r)?);
            }
        }
        let last = match last_norm {
            Some(norm) => {
                backend.norm(step, tokens, norm, &r.residual, &mut r.branch)?;
                &r.branch
            }
            None => &r.residual,
        };
        let last = backend.read(last, 0, patches)?;
        let mut all = vec![merger.rows_of(backend, &last, count, r)?];
        all.append(&mut of_levels);
        Ok(Some(all))
    }
}

/// One sequence of so many rows, rotated by their places where they have some.
fn batch(rows: usize, places: &[(u32, u32)]) -> Batch {
    let mut batch = Batch::default();
    let small = |value: usize| u32::try_from(value).expect("patches are bounded");
    let pages = (1..=small(rows.div_ceil(PAGE_TOKENS))).map(PageId).collect();
    let row = Row { slot: 0, start: 0, len: small(rows), pages: vec![pages], wanted: 0 };
    batch.push(row, std::iter::repeat_n(Token::Known(0), rows));
    if !places.is_empty() {
        batch.positions = places.iter().map(|(down, _)| *down).collect();
        batch.sections = vec![places.iter().map(|(_, across)| *across).collect()];
    }
    batch
}
