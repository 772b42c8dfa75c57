//! The container image, built of deploy/Dockerfile and run by its default command, without a registry: the base is made
//! of Debian's packages, and the stage that compiles is replaced by a binary that is there. A hub on this machine has the
//! default model, since the image has no other way to it than the hub.

use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fornax::catalog::{self, Entry};
use serde_json::{Value, json};

use super::Facts;
use super::serving::Server;
use crate::wheel::target_folder;
use crate::{command, fixtures, output, root, run as run_tool};

/// What the image's own base, debian:bookworm-slim, is made of.
const SUITE: &str = "bookworm";

const KEY: &str = "a-key-of-the-proof";

pub(super) fn run() -> Result<Facts> {
    fixtures::run(false)?;
    let binary = binary()?;
    let work = tempfile::tempdir().context("cannot make a temporary folder")?;
    let at = |name: &str| work.path().join(name);
    let buildah = Buildah { storage: at("storage"), state: at("state") };

    let base = base()?;
    let scratch = buildah.told(&["from", "scratch"])?;
    buildah.told(&["copy", "--quiet", &scratch, &base.to_string_lossy(), "/"])?;
    buildah.told(&["commit", "--quiet", "--rm", &scratch, "localhost/runtime"])?;

    let compiled = at("compiled");
    fs::create_dir_all(compiled.join("out"))?;
    fs::copy(&binary, compiled.join("out/fornax"))?;
    let file = root().join("deploy/Dockerfile");
    let context = at("context");
    fs::create_dir(&context)?;
    let built = Instant::now();
    buildah.told(&[
        "build",
        "--quiet",
        "--isolation=chroot",
        "--build-arg=RUNTIME=localhost/runtime",
        &format!("--build-context=build={}", compiled.display()),
        &format!("--file={}", file.display()),
        "--tag=localhost/fornax",
        &context.to_string_lossy(),
    ])?;
    let built = built.elapsed();

    let image: Value =
        serde_json::from_str(&buildah.told(&["inspect", "--type=image", "localhost/fornax"])?)?;
    let config = &image["OCIv1"]["config"];
    ensure!(config["User"] == "10001:10001", "it runs as {}", config["User"]);
    let words = |name: &str| -> Vec<String> {
        let list = config[name].as_array().into_iter().flatten();
        list.filter_map(|word| Some(word.as_str()?.to_owned())).collect()
    };
    let default = [words("Entrypoint"), words("Cmd")].concat();
    ensure!(default.first().is_some_and(|word| word == "fornax"), "its default command is {default:?}");

    let container = buildah.told(&["from", "localhost/fornax"])?;
    let python =
        buildah.told(&["run", "--isolation=chroot", &container, "sh", "-c", "command -v python3 || true"])?;
    ensure!(python.is_empty(), "the image has {python}");

    let keys = at("keys");
    fs::write(&keys, format!("{KEY}\n"))?;
    // As docs/operations.md asks: the user of the image can read it.
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o644))?;
    let hub = Hub::start(catalog::find(catalog::DEFAULT).context("the default model")?)?;
    let started = Instant::now();
    let mut start = buildah.command(&["run", "--isolation=chroot"]);
    start.args([
        &format!("--volume={}:/run/secrets/fornax-keys:ro", keys.display()),
        &format!("--env=HF_ENDPOINT={}", hub.endpoint),
        &container,
        "--",
    ]);
    // The default command, on a port that is free here.
    let log = at("log");
    start.args(&default).args(["--port", "0"]).stderr(fs::File::create(&log)?);
    let server = Server::of(&mut start, KEY).with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
    let ready = started.elapsed();
    ensure!(hub.served()? > 90_000_000, "the model did not come from the hub");

    let question = json!({"model": "smollm2", "max_tokens": 16, "temperature": 0, "messages":
        [{"role": "user", "content": "What is the capital of France?"}]});
    let refused = server.exchange_as("another", "POST", "/v1/chat/completions", &question.to_string())?;
    ensure!(refused.starts_with("HTTP/1.1 401"), "{refused}");
    let answer = server.exchange("POST", "/v1/chat/completions", &question.to_string())?;
    ensure!(answer.starts_with("HTTP/1.1 200") && answer.contains("Paris"), "{answer}");

    let inner = descendant(server.id(), "fornax")?;
    run_tool(Command::new("kill").args(["-TERM", &inner.to_string()]))?;
    let deadline = Instant::now() + Duration::from_secs(40);
    let status = loop {
        if let Some(status) = server.child.lock().expect("no holder panics").try_wait()? {
            break status;
        }
        ensure!(Instant::now() < deadline, "it does not end on SIGTERM");
        thread::sleep(Duration::from_millis(50));
    };
    ensure!(status.success(), "SIGTERM ended it with {status}");

    Ok(vec![
        ("base", format!("Debian {SUITE} of its packages, without Python")),
        (
            "built of deploy/Dockerfile",
            format!("after {:.1} s, the binary compiled before", built.as_secs_f64()),
        ),
        ("user", "10001:10001".to_owned()),
        ("default command", format!("`{}`", default.join(" "))),
        (
            "ready",
            format!(
                "after {:.1} s, the default model fetched from a hub on this machine",
                ready.as_secs_f64()
            ),
        ),
        ("systemd unit", unit(&binary, work.path())?),
        ("asked", "200 with its key, 401 with another; exit 0 on SIGTERM".to_owned()),
    ])
}

/// What systemd says of the unit: that it can be read, and how little a process in it may do.
fn unit(binary: &Path, work: &Path) -> Result<String> {
    let unit = fs::read_to_string(root().join("deploy/fornax.service"))?;
    let path = work.join("fornax.service");
    // It judges whether the program is there, too.
    fs::write(&path, unit.replace("/usr/local/bin/fornax", &binary.to_string_lossy()))?;
    let said = output(Command::new("systemd-analyze").arg("verify").arg(&path))?;
    ensure!(said.is_empty(), "systemd-analyze verify: {said}");
    // Ten times the exposure that may be reached: below 3 is what it calls OK.
    let judged = output(
        Command::new("systemd-analyze").args(["security", "--offline=yes", "--threshold=25"]).arg(&path),
    )?;
    let exposure =
        judged.lines().rev().find_map(|line| line.split_once("level for ")).context("no exposure")?.1;
    Ok(format!("verified; exposure of {}", exposure.trim_end_matches(|c: char| !c.is_ascii_alphanumeric())))
}

/// One that is named, such as the one that is shipped, else one that is compiled here. Its glibc must not be newer than
/// the base's.
fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("FORNAX_BINARY") {
        return Ok(root().join(path));
    }
    run_tool(&mut command("cargo", &["build", "--release", "--locked", "--package", "fornax"]))?;
    Ok(target_folder().join("release/fornax"))
}

/// The root of the runtime image; made once.
fn base() -> Result<PathBuf> {
    let folder = root().join("target/image").join(SUITE);
    if folder.join("debootstrap").exists() || !folder.exists() {
        if folder.exists() {
            bail!("{} is half made; remove it", folder.display());
        }
        fs::create_dir_all(&folder)?;
        run_tool(command("debootstrap", &["--variant=minbase", SUITE]).arg(&folder))?;
    }
    Ok(folder)
}

/// Buildah with everything that it keeps in folders of its own.
struct Buildah {
    storage: PathBuf,
    state: PathBuf,
}

impl Buildah {
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("buildah");
        command.arg("--root").arg(&self.storage).arg("--runroot").arg(&self.state);
        command.args(["--storage-driver", "vfs"]).args(args);
        command
    }

    fn told(&self, args: &[&str]) -> Result<String> {
        Ok(output(&mut self.command(args))?.trim().to_owned())
    }
}

/// The process of that name among those that `process` started.
fn descendant(process: u32, name: &str) -> Result<u32> {
    let mut found = vec![process];
    while let Some(next) = found.pop() {
        let comm = fs::read_to_string(format!("/proc/{next}/comm")).unwrap_or_default();
        if next != process && comm.trim() == name {
            return Ok(next);
        }
        let tasks = fs::read_dir(format!("/proc/{next}/task")).into_iter().flatten().flatten();
        for task in tasks {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    bail!("no process {name} runs in the container")
}

/// As much of the hub as the fetch of one model asks for.
struct Hub {
    endpoint: String,
    served: Arc<Mutex<u64>>,
}

impl Hub {
    fn start(entry: &'static Entry) -> Result<Hub> {
        let path = entry.installed(&fixtures::cache_dir()?).context("the default model is not fetched")?;
        let (repository, file) =
            entry.hub.and_then(|hub| hub.split_once(':')).context("the catalog names no file of the hub")?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        let served = Arc::new(Mutex::new(0));
        let counted = Arc::clone(&served);
        let held = Arc::new(Held { endpoint: endpoint.clone(), entry, repository, file, path });
        // It ends with this process.
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (counted, held) = (Arc::clone(&counted), Arc::clone(&held));
                thread::spawn(move || {
                    let sent = held.answer(stream).unwrap_or_default();
                    *counted.lock().expect("no holder panics") += sent;
                });
            }
        });
        Ok(Hub { endpoint, served })
    }

    /// Bytes of the model that were fetched.
    fn served(&self) -> Result<u64> {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let served = *self.served.lock().expect("no holder panics");
            if served > 0 || Instant::now() > deadline {
                return Ok(served);
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The one file that the hub has.
struct Held {
    endpoint: String,
    entry: &'static Entry,
    repository: &'static str,
    file: &'static str,
    path: PathBuf,
}

impl Held {
    /// Answers one request; how many bytes of the model were sent.
    fn answer(&self, mut stream: TcpStream) -> Result<u64> {
        let Held { endpoint, entry, repository, file, path } = self;
        let mut lines = BufReader::new(stream.try_clone()?.take(1 << 16)).lines();
        let first = lines.next().context("nothing was asked")??;
        let asked = first.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut start = 0;
        for line in lines {
            let line = line?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(range) = line.strip_prefix("range: bytes=") {
                start = range.split('-').next().unwrap_or_default().parse()?;
            }
        }
        const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
        let head = |status: &str, length: u64, more: &str| {
            format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n{more}\r\n")
        };
        if asked.starts_with(&format!("/api/models/{repository}/revision/")) {
            let lfs = json!({"sha256": entry.sha256, "size": entry.bytes, "pointerSize": 134});
            let sibling = json!({"rfilename": file, "size": entry.bytes, "blobId": COMMIT, "lfs": lfs});
            let list =
                json!({"id": repository, "sha": COMMIT, "gated": false, "siblings": [sibling]}).to_string();
            stream.write_all((head("200 OK", list.len() as u64, "") + &list).as_bytes())?;
            return Ok(0);
        }
        if asked == format!("/{repository}/resolve/{COMMIT}/{file}") {
            // Large files are elsewhere, as the hub has them.
            let more = format!("location: {endpoint}/{}\r\n", entry.sha256);
            stream.write_all(head("302 Found", 0, &more).as_bytes())?;
            return Ok(0);
        }
        if asked != format!("/{}", entry.sha256) {
            stream.write_all(head("404 Not Found", 0, "").as_bytes())?;
            return Ok(0);
        }
        let (status, range) = match start {
            0 => ("200 OK", String::new()),
            start => (
                "206 Partial Content",
                format!("content-range: bytes {start}-{}/{}\r\n", entry.bytes - 1, entry.bytes),
            ),
        };
        stream.write_all(head(status, entry.bytes - start, &range).as_bytes())?;
        let mut model = fs::File::open(path)?;
        model.seek(SeekFrom::Start(start))?;
        Ok(std::io::copy(&mut model, &mut stream)?)
    }
}
