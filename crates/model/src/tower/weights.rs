//! A tower's tensors by their names in both containers, as its blocks compute with them.

use std::collections::HashSet;

use fornax_compute::cpu::expand_rows;
use fornax_compute::{Memory, Need, Norm, NormKind, QkNorm};
use fornax_format::{Checkpoint, DType, View};

use super::config::{Spelling, TowerConfig};
use super::facts::{Part, Reads, Row};
use super::head::HeadLayout;
use super::layer::{Bounds, Layer};
use crate::Error;

/// What stands behind a part's name in front of a matrix or a table, in the order in which it is looked for.
const MATRIX: &[&str] = &[".weight", ".linear.weight", "_weight", ""];
const BIAS: &[&str] = &[".bias"];

/// Hands a tower its weights.
pub(super) struct Weights<'a, M> {
    checkpoint: &'a Checkpoint,
    config: &'a TowerConfig,
    pub(super) memory: &'a M,
    layout: HeadLayout,
    /// The tensors that were asked for.
    known: HashSet<String>,
    progress: &'a mut dyn FnMut(u64),
}

/// What of a matrix is heads, whose values are put where they are computed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum InHeads {
    Nothing,
    Rows,
    Columns,
}

/// Layers that read the same rows, below each other.
#[derive(Clone, Copy)]
pub(super) struct Stack<'p> {
    pub(super) parts: &'p [Part],
    /// The number of their block.
    pub(super) at: usize,
    /// Of each.
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) heads: InHeads,
}

/// A matrix that lies in its file, or was made of one that does.
enum Matrix<'a> {
    Stored(View<'a>),
    Made { dtype: DType, shape: Vec<usize>, bytes: Vec<u8> },
}

impl Matrix<'_> {
    fn view(&self) -> Result<View<'_>, Error> {
        match self {
            Matrix::Stored(view) => Ok(view.clone()),
            Matrix::Made { dtype, shape, bytes } => Ok(View::new("tower", *dtype, shape.clone(), bytes)?),
        }
    }

    fn release(&self) {
        if let Matrix::Stored(view) = self {
            view.release();
        }
    }
}

impl<'a, M: Memory> Weights<'a, M> {
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        config: &'a TowerConfig,
        memory: &'a M,
        progress: &'a mut dyn FnMut(u64),
    ) -> Weights<'a, M> {
        Weights { checkpoint, config, memory, layout: config.head_layout(), known: HashSet::new(), progress }
    }

    /// Layers that read the same, as one.
    pub(super) fn stack(&mut self, stack: Stack<'_>) -> Result<Layer<M>, Error> {
        let Stack { parts, at, rows, columns, heads } = stack;
        let (mut matrices, mut biases) = (Vec::new(), Vec::new());
        for &part in parts {
            let name = self.wanted(part, at)?;
            let view = self.view(name, &[rows, columns])?;
            (self.progress)(view.bytes.len() as u64);
            matrices.push(self.in_heads(view, heads)?);
            let bias = self.opt_values(part, at, BIAS, &[rows])?;
            biases.extend(bias.map(|bias| self.rows_in_heads(bias, heads)));
        }
        let views = matrices.iter().map(|matrix| Ok(matrix.view()?.into()));
        let weight = self.memory.upload(&views.collect::<Result<Vec<_>, Error>>()?)?;
        matrices.iter().for_each(Matrix::release);
        let biases = biases.concat();
        let bias = if biases.is_empty() { None } else { Some(self.memory.upload_values(&biases)?) };
        Ok(Layer { weight, bias, bounds: self.bounds(stack)? })
    }

    /// One layer, whose values lie as they are stored.
    pub(super) fn layer(
        &mut self,
        part: Part,
        at: usize,
        rows: usize,
        columns: usize,
    ) -> Result<Layer<M>, Error> {
        self.stack(Stack { parts: &[part], at, rows, columns, heads: InHeads::Nothing })
    }

    /// A layer whose matrix is stored on its side.
    pub(super) fn turned(&mut self, part: Part, rows: usize, columns: usize) -> Result<Layer<M>, Error> {
        let name = self.wanted(part, 0)?;
        let view = self.view(name, &[columns, rows])?;
        (self.progress)(view.bytes.len() as u64);
        let stored = self.numbers(&view)?;
        let turned = (0..rows).flat_map(|row| stored.iter().skip(row).step_by(rows)).copied().collect();
        Ok(Layer { weight: self.upload(turned, rows, columns)?, bias: None, bounds: None })
    }

    /// A matrix of f32.
    fn upload(&self, values: Vec<f32>, rows: usize, columns: usize) -> Result<M::Weight, Error> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let view = View::new("tower", DType::F32, vec![rows, columns], &bytes)?;
        Ok(self.memory.upload(&[view.into()])?)
    }

    /// What gates, widens and narrows in a block. Some files in GGUF call the latter two by each other's names.
    pub(super) fn feed_forward(&self, at: usize) -> [Part; 3] {
        let TowerConfig { hidden, ffn, .. } = *self.config;
        let widens = |part| {
            let name = self.found(part, at, MATRIX);
            name.and_then(|name| self.stored(&name)).is_some_and(|view| view.shape == [ffn, hidden])
        };
        match widens(Part::Down) && !widens(Part::Up) {
            true => [Part::Gate, Part::Down, Part::Up],
            false => [Part::Gate, Part::Up, Part::Down],
        }
    }

    /// A matrix with its heads as they are computed.
    fn in_heads(&self, view: View<'a>, heads: InHeads) -> Result<Matrix<'a>, Error> {
        let (rows, columns) = (view.shape[0], view.shape[1]);
        let order = match heads {
            InHeads::Nothing => None,
            InHeads::Rows => self.layout.order(rows),
            InHeads::Columns => self.layout.order(columns),
        };
        let Some(order) = order else { return Ok(Matrix::Stored(view)) };
        let made = match heads {
            // Rows of any type: zeros are zeros in all of them.
            InHeads::Rows => {
                let width = view.bytes.len() / rows.max(1);
                let bytes = self.gathered(view.bytes, width, &order);
                Matrix::Made { dtype: view.dtype, shape: vec![order.len(), columns], bytes }
            }
            _ => {
                let dtype = if view.dtype == DType::BF16 { DType::BF16 } else { DType::F32 };
                let values: Vec<u8> = match dtype {
                    DType::BF16 => Vec::new(),
                    _ => self.numbers(&view)?.iter().flat_map(|value| value.to_le_bytes()).collect(),
                };
                let (stored, width) = if dtype == DType::BF16 { (view.bytes, 2) } else { (&values[..], 4) };
                let of_row = stored.chunks_exact(columns * width);
                let bytes = of_row.flat_map(|row| self.gathered(row, width, &order)).collect();
                Matrix::Made { dtype, shape: vec![rows, order.len()], bytes }
            }
        };
        view.release();
        Ok(made)
    }

    /// Pieces of so many bytes in another order; of a plan, as many zeros.
    fn gathered(&self, stored: &[u8], width: usize, order: &[Option<usize>]) -> Vec<u8> {
        let mut bytes = vec![0; order.len() * width];
        if self.memory.reads() {
            for (to, from) in bytes.chunks_exact_mut(width).zip(order) {
                if let Some(from) = from {
                    to.copy_from_slice(&stored[from * width..][..width]);
                }
            }
        }
        bytes
    }

    fn rows_in_heads(&self, values: Vec<f32>, heads: InHeads) -> Vec<f32> {
        match self.layout.order(values.len()).filter(|_| heads == InHeads::Rows) {
            Some(order) => order.iter().map(|from| from.map_or(0.0, |from| values[from])).collect(),
            None => values,
        }
    }

    /// How far what a stack reads and makes may be from zero, where its files say so.
    fn bounds(&mut self, stack: Stack<'_>) -> Result<Option<Bounds<M>>, Error> {
        let Stack { parts, at, rows, columns, heads } = stack;
        let mut said = Vec::new();
        for &part in parts {
            let mut of_part = [f32::NEG_INFINITY, f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY];
            for (bound, end) in
                of_part.iter_mut().zip([".input_min", ".input_max", ".output_min", ".output_max"])
            {
                if let Some(value) = self.opt_values(part, at, &[end], &[1])? {
                    *bound = value[0];
                }
            }
            said.push(of_part);
        }
        if said.iter().flatten().all(|bound| bound.is_infinite()) {
            return Ok(None);
        }
        if said.iter().any(|of_part| of_part[..2] != said[0][..2]) {
            return Err(Error::Unsupported {
                what: format!("layers of block {at} of the tower that read the same within different bounds"),
                supported: "the same bounds".to_owned(),
            });
        }
        self.memory.supports(Need::Clamp)?;
        let wide = |values: usize, is_headed: bool| match self.layout.order(values).filter(|_| is_headed) {
            Some(order) => order.len(),
            None => values,
        };
        let (rows, columns) = (wide(rows, heads == InHeads::Rows), wide(columns, heads == InHeads::Columns));
        let of = |bound: usize| said.iter().flat_map(move |of_part| vec![of_part[bound]; rows]);
        let read = [vec![said[0][0]; columns], vec![said[0][1]; columns]].concat();
        let made: Vec<f32> = of(2).chain(of(3)).collect();
        Ok(Some(Bounds { read: self.memory.upload_values(&read)?, made: self.memory.upload_values(&made)? }))
    }

    /// A norm of rows of so many values.
    pub(super) fn norm(
        &mut self,
        kind: NormKind,
        part: Part,
        at: usize,
        columns: usize,
    ) -> Result<Norm<M::Buf>, Error> {
        let name = self.wanted(part, at)?;
        let mut weight = self.values(name, &[columns])?;
        // The files of Gemma 3 hold it less one, as those of its language model do.
        if part == Part::MeanNorm && matches!(self.config.spelling, Spelling::HuggingFace(_)) {
            weight.iter_mut().for_each(|value| *value += 1.0);
        }
        let bias = match kind {
            NormKind::Layer => self.opt_values(part, at, BIAS, &[columns])?,
            NormKind::Rms => None,
        };
        Ok(Norm {
            kind,
            weight: self.memory.upload_values(&weight)?,
            bias: bias.map(|bias| self.memory.upload_values(&bias)).transpose()?,
            eps: self.config.norm_eps,
        })
    }

    /// The same where the family has it.
    pub(super) fn opt_norm(
        &mut self,
        kind: NormKind,
        part: Part,
        at: usize,
        columns: usize,
    ) -> Result<Option<Norm<M::Buf>>, Error> {
        match self.config.facts.name_of(part) {
            Some(_) => self.norm(kind, part, at, columns).map(Some),
            None => Ok(None),
        }
    }

    /// A norm without weights.
    pub(super) fn bare_norm(&self, columns: usize) -> Result<Norm<M::Buf>, Error> {
        Ok(Norm::rms(self.memory.upload_values(&vec![1.0; columns])?, self.config.norm_eps))
    }

    /// Norms of queries and keys, and of values without weights of their own: all of one head.
    pub(super) fn head_norms(&mut self, at: usize) -> Result<Option<QkNorm<M::Buf>>, Error> {
        if self.config.facts.name_of(Part::QueryNorm).is_none() {
            return Ok(None);
        }
        let dim = self.layout.stored();
        let mut stored = |part| {
            let name = self.wanted(part, at)?;
            self.values(name, &[dim])
        };
        let (query, key) = (stored(Part::QueryNorm)?, stored(Part::KeyNorm)?);
        let value = self.head_norm(vec![1.0; dim])?;
        Ok(Some(QkNorm { query: self.head_norm(query)?, key: self.head_norm(key)?, value: Some(value) }))
    }

    /// The zeros that a head is filled up with make the mean of its squares smaller, so weights and epsilon are, too.
    fn head_norm(&self, stored: Vec<f32>) -> Result<Norm<M::Buf>, Error> {
        let share = self.layout.stored() as f32 / self.layout.padded() as f32;
        let mut weight = self.rows_in_heads(stored, InHeads::Rows);
        weight.iter_mut().for_each(|value| *value *= share.sqrt());
        Ok(Norm::rms(self.memory.upload_values(&weight)?, self.config.norm_eps * share))
    }

    /// What makes rows of patches: of each colour, the pixels of a patch.
    pub(super) fn patches(&mut self) -> Result<Layer<M>, Error> {
        let TowerConfig { hidden, patch, facts, .. } = *self.config;
        let name = self.wanted(Part::Patch, 0)?;
        let plane = patch * patch;
        let in_gguf = matches!(self.config.spelling, Spelling::Gguf(_));
        let picture = [hidden, 3, patch, patch];
        let values = match facts.reads {
            // For two frames that follow each other; those of a still picture are the same, so the sum of both is all
            // that is needed.
            Reads::TwoFrames if in_gguf => {
                let second = self.values(format!("{name}.1"), &picture)?;
                let first = self.values(name, &picture)?;
                first.iter().zip(&second).map(|(first, second)| first + second).collect()
            }
            Reads::TwoFrames => {
                let both = self.values(name, &[hidden, 3, 2, patch, patch])?;
                let sum = |pair: &[f32]| -> Vec<f32> {
                    pair[..plane].iter().zip(&pair[plane..]).map(|(first, second)| first + second).collect()
                };
                both.chunks_exact(2 * plane).flat_map(sum).collect()
            }
            Reads::Pixels if !in_gguf => {
                let stored = self.values(name, &[hidden, 3 * plane])?;
                let colour = |row: &[f32], colour: usize| -> Vec<f32> {
                    row.iter().skip(colour).step_by(3).copied().collect()
                };
                stored
                    .chunks_exact(3 * plane)
                    .flat_map(|row| (0..3).flat_map(|at| colour(row, at)).collect::<Vec<_>>())
                    .collect()
            }
            Reads::Picture | Reads::Pixels => self.values(name, &picture)?,
        };
        let bias = self.opt_values(Part::Patch, 0, BIAS, &[hidden])?;
        let bias = bias.map(|bias| self.memory.upload_values(&bias)).transpose()?;
        Ok(Layer { weight: self.upload(values, hidden, 3 * plane)?, bias, bounds: None })
    }

    /// A table on the host.
    pub(super) fn table(&mut self, part: Part, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let name = self.wanted(part, 0)?;
        self.values(name, shape)
    }

    /// The same where it is there.
    pub(super) fn opt_table(&mut self, part: Part, values: usize) -> Result<Option<Vec<f32>>, Error> {
        self.opt_values(part, 0, MATRIX, &[values])
    }

    /// Refuses tensors of the tower that nobody asked for: leaving one out would compute another one.
    pub(super) fn finish(self) -> Result<(), Error> {
        let unknown = |name: &str| !self.known.contains(name);
        let unknown = match (self.config.spelling, self.checkpoint) {
            (Spelling::Gguf(file), Checkpoint::Gguf(gguf)) => {
                // What hears lies in the same file.
                let hears = |name: &str| name.starts_with("a.") || name.starts_with("mm.a.");
                let mut names = gguf.beside()[file].tensors().map(|view| view.name);
                names.find(|name| !hears(name) && unknown(name))
            }
            (Spelling::HuggingFace(beginning), Checkpoint::HuggingFace(model)) => {
                let own =
                    |name: &str| name.starts_with(beginning.tower) || name.starts_with(beginning.beside);
                let mut names = model.weights().tensors().map(|view| view.name);
                names.find(|name| own(name) && unknown(name))
            }
            _ => None,
        };
        match unknown {
            Some(name) => {
                Err(Error::UnknownTensor { tensor: name.to_owned(), architecture: self.config.facts.name })
            }
            None => Ok(()),
        }
    }

    /// The name of a part's matrix or table.
    fn wanted(&self, part: Part, at: usize) -> Result<String, Error> {
        let found = self.found(part, at, MATRIX);
        let missing =
            || Error::MissingTensor { tensor: self.spelt(part, at).unwrap_or_default() + MATRIX[0] };
        found.ok_or_else(missing)
    }

    /// The name of a part with the first of these endings that there is.
    fn found(&self, part: Part, at: usize, ends: &[&str]) -> Option<String> {
        let name = self.spelt(part, at)?;
        ends.iter().map(|end| format!("{name}{end}")).find(|name| self.stored(name).is_some())
    }

    /// What stands before a part's endings.
    fn spelt(&self, part: Part, at: usize) -> Option<String> {
        let Row { beside, hugging_face, gguf, .. } = *self.config.facts.name_of(part)?;
        let (begin, name) = match self.config.spelling {
            Spelling::HuggingFace(beginning) if beside => (beginning.beside, hugging_face),
            Spelling::HuggingFace(beginning) => (beginning.tower, hugging_face),
            Spelling::Gguf(_) => ("", gguf),
        };
        // Levels are called by their blocks in GGUF.
        let is_level = matches!(part, Part::LevelNorm | Part::LevelUp | Part::LevelDown);
        let at = if is_level && matches!(self.config.spelling, Spelling::Gguf(_)) {
            self.config.levels[at]
        } else {
            at
        };
        Some(format!("{begin}{}", name.replace("{}", &at.to_string())))
    }

    fn opt_values(
        &mut self,
        part: Part,
        at: usize,
        ends: &[&str],
        shape: &[usize],
    ) -> Result<Option<Vec<f32>>, Error> {
        match self.found(part, at, ends) {
            Some(name) => self.values(name, shape).map(Some),
            None => Ok(None),
        }
    }

    /// The numbers of a tensor; of a plan, as many zeros.
    fn values(&mut self, name: String, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let view = self.view(name, shape)?;
        let numbers = self.numbers(&view)?;
        view.release();
        Ok(numbers)
    }

    fn numbers(&self, view: &View<'_>) -> Result<Vec<f32>, Error> {
        if !self.memory.reads() {
            return Ok(vec![0.0; view.values()]);
        }
        let row = View::new(view.name, view.dtype, vec![1, view.values()], view.bytes)?;
        let mut numbers = Vec::new();
        expand_rows(&row.into(), |_, values| {
            numbers.extend_from_slice(values);
            Ok(())
        })?;
        Ok(numbers)
    }

    fn stored(&self, name: &str) -> Option<View<'a>> {
        match (self.config.spelling, self.checkpoint) {
            (Spelling::Gguf(file), Checkpoint::Gguf(gguf)) => gguf.beside()[file].tensor(name),
            (Spelling::HuggingFace(_), Checkpoint::HuggingFace(model)) => model.weights().tensor(name),
            _ => None,
        }
    }

    /// A tensor as it lies in its file: nothing of a tower is brought into another type. A single number has no shape
    /// in some files.
    fn view(&mut self, name: String, shape: &[usize]) -> Result<View<'a>, Error> {
        let Some(mut view) = self.stored(&name) else { return Err(Error::MissingTensor { tensor: name }) };
        let is_number = shape == [1] && view.shape.is_empty();
        if view.shape != shape && !is_number {
            return Err(Error::TensorShape { tensor: name, got: view.shape, wanted: shape.to_vec() });
        }
        view.lands = None;
        self.known.insert(name);
        Ok(view)
    }
}
