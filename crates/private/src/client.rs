//! The client's end of a session: blinds, asks both parties, adds, checks, and names who lied.
//!
//! Party 1 needs nothing but rows and matrices to answer, and every step of a model asks for the same matrices in the
//! same order. So that order is learned from the first step, and later steps are announced to party 1 whole when they
//! begin: it runs ahead, and only party 0 is waited for. How far ahead is bounded by the step and the sockets' buffers.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fornax_compute::Rows;
use rustls::ClientConfig;
use zeroize::Zeroizing;

use crate::Error;
use crate::backend::Products;
use crate::channel::{Address, Channel, client_tls};
use crate::frame::{
    Awaited, DRAWS_MAX, Draw, FrameError, Info, PROTOCOL, Party, Reply, RequestOne, RequestZero, Shapes,
    Share, VERSION, Weights,
};
use crate::mask::{Masks, Pads, STREAM_WORDS, Seed};
use crate::quantize::{Fingerprint, Matrix};
use crate::stats::Stats;
use crate::transcript::Recorder;
use crate::verify::{Check, Expected};

/// Where the parties are and how they are spoken to.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// URL of the server that gets blinded words.
    pub party0: String,
    /// URL of the server that gets the seed.
    pub party1: String,
    /// Both on one machine all the same.
    pub demo_single_host: bool,
    /// A certificate authority (PEM) in place of the usual ones.
    pub ca: Option<PathBuf>,
    /// What servers are shown that want to know who asks: a certificate chain and its key (PEM).
    pub identity: Option<(PathBuf, PathBuf)>,
    /// How long an answer may take.
    pub timeout: Duration,
    /// Writes what each party sees to this path with `.party0` and `.party1` after it.
    pub record: Option<PathBuf>,
    /// Where it is counted what all this costs.
    pub stats: Arc<Stats>,
}

impl ClientOptions {
    /// Two parties, with everything else by default.
    pub fn new(party0: impl Into<String>, party1: impl Into<String>) -> ClientOptions {
        ClientOptions {
            party0: party0.into(),
            party1: party1.into(),
            demo_single_host: false,
            ca: None,
            identity: None,
            // A step of prefill is seconds on a slow server.
            timeout: Duration::from_secs(60),
            record: None,
            stats: Arc::default(),
        }
    }
}

/// Makes the seed and the masks of each new session. The client's own come from the operating system; a test that has
/// others shows what they would betray.
pub type Opening = Box<dyn FnMut() -> Result<(Seed, Box<dyn Pads>), Error>>;

/// Reads one matrix from the client's own model file again.
pub type Recompute = Box<dyn Fn(usize) -> Result<Matrix, Error>>;

/// Two servers, found and compared.
pub struct Parties {
    addresses: [Address; 2],
    options: ClientOptions,
    tls: Arc<ClientConfig>,
    recorders: [Option<Recorder>; 2],
    infos: [Info; 2],
    /// The connections over which the infos came, until the first session takes them.
    channels: Option<[Channel; 2]>,
}

impl Parties {
    /// Connects to both and refuses what could not be private or exact.
    pub fn connect(options: ClientOptions) -> Result<Parties, Error> {
        let addresses = [Address::parse(&options.party0)?, Address::parse(&options.party1)?];
        apart(&addresses, options.demo_single_host)?;
        let tls = client_tls(
            options.ca.as_deref(),
            options.identity.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path())),
        )?;
        let recorder = |party: Party| {
            let path = options.record.as_ref().map(|path| {
                let mut path = path.clone().into_os_string();
                path.push(format!(".party{party}"));
                PathBuf::from(path)
            });
            path.map(|path| Recorder::create(&path, party)).transpose()
        };
        let recorders = [recorder(Party::Zero)?, recorder(Party::One)?];
        let (channels, infos) = dial(&addresses, &tls, &options, &recorders)?;
        Ok(Parties { addresses, options, tls, recorders, infos, channels: Some(channels) })
    }

    /// What both said of themselves, party 0 first.
    pub fn infos(&self) -> &[Info; 2] {
        &self.infos
    }

    /// New connections.
    fn dial(&mut self) -> Result<[Channel; 2], Error> {
        let (channels, infos) = dial(&self.addresses, &self.tls, &self.options, &self.recorders)?;
        self.infos = infos;
        Ok(channels)
    }
}

/// Refuses parties that are one.
fn apart(addresses: &[Address; 2], demo: bool) -> Result<(), Error> {
    let [zero, one] = [addresses[0].resolve()?, addresses[1].resolve()?];
    if let Some(same) = zero.iter().find(|address| one.contains(address)) {
        return Err(Error::SameParty { address: same.to_string() });
    }
    let local = |found: &[std::net::SocketAddr]| found.iter().all(|address| address.ip().is_loopback());
    let shared = zero.iter().any(|address| one.iter().any(|other| other.ip() == address.ip()));
    if !demo && (shared || (local(&zero) && local(&one))) {
        return Err(Error::SingleHost { host: addresses[0].host().to_owned() });
    }
    Ok(())
}

fn dial(
    addresses: &[Address; 2],
    tls: &Arc<ClientConfig>,
    options: &ClientOptions,
    recorders: &[Option<Recorder>; 2],
) -> Result<([Channel; 2], [Info; 2]), Error> {
    let [mut zero, mut one] = [
        Channel::connect(&addresses[0], tls, options.timeout, recorders[0].as_ref())?,
        Channel::connect(&addresses[1], tls, options.timeout, recorders[1].as_ref())?,
    ];
    let seconds = options.timeout.as_secs();
    zero.send(|out| RequestZero::Info.write(out)).map_err(|error| broken(Party::Zero, error, seconds))?;
    one.send(|out| RequestOne::Info.write(out)).map_err(|error| broken(Party::One, error, seconds))?;
    let infos = [info(Party::Zero, &mut zero, seconds)?, info(Party::One, &mut one, seconds)?];
    agree(&infos, addresses, options.demo_single_host)?;
    Ok(([zero, one], infos))
}

/// Refuses servers that by their own words are not the two that are wanted.
fn agree(infos: &[Info; 2], addresses: &[Address; 2], demo: bool) -> Result<(), Error> {
    for (wanted, (info, address)) in [Party::Zero, Party::One].into_iter().zip(infos.iter().zip(addresses)) {
        if (info.protocol.as_str(), info.version, info.ring_bits) != (PROTOCOL, VERSION, 32) {
            let got = format!("{} {} in a ring of {} bits", info.protocol, info.version, info.ring_bits);
            let wanted_words = format!("{PROTOCOL} {VERSION} in a ring of 32 bits");
            return Err(Error::Protocol { party: wanted, got, wanted: wanted_words });
        }
        let got = if info.party == 0 { Party::Zero } else { Party::One };
        if got != wanted {
            return Err(Error::WrongParty { url: address.url.clone(), wanted, got });
        }
        if info.demo_single_host && !demo {
            return Err(Error::Demonstration { party: wanted });
        }
    }
    if infos[0].instance == infos[1].instance {
        return Err(Error::SameParty { address: addresses[0].url.clone() });
    }
    same_weights(("party 0", &infos[0].weights), ("party 1", &infos[1].weights))
}

fn same_weights(left: (&'static str, &Weights), right: (&'static str, &Weights)) -> Result<(), Error> {
    if left.1 == right.1 {
        return Ok(());
    }
    let words = |weights: &Weights| format!("{} ({})", weights.sha256, weights.quant);
    Err(Error::WeightsDiffer {
        left: left.0,
        left_hash: words(left.1),
        right: right.0,
        right_hash: words(right.1),
    })
}

fn info(party: Party, channel: &mut Channel, seconds: u64) -> Result<Info, Error> {
    match receive(party, channel, Awaited::Control, Vec::new(), seconds)? {
        Reply::Info(info) => Ok(*info),
        other => Err(Error::Violation { party, what: format!("{} in place of info", name(&other)) }),
    }
}

/// One reply; a refusal and a broken connection are errors that name the party.
fn receive(
    party: Party,
    channel: &mut Channel,
    awaited: Awaited,
    room: Vec<u32>,
    seconds: u64,
) -> Result<Reply, Error> {
    match Reply::read(channel.reader(), awaited, room) {
        Ok(Reply::Refused(reason)) => Err(Error::Refused { party, reason }),
        Ok(reply) => Ok(reply),
        Err(FrameError::Io(error)) => Err(broken(party, error, seconds)),
        Err(error) => Err(Error::Violation { party, what: error.to_string() }),
    }
}

fn broken(party: Party, error: io::Error, seconds: u64) -> Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::Late { party, seconds },
        _ => Error::Lost { party, reason: error },
    }
}

fn name(reply: &Reply) -> &'static str {
    match reply {
        Reply::Info(_) => "info",
        Reply::Opened { .. } => "a session",
        Reply::Product { .. } => "a product",
        Reply::Refused(_) => "a refusal",
    }
}

/// Products by two servers, neither of which learns what they are of.
pub struct Client {
    parties: Parties,
    opening: Opening,
    recompute: Recompute,
    stats: Arc<Stats>,
    fingerprint: Fingerprint,
    checks: Vec<Check>,
    shapes: Shapes,
    session: Option<Session>,
    /// What every step asks for, as far as it is known.
    order: Vec<(usize, Rows)>,
    step: Step,
    /// Why nothing more is sent.
    distrust: Option<String>,
    room: Room,
}

/// The step under way.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    tokens: usize,
    wanted: usize,
    /// Where it is in the order.
    cursor: usize,
}

/// Vectors that are used again.
#[derive(Default)]
struct Room {
    share: Vec<u32>,
    answers: [Vec<u32>; 2],
    expected: Vec<Expected>,
    pads: Vec<Zeroizing<Vec<u32>>>,
}

/// One seed, two connections.
struct Session {
    zero: Channel,
    one: Channel,
    pads: Box<dyn Pads>,
    /// Where the pad of the next product to be announced begins.
    announced_to: u64,
    /// Told to party 1 and not yet asked of party 0.
    announced: VecDeque<Draw>,
    /// Pads drawn for the first of those.
    drawn: VecDeque<Zeroizing<Vec<u32>>>,
    positions_left: u64,
}

impl Client {
    /// A client whose seeds come from the operating system. `recompute` is asked only when an answer is wrong.
    pub fn new(parties: Parties, recompute: Recompute) -> Client {
        Client::with_masks(
            parties,
            recompute,
            Box::new(|| {
                let seed = Seed::random()?;
                let masks = Masks::new(&seed);
                Ok((seed, Box::new(masks)))
            }),
        )
    }

    /// The same with seeds and masks of another origin, to see what those would betray.
    pub fn with_masks(parties: Parties, recompute: Recompute, opening: Opening) -> Client {
        Client {
            stats: Arc::clone(&parties.options.stats),
            parties,
            opening,
            recompute,
            fingerprint: Fingerprint::default(),
            checks: Vec::new(),
            shapes: Shapes::default(),
            session: None,
            order: Vec::new(),
            step: Step::default(),
            distrust: None,
            room: Room::default(),
        }
    }

    /// What it costs, readable from elsewhere.
    pub fn stats(&self) -> Arc<Stats> {
        Arc::clone(&self.stats)
    }

    /// To be called when all matrices are loaded: refuses servers with other weights, and opens the session.
    pub fn ready(&mut self) -> Result<(), Error> {
        let (shapes, weights) = self.fingerprint.finish();
        self.shapes = shapes;
        same_weights(("this client", &weights), ("party 0", &self.parties.infos[0].weights))?;
        self.open()
    }

    /// A new session with a new seed.
    fn open(&mut self) -> Result<(), Error> {
        self.session = None;
        let before = self.parties.infos[0].weights.clone();
        if let Some(channels) = self.parties.channels.take() {
            match self.open_over(channels, &before) {
                // The model took longer to load than servers wait for those who connect.
                Err(Error::Lost { .. }) => {}
                result => return result,
            }
        }
        let channels = self.parties.dial()?;
        self.open_over(channels, &before)
    }

    fn open_over(&mut self, [mut zero, mut one]: [Channel; 2], before: &Weights) -> Result<(), Error> {
        // A server that came back may have come back with another model.
        same_weights(("the session before", before), ("party 0", &self.parties.infos[0].weights))?;
        let (seed, pads) = (self.opening)()?;
        let offered = self.parties.infos.iter().map(|info| info.positions_max).min().unwrap_or(0);
        let streamed = STREAM_WORDS / self.shapes.position_words().max(1);
        let positions_max = offered.min(u32::try_from(streamed).unwrap_or(u32::MAX));
        let seconds = self.parties.options.timeout.as_secs();
        zero.send(|out| RequestZero::Open { version: VERSION, positions_max }.write(out))
            .map_err(|error| broken(Party::Zero, error, seconds))?;
        one.send(|out| RequestOne::Open { version: VERSION, positions_max, seed }.write(out))
            .map_err(|error| broken(Party::One, error, seconds))?;
        for (party, channel) in [(Party::Zero, &mut zero), (Party::One, &mut one)] {
            match receive(party, channel, Awaited::Control, Vec::new(), seconds)? {
                Reply::Opened { .. } => {}
                other => {
                    let what = format!("{} in place of a session", name(&other));
                    return Err(Error::Violation { party, what });
                }
            }
        }
        self.stats.session();
        self.session = Some(Session {
            zero,
            one,
            pads,
            announced_to: 0,
            announced: VecDeque::new(),
            drawn: VecDeque::new(),
            positions_left: u64::from(positions_max),
        });
        Ok(())
    }

    /// The rest of the step, to party 1 at once.
    fn announce_step(&mut self) -> Result<(), Error> {
        let Step { tokens, wanted, cursor } = self.step;
        let (mut products, mut work_left) = (Vec::new(), self.shapes.multiplications_max());
        for &(matrix, kind) in self.order.get(cursor..).unwrap_or_default() {
            let rows = if kind == Rows::Tokens { tokens } else { wanted };
            let most = self.shapes.rows_max(matrix);
            products.extend((0..rows).step_by(most).map(|row| (matrix, most.min(rows - row))));
        }
        products.truncate(DRAWS_MAX);
        // What is left out is announced when its turn comes.
        let weights = |matrix: usize| self.shapes.rows(matrix) as u128 * self.shapes.columns(matrix) as u128;
        let fits = |&&(matrix, rows): &&(usize, usize)| {
            let rest = work_left.checked_sub(rows as u128 * weights(matrix));
            work_left = rest.unwrap_or_default();
            rest.is_some()
        };
        let fitting = products.iter().take_while(fits).count();
        self.announce(&products[..fitting])
    }

    fn announce(&mut self, products: &[(usize, usize)]) -> Result<(), Error> {
        let (shapes, seconds) = (&self.shapes, self.parties.options.timeout.as_secs());
        let Some(session) = &mut self.session else { return Ok(()) };
        let mut draws = Vec::with_capacity(products.len());
        for &(matrix, rows) in products {
            let small = |size| u32::try_from(size).expect("bounded by a frame");
            let draw = Draw { counter: session.announced_to, matrix: small(matrix), rows: small(rows) };
            session.announced_to += draw.pad_words(shapes) as u64;
            draws.push(draw);
        }
        if draws.is_empty() {
            return Ok(());
        }
        session.announced.extend(&draws);
        let sent = session.one.send(|out| RequestOne::Linear(draws).write(out));
        sent.map_err(|error| broken(Party::One, error, seconds))
    }

    /// One product of at most a frame's rows, on a new session once if the old one breaks.
    fn product(&mut self, matrix: usize, x: &[i32], out: &mut [i32]) -> Result<(), Error> {
        match self.attempt(matrix, x, out) {
            Err(Error::Lost { .. }) => {
                // The blinded words that were sent stay blinded: the next ones have masks of a new seed.
                self.open()?;
                self.attempt(matrix, x, out)
            }
            result => result,
        }
    }

    fn attempt(&mut self, matrix: usize, x: &[i32], out: &mut [i32]) -> Result<(), Error> {
        let rows = x.len() / self.shapes.columns(matrix);
        if self.session.is_none() {
            self.open()?;
        }
        let awaited = self.session.as_ref().and_then(|session| session.announced.front());
        let is_this = |draw: &Draw| (draw.matrix as usize, draw.rows as usize) == (matrix, rows);
        match awaited {
            Some(draw) if is_this(draw) => {}
            Some(_) => {
                // Something else was announced: its masks are left behind with the whole session.
                self.open()?;
                self.announce(&[(matrix, rows)])?;
            }
            None => self.announce(&[(matrix, rows)])?,
        }
        let Client { session, stats, shapes, room, parties, .. } = self;
        let session = session.as_mut().expect("opened above");
        let draw = session.announced.pop_front().expect("announced above");
        let seconds = parties.options.timeout.as_secs();
        let pad = match session.drawn.pop_front() {
            Some(pad) => pad,
            None => stats.masked(|| session.draw(&draw, shapes, room))?,
        };
        let mut words = std::mem::take(&mut room.share);
        words.clear();
        // A negative number is its residue mod 2^32.
        words.extend(x.iter().zip(pad.iter()).map(|(&x, &pad)| x.cast_unsigned().wrapping_sub(pad)));
        let share = Share { draw, words };
        let request = RequestZero::Linear(share);
        session.zero.send(|out| request.write(out)).map_err(|error| broken(Party::Zero, error, seconds))?;
        if let RequestZero::Linear(share) = request {
            room.share = share.words;
        }
        // While party 0 computes: the next product's masks.
        if let Some(next) = session.announced.front().copied()
            && session.drawn.is_empty()
        {
            let pad = stats.masked(|| session.draw(&next, shapes, room))?;
            session.drawn.push_back(pad);
        }
        // And what its answer has to be.
        let check = &self.checks[matrix];
        let expected = &mut room.expected;
        expected.clear();
        stats.checked(|| expected.extend(x.chunks_exact(shapes.columns(matrix)).map(|x| check.expect(x))));
        let awaited = Awaited::Product { words: draw.answer_words(shapes) };
        let [room0, room1] = std::mem::take(&mut room.answers);
        let answer = |party: Party, channel: &mut Channel, room| {
            let reply =
                stats.waited(usize::from(party.number()), || receive(party, channel, awaited, room, seconds));
            let (sent, received) = channel.take_counts();
            stats.sent(usize::from(party.number()), sent);
            stats.received(usize::from(party.number()), received);
            match reply? {
                Reply::Product { counter, words } if counter == draw.counter => Ok(words),
                Reply::Product { counter, .. } => {
                    let what = format!("a product with counter {counter} in place of {}", draw.counter);
                    Err(Error::Violation { party, what })
                }
                other => {
                    Err(Error::Violation { party, what: format!("{} in place of a product", name(&other)) })
                }
            }
        };
        let answer1 = answer(Party::One, &mut session.one, room1)?;
        let answer0 = answer(Party::Zero, &mut session.zero, room0)?;
        stats.round();
        for ((out, &zero), &one) in out.iter_mut().zip(&answer0).zip(&answer1) {
            *out = zero.wrapping_add(one).cast_signed();
        }
        let mut rows = room.expected.iter().zip(out.chunks_exact(shapes.rows(matrix)));
        let holds = stats.checked(|| rows.all(|(expected, y)| check.holds(expected, y)));
        if !holds {
            out.fill(0);
            return Err(self.blame(matrix, x, &pad, [&answer0, &answer1]));
        }
        self.room.answers = [answer0, answer1];
        self.room.pads.push(pad);
        Ok(())
    }

    /// Who was wrong, by the client's own computation from its own file.
    fn blame(&self, number: usize, x: &[i32], pad: &[u32], answers: [&[u32]; 2]) -> Error {
        let matrix = match (self.recompute)(number) {
            Ok(matrix) => matrix,
            Err(error) => return error,
        };
        let share: Vec<u32> =
            x.iter().zip(pad).map(|(&x, &pad)| x.cast_unsigned().wrapping_sub(pad)).collect();
        let right = |words: &[u32], answer: &[u32]| {
            let dot = |row: &[i8], x: &[u32]| {
                let terms = row.iter().zip(x).map(|(&w, &x)| i32::from(w).cast_unsigned().wrapping_mul(x));
                terms.fold(0_u32, u32::wrapping_add)
            };
            let rows = words.chunks_exact(matrix.columns);
            let product =
                rows.flat_map(|x| matrix.weights.chunks_exact(matrix.columns).map(move |row| dot(row, x)));
            product.eq(answer.iter().copied())
        };
        match (right(&share, answers[0]), right(pad, answers[1])) {
            (true, true) => Error::Unexplained { matrix: number },
            (false, true) => Error::Wrong { liars: "0", matrix: number },
            (true, false) => Error::Wrong { liars: "1", matrix: number },
            (false, false) => Error::Wrong { liars: "0 and 1", matrix: number },
        }
    }

    /// Remembers why a server cannot be trusted any more; what was under way is given up.
    fn settle<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &result {
            self.session = None;
            if error.is_integrity() && self.distrust.is_none() {
                self.distrust = Some(error.to_string());
            }
        }
        result
    }

    fn trusted(&self) -> Result<(), Error> {
        self.distrust.as_ref().map_or(Ok(()), |reason| Err(Error::Distrusted(reason.clone())))
    }

    fn begin_step(&mut self, tokens: usize, wanted: usize) -> Result<(), Error> {
        self.step = Step { tokens, wanted, cursor: 0 };
        let open = self.session.as_ref();
        // What an earlier step announced and did not ask for leaves masks that must not be used for anything else.
        let usable = open.is_some_and(|it| it.announced.is_empty() && it.positions_left >= tokens as u64);
        if !usable {
            self.open()?;
        }
        let session = self.session.as_mut().expect("opened above");
        let limit = session.positions_left;
        session.positions_left =
            limit.checked_sub(tokens as u64).ok_or(Error::Positions { wanted: tokens as u64, limit })?;
        match self.announce_step() {
            Err(Error::Lost { .. }) => {
                self.open()?;
                self.announce_step()
            }
            result => result,
        }
    }
}

impl Session {
    fn draw(&mut self, draw: &Draw, shapes: &Shapes, room: &mut Room) -> Result<Zeroizing<Vec<u32>>, Error> {
        let mut pad = room.pads.pop().unwrap_or_default();
        pad.resize(draw.pad_words(shapes), 0);
        let counter = self.pads.draw(&mut pad)?;
        assert_eq!(counter, draw.counter, "pads are drawn in the order in which they were announced");
        Ok(pad)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Whether anybody still listens does not matter: the connections close with this.
        drop(self.zero.send(|out| RequestZero::Close.write(out)));
        drop(self.one.send(|out| RequestOne::Close.write(out)));
    }
}

impl Products for Client {
    fn add(&mut self, matrix: Matrix) -> Result<(), Error> {
        self.fingerprint.add(&matrix);
        self.checks.push(Check::new(&matrix)?);
        Ok(())
    }

    fn begin(&mut self, tokens: usize, wanted: usize) -> Result<(), Error> {
        self.trusted()?;
        let begun = self.begin_step(tokens, wanted);
        self.settle(begun)
    }

    fn multiply(&mut self, matrix: usize, kind: Rows, x: &[i32], out: &mut [i32]) -> Result<(), Error> {
        self.trusted()?;
        let at = self.step.cursor;
        if self.order.get(at) != Some(&(matrix, kind)) {
            self.order.truncate(at);
            self.order.push((matrix, kind));
        }
        self.step.cursor += 1;
        let most = self.shapes.rows_max(matrix);
        let (xs, outs) = (most * self.shapes.columns(matrix), most * self.shapes.rows(matrix));
        for (x, out) in x.chunks(xs).zip(out.chunks_mut(outs)) {
            let done = self.product(matrix, x, out);
            self.settle(done)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_that_call_themselves_a_demonstration_are_refused_unless_that_is_wanted() {
        let info = |party: u8, demo_single_host| Info {
            protocol: PROTOCOL.to_owned(),
            version: VERSION,
            party,
            ring_bits: 32,
            weights: Weights { sha256: "w".to_owned(), quant: "q".to_owned() },
            dims: Shapes::default(),
            positions_max: 1,
            leaks: Vec::new(),
            assumes: Vec::new(),
            demo_single_host,
            instance: party.to_string(),
        };
        let addresses = ["tls://a.example:1", "tls://b.example:1"].map(|url| Address::parse(url).unwrap());
        let check = |demos: [bool; 2], wanted: bool, refused: Option<&str>| {
            let infos = [info(0, demos[0]), info(1, demos[1])];
            let said = agree(&infos, &addresses, wanted).err().map(|error| error.to_string());
            assert_eq!(said.is_some(), refused.is_some(), "{said:?}");
            assert!(said.unwrap_or_default().starts_with(refused.unwrap_or_default()), "{demos:?}");
        };
        check([false, false], false, None);
        check([true, true], true, None);
        check([true, false], false, Some("party 0 says that it is a demonstration on one host"));
        check([false, true], false, Some("party 1 says that it is a demonstration on one host"));
    }

    #[test]
    fn parties_that_are_one_are_refused() {
        let check = |party0: &str, party1: &str, demo: bool, error: &str| {
            let options = ClientOptions { demo_single_host: demo, ..ClientOptions::new(party0, party1) };
            let refused = Parties::connect(options).err().expect("refused").to_string();
            assert!(refused.starts_with(error), "{refused}");
        };
        check(
            "tcp://127.0.0.1:9",
            "tcp://127.0.0.1:9",
            true,
            "party 0 and party 1 are the same server, 127.0.0.1:9",
        );
        check(
            "tcp://127.0.0.1:9",
            "tcp://127.0.0.1:8",
            false,
            "party 0 and party 1 are on one host, 127.0.0.1",
        );
        check(
            "tcp://127.0.0.1:9",
            "tcp://127.0.0.2:9",
            false,
            "party 0 and party 1 are on one host, 127.0.0.1",
        );
    }
}
