//! Chat templates of every family, rendered as transformers renders them.
//!
//! `make_templates.py` wrote what is expected. The templates of Llama, Mistral 7B, Gemma and OLMo are ours, of their published
//! prompt formats; the others are those of their models (see NOTICE).
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says what it skips"
)]

mod support;

use std::path::{Path, PathBuf};

use fornax_text::{Chat, ChatPrompt, ChatTemplate, Error, Tokenizer};
use serde_json::{Map, Value};
use support::{CONTROL, NORMAL, Vocabulary, skip};

/// What templates write and users must not.
const CONTROLS: [&str; 27] = [
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|endoftext|>",
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<|end_of_text|>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
];

/// A tokenizer of bytes that has every control token, with these as its ends.
fn tokenizer(bos: Option<&str>, eos: &str) -> Tokenizer {
    let printable = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff).chain(0x100..=0x143);
    let bytes: Vec<String> = printable.map(|c| char::from_u32(c).unwrap().to_string()).collect();
    let mut tokens: Vec<(&str, i32)> = bytes.iter().map(|byte| (byte.as_str(), NORMAL)).collect();
    for control in CONTROLS.iter().copied().chain(bos).chain([eos]) {
        if !tokens.contains(&(control, CONTROL)) {
            tokens.push((control, CONTROL));
        }
    }
    let id =
        |text: &str| u32::try_from(tokens.iter().position(|&(token, _)| token == text).unwrap()).unwrap();
    let mut vocabulary = Vocabulary::default()
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "gpt-2")
        .tokens(&tokens)
        .strings("tokenizer.ggml.merges", &[])
        .bool("tokenizer.ggml.add_bos_token", false)
        .u32("tokenizer.ggml.eos_token_id", id(eos));
    if let Some(bos) = bos {
        vocabulary = vocabulary.u32("tokenizer.ggml.bos_token_id", id(bos));
    }
    vocabulary.tokenizer().unwrap()
}

fn chat_of(described: &Value) -> Chat {
    let list = |name: &str| described[name].as_array().cloned().unwrap_or_default();
    let mut chat = Chat::new(list("messages"));
    chat.tools = list("tools");
    chat.documents = list("documents");
    chat.add_generation_prompt = described["add_generation_prompt"].as_bool().unwrap_or(true);
    chat.variables = described["variables"].as_object().cloned().unwrap_or_default();
    chat.now = "2026-11-05T07:08:09[UTC]".parse().unwrap();
    chat
}

fn controls(tokenizer: &Tokenizer, prompt: &ChatPrompt) -> Vec<u32> {
    let tokens = tokenizer.encode_chat(prompt).unwrap();
    tokens.into_iter().filter(|&id| tokenizer.is_control(id)).collect()
}

/// How the cases of a folder of templates went.
#[derive(Debug, Default)]
struct Tally {
    templates: usize,
    same_text: usize,
    same_refusal: usize,
    /// Python itself fails, and so does ours.
    both_fail: usize,
    /// Python itself fails where ours goes on: some templates go through lists that are not there, which are empty to
    /// ours.
    only_python_fails: usize,
    /// Equal but for what Python escapes as HTML: adding to a string that is `safe` does so there, and not here.
    escaped: usize,
    wrong: Vec<String>,
}

/// Every case of a folder of templates.
fn tally(folder: &Path, expected: &Path) -> Tally {
    let expected: Value = serde_json::from_slice(&std::fs::read(expected).unwrap()).unwrap();
    let (chats, evil) = (expected["chats"].as_object().unwrap(), expected["evil"].as_str().unwrap());
    let mut tally = Tally::default();
    for made in expected["templates"].as_array().unwrap() {
        tally.templates += 1;
        let name = made["template"].as_str().unwrap();
        let source = std::fs::read_to_string(folder.join(name)).unwrap();
        let template = match ChatTemplate::new(&source) {
            Ok(template) => template,
            Err(error) => {
                tally.wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        let tokenizer = tokenizer(made["bos"].as_str(), made["eos"].as_str().unwrap());
        for (title, case) in made["cases"].as_object().unwrap() {
            let described = &chats[title];
            let got = template.render(&chat_of(described), &tokenizer);
            match (disagreement(case, &got), &got) {
                (None, Ok(_)) => tally.same_text += 1,
                (None, Err(_)) if case["failure"].is_null() => tally.same_refusal += 1,
                (None, Err(_)) => tally.both_fail += 1,
                (Some(_), Ok(_)) if !case["failure"].is_null() => tally.only_python_fails += 1,
                (Some(_), Ok(prompt))
                    if source.contains("|safe") && unescaped(case) == Some(prompt.text().to_owned()) =>
                {
                    tally.escaped += 1;
                }
                (Some(reason), _) => tally.wrong.push(format!("{name}, {title}: {reason}")),
            }
            let written = described.to_string();
            let plain = written.replace(&serde_json::to_string(evil).unwrap(), "\"plain\"");
            if let Ok(prompt) = got
                && plain != written
            {
                let described: Map<String, Value> = serde_json::from_str(&plain).unwrap();
                let innocent = template.render(&chat_of(&Value::Object(described)), &tokenizer).unwrap();
                if controls(&tokenizer, &prompt) != controls(&tokenizer, &innocent) {
                    tally.wrong.push(format!("{name}, {title}: a message wrote control tokens"));
                }
            }
        }
    }
    tally
}

/// A case's text without what `markupsafe` escapes.
fn unescaped(case: &Value) -> Option<String> {
    let pairs = [("&lt;", "<"), ("&gt;", ">"), ("&#34;", "\""), ("&#39;", "'"), ("&amp;", "&")];
    let text = case["text"].as_str()?.to_owned();
    Some(pairs.iter().fold(text, |text, (escaped, plain)| text.replace(escaped, plain)))
}

fn disagreement(case: &Value, got: &Result<ChatPrompt, Error>) -> Option<String> {
    match (case["text"].as_str(), case["error"].as_str(), got) {
        (Some(text), _, Ok(prompt)) if prompt.text() == text => None,
        (Some(text), _, Ok(prompt)) => {
            let at = text.bytes().zip(prompt.text().bytes()).take_while(|(a, b)| a == b).count();
            let from = |text: &str| {
                String::from_utf8_lossy(&text.as_bytes()[at..text.len().min(at + 60)]).into_owned()
            };
            Some(format!("at {at}: {:?}, wanted {:?}", from(prompt.text()), from(text)))
        }
        (_, Some(message), Err(Error::TemplateRefused { message: said })) if said == message => None,
        (None, None, Err(Error::TemplateFailed { .. } | Error::TemplateRefused { .. })) => None,
        (_, _, Ok(prompt)) => Some(format!("gave {:?}, wanted {case}", prompt.text())),
        (_, _, Err(error)) => Some(format!(
            "failed with {error}, wanted {}",
            &case.to_string().chars().take(90).collect::<String>()
        )),
    }
}

#[test]
fn templates_of_every_family_render_as_in_python() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let tally = tally(&here.join("templates"), &here.join("templates.json"));
    assert!(tally.wrong.is_empty(), "{}", tally.wrong.join("\n"));
    assert_eq!((tally.only_python_fails, tally.escaped), (0, 0), "{tally:?}");
}

/// `$FORNAX_TEMPLATES` is a folder of templates, with the `templates.json` that `make_templates.py` made of them: those
/// that are not ours to carry. `cargo xtask prove templates` fetches them.
#[test]
fn further_templates_render_as_in_python() {
    let Some(folder) = std::env::var_os("FORNAX_TEMPLATES").map(PathBuf::from) else {
        return skip("further_templates_render_as_in_python", "FORNAX_TEMPLATES names no folder");
    };
    let tally = tally(&folder, &folder.join("templates.json"));
    assert!(tally.wrong.is_empty(), "{}", tally.wrong.join("\n"));
    println!("{tally:?}");
}
