//! What an operation's operands must be like: once for all backends.
//!
//! A backend calls the function of an operation's name before it computes anything. Buffers may have more rows than a
//! step needs; columns are exact. What depends on the step's own numbers (tokens, positions, pages) is the backend's to
//! check: it knows where they are.

use crate::{
    Attention, Between, ChannelInputs, ChannelScan, DeltaRule, Error, ExpertRoom, Experts, GatedNorm,
    HeadProducts, Heads, KvGroup, KvKind, LatentAttention, LatentHeads, LowRank, Memory, Norm, QkNorm,
    RANK_MAX, ROUTED_MAX, Rope, Routing, SelectiveScan, ShortConv, TAPS_MAX, channel_values, conv_values,
};

/// What has rows and columns: a buffer, or a weight.
pub trait Operand {
    /// How many rows there are.
    fn rows(&self) -> usize;
    /// How long each is.
    fn columns(&self) -> usize;
}

/// Refuses a buffer with too few rows or other columns than the operation has.
pub fn fits(
    operation: &'static str,
    operand: &'static str,
    buf: &impl Operand,
    (rows, columns): (usize, usize),
) -> Result<(), Error> {
    if buf.rows() >= rows && buf.columns() == columns {
        return Ok(());
    }
    let (got, wanted) = ((buf.rows(), buf.columns()), (rows, columns));
    Err(Error::OperandShape { operation, operand, got, wanted })
}

/// `out` = or += a product of `count` rows, with a bias or without.
pub fn linear<B: Operand>(
    operation: &'static str,
    count: usize,
    weight: &impl Operand,
    bias: Option<&B>,
    x: &B,
    out: &B,
) -> Result<(), Error> {
    fits(operation, "x", x, (count, weight.columns()))?;
    fits(operation, "out", out, (count, weight.rows()))?;
    bias.map_or(Ok(()), |bias| fits(operation, "bias", bias, (1, weight.rows())))
}

/// What is read and what is written, with as many columns; of this many rows each.
pub fn pair<B: Operand>(
    operation: &'static str,
    (read, x): (&'static str, &B),
    (written, out): (&'static str, &B),
    (x_rows, out_rows): (usize, usize),
) -> Result<(), Error> {
    fits(operation, read, x, (x_rows, out.columns()))?;
    fits(operation, written, out, (out_rows, out.columns()))
}

/// The vectors of a norm.
pub fn norm<B: Operand>(operation: &'static str, norm: &Norm<B>) -> Result<(), Error> {
    let columns = norm.weight.columns();
    fits(operation, "weight", &norm.weight, (1, columns))?;
    norm.bias.as_ref().map_or(Ok(()), |bias| fits(operation, "bias", bias, (1, columns)))
}

/// Norms of queries, keys and perhaps values: of each head, or of all of them together.
pub fn qk_norm<B: Operand>(count: usize, heads: Heads, norms: &QkNorm<B>, qkv: &B) -> Result<(), Error> {
    const OPERATION: &str = "qk_norm";
    fits(OPERATION, "qkv", qkv, (count, heads.qkv_columns()))?;
    let value = norms.value.as_ref().map(|value| ("value", value, heads.kv));
    let others = [("query", &norms.query, heads.query), ("key", &norms.key, heads.kv)];
    for (operand, own, count) in others.into_iter().chain(value) {
        let (got, whole) = (own.weight.columns(), count * heads.dim);
        if got != heads.dim && got != whole {
            let (got, wanted) = ((1, got), (1, whole));
            return Err(Error::OperandShape { operation: OPERATION, operand, got, wanted });
        }
        norm(OPERATION, own)?;
    }
    Ok(())
}

/// Rotation of queries and keys.
pub fn rope<B: Operand>(count: usize, heads: Heads, rope: &Rope<B>, qkv: &B) -> Result<(), Error> {
    fits("rope", "qkv", qkv, (count, heads.qkv_columns()))?;
    fits("rope", "frequencies", &rope.frequencies, (1, rope.pairs.min(heads.dim / 2)))
}

/// Pages of a layer's group that hold such heads.
pub fn pages_fit(operation: &'static str, heads: Heads, group: &KvGroup) -> Result<(), Error> {
    let (got, wanted) = (group.kind.heads().unwrap_or_default(), (heads.kv, heads.dim));
    if got == wanted { Ok(()) } else { Err(Error::OperandShape { operation, operand: "kv", got, wanted }) }
}

/// Attention over pages, of fused rows or of queries alone.
pub fn attention<B: Operand>(
    count: usize,
    attention: &Attention<B>,
    qkv: &B,
    group: &KvGroup,
    out: &B,
) -> Result<(), Error> {
    const OPERATION: &str = "attention";
    let heads = attention.heads;
    let queries = heads.query * heads.dim;
    let columns = if qkv.columns() == queries { queries } else { heads.qkv_columns() };
    fits(OPERATION, "qkv", qkv, (count, columns))?;
    fits(OPERATION, "out", out, (count, queries))?;
    if let Some(sinks) = &attention.sinks {
        fits(OPERATION, "sinks", sinks, (1, heads.query))?;
    }
    pages_fit(OPERATION, heads, group)
}

/// Queries that grow with their positions.
pub fn scale_by_position<B: Operand>(count: usize, columns: usize, x: &B) -> Result<(), Error> {
    begins("scale_by_position", "x", x, (count, columns))
}

/// A matrix for each head.
pub fn head_products<M>(
    count: usize,
    products: &HeadProducts<'_, M>,
    x: &M::Buf,
    out: &M::Buf,
) -> Result<(), Error>
where
    M: Memory<Weight: Operand, Buf: Operand>,
{
    const OPERATION: &str = "head_products";
    let (heads, weight) = (products.heads, products.weight);
    let needed = products.column.saturating_add(weight.columns());
    let each = x.columns().checked_div(heads).unwrap_or(0).max(needed);
    fits(OPERATION, "x", x, (count, heads.saturating_mul(each)))?;
    if heads == 0 || !weight.rows().is_multiple_of(heads) {
        let (got, wanted) = ((weight.rows(), weight.columns()), (heads, weight.columns()));
        return Err(Error::OperandShape { operation: OPERATION, operand: "weight", got, wanted });
    }
    fits(OPERATION, "out", out, (count, weight.rows()))
}

/// Pages of a layer's group that hold such rows.
fn rows_fit(operation: &'static str, heads: LatentHeads, group: &KvGroup) -> Result<(), Error> {
    let got = match group.kind {
        KvKind::Latent { width } => width,
        KvKind::Pairs { .. } | KvKind::State { .. } => 0,
    };
    if got == heads.width() {
        return Ok(());
    }
    let (got, wanted) = ((1, got), (1, heads.width()));
    Err(Error::OperandShape { operation, operand: "kv", got, wanted })
}

/// Rows on their way into the cache.
pub fn latent_write<B: Operand>(
    count: usize,
    heads: LatentHeads,
    latent: &B,
    turned: &B,
    group: &KvGroup,
) -> Result<(), Error> {
    const OPERATION: &str = "latent_write";
    fits(OPERATION, "latent", latent, (count, heads.latent))?;
    fits(OPERATION, "turned", turned, (count, heads.turned))?;
    rows_fit(OPERATION, heads, group)
}

/// Attention over latent rows.
pub fn latent_attention<B: Operand>(
    count: usize,
    attention: &LatentAttention,
    queries: &B,
    absorbed: &B,
    group: &KvGroup,
    out: &B,
) -> Result<(), Error> {
    const OPERATION: &str = "latent_attention";
    let heads = attention.heads;
    let each = queries.columns().checked_div(heads.query).unwrap_or(0).max(heads.turned);
    fits(OPERATION, "queries", queries, (count, heads.query * each))?;
    fits(OPERATION, "absorbed", absorbed, (count, heads.query * heads.latent))?;
    fits(OPERATION, "out", out, (count, heads.query * heads.latent))?;
    rows_fit(OPERATION, heads, group)
}

/// A gated activation.
pub fn glu<B: Operand>(count: usize, gate_up: &B, out: &B) -> Result<(), Error> {
    fits("glu", "gate_up", gate_up, (count, 2 * out.columns()))?;
    fits("glu", "out", out, (count, out.columns()))
}

/// A gated activation whose other half is some columns of wider rows.
pub fn glu_beside<B: Operand>(count: usize, up: &B, column: usize, gate: &B) -> Result<(), Error> {
    fits("glu_beside", "gate", gate, (count, gate.columns()))?;
    begins("glu_beside", "up", up, (count, column.saturating_add(gate.columns())))
}

/// A number for each expert, of which each token has chosen some.
pub fn scale_chosen<B: Operand>(count: usize, scales: &B, chosen: &B) -> Result<(), Error> {
    fits("scale_chosen", "scales", scales, (1, scales.columns()))?;
    fits("scale_chosen", "chosen", chosen, (count, chosen.columns() / 2 * 2))
}

/// A sum whose second operand has a gate for each row.
pub fn add_gated<B: Operand>(count: usize, gate: &B, y: &B, x: &B) -> Result<(), Error> {
    fits("add_gated", "gate", gate, (count, 1))?;
    pair("add_gated", ("y", y), ("x", x), (count, count))
}

/// What adapters add to a product.
pub fn low_rank<B: Operand>(count: usize, changes: &[Vec<LowRank<B>>], x: &B, out: &B) -> Result<(), Error> {
    const OPERATION: &str = "low_rank";
    fits(OPERATION, "x", x, (count, x.columns()))?;
    fits(OPERATION, "out", out, (count, out.columns()))?;
    for change in changes.iter().flatten() {
        let rank = change.rank.min(RANK_MAX);
        fits(OPERATION, "down", &change.down, (1, rank * x.columns()))?;
        fits(OPERATION, "up", &change.up, (1, change.columns * rank))?;
        let end = change.column + change.columns;
        if end > out.columns() || rank == 0 {
            let (got, wanted) = ((1, end), (1, out.columns()));
            return Err(Error::OperandShape { operation: OPERATION, operand: "columns", got, wanted });
        }
    }
    Ok(())
}

/// The choice of experts. Nobody can take more of them than there are, or than there are in their groups.
pub fn route<B: Operand>(
    count: usize,
    routing: &Routing,
    logits: &B,
    correction: Option<&B>,
    chosen: &B,
) -> Result<(), Error> {
    const OPERATION: &str = "route";
    let Routing { experts, groups, .. } = *routing;
    fits(OPERATION, "logits", logits, (count, experts))?;
    if let Some(correction) = correction {
        fits(OPERATION, "correction", correction, (1, experts))?;
    }
    if experts > ROUTED_MAX {
        let (got, wanted) = ((count, experts), (count, ROUTED_MAX));
        return Err(Error::OperandShape { operation: OPERATION, operand: "logits", got, wanted });
    }
    if let Some(groups) = groups {
        let each = experts.checked_div(groups.count).filter(|each| each * groups.count == experts);
        let enough = |each: usize| {
            (1..=groups.count).contains(&groups.chosen) && routing.chosen <= groups.chosen * each
        };
        if !each.is_some_and(|each| each > usize::from(groups.by_two) && enough(each)) {
            let (got, wanted) = ((groups.chosen, groups.count), (groups.chosen, experts));
            return Err(Error::OperandShape { operation: OPERATION, operand: "groups", got, wanted });
        }
    }
    fits(OPERATION, "chosen", chosen, (count, 2 * routing.chosen.min(experts)))
}

/// A layer of experts.
pub fn experts<M>(
    count: usize,
    experts: &Experts<'_, M>,
    chosen: &M::Buf,
    x: &M::Buf,
    room: &ExpertRoom<M::Buf>,
    residual: &M::Buf,
) -> Result<(), Error>
where
    M: Memory<Weight: Operand, Buf: Operand>,
{
    const OPERATION: &str = "experts";
    let (hidden, ffn, each) = (x.columns(), room.gated.columns(), chosen.columns() / 2);
    fits(OPERATION, "chosen", chosen, (count, 2 * each))?;
    fits(OPERATION, "x", x, (count, hidden))?;
    fits(OPERATION, "residual", residual, (count, hidden))?;
    fits(OPERATION, "rows", &room.rows, (count * each, hidden))?;
    if let Between::Gates(_) = experts.between {
        fits(OPERATION, "gate_up room", &room.gate_up, (count * each, 2 * ffn))?;
    }
    fits(OPERATION, "gated room", &room.gated, (count * each, ffn))?;
    let stacks = |operand, weight: &M::Weight, bias: Option<&M::Buf>, rows: usize, columns: usize| {
        let (got, wanted) = ((weight.rows(), weight.columns()), (experts.count * rows, columns));
        if got != wanted {
            return Err(Error::OperandShape { operation: OPERATION, operand, got, wanted });
        }
        bias.map_or(Ok(()), |bias| fits(OPERATION, "bias", bias, (1, experts.count * rows)))
    };
    stacks("gate_up", experts.gate_up, experts.gate_up_bias, experts.between.columns(ffn), hidden)?;
    stacks("down", experts.down, experts.down_bias, hidden, ffn)
}

/// A layer's states that have room for this many values.
fn state_fits(operation: &'static str, values: usize, group: &KvGroup) -> Result<(), Error> {
    let wanted = values.saturating_mul(size_of::<f32>());
    match group.kind {
        KvKind::State { bytes, .. } if bytes >= wanted => Ok(()),
        KvKind::State { bytes, .. } => {
            Err(Error::OperandShape { operation, operand: "state", got: (1, bytes), wanted: (1, wanted) })
        }
        _ => Err(Error::OperandShape { operation, operand: "state", got: (0, 0), wanted: (1, wanted) }),
    }
}

/// Rows that have this many columns, and perhaps more.
fn begins(
    operation: &'static str,
    operand: &'static str,
    buf: &impl Operand,
    (rows, columns): (usize, usize),
) -> Result<(), Error> {
    fits(operation, operand, buf, (rows, buf.columns().max(columns)))
}

/// A convolution of channels with their past.
pub fn short_conv<B: Operand>(
    count: usize,
    conv: &ShortConv<B>,
    x: &B,
    group: &KvGroup,
    out: &B,
) -> Result<(), Error> {
    const OPERATION: &str = "short_conv";
    let (channels, taps) = (conv.channels, conv.taps);
    if taps == 0 || taps > TAPS_MAX {
        let (got, wanted) = ((taps, channels), (TAPS_MAX, channels));
        return Err(Error::OperandShape { operation: OPERATION, operand: "taps", got, wanted });
    }
    fits(OPERATION, "weight", &conv.weight, (1, taps * channels))?;
    if let Some(bias) = &conv.bias {
        fits(OPERATION, "bias", bias, (1, channels))?;
    }
    begins(OPERATION, "x", x, (count, conv.form.columns(channels)))?;
    fits(OPERATION, "out", out, (count, channels))?;
    state_fits(OPERATION, conv_values(channels, taps), group)
}

/// The gated delta rule.
pub fn delta_rule<B: Operand>(
    count: usize,
    rule: &DeltaRule<B>,
    (qkv, mixed): (&B, &B),
    group: &KvGroup,
    out: &B,
) -> Result<(), Error> {
    const OPERATION: &str = "delta_rule";
    let heads = rule.heads;
    if heads.key == 0 || !heads.value.is_multiple_of(heads.key) {
        let (got, wanted) = ((1, heads.value), (1, heads.key));
        return Err(Error::OperandShape { operation: OPERATION, operand: "value heads", got, wanted });
    }
    fits(OPERATION, "rate", &rule.rate, (1, heads.value))?;
    fits(OPERATION, "bias", &rule.bias, (1, heads.value))?;
    fits(OPERATION, "qkv", qkv, (count, heads.columns()))?;
    begins(OPERATION, "mixed", mixed, (count, 2 * heads.value))?;
    fits(OPERATION, "out", out, (count, heads.value * heads.dim_v))?;
    state_fits(OPERATION, rule.before.saturating_add(heads.state_values()), group)
}

/// The selective scan.
pub fn selective_scan<B: Operand>(
    count: usize,
    scan: &SelectiveScan<B>,
    (x, mixed): (&B, &B),
    group: &KvGroup,
    out: &B,
) -> Result<(), Error> {
    const OPERATION: &str = "selective_scan";
    let heads = scan.heads;
    if heads.groups == 0 || !heads.heads.is_multiple_of(heads.groups) {
        let (got, wanted) = ((1, heads.heads), (1, heads.groups));
        return Err(Error::OperandShape { operation: OPERATION, operand: "heads", got, wanted });
    }
    fits(OPERATION, "rate", &scan.rate, (1, heads.heads))?;
    fits(OPERATION, "bias", &scan.bias, (1, heads.heads))?;
    fits(OPERATION, "skip", &scan.skip, (1, heads.heads))?;
    fits(OPERATION, "x", x, (count, heads.columns()))?;
    begins(OPERATION, "mixed", mixed, (count, heads.heads))?;
    fits(OPERATION, "out", out, (count, heads.heads * heads.dim))?;
    state_fits(OPERATION, scan.before.saturating_add(heads.state_values()), group)
}

/// The same of Mamba-1.
pub fn channel_scan<B: Operand>(
    count: usize,
    scan: &ChannelScan<B>,
    inputs: &ChannelInputs<'_, B>,
    (steps, out): (&B, &B),
    group: &KvGroup,
) -> Result<(), Error> {
    const OPERATION: &str = "channel_scan";
    let (channels, state) = (scan.channels, scan.state);
    fits(OPERATION, "rates", &scan.rates, (1, channels.saturating_mul(state)))?;
    fits(OPERATION, "bias", &scan.bias, (1, channels))?;
    fits(OPERATION, "skip", &scan.skip, (1, channels))?;
    fits(OPERATION, "x", inputs.x, (count, channels))?;
    fits(OPERATION, "keys", inputs.keys, (count, state))?;
    fits(OPERATION, "queries", inputs.queries, (count, state))?;
    fits(OPERATION, "steps", steps, (count, channels))?;
    fits(OPERATION, "out", out, (count, channels))?;
    state_fits(OPERATION, scan.before.saturating_add(channel_values(state, channels)), group)
}

/// Gates, and a norm of groups of values.
pub fn gated_norm<B: Operand>(count: usize, gated: &GatedNorm<B>, gates: &B, x: &B) -> Result<(), Error> {
    const OPERATION: &str = "gated_norm";
    let (columns, group) = (x.columns(), gated.group);
    if let Some(gated_norm) = &gated.norm {
        norm(OPERATION, gated_norm)?;
        if group == 0 || !columns.is_multiple_of(group) {
            let (got, wanted) = ((1, group), (1, columns));
            return Err(Error::OperandShape { operation: OPERATION, operand: "group", got, wanted });
        }
        if ![group, columns].contains(&gated_norm.weight.columns()) {
            let (got, wanted) = ((1, gated_norm.weight.columns()), (1, columns));
            return Err(Error::OperandShape { operation: OPERATION, operand: "weight", got, wanted });
        }
    }
    fits(OPERATION, "x", x, (count, columns))?;
    begins(OPERATION, "gates", gates, (count, gated.column + columns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvLayer, NormKind};

    /// Rows and columns, and nothing in them.
    struct Shape(usize, usize);

    impl Operand for Shape {
        fn rows(&self) -> usize {
            self.0
        }

        fn columns(&self) -> usize {
            self.1
        }
    }

    fn refused(checked: Result<(), Error>) -> &'static str {
        match checked {
            Err(Error::OperandShape { operand, .. }) => operand,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_buffer_may_have_more_rows_and_no_other_columns() {
        assert!(fits("read", "buf", &Shape(4, 8), (3, 8)).is_ok());
        assert_eq!(refused(fits("read", "buf", &Shape(2, 8), (3, 8))), "buf");
        assert_eq!(refused(fits("read", "buf", &Shape(4, 9), (3, 8))), "buf");
    }

    #[test]
    fn every_operand_of_a_product_is_looked_at() {
        let check = |bias: usize, x: usize, out: usize| {
            linear("linear", 3, &Shape(16, 8), Some(&Shape(1, bias)), &Shape(3, x), &Shape(3, out))
        };
        assert!(check(16, 8, 16).is_ok());
        assert_eq!(
            [(8, 8, 16), (16, 9, 16), (16, 8, 15)].map(|(b, x, o)| refused(check(b, x, o))),
            ["bias", "x", "out"]
        );
    }

    #[test]
    fn norms_of_queries_are_of_a_head_or_of_all() {
        let heads = Heads { query: 4, kv: 2, dim: 8 };
        let norm = |columns| Norm { kind: NormKind::Rms, weight: Shape(1, columns), bias: None, eps: 1e-5 };
        let check = |query, key, value: Option<usize>| {
            let norms = QkNorm { query: norm(query), key: norm(key), value: value.map(norm) };
            qk_norm(3, heads, &norms, &Shape(3, heads.qkv_columns()))
        };
        assert!(check(8, 8, None).is_ok() && check(32, 16, None).is_ok() && check(8, 8, Some(8)).is_ok());
        assert_eq!((refused(check(16, 8, None)), refused(check(8, 32, None))), ("query", "key"));
        assert_eq!(refused(check(8, 8, Some(24))), "value");
    }

    #[test]
    fn pages_hold_the_heads_that_attention_has() {
        let heads = Heads { query: 4, kv: 2, dim: 8 };
        let group =
            |heads, dim| KvGroup { layers: 1, kind: KvKind::pairs(heads, dim), window: None, pages: 2 };
        let causal = Attention {
            sinks: Some(Shape(1, 4)),
            ..Attention::causal(heads, KvLayer { group: 0, layer: 0 }, 1.0)
        };
        let check = |group: &KvGroup, out| {
            attention(3, &causal, &Shape(3, heads.qkv_columns()), group, &Shape(3, out))
        };
        assert!(check(&group(2, 8), 32).is_ok());
        assert_eq!(refused(check(&group(2, 4), 32)), "kv");
        assert_eq!(refused(check(&group(2, 8), 16)), "out");
    }

    #[test]
    fn an_adapter_changes_columns_that_are_there() {
        let check = |rank, column| {
            let change = LowRank {
                down: Shape(1, rank * 8),
                up: Shape(1, 4 * rank),
                rank,
                scale: 1.0,
                column,
                columns: 4,
            };
            low_rank(3, &[vec![change]], &Shape(3, 8), &Shape(3, 16))
        };
        assert!(check(2, 12).is_ok());
        assert_eq!((refused(check(2, 13)), refused(check(0, 0))), ("columns", "columns"));
    }
}
