//! What is typed behind a slash.

use std::path::PathBuf;

use super::editor::unfolded;

/// A command of the chat. Settings are shown without a value, and put back with `off`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Command {
    System(Option<Option<String>>),
    Seed(Option<Option<u64>>),
    Temperature(Option<Option<f32>>),
    Schema(Option<Option<PathBuf>>),
    /// What the model's oldest open call came to.
    Result(String),
    Save(PathBuf),
    Load(PathBuf),
    /// Another model, for the conversation as it is.
    Model(Option<String>),
    /// Shows an image with the next message.
    Image(PathBuf),
    /// The last question once more.
    Retry,
    /// A flag of sampling: its name, and its value.
    Set(Option<(String, String)>),
    Stats,
    Clear,
    Help,
    Exit,
}

/// Name, what follows it, and what it does.
pub(super) const COMMANDS: [(&str, &str, &str); 15] = [
    ("/system", "TEXT|off", "what the model is told beforehand; \"\"\" begins and ends several lines"),
    ("/temperature", "T|off", "0 is greedy; higher is more varied"),
    ("/seed", "N|off", "fixes the random numbers"),
    ("/set", "NAME VALUE|off", "another flag of sampling, as in /set top_p 0.9; alone, what is set"),
    ("/model", "NAME", "goes on with another model"),
    ("/retry", "", "answers the last question once more"),
    ("/image", "FILE", "shows an image with the next message; so does a path that is dragged into it"),
    ("/schema", "FILE|off", "answers are JSON that is valid against the schema in this file"),
    ("/result", "TEXT", "what a call of the model came to; it answers when all its calls have one"),
    ("/save", "FILE", "writes the conversation as JSON"),
    ("/load", "FILE", "goes on with a conversation that was saved"),
    ("/stats", "", "tokens, speed, what the cache saved, memory"),
    ("/clear", "", "forgets the conversation, keeps the settings"),
    ("/help", "", "this list"),
    ("/exit", "", "ends the chat, as Ctrl-D does"),
];

/// Commands whose value is a file.
pub(super) const TAKE_FILES: [&str; 4] = ["/image", "/schema", "/save", "/load"];

impl Command {
    /// `None` is a message and no command; an error says what is wrong. A path that begins with a slash is a message,
    /// and so is whatever begins with a space.
    pub(super) fn parse(text: &str) -> Option<Result<Command, String>> {
        let rest = text.strip_prefix('/')?;
        let (name, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        if !name.chars().all(|c| c.is_ascii_alphabetic() || c == '?') {
            return None;
        }
        Some(Command::named(name, value.trim()))
    }

    fn named(name: &str, value: &str) -> Result<Command, String> {
        let no_value = |command: Command| match value {
            "" => Ok(command),
            _ => Err(format!("/{name} takes no value")),
        };
        let file = || match value {
            "" => Err(format!("/{name} needs a file")),
            path => Ok(PathBuf::from(path)),
        };
        Ok(match name {
            "system" => Command::System(setting(value, |text| Ok(unfolded(text)))?),
            "seed" => Command::Seed(setting(value, |text| {
                text.parse().map_err(|_| format!("{text:?} is no seed: a whole number from 0 is"))
            })?),
            "temperature" => Command::Temperature(setting(value, |text| {
                let number = text.parse().ok().filter(|value: &f32| value.is_finite() && *value >= 0.0);
                number.ok_or_else(|| format!("{text:?} is no temperature: a number from 0 is"))
            })?),
            "schema" => Command::Schema(setting(value, |text| Ok(PathBuf::from(text)))?),
            "set" => Command::Set(match value.split_once(char::is_whitespace) {
                // These two have commands of their own.
                Some((name @ ("temperature" | "seed"), value)) => return Command::named(name, value.trim()),
                Some((name, value)) => Some((name.to_owned(), value.trim().to_owned())),
                None if value.is_empty() => None,
                None => return Err("/set needs a name and a value, as in /set top_p 0.9".to_owned()),
            }),
            "model" => Command::Model((!value.is_empty()).then(|| value.to_owned())),
            "retry" | "again" => no_value(Command::Retry)?,
            "image" => Command::Image(file()?),
            "result" => Command::Result(unfolded(value)),
            "save" => Command::Save(file()?),
            "load" => Command::Load(file()?),
            "stats" => no_value(Command::Stats)?,
            "clear" => no_value(Command::Clear)?,
            "help" | "?" => no_value(Command::Help)?,
            "exit" | "quit" | "bye" => no_value(Command::Exit)?,
            _ => return Err(format!("there is no /{name}; /help lists what there is")),
        })
    }
}

/// Nothing shows it, `off` puts it back, anything else is read.
fn setting<T>(
    value: &str,
    read: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<Option<T>>, String> {
    match value {
        "" => Ok(None),
        "off" => Ok(Some(None)),
        text => read(text).map(|value| Some(Some(value))),
    }
}

/// The list for people.
pub(super) fn help() -> String {
    let mut lines: Vec<String> = COMMANDS
        .iter()
        .map(|(name, value, what)| format!("{:<22} {what}", format!("{name} {value}").trim_end()))
        .collect();
    lines.extend(
        [
            "Alt-Enter, or a backslash at the end, begins another line; \"\"\" begins and ends several.",
            "Ctrl-C stops an answer. Arrow keys and Ctrl-R look through what was typed before; Tab completes.",
            "What begins with a space is a message, and is not kept in the history.",
        ]
        .map(str::to_owned),
    );
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_messages() {
        let check = |text: &str, wanted: Option<Result<Command, &str>>| {
            assert_eq!(Command::parse(text), wanted.map(|result| result.map_err(str::to_owned)), "{text:?}");
        };
        check("hello", None);
        check("/etc/passwd has what?", None);
        check(" /stats", None);
        check("/2 is a half?", None);
        check("/stats", Some(Ok(Command::Stats)));
        check("/?", Some(Ok(Command::Help)));
        check("/bye", Some(Ok(Command::Exit)));
        check("/seed", Some(Ok(Command::Seed(None))));
        check("/seed off", Some(Ok(Command::Seed(Some(None)))));
        check("/seed  7 ", Some(Ok(Command::Seed(Some(Some(7))))));
        check("/temperature 0.5", Some(Ok(Command::Temperature(Some(Some(0.5))))));
        check("/system Be brief.", Some(Ok(Command::System(Some(Some("Be brief.".to_owned()))))));
        check("/system \"\"\"a\nb\"\"\"", Some(Ok(Command::System(Some(Some("a\nb".to_owned()))))));
        check("/save my chat.json", Some(Ok(Command::Save(PathBuf::from("my chat.json")))));
        check("/seed -1", Some(Err("\"-1\" is no seed: a whole number from 0 is")));
        check("/temperature NaN", Some(Err("\"NaN\" is no temperature: a number from 0 is")));
        check("/load", Some(Err("/load needs a file")));
        check("/image my cat.png", Some(Ok(Command::Image(PathBuf::from("my cat.png")))));
        check("/tmp/cat.png What is it?", None);
        check("/stats now", Some(Err("/stats takes no value")));
        check("/set top_p 0.9", Some(Ok(Command::Set(Some(("top_p".to_owned(), "0.9".to_owned()))))));
        check("/set", Some(Ok(Command::Set(None))));
        check("/set top_p", Some(Err("/set needs a name and a value, as in /set top_p 0.9")));
        check("/model qwen3:4b", Some(Ok(Command::Model(Some("qwen3:4b".to_owned())))));
        check("/retry", Some(Ok(Command::Retry)));
        check("/dance", Some(Err("there is no /dance; /help lists what there is")));
    }

    #[test]
    fn every_command_that_is_listed_exists() {
        for (name, value, _) in COMMANDS {
            let text = if value == "FILE" { format!("{name} x") } else { name.to_owned() };
            assert!(matches!(Command::parse(&text), Some(Ok(_))), "{text}");
        }
        assert!(TAKE_FILES.iter().all(|file| COMMANDS.iter().any(|(name, ..)| name == file)));
    }
}
