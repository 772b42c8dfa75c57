//! The two servers: each multiplies what it is sent, or what it draws, by public weights. Neither has a function that
//! adds two shares, and nothing derived from a payload leaves a session.
//!
//! A thread for each connection reads, checks and answers; one thread owns the device and multiplies for all of them,
//! from one queue ([`Queue`]). A session has few products waiting at a time, so that the queue's order is a round of
//! all sessions; those that wait for the same matrix are computed as one.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fornax_compute::Ring;
use rustls::ServerConfig;

use crate::Error;
use crate::ahead::Ahead;
use crate::channel::Channel;
use crate::claim;
use crate::crowd::{Crowd, Place};
use crate::frame::{
    Draw, FrameError, Info, PROTOCOL, Party, Reply, RequestOne, RequestZero, Shapes, VERSION, Weights,
};
use crate::mask::{Counter, random};
use crate::queue::Queue;
use crate::transcript::Recorder;

/// Products of one session of party 1 that may wait: one is computed while the next one's masks are drawn.
const WAITING: usize = 2;

/// How long no connection is accepted after one could not be: descriptors that ran out do not come back at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How a server is made.
#[derive(Clone)]
pub struct ServerOptions {
    /// Which of the two.
    pub party: Party,
    /// Whether the other one is on this machine.
    pub demo_single_host: bool,
    /// Rows that any matrix may be multiplied with in one session.
    pub positions_max: u32,
    /// Sessions at once; more are turned away.
    pub sessions_max: usize,
    /// Connections of one address at once; more are closed.
    pub per_address_max: usize,
    /// How long a connection may take until it has opened a session, TLS included.
    pub arrival: Duration,
    /// A session that says nothing, or does not read its answers, for this long is ended.
    pub idle: Duration,
    /// Its identity; without one it listens on the loopback only.
    pub tls: Option<Arc<ServerConfig>>,
    /// Writes all that it sees to this file.
    pub record: Option<PathBuf>,
}

impl ServerOptions {
    /// A party with everything else by default.
    pub fn new(party: Party) -> ServerOptions {
        ServerOptions {
            party,
            demo_single_host: false,
            // A day of conversation; the client opens the next session by itself.
            positions_max: 1 << 20,
            sessions_max: 64,
            // A client has one at a time, and another one while it notices that the first one broke. Many clients may
            // share an address.
            per_address_max: 16,
            arrival: Duration::from_secs(10),
            idle: Duration::from_secs(600),
            tls: None,
            record: None,
        }
    }
}

/// Weights on a device, by number.
pub struct Loaded<R: Ring> {
    /// The device.
    pub ring: R,
    /// The matrices in the order in which the model loads them.
    pub matrices: Vec<R::Matrix>,
    /// Their shapes.
    pub shapes: Shapes,
    /// Their hash.
    pub weights: Weights,
}

/// A running server. Dropping it ends its sessions.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    info: Info,
    options: ServerOptions,
    queue: Queue,
    recorder: Option<Recorder>,
    stopping: AtomicBool,
    crowd: Arc<Crowd>,
    opened: AtomicU64,
}

impl Server {
    /// Loads the weights on a thread of their own, which alone uses the device, and serves. Returns when the first
    /// client can be answered.
    pub fn start<R: Ring, E: From<Error> + Send + 'static>(
        listener: TcpListener,
        options: ServerOptions,
        load: impl FnOnce() -> Result<Loaded<R>, E> + Send + 'static,
    ) -> Result<Server, E> {
        Server::launch(listener, options, load, |queue, loaded| queue.work(&loaded))
    }

    /// The same with a device that may be used from any thread: a product that comes alone is computed where it
    /// arrived.
    pub fn start_lending<R: Ring<Matrix: Send> + Send + 'static, E: From<Error> + Send + 'static>(
        listener: TcpListener,
        options: ServerOptions,
        load: impl FnOnce() -> Result<Loaded<R>, E> + Send + 'static,
    ) -> Result<Server, E> {
        Server::launch(listener, options, load, Queue::work_and_lend)
    }

    fn launch<R: Ring, E: From<Error> + Send + 'static>(
        listener: TcpListener,
        options: ServerOptions,
        load: impl FnOnce() -> Result<Loaded<R>, E> + Send + 'static,
        work: impl FnOnce(&Queue, Loaded<R>) + Send + 'static,
    ) -> Result<Server, E> {
        let failed = |what| move |reason| E::from(Error::System { what, reason });
        let address = listener.local_addr().map_err(failed("cannot listen"))?;
        if options.tls.is_none() && !address.ip().is_loopback() {
            let words = format!("{address} is beyond this machine: give a certificate and its key");
            return Err(E::from(Error::Tls(words)));
        }
        let recorder =
            options.record.as_ref().map(|path| Recorder::create(path, options.party)).transpose()?;
        let mut instance = [0; 16];
        random(&mut instance)?;
        let queue = Queue::default();
        let (tell, told) = mpsc::sync_channel(1);
        let worker = queue.clone();
        let computing = thread::Builder::new().name("products".to_owned()).spawn(move || match load() {
            Err(error) => drop(tell.send(Err(error))),
            Ok(loaded) => {
                drop(tell.send(Ok((loaded.shapes.clone(), loaded.weights.clone()))));
                work(&worker, loaded);
            }
        });
        let computing = computing.map_err(failed("cannot start a thread"))?;
        let (shapes, weights) = match told.recv() {
            Ok(loaded) => loaded?,
            // The loader panicked: let the caller see that panic.
            Err(_) => match computing.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => unreachable!("the thread tells before it ends"),
            },
        };
        let info = Info {
            protocol: PROTOCOL.to_owned(),
            version: VERSION,
            party: options.party.number(),
            ring_bits: 32,
            weights,
            dims: shapes,
            positions_max: options.positions_max,
            leaks: claim::LEAKS.map(str::to_owned).to_vec(),
            assumes: claim::ASSUMES.map(str::to_owned).to_vec(),
            demo_single_host: options.demo_single_host,
            instance: instance.iter().map(|byte| format!("{byte:02x}")).collect(),
        };
        let crowd = Arc::new(Crowd::new(options.sessions_max, options.per_address_max));
        let shared = Arc::new(Shared {
            info,
            options,
            queue,
            recorder,
            stopping: AtomicBool::new(false),
            crowd,
            opened: AtomicU64::new(0),
        });
        let accepting = Arc::clone(&shared);
        let accepting = thread::Builder::new()
            .name("accept".to_owned())
            .spawn(move || accept(&listener, &accepting))
            .map_err(failed("cannot start a thread"))?;
        Ok(Server { shared, address, threads: vec![accepting, computing] })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it says of itself.
    pub fn info(&self) -> &Info {
        &self.shared.info
    }

    /// Sessions that are open at this moment.
    pub fn sessions(&self) -> usize {
        self.shared.crowd.sessions()
    }

    /// Connections at this moment, those that have not opened a session included.
    pub fn connections(&self) -> usize {
        self.shared.crowd.connections()
    }

    /// Products computed together with others, and products in all.
    pub fn batched(&self) -> (u64, u64) {
        self.shared.queue.counts()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.queue.close();
        // Wakes the thread that accepts, which then looks at the flag.
        drop(TcpStream::connect_timeout(&self.address, Duration::from_secs(1)));
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let incoming = std::iter::repeat_with(|| listener.accept());
    let stopping = || shared.stopping.load(Ordering::Acquire);
    welcome(incoming, stopping, thread::sleep, |(socket, peer)| {
        // One too many of an address, or of those that have said nothing yet, is not worth a thread.
        let Some(place) = shared.crowd.enter(peer.ip()) else { return };
        let guest = Guest { shared: Arc::clone(shared), place };
        // A thread that cannot be started drops its guest and its socket, which tells the client.
        drop(thread::Builder::new().name("session".to_owned()).spawn(move || guest.serve(socket)));
    });
}

/// Hands over who comes, and pauses where nobody can be let in, until it is to stop.
fn welcome<T>(
    incoming: impl Iterator<Item = io::Result<T>>,
    stopping: impl Fn() -> bool,
    pause: impl Fn(Duration),
    mut take: impl FnMut(T),
) {
    for came in incoming {
        if stopping() {
            return;
        }
        match came {
            Ok(came) => take(came),
            Err(_) => pause(ACCEPT_PAUSE),
        }
    }
}

/// A connection with its place among the others.
struct Guest {
    shared: Arc<Shared>,
    place: Place,
}

impl Guest {
    /// Serves one connection to its end. Why it ended is told to the client and nobody else.
    fn serve(mut self, socket: TcpStream) {
        let shared = Arc::clone(&self.shared);
        let options = &shared.options;
        let (tls, recorder) = (options.tls.as_ref(), shared.recorder.as_ref());
        let deadline = Instant::now() + options.arrival;
        let Ok(mut channel) = Channel::accept(socket, tls, options.idle, deadline, recorder) else { return };
        let served = match options.party {
            Party::Zero => self.serve_zero(&mut channel),
            Party::One => self.serve_one(&mut channel),
        };
        if let Err(reason) = served {
            drop(channel.send(|out| Reply::Refused(reason).write(out)));
        }
    }

    /// Party 0: multiplies the words that it is sent.
    fn serve_zero(&mut self, channel: &mut Channel) -> Result<(), String> {
        let shared = Arc::clone(&self.shared);
        let shapes = &shared.info.dims;
        let mut session = None;
        loop {
            match RequestZero::read(channel.reader(), shapes) {
                Ok(RequestZero::Info) => self.tell(channel),
                Ok(RequestZero::Open { version, positions_max }) => {
                    session = Some(self.open(channel, version, positions_max)?);
                    Ok(())
                }
                Ok(RequestZero::Linear(share)) => {
                    let session: &mut Session = session.as_mut().ok_or(NO_SESSION)?;
                    session.admit(&share.draw, shapes)?;
                    let Draw { counter, matrix, rows } = share.draw;
                    let pending = self.shared.queue.submit(matrix as usize, rows as usize, share.words);
                    answer(channel, counter, pending.wait()?)
                }
                Ok(RequestZero::Close) => return Ok(()),
                Err(error) => return ended(error),
            }
            .or_else(gone)?;
        }
    }

    /// Party 1: multiplies the masks that it draws, as far ahead as it is told, and a little further.
    fn serve_one(&mut self, channel: &mut Channel) -> Result<(), String> {
        let shared = Arc::clone(&self.shared);
        let shapes = &shared.info.dims;
        let mut session = None;
        loop {
            match RequestOne::read(channel.reader(), shapes) {
                Ok(RequestOne::Info) => self.tell(channel),
                Ok(RequestOne::Open { version, positions_max, seed }) => {
                    session = Some((self.open(channel, version, positions_max)?, Ahead::new(&seed)));
                    Ok(())
                }
                Ok(RequestOne::Linear(draws)) => {
                    let (session, ahead) = session.as_mut().ok_or(NO_SESSION)?;
                    bounded(&draws, shapes)?;
                    self.answer_step(channel, session, ahead, &draws)?
                }
                Ok(RequestOne::Close) => return Ok(()),
                Err(error) => return ended(error),
            }
            .or_else(gone)?;
        }
    }

    fn answer_step(
        &self,
        channel: &mut Channel,
        session: &mut Session,
        ahead: &mut Ahead,
        draws: &[Draw],
    ) -> Result<io::Result<()>, String> {
        let (shapes, queue) = (&self.shared.info.dims, &self.shared.queue);
        let mut waiting = VecDeque::with_capacity(WAITING);
        let mut draws_left = draws.iter();
        loop {
            let next = draws_left.next();
            if let Some(draw) = next {
                session.admit(draw, shapes)?;
                waiting.push_back((draw.counter, ahead.product(draw, shapes, queue)?));
            }
            if next.is_some() && waiting.len() < WAITING {
                continue;
            }
            let Some((counter, product)) = waiting.pop_front() else { break };
            let sent = answer(channel, counter, product.wait()?);
            if sent.is_err() {
                return Ok(sent);
            }
        }
        ahead.guess(draws, shapes, queue);
        Ok(Ok(()))
    }

    fn tell(&self, channel: &mut Channel) -> io::Result<()> {
        channel.send(|out| Reply::Info(Box::new(self.shared.info.clone())).write(out))
    }

    fn open(&mut self, channel: &mut Channel, version: u32, positions_max: u32) -> Result<Session, String> {
        if version != VERSION {
            return Err(format!("this is {PROTOCOL} {VERSION}, not {version}"));
        }
        let most = self.shared.options.positions_max;
        if positions_max > most {
            return Err(format!("a session may have {most} positions, not {positions_max}"));
        }
        if !self.place.open_session() {
            let most = self.shared.options.sessions_max;
            return Err(format!("{most} sessions are open already, and no more are allowed"));
        }
        // From here on it may think as long as a session may.
        channel.lift_deadline().or_else(gone)?;
        let session = self.shared.opened.fetch_add(1, Ordering::Relaxed) + 1;
        channel.send(|out| Reply::Opened { session }.write(out)).or_else(gone)?;
        Ok(Session {
            counter: Counter::default(),
            rows: vec![0; self.shared.info.dims.0.len()],
            positions_max: u64::from(positions_max),
        })
    }
}

const NO_SESSION: &str = "open a session first";

fn answer(channel: &mut Channel, counter: u64, words: Vec<u32>) -> io::Result<()> {
    channel.send(|out| Reply::Product { counter, words }.write(out))
}

/// Refuses what is more work than a step can be: few bytes ask for much of it.
fn bounded(draws: &[Draw], shapes: &Shapes) -> Result<(), String> {
    let asked: u128 = draws.iter().map(|draw| draw.multiplications(shapes)).sum();
    let most = shapes.multiplications_max();
    if asked > most {
        return Err(format!("one frame asks for {asked} multiplications, and at most {most} are done"));
    }
    Ok(())
}

/// A client that is gone needs no reason.
fn gone(_: io::Error) -> Result<(), String> {
    Ok(())
}

fn ended(error: FrameError) -> Result<(), String> {
    match error {
        FrameError::Io(_) => Ok(()),
        error => Err(error.to_string()),
    }
}

/// What a server keeps of a session: how far its mask stream is, and how much of it there may be.
struct Session {
    counter: Counter,
    /// Rows so far, by matrix.
    rows: Vec<u64>,
    positions_max: u64,
}

impl Session {
    /// Lets a product in that comes next in the stream and inside the session's bounds.
    fn admit(&mut self, draw: &Draw, shapes: &Shapes) -> Result<(), String> {
        if draw.counter != self.counter.get() {
            return Err(format!("a product with counter {}, {} is next", draw.counter, self.counter.get()));
        }
        let rows = &mut self.rows[draw.matrix as usize];
        *rows += u64::from(draw.rows);
        if *rows > self.positions_max {
            let error = Error::Positions { wanted: *rows, limit: self.positions_max };
            return Err(error.to_string());
        }
        let advanced = self.counter.advance(draw.pad_words(shapes) as u64);
        advanced.map(drop).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn connections_that_cannot_be_accepted_are_followed_by_a_pause_and_by_others() {
        let failed = || Err(io::Error::from(io::ErrorKind::OutOfMemory));
        let (paused, mut taken) = (Cell::new(Duration::ZERO), Vec::new());
        let incoming = [Ok(1), failed(), failed(), Ok(2)];
        welcome(
            incoming.into_iter(),
            || false,
            |pause| paused.set(paused.get() + pause),
            |it| taken.push(it),
        );
        assert_eq!((paused.get(), taken), (2 * ACCEPT_PAUSE, vec![1, 2]));
    }

    #[test]
    fn a_frame_may_ask_for_a_step_and_not_for_hours() {
        let shapes = Shapes(vec![(3000, 1000), (1000, 3000)]);
        let draw = |matrix, rows| Draw { counter: 0, matrix, rows };
        assert_eq!(bounded(&[draw(0, 1024), draw(1, 1024)], &shapes), Ok(()));
        let refused = bounded(&[draw(0, 1024), draw(1, 1024), draw(0, 1)], &shapes).unwrap_err();
        assert_eq!(refused, "one frame asks for 6147000000 multiplications, and at most 6144000000 are done");
    }
}
