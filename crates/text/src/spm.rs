//! SentencePiece-style byte pair encoding: the pair whose join has the highest score is joined first.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use crate::vocab::{Kind, hex_byte};

const NONE: u32 = u32::MAX;

/// How a model prepares text before it is cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spaces {
    /// A space is put before a text that starts the input or follows a whole token.
    pub(crate) add_prefix: bool,
    /// Runs of spaces become one, and those at the ends go.
    pub(crate) remove_extra: bool,
}

/// Scored pieces, ready to encode text that holds no whole tokens.
#[derive(Debug)]
pub(crate) struct Spm {
    spaces: Spaces,
    /// Pieces that text may become; control and byte tokens are not among them.
    pieces: HashMap<Box<str>, Piece>,
    /// For characters that are no piece.
    bytes: Box<[u32; 256]>,
    /// For bytes that are no token.
    unknown: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    id: u32,
    score: f32,
}

/// A stretch of the text while it is merged: a linked list in an array, as indices.
struct Symbol {
    start: usize,
    /// Zero once it is absorbed by its neighbour.
    len: usize,
    before: u32,
    after: u32,
}

/// Two neighbours that may join.
struct Pair {
    score: f32,
    left: u32,
    right: u32,
    len: usize,
}

impl Ord for Pair {
    /// The highest score first; among equals the leftmost.
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pair {}

impl Spm {
    /// `tokens`, `kinds` and `scores` are by id and of the same length.
    pub(crate) fn new(
        spaces: Spaces,
        tokens: &[String],
        kinds: &[Kind],
        scores: &[f32],
        unknown: Option<u32>,
    ) -> Spm {
        let mut pieces = HashMap::with_capacity(tokens.len());
        let mut bytes = Box::new([NONE; 256]);
        for (id, ((token, &kind), &score)) in (0..).zip(tokens.iter().zip(kinds).zip(scores)) {
            match kind {
                Kind::Normal | Kind::UserDefined => {
                    pieces.entry(token.as_str().into()).or_insert(Piece { id, score });
                }
                Kind::Byte => {
                    if let Some(byte) = hex_byte(token) {
                        bytes[usize::from(byte)] = id;
                    }
                }
                Kind::Control | Kind::Unknown | Kind::Unused => {}
            }
        }
        Spm { spaces, pieces, bytes, unknown }
    }

    /// Appends the tokens of `text`, which starts the input or follows a whole token.
    pub(crate) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let mut escaped = String::with_capacity(text.len() + 3);
        if self.spaces.add_prefix {
            escaped.push('▁');
        }
        if self.spaces.remove_extra {
            let words = text.split(' ').filter(|word| !word.is_empty());
            escaped.extend(words.enumerate().flat_map(|(at, word)| [if at == 0 { "" } else { "▁" }, word]));
        } else {
            escaped.extend(text.chars().map(|c| if c == ' ' { '▁' } else { c }));
        }
        for symbol in self.merge(&escaped) {
            let text = &escaped[symbol.start..symbol.start + symbol.len];
            match self.pieces.get(text) {
                Some(piece) => out.push(piece.id),
                None => {
                    let spelled = text.bytes().map(|byte| self.bytes[usize::from(byte)]);
                    out.extend(spelled.filter_map(|id| if id == NONE { self.unknown } else { Some(id) }));
                }
            }
        }
    }

    /// What is left of the characters of `text` after all joins, in order.
    fn merge(&self, text: &str) -> impl Iterator<Item = Symbol> {
        let mut list: Vec<Symbol> = (0..)
            .zip(text.char_indices())
            .map(|(at, (start, c)): (u32, _)| Symbol {
                start,
                len: c.len_utf8(),
                before: at.wrapping_sub(1),
                after: at + 1,
            })
            .collect();
        if let Some(last) = list.last_mut() {
            last.after = NONE;
        }
        let mut heap = BinaryHeap::new();
        let consider = |list: &[Symbol], left: u32, heap: &mut BinaryHeap<Pair>| {
            let Some(first) = list.get(left as usize) else { return };
            let Some(second) = list.get(first.after as usize) else { return };
            let len = first.len + second.len;
            if let Some(piece) = self.pieces.get(&text[first.start..first.start + len]) {
                heap.push(Pair { score: piece.score, left, right: first.after, len });
            }
        };
        (0..).zip(&list).for_each(|(at, _)| consider(&list, at, &mut heap));
        while let Some(Pair { left, right, len, .. }) = heap.pop() {
            let (first, second) = (&list[left as usize], &list[right as usize]);
            // Stale when either side has been joined since.
            if first.len == 0 || second.len == 0 || first.len + second.len != len {
                continue;
            }
            let (before, after) = (first.before, second.after);
            list[right as usize].len = 0;
            list[left as usize].len = len;
            list[left as usize].after = after;
            if let Some(next) = list.get_mut(after as usize) {
                next.before = left;
            }
            consider(&list, before, &mut heap);
            consider(&list, left, &mut heap);
        }
        list.into_iter().filter(|symbol| symbol.len > 0)
    }
}
