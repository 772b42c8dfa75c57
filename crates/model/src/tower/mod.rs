//! A tower: what makes of a picture's patches the rows that a language model reads in place of tokens. This one is that
//! of Qwen3-VL and of Qwen3.5: patches see each other in both directions and are rotated by where they are, down and
//! across; learned positions are stretched over the picture; four patches become a row at the end, and where the model
//! has it also after some blocks on the way (the levels, which go into the first layers of the language model).
//!
//! It is a model of its own over a backend of its own, and knows no image file: patches come as numbers.

mod config;
mod weights;

use fornax_compute::{
    Attention, Backend, Batch, Error, Heads, KvDType, KvGroup, KvKind, KvLayer, KvSpec, Memory, Need, Norm,
    PAGE_TOKENS, PageId, Pointwise, Purpose, Rope, Row, Rows, Token,
};
use fornax_format::Checkpoint;

pub use config::TowerConfig;
use weights::{Layer, Name, Weights};

/// What angles are powers of; the reference has no other.
const ROPE_BASE: f64 = 10_000.0;

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
    /// (side x side, hidden): on the host, where they are stretched over each picture.
    positions: Vec<f32>,
    rope: Rope<M::Buf>,
    blocks: Vec<Block<M>>,
    merger: Merger<M>,
    /// After which block, and what makes rows there.
    levels: Vec<(usize, Merger<M>)>,
    kv: M::Kv,
    room: Room<M>,
}

struct Block<M: Memory> {
    attention_norm: Norm<M::Buf>, // (hidden)
    qkv: Layer<M>,                // (3 hidden, hidden)
    output: Layer<M>,             // (hidden, hidden)
    mlp_norm: Norm<M::Buf>,       // (hidden)
    up: Layer<M>,                 // (ffn, hidden)
    down: Layer<M>,               // (hidden, ffn)
}

/// Several patches become a row.
struct Merger<M: Memory> {
    /// (hidden) of each patch, or (merged) of those that become one.
    norm: Norm<M::Buf>,
    up: Layer<M>,   // (merged, merged)
    down: Layer<M>, // (out, merged)
}

/// What a picture is computed in; by patches, then by merged rows.
struct Room<M: Memory> {
    pixels: M::Buf,   // (patches, patch values)
    residual: M::Buf, // (patches, hidden)
    branch: M::Buf,   // (patches, hidden)
    room: M::Buf,     // (patches, hidden)
    qkv: M::Buf,      // (patches, 3 hidden)
    attended: M::Buf, // (patches, hidden)
    inner: M::Buf,    // (patches, ffn)
    merged: M::Buf,   // (rows, merged)
    above: M::Buf,    // (rows, merged)
    out: M::Buf,      // (rows, out)
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
        let TowerConfig { hidden, ffn, out, merge, .. } = *config;
        let square = merge * merge;
        let (merged, patches_max) = (hidden * square, patches_max.next_multiple_of(square));
        let mut weights = Weights::new(checkpoint, config, memory, progress);
        let heads = heads(config);
        // A quarter of a head's values turn by the row, another by the column; with their partners that is all of it.
        let quarter = heads.dim / 4;
        let frequency = |at: usize| ROPE_BASE.powf(-(at as f64) / quarter as f64) as f32;
        let frequencies: Vec<f32> = (0..quarter).chain(0..quarter).map(frequency).collect();
        let block = |weights: &mut Weights<'_, M>, at| -> Result<Block<M>, crate::Error> {
            Ok(Block {
                attention_norm: weights.norm(Name::AttentionNorm(at), hidden)?,
                qkv: weights.layer(Name::Qkv(at), 3 * hidden, hidden)?,
                output: weights.layer(Name::AttentionOutput(at), hidden, hidden)?,
                mlp_norm: weights.norm(Name::MlpNorm(at), hidden)?,
                up: weights.layer(Name::Up(at), ffn, hidden)?,
                down: weights.layer(Name::Down(at), hidden, ffn)?,
            })
        };
        let level = |weights: &mut Weights<'_, M>, at| -> Result<Merger<M>, crate::Error> {
            Ok(Merger {
                norm: weights.norm(Name::LevelNorm(at), merged)?,
                up: weights.layer(Name::LevelUp(at), merged, merged)?,
                down: weights.layer(Name::LevelDown(at), out, merged)?,
            })
        };
        let blocks = (0..config.blocks).map(|at| block(&mut weights, at)).collect::<Result<_, _>>()?;
        let levels = config.levels.iter().enumerate();
        let levels = levels.map(|(at, block)| Ok((*block, level(&mut weights, at)?)));
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
        let tower = Tower {
            patches: weights.patches()?,
            positions: weights.positions()?,
            rope: Rope {
                pairs: frequencies.len(),
                frequencies: memory.upload_values(&frequencies)?,
                magnitude: 1.0,
                sections: [vec![0; quarter], vec![1; quarter]].concat(),
            },
            blocks,
            merger: Merger {
                norm: weights.norm(Name::MergerNorm, hidden)?,
                up: weights.layer(Name::MergerUp, merged, merged)?,
                down: weights.layer(Name::MergerDown, out, merged)?,
            },
            levels,
            kv: memory.alloc_kv(&KvSpec { groups: vec![group], dtype: KvDType::F32 })?,
            room: Room {
                pixels: tokens(config.patch_values())?,
                residual: memory.alloc(Purpose::Residual, patches_max, hidden)?,
                branch: tokens(hidden)?,
                room: tokens(hidden)?,
                qkv: tokens(3 * hidden)?,
                attended: tokens(hidden)?,
                inner: tokens(ffn)?,
                merged: rows(merged)?,
                above: rows(merged)?,
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
    Heads { query: config.heads, kv: config.heads, dim: config.hidden / config.heads }
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
        let positions = self.stretched(grid);
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
        let outside = |place: &&(u32, u32)| place.0 >= grid.height || place.1 >= grid.width;
        match grid.places.iter().find(outside) {
            Some(place) => wrong("row of a patch", place.0 as usize, grid.height as usize),
            None => Ok(patches),
        }
    }

    /// The learned positions, stretched over the picture from edge to edge: of each patch the four around it, weighed by
    /// how near they are. (patches, hidden)
    #[expect(clippy::cast_sign_loss, reason = "places are not negative")]
    fn stretched(&self, grid: PatchGrid<'_>) -> Vec<f32> {
        let TowerConfig { hidden, positions: side, .. } = self.config;
        let axis = |at: u32, size: u32| {
            let source = at as f32 * (side - 1) as f32 / size.saturating_sub(1).max(1) as f32;
            let below = (source.floor() as usize).min(side - 1);
            let far = source - below as f32;
            [(below, 1.0 - far), ((below + 1).min(side - 1), far)]
        };
        let mut stretched = vec![0.0; grid.places.len() * hidden];
        for (row, &(down, across)) in stretched.chunks_exact_mut(hidden).zip(grid.places) {
            for (y, y_weight) in axis(down, grid.height) {
                for (x, x_weight) in axis(across, grid.width) {
                    let learned = &self.positions[(y * side + x) * hidden..][..hidden];
                    let weight = y_weight * x_weight;
                    row.iter_mut().zip(learned).for_each(|(sum, value)| *sum += value * weight);
                }
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
        let Tower { config, patches: embed, rope, blocks, merger, levels, kv, room: r, .. } = self;
        let heads = heads(config);
        let shape = Attention {
            causal: false,
            ..Attention::causal(heads, KvLayer { group: 0, layer: 0 }, (heads.dim as f32).powf(-0.5))
        };
        let tokens = Rows::Tokens;
        backend.linear(step, tokens, &embed.weight, Some(&embed.bias), &r.pixels, &mut r.residual)?;
        backend.add(step, tokens, &r.room, &mut r.residual)?;
        let count = patches / (config.merge * config.merge);
        let mut of_levels = Vec::with_capacity(levels.len());
        for (at, block) in blocks.iter().enumerate() {
            if !go_on() {
                return Ok(None);
            }
            backend.norm(step, tokens, &block.attention_norm, &r.residual, &mut r.branch)?;
            backend.linear(step, tokens, &block.qkv.weight, Some(&block.qkv.bias), &r.branch, &mut r.qkv)?;
            backend.attend(step, &shape, Some(rope), &mut r.qkv, kv, &mut r.attended)?;
            backend.linear_add(
                step,
                tokens,
                block.output.linear(),
                &r.attended,
                &mut r.room,
                &mut r.residual,
            )?;
            backend.norm(step, tokens, &block.mlp_norm, &r.residual, &mut r.branch)?;
            backend.linear(step, tokens, &block.up.weight, Some(&block.up.bias), &r.branch, &mut r.inner)?;
            backend.pointwise(step, tokens, Pointwise::GeluTanh, &mut r.inner)?;
            backend.linear_add(step, tokens, block.down.linear(), &r.inner, &mut r.room, &mut r.residual)?;
            if let Some((_, merger)) = levels.iter().find(|(level, _)| *level == at) {
                let merged = backend.read(&r.residual, 0, patches)?;
                backend.write(&mut r.above, 0, &merged)?;
                let rows = begin_rows(backend, patches, config)?;
                backend.norm(&rows, tokens, &merger.norm, &r.above, &mut r.merged)?;
                of_levels.push(merge(backend, rows, merger, r, count)?);
            }
        }
        backend.norm(step, tokens, &merger.norm, &r.residual, &mut r.branch)?;
        let normed = backend.read(&r.branch, 0, patches)?;
        backend.write(&mut r.merged, 0, &normed)?;
        let rows = begin_rows(backend, patches, config)?;
        let mut all = vec![merge(backend, rows, merger, r, count)?];
        all.append(&mut of_levels);
        Ok(Some(all))
    }
}

/// A step of the rows that patches become.
fn begin_rows<B: Backend>(backend: &B, patches: usize, config: &TowerConfig) -> Result<B::Step, Error> {
    backend.begin(&batch(patches / (config.merge * config.merge), &[]))
}

/// `merged`, whose norm was taken, through the two layers of a merger.
fn merge<B: Backend>(
    backend: &B,
    rows: B::Step,
    merger: &Merger<B>,
    r: &mut Room<B>,
    count: usize,
) -> Result<Vec<f32>, Error> {
    let tokens = Rows::Tokens;
    backend.linear(&rows, tokens, &merger.up.weight, Some(&merger.up.bias), &r.merged, &mut r.above)?;
    backend.pointwise(&rows, tokens, Pointwise::Gelu, &mut r.above)?;
    backend.linear(&rows, tokens, &merger.down.weight, Some(&merger.down.bias), &r.above, &mut r.out)?;
    let out = backend.read(&r.out, 0, count)?;
    backend.finish(rows)?;
    Ok(out)
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
