//! Other people's agents, unchanged, through a loop of a tool and an answer. What their model says is scripted: what is
//! tested is the protocol. `cargo xtask prove clients` installs them; `FORNAX_AGENTS` is the folder where they are.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::world::{Setup, World};

/// A call of the tool that the suites have, and what is said to its result.
const WEATHER: &str =
    "<tool_call>{\"name\": \"weather_of\", \"arguments\": {\"city\": \"Paris\"}}</tool_call>";

/// What the model says to its result by itself, and as the output that was asked for must be: it is asked for anew.
const MILD: &str = "<think>\nHm.\n</think>\n\nIt is mild.";
const REPORT: &str = "{\"degrees\":18}";

/// The folder with `python` and `python-litellm` (environments) and `npm` (with `node_modules`).
fn installed(test: &str) -> Option<PathBuf> {
    let folder = env::var_os("FORNAX_AGENTS").map(PathBuf::from).filter(|folder| folder.is_dir());
    if folder.is_none() {
        println!("SKIP {test}: no FORNAX_AGENTS");
    }
    folder
}

/// Runs a client against a model that says these acts, one for each request.
async fn run(acts: &[&str], command: impl FnOnce(&str) -> Command) -> String {
    let setup = Setup { context: 200_000, ..Setup::skilled(&acts.join("\x0c")) };
    let world = World::ready(setup).await;
    let mut command = command(&format!("http://{}", world.address));
    let ran = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let Output { status, stdout, stderr } = ran;
    let said = String::from_utf8_lossy(&stdout).into_owned();
    assert!(status.success(), "{said}{}", String::from_utf8_lossy(&stderr));
    world.stopped().await.unwrap();
    said
}

fn suite(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn python_s_agents_call_a_tool_and_answer() {
    let Some(folder) = installed("python_s_agents_call_a_tool_and_answer") else { return };
    let python = |name: &'static str| {
        // It wants an older client of OpenAI's than the others.
        let environment = if name == "litellm" { "python-litellm" } else { "python" };
        let program = folder.join(environment).join("bin/python");
        move |base: &str| {
            let mut command = Command::new(program);
            command.arg(suite("agents.py")).args([name, base]);
            command
        }
    };
    // It demands each call, whose opening is written for the model.
    let call = "{\"name\":\"weather_of\",\"arguments\":{\"city\":\"Paris\"}}";
    let answer = "{\"name\":\"final_answer\",\"arguments\":{\"answer\":\"mild\"}}";
    run(&[call, answer], python("smolagents")).await;
    // Their tools are strict: the arguments are asked for anew, too.
    for name in ["langchain", "openai_agents", "pydantic_ai"] {
        run(&[WEATHER, "{\"city\":\"Paris\"}", MILD, REPORT], python(name)).await;
    }
    run(&["Hi."], python("litellm")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ai_sdk_calls_a_tool_and_makes_an_object() {
    let Some(folder) = installed("the_ai_sdk_calls_a_tool_and_makes_an_object") else { return };
    run(&[WEATHER, MILD, REPORT], |base| {
        let mut command = Command::new("node");
        command.arg(suite("ai_sdk.mjs")).arg(base).arg(folder.join("npm/node_modules"));
        command
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn coding_agents_run_a_command_and_answer() {
    let Some(folder) = installed("coding_agents_run_a_command_and_answer") else { return };
    let work = tempfile::tempdir().unwrap();
    let home = work.path().join("home");
    let bin = folder.join("npm/node_modules");
    let at = |program: PathBuf| {
        let mut command = Command::new(program);
        command.current_dir(work.path()).env("HOME", &home).stdin(std::process::Stdio::null());
        command
    };
    std::fs::create_dir_all(home.join("codex")).unwrap();

    // Claude Code, by Anthropic's API.
    let call = "<tool_call>{\"name\": \"Bash\", \"arguments\": {\"command\": \"echo it-ran > by-claude\", \"description\": \"Runs\"}}</tool_call>";
    let said = run(&[call, "The command has run."], |base| {
        let mut command = at(bin.join("@anthropic-ai/claude-code-linux-x64/claude"));
        command.args(["-p", "Run it.", "--allowedTools", "Bash", "--output-format", "json"]);
        command.env("ANTHROPIC_BASE_URL", base).env("ANTHROPIC_API_KEY", "fk-none");
        command.env("ANTHROPIC_MODEL", "script").env("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1");
        command
    })
    .await;
    assert!(said.contains("The command has run.") && said.contains("\"num_turns\":2"), "{said}");
    assert_eq!(std::fs::read_to_string(work.path().join("by-claude")).unwrap(), "it-ran\n");

    // Codex, by OpenAI's responses.
    let call = "<tool_call>{\"name\": \"exec_command\", \"arguments\": {\"cmd\": \"echo it-ran > by-codex\"}}</tool_call>";
    let said = run(&[call, "The command has run."], |base| {
        let config = format!(
            "model = \"script\"\nmodel_provider = \"fornax\"\n[model_providers.fornax]\nname = \"Fornax\"\n\
             base_url = \"{base}/v1\"\nwire_api = \"responses\"\nrequest_max_retries = 0\nstream_max_retries = 0\n"
        );
        std::fs::write(home.join("codex/config.toml"), config).unwrap();
        let mut command = at(bin.join(".bin/codex"));
        command.args(["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Run it."]);
        command.env("CODEX_HOME", home.join("codex"));
        command
    })
    .await;
    assert!(said.contains("The command has run."), "{said}");
    assert_eq!(std::fs::read_to_string(work.path().join("by-codex")).unwrap(), "it-ran\n");
}
