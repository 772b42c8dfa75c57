//! Where adapters may be loaded from over HTTP: folders that the operator names, and nothing outside of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fornax::{Code, Fornax};
use fornax_format::AdapterFiles;
use fornax_model::Adapter;
use fornax_server::{Failed, LoadAdapter};

use super::{Serve, failed};
use crate::cli::failure::Failure;

/// The folders, as the system spells them.
pub(super) struct AdapterRoots(Vec<PathBuf>);

impl AdapterRoots {
    /// Those of the command line; `None` where adapters are not loaded over HTTP.
    pub(super) fn of(args: &Serve) -> Result<Option<Arc<AdapterRoots>>, Failure> {
        let mut roots = Vec::with_capacity(args.adapter_root.len());
        for folder in &args.adapter_root {
            let root = folder.canonicalize().ok().filter(|root| root.is_dir());
            roots.push(root.ok_or_else(|| {
                Failure::usage(format!("--adapter-root {}: there is no such folder", folder.display()))
            })?);
        }
        Ok((!roots.is_empty()).then(|| Arc::new(AdapterRoots(roots))))
    }

    /// What loads adapters of these folders into a model.
    pub(super) fn loader(self: &Arc<Self>, model: &Fornax) -> LoadAdapter {
        // The way in, and not the model: that goes when its server lets go of it.
        let (roots, engine) = (Arc::clone(self), model.handle().clone());
        Box::new(move |name, path| {
            let folder = roots.find(path)?;
            let load = || -> Result<u32, fornax::Error> {
                let adapter = Adapter::new(name, AdapterFiles::open(&folder)?)?;
                Ok(engine.load_adapter(adapter)?)
            };
            load().map_err(|error| failed(&error))
        })
    }

    /// The folder that a client means. One outside is refused in the same words whether it is there or not.
    fn find(&self, path: &str) -> Result<PathBuf, Failed> {
        let folder = self.0[0].join(path);
        let own = |folder: &PathBuf| folder.is_dir() && self.holds(folder) && self.holds_files(folder);
        let found = folder.canonicalize().ok().filter(own);
        found.ok_or_else(|| Failed {
            code: Code::ModelNotFound,
            message: format!("there is no adapter {path:?} in the folders that the operator allows"),
        })
    }

    /// Whether something lies in one of them, with symbolic links followed.
    fn holds(&self, path: &Path) -> bool {
        self.0.iter().any(|root| path.starts_with(root) && path != root)
    }

    /// Whether its files are files and lie there, too. What is missing is said by whoever opens them.
    fn holds_files(&self, folder: &Path) -> bool {
        AdapterFiles::NAMES.iter().all(|name| {
            let path = folder.join(name);
            path.symlink_metadata().is_err()
                || path.canonicalize().is_ok_and(|path| path.is_file() && self.holds(&path))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn nothing_outside_of_the_folders_is_found_whatever_a_path_looks_like() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        for path in ["one/good", "two/other", "secret"] {
            fs::create_dir_all(at(path)).unwrap();
        }
        std::os::unix::fs::symlink(at("secret"), at("one/link")).unwrap();
        // A file that is elsewhere, in a folder that is not.
        fs::create_dir_all(at("one/lends")).unwrap();
        fs::write(at("secret/weights"), "").unwrap();
        std::os::unix::fs::symlink(at("secret/weights"), at("one/lends").join(AdapterFiles::NAMES[1]))
            .unwrap();
        let roots = ["one", "two"].map(|root| at(root).canonicalize().unwrap());
        let roots = AdapterRoots(roots.to_vec());
        assert_eq!(roots.find("good").unwrap(), roots.0[0].join("good"));
        assert_eq!(roots.find(at("two/other").to_str().unwrap()).unwrap(), roots.0[1].join("other"));
        let secret = at("secret");
        for path in [
            "../secret",
            "link",
            "lends",
            secret.to_str().unwrap(),
            ".",
            "",
            "nothing",
            "../nothing",
            "good/../..",
        ] {
            let refused = roots.find(path).unwrap_err();
            assert_eq!(refused.code, Code::ModelNotFound);
            assert!(
                refused.message.ends_with("in the folders that the operator allows"),
                "{}",
                refused.message
            );
        }
    }
}
