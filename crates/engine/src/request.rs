//! What a caller asks for, checked before it enters.

use std::{ops::Range, sync::Arc};

use fornax_code::Code;
use fornax_compute::{Error, PAGE_TOKENS, Sampling, TOP_LOGPROBS_MAX};

use crate::grammar::Grammar;

/// What tells given content apart: a cryptographic hash of it, cut to 16 bytes. Who can make two contents with the same
/// one can be shown what was computed for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContentHash(pub [u8; 16]);

/// Content that is read at some positions of a prompt instead of tokens: an image, as the rows that a tower of its own
/// has made of it. The prompt has placeholders there, whatever their ids.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// The first of its positions.
    pub at: usize,
    /// What it is: pages of the same content after the same prefix are computed once.
    pub hash: ContentHash,
    /// Values of a row.
    pub columns: usize,
    /// A row for each position, which stands where a token's row of the embedding would: (rows, columns).
    pub rows: Arc<[f32]>,
    /// By section, where each of its rows is, counted from where the piece begins: an image's have a time, a height and
    /// a width. Empty where they follow each other like tokens. Part of what `hash` is of.
    pub offsets: Vec<Vec<u32>>,
    /// Whether its positions see each other in both directions: then one step computes them all.
    pub whole: bool,
}

impl Piece {
    /// The positions that it takes.
    pub fn positions(&self) -> Range<usize> {
        self.at..self.at.saturating_add(self.rows.len().checked_div(self.columns).unwrap_or(0))
    }

    /// How far it moves what follows: as many positions as it has rows, or as its offsets span.
    fn span(&self) -> usize {
        let last = self.offsets.iter().flatten().max();
        last.map_or(self.positions().len(), |&last| last as usize + 1)
    }

    /// What is read at one of its positions.
    pub(crate) fn row(&self, position: usize) -> &[f32] {
        &self.rows[(position - self.at) * self.columns..][..self.columns]
    }
}

/// A prompt and what may follow it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens to start from; at least one.
    pub prompt: Vec<u32>,
    /// What is read at some of its positions instead of tokens; in their order.
    pub pieces: Vec<Piece>,
    /// At most this many tokens follow; 0 only where something about the prompt is asked for.
    pub max_tokens: usize,
    /// Tell what the model makes of the prompt, and choose no token: `max_tokens` is 0.
    pub embeds: bool,
    /// Where the second of two texts begins, for a model that reads them together.
    pub second: Option<usize>,
    /// How tokens are chosen, and which of them end the answer.
    pub sampling: Sampling,
    /// Tell the log-probability of every prompt token after the first, each with so many of the most likely tokens.
    /// The prompt is then computed whole: no prefix is taken from the cache.
    pub prompt_logprobs: Option<u32>,
    /// Fixes all random numbers of the request.
    pub seed: u64,
    /// What the answer must look like; compiled beforehand by whoever knows forms.
    pub grammar: Option<Grammar>,
    /// How many answers, each with its own random numbers.
    pub choices: u32,
    /// Smaller goes first; one step is worth [`PRIORITY_PLACES`] places in line, so nobody waits for ever.
    pub priority: i8,
    /// Requests share cached prefixes only under the same salt.
    pub salt: Box<str>,
    /// Whose it is: a key that only whoever submits it can read anything from. Shown in the
    /// [`Picture`](crate::Picture); owners share the queue, the seats and the steps fairly. It changes no token.
    pub owner: Option<Arc<str>>,
    /// Which of the model's adapters computes it, by its place among those that it was loaded with or by the number that
    /// [`Handle::load_adapter`](crate::Handle::load_adapter) gave it; `None` is the model itself. Prefixes are shared only by requests of
    /// the same.
    pub adapter: Option<u32>,
}

/// How many places in line one step of priority is worth.
pub const PRIORITY_PLACES: i64 = 256;

/// Answers that one request may ask for.
pub const CHOICES_MAX: u32 = 128;

/// Bytes of a salt: every cached prefix under it is found by them.
const SALT_BYTES_MAX: usize = 1024;

/// Why a request is refused at the door. Nothing of it remains.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// No tokens to start from.
    #[error("the prompt is empty")]
    PromptEmpty,
    /// The prompt alone does not fit.
    #[error("the prompt has {prompt} tokens; the context holds {context}")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// Prompt and answer together do not fit.
    #[error("prompt ({prompt} tokens) and max_tokens ({max_tokens}) exceed the context of {context}")]
    ContextExceeded {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// The context would allow it, the page pool does not, even alone.
    #[error(
        "prompt ({prompt} tokens) and max_tokens ({max_tokens}) need {wanted} KV pages; the pool has {pages}"
    )]
    PoolExceeded {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Pages the worst case needs.
        wanted: usize,
        /// Pages there are.
        pages: usize,
    },
    /// A token that the model does not have.
    #[error("token {token} is out of range; the vocabulary has {vocab}")]
    TokenOutOfRange {
        /// The token.
        token: u32,
        /// How many there are.
        vocab: u32,
    },
    /// A parameter outside its range.
    #[error("{name} is {value}; wanted {wanted}")]
    Parameter {
        /// Its name on the wire.
        name: &'static str,
        /// Its value, printed.
        value: String,
        /// The rule.
        wanted: &'static str,
    },
    /// Too many requests or tokens wait already.
    #[error("the queue is full: {requests} of {requests_max} requests, {tokens} of {tokens_max} tokens wait")]
    QueueFull {
        /// Requests waiting.
        requests: usize,
        /// The bound.
        requests_max: usize,
        /// Their prompt tokens.
        tokens: usize,
        /// The bound.
        tokens_max: usize,
    },
    /// The queue has room, and this owner's part of it is taken.
    #[error(
        "as many requests wait already as one key may have waiting: {requests} requests, {tokens} tokens"
    )]
    ShareFull {
        /// Requests of the owner that wait.
        requests: usize,
        /// Their prompt tokens.
        tokens: usize,
    },
    /// The device is gone; nothing can be computed until the engine is started again.
    #[error("{0}")]
    DeviceLost(String),
    /// The engine is draining or gone.
    #[error("the engine takes no more requests")]
    Closed,
}

impl Refusal {
    /// What programs know it by.
    pub fn code(&self) -> Code {
        match self {
            Refusal::PromptTooLong { .. }
            | Refusal::ContextExceeded { .. }
            | Refusal::PoolExceeded { .. } => Code::PromptTooLong,
            Refusal::PromptEmpty | Refusal::TokenOutOfRange { .. } | Refusal::Parameter { .. } => {
                Code::InvalidInput
            }
            Refusal::QueueFull { .. } | Refusal::ShareFull { .. } => Code::QueueFull,
            Refusal::DeviceLost(_) => Code::DeviceLost,
            Refusal::Closed => Code::ModelNotReady,
        }
    }
}

/// What the engine can hold, known before any request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Tokens of one request, prompt and answer.
    pub context: usize,
    /// Tokens that exist.
    pub vocab: u32,
    /// Pages of the smallest full-attention pool, without the trash page.
    pub pages: usize,
    /// Whether the model encodes: it has embeddings and no answers.
    pub encodes: bool,
    /// Whether it reads two texts together: an embedding is then one number, how well they fit.
    pub pairs: bool,
    /// Adapters that it was loaded with.
    pub adapters: u32,
    /// Adapters that may come later, at once.
    pub adapter_places: usize,
    /// Values of a given row; `None` where only text is read.
    pub given: Option<usize>,
    /// Sections of a position.
    pub sections: usize,
    /// Positions that one step has room for whatever the other requests do.
    pub whole_max: usize,
}

#[cfg(test)]
impl Capacity {
    /// Of a decoder of text that holds little.
    pub(crate) const SMALL: Capacity = Capacity {
        context: 100,
        vocab: 50,
        pages: 10,
        encodes: false,
        pairs: false,
        adapters: 0,
        adapter_places: 0,
        given: None,
        sections: 1,
        whole_max: 8,
    };
}

impl Request {
    /// One answer to `prompt`, with nothing special asked for; the fields are public to ask for more.
    pub fn new(prompt: Vec<u32>, max_tokens: usize, sampling: Sampling) -> Request {
        Request {
            prompt,
            pieces: Vec::new(),
            max_tokens,
            embeds: false,
            second: None,
            sampling,
            prompt_logprobs: None,
            seed: 0,
            grammar: None,
            choices: 1,
            priority: 0,
            salt: "".into(),
            owner: None,
            adapter: None,
        }
    }

    /// What the tokens of a sequence at `places` are rotated by, in a section.
    pub(crate) fn rotations(&self, section: usize, places: Range<usize>) -> Vec<u32> {
        let mut rotations = Vec::with_capacity(places.len());
        let (mut place, mut at) = (0, 0);
        // Text up to a place, as far as it is wanted.
        let text = |rotations: &mut Vec<u32>, place: &mut usize, at: &mut usize, end: usize| {
            let wanted = places.start.clamp(*place, end)..places.end.clamp(*place, end);
            rotations.extend(wanted.map(|wanted| small(*at + wanted - *place)));
            (*at, *place) = (*at + end - *place, end);
        };
        for piece in &self.pieces {
            let own = piece.positions();
            text(&mut rotations, &mut place, &mut at, own.start);
            let offset = |row: usize| piece.offsets.get(section).map_or(row, |offsets| offsets[row] as usize);
            let wanted = places.start.clamp(own.start, own.end)..places.end.clamp(own.start, own.end);
            rotations.extend(wanted.map(|wanted| small(at + offset(wanted - own.start))));
            (place, at) = (own.end, at + piece.span());
        }
        let end = places.end.max(place);
        text(&mut rotations, &mut place, &mut at, end);
        rotations
    }

    /// How many of `len` positions from `start` on one step computes that has room for `most`: a piece that is computed
    /// whole is not cut. Such a piece may make it more than `len`.
    pub(crate) fn uncut(&self, start: usize, len: usize, most: usize) -> usize {
        let end = start + len;
        let mut whole = self.pieces.iter().filter(|piece| piece.whole).map(Piece::positions);
        match whole.find(|own| own.start < end && end < own.end) {
            // Where there is room for nothing, nothing is gone on with either.
            _ if len == 0 => 0,
            None => len,
            Some(own) if own.start > start => own.start - start,
            Some(own) if own.end - start <= most => own.end - start,
            Some(_) => 0,
        }
    }

    /// The piece around a position that one step computes whole.
    pub(crate) fn whole_at(&self, position: usize) -> Option<Range<usize>> {
        let whole = self.pieces.iter().filter(|piece| piece.whole);
        whole.map(Piece::positions).find(|own| own.contains(&position))
    }

    /// Positions that will ever be computed: the last token allowed needs no keys and values.
    pub(crate) fn positions_max(&self) -> usize {
        self.prompt.len() + self.max_tokens - usize::from(!self.embeds)
    }

    /// Refuses given content that is not where and what it should be.
    fn check_pieces(&self, capacity: &Capacity) -> Result<(), Refusal> {
        let wrong = |name, value: String, wanted| Err(Refusal::Parameter { name, value, wanted });
        let mut end = 0;
        for piece in &self.pieces {
            let Some(columns) = capacity.given else {
                let given = format!("{} given", self.pieces.len());
                return wrong("pieces", given, "none: this model reads text alone");
            };
            let values = piece.rows.len();
            if piece.columns != columns {
                return wrong("pieces", format!("rows of {}", piece.columns), "rows as wide as the model's");
            }
            if values == 0 || !values.is_multiple_of(columns) {
                return wrong("pieces", format!("{values} values"), "whole rows, at least one");
            }
            let (positions, offsets) = (piece.positions(), &piece.offsets);
            let whole = |section: &Vec<u32>| section.len() == positions.len();
            if !offsets.is_empty() && (offsets.len() != capacity.sections || !offsets.iter().all(whole)) {
                let said = format!("offsets of {} sections", offsets.len());
                return wrong("pieces", said, "one for each row in each section of the model's positions");
            }
            if piece.span() > positions.len() {
                return wrong(
                    "pieces",
                    format!("a span of {}", piece.span()),
                    "at most as many positions as rows",
                );
            }
            if positions.start < end || positions.end > self.prompt.len() {
                return wrong("pieces", format!("{positions:?}"), "one after the other, inside the prompt");
            }
            if piece.whole && positions.len() > capacity.whole_max {
                let said = format!("{} positions computed in one step", positions.len());
                return wrong("pieces", said, "as many as a step has room for beside the other requests");
            }
            if let Some(value) = piece.rows.iter().find(|value| !value.is_finite()) {
                return wrong("pieces", value.to_string(), "finite values");
            }
            end = positions.end;
        }
        if let Some(top) = self.prompt_logprobs.filter(|_| !self.pieces.is_empty()) {
            return wrong("prompt_logprobs", top.to_string(), "none: what is given has no log-probability");
        }
        Ok(())
    }

    /// Refuses what could never be answered as asked.
    pub fn check(&self, capacity: &Capacity) -> Result<(), Refusal> {
        let (prompt, max_tokens, context) = (self.prompt.len(), self.max_tokens, capacity.context);
        if prompt == 0 {
            return Err(Refusal::PromptEmpty);
        }
        if prompt > context || (prompt == context && max_tokens > 0) {
            return Err(Refusal::PromptTooLong { prompt, context });
        }
        if let Some(&token) = self.prompt.iter().find(|&&token| token >= capacity.vocab) {
            return Err(Refusal::TokenOutOfRange { token, vocab: capacity.vocab });
        }
        let wrong = |name, value: String, wanted| Err(Refusal::Parameter { name, value, wanted });
        if capacity.encodes && !self.embeds {
            return wrong("embeds", "false".into(), "true: this model makes embeddings and no answers");
        }
        match self.second {
            None if capacity.pairs => {
                return wrong("second", "none".into(), "where the second text begins: this model reads two");
            }
            Some(second) if !capacity.pairs => {
                return wrong("second", second.to_string(), "none: this model reads one text");
            }
            Some(second) if second > prompt => {
                return wrong("second", second.to_string(), "at most the prompt's length");
            }
            _ => {}
        }
        if self.embeds {
            // Nothing else can be had of a prompt that is only looked at.
            let alone = self.prompt_logprobs.is_none() && self.grammar.is_none() && self.choices == 1;
            if max_tokens > 0 || !alone {
                return wrong("embeds", "true".into(), "with no tokens, choices, form or log-probabilities");
            }
        } else if max_tokens == 0 && self.prompt_logprobs.is_none() {
            return wrong("max_tokens", "0".into(), "at least 1");
        }
        self.check_pieces(capacity)?;
        if let Some(top) = self.prompt_logprobs.filter(|&top| top > TOP_LOGPROBS_MAX) {
            return wrong("prompt_logprobs", top.to_string(), "at most 128");
        }
        if max_tokens == 0 && !self.embeds && (prompt < 2 || self.choices != 1) {
            return wrong(
                "max_tokens",
                "0".into(),
                "at least 1 for a prompt of one token or several answers",
            );
        }
        if prompt.checked_add(max_tokens).is_none_or(|sum| sum > context) {
            return Err(Refusal::ContextExceeded { prompt, max_tokens, context });
        }
        let wanted = self.positions_max().div_ceil(PAGE_TOKENS);
        if wanted > capacity.pages {
            return Err(Refusal::PoolExceeded { prompt, max_tokens, wanted, pages: capacity.pages });
        }
        if !(1..=CHOICES_MAX).contains(&self.choices) {
            return wrong("n", self.choices.to_string(), "1 to 128");
        }
        // Of those that come later the door knows which are there.
        if let Some(adapter) = self.adapter.filter(|&adapter| adapter >= capacity.adapters)
            && capacity.adapter_places == 0
        {
            return wrong("adapter", adapter.to_string(), "below the number of adapters");
        }
        if self.salt.len() > SALT_BYTES_MAX {
            return wrong("cache_salt", format!("{} bytes", self.salt.len()), "at most 1024 bytes");
        }
        if let Some(grammar) = self.grammar.as_ref().filter(|grammar| grammar.vocab() < capacity.vocab) {
            // Its masks would end before the vocabulary does.
            let value = format!("compiled for {} tokens of {}", grammar.vocab(), capacity.vocab);
            return wrong("grammar", value, "one compiled for this model's vocabulary");
        }
        match self.sampling.check(capacity.vocab) {
            Ok(()) => Ok(()),
            Err(Error::SampleParameter { name, value, wanted }) => wrong(name, value, wanted),
            Err(other) => wrong("sampling", other.to_string(), "valid parameters"),
        }
    }
}

fn small(value: usize) -> u32 {
    u32::try_from(value).expect("positions are bounded by the context")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_goes_on_behind_an_image_where_the_image_ends() {
        // Two rows of three, between two tokens and two more; then one without offsets.
        let image = Piece {
            at: 2,
            hash: ContentHash([1; 16]),
            columns: 1,
            rows: vec![0.0; 6].into(),
            offsets: vec![vec![0; 6], vec![0, 0, 0, 1, 1, 1], vec![0, 1, 2, 0, 1, 2]],
            whole: false,
        };
        let sound = Piece { at: 10, rows: vec![0.0; 2].into(), offsets: vec![], ..image.clone() };
        let request =
            Request { pieces: vec![image, sound], ..Request::new(vec![1; 13], 5, Sampling::greedy()) };
        let wanted = [
            [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 9, 10, 11],
            [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11],
            [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
        ];
        for (section, wanted) in wanted.iter().enumerate() {
            for start in 0..wanted.len() {
                for end in start..=wanted.len() {
                    assert_eq!(request.rotations(section, start..end), wanted[start..end], "{start}..{end}");
                }
            }
        }
        let text = Request::new(vec![1; 13], 5, Sampling::greedy());
        assert_eq!(text.rotations(2, 3..6), [3, 4, 5]);
    }

    #[test]
    fn given_content_lies_in_the_prompt_one_after_the_other_and_fits_the_model() {
        let text = Capacity::SMALL;
        let capacity = Capacity { given: Some(4), ..text };
        let piece = |at, rows: usize, columns: usize| Piece {
            at,
            hash: ContentHash([7; 16]),
            columns,
            rows: vec![0.5; rows * columns].into(),
            offsets: vec![],
            whole: false,
        };
        let check = |pieces: Vec<Piece>, capacity: &Capacity, wanted: Option<&str>| {
            let request = Request { pieces, ..Request::new(vec![1; 10], 5, Sampling::greedy()) };
            let said = request.check(capacity).err().map(|refusal| refusal.to_string());
            assert_eq!(said.as_deref(), wanted);
        };
        check(vec![piece(0, 3, 4), piece(3, 7, 4)], &capacity, None);
        let none = "pieces is 1 given; wanted none: this model reads text alone";
        check(vec![piece(0, 3, 4)], &text, Some(none));
        check(
            vec![piece(0, 3, 5)],
            &capacity,
            Some("pieces is rows of 5; wanted rows as wide as the model's"),
        );
        let cut = Piece { rows: vec![0.5; 7].into(), ..piece(0, 1, 4) };
        check(vec![cut], &capacity, Some("pieces is 7 values; wanted whole rows, at least one"));
        check(vec![piece(0, 0, 4)], &capacity, Some("pieces is 0 values; wanted whole rows, at least one"));
        let order = "one after the other, inside the prompt";
        let wrong = |at: &str| format!("pieces is {at}; wanted {order}");
        check(vec![piece(3, 3, 4), piece(5, 1, 4)], &capacity, Some(&wrong("5..6")));
        check(vec![piece(8, 3, 4)], &capacity, Some(&wrong("8..11")));
        check(vec![piece(usize::MAX, 3, 4)], &capacity, Some(&wrong(&format!("{0}..{0}", usize::MAX))));
        let nan = Piece { rows: vec![f32::NAN; 4].into(), ..piece(0, 1, 4) };
        check(vec![nan], &capacity, Some("pieces is NaN; wanted finite values"));
        let long = Capacity { whole_max: 2, ..capacity };
        check(vec![piece(0, 3, 4)], &long, None);
        let room = "as many as a step has room for beside the other requests";
        let whole = vec![Piece { whole: true, ..piece(0, 3, 4) }];
        check(whole, &long, Some(&format!("pieces is 3 positions computed in one step; wanted {room}")));
        let spread = |offsets| vec![Piece { offsets, ..piece(0, 2, 4) }];
        check(spread(vec![vec![0, 0]]), &capacity, None);
        let rule = "one for each row in each section of the model's positions";
        let sections = |count| format!("pieces is offsets of {count} sections; wanted {rule}");
        check(spread(vec![vec![0, 1]; 3]), &capacity, Some(&sections(3)));
        check(spread(vec![vec![0]]), &capacity, Some(&sections(1)));
        let far = "pieces is a span of 3; wanted at most as many positions as rows";
        check(spread(vec![vec![0, 2]]), &capacity, Some(far));
        let told = Request {
            pieces: vec![piece(0, 3, 4)],
            prompt_logprobs: Some(0),
            ..Request::new(vec![1; 10], 5, Sampling::greedy())
        };
        let said = told.check(&capacity).unwrap_err().to_string();
        assert_eq!(said, "prompt_logprobs is 0; wanted none: what is given has no log-probability");
    }

    #[test]
    fn a_piece_that_is_read_in_both_directions_is_computed_in_one_step() {
        let piece = |at, rows: usize, whole| Piece {
            at,
            hash: ContentHash([7; 16]),
            columns: 1,
            rows: vec![0.5; rows].into(),
            offsets: vec![],
            whole,
        };
        let pieces = vec![piece(4, 10, true), piece(20, 10, false), piece(40, 6, true)];
        let request = Request { pieces, ..Request::new(vec![1; 50], 5, Sampling::greedy()) };
        // Where a step begins, how much the budget allows and how much fits: what is computed.
        for (start, len, most, wanted) in [
            (0, 4, 50, 4),
            (0, 9, 50, 4),
            (0, 14, 50, 14),
            (4, 1, 50, 10),
            (4, 1, 9, 0),
            (8, 3, 6, 6),
            (8, 0, 6, 0),
            (14, 11, 50, 11),
            (30, 12, 50, 10),
            (44, 1, 2, 2),
        ] {
            assert_eq!(request.uncut(start, len, most), wanted, "{len} from {start}, {most} at most");
        }
        assert_eq!(
            (request.whole_at(13), request.whole_at(14), request.whole_at(25)),
            (Some(4..14), None, None)
        );
    }

    #[test]
    fn what_could_never_be_answered_is_refused_with_its_numbers() {
        let capacity = Capacity { pages: 2, adapters: 1, ..Capacity::SMALL };
        let good = Request::new(vec![1, 2, 3], 10, Sampling::greedy());
        assert_eq!(good.check(&capacity), Ok(()));
        let check = |request: Request, wanted: &str| {
            assert_eq!(request.check(&capacity).unwrap_err().to_string(), wanted);
        };
        check(Request { prompt: vec![], ..good.clone() }, "the prompt is empty");
        check(
            Request { prompt: vec![1; 100], ..good.clone() },
            "the prompt has 100 tokens; the context holds 100",
        );
        check(
            Request { max_tokens: 98, ..good.clone() },
            "prompt (3 tokens) and max_tokens (98) exceed the context of 100",
        );
        check(
            Request { max_tokens: usize::MAX, ..good.clone() },
            &format!("prompt (3 tokens) and max_tokens ({}) exceed the context of 100", usize::MAX),
        );
        check(
            Request { max_tokens: 63, ..good.clone() },
            "prompt (3 tokens) and max_tokens (63) need 3 KV pages; the pool has 2",
        );
        check(Request { max_tokens: 0, ..good.clone() }, "max_tokens is 0; wanted at least 1");
        check(
            Request { prompt: vec![7, 50], ..good.clone() },
            "token 50 is out of range; the vocabulary has 50",
        );
        check(Request { choices: 1000, ..good.clone() }, "n is 1000; wanted 1 to 128");
        let encoder = Capacity { encodes: true, ..capacity };
        assert_eq!(
            good.check(&encoder).unwrap_err().to_string(),
            "embeds is false; wanted true: this model makes embeddings and no answers"
        );
        let embeds = Request { embeds: true, max_tokens: 0, ..good.clone() };
        assert_eq!(embeds.check(&encoder), Ok(()));
        let second = |at, pairs| {
            let said = Request { second: Some(at), ..embeds.clone() }.check(&Capacity { pairs, ..encoder });
            said.map_err(|refusal| refusal.to_string())
        };
        let length = good.prompt.len();
        assert_eq!((second(0, true), second(length, true)), (Ok(()), Ok(())));
        assert!(second(length + 1, true).unwrap_err().contains("at most the prompt's length"));
        assert!(second(1, false).unwrap_err().contains("this model reads one text"));
        let one = embeds.check(&Capacity { pairs: true, ..encoder }).unwrap_err().to_string();
        assert!(one.contains("this model reads two"), "{one}");
        assert_eq!(Request { adapter: Some(0), ..good.clone() }.check(&capacity), Ok(()));
        let other = Request { adapter: Some(1), ..good.clone() };
        check(other, "adapter is 1; wanted below the number of adapters");
        let salt = "s".repeat(1025).into();
        check(Request { salt, ..good.clone() }, "cache_salt is 1025 bytes; wanted at most 1024 bytes");
        let check = |sampling: Sampling, wanted: &str| check(Request { sampling, ..good.clone() }, wanted);
        let sampling = Sampling::greedy;
        check(
            Sampling { logit_bias: vec![(1, 0.5); 51], ..sampling() },
            "logit_bias is 51; wanted no longer than the vocabulary",
        );
        check(
            Sampling { allowed_token_ids: Some(vec![1; 51]), ..sampling() },
            "allowed_token_ids is 51; wanted no longer than the vocabulary",
        );
        check(
            Sampling { bad_words: vec![vec![1]; 4097], ..sampling() },
            "bad_words is 4097; wanted at most 4096 sequences",
        );
        check(
            Sampling { bad_words: vec![vec![1; 257]], ..sampling() },
            "bad_words is 257; wanted made of at most 256 tokens each",
        );
        let hot = Sampling { temperature: f32::NAN, ..Sampling::greedy() };
        assert!(matches!(
            Request { sampling: hot, ..good }.check(&capacity),
            Err(Refusal::Parameter { name: "temperature", .. })
        ));
    }
}
