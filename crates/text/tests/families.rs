//! What each family of vocabularies does, on vocabularies small enough to follow by hand.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says what it skips"
)]

mod support;

use fornax_text::{Chat, ChatTemplate, Error, Snippet, Special, Tokenizer};
use serde_json::json;
use support::{BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary};

/// A SentencePiece vocabulary: pieces with scores (higher joins first) after the usual three and four bytes.
fn spm(pieces: &[(&str, f32)], change: impl FnOnce(Vocabulary) -> Vocabulary) -> Result<Tokenizer, Error> {
    let mut tokens = vec![("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)];
    tokens.extend([
        ("<0xC3>", BYTE),
        ("<0xA9>", BYTE),
        ("<0x0A>", BYTE),
        ("<|end|>", CONTROL),
        ("[[", USER_DEFINED),
    ]);
    let mut scores = vec![0.0; tokens.len()];
    tokens.extend(pieces.iter().map(|&(piece, _)| (piece, NORMAL)));
    scores.extend(pieces.iter().map(|&(_, score)| score));
    let vocabulary = Vocabulary::default()
        .str("tokenizer.ggml.model", "llama")
        .tokens(&tokens)
        .f32s("tokenizer.ggml.scores", &scores);
    change(vocabulary).tokenizer()
}

const PIECES: [(&str, f32); 12] = [
    ("▁", -9.0),
    ("a", -9.0),
    ("b", -9.0),
    ("▁a", -2.0),
    ("ab", -1.0),
    ("▁ab", -3.0),
    ("<", -9.0),
    ("s", -9.0),
    (">", -9.0),
    ("s>", -1.0),
    ("<s", -1.5),
    ("▁▁", -4.0),
];

fn check(tokenizer: &Tokenizer, text: &str, special: Special, want: &[&str]) {
    let tokens = tokenizer.encode(text, special).unwrap();
    let got: Vec<String> = tokens.iter().map(|&id| tokenizer.piece(id)).collect();
    assert_eq!(got, want, "{text:?} {special:?}");
}

#[test]
fn sentencepiece_joins_by_score_and_spells_the_rest_in_bytes() {
    let tokenizer = spm(&PIECES, |v| v).unwrap();
    check(&tokenizer, "ab", Special::AsText, &[" ab"]);
    check(&tokenizer, "a b", Special::AsText, &[" a", " ", "b"]);
    check(&tokenizer, "aé", Special::AsText, &[" a", "\u{fffd}", "\u{fffd}"]);
    check(&tokenizer, "", Special::AsText, &[]);
    // A byte that no token spells is unknown, not lost.
    assert_eq!(tokenizer.encode("x", Special::AsText).unwrap().last(), Some(&0));
    assert_eq!(tokenizer.decode(&tokenizer.encode("a é\n", Special::AsText).unwrap()), "a é\n");
}

#[test]
fn sentencepiece_text_never_joins_into_control_or_byte_tokens() {
    let tokenizer = spm(&PIECES, |v| v).unwrap();
    check(&tokenizer, "<s>", Special::AsText, &[" ", "<", "s>"]);
    check(&tokenizer, "<s>", Special::Parse, &["<s>"]);
    check(&tokenizer, "a[[b", Special::AsText, &[" a", "[[", " ", "b"]);
}

#[test]
fn sentencepiece_prefixes_a_space_where_the_file_says_so() {
    let without = spm(&PIECES, |v| v.bool("tokenizer.ggml.add_space_prefix", false)).unwrap();
    check(&without, "ab", Special::AsText, &["ab"]);
    assert_eq!(without.decode(&without.encode(" ab", Special::AsText).unwrap()), " ab");
    let tight = spm(&PIECES, |v| v.bool("tokenizer.ggml.remove_extra_whitespaces", true)).unwrap();
    check(&tight, "  a   b ", Special::AsText, &[" a", " ", "b"]);
}

#[test]
fn phi_3_markers_swallow_the_whitespace_after_them() {
    let phi = spm(&PIECES, |v| v.str("general.architecture", "phi3")).unwrap();
    check(&phi, "<|end|>\n a<s> a", Special::Parse, &["<|end|>", " a", "<s>", " ", " a"]);
    let llama = spm(&PIECES, |v| v).unwrap();
    check(&llama, "<|end|>\na", Special::Parse, &["<|end|>", " ", "\n", "a"]);
}

/// A byte-level vocabulary: all bytes, `he`, `hel`, `▁he`, two control tokens, and the merges for these.
fn bpe(change: impl FnOnce(Vocabulary) -> Vocabulary) -> Result<Tokenizer, Error> {
    let printable = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff).map(|c| char::from_u32(c).unwrap());
    let bytes: Vec<String> =
        printable.chain((0x100..=0x143).map(|c| char::from_u32(c).unwrap())).map(String::from).collect();
    let mut tokens: Vec<(&str, i32)> = bytes.iter().map(|byte| (byte.as_str(), NORMAL)).collect();
    tokens.extend([("he", NORMAL), ("hel", NORMAL), ("Ġhe", NORMAL), ("lo", NORMAL), ("hello", NORMAL)]);
    tokens.extend([("<|im_end|>", CONTROL), ("<|bos|>", CONTROL), ("</s>", NORMAL), ("<x>", USER_DEFINED)]);
    let vocabulary = Vocabulary::default()
        .str("tokenizer.ggml.model", "gpt2")
        .tokens(&tokens)
        .strings("tokenizer.ggml.merges", &["h e", "Ġ he", "he l", "l o"])
        .u32("tokenizer.ggml.bos_token_id", 262)
        .u32("tokenizer.ggml.eos_token_id", 261);
    change(vocabulary).tokenizer()
}

#[test]
fn byte_pairs_join_by_rank() {
    let tokenizer = bpe(|v| v.str("tokenizer.ggml.pre", "gpt-2")).unwrap();
    check(&tokenizer, "hello hello", Special::AsText, &["hel", "lo", " he", "l", "lo"]);
    check(&tokenizer, "<|im_end|><x>", Special::Parse, &["<|im_end|>", "<x>"]);
    check(&tokenizer, "|im_end|><x>", Special::Parse, &["|", "i", "m", "_", "e", "n", "d", "|", ">", "<x>"]);
    assert!(
        tokenizer.encode("<|im_end|>", Special::AsText).unwrap().iter().all(|&id| !tokenizer.is_control(id))
    );
}

#[test]
fn llama_3_looks_for_whole_words_before_merging() {
    let tokenizer = bpe(|v| v.str("tokenizer.ggml.pre", "llama-bpe")).unwrap();
    check(&tokenizer, "hello hello", Special::AsText, &["hello", " he", "l", "lo"]);
}

#[test]
fn composing_families_see_one_character_where_two_were_written() {
    let tokens = |pre: &str| {
        bpe(|v| v.str("tokenizer.ggml.pre", pre)).unwrap().encode("e\u{301}", Special::AsText).unwrap()
    };
    let tokenizer = bpe(|v| v.str("tokenizer.ggml.pre", "qwen2")).unwrap();
    assert_eq!(tokenizer.decode(&tokens("qwen2")), "é");
    assert_eq!(tokenizer.decode(&tokens("gpt-2")), "e\u{301}");
}

#[test]
fn bos_comes_exactly_once() {
    let llama = bpe(|v| v.str("tokenizer.ggml.pre", "llama-bpe")).unwrap();
    assert!(llama.add_bos());
    let bos = llama.bos().unwrap();
    let starts = |tokens: &[u32]| tokens.iter().take_while(|&&id| id == bos).count();
    assert_eq!(starts(&llama.encode("a", Special::Parse).unwrap()), 0);
    assert_eq!(starts(&llama.encode_prompt("a", Special::AsText).unwrap()), 1);
    assert_eq!(starts(&llama.encode_prompt("<|bos|>a", Special::Parse).unwrap()), 1);
    assert_eq!(starts(&llama.encode_prompt("", Special::AsText).unwrap()), 1);
    for source in ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"] {
        let chat = Chat::new(vec![json!({"role": "user", "content": "a"})]);
        let prompt = ChatTemplate::new(source).unwrap().render(&chat, &llama).unwrap();
        assert_eq!(starts(&llama.encode_chat(&prompt).unwrap()), 1, "{source}");
    }
    let told = bpe(|v| v.str("tokenizer.ggml.pre", "llama-bpe").bool("tokenizer.ggml.add_bos_token", false))
        .unwrap();
    assert!(!told.add_bos());
    assert_eq!(starts(&told.encode_prompt("a", Special::AsText).unwrap()), 0);
}

#[test]
fn all_end_tokens_are_known_and_text_is_none_of_them() {
    let tokenizer =
        bpe(|v| v.str("tokenizer.ggml.pre", "gpt-2").u32("tokenizer.ggml.eot_token_id", 262)).unwrap();
    // Declared as EOS, declared as end of turn; `</s>` is a plain word of this vocabulary.
    assert_eq!(tokenizer.end_tokens(), [261, 262]);
    let spm = spm(&PIECES, |v| v).unwrap();
    assert_eq!(spm.end_tokens(), [2, 6], "EOS by default, <|end|> by its name");
}

#[test]
fn word_pieces_are_found_longest_first_and_marked_at_both_ends() {
    let tokens = [
        ("[PAD]", CONTROL),
        ("[UNK]", CONTROL),
        ("[CLS]", CONTROL),
        ("[SEP]", CONTROL),
        ("▁walk", NORMAL),
        ("ing", NORMAL),
        ("▁,", NORMAL),
    ];
    let tokenizer = Vocabulary::default()
        .str("tokenizer.ggml.model", "bert")
        .tokens(&tokens)
        .u32("tokenizer.ggml.cls_token_id", 2)
        .u32("tokenizer.ggml.seperator_token_id", 3)
        .u32("tokenizer.ggml.unknown_token_id", 1)
        .tokenizer()
        .unwrap();
    check(&tokenizer, "Walking, zzz", Special::AsText, &[" walk", "ing", " ,", "[UNK]"]);
    assert_eq!(tokenizer.encode_prompt("walk", Special::AsText).unwrap(), [2, 4, 3]);
    assert_eq!(tokenizer.decode(&[4, 5, 4]), "walking walk");
    assert!(!tokenizer.encode("[SEP]", Special::AsText).unwrap().contains(&3));
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let refused = |result: Result<Tokenizer, Error>, part: &str| {
        let message = result.map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(part), "{message:?} should name {part:?}");
    };
    refused(bpe(|v| v.str("tokenizer.ggml.pre", "gpt-5000")), "gpt-5000");
    refused(bpe(|v| v), "tokenizer.ggml.pre");
    refused(
        Vocabulary::default().str("tokenizer.ggml.model", "rwkv").tokens(&[("a", NORMAL)]).tokenizer(),
        "'rwkv'",
    );
    refused(Vocabulary::default().tokenizer(), "tokenizer.ggml.model");
    refused(spm(&PIECES, |v| v.u32("tokenizer.ggml.eos_token_id", 9999)), "9999");
    let short = Vocabulary::default()
        .str("tokenizer.ggml.model", "llama")
        .tokens(&[("a", NORMAL), ("b", NORMAL)])
        .f32s("tokenizer.ggml.scores", &[0.0]);
    refused(short.tokenizer(), "tokenizer.ggml.scores");
    let merge = Vocabulary::default()
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "gpt-2")
        .tokens(&[("a", NORMAL), ("b", NORMAL)])
        .strings("tokenizer.ggml.merges", &["a b"]);
    refused(merge.tokenizer(), "'a b'");
}

#[test]
fn word_pieces_are_those_of_bert_s_own_tokenizer() {
    let made = support::json("crates/text/tests/wordpiece.json");
    let words: Vec<&str> =
        made["vocabulary"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    // As GGUF spells them: word starts carry a mark, continuations nothing.
    let spelled: Vec<String> = words
        .iter()
        .map(|word| match word.strip_prefix("##") {
            Some(rest) => rest.to_owned(),
            None if word.len() > 1 && word.starts_with('[') => (*word).to_owned(),
            None => format!("▁{word}"),
        })
        .collect();
    let kind = |text: &String| if text.len() > 1 && text.starts_with('[') { CONTROL } else { NORMAL };
    let tokens: Vec<(&str, i32)> = spelled.iter().map(|text| (text.as_str(), kind(text))).collect();
    let tokenizer = |lowercase: bool| {
        Vocabulary::default()
            .str("tokenizer.ggml.model", "bert")
            .tokens(&tokens)
            .bool("tokenizer.ggml.normalizer.lowercase", lowercase)
            .u32("tokenizer.ggml.unknown_token_id", 1)
            .u32("tokenizer.ggml.cls_token_id", 2)
            .u32("tokenizer.ggml.seperator_token_id", 3)
            .tokenizer()
            .unwrap()
    };
    let (lower, cased) = (tokenizer(true), tokenizer(false));
    for case in made["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let tokenizer = if case["lowercase"] == true { &lower } else { &cased };
        let wanted: Vec<u32> = case["ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
            .collect();
        let got = tokenizer.encode(text, Special::AsText).unwrap();
        let pieces = |ids: &[u32]| ids.iter().map(|&id| words[id as usize]).collect::<Vec<_>>();
        assert_eq!(pieces(&got), pieces(&wanted), "{text:?}, lowercase: {}", case["lowercase"]);
    }
}

#[test]
fn every_family_s_answers_end_where_its_models_end_them() {
    let check = |family: &str, eos: &str, controls: &[&str], ends: &[&str]| {
        let printable = (0x21..=0x7e).map(|c| char::from(c).to_string()).collect::<Vec<_>>();
        let mut tokens: Vec<(&str, i32)> = printable.iter().map(|byte| (byte.as_str(), NORMAL)).collect();
        tokens.extend(controls.iter().map(|&control| (control, CONTROL)));
        let eos = u32::try_from(tokens.iter().position(|&(token, _)| token == eos).unwrap()).unwrap();
        let tokenizer = Vocabulary::default()
            .str("tokenizer.ggml.model", "gpt2")
            .str("tokenizer.ggml.pre", "gpt-2")
            .tokens(&tokens)
            .strings("tokenizer.ggml.merges", &[])
            .u32("tokenizer.ggml.eos_token_id", eos)
            .tokenizer()
            .unwrap();
        let mut got: Vec<String> = tokenizer.end_tokens().iter().map(|&id| tokenizer.piece(id)).collect();
        let mut wanted = ends.to_vec();
        got.sort();
        wanted.sort_unstable();
        assert_eq!(got, wanted, "{family}");
    };
    // What the models' own files list (generation_config.json), whichever single one of them a GGUF file calls EOS.
    check("llama2, mistral, mixtral", "</s>", &["<s>", "</s>", "<unk>"], &["</s>"]);
    let llama3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>"];
    check("llama3", "<|eot_id|>", &llama3, &["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]);
    check("llama3", "<|end_of_text|>", &llama3, &["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]);
    let qwen = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    check("qwen2, qwen3, smollm2", "<|endoftext|>", &qwen, &["<|endoftext|>", "<|im_end|>"]);
    let phi3 = ["<s>", "<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"];
    check("phi3", "<|endoftext|>", &phi3, &["<|endoftext|>", "<|end|>"]);
    let gemma = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"];
    check("gemma2, gemma3", "<eos>", &gemma, &["<eos>", "<end_of_turn>"]);
    let harmony = [
        "<|startoftext|>",
        "<|endoftext|>",
        "<|return|>",
        "<|constrain|>",
        "<|channel|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|call|>",
    ];
    // `<|end|>` only ends a message of an answer that goes on.
    check("gpt-oss", "<|return|>", &harmony, &["<|return|>", "<|call|>", "<|endoftext|>"]);
    check("gpt2, olmo2", "<|endoftext|>", &["<|endoftext|>"], &["<|endoftext|>"]);
    let granite = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"];
    check("granite", "<|end_of_text|>", &granite, &["<|end_of_text|>"]);
    let deepseek = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"];
    check("deepseek", "<｜end▁of▁sentence｜>", &deepseek, &["<｜end▁of▁sentence｜>"]);
}

/// A vocabulary of bytes with these control tokens, and a start that goes before every prompt.
fn bytes_with(controls: &[&str]) -> Tokenizer {
    let printable = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff).chain(0x100..=0x143);
    let bytes: Vec<String> = printable.map(|c| char::from_u32(c).unwrap().to_string()).collect();
    let mut tokens: Vec<(&str, i32)> = bytes.iter().map(|byte| (byte.as_str(), NORMAL)).collect();
    tokens.push(("<BOS>", CONTROL));
    tokens.extend(controls.iter().map(|&control| (control, CONTROL)));
    Vocabulary::default()
        .str("general.architecture", "llama")
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "gpt-2")
        .tokens(&tokens)
        .strings("tokenizer.ggml.merges", &[])
        .u32("tokenizer.ggml.bos_token_id", 256)
        .u32("tokenizer.ggml.eos_token_id", 256)
        .bool("tokenizer.ggml.add_bos_token", true)
        .tokenizer()
        .unwrap()
}

/// The prompts as their makers published them, read as a template's text would be.
#[test]
fn a_gap_is_asked_for_as_each_family_was_trained() {
    let check = |controls: &[&str], published: &str| {
        let tokenizer = bytes_with(controls);
        let asked = tokenizer.encode_infill("def f(a):\n", "\nf(1) <fim_suffix>", &[]).unwrap().unwrap();
        let text = published.replace("{before}", "def f(a):\n");
        let (front, rest) = text.split_once("{behind}").unwrap();
        // Control tokens that a user spells out are text.
        let mut wanted = tokenizer.encode_prompt(front, Special::Parse).unwrap();
        wanted.extend(tokenizer.encode("\nf(1) <fim_suffix>", Special::AsText).unwrap());
        wanted.extend(tokenizer.encode(rest, Special::Parse).unwrap());
        assert_eq!(asked, wanted, "{published}");
        assert_eq!(asked[0], 256, "{published}");
    };
    check(
        &["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"],
        "<|fim_prefix|>{before}<|fim_suffix|>{behind}<|fim_middle|>",
    );
    check(
        &["<fim_prefix>", "<fim_middle>", "<fim_suffix>"],
        "<fim_prefix>{before}<fim_suffix>{behind}<fim_middle>",
    );
    check(
        &["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"],
        "<｜fim▁begin｜>{before}<｜fim▁hole｜>{behind}<｜fim▁end｜>",
    );
    check(
        &["<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"],
        "<|code_prefix|>{before}<|code_suffix|>{behind}<|code_middle|>",
    );
    check(&["[PREFIX]", "[MIDDLE]", "[SUFFIX]"], "[SUFFIX]{behind}[PREFIX]{before}");
    let none = bytes_with(&["<|fim_prefix|>", "<|fim_suffix|>"]);
    assert_eq!(none.encode_infill("a", "b", &[]).unwrap(), None);
}

#[test]
fn other_files_stand_before_a_gap_as_files_of_a_repository() {
    let controls = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|repo_name|>", "<|file_sep|>"];
    let tokenizer = bytes_with(&controls);
    let others = [("x.py", "x = 1"), ("y.py", "y = 2")]
        .map(|(name, text)| Snippet { name: name.to_owned(), text: text.to_owned() });
    let asked = tokenizer.encode_infill("a", "b", &others).unwrap().unwrap();
    let published = "<|repo_name|>repository\n<|file_sep|>x.py\nx = 1<|file_sep|>y.py\ny = 2\
                     <|file_sep|>this file\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>";
    assert_eq!(asked, tokenizer.encode_prompt(published, Special::Parse).unwrap());
}
