//! Text to tokens and back.

use std::path::Path;

use fornax_format::{Array, Checkpoint, HuggingFace, Metadata, Value as FormatValue};
use serde_json::Value;

use crate::bpe::Bpe;
use crate::pipeline::Pipeline;
use crate::pretokenizer::Family;
use crate::special::{Trust, Whole, WholeTokens};
use crate::spm::{Spaces, Spm};
use crate::vocab::{Kind, Spelling, Vocab, looks_reserved};
use crate::{ChatPrompt, Detokenizer, Error};

/// What control tokens written out in a text mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// Nothing: `<|im_end|>` is ten characters. For everything that a user wrote.
    AsText,
    /// Themselves. For text that a template or an operator wrote.
    Parse,
}

/// A model's tokenizer: its vocabulary, how text is cut into it, and which tokens begin and end a text.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    model: Model,
    /// Control and user-defined tokens, matched before the model sees the text.
    wholes: WholeTokens,
    /// One space is taken from the start of a decoded text, because encoding put it there.
    strips_space: bool,
    named: Named,
    /// What goes before and after a prompt.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    /// What goes before a second text, behind the first one's suffix.
    second: Vec<u32>,
    /// Ascending.
    end_tokens: Vec<u32>,
}

#[derive(Debug)]
enum Model {
    Bpe(Bpe),
    Spm(Spm),
    Pipeline(Box<Pipeline>),
}

/// Tokens that a model gives a role, where it has them.
#[derive(Debug, Default)]
struct Named {
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
    padding: Option<u32>,
}

/// Control tokens that end a turn or a text, by the names that models give them. A model's files often list only
/// one of the several that it emits.
const END_TEXTS: [&str; 25] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
];

impl Tokenizer {
    /// The tokenizer of a checkpoint, whichever container it came in.
    pub fn open(checkpoint: &Checkpoint) -> Result<Tokenizer, Error> {
        match checkpoint {
            Checkpoint::Gguf(gguf) => Tokenizer::from_gguf(gguf.metadata()),
            Checkpoint::HuggingFace(directory) => Tokenizer::from_hugging_face(directory),
        }
    }

    /// The tokenizer that GGUF metadata describes.
    pub fn from_gguf(metadata: &Metadata) -> Result<Tokenizer, Error> {
        let family = metadata.str("tokenizer.ggml.model")?;
        let tokens = metadata.strings("tokenizer.ggml.tokens")?;
        let mut kinds = match metadata.opt_i32s("tokenizer.ggml.token_type")? {
            Some(types) => {
                check_length("tokenizer.ggml.token_type", tokens.len(), types.len())?;
                types.iter().take(tokens.len()).map(|&kind| Kind::from_gguf(kind)).collect()
            }
            None => vec![Kind::Normal; tokens.len()],
        };
        let id = |key: &str, default: Option<u32>| match metadata.opt_u32(key)? {
            Some(id) => known_id(key, u64::from(id), tokens.len()).map(Some),
            None => Ok(default.filter(|&id| (id as usize) < tokens.len())),
        };
        let is_spm = family == "llama";
        let mut named = Named {
            bos: id("tokenizer.ggml.bos_token_id", is_spm.then_some(1))?,
            eos: id("tokenizer.ggml.eos_token_id", is_spm.then_some(2))?,
            unknown: id("tokenizer.ggml.unknown_token_id", is_spm.then_some(0))?,
            padding: id("tokenizer.ggml.padding_token_id", None)?,
        };
        let mut ends: Vec<u32> = named.eos.into_iter().collect();
        for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            ends.extend(id(key, None)?);
        }
        // What is typed as text users may write, so markers are taken out of it. Among ordinary words a name proves
        // nothing: `</s>` is one to some vocabularies.
        for (token, kind) in tokens.iter().zip(&mut kinds) {
            if *kind == Kind::UserDefined && looks_reserved(token) {
                *kind = Kind::Control;
            }
        }
        for &id in ends.iter().chain(&named.bos) {
            kinds[id as usize] = Kind::Control;
        }
        let mut adds_bos = is_spm;
        let mut spelling = Spelling::Metaspace;
        let mut strips_space = false;
        let mut suffix = Vec::new();
        let model = match family {
            "gpt2" | "gemma4" => {
                let pre = if family == "gemma4" { "gemma4" } else { metadata.str("tokenizer.ggml.pre")? };
                let family =
                    Family::named(pre).ok_or_else(|| Error::UnknownPreTokenizer { name: pre.to_owned() })?;
                adds_bos = family.adds_bos;
                if !family.metaspace {
                    spelling = Spelling::ByteLevel;
                }
                let merges = metadata.strings("tokenizer.ggml.merges")?;
                Model::Bpe(Bpe::new(&family, tokens, &kinds, merges)?)
            }
            "llama" => {
                let scores = metadata.f32s("tokenizer.ggml.scores")?;
                check_length("tokenizer.ggml.scores", tokens.len(), scores.len())?;
                let spaces = Spaces {
                    add_prefix: metadata.opt_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
                    remove_extra: metadata
                        .opt_bool("tokenizer.ggml.remove_extra_whitespaces")?
                        .unwrap_or(false),
                };
                strips_space = spaces.add_prefix;
                Model::Spm(Spm::new(spaces, tokens, &kinds, &scores, named.unknown))
            }
            "bert" => {
                strips_space = true;
                named.bos = id("tokenizer.ggml.cls_token_id", named.bos.or(Some(101)))?;
                adds_bos = true;
                // The key has been written with this spelling from the start; newer files may spell it right.
                let separator = id("tokenizer.ggml.seperator_token_id", Some(102))?;
                suffix.extend(id("tokenizer.ggml.separator_token_id", separator)?);
                named.unknown = named.unknown.or(Some(100).filter(|_| tokens.len() > 100));
                let unknown = named.unknown.map_or("[UNK]", |id| tokens[id as usize].as_str());
                let lowercase = metadata.opt_bool("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(true);
                let strip_accents = metadata.opt_bool("tokenizer.ggml.normalizer.strip_accents")?;
                Model::Pipeline(
                    Pipeline::word_piece(tokens, &kinds, unknown, lowercase, strip_accents)?.into(),
                )
            }
            "t5" => {
                strips_space = true;
                let scores = metadata.f32s("tokenizer.ggml.scores")?;
                check_length("tokenizer.ggml.scores", tokens.len(), scores.len())?;
                let spaces = Spaces {
                    add_prefix: metadata.opt_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
                    remove_extra: metadata
                        .opt_bool("tokenizer.ggml.remove_extra_whitespaces")?
                        .unwrap_or(true),
                };
                let unknown = u64::from(named.unknown.unwrap_or(2));
                let unknown = known_id("tokenizer.ggml.unknown_token_id", unknown, tokens.len())?;
                let charsmap = charsmap(metadata)?;
                Model::Pipeline(
                    Pipeline::unigram(tokens, &kinds, &scores, unknown, &charsmap, spaces)?.into(),
                )
            }
            other => return Err(Error::UnsupportedModel { model: other.to_owned() }),
        };
        let unigram = family == "t5";
        if metadata.opt_bool("tokenizer.ggml.add_eos_token")?.unwrap_or(unigram) {
            suffix.extend(named.eos);
        }
        // RoBERTa and its kin, whichever pieces they have, put two ends between two texts; no key says so.
        let two_ends = family != "bert" && metadata.opt_str("general.architecture")? == Some("bert");
        let second = named.eos.filter(|_| two_ends).into_iter().collect();
        let add_bos = metadata.opt_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
        let prefix = named.bos.filter(|_| add_bos).into_iter().collect();
        // Phi-3's markers swallow the line break that its template writes after them; GGUF has no field for it.
        let swallows = is_spm && metadata.opt_str("general.architecture")? == Some("phi3");
        let vocab = Vocab::new(tokens.iter().zip(&kinds).map(|(t, &kind)| (spelling.bytes(t, kind), kind)))?;
        let wholes = WholeTokens::new(vocab.ids().filter_map(|id| {
            let kind = vocab.kind(id);
            let bytes = vocab.bytes(id);
            let strip_after = swallows && !matches!(bytes, b"<unk>" | b"<s>" | b"<|endoftext|>");
            let whole = Whole { strip_after, ..Whole::new(id, kind.is_reserved()) };
            (kind.is_reserved() || kind == Kind::UserDefined).then_some((bytes, whole))
        }));
        let end_tokens = all_end_tokens(&vocab, ends);
        Ok(Tokenizer { vocab, model, wholes, strips_space, named, prefix, suffix, second, end_tokens })
    }

    /// The tokenizer of a Hugging Face directory (`tokenizer.json` and the configuration files beside it).
    pub fn from_hugging_face(directory: &HuggingFace) -> Result<Tokenizer, Error> {
        let path = directory.tokenizer_json().ok_or(Error::NoTokenizer)?;
        let configs = Configs {
            tokenizer: directory.tokenizer_config(),
            generation: directory.generation_config(),
            model: Some(directory.config()),
        };
        Tokenizer::from_json(path, configs)
    }

    fn from_json(path: &Path, configs: Configs<'_>) -> Result<Tokenizer, Error> {
        let (pipeline, mut description) = Pipeline::open(path)?;
        let len = description.tokens.len();
        let find = |text: &str| {
            let is = |(bytes, kind): &(Vec<u8>, Kind)| *kind != Kind::Unused && bytes == text.as_bytes();
            description.tokens.iter().position(is).and_then(|at| u32::try_from(at).ok())
        };
        let named_token = |key: &str| {
            let value = configs.tokenizer.map_or(&Value::Null, |config| &config[key]);
            value.as_str().or_else(|| value["content"].as_str()).and_then(find)
        };
        let mut named = Named {
            bos: named_token("bos_token"),
            eos: named_token("eos_token"),
            unknown: named_token("unk_token"),
            padding: named_token("pad_token"),
        };
        let mut ends: Vec<u32> = named.eos.into_iter().collect();
        for (file, config) in [("generation_config.json", configs.generation), ("config.json", configs.model)]
        {
            let Some(value) = config.map(|config| &config["eos_token_id"]) else { continue };
            let listed = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            for id in listed.iter().filter_map(Value::as_u64) {
                ends.push(known_id(&format!("eos_token_id of {file}"), id, len)?);
            }
        }
        named.eos = named.eos.or_else(|| ends.first().copied());
        // Without a name for it, BOS is what the post-processor puts first.
        named.bos = named.bos.or_else(|| description.prefix.first().copied());
        if let Some(bos) = named.bos {
            match configs.tokenizer.and_then(|config| config["add_bos_token"].as_bool()) {
                Some(true) if !description.prefix.contains(&bos) => description.prefix.insert(0, bos),
                Some(false) => description.prefix.retain(|&id| id != bos),
                _ => {}
            }
        }
        // Some post-processors close every text; the configuration knows that a prompt is to be gone on with.
        if configs.tokenizer.is_some_and(|config| config["add_eos_token"] == Value::Bool(false)) {
            description.suffix.clear();
        }
        for &id in &ends {
            description.tokens[id as usize].1 = Kind::Control;
        }
        let pipeline = pipeline.with_kinds(&description.tokens);
        let vocab = Vocab::new(description.tokens.into_iter())?;
        let reserved = vocab.ids().filter(|&id| vocab.kind(id).is_reserved());
        let wholes = WholeTokens::new(reserved.map(|id| (vocab.bytes(id), Whole::new(id, true))));
        let end_tokens = all_end_tokens(&vocab, ends);
        let (prefix, suffix, second) = (description.prefix, description.suffix, description.second);
        let strips_space = description.strips_space;
        let model = Model::Pipeline(pipeline.into());
        Ok(Tokenizer { vocab, model, wholes, strips_space, named, prefix, suffix, second, end_tokens })
    }

    /// The tokens of `text` and nothing else: no BOS, no end token.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, Error> {
        match special {
            Special::AsText => self.encode_trusting(text, Trust::Nothing),
            Special::Parse => self.encode_trusting(text, Trust::Everything),
        }
    }

    /// The tokens of `text` as the whole input of the model: with BOS, and whatever else the model wants around a
    /// text, exactly once, also where the text spells it out itself.
    pub fn encode_prompt(&self, text: &str, special: Special) -> Result<Vec<u32>, Error> {
        Ok(self.dress(self.encode(text, special)?))
    }

    /// The tokens of a text behind another one in the same prompt, as BERT reads pairs: with what ends a text, without what
    /// begins it, and with what else stands between two.
    pub fn encode_second(&self, text: &str, special: Special) -> Result<Vec<u32>, Error> {
        let mut tokens = self.second.clone();
        tokens.append(&mut self.encode(text, special)?);
        tokens.extend_from_slice(&self.suffix);
        Ok(tokens)
    }

    /// The same of as much of a text's beginning as makes at most this many tokens.
    pub fn encode_prompt_within(&self, text: &str, special: Special, most: usize) -> Result<Vec<u32>, Error> {
        let mut tokens = self.encode(text, special)?;
        let begins = usize::from(tokens.starts_with(&self.prefix)) * self.prefix.len();
        let around = self.prefix.len() + self.suffix.len() - begins;
        tokens.truncate(most.saturating_sub(around));
        Ok(self.dress(tokens))
    }

    /// The tokens of a rendered chat. Control tokens come from the template alone: where a message spells one out,
    /// it is text. BOS is there exactly once, whether or not the template writes it.
    pub fn encode_chat(&self, prompt: &ChatPrompt) -> Result<Vec<u32>, Error> {
        let mut tokens = self.encode_trusting(prompt.text(), Trust::Except(prompt.untrusted()))?;
        if !self.prefix.is_empty() && !tokens.starts_with(&self.prefix) {
            tokens.splice(..0, self.prefix.iter().copied());
        }
        Ok(tokens)
    }

    fn dress(&self, mut tokens: Vec<u32>) -> Vec<u32> {
        if !tokens.starts_with(&self.prefix) {
            tokens.splice(..0, self.prefix.iter().copied());
        }
        if !tokens.ends_with(&self.suffix) {
            tokens.extend_from_slice(&self.suffix);
        }
        tokens
    }

    fn encode_trusting(&self, text: &str, trust: Trust<'_>) -> Result<Vec<u32>, Error> {
        let mut out = Vec::with_capacity(text.len() / 3);
        if let Model::Pipeline(pipeline) = &self.model {
            pipeline.encode(text, trust, &mut out)?;
            return Ok(out);
        }
        for stretch in self.wholes.cut(text, |range| trust.covers(range)) {
            let text = &text[stretch.range];
            match (stretch.token, &self.model) {
                (Some(id), _) => out.push(id),
                (None, Model::Bpe(bpe)) => bpe.encode(text, &mut out),
                (None, Model::Spm(spm)) => spm.encode(text, &mut out),
                (None, Model::Pipeline(_)) => {}
            }
        }
        Ok(out)
    }

    /// The text of `tokens`, without control tokens. Bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut detokenizer = Detokenizer::new(self);
        let mut text: String = tokens.iter().map(|&token| detokenizer.push(token)).collect();
        text.push_str(&detokenizer.finish());
        text
    }

    /// Number of tokens. A model's embedding table may have more rows; those beyond are not tokens.
    pub fn vocab_len(&self) -> usize {
        self.vocab.len()
    }

    /// The exact bytes of a token, which need not be whole characters; for a control token its name. Empty for an
    /// id beyond the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocab.bytes(id)
    }

    /// The first id that stands for something else here than in `other`.
    pub fn differs(&self, other: &Tokenizer) -> Option<u32> {
        let ids = 0..u32::try_from(self.vocab_len().max(other.vocab_len())).unwrap_or(u32::MAX);
        let same =
            |id| self.token_bytes(id) == other.token_bytes(id) && self.is_control(id) == other.is_control(id);
        ids.into_iter().find(|&id| !same(id))
    }

    /// A token as a person may see it: its bytes, with U+FFFD for broken characters.
    pub fn piece(&self, id: u32) -> String {
        String::from_utf8_lossy(self.vocab.bytes(id)).into_owned()
    }

    /// Whether a token is structure rather than text: never spelled by users, never shown to them.
    pub fn is_control(&self, id: u32) -> bool {
        self.vocab.kind(id).is_reserved()
    }

    /// The control tokens that are spelled in one of these texts, ascending.
    pub fn controls_in(&self, texts: &[&str]) -> Vec<u32> {
        let ids = 0..u32::try_from(self.vocab_len()).unwrap_or(u32::MAX);
        let spelled = |bytes: &[u8]| {
            !bytes.is_empty()
                && texts.iter().any(|text| text.as_bytes().windows(bytes.len()).any(|part| part == bytes))
        };
        ids.filter(|&id| self.is_control(id) && spelled(self.token_bytes(id))).collect()
    }

    /// The token that begins a text, if the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.named.bos
    }

    /// Whether a prompt begins with BOS.
    pub fn add_bos(&self) -> bool {
        self.named.bos.is_some_and(|bos| self.prefix.contains(&bos))
    }

    /// The token that the model's files call the end; generation must stop at any of [`Tokenizer::end_tokens`].
    pub fn eos(&self) -> Option<u32> {
        self.named.eos
    }

    /// Every token that ends a generated text, ascending: a chat model has several.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    /// A control token, or one that is kept whole, by its name.
    pub(crate) fn whole_named(&self, name: &[u8]) -> Option<u32> {
        let is_whole = |id: u32| self.is_control(id) || self.vocab.kind(id) == Kind::UserDefined;
        self.vocab.ids().find(|&id| self.vocab.bytes(id) == name && is_whole(id))
    }

    /// What goes before a prompt.
    pub(crate) fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    pub(crate) fn strips_space(&self) -> bool {
        self.strips_space
    }

    pub(crate) fn wholes(&self) -> &WholeTokens {
        &self.wholes
    }

    /// What chat templates see as `bos_token`, `eos_token` and so on.
    pub(crate) fn named_pieces(&self) -> impl Iterator<Item = (&'static str, String)> {
        let Named { bos, eos, unknown, padding } = self.named;
        let named = [("bos_token", bos), ("eos_token", eos), ("unk_token", unknown), ("pad_token", padding)];
        named.into_iter().filter_map(|(name, id)| Some((name, self.piece(id?))))
    }
}

/// The configuration files beside a `tokenizer.json`.
#[derive(Clone, Copy, Default)]
struct Configs<'a> {
    tokenizer: Option<&'a Value>,
    generation: Option<&'a Value>,
    model: Option<&'a Value>,
}

/// The map of characters that texts go through first, as its bytes; empty where there is none.
fn charsmap(metadata: &Metadata) -> Result<Vec<u8>, Error> {
    const KEY: &str = "tokenizer.ggml.precompiled_charsmap";
    match metadata.get(KEY) {
        None => Ok(Vec::new()),
        Some(FormatValue::Array(Array::U8(bytes))) => Ok(bytes.clone()),
        Some(FormatValue::Array(Array::I8(bytes))) => {
            Ok(bytes.iter().map(|byte| byte.cast_unsigned()).collect())
        }
        Some(_) => Err(Error::Encode { reason: format!("{KEY} is no list of bytes") }),
    }
}

fn check_length(key: &'static str, wanted: usize, got: usize) -> Result<(), Error> {
    if got < wanted { Err(Error::Length { key, wanted, got }) } else { Ok(()) }
}

fn known_id(key: &str, id: u64, tokens: usize) -> Result<u32, Error> {
    let known = u32::try_from(id).ok().filter(|&id| (id as usize) < tokens);
    known.ok_or_else(|| Error::TokenId { key: key.to_owned(), id, tokens })
}

/// `named` and all control tokens that end a text by their name, sorted.
fn all_end_tokens(vocab: &Vocab, named: Vec<u32>) -> Vec<u32> {
    let mut ends = named;
    let is_end = |&id: &u32| {
        vocab.kind(id) == Kind::Control && END_TEXTS.iter().any(|text| text.as_bytes() == vocab.bytes(id))
    };
    let by_name: Vec<u32> = vocab.ids().filter(is_end).collect();
    let has = |text: &str| by_name.iter().any(|&id| vocab.bytes(id) == text.as_bytes());
    // Where a model has its own markers for the end of an answer, `<|end|>` only ends one of its messages.
    let end_is_inner = (has("<|return|>") && has("<|call|>")) || (has("<|calls|>") && has("<|flush|>"));
    ends.extend(by_name.iter().filter(|&&id| !(end_is_inner && vocab.bytes(id) == b"<|end|>")));
    ends.sort_unstable();
    ends.dedup();
    ends
}
