//! An engine whose tokens are text: the fake runner chooses them at random, forms decide which it may.

use std::{collections::HashMap, sync::Arc, time::Duration};

use fornax_compute::{KvGroup, KvKind, PAGE_TOKENS, Sampling};
use fornax_engine::simulation::Dice;
use fornax_engine::{
    EndReason, Engine, EngineOptions, Event, Handle, QueueLimits, Request, StepLimits, Turn,
    fake::{Fake, FakeOptions},
};
use fornax_form::{Form, Grammars, Vocabulary};

/// Tokens that end an answer; none of them has bytes.
const END_TOKENS: [u32; 2] = [1, 7];

/// Control tokens that must never be chosen.
const CONTROL_TOKENS: [u32; 3] = [0, 3, 5];

/// What models write in one token: pieces of JSON, of words, of numbers, of code points.
const PIECES: &[&str] = &[
    "{\"", "\":", "\":\"", "\",\"", "\"}", "\"]", "\"},", "\"],", "\"]}", "\"}}", "},{\"", "\",", "\":{\"",
    "\":[", "]}", "}}", "]]", "[[", "[]", "{}", "],", "},", "[{\"", ":[", ":{", "true", "false", "null",
    "tru", "fals", "nul", "e}", "l,", "e]", "00", "10", "12", "123", "-1", "0.", ".5", "1,", "2]", "3}",
    "4,\"", "e+", "e-1", "E5", "na", "me", "name", "\"name\"", "id", "\"id\"", "tag", "tags", "va", "lue",
    "value", "ki", "nd", "kind", "al", "pha", "be", "ta", "alpha", "ab", "abc", "zz", "the", " the", " a",
    "  ", "\n", "\n\n", "\\n", "\\\"", "\\\\", "\\u", "\\u00", "é", "ü", "ß", "日本", "日", "🙂", "Δ",
    "2024", "-01", "-02", "-29", "T1", ":3", "0Z", "@", ".com", "://", "http", "::", "yes", "no", "maybe",
    "ye", "red", "green", "blue", "SELECT", " FROM", "x+", "(x", "))", "((", "\"", "\"", "\"a", "\"b\"",
    "a\"", "b\"", "s\"", "1\"", " \"", ".\"", "!\"", "?\"", "-\"", "0\"", "\u{e9}\"",
];

/// Tokens with their bytes, in an order that says nothing.
pub(crate) struct Tokens {
    pub(crate) bytes: Vec<Vec<u8>>,
    ids: Arc<HashMap<Vec<u8>, u32>>,
}

impl Tokens {
    /// All bytes, the pieces, what begins or ends in the middle of a code point, and tokens without bytes.
    pub(crate) fn new() -> Tokens {
        let mut texts: Vec<Vec<u8>> = (0..=255_u8).map(|byte| vec![byte]).collect();
        texts.extend(PIECES.iter().map(|piece| piece.as_bytes().to_vec()));
        texts.extend([
            b"\xe6\x97".to_vec(),
            b"\xa5\"".to_vec(),
            b"\xf0\x9f".to_vec(),
            b"\x99\x82\"}".to_vec(),
        ]);
        texts.sort();
        texts.dedup();
        Dice::new(17).shuffle(&mut texts);
        let mut bytes = Vec::new();
        for text in texts {
            while [&END_TOKENS[..], &CONTROL_TOKENS[..]]
                .concat()
                .contains(&u32::try_from(bytes.len()).unwrap())
            {
                bytes.push(Vec::new());
            }
            bytes.push(text);
        }
        let ids = (0..).zip(&bytes).filter(|(_, bytes)| !bytes.is_empty());
        let ids = ids.map(|(id, bytes)| (bytes.clone(), id)).collect();
        Tokens { bytes, ids: Arc::new(ids) }
    }

    pub(crate) fn grammars(&self) -> Grammars {
        let ids = Arc::clone(&self.ids);
        let encode = Arc::new(move |bytes: &[u8]| encoded(&ids, bytes));
        let vocabulary = Vocabulary { bytes: self.bytes.clone(), end_tokens: END_TOKENS.to_vec(), encode };
        Grammars::new(vocabulary).unwrap()
    }
}

/// The longest token first, as a merging tokenizer nearly does.
fn encoded(ids: &HashMap<Vec<u8>, u32>, mut bytes: &[u8]) -> Vec<u32> {
    let mut tokens = Vec::new();
    while !bytes.is_empty() {
        let longest = (1..=bytes.len().min(16)).rev().find_map(|len| Some((len, *ids.get(&bytes[..len])?)));
        let (len, token) = longest.unwrap();
        tokens.push(token);
        bytes = &bytes[len..];
    }
    tokens
}

/// Tokens of a request.
const CONTEXT: usize = 400;

/// Requests at once.
const SLOTS: usize = 16;

/// A quiet engine over these tokens.
pub(crate) fn engine(tokens: &Tokens, depth: usize) -> (Engine, Handle) {
    let vocab = u32::try_from(tokens.bytes.len()).unwrap();
    let pages = 1 + SLOTS * CONTEXT.div_ceil(PAGE_TOKENS) / 2;
    let fake = Fake::new(FakeOptions {
        groups: vec![KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages }],
        limits: StepLimits { tokens_max: 64, wanted_max: SLOTS, slots: SLOTS },
        depth,
        vocab,
        faults: Box::new(|| None),
    });
    let options = EngineOptions {
        queue: QueueLimits { requests_max: usize::MAX, tokens_max: usize::MAX },
        ..EngineOptions::new(CONTEXT, Arc::new(|| Duration::from_secs(1)))
    };
    Engine::new(Box::new(fake), options)
}

/// What became of a request.
pub(crate) struct Answer {
    /// Which of the forms.
    pub(crate) form: usize,
    pub(crate) bytes: Vec<u8>,
    pub(crate) reason: EndReason,
}

/// Answers to all forms from one engine at once: each form some times with room, once in haste.
pub(crate) fn answers(tokens: &Tokens, grammars: &Grammars, forms: &[Form], depth: usize) -> Vec<Answer> {
    let vocab = u32::try_from(tokens.bytes.len()).unwrap();
    let (mut engine, handle) = engine(tokens, depth);
    let sampling = Sampling { temperature: 1.0, end_tokens: END_TOKENS.to_vec(), ..Sampling::greedy() };
    let mut replies = Vec::new();
    for (index, form) in forms.iter().enumerate() {
        let grammar = grammars.compile(form).unwrap_or_else(|error| panic!("{form:?}: {error}"));
        for (max_tokens, choices) in [(CONTEXT - 10, 2), (150, 1), (9, 1)] {
            let prompt = vec![2, 4, 6, u32::try_from(index).unwrap() % vocab];
            let request = Request {
                seed: index as u64 * 31 + max_tokens as u64,
                grammar: Some(grammar.clone()),
                choices,
                ..Request::new(prompt, max_tokens, sampling.clone())
            };
            let all = handle.submit(request).unwrap();
            replies.extend(all.into_iter().map(|reply| (index, max_tokens, reply)));
        }
    }
    while engine.turn() == Turn::Worked {}
    engine.assert_consistent();
    let read = |(form, max_tokens, mut reply): (usize, usize, fornax_engine::Reply)| {
        let events: Vec<Event> = std::iter::from_fn(|| reply.recv()).collect();
        let mut chosen = Vec::new();
        for event in &events {
            if let Event::Token { token, .. } = event {
                assert!(!CONTROL_TOKENS.contains(token), "a control token was chosen");
                chosen.push(*token);
            }
        }
        assert!(chosen.len() <= max_tokens);
        let Some(Event::End { reason, .. }) = events.last() else { panic!("{:?}: {events:?}", forms[form]) };
        let bytes = chosen.iter().flat_map(|&token| tokens.bytes[token as usize].clone()).collect();
        Answer { form, bytes, reason: *reason }
    };
    let answers: Vec<Answer> = replies.into_iter().map(read).collect();
    assert!(handle.stats().pages.iter().all(|pages| pages.referenced == 0));
    answers
}

impl Answer {
    /// Whether it claims to have its form.
    pub(crate) fn finished(&self) -> bool {
        match self.reason {
            EndReason::EndToken | EndReason::FormComplete => true,
            EndReason::FormTruncated => false,
            other => panic!("a form cannot end by {other:?}"),
        }
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.bytes).unwrap_or_else(|_| panic!("not UTF-8: {:?}", self.bytes))
    }
}
