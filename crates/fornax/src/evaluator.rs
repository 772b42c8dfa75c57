//! Raw logits: one sequence computed on the caller's own thread, for whoever wants every number and no answer.

use std::ops::ControlFlow;

use fornax_compute::{Batch, PAGE_TOKENS, PageId, Row, RowState, Token};

use crate::device::Forward;
use crate::text::Text;
use crate::{Error, Loading, OpenOptions};

/// A loaded model that hands out logits.
pub struct Evaluator {
    text: Text,
    model: Box<dyn Forward>,
    device: String,
    /// Page tables by KV group; the sequence owns every page but the trash page.
    tables: Vec<Vec<PageId>>,
    /// KV groups of states, of each of which the sequence has one.
    states: usize,
    context: usize,
    /// The longest context that the model was made for.
    trained: usize,
    /// Columns of the logits, padding included.
    columns: usize,
    /// Tokens of one step.
    step_tokens: usize,
    /// Logit rows of one step.
    rows: usize,
}

impl OpenOptions {
    /// Opens the model for its logits, `rows` of them computed at once; each takes four bytes for every token of the
    /// vocabulary. `progress` is told how far it is.
    pub fn evaluator(self, rows: usize, progress: &mut dyn FnMut(Loading)) -> Result<Evaluator, Error> {
        let blueprint = self.parallel(1).logit_rows(rows.saturating_sub(1)).blueprint()?;
        if blueprint.config.pooling.is_some() {
            return Err(Error::Embeds);
        }
        let model = blueprint.place.forward(&blueprint, progress)?;
        let (states, paged): (Vec<_>, Vec<_>) =
            blueprint.plan.kv.groups.iter().partition(|group| group.kind.is_state());
        let tables = paged.iter().map(|group| (1..group.pages as u32).map(PageId).collect()).collect();
        Ok(Evaluator {
            device: blueprint.place.words(),
            context: blueprint.plan.context,
            trained: blueprint.plan.context_trained,
            columns: blueprint.config.vocab,
            step_tokens: blueprint.limits.tokens_max,
            rows: blueprint.limits.wanted_max,
            text: blueprint.text,
            model,
            tables,
            states: states.len(),
        })
    }
}

impl Evaluator {
    /// The model's text side: prompts to tokens.
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// Most tokens that can be computed.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Values of a row of logits. Those beyond the vocabulary are padding.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Where it is computed, in words.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Refuses what [`logits`](Evaluator::logits) would, without computing.
    pub fn check(&self, tokens: &[u32]) -> Result<(), Error> {
        self.text.check_tokens(tokens)?;
        if tokens.len() > self.context {
            let (prompt, context, trained) = (tokens.len(), self.context, self.trained);
            return Err(Error::PromptTooLong { prompt, context, trained });
        }
        Ok(())
    }

    /// Computes `tokens` from their start and hands out the logits after each: `visit(position, logits)`. With
    /// `last` it is only those after the last token. `visit` stops it by breaking.
    pub fn logits(
        &mut self,
        tokens: &[u32],
        last: bool,
        visit: &mut dyn FnMut(usize, &[f32]) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        self.check(tokens)?;
        let most = if last { self.step_tokens } else { self.step_tokens.min(self.rows) };
        let mut computed = 0;
        while computed < tokens.len() {
            let end = tokens.len().min(computed + most);
            let wanted = if last { usize::from(end == tokens.len()) } else { end - computed };
            let logits = self.step(tokens, computed, end, wanted)?;
            computed = end;
            for (position, row) in (end - wanted..).zip(logits.chunks_exact(self.columns)) {
                if !row.iter().all(|value| value.is_finite()) {
                    return Err(Error::NumericFault { position });
                }
                if visit(position, row).is_break() {
                    return Err(Error::Cancelled);
                }
            }
        }
        Ok(())
    }

    /// One step over the tokens from `start` to `end`: the logits of the last `wanted` positions.
    fn step(&mut self, tokens: &[u32], start: usize, end: usize, wanted: usize) -> Result<Vec<f32>, Error> {
        let pages = end.div_ceil(PAGE_TOKENS);
        let mut batch = Batch::default();
        batch.push(
            Row {
                slot: 0,
                start: start as u32,
                len: (end - start) as u32,
                pages: self.tables.iter().map(|table| table[..pages].to_vec()).collect(),
                wanted: wanted as u32,
            },
            tokens[start..end].iter().map(|&token| Token::Known(token)),
        );
        if self.states > 0 {
            let own = PageId(1);
            let state = RowState { from: (start > 0).then_some(own), to: own, saves: Vec::new() };
            batch.states = vec![vec![state; self.states]];
        }
        self.model.forward(&batch, wanted)
    }
}
