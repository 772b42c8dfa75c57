//! The server as a process: its start, its clients, its end.

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::{cache, command, fornax};

const KEY: &str = "a-key-for-tests-0123456789";

/// A running `fornax serve`, ended with the test.
struct Serving {
    child: Child,
    address: String,
    stderr: PathBuf,
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Already gone is as good.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Serving {
    /// Starts the default model on a port of the system's choice, with a key.
    fn start(folder: &Path, args: &[&str]) -> Serving {
        let log = std::fs::File::create(folder.join("log")).unwrap();
        Serving::start_logging(folder, args, log.into())
    }

    fn start_logging(folder: &Path, args: &[&str], log: Stdio) -> Serving {
        let (keys, stderr) = (folder.join("keys"), folder.join("log"));
        std::fs::write(&keys, format!("{KEY} adapters")).unwrap();
        // A secret that everybody may read is warned of.
        std::fs::set_permissions(&keys, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let mut child = command(&cache())
            .args(["serve", "smollm2", "--port", "0", "--device", "cpu", "--api-key-file"])
            .arg(&keys)
            .args(args)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        // Where the log is a pipe, nobody reads it.
        drop(child.stderr.take());
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").map(str::to_owned);
        let address = address
            .unwrap_or_else(|| panic!("{line:?} {}", std::fs::read_to_string(&stderr).unwrap_or_default()));
        let serving = Serving { child, address, stderr };
        serving.until("/ready", "HTTP/1.1 200");
        serving
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    fn post(&self, path: &str, body: &str) -> String {
        self.send_to(path, &format!("Content-Length: {}", body.len()), body.as_bytes())
    }

    /// Sends whole what may be refused before it is read; what comes back.
    fn send(&self, head: &str, body: &[u8]) -> String {
        self.send_to("/v1/completions", head, body)
    }

    fn send_to(&self, path: &str, head: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n{head}\r\n\r\n"
        );
        // Refused in the middle: the answer is there all the same.
        drop(stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)));
        let mut response = Vec::new();
        drop(stream.read_to_end(&mut response));
        String::from_utf8_lossy(&response).into_owned()
    }

    /// A figure of the process in bytes.
    fn memory(&self, figure: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(figure)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }

    /// Asks until the answer says this.
    fn until(&self, path: &str, wanted: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.get(path).contains(wanted) {
            assert!(Instant::now() < deadline, "{path} never said {wanted}");
        }
    }

    /// Sends a signal.
    fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(sent.unwrap().success());
    }

    fn ended(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        (status, std::fs::read_to_string(&self.stderr).unwrap())
    }
}

#[test]
fn models_that_are_served_beside_each_other_have_contexts_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let contexts = ["--context", "1024", "--model-context", "minilm=256", "--parallel", "1"];
    let serving = Serving::start(folder.path(), &[&["minilm"][..], &contexts[..]].concat());
    let models = serving.get("/v1/models");
    let (_, body) = models.split_once("\r\n\r\n").unwrap();
    let models: serde_json::Value = serde_json::from_str(body).unwrap();
    let of = |index: usize| {
        (models["data"][index]["id"].as_str(), models["data"][index]["max_model_len"].as_u64())
    };
    assert_eq!((of(0), of(1)), ((Some("smollm2"), Some(1024)), (Some("minilm"), Some(256))));
    let wrong = fornax(["serve", "smollm2", "--port", "0", "--model-context", "other=256"]);
    assert!(wrong.stderr.contains("no model is called \"other\""), "{}", wrong.stderr);
}

#[test]
fn openai_python_runs_every_scenario() {
    let Some(python) = env::var_os("FORNAX_PYTHON").map(PathBuf::from).filter(|python| python.exists())
    else {
        println!("SKIP openai_python_runs_every_scenario: no FORNAX_PYTHON with openai");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let jobs = folder.path().join("jobs.db").to_str().unwrap().to_owned();
    let args = [
        "--context",
        "2048",
        "--parallel",
        "4",
        "--max-per-key",
        "8",
        "--max-body",
        "1MiB",
        "--jobs-db",
        &jobs,
    ];
    let serving = Serving::start(folder.path(), &args);
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/openai_suite.py");
    let base = format!("http://{}", serving.address);
    let ran = Command::new(python).arg(suite).args([&base, KEY, "smollm2"]).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(said.lines().filter(|line| line.starts_with("ok ")).count(), 22, "{said}");
    // Every one of them has left.
    serving.until("/health", "\"pages_used\":0");
}

#[test]
fn tools_and_other_apis_work_with_their_own_clients() {
    let Some(python) = env::var_os("FORNAX_PYTHON").map(PathBuf::from).filter(|python| python.exists())
    else {
        println!(
            "SKIP tools_and_other_apis_work_with_their_own_clients: no FORNAX_PYTHON with anthropic and ollama"
        );
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let clients = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients");
    let template = clients.join("tools.jinja");
    let serving = Serving::start(
        folder.path(),
        &["--context", "2048", "--parallel", "2", "--chat-template-file", template.to_str().unwrap()],
    );
    let base = format!("http://{}", serving.address);
    let suite = clients.join("tools_suite.py");
    let ran = Command::new(python).arg(suite).args([&base, KEY, "smollm2"]).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(said.lines().filter(|line| line.starts_with("ok ")).count(), 12, "{said}");
    // Every one of them has left.
    serving.until("/health", "\"pages_used\":0");
}

#[test]
fn floods_get_a_clear_status_and_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(folder.path(), &["--context", "64", "--max-body", "1MiB"]);
    // Sent by 32 clients at once: 320 MiB of known length, 320 MiB of unknown, headers, bytes that are no text.
    let large = vec![b'x'; 10 << 20];
    let chunk = [format!("{:x}\r\n", large.len()).as_bytes(), &large, b"\r\n0\r\n\r\n"].concat();
    let length = format!("Content-Length: {}", large.len());
    let header = format!("X: {}", "y".repeat(1 << 20));
    let no_text = vec![0xff; 1 << 19];
    let no_text_length = format!("Content-Length: {}", no_text.len());
    let floods: [(&str, &[u8], &[&str]); 4] = [
        (&length, &large, &["413"]),
        ("Transfer-Encoding: chunked", &chunk, &["413"]),
        (&header, b"", &["431"]),
        (&no_text_length, &no_text, &["400"]),
    ];
    let half_open: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut stream = TcpStream::connect(&serving.address).unwrap();
            stream
                .write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nX: ")
                .unwrap();
            stream
        })
        .collect();
    // The peak is counted from here on.
    std::fs::write(format!("/proc/{}/clear_refs", serving.child.id()), "5").unwrap();
    let before = serving.memory("VmRSS:");
    for (head, body, statuses) in floods {
        std::thread::scope(|scope| {
            for _ in 0..32 {
                scope.spawn(|| {
                    let response = serving.send(head, body);
                    // A connection that is broken off with bytes unread may lose the answer on its way.
                    let status = response.get(9..12).unwrap_or("none");
                    assert!(status == "none" || statuses.contains(&status), "{head:.40}: {response:.200}");
                });
            }
        });
    }
    let grown = serving.memory("VmHWM:").saturating_sub(before);
    assert!(grown < 96 << 20, "{grown} bytes");
    assert!(serving.get("/health").contains("\"status\":\"ready\""));
    drop(half_open);
}

/// Two megabytes of text to be cut into tokens took more than a gigabyte, and one of a batch more than four.
#[test]
fn what_is_small_to_ask_takes_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    let jobs = folder.path().join("jobs.db");
    let serving = Serving::start(folder.path(), &["--context", "64", "--jobs-db", jobs.to_str().unwrap()]);
    let text = json!({"content": "hello world ".repeat((2 << 20) / 12), "with_pieces": true}).to_string();
    let items: Vec<_> = (0..4096).map(|id| json!({"id": id.to_string(), "text": "x"})).collect();
    let batch = json!({"input": {"shared_prefix": "p ".repeat(500_000), "items": items}}).to_string();
    std::fs::write(format!("/proc/{}/clear_refs", serving.child.id()), "5").unwrap();
    let before = serving.memory("VmRSS:");
    let pieces = serving.post("/tokenize", &text);
    assert!(pieces.starts_with("HTTP/1.1 200") && pieces.len() > 8 << 20, "{} bytes", pieces.len());
    let refused = serving.post("/v2/default/run", &batch);
    assert!(refused.starts_with("HTTP/1.1 400"), "{refused}");
    let grown = serving.memory("VmHWM:").saturating_sub(before);
    assert!(grown < 256 << 20, "{grown} bytes");
}

#[test]
fn runpod_python_runs_every_scenario() {
    let Some(python) = env::var_os("FORNAX_PYTHON").map(PathBuf::from).filter(|python| python.exists())
    else {
        println!("SKIP runpod_python_runs_every_scenario: no FORNAX_PYTHON with runpod");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let jobs = folder.path().join("jobs.db");
    let args = ["--context", "2048", "--parallel", "4", "--jobs-db", jobs.to_str().unwrap()];
    let serving = Serving::start(folder.path(), &args);
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/runpod_suite.py");
    let base = format!("http://{}", serving.address);
    let ran = Command::new(python).arg(suite).args([&base, KEY]).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(said.lines().filter(|line| line.starts_with("ok ")).count(), 6, "{said}");
    serving.until("/health", "\"pages_used\":0");
}

#[test]
fn a_browser_chats_looks_at_the_engine_and_follows_jobs() {
    const NAME: &str = "a_browser_chats_looks_at_the_engine_and_follows_jobs";
    let python = env::var_os("FORNAX_PYTHON").map(PathBuf::from).filter(|python| python.exists());
    let (Some(python), Some(chromium)) = (python, program("chromium")) else {
        println!("SKIP {NAME}: no FORNAX_PYTHON with playwright, or no chromium");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let jobs = folder.path().join("jobs.db");
    let args =
        ["second=smollm2", "--context", "1024", "--parallel", "2", "--jobs-db", jobs.to_str().unwrap()];
    let serving = Serving::start(folder.path(), &args);
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/console_suite.py");
    let base = format!("http://{}", serving.address);
    // Screenshots stay there for people to look at.
    let screenshots = Path::new(env!("CARGO_TARGET_TMPDIR")).join("console");
    let ran =
        Command::new(python).arg(suite).args([&base, KEY]).arg(chromium).arg(screenshots).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(said.lines().filter(|line| line.starts_with("ok ")).count(), 33, "{said}");
}

#[test]
fn a_page_of_an_allowed_origin_calls_as_its_clients_do() {
    const NAME: &str = "a_page_of_an_allowed_origin_calls_as_its_clients_do";
    let python = env::var_os("FORNAX_PYTHON").map(PathBuf::from).filter(|python| python.exists());
    let (Some(python), Some(chromium)) = (python, program("chromium")) else {
        println!("SKIP {NAME}: no FORNAX_PYTHON with playwright, or no chromium");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    // The page's port is part of its origin: one that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let origin = format!("http://127.0.0.1:{port}");
    let serving = Serving::start(folder.path(), &["--context", "512", "--cors-origin", &origin]);
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/pages_suite.py");
    let base = format!("http://{}", serving.address);
    let ran = Command::new(python)
        .arg(suite)
        .args([&base, KEY, "smollm2"])
        .arg(chromium)
        .arg(port)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(said.lines().filter(|line| line.starts_with("ok ")).count(), 3, "{said}");
}

#[test]
fn examples_in_python_answer() {
    const NAME: &str = "examples_in_python_answer";
    let Some(python) = program("python3") else {
        println!("SKIP {NAME}: no python3");
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let run = |serving: &Serving, script: &str, args: &[&str]| {
        let ran = Command::new(&python)
            .arg(root.join("examples").join(script))
            .arg(format!("http://{}", serving.address))
            .args(args)
            .args(["--key", KEY])
            .output()
            .unwrap();
        assert!(ran.status.success(), "{script}: {}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8(ran.stdout).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let facts = [
        "The heron is a tall bird with a long neck.",
        "Iron melts at 1538 degrees.",
        "Bread is made of flour and water.",
    ];
    let text = folder.path().join("facts.txt");
    std::fs::write(&text, facts.join("\n\n")).unwrap();
    let serving = Serving::start(folder.path(), &["minilm", "--model-context", "smollm2=1024"]);
    let said = run(
        &serving,
        "retrieval/retrieve.py",
        &["At what temperature does iron melt?", text.to_str().unwrap()],
    );
    // The paragraph that answers is the first of three, and an answer follows.
    assert!(said.lines().next().unwrap().contains("Iron melts"), "{said}");
    assert!(said.lines().count() >= 4, "{said}");
    drop(serving);

    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/tools.jinja");
    let args = ["--context", "2048", "--chat-template-file", template.to_str().unwrap()];
    let serving = Serving::start(folder.path(), &args);
    let inputs = root.join("examples/documents/in");
    let said =
        run(&serving, "agent/agent.py", &["Which files are there?", inputs.to_str().unwrap(), "--must-call"]);
    let calls = ["calls files({})", "calls read({", "calls add({"];
    assert!(calls.iter().any(|call| said.starts_with(call)), "{said}");
}

/// A program of the system's, if it is installed.
fn program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.exists())
}

#[test]
fn prometheus_scrapes_and_evaluates_the_rules() {
    const NAME: &str = "prometheus_scrapes_and_evaluates_the_rules";
    let (Some(prometheus), Some(promtool)) = (program("prometheus"), program("promtool")) else {
        println!("SKIP {NAME}: no prometheus and promtool");
        return;
    };
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/prometheus");
    let tool = |args: &[&str]| {
        let ran = Command::new(&promtool).args(args).current_dir(&deploy).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success(), "{args:?}: {said}{}", String::from_utf8_lossy(&ran.stderr));
    };
    tool(&["check", "config", "prometheus.yml"]);
    tool(&["test", "rules", "rules_test.yml"]);

    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(folder.path(), &["--context", "512", "--metrics-open"]);
    let config = std::fs::read_to_string(deploy.join("prometheus.yml")).unwrap();
    let config = config
        .replace("15s", "200ms")
        .replace("localhost:8080", &serving.address)
        .replace("rules.yml", deploy.join("rules.yml").to_str().unwrap());
    assert!(config.contains("200ms") && config.contains(&serving.address), "the example has other words");
    let file = folder.path().join("prometheus.yml");
    std::fs::write(&file, config).unwrap();
    // It does not say which port the system chose: one that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let child = Command::new(prometheus)
        .arg(format!("--config.file={}", file.display()))
        .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let stderr = folder.path().join("log");
    let watching = Serving { child, address: format!("127.0.0.1:{port}"), stderr };
    let deadline = Instant::now() + Duration::from_secs(60);
    while TcpStream::connect(&watching.address).is_err() {
        assert!(Instant::now() < deadline, "Prometheus never listened");
    }
    let query = |query: &str, wanted: &str| watching.until(&format!("/api/v1/query?query={query}"), wanted);
    query("up", "\"1\"]");
    query("vllm:num_requests_running", "\"model_name\":\"smollm2\"");
    query("fornax:generation_tokens:rate1m", "\"model_name\":\"smollm2\"");
    let rules = watching.get("/api/v1/rules");
    assert!(rules.contains("FornaxDown") && !rules.contains("\"health\":\"err\""), "{rules}");
    assert!(watching.get("/api/v1/alerts").contains("\"alerts\":[]"));
}

#[test]
fn jobs_of_the_command_line_survive_a_killed_server() {
    let folder = tempfile::tempdir().unwrap();
    let (jobs, keys) = (folder.path().join("jobs.db"), folder.path().join("keys"));
    let args = ["--context", "512", "--jobs-db", jobs.to_str().unwrap()];
    let serving = Serving::start(folder.path(), &args);
    let ask = |serving: &Serving, args: &[&str]| {
        let server = format!("http://{}", serving.address);
        let all = args.iter().copied().chain(["--server", &server, "--api-key-file", keys.to_str().unwrap()]);
        fornax(["jobs"].into_iter().chain(all))
    };
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let schema = r#"{"type": "object", "properties": {"kind": {"enum": ["fruit", "metal"]}}, "required": ["kind"],
        "additionalProperties": false}"#;
    assert_eq!(ask(&serving, &["schema", "kinds", &file("kinds.json", schema)]).stdout, "kinds registered\n");
    let (apple, iron) = (file("apple.txt", "An apple."), file("iron.txt", "Iron."));
    let task = file("task.txt", "Fruit or metal?");
    let submit = [
        "submit",
        "--schema",
        "kinds",
        "--prefix-file",
        &task,
        "--params",
        "{\"temperature\": 0}",
        &apple,
        &iron,
    ];
    let id = ask(&serving, &submit).stdout.trim().to_owned();
    let respond = |serving: &Serving, body: serde_json::Value| {
        let answer = serving.post("/v1/responses", &body.to_string());
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        serde_json::from_str::<serde_json::Value>(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    let few = |input: &str| json!({"input": input, "max_output_tokens": 8, "temperature": 0});
    let first = respond(&serving, few("My name is Ada."));
    let mut later = few("What is my name?");
    later["previous_response_id"] = first["id"].clone();
    let whole = respond(&serving, later.clone());
    later["background"] = json!(true);
    let queued = respond(&serving, later);
    // Killed at once, whether or not they were begun.
    serving.signal("KILL");
    drop(serving);
    let serving = Serving::start(folder.path(), &args);
    let waited = ask(&serving, &["wait", &id]);
    let status: serde_json::Value = serde_json::from_str(&waited.stdout).unwrap();
    assert_eq!(
        (&status["status"], &status["output"]["success"]),
        (&"COMPLETED".into(), &true.into()),
        "{status}"
    );
    let path = format!("/v1/responses/{}", queued["id"].as_str().unwrap());
    serving.until(&path, "\"output_tokens\"");
    let late = serving.json(&path);
    assert_eq!(
        (&late["usage"]["input_tokens"], &late["output"][0]["content"], &late["previous_response_id"]),
        (&whole["usage"]["input_tokens"], &whole["output"][0]["content"], &first["id"]),
        "{late}"
    );
    let results = status["output"]["output"].as_array().unwrap();
    let ids: Vec<&str> = results.iter().map(|result| result["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["apple.txt", "iron.txt"]);
    assert!(ask(&serving, &["list", "--status", "COMPLETED"]).stdout.starts_with(&id));
    assert!(ask(&serving, &["export"]).stdout.contains("\"success\":true"));
    assert_eq!(ask(&serving, &["cancel", &id]).stdout, format!("{id} COMPLETED\n"));
    ask(&serving, &["status", "unknown"]).fails(2, "INVALID_INPUT", &["JOB_NOT_FOUND", "no such job"]);
    let input = file("bad.json", r#"{"prompt": "a", "colour": 1}"#);
    ask(&serving, &["submit", "--input", &input]).fails(2, "INVALID_INPUT", &["input.colour"]);
}

#[test]
fn sigterm_lets_a_stream_finish_and_the_process_ends_well() {
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(folder.path(), &["--context", "512", "--log", "json"]);
    let mut stream = TcpStream::connect(&serving.address).unwrap();
    let body = r#"{"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": true, "stream": true, "temperature": 0}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut first = [0; 256];
    let count = stream.read(&mut first).unwrap();
    serving.signal("TERM");
    let mut rest = String::from_utf8(first[..count].to_vec()).unwrap();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    let (status, log) = serving.ended();
    assert_eq!(status.code(), Some(0), "{log}");
    for line in log.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        assert!(!line.to_string().contains("Once upon"), "{line}");
    }
    assert!(log.contains("\"drained\""), "{log}");
}

#[test]
fn a_request_is_logged_once_when_its_answer_ends_and_polling_is_not() {
    let lines = |args: &[&str], ask: &dyn Fn(&Serving)| -> (String, Vec<serde_json::Value>) {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(folder.path(), &[&["--context", "256"], args].concat());
        ask(&serving);
        serving.signal("TERM");
        let (status, log) = serving.ended();
        assert!(status.success(), "{log}");
        let requests = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        (log.clone(), requests.filter(|line| line["message"] == "request").collect())
    };
    let chat =
        r#"{"messages": [{"role": "user", "content": "secret question"}], "max_tokens": 5, "stream": true}"#;
    let ask = |serving: &Serving| {
        for path in ["/metrics", "/health", "/console/live", "/"] {
            assert!(serving.get(path).starts_with("HTTP/1.1 200"), "{path}");
        }
        assert!(serving.post("/v1/chat/completions", chat).contains("[DONE]"));
        assert!(serving.get("/nothing").starts_with("HTTP/1.1 404"));
    };
    let (log, requests) = lines(&["--log", "json"], &ask);
    let paths: Vec<&str> = requests.iter().map(|line| line["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["/v1/chat/completions", "/nothing"], "{log}");
    assert!(!log.contains("secret question"), "{log}");
    let answer = &requests[0];
    assert_eq!((&answer["model"], &answer["completion_tokens"]), (&"smollm2".into(), &5.into()), "{answer}");
    assert_eq!((&answer["finish"], &answer["status"]), (&"length".into(), &200.into()), "{answer}");
    assert!(answer["prompt_tokens"].as_u64().unwrap() > 10 && answer["cached_tokens"] == 0, "{answer}");
    let (first, total) = (answer["first_token_ms"].as_u64().unwrap(), answer["total_ms"].as_u64().unwrap());
    assert!(first <= total, "{answer}");
    assert!(requests[1].get("model").is_none() && requests[1]["code"] != "", "{}", requests[1]);
    // What was left out is there for whoever asks for it.
    let (_, requests) = lines(&["--log", "json", "--log-level", "debug"], &ask);
    assert!(requests.iter().any(|line| line["path"] == "/console/live"), "{requests:?}");
    // People are told where everything is.
    let (log, _) = lines(&[], &|_| {});
    for words in [
        "model    smollm2 · 135M Q4_1 · 256 tokens x 4 · cpu · ",
        "console  http://127.0.0.1:",
        "/v1 (OpenAI's",
    ] {
        assert!(log.contains(words), "{words}: {log}");
    }
}

#[test]
fn a_log_that_nobody_reads_stops_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut serving = Serving::start_logging(folder.path(), &["--context", "64"], Stdio::piped());
    assert!(serving.get("/v1/models").contains("HTTP/1.1 200"));
    serving.signal("TERM");
    assert_eq!(serving.child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_reload_takes_new_keys() {
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(folder.path(), &["--context", "64"]);
    assert!(serving.get("/v1/models").contains("HTTP/1.1 200"));
    std::fs::write(folder.path().join("keys"), "another-key-0123456789").unwrap();
    serving.signal("HUP");
    serving.until("/v1/models", "HTTP/1.1 401");
    serving.signal("INT");
    assert_eq!(serving.ended().0.code(), Some(0));
}

#[test]
fn a_configuration_file_is_as_good_as_flags_and_the_plan_is_everybodys() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("serve.toml");
    let settings = "context = 128\nparallel = 3\nmemory-limit = \"1GiB\"\nserved-model-name = \"my/own\"\nlog = \"json\"\n";
    std::fs::write(&config, settings).unwrap();
    let serving = Serving::start(folder.path(), &["--config", config.to_str().unwrap()]);
    let health = serving.get("/health");
    let health: serde_json::Value = serde_json::from_str(health.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!((&health["model"], &health["context"]), (&"my/own".into(), &128.into()));
    assert!(serving.get("/v1/models/my/own").contains("HTTP/1.1 200"));
    // What `plan` says is what is served, and what the allocator counted.
    let flags = ["--device", "cpu", "--context", "128", "--parallel", "3", "--memory-limit", "1GiB"];
    let planned = fornax(["plan", "smollm2", "--json"].iter().chain(&flags)).json();
    assert_eq!(health["plan"], planned);
    let (planned, counted) = (&planned["devices"][0]["bytes"], &health["devices"][0]["bytes"]);
    for purpose in ["weights", "kv", "logits"] {
        assert!(planned[purpose].as_u64().is_some_and(|bytes| bytes > 0), "{planned}");
        assert_eq!(planned[purpose], counted[purpose], "{purpose}");
    }
}

impl Serving {
    /// What a model says to a prompt.
    fn ask(&self, model: &str) -> String {
        let body = format!(
            "{{\"model\": \"{model}\", \"prompt\": \"The sky is\", \"max_tokens\": 4, \"temperature\": 0}}"
        );
        self.send(&format!("Content-Length: {}", body.len()), body.as_bytes())
    }

    /// The JSON behind a response's head.
    fn json(&self, path: &str) -> serde_json::Value {
        let response = self.get(path);
        let (_, body) = response.split_once("\r\n\r\n").unwrap();
        let body = body.trim_start_matches(|byte| byte != '{').trim_end_matches(|byte| byte != '}');
        serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {response}"))
    }
}

/// Bytes that the default model takes with these flags, without the margin, which depends on the limit.
fn planned(flags: &[&str]) -> u64 {
    let plan = fornax(["plan", "smollm2", "--json"].iter().chain(flags)).json();
    let device = &plan["devices"][0];
    device["total_bytes"].as_u64().unwrap() - device["bytes"]["margin"].as_u64().unwrap()
}

#[test]
fn models_make_way_for_each_other_and_give_their_memory_back() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--device", "cpu", "--context", "256", "--parallel", "1"];
    // Room for one and a half, and the least margin.
    let limit = (planned(&flags) * 3 / 2 + (16 << 20)).to_string();
    let both = ["serve", "smollm2", "two=smollm2", "--preload", "--port", "0", "--memory-limit", &limit];
    fornax(both.iter().chain(&flags)).fails(
        3,
        "MODEL_DOES_NOT_FIT",
        &["MiB may be used", "beside \"smollm2\""],
    );
    let args = ["--context", "256", "--parallel", "1", "--memory-limit", &limit, "second,other=smollm2"];
    let serving = Serving::start(folder.path(), &args);
    let health = serving.json("/health");
    let (devices, bytes) = (health["devices"].clone(), health["models"][0]["planned_bytes"].clone());
    let mut resident = Vec::new();
    let first = serving.ask("smollm2");
    assert!(first.contains("200 OK") && first.contains("\"model\":\"smollm2\""), "{first}");
    for round in 0..10 {
        let second = serving.ask("other");
        assert!(second.contains("200 OK") && second.contains("\"model\":\"second\""), "{round}: {second}");
        let models = serving.json("/v1/models");
        assert_eq!(
            (&models["data"][0]["state"], &models["data"][1]["state"]),
            (&"unloaded".into(), &"loaded".into())
        );
        assert!(serving.ask("smollm2").contains("200 OK"), "{round}");
        // To the byte what it was at the start.
        let health = serving.json("/health");
        assert_eq!((&health["devices"], &health["models"][0]["planned_bytes"]), (&devices, &bytes));
        assert_eq!(health["models"][1]["state"], "unloaded");
        resident.push(serving.memory("VmRSS"));
    }
    // Each round loads a hundred megabytes twice. The allocator takes what it wants at moments of its own, on a busy
    // machine in half of the rounds, and then no more; what is lost would be lost in every round.
    let mut growth: Vec<i64> =
        resident.windows(2).map(|pair| pair[1].cast_signed() - pair[0].cast_signed()).collect();
    growth.sort_unstable();
    assert!(growth[growth.len() / 4] < 1 << 20, "{resident:?}");
    assert!(resident[9] < resident[0] + (90 << 20), "{resident:?}");
    let metrics = serving.get("/metrics");
    assert!(metrics.contains("fornax_model_loads_total{model_name=\"smollm2\"} 11"), "{metrics}");
    assert!(metrics.contains("fornax_model_loads_total{model_name=\"second\"} 10"), "{metrics}");
    let unknown = serving.ask("third");
    assert!(
        unknown.contains("404 Not Found") && unknown.contains(r#"\"smollm2\", \"second\", \"other\""#),
        "{unknown}"
    );
    serving.signal("TERM");
    let (status, log) = serving.ended();
    assert!(status.success(), "{log}");
}

#[test]
fn an_idle_model_goes_and_the_next_request_brings_it_back() {
    let folder = tempfile::tempdir().unwrap();
    let serving =
        Serving::start(folder.path(), &["--context", "256", "--parallel", "1", "--idle-unload", "0.2"]);
    let loaded = serving.memory("VmRSS");
    serving.until("/v1/models", "\"state\":\"unloaded\"");
    let unloaded = serving.memory("VmRSS");
    // The weights alone are 90 MB.
    assert!(unloaded + (60 << 20) < loaded, "{loaded} {unloaded}");
    assert!(serving.get("/ready").contains("200 OK"));
    assert!(serving.ask("smollm2").contains("200 OK"));
}

/// Writes an adapter of rank 2 for what attention of the first layer adds, in rows of this many values.
fn write_adapter(folder: &Path, columns: usize) {
    std::fs::create_dir_all(folder).unwrap();
    let config =
        r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["o_proj"]}"#;
    std::fs::write(folder.join("adapter_config.json"), config).unwrap();
    let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
    for (half, shape) in [("A", [2, columns]), ("B", [columns, 2])] {
        let begin = bytes.len();
        // Large and of both signs, so that answers differ.
        let values = (0..2 * columns).map(|i| if i * 7919 % 13 < 6 { 0.5_f32 } else { -0.5 });
        bytes.extend(values.flat_map(f32::to_le_bytes));
        let name = format!("base_model.model.model.layers.0.self_attn.o_proj.lora_{half}.weight");
        let offsets = [begin, bytes.len()];
        header.insert(name, serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": offsets}));
    }
    let header = serde_json::Value::from(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
    std::fs::write(folder.join("adapter_model.safetensors"), file).unwrap();
}

#[test]
fn an_adapter_is_a_model_of_its_own_name_and_one_for_another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (own, other) = (folder.path().join("own"), folder.path().join("other"));
    write_adapter(&own, 576);
    write_adapter(&other, 64);
    let flag = |folder: &Path| format!("tuned={}", folder.display());
    let refused = ["serve", "smollm2", "--port", "0", "--device", "cpu", "--adapter", &flag(&other)];
    fornax(refused).fails(4, "MODEL_UNSUPPORTED", &["tuned", "[2, 64]", "[2, 576]", "another model"]);
    fornax(["serve", "smollm2", "--adapter", "tuned"]).fails(2, "INVALID_INPUT", &["NAME[@MODEL]=FOLDER"]);
    let lost = format!("tuned@big={}", own.display());
    let says = ["tuned@big", "no model is called \"big\"", "\"smollm2\""];
    fornax(["serve", "smollm2", "--adapter", &lost]).fails(2, "INVALID_INPUT", &says);
    let same = format!("smollm2={}", own.display());
    fornax(["serve", "smollm2", "--adapter", &same]).fails(2, "INVALID_INPUT", &["two models are called"]);

    let flags = ["--context", "256", "--parallel", "2", "--adapter", &flag(&own)];
    let serving = Serving::start(folder.path(), &flags);
    let models = serving.json("/v1/models");
    assert_eq!(
        (&models["data"][1]["id"], &models["data"][1]["parent"]),
        (&"tuned".into(), &"smollm2".into())
    );
    let text = |model: &str| {
        let answer = serving.ask(model);
        assert!(answer.contains("200 OK") && answer.contains(&format!("\"model\":\"{model}\"")), "{answer}");
        let (_, text) = answer.split_once("\"text\":").unwrap();
        text.split_once(",\"logprobs\"").unwrap().0.to_owned()
    };
    let (plain, tuned) = (text("smollm2"), text("tuned"));
    assert_ne!(plain, tuned);
    // Beside each other, in one batch, each is what it was alone.
    std::thread::scope(|scope| {
        for (model, wanted) in [("smollm2", &plain), ("tuned", &tuned)].repeat(4) {
            scope.spawn(move || assert_eq!(&text(model), wanted, "{model}"));
        }
    });
}

#[test]
fn adapters_are_loaded_and_unloaded_over_http_from_the_operators_folder_alone() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    write_adapter(&root.join("own"), 576);
    write_adapter(&root.join("wide"), 64);
    write_adapter(&folder.path().join("outside"), 576);
    let lost = ["serve", "smollm2", "--port", "0", "--adapter-root", "no/such/folder"];
    fornax(lost).fails(2, "INVALID_INPUT", &["--adapter-root no/such/folder"]);
    let fixed = format!("fixed={}", root.join("own").display());
    let root_flag = root.to_str().unwrap();
    let flags = ["--context", "256", "--parallel", "2", "--adapter", &fixed, "--adapter-root", root_flag];
    let jobs = folder.path().join("jobs.db");
    let more = ["--adapter-places", "1", "--jobs-db", jobs.to_str().unwrap()];
    let serving = Serving::start(folder.path(), &[&flags[..], &more].concat());
    let post = |path: &str, body: serde_json::Value| {
        let answer = serving.post(path, &body.to_string());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().to_owned(), body.to_owned())
    };
    let load =
        |name: &str, path: &str| post("/v1/load_lora_adapter", json!({"lora_name": name, "lora_path": path}));
    let refused = |(status, body): (String, String), wanted: &str, words: &[&str]| {
        assert_eq!(status, wanted, "{body}");
        words.iter().for_each(|words| assert!(body.contains(words), "{body} does not say {words}"));
    };
    let text = |model: &str| {
        let answer = serving.ask(model);
        assert!(answer.contains("200 OK") && answer.contains(&format!("\"model\":\"{model}\"")), "{answer}");
        let (_, text) = answer.split_once("\"text\":").unwrap();
        text.split_once(",\"logprobs\"").unwrap().0.to_owned()
    };
    let (plain, tuned) = (text("smollm2"), text("fixed"));
    assert_ne!(plain, tuned);
    for path in ["../outside", folder.path().join("outside").to_str().unwrap(), "nothing", "/etc"] {
        refused(load("evil", path), "404", &["MODEL_NOT_FOUND", "in the folders that the operator allows"]);
    }
    refused(load("wide", "wide"), "400", &["[2, 64]", "[2, 576]", "another model"]);
    refused(load("smollm2", "own"), "400", &["lora_name", "is a model's name already"]);
    let (status, said) = load("late", "own");
    assert_eq!((status.as_str(), said.contains("'late' added successfully")), ("200", true), "{said}");
    refused(load("late", "own"), "400", &["load_inplace"]);
    refused(load("more", "own"), "409", &["there is room for 1 adapters", "unload one first"]);
    // The same adapter as the one of the start, under its own name.
    assert_eq!((text("late"), text("smollm2")), (tuned.clone(), plain));
    let listed = serving.json("/v1/models");
    assert_eq!((&listed["data"][2]["id"], &listed["data"][2]["parent"]), (&"late".into(), &"smollm2".into()));
    let told = serving.get("/lora-adapters");
    assert!(told.contains(r#""name":"fixed""#) && told.contains(r#""path":"own""#), "{told}");
    // No job could wait for it.
    refused(post("/v2/late/run", json!({"input": {"prompt": "a"}})), "404", &["there is no such endpoint"]);
    refused(post("/v1/unload_lora_adapter", json!({"lora_name": "fixed"})), "400", &["lora_name"]);
    assert_eq!(post("/v1/unload_lora_adapter", json!({"lora_name": "late"})).0, "200");
    assert!(serving.ask("late").contains("404"));
    refused(
        post("/v1/unload_lora_adapter", json!({"lora_name": "late"})),
        "404",
        &["there is no such model"],
    );
    assert_eq!(load("again", "own").0, "200");
    assert_eq!(text("again"), tuned);
}

#[test]
fn every_served_model_may_have_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let (own, other) = (folder.path().join("own"), folder.path().join("other"));
    write_adapter(&own, 576);
    write_adapter(&other, 64);
    let flag = |names: &str, folder: &Path| format!("{names}={}", folder.display());
    // Of the model that is named, loaded or not, the shapes are said at the start.
    let wrong = flag("late@other", &other);
    let refused = ["serve", "smollm2", "second,other=smollm2", "--port", "0", "--device", "cpu", "--adapter"];
    let refused: Vec<&str> = refused.into_iter().chain([wrong.as_str()]).collect();
    fornax(refused).fails(4, "MODEL_UNSUPPORTED", &["late", "[2, 64]", "[2, 576]", "another model"]);

    let (early, late) = (flag("early", &own), flag("late@other", &own));
    let flags = ["second,other=smollm2", "--context", "256", "--adapter", &late, "--adapter", &early];
    let serving = Serving::start(folder.path(), &flags);
    let models = serving.json("/v1/models");
    let listed = models["data"].as_array().unwrap().iter();
    let listed: Vec<_> = listed.map(|model| (model["id"].as_str(), model["parent"].as_str())).collect();
    let wanted = [("smollm2", None), ("early", Some("smollm2")), ("second", None), ("late", Some("second"))];
    assert_eq!(listed, wanted.map(|(name, parent)| (Some(name), parent)));
    let text = |model: &str| {
        let answer = serving.ask(model);
        assert!(answer.contains("200 OK") && answer.contains(&format!("\"model\":\"{model}\"")), "{answer}");
        let (_, text) = answer.split_once("\"text\":").unwrap();
        text.split_once(",\"logprobs\"").unwrap().0.to_owned()
    };
    // The same weights twice: the adapter alone makes the difference, and brings its model when it is asked for.
    let late = text("late");
    assert_eq!(serving.json("/v1/models")["data"][2]["state"], "loaded");
    assert_eq!((text("early"), text("second")), (late.clone(), text("smollm2")));
    assert_ne!(late, text("second"));
}

/// A tiny encoder with a tokenizer of words.
fn tiny_encoder(folder: &Path) -> PathBuf {
    let (encoder, fixtures) = (folder.join("encoder"), crate::tiny::fixtures());
    std::fs::create_dir_all(&encoder).unwrap();
    for (from, name) in
        [("bert", "config.json"), ("bert", "model.safetensors"), ("bert-pair", "tokenizer.json")]
    {
        std::fs::copy(fixtures.join(from).join(name), encoder.join(name)).unwrap();
    }
    encoder
}

#[test]
fn encoders_embed_and_order_documents_and_chat_with_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let encoder = format!("encoder={}", tiny_encoder(folder.path()).display());
    let fixture = crate::tiny::fixtures().join("bert-pair");
    let ranker = format!("ranker={}", fixture.display());
    let pieces = format!("pieces={}", crate::tiny::fixtures().join("xlm-roberta-pair.gguf").display());
    let exact = ["--activations", "float", "--kv-dtype", "f32"];
    let serving = Serving::start(folder.path(), &[&[&*encoder, &*ranker, &*pieces], &exact[..]].concat());
    let post = |path: &str, body: serde_json::Value| {
        let answer = serving.post(path, &body.to_string());
        let (_, text) = answer.split_once("\r\n\r\n").unwrap();
        let value: serde_json::Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{answer}"));
        (answer.split(' ').nth(1).unwrap().to_owned(), value)
    };
    let (status, embedded) = post("/v1/embeddings", json!({"model": "encoder", "input": ["w1 w2 w3", "w4"]}));
    let vector = |at: usize| -> Vec<f64> {
        serde_json::from_value(embedded["data"][at]["embedding"].clone()).unwrap()
    };
    let length = vector(0).iter().map(|value| value * value).sum::<f64>().sqrt();
    assert_eq!((status.as_str(), vector(0).len(), vector(1).len()), ("200", 64, 64), "{embedded}");
    assert!((length - 1.0).abs() < 1e-5, "{length}");
    // [CLS] and [SEP] around each.
    assert_eq!(embedded["usage"]["prompt_tokens"], 5 + 3);
    let documents = json!(["w4", "w1 w2 w3", "w9 w8 w7 w6"]);
    let (_, ranked) =
        post("/v1/rerank", json!({"model": "encoder", "query": "w1 w2 w3", "documents": documents}));
    let first = &ranked["results"][0];
    assert_eq!((&ranked["method"], &first["index"]), (&json!("cosine"), &json!(1)), "{ranked}");
    assert!((first["relevance_score"].as_f64().unwrap() - 1.0).abs() < 1e-5, "{ranked}");

    // Read together: transformers' numbers for the first query and every document.
    let golden = std::fs::read_to_string(fixture.join("golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&golden).unwrap();
    let scores = crate::tiny::floats(&std::fs::read(fixture.join("golden.bin")).unwrap());
    let pairs: Vec<_> = golden["pairs"].as_array().unwrap().iter().zip(scores).collect();
    let query = &pairs[0].0["query"];
    let pairs: Vec<_> = pairs.into_iter().filter(|(pair, _)| pair["query"] == *query).collect();
    let documents: Vec<_> = pairs.iter().map(|(pair, _)| pair["document"].clone()).collect();
    let (_, ranked) = post("/rerank", json!({"model": "ranker", "query": query, "documents": documents}));
    assert_eq!((&ranked["method"], pairs.len()), (&json!("cross-encoder"), 4), "{ranked}");
    let results = ranked["results"].as_array().unwrap();
    assert_eq!(results.len(), 4);
    for result in results {
        let logit = f64::from(pairs[result["index"].as_u64().unwrap() as usize].1);
        let wanted = 1.0 / (1.0 + (-logit).exp());
        assert!((result["relevance_score"].as_f64().unwrap() - wanted).abs() <= 1e-4, "{wanted}: {ranked}");
    }
    assert!(results.is_sorted_by(|a, b| a["relevance_score"].as_f64() >= b["relevance_score"].as_f64()));
    // As TEI's clients ask for them: the same order, in a list, as the model said it.
    let texts = json!({"model": "ranker", "query": query, "texts": documents, "raw_scores": true, "return_text": true});
    let (_, told) = post("/rerank", texts);
    let told = told.as_array().unwrap();
    assert_eq!(told.len(), 4);
    for (text, result) in told.iter().zip(results) {
        let at = text["index"].as_u64().unwrap() as usize;
        assert_eq!((&text["index"], &text["text"]), (&result["index"], &documents[at]), "{told:?}");
        assert!((text["score"].as_f64().unwrap() - f64::from(pairs[at].1)).abs() <= 1e-3, "{told:?}");
    }
    // The same pairs in their own order, and texts one by one.
    let (_, scored) = post("/v1/score", json!({"model": "ranker", "text_1": query, "text_2": documents}));
    for (score, (_, logit)) in scored["data"].as_array().unwrap().iter().zip(&pairs) {
        let wanted = 1.0 / (1.0 + (-f64::from(*logit)).exp());
        assert!((score["score"].as_f64().unwrap() - wanted).abs() <= 1e-4, "{wanted}: {scored}");
    }
    assert_eq!(scored["data"].as_array().unwrap().len(), 4);
    let (_, alike) =
        post("/score", json!({"model": "encoder", "text_1": ["w1 w2 w3", "w4"], "text_2": ["w4", "w4"]}));
    let cosine: f64 = vector(0).iter().zip(vector(1)).map(|(a, b)| a * b).sum();
    assert!((alike["data"][0]["score"].as_f64().unwrap() - cosine).abs() < 1e-5, "{alike}");
    assert!((alike["data"][1]["score"].as_f64().unwrap() - 1.0).abs() < 1e-5, "{alike}");

    // A text alone is of the one class as far as transformers says (its number, of the same files in f32).
    let texts = json!({"model": "ranker", "input": ["w1 w2 w3", "w9 w8 w7 w6"]});
    let (status, classes) = post("/v1/classify", texts.clone());
    assert_eq!((status.as_str(), classes["data"].as_array().unwrap().len()), ("200", 2), "{classes}");
    let expected: [(f64, f64); 2] = [(-0.267_046_87, 0.433_632_2), (-0.023_698_18, 0.494_075_78)];
    for (at, (logit, probability)) in expected.into_iter().enumerate() {
        let class = &classes["data"][at];
        assert_eq!((&class["label"], &class["num_classes"]), (&json!("LABEL_0"), &json!(1)), "{classes}");
        assert!((class["probs"][0].as_f64().unwrap() - probability).abs() <= 1e-5, "{classes}");
        let raw = json!({"model": "ranker", "input": texts["input"][at], "use_activation": false});
        let (_, raw) = post("/classify", raw);
        assert!((raw["data"][0]["probs"][0].as_f64().unwrap() - logit).abs() <= 1e-4, "{raw}");
    }

    // The same from GGUF, of a model that reads pieces and puts two ends between the texts.
    let fixture = crate::tiny::fixtures().join("xlm-roberta-pair");
    let golden = std::fs::read_to_string(fixture.join("golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&golden).unwrap();
    let scores = crate::tiny::floats(&std::fs::read(fixture.join("golden.bin")).unwrap());
    for (pair, logit) in golden["pairs"].as_array().unwrap().iter().zip(scores) {
        let documents = json!([pair["document"]]);
        let (_, ranked) =
            post("/rerank", json!({"model": "pieces", "query": pair["query"], "documents": documents}));
        let wanted = 1.0 / (1.0 + (-f64::from(logit)).exp());
        let score = ranked["results"][0]["relevance_score"].as_f64();
        assert!(score.is_some_and(|score| (score - wanted).abs() <= 1e-4), "{wanted}: {ranked}");
    }

    let refused = |path: &str, body: serde_json::Value, says: &str| {
        let (status, said) = post(path, body);
        let error = &said["error"];
        assert_eq!(
            (status.as_str(), error["message"].as_str().unwrap().contains(says)),
            ("400", true),
            "{said}"
        );
        error["code"].as_str().unwrap().to_owned()
    };
    let alone = json!({"model": "ranker", "input": "w1"});
    assert_eq!(refused("/v1/embeddings", alone, "reads two texts together"), "MODEL_UNSUPPORTED");
    let chat = json!({"model": "encoder", "messages": [{"role": "user", "content": "w1"}]});
    assert_eq!(refused("/v1/chat/completions", chat, "chat template"), "MODEL_UNSUPPORTED");
    let completion = json!({"model": "ranker", "prompt": "w1", "max_tokens": 2});
    assert_eq!(refused("/v1/completions", completion, "no answers"), "INVALID_INPUT");
    let long = ["w1"; 100].join(" ");
    let too_long = json!({"model": "ranker", "query": "w1", "documents": [long]});
    assert_eq!(refused("/v1/rerank", too_long, "context"), "PROMPT_TOO_LONG");
    let no_classes = json!({"model": "encoder", "input": "w1"});
    assert_eq!(refused("/v1/classify", no_classes, "has no classes"), "MODEL_UNSUPPORTED");
    let differ = json!({"model": "ranker", "input": "w1", "activation": true, "use_activation": false});
    assert_eq!(refused("/classify", differ, "activation: differs"), "INVALID_INPUT");
    let too_long = json!({"model": "ranker", "input": [long]});
    assert_eq!(refused("/classify", too_long, "context"), "PROMPT_TOO_LONG");
    let both = json!({"model": "ranker", "query": "w1", "documents": ["w1"], "texts": ["w1"]});
    assert_eq!(refused("/rerank", both, "texts: cannot be combined with documents"), "INVALID_INPUT");
    let none = json!({"model": "ranker", "query": "w1"});
    assert_eq!(refused("/rerank", none, "documents: is required"), "INVALID_INPUT");
    let wanted = json!({"model": "ranker", "query": "w1", "documents": ["w1"], "raw_scores": true});
    assert_eq!(refused("/rerank", wanted, "raw_scores: belongs to texts"), "INVALID_INPUT");
    let uneven = json!({"model": "ranker", "text_1": ["w1", "w2"], "text_2": ["w1", "w2", "w3"]});
    assert_eq!(refused("/v1/score", uneven, "text_1"), "INVALID_INPUT");
}

#[test]
fn what_cannot_be_served_is_refused_in_one_line() {
    let check = |args: &[&str], exit: i32, code: &str, says: &[&str]| {
        let args: Vec<&str> = ["serve"].iter().chain(args).copied().collect();
        fornax(args).fails(exit, code, says);
    };
    check(
        &["smollm2", "--host", "0.0.0.0", "--port", "0"],
        2,
        "INVALID_INPUT",
        &["--api-key-file", "other machines"],
    );
    check(&["smollm2", "smollm2", "--port", "0"], 2, "INVALID_INPUT", &["two models are called \"smollm2\""]);
    check(&["smollm2", "b=missing.gguf"], 4, "MODEL_NOT_FOUND", &["missing.gguf"]);
    check(&["smollm2", "--idle-unload", "never"], 2, "INVALID_INPUT", &["--idle-unload"]);
    check(&["smollm2", "--api-key-file", "missing"], 2, "INVALID_INPUT", &["missing"]);
    check(&["smollm2", "--host", "300.1.1.1"], 2, "INVALID_INPUT", &["cannot listen on 300.1.1.1"]);
    check(&["smollm2", "--tls-cert", "cert.pem"], 2, "INVALID_INPUT", &["--tls-key"]);
    check(&["smollm2", "--cors-origin", "app"], 2, "INVALID_INPUT", &["no origin"]);
    check(&["smollm2", "--otlp", "collector"], 2, "INVALID_INPUT", &["--otlp", "collector"]);
    check(&["smollm2", "--port", "0", "--jobs-db", "/dev/null/jobs"], 2, "INVALID_INPUT", &["jobs database"]);
    check(&["smollm2", "--webhook-host", "a.example"], 2, "INVALID_INPUT", &["--webhook-secret-file"]);
    check(&["smollm2", "--callback-url", "scheduler"], 2, "INVALID_INPUT", &["--callback-url"]);
    check(&["smollm2", "--memory-limit", "40MiB"], 3, "MODEL_DOES_NOT_FIT", &["weights", "40.0 MiB"]);
    check(&["missing.gguf"], 4, "MODEL_NOT_FOUND", &["missing.gguf"]);
    check(&["--config", "missing.toml"], 2, "INVALID_INPUT", &["missing.toml"]);
    check(&["--drain-timeout", "soon"], 2, "INVALID_INPUT", &["seconds"]);
}
