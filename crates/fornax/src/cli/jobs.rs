//! `fornax jobs`: a client of a server's durable jobs.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use fornax::Code;
use serde_json::{Map, Value, json};
use ureq::{Agent, Body, http::Response};

use super::failure::Failure;
use super::meter::Meter;
use super::output;

/// Submit durable jobs to a server, and see what became of them
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  fornax jobs submit --input job.json --wait            one job, and its result
  fornax jobs submit --schema kinds.json --prefix-file task.txt invoices/*.txt --wait
  fornax jobs schema kinds kinds.json                   register a schema; jobs say --schema kinds
  fornax jobs list --status FAILED
  fornax jobs export > results.ndjson

The server is at http://127.0.0.1:8080 unless --server says otherwise.")]
pub(crate) enum Jobs {
    /// Submit a job: an input as JSON, or a batch of documents; prints its id, or with --wait its result
    Submit(JobsSubmit),
    /// Print how jobs stand, as JSON
    Status(JobsIds),
    /// Wait for jobs, showing progress, and print their results; fails if one of them did
    Wait(JobsIds),
    /// Cancel jobs
    Cancel(JobsIds),
    /// List the newest jobs
    List(JobsList),
    /// Print the newest jobs with their results, a line of JSON each
    Export(JobsList),
    /// Register a schema under a name
    Schema(JobsSchema),
}

/// Which server.
#[derive(Debug, Args)]
pub(crate) struct JobsServer {
    /// Where the server listens
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub(crate) server: String,
    /// The server's keys; the first one is used
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Whose queue: `default` or the model's name
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) endpoint: String,
}

/// What to submit.
#[derive(Debug, Args)]
pub(crate) struct JobsSubmit {
    /// Documents: each is an item of one batch, called by its file's name
    #[arg(value_name = "FILE", required_unless_present = "input", conflicts_with = "input")]
    pub(crate) documents: Vec<PathBuf>,
    /// A job's input, or the whole body {input, webhook, policy}, as JSON; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) input: Option<PathBuf>,
    /// What all documents share: the task
    #[arg(long, value_name = "FILE", conflicts_with = "input")]
    pub(crate) prefix_file: Option<PathBuf>,
    /// A schema: a file, or the name of a registered one
    #[arg(long, value_name = "SCHEMA", conflicts_with = "input")]
    pub(crate) schema: Option<String>,
    /// Further parameters as JSON, as in '{\"temperature\": 0, \"max_tokens\": 200}'
    #[arg(long, value_name = "JSON", conflicts_with = "input")]
    pub(crate) params: Option<String>,
    /// Submitting again under the same key is the same job
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
    /// Wait for the result
    #[arg(long)]
    pub(crate) wait: bool,
    #[command(flatten)]
    pub(crate) server: JobsServer,
}

/// Some jobs.
#[derive(Debug, Args)]
pub(crate) struct JobsIds {
    /// Their ids
    #[arg(value_name = "ID", required = true)]
    pub(crate) ids: Vec<String>,
    #[command(flatten)]
    pub(crate) server: JobsServer,
}

/// The newest jobs.
#[derive(Debug, Args)]
pub(crate) struct JobsList {
    /// Only those in this state, as COMPLETED
    #[arg(long, value_name = "STATE")]
    pub(crate) status: Option<String>,
    /// At most this many
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) limit: u32,
    #[command(flatten)]
    pub(crate) server: JobsServer,
}

/// A schema and its name.
#[derive(Debug, Args)]
pub(crate) struct JobsSchema {
    /// What jobs call it by
    pub(crate) name: String,
    /// The schema
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) server: JobsServer,
}

/// How often a job is looked at that is waited for.
const POLL: Duration = Duration::from_millis(250);

/// A server that does not answer for so long is not there. `runsync` is not used, so nothing takes longer.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn jobs(command: &Jobs) -> anyhow::Result<()> {
    match command {
        Jobs::Submit(args) => submit(args),
        Jobs::Status(args) => {
            let client = Client::new(&args.server)?;
            for id in &args.ids {
                output::json(&client.get(&format!("status/{id}"))?)?;
            }
            Ok(())
        }
        Jobs::Wait(args) => wait(&Client::new(&args.server)?, &args.ids),
        Jobs::Cancel(args) => {
            let client = Client::new(&args.server)?;
            for id in &args.ids {
                let status = client.send("POST", &format!("cancel/{id}"), &[], &json!({}))?;
                writeln!(io::stdout(), "{id} {}", text(&status["status"]))?;
            }
            Ok(())
        }
        Jobs::List(args) => {
            let client = Client::new(&args.server)?;
            for job in client.list(args.status.as_deref(), args.limit)? {
                let (id, status) = (text(&job["id"]), text(&job["status"]));
                let attempts = job["attempts"].as_i64().unwrap_or(0);
                let seconds = job["executionTime"].as_f64().unwrap_or(0.0) / 1000.0;
                let error = job["error"].as_str().unwrap_or_default();
                writeln!(io::stdout(), "{id}  {status:<11}  {attempts} attempts  {seconds:>8.2} s  {error}")?;
            }
            Ok(())
        }
        Jobs::Export(args) => {
            let client = Client::new(&args.server)?;
            for job in client.list(args.status.as_deref(), args.limit)? {
                writeln!(io::stdout(), "{}", client.get(&format!("status/{}", text(&job["id"])))?)?;
            }
            Ok(())
        }
        Jobs::Schema(args) => {
            let schema = json_of(&args.file)?;
            let said =
                Client::new(&args.server)?.send("PUT", &format!("schemas/{}", args.name), &[], &schema)?;
            writeln!(io::stdout(), "{} {}", text(&said["name"]), text(&said["status"]))?;
            Ok(())
        }
    }
}

fn submit(args: &JobsSubmit) -> anyhow::Result<()> {
    let body = match &args.input {
        Some(file) => {
            let input = json_of(file)?;
            if input.get("input").is_some() { input } else { json!({"input": input}) }
        }
        None => json!({"input": batch(args)?}),
    };
    let client = Client::new(&args.server)?;
    let key = args.idempotency_key.as_deref();
    let headers: Vec<(&str, &str)> = key.map(|key| ("Idempotency-Key", key)).into_iter().collect();
    let id = text(&client.send("POST", "run", &headers, &body)?["id"]).to_owned();
    match args.wait {
        true => wait(&client, &[id]),
        false => Ok(writeln!(io::stdout(), "{id}")?),
    }
}

/// The input of a batch of files.
fn batch(args: &JobsSubmit) -> anyhow::Result<Value> {
    let mut input = match &args.params {
        None => Map::new(),
        Some(params) => match serde_json::from_str(params) {
            Ok(Value::Object(params)) => params,
            _ => return Err(Failure::usage("--params must be a JSON object").into()),
        },
    };
    if let Some(file) = &args.prefix_file {
        input.insert("shared_prefix".to_owned(), json!(output::text_of(file)?));
    }
    if let Some(schema) = &args.schema {
        // A file if there is one of that name; otherwise the server knows it, or says that it does not.
        let file = Path::new(schema);
        let schema = if file.exists() { json_of(file)? } else { json!(schema) };
        input.insert("schema".to_owned(), schema);
    }
    let items = args.documents.iter().map(|path| {
        let id = path.file_name().map_or(path.to_string_lossy(), |name| name.to_string_lossy());
        Ok(json!({"id": id, "text": output::text_of(path)?}))
    });
    let items: Vec<Value> = items.collect::<Result<_, Failure>>()?;
    input.insert("items".to_owned(), json!(items));
    Ok(Value::Object(input))
}

/// Waits for jobs one after the other, shows how many items of a batch are done, and prints how each stands.
fn wait(client: &Client, ids: &[String]) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    for id in ids {
        let mut meter = Meter::new(Duration::from_secs(1));
        let status = loop {
            // Not `stream`, whose parts are handed out once: they are another's who reads them.
            let status = client.get(&format!("status/{id}"))?;
            let word = text(&status["status"]);
            if !matches!(word, "IN_QUEUE" | "IN_PROGRESS") {
                break status;
            }
            let count = |field: &str| status["items"][field].as_u64().unwrap_or(0);
            let (done, total) = (count("done"), count("total"));
            // How long a single answer becomes is not known before it ends.
            let amount = if total > 0 { format!("{done} of {total} items") } else { String::new() };
            meter.show(&format!("{word} {id}"), (done, total), &amount);
            std::thread::sleep(POLL);
        };
        drop(meter);
        output::json(&status)?;
        if status["output"]["success"] != json!(true) {
            failed.push(format!("{id} {}", status["error"].as_str().unwrap_or(text(&status["status"]))));
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => {
            Err(Failure::new(Code::Internal, format!("not all succeeded: {}", failed.join("; "))).into())
        }
    }
}

fn json_of(path: &Path) -> anyhow::Result<Value> {
    let text = output::text_of(path)?;
    serde_json::from_str(&text)
        .map_err(|error| Failure::usage(format!("{} is not JSON: {error}", path.display())).into())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A server's jobs.
struct Client {
    agent: Agent,
    base: String,
    key: Option<String>,
}

impl Client {
    fn new(server: &JobsServer) -> anyhow::Result<Client> {
        let key = match &server.api_key_file {
            None => None,
            Some(file) => {
                let keys = output::secret_of(file)?;
                // Behind a key stands what it may do, which is the server's affair.
                let mut words = keys.lines().filter_map(|line| line.split_whitespace().next());
                let key = words.find(|word| !word.starts_with('#'));
                let none = || Failure::usage(format!("{} holds no key", file.display()));
                Some(key.ok_or_else(none)?.to_owned())
            }
        };
        let config =
            Agent::config_builder().timeout_global(Some(TIMEOUT)).http_status_as_error(false).build();
        let endpoint = server.endpoint.replace('/', "%2F");
        let base = format!("{}/v2/{endpoint}", server.server.trim_end_matches('/'));
        Ok(Client { agent: config.new_agent(), base, key })
    }

    fn get(&self, path: &str) -> anyhow::Result<Value> {
        let mut request = self.agent.get(format!("{}/{path}", self.base));
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        self.read(request.call())
    }

    fn list(&self, status: Option<&str>, limit: u32) -> anyhow::Result<Vec<Value>> {
        let status = status.map(|status| format!("&status={status}")).unwrap_or_default();
        let mut said = self.get(&format!("jobs?limit={limit}{status}"))?;
        Ok(said["jobs"].as_array_mut().map(std::mem::take).unwrap_or_default())
    }

    fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> anyhow::Result<Value> {
        let url = format!("{}/{path}", self.base);
        let mut request = if method == "PUT" { self.agent.put(url) } else { self.agent.post(url) };
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        self.read(request.send_json(body))
    }

    /// What the server said, or its error in one line.
    fn read(&self, response: Result<Response<Body>, ureq::Error>) -> anyhow::Result<Value> {
        let unreachable = |error: ureq::Error| {
            let message = format!("cannot reach {}: {error}; is `fornax serve` running there?", self.base);
            Failure::usage(message)
        };
        let mut response = response.map_err(unreachable)?;
        let said: Value = response
            .body_mut()
            .with_config()
            .limit(RESPONSE_BYTES_MAX)
            .read_json()
            .context("no JSON came")?;
        if response.status().is_success() {
            return Ok(said);
        }
        let error = &said["error"];
        let message = format!("the server refused: {} {}", text(&error["code"]), text(&error["message"]));
        Err(Failure::usage(message).into())
    }
}

/// Bytes of a response: a large batch's results.
const RESPONSE_BYTES_MAX: u64 = 256 << 20;
