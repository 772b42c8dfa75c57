//! Models of the hub by short names: the ones that people ask for, under the names that they know them by.
//!
//! Nothing of these was read when this list was written, so no checksum is pinned: sizes are what their pages say, and
//! a fetch is held to the checksum that the hub publishes. What a file really holds is what `fornax plan` reads of it.

/// What a model is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Talks.
    Chat,
    /// Talks, and was trained on programs.
    Code,
    /// Makes embeddings.
    Embeds,
    /// Says how well a text answers a question.
    Ranks,
}

impl Purpose {
    /// In a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Chat => "chat",
            Purpose::Code => "code",
            Purpose::Embeds => "embed",
            Purpose::Ranks => "rerank",
        }
    }
}

/// A model of the hub with a short name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// What a user types.
    pub name: &'static str,
    /// Other spellings, among them the tags that Ollama has for it.
    pub aliases: &'static [&'static str],
    /// The model's full name and number format, for people.
    pub description: &'static str,
    /// Where it is.
    pub reference: &'static str,
    /// What it is for.
    pub purpose: Purpose,
    /// Size of its files, as published.
    pub bytes: u64,
    /// Of these, how many are read for a token: a mixture of experts reads some of its experts.
    pub read_bytes: u64,
    /// Bytes of keys and values for a token of context, in f16; layers with windows take less.
    pub kv_token_bytes: u64,
    /// Licence of the weights as their page states it.
    pub licence: &'static str,
}

/// Tokens of context that [`Known::memory_bytes`] counts.
pub const CONTEXT: u64 = 8192;

/// What a process takes beside its weights, keys and values: steps, tokenizer, code.
const BESIDE_BYTES: u64 = 400 << 20;

const MB: u64 = 1_000_000;

/// From the smallest to the largest of each purpose.
pub const KNOWN: &[Known] = &[
    Known {
        name: "smollm2-360m",
        aliases: &["smollm2:360m"],
        description: "SmolLM2-360M-Instruct, Q8_0",
        reference: "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0",
        purpose: Purpose::Chat,
        bytes: 386 * MB,
        read_bytes: 386 * MB,
        kv_token_bytes: 40_960,
        licence: "Apache-2.0",
    },
    Known {
        name: "qwen3-0.6b",
        aliases: &["qwen3:0.6b"],
        description: "Qwen3-0.6B, Q8_0, thinks",
        reference: "Qwen/Qwen3-0.6B-GGUF:Q8_0",
        purpose: Purpose::Chat,
        bytes: 639 * MB,
        read_bytes: 639 * MB,
        kv_token_bytes: 114_688,
        licence: "Apache-2.0",
    },
    Known {
        name: "llama3.2-1b",
        aliases: &["llama3.2:1b", "llama-3.2-1b"],
        description: "Llama-3.2-1B-Instruct, Q4_K_M",
        reference: "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
        purpose: Purpose::Chat,
        bytes: 808 * MB,
        read_bytes: 808 * MB,
        kv_token_bytes: 32_768,
        licence: "Llama 3.2 Community",
    },
    Known {
        name: "gemma3-1b",
        aliases: &["gemma3:1b", "gemma-3-1b"],
        description: "gemma-3-1b-it, Q4_K_M",
        reference: "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
        purpose: Purpose::Chat,
        bytes: 806 * MB,
        read_bytes: 806 * MB,
        kv_token_bytes: 26_624,
        licence: "Gemma",
    },
    Known {
        name: "qwen3-1.7b",
        aliases: &["qwen3:1.7b"],
        description: "Qwen3-1.7B, Q8_0, thinks",
        reference: "Qwen/Qwen3-1.7B-GGUF:Q8_0",
        purpose: Purpose::Chat,
        bytes: 1834 * MB,
        read_bytes: 1834 * MB,
        kv_token_bytes: 114_688,
        licence: "Apache-2.0",
    },
    Known {
        name: "llama3.2-3b",
        aliases: &["llama3.2", "llama3.2:3b", "llama-3.2-3b"],
        description: "Llama-3.2-3B-Instruct, Q4_K_M",
        reference: "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
        purpose: Purpose::Chat,
        bytes: 2019 * MB,
        read_bytes: 2019 * MB,
        kv_token_bytes: 114_688,
        licence: "Llama 3.2 Community",
    },
    Known {
        name: "gemma3-4b",
        aliases: &["gemma3", "gemma3:4b", "gemma-3-4b"],
        description: "gemma-3-4b-it, Q4_K_M, its text side",
        reference: "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
        purpose: Purpose::Chat,
        bytes: 2490 * MB,
        read_bytes: 2490 * MB,
        kv_token_bytes: 139_264,
        licence: "Gemma",
    },
    Known {
        name: "phi4-mini",
        aliases: &["phi4-mini:3.8b", "phi-4-mini"],
        description: "Phi-4-mini-instruct, Q4_K_M",
        reference: "bartowski/microsoft_Phi-4-mini-instruct-GGUF:Q4_K_M",
        purpose: Purpose::Chat,
        bytes: 2492 * MB,
        read_bytes: 2492 * MB,
        kv_token_bytes: 131_072,
        licence: "MIT",
    },
    Known {
        name: "qwen3-4b",
        aliases: &["qwen3:4b"],
        description: "Qwen3-4B, Q4_K_M, thinks",
        reference: "Qwen/Qwen3-4B-GGUF:Q4_K_M",
        purpose: Purpose::Chat,
        bytes: 2497 * MB,
        read_bytes: 2497 * MB,
        kv_token_bytes: 147_456,
        licence: "Apache-2.0",
    },
    Known {
        name: "mistral-7b",
        aliases: &["mistral", "mistral:7b"],
        description: "Mistral-7B-Instruct-v0.3, Q4_K_M",
        reference: "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
        purpose: Purpose::Chat,
        bytes: 4373 * MB,
        read_bytes: 4373 * MB,
        kv_token_bytes: 131_072,
        licence: "Apache-2.0",
    },
    Known {
        name: "qwen3-8b",
        aliases: &["qwen3", "qwen3:8b"],
        description: "Qwen3-8B, Q4_K_M, thinks",
        reference: "Qwen/Qwen3-8B-GGUF:Q4_K_M",
        purpose: Purpose::Chat,
        bytes: 5028 * MB,
        read_bytes: 5028 * MB,
        kv_token_bytes: 147_456,
        licence: "Apache-2.0",
    },
    Known {
        name: "gpt-oss-20b",
        aliases: &["gpt-oss", "gpt-oss:20b"],
        description: "gpt-oss-20b, MXFP4, a mixture of experts, thinks",
        reference: "ggml-org/gpt-oss-20b-GGUF:MXFP4",
        purpose: Purpose::Chat,
        bytes: 12_110 * MB,
        // 3.6 of 20.9 billion parameters.
        read_bytes: 2086 * MB,
        kv_token_bytes: 49_152,
        licence: "Apache-2.0",
    },
    Known {
        name: "qwen3-30b-a3b",
        aliases: &["qwen3:30b", "qwen3:30b-a3b"],
        description: "Qwen3-30B-A3B, Q4_K_M, a mixture of experts, thinks",
        reference: "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
        purpose: Purpose::Chat,
        bytes: 18_557 * MB,
        // 3.3 of 30.5 billion parameters.
        read_bytes: 2008 * MB,
        kv_token_bytes: 98_304,
        licence: "Apache-2.0",
    },
    Known {
        name: "qwen2.5-coder-1.5b",
        aliases: &["qwen2.5-coder:1.5b"],
        description: "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        reference: "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        purpose: Purpose::Code,
        bytes: 1117 * MB,
        read_bytes: 1117 * MB,
        kv_token_bytes: 28_672,
        licence: "Apache-2.0",
    },
    Known {
        name: "qwen2.5-coder-7b",
        aliases: &["qwen2.5-coder", "qwen2.5-coder:7b"],
        description: "Qwen2.5-Coder-7B-Instruct, Q4_K_M",
        reference: "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:qwen2.5-coder-7b-instruct-q4_k_m.gguf",
        purpose: Purpose::Code,
        bytes: 4683 * MB,
        read_bytes: 4683 * MB,
        kv_token_bytes: 57_344,
        licence: "Apache-2.0",
    },
    Known {
        name: "bge-small",
        aliases: &["bge-small-en"],
        description: "bge-small-en-v1.5, F32",
        reference: "BAAI/bge-small-en-v1.5",
        purpose: Purpose::Embeds,
        bytes: 133 * MB,
        read_bytes: 133 * MB,
        kv_token_bytes: 0,
        licence: "MIT",
    },
    Known {
        name: "qwen3-embedding-0.6b",
        aliases: &["qwen3-embedding", "qwen3-embedding:0.6b"],
        description: "Qwen3-Embedding-0.6B, Q8_0",
        reference: "Qwen/Qwen3-Embedding-0.6B-GGUF:Q8_0",
        purpose: Purpose::Embeds,
        bytes: 639 * MB,
        read_bytes: 639 * MB,
        kv_token_bytes: 114_688,
        licence: "Apache-2.0",
    },
    Known {
        name: "ms-marco-minilm",
        aliases: &["ms-marco-minilm-l6"],
        description: "ms-marco-MiniLM-L6-v2, F32",
        reference: "cross-encoder/ms-marco-MiniLM-L6-v2",
        purpose: Purpose::Ranks,
        bytes: 91 * MB,
        read_bytes: 91 * MB,
        kv_token_bytes: 0,
        licence: "Apache-2.0",
    },
];

impl Known {
    /// About what it takes with a context of [`CONTEXT`] tokens.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.bytes + self.kv_token_bytes * CONTEXT + BESIDE_BYTES
    }
}

/// The model of this name or alias, in any letter case.
#[must_use]
pub fn find(name: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| {
        known.name.eq_ignore_ascii_case(name)
            || known.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::{Reference, catalog};

    #[test]
    fn names_are_unique_and_lead_to_the_hub() {
        let names: Vec<_> =
            KNOWN.iter().flat_map(|known| std::iter::once(&known.name).chain(known.aliases)).collect();
        for name in &names {
            assert_eq!(names.iter().filter(|other| other == &name).count(), 1, "{name}");
            assert!(catalog::find(name).is_none(), "{name} is in the catalog");
            assert!(!Reference::is_meant(name), "{name} looks like a reference itself");
            assert!(find(&name.to_uppercase()).is_some());
        }
        for known in KNOWN {
            let reference = Reference::parse(known.reference).unwrap();
            assert_eq!(reference.to_string(), known.reference);
            assert!(known.read_bytes <= known.bytes, "{}", known.name);
        }
    }
}
