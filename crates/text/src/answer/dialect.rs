//! Families of templates: the marks around thinking and around calls of tools.

use super::reader::Tool;

/// How a model writes what it thinks and which tools it calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    pub(super) thinking: Option<&'static Thinking>,
    pub(super) family: Option<&'static Family>,
}

/// The marks around what a model thinks before it answers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Thinking {
    /// What of a template's text gives it away.
    found: &'static str,
    pub(super) open: &'static str,
    pub(super) close: &'static str,
}

/// A way of writing calls.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Family {
    pub(super) name: &'static str,
    /// Texts that a template of the family has, all of them.
    found: &'static [&'static str],
    pub(super) syntax: Syntax,
    /// A call begins after one of these.
    pub(super) opens: &'static [&'static str],
    /// Around several calls, and before one: said nowhere.
    pub(super) sections: &'static [&'static str],
    /// What may follow a call and says nothing more.
    pub(super) closes: &'static [&'static str],
    /// Around ordinary text, whether there are tools or not.
    pub(super) frames: &'static [&'static str],
    /// Whether messages begin with a header that says who they are for: the model itself, the user or a tool.
    pub(super) headed: bool,
}

/// What follows the opening of a call.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Syntax {
    /// JSON objects with the name and the arguments under these keys, one or several, also in an array.
    Json { name: &'static str, arguments: &'static str, listed: bool },
    /// The same without any opening, if it names a tool that there is.
    BareJson,
    /// JSON objects with one field: the name, and the arguments in it.
    NameIsKey,
    /// A name that one of these ends (after `lead`, where there is one), then the arguments as JSON.
    Named { lead: Option<&'static str>, ends: &'static [&'static str] },
    /// A name, then each argument in tags of its own.
    Tagged(Tags),
    /// Calls as Python would write them, in an array.
    Python,
    /// Gemma's: `call:name{key:value}`, with marks for quotes.
    Gemma,
    /// Every message with a header that says who it is for, as OpenAI's open models write.
    Channels,
}

/// The tags around arguments.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tags {
    /// Ends the name; without it the first argument does.
    pub(super) name_end: Option<&'static str>,
    pub(super) key: &'static str,
    pub(super) key_end: &'static str,
    pub(super) value: Option<&'static str>,
    /// `{}` stands for the key.
    pub(super) value_end: &'static str,
    pub(super) end: &'static str,
    /// A line break on either side of a value belongs to the tags.
    pub(super) lines: bool,
}

const fn thinking(found: &'static str, open: &'static str, close: &'static str) -> Thinking {
    Thinking { found, open, close }
}

/// The first that is found counts.
const THINKING: &[Thinking] = &[
    thinking("assistant to=self<|message|>", "assistant to=self<|message|>", "<|eom|>"),
    thinking("<|START_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    thinking("<seed:think>", "<seed:think>", "</seed:think>"),
    thinking("<mm:think>", "<mm:think>", "</mm:think>"),
    thinking("<think{}>'.format(HYTK)", "<think:opensource>", "</think:opensource>"),
    thinking("open_tag('think')", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    thinking("[THINK]", "[THINK]", "[/THINK]"),
    thinking("<|channel>thought", "<|channel>thought", "<channel|>"),
    thinking("[BEGIN FINAL RESPONSE]", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    thinking("<|begin|>assistant<|think|>", "<|think|>", "<|end|>"),
    thinking("<think>", "<think>", "</think>"),
    thinking("</think>", "<think>", "</think>"),
];

const NONE: Family = Family {
    name: "",
    found: &[],
    syntax: Syntax::Python,
    opens: &[],
    sections: &[],
    closes: &[],
    frames: &[],
    headed: false,
};

const JSON: Syntax = Syntax::Json { name: "name", arguments: "arguments", listed: false };
const LISTED: Syntax = Syntax::Json { name: "name", arguments: "arguments", listed: true };
const COHERE: Syntax = Syntax::Json { name: "tool_name", arguments: "parameters", listed: true };

const TAGS: Tags = Tags {
    name_end: Some(">"),
    key: "<parameter=",
    key_end: ">",
    value: None,
    value_end: "</parameter>",
    end: "</function>",
    lines: true,
};

const ARG_KEYS: Tags = Tags {
    name_end: None,
    key: "<arg_key>",
    key_end: "</arg_key>",
    value: Some("<arg_value>"),
    value_end: "</arg_value>",
    end: "</tool_call>",
    lines: false,
};

/// The first whose texts are all found counts: what is more particular stands before what is less.
const FAMILIES: &[Family] = &[
    Family {
        name: "harmony",
        found: &["<|channel|>", "<|message|>", "commentary"],
        syntax: Syntax::Channels,
        frames: &[
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "<|start|>",
            "<|channel|>",
            "<|constrain|>",
        ],
        ..NONE
    },
    Family {
        name: "deepseek-dsml",
        found: &["DSML", "parameter name="],
        syntax: Syntax::Tagged(Tags {
            name_end: Some("\">"),
            key: "<｜DSML｜parameter name=\"",
            key_end: ">",
            value_end: "</｜DSML｜parameter>",
            end: "</｜DSML｜invoke>",
            lines: false,
            ..TAGS
        }),
        opens: &["<｜DSML｜invoke name=\""],
        sections: &["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"],
        closes: &["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"],
        ..NONE
    },
    Family {
        name: "deepseek-r1",
        found: &["<｜tool▁call▁begin｜>", "```json"],
        syntax: Syntax::Named { lead: Some("<｜tool▁sep｜>"), ends: &["\n"] },
        opens: &["<｜tool▁call▁begin｜>"],
        sections: &["<｜tool▁calls▁begin｜>"],
        closes: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        ..NONE
    },
    Family {
        name: "deepseek-v3.1",
        found: &["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"],
        syntax: Syntax::Named { lead: None, ends: &["<｜tool▁sep｜>"] },
        opens: &["<｜tool▁call▁begin｜>"],
        sections: &["<｜tool▁calls▁begin｜>"],
        closes: &["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        ..NONE
    },
    Family {
        name: "kimi-k2",
        found: &["<|tool_call_argument_begin|>"],
        syntax: Syntax::Named { lead: None, ends: &["<|tool_call_argument_begin|>"] },
        opens: &["<|tool_call_begin|>"],
        sections: &["<|tool_calls_section_begin|>"],
        closes: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        ..NONE
    },
    Family {
        name: "kimi-k3",
        found: &["open_tag('response')", "<|sep|>"],
        syntax: Syntax::Tagged(Tags {
            name_end: Some("<|sep|>"),
            key: "<|open|>argument key=\"",
            key_end: "<|sep|>",
            value_end: "<|close|>argument<|sep|>",
            end: "<|close|>call<|sep|>",
            lines: false,
            ..TAGS
        }),
        opens: &["<|open|>call tool=\""],
        sections: &["<|open|>tools<|sep|>"],
        closes: &["<|close|>tools<|sep|>", "<|close|>message<|sep|>"],
        frames: &["<|open|>response<|sep|>", "<|close|>response<|sep|>"],
        ..NONE
    },
    Family {
        name: "muse-glimmer",
        found: &["<atem:invoke name=", "<|start|>assistant to="],
        syntax: Syntax::Tagged(Tags {
            name_end: Some("\">"),
            key: "<atem:parameter name=\"",
            key_end: "\">",
            value_end: "</atem:parameter>",
            end: "</atem:invoke>",
            lines: false,
            ..TAGS
        }),
        opens: &["<atem:invoke name=\""],
        sections: &["<atem:function_calls>"],
        closes: &["</atem:function_calls>"],
        frames: &["<|eom|>", "<|eot|>"],
        headed: true,
    },
    Family {
        name: "minimax-m3",
        found: &["]<]minimax[>["],
        syntax: Syntax::Tagged(Tags {
            name_end: Some("\">"),
            key: "]<]minimax[>[<",
            key_end: ">",
            value_end: "]<]minimax[>[</{}>",
            end: "]<]minimax[>[</invoke>",
            lines: false,
            ..TAGS
        }),
        opens: &["]<]minimax[>[<invoke name=\""],
        sections: &["]<]minimax[>[<tool_call>"],
        closes: &["]<]minimax[>[</tool_call>"],
        ..NONE
    },
    Family {
        name: "minimax-m2",
        found: &["minimax:tool_call"],
        syntax: Syntax::Tagged(Tags {
            name_end: Some("\">"),
            key: "<parameter name=\"",
            key_end: "\">",
            end: "</invoke>",
            lines: false,
            ..TAGS
        }),
        opens: &["<invoke name=\""],
        sections: &["<minimax:tool_call>"],
        closes: &["</minimax:tool_call>"],
        ..NONE
    },
    Family {
        name: "seed-oss",
        found: &["<seed:tool_call>", "<parameter="],
        syntax: Syntax::Tagged(Tags { lines: false, ..TAGS }),
        opens: &["<function="],
        sections: &["<seed:tool_call>"],
        closes: &["</seed:tool_call>"],
        ..NONE
    },
    Family {
        name: "hunyuan-3",
        found: &["<tool_call{}>'.format(HYTK)"],
        syntax: Syntax::Tagged(Tags {
            name_end: Some("<tool_sep:opensource>"),
            key: "<arg_key:opensource>",
            key_end: "</arg_key:opensource>",
            value: Some("<arg_value:opensource>"),
            value_end: "</arg_value:opensource>",
            end: "</tool_call:opensource>",
            lines: false,
        }),
        opens: &["<tool_call:opensource>"],
        sections: &["<tool_calls:opensource>"],
        closes: &["</tool_calls:opensource>"],
        ..NONE
    },
    Family {
        name: "glm",
        found: &["<arg_key>", "<tool_call>"],
        syntax: Syntax::Tagged(ARG_KEYS),
        opens: &["<tool_call>"],
        ..NONE
    },
    Family {
        name: "qwen3-coder",
        found: &["<function=", "<parameter="],
        syntax: Syntax::Tagged(TAGS),
        opens: &["<function="],
        sections: &["<tool_call>"],
        closes: &["</tool_call>"],
        ..NONE
    },
    Family {
        name: "minicpm5",
        found: &["<function name=", "<param name="],
        syntax: Syntax::Tagged(Tags {
            name_end: Some("\">"),
            key: "<param name=\"",
            key_end: "\">",
            value_end: "</param>",
            lines: false,
            ..TAGS
        }),
        opens: &["<function name=\""],
        ..NONE
    },
    Family {
        name: "functionary-v3.1",
        found: &["<function=", "</function>"],
        syntax: Syntax::Named { lead: None, ends: &[">"] },
        opens: &["<function="],
        closes: &["</function>"],
        ..NONE
    },
    Family {
        name: "functionary-v3.2",
        found: &[">>>all"],
        syntax: Syntax::Named { lead: None, ends: &["\n"] },
        opens: &[">>>"],
        ..NONE
    },
    Family {
        name: "mistral-v11",
        found: &["[TOOL_CALLS]", "[ARGS]"],
        syntax: Syntax::Named { lead: None, ends: &["[ARGS]", "[CALL_ID]", "{"] },
        opens: &["[TOOL_CALLS]"],
        ..NONE
    },
    Family { name: "mistral", found: &["[TOOL_CALLS]"], syntax: LISTED, opens: &["[TOOL_CALLS]"], ..NONE },
    Family {
        name: "solar-open",
        found: &["<|tool_call:begin|>", "<|tool_call:args|>"],
        syntax: Syntax::Named { lead: Some("<|tool_call:name|>"), ends: &["<|tool_call:args|>"] },
        opens: &["<|tool_call:begin|>"],
        sections: &["<|tool_calls|>"],
        closes: &["<|tool_call:end|>", "<|calls|>"],
        frames: &["<|begin|>assistant", "<|content|>", "<|end|>"],
        ..NONE
    },
    Family {
        name: "cohere",
        found: &["<|START_ACTION|>"],
        syntax: COHERE,
        opens: &["<|START_ACTION|>"],
        closes: &["<|END_ACTION|>"],
        frames: &["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"],
        ..NONE
    },
    Family {
        name: "command-r",
        found: &["Action:", "```json", "tool_name"],
        syntax: COHERE,
        opens: &["Action:\n```json", "Action: ```json"],
        closes: &["```"],
        ..NONE
    },
    Family {
        name: "apertus",
        found: &["<|tools_prefix|>"],
        syntax: Syntax::NameIsKey,
        opens: &["<|tools_prefix|>"],
        closes: &["<|tools_suffix|>"],
        ..NONE
    },
    Family {
        name: "lfm2",
        found: &["List of tools: "],
        syntax: Syntax::Python,
        opens: &["<|tool_call_start|>"],
        closes: &["<|tool_call_end|>"],
        ..NONE
    },
    Family {
        name: "gemma-4",
        found: &["<|tool_call>call:"],
        syntax: Syntax::Gemma,
        opens: &["<|tool_call>"],
        closes: &["<tool_call|>"],
        frames: &["<|\"|>"],
        ..NONE
    },
    Family {
        name: "gigachat-3.1",
        found: &["<|function_call|>"],
        syntax: JSON,
        opens: &["<|function_call|>"],
        closes: &["<|message_sep|>"],
        ..NONE
    },
    Family {
        name: "gigachat-3",
        found: &["function call", "<|role_sep|>"],
        syntax: JSON,
        opens: &["function call<|role_sep|>"],
        sections: &["<|message_sep|>"],
        closes: &["<|message_sep|>"],
        ..NONE
    },
    Family {
        name: "nemotron-v2",
        found: &["<TOOLCALL>"],
        syntax: LISTED,
        opens: &["<TOOLCALL>"],
        closes: &["</TOOLCALL>"],
        ..NONE
    },
    Family {
        name: "apriel",
        found: &["<tool_calls>[", "[BEGIN FINAL RESPONSE]"],
        syntax: LISTED,
        opens: &["<tool_calls>"],
        closes: &["</tool_calls>"],
        frames: &["[END FINAL RESPONSE]"],
        ..NONE
    },
    Family {
        name: "minimax-m1",
        found: &["<tool_calls>", "</tool_calls>"],
        syntax: JSON,
        opens: &["<tool_calls>"],
        closes: &["</tool_calls>"],
        ..NONE
    },
    Family {
        name: "granite-3",
        found: &["<|tool_call|>", "<response>"],
        syntax: LISTED,
        opens: &["<|tool_call|>"],
        frames: &["<response>", "</response>"],
        ..NONE
    },
    Family {
        name: "phi-4",
        found: &["<|tool_call|>"],
        syntax: LISTED,
        opens: &["<|tool_call|>"],
        closes: &["<|/tool_call|>"],
        ..NONE
    },
    Family { name: "functools", found: &["functools"], syntax: LISTED, opens: &["functools["], ..NONE },
    Family {
        name: "hermes",
        found: &["<tool_call>"],
        syntax: JSON,
        opens: &["<tool_call>"],
        closes: &["</tool_call>"],
        ..NONE
    },
    Family {
        name: "llama-3",
        found: &["{\"name\": function name, \"parameters\": "],
        syntax: Syntax::BareJson,
        opens: &["<|python_tag|>"],
        closes: &[";"],
        ..NONE
    },
];

impl Dialect {
    /// The dialect that a template's text shows.
    pub fn of(template: &str) -> Dialect {
        let has = |text: &&str| template.contains(*text);
        let family = FAMILIES.iter().find(|family| family.found.iter().all(has));
        // Channels say themselves what is thought.
        let channels = family.is_some_and(|family| family.syntax == Syntax::Channels);
        let thinking = THINKING.iter().find(|thinking| !channels && has(&thinking.found));
        Dialect { thinking, family }
    }

    /// The name of the way in which tools are called; `None` where the template shows none that is known.
    pub fn family(self) -> Option<&'static str> {
        self.family.map(|family| family.name)
    }

    /// Whether the model may think before it answers.
    pub fn thinks(self) -> bool {
        self.thinking.is_some() || self.has_channels()
    }

    /// What ends thinking, if it has marks of its own.
    pub fn thinking_end(self) -> Option<&'static str> {
        match self.thinking {
            Some(thinking) => Some(thinking.close),
            None => self.has_channels().then_some("<|end|>"),
        }
    }

    /// Whether an answer to this prompt begins in the middle of thinking.
    pub fn is_thinking_after(self, prompt: &str) -> bool {
        self.thinking.is_some_and(|thinking| prompt.trim_end().ends_with(thinking.open))
    }

    /// What has to follow thinking that was cut off, so that the answer begins.
    pub fn stop_thinking(self) -> Option<String> {
        match self.thinking {
            Some(thinking) if self.has_headers() => {
                Some(format!("{}<|start|>assistant to=user<|message|>", thinking.close))
            }
            Some(thinking) => Some(format!("\n{}\n\n", thinking.close)),
            None if self.has_channels() => {
                Some("<|end|><|start|>assistant<|channel|>final<|message|>".to_owned())
            }
            None => None,
        }
    }

    /// What an answer that is only to be said begins with, where that needs saying.
    pub fn answer_opening(self) -> Option<&'static str> {
        match self.has_headers() {
            true => Some(" to=user<|message|>"),
            false => self.has_channels().then_some("<|channel|>final<|message|>"),
        }
    }

    /// All marks. Control tokens that are spelled in one of them have to be seen by a [`Reader`](super::Reader).
    pub fn marks(self) -> Vec<&'static str> {
        let mut marks: Vec<&str> = Vec::new();
        if let Some(thinking) = self.thinking {
            marks.extend([thinking.open, thinking.close]);
        }
        if let Some(family) = self.family {
            for list in [family.opens, family.sections, family.closes, family.frames] {
                marks.extend(list);
            }
            if family.headed {
                marks.extend(["<|start|>", "<|message|>"]);
            }
            match &family.syntax {
                Syntax::Named { lead, ends } => marks.extend(lead.iter().chain(*ends)),
                Syntax::Tagged(tags) => {
                    marks.extend(tags.name_end.iter().chain(&tags.value));
                    marks.extend([tags.key, tags.key_end, tags.value_end, tags.end]);
                }
                _ => {}
            }
        }
        marks
    }

    /// What follows the prompt of an answer that has to be a call: of that tool, whose arguments are then written as
    /// JSON, or of any, which is then written as a JSON object with [`Dialect::call_keys`]. `None` where no family is
    /// known.
    pub fn call_opening(self, tool: Option<&Tool>) -> Option<String> {
        let family = self.family?;
        let (name_key, arguments_key) = self.call_keys();
        let object = tool.map(|tool| {
            let name = serde_json::Value::from(tool.name.as_str());
            format!("{{\"{name_key}\": {name}, \"{arguments_key}\": ")
        });
        let object = object.unwrap_or_default();
        let section = family.sections.first().copied().unwrap_or_default();
        let open = family.opens.first().copied().unwrap_or_default();
        let name = tool.map(|tool| tool.name.as_str());
        Some(match (&family.syntax, name) {
            (Syntax::Json { listed, .. }, _) => {
                let bracket = if *listed && !open.ends_with('[') { "[" } else { "" };
                let line = if open.ends_with('>') && !listed { "\n" } else { "" };
                format!("{section}{open}{line}{bracket}{object}")
            }
            (Syntax::BareJson, _) => object,
            (Syntax::NameIsKey, Some(name)) => {
                format!("{open}[{{{}: ", serde_json::Value::from(name))
            }
            (Syntax::Named { lead, ends }, Some(name)) => {
                let lead = lead.map_or(String::new(), |lead| match lead.contains("name") {
                    true => format!("0{lead}"),
                    false => format!("function{lead}"),
                });
                let name =
                    if family.name == "kimi-k2" { format!("functions.{name}:0") } else { name.to_owned() };
                let fence = if family.name == "deepseek-r1" { "```json\n" } else { "" };
                format!("{section}{open}{lead}{name}{}{fence}", ends[0])
            }
            (Syntax::Tagged(tags), Some(name)) => {
                let header = if family.headed { format!(" to={name}<|message|>") } else { String::new() };
                format!("{header}{section}\n{open}{name}{}\n", tags.name_end.unwrap_or_default())
            }
            (Syntax::Gemma, Some(name)) => format!("{open}call:{name}"),
            (Syntax::Python, Some(name)) => format!("{open}[{name}"),
            (Syntax::Channels, Some(name)) => {
                format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
            }
            (Syntax::Channels, None) => {
                "<|channel|>commentary to=functions <|constrain|>json<|message|>".to_owned()
            }
            (_, None) => format!("{section}{open}"),
        })
    }

    /// What has to stand behind arguments that were written as JSON, so that the call is whole and another may follow;
    /// `None` where the model's own calls look otherwise, or end its answer.
    pub fn call_rest(self) -> Option<&'static str> {
        match self.family?.syntax {
            Syntax::Json { .. } | Syntax::BareJson | Syntax::NameIsKey => Some("}"),
            Syntax::Named { .. } => Some(""),
            Syntax::Tagged(_) | Syntax::Python | Syntax::Gemma | Syntax::Channels => None,
        }
    }

    /// The keys of a call's name and arguments, where a call is an object.
    pub fn call_keys(self) -> (&'static str, &'static str) {
        match self.family.map(|family| &family.syntax) {
            Some(Syntax::Json { name, arguments, .. }) => (name, arguments),
            Some(Syntax::BareJson) => ("name", "parameters"),
            _ => ("name", "arguments"),
        }
    }

    pub(super) fn has_headers(self) -> bool {
        self.family.is_some_and(|family| family.headed)
    }

    pub(super) fn has_channels(self) -> bool {
        self.family.is_some_and(|family| family.syntax == Syntax::Channels)
    }
}
