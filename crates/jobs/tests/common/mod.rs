//! Databases to test on: a file, and a PostgreSQL cluster of our own.
#![allow(
    dead_code,
    clippy::allow_attributes,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "each test file uses its own part; a test stops at the first surprise and prints what it skips"
)]

use std::{
    fs,
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use fornax_jobs::StoreOptions;
use tempfile::TempDir;

/// A database that is gone when this is.
pub(crate) struct Database {
    pub(crate) url: String,
    cluster: Option<Cluster>,
    _folder: TempDir,
}

struct Cluster {
    bin: PathBuf,
    data: PathBuf,
    user: Option<(u32, u32)>,
}

impl Database {
    pub(crate) fn sqlite() -> Database {
        let folder = tempfile::tempdir().unwrap();
        let url = folder.path().join("jobs of today.db").to_str().unwrap().to_owned();
        Database { url, cluster: None, _folder: folder }
    }

    /// A cluster of its own, reached through a socket in its folder; `None` where PostgreSQL is not installed.
    pub(crate) fn postgres() -> Option<Database> {
        let bin = binaries()?;
        let folder = tempfile::tempdir().unwrap();
        // PostgreSQL refuses to run as root, as CI does.
        let user = (id("-u", None)? == 0).then(|| (id("-u", Some("postgres")), id("-g", Some("postgres"))));
        let user = match user {
            None => None,
            Some((uid, gid)) => Some((uid?, gid?)),
        };
        if let Some((uid, gid)) = user {
            chown(folder.path(), Some(uid), Some(gid)).unwrap();
        }
        let data = folder.path().join("data");
        let cluster = Cluster { bin, data: data.clone(), user };
        cluster.run("initdb", &["--username=fornax", "--auth=trust", "--encoding=UTF8", "--no-sync"]);
        let socket = folder.path().to_str().unwrap();
        let options = format!("-c listen_addresses='' -c unix_socket_directories='{socket}'");
        let log = folder.path().join("log");
        cluster.run("pg_ctl", &["start", "--wait", "--options", &options, "--log", log.to_str().unwrap()]);
        let url = format!("postgres:///postgres?host={}&user=fornax", socket.replace('/', "%2F"));
        Some(Database { url, cluster: Some(cluster), _folder: folder })
    }

    pub(crate) fn options(&self) -> StoreOptions {
        StoreOptions::new(&self.url)
    }

    pub(crate) fn is_postgres(&self) -> bool {
        self.cluster.is_some()
    }
}

/// Both databases; without PostgreSQL the test says that half of it was skipped.
pub(crate) fn databases(test: &str) -> Vec<Database> {
    let mut databases = vec![Database::sqlite()];
    match Database::postgres() {
        Some(postgres) => databases.push(postgres),
        None => println!("SKIP {test}: PostgreSQL is not installed; SQLite was tested"),
    }
    databases
}

impl Cluster {
    fn run(&self, program: &str, args: &[&str]) {
        let mut command = Command::new(self.bin.join(program));
        command.arg("--pgdata").arg(&self.data).args(args).stdout(Stdio::null()).current_dir("/");
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        assert!(command.status().unwrap().success(), "{program} failed");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.run("pg_ctl", &["stop", "--mode", "immediate", "--wait"]);
    }
}

/// Debian keeps each version in a folder of its own.
fn binaries() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let mut folders: Vec<PathBuf> = versions.flatten().map(|version| version.path().join("bin")).collect();
    folders.sort();
    folders.into_iter().rev().find(|folder: &PathBuf| Path::new(folder).join("initdb").exists())
}

fn id(which: &str, user: Option<&str>) -> Option<u32> {
    let said = Command::new("id").arg(which).args(user).output().ok()?;
    String::from_utf8(said.stdout).ok()?.trim().parse().ok()
}
