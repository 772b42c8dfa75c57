//! The `tokenizers` crate's pipeline (normalise, pre-tokenise, model) for `tokenizer.json` and for WordPiece.
//!
//! Its own search for added tokens cannot tell a template's text from a user's. So that step is ours, and the rest
//! of the pipeline runs on what lies between, with offsets intact: a step that treats the start of the input
//! differently still sees where that start is.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use tokenizers::tokenizer::normalizer::Range as NormalizedRange;
use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
    Token, Tokenizer,
};

use crate::special::{Trust, Whole, WholeTokens};
use crate::spm::Spaces;
use crate::vocab::{Kind, Spelling, looks_reserved};
use crate::{Error, tokenizer_json};

/// A tokenizer of the `tokenizers` crate with trust-aware search for whole tokens.
#[derive(Debug)]
pub(crate) struct Pipeline {
    tokenizer: Tokenizer,
    /// Sought in the text as given.
    raw: WholeTokens,
    /// Sought after normalisation.
    normalized: WholeTokens,
    /// Which tokens only templates may spell, by id: a model of pieces could find them in any text.
    reserved: Vec<bool>,
}

/// What a `tokenizer.json` says about its tokens and the ends of a text.
#[derive(Debug)]
pub(crate) struct Description {
    /// Bytes and kind of each token, by id.
    pub(crate) tokens: Vec<(Vec<u8>, Kind)>,
    /// Whether decoding takes one space from the start.
    pub(crate) strips_space: bool,
    /// Tokens that the post-processor puts before a text.
    pub(crate) prefix: Vec<u32>,
    /// Tokens that the post-processor puts after a text.
    pub(crate) suffix: Vec<u32>,
    /// Tokens that it puts before a second text, behind those after the first.
    pub(crate) second: Vec<u32>,
}

impl Pipeline {
    /// Reads a `tokenizer.json`.
    pub(crate) fn open(path: &Path) -> Result<(Pipeline, Description), Error> {
        let wrong = |reason: String| Error::TokenizerJson { path: path.to_owned(), reason };
        let bytes = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
        tokenizer_json::check(&bytes).map_err(wrong)?;
        unpanicked(|| Pipeline::read(&bytes)).unwrap_or_else(Err).map_err(wrong)
    }

    fn read(bytes: &[u8]) -> Result<(Pipeline, Description), String> {
        let wrong = |e: tokenizers::Error| e.to_string();
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(wrong)?;
        // Lengths are the caller's business; a prompt is never cut or filled here.
        tokenizer.with_truncation(None).map_err(wrong)?;
        tokenizer.with_padding(None);
        let decoder = serde_json::to_value(tokenizer.get_decoder()).map_err(|e| e.to_string())?;
        let spelling = Decoding::of(&decoder)?;
        let ends = |text: &str, special| {
            let encoding = tokenizer.encode_fast(text, special).map_err(wrong)?;
            Ok::<_, String>(encoding.get_ids().to_vec())
        };
        let (bare, dressed) = (ends("a", false)?, ends("a", true)?);
        let start = dressed.windows(bare.len().max(1)).position(|window| window == bare).unwrap_or(0);
        let suffix = dressed[start + bare.len()..].to_vec();
        // A post-processor without a form for two texts fails, or puts nothing between them.
        let pair =
            tokenizer.encode_fast(("a", "a"), true).map(|pair| pair.get_ids().to_vec()).unwrap_or_default();
        let behind = [&dressed[..start], &bare[..], &suffix[..]].concat();
        let end = [&bare[..], &suffix[..]].concat();
        let second = pair.strip_prefix(&behind[..]).and_then(|rest| rest.strip_suffix(&end[..]));
        let description = Description {
            tokens: describe(&tokenizer, spelling),
            strips_space: spelling.strips_space,
            prefix: dressed[..start].to_vec(),
            second: second.unwrap_or_default().to_vec(),
            suffix,
        };
        let pipeline = Pipeline::new(tokenizer, &description.tokens);
        Ok((pipeline, description))
    }

    /// WordPiece as GGUF stores it: word starts carry `▁`, continuations nothing.
    pub(crate) fn word_piece(
        tokens: &[String],
        kinds: &[Kind],
        unknown: &str,
        lowercase: bool,
        strip_accents: Option<bool>,
    ) -> Result<Pipeline, Error> {
        let spell = |(id, (token, &kind)): (u32, (&String, &Kind))| {
            let text = match (kind, token.strip_prefix('▁')) {
                (Kind::Normal, Some(start)) => start.to_owned(),
                (Kind::Normal, None) => format!("##{token}"),
                _ => token.clone(),
            };
            (text, Value::from(id))
        };
        let vocab: serde_json::Map<String, Value> = (0..).zip(tokens.iter().zip(kinds)).map(spell).collect();
        let description = json!({
            "model": {
                "type": "WordPiece",
                "unk_token": unknown,
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": vocab,
            },
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": true,
                "handle_chinese_chars": true,
                "strip_accents": strip_accents,
                "lowercase": lowercase,
            },
            "pre_tokenizer": { "type": "BertPreTokenizer" },
        });
        let tokenizer: Tokenizer =
            serde_json::from_value(description).map_err(|e| Error::Encode { reason: e.to_string() })?;
        let described: Vec<_> =
            tokens.iter().zip(kinds).map(|(token, &kind)| (token.as_bytes().to_vec(), kind)).collect();
        Ok(Pipeline::new(tokenizer, &described))
    }

    /// Unigram pieces as GGUF stores them, with the map of characters that texts go through first.
    pub(crate) fn unigram(
        tokens: &[String],
        kinds: &[Kind],
        scores: &[f32],
        unknown: u32,
        charsmap: &[u8],
        spaces: Spaces,
    ) -> Result<Pipeline, Error> {
        let wrong = |reason: String| Error::Encode { reason };
        let vocab: Vec<Value> =
            tokens.iter().zip(scores).map(|(token, score)| json!([token, f64::from(*score)])).collect();
        let normalizer = match charsmap {
            [] => Value::Null,
            map => json!({"type": "Precompiled", "precompiled_charsmap": BASE64_STANDARD.encode(map)}),
        };
        let scheme = if spaces.add_prefix { "always" } else { "never" };
        let metaspace =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
        let words = json!({"type": "WhitespaceSplit"});
        let steps = if spaces.remove_extra { vec![words, metaspace] } else { vec![metaspace] };
        let description = json!({
            "model": { "type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": false },
            "normalizer": normalizer,
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": steps },
        });
        tokenizer_json::check(description.to_string().as_bytes()).map_err(wrong)?;
        let read = || serde_json::from_value::<Tokenizer>(description).map_err(|e| e.to_string());
        let tokenizer = unpanicked(read).unwrap_or_else(Err).map_err(wrong)?;
        let described: Vec<_> =
            tokens.iter().zip(kinds).map(|(token, &kind)| (token.as_bytes().to_vec(), kind)).collect();
        Ok(Pipeline::new(tokenizer, &described))
    }

    fn new(tokenizer: Tokenizer, tokens: &[(Vec<u8>, Kind)]) -> Pipeline {
        let added = tokenizer.get_added_tokens_decoder();
        let mut raw = Vec::new();
        let mut normalized = Vec::new();
        for (id, (bytes, kind)) in (0..).zip(tokens) {
            let mut whole = Whole::new(id, kind.is_reserved());
            match added.get(&id) {
                Some(token) => {
                    whole.strip_before = token.lstrip;
                    whole.strip_after = token.rstrip;
                    whole.single_word = token.single_word;
                    // Reserved tokens are sought as written, so that trust is always about the text as given.
                    if token.normalized && !whole.reserved {
                        let mut text = NormalizedString::from(token.content.as_str());
                        // A normaliser that fails on its own token leaves it as written.
                        if let Some(normalizer) = tokenizer.get_normalizer() {
                            normalizer.normalize(&mut text).ok();
                        }
                        normalized.push((text.get().as_bytes().to_vec(), whole));
                    } else {
                        raw.push((token.content.as_bytes().to_vec(), whole));
                    }
                }
                None if kind.is_reserved() => raw.push((bytes.clone(), whole)),
                None => {}
            }
        }
        let trie = |tokens: Vec<(Vec<u8>, Whole)>| {
            WholeTokens::new(tokens.iter().map(|(bytes, whole)| (bytes.as_slice(), whole.clone())))
        };
        let reserved = tokens.iter().map(|(_, kind)| kind.is_reserved()).collect();
        Pipeline { tokenizer, raw: trie(raw), normalized: trie(normalized), reserved }
    }

    /// The same with other kinds of tokens: only the configuration files around it name all end tokens, and what is
    /// reserved must be so before any text is searched.
    pub(crate) fn with_kinds(self, tokens: &[(Vec<u8>, Kind)]) -> Pipeline {
        Pipeline::new(self.tokenizer, tokens)
    }

    /// Appends the tokens of `text`.
    pub(crate) fn encode(&self, text: &str, trust: Trust<'_>, out: &mut Vec<u32>) -> Result<(), Error> {
        unpanicked(|| self.run(text, trust, out).map_err(|e| e.to_string()))
            .unwrap_or_else(Err)
            .map_err(|reason| Error::Encode { reason })
    }

    /// The words that a text is cut into before any of them is merged.
    pub(crate) fn words<'t>(&self, text: &'t str) -> Result<Vec<&'t str>, Error> {
        let cut = || -> tokenizers::Result<Vec<&'t str>> {
            let mut pieces = PreTokenizedString::from(text);
            if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut pieces)?;
            }
            let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
            Ok(splits.into_iter().filter_map(|(_, range, _)| text.get(range.0..range.1)).collect())
        };
        unpanicked(|| cut().map_err(|error| error.to_string()))
            .unwrap_or_else(Err)
            .map_err(|reason| Error::Encode { reason })
    }

    fn run(&self, text: &str, trust: Trust<'_>, out: &mut Vec<u32>) -> tokenizers::Result<()> {
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, piece| Ok(cut(&self.raw, &piece, |range| trust.covers(range))))?;
        pieces.split(|_, mut piece| {
            if let Some(normalizer) = self.tokenizer.get_normalizer() {
                normalizer.normalize(&mut piece)?;
            }
            Ok(cut(&self.normalized, &piece, |_| false))
        })?;
        if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.tokens(piece.get()))?;
        for (_, _, tokens) in pieces.get_splits(OffsetReferential::Original, OffsetType::None) {
            out.extend(tokens.iter().flatten().map(|token| token.id));
        }
        Ok(())
    }
}

impl Pipeline {
    /// The tokens of a piece of text. Where the model finds what only templates may spell, the piece is cut behind the first
    /// character of it, as often as it takes.
    fn tokens(&self, piece: &str) -> tokenizers::Result<Vec<Token>> {
        let model = self.tokenizer.get_model();
        let mut out = Vec::new();
        let mut waiting = vec![(0, piece.len())];
        while let Some((from, to)) = waiting.pop() {
            let tokens = model.tokenize(&piece[from..to])?;
            let mut cuts = vec![from];
            for Token { id, value, offsets } in &tokens {
                // What nobody knows has a reserved token, too, which it does not spell.
                let spelled = || piece.get(from + offsets.0..from + offsets.1) == Some(value.as_str());
                let first = value.chars().next().map_or(0, char::len_utf8);
                if self.reserved.get(*id as usize) == Some(&true) && first < value.len() && spelled() {
                    cuts.push(from + offsets.0 + first);
                }
            }
            if let [_] = cuts[..] {
                let moved = |mut token: Token| {
                    token.offsets = (token.offsets.0 + from, token.offsets.1 + from);
                    token
                };
                out.extend(tokens.into_iter().map(moved));
                continue;
            }
            cuts.push(to);
            waiting.extend(cuts.windows(2).rev().map(|ends| (ends[0], ends[1])));
        }
        Ok(out)
    }
}

/// Calls into the crate, which panics where a file contradicts itself in ways that nobody looked for.
fn unpanicked<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    // What the call had begun is dropped with it: a caller gets the whole result or none of it.
    catch_unwind(AssertUnwindSafe(call))
        .map_err(|_| "the tokenizer contradicts itself (it panicked)".to_owned())
}

/// Cuts `piece` at the whole tokens in it.
fn cut(
    tokens: &WholeTokens,
    piece: &NormalizedString,
    trusted: impl Fn(&std::ops::Range<usize>) -> bool,
) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    if tokens.is_empty() {
        return vec![(piece.clone(), None)];
    }
    let stretches = tokens.cut(piece.get(), trusted).into_iter();
    stretches
        .filter_map(|stretch| {
            let slice = piece.slice(NormalizedRange::Normalized(stretch.range.clone()))?;
            let len = stretch.range.len();
            let token = stretch.token.map(|id| vec![Token::new(id, slice.get().to_owned(), (0, len))]);
            Some((slice, token))
        })
        .collect()
}

/// How a `tokenizer.json` turns tokens back into text.
#[derive(Clone, Copy)]
struct Decoding {
    spelling: Spelling,
    byte_fallback: bool,
    strips_space: bool,
}

impl Decoding {
    fn of(decoder: &Value) -> Result<Decoding, String> {
        let mut decoding = Decoding { spelling: Spelling::Plain, byte_fallback: false, strips_space: false };
        let parts = match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"].as_array().map_or(&[][..], Vec::as_slice),
            Some(_) => std::slice::from_ref(decoder),
            None => &[],
        };
        for part in parts {
            match part["type"].as_str().unwrap_or_default() {
                "ByteLevel" => decoding.spelling = Spelling::ByteLevel,
                "Metaspace" => {
                    decoding.spelling = Spelling::Metaspace;
                    decoding.strips_space = part["prepend_scheme"] != "never";
                }
                "Replace" => decoding.spelling = Spelling::Metaspace,
                "ByteFallback" => decoding.byte_fallback = true,
                "Strip" => decoding.strips_space = part["start"].as_u64() > Some(0),
                "WordPiece" => (decoding.spelling, decoding.strips_space) = (Spelling::WordPiece, true),
                "Fuse" => {}
                other => return Err(format!("unsupported decoder '{other}'")),
            }
        }
        Ok(decoding)
    }
}

/// Bytes and kind of every id up to the largest; ids between that no token has are unused.
fn describe(tokenizer: &Tokenizer, decoding: Decoding) -> Vec<(Vec<u8>, Kind)> {
    let vocab = tokenizer.get_vocab(true);
    let added = tokenizer.get_added_tokens_decoder();
    let len = vocab.values().max().map_or(0, |&id| id as usize + 1);
    let mut tokens = vec![(Vec::new(), Kind::Unused); len];
    for (text, id) in vocab {
        let kind = match added.get(&id) {
            Some(token) if token.special || looks_reserved(&text) => Kind::Control,
            Some(_) => Kind::UserDefined,
            None if decoding.byte_fallback && crate::vocab::hex_byte(&text).is_some() => Kind::Byte,
            None => Kind::Normal,
        };
        // Here, unlike in GGUF, user-defined tokens are spelled like all others.
        let spelled_as = if kind == Kind::UserDefined { Kind::Normal } else { kind };
        tokens[id as usize] = (decoding.spelling.bytes(&text, spelled_as), kind);
    }
    tokens
}
