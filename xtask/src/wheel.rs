//! `cargo xtask wheel`: what pip installs. One wheel has the library for every CPython from 3.10 on, and the binary, which
//! pip puts on the path.
//!
//! Maturin builds the library and packs it. It takes the binary from a folder of the crate, where it is laid for as long
//! as that takes. A wheel for others is linked by zig against an old glibc, so that it runs wherever manylinux_2_28 does.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{command, output, root, run};

/// From PyPI, by name and version.
const MATURIN: &str = "maturin==1.16.0";
const ZIG: [&str; 2] = ["ziglang==0.17.0", "cargo-zigbuild==0.24.0"];

/// What glibc the wheel for others asks for, as pip and as zig call it.
const PLATFORM: &str = "manylinux_2_28";
const GLIBC: &str = "2.28";

/// Beyond this a wheel takes too long to arrive.
const BYTES_MAX: u64 = 30_000_000;

/// For whom a wheel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// Everybody: the profile `dist`, linked against an old glibc.
    Everybody,
    /// This machine: by the profile that tests have compiled already.
    ThisMachine,
}

/// Builds a wheel into `target/wheels`; its path.
pub(crate) fn build(audience: Audience) -> Result<PathBuf> {
    let target = target_folder();
    let tools = tools(audience)?;
    let profile = if audience == Audience::Everybody { "dist" } else { "checked" };
    let binary = match audience {
        Audience::Everybody => portable_binary()?,
        Audience::ThisMachine => {
            compile_all()?;
            target.join(profile).join("fornax")
        }
    };
    let wheels = target.join("wheels");
    let laid = Laid::new(&binary)?;
    let maturin = tool(&tools, "maturin");
    let mut packing = command(&maturin, &["build", "--locked", "--profile", profile]);
    packing.arg("--manifest-path").arg(root().join("crates/python/Cargo.toml")).arg("--out").arg(&wheels);
    packing.env("PATH", path_with(&tools)?);
    match audience {
        Audience::Everybody => packing.args(["--zig", "--target", &triple(), "--compatibility", PLATFORM]),
        Audience::ThisMachine => packing.args(["--compatibility", "linux"]),
    };
    run(&mut packing)?;
    drop(laid);
    let platform = if audience == Audience::Everybody { PLATFORM } else { "linux" };
    let name =
        format!("fornax-{}-cp310-abi3-{platform}_{}.whl", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    let wheel = wheels.join(name);
    let bytes = fs::metadata(&wheel).with_context(|| format!("there is no {}", wheel.display()))?.len();
    println!("{} ({:.1} MB)", wheel.display(), bytes as f64 / 1e6);
    ensure!(
        audience == Audience::ThisMachine || bytes < BYTES_MAX,
        "the wheel has {bytes} bytes; it must stay below {BYTES_MAX}"
    );
    Ok(wheel)
}

/// Compiles the binary and the library in the profile of the tests, with xtask: so what all have in common is compiled once.
pub(crate) fn compile_all() -> Result<()> {
    let packages = ["--package=xtask", "--package=fornax", "--package=fornax-python"];
    run(command("cargo", &["build", "--locked", "--profile", "checked"]).args(packages))
}

/// The binary for everybody: as it is shipped, linked by zig against an old glibc.
pub(crate) fn portable_binary() -> Result<PathBuf> {
    let tools = tools(Audience::Everybody)?;
    let zigbuild = tool(&tools, "cargo-zigbuild");
    let mut cargo = command(&zigbuild, &["zigbuild", "--target", &format!("{}.{GLIBC}", triple())]);
    cargo.args(["--locked", "--profile", "dist", "--package", "fornax"]);
    // Zig is a Python package here, found by the interpreter that comes first on the path.
    run(cargo.env("PATH", path_with(&tools)?).env("FORNAX_COMMIT", commit()?))?;
    Ok(target_folder().join(triple()).join("dist/fornax"))
}

/// This machine's, as compilers call it.
fn triple() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// The binary in the folder that maturin takes scripts from where it is there, until it is dropped. Without it the library
/// alone is built, as by `pip install crates/python`.
struct Laid {
    folder: PathBuf,
}

impl Laid {
    fn new(binary: &Path) -> Result<Laid> {
        let laid = Laid { folder: root().join("crates/python/fornax._fornax.data") };
        let path = laid.folder.join("scripts/fornax");
        fs::create_dir_all(laid.folder.join("scripts"))?;
        fs::copy(binary, &path)
            .with_context(|| format!("cannot copy {} to {}", binary.display(), path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        // Whoever passes the binary on passes these on.
        let documents = laid.folder.join("data/share/doc/fornax");
        fs::create_dir_all(&documents)?;
        for name in ["LICENSE", "NOTICE"] {
            fs::copy(root().join(name), documents.join(name))?;
        }
        Ok(laid)
    }
}

impl Drop for Laid {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            println!("cannot remove {}: {error}", self.folder.display());
        }
    }
}

/// A virtual environment with what builds wheels; its folder of programs.
fn tools(audience: Audience) -> Result<PathBuf> {
    let folder = root().join("target/wheel-tools");
    run(command("python3", &["-m", "venv"]).arg(&folder))?;
    let bin = folder.join("bin");
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", MATURIN];
    let mut install = command(&bin.join("python").to_string_lossy(), &pip);
    if audience == Audience::Everybody {
        install.args(ZIG);
    }
    run(&mut install)?;
    Ok(bin)
}

fn tool(tools: &Path, name: &str) -> String {
    tools.join(name).to_string_lossy().into_owned()
}

fn path_with(tools: &Path) -> Result<std::ffi::OsString> {
    let others = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(tools.to_owned()).chain(std::env::split_paths(&others));
    Ok(std::env::join_paths(folders)?)
}

/// The commit that `--version` shows.
pub(crate) fn commit() -> Result<String> {
    let mut commit = output(&mut command("git", &["rev-parse", "HEAD"]))?.trim().to_owned();
    if !output(&mut command("git", &["status", "--porcelain"]))?.is_empty() {
        commit.push_str(", changed");
    }
    Ok(commit)
}

/// Where cargo builds.
pub(crate) fn target_folder() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}
