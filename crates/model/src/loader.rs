//! From named views to weights in memory: every tensor found, its shape checked, its rows put in order, its bytes
//! reported.

use std::collections::HashSet;
use std::ops::Deref;

use fornax_compute::{LowRank, Memory, Need, Part, Role};
use fornax_format::{Checkpoint, DType, Gguf, View};

use crate::adapter::{self, Later};
use crate::config::distinct;
use crate::latent::LatentPart;
use crate::layers::Mixer;
use crate::names::{self, Dim, Name, Owner, Tensor, Transform};
use crate::relaid::{BLOCK, BLOCK_BYTES, Interleave, Relaid};
use crate::{Adapter, AdapterRoom, Config, Error, Facts, LayerConfig, Stage};

/// What adapters add to the product with one weight.
pub(crate) struct Changes<M: Memory> {
    /// By adapter; empty where none adds anything, nor may one that comes later.
    by_adapter: Vec<Vec<LowRank<M::Buf>>>,
    /// The tensors that the weight is stacked of, and their layer.
    tensors: Vec<Tensor>,
    layer: usize,
}

impl<M: Memory> Changes<M> {
    /// What an adapter adds here, ready to be put in.
    pub(crate) fn of(
        &self,
        config: &Config,
        memory: &M,
        adapter: &Adapter,
    ) -> Result<Vec<LowRank<M::Buf>>, Error> {
        adapter.changes(config, memory, &self.tensors, self.layer)
    }

    /// Puts it in. What was there is freed.
    pub(crate) fn put(&mut self, place: usize, changes: Vec<LowRank<M::Buf>>) {
        if let Some(there) = self.by_adapter.get_mut(place) {
            *there = changes;
        }
    }
}

impl<M: Memory> Deref for Changes<M> {
    type Target = [Vec<LowRank<M::Buf>>];

    fn deref(&self) -> &Self::Target {
        &self.by_adapter
    }
}

/// What the model says that it is, where it says so.
pub(crate) fn served(checkpoint: &Checkpoint) -> Option<&str> {
    match checkpoint {
        Checkpoint::HuggingFace(model) => model.config()["_name_or_path"].as_str(),
        Checkpoint::Gguf(_) => None,
    }
}

/// Hands a model its weights by their canonical names.
pub(crate) struct Loader<'a, M> {
    pub(crate) config: &'a Config,
    pub(crate) stage: &'a Stage,
    pub(crate) memory: &'a M,
    checkpoint: &'a Checkpoint,
    adapters: &'a [Adapter],
    progress: &'a mut dyn FnMut(u64, u64),
    bytes_done: u64,
    bytes_total: u64,
}

impl<'a, M: Memory> Loader<'a, M> {
    /// Checks that the checkpoint has every tensor of the stage, in its shape, and none that the model has no place for, before
    /// any is loaded.
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        (config, stage): (&'a Config, &'a Stage),
        adapters: &'a [Adapter],
        memory: &'a M,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Loader<'a, M>, Error> {
        for need in config.needs() {
            memory.supports(need)?;
        }
        if !adapters.is_empty() || config.adapter_room.adapters > 0 {
            memory.supports(Need::LowRank)?;
        }
        for adapter in adapters {
            adapter.check(config, served(checkpoint))?;
        }
        let mut known = HashSet::new();
        let mut bytes_total = 0;
        for row in config.facts.rows() {
            let layers = if row.owner == Owner::Layer { config.layers.len() } else { 1 };
            for layer in (0..layers).filter(|layer| row.when.holds(config, *layer)) {
                let Some(name) = stored_name(checkpoint, &config.facts, row, layer) else { continue };
                let needed = stage.needs(config, row, layer);
                for Expected { name, shape, share } in expected(checkpoint, config, (row, layer), name) {
                    if !needed {
                        known.insert(name);
                        continue;
                    }
                    let view =
                        tensor(checkpoint, &name).ok_or(Error::MissingTensor { tensor: name.clone() })?;
                    if view.shape != shape && !is_without_ones(row, &view.shape, &shape) {
                        return Err(Error::TensorShape { tensor: name, got: view.shape, wanted: shape });
                    }
                    // They were read with the configuration.
                    if !row.tensor.is_of_configuration() {
                        bytes_total += share.of(view.bytes.len() as u64);
                    }
                    known.insert(name);
                }
            }
        }
        for name in tensor_names(checkpoint) {
            if !known.contains(name) && !is_redundant(checkpoint, config, name) {
                let architecture = config.facts.name;
                return Err(Error::UnknownTensor { tensor: name.to_owned(), architecture });
            }
        }
        bytes_total += adapters.iter().map(Adapter::bytes).sum::<u64>();
        progress(0, bytes_total);
        Ok(Loader { config, stage, memory, checkpoint, adapters, progress, bytes_done: 0, bytes_total })
    }

    /// By adapter what it adds to the product with the weight of these tensors. A plan counts the room of those that come
    /// later, too; loading leaves it free.
    pub(crate) fn changes(&self, tensors: &[Tensor], layer: usize) -> Result<Changes<M>, Error> {
        let changes = |adapter: &Adapter| adapter.changes(self.config, self.memory, tensors, layer);
        let mut by_adapter: Vec<_> = self.adapters.iter().map(changes).collect::<Result<_, _>>()?;
        let AdapterRoom { adapters, rank } = self.config.adapter_room;
        let matrices = adapter::matrices(self.config, tensors, layer);
        if adapters > 0 && !matrices.is_empty() {
            by_adapter.resize_with(self.adapters.len() + adapters, Vec::new);
            if !self.memory.reads() {
                for [outputs, inputs] in std::iter::repeat_n(&matrices, adapters).flatten() {
                    self.memory.upload_values(&vec![0.0; rank * inputs])?;
                    self.memory.upload_values(&vec![0.0; outputs * rank])?;
                }
            }
        } else if by_adapter.iter().all(Vec::is_empty) {
            by_adapter.clear();
        }
        Ok(Changes { by_adapter, tensors: tensors.to_vec(), layer })
    }

    /// What adapters that come later are checked against, where there is room for any.
    pub(crate) fn later(&self) -> Option<Later> {
        let (room, is_decoder) = (self.config.adapter_room, self.config.pooling.is_none());
        let served = served(self.checkpoint).map(str::to_owned);
        (room.adapters > 0 && is_decoder).then(|| Later { config: self.config.clone(), served })
    }

    /// The number of adapters, whose bytes are loaded now.
    pub(crate) fn adapters(&mut self) -> u32 {
        if !self.adapters.is_empty() {
            self.bytes_done += self.adapters.iter().map(Adapter::bytes).sum::<u64>();
            (self.progress)(self.bytes_done, self.bytes_total);
        }
        u32::try_from(self.adapters.len()).expect("a command line is shorter")
    }

    /// Whether this layer has such a weight; of the model's own weights, whether the model has it.
    pub(crate) fn has(&self, tensor: Tensor, layer: usize) -> bool {
        self.config.facts.row(tensor).is_some_and(|row| row.when.holds(self.config, layer))
    }

    /// One weight of tensors stacked by their rows, for every token.
    pub(crate) fn weight(&mut self, tensors: &[Tensor], layer: usize) -> Result<M::Weight, Error> {
        self.weight_for(Role::Tokens, tensors, layer)
    }

    /// One weight of tensors stacked by their rows.
    pub(crate) fn weight_for(
        &mut self,
        role: Role,
        tensors: &[Tensor],
        layer: usize,
    ) -> Result<M::Weight, Error> {
        let mut stored = self.stored(tensors, layer)?;
        let weight = self.memory.upload_for(role, &parts(&stored)?)?;
        // What is stacked twice is stored once.
        for at in (1..tensors.len()).filter(|at| tensors[..*at].contains(&tensors[*at])) {
            stored[at].stored_bytes = 0;
        }
        self.report(&stored);
        Ok(weight)
    }

    /// One weight whose rows are looked up, and multiplied by where the model is tied.
    pub(crate) fn table(&mut self, tensor: Tensor) -> Result<M::Weight, Error> {
        let stored = self.stored(&[tensor], 0)?;
        let tied = self.config.tied && tensor == Tensor::Embedding;
        let mut parts = parts(&stored)?;
        if let (Some(inputs), Tensor::LayerTable) = (self.config.layer_inputs, tensor) {
            parts.iter_mut().for_each(|part| part.place = inputs.table_at);
        }
        let table = self.memory.upload_table(&parts, tied)?;
        self.report(&stored);
        Ok(table)
    }

    /// One row of vectors put end to end.
    pub(crate) fn vector(&mut self, tensors: &[Tensor], layer: usize) -> Result<M::Buf, Error> {
        let stored = self.stored(tensors, layer)?;
        let less_one = |stored: &Stored<'_>| stored.row.is_less_one(&self.config.facts);
        let vector = match (self.checkpoint, &stored[..]) {
            (Checkpoint::HuggingFace(_), [one]) if less_one(one) => {
                let values: Vec<f32> = numbers(&one.part)?.iter().map(|value| value + 1.0).collect();
                self.memory.upload_values(&values)?
            }
            (Checkpoint::HuggingFace(_), [one]) if one.row.transform == Transform::NegativeExp => {
                let values: Vec<f32> = numbers(&one.part)?.iter().map(|value| -value.exp()).collect();
                self.memory.upload_values(&values)?
            }
            _ => self.memory.upload_vector(&parts(&stored)?)?,
        };
        self.report(&stored);
        Ok(vector)
    }

    /// The numbers of a vector, for what is made of them here.
    pub(crate) fn values(&mut self, tensor: Tensor, layer: usize) -> Result<Vec<f32>, Error> {
        let stored = self.stored(&[tensor], layer)?;
        let values = match self.memory.reads() {
            true => numbers(&stored[0].part)?,
            false => vec![1.0; stored[0].part.view.values()],
        };
        self.report(&stored);
        Ok(values)
    }

    /// A short convolution's weights, (taps, channels) as one row: they are stored channel by channel.
    pub(crate) fn taps(&mut self, tensor: Tensor, layer: usize) -> Result<M::Buf, Error> {
        let stored = self.stored(&[tensor], layer)?;
        let values = numbers(&stored[0].part)?;
        let taps = Dim::Taps.size(self.config, layer);
        let of_tap = |tap| values.iter().skip(tap).step_by(taps).copied();
        let turned: Vec<f32> = (0..taps).flat_map(of_tap).collect();
        let taps = self.memory.upload_values(&turned)?;
        self.report(&stored);
        Ok(taps)
    }

    /// Rates of decay, (state, channels) as one row: they are stored channel by channel.
    pub(crate) fn rates(&mut self, tensor: Tensor, layer: usize) -> Result<M::Buf, Error> {
        let stored = self.stored(&[tensor], layer)?;
        let mut values = numbers(&stored[0].part)?;
        if let (Checkpoint::HuggingFace(_), Transform::NegativeExp) =
            (self.checkpoint, stored[0].row.transform)
        {
            values.iter_mut().for_each(|value| *value = -value.exp());
        }
        let state = Dim::InnerState.size(self.config, layer);
        let of_row = |row| values.iter().skip(row).step_by(state).copied();
        let turned: Vec<f32> = (0..state).flat_map(of_row).collect();
        let rates = self.memory.upload_values(&turned)?;
        self.report(&stored);
        Ok(rates)
    }

    /// The first row of a table, as a vector.
    pub(crate) fn first_row(&mut self, tensor: Tensor) -> Result<M::Buf, Error> {
        let stored = self.stored(&[tensor], 0)?;
        let view = &stored[0].part.view;
        let row_bytes = view.bytes.len() / view.shape[0].max(1);
        let columns = view.shape[1..].iter().product();
        let row = View::new(view.name, view.dtype, vec![columns], &view.bytes[..row_bytes])?;
        let vector = self.memory.upload_vector(&[Part::from(row)])?;
        self.report(&stored);
        Ok(vector)
    }

    /// The table of positions once for each kind of token, with that kind's vector added: (kinds x context, hidden) in f32.
    pub(crate) fn typed_positions(&mut self) -> Result<M::Weight, Error> {
        let stored = self.stored(&[Tensor::Positions, Tensor::TokenTypes], 0)?;
        let [rows, columns] = [self.config.token_types * self.config.context as usize, self.config.hidden];
        let mut bytes = Vec::with_capacity(rows * columns * 4);
        if self.memory.reads() {
            let [positions, types] = [numbers(&stored[0].part)?, numbers(&stored[1].part)?];
            for kind in types.chunks_exact(columns) {
                let sums = positions.chunks_exact(columns).flat_map(|row| row.iter().zip(kind));
                bytes.extend(sums.flat_map(|(position, kind)| (position + kind).to_le_bytes()));
            }
        } else {
            bytes.resize(rows * columns * 4, 0);
        }
        let name = stored[0].part.view.name;
        let view = View::new(name, DType::F32, vec![rows, columns], &bytes)?;
        let table = self.memory.upload_table(&[Part::from(view)], false)?;
        self.report(&stored);
        Ok(table)
    }

    /// Like [`vector`](Loader::vector), `None` when the model does not have all of them.
    pub(crate) fn opt_vector(&mut self, tensors: &[Tensor], layer: usize) -> Result<Option<M::Buf>, Error> {
        let all = tensors.iter().all(|tensor| self.has(*tensor, layer));
        if all { self.vector(tensors, layer).map(Some) } else { Ok(None) }
    }

    /// The matrices of all experts: of each one tensors stacked by their rows.
    pub(crate) fn experts(&mut self, tensors: &[Tensor], layer: usize) -> Result<M::Weight, Error> {
        let stored = self.experts_stored(tensors, layer)?;
        let mut parts = parts(&stored)?;
        parts.iter_mut().for_each(|part| part.place = self.config.layers[layer].experts_at);
        let weight = self.memory.upload_experts(&parts, self.experts_count(layer))?;
        self.report(&stored);
        Ok(weight)
    }

    /// The matrices of all heads of latent attention.
    pub(crate) fn of_heads(
        &mut self,
        tensor: Tensor,
        layer: usize,
        heads: usize,
    ) -> Result<M::Weight, Error> {
        let stored: Vec<_> =
            (0..heads).map(|head| self.of_head(tensor, layer, head)).collect::<Result<_, _>>()?;
        let weight = self.memory.upload_experts(&parts(&stored)?, heads)?;
        self.report(&stored);
        Ok(weight)
    }

    /// A head's matrix: one of those that lie behind each other, or some rows of the one that has keys and values.
    fn of_head(&self, wanted: Tensor, layer: usize, head: usize) -> Result<Stored<'a>, Error> {
        let facts = &self.config.facts;
        let absent = || Error::MissingTensor { tensor: format!("{wanted:?}") };
        let row = facts.row(wanted).ok_or_else(absent)?;
        let name = stored_name(self.checkpoint, facts, row, layer).ok_or_else(absent)?;
        let both = are_keys_and_values(self.checkpoint, &name);
        let (Transform::Latent(which), Mixer::Latent(latent)) =
            (row.transform, &self.config.layers[layer].mixer)
        else {
            return Err(absent());
        };
        let mut view = find(self.checkpoint, name)?;
        view = if both {
            view.rows(which.of_head(latent, head))?
        } else {
            let mut own = view.rows(head..head + 1)?;
            own.shape.remove(0);
            own
        };
        let stored_bytes = view.bytes.len() as u64;
        let relaid = match which {
            LatentPart::Keys if both => Some(Relaid::turned(&view, self.memory.reads())?),
            _ => None,
        };
        Ok(Stored { row, part: Part::from(view), relaid, stored_bytes })
    }

    /// The vectors of all experts, those of one behind those of the other; `None` when the model does not have them.
    pub(crate) fn opt_experts_vector(
        &mut self,
        tensors: &[Tensor],
        layer: usize,
    ) -> Result<Option<M::Buf>, Error> {
        if !tensors.iter().all(|tensor| self.has(*tensor, layer)) {
            return Ok(None);
        }
        let stored = self.experts_stored(tensors, layer)?;
        let vector = self.memory.upload_vector(&parts(&stored)?)?;
        self.report(&stored);
        Ok(Some(vector))
    }

    fn experts_stored(&self, tensors: &[Tensor], layer: usize) -> Result<Vec<Stored<'a>>, Error> {
        let pairs =
            (0..self.experts_count(layer)).flat_map(|expert| tensors.iter().map(move |one| (expert, *one)));
        pairs.map(|(expert, tensor)| self.one(tensor, layer, Some(expert))).collect()
    }

    fn experts_count(&self, layer: usize) -> usize {
        Dim::Experts.size(self.config, layer)
    }

    fn stored(&self, tensors: &[Tensor], layer: usize) -> Result<Vec<Stored<'a>>, Error> {
        tensors.iter().map(|&tensor| self.one(tensor, layer, None)).collect()
    }

    /// A tensor, or an expert's share of it.
    pub(crate) fn one(
        &self,
        wanted: Tensor,
        layer: usize,
        expert: Option<usize>,
    ) -> Result<Stored<'a>, Error> {
        let facts = &self.config.facts;
        let absent = || Error::MissingTensor { tensor: format!("{wanted:?}") };
        let row = facts.row(wanted).ok_or_else(absent)?;
        let name = stored_name(self.checkpoint, facts, row, layer).ok_or_else(absent)?;
        if let (Some(expert), Transform::AlternateRows(interleave), Checkpoint::HuggingFace(_)) =
            (expert, row.transform, self.checkpoint)
        {
            return self.relaid(row, &name, expert, interleave);
        }
        if let (Some(expert), Transform::TransposedRows(turn), Checkpoint::HuggingFace(_)) =
            (expert, row.transform, self.checkpoint)
        {
            let mut view = find(self.checkpoint, name)?.rows(expert..expert + 1)?;
            view.shape.remove(0);
            let relaid = Some(Relaid::transposed_behind(&view, turn, self.memory.reads())?);
            let stored_bytes = (view.bytes.len() / turn.of) as u64;
            return Ok(Stored { row, part: Part::from(view), relaid, stored_bytes });
        }
        let view = self.view(row, name, expert)?;
        let (LayerConfig { mixer, .. }, rope) = (&self.config.layers[layer], &self.config.rope);
        let stored_bytes = view.bytes.len() as u64;
        let mut part = Part::from(view);
        let (mut relaid, mut share) = (None, Share::ALL);
        match (row.transform, self.checkpoint) {
            (Transform::QkRows, container) => {
                let rows = match container {
                    Checkpoint::Gguf(_) => facts.gguf_qk_rows,
                    Checkpoint::HuggingFace(_) => facts.hugging_face_qk_rows,
                };
                if let Some(attention) = self.config.layers[layer].attention() {
                    part.rows = rows.to_halves(part.view.shape[0], attention.heads.dim, rope.dims);
                }
            }
            (Transform::HeadShare(turn), _) => {
                if let Some(attention) = self.config.layers[layer].attention() {
                    part.rows = Some(turn.head_share(part.view.shape[0] / turn.of, attention.heads.dim));
                    share = Share { own: 1, all: turn.of };
                }
            }
            (Transform::KeyHeads(portion), _) => {
                let gguf = matches!(self.checkpoint, Checkpoint::Gguf(_));
                if let Mixer::Delta(delta) = mixer
                    && let Some((all, rows)) = portion.rows(delta.heads, gguf)
                {
                    share = Share { own: rows.len(), all };
                    part.rows = Some(rows);
                }
            }
            (Transform::Latent(which), _) => {
                if let Mixer::Latent(latent) = mixer
                    && let Some((all, rows)) = which.rows(latent)
                {
                    share = Share { own: rows.len(), all };
                    part.rows = Some(row_numbers(rows));
                }
            }
            (Transform::Stretch(stretch), _) => {
                if let Some(scan) = self.config.layers[layer].scan() {
                    let (all, rows) = stretch.rows(scan.heads);
                    share = Share { own: rows.len(), all };
                    part.rows = Some(row_numbers(rows));
                }
            }
            (Transform::Inner(inner), _) => {
                if let Some(scan) = self.config.layers[layer].channel_scan() {
                    let (all, rows) = inner.rows(scan);
                    share = Share { own: rows.len(), all };
                    part.rows = Some(row_numbers(rows));
                }
            }
            (Transform::Below(turn), Checkpoint::HuggingFace(_)) => {
                let rows = part.view.shape[0] / turn.of;
                share = Share { own: 1, all: turn.of };
                part.rows = Some(row_numbers(turn.at * rows..(turn.at + 1) * rows));
            }
            (Transform::Ungrouped, Checkpoint::HuggingFace(_)) => {
                part.rows =
                    self.config.layers[layer].attention().map(|attention| names::ungrouped(attention.heads));
            }
            (Transform::Transposed, Checkpoint::HuggingFace(_)) => {
                let alone = Interleave { of: 1, at: 0 };
                relaid = Some(Relaid::transposed(&part.view, alone, self.memory.reads())?);
            }
            (Transform::Alternate(interleave), Checkpoint::HuggingFace(_)) => {
                let values = u32::try_from(part.view.values()).expect("sizes are bounded when read");
                part.rows = Some((interleave.at as u32..values).step_by(interleave.of).collect());
                share = Share { own: 1, all: interleave.of };
            }
            _ => {}
        }
        Ok(Stored { row, part, relaid, stored_bytes: share.of(stored_bytes) })
    }

    /// A tensor as it lies in the file, or an expert's share of it: by its name, or as one of those that lie together.
    fn view(&self, row: &Name, name: String, expert: Option<usize>) -> Result<View<'a>, Error> {
        match (expert, name.split_once(EXPERT)) {
            (Some(expert), Some((before, after))) => {
                find(self.checkpoint, format!("{before}{expert}{after}"))
            }
            (Some(expert), None) => {
                let mut view = find(self.checkpoint, name.clone())?.rows(expert..expert + 1)?;
                view.shape.remove(0);
                if let Some(share) = stacked(self.checkpoint, row, &name) {
                    let rows = view.shape[0] / share.of;
                    view = view.rows(share.at * rows..(share.at + 1) * rows)?;
                }
                Ok(view)
            }
            (None, _) => {
                let mut view = find(self.checkpoint, name)?;
                if row.shape.first() == Some(&Dim::One) && view.shape.len() < row.shape.len() {
                    view.shape.insert(0, 1);
                }
                match row.transform {
                    Transform::FromFirst => Ok(view.rows(self.config.first_position..view.shape[0])?),
                    _ => Ok(view),
                }
            }
        }
    }

    /// An expert's matrix of those whose rows alternate.
    fn relaid(
        &self,
        row: &'static Name,
        name: &str,
        expert: usize,
        interleave: Interleave,
    ) -> Result<Stored<'a>, Error> {
        let reads = self.memory.reads();
        let own = |name: String| -> Result<View<'a>, Error> {
            let mut view = find(self.checkpoint, name)?.rows(expert..expert + 1)?;
            view.shape.remove(0);
            Ok(view)
        };
        let (view, scales) = match tensor(self.checkpoint, name) {
            Some(_) => (own(name.to_owned())?, None),
            None => (own(format!("{name}{BLOCKS}"))?, Some(own(format!("{name}{SCALES}"))?)),
        };
        let relaid = match &scales {
            None => Relaid::transposed(&view, interleave, reads)?,
            Some(scales) => Relaid::from_blocks(&view, scales, interleave, reads)?,
        };
        let stored_bytes = (view.bytes.len() + scales.map_or(0, |scales| scales.bytes.len())) / interleave.of;
        Ok(Stored { row, part: Part::from(view), relaid: Some(relaid), stored_bytes: stored_bytes as u64 })
    }

    fn report(&mut self, stored: &[Stored<'_>]) {
        // Memory gives back the pages of what it was handed itself.
        stored.iter().filter(|stored| stored.relaid.is_some()).for_each(|stored| stored.part.view.release());
        self.bytes_done += stored.iter().map(|stored| stored.stored_bytes).sum::<u64>();
        (self.progress)(self.bytes_done, self.bytes_total);
    }
}

/// A tensor on its way into memory.
pub(crate) struct Stored<'a> {
    pub(crate) row: &'static Name,
    pub(crate) part: Part<'a>,
    /// What memory is handed in its place.
    relaid: Option<Relaid>,
    stored_bytes: u64,
}

/// What memory is handed.
pub(crate) fn parts<'s>(stored: &'s [Stored<'_>]) -> Result<Vec<Part<'s>>, Error> {
    let part = |stored: &'s Stored<'_>| -> Result<Part<'s>, Error> {
        let view = &stored.part.view;
        Ok(match &stored.relaid {
            None => stored.part.clone(),
            Some(Relaid { dtype, shape, bytes }) => {
                let mut view_relaid = View::new(view.name, *dtype, shape.clone(), bytes)?;
                let whole = |lands: &DType| matches!(shape[..], [_, columns] if columns.is_multiple_of(lands.block_values()));
                view_relaid.lands = view.lands.filter(whole).filter(|_| *dtype == view.dtype);
                Part::from(view_relaid)
            }
        })
    };
    stored.iter().map(part).collect()
}

/// The values of a stored vector.
pub(crate) fn numbers(part: &Part<'_>) -> Result<Vec<f32>, Error> {
    let view = &part.view;
    let row = View::new(view.name, view.dtype, vec![1, view.values()], view.bytes)?;
    let mut numbers = Vec::new();
    fornax_compute::cpu::expand_rows(&Part::from(row), |_, values| {
        numbers.extend_from_slice(values);
        Ok(())
    })?;
    Ok(numbers)
}

/// A stored tensor, whatever the container.
pub(crate) fn tensor<'a>(checkpoint: &'a Checkpoint, name: &str) -> Option<View<'a>> {
    match checkpoint {
        Checkpoint::Gguf(gguf) => gguf.tensor(name),
        Checkpoint::HuggingFace(model) => model.weights().tensor(name),
    }
}

/// The only value of a layer's tensor, for what is read with the configuration.
pub(crate) fn number(
    checkpoint: &Checkpoint,
    facts: &Facts,
    wanted: Tensor,
    layer: usize,
) -> Result<f32, Error> {
    let absent = || Error::MissingTensor { tensor: format!("{wanted:?}") };
    let row = facts.row(wanted).ok_or_else(absent)?;
    let name = stored_name(checkpoint, facts, row, layer).ok_or_else(absent)?;
    let view = find(checkpoint, name)?;
    match numbers(&Part::from(view.clone()))?[..] {
        [number] => Ok(number),
        _ => Err(Error::TensorShape { tensor: view.name.to_owned(), got: view.shape, wanted: vec![1] }),
    }
}

fn find(checkpoint: &Checkpoint, name: String) -> Result<View<'_>, Error> {
    tensor(checkpoint, &name).ok_or(Error::MissingTensor { tensor: name })
}

/// Rows as parts name them.
fn row_numbers(rows: impl IntoIterator<Item = usize>) -> Vec<u32> {
    rows.into_iter().map(|row| u32::try_from(row).expect("sizes are bounded when read")).collect()
}

/// What GGUF files have that were made before they had the matrices of keys and of values apart.
const KEYS_AND_VALUES: &str = "attn_kv_b.weight";

/// Whether the tensor has what keys are made by and what values are made by, as all Hugging Face files have it.
fn are_keys_and_values(checkpoint: &Checkpoint, name: &str) -> bool {
    matches!(checkpoint, Checkpoint::HuggingFace(_)) || name.ends_with(KEYS_AND_VALUES)
}

/// Where the number of an expert stands in a name.
const EXPERT: &str = "{}";

/// What stands behind the name of a matrix of experts that is stored in blocks of four bits.
pub(crate) const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";

/// A tensor that must be there.
pub(crate) struct Expected {
    pub(crate) name: String,
    shape: Vec<usize>,
    /// What of it the weight is.
    share: Share,
}

/// A part of a tensor that several weights share.
#[derive(Clone, Copy)]
struct Share {
    own: usize,
    all: usize,
}

impl Share {
    const ALL: Share = Share { own: 1, all: 1 };

    fn of(self, bytes: u64) -> u64 {
        bytes / self.all as u64 * self.own as u64
    }
}

/// Which of the matrices that lie below each other for each expert a weight is, where its tensor has several.
fn stacked(checkpoint: &Checkpoint, row: &Name, name: &str) -> Option<Interleave> {
    let gguf = matches!(checkpoint, Checkpoint::Gguf(_));
    match row.transform {
        Transform::Stacked(turn, _) if !gguf && !name.contains(EXPERT) => Some(turn),
        Transform::StackedInBoth(turn, _) if !gguf || name.ends_with(row.gguf) => Some(turn),
        _ => None,
    }
}

/// Whether a tensor has the shape but for dimensions of one, which files may leave out.
fn is_without_ones(row: &Name, got: &[usize], wanted: &[usize]) -> bool {
    let others = row.shape.iter().zip(wanted).filter(|(dim, _)| **dim != Dim::One).map(|(_, size)| size);
    row.shape.contains(&Dim::One) && others.eq(got)
}

/// The tensors of a weight: one, or one for each expert, or blocks and scales.
pub(crate) fn expected(
    checkpoint: &Checkpoint,
    config: &Config,
    (row, layer): (&Name, usize),
    name: String,
) -> Vec<Expected> {
    let shape: Vec<usize> = row.shape.iter().map(|dim| dim.size(config, layer)).collect();
    let shared = |shape, share| vec![Expected { name: name.clone(), shape, share }];
    let one = |shape, of| shared(shape, Share { own: 1, all: of });
    let gguf = matches!(checkpoint, Checkpoint::Gguf(_));
    match (row.transform, &config.layers[layer].mixer) {
        (Transform::HeadShare(turn), _) => {
            let rows = shape[0] * turn.of;
            return one([&[rows], &shape[1..]].concat(), turn.of);
        }
        (Transform::KeyHeads(portion), Mixer::Delta(delta)) => {
            if let Some((all, rows)) = portion.rows(delta.heads, gguf) {
                return shared([&[all], &shape[1..]].concat(), Share { own: rows.len(), all });
            }
        }
        (Transform::Latent(which), Mixer::Latent(latent)) => {
            if let Some((all, rows)) = which.rows(latent) {
                return shared([&[all], &shape[1..]].concat(), Share { own: rows.len(), all });
            }
            if are_keys_and_values(checkpoint, &name) {
                let all = latent.kept + latent.value;
                let own = if which == LatentPart::Keys { latent.kept } else { latent.value };
                return shared(vec![latent.heads * all, latent.latent], Share { own, all });
            }
        }
        (Transform::Stretch(stretch), Mixer::Scan(scan) | Mixer::Beside(_, scan)) => {
            let (all, rows) = stretch.rows(scan.heads);
            return shared([&[all], &shape[1..]].concat(), Share { own: rows.len(), all });
        }
        (Transform::Inner(inner), Mixer::ChannelScan(scan)) => {
            let (all, rows) = inner.rows(scan);
            return shared([&[all], &shape[1..]].concat(), Share { own: rows.len(), all });
        }
        (Transform::Groups, Mixer::Scan(scan) | Mixer::Beside(_, scan)) if gguf => {
            return one(vec![scan.heads.groups, shape[0] / scan.heads.groups], 1);
        }
        _ => {}
    }
    if row.transform == Transform::FromFirst {
        let share = Share { own: shape[0] - config.first_position, all: shape[0] };
        return shared(shape, share);
    }
    if let (Some(turn), &[experts, rows, columns]) = (stacked(checkpoint, row, &name), &shape[..]) {
        return one(vec![experts, turn.of * rows, columns], turn.of);
    }
    if gguf {
        return one(shape, 1);
    }
    if let Some((before, after)) = name.split_once(EXPERT) {
        let own = |expert| Expected {
            name: format!("{before}{expert}{after}"),
            shape: shape[1..].to_vec(),
            share: Share::ALL,
        };
        return (0..shape[0]).map(own).collect();
    }
    match (row.transform, &shape[..]) {
        (Transform::Transposed, _) => one(shape.into_iter().rev().collect(), 1),
        (Transform::Below(Interleave { of, .. }), &[rows, columns]) => one(vec![of * rows, columns], of),
        (Transform::Alternate(Interleave { of, .. }), &[experts, values]) => {
            one(vec![experts, of * values], of)
        }
        (Transform::TransposedRows(Interleave { of, .. }), &[experts, rows, columns]) => {
            one(vec![experts, columns, of * rows], of)
        }
        (Transform::AlternateRows(Interleave { of, .. }), &[experts, rows, columns]) => {
            let blocks = format!("{name}{BLOCKS}");
            if tensor(checkpoint, &blocks).is_none() {
                return one(vec![experts, columns, of * rows], of);
            }
            let (count, share) = (columns.div_ceil(BLOCK), Share { own: 1, all: of });
            vec![
                Expected { name: blocks, shape: vec![experts, of * rows, count, BLOCK_BYTES], share },
                Expected { name: format!("{name}{SCALES}"), shape: vec![experts, of * rows, count], share },
            ]
        }
        _ => one(shape, 1),
    }
}

/// The name of a weight in this container; `None` where the container keeps it elsewhere.
pub(crate) fn stored_name(
    checkpoint: &Checkpoint,
    facts: &Facts,
    row: &Name,
    layer: usize,
) -> Option<String> {
    let (layers, name) = match checkpoint {
        Checkpoint::Gguf(_) => ("blk", Some(row.gguf).filter(|name| !name.is_empty())),
        Checkpoint::HuggingFace(_) => (facts.layers, row.hugging_face),
    };
    let name = match row.owner {
        Owner::Model => name?.to_owned(),
        Owner::Layer => format!("{layers}.{layer}.{}", name?),
    };
    if let Checkpoint::Gguf(_) = checkpoint {
        return match row.transform {
            Transform::StackedInBoth(_, apart) if tensor(checkpoint, &name).is_none() => {
                Some(format!("{layers}.{layer}.{apart}"))
            }
            Transform::Latent(LatentPart::Keys | LatentPart::Values)
                if tensor(checkpoint, &name).is_none() =>
            {
                let both = format!("{layers}.{layer}.{KEYS_AND_VALUES}");
                Some(if tensor(checkpoint, &both).is_some() { both } else { name })
            }
            _ => Some(name),
        };
    }
    let found = |name: String| {
        // Where each expert has a tensor, the first one's is looked for.
        let is_there = |name: &str| tensor(checkpoint, &name.replace(EXPERT, "0")).is_some();
        if is_there(&name) {
            return Some(name);
        }
        let other = |(from, to): &(&str, &str)| Some(format!("{to}{}", name.strip_prefix(from)?));
        facts.beginnings.iter().filter_map(other).find(|other| is_there(other))
    };
    let apart = || match row.transform {
        Transform::Stacked(_, apart) => found(format!("{layers}.{layer}.{apart}")),
        _ => None,
    };
    found(name.clone()).or_else(apart).or(Some(name))
}

pub(crate) fn tensor_names(checkpoint: &Checkpoint) -> Vec<&str> {
    match checkpoint {
        Checkpoint::Gguf(gguf) => gguf.tensors().map(|view| view.name).collect(),
        Checkpoint::HuggingFace(model) => model.weights().tensors().map(|view| view.name).collect(),
    }
}

impl Config {
    /// What a checkpoint has beside the model that is computed, each by the beginning of its tensors' names: what reads
    /// images, layers that only guess ahead.
    pub fn not_computed(&self, checkpoint: &Checkpoint) -> Vec<String> {
        let beginning = |name: &str| match checkpoint {
            Checkpoint::Gguf(_) => is_ahead(self, checkpoint, name),
            Checkpoint::HuggingFace(_) => {
                let mut beginnings = self.facts.not_text.iter();
                beginnings
                    .find(|beginning| name.starts_with(**beginning))
                    .map(|beginning| (*beginning).to_owned())
                    .or_else(|| is_ahead(self, checkpoint, name))
            }
        };
        let beside = match checkpoint {
            Checkpoint::Gguf(gguf) => gguf.beside(),
            Checkpoint::HuggingFace(_) => &[],
        };
        let first_word = |name: &str| name.split_inclusive('.').next().unwrap_or_default().to_owned();
        let beside = beside.iter().flat_map(Gguf::tensors).map(|view| first_word(view.name));
        distinct(tensor_names(checkpoint).into_iter().filter_map(beginning).chain(beside))
    }
}

/// The beginning of a tensor's name where it belongs to a layer that only guesses ahead; these are counted behind the
/// others.
fn is_ahead(config: &Config, checkpoint: &Checkpoint, name: &str) -> Option<String> {
    let layers = match checkpoint {
        Checkpoint::Gguf(_) => "blk",
        Checkpoint::HuggingFace(_) => config.facts.layers,
    };
    let number = name.strip_prefix(layers)?.strip_prefix('.')?.split('.').next()?.parse::<usize>().ok()?;
    (config.ahead && number >= config.layers.len()).then(|| format!("{layers}.{number}."))
}

/// Tensors that say again what is known: frequencies that follow from config.json, and the head of a Hugging Face
/// model that is declared tied, where the embedding is what counts.
fn is_redundant(checkpoint: &Checkpoint, config: &Config, name: &str) -> bool {
    if is_ahead(config, checkpoint, name).is_some() {
        return true;
    }
    let Checkpoint::HuggingFace(_) = checkpoint else { return false };
    let head = config.facts.row(Tensor::Output).and_then(|row| row.hugging_face);
    names::NOT_WEIGHTS.iter().any(|end| name.ends_with(end))
        || config.facts.not_text.iter().any(|beginning| name.starts_with(beginning))
        || (config.tied && head.is_some_and(|head| name.ends_with(head)))
}
