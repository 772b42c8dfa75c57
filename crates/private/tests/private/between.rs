//! Somebody between the client and a server: writes down the raw socket, and does to frames what it is told.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// What happens to an answer.
pub(crate) enum Action {
    /// These bytes go on in its place.
    Send(Vec<u8>),
    /// These bytes go on, and then the connection breaks.
    Break(Vec<u8>),
    /// Nothing comes any more.
    Silence,
}

/// Says what happens to the product with this number, counted over all connections from 0, whose frame is given.
pub(crate) type Change = Box<dyn FnMut(usize, Vec<u8>) -> Action + Send>;

/// Listens in front of a server.
pub(crate) struct Between {
    pub(crate) address: SocketAddr,
    /// Everything that the client sent, of all connections.
    pub(crate) up: Arc<Mutex<Vec<u8>>>,
    /// Everything that it got.
    pub(crate) down: Arc<Mutex<Vec<u8>>>,
}

const PRODUCT: u8 = 131;

impl Between {
    pub(crate) fn start(server: SocketAddr, change: Change) -> Between {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let between =
            Between { address: listener.local_addr().unwrap(), up: Arc::default(), down: Arc::default() };
        let (up, down) = (Arc::clone(&between.up), Arc::clone(&between.down));
        let state = Arc::new(Mutex::new((0, change)));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let server = TcpStream::connect(server).unwrap();
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                let (from, to, seen) =
                    (client.try_clone().unwrap(), server.try_clone().unwrap(), Arc::clone(&up));
                thread::spawn(move || forward(from, to, &seen));
                let (seen, state) = (Arc::clone(&down), Arc::clone(&state));
                thread::spawn(move || answers(server, client, &seen, &state));
            }
        });
        between
    }

    pub(crate) fn url(&self) -> String {
        format!("tcp://{}", self.address)
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, seen: &Mutex<Vec<u8>>) {
    let mut bytes = [0; 4096];
    while let Ok(count) = from.read(&mut bytes)
        && count > 0
    {
        seen.lock().unwrap().extend_from_slice(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
    drop(to.shutdown(Shutdown::Write));
}

fn answers(mut from: TcpStream, mut to: TcpStream, seen: &Mutex<Vec<u8>>, state: &Mutex<(usize, Change)>) {
    loop {
        let mut frame = vec![0; 5];
        if from.read_exact(&mut frame).is_err() {
            drop(to.shutdown(Shutdown::Both));
            return;
        }
        let len = u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize;
        frame.resize(5 + len, 0);
        from.read_exact(&mut frame[5..]).unwrap();
        let action = if frame[4] == PRODUCT {
            let (number, change) = &mut *state.lock().unwrap();
            *number += 1;
            change(*number - 1, frame)
        } else {
            Action::Send(frame)
        };
        match action {
            Action::Send(bytes) => {
                seen.lock().unwrap().extend_from_slice(&bytes);
                if to.write_all(&bytes).is_err() {
                    return;
                }
            }
            Action::Break(bytes) => {
                drop(to.write_all(&bytes));
                drop(to.shutdown(Shutdown::Both));
                drop(from.shutdown(Shutdown::Both));
                return;
            }
            // Held open, so that it is a delay and not an end.
            Action::Silence => {
                let mut rest = Vec::new();
                drop(from.read_to_end(&mut rest));
                drop(to);
                return;
            }
        }
    }
}
