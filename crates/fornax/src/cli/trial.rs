//! Forms from strangers, compiled in a process of their own first.
//!
//! The compiler is somebody else's, what it does with a form is not bounded by the form's size, and a thread can be
//! neither stopped nor kept from memory. A process can: this program starts itself anew, lowers its own limits, and
//! compiles. What ends there by itself is compiled by the server, too, at the same cost. Of the model it knows nothing:
//! what takes long is the same for every vocabulary, and here each byte is a token.

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use fornax_form::{Form, FormError, Grammars, Trial, Vocabulary};
use rustix::process::{Pid, Resource, Rlimit, Signal, getpriority_process, setpriority_process, setrlimit};

use crate::cli::args::byte_size;

/// Address space beside what a form may take: the program, its stacks and what allocators only reserve.
const ADDRESSES: u64 = 2 << 30;

/// Memory that is promised beside it: the compiler's stack of 256 MiB, of which little is used.
const PROMISED: u64 = 320 << 20;

/// An ordinary form is compiled in less. What takes longer gives way to whatever is computed for those who were let in.
const SHORT: Duration = Duration::from_millis(100);

/// By how much.
const NICE: i32 = 10;

/// How often is looked whether it has ended, at first and at most.
const LOOKS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// Compile a form and say nothing; `serve` starts this
#[derive(Debug, Args)]
pub(crate) struct CompileForm {
    /// Bytes of memory
    #[arg(long, value_parser = byte_size)]
    memory: u64,
    /// Seconds of processor time
    #[arg(long)]
    seconds: u64,
}

/// The process that is started: it ends well if the form can be told to be good or bad within the limits.
pub(crate) fn compile_form(args: &CompileForm) -> anyhow::Result<()> {
    let limit = |resource, most: u64| {
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })
            .context("no limit can be set")
    };
    // Where there is not as much memory as the limit says, this process goes, and not the one that waits for it.
    drop(std::fs::write("/proc/self/oom_score_adj", "1000"));
    limit(Resource::Core, 0)?;
    limit(Resource::As, args.memory.saturating_add(ADDRESSES))?;
    limit(Resource::Data, args.memory.saturating_add(PROMISED))?;
    limit(Resource::Cpu, args.seconds)?;
    let mut text = String::new();
    io::stdin().read_to_string(&mut text)?;
    let form = Form::from_json(serde_json::from_str(&text)?).context("no form")?;
    let mut bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    bytes.push(Vec::new());
    let encode = Arc::new(|bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).collect());
    // Where no thread can be had, it is as nice as whoever started it.
    drop(std::thread::Builder::new().spawn(|| {
        std::thread::sleep(SHORT);
        give_way();
    }));
    let grammars = Grammars::new(Vocabulary { bytes, end_tokens: vec![256], encode })?;
    // Why it may be refused is found again by whoever asked.
    drop(grammars.compile(&form));
    Ok(())
}

/// Lets others go before this process. On Linux each thread has a priority of its own, and those that come later begin
/// with that of the first one. Where it cannot be had, it stays as it was.
fn give_way() {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let ids = threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok());
    let mut threads: Vec<Option<Pid>> = ids.map(Pid::from_raw).collect();
    if threads.is_empty() {
        threads.push(None);
    }
    for thread in threads {
        let _ = getpriority_process(thread).and_then(|now| setpriority_process(thread, now + NICE));
    }
}

/// Tries forms within so much memory and so many seconds.
pub(crate) fn trial(memory: u64, seconds: u64) -> Trial {
    Arc::new(move |form, wanted| {
        // Nothing of it is a caller's.
        if *form == Form::JsonObject {
            return Ok(());
        }
        let failed = |error: io::Error| FormError::Compile(format!("no process to compile it: {error}"));
        let mut child = Command::new(program().map_err(failed)?)
            .args(["compile-form", "--memory", &memory.to_string(), "--seconds", &seconds.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take() {
            // One that has ended already reads nothing, and its status says why.
            drop(stdin.write_all(form.to_json().to_string().as_bytes()));
        }
        let mut pause = LOOKS.0;
        let ended = loop {
            match child.try_wait().map_err(failed)? {
                Some(status) => break status,
                None if wanted() => std::thread::sleep(pause),
                None => {
                    // It may have ended in the meantime.
                    drop(child.kill());
                    drop(child.wait());
                    return Err(FormError::Unwanted);
                }
            }
            pause = (pause * 2).min(LOOKS.1);
        };
        if ended.success() {
            return Ok(());
        }
        tracing::warn!(status = ended.to_string(), "a form was too much for the process that tried it");
        let what = if is_out_of_time(ended) { "time" } else { "memory" };
        Err(FormError::TooMuch { what })
    })
}

/// Ended by the limit on its processor time.
fn is_out_of_time(status: std::process::ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    let signals = [Signal::XCPU, Signal::KILL].map(Signal::as_raw);
    status.signal().is_some_and(|signal| signals.contains(&signal))
}

/// This program, also after another version has taken its place on disk.
fn program() -> io::Result<PathBuf> {
    let running = PathBuf::from("/proc/self/exe");
    if running.exists() { Ok(running) } else { std::env::current_exe() }
}
