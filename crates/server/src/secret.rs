//! Files with secrets in them, and who else can read them.

use std::{io, path::Path};

/// Refuses a file of secrets that every user of the machine may write; a warning where every user may read it. That a group
/// may is the operator's to decide: containers are given their secrets so.
pub fn exposure(path: &Path) -> io::Result<Option<String>> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;

        let mode = std::fs::metadata(path)?.permissions().mode() & 0o777;
        if mode & 0o002 != 0 {
            let message = format!("every user of this machine may write it (mode {mode:04o}); use chmod 600");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        if mode & 0o004 != 0 {
            let file = path.display();
            let warning = format!(
                "every user of this machine may read {file} (mode {mode:04o}), a secret; use chmod 600"
            );
            return Ok(Some(warning));
        }
    }
    #[cfg(not(unix))]
    let _ = path;
    Ok(None)
}

/// The same, with the warning in the log.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    if let Some(warning) = exposure(path)? {
        tracing::warn!("{warning}");
    }
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_secret_that_everybody_may_read_is_warned_of_and_one_that_everybody_may_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        fs::write(&file, "a secret").unwrap();
        let found = |mode: u32| {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            exposure(&file).map_err(|error| error.to_string())
        };
        for kept in [0o400, 0o600, 0o440, 0o660] {
            assert_eq!(found(kept), Ok(None), "{kept:o}");
        }
        for read in [0o444, 0o644] {
            let warning = found(read).unwrap().unwrap();
            assert!(
                warning.contains(&format!("(mode {read:04o})")) && warning.contains("chmod 600"),
                "{warning}"
            );
        }
        for written in [0o602, 0o666] {
            assert!(found(written).unwrap_err().starts_with("every user of this machine may write it"));
        }
        assert_eq!(exposure(&folder.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
