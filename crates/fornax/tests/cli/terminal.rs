//! `fornax run` as people use it: typed at a terminal (tmux plays it), and in pipes.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{cache, command, fornax, fornax_with_input, model};

/// A terminal of its own with `fornax run` in it, ended with the test.
struct Terminal {
    /// Sockets, history, files that are saved.
    folder: tempfile::TempDir,
    /// Sessions so far. Each has a socket of its own: one that is ending would be found at the old one's.
    sessions: Cell<usize>,
}

/// Loading and answering share the machine with every other test.
const PATIENCE: Duration = Duration::from_secs(120);

impl Terminal {
    /// Starts the chat in a terminal of 100 columns; `None` where there is no tmux.
    fn start(test: &str, environment: &str, flags: &str) -> Option<Terminal> {
        let path = model("smollm2", test)?;
        if Command::new("tmux").arg("-V").output().is_err() {
            println!("SKIP {test}: no tmux");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let terminal = Terminal { folder, sessions: Cell::new(0) };
        let context = if flags.contains("--context") { "" } else { "--context 1024" };
        terminal.run(environment, &format!("{path} --device cpu {context} {flags}"));
        terminal.until_ready();
        Some(terminal)
    }

    /// Starts `fornax run ARGS` as the only program of a new session, after ending the one before. What it leaves stays
    /// on the screen.
    fn run(&self, environment: &str, args: &str) {
        self.end();
        self.sessions.update(|sessions| sessions + 1);
        let binary = env!("CARGO_BIN_EXE_fornax");
        let cache = self.folder.path().join("cache");
        let line = format!(
            "env -u NO_COLOR FORNAX_CACHE={} {environment} {binary} run {args}; echo ended with $?; exec cat",
            cache.display()
        );
        self.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", &line]);
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join(format!("tmux{}", self.sessions.get()))
    }

    fn end(&self) {
        // Already gone, or never there, is as good.
        drop(Command::new("tmux").arg("-S").arg(self.socket()).arg("kill-server").output());
    }

    fn tmux(&self, args: &[&str]) -> String {
        let ran = Command::new("tmux")
            .arg("-S")
            .arg(self.socket())
            .args(args)
            .env("TERM", "xterm-256color")
            .output();
        let ran = ran.unwrap();
        assert!(ran.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8(ran.stdout).unwrap()
    }

    /// Types a text and Enter at an empty prompt.
    fn type_line(&self, text: &str) {
        self.until_ready();
        self.type_on(text);
        self.press("Enter");
    }

    /// Types a text where the cursor is.
    fn type_on(&self, text: &str) {
        self.tmux(&["send-keys", "-l", text]);
    }

    fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    /// What is and was on the screen; lines that the terminal has wrapped are whole.
    fn shown(&self) -> String {
        self.tmux(&["capture-pane", "-p", "-J", "-S", "-500"])
    }

    /// The same with its escape codes.
    fn coloured(&self) -> String {
        self.tmux(&["capture-pane", "-p", "-e", "-J", "-S", "-500"])
    }

    fn until(&self, wanted: &str) -> String {
        self.until_count(wanted, 1)
    }

    /// Looks until `wanted` is there so many times.
    fn until_count(&self, wanted: &str, count: usize) -> String {
        self.look(&format!("{wanted:?} {count} times"), |shown| shown.matches(wanted).count() >= count)
    }

    /// Looks until the prompt is there with nothing behind it. Before that no editor reads the keys (Ctrl-C would end
    /// the process), and what it reads together with the key that ends a line is gone with that line.
    fn until_ready(&self) {
        self.look("an empty prompt", |shown| shown.trim_end().lines().next_back() == Some(">"));
    }

    /// Looks until what is shown is as `wanted`.
    fn look(&self, wanted: &str, is_there: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let shown = self.shown();
            if is_there(&shown) {
                return shown;
            }
            assert!(Instant::now() < deadline, "never came: {wanted}: {shown}");
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.end();
    }
}

/// The end of the line that follows every whole answer.
const ANSWERED: &str = "tok/s; seed ";

/// Tokens of the answer, tokens of its prompt, and how many of those were cached.
fn figures(line: &str) -> (usize, usize, usize) {
    let (said, prompt) = line.split_once("; prompt ").unwrap();
    let (tokens, cached) = prompt.split_once(" tokens, ").unwrap();
    let number = |text: &str| text.split(' ').next().unwrap().parse().unwrap();
    (number(said), number(tokens), number(cached))
}

#[test]
fn a_typed_question_is_answered_and_the_next_one_finds_its_prefix() {
    let test = "a_typed_question_is_answered_and_the_next_one_finds_its_prefix";
    let Some(terminal) = Terminal::start(test, "", "--temperature 0 --max-tokens 40") else { return };
    terminal.type_line("What is the capital of France?");
    terminal.until_count(ANSWERED, 1);
    terminal.type_line("And of Italy?");
    let shown = terminal.until_count(ANSWERED, 2);
    assert!(shown.contains("Paris") && shown.contains("Ctrl-D ends the chat"), "{shown}");
    // Whole pages of what was said are not computed again: all that the first question and its answer fill.
    let lines: Vec<&str> = shown.lines().filter(|line| line.contains(ANSWERED)).collect();
    let ((said, prompt, _), (_, _, cached)) = (figures(lines[0]), figures(lines[1]));
    assert_eq!(cached, (prompt + said - 1) / 32 * 32, "{lines:?}");
    assert!(cached > 0);
    terminal.type_line("/stats");
    let shown = terminal.until("found in the cache and not computed again");
    assert!(shown.contains(&format!(" {cached} of them (")), "{shown}");
    assert!(shown.contains("all 2 answers: ") && shown.contains("as planned"), "{shown}");
    terminal.until_ready();
    terminal.press("C-d");
    terminal.until("ended with 0");
}

#[test]
fn ctrl_c_stops_the_answer_and_twice_on_an_empty_line_the_chat() {
    let test = "ctrl_c_stops_the_answer_and_twice_on_an_empty_line_the_chat";
    let Some(terminal) = Terminal::start(test, "", "--temperature 0 --ignore-eos") else { return };
    terminal.type_line("Count from one to a thousand.");
    // The answer has begun when its line is there.
    terminal.look("the beginning of the answer", |shown| {
        let behind = shown.rsplit_once("to a thousand.").map(|(_, behind)| behind.trim());
        behind.is_some_and(|text| !text.is_empty() && !text.contains("reading the prompt"))
    });
    terminal.press("C-c");
    let shown = terminal.until("stopped");
    assert!(!shown.contains(ANSWERED), "{shown}");
    // The chat goes on, and half an answer is part of it.
    terminal.type_line("/stats");
    terminal.until("2 messages");
    // What is typed is only thrown away.
    terminal.until_ready();
    terminal.type_on("half a question");
    terminal.until("half a question");
    terminal.press("C-c");
    terminal.until_ready();
    terminal.press("C-c");
    terminal.until("Ctrl-C again, or Ctrl-D");
    terminal.until_ready();
    terminal.press("C-c");
    terminal.until("ended with 0");
}

#[test]
fn several_lines_are_one_message() {
    let test = "several_lines_are_one_message";
    let Some(terminal) = Terminal::start(test, "", "--temperature 0 --max-tokens 4") else { return };
    let type_lines = |first: &str, between: &str, second: &str| {
        terminal.until_ready();
        terminal.type_on(first);
        terminal.press(between);
        terminal.type_on(second);
        terminal.press("Enter");
    };
    type_lines("\"\"\"first", "Enter", "second\"\"\"");
    terminal.until_count(ANSWERED, 1);
    type_lines("third \\", "Enter", "fourth");
    terminal.until_count(ANSWERED, 2);
    type_lines("fifth", "M-Enter", "sixth 漢字 🙂");
    terminal.until_count(ANSWERED, 3);
    let saved = terminal.file("lines.json");
    terminal.type_line(&format!("/save {}", saved.display()));
    terminal.until("6 messages are saved");
    let saved: serde_json::Value = serde_json::from_str(&fs::read_to_string(saved).unwrap()).unwrap();
    let questions: Vec<&str> = saved["messages"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|message| message["role"] == "user")
        .map(|message| message["content"].as_str().unwrap())
        .collect();
    assert_eq!(questions, ["first\nsecond", "third \nfourth", "fifth\nsixth 漢字 🙂"]);
}

#[test]
fn history_outlives_the_chat_and_can_be_refused() {
    let test = "history_outlives_the_chat_and_can_be_refused";
    let Some(terminal) = Terminal::start(test, "", "--temperature 0 --max-tokens 2") else { return };
    terminal.type_line("the first question");
    terminal.until(ANSWERED);
    terminal.type_line(" /not kept: it begins with a space");
    terminal.until_count(ANSWERED, 2);
    terminal.type_line("/exit");
    terminal.until("ended with 0");
    let history = terminal.file("cache/history");
    let kept = fs::read_to_string(&history).unwrap();
    assert!(kept.contains("the first question") && kept.contains("/exit") && !kept.contains("not kept"));
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(fs::metadata(&history).unwrap().permissions().mode() & 0o077, 0, "others may read it");
    // Another chat finds it; this one is told to keep nothing.
    let path = model("smollm2", test).unwrap();
    terminal.run("", &format!("{path} --device cpu --context 256 --temperature 0 --max-tokens 2"));
    terminal.until_ready();
    terminal.press("Up");
    terminal.until("> /exit");
    terminal.press("Up");
    terminal.until("> the first question");
    terminal.press("Enter");
    terminal.until(ANSWERED);
    let before = fs::read_to_string(&history).unwrap();
    terminal
        .run("", &format!("{path} --device cpu --context 256 --temperature 0 --max-tokens 2 --no-history"));
    terminal.until_ready();
    terminal.type_line("a secret");
    terminal.until(ANSWERED);
    assert_eq!(fs::read_to_string(&history).unwrap(), before);
}

#[test]
fn a_saved_conversation_is_loaded_and_goes_on() {
    let test = "a_saved_conversation_is_loaded_and_goes_on";
    let Some(terminal) = Terminal::start(test, "", "--max-tokens 8") else { return };
    let saved = terminal.file("chat.json");
    for (line, says) in [
        ("/system Answer in one word.", "the system message is changed"),
        ("/temperature 0", "temperature 0"),
        ("/seed 7", "seed 7"),
        ("/temperature warm", "\"warm\" is no temperature"),
        ("/dance", "there is no /dance"),
    ] {
        terminal.type_line(line);
        terminal.until(says);
    }
    terminal.type_line("What colour is the sky?");
    let first = terminal.until(ANSWERED);
    assert!(first.contains("; seed 7"), "{first}");
    terminal.type_line(&format!("/save {}", saved.display()));
    terminal.until("3 messages are saved");
    terminal.type_line("/clear");
    terminal.until("the conversation is forgotten");
    terminal.type_line("/system off");
    terminal.until_count("the system message is changed", 2);
    terminal.type_line(&format!("/load {}", saved.display()));
    terminal.until("3 messages are loaded");
    terminal.type_line("/system");
    terminal.until("system: Answer in one word.");
    // The prompt is what was said before, so its pages are still there.
    terminal.type_line("And the grass?");
    let shown = terminal.until_count(ANSWERED, 2);
    let line = shown.lines().rfind(|line| line.contains(ANSWERED)).unwrap();
    assert!(line.contains("; seed 7") && !line.contains(" 0 of them cached"), "{line}");
    // What is no conversation changes nothing.
    let other = terminal.file("other.json");
    fs::write(&other, "{}").unwrap();
    terminal.type_line(&format!("/load {}", other.display()));
    terminal.until("is no conversation");
    terminal.type_line("/stats");
    terminal.until("4 messages");
}

#[test]
fn a_schema_holds_until_it_is_put_back_and_tab_completes() {
    let test = "a_schema_holds_until_it_is_put_back_and_tab_completes";
    let Some(terminal) = Terminal::start(test, "", "--temperature 0 --max-tokens 40") else { return };
    let schema = terminal.file("colour-schema.json");
    fs::write(&schema, r#"{"enum": ["ultramarine", "vermilion"]}"#).unwrap();
    // The command and the file, as far as they are unambiguous.
    terminal.type_on("/sch");
    terminal.press("Tab");
    terminal.until("> /schema ");
    terminal.type_on(&format!("{}/colour-s", terminal.folder.path().display()));
    terminal.press("Tab");
    terminal.until("colour-schema.json");
    terminal.press("Enter");
    terminal.until("answers are JSON of your schema");
    terminal.type_line("What colour is the sky?");
    let shown = terminal.until(ANSWERED);
    assert!(shown.contains("\"ultramarine\"\n") || shown.contains("\"vermilion\"\n"), "{shown}");
    terminal.type_line("/schema off");
    terminal.until("answers have no set form");
    fs::write(&schema, r#"{"type": "colour"}"#).unwrap();
    terminal.type_line(&format!("/schema {}", schema.display()));
    terminal.until("SCHEMA_UNSUPPORTED");
    terminal.type_line("/schema");
    terminal.until_count("answers have no set form", 2);
}

#[test]
fn a_full_context_forgets_the_oldest_and_says_so() {
    let test = "a_full_context_forgets_the_oldest_and_says_so";
    let Some(terminal) = Terminal::start(test, "", "--context 192 --temperature 0 --max-tokens 24") else {
        return;
    };
    for (count, question) in
        ["One colour?", "One animal?", "One city?", "One river?", "One metal?"].iter().enumerate()
    {
        terminal.type_line(question);
        terminal.until_count(ANSWERED, count + 1);
    }
    let shown = terminal.shown();
    assert!(shown.contains("the context of 192 tokens is full: the oldest "), "{shown}");
    // What never fits is refused, and the chat goes on.
    terminal.type_line(&"word ".repeat(400));
    terminal.until("PROMPT_TOO_LONG");
    terminal.type_line("One star?");
    terminal.until_count(ANSWERED, 6);
}

#[test]
fn a_terminal_is_coloured_unless_that_is_forbidden() {
    let test = "a_terminal_is_coloured_unless_that_is_forbidden";
    let flags = "--choice '**bold** and `code`'";
    let Some(terminal) = Terminal::start(test, "", flags) else { return };
    terminal.type_line("Say it.");
    terminal.until(ANSWERED);
    // The figures are dim. An answer in a form is not rendered.
    let shown = terminal.coloured();
    assert!(shown.contains("**bold** and `code`"), "{shown}");
    let speed = shown.lines().find(|line| line.contains(ANSWERED)).unwrap();
    assert!(speed.contains("\x1b[2m"), "{speed:?}");
    drop(terminal);
    let plain = Terminal::start(test, "NO_COLOR=1", "--temperature 0 --max-tokens 8").unwrap();
    plain.type_line("Hello");
    plain.until(ANSWERED);
    plain.type_line("/help");
    plain.until("/exit");
    assert!(!plain.coloured().contains('\x1b'), "{:?}", plain.coloured());
}

#[test]
fn what_answers_is_said_and_can_be_changed() {
    let test = "what_answers_is_said_and_can_be_changed";
    let Some(terminal) = Terminal::start(test, "", "--temperature 0 --max-tokens 60") else { return };
    let shown = terminal.shown();
    assert!(shown.contains(" · 135M Q4_1 · 1024 tokens · cpu, "), "{shown}");
    terminal.type_line("/retry");
    terminal.until("nothing was asked yet");
    terminal.type_line("Describe the sky in three sentences.");
    let shown = terminal.until_count(ANSWERED, 1);
    // Lines end between words, within the hundred columns of the terminal.
    let answer = shown.split("three sentences.").nth(1).unwrap();
    assert!(answer.lines().all(|line| line.chars().count() <= 100), "{answer}");
    assert!(answer.lines().filter(|line| line.chars().count() > 60).count() > 1, "{answer}");
    // The same question, greedily: the same answer, and the conversation is no longer for it.
    terminal.type_line("/retry");
    terminal.until_count(ANSWERED, 2);
    terminal.type_line("/stats");
    terminal.until("2 messages");
    for (line, says) in [
        ("/set top_p 0.5", "set: top_p 0.5"),
        ("/set top-p 2", "top-p"),
        ("/set repeat_penalty 1.1", "set: top_p 0.5, repeat_penalty 1.1"),
        ("/set top_p off", "set: repeat_penalty 1.1"),
        ("/set schema x", "there is no setting \"schema\""),
        ("/set dance 1", "there is no setting \"dance\""),
        ("/set seed 7", "seed 7"),
        ("/model no/such.gguf", "MODEL_NOT_FOUND"),
        ("/model", " · 135M Q4_1 · 1024 tokens"),
    ] {
        terminal.type_line(line);
        terminal.until(says);
    }
    let path = model("smollm2", test).unwrap();
    let other = terminal.file("other.gguf");
    std::os::unix::fs::symlink(path, &other).unwrap();
    terminal.type_line(&format!("/model {}", other.display()));
    terminal.until("other.gguf · 135M");
    // What was said is still there.
    terminal.type_line("/stats");
    terminal.until_count("2 messages", 2);
}

#[test]
fn a_terminal_is_asked_once_which_model_it_wants() {
    let test = "a_terminal_is_asked_once_which_model_it_wants";
    let Some(path) = model("smollm2", test) else { return };
    if Command::new("tmux").arg("-V").output().is_err() {
        println!("SKIP {test}: no tmux");
        return;
    }
    let terminal = Terminal { folder: tempfile::tempdir().unwrap(), sessions: Cell::new(0) };
    let models = terminal.file("cache/models");
    fs::create_dir_all(&models).unwrap();
    std::os::unix::fs::symlink(&path, models.join(Path::new(&path).file_name().unwrap())).unwrap();
    terminal.run("", "--device cpu --context 256");
    terminal.until("Number [1]:");
    terminal.press("Enter");
    terminal.until("smollm2 from now on");
    terminal.until_ready();
    assert_eq!(fs::read_to_string(terminal.file("cache/default-model")).unwrap(), "smollm2\n");
    terminal.run("", "--device cpu --context 256");
    terminal.until_ready();
    assert!(!terminal.shown().contains("Number [1]:"), "{}", terminal.shown());
}

#[test]
fn thoughts_are_dimmed_on_a_terminal_and_go_to_a_pipe_as_they_are() {
    const NAME: &str = "thoughts_are_dimmed_on_a_terminal_and_go_to_a_pipe_as_they_are";
    // This model does not think by itself: its answer is begun as a thought, which it never ends.
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("thinks.jinja");
    let text = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
        {% endfor %}<|im_start|>assistant\n<think>\n";
    fs::write(&template, text).unwrap();
    let flags = format!("--temperature 0 --max-tokens 12 --chat-template-file {}", template.display());
    let Some(terminal) = Terminal::start(NAME, "", &flags) else { return };
    let question = "What is the capital of France?";
    terminal.type_line(question);
    terminal.until("tok/s");
    let coloured = terminal.coloured();
    let (_, answer) = coloured.split_once(question).unwrap();
    let answer = answer.lines().find(|line| line.contains("Paris")).unwrap();
    assert!(answer.starts_with("\x1b[2m"), "{answer:?}");
    let path = model("smollm2", NAME).unwrap();
    let template = template.to_str().unwrap();
    let piped = fornax([
        "run",
        &path,
        question,
        "--device",
        "cpu",
        "--context",
        "1024",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        "--chat-template-file",
        template,
    ])
    .stdout;
    assert!(piped.contains("Paris") && !piped.contains('\x1b'), "{piped}");
}

#[test]
fn a_resized_terminal_keeps_a_long_line_whole() {
    let test = "a_resized_terminal_keeps_a_long_line_whole";
    let Some(terminal) = Terminal::start(test, "", "--temperature 0 --max-tokens 2") else { return };
    let long = "漢字 and words, ".repeat(12);
    terminal.type_on(&long);
    terminal.until("and words, 漢字");
    terminal.tmux(&["resize-window", "-x", "40", "-y", "30"]);
    terminal.tmux(&["resize-window", "-x", "120", "-y", "30"]);
    terminal.type_on("the end");
    terminal.press("Enter");
    terminal.until(ANSWERED);
    let saved = terminal.file("long.json");
    terminal.type_line(&format!("/save {}", saved.display()));
    terminal.until("2 messages are saved");
    let saved: serde_json::Value = serde_json::from_str(&fs::read_to_string(saved).unwrap()).unwrap();
    assert_eq!(saved["messages"][0]["content"], format!("{long}the end"));
}

#[test]
fn a_pipe_adds_to_the_prompt_and_gets_plain_text() {
    let test = "a_pipe_adds_to_the_prompt_and_gets_plain_text";
    let Some(path) = model("smollm2", test) else { return };
    let common = ["--temperature", "0", "--max-tokens", "12", "--device", "cpu", "--context", "512"];
    let run = |args: &[&str], input: &str| {
        let args: Vec<&str> = ["run", &path].iter().chain(args).chain(&common).copied().collect();
        let ran = fornax_with_input(&args, input);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert!(!ran.stdout.contains('\x1b') && !ran.stderr.contains('\x1b'), "{}{}", ran.stdout, ran.stderr);
        ran
    };
    // The same text in both ways is the same question.
    let piped = run(&["Name the animal."], "A cat sat on a mat.\n");
    let whole = run(&["Name the animal.\n\nA cat sat on a mat."], "");
    assert_eq!(piped.stdout, whole.stdout);
    // Lines of a pipe are messages, never commands; """ holds several together.
    let lines = run(&[], "/exit\n\"\"\"two\nlines\"\"\"\n");
    assert_eq!(lines.stderr.matches(ANSWERED).count(), 2, "{}", lines.stderr);
    let system = run(&["--system", "Say only: blue.", "What colour?"], "");
    assert!(system.stderr.contains(ANSWERED));
    assert_ne!(system.stdout, run(&["What colour?"], "").stdout);
    // Bytes that are no text.
    let mut child = command(&cache());
    child.args(["run", &path, "Summarise"]).stdin(bytes(&[0xff, 0xfe]));
    crate::ran(&mut child).fails(2, "INVALID_INPUT", &["standard input"]);
    fornax(["run", &path, "a", "b"]).fails(2, "INVALID_INPUT", &["unexpected argument 'b'"]);
}

/// A file with these bytes, as standard input.
fn bytes(bytes: &[u8]) -> fs::File {
    let mut file = tempfile::tempfile().unwrap();
    use std::io::{Seek, Write};
    file.write_all(bytes).unwrap();
    file.rewind().unwrap();
    file
}

#[test]
fn answers_go_to_a_pipe_while_questions_are_typed() {
    let test = "answers_go_to_a_pipe_while_questions_are_typed";
    let Some(terminal) = Terminal::start(test, "", "--temperature 0 --max-tokens 8") else { return };
    let path = model("smollm2", test).unwrap();
    let out = terminal.file("answers.txt");
    terminal.run(
        "",
        &format!(
            "{path} --device cpu --context 256 --temperature 0 --max-tokens 8 > {}",
            Path::new(&out).display()
        ),
    );
    terminal.until_ready();
    terminal.type_line("What is the capital of France?");
    terminal.until(ANSWERED);
    let written = fs::read_to_string(&out).unwrap();
    assert!(written.contains("Paris") && !written.contains('\x1b') && !written.contains("> "), "{written}");
}
