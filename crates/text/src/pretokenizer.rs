//! Cutting text into words before byte pairs are merged: one known pattern per family of models.
//!
//! The published patterns look ahead once, in `\s+(?!\S)|\s+`: a run of whitespace leaves its last character to
//! the word that follows. Here that is a rule on the match instead, so that every pattern runs in linear time and
//! no text, however hostile, can make it backtrack.

use regex_automata::meta::Regex;

use crate::Error;

/// The pre-tokenizer of one family: its stages, each of which cuts the pieces of the stage before it.
#[derive(Debug)]
pub(crate) struct PreTokenizer {
    stages: Vec<Stage>,
}

/// What a family's name in `tokenizer.ggml.pre` says beyond the pattern.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Family {
    stages: &'static [Cut],
    /// A word that is a token is that token, whatever the merges say.
    pub(crate) words_first: bool,
    /// Whether a prompt begins with BOS where the file does not say.
    pub(crate) adds_bos: bool,
    /// Merges run over characters with `▁` for space and bytes as a fallback, not over bytes.
    pub(crate) metaspace: bool,
    /// Text is composed (Unicode NFC) first, as these models' `tokenizer.json` says and GGUF has no field for.
    pub(crate) composes: bool,
}

/// One way of cutting; what lies between two matches is a piece too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// At the matches of a pattern.
    Matches(&'static str),
    /// The same, and where the pattern fails on whitespace the run leaves its last character to the next word.
    Words(&'static str),
    /// Digits in threes, counted from the right.
    Thousands {
        /// Each group is a piece of its own (otherwise there is only a cut before it), and the run must not go
        /// on with a letter.
        isolated: bool,
    },
}

#[derive(Debug)]
enum Stage {
    /// Pattern 0 is the family's; pattern 1, where there is one, is a run of whitespace.
    Regex(Regex),
    Thousands {
        isolated: bool,
    },
}

const GPT2: Cut = Cut::Words(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+");
const DIGIT: Cut = Cut::Matches(r"\p{N}");
const LLAMA3: Cut = Cut::Words(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
);
const QWEN2: Cut = Cut::Words(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
);
/// GPT-4o's words: an upper-case head, a lower-case tail, a contraction.
const O200K: Cut = Cut::Words(concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
));
const DEEPSEEK3: [Cut; 3] = [
    Cut::Matches(r"\p{N}{1,3}"),
    Cut::Matches("[一-龥\u{3040}-ゟ゠-ヿ]+"),
    Cut::Words(concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+",
    )),
];
const BLOOM: Cut = Cut::Matches(r" ?[^(\s|.,!?…。，、।۔،)]+");
/// Merges may not cross a line break, whatever the family.
const LINES: Cut = Cut::Matches(r"[^\n]+|\n+");

impl Family {
    /// The family that `tokenizer.ggml.pre` names, if it is known.
    pub(crate) fn named(name: &str) -> Option<Family> {
        let stages: &'static [Cut] = match name {
            "default" => &[
                Cut::Matches(r"[\p{P}\$\+<=>\^~\|]+"),
                GPT2,
                Cut::Matches(r"\p{N}+"),
                Cut::Matches("[0-9][0-9][0-9]"),
            ],
            "gpt-2" | "phi-2" | "jina-es" | "jina-de" | "jina-v1-en" | "jina-v2-es" | "jina-v2-de"
            | "jina-v2-code" | "roberta-bpe" | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert"
            | "exaone4" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" => &[GPT2],
            "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b"
            | "mellum2" => &[DIGIT, GPT2],
            "falcon" => &[Cut::Matches(r"[\p{P}\$\+<=>\^~\|`]+"), GPT2, Cut::Matches("[0-9][0-9][0-9]")],
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
            | "lfm2" | "jina-v5-nano" | "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => &[LLAMA3],
            "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2" | "hunyuan"
            | "solar-open" | "grok-2" => &[QWEN2],
            "qwen35" => &[Cut::Words(concat!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|",
                r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+",
            ))],
            "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" | "granite-embed-multi-97m" => &[O200K],
            "tekken" => &[Cut::Words(concat!(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
                r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
            ))],
            "deepseek-llm" => &[
                Cut::Matches(r"[\r\n]"),
                // Letters of the scripts that have case, as the original lists them.
                Cut::Matches(concat!(
                    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕ",
                    "Ἐ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u{1f7d}ᾀ-ᾴᾶ-ᾼ\u{1fbe}ῂ-ῄῆ-ῌῐ-\u{1fd3}ῖ-\u{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ",
                    "\u{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
                )),
                Cut::Matches("\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+"),
                Cut::Matches(r"\s+$"),
                Cut::Matches("[一-龥ࠀ-一가-\u{d7ff}]+"),
                Cut::Matches(r"\p{N}+"),
            ],
            "deepseek-coder" => &[
                Cut::Matches(r"[\r\n]"),
                Cut::Matches(r"\s?\p{L}+"),
                Cut::Matches(r"\s?\p{P}+"),
                Cut::Matches("[一-龥ࠀ-一가-\u{d7ff}]+"),
                DIGIT,
            ],
            "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => &DEEPSEEK3,
            "bloom" | "poro-chat" | "gpt3-finnish" => &[BLOOM],
            "viking" => &[BLOOM, DIGIT],
            "chameleon" => &[
                Cut::Matches("<sentinel:[0-9]+>"),
                Cut::Matches("IMGIMG[A-I]{1,4}Z"),
                Cut::Matches(r"[\t\n]|    |  "),
                DIGIT,
                Cut::Matches(r"[\p{P}!-/:-@\[-`{-~]"),
                GPT2,
            ],
            "tiny_aya" | "cohere2moe" => &[Cut::Thousands { isolated: true }, O200K],
            "superbpe" => &[Cut::Matches(r"\p{N}+"), Cut::Thousands { isolated: false }],
            "bailingmoe" | "bailingmoe2" | "llada-moe" => &[Cut::Words(
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]",
            )],
            "seed-coder" => &[Cut::Words(concat!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
                r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+",
            ))],
            "minicpm5" => &[Cut::Matches(r"\p{N}{1,3}"), LLAMA3],
            "laguna" => &[LINES, QWEN2],
            "exaone-moe" => &[Cut::Words(concat!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|",
                r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]",
            ))],
            "youtu" => &[
                Cut::Matches(
                    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u{303f}︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u{3040}-ゟ゠-ヿ]+",
                ),
                Cut::Words(concat!(
                    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
                    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
                    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
                )),
            ],
            "kimi-k2" => &[Cut::Words(concat!(
                r"\p{Han}+|[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]*",
                r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
                r"[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]+",
                r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
                r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
            ))],
            "gemma4" | "sarvam-moe" | "granite-embed-multi-311m" => &[LINES],
            _ => return None,
        };
        let llama3 = matches!(
            name,
            "llama3"
                | "llama-v3"
                | "llama-bpe"
                | "falcon3"
                | "falcon-h1"
                | "pixtral"
                | "midm-2.0"
                | "lfm2"
                | "jina-v5-nano"
        );
        Some(Family {
            stages,
            words_first: llama3
                || matches!(name, "tekken" | "minicpm5" | "youtu" | "granite-embed-multi-97m"),
            adds_bos: llama3
                || matches!(name, "tekken" | "chameleon" | "gemma4" | "granite-embed-multi-311m"),
            metaspace: matches!(name, "gemma4" | "sarvam-moe" | "granite-embed-multi-311m"),
            composes: matches!(name, "qwen2" | "qwen35" | "command-r" | "mpt" | "olmo" | "modern-bert"),
        })
    }
}

impl PreTokenizer {
    pub(crate) fn new(family: &Family) -> Result<PreTokenizer, Error> {
        let compile = |patterns: &[&str]| {
            Regex::new_many(patterns).map(Stage::Regex).map_err(|e| Error::Pattern { reason: e.to_string() })
        };
        let stages = family.stages.iter().map(|cut| match *cut {
            Cut::Matches(pattern) => compile(&[pattern]),
            Cut::Words(pattern) => compile(&[pattern, r"\s+"]),
            Cut::Thousands { isolated } => Ok(Stage::Thousands { isolated }),
        });
        Ok(PreTokenizer { stages: stages.collect::<Result<_, _>>()? })
    }

    /// The words of `text`, in order, covering all of it.
    pub(crate) fn words<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = vec![text];
        for stage in &self.stages {
            let mut finer = Vec::with_capacity(pieces.len());
            for piece in pieces {
                match stage {
                    Stage::Regex(regex) => cut_at_matches(regex, piece, &mut finer),
                    Stage::Thousands { isolated } => cut_thousands(piece, *isolated, &mut finer),
                }
            }
            pieces = finer;
        }
        pieces
    }
}

fn cut_at_matches<'t>(regex: &Regex, text: &'t str, pieces: &mut Vec<&'t str>) {
    let mut done = 0;
    let mut input = regex_automata::Input::new(text);
    while let Some(found) = regex.search(&input) {
        let mut end = found.end();
        if found.pattern().as_usize() == 1 && end < text.len() {
            // A run of whitespace before a word: its last character goes with the word, unless it is alone.
            let last = text[..end].char_indices().next_back().map_or(0, |(at, _)| at);
            if last > found.start() {
                end = last;
            }
        }
        if done < found.start() {
            pieces.push(&text[done..found.start()]);
        }
        if found.start() < end {
            pieces.push(&text[found.start()..end]);
        }
        done = end;
        input.set_start(end);
    }
    if done < text.len() {
        pieces.push(&text[done..]);
    }
}

fn cut_thousands<'t>(text: &'t str, isolated: bool, pieces: &mut Vec<&'t str>) {
    // `\d` of the originals is Unicode's decimal digits; only ASCII ones are written in thousands.
    let bytes = text.as_bytes();
    let mut done = 0;
    let mut push = |from: usize, to: usize| {
        if from < to {
            pieces.push(&text[from..to]);
        }
    };
    let mut at = 0;
    while at < bytes.len() {
        if !bytes[at].is_ascii_digit() {
            at += 1;
            continue;
        }
        let run = bytes[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let end = at + run;
        let goes_on = text[end..].chars().next().is_some_and(|c| c.is_alphanumeric() || c == '_');
        if !(isolated && goes_on) {
            let first = if run % 3 == 0 { 3.min(run) } else { run % 3 };
            if isolated || run % 3 == 0 {
                push(done, at);
                done = at;
            }
            let mut cut = at + first;
            while cut < end {
                push(done, cut);
                done = cut;
                cut += 3;
            }
            if isolated {
                push(done, end);
                done = end;
            }
        }
        at = end;
    }
    push(done, text.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 70] = [
        "default",
        "gpt-2",
        "phi-2",
        "jina-es",
        "jina-de",
        "jina-v1-en",
        "jina-v2-es",
        "jina-v2-de",
        "jina-v2-code",
        "roberta-bpe",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "modern-bert",
        "exaone4",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "starcoder",
        "refact",
        "command-r",
        "smollm",
        "codeshell",
        "exaone",
        "minerva-7b",
        "mellum2",
        "falcon",
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
        "dbrx",
        "smaug-bpe",
        "glm4",
        "chatglm-bpe",
        "qwen2",
        "deepseek-r1-qwen",
        "kormo",
        "megrez",
        "stablelm2",
        "hunyuan",
        "grok-2",
        "qwen35",
        "gpt-4o",
        "llama4",
        "tekken",
        "deepseek-llm",
        "deepseek-coder",
        "deepseek-v3",
        "hunyuan-dense",
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
        "gemma4",
    ];

    fn words(name: &str, text: &str) -> Vec<String> {
        let family = Family::named(name).unwrap_or_else(|| panic!("{name} is not known"));
        let pre = PreTokenizer::new(&family).unwrap();
        pre.words(text).into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn every_known_pattern_compiles_and_covers_the_text() {
        let text =
            "Hello,  wörld's  1234567 \r\n\n\t東京タワー 가나 (x+y)=½ <sentinel:3> I'M\u{a0}\u{85} 🙂 end  ";
        for name in NAMES {
            let words = words(name, text);
            assert_eq!(words.concat(), text, "{name}");
            assert!(words.iter().all(|word| !word.is_empty()), "{name}");
        }
    }

    #[test]
    fn an_unknown_name_is_no_family() {
        assert_eq!(Family::named("gpt-5000"), None);
        assert_eq!(Family::named(""), None);
    }

    #[test]
    fn words_are_cut_as_each_family_does() {
        let check =
            |name: &str, text: &str, want: &[&str]| assert_eq!(words(name, text), want, "{name} {text:?}");
        check("gpt-2", "I'm  12 a\n\nb  ", &["I", "'m", " ", " 12", " a", "\n", "\n", "b", "  "]);
        check("smollm", "a 123", &["a", " ", "1", "2", "3"]);
        check("llama3", "I'M 12345\n\n  b", &["I", "'M", " ", "123", "45", "\n\n", " ", " b"]);
        check("qwen2", "x=12;\n", &["x", "=", "1", "2", ";\n"]);
        check("gpt-4o", "HelloWorld's", &["Hello", "World's"]);
        check("tiny_aya", "1234567 1234x", &["1", "234", "567", " ", "123", "4", "x"]);
        check("superbpe", "a 1234567", &["a ", "1", "234", "567"]);
    }

    #[test]
    fn a_megabyte_of_spaces_is_cut_in_linear_time() {
        let text = " ".repeat(1 << 20) + "x";
        assert_eq!(words("llama3", &text).len(), 2);
    }
}
