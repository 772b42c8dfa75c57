//! `cargo xtask dist`: what is shipped for the machine that this runs on.
//!
//! The binary is built by the profile `dist`: optimised, stripped, and it knows its commit. Around it are made an
//! archive, a Debian package, the script that installs the archive, and a file with the checksums of all of them.
//! Nothing is made for a machine that the binary was not built for.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::wheel::{commit, portable_binary, target_folder};
use crate::{command, root, run};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Builds the binary and packs it into `target/dist/packages`. One that is portable runs on older systems, too; the other
/// needs the glibc of this one.
pub(crate) fn run_all(portable: bool) -> Result<()> {
    let target = target_folder();
    let binary = if portable {
        portable_binary()?
    } else {
        let build = ["build", "--locked", "--profile", "dist", "--package", "fornax"];
        run(command("cargo", &build).env("FORNAX_COMMIT", commit()?))?;
        target.join("dist/fornax")
    };
    let packages = target.join("dist/packages");
    for made in pack(&binary, &packages)? {
        println!("{}", packages.join(made).display());
    }
    Ok(())
}

/// Packs a binary of this machine; the names of what is made in `packages`, which is emptied first.
fn pack(binary: &Path, packages: &Path) -> Result<Vec<String>> {
    if packages.exists() {
        fs::remove_dir_all(packages)?;
    }
    fs::create_dir_all(packages)?;
    let arch = std::env::consts::ARCH;
    let mut made = vec![archive(binary, packages, arch)?];
    match debian(binary, packages, arch)? {
        Some(name) => made.push(name),
        None => println!("no Debian package: dpkg-deb is not installed"),
    }
    let script = packages.join("install.sh");
    fs::copy(root().join("deploy/install.sh"), &script)?;
    made.push("install.sh".to_owned());
    let lines: Vec<String> = made
        .iter()
        .map(|name| Ok(format!("{}  {name}\n", sha256(&packages.join(name))?)))
        .collect::<Result<_>>()?;
    fs::write(packages.join("SHA256SUMS"), lines.concat())?;
    made.push("SHA256SUMS".to_owned());
    Ok(made)
}

/// The binary with its licence, as the install script looks for it.
fn archive(binary: &Path, packages: &Path, arch: &str) -> Result<String> {
    let stage = tempfile::tempdir()?;
    let name = format!("fornax-{VERSION}-{arch}-linux");
    let folder = stage.path().join(&name);
    fs::create_dir(&folder)?;
    install(binary, &folder.join("fornax"), 0o755)?;
    for file in ["LICENSE", "NOTICE", "README.md"] {
        install(&root().join(file), &folder.join(file), 0o644)?;
    }
    let archive = format!("fornax-{arch}-linux.tar.gz");
    let path = packages.join(&archive);
    let args = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "-C"];
    run(command("tar", &args).arg(stage.path()).args(["-czf"]).arg(path).arg(&name))?;
    Ok(archive)
}

/// A package of the binary and its unit, where there is `dpkg-deb`.
fn debian(binary: &Path, packages: &Path, arch: &str) -> Result<Option<String>> {
    if command("dpkg-deb", &["--version"]).output().is_err() {
        return Ok(None);
    }
    let arch = match arch {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let stage = tempfile::tempdir()?;
    let at = |path: &str| stage.path().join(path);
    install(binary, &at("usr/bin/fornax"), 0o755)?;
    install(&root().join("deploy/serve.toml"), &at("etc/fornax/serve.toml"), 0o644)?;
    install(&root().join("LICENSE"), &at("usr/share/doc/fornax/copyright"), 0o644)?;
    // Packages own /usr; what an administrator installs by hand is below /usr/local.
    let unit =
        fs::read_to_string(root().join("deploy/fornax.service"))?.replace("/usr/local/bin/", "/usr/bin/");
    fs::create_dir_all(at("lib/systemd/system"))?;
    fs::write(at("lib/systemd/system/fornax.service"), unit)?;
    let (major, minor) = glibc(&fs::read(binary)?).unwrap_or((2, 28));
    let kib = fs::metadata(binary)?.len() / 1024 + 1;
    fs::create_dir_all(at("DEBIAN"))?;
    fs::write(at("DEBIAN/conffiles"), "/etc/fornax/serve.toml\n")?;
    fs::write(
        at("DEBIAN/control"),
        format!(
            "Package: fornax\nVersion: {VERSION}\nArchitecture: {arch}\nMaintainer: The Fornax authors <fornax@localhost>\n\
             Installed-Size: {kib}\nDepends: libc6 (>= {major}.{minor}), libgcc-s1\nSection: net\nPriority: optional\n\
             Description: runs open-weight language models\n A chat in the terminal, and a server for OpenAI's, Anthropic's \
             and Ollama's clients.\n The service is not started: it needs a file with keys first (/etc/fornax/keys).\n"
        ),
    )?;
    let name = format!("fornax_{VERSION}_{arch}.deb");
    run(command("dpkg-deb", &["--root-owner-group", "-Zxz", "--build"])
        .arg(stage.path())
        .arg(packages.join(&name)))?;
    Ok(Some(name))
}

fn install(from: &Path, to: &Path, mode: u32) -> Result<()> {
    to.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(fs::set_permissions(to, fs::Permissions::from_mode(mode))?)
}

/// The newest glibc whose symbols a binary names.
fn glibc(binary: &[u8]) -> Option<(u32, u32)> {
    const MARK: &[u8] = b"GLIBC_";
    let versions: BTreeSet<(u32, u32)> = binary
        .windows(MARK.len())
        .enumerate()
        .filter(|(_, window)| *window == MARK)
        .filter_map(|(at, _)| {
            let text = &binary[at + MARK.len()..];
            let text = &text[..text.iter().position(|&byte| byte == 0)?.min(16)];
            let mut parts = std::str::from_utf8(text).ok()?.split('.');
            Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
        })
        .collect();
    versions.last().copied()
}

fn sha256(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(!bytes.is_empty(), "{} is empty", path.display());
    Ok(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;
    use crate::output;

    /// A program in the place of the binary, packed.
    fn packed(folder: &Path) -> PathBuf {
        let (binary, packages) = (folder.join("binary"), folder.join("packages"));
        fs::write(&binary, "#!/bin/sh\necho fornax 0.0.0\n").unwrap();
        let made = pack(&binary, &packages).unwrap();
        assert!(made.iter().all(|name| packages.join(name).exists()), "{made:?}");
        packages
    }

    /// The script's exit and what it said.
    fn installed(from: &str, prefix: &Path) -> (bool, String) {
        let script = root().join("deploy/install.sh");
        let ran = Command::new("sh").arg(script).arg(from).env("PREFIX", prefix).output().unwrap();
        (ran.status.success(), String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned())
    }

    #[test]
    fn what_is_packed_is_installed_only_with_the_right_checksum() {
        let folder = tempfile::tempdir().unwrap();
        let packages = packed(folder.path());
        let (prefix, from) = (folder.path().join("prefix"), packages.to_str().unwrap());
        let (done, said) = installed(from, &prefix);
        assert!(done && said.contains("fornax 0.0.0"), "{said}");
        let first = Command::new(prefix.join("bin/fornax")).output().unwrap();
        assert_eq!(first.stdout, b"fornax 0.0.0\n");

        // An archive that is not the one that was summed up is not unpacked, and what was there stays.
        let archive = packages.join(format!("fornax-{}-linux.tar.gz", std::env::consts::ARCH));
        let whole = fs::read(&archive).unwrap();
        fs::write(&archive, [&whole[..], b"x"].concat()).unwrap();
        fs::write(prefix.join("bin/fornax"), "mine").unwrap();
        let (done, said) = installed(from, &prefix);
        assert!(!done && said.contains("checksum"), "{said}");
        assert_eq!(fs::read(prefix.join("bin/fornax")).unwrap(), b"mine");
        // Neither is one of which no checksum is known.
        fs::write(&archive, whole).unwrap();
        fs::write(packages.join("SHA256SUMS"), "").unwrap();
        assert!(!installed(from, &prefix).0);
    }

    #[test]
    fn a_debian_package_holds_the_binary_its_unit_and_what_it_depends_on() {
        if command("dpkg-deb", &["--version"]).output().is_err() {
            println!("SKIP a_debian_package_holds_the_binary_its_unit_and_what_it_depends_on: no dpkg-deb");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let packages = packed(folder.path());
        let package = fs::read_dir(&packages).unwrap().flatten().map(|entry| entry.path());
        let package =
            package.into_iter().find(|path| path.extension().is_some_and(|ext| ext == "deb")).unwrap();
        let shown = |args: &[&str]| output(command("dpkg-deb", args).arg(&package)).unwrap();
        let files = shown(&["--contents"]);
        for file in ["-rwxr-xr-x root/root", "./usr/bin/fornax", "./lib/systemd/system/fornax.service"] {
            assert!(files.contains(file), "{file}: {files}");
        }
        assert!(shown(&["--field"]).contains("Depends: libc6 (>= 2."), "{}", shown(&["--field"]));
        let unpacked = folder.path().join("unpacked");
        run(command("dpkg-deb", &["--extract"]).arg(&package).arg(&unpacked)).unwrap();
        let unit = fs::read_to_string(unpacked.join("lib/systemd/system/fornax.service")).unwrap();
        assert!(unit.contains("ExecStart=/usr/bin/fornax serve"), "{unit}");
    }

    #[test]
    fn the_newest_symbols_say_which_glibc_is_needed() {
        assert_eq!(glibc(b"..GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.4\0GLIBC_PRIVATE\0"), Some((2, 34)));
        assert_eq!(glibc(b"static"), None);
    }
}
