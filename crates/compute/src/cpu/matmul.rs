//! Rows of activations times the rows of a weight.
//!
//! Threads divide the output columns (the weight's rows), so each weight byte is read by one thread only. Activations
//! are laid out in panels once, a pass of rows at a time, as many as stay in the second cache; then a thread takes one
//! group of sixteen weight rows after the other, which stays in the first cache while all panels pass over it. Neither
//! passes nor panels nor threads touch the order inside one product: that is the format's own.
//!
//! A stack of matrices of which each has rows of its own, such as experts, is multiplied in one go: threads divide the
//! groups of all matrices. One after the other would be a region for each, which with many threads takes longer than
//! the products of a row.

use std::ops::Range;

use fornax_format::DType;

use super::Activations;
use super::disjoint::Disjoint;
use super::memory::{Block, Matrix, WeightPart};
use super::pool::Pool;
use super::quant::{
    BLOCK, GROUP, IntBlock, Kernels, PANEL_BLOCK_BYTES, Simd, WIDTHS, dot_f32, f32_kernels, quantize,
    round_row, round_row_to_eights, round_weights, store_block,
};

/// Columns of sixteen weight rows that are dequantised at once: 32 KB.
const EXPANDED_COLUMNS: usize = 512;
/// The most activation rows of a pass: their products with a group, 64 KB, fit a thread's scratch.
const PASS_ROWS_MAX: usize = 1024;
/// Below this many values the activations are laid out by the caller alone: telling others takes longer, a microsecond
/// on a machine of sixteen cores.
const GRAIN_VALUES: usize = 3072;
/// Columns of a panel that one thread lays out at once; whole blocks.
const STRETCH_COLUMNS: usize = 256;

/// The most activation rows that a head takes at once: their panels and products stay in the second cache.
const HEAD_ROWS_MAX: usize = 64;

/// Rows of activations of which each head has a share.
#[derive(Clone, Copy)]
pub(super) struct HeadShares<'a> {
    /// (rows, heads x each)
    pub(super) values: &'a [f32],
    /// Columns of a share.
    pub(super) each: usize,
    /// Where in it begins what is multiplied.
    pub(super) column: usize,
}

impl<'a> HeadShares<'a> {
    fn share(&self, row: usize, head: usize, heads: usize, columns: usize) -> &'a [f32] {
        &self.values[(row * heads + head) * self.each + self.column..][..columns]
    }
}

/// What a multiplication works with beside its operands.
pub(super) struct Multiplier<'a> {
    pub(super) pool: &'a Pool,
    pub(super) simd: Simd,
    pub(super) activations: Activations,
    /// Room for activations in panels.
    pub(super) panels: &'a mut Block,
    /// The same number of values for each thread.
    pub(super) scratch: &'a mut Block,
}

/// Rows of activations, and the matrix that they meet.
#[derive(Clone)]
struct Product<'a> {
    weight: Matrix<'a>,
    /// Of the activations and of the results alike.
    rows: Range<usize>,
}

impl Multiplier<'_> {
    /// `out[r][n]` = sum over k of `x[r][k] * weight[n][k]`.
    pub(super) fn multiply(&mut self, weight: Matrix<'_>, x: &[f32], out: &mut [f32]) {
        let rows = x.len() / weight.columns.max(1);
        self.multiply_all(weight, 1, std::iter::once((0, 0..rows)), x, out);
    }

    /// The same where `weight` is `count` matrices stacked: each that is named takes its own rows of `x` and `out`. The
    /// rows of all follow each other.
    pub(super) fn multiply_all<'a>(
        &mut self,
        weight: Matrix<'a>,
        count: usize,
        taken: impl Iterator<Item = (usize, Range<usize>)>,
        x: &[f32],
        out: &mut [f32],
    ) {
        if x.is_empty() || out.is_empty() {
            return;
        }
        let integer =
            |part: &WeightPart| self.activations == Activations::Integer && part.format.dot.is_some();
        let forms = Forms {
            columns: weight.columns,
            integers: weight.parts.iter().any(integer),
            floats: weight.parts.iter().any(|part| !integer(part) && !takes_eights(part)),
            eights: weight.parts.iter().any(takes_eights),
        };
        let stored = weight.parts.iter().all(|part| part.format.kernels.is_none());
        let room = forms.rows(self.panels.bytes().len());
        let out_columns = weight.rows / count;
        // A pass: as many rows as there is room for, of one matrix or of several.
        let mut pass: Vec<Product<'a>> = Vec::new();
        let mut compute = |pass: &mut Vec<Product<'a>>| {
            let (Some(first), Some(last)) = (pass.first(), pass.last()) else { return };
            let all = first.rows.start..last.rows.end;
            let x = &x[all.start * weight.columns..all.end * weight.columns];
            let out = &mut out[all.start * out_columns..all.end * out_columns];
            for product in &mut *pass {
                product.rows = product.rows.start - all.start..product.rows.end - all.start;
            }
            self.multiply_packed(&forms, pass, x, out);
            pass.clear();
        };
        if stored {
            for (index, rows) in taken {
                let x = &x[rows.start * weight.columns..rows.end * weight.columns];
                let out = &mut out[rows.start * out_columns..rows.end * out_columns];
                for (x, out) in x.chunks(room * weight.columns).zip(out.chunks_mut(room * out_columns)) {
                    self.multiply_stored(weight.stacked(index, count), &forms, x, out);
                }
            }
            return;
        }
        for (index, rows) in taken {
            let matrix = weight.stacked(index, count);
            let mut start = rows.start;
            while start < rows.end {
                let begun = pass.first().map_or(start, |first| first.rows.start);
                // What a matrix has beyond a pass begins a pass of its own, so that its panels are wide.
                let left = room - (start - begun);
                if left == 0 || (left < rows.end - start && !pass.is_empty()) {
                    compute(&mut pass);
                    continue;
                }
                let end = rows.end.min(start + left);
                pass.push(Product { weight: matrix, rows: start..end });
                start = end;
            }
        }
        compute(&mut pass);
    }

    /// The specification: a product at a time, of rows as they are stored.
    fn multiply_stored(&mut self, weight: Matrix<'_>, forms: &Forms, x: &[f32], out: &mut [f32]) {
        let columns = weight.columns;
        let blocks: &mut [IntBlock] = self.panels.values_mut();
        if forms.integers {
            for (x, blocks) in x.chunks(columns).zip(blocks.chunks_mut(columns / BLOCK)) {
                quantize(self.simd, x, |index, block| blocks[index] = *block);
            }
        }
        let mut halves = if self.activations == Activations::Half { x.to_vec() } else { Vec::new() };
        let factors: Vec<f32> = halves.chunks_mut(columns).map(round_row).collect();
        let mut eights = if forms.eights { x.to_vec() } else { Vec::new() };
        eights.chunks_mut(columns).for_each(round_row_to_eights);
        let values: &mut [f32] = &mut self.scratch.values_mut()[..columns];
        let mut first = 0;
        for part in weight.parts {
            for row in 0..part.rows {
                let stored = weight.stored(part, row);
                let outs = out.chunks_mut(weight.rows).map(|out| &mut out[first + row]);
                match part.format.dot {
                    _ if takes_eights(part) => {
                        (part.format.dequantize)(stored, values);
                        outs.zip(eights.chunks(columns)).for_each(|(out, x)| *out = dot_f32(values, x));
                    }
                    Some(dot) if self.activations == Activations::Integer => {
                        let inputs = blocks.chunks(columns / BLOCK);
                        outs.zip(inputs).for_each(|(out, blocks)| *out = dot(stored, blocks));
                    }
                    _ if self.activations == Activations::Half && part.format.dtype != DType::F32 => {
                        (part.format.dequantize)(stored, values);
                        round_weights(part.format.dtype, stored, values);
                        let inputs = halves.chunks(columns).zip(&factors);
                        outs.zip(inputs).for_each(|(out, (x, factor))| *out = dot_f32(values, x) * factor);
                    }
                    _ => {
                        (part.format.dequantize)(stored, values);
                        outs.zip(x.chunks(columns)).for_each(|(out, x)| *out = dot_f32(values, x));
                    }
                }
            }
            first += part.rows;
        }
    }

    /// The products of a pass, whose rows are all of `x` and of `out`.
    fn multiply_packed(&mut self, forms: &Forms, products: &[Product<'_>], x: &[f32], out: &mut [f32]) {
        let (pool, simd, columns) = (self.pool, self.simd, forms.columns);
        let rows = x.len() / columns;
        let f32_kernels = f32_kernels(simd).expect("packed weights have kernels");
        let (integers, floats) = self.panels.bytes_mut().split_at_mut(rows * forms.integer_bytes());
        let (floats, eights) = bytemuck::cast_slice_mut(floats).split_at_mut(rows * forms.float_values());
        let eights: &mut [f32] = &mut eights[..rows * forms.eight_values()];
        let (bytes, values, of_eights) = (forms.integer_bytes(), forms.float_values(), forms.eight_values());
        let width_max =
            forms.width_max(products.iter().flat_map(|product| product.weight.parts), f32_kernels);
        let panels_of = |product: &Product<'_>| Panels { rows: product.rows.len(), width_max };

        let (integer_parts, float_parts) = (Disjoint::new(integers), Disjoint::new(floats));
        let eight_parts = Disjoint::new(eights);
        let lay_out = |first: usize, width: usize, stretch: Range<usize>| {
            let x = &x[first * columns..][..width * columns];
            let part = forms.of_panel(width, &stretch);
            let behind = |start: usize, part: &Range<usize>| start + part.start..start + part.end;
            // SAFETY: panels do not overlap, nor do their stretches, and each is laid out once.
            let panel = unsafe {
                Panel {
                    integers: integer_parts.part(behind(first * bytes, &part.integers)),
                    floats: float_parts.part(behind(first * values, &part.floats)),
                    eights: eight_parts.part(behind(first * of_eights, &part.eights)),
                }
            };
            forms.lay_out(simd, x, width, stretch, panel);
        };
        let all = products.iter().flat_map(|product| {
            panels_of(product).all().map(|(first, width)| (product.rows.start + first, width))
        });
        if x.len() < GRAIN_VALUES || pool.used() == 1 {
            all.for_each(|(first, width)| lay_out(first, width, 0..columns));
        } else {
            let each = forms.stretch_columns();
            let (all, stretches) = (all.collect::<Vec<_>>(), columns.div_ceil(each));
            pool.for_each(all.len() * stretches, |_, mine| {
                for item in mine {
                    let (first, width) = all[item / stretches];
                    let start = item % stretches * each;
                    lay_out(first, width, start..columns.min(start + each));
                }
            });
        }

        let scratch: &mut [f32] = self.scratch.values_mut();
        let scratch_values = scratch.len() / pool.threads();
        let (scratch, out) = (Disjoint::new(scratch), Disjoint::new(out));
        let integer = self.activations == Activations::Integer;
        // Behind each product's last group, counted over all.
        let mut end = 0;
        let ends = products.iter().map(|product| {
            end += product.weight.parts.iter().map(WeightPart::groups).sum::<usize>();
            end
        });
        let ends: Vec<usize> = ends.collect();
        pool.for_each(end, |thread, mine| {
            // SAFETY: each thread takes its own stretch.
            let scratch = unsafe { scratch.part(thread * scratch_values..(thread + 1) * scratch_values) };
            let mut start = mine.start;
            while start < mine.end {
                let at = ends.partition_point(|end| *end <= start);
                let (Product { weight, rows }, first) =
                    (&products[at], at.checked_sub(1).map_or(0, |at| ends[at]));
                let groups = start - first..mine.end.min(ends[at]) - first;
                let inputs = Inputs {
                    forms,
                    panels: panels_of(&products[at]),
                    integers: &integers[rows.start * bytes..rows.end * bytes],
                    floats: &floats[rows.start * values..rows.end * values],
                    eights: &eights[rows.start * of_eights..rows.end * of_eights],
                    f32_kernels,
                };
                inputs.multiply_groups(*weight, groups, integer, scratch, |row, columns, products| {
                    let at = (rows.start + row) * weight.rows;
                    // SAFETY: threads have different groups, and a thread stores one row at a time.
                    let out = unsafe { out.part(at + columns.start..at + columns.end) };
                    out.copy_from_slice(&products[..out.len()]);
                });
                start = mine.end.min(ends[at]);
            }
        });
    }

    /// `out` head by head = the product of a head's matrix, one of those that `weight` is stacked of, with that head's share
    /// of each row of `x`. Threads divide the heads: a head's matrix is too small to be divided.
    pub(super) fn multiply_heads(
        &mut self,
        weight: Matrix<'_>,
        heads: usize,
        x: HeadShares<'_>,
        out: &mut [f32],
    ) {
        let (columns, each) = (weight.columns, weight.rows / heads);
        let count = x.values.len() / (heads * x.each);
        if count == 0 || each == 0 {
            return;
        }
        if weight.parts.iter().all(|part| part.format.kernels.is_none()) {
            self.multiply_heads_stored(weight, heads, x, out);
            return;
        }
        let (simd, integer) = (self.simd, self.activations == Activations::Integer);
        let f32_kernels = f32_kernels(simd).expect("packed weights have kernels");
        let scratch: &mut [f32] = self.scratch.values_mut();
        let scratch_values = scratch.len() / self.pool.threads();
        let (scratch, out) = (Disjoint::new(scratch), Disjoint::new(out));
        self.pool.for_each_claimed(heads, |thread, head| {
            // SAFETY: each thread takes its own stretch.
            let scratch = unsafe { scratch.part(thread * scratch_values..(thread + 1) * scratch_values) };
            let matrix = weight.stacked(head, heads);
            let forms = Forms {
                columns,
                integers: matrix.parts.iter().any(|part| integer && part.format.dot.is_some()),
                floats: matrix
                    .parts
                    .iter()
                    .any(|part| !takes_eights(part) && (!integer || part.format.dot.is_none())),
                eights: matrix.parts.iter().any(takes_eights),
            };
            // Half of it for the rows and their panels, half for products and expanded weights.
            let (room, rest) = scratch.split_at_mut(scratch_values / 2);
            let row_values = columns.next_multiple_of(GROUP);
            let panel_values = forms.float_values() + forms.eight_values();
            let row_bytes = forms.integer_bytes() + (panel_values + row_values) * size_of::<f32>();
            // What the panels' ends are rounded up to.
            let slack = 3 * GROUP;
            let fit = (room.len() - slack) * size_of::<f32>() / row_bytes;
            assert!(fit > 0, "a row of {columns} columns fits the scratch");
            let pass = fit.min(HEAD_ROWS_MAX);
            for first in (0..count).step_by(pass) {
                let rows = pass.min(count - first);
                let integer_values =
                    (rows * forms.integer_bytes() / size_of::<f32>()).next_multiple_of(GROUP);
                let (integers, room) = room.split_at_mut(integer_values);
                let float_values = (rows * forms.float_values()).next_multiple_of(GROUP);
                let (floats, room) = room.split_at_mut(float_values);
                let eight_values = (rows * forms.eight_values()).next_multiple_of(GROUP);
                let (eights, room) = room.split_at_mut(eight_values);
                let integers: &mut [u8] = bytemuck::cast_slice_mut(integers);
                let gathered = &mut room[..rows * columns];
                for (row, to) in gathered.chunks_exact_mut(columns).enumerate() {
                    to.copy_from_slice(x.share(first + row, head, heads, columns));
                }
                let width_max = forms.width_max(matrix.parts.iter(), f32_kernels);
                let panels = Panels { rows, width_max };
                let (bytes, values, of_eights) =
                    (forms.integer_bytes(), forms.float_values(), forms.eight_values());
                for (first, width) in panels.all() {
                    let x = &gathered[first * columns..][..width * columns];
                    let end = first + width;
                    let panel = Panel {
                        integers: &mut integers[first * bytes..end * bytes],
                        floats: &mut floats[first * values..end * values],
                        eights: &mut eights[first * of_eights..end * of_eights],
                    };
                    forms.lay_out(simd, x, width, 0..columns, panel);
                }
                let inputs = Inputs { forms: &forms, panels, integers, floats, eights, f32_kernels };
                let groups = 0..matrix.parts.iter().map(WeightPart::groups).sum();
                inputs.multiply_groups(matrix, groups, integer, rest, |row, columns, products| {
                    let at = (first + row) * weight.rows + head * each;
                    // SAFETY: a head is one thread's, which stores one row at a time.
                    let out = unsafe { out.part(at + columns.start..at + columns.end) };
                    out.copy_from_slice(&products[..out.len()]);
                });
            }
        });
    }

    /// The specification: head by head what is multiplied is put together, and its products are put in their places.
    fn multiply_heads_stored(
        &mut self,
        weight: Matrix<'_>,
        heads: usize,
        x: HeadShares<'_>,
        out: &mut [f32],
    ) {
        let (columns, each) = (weight.columns, weight.rows / heads);
        let count = x.values.len() / (heads * x.each);
        for head in 0..heads {
            let gathered: Vec<f32> =
                (0..count).flat_map(|row| x.share(row, head, heads, columns)).copied().collect();
            let mut products = vec![0.0; count * each];
            self.multiply(weight.stacked(head, heads), &gathered, &mut products);
            for (row, products) in products.chunks_exact(each).enumerate() {
                out[row * weight.rows + head * each..][..each].copy_from_slice(products);
            }
        }
    }
}

/// Activation rows cut into panels, widest first.
#[derive(Clone, Copy)]
struct Panels {
    rows: usize,
    width_max: usize,
}

impl Panels {
    /// The rows in panels of the first width, which come first.
    fn wide_rows(self) -> usize {
        if self.width_max < WIDTHS[0] { 0 } else { self.rows / WIDTHS[0] * WIDTHS[0] }
    }

    /// (first row, width) of each.
    fn all(self) -> impl Iterator<Item = (usize, usize)> {
        let mut first = 0;
        std::iter::from_fn(move || {
            let fits = |width: &usize| *width <= self.width_max && first + width <= self.rows;
            let width = WIDTHS.into_iter().find(fits)?;
            first += width;
            Some((first - width, width))
        })
    }
}

/// Whether a part takes activations as 8-bit floats.
fn takes_eights(part: &WeightPart) -> bool {
    part.format.dtype == DType::FP8_A8
}

/// The forms in which a weight's parts take activations.
struct Forms {
    columns: usize,
    integers: bool,
    floats: bool,
    /// Floats that were rounded to 8-bit floats.
    eights: bool,
}

/// Some rows in each form.
struct Panel<'a> {
    integers: &'a mut [u8],
    floats: &'a mut [f32],
    eights: &'a mut [f32],
}

impl Forms {
    /// Bytes of a row as integers.
    fn integer_bytes(&self) -> usize {
        usize::from(self.integers) * (self.columns / BLOCK * PANEL_BLOCK_BYTES)
    }

    /// Values of a row as floats.
    fn float_values(&self) -> usize {
        usize::from(self.floats) * self.columns.next_multiple_of(2)
    }

    /// Values of a row as 8-bit floats.
    fn eight_values(&self) -> usize {
        usize::from(self.eights) * self.columns.next_multiple_of(2)
    }

    /// Columns of a panel that one thread lays out at once. What 8-bit floats are scaled by follows from a whole row.
    fn stretch_columns(&self) -> usize {
        if self.eights { self.columns } else { STRETCH_COLUMNS }
    }

    /// The widest panels that these parts take, in every form at once.
    fn width_max<'a>(
        &self,
        parts: impl Iterator<Item = &'a WeightPart>,
        f32_kernels: &'static Kernels,
    ) -> usize {
        let widths = parts.filter_map(|part| Some(part.format.kernels?.width_max)).min();
        match widths {
            Some(width) if !self.floats && !self.eights => width,
            _ => f32_kernels.width_max,
        }
    }

    /// Rows of a pass: what the room holds, in whole panels where it can.
    fn rows(&self, room: usize) -> usize {
        let values = self.float_values() + self.eight_values();
        let rows = (room / (self.integer_bytes() + values * size_of::<f32>())).min(PASS_ROWS_MAX);
        assert!(rows > 0, "a row of {} columns fits the scratch", self.columns);
        if rows < WIDTHS[0] { rows } else { rows / WIDTHS[0] * WIDTHS[0] }
    }

    /// Where some columns of a panel of `width` rows lie in it, in each form.
    fn of_panel(&self, width: usize, columns: &Range<usize>) -> PanelPart {
        let blocks = columns.start / BLOCK..columns.end.div_ceil(BLOCK);
        let integers = if self.integers { width * PANEL_BLOCK_BYTES } else { 0 };
        // The last columns are followed by what makes them even.
        let values = |row_values: usize| {
            let end = if columns.end == self.columns { row_values } else { columns.end };
            if row_values > 0 { columns.start * width..end * width } else { 0..0 }
        };
        PanelPart {
            integers: blocks.start * integers..blocks.end * integers,
            floats: values(self.float_values()),
            eights: values(self.eight_values()),
        }
    }

    /// Writes some columns of a panel of `width` rows in every form, each into its own part of the panel. The columns
    /// begin with a whole block; they are all where there are 8-bit floats.
    fn lay_out(&self, simd: Simd, x: &[f32], width: usize, columns: Range<usize>, panel: Panel<'_>) {
        let Panel { integers, floats, eights } = panel;
        for (row, x) in x.chunks(self.columns).enumerate() {
            let x = &x[columns.clone()];
            if self.integers {
                quantize(simd, x, |index, block| store_block(simd, integers, width, row, index, block));
            }
            if self.floats {
                for (column, value) in floats.chunks_exact_mut(width).zip(x) {
                    column[row] = *value;
                }
            }
            if self.eights {
                let mut rounded = x.to_vec();
                round_row_to_eights(&mut rounded);
                for (column, value) in eights.chunks_exact_mut(width).zip(rounded) {
                    column[row] = value;
                }
            }
        }
        for (panel, is) in [(floats, self.floats), (eights, self.eights)] {
            if is {
                panel[columns.len() * width..].fill(0.0);
            }
        }
    }
}

/// A part of a panel, by form.
struct PanelPart {
    /// Bytes.
    integers: Range<usize>,
    /// Values.
    floats: Range<usize>,
    eights: Range<usize>,
}

/// The panels of a pass.
struct Inputs<'a> {
    forms: &'a Forms,
    panels: Panels,
    integers: &'a [u8],
    floats: &'a [f32],
    eights: &'a [f32],
    f32_kernels: &'static Kernels,
}

impl Inputs<'_> {
    /// Some groups of a weight times every panel; `store(activation row, output rows, products)`.
    fn multiply_groups(
        &self,
        weight: Matrix<'_>,
        groups: Range<usize>,
        integer: bool,
        scratch: &mut [f32],
        store: impl Fn(usize, Range<usize>, &[f32; GROUP]),
    ) {
        let (mut first_group, mut first_row) = (0, 0);
        for part in weight.parts {
            let here = groups.start.max(first_group)..groups.end.min(first_group + part.groups());
            for group in here.start - first_group..here.end.saturating_sub(first_group) {
                let bytes = weight.group(part, group);
                let columns = first_row + group * GROUP..first_row + part.rows.min((group + 1) * GROUP);
                let store = |first: usize, tile: &[[f32; GROUP]]| {
                    for (row, products) in tile.iter().enumerate() {
                        store(first + row, columns.clone(), products);
                    }
                };
                let kernels = part.format.kernels.expect("packed weights have kernels");
                match (kernels.takes_integers(), integer) {
                    (true, true) => self.multiply_integers(kernels, bytes, scratch, store),
                    (true, false) => self.multiply_expanded(kernels, bytes, scratch, store),
                    (false, _) => {
                        let panels = if takes_eights(part) { self.eights } else { self.floats };
                        self.multiply_floats(kernels, bytes, panels, store);
                    }
                }
            }
            first_group += part.groups();
            first_row += part.rows;
        }
    }

    /// A group times every panel; `store(first row, tile)`.
    fn multiply_integers(
        &self,
        kernels: &Kernels,
        group: &[u8],
        scratch: &mut [f32],
        store: impl Fn(usize, &[[f32; GROUP]]),
    ) {
        let (columns, bytes) = (self.forms.columns, self.forms.integer_bytes());
        let tiles = scratch.as_chunks_mut().0;
        let mut multiply = |first: usize, rows: usize| {
            let tile = &mut tiles[..rows];
            kernels.multiply_integers(group, columns, &self.integers[first * bytes..][..rows * bytes], tile);
            store(first, tile);
        };
        // Tiles take all panels of the first width at once.
        let wide = self.panels.wide_rows();
        if wide > 0 {
            multiply(0, wide);
        }
        self.panels
            .all()
            .filter(|(first, _)| *first >= wide)
            .for_each(|(first, width)| multiply(first, width));
    }

    fn multiply_floats(
        &self,
        kernels: &Kernels,
        group: &[u8],
        panels: &[f32],
        store: impl Fn(usize, &[[f32; GROUP]]),
    ) {
        let each = self.forms.columns.next_multiple_of(2);
        for (first, width) in self.panels.all() {
            let mut tile = [[0.0; GROUP]; WIDTHS[0]];
            let tile = &mut tile[..width];
            let panel = &panels[first * each..][..width * each];
            kernels.multiply_floats(group, self.forms.columns, panel, tile);
            store(first, tile);
        }
    }

    /// The same for a quantised group, a stretch of columns at a time.
    fn multiply_expanded(
        &self,
        kernels: &Kernels,
        group: &[u8],
        scratch: &mut [f32],
        store: impl Fn(usize, &[[f32; GROUP]]),
    ) {
        let scratch = scratch.as_chunks_mut().0;
        let (expanded, tiles) = scratch.split_at_mut(EXPANDED_COLUMNS);
        let tiles = &mut tiles[..self.panels.rows];
        tiles.fill([0.0; GROUP]);
        let columns = self.forms.columns;
        for start in (0..columns).step_by(EXPANDED_COLUMNS) {
            let stretch = start..columns.min(start + EXPANDED_COLUMNS);
            let expanded = &mut expanded[..stretch.len()];
            kernels.dequantize(group, columns, start, expanded);
            for (first, width) in self.panels.all() {
                let panel = self.float_panel(first, width, stretch.clone());
                let weights = bytemuck::cast_slice(expanded);
                self.f32_kernels.multiply_floats(weights, stretch.len(), panel, &mut tiles[first..][..width]);
            }
        }
        store(0, tiles);
    }

    /// Some columns of a panel.
    fn float_panel(&self, first: usize, width: usize, columns: Range<usize>) -> &[f32] {
        let panel = &self.floats[first * self.forms.float_values()..][..width * self.forms.float_values()];
        &panel[columns.start * width..columns.end * width]
    }
}

#[cfg(test)]
mod tests {
    use fornax_format::{DType, View};

    use crate::cpu::testing::{bits, decode_batch, numbers};
    use crate::cpu::{Activations, Cpu, CpuOptions, Simd};
    use crate::{Backend, Memory, Part, Purpose, Rows};

    /// Stored bytes whose scales are ordinary numbers: f16 scales get a fixed exponent.
    fn stored(dtype: DType, seed: u64, values: usize) -> Vec<u8> {
        let random = numbers(seed, dtype.bytes_for(values).unwrap());
        match dtype {
            DType::F32 => numbers(seed, values).iter().flat_map(|x| x.to_le_bytes()).collect(),
            DType::F16 => {
                numbers(seed, values).iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect()
            }
            DType::BF16 => {
                numbers(seed, values).iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect()
            }
            _ => {
                let mut bytes: Vec<u8> = random.iter().map(|x| x.to_le_bytes()[1]).collect();
                let scales: &[usize] = match dtype {
                    DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[0],
                    DType::Q6_K => &[208],
                    _ => &[0, 2],
                };
                for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                    if dtype == DType::MXFP8 {
                        block[0] = 110 + block[0] % 16;
                        continue;
                    }
                    if matches!(dtype, DType::FP8_128 | DType::FP8_A8) {
                        block[3] = 0x3a;
                        continue;
                    }
                    for &at in scales {
                        block[at + 1] = 0x20 | block[at + 1] & 0x83;
                    }
                }
                bytes
            }
        }
    }

    /// Multiplies `rows` rows by a weight of several types, `at_once` rows at a time.
    fn product(
        options: CpuOptions,
        types: &[DType],
        columns: usize,
        rows: usize,
        at_once: usize,
    ) -> Vec<f32> {
        let cpu = Cpu::new(options).unwrap();
        let weight_rows = [37, 5, 16];
        let bytes: Vec<_> = types
            .iter()
            .zip(weight_rows)
            .map(|(&dtype, rows)| stored(dtype, rows as u64, rows * columns))
            .collect();
        let parts: Vec<_> = types
            .iter()
            .zip(weight_rows)
            .zip(&bytes)
            .map(|((&dtype, rows), bytes)| {
                Part::from(View::new("w", dtype, vec![rows, columns], bytes).unwrap())
            })
            .collect();
        let weight = cpu.upload(&parts).unwrap();
        let mut x = cpu.alloc(Purpose::Activations, at_once, columns).unwrap();
        let mut out = cpu.alloc(Purpose::Activations, at_once + 1, weight.rows).unwrap();
        let inputs = numbers(9, rows * columns);
        let mut all = Vec::new();
        for inputs in inputs.chunks(at_once * columns) {
            let rows = inputs.len() / columns;
            cpu.write(&mut x, 0, inputs).unwrap();
            cpu.write(&mut out, 0, &vec![f32::NAN; (at_once + 1) * weight.rows]).unwrap();
            let step = cpu.begin(&decode_batch(rows)).unwrap();
            cpu.matmul(&step, Rows::Tokens, &weight, &x, &mut out).unwrap();
            cpu.finish(step).unwrap();
            all.extend(cpu.read(&out, 0, rows).unwrap());
            let beyond = cpu.read(&out, rows, at_once + 1 - rows).unwrap();
            assert!(beyond.iter().all(|value| value.is_nan()), "rows beyond the step were written");
        }
        all
    }

    fn dequantized_product(types: &[DType], columns: usize, rows: usize) -> Vec<f64> {
        let inputs = numbers(9, rows * columns);
        let mut weights = Vec::new();
        for (&dtype, rows) in types.iter().zip([37, 5, 16]) {
            let mut values = vec![0.0; rows * columns];
            let format = super::super::quant::format(dtype, Simd::Scalar).unwrap();
            (format.dequantize)(&stored(dtype, rows as u64, rows * columns), &mut values);
            weights.extend(values);
        }
        let dot =
            |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>();
        let product = |x| weights.chunks(columns).map(move |w| dot(x, w));
        inputs.chunks(columns).flat_map(product).collect()
    }

    #[test]
    fn rows_alone_among_others_and_on_any_number_of_threads_give_the_same_bits_near_the_true_product() {
        const MIXES: [&[DType]; 7] = [
            &[DType::F32, DType::F16, DType::BF16],
            &[DType::Q4_0, DType::Q4_1, DType::Q5_0],
            &[DType::Q5_1, DType::Q8_0, DType::F32],
            &[DType::Q4_K, DType::Q5_K, DType::Q6_K],
            &[DType::Q4_K, DType::Q8_0, DType::F16],
            &[DType::Q8_0, DType::MXFP8, DType::MXFP8],
            &[DType::FP8_A8, DType::Q8_0, DType::FP8_A8],
        ];
        let (columns, rows) = (512, 71);
        for types in MIXES {
            let truth = dequantized_product(types, columns, rows);
            let power = truth.iter().map(|x| x * x).sum::<f64>();
            for activations in [Activations::Float, Activations::Integer] {
                for simd in Simd::present() {
                    let options = |threads| CpuOptions {
                        threads,
                        simd,
                        activations,
                        slots: 128,
                        ..CpuOptions::default()
                    };
                    let whole = product(options(1), types, columns, rows, rows);
                    let error =
                        whole.iter().zip(&truth).map(|(&x, y)| (f64::from(x) - y).powi(2)).sum::<f64>();
                    let bound = match activations {
                        // A fourth bit is rounded in each activation.
                        _ if types.contains(&DType::FP8_A8) => 2e-3,
                        Activations::Float => 1e-12,
                        _ => 1e-4,
                    };
                    assert!(error / power < bound, "{types:?} {activations:?} {}", error / power);
                    for (threads, at_once) in [(1, 1), (2, 1), (3, rows), (2, 6)] {
                        let again = product(options(threads), types, columns, rows, at_once);
                        assert_eq!(
                            bits(&again),
                            bits(&whole),
                            "{types:?} {activations:?} {threads} {at_once}"
                        );
                    }
                }
            }
        }
    }
}
