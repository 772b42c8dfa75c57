//! Models of the hub: fetched, gone on with, refused, and shared with the hub's own library.

use std::cell::RefCell;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use fornax::catalog::{self, Entry, NotHad};
use fornax::hub::{Hub, HubError, Local, Options, Progress, Reference, Token};
use serde_json::json;
use tempfile::TempDir;

use crate::hub_server::{Asked, COMMIT, REPO, Server, Wrong, git_hash, sha256, tree};
use crate::{command, ran};

thread_local! {
    /// What this test's fetches would have waited.
    static PAUSES: RefCell<Vec<Duration>> = const { RefCell::new(Vec::new()) };
}

/// A cache of its own, and the server it is filled from.
struct World {
    server: Server,
    home: TempDir,
}

impl World {
    fn new(files: &[(&str, &[u8])], script: impl FnMut(&Asked) -> Option<Wrong> + Send + 'static) -> World {
        World { server: Server::new(files, script), home: tempfile::tempdir().unwrap() }
    }

    fn cache(&self) -> PathBuf {
        self.home.path().join("hub")
    }

    fn options(&self) -> Options {
        Options {
            endpoint: self.server.endpoint.clone(),
            cache: self.cache(),
            token: Some(Token("hf_secret".to_owned())),
            offline: false,
            attempts: 5,
            pause: |pause| PAUSES.with_borrow_mut(|pauses| pauses.push(pause)),
        }
    }

    fn pull(&self, reference: &str) -> Result<Local, HubError> {
        Hub::new(self.options())
            .pull(&Reference::parse(reference).unwrap(), &mut |_| ControlFlow::Continue(()))
    }

    /// What of `reference` could be loaded without asking anyone.
    fn local(&self, reference: &str) -> Option<Local> {
        Hub::new(self.options()).local(&Reference::parse(reference).unwrap())
    }

    /// Pulls, expects one line with all of `words`, and that nothing can be loaded.
    fn refuses(&self, reference: &str, words: &[&str]) -> HubError {
        let error = self.pull(reference).unwrap_err();
        let message = error.to_string();
        for word in words {
            assert!(message.contains(word), "{word:?} is not in {message:?}");
        }
        assert_eq!(message.lines().count(), 1, "{message:?}");
        assert!(!message.contains("hf_secret"), "{message:?}");
        assert_eq!(self.local(reference), None);
        error
    }

    /// The binary in this world.
    fn fornax(&self, args: &[&str]) -> Command {
        let mut command = command(&self.home.path().join("fornax"));
        command.args(args).env("HF_HUB_CACHE", self.cache()).env("HF_ENDPOINT", &self.server.endpoint);
        command
    }
}

fn pauses() -> Vec<Duration> {
    PAUSES.with_borrow(Clone::clone)
}

/// Bytes that differ everywhere, so that a piece in the wrong place is seen.
fn weights(seed: u32) -> Vec<u8> {
    (0..50_000_u32).flat_map(|i| (i.wrapping_mul(2_654_435_761) ^ seed).to_le_bytes()).collect()
}

fn right(_: &Asked) -> Option<Wrong> {
    None
}

/// Answers the first `times` requests for large files with `wrong`.
fn at_first(times: usize, wrong: Wrong) -> impl FnMut(&Asked) -> Option<Wrong> + Send {
    let mut left = times;
    move |asked| {
        if !asked.away || left == 0 {
            return None;
        }
        left -= 1;
        Some(wrong.clone())
    }
}

#[test]
fn a_file_is_fetched_to_where_the_hub_s_own_library_looks() {
    let bytes = weights(0);
    let world =
        World::new(&[("m-Q4_K_M.gguf", &bytes), ("m-Q8_0.gguf", b"other"), ("README.md", b"#")], right);
    let mut seen = Vec::new();
    let reference = Reference::parse(REPO).unwrap();
    let local = Hub::new(world.options())
        .pull(&reference, &mut |progress| {
            seen.push(format!("{progress:?}"));
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(fs::read(&local.path).unwrap(), bytes);
    let sha = sha256(&bytes);
    let folder = world.cache().join("models--owner--name");
    let pointer = format!("snapshots/{COMMIT}/m-Q4_K_M.gguf");
    assert_eq!(tree(&folder), [format!("blobs/{sha}"), "refs/main".to_owned(), pointer.clone()]);
    assert_eq!(fs::read_link(folder.join(&pointer)).unwrap(), Path::new("../../blobs").join(&sha));
    assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(local, Local { path: folder.join(pointer), name: "m-Q4_K_M.gguf".into(), bytes: 200_000 });
    let chosen = Progress::Chosen { name: "m-Q4_K_M.gguf", files: 1, missing: 200_000 };
    assert_eq!(seen[0], format!("{chosen:?}"));
    assert!(seen.last().unwrap().contains("bytes: 200000, resumed: 0, total: 200000"), "{seen:?}");

    // A second pull asks what there is and fetches nothing; a model to run asks nobody.
    let before = world.server.asked().len();
    assert_eq!(world.local(REPO), Some(local.clone()));
    assert_eq!(world.server.asked().len(), before);
    assert_eq!(world.pull(REPO).unwrap(), local);
    assert_eq!(world.server.fetches().len(), 1);
}

#[test]
fn the_token_is_shown_to_the_hub_and_to_nobody_else() {
    let world = World::new(&[("m.gguf", &weights(0))], right);
    world.pull(REPO).unwrap();
    let asked = world.server.asked();
    let tokens = |away: bool| -> Vec<Option<String>> {
        asked.iter().filter(|asked| asked.away == away).map(|asked| asked.token.clone()).collect()
    };
    assert_eq!(tokens(false), vec![Some("Bearer hf_secret".to_owned()); 2]);
    assert_eq!(tokens(true), [None]);
}

#[test]
fn a_folder_of_shards_is_fetched_without_what_is_not_read() {
    let (first, second) = (weights(1), weights(2));
    let index =
        json!({"weight_map": {"a": "model-1.safetensors", "b": "sub/model-2.safetensors"}}).to_string();
    let files: [(&str, &[u8]); 9] = [
        ("README.md", b"#"),
        ("config.json", b"{}"),
        ("tokenizer.json", b"{ }"),
        ("generation_config.json", b"{  }"),
        ("model.safetensors.index.json", index.as_bytes()),
        ("model-1.safetensors", &first),
        ("sub/model-2.safetensors", &second),
        ("pytorch_model.bin", &[7; 3000]),
        ("consolidated.safetensors", &[8; 3000]),
    ];
    // As a mirror lists them too, without sizes and checksums.
    for server in [Server::new(&files, right), Server::terse(&files)] {
        let world = World { server, home: tempfile::tempdir().unwrap() };
        let local = world.pull(REPO).unwrap();
        let names = [
            "config.json",
            "generation_config.json",
            "model-1.safetensors",
            "model.safetensors.index.json",
            "sub/model-2.safetensors",
            "tokenizer.json",
        ];
        assert_eq!(tree(&local.path), names);
        assert_eq!(fs::read(local.path.join("sub/model-2.safetensors")).unwrap(), second);
        assert_eq!(world.local(REPO), Some(local.clone()));
        let blob = |bytes: &[u8]| world.cache().join("models--owner--name/blobs").join(git_hash(bytes));
        assert_eq!(fs::read(blob(b"{ }")).unwrap(), b"{ }");
        // A shard that was removed is missed, not loaded around.
        fs::remove_file(local.path.join("model-1.safetensors")).unwrap();
        assert_eq!(world.local(REPO), None);
    }
}

#[test]
fn all_shards_of_a_split_model_are_fetched() {
    let (first, second) = (weights(1), weights(2));
    let names = ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"];
    let world = World::new(&[(names[0], &first), (names[1], &second)], right);
    let local = world.pull(&format!("{REPO}:q4_0")).unwrap();
    assert_eq!(local.path.file_name().unwrap(), names[0]);
    assert_eq!(tree(local.path.parent().unwrap()), names);
}

#[test]
fn a_cut_connection_is_gone_on_with_where_it_was() {
    let bytes = weights(0);
    let world = World::new(&[("m.gguf", &bytes)], at_first(2, Wrong::Cut(60_000)));
    let local = world.pull(REPO).unwrap();
    assert_eq!(fs::read(local.path).unwrap(), bytes);
    let starts: Vec<_> = world.server.fetches().iter().map(|asked| asked.range).collect();
    assert_eq!(starts, [None, Some(60_000), Some(120_000)]);
    // Each brought something, so each is a first failure.
    assert_eq!(pauses(), [Duration::from_secs(1); 2]);
}

#[test]
fn a_fetch_that_was_given_up_is_gone_on_with_by_the_next() {
    let bytes = weights(0);
    let mut count = 0;
    let world = World::new(&[("m.gguf", &bytes)], move |asked| {
        count += usize::from(asked.away);
        match count {
            1 => Some(Wrong::Cut(70_000)),
            2..=5 => asked.away.then_some(Wrong::Cut(0)),
            _ => None,
        }
    });
    world.refuses(REPO, &["cannot fetch", "is kept"]);
    let incomplete = format!("models--owner--name/blobs/{}.incomplete", sha256(&bytes));
    assert_eq!(fs::metadata(world.cache().join(&incomplete)).unwrap().len(), 70_000);
    // Half a file is no model, for nobody.
    let run = ran(world.fornax(&["inspect", REPO]).env("HF_HUB_OFFLINE", "1"));
    run.fails(4, "MODEL_NOT_FOUND", &[REPO, "HF_HUB_OFFLINE"]);

    let mut first = None;
    let reference = Reference::parse(REPO).unwrap();
    Hub::new(world.options())
        .pull(&reference, &mut |progress| {
            if let Progress::Downloading { bytes, resumed, .. } = progress {
                first.get_or_insert((bytes > resumed, resumed));
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(first, Some((true, 70_000)));
    assert_eq!(world.server.fetches().last().unwrap().range, Some(70_000));
    assert_eq!(fs::read(world.local(REPO).unwrap().path).unwrap(), bytes);
    assert!(!world.cache().join(incomplete).exists());
}

#[test]
fn a_server_without_ranges_is_fetched_from_the_start() {
    let bytes = weights(0);
    let mut cuts = 0;
    let world = World::new(&[("m.gguf", &bytes)], move |asked| {
        cuts += usize::from(asked.away);
        asked.away.then_some(if cuts == 1 { Wrong::Cut(60_000) } else { Wrong::Whole })
    });
    assert_eq!(fs::read(world.pull(REPO).unwrap().path).unwrap(), bytes);
}

#[test]
fn what_an_earlier_attempt_left_wrong_is_found_out() {
    let bytes = weights(0);
    let world = World::new(&[("m.gguf", &bytes)], right);
    let blobs = world.cache().join("models--owner--name/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", sha256(&bytes)));
    fs::write(&partial, [9; 1000]).unwrap();
    let error = world.refuses(REPO, &["m.gguf", &sha256(&bytes), "not kept"]);
    assert!(matches!(error, HubError::WrongChecksum { .. }), "{error:?}");
    assert!(!partial.exists());
    // Longer than the file: of no use at all.
    fs::write(&partial, vec![9; 300_000]).unwrap();
    assert_eq!(fs::read(world.pull(REPO).unwrap().path).unwrap(), bytes);
}

#[test]
fn bytes_that_are_not_the_promised_ones_are_not_kept() {
    let mut bytes = weights(0);
    bytes[777] ^= 1;
    let longer = [&weights(0)[..], b"more"].concat();
    for (wrong, words) in
        [(bytes, &["has checksum", "expected"][..]), (longer, &["more than the 200000 bytes"])]
    {
        let world = World::new(&[("m.gguf", &weights(0))], at_first(1, Wrong::Bytes(wrong)));
        world.refuses(REPO, words);
        assert_eq!(tree(&world.cache().join("models--owner--name")), Vec::<String>::new());
    }
    // A small file is called as Git calls it, and checked as well.
    let files: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", &weights(0))];
    let world =
        World::new(&files, |asked| asked.path.ends_with("config.json").then(|| Wrong::Bytes(b"[]".to_vec())));
    // The server still says two bytes.
    world.refuses(REPO, &["config.json", "has checksum"]);
}

#[test]
fn refusals_of_the_hub_say_what_to_do() {
    let check = |status, headers: &'static [(&str, &str)], reference: &str, words: &[&str]| {
        let world = World::new(&[("m.gguf", &weights(0))], move |_| Some(Wrong::Status(status, headers)));
        world.refuses(reference, words);
        assert_eq!(world.server.asked().len(), 1);
        assert_eq!(tree(&world.cache()), Vec::<String>::new());
    };
    check(401, &[("x-error-code", "GatedRepo")], REPO, &["gated or private", "the token given", "HF_TOKEN"]);
    check(403, &[], REPO, &["no access", "ask for access at", REPO]);
    check(401, &[("x-error-code", "RepoNotFound")], REPO, &["no repository owner/name"]);
    check(404, &[], REPO, &["no repository owner/name", "spelling"]);
    check(404, &[("x-error-code", "RevisionNotFound")], "owner/name@v9", &["no revision \"v9\""]);
    check(400, &[], REPO, &["answers 400"]);
    check(429, &[("retry-after", "3600")], REPO, &["429", "wait 3600 s"]);
    check(302, &[("location", "elsewhere")], REPO, &["leads nowhere", "HF_ENDPOINT"]);
    assert_eq!(pauses(), []);

    let world = World::new(&[("m-Q8_0.gguf", &weights(0))], right);
    world.refuses("owner/name:Q4_K_M", &["no GGUF file in Q4_K_M", "it has: Q8_0"]);
    world.refuses("owner/name:n.gguf", &["no file \"n.gguf\"", "m-Q8_0.gguf"]);
    let nobody = Hub::new(Options { token: None, ..world.options() });
    let other = Reference::parse("owner/other").unwrap();
    let error = nobody.pull(&other, &mut |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(error.contains("no repository owner/other, or it is private and HF_TOKEN is not set"), "{error}");
}

#[test]
fn a_file_that_vanished_or_is_gated_is_told_while_it_is_fetched() {
    let check = |status, headers: &'static [(&str, &str)], words: &[&str]| {
        let world = World::new(&[("m.gguf", &weights(0))], move |asked| {
            asked.path.contains("resolve").then_some(Wrong::Status(status, headers))
        });
        world.refuses(REPO, words);
    };
    check(404, &[("x-error-code", "EntryNotFound")], &["no file \"m.gguf\""]);
    check(401, &[("x-error-code", "GatedRepo")], &["HF_TOKEN"]);
}

#[test]
fn the_hub_s_wish_for_patience_is_granted() {
    let bytes = weights(0);
    let mut asked_before = 0;
    let world = World::new(&[("m.gguf", &bytes)], move |_| {
        asked_before += 1;
        (asked_before <= 2).then_some(Wrong::Status(429, &[("retry-after", "7")]))
    });
    assert_eq!(fs::read(world.pull(REPO).unwrap().path).unwrap(), bytes);
    assert_eq!(pauses(), [Duration::from_secs(7); 2]);
}

#[test]
fn a_hub_that_stays_broken_is_given_up() {
    let world = World::new(&[("m.gguf", &weights(0))], |_| Some(Wrong::Status(503, &[])));
    world.refuses(REPO, &["answers 503"]);
    assert_eq!(pauses(), [1, 2, 4, 8].map(Duration::from_secs));
    assert_eq!(world.server.asked().len(), 5);
    let mut gone = world.options();
    // A port that was just given back.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    gone.endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = Hub::new(gone)
        .pull(&Reference::parse(REPO).unwrap(), &mut |_| ControlFlow::Continue(()))
        .unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error:?}");
}

#[test]
fn an_answer_that_is_not_the_hub_s_is_refused() {
    let check = |list: serde_json::Value, words: &[&str]| {
        let text = list.to_string();
        let world = World::new(&[], move |_| Some(Wrong::List(text.clone())));
        world.refuses(REPO, words);
        assert_eq!(tree(world.home.path()), Vec::<String>::new());
    };
    check(json!("<html>"), &["not the hub's", "HF_ENDPOINT"]);
    check(json!({"sha": "../../x", "siblings": []}), &["is no commit"]);
    for name in
        ["../m.gguf", "/m.gguf", "a/../../m.gguf", "a\\..\\m.gguf", "a//m.gguf", "c:m.gguf", "m\n.gguf", ""]
    {
        let listed = json!({"sha": COMMIT, "siblings": [{"rfilename": "m.gguf"}, {"rfilename": name}]});
        check(listed, &["outside of its folder", "nothing was fetched"]);
    }
    // The same in an index of shards.
    let index = json!({"weight_map": {"a": "../../../evil.safetensors"}}).to_string();
    let files: [(&str, &[u8]); 3] = [
        ("config.json", b"{}"),
        ("tokenizer.json", b"{}"),
        ("model.safetensors.index.json", index.as_bytes()),
    ];
    World::new(&files, right).refuses(REPO, &["evil", "outside of its folder"]);
}

#[test]
fn a_disk_without_room_is_told_before_and_while_it_fills() {
    let sha = "a".repeat(64);
    let list = json!({"sha": COMMIT, "siblings": [
        {"rfilename": "m.gguf", "size": 1_u64 << 60, "lfs": {"sha256": sha, "size": 1_u64 << 60}}
    ]});
    let text = list.to_string();
    let world = World::new(&[], move |_| Some(Wrong::List(text.clone())));
    let error = world.refuses(REPO, &["no space left", "1152921504.61 GB", "are free", "HF_HOME"]);
    assert!(matches!(error, HubError::DiskFull { .. }), "{error:?}");
    assert_eq!(world.server.asked().len(), 1, "nothing was fetched");

    // The device that is always full, in the place of the file.
    let bytes = weights(0);
    let world = World::new(&[("m.gguf", &bytes)], right);
    let blobs = world.cache().join("models--owner--name/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", sha256(&bytes)));
    std::os::unix::fs::symlink("/dev/full", &partial).unwrap();
    world.refuses(REPO, &["no space left", "200.0 kB"]);
    let run = ran(&mut world.fornax(&["pull", REPO]));
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.lines().last().unwrap().starts_with("error: DISK_FULL: "), "{}", run.stderr);
}

#[test]
fn a_cache_that_cannot_be_written_names_the_variable() {
    let world = World::new(&[("m.gguf", &weights(0))], right);
    // A file where the folder should be refuses everyone, also a superuser.
    fs::write(world.cache(), b"").unwrap();
    world.refuses(REPO, &["cannot write", "HF_HOME"]);
}

#[test]
fn offline_means_what_is_on_disk() {
    let world = World::new(&[("m-Q8_0.gguf", &weights(0))], right);
    let offline = || Hub::new(Options { offline: true, ..world.options() });
    let pull = |reference: &str| {
        offline().pull(&Reference::parse(reference).unwrap(), &mut |_| ControlFlow::Continue(()))
    };
    let absent = pull(REPO).unwrap_err();
    assert!(matches!(absent, HubError::Offline { .. }), "{absent:?}");
    assert_eq!(world.server.asked().len(), 0);
    let local = world.pull(REPO).unwrap();
    let before = world.server.asked().len();
    for reference in [REPO, "owner/name:Q8_0", "owner/name/m-Q8_0.gguf", &format!("{REPO}@{COMMIT}")] {
        assert_eq!(pull(reference).unwrap(), local, "{reference}");
    }
    assert!(matches!(pull("owner/name:Q4_K_M"), Err(HubError::Offline { .. })));
    assert_eq!(world.server.asked().len(), before);
}

#[test]
fn two_pulls_at_once_fetch_once_and_agree() {
    let bytes = weights(0);
    let world = World::new(&[("m.gguf", &bytes)], right);
    let waited = Mutex::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let reference = Reference::parse(REPO).unwrap();
                let local = Hub::new(world.options())
                    .pull(&reference, &mut |progress| {
                        if matches!(progress, Progress::Waiting { .. }) {
                            *waited.lock().unwrap() += 1;
                        }
                        ControlFlow::Continue(())
                    })
                    .unwrap();
                assert_eq!(fs::read(local.path).unwrap(), bytes);
            });
        }
    });
    assert_eq!(world.server.fetches().len(), 1);
}

#[test]
fn a_newer_commit_is_fetched_by_pull_and_the_old_one_kept_until_then() {
    let world = World::new(&[("m.gguf", &weights(0))], right);
    let folder = world.cache().join("models--owner--name");
    // As an older commit left it, or the hub's own library.
    let old = "f".repeat(40);
    let snapshot = folder.join("snapshots").join(&old);
    for path in [&snapshot, &folder.join("refs")] {
        fs::create_dir_all(path).unwrap();
    }
    fs::write(snapshot.join("m.gguf"), b"old").unwrap();
    fs::write(folder.join("refs/main"), &old).unwrap();
    assert_eq!(world.local(REPO).unwrap().path, snapshot.join("m.gguf"));
    let new = world.pull(REPO).unwrap();
    assert_eq!(world.local(REPO), Some(new.clone()));
    assert!(new.path.starts_with(folder.join("snapshots").join(COMMIT)));
    assert_eq!(fs::read(snapshot.join("m.gguf")).unwrap(), b"old");
}

#[test]
fn the_command_line_pulls_runs_lists_and_removes() {
    let model = fs::read(crate::tiny::fixtures().join("llama.gguf")).unwrap();
    let world = World::new(&[("tiny-Q4_K_M.gguf", &model), ("tiny-F16.gguf", &weights(1))], right);
    let pulled = ran(&mut world.fornax(&["pull", REPO]));
    assert_eq!(pulled.code, Some(0), "{}", pulled.stderr);
    assert!(pulled.stdout.trim_end().ends_with("tiny-Q4_K_M.gguf"), "{}", pulled.stdout);
    for words in
        ["model: tiny-Q4_K_M.gguf: ", " to download", "goes on from there", "downloading tiny-Q4_K_M.gguf: "]
    {
        assert!(pulled.stderr.contains(words), "{words}: {}", pulled.stderr);
    }
    let again = ran(&mut world.fornax(&["pull", &format!("hf:{REPO}")]));
    assert!(again.stderr.contains("on disk already"), "{}", again.stderr);

    // Without a network from here on.
    let offline = |args: &[&str]| ran(world.fornax(args).env("HF_HUB_OFFLINE", "1"));
    let (tokens, _) = crate::tiny::tokens("llama");
    let said = offline(&["generate", REPO, "--tokens", &tokens, "--max-tokens", "2", "--json"]);
    assert_eq!(said.json()["tokens"].as_array().unwrap().len(), 2);
    assert!(said.stderr.starts_with("model: tiny-Q4_K_M.gguf of owner/name\n"), "{}", said.stderr);
    offline(&["inspect", "owner/name:F16"]).fails(4, "MODEL_NOT_FOUND", &["owner/name:F16"]);

    let listing = offline(&["list", "--json"]).json();
    let row = listing["models"].as_array().unwrap().last().unwrap();
    assert_eq!((&row["name"], &row["bytes"]), (&json!(REPO), &json!(model.len())));
    ran(&mut world.fornax(&["rm", "owner/name:F16"])).fails(2, "INVALID_INPUT", &["fornax rm owner/name"]);
    let removed = ran(&mut world.fornax(&["rm", REPO]));
    assert_eq!(removed.code, Some(0), "{}", removed.stderr);
    assert!(!world.cache().join("models--owner--name").exists());
    ran(&mut world.fornax(&["rm", REPO])).fails(4, "MODEL_NOT_FOUND", &["not on disk"]);
}

#[test]
fn the_command_line_gives_failures_of_the_hub_their_codes() {
    let check = |reference: &str, status: Option<u16>, exit: i32, code: &str, words: &[&str]| {
        let world = World::new(&[("m.gguf", &weights(0))], move |_| Some(Wrong::Status(status?, &[])));
        ran(&mut world.fornax(&["pull", reference])).fails(exit, code, words);
    };
    check(REPO, Some(401), 1, "MODEL_NOT_READY", &["HF_TOKEN", "no token was given"]);
    check(REPO, Some(404), 4, "MODEL_NOT_FOUND", &["no repository"]);
    check("owner/name:Q4_K_M", None, 4, "MODEL_NOT_FOUND", &["it has: m.gguf"]);
    check("hf:a/b/c", None, 2, "INVALID_INPUT", &["owner/name:Q4_K_M"]);
    let world = World::new(&[], right);
    let odd = ran(world.fornax(&["pull", REPO]).env("HF_ENDPOINT", "hub"));
    odd.fails(2, "INVALID_INPUT", &["HF_ENDPOINT", "https://"]);
}

#[test]
fn a_killed_pull_is_gone_on_with_by_the_next() {
    let bytes = weights(0);
    let world = World::new(&[("m.gguf", &bytes)], at_first(9, Wrong::Cut(60_000)));
    // It waits a second before it tries again: long enough to be killed there, with what it has on disk.
    let mut child = world.fornax(&["pull", REPO]).stderr(std::process::Stdio::null()).spawn().unwrap();
    let partial = world.cache().join(format!("models--owner--name/blobs/{}.incomplete", sha256(&bytes)));
    while fs::metadata(&partial).map_or(0, |partial| partial.len()) < 60_000 {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(world.local(REPO), None);
    let before = world.server.fetches().len();
    assert_eq!(fs::read(world.pull(REPO).unwrap().path).unwrap(), bytes);
    assert!(world.server.fetches()[before].range >= Some(60_000));
}

#[test]
fn the_hub_s_own_library_reads_what_was_fetched_and_is_read() {
    const NAME: &str = "the_hub_s_own_library_reads_what_was_fetched_and_is_read";
    let python = std::env::var_os("FORNAX_PYTHON").map(PathBuf::from).filter(|python| python.exists());
    let Some(python) = python else {
        println!("SKIP {NAME}: no FORNAX_PYTHON with huggingface_hub");
        return;
    };
    let bytes = weights(0);
    let files: [(&str, &[u8]); 4] = [
        ("config.json", b"{}"),
        ("tokenizer.json", b"{}"),
        ("model.safetensors", &bytes),
        ("README.md", b"# not fetched"),
    ];
    let world = World::new(&files, right);
    let script = |code: &str| {
        let output = Command::new(&python)
            .args(["-c", code])
            .env("HF_HUB_CACHE", world.cache())
            .env("HF_ENDPOINT", &world.server.endpoint)
            .env("HF_HUB_DISABLE_XET", "1")
            .env("HF_HUB_DISABLE_TELEMETRY", "1")
            .env_remove("HF_HUB_OFFLINE")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    // It finds what we fetched without asking anyone.
    let local = world.pull(REPO).unwrap();
    let found = script(
        "from huggingface_hub import scan_cache_dir, snapshot_download, try_to_load_from_cache as t
print(snapshot_download('owner/name', local_files_only=True))
print(t('owner/name', 'model.safetensors'))
info = scan_cache_dir()
assert not info.warnings, info.warnings
print([(r.repo_id, r.nb_files, r.size_on_disk, list(r.refs)) for r in info.repos])",
    );
    let lines: Vec<&str> = found.lines().collect();
    assert_eq!(lines[0], local.path.to_str().unwrap());
    assert_eq!(lines[1], local.path.join("model.safetensors").to_str().unwrap());
    // Both small files have the same bytes, and so the same blob.
    assert_eq!(lines[2], "[('owner/name', 2, 200002, ['main'])]");

    // We find what it fetches.
    fs::remove_dir_all(world.cache()).unwrap();
    script(
        "from huggingface_hub import hf_hub_download as d
for name in ['config.json', 'tokenizer.json', 'model.safetensors']: d('owner/name', name)",
    );
    assert_eq!(world.local(REPO), Some(local));
}

/// A file of the tests of models.
fn fixture(name: &str) -> Vec<u8> {
    fs::read(crate::tiny::fixtures().join(name)).unwrap()
}

#[test]
fn a_model_of_the_hub_is_planned_and_inspected_by_its_headers_alone() {
    // Behind the headers lies more than would be asked for with them.
    let mut gguf = fixture("llama.gguf");
    let data = gguf.len();
    gguf.resize(data + (24 << 20), 0);
    let world = World::new(&[("m-Q4_0.gguf", &gguf)], right);
    let plan = ran(&mut world.fornax(&["plan", REPO, "--device", "cpu"]));
    assert_eq!(plan.code, Some(0), "{}", plan.stderr);
    assert!(
        plan.stdout.starts_with("m-Q4_0.gguf of owner/name\n") && plan.stdout.contains("fits"),
        "{}",
        plan.stdout
    );
    let inspected = ran(&mut world.fornax(&["inspect", REPO, "--json"])).json();
    assert_eq!((&inspected["architecture"], &inspected["file_bytes"]), (&json!("llama"), &json!(gguf.len())));
    let fetches = world.server.fetches();
    assert_eq!(fetches.len(), 2, "{fetches:?}");
    assert!(fetches.iter().all(|asked| asked.last.is_some_and(|last| last < 8 << 20)), "{fetches:?}");
    assert_eq!(tree(&world.cache()), Vec::<String>::new());

    // What the file's own headers say is what is planned for the file.
    let file = world.home.path().join("m.gguf");
    fs::write(&file, &gguf).unwrap();
    let bytes = |model: &str| {
        ran(&mut world.fornax(&["plan", model, "--device", "cpu", "--memory-limit", "1GiB", "--json"])).json()
            ["devices"][0]["bytes"]
            .clone()
    };
    assert_eq!(bytes(REPO), bytes(file.to_str().unwrap()));
}

#[test]
fn a_folder_of_the_hub_is_planned_by_its_headers_and_what_is_no_header_is_refused() {
    let (config, weights) = (fixture("llama/config.json"), fixture("llama/model.safetensors"));
    let files: [(&str, &[u8]); 3] =
        [("config.json", &config), ("tokenizer.json", b"{}"), ("model.safetensors", &weights)];
    let world = World::new(&files, right);
    let plan = ran(&mut world.fornax(&["plan", REPO, "--device", "cpu", "--json"])).json();
    assert_eq!((&plan["model"], &plan["fits"]), (&json!(REPO), &json!(true)));
    assert_eq!(tree(&world.cache()), Vec::<String>::new());
    // A configuration that is not what the hub promised is not believed.
    let length = config.len();
    let world = World::new(&files, move |asked| {
        asked.path.ends_with("config.json").then(|| Wrong::Bytes(vec![b' '; length]))
    });
    ran(&mut world.fornax(&["plan", REPO])).fails(4, "MODEL_CORRUPT", &["config.json"]);
    let world = World::new(&[("m.gguf", &[7; 9000])], right);
    ran(&mut world.fornax(&["inspect", REPO])).fails(4, "MODEL_CORRUPT", &["m.gguf"]);
}

/// A model of a catalog, whose package nobody has.
fn pinned(bytes: &[u8]) -> Entry {
    Entry {
        name: "toy",
        aliases: &[],
        description: "toy",
        hub: Some(REPO),
        file: "toy.gguf",
        wheels: &[],
        member: "",
        beside: &[],
        sha256: sha256(bytes).leak(),
        bytes: bytes.len() as u64,
        licence: "none",
        public: false,
    }
}

#[test]
fn a_pinned_model_comes_from_the_hub_only_with_the_bytes_that_are_pinned() {
    let bytes = weights(0);
    let world = World::new(&[("whatever-it-is-called.gguf", &bytes)], right);
    let cache = world.home.path().join("fornax");
    let entry = pinned(&bytes);
    let fetch = |entry: &Entry, flow: ControlFlow<()>| {
        catalog::fetch_from_hub(entry, world.options(), &cache, &mut |_| flow)
    };
    // Another checksum is pinned: nothing is fetched.
    let other = Entry { sha256: sha256(b"other").leak(), ..entry };
    assert!(matches!(fetch(&other, ControlFlow::Continue(())), Err(NotHad::Differs)));
    assert_eq!(world.server.fetches().len(), 0);
    // One that is stopped says what is kept.
    let stopped = fetch(&entry, ControlFlow::Break(()));
    assert!(
        matches!(&stopped, Err(NotHad::Hub(HubError::Stopped { kept: 0, total: 200_000 }))),
        "{stopped:?}"
    );
    let path = fetch(&entry, ControlFlow::Continue(())).unwrap();
    assert_eq!(path, cache.join("models/toy.gguf"));
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(entry.installed(&cache), Some(path));
}

#[test]
fn a_fetch_that_is_stopped_says_what_is_kept_and_is_gone_on_with() {
    let bytes = weights(0);
    let world = World::new(&[("m.gguf", &bytes)], right);
    let reference = Reference::parse(REPO).unwrap();
    let mut seen = 0;
    let stopped = Hub::new(world.options()).pull(&reference, &mut |progress| match progress {
        Progress::Downloading { bytes, .. } => {
            seen = bytes;
            ControlFlow::Break(())
        }
        _ => ControlFlow::Continue(()),
    });
    let message = stopped.unwrap_err().to_string();
    assert!(message.contains("of 200.0 kB are kept; the same command goes on"), "{message}");
    let incomplete = format!("models--owner--name/blobs/{}.incomplete", sha256(&bytes));
    assert_eq!(fs::metadata(world.cache().join(incomplete)).unwrap().len(), seen);
    assert_eq!(fs::read(world.pull(REPO).unwrap().path).unwrap(), bytes);
    let last = world.server.fetches().last().unwrap().clone();
    assert!(seen == 200_000 || last.range == usize::try_from(seen).ok(), "{last:?}");
}

#[test]
fn ctrl_c_in_a_fetch_ends_it_with_a_word() {
    // The list comes late enough for a signal, and never whole.
    let bytes = vec![7; 64 << 20];
    let world = World::new(&[("m.gguf", &bytes)], right);
    let mut child = world
        .fornax(&["pull", REPO])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).unwrap();
    assert!(line.contains("to download"), "{line}");
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut said, &mut rest).unwrap();
    let status = child.wait().unwrap();
    // On a machine that was faster than the signal the fetch is done.
    match status.code() {
        Some(130) => {
            assert!(rest.contains("error: CANCELLED: stopped: ") && rest.contains("are kept"), "{rest}")
        }
        code => assert_eq!(code, Some(0), "{rest}"),
    }
}
