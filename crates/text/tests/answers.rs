//! Answers in every dialect, read whole and in pieces.
//!
//! The transcripts here are written by hand as the models' own templates show their format. The last test renders an
//! assistant's message with templates of other projects (fetched, never committed) and reads it back.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says what it skips"
)]

mod support;

use std::{fmt::Write as _, sync::Arc};

use fornax_text::{Chat, ChatTemplate, Delta, Dialect, Reader, Tool};
use proptest::prelude::*;
use serde_json::{Value, json};
use support::skip;

fn tools() -> Arc<[Tool]> {
    let object = |properties: Value| json!({"type": "object", "properties": properties});
    let weather = object(
        json!({"city": {"type": "string", "description": "Where."}, "days": {"type": "integer", "description": "How long."}}),
    );
    let time = object(json!({"zone": {"type": "string", "description": "Where."}}));
    Arc::new([
        Tool { name: "get_weather".to_owned(), parameters: weather },
        Tool { name: "get_time".to_owned(), parameters: time },
    ])
}

/// An answer, its parts joined.
#[derive(Debug, Default, PartialEq)]
struct Whole {
    reasoning: String,
    content: String,
    /// Names and arguments.
    calls: Vec<(String, String)>,
}

impl Whole {
    fn take(&mut self, deltas: Vec<Delta>) {
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => self.reasoning.push_str(&text),
                Delta::Content(text) => self.content.push_str(&text),
                Delta::Call { index, name } => {
                    assert_eq!(index, self.calls.len(), "calls come in order");
                    self.calls.push((name, String::new()));
                }
                Delta::Arguments { index, text } => {
                    assert_eq!(index + 1, self.calls.len(), "arguments belong to the last call");
                    self.calls[index].1.push_str(&text);
                }
            }
        }
    }

    /// With arguments as values, so that white space does not matter.
    fn calls(&self) -> Vec<(&str, Value)> {
        let parsed = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| json!({"not JSON": text}));
        self.calls.iter().map(|(name, arguments)| (name.as_str(), parsed(arguments))).collect()
    }
}

fn read(mut reader: Reader, pieces: &[&str]) -> Whole {
    let mut whole = Whole::default();
    for piece in pieces {
        whole.take(reader.push(piece));
    }
    whole.take(reader.finish());
    assert_eq!(reader.calls(), whole.calls.len());
    whole
}

/// Reads in one piece, in two at every place, and character by character: always the same.
fn read_every_way(reader: &Reader, text: &str) -> Whole {
    let whole = read(reader.clone(), &[text]);
    for (at, _) in text.char_indices() {
        let (front, back) = text.split_at(at);
        assert_eq!(read(reader.clone(), &[front, back]), whole, "cut at {at} of {text:?}");
    }
    let letters: Vec<String> = text.chars().map(String::from).collect();
    let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
    assert_eq!(read(reader.clone(), &letters), whole, "{text:?} by letters");
    whole
}

/// A template's text that gives its family away, the prompt's end, and an answer.
struct Transcript {
    family: &'static str,
    template: &'static str,
    prompt: &'static str,
    answer: &'static str,
}

/// Of each: thinking where the family has it, "Hello.", the weather of Köln "x" for 3 days, the time of CET.
const TRANSCRIPTS: &[Transcript] = &[
    Transcript {
        family: "hermes",
        template: "<think> <tool_call>",
        prompt: "<|im_start|>assistant\n",
        answer: "<think>\nWhy?\n</think>\n\nHello.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Köln \\\"x\\\"\", \"days\": 3}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>",
    },
    Transcript {
        family: "hermes",
        template: "<think> <tool_call>",
        prompt: "<|im_start|>assistant\n<think>\n",
        answer: "Why?\n</think>\n\nHello.\n<tool_call>\n{\"arguments\": {\"city\": \"Köln \\\"x\\\"\", \"days\": 3}, \"name\": \"get_weather\"}\n</tool_call><tool_call>{\"name\": \"get_time\", \"arguments\": \"{\\\"zone\\\": \\\"CET\\\"}\"}</tool_call>\n",
    },
    Transcript {
        family: "muse-glimmer",
        template: "<|start|>assistant to=self<|message|> <atem:invoke name=",
        prompt: "<|start|>assistant",
        answer: " to=self<|message|>Why?<|eom|><|start|>assistant to=user<|message|>Hello.<|eom|>\
            <|start|>assistant to=get_weather<|message|><atem:function_calls>\n<atem:invoke name=\"get_weather\">\n\
            <atem:parameter name=\"city\">Köln \"x\"</atem:parameter>\n<atem:parameter name=\"days\">3</atem:parameter>\n\
            </atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=get_time<|message|><atem:function_calls>\n\
            <atem:invoke name=\"get_time\">\n<atem:parameter name=\"zone\">CET</atem:parameter>\n</atem:invoke>\n\
            </atem:function_calls><|eot|>",
    },
    Transcript {
        family: "harmony",
        template: "<|channel|> <|message|> commentary",
        prompt: "<|start|>assistant",
        answer: "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>commentary<|message|>Hello.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Köln \\\"x\\\"\", \"days\": 3}<|call|><|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{\"zone\": \"CET\"}",
    },
    Transcript {
        family: "llama-3",
        template: "{\"name\": function name, \"parameters\": ",
        prompt: "",
        answer: "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Köln \\\"x\\\"\", \"days\": 3}}; {\"name\": \"get_time\", \"parameters\": {\"zone\": \"CET\"}}",
    },
    Transcript {
        family: "mistral",
        template: "[TOOL_CALLS]",
        prompt: "[/INST]",
        answer: "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Köln \\\"x\\\"\", \"days\": 3}, \"id\": \"123456789\"}, {\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}, \"id\": \"abcdefghi\"}]",
    },
    Transcript {
        family: "mistral-v11",
        template: "[THINK] [TOOL_CALLS] [ARGS]",
        prompt: "[/INST]",
        answer: "[THINK]Why?[/THINK]Hello.[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{\"city\": \"Köln \\\"x\\\"\", \"days\": 3}[TOOL_CALLS]get_time[ARGS]{\"zone\": \"CET\"}",
    },
    Transcript {
        family: "deepseek-v3.1",
        template: "<think> <｜tool▁call▁begin｜> <｜tool▁sep｜>",
        prompt: "<｜Assistant｜><think>",
        answer: "Why?</think>Hello.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Köln \\\"x\\\"\", \"days\": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{\"zone\": \"CET\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    },
    Transcript {
        family: "deepseek-r1",
        template: "<think> <｜tool▁call▁begin｜> ```json",
        prompt: "<｜Assistant｜><think>\n",
        answer: "Why?\n</think>\n\nHello.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Köln \\\"x\\\"\", \"days\": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{\"zone\": \"CET\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    },
    Transcript {
        family: "deepseek-dsml",
        template: "<think> <｜DSML｜ parameter name=",
        prompt: "<think>",
        answer: "Why?</think>Hello.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Köln \"x\"</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"get_time\">\n<｜DSML｜parameter name=\"zone\" string=\"true\">CET</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    },
    Transcript {
        family: "kimi-k2",
        template: "<think> <|tool_call_argument_begin|>",
        prompt: "",
        answer: "<think>Why?</think>Hello.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Köln \\\"x\\\"\", \"days\": 3}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{\"zone\": \"CET\"}<|tool_call_end|><|tool_calls_section_end|>",
    },
    Transcript {
        family: "qwen3-coder",
        template: "<tool_call> <function= <parameter=",
        prompt: "<|im_start|>assistant\n",
        answer: "Hello.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln \"x\"\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>",
    },
    // Qwen3.5 and Nemotron 3, whose templates begin the thought.
    Transcript {
        family: "qwen3-coder",
        template: "<think> <tool_call> <function= <parameter=",
        prompt: "<|im_start|>assistant\n<think>\n",
        answer: "Why?\n</think>\n\nHello.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln \"x\"\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>",
    },
    // Nemotron Nano 2.
    Transcript {
        family: "nemotron-v2",
        template: "<think> <TOOLCALL>",
        prompt: "<SPECIAL_11>Assistant\n<think>\n",
        answer: "Why?\n</think>\n\nHello.\n\n<TOOLCALL>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Köln \\\"x\\\"\", \"days\": 3}}, {\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}}]</TOOLCALL>",
    },
    // Granite 4.
    Transcript {
        family: "hermes",
        template: "<|start_of_role|>available_tools <tool_call>",
        prompt: "<|start_of_role|>assistant<|end_of_role|>",
        answer: "Hello.<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Köln \\\"x\\\"\", \"days\": 3}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>",
    },
    Transcript {
        family: "glm",
        template: "<think> <tool_call> <arg_key>",
        prompt: "<|assistant|>",
        answer: "\n<think>Why?</think>\nHello.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln \"x\"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time<arg_key>zone</arg_key><arg_value>CET</arg_value></tool_call>",
    },
    Transcript {
        family: "minimax-m2",
        template: "<think> minimax:tool_call",
        prompt: "]~b]ai\n<think>\n",
        answer: "Why?\n</think>\n\nHello.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Köln \"x\"</parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"get_time\">\n<parameter name=\"zone\">CET</parameter>\n</invoke>\n</minimax:tool_call>",
    },
    Transcript {
        family: "cohere",
        template: "<|START_THINKING|> <|START_ACTION|>",
        prompt: "<|CHATBOT_TOKEN|>",
        answer: "<|START_THINKING|>Why?<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"get_weather\", \"parameters\": {\"city\": \"Köln \\\"x\\\"\", \"days\": 3}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"get_time\", \"parameters\": {\"zone\": \"CET\"}}\n]<|END_ACTION|>",
    },
    Transcript {
        family: "granite-3",
        template: "<think> <response> <|tool_call|>",
        prompt: "<|end_of_role|>",
        answer: "<think>Why?</think><response>Hello.</response><|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Köln \\\"x\\\"\", \"days\": 3}}, {\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}}]",
    },
    Transcript {
        family: "functools",
        template: "functools",
        prompt: "",
        answer: "Hello. functools[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Köln \\\"x\\\"\", \"days\": 3}}, {\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}}]",
    },
    Transcript {
        family: "phi-4",
        template: "<|tool_call|>",
        prompt: "<|assistant|>",
        answer: "Hello.<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Köln \\\"x\\\"\", \"days\": 3}}, {\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}}]<|/tool_call|>",
    },
    Transcript {
        family: "functionary-v3.2",
        template: ">>>all",
        prompt: "assistant\n\n>>>",
        answer: "all\nHello.>>>get_weather\n{\"city\": \"Köln \\\"x\\\"\", \"days\": 3}>>>get_time\n{\"zone\": \"CET\"}",
    },
    Transcript {
        family: "lfm2",
        template: "<think> List of tools: [",
        prompt: "assistant\n",
        answer: "<think>Why?</think>Hello.<|tool_call_start|>[get_weather(city='Köln \"x\"', days=3), get_time(zone='CET')]<|tool_call_end|>",
    },
    Transcript {
        family: "gemma-4",
        template: "<|channel>thought <|tool_call>call:",
        prompt: "<|turn>model\n",
        answer: "<|channel>thought\nWhy?\n<channel|>Hello.<|tool_call>call:get_weather{city:<|\"|>Köln \"x\"<|\"|>,days:3}<tool_call|><|tool_call>call:get_time{zone:<|\"|>CET<|\"|>}<tool_call|>",
    },
];

fn wanted_calls() -> Vec<(&'static str, Value)> {
    vec![("get_weather", json!({"city": "Köln \"x\"", "days": 3})), ("get_time", json!({"zone": "CET"}))]
}

#[test]
fn every_family_is_found_and_read_whole_and_in_pieces() {
    for Transcript { family, template, prompt, answer } in TRANSCRIPTS {
        let dialect = Dialect::of(template);
        assert_eq!(dialect.family(), Some(*family), "{template:?}");
        let whole = read_every_way(&Reader::new(dialect, tools(), prompt), answer);
        assert_eq!(whole.calls(), wanted_calls(), "{family}");
        let said = if answer.contains("Hello.") { "Hello." } else { "" };
        let thought = if answer.contains("Why?") { "Why?" } else { "" };
        assert_eq!((whole.content.as_str(), whole.reasoning.as_str()), (said, thought), "{family}");
    }
}

#[test]
fn without_tools_what_looks_like_a_call_is_text() {
    let text = "See <tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call> there.\n";
    let reader = Reader::new(Dialect::of("<tool_call>"), Arc::new([]), "");
    assert_eq!(read_every_way(&reader, text), Whole { content: text.to_owned(), ..Whole::default() });
}

#[test]
fn what_begins_like_a_call_and_is_none_is_given_as_written() {
    let check = |template: &str, text: &str| {
        let reader = Reader::new(Dialect::of(template), tools(), "");
        assert_eq!(read_every_way(&reader, text), Whole { content: text.to_owned(), ..Whole::default() });
    };
    check("<tool_call>", "The mark <tool_call> opens a call, <tool_ does not.");
    check("<tool_call>", "Yes: <tool_call>\n{\"no name\": 1}\n</tool_call>");
    check("<tool_call>", "Cut: <tool_call>\n{\"na");
    check("{\"name\": function name, \"parameters\": ", "{\"name\": \"Ada\", \"born\": 1815}");
    check("{\"name\": function name, \"parameters\": ", "A set {1, 2}.");
    check("List of tools: [", "So: <|tool_call_start|>not a call<|tool_call_end|>");
}

#[test]
fn a_tool_that_the_model_invents_is_told_as_it_is() {
    let reader = Reader::new(Dialect::of("<tool_call>"), tools(), "");
    let whole = read_every_way(
        &reader,
        "<tool_call>{\"name\": \"fly\", \"arguments\": {\"to\": \"Mars\"}}</tool_call>",
    );
    assert_eq!(whole.calls(), [("fly", json!({"to": "Mars"}))]);
}

#[test]
fn a_call_that_is_cut_keeps_what_was_written_of_it() {
    let mut reader = Reader::new(Dialect::of("<tool_call>"), tools(), "");
    let mut whole = Whole::default();
    whole.take(reader.push("<tool_call>{\"name\": \"get_time\", \"arguments\": {\"zone\": \"C"));
    whole.take(reader.finish());
    assert_eq!(whole.calls, [("get_time".to_owned(), "{\"zone\": \"C".to_owned())]);
    assert_eq!((reader.calls(), reader.calls_complete()), (1, 0));
}

#[test]
fn a_forced_call_is_nothing_but_its_arguments() {
    let dialect = Dialect::of("<tool_call>");
    let whole =
        read_every_way(&Reader::arguments_of(dialect, Arc::new([]), "get_time"), "{\"zone\":\"CET\"}");
    assert_eq!(whole.calls, [("get_time".to_owned(), "{\"zone\":\"CET\"}".to_owned())]);
    let any = read_every_way(
        &Reader::call_of_any(dialect, Arc::new([])),
        "{\"name\":\"get_time\",\"arguments\":{\"zone\":\"CET\"}}",
    );
    assert_eq!(any.calls(), [("get_time", json!({"zone": "CET"}))]);
}

#[test]
fn behind_a_forced_call_others_follow_where_the_format_has_json() {
    let check = |template: &str, rest: Option<&str>, more: &str| {
        let dialect = Dialect::of(template);
        let mut reader = Reader::arguments_of(dialect, tools(), "get_time");
        let mut whole = Whole::default();
        whole.take(reader.push("{\"zone\":\"CET\"}"));
        assert_eq!(reader.call_ended(), rest, "{template}");
        assert_eq!(dialect.call_rest(), rest, "{template}");
        if rest.is_some() {
            whole.take(reader.push(more));
            whole.take(reader.finish());
            let calls = [("get_time", json!({"zone": "CET"})), ("get_time", json!({"zone": "UTC"}))];
            assert_eq!(whole.calls(), calls, "{template}");
            assert_eq!((whole.content.as_str(), reader.calls_complete()), ("", 2), "{template}");
        }
    };
    let call = "{\"name\": \"get_time\", \"arguments\": {\"zone\": \"UTC\"}}";
    let hermes = format!("\n</tool_call>\n<tool_call>\n{call}\n</tool_call>");
    check("<tool_call>", Some("}"), &hermes);
    check("[TOOL_CALLS]", Some("}"), &format!(", {call}]"));
    let named = "<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>";
    let named = format!("{named}{{\"zone\": \"UTC\"}}<|tool_call_end|><|tool_calls_section_end|>");
    check("<|tool_call_begin|> <|tool_call_argument_begin|>", Some(""), &named);
    // Tags are not JSON, and a call of a channel ends the message.
    check("<function= <parameter=", None, "");
    check("<|channel|> <|message|> commentary", None, "");

    // An object that named its tool itself.
    let mut reader = Reader::call_of_any(Dialect::of("<tool_call>"), tools());
    let mut whole = Whole::default();
    whole.take(reader.push(call));
    assert_eq!(reader.call_ended(), Some(""));
    whole.take(reader.push(&hermes));
    assert_eq!((whole.calls.len(), reader.calls_complete()), (2, 2));
    // In the middle of a call there is nothing to go on behind.
    let mut reader = Reader::new(Dialect::of("<tool_call>"), tools(), "");
    reader.push("<tool_call>{\"name\": \"get_time\"");
    assert_eq!(reader.call_ended(), None);
}

#[test]
fn thinking_is_told_apart_from_what_is_said_about_it() {
    let read = |prompt: &str, text: &str| {
        let whole = read_every_way(&Reader::new(Dialect::of("<think>"), Arc::new([]), prompt), text);
        (whole.reasoning, whole.content)
    };
    let pair = |reasoning: &str, content: &str| (reasoning.to_owned(), content.to_owned());
    assert_eq!(read("", "<think>\n a b \n</think>\n\nYes.\n"), pair("a b", "Yes.\n"));
    assert_eq!(read("x<think>\n", "a\n</think>\n\nYes."), pair("a", "Yes."));
    assert_eq!(read("x<think>\n\n</think>\n\n", "Yes."), pair("", "Yes."));
    assert_eq!(
        read("", "A <think> tag is no thought.</think>"),
        pair("", "A <think> tag is no thought.</think>")
    );
    assert_eq!(read("", "<think>cut sho"), pair("cut sho", ""));
    assert_eq!(read("", "  indented\n"), pair("", "  indented\n"));
}

proptest! {
    #[test]
    fn however_an_answer_is_cut_its_parts_are_the_same(
        which in 0..TRANSCRIPTS.len(),
        cuts in prop::collection::vec(0usize..600, 0..8),
    ) {
        let Transcript { template, prompt, answer, .. } = &TRANSCRIPTS[which];
        let reader = Reader::new(Dialect::of(template), tools(), prompt);
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|&at| at < answer.len() && answer.is_char_boundary(at)).collect();
        cuts.extend([0, answer.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|pair| &answer[pair[0]..pair[1]]).collect();
        prop_assert_eq!(read(reader.clone(), &pieces), read(reader, &[answer]));
    }

    #[test]
    fn no_text_is_lost_or_panics(
        which in 0..TRANSCRIPTS.len(),
        parts in prop::collection::vec("[a-z{}<>|\"\\[\\] \n:,]{0,6}|<tool_call>|</tool_call>|<think>|</think>|\\[TOOL_CALLS\\]|\\{\"name\": \"x\"", 0..12),
    ) {
        let Transcript { template, prompt, .. } = &TRANSCRIPTS[which];
        let reader = Reader::new(Dialect::of(template), tools(), prompt);
        let text = parts.concat();
        let pieces: Vec<&str> = parts.iter().map(String::as_str).collect();
        prop_assert_eq!(read(reader.clone(), &pieces), read(reader, &[&text]));
    }
}

/// Where an answer ends, as templates write it behind the assistant's last word.
const ENDS: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<EOS>",
    "<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|>",
    "<seed:eos>",
    "[e~[",
    "<end_of_sentence>",
    "<sep>",
    "<｜end▁of▁sentence｜>",
    "<|end_of_msg|>",
    "<turn|>",
    "<|tool_response>",
    "<｜hy_eos:opensource｜>",
    "<|assistant_end|>",
    "</assistant>",
    "<|role_end|>",
    "<|user|>",
    "<|observation|>",
];

/// The same, where they also stand between parts of an answer.
const LAST_ENDS: &[&str] = &["<|end|>", "<|message_sep|>", "<SPECIAL_12>"];

/// Templates that cannot be asked for two calls and a thought, or do not write calls back, and why.
const LEFT_OUT: &[(&str, &str)] = &[
    ("gemma-3", "knows no tools"),
    ("google-gemma-2-2b-it", "knows no tools"),
    ("microsoft-Phi-3.5-mini-instruct", "knows no tools"),
    ("llama-cpp-rwkv-world", "knows no tools"),
    ("HuggingFaceTB-SmolLM3-3B", "writes no calls back"),
    ("LFM2-8B-A1B", "writes no calls back"),
    ("LFM2.5-Instruct", "writes no calls back"),
    ("ibm-granite-granite-3.3-2B-Instruct", "writes no calls back"),
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "writes no calls back where there is content"),
    ("Kimi-K2-Instruct", "changes a list, which Jinja's own sandbox refuses"),
    ("Kimi-K2-Thinking", "the same"),
];

/// What was rendered as a prompt, and what a model would have written behind it.
fn parted<'a>(prompt: &str, whole: &'a str) -> (&'a str, &'a str) {
    // Where the prompt begins a thought that this answer does not have, both part inside a mark.
    let differ = prompt.char_indices().zip(whole.chars()).find(|((_, a), b)| a != b);
    let same = differ.map_or(prompt.len().min(whole.len()), |((at, _), _)| at);
    let same = whole[..same].trim_end_matches(['<', '[']).len();
    let (prompt, mut answer) = whole.split_at(same);
    // Command R+ is told once more what to do, before it is its turn.
    answer = answer.strip_prefix("CHATBOT_TOKEN|>").unwrap_or(answer);
    for end in ENDS {
        answer = answer.split(end).next().unwrap();
    }
    for end in LAST_ENDS {
        answer = answer.trim_end().strip_suffix(end).unwrap_or(answer);
    }
    (prompt, answer)
}

#[test]
fn calls_that_templates_write_are_read_back() {
    const NAME: &str = "calls_that_templates_write_are_read_back";
    let Some(folder) = support::templates() else {
        return skip(NAME, "FORNAX_TEMPLATES names no folder");
    };
    let tokenizer = support::bytes_tokenizer();
    let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let wanted = wanted_calls();
    let calls = [
        call("123456789", wanted[0].0, wanted[0].1.clone()),
        call("abcdefghi", wanted[1].0, wanted[1].1.clone()),
    ];
    let described: Vec<Value> = tools()
        .iter()
        .map(|tool| json!({"type": "function", "function": {"name": tool.name, "description": "D", "parameters": tool.parameters}}))
        .collect();
    let (mut read, mut wrong) = (0, String::new());
    // For those who go through a whole loop with these templates: what a model would have written, and for how many calls.
    let mut written_by = serde_json::Map::new();
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|ext| ext == "jinja"));
    // Those are out of a test of older templates, most of which know no tools.
    files.retain(|path| !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("source-")));
    files.sort();
    assert!(!files.is_empty(), "no templates");
    for path in files {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let source = std::fs::read_to_string(&path).unwrap();
        let dialect = Dialect::of(&source);
        if LEFT_OUT.iter().any(|(left_out, _)| *left_out == name) {
            continue;
        }
        let template = ChatTemplate::new(&source).unwrap();
        let render = |content: Value, thought: bool, calls: &[Value], as_text: bool| {
            let mut calls = calls.to_vec();
            for call in calls.iter_mut().filter(|_| as_text) {
                call["function"]["arguments"] = json!(call["function"]["arguments"].to_string());
            }
            let mut answer = json!({"role": "assistant", "content": content, "tool_calls": calls});
            if thought {
                answer["reasoning_content"] = json!("REASON.");
                answer["reasoning"] = json!("REASON.");
            }
            let mut chat = Chat::new(vec![json!({"role": "user", "content": "U1"}), answer]);
            chat.tools = described.clone();
            chat.variables.insert("enable_thinking".to_owned(), json!(true));
            chat.variables.insert("functions".to_owned(), json!(json!(described).to_string()));
            chat.variables.insert("datetime".to_owned(), json!("now"));
            let whole = template
                .render(&Chat { add_generation_prompt: false, ..chat.clone() }, &tokenizer)?
                .text()
                .to_owned();
            chat.messages.truncate(1);
            let prompt = template.render(&chat, &tokenizer)?.text().to_owned();
            Ok::<_, fornax_text::Error>((prompt, whole))
        };
        // Some write no content beside calls, some no thought beside content, some but one call.
        let attempts = [
            (json!("CONTENT."), true, 2, false),
            (json!(""), true, 2, false),
            (json!("CONTENT."), false, 2, false),
            (json!("CONTENT."), false, 2, true),
            (json!(""), true, 1, false),
            (Value::Null, false, 1, false),
        ];
        let mut outcome = Err("no attempt rendered".to_owned());
        for (content, thought, count, as_text) in attempts {
            let (prompt, whole) = match render(content, thought, &calls[..count], as_text) {
                Ok(rendered) => rendered,
                Err(error) => {
                    outcome = Err(error.to_string());
                    continue;
                }
            };
            let (began, (prompt, answer)) = (prompt.clone(), parted(&prompt, &whole));
            let whole = read_every_way(&Reader::new(dialect, tools(), prompt), answer);
            let said = if answer.contains("CONTENT.") { "CONTENT." } else { "" };
            let thought = if answer.contains("REASON.") { "REASON." } else { "" };
            let written = wanted.iter().filter(|(name, _)| answer.contains(name)).count();
            let got = (whole.calls(), whole.content.as_str(), whole.reasoning.as_str());
            if written > 0 && got == (wanted[..written].to_vec(), said, thought) {
                outcome = Ok(());
                // A thought that the prompt begins, and this answer has not, a model would end first.
                let thinking = [dialect.is_thinking_after(&began), dialect.is_thinking_after(prompt)];
                let stop = dialect.stop_thinking().unwrap_or_default();
                let ended = if thinking == [true, false] { &*stop } else { "" };
                // And one that the prompt has ended already, it would not go on with.
                let goes_on = answer.split_once(stop.trim()).filter(|_| thinking == [false, true]);
                let (answer, thought) = goes_on.map_or((answer, thought), |(_, answer)| (answer, ""));
                written_by.insert(
                    path.file_name().unwrap().to_string_lossy().into_owned(),
                    json!({"answer": format!("{ended}{answer}"), "calls": written, "content": said, "thought": thought}),
                );
                break;
            }
            outcome = Err(format!("{:?}: {answer:?} was read as {whole:?}", dialect.family()));
        }
        match outcome {
            Ok(()) => read += 1,
            Err(reason) => writeln!(wrong, "{name}: {reason}").unwrap(),
        }
    }
    std::fs::write(folder.join("answers.json"), Value::Object(written_by).to_string()).unwrap();
    println!("Tally {read} templates read back");
    assert!(wrong.is_empty(), "{read} read back, not:\n{wrong}");
}
