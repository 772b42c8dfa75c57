//! Byte pair encoding by ranked merges, as GGUF stores it for the `gpt2` and `gemma4` families.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use crate::Error;
use crate::pretokenizer::{Family, PreTokenizer};
use crate::vocab::{Kind, byte_char};

/// Marks an absent symbol or link.
const NONE: u32 = u32::MAX;

/// The merges of one vocabulary, ready to encode text that holds no whole tokens.
#[derive(Debug)]
pub(crate) struct Bpe {
    pre: PreTokenizer,
    /// Which neighbours join, how early, and into what.
    merges: HashMap<(u32, u32), Merge>,
    /// Symbols that words start from.
    alphabet: Alphabet,
    /// Words that are tokens by themselves, where the family looks there first.
    words: Option<HashMap<Box<[u8]>, u32>>,
    /// Text is composed before it is cut.
    composes: bool,
}

#[derive(Clone, Copy, Debug)]
struct Merge {
    rank: u32,
    id: u32,
}

#[derive(Debug)]
enum Alphabet {
    /// One symbol per byte. A vocabulary may lack bytes that its training text never had; such a byte gives no
    /// token, as in the reference implementation.
    Bytes(Box<[u32; 256]>),
    /// One symbol per character, and `▁` for space; what has no symbol is spelled in byte tokens.
    Characters { symbols: HashMap<char, u32>, bytes: Box<[u32; 256]> },
}

/// A symbol of a word while it is merged: a linked list in an array.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    before: u32,
    after: u32,
}

impl Bpe {
    /// `tokens` are the vocabulary's strings with their kinds, by id; `merges` are pairs `left right` by rank.
    pub(crate) fn new(
        family: &Family,
        tokens: &[String],
        kinds: &[Kind],
        merges: &[String],
    ) -> Result<Bpe, Error> {
        let ids: HashMap<&str, u32> = (0..).zip(tokens).map(|(id, token)| (token.as_str(), id)).collect();
        let byte_ids = |spell: &dyn Fn(u8) -> String| {
            let mut table = Box::new([NONE; 256]);
            for byte in 0..=255 {
                table[usize::from(byte)] = ids.get(spell(byte).as_str()).copied().unwrap_or(NONE);
            }
            table
        };
        let alphabet = if family.metaspace {
            let single = |(&text, &id): (&&str, &u32)| {
                let mut chars = text.chars();
                let first = chars.next()?;
                (chars.next().is_none() && is_text(kinds, id)).then_some((first, id))
            };
            Alphabet::Characters {
                symbols: ids.iter().filter_map(single).collect(),
                bytes: byte_ids(&|byte| format!("<0x{byte:02X}>")),
            }
        } else {
            Alphabet::Bytes(byte_ids(&|byte| byte_char(byte).to_string()))
        };
        let mut table = HashMap::with_capacity(merges.len());
        for (rank, (index, merge)) in (0..).zip(merges.iter().enumerate()) {
            let bad = || Error::Merge { index, merge: merge.clone() };
            // The left part may itself begin with a space, so the separator is sought after the first character.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let space = first + merge[first..].find(' ').ok_or_else(bad)?;
            let (left, right) = (&merge[..space], &merge[space + 1..]);
            let id = |part: &str| ids.get(part).copied().ok_or_else(bad);
            let (left, right, whole) = (id(left)?, id(right)?, id(&[left, right].concat())?);
            // Text can never become a control token, whatever a file's merges say.
            if !kinds[whole as usize].is_reserved() {
                table.entry((left, right)).or_insert(Merge { rank, id: whole });
            }
        }
        let words = family.words_first.then(|| {
            let is_word = |(id, _): &(u32, &String)| is_text(kinds, *id);
            let spell = |(id, token): (u32, &String)| {
                (crate::vocab::Spelling::ByteLevel.bytes(token, Kind::Normal).into(), id)
            };
            (0..).zip(tokens).filter(is_word).map(spell).collect()
        });
        Ok(Bpe { pre: PreTokenizer::new(family)?, merges: table, alphabet, words, composes: family.composes })
    }

    /// Appends the tokens of `text`.
    pub(crate) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let mut text = Cow::Borrowed(text);
        if self.composes && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            text = text.nfc().collect();
        }
        if let Alphabet::Characters { .. } = self.alphabet {
            text = text.replace(' ', "▁").into();
        }
        // Words repeat: in a long text most are looked up, not merged. The memory lives as long as the call.
        let mut seen: HashMap<&str, std::ops::Range<usize>> = HashMap::new();
        for word in self.pre.words(&text) {
            if let Some(range) = seen.get(word) {
                out.extend_from_within(range.clone());
                continue;
            }
            let start = out.len();
            match self.words.as_ref().and_then(|words| words.get(word.as_bytes())) {
                Some(&id) => out.push(id),
                None => self.merge(self.symbols(word), out),
            }
            seen.insert(word, start..out.len());
        }
    }

    fn symbols(&self, word: &str) -> Vec<u32> {
        let mut symbols = Vec::with_capacity(word.len());
        let spell = |bytes: &[u8], table: &[u32; 256], symbols: &mut Vec<u32>| {
            symbols.extend(bytes.iter().map(|&byte| table[usize::from(byte)]).filter(|&id| id != NONE));
        };
        match &self.alphabet {
            Alphabet::Bytes(table) => spell(word.as_bytes(), table, &mut symbols),
            Alphabet::Characters { symbols: known, bytes } => {
                for (at, c) in word.char_indices() {
                    match known.get(&c) {
                        Some(&id) => symbols.push(id),
                        None => spell(&word.as_bytes()[at..at + c.len_utf8()], bytes, &mut symbols),
                    }
                }
            }
        }
        symbols
    }

    /// Joins neighbours, always the pair of lowest rank and of those the leftmost, until none is left to join.
    /// A heap keeps a word of any length near linear.
    fn merge(&self, symbols: Vec<u32>, out: &mut Vec<u32>) {
        let count = u32::try_from(symbols.len()).unwrap_or(NONE);
        let mut list: Vec<Symbol> = (0..count)
            .zip(symbols)
            .map(|(at, id)| Symbol { id, before: at.wrapping_sub(1), after: at + 1 })
            .collect();
        if let Some(last) = list.last_mut() {
            last.after = NONE;
        }
        let mut heap = BinaryHeap::new();
        let consider = |list: &[Symbol], at: u32, heap: &mut BinaryHeap<_>| {
            let Some(left) = list.get(at as usize) else { return };
            let Some(right) = list.get(left.after as usize) else { return };
            if let Some(merge) = self.merges.get(&(left.id, right.id)) {
                heap.push(Reverse((merge.rank, at, left.id, right.id)));
            }
        };
        (0..count).for_each(|at| consider(&list, at, &mut heap));
        while let Some(Reverse((_, at, left_id, right_id))) = heap.pop() {
            let left = list[at as usize];
            // Stale when either side has been merged since: an absorbed symbol's id is NONE.
            if left.id != left_id || list.get(left.after as usize).is_none_or(|right| right.id != right_id) {
                continue;
            }
            let after = list[left.after as usize].after;
            list[left.after as usize].id = NONE;
            list[at as usize] =
                Symbol { id: self.merges[&(left_id, right_id)].id, before: left.before, after };
            if let Some(next) = list.get_mut(after as usize) {
                next.before = at;
            }
            consider(&list, left.before, &mut heap);
            consider(&list, at, &mut heap);
        }
        out.extend(list.iter().map(|symbol| symbol.id).filter(|&id| id != NONE));
    }
}

fn is_text(kinds: &[Kind], id: u32) -> bool {
    matches!(kinds[id as usize], Kind::Normal | Kind::UserDefined)
}
