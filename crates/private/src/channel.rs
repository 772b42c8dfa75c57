//! A connection with one party: plain on the loopback, TLS elsewhere, a frame in one write.

use std::fs;
use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use crate::Error;
use crate::patience::look;
use crate::transcript::{Recorder, Way};

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(10);
/// Small frames are read with one call; larger bodies go past this room.
const READ_BYTES: usize = 16 << 10;

/// Where a party is: `tls://host:port`, or `tcp://host:port` on the loopback.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// As it was written.
    pub url: String,
    tls: bool,
    host: String,
    port: u16,
}

impl Address {
    /// Reads a URL.
    pub fn parse(url: &str) -> Result<Address, Error> {
        let wrong = |reason: &str| Error::Address { url: url.to_owned(), reason: reason.to_owned() };
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("write tls://HOST:PORT"))?;
        let tls = match scheme {
            "tls" => true,
            "tcp" => false,
            _ => return Err(wrong("it begins with tls:// (or tcp:// on this machine)")),
        };
        let (host, port) =
            rest.trim_end_matches('/').rsplit_once(':').ok_or_else(|| wrong("it has no port"))?;
        let port = port.parse().map_err(|_| wrong("its port is no number"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        if host.is_empty() {
            return Err(wrong("it has no host"));
        }
        Ok(Address { url: url.to_owned(), tls, host, port })
    }

    /// The host's name, as written.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Every address that the name stands for.
    pub fn resolve(&self) -> Result<Vec<SocketAddr>, Error> {
        let wrong = |reason: String| Error::Address { url: self.url.clone(), reason };
        let found =
            (self.host.as_str(), self.port).to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
        let found: Vec<SocketAddr> = found.collect();
        if !self.tls && found.iter().any(|address| !address.ip().is_loopback()) {
            return Err(wrong("without TLS only this machine's own addresses are allowed".to_owned()));
        }
        if found.is_empty() { Err(wrong("its host has no address".to_owned())) } else { Ok(found) }
    }
}

/// Whom a client believes: the usual authorities, or one of its own. And who it is, where servers want to know: its
/// certificate chain and its key.
pub fn client_tls(ca: Option<&Path>, identity: Option<(&Path, &Path)>) -> Result<Arc<ClientConfig>, Error> {
    let roots = match ca {
        None => RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() },
        Some(path) => authorities(path)?,
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Tls(error.to_string()))?
        .with_root_certificates(roots);
    Ok(Arc::new(match identity {
        None => config.with_no_client_auth(),
        Some((certificate, key)) => config
            .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
            .map_err(|error| Error::Tls(format!("{}: {error}", key.display())))?,
    }))
}

/// A server's identity, and the authority (PEM) whose certificates clients must show, if they must.
pub fn server_tls(
    certificate: &Path,
    key: &Path,
    clients: Option<&Path>,
) -> Result<Arc<ServerConfig>, Error> {
    let wrong = |error: &dyn std::fmt::Display| Error::Tls(format!("{}: {error}", key.display()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Tls(error.to_string()))?;
    let config = match clients {
        None => config.with_no_client_auth(),
        Some(path) => {
            let roots = Arc::new(authorities(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
            let wrong = |error: &dyn std::fmt::Display| Error::Tls(format!("{}: {error}", path.display()));
            config.with_client_cert_verifier(verifier.map_err(|error| wrong(&error))?)
        }
    };
    let config = config.with_single_cert(certificates(certificate)?, private_key(key)?);
    Ok(Arc::new(config.map_err(|error| wrong(&error))?))
}

fn authorities(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| Error::Tls(format!("{}: {error}", path.display())))?;
    }
    Ok(roots)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    let wrong = |error: &dyn std::fmt::Display| Error::Tls(format!("{}: {error}", path.display()));
    let pem = fs::read(path).map_err(|error| wrong(&error))?;
    PrivateKeyDer::from_pem_slice(&pem).map_err(|error| wrong(&error))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let wrong = |error: &dyn std::fmt::Display| Error::Tls(format!("{}: {error}", path.display()));
    let pem = fs::read(path).map_err(|error| wrong(&error))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let found = found.map_err(|error| wrong(&error))?;
    if found.is_empty() { Err(wrong(&"no certificate in it")) } else { Ok(found) }
}

/// A socket that is looked at for a while before its thread sleeps.
struct Watched {
    socket: TcpStream,
    /// How long one read or write may take.
    timeout: Duration,
    /// Until when all of them together have to be done; `None` where they need not.
    deadline: Option<Instant>,
}

impl Watched {
    fn new(socket: TcpStream, timeout: Duration, deadline: Option<Instant>) -> io::Result<Watched> {
        socket.set_nodelay(true)?;
        let watched = Watched { socket, timeout, deadline };
        watched.set_timeouts(timeout)?;
        Ok(watched)
    }

    /// Lets the other side take its time from here on.
    fn lift_deadline(&mut self) -> io::Result<()> {
        self.deadline = None;
        self.set_timeouts(self.timeout)
    }

    /// A peer that sends a byte now and then is late all the same: what is left of the deadline shrinks with each call.
    fn keep_deadline(&self) -> io::Result<()> {
        let Some(deadline) = self.deadline else { return Ok(()) };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            self.set_timeouts(left.min(self.timeout))
        }
    }

    fn set_timeouts(&self, timeout: Duration) -> io::Result<()> {
        self.socket.set_read_timeout(Some(timeout))?;
        self.socket.set_write_timeout(Some(timeout))
    }
}

impl Read for Watched {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.keep_deadline()?;
        let arrived = look(|| match rustix::net::recv(&self.socket, &mut *bytes, RecvFlags::DONTWAIT) {
            Ok((_, count)) => Some(Ok(count)),
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(error) => Some(Err(error.into())),
        });
        arrived.unwrap_or_else(|| self.socket.read(bytes))
    }
}

impl Write for Watched {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.keep_deadline()?;
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

/// Bytes both ways.
trait Duplex: Read + Write + Send {
    /// What they travel through.
    fn socket(&mut self) -> &mut Watched;
}

impl Duplex for Watched {
    fn socket(&mut self) -> &mut Watched {
        self
    }
}

impl Duplex for StreamOwned<ClientConnection, Watched> {
    fn socket(&mut self) -> &mut Watched {
        &mut self.sock
    }
}

impl Duplex for StreamOwned<ServerConnection, Watched> {
    fn socket(&mut self) -> &mut Watched {
        &mut self.sock
    }
}

/// A connection. Reading goes through its buffer; a frame is written at once.
pub(crate) struct Channel {
    reader: BufReader<Tap>,
    out: Vec<u8>,
}

/// Counts bytes, and writes them down where that is wanted.
struct Tap {
    stream: Box<dyn Duplex>,
    record: Option<(Recorder, u32)>,
    /// Which way bytes go that are written here.
    written: Way,
    sent: u64,
    received: u64,
}

impl Channel {
    /// Connects to a party.
    pub(crate) fn connect(
        address: &Address,
        tls: &Arc<ClientConfig>,
        timeout: Duration,
        record: Option<&Recorder>,
    ) -> Result<Channel, Error> {
        let lost = |error: io::Error| Error::Address { url: address.url.clone(), reason: error.to_string() };
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for resolved in address.resolve()? {
            match TcpStream::connect_timeout(&resolved, CONNECT) {
                Err(error) => last = error,
                Ok(socket) => {
                    let socket = Watched::new(socket, timeout, None).map_err(lost)?;
                    if !address.tls {
                        return Ok(Channel::new(Box::new(socket), Way::Up, record));
                    }
                    let name = ServerName::try_from(address.host.clone())
                        .map_err(|error| lost(io::Error::other(error.to_string())))?;
                    let connection = ClientConnection::new(Arc::clone(tls), name)
                        .map_err(|error| lost(io::Error::other(error.to_string())))?;
                    let mut stream = StreamOwned::new(connection, socket);
                    // Now, so that a wrong certificate is told as such.
                    while stream.conn.is_handshaking() {
                        stream.conn.complete_io(&mut stream.sock).map_err(lost)?;
                    }
                    return Ok(Channel::new(Box::new(stream), Way::Up, record));
                }
            }
        }
        Err(lost(last))
    }

    /// Takes an accepted connection, which has until the deadline to come to [`Channel::lift_deadline`].
    pub(crate) fn accept(
        socket: TcpStream,
        tls: Option<&Arc<ServerConfig>>,
        timeout: Duration,
        deadline: Instant,
        record: Option<&Recorder>,
    ) -> Result<Channel, Error> {
        let failed = |reason| Error::System { what: "cannot accept", reason };
        let socket = Watched::new(socket, timeout, Some(deadline)).map_err(failed)?;
        let Some(tls) = tls else { return Ok(Channel::new(Box::new(socket), Way::Down, record)) };
        let connection =
            ServerConnection::new(Arc::clone(tls)).map_err(|error| Error::Tls(error.to_string()))?;
        Ok(Channel::new(Box::new(StreamOwned::new(connection, socket)), Way::Down, record))
    }

    fn new(stream: Box<dyn Duplex>, written: Way, record: Option<&Recorder>) -> Channel {
        let record = record.map(|recorder| (recorder.clone(), recorder.connection()));
        let tap = Tap { stream, record, written, sent: 0, received: 0 };
        Channel { reader: BufReader::with_capacity(READ_BYTES, tap), out: Vec::new() }
    }

    /// Sends what `write` appends to an empty buffer, at once.
    pub(crate) fn send(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
        self.out.clear();
        write(&mut self.out);
        let tap = self.reader.get_mut();
        tap.write_all(&self.out)?;
        tap.flush()
    }

    /// What frames are read from.
    pub(crate) fn reader(&mut self) -> &mut impl Read {
        &mut self.reader
    }

    /// From here on only single reads and writes have a limit.
    pub(crate) fn lift_deadline(&mut self) -> io::Result<()> {
        self.reader.get_mut().stream.socket().lift_deadline()
    }

    /// Bytes sent and received since the last call.
    pub(crate) fn take_counts(&mut self) -> (u64, u64) {
        let tap = self.reader.get_mut();
        (std::mem::take(&mut tap.sent), std::mem::take(&mut tap.received))
    }
}

impl Read for Tap {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(bytes)?;
        self.received += count as u64;
        if let Some((recorder, connection)) = &self.record {
            let way = if self.written == Way::Up { Way::Down } else { Way::Up };
            recorder.write(*connection, way, &bytes[..count])?;
        }
        Ok(count)
    }
}

impl Write for Tap {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.stream.write(bytes)?;
        self.sent += count as u64;
        if let Some((recorder, connection)) = &self.record {
            recorder.write(*connection, self.written, &bytes[..count])?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_cannot_be_meant_are_refused() {
        let refused = |url: &str| Address::parse(url).and_then(|it| it.resolve()).unwrap_err().to_string();
        let check = |url: &str, reason: &str| {
            assert_eq!(refused(url), format!("{url:?} is not an address of a party: {reason}"));
        };
        check("localhost:1", "write tls://HOST:PORT");
        check("http://localhost:1", "it begins with tls:// (or tcp:// on this machine)");
        check("tls://localhost", "it has no port");
        check("tls://localhost:x", "its port is no number");
        check("tls://:1", "it has no host");
        check("tcp://192.0.2.1:1", "without TLS only this machine's own addresses are allowed");
        assert_eq!(Address::parse("tcp://[::1]:7/").unwrap().resolve().unwrap()[0].port(), 7);
    }
}
