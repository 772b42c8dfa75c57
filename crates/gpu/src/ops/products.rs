//! Which products with a weight are compiled when it is loaded: those that a step may use, and no others.

use fornax_compute::{Glu, Role};

use super::{gemm, gemm_few, gemv};
use crate::cuda::Cuda;
use crate::layout::{Format, TILE_ROWS};
use crate::memory::WeightPart;
use crate::program::Key;

/// The most rows that want logits where few sequences stream: theirs, and drafts that are verified with them.
const DRAFTED: usize = 16;

/// How many rows of activations steps have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowCounts {
    /// Batches of streams: each number of rows up to this one has its fastest product.
    pub(crate) often: usize,
    /// Chunks of prompts: anything above.
    pub(crate) most: usize,
}

/// What happens to a product's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gating {
    Plain,
    /// Gated by the product's own kernel, where one can do that.
    Gated,
    /// Either, depending on the next operation.
    Either,
}

impl Cuda {
    /// The programs of products with a weight of these parts; without a role, all that could be used.
    pub(crate) fn products(&self, parts: &[WeightPart], role: Option<Role>) -> Vec<Key> {
        let (gating, rows) = (self.gating_of(parts, role), self.row_counts(role));
        let mut keys: Vec<Key> = Vec::new();
        for part in parts {
            for key in self.products_of(part, gating, rows) {
                if !keys.contains(&key) {
                    keys.push(key);
                }
            }
        }
        keys
    }

    fn row_counts(&self, role: Option<Role>) -> RowCounts {
        let options = self.options();
        let often = options.slots.max(options.wanted_max.min(DRAFTED));
        let tokens = RowCounts { often, most: options.tokens_max };
        match role {
            Some(Role::Head) => RowCounts { most: options.wanted_max.min(options.tokens_max), ..tokens },
            _ => tokens,
        }
    }

    /// The same decision as in `op_linear` and `fused_glu`.
    fn gating_of(&self, parts: &[WeightPart], role: Option<Role>) -> Gating {
        let [part] = parts else { return Gating::Plain };
        // Rows that do not fit the scratch are multiplied in several passes, and gated by another kernel.
        let at_once = self.options().tokens_max <= self.scratch.rows(part.columns);
        match role {
            _ if !part.rows.is_multiple_of(2 * TILE_ROWS) => Gating::Plain,
            None => Gating::Either,
            Some(Role::Gates { glu: Glu::Silu, adapted: false }) if at_once => Gating::Gated,
            Some(Role::Gates { glu: Glu::Silu, .. }) => Gating::Either,
            Some(_) => Gating::Plain,
        }
    }

    fn products_of(&self, part: &WeightPart, gating: Gating, rows: RowCounts) -> Vec<Key> {
        if part.format == Format::F32 {
            return vec![Key::plain("gemv_f32.cu")];
        }
        let able = self.device.abilities();
        let room = able.shared_max;
        // Of each kind of product the gated ones; the plain ones where they are wanted, or there are no others.
        let kinds = |programs: &dyn Fn(bool) -> Vec<Key>| {
            let gated = if gating == Gating::Plain { Vec::new() } else { programs(true) };
            let plain =
                if gating == Gating::Gated && !gated.is_empty() { Vec::new() } else { programs(false) };
            [plain, gated].concat()
        };
        let mut keys = if part.format.takes_floats8() {
            // One row has the kernels of several.
            vec![gemv::form_floats8_program()]
        } else {
            let one = kinds(&|gates| gemv::program_one(part, gates, room).into_iter().collect());
            // A row that does not fit a block takes the products of several rows.
            let mut keys = if one.is_empty() { gemv::programs_several(part, 1, room) } else { one };
            keys.push(gemv::form_program(part.columns, false));
            keys
        };
        if !self.takes_many(2) {
            keys.extend(gemv::programs_several(part, rows.most, room));
        } else {
            keys.extend(kinds(&|gates| gemm_few::programs(part, gates, rows, able)));
            keys.extend(kinds(&|gates| gemm::programs(part, gates, rows, able)));
        }
        keys
    }
}

#[cfg(test)]
mod tests {
    use fornax_compute::{Attention, Heads, KvDType, KvLayer};

    use super::*;
    use crate::cuda::CudaOptions;
    use crate::driver::fake;
    use crate::ops::shapes::part;

    const TOKENS: Role = Role::Tokens;
    const GATES: Role = Role::Gates { glu: Glu::Silu, adapted: false };

    /// Format, rows and columns.
    type Stored = (Format, usize, usize);

    /// Weights by their parts, and what they do; tables have no role.
    struct Model {
        name: &'static str,
        heads: Heads,
        weights: Vec<(Option<Role>, Vec<Stored>)>,
    }

    /// Qwen2.5 as `fornax bench --make-random` writes it.
    fn models() -> [Model; 5] {
        use Format::{BF16, FP8_A8, Q4_K, Q5_0, Q6_K, Q8_0};
        let model = |name, heads, (hidden, ffn, vocab), formats: [Format; 6], tied: bool| {
            let Heads { query, kv, dim } = heads;
            let [usual, value, down, down_more, table, head] = formats;
            let (wide, narrow) = ((query + kv) * dim, kv * dim);
            let qkv = vec![(usual, wide + narrow, hidden)];
            let mut weights = vec![
                (Some(TOKENS), qkv),
                (Some(TOKENS), vec![(usual, query * dim, hidden)]),
                (Some(GATES), vec![(usual, 2 * ffn, hidden)]),
                (Some(TOKENS), vec![(down, hidden, ffn)]),
                (Some(TOKENS), vec![(down_more, hidden, ffn)]),
                (Some(Role::Head), vec![(head, vocab, hidden)]),
            ];
            if value != usual {
                weights.push((Some(TOKENS), vec![(usual, wide, hidden), (value, narrow, hidden)]));
            }
            if !tied {
                weights.push((None, vec![(table, vocab, hidden)]));
            }
            Model { name, heads, weights }
        };
        let (small, large) = ((896, 4864, 151_936), (3584, 18_944, 152_064));
        let heads = [Heads { query: 14, kv: 2, dim: 64 }, Heads { query: 28, kv: 4, dim: 128 }];
        [
            model("0.5B bf16", heads[0], small, [BF16; 6], true),
            model("0.5B Q4_K_M", heads[0], small, [Q5_0, Q8_0, Q4_K, Q6_K, Q8_0, Q8_0], true),
            model("7B bf16", heads[1], large, [BF16; 6], false),
            model("7B Q4_K_M", heads[1], large, [Q4_K, Q6_K, Q4_K, Q6_K, Q4_K, Q6_K], false),
            model("7B FP8", heads[1], large, [FP8_A8, FP8_A8, FP8_A8, FP8_A8, BF16, BF16], false),
        ]
    }

    fn parts(shapes: &[Stored]) -> Vec<WeightPart> {
        shapes.iter().map(|&(format, rows, columns)| part(format, (rows, columns))).collect()
    }

    fn opened(slots: usize) -> Cuda {
        fake::willing();
        // As `fornax` opens it.
        let (tokens_max, wanted_max) = (2048, slots + 15);
        Cuda::new(CudaOptions { slots, tokens_max, wanted_max, ..CudaOptions::default() }).unwrap()
    }

    /// Everything that loading such a model prepares.
    fn prepare(cuda: &Cuda, model: &Model) {
        let prepare = |keys: Vec<Key>| keys.into_iter().for_each(|key| cuda.programs.prepare(key));
        for (role, shapes) in &model.weights {
            let parts = parts(shapes);
            for part in &parts {
                prepare(vec![Key::quant("embed.cu", part.format), crate::upload::packer(part.format)]);
            }
            if role.is_some() {
                prepare(cuda.products(&parts, *role));
            }
        }
        let attention = Attention::<()>::causal(model.heads, KvLayer { group: 0, layer: 0 }, 0.1);
        prepare(cuda.attention_programs(&attention, true, KvDType::F16));
    }

    /// How many programs of each unit there are.
    fn count(cuda: &Cuda, unit: &str) -> usize {
        cuda.programs.keys().iter().filter(|key| key.unit == unit).count()
    }

    #[test]
    fn any_number_of_rows_is_multiplied_by_what_was_prepared() {
        for (model, slots) in models().iter().flat_map(|model| [1, 4, 70, 256].map(|slots| (model, slots))) {
            let cuda = opened(slots);
            prepare(&cuda, model);
            let rows_max = |role| cuda.row_counts(role).most;
            for (role, shapes) in model.weights.iter().filter(|(role, _)| role.is_some()) {
                let every = (1..300).chain((300..).step_by(13)).take_while(|&rows| rows <= rows_max(*role));
                for (rows, part) in
                    every.flat_map(|rows| parts(shapes).into_iter().map(move |part| (rows, part)))
                {
                    let gates = *role == Some(GATES);
                    let key = match rows {
                        1 if !part.format.takes_floats8() => {
                            gemv::program_one(&part, gates, cuda.device.abilities().shared_max).unwrap()
                        }
                        _ => cuda.many_key(&part, gates && cuda.gates_many(&part, rows), rows),
                    };
                    let what = format!("{} for {slots}: {role:?}, {shapes:?}", model.name);
                    assert!(cuda.programs.has(&key), "{what}, {rows} rows: {key:?}");
                }
            }
        }
    }

    #[test]
    fn weights_of_any_shape_have_products_for_any_number_of_rows() {
        for (slots, tokens_max) in
            [(1, 64), (1, 100), (100, 130), (70, 70), (130, 130), (16, 512), (1, 2048), (300, 8192)]
        {
            let options = CudaOptions { slots, tokens_max, wanted_max: slots, ..CudaOptions::default() };
            for rows in [48, 512, 960, 2304, 4096, 6144, 17_024, 28_672, 128_256] {
                for (format, columns) in [(Format::BF16, 576), (Format::Q4_K, 2048), (Format::Q8_0, 14_336)] {
                    fake::willing();
                    // One for each weight: another's programs would hide what is missing.
                    let cuda = Cuda::new(options.clone()).unwrap();
                    let part = part(format, (rows, columns));
                    for role in [TOKENS, GATES] {
                        let keys = cuda.products(&[part], Some(role));
                        keys.into_iter().for_each(|key| cuda.programs.prepare(key));
                    }
                    let every = (2..=260).chain((261..=8192).step_by(97));
                    // Streams are recorded for the next 32.
                    let most = tokens_max.max(slots.next_multiple_of(32));
                    for (count, gates) in every
                        .take_while(|&count| count <= most)
                        .flat_map(|count| [(count, false), (count, true)])
                    {
                        let gated = gates && rows % 32 == 0 && cuda.gates_many(&part, count);
                        let key = cuda.many_key(&part, gated, count);
                        let what = format!("{part:?} for {slots} of {tokens_max}");
                        assert!(cuda.programs.has(&key), "{what}, {count} rows: {key:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn whether_activations_are_8_bit_floats_depends_on_the_weight_and_never_on_their_number() {
        let cuda = opened(256);
        for (role, shapes) in &models()[4].weights {
            let Some(role) = role else { continue };
            for part in parts(shapes) {
                let keys = cuda.products(&[part], Some(*role));
                let formed = keys.iter().filter(|key| key.unit == "form.cu");
                let eights: Vec<bool> =
                    formed.map(|key| key.defines.contains(&"FLOATS8=1".to_owned())).collect();
                assert_eq!(eights, [part.format.takes_floats8()], "{part:?}");
                // No other kernel than those of wgmma multiplies by them, from the first row on.
                let others = keys.iter().any(|key| key.unit == "gemv.cu");
                assert_eq!(others, !part.format.takes_floats8(), "{part:?}");
            }
        }
    }

    #[test]
    fn every_batch_of_streams_has_its_fastest_product() {
        let cuda = opened(256);
        let model = &models()[3];
        prepare(&cuda, model);
        let all = opened(256);
        for (role, shapes) in model.weights.iter().filter(|(role, _)| role.is_some()) {
            for part in parts(shapes) {
                let gates = *role == Some(GATES);
                for rows in (2..=64).chain([96, 128, 160, 192, 224, 256]) {
                    // Where nothing was prepared the fastest is chosen, to be compiled.
                    let wanted = all.many_key(&part, gates, rows);
                    assert_eq!(cuda.many_key(&part, gates, rows), wanted, "{shapes:?}, {rows} rows");
                }
            }
        }
    }

    #[test]
    fn what_no_step_asks_for_is_not_compiled() {
        let numbers = |slots| {
            let cuda = opened(slots);
            prepare(&cuda, &models()[3]);
            ["gemv.cu", "gemm_few.cu", "gemm.cu"].map(|unit| count(&cuda, unit))
        };
        // 145 in all before weights had roles.
        assert_eq!(numbers(1), [7, 29, 16]);
        assert_eq!(numbers(4), [7, 30, 16]);
        assert_eq!(numbers(256), [7, 44, 34]);
        let cuda = opened(16);
        let has = |role, shape: Stored, gated: bool| {
            let keys = cuda.products(&parts(&[shape]), role);
            let define = format!("GATES={}", i32::from(gated));
            keys.iter().any(|key| key.defines.contains(&define))
        };
        let shape = (Format::Q4_K, 37_888, 3584);
        let other = |glu, adapted| Some(Role::Gates { glu, adapted });
        for (role, plain, gated) in [
            (None, true, true),
            (Some(TOKENS), true, false),
            (Some(Role::Head), true, false),
            (Some(GATES), false, true),
            (other(Glu::Silu, true), true, true),
            (other(Glu::Gelu, false), true, false),
        ] {
            assert_eq!((has(role, shape, false), has(role, shape, true)), (plain, gated), "{role:?}");
        }
        // Few rows of a small weight's gates are gated apart; parts of two formats always are.
        assert!(has(Some(GATES), (Format::Q4_K, 9728, 896), false));
        let two = parts(&[(Format::Q4_K, 18_944, 3584), (Format::Q6_K, 18_944, 3584)]);
        assert!(
            cuda.products(&two, Some(GATES)).iter().all(|key| !key.defines.contains(&"GATES=1".to_owned()))
        );
        // A head has as few rows as want logits.
        assert!(cuda.products(&parts(&[shape]), Some(Role::Head)).iter().all(|key| key.unit != "gemm.cu"));
    }
}
