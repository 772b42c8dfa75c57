//! What the sampler is asked about a step.

use fornax_compute::{Given, SampleRow};

use crate::{
    grammar::Grammar,
    scheduler::{Scheduled, Scheduler},
    sequence::{Sequence, SequenceId},
};

/// Which tokens the form of a row's sequence allows next.
pub(crate) struct Masks {
    /// The index of the row in the step.
    pub(crate) row: usize,
    /// One for each position that chooses a token, or what went wrong.
    pub(crate) allowed: Result<Vec<Vec<u32>>, String>,
}

impl Masks {
    /// What the form allows behind what was said, and behind each token of the draft.
    pub(crate) fn of(row: usize, form: &mut Grammar, draft: &[u32]) -> Masks {
        Masks { row, allowed: along(form, draft) }
    }
}

fn along(form: &mut Grammar, draft: &[u32]) -> Result<Vec<Vec<u32>>, String> {
    let mut allowed = vec![form.mask()?];
    if draft.is_empty() {
        return Ok(allowed);
    }
    let mut ahead = form.copied();
    for &token in draft {
        let Ok(next) = ahead.accept(token).and_then(|()| ahead.mask()) else { break };
        allowed.push(next);
    }
    // Where the form gives up behind a guess, nothing is allowed: that counts only if the guess turns out to be right.
    let nothing = vec![0; allowed[0].len()];
    allowed.resize(draft.len() + 1, nothing);
    Ok(allowed)
}

/// One question to the sampler.
pub(crate) struct Question {
    /// The index of its row in the step.
    pub(crate) row: usize,
    /// The position whose logits it is about.
    pub(crate) position: usize,
    /// The index of those logits in the step.
    wanted: u32,
    pub(crate) kind: QuestionKind,
    /// Which tokens the form allows, if there is one.
    mask: Option<Vec<u32>>,
    /// The tokens before a drafted position; elsewhere the sequence has them.
    history: Option<Vec<u32>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum QuestionKind {
    /// How likely was the prompt's next token?
    Score,
    /// Which token comes next?
    Choose,
}

/// Rows that are not asked about, although they were to choose a token.
#[derive(Default)]
pub(crate) struct Others {
    /// Rows that are read instead, and where their logits would be.
    pub(crate) embeds: Vec<(usize, u32)>,
    /// Sequences whose form failed, and why.
    pub(crate) broken: Vec<(SequenceId, String)>,
}

/// Adds the questions about a step's rows to `asked`, except for sequences that have ended meanwhile or whose next
/// token is known already. `masks` are those that were computed beside the step, in the order of its rows.
pub(crate) fn ask(
    rows: &mut [Scheduled],
    masks: Vec<Masks>,
    scheduler: &mut Scheduler,
    asked: &mut Vec<Question>,
) -> Others {
    asked.reserve(rows.len());
    let mut others = Others::default();
    let mut masks = masks.into_iter().peekable();
    let mut wanted_before = 0;
    for (index, row) in rows.iter_mut().enumerate() {
        let first_wanted = wanted_before;
        wanted_before += row.wanted();
        let ready = masks.next_if(|masks| masks.row == index);
        let Some(sequence) = scheduler.get_mut(row.id) else { continue };
        let wanted_from = row.wanted_from;
        let wanted = |position: usize| small(first_wanted + position - wanted_from);
        let question = |position, kind| Question {
            row: index,
            position,
            wanted: wanted(position),
            kind,
            mask: None,
            history: None,
        };
        asked.extend(row.scores().map(|position| question(position, QuestionKind::Score)));
        if row.samples > 0 && sequence.request.embeds {
            others.embeds.push((index, wanted(row.end - 1)));
            continue;
        }
        if row.samples > 0 && sequence.tokens.len() > row.end {
            // The form forced it while the step was under way.
            sequence.sampled_ahead -= 1;
            row.samples = 0;
        }
        if row.samples == 0 {
            continue;
        }
        let draft = sequence.draft.launched();
        let masks = ready.or_else(|| sequence.grammar.as_mut().map(|form| Masks::of(index, form, draft)));
        let mut allowed = match masks.map(|masks| masks.allowed).transpose() {
            Ok(allowed) => allowed.map(Vec::into_iter),
            Err(reason) => {
                others.broken.push((row.id, reason));
                continue;
            }
        };
        for position in row.end - row.samples..row.end {
            let mask = allowed.as_mut().map(|allowed| allowed.next().expect("one for each position"));
            let history = (row.drafts() > 0 && sequence.request.sampling.needs_history()).then(|| {
                let drafted = position + 1 - (row.end - row.drafts());
                [sequence.text(), &sequence.draft.launched()[..drafted]].concat()
            });
            asked.push(Question { mask, history, ..question(position, QuestionKind::Choose) });
        }
    }
    others
}

impl Question {
    /// As the sampler takes it.
    pub(crate) fn input<'a>(&'a self, row: &Scheduled, sequence: &'a Sequence, vocab: u32) -> SampleRow<'a> {
        // Positions beyond the last token are drafted.
        let drafted = (self.position + 1).saturating_sub(sequence.tokens.len());
        let given = (self.kind == QuestionKind::Score).then(|| Given {
            token: sequence.tokens[self.position + 1],
            top: sequence.request.prompt_logprobs.unwrap_or(0),
        });
        SampleRow {
            wanted: self.wanted,
            slot: row.slot,
            position: small(self.position + 1),
            seed: sequence.seed,
            vocab,
            sampling: &sequence.request.sampling,
            history: match &self.history {
                Some(history) => history,
                None if drafted > 0 => &[],
                None => sequence.text(),
            },
            generated: small(sequence.generated() + drafted),
            mask: self.mask.as_deref(),
            given,
            mirostat_mu: sequence.mirostat_mu,
        }
    }
}

fn small(value: usize) -> u32 {
    u32::try_from(value).expect("positions are bounded by the context")
}
