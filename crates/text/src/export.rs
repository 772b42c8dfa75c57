//! The tokenizer of a Hugging Face directory as GGUF metadata: `tokenizer.json` or `tokenizer.model`, and the files beside them.

use std::collections::HashMap;

use fornax_format::write::header;
use fornax_format::{Array, Gguf, HuggingFace, Value};
use serde_json::Value as Json;

use crate::pipeline::Pipeline;
use crate::pretokenizer::{Family, PreTokenizer};
use crate::sentencepiece::{Piece, Pieces};
use crate::vocab::{hex_byte, looks_reserved};
use crate::{Error, Special, Tokenizer, tokenizer_json};

/// What GGUF calls the kinds of tokens.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The score of tokens that are in no model of pieces.
const ADDED_SCORE: f32 = -1000.0;
/// The score of rows that no token has.
const EMPTY_SCORE: f32 = -10000.0;

/// Pre-tokenizers by the names that GGUF files call them, and of those that cut alike the best known one. What is not here cuts
/// as one of these does.
const FAMILIES: [&str; 30] = [
    "llama-bpe",
    "qwen2",
    "gpt-2",
    "smollm",
    "qwen35",
    "gpt-4o",
    "tekken",
    "command-r",
    "olmo",
    "dbrx",
    "hunyuan",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "falcon",
    "bloom",
    "viking",
    "chameleon",
    "tiny_aya",
    "superbpe",
    "bailingmoe",
    "seed-coder",
    "minicpm5",
    "laguna",
    "exaone-moe",
    "youtu",
    "kimi-k2",
    "granite-embed-multi-97m",
    "gemma4",
    "default",
];

/// Text in which known pre-tokenizers differ: contractions, digits, letters with marks, several scripts, white space of all kinds.
const PROBE: &str = concat!(
    "Hello, y'all! We'VE 3 33 333 3333 33333 3.14159 tests\u{2026} naïve Ünïcødé CamelCase HTTPServer's\n\n\n",
    "    four spaces\t\ttabs \t mixed   \r\nfoo_bar(baz)[0] += x*y; // done. <b>#1 @me $5 100% a/b\\c ~ ^ | & `q`\n",
    "漢字かなカナ 한국어 мир Ωμέγα עברית العربية हिन्दी ไทย 🚀👩‍👩‍👧 ½ ²  \u{a0}nbsp 'S 'll 'RE ...!?! --- === ('quote')\n \n  \n",
    "12,345.678 1st 2nd ab12cd34 éa\u{301} I'm you're it's a'b don't\nend  ",
);

/// Tokens with a role, as Hugging Face names them, and GGUF's keys.
const ROLES: [(&str, &str); 7] = [
    ("bos", "bos_token_id"),
    ("eos", "eos_token_id"),
    ("unk", "unknown_token_id"),
    // So spelled from the start.
    ("sep", "seperator_token_id"),
    ("pad", "padding_token_id"),
    ("cls", "cls_token_id"),
    ("mask", "mask_token_id"),
];

/// The pairs of a GGUF file that describe the directory's tokenizer and its chat template, for a model with so many rows of
/// embeddings. A tokenizer that would cut texts otherwise in GGUF is refused. `None` where the directory has none.
pub fn gguf_pairs(directory: &HuggingFace, rows: usize) -> Result<Option<Vec<(String, Value)>>, Error> {
    let json = directory.tokenizer_json().map(read).transpose()?;
    let pieces = Pieces::open(&directory.directory().join("tokenizer.model"))?;
    let mut export = Export { directory, json, rows, pairs: Vec::new(), prefix: None };
    match (&export.json, pieces) {
        (None, None) => return Ok(None),
        (Some(json), _) if is_byte_level(json) => export.byte_level()?,
        (_, Some(pieces)) => export.pieces(&pieces)?,
        (Some(json), None) if is_metaspace(json) => export.metaspace()?,
        (Some(json), None) => {
            let kind = json["model"]["type"].as_str().unwrap_or("?");
            return Err(unexportable(format!("a tokenizer of the kind {kind:?}")));
        }
    }
    export.roles();
    if let Some(template) = directory.chat_template() {
        export.put("tokenizer.chat_template", Value::String(template.to_owned()));
    }
    export.check()?;
    Ok(Some(export.pairs))
}

fn unexportable(what: String) -> Error {
    Error::Unexportable { what }
}

fn read(path: &std::path::Path) -> Result<Json, Error> {
    let wrong = |reason: String| Error::TokenizerJson { path: path.to_owned(), reason };
    let bytes = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
    tokenizer_json::check(&bytes).map_err(wrong)?;
    serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))
}

/// A step of `tokenizer.json`, or each of those it is a sequence of.
fn steps<'a>(step: &'a Json, list: &str) -> Vec<&'a Json> {
    match step[list].as_array() {
        Some(steps) => steps.iter().collect(),
        None => vec![step],
    }
}

fn has_step(step: &Json, list: &str, kind: &str) -> bool {
    steps(step, list).iter().any(|step| step["type"] == kind)
}

fn is_byte_level(json: &Json) -> bool {
    json["model"]["type"] == "BPE"
        && (has_step(&json["pre_tokenizer"], "pretokenizers", "ByteLevel")
            || has_step(&json["decoder"], "decoders", "ByteLevel"))
}

fn is_metaspace(json: &Json) -> bool {
    json["model"]["type"] == "BPE" && json["model"]["byte_fallback"] == true
}

struct Export<'a> {
    directory: &'a HuggingFace,
    json: Option<Json>,
    rows: usize,
    pairs: Vec<(String, Value)>,
    /// Whether a prompt begins with BOS where the file does not say.
    prefix: Option<bool>,
}

/// A token as GGUF has it.
#[derive(Clone)]
struct Written {
    text: String,
    kind: i32,
    score: f32,
}

impl Export<'_> {
    fn put(&mut self, key: &str, value: Value) {
        self.pairs.push((key.to_owned(), value));
    }

    fn put_tokens(&mut self, tokens: Vec<Written>, scored: bool) {
        let scores = tokens.iter().map(|token| token.score).collect();
        let kinds = tokens.iter().map(|token| token.kind).collect();
        let texts = tokens.into_iter().map(|token| token.text).collect();
        self.put("tokenizer.ggml.tokens", Value::Array(Array::String(texts)));
        if scored {
            self.put("tokenizer.ggml.scores", Value::Array(Array::F32(scores)));
        }
        self.put("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    }

    /// Every row's token: what the model of `tokenizer.json` has, then what is added to it.
    fn tokens(&self, json: &Json) -> Result<Vec<Written>, Error> {
        let empty = |id: usize| Written { text: format!("[PAD{id}]"), kind: UNUSED, score: EMPTY_SCORE };
        let mut tokens: Vec<Written> = (0..self.rows).map(empty).collect();
        let vocab = json["model"]["vocab"].as_object().into_iter().flatten();
        for (text, id) in vocab {
            let kind = if is_metaspace(json) && hex_byte(text).is_some() { BYTE } else { NORMAL };
            *self.place(&mut tokens, id, text)? = Written { text: text.clone(), kind, score: 0.0 };
        }
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let text = added["content"].as_str().unwrap_or_default();
            *self.place(&mut tokens, &added["id"], text)? = written(text, added["special"] == true);
        }
        Ok(tokens)
    }

    fn place<'t>(&self, tokens: &'t mut [Written], id: &Json, text: &str) -> Result<&'t mut Written, Error> {
        let rows = tokens.len();
        let at = id.as_u64().and_then(|id| usize::try_from(id).ok());
        at.and_then(|at| tokens.get_mut(at))
            .ok_or_else(|| unexportable(format!("token {text:?} with the id {id} of a model of {rows} rows")))
    }

    fn byte_level(&mut self) -> Result<(), Error> {
        let Some(json) = self.json.take() else { return Ok(()) };
        let (name, family) = self.family(&json)?;
        let tokens = self.tokens(&json)?;
        self.prefix = Some(family.adds_bos);
        self.put("tokenizer.ggml.model", Value::String("gpt2".to_owned()));
        self.put("tokenizer.ggml.pre", Value::String(name.to_owned()));
        self.put_tokens(tokens, false);
        let merges = merges(&json).map(|(left, right)| format!("{left} {right}")).collect();
        self.put("tokenizer.ggml.merges", Value::Array(Array::String(merges)));
        self.json = Some(json);
        Ok(())
    }

    /// The known pre-tokenizer that cuts as the file's own does.
    fn family(&self, json: &Json) -> Result<(&'static str, Family), Error> {
        let Some(path) = self.directory.tokenizer_json() else { return Err(Error::NoTokenizer) };
        let (pipeline, _) = Pipeline::open(path)?;
        let words = pipeline.words(PROBE)?;
        let composes = has_step(&json["normalizer"], "normalizers", "NFC");
        let words_first = json["model"]["ignore_merges"] == true;
        for name in FAMILIES {
            let Some(family) = Family::named(name).filter(|family| !family.metaspace) else { continue };
            let alike = (family.composes, family.words_first) == (composes, words_first);
            if alike && PreTokenizer::new(&family)?.words(PROBE) == words {
                return Ok((name, family));
            }
        }
        Err(unexportable("a pre-tokenizer that GGUF files have no name for".to_owned()))
    }

    /// Pieces in `tokenizer.json`, whose merges stand for the scores.
    fn metaspace(&mut self) -> Result<(), Error> {
        let Some(json) = self.json.take() else { return Ok(()) };
        let mut tokens = self.tokens(&json)?;
        let places: HashMap<String, usize> =
            tokens.iter().enumerate().map(|(id, token)| (token.text.clone(), id)).collect();
        // A piece made by an earlier merge is joined first; what no merge makes comes behind, in the order of ids.
        let mut rank = 0u32;
        let mut ranked = vec![false; tokens.len()];
        for (left, right) in merges(&json) {
            let Some(&id) = places.get(&format!("{left}{right}")) else { continue };
            if !std::mem::replace(&mut ranked[id], true) && tokens[id].kind == NORMAL {
                tokens[id].score = -(rank as f32);
                rank += 1;
            }
        }
        for (token, _) in tokens.iter_mut().zip(&ranked).filter(|(_, ranked)| !**ranked) {
            if token.kind == NORMAL {
                token.score = -(rank as f32);
                rank += 1;
            }
        }
        self.put_model_of_pieces(tokens, begins_with_space(&json));
        self.json = Some(json);
        Ok(())
    }

    /// Pieces of a `tokenizer.model`, and what the files beside it add.
    fn pieces(&mut self, pieces: &Pieces) -> Result<(), Error> {
        let mut tokens: Vec<Written> = (0..self.rows)
            .map(|id| match pieces.pieces.get(id) {
                Some(Piece { text, score, kind }) => {
                    Written { text: text.clone(), kind: *kind, score: *score }
                }
                None => Written { text: format!("[PAD{id}]"), kind: UNUSED, score: EMPTY_SCORE },
            })
            .collect();
        let added = match (self.directory.tokenizer_config(), &self.json) {
            (Some(config), _) if config["added_tokens_decoder"].is_object() => {
                let listed = config["added_tokens_decoder"].as_object().into_iter().flatten();
                listed.map(|(id, token)| (id.parse::<u64>().ok(), token.clone())).collect()
            }
            (_, Some(json)) => {
                let listed = json["added_tokens"].as_array().into_iter().flatten();
                listed.map(|token| (token["id"].as_u64(), token.clone())).collect()
            }
            _ => Vec::new(),
        };
        for (id, token) in added {
            let text = token["content"].as_str().unwrap_or_default();
            let at = self.place(&mut tokens, &id.into(), text)?;
            *at = written(text, token["special"] == true);
        }
        let space = self.json.as_ref().map_or(pieces.begins_with_space, begins_with_space);
        self.put_model_of_pieces(tokens, space);
        Ok(())
    }

    fn put_model_of_pieces(&mut self, tokens: Vec<Written>, begins_with_space: bool) {
        self.prefix = Some(true);
        self.put("tokenizer.ggml.model", Value::String("llama".to_owned()));
        self.put("tokenizer.ggml.pre", Value::String("default".to_owned()));
        self.put_tokens(tokens, true);
        if !begins_with_space {
            self.put("tokenizer.ggml.add_space_prefix", Value::Bool(false));
        }
    }

    /// Which tokens have a role, and which of them a prompt gets.
    fn roles(&mut self) {
        let null = Json::Null;
        let config = self.directory.tokenizer_config().unwrap_or(&null);
        let json = self.json.as_ref().unwrap_or(&null);
        let content = |role: &str| {
            let value = &config[format!("{role}_token")];
            value.as_str().or_else(|| value["content"].as_str())
        };
        let id_of = |text: &str| {
            let mut added = json["added_tokens"].as_array().into_iter().flatten();
            added.find(|token| token["content"] == text).and_then(|token| token["id"].as_u64())
        };
        let own = self.directory.config();
        let of_model = |role: &str| {
            let key = format!("{role}_token_id");
            own[&key].as_u64().or_else(|| own["text_config"][&key].as_u64())
        };
        let ends = Ends::of(json, &content);
        let (mut named, mut of_config) = (Vec::new(), Vec::new());
        for (role, key) in ROLES {
            let text = match role {
                "bos" => content(role).or(ends.first.as_deref()),
                "eos" => content(role).or(ends.last.as_deref()),
                _ => content(role),
            };
            match (text.and_then(id_of), of_model(role)) {
                (Some(id), _) => named.push((key, id)),
                (None, Some(id)) => of_config.push((key, id)),
                (None, None) => {}
            }
        }
        let ids: Vec<(&str, u32)> = named
            .into_iter()
            .chain(of_config)
            .filter_map(|(key, id)| Some((key, u32::try_from(id).ok()?)))
            .filter(|(_, id)| (*id as usize) < self.rows)
            .collect();
        let said = |role: &str| config[format!("add_{role}_token")].as_bool();
        let mut adds = Vec::new();
        for (role, of_template) in [("bos", ends.adds_bos), ("eos", ends.adds_eos), ("sep", ends.adds_sep)] {
            if let Some(adds_it) = said(role).or(of_template) {
                adds.push((role, adds_it));
            }
        }
        // Where nobody says it, readers of GGUF go by the kind of the tokenizer, and Hugging Face's adds nothing.
        if self.json.is_some() && self.prefix == Some(true) && !adds.iter().any(|(role, _)| *role == "bos") {
            adds.insert(0, ("bos", false));
        }
        for (key, id) in ids {
            self.put(&format!("tokenizer.ggml.{key}"), Value::U32(id));
        }
        for (role, adds_it) in adds {
            self.put(&format!("tokenizer.ggml.add_{role}_token"), Value::Bool(adds_it));
        }
    }

    /// Refuses what would cut texts otherwise in GGUF.
    fn check(&self) -> Result<(), Error> {
        let bytes = header(self.pairs.iter().map(|(key, value)| (&**key, value)), &[])?;
        let written = Tokenizer::from_gguf(Gguf::from_bytes(vec![bytes])?.metadata())?;
        if self.json.is_none() {
            return Ok(());
        }
        let own = Tokenizer::from_hugging_face(self.directory)?;
        for text in PROBE.split_inclusive('\n').chain([PROBE, "a", " a", ""]) {
            let [a, b] = [&own, &written].map(|one| one.encode_prompt(text, Special::AsText));
            let (a, b) = (a?, b?);
            if a != b {
                return Err(unexportable(format!(
                    "a tokenizer that cuts {text:?} into {a:?}, which GGUF would cut into {b:?},"
                )));
            }
        }
        Ok(())
    }
}

/// A token that is added to a model's own.
fn written(text: &str, special: bool) -> Written {
    match special || looks_reserved(text) {
        true => Written { text: text.to_owned(), kind: CONTROL, score: ADDED_SCORE },
        // What is typed as text is spelled as text.
        false => Written { text: text.replace('▁', " "), kind: USER_DEFINED, score: ADDED_SCORE },
    }
}

/// The merges, in order. A space within one is written as the character that stands for it.
fn merges(json: &Json) -> impl Iterator<Item = (String, String)> {
    let part = |part: &str| part.replace(' ', "Ġ");
    let merges = json["model"]["merges"].as_array().into_iter().flatten();
    merges.filter_map(move |merge| match (merge.as_str(), merge.as_array().map(Vec::as_slice)) {
        (Some(line), _) => line.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())),
        (_, Some([a, b])) => Some((part(a.as_str()?), part(b.as_str()?))),
        _ => None,
    })
}

/// Whether a space is put before a text.
fn begins_with_space(json: &Json) -> bool {
    let prepends = has_step(&json["normalizer"], "normalizers", "Prepend");
    let steps = steps(&json["pre_tokenizer"], "pretokenizers");
    let metaspace = steps.into_iter().find(|step| step["type"] == "Metaspace");
    prepends
        || metaspace.is_some_and(|step| match step["prepend_scheme"].as_str() {
            Some(scheme) => scheme != "never",
            None => step["add_prefix_space"] != false,
        })
}

/// What the post-processor puts around a text, as far as GGUF can say it.
#[derive(Default)]
struct Ends {
    first: Option<String>,
    last: Option<String>,
    adds_bos: Option<bool>,
    adds_eos: Option<bool>,
    adds_sep: Option<bool>,
}

impl Ends {
    fn of<'c>(json: &Json, content: &impl Fn(&str) -> Option<&'c str>) -> Ends {
        let mut ends = Ends::default();
        let special = |step: &Json| step["SpecialToken"]["id"].as_str().map(str::to_owned);
        let processor = &json["post_processor"];
        for template in steps(processor, "processors") {
            if template["type"] != "TemplateProcessing" {
                continue;
            }
            let list = |key: &str| template[key].as_array().map_or(&[][..], Vec::as_slice);
            let (single, pair) = (list("single"), list("pair"));
            if let [first, .., last] = single {
                (ends.first, ends.last) = (special(first), special(last));
                let is = |text: &Option<String>, role| {
                    content(role).is_none_or(|own| Some(own) == text.as_deref())
                };
                if ends.first.is_some() {
                    ends.adds_bos = Some(is(&ends.first, "bos") || is(&ends.first, "cls"));
                }
                if ends.last.is_some() {
                    ends.adds_eos = Some(is(&ends.last, "eos"));
                }
            }
            let from = usize::from(ends.first.is_some() && pair.first().and_then(special) == ends.first);
            let to = usize::from(ends.last.is_some() && pair.last().and_then(special) == ends.last);
            let inner = pair.get(from..pair.len().saturating_sub(to)).unwrap_or_default();
            if let [_, middle @ .., _] = inner
                && !middle.is_empty()
            {
                let ends_text = |step: &Json| {
                    let text = special(step);
                    text.is_some() && [content("sep"), content("eos")].contains(&text.as_deref())
                };
                let first = ends_text(&middle[0]) && ends.last.is_none();
                ends.adds_sep = Some(first || (middle.len() == 2 && ends_text(&middle[1])));
            }
        }
        ends
    }
}
