//! The server's TLS identity, read again on demand.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

use crate::{options::TlsFiles, secret};

/// Why there is no identity.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or holds no PEM of that kind.
    #[error("cannot read {what} in {}: {reason}", path.display())]
    Read {
        /// A certificate or a key.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// They do not belong together.
    #[error("the certificate in {} cannot be used with the key in {}: {reason}", cert.display(), key.display())]
    Identity {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why.
        reason: rustls::Error,
    },
}

/// What connections are accepted with.
pub(crate) struct Tls {
    files: TlsFiles,
    /// Replaced as a whole; connections keep what they began with.
    config: Mutex<Arc<ServerConfig>>,
}

impl Tls {
    pub(crate) fn open(files: TlsFiles) -> Result<Tls, TlsError> {
        let config = Mutex::new(read(&files)?);
        Ok(Tls { files, config })
    }

    /// Reads the files again. What is wrong with them leaves the old identity.
    pub(crate) fn reload(&self) -> Result<(), TlsError> {
        let config = read(&self.files)?;
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        Arc::clone(&self.config.lock().unwrap_or_else(PoisonError::into_inner)).into()
    }
}

fn read(files: &TlsFiles) -> Result<Arc<ServerConfig>, TlsError> {
    let TlsFiles { cert, key } = files;
    let unread = |what, path: &PathBuf, reason: String| TlsError::Read { what, path: path.clone(), reason };
    let chain = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let chain = chain.map_err(|error| unread("a certificate", cert, error.to_string()))?;
    if chain.is_empty() {
        return Err(unread("a certificate", cert, "there is none".to_owned()));
    }
    secret::check(key).map_err(|error| unread("a private key", key, error.to_string()))?;
    let private = PrivateKeyDer::from_pem_file(key);
    let private = private.map_err(|error| unread("a private key", key, error.to_string()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private))
        .map_err(|reason| TlsError::Identity { cert: cert.clone(), key: key.clone(), reason })?;
    Ok(Arc::new(config))
}
