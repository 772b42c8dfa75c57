//! `cargo xtask prove NAME`: what is too large for every test run, done at full scale and written down.
//!
//! A proof that succeeds replaces its section of `docs/proofs.md` with what was found and on which machine and
//! commit. One that fails records nothing.

mod agents;
mod cache;
mod chaos;
mod checked;
mod clean_clone;
mod clients;
mod crash;
mod cuda;
mod formats;
mod fuzz_cases;
mod fuzz_format;
mod golden;
mod hand_over;
mod human_eval;
mod image;
mod llama_server;
mod lm_eval;
mod load;
mod memory;
mod neon;
mod private;
mod serving;
mod simulation;
mod soak;
mod templates;
mod wheel;

use std::fmt::Write as _;
use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::{command, output, root};

const FILE: &str = "docs/proofs.md";

/// One proof: its name, what it shows, and the act.
struct Proof {
    name: &'static str,
    shows: &'static str,
    run: fn() -> Result<Facts>,
}

/// What a proof found, as rows of a table.
type Facts = Vec<(&'static str, String)>;

const PROOFS: &[Proof] = &[
    Proof {
        name: "agents",
        shows: "Of a hybrid's conversations that go on turn by turn no more than a page beyond what is new is computed; beside llama.cpp.",
        run: agents::run,
    },
    Proof {
        name: "cache",
        shows: "Of pages on a disk nothing wrong is ever read: after hundreds of kills, damage anywhere and restarts, answers are the same bits.",
        run: cache::run,
    },
    Proof {
        name: "chaos",
        shows: "One hostile key among ten neither fails nor holds up the requests of the others, and leaves nothing behind.",
        run: chaos::run,
    },
    Proof {
        name: "checkpoints",
        shows: "Quantised to FP8, GPTQ and AWQ the default model gives the log-probabilities of its dequantised weights.",
        run: formats::checkpoints,
    },
    Proof {
        name: "clean-clone",
        shows: "The two commands of the README work in a fresh clone with an empty cache folder.",
        run: clean_clone::run,
    },
    Proof {
        name: "clients",
        shows: "Other people's clients, unchanged, call tools and answer through OpenAI's, Anthropic's and Ollama's APIs.",
        run: clients::run,
    },
    Proof {
        name: "crash",
        shows: "Workers killed at random moments lose no accepted job and complete none twice, on both databases.",
        run: crash::run,
    },
    Proof {
        name: "cuda",
        shows: "A GPU conforms, answers as transformers does, and leaves nothing behind; its bits do not depend on the batch.",
        run: cuda::run,
    },
    Proof {
        name: "formats",
        shows: "In every weight format the default model gives the log-probabilities of its dequantised weights.",
        run: formats::gguf,
    },
    Proof {
        name: "fuzz-adapters",
        shows: "Ten million changed adapters (or an hour of them) end in an adapter or a refusal in one line.",
        run: || fuzz_cases::fuzzed(&fuzz_cases::ADAPTERS),
    },
    Proof {
        name: "fuzz-bodies",
        shows: "Ten million changed bodies of every API (or an hour of them) end in an answer or a refusal, and leave nothing behind.",
        run: || fuzz_cases::fuzzed(&fuzz_cases::BODIES),
    },
    Proof {
        name: "fuzz-checkpoints",
        shows: "Ten million changed models, packed in every format that is read, (or an hour of them) end in a model or a refusal in one line.",
        run: || fuzz_cases::fuzzed(&fuzz_cases::CHECKPOINTS),
    },
    Proof {
        name: "fuzz-format",
        shows: "Ten million mutated files neither crash the readers of models, nor hang them, nor use much memory.",
        run: fuzz_format::run,
    },
    Proof {
        name: "fuzz-forms",
        shows: "Ten million changed schemas, expressions and grammars (or an hour of them) end in a form that is followed or a refusal.",
        run: || fuzz_cases::fuzzed(&fuzz_cases::FORMS),
    },
    Proof {
        name: "fuzz-frames",
        shows: "Ten million changed frames of private inference (or an hour of them) end in a frame or a refusal.",
        run: || fuzz_cases::fuzzed(&fuzz_cases::FRAMES),
    },
    Proof {
        name: "fuzz-images",
        shows: "Ten million changed pictures (or an hour of them) end in a picture of the size that its header says or a refusal in one line.",
        run: || fuzz_cases::fuzzed(&fuzz_cases::IMAGES),
    },
    Proof {
        name: "fuzz-sessions",
        shows: "Ten million changed sequences of frames, sent to private servers, (or an hour of them) end in their own session alone.",
        run: || fuzz_cases::fuzzed(&fuzz_cases::SESSIONS),
    },
    Proof {
        name: "fuzz-templates",
        shows: "Ten million changed chat templates (or an hour of them) end in a text or an error, and not the process.",
        run: || fuzz_cases::fuzzed(&fuzz_cases::TEMPLATES),
    },
    Proof {
        name: "fuzz-tokenizers",
        shows: "Ten million changed tokenizer files (or an hour of them) end in a tokenizer or an error, and not the process.",
        run: || fuzz_cases::fuzzed(&fuzz_cases::TOKENIZERS),
    },
    Proof {
        name: "golden",
        shows: "Every test passes and none is skipped, with all models fetched.",
        run: golden::run,
    },
    Proof {
        name: "hand-over",
        shows: "No schedule of threads that a model checker tries loses a request between callers and the engine.",
        run: hand_over::run,
    },
    Proof {
        name: "human-eval",
        shows: "Asked HumanEval, Fornax and llama.cpp say the same on the same file but for close calls, item by item.",
        run: human_eval::run,
    },
    Proof {
        name: "image",
        shows: "The container image is built, and its default command fetches the default model without Python, serves and drains.",
        run: image::run,
    },
    Proof {
        name: "llama-server-tests",
        shows: "llama.cpp's own tests of its server pass with Fornax in its place, but for those whose reason is listed.",
        run: llama_server::run,
    },
    Proof {
        name: "lm-eval",
        shows: "lm-evaluation-harness chooses as with transformers on the same weights, log-probabilities within 0.01.",
        run: lm_eval::run,
    },
    Proof {
        name: "load",
        shows: "Thousands of requests from 64 clients, some of whom leave midway, cause no error and leave nothing behind.",
        run: load::run,
    },
    Proof {
        name: "memory",
        shows: "The peak memory of a generation is below 1.5 times the model file plus the KV cache plus 64 MiB.",
        run: memory::run,
    },
    Proof {
        name: "neon",
        shows: "Under an emulator every vector level for ARM conforms, gives the bits of the scalar code, and is chosen where it is the best.",
        run: neon::run,
    },
    Proof {
        name: "private",
        shows: "On a real model neither of two servers' views says anything, lies are found and named, and the logits are exact.",
        run: private::run,
    },
    Proof {
        name: "simulation",
        shows: "Whatever happens to an engine, every request ends once, every token is right and every page returns.",
        run: simulation::run,
    },
    Proof {
        name: "soak",
        shows: "A thousand mixed requests on a real model, some failing on purpose, leave nothing behind; memory is flat.",
        run: soak::run,
    },
    Proof {
        name: "templates",
        shows: "A hundred chat templates that models carry render byte for byte as with transformers, and go through whole loops of tools.",
        run: templates::run,
    },
    Proof {
        name: "wheel",
        shows: "The Python wheel, installed in a clean environment, passes its tests, its types hold, and its command answers.",
        run: wheel::run,
    },
];

/// Prints the names and what each shows.
pub(crate) fn list() -> Result<()> {
    for proof in PROOFS {
        println!("{:<15}  {}", proof.name, proof.shows);
    }
    Ok(())
}

/// Runs one proof and records it.
pub(crate) fn run(name: &str) -> Result<()> {
    let names = || PROOFS.iter().map(|proof| proof.name).collect::<Vec<_>>().join(", ");
    let proof = PROOFS.iter().find(|proof| proof.name == name);
    let proof = proof.with_context(|| format!("no proof is called `{name}`; there are: {}", names()))?;
    let start = Instant::now();
    let mut facts = (proof.run)()?;
    let duration = ("duration", format!("{:.0} s", start.elapsed().as_secs_f64()));
    for fact in std::iter::once(duration).chain(circumstances()?) {
        // A proof says it itself where it was not here and now.
        if facts.iter().all(|(name, _)| *name != fact.0) {
            facts.push(fact);
        }
    }
    let path = root().join(FILE);
    let document = fs::read_to_string(&path).with_context(|| format!("cannot read {FILE}"))?;
    let section = section(proof, &facts);
    fs::write(&path, replaced(&document, proof.name, &section))
        .with_context(|| format!("cannot write {FILE}"))?;
    println!("{section}recorded in {FILE}");
    Ok(())
}

/// Where and on what it ran.
fn circumstances() -> Result<Facts> {
    let commit = output(&mut command("git", &["rev-parse", "--short=12", "HEAD"]))?;
    // The record itself may be uncommitted; anything else would make the commit a half-truth.
    let changed = output(&mut command("git", &["status", "--porcelain", "--untracked-files=no"]))?;
    let dirty = changed.lines().any(|line| !line.ends_with(FILE));
    let proc = |file: &str, key: &str| -> Option<String> {
        let text = fs::read_to_string(file).ok()?;
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let unknown = || "unknown".to_owned();
    let cpu = proc("/proc/cpuinfo", "model name").unwrap_or_else(unknown);
    let memory = proc("/proc/meminfo", "MemTotal").unwrap_or_else(unknown);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    Ok(vec![
        ("machine", format!("{cpu}, {cores} cores, {memory} memory")),
        ("compiler", output(&mut command("rustc", &["--version"]))?.trim().to_owned()),
        ("commit", format!("{}{}", commit.trim(), if dirty { " with uncommitted changes" } else { "" })),
    ])
}

fn section(proof: &Proof, facts: &Facts) -> String {
    let mut text = format!("## {}\n\n{}\n\n`cargo xtask prove {}`\n\n", proof.name, proof.shows, proof.name);
    text.push_str("| | |\n|---|---|\n");
    for (key, value) in facts {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {key} | {} |", value.replace('|', "\\|"));
    }
    text.push('\n');
    text
}

/// The document with the section of this name replaced, or added at the end.
fn replaced(document: &str, name: &str, section: &str) -> String {
    let heading = format!("## {name}\n");
    let Some(start) = document.find(&heading) else {
        return format!("{}\n\n{}", document.trim_end(), section);
    };
    let body = start + heading.len();
    let end = document[body..].find("\n## ").map_or(document.len(), |next| body + next + 1);
    format!("{}{section}{}", &document[..start], &document[end..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_replaced_and_its_neighbours_stay() {
        let document = "# Proofs\n\n## a\n\nold a\n\n## b\n\nold b\n";
        assert_eq!(replaced(document, "a", "## a\n\nnew\n\n"), "# Proofs\n\n## a\n\nnew\n\n## b\n\nold b\n");
        assert_eq!(
            replaced(document, "b", "## b\n\nnew\n\n"),
            "# Proofs\n\n## a\n\nold a\n\n## b\n\nnew\n\n"
        );
        assert_eq!(replaced(document, "c", "## c\n"), "# Proofs\n\n## a\n\nold a\n\n## b\n\nold b\n\n## c\n");
    }

    #[test]
    fn an_unknown_proof_names_those_there_are() {
        let message = run("everything").unwrap_err().to_string();
        assert!(PROOFS.iter().all(|proof| message.contains(proof.name)), "{message}");
    }
}
