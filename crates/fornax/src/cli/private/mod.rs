//! Private inference: both servers, and everything that a client does with them.

mod args;

use std::io::{self, Write};
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::thread;

use clap::Parser;
use fornax::machine;
use fornax::{Code, Completion, Error, Fornax, OpenOptions, Request, RingOptions};
use fornax_private::audit::audit;
use fornax_private::frame::Party;
use fornax_private::{ClientOptions, Parties, ServerOptions, Snapshot, Stats, Transcript, claim, server_tls};
use serde::Serialize;
use serde_json::json;

use crate::cli::args::{Cli, Command};
use crate::cli::device::DeviceArgs;
use crate::cli::failure::Failure;
use crate::cli::interrupt::Interrupt;
use crate::cli::{device, generate, locate, output, run, serve};
pub(crate) use args::Private;
use args::{
    PartyArgs, PartyHow, PrivateAudit, PrivateBench, PrivateChat, PrivateGenerate, PrivateInfo, PrivateProxy,
    PrivateServe,
};

pub(crate) fn private(args: &Private) -> anyhow::Result<()> {
    match args {
        Private::Serve(args) => serve_party(args),
        Private::Chat(args) => chat(args),
        Private::Generate(args) => generate(args),
        Private::Bench(args) => bench(args),
        Private::Proxy(args) => proxy(args),
        Private::Info(args) => info(args),
        Private::Audit(args) => judge(args),
    }
}

fn serve_party(args: &PrivateServe) -> anyhow::Result<()> {
    let path = locate::locate(args.model.name())?;
    let listener = TcpListener::bind((args.host.as_str(), args.port)).map_err(|error| {
        Failure::usage(format!(
            "cannot listen on {}:{}: {error}; use another --host or --port",
            args.host, args.port
        ))
    })?;
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(certificate), Some(key)) => {
            output::look_at_secret(key)?;
            Some(server_tls(certificate, key, args.client_ca.as_deref()).map_err(Error::from)?)
        }
        _ => None,
    };
    let scheme = if tls.is_some() { "tls" } else { "tcp" };
    let party = if args.party == 0 { Party::Zero } else { Party::One };
    let options = ServerOptions {
        demo_single_host: args.demo_single_host,
        positions_max: args.max_positions,
        sessions_max: args.max_sessions,
        per_address_max: args.max_per_address,
        arrival: args.arrival_timeout,
        idle: args.idle_timeout,
        tls,
        record: args.record.clone(),
        ..ServerOptions::new(party)
    };
    let kernel_folder = locate::cache_dir().ok().map(|cache| cache.join("kernels"));
    let ring = RingOptions { threads: args.threads, kernel_folder };
    let server = fornax::serve_private(&path, device::named(&args.device)?, ring, listener, options)?;
    if args.demo_single_host {
        writeln!(io::stderr(), "{}", claim::SINGLE_HOST)?;
    }
    let weights = &server.info().weights.sha256;
    // One line, the address last: whoever started it may read that much and close the pipe.
    writeln!(io::stdout(), "weights {weights}; party {party} listening on {scheme}://{}", server.address())?;
    io::stdout().flush()?;
    // Signals end the process: sessions have nothing that could be lost.
    loop {
        thread::park();
    }
}

fn chat(args: &PrivateChat) -> anyhow::Result<()> {
    let mut own = args.run.clone();
    own.capacity.device = on_cpu(&own.capacity.device)?;
    // What is kept from the servers is not left on a disk either.
    own.no_history = true;
    let client = client(&args.parties)?;
    run::run_with(&own, &|options| adapted(options, &args.parties, &client))
}

fn generate(args: &PrivateGenerate) -> anyhow::Result<()> {
    let mut own = args.generate.clone();
    own.capacity.device = on_cpu(&own.capacity.device)?;
    let client = client(&args.parties)?;
    generate::generate_with(&own, &|options| adapted(options, &args.parties, &client))
}

/// The normal server over the private backend, on this machine only.
fn proxy(args: &PrivateProxy) -> anyhow::Result<()> {
    let own = args.host == "localhost" || args.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if !own {
        let message = format!(
            "--host {}: the proxy speaks in the open, so it listens on this machine's own addresses only",
            args.host
        );
        return Err(Failure::usage(message).into());
    }
    let device = on_cpu(&args.device)?;
    let client = client(&args.parties)?;
    let mut line: Vec<String> = ["fornax", "serve", "--jobs-db", "none"].map(str::to_owned).to_vec();
    line.extend([format!("--host={}", args.host), format!("--port={}", args.port)]);
    line.push(format!("--parallel={}", args.parallel));
    line.extend(args.served_model_name.iter().map(|name| format!("--served-model-name={name}")));
    line.extend(args.model.name().map(str::to_owned));
    let Command::Serve(mut flags) = Cli::try_parse_from(line)?.command else {
        unreachable!("the line says serve")
    };
    flags.device = device;
    serve::serve_with(&flags, &|options| adapted(options, &args.parties, &client))
}

/// The client computes on its CPU, and knows one way of products.
fn on_cpu(args: &DeviceArgs) -> Result<DeviceArgs, Failure> {
    if !matches!(args.device.as_str(), "auto" | "cpu") {
        let message =
            format!("--device {}: the client of private inference computes on the cpu", args.device);
        return Err(Failure::usage(message));
    }
    if args.activations.is_some() {
        return Err(Failure::usage("--activations has no meaning here: products are of whole numbers"));
    }
    Ok(DeviceArgs { device: "cpu".to_owned(), ..args.clone() })
}

/// Finds both servers, so that what is wrong with them is said before anything is loaded; and says what leaks.
fn client(args: &PartyArgs) -> anyhow::Result<ClientOptions> {
    let options =
        ClientOptions { record: args.record.clone(), ..parties(&args.party0, &args.party1, &args.how)? };
    let found = Parties::connect(ClientOptions { record: None, ..options.clone() }).map_err(Error::from)?;
    if args.how.demo_single_host || found.infos().iter().any(|info| info.demo_single_host) {
        writeln!(io::stderr(), "{}", claim::SINGLE_HOST)?;
    }
    if let Some(record) = &args.record {
        let record = record.display();
        writeln!(
            io::stderr(),
            "warning: {record}.party0 and {record}.party1 together are the conversation in clear: keep them apart"
        )?;
    }
    let leaks = [
        (args.prefix_reuse, "--prefix-reuse tells both servers which prompts begin alike"),
        (args.drafts, "--drafts tells both servers how repetitive an answer is"),
        (args.fast_forward, "--fast-forward tells both servers how much of an answer its form forced"),
        (
            args.ask_anew,
            "--ask-anew tells both servers where a strict call begins and where thinking is cut off",
        ),
    ];
    for (_, leak) in leaks.iter().filter(|(on, _)| *on) {
        writeln!(io::stderr(), "leak: {leak}")?;
    }
    Ok(options)
}

fn parties(party0: &str, party1: &str, how: &PartyHow) -> Result<ClientOptions, Failure> {
    if let Some(key) = &how.client_key {
        output::look_at_secret(key)?;
    }
    Ok(ClientOptions {
        demo_single_host: how.demo_single_host,
        ca: how.ca.clone(),
        identity: how.client_cert.clone().zip(how.client_key.clone()),
        timeout: how.timeout,
        ..ClientOptions::new(party0, party1)
    })
}

fn adapted(options: OpenOptions, args: &PartyArgs, client: &ClientOptions) -> OpenOptions {
    options
        .private(fornax::Private::Parties(client.clone()))
        .prefix_reuse(args.prefix_reuse)
        .drafts(args.drafts)
        .fast_forward(args.fast_forward)
        .asks_anew(args.ask_anew)
}

fn info(args: &PrivateInfo) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    write!(out, "{}", claim::text())?;
    let (Some(party0), Some(party1)) = (&args.party0, &args.party1) else { return Ok(()) };
    let found = Parties::connect(parties(party0, party1, &args.how)?).map_err(Error::from)?;
    for info in found.infos() {
        // Shapes of hundreds of matrices help nobody here.
        let mut shown = serde_json::to_value(info)?;
        shown["dims"] =
            json!({ "matrices": info.dims.0.len(), "words_per_position": info.dims.position_words() });
        writeln!(out, "\nparty {}: {}", info.party, serde_json::to_string_pretty(&shown)?)?;
    }
    if args.how.demo_single_host || found.infos().iter().any(|info| info.demo_single_host) {
        writeln!(out, "\n{}", claim::SINGLE_HOST)?;
    }
    Ok(())
}

fn judge(args: &PrivateAudit) -> anyhow::Result<()> {
    let read = |path: &std::path::PathBuf| Transcript::read(path).map_err(Error::from);
    let transcripts = args.files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let findings = audit(&transcripts).map_err(Error::from)?;
    if args.json {
        let shown = findings.iter().map(
            |finding| json!({ "check": finding.check, "passed": finding.passed, "detail": finding.detail }),
        );
        output::json(&shown.collect::<Vec<_>>())?;
    } else {
        let mut out = io::stdout().lock();
        for finding in &findings {
            let word = if finding.passed { "ok  " } else { "FAIL" };
            writeln!(out, "{word}  {}: {}", finding.check, finding.detail)?;
        }
    }
    let failed = findings.iter().filter(|finding| !finding.passed).count();
    if failed > 0 {
        let message = format!("{failed} of {} checks failed", findings.len());
        return Err(Failure::new(Code::IntegrityFailure, message).into());
    }
    Ok(())
}

/// One way of computing, measured.
#[derive(Debug, Serialize)]
struct Speed {
    decode_tokens_per_second: f64,
    first_token_ms: f64,
    /// Processor time of this process for each token of decode.
    client_cpu_ms_per_token: Option<f64>,
}

/// What the wire costs for each token of decode.
#[derive(Debug, Serialize)]
struct Wire {
    rounds: f64,
    /// Bytes to party 0 and to party 1.
    sent: [f64; 2],
    received: [f64; 2],
    /// Milliseconds spent waiting for each.
    waited_ms: [f64; 2],
    masks_ms: f64,
    checks_ms: f64,
}

fn bench(args: &PrivateBench) -> anyhow::Result<()> {
    let cpu = on_cpu(&args.device)?;
    let path = locate::locate(args.model.name())?;
    let client = client(&args.parties)?;
    let interrupt = Interrupt::install()?;
    let context = args.prompt_tokens + args.tokens + 1;
    let options = || -> anyhow::Result<OpenOptions> {
        let options = device::options(&path, &cpu)?;
        Ok(if cpu.context.is_none() { options.context(context) } else { options })
    };
    let plain = device::open(options()?.drafts(false).prefix_reuse(false))?;
    let (plaintext, _) = interrupt.during(|| measure(&plain, args, &Arc::default()))?;
    drop(plain);
    let private = device::open(adapted(options()?, &args.parties, &client))?;
    let (speed, wire) = interrupt.during(|| measure(&private, args, &client.stats))?;
    let share = speed.decode_tokens_per_second / plaintext.decode_tokens_per_second;
    if args.output.json {
        return output::json(&json!({
            "model": path.display().to_string(),
            "prompt_tokens": args.prompt_tokens,
            "tokens": args.tokens,
            "plaintext": plaintext,
            "private": speed,
            "wire_per_token": wire,
            "share_of_plaintext": share,
        }));
    }
    let mut out = io::stdout().lock();
    for (name, speed) in [("plaintext", &plaintext), ("private", &speed)] {
        let cpu = speed
            .client_cpu_ms_per_token
            .map(|ms| format!(", {ms:.1} ms of CPU a token"))
            .unwrap_or_default();
        writeln!(
            out,
            "{name:10} {:6.1} tok/s decode, first token after {:.0} ms ({} tokens of prompt){cpu}",
            speed.decode_tokens_per_second, speed.first_token_ms, args.prompt_tokens
        )?;
    }
    writeln!(out, "{:10} {share:.2} of plaintext", "")?;
    writeln!(
        out,
        "a token: {:.0} rounds; {:.0} kB up and {:.0} kB down with party 0, {:.1} kB up and {:.0} kB down with party 1",
        wire.rounds,
        wire.sent[0] / 1e3,
        wire.received[0] / 1e3,
        wire.sent[1] / 1e3,
        wire.received[1] / 1e3
    )?;
    writeln!(
        out,
        "a token: {:.1} ms waiting for party 0, {:.1} ms for party 1, {:.1} ms masks, {:.1} ms checks",
        wire.waited_ms[0], wire.waited_ms[1], wire.masks_ms, wire.checks_ms
    )?;
    Ok(())
}

/// The same prompt with one token and with many: what lies between is decode.
fn measure(model: &Fornax, args: &PrivateBench, stats: &Stats) -> anyhow::Result<(Speed, Wire)> {
    let vocab = u32::try_from(model.text().vocab()).unwrap_or(u32::MAX);
    // Any tokens do; these are spread and the same every time.
    let prompt: Vec<u32> =
        (0..args.prompt_tokens as u32).map(|i| (i * 7919 + 13) % vocab.min(30_000)).collect();
    let ask = |tokens: usize| -> Result<(Completion, Snapshot, Option<f64>), Error> {
        let (before, cpu) = (stats.snapshot(), machine::cpu_seconds());
        let request =
            Request { max_tokens: Some(tokens), ignore_eos: true, ..Request::tokens(prompt.clone()) };
        let completion = model.generate(&request)?;
        let spent = machine::cpu_seconds().zip(cpu).map(|(after, before)| after - before);
        Ok((completion, stats.snapshot().since(&before), spent))
    };
    ask(2)?;
    let (_, short, short_cpu) = ask(1)?;
    let (long, wire, long_cpu) = ask(args.tokens + 1)?;
    let count = args.tokens as f64;
    let speed = Speed {
        decode_tokens_per_second: long.decode_tokens_per_second().unwrap_or(0.0),
        first_token_ms: long.timings.first_token.as_secs_f64() * 1e3,
        client_cpu_ms_per_token: long_cpu.zip(short_cpu).map(|(long, short)| (long - short) / count * 1e3),
    };
    let each = |long: u64, short: u64| long.saturating_sub(short) as f64 / count;
    let milliseconds = |long: f64, short: f64| (long - short) / count * 1e3;
    let wire = Wire {
        rounds: each(wire.rounds, short.rounds),
        sent: [each(wire.sent[0], short.sent[0]), each(wire.sent[1], short.sent[1])],
        received: [each(wire.received[0], short.received[0]), each(wire.received[1], short.received[1])],
        waited_ms: [
            milliseconds(wire.waited[0], short.waited[0]),
            milliseconds(wire.waited[1], short.waited[1]),
        ],
        masks_ms: milliseconds(wire.masks, short.masks),
        checks_ms: milliseconds(wire.checks, short.checks),
    };
    Ok((speed, wire))
}
