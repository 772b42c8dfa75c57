//! What names a model on the hub: a repository, a revision, and which of its files.

use std::fmt;

use super::HubError;

/// The branch meant where none is named.
const MAIN: &str = "main";

/// What marks a text as a reference, whatever follows.
const PREFIXES: [&str; 8] = [
    "https://huggingface.co/",
    "http://huggingface.co/",
    "https://hf.co/",
    "http://hf.co/",
    "huggingface.co/",
    "hf.co/",
    "hf://",
    "hf:",
];

/// A parsed reference: `hf:owner/name[@revision][:file or quant]`, `owner/name`, `owner/name:Q4_K_M`,
/// `owner/name:file.gguf`, or the address of a page of the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// `owner/name`; a few old repositories have no owner.
    pub repo: String,
    /// A branch, a tag or a commit.
    pub revision: String,
    /// Which of its files.
    pub want: Want,
}

/// Which model of a repository is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Want {
    /// The one that suits most machines.
    Any,
    /// The one in this quantisation, as GGUF file names spell it.
    Quant(String),
    /// This file; of a split model, any of its shards.
    File(String),
}

impl Reference {
    /// Reads a reference.
    ///
    /// # Errors
    /// [`HubError::Reference`] with what is wrong about it.
    pub fn parse(text: &str) -> Result<Reference, HubError> {
        let wrong = |reason: &'static str| HubError::Reference { text: text.to_owned(), reason };
        let stripped = PREFIXES.iter().find_map(|prefix| text.strip_prefix(prefix));
        // Addresses copied from a browser carry what the page was asked for.
        let rest = match stripped {
            Some(rest) => rest.split(['?', '#']).next().unwrap_or(rest).trim_end_matches('/'),
            None => text,
        };

        let (path, selector) = match rest.split_once(':') {
            Some((path, selector)) => (path, Some(selector)),
            None => (rest, None),
        };
        let (path, revision) = match path.split_once('@') {
            Some((path, revision)) => (path, Some(revision)),
            None => (path, None),
        };
        let mut parts = path.split('/');
        let first = parts.next().unwrap_or_default();
        let (repo, mut tail) = match parts.next() {
            Some(second) => (format!("{first}/{second}"), parts.collect::<Vec<_>>()),
            None if stripped.is_some() => (first.to_owned(), Vec::new()),
            None => return Err(wrong("a repository is owner/name")),
        };
        if !repo.split('/').all(is_name) || repo.split('/').next_back().is_some_and(is_model_file) {
            return Err(wrong("owner and name are letters, digits, '-', '_' and '.'"));
        }
        let mut revision = revision.map(str::to_owned);
        if let [page @ ("blob" | "resolve" | "raw" | "tree"), at, ..] = tail[..] {
            if revision.replace(at.to_owned()).is_some() || stripped.is_none() {
                return Err(wrong("an address of the hub has its revision in it"));
            }
            tail.drain(..2);
            if page == "tree" {
                tail.clear();
            }
        }
        let want = match (tail.is_empty(), selector) {
            (true, None) => Want::Any,
            (true, Some(selector)) if is_model_file(selector) => Want::File(selector.to_owned()),
            (true, Some(selector)) if is_name(selector) => Want::Quant(selector.to_owned()),
            (false, None) if tail.last().copied().is_some_and(is_model_file) => Want::File(tail.join("/")),
            _ => return Err(wrong("behind the repository stands a .gguf or .safetensors file, or :QUANT")),
        };
        if let Want::File(file) = &want
            && !is_safe_path(file)
        {
            return Err(wrong("a file of a repository is a plain relative path"));
        }
        let revision = revision.unwrap_or_else(|| MAIN.to_owned());
        if !is_revision(&revision) {
            return Err(wrong("a revision is a branch, a tag or a commit"));
        }
        Ok(Reference { repo, revision, want })
    }

    /// Whether a text that may also be a prompt, a path or a misspelt name is a reference: it is marked as one, or is
    /// nothing but `owner/name`, with `:QUANT` or `:FILE` behind it. With a further slash it is a path: whoever
    /// mistypes one wants to be told so, and not that a network was asked.
    pub fn is_meant(text: &str) -> bool {
        let marked = PREFIXES.iter().any(|prefix| text.starts_with(prefix));
        let name = text.split(':').next().unwrap_or_default();
        (marked && !text.contains(char::is_whitespace))
            || (name.matches('/').count() == 1 && Reference::parse(text).is_ok())
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        if self.revision != MAIN {
            write!(f, "@{}", self.revision)?;
        }
        match &self.want {
            Want::Any => Ok(()),
            Want::Quant(selector) | Want::File(selector) => write!(f, ":{selector}"),
        }
    }
}

fn is_name(part: &str) -> bool {
    part.starts_with(|c: char| c.is_ascii_alphanumeric())
        && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

/// It becomes part of an address and of a path.
fn is_revision(text: &str) -> bool {
    is_safe_path(text) && text.split('/').all(is_name)
}

pub(super) fn is_model_file(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.ends_with(".gguf") || name.ends_with(".safetensors")
}

/// Whether a name that came from outside stays below the folder that it is joined to, on every system.
pub(super) fn is_safe_path(name: &str) -> bool {
    let plain = |c: char| !c.is_control() && !matches!(c, '\\' | ':');
    name.chars().all(plain) && name.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_reference_is_read() {
        let check = |text: &str, repo: &str, revision: &str, want: Want| {
            let wanted = Reference { repo: repo.to_owned(), revision: revision.to_owned(), want };
            assert_eq!(Reference::parse(text).unwrap(), wanted, "{text}");
        };
        let file = |name: &str| Want::File(name.to_owned());
        let quant = |name: &str| Want::Quant(name.to_owned());
        check("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", "main", Want::Any);
        check("hf:o/n", "o/n", "main", Want::Any);
        check("hf:gpt2", "gpt2", "main", Want::Any);
        check("o/n:Q4_K_M", "o/n", "main", quant("Q4_K_M"));
        check("hf.co/o/n:IQ2_XS", "o/n", "main", quant("IQ2_XS"));
        check("o/n/m.Q8_0.gguf", "o/n", "main", file("m.Q8_0.gguf"));
        check("o/n/sub/m.gguf", "o/n", "main", file("sub/m.gguf"));
        check("hf:o/n@v1.0:m.gguf", "o/n", "v1.0", file("m.gguf"));
        check("o/n@refs/pr/7", "o/n", "refs/pr/7", Want::Any);
        check("https://huggingface.co/o/n/", "o/n", "main", Want::Any);
        check("https://huggingface.co/o/n/tree/dev/folder", "o/n", "dev", Want::Any);
        check("https://hf.co/o/n/resolve/abc/m.gguf?download=true", "o/n", "abc", file("m.gguf"));
        check("huggingface.co/o/n/blob/main/q/m.gguf", "o/n", "main", file("q/m.gguf"));
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        for text in [
            "",
            "word",
            "hf:",
            "a/b/c",
            "and/or?",
            "either/or what",
            "missing/model.gguf",
            "./missing",
            "/missing",
            "../x/m.gguf",
            "o/n/../m.gguf",
            "o/n:../m.gguf",
            "o/n:a\\m.gguf",
            "o/n@../x",
            "o/n@a b",
            "o/n:",
            "https://example.com/a/b/c",
            "o/n/m.bin",
        ] {
            assert!(Reference::parse(text).is_err(), "{text}: {:?}", Reference::parse(text));
        }
    }

    #[test]
    fn a_prompt_that_begins_with_an_address_is_a_prompt() {
        for (text, meant) in [
            ("hf:owner/name/x", true),
            ("https://huggingface.co/owner/name/discussions", true),
            ("hf: what is that?", false),
            ("https://huggingface.co/docs says what?", false),
            ("https://example.com/owner/name", false),
        ] {
            assert_eq!(Reference::is_meant(text), meant, "{text}");
        }
    }

    #[test]
    fn a_reference_is_shown_as_it_can_be_typed() {
        for text in ["o/n", "o/n:Q4_K_M", "o/n@dev:a/m.gguf"] {
            assert_eq!(Reference::parse(text).unwrap().to_string(), text);
        }
    }
}
