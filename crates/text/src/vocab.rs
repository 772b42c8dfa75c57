//! The tokens of a model: their exact bytes and what each is for.

use crate::Error;

/// What a token is for; the numbers are GGUF's `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A piece of text.
    Normal,
    /// Stands for what the vocabulary cannot spell.
    Unknown,
    /// Structure (turns, ends, padding): comes from templates, never from text.
    Control,
    /// A piece of text that is always kept whole.
    UserDefined,
    /// A row without a meaning.
    Unused,
    /// One byte, for what no piece spells.
    Byte,
}

impl Kind {
    pub(crate) fn from_gguf(id: i32) -> Kind {
        match id {
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => Kind::Normal,
        }
    }

    /// Whether this token may only come from trusted text.
    pub(crate) fn is_reserved(self) -> bool {
        matches!(self, Kind::Control | Kind::Unknown)
    }
}

/// How a vocabulary spells bytes in its token strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// Each byte is one printable character (GPT-2's table).
    ByteLevel,
    /// `▁` is a space, `<0x0A>` a byte.
    Metaspace,
    /// `##` continues a word; other pieces start one.
    WordPiece,
    /// As it stands.
    Plain,
}

impl Spelling {
    /// The bytes that a token of this kind, written `text`, stands for.
    pub(crate) fn bytes(self, text: &str, kind: Kind) -> Vec<u8> {
        match (self, kind) {
            (_, Kind::Control | Kind::Unknown | Kind::UserDefined) => text.as_bytes().to_vec(),
            (_, Kind::Byte) => match hex_byte(text) {
                Some(byte) => vec![byte],
                None => text.as_bytes().to_vec(),
            },
            // A token outside the table is stored as it stands: an added token that lost its type.
            (Spelling::ByteLevel, _) => {
                text.chars().map(char_byte).collect::<Option<_>>().unwrap_or_else(|| text.as_bytes().to_vec())
            }
            (Spelling::Metaspace, _) => text.replace('▁', " ").into_bytes(),
            (Spelling::WordPiece, _) => match text.strip_prefix("##") {
                Some(rest) => rest.as_bytes().to_vec(),
                None => [b" ", text.as_bytes()].concat(),
            },
            (Spelling::Plain, _) => text.as_bytes().to_vec(),
        }
    }
}

/// The byte that a byte-fallback token such as `<0x0A>` names.
pub(crate) fn hex_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// Whether a user-defined token is a marker all the same: some models declare theirs as ordinary added tokens, and
/// only the shape gives them away.
pub(crate) fn looks_reserved(text: &str) -> bool {
    let wrapped = |open, close| text.starts_with(open) && text.ends_with(close);
    wrapped("<|", "|>")
        || wrapped("<｜", "｜>")
        || wrapped("<unused", ">")
        || matches!(text, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
}

/// The printable character that stands for a byte: Latin-1 where it prints, otherwise the next from U+0100 on.
pub(crate) fn byte_char(byte: u8) -> char {
    let shifted = match byte {
        0x00..=0x20 => u32::from(byte),
        0x7f..=0xa0 => u32::from(byte) - 0x7f + 0x21,
        0xad => 0x43,
        _ => return char::from(byte),
    };
    char::from_u32(0x100 + shifted).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that a printable character stands for.
fn char_byte(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Bytes and kind of every token, by id.
#[derive(Debug)]
pub(crate) struct Vocab {
    kinds: Vec<Kind>,
    bytes: Vec<u8>,
    /// Where each token's bytes end; they start where the token before it ends.
    ends: Vec<u32>,
}

impl Vocab {
    pub(crate) fn new(tokens: impl ExactSizeIterator<Item = (Vec<u8>, Kind)>) -> Result<Vocab, Error> {
        let count = tokens.len();
        let too_large = || Error::VocabularyTooLarge { tokens: count };
        u32::try_from(count).map_err(|_| too_large())?;
        let mut vocab =
            Vocab { kinds: Vec::with_capacity(count), bytes: Vec::new(), ends: Vec::with_capacity(count) };
        for (bytes, kind) in tokens {
            vocab.kinds.push(kind);
            vocab.bytes.extend_from_slice(&bytes);
            vocab.ends.push(u32::try_from(vocab.bytes.len()).map_err(|_| too_large())?);
        }
        Ok(vocab)
    }

    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Empty for an id beyond the vocabulary: embedding tables may have more rows than there are tokens.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start as usize..end as usize]
    }

    pub(crate) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Unused)
    }

    pub(crate) fn ids(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.kinds.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_printable_character_and_comes_back() {
        let chars: Vec<char> = (0..=255).map(byte_char).collect();
        for (byte, &c) in (0..=255).zip(&chars) {
            assert!(!c.is_whitespace() && !c.is_control(), "{byte:#x} is written {c:?}");
            assert_eq!(char_byte(c), Some(byte));
        }
        // Known points of the published table: space, newline, delete, no-break space, soft hyphen.
        let known = [(0x20, 'Ġ'), (0x0a, 'Ċ'), (0x7f, 'ġ'), (0xa0, 'ł'), (0xad, 'Ń'), (0xe9, 'é')];
        assert!(known.iter().all(|&(byte, c)| byte_char(byte) == c));
    }

    #[test]
    fn tokens_spell_their_exact_bytes() {
        let check = |spelling: Spelling, text: &str, kind, want: &[u8]| {
            assert_eq!(spelling.bytes(text, kind), want, "{spelling:?} {text:?} {kind:?}");
        };
        check(Spelling::ByteLevel, "Ġthe", Kind::Normal, b" the");
        check(Spelling::ByteLevel, "æĿ", Kind::Normal, &[0xe6, 0x9d]);
        check(Spelling::ByteLevel, "<|im_end|>", Kind::Control, b"<|im_end|>");
        check(Spelling::ByteLevel, "  ", Kind::UserDefined, b"  ");
        check(Spelling::Metaspace, "▁the", Kind::Normal, b" the");
        check(Spelling::Metaspace, "<0xE6>", Kind::Byte, &[0xe6]);
        check(Spelling::Metaspace, "<0xE6>", Kind::Normal, b"<0xE6>");
        check(Spelling::WordPiece, "##ing", Kind::Normal, b"ing");
        check(Spelling::WordPiece, "walk", Kind::Normal, b" walk");
    }
}
