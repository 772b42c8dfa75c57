//! What stands between two texts: the prompts that models of code were trained to fill gaps with.

use crate::{Error, Special, Tokenizer};

/// The tokens before the text in front of a gap, before the text behind it, and before what fills it, as families of
/// models call them: Qwen, CodeGemma and others; StarCoder and Granite; SantaCoder; DeepSeek; Code Llama; GLM;
/// Falcon-H1.
const GAPS: [[&str; 3]; 8] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    ["<PRE>", "<SUF>", "<MID>"],
    ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
    ["<|prefix|>", "<|suffix|>", "<|middle|>"],
];

/// Codestral's, which reads what stands behind the gap first and has no token before what fills it.
const MISTRAL: [&str; 2] = ["[SUFFIX]", "[PREFIX]"];

/// What stands before the files of a repository, and before the name of each.
const FILES: [[&str; 2]; 3] =
    [["<|repo_name|>", "<|file_sep|>"], ["<|fim_repo|>", "<|file_sep|>"], ["<repo_name>", "<file_sep>"]];

/// Where a model has no tokens for files, what stands between them.
const SEPARATOR: &str = "\n\n--- snippet ---\n\n";

/// A text of another file, which may help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snippet {
    /// The file's name.
    pub name: String,
    /// What is in it.
    pub text: String,
}

impl Tokenizer {
    /// The prompt that asks for what stands between two texts, behind others that may help; `None` where the model has
    /// no tokens for that. Control tokens that are spelled in a text are text.
    pub fn encode_infill(
        &self,
        before: &str,
        behind: &str,
        others: &[Snippet],
    ) -> Result<Option<Vec<u32>>, Error> {
        let encode = |text: &str| self.encode(text, Special::AsText);
        let named = |name: &str| self.whole_named(name.as_bytes());
        let mut tokens = self.prefix().to_vec();
        if !others.is_empty() {
            let files = FILES.iter().find_map(|[first, each]| Some((named(first)?, named(each)?)));
            if let Some((repository, _)) = files {
                tokens.push(repository);
                tokens.extend(encode("repository\n")?);
            }
            for Snippet { name, text } in others {
                match files {
                    Some((_, file)) => {
                        tokens.push(file);
                        tokens.extend(encode(&format!("{name}\n{text}"))?);
                    }
                    None => tokens.extend(encode(&format!("{text}{SEPARATOR}"))?),
                }
            }
            if let Some((_, file)) = files {
                tokens.push(file);
                tokens.extend(encode("this file\n")?);
            }
        }
        let gap = GAPS
            .iter()
            .find_map(|[before, behind, middle]| Some((named(before)?, named(behind)?, named(middle)?)));
        if let Some((first, second, middle)) = gap {
            tokens.push(first);
            tokens.extend(encode(before)?);
            tokens.push(second);
            tokens.extend(encode(behind)?);
            tokens.push(middle);
            return Ok(Some(tokens));
        }
        let [Some(second), Some(first)] = MISTRAL.map(named) else { return Ok(None) };
        tokens.push(second);
        tokens.extend(encode(behind)?);
        tokens.push(first);
        tokens.extend(encode(before)?);
        Ok(Some(tokens))
    }
}
