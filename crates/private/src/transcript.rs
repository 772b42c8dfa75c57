//! What crossed connections with one party, as bytes in a file: what that party saw, and nothing else.
//!
//! A line names the party; records follow: what it is (u8), which connection (u32), how many bytes (u32), the bytes.
//! The bytes are those below TLS, so a record cuts frames wherever the system did.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::Error;
use crate::frame::Party;

const MAGIC: &str = "fornax private transcript 1, party ";

/// Which way bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To the server.
    Up,
    /// From the server.
    Down,
}

/// Writes one file, from any number of connections.
#[derive(Clone)]
pub struct Recorder {
    shared: Arc<Mutex<Writer>>,
}

struct Writer {
    file: BufWriter<File>,
    connections: u32,
}

impl Recorder {
    /// Begins a file.
    pub fn create(path: &Path, party: Party) -> Result<Recorder, Error> {
        let failed = |reason| Error::System { what: "cannot write the transcript", reason };
        let mut options = File::options();
        options.create(true).write(true).truncate(true);
        // Both parties' files together are the conversation in clear.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(path).map_err(failed)?;
        #[cfg(unix)]
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600)).map_err(failed)?;
        let mut file = BufWriter::new(file);
        writeln!(file, "{MAGIC}{party}").map_err(failed)?;
        Ok(Recorder { shared: Arc::new(Mutex::new(Writer { file, connections: 0 })) })
    }

    /// A number for another connection.
    pub(crate) fn connection(&self) -> u32 {
        let mut writer = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        writer.connections += 1;
        writer.connections
    }

    pub(crate) fn write(&self, connection: u32, way: Way, bytes: &[u8]) -> io::Result<()> {
        let mut writer = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        writer.file.write_all(&[if way == Way::Up { 1 } else { 2 }])?;
        writer.file.write_all(&connection.to_le_bytes())?;
        writer.file.write_all(&len.to_le_bytes())?;
        writer.file.write_all(bytes)?;
        writer.file.flush()
    }
}

/// One connection as it was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connection {
    /// Everything to the server.
    pub up: Vec<u8>,
    /// Everything from the server.
    pub down: Vec<u8>,
}

/// A recorded file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transcript {
    /// Whose view it is.
    pub party: Party,
    /// In the order in which they were made.
    pub connections: Vec<Connection>,
}

impl Transcript {
    /// Reads a file that a [`Recorder`] wrote. A last record that was cut off ends it.
    pub fn read(path: &Path) -> Result<Transcript, Error> {
        let wrong = |what: String| Error::Transcript { path: path.display().to_string(), what };
        let mut file = BufReader::new(File::open(path).map_err(|error| wrong(error.to_string()))?);
        let mut line = vec![0; MAGIC.len() + 2];
        file.read_exact(&mut line).map_err(|_| wrong("not a transcript: too short".to_owned()))?;
        let party = match line.strip_prefix(MAGIC.as_bytes()) {
            Some(b"0\n") => Party::Zero,
            Some(b"1\n") => Party::One,
            _ => return Err(wrong("not a transcript of this version".to_owned())),
        };
        let mut connections: BTreeMap<u32, Connection> = BTreeMap::new();
        let mut rest = Vec::new();
        file.read_to_end(&mut rest).map_err(|error| wrong(error.to_string()))?;
        let mut rest = &rest[..];
        while let Some((head, after)) = rest.split_at_checked(9) {
            let connection = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
            let len = u32::from_le_bytes([head[5], head[6], head[7], head[8]]) as usize;
            let Some((bytes, after)) = after.split_at_checked(len) else { break };
            let to = connections.entry(connection).or_default();
            match head[0] {
                1 => to.up.extend_from_slice(bytes),
                2 => to.down.extend_from_slice(bytes),
                kind => return Err(wrong(format!("a record of kind {kind}"))),
            }
            rest = after;
        }
        Ok(Transcript { party, connections: connections.into_values().collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_told_apart_and_a_cut_record_ends_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("view");
        let recorder = Recorder::create(&path, Party::One).unwrap();
        let (first, second) = (recorder.connection(), recorder.connection());
        recorder.write(first, Way::Up, b"ab").unwrap();
        recorder.write(second, Way::Up, b"x").unwrap();
        recorder.write(first, Way::Up, b"cd").unwrap();
        recorder.write(first, Way::Down, b"yes").unwrap();
        let whole = Transcript {
            party: Party::One,
            connections: vec![
                Connection { up: b"abcd".to_vec(), down: b"yes".to_vec() },
                Connection { up: b"x".to_vec(), down: Vec::new() },
            ],
        };
        assert_eq!(Transcript::read(&path).unwrap(), whole);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let mut cut = whole;
        cut.connections[0].down.clear();
        assert_eq!(Transcript::read(&path).unwrap(), cut);
    }

    #[cfg(unix)]
    #[test]
    fn only_its_owner_reads_a_recording_whatever_was_there_before() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let (new, old) = (folder.path().join("new"), folder.path().join("old"));
        std::fs::write(&old, "a file that everybody reads").unwrap();
        std::fs::set_permissions(&old, PermissionsExt::from_mode(0o644)).unwrap();
        for path in [new, old] {
            drop(Recorder::create(&path, Party::Zero).unwrap());
            assert_eq!(mode(&path), 0o600, "{}", path.display());
        }
    }

    #[test]
    fn another_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("view");
        std::fs::write(&path, "x").unwrap();
        assert!(Transcript::read(&path).unwrap_err().to_string().ends_with("not a transcript: too short"));
        std::fs::write(&path, "something else that is long enough to be one").unwrap();
        assert!(
            Transcript::read(&path).unwrap_err().to_string().ends_with("not a transcript of this version")
        );
    }
}
